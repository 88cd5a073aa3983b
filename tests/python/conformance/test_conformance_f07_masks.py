"""Mask, window and causal semantics, read exactly: with one-hot values an output row is the set of
keys that it sees, and with one-hot cotangents so is a row of the gradient of v."""

from __future__ import annotations

import itertools

import pytest
import torch

import onefold
from draws import INF, seeded
from gates import (
    FLOATS,
    Case,
    assert_same_bits,
    assert_same_bits_or_both_right,
    hold_bounds,
    make_case,
    moved,
    normal,
    run,
    wide,
)
from naive import visible


def seen_by(device, sq, sk, heads=1, kv_heads=1, batch=1, dtype=torch.float32, **options):
    """(batch, heads, sq, sk), True where a query sees a key, in forward and in backward."""
    g = seeded()
    options = {name: moved(x, device) for name, x in options.items()}
    q = (normal(g, batch, sq, heads, 4) / 4).to(dtype).to(device)
    k = (normal(g, batch, sk, kv_heads, 4) / 4).to(dtype).to(device)
    one_hot = torch.eye(sk, dtype=dtype, device=device).view(1, sk, 1, sk)
    v = one_hot.expand(batch, sk, kv_heads, sk)
    out = onefold.attention(q, k, v, **options)
    forward = (out != 0).permute(0, 2, 1, 3).cpu()
    # dv[j, d] = sum over the group's heads and queries of P_ij dout[i, d]: one head at a time
    v = torch.zeros(batch, sk, kv_heads, sq, dtype=dtype, device=device, requires_grad=True)
    out = onefold.attention(q, k, v, **options)
    backward = torch.empty_like(forward)
    for h in range(heads):
        dout = torch.zeros(batch, sq, heads, sq, dtype=dtype, device=device)
        dout[:, :, h] = torch.eye(sq, dtype=dtype, device=device)
        (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
        backward[:, h] = (dv[:, :, h // (heads // kv_heads)] != 0).transpose(1, 2).cpu()
    assert torch.equal(forward, backward)
    return forward


def test_f07_1_two_queries_against_six_keys_in_both_alignments(device):
    assert seen_by(device, 2, 6, causal=True)[0, 0].sum(1).tolist() == [5, 6]
    assert seen_by(device, 2, 6, causal="bottom_right")[0, 0].sum(1).tolist() == [5, 6]
    assert seen_by(device, 2, 6, causal="top_left")[0, 0].sum(1).tolist() == [1, 2]


@pytest.mark.parametrize("causal", [True, "top_left"])
def test_f07_1_more_queries_than_keys_in_both_alignments(causal, device):
    seen = seen_by(device, 128, 64, causal=causal)[0, 0]
    assert torch.equal(seen, visible(128, 64, causal))
    empty = ~seen.any(1)
    assert empty.sum() == (64 if causal is True else 0)
    case = make_case("normal", torch.float32, (1, 2048, 1024, 1, 1, 8, 8), causal=causal)
    found = run(case, device)
    hidden = 1024 if causal is True else 0
    assert not found.out[:, :hidden].any()
    assert (found.lse[:, :, :hidden] == -INF).all()
    assert not found.gradients["q"][:, :hidden].any()
    assert found.lse[:, :, hidden:].isfinite().all()


@pytest.mark.parametrize("right", [255, 2**31 - 1, 2**62])
def test_f07_2_a_window_wider_than_everything_hides_nothing(right, device):
    seen = seen_by(device, 256, 64, window=(None, right))
    assert seen.all()
    case = make_case("normal", torch.float32, (1, 256, 64, 2, 2, 16, 16))
    wide_open = Case(case.q, case.k, case.v, {"window": (None, right)}, case.dout, case.dlse)
    assert_same_bits(run(wide_open, device), run(case, device))


def test_f07_3_a_negative_window_is_an_offset_band(device):
    seen = seen_by(device, 40, 40, causal=True, window=(None, -3))[0, 0]
    i, j = torch.arange(40)[:, None], torch.arange(40)
    assert torch.equal(seen, j <= i - 3)
    assert not seen[:3].any()
    case = make_case("normal", torch.float16, (2, 260, 260, 2, 2, 32, 32), causal=True)
    case.options["window"] = (None, -3)
    hold_bounds(case, device)


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def test_f07_4_a_window_to_the_left_leaks_no_future_key(dtype_name, device):
    seen = seen_by(device, 256, 256, window=(16, 0), dtype=FLOATS[dtype_name])[0, 0]
    i, j = torch.arange(256)[:, None], torch.arange(256)
    assert torch.equal(seen, (j >= i - 16) & (j <= i))


LENGTHS = [(1, 1), (1, 7), (7, 1), (3, 5), (5, 3), (9, 9), (17, 66), (66, 17), (50, 130)]
WINDOWS = [(None, None), (0, 0), (2, 0), (0, 3), (None, 1), (4, None), (-1, 3), (3, -2), (-2, -2),
           (1000, -5), (-5, 1000), (2**62, 2**62), (-(2**62), None), (None, -(2**62))]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize(("sq", "sk"), LENGTHS)
def test_f07_4_every_window_against_the_predicate_spelled_out(sq, sk, causal, device):
    for window in WINDOWS:
        seen = seen_by(device, sq, sk, causal=causal, window=window)[0, 0]
        assert torch.equal(seen, visible(sq, sk, causal, window)), window


def test_f07_5_no_option_is_carried_from_one_call_to_the_next(device):
    g = seeded()
    x, y = (normal(g, 2, n, 2, 16).float() for n in (32, 48))
    padding = torch.arange(48) < torch.tensor([[40], [13]])
    mask = padding[:, None, None]
    fresh = run(Case(x, y, y, {"mask": mask}), device)
    for _ in range(3):
        run(Case(x, x, x, {"causal": True, "window": (3, 0), "softcap": 1.0}), device)
        assert_same_bits(run(Case(x, y, y, {"mask": mask}), device), fresh)
    seen = seen_by(device, 32, 48, batch=2, mask=mask)
    assert torch.equal(seen, mask.expand(2, 1, 32, 48))


@pytest.mark.parametrize("left", [0, 1, 3, 9])
def test_f07_6_a_window_of_left_keys_shows_the_current_one_too(left, device):
    seen = seen_by(device, 10, 10, causal=True, window=(left, 0))[0, 0]
    assert seen.sum(1).tolist() == [min(i, left) + 1 for i in range(10)]
    assert "inclusive" in onefold.attention.__doc__


def test_f07_7_a_tree_of_draft_tokens_is_honoured_as_a_mask(device):
    """Tokens 0-1 and 2-3 are two branches behind a prefix of six keys."""
    parents = {0: (), 1: (0,), 2: (), 3: (2,)}
    mask = torch.zeros(4, 10, dtype=torch.bool)
    mask[:, :6] = True
    for token, above in parents.items():
        mask[token, [6 + token, *(6 + a for a in above)]] = True
    assert torch.equal(seen_by(device, 4, 10, mask=mask)[0, 0], mask)
    both = seen_by(device, 4, 10, mask=mask, causal=True)[0, 0]
    assert torch.equal(both, mask & visible(4, 10, True))


@pytest.mark.parametrize("keyword", ["tree_mask", "block_mask", "mask_mod", "score_mod"])
def test_f07_7_masks_that_do_not_exist_yet_are_refused_by_name(keyword, device):
    q = torch.zeros(1, 2, 1, 8, device=device)
    with pytest.raises((TypeError, NotImplementedError), match=keyword):
        onefold.attention(q, q, q, **{keyword: lambda *_: True})


def test_f07_8_two_segments_in_one_row_are_two_sequences(dtype, device):
    first, second = 37, 28
    case = make_case("normal", dtype, (1, 65, 65, 2, 2, 16, 16), causal=True)
    segment = torch.arange(65) >= first
    masked = Case(case.q, case.k, case.v, case.options, case.dout, case.dlse)
    masked.options = {"causal": True, "mask": segment[:, None] == segment}
    found = hold_bounds(masked, device)
    cu = [0, first, first + second]
    packed = Case(
        case.q[0],
        case.k[0],
        case.v[0],
        {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu},
        case.dout[0],
        case.dlse[0],
    )
    hold_bounds(packed, device)
    apart = run(packed, device)
    # The second segment's key tiles are anchored at its own start: equal up to rounding.
    tolerance = {torch.float64: 1e-13}.get(dtype, 4e-6 + 2 * torch.finfo(dtype).eps)
    assert ((found.out[0] - apart.out).abs() <= tolerance * 4).all()
    assert_same_bits(found.out[0, :first], apart.out[:first])


def test_f07_9_a_key_mask_broadcasts_like_its_expansion(dtype, device, place):
    lengths = torch.tensor([32, 1, 17, 0])
    mask = (torch.arange(32) < lengths[:, None])[:, None, None]
    case = make_case("normal", dtype, (4, 32, 32, 4, 4, 16, 16))
    narrow = Case(case.q, case.k, case.v, {"mask": place(mask)}, case.dout, case.dlse)
    full = Case(case.q, case.k, case.v, {}, case.dout, case.dlse)
    full.options = {"mask": mask.expand(4, 4, 32, 32).contiguous()}
    assert_same_bits(run(narrow, device), run(full, device))


@pytest.mark.parametrize("one", [1, 2])
def test_f07_9_a_key_mask_is_a_used_length_in_other_words(one, dtype, device):
    lengths = torch.tensor([32, one, 17, 0])
    mask = (torch.arange(32) < lengths[:, None])[:, None, None]
    case = make_case("normal", dtype, (4, 32, 32, 4, 4, 16, 16))
    masked = Case(case.q, case.k, case.v, {"mask": mask}, case.dout, case.dlse)
    used = Case(case.q, case.k, case.v, {"seqused_k": lengths}, case.dout, case.dlse)
    assert_same_bits_or_both_right(masked, used, device)


@pytest.mark.parametrize("with_bias", [False, True])
def test_f07_10_the_cap_comes_before_alibi_and_bias(with_bias, dtype, device):
    heads = 8
    slopes = (2.0 ** -torch.arange(1, heads + 1)).to(wide(dtype))
    options = {"softcap": 20.0, "alibi_slopes": 8 * slopes, "scale": 4.0}
    if with_bias:
        options["bias"] = (50 * normal(seeded(3), 1, heads, 128, 128)).to(dtype)
    case = make_case("normal", dtype, (1, 128, 128, heads, heads, 16, 16), **options)
    hold_bounds(case, device)


@pytest.mark.parametrize("heads", [(32, 8), (14, 2)])
def test_f07_11_grouped_heads_are_repeated_ones(heads, device):
    hq, hk = heads
    case = make_case("normal", torch.bfloat16, (1, 100, 100, hq, hk, 128, 128), causal=True)
    found = run(case, device)
    k, v = (x.repeat_interleave(hq // hk, 2) for x in (case.k, case.v))
    repeated = run(Case(case.q, k, v, case.options, case.dout, case.dlse), device)
    assert_same_bits(found.out, repeated.out)
    assert_same_bits(found.lse, repeated.lse)
    assert_same_bits(found.gradients["q"], repeated.gradients["q"])
    small = make_case("normal", torch.bfloat16, (1, 40, 40, hq, hk, 16, 16), causal=True)
    hold_bounds(small, device)


@pytest.mark.parametrize("size", [16, 64, 256])
def test_f07_12_blocks_of_a_mask_show_the_listed_blocks_only(size, device):
    listed = [[0, 2], [1, 3], [0, 3], [2, 3]]
    coarse = torch.zeros(4, 4, dtype=torch.bool)
    for row, keys in enumerate(listed):
        coarse[row, keys] = True
    mask = coarse.repeat_interleave(size, 0).repeat_interleave(size, 1)
    n = 4 * size
    if size <= 64:
        assert torch.equal(seen_by(device, n, n, heads=2, kv_heads=2, mask=mask)[0, 1], mask)
    x = make_case("normal", torch.bfloat16, (1, n, n, 2, 2, 32, 32))
    found = run(Case(x.q, x.k, x.v, {"mask": mask}, x.dout, x.dlse), device)
    for row, keys in enumerate(listed):
        at = slice(row * size, (row + 1) * size)
        k, v = (torch.cat([t[:, b * size : (b + 1) * size] for b in keys], 1) for t in (x.k, x.v))
        alone = run(Case(x.q[:, at], k, v), device)
        limit = 2 * 2.0**-8 * 2 + 1e-5
        assert ((found.out[:, at].double() - alone.out.double()).abs() <= limit).all()
        if size % 64 == 0:  # whole key tiles are skipped: the same tiles in the same order
            assert_same_bits(found.out[:, at], alone.out)


SLOPES = 2.0 ** -torch.arange(1.0, 9.0)


@pytest.mark.parametrize("sq", [1, 7])
def test_f07_13_alibi_counts_from_the_live_length_in_every_entry_point(sq, device):
    heads, live = 8, 13
    g = seeded()
    q = normal(g, 1, sq, heads, 16).float()
    k, v = (normal(g, 1, 32, heads, 16).float() for _ in range(2))
    dense = hold_bounds(Case(q, k[:, :20], v[:, :20], {"alibi_slopes": SLOPES}), device)
    plain = run(Case(q, k[:, :20], v[:, :20]), device)
    assert (dense.out != plain.out).any()  # at one query the bias is not 0
    zero = torch.zeros_like(q)
    lse = run(Case(zero, k[:, :20], v[:, :20], {"alibi_slopes": SLOPES}), device).lse[0]
    distance = (torch.arange(sq)[:, None] + 20 - sq - torch.arange(20)).abs().double()
    want = torch.logsumexp(-SLOPES.double()[:, None, None] * distance, -1)
    assert ((lse.double() - want).abs() <= 1e-6).all()
    cache = run(Case(q, k, v, {"alibi_slopes": SLOPES, "seqused_k": [live]}), device)
    lengths = {"cu_seqlens_q": [0, sq], "cu_seqlens_k": [0, live]}
    packed = Case(q[0], k[0, :live], v[0, :live], {"alibi_slopes": SLOPES} | lengths)
    found = run(packed, device)
    assert_same_bits(cache.out[0], found.out)
    assert_same_bits(cache.lse[0], found.lse)


MASKS_OF_ONE_BAND = {
    "mask": lambda seen: {"mask": seen},
    "bias": lambda seen: {"bias": torch.zeros(seen.shape).masked_fill(~seen, -INF)},
    "head mask": lambda seen: {"mask": seen.expand(1, 2, *seen.shape).clone()},
}


@pytest.mark.parametrize("spelling", MASKS_OF_ONE_BAND)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 2)}, {"causal": "top_left"}])
def test_f07_14_equal_masks_in_different_spellings_show_the_same_keys(spelling, options, device):
    for sq, sk in ((9, 20), (40, 33), (65, 130)):
        seen = visible(sq, sk, options.get("causal", False), options.get("window", (None, None)))
        spelled = seen_by(device, sq, sk, 2, 2, **MASKS_OF_ONE_BAND[spelling](seen))
        assert torch.equal(spelled[0, 1], seen)


def test_f07_14_every_condition_must_hold(device):
    g = seeded()
    sq, sk = 30, 90
    mask = torch.rand(2, 1, sq, sk, generator=g) < 0.7
    bias = torch.zeros(1, 2, 1, sk)
    bias[..., ::5] = -INF
    options = {"causal": True, "window": (50, 7), "mask": mask, "bias": bias}
    seen = seen_by(device, sq, sk, 2, 2, batch=2, seqused_k=[90, 71], **options)
    for b, n in enumerate((90, 71)):
        live = torch.zeros(sq, sk, dtype=torch.bool)
        live[:, :n] = visible(sq, n, True, (50, 7))
        want = live & mask[b, 0] & (bias[0, 1, 0] == 0)
        assert torch.equal(seen[b, 1], want)


@pytest.mark.parametrize("lengths", list(itertools.product((0, 3, 70), (5, 40), (66, 1))), ids=str)
def test_f07_15_packed_sequences_see_their_own_keys_only(lengths, device):
    total = sum(lengths)
    cu = [0, *itertools.accumulate(lengths)]
    v = torch.eye(total).view(total, 1, total)
    q = (normal(seeded(), total, 1, 4) / 4).float()
    out = onefold.attention(
        q.to(device), q.to(device), v.to(device), causal=True, window=(20, None),
        cu_seqlens_q=cu, cu_seqlens_k=cu,
    )  # fmt: skip
    want = torch.zeros(total, total, dtype=torch.bool)
    for a, b in itertools.pairwise(cu):
        want[a:b, a:b] = visible(b - a, b - a, True, (20, None))
    assert torch.equal((out[:, 0] != 0).cpu(), want)
