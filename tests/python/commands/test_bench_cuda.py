"""What `onefold bench --device cuda` makes of its measurements, without a GPU."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("torch")
rich = pytest.importorskip("rich")

from onefold._bench import cases, tables  # noqa: E402
from onefold._bench import cuda as bench_cuda  # noqa: E402
from onefold._commands import bench, cli  # noqa: E402


def parsed(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(words))


def record(name, case, seconds):
    return cases.record_of(name, case, [(seconds, 700e12)], error=2e-3)


def test_the_cells_are_those_of_published_tables():
    todo = list(bench.chosen_cases(parsed("--device", "cuda", "--direction", "forward")))
    assert len(todo) == 2 * 3 * 6
    assert {case.batch * case.seqlen for case in todo} == {16384}
    assert {case.heads * case.head_dim for case in todo} == {2048}
    assert {case.dtype for case in todo} == {"bfloat16"}


def test_threads_belong_to_the_cpu(capsys):
    assert cli.main(["bench", "--device", "cuda", "--threads", "2"]) == 2
    assert capsys.readouterr().err.startswith("onefold bench: --")


def test_a_candidate_that_does_not_do_a_case_has_a_dash(capsys):
    case = bench.chosen_cases(parsed("--device", "cuda"))[0]
    names = list(bench.CUDA_CANDIDATES)
    table = tables.cuda_table("title", names)
    found = [record(name, case, 1e-3) for name in names if name != "cudnn"]
    tables.add_cuda_row(table, names, found)
    rich.console.Console(width=80).print(table)
    row = capsys.readouterr().out.splitlines()[-2].split()
    speed = case.flop / 1e-3
    assert row[:2] == [str(case.head_dim), str(case.seqlen)]
    assert row[2:6] == ["1.00", f"{speed / 1e12:.0f}", f"{speed / 7e12:.0f}", "2e-03"]
    assert row[6:] == ["1.00", "-", "1.00"]


def test_every_line_before_the_cells_has_a_sentence():
    device = {"kind": "device", "name": "GPU", "first_call_seconds": 1.5, "compiler": "NVRTC 13.0"}
    host = {"kind": "host", "candidate": "sdpa", "seconds": 1e-5, "seconds_with_autograd": 2e-5,
            "least_seconds": 9e-6, "least_seconds_with_autograd": 1.9e-5}  # fmt: skip
    old = {key: x for key, x in host.items() if not key.startswith("least")}
    assert bench_cuda.sentence(old) == (
        "host time of a small call, sdpa: 10.0 us, with autograd 20.0 us"
    )
    assert bench_cuda.sentence(device) == "GPU; first call 1.50 s; NVRTC 13.0"
    assert bench_cuda.sentence(host) == (
        "host time of a small call, sdpa: 10.0 us (least 9.0), with autograd 20.0 us (least 19.0)"
    )
