"""What once went wrong, one test each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import onefold


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
    with pytest.raises(ValueError, match="out has stride 1 on axis 3 and reaches elements twice"):
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
    with pytest.raises(ValueError, match="softcap is 1e\\+300: scores of float32 are float32"):
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
    with pytest.raises(TypeError, match=r"count is a .*: an int is needed"):
        onefold.set_num_threads(count)  # type: ignore[arg-type]


def test_a_thread_count_beyond_an_int_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 2147483648"):
        onefold.set_num_threads(2**31)
