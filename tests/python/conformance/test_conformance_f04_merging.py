"""Empty sets and merging: partial results are a monoid, and nothing is its neutral element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import onefold
from draws import INF, seeded
from gates import UNIT, Case, assert_same_bits, hold_bounds, make_case, normal, run, wide


def assert_empty(found, rows=slice(None)):
    assert not found.out[:, rows].any()
    assert (found.lse[:, :, rows] == -INF).all()
    if "q" in found.gradients:
        assert not found.gradients["q"][:, rows].any()


def test_f04_1_a_sequence_without_keys_is_the_empty_row(dtype, device, place):
    g = seeded()
    q, dout = (place(normal(g, 12, 2, 16).to(dtype)) for _ in range(2))
    k, v = (place(normal(g, 7, 2, 16).to(dtype)) for _ in range(2))
    lengths = {"cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": [0, 0, 7]}
    found = hold_bounds(Case(q, k, v, lengths, dout), device)
    assert not found.out[:5].any()
    assert (found.lse[:, :5] == -INF).all()
    assert not found.gradients["q"][:5].any()


def test_f04_1_causal_rows_above_the_first_key_are_empty_rows(dtype, device, place):
    case = make_case("normal", dtype, (2, 8, 4, 2, 2, 16, 16), causal=True)
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    found = hold_bounds(case, device)
    assert_empty(found, slice(0, 4))
    assert (found.lse[:, :, 4:] > -INF).all()


def test_f04_2_nothing_merged_with_nothing_is_nothing(device):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        outs = torch.zeros(2, 1, 1, 1, 64, dtype=dtype, device=device)
        lses = torch.full((2, 1, 1, 1), -INF, dtype=wide(dtype), device=device)
        out, lse = onefold.merge_states(outs, lses)
        assert not out.any()
        assert (lse == -INF).all()


@pytest.mark.parametrize("empties", list(itertools.product((0, 1, 2), repeat=4)), ids=str)
def test_f04_2_empties_anywhere_change_no_bit_of_a_merge(empties, device):
    g = seeded()
    parts = [
        (torch.randn(2, 5, 3, 8, generator=g), 3 * torch.randn(2, 3, 5, generator=g))
        for _ in range(3)
    ]
    nothing = (torch.zeros(2, 5, 3, 8), torch.full((2, 3, 5), -INF))
    slots = [[nothing] * n for n in empties]
    mixed = [*slots[0], parts[0], *slots[1], parts[1], *slots[2], parts[2], *slots[3]]
    want, got = (
        onefold.merge_states(*([t.to(device) for t in x] for x in zip(*some, strict=True)))
        for some in (parts, mixed)
    )
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])


def test_f04_2_an_empty_part_may_hold_anything_finite_beside_minus_infinity(device):
    out = torch.randn(1, 1, 2, 8, generator=seeded()).to(device)
    lse = torch.tensor([[[0.5], [2.0]]], device=device)
    junk = torch.full_like(out, 3e38)
    merged = onefold.merge_states([out, junk], [lse, torch.full_like(lse, -INF)])
    assert_same_bits(merged[0], onefold.merge_states([out], [lse])[0])
    poisoned = onefold.merge_states(
        [out, torch.full_like(out, math.nan)], [lse, torch.full_like(lse, -INF)]
    )
    assert_same_bits(poisoned[0], merged[0])


def test_f04_2_gradients_of_a_merge_with_empties_are_zero_there_and_finite(device):
    g = seeded()
    outs = torch.randn(3, 2, 4, 1, 8, generator=g, dtype=torch.float64).to(device).requires_grad_()
    lses = torch.randn(3, 2, 1, 4, generator=g, dtype=torch.float64).to(device)
    lses[1] = -INF
    lses[:, 0, :, 2] = -INF
    lses.requires_grad_()
    out, lse = onefold.merge_states(outs, lses)
    cotangent = torch.where(lse.isinf(), 0.0, 1.0)
    douts, dlses = torch.autograd.grad((out, lse), (outs, lses), (torch.ones_like(out), cotangent))
    assert douts.isfinite().all()
    assert dlses.isfinite().all()
    assert not douts[1].any()
    assert not dlses[1].any()
    assert not dlses[:, 0, :, 2].any()


MASKS = {
    "last row": (6, 10, 2, lambda: torch.arange(6)[:, None].expand(6, 10) < 5),
    "corner": (8, 8, 1, lambda: (torch.arange(8)[:, None] < 4) & (torch.arange(8) < 4)),
}


@pytest.mark.parametrize("name", MASKS)
def test_f04_3_rows_of_false_are_empty_and_the_others_as_if_alone(name, dtype, device, place):
    sq, sk, heads, make = MASKS[name]
    mask = make()
    live = mask.any(1)
    case = make_case("normal", dtype, (1, sq, sk, heads, heads, 8, 8), mask=place(mask))
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    found = hold_bounds(case, device)
    assert_empty(found, ~live)
    rows = Case(case.q[:, live], case.k, case.v, {"mask": mask[live]}, case.dout[:, live])
    rows.dlse = case.dlse[:, :, live]
    alone = run(rows, device)
    assert_same_bits(found.out[:, live], alone.out, "out")
    assert_same_bits(found.lse[:, :, live], alone.lse, "lse")
    assert_same_bits(found.gradients["q"][:, live], alone.gradients["q"], "dq")


def test_f04_4_a_row_of_the_smallest_numbers_is_the_mean_of_v(device, place):
    smallest = torch.finfo(torch.float32).min
    case = make_case("normal", torch.float32, (1, 3, 3, 1, 1, 4, 4))
    bias = torch.ones(3, 3)
    bias[0] = smallest
    case.options = {"bias": place(bias)}
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    case.dlse = None
    found = run(case, device)
    mean = case.v.double().mean(1)
    assert ((found.out[:, 0].double() - mean).abs() <= 8 * UNIT[torch.float32] * 3).all()
    assert found.lse.isfinite().all()
    assert all(g.isfinite().all() for g in found.gradients.values())
    assert abs(found.lse[0, 0, 0].item() / smallest - 1) <= 1e-6


def test_f04_4_keys_with_the_smallest_bias_weigh_nothing(device):
    case = make_case("normal", torch.float32, (4, 141, 141, 3, 3, 64, 64))
    bias = torch.zeros(4, 1, 1, 141)
    bias[..., :128] = torch.finfo(torch.float32).min
    case.options = {"bias": bias}
    found = run(case, device)
    short = Case(case.q, case.k[:, 128:], case.v[:, 128:], {"bias": bias[..., 128:]})
    short.dout, short.dlse = case.dout, case.dlse
    hold_bounds(short, device, run(short, device))
    for name in ("k", "v"):
        assert not found.gradients[name][:, :128].any()
    want = short.exact[0]
    assert ((found.out.double() - want).abs() <= 1e-5).all()
    assert all(g.isfinite().all() for g in found.gradients.values())


@pytest.mark.parametrize("value", [-1e30, -3e38, 1e30, 3e38])
def test_f04_4_bias_of_any_finite_size_for_all_keys_leaves_the_scores_to_decide_or_ties(
    value, device
):
    case = make_case("normal", torch.float32, (1, 5, 70, 2, 2, 16, 16))
    case.options = {"bias": torch.full((1, 1, 5, 70), value)}
    found = run(case, device)
    mean = case.v.double().mean(1, keepdim=True).expand(1, 5, 2, 16)
    assert ((found.out.double() - mean).abs() <= 1e-6 * 3).all()
    assert ((found.lse.double() / value - 1).abs() <= 1e-6).all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_f04_5_a_mask_of_false_inside_a_compiled_function_is_the_empty_row(backend, device):
    def call(q, k, v, mask):
        return onefold.attention(q, k, v, mask=mask, return_lse=True)

    q, k, v = (torch.randn(1, 5, 2, 8, generator=seeded(n)).to(device) for n in range(3))
    q.requires_grad_()
    mask = torch.zeros(5, 5, dtype=torch.bool, device=device)
    out, lse = torch.compile(call, fullgraph=True, backend=backend)(q, k, v, mask)
    assert not out.any()
    assert (lse == -INF).all()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not dq.any()


def test_f04_6_without_keys_the_sink_is_all_there_is(dtype, device, place):
    q = place(normal(seeded(), 2, 3, 4, 8).to(dtype))
    k = torch.zeros(2, 0, 4, 8, dtype=dtype)
    sinks = torch.tensor([0.0, 3.0, -5.0, 1.5], dtype=wide(dtype))
    dout = normal(seeded(1), 2, 3, 4, 8).to(dtype)
    dlse = normal(seeded(2), 2, 4, 3).to(wide(dtype))
    found = hold_bounds(Case(q, k, k, {"sinks": place(sinks)}, dout, dlse), device)
    u = UNIT[wide(dtype)]
    assert not found.out.any()
    assert ((found.lse - sinks[:, None]).abs() <= 4 * u * (1 + sinks[:, None].abs())).all()
    total = dlse.double().sum((0, 2))
    error = (found.gradients["sinks"].double() - total).abs()
    assert (error <= 16 * u * dlse.double().abs().sum((0, 2))).all()


def split(case: Case, cuts: list[int], device: str):
    """The states of stretches of keys; a sink belongs to the first."""
    outs, lses = [], []
    for n, (a, b) in enumerate(itertools.pairwise([0, *cuts, case.k.shape[1]])):
        options = dict(case.options)
        if "mask" in options:
            options["mask"] = options["mask"][..., a:b]
        if n > 0:
            options.pop("sinks", None)
        part = run(Case(case.q, case.k[:, a:b], case.v[:, a:b], options), device)
        outs.append(part.out)
        lses.append(part.lse)
    return outs, lses


@pytest.mark.parametrize("options", ["plain", "mask", "sinks", "both"])
@pytest.mark.parametrize(
    "cuts", [[], [0], [10], [0, 0, 50], [1, 2, 3, 64, 65], [70, 70], list(range(1, 70))], ids=str
)
def test_f04_7_any_partition_of_the_keys_merges_to_the_whole(cuts, options, device):
    case = make_case("normal", torch.float32, (2, 9, 70, 2, 2, 16, 16))
    case.dout = case.dlse = None
    if options in ("mask", "both"):
        mask = torch.rand(9, 70, generator=seeded()) < 0.3
        mask[0] = False
        mask[1, 10:] = False
        case.options["mask"] = mask
    if options in ("sinks", "both"):
        case.options["sinks"] = torch.tensor([1.0, -1.0])
    outs, lses = split(case, cuts, device)
    out, lse = onefold.merge_states(outs, lses)
    run_whole = run(case, device)
    assert torch.equal(lse == -INF, run_whole.lse == -INF)
    run_whole.out, run_whole.lse = out, lse
    hold_bounds(case, device, run_whole)


@pytest.mark.parametrize("bad", [1, 2])
def test_f04_7_parts_that_do_not_fit_are_refused(bad, device):
    outs = [torch.zeros(1, 2, 3, 4, device=device)] * 2
    lses = [torch.zeros(1, 3, 2, device=device)] * 2
    with pytest.raises(ValueError, match="lses has shape"):
        if bad == 1:
            onefold.merge_states(outs, lses[:1])
        else:
            onefold.merge_states(outs, [x.mT for x in lses])
