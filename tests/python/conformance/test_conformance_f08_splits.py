"""Splitting the keys: any partition is a re-bracketing of the same product."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch

import onefold
from buffers import poisoned_allocations, sparse
from draws import NAN, seeded
from gates import Case, Found, assert_same_bits, hold_bounds, hold_forward, make_case, normal, run


def merged(case: Case, cuts: list[int], device: str) -> Found:
    """The call over every stretch of keys between cuts, into buffers full of NaN, merged."""
    outs, lses = [], []
    for a, b in itertools.pairwise([0, *cuts, case.k.shape[1]]):
        out = torch.full((*case.q.shape[:-1], case.v.shape[-1]), NAN, dtype=case.dtype)
        q, k, v = (x.to(device) for x in (case.q, case.k[:, a:b], case.v[:, a:b]))
        out = out.to(device)
        _, lse = onefold.attention(q, k, v, out=out, return_lse=True, **case.options)
        outs.append(out.float())  # what a split keeps is not rounded to 16 bits
        lses.append(lse)
    out, lse = onefold.merge_states(outs, lses)
    return Found(out.to(case.dtype).cpu(), lse.cpu())


@pytest.fixture(scope="module")
def decoding() -> Case:
    case = make_case("normal", torch.float32, (1, 1, 1024, 4, 2, 64, 64))
    case.dout = case.dlse = None
    return case


@pytest.mark.parametrize("count", range(1, 129))
def test_f08_1_any_number_of_splits_gives_the_whole(count, decoding, device):
    keys = decoding.k.shape[1]
    cuts = [keys * n // count for n in range(1, count)]
    hold_forward(decoding, merged(decoding, cuts, device), device)


@pytest.mark.parametrize("keys", [1023, 1024, 1025, 2047, 2048, 2049, 4096, 5000])
def test_f08_1_long_caches_are_split_inside_and_stay_within_the_bound(keys, device):
    for dtype in (torch.float32, torch.bfloat16):
        shape = (1, 1, keys, 16, 8, 32, 32)
        case = make_case("normal", dtype, shape)
        case.dout = case.dlse = None
        hold_bounds(case, device)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_f08_2_packed_single_queries_leave_nothing_of_what_out_held(threads, device):
    g = seeded()
    q = normal(g, 2, 4, 64).to(torch.bfloat16)
    k, v = (normal(g, 3000, 4, 64).to(torch.bfloat16) for _ in range(2))
    lengths = {"cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": [0, 1024, 3000]}
    before = onefold.get_num_threads()
    onefold.set_num_threads(threads)
    try:
        with poisoned_allocations():
            out = torch.full((2, 4, 64), NAN, dtype=torch.bfloat16)
            _, lse = onefold.attention(q, k, v, out=out, return_lse=True, **lengths)
    finally:
        onefold.set_num_threads(before)
    hold_forward(Case(q, k, v, lengths), Found(out, lse), device)


def test_f08_3_a_shared_prefix_and_suffixes_merge_to_one_call(device):
    """Group of 4, three sequences that share 1500 keys and have their own tails."""
    g = seeded()
    heads, kv_heads, dim = 8, 2, 64
    q = normal(g, 3, 1, heads, dim).float()
    prefix_k, prefix_v = (normal(g, 1, 1500, kv_heads, dim).float() for _ in range(2))
    tails = [5, 0, 1100]
    tail_k, tail_v = (normal(g, sum(tails), kv_heads, dim).float() for _ in range(2))
    cu = [0, *itertools.accumulate(tails)]
    shared = onefold.attention(
        q, prefix_k.expand(3, -1, -1, -1), prefix_v.expand(3, -1, -1, -1), return_lse=True
    )
    own = onefold.attention(
        q[:, 0], tail_k, tail_v, cu_seqlens_q=[0, 1, 2, 3], cu_seqlens_k=cu, return_lse=True
    )
    assert own[1].shape == (heads, 3)
    out, lse = onefold.merge_states([shared[0][:, 0], own[0]], [shared[1][..., 0].mT, own[1]])
    for b, n in enumerate(tails):
        at = slice(cu[b], cu[b] + n)
        k = torch.cat([prefix_k, tail_k[None, at]], 1)
        v = torch.cat([prefix_v, tail_v[None, at]], 1)
        whole = Case(q[b : b + 1], k, v)
        hold_forward(whole, Found(out[b : b + 1, None], lse[:, b][None, :, None]), device)


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([4096 + 4, 17], r"seqused_k\[0\] is 4100: sequence 0 has 4096 rows"),
        ([5, 4097], r"seqused_k\[1\] is 4097: sequence 1 has 4096 rows"),
        ([5, -1], r"seqused_k\[1\] is -1"),
    ],
)
@pytest.mark.parametrize("kind", ["list", "int32", "int64"])
def test_f08_4_a_cache_length_beyond_the_cache_is_refused_naming_the_row(
    lengths, sentence, kind, device
):
    q = torch.zeros(2, 1, 1, 8, device=device)
    k = torch.zeros(2, 4096, 1, 8, device=device)
    given = lengths if kind == "list" else torch.tensor(lengths, dtype=getattr(torch, kind))
    with pytest.raises(ValueError, match=sentence):
        onefold.attention(q, k, k, seqused_k=given)


@pytest.mark.parametrize("keyword", ["k_new", "v_new", "cache_seqlens", "slot_mapping"])
def test_f08_4_appending_to_a_cache_is_refused_by_name(keyword, device):
    q = torch.zeros(2, 1, 1, 8, device=device)
    with pytest.raises(TypeError, match=keyword):
        onefold.attention(q, q, q, **{keyword: q})


@pytest.mark.parametrize("queries", [1, 4, 6])
def test_f08_5_full_and_window_layers_in_turn_through_one_allocator(queries, device):
    """Head dim 512 with a group of 8, and 256 with windows: each as if it ran alone."""
    g = seeded()

    def layer(heads, kv_heads, dim, length, **options):
        q = normal(g, 2, queries, heads, dim).to(torch.bfloat16)
        k, v = (normal(g, 2, length, kv_heads, dim).to(torch.bfloat16) for _ in range(2))
        return Case(q, k, v, options)

    full = layer(16, 2, 512, 1300, causal=True)
    window = layer(16, 8, 256, 1200, causal=True, window=(1023, None))
    alone = [run(full, device), run(window, device)]
    with poisoned_allocations():
        for _ in range(3):
            assert_same_bits(run(full, device), alone[0])
            assert_same_bits(run(window, device), alone[1])
    some = Case(window.q[..., :4, :], window.k[..., :2, :], window.v[..., :2, :], window.options)
    hold_bounds(some, device)


def test_f08_6_a_huge_cache_with_few_live_rows_costs_what_is_live(device, capsys):
    batch, allocated, live, heads, dim = 8, 131072, 512, 8, 64
    shape = (batch, allocated, heads, dim)
    flat_k, flat_v = (sparse(math.prod(shape), torch.bfloat16) for _ in range(2))
    k, v = flat_k.view(shape), flat_v.view(shape)
    g = seeded()
    small = [normal(g, batch, live, heads, dim).to(torch.bfloat16) for _ in range(2)]
    k[:, :live], v[:, :live] = small
    q = normal(g, batch, 1, 32, dim).to(torch.bfloat16)
    used = {"seqused_k": [live] * batch}
    want = run(Case(q, *small), device)
    assert_same_bits(run(Case(q, k, v, used), device), want)
    here = onefold.explain(q, k, v, **used)
    there = onefold.explain(q, *small)
    assert here.forward.work_items == there.forward.work_items
    assert here.forward.workspace_bytes == there.forward.workspace_bytes
    start = time.monotonic()
    for _ in range(3):
        onefold.attention(q, *small)
    middle = time.monotonic()
    for _ in range(3):
        onefold.attention(q, k, v, **used)
    assert time.monotonic() - middle < 20 * (middle - start) + 1.0  # 256 times the rows


@pytest.mark.parametrize("dims", [(192, 192), (128, 192)])
def test_f08_7_the_gradient_of_a_sink_over_a_ragged_batch(dims, device):
    g = seeded()
    lengths = [40, 1, 77, 0, 130]
    cu = [0, *itertools.accumulate(lengths)]
    total, heads = cu[-1], 4
    q = normal(g, total, heads, dims[0]).float()
    k = normal(g, total, 2, dims[0]).float()
    v = normal(g, total, 2, dims[1]).float()
    dout = normal(g, total, heads, dims[1]).float()
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True, "sinks": torch.rand(heads)}
    case = Case(q, k, v, options, dout)
    found = hold_bounds(case, device)
    want = case.exact_gradients.sinks
    assert ((found.gradients["sinks"].double() - want).abs() <= 1e-6 * want.abs().max()).all()


@pytest.mark.parametrize("which", ["page_table", "num_splits", "scheduler_metadata"])
def test_f08_8_options_of_split_and_paged_paths_are_refused_by_name(which, device):
    q = torch.zeros(2, 1, 1, 8, device=device)
    with pytest.raises(TypeError, match=which):
        onefold.attention(q, q, q, **{which: 1})


def test_f08_9_where_the_cuts_are_does_not_depend_on_other_sequences(device):
    """A long cache alone, and beside others: the same stretches, the same bits."""
    g = seeded()
    q = normal(g, 4, 1, 4, 32).float()
    k, v = (normal(g, 4, 3500, 2, 32).float() for _ in range(2))
    used = [3500, 10, 1025, 2000]
    whole = run(Case(q, k, v, {"seqused_k": used}), device)
    for b, n in enumerate(used):
        at = slice(b, b + 1)
        alone = run(Case(q[at], k[at, :n], v[at, :n]), device)
        assert_same_bits(whole.out[at], alone.out)
        assert_same_bits(whole.lse[at], alone.lse)
