"""Generated combinations of options: every pair of choices occurs, forward and backward.

A failure prints its combination; `pytest 'test_gates_options.py::...[17]' --case-seed=N` repeats
it. `--case-seed=random` draws other combinations.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch

from gates import FLOATS, Case, hold_bounds, normal, wide

NUM_CASES = 80

# Every axis and its choices. What a choice means is in `build`.
CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(FLOATS),
    "heads": ((4, 4), (4, 2), (6, 2), (5, 1)),
    "dims": ((16, 16), (33, 17), (8, 72), (64, 64), (1, 3)),
    "lengths": ((33, 65), (65, 33), (1, 70), (17, 17), (50, 129), (7, 1), (128, 20)),
    "layout": ("dense", "used", "packed", "packed and used"),
    "causal": (False, "bottom_right", "top_left"),
    "window": ((None, None), (5, 0), (0, 9), (20, None), (None, -2), (-3, 40), (7, 7)),
    "scale": (None, 0.0, -0.5, 1.0),
    "softcap": (0.0, 2.0, 30.0),
    "slopes": (None, "heads", "batch"),
    "bias": (None, "full", "keys", "heads", "queries", "one", "batch"),
    "bias_dtype": ("same", "float32", "float64"),
    "mask": (None, "full", "keys", "rows", "blocks"),
    "sinks": (False, True),
    "dropout": (0.0, 0.3, 0.9),
    "strides": ("packed", "head first", "odd rows", "reversed axes"),
    "cotangents": ("both", "dout", "dlse"),
}
BROADCAST = {  # which of (batch, heads, queries, keys) have their own extent
    "full": (1, 1, 1, 1),
    "keys": (1, 0, 0, 1),
    "heads": (0, 1, 1, 1),
    "queries": (1, 1, 1, 0),
    "rows": (0, 0, 1, 1),
    "one": (0, 0, 0, 0),
    "batch": (1, 0, 1, 1),
    "blocks": (0, 1, 1, 1),
}
BATCH = 3

Combination = dict[str, Any]


def all_pairs(rng: random.Random, count: int) -> list[Combination]:
    """At least `count` combinations in which every pair of choices of two axes occurs."""
    names = list(CHOICES)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(CHOICES[names[a]]))
        for y in range(len(CHOICES[names[b]]))
    }

    def covered(row: dict[int, int]) -> set[tuple[int, int, int, int]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)} & missing

    found = []
    while missing or len(found) < count:
        row: dict[int, int] = {}
        if missing:
            a, x, b, y = rng.choice(sorted(missing))
            row = {a: x, b: y}
        rest = [axis for axis in range(len(names)) if axis not in row]
        rng.shuffle(rest)
        for axis in rest:  # each axis in turn takes the choice that covers most
            options = list(range(len(CHOICES[names[axis]])))
            rng.shuffle(options)
            row[axis] = max(options, key=lambda choice: len(covered(row | {axis: choice})))
        missing -= covered(row)
        found.append({names[axis]: CHOICES[names[axis]][row[axis]] for axis in range(len(names))})
    return found


def laid_out(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same values in other memory."""
    if strides == "head first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if strides == "odd rows":
        return torch.cat([x, x[..., :1]], dim=-1)[..., :-1] if x.shape[-1] else x
    if strides == "reversed axes":
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    return x


def build(choice: Combination, seed: int) -> Case:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = FLOATS[choice["dtype"]]
    (hq, hk), (d, dv), (sq, sk) = choice["heads"], choice["dims"], choice["lengths"]
    options: dict[str, Any] = {name: choice[name] for name in ("causal", "window", "scale")}
    options["softcap"] = choice["softcap"]
    packed = choice["layout"].startswith("packed")
    lengths_q = [rng.choice((0, 1, sq // 2, sq)) for _ in range(BATCH)] if packed else [sq] * BATCH
    lengths_k = [rng.choice((0, 1, sk // 2, sk)) for _ in range(BATCH)] if packed else [sk] * BATCH
    if packed:
        lengths_q[0], lengths_k[-1] = sq, sk
        for name, lengths in (("q", lengths_q), ("k", lengths_k)):
            options[f"cu_seqlens_{name}"] = list(itertools.accumulate(lengths, initial=0))
        options |= {"max_seqlen_q": sq, "max_seqlen_k": sk}
        lead_q, lead_k = (sum(lengths_q) + 2,), (sum(lengths_k) + 1,)  # rows of nobody at the end
    else:
        lead_q, lead_k = (BATCH, sq), (BATCH, sk)
    if choice["layout"].endswith("used"):
        options["seqused_q"] = [rng.randint(0, n) for n in lengths_q]
        options["seqused_k"] = [rng.randint(0, n) for n in lengths_k]

    def grid(pattern: str) -> list[int]:
        full = (BATCH, hq, sq, sk)
        return [n if own else 1 for n, own in zip(full, BROADCAST[pattern], strict=True)]

    if choice["slopes"]:
        shape = (hq,) if choice["slopes"] == "heads" else (BATCH, hq)
        options["alibi_slopes"] = (normal(generator, *shape) / 8).to(wide(dtype))
    if choice["bias"]:
        bias = normal(generator, *grid(choice["bias"]))
        if choice["bias"] in ("full", "heads"):
            bias[torch.rand(bias.shape, generator=generator) < 0.1] = -torch.inf
        options["bias"] = bias.to(FLOATS.get(choice["bias_dtype"], dtype))
    if choice["mask"] == "blocks":
        coarse = torch.rand(1, hq, -(-sq // 16), -(-sk // 16), generator=generator) < 0.5
        fine = coarse.repeat_interleave(16, 2).repeat_interleave(16, 3)
        options["mask"] = fine[:, :, :sq, :sk]
    elif choice["mask"]:
        options["mask"] = torch.rand(grid(choice["mask"]), generator=generator) < 0.7
    if choice["sinks"]:
        options["sinks"] = normal(generator, hq).to(wide(dtype))
    if choice["dropout"]:
        options |= {"dropout_p": choice["dropout"], "seed": rng.getrandbits(64)}

    def rows(lead: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
        return laid_out(normal(generator, *lead, heads, dim).to(dtype), choice["strides"])

    q, k, v, dout = (
        rows(lead_q, hq, d),
        rows(lead_k, hk, d),
        rows(lead_k, hk, dv),
        rows(lead_q, hq, dv),
    )
    lse_shape = (hq, *lead_q) if packed else (BATCH, hq, sq)
    dlse = normal(generator, *lse_shape).to(wide(dtype))
    kinds = choice["cotangents"]
    return Case(
        q,
        k,
        v,
        options,
        None if kinds == "dlse" else dout,
        None if kinds == "dout" else dlse,
        name=", ".join(f"{name}={value}" for name, value in choice.items()),
    )


@functools.lru_cache(maxsize=1)
def combinations_of(seed: int) -> list[Combination]:
    return all_pairs(random.Random(seed), NUM_CASES)


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_out_lse_and_gradients_stay_within_their_bounds(index, device, request):
    seed = request.config.case_seed
    case = build(combinations_of(seed)[index], 1000 * seed + index)
    try:
        hold_bounds(case, device, deterministic=index % 2 == 1)
    except Exception as error:
        line = f"python -m pytest '{request.node.nodeid}' --case-seed={seed}"
        raise AssertionError(f"{error}\nreproduce with: {line}") from error


def test_the_pairs_fit_into_the_number_of_cases(request):
    assert len(combinations_of(request.config.case_seed)) == NUM_CASES


@pytest.mark.parametrize("seed", [0, 1])
def test_the_generator_covers_every_pair_and_repeats_itself(seed):
    found = all_pairs(random.Random(seed), 0)
    for a, b in itertools.combinations(CHOICES, 2):
        pairs = {(row[a], row[b]) for row in found}
        assert len(pairs) == len(CHOICES[a]) * len(CHOICES[b]), (a, b)
    assert found == all_pairs(random.Random(seed), 0)
