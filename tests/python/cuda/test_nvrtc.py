"""The algebra is device text as it stands: NVRTC compiles it from memory, with no other header.

Needs no GPU, only the library, which the package nvidia-cuda-nvrtc carries (extra `test`).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ALGEBRA = sorted((ROOT / "include/onefold/algebra").glob("*.h"))
HEADERS = {
    path.relative_to(ROOT / "include").as_posix(): path.read_text()
    for path in [*ALGEBRA, ROOT / "include/onefold/fold.h"]
}
VARIANT = {"core/variant.h": (ROOT / "src/core/variant.h").read_text()}
ARCHITECTURES = ("sm_80", "sm_90a")

# Every fold under both executors, every reference policy, the wire form.
KERNEL = r"""
#include "onefold/fold.h"
using namespace onefold;

template <class F, class Item>
__device__ auto both_ways(const Item* items, long long count) {
  static_assert(Fold<F, Item>);
  const auto a = fold_left<F>(items, count), b = fold_tree<F>(items, count);
  return F::finish(F::merge(F::merge(a, b), F::identity()));
}

template <class Gauge, class T>
__device__ T absorbed(T* scores, long long count, T c) {
  Softmax<T> state;
  const T keep = absorb<Gauge>(state, scores, count, c);
  return lse(state) * keep;
}

template <class T>
__device__ void everything(const T* in, T* out, long long n) {
  using A = AttentionFold<T, 4>;
  using Key = ScoredValue<T, 4>;
  const auto wire = both_ways<A>(reinterpret_cast<const Key*>(in), n);
  out[0] = both_ways<SoftmaxFold<T>>(in, n);
  out[1] = both_ways<WelfordFold<T>>(in, n);
  out[2] = both_ways<Sum<T>>(in, n);
  out[3] = A::finish(A::merge(A::from_wire(wire), A::lift_sink(in[0]))).out[1];
  out[4] = absorbed<MaximumGauge>(out + 16, n, in[1]);
  out[5] = absorbed<IntegerGauge>(out + 16, n, in[1]);
  out[6] = absorbed<LaggingGauge<8>>(out + 16, n, in[1]);
  out[7] = Arith<T>::tanh(in[2]) + Arith<T>::abs(in[3]);
}

extern "C" __global__ void algebra(const float* f, float* fo, const double* d, double* o, i64 n) {
  everything(f, fo, n);
  everything(d, o, n);
}
"""

# A lane of a kernel: who sees what, what a score becomes, what is kept.
VARIANT_KERNEL = r"""
#include "core/variant.h"
extern "C" __global__ void variant(onefold::Variant v, onefold::Lengths n, long long* out) {
  const onefold::KeyInterval keys = onefold::key_interval(v, n, threadIdx.x);
  out[threadIdx.x] = keys.end - keys.begin;
}
"""


def _library() -> ctypes.CDLL:
    candidates = [
        str(file.locate())
        for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
        for file in _files(package)
        if file.name.startswith("libnvrtc.so")
    ]
    path = candidates[0] if candidates else ctypes.util.find_library("nvrtc")
    if path is None:
        pytest.fail("NVRTC is missing: `pip install nvidia-cuda-nvrtc`, or run ./dev test")
    return ctypes.CDLL(path)


def _files(package: str) -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _strings(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])


def compile_text(source: str, headers: dict[str, str], architecture: str) -> tuple[bytes, str]:
    """(cubin, log); the cubin is empty when the text does not compile."""
    nvrtc = _library()
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        source.encode(),
        b"kernel.cu",
        len(headers),
        _strings(list(headers.values())),
        _strings(list(headers)),
    )
    assert status == 0, f"nvrtcCreateProgram returned {status}"
    options = [f"--gpu-architecture={architecture}", "--std=c++20", "-default-device"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
    log = _fetch(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
    cubin = _fetch(nvrtc, program, "CUBIN") if status == 0 else b""
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log


def _fetch(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, text) == 0
    return text.raw


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_fold_and_executor_compiles_for_the_device(architecture: str) -> None:
    cubin, log = compile_text(KERNEL, HEADERS, architecture)
    assert log.strip() == ""  # no warning either
    assert cubin.startswith(b"\x7fELF")
    assert b"algebra" in cubin


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_variant_compiles_for_the_device(architecture: str) -> None:
    cubin, log = compile_text(VARIANT_KERNEL, HEADERS | VARIANT, architecture)
    assert log.strip() == ""
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("header", sorted(HEADERS))
def test_every_header_compiles_alone(header: str) -> None:
    cubin, log = compile_text(f'#include "{header}"\n', HEADERS, ARCHITECTURES[0])
    assert log.strip() == ""
    assert cubin.startswith(b"\x7fELF")


def test_a_header_that_needs_a_standard_one_is_found_out() -> None:
    spoiled = {name: "#include <vector>\n" + text for name, text in HEADERS.items()}
    cubin, log = compile_text(KERNEL, spoiled, ARCHITECTURES[0])
    assert cubin == b""
    assert "vector" in log
