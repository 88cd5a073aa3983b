"""The edge-case contract, one test per line: rows that see nothing, one key, NaN and infinities,
scores beyond every range, scales and caps at their ends."""

from __future__ import annotations

import math

import pytest
import torch

import onefold
from draws import INF, NAN, seeded
from gates import (
    FLOATS,
    UNIT,
    Case,
    assert_same_bits,
    bounds,
    hold_bounds,
    make_case,
    normal,
    run,
    same_bits,
    wide,
)


def tensors(dtype: torch.dtype, sq: int, sk: int, heads: int = 2, d: int = 16, draw: int = 0):
    """q, k, v, dout of batch 2."""
    g = seeded(draw)
    return [normal(g, 2, n, heads, d).to(dtype) for n in (sq, sk, sk, sq)]


def others(found, rows: list[int]):
    """out and lse of the query rows that are not listed."""
    kept = [i for i in range(found.out.shape[1]) if i not in rows]
    return found.out[:, kept], found.lse[:, :, kept]


# ---- rows that see nothing ----


@pytest.mark.parametrize("how", ["bias", "mask", "window", "causal", "used"])
def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity_and_no_gradient(
    how, dtype, device
):
    q, k, v, dout = tensors(dtype, 9, 5)
    bias = torch.zeros(9, 5, dtype=dtype)
    bias[:4] = -INF
    options = {
        "bias": {"bias": bias},
        "mask": {"mask": bias == 0},
        "window": {"window": (None, -5)},  # row i sees keys j <= i + 5 - 9 - 5
        "causal": {"causal": True},  # j <= i - 4
        "used": {"seqused_k": [0, 0]},
    }[how]
    empty = 9 if how in ("used", "window") else 4
    case = Case(q, k, v, options, dout, torch.ones(2, 2, 9, dtype=wide(dtype)))
    found = hold_bounds(case, device)
    assert same_bits(found.out[:, :empty], torch.zeros(2, empty, 2, 16, dtype=dtype))
    assert same_bits(found.lse[:, :, :empty], torch.full((2, 2, empty), -INF, dtype=wide(dtype)))
    assert not found.gradients["q"][:, :empty].any()
    if "bias" in found.gradients:
        assert not found.gradients["bias"][:4].any()


def test_without_keys_lse_is_minus_infinity_or_the_sink(dtype, device):
    q, k, v, dout = tensors(dtype, 3, 0)
    sinks = torch.tensor([0.5, -2.0], dtype=wide(dtype))
    bare = run(Case(q, k, v, {}, dout), device)
    ones = torch.ones(2, 2, 3, dtype=wide(dtype))
    with_sink = hold_bounds(Case(q, k, v, {"sinks": sinks}, dout, ones), device)
    for found in (bare, with_sink):
        assert not found.out.any()
        assert not found.gradients["q"].any()
    assert (bare.lse == -INF).all()
    assert (with_sink.lse - sinks[:, None]).abs().max() <= 8 * UNIT[wide(dtype)]
    # d lse / d sink is 1 for each of 2 x 3 rows
    assert (with_sink.gradients["sinks"] - 6.0).abs().max() <= 6 * 8 * UNIT[wide(dtype)]


def test_one_key_gives_its_value_its_score_and_no_gradient_of_q_and_k(dtype, device):
    q, k, v, dout = tensors(dtype, 7, 1)
    found = run(Case(q, k, v, {"scale": 0.25}, dout), device)
    ulps = 0 if dtype in (torch.float16, torch.bfloat16) else 2
    want = v.expand(2, 7, 2, 16).double()
    assert ((found.out.double() - want).abs() <= 2 * ulps * UNIT[dtype] * want.abs()).all()
    score = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()).squeeze(-1) / 4
    size = torch.einsum("bihd,bjhd->bhij", q.double().abs(), k.double().abs()).squeeze(-1) / 4
    assert ((found.lse.double() - score).abs() <= 24 * UNIT[wide(dtype)] * size).all()
    assert not found.gradients["q"].any()
    assert not found.gradients["k"].any()
    total = dout.double().sum(1, keepdim=True)
    bound = (UNIT[dtype] + 8 * UNIT[wide(dtype)]) * dout.double().abs().sum(1, keepdim=True)
    assert ((found.gradients["v"].double() - total).abs() <= bound).all()


# ---- NaN and infinities ----


def test_one_score_of_plus_infinity_makes_its_row_nan_and_no_other(dtype, device):
    q, k, v, _ = tensors(dtype, 20, 70)
    bias = torch.zeros(20, 70, dtype=dtype)
    plain = run(Case(q, k, v, {"bias": bias}), device)
    bias = bias.clone()
    bias[3, 68] = INF
    found = run(Case(q, k, v, {"bias": bias}), device)
    assert found.out[:, 3].isnan().all()
    assert found.lse[:, :, 3].isnan().all()
    for a, b in zip(others(found, [3]), others(plain, [3]), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nan_in_a_query_makes_its_row_nan_and_no_other(value, dtype, device):
    q, k, v, dout = tensors(dtype, 20, 70)
    plain = run(Case(q, k, v, {}, dout), device)
    q = q.clone()
    q[0, 17, 1, 5] = value
    found = run(Case(q, k, v, {}, dout), device)
    assert found.out[0, 17, 1].isnan().all()
    assert found.lse[0, 1, 17].isnan()
    assert found.gradients["q"][0, 17, 1].isnan().all()
    for got, want in ((found.out, plain.out), (found.gradients["q"], plain.gradients["q"])):
        rest = torch.ones(got.shape[:3], dtype=torch.bool)
        rest[0, 17, 1] = False
        assert_same_bits(got[rest], want[rest])


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("hidden", ["used", "mask", "window", "bias"])
def test_a_key_hidden_from_every_row_has_no_effect_whatever_it_holds(hidden, value, dtype, device):
    q, k, v, dout = tensors(dtype, 20, 70)
    bad = torch.arange(70) >= 61 if hidden in ("used", "window") else torch.arange(70) % 7 == 3
    bias = torch.zeros(70, dtype=dtype).masked_fill(bad, -INF)
    options = {
        "used": {"seqused_k": [61, 61]},
        "mask": {"mask": ~bad},
        "bias": {"bias": bias},
        "window": {"window": (None, -9)},  # keys up to i + 70 - 20 - 9 <= 60
    }[hidden]
    plain = run(Case(q, k, v, options, dout), device)
    k, v = k.clone(), v.clone()
    k[:, bad] = value
    v[:, bad] = value
    found = run(Case(q, k, v, options, dout), device)
    found.gradients.pop("bias", None)
    plain.gradients.pop("bias", None)
    assert_same_bits(found, plain)
    for name in ("k", "v"):
        assert not found.gradients[name][:, bad].any()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("options", ["causal", "mask", "window"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_key_that_some_rows_see_makes_those_rows_nan_and_no_other(
    which, options, value, dtype, device
):
    sq, sk, key = 40, 70, 55
    q, k, v, dout = tensors(dtype, sq, sk, d=24)
    mask = torch.rand(sq, sk, generator=seeded(3)) < 0.6
    options = {"causal": {"causal": True}, "mask": {"mask": mask}, "window": {"window": (4, 2)}}[
        options
    ]
    place = torch.arange(sq) + sk - sq
    sees = {
        "causal": key <= place,
        "mask": mask[:, key],
        "window": (key >= place - 4) & (key <= place + 2),
    }[next(iter(options))]
    assert sees.any()
    assert not sees.all()
    plain = run(Case(q, k, v, options, dout), device)
    changed = {"k": k.clone(), "v": v.clone()}
    changed[which][:, key, :, 7] = value
    found = run(Case(q, changed["k"], changed["v"], options, dout), device)
    assert_same_bits(found.out[:, ~sees], plain.out[:, ~sees], "rows that do not see the key")
    assert_same_bits(found.lse[:, :, ~sees], plain.lse[:, :, ~sees])
    assert_same_bits(found.gradients["q"][:, ~sees], plain.gradients["q"][:, ~sees])
    if which == "v" and value != NAN:
        assert not found.out[:, sees][..., 7].isfinite().any()
    elif which == "v":
        assert found.out[:, sees][..., 7].isnan().all()
    elif value == value:  # an infinite score of the sign that q gives it: +inf is NaN, -inf hides
        positive = (q[:, sees][..., 7].double() * value) > 0
        assert found.out[:, sees][positive].isnan().all()
        assert_same_bits(
            found.lse[:, :, sees].transpose(1, 2)[positive].isnan(), positive[positive]
        )
    else:
        assert found.out[:, sees].isnan().all()
        assert found.lse[:, :, sees].isnan().all()


# ---- scores beyond every range ----


@pytest.mark.parametrize("size", [1e5, 1e7, 1e9, 1e12, 1e30])
def test_huge_scores_are_one_hot_of_the_maximum_and_ties_share(size, device):
    for dtype in (torch.float32, torch.float64) if device == "cpu" else (torch.float32,):
        q = torch.full((1, 1, 1, 1), size**0.5, dtype=dtype)
        k = torch.tensor([1.0, -3.0, 2.0, 2.0, 0.0], dtype=dtype).view(1, 5, 1, 1) * size**0.5
        v = torch.tensor([1.0, 5.0, 3.0, 7.0, 9.0], dtype=dtype).view(1, 5, 1, 1)
        out, lse = onefold.attention(*(x.to(device) for x in (q, k, v)), scale=1.0, return_lse=True)
        assert out.item() == 5.0
        assert abs(lse.item() - 2 * size - math.log(2)) <= 8 * UNIT[dtype] * 2 * size


@pytest.mark.parametrize("sign", [1, -1])
def test_equal_scores_at_the_end_of_the_range_share(sign, device):
    """Their base-2 exponents would overflow, or be whole powers of two apart from rounding."""
    for size in (1e8, 1e15, 1e30, 1.7e38):
        q = torch.full((1, 3, 1, 1), 1.0)
        k = torch.full((1, 4, 1, 1), sign * size)
        v = torch.arange(4.0).view(1, 4, 1, 1)
        out, lse = onefold.attention(*(x.to(device) for x in (q, k, v)), scale=1.0, return_lse=True)
        assert (out == 1.5).all(), (size, out)
        assert (abs(lse.double() - sign * size) <= 1e-6 * size).all()


def test_scores_that_overflow_float32_are_nan(device):
    q = torch.full((1, 2, 1, 8), 1e30)
    k = torch.full((1, 3, 1, 8), 1e30)
    v = torch.ones(1, 3, 1, 8)
    q[0, 1] = 1.0
    k[0, :, 0, 1:] = 0.0
    out, lse = onefold.attention(*(x.to(device) for x in (q, k, v)), return_lse=True)
    assert out[0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    assert (out[0, 1] == 1).all()


@pytest.mark.parametrize("rows", ["one", "all"])
def test_a_bias_as_small_as_the_smallest_number_is_an_ordinary_bias(rows, dtype, device):
    q, k, v, dout = tensors(dtype, 6, 9)
    bias = torch.zeros(6, 9, dtype=dtype)
    bias[: 1 if rows == "one" else 6] = torch.finfo(dtype).min
    found = run(Case(q, k, v, {"bias": bias}, dout), device)
    assert found.out.isfinite().all()
    assert found.lse.isfinite().all()
    assert all(g.isfinite().all() for g in found.gradients.values())
    if dtype in (torch.float32, torch.bfloat16):  # the bias absorbs the score
        want = v.double().mean(1)[:, None].expand(2, 1, 2, 16)
        error = (found.out[:, :1].double() - want).abs()
        assert (error <= (UNIT[dtype] + 8 * UNIT[torch.float32]) * v.double().abs().mean()).all()
    mixed = torch.zeros(6, 9, dtype=dtype)
    mixed[:, :5] = torch.finfo(dtype).min
    found = run(Case(q, k, v, {"bias": mixed}), device)
    plain = run(Case(q, k[:, 5:], v[:, 5:], {}), device)
    if dtype != torch.float16:  # in float16 the smallest number is -65504, and e^-65504 is 0 too
        assert torch.allclose(
            found.out.double(), plain.out.double(), rtol=4 * UNIT[dtype], atol=1e-6
        )


# ---- scale, cap, alibi ----


def test_a_negative_scale_is_the_absolute_one_of_minus_q(dtype, device):
    q, k, v, dout = tensors(dtype, 20, 30)
    found = run(Case(q, k, v, {"scale": -0.5}, dout), device)
    turned = run(Case(-q, k, v, {"scale": 0.5}, dout), device)
    assert_same_bits(found.out, turned.out)
    assert_same_bits(found.lse, turned.lse)


def test_scale_zero_is_uniform_over_the_visible_keys(dtype, device):
    q, k, v, dout = tensors(dtype, 20, 30)
    case = Case(q, k, v, {"scale": 0.0, "causal": True}, dout)
    found = hold_bounds(case, device)
    for i in (0, 9, 19):
        seen = i + 11
        want = v[:, :seen].double().mean(1)
        bound = (UNIT[dtype] + 40 * UNIT[wide(dtype)]) * v.double().abs().max()
        assert ((found.out[:, i].double() - want).abs() <= bound).all()
        assert (found.lse[:, :, i].double() - math.log(seen)).abs().max() <= 1e-6
    assert not found.gradients["q"].any()
    assert not found.gradients["k"].any()


def test_the_cap_acts_after_scale_and_before_bias_and_mask(dtype, device):
    q, k, v, _ = tensors(dtype, 5, 12)
    bias = (30 * normal(seeded(4), 2, 2, 5, 12)).to(dtype)  # larger than the cap
    mask = torch.rand(5, 12, generator=seeded(5)) < 0.7
    mask[:, 0] = True
    options = {"scale": 2.0, "softcap": 3.0, "bias": bias, "mask": mask}
    found = hold_bounds(Case(q, k, v, options), device)
    x = 2 * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    z = (3 * torch.tanh(x / 3) + bias.double()).masked_fill(~mask, -INF)
    want = torch.einsum("bhij,bjhd->bihd", torch.softmax(z, -1), v.double())
    assert ((found.out.double() - want).abs() <= 2 * UNIT[dtype] * 4 + 1e-5).all()


def test_a_negative_cap_is_refused(device):
    q, k, v, _ = (x.to(device) for x in tensors(torch.float32, 5, 12))
    with pytest.raises(ValueError, match="softcap is -1"):
        onefold.attention(q, k, v, softcap=-1.0)


def test_alibi_is_minus_slope_times_distance_also_in_lse(dtype, device):
    q, k, v, dout = tensors(dtype, 7, 13)
    slopes = torch.tensor([0.5, 0.25], dtype=wide(dtype))
    found = hold_bounds(Case(q * 0, k, v, {"alibi_slopes": slopes}, dout), device)
    distance = (torch.arange(7)[:, None] + 13 - 7 - torch.arange(13)).abs().double()
    z = -slopes.double()[:, None, None] * distance
    want = torch.logsumexp(z, -1).expand(2, 2, 7)
    assert ((found.lse.double() - want).abs() <= 1e-6).all()


def test_causal_counts_from_the_bottom_right_and_from_the_top_left_when_asked(dtype, device):
    q, k, _, _ = tensors(dtype, 3, 5)
    v = torch.eye(5, 16, dtype=dtype).view(1, 5, 1, 16).expand(2, 5, 2, 16)
    for causal, counts in ((True, [3, 4, 5]), ("bottom_right", [3, 4, 5]), ("top_left", [1, 2, 3])):
        out = onefold.attention(*(x.to(device) for x in (q, k, v)), causal=causal)
        assert ((out != 0).sum(-1).cpu() == torch.tensor(counts)[None, :, None]).all()


# ---- small numbers ----


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_subnormal_inputs_are_used_as_they_are_unless_bfloat16_is_multiplied_in_pairs(name, device):
    dtype = FLOATS[name]
    flushed = bounds.of_operands(name, device) > 0
    tiny = torch.finfo(dtype).tiny
    steps = torch.arange(1, 9, dtype=torch.float64).view(1, 8, 1, 1)
    v = (steps * tiny / 16).to(dtype)
    assert (v != 0).all()
    q = k = torch.zeros(1, 8, 1, 1, dtype=dtype)
    out = onefold.attention(*(x.to(device) for x in (q, k, v))).cpu().double()
    want = (v.double().mean()).to(dtype).double()
    assert (out == (0.0 if flushed else want)).all()
    # a subnormal key decides when the query is large
    big = torch.full((1, 1, 1, 1), 1.0 / tiny if dtype != torch.float16 else 16384.0, dtype=dtype)
    few = torch.tensor([0.0, tiny / 2], dtype=dtype).view(1, 2, 1, 1)
    values = torch.tensor([0.0, 1.0], dtype=dtype).view(1, 2, 1, 1)
    got = onefold.attention(*(x.to(device) for x in (big, few, values)), scale=1.0).item()
    score = 0.0 if flushed else (big.double() * few.double()[0, 1]).item()
    assert abs(got - 1 / (1 + math.exp(-score))) <= 2 * UNIT[dtype]


def test_weights_too_small_for_the_format_count_as_zero(device):
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([0.0, -80.0, -100.0]).view(1, 3, 1, 1)
    v = torch.tensor([0.0, 1.0, 1e38]).view(1, 3, 1, 1)
    out = onefold.attention(*(x.to(device) for x in (q, k, v)), scale=1.0).item()
    assert abs(out - math.exp(-80)) <= 1e-5 * math.exp(-80)  # e^-100 < 2^-126


# ---- no work ----


@pytest.mark.parametrize("empty", ["batch", "queries", "heads", "keys", "head_dim", "value_dim"])
def test_an_extent_of_zero_gives_empty_or_zero_results_and_gradients(empty, dtype, device):
    n = {"batch": 2, "queries": 3, "heads": 2, "keys": 5, "head_dim": 8, "value_dim": 4, empty: 0}
    g = seeded()
    q = normal(g, n["batch"], n["queries"], n["heads"], n["head_dim"]).to(dtype)
    k = normal(g, n["batch"], n["keys"], n["heads"], n["head_dim"]).to(dtype)
    v = normal(g, n["batch"], n["keys"], n["heads"], n["value_dim"]).to(dtype)
    dout = normal(g, n["batch"], n["queries"], n["heads"], n["value_dim"]).to(dtype)
    found = run(Case(q, k, v, {}, dout), device)
    assert found.out.shape == dout.shape
    assert found.lse.shape == (n["batch"], n["heads"], n["queries"])
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert found.gradients[name].shape == x.shape
    if empty == "head_dim":  # scores are 0
        assert (found.out.double() - v.double().mean(1, keepdim=True)).abs().max() <= 4 * UNIT[
            dtype
        ]
    elif empty == "keys":
        assert not found.out.any()


def test_a_case_of_every_family_survives_a_second_look(device):
    """The bound itself is not vacuous: a result with one key left out is beyond it."""
    for family in ("normal", "rising", "values_near_one"):
        case = make_case(family, torch.float32, (1, 8, 40, 1, 1, 16, 16))
        wrong = make_case(
            family, torch.float32, (1, 8, 40, 1, 1, 16, 16), mask=torch.arange(40) != 31
        )
        with pytest.raises(AssertionError, match="beyond their bound"):
            hold_bounds(case, device, run(wrong, device))
