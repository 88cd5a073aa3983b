"""Draws the pictures of `onefold demo` and `onefold bench` from their JSON lines; `onefold plot`
draws them again.

Needs matplotlib but not PyTorch: a picture can be drawn where nothing can be trained.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]  # one JSON line; "kind" says what else is in it

DEMO_PICTURE = "onefold-demo.png"


@dataclass(frozen=True)
class Style:
    """How an attention is drawn in every panel, told apart by more than colour."""

    label: str
    color: str
    marker: str
    loss_width: float  # the three loss curves lie on each other: wide below, narrow on top


# In drawing order, the last on top.
STYLES = {
    "plain": Style("plain attention", "#cc79a7", "s", 5.5),
    "sdpa": Style("PyTorch SDPA", "#e69f00", "^", 3.2),
    "onefold": Style("onefold", "#0072b2", "o", 1.2),
}


class UsageError(ValueError):
    """Something the user asked for that cannot be done; the text is the sentence to print."""


def picture_path(out: str | None, default: str) -> Path:
    """What --out means: a .png file, or a folder that gets `default`; None is this folder."""
    path = Path(out or ".")
    if path.suffix and not path.is_dir():
        if path.suffix.lower() != ".png":
            raise UsageError(f"--out is {out}: a picture is a .png file, or name a folder for it")
        folder = path.parent
    else:
        folder, path = path, path / default
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out is {out}: {folder} cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out is {out or folder}: {folder} cannot be written to")
    return path


def write_records(path: Path, records: Sequence[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """The JSON lines of `path`, each an object with a "kind"."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"{path} cannot be read: {reason}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["kind"]
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f'line {number} of {path} is no JSON object with a "kind", as onefold demo and '
                "bench write"
            ) from error
        records.append(record)
    return records


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each `width` neighbours, so the result is `width` - 1 shorter."""
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


def draw_losses(axes: Axes, records: Sequence[Record]) -> None:
    losses = of_kind(records, "loss")
    width = max(1, min(10, len(losses) // 10))
    for name, style in STYLES.items():
        means = running_mean([record[name] for record in losses], width)
        axes.plot(
            range(width, width + len(means)),
            means,
            color=style.color,
            linewidth=style.loss_width,
            solid_capstyle="round",
        )
    axes.set_title("Training loss")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per character")


def draw_sweep(axes: Axes, records: Sequence[Record], kind: str, field: str, unit: float) -> None:
    """`field` / `unit` of the records of `kind` against sequence length, both axes logarithmic."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    points = [record for record in of_kind(records, kind) if record[field] is not None]
    for name, style in STYLES.items():
        own = [record for record in points if record["attention"] == name]
        axes.plot(
            [record["seqlen"] for record in own],
            [record[field] / unit for record in own],
            color=style.color,
            marker=style.marker,
            markersize=6,
            linewidth=2,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({record["seqlen"] for record in points})
    axes.set_xticks(lengths, [f"{length}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequence length")


def draw_demo(records: Sequence[Record], path: Path) -> None:
    """Three panels: loss, time and peak memory; written to `path`."""
    # A Figure of its own needs no display and leaves the caller's pyplot alone.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from onefold._bench.picture import LOOK

    look = {
        "font.size": 12,
        "axes.titlesize": 13,
        **LOOK,
    }
    with rc_context(look):
        figure = Figure(figsize=(12, 4), layout="constrained")
        loss, seconds, memory = figure.subplots(1, 3)
        draw_losses(loss, records)
        draw_sweep(seconds, records, "time", "seconds", 1e-3)
        seconds.set_title("Time")
        seconds.set_ylabel("ms, forward + backward")
        draw_sweep(memory, records, "memory", "bytes", 1e6)
        memory.set_title("Peak memory")
        memory.set_ylabel("MB, forward + backward")
        figure.get_layout_engine().set(wspace=0.06)
        handles = [
            Line2D([], [], color=style.color, marker=style.marker, lw=2.5, label=style.label)
            for style in reversed(STYLES.values())
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(path, dpi=150)


def draw(records: Sequence[Record], path: Path) -> Path:
    """The picture of whichever command wrote the records."""
    if of_kind(records, "demo"):
        draw_demo(records, path)
    else:
        from onefold._bench import picture

        picture.draw(records, path)
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lines",
        nargs="?",
        default=str(Path(DEMO_PICTURE).with_suffix(".jsonl")),
        help="the JSON lines that onefold demo or bench saved (default: %(default)s)",
    )
    parser.add_argument(
        "--out", help="the picture, a .png file or a folder (default: beside LINES)"
    )


def run(args: argparse.Namespace) -> int:
    """Draws the picture of args.lines again; returns the exit status."""
    try:
        lines = Path(args.lines)
        records = read_records(lines)
        if not (of_kind(records, "demo") or of_kind(records, "bench")):
            raise UsageError(
                f"{lines} was not written by onefold demo or bench, and nothing else has a plot"
            )
        out = args.out or str(lines.with_suffix(".png"))
        path = picture_path(out, lines.with_suffix(".png").name)
        draw(records, path)
    except ModuleNotFoundError as error:
        print(f"onefold plot: {error.name} is missing: pip install {error.name}", file=sys.stderr)
        return 2
    except UsageError as error:
        print(f"onefold plot: {error}", file=sys.stderr)
        return 2
    print(f"plot: {path}")
    return 0
