"""Kernels made ready ahead of a call: `onefold.warmup`, and `onefold cache prebuild` from a list of
problems, for GPUs that are not here."""

from __future__ import annotations

import json
import os

import pytest

import onefold
from onefold import _core
from onefold._commands import cli, problems

torch = pytest.importorskip("torch")

PLAIN = {"q": [2, 100, 4, 64], "k": [2, 80, 2, 64], "v": [2, 80, 2, 64]}
OPTIONS = PLAIN | {
    "dtype": "float16",
    "causal": "top_left",
    "window": [5, None],
    "scale": 0.5,
    "bias": {"shape": [4, 1, 80], "dtype": "float32"},
    "mask": [100, 80],
    "sinks": [4],
    "alibi_slopes": [2, 4],
    "dropout_p": 0.1,
    "seqused_k": {"shape": [2], "dtype": "int32"},
}
PACKED = {
    "q": [200, 4, 64],
    "k": [160, 2, 64],
    "v": {"shape": [160, 2, 64], "strides": [256, 64, 1]},
    "cu_seqlens_q": [3],
    "cu_seqlens_k": [3],
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(folder))
    return folder


def needs_a_compiler():
    nvidia = pytest.importorskip("nvidia")
    if not any(os.path.isdir(f"{path}/cu13/lib") for path in nvidia.__path__):
        pytest.skip("nvidia-cuda-nvrtc for CUDA 13 is not installed")


def test_prebuild_compiles_for_gpus_that_are_not_here_and_only_once(cache, tmp_path, capsys):
    needs_a_compiler()
    problems = tmp_path / "problems.json"
    problems.write_text("\n".join(json.dumps(problem) for problem in (PLAIN, PLAIN, PACKED)))
    assert cli.main(["cache", "prebuild", str(problems), "--arch", "80", "90"]) == 0
    out = capsys.readouterr().out
    assert "portable_forward for sm_80, " in out
    assert "portable_forward for sm_90, " in out
    kept = {(entry["name"], entry["target"]) for entry in _core.cache_entries()}
    assert kept == {("portable_forward", "sm_80"), ("portable_forward", "sm_90")}
    assert out.endswith(f"3 problems, 2 new kernels in {cache}\n")
    assert cli.main(["cache", "prebuild", str(problems), "--arch", "90"]) == 0
    assert capsys.readouterr().out.endswith(f"3 problems, 0 new kernels in {cache}\n")


def test_a_problem_with_every_option_asks_for_the_kernels_of_each(cache):
    needs_a_compiler()
    (asked,) = problems.read(json.dumps(OPTIONS))
    names = [line.split(" for ")[0] for line in _core.prebuild(*asked.question, None, False, 900)]
    assert names == ["mask_classes", "portable_forward"]


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ([1], "a problem is 1: an object with q, k and v is needed"),
        ({"q": [1, 2, 3, 4]}, "k is missing: the shapes of q, k and v are needed"),
        (PLAIN | {"q": 5}, 'q is 5: a shape, or {"shape", "dtype", "strides"}'),
        (PLAIN | {"q": [1.5]}, "q is {'shape': [1.5]}: shape and strides are lists of int"),
        (
            PLAIN | {"q": {"shape": [2, 3], "strides": [1]}},
            "q has shape [2, 3] and strides [1]: one stride per axis",
        ),
        (PLAIN | {"backward": 1}, "backward is 1: true or false is needed"),
        (PLAIN | {"colour": 1}, "attention() got an unexpected keyword argument 'colour'"),
        (PLAIN | {"causal": "left"}, "causal is 'left': False, True, "),
        (PLAIN | {"dtype": "float64"}, "q is float64 on CUDA: float16, bfloat16 or float32"),
        (PLAIN | {"dtype": "int8"}, "dtype of q is int8: float32, bfloat16, float16 or float64"),
        (PLAIN | {"k": [2, 80, 3, 64]}, "heads of v is 2: 3 is needed, the heads of k"),
    ],
)
def test_a_problem_that_cannot_be_gets_one_sentence(problem, sentence, cache, tmp_path, capsys):
    problems = tmp_path / "problems.json"
    problems.write_text(json.dumps(problem if isinstance(problem, list) else [problem]))
    assert cli.main(["cache", "prebuild", str(problems), "--arch", "90"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"onefold cache: {sentence}")
    assert error.count("\n") == 1


def test_an_architecture_that_nobody_knows_is_refused_with_those_that_are(cache, tmp_path, capsys):
    problems = tmp_path / "problems.json"
    problems.write_text(json.dumps(PLAIN))
    assert cli.main(["cache", "prebuild", str(problems), "--arch", "91"]) == 2
    assert capsys.readouterr().err.startswith("onefold cache: arch is 91: one of 80, 86, ")


@pytest.mark.parametrize("text", ["", "[1", '{"q": 1}\n{'])
def test_what_is_no_json_is_refused(text, cache, tmp_path, capsys):
    problems = tmp_path / "problems.json"
    problems.write_text(text)
    status = cli.main(["cache", "prebuild", str(problems), "--arch", "90"])
    captured = capsys.readouterr()
    if text:
        assert status == 2
        assert captured.err.startswith("onefold cache: ")
    else:
        assert captured.out == f"0 problems, 0 new kernels in {cache}\n"


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_the_cpu_has_nothing_to_make_ready(framework):
    x = torch.ones(1, 3, 2, 8)
    x = x.numpy() if framework == "numpy" else x.requires_grad_()
    assert onefold.warmup(x, x, x, causal=True) == []
    assert onefold.warmup(x, x, x, backward=True) == []


def test_warmup_refuses_what_attention_refuses():
    x = torch.ones(1, 3, 2, 8)
    with pytest.raises(ValueError, match=r"^seqlen of v is 2: 3 is needed"):
        onefold.warmup(x, x, x[:, :2])
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        onefold.warmup(x, x, x, colour=1)
