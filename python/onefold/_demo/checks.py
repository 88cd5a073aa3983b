"""Two comparisons of onefold with the other attentions, each with its yardstick computed.

The yardstick is rounding. Three fp32 attentions that add in different orders differ by rounding
alone, so a correct onefold is as far from the other two as those are from each other. Training
amplifies a rounding error, slowly at first and then chaotically; the same holds for all three, and
a fault of one part in 10 000 stands out a hundredfold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import onefold
from onefold._demo.attentions import ATTENTIONS
from onefold._demo.tiny_gpt import Attention
from onefold._demo.training import Step

EARLY_STEPS = 20  # before rounding is amplified
EARLY_FACTOR = 2.0  # 0.9 to 1.1 between correct attentions; a scale wrong by 1e-4 gives 80 to 120
LATE_FACTOR = (
    10.0  # 0.3 to 1.6 between correct attentions over 300 steps; the wrong scale, 50 to 270
)
ERROR_FACTOR = 2.0
# On a GPU onefold's float32 products are made of three on tensor cores, good to 2^-21 (the
# reference's attentions use ordinary arithmetic, 2^-24), so its rounding is up to 8 times theirs:
# 3.6 early and 7.3 in the error on an H200. Late in training all is amplified alike.
SPLIT_FACTOR = {"cpu": 1.0, "cuda": 8.0}


@dataclass(frozen=True)
class Check:
    """A comparison: what it found in one sentence, and whether that is within what it allows."""

    name: str
    passed: bool
    sentence: str


def excess(steps: Sequence[Step]) -> float:
    """How far onefold is from SDPA and plain, as a multiple of how far those are apart.

    The farther of the two counts; geometric mean over the steps; 1 when all round alike.
    """
    logs = [
        math.log(
            max(step.distances["onefold", "sdpa"], step.distances["onefold", "plain"])
            / step.distances["sdpa", "plain"]
        )
        for step in steps
    ]
    return math.exp(sum(logs) / len(logs))


def curves_agree(steps: Sequence[Step], device: str = "cpu") -> Check:
    """Compares the loss curves, token by token."""
    early = excess(steps[:EARLY_STEPS])
    late = excess(steps)
    allowed = EARLY_FACTOR * SPLIT_FACTOR[device]
    allowed_late = max(LATE_FACTOR, allowed)
    passed = early <= allowed and late <= allowed_late  # false for NaN
    verb = "agree" if passed else "DISAGREE"
    return Check(
        "curves",
        passed,
        f"loss curves {verb}: token by token, onefold is {early:.2f} times as far from SDPA and "
        f"plain as those are from each other over the first {min(EARLY_STEPS, len(steps))} steps "
        f"(allowed {allowed:g}), {late:.2f} times over all {len(steps)} "
        f"(allowed {allowed_late:g})",
    )


def results(attention: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of one attention."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]


def attention_agrees(q: Tensor, k: Tensor, v: Tensor) -> Check:
    """Compares outputs and gradients on q [B, S, H, D], k and v [B, S, G, D] with the oracle."""
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    on_the_cpu = [x.detach().cpu() for x in (q, k, v)]
    out, _ = onefold.reference.attention(*on_the_cpu, causal=True)
    gradient = onefold.reference.gradients(*on_the_cpu, dout=dout, causal=True)
    dout = dout.to(q.device)
    exact = [out, gradient.q, gradient.k, gradient.v]
    errors = {
        name: [
            float((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())
            for found, truth in zip(results(attention, q, k, v, dout), exact, strict=True)
        ]
        for name, attention in ATTENTIONS.items()
    }
    ratios = [
        own / max(others)
        for own, *others in zip(errors["onefold"], errors["sdpa"], errors["plain"], strict=True)
    ]
    allowed = ERROR_FACTOR * SPLIT_FACTOR[q.device.type]
    passed = all(ratio <= allowed for ratio in ratios)  # false for NaN
    verb = "agree" if passed else "DISAGREE"
    listed = ", ".join(
        f"{name} {error:.1e}"
        for name, error in zip(("out", "dq", "dk", "dv"), errors["onefold"], strict=True)
    )
    return Check(
        "reference",
        passed,
        f"outputs and gradients {verb} with the float64 reference on the trained model's q, k, v: "
        f"relative errors {listed}, {max(ratios):.2f} times those of SDPA or plain "
        f"(allowed {allowed:g})",
    )
