"""Which front end serves an array, without importing a framework that the caller does not use."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

# `_torch` and `_numpy`, once one of their arrays has been seen: an import statement inside the
# function below would cost each call a third of a microsecond.
_torch: ModuleType | None = None
_numpy: ModuleType | None = None


def front_end(array: Any, name: str = "q") -> ModuleType:
    """`_torch` or `_numpy`. Both offer the same functions."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch or _load("_torch")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _numpy or _load("_numpy")
    raise TypeError(
        f"{name} is a {type(array).__name__}: a torch.Tensor or a numpy.ndarray is needed"
    )


def _load(name: str) -> ModuleType:
    module = import_module(f"onefold.{name}")
    globals()[name] = module
    return module
