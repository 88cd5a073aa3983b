"""`onefold check`: options and edge cases on this machine, in both directions, against the oracle.

Every element of out, lse and each gradient must lie within its a priori error bound (`bounds`).
A cell shows the largest error as a fraction of its bound; for 16-bit results that is mostly the
rounding of the result itself, which comes close to its bound wherever there are many results.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from onefold._commands import bounds

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16", "float64")
INPUTS = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


class Case(NamedTuple):
    """Shapes (B, Sq, Sk, Hq, Hk, D, Dv) and what else `attention` is given."""

    name: str
    shape: tuple[int, ...]
    options: Callable[[Tensor], dict[str, Any]] = lambda q: {}
    magnitude: float = 1.0


def cases(device: str) -> list[Case]:
    import torch

    widest = 256 if device == "cuda" else 257

    def slopes(q: Tensor) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return torch.linspace(0.05, 0.5, q.shape[-2], dtype=wide)

    def bias(q: Tensor, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)

    def mask(*shape: int) -> Tensor:
        visible = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.7
        visible[..., 0, :] = False  # rows that see nothing
        return visible

    base = (2, 33, 65, 4, 4, 32, 32)
    return [
        Case("plain", base),
        Case("one query", (2, 1, 130, 4, 1, 64, 64), lambda q: {"causal": True}),
        Case("one key", (1, 7, 1, 2, 2, 16, 16)),
        Case("no keys", (1, 5, 0, 2, 2, 16, 16)),
        Case("grouped heads", (1, 50, 49, 6, 2, 24, 40)),
        Case("odd head dims", (1, 19, 37, 2, 1, 1, 3)),
        Case("wide heads", (1, 17, 33, 1, 1, 192, widest)),
        Case("causal, bottom right", base, lambda q: {"causal": True}),
        Case("causal, top left", (2, 65, 33, 2, 2, 32, 32), lambda q: {"causal": "top_left"}),
        Case("more queries than keys", (2, 65, 33, 2, 2, 32, 32), lambda q: {"causal": True}),
        Case("window", base, lambda q: {"window": (7, 3)}),
        Case("scale 0", base, lambda q: {"scale": 0.0, "causal": True}),
        Case("negative scale", base, lambda q: {"scale": -0.5}),
        Case("large scores", base, lambda q: {"scale": 1.0}, 8.0),
        Case("softcap", base, lambda q: {"softcap": 2.0, "scale": 1.0}),
        Case("alibi", base, lambda q: {"alibi_slopes": slopes(q)}),
        Case("bias", base, lambda q: {"bias": bias(q, 2, 4, 33, 65)}),
        Case("broadcast bias", base, lambda q: {"bias": bias(q, 1, 4, 1, 65)}),
        Case("mask", base, lambda q: {"mask": mask(2, 1, 33, 65)}),
        Case("sinks", base, lambda q: {"sinks": 10 * slopes(q), "causal": True}),
        Case("dropout", base, lambda q: {"dropout_p": 0.3, "seed": 7}),
        Case(
            "used lengths",
            base,
            lambda q: {"seqused_q": [20, 33], "seqused_k": [65, 0], "causal": True},
        ),
        Case(
            "packed",
            (0, 60, 70, 4, 2, 32, 32),
            lambda q: {
                "cu_seqlens_q": [0, 13, 13, 60],
                "cu_seqlens_k": [0, 30, 41, 70],
                "causal": True,
            },
        ),
        Case(
            "all at once",
            base,
            lambda q: {
                "causal": True,
                "window": (40, None),
                "softcap": 3.0,
                "alibi_slopes": slopes(q),
                "bias": bias(q, 2, 1, 33, 65),
                "mask": mask(1, 4, 33, 65),
                "sinks": slopes(q),
                "dropout_p": 0.2,
                "seed": 3,
                "seqused_k": [65, 50],
            },
        ),
    ]


def worst(got: Tensor, want: Tensor, bound: Tensor) -> float:
    """Largest error as a fraction of its bound; infinite where infinities or NaN disagree."""
    import torch

    got = got.detach().double()
    same = (got == want) | (got.isnan() & want.isnan())
    if not bool(((got.isfinite() & want.isfinite()) | same).all()):
        return float("inf")
    ratio = torch.where(same, 0.0, (got - want).abs() / bound)
    return ratio.max().item() if ratio.numel() else 0.0


def bound_of(terms: Tensor, sizes: dict[str, float], dtype: str) -> Tensor:
    """`dtype` is what the result is stored in."""
    import torch

    from onefold import reference

    weights = torch.tensor([sizes[s] for s in reference.SOURCES], dtype=torch.float64)
    total = torch.tensordot(weights, terms.nan_to_num(), dims=1)
    # The oracle rounds too, which only float64 notices.
    return (2 if dtype == "float64" else 1) * total + bounds.TINY[dtype]


def make_kernels(cases: list[Case], dtypes: list[str], done: Callable[[], None]) -> None:
    """Compiles all that the cases need on a GPU, on every processor at once."""

    def one(case: Case, dtype: str) -> None:
        import torch

        import onefold

        q, k, v, options, _ = inputs(case, dtype)
        moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        onefold.warmup(*(x.cuda() for x in (q, k, v)), backward=True, **moved)
        done()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(one, case, dtype) for case in cases for dtype in dtypes]:
            future.result()


def inputs(case: Case, dtype: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], Tensor]:
    """q, k, v, options and dout."""
    import torch

    batch, sq, sk, hq, hk, d, dv = case.shape
    lead = (batch,) if batch else ()
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn((*lead, *shape), generator=generator).to(getattr(torch, dtype))

    q, k = case.magnitude * rows(sq, hq, d), rows(sk, hk, d)
    v, dout = rows(sk, hk, dv), rows(sq, hq, dv)
    return q, k, v, case.options(q), dout


def judge(case: Case, dtype: str, device: str) -> tuple[float, float]:
    """The worst fractions of forward and of the gradients on a device; the oracle is on the CPU."""
    import torch

    import onefold
    from onefold import reference

    batch, sq, sk, hq, _, d, dv = case.shape
    q, k, v, options, dout = inputs(case, dtype)
    given: dict[str, Tensor] = {"q": q, "k": k, "v": v}
    given |= {name: options[name] for name in INPUTS[3:] if name in options}
    there = {name: x.to(device).requires_grad_() for name, x in given.items()}
    moved = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    moved |= {name: there[name] for name in INPUTS[3:] if name in there}
    out, lse = onefold.attention(*(there[name] for name in INPUTS[:3]), return_lse=True, **moved)
    generator = torch.Generator().manual_seed(3)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    dlse[lse.isinf().cpu()] = 0
    cotangents = (dout.to(device), dlse.to(device))
    found = [g.cpu() for g in torch.autograd.grad((out, lse), tuple(there.values()), cotangents)]
    out, lse = out.cpu(), lse.cpu()

    sizes = {
        of: bounds.sizes(dtype, max(d, dv), max(sk, 1), sq * hq * max(batch, 1), device, of)
        for of in ("out", "lse", "gradients")
    }
    wide = "float64" if dtype == "float64" else "float32"
    want_out, want_lse = reference.attention(q, k, v, **options)
    terms = reference.forward_terms(q, k, v, **options)
    forward = max(
        worst(out, want_out, bound_of(terms.out, sizes["out"], dtype)),
        worst(lse, want_lse, bound_of(terms.lse, sizes["lse"], wide)),
    )
    want = reference.gradients(q, k, v, dout=dout, dlse=dlse, **options)
    want_terms = reference.gradient_terms(q, k, v, dout=dout, dlse=dlse, **options)
    backward = 0.0
    for name, got in zip(given, found, strict=True):
        exact, exact_terms = getattr(want, name), getattr(want_terms, name)
        stored = str(got.dtype).removeprefix("torch.")
        bound = bound_of(exact_terms, sizes["gradients"], stored)
        bound = bound + bounds.UNIT[stored] * exact.abs()
        if device == "cuda":
            bound = bound + bounds.of_small_ds(name, q, k, options.get("scale"))
        backward = max(backward, worst(got, exact, bound))
    return forward, backward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: all of the device")


def run(args: argparse.Namespace) -> int:
    """Prints the table; 1 when an error is beyond its bound."""
    import torch
    from rich.console import Console
    from rich.progress import Progress, track
    from rich.table import Table

    dtypes = args.dtype or list(DTYPES)
    if args.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device is cuda: torch sees no CUDA device here")
        if "float64" in (args.dtype or []):
            raise ValueError("--dtype is float64: --device cuda needs float32, bfloat16 or float16")
        dtypes = [dtype for dtype in dtypes if dtype != "float64"]
    console = Console()
    table = Table(title="largest error as a fraction of its bound: forward / gradients")
    table.add_column("case")
    for dtype in dtypes:
        table.add_column(dtype, justify="right")
    failures = 0
    todo = cases(args.device)
    if args.device == "cuda":
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("compile", total=len(todo) * len(dtypes))
            make_kernels(todo, dtypes, lambda: progress.advance(task))
    for case in track(todo, description="check", console=console, transient=True):
        cells = []
        for dtype in dtypes:
            found = judge(case, dtype, args.device)
            bad = max(found) > 1
            failures += bad
            text = f"{found[0]:.2f} / {found[1]:.2f}"
            cells.append(f"[bold red]{text} FAILED[/]" if bad else text)
        table.add_row(case.name, *cells)
    console.print(table)
    if failures:
        console.print(f"[bold red]{failures} beyond their bound[/]")
        return 1
    console.print("every element of out, lse and each gradient is within its bound")
    return 0
