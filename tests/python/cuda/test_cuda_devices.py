"""PyTorch on a CUDA device: streams, graphs, devices. Skipped without one.

What an answer must be is tested elsewhere, with `device` as a parameter; here is what only a device
can get wrong.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import onefold  # noqa: E402
from cuda_inputs import BUSY_CYCLES, gradients, make_inputs, make_mask  # noqa: E402
from gates import Case, assert_same_bits, hold_bounds, make_case  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---- streams ----


def test_a_call_waits_for_what_its_stream_was_told_before_and_holds_up_what_comes_after():
    fresh, mask = make_inputs(draw=1), make_mask()
    want = onefold.attention(*fresh, mask=mask)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs = [torch.full_like(x, float("nan")) for x in fresh]
        torch.cuda._sleep(BUSY_CYCLES)
        for x, value in zip(inputs, fresh, strict=True):
            x.copy_(value)
        got = onefold.attention(*inputs, mask=mask)
        for x in inputs:
            x.zero_()
    assert not stream.query(), "the busy kernel ended too early for this test to mean anything"
    stream.synchronize()
    assert_same_bits(got.cpu(), want.cpu())


def test_the_backward_pass_runs_on_the_stream_of_the_forward_pass():
    inputs = make_inputs()
    want = gradients(inputs, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(BUSY_CYCLES)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, lse = onefold.attention(*leaves, causal=True, return_lse=True)
        loss = out.float().sin().sum() + torch.where(lse.isinf(), 0.0, lse).sum()
    found = torch.autograd.grad(loss, leaves)
    torch.cuda.synchronize()
    for a, b in zip(found, want[1:], strict=True):
        assert_same_bits(a.cpu(), b.cpu())


def test_two_streams_and_two_threads_at_once_share_nothing():
    draws = [(make_inputs(draw=n), make_mask(draw=n)) for n in range(2)]
    want = [onefold.attention(*inputs, mask=mask).cpu() for inputs, mask in draws]
    start = threading.Barrier(2)

    def work(n):
        inputs, mask = draws[n]
        found = []
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):  # each takes a workspace and gives it back
                found.append(onefold.attention(*inputs, mask=mask))
            torch.cuda.current_stream().synchronize()
        return [x.cpu() for x in found]

    with ThreadPoolExecutor(2) as pool:
        for found, expected in zip(pool.map(work, range(2)), want, strict=True):
            for x in found:
                assert_same_bits(x, expected)


def test_first_calls_of_many_threads_at_once_all_get_their_kernels():
    inputs = make_inputs(torch.float16, dim=96, heads=2)
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        return onefold.attention(*inputs, softcap=3.0).cpu()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    for x in found:
        assert_same_bits(x, found[0])


# ---- graphs ----


def captured(call):
    """A graph of what `call` does, and its results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def test_a_captured_call_replays_with_what_its_inputs_hold_then():
    inputs, mask = make_inputs(), make_mask()
    onefold.warmup(*inputs, mask=mask, causal=True)
    graph, out = captured(lambda: onefold.attention(*inputs, mask=mask, causal=True))
    for draw in (1, 2):
        for x, value in zip(inputs, make_inputs(draw=draw), strict=True):
            x.copy_(value)
        mask.copy_(make_mask(draw=draw))
        out.zero_()
        graph.replay()
        assert_same_bits(out.cpu(), onefold.attention(*inputs, mask=mask, causal=True).cpu())


def test_a_captured_training_step_replays():
    inputs = [x.requires_grad_() for x in make_inputs()]
    weight = torch.randn_like(inputs[0])

    def step():
        out = onefold.attention(*inputs, causal=True, softcap=5.0)
        return [out, *torch.autograd.grad(out, inputs, weight)]

    step()
    torch.cuda.synchronize()
    graph, results = captured(step)
    with torch.no_grad():
        for x, value in zip(inputs, make_inputs(draw=3), strict=True):
            x.copy_(value)
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert_same_bits(got.detach().cpu(), want.detach().cpu())


def test_lengths_are_read_at_every_replay():
    q, k, v = (x.flatten(0, 1) for x in make_inputs())
    cu_q = torch.tensor([0, 65, 130], device="cuda")
    cu_k = torch.tensor([0, 130, 260], device="cuda")
    used = torch.tensor([130, 130], device="cuda")

    def call():
        options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": used}
        return onefold.attention(q, k, v, causal=True, **options)

    call()
    graph, out = captured(call)
    for offsets_q, offsets_k, lengths in (
        ((0, 1, 130), (0, 7, 260), (7, 100)),
        ((0, 0, 64), (0, 0, 31), (0, 31)),
        ((0, 130, 130), (0, 260, 260), (0, 0)),
    ):
        cu_q.copy_(torch.tensor(offsets_q))
        cu_k.copy_(torch.tensor(offsets_k))
        used.copy_(torch.tensor(lengths))
        graph.replay()
        assert_same_bits(out.cpu(), call().cpu())


def test_every_replay_drops_other_weights():
    inputs = make_inputs()
    onefold.attention(*inputs, dropout_p=0.5)
    graph, out = captured(lambda: onefold.attention(*inputs, dropout_p=0.5))
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_kernel_that_is_not_ready_is_an_error_in_a_capture_and_ready_after_warmup():
    inputs = make_inputs(torch.float16, dim=160, heads=2)
    options = {"softcap": 7.0}
    with pytest.raises(RuntimeError, match="is not ready on device 0 while a CUDA graph"):
        captured(lambda: onefold.attention(*inputs, **options))
    names = onefold.warmup(*inputs, **options)
    assert len(names) == 1
    assert names[0].startswith("portable_forward for sm_")
    graph, out = captured(lambda: onefold.attention(*inputs, **options))
    graph.replay()
    assert_same_bits(out.cpu(), onefold.attention(*inputs, **options).cpu())


@pytest.mark.parametrize("value", [[0, 65, 130], torch.tensor([0, 65, 130])])
def test_lengths_on_the_host_are_refused_in_a_capture(value):
    q, k, v = (x.flatten(0, 1) for x in make_inputs(sk=65))
    cu = torch.tensor([0, 65, 130], device="cuda")
    onefold.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(ValueError, match=r"cu_seqlens_k is (a list|on cpu) while a CUDA graph"):
        captured(lambda: onefold.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=value))


# ---- devices ----


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("k", {}),
        ("v", {}),
        ("bias", {"bias": torch.zeros(1, 1)}),
        ("mask", {"mask": torch.ones(1, 1, dtype=torch.bool)}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(4)}),
        ("sinks", {"sinks": torch.ones(4)}),
    ],
)
def test_a_tensor_on_another_device_is_named(name, option):
    q, k, v = make_inputs()
    arrays = {"k": k, "v": v}
    if name in arrays:
        arrays[name] = arrays[name].cpu()
    with pytest.raises(ValueError, match=f"^{name} is on the CPU: the call runs on CUDA device 0"):
        onefold.attention(q, **arrays, **option)
    with pytest.raises(ValueError, match=r"^out is on the CPU: the call runs on CUDA device 0"):
        onefold.attention(q, k, v, out=torch.empty_like(q).cpu())


def test_q_on_the_cpu_with_keys_on_the_device_is_refused():
    q, k, v = make_inputs()
    with pytest.raises(ValueError, match=r"^k is on CUDA device 0: the call runs on the CPU"):
        onefold.attention(q.cpu(), k, v)


@pytest.mark.parametrize("kind", ["list", "int32 on the host", "int64 on the device"])
def test_lengths_may_lie_anywhere(kind):
    q, k, v = make_inputs()
    want = hold_bounds(
        Case(*(x.cpu() for x in (q, k, v)), {"seqused_q": [3, 65], "seqused_k": [130, 0]}), "cuda"
    )

    def lengths(values):
        if kind == "list":
            return values
        dtype, device = (torch.int32, "cpu") if "host" in kind else (torch.int64, "cuda")
        return torch.tensor(values, dtype=dtype, device=device)

    got = onefold.attention(q, k, v, seqused_q=lengths([3, 65]), seqused_k=lengths([130, 0]))
    assert_same_bits(got.cpu(), want.out)
    on_the_host = [x.float().cpu() for x in (q, k, v)]
    host = onefold.attention(*on_the_host, seqused_q=[3, 65], seqused_k=[130, 0])
    moved = onefold.attention(
        *on_the_host,
        seqused_q=torch.tensor([3, 65], device="cuda"),
        seqused_k=torch.tensor([130, 0], device="cuda"),
    )
    assert_same_bits(moved, host)


def test_float64_and_wide_heads_are_refused_in_one_sentence():
    q, k, v = make_inputs()
    with pytest.raises(NotImplementedError, match=r"^q is float64 on CUDA: float16, bfloat16 or"):
        onefold.attention(q.double(), k.double(), v.double())
    wide = torch.zeros(1, 2, 1, 257, device="cuda")
    with pytest.raises(NotImplementedError, match=r"^head_dim is 257 on CUDA: at most 256"):
        onefold.attention(wide, wide, wide)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_call_runs_on_the_device_of_its_inputs_and_leaves_the_current_one():
    inputs, mask = make_inputs(), make_mask()
    want = gradients(inputs, mask=mask)
    got = gradients([x.to("cuda:1") for x in inputs], mask=mask.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    for a, b in zip(got, want, strict=True):
        assert a.device.index == 1
        assert_same_bits(a.cpu(), b.cpu())
    with pytest.raises(ValueError, match=r"^k is on CUDA device 1: the call runs on CUDA device 0"):
        onefold.attention(inputs[0], inputs[1].to("cuda:1"), inputs[2])


def test_a_call_leaves_process_wide_settings_alone():
    flags = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch.cuda.current_device(),
        torch.cuda.current_stream().cuda_stream,
    )
    gradients(make_inputs(torch.float32))
    assert flags == (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch.cuda.current_device(),
        torch.cuda.current_stream().cuda_stream,
    )


def test_float32_is_never_silently_tf32():
    case = make_case("normal", torch.float32, (1, 64, 64, 1, 1, 64, 64))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        hold_bounds(case, "cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
