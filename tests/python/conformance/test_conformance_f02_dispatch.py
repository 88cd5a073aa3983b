"""Launch geometry and dispatch: no shape is limited by a grid or by a list of instances."""

from __future__ import annotations

import pytest
import torch

import onefold
from draws import seeded
from gates import (
    FLOATS,
    Case,
    Found,
    assert_same_bits,
    hold_bounds,
    make_case,
    run,
    skip_unless_it_computes,
)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((65_537, 4, 2, 64), "float16"),
        ((100_000, 5, 1, 16), "float32"),
        ((65_536, 3, 1, 80), "float32"),
        ((3, 1, 100_000, 8), "bfloat16"),
    ],
)
def test_f02_1_a_huge_batch_is_its_two_halves(shape, name, device):
    g = seeded()
    x = torch.randn(shape, generator=g).to(FLOATS[name])
    q, k, v, dout = x, x.flip(1), x.flip(-1), x.flip(1)
    whole = run(Case(q, k, v, {}, dout), device)
    axis = 0 if shape[0] > 10 else 2
    parts = [[t.chunk(2, axis)[n] for t in (q, k, v, dout)] for n in range(2)]
    halves = [run(Case(a, b, c, {}, d), device) for a, b, c, d in parts]
    joined = Found(
        torch.cat([h.out for h in halves], axis),
        torch.cat([h.lse for h in halves], 0 if axis == 0 else 1),
        {n: torch.cat([h.gradients[n] for h in halves], axis) for n in "qkv"},
    )
    assert_same_bits(joined, whole)


@pytest.mark.parametrize("dim", [72, 80, 96, 112, 136, 144, 160, 176])
def test_f02_2_causal_with_head_dims_between_the_usual_ones(dim, device, place):
    case = make_case("normal", torch.float16, (1, 128, 128, 2, 2, dim, dim), causal=True)
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    hold_bounds(case, device)


@pytest.mark.parametrize("group", [3, 5, 6, 7, 9, 12])
def test_f02_3_any_ratio_of_heads_works(group, device, place):
    shape = (1, 20, 45, 2 * group, 2, 128, 128)
    case = make_case("normal", torch.bfloat16, shape, causal=True)
    case.q, case.k, case.v, case.dout = (place(x) for x in (case.q, case.k, case.v, case.dout))
    hold_bounds(case, device)


def test_f02_3_a_ratio_that_does_not_divide_is_refused_with_both_counts(device):
    q, k = torch.zeros(1, 2, 10, 8, device=device), torch.zeros(1, 2, 4, 8, device=device)
    with pytest.raises(ValueError, match=r"q has 10 heads and k has 4"):
        onefold.attention(q, k, k)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("which", ["all", "k and v"])
def test_f02_4_eight_bit_floats_are_refused_by_dtype(name, which, device):
    narrow = torch.zeros(1, 2, 4, 256, device=device).to(getattr(torch, name))
    q = narrow if which == "all" else torch.zeros(1, 2, 4, 256, device=device)
    with pytest.raises(ValueError, match=rf"is {name}"):
        onefold.attention(q, narrow, narrow)


@pytest.mark.parametrize("dtype_name", list(FLOATS))
def test_f02_4_every_head_dim_up_to_576_has_a_path(dtype_name, device):
    dtype = FLOATS[dtype_name]
    skip_unless_it_computes(dtype, 0, device)
    most = 256 if device == "cuda" else 576
    x = torch.randn(1, 3, 1, most, generator=seeded()).to(dtype).to(device)
    for dim in range(1, most + 1):
        q = x[..., :dim]
        out = onefold.attention(q[:, :1], q[:, 1:2], q[:, 2:3])  # one key: its value
        if dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(out, q[:, 2:3]), dim
        else:
            assert torch.allclose(out, q[:, 2:3], rtol=1e-6, atol=0), dim


@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_f02_4_decoding_over_the_product_of_its_parameters(dim, group, queries, device):
    dtype = torch.float32 if (queries + group) % 2 else torch.bfloat16
    shape = (2, queries, 1100, 2 * group, 2, dim, dim)
    case = make_case("normal", dtype, shape, causal=True, seqused_k=[1100, 77])
    case.dout = case.dlse = None
    hold_bounds(case, device)


def test_f02_5_dispatch_is_tested_on_combinations_of_dims_dtypes_heads_and_options(device):
    dims = (1, 8, 15, 40, 72, 128, 192, 256)
    dtypes = [dtype for dtype in FLOATS.values() if (dtype, device) != (torch.float64, "cuda")]
    for n, (d, dv) in enumerate((a, b) for a in dims for b in dims):
        dtype = dtypes[n % len(dtypes)]
        heads = ((2, 1), (3, 3), (4, 2), (1, 1), (6, 2))[n % 5]
        options = ({"causal": True}, {"window": (9, 4)}, {}, {"softcap": 5.0}, {"seqused_k": [30]})
        shape = (1, 1 + 7 * (n % 7), 33, *heads, d, dv)
        hold_bounds(make_case("normal", dtype, shape, draw=n, **options[n % 5]), device)
