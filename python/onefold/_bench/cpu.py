"""Measuring on the CPU: candidates in turn, with a probe of the machine between the rounds.

The probe is what the same threads reach at float32 multiply-adds with onefold's instruction set or,
for decoding, at reading the same copies of K and V. A round counts when the probes before and after
it are near the usual.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import onefold
from onefold import _core
from onefold._bench import attentions
from onefold._bench.cases import Case, Record, record_of

MIN_SECONDS = 0.02  # a sample repeats a call until it takes this long
# Before a sample or a probe. The threads of whoever came before go on spinning for some
# milliseconds (libgomp's, which torch uses, for about seven) on processors that are wanted now.
SETTLE_SECONDS = 0.01
PROBE_SECONDS = 0.03
# A candidate whose rounds would take longer sits some of them out.
MOST_SECONDS = 2.5
STEADY = 0.95  # of the median probe
HOST_LENGTHS = (1, 16, 64)
HOST_HEADS, HOST_HEAD_DIM = 8, 64


def keep_freed_memory() -> None:
    """Has glibc keep what is freed, so that results land in pages the process already has.

    A training loop's do after its first steps. Fresh pages cost every candidate the same time per
    byte, in some virtual machines as much as a sixth of a call, and say nothing of attention.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    mallopt(m_mmap_threshold, 1 << 30)
    mallopt(m_trim_threshold, (1 << 31) - 1)


def seconds_of(call: attentions.Call) -> float:
    """Of one call, averaged over as many as a sample needs, on processors that have settled."""
    time.sleep(SETTLE_SECONDS)
    calls = 0
    start = time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= MIN_SECONDS:
            return elapsed / calls


def seconds_of_one_thread(call: attentions.Call, threads: int) -> float:
    """The same of onefold with one thread, which afterwards has so many again, started."""
    onefold.set_num_threads(1)
    seconds = seconds_of(call)
    onefold.set_num_threads(threads)
    call()
    return seconds


def make_probe(case: Case, x: attentions.Inputs, pool: ThreadPoolExecutor) -> Callable[[], float]:
    """What all threads reach together, per second and in units of `case.work`."""
    parts = [y.view(-1).chunk(case.threads) for y in (x.k, x.v)]
    seconds = [PROBE_SECONDS] * case.threads

    def probe() -> float:
        time.sleep(SETTLE_SECONDS)
        if case.decode:
            return sum(pool.map(_core.read_rate, *parts, seconds))
        return sum(pool.map(_core.fma_rate, seconds))

    return probe


def rounds_that_count(probes: Sequence[float]) -> list[int]:
    """Of the rounds between these probes: those whose neighbours are near the usual."""
    least = STEADY * statistics.median(probes)
    return [i for i in range(len(probes) - 1) if min(probes[i : i + 2]) >= least]


def measure(case: Case, names: Sequence[str], rounds: int) -> list[Record]:
    """One line per candidate."""
    torch.set_num_threads(case.threads)
    onefold.set_num_threads(case.threads)
    load = os.getloadavg()[0]
    x = attentions.make_inputs(case)
    with (
        torch.set_grad_enabled(case.direction == "backward"),
        ThreadPoolExecutor(case.threads) as pool,
    ):
        probe = make_probe(case, x, pool)
        calls, errors, turns = {}, {}, {}
        for name in names:
            call = calls[name] = attentions.make_call(attentions.ATTENTIONS[name], case, x)
            start = time.perf_counter()
            result = call()
            first = time.perf_counter() - start
            errors[name] = attentions.error_of(result, case, x)
            turns[name] = min(rounds, max(1, int(MOST_SECONDS / first)))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        alone = []  # onefold with one thread, of the same rounds
        probes = [probe()]
        for i in range(rounds):
            for name in names:
                if i < turns[name]:
                    seconds[name].append(seconds_of(calls[name]))
                    if name == "onefold" and case.threads > 1:
                        alone.append(seconds_of_one_thread(calls[name], case.threads))
            probes.append(probe())
    counting = rounds_that_count(probes)
    lines = []
    for name in names:
        timed = [(s, (probes[i] + probes[i + 1]) / 2) for i, s in enumerate(seconds[name])]
        steady = [timed[i] for i in counting if i < len(timed)]
        line = record_of(name, case, steady or timed, errors[name])
        about: Record = {"load": load, "rounds_left_out": len(timed) - len(steady)}
        if name == "onefold" and alone:
            about["over_one_thread"] = statistics.median(
                one / all_threads for one, all_threads in zip(alone, seconds[name], strict=True)
            )
        lines.append(line | machine() | about)
    return lines


def machine() -> Record:
    """What every line is about."""
    return {
        "isa": _core.instruction_set(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu_model(),
    }


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as text:
            found = [line for line in text if line.startswith("model name")]
    except OSError:
        found = []
    return found[0].split(":", 1)[1].strip() if found else platform.machine()


# ---- what a small call costs ----


def least_seconds(call: attentions.Call) -> float:
    """Of one call, the least average of a few samples."""
    call()
    return min(seconds_of(call) for _ in range(5))


def host_lines() -> list[Record]:
    """One call of few positions, one thread, causal, float32: what a caller waits for."""
    torch.set_num_threads(1)
    onefold.set_num_threads(1)
    lines = []
    for length in HOST_LENGTHS:
        shape = (1, length, HOST_HEADS, HOST_HEAD_DIM)
        q, k, v = (torch.randn(shape) for _ in range(3))
        for name in ("onefold", "sdpa"):
            attention = attentions.ATTENTIONS[name]
            line: Record = {"kind": "host", "candidate": name, "seqlen": length, "threads": 1}
            for key, requires_grad in (("seconds", False), ("seconds_with_autograd", True)):
                inputs = [x.requires_grad_(requires_grad) for x in (q, k, v)]
                with torch.set_grad_enabled(requires_grad):
                    line[key] = least_seconds(lambda: attention(*inputs, True))  # noqa: B023
            lines.append(line | machine() | {"load": os.getloadavg()[0]})
    return lines


def host_sentence(lines: Sequence[Record]) -> str:
    """What `host_lines` found, in one line."""
    told = {}
    for line in lines:
        times = f"{1e6 * line['seconds']:.1f} ({1e6 * line['seconds_with_autograd']:.1f})"
        told.setdefault(line["candidate"], []).append(times)
    lengths = ", ".join(str(n) for n in HOST_LENGTHS)
    found = "; ".join(f"{name} {', '.join(times)}" for name, times in told.items())
    return f"us of a call of {lengths} positions (with autograd): {found}"
