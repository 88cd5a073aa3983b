"""`onefold demo`: trains a small language model on a novel, three times at once.

Once with onefold, once with PyTorch's SDPA, once with plain attention, from the same weights on the
same batches; then checks that the three agree, measures time and peak memory against sequence
length, lets the model write a line, and saves a picture and the numbers behind it. PyTorch is
imported by `run` alone, so that `onefold --help` stays quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from onefold._commands import plots
from onefold._commands.plots import STYLES, Record, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from onefold._demo.tiny_gpt import Corpus
    from onefold._demo.training import Step, Trainee

# 500 steps of the three models and the sweep take about a minute on two cores.
DEFAULT_STEPS = 500
PACKAGES = ("torch", "numpy", "rich", "matplotlib")
PROMPT = "Elizabeth "
SAMPLE_LENGTH = 150
UNTIMED_STEPS = 10  # caches fill and memory pools grow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="training steps (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="where to run (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, batches and sample (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        help=f"the picture, a .png file or a folder for {plots.DEMO_PICTURE}; numbers go beside it",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if all agree, 1 if something does not, 2 for bad arguments."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        print(
            f"onefold demo: {', '.join(missing)} {are} missing: pip install 'onefold[demo]'",
            file=sys.stderr,
        )
        return 2
    try:
        if args.steps < 1:
            raise UsageError(f"--steps is {args.steps}: at least 1 is needed")
        if args.seed < 0:
            raise UsageError(f"--seed is {args.seed}: a number from 0 on is needed")
        if args.device not in ("cpu", "cuda"):
            raise UsageError(f"--device is {args.device}: cpu or cuda is needed")
        picture = plots.picture_path(args.out, plots.DEMO_PICTURE)
        return demonstrate(args.steps, args.seed, picture, args.device)
    except UsageError as error:
        print(f"onefold demo: {error}", file=sys.stderr)
    return 2


def demonstrate(steps: int, seed: int, picture: Path, device: str) -> int:
    """Does what the module says; returns the exit status."""
    # Read by the OpenMP runtime when PyTorch loads it. By default its idle threads spin for
    # milliseconds, which costs more than a training step when anything else runs on the machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from onefold._demo import training
    from onefold._demo.attentions import ATTENTIONS
    from onefold._demo.tiny_gpt import TEXT, Config, Corpus

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda: torch sees no CUDA device here")
    console = Console()
    corpus = Corpus(TEXT.read_text(encoding="ascii"))
    config = Config(vocabulary=len(corpus.alphabet))
    trainees = {
        name: training.Trainee(config, attention, seed, steps, device)
        for name, attention in ATTENTIONS.items()
    }
    records = [facts(trainees, steps, seed, device)]
    console.print(
        f"Jane Austen, Pride and Prejudice: {len(corpus.tokens):,} characters. "
        f"{records[0]['parameters']:,} parameters, {config.layers} layers, "
        f"{config.heads} query and {config.kv_heads} key heads of {config.head_dim}, "
        f"context {config.context}; fp32, {records[0]['where']}."
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        history = train(progress, trainees, corpus, steps, seed)
        sweep(progress, records, device)
    for step, shown in enumerate(history):
        records.append({"kind": "loss", "step": step} | shown.losses)
    report_speed(console, records, trainees, history, device)
    passed = report_checks(console, records, trainees, corpus, history)
    report_sample(console, records, trainees["onefold"], corpus, seed)

    lines = picture.with_suffix(".jsonl")
    plots.write_records(lines, records)
    plots.draw_demo(records, picture)
    console.print(f"plot: {picture}\nnumbers: {lines}", soft_wrap=True)
    return 0 if passed else 1


def facts(trainees: dict[str, Trainee], steps: int, seed: int, device: str) -> Record:
    """What a reader of the numbers needs to repeat them."""
    from dataclasses import asdict

    import torch

    import onefold
    from onefold._demo import sweep
    from onefold._demo.tiny_gpt import SEQUENCES

    model = trainees["onefold"].model
    return {
        "kind": "demo",
        "onefold": onefold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "where": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{torch.get_num_threads()} threads",
        "steps": steps,
        "seed": seed,
        "sequences_per_batch": SEQUENCES,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "model": asdict(model.config),
        "sweep": {"batch": 1, "heads": sweep.HEADS, "head_dim": sweep.HEAD_DIM, "causal": True},
    }


def train(
    progress: Progress, trainees: dict[str, Trainee], corpus: Corpus, steps: int, seed: int
) -> list[Step]:
    """Trains all models; the bar shows their losses."""
    from onefold._demo import training

    task = progress.add_task("training", total=steps, note="")
    history = []
    for shown in training.train(trainees, corpus, steps, seed):
        history.append(shown)
        losses = "  ".join(f"{name} {loss:.3f}" for name, loss in shown.losses.items())
        progress.update(task, advance=1, note=f"loss: {losses}")
    return history


def sweep(progress: Progress, records: list[Record], device: str) -> None:
    """Adds a record for the time and one for the memory of every attention and length."""
    from onefold._demo import sweep as measure

    # Work grows with the square of the length, and so does the bar.
    lengths = measure.LENGTHS[device]
    work = sum(n * n for n in lengths)
    task = progress.add_task("time", total=work, note="")
    for seqlen in lengths:
        progress.update(task, note=f"sequence length {seqlen}")
        for name, seconds in measure.times(seqlen, device).items():
            records.append(
                {"kind": "time", "attention": name, "seqlen": seqlen, "seconds": seconds}
            )
        progress.update(task, advance=seqlen * seqlen)
    task = progress.add_task("memory", total=len(STYLES) * work, note="")
    memory = measure.peak_memory_on_gpu if device == "cuda" else measure.peak_memory
    for name, seqlen, bytes_needed in memory(lengths):
        progress.update(task, note=f"sequence length {seqlen}")
        records.append(
            {"kind": "memory", "attention": name, "seqlen": seqlen, "bytes": bytes_needed}
        )
        progress.update(task, advance=seqlen * seqlen)


def report_speed(
    console: Console,
    records: list[Record],
    trainees: dict[str, Trainee],
    history: list[Step],
    device: str,
) -> None:
    """A table of final loss, tokens/s, and the ends of the sweep."""
    from rich.table import Table

    from onefold._demo import sweep as measure
    from onefold._demo.tiny_gpt import SEQUENCES

    longest = measure.LENGTHS[device][-1]
    table = Table()
    table.add_column("attention")
    table.add_column("final loss", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column(f"time at {longest}", justify="right")
    table.add_column(f"memory at {longest}", justify="right")
    at_longest = {
        (record["kind"], record["attention"]): record
        for record in records
        if record.get("seqlen") == longest
    }
    last = history[-10:]
    for name, trainee in trainees.items():
        timed = trainee.seconds[min(UNTIMED_STEPS, len(trainee.seconds) // 2) :]
        tokens = SEQUENCES * trainee.model.config.context
        speed = tokens / statistics.median(timed)
        loss = statistics.fmean(shown.losses[name] for shown in last)
        records.append(
            {"kind": "speed", "attention": name, "tokens_per_second": speed, "final_loss": loss}
        )
        needed = at_longest["memory", name]["bytes"]
        table.add_row(
            STYLES[name].label,
            f"{loss:.3f}",
            f"{speed:,.0f}",
            f"{at_longest['time', name]['seconds'] * 1e3:.0f} ms",
            "too much" if needed is None else f"{needed / 1e6:.0f} MB",
        )
    console.print(table)
    console.print(
        f"final loss: mean of the last {len(last)} steps, nats per character; tokens/s: median "
        "over the training steps; time and memory: forward and backward of attention alone"
    )


def report_checks(
    console: Console,
    records: list[Record],
    trainees: dict[str, Trainee],
    corpus: Corpus,
    history: list[Step],
) -> bool:
    """Prints what was compared; true when all of it agrees."""
    from onefold._demo import checks, training

    model = trainees["onefold"].model
    tokens, _ = next(corpus.batches(model.config.context, seed=0))
    found = [
        checks.curves_agree(history, model.device.type),
        checks.attention_agrees(*training.captured_qkv(model, tokens)),
    ]
    for check in found:
        console.print(check.sentence, style="green" if check.passed else "bold red")
        records.append(
            {
                "kind": "check",
                "name": check.name,
                "passed": check.passed,
                "sentence": check.sentence,
            }
        )
    return all(check.passed for check in found)


def report_sample(
    console: Console, records: list[Record], trainee: Trainee, corpus: Corpus, seed: int
) -> None:
    """Lets the model trained with onefold write a line."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = trainee.model.sample(corpus.encode(PROMPT), SAMPLE_LENGTH, generator)
    text = " ".join(corpus.decode(tokens).split())
    records.append({"kind": "sample", "prompt": PROMPT, "text": text})
    console.print(f"the model writes: {text}", markup=False, highlight=False)
