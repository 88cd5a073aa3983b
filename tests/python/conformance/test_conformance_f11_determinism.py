"""Randomness, determinism, races: bits are a function of the arguments alone."""

from __future__ import annotations

import threading

import pytest
import torch

import onefold
from draws import seeded
from gates import UNIT, Case, assert_same_bits, hold_bounds, make_case, normal, run, wide
from naive import kept, visible


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_f11_1_thirty_runs_give_the_same_gradients(heads, causal, device):
    case = make_case("normal", torch.bfloat16, (2, 70, 90, *heads, 32, 32), causal=causal)
    first = run(case, device, deterministic=True)
    for _ in range(30):
        assert_same_bits(run(case, device, deterministic=True), first)


@pytest.mark.parametrize("options", ["window", "packed", "bias", "sinks"])
def test_f11_1_the_deterministic_flag_covers_every_option(options, device):
    case = make_case("normal", torch.float32, (2, 70, 90, 4, 2, 32, 32))
    if options == "packed":
        cu_q, cu_k = [0, 70, 140], [0, 90, 180]
        flat = [x.flatten(0, 1) for x in (case.q, case.k, case.v, case.dout)]
        dlse = case.dlse.transpose(0, 1).flatten(1)
        case = Case(*flat[:3], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, flat[3], dlse)
    else:
        case.options = {
            "window": {"window": (20, 5)},
            "bias": {"bias": normal(seeded(), 1, 1, 70, 90).float()},
            "sinks": {"sinks": torch.rand(4, generator=seeded())},
        }[options]
    first = run(case, device, deterministic=True)
    for flag in (True, False, None) if device == "cpu" else (True,):
        for _ in range(3):
            assert_same_bits(run(case, device, deterministic=flag), first)


def dropped(q, k, p, seed, scale, causal=False):
    """P and what dropout makes of it, in float64, from the definition."""
    batch, sq, heads, _ = q.shape
    sk = k.shape[1]
    z = scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    if causal:
        z = z.masked_fill(~visible(sq, sk, True), -torch.inf)
    weights = torch.softmax(z, -1).nan_to_num(0.0)
    keep = kept(seed, p, batch, heads, sq, sk)
    return weights, torch.where(keep, weights / (1 - p), 0.0), keep


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, -1])
@pytest.mark.parametrize("p", [0.1, 0.48, 0.99])
def test_f11_2_forward_and_backward_use_the_mask_that_the_definition_gives(p, seed, device):
    case = make_case("normal", torch.float32, (2, 33, 70, 3, 3, 16, 16), with_dlse=False)
    case.options = {"dropout_p": p, "seed": seed, "scale": 0.25}
    found = run(case, device)
    _, pd, keep = dropped(case.q, case.k, p, seed, 0.25)
    one_hot = torch.eye(70).view(1, 70, 1, 70).expand(2, 70, 3, 70)
    seen = run(Case(case.q, case.k, one_hot, case.options), device).out.permute(0, 2, 1, 3) != 0
    assert torch.equal(seen, keep)
    dv = torch.einsum("bhij,bihd->bjhd", pd, case.dout.double())
    size = torch.einsum("bhij,bihd->bjhd", pd, case.dout.double().abs())
    assert ((found.gradients["v"].double() - dv).abs() <= 200 * UNIT[torch.float32] * size).all()
    hold_bounds(case, device, found)


def test_f11_2_the_mask_does_not_depend_on_dtype_layout_or_threads(dtype, device):
    options = {"dropout_p": 0.3, "seed": 77}
    q = torch.zeros(3, 20, 2, 4, dtype=dtype)
    k = torch.zeros(3, 70, 2, 4, dtype=dtype)
    v = torch.eye(70, dtype=dtype).view(1, 70, 1, 70).expand(3, 70, 2, 70)
    want = kept(77, 0.3, 3, 2, 20, 70)
    before = onefold.get_num_threads()
    for threads in (1, 2, 7):
        onefold.set_num_threads(threads)
        dense = run(Case(q, k, v, options), device).out
        assert torch.equal((dense != 0).permute(0, 2, 1, 3), want)
    onefold.set_num_threads(before)
    cu = {"cu_seqlens_q": [0, 20, 40, 60], "cu_seqlens_k": [0, 70, 140, 210]}
    packed = run(Case(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), options | cu), device).out
    assert_same_bits(packed.view_as(dense), dense)


def test_f11_2_a_seed_of_a_tensor_is_the_seed_of_its_number(device):
    q, k, v = (normal(seeded(n), 1, 9, 2, 8).float().to(device) for n in range(3))
    for number in (0, 12345, -3, 2**62):
        tensor = torch.tensor([number], dtype=torch.int64, device=device)
        a = onefold.attention(q, k, v, dropout_p=0.5, seed=number)
        assert_same_bits(onefold.attention(q, k, v, dropout_p=0.5, seed=tensor), a)


def test_f11_2_each_call_without_a_seed_draws_another_and_manual_seed_repeats_them(device):
    q = torch.zeros(1, 9, 2, 8, device=device)
    k = torch.zeros(1, 64, 2, 8, device=device)
    v = torch.eye(64, device=device).view(1, 64, 1, 64).expand(1, 64, 2, 64)

    def draws():
        torch.manual_seed(5)
        return [onefold.attention(q, k, v, dropout_p=0.5) for _ in range(4)]

    first, second = draws(), draws()
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)
    assert not any(torch.equal(first[0], x) for x in first[1:])


@pytest.mark.parametrize("p", [0.1, 0.99])
def test_f11_3_the_sum_is_taken_before_dropping(p, dtype, device):
    case = make_case("normal", dtype, (1, 260, 260, 2, 2, 16, 16), with_dlse=False)
    case.options = {"dropout_p": p, "seed": 3, "causal": True}
    found = hold_bounds(case, device)
    plain = run(Case(case.q, case.k, case.v, {"causal": True}), device)
    assert_same_bits(found.lse, plain.lse)
    keep = kept(3, p, 1, 2, 260, 260) & visible(260, 260, True)
    nothing = ~keep.any(-1)
    assert not found.out.transpose(1, 2)[nothing].any()
    assert nothing.any() or p < 0.5
    assert all(g.isfinite().all() for g in (found.out, *found.gradients.values()))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_f11_3_the_share_of_kept_weights_is_one_minus_p(p, device):
    q = torch.zeros(1, 256, 2, 1, device=device)
    k = torch.zeros(1, 256, 2, 1, device=device)
    v = torch.eye(256, device=device).view(1, 256, 1, 256).expand(1, 256, 2, 256)
    out = onefold.attention(q, k, v, dropout_p=p, seed=9)
    n = out.numel()
    share = (out != 0).double().mean().item()
    assert abs(share - (1 - p)) <= 5 * (p * (1 - p) / n) ** 0.5
    scaled = out[out != 0] * 256 * (1 - p)
    assert ((scaled - 1).abs() <= 1e-6).all()


def test_f11_3_dropping_everything_gives_zeros_whatever_v_holds(dtype, device):
    q, k, v = (normal(seeded(n), 1, 9, 2, 8).to(dtype) for n in range(3))
    case = Case(q, k, v, {"dropout_p": 1.0, "seed": 1}, torch.ones_like(q))
    found = run(case, device)
    assert not found.out.any()
    assert found.lse.isfinite().all()
    assert not any(g.any() for g in found.gradients.values())


@pytest.mark.parametrize("window", [(None, None), (50, None)])
@pytest.mark.parametrize("long", [1, 40, 300])
def test_f11_4_a_request_alone_is_what_it_is_beside_31_others(long, window, device):
    g = seeded()
    lengths_q = [1 + n % 5 for n in range(31)]
    lengths_q.insert(7, long)
    lengths_k = [n + 60 for n in lengths_q]
    lengths_k[7] = 2100
    cu_q = [0, *torch.tensor(lengths_q).cumsum(0).tolist()]
    cu_k = [0, *torch.tensor(lengths_k).cumsum(0).tolist()]
    q = normal(g, cu_q[-1], 4, 32).to(torch.bfloat16)
    k, v = (normal(g, cu_k[-1], 2, 32).to(torch.bfloat16) for _ in range(2))
    options = {"causal": True, "window": window}
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    together = run(Case(q, k, v, options | lengths), device)
    rows, keys = slice(cu_q[7], cu_q[8]), slice(cu_k[7], cu_k[8])
    alone = run(Case(q[None, rows], k[None, keys], v[None, keys], options), device)
    assert_same_bits(together.out[rows], alone.out[0])
    assert_same_bits(together.lse[:, rows], alone.lse[0])


def test_f11_5_threads_that_call_at_once_do_not_disturb_one_another(device):
    """Shapes of several kinds from six threads, each against its own quiet result."""
    shapes = [(2, 40, 90, 4, 2, 24, 16), (1, 1, 1500, 4, 2, 32, 32), (3, 130, 64, 2, 2, 8, 8)]
    cases = [make_case("normal", torch.float32, s, causal=True) for s in shapes]
    want = [run(c, device) for c in cases]
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(15):
                at = (first + n) % len(cases)
                assert_same_bits(run(cases[at], device), want[at])
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        assert not worker.is_alive()
    if failures:
        raise failures[0]


def test_f11_5_changing_the_number_of_threads_meanwhile_changes_no_bit(device):
    case = make_case("normal", torch.float32, (2, 200, 300, 4, 2, 24, 16), causal=True)
    want = run(case, device)
    before = onefold.get_num_threads()
    stop = threading.Event()

    def turn() -> None:
        n = 0
        while not stop.is_set():
            n = n % 5 + 1
            onefold.set_num_threads(n)

    worker = threading.Thread(target=turn)
    worker.start()
    try:
        for _ in range(25):
            assert_same_bits(run(case, device), want)
    finally:
        stop.set()
        worker.join(timeout=60)
        onefold.set_num_threads(before)
    assert not worker.is_alive()


def test_f11_6_dtype_of_lse_is_that_of_the_accumulators(dtype, device):
    case = make_case("normal", dtype, (1, 3, 5, 1, 1, 8, 8))
    assert run(case, device, backward=False).lse.dtype == wide(dtype)
