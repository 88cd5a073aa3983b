"""torch.compile, torch.export and the operators behind them.

The backend is aot_eager where only tracing matters: it runs Dynamo, AOTAutograd and the fake
kernels, and skips the C++ compiler. A few tests go through inductor.
"""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import onefold  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_inputs(seqlen=5, dtype=torch.float32, requires_grad=True):
    """q with 4 heads, k and v with 2."""
    generator = torch.Generator().manual_seed(seqlen)
    return [
        torch.randn(2, seqlen, h, 8, generator=generator).to(dtype).requires_grad_(requires_grad)
        for h in (4, 2, 2)
    ]


def make_options():
    generator = torch.Generator().manual_seed(1)
    return {
        "bias": torch.randn(2, 1, 5, 5, generator=generator, requires_grad=True),
        "alibi_slopes": torch.rand(4, generator=generator, requires_grad=True),
        "sinks": torch.randn(4, generator=generator, requires_grad=True),
    }


def traced(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def results_and_gradients(call, inputs):
    results = call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(r.double().sin().sum() for r in results)
    return [*results, *torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a, e)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_attention_with_every_differentiable_input_gives_the_bits_of_eager(
    backend, dynamic
):
    options = make_options()

    def call(q, k, v, bias, slopes, sinks):
        return onefold.attention(
            q,
            k,
            v,
            causal=True,
            softcap=2.0,
            bias=bias,
            alibi_slopes=slopes,
            sinks=sinks,
            return_lse=True,
        )

    inputs = [*make_inputs(), *options.values()]
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    assert_equal(results_and_gradients(compiled, inputs), results_and_gradients(call, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_compiled_attention_gives_the_bits_of_eager_in_every_dtype(dtype):
    def call(q, k, v):
        return onefold.attention(q, k, v, causal="top_left", window=(2, None), return_lse=True)

    inputs = make_inputs(dtype=dtype)
    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_a_dynamic_sequence_length_compiles_once():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    def call(q, k, v):
        return onefold.attention(q, k, v, window=(q.shape[1] // 2, 0)).sin()

    compiled = torch.compile(call, fullgraph=True, backend=count)
    for seqlen in (5, 7, 64):
        inputs = make_inputs(seqlen)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
        assert_equal([compiled(*inputs)], [call(*inputs)])
    assert len(graphs) == 1


def test_gradients_with_a_dynamic_sequence_length_are_those_of_eager():
    def call(q, k, v):
        return onefold.attention(q, k, v, causal=True, return_lse=True)

    compiled = traced(call)
    for seqlen in (5, 7, 64):
        inputs = make_inputs(seqlen)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
        expected = results_and_gradients(call, inputs)
        assert_equal(results_and_gradients(compiled, inputs), expected)


def test_packed_sequences_compile_with_offsets_as_tensors():
    def call(q, k, v, offsets):
        return onefold.attention(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, return_lse=True
        )

    compiled = traced(call)
    for seqlen in (5, 9, 12):
        inputs = [x.detach()[0].requires_grad_() for x in make_inputs(seqlen)]
        inputs.append(torch.tensor([0, 2, seqlen], dtype=torch.int32))
        expected = results_and_gradients(call, inputs)
        assert_equal(results_and_gradients(compiled, inputs), expected)


def test_index_lists_and_masks_compile():
    mask = torch.tensor([True, False, True])

    def call(q, k, v):
        return onefold.attention(
            q[0],
            k[0],
            v[0],
            cu_seqlens_q=[0, 2, 5],
            cu_seqlens_k=[0, 3, 5],
            max_seqlen_q=3,
            max_seqlen_k=3,
            mask=mask,
        )

    inputs = make_inputs()
    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_self_attention_of_one_tensor_compiles():
    x = make_inputs()[0]

    def call(x):
        return onefold.attention(x, x, x, causal=True)

    actual, expected = (results_and_gradients(f, [x]) for f in (traced(call), call))
    assert torch.equal(actual[0], expected[0])
    # The three roles' gradients, each of which has the same bits, are added in another order.
    roles = [x.detach().clone().requires_grad_() for _ in range(3)]
    parts = torch.autograd.grad(onefold.attention(*roles, causal=True).double().sin().sum(), roles)
    unit = 2.0**-24 * sum(p.abs() for p in parts)
    assert ((actual[1] - expected[1]).abs() <= 4 * unit).all()


def test_scale_and_softcap_may_change_between_compiled_calls():
    q, k, v = make_inputs(requires_grad=False)

    def call(q, factor):
        return onefold.attention(q, k, v, scale=factor, softcap=factor)

    compiled = traced(call)
    for factor in (0.5, 0.25, 3.0):
        assert_equal([compiled(q, factor)], [call(q, factor)])


def test_a_given_seed_drops_the_same_weights_compiled_and_eager():
    q, k, v = make_inputs()

    def call(q, k, v):
        return onefold.attention(q, k, v, dropout_p=0.5, seed=2**63 + 5)

    inputs = [q, k, v]
    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_a_drawn_seed_follows_manual_seed_when_traced():
    q, k, v = make_inputs(requires_grad=False)

    def call(q):
        return onefold.attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(1)
    expected = call(q)
    torch.manual_seed(1)
    assert torch.equal(traced(call)(q), expected)


@pytest.mark.parametrize("through_checkpoint", [False, True])
def test_inductor_uses_the_dropout_mask_of_forward_in_backward(through_checkpoint):
    q, k, v = make_inputs()

    def attend(q, k, v):
        return onefold.attention(q, k, v, dropout_p=0.5)

    def call(q, k, v):
        return (
            checkpoint(attend, q, k, v, use_reentrant=False)
            if through_checkpoint
            else attend(q, k, v)
        )

    out = torch.compile(call, fullgraph=True)(q, k, v)
    # out is linear in v, so <v, d sum(out) / dv> = sum(out) if and only if the masks agree.
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert ((dv * v).sum() - out.sum()).abs() <= 2.0**-24 * 1000 * (dv * v).abs().sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_is_a_mutation_that_compilers_see(backend):
    q, k, v = make_inputs(requires_grad=False)

    def call(q, k, v):
        out = torch.zeros(2, 5, 4, 8)
        _, lse = onefold.attention(q, k, v, out=out, return_lse=True)
        return out + 1, lse

    actual = torch.compile(call, fullgraph=True, backend=backend)(q, k, v)
    out, lse = onefold.attention(q, k, v, return_lse=True)
    assert_equal(actual, (out + 1, lse))


def test_autocast_compiles():
    q, k, v = make_inputs()

    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return onefold.attention(q, k, v)

    compiled = traced(call)
    assert compiled(q, k, v).dtype == torch.bfloat16
    inputs = [q, k, v]
    assert_equal(results_and_gradients(compiled, inputs), results_and_gradients(call, inputs))


def test_head_first_inputs_get_gradients_of_their_own_strides_from_inductor():
    inputs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in make_inputs()]

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return onefold.attention(q, k, v, causal=True)

    actual = results_and_gradients(torch.compile(call, fullgraph=True), inputs)
    assert_equal(actual, results_and_gradients(call, inputs))


def test_a_projection_and_attention_train_the_same_compiled():
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 3 * 4 * 8).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def loss():
        q, k, v = projection(x).view(2, 5, 3, 4, 8).unbind(2)
        return onefold.attention(q, k, v, causal=True).square().sum()

    expected = torch.autograd.grad(loss(), projection.parameters())
    actual = torch.autograd.grad(traced(loss)(), projection.parameters())
    assert_equal(actual, expected)


def test_merge_states_compiles_with_gradients():
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 2, 5, 4, 8, generator=generator, requires_grad=True)
    lses = torch.randn(3, 2, 4, 5, generator=generator, requires_grad=True)

    def call(outs, lses):
        return onefold.merge_states(list(outs.unbind()), list(lses.unbind()))

    inputs = [outs, lses]
    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_sdpa_compiles_with_gradients():
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in make_inputs()]

    def call(q, k, v):
        return onefold.sdpa(q, k, v, is_causal=True, enable_gqa=True)

    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_a_compiled_call_that_cannot_work_raises_the_sentence_of_eager():
    q, k, v = make_inputs(requires_grad=False)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="q has 3 axes"):  # while traced
        traced(lambda q: onefold.attention(q, k, v))(q[0])
    with pytest.raises(ValueError, match="q has 3 axes"):  # sizes are symbols: by the call itself
        traced(lambda q: onefold.attention(q, k, v), dynamic=True)(q[0])


# ---- export ----


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return onefold.attention(q, k, v, causal=True, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_at_another_length(strict):
    length = torch.export.Dim("length", max=1024)
    program = torch.export.export(
        Attend(),
        tuple(make_inputs(requires_grad=False)),
        strict=strict,
        dynamic_shapes=({1: length},) * 3,
    )
    inputs = make_inputs(9, requires_grad=False)
    assert_equal(program.module()(*inputs), Attend()(*inputs))


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, q, k, v):
        x = q * self.scale
        out, lse = onefold.attention(x, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sum() + x.sum()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_gradients_of_eager(strict):
    inputs = tuple(make_inputs(requires_grad=False))
    model = Scaled()
    exported = torch.export.export(model, inputs, strict=strict).module()
    (want,) = torch.autograd.grad(model(*inputs), model.scale)
    (got,) = torch.autograd.grad(exported(*inputs), list(exported.parameters()))
    assert torch.equal(got, want)


def test_an_exported_program_survives_saving_and_loading(tmp_path):
    inputs = tuple(make_inputs(requires_grad=False))
    path = tmp_path / "attend.pt2"
    torch.export.save(torch.export.export(Attend(), inputs), path)
    assert_equal(torch.export.load(path).module()(*inputs), Attend()(*inputs))


def test_an_exported_program_holds_the_operator_after_decomposition():
    program = torch.export.export(Attend(), tuple(make_inputs(requires_grad=False)))
    targets = [str(node.target) for node in program.run_decompositions().graph.nodes]
    assert "onefold.forward.default" in targets


# ---- other tracers ----


def test_make_fx_records_operators_in_both_directions():
    def gradient(x):
        return torch.autograd.grad(onefold.attention(x, x, x).sum(), x)

    graph = make_fx(gradient)(make_inputs()[0])
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "onefold.forward.default" in targets
    assert "onefold.backward.default" in targets


def test_fake_tensors_get_fake_results_of_the_real_shape():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    real = onefold.attention(*make_inputs(), return_lse=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in make_inputs()]
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
]


@pytest.mark.parametrize(("given", "match"), WRONG, ids=[" ".join(given) for given, _ in WRONG])
def test_a_tracer_is_told_what_is_wrong_in_the_words_of_the_call(given, match):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = make_inputs(requires_grad=False)
    arguments = {"q": q, "k": k, "v": v, **given}
    with pytest.raises(ValueError, match=match) as real:
        onefold.attention(**arguments)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in arguments.items()
        }
        with pytest.raises(ValueError) as fake:
            onefold.attention(**fakes)
    assert str(fake.value) == str(real.value)
    with pytest.raises(Exception, match=re.escape(str(real.value))):  # Dynamo wraps it
        torch.compile(onefold.attention, fullgraph=True, backend=never_reached)(**arguments)


def never_reached(graph, inputs):
    raise AssertionError("a graph was compiled from a question that no call answers")


def test_lengths_of_a_tracer_are_not_read():
    """Offsets and lengths have no values yet, so none is refused."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.zeros(9, 4, 8), torch.zeros(9, 2, 8)
        cu = torch.zeros(4, dtype=torch.int32)
        mask = torch.ones(5, 7, dtype=torch.bool)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 7}
        assert onefold.attention(q, k, k, mask=mask, **lengths).shape == (9, 4, 8)


def test_looking_at_shapes_makes_no_second_graph_for_other_lengths():
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    call = torch.compile(onefold.attention, fullgraph=True, backend=count, dynamic=True)
    for seqlen in (5, 6, 9, 30):
        inputs = make_inputs(seqlen, requires_grad=False)
        assert torch.equal(call(*inputs), onefold.attention(*inputs))
    assert len(compiled) == 1


# ---- the operators themselves ----


def question(dtype=torch.float32, packed=False):
    """The operators' common arguments, every tensor given."""
    q, k, v = make_inputs(dtype=dtype, requires_grad=False)
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


def test_opcheck_passes_for_merge_states():
    generator = torch.Generator().manual_seed(0)
    outs, lses = (torch.randn(s, generator=generator) for s in ((3, 2, 5, 4, 8), (3, 2, 5, 4)))
    opcheck(torch.ops.onefold.merge_states.default, (outs, lses))


def test_the_operators_have_the_documented_schemas():
    common = (
        "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? slopes, Tensor? sinks, "
        "Tensor? cu_q, Tensor? cu_k, Tensor? used_q, Tensor? used_k, Tensor? seed, Scalar? scale, "
        "str causal, SymInt? left, SymInt? right, Scalar softcap, Scalar dropout_p, SymInt? max_q, "
        "SymInt? max_k"
    )
    assert str(torch.ops.onefold.forward.default._schema) == (
        f"onefold::forward({common}) -> (Tensor out, Tensor lse)"
    )
    assert str(torch.ops.onefold.backward.default._schema) == (
        f"onefold::backward(Tensor? dout, Tensor? dlse, {common}, Tensor out, Tensor lse, "
        "bool deterministic, bool[6] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, "
        "Tensor dslopes, Tensor dsinks)"
    )


@pytest.mark.parametrize("option", ["scale", "softcap", "dropout_p"])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_known_only_when_the_graph_runs_is_taken(option):
    torch._dynamo.reset()
    inputs = [torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(3)]

    def attend(q, k, v, number):
        return onefold.attention(q, k, v, seed=1, **{option: number.item()})

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for value in (0.25, 0.5):
        found, expected = (
            (out, *torch.autograd.grad(out.sum(), inputs))
            for out in (f(*inputs, torch.tensor(value)) for f in (compiled, attend))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
