"""Inputs of the torch front-end tests, and how two ways of computing them are compared."""

from __future__ import annotations

import torch


def make_inputs(dtype=torch.float64, requires_grad=True, batch=2, sq=3, sk=5, d=4, dv=3):
    """q with 4 heads, k and v with 2."""
    generator = torch.Generator().manual_seed(sq)
    shapes = ((batch, sq, 4, d), (batch, sk, 2, d), (batch, sk, 2, dv))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for s in shapes
    ]


def random(*shape, dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(requires_grad)


def square_inputs(seqlen=5, dtype=torch.float32, requires_grad=True):
    """As many queries as keys, and one head dim."""
    return make_inputs(dtype, requires_grad, sq=seqlen, sk=seqlen, d=8, dv=8)


def make_options():
    """Every differentiable option of `square_inputs`."""
    generator = torch.Generator().manual_seed(1)
    return {
        "bias": torch.randn(2, 1, 5, 5, generator=generator, requires_grad=True),
        "alibi_slopes": torch.rand(4, generator=generator, requires_grad=True),
        "sinks": torch.randn(4, generator=generator, requires_grad=True),
    }


def make_parts(dtype=torch.float32, requires_grad=True):
    """outs and lses of three parts."""
    return [
        random(*shape, dtype=dtype, requires_grad=requires_grad)
        for shape in ((3, 2, 5, 4, 8), (3, 2, 4, 5))
    ]


def traced(function, **options):
    """Compiled without the C++ compiler: Dynamo, AOTAutograd and the fake kernels alone."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def results_and_gradients(call, inputs):
    """Gradients of those inputs that require one."""
    results = call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(r.double().sin().sum() for r in results)
    return [*results, *torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])]


def assert_equal(actual, expected):
    """Bit for bit."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a, e)
