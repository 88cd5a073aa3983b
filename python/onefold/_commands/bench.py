"""`onefold bench`: time and error of attention beside what PyTorch has, on the CPU or a GPU.

Candidates are timed in turn within every round, so that a slow second of the machine hits them all,
and each round begins with a probe of what the machine can do: the float32 multiply-adds of the same
threads, or the GPU's matrix product. A line holds the median round. FLOP/s counts useful work: 4 D
per visible pair and head forward, 10 D backward (the recomputed scores included), whatever a
candidate really does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold import __version__, _core
from onefold._commands import bench_cuda

if TYPE_CHECKING:
    from torch import Tensor

    Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

DTYPES = ("float32", "bfloat16", "float16")
CPU_CANDIDATES = ("onefold", "sdpa", "plain")
# On a GPU torch has several: FlashAttention-2, cuDNN's, the memory-efficient one.
CUDA_CANDIDATES = ("onefold", "flash", "cudnn", "efficient")
ROWS_CHECKED = 16  # the last query rows of head 0, against the float64 oracle
MIN_SECONDS = 0.02  # a sample repeats a call until it takes this long
PROBE_SECONDS = 0.03


@dataclass(frozen=True)
class Case:
    """One problem: self-attention of `batch` x `heads` over `seqlen` positions. On a GPU `threads`
    is 0."""

    direction: str
    causal: bool
    dtype: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    threads: int
    device: str = "cpu"

    @property
    def flop(self) -> float:
        pairs = self.seqlen * (self.seqlen + 1) / 2 if self.causal else self.seqlen**2
        per_pair = 4 if self.direction == "forward" else 10
        return per_pair * self.batch * self.heads * pairs * self.head_dim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, help="default: float32; on a GPU bfloat16"
    )
    parser.add_argument(
        "--head-dim", nargs="+", type=int, metavar="D", help="default: 64 128; on a GPU also 256"
    )
    parser.add_argument(
        "--seqlen",
        nargs="+",
        type=int,
        metavar="N",
        help="default: powers of two from 512 to 4096; on a GPU to 16384",
    )
    parser.add_argument("--threads", nargs="+", type=int, metavar="T", help="default: 1; CPU only")
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=("forward", "backward"),
        default=["forward", "backward"],
    )
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--batch", type=int, help="default: 1; on a GPU what makes 16384 tokens")
    parser.add_argument("--heads", type=int, help="default: 4; on a GPU 2048 / D")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument(
        "--without",
        nargs="+",
        choices=sorted({*CPU_CANDIDATES, *CUDA_CANDIDATES} - {"onefold"}),
        default=[],
        help="leave these out",
    )
    parser.add_argument(
        "--out", default="bench-out/bench.jsonl", help="JSON lines (default: %(default)s)"
    )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    cuda = args.device == "cuda"
    if cuda and args.threads:
        raise ValueError("--threads was given with --device cuda: it belongs to the CPU")
    for threads, dtype, direction, mask, head_dim, seqlen in product(
        [0] if cuda else args.threads or [1],
        args.dtype or ["bfloat16" if cuda else "float32"],
        args.direction,
        args.mask,
        args.head_dim or ([64, 128, 256] if cuda else [64, 128]),
        args.seqlen or [1 << n for n in range(9, 15 if cuda else 13)],
    ):
        batch = args.batch or (max(1, 16384 // seqlen) if cuda else 1)
        heads = args.heads or (max(1, 2048 // head_dim) if cuda else 4)
        causal = mask == "causal"
        yield Case(direction, causal, dtype, batch, heads, seqlen, head_dim, threads, args.device)


# ---- the candidates: (B, S, H, D) in, (B, S, H, D) out ----


def onefold_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    import onefold

    return onefold.attention(q, k, v, causal=causal)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=causal).transpose(1, 2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


ATTENTIONS = {"onefold": onefold_attention, "sdpa": sdpa_attention, "plain": plain_attention}


# ---- measuring ----


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_inputs(case: Case) -> Inputs:
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (
        torch.randn(shape, generator=generator).to(dtype).to(case.device) for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_(case.direction == "backward")
    return Inputs(q, k, v, dout)


def make_call(attention: Attention, case: Case, x: Inputs) -> Callable[[], Any]:
    """What is timed; its result is out, or (dq, dk, dv)."""
    import torch

    if case.direction == "forward":
        return lambda: attention(x.q, x.k, x.v, case.causal)
    out = attention(x.q, x.k, x.v, case.causal)
    return lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.dout, retain_graph=True)


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call, averaged over as many as a sample needs."""
    calls = 0
    start = time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= MIN_SECONDS:
            return elapsed / calls


def probe(pool: ThreadPoolExecutor, threads: int) -> float:
    """float32 FLOP/s of so many threads at once."""
    return sum(pool.map(_core.fma_rate, [PROBE_SECONDS] * threads))


def error_of(result: Any, case: Case, x: Inputs) -> float:
    """Largest error of the last rows of head 0, out or dq, relative to the largest value there."""
    import onefold

    rows = slice(max(0, case.seqlen - ROWS_CHECKED), case.seqlen)
    head = (slice(0, 1), slice(None), slice(0, 1))
    part = (slice(0, 1), rows, slice(0, 1))
    q, k, v = (y.detach().cpu() for y in (x.q[part], x.k[head], x.v[head]))
    if case.direction == "forward":
        got, want = result, onefold.reference.attention(q, k, v, causal=case.causal)[0]
    else:
        got = result[0]
        dout = x.dout[part].cpu()
        want = onefold.reference.gradients(q, k, v, causal=case.causal, dout=dout).q
    return ((got.detach()[part].cpu().double() - want).abs().max() / want.abs().max()).item()


def measure(case: Case, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """One record per candidate."""
    import torch

    import onefold

    torch.set_num_threads(case.threads)
    onefold.set_num_threads(case.threads)
    x = make_inputs(case)
    with (
        torch.set_grad_enabled(case.direction == "backward"),
        ThreadPoolExecutor(case.threads) as pool,
    ):
        calls = {name: make_call(ATTENTIONS[name], case, x) for name in names}
        errors = {name: error_of(call(), case, x) for name, call in calls.items()}
        probes: list[float] = []
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            probes.append(probe(pool, case.threads))
            for name in names:
                seconds[name].append(seconds_of(calls[name]))
    peak = statistics.median(probes)
    return [record_of(name, case, seconds[name], peak, errors[name]) for name in names]


def record_of(
    name: str, case: Case, rounds: list[float], peak: float, error: float
) -> dict[str, Any]:
    """One line of the results. `peak` is the probe's FLOP/s."""
    flops = case.flop / statistics.median(rounds)
    return (
        {"kind": "bench", "candidate": name}
        | asdict(case)
        | {
            "seconds": statistics.median(rounds),
            "rounds": rounds,
            "gflops": flops / 1e9,
            "probe_gflops": peak / 1e9,
            "percent_of_probe": 100 * flops / peak,
            "error": error,
        }
    )


# ---- reporting ----


def commit() -> str:
    """The one this package was built from, with "+" for changes on top, or "unknown"."""
    built = Path(__file__).parent.with_name("commit.txt")
    return built.read_text().strip() if built.exists() else "unknown"


def facts() -> dict[str, Any]:
    """What makes the lines reproducible."""
    import torch

    return {
        "kind": "facts",
        "onefold": __version__,
        "commit": commit(),
        "info": _core.info().splitlines(),
        "torch": torch.__version__,
        "inputs": "standard normal, torch seed 0, (batch, seqlen, heads, head_dim)",
    }


def speedups(records: list[dict[str, Any]], over: str) -> dict[tuple[str, str], float]:
    """Geometric mean of `over`'s time over onefold's, for each direction and mask."""
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in records:
        key = (r["direction"], "causal" if r["causal"] else "full", r["dtype"], r["threads"])
        times.setdefault((*key, r["head_dim"], r["seqlen"]), {})[r["candidate"]] = r["seconds"]
    logs: dict[tuple[str, str], list[float]] = {}
    for key, by_name in times.items():
        if over in by_name and "onefold" in by_name:
            logs.setdefault(key[:2], []).append(math.log(by_name[over] / by_name["onefold"]))
    return {key: math.exp(statistics.fmean(values)) for key, values in logs.items()}


def group_of(record: dict[str, Any]) -> str:
    """What one table has in common."""
    mask = "causal" if record["causal"] else "full"
    threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
    where = threads if record["device"] == "cpu" else "GPU"
    return f"{record['direction']}, {mask}, {record['dtype']}, {where}"


def make_table(title: str, names: list[str], cuda: bool) -> Any:
    """Narrow enough for 80 columns."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("D", "N"):
        table.add_column(column, justify="right")
    for name in names:
        table.add_column(f"{name}\nms", justify="right")
        if name == "onefold":
            table.add_column("\nTFLOP/s" if cuda else "\nGFLOP/s", justify="right")
            table.add_column("\n% GEMM" if cuda else "\n% FMA", justify="right")
        if name == "onefold" or not cuda:  # four candidates leave no room
            table.add_column("\nerror", justify="right")
    return table


def add_row(table: Any, names: list[str], records: list[dict[str, Any]]) -> None:
    cells = [str(records[0]["head_dim"]), str(records[0]["seqlen"])]
    found = {r["candidate"]: r for r in records}
    for name in names:
        r = found.get(name)
        cuda = records[0]["device"] == "cuda"
        shows_error = name == "onefold" or not cuda
        if r is None:  # it does not do this
            cells += ["-", "-"] if shows_error else ["-"]
            continue
        cells.append(f"{1e3 * r['seconds']:.2f}")
        if name == "onefold":
            speed = r["gflops"] / (1000 if cuda else 1)
            cells += [f"{speed:.0f}", f"{r['percent_of_probe']:.0f}"]
        if shows_error:
            cells.append(f"{r['error']:.0e}")
    table.add_row(*cells)


def run(args: argparse.Namespace) -> int:
    """Measures, prints tables and writes JSON lines."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    if args.rounds < 1 or min(args.threads or [1]) < 1:
        raise ValueError("--rounds and --threads are counts: at least 1 is needed")
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise ValueError("--device is cuda: torch sees no CUDA device here")
    every = CUDA_CANDIDATES if cuda else CPU_CANDIDATES
    names = [name for name in every if name not in args.without]
    console = Console()
    tables: dict[str, Any] = {}
    todo = list(cases(args))
    before = (torch.get_num_threads(), _core.num_threads())
    records: list[dict[str, Any]] = []
    lines = [facts()]
    if cuda:
        lines += bench_cuda.device_facts(todo[0].dtype)
        for line in lines[1:]:
            console.print(bench_cuda.sentence(line), soft_wrap=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            for case in progress.track(todo, description="bench"):
                found = (bench_cuda.measure if cuda else measure)(case, names, args.rounds)
                title = group_of(found[0])
                if title not in tables:
                    tables[title] = make_table(title, names, cuda)
                add_row(tables[title], names, found)
                records += found
    finally:
        torch.set_num_threads(before[0])
        _core.set_num_threads(before[1])
    for table in tables.values():
        console.print(table)
    for over in names[1:]:
        for (direction, mask), ratio in speedups(records, over).items():
            console.print(
                f"{direction}, {mask}: {ratio:.2f} times as fast as {over} (geometric mean)"
            )
    console.print(
        f"error: out (forward) or dq (backward) of the last {ROWS_CHECKED} rows of head 0 against "
        "the float64 oracle, relative to the largest value"
    )
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines += records
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    console.print(f"lines: {path}", soft_wrap=True)
    return 0
