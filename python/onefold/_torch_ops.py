"""The torch operators: what a tracer sees of onefold.

Made with torch.library.define / impl / register_fake / register_autograd: they have their gradients
themselves, so that every program that holds one has them. The launchers below are their bodies and
are called directly when nothing traces.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from . import _core
from ._options import (
    DIFFERENTIABLE,
    INDEX_ARRAYS,
    NAMES,
    NUM_ARRAYS,
    SEED,
    Described,
    check_merge,
)

# A Scalar is a float that may also be known only when a compiled graph runs: scale=t.item().
_QUESTION = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? slopes, Tensor? sinks, "
    "Tensor? cu_q, Tensor? cu_k, Tensor? used_q, Tensor? used_k, Tensor? seed, Scalar? scale, "
    "str causal, SymInt? left, SymInt? right, Scalar softcap, Scalar dropout_p, SymInt? max_q, "
    "SymInt? max_k"
)
NUM_GRADIENTS = 6
_SYMBOLS = (torch.SymInt, torch.SymFloat)
_CPU = torch.device("cpu")

# A gradient's strides follow its input's, so a compiler must not change those behind our back. The
# exact tag is newer than the fixed-order one, which stands in where it is missing; both at once
# would contradict each other.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides", "needs_fixed_stride_order")
    if hasattr(torch.Tag, name)
)[:2]


SECOND_DERIVATIVE = (
    "onefold.attention has no second derivative yet: use "
    "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH where you need one"
)
_FORWARD_MODE = (
    "onefold.{} has no forward-mode derivative yet, and {} carries a tangent: use reverse mode, "
    "torch.autograd.grad"
)


def takes_tangents() -> bool:
    """Whether a level of forward mode is open."""
    return forward_ad._current_level >= 0


def refuse_tangents(function: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raises for the first that carries one."""
    if forward_ad._current_level >= 0:  # not takes_tangents(), whose call would cost as much
        # A compiler that has let go of the caller must not take this up: it would lose tangents.
        torch.compiler.disable(_look_for_tangents)(function, names, tensors)


def _look_for_tangents(function: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """What is no tensor is for others to refuse."""
    for name, tensor in zip(names, tensors, strict=True):
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(_FORWARD_MODE.format(function, name))


# ---- launchers ----


def _resolved(question: Sequence[Any]) -> list[Any]:
    """The arguments as memory describes them: a lazily negated view is negated."""
    ready = list(question)
    for i in range(NUM_ARRAYS):
        if ready[i] is not None and ready[i].is_neg():
            ready[i] = ready[i].resolve_neg()
    if isinstance(ready[SEED], Tensor):
        ready[SEED] = ready[SEED].resolve_neg()
    return ready


def _out_like(q: Tensor, v: Tensor) -> Tensor:
    """(..., Hq, Dv), contiguous."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def place(q: Tensor) -> tuple[Any, Any]:
    """The last two arguments of a call in `_core`: torch's current stream there, and its pool; on
    the CPU the threads that torch gives itself."""
    if q.is_cuda:
        return torch._C._cuda_getCurrentRawStream(q.get_device()), _workspace
    return torch.get_num_threads(), None


def _workspace(q: Tensor, size_bytes: int) -> Tensor:
    """Of the caching allocator, so that a captured graph owns it; free again, in the order of the
    stream, when the call returns."""
    return q.new_empty(size_bytes, dtype=torch.uint8)


def _lse_like(q: Tensor) -> Tensor:
    """(B, Sq, H, D) -> (B, H, Sq); (T, H, D) -> (H, T)."""
    shape = q.shape
    if len(shape) == 4:  # spelled out: slices cost a call a microsecond
        shape = (shape[0], shape[2], shape[1])
    else:
        shape = (*shape[:-3], *shape[-3:-1][::-1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(shape, dtype=dtype)


@functools.cache
def _float32_on(cuda_index: int) -> Tensor:
    """What new_empty makes float32 of, on the CPU for -1: naming dtype and device in a call costs
    a microsecond."""
    device = "cpu" if cuda_index < 0 else f"cuda:{cuda_index}"
    return torch.empty(0, dtype=torch.float32, device=device)


def _watcher(name: str) -> Any:
    """A question to torch's own module; one that this torch does not have is answered by yes."""
    return getattr(torch._C, name, lambda: True)


# What `_core.is_plain` and `_core.forward_plain` compare with, call and ask. The last five answer
# whether somebody watches the call: a transform, a dispatch or function mode, a tracer, autocast.
PLAIN = (
    Tensor,
    torch.nn.Parameter,
    Tensor.is_neg,
    torch.empty_like,
    _out_like,
    Tensor.new_empty,
    _float32_on,
    torch.get_num_threads,
    getattr(torch._C, "_cuda_getCurrentRawStream", None),  # of a torch with CUDA
    _workspace,
    _watcher("_are_functorch_transforms_active"),
    _watcher("_len_torch_dispatch_stack"),
    _watcher("_len_torch_function_stack"),
    _watcher("_get_tracing_state"),
    _watcher("_is_any_autocast_enabled"),
)


def launch_forward(
    *question: Any, deterministic: bool | None = None, want_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """`deterministic` is for the gradients: forward always is."""
    q = question[0]
    try:
        out = _out_like(q, question[2])
        lse = _lse_like(q) if want_lse else None
    except (RuntimeError, IndexError):  # q or v is no tensor of rows, or without memory
        _core.check_forward(*_resolved(question), None)
        raise
    _core.forward(*_resolved(question), out, lse, *place(q))
    return out, lse


def check_sign(out: Tensor) -> None:
    """Raises for a tensor whose memory holds the negative of what it shows."""
    if out.is_neg():
        raise ValueError("out is a negated view: a tensor that owns its sign is needed")


def launch_forward_into(*question_into: Any) -> Tensor:
    *question, into = question_into
    check_sign(into)
    lse = _lse_like(question[0])
    _core.forward(*_resolved(question), into, lse, *place(question[0]))
    return lse


def launch_backward(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> list[Tensor | None]:
    """rest: the question, out, lse, deterministic (always so on the CPU), needs."""
    *question, out, lse, deterministic, needs = rest
    gradients = [
        torch.empty_like(question[i]) if need else None
        for i, need in zip(DIFFERENTIABLE, needs, strict=True)
    ]
    cotangents = [None if t is None else t.resolve_neg() for t in (dout, dlse)]
    where = place(question[0])
    ready = _resolved(question)
    _core.backward(*cotangents, *ready, out, lse, *gradients, deterministic, *where)
    return gradients


def launch_merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs (N, ..., D), lses (N, ...)."""
    try:
        out = outs.new_empty(outs.shape[1:])
        lse = lses.new_empty(lses.shape[1:])
        parts, rows, head_dim = outs.shape[0], lse.numel(), outs.shape[-1]
        flat_outs = outs.resolve_neg().reshape(parts, rows, head_dim)
        flat_lses = lses.resolve_neg().reshape(parts, rows)
    except RuntimeError:  # a tensor is without memory of its own
        _core.check_tensor(outs, "outs")
        _core.check_tensor(lses, "lses")
        raise
    _core.merge_states(
        flat_outs, flat_lses, out.view(rows, head_dim), lse.view(rows), place(outs)[0]
    )
    return out, lse


# ---- what a tracer is told ----


_ZERO = (ctypes.c_int64 * 1)()  # a valid offset, length and seed
_ROOM = 2**52  # between the addresses of two storages: more bytes than any tensor has


def shape_alone(x: Tensor) -> Described:
    """x in dtype and shape, on the CPU, where nobody reads it."""
    return Described(x.shape, x.dtype, [0] * x.ndim, _CPU, _ROOM)


def _describe(tensors: Sequence[Tensor | None]) -> list[Described | None]:
    """What `_core` is told of tensors without memory: they share memory where they share storage,
    and what would be read, offsets, lengths and the seed of a call on the CPU, is zero."""
    storages: list[Any] = []
    described: list[Described | None] = []
    for i, x in enumerate(tensors):
        if x is None:
            described.append(None)
        elif i in INDEX_ARRAYS or i == SEED:
            zeros = [0] * x.ndim
            described.append(Described(x.shape, x.dtype, zeros, _device(x), addressof(_ZERO)))
        else:
            storage = x.untyped_storage()
            room = next((n for n, known in enumerate(storages) if known is storage), len(storages))
            if room == len(storages):
                storages.append(storage)
            address = (1 + room) * _ROOM + x.storage_offset() * x.element_size()
            described.append(Described(x.shape, x.dtype, x.stride(), _device(x), address))
    return described


def _device(x: Tensor) -> torch.device:
    return x.device if x.is_cuda else _CPU


def _has_symbols(tensors: Sequence[Tensor | None], numbers: Sequence[Any] = ()) -> bool:
    """Whether sizes wait for their call: looking at one would fix it in the compiled program."""
    sizes = [n for x in tensors if x is not None for n in (*x.shape, *x.stride())]
    return any(isinstance(n, _SYMBOLS) for n in (*sizes, *numbers))


def _check(question: Sequence[Any], into: Tensor | None = None) -> None:
    """Raises what the call itself would, as far as shapes, strides, dtypes, devices, storages and
    options tell."""
    tensors, numbers = (*question[: SEED + 1], into), question[SEED + 1 :]
    if _has_symbols(tensors, numbers):
        return
    *same, into = _describe(tensors)
    _core.check_forward(*same, *numbers, into)


def _check_backward(
    cotangents: Sequence[Tensor | None], question: Sequence[Any], results: Sequence[Tensor]
) -> None:
    """Likewise."""
    tensors, numbers = question[: SEED + 1], question[SEED + 1 :]
    others = (*cotangents, *results)
    if not _has_symbols((*tensors, *others), numbers):
        dout, dlse, out, lse = (None if x is None else _describe([x])[0] for x in others)
        _core.check_backward(dout, dlse, *_describe(tensors), *numbers, out, lse)


def _check_merge(outs: Tensor, lses: Tensor) -> None:
    """Likewise, for outs (N, ..., D) and lses (N, ...)."""
    if _has_symbols((outs, lses)):
        return
    check_merge(outs, lses, heads_first=False)
    parts, rows, dim = outs.shape[0], math.prod(outs.shape[1:-1]), outs.shape[-1]

    def flat(x: Tensor, room: int, *shape: int) -> Described:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return Described(shape, x.dtype, strides, _device(x), room * _ROOM)

    _core.check_merge_states(
        flat(outs, 1, parts, rows, dim),
        flat(lses, 2, parts, rows),
        flat(outs, 3, rows, dim),
        flat(lses, 4, rows),
    )


# ---- operators ----


def _define(name: str, schema: str) -> None:
    torch.library.define(f"onefold::{name}", schema, tags=_TAGS)


# deterministic is that of the gradients; None: torch's own setting when the operator runs.
_define("forward", f"({_QUESTION}, *, bool? deterministic=None) -> (Tensor out, Tensor lse)")
_define("forward_into", f"({_QUESTION}, Tensor(a!) into) -> Tensor lse")
_define(
    "backward",
    f"(Tensor? dout, Tensor? dlse, {_QUESTION}, Tensor out, Tensor lse, bool deterministic, "
    "bool[6] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, "
    "Tensor dsinks)",
)
_define("merge_states", "(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)")

_DEVICES = ("cpu", "cuda")
torch.library.impl("onefold::forward", _DEVICES)(launch_forward)
torch.library.impl("onefold::forward_into", _DEVICES)(launch_forward_into)


@torch.library.impl("onefold::merge_states", _DEVICES)
def _merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    check_merge(outs, lses, heads_first=False)
    return launch_merge_states(outs, lses)


@torch.library.impl("onefold::backward", _DEVICES)
def _backward(*args: Any) -> tuple[Tensor, ...]:
    dout, dlse, *question, out, lse, deterministic, needs = args
    results = (out.resolve_neg(), lse.resolve_neg())
    found = launch_backward(dout, dlse, *question, *results, deterministic, needs)
    return tuple(g if g is not None else args[2].new_empty(0) for g in found)


@torch.library.register_fake("onefold::forward")
def _forward_fake(*question: Any, deterministic: bool | None = None) -> tuple[Tensor, Tensor]:
    _check(question)
    return _out_like(question[0], question[2]), _lse_like(question[0])


@torch.library.register_fake("onefold::forward_into")
def _forward_into_fake(*question_into: Any) -> Tensor:
    *question, into = question_into
    check_sign(into)
    _check(question, into)
    return _lse_like(question_into[0])


@torch.library.register_fake("onefold::backward")
def _backward_fake(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *question, out, lse, _deterministic, needs = rest
    _check_backward((dout, dlse), question, (out, lse))
    return tuple(
        torch.empty_like(question[i]) if need else question[0].new_empty(0)
        for i, need in zip(DIFFERENTIABLE, needs, strict=True)
    )


@torch.library.register_fake("onefold::merge_states")
def _merge_states_fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    _check_merge(outs, lses)
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


# ---- their gradients ----


class _Fragment(torch.library.Library):
    """Where gradients are registered. Torch drops a tangent without a word where no input requires
    a gradient, so each autograd kernel first looks for one."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key == "Autograd":
            fn = _refusing_tangents(str(op_name).rpartition("::")[2], fn)
        super().impl(op_name, fn, dispatch_key, **options)


def _refusing_tangents(operator: str, kernel: Any) -> Any:
    schema = getattr(torch.ops.onefold, operator).default._schema
    function = "merge_states" if operator == "merge_states" else "attention"
    spoken = dict(zip(_QUESTION_NAMES, NAMES, strict=True))
    names = [spoken.get(a.name, a.name) for a in schema.arguments if not a.kwarg_only]

    def checked(keyset: Any, *args: Any, **keywords: Any) -> Any:
        refuse_tangents(function, names, args)
        return kernel(keyset, *args, **keywords)

    return checked


_QUESTION_NAMES = [argument.split()[1] for argument in _QUESTION.split(", ")]
_FRAGMENT = _Fragment("onefold", "FRAGMENT")


def _keep_attention(
    ctx: Any,
    inputs: Sequence[Any],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: SEED + 1], *output)
    ctx.scalars = inputs[SEED + 1 :]
    ctx.deterministic = keyword_only_inputs["deterministic"]
    if ctx.deterministic is None:
        ctx.deterministic = torch.are_deterministic_algorithms_enabled()


def _attention_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    question = (*tensors, *ctx.scalars)
    result: list[Any] = [None] * len(question)
    if dout is None and dlse is None:
        return tuple(result)
    needs = [ctx.needs_input_grad[i] for i in DIFFERENTIABLE]
    gradients = torch.ops.onefold.backward(
        dout, dlse, *question, out, lse, ctx.deterministic, needs
    )
    for i, need, gradient in zip(DIFFERENTIABLE, needs, gradients, strict=True):
        result[i] = gradient if need else None
    return tuple(result)


def _no_second_derivative(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(SECOND_DERIVATIVE)


def keep_merge(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def merge_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, Any]:
    """Made of torch's own operators, so that there is a second derivative."""
    outs, lses, out, lse = ctx.saved_tensors
    # Part n's share of the union; a part that saw nothing has none, and neither does any part of a
    # row that nobody saw, where the difference below would be -inf - -inf. It is replaced before
    # exp and not after, where 0 * NaN would reach the second derivative.
    empty = lses == -torch.inf
    share = torch.exp((lses - lse).masked_fill(empty, -torch.inf))
    douts = dlses = None
    if dout is not None:
        wide = dout.to(lse.dtype)
        if ctx.needs_input_grad[0]:
            douts = (share.unsqueeze(-1) * wide).to(outs.dtype)
        if ctx.needs_input_grad[1]:
            parts = outs.to(lse.dtype).masked_fill(empty.unsqueeze(-1), 0.0)
            dlses = share * ((parts - out.to(lse.dtype)) * wide).sum(-1)
    if dlse is not None and ctx.needs_input_grad[1]:
        dlses = share * dlse if dlses is None else dlses + share * dlse
    return douts, dlses


for _name, _derivative, _keep in (
    ("forward", _attention_backward, _keep_attention),
    ("backward", _no_second_derivative, None),
    ("merge_states", merge_backward, keep_merge),
):
    torch.library.register_autograd(
        f"onefold::{_name}", _derivative, setup_context=_keep, lib=_FRAGMENT
    )


# ---- which of the two ----

# Torch has no public word for it.
_num_pre_dispatch_modes = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", lambda: 0)


def traced(tensors: Sequence[Tensor | None]) -> bool:
    """Whether something other than eager execution looks at the call, so that it needs operators:
    a compiler, an exporter, a dispatch mode, or a tensor that is more than its memory."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._len_torch_function_stack() > 0 and _num_pre_dispatch_modes() > 0:
        return True  # make_fx(pre_dispatch=True)
    for t in tensors:  # a generator in any() would cost a microsecond
        if t is not None and type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return True
    return False


def _for_operator(question: Sequence[Any]) -> list[Any]:
    """An operator's seed is a tensor and its integers have 64 bits: as a window or a length, larger
    ones mean the same as the largest."""
    ready = list(question)
    if isinstance(ready[SEED], int):
        ready[SEED] = torch.full((1,), ready[SEED], dtype=torch.int64, device=ready[0].device)
    for i in range(SEED + 1, len(ready)):
        if type(ready[i]) is int and not -(2**63) <= ready[i] < 2**63:
            ready[i] = 2**63 - 1 if ready[i] > 0 else -(2**63)
    return ready


def _refuse_mixture(names: Sequence[str], values: Sequence[Any]) -> None:
    """Torch's own answer to real tensors beside fake ones names neither."""
    fakes = [x for x in values if isinstance(x, FakeTensor)]
    if not fakes or fakes[0].fake_mode.allow_non_fake_inputs:
        return
    for name, x in zip(names, values, strict=True):
        if type(x) in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name} is a real tensor and others are fake: all are needed of one FakeTensorMode"
            )


def traced_merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Likewise."""
    if not torch.compiler.is_compiling():
        _refuse_mixture(("outs", "lses"), (outs, lses))
    return torch.ops.onefold.merge_states(outs, lses)


def traced_forward(question: Sequence[Any], deterministic: bool | None) -> tuple[Tensor, Tensor]:
    """The operator, which has its own gradients and refuses tangents."""
    for name, x in zip(NAMES[:NUM_ARRAYS], question[:NUM_ARRAYS], strict=True):
        if x is not None and x.is_nested:
            _core.check_tensor(x, name)
    if not torch.compiler.is_compiling():
        _refuse_mixture(NAMES, question)
    return torch.ops.onefold.forward(*_for_operator(question), deterministic=deterministic)


def forward_into(question: Sequence[Any], out: Tensor) -> Tensor:
    if traced((*question[:NUM_ARRAYS], out)):
        return torch.ops.onefold.forward_into(*_for_operator(question), out)
    lse = launch_forward_into(*question, out)
    torch.autograd.graph.increment_version(out)
    return lse


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    question: Sequence[Any],
    out: Tensor,
    lse: Tensor,
    deterministic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    if traced((dout, dlse, out, lse, *question[:NUM_ARRAYS])):
        gradients = torch.ops.onefold.backward(
            dout, dlse, *_for_operator(question), out, lse, deterministic, list(needs)
        )
        return [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return launch_backward(dout, dlse, *question, out, lse, deterministic, needs)
