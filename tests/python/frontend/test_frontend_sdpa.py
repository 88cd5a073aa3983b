"""onefold.sdpa beside torch.nn.functional.scaled_dot_product_attention itself."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

import onefold  # noqa: E402

theirs = torch.nn.functional.scaled_dot_product_attention


def tensors(*shapes, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=requires_grad)
        for s in shapes
    ]


def assert_close(actual, expected):
    """Two float64 computations of sums of at most some hundred terms of size 1 or a little more."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    scale = expected.abs().max().clamp(min=1)
    assert ((actual - expected).abs() <= 2.0**-53 * 2000 * scale).all()


CASES = {
    "4d": (((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)), {}),
    "causal_square": (((2, 3, 5, 4),) * 3, {"is_causal": True}),
    "causal_is_top_left_for_more_keys": (
        ((2, 3, 5, 4), (2, 3, 9, 4), (2, 3, 9, 4)),
        {"is_causal": True},
    ),
    "causal_is_top_left_for_fewer_keys": (
        ((2, 3, 9, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
        {"is_causal": True},
    ),
    "scale": (((2, 3, 5, 4),) * 3, {"scale": -0.3}),
    "3d": (((3, 5, 4), (3, 7, 4), (3, 7, 6)), {}),
    "3d_causal": (((3, 5, 4), (3, 7, 4), (3, 7, 6)), {"is_causal": True}),
    "2d": (((5, 4), (7, 4), (7, 6)), {}),
    "5d": (((2, 2, 3, 5, 4), (2, 2, 3, 7, 4), (2, 2, 3, 7, 6)), {"is_causal": True}),
    "batch_broadcast": (((2, 3, 5, 4), (1, 3, 7, 4), (2, 3, 7, 6)), {}),
    "heads_broadcast": (((2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 6)), {}),
    "5d_broadcast": (((2, 1, 3, 5, 4), (1, 4, 3, 7, 4), (2, 4, 3, 7, 6)), {}),
    "grouped": (((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 6)), {"enable_gqa": True}),
    "3d_grouped": (((6, 5, 4), (2, 7, 4), (2, 7, 6)), {"enable_gqa": True}),
    "one_query": (((2, 3, 1, 4), (2, 3, 7, 4), (2, 3, 7, 4)), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_sdpa_agrees_with_torch_in_result_and_gradients(name):
    shapes, options = CASES[name]
    inputs = tensors(*shapes, requires_grad=True)
    ours, reference = onefold.sdpa(*inputs, **options), theirs(*inputs, **options)
    assert_close(ours, reference)
    (cotangent,) = tensors(reference.shape)
    gradients = torch.autograd.grad(ours, inputs, cotangent)
    wanted = torch.autograd.grad(reference, inputs, cotangent)
    for actual, expected in zip(gradients, wanted, strict=True):
        assert_close(actual, expected)


MASK_SHAPES = [
    (5, 7),
    (1, 7),
    (3, 5, 7),
    (1, 1, 5, 7),
    (2, 3, 5, 7),
    (2, 1, 1, 7),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_a_boolean_mask_agrees_with_torch(shape):
    inputs = tensors((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 0] = True
    assert_close(onefold.sdpa(*inputs, attn_mask=mask), theirs(*inputs, attn_mask=mask))


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_an_additive_mask_and_its_gradient_agree_with_torch(shape):
    *inputs, mask = tensors((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6), shape, requires_grad=True)
    ours, reference = (f(*inputs, attn_mask=mask) for f in (onefold.sdpa, theirs))
    assert_close(ours, reference)
    (cotangent,) = tensors(reference.shape)
    assert_close(
        torch.autograd.grad(ours, mask, cotangent)[0],
        torch.autograd.grad(reference, mask, cotangent)[0],
    )


@pytest.mark.parametrize(
    "shape", [(5, 7), (3, 5, 7), (2, 3, 5, 7), (4, 2, 3, 5, 7), (1, 1, 1, 5, 7)]
)
def test_masks_of_a_five_axis_problem_agree_with_torch(shape):
    inputs = tensors((4, 2, 3, 5, 4), (4, 2, 3, 7, 4), (4, 2, 3, 7, 6))
    (mask,) = tensors(shape)
    assert_close(onefold.sdpa(*inputs, attn_mask=mask), theirs(*inputs, attn_mask=mask))
    assert_close(onefold.sdpa(*inputs, attn_mask=mask > 0), theirs(*inputs, attn_mask=mask > 0))


def test_masks_of_three_axes_belong_to_the_leading_axis_as_in_torch():
    inputs = tensors((3, 5, 4), (3, 7, 4), (3, 7, 6))
    (mask,) = tensors((3, 5, 7))
    assert_close(onefold.sdpa(*inputs, attn_mask=mask), theirs(*inputs, attn_mask=mask))


def test_a_row_that_sees_no_key_is_zero_with_zero_gradients():
    inputs = tensors((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), requires_grad=True)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    out = onefold.sdpa(*inputs, attn_mask=mask)
    assert torch.equal(out[:, :, 1], torch.zeros(1, 2, 4, dtype=torch.float64))
    assert torch.equal(theirs(*inputs, attn_mask=mask)[:, :, 1], out[:, :, 1])
    (dq,) = torch.autograd.grad(out.sum(), inputs[0])
    assert torch.equal(dq[:, :, 1], torch.zeros(1, 2, 4, dtype=torch.float64))


def test_dropout_of_everything_agrees_with_torch_and_some_dropout_keeps_the_mean():
    inputs = tensors((1, 2, 64, 4), (1, 2, 64, 4), (1, 2, 64, 4))
    assert torch.equal(onefold.sdpa(*inputs, dropout_p=1.0), theirs(*inputs, dropout_p=1.0))
    inputs[2].fill_(1)
    torch.manual_seed(0)
    out = onefold.sdpa(*inputs, dropout_p=0.5)
    # Each row is sum of 64 weights that are kept twice as large or dropped; 128 rows of them.
    weights = torch.softmax(inputs[0] @ inputs[1].mT / 2, dim=-1)
    deviation = weights.square().sum().sqrt() / 128
    assert (out[..., 0].mean() - 1).abs() <= 5 * deviation
    assert out.std() > 0


def test_head_first_memory_is_used_as_it_lies():
    inputs = tensors((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), requires_grad=True)
    out = onefold.sdpa(*inputs)
    assert out.transpose(1, 2).is_contiguous()
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert gradient.stride() == x.stride()


def test_numpy_arrays_give_the_bits_of_torch_tensors():
    inputs = tensors((2, 6, 5, 4), (2, 2, 7, 4), (2, 2, 7, 6))
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) < 0.7
    ours = onefold.sdpa(*(x.numpy() for x in inputs), attn_mask=mask.numpy(), enable_gqa=True)
    expected = onefold.sdpa(*inputs, attn_mask=mask, enable_gqa=True)
    assert isinstance(ours, numpy.ndarray)
    assert torch.equal(torch.from_numpy(numpy.ascontiguousarray(ours)), expected.contiguous())


@pytest.mark.parametrize(
    ("shapes", "options", "error", "sentence"),
    [
        (
            ((1, 2, 3, 4),) * 3,
            {"attn_mask": torch.ones(3, 3) > 0, "is_causal": True},
            ValueError,
            "attn_mask was given together with is_causal=True",
        ),
        (((4,), (4,), (4,)), {}, ValueError, "query has 1 axis"),
        (((1, 4, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), {}, ValueError, r"leading axes \(4, 2, 2\)"),
        (
            ((1, 4, 3, 4), (1, 3, 3, 4), (1, 3, 3, 4)),
            {"enable_gqa": True},
            ValueError,
            "query has 4 heads and key has 3: the heads of key must divide",
        ),
        (((2, 4, 3, 4), (3, 4, 3, 4), (3, 4, 3, 4)), {}, ValueError, r"leading axes \(2, 3, 3\)"),
        (
            ((1, 2, 3, 4),) * 3,
            {"attn_mask": torch.ones(3, 3).int()},
            ValueError,
            "attn_mask is int32: bool",
        ),
        (
            ((1, 2, 3, 4),) * 3,
            {"attn_mask": torch.ones(1, 1, 1, 3, 3)},
            ValueError,
            "attn_mask has 5 axes",
        ),
        (((1, 2, 3, 4),) * 3, {"attn_mask": 3}, TypeError, "attn_mask is an int"),
    ],
)
def test_what_torch_would_not_take_is_refused_with_one_sentence(shapes, options, error, sentence):
    with pytest.raises(error, match=sentence):
        onefold.sdpa(*tensors(*shapes), **options)
