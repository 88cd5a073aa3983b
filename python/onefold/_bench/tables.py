"""The tables that `onefold bench` prints, from its lines. Needs rich, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from onefold._bench import goals
from onefold._bench.cases import Record

SHORT = {"forward": "fwd", "backward": "bwd"}
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def geometric_mean(numbers: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(x) for x in numbers))


def mask_of(line: Record) -> str:
    return "causal" if line["causal"] else "full"


def new_table(title: str, *columns: str) -> Table:
    """Narrow, so that it fits into 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def grouped(lines: Sequence[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """In the order of first appearance."""
    groups: dict[Any, list[Record]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


def text(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def milliseconds(seconds: float) -> str:
    """Three digits."""
    ms = 1e3 * seconds
    return f"{ms:.{max(0, 2 - math.floor(math.log10(ms)))}f}"


def threads_of(line: Record) -> str:
    return f"{line['threads']} thread{'s' if line['threads'] > 1 else ''}"


# ---- the CPU ----


def cpu_tables(records: Sequence[Record]) -> list[Table]:
    """The cells, direction by direction, dtype by dtype; then what they come to."""
    run = goals.Run(records)
    own = [line for line in run.lines if line["candidate"] == "onefold"]
    prefill = [line for line in own if line["direction"] != "decode"]
    groups = grouped(prefill, lambda line: (line["direction"], line["dtype"], line["threads"]))
    tables = [prefill_table(run, lines) for lines in groups.values()]
    if decoding := [line for line in own if line["direction"] == "decode"]:
        tables.append(decode_table(run, decoding))
    return [*tables, summary_table(run, own), missed_table(records)]


def prefill_table(run: goals.Run, lines: Sequence[Record]) -> Table:
    """One direction, dtype and number of threads; masks side by side."""
    first = lines[0]
    one_thread = first["threads"] == 1
    masks = list(dict.fromkeys(mask_of(line) for line in lines))
    others = [n for n in ("sdpa", "plain") if any(run.other(x, candidate=n) for x in lines)]
    columns = ["D", "N", "H"]
    for mask in masks:
        columns += [f"{mask}\nms", "GF\n/s", "%\nFMA"]
        columns += [f"x\n{name}" for name in others]
        columns.append("\nerror" if one_thread else "x 1\nthr")
    title = f"{first['direction']}, {NAMES[first['dtype']]}, {threads_of(first)}"
    table = new_table(title, *columns)
    for (d, n, h), row in grouped(
        lines, lambda x: (x["head_dim"], x["seqlen"], heads_of(x))
    ).items():
        cells = [str(d), str(n), h]
        by_mask = {mask_of(line): line for line in row}
        for mask in masks:
            line = by_mask.get(mask)
            if line is None:
                cells += ["-"] * (4 + len(others))
                continue
            cells += [milliseconds(line["seconds"]), text(line["gflops"])]
            cells.append(text(line["percent_of_probe"]))
            cells += [text(ratio(run, line, name), 2) for name in others]
            last = goals.over_one_thread(run, line)
            cells.append(f"{line['error']:.0e}" if one_thread else text(last, 2))
        table.add_row(*cells)
    return table


def heads_of(line: Record) -> str:
    """batch x query heads / key heads, as far as they differ from 1 and from each other."""
    batch = f"{line['batch']}x" if line["batch"] > 1 else ""
    shared = f"/{line['heads_k']}" if line["heads_k"] != line["heads"] else ""
    return f"{batch}{line['heads']}{shared}"


def ratio(run: goals.Run, line: Record, name: str) -> float | None:
    """How many times as fast as another candidate."""
    other = run.other(line, candidate=name)
    return other and other["seconds"] / line["seconds"]


def decode_table(run: goals.Run, lines: Sequence[Record]) -> Table:
    columns = ("dtype", "threads", "heads", "D", "keys", "us", "GB/s", "% read", "x sdpa", "error")
    table = new_table("decode: one query, reading K and V once", *columns)
    for line in lines:
        table.add_row(
            NAMES[line["dtype"]],
            str(line["threads"]),
            f"{line['heads']}/{line['heads_k']}",
            str(line["head_dim"]),
            str(line["seqlen"]),
            f"{1e6 * line['seconds']:.0f}",
            text(line["gbytes"], 1),
            text(line["percent_of_probe"]),
            text(ratio(run, line, "sdpa"), 1),
            f"{line['error']:.0e}",
        )
    return table


def summary_table(run: goals.Run, lines: Sequence[Record]) -> Table:
    """Geometric means over SDPA, and the range of the shares of the probe."""
    table = new_table(
        "All cells: times as fast as sdpa, and percent of the probe (FMA; decode: reading)",
        "", "cells", "x sdpa\nmean", "\nleast", "% probe\nleast", "\nmedian", "\nmost",
    )  # fmt: skip

    def key(line: Record) -> str:
        mask = "" if line["direction"] == "decode" else f" {mask_of(line)}"
        return f"{line['direction']}{mask}, {NAMES[line['dtype']]}, {threads_of(line)}"

    for name, group in grouped(lines, key).items():
        ratios = [r for line in group if (r := ratio(run, line, "sdpa"))]
        shares = sorted(line["percent_of_probe"] for line in group)
        table.add_row(
            name,
            str(len(group)),
            text(geometric_mean(ratios) if ratios else None, 2),
            text(min(ratios, default=None), 2),
            *(text(x) for x in (shares[0], statistics.median(shares), shares[-1])),
        )
    table.columns[0].justify = "left"
    return table


def missed_table(records: Sequence[Record]) -> Table:
    """The cells below a goal."""
    count, missed = goals.judge(records)
    title = f"Below the goals of docs/cpu.md: {len(missed)} of {count}"
    table = new_table(title, "goal", "case", "D", "N", "H", "is", "needs")
    for one in missed:
        line = one.line
        digits = 1 if one.least >= 20 else 2
        table.add_row(
            one.goal,
            f"{short_case(line)}, {line['threads']} thr",
            str(line["head_dim"]),
            str(line["seqlen"]),
            heads_of(line),
            text(one.value, digits),
            f"{one.least:g}",
        )
    for column in table.columns[:2]:
        column.justify = "left"
    return table


def short_case(line: Record) -> str:
    dtype = NAMES[line["dtype"]]
    if line["direction"] == "decode":
        return dtype
    return f"{SHORT[line['direction']]} {mask_of(line)} {dtype}"


# ---- a GPU ----


def cuda_tables(records: Sequence[Record], names: Sequence[str]) -> list[Table]:
    def key(line: Record) -> tuple[Any, ...]:
        return line["direction"], mask_of(line), line["dtype"]

    lines = [r for r in records if r["kind"] == "bench"]
    tables = []
    for (direction, mask, dtype), group in grouped(lines, key).items():
        table = cuda_table(f"{direction}, {mask}, {dtype}, GPU", names)
        for row in grouped(group, lambda r: (r["head_dim"], r["seqlen"])).values():
            add_cuda_row(table, names, row)
        tables.append(table)
    return tables


def cuda_table(title: str, names: Sequence[str]) -> Table:
    table = new_table(title, "D", "N")
    for name in names:
        table.add_column(f"{name}\nms", justify="right")
        if name == "onefold":  # four candidates leave no room
            for column in ("TFLOP/s", "% GEMM", "error"):
                table.add_column(f"\n{column}", justify="right")
    return table


def add_cuda_row(table: Table, names: Sequence[str], lines: Sequence[Record]) -> None:
    cells = [str(lines[0]["head_dim"]), str(lines[0]["seqlen"])]
    found = {r["candidate"]: r for r in lines}
    for name in names:
        r = found.get(name)
        if r is None:  # it does not do this
            cells += ["-"] * (4 if name == "onefold" else 1)
            continue
        cells.append(f"{1e3 * r['seconds']:.2f}")
        if name == "onefold":
            cells += [f"{r['gflops'] / 1000:.0f}", f"{r['percent_of_probe']:.0f}"]
            cells.append(f"{r['error']:.0e}")
    table.add_row(*cells)


# ---- both ----


def speedups(records: Sequence[Record], over: str) -> dict[tuple[str, str], float]:
    """Geometric mean of `over`'s time over onefold's, for each direction and mask."""
    run = goals.Run(records)
    ratios: dict[tuple[str, str], list[float]] = {}
    for line in run.lines:
        found = ratio(run, line, over) if line["candidate"] == "onefold" else None
        if found is not None:
            ratios.setdefault((line["direction"], mask_of(line)), []).append(found)
    return {where: geometric_mean(found) for where, found in ratios.items()}
