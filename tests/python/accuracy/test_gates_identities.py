"""Identities that hold bit by bit: two ways to ask one question give one answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import onefold
from gates import (
    Case,
    Found,
    assert_same_bits,
    assert_same_bits_or_both_right,
    hold_bounds,
    make_case,
    moved,
    path,
    run,
    wide,
)
from naive import visible

SHAPE = (3, 37, 150, 4, 2, 24, 40)


def changed(case: Case, **changes: Any) -> Case:
    """Another case; `options` are added to those there are."""
    options = case.options | changes.pop("options", {})
    return dataclasses.replace(case, options=options, **changes)


def rows(x: Found, b: slice) -> Found:
    """Some entries of the batch of everything."""
    return Found(x.out[b], x.lse[b], {n: g[b] for n, g in x.gradients.items() if g.dim() == 4})


def every_option(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    batch, sq, sk, heads, *_ = shape
    generator = torch.Generator().manual_seed(2)
    return {
        "causal": True,
        "softcap": 15.0,
        "alibi_slopes": torch.rand(batch, heads, generator=generator).to(wide(dtype)) / 10,
        "bias": torch.randn(batch, heads, sq, sk, generator=generator).to(dtype),
        "mask": torch.rand(batch, 1, sq, sk, generator=generator) < 0.8,
        "sinks": torch.randn(heads, generator=generator).to(wide(dtype)),
        "dropout_p": 0.2,
        "seed": 11,
    }


@pytest.fixture
def threads():
    before = onefold.get_num_threads()
    yield onefold.set_num_threads
    onefold.set_num_threads(before)


# ---- the same call ----


@pytest.mark.parametrize("options", ["plain", "every option"])
def test_the_same_call_gives_the_same_bits_again(options, dtype, device):
    more = every_option(dtype) if options == "every option" else {}
    case = make_case("normal", dtype, SHAPE, **more)
    first = run(case, device)
    for _ in range(3):
        assert_same_bits(run(case, device), first)


@pytest.mark.parametrize("options", ["plain", "causal", "every option"])
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        (1, 700, 130, 2, 1, 16, 16),  # several chunks of queries for each head
        (2, 1, 2500, 4, 2, 16, 16),  # few rows against many keys
        (1, 5, 3000, 3, 1, 16, 8),
    ],
)
def test_the_number_of_threads_changes_no_bit(options, shape, threads, device):
    dtype = torch.float32
    more = every_option(dtype, shape) if options == "every option" else {}
    case = make_case(
        "normal", dtype, shape, **more | ({"causal": True} if options != "plain" else {})
    )
    found = []
    for count in (1, 2, 7):
        threads(count)
        found.append(run(case, device))
    assert_same_bits(found[1], found[0], "2 threads")
    assert_same_bits(found[2], found[0], "7 threads")


@pytest.mark.parametrize("axes", [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (0, 0, 0, 0)])
def test_the_gradient_of_a_broadcast_bias_does_not_depend_on_threads(axes, threads, device):
    generator = torch.Generator().manual_seed(0)
    full = (SHAPE[0], SHAPE[3], SHAPE[1], SHAPE[2])
    shape = [n if own else 1 for n, own in zip(full, axes, strict=True)]
    case = make_case("normal", torch.float32, SHAPE, bias=torch.randn(shape, generator=generator))
    threads(1)
    one = run(case, device)
    threads(7)
    assert_same_bits(run(case, device), one)


# ---- other rows are irrelevant ----


@pytest.mark.parametrize("options", ["plain", "causal"])
def test_a_batch_entry_alone_is_what_it_is_inside_a_batch(options, dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=options == "causal")
    whole = run(case, device)
    for b in range(SHAPE[0]):
        at = slice(b, b + 1)
        alone = Case(case.q[at], case.k[at], case.v[at], case.options, case.dout[at], case.dlse[at])
        assert_same_bits(run(alone, device), rows(whole, at), f"entry {b}")


def test_the_gradients_of_a_sequence_do_not_depend_on_a_longer_one_beside_it(device):
    """Queries are summed in chunks: their borders must come from the sequence itself."""
    short = make_case("normal", torch.float32, (1, 900, 5, 1, 1, 8, 8), draw=1)
    long = make_case("normal", torch.float32, (1, 9000, 5, 1, 1, 8, 8), draw=2)
    both = {
        n: torch.cat([getattr(c, n)[0] for c in (short, long)]) for n in ("q", "k", "v", "dout")
    }
    dlse = torch.cat([short.dlse[0], long.dlse[0]], dim=-1)
    lengths = {"cu_seqlens_q": [0, 900, 9900], "cu_seqlens_k": [0, 5, 10]}
    packed = run(Case(both["q"], both["k"], both["v"], lengths, both["dout"], dlse), device)
    alone = run(short, device)
    assert_same_bits(packed.out[:900], alone.out[0], "out")
    assert_same_bits(packed.gradients["q"][:900], alone.gradients["q"][0], "dq")
    for name in ("k", "v"):
        assert_same_bits(packed.gradients[name][:5], alone.gradients[name][0], f"d{name}")


def test_a_query_row_does_not_depend_on_the_other_query_rows(dtype, device):
    case = make_case("normal", dtype, SHAPE)
    whole = run(case, device)
    for at in (slice(0, 1), slice(5, 22), slice(36, 37)):
        some = Case(case.q[:, at], case.k, case.v, {}, case.dout[:, at], case.dlse[:, :, at])
        found = run(some, device)
        if path(some, device) == path(case, device):
            assert_same_bits(found.out, whole.out[:, at], "out")
            assert_same_bits(found.lse, whole.lse[:, :, at], "lse")
            assert_same_bits(found.gradients["q"], whole.gradients["q"][:, at], "dq")
        else:
            hold_bounds(some, device, found)


@pytest.mark.parametrize("shape", [SHAPE, (1, 40, 1300, 2, 2, 16, 16), (1, 40, 90, 2, 2, 5, 5)])
def test_a_step_of_decoding_is_the_row_of_the_prefill_where_one_path_serves_both(shape, device):
    case = make_case("normal", torch.float32, shape, causal=True)
    whole = run(case, device, backward=False)
    sq, sk = shape[1], shape[2]
    for i in (0, sq // 2, sq - 1):
        seen = i + 1 + sk - sq
        step = Case(case.q[:, i : i + 1], case.k[:, :seen], case.v[:, :seen], {"causal": True})
        found = run(step, device)
        if path(step, device) == path(case, device):
            assert_same_bits(found.out, whole.out[:, i : i + 1], f"out of row {i}")
            assert_same_bits(found.lse, whole.lse[:, :, i : i + 1], f"lse of row {i}")
        else:
            hold_bounds(step, device, found)


def test_permuted_heads_permute_the_results(dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=True)
    order_k = [1, 0]
    order = [2, 3, 0, 1]
    turned = Case(
        case.q[:, :, order],
        case.k[:, :, order_k],
        case.v[:, :, order_k],
        case.options,
        case.dout[:, :, order],
        case.dlse[:, order],
    )
    found, whole = run(turned, device), run(case, device)
    assert_same_bits(found.out, whole.out[:, :, order], "out")
    assert_same_bits(found.lse, whole.lse[:, order], "lse")
    assert_same_bits(found.gradients["q"], whole.gradients["q"][:, :, order], "dq")
    for name in ("k", "v"):
        assert_same_bits(found.gradients[name], whole.gradients[name][:, :, order_k], f"d{name}")


def test_heads_within_a_group_may_be_permuted(dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=True)
    order = [1, 0, 3, 2]
    found = run(changed(case, q=case.q[:, :, order]), device, backward=False)
    whole = run(case, device, backward=False)
    assert_same_bits(found.out, whole.out[:, :, order], "out")


@pytest.mark.parametrize(("sq", "sk"), [(30, 90), (12, 1100)])
@pytest.mark.parametrize("group", [2, 3, 7])
def test_grouped_heads_are_repeated_key_heads(group, sq, sk, dtype, device):
    shape = (2, sq, sk, 2 * group, 2, 16, 24)
    case = make_case("normal", dtype, shape, causal=True)
    k, v = (x.repeat_interleave(group, dim=2) for x in (case.k, case.v))
    alone = changed(case, k=k, v=v)
    found, repeated = run(case, device), run(alone, device)
    if path(case, device) != path(alone, device):  # fewer rows share a head: see explain
        hold_bounds(case, device, found)
        hold_bounds(alone, device, repeated)
        return
    assert_same_bits(found.out, repeated.out, "out")
    assert_same_bits(found.lse, repeated.lse, "lse")
    assert_same_bits(found.gradients["q"], repeated.gradients["q"], "dq")


# ---- padding ----


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_padded_packed_and_dense_sequences_are_the_same(causal, dtype, device):
    lengths_q, lengths_k = [37, 1, 20], [150, 64, 0]
    case = make_case("normal", dtype, SHAPE, causal=causal)
    used = {"seqused_q": lengths_q, "seqused_k": lengths_k}
    padded = run(changed(case, options=used), device)

    def pack(x, lengths):
        return torch.cat([x[b, :n] for b, n in enumerate(lengths)])

    packed_case = Case(
        pack(case.q, lengths_q),
        pack(case.k, lengths_k),
        pack(case.v, lengths_k),
        case.options | {"cu_seqlens_q": [0, 37, 38, 58], "cu_seqlens_k": [0, 150, 214, 214]},
        pack(case.dout, lengths_q),
        torch.cat([case.dlse[b, :, :n] for b, n in enumerate(lengths_q)], dim=-1),
    )
    packed = run(packed_case, device)
    starts_q, starts_k = [0, 37, 38], [0, 150, 214]
    for b, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        dense_case = Case(
            case.q[b : b + 1, :nq],
            case.k[b : b + 1, :nk],
            case.v[b : b + 1, :nk],
            case.options,
            case.dout[b : b + 1, :nq],
            case.dlse[b : b + 1, :, :nq],
        )
        dense = run(dense_case, device)
        at, at_k = slice(starts_q[b], starts_q[b] + nq), slice(starts_k[b], starts_k[b] + nk)
        assert_same_bits(padded.out[b, :nq], dense.out[0], "padded out")
        assert_same_bits(packed.out[at], dense.out[0], "packed out")
        assert_same_bits(padded.lse[b, :, :nq], dense.lse[0], "padded lse")
        assert_same_bits(packed.lse[:, at], dense.lse[0], "packed lse")
        for name, rows_of, length in (("q", at, nq), ("k", at_k, nk), ("v", at_k, nk)):
            want = dense.gradients[name][0]
            assert_same_bits(padded.gradients[name][b, :length], want, f"padded d{name}")
            assert_same_bits(packed.gradients[name][rows_of], want, f"packed d{name}")
            assert not padded.gradients[name][b, length:].any()


@pytest.mark.parametrize("extra", [1, 63, 64, 200])
def test_hidden_keys_at_the_end_change_nothing(extra, dtype, device):
    case = make_case("normal", dtype, SHAPE)
    k, v = (
        torch.cat([x, torch.full_like(x[:, :1], 3.0).expand(-1, extra, -1, -1)], dim=1)
        for x in (case.k, case.v)
    )
    mask = torch.arange(SHAPE[2] + extra) < SHAPE[2]
    masked = changed(case, k=k, v=v, options={"mask": mask})
    found, plain = run(masked, device), run(case, device)
    if path(masked, device) != path(case, device):
        hold_bounds(masked, device, found)
        return
    assert_same_bits(found.out, plain.out, "out")
    assert_same_bits(found.lse, plain.lse, "lse")
    assert_same_bits(found.gradients["q"], plain.gradients["q"], "dq")
    for name in ("k", "v"):
        assert_same_bits(found.gradients[name][:, : SHAPE[2]], plain.gradients[name], f"d{name}")
        assert not found.gradients[name][:, SHAPE[2] :].any()


# ---- spellings of one mask ----


@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (True, (None, None)),
        ("top_left", (None, None)),
        (False, (5, 0)),
        (True, (9, None)),
        (False, (None, -3)),
        (False, (-70, 100)),
        ("top_left", (3, 2)),
    ],
)
def test_a_band_is_the_mask_that_spells_it_out(causal, window, dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=causal, window=window)
    mask = visible(SHAPE[1], SHAPE[2], causal, window)
    spelled = changed(case, options={"causal": False, "window": (None, None), "mask": mask})
    assert_same_bits_or_both_right(case, spelled, device)


@pytest.mark.parametrize(
    "nothing",
    [
        {"window": (10**9, 10**9)},
        {"window": (150, 150)},
        {"window": (2**62, 2**62)},
        {"window": (2**63 - 1, None)},
        {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
        {"mask": torch.ones(37, 150, dtype=torch.bool)},
        {"softcap": 0.0},
        {"seqused_k": [150, 150, 150]},
        {"seqused_q": [37, 37, 37]},
        {"sinks": torch.full((4,), -torch.inf)},
        {"dropout_p": 0.0, "seed": 3},
        {"deterministic": True},
        {"scale": 24**-0.5},
    ],
    ids=lambda options: str(list(options)),
)
def test_an_option_that_says_nothing_changes_nothing(nothing, device):
    case = make_case("normal", torch.float32, SHAPE)
    deterministic = {n: nothing[n] for n in nothing if n == "deterministic"}
    options = {n: x for n, x in nothing.items() if n not in deterministic}
    found, plain = run(changed(case, options=options), device, **deterministic), run(case, device)
    found.gradients.pop("sinks", None)
    assert_same_bits(found, plain)


def test_causal_with_one_query_is_no_mask(dtype, device):
    case = make_case("normal", dtype, (2, 1, 150, 4, 2, 24, 40))
    assert_same_bits(run(changed(case, options={"causal": True}), device), run(case, device))


def test_the_last_rows_of_a_causal_call_are_a_causal_call(dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=True)
    last = changed(case, q=case.q[:, 20:], dout=None, dlse=None)
    assert_same_bits(run(last, device).out, run(case, device).out[:, 20:], "out")


# ---- exact scalings ----


@pytest.mark.parametrize("exponent", [-3, 1, 5])
def test_values_times_a_power_of_two_scale_the_output(exponent, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        case = make_case("normal", dtype, SHAPE, causal=True)
        factor = 2.0**exponent
        scaled, plain = run(changed(case, v=case.v * factor), device), run(case, device)
        assert_same_bits(scaled.out, plain.out * factor, "out")
        assert_same_bits(scaled.lse, plain.lse, "lse")
        assert_same_bits(scaled.gradients["v"], plain.gradients["v"], "dv")


@pytest.mark.parametrize("exponent", [-2, 1, 4])
def test_queries_times_a_power_of_two_cancel_against_the_scale(exponent, dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=True, scale=0.25)
    case.q = (case.q * 64).round() / 64  # so that a quarter of it is exact in float16
    factor = 2.0**exponent
    turned = changed(case, q=case.q * factor, options={"scale": 0.25 / factor})
    found, plain = run(turned, device), run(case, device)
    assert_same_bits(found.out, plain.out, "out")
    assert_same_bits(found.lse, plain.lse, "lse")
    assert_same_bits(found.gradients["k"], plain.gradients["k"], "dk")
    assert_same_bits(found.gradients["v"], plain.gradients["v"], "dv")


def test_a_negative_scale_is_minus_q(dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=True, scale=0.3)
    found = run(changed(case, q=-case.q, options={"scale": -0.3}), device)
    plain = run(case, device)
    for a, b in ((found.out, plain.out), (found.lse, plain.lse)):
        assert_same_bits(a, b)
    for name in ("k", "v"):
        assert_same_bits(found.gradients[name], plain.gradients[name], f"d{name}")
    assert torch.equal(found.gradients["q"], -plain.gradients["q"])


# ---- memory ----


@pytest.mark.parametrize("options", ["plain", "every option"])
def test_where_tensors_lie_changes_nothing(options, dtype, device, place):
    more = every_option(dtype) if options == "every option" else {}
    case = make_case("normal", dtype, SHAPE, **more)
    plain = run(case, device)
    options = {n: place(x) if isinstance(x, torch.Tensor) else x for n, x in case.options.items()}
    lying = Case(
        place(case.q), place(case.k), place(case.v), options, place(case.dout), place(case.dlse)
    )
    if path(lying, device) == path(case, device):
        assert_same_bits(run(lying, device), plain)
    else:
        hold_bounds(lying, device)


def test_lse_is_the_same_whether_it_is_asked_for_or_not(dtype, device):
    case = make_case("normal", dtype, SHAPE, causal=True)
    q, k, v = (x.to(device) for x in (case.q, case.k, case.v))
    out, _ = onefold.attention(q, k, v, causal=True, return_lse=True)
    assert_same_bits(onefold.attention(q, k, v, causal=True), out, "out")


def test_each_gradient_is_the_same_whichever_others_are_wanted(device):
    case = make_case("normal", torch.float32, SHAPE, **every_option(torch.float32))
    whole = run(case, device)
    for name in whole.gradients:
        arrays = {
            n: moved(x.clone(), device).requires_grad_(n == name) for n, x in case.inputs.items()
        }
        options = {n: moved(x, device) for n, x in case.options.items()}
        options |= {n: x for n, x in arrays.items() if n in options} | {"deterministic": True}
        out, lse = onefold.attention(
            arrays["q"], arrays["k"], arrays["v"], return_lse=True, **options
        )
        cotangents = (moved(case.dout, device), moved(case.dlse, device))
        (alone,) = torch.autograd.grad((out, lse), arrays[name], cotangents)
        assert_same_bits(alone.cpu(), whole.gradients[name], f"gradient of {name}")
