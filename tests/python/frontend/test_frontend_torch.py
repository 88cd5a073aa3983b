"""torch tensors in eager mode: autograd, autocast, dropout seeds, out=, and every refusal."""

from __future__ import annotations

import contextlib
import copy
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.autograd.forward_ad as forward_ad  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import onefold  # noqa: E402
from frontend_inputs import make_inputs, random  # noqa: E402
from onefold import _core  # noqa: E402

# ---- gradients ----

GRADCHECK_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (1, 1)},
    "softcap": {"softcap": 1.5},
    "negative_scale": {"scale": -0.7},
    "zero_scale": {"scale": 0.0},
    "dropout": {"dropout_p": 0.4, "seed": 11},
    "used_lengths": {"seqused_q": [3, 1], "seqused_k": [0, 4]},
    "mask": {"mask": torch.tensor([True, False, True, True, False])},
}


@pytest.mark.parametrize("name", GRADCHECK_OPTIONS)
def test_gradients_of_q_k_v_through_out_and_lse_pass_gradcheck(name):
    options = GRADCHECK_OPTIONS[name]

    def call(q, k, v):
        out, lse = onefold.attention(q, k, v, return_lse=True, **options)
        return out, torch.where(lse.isinf(), 0.0, lse)  # rows that see nothing

    assert gradcheck(call, make_inputs())


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 4, 1, 5), (3, 1), (), (2, 1, 1, 1)])
def test_gradient_of_a_broadcast_bias_passes_gradcheck(shape):
    q, k, v = make_inputs(requires_grad=False)

    def call(bias):
        return onefold.attention(q, k, v, bias=bias, return_lse=True)

    assert gradcheck(call, (random(*shape),))


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_gradient_of_alibi_slopes_passes_gradcheck(shape):
    q, k, v = make_inputs(requires_grad=False)

    def call(slopes):
        return onefold.attention(q, k, v, alibi_slopes=slopes, causal=True, return_lse=True)

    assert gradcheck(call, (random(*shape),))


def test_gradient_of_sinks_passes_gradcheck():
    q, k, v = make_inputs(requires_grad=False)

    def call(sinks):
        return onefold.attention(q, k, v, sinks=sinks, return_lse=True)

    assert gradcheck(call, (random(4),))


def test_gradients_of_all_inputs_of_packed_sequences_pass_gradcheck():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, h, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for n, h in ((6, 2), (5, 1), (5, 1))
    )

    def call(q, k, v, bias, slopes, sinks):
        return onefold.attention(
            q,
            k,
            v,
            cu_seqlens_q=[0, 2, 6],
            cu_seqlens_k=[0, 4, 5],
            max_seqlen_q=4,
            max_seqlen_k=4,
            causal=True,
            softcap=2.0,
            bias=bias,
            alibi_slopes=slopes,
            sinks=sinks,
            return_lse=True,
        )

    assert gradcheck(call, (q, k, v, random(1, 2, 4, 4), random(2), random(2)))


@pytest.mark.parametrize("wanted", range(6))
def test_a_gradient_is_the_same_whichever_other_inputs_require_one(wanted):
    def gradients(requires):
        q, k, v = make_inputs(requires_grad=False)
        extra = [random(2, 1, 3, 5), random(4), random(4)]
        inputs = [q, k, v, *(x.detach() for x in extra)]
        for i in requires:
            inputs[i].requires_grad_()
        q, k, v, bias, slopes, sinks = inputs
        out, lse = onefold.attention(
            q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True
        )
        (out.sin().sum() + lse.cos().sum()).backward()
        return [x.grad for x in inputs]

    together, alone = gradients(range(6)), gradients([wanted])
    assert torch.equal(alone[wanted], together[wanted])
    assert all(g is None for i, g in enumerate(alone) if i != wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_shape_and_dtype_of_their_inputs(dtype):
    q, k, v = make_inputs(dtype)
    bias = random(3, 5, dtype=torch.bfloat16)
    slopes, sinks = random(2, 4, dtype=torch.float32), random(4, dtype=torch.float32)
    inputs = (q, k, v, bias, slopes, sinks)
    out = onefold.attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks)
    assert out.dtype == dtype
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


def test_a_gradient_through_lse_alone_leaves_v_at_zero():
    q, k, v = make_inputs()
    _, lse = onefold.attention(q, k, v, return_lse=True)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    assert dq.abs().max() > 0
    assert torch.equal(dv, torch.zeros_like(v))


def test_a_zero_cotangent_gives_exactly_zero_gradients():
    inputs = make_inputs(torch.float32)
    out = onefold.attention(*inputs)
    for gradient in torch.autograd.grad(out, inputs, torch.zeros_like(out)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_self_attention_adds_the_gradients_of_its_three_roles():
    x = random(1, 5, 2, 4)
    whole = torch.autograd.grad(onefold.attention(x, x, x).sin().sum(), x)[0]
    roles = [x.detach().clone().requires_grad_() for _ in range(3)]
    parts = torch.autograd.grad(onefold.attention(*roles).sin().sum(), roles)
    # Two additions in an order that autograd chooses.
    unit = 2.0**-53 * sum(p.abs() for p in parts)
    assert ((whole - sum(parts)).abs() <= 4 * unit).all()


def test_an_input_changed_between_forward_and_backward_is_noticed():
    q, k, v = make_inputs()
    out = onefold.attention(q, k, v)
    with torch.no_grad():
        v.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_raises_one_clear_sentence():
    q, k, v = make_inputs()
    (dq,) = torch.autograd.grad(onefold.attention(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative yet"):
        dq.sum().backward()


def test_create_graph_alone_gives_the_ordinary_gradient():
    q, k, v = make_inputs()
    out = onefold.attention(q, k, v)
    (plain,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (graphed,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.equal(plain, graphed)


def test_forward_mode_raises_one_clear_sentence():
    q, k, v = make_inputs()
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="no forward-mode derivative yet, and k carries"),
    ):
        onefold.attention(q, forward_ad.make_dual(k, k), v)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_a_function_transform_raises_one_clear_sentence(transform):
    q, k, v = make_inputs(requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"does not work inside torch\.func transforms"):
        transform(lambda q: onefold.attention(q, k, v).sum())(q)


def test_batched_cotangents_raise_one_clear_sentence():
    q, k, v = make_inputs()
    out = onefold.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="a transform such as vmap"):
        torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)


# ---- memory and layouts ----


def test_head_first_strides_give_the_same_bits_without_a_copy():
    q, k, v = make_inputs(torch.float32, requires_grad=False)
    expected = onefold.attention(q, k, v, causal=True)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert turned[0].stride() != q.stride()
    assert torch.equal(onefold.attention(*turned, causal=True), expected)


@pytest.mark.parametrize("make", ["expanded", "sliced", "last_stride"])
def test_any_strides_give_the_bits_of_a_packed_copy(make):
    q, k, v = make_inputs(torch.float32, requires_grad=False, d=4, dv=4)
    if make == "expanded":
        k, v = k[:, :1].expand(2, 5, 2, 4), v[:1].expand(2, 5, 2, 4)
    elif make == "sliced":
        q, k, v = (torch.stack((x, x + 1), dim=-2)[..., 0, :] for x in (q, k, v))
    else:
        q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
    packed = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(onefold.attention(q, k, v), onefold.attention(*packed))


def test_a_lazily_negated_view_is_negated_before_it_is_read():
    _, k, v = make_inputs(torch.float32, requires_grad=False)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 3, 4, 4, dtype=torch.complex64, generator=generator).conj().imag
    assert q.is_neg()
    expected = onefold.attention(q.resolve_neg(), k, v)
    assert torch.equal(onefold.attention(q, k, v), expected)


@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (2, 0, 0)])
def test_empty_tensors_give_empty_or_zero_results_and_gradients(batch, sq, sk):
    inputs = make_inputs(torch.float32, batch=batch, sq=sq, sk=sk)
    out, lse = onefold.attention(*inputs, return_lse=True)
    assert torch.equal(out, torch.zeros(batch, sq, 4, 3))
    assert torch.equal(lse, torch.full((batch, 4, sq), -torch.inf))
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


def test_a_storage_that_was_freed_is_refused():
    q, k, v = make_inputs(torch.float32, requires_grad=False)
    k.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="k has 80 elements but a null data pointer"):
        onefold.attention(q, k, v)


def test_parameters_and_plain_subclasses_are_ordinary_tensors():
    class Marked(torch.Tensor):
        pass

    q, k, v = make_inputs(torch.float32, requires_grad=False)
    expected = onefold.attention(q, k, v)
    assert torch.equal(onefold.attention(torch.nn.Parameter(q), k, v), expected)
    marked = onefold.attention(q.as_subclass(Marked), k, v)
    assert type(marked) is Marked
    assert torch.equal(marked.as_subclass(torch.Tensor), expected)


class Attributes:
    """What a torch without the DLPack exchange table offers: attributes alone."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.layout = tensor.layout

    def stride(self):
        return self._tensor.stride()

    def data_ptr(self):
        return self._tensor.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_torch_without_the_exchange_table_gives_the_same_bits(dtype):
    q, k, v = make_inputs(dtype, requires_grad=False)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    mask = torch.tensor([True, True, False, True, True])
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    options = (None, "none", None, None, 0.0, 0.0, None, None)

    def call(wrap):
        out = torch.empty(2, 3, 4, 3, dtype=dtype)
        arrays = (q, k, v, None, mask, None, None, None, None, None, lengths, None)
        wrapped = [None if a is None else wrap(a) for a in arrays]
        _core.forward(*wrapped, *options, wrap(out), None, None, None)
        return out

    assert torch.equal(call(Attributes), call(lambda x: x))


# ---- what a call costs ----


def functions_entered(call):
    """How many functions of Python, and of C from Python, the second of two calls enters."""
    entered = []
    call()
    sys.setprofile(lambda _, event, __: entered.append(event) if "call" in event else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered) - 2  # `call`, and the end of the profile


@pytest.mark.parametrize(("requires_grad", "most"), [(False, 12), (True, 18)])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_call_enters_few_functions(requires_grad, most, return_lse, dtype):
    q, k, v = make_inputs(dtype, requires_grad=requires_grad, dv=4)
    call = lambda: onefold.attention(q, k, v, causal=True, return_lse=return_lse)  # noqa: E731
    assert functions_entered(call) <= most


@pytest.mark.parametrize("first", [contextlib.nullcontext, torch.inference_mode])
def test_lse_does_not_remember_what_the_first_call_was_made_under(first):
    inputs = make_inputs(torch.bfloat16)
    onefold._torch_ops._float32_on.cache_clear()
    with first():
        _, lse = onefold.attention(*inputs, return_lse=True)
        assert lse.is_inference() == (first is torch.inference_mode)
    out, lse = onefold.attention(*inputs, return_lse=True)
    assert lse.dtype == torch.float32 and lse.requires_grad and not lse.is_inference()
    (out.sum() + lse.sum()).backward()
    with torch.inference_mode():
        assert onefold.attention(*inputs, return_lse=True)[1].is_inference()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


LAYOUTS = {
    "packed": lambda x: x,
    "heads before rows": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "of a packed qkv": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "one sequence, its stride without meaning": lambda x: x[:1].as_strided(
        (1, *x.shape[1:]), (7, *x.stride()[1:])
    ),
    "one sequence for all": lambda x: x[:1].expand(x.shape),
    "no rows": lambda x: x[:, :0],
    "a parameter": lambda x: torch.nn.Parameter(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_plain_call_and_one_that_is_watched_give_the_same(layout, requires_grad, dtype):
    inputs = make_inputs(dtype, requires_grad=False, dv=4)
    q, k, v = (LAYOUTS[layout](x).detach() for x in inputs)
    results = []
    for is_watched in (False, True):
        ours = [x.clone().requires_grad_(requires_grad) for x in (k, v)]
        with contextlib.ExitStack() as stack:
            if is_watched:
                stack.enter_context(Watching())
            out, lse = onefold.attention(q, *ours, causal=True, return_lse=True)
            alone = onefold.attention(q, *ours, causal=True)
        if requires_grad:
            (out.sum() + lse.sum() + 2 * alone.sum()).backward()
        assert out.is_contiguous() and lse.is_contiguous()
        assert out.requires_grad == lse.requires_grad == alone.requires_grad == requires_grad
        assert type(out) is torch.Tensor
        results.append([out, lse, alone] + [x.grad for x in ours if requires_grad])
    for plain, watched in zip(*results, strict=True):
        assert plain.dtype == watched.dtype and plain.stride() == watched.stride()
        assert torch.equal(plain, watched)


# ---- autocast ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_q_k_v_as_for_torch_attention(dtype):
    q, k, v = make_inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = onefold.attention(q, k, v)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert out.dtype == theirs.dtype == dtype
    expected = onefold.attention(*(x.to(dtype) for x in (q, k, v)))
    assert torch.equal(out, expected)
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert onefold.attention(*make_inputs()).dtype == torch.float64


# ---- dropout ----


def test_the_same_seed_drops_the_same_weights_and_another_seed_others():
    q, k, v = make_inputs(torch.float32, requires_grad=False)
    first = onefold.attention(q, k, v, dropout_p=0.5, seed=5)
    assert torch.equal(first, onefold.attention(q, k, v, dropout_p=0.5, seed=torch.tensor([5])))
    assert not torch.equal(first, onefold.attention(q, k, v, dropout_p=0.5, seed=6))


def test_seeds_beyond_63_bits_are_the_negative_numbers_of_the_same_bits():
    q, k, v = make_inputs(torch.float32, requires_grad=False)
    unsigned = onefold.attention(q, k, v, dropout_p=0.5, seed=2**64 - 3)
    assert torch.equal(unsigned, onefold.attention(q, k, v, dropout_p=0.5, seed=torch.tensor(-3)))


def test_without_a_seed_manual_seed_decides_and_each_call_differs():
    q, k, v = make_inputs(torch.float32, requires_grad=False, sk=50)
    torch.manual_seed(3)
    first, second = (onefold.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, onefold.attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_without_dropout_no_random_number_is_drawn():
    state = torch.get_rng_state()
    onefold.attention(*make_inputs(torch.float32))
    assert torch.equal(state, torch.get_rng_state())


def test_backward_uses_the_dropout_mask_of_forward():
    q, k, v = make_inputs()
    out = onefold.attention(q, k, v, dropout_p=0.5)
    # out is linear in v, so <v, d sum(out) / dv> = sum(out) if and only if the masks agree.
    (dv,) = torch.autograd.grad(out.sum(), v)
    terms = (dv * v).sum() - out.sum()
    assert terms.abs() <= 2.0**-53 * 1000 * (dv * v).abs().sum()


def test_dropout_of_everything_gives_zeros_and_zero_gradients():
    inputs = make_inputs(torch.float32)
    out = onefold.attention(*inputs, dropout_p=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_dropout_mask(use_reentrant):
    def gradient(run):
        q, k, v = make_inputs(torch.float32)
        torch.manual_seed(4)
        out = run(lambda *x: onefold.attention(*x, dropout_p=0.5), q, k, v)
        return torch.autograd.grad(out.sin().sum(), q)[0] if not use_reentrant else backward(out, q)

    def backward(out, q):
        out.sin().sum().backward()
        return q.grad

    plain = gradient(lambda f, *x: f(*x))
    again = gradient(lambda f, *x: checkpoint(f, *x, use_reentrant=use_reentrant))
    assert torch.equal(plain, again)


# ---- out= ----


def test_out_is_written_returned_and_its_version_advances():
    q, k, v = make_inputs(torch.float32, requires_grad=False)
    out = torch.full((2, 3, 4, 3), torch.nan)
    version = out._version
    result, lse = onefold.attention(q, k, v, out=out, return_lse=True)
    expected, expected_lse = onefold.attention(q, k, v, return_lse=True)
    assert result is out
    assert out._version == version + 1
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_out_with_an_input_that_requires_a_gradient_is_refused():
    q, k, v = make_inputs(torch.float32, requires_grad=False)
    v.requires_grad_()
    out = torch.empty(2, 3, 4, 3)
    with pytest.raises(ValueError, match="out was given and v requires a gradient"):
        onefold.attention(q, k, v, out=out)
    with torch.no_grad():
        assert onefold.attention(q, k, v, out=out) is out


def test_out_that_overlaps_an_input_is_refused():
    q, k, v = make_inputs(torch.float32, requires_grad=False, dv=4)
    with pytest.raises(ValueError, match="out shares memory with q"):
        onefold.attention(q, k, v, out=q)


# ---- refusals: each with its sentence ----

DOUBLE = torch.zeros(2, 3, 4, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"q": [[1.0]]}, TypeError, "q is a list: a torch.Tensor or a numpy.ndarray is needed"),
        ({"q": DOUBLE[0]}, ValueError, "q has 3 axes"),
        ({"q": DOUBLE[None]}, ValueError, "q has 5 axes: at most 4"),
        ({"q": DOUBLE}, ValueError, "k is float32: q is float64"),
        ({"q": DOUBLE.to(torch.complex64)}, ValueError, "dtype of q is complex64: float32"),
        ({"q": DOUBLE.to(torch.float8_e4m3fn)}, ValueError, "dtype of q is float8_e4m3fn: float32"),
        ({"q": DOUBLE.int()}, ValueError, "q is int32: float32"),
        ({"q": DOUBLE.to("meta")}, NotImplementedError, "q is on meta: .* the CPU and on CUDA"),
        ({"k": DOUBLE.to("meta")}, NotImplementedError, "k is on meta: .* the CPU and on CUDA"),
        ({"q": DOUBLE.float().to_sparse()}, NotImplementedError, "q has layout torch.sparse_coo"),
        ({"k": 3}, TypeError, "k is an int: a torch.Tensor, as q is one, is needed"),
        ({"v": None}, TypeError, "v is None: a torch.Tensor, as q is one"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale is a Tensor: a Python number is needed"),
        ({"softcap": torch.tensor(1.0)}, TypeError, "softcap is a Tensor: a Python number"),
        ({"scale": "1"}, TypeError, "scale is a str: a Python number is needed"),
        ({"scale": float("nan")}, ValueError, "scale is nan: a finite number is needed"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"softcap": None}, TypeError, "softcap is None: a Python number"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5"),
        ({"dropout_p": None}, TypeError, "dropout_p is None: a Python number"),
        ({"causal": "bottom"}, ValueError, "causal is 'bottom': False, True, \"bottom_right\""),
        ({"causal": None}, ValueError, "causal is None: False, True"),
        ({"window": 3}, TypeError, "window is an int: a pair"),
        ({"window": (1, 2, 3)}, ValueError, "window has 3 entries: a pair"),
        ({"window": (1.5, None)}, TypeError, r"window\[0\] is a float: an int or None is needed"),
        ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q is a float: an int or None is needed"),
        ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k was given without cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 2]}, ValueError, "cu_seqlens_k is missing"),
        ({"seqused_k": [1, 2.5]}, TypeError, r"seqused_k is \[1, 2.5\]: a list of int is needed"),
        ({"seqused_k": [1]}, ValueError, "length of seqused_k is 1: 2 is needed"),
        ({"seqused_k": [1, 6]}, ValueError, r"seqused_k\[1\] is 6: sequence 1 has 5 rows"),
        ({"seqused_k": torch.ones(2)}, ValueError, "seqused_k is float32: int32 or int64"),
        ({"mask": torch.ones(5)}, ValueError, "mask is float32: bool is needed"),
        ({"mask": torch.ones(5).byte()}, ValueError, "dtype of mask is uint8: bool is needed"),
        ({"bias": torch.ones(5) > 0}, ValueError, "bias is bool: a float dtype is needed"),
        ({"bias": torch.ones(4)}, ValueError, r"bias has shape \(4,\): it must broadcast"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "heads of alibi_slopes is 3: 4 is needed"),
        ({"sinks": torch.ones(2, 4)}, ValueError, r"sinks has shape \(2, 4\)"),
        ({"sinks": torch.ones(4).half()}, ValueError, "sinks is float16: float32 is needed"),
        ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed is a float: an int or a one-element"),
        ({"dropout_p": 0.5, "seed": 2**64}, ValueError, "seed is 18446744073709551616: an integer"),
        (
            {"dropout_p": 0.5, "seed": torch.ones(1)},
            ValueError,
            r"seed is float32 \(1,\): a number, or one",
        ),
        (
            {"dropout_p": 0.5, "seed": torch.tensor([1, 2])},
            ValueError,
            r"seed is int64 \(2,\): a number, or one",
        ),
        ({"score_mod": max}, NotImplementedError, "score_mod is not supported yet: bias="),
        ({"mask_mod": max}, NotImplementedError, "mask_mod is not supported yet: mask="),
        ({"aux": ()}, NotImplementedError, "aux is not supported yet"),
        ({"out": torch.empty(1)}, ValueError, "out has 1 axis"),
        ({"out": [1]}, TypeError, "out is a list: a torch.Tensor, as q is one, is needed"),
        ({"out": torch.empty(2, 3, 4, 3).half()}, ValueError, "out is float16: q is float32"),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(change, error, sentence):
    q, k, v = make_inputs(torch.float32, requires_grad=False)
    arguments = {"q": q, "k": k, "v": v} | copy.copy(change)
    with pytest.raises(error, match=sentence) as caught:
        onefold.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert "\n" not in str(caught.value)


def test_deterministic_is_accepted_in_each_form():
    q, k, v = make_inputs(torch.float32)
    results = [
        torch.autograd.grad(onefold.attention(q, k, v, deterministic=d).sum(), k)[0]
        for d in (None, False, True)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
