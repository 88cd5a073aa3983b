"""Problems without tensors, for compiling ahead: shapes, dtypes and options as JSON.

A file holds one object a line, or one list of objects. Keys are the arguments of `attention`:
`q`, `k`, `v`, `bias`, `mask`, `alibi_slopes`, `sinks`, `cu_seqlens_q`, ... are shapes, or objects
{"shape": [...], "dtype": "float32", "strides": [...]}; `dtype` is that of q, k and v (default
bfloat16); `backward: true` asks for the gradients too, `deterministic: true` for repeatable ones.
Everything else is as in a call:

    {"dtype": "bfloat16", "q": [2, 4096, 16, 128], "k": [2, 4096, 4, 128], "v": [2, 4096, 4, 128],
     "causal": true, "bias": {"shape": [16, 1, 4096], "dtype": "float32"}, "backward": true}

Kernels do not depend on lengths or batch, so one problem of each kind is enough.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from onefold._options import NAMES, NUM_ARRAYS, Arguments, Described, from_options

_ARRAYS = NAMES[:NUM_ARRAYS]
# Of an array that says nothing of its own; the others have the dtype of q.
_DTYPES = {"mask": "bool", "alibi_slopes": "float32", "sinks": "float32"}
_DTYPES |= {name: "int64" for name in _ARRAYS if name.startswith(("cu_", "seqused"))}
_ALIGNED = 4096  # an address as good as those of real memory; never read


class _Device(NamedTuple):
    type: str
    index: int


class Asked(NamedTuple):
    question: Arguments
    backward: bool
    deterministic: bool


def _describe(name: str, given: Any, dtype: str) -> Described:
    if isinstance(given, list):
        given = {"shape": given}
    known = {"shape", "dtype", "strides"}
    if not isinstance(given, dict) or "shape" not in given or given.keys() - known:
        raise ValueError(f'{name} is {given!r}: a shape, or {{"shape", "dtype", "strides"}}')
    shape, strides = given["shape"], given.get("strides")
    lists = [shape] if strides is None else [shape, strides]
    if not all(isinstance(x, list) and all(type(n) is int for n in x) for x in lists):
        raise ValueError(f"{name} is {given!r}: shape and strides are lists of int")
    if len({len(x) for x in lists}) > 1:
        raise ValueError(f"{name} has shape {shape} and strides {strides}: one stride per axis")
    if strides is None:
        strides = [1] * len(shape)
        for axis in reversed(range(len(shape) - 1)):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
    dtype = given.get("dtype", _DTYPES.get(name, dtype))
    return Described(shape, dtype, strides, _Device("cuda", 0), _ALIGNED)


def parse(problem: Any) -> Asked:
    """One problem. Raises ValueError for what cannot be one."""
    if not isinstance(problem, dict):
        raise ValueError(f"a problem is {problem!r}: an object with q, k and v is needed")
    options = dict(problem)
    dtype = options.pop("dtype", "bfloat16")
    flags = {name: options.pop(name, False) for name in ("backward", "deterministic")}
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{name} is {flag!r}: true or false is needed")
    for name in ("q", "k", "v"):
        if name not in options:
            raise ValueError(f"{name} is missing: the shapes of q, k and v are needed")
    for name in _ARRAYS:
        if options.get(name) is not None:
            options[name] = _describe(name, options[name], dtype)
    if options.get("dropout_p"):
        options.setdefault("seed", 0)
    q, k, v = (options.pop(name) for name in ("q", "k", "v"))
    try:
        return Asked(from_options("attention", q, k, v, options), **flags)
    except TypeError as error:
        raise ValueError(str(error)) from None


def read(text: str) -> list[Asked]:
    """Every problem of a file's text."""
    try:
        whole = json.loads(text)
        problems = whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError:
        try:
            problems = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise ValueError(f"the problems are not JSON: {error}") from None
    return [parse(problem) for problem in problems]
