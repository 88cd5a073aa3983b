"""Numeric range and precision: the whole finite range of the input type."""

from __future__ import annotations

import math

import pytest
import torch

import onefold
from draws import INF, seeded
from gates import (
    UNIT,
    Case,
    assert_same_bits,
    hold_bounds,
    hold_forward,
    hold_gradients,
    make_case,
    normal,
    run,
)


@pytest.mark.parametrize("value", [133120.0, -133120.0, 1e10, 2.0**60])
def test_f09_1_one_huge_key_gives_its_value(value, device, place):
    x = place(torch.full((1, 1, 1, 64), value, dtype=torch.bfloat16))
    out, lse = onefold.attention(*(x.to(device),) * 3, return_lse=True)
    assert_same_bits(out.cpu(), x.contiguous())
    score = 8 * x[0, 0, 0, 0].double() ** 2
    assert abs(lse.item() / score.item() - 1) <= 70 * UNIT[torch.float32]


def test_f09_1_two_equal_huge_scores_give_the_mean(device):
    q = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    k = q.expand(1, 2, 1, 64).clone()
    v = torch.stack([q[0, 0], q[0, 0] * 3])[None]
    out = onefold.attention(q.to(device), k.to(device), v.to(device))
    assert_same_bits(out.cpu(), (q * 2))


@pytest.mark.parametrize("how", ["mask", "all true", "causal", "used"])
def test_f09_2_gradients_are_right_where_lse_is_far_below_zero(how, device, place):
    length = 192  # leaves half a tile of 128
    case = make_case("normal", torch.bfloat16, (1, length, length, 2, 2, 64, 64))
    case.q[..., 0], case.k[..., 0] = 1.0, -960.0
    case.q[..., 1:] *= 0.125
    i = torch.arange(length)
    case.options = {
        "mask": {"mask": place(i <= i[:, None])},
        "all true": {"mask": place(torch.ones(length, length, dtype=torch.bool))},
        "causal": {"causal": True},
        "used": {"seqused_k": [length - 33]},
    }[how]
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    found = hold_bounds(case, device)
    assert found.lse.max() < -100
    assert all(g.isfinite().all() for g in found.gradients.values())


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_f09_3_the_gradient_of_a_broadcast_bias_keeps_its_dtype_and_sums_in_fp32(name, device):
    x = normal(seeded(), 8, 128, 4, 32).to(torch.bfloat16)
    bias = normal(seeded(1), 1, 4, 128, 128).to(getattr(torch, name))
    dout = normal(seeded(2), 8, 128, 4, 32).to(torch.bfloat16)
    case = Case(x, x, x, {"bias": bias}, dout)
    found = run(case, device)
    hold_gradients(case, found, device)
    gradient = found.gradients["bias"]
    assert gradient.dtype == bias.dtype
    assert gradient.shape == bias.shape
    # Summing eight rounded terms one by one in bfloat16 errs by about 8 / 2 roundings.
    want = case.exact_gradients.bias
    relative = (gradient.double() - want).norm() / want.norm()
    assert relative <= (0.01 if name == "bfloat16" else 0.005)


def test_f09_4_merging_states_that_are_far_apart_gives_the_larger(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        small = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.full((1, 1, 1), -100.0)
        large = torch.ones(1, 1, 1, 8, dtype=dtype), torch.full((1, 1, 1), 20000.0)
        for parts in ((small, large), (large, small)):
            outs, lses = ([x.to(device) for x in p] for p in zip(*parts, strict=True))
            out, lse = onefold.merge_states(outs, lses)
            assert (out == 1).all()
            assert lse.item() == 20000.0


@pytest.mark.parametrize("value", [-20000.0, -88.8, 0.0, 88.8, 20000.0])
def test_f09_4_a_chain_of_a_thousand_merges_stays_accurate(value, device):
    g = seeded()
    outs = torch.randn(1000, 1, 1, 2, 8, generator=g).to(device)
    lses = (value + torch.randn(1000, 1, 2, 1, generator=g)).to(device)
    weights = torch.softmax(lses.double(), 0)
    want = (weights.transpose(2, 3).unsqueeze(-1) * outs.double()).sum(0)
    want_lse = torch.logsumexp(lses.double(), 0)
    size = (weights.transpose(2, 3).unsqueeze(-1) * outs.double().abs()).sum(0)
    u = UNIT[torch.float32]

    state = (outs[0], lses[0])
    for n in range(1, 1000):
        state = onefold.merge_states([state[0], outs[n]], [state[1], lses[n]])
    chain_lse = 2 * u * 1000 * max(abs(value), 8.0)  # each step stores an lse, rounded
    assert ((state[1].double() - want_lse).abs() <= chain_lse).all()
    assert ((state[0].double() - want).abs() <= (chain_lse + 2000 * u) * 4).all()

    out, lse = onefold.merge_states(outs, lses)  # all at once: no chain, no growth
    assert ((lse.double() - want_lse).abs() <= 2 * u * want_lse.abs() + 8 * u).all()
    assert ((out.double() - want).abs() <= 8 * u * size + 2 * u * want.abs()).all()


def exact_sink_gradient(q, k, v, sinks, dout):
    """In float64, head by head, causal: -sum_i P_sink dout . out."""
    total = []
    length = q.shape[1]
    hidden = torch.arange(length) > torch.arange(length)[:, None]
    for h in range(q.shape[2]):
        qh, kh, vh, dh = (x[0, :, h].double() for x in (q, k, v, dout))
        z = (qh @ kh.T / qh.shape[1] ** 0.5).masked_fill(hidden, -INF)
        sink = sinks[h].double()
        lse = torch.logaddexp(torch.logsumexp(z, -1), sink)
        out = torch.exp(z - lse[:, None]) @ vh
        total.append(-(torch.exp(sink - lse) * (dh * out).sum(-1)).sum())
    return torch.stack(total)


@pytest.mark.parametrize("cotangent", ["random", "ones", "out"])
def test_f09_5_the_gradient_of_a_sink_near_the_row_maximum_is_right_to_a_thousandth(
    cotangent, device
):
    heads, length = 4, 2048
    q, k, v, dout = (normal(seeded(n), 1, length, heads, 32).to(torch.bfloat16) for n in range(4))
    sinks = torch.tensor([3.0, 4.0, 5.0, 6.0])
    if cotangent == "ones":
        dout = torch.ones_like(dout)
    elif cotangent == "out":
        dout = run(Case(q, k, v, {"sinks": sinks, "causal": True}), device).out
    found = run(Case(q, k, v, {"sinks": sinks, "causal": True}, dout), device)
    want = exact_sink_gradient(q, k, v, sinks, dout)
    relative = (found.gradients["sinks"].double() - want).abs() / want.abs()
    assert (relative <= 1e-3).all(), relative


@pytest.mark.parametrize("size", [1000.0, 60000.0])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_f09_6_values_of_any_size_over_very_many_keys(size, name, device):
    dtype = getattr(torch, name)
    g = seeded()
    q = (normal(g, 1, 4, 1, 64) / 4).to(dtype)
    k = torch.randn(1, 65536, 1, 64, generator=g).to(dtype)
    v = (size * (1 - 0.1 * torch.rand(1, 65536, 1, 8, generator=g))).to(dtype)
    case = Case(q, k, v)
    found = run(case, device)
    assert found.out.isfinite().all()
    hold_forward(case, found, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.5, 0.0, -0.0, 1e-30, -1e-3, 100.0])
def test_f09_7_any_finite_scale(scale, causal, dtype, device, place):
    case = make_case("normal", dtype, (2, 64, 64, 4, 4, 32, 32), scale=scale, causal=causal)
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    found = hold_bounds(case, device)
    if scale == 0:
        seen = torch.arange(1, 65) if causal else torch.full((64,), 64)
        mean = (case.v.double().cumsum(1) if causal else case.v.double().sum(1, keepdim=True)) / (
            seen.view(1, -1, 1, 1) if causal else 64
        )
        bound = (UNIT[dtype] + 100 * UNIT[torch.float32]) * 4
        assert ((found.out.double() - mean).abs() <= bound).all()


@pytest.mark.parametrize("value", [INF, -INF, math.nan])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_f09_7_a_scale_or_cap_that_is_not_finite_is_refused(name, value, device):
    q = torch.zeros(1, 2, 1, 8, device=device)
    with pytest.raises(ValueError, match=f"{name} is .*finite number"):
        onefold.attention(q, q, q, **{name: value})


@pytest.mark.parametrize("keyword", ["q_descale", "k_descale", "v_descale", "descale_q"])
def test_f09_8_descales_are_refused_by_name(keyword, device):
    q = torch.zeros(1, 2, 1, 8, device=device)
    with pytest.raises(TypeError, match=keyword):
        onefold.attention(q, q, q, **{keyword: torch.ones(1, 1)})


@pytest.mark.parametrize("level", [-1000.0, -89.0, -88.5, 88.5, 89.0, 1000.0, 20000.0])
@pytest.mark.parametrize("what", ["bias", "sinks", "scores"])
def test_f09_9_lse_across_the_borders_of_exp(level, what, device):
    case = make_case("normal", torch.float32, (1, 20, 70, 2, 2, 16, 16))
    if what == "bias":
        case.options = {"bias": level + normal(seeded(), 1, 2, 20, 70).float()}
    elif what == "sinks":
        case.options = {"sinks": torch.tensor([level, level + 1])}
    else:
        case.options = {"scale": 1.0}
        case.q[..., 0], case.k[..., 0] = 32.0, level / 32
    found = hold_bounds(case, device)
    assert all(g.isfinite().all() for g in found.gradients.values())


def test_f09_10_scores_below_any_sentinel_are_still_scores(device):
    """Every score of a row is far below -1e9, -1e30 and the like: the row is not empty."""
    for level in (-1e6, -1e10, -1e20, -1e35):
        q = torch.ones(1, 1, 1, 1)
        k = torch.tensor([level, 2 * level, 3 * level]).view(1, 3, 1, 1)
        v = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
        q, k, v = (x.to(device) for x in (q, k, v))
        out, lse = onefold.attention(q, k, v, scale=1.0, return_lse=True)
        assert out.item() == 1.0
        assert abs(lse.item() / level - 1) <= 4 * UNIT[torch.float32]


def test_f09_10_relative_terms_are_not_rounded_to_the_input_type(device):
    """In bfloat16, distances above 256 and small biases would be lost."""
    case = make_case("normal", torch.bfloat16, (1, 3, 700, 1, 1, 16, 16))
    case.q *= 0
    case.options = {
        "alibi_slopes": torch.tensor([0.0101]),
        "bias": 1e-3 * torch.arange(700.0).view(1, 1, 1, 700) + 300.0,
    }
    hold_bounds(case, device)
