"""PyTorch on a CUDA device: streams, graphs, devices, memory, compilers. Skipped without one.

What an answer must be is tested elsewhere, with `device` as a parameter; here is what only a device
can get wrong.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import onefold  # noqa: E402
from gates import Case, assert_same_bits, hold_bounds, make_case  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

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


# ---- memory ----


def test_memory_is_the_result_and_a_workspace_that_is_given_back():
    inputs, mask = make_inputs(batch=1, sq=8192, sk=8192, heads=2), make_mask(8192, 8192)
    onefold.attention(*inputs, mask=mask)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = onefold.attention(*inputs, mask=mask)
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    bits_of_classes = 2 * (8192 // 64) * (8192 // 16)  # for the smallest tiles there are
    assert held == out.nbytes
    assert peak <= out.nbytes + bits_of_classes // 8 + 4096


def test_nothing_is_allocated_beside_torch():
    inputs, mask = make_inputs(), make_mask()
    onefold.attention(*inputs, mask=mask)
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    for _ in range(100):
        onefold.attention(*inputs, mask=mask)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.mem_get_info()[0] == free


def test_a_long_sequence_takes_no_memory_that_grows_with_its_square():
    shape = (1, 1 << 16, 1, 64)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()] * 3
    gradients(inputs, causal=True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(inputs, causal=True)
    most = 64 * inputs[0].nbytes  # the scores would be 8 GiB, 1024 times that
    assert torch.cuda.max_memory_allocated() - before <= most


# ---- sizes beyond 32 bits ----


def gib_free() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


def far_apart(x, axis, stride):
    """The values of x with that stride on that axis, in a buffer of its own."""
    strides = list(x.stride())
    strides[axis] = stride
    last = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    buffer = torch.empty(last + 1, dtype=x.dtype, device="cuda")
    return buffer.as_strided(x.shape, strides).copy_(x)


@pytest.mark.skipif(gib_free() < 24, reason="needs 24 GiB of free device memory")
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_beyond_two_to_the_31_are_found(axis):
    inputs = make_inputs(batch=3, sq=5, sk=5, heads=4)
    inputs[1:] = [x.repeat_interleave(2, 2) for x in inputs[1:]]
    stride = 2**31 // (inputs[0].shape[axis] - 1) // 8 * 8 + 8
    far = [far_apart(x, axis, stride) for x in inputs]
    want, got = gradients(inputs, causal=True), gradients(far, causal=True)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a.cpu(), b.cpu())


@pytest.mark.parametrize("shape", [(70_000, 1, 2, 32), (1, 1, 70_000, 32)])
def test_more_than_65535_batches_or_heads_work(shape):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(torch.float16).cuda() for _ in range(3)]
    out, dq, dk, dv = gradients(inputs)  # one key each: out is v, and lse the score
    assert_same_bits(out.cpu(), inputs[2].cpu())
    assert_same_bits(dv.cpu(), out.float().cos().half().cpu())
    for got, other in ((dq, inputs[1]), (dk, inputs[0])):
        want = shape[-1] ** -0.5 * other.double()
        assert (got - want).abs().max() <= 2.0**-10 * want.abs().max()


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


# ---- dropout ----


def dropped(seed, device, p=0.3):
    """Which weights are dropped: with the identity as v, out is the weights themselves."""
    q, k = (torch.randn(2, 40, 2, 16).to(device) for _ in range(2))
    v = torch.eye(40)[None, :, None].expand(2, 40, 2, 40).contiguous().to(device)
    return (onefold.attention(q, k, v, dropout_p=p, seed=seed) == 0).cpu()


@pytest.mark.parametrize("seed", [0, 11, 2**63 + 5, -1])
def test_the_same_weights_are_dropped_as_on_the_cpu_whoever_holds_the_seed(seed):
    want = dropped(seed, "cpu")
    signed = seed - 2**64 if seed >= 2**63 else seed
    for held in (seed, torch.tensor(signed), torch.tensor([signed], device="cuda")):
        assert torch.equal(dropped(held, "cuda"), want)


def test_the_seed_is_drawn_on_the_device_by_its_generator():
    inputs = make_inputs()
    torch.cuda.manual_seed(3)
    first = gradients(inputs, dropout_p=0.4)
    second = gradients(inputs, dropout_p=0.4)
    torch.cuda.manual_seed(3)
    again = gradients(inputs, dropout_p=0.4)
    assert not torch.equal(first[0], second[0])
    for a, b in zip(first, again, strict=True):
        assert_same_bits(a.cpu(), b.cpu())


def test_a_checkpoint_drops_the_same_weights_twice():
    def call(q, k, v):
        return onefold.attention(q, k, v, dropout_p=0.4)

    found = []
    for function in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        torch.cuda.manual_seed(5)
        inputs = [x.requires_grad_() for x in make_inputs()]
        found.append(torch.autograd.grad(function(*inputs).float().sin().sum(), inputs))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a.cpu(), b.cpu())


def test_no_call_waits_for_the_device():
    inputs = [x.requires_grad_() for x in make_inputs()]
    mask, weight = make_mask(), torch.randn_like(inputs[0])

    def step():
        out = onefold.attention(*inputs, mask=mask, dropout_p=0.2, causal=True)
        return torch.autograd.grad(out, inputs, weight)

    step()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    event = torch.cuda.Event()
    event.record()
    step()
    assert not event.query(), "a call waited for the kernel before it"


# ---- autocast and compilers ----


def test_autocast_casts_to_its_dtype():
    inputs = make_inputs(torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            out = onefold.attention(*inputs)
        assert out.dtype == dtype
        assert_same_bits(out.cpu(), onefold.attention(*(x.to(dtype) for x in inputs)).cpu())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert onefold.attention(*inputs).dtype == torch.float32


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_attention_gives_the_bits_of_eager(mode):
    def call(q, k, v, mask):
        return onefold.attention(q * 2, k, v, mask=mask, causal=True, softcap=9.0)

    torch._dynamo.reset()
    inputs, mask = make_inputs(torch.float16), make_mask()
    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for _ in range(4):  # reduce-overhead captures a graph after the first calls
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = []
        for function in (compiled, call):
            out = function(*leaves, mask)
            results.append([out, *torch.autograd.grad(out.float().sin().sum(), leaves)])
            results[-1] = [x.detach().clone() for x in results[-1]]
        for a, b in zip(*results, strict=True):
            assert_same_bits(a.cpu(), b.cpu())
    torch._dynamo.reset()


def test_an_exported_program_gives_the_bits_of_eager():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return onefold.attention(q, k, v, causal=True, dropout_p=0.1, seed=4)

    inputs = tuple(make_inputs())
    program = torch.export.export(Module(), inputs)
    assert_same_bits(program.module()(*inputs).cpu(), Module()(*inputs).cpu())


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_operators_pass_the_checks_of_torch(name):
    pytest.importorskip("expecttest")
    q, k, v = make_inputs()
    question = [q, k, v, None, None, None, None, None, None, None, None, None]
    question += [None, "bottom_right", None, None, 0.0, 0.0, None, None]
    arguments = question
    if name == "backward":
        out, lse = torch.ops.onefold.forward(*question)
        wanted = [True, True, True, False, False, False]
        arguments = [torch.randn_like(out), None, *question, out, lse, True, wanted]
    torch.library.opcheck(getattr(torch.ops.onefold, name).default, tuple(arguments))


# ---- determinism ----


def test_gradients_repeat_bit_for_bit_under_torchs_own_setting():
    inputs = make_inputs(batch=1, sq=700, sk=700, heads=8)
    options = {"causal": True, "dropout_p": 0.1, "seed": 1}
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        first = gradients(inputs, **options)
        for _ in range(5):
            for a, b in zip(gradients(inputs, **options), first, strict=True):
                assert_same_bits(a, b)
    finally:
        torch.use_deterministic_algorithms(before)
    for a, b in zip(gradients(inputs, deterministic=True, **options), first, strict=True):
        assert_same_bits(a, b)


# ---- merging, sdpa, explain ----


def test_parts_merge_on_the_device_with_gradients():
    q, k, v = make_inputs(torch.float32)
    parts = [
        onefold.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in ((0, 50), (50, 50), (50, 130))
    ]
    out, lse = onefold.merge_states(*zip(*parts, strict=True))
    case = Case(*(x.cpu() for x in (q, k, v)))
    want, want_lse = case.exact
    size = 2.0**-20 * v.abs().max().item()
    assert (out.cpu() - want).abs().max() <= size
    assert (lse.cpu() - want_lse).abs().max() <= 2.0**-20 * want_lse.abs().max()
    outs, lses = (
        torch.randn(s, device="cuda", dtype=torch.float64, requires_grad=True)
        for s in ((3, 1, 2, 2, 3), (3, 1, 2, 2))
    )
    assert torch.autograd.gradcheck(onefold.merge_states, (outs, lses))


def test_merging_parts_of_two_devices_is_refused():
    outs, lses = torch.zeros(2, 3, 4, device="cuda"), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"^lses is on the CPU: the call runs on CUDA device 0"):
        onefold.merge_states(outs, lses)


def test_an_empty_part_changes_nothing_whatever_it_holds():
    outs = torch.tensor([[[1.0, 2.0]], [[float("nan"), float("inf")]]], device="cuda")
    lses = torch.tensor([[0.5], [-float("inf")]], device="cuda")
    out, lse = onefold.merge_states(outs, lses)
    assert out.tolist() == [[1.0, 2.0]]
    assert lse.tolist() == [0.5]
    _, none = onefold.merge_states(outs[1:], lses[1:])
    assert none.tolist() == [-float("inf")]


def test_sdpa_on_the_device_agrees_with_that_of_torch():
    q, k, v = (x.transpose(1, 2).float() for x in make_inputs())
    mask = make_mask()
    mask[3] = False
    got = onefold.sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    want = sdpa(q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True)
    want[:, :, 3] = 0.0
    assert (got - want).abs().max() <= 2.0**-18 * v.abs().max()


def test_explain_names_the_kernel_and_what_keeps_it_from_a_faster_one(capsys):
    inputs = make_inputs()
    plain = onefold.explain(*inputs).forward
    assert plain.backend == "cuda"
    assert plain.kernel.startswith("portable_forward ")
    assert "element by element" in onefold.explain(*(x[..., 1:] for x in inputs)).forward.why
    assert "padded to" in onefold.explain(*(x[..., :40] for x in inputs)).forward.why
    masked = onefold.explain(*inputs, mask=make_mask()).forward
    assert masked.workspace_bytes > 0
    assert "its tiles are classified" in masked.why
    assert "smaller tiles" in masked.why
    assert "float32" in onefold.explain(*(x.float() for x in inputs)).forward.why
    assert "backend cuda" in capsys.readouterr().out
