"""Forward and backward over the input families: bounds, predicted noise, bias, float64."""

from __future__ import annotations

import functools

import pytest
import torch

from gates import (
    FAMILIES,
    FLOATS,
    Case,
    Found,
    hold_bounds,
    hold_forward,
    hold_gradients,
    make_case,
    normal,
    run,
    wide,
)
from noise import Prediction, hold_noise, window_of

SHAPE = (1, 24, 200, 2, 2, 32, 32)
MANY_HEADS = (1, 21, 150, 4, 2, 24, 40)

# Where errors are random enough to be predicted from both sides. In the others the result is exact
# (values of one, a one-hot row), or all rows round alike.
RANDOM = (
    "normal",
    "deviation_8",
    "rising",
    "falling",
    "sawtooth",
    "offset_60",
    "offset_minus_60",
    "offset_1000",
    "offset_minus_1000",
    "values_near_one",
    "sink_at_first_key",
    "outlier_channel",
)


def everything(dtype: torch.dtype, shape: tuple[int, ...]) -> dict:
    """Every option at once."""
    batch, sq, sk, heads, *_ = shape
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(batch, 1, sq, sk, generator=generator) < 0.8
    return {
        "causal": True,
        "window": (sk - 20, None),
        "softcap": 20.0,
        "alibi_slopes": torch.linspace(0.01, 0.1, heads, dtype=wide(dtype)),
        "bias": normal(generator, 1, heads, sq, sk).to(dtype),
        "mask": mask,
        "sinks": torch.linspace(-1, 2, heads, dtype=wide(dtype)),
        "dropout_p": 0.2,
        "seed": 7,
    }


OPTIONS = {
    "plain": lambda dtype, shape: {},
    "causal": lambda dtype, shape: {"causal": True},
    "everything": everything,
}


@functools.cache
def answered(family: str, dtype: torch.dtype, options: str, device: str) -> tuple[Case, Found]:
    shape = SHAPE if options != "everything" else MANY_HEADS
    case = make_case(family, dtype, shape, draw=3, **OPTIONS[options](dtype, shape))
    return case, run(case, device)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_out_and_lse_stay_within_their_bounds(family, options, dtype, device):
    hold_forward(*answered(family, dtype, options, device), device)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_stay_within_their_bounds(family, options, dtype, device):
    hold_gradients(*answered(family, dtype, options, device), device)


@pytest.mark.parametrize("options", ["plain", "causal"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", RANDOM)
def test_errors_are_as_large_as_rounding_predicts_and_unbiased(family, name, options, device):
    dtype = FLOATS[name]
    case, found = answered(family, dtype, options, device)
    prediction = Prediction(case, device)
    window, u = window_of(dtype), 2.0**-24
    hold_noise(found.out, case.exact[0], prediction.output(), "out", window, u)
    for of, noise in prediction.gradients().items():
        exact = getattr(case.exact_gradients, of)
        hold_noise(found.gradients[of], exact, noise, f"gradient of {of}", window, u)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["one_hot_key", "values_of_one", "huge"])
def test_errors_are_no_larger_than_rounding_predicts(family, name, device):
    case, found = answered(family, FLOATS[name], "plain", device)
    prediction = Prediction(case, device)
    window = (0.0, window_of(FLOATS[name])[1])
    hold_noise(found.out, case.exact[0], prediction.output(), "out", window, 1.0)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_errors_stay_as_predicted_over_four_thousand_keys(name, device):
    case = make_case("normal", FLOATS[name], (1, 16, 4096, 1, 1, 64, 64), with_dlse=False)
    case.dout = None
    found = run(case, device)
    hold_forward(case, found, device)
    window = window_of(case.dtype)
    hold_noise(found.out, case.exact[0], Prediction(case, device).output(), "out", window, 2**-24)


def test_lse_errors_are_as_predicted(device):
    case = make_case("normal", torch.float32, (1, 256, 130, 2, 2, 16, 16))
    found = run(case, device, backward=False)
    hold_noise(
        found.lse, case.exact[1], Prediction(case, device).log_sum(), "lse", (0, 1.6), 2**-24
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["normal", "deviation_8", "rising", "values_near_one"])
def test_float64_agrees_with_the_reference_to_twelve_digits(family, options, device):
    case, found = answered(family, torch.float64, options, device)
    pairs = [(found.out, case.exact[0]), (found.lse, case.exact[1])]
    pairs += [(g, getattr(case.exact_gradients, n)) for n, g in found.gradients.items()]
    for got, want in pairs:
        finite = want.isfinite()
        assert torch.equal(got[~finite], want[~finite])
        size = want[finite].abs().max().clamp(min=1.0)
        assert ((got - want)[finite].abs() <= 1e-12 * size).all()


BORDERS = (0, 1, 2, 15, 16, 17, 47, 48, 49, 63, 64, 65, 127, 129)


@pytest.mark.parametrize("sk", BORDERS)
@pytest.mark.parametrize("sq", BORDERS)
def test_lengths_at_the_borders_of_vectors_and_tiles(sq, sk, device):
    dtype = tuple(FLOATS.values())[(sq + sk) % 4]
    shape = (1, sq, sk, 2, 1, 8 + sq % 3, 8 + sk % 5)
    hold_bounds(make_case("normal", dtype, shape, causal=(False, True, "top_left")[sq % 3]), device)


@pytest.mark.parametrize("dim_v", [1, 3, 8, 17, 64, 65, 256, 512, 576])
@pytest.mark.parametrize("dim", [1, 2, 5, 8, 15, 31, 64, 72, 129, 192, 576])
def test_any_head_dim_of_queries_and_of_values(dim, dim_v, device):
    dtype = tuple(FLOATS.values())[(dim + dim_v) % 4]
    hold_bounds(make_case("normal", dtype, (1, 5, 67, 2, 1, dim, dim_v)), device)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 9, 12])
def test_any_number_of_query_heads_per_key_head(group, dtype, device):
    hold_bounds(make_case("normal", dtype, (2, 19, 33, 2 * group, 2, 16, 16), causal=True), device)
