"""merge_states, explain, info, threads, the oracle's Python face and the command line."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

import frontend_inputs  # noqa: E402
import onefold  # noqa: E402
from onefold import _core  # noqa: E402
from onefold._commands import cli  # noqa: E402
from onefold._options import NAMES, SEED, arguments  # noqa: E402
from processes import output_of  # noqa: E402


def make_inputs(dtype=torch.float64, sq=3, sk=10, requires_grad=False):
    return frontend_inputs.make_inputs(dtype, requires_grad, sq=sq, sk=sk, dv=4)


def parts_of(q, k, v, borders):
    results = [
        onefold.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in itertools.pairwise(borders)
    ]
    return [list(x) for x in zip(*results, strict=True)]


# ---- merge_states ----


def test_merging_parts_of_the_keys_gives_attention_over_all_of_them():
    q, k, v = make_inputs()
    out, lse = onefold.merge_states(*parts_of(q, k, v, [0, 3, 3, 7, 10]))  # one part is empty
    expected, expected_lse = onefold.attention(q, k, v, return_lse=True)
    assert ((out - expected).abs() <= 2.0**-53 * 100 * v.abs().max()).all()
    assert ((lse - expected_lse).abs() <= 2.0**-53 * 100 * expected_lse.abs().max()).all()


def test_a_leading_axis_and_a_list_merge_to_the_same_bits():
    outs, lses = parts_of(*make_inputs(), [0, 4, 10])
    listed = onefold.merge_states(outs, lses)
    stacked = onefold.merge_states(torch.stack(outs), torch.stack(lses))
    assert all(torch.equal(a, b) for a, b in zip(listed, stacked, strict=True))


def test_packed_results_and_plain_rows_merge_in_their_own_layouts():
    outs, lses = parts_of(*make_inputs(), [0, 4, 10])
    dense, dense_lse = onefold.merge_states(outs, lses)
    packed, packed_lse = onefold.merge_states([o[0] for o in outs], [x[0] for x in lses])
    assert torch.equal(packed, dense[0])
    assert torch.equal(packed_lse, dense_lse[0])
    rows, rows_lse = onefold.merge_states([o[0, :, 1] for o in outs], [x[0, 1] for x in lses])
    assert torch.equal(rows, dense[0, :, 1])
    assert torch.equal(rows_lse, dense_lse[0, 1])


def test_rows_that_no_part_has_seen_stay_empty_with_zero_gradients():
    outs = torch.zeros(3, 2, 4, requires_grad=True)
    lses = torch.full((3, 2), -torch.inf, requires_grad=True)
    out, lse = onefold.merge_states(outs, lses)
    assert torch.equal(out, torch.zeros(2, 4))
    assert torch.equal(lse, torch.full((2,), -torch.inf))
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), (outs, lses)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_merge_states_passes_first_and_second_order_gradcheck(check):
    generator = torch.Generator().manual_seed(0)
    outs, lses = (
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True)
        for s in ((3, 1, 2, 2, 3), (3, 1, 2, 2))
    )
    assert check(onefold.merge_states, (outs, lses))


def test_attention_over_merged_parts_has_the_gradients_of_the_whole():
    inputs = make_inputs(requires_grad=True)
    merged = onefold.merge_states(*parts_of(*inputs, [0, 3, 10]))
    whole = onefold.attention(*inputs, return_lse=True)
    actual, expected = (
        torch.autograd.grad(out.sin().sum() + lse.cos().sum(), inputs)
        for out, lse in (merged, whole)
    )
    for a, e in zip(actual, expected, strict=True):
        assert ((a - e).abs() <= 2.0**-53 * 1000 * e.abs().max()).all()


def test_numpy_parts_merge_to_the_bits_of_torch_parts():
    outs, lses = parts_of(*make_inputs(torch.float32), [0, 4, 10])
    expected = onefold.merge_states(outs, lses)
    actual = onefold.merge_states([o.numpy() for o in outs], [x.numpy() for x in lses])
    for a, e in zip(actual, expected, strict=True):
        assert np.array_equal(a, e.numpy())


@pytest.mark.parametrize(
    ("outs", "lses", "error", "sentence"),
    [
        ([], [], ValueError, "outs is empty: at least one part is needed"),
        ([1], [1], TypeError, "outs is an int: a torch.Tensor or a numpy.ndarray is needed"),
        (
            torch.ones(2, 3, 4),
            torch.ones(2, 4),
            ValueError,
            r"lses has shape \(2, 4\): it does not",
        ),
        (torch.ones(2, 3, 4), [1.0, 2.0], TypeError, r"lses\[0\] is a float: a torch.Tensor"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_one_sentence(outs, lses, error, sentence):
    with pytest.raises(error, match=sentence):
        onefold.merge_states(outs, lses)


# ---- explain, info, threads ----


def test_explain_prints_both_plans_and_returns_them(capsys):
    explanation = onefold.explain(*make_inputs(), causal=True, softcap=3.0)
    printed = capsys.readouterr().out
    assert printed == f"{explanation}\n"
    assert re.search(r"^forward: cpu, .+$", printed, re.MULTILINE)
    assert re.search(r"^backward: cpu, .+$", printed, re.MULTILINE)
    assert explanation.forward.workspace_bytes >= 0
    assert "\n" not in repr(explanation)


def test_explain_says_that_a_last_stride_costs_a_copy():
    q, k, v = make_inputs()
    assert "stride" not in str(onefold.explain(q, k, v))
    strided = v.transpose(1, 3).contiguous().transpose(1, 3)
    assert "stride" in str(onefold.explain(q, k, strided))


def test_explain_refuses_an_unknown_keyword_by_its_own_name():
    with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument 'quick'$"):
        onefold.explain(*make_inputs(), quick=True)


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        ("attention", "casual", "causal"),
        ("attention", "is_causal", "causal"),
        ("attention", "window_size", "window"),
        ("attention", "dropout", "dropout_p"),
        ("attention", "return_lsee", "return_lse"),
        ("sdpa", "causal", "is_causal"),
        ("sdpa", "attn_bias", "attn_mask"),
        ("explain", "casual", "causal"),
        ("warmup", "softcapp", "softcap"),
        ("reference.attention", "sink", "sinks"),
    ],
)
def test_a_misspelt_keyword_is_told_which_one_was_meant(function, given, meant):
    call = onefold
    for part in function.split("."):
        call = getattr(call, part)
    name = function.rpartition(".")[2]
    sentence = f"{name}() got an unexpected keyword argument {given!r}: did you mean {meant!r}?"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        call(*make_inputs(), **{given: True})


def test_a_misspelt_keyword_of_merge_states_is_told_which_one_was_meant():
    outs, lses = parts_of(*make_inputs(), [0, 4, 10])
    with pytest.raises(TypeError, match="'lse': did you mean 'lses'"):
        onefold.merge_states(outs, lses, lse=lses)


def test_explain_says_plainly_what_runs_on_the_cpu_and_why():
    text = str(onefold.explain(*make_inputs(), causal=True).forward)
    assert "runs on the CPU, because q is there, with " in text
    assert "instructions, the widest that this processor has" in text
    hidden = str(onefold.explain(*make_inputs(), window=(-1, 0)).forward)
    assert "window hides every key from every query: None, not a negative number, is un" in hidden
    assert "window hides" not in text


def test_a_window_of_minus_one_and_zero_hides_every_key_as_documented():
    q, k, v = make_inputs()
    out, lse = onefold.attention(q, k, v, window=(-1, 0), return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert "(-1, 0) none at all" in " ".join(onefold.attention.__doc__.split())


def test_four_axes_with_offsets_say_that_packed_sequences_have_three():
    q, k, v = make_inputs()
    with pytest.raises(
        ValueError, match=r"^q has 4 axes, .*\(tokens, heads, head_dim\), for cu_se"
    ):
        onefold.attention(q, k, v, cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 10])


def test_info_names_the_version_and_the_threads():
    text = onefold.info()
    assert onefold.__version__ in text
    assert "threads" in text


def test_results_and_gradients_are_the_same_bits_for_any_number_of_threads():
    before = onefold.get_num_threads()
    found = []
    try:
        for count in (1, 2, 7):
            onefold.set_num_threads(count)
            assert onefold.get_num_threads() == count
            inputs = make_inputs(torch.float32, sq=100, sk=300, requires_grad=True)
            out = onefold.attention(*inputs, causal=True)
            found.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    finally:
        onefold.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_calls_from_several_threads_at_once_give_the_same_bits():
    inputs = make_inputs(torch.float32, sq=200, sk=300)
    expected = onefold.attention(*inputs)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: onefold.attention(*inputs), range(16)))
    assert all(torch.equal(result, expected) for result in results)


def test_other_python_threads_run_while_attention_computes():
    x = torch.randn(1, 2000, 4, 64)
    running = threading.Event()
    done = threading.Event()

    def work():
        running.set()
        for _ in range(3):
            onefold.attention(x, x, x)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    steps = 0
    while not done.is_set():
        steps += 1
        time.sleep(1e-3)
    thread.join()
    assert steps > 5  # with the interpreter locked, about one for each call


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_too():
    code = (
        "import os, torch, onefold\n"
        "torch.set_num_threads(1)\n"  # torch's own threads do not survive a fork
        "onefold.set_num_threads(2)\n"
        "x = torch.randn(2, 300, 4, 64)\n"
        "expected = onefold.attention(x, x, x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if torch.equal(onefold.attention(x, x, x), expected) else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    output_of(code)


@pytest.mark.parametrize("order", ["import onefold, torch", "import torch, onefold"])
def test_the_first_call_may_be_a_compiled_one_in_either_order_of_imports(order):
    code = (
        f"{order}\n"
        "x = torch.ones(1, 5, 2, 8)\n"
        "call = torch.compile(onefold.attention, fullgraph=True, backend='aot_eager')\n"
        "assert torch.equal(call(x, x, x), x)\n"
    )
    output_of(code)


# ---- the oracle ----


def test_the_oracle_takes_the_arguments_of_attention_and_agrees():
    q, k, v = make_inputs()
    bias = torch.linspace(-1, 1, 10, dtype=torch.float64)
    options = {"causal": True, "softcap": 2.0, "bias": bias, "dropout_p": 0.3, "seed": 4}
    out, lse = onefold.attention(q, k, v, return_lse=True, **options)
    exact, exact_lse = onefold.reference.attention(q, k, v, **options)
    assert exact.dtype == exact_lse.dtype == torch.float64
    assert ((out - exact).abs() <= 1e-12).all()
    assert ((lse - exact_lse).abs() <= 1e-12).all()


def test_the_oracles_gradients_are_those_of_attention():
    inputs = make_inputs(requires_grad=True)
    bias = torch.linspace(-1, 1, 10, dtype=torch.float64, requires_grad=True)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    out, lse = onefold.attention(*inputs, bias=bias, sinks=sinks, return_lse=True)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    found = torch.autograd.grad((out, lse), (*inputs, bias, sinks), (dout, dlse))
    exact = onefold.reference.gradients(*inputs, dout=dout, dlse=dlse, bias=bias, sinks=sinks)
    wanted = (exact.q, exact.k, exact.v, exact.bias, exact.sinks)
    assert exact.alibi_slopes is None
    for a, e in zip(found, wanted, strict=True):
        assert a.shape == e.shape
        assert ((a - e).abs() <= 1e-12 * e.abs().max().clamp(min=1)).all()


def test_the_oracles_bound_terms_have_one_row_for_each_source():
    q, k, v = make_inputs()
    out, lse = onefold.reference.attention(q, k, v)
    terms = onefold.reference.forward_terms(q, k, v)
    assert terms.out.shape == (len(onefold.reference.SOURCES), *out.shape)
    assert terms.lse.shape == (len(onefold.reference.SOURCES), *lse.shape)
    assert torch.equal(terms.count, torch.full(lse.shape, 10.0, dtype=torch.float64))
    gradients = onefold.reference.gradient_terms(q, k, v, dout=out)
    assert gradients.k.shape == (len(onefold.reference.SOURCES), *k.shape)


def test_the_oracle_works_on_numpy_arrays_and_empty_results():
    q, k, v = (x.numpy() for x in make_inputs())
    out, _ = onefold.reference.attention(q, k, v)
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, onefold.reference.attention(*make_inputs())[0].numpy())
    assert onefold.reference.attention(q[:, :0], k, v)[0].shape == (2, 0, 4, 4)
    empty, _ = onefold.reference.attention(*(x[:, :0] for x in make_inputs()))
    assert empty.shape == (2, 0, 4, 4)


def test_the_oracle_needs_an_explicit_seed_for_dropout():
    with pytest.raises(ValueError, match="seed is None: the oracle needs the seed"):
        onefold.reference.attention(*make_inputs(), dropout_p=0.5)


# ---- the command line ----


def test_info_command_prints_the_library_and_the_frameworks(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"torch: {torch.__version__}" in printed
    assert onefold.__version__ in printed


def test_check_command_finds_every_error_within_its_bound(capsys):
    assert cli.main(["check"]) == 0
    assert "within its bound" in capsys.readouterr().out


def test_check_command_fails_when_a_result_is_off(capsys, monkeypatch):
    right = onefold.attention

    def wrong(*arguments, **options):
        out, lse = right(*arguments, **options)
        return out * (1 + 1e-4), lse

    monkeypatch.setattr(onefold, "attention", wrong)
    assert cli.main(["check", "--dtype", "float32"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_bench_command_writes_one_line_per_candidate_and_case(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    arguments = "--seqlen 33 64 --head-dim 16 --heads 2 --rounds 2 --dtype float32 bfloat16"
    arguments += " --direction forward backward"
    assert cli.main(["bench", *arguments.split(), "--out", str(path)]) == 0
    facts, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert facts["onefold"] == onefold.__version__
    lines = [line for line in lines if line["kind"] == "bench"]
    assert len(lines) == 3 * 2 * 2 * 2 * 2  # candidates, directions, masks, lengths, dtypes
    for line in lines:
        assert line["seconds"] > 0
        # A wrong formula or mask errs by about 1; bfloat16 rounds at 2^-8 of the largest value.
        assert line["error"] < (2.0**-6 if line["dtype"] == "bfloat16" else 2.0**-17)
    assert "times as fast as sdpa" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "--rounds", "0"], "onefold bench: --rounds and --threads are counts"),
        (["plot", "no-such-file.jsonl"], "onefold plot: no-such-file.jsonl cannot be read"),
    ],
)
def test_a_command_that_cannot_run_says_why_in_one_sentence(arguments, sentence, capsys):
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(sentence)


@pytest.mark.parametrize("command", ["info", "demo", "bench", "check", "plot"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"onefold {command}" in capsys.readouterr().out


# ---- the order of the arguments, which several files spell out ----

# By name, each unlike the others and its own answer to `arguments`.
IN_ORDER = {
    **{name: np.full(1, idx) for idx, name in enumerate(NAMES[:SEED])},
    "seed": 11,
    "scale": 12.0,
    "causal": "top_left",
    "window[0]": 14,
    "window[1]": 15,
    "softcap": 16.0,
    "dropout_p": 0.17,
    "max_seqlen_q": 18,
    "max_seqlen_k": 19,
}
AS_KEYWORDS = {
    **{name: value for name, value in IN_ORDER.items() if "window" not in name},
    "window": (14, 15),
}


def test_the_keywords_arrive_in_the_order_of_names(monkeypatch):
    assert list(IN_ORDER) == list(NAMES)
    expected = tuple(IN_ORDER.values())
    options = {name: value for name, value in AS_KEYWORDS.items() if name not in "qkv"}
    direct = arguments(AS_KEYWORDS["q"], AS_KEYWORDS["k"], AS_KEYWORDS["v"], options)
    for given in (direct, through_attention(monkeypatch)):
        assert len(given) == len(expected)
        assert all(a is e or a == e for a, e in zip(given, expected, strict=True))


def through_attention(monkeypatch):
    """What `attention` hands to a front end."""
    seen = SimpleNamespace(attention=lambda question, *_: question)
    monkeypatch.setattr(onefold._api, "front_end", lambda q: seen)
    return onefold.attention(**AS_KEYWORDS)


VALID = (*(np.zeros((1, 1, 1, 1), np.float32) for _ in range(3)), {})


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_module_reads_each_argument_from_the_same_place(name):
    valid = arguments(*VALID)
    assert len(_core.plan(*valid, None, False, None, None)) == 5
    position = NAMES.index(name)
    wrong = (*valid[:position], object(), *valid[position + 1 :])
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(name)} is "):
        _core.plan(*wrong, None, False, None, None)


@pytest.mark.parametrize(
    ("function", "more"),
    [
        ("reference_forward", 0),
        ("reference_forward_terms", 0),
        ("reference_backward", 2),
        ("reference_backward_terms", 2),
        ("forward", 4),
        ("backward", 13),
        ("plan", 4),
    ],
)
def test_the_compiled_module_counts_its_arguments(function, more):
    enough = [*arguments(*VALID), *[None] * more]
    for given in ((), enough[:19], enough[:-1], [*enough, None]):
        with pytest.raises(TypeError, match=f"{function} takes {20 + more} .* not {len(given)}"):
            getattr(_core, function)(*given)


def test_the_compiled_module_counts_the_arguments_of_a_plain_call():
    question, host = arguments(*VALID), onefold._torch_ops.PLAIN
    for wrong in (((), host), (question[:-1], host), (question, host[:9])):
        for call in (_core.is_plain, lambda a, b: _core.forward_plain(a, True, b)):
            with pytest.raises(TypeError, match=r"question has .* and host .* are needed"):
                call(*wrong)


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (([1, *[True] * 5], False, None, None), "needs is an int: True or False is needed"),
        (([True] * 6, "yes", None, None), "deterministic is a str: True or False is needed"),
        ((None, False, "two", None), "num_threads is a str: an int of 32 bits is needed"),
        ((None, False, 2**80, None), "num_threads is an int: an int of 32 bits is needed"),
    ],
)
def test_the_compiled_module_names_what_says_where_and_how_to_run(last, sentence):
    with pytest.raises(TypeError, match=f"^{sentence}$"):
        _core.plan(*arguments(*VALID), *last)


def test_the_compiled_module_refuses_a_causal_that_is_no_text_of_utf8():
    question = list(arguments(*VALID))
    question[NAMES.index("causal")] = "\ud800"
    with pytest.raises(ValueError, match=r"^causal is '\\ud800': "):
        _core.plan(*question, None, False, None, None)


def test_flags_of_numpy_are_flags(capsys):
    q, k, v = (torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3))
    yes, no = np.True_, np.False_
    out, lse = onefold.attention(q, k, v, return_lse=yes, deterministic=yes)
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert torch.equal(onefold.attention(q, k, v, return_lse=no, deterministic=no), out)
    sinks = torch.zeros(2, requires_grad=True)
    for deterministic in (yes, no):
        out = onefold.attention(q, k, v, sinks=sinks, return_lse=no, deterministic=deterministic)
        torch.autograd.grad(out.sum(), sinks)
        onefold.explain(q, k, v, deterministic=deterministic, return_lse=yes)
    assert onefold.warmup(q, k, v, backward=yes, deterministic=no) == []
    with pytest.raises(TypeError, match=r"^backward is a str: True, False or None is needed$"):
        onefold.warmup(q, k, v, backward="no")


def test_a_sentence_does_not_print_a_whole_array_or_list():
    q = torch.randn(1, 3, 2, 4)
    for causal, told in ((q, "a Tensor"), (q.numpy(), "an ndarray"), ([], "a list"), (1, "1")):
        with pytest.raises(ValueError, match=f"^causal is {told}: False, True, "):
            onefold.attention(q, q, q, causal=causal)
    with pytest.raises(
        TypeError, match=r"^seqused_k is \[0, 1, .*\.\.\.\]: a list of int is needed$"
    ):
        onefold.attention(q, q, q, seqused_k=[*range(10000), 0.5])


def test_the_operators_name_the_arguments_in_the_same_order():
    short = {
        "alibi_slopes": "slopes", "cu_seqlens_q": "cu_q", "cu_seqlens_k": "cu_k",
        "seqused_q": "used_q", "seqused_k": "used_k", "window[0]": "left", "window[1]": "right",
        "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
    }  # fmt: skip
    schema = torch.ops.onefold.forward.default._schema
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    assert names == [short.get(name, name) for name in NAMES]
