"""A priori error bounds of both backends, from the oracle's terms.

A bound is the sum over sources of size[source] * term[source]; to that of a gradient its own
rounding is added (that of out and lse is among their sources).
u is the unit roundoff of the arithmetic: 2^-24, or 2^-53 when q is float64. A sum of n terms errs
by gamma_n = n u / (1 - n u) at most; from 32 terms on the probabilistic 6 sqrt(n) u holds in
practice (N. Higham, T. Mary, "A new approach to probabilistic rounding error analysis", SISC 2019).
"""

from __future__ import annotations

import math
from typing import Any

from onefold import _core

# What rounding once costs, relative to the result.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Half the smallest subnormal: what rounding a tiny result costs.
TINY = {"float64": 2.0**-1075, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


def gamma(n: int, u: float) -> float:
    """What n roundings in a row can do."""
    return n * u / (1 - n * u) if n < 32 else 6 * math.sqrt(n) * u


def of_operands(dtype: str, device: str = "cpu") -> float:
    """What rounding a weight, or dS, to an operand of a product costs on a CPU: bfloat16 is
    multiplied in pairs where the processor does that fast."""
    pairs = device == "cpu" and _core.instruction_set() == "avx512_bf16"
    return UNIT[dtype] if pairs and dtype == "bfloat16" else 0.0


def sizes(
    dtype: str, head_dim: int, num_keys: int, num_rows: int, device: str = "cpu", of: str = "out"
) -> dict[str, float]:
    """Source -> size, for inputs of `dtype`, in the bounds of "out", "lse" or "gradients"; num_rows
    counts the rows that share a key."""
    if device == "cuda":
        found = _tensor_core_sizes(dtype, head_dim, num_keys, num_rows)
        if of == "gradients" and dtype != "float32":  # weights are handed over in float16
            found["weight"] += UNIT["float16"]
            found["underflow"] = TINY["float16"]
        return found
    u = UNIT["float64" if dtype == "float64" else "float32"]
    rounded = of_operands(dtype, device)
    return {
        "score": gamma(head_dim + 2, u),
        "added": 4 * u,
        "exponent": 2 * u,
        # exp2 to 3 u, its argument's share of a reference up to 1 above the maximum, two products.
        # Rounded weights are divided by their own sum, lse is that of the others.
        "weight": 8 * u + (0.0 if of == "lse" else rounded),
        "sum": 2 * gamma(num_keys, u) + 4 * u,
        "underflow": 2.0**-126 if u > 1e-10 else 2.0**-1022,
        "out": UNIT[dtype],
        "lse": 3 * u,
        "product": gamma(head_dim + 2, u),
        "accumulate": gamma(max(num_keys, num_rows), u) + 4 * u + rounded,
    }


def of_small_ds(name: str, q: Any, k: Any, scale: float | None) -> float:
    """What float16 on a GPU adds to the bound of the gradient `name`: dS is stored in it, and small
    numbers have an absolute error there. torch tensors."""
    if str(q.dtype) != "torch.float16" or name not in ("q", "k") or 0 in (*q.shape, *k.shape):
        return 0.0
    other = k if name == "q" else q
    sums = other.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).flatten(0, -3).sum(0)
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    return TINY["float16"] * scale * sums.max().item() * (q.shape[-2] // k.shape[-2])


def _tensor_core_sizes(dtype: str, head_dim: int, num_keys: int, num_rows: int) -> dict[str, float]:
    """Tensor cores truncate: each step errs by up to twice the roundoff, always downwards. In 16
    bits a step adds 16 elements, so that long sums of one sign grow with the number of steps; for
    float32 three steps add 8 elements, at most eight times before the sum is added with rounding.
    Weights are stored in 16 bits, and float32 products are made of three, good to 2^-21; the
    reference of a row moves at most 16 times, by an inexact factor."""
    u = UNIT["float32"]

    def summed(n: int) -> float:
        if dtype == "float32":
            steps = -(-n // 8)
            return 3 * min(steps, 8) * 2 * u + gamma(steps, u)
        return max(gamma(n, 2 * u), -(-n // 16) * 2 * u)

    split = 2.0**-21 if dtype == "float32" else 0.0
    weight = split or UNIT[dtype]
    product = summed(head_dim + 2) + split
    return {
        "score": product,
        "added": 8 * u,
        "exponent": 2 * u,
        "weight": (16 + 5 * min(num_keys / 16 + 1, 16)) * u,
        "sum": gamma(num_keys, 2 * u) + summed(num_keys) + weight + split + 6 * u,
        "underflow": 2.0**-25 if dtype == "float16" else 2.0**-126,
        "out": UNIT[dtype],
        "lse": 4 * u,
        "product": product,
        "accumulate": summed(max(num_rows, num_keys)) + weight + split + 4 * u,
    }
