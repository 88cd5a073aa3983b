"""PyTorch on a CUDA device: memory, dropout, compilers, merging. Skipped without one.

What an answer must be is tested elsewhere, with `device` as a parameter; here is what only a device
can get wrong.
"""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import onefold  # noqa: E402
from cuda_inputs import BUSY_CYCLES, gradients, make_inputs, make_mask  # noqa: E402
from gates import Case, assert_same_bits  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
    reserved = torch.cuda.memory_reserved()

    def free_after_calls() -> list[int]:
        before, _ = torch.cuda.mem_get_info()
        for _ in range(100):
            onefold.attention(*inputs, mask=mask)
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() == reserved
        return [before, torch.cuda.mem_get_info()[0]]

    # Free memory is that of the whole device, which other processes use too: they may change it
    # during some attempts, memory of our own would during every one.
    attempts = [free_after_calls() for _ in range(20)]
    assert any(before == after for before, after in attempts), attempts


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
