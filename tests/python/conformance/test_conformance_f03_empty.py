"""Empty and degenerate shapes: every extent may be 0 or 1, at every place of a packed batch."""

from __future__ import annotations

import itertools

import pytest
import torch

import onefold
from buffers import surrounded, surroundings
from draws import INF, seeded
from gates import FLOATS, Case, assert_same_bits, hold_bounds, make_case, normal, run, wide


def packed(cu_q, cu_k, heads, kv_heads, dim, dtype, place=lambda x: x, draw=0, **options):
    g = seeded(draw)
    q = normal(g, cu_q[-1], heads, dim).to(dtype)
    k, v = (normal(g, cu_k[-1], kv_heads, dim).to(dtype) for _ in range(2))
    dout = normal(g, cu_q[-1], heads, dim).to(dtype)
    dlse = normal(g, heads, cu_q[-1]).to(wide(dtype))
    lengths = {"cu_seqlens_q": list(cu_q), "cu_seqlens_k": list(cu_k)}
    return Case(*(place(x) for x in (q, k, v)), lengths | options, place(dout), place(dlse))


def test_f03_1_one_query_and_one_key_give_v_and_no_gradient_of_q_and_k(device, place):
    g = seeded()
    for name in ("float16", "bfloat16"):
        q, k, v = ((3 * torch.randn(1, 1, 1, 16, generator=g)).to(FLOATS[name]) for _ in range(3))
        case = Case(place(q), place(k), place(v), {}, place(torch.ones(1, 1, 1, 16).to(q.dtype)))
        found = run(case, device)
        assert_same_bits(found.out, v)
        assert not found.gradients["q"].any()
        assert not found.gradients["k"].any()
        assert (found.gradients["v"] == 1).all()


def test_f03_2_keys_of_sequences_without_queries_get_zero_gradients(device, place):
    cu_q, cu_k = [0, 0, 302, 512, 512], [0, 634, 1070, 1280, 2048]
    case = packed(cu_q, cu_k, 4, 1, 64, torch.bfloat16, place, max_seqlen_q=302, max_seqlen_k=768)
    found = run(case, device)
    for name in ("k", "v"):
        gradient = found.gradients[name]
        assert not gradient[:634].any()
        assert not gradient[1280:].any()
        assert gradient[634:1280].isfinite().all()
        assert gradient[634:1280].any()
    hold_bounds(case, device, found)


def test_f03_2_empty_sequences_at_both_ends_at_full_size(device):
    cu_q, cu_k = [0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]
    case = packed(cu_q, cu_k, 4, 1, 256, torch.bfloat16)
    found = run(case, device)
    for name in ("k", "v"):
        assert not found.gradients[name][:2538].any()
        assert not found.gradients[name][5120:].any()
    for b in (1, 2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = Case(
            case.q[None, rows],
            case.k[None, keys],
            case.v[None, keys],
            {},
            case.dout[None, rows],
            case.dlse[None, :, rows],
        )
        dense = run(alone, device)
        assert_same_bits(found.out[rows], dense.out[0], "out")
        assert_same_bits(found.gradients["q"][rows], dense.gradients["q"][0], "dq")
        assert_same_bits(found.gradients["k"][keys], dense.gradients["k"][0], "dk")


def test_f03_3_sequences_without_keys_are_zero_and_touch_nothing_else(device, place):
    cu_q, cu_k = [0, 64, 128, 192], [0, 0, 128, 128]
    case = packed(cu_q, cu_k, 4, 4, 64, torch.float32, place)
    found = hold_bounds(case, device)
    for rows in (slice(0, 64), slice(128, 192)):
        assert not found.out[rows].any()
        assert (found.lse[:, rows] == -INF).all()
        assert not found.gradients["q"][rows].any()
    assert found.out[64:128].all()


def test_f03_4_one_query_for_three_and_for_five_keys(device, place):
    case = packed(
        [0, 1, 1, 2], [0, 3, 3, 8], 9, 3, 64, torch.bfloat16, place,
        causal=True, scale=1.0, max_seqlen_q=1, max_seqlen_k=5,
    )  # fmt: skip
    found = hold_bounds(case, device)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        alone = Case(case.q[row : row + 1, None], case.k[None, keys], case.v[None, keys])
        alone.options = {"scale": 1.0}
        assert_same_bits(found.out[row], run(alone, device).out[0, 0])


def test_f03_5_a_batch_of_none_gives_empty_results(device):
    q = torch.zeros(0, 3952, 10, 64, dtype=torch.float16, device=device, requires_grad=True)
    k = torch.zeros(0, 16, 10, 64, dtype=torch.float16, device=device, requires_grad=True)
    v = torch.zeros(0, 16, 10, 64, dtype=torch.float16, device=device, requires_grad=True)
    out, lse = onefold.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (0, 10, 3952)
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.shape == x.shape


def test_f03_5_a_batch_of_none_asks_for_no_work(device, capsys):
    q = torch.zeros(0, 3952, 10, 64, dtype=torch.float16, device=device)
    plan = onefold.explain(q, q, q)
    assert plan.forward.work_items == 0
    assert plan.backward.work_items == 0


def test_f03_6_decoding_against_caches_of_any_length_is_each_row_alone(device, place):
    """576 numbers per key and 512 per value, shared by 16 heads."""
    g = seeded()
    q = normal(g, 4, 1, 16, 576).to(torch.bfloat16)
    k = normal(g, 4, 80, 1, 576).to(torch.bfloat16)
    lengths = [0, 1, 64, 65]
    found = run(Case(place(q), place(k), place(k)[..., :512], {"seqused_k": lengths}), device)
    assert not found.out[0].any()
    assert (found.lse[0] == -INF).all()
    for b in (1, 2, 3):
        at, n = slice(b, b + 1), lengths[b]
        alone = run(Case(q[at], k[at, :n], k[at, :n, :, :512]), device)
        assert_same_bits(found.out[at], alone.out)
        assert_same_bits(found.lse[at], alone.lse)


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 9), (1, 127), (1001, 503), (9, 9)])
def test_f03_7_lengths_that_fill_no_tile(sq, sk, device, place):
    case = make_case("normal", torch.float16, (1, sq, sk, 2, 2, 64, 64))
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    if sq > 500:
        case.dout = case.dlse = None
    hold_bounds(case, device)


@pytest.mark.parametrize("lengths", list(itertools.product((0, 1, 70), repeat=3)), ids=str)
def test_f03_8_empty_sequences_anywhere_in_a_packed_batch(lengths, device):
    cu_q = [0, *itertools.accumulate(lengths)]
    cu_k = [0, *itertools.accumulate(reversed(lengths))]
    for causal in (False, True):
        hold_bounds(packed(cu_q, cu_k, 2, 1, 16, torch.float32, causal=causal), device)


def test_f03_8_a_batch_of_no_sequences_is_refused_or_empty(device):
    q = torch.zeros(0, 2, 8, device=device)
    out, lse = onefold.attention(q, q, q, cu_seqlens_q=[0], cu_seqlens_k=[0], return_lse=True)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


@pytest.mark.parametrize("extents", list(itertools.product((0, 1), repeat=5)), ids=str)
def test_f03_9_any_combination_of_extents_of_zero_and_one(extents, device):
    batch, sq, sk, heads, d = extents
    for dv in (0, 1):
        case = make_case("normal", torch.float32, (batch, sq, sk, heads, heads, 8, 8))
        case.q, case.k, case.v = case.q[..., :d], case.k[..., :d], case.v[..., :dv]
        case.dout = case.dout[..., :dv]
        found = run(case, device)
        assert found.out.shape == (batch, sq, heads, dv)
        assert found.lse.shape == (batch, heads, sq)
        if sk == 0:
            assert not found.out.any()
            assert (found.lse == -INF).all()


def test_f03_9_out_of_no_elements_is_left_alone(device):
    out = surrounded(torch.zeros(2, 0, 3, 8, device=device))
    before = surroundings(out)
    q, k = torch.zeros(2, 0, 3, 8, device=device), torch.zeros(2, 5, 3, 8, device=device)
    onefold.attention(q, k, k, out=out)
    assert_same_bits(surroundings(out), before)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (((2, 3, 4, 8), (2, 5, 4, 7), (2, 5, 4, 8)), "head_dim of k is 7: 8 is needed"),
        (((2, 3, 4, 8), (1, 5, 4, 8), (1, 5, 4, 8)), "batch of k is 1: 2 is needed"),
        (((2, 3, 4, 8), (2, 5, 4, 8), (2, 6, 4, 8)), "seqlen of v is 6: 5 is needed"),
        (((2, 3, 4, 8), (2, 5, 4, 8), (2, 5, 2, 8)), "heads of v is 2: 4 is needed"),
        (((2, 3, 4, 8), (2, 5, 0, 8), (2, 5, 0, 8)), "q has 4 heads and k has 0"),
        (((3, 4, 8), (5, 4, 8), (5, 4, 8)), "q has 3 axes"),
        (((2, 3, 4), (2, 5, 4), (2, 5, 4)), "q has 3 axes"),
    ],
)
def test_f03_10_invalid_shapes_raise_one_sentence(shapes, sentence, device):
    q, k, v = (torch.zeros(s, device=device) for s in shapes)
    with pytest.raises(ValueError, match=sentence):
        onefold.attention(q, k, v)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "sentence"),
    [
        ([0, 5, 3], [0, 2, 4], r"cu_seqlens_q\[2\] is 3 after 5"),
        ([1, 3, 6], [0, 2, 4], "cu_seqlens_q starts with 1"),
        ([0, 3, 7], [0, 2, 4], "cu_seqlens_q ends with 7: q has 6 rows"),
        ([0, 3, 6], [0, 2, 5], "cu_seqlens_k ends with 5: k has 4 rows"),
        ([0, 3, 6], [0, 2, 4, 4], "length of cu_seqlens_k is 4: 3 is needed"),
        ([0, -3, 6], [0, 2, 4], r"cu_seqlens_q\[1\] is -3 after 0"),
        ([], [0, 2, 4], "cu_seqlens_q is empty"),
    ],
)
def test_f03_10_invalid_offsets_raise_one_sentence(cu_q, cu_k, sentence, device):
    q, k = torch.zeros(6, 2, 8, device=device), torch.zeros(4, 2, 8, device=device)
    with pytest.raises(ValueError, match=sentence):
        onefold.attention(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
