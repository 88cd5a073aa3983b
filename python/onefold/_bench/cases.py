"""The problems that `onefold bench` measures, and a line of its results. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

Record = dict[str, Any]  # one JSON line; "kind" says what else is in it

DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = ("forward", "backward", "decode")
SIZE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DECODE_HEADS = ((32, 8), (8, 8), (64, 8))
DECODE_KEYS = 8192


@dataclass(frozen=True)
class Case:
    """One problem: self-attention of `batch` x `heads` over `seqlen` positions, or, decoding, one
    query against so many keys. `heads` share `heads_k`. On a GPU `threads` is 0."""

    direction: str
    causal: bool
    dtype: str
    batch: int
    heads: int
    heads_k: int
    seqlen: int
    head_dim: int
    threads: int
    device: str = "cpu"

    @property
    def decode(self) -> bool:
        return self.direction == "decode"

    @property
    def queries(self) -> int:
        return 1 if self.decode else self.seqlen

    @property
    def flop(self) -> float:
        pairs = self.queries * self.seqlen
        if self.causal:
            pairs = self.seqlen * (self.seqlen + 1) / 2
        per_pair = 10 if self.direction == "backward" else 4
        return per_pair * self.batch * self.heads * pairs * self.head_dim

    @property
    def work(self) -> float:
        """What the probe is measured in: FLOP or, decoding, the bytes of K and V."""
        if not self.decode:
            return self.flop
        numbers = 2 * self.batch * self.heads_k * self.seqlen * self.head_dim
        return numbers * SIZE_BYTES[self.dtype]


def cpu_heads(seqlen: int) -> int:
    """About 8192 tokens x heads: several heads everywhere, and no length takes all the time."""
    return min(8, max(2, 8192 // seqlen))


def grid(
    *,
    threads: Sequence[int] = (1,),
    dtypes: Sequence[str] = ("float32",),
    directions: Sequence[str] = ("forward", "backward"),
    masks: Sequence[str] = ("full", "causal"),
    head_dims: Sequence[int] = (64, 128),
    seqlens: Sequence[int] = (512, 1024, 2048, 4096),
    batch: int = 1,
    heads: tuple[int, int] | None = None,
) -> Iterator[Case]:
    """Every combination, on the CPU."""
    for t, dtype, direction, mask, d, n in product(
        threads, dtypes, directions, masks, head_dims, seqlens
    ):
        h, h_k = heads or (cpu_heads(n),) * 2
        yield Case(direction, mask == "causal", dtype, batch, h, h_k, n, d, t)


def decode_grid(
    *,
    threads: Sequence[int] = (1,),
    dtypes: Sequence[str] = ("float32",),
    head_dims: Sequence[int] = (128,),
    keys: Sequence[int] = (DECODE_KEYS,),
    batch: int = 1,
    heads: Sequence[tuple[int, int]] = DECODE_HEADS,
) -> Iterator[Case]:
    for t, dtype, d, n, (h, h_k) in product(threads, dtypes, head_dims, keys, heads):
        yield Case("decode", False, dtype, batch, h, h_k, n, d, t)


def full_set() -> list[Case]:
    """What the goals of docs/cpu.md are about, and what is around it."""
    lengths = (77, 128, 512, 1024, 2048, 4096)
    return [
        *grid(dtypes=DTYPES, seqlens=lengths),
        *grid(dtypes=DTYPES, head_dims=(72, 96, 256), seqlens=(512, 2048)),
        *grid(threads=(2,), dtypes=DTYPES, seqlens=(128, 1024, 4096)),
        *decode_grid(threads=(1, 2), dtypes=DTYPES),
    ]


def record_of(name: str, case: Case, rounds: Sequence[tuple[float, float]], error: float) -> Record:
    """One line of the results, from the rounds that count: seconds of a call, and what the probe
    of the same round reached in units of `case.work` per second."""
    seconds = statistics.median(seconds for seconds, _ in rounds)
    line: Record = {"kind": "bench", "candidate": name} | asdict(case)
    line |= {
        "seconds": seconds,
        "rounds": [seconds for seconds, _ in rounds],
        "gflops": case.flop / seconds / 1e9,
        "percent_of_probe": statistics.median(100 * case.work / s / peak for s, peak in rounds),
        "error": error,
    }
    peak = statistics.median(peak for _, peak in rounds) / 1e9
    if case.decode:
        return line | {"gbytes": case.work / seconds / 1e9, "probe_gbytes": peak}
    return line | {"probe_gflops": peak}
