"""Forward mode, torch.func and vmap, in eager code and around or inside torch.compile: refused by
name, or right; a derivative is never lost in silence."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.autograd.forward_ad as forward_ad  # noqa: E402

import onefold  # noqa: E402
from frontend_inputs import make_options, make_parts, square_inputs  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Q, K, V = square_inputs(requires_grad=False)
OPTIONS = {name: x.detach() for name, x in make_options().items()}
OUTS, LSES = make_parts(requires_grad=False)

# (function of one tensor, that tensor)
FUNCTIONS = {
    "q": (lambda x: onefold.attention(x, K, V), Q),
    "computed": (lambda x: onefold.attention(x * 1, K, V, causal=True), Q),
    "lse": (lambda x: onefold.attention(Q, x, V, return_lse=True)[1], K),
    "bias": (lambda x: onefold.attention(Q, K, V, bias=x), OPTIONS["bias"]),
    "alibi_slopes": (lambda x: onefold.attention(Q, K, V, alibi_slopes=x), OPTIONS["alibi_slopes"]),
    "sinks": (lambda x: onefold.attention(Q, K, V, sinks=x), OPTIONS["sinks"]),
    "deterministic": (lambda x: onefold.attention(Q, K, x, deterministic=True), V),
    "into": (lambda x: onefold.attention(x, K, V, out=torch.empty_like(x)), Q),
    "sdpa": (lambda x: onefold.sdpa(x, x, x), Q),
    "outs": (lambda x: onefold.merge_states(x, LSES)[0], OUTS),
    "lses": (lambda x: onefold.merge_states(list(OUTS.unbind()), list(x.unbind()))[1], LSES),
}


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


def tangent(function):
    """The derivative of `function` in a direction, by dual tensors."""

    def derivative(x, direction):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent

    return derivative


def jvp(function):
    return lambda x, direction: torch.func.jvp(function, (x,), (direction,))[1]


def hessian(function):
    return torch.func.hessian(lambda x: function(x).sum())


def linearized(function):
    return lambda x, direction: torch.func.linearize(function, x)[1](direction)


# Each is (f, x, direction) -> what would be the derivative.
WAYS = {
    "jvp": lambda f, x, d: jvp(f)(x, d),
    "jvp around": lambda f, x, d: jvp(compiled(f))(x, d),
    "jvp inside": lambda f, x, d: compiled(jvp(f))(x, d),
    "jvp inside, one graph": lambda f, x, d: compiled(jvp(f), fullgraph=True)(x, d),
    "jacfwd around": lambda f, x, d: torch.func.jacfwd(compiled(f))(x),
    "jacfwd inside": lambda f, x, d: compiled(torch.func.jacfwd(f))(x),
    "hessian": lambda f, x, d: hessian(f)(x),
    "hessian around": lambda f, x, d: hessian(compiled(f))(x),
    "hessian inside": lambda f, x, d: compiled(hessian(f))(x),
    "linearize": lambda f, x, d: linearized(f)(x, d),
    "linearize inside": lambda f, x, d: compiled(linearized(f))(x, d),
    "dual": lambda f, x, d: tangent(f)(x, d),
    "dual around": lambda f, x, d: tangent(compiled(f))(x, d),
    "dual inside": lambda f, x, d: compiled(tangent(f))(x, d),
    "dual inside, one graph": lambda f, x, d: compiled(tangent(f), fullgraph=True)(x, d),
    "dual inside, with a gradient": lambda f, x, d: compiled(tangent(f))(x.requires_grad_(), d),
    "dual around, with a gradient": lambda f, x, d: tangent(compiled(f))(x.requires_grad_(), d),
}
OURS = (
    r"onefold\.\w+ has no forward-mode derivative yet, and \w+ carries a tangent|"
    r"onefold\.\w+ does not work inside torch\.func transforms|"
    "out was given inside a forward-mode level|out was given and q requires a gradient"
)
# Where a compiled function is asked that requires a gradient, torch may answer itself, before us.
THEIRS = "|You must implement the jvp function for custom autograd.Function"


# Dynamo of torch 2.6 refuses these as well, but keeps the sentence to itself.
OLD = torch.__version__.startswith("2.6.")
SILENT = ("jvp inside, one graph", "dual inside, one graph", "hessian inside")

EVERY_WAY = [(name, way) for name in ("q", "into", "outs") for way in WAYS]
EVERY_FUNCTION = [
    (name, way) for name in FUNCTIONS for way in ("jvp inside", "dual around", "dual")
]


@pytest.mark.parametrize(("name", "way"), dict.fromkeys(EVERY_WAY + EVERY_FUNCTION))
def test_forward_mode_is_refused_by_name_in_and_around_compiled_code(name, way):
    function, x = FUNCTIONS[name]
    sentence = OURS + (THEIRS if way.endswith("with a gradient") else "")
    if OLD and way in SILENT:
        sentence = ""
    with pytest.raises(Exception, match=sentence):  # Dynamo wraps what it meets in one graph
        WAYS[way](function, x.clone(), torch.ones_like(x))


@pytest.mark.parametrize("way", ["jvp inside", "dual around", "dual inside"])
@pytest.mark.parametrize("name", ["q", "outs"])
def test_inductor_loses_no_tangent_either(name, way, monkeypatch):
    monkeypatch.setitem(globals(), "compiled", torch.compile)
    function, x = FUNCTIONS[name]
    with pytest.raises(NotImplementedError, match=OURS):
        WAYS[way](function, x.clone(), torch.ones_like(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_tangent_that_the_compiler_keeps_is_not_lost_by_us(backend):
    """A program compiled inside the level for a tensor without a tangent may be given one that has:
    torch's own code then loses it in the kernels that it makes, before any operator sees it."""

    def second_call(function, x):
        call = torch.compile(function, backend=backend)
        with forward_ad.dual_level():
            call(x)
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(call(dual)).tangent

    if second_call(lambda x: (x * 2).sin(), Q) is not None:
        with pytest.raises(NotImplementedError, match=OURS):
            second_call(lambda x: onefold.attention((x * 2).sin(), K, V), Q)
    with pytest.raises(NotImplementedError, match=OURS):  # straight into the operator
        second_call(lambda x: onefold.attention(x, K, V), Q)


def test_a_level_without_a_tangent_for_us_changes_nothing():
    expected = onefold.attention(Q, K, V)

    def call(x):
        return onefold.attention(Q, K, V) * x

    def derive(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x))))

    for function in (derive, compiled(derive, fullgraph=True)):
        out, derivative = function(torch.tensor(2.0))
        assert torch.equal(out, 2 * expected)
        assert torch.equal(derivative, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["q", "lse", "bias", "outs", "lses"])
def test_vmap_inside_a_compiled_function_gives_results_and_gradients_of_a_loop(name):
    function, x = FUNCTIONS[name]

    def loop(batch):
        return torch.stack([function(x) for x in batch])

    found = []
    for call in (compiled(torch.func.vmap(function)), loop):
        batch = torch.stack([x, x + 1]).requires_grad_()
        out = call(batch)
        found.append((out, torch.autograd.grad(out.sin().sum(), batch)[0]))
    assert all(torch.equal(a, e) for a, e in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["q", "into", "sdpa", "lses"])
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.jacrev])
def test_function_transforms_around_eager_or_compiled_calls_raise_one_sentence(name, transform):
    function, x = FUNCTIONS[name]
    for call in (function, compiled(function)):
        with pytest.raises(
            NotImplementedError, match=r"does not work inside torch\.func transforms"
        ):
            transform(lambda x, call=call: call(x).sum())(x)
