"""torch tensors: preparation, autograd, and the refusal of what is not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import _core
from . import _torch_ops as ops
from ._options import (
    DIFFERENTIABLE,
    DROPOUT_P,
    INDEX_ARRAYS,
    NAMES,
    NUM_ARRAYS,
    SEED,
    Arguments,
    check_merge,
    check_parts,
    index_list,
    type_error,
)

_TRANSFORM = (
    "onefold.{} does not work inside torch.func transforms (vmap, grad, jvp) yet: put what "
    "vmap would add into the batch axis, and use torch.autograd for gradients"
)


# ---- preparation ----


def prepare(question: Arguments) -> Arguments:
    """Checks types, brings indices and seed to q's device, follows autocast, draws a seed."""
    ready = list(question)
    q = ready[0]
    if q.is_cuda:
        _check_host_lengths(question)
    for i in range(NUM_ARRAYS):
        if ready[i] is not None:
            if i in INDEX_ARRAYS:
                ready[i] = _beside(q, NAMES[i], ready[i])
            _check_tensor(NAMES[i], ready[i])
        elif i < 3:
            _check_tensor(NAMES[i], None)
    device_type = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device_type):
        _autocast(ready, device_type)
    seed = ready[SEED]
    if seed is not None:
        if not isinstance(seed, int):
            if not isinstance(seed, Tensor):
                needed = "an int, or a one-element int64 torch.Tensor, as q is one,"
                raise type_error(NAMES[SEED], seed, needed)
            ready[SEED] = _beside(q, NAMES[SEED], seed)
    elif ready[DROPOUT_P] > 0:
        ready[SEED] = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return tuple(ready)


def _beside(q: Tensor, name: str, given: Any) -> Any:
    """A list of indices, or a tensor of indices or of the seed, as a tensor on q's device."""
    if isinstance(given, (list, tuple)):
        _refuse_copy_in_capture(q, name, "a list")
        return torch.tensor(index_list(name, given), dtype=torch.int64, device=q.device)
    if isinstance(given, Tensor) and given.device != q.device and (given.is_cpu or given.is_cuda):
        _refuse_copy_in_capture(q, name, f"on {given.device}")
        return given.to(q.device)
    return given


def _check_host_lengths(question: Arguments) -> None:
    """Refuses wrong lengths of a call on a GPU, for which nothing is read back, where all are still
    on the host: as the same call on the CPU would, for which q, k and v are only shapes."""
    q, k, v = question[:3]
    given = {i: question[i] for i in INDEX_ARRAYS if question[i] is not None}
    if not given or ops.traced((q, k, v)):
        return
    if not all(isinstance(x, Tensor) for x in (k, v)):
        return
    if not all(
        isinstance(x, (list, tuple)) or (isinstance(x, Tensor) and x.is_cpu) for x in given.values()
    ):
        return
    same: list[Any] = [None] * NUM_ARRAYS + list(question[NUM_ARRAYS:])
    for i, x in enumerate((q, k, v)):
        same[i] = ops.shape_alone(x)
    for i, x in given.items():
        lengths = x if isinstance(x, Tensor) else torch.tensor(index_list(NAMES[i], x))
        same[i] = lengths.resolve_neg()
    same[SEED] = 0
    _core.check_forward(*same, None)


def _refuse_copy_in_capture(q: Tensor, name: str, what: str) -> None:
    """A copy from the host would put this call's values into every replay."""
    if not q.is_cuda or ops.traced((q,)):
        return
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name} is {what} while a CUDA graph is captured: a tensor on {q.device}, made before "
            "the capture, is needed"
        )


def _check_tensor(name: str, tensor: Any, like: str = "q") -> None:
    if not isinstance(tensor, Tensor):
        raise type_error(name, tensor, f"a torch.Tensor, as {like} is one,")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise NotImplementedError(
            f"{name} is on {tensor.device}: this version computes on the CPU and on CUDA devices, "
            "so move it there"
        )


def _autocast(ready: list[Any], device_type: str) -> None:
    """q, k and v in autocast's dtype, as torch's own attention casts them; float64 stays."""
    dtype = torch.get_autocast_dtype(device_type)
    for i in range(3):
        if ready[i].is_floating_point() and ready[i].dtype != torch.float64:
            ready[i] = ready[i].to(dtype)


def _refuse_transforms(function: str) -> None:
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(_TRANSFORM.format(function))


place = ops.place


wants_determinism = torch.are_deterministic_algorithms_enabled  # what deterministic=None means


# ---- attention ----


class _Attention(Function):
    """(deterministic, the question) -> (out, lse)."""

    @staticmethod
    def forward(ctx: Any, deterministic: bool, *question: Any) -> tuple[Tensor, Tensor]:
        out, lse = ops.launch_forward(*question)
        ctx.set_materialize_grads(False)
        seed = question[SEED]
        tensor_seed = isinstance(seed, Tensor)
        ctx.save_for_backward(*question[:NUM_ARRAYS], seed if tensor_seed else None, out, lse)
        ctx.seed = None if tensor_seed else seed
        ctx.scalars = question[SEED + 1 :]
        ctx.deterministic = deterministic
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *arrays, seed, out, lse = ctx.saved_tensors
        question = (*arrays, ctx.seed if seed is None else seed, *ctx.scalars)
        needs = [ctx.needs_input_grad[1 + i] for i in DIFFERENTIABLE]
        result: list[Any] = [None] * (1 + len(question))
        if dout is None and dlse is None:
            return tuple(result)
        gradients = _derive(ctx.deterministic, needs, dout, dlse, out, lse, question)
        for i, gradient in zip(DIFFERENTIABLE, gradients, strict=True):
            result[1 + i] = gradient
        return tuple(result)


class _PlainAttention(Function):
    """(question, deterministic, return_lse, q, k, v) -> out, or (out, lse): of a plain question,
    from which autograd has less to take apart, to keep and to put together."""

    @staticmethod
    def forward(
        ctx: Any, question: Arguments, deterministic: bool, return_lse: bool, *qkv: Tensor
    ) -> Any:
        out, lse = _core.forward_plain(question, True, ops.PLAIN)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*qkv, out, lse)
        ctx.asked = (question[3:], deterministic)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * 6
        *qkv, out, lse = ctx.saved_tensors
        rest, deterministic = ctx.asked
        needs = [*ctx.needs_input_grad[3:], False, False, False]
        gradients = _derive(deterministic, needs, dout, dlse, out, lse, (*qkv, *rest))
        return (None, None, None, *gradients[:3])


# Function's own apply is Python in older versions of torch and looks, argument by argument, for
# what no plain question has: transforms, and what is left of a tensor when its transform has ended.
_apply_plainly = super(Function, _PlainAttention).apply


def _derive(
    deterministic: bool,
    needs: list[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    question: Arguments,
) -> Sequence[Tensor | None]:
    """The gradients of `DIFFERENTIABLE`, None where not needed."""
    _refuse_transforms("attention")
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Gradients.apply(deterministic, needs, dout, dlse, out, lse, *question)
    return ops.backward(dout, dlse, question, out, lse, deterministic, needs)


class _Gradients(Function):
    """The first derivative as a node of its own, so that asking for a second one has an answer."""

    @staticmethod
    def forward(
        ctx: Any,
        deterministic: bool,
        needs: list[bool],
        dout: Tensor | None,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *question: Any,
    ) -> tuple[Tensor | None, ...]:
        return tuple(ops.backward(dout, dlse, question, out, lse, deterministic, needs))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(ops.SECOND_DERIVATIVE)


def attention(question: Arguments, deterministic: bool | None, return_lse: bool, out: Any) -> Any:
    """See `onefold.attention`."""
    # Whatever else compiles or exports watches the call, and what is watched is not plain.
    rare = out is not None or torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0
    if not rare and _core.is_plain(question, ops.PLAIN):
        return _plain_attention(question, deterministic, return_lse)
    _refuse_transforms("attention")
    ready = prepare(question)
    wanted = _requiring_gradient(ready)
    if out is not None:
        return _attention_into(ready, wanted, return_lse, out)
    if ops.traced(ready[:NUM_ARRAYS]):
        out, lse = ops.traced_forward(ready, deterministic)
        return (out, lse) if return_lse else out
    ops.refuse_tangents("attention", NAMES, ready)  # which the operators do themselves
    if wanted is not None:
        if deterministic is None:
            deterministic = wants_determinism()
        out, lse = _Attention.apply(deterministic, *ready)
    else:
        out, lse = ops.launch_forward(*ready, want_lse=return_lse)
    return (out, lse) if return_lse else out


def _plain_attention(question: Arguments, deterministic: bool | None, return_lse: bool) -> Any:
    q, k, v = question[:3]
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return _core.forward_plain(question, return_lse, ops.PLAIN)
    if deterministic is None:
        deterministic = wants_determinism()
    return _apply_plainly(question, deterministic, return_lse, q, k, v)


def _requiring_gradient(question: Sequence[Any]) -> str | None:
    """The name of the first input that does, or None."""
    if torch.is_grad_enabled():
        for i in DIFFERENTIABLE:
            if question[i] is not None and question[i].requires_grad:
                return NAMES[i]
    return None


def _attention_into(question: Arguments, wanted: str | None, return_lse: bool, out: Any) -> Any:
    _check_tensor("out", out)
    if not torch.compiler.is_compiling():
        ops.refuse_tangents("attention", (*NAMES, "out"), (*question, out))
    elif ops.takes_tangents():
        # An operator that writes has no autograd kernel that could look at its inputs.
        raise NotImplementedError(
            "out was given inside a forward-mode level (torch.func.jvp, forward_ad.dual_level): "
            "leave out= away in compiled code, or close the level first"
        )
    if wanted is not None:
        raise ValueError(
            f"out was given and {wanted} requires a gradient: leave out= away, or call under "
            "torch.no_grad()"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "out requires a gradient, which writing into it would lose: a tensor that does not is "
            "needed, or call under torch.no_grad()"
        )
    lse = ops.forward_into(question, out)
    return (out, lse) if return_lse else out


# ---- merge ----


class _MergeStates(Function):
    """outs (N, ..., D), lses (N, ...) -> out (..., D), lse (...)."""

    forward = staticmethod(ops.launch_merge_states)
    setup_context = staticmethod(ops.keep_merge)
    backward = staticmethod(ops.merge_backward)


def merge_states(outs: Any, lses: Any) -> tuple[Tensor, Tensor]:
    """See `onefold.merge_states`."""
    _refuse_transforms("merge_states")
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    heads_first = check_merge(outs, lses)
    try:
        rows = lses.transpose(-1, -2) if heads_first else lses
    except RuntimeError:  # a view of nothing
        _core.check_tensor(lses, "lses")
        raise
    if ops.traced((outs, rows)):
        out, lse = ops.traced_merge_states(outs, rows)
        return out, lse.transpose(-1, -2) if heads_first else lse
    ops.refuse_tangents("merge_states", ("outs", "lses"), (outs, lses))
    if torch.is_grad_enabled() and (outs.requires_grad or lses.requires_grad):
        out, lse = _MergeStates.apply(outs, rows)
    else:
        out, lse = ops.launch_merge_states(outs, rows)
    return out, lse.transpose(-1, -2) if heads_first else lse


def _check_part(name: str, tensor: Any, like: str) -> None:
    _check_tensor(name, tensor, like)
    if tensor.is_nested or tensor.layout != torch.strided:
        _core.check_tensor(tensor, name)


def _stacked(name: str, parts: Any) -> Tensor:
    check_parts(name, parts, _check_part)
    return torch.stack(list(parts)) if isinstance(parts, (list, tuple)) else parts


# ---- the oracle ----


def resolve(value: Any) -> Any:
    """A tensor as its memory describes it; anything else as it is."""
    return value.resolve_neg() if isinstance(value, Tensor) else value


def wrap_float64(shape: tuple[int, ...], data: bytearray) -> Tensor:
    """A float64 tensor over `data`."""
    if not data:
        return torch.empty(shape, dtype=torch.float64)
    return torch.frombuffer(data, dtype=torch.float64).reshape(shape)


def broadcast_to(array: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of stride 0 where axes repeat."""
    return array.expand(shape)
