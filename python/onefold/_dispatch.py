"""Which front end serves an array, without importing a framework that the caller does not use."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ._options import type_error


def front_end(array: Any, name: str = "q") -> ModuleType:
    """`_torch` or `_numpy`. Both offer the same functions."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from . import _torch

        return _torch
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        from . import _numpy

        return _numpy
    raise type_error(name, array, "a torch.Tensor or a numpy.ndarray")
