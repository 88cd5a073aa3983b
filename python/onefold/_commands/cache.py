"""`onefold cache`: the compiled kernels on disk.

A kernel is compiled on first use and kept in the folder that ONEFOLD_CACHE_DIR names (default:
onefold in ~/.cache). The variable may name several folders, separated by ':'; all are read and the
first is written, so an exported folder serves machines that share it or have no compiler.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from onefold import _core
from onefold._commands import problems
from onefold._options import DIFFERENTIABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the actions of `onefold cache`."""
    parser.description = (
        "Kernels are compiled on first use and kept in ONEFOLD_CACHE_DIR (default: onefold in "
        "~/.cache), where the least recently used make room beyond 1 GiB."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    entries = actions.add_parser("list", help="what is in the cache, the last used first")
    entries.add_argument(
        "--long", action="store_true", help="with folder names and the compiler's warnings"
    )
    entries.add_argument("--limit", type=int, metavar="N", help="only the N last used")
    export = actions.add_parser("export", help="copy all kernels to another folder")
    export.add_argument("folder", help="made when it is not there")
    prebuild = actions.add_parser(
        "prebuild",
        help="compile the kernels of a list of problems, for GPUs that need not be here",
        usage="onefold cache prebuild [-h] problems --arch CC [CC ...]",
        description=problems.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prebuild.add_argument("problems", help="a file of JSON, or - for standard input")
    prebuild.add_argument(
        "--arch",
        nargs="+",
        type=int,
        required=True,
        metavar="CC",
        help="compute capabilities without the point: 80, 90",
    )
    actions.add_parser("clear", help="delete all kernels; they are compiled again when needed")


def age(seconds: float) -> str:
    """A duration in the largest unit that gives at least 1."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def table(entries: list[dict[str, Any]], *, long: bool, limit: int | None = None) -> str:
    """One line per entry, the last used first, at most `limit`."""
    rows = [("kernel", "target", "NVRTC", "regs", "spills", "compiled in", "KiB", "used")]
    notes = [""]
    in_order = sorted(entries, key=lambda e: (-e["last_used"], e["name"], e["target"]))
    for entry in in_order[:limit]:
        rows.append(
            (
                entry["name"],
                entry["target"],
                entry["nvrtc"],
                str(entry["registers"]),
                str(entry["spill_bytes"]),
                f"{entry['compile_seconds']:.2f} s",
                f"{entry['bytes'] / 1024:.0f}",
                age(time.time() - entry["last_used"]) + " ago",
            )
        )
        notes.append("".join(f"\n    {line}" for line in (entry["folder"], *entry["warnings"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layout = "  ".join(f"{{:{'<' if i < 3 else '>'}{width}}}" for i, width in enumerate(widths))
    lines = (
        layout.format(*row) + (note if long else "") for row, note in zip(rows, notes, strict=True)
    )
    return "\n".join(lines)


def prebuild(asked: list[problems.Asked], archs: list[int]) -> set[str]:
    """Compiles, with as many threads as there are processors; returns the kernels."""
    calls = []
    for arch in archs:
        for problem in asked:
            calls.append((*problem.question, None, False, 10 * arch))
            if problem.backward:
                needs = [problem.question[i] is not None for i in DIFFERENTIABLE]
                calls.append((*problem.question, needs, problem.deterministic, 10 * arch))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {
            kernel for found in pool.map(lambda c: _core.prebuild(*c), calls) for kernel in found
        }


def run(args: argparse.Namespace) -> int:
    """Runs one action."""
    folders = _core.cache_folders()
    if not folders:
        raise ValueError("there is no cache on disk: set ONEFOLD_CACHE_DIR or HOME")
    if args.action == "list":
        if args.limit is not None and args.limit < 1:
            raise ValueError(f"--limit is {args.limit}: at least 1 is needed")
        entries = _core.cache_entries()
        if entries:
            print(table(entries, long=args.long, limit=args.limit))
        if args.limit is not None and args.limit < len(entries):
            print(f"... and {len(entries) - args.limit} more")
        total = sum(entry["bytes"] for entry in entries)
        print(f"{counted(len(entries), 'kernel')}, {total / 2**20:.1f} MiB in {folders[0]}")
        for folder in folders[1:]:
            print(f"also read: {folder}")
    elif args.action == "export":
        try:
            count = _core.cache_export(os.fsencode(args.folder))
        except RuntimeError as error:
            raise OSError(str(error)) from None
        print(f"{count} new in {args.folder}: use it with ONEFOLD_CACHE_DIR={args.folder}")
    elif args.action == "prebuild":
        text = sys.stdin.read() if args.problems == "-" else Path(args.problems).read_text("utf-8")
        asked = problems.read(text)
        try:
            before = len(_core.cache_entries())
            kernels = prebuild(asked, args.arch)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        new = len(_core.cache_entries()) - before
        for kernel in sorted(kernels):
            print(kernel)
        made = counted(new, "new kernel")
        print(f"{counted(len(asked), 'problem')}, {made} in {folders[0]}")
    elif args.action == "clear":
        count = _core.cache_clear()
        print(f"{count} deleted from {folders[0]}")
    return 0
