"""What once went wrong, one test each."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import onefold
from gates import hold_bounds, hold_gradients, make_case, run, wide


def _question(sq: int, sk: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sq + sk + heads + dim)
    shapes = ((2, sq, heads, dim), (2, sk, 2, dim), (2, sk, 2, dim))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("fill", [math.nan, math.inf])
@pytest.mark.parametrize(("sq", "dim"), [(1, 64), (3, 128), (3, 20), (40, 64)])
def test_what_a_hidden_key_holds_does_not_move_a_bit(sq: int, dim: int, fill: float, dtype) -> None:
    q, k, v = _question(sq, 700, 4, dim, dtype)
    mask = torch.arange(700) % 5 != 3
    k[:, ~mask], v[:, ~mask] = 0, 0
    expected = onefold.attention(q, k, v, mask=mask)
    k[:, ~mask], v[:, ~mask] = fill, fill
    assert torch.equal(onefold.attention(q, k, v, mask=mask), expected)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_what_a_hidden_key_holds_does_not_reorder_the_sum_over_the_others(rows: int) -> None:
    q, k = torch.zeros(2, 1, 6, rows, 64, dtype=torch.bfloat16)
    v = torch.zeros_like(k[:, :, :1])
    v[:, 0] = 2.0**24
    v[:, 2:4] = torch.tensor([1.0, -(2.0**24)])[None, :, None, None]  # 0, or 1 once swapped
    v[:, 2:4, :, 32:] = v[:, 2:4, :, 32:].flip(1)
    v[:, 1, :, 1::2] = 1e-39  # a subnormal counts as it does elsewhere
    mask = torch.arange(6) != 5
    expected = onefold.attention(q[:, :1], k[:, :, :1], v, mask=mask)
    v[:, 5] = math.nan
    assert torch.equal(onefold.attention(q[:, :1], k[:, :, :1], v, mask=mask), expected)


def test_a_value_that_is_not_finite_does_not_move_a_bit_of_rows_that_do_not_see_it() -> None:
    q, k, v = _question(3, 700, 4, 128, torch.float32)
    expected = onefold.attention(q, k, v, causal=True)
    v[:, -1] = math.nan  # only the last row sees it
    out = onefold.attention(q, k, v, causal=True)
    assert torch.equal(out[:, :2], expected[:, :2])
    assert out[:, 2].isnan().all()


@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_of_no_keys_exist_in_any_memory_order(heads: int) -> None:
    q = torch.randn(3, 15, 4, 8, requires_grad=True)
    k = torch.empty(8, 0, heads, 3).permute(3, 1, 2, 0).requires_grad_()
    crossed = torch.empty(0).as_strided((3, 0, heads, 8), (0, 8, 0, 1)).requires_grad_()
    for keys in (k, crossed):
        out = onefold.attention(q, keys, keys)
        dq, dk = torch.autograd.grad(out.sum(), (q, keys))
        assert torch.equal(dq, torch.zeros_like(q))
        assert dk.shape == keys.shape


def test_an_output_that_reaches_an_element_twice_is_refused() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    out = torch.empty(2000).as_strided((2, 5, 4, 16), (20, 4, 1, 1))
    with pytest.raises(ValueError, match="out has stride 1 on axis 3 and may reach elements twice"):
        onefold.attention(q, k, v, out=out)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float64).min, -1e300, 1e300])
@pytest.mark.parametrize(("sq", "sk", "dim"), [(1, 700, 64), (50, 9, 16)])
def test_a_finite_float64_bias_never_hides_a_key(lowest: float, sq: int, sk: int, dim: int) -> None:
    q, k, v = _question(sq, sk, 4, dim, torch.float32)
    bias = torch.full((sk,), lowest, dtype=torch.float64)
    out, lse = onefold.attention(q, k, v, bias=bias, return_lse=True)
    assert lse.isfinite().all()
    mean = v.double().mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out)
    # Equal weights: the sum of sk rounded products, a division and a rounding.
    bound = (sk + 2) * torch.finfo(torch.float32).eps * v.abs().double().mean(1, keepdim=True)
    assert ((out.double() - mean).abs() <= bound.repeat_interleave(2, 2)).all()


def test_a_softcap_beyond_float32_is_refused_unless_q_is_float64() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    with pytest.raises(ValueError, match="softcap is 1e\\+300: scores are float32 inside"):
        onefold.attention(q, k, v, softcap=1e300)
    wide = [x.double() for x in (q, k, v)]
    assert onefold.attention(*wide, softcap=1e300).isfinite().all()


def test_a_list_index_beyond_64_bits_is_refused_by_name() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    arrays = [x.numpy() for x in (q, k, v)]
    for given in ((q, k, v), arrays):
        with pytest.raises(ValueError, match=r"seqused_k is .*: integers of 64 bits are needed"):
            onefold.attention(*given, seqused_k=[2**70, 1])


@pytest.mark.parametrize("count", ["2", 1.5, None])
def test_a_thread_count_that_is_no_int_is_refused(count: object) -> None:
    with pytest.raises(TypeError, match=r"count is .*: an int is needed"):
        onefold.set_num_threads(count)  # type: ignore[arg-type]


def test_a_thread_count_beyond_an_int_is_refused() -> None:
    for count in (4097, 2**31):
        with pytest.raises(ValueError, match=f"count is {count}: from 0 .* to 4096 is needed"):
            onefold.set_num_threads(count)


@pytest.mark.parametrize("lowest", [-1e6, -1e9, -1e30, -1e38, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_row_of_equal_huge_biases_has_the_gradients_of_equal_weights(
    lowest: float, broadcast: bool
) -> None:
    """What a mask of "very negative" numbers makes of a padded row."""
    sk, shape = 70, (1, 1, 1, 70) if broadcast else (1, 4, 60, 70)
    q, k, v = _question(60, sk, 4, 16, torch.float32)
    k = torch.zeros_like(k)  # every score of the row is its bias, exactly
    bias = torch.full(shape, lowest, requires_grad=True)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = onefold.attention(*inputs, bias=bias)
    dout = torch.randn_like(out)
    dq, _, dv, dbias = torch.autograd.grad(out, [*inputs, bias], dout)
    mean = dout.double().sum(1, keepdim=True) / sk
    want = mean.expand(out.shape[0], sk, *mean.shape[2:]).unflatten(2, (v.shape[2], -1)).sum(3)
    eps = torch.finfo(torch.float32).eps
    room = 200 * eps * (dout.double().abs().sum(1, keepdim=True) / sk)
    room = room.unflatten(2, (v.shape[2], -1)).sum(3)
    assert ((dv.double() - want).abs() <= room).all()
    # dZ = P (dP - delta) of every pair, over all rows.
    pairs = torch.einsum("bihd,bjhd->bhij", dout.double(), v.double().repeat_interleave(2, 2))
    dz = (pairs - pairs.mean(-1, keepdim=True)) / sk
    assert dbias.isfinite().all()
    want_bias = dz.sum((0, 1, 2)).expand(shape) if broadcast else dz.sum(0, keepdim=True)
    size = (pairs.abs() + pairs.abs().mean(-1, keepdim=True)) / sk
    size = size.sum((0, 1, 2)).expand(shape) if broadcast else size.sum(0, keepdim=True)
    assert ((dbias.double() - want_bias).abs() <= 200 * eps * size).all()
    assert dq.abs().max() == 0


@pytest.mark.parametrize("sq", [1, 20, 70])
@pytest.mark.parametrize("values", [(-2.5e38, -2.6e38), (3e38, 3.3e38), (-3.4e38, -3.3e38)])
def test_of_two_huge_biases_the_larger_takes_all_in_both_directions(
    values: tuple[float, float], sq: int, dtype: torch.dtype
) -> None:
    q, k, v = (x.requires_grad_() for x in _question(sq, 2, 4, 16, dtype))
    bias = torch.tensor(values, requires_grad=True)
    out = onefold.attention(q, k, v, bias=bias)
    winner = int(bias.argmax())
    assert torch.equal(out, v[:, winner : winner + 1].repeat_interleave(2, 2).expand_as(out))
    dq, dk, dv, _ = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert torch.equal(dv[:, winner], torch.full_like(dv[:, winner], 2 * sq))
    assert dv[:, 1 - winner].abs().max() == 0 and dk[:, 1 - winner].abs().max() == 0
    # One weight is 1: dZ = dP - dO . O, the difference of two sums of 16 products.
    room = 64 * torch.finfo(torch.float32).eps * v.abs().max() * 16
    assert dq.abs().max() <= room * k.abs().max()


@pytest.mark.parametrize("sink", [3e38, -3e38])
def test_a_sink_near_the_end_of_float32_takes_all_or_nothing(sink: float) -> None:
    q, k, v = (x.requires_grad_() for x in _question(5, 9, 4, 16, torch.float32))
    sinks = torch.full((q.shape[2],), sink, requires_grad=True)
    out, lse = onefold.attention(q, k, v, sinks=sinks, return_lse=True)
    if sink > 0:
        assert torch.equal(lse, torch.full_like(lse, sink))
    assert lse.isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
    assert all(grad.isfinite().all() for grad in grads)
    if sink > 0:
        assert out.abs().max() == 0 and grads[2].abs().max() == 0
    else:
        assert torch.equal(out, onefold.attention(q, k, v))


@pytest.mark.parametrize("sq", [3, 60])
def test_a_slope_too_steep_for_float32_never_hides_a_key(sq: int) -> None:
    q, k, v = _question(sq, sq, 4, 16, torch.float32)
    slopes = torch.full((4,), 1e38)
    out, lse = onefold.attention(q, k, v, alibi_slopes=slopes, window=(50, -2), return_lse=True)
    assert torch.equal(lse[:, :, 2:], torch.full_like(lse[:, :, 2:], -2e38))
    assert torch.equal(out[:, 2:], v[:, : sq - 2].repeat_interleave(2, 2))


def test_a_scale_beyond_what_scores_can_hold_is_refused() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    with pytest.raises(ValueError, match=r"scale is 1e\+39: scores are float32 inside"):
        onefold.attention(q, k, v, scale=1e39)
    with pytest.raises(ValueError, match="scale is beyond float64"):
        onefold.attention(q, k, v, scale=10**400)


@pytest.mark.parametrize("shape", [(2**40, 0, 1, 16), (1, 0, 2**26, 16), (2**40, 0, 2**18, 8)])
def test_a_huge_question_about_nothing_is_answered_at_once(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.empty(shape, requires_grad=True) for _ in range(3))
    out = onefold.attention(q, k, v)
    assert out.shape == shape
    out.sum().backward()
    assert q.grad is not None and q.grad.shape == shape


def test_flags_that_are_no_flags_are_refused() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    with pytest.raises(TypeError, match="deterministic is a str: True, False or None is needed"):
        onefold.attention(q, k, v, deterministic="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="return_lse is an int: True or False is needed"):
        onefold.attention(q, k, v, return_lse=3)  # type: ignore[arg-type]


def test_a_negative_maximum_is_refused() -> None:
    q, k, v = (x[0] for x in _question(5, 9, 4, 16, torch.float32))
    with pytest.raises(ValueError, match="max_seqlen_k is -1: a length >= 0 is needed"):
        onefold.attention(q, k, v, cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 9], max_seqlen_k=-1)


def test_parts_of_unequal_shape_are_refused_by_name() -> None:
    outs = [torch.zeros(4, 8), torch.zeros(5, 8)]
    lses = [torch.zeros(4), torch.zeros(5)]
    for as_arrays in (False, True):
        given = [[x.numpy() for x in part] if as_arrays else part for part in (outs, lses)]
        with pytest.raises(ValueError, match=r"outs\[1\] has shape \(5, 8\): \(4, 8\) is needed"):
            onefold.merge_states(*given)


def test_a_numpy_seed_beside_torch_tensors_is_refused_and_the_other_way_round() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    with pytest.raises(TypeError, match=r"seed is an ndarray: an int, or a .* torch\.Tensor"):
        onefold.attention(q, k, v, dropout_p=0.5, seed=np.array([3]))
    with pytest.raises(TypeError, match=r"seed is a Tensor: an int, or a .* numpy\.ndarray"):
        onefold.attention(*(x.numpy() for x in (q, k, v)), dropout_p=0.5, seed=torch.tensor([3]))


def test_a_lazily_negated_seed_is_the_number_that_it_shows() -> None:
    q, k, v = (x.requires_grad_() for x in _question(5, 9, 4, 16, torch.float32))
    seed = torch._neg_view(torch.tensor([7]))
    for function in (onefold.attention, lambda *a, **kw: onefold.reference.attention(*a, **kw)[0]):
        expected = function(q, k, v, dropout_p=0.5, seed=-7)
        assert torch.equal(function(q, k, v, dropout_p=0.5, seed=seed), expected)
    grads = [
        torch.autograd.grad(onefold.attention(q, k, v, dropout_p=0.5, seed=s).sum(), (q, k, v))
        for s in (-7, seed)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_oracle_reads_lazily_negated_tensors_as_they_show() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    dout = torch.ones(2, 5, 4, 16)
    for as_shown in (torch.neg, torch._neg_view):
        found = [
            *onefold.reference.attention(as_shown(q), k, v),
            onefold.reference.gradients(as_shown(q), k, v, dout=as_shown(dout)).q,
        ]
        if as_shown is torch.neg:
            expected = found
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_merging_tensors_that_carry_a_tangent_is_refused() -> None:
    outs, lses = torch.randn(2, 5, 4), torch.randn(2, 5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual
        for name, given in (
            ("outs", (dual(outs, outs), lses)),
            ("lses", (outs, dual(lses, lses))),
            ("outs", ([dual(o, o) for o in outs], list(lses))),
        ):
            with pytest.raises(NotImplementedError, match=f"merge_states has no .* {name} carries"):
                onefold.merge_states(*given)


def test_an_output_that_would_lose_a_derivative_is_refused() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    out = torch.zeros(2, 5, 4, 16, requires_grad=True)
    with pytest.raises(ValueError, match="out requires a gradient"):
        onefold.attention(q, k, v, out=out)
    assert out.abs().max() == 0
    with torch.no_grad():
        assert onefold.attention(q, k, v, out=out) is out
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(2, 5, 4, 16), out.detach())
        with pytest.raises(NotImplementedError, match="out carries a tangent"):
            onefold.attention(q, k, v, out=dual)


def test_rows_that_no_part_saw_have_a_finite_second_derivative() -> None:
    outs = torch.randn(2, 5, 4, dtype=torch.float64)
    lses = torch.randn(2, 5, dtype=torch.float64)
    lses[:, 2], outs[:, 2], lses[1, 3], outs[1, 3] = -math.inf, 0, -math.inf, math.nan
    inputs = [outs.requires_grad_(), lses.requires_grad_()]
    out, lse = onefold.merge_states(*inputs)
    first = torch.autograd.grad(out.sin().sum() + lse[lse.isfinite()].cos().sum(), inputs,
                                create_graph=True)  # fmt: skip
    assert all(x.isfinite().all() for x in first)
    second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), inputs)
    assert all(x.isfinite().all() for x in second)
    assert second[1].abs().max() > 0
    assert second[1][:, 2].abs().max() == 0


def test_what_merging_refuses_it_names_in_its_own_words() -> None:
    outs, lses = torch.randn(2, 5, 4), torch.randn(2, 5)
    cases = (
        ((outs, lses.numpy()), TypeError, r"lses is an ndarray: a torch\.Tensor, as outs is one"),
        ((list(outs), [3, 4]), TypeError, r"lses\[0\] is an int: a torch\.Tensor, as outs is"),
        (
            ([outs[0], outs[1].numpy()], lses),
            TypeError,
            r"outs\[1\] is an ndarray: .* as outs\[0\]",
        ),
        ((outs.numpy(), lses), TypeError, r"lses is a Tensor: a numpy\.ndarray, as outs is one"),
        ((outs.numpy(), [1, 2]), TypeError, r"lses\[0\] is an int: a numpy\.ndarray, as outs"),
        ((torch.tensor(1.0), lses), ValueError, r"outs has 0 axes, shape \(\): parts of"),
        ((np.array(1.0), lses.numpy()), ValueError, r"outs has 0 axes, shape \(\): parts of"),
        ((outs, torch.tensor(1.0)), ValueError, r"lses has shape \(\): .* which needs \(2, 5\)"),
    )
    for given, error, sentence in cases:
        with pytest.raises(error, match=sentence):
            onefold.merge_states(*given)
    with pytest.raises(NotImplementedError, match=r"^onefold\.merge_states does not work inside"):
        torch.func.vmap(onefold.merge_states)(outs[None], lses[None])


def test_masked_numpy_parts_are_refused() -> None:
    outs, lses = np.zeros((2, 5, 4)), np.zeros((2, 5))
    masked = np.ma.masked_array(outs, mask=outs == 0)
    for given in ((masked, lses), (list(masked), list(lses)), (outs, np.ma.masked_array(lses))):
        with pytest.raises(TypeError, match="is a MaskedArray: a plain array, without a mask"):
            onefold.merge_states(*given)


def test_a_flag_where_a_number_is_needed_is_refused() -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    for options, sentence in (
        ({"scale": True}, "scale is a bool: a Python number is needed"),
        ({"softcap": np.True_}, "softcap is a bool.*: a Python number is needed"),
        ({"dropout_p": True}, "dropout_p is a bool: a Python number is needed"),
        ({"window": (True, False)}, r"window\[0\] is a bool: an int or None is needed"),
        ({"dropout_p": 0.5, "seed": True}, "seed is a bool: an int or a one-element int64"),
        ({"seqused_k": [True, 3]}, r"seqused_k is \[True, 3\]: a list of int is needed"),
    ):
        with pytest.raises(TypeError, match=sentence):
            onefold.attention(q, k, v, **options)
    with pytest.raises(TypeError, match="count is a bool: an int is needed"):
        onefold.set_num_threads(True)


def test_sdpa_takes_flags_that_are_flags_and_keywords_as_keywords() -> None:
    q = torch.randn(1, 2, 3, 4)
    for name in ("is_causal", "enable_gqa"):
        with pytest.raises(TypeError, match=f"{name} is a str: True or False is needed"):
            onefold.sdpa(q, q, q, **{name: "no"})
    with pytest.raises(TypeError, match="positional arguments"):
        onefold.sdpa(q, q, q, None, 0.0, False, 0.5)  # type: ignore[misc]


def test_sdpa_names_what_it_was_given() -> None:
    q = torch.randn(1, 2, 3, 4)
    for given, options, error, sentence in (
        ((q, q[..., :3], q), {}, ValueError, "^head_dim of key is 3: 4 is .* head_dim of query$"),
        ((q, q, q[:, :, :2]), {}, ValueError, "^seqlen of value is 2: 3 is .* rows of key$"),
        ((q, q.double(), q), {}, ValueError, "^key is float64: query is float32"),
        ((q, q.numpy(), q), {}, TypeError, r"^key is an ndarray: .* as query is one"),
        ((q, q, q), {"attn_mask": torch.zeros(3, 5)}, ValueError, r"^attn_mask has shape \(3, 5\)"),
        ((q, q, q), {"scale": "1"}, TypeError, "^scale is a str"),
    ):
        with pytest.raises(error, match=sentence):
            onefold.sdpa(*given, **options)
    with pytest.raises(NotImplementedError, match=r"^onefold\.sdpa does not work inside torch"):
        torch.func.vmap(onefold.sdpa)(q[None], q[None], q[None])


def test_what_attention_is_asked_the_oracle_explain_and_warmup_can_be_asked(capsys) -> None:
    q, k, v = _question(5, 9, 4, 16, torch.float32)
    asked = {"deterministic": True, "return_lse": True, "causal": True}
    out, lse = onefold.reference.attention(q, k, v, **asked)
    assert torch.equal(onefold.reference.attention(q, k, v, **asked | {"return_lse": False}), out)
    assert lse.shape == (2, 4, 5)
    assert onefold.explain(q, k, v, **asked).forward.backend == "cpu"
    assert onefold.warmup(q, k, v, **asked) == []
    functions = (onefold.attention, onefold.reference.attention, onefold.explain, onefold.warmup)
    for function in functions:
        for name in ("score_mod", "mask_mod", "aux"):
            with pytest.raises(NotImplementedError, match=f"{name} is not supported yet: "):
                function(q, k, v, **{name: [1]})
        with pytest.raises(TypeError, match="deterministic is a str: True, False or None"):
            function(q, k, v, deterministic="x")
        with pytest.raises(TypeError, match="return_lse is an int: True or False is needed"):
            function(q, k, v, return_lse=1)


@pytest.mark.skipif(shutil.which("git") is None, reason="git makes the other repository")
def test_a_benchmark_records_the_commit_that_was_built_and_no_other(tmp_path) -> None:
    """Not that of a repository which happens to hold the environment."""
    from onefold._commands import bench

    text = bench.commit()
    assert re.fullmatch(r"[0-9a-f]{40,}\+?|unknown", text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    commit = ["git", "-C", tmp_path, *who, "commit", "-q", "--allow-empty", "-m", "other"]
    subprocess.run(commit, check=True)
    package = Path(onefold.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "onefold", ignore=ignore)
    code = "from onefold._commands import bench; print(bench.facts()['commit'])"
    enclosed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert enclosed.stdout.strip() == text


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("where", ["q", "k", "bias", "alibi_slopes"])
def test_a_nan_reaches_the_rows_that_see_it_when_there_are_slopes(where, rows, dtype, device):
    case = make_case("normal", dtype, (2, rows, 7, 4, 4, 8, 8))
    case.dout = case.dlse = None
    case.options = {
        "bias": torch.zeros(rows, 7, dtype=dtype),
        "alibi_slopes": torch.full((4,), 0.1, dtype=wide(dtype)),
    }
    at = {
        "q": lambda: case.q[:, 0, 1],
        "k": lambda: case.k[:, 3, 1],
        "bias": lambda: case.options["bias"][0, 3:4],
        "alibi_slopes": lambda: case.options["alibi_slopes"][1:2],
    }[where]()
    at.fill_(math.nan)
    found = run(case, device)
    row = slice(0, 1) if where in ("q", "bias") else slice(None)
    assert found.out[:, row, 1].isnan().all()
    assert found.lse[:, 1, row].isnan().all()
    assert found.out[:, row, 0].isnan().all() == (where == "bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("rows", [1, 7, 200])
@pytest.mark.parametrize("scale", [1e-39, -3e-42, 2e-45])
def test_a_scale_below_the_normal_numbers_keeps_its_digits(scale, rows, softcap, dtype, device):
    """As a float32 it has few or none."""
    case = make_case("normal", dtype, (2, rows, 70, 4, 2, 16, 16), scale=scale, softcap=softcap)
    case.k = (case.k.double() / abs(scale) ** 0.5).to(dtype)
    case.q = (case.q.double() / abs(scale) ** 0.5 / 4).to(dtype)
    hold_bounds(case, device)


@pytest.mark.parametrize("fill", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"window": (5, 0)}, {"window": (None, -200)}], ids=str)
@pytest.mark.parametrize("rows", [1, 65, 129])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_a_value_next_to_the_keys_of_the_last_row_does_not_reach_it(
    rows, dim, options, fill, dtype, device
):
    """It comes along in the tile of the keys, also where the row is alone in its own."""
    sk = 333
    case = make_case("normal", dtype, (2, rows, sk, 4, 2, dim, dim), **options)
    left, right = options["window"]
    expected = run(case, device)
    if left is not None:
        case.v[:, sk - 1 - left - 1] = fill
    case.v[:, sk - 1 + right + 1 :] = fill
    found = run(case, device)
    assert found.out[:, -1].isfinite().all()
    assert torch.equal(found.out[:, -1], expected.out[:, -1])
    assert torch.equal(found.gradients["q"][:, -1], expected.gradients["q"][:, -1])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_the_gradients_of_lse_alone_do_not_depend_on_v(fill, rows, options, dtype, device):
    options = options | {
        "bias": torch.zeros(rows, 90, dtype=dtype),
        "alibi_slopes": torch.full((4,), 0.01, dtype=wide(dtype)),
        "sinks": torch.zeros(4, dtype=wide(dtype)),
    }
    for given in ({}, options):
        case = make_case("normal", dtype, (2, rows, 90, 4, 2, 64, 64), **given)
        case.dout, case.dlse = None, torch.ones(2, 4, rows, dtype=wide(dtype))
        case.v[:, 3:60:7] = fill
        found = run(case, device)
        hold_gradients(case, found, device)
        assert all(gradient.isfinite().all() for gradient in found.gradients.values())
        assert found.gradients["v"].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (40, 3)}, {"softcap": 2.0}], ids=str
)
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (70, 64), (200, 128), (20, 256)])
def test_a_mean_is_finite_where_the_sum_of_its_values_is_not(rows, dim, options, dtype, device):
    if device == "cuda" and dim > 128 and "softcap" in options:
        pytest.skip("not on CUDA at head dims above 128 with options")
    case = make_case("normal", dtype, (2, rows, 300, 4, 2, dim, dim), **options)
    case.dout = case.dlse = None
    case.v = ((case.v.double().sigmoid() + 2) * 1e38).to(dtype)
    case.v[:, :, 1, ::2] /= -1e20  # beside small ones, and of either sign
    hold_bounds(case, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sum_of_values_that_overflows_does_not_move_a_bit_of_rows_that_do_not_see_it(
    dtype, device
):
    case = make_case("normal", dtype, (1, 60, 120, 2, 2, 64, 64), causal=True)
    case.dout = case.dlse = None
    expected = run(case, device).out
    case.v[:, 100:] = 3e38  # the last twenty keys: rows from 40 on see some
    found = run(case, device).out
    assert torch.equal(found[:, :40], expected[:, :40])
    assert found.isfinite().all()
