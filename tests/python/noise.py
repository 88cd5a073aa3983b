"""How large the rounding errors of one call should be: their RMS, not a bound.

Each rounding is an independent random relative error of RMS 0.425 u (the mean over mantissas of a
uniform error). Errors are carried to the result to first order, so the prediction needs P and the
partial sums of every dot product; it is meant for small dense cases with scale and causal only.

Tensor cores do not round their sums but truncate them, which makes errors of one sign, and 16-bit
kernels there, and products of bfloat16 pairs on a CPU, round weights and dS before a product: all
are predicted too.

A prediction is the variance of each element, and the variance of the mean over all elements: an
error that a whole row shares does not average out along it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gates import TINY, UNIT, Case, arithmetic, explained, of_operands

RELATIVE = 0.425  # RMS of a rounding error in units of u
EXP2 = 1.2  # RMS error of 2^x in units of u, polynomial and last rounding, on (-1/2, 1/2)


# Of a sum that a tensor core truncates: what is lost is uniform below a unit in the last place, so
# 2^-24 of the sum's power of two, which is 1 / (2 ln 2) of the sum in the mean over mantissas.
TRUNCATED = 2.0**-24 / (2 * math.log(2))


@dataclass
class Noise:
    variance: Tensor
    of_mean: float

    def __add__(self, other: Noise) -> Noise:
        return Noise(self.variance + other.variance, self.of_mean + other.of_mean)


def independent(variance: Tensor) -> Noise:
    return Noise(variance, variance.sum().item() / max(variance.numel(), 1) ** 2)


def shared(pattern: Tensor, variance: Tensor, axes: tuple[int, ...]) -> Noise:
    """pattern * error, the error being one for all elements along `axes`."""
    of_mean = (pattern.sum(axes, keepdim=True) ** 2 * variance).sum().item()
    return Noise(pattern**2 * variance, of_mean / max(pattern.numel(), 1) ** 2)


def partial_sums(products: Tensor, axis: int, block: int) -> Tensor:
    """The sum of squares of all running sums along an axis that restart in every block and of the
    sums of blocks: r^2 times this is the variance of a blocked summation."""
    axis = axis % products.dim()
    size = products.shape[axis]
    pad = (-size) % block
    shape = list(products.shape)
    padded = torch.cat(
        [products, products.new_zeros([*shape[:axis], pad, *shape[axis + 1 :]])], dim=axis
    )
    blocks = padded.unflatten(axis, (-1, block))
    running = blocks.cumsum(axis + 1)
    if pad:  # what is not there rounds nothing
        live = (torch.arange(size + pad) < size).view(-1, block)
        running = running * live.view(*[1] * axis, *live.shape, *[1] * (len(shape) - axis - 1))
    whole = running.select(axis + 1, block - 1) if not pad else blocks.sum(axis + 1)
    return (running**2).sum((axis, axis + 1)) + (whole.cumsum(axis) ** 2).sum(axis)


def lost_in_steps(products: Tensor, axis: int, step: int) -> Tensor:
    """The sum of all running sums along an axis that are taken every `step` elements."""
    axis = axis % products.dim()
    at = torch.arange(step - 1, products.shape[axis] + step - 1, step)
    running = products.cumsum(axis)
    return running.index_select(axis, at.clamp(max=products.shape[axis] - 1)).sum(axis)


def of_storing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Variance of rounding x to a 16-bit format, whose small numbers have an absolute error."""
    tiny = x.abs().clamp(max=3**-0.5 * TINY[dtype])
    return (RELATIVE * UNIT[dtype] * x) ** 2 + tiny**2


class Prediction:
    """The noise of out, lse and the gradients of a dense case with as many kv heads as heads."""

    def __init__(self, case: Case, device: str = "cpu"):
        a = arithmetic(case, device)
        self.case, self.u = case, a.u
        self.r2 = (RELATIVE * a.u) ** 2
        self.tile, self.lanes = a.key_tile, a.lanes
        narrow = case.dtype in (torch.float16, torch.bfloat16)
        # Of weights and of dS before a product, relative to them.
        self.narrow_cuda = device == "cuda" and narrow
        self.rounds_operands = self.narrow_cuda or of_operands(case, device) > 0
        self.of_operand = (RELATIVE * UNIT[case.dtype]) ** 2 if self.rounds_operands else 0.0
        self.truncates, self.narrow = device == "cuda", narrow
        self.hands_over = self.narrow_cuda and (
            ".paired = true" in explained(case, device).backward.kernel
        )
        q, k, v = (x.double().transpose(1, 2) for x in (case.q, case.k, case.v))
        self.q, self.k, self.v = q, k, v
        scale = case.options.get("scale")
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        products = self.scale * q.unsqueeze(-2) * k.unsqueeze(-3)  # (B, H, Sq, Sk, D)
        score = products.sum(-1)
        hidden = torch.zeros(score.shape[-2:], dtype=torch.bool)
        if case.options.get("causal"):
            sq, sk = score.shape[-2:]
            hidden = torch.arange(sk) > torch.arange(sq)[:, None] + sk - sq
        self.lse = torch.logsumexp(score.masked_fill(hidden, -torch.inf), -1)
        self.p = torch.exp(score.masked_fill(hidden, -torch.inf) - self.lse[..., None])
        self.out = self.p @ v
        # Each product has a rounded q; each running sum is rounded; so is score - reference, where
        # the difference is the larger of the two.
        self.of_score = self.r2 * ((products**2).sum(-1) + (products.cumsum(-1) ** 2).sum(-1))
        behind = score - score.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
        self.of_score += self.r2 * torch.where(behind.abs() > score.abs(), behind**2, 0.0)
        # The product scale * log2(e) is rounded once for all: another temperature.
        if a.u == UNIT[torch.float32]:
            exact = self.scale * math.log2(math.e)
            rounded = torch.tensor(exact, dtype=torch.float32).item()
            self.drift = (rounded / exact - 1.0) * score
        else:
            self.drift = torch.zeros_like(score)
        self.drift -= self._lost(products, -1)
        self.of_weight = self.of_score + (EXP2 * a.u) ** 2

    def _lost(self, products: Tensor, axis: int) -> Tensor:
        """What truncation takes from the sum of products along an axis: in 16 bits from every
        running sum, for float32 thrice from the sums of 8 elements along the head dim, and of
        8, 16, 24 and 32 keys, which then are added with rounding."""
        if not self.truncates:
            return torch.zeros_like(products.select(axis, 0))
        if self.narrow:
            return TRUNCATED * lost_in_steps(products, axis, 16)
        return TRUNCATED * (3.0 if axis == -1 else 7.5) * products.sum(axis)

    def _of_storing(self, x: Tensor) -> Tensor:
        return of_storing(x, self.case.dtype) if self.narrow else torch.zeros_like(x)

    def _of_sum(self) -> Tensor:
        """Relative variance of the denominator, of which two partial sums are kept per tile."""
        return self.r2 * partial_sums(self.p, -1, -(-self.tile // 2))

    def output(self) -> Noise:
        """In the layout of out, (B, Sq, H, Dv)."""
        deviation = self.v.unsqueeze(-3) - self.out.unsqueeze(-2)  # (B, H, Sq, Sk, Dv)
        weighted = self.p.unsqueeze(-1) * deviation
        variance = (weighted**2 * self.of_weight.unsqueeze(-1)).sum(-2)
        products = self.p.unsqueeze(-1) * self.v.unsqueeze(-3)
        sums = partial_sums(products, -2, self.tile)
        variance = variance + self.r2 * (sums + self.out**2) + self._of_storing(self.out)
        # Rounded weights are divided by the sum of the others on a GPU, by their own on a CPU.
        moved = products if self.narrow_cuda else weighted
        variance = variance + self.of_operand * (moved**2).sum(-2)
        noise = independent(variance)
        noise += shared(self.out, self._of_sum().unsqueeze(-1), (-1,))
        drift = (weighted * self.drift.unsqueeze(-1)).sum(-2) - self._lost(products, -2)
        noise += Noise(drift**2, drift.mean().item() ** 2)
        return Noise(noise.variance.transpose(1, 2), noise.of_mean)

    def log_sum(self) -> Noise:
        variance = (self.p**2 * self.of_weight).sum(-1) + self._of_sum() + self.r2 * self.lse**2
        drift = (self.p * self.drift).sum(-1)
        return independent(variance) + Noise(drift**2, drift.mean().item() ** 2)

    def gradients(self) -> dict[str, Noise]:
        """Of q, k and v in their layouts; of cotangents dout and dlse."""
        case, p, r2, scale = self.case, self.p, self.r2, self.scale
        dout = case.dout.double().transpose(1, 2)
        products = dout.unsqueeze(-2) * self.v.unsqueeze(-3)
        dp = products.sum(-1)
        of_dp = r2 * (products.cumsum(-1) ** 2).sum(-1)
        delta = (dout * self.out).sum(-1)
        out_noise = self.output().variance.transpose(1, 2)
        if case.dlse is not None:
            delta = delta - case.dlse.double()
        of_delta = (dout**2 * out_noise).sum(-1) + r2 * delta**2
        # lse as stored, in base 2, and the forward pass's own share of it
        of_lse = self.log_sum().variance + r2 * self.lse**2
        difference = dp - delta.unsqueeze(-1)
        ds = p * difference
        of_ds = ds**2 * (self.of_weight + 2 * r2) + p**2 * of_dp
        of_p = p**2 * (self.of_weight + self.of_operand)
        if self.rounds_operands:  # dS is stored
            of_ds += of_storing(ds, case.dtype)
        if self.hands_over:  # weights, from warp to warp, in float16
            handed = of_storing(p, torch.float16)
            of_ds += difference**2 * handed
            of_p += handed
        drift = ds * (self.drift - (p * self.drift).sum(-1, keepdim=True))

        def finish(noise: Noise, value: Tensor, blocks: Tensor, shift: Tensor) -> Noise:
            noise += independent(r2 * (blocks + value**2) + self._of_storing(value))
            noise += Noise(shift**2, shift.mean().item() ** 2)
            return Noise(noise.variance.transpose(1, 2), noise.of_mean)

        dq, dk, dv = scale * ds @ self.k, scale * ds.mT @ self.q, p.mT @ dout
        of_q = independent(scale**2 * of_ds @ self.k**2)
        of_q += shared(dq, of_lse.unsqueeze(-1), (-1,))
        of_q += shared(scale * p @ self.k, of_delta.unsqueeze(-1), (-1,))
        sums_q = partial_sums(scale * ds.unsqueeze(-1) * self.k.unsqueeze(-3), -2, self.tile)

        # What a query's row shares reaches all keys: (B, H, Sq, Sk, D) before the sum over queries.
        of_k = independent(scale**2 * of_ds.mT @ self.q**2)
        for factor, variance in ((ds, of_lse), (p, of_delta)):
            spread = scale * factor.unsqueeze(-1) * self.q.unsqueeze(-2)
            row = shared(spread, variance[..., None, None], (-2, -1))
            of_k += Noise(row.variance.sum(-3), row.of_mean * spread.shape[-3] ** 2)
        sums_k = partial_sums(scale * ds.unsqueeze(-1) * self.q.unsqueeze(-2), -3, self.lanes)

        of_v = independent(of_p.mT @ dout**2)
        spread = p.unsqueeze(-1) * dout.unsqueeze(-2)
        row = shared(spread, of_lse[..., None, None], (-2, -1))
        of_v += Noise(row.variance.sum(-3), row.of_mean * spread.shape[-3] ** 2)
        sums_v = partial_sums(spread, -3, self.lanes)
        shift_v = (p * (self.drift - (p * self.drift).sum(-1, keepdim=True))).mT @ dout
        return {
            "q": finish(of_q, dq, sums_q, scale * drift @ self.k),
            "k": finish(of_k, dk, sums_k, scale * drift.mT @ self.q),
            "v": finish(of_v, dv, sums_v, shift_v),
        }


def hold_noise(
    got: Tensor, want: Tensor, noise: Noise, what: str, window: tuple[float, float], u: float
) -> float:
    """T2 and T2b of one result: returns the RMS of the errors over their predictions."""
    assert got.numel() >= 256, f"{what}: {got.numel()} components are too few"
    error = got.double() - want
    relative = torch.where(error == 0, 0.0, error.square() / noise.variance)
    ratio = relative.mean().sqrt().item()
    low, high = window
    assert low <= ratio <= high, f"{what}: rms error is {ratio:.3g} of the predicted, not {window}"
    mean, most = error.mean().abs().item(), 4 * math.sqrt(noise.of_mean) + u
    assert mean <= most, f"{what}: mean error is {mean:.3g}, {most:.3g} is the most"
    return ratio


def window_of(dtype: torch.dtype) -> tuple[float, float]:
    """Where rounding to 16 bits dominates, an error below the predicted one is a fault as well."""
    return (0.5 if dtype in (torch.float16, torch.bfloat16) else 0.0, 1.6)
