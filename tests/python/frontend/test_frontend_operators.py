"""Exporters, other tracers, and the operators that their programs hold."""

from __future__ import annotations

import io
import re

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.library import opcheck  # noqa: E402

import onefold  # noqa: E402
from frontend_inputs import (  # noqa: E402
    assert_equal,
    make_options,
    make_parts,
    random,
    results_and_gradients,
    square_inputs,
    traced,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# ---- export ----


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return onefold.attention(q, k, v, causal=True, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_at_another_length(strict):
    length = torch.export.Dim("length", max=1024)
    program = torch.export.export(
        Attend(),
        tuple(square_inputs(requires_grad=False)),
        strict=strict,
        dynamic_shapes=({1: length},) * 3,
    )
    inputs = square_inputs(9, requires_grad=False)
    assert_equal(program.module()(*inputs), Attend()(*inputs))


# Every way to a result with a gradient: (call, its inputs).
PROGRAMS = {
    "attention": (
        lambda q, k, v, bias, slopes, sinks: onefold.attention(
            q, k, v, causal=True, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True
        ),
        lambda: [*square_inputs(), *make_options().values()],
    ),
    "deterministic": (
        lambda q, k, v: onefold.attention(q, k, v, deterministic=True, return_lse=True),
        square_inputs,
    ),
    "dropout": (lambda q, k, v: onefold.attention(q, k, v, dropout_p=0.5, seed=3), square_inputs),
    "packed": (
        lambda q, k, v: onefold.attention(
            q[0], k[0], v[0], cu_seqlens_q=[0, 2, 5], cu_seqlens_k=[0, 2, 5], return_lse=True
        ),
        square_inputs,
    ),
    "sdpa": (
        lambda q, k, v, bias: onefold.sdpa(q, k, v, bias, enable_gqa=True),
        lambda: [
            *(x.detach().transpose(1, 2).requires_grad_() for x in square_inputs()),
            random(5, 5, dtype=torch.float32),
        ],
    ),
    "merge_states": (lambda outs, lses: onefold.merge_states(outs, lses), make_parts),
    "merge_lists": (
        lambda outs, lses: onefold.merge_states(list(outs.unbind()), list(lses.unbind())),
        make_parts,
    ),
}


class Program(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *inputs):
        return self.call(*inputs)


def exported(call, inputs, **options):
    return torch.export.export(Program(call), tuple(inputs), **options)


def scripted(call, inputs):
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(call, tuple(inputs), check_trace=False), file)
    file.seek(0)
    return torch.jit.load(file)


TRACERS = {
    "export": lambda call, inputs: exported(call, inputs).module(),
    "export_strict": lambda call, inputs: exported(call, inputs, strict=True).module(),
    "export_decomposed": lambda call, inputs: exported(call, inputs).run_decompositions().module(),
    "make_fx": lambda call, inputs: make_fx(call)(*inputs),
    "make_fx_pre_dispatch": lambda call, inputs: make_fx(call, pre_dispatch=True)(*inputs),
    "make_fx_symbolic": lambda call, inputs: make_fx(call, tracing_mode="symbolic")(*inputs),
    "jit_trace": lambda call, inputs: torch.jit.trace(call, tuple(inputs), check_trace=False),
    "jit_saved": scripted,
    "compile": lambda call, inputs: traced(call),
}


@pytest.mark.filterwarnings("ignore")  # jit is deprecated, exporters talk
@pytest.mark.parametrize("learned", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_traced_program_has_the_results_and_gradients_of_eager(name, tracer, learned):
    call, make = PROGRAMS[name]
    examples = [x.detach().requires_grad_(learned) for x in make()]
    program = TRACERS[tracer](call, examples)
    assert_equal(results_and_gradients(program, make()), results_and_gradients(call, make()))


def test_an_exported_program_survives_saving_and_loading(tmp_path):
    inputs = tuple(square_inputs(requires_grad=False))
    path = tmp_path / "attend.pt2"
    torch.export.save(torch.export.export(Attend(), inputs), path)
    assert_equal(torch.export.load(path).module()(*inputs), Attend()(*inputs))


def test_an_exported_program_holds_the_operator_after_decomposition():
    program = torch.export.export(Attend(), tuple(square_inputs(requires_grad=False)))
    targets = [str(node.target) for node in program.run_decompositions().graph.nodes]
    assert "onefold.forward.default" in targets


# ---- other tracers ----


def test_make_fx_records_operators_in_both_directions():
    def gradient(x):
        return torch.autograd.grad(onefold.attention(x, x, x).sum(), x)

    graph = make_fx(gradient)(square_inputs()[0])
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "onefold.forward.default" in targets
    assert "onefold.backward.default" in targets


def test_fake_tensors_get_fake_results_of_the_real_shape():
    real = onefold.attention(*square_inputs(), return_lse=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in square_inputs()]
        fake = onefold.attention(*fakes, return_lse=True)
        (gradient,) = torch.autograd.grad(fake[0].sum(), fakes[1])
    for f, r in zip(fake, real, strict=True):
        assert isinstance(f, FakeTensor)
        assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())
    assert gradient.shape == fakes[1].shape


WRONG = [
    ({"k": torch.zeros(2, 5, 3, 8), "v": torch.zeros(2, 5, 3, 8)}, "k has 3: the heads of k"),
    ({"k": torch.zeros(2, 5, 2, 9)}, "^head_dim of k is 9"),
    ({"v": torch.zeros(2, 5, 2, 8, dtype=torch.float64)}, "^v is float64: q is float32"),
    ({"bias": torch.zeros(7, 5)}, r"^bias has shape \(7, 5\)"),
    ({"sinks": torch.zeros(3)}, "^heads of sinks is 3"),
    ({"seqused_k": torch.zeros(3, dtype=torch.int64)}, "seqused_k .*3"),
    ({"softcap": -1.0}, "^softcap is -1"),
    ({"out": torch.zeros(2, 5, 4, 9)}, r"^out has shape \(2, 5, 4, 9\)"),
    ({"out": torch.zeros(2, 5, 4, 8).half()}, "^out is float16: q is float32"),
    ({"out": torch.zeros(5, 4, 8)}, "^out has 3 axes"),
    ({"out": torch.zeros(1, 5, 4, 8).expand(2, 5, 4, 8)}, "^out has stride 0 on axis 0"),
]


@pytest.mark.parametrize(("given", "match"), WRONG, ids=[" ".join(given) for given, _ in WRONG])
def test_a_tracer_is_told_what_is_wrong_in_the_words_of_the_call(given, match):
    q, k, v = square_inputs(requires_grad=False)
    arguments = {"q": q, "k": k, "v": v, **given}
    assert_refused_alike(onefold.attention, arguments, match)


def overlapping():
    """Outputs that share memory with an input, and the input's name."""
    q, k, v = square_inputs(requires_grad=False)
    wide = torch.zeros(2, 5, 4, 16)
    yield {"q": q, "k": k, "v": v, "out": q}, "q"
    yield {"q": q, "k": q, "v": q.clone(), "out": q[:]}, "q"
    yield {"q": wide[..., :8], "k": k, "v": v, "out": wide[..., 4:12]}, "q"
    yield {"q": wide[..., :8], "k": k, "v": v, "bias": q[0, :, 0, :5], "out": q}, "bias"


@pytest.mark.parametrize("case", range(4))
def test_an_output_in_the_memory_of_an_input_is_refused_by_tracers_too(case):
    arguments, name = list(overlapping())[case]
    assert_refused_alike(onefold.attention, arguments, f"^out shares memory with {name}: ")


def test_an_output_beside_the_inputs_in_one_buffer_is_taken_by_tracers_too():
    whole = torch.randn(2, 5, 4, 4, 8)
    q, k, v, out = whole.unbind(3)
    expected = onefold.attention(q, k, v)
    assert torch.equal(traced(onefold.attention)(q, k, v, out=out), expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"dout": torch.zeros(2, 5, 4, 9)}, r"^dout has shape \(2, 5, 4, 9\)"),
        ({"dout": torch.zeros(2, 5, 4, 8).half()}, "^dout is float16: q is float32"),
        ({"dlse": torch.zeros(2, 4, 6)}, "^rows of dlse is 6"),
        ({"dlse": torch.zeros(2, 4, 5).double()}, "^dlse is float64: float32 is needed"),
        ({"out": torch.zeros(2, 5, 4)}, "^out has 3 axes"),
        ({"lse": torch.zeros(2, 4)}, "^lse has 2 axes"),
    ],
)
def test_the_operator_of_the_gradients_is_told_what_is_wrong_while_it_is_traced(given, match):
    asked = question()
    out, lse = torch.ops.onefold.forward(*asked)
    arguments = {"dout": out, "dlse": lse, "out": out, "lse": lse, **given}

    def call(dout, dlse, out, lse):
        needs = [True] * 6
        return torch.ops.onefold.backward(dout, dlse, *asked, out, lse, False, needs)

    assert_refused_alike(call, arguments, match)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"lses": torch.zeros(3, 2, 5)}, r"^lses has shape \(3, 2, 5\): it does not fit outs"),
        ({"outs": torch.zeros(3, 4), "lses": torch.zeros(3)}, "^outs has 2 axes"),
        ({"lses": torch.zeros(3, 2, 5, 4).half()}, "^lses is float16: float32 or float64"),
        ({"outs": torch.zeros(3, 2, 5, 4, 8, dtype=torch.int32)}, "^outs is int32: a float dtype"),
    ],
)
def test_the_operator_that_merges_is_told_what_is_wrong_while_it_is_traced(given, match):
    arguments = {"outs": torch.zeros(3, 2, 5, 4, 8), "lses": torch.zeros(3, 2, 5, 4), **given}
    assert_refused_alike(torch.ops.onefold.merge_states, arguments, match)


def assert_refused_alike(call, arguments, match):
    """By the call, of fake tensors, and by a compiler before it has made a graph."""
    with pytest.raises(ValueError, match=match) as real:
        call(**arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in arguments.items()
        }
        with pytest.raises(ValueError) as fake:
            call(**fakes)
    assert str(fake.value) == str(real.value)
    with pytest.raises(Exception, match=re.escape(str(real.value))):  # Dynamo wraps it
        torch.compile(call, fullgraph=True, backend=never_reached)(**arguments)


def never_reached(graph, inputs):
    raise AssertionError("a graph was compiled from a question that no call answers")


def test_lengths_of_a_tracer_are_not_read():
    """Offsets and lengths have no values yet, so none is refused."""
    with FakeTensorMode():
        q, k = torch.zeros(9, 4, 8), torch.zeros(9, 2, 8)
        cu = torch.zeros(4, dtype=torch.int32)
        mask = torch.ones(5, 7, dtype=torch.bool)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 7}
        assert onefold.attention(q, k, k, mask=mask, **lengths).shape == (9, 4, 8)


# ---- the operators themselves ----


def question(dtype=torch.float32, packed=False):
    """The operators' common arguments, every tensor given."""
    q, k, v = square_inputs(dtype=dtype, requires_grad=False)
    options = {name: x.detach() for name, x in make_options().items()}
    offsets = torch.tensor([0, 2, 5])
    return (
        *((x[0] for x in (q, k, v)) if packed else (q, k, v)),
        options["bias"],
        torch.tensor([True, True, False, True, True]),
        options["alibi_slopes"],
        options["sinks"],
        offsets if packed else None,
        offsets if packed else None,
        torch.tensor([1, 2]),
        torch.tensor([2, 3], dtype=torch.int32),
        torch.tensor([7]),
        None,
        "bottom_right",
        3,
        None,
        1.5,
        0.25,
        5 if packed else None,
        5 if packed else None,
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck_passes_for_forward(dtype, packed):
    opcheck(torch.ops.onefold.forward.default, question(dtype, packed))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("needs", [[True] * 6, [False, True, False, True, False, True]])
def test_opcheck_passes_for_backward(needs, packed):
    asked = question(packed=packed)
    out, lse = torch.ops.onefold.forward(*asked)
    arguments = (out, lse, *asked, out, lse, True, needs)
    opcheck(torch.ops.onefold.backward.default, arguments)
    gradients = torch.ops.onefold.backward(*arguments)
    assert [g.numel() > 0 for g in gradients] == needs


def test_opcheck_passes_for_forward_into():
    out = torch.full((2, 5, 4, 8), torch.nan)
    opcheck(torch.ops.onefold.forward_into.default, (*question(), out))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_passes_for_merge_states(requires_grad):
    outs, lses = make_parts(requires_grad=requires_grad)
    rows = lses.detach().transpose(-1, -2).contiguous().requires_grad_(requires_grad)
    opcheck(torch.ops.onefold.merge_states.default, (outs, rows))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_the_merging_operator_passes_first_and_second_order_gradcheck(check):
    inputs = (random(3, 2, 2, 3), random(3, 2, 2))
    assert check(torch.ops.onefold.merge_states, inputs)


def test_the_second_derivative_of_the_operator_raises_one_clear_sentence():
    asked = list(question(torch.float64))
    asked[0].requires_grad_()
    out, _ = torch.ops.onefold.forward(*asked)
    (dq,) = torch.autograd.grad(out.sin().sum(), asked[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative yet"):
        torch.autograd.grad(dq.sum(), asked[0])


def test_the_operators_have_the_documented_schemas():
    common = (
        "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? slopes, Tensor? sinks, "
        "Tensor? cu_q, Tensor? cu_k, Tensor? used_q, Tensor? used_k, Tensor? seed, Scalar? scale, "
        "str causal, SymInt? left, SymInt? right, Scalar softcap, Scalar dropout_p, SymInt? max_q, "
        "SymInt? max_k"
    )
    assert str(torch.ops.onefold.forward.default._schema) == (
        f"onefold::forward({common}, *, bool? deterministic=None) -> (Tensor out, Tensor lse)"
    )
    assert str(torch.ops.onefold.backward.default._schema) == (
        f"onefold::backward(Tensor? dout, Tensor? dlse, {common}, Tensor out, Tensor lse, "
        "bool deterministic, bool[6] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, "
        "Tensor dslopes, Tensor dsinks)"
    )
