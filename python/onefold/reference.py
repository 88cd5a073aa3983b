"""The oracle: attention and all its gradients, naive, in float64, one row at a time.

It shares no code with what it judges. Arguments are those of `onefold.attention` except `out`, and
mean the same; results are float64 arrays of the caller's framework. Dropout needs an explicit seed
here, and `attention` returns lse unless it is told not to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from ._dispatch import front_end
from ._options import DROPOUT_P, SEED, Arguments, Options, check_flag, from_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Where limited precision goes wrong, in the order of the leading axis of every bound term. A bound
# is the sum over sources of size[source] * term[source] plus the rounding of the result itself.
SOURCES: tuple[str, ...] = _core.reference_sources


@dataclass(frozen=True)
class Gradients:
    """Of the shapes of the inputs; None where the input was not given."""

    q: Any
    k: Any
    v: Any
    bias: Any
    alibi_slopes: Any
    sinks: Any


@dataclass(frozen=True)
class ForwardTerms:
    """What a bound of the forward error needs.

    Attributes:
        out: (len(SOURCES), *out.shape).
        lse: (len(SOURCES), *lse.shape).
        squared_value: sum_j P^2 w^2, of out's shape, w = v * keep / (1 - p).
        squared_deviation: sum_j P^2 (w - out)^2, of out's shape.
        max_score: of each row, in lse's shape, the largest score (the sink's included).
        sum: l = sum_j exp(z_j - max z).
        count: number of visible keys.
        max_magnitude: max_j abs(scale) * sum_d abs(q_d k_jd).
    """

    out: Any
    lse: Any
    squared_value: Any
    squared_deviation: Any
    max_score: Any
    sum: Any
    count: Any
    max_magnitude: Any


def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = True, **options: Unpack[Options]
) -> Any:
    """(out, lse) in float64: (B, Sq, Hq, Dv) and (B, Hq, Sq), or packed (Tq, Hq, Dv), (Hq, Tq);
    out alone with `return_lse=False`."""
    check_flag("return_lse", return_lse)
    out, lse = _wrap(q, _core.reference_forward(*_prepare("attention", q, k, v, options)))
    return (out, lse) if return_lse else out


def forward_terms(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> ForwardTerms:
    """The terms of the forward error bound."""
    terms = _core.reference_forward_terms(*_prepare("forward_terms", q, k, v, options))
    return ForwardTerms(*_wrap(q, terms))


def gradients(
    q: Any, k: Any, v: Any, *, dout: Any = None, dlse: Any = None, **options: Unpack[Options]
) -> Gradients:
    """Gradients of sum(out * dout) + sum(lse * dlse); an absent cotangent counts as zero."""
    question = _prepare("gradients", q, k, v, options)
    found = _core.reference_backward(*question, *_resolved(q, dout, dlse))
    return Gradients(*_wrap(q, found))


def gradient_terms(
    q: Any, k: Any, v: Any, *, dout: Any = None, dlse: Any = None, **options: Unpack[Options]
) -> Gradients:
    """The terms of the backward error bounds, each (len(SOURCES), *gradient.shape)."""
    question = _prepare("gradient_terms", q, k, v, options)
    found = _core.reference_backward_terms(*question, *_resolved(q, dout, dlse))
    return Gradients(*_wrap(q, found))


def _prepare(function: str, q: Any, k: Any, v: Any, options: Options) -> Arguments:
    question = from_options(function, q, k, v, options)
    if question[SEED] is None and question[DROPOUT_P] > 0:
        raise ValueError("seed is None: the oracle needs the seed of the call that it judges")
    return _resolved(q, *front_end(q).prepare(question))


def _resolved(q: Any, *values: Any) -> Arguments:
    return tuple(map(front_end(q).resolve, values))


def _wrap(q: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    wrap = front_end(q).wrap_float64
    return tuple(None if array is None else wrap(*array) for array in arrays)
