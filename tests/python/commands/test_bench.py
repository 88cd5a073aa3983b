"""What `onefold bench` measures on the CPU, what it makes of it, and what it says."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from onefold import _core
from onefold._bench import cases, cpu, goals, tables
from onefold._bench.cases import Case, record_of
from onefold._commands import bench, cli


def chosen(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.chosen_cases(parser.parse_args(list(words)))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def line(candidate, percent, seconds=1e-3, **changes):
    """A line of 1024 tokens, forward, float32, unless changed."""
    known = {name: value for name, value in changes.items() if name in Case.__dataclass_fields__}
    defaults = {"direction": "forward", "causal": False, "dtype": "float32", "batch": 1}
    defaults |= {"heads": 4, "heads_k": 4, "seqlen": 1024, "head_dim": 64, "threads": 1}
    case = Case(**defaults | known)
    peak = case.work / seconds * 100 / percent
    return record_of(candidate, case, [(seconds, peak)], 1e-7) | {"isa": changes.get("isa", "avx2")}


# ---- the cases ----


def test_useful_work_is_counted_pair_by_pair():
    common = {"dtype": "bfloat16", "batch": 2, "heads": 8, "head_dim": 64, "threads": 1}
    full = Case("forward", False, heads_k=2, seqlen=10, **common)
    assert full.work == full.flop == 4 * 2 * 8 * 100 * 64
    causal = Case("backward", True, heads_k=8, seqlen=10, **common)
    assert causal.flop == 10 * 2 * 8 * 55 * 64
    decode = Case("decode", False, heads_k=2, seqlen=10, **common)
    assert decode.flop == 4 * 2 * 8 * 10 * 64
    assert decode.work == 2 * (2 * 2 * 10 * 64) * 2  # K and V, two bytes a number


def test_the_full_set_has_all_that_the_goals_are_about():
    found = {
        (c.direction, c.causal, c.dtype, c.seqlen, c.head_dim, c.threads) for c in cases.full_set()
    }
    assert len(found) > 250
    for dtype in cases.DTYPES:
        for direction in ("forward", "backward"):
            for causal in (False, True):
                kind = (direction, causal, dtype)
                for n in (77, 128, 512, 1024, 2048, 4096):
                    assert {(*kind, n, 64, 1), (*kind, n, 128, 1)} <= found
                assert {(*kind, 512, d, 1) for d in (72, 96, 256)} <= found
                assert {(*kind, n, 128, 2) for n in (128, 1024, 4096)} <= found
        assert {("decode", False, dtype, 8192, 128, t) for t in (1, 2)} <= found
    heads = {(c.heads, c.heads_k) for c in cases.full_set() if c.decode}
    assert heads == {(32, 8), (8, 8), (64, 8)}
    assert {c.batch * c.heads for c in cases.full_set() if c.seqlen == 128} == {8}


def test_words_pick_from_the_full_set():
    some = chosen("--full", "--dtype", "float16", "--seqlen", "77", "--mask", "causal")
    assert {(c.direction, c.causal, c.dtype, c.seqlen) for c in some} == {
        ("forward", True, "float16", 77),
        ("backward", True, "float16", 77),
    }


def test_heads_may_be_shared():
    some = chosen("--heads", "6/2", "5", "--seqlen", "9", "--head-dim", "8", "--mask", "full")
    assert {(c.heads, c.heads_k) for c in some} == {(6, 2), (5, 5)}
    assert {c.direction for c in some} == {"forward", "backward", "decode"}


def test_plain_attention_is_left_out_where_it_is_slow_unless_asked_for():
    def names(seqlen, *words):
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        args = parser.parse_args(["--direction", "forward", "--seqlen", str(seqlen), *words])
        return bench.candidates(bench.chosen_cases(args)[0], args)

    assert names(512) == ["onefold", "sdpa", "plain"]
    assert names(513) == ["onefold", "sdpa"]
    assert names(513, "--plain") == ["onefold", "sdpa", "plain"]
    assert names(512, "--without", "sdpa") == ["onefold", "plain"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--full", "--heads", "4"], "--batch and --heads were given with --full"),
        (["--full", "--seqlen", "5"], "--full has no case with all that was asked for"),
        (["--device", "cuda", "--direction", "decode"], "--direction decode was given with"),
        (["--device", "cuda", "--full"], "--full was given with --device cuda"),
        (["--show", "nothing-here.jsonl"], "nothing-here.jsonl cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_sentence(words, sentence, capsys):
    assert cli.main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"onefold bench: {sentence}")


def test_heads_that_cannot_be_shared_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--heads", "5/2"])
    assert "'5/2' is no H or H/G with H a multiple of G" in capsys.readouterr().err


# ---- measuring ----


def test_rounds_beside_a_weak_probe_do_not_count():
    assert cpu.rounds_that_count([100, 99, 101, 100]) == [0, 1, 2]
    assert cpu.rounds_that_count([100, 100, 80, 100, 100]) == [0, 3]


def test_a_line_is_the_median_of_rounds_each_against_its_own_probe():
    case = Case("forward", False, "float32", 1, 1, 1, 10, 5, 1)
    rounds = [(1.0, 4.0 * case.flop), (2.0, case.flop), (4.0, case.flop)]
    found = record_of("onefold", case, rounds, 0.0)
    assert found["seconds"] == 2.0
    assert found["percent_of_probe"] == 25.0  # of 25, 50, 25
    assert found["gflops"] == case.flop / 2e9


def test_the_read_probe_reads_all_of_both_arrays_and_no_faster_than_it_can():
    import torch

    first, second = torch.zeros(1 << 20), torch.zeros(1 << 10, dtype=torch.bfloat16)
    assert 1e8 < _core.read_rate(first, second, 0.01) < 1e13
    with pytest.raises(TypeError):
        _core.read_rate(first, 3, 0.01)


def test_a_run_with_decoding_writes_lines_tables_and_a_picture(tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    words = "--seqlen 40 70 --head-dim 16 --heads 4/2 --rounds 1 --threads 1 2 --dtype float16"
    assert cli.main(["bench", *words.split(), "--mask", "full", "--plot", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    facts, *rest = lines_of(out)
    assert facts["kind"] == "facts"
    hosts = [x for x in rest if x["kind"] == "host"]
    assert {x["seqlen"] for x in hosts} == {1, 16, 64}
    assert all(x["seconds"] > 0 and x["seconds_with_autograd"] > 0 for x in hosts)
    found = [x for x in rest if x["kind"] == "bench"]
    decoding = [x for x in found if x["direction"] == "decode"]
    assert len(decoding) == 2 * 2 * 2  # candidates, lengths, threads
    assert len(found) == len(decoding) + 3 * 2 * 2 * 2  # directions besides
    for x in found + hosts:
        assert x["isa"] == _core.instruction_set()
        assert x["load"] >= 0
        assert x["cpu"]
        assert x["threads"] in (1, 2)
    for x in found:
        assert x["error"] < 2.0**-8  # a wrong group of heads errs by about 1
        assert x["percent_of_probe"] > 0
        several = x["candidate"] == "onefold" and x["threads"] == 2
        assert ("over_one_thread" in x) == several
    assert "decode" in printed
    assert "times as fast as sdpa" in printed
    assert out.with_suffix(".png").read_bytes()[1:4] == b"PNG"

    drawn = tmp_path / "again.png"
    assert cli.main(["plot", str(out), "--out", str(drawn)]) == 0
    assert drawn.stat().st_size > 10_000
    before = out.read_bytes()
    capsys.readouterr()
    assert cli.main(["bench", "--show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert out.read_bytes() == before
    assert [x for x in shown.splitlines() if "fp16" in x] == [
        x for x in printed.splitlines() if "fp16" in x
    ]


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lines_name_the_instruction_set_that_was_forced(tmp_path, isa):
    out = tmp_path / "lines.jsonl"
    words = "bench --seqlen 16 --head-dim 8 --rounds 1 --direction forward --without sdpa plain"
    command = [sys.executable, "-m", "onefold._commands.cli", *words.split(), "--out", str(out)]
    done = subprocess.run(
        command, env=os.environ | {"ONEFOLD_BACKEND": isa}, capture_output=True, text=True
    )
    if "this build and processor offer" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    lines = [x for x in lines_of(out) if x["kind"] != "facts"]
    assert {x["isa"] for x in lines} == {isa}
    if isa == "avx2":  # against torch on the same footing
        assert {x["torch_isa"] for x in lines} == {"AVX2"}


# ---- what is said about it ----


def test_a_cell_below_a_goal_is_named_and_one_on_it_is_not():
    def missed(*lines):
        return [(one.goal, one.line["seqlen"]) for one in goals.judge(lines)[1]]

    assert missed(line("onefold", 80.0)) == []
    assert missed(line("onefold", 79.9)) == [("% FMA, fwd from 1024", 1024)]
    assert missed(line("onefold", 80.0, isa="avx512")) == [("% FMA, fwd from 1024", 1024)]
    assert missed(line("onefold", 10.0, isa="baseline")) == []
    assert missed(line("onefold", 10.0, head_dim=72)) == []
    assert missed(line("sdpa", 10.0)) == []
    assert missed(line("onefold", 90), line("sdpa", 90, seconds=1.2e-3)) == [("x SDPA, fwd", 1024)]
    assert missed(line("onefold", 90), line("sdpa", 90, seconds=1.4e-3)) == []


def test_sixteen_bits_are_held_to_float32_and_two_threads_to_one():
    wide, narrow = line("onefold", 90), line("onefold", 85, dtype="bfloat16")
    assert [m.goal for m in goals.judge([wide, narrow])[1]] == ["% of fp32's share"]
    two = line("onefold", 90, threads=2, seconds=0.6e-3)
    (found,) = goals.judge([wide, two])[1]
    assert (found.goal, round(found.value, 3)) == ("x one thread", 1.667)
    assert goals.judge([wide, two | {"over_one_thread": 1.95}])[1] == []
    (found,) = goals.judge([wide | {"seconds": 2e-3}, two | {"over_one_thread": 1.5}])[1]
    assert (found.goal, found.value) == ("x one thread", 1.5)


def test_every_cell_is_in_a_table_of_at_most_80_columns(capsys):
    lines = []
    for case in cases.full_set():
        own = 1.234e-3 if case.decode else case.flop / 151e9
        for name, seconds in (("onefold", own), ("sdpa", 8.1 * own), ("plain", 11 * own)):
            made = record_of(name, case, [(seconds, case.work / own / 0.5)], 1.5e-7)
            lines.append(made | {"isa": "avx512"})
    console = Console(width=300)
    for table in tables.cpu_tables(lines):
        assert console.measure(table).maximum <= 80, table.title
        console.print(table)
    printed = capsys.readouterr().out
    own = [x for x in lines if x["candidate"] == "onefold"]
    assert printed.count(" 151 ") == len([x for x in own if x["direction"] != "decode"])
    assert printed.count(" 1234 ") == len([x for x in own if x["direction"] == "decode"])
