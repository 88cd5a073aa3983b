"""What a tensor may be besides dense memory of its own: each kind works, or is refused by name."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import onefold  # noqa: E402
from frontend_inputs import make_options, make_parts, square_inputs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes and deprecations of torch's


def nested(layout):
    return torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(2, 4, 8)], layout=layout)


def leaked(x):
    """What is left of a tensor when vmap has returned."""
    kept = []
    torch.func.vmap(lambda inner: (kept.append(inner), inner)[1])(torch.stack([x, x]))
    return kept[0]


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


# (what it is made of a dense one, what is said of it)
KINDS = {
    "meta": (lambda x: x.to("meta"), "{} is on meta: "),
    "sparse": (lambda x: x.to_sparse(), "{} has layout torch.sparse_coo: .* to_dense"),
    "nested": (lambda x: nested(torch.strided), "{} is a nested tensor: a dense one is needed"),
    "jagged": (lambda x: nested(torch.jagged), "{} is a nested tensor: a dense one is needed"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
        "{} is quantized: .* dequantize",
    ),
    "complex": (lambda x: x.to(torch.complex64), "dtype of {} is complex64: "),
    "conjugated": (lambda x: x.to(torch.complex64).conj(), "dtype of {} is complex64: "),
    "zeros": (
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        "{} is torch._efficientzerotensor, .* torch.zeros is needed",
    ),
    "leaked": (leaked, "{} is wrapped by a transform such as vmap"),
    "functional": (torch._to_functional_tensor, r"{} has \d+ elements but a null data pointer"),
    "freed": (freed, r"{} has \d+ elements but a null data pointer"),
    "number": (lambda x: 3, "{} is an int: a torch.Tensor"),
    "bytes": (lambda x: x.to(torch.uint8), "dtype of {} is uint8: "),
}


def arguments():
    q, k, v = square_inputs(requires_grad=False)
    options = {name: x.detach() for name, x in make_options().items()}
    return {
        "q": q,
        "k": k,
        "v": v,
        **options,
        "mask": torch.ones(5, 5, dtype=torch.bool),
        "seqused_k": torch.tensor([3, 4]),
        "seed": torch.tensor([3]),
        "dropout_p": 0.5,
    }


def attend(call=onefold.attention, **changed):
    given = {**arguments(), **changed}
    return call(given.pop("q"), given.pop("k"), given.pop("v"), **given)


REFUSALS = (TypeError, ValueError, NotImplementedError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks", "mask", "seqused_k", "seed"])  # fmt: skip  # noqa: E501
def test_a_tensor_of_another_kind_is_refused_by_name(name, kind):
    if (name, kind) == ("seed", "number"):
        pytest.skip("an int is a seed")
    make, sentence = KINDS[kind]
    with pytest.raises(REFUSALS, match="^" + sentence.format(name)) as caught:
        attend(**{name: make(arguments()[name])})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_of_another_kind_are_refused_by_name(name, kind):
    make, sentence = KINDS[kind]
    q, k, v = (x[0] for x in square_inputs(requires_grad=False))
    offsets = torch.tensor([0, 2, 5])
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, name: make(offsets)}
    with pytest.raises(REFUSALS, match="^" + sentence.format(name)):
        onefold.attention(q, k, v, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["outs", "lses"])
def test_parts_of_another_kind_are_refused_by_name(name, kind):
    make, sentence = KINDS[kind]
    given = dict(zip(("outs", "lses"), make_parts(requires_grad=False), strict=True))
    if (name, kind) == ("lses", "zeros"):
        pytest.skip("turned into memory on the way, and right")
    with pytest.raises(REFUSALS, match="^" + sentence.format(name)):
        onefold.merge_states(**{**given, name: make(given[name])})


@pytest.mark.parametrize("kind", ["sparse", "zeros", "leaked", "functional"])
@pytest.mark.parametrize("name", ["dout", "dlse"])
def test_a_cotangent_of_another_kind_is_refused_by_name(name, kind):
    """Those that torch itself lets pass."""
    make, sentence = KINDS[kind]
    q, k, v = square_inputs()
    result = onefold.attention(q, k, v, return_lse=True)[("dout", "dlse").index(name)]
    with pytest.raises(REFUSALS, match="^" + sentence.format(name)):
        torch.autograd.grad(result, q, make(torch.ones_like(result)))


def test_a_batch_of_cotangents_is_refused_for_attention_and_right_for_merging():
    q, k, v = square_inputs()
    out = onefold.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="transform"):
        torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)
    outs, lses = make_parts()
    out, _ = onefold.merge_states(outs, lses)
    both = torch.stack([torch.ones_like(out), out.detach()])
    batched = torch.autograd.grad(out, outs, both, is_grads_batched=True, retain_graph=True)[0]
    for found, dout in zip(batched, both, strict=True):
        assert torch.equal(found, torch.autograd.grad(out, outs, dout, retain_graph=True)[0])


# ---- a negated view: what its memory holds is the negative of what it shows ----


def negated(x):
    """The values of x as a view whose memory holds -x."""
    view = torch._neg_view(-x)
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks", "seqused_k", "seed"])  # fmt: skip  # noqa: E501
def test_a_negated_view_gives_the_bits_of_what_it_shows(name):
    assert torch.equal(attend(**{name: negated(arguments()[name])}), attend())
    compiled = torch.compile(onefold.attention, backend="aot_eager")
    assert torch.equal(attend(compiled, **{name: negated(arguments()[name])}), attend())


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_negated_offsets_are_what_they_show(name):
    q, k, v = (x[0] for x in square_inputs(requires_grad=False))
    offsets = torch.tensor([0, 2, 5])
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    expected = onefold.attention(q, k, v, **given)
    assert torch.equal(onefold.attention(q, k, v, **{**given, name: negated(offsets)}), expected)


def test_negated_cotangents_and_results_give_the_gradients_of_what_they_show():
    q, k, v = square_inputs()
    out, lse = onefold.attention(q, k, v, return_lse=True)
    cotangents = (out.detach().cos(), lse.detach().sin())
    expected = torch.autograd.grad((out, lse), q, cotangents, retain_graph=True)[0]
    found = torch.autograd.grad((out, lse), q, tuple(map(negated, cotangents)))[0]
    assert torch.equal(found, expected)
    question = (q.detach(), k.detach(), v.detach(), *(None,) * 10, "none", None, None, 0.0, 0.0)
    results = (negated(out.detach()), negated(lse.detach()))
    needs = [True] + [False] * 5
    by_operator = torch.ops.onefold.backward(
        *cotangents, *question, None, None, *results, False, needs
    )
    assert torch.equal(by_operator[0], expected)


@pytest.mark.parametrize("name", ["outs", "lses"])
def test_negated_parts_merge_to_the_bits_of_what_they_show(name):
    given = dict(zip(("outs", "lses"), make_parts(requires_grad=False), strict=True))
    found = onefold.merge_states(**{**given, name: negated(given[name])})
    assert all(map(torch.equal, found, onefold.merge_states(**given)))


def test_explain_and_warmup_read_the_lengths_that_a_negated_view_shows():
    q, k, v = square_inputs(requires_grad=False)
    lengths = torch.tensor([3, 4])
    for call in (onefold.explain, onefold.warmup):
        call(q, k, v, seqused_k=negated(lengths))
        with pytest.raises(ValueError, match=r"seqused_k\[0\] is -3"):
            call(q, k, v, seqused_k=torch._neg_view(lengths))


def test_an_output_that_is_a_negated_view_is_refused_compiled_or_not():
    q, k, v = square_inputs(requires_grad=False)
    out = torch._neg_view(torch.zeros(2, 5, 4, 8))
    for call in (onefold.attention, torch.compile(onefold.attention, backend="aot_eager")):
        with pytest.raises(Exception, match="out is a negated view"):
            call(q, k, v, out=out)


# ---- fake tensors, outside of any compiler ----


def test_a_real_tensor_beside_fake_ones_is_named():
    mode = FakeTensorMode()
    q, k, v = square_inputs(requires_grad=False)
    fakes = [mode.from_tensor(x) for x in (q, k, v)]
    with pytest.raises(TypeError, match=r"^k is a real tensor and others are fake"):
        onefold.attention(fakes[0], k, fakes[2])
    outs, lses = make_parts(requires_grad=False)
    with pytest.raises(TypeError, match=r"^outs is a real tensor and others are fake"):
        onefold.merge_states(outs, mode.from_tensor(lses))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert onefold.attention(mode.from_tensor(q), k, v).shape == q.shape


CUDA = [
    ({"k": {"device": "cpu"}}, ValueError, "k is on the CPU: the call runs on CUDA device 0"),
    ({"bias": {"device": "cpu", "shape": (5, 5)}}, ValueError, "bias is on the CPU: the call"),
    (
        {name: {"dtype": torch.float64} for name in "qkv"},
        NotImplementedError,
        "q is float64 on CUDA: float16, bfloat16 or float32 is needed there",
    ),
    (
        {name: {"shape": (2, 5, 4, 264)} for name in "qkv"},
        NotImplementedError,
        "head_dim is 264 on CUDA: at most 256 works there",
    ),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calls themselves say it there")
@pytest.mark.parametrize(("change", "error", "sentence"), CUDA)
def test_what_a_gpu_refuses_is_refused_of_fake_tensors_on_it(change, error, sentence):
    with FakeTensorMode():
        common = {"shape": (2, 5, 4, 8), "device": "cuda", "dtype": torch.float32}
        given = {}
        for name in ("q", "k", "v", *change):
            about = {**common, **change.get(name, {})}
            given[name] = torch.zeros(about["shape"], device=about["device"], dtype=about["dtype"])
        with pytest.raises(error, match=re.escape(sentence)):
            onefold.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
        q, k, v = (torch.zeros(common["shape"], device="cuda") for _ in range(3))
        assert onefold.attention(q, k, v, seqused_k=[3, 4]).device.type == "cuda"
