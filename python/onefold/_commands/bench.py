"""`onefold bench`: time and error of attention beside what PyTorch has, on the CPU or a GPU.

Candidates are timed in turn within every round, so that a slow second of the machine hits them all,
and between rounds stands a probe of what the machine can do: on the CPU the float32 multiply-adds
of the same threads or, for decoding, their reading of memory; on a GPU the matrix product. A line
holds the median round. FLOP/s counts useful work: 4 D per visible pair and head forward, 10 D
backward (the recomputed scores included), whatever a candidate really does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onefold import __version__, _core
from onefold._bench import cases
from onefold._bench.cases import DIRECTIONS, DTYPES, Case, Record
from onefold._commands import plots

CPU_CANDIDATES = ("onefold", "sdpa", "plain")
# On a GPU torch has several: FlashAttention-2, cuDNN's, the memory-efficient one.
CUDA_CANDIDATES = ("onefold", "flash", "cudnn", "efficient")
LONGEST_PLAIN = 512  # beyond, it takes most of the time and only says that it is slow
ROUNDS, ROUNDS_OF_FULL_SET = 7, 5


def heads_of(text: str) -> tuple[int, int]:
    """ "32/8": 32 query heads share 8; "8": no sharing."""
    heads, _, shared = text.partition("/")
    h, h_k = int(heads), int(shared or heads)
    if h < 1 or h_k < 1 or h % h_k:
        raise argparse.ArgumentTypeError(f"'{text}' is no H or H/G with H a multiple of G")
    return h, h_k


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--full",
        action="store_true",
        help="CPU: all that docs/cpu.md reports, in about ten minutes on a quiet machine; "
        "--dtype, --head-dim, --seqlen, --threads, --direction and --mask pick from it",
    )
    add("--dtype", nargs="+", choices=DTYPES, help="default: float32; on a GPU bfloat16")
    add("--head-dim", nargs="+", type=int, metavar="D", help="default: 64 128; on a GPU also 256")
    add(
        "--seqlen",
        nargs="+",
        type=int,
        metavar="N",
        help="default: powers of two from 512 to 4096, on a GPU to 16384; decoding, 8192 keys",
    )
    add("--threads", nargs="+", type=int, metavar="T", help="default: 1; CPU only")
    add(
        "--direction",
        nargs="+",
        choices=DIRECTIONS,
        help="default: all; on a GPU there is no decode",
    )
    add("--mask", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    add("--batch", type=int, help="default: 1; on a GPU what makes 16384 tokens")
    add(
        "--heads",
        nargs="+",
        type=heads_of,
        metavar="H[/G]",
        help="query heads, and how many key heads they share; default: 8192 / N from 2 to 8, "
        "decoding 32/8 8/8 64/8, on a GPU 2048 / D",
    )
    add("--rounds", type=int, help=f"default: {ROUNDS}, with --full {ROUNDS_OF_FULL_SET}")
    add(
        "--without",
        nargs="+",
        choices=sorted({*CPU_CANDIDATES, *CUDA_CANDIDATES} - {"onefold"}),
        default=[],
        help="leave these out",
    )
    add(
        "--plain",
        action="store_true",
        help=f"plain attention at every length, not only up to {LONGEST_PLAIN}",
    )
    add("--out", default="bench-out/bench.jsonl", help="JSON lines (default: %(default)s)")
    add("--plot", action="store_true", help="draw the picture too, beside the JSON lines")
    add("--show", metavar="LINES", help="measure nothing: print the tables of these JSON lines")


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    if args.device == "cuda":
        return list(cuda_cases(args))
    if args.full:
        return [case for case in cases.full_set() if picked(case, args)]
    return list(cpu_cases(args))


def picked(case: Case, args: argparse.Namespace) -> bool:
    if args.batch or args.heads:
        raise ValueError("--batch and --heads were given with --full: the set has its own")
    wanted = (
        (args.dtype, case.dtype),
        (args.head_dim, case.head_dim),
        (args.seqlen, case.seqlen),
        (args.threads, case.threads),
        (args.direction, case.direction),
        (args.mask, "causal" if case.causal else "full"),
    )
    return all(not some or one in some for some, one in wanted)


def cpu_cases(args: argparse.Namespace) -> Iterator[Case]:
    directions = args.direction or DIRECTIONS
    common = {
        "threads": args.threads or [1],
        "dtypes": args.dtype or ["float32"],
        "batch": args.batch or 1,
    }
    for heads in args.heads or [None]:
        yield from cases.grid(
            **common,
            directions=[name for name in directions if name != "decode"],
            masks=args.mask,
            head_dims=args.head_dim or [64, 128],
            seqlens=args.seqlen or [512, 1024, 2048, 4096],
            heads=heads,
        )
    if "decode" in directions:
        yield from cases.decode_grid(
            **common,
            head_dims=args.head_dim or [128],
            keys=args.seqlen or [cases.DECODE_KEYS],
            heads=args.heads or cases.DECODE_HEADS,
        )


def cuda_cases(args: argparse.Namespace) -> Iterator[Case]:
    given = {"--threads": args.threads, "--full": args.full, "--plain": args.plain}
    given["--direction decode"] = "decode" in (args.direction or ())
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} was given with --device cuda: it belongs to the CPU")
    found = cases.grid(
        threads=[0],
        dtypes=args.dtype or ["bfloat16"],
        directions=args.direction or ["forward", "backward"],
        masks=args.mask,
        head_dims=args.head_dim or [64, 128, 256],
        seqlens=args.seqlen or [1 << n for n in range(9, 15)],
    )
    for c in found:
        for h, h_k in args.heads or [(max(1, 2048 // c.head_dim),) * 2]:
            batch = args.batch or max(1, 16384 // c.seqlen)
            yield Case(
                c.direction, c.causal, c.dtype, batch, h, h_k, c.seqlen, c.head_dim, 0, "cuda"
            )


def candidates(case: Case, args: argparse.Namespace) -> list[str]:
    names = [
        name
        for name in (CUDA_CANDIDATES if case.device == "cuda" else CPU_CANDIDATES)
        if name not in args.without
    ]
    if not args.plain and (case.decode or case.seqlen > LONGEST_PLAIN):
        names = [name for name in names if name != "plain"]
    return names


def commit() -> str:
    """The one this package was built from, with "+" for changes on top, or "unknown"."""
    built = Path(__file__).parent.with_name("commit.txt")
    return built.read_text().strip() if built.exists() else "unknown"


def facts() -> Record:
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


def hold_torch() -> None:
    """With ONEFOLD_BACKEND=avx2 this is a machine of AVX2 for torch and its libraries too, unless
    they are loaded already or told otherwise."""
    if _core.instruction_set() == "avx2" and "torch" not in sys.modules:
        for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
            os.environ.setdefault(name, "avx2" if name.startswith("ATEN") else "AVX2")


def measure_all(
    todo: list[Case], args: argparse.Namespace, keep: Callable[[Record], None], console: Any
) -> None:
    """Every case under a progress bar; each line is kept as soon as it is known."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    if args.device == "cuda":
        from onefold._bench import cuda as device
    else:
        from onefold._bench import cpu as device
    rounds = args.rounds or (ROUNDS_OF_FULL_SET if args.full else ROUNDS)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for case in progress.track(todo, description="bench"):
            for line in device.measure(case, candidates(case, args), rounds):
                keep(line)


def report(records: list[Record], console: Any) -> None:
    """Tables, then a sentence for each comparison."""
    from onefold._bench import tables
    from onefold._bench.attentions import ROWS_CHECKED

    measured = plots.of_kind(records, "bench")
    found = {line["candidate"] for line in measured}
    cuda = any(line["device"] == "cuda" for line in measured)
    names = [name for name in (CUDA_CANDIDATES if cuda else CPU_CANDIDATES) if name in found]
    for table in tables.cuda_tables(records, names) if cuda else tables.cpu_tables(records):
        console.print(table)
    for over in names[1:]:
        for (direction, mask), ratio in tables.speedups(measured, over).items():
            what = direction if direction == "decode" else f"{direction}, {mask}"
            console.print(f"{what}: {ratio:.2f} times as fast as {over} (geometric mean)")
    console.print(
        f"error: out or, backward, dq of the last {ROWS_CHECKED} rows of head 0 against the "
        "float64 oracle, relative to the largest value"
    )


def measured(args: argparse.Namespace, console: Any) -> list[Record]:
    """All lines, written to --out as they come."""
    import torch

    cuda = args.device == "cuda"
    if not cuda:
        from onefold._bench import cpu

        cpu.keep_freed_memory()
    todo = chosen_cases(args)
    if not todo:
        raise ValueError("--full has no case with all that was asked for")
    if cuda and not torch.cuda.is_available():
        raise ValueError("--device is cuda: torch sees no CUDA device here")
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    before = (torch.get_num_threads(), _core.num_threads())
    start = time.monotonic()
    try:
        with path.open("w", encoding="utf-8") as file:

            def keep(line: Record) -> None:
                records.append(line)
                file.write(json.dumps(line) + "\n")
                file.flush()

            keep(facts())
            for line in introduction(todo[0].dtype, console, cuda):
                keep(line)
            measure_all(todo, args, keep, console)
    finally:
        torch.set_num_threads(before[0])
        _core.set_num_threads(before[1])
    cases = f"{len(todo)} case{'' if len(todo) == 1 else 's'}"
    console.print(f"{cases} in {time.monotonic() - start:.0f} s")
    return records


def introduction(dtype: str, console: Any, cuda: bool) -> list[Record]:
    """What is to say before the cells: the machine, what a call costs besides arithmetic."""
    if cuda:
        from onefold._bench import cuda as device

        lines = device.device_facts(dtype)
        sentences = [device.sentence(line) for line in lines]
    else:
        from onefold._bench import cpu

        lines = cpu.host_lines()
        machine = cpu.machine()
        where = "{cpu}, {isa}; torch takes it for {torch_isa}".format(**machine)
        sentences = [where, cpu.host_sentence(lines)]
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)
    return lines


def run(args: argparse.Namespace) -> int:
    """Measures, prints tables, writes JSON lines and, if asked, the picture."""
    from rich.console import Console

    if (args.rounds is not None and args.rounds < 1) or min(args.threads or [1]) < 1:
        raise ValueError("--rounds and --threads are counts: at least 1 is needed")
    hold_torch()
    console = Console()
    path = Path(args.show or args.out)
    records = plots.read_records(path) if args.show else measured(args, console)
    report(records, console)
    if not args.show:
        console.print(f"lines: {path}", soft_wrap=True)
    if args.plot:
        console.print(f"plot: {plots.draw(records, path.with_suffix('.png'))}", soft_wrap=True)
    return 0
