"""The gates that out, lse and every gradient must pass, on any device.

T0   exact identities: `assert_same_bits`.
T1   an a priori bound on every component: `hold_bounds`. A correct backend cannot exceed it.
T2   the RMS error is what rounding predicts: `hold_noise` (the prediction is in noise.py).
T2b  the mean error is what chance allows: the same function.

The reference is `onefold.reference`: float64 on the same rounded inputs. Its terms say how much an
error of each source can do; `sizes` says how large each source's error is in a backend.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from onefold import reference
from onefold._commands import bounds
from onefold._commands.bounds import gamma

FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
UNIT = {dtype: bounds.UNIT[name] for name, dtype in FLOATS.items()}
TINY = {dtype: bounds.TINY[name] for name, dtype in FLOATS.items()}
DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, sinks and slopes, and the arithmetic inside."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- a call and what it gives ----


@dataclass(eq=False)
class Case:
    """One call with its cotangents, on the CPU; `options` are keywords of `onefold.attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    dout: Tensor | None = None
    dlse: Tensor | None = None
    name: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The differentiable ones that are there."""
        every = {"q": self.q, "k": self.k, "v": self.v} | self.options
        return {n: every[n] for n in DIFFERENTIABLE if every.get(n) is not None}

    @property
    def longest_keys(self) -> int:
        cu = self.options.get("cu_seqlens_k")
        if cu is None:
            return self.k.shape[1]
        cu = torch.as_tensor(cu)
        return int((cu[1:] - cu[:-1]).max()) if len(cu) > 1 else 0

    @functools.cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        return reference.attention(self.q, self.k, self.v, **self.options)

    @functools.cached_property
    def terms(self) -> reference.ForwardTerms:
        return reference.forward_terms(self.q, self.k, self.v, **self.options)

    @functools.cached_property
    def exact_gradients(self) -> reference.Gradients:
        return reference.gradients(
            self.q, self.k, self.v, dout=self.dout, dlse=self.dlse, **self.options
        )

    @functools.cached_property
    def gradient_terms(self) -> reference.Gradients:
        return reference.gradient_terms(
            self.q, self.k, self.v, dout=self.dout, dlse=self.dlse, **self.options
        )


@dataclass(eq=False)
class Found:
    """What a backend answered, moved to the CPU."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)


def moved(x: Any, device: str) -> Any:
    """The same on a device: strides, and what surrounds a view in its memory, included."""
    if not isinstance(x, Tensor) or device == "cpu":
        return x
    x = x.detach()
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def skip_unless_it_computes(dtype: torch.dtype, head_dim: int, device: str) -> None:
    """Skips the test for what is refused on a device; the tests in cuda/ hold it to that."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is refused on CUDA")
    if device == "cuda" and head_dim > 256:
        pytest.skip("head dims above 256 are refused on CUDA")


def run(case: Case, device: str = "cpu", backward: bool = True, **more: Any) -> Found:
    """Calls `onefold.attention`, with gradients of every input when the case has cotangents."""
    skip_unless_it_computes(case.dtype, max(case.q.shape[-1], case.v.shape[-1]), device)
    more = {"deterministic": True} | more  # `hold_bounds` looks at the other gradients
    options = {name: moved(x, device) for name, x in case.options.items()} | more
    arrays = {name: moved(x, device).detach() for name, x in case.inputs.items()}
    backward = backward and (case.dout is not None or case.dlse is not None)
    if backward:
        for x in arrays.values():
            x.requires_grad_()
    options |= {name: x for name, x in arrays.items() if name in options}
    out, lse = onefold.attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True, **options)
    found = Found(out.detach().cpu(), lse.detach().cpu())
    if backward:
        pairs = [(y, d) for y, d in ((out, case.dout), (lse, case.dlse)) if d is not None]
        gradients = torch.autograd.grad(
            [y for y, _ in pairs],
            list(arrays.values()),
            [moved(d, device) for _, d in pairs],
            allow_unused=False,
        )
        found.gradients = {n: g.cpu() for n, g in zip(arrays, gradients, strict=True)}
    return found


# Of a kernel's spec: what orders additions, and whether weights are handed over in float16.
TILES = re.compile(r"portable_\w+|\.(?:dim|dim_v|tile_q|tile_k|warps|paired|sharing) = \w+")


def explained(case: Case, device: str) -> Any:
    """The plans of a case."""
    arrays = (moved(x, device) for x in (case.q, case.k, case.v))
    options = {name: moved(x, device) for name, x in case.options.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        return onefold.explain(*arrays, **options)


def path(case: Case, device: str = "cpu") -> tuple[Any, ...]:
    """Which path `explain` names: the same path gives the same bits. On the CPU the forward one
    decides; on a GPU both do, and their tiles."""
    plans = explained(case, device)
    if device == "cuda":
        return tuple(TILES.findall(plans.forward.kernel + plans.backward.kernel))
    plan = plans.forward
    return plan.kernel.split(",")[0], "stretches" in plan.why


def assert_same_bits_or_both_right(a: Case, b: Case, device: str) -> None:
    """Two layouts of one question: bitwise where they take one path, else within the bound."""
    found_a, found_b = run(a, device), run(b, device)
    if path(a, device) == path(b, device):
        assert_same_bits(found_a, found_b)
    else:
        hold_bounds(a, device, found_a)
        hold_bounds(b, device, found_b)


# ---- input families ----

# (B, Sq, Sk, Hq, Hk, D, Dv) -> q, k, v in float64, and options. Channel 0 of k often carries a
# pattern that every query sees alike; the scale is then 1/8, so that the numbers stay exact.
Family = Callable[[torch.Generator, tuple[int, ...]], tuple[Tensor, Tensor, Tensor, dict[str, Any]]]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def normal_inputs(generator: torch.Generator, shape: tuple[int, ...]) -> list[Tensor]:
    batch, sq, sk, hq, hk, d, dv = shape
    return [
        normal(generator, batch, sq, hq, d),
        normal(generator, batch, sk, hk, d),
        normal(generator, batch, sk, hk, dv),
    ]


def patterned(pattern: Callable[[Tensor], Tensor]) -> Family:
    """N(0, 1) scores plus pattern(j / Sk), rounded to what bfloat16 holds."""

    def family(generator, shape):
        q, k, v = normal_inputs(generator, shape)
        sk, d = shape[2], shape[5]
        q *= d**-0.5 * 8
        q[..., 0] = 16.0
        position = torch.arange(sk, dtype=torch.float64)
        k[..., 0] = (pattern(position / max(sk, 1)) / 2).to(torch.bfloat16)[None, :, None]
        return q, k, v, {"scale": 0.125}

    return family


def scaled_inputs(of_q: float = 1.0, of_k: float = 1.0, of_v: float = 1.0) -> Family:
    def family(generator, shape):
        q, k, v = normal_inputs(generator, shape)
        return q * of_q, k * of_k, v * of_v, {}

    return family


def one_hot_key(generator, shape):
    q, k, v, options = patterned(lambda x: torch.zeros_like(x))(generator, shape)
    k[:, shape[2] // 3 :][:, :1, :, 0] = 32.0  # 64 above the others
    return q, k, v, options


def all_equal(generator, shape):
    q, k, v = normal_inputs(generator, shape)
    one = normal(generator, shape[5])
    return q * 0 + one, k * 0 + one, v, {}


def values_of_one(noise: float) -> Family:
    def family(generator, shape):
        q, k, v = normal_inputs(generator, shape)
        return q, k, 1.0 + noise * v, {}

    return family


def sink_at_first_key(generator, shape):
    return patterned(lambda x: torch.where(x == 0, 12.0, 0.0))(generator, shape)


def outlier_channel(generator, shape):
    q, k, v = normal_inputs(generator, shape)
    k[..., shape[5] // 2] *= 100.0
    v[..., shape[6] // 2] *= 100.0
    return q, k, v, {}


def huge(generator, shape):
    """Scores of about 60000^2 / D: rows are one-hot, and float16 is at its limit."""
    q, k, v = (x.clamp(-1, 1) for x in normal_inputs(generator, shape))
    return 60000 / shape[5] ** 0.5 * q, 60000 / shape[5] ** 0.5 * k, v, {"scale": 1.0}


FAMILIES: dict[str, Family] = {
    "normal": scaled_inputs(),
    "deviation_8": scaled_inputs(of_q=8.0),
    "rising": patterned(lambda x: 32 * x),
    "falling": patterned(lambda x: -32 * x),
    "sawtooth": patterned(lambda x: 16 * ((7 * x) % 1.0)),
    "offset_60": patterned(lambda x: torch.full_like(x, 60.0)),
    "offset_minus_60": patterned(lambda x: torch.full_like(x, -60.0)),
    "offset_1000": patterned(lambda x: torch.full_like(x, 1000.0)),
    "offset_minus_1000": patterned(lambda x: torch.full_like(x, -1000.0)),
    "one_hot_key": one_hot_key,
    "all_equal": all_equal,
    "values_of_one": values_of_one(0.0),
    "values_near_one": values_of_one(0.5),
    "sink_at_first_key": sink_at_first_key,
    "outlier_channel": outlier_channel,
    "huge": huge,
}


def make_case(
    family: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    draw: int = 0,
    with_dlse: bool = True,
    **options: Any,
) -> Case:
    """`shape` is (B, Sq, Sk, Hq, Hk, D, Dv); another `draw`, other numbers."""
    generator = torch.Generator().manual_seed(draw)
    q, k, v, own = FAMILIES[family](generator, shape)
    batch, sq, _, hq, _, _, dv = shape
    dout = normal(generator, batch, sq, hq, dv).to(dtype)
    dlse = normal(generator, batch, hq, sq).to(wide(dtype)) if with_dlse else None
    return Case(
        q.to(dtype), k.to(dtype), v.to(dtype), own | options, dout, dlse, name=f"{family} {shape}"
    )


# ---- T0 ----


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == torch.bool or not a.is_floating_point():
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
    """Bitwise equality of tensors, or of everything in two `Found`."""
    if isinstance(a, Found):
        assert_same_bits(a.out, b.out, f"{what} out")
        assert_same_bits(a.lse, b.lse, f"{what} lse")
        assert a.gradients.keys() == b.gradients.keys()
        for name, gradient in a.gradients.items():
            assert_same_bits(gradient, b.gradients[name], f"{what} gradient of {name}")
        return
    assert a.shape == b.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if not same_bits(a, b):
        differ = (a != b) & ~(a.isnan() & b.isnan())
        where = differ.nonzero()
        first = tuple(where[0].tolist()) if len(where) else ()
        raise AssertionError(
            f"{what}: {len(where)} of {a.numel()} elements differ, first at {first}: "
            + (f"{a[first].item()!r} and {b[first].item()!r}" if len(where) else "in a zero's sign")
        )


# ---- T1 ----


@dataclass(frozen=True)
class Arithmetic:
    """How a backend adds up; `u` is the unit roundoff of its accumulators."""

    u: float
    lanes: int  # the most queries that one partial sum of dK and dV runs over
    exp2: float  # relative error of 2^x
    flushed: float  # weights below this count as zero
    key_tile: int = 64  # a sum over keys starts afresh in each tile
    stretch: int = 1024  # and few rows add up each stretch by itself


def arithmetic(case: Case, device: str) -> Arithmetic:
    if device == "cuda":  # tensor cores truncate their sums: twice the roundoff
        return Arithmetic(2.0**-23, lanes=64, exp2=2.0**-22, flushed=2.0**-126)
    if case.dtype == torch.float64:
        return Arithmetic(2.0**-53, lanes=24, exp2=2.2e-16, flushed=2.0**-1022)
    return Arithmetic(2.0**-24, lanes=48, exp2=1.8e-7, flushed=2.0**-126)


def sizes(case: Case, device: str = "cpu") -> dict[str, float]:
    """Source -> size, of the forward pass: q is multiplied by scale * log2(e) and rounded, scores
    are summed along head_dim, the reference is an integer (rescaling is exact, and up to one above
    the maximum), sums over keys start afresh in each key tile. P stays in the accumulators' dtype,
    but for products of pairs: see `of_operands`.
    """
    if device == "cuda":
        return tensor_core_sizes(case)
    a = arithmetic(case, device)
    u, options = a.u, case.options
    keys = case.longest_keys
    tile = min(a.key_tile, keys)
    tiles = -(-keys // a.key_tile) + -(-keys // a.stretch)
    # With a cap, a bias or slopes, log2(e) is multiplied afterwards, itself rounded.
    modified = any(options.get(name) is not None for name in ("bias", "alibi_slopes")) or (
        options.get("softcap", 0.0) != 0.0
    )
    dropped = options.get("dropout_p", 0.0) > 0
    return {
        # two more: the factor's rounding and the product's; four: the argument of tanh, log2(e)
        "score": gamma(case.q.shape[-1] + 2, u) + (4 * u if modified else 0.0),
        # tanh (4), times the cap (1), slope * distance (2), two additions, log2(e) (2)
        "added": 11 * u if modified else 0.0,
        "exponent": 2 * u,
        "weight": a.exp2 + 2 * math.log(2) * u,
        "sum": gamma(tile + tiles, u)
        + gamma(-(-tile // 2) + 1 + tiles, u)
        + (5 * u if dropped else 3 * u),
        "underflow": 8 * a.flushed,
        "out": UNIT[case.dtype],
        "lse": 2 * u,
        "product": 0.0,
        "accumulate": 0.0,
    }


def tensor_core_sizes(case: Case, backward: bool = False) -> dict[str, float]:
    """The same of the CUDA kernels, forward or backward."""
    rows = case.q.shape[0] * (case.q.shape[1] if case.q.dim() == 4 else 1) * case.q.shape[-2]
    dim = max(case.q.shape[-1], case.v.shape[-1])
    dtype = str(case.dtype).removeprefix("torch.")
    of = "gradients" if backward else "out"
    return bounds.sizes(dtype, dim, case.longest_keys, rows, "cuda", of)


def of_operands(case: Case, device: str) -> float:
    """What rounding a weight or dS to an operand of a product costs, where a CPU does that."""
    return bounds.of_operands(str(case.dtype).removeprefix("torch."), device)


def backward_sizes(case: Case, device: str = "cpu") -> dict[str, float]:
    if device == "cuda":
        return tensor_core_sizes(case, backward=True)
    a = arithmetic(case, device)
    u = a.u
    keys, tile = case.longest_keys, a.key_tile
    rows = case.q.shape[0] * (case.q.shape[1] if case.q.dim() == 4 else 1) * case.q.shape[-2]
    over_keys = min(tile, keys) + -(-keys // tile)
    over_queries = a.lanes + -(-rows // 8) + 8  # 8: the least number of lanes, and of chunks
    depth = max(over_keys, over_queries)
    if case.options.get("bias") is not None:
        bias = case.options["bias"]
        depth = max(depth, rows * keys // max(bias.numel(), 1) + 1)
    if case.options.get("alibi_slopes") is not None:
        depth = max(depth, keys)
    rounded, forward = of_operands(case, device), sizes(case, device)
    return forward | {
        "weight": forward["weight"] + rounded,  # as out's, in delta
        "lse": 3 * u,  # as stored, times log2(e), rounded
        "product": gamma(case.v.shape[-1], u) + 4 * u,
        "accumulate": gamma(depth, u) + 6 * u + rounded,
    }


def total(size: dict[str, float], terms: Tensor) -> Tensor:
    weights = torch.tensor([size[s] for s in reference.SOURCES], dtype=torch.float64)
    return torch.tensordot(weights, terms.nan_to_num(0.0, 0.0, 0.0), dims=1)


def growth(size: dict[str, float], case: Case) -> float:
    """What the bound's first order leaves out: weights move by e^eta, not by 1 + eta."""
    terms = case.terms
    live = terms.count > 0
    if not bool(live.any()):
        return 1.0
    spread = 2 * terms.max_magnitude[live].nan_to_num(0.0, 0.0, 0.0)
    eta = size["score"] * spread + size["exponent"] * spread + size["weight"]
    return math.exp(min(2 * eta.max().item(), 700.0))


def assert_within(got: Tensor, want: Tensor, bound: Tensor, what: str) -> float:
    """Every component, infinities and NaN included; returns the worst error over its bound."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} for {tuple(want.shape)}"
    if got.numel() == 0:
        return 0.0
    got = got.double()
    same = (got == want) | (got.isnan() & want.isnan())
    ratio = torch.where(same, 0.0, (got - want).abs() / bound)
    ratio = torch.where(ratio.isnan() | (~same & ~want.isfinite()), torch.inf, ratio)
    worst = ratio.max().item()
    if worst > 1:
        at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise AssertionError(
            f"{what}: {int((ratio > 1).sum())} of {ratio.numel()} components beyond their bound; "
            f"worst at {at}: {got[at].item()!r} for {want[at].item()!r}, bound "
            f"{bound[at].item():.3g}, error {worst:.3g} bounds"
        )
    return worst


def hold_forward(case: Case, found: Found, device: str = "cpu") -> tuple[float, float]:
    """T1 of out and lse."""
    size = sizes(case, device)
    grown = growth(size, case)
    slack = 2.0 if case.dtype == torch.float64 else 1.0  # the reference rounds too
    out, lse = case.exact
    # Rounded weights are divided by their own sum, lse is that of the others.
    rounded = {"weight": size["weight"] + of_operands(case, device)}
    bound = slack * grown * total(size | rounded, case.terms.out) + TINY[case.dtype]
    bound = bound + of_flushed_sums(case, device)["out"]
    most = case.v.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item() if case.v.numel() else 0.0
    p = case.options.get("dropout_p", 0.0)
    if p == 0:  # a convex combination never leaves the hull of v
        bound = bound.clamp(max=2.01 * most + TINY[case.dtype])
    bound_lse = slack * grown * total(size, case.terms.lse) + TINY[wide(case.dtype)]
    if size["added"] == 0.0:  # lse moves no more than the score that moves most
        most_moved = (size["score"] + 2 * size["exponent"]) * case.terms.max_magnitude
        rest = size["weight"] + size["sum"] + size["lse"] * lse.abs()
        bound_lse = bound_lse.minimum(slack * (most_moved + rest).nan_to_num(torch.inf, torch.inf))
    return (
        assert_within(found.out, out, bound, f"{case.name}: out"),
        assert_within(found.lse, lse, bound_lse, f"{case.name}: lse"),
    )


def of_subnormal_out(case: Case) -> dict[str, Tensor]:
    """What the absolute error of storing a tiny out does to the gradients, through dout . out: to
    first order, the gradients of |lse| weighted with that error."""
    eps = TINY[case.dtype] * case.dout.double().abs().sum(-1)
    eps = eps.transpose(-1, -2).to(wide(case.dtype))
    terms = reference.gradient_terms(case.q, case.k, case.v, dlse=eps, **case.options)
    source = reference.SOURCES.index("accumulate")
    return {name: getattr(terms, name)[source] for name in case.inputs}


def of_flushed_sums(case: Case, device: str) -> dict[str, float]:
    """What products of pairs add to a bound, to every component, because a sum or an operand below
    2^-126 counts as zero there: each addition may lose that much."""
    if of_operands(case, device) == 0.0:
        return dict.fromkeys(("out", *case.inputs), 0.0)

    def most(x: Tensor | None) -> float:
        empty = x is None or x.numel() == 0
        return 0.0 if empty else x.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item()

    kept = 1 / max(1 - case.options.get("dropout_p", 0.0), 2.0**-32)
    lost = arithmetic(case, device).flushed * kept
    keys, dim_v = case.longest_keys, case.v.shape[-1]
    rows = case.q.numel() // max(case.q.shape[-1], 1)
    scale = case.options.get("scale")
    scale = max(case.q.shape[-1], 1) ** -0.5 if scale is None else abs(scale)
    out = 2 * keys * lost  # divided by a sum of at least 1/2
    ds = (dim_v + 1) * lost + dim_v * most(case.dout) * out  # of dP, of dS and of dout . out
    every = {
        "q": scale * keys * (lost + most(case.k) * ds),
        "k": scale * rows * (lost + most(case.q) * ds),
        "v": rows * lost,
        "alibi_slopes": rows * keys * ds * (keys + rows),  # a distance is less
    }
    return {"out": out} | {name: every.get(name, rows * keys * ds) for name in case.inputs}


def hold_gradients(case: Case, found: Found, device: str = "cpu") -> dict[str, float]:
    """T1 of every gradient."""
    size = backward_sizes(case, device)
    grown = growth(size, case)
    slack = 2.0 if case.dtype == torch.float64 else 1.0
    worst = {}
    flushed = of_flushed_sums(case, device)
    tiny_out = (
        of_subnormal_out(case) if case.dtype == torch.float16 and case.dout is not None else {}
    )
    for name, got in found.gradients.items():
        want = getattr(case.exact_gradients, name)
        bound = slack * grown * total(size, getattr(case.gradient_terms, name))
        bound = bound + tiny_out.get(name, 0.0) + flushed[name]
        if device == "cuda":
            bound = bound + bounds.of_small_ds(name, case.q, case.k, case.options.get("scale"))
        bound = bound + UNIT[got.dtype] * want.abs().nan_to_num(0.0) + TINY[got.dtype]
        worst[name] = assert_within(got, want, bound, f"{case.name}: gradient of {name}")
    return worst


def hold_bounds(
    case: Case, device: str = "cpu", found: Found | None = None, deterministic: bool = False
) -> Found:
    """T1 of everything."""
    found = run(case, device, deterministic=deterministic) if found is None else found
    hold_forward(case, found, device)
    hold_gradients(case, found, device)
    return found
