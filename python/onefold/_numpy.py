"""NumPy arrays: forward only, no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _core, _options
from ._options import NAMES, Arguments, check_merge, check_parts, index_list, type_error


def prepare(question: Arguments) -> Arguments:
    """Checks types, makes arrays of index lists and draws a seed where one is needed."""
    ready = list(question)
    for i in _options.INDEX_ARRAYS:
        if isinstance(ready[i], (list, tuple)):
            ready[i] = np.asarray(index_list(NAMES[i], ready[i]), dtype=np.int64)
    for i in range(_options.NUM_ARRAYS):
        if ready[i] is not None or i < 3:
            _check_array(NAMES[i], ready[i])
    seed = ready[_options.SEED]
    if not (seed is None or isinstance(seed, (int, np.ndarray))):
        needed = "an int, or a one-element int64 numpy.ndarray, as q is one,"
        raise type_error(NAMES[_options.SEED], seed, needed)
    if seed is None and ready[_options.DROPOUT_P] > 0:
        ready[_options.SEED] = int(np.random.randint(2**63 - 1, dtype=np.int64))
    return tuple(ready)


def _check_array(name: str, array: Any, like: str = "q") -> None:
    if not isinstance(array, np.ndarray):
        raise type_error(name, array, f"a numpy.ndarray, as {like} is one,")
    if isinstance(array, np.ma.MaskedArray):
        raise type_error(name, array, "a plain array, without a mask of its own,")


def attention(question: Arguments, deterministic: bool | None, return_lse: bool, out: Any) -> Any:
    """See `onefold.attention`. `deterministic` asks for what the CPU always does."""
    ready = prepare(question)
    q, v = ready[0], ready[2]
    if out is None:
        out = np.empty(q.shape[:-1] + v.shape[-1:], dtype=q.dtype)
    else:
        _check_array("out", out)
    lse = np.empty(lse_shape(q.shape), dtype=lse_dtype(q.dtype)) if return_lse else None
    _core.forward(*ready, out, lse, *place(q))
    return (out, lse) if return_lse else out


def place(q: Any) -> tuple[None, None]:
    """The last two arguments of a call in `_core`: all of onefold's threads."""
    return None, None


def lse_shape(q_shape: tuple[int, ...]) -> tuple[int, ...]:
    """(B, Sq, H, D) -> (B, H, Sq); (T, H, D) -> (H, T)."""
    return (*q_shape[:-3], *q_shape[-3:-1][::-1])


def lse_dtype(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


def merge_states(outs: Any, lses: Any) -> tuple[Any, Any]:
    """See `onefold.merge_states`."""
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    heads_first = check_merge(outs, lses)
    rows = np.swapaxes(lses, -1, -2) if heads_first else lses
    num_parts, head_dim = outs.shape[0], outs.shape[-1]
    out = np.empty(outs.shape[1:], dtype=outs.dtype)
    merged = np.empty(rows.shape[1:], dtype=rows.dtype)
    num_rows = merged.size
    _core.merge_states(
        outs.reshape(num_parts, num_rows, head_dim),
        rows.reshape(num_parts, num_rows),
        out.reshape(num_rows, head_dim),
        merged.reshape(num_rows),
        place(outs)[0],
    )
    return out, np.swapaxes(merged, -1, -2) if heads_first else merged


def _stacked(name: str, parts: Any) -> Any:
    check_parts(name, parts, _check_array)
    return np.stack(parts) if isinstance(parts, (list, tuple)) else parts


def resolve(value: Any) -> Any:
    """An array is what its memory describes."""
    return value


def wrap_float64(shape: tuple[int, ...], data: bytearray) -> Any:
    """A float64 array over `data`."""
    return np.frombuffer(data, dtype=np.float64).reshape(shape)


def broadcast_to(array: Any, shape: tuple[int, ...]) -> Any:
    """A view of stride 0 where axes repeat."""
    return np.broadcast_to(array, shape)


def wants_determinism() -> bool:
    """What deterministic=None means."""
    return True
