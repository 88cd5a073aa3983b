"""Definitions spelled out once more, slowly, so that tests do not believe what they test."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MASK32 = np.uint64(0xFFFFFFFF)


def visible(
    sq: int,
    sk: int,
    causal: str | bool = False,
    window: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """(sq, sk), True where query i sees key j, by loops over both."""
    seen = torch.zeros(sq, sk, dtype=torch.bool)
    left, right = window
    for i in range(sq):
        diagonal = i if causal == "top_left" else i + sk - sq
        for j in range(sk):
            seen[i, j] = (
                (not causal or j <= diagonal)
                and (left is None or j >= diagonal - left)
                and (right is None or j <= diagonal + right)
            )
    return seen


def philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Philox4x32-10 on arrays of counter words (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) & MASK32 for c in counter)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        high0, low0 = p0 >> np.uint64(32), p0 & MASK32
        high1, low1 = p1 >> np.uint64(32), p1 & MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def kept(seed: int, p: float, batch: int, heads: int, sq: int, sk: int) -> Tensor:
    """(batch, heads, sq, sk), True where dropout keeps a weight."""
    b, h, i, j = np.meshgrid(
        np.arange(batch), np.arange(heads), np.arange(sq), np.arange(sk), indexing="ij"
    )
    words = np.stack(philox([i // 2, j // 2, h, b], seed % 2**64))
    word = np.take_along_axis(words, (2 * (i % 2) + j % 2)[None], axis=0)[0]
    return torch.from_numpy(word >= np.uint64(int(p * 2**32)))


def dense_from_packed(packed: Tensor, cu: list[int], b: int) -> Tensor:
    """(1, length, heads, dim) of one sequence."""
    return packed[cu[b] : cu[b + 1]].unsqueeze(0)
