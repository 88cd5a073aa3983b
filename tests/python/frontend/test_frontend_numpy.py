"""NumPy arrays: no torch, any strides, and every refusal."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

import onefold  # noqa: E402
from processes import output_of  # noqa: E402


def make_inputs(dtype=np.float32, sq=3, sk=5, d=4, dv=3):
    """q with 4 heads, k and v with 2."""
    generator = np.random.default_rng(0)
    shapes = ((2, sq, 4, d), (2, sk, 2, d), (2, sk, 2, dv))
    return [generator.standard_normal(s).astype(dtype) for s in shapes]


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
import onefold

q = np.ones((1, 3, 2, 4), np.float32)
out, lse = onefold.attention(q, q, q, causal=True, dropout_p=0.5, return_lse=True)
onefold.sdpa(q, q, q)
onefold.merge_states([out, out], [lse, lse])
onefold.explain(q, q, q)
onefold.reference.gradients(q, q, q, dout=out)
assert not any(name == "torch" or name.startswith("torch.") for name in sys.modules)
print("served")
"""


def test_everything_for_numpy_works_where_torch_cannot_be_imported():
    assert output_of(WITHOUT_TORCH).endswith("served\n")


def test_importing_onefold_imports_neither_torch_nor_numpy_nor_rich_nor_matplotlib():
    code = (
        "import onefold, sys;"
        "print([m for m in ('torch', 'numpy', 'rich', 'matplotlib') if m in sys.modules])"
    )
    assert output_of(code) == "[]\n"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_numpy_arrays_give_the_bits_of_torch_tensors(dtype):
    torch = pytest.importorskip("torch")
    arrays = make_inputs(dtype)
    out, lse = onefold.attention(*arrays, causal=True, return_lse=True)
    expected, expected_lse = onefold.attention(
        *(torch.from_numpy(a) for a in arrays), causal=True, return_lse=True
    )
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert np.array_equal(out, expected.numpy())
    assert np.array_equal(lse, expected_lse.numpy())


def test_bfloat16_of_ml_dtypes_gives_the_bits_of_torch():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    torch = pytest.importorskip("torch")
    arrays = make_inputs(bfloat16)
    out = onefold.attention(*arrays)
    tensors = [torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in arrays]
    assert out.dtype == bfloat16
    expected = onefold.attention(*tensors).view(torch.int16).numpy()
    assert np.array_equal(out.view(np.int16), expected)


@pytest.mark.parametrize("axis", range(4))
def test_negative_strides_give_the_bits_of_a_packed_copy(axis):
    q, k, v = make_inputs(dv=4)
    turned = [np.flip(x, axis) for x in (q, k, v)]
    packed = [np.ascontiguousarray(x) for x in turned]
    assert turned[0].strides[axis] < 0
    assert np.array_equal(onefold.attention(*turned), onefold.attention(*packed))


def test_repeated_and_sliced_arrays_are_read_as_they_lie():
    q, k, v = make_inputs()
    k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    wide = np.repeat(q, 3, axis=-1)
    expected = onefold.attention(q, np.ascontiguousarray(k), np.ascontiguousarray(v))
    assert np.array_equal(onefold.attention(wide[..., ::3], k, v), expected)


def test_every_option_takes_numpy_arrays():
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(1)
    options = {
        "bias": generator.standard_normal((2, 1, 3, 5)),
        "mask": generator.random((4, 1, 5)) < 0.8,
        "alibi_slopes": generator.random((2, 4), np.float32),
        "sinks": generator.random(4, np.float32),
        "seqused_q": np.array([2, 3]),
        "seqused_k": np.array([4, 5], np.int32),
        "seed": np.array([5]),
    }
    plain = {"window": (np.int64(3), None), "scale": np.float32(0.5), "dropout_p": 0.25}
    out = onefold.attention(*make_inputs(), **options, **plain)
    expected = onefold.attention(
        *(torch.from_numpy(x) for x in make_inputs()),
        **{name: torch.from_numpy(x) for name, x in options.items()},
        **plain,
    )
    assert np.array_equal(out, expected.numpy())


def test_without_a_seed_numpy_seed_decides():
    q, k, v = make_inputs(sk=50)
    np.random.seed(3)
    first, second = (onefold.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    np.random.seed(3)
    assert np.array_equal(first, onefold.attention(q, k, v, dropout_p=0.5))
    assert not np.array_equal(first, second)


def test_out_is_written_and_returned():
    q, k, v = make_inputs()
    out = np.full((2, 3, 4, 6), np.nan, np.float32)[..., ::2]
    assert onefold.attention(q, k, v, out=out) is out
    assert np.array_equal(out, onefold.attention(q, k, v))


def read_only(x):
    x.flags.writeable = False
    return x


def unaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    raw[:] = x.reshape(-1).view(np.uint8)
    return raw.view(x.dtype).reshape(x.shape)


def odd_stride(x):
    """Rows 6 bytes apart, as fields of a packed record lie."""
    record = np.zeros(x.shape, np.dtype({"names": ["x"], "formats": [x.dtype], "itemsize": 6}))
    record["x"] = x
    return record["x"]


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda q: {"q": q.astype(">f4")}, ValueError, "dtype of q is >f4, byte-swapped"),
        (lambda q: {"q": unaligned(q)}, ValueError, "q is not aligned to its items"),
        (lambda q: {"q": odd_stride(q)}, ValueError, "q is not aligned|q has a stride of 6 bytes"),
        (lambda q: {"q": q.astype(object)}, ValueError, "dtype of q is object: float32"),
        (lambda q: {"q": q.astype(np.longdouble)}, ValueError, "dtype of q is .*: float32"),
        (lambda q: {"q": np.ma.masked_array(q)}, TypeError, "q is a MaskedArray: a plain array"),
        (lambda q: {"q": q.tolist()}, TypeError, "q is a list: a torch.Tensor or a numpy.ndarray"),
        (lambda q: {"k": [1.0]}, TypeError, "k is a list: a numpy.ndarray, as q is one, is needed"),
        (lambda q: {"q": q[None]}, ValueError, "q has 5 axes: at most 4 are needed"),
        (
            lambda q: {"out": read_only(np.zeros((2, 3, 4, 3), np.float32))},
            ValueError,
            "out is read-only",
        ),
        (
            lambda q: {"out": np.broadcast_to(np.float32(0), (2, 3, 4, 3))},
            ValueError,
            "out is read-only",
        ),
        (lambda q: {"seqused_k": ["a", 1]}, TypeError, "seqused_k is .*: a list of int is needed"),
        (lambda q: {"scale": np.ones(1)}, TypeError, "scale is an ndarray: a Python number"),
        (lambda q: {"mask": np.ones(5, np.uint8)}, ValueError, "dtype of mask is uint8: bool"),
    ],
)
def test_what_cannot_work_is_refused_with_one_sentence(change, error, sentence):
    q, k, v = make_inputs()
    arguments = {"q": q, "k": k, "v": v} | change(q)
    with pytest.raises(error, match=sentence) as caught:
        onefold.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert "\n" not in str(caught.value)


def test_a_torch_tensor_beside_numpy_arrays_is_refused():
    torch = pytest.importorskip("torch")
    q, k, v = make_inputs()
    with pytest.raises(TypeError, match=r"k is a Tensor: a numpy\.ndarray, as q is one, is needed"):
        onefold.attention(q, torch.from_numpy(k), v)


def test_no_output_may_lie_in_the_seed():
    memory = np.zeros(2 * 4 * 3 * 4 + 2, dtype=np.float32)
    seed, out = memory[:2].view(np.int64), memory[: 2 * 3 * 4].reshape(1, 2, 3, 4)
    x = np.ones((1, 2, 3, 4), dtype=np.float32)
    with pytest.raises(ValueError, match="out shares memory with seed: an output needs memory"):
        onefold.attention(x, x, x, dropout_p=0.5, seed=seed, out=out)
    assert not memory.any()
    apart = memory[2 : 2 + 2 * 3 * 4].reshape(1, 2, 3, 4)
    expected = onefold.attention(x, x, x, dropout_p=0.5, seed=0)
    assert np.array_equal(onefold.attention(x, x, x, dropout_p=0.5, seed=seed, out=apart), expected)
