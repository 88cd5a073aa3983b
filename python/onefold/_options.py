"""The keywords of `attention` as the one positional tuple that `_core` and the operators take.

Only what Python alone can know is checked here: types that would convert silently, and options that
no backend has yet. Shapes, dtypes and values are checked once, in C++.
"""

from __future__ import annotations

import operator
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from . import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import NoReturn

Causal = bool | Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
Arguments = tuple[Any, ...]

# The order of `arguments`, which is that of `_core.forward` and of the torch operators.
NAMES = _core.argument_names
SEED = NAMES.index("seed")
NUM_ARRAYS = SEED  # q to seqused_k come before it
INDEX_ARRAYS = range(NAMES.index("cu_seqlens_q"), NUM_ARRAYS)  # lists are welcome
DIFFERENTIABLE = tuple(map(NAMES.index, ("q", "k", "v", "bias", "alibi_slopes", "sinks")))
DROPOUT_P = NAMES.index("dropout_p")

_MOD_ALTERNATIVES = {
    "score_mod": "bias=, alibi_slopes= and softcap= change scores",
    "mask_mod": "mask=, causal= and window= hide keys",
    "aux": "it belongs to score_mod and mask_mod",
}


class Options(TypedDict, total=False):
    """The keywords of `attention` that say what is computed, and `deterministic`."""

    scale: float | None
    causal: Causal
    window: Window
    softcap: float
    alibi_slopes: Any
    bias: Any
    mask: Any
    sinks: Any
    dropout_p: float
    seed: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Any
    seqused_k: Any
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux: Sequence[Any] | None
    deterministic: bool | None


def arguments(q: Any, k: Any, v: Any, options: Options) -> Arguments:
    """All of it in the order of `NAMES`; what is left out has the default of `attention`."""
    return in_order(q, k, v, **options)


def in_order(
    q: Any,
    k: Any,
    v: Any,
    scale: Any = None,
    causal: Any = False,
    window: Any = (None, None),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    dropout_p: Any = 0.0,
    seed: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> Arguments:
    """`arguments`, from the keywords in the order of `attention`. What is as it should be is told
    here, for each function that is called costs the caller some 50 nanoseconds."""
    if type(window) is tuple and len(window) == 2:
        left, right = window
        if left is not None or right is not None:
            left, right = _window(window)
    else:
        left, right = _window(window)
    return (
        q,
        k,
        v,
        bias,
        mask,
        alibi_slopes,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        None if seed is None else _seed(seed),
        None if scale is None else _number("scale", scale),
        "none" if causal is False else "bottom_right" if causal is True else _causal(causal),
        left,
        right,
        softcap if type(softcap) is float else _number("softcap", softcap),
        dropout_p if type(dropout_p) is float else _number("dropout_p", dropout_p),
        None if max_seqlen_q is None else _integer("max_seqlen_q", max_seqlen_q),
        None if max_seqlen_k is None else _integer("max_seqlen_k", max_seqlen_k),
    )


def from_options(
    function: str, q: Any, k: Any, v: Any, options: Options | dict[str, Any]
) -> Arguments:
    """`arguments` for a function that takes the keywords as **options and is deterministic."""
    options = dict(options)
    refuse_mods(**{name: options.pop(name, None) for name in _MOD_ALTERNATIVES})
    flags(options.pop("deterministic", None), False)
    unknown = [name for name in options if name not in Options.__annotations__]
    if unknown:
        known = {"explain": (*Options.__annotations__, "return_lse")}
        refuse_keyword(function, unknown[0], known.get(function, Options.__annotations__))
    return arguments(q, k, v, options)


def refuse_keyword(function: str, name: str, known: Iterable[str]) -> NoReturn:
    """Raises for a keyword that there is not; with the one that was meant, perhaps."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    advice = f": did you mean {near[0]!r}?" if near else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice}")


def index_list(name: str, values: Any) -> list[int]:
    """A list given for an index array; nothing is rounded."""
    try:
        indices = [integer(name, value) for value in values]
    except TypeError:
        raise TypeError(f"{name} is {_shown(values)}: a list of int is needed") from None
    if any(not -(2**63) <= index < 2**63 for index in indices):
        raise ValueError(f"{name} is {_shown(values)}: integers of 64 bits are needed")
    return indices


def _shown(values: Any) -> str:
    """A list in a sentence, where a long one is cut."""
    import reprlib

    return reprlib.repr(values)


def refuse_mods(**given: Callable[..., Any] | Sequence[Any] | None) -> None:
    """Raises for a score_mod, mask_mod or aux that is not None."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported yet: {_MOD_ALTERNATIVES[name]}")


def type_error(name: str, value: Any, needed: str) -> TypeError:
    return TypeError(f"{name} is {kind_of(value)}: {needed} is needed")


def kind_of(value: Any) -> str:
    """Its type with an article."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' or kind == 'ndarray' else 'a'} {kind}"


class Described:
    """An array that is only described, with as much of torch.Tensor's face as `_core` looks at."""

    def __init__(
        self, shape: Sequence[int], dtype: Any, strides: Sequence[int], device: Any, address: int
    ) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self._strides, self._address = tuple(strides), address

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address


def _is_symbolic(value: Any) -> bool:
    """A torch.SymInt or SymFloat, which must not be turned into a plain number."""
    return type(value).__name__ in ("SymInt", "SymFloat")


def _number(name: str, value: Any) -> float:
    if type(value) is float or _is_symbolic(value):
        return value
    if isinstance(value, Real) and not is_bool(value):  # NumPy's scalars too
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} is beyond float64: a finite number is needed") from None
    raise type_error(name, value, "a Python number")


def is_bool(value: Any) -> bool:
    """Python's or NumPy's."""
    return type(value).__name__ in ("bool", "bool_")


def check_flag(name: str, value: Any) -> None:
    """Raises unless it is True or False."""
    if not is_bool(value):
        raise type_error(name, value, "True or False")


def flags(deterministic: Any, return_lse: Any) -> tuple[bool | None, bool]:
    """Both as Python's own values; raises unless they are what their names say."""
    if deterministic is not None:
        if not is_bool(deterministic):
            raise type_error("deterministic", deterministic, "True, False or None")
        deterministic = bool(deterministic)
    check_flag("return_lse", return_lse)
    return deterministic, bool(return_lse)


def check_parts(name: str, parts: Any, check_array: Callable[[str, Any, str], None]) -> None:
    """Raises unless `parts` is one array, or a list of arrays of one shape and dtype."""
    if not isinstance(parts, (list, tuple)):
        check_array(name, parts, "outs")
        return
    if not parts:
        raise ValueError(f"{name} is empty: at least one part is needed")
    for idx, part in enumerate(parts):
        check_array(f"{name}[{idx}]", part, "outs" if name == "lses" else "outs[0]")
        for attribute in ("shape", "dtype"):
            got, first = getattr(part, attribute), getattr(parts[0], attribute)
            if got != first:
                got, first = (tuple(x) if attribute == "shape" else x for x in (got, first))
                raise ValueError(
                    f"{name}[{idx}] has {attribute} {got}: {first} is needed, as {name}[0]"
                )


def check_merge(outs: Any, lses: Any, heads_first: bool | None = None) -> bool:
    """Whether heads come before rows in lses, (N, B, H, Sq), as they do by default where there are
    heads; raises for shapes that do not fit."""
    shape, lse_shape = tuple(outs.shape), tuple(lses.shape)
    if len(shape) < 3:
        axes = "axis" if len(shape) == 1 else "axes"
        raise ValueError(
            f"outs has {len(shape)} {axes}, shape {shape}: parts of (rows, head_dim) or of more "
            "axes are needed"
        )
    needed = shape[:-1]
    if heads_first is None:
        heads_first = len(shape) > 3
    if heads_first:
        needed = (*shape[:-3], shape[-2], shape[-3])
    if lse_shape != needed:
        raise ValueError(
            f"lses has shape {lse_shape}: it does not fit outs of shape {shape}, which needs "
            f"{needed}"
        )
    return heads_first


def integer(name: str, value: Any, needed: str = "an int") -> int:
    try:
        if not is_bool(value):
            return operator.index(value)
    except TypeError:
        pass
    raise type_error(name, value, needed)


def _integer(name: str, value: Any) -> int | None:
    if value is None or type(value) is int or _is_symbolic(value):
        return value
    return integer(name, value, "an int or None")


def _window(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)):
        raise type_error("window", window, "a pair (left, right) of int or None")
    if len(window) != 2:
        raise ValueError(f"window has {len(window)} entries: a pair (left, right) is needed")
    return _integer("window[0]", window[0]), _integer("window[1]", window[1])


def _causal(causal: Any) -> str:
    if is_bool(causal):
        return "bottom_right" if causal else "none"
    if isinstance(causal, str) and causal in ("bottom_right", "top_left"):
        return causal
    told = repr(causal) if isinstance(causal, (str, int, float)) else kind_of(causal)
    raise ValueError(f'causal is {told}: False, True, "bottom_right" or "top_left" is needed')


def _seed(seed: Any) -> Any:
    """An int in [-2^63, 2^64) as the signed 64-bit number of the same bits; arrays as they are."""
    if isinstance(seed, Integral) and not is_bool(seed):
        return _as_signed(int(seed))
    if seed is None or (hasattr(type(seed), "shape") and not is_bool(seed)):
        return seed
    raise type_error("seed", seed, "an int or a one-element int64 array")


def _as_signed(value: int) -> int:
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"seed is {value}: an integer from -2**63 to 2**64 - 1 is needed")
    return value - 2**64 if value >= 2**63 else value
