#!/usr/bin/env python3
"""Runs on a GPU machine what `dev gpu pack` gathered: nothing but this folder and its own Python.

    python3 run.py [--only STEP ...] [--quick] [--tools TOOL ...] [-k EXPRESSION]
                   [--out results.jsonl]

Steps: tests (pytest of what takes a device), check (the C++ kernels against the oracle), sanitizer
(the four tools of compute-sanitizer over small shapes), bench (beside PyTorch). Each appends lines
of JSON to the results, all with the commit, the device and its clocks; a failed test has a line of
its own. torch, numpy and pytest must be there; pytest-xdist is used when it is. Exit status 1 when
something failed. Standard library only, since the folder has to do with what the machine has.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SITE = HERE / "site"  # the wheels, installed
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

Record = dict[str, Any]


def environment() -> dict[str, str]:
    """The packed package, and its kernels before those that are compiled here."""
    folders = [str(HERE / "compiled"), str(HERE / "kernels")]
    return {**os.environ, "PYTHONPATH": str(SITE), "ONEFOLD_CACHE_DIR": ":".join(folders)}


def run(*command: Any, timeout: float | None = None) -> tuple[int, str]:
    """Shows what a command prints and returns its exit status and all of it."""
    words = [str(word) for word in command]
    print("$", " ".join(words), flush=True)
    text = []
    with subprocess.Popen(
        words,
        cwd=HERE,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        deadline = time.monotonic() + timeout if timeout else None
        for line in process.stdout:
            text.append(line)
            print(line, end="", flush=True)
            if deadline and time.monotonic() > deadline:
                process.kill()
                text.append(f"stopped after {timeout:.0f} s\n")
                break
        status = process.wait()
    return status, "".join(text)


def device_facts() -> Record:
    """The GPU as its driver describes it now."""
    names = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "memory.total")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"device": None}
    values = [value.strip() for value in found.splitlines()[0].split(",")]
    name, driver, sm, memory, most, mib = values
    return {
        "device": name,
        "driver": driver,
        "clock_sm_mhz": int(sm),
        "clock_memory_mhz": int(memory),
        "clock_sm_most_mhz": int(most),
        "memory_mib": int(mib),
    }


def install() -> None:
    """Unpacks the wheels that this Python can use; nothing is fetched."""
    wheels = sorted((HERE / "wheels").glob("*.whl"))
    shutil.rmtree(SITE, ignore_errors=True)
    status, _ = run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target",
        SITE, *wheels,
    )  # fmt: skip
    if status != 0:
        raise SystemExit("run.py: the wheels cannot be installed here")


# ---- the steps ----


def tests(args: argparse.Namespace) -> Iterator[Record]:
    """What takes a device, on the device."""
    report = HERE / "junit.xml"
    report.unlink(missing_ok=True)
    spread = ["-n", str(CPUS)] if importlib.util.find_spec("xdist") else []
    status, _ = run(
        sys.executable, "-m", "pytest", "-q", *spread, "-k", args.k, f"--junit-xml={report}"
    )
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    if report.exists():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            bad = [child for child in case if child.tag in ("failure", "error")]
            skipped = case.find("skipped") is not None
            counts["failed" if bad else "skipped" if skipped else "passed"] += 1
            if bad:
                name = f"{case.get('classname')}::{case.get('name')}"
                words = (bad[0].get("message") or "").split("\n")[0]
                yield {"kind": "failed test", "test": name, "message": words[:400]}
    yield {"kind": "tests", "ok": status == 0 and counts["passed"] > 0} | counts


def check(args: argparse.Namespace) -> Iterator[Record]:
    """The kernels from C++, against the oracle."""
    # In several processes, because NVRTC compiles one kernel at a time in each.
    parts = max(1, CPUS // 2)
    words = [str(HERE / "bin" / "device_check"), "--threads", "2", "--every", str(parts), "--from"]
    running = [
        subprocess.Popen(
            [*words, str(part)], cwd=HERE, env=environment(), stdout=subprocess.PIPE, text=True
        )
        for part in range(parts)
    ]
    good, cases = True, 0
    for process in running:
        text, _ = process.communicate()
        good = good and process.returncode == 0
        print(text, end="", flush=True)
        for line in text.splitlines():
            cases += line.startswith(("ok", "FAIL"))
            if line.startswith("FAIL"):
                yield {"kind": "failed check", "case": line[:400]}
    yield {"kind": "check", "ok": good, "summary": f"{cases} cases"}


def sanitizer(args: argparse.Namespace) -> Iterator[Record]:
    """The same under compute-sanitizer, with few and small cases."""
    if not shutil.which("compute-sanitizer"):
        yield {"kind": "sanitizer", "ok": True, "summary": "compute-sanitizer is not here: skipped"}
        return
    # Every 11th of the cases with one option: each option, format and head dim at least once.
    which = ["--cases", 0, "--every", 11] if args.quick else ["--cases", 24]
    small = [HERE / "bin" / "device_check", "--threads", 4, *which]
    run(*small, "--compile")  # outside of the tool, which slows the compiler down too
    for tool in args.tools:
        status, text = run("compute-sanitizer", "--tool", tool, "--error-exitcode", 9, *small)
        summary = [
            line for line in text.splitlines() if "ERROR SUMMARY" in line or "cases," in line
        ]
        yield {"kind": "sanitizer", "tool": tool, "ok": status == 0, "summary": "; ".join(summary)}


def bench(args: argparse.Namespace) -> Iterator[Record]:
    """Speed and error beside what PyTorch has."""
    out = HERE / "bench.jsonl"
    command = [sys.executable, "-m", "onefold._commands.cli", "bench", "--device", "cuda"]
    status, _ = run(*command, "--out", out, *args.bench)
    if status == 0:
        for line in out.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
    yield {"kind": "bench step", "ok": status == 0}


STEPS: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    "tests": tests,
    "check": check,
    "sanitizer": sanitizer,
    "bench": bench,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--quick", action="store_true", help="sanitizer: ten cases instead of 132")
    parser.add_argument(
        "--tools", nargs="+", choices=SANITIZER_TOOLS, default=SANITIZER_TOOLS, metavar="TOOL",
        help="sanitizer: which of its tools (default: all)",
    )  # fmt: skip
    parser.add_argument("-k", default="cuda", help="which tests, as pytest's -k (default: cuda)")
    parser.add_argument("--out", default=str(HERE / "results.jsonl"), help="JSON lines, appended")
    parser.add_argument("--bench", nargs=argparse.REMAINDER, default=[], help="onefold bench's own")
    args = parser.parse_args()
    packed = json.loads((HERE / "packed.json").read_text(encoding="utf-8"))
    device = device_facts()
    print(f"commit {packed['commit']}, {device}", flush=True)
    install()
    good = True
    with open(args.out, "a", encoding="utf-8") as out:
        for name in args.only:
            start = time.monotonic()
            for record in STEPS[name](args):
                good = good and record.get("ok", True)
                common = {"commit": packed["commit"], **device_facts()}
                record["seconds_since_step_began"] = round(time.monotonic() - start, 1)
                out.write(json.dumps(common | record) + "\n")
                out.flush()
                if "ok" in record:
                    print(json.dumps(record), flush=True)
    print(f"lines: {args.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
