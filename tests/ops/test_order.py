"""sort, argsort, topk and cumsum beside NumPy: dtypes, layouts, ties, NaN, signed zeros."""

import itertools

import numpy as np
from harness import naming

from needle import Tensor, ops
from needle.testing import LAYOUTS, laid_out_values, to_ndarray

DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "uint16", "bool")


def drawn(dtype, shape):
    """Values with ties; the integers go to the ends of their range."""
    rng = np.random.default_rng(3)
    if "float" in dtype:
        return rng.integers(-40, 40, shape).astype(np.float32) / 4
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    ends = np.iinfo(dtype)
    few = rng.integers(ends.min, ends.max, 50, dtype, endpoint=True)
    return rng.choice(np.concatenate([few, np.array([ends.min, 0, ends.max], dtype)]), shape)


def reverse(order, n):
    """A stable descending order: that of the reversed axis, backwards."""
    return n - 1 - np.flip(order, 1)


def test_values_and_indices_are_numpys(device):
    for dtype in DTYPES:
        for shape in ((3, 257), (2, 9001), (7, 4097)):
            for layout in LAYOUTS if shape[1] == 257 else LAYOUTS[:1]:
                with naming(dtype, shape, layout):
                    values = laid_out_values(drawn(dtype, shape), layout)
                    x = Tensor.from_ndarray(to_ndarray(values, dtype, device, layout))
                    order = np.argsort(values, 1, kind="stable")
                    down = reverse(np.argsort(values[:, ::-1], 1, kind="stable"), shape[1])
                    np.testing.assert_array_equal(ops.argsort(x).numpy(), order)
                    np.testing.assert_array_equal(ops.sort(x).numpy(), np.sort(values, 1))
                    got, places = ops.topk(x, 5)
                    assert got.dtype == dtype and places.dtype == "int64"
                    np.testing.assert_array_equal(places.numpy(), down[:, :5])
                    picked = np.take_along_axis(values, down[:, :5], 1)
                    np.testing.assert_array_equal(got.numpy(), picked)
                    columns = ops.argsort(x, axis=0, descending=True).numpy()
                    wanted = reverse(np.argsort(values[::-1].T, 1, kind="stable"), shape[0]).T
                    np.testing.assert_array_equal(columns, wanted)


def test_nan_is_last_and_negative_zero_before_zero(device):
    for dtype in DTYPES[:3]:
        # In shared memory, and by passes over the row; 0 / 0 is a NaN of either sign.
        for n, sign in itertools.product((5, 4999), (1, -1)):
            values = np.zeros((1, n), np.float32)
            values[0, :5] = [np.copysign(np.nan, sign), -0.0, np.inf, 0.0, -np.inf]
            values[0, 5:] = 1
            x = Tensor(values, dtype=dtype, device=device)
            with naming(dtype, n, sign):
                got = ops.sort(x).numpy()
                wanted = np.sort(values, 1)
                np.testing.assert_array_equal(got, wanted)
                assert ops.argsort(x).numpy()[0, [0, 1, 2, -1]].tolist() == [4, 1, 3, 0]
                assert np.signbit(got[0, 1]) and not np.signbit(got[0, 2])
                top, places = ops.topk(x, 2)
                assert places.numpy().tolist() == [[0, 2]] and np.isnan(top.numpy()[0, 0])
                low, places = ops.topk(x, 2, largest=False)
                assert places.numpy().tolist() == [[4, 1]]


def test_running_sums(device):
    for dtype in DTYPES:
        for shape, axis in (((3, 257), 1), ((2, 9001), 1), ((9001, 3), 0), ((3, 4, 5), None)):
            with naming(dtype, shape):
                values = drawn(dtype, shape)
                got = ops.cumsum(Tensor(values, dtype=dtype, device=device), axis)
                wide = values.astype("float64" if "float" in dtype else "int64")
                wanted = np.cumsum(wide, axis)
                if "float" not in dtype:
                    assert got.dtype == "int64"
                    np.testing.assert_array_equal(got.numpy(), wanted)
                else:
                    unit = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
                    largest = np.abs(wide).max() * np.sqrt(wide.size)
                    np.testing.assert_allclose(got.numpy(), wanted, unit, unit * largest / 9)
