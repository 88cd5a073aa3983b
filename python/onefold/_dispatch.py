"""Which front end serves an array, without importing a framework that the caller does not use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def _module(name: str) -> ModuleType:
    """The module once it is loaded: an import statement costs a call a microsecond."""
    full_name = f"{__package__}.{name}"
    return sys.modules.get(full_name) or importlib.import_module(full_name)


def front_end(array: Any, name: str = "q") -> ModuleType:
    """`_torch` or `_numpy`. Both offer the same functions."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _module("_torch")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _module("_numpy")
    raise TypeError(
        f"{name} is a {type(array).__name__}: a torch.Tensor or a numpy.ndarray is needed"
    )
