"""What `onefold bench` measures on a GPU: kernels by the device's own clock, and the host's time.

A sample is as many calls in a row as take some milliseconds, between two events of the stream, so
that the host's time shows where it is longer than the kernel's, as it would in a training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from onefold import _core
from onefold._bench.cases import Case, record_of

if TYPE_CHECKING:
    from onefold._bench.attentions import Attention

MIN_SECONDS = 4e-3  # of a sample
PROBE_SIZE = 8192  # of the square matrices whose product is the probe
HOST_CALLS, HOST_ROUNDS = 100, 25  # calls of a round
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
}


def sdpa_by(backend: str) -> Attention:
    """torch's attention by one of its backends; RuntimeError where that does not do it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from onefold._bench.attentions import sdpa_attention

    def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
            return sdpa_attention(q, k, v, causal)

    return attention


def seconds_of(call: Callable[[], Any], calls: int) -> float:
    """Of one call, by the device, averaged over so many in a row."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def calls_for(call: Callable[[], Any]) -> int:
    for _ in range(3):
        call()
    return max(1, round(MIN_SECONDS / seconds_of(call, 1)))


def make_probe(dtype: str) -> Callable[[], Any]:
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randn(PROBE_SIZE, PROBE_SIZE, device="cuda", generator=generator)
        .to(getattr(torch, dtype))
        for _ in range(2)
    )  # fmt: skip
    return lambda: a @ b


def measure(case: Case, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One record per candidate that does the case."""
    import torch

    from onefold._bench.attentions import error_of, make_call, make_inputs, onefold_attention

    x = make_inputs(case)
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    with torch.set_grad_enabled(case.direction == "backward"):
        for name in names:
            attention = onefold_attention if name == "onefold" else sdpa_by(name)
            try:
                call = make_call(attention, case, x)
                errors[name] = error_of(call(), case, x)
            except RuntimeError as error:
                if name == "onefold" or "kernel" not in str(error).lower():
                    raise
                continue  # the backend says that it has no kernel for this
            calls[name] = call
        counts = {name: calls_for(call) for name, call in calls.items()}
        probe = make_probe(case.dtype)
        probe()
        probes: list[float] = []
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            probes.append(2.0 * PROBE_SIZE**3 / seconds_of(probe, 1))
            for name, call in calls.items():
                seconds[name].append(seconds_of(call, counts[name]))
    return [
        record_of(name, case, list(zip(seconds[name], probes, strict=True)), errors[name])
        for name in calls
    ]


def host_seconds(calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Until a call returns, while the device keeps up: of each call its rounds, the calls in turn,
    so that what slows the host down for a while slows all of them down."""
    import torch

    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(HOST_ROUNDS):
        for call, seconds in zip(calls, rounds, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            seconds.append((time.perf_counter() - start) / HOST_CALLS)
    return rounds


def device_facts(dtype: str) -> list[dict[str, Any]]:
    """The device, what a first call costs, and what a call costs the host."""
    import torch

    from onefold._bench.attentions import onefold_attention, sdpa_attention

    q, k, v = (
        torch.randn(1, 64, 4, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3)
    )
    start = time.perf_counter()
    onefold_attention(q, k, v, False)
    torch.cuda.synchronize()
    cold = time.perf_counter() - start
    properties = torch.cuda.get_device_properties(0)
    found: list[dict[str, Any]] = [
        {
            "kind": "device",
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "compiler": _core.compiler_info(),
            "clock_mhz": torch.cuda.clock_rate() if hasattr(torch.cuda, "clock_rate") else None,
            "first_call_seconds": cold,
        }
    ]
    attentions = {"onefold": onefold_attention, "sdpa": sdpa_attention}
    lines: list[dict[str, Any]] = [{"kind": "host", "candidate": name} for name in attentions]
    for kind, requires_grad in (("seconds", False), ("seconds_with_autograd", True)):
        q.requires_grad_(requires_grad)
        with torch.set_grad_enabled(requires_grad):
            calls = [partial(attention, q, k, v, False) for attention in attentions.values()]
            for call in calls:
                call()
            for line, seconds in zip(lines, host_seconds(calls), strict=True):
                line[kind] = median(seconds)
                line[f"least_{kind}"] = min(seconds)
    return found + lines


def sentence(line: dict[str, Any]) -> str:
    if line["kind"] == "device":
        return f"{line['name']}; first call {line['first_call_seconds']:.2f} s; {line['compiler']}"

    def text(key: str) -> str:
        least = line.get(f"least_{key}")  # older records are least times themselves
        return f"{1e6 * line[key]:.1f} us" + (f" (least {1e6 * least:.1f})" if least else "")

    without, with_autograd = text("seconds"), text("seconds_with_autograd")
    return (
        f"host time of a small call, {line['candidate']}: {without}, with autograd {with_autograd}"
    )
