"""The host's side of CUDA calls, on a driver that does nothing: no device is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("fake_driver.c")

# A backward call on tensors of a device, at addresses that nobody reads, without a framework.
CALL = """
import itertools, sys, threading, time
from onefold import _core

class Device:
    type, index = "cuda", 0

class Tensor:
    device, dtype, numbers = Device, "bfloat16", itertools.count(1)
    def __init__(self, *shape):
        self.shape, self.number = shape, next(self.numbers)
    def stride(self):
        strides = [1]
        for extent in self.shape[:0:-1]:
            strides.insert(0, strides[0] * extent)
        return strides
    def data_ptr(self):
        return self.number << 40

class Rows(Tensor):
    dtype = "float32"

dout, q, k, v, out, dq, dk, dv = (Tensor(1, 300, 2, 64) for _ in range(8))
lse = Rows(1, 2, 300)
rest = [None] * 9 + ["none", None, None, 0.0, 0.0, None, None]
none = [None] * 3

class Late:
    # The interpreter, shutting down, waits for this to go.
    def __del__(self, sleep=time.sleep):
        sleep(0.7)

def call(allocate):
    question = [q, k, v, None, *rest]
    _core.backward(dout, None, *question, out, lse, dq, dk, dv, *none, False, 0, allocate)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler, which makes the driver")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", DRIVER]
    subprocess.run(command, check=True)
    return folder


def run(code: str, driver: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CALL + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **env},
    )


def test_a_process_may_end_while_a_daemon_thread_is_about_to_ask_for_memory(driver):
    """The driver keeps the thread for a while, which then asks for the GIL that it never gets."""
    result = run(
        """
        begun = threading.Event()
        def work():
            begun.set()
            call(None)  # is never called: there is no interpreter any more
        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        time.sleep(0.1)
        sys.late = Late()
        print("done", flush=True)
        """,
        driver,
        FAKE_DRIVER_SECONDS="0.4",
    )
    assert result.stdout.strip() == "done", result.stderr[-500:]
    assert result.returncode == 0, result.stderr[-500:]


def test_a_process_may_end_while_a_daemon_thread_is_inside_the_allocator(driver):
    result = run(
        """
        begun = threading.Event()
        def allocate(like, size):
            begun.set()
            time.sleep(0.4)
        threading.Thread(target=call, args=(allocate,), daemon=True).start()
        begun.wait()
        time.sleep(0.1)
        sys.late = Late()
        print("done", flush=True)
        """,
        driver,
    )
    assert result.stdout.strip() == "done", result.stderr[-500:]
    assert result.returncode == 0, result.stderr[-500:]


def test_the_allocator_is_asked_for_what_the_plan_says_and_its_errors_arrive(driver):
    result = run(
        """
        def allocate(like, size):
            assert like is q
            raise MemoryError(f"{size} bytes")
        try:
            call(allocate)
        except MemoryError as error:
            print(error)
        wants = [True] * 3 + [False] * 3
        question = [q, k, v, None, *rest]
        print(_core.plan(*question, wants, False, 0, allocate)[3], "bytes")
        """,
        driver,
    )
    asked, planned = result.stdout.splitlines()
    assert asked == planned, result.stderr[-500:]
