"""What is compared, behind one signature: (B, S, H, D) in and out, k and v with fewer heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import onefold
from onefold._bench.cases import Case

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
Call = Callable[[], Any]

ROWS_CHECKED = 16  # the last query rows of head 0, against the float64 oracle


def onefold_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return onefold.attention(q, k, v, causal=causal)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


ATTENTIONS = {"onefold": onefold_attention, "sdpa": sdpa_attention, "plain": plain_attention}


# A step of a model finds its keys in memory, not in a cache: decoding takes turns between copies,
# as many as make so many bytes.
COLD_BYTES, MOST_COPIES = 512 << 20, 64


@dataclass(frozen=True)
class Inputs:
    """Decoding, k and v have one more axis in front, for the copies."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def rows(length: int, heads: int) -> Tensor:
        shape = (case.batch, length, heads, case.head_dim)
        return torch.randn(shape, generator=generator).to(dtype).to(case.device)

    q, dout = rows(case.queries, case.heads), rows(case.queries, case.heads)
    k, v = rows(case.seqlen, case.heads_k), rows(case.seqlen, case.heads_k)
    if case.decode:
        copies = min(MOST_COPIES, math.ceil(COLD_BYTES / case.work))
        k, v = (x.expand(copies, *x.shape).contiguous() for x in (k, v))
    for x in (q, k, v):
        x.requires_grad_(case.direction == "backward")
    return Inputs(q, k, v, dout)


def make_call(attention: Attention, case: Case, x: Inputs) -> Call:
    """What is timed; its result is out, or (dq, dk, dv)."""
    if case.decode:
        turn = itertools.cycle(zip(x.k, x.v, strict=True))
        return lambda: attention(x.q, *next(turn), False)
    if case.direction == "forward":
        return lambda: attention(x.q, x.k, x.v, case.causal)
    out = attention(x.q, x.k, x.v, case.causal)
    return lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.dout, retain_graph=True)


def error_of(result: Any, case: Case, x: Inputs) -> float:
    """Largest error of the last rows of head 0, out or dq, relative to the largest value there."""
    rows = slice(max(0, case.queries - ROWS_CHECKED), case.queries)
    head = (slice(0, 1), slice(None), slice(0, 1))
    part = (slice(0, 1), rows, slice(0, 1))
    k, v = (y[0] if case.decode else y for y in (x.k, x.v))
    q, k, v = (y.detach().cpu() for y in (x.q[part], k[head], v[head]))
    if case.direction == "backward":
        got = result[0]
        dout = x.dout[part].cpu()
        want = onefold.reference.gradients(q, k, v, causal=case.causal, dout=dout).q
    else:
        got, want = result, onefold.reference.attention(q, k, v, causal=case.causal)[0]
    return ((got.detach()[part].cpu().double() - want).abs().max() / want.abs().max()).item()
