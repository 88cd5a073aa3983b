"""Trains one transformer per attention in lockstep: the same first weights, the same batches.

The models take turns at every step, in rotating order, so that whatever else the machine does meets
all of them alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onefold._demo.tiny_gpt import Attention, Config, Corpus, Transformer

# Chosen by trying a dozen settings on two cores: the lowest loss after half a minute of training.
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 40


def finish(device: torch.device | str) -> None:
    """Waits until the device has done what it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Trainee:
    """A model with its optimiser, and how long each of its steps took."""

    def __init__(
        self, config: Config, attention: Attention, seed: int, steps: int, device: str = "cpu"
    ) -> None:
        self.model = Transformer(config, attention, seed).to(device)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=LEARNING_RATE,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            fused=True,
        )
        warm_up = min(WARM_UP_STEPS, max(1, steps // 4))

        def schedule(step: int) -> float:  # a linear rise, then half a cosine down to a tenth
            cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
            return min(1.0, (step + 1) / warm_up) * (0.1 + 0.9 * cosine)

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, schedule)
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One update; returns the loss of every token before it, [B, S]."""
        tokens, targets = (x.to(self.model.device) for x in (tokens, targets))
        finish(self.model.device)
        start = time.perf_counter()
        losses = self.model.losses(tokens, targets)
        self.optimiser.zero_grad()
        losses.mean().backward()
        self.optimiser.step()
        self.schedule.step()
        finish(self.model.device)
        self.seconds.append(time.perf_counter() - start)
        return losses.detach()


@dataclass(frozen=True)
class Step:
    """What one step showed: mean loss by attention, and how far apart each pair of models is.

    A distance is the root mean square, over the tokens of the batch, of the difference of their
    losses in nats.
    """

    losses: dict[str, float]
    distances: dict[tuple[str, str], float]


def compare(losses: Mapping[str, Tensor]) -> Step:
    """losses: by attention, [B, S], before the same update."""
    names = list(losses)
    exact = {name: losses[name].double() for name in names}
    # Two losses rounded to fp32 cannot be told apart below this: 2^-24 of their size.
    resolution = 2.0**-24 * max(float(x.square().mean().sqrt()) for x in exact.values())
    distances = {
        (a, b): max(resolution, float((exact[a] - exact[b]).square().mean().sqrt()))
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    return Step({name: float(exact[name].mean()) for name in names}, distances)


def train(trainees: Mapping[str, Trainee], corpus: Corpus, steps: int, seed: int) -> Iterator[Step]:
    """Trains all of them for `steps` steps on the same batches; yields after each."""
    names = list(trainees)
    context = trainees[names[0]].model.config.context
    for step, batch in zip(range(steps), corpus.batches(context, seed), strict=False):
        turn = step % len(names)
        losses = {name: trainees[name].step(*batch) for name in names[turn:] + names[:turn]}
        yield compare({name: losses[name] for name in names})


def captured_qkv(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the last layer of `model` attends with: q [B, S, H, D], k and v [B, S, G, D]."""
    attention = model.blocks[-1].attention.attention
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return attention(q, k, v)

    copy = Transformer(model.config, spy, seed=0).to(model.device)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        copy(tokens.to(model.device))
    return seen[-1]
