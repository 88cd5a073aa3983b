"""torch.compile.

The backend is aot_eager where only tracing matters: it runs Dynamo, AOTAutograd and the fake
kernels, and skips the C++ compiler. A few tests go through inductor.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import onefold  # noqa: E402
from frontend_inputs import (  # noqa: E402
    assert_equal,
    make_options,
    make_parts,
    results_and_gradients,
    square_inputs,
    traced,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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

    inputs = [*square_inputs(), *options.values()]
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    assert_equal(results_and_gradients(compiled, inputs), results_and_gradients(call, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_compiled_attention_gives_the_bits_of_eager_in_every_dtype(dtype):
    def call(q, k, v):
        return onefold.attention(q, k, v, causal="top_left", window=(2, None), return_lse=True)

    inputs = square_inputs(dtype=dtype)
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
        inputs = square_inputs(seqlen)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
        assert_equal([compiled(*inputs)], [call(*inputs)])
    assert len(graphs) == 1


def test_gradients_with_a_dynamic_sequence_length_are_those_of_eager():
    def call(q, k, v):
        return onefold.attention(q, k, v, causal=True, return_lse=True)

    compiled = traced(call)
    for seqlen in (5, 7, 64):
        inputs = square_inputs(seqlen)
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
        inputs = [x.detach()[0].requires_grad_() for x in square_inputs(seqlen)]
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

    inputs = square_inputs()
    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_self_attention_of_one_tensor_compiles():
    x = square_inputs()[0]

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
    q, k, v = square_inputs(requires_grad=False)

    def call(q, factor):
        return onefold.attention(q, k, v, scale=factor, softcap=factor)

    compiled = traced(call)
    for factor in (0.5, 0.25, 3.0):
        assert_equal([compiled(q, factor)], [call(q, factor)])


def test_a_given_seed_drops_the_same_weights_compiled_and_eager():
    q, k, v = square_inputs()

    def call(q, k, v):
        return onefold.attention(q, k, v, dropout_p=0.5, seed=2**63 + 5)

    inputs = [q, k, v]
    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_a_drawn_seed_follows_manual_seed_when_traced():
    q, k, v = square_inputs(requires_grad=False)

    def call(q):
        return onefold.attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(1)
    expected = call(q)
    torch.manual_seed(1)
    assert torch.equal(traced(call)(q), expected)


@pytest.mark.parametrize("through_checkpoint", [False, True])
def test_inductor_uses_the_dropout_mask_of_forward_in_backward(through_checkpoint):
    q, k, v = square_inputs()

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
    q, k, v = square_inputs(requires_grad=False)

    def call(q, k, v):
        out = torch.zeros(2, 5, 4, 8)
        _, lse = onefold.attention(q, k, v, out=out, return_lse=True)
        return out + 1, lse

    actual = torch.compile(call, fullgraph=True, backend=backend)(q, k, v)
    out, lse = onefold.attention(q, k, v, return_lse=True)
    assert_equal(actual, (out + 1, lse))


def test_autocast_compiles():
    q, k, v = square_inputs()

    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return onefold.attention(q, k, v)

    compiled = traced(call)
    assert compiled(q, k, v).dtype == torch.bfloat16
    inputs = [q, k, v]
    assert_equal(results_and_gradients(compiled, inputs), results_and_gradients(call, inputs))


def test_head_first_inputs_get_gradients_of_their_own_strides_from_inductor():
    inputs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in square_inputs()]

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
    inputs = make_parts()

    def call(outs, lses):
        return onefold.merge_states(list(outs.unbind()), list(lses.unbind()))

    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_sdpa_compiles_with_gradients():
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in square_inputs()]

    def call(q, k, v):
        return onefold.sdpa(q, k, v, is_causal=True, enable_gqa=True)

    assert_equal(results_and_gradients(traced(call), inputs), results_and_gradients(call, inputs))


def test_a_compiled_call_that_cannot_work_raises_the_sentence_of_eager():
    q, k, v = square_inputs(requires_grad=False)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="q has 3 axes"):  # while traced
        traced(lambda q: onefold.attention(q, k, v))(q[0])
    with pytest.raises(ValueError, match="q has 3 axes"):  # sizes are symbols: by the call itself
        traced(lambda q: onefold.attention(q, k, v), dynamic=True)(q[0])


def test_looking_at_shapes_makes_no_second_graph_for_other_lengths():
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    call = torch.compile(onefold.attention, fullgraph=True, backend=count, dynamic=True)
    for seqlen in (5, 6, 9, 30):
        inputs = square_inputs(seqlen, requires_grad=False)
        assert torch.equal(call(*inputs), onefold.attention(*inputs))
    assert len(compiled) == 1


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


HUGE = [
    {"window": (2**63, None)},
    {"window": (None, 2**70)},
    {"window": (-(2**63) - 1, 2**64)},
    {"seed": 2**64 - 1, "dropout_p": 0.5},
    {"scale": 2**64},
    {"softcap": 2**70},
]


@pytest.mark.parametrize("options", HUGE, ids=str)
def test_numbers_beyond_64_bits_mean_the_same_compiled_and_eager(options):
    def call(q, k, v):
        return onefold.attention(q, k, v, causal="top_left", **options)

    inputs = square_inputs(requires_grad=False)
    assert torch.equal(traced(call)(*inputs), call(*inputs))


def test_longest_lengths_beyond_64_bits_mean_the_same_compiled_and_eager():
    q, k, v = (x[0] for x in square_inputs(requires_grad=False))
    offsets = torch.tensor([0, 2, 5])

    def call(q):
        return onefold.attention(
            q,
            k,
            v,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=2**63,
            max_seqlen_k=2**64,
            mask=torch.ones(1, 1, dtype=torch.bool),
        )

    assert torch.equal(traced(call)(q), call(q))
