"""`onefold bench`: time and error of attention on the CPU beside what PyTorch has.

Candidates are timed in turn within every round, so that a slow second of the machine hits them all,
and each round begins with a probe of the float32 multiply-adds that the same threads can do. A line
holds the median round. GFLOP/s counts useful work: 4 D per visible pair and head forward, 10 D
backward (the recomputed scores included), whatever a candidate really does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold import __version__, _core

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
CANDIDATES = ("onefold", "sdpa", "plain")
ROWS_CHECKED = 16  # the last query rows of head 0, against the float64 oracle
MIN_SECONDS = 0.02  # a sample repeats a call until it takes this long
PROBE_SECONDS = 0.03


@dataclass(frozen=True)
class Case:
    """One problem: self-attention of `batch` x `heads` over `seqlen` positions."""

    direction: str
    causal: bool
    dtype: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    threads: int

    @property
    def flop(self) -> float:
        pairs = self.seqlen * (self.seqlen + 1) / 2 if self.causal else self.seqlen**2
        per_pair = 4 if self.direction == "forward" else 10
        return per_pair * self.batch * self.heads * pairs * self.head_dim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128], metavar="D")
    parser.add_argument(
        "--seqlen", nargs="+", type=int, default=[512, 1024, 2048, 4096], metavar="N"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1], metavar="T")
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=("forward", "backward"),
        default=["forward", "backward"],
    )
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument(
        "--without", nargs="+", choices=CANDIDATES[1:], default=[], help="leave these out"
    )
    parser.add_argument(
        "--out", default="bench-out/bench.jsonl", help="JSON lines (default: %(default)s)"
    )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for threads, dtype, direction, mask, head_dim, seqlen in product(
        args.threads, args.dtype, args.direction, args.mask, args.head_dim, args.seqlen
    ):
        yield Case(
            direction, mask == "causal", dtype, args.batch, args.heads, seqlen, head_dim, threads
        )


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


ATTENTIONS = dict(
    zip(CANDIDATES, (onefold_attention, sdpa_attention, plain_attention), strict=True)
)


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
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(case.direction == "backward")
    return Inputs(q, k, v, dout)


def make_call(name: str, case: Case, x: Inputs) -> Callable[[], Any]:
    """What is timed; its result is out, or (dq, dk, dv)."""
    import torch

    attention = ATTENTIONS[name]
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
    return sum(pool.map(_core.fma_probe, [PROBE_SECONDS] * threads))


def error_of(result: Any, case: Case, x: Inputs) -> float:
    """Largest error of the last rows of head 0, out or dq, relative to the largest value there."""
    import onefold

    rows = slice(max(0, case.seqlen - ROWS_CHECKED), case.seqlen)
    head = (slice(0, 1), slice(None), slice(0, 1))
    part = (slice(0, 1), rows, slice(0, 1))
    q, k, v = x.q.detach()[part], x.k.detach()[head], x.v.detach()[head]
    if case.direction == "forward":
        got, want = result, onefold.reference.attention(q, k, v, causal=case.causal)[0]
    else:
        got = result[0]
        want = onefold.reference.gradients(q, k, v, causal=case.causal, dout=x.dout[part]).q
    return ((got.detach()[part].double() - want).abs().max() / want.abs().max()).item()


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
        calls = {name: make_call(name, case, x) for name in names}
        errors = {name: error_of(call(), case, x) for name, call in calls.items()}
        probes: list[float] = []
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            probes.append(probe(pool, case.threads))
            for name in names:
                seconds[name].append(seconds_of(calls[name]))
    peak = statistics.median(probes)
    return [
        {"kind": "bench", "candidate": name}
        | asdict(case)
        | {
            "seconds": statistics.median(seconds[name]),
            "rounds": seconds[name],
            "gflops": case.flop / statistics.median(seconds[name]) / 1e9,
            "probe_gflops": peak / 1e9,
            "percent_of_probe": 100 * case.flop / statistics.median(seconds[name]) / peak,
            "error": errors[name],
        }
        for name in names
    ]


# ---- reporting ----


def facts() -> dict[str, Any]:
    """What makes the lines reproducible."""
    import torch

    here = Path(__file__).resolve().parent
    git = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "kind": "facts",
        "onefold": __version__,
        "commit": git.stdout.strip() if git.returncode == 0 else None,
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
        if over in by_name:
            logs.setdefault(key[:2], []).append(math.log(by_name[over] / by_name["onefold"]))
    return {key: math.exp(statistics.fmean(values)) for key, values in logs.items()}


def group_of(record: dict[str, Any]) -> str:
    """What one table has in common."""
    mask = "causal" if record["causal"] else "full"
    threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
    return f"{record['direction']}, {mask}, {record['dtype']}, {threads}"


def make_table(title: str, names: list[str]) -> Any:
    """Narrow enough for 80 columns."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("D", "N"):
        table.add_column(column, justify="right")
    for name in names:
        table.add_column(f"{name}\nms", justify="right")
        if name == "onefold":
            table.add_column("\nGFLOP/s", justify="right")
            table.add_column("\n% FMA", justify="right")
        table.add_column("\nerror", justify="right")
    return table


def add_row(table: Any, records: list[dict[str, Any]]) -> None:
    cells = [str(records[0]["head_dim"]), str(records[0]["seqlen"])]
    for r in records:
        cells.append(f"{1e3 * r['seconds']:.2f}")
        if r["candidate"] == "onefold":
            cells += [f"{r['gflops']:.0f}", f"{r['percent_of_probe']:.0f}"]
        cells.append(f"{r['error']:.0e}")
    table.add_row(*cells)


def run(args: argparse.Namespace) -> int:
    """Measures, prints tables and writes JSON lines."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    if args.rounds < 1 or min(args.threads) < 1:
        raise ValueError("--rounds and --threads are counts: at least 1 is needed")
    names = [name for name in CANDIDATES if name not in args.without]
    console = Console()
    tables: dict[str, Any] = {}
    todo = list(cases(args))
    before = (torch.get_num_threads(), _core.num_threads())
    records = []
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            for case in progress.track(todo, description="bench"):
                found = measure(case, names, args.rounds)
                title = group_of(found[0])
                add_row(tables.setdefault(title, make_table(title, names)), found)
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
    lines = [facts(), *records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    console.print(f"lines: {path}", soft_wrap=True)
    return 0
