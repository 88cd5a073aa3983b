"""Gradients: every differentiable input, whichever subset wants one, and every returned tensor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck

import onefold
from draws import seeded
from gates import (
    Case,
    Found,
    assert_same_bits,
    hold_bounds,
    hold_gradients,
    make_case,
    normal,
    run,
    skip_unless_it_computes,
)

FLOAT64 = torch.float64


def test_f10_1_a_loss_of_lse_alone(dtype, device, place):
    case = make_case("normal", dtype, (1, 33, 33, 2, 2, 16, 16))
    case.q, case.k, case.v = (place(x) for x in (case.q, case.k, case.v))
    case.dout = None
    case.dlse = torch.full_like(case.dlse, 1 / 66)
    found = hold_bounds(case, device)
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", case.q.double(), case.k.double()) / 4, -1)
    dq = torch.einsum("bhij,bjhd->bihd", p, case.k.double()) / 4 / 66
    dk = torch.einsum("bhij,bihd->bjhd", p, case.q.double()) / 4 / 66
    limit = 2 * torch.finfo(dtype).eps + 1e-5
    assert ((found.gradients["q"].double() - dq).abs() <= limit * dq.abs().max()).all()
    assert ((found.gradients["k"].double() - dk).abs() <= limit * dk.abs().max()).all()
    assert not found.gradients["v"].any()


@pytest.mark.parametrize("shape", [(2, 4, 33, 33), (1, 4, 33, 33), (2, 1, 1, 33)])
def test_f10_2_a_mask_of_numbers_may_be_the_only_input_with_a_gradient(shape, device):
    case = make_case("normal", torch.float32, (2, 33, 33, 4, 4, 32, 32))
    bias = normal(seeded(), *shape).float()
    case.options = {"bias": bias}
    alone = bias.clone().to(device).requires_grad_()
    q, k, v = (x.to(device) for x in (case.q, case.k, case.v))
    out, lse = onefold.attention(q, k, v, bias=alone, return_lse=True)
    cotangents = (case.dout.to(device), case.dlse.to(device))
    (gradient,) = torch.autograd.grad((out, lse), alone, cotangents)
    whole = run(case, device)
    assert_same_bits(gradient.cpu(), whole.gradients["bias"])
    hold_gradients(case, Found(out, lse, {"bias": gradient.cpu()}), device)


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("pattern", list(itertools.product((0, 1), repeat=4)), ids=str)
def test_f10_3_the_gradient_of_a_bias_is_summed_over_its_broadcast_axes(
    pattern, dtype_name, device
):
    full = (4, 4, 40, 70)
    shape = [n if own else 1 for n, own in zip(full, pattern, strict=True)]
    dtype = getattr(torch, dtype_name)
    case = make_case("normal", dtype, (4, 40, 70, 4, 4, 16, 16))
    case.options = {"bias": normal(seeded(), *shape).to(dtype)}
    found = hold_bounds(case, device)
    assert found.gradients["bias"].shape == tuple(shape)
    assert found.gradients["bias"].dtype == dtype


@pytest.mark.parametrize("block", [(128, 128), (48, 64), (16, 32), (3, 5)])
def test_f10_4_block_sparse_masks_of_any_granularity(block, device):
    """Forward and backward tiles differ from the mask's blocks and from one another."""
    rows, keys = block
    coarse = torch.rand(1, 2, -(-150 // rows), -(-200 // keys), generator=seeded()) < 0.4
    mask = coarse.repeat_interleave(rows, 2).repeat_interleave(keys, 3)[:, :, :150, :200]
    case = make_case("normal", torch.float32, (1, 150, 200, 2, 2, 64, 64), mask=mask, causal=True)
    hold_bounds(case, device)


@pytest.mark.parametrize("layout", ["dense", "packed", "used"])
def test_f10_5_keys_beyond_the_live_range_where_lse_is_far_below(layout, device):
    case = make_case("normal", torch.float32, (2, 20, 96, 2, 2, 32, 32))
    case.q[..., 0], case.k[..., 0] = 8.0, -300.0
    if layout == "dense":
        case.k, case.v = case.k[:, :77], case.v[:, :77]
    elif layout == "used":
        case.options = {"seqused_k": [77, 77]}
        case.k[:, 77:] = case.v[:, 77:] = math.nan
    else:
        case = Case(
            case.q.reshape(40, 2, 32),
            case.k[:, :77].reshape(154, 2, 32),
            case.v[:, :77].reshape(154, 2, 32),
            {"cu_seqlens_q": [0, 20, 40], "cu_seqlens_k": [0, 77, 154]},
            case.dout.reshape(40, 2, 32),
            case.dlse.transpose(0, 1).reshape(2, 40),
        )
    found = run(case, device)
    assert found.lse.max() < -100
    assert all(g.isfinite().all() for g in found.gradients.values())
    if layout == "used":
        case.k[:, 77:] = case.v[:, 77:] = 0.0  # the reference reads what it is given
    hold_gradients(case, found, device)


def test_f10_6_every_layout_gives_the_same_gradients(dtype, device):
    batch, length, heads, dim = 2, 65, 4, 24
    case = make_case("normal", dtype, (batch, length, length, heads, heads, dim, dim), causal=True)
    want = run(case, device)
    turned = [
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v, case.dout)
    ]
    head_major = run(Case(*turned[:3], case.options, turned[3], case.dlse), device)
    assert_same_bits(head_major, want)
    cu = [0, length, 2 * length]
    flat = [x.reshape(batch * length, heads, dim) for x in (case.q, case.k, case.v, case.dout)]
    dlse = case.dlse.transpose(0, 1).reshape(heads, batch * length)
    packed = run(
        Case(*flat[:3], {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}, flat[3], dlse),
        device,
    )
    assert_same_bits(packed.out.view_as(want.out), want.out)
    for name, gradient in want.gradients.items():
        assert_same_bits(packed.gradients[name].view_as(gradient), gradient, name)


@pytest.mark.parametrize("layout", ["dense", "head major", "packed"])
def test_f10_6_finite_differences_in_every_layout(layout, device):
    skip_unless_it_computes(FLOAT64, 0, device)
    shape = (2, 3, 2, 4)
    options = {"causal": True}
    if layout == "packed":
        shape = (6, 2, 4)
        options |= {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 2, 6]}
    x = [normal(seeded(n), *shape).to(device) for n in range(3)]
    if layout == "head major":
        x = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    x = [t.requires_grad_() for t in x]
    assert gradcheck(lambda *a: onefold.attention(*a, return_lse=True, **options), x)


OPTIONAL = {
    "scale": lambda: 0.3,
    "causal": lambda: True,
    "window": lambda: (2, 1),
    "softcap": lambda: 2.0,
    "alibi_slopes": lambda: torch.rand(4, generator=seeded(1), dtype=FLOAT64),
    "bias": lambda: normal(seeded(2), 2, 1, 3, 5),
    "mask": lambda: torch.tensor([True, True, False, True, True]),
    "sinks": lambda: normal(seeded(3), 4),
    "seqused_q": lambda: [3, 2],
    "seqused_k": lambda: [4, 5],
    "dropout": lambda: {"dropout_p": 0.4, "seed": 5},
    "deterministic": lambda: True,
}


def options_of(names) -> dict:
    options = {}
    for name in names:
        value = OPTIONAL[name]()
        options |= value if name == "dropout" else {name: value}
    return options


def check_gradients(device, options) -> None:
    skip_unless_it_computes(FLOAT64, 0, device)
    shapes = ((2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 2, 3))
    inputs = [normal(seeded(4 + n), *s).to(device).requires_grad_() for n, s in enumerate(shapes)]
    names = [n for n in ("bias", "alibi_slopes", "sinks") if n in options]
    inputs += [options.pop(n).to(device).requires_grad_() for n in names]

    def call(q, k, v, *rest):
        named = dict(zip(names, rest, strict=True))
        out, lse = onefold.attention(q, k, v, return_lse=True, **options, **named)
        return out, torch.where(lse.isinf(), 0.0, lse)

    assert gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("name", OPTIONAL)
def test_f10_7_finite_differences_with_every_option(name, device):
    check_gradients(device, options_of([name]))


@pytest.mark.parametrize("names", list(itertools.combinations(OPTIONAL, 2)), ids="-".join)
def test_f10_7_finite_differences_with_every_pair_of_options(names, device):
    check_gradients(device, options_of(names))


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=6)), ids=str)
def test_f10_7_any_subset_of_inputs_may_want_a_gradient(wanted, device):
    case = make_case("normal", torch.float32, (2, 9, 20, 4, 2, 8, 8))
    case.options = {
        "bias": normal(seeded(), 1, 4, 1, 20).float(),
        "alibi_slopes": torch.rand(4, generator=seeded(1)),
        "sinks": torch.rand(4, generator=seeded(2)),
    }
    inputs = {n: x.clone().to(device) for n, x in case.inputs.items()}
    for x, want in zip(inputs.values(), wanted, strict=True):
        x.requires_grad_(want)
    q, k, v, bias, slopes, sinks = inputs.values()
    out, lse = onefold.attention(
        q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True
    )
    assert out.requires_grad == any(wanted)
    if not any(wanted):
        return
    (out.sum() + lse.sum()).backward()
    for x, want in zip(inputs.values(), wanted, strict=True):
        assert (x.grad is not None) == want
        if want:
            assert x.grad.shape == x.shape
            assert x.grad.dtype == x.dtype


def test_f10_7_options_are_keyword_only(device):
    q = torch.zeros(1, 2, 1, 8, device=device)
    with pytest.raises(TypeError):
        onefold.attention(q, q, q, None)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_f10_8_one_packed_sequence_points_the_same_way_as_exact_mathematics(name, device):
    g = seeded()
    q, k, v, dout = (normal(g, 300, 4, 64).to(getattr(torch, name)) for _ in range(4))
    case = Case(q, k, v, {"cu_seqlens_q": [0, 300], "cu_seqlens_k": [0, 300]}, dout)
    found = hold_bounds(case, device)
    for of, gradient in found.gradients.items():
        want = getattr(case.exact_gradients, of)
        a, b = gradient.double().flatten(), want.flatten()
        assert a.dot(b) / (a.norm() * b.norm()) > 0.999
        assert abs(a.norm() / b.norm() - 1) <= 0.01


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}, {"dropout_p": 0.3}])
def test_f10_9_a_cotangent_of_zero_gives_exactly_zero(options, dtype, device):
    case = make_case("normal", dtype, (2, 20, 33, 4, 2, 16, 16), **options, seed=1)
    case.options["bias"] = normal(seeded(), 1, 4, 1, 33).to(dtype)
    case.dout, case.dlse = torch.zeros_like(case.dout), torch.zeros_like(case.dlse)
    for gradient in run(case, device).gradients.values():
        assert not gradient.any()


def test_f10_10_a_second_derivative_is_refused_in_one_sentence(device):
    q, k, v = (normal(seeded(n), 1, 3, 1, 4).float().to(device) for n in range(3))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    (dq,) = torch.autograd.grad(onefold.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()
