"""The public functions: each hands normalised arguments to the front end of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _core
from ._dispatch import front_end
from ._options import (
    DIFFERENTIABLE,
    Arguments,
    Causal,
    Options,
    Window,
    flags,
    from_options,
    in_order,
    integer,
    is_bool,
    refuse_keyword,
    refuse_mods,
    type_error,
)

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: Causal = False,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux: Sequence[Any] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    out: Any = None,
    **misspelt: Never,
) -> Any:
    r"""Exact softmax attention of torch tensors, on the CPU or a CUDA device, or NumPy arrays.

    For one query row i of head h, over the visible keys j::

        X_j = scale * q_i . k_j      Y_j = softcap * tanh(X_j / softcap)   (X_j without softcap)
        Z_j = Y_j + bias_ij - slope_h * abs(i + Sk - Sq - j)
        lse = log(sum_j exp(Z_j) + exp(sink_h))
        out = sum_j exp(Z_j - lse) * keep_ij / (1 - dropout_p) * v_j

    A row that sees no key and has no sink gives out 0, lse -inf and zero gradients.

    Args:
        q: (B, Sq, Hq, D), or packed (Tq, Hq, D) with ``cu_seqlens_q``; float32, bfloat16, float16
            or float64. Any strides; only a last stride other than 1 may cost a copy.
        k: (B, Sk, Hk, D) or (Tk, Hk, D), q's dtype. Hk divides Hq (grouped queries).
        v: (B, Sk, Hk, Dv) or (Tk, Hk, Dv), q's dtype.
        scale: any finite number; default 1 / sqrt(D).
        causal: ``True`` or ``"bottom_right"``: query i sees key j when j <= i + Sk - Sq;
            ``"top_left"``: when j <= i.
        window: (left, right), inclusive: diagonal - left <= j <= diagonal + right is visible. None
            is unbounded; other libraries write -1 for that, but here a negative number means what
            it says: (None, -1) shows the keys before the diagonal, and (-1, 0) none at all. The
            diagonal is the bottom-right one unless ``causal="top_left"``.
        softcap: 0 is off; in units of the scaled scores.
        alibi_slopes: (Hq,) or (B, Hq), float32 (or float64 when q is). Differentiable.
        bias: added to the scores; broadcastable to (B, Hq, Sq, Sk), any float dtype; minus
            infinity hides a key. Differentiable, summed over broadcast axes.
        mask: boolean, the same broadcasting, True = visible.
        sinks: (Hq,), the dtype of slopes: the logit of one extra key of value zero, -inf for
            none. Differentiable.
        dropout_p: probability of dropping a weight, after the normaliser; 1 gives zeros.
        seed: int or one-element int64 array; None draws one from the framework's own generator.
            The weight of (b, h, i, j) is dropped as a pure function of the seed and these four:
            Philox4x32-10 (Salmon et al., SC 2011).
        cu_seqlens_q: B + 1 offsets of packed sequences; int32 or int64, an array or a list. Bias
            and mask are then indexed by the position inside each sequence.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: longest query sequence; only needed with bias or mask, whose shape it gives.
        max_seqlen_k: the same for keys.
        seqused_q: (B,) used lengths, an array or a list. Rows beyond give out 0 and lse -inf.
        seqused_k: (B,) used lengths; keys beyond are never read. Offsets and lengths outside their
            tensor are refused; those that lie in a GPU's memory are not read back for that, but
            cut to the tensor by the kernels.
        score_mod: not supported yet.
        mask_mod: not supported yet.
        aux: not supported yet.
        deterministic: backward repeats bitwise; None follows torch's own setting. The CPU always
            is deterministic, whatever the number of threads.
        return_lse: also return the natural log-sum-exp, (B, Hq, Sq) or (Hq, Tq), float32 (float64
            when q is). Differentiable.
        out: write the result here: (B, Sq, Hq, Dv) or (Tq, Hq, Dv), q's dtype, sharing no memory
            with an input, and no input may require a gradient.

    Returns:
        out, in q's dtype, or (out, lse).

    Raises:
        TypeError, ValueError: an argument cannot work; the sentence says what is needed.
        NotImplementedError: it could, but not in this version or on this device.
    """
    if score_mod is not None or mask_mod is not None or aux is not None:
        refuse_mods(score_mod=score_mod, mask_mod=mask_mod, aux=aux)
    if deterministic is not None or type(return_lse) is not bool:
        deterministic, return_lse = flags(deterministic, return_lse)
    if misspelt:
        refuse_keyword(
            "attention", next(iter(misspelt)), (*Options.__annotations__, "return_lse", "out")
        )
    question = in_order(
        q,
        k,
        v,
        scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        bias,
        mask,
        sinks,
        dropout_p,
        seed,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
    )
    return front_end(q).attention(question, deterministic, return_lse, out)


def merge_states(outs: Any, lses: Any, **misspelt: Never) -> tuple[Any, Any]:
    """Merges attention results over disjoint sets of keys into the result over their union.

    Args:
        outs: N partial outputs as `attention` returns them, (B, Sq, H, Dv) or (T, H, Dv) each, or
            rows (R, Dv): a list, or one array with a leading axis N.
        lses: their natural log-sum-exps: (B, H, Sq), (H, T) or (R,) each. A part that saw nothing
            has lse -inf and changes nothing. At most one part may include an attention sink.

    Returns:
        (out, lse) in the same layouts. Differentiable in both for torch tensors:
        out = sum_n exp(lse_n - lse) out_n,  lse = log sum_n exp(lse_n).
    """
    if misspelt:
        refuse_keyword("merge_states", next(iter(misspelt)), ("outs", "lses"))
    first = outs
    if isinstance(outs, (list, tuple)):
        if not outs:
            raise ValueError("outs is empty: at least one part is needed")
        first = outs[0]
    return front_end(first, "outs").merge_states(outs, lses)


@dataclass(frozen=True, repr=False)
class Plan:
    """How one direction of a call would run."""

    direction: str
    backend: str
    kernel: str
    work_items: int
    workspace_bytes: int
    why: str

    def __str__(self) -> str:
        lines = [
            f"{self.direction}: {self.backend}, {self.kernel}",
            f"  work items: {self.work_items}",
            f"  workspace: {self.workspace_bytes} bytes",
        ]
        lines += [f"  {line}" for line in self.why.splitlines() if line.strip()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<onefold plan, {self.direction}: {self.backend}, {self.kernel}>"


@dataclass(frozen=True, repr=False)
class Explanation:
    """The plans of a call; `str()` is the text that `explain` prints."""

    forward: Plan
    backward: Plan

    def __str__(self) -> str:
        return f"{self.forward}\n{self.backward}"

    def __repr__(self) -> str:
        return f"<onefold explanation: {self.forward.backend}, {self.forward.kernel}>"


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    deterministic: bool | None = None,
    **options: Unpack[Options],
) -> Explanation:
    """Prints how `attention` with the same arguments would run, and why so.

    Args:
        q, k, v: as in `attention`.
        return_lse: as in `attention`; the plan is the same either way.
        deterministic: as in `attention`.
        options: the keywords of `attention` except `out`.

    Returns:
        The plans of both directions, backward for the gradients of all inputs.
    """
    deterministic, _ = flags(deterministic, return_lse)
    module = front_end(q)
    question = _described_by_memory(module, from_options("explain", q, k, v, options))
    given = [question[i] is not None for i in DIFFERENTIABLE]
    if deterministic is None:
        deterministic = module.wants_determinism()
    place = module.place(q)
    explanation = Explanation(
        Plan("forward", *_core.plan(*question, None, False, *place)),
        Plan("backward", *_core.plan(*question, given, deterministic, *place)),
    )
    print(explanation)
    return explanation


def _described_by_memory(module: Any, question: Arguments) -> Arguments:
    """As a call of `_core` takes it."""
    ready = module.prepare(question)
    return tuple(map(module.resolve, ready))


def warmup(
    q: Any,
    k: Any,
    v: Any,
    *,
    backward: bool | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    **options: Unpack[Options],
) -> list[str]:
    """Makes ready what `attention` with the same arguments needs, so that the call is fast the
    first time and may be captured into a CUDA graph: kernels are compiled and loaded.

    Kernels depend on dtypes, head dims, alignment and on which options are used, not on lengths,
    batch or values. One process's work serves the others through the cache (`onefold cache`).

    Args:
        q, k, v: as in `attention`; no value is read.
        backward: also the kernels of the gradients, of those inputs that require one or, when none
            does, of all; None: when an input requires one.
        return_lse: as in `attention`; the kernels are the same either way.
        deterministic: as in `attention`.
        options: the keywords of `attention` except `out`.

    Returns:
        The kernels, one line each; none on the CPU, which has nothing to make ready.
    """
    deterministic, _ = flags(deterministic, return_lse)
    module = front_end(q)
    question = _described_by_memory(module, from_options("warmup", q, k, v, options))
    needs = [getattr(question[i], "requires_grad", False) for i in DIFFERENTIABLE]
    if backward is None:
        backward = any(needs)
    elif not is_bool(backward):
        raise type_error("backward", backward, "True, False or None")
    if backward and not any(needs):
        needs = [question[i] is not None for i in DIFFERENTIABLE]
    ready = _core.warm_up(*question, None, False)
    if backward:
        if deterministic is None:
            deterministic = module.wants_determinism()
        ready += _core.warm_up(*question, needs, deterministic)
    return ready


def info() -> str:
    """What runs here: the version, then each backend with its instruction set, threads, caches."""
    return _core.info()


def set_num_threads(count: int) -> None:
    """Threads for every later call; results do not change.

    0, which is also the default, means as many as the process may use (its affinity, the limits of
    its container) and, when the arrays are torch tensors, no more than `torch.get_num_threads()`.
    """
    _core.set_num_threads(integer("count", count))


def get_num_threads() -> int:
    """How many threads a call may use, before torch has a say: see `set_num_threads`."""
    return _core.num_threads()
