"""The attentions that the demo compares, behind one signature (tiny_gpt.Attention).

Each maps q: [B, S, H, D], k and v: [B, S, G, D] to [B, S, H, D]; causal, scaled by 1 / sqrt(D).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import onefold
from onefold._demo.tiny_gpt import Attention


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """onefold: one pass over the keys, scores never stored."""
    return onefold.attention(q, k, v, causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What PyTorch has; it wants heads before positions."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, softmax(Q K^T / sqrt(D)) V, with its S x S matrix in memory."""
    queries_per_key = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(queries_per_key, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5  # [B, H, S, S]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"onefold": fused, "sdpa": sdpa, "plain": plain}
