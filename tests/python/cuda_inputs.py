"""Inputs and gradients on a CUDA device, for the tests that need one."""

from __future__ import annotations

import torch

import onefold

BUSY_CYCLES = 50_000_000  # some 25 ms: longer than the host needs to give all later orders


def make_inputs(dtype=torch.bfloat16, batch=2, sq=65, sk=130, heads=4, dim=64, draw=0):
    """q, k, v on the device, with half as many key heads."""
    generator = torch.Generator().manual_seed(draw)
    shapes = ((batch, sq, heads, dim), (batch, sk, heads // 2, dim), (batch, sk, heads // 2, dim))
    return [torch.randn(s, generator=generator).to(dtype).cuda() for s in shapes]


def make_mask(sq=65, sk=130, draw=0):
    return (torch.rand(sq, sk, generator=torch.Generator().manual_seed(draw)) < 0.7).cuda()


def gradients(inputs, **options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, lse = onefold.attention(*inputs, return_lse=True, **options)
    loss = out.float().sin().sum() + torch.where(lse.isinf(), 0.0, lse).sum()
    return [out.detach(), *torch.autograd.grad(loss, inputs)]
