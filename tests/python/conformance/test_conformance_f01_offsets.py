"""Offsets wider than 32 bits: strides beyond 2^31 and 2^32 elements, over address ranges that take
no memory, and as many batches and keys as fit."""

from __future__ import annotations

import pytest
import torch

import onefold
from buffers import sparse, strided
from draws import seeded
from gates import (
    Case,
    assert_same_bits,
    assert_same_bits_or_both_right,
    hold_bounds,
    make_case,
    normal,
    run,
)

BEYOND_31 = 2**31 + 8
BEYOND_32 = 2**32 + 24


@pytest.fixture(autouse=True)
def on_the_cpu(device):
    if device != "cpu":
        pytest.skip("the small variant lies in address space that only the CPU has")


@pytest.mark.parametrize("stride", [65537, 73728, BEYOND_31, BEYOND_32])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_f01_1_a_mask_with_a_row_stride_beyond_32_bits_is_the_causal_mask(stride, dropout_p):
    case = make_case("normal", torch.bfloat16, (1, 4, 37, 2, 2, 128, 128))
    options = {"dropout_p": dropout_p, "seed": 5}
    seen = torch.arange(37) <= torch.arange(4)[:, None] + 33
    mask = strided(seen, (stride, 1))
    masked = Case(case.q, case.k, case.v, options | {"mask": mask}, case.dout, case.dlse)
    causal = Case(case.q, case.k, case.v, options | {"causal": True}, case.dout, case.dlse)
    assert_same_bits(run(masked), run(causal))


@pytest.mark.parametrize("row", [-1, 0, 1])
def test_f01_1_rows_around_the_one_where_a_square_mask_passes_32_bits(row):
    """Of a (73728, 73728) mask, four rows whose offsets lie on both sides of 2^32."""
    size = 73728
    first = 2**32 // size + row - 2
    whole = sparse(size * size, torch.bool).view(size, size)
    seen = torch.rand(4, 50, generator=seeded()) < 0.5
    whole[first : first + 4, :50] = seen
    case = make_case("normal", torch.bfloat16, (1, 4, 50, 1, 1, 16, 16))
    got = run(Case(case.q, case.k, case.v, {"mask": whole[first : first + 4, :50]}, case.dout))
    want = run(Case(case.q, case.k, case.v, {"mask": seen}, case.dout))
    assert_same_bits(got, want)


@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("axis", ["batch", "head"])
def test_f01_2_a_mask_with_huge_batch_or_head_strides_equals_the_broadcast_one(kind, axis):
    case = make_case("normal", torch.float16, (3, 8, 8, 2, 2, 16, 16))
    one = torch.rand(1, 1, 8, 8, generator=seeded(1)) < 0.6
    one[..., 0] = True
    if kind == "bias":
        one = normal(seeded(1), 1, 1, 8, 8).to(torch.float16)
    strides = (2**31, 64, 8, 1) if axis == "batch" else (128, 2**32, 8, 1)
    full = strided(one.expand(3, 2, 8, 8), strides)
    got = run(Case(case.q, case.k, case.v, {kind: full}, case.dout, case.dlse))
    want = run(Case(case.q, case.k, case.v, {kind: one}, case.dout, case.dlse))
    want.gradients.pop("bias", None)
    of_bias = got.gradients.pop("bias", None)
    assert_same_bits(got, want)
    if kind == "bias":
        dense = run(Case(case.q, case.k, case.v, {kind: full.clone()}, case.dout, case.dlse))
        assert_same_bits(of_bias, dense.gradients["bias"])


@pytest.mark.parametrize(
    ("batch", "place"), [(8192, "plain"), (8193, "nan"), (8300, "guard")], indirect=["place"]
)
def test_f01_3_more_than_eight_thousand_batches_of_one_key(batch, place):
    shape = (batch, 1, 16, 128)
    g = seeded()
    q, k, v = (torch.randn(shape, generator=g).to(torch.bfloat16) for _ in range(3))
    q, k, v = (place(x).requires_grad_() for x in (q, k, v))
    out = onefold.attention(q, k, v)
    assert_same_bits(out.detach(), v.detach().contiguous(), "out")
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq.any()
    assert not dk.any()
    assert (dv == 1).all()


def test_f01_4_a_cotangent_with_a_huge_row_stride_gives_the_gradients_of_its_copy():
    heads, dim, tokens = 4, 96, 2060
    lengths = {"cu_seqlens_q": [0, 2048, 2060], "cu_seqlens_k": [0, 9, 40]}
    g = seeded()
    q = normal(g, tokens, heads, dim).to(torch.bfloat16)
    k, v = (normal(g, 40, heads, dim).to(torch.bfloat16) for _ in range(2))
    dout = normal(g, tokens, heads, dim).to(torch.bfloat16)
    far = strided(dout, (2**20 + 3, dim, 1))
    assert far.stride(0) * 2059 > 2**31
    assert_same_bits(run(Case(q, k, v, lengths, far)), run(Case(q, k, v, lengths, dout)))


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_f01_5_every_stride_of_every_tensor_may_pass_32_bits(which, axis):
    case = make_case("normal", torch.float16, (3, 5, 7, 3, 3, 8, 8))
    parts = {"q": case.q, "k": case.k, "v": case.v, "dout": case.dout}
    strides = list(parts[which].stride())
    strides[axis] = 2**31 + 64 if axis < 3 else 2**29 + 64
    parts[which] = strided(parts[which], tuple(strides))
    moved = Case(parts["q"], parts["k"], parts["v"], {}, parts["dout"], case.dlse)
    assert_same_bits_or_both_right(moved, case, "cpu")


def test_f01_5_out_with_a_stride_beyond_32_bits_is_written_where_it_should():
    case = make_case("normal", torch.float16, (3, 5, 7, 3, 3, 8, 8))
    want = run(case, backward=False).out
    out = strided(torch.zeros_like(want), (BEYOND_32, 2**29 + 8, 8, 1))
    onefold.attention(case.q, case.k, case.v, out=out)
    assert_same_bits(out.contiguous(), want)


def test_f01_6_caches_of_many_layers_in_one_buffer_are_read_at_their_slots():
    """Batch stride 2^30 elements: slot 4 starts at 2^32."""
    layers, length, heads, dim, slots = 32, 4096, 32, 128, 5
    stride = layers * 2 * length * heads * dim
    assert stride == 2**30
    buffer = sparse(slots * stride, torch.float16)
    shape = (slots, length, heads, dim)
    strides = (stride, heads * dim, dim, 1)
    k = buffer.as_strided(shape, strides, 3 * 2 * length * heads * dim)
    v = buffer.as_strided(shape, strides, (3 * 2 + 1) * length * heads * dim)
    used = [3, 1, 4, 2, 3]
    small = normal(seeded(), 2, slots, 4, heads, dim).to(torch.float16)
    k[:, :4], v[:, :4] = small[0], small[1]
    q = normal(seeded(1), slots, 1, heads, dim).to(torch.float16)
    got = run(Case(q, k, v, {"seqused_k": used}))
    want = run(Case(q, small[0], small[1], {"seqused_k": used}))
    assert_same_bits(got, want)


@pytest.mark.parametrize("keys", [32767, 32768, 32769, 33728, 65535, 65536, 65537])
def test_f01_7_lengths_have_more_than_16_bits(keys, place):
    q = place(torch.zeros(1, 4, 1, 64))
    k = torch.zeros(1, keys, 1, 64)
    v = torch.zeros(1, keys, 1, 8)
    v[:, -1] = 1.0
    out, lse = onefold.attention(q, place(k), place(v), causal=True, return_lse=True)
    seen = torch.arange(keys - 3, keys + 1).double()
    assert not out[:, :3].any()
    assert ((out[:, 3].double() - 1 / keys).abs() <= 1e-6 / keys).all()
    assert ((lse.double() - seen.log()).abs() <= 1e-6 * 12).all()


def test_f01_7_zeros_of_head_dim_512_give_zeros():
    q, k = torch.zeros(1, 4, 1, 512), torch.zeros(1, 33728, 1, 512)
    assert not onefold.attention(q, k, k).any()


@pytest.mark.parametrize("swapped", [False, True])
def test_f01_8_many_heads_and_a_head_dim_of_72_with_length_and_heads_either_way(swapped):
    shape = (4, 729, 16, 72) if swapped else (16, 16, 729, 72)
    g = seeded()
    q, k, v = (torch.randn(shape, generator=g).to(torch.bfloat16) for _ in range(3))
    found = run(Case(q, k, v))
    rows, heads = (
        (slice(None, None, 73), slice(None)) if swapped else (slice(None), slice(0, 729, 81))
    )
    for b in (0, shape[0] - 1):
        at = slice(b, b + 1)
        case = Case(q[at, rows, heads], k[at, :, heads], v[at, :, heads])
        some = run(case)
        assert_same_bits(some.out, found.out[at, rows, heads])
        hold_bounds(case, found=some)
