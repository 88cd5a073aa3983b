"""Strides, alignment, broadcasting and views: every tensor has its own, and results do not care."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import onefold
from buffers import guarded, poisoned_allocations, surrounded, surroundings
from draws import INF, NAN, seeded
from gates import FLOATS, Case, assert_same_bits, hold_bounds, make_case, normal, run, wide


def test_f06_1_the_cotangent_of_a_sum_has_strides_of_zero(dtype, device, place):
    q, k, v = (
        place(normal(seeded(n), 1, 5, 2, 8).to(dtype)).to(device).requires_grad_() for n in range(3)
    )
    out = onefold.attention(q, k, v, causal=True)
    sums = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for a, b in zip(sums, ones, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_f06_2_views_of_a_packed_projection_with_an_expanded_additive_mask(name, device, place):
    batch, length, heads, dim = 2, 33, 4, 16
    flat = place(normal(seeded(), batch, length, 3 * heads * dim).to(FLOATS[name]))
    views = [x.view(batch, length, heads, dim) for x in flat.chunk(3, dim=-1)]
    turned = [x.transpose(1, 2).transpose(1, 2) for x in views]
    bias = torch.zeros(batch, 1, 1, length, dtype=FLOATS[name])
    bias[1, ..., 20:] = -INF
    expanded = place(bias).expand(batch, heads, length, length)
    dout = normal(seeded(1), batch, length, heads, dim).to(FLOATS[name])
    got = run(Case(*turned, {"bias": expanded}, dout), device)
    copies = [x.contiguous() for x in views]
    want = run(Case(*copies, {"bias": bias.expand_as(expanded).contiguous()}, dout), device)
    got.gradients.pop("bias")
    want.gradients.pop("bias")
    assert_same_bits(got, want)


@pytest.mark.parametrize("pattern", list(itertools.product((0, 1), repeat=4)), ids=str)
def test_f06_3_all_broadcast_patterns_of_a_mask_equal_the_expanded_one(pattern, device, place):
    batch, length, heads, dim = 2, 8, 4, 64
    full = (batch, heads, length, length)
    shape = [n if own else 1 for n, own in zip(full, pattern, strict=True)]
    x = [normal(seeded(n), batch, length, heads, dim) for n in range(4)]
    q, k, v, dout = (t.float() for t in x)
    seen = torch.rand(shape, generator=seeded(5)) < 0.6
    for kind in ("mask", "bias"):
        grid = seen if kind == "mask" else torch.randn(shape, generator=seeded(6))
        if kind == "bias":
            grid = grid.masked_fill(~seen, -INF)
        case = Case(place(q), place(k), place(v), {kind: place(grid)}, place(dout))
        expanded = Case(q, k, v, {kind: grid.expand(full).contiguous()}, dout)
        got, want = run(case, device), run(expanded, device)
        of_got, of_want = got.gradients.pop("bias", None), want.gradients.pop("bias", None)
        assert_same_bits(got, want)
        if kind == "bias":
            hold_bounds(case, device)
            summed = [axis for axis in range(4) if shape[axis] == 1 and full[axis] > 1]
            total = of_want.double().sum(summed, keepdim=True) if summed else of_want.double()
            size = of_want.double().abs().sum(summed, keepdim=True) if summed else total.abs()
            assert ((of_got.double() - total).abs() <= 1e-5 * size + 1e-12).all()


def test_f06_3_a_mask_with_an_empty_corner(device, place):
    x = normal(seeded(), 2, 8, 4, 64).float()
    bias = torch.zeros(2, 1, 8, 8)
    bias[0, 0, 4:, :4] = -INF
    dout = normal(seeded(1), 2, 8, 4, 64).float()
    case = Case(place(x), place(x), place(x), {"bias": place(bias)}, dout)
    hold_bounds(case, device)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wider", [False, True])
def test_f06_4_a_bias_of_odd_rows_and_a_slice_of_a_wider_one(wider, name, device, place):
    dtype = FLOATS[name]
    case = make_case("normal", dtype, (2, 43, 43, 4, 4, 16, 16))
    bias = normal(seeded(2), 2, 4, 43, 44).to(dtype)
    view = place(bias)[..., 1:] if wider else place(bias[..., 1:].contiguous())
    case.options = {"bias": view}
    want = Case(case.q, case.k, case.v, {"bias": bias[..., 1:].clone()}, case.dout, case.dlse)
    want = run(want, device)
    assert_same_bits(run(case, device), want)


def peak_growth(call) -> int:
    """Bytes by which the resident set peaks above where it was; in kilobytes of resolution."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_f06_4_a_broadcast_bias_is_read_in_place():
    """Expanded it would take 2 GB."""
    q = torch.randn(64, 1024, 8, 8, generator=seeded())[:, :, :1]
    bias = torch.randn(1, 1, 1, 1024, generator=seeded(1)).expand(64, 1, 1024, 1024)
    mask = torch.ones(1024, dtype=torch.bool).expand(64, 1, 1024, 1024)
    onefold.attention(q[:1], q[:1], q[:1], bias=bias[:1], mask=mask[:1])
    grown = peak_growth(lambda: onefold.attention(q, q, q, bias=bias, mask=mask))
    assert grown < 100e6


@pytest.mark.parametrize("dim", [16, 256])
def test_f06_5_unbound_views_of_one_buffer_and_gradients_into_its_slices(dim, device, place):
    qkv = place(normal(seeded(), 2, 20, 3, 4, dim).to(torch.bfloat16)).to(device).requires_grad_()
    dout = normal(seeded(1), 2, 20, 4, dim).to(torch.bfloat16).to(device)
    out = onefold.attention(*qkv.unbind(2), causal=True)
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    copies = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(2)]
    want = onefold.attention(*copies, causal=True)
    assert_same_bits(out.detach(), want.detach())
    for got, expected in zip(dqkv.unbind(2), torch.autograd.grad(want, copies, dout), strict=True):
        assert_same_bits(got, expected)


OUT_LAYOUTS = {
    "length major": lambda shape: torch.empty(shape),
    "head major": lambda shape: torch.empty([shape[n] for n in (0, 2, 1, 3)]).transpose(1, 2),
    "last axis first": lambda shape: torch.empty([shape[n] for n in (3, 0, 1, 2)]).permute(
        1, 2, 3, 0
    ),
    "every second head": lambda shape: torch.empty(*shape[:2], 2 * shape[2], shape[3])[:, :, ::2],
    "odd rows": lambda shape: torch.empty(*shape[:3], shape[3] + 1)[..., :-1],
}


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
@pytest.mark.parametrize("sk", [70, 3000])
def test_f06_6_the_strides_of_out_are_honoured_and_nothing_else_is_written(layout, sk, device):
    case = make_case("normal", torch.float32, (2, 2, sk, 4, 2, 16, 24), causal=True)
    want = run(case, device, backward=False)
    with torch.device(device):
        out = OUT_LAYOUTS[layout](want.out.shape)
        whole = torch.empty(0).set_(out.untyped_storage())
    whole.fill_(NAN)
    q, k, v = (x.to(device) for x in (case.q, case.k, case.v))
    with poisoned_allocations():
        _, lse = onefold.attention(q, k, v, causal=True, out=out, return_lse=True)
    assert_same_bits(out.contiguous().cpu(), want.out)
    assert_same_bits(lse.cpu(), want.lse)
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


def test_f06_6_out_inside_a_larger_buffer_leaves_the_rest_alone(dtype, device):
    case = make_case("normal", dtype, (2, 37, 70, 3, 1, 9, 11))
    want = run(case, device, backward=False).out
    out = surrounded(torch.zeros_like(want).to(device))
    before = surroundings(out)
    onefold.attention(*(x.to(device) for x in (case.q, case.k, case.v)), out=out)
    assert_same_bits(out.contiguous().cpu(), want)
    assert_same_bits(surroundings(out), before)


@pytest.mark.parametrize("how", ["itself", "shifted", "stride 0", "inside k"])
def test_f06_6_an_out_that_overlaps_is_refused(how, device):
    x = torch.randn(2, 8, 2, 8, generator=seeded()).to(device)
    q, k, v = (x.clone() for _ in range(3))
    flat = q.view(-1)
    out = {
        "itself": lambda: q,
        "shifted": lambda: torch.cat([flat, flat]).as_strided(q.shape, q.stride(), 0),
        "stride 0": lambda: x.new_empty(1, 8, 2, 8).expand(2, 8, 2, 8),
        "inside k": lambda: k[:, :, :],
    }[how]()
    if how == "shifted":
        q = out.as_strided(q.shape, q.stride(), 4)
    with pytest.raises(ValueError, match=r"out (shares memory with|has stride 0)"):
        onefold.attention(q, k, v, out=out)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("sk", [38, 39, 70])
def test_f06_7_few_queries_against_keys_at_the_end_of_an_allocation(sk, dim, device, place):
    for sq in range(1, 9):
        dtype = (torch.float16, torch.bfloat16, torch.float32)[sq % 3]
        case = make_case("normal", dtype, (1, sq, sk, 2, 1, dim, dim))
        want = run(case, device)
        case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
        assert_same_bits(run(case, device), want)
        for at in ("begin", "end"):
            for which in ("k", "v"):
                setattr(case, which, guarded(getattr(case, which), at))
            assert_same_bits(run(case, device), want)


@pytest.mark.parametrize("offsets", [(1, 2, 3), (4, 5, 6), (7, 1, 2)])
def test_f06_8_any_start_address_and_odd_row_strides(offsets, dtype, device):
    shape = (3, 21, 4, 24)
    case = make_case("normal", dtype, (3, 21, 21, 4, 4, 24, 24), causal=True)
    want = run(case, device)
    size = case.q.numel()
    flat = torch.empty(3 * size + 64, dtype=dtype)
    starts = [n * (size + 8) + offset for n, offset in enumerate(offsets)]
    for name, start in zip("qkv", starts, strict=True):
        view = flat[start : start + size].view(shape)
        view.copy_(getattr(case, name))
        setattr(case, name, view)
    assert_same_bits(run(case, device), want)
    for name in ("q", "k", "v", "dout"):  # rows of D + 1 elements
        x = getattr(case, name)
        odd = torch.empty(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:]
        setattr(case, name, odd.copy_(x))
    assert_same_bits(run(case, device), want)


def numpy_views(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same values with other strides."""
    wide_rows = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide_rows[..., 2:-1] = x
    return {
        "plain": x,
        "length backwards": x[:, ::-1].copy()[:, ::-1],
        "heads backwards": x[:, :, ::-1].copy()[:, :, ::-1],
        "dim backwards": x[..., ::-1].copy()[..., ::-1],
        "batch backwards": x[::-1].copy()[::-1],
        "every third": np.repeat(x, 3, axis=-1)[..., ::3],
        "column major": np.asfortranarray(x),
        "odd rows": wide_rows[..., 2:-1],
    }


@pytest.mark.parametrize("of_v", ["plain", "dim backwards", "odd rows", "column major"])
@pytest.mark.parametrize("of_k", ["plain", "heads backwards", "every third", "batch backwards"])
@pytest.mark.parametrize("of_q", ["plain", "length backwards", "dim backwards", "column major"])
def test_f06_9_numpy_arrays_with_any_strides(of_q, of_k, of_v):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 33, 4, 40)).astype(np.float32) for _ in range(3))
    want, want_lse = onefold.attention(q, k, v, causal=True, return_lse=True)
    views = numpy_views(q)[of_q], numpy_views(k)[of_k], numpy_views(v)[of_v]
    out, lse = onefold.attention(*views, causal=True, return_lse=True)
    assert np.array_equal(out, want)
    assert np.array_equal(lse, want_lse)


def test_f06_9_numpy_broadcasts_of_stride_zero():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 33, 4, 40)).astype(np.float32)
    k, v = (rng.standard_normal((1, 33, 1, 40)).astype(np.float32) for _ in range(2))
    k_all, v_all = (np.broadcast_to(x, (2, 33, 4, 40)) for x in (k, v))
    want = onefold.attention(q, k_all.copy(), v_all.copy())
    assert np.array_equal(onefold.attention(q, k_all, v_all), want)
    bias = np.broadcast_to(rng.standard_normal((33,)).astype(np.float32), (2, 4, 33, 33))
    want = onefold.attention(q, k_all, v_all, bias=bias.copy())
    assert np.array_equal(onefold.attention(q, k_all, v_all, bias=bias), want)
    backwards = bias.copy()[..., ::-1, ::-1]
    want = onefold.attention(q, k_all, v_all, bias=backwards.copy())
    assert np.array_equal(onefold.attention(q, k_all, v_all, bias=backwards), want)


@pytest.mark.parametrize("layout", ["bf16 slopes strided", "sinks strided", "lengths strided"])
def test_f06_10_small_arguments_have_strides_too(layout, device):
    case = make_case("normal", torch.float32, (2, 9, 20, 4, 2, 8, 8))
    numbers = torch.rand(2, 8, generator=seeded())
    lengths = torch.tensor([3, 99, 9, 99, 5, 99, 7, 99])
    options = {
        "bf16 slopes strided": {"alibi_slopes": numbers[:, ::2]},
        "sinks strided": {"sinks": numbers[1, ::2]},
        "lengths strided": {"seqused_k": lengths[::4], "seqused_q": lengths[4::2][:2].int()},
    }[layout]
    got = run(Case(case.q, case.k, case.v, options, case.dout, case.dlse), device)
    packed = {n: x.contiguous() for n, x in options.items()}
    want = run(Case(case.q, case.k, case.v, packed, case.dout, case.dlse), device)
    assert_same_bits(got, want)


def test_f06_10_lse_cotangents_of_any_strides(dtype, device):
    case = make_case("normal", dtype, (2, 9, 20, 4, 2, 8, 8))
    want = run(case, device)
    case.dlse = case.dlse.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(run(case, device), want)
    case.dlse = torch.ones(1, 1, 1, dtype=wide(dtype)).expand(2, 4, 9)
    got = run(case, device)
    case.dlse = case.dlse.contiguous()
    assert_same_bits(got, run(case, device))
