"""The signature and semantics of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import inspect
import math
import re
from typing import TYPE_CHECKING, Any

from ._api import attention
from ._dispatch import front_end
from ._options import check_flag, refuse_keyword

if TYPE_CHECKING:
    from typing_extensions import Never

Shape = tuple[int, ...]

# What `attention` says in its errors, and what our caller says.
_OUR_WORDS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "bias": "attn_mask",
    "mask": "attn_mask",
    "onefold.attention": "onefold.sdpa",
}
_ITS_WORD = re.compile(r"onefold\.attention|\b(?<![.])(q|k|v|bias|mask)\b(?![.(])")


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **misspelt: Never,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention, for torch tensors and NumPy arrays.

    Args:
        query: (N, ..., H, L, E). The axes before L may be any number, none included, and broadcast
            with those of key and value.
        key: (N, ..., Hk, S, E).
        value: (N, ..., Hk, S, Ev).
        attn_mask: broadcastable to (N, ..., H, L, S): boolean, True = visible, or numbers added to
            the scores (differentiable).
        dropout_p: as in torch always applied; which weights are dropped differs from torch.
        is_causal: query i sees key j when j <= i (the top-left diagonal, whatever L and S).
        scale: default 1 / sqrt(E).
        enable_gqa: allow H to be a multiple of Hk.

    Returns:
        (N, ..., H, L, Ev), in memory with the heads next to the head dims, as from torch's fused
        CPU path. A row that sees no key is 0, as in torch 2.5 and later.

    Raises:
        ValueError: attn_mask together with is_causal=True, or shapes that do not fit.
        TypeError, NotImplementedError: as from `attention`.
    """
    if misspelt:
        refuse_keyword("sdpa", next(iter(misspelt)), inspect.signature(sdpa).parameters)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask was given together with is_causal=True: only one may be set")
    given = (query, key, value)
    for name, array in zip(("query", "key", "value"), given, strict=True):
        front_end(array, name)
        if array.ndim < 2:
            axes = "axis" if array.ndim == 1 else "axes"
            raise ValueError(f"{name} has {array.ndim} {axes}: (..., length, head_dim) is needed")
    # Missing leading axes become axes of extent 1; the third from the end serves as heads whatever
    # it means to the caller.
    ndim = max(a.ndim for a in given)
    q, k, v = (_pad(a, max(ndim, 4)) for a in given)
    batch = _broadcast_shape([a.shape[:-3] for a in (q, k, v)])
    if enable_gqa:
        heads, heads_k = q.shape[-3], k.shape[-3]
    else:
        (heads,) = (heads_k,) = _broadcast_shape([a.shape[-3:-2] for a in (q, k, v)])
    rows = (
        _rows(q, batch, heads),
        _rows(k, batch, heads_k),
        _rows(v, batch, v.shape[-3] if enable_gqa else heads_k),
    )
    options = {
        "scale": scale,
        "causal": "top_left" if is_causal else False,
        "dropout_p": dropout_p,
        **_mask_or_bias(attn_mask, batch),
    }
    try:
        out = attention(*rows, **options).swapaxes(1, 2)
    except (TypeError, ValueError, NotImplementedError) as error:
        text = _ITS_WORD.sub(lambda word: _OUR_WORDS[word.group()], str(error))
        raise type(error)(text) from None
    shape = (*batch, heads, *out.shape[-2:])[-ndim:]
    return out if len(shape) == 4 else out.reshape(shape)


def _pad(array: Any, ndim: int) -> Any:
    return array[(None,) * (ndim - array.ndim)] if array.ndim < ndim else array


def _broadcast_shape(shapes: list[Shape]) -> Shape:
    """The common shape, by NumPy's rules, of shapes of one rank."""
    common = []
    for extents in zip(*shapes, strict=True):
        wanted = [n for n in extents if n != 1] or [1]
        if any(n != wanted[0] for n in wanted):
            raise ValueError(
                f"query, key and value have leading axes {extents}: they must be equal or 1 (the "
                "heads of query may be a multiple of those of key with enable_gqa=True)"
            )
        common.append(wanted[0])
    return tuple(common)


def _rows(array: Any, batch: Shape, heads: int) -> Any:
    """(..., H, L, E) -> (B, L, H, E) with all batch axes in one; a view where strides allow."""
    wanted = (*batch, heads, *array.shape[-2:])
    if tuple(array.shape) != wanted:
        array = front_end(array).broadcast_to(array, wanted)
    if len(batch) > 1:
        array = array.reshape((math.prod(batch), *wanted[-3:]))
    return array.swapaxes(1, 2)


def _mask_or_bias(attn_mask: Any, batch: Shape) -> dict[str, Any]:
    """The keyword of `attention` that attn_mask is, broadcastable to (B, H, L, S)."""
    if attn_mask is None:
        return {}
    front_end(attn_mask, "attn_mask")
    ndim = len(batch) + 3
    if attn_mask.ndim > ndim:
        raise ValueError(
            f"attn_mask has {attn_mask.ndim} axes: it must broadcast to the scores, which have "
            f"{ndim}"
        )
    if attn_mask.ndim > 3 and ndim > 4:
        rest = tuple(attn_mask.shape[-3:])
        if all(n == 1 for n in attn_mask.shape[:-3]):
            attn_mask = attn_mask.reshape((1, *rest))
        else:
            whole = front_end(attn_mask).broadcast_to(attn_mask, (*batch, *rest))
            attn_mask = whole.reshape((math.prod(batch), *rest))
    dtype = str(attn_mask.dtype).removeprefix("torch.")
    if dtype == "bool":
        return {"mask": attn_mask}
    if "float" not in dtype:
        raise ValueError(f"attn_mask is {dtype}: bool, or a float dtype to add, is needed")
    return {"bias": attn_mask}
