"""The torch operators: what a tracer sees of onefold.

Made with torch.library.define / impl / register_fake; the autograd.Function stays outside of them.
The launchers below are the operators' bodies and are called directly when nothing traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _core
from ._options import DIFFERENTIABLE, NUM_ARRAYS, SEED

# A Scalar is a float that may also be known only when a compiled graph runs: scale=t.item().
_QUESTION = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? slopes, Tensor? sinks, "
    "Tensor? cu_q, Tensor? cu_k, Tensor? used_q, Tensor? used_k, Tensor? seed, Scalar? scale, "
    "str causal, SymInt? left, SymInt? right, Scalar softcap, Scalar dropout_p, SymInt? max_q, "
    "SymInt? max_k"
)
NUM_GRADIENTS = 6
_SYMBOLS = (torch.SymInt, torch.SymFloat)

# A gradient's strides follow its input's, so a compiler must not change those behind our back. The
# exact tag is newer than the fixed-order one, which stands in where it is missing; both at once
# would contradict each other.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides", "needs_fixed_stride_order")
    if hasattr(torch.Tag, name)
)[:2]


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
    _lse_like,
    torch.get_num_threads,
    getattr(torch._C, "_cuda_getCurrentRawStream", None),  # of a torch with CUDA
    _workspace,
    _watcher("_are_functorch_transforms_active"),
    _watcher("_len_torch_dispatch_stack"),
    _watcher("_len_torch_function_stack"),
    _watcher("_get_tracing_state"),
    _watcher("_is_any_autocast_enabled"),
)


def launch_forward(*question: Any, want_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    q = question[0]
    out = _out_like(q, question[2])
    lse = _lse_like(q) if want_lse else None
    _core.forward(*_resolved(question), out, lse, *place(q))
    return out, lse


def launch_forward_into(*question_into: Any) -> Tensor:
    *question, into = question_into
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
    out = outs.new_empty(outs.shape[1:])
    lse = lses.new_empty(lses.shape[1:])
    parts, rows, head_dim = outs.shape[0], lse.numel(), outs.shape[-1]
    _core.merge_states(
        outs.resolve_neg().reshape(parts, rows, head_dim),
        lses.resolve_neg().reshape(parts, rows),
        out.view(rows, head_dim),
        lse.view(rows),
        place(outs)[0],
    )
    return out, lse


# ---- what a tracer is told ----


def stand_in(x: Tensor) -> Tensor:
    """x in dtype and shape, on the CPU, of one zero: a valid length and a valid offset."""
    return torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)


def _check_shapes(question: Sequence[Any]) -> None:
    """Raises what the call itself would, as far as shapes, dtypes and options alone tell: by the
    plan of the same call with nothing in it. A question with a symbol in it waits for its call, for
    looking at the symbol would fix its value in the compiled program."""
    tensors, numbers = question[: SEED + 1], question[SEED + 1 :]
    sizes = [n for x in tensors if isinstance(x, Tensor) for n in x.shape]
    if any(isinstance(n, _SYMBOLS) for n in (*sizes, *numbers)):
        return
    with _disable_current_modes():  # a tracer's modes would make stand-ins without memory
        same = [stand_in(x) if isinstance(x, Tensor) else x for x in tensors]
        _core.plan(*same, *numbers, None, False, *place(same[0]))


# ---- operators ----


def _define(name: str, schema: str) -> None:
    torch.library.define(f"onefold::{name}", schema, tags=_TAGS)


_define("forward", f"({_QUESTION}) -> (Tensor out, Tensor lse)")
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
torch.library.impl("onefold::merge_states", _DEVICES)(launch_merge_states)


@torch.library.impl("onefold::backward", _DEVICES)
def _backward(*args: Any) -> tuple[Tensor, ...]:
    empty = [g if g is not None else args[2].new_empty(0) for g in launch_backward(*args)]
    return tuple(empty)


@torch.library.register_fake("onefold::forward")
def _forward_fake(*question: Any) -> tuple[Tensor, Tensor]:
    _check_shapes(question)
    return _out_like(question[0], question[2]), _lse_like(question[0])


@torch.library.register_fake("onefold::forward_into")
def _forward_into_fake(*question_into: Any) -> Tensor:
    _check_shapes(question_into[:-1])
    return _lse_like(question_into[0])


@torch.library.register_fake("onefold::backward")
def _backward_fake(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *question, _out, _lse, _deterministic, needs = rest
    _check_shapes(question)
    return tuple(
        torch.empty_like(question[i]) if need else question[0].new_empty(0)
        for i, need in zip(DIFFERENTIABLE, needs, strict=True)
    )


@torch.library.register_fake("onefold::merge_states")
def _merge_states_fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


# ---- gradients of a program that holds the operator alone: exported, or traced ----


def _keep_for_backward(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: SEED + 1], *output)
    ctx.scalars = inputs[SEED + 1 :]


def _operator_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    question = (*tensors, *ctx.scalars)
    result: list[Any] = [None] * len(question)
    if dout is None and dlse is None:
        return tuple(result)
    needs = [ctx.needs_input_grad[i] for i in DIFFERENTIABLE]
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = torch.ops.onefold.backward(dout, dlse, *question, out, lse, deterministic, needs)
    for i, need, gradient in zip(DIFFERENTIABLE, needs, gradients, strict=True):
        result[i] = gradient if need else None
    return tuple(result)


torch.library.register_autograd(
    "onefold::forward", _operator_backward, setup_context=_keep_for_backward
)


# ---- which of the two ----


def traced(tensors: Sequence[Tensor | None]) -> bool:
    """Whether something other than eager execution looks at the call, so that it needs operators:
    a compiler, an exporter, a dispatch mode, or a tensor that is more than its memory."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None:
        return True
    for t in tensors:  # a generator in any() would cost a microsecond
        if t is not None and type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return True
    return False


def _seed_tensor(question: Sequence[Any]) -> list[Any]:
    """An operator's seed is a tensor."""
    ready = list(question)
    if isinstance(ready[SEED], int):
        ready[SEED] = torch.full((1,), ready[SEED], dtype=torch.int64, device=ready[0].device)
    return ready


def forward(question: Sequence[Any], want_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    if traced(question[:NUM_ARRAYS]):
        return torch.ops.onefold.forward(*_seed_tensor(question))
    return launch_forward(*question, want_lse=want_lse)


def forward_into(question: Sequence[Any], out: Tensor) -> Tensor:
    if traced((*question[:NUM_ARRAYS], out)):
        return torch.ops.onefold.forward_into(*_seed_tensor(question), out)
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
            dout, dlse, *_seed_tensor(question), out, lse, deterministic, list(needs)
        )
        return [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return launch_backward(dout, dlse, *question, out, lse, deterministic, needs)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    if traced((outs, lses)):
        return torch.ops.onefold.merge_states(outs, lses)
    return launch_merge_states(outs, lses)
