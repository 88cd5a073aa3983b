"""onefold demo and onefold plot: the text, the model, the checks, the measurements, the files."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import pathlib
import re
import statistics
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from onefold._demo.tiny_gpt import (  # noqa: E402
    SEQUENCES,
    TEXT,
    Config,
    Corpus,
    Transformer,
    rotate,
    rotation,
)

from onefold._commands import cli, demo, plots  # noqa: E402
from onefold._demo import checks, sweep, training  # noqa: E402
from onefold._demo.attentions import ATTENTIONS, plain  # noqa: E402

PNG = b"\x89PNG\r\n\x1a\n"


def call(module, *words):
    """The exit status of `onefold demo` or `onefold plot` with these words."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args(words))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small gain nothing from a second thread, and on a busy machine lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus():
    return Corpus(TEXT.read_text(encoding="ascii"))


def small(corpus, context=64):
    return Config(vocabulary=len(corpus.alphabet), context=context, width=64, layers=2, mlp=96)


def trained(corpus, steps, attentions=ATTENTIONS):
    trainees = {
        name: training.Trainee(small(corpus), attention, seed=0, steps=steps)
        for name, attention in attentions.items()
    }
    return trainees, list(training.train(trainees, corpus, steps, seed=0))


# ---- the text and the model ----


def test_the_text_that_ships_is_the_one_its_readme_describes():
    content = TEXT.read_bytes()
    readme = TEXT.with_name("README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(content).hexdigest() in readme
    assert f"{len(content):,}".replace(",", " ") in readme
    assert "It is a truth universally acknowledged" in content.decode("ascii")


def test_a_text_survives_encoding_and_decoding(corpus):
    text = "Mr. Darcy,\nof Pemberley"
    assert corpus.decode(corpus.encode(text)) == text


def test_targets_are_the_tokens_one_ahead(corpus):
    tokens, targets = next(corpus.batches(context=32, seed=0))
    assert tokens.shape == targets.shape == (SEQUENCES, 32)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert corpus.decode(tokens[0]) in corpus.decode(corpus.tokens)


def test_rotated_products_depend_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator, dtype=torch.float64)
    turn = rotation(40, 16).to(torch.complex128)

    def product(i, j):
        return float((rotate(q, turn[i : i + 1]) * rotate(k, turn[j : j + 1])).sum())

    # The angles were rounded to fp32: 2^-24 of each of 16 products of two normals.
    assert product(7, 3) == pytest.approx(product(39, 35), abs=16 * 4 * 2.0**-24 * 16)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_later_token_changes_no_earlier_loss(corpus, name):
    config = small(corpus)
    model = Transformer(config, ATTENTIONS[name], seed=0)
    tokens, targets = next(corpus.batches(config.context, seed=0))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % config.vocabulary
    with torch.no_grad():
        before, after = model.losses(tokens, targets), model.losses(changed, targets)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_models_of_one_seed_start_equal_and_of_two_do_not(corpus):
    first, same, other = (Transformer(small(corpus), plain, seed) for seed in (0, 0, 1))
    assert torch.equal(first.embedding.weight, same.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_the_captured_tensors_have_grouped_heads_and_rotated_queries(corpus):
    trainees, _ = trained(corpus, steps=1)
    model = trainees["onefold"].model
    tokens, _ = next(corpus.batches(64, seed=0))
    q, k, v = training.captured_qkv(model, tokens)
    assert q.shape == (2, 64, 4, 16)
    assert k.shape == v.shape == (2, 64, 2, 16)


# ---- the checks ----


def test_the_loss_falls_below_that_of_character_frequencies_and_the_curves_agree(corpus):
    trainees, history = trained(corpus, steps=120)
    share = torch.bincount(corpus.tokens).double() / len(corpus.tokens)
    frequencies = float(-(share * share.log()).sum())  # the loss of knowing them and no more
    for name in ATTENTIONS:
        assert history[0].losses[name] > math.log(len(share))  # worse than an even guess
        assert statistics.fmean(step.losses[name] for step in history[-10:]) < frequencies - 0.1
    check = checks.curves_agree(history)
    assert check.passed, check.sentence
    tokens, _ = next(corpus.batches(64, seed=1))
    check = checks.attention_agrees(*training.captured_qkv(trainees["onefold"].model, tokens))
    assert check.passed, check.sentence


FAULTS = {
    "scale off by 1e-4": lambda q, k, v: plain(q * (1 + 1e-4), k, v),
    "heads in the wrong order": lambda q, k, v: plain(q, k.flip(2), v.flip(2)),
    "a detached key": lambda q, k, v: plain(q, k.detach() + 0 * k, v),
    "rounded to bf16": lambda q, k, v: plain(*(x.bfloat16() for x in (q, k, v))).float(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_both_checks_notice_a_fault(corpus, monkeypatch, fault):
    monkeypatch.setitem(ATTENTIONS, "onefold", FAULTS[fault])
    trainees, history = trained(corpus, steps=5, attentions=ATTENTIONS)
    assert not checks.curves_agree(history).passed
    tokens, _ = next(corpus.batches(64, seed=1))
    captured = training.captured_qkv(trainees["plain"].model, tokens)
    assert not checks.attention_agrees(*captured).passed


def test_nan_is_no_agreement(corpus, monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "onefold", lambda q, k, v: plain(q, k, v) * torch.nan)
    _, history = trained(corpus, steps=2, attentions=ATTENTIONS)
    assert not checks.curves_agree(history).passed


def test_the_example_trains_and_writes(monkeypatch, capsys):
    path = pathlib.Path(__file__).parents[3] / "examples" / "tiny_gpt.py"
    spec = importlib.util.spec_from_file_location("tiny_gpt", path)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tiny_gpt", example)  # its dataclass looks itself up
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "STEPS", 40)
    example.main()
    first, second, text = capsys.readouterr().out.split("\n", 2)
    assert [line.split(":")[0] for line in (first, second)] == ["step 20", "step 40"]
    assert float(second.split()[2]) < float(first.split()[2])
    assert text.startswith("Mr. Darcy ")
    assert len(text.removesuffix("\n")) == len("Mr. Darcy ") + 300


# ---- the measurements ----


def test_peak_memory_sees_the_score_matrix_and_finds_it_in_plain_attention_alone():
    seqlen = 2048
    matrix_bytes = 4 * sweep.HEADS * seqlen * seqlen
    result_bytes = 4 * 4 * sweep.HEADS * seqlen * sweep.HEAD_DIM  # out, dq, dk, dv
    found = {name: needed for name, _, needed in sweep.peak_memory((seqlen,))}
    assert found.keys() == ATTENTIONS.keys()
    assert found["plain"] > matrix_bytes
    for name in ("onefold", "sdpa"):
        assert result_bytes / 2 < found[name] < matrix_bytes / 2


# ---- the commands ----


def test_a_short_demo_prints_its_findings_and_saves_plot_and_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "LENGTHS", {"cpu": (64, 128)})
    assert call(demo, "--steps", "4", "--out", str(tmp_path / "new" / "folder")) == 0
    shown = capsys.readouterr().out
    for words in ("tokens/s", "curves agree", "gradients agree", "the model writes: Elizabeth"):
        assert words in " ".join(shown.split())
    picture = tmp_path / "new" / "folder" / plots.DEMO_PICTURE
    assert picture.read_bytes().startswith(PNG)
    records = plots.read_records(picture.with_suffix(".jsonl"))
    kinds = [record["kind"] for record in records]
    counts = {"demo": 1, "loss": 4, "speed": 3, "time": 6, "memory": 6, "check": 2, "sample": 1}
    assert {kind: kinds.count(kind) for kind in set(kinds)} == counts

    again = tmp_path / "again.png"
    lines = picture.with_suffix(".jsonl")
    assert call(plots, str(lines), "--out", str(again)) == 0
    assert again.read_bytes() == picture.read_bytes()


def test_the_seed_decides_the_losses(corpus):
    def losses(seed):
        trainee = training.Trainee(small(corpus), plain, seed, steps=3)
        history = training.train({"plain": trainee}, corpus, 3, seed)
        return [step.losses["plain"] for step in history]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--steps", "0"), "--steps is 0: at least 1 is needed"),
        (("--seed", "-1"), "--seed is -1: a number from 0 on is needed"),
        (("--device", "mps"), "--device is mps: cpu or cuda is needed"),
        (("--out", "x.gif"), "--out is x.gif: a picture is a .png file, or name a folder for it"),
    ],
)
def test_a_bad_argument_of_demo_gets_one_sentence(capsys, words, sentence):
    assert call(demo, *words) == 2
    assert capsys.readouterr().err == f"onefold demo: {sentence}\n"


@pytest.mark.parametrize(
    ("absent", "sentence"),
    [
        (["rich", "matplotlib"], "onefold demo: rich, matplotlib are missing: pip install"),
        (["numpy"], "onefold demo: numpy is missing: pip install 'onefold[demo]'"),
    ],
)
def test_every_missing_package_is_named_at_once(capsys, monkeypatch, absent, sentence):
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_an_out_below_a_file_gets_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "plot.png"
    assert call(demo, "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"onefold demo: --out is {out}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe\x00", "cannot be read: it is not text"),
        (b"not json\n", 'line 1 of .* is no JSON object with a "kind"'),
        (b'{"kind": "demo"}\n[1]\n', 'line 2 of .* is no JSON object with a "kind"'),
        (b'{"kind": "other"}\n', "was not written by onefold demo"),
    ],
)
def test_a_bad_file_for_plot_gets_one_sentence(tmp_path, capsys, content, words):
    lines = tmp_path / "lines.jsonl"
    if content is not None:
        lines.write_bytes(content)
    assert call(plots, str(lines)) == 2
    error = capsys.readouterr().err
    assert error.startswith("onefold plot: ")
    assert error.count("\n") == 1
    assert re.search(words, error)


def test_a_killed_measurement_leaves_a_gap_in_the_plot(tmp_path):
    records = [{"kind": "demo"}]
    records += [{"kind": "loss", "step": s, "onefold": 1, "sdpa": 1, "plain": 1} for s in (0, 1)]
    for name in ATTENTIONS:
        for seqlen in (64, 128):
            point = {"attention": name, "seqlen": seqlen}
            needed = None if (name, seqlen) == ("plain", 128) else 1000
            records.append({"kind": "time", "seconds": 0.1} | point)
            records.append({"kind": "memory", "bytes": needed} | point)
    lines = tmp_path / "lines.jsonl"
    plots.write_records(lines, records)
    assert [json.loads(line) for line in lines.read_text().splitlines()] == records
    assert call(plots, str(lines)) == 0
    assert lines.with_suffix(".png").read_bytes().startswith(PNG)
