"""Exact attention, forward and backward, for PyTorch tensors and NumPy arrays.

>>> out = onefold.attention(q, k, v, causal=True)     # (batch, seqlen, heads, head_dim)

torch is imported by the caller or not at all: NumPy arrays need none.
"""

from __future__ import annotations

import sys as _sys

from . import _compiler, reference
from ._api import (
    Explanation,
    attention,
    explain,
    get_num_threads,
    info,
    merge_states,
    set_num_threads,
    warmup,
)
from ._core import __version__
from ._sdpa import sdpa

_compiler.tell_core()

if "torch" in _sys.modules:
    from . import _torch  # noqa: F401  registers the operators, so that exported programs load

__all__ = [
    "Explanation",
    "__version__",
    "attention",
    "explain",
    "get_num_threads",
    "info",
    "merge_states",
    "reference",
    "sdpa",
    "set_num_threads",
    "warmup",
]
