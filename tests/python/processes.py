"""Programs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def python(code: str, timeout: int = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with this interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **env},
    )


def output_of(code: str, timeout: int = 120, **env: str) -> str:
    """What a program prints that ends well."""
    done = python(code, timeout, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout
