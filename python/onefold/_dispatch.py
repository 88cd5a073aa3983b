"""Which front end serves an array, without importing a framework that the caller does not use."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ._options import type_error

_loaded: dict[str, ModuleType] = {}  # an import statement costs a call a third of a microsecond


def front_end(array: Any, name: str = "q") -> ModuleType:
    """`_torch` or `_numpy`. Both offer the same functions."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if torch.compiler.is_dynamo_compiling():  # which would have to trace what remembers modules
            from . import _torch

            return _torch
        return _loaded.get("torch") or _load_torch()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        return _loaded.get("numpy") or _load_numpy()
    raise type_error(name, array, "a torch.Tensor or a numpy.ndarray")


def _load_torch() -> ModuleType:
    from . import _torch

    return _loaded.setdefault("torch", _torch)


def _load_numpy() -> ModuleType:
    from . import _numpy

    return _loaded.setdefault("numpy", _numpy)
