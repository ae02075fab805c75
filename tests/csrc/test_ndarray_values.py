"""The values of NDArrays: arithmetic, numbers beside arrays, reductions, copies and exchange."""

import copy
import ctypes
import pickle

import numpy as np
import pytest
from harness import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from test_ndarray import numbers, pair, quick

from needle import _C
from needle import backend_ndarray as nd

# ---- arithmetic ----------------------------------------------------------------------------------


def test_operators(device):
    x, y = numbers(5, 7) + 50, numbers(7) + 45
    a, b = nd.array(x, device=device), nd.array(y, device=device)
    for got, expected in [
        (a + b, x + y),
        (a - b, x - y),
        (a * b, x * y),
        (a / b, x / y),
        (-a, -x),
        (a + 2, x + 2),
        (2 + a, 2 + x),
        (a - 2, x - 2),
        (2 - a, 2 - x),
        (a * 2, x * 2),
        (2 * a, 2 * x),
        (a / 2, x / 2),
        (2 / a, 2 / x),
        (a**2, x**2),
        (a == b, x == y),
        (a != b, x != y),
        (a < b, x < y),
        (a <= b, x <= y),
        (a > b, x > y),
        (a >= b, x >= y),
        (a == 50, x == 50),
        (50 < a, 50 < x),
        (a.maximum(b), np.maximum(x, y)),
        (a.maximum(50), np.maximum(x, 50)),
        (a.sqrt(), np.sqrt(x)),
    ]:
        assert got.shape == expected.shape
        np.testing.assert_allclose(got.numpy(), expected, rtol=2e-7)
    small = nd.array(x / 40, device=device)
    np.testing.assert_allclose(small.exp().numpy(), np.exp(x / 40), rtol=5e-7)
    np.testing.assert_allclose(small.tanh().numpy(), np.tanh(x / 40), rtol=5e-7)
    np.testing.assert_allclose(a.log().numpy(), np.log(x), rtol=5e-7)
    np.testing.assert_allclose((small**0.5).numpy(), (x / 40) ** 0.5, rtol=1e-6)
    c = a
    c += 1
    np.testing.assert_array_equal(c.numpy(), x + 1)
    for size in (35, 5000, 100_000):  # read while it is written, at once and in parts
        host = np.arange(size, dtype=np.float32)
        d = nd.array(host, device=device)
        d += d[::-1]
        np.testing.assert_array_equal(d.numpy(), np.full(size, size - 1))
    assert nd.array(3.0, device=device).numpy() == 3


def test_operators_with_numpy_scalars_and_unknown_operands():
    host, array = pair(3)
    np.testing.assert_array_equal((array * np.float32(2)).numpy(), host * 2)
    np.testing.assert_array_equal((array + np.int64(2)).numpy(), host + 2)
    for kept in ("float16", "float32", "int32", "int64", "uint8", "uint16"):
        assert (nd.array([True], dtype="bool") * np.ones(3, kept)).dtype == kept
    for wide, made in (("float64", "float32"), ("int8", "int32"), ("uint32", "int64")):
        assert (nd.array([True], dtype="bool") * np.ones(3, wide)).dtype == made
    for wrong in ("text", None, object()):
        with pytest.raises(TypeError):
            array + wrong
        with pytest.raises(TypeError):
            wrong * array
    assert array.__add__("text") is NotImplemented


PROMOTIONS = [
    ("float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float16", "float16", "float16"),
    ("float32", "bfloat16", "float32"),
    ("float16", "float32", "float32"),
    ("bfloat16", "float16", "float32"),
    ("bfloat16", "int64", "bfloat16"),
    ("int32", "float16", "float16"),
    ("bool", "float32", "float32"),
    ("int32", "int64", "int64"),
    ("uint16", "int32", "int32"),
    ("uint8", "bool", "uint8"),
    ("uint8", "int32", "int32"),
    ("bool", "bool", "int32"),
]


def test_promotion(device):
    x, y = np.array([0, 1, 1, 0]), np.array([1, 1, 0, 0])
    for one, other, result in PROMOTIONS:
        a, b = (nd.array(v, dtype=d, device=device) for v, d in ((x, one), (y, other)))
        for got in (a + b, b + a):
            assert got.dtype == result
            np.testing.assert_array_equal(got.numpy(), x + y)
        assert (a == b).dtype == "bool"
        np.testing.assert_array_equal((a == b).numpy(), x == y)


def test_promotion_of_scalars():
    for dtype in ("float32", "bfloat16", "float16"):
        array = nd.array([1, 2], dtype=dtype)
        assert (array + 1).dtype == (array * 0.5).dtype == (2 / array).dtype == dtype
    for dtype in ("int32", "int64", "uint8"):
        array = nd.array([1, 2], dtype=dtype)
        assert (array + 1).dtype == dtype
        assert (array * 0.5).dtype == "float32"
        np.testing.assert_array_equal((array * 0.5).numpy(), [0.5, 1.0])
        assert (array / array).dtype == array.exp().dtype == "float32"


def test_matmul(device):
    for one, other in (
        ((3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((1, 3, 4), (6, 4, 5)),
        ((2, 2, 3, 4), (2, 2, 4, 5)),
        ((3, 0), (0, 5)),
    ):
        x, y = numbers(*one), numbers(*other)
        a, b = nd.array(x, device=device), nd.array(y, device=device)
        np.testing.assert_array_equal((a @ b).numpy(), x @ y)
        swapped = tuple(range(len(one) - 2)) + (len(one) - 1, len(one) - 2)
        columns = nd.array(np.ascontiguousarray(np.swapaxes(x, -1, -2)), device=device)
        np.testing.assert_array_equal((columns.permute(swapped) @ b).numpy(), x @ y)
        np.testing.assert_array_equal((a[..., ::-1] @ b[..., ::-1, :]).numpy(), x @ y)


def test_matmul_errors():
    for one, other, said in (
        ((3, 4), (5, 6), "matmul: b: axis K is 5, but was 4"),
        ((2, 3, 4), (3, 4, 5), "^matmul: batch axes: axis 1 from the end is 2 in one operand"),
        ((), (3, 3), "matmul: a: has no axes"),
        ((3, 3), (), "matmul: b: has no axes"),
    ):
        with pytest.raises(ValueError, match=said):
            nd.array(numbers(*one)) @ nd.array(numbers(*other))
    with pytest.raises(TypeError):
        nd.array(numbers(3, 3)) @ nd.array(numbers(3, 3), dtype="bfloat16")
    with pytest.raises(TypeError):
        nd.array(numbers(3, 3)) @ 2


# ---- reductions ----------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@quick
@given(shapes, st.data())
def test_reductions_over_axes(shape, data):
    host, array = pair(*shape)
    order = data.draw(st.permutations(range(len(shape))))
    host, array = host.transpose(order), array.permute(tuple(order))
    chosen = data.draw(
        st.none()
        | st.integers(-len(shape), len(shape) - 1)
        | st.sets(st.integers(0, len(shape) - 1))
    )
    axis = tuple(sorted(chosen)) if isinstance(chosen, set) else chosen
    keepdims = data.draw(st.booleans())
    for name in ("sum", "max", "min", "mean"):
        got = getattr(array, name)(axis=axis, keepdims=keepdims)
        expected = getattr(host, name)(axis=axis, keepdims=keepdims)
        assert got.shape == np.shape(expected)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)
    if not isinstance(axis, tuple):
        for name in ("argmax", "argmin"):
            got = getattr(array, name)(axis=axis)
            np.testing.assert_array_equal(got.numpy(), getattr(host, name)(axis=axis))
            assert got.dtype == "int64"


def test_reductions(device):
    host, array = pair(31, 257, device=device)
    np.testing.assert_array_equal(array.sum(axis=0).numpy(), host.sum(0))
    np.testing.assert_array_equal(array.sum(axis=(0, 1)).numpy(), host.sum())
    np.testing.assert_array_equal(array.argmax(axis=0).numpy(), host.argmax(0))
    zero = nd.array(np.zeros((0, 3)), device=device)
    np.testing.assert_array_equal(zero.sum(axis=0).numpy(), np.zeros(3))
    assert zero.sum(axis=1).shape == (0,)
    for name in ("max", "min", "argmax"):
        with pytest.raises(ValueError):
            getattr(zero, name)(axis=0)
    for axis in (2, -3, (0, 0)):
        with pytest.raises(ValueError):
            array.sum(axis=axis)


# ---- copies and exchange -------------------------------------------------------------------------


def test_copies(device):
    host, array = pair(3, 4, device=device)
    for made in (array.copy(), array.astype("float32"), copy.copy(array), copy.deepcopy(array)):
        np.testing.assert_array_equal(made.numpy(), host)
    copied = array.copy()
    copied.fill(0)
    np.testing.assert_array_equal(array.numpy(), host)
    assert array.astype("int32").dtype == "int32"
    np.testing.assert_array_equal(array.astype("bool").numpy(), host.astype(bool))
    there = array.to(nd.cpu())
    assert there.device == nd.cpu()
    np.testing.assert_array_equal(there.numpy(), host)
    view = array[::-1, ::2]
    restored = pickle.loads(pickle.dumps(view))
    np.testing.assert_array_equal(restored.numpy(), host[::-1, ::2])
    assert restored.device == array.device
    low = array.astype("bfloat16")
    assert_same_bits(pickle.loads(pickle.dumps(low)), low)
    for wrong in ("float64", "text", ""):
        with pytest.raises(TypeError):
            array.astype(wrong)
    with pytest.raises((TypeError, ValueError)):
        array.view("int64")


def test_exchange_with_numpy():
    host, array = pair(3, 4)
    for made in (np.asarray(array), np.from_dlpack(array), np.asarray(memoryview(array))):
        np.testing.assert_array_equal(made, host)
    shared = np.from_dlpack(array)
    array[0, 0] = 77
    assert shared[0, 0] == 77
    view = np.from_dlpack(array[::-1, ::2])
    np.testing.assert_array_equal(view, array.numpy()[::-1, ::2])
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(array, copy=True), shared)
    interface = array.permute((1, 0)).__array_interface__
    assert interface["shape"] == (4, 3) and interface["typestr"] == "<f4"
    buffer = memoryview(array.permute((1, 0)))
    assert (buffer.shape, buffer.strides, buffer.format, buffer.itemsize) == (
        (4, 3),
        (4, 16),
        "f",
        4,
    )
    del array
    np.testing.assert_array_equal(shared[1:], host[1:])  # the memory outlives the array
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1):  # before, it exports none
        host.flags.writeable = False
        _C.from_dlpack(host).fill(0)  # a copy: arrays can be written to
        assert host[0, 0] == -40
    unaligned = np.zeros(18, np.uint8)[2:].view(np.float32)
    with pytest.raises(ValueError, match="not aligned"):
        _C.from_dlpack(unaligned)


def test_exchange_of_bfloat16():
    array = nd.array([1.0, 2.0], dtype="bfloat16")
    np.testing.assert_array_equal(np.asarray(array), [1.0, 2.0])
    with pytest.raises(BufferError):
        memoryview(array)


def test_repr(device):
    _, array = pair(2, 2, device=device)
    text = repr(array)
    assert "-40" in text and "float32" in text
    assert str(array.device) in text
    assert "shape=(0, 3)" in repr(nd.zeros((0, 3), device=device))
    assert repr(nd.zeros((1000, 1000), device=device)).count("\n") < 50


def test_errors_name_the_operation():
    with pytest.raises(ValueError, match="add: "):
        nd.array(numbers(3)) + nd.array(numbers(4))
    with pytest.raises(TypeError, match="float64"):
        nd.array([1.0], dtype="float64")
    with pytest.raises((ValueError, TypeError)):
        nd.array([[1.0], [1.0, 2.0]])
    with pytest.raises(ValueError):
        nd.empty((-1,))
    with pytest.raises(ValueError):
        nd.empty((2**40, 2**40))
    with pytest.raises(ValueError):
        nd.empty((1,) * 9)


def test_a_buffer_asked_for_without_a_shape_is_bytes():
    """One axis is what memoryview reads of it, in type.__buffer__ (Python 3.12)."""

    class View(ctypes.Structure):
        _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object)]
        _fields_ += [("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t)]
        _fields_ += [("readonly", ctypes.c_int), ("ndim", ctypes.c_int)]
        _fields_ += [(name, ctypes.c_void_p) for name in ("format", "shape", "strides")]
        _fields_ += [("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]

    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.POINTER(View), ctypes.c_int]
    array = _C.array(np.ones((4, 3, 1), np.float32))
    for flags, ndim in [(0, 1), (1, 1), (8, 3), (8 | 16, 3)]:  # SIMPLE, WRITABLE, ND, STRIDES
        view = View()
        assert get(array, view, flags) == 0
        assert (view.ndim, bool(view.shape), view.len) == (ndim, ndim == 3, 48)
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


def test_reductions_of_integers_need_no_wide_copy():
    """Sums of uint8 in int64, means in float32, in the memory of the operand and the result."""
    for dtype in ("uint8", "bool", "uint16", "int32"):
        most = {"bool": 1, "uint8": 255, "uint16": 65535, "int32": 1 << 30}[dtype]
        values = np.random.default_rng(3).integers(0, most, (1000, 4001), endpoint=True)
        x = nd.array(values, dtype)
        for view, wanted in (
            (x, values),
            (x.permute((1, 0)), values.T),
            (x[:, ::3], values[:, ::3]),
        ):
            nd.cpu().reset_peak()
            before = nd.cpu().memory_stats()["live_bytes"]
            for axis in (None, 0, 1):
                total, mean = view.sum(axis=axis), view.mean(axis=axis)
                assert total.dtype == "int64" and mean.dtype == "float32"
                np.testing.assert_array_equal(total.numpy(), wanted.sum(axis=axis))
                np.testing.assert_allclose(mean.numpy(), wanted.mean(axis=axis), rtol=1e-6)
            assert nd.cpu().memory_stats()["peak_bytes"] - before < 200_000, (dtype, view.strides)
