"""Time and peak memory of one forward and backward pass against sequence length.

Time is taken in this process, the attentions in turn. On a GPU so is memory, of which torch's
allocator keeps count. On the CPU it is taken where nothing else has used
any: `python -m onefold._demo.sweep` forks a child for every point, and the child reports how far
the pass raised its peak resident set, which sees every allocation, PyTorch's and onefold's alike.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from onefold._demo.attentions import ATTENTIONS
from onefold._demo.tiny_gpt import Attention
from onefold._demo.training import finish

HEADS, HEAD_DIM = 4, 64  # one sequence, as many key heads as query heads, fp32
LENGTHS = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192, 16384)}
ROUNDS, LONG_SECONDS = 5, 0.5  # a point slower than that is taken three times


def inputs(seqlen: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, each [1, S, H, D], standard normal."""
    generator = torch.Generator().manual_seed(seqlen)
    shape = (4, 1, seqlen, HEADS, HEAD_DIM)
    q, k, v, dout = torch.randn(shape, generator=generator).to(device).unbind(0)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def forward_backward(attention: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    torch.autograd.grad(attention(q, k, v), (q, k, v), dout)


def times(seqlen: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds by attention."""
    tensors = inputs(seqlen, device)
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    rounds = ROUNDS + 1
    done = 0
    while done < rounds:
        for name, attention in ATTENTIONS.items():
            finish(device)
            start = time.perf_counter()
            forward_backward(attention, *tensors)
            finish(device)
            seconds[name].append(time.perf_counter() - start)
        done += 1
        if max(samples[-1] for samples in seconds.values()) > LONG_SECONDS:
            rounds = min(rounds, 4)
    return {name: statistics.median(samples[1:]) for name, samples in seconds.items()}


def peak_memory_on_gpu(lengths: tuple[int, ...]) -> Iterator[tuple[str, int, int | None]]:
    """Yields (attention, seqlen, bytes beyond the inputs; None if there was not enough)."""
    for seqlen in lengths:
        for name, attention in ATTENTIONS.items():
            tensors = inputs(seqlen, "cuda")
            finish("cuda")
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                forward_backward(attention, *tensors)
                yield name, seqlen, torch.cuda.max_memory_allocated() - before
            except torch.cuda.OutOfMemoryError:
                yield name, seqlen, None


def peak_memory(lengths: tuple[int, ...]) -> Iterator[tuple[str, int, int | None]]:
    """Yields (attention, seqlen, bytes beyond the inputs; None if the child was killed)."""
    command = [sys.executable, "-m", "onefold._demo.sweep", *map(str, lengths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield tuple(json.loads(line))
    if process.returncode != 0:
        raise RuntimeError(f"the process that measures memory ended with {process.returncode}")


def resident_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_in_child(name: str, seqlen: int) -> int | None:
    """Forks; the child measures one point and hands it back through a pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # A short pass first: threads, libraries and their pages belong to no sequence length.
        forward_backward(ATTENTIONS[name], *inputs(64))
        tensors = inputs(seqlen)
        before = resident_peak_bytes()
        forward_backward(ATTENTIONS[name], *tensors)
        os.write(writer, str(resident_peak_bytes() - before).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int(answer) if answer else None


def main() -> None:
    for seqlen in map(int, sys.argv[1:]):
        for name in ATTENTIONS:
            print(json.dumps([name, seqlen, measure_in_child(name, seqlen)]), flush=True)


if __name__ == "__main__":
    main()
