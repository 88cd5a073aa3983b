"""Where pip puts NVRTC, CUDA's run-time compiler: only Python knows where that is."""

from __future__ import annotations

import os
import sys

from onefold import _core

# The packages nvidia-cuda-nvrtc (CUDA 13) and nvidia-cuda-nvrtc-cu12.
_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")


def tell_core() -> None:
    """Hands on every such folder that exists on sys.path. NVRTC itself is opened when needed."""
    for site in sys.path:
        if not isinstance(site, (str, os.PathLike)):  # Python's own import passes it over as well
            continue
        for folder in _FOLDERS:
            path = os.path.join(site, folder)
            if os.path.isdir(path):
                _core.add_compiler_path(os.fsencode(path))
