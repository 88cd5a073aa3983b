"""The picture of a benchmark: the share of the machine's peak against length, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold._bench.cases import DIRECTIONS, DTYPES, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In drawing order, the last on top: candidate, label, colour.
CANDIDATES = (
    ("plain", "plain attention", "#cc79a7"),
    ("efficient", "PyTorch, memory-efficient", "#cc79a7"),
    ("flash", "PyTorch, flash", "#009e73"),
    ("cudnn", "PyTorch, cuDNN", "#e69f00"),
    ("sdpa", "PyTorch SDPA", "#e69f00"),
    ("onefold", "onefold", "#0072b2"),
)
MARKERS = "os^Dv"
# What all pictures have in common, as matplotlib's parameters.
LOOK = {
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
}
MOST_DIMS = 2  # more lines hide each other
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def drawn_dims(lines: Sequence[Record]) -> list[int]:
    """The head dims with the most lengths, smallest first."""
    lengths: dict[int, set[int]] = {}
    for line in lines:
        lengths.setdefault(line["head_dim"], set()).add(line["seqlen"])
    most = sorted(lengths, key=lambda d: (-len(lengths[d]), d))[:MOST_DIMS]
    return sorted(most)


def draw(records: Sequence[Record], path: Path) -> None:
    """One panel per direction and dtype, of the fewest threads; decoding below them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = [line for line in records if line["kind"] == "bench"]
    fewest = min(line["threads"] for line in lines)
    prefill = [x for x in lines if x["direction"] != "decode" and x["threads"] == fewest]
    decoding = [x for x in lines if x["direction"] == "decode"]
    directions = [d for d in DIRECTIONS if any(x["direction"] == d for x in prefill)]
    dtypes = [d for d in DTYPES if any(x["dtype"] == d for x in prefill)]
    look = {
        "font.size": 11,
        "axes.titlesize": 12,
        **LOOK,
    }
    rows = len(directions) + bool(decoding)
    with rc_context(look):
        figure = Figure(figsize=(max(8, 4 * len(dtypes)), 3.4 * rows), layout="constrained")
        grid = figure.add_gridspec(rows, max(1, len(dtypes)))
        for i, direction in enumerate(directions):
            for j, dtype in enumerate(dtypes):
                own = [x for x in prefill if (x["direction"], x["dtype"]) == (direction, dtype)]
                axes = figure.add_subplot(grid[i, j])
                draw_shares(axes, own)
                axes.set_title(f"{direction}, {NAMES[dtype]}")
                if j == 0:
                    axes.set_ylabel("percent of peak")
        if decoding:
            draw_decoding(figure.add_subplot(grid[-1, :]), decoding)
        add_legend(figure, lines, prefill)
        figure.savefig(path, dpi=130)


def draw_shares(axes: Axes, lines: Sequence[Record]) -> None:
    """A line per candidate, mask and head dim."""
    for name, _, color in CANDIDATES:
        for d, marker in zip(drawn_dims(lines), MARKERS, strict=False):
            for causal in (False, True):
                own = [
                    x
                    for x in lines
                    if (x["candidate"], x["head_dim"], x["causal"]) == (name, d, causal)
                ]
                own.sort(key=lambda x: x["seqlen"])
                axes.plot(
                    [x["seqlen"] for x in own],
                    [x["percent_of_probe"] for x in own],
                    color=color,
                    marker=marker,
                    markersize=5,
                    linestyle="--" if causal else "-",
                )
    lengths = sorted({x["seqlen"] for x in lines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(0, max(100, axes.get_ylim()[1]))  # pairs pass what float32 can reach
    axes.set_xlabel("sequence length")


def draw_decoding(axes: Axes, lines: Sequence[Record]) -> None:
    """Bars: the share of what the same threads read, per dtype, heads and number of threads."""

    def key(x: Record) -> tuple[Any, ...]:
        return x["dtype"], x["threads"], x["heads"], x["heads_k"], x["head_dim"], x["seqlen"]

    groups = list(dict.fromkeys(key(x) for x in lines))
    found = [c for c in CANDIDATES if any(x["candidate"] == c[0] for x in lines)][::-1]
    width = 0.8 / len(found)
    for n, (name, _, color) in enumerate(found):
        own = {key(x): x["percent_of_probe"] for x in lines if x["candidate"] == name}
        axes.bar(
            [i + (n + 0.5) * width - 0.4 for i, group in enumerate(groups) if group in own],
            [own[group] for group in groups if group in own],
            width,
            color=color,
        )
    labels = [f"{h}/{h_k}\n{NAMES[dtype]}\n{t} thr" for dtype, t, h, h_k, _, _ in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=8)
    axes.grid(visible=False, axis="x")
    axes.axhline(100, color="#999999", linewidth=1)
    axes.set_ylabel("percent of reading")
    sizes = {f", D {d}, {n} keys" for *_, d, n in groups}
    axes.set_title("decode" + (sizes.pop() if len(sizes) == 1 else ""))


def add_legend(figure: Figure, lines: Sequence[Record], prefill: Sequence[Record]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, linewidth=3, label=label)
        for name, label, color in reversed(CANDIDATES)
        if any(x["candidate"] == name for x in lines)
    ]
    if prefill:
        for d, marker in zip(drawn_dims(prefill), MARKERS, strict=False):
            handles.append(
                Line2D([], [], color="#444444", marker=marker, linestyle="", label=f"D {d}")
            )
        for label, style in (("full", "-"), ("causal", "--")):
            handles.append(Line2D([], [], color="#444444", linestyle=style, label=label))
    ncols = len(handles) if figure.get_figwidth() > 10 else 4
    figure.legend(handles=handles, loc="outside upper center", ncols=ncols, frameon=False)
