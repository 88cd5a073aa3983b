#!/usr/bin/env python3
"""Checks what no compiler sees: the arrows between layers, things said once, and soft limits.

Errors (exit 1): an include that is not an allowed arrow; exp2 of a difference outside
algebra/softmax.h; a minus infinity that is not kEmpty; a macro outside its few homes; the
compiler #ifdef outside scalar.h; nanobind's GIL guard; tool versions that disagree. Reported only:
long files, long functions, crowded folders, headers that do not open with an idea. `dev check`
runs this; --errors-only leaves the reports out. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# --- layers and arrows ------------------------------------------------------------------------

# The layer of a file is that of the first prefix that fits.
LAYERS = (
    ("include/onefold/algebra/", "algebra"),
    ("include/onefold/", "api"),
    ("src/core/variant.h", "variant"),
    ("src/core/", "core"),
    ("src/plan/", "plan"),
    ("src/cpu/", "cpu"),
    ("src/reference/", "reference"),
    ("src/jit/", "jit"),
    ("src/cuda/", "cuda"),
    ("src/kernels/ptx/", "ptx"),
    ("src/kernels/tile/", "tile"),
    ("src/kernels/", "kernels"),
    ("src/", "bodies"),
    ("python/", "python"),
)

# layer: what it may include besides itself. "spec" is the plain structs kernels/*_spec.h.
ARROWS = {
    "algebra": set(),
    "api": {"algebra"},
    "variant": {"algebra"},
    "core": {"variant", "algebra", "api"},
    "plan": {"core", "variant", "api", "spec"},
    "cpu": {"core", "variant", "algebra", "api"},
    "reference": {"api"},  # the question and its tensors; no formula
    "jit": {"api"},
    "cuda": {"jit", "core", "variant", "api", "spec"},
    "ptx": {"algebra"},
    "tile": {"ptx", "algebra"},
    "kernels": {"tile", "ptx", "variant", "algebra"},
    "bodies": {"plan", "cpu", "cuda", "core", "variant", "api", "algebra"},
    "python": {"api", "algebra", "reference", "jit", "cpu"},
}

# Headers of others that a layer must not see, whatever the arrows say.
FOREIGN = {
    "algebra": re.compile(r"^(?!cmath$|cstdint$)"),  # and those in scalar.h alone
    "*": re.compile(r"^(cuda|cuda_.*|nvrtc|cublas.*|cudnn.*|torch/.*|ATen/.*|c10/.*|omp)(\.h)?$"),
}


def layer_of(path: str) -> str | None:
    return next((layer for prefix, layer in LAYERS if path.startswith(prefix)), None)


def resolve(including: str, target: str) -> str | None:
    """The file of the project that an include names, if any."""
    for base in (Path(including).parent, Path("include"), Path("src")):
        candidate = base / target
        if (ROOT / candidate).is_file():
            return str((ROOT / candidate).resolve().relative_to(ROOT))
    return None


def check_arrows(path: str, text: str):
    layer = layer_of(path)
    if layer is None:
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if not match:
            continue
        quote, target = match.groups()
        found = resolve(path, target)
        if found is None:
            if quote == '"':
                yield number, f'"{target}" is no file of the project: others are included with <>'
            elif FOREIGN["*"].match(target) or (
                layer == "algebra"
                and (not path.endswith("/scalar.h") or FOREIGN["algebra"].match(target))
            ):
                yield number, f"{layer} may not include <{target}>"
            continue
        other = layer_of(found)
        if found.startswith("src/kernels/") and found.endswith("_spec.h"):
            other = "spec" if layer != "kernels" else "kernels"
        if other != layer and other not in ARROWS[layer]:
            allowed = ", ".join(sorted(ARROWS[layer])) or "nothing"
            yield number, f"{layer} may not include {other} ({target}); its arrows: {allowed}"


# --- said once --------------------------------------------------------------------------------

SOFTMAX = "include/onefold/algebra/softmax.h"
SCALAR = "include/onefold/algebra/scalar.h"
MINUS_INFINITY = re.compile(
    r"-\s*((std::)?numeric_limits<[^<>]*>::infinity\(\)|HUGE_VALF?\b|INFINITY\b"
    r"|__builtin_(inff?|huge_valf?)\(\)|k(Pos)?Inf(inity)?\b)"
)


def blank_comments(text: str) -> str:
    """The text with comments and string contents blanked; lines and columns stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|' r"'(?:\\.|[^'\\\n])+'"

    def blank(match: re.Match) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    text = re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "0", text)  # 1'000 is no character
    return re.sub(pattern, blank, text, flags=re.S)


def argument(text: str, start: int) -> str:
    """What stands between the parenthesis at `start` and its partner."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 1 : end]
    return ""


def is_difference(expression: str) -> bool:
    """Whether there is a binary minus outside any bracket of the expression."""
    flat, depth = "", 0
    for character in expression:
        depth -= character in ")]}"
        flat += character if depth == 0 else "_"
        depth += character in "([{"
    flat = re.sub(r"[0-9.][eE]-", "_", flat).replace("->", "__").replace("--", "__")
    return bool(re.search(r"[\w)\]}]\s*-", flat))


def check_said_once(path: str, text: str):
    if not path.startswith(("include/", "src/")) or path.startswith("src/reference/"):
        return  # the oracle shares nothing with what it judges, these formulas included
    code = blank_comments(text)

    def line(position: int) -> int:
        return code.count("\n", 0, position) + 1

    if path != SOFTMAX:
        for match in re.finditer(r"\bexp2f?\s*(\()", code):
            if is_difference(argument(code, match.start(1))):
                yield line(match.start()), f"exp2 of a difference: its one home is {SOFTMAX}"
    for match in MINUS_INFINITY.finditer(code):
        if "kEmpty" not in code[code.rfind("\n", 0, match.start()) : match.start()]:
            yield line(match.start()), "minus infinity is written kEmpty"
    for match in re.finditer(r"^\s*#\s*define\s+(\w+)", code, re.M):
        home = path in (SCALAR, "include/onefold/error.h") or path.startswith("src/cpu/isa/")
        if not home:
            yield line(match.start(1)), f"macro {match.group(1)}: see the few homes of macros"
    if path != SCALAR:
        for match in re.finditer(r"__CUDACC_RTC__", code):
            yield line(match.start()), f"__CUDACC_RTC__: its one home is {SCALAR}"


def check_gil(path: str, text: str):
    """nanobind's own guards abort a process that ends while a daemon thread is inside a call."""
    if path == "python/binding/gil.h":
        return
    for number, line in enumerate(blank_comments(text).splitlines(), 1):
        if "gil_scoped_" in line:
            yield number, "gil_scoped_...: the lock is let go and taken by gil.h alone"


def check_tool_versions():
    """pyproject.toml and .pre-commit-config.yaml must name the same formatters."""
    pins = re.findall(r'"((?:clang-format|ruff)==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for pin in re.findall(r"(?:clang-format|ruff)==[^\]\s]+", hooks):
        if pin not in pins:
            yield 1, f"{pin} differs from pyproject.toml, which has {', '.join(pins)}"


# --- soft limits ------------------------------------------------------------------------------


def functions_cpp(text: str):
    """(first line, lines) of each function body, by matching braces outside type scopes."""
    code = re.sub(r"(?m)^\s*#.*$", "", blank_comments(text))
    stack, head = [], 0
    for match in re.finditer(r"[{};]", code):
        where = match.start()
        before = code[head:where].strip()
        if match.group() == "{":
            inside = any(kind == "function" for kind, _ in stack)
            scope = re.match(r"(template\s*<.*>\s*)?(inline\s+)?(namespace|class|struct|union|enum"
                             r"|extern)\b", before, re.S)  # fmt: skip
            is_function = "(" in before and not scope and not inside
            start = head + len(code[head:where]) - len(code[head:where].lstrip())
            stack.append(("function" if is_function else "other", start))
        elif match.group() == "}" and stack:
            kind, start = stack.pop()
            if kind == "function":
                yield code.count("\n", 0, start) + 1, code.count("\n", start, where) + 1
        head = match.end()


def functions_python(text: str):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # What it is, is no part of how long it is.
            docs = ast.get_docstring(node, clean=False)
            words = docs.count("\n") + 1 if docs else 0
            yield node.lineno, node.end_lineno - node.lineno + 1 - words


def soft_limits(path: str, text: str):
    kernel = path.startswith("src/kernels/")
    lines, limit = text.count("\n"), 500 if kernel else 600
    if lines > limit:
        yield 1, f"{lines} lines, more than {limit}"
    is_python = path.endswith(".py") or path == "dev"
    if not kernel:
        for first, count in (functions_python if is_python else functions_cpp)(text):
            if count > 80:
                yield first, f"a function of {count} lines, more than 80"
    if path.startswith(("include/", "src/")) and path.endswith(".h"):
        opening = re.match(r"(//[^\n]*\n)*", text).group().count("\n")
        if not 1 <= opening <= 10:
            yield 1, f"the header opens with {opening} lines of comment, not with 1 to 10"


def crowded_folders(paths: list[str]):
    folders: dict[str, int] = {}
    for path in paths:
        folders[str(Path(path).parent)] = folders.get(str(Path(path).parent), 0) + 1
    for folder, count in sorted(folders.items()):
        if folder != "." and count > 12:
            yield folder, f"{count} files, more than 12"


# --- all of it --------------------------------------------------------------------------------


def project_files() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(listed.splitlines()) if (ROOT / name).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--errors-only", action="store_true", help="leave the soft limits out")
    options = parser.parse_args()

    paths = project_files()
    errors, reports = [], []
    for path in paths:
        cpp = path.endswith((".h", ".cc", ".cuh"))
        if not cpp and not path.endswith(".py") and path != "dev":
            continue
        text = (ROOT / path).read_text()
        if cpp:
            for check in (check_arrows, check_said_once, check_gil):
                errors += [f"{path}:{number}: {said}" for number, said in check(path, text)]
        reports += [f"{path}:{number}: {said}" for number, said in soft_limits(path, text)]
    errors += [f".pre-commit-config.yaml:{n}: {said}" for n, said in check_tool_versions()]
    reports += [f"{folder}/: {said}" for folder, said in crowded_folders(paths)]

    if not options.errors_only:
        for line in reports:
            print(f"note: {line}")
    for line in errors:
        print(f"error: {line}")
    print(f"structure: {len(errors)} errors, {len(reports)} notes in {len(paths)} files")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
