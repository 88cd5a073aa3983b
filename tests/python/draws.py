"""What tests draw numbers with, and the numbers that are none."""

from __future__ import annotations

import math

import torch

NAN, INF = math.nan, math.inf


def seeded(draw: int = 0) -> torch.Generator:
    """A generator of its own for every draw."""
    return torch.Generator().manual_seed(draw)
