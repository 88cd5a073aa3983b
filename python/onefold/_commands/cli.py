"""The command `onefold`: info, demo, bench, check, cache, plot.

Each command is a module with `add_arguments(parser)` and `run(args) -> exit status`; torch, rich
and matplotlib are imported only by the command that needs them.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from onefold import __version__, _core, info
from onefold._commands import bench, cache, check, demo, plots


class Command(NamedTuple):
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def run_info(args: argparse.Namespace) -> int:
    """Prints what would run here and with what."""
    print(info().rstrip())
    print(f"compiler: {_core.compiler_info()}")
    print(f"python: {platform.python_version()} at {sys.executable}")
    for package in ("torch", "numpy"):
        try:
            module = __import__(package)
            print(f"{package}: {module.__version__}")
        except ImportError:
            print(f"{package}: not installed")
    for name in sorted(name for name in os.environ if name.startswith("ONEFOLD_")):
        print(f"{name}: {os.environ[name]}")
    return 0


COMMANDS = {
    "info": Command("what will run here, and why", lambda parser: None, run_info),
    "demo": Command(
        "train a small language model and compare with PyTorch", demo.add_arguments, demo.run
    ),
    "bench": Command("speed and error beside what PyTorch has", bench.add_arguments, bench.run),
    "check": Command("the conformance run on this machine", check.add_arguments, check.run),
    "cache": Command(
        "list, copy, delete the compiled kernels, or compile ahead",
        cache.add_arguments,
        cache.run,
    ),
    "plot": Command("draw the picture of a saved run again", plots.add_arguments, plots.run),
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="onefold", description="Exact attention, forward and backward, as one fold."
    )
    top.add_argument("--version", action="version", version=f"onefold {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.help, description=command.help)
        )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 = good, 1 = something did not agree, 2 = it could not run."""
    args = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return COMMANDS[args.command].run(args)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "rich", "matplotlib"):
            raise
        print(
            f"onefold {args.command}: {error.name} is missing: pip install {error.name}",
            file=sys.stderr,
        )
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"onefold {args.command}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"onefold {args.command}: interrupted", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
