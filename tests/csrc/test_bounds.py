"""Limits of 64 bits, of dtypes and of constructors, and operands whose own methods raise."""

import operator as op

import numpy as np
import pytest

import needle as ndl
from needle import _C
from needle import backend_ndarray as nd

# ---- arrays --------------------------------------------------------------------------------------


def test_an_array_is_made_once():
    array = nd.NDArray([1.0, 2.0])
    with pytest.raises(TypeError, match="__init__ was called before"):
        array.__init__(np.zeros(1000))
    np.testing.assert_array_equal(array.numpy(), [1, 2])
    with pytest.raises(TypeError, match="__init__ was called before"):
        (array + 1).__init__([3.0])


def test_axis_of_one_element_has_any_stride():
    """Sums and products of strides wrapped around in 64 bits."""
    most = 2**61 - 1  # of float32: most * 4 is the last below 2^63
    one = nd.array(np.arange(6)).as_strided((1, 2), (-most, 1))
    assert one.flip(0).strides == (most, 1) and one.permute((1, 0)).strides == (1, -most)
    np.testing.assert_array_equal((one + one).numpy(), [[0, 2]])
    np.testing.assert_array_equal(one.flip(0).compact().numpy(), [[0, 1]])


def test_whole_numbers_are_exact_and_wrap_around():
    """Equals NumPy; C defines the overflow by a flag of the compiler alone."""
    for host in ([np.iinfo(np.int64).min, 1], [2**53 + 1, 5], [2**62 + 1, -(2**62) - 3]):
        host = np.array(host)
        x = nd.array(host, dtype="int64")
        for got, wanted in (
            (-x, -host),
            (abs(x), abs(host)),
            (x - 1, host - 1),
            (x * 3, host * 3),
            (x + (2**53 + 1), host + (2**53 + 1)),
            (2**60 + 1 - x, 2**60 + 1 - host),
            (x == 2**53 + 1, host == 2**53 + 1),
            ((x + x).sum(), (host + host).sum()),
        ):
            np.testing.assert_array_equal(got.numpy(), wanted)
        x += 2**53 + 1
        np.testing.assert_array_equal(x.numpy(), host + (2**53 + 1))


# ---- numbers -------------------------------------------------------------------------------------


WHOLE = ("int32", "int64", "uint8", "uint16")
BEYOND = [  # each with what an array of ones would have become
    lambda x, n: x + n,
    lambda x, n: n - x,
    lambda x, n: x * n,
    lambda x, n: nd.maximum(x, n),
    lambda x, n: x.__iadd__(n),
    lambda x, n: x.fill(n),
    lambda x, n: x.fill(2.0 * n),  # no double is 2^63 + 1
    lambda x, n: x.__setitem__(slice(None), n),
    lambda x, n: x.__setitem__(0, [n]),
    lambda x, n: nd.full(3, n, x.dtype, x.device),
    lambda x, n: nd.array(n, x.dtype, x.device),
    lambda x, n: nd.array([[1, n], [0, 1]], x.dtype, x.device),
    lambda x, n: ndl.Tensor(x) + n,
]


@pytest.mark.parametrize("dtype", WHOLE)
def test_numbers_out_of_bounds(dtype, device):
    """Numbers outside of the dtype raise; those that fit do as in NumPy."""
    info = np.iinfo(dtype)
    x = nd.array([1, 2], dtype=dtype, device=device)
    for n in (info.max + 1, info.min - 1, 2**40 if info.bits < 64 else 2**64, -(2**63) - 1, 2**70):
        for write in BEYOND:
            with pytest.raises(OverflowError):
                write(x, n)
        if info.min <= n <= np.iinfo(np.int64).max:
            with pytest.raises(OverflowError, match=f"add: {n} is out of bounds for {dtype}"):
                x + np.int64(n)
    np.testing.assert_array_equal(x.numpy(), [1, 2])
    for n in (info.max, info.min):
        x.fill(n)
        np.testing.assert_array_equal(x.numpy(), [n, n])
        np.testing.assert_array_equal(nd.array([n], dtype, device).numpy(), [n])
        x[:] = 0
        np.testing.assert_array_equal((x + n).numpy(), [n, n])
        x[0] = np.dtype(dtype).type(n)
        assert x[0].item() == n
    for wrong in (float("nan"), float("inf"), 2.0**63, -(2.0**64)):
        with pytest.raises((ValueError, OverflowError), match="fill: "):
            x.fill(wrong)


@pytest.mark.parametrize("dtype", [*WHOLE, "bool"])
def test_comparisons_with_numbers_out_of_bounds(dtype, device):
    values = np.array([0, 1] if dtype == "bool" else [np.iinfo(dtype).min, 1, np.iinfo(dtype).max])
    host = values.astype(dtype)
    x = nd.array(host, dtype=dtype, device=device)
    for n in (300, -1, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**70, 2**2000):
        for compare in (op.lt, op.le, op.eq, op.ne, op.gt, op.ge):
            right = [compare(v, n) for v in host.tolist()]  # Python's own numbers never overflow
            np.testing.assert_array_equal(compare(x, n).numpy(), right, str((compare, n)))
            right = [compare(n, v) for v in host.tolist()]
            np.testing.assert_array_equal(compare(n, x).numpy(), right, str((n, compare)))


def test_numbers_that_no_float_holds():
    x = nd.array([1.0, 2.0])
    for wrong in (lambda: x + 2**2000, lambda: x < 2**2000, lambda: x.fill(2**2000)):
        with pytest.raises(OverflowError, match="too large for float32"):
            wrong()
    with pytest.raises(OverflowError, match="fill: value"):
        _C.fill(x, 2**2000)
    assert (nd.array([True]) + 5).item() == 6
    with pytest.raises(OverflowError, match="out of bounds for int32"):
        nd.array([True]).astype("bool") + 2**40
    with pytest.raises(OverflowError, match="out of bounds for int64"):
        nd.array([1], dtype="int64") + np.array([2**63], np.uint64)
    assert nd.array(np.array([300]), dtype="uint8").item() == 44  # an array's cast, as in NumPy
    assert (nd.array([5.0]) < 2**70).item() is True


# ---- operands that raise -------------------------------------------------------------------------


class Broken(Exception):
    pass


def broken(*given):
    raise Broken


class Raises:
    """A number that has no value."""

    __index__ = broken


def iterate():
    yield 1
    raise Broken


@pytest.mark.parametrize(
    "call",
    [
        lambda: _C.empty(iterate()),
        lambda: _C.empty((1, Raises())),
        lambda: _C.empty(1, type("Dtype", (), {"name": property(broken)})()),
        lambda: _C.fill(_C.empty(1), type("Value", (), {"__float__": broken})()),
        lambda: _C.sum(_C.empty(1), Raises()),
        lambda: _C.from_dlpack(type("Producer", (), {"__dlpack__": property(broken)})()),
    ],
    ids=["shape", "size", "dtype", "float", "integer", "__dlpack__"],
)
def test_errors_of_arguments_propagate(call):
    with pytest.raises(Broken):
        call()
