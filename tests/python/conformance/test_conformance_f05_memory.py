"""Memory that is not part of the problem: padding, unused slots, old contents, neighbours."""

from __future__ import annotations

import pytest
import torch

import onefold
from buffers import guarded, poisoned_allocations, surrounded
from draws import INF, NAN, seeded
from gates import Case, Found, assert_same_bits, make_case, normal, run, wide


def cache_case(dtype, batch, queries, length, heads, dim, used, fill, place):
    """q against caches of which only the used rows mean something."""
    g = seeded()
    q = normal(g, batch, queries, heads, dim).to(dtype)
    k, v = (normal(g, batch, length, heads, dim).to(dtype) for _ in range(2))
    dout = normal(g, batch, queries, heads, dim).to(dtype)
    fill_k, fill_v = fill
    for b, n in enumerate(used):
        k[b, n:], v[b, n:] = fill_k, fill_v
    return Case(place(q), place(k), place(v), {"seqused_k": list(used)}, place(dout))


FILLS = {
    "k nan": (NAN, 0.0),
    "v nan": (0.0, NAN),
    "both nan": (NAN, NAN),
    "both inf": (INF, -INF),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    ("name", "batch", "length", "heads", "used"),
    [
        ("float16", 2, 3, 1, (1, 3)),
        ("bfloat16", 4, 128, 8, (32, 64, 96, 48)),
        ("float32", 2, 200, 4, (127, 0)),
    ],
)
def test_f05_1_cache_rows_beyond_the_length_have_no_effect(
    name, batch, length, heads, used, fill, device, place
):
    dtype = getattr(torch, name)
    for queries in (1, 5):
        shape = (dtype, batch, queries, length, heads, 64, used)
        clean = run(cache_case(*shape, (0.0, 0.0), lambda x: x), device)
        assert_same_bits(run(cache_case(*shape, FILLS[fill], place), device), clean)


@pytest.mark.parametrize("fill", FILLS)
def test_f05_2_long_caches_with_a_last_partial_tile(fill, device):
    """4 query heads per key head; lengths 1300 and 1290 of 1400 rows: stretches and tile tails."""
    g = seeded()
    q = normal(g, 2, 1, 8, 128).to(torch.bfloat16)
    k, v = (normal(g, 2, 1400, 2, 128).to(torch.bfloat16) for _ in range(2))
    used = {"seqused_k": [1300, 1290]}
    clean = run(Case(q, k, v, used), device)
    for b, n in enumerate(used["seqused_k"]):
        k[b, n:], v[b, n:] = FILLS[fill]
    with poisoned_allocations():
        assert_same_bits(run(Case(surrounded(q), k, v, used), device), clean)


@pytest.mark.parametrize(
    "keyword",
    ["page_table", "block_table", "cache_seqlens", "k_cache", "block_mask", "num_splits"],
)
def test_f05_2_options_of_paged_caches_are_refused_by_name(keyword, device):
    q = torch.zeros(1, 1, 2, 8, device=device)
    with pytest.raises(TypeError, match=keyword):
        onefold.attention(q, q, q, **{keyword: torch.zeros(1, 1, dtype=torch.int32)})


@pytest.mark.parametrize("sinks", [False, True])
def test_f05_3_rows_after_the_last_offset_are_zero(sinks, dtype, device, place):
    rows, live, heads = 512, 352, 2
    g = seeded()
    q, k, v, dout = (normal(g, rows, heads, 16).to(dtype) for _ in range(4))
    dlse = normal(g, heads, rows).to(wide(dtype))
    for x in (q, k, v, dout):
        x[live:] = NAN
    dlse[:, live:] = NAN
    cu = [0, 100, 101, live]
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    if sinks:
        options["sinks"] = torch.tensor([0.5, 1.5], dtype=wide(dtype))
    case = Case(*(place(x) for x in (q, k, v)), options, place(dout), place(dlse))
    with poisoned_allocations():
        found = run(case, device)
    assert not found.out[live:].any()
    assert (found.lse[:, live:] == -INF).all()
    for name in "qkv":
        assert not found.gradients[name][live:].any()
        assert found.gradients[name].isfinite().all()
    short = run(
        Case(q[:live], k[:live], v[:live], options, dout[:live], dlse[:, :live].contiguous()),
        device,
    )
    assert_same_bits(found.out[:live], short.out)
    for name in short.gradients:
        got = found.gradients[name]
        assert_same_bits(got[:live] if name in "qkv" else got, short.gradients[name], name)


def test_f05_3_rows_beyond_seqused_are_zero_and_never_read(dtype, device, place):
    case = make_case("normal", dtype, (3, 40, 70, 2, 2, 16, 24))
    used_q, used_k = [40, 7, 0], [33, 70, 5]
    case.options = {"seqused_q": used_q, "seqused_k": used_k}
    clean = run(case, device)
    for b in range(3):
        for x in (case.q, case.dout):
            x[b, used_q[b] :] = NAN
        case.dlse[b, :, used_q[b] :] = NAN
        for x in (case.k, case.v):
            x[b, used_k[b] :] = NAN
    parts = [place(x) for x in (case.q, case.k, case.v)]
    with poisoned_allocations():
        found = run(Case(*parts, case.options, place(case.dout), place(case.dlse)), device)
    assert_same_bits(found, clean)
    for b, n in enumerate(used_q):
        assert not found.out[b, n:].any()
        assert (found.lse[b, :, n:] == -INF).all()
        assert not found.gradients["q"][b, n:].any()


@pytest.mark.parametrize("options", ["plain", "bias", "slopes and sinks", "dropout"])
def test_f05_4_workspaces_full_of_nan_change_no_gradient(options, device):
    heads, kv_heads, dtype = 6, 2, torch.bfloat16
    cu_q, cu_k = [0, 37, 100, 101], [0, 90, 91, 200]
    g = seeded()
    q, dout = (normal(g, 101, heads, 24).to(dtype) for _ in range(2))
    k, v = (normal(g, 200, kv_heads, 24).to(dtype) for _ in range(2))
    more = {
        "plain": {},
        "bias": {"bias": normal(g, 1, heads, 1, 109).to(dtype)},
        "slopes and sinks": {"alibi_slopes": torch.rand(heads), "sinks": torch.rand(heads)},
        "dropout": {"dropout_p": 0.4, "seed": 9},
    }[options]
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    lengths |= {"max_seqlen_q": 63, "max_seqlen_k": 109}
    case = Case(q, k, v, lengths | more, dout)
    clean = run(case, device)
    with poisoned_allocations():
        for _ in range(3):
            assert_same_bits(run(case, device), clean)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fill", [1000.0, -1e30, NAN])
def test_f05_5_a_simulated_ring_does_not_see_what_its_buffers_held(fill, ranks, device):
    """Only the last sequence is padded; every rank attends to the keys of one share at a time."""
    lengths, dim = [40, 24, 13], 16
    padded = -(-13 // (2 * ranks)) * 2 * ranks
    g = seeded()
    total = 40 + 24 + padded
    q, k, v = (normal(g, total, 2, dim).to(torch.bfloat16) for _ in range(3))
    starts = [0, 40, 64]

    def ring() -> Found:
        out = torch.full((total, 2, dim), fill, dtype=torch.bfloat16, device=device)
        lse = torch.full((2, total), fill, device=device)
        for start, rows, n in zip(starts, [40, 24, padded], lengths, strict=True):
            share = -(-n // ranks)
            outs, lses = [], []
            for rank in range(ranks):
                part = torch.full_like(out[:rows], fill)[None]
                keys = slice(start + min(n, rank * share), start + min(n, (rank + 1) * share))
                at = slice(start, start + rows)
                _, part_lse = onefold.attention(
                    q[None, at].to(device), k[None, keys].to(device), v[None, keys].to(device),
                    seqused_q=[n], out=part, return_lse=True,
                )  # fmt: skip
                outs.append(part)
                lses.append(part_lse)
            merged, merged_lse = onefold.merge_states(outs, lses)
            out[start : start + rows], lse[:, start : start + rows] = merged[0], merged_lse[0]
        return Found(out.cpu(), lse.cpu())

    first = ring()
    for _ in range(5):
        assert_same_bits(ring(), first)
    cu = [0, 40, 64, total]
    used = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "seqused_q": lengths, "seqused_k": lengths}
    whole = run(Case(q, k, v, used), device)
    assert torch.equal(first.lse == -INF, whole.lse == -INF)
    assert ((first.out.double() - whole.out.double()).abs() <= 2 * 2.0**-8 * 2).all()


@pytest.mark.parametrize("what", ["k 1e10", "k nan", "v nan", "both nan"])
def test_f05_6_a_masked_key_may_hold_anything(what, dtype, device, place):
    x = torch.arange(8.0).view(1, 2, 1, 4).to(dtype)
    mask = torch.tensor([True, False])
    k, v = x.clone(), x.clone()
    huge = 1e10 if dtype != torch.float16 else 60000.0
    if what.startswith(("k", "both")):
        k[:, 1] = huge if what == "k 1e10" else NAN
    if what in ("v nan", "both nan"):
        v[:, 1] = NAN
    dout = torch.ones(1, 2, 1, 4, dtype=dtype)
    found = run(Case(place(x), place(k), place(v), {"mask": place(mask)}, place(dout)), device)
    want = x[:, :1].expand(1, 2, 1, 4).double()
    ulps = 0 if dtype in (torch.float16, torch.bfloat16) else 2
    assert ((found.out.double() - want).abs() <= ulps * torch.finfo(dtype).eps * want).all()
    for name in ("k", "v"):
        assert not found.gradients[name][:, 1].any()
    assert all(g.isfinite().all() for g in found.gradients.values())


def test_f05_7_queries_of_nan_give_nan_everywhere(dtype, device, place):
    q = torch.full((2, 16, 4, 8), NAN, dtype=dtype)
    k, v = (normal(seeded(n), 2, 16, 4, 8).to(dtype) for n in (1, 2))
    found = run(Case(place(q), place(k), place(v)), device)
    assert found.out.isnan().all()
    assert found.lse.isnan().all()


@pytest.mark.parametrize("row", [0, 7, 15])
def test_f05_7_nan_in_one_query_row_stays_in_that_row(row, dtype, device, place):
    q, k, v, dout = (normal(seeded(n), 2, 16, 4, 8).to(dtype) for n in range(4))
    clean = run(Case(q, k, v, {}, dout), device)
    q[:, row] = NAN
    found = run(Case(place(q), place(k), place(v), {}, place(dout)), device)
    rest = torch.arange(16) != row
    assert found.out[:, row].isnan().all()
    assert found.lse[:, :, row].isnan().all()
    assert_same_bits(found.out[:, rest], clean.out[:, rest])
    assert_same_bits(found.lse[:, :, rest], clean.lse[:, :, rest])
    assert_same_bits(found.gradients["q"][:, rest], clean.gradients["q"][:, rest])
    assert found.gradients["k"].isnan().all()  # every key is seen by that row


@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "dlse", "out", "lse"])
@pytest.mark.parametrize("at", ["begin", "end"])
def test_f05_8_nothing_before_or_after_a_tensor_is_touched(which, at, dtype, device):
    """Guard pages on both sides, one tensor at a time, for odd sizes."""
    case = make_case("normal", dtype, (2, 19, 67, 3, 1, 13, 21), causal=True)
    clean = run(case, device)
    if which in ("out", "lse"):
        if device != "cpu":
            pytest.skip("guard pages are host memory")
        out = guarded(torch.full_like(clean.out, NAN), at)
        got = onefold.attention(case.q, case.k, case.v, causal=True, out=out)
        assert_same_bits(got, clean.out)
        return
    setattr(case, which, guarded(getattr(case, which), at))
    assert_same_bits(run(case, device), clean)
