"""Devices, dtypes, memory and the seed of the generated tests."""

from __future__ import annotations

import random

import pytest

import gates


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--case-seed",
        default="0",
        help="seed of the generated option combinations: a number, or 'random' for a new one",
    )


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--case-seed")
    config.case_seed = random.SystemRandom().randrange(2**31) if seed == "random" else int(seed)


def pytest_report_header(config: pytest.Config) -> str:
    return f"generated cases: --case-seed={config.case_seed}"


def devices() -> list[str]:
    """Where onefold computes on this machine."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float16", "float64"])
def dtype(request: pytest.FixtureRequest):
    import torch

    if "device" in request.fixturenames and request.param == "float64":
        gates.skip_unless_it_computes(torch.float64, 0, request.getfixturevalue("device"))
    return getattr(torch, request.param)


@pytest.fixture(params=["plain", "nan", "guard"])
def place(request: pytest.FixtureRequest):
    """Puts an input into memory of three kinds: ordinary; a view inside a buffer of NaN, while all
    new memory is NaN too; and the last bytes before an inaccessible page."""
    import buffers

    if request.param == "plain":
        yield lambda x: x
    elif request.param == "guard":
        yield buffers.guarded
    else:
        with buffers.poisoned_allocations():
            yield buffers.surrounded


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    """References are small: torch's own threads would only fight with onefold's, which are asked
    for by number so that torch's does not count."""
    import torch

    import onefold

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    onefold.set_num_threads(onefold.get_num_threads())
    yield
    torch.set_num_threads(before)
    onefold.set_num_threads(0)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before, nothing left behind."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
