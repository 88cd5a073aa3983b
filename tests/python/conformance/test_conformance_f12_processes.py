"""Devices, streams, processes and hangs: a call leaves nothing behind and waits for nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onefold
from draws import seeded
from gates import Case, Found, assert_same_bits, hold_bounds, make_case, normal, run
from processes import python

ISAS = ("avx512_bf16", "avx512", "avx2", "baseline")


def test_f12_1_tensors_of_a_device_without_a_backend_are_refused_by_name():
    q, k = torch.zeros(1, 2, 1, 8, device="meta"), torch.zeros(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match="q is on meta"):
        onefold.attention(q, q, q)
    with pytest.raises(NotImplementedError, match="k is on meta"):
        onefold.attention(k, q, k)


def test_f12_1_process_wide_settings_are_left_alone(device):
    before = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_rng_state().clone(),
    )
    tiny = torch.tensor([1e-40])  # flushed if the call left flush-to-zero behind
    case = make_case("normal", torch.float32, (2, 200, 300, 4, 2, 24, 16), causal=True)
    run(case, device)
    assert (tiny * 1.0 != 0).all()
    after = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    assert after == before[:4]
    assert torch.equal(torch.get_rng_state(), before[4])


def test_f12_1_a_call_from_the_autograd_thread_and_from_another_is_the_same(device):
    import threading

    case = make_case("normal", torch.float32, (2, 20, 30, 4, 2, 24, 16))
    want = run(case, device)
    got: list[Found] = []
    worker = threading.Thread(target=lambda: got.append(run(case, device)))
    worker.start()
    worker.join(timeout=60)
    assert_same_bits(got[0], want)


def test_f12_2_inputs_written_just_before_the_call_are_the_ones_it_sees(device):
    q, k, v = (torch.zeros(1, 40, 2, 16, device=device) for _ in range(3))
    for n in range(5):
        fresh = [normal(seeded(3 * n + i), 1, 40, 2, 16).float() for i in range(3)]
        for x, y in zip((q, k, v), fresh, strict=True):
            x.copy_(y)
        assert_same_bits(onefold.attention(q, k, v).cpu(), run(Case(*fresh), device).out)


def test_f12_3_index_lists_of_two_calls_in_a_row_do_not_mix(device):
    g = seeded()
    q, k, v = (normal(g, 60, 2, 16).float() for _ in range(3))
    first = {"cu_seqlens_q": [0, 20, 60], "cu_seqlens_k": [0, 40, 60]}
    second = {"cu_seqlens_q": [0, 50, 60], "cu_seqlens_k": [0, 1, 60]}
    want = [run(Case(q, k, v, x), device) for x in (first, second)]
    for _ in range(5):
        for options, expected in zip((first, second), want, strict=True):
            assert_same_bits(run(Case(q, k, v, options), device), expected)


@pytest.mark.parametrize("hint", [1, 1024, 10**9])
def test_f12_4_maxima_are_hints_and_never_limits(hint, device):
    g = seeded()
    q = normal(g, 12, 2, 16).float()
    k, v = (normal(g, 90, 2, 16).float() for _ in range(2))
    cu = {"cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": [0, 80, 90]}
    want = run(Case(q, k, v, cu), device)
    hinted = cu | {"max_seqlen_q": hint, "max_seqlen_k": hint}
    assert_same_bits(run(Case(q, k, v, hinted), device), want)


@pytest.mark.parametrize("causal", [False, True])
def test_f12_5_values_that_encode_their_own_index_are_not_permuted(causal, dtype, device):
    """Uniform weights over one visible key each: out must be exactly that key's own code."""
    batch, length, heads, dim = 2, 130, 4, 16
    b, j, h, d = torch.meshgrid(
        *(torch.arange(n) for n in (batch, length, heads, dim)), indexing="ij"
    )
    code = (((b * 7 + j) * 5 + h * 3) * 11 + d) % 251
    v = code.to(dtype)  # exact in every dtype
    q = torch.zeros(batch, length, heads, 8, dtype=dtype)
    out = onefold.attention(q.to(device), q.to(device), v.to(device), window=(0, 0)).cpu()
    if dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(out, v)
    else:
        assert ((out - v).abs() <= 2 * torch.finfo(dtype).eps * v.abs()).all()
    case = make_case("normal", dtype, (batch, length, length, heads, 2, dim, dim), causal=causal)
    case.v = code[:, :, :2].to(dtype)
    case.dout = (code % 17).to(dtype)
    hold_bounds(case, device)


def onefold_offers(isa: str) -> bool:
    return python("import onefold; print(onefold.info())", ONEFOLD_BACKEND=isa).returncode == 0


@pytest.mark.parametrize("isa", ISAS)
def test_f12_5_every_instruction_set_meets_the_same_gates(isa):
    """The families again, in a process of its own, on a path that this processor would not take."""
    if not onefold_offers(isa):
        pytest.skip(f"this processor has no {isa}")
    folder = Path(__file__).parents[1] / "accuracy"
    files = [folder / "test_gates_families.py", folder / "test_gates_edges.py"]
    some = "borders or bounds and (normal or deviation) or nan or nothing or predicted and normal"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", some, *files],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "ONEFOLD_BACKEND": isa},
    )
    assert result.returncode == 0, result.stdout[-3000:]


def test_f12_5_an_unknown_backend_is_refused_with_those_there_are():
    result = python(
        """
        import numpy, onefold
        q = numpy.zeros((1, 2, 1, 8), numpy.float32)
        onefold.attention(q, q, q)
        """,
        ONEFOLD_BACKEND="abacus",
    )
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "ONEFOLD_BACKEND is abacus" in last
    assert "baseline" in last


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [16, 17, 3, 1])
def test_f12_6_a_zigzag_of_simulated_ranks_over_lengths_that_do_not_divide(length, ranks, device):
    """Each rank holds one block from the front and its mirror from the back; causal."""
    g = seeded()
    q, k, v = (normal(g, 1, length, 2, 16).float() for _ in range(3))
    blocks = 2 * ranks
    cuts = [length * n // blocks for n in range(blocks + 1)]
    out, lse = torch.empty_like(q), torch.empty(1, 2, length)
    for rank in range(ranks):
        for block in (rank, blocks - 1 - rank):
            rows = slice(cuts[block], cuts[block + 1])
            outs, lses = [], []
            for other in range(blocks):
                keys = slice(cuts[other], cuts[other + 1])
                mask = torch.arange(length)[keys] <= torch.arange(length)[rows, None]
                part = run(Case(q[:, rows], k[:, keys], v[:, keys], {"mask": mask}), device)
                outs.append(part.out)
                lses.append(part.lse)
            out[:, rows], lse[:, :, rows] = onefold.merge_states(outs, lses)
    whole = Case(q, k, v, {"causal": True})
    hold_bounds(whole, device, Found(out, lse))


def test_f12_7_a_child_that_forked_after_a_call_computes_and_does_not_hang():
    result = python(
        """
        import os, sys, numpy, onefold
        onefold.set_num_threads(4)
        rng = numpy.random.default_rng(0)
        q, k, v = (rng.standard_normal((2, 300, 4, 32)).astype(numpy.float32) for _ in range(3))
        want = onefold.attention(q, k, v, causal=True)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                same = numpy.array_equal(onefold.attention(q, k, v, causal=True), want)
                os._exit(0 if same else 3)
            status = os.waitpid(child, 0)[1]
            assert os.waitstatus_to_exitcode(status) == 0, status
            assert numpy.array_equal(onefold.attention(q, k, v, causal=True), want)
        print("done")
        """
    )
    assert result.stdout.strip() == "done", result.stderr


def test_f12_7_a_process_that_ends_while_threads_wait_does_not_hang():
    result = python(
        """
        import numpy, onefold, threading, time
        onefold.set_num_threads(7)
        q = numpy.zeros((4, 200, 4, 32), numpy.float32)
        called = threading.Event()
        def work():
            onefold.attention(q, q, q)
            called.set()
            time.sleep(3600)
        threading.Thread(target=work, daemon=True).start()
        for _ in range(5):
            onefold.attention(q, q, q)
        called.wait()
        print("done", flush=True)
        """
    )
    assert result.stdout.strip() == "done"
    assert result.returncode == 0, result.stderr[-500:]


def test_f12_7_a_process_that_ends_while_daemon_threads_are_inside_calls_ends_well():
    """Short calls from several threads: at the end some are always about to take the GIL again.

    With NumPy, because PyTorch's own operators abort such a process.
    """
    result = python(
        """
        import threading, numpy, onefold
        q = numpy.ones((1, 30, 2, 32), dtype=numpy.float32)
        busy = [threading.Event() for _ in range(4)]
        def work(called):
            while True:
                onefold.attention(q, q, q)
                called.set()
        for called in busy:
            threading.Thread(target=work, args=(called,), daemon=True).start()
        for called in busy:
            called.wait()
        print("done", flush=True)
        """
    )
    assert result.stdout.strip() == "done"
    assert result.returncode == 0, result.stderr[-500:]


def test_f12_7_an_error_inside_a_call_leaves_the_threads_usable(device):
    q, k, v = (normal(seeded(n), 2, 40, 2, 16).float().to(device) for n in range(3))
    want = onefold.attention(q, k, v)
    for _ in range(3):
        with pytest.raises(ValueError):
            onefold.attention(q, k[:, :, :1, :5], v)
        assert_same_bits(onefold.attention(q, k, v), want)


def test_f12_8_more_threads_than_processors_and_one_are_both_fine(device):
    before = onefold.get_num_threads()
    case = make_case("normal", torch.float32, (2, 200, 100, 4, 2, 16, 16), causal=True)
    want = run(case, device)
    try:
        for count in (1, 3, 16, 64):
            onefold.set_num_threads(count)
            assert onefold.get_num_threads() == count
            assert_same_bits(run(case, device), want)
    finally:
        onefold.set_num_threads(before)
    with pytest.raises(ValueError, match="count is -1"):
        onefold.set_num_threads(-1)
