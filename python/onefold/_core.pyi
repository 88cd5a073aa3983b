"""The compiled module. Arrays are torch tensors or NumPy arrays; outputs are written.

`question` is always the same twenty positional arguments, those of `argument_names`. seed is an int
or one element of int64, scale a float or None, causal "none", "bottom_right" or "top_left".

The last two say where a call runs. On a CUDA device `stream` is the handle of the stream to use, an
int, and `allocate(q, bytes)` gives an array with that much memory, which is dropped when the stream
has been told all. On the CPU the first is how many threads the host has set for itself, or None,
and the second is None.
"""

from typing import Any

__version__: str
argument_names: tuple[str, ...]
reference_sources: tuple[str, ...]

# Shape and row-major float64 data.
_Array = tuple[tuple[int, ...], bytearray]

def forward(*question_out_lse_stream_allocate: Any) -> None:
    """question, out, lse (None if not wanted), stream, allocate."""

def is_plain(question: tuple[Any, ...], host: tuple[Any, ...]) -> bool:
    """Whether `forward_plain` can answer: torch's q, k and v, nothing rare, and nobody watches.
    `host` is _torch_ops.PLAIN."""

def forward_plain(question: tuple[Any, ...], want_lse: bool, host: tuple[Any, ...]) -> Any:
    """out, or (out, lse), in memory of torch's own; takes the current stream, torch's threads."""

def backward(*dout_dlse_question_out_lse_gradients_deterministic_stream_allocate: Any) -> None:
    """dout, dlse, question, out, lse, dq, dk, dv, dbias, dslopes, dsinks (None if not wanted),
    deterministic, stream, allocate."""

def plan(*question_needs_deterministic_stream_allocate: Any) -> tuple[str, str, int, int, str]:
    """Like `warm_up`; tells backend, kernel, work items, workspace bytes, why."""

def warm_up(*question_needs_deterministic: Any) -> list[str]:
    """Compiles and loads what the question needs on q's device: forward when `needs` is None, else
    backward for the gradients of q, k, v, bias, slopes and sinks that are wanted; names the
    kernels."""

def prebuild(*question_needs_deterministic_arch: Any) -> list[str]:
    """Compiles the same for a device of `arch` (900)."""

def merge_states(*outs_lses_out_lse_stream: Any) -> None:
    """outs (N, R, D), lses (N, R) into out (R, D), lse (R,)."""

def check_forward(*question_out: Any) -> None:
    """Raises what `forward` would, as far as the arguments tell, and runs nothing; out or None."""

def check_backward(*dout_dlse_question_out_lse: Any) -> None:
    """Likewise for `backward`."""

def check_merge_states(outs: Any, lses: Any, out: Any, lse: Any) -> None:
    """Likewise for `merge_states`."""

def check_tensor(tensor: Any, name: str) -> None:
    """Raises for what is no array with memory of its own."""

def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def info() -> str: ...
def fma_rate(seconds: float) -> float:
    """float32 FLOP/s of the calling thread, measured for so long; the GIL is released."""

def read_rate(first: Any, second: Any, seconds: float) -> float:
    """Bytes per second that the calling thread reads of two packed arrays on the CPU; likewise."""

def instruction_set() -> str:
    """Of the CPU backend: avx512, avx2 or baseline."""

def add_compiler_path(folder: bytes) -> None:
    """A folder to look for NVRTC in; before the first kernel."""

def compiler_info() -> str:
    """One line: NVRTC's version and file, or that there is none; the folder of the cache."""

def cache_folders() -> list[str]:
    """The first is written and read, the others are read."""

def cache_entries() -> list[dict[str, Any]]:
    """Of the first folder: folder, name, target, nvrtc, registers, spill_bytes, compile_seconds,
    warnings, bytes, last_used (seconds since 1970)."""

def cache_clear() -> int:
    """Deletes the entries of the first folder and tells how many there were."""

def cache_export(folder: bytes) -> int:
    """Copies every entry of all folders to another and tells how many that has gained."""

def reference_forward(*question: Any) -> tuple[_Array, _Array]:
    """out, lse."""

def reference_forward_terms(*question: Any) -> tuple[_Array, ...]:
    """The fields of onefold.reference.ForwardTerms."""

def reference_backward(*question_dout_dlse: Any) -> tuple[_Array | None, ...]:
    """dq, dk, dv, dbias, dslopes, dsinks."""

def reference_backward_terms(*question_dout_dlse: Any) -> tuple[_Array | None, ...]:
    """The bound terms of the same six."""
