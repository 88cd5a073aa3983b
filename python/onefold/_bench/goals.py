"""The goals of docs/cpu.md, and which lines of a run miss them. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onefold._bench.cases import Record

KEY = ("direction", "causal", "dtype", "batch", "heads", "heads_k", "seqlen", "head_dim", "threads")


class Run:
    """The lines of one run, by candidate and case."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.lines = [r for r in records if r["kind"] == "bench"]
        self._found = {(r["candidate"], *(r[name] for name in KEY)): r for r in self.lines}

    def other(self, line: Record, **changes: object) -> Record | None:
        """The line that differs from this one so much, if it was measured."""
        changed = line | changes
        return self._found.get((changed["candidate"], *(changed[name] for name in KEY)))


def percent_of_probe(run: Run, line: Record) -> float:
    return line["percent_of_probe"]


def over_sdpa(run: Run, line: Record) -> float | None:
    sdpa = run.other(line, candidate="sdpa")
    return sdpa and sdpa["seconds"] / line["seconds"]


def over_one_thread(run: Run, line: Record) -> float | None:
    """Of the same rounds; in older runs, of a line measured at another moment."""
    if "over_one_thread" in line:
        return line["over_one_thread"]
    one = run.other(line, threads=1)
    return one and one["seconds"] / line["seconds"]


def of_float32(run: Run, line: Record) -> float | None:
    """Its share of the probe, as percent of what float32 has."""
    wide = run.other(line, dtype="float32")
    return wide and 100 * line["percent_of_probe"] / wide["percent_of_probe"]


@dataclass(frozen=True)
class Goal:
    of: str
    least: dict[str, float]  # by instruction set; "" for all others
    value: Callable[[Run, Record], float | None]
    applies: Callable[[Record], bool]


def _prefill(line: Record, direction: str, causal: bool, shortest: int, end: float) -> bool:
    """Of one thread and the head dims that everybody uses."""
    return (
        (line["direction"], line["causal"], line["threads"]) == (direction, causal, 1)
        and line["head_dim"] in (64, 128)
        and shortest <= line["seqlen"] < end
    )


def _share(what: str, avx512: float, avx2: float, *where: object) -> Goal:
    least = {"avx512_bf16": avx512, "avx512": avx512, "avx2": avx2}
    return Goal(f"% FMA, {what}", least, percent_of_probe, lambda line: _prefill(line, *where))


_ANY = float("inf")
GOALS = (
    _share("fwd from 1024", 85, 80, "forward", False, 1024, _ANY),
    _share("fwd at 512", 75, 70, "forward", False, 512, 1024),
    _share("causal fwd from 2048", 80, 75, "forward", True, 2048, _ANY),
    _share("bwd from 1024", 80, 75, "backward", False, 1024, _ANY),
    _share("causal bwd from 2048", 80, 75, "backward", True, 2048, _ANY),
    Goal(
        "% of fp32's share",
        {"": 95},
        of_float32,
        lambda line: (
            line["dtype"] != "float32"
            and line["direction"] != "decode"
            and line["threads"] == 1
            and line["seqlen"] >= 512
        ),
    ),
    Goal(
        "x SDPA, 8 heads of 128",
        {"": 1.5},
        over_sdpa,
        lambda line: (
            line["direction"] != "decode"
            and line["seqlen"] == 128
            and line["batch"] * line["heads"] == 8
        ),
    ),
    Goal(
        "x SDPA, fwd",
        {"": 1.3},
        over_sdpa,
        lambda line: line["direction"] == "forward" and not line["causal"],
    ),
    Goal(
        "x SDPA, causal fwd",
        {"": 1.5},
        over_sdpa,
        lambda line: line["direction"] == "forward" and line["causal"],
    ),
    Goal(
        "x SDPA, bf16 bwd",
        {"": 6},
        over_sdpa,
        lambda line: line["direction"] == "backward" and line["dtype"] == "bfloat16",
    ),
    Goal(
        "x SDPA, decode",
        {"": 5},
        over_sdpa,
        lambda line: line["direction"] == "decode" and line["dtype"] == "float32",
    ),
    Goal(
        "x SDPA, 16-bit decode",
        {"": 15},
        over_sdpa,
        lambda line: line["direction"] == "decode" and line["dtype"] != "float32",
    ),
    Goal(
        "% of reading, decode",
        {"": 85},
        percent_of_probe,
        lambda line: line["direction"] == "decode",
    ),
    Goal(
        "x one thread",
        {"": 1.9},
        over_one_thread,
        lambda line: (
            line["threads"] == 2 and line["direction"] != "decode" and line["seqlen"] >= 1024
        ),
    ),
)


@dataclass(frozen=True)
class Missed:
    goal: str
    least: float
    value: float
    line: Record


def judge(records: Sequence[Record]) -> tuple[int, list[Missed]]:
    """How many times a goal applied to a line of onefold, and where it was missed."""
    run = Run(records)
    found = list(_judged(run))
    return len(found), [one for one in found if one.value < one.least]


def _judged(run: Run) -> Iterator[Missed]:
    for goal in GOALS:
        for line in run.lines:
            if line["candidate"] != "onefold" or not goal.applies(line):
                continue
            least = goal.least.get(line["isa"], goal.least.get(""))
            value = goal.value(run, line)
            if least is not None and value is not None:
                yield Missed(goal.of, least, value, line)
