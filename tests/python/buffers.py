"""Hostile memory: NaN around tensors, guard pages behind them, address ranges without memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Place = Callable[[Tensor], Tensor]

_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
_M_PERTURB = -6
_MARGIN = 3


def filler(dtype: torch.dtype) -> float | int | bool:
    """What shows when it is read: NaN, True (a hidden key would be seen), an index far outside."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def surrounded(x: Tensor) -> Tensor:
    """The values of x in the middle of a larger buffer that is full of NaN, on every axis."""
    shape = [n + 2 * _MARGIN for n in x.shape]
    around = torch.full(shape, filler(x.dtype), dtype=x.dtype, device=x.device)
    inside = around[tuple(slice(_MARGIN, _MARGIN + n) for n in x.shape)]
    inside.copy_(x)
    return inside.detach()


def surroundings(inside: Tensor) -> Tensor:
    """The bits of the whole buffer that `surrounded` made, with the inside zeroed."""
    whole = torch.empty(0, dtype=inside.dtype, device=inside.device)
    whole.set_(inside.untyped_storage())
    copy = whole.clone()
    view = copy.as_strided(inside.shape, inside.stride(), inside.storage_offset())
    view.zero_()
    return copy


def guarded(x: Tensor, at: str = "end") -> Tensor:
    """The values of x with inaccessible pages behind (and, on a page border, before) them."""
    size = x.numel() * x.element_size()
    if size == 0 or x.device.type != "cpu":
        return x.detach()
    page = mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for border in (0, pages + 1):
        if _LIBC.mprotect(ctypes.c_void_p(address + border * page), page, _PROT_NONE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = (pages + 1) * page - size if at == "end" else page
    y = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
    return y.copy_(x.detach())


def sparse(elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros of any size: only pages that are touched take memory."""
    size = elements * torch.empty(0, dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype, count=elements)


def strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The values of x in a sparse buffer at these strides."""
    last = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    y = sparse(last + 1, x.dtype).as_strided(x.shape, strides)
    return y.copy_(x)


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """While this lasts, torch's new tensors and what malloc hands out are full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    has_mallopt = hasattr(_LIBC, "mallopt")
    if has_mallopt:  # glibc: bytes handed out are the complement of the lowest byte, 0xFF
        _LIBC.mallopt(_M_PERTURB, 0x100)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        if has_mallopt:
            _LIBC.mallopt(_M_PERTURB, 0)
