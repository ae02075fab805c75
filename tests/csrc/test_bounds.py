"""Limits of 64 bits, of dtypes and of constructors: strides, large numbers, __init__ again."""

import ctypes
import operator as op

import numpy as np
import pytest

import needle as ndl
from needle import _C
from needle import backend_ndarray as nd

# ---- arrays --------------------------------------------------------------------------------------


def test_an_array_is_made_once():
    """A second __init__ freed the memory that an op, in another thread or in the middle of its
    arguments, was at work on."""
    array = nd.NDArray([1.0, 2.0])
    with pytest.raises(TypeError, match="__init__ was called before"):
        array.__init__(np.zeros(1000))
    np.testing.assert_array_equal(array.numpy(), [1, 2])
    with pytest.raises(TypeError, match="__init__ was called before"):
        (array + 1).__init__([3.0])

    class Again:
        """A number that makes the array while its arguments are taken."""

        def __float__(self):
            half.__init__(np.ones(1000))
            return 7.0

    half = nd.NDArray.__new__(nd.NDArray)
    assert half.shape == (0,)
    _C.fill(half, Again())
    np.testing.assert_array_equal(half.numpy(), np.ones(1000))

    class Recursive:
        def __array__(self, dtype=None, copy=None):
            other.__init__([5.0])
            return np.zeros(3)

    other = nd.NDArray.__new__(nd.NDArray)
    with pytest.raises(TypeError, match="__init__ was called before"):
        other.__init__(Recursive())
    np.testing.assert_array_equal(other.numpy(), [5])


def test_strides_beyond_64_bits():
    """Sums and products of them wrapped around; an axis of one element has any stride."""
    x = nd.array(np.arange(6))
    far, most = 2**62, 2**61 - 1  # float32: most * 4 is the last below 2^63
    for shape, strides in (((1,), (far,)), ((0, 5), (far, -far)), ((1,), (-(2**63),))):
        with pytest.raises(ValueError, match=r"stride -?\d+ of axis 0 reaches outside 2\^63 bytes"):
            x.as_strided(shape, strides)
        with pytest.raises(ValueError, match=r"stride -?\d+ of axis 0 reaches outside 2\^63 bytes"):
            nd.NDArray.make(shape, strides, handle=x._handle)
    one = x.as_strided((1, 2), (-most, 1))
    assert one.flip(0).strides == (most, 1) and one.permute((1, 0)).strides == (1, -most)
    np.testing.assert_array_equal((one + one).numpy(), [[0, 2]])
    np.testing.assert_array_equal(one.flip(0).compact().numpy(), [[0, 1]])
    with pytest.raises(ValueError, match="do not fit"):
        nd.zeros((0, 3)).reshape((0, far, far))


def test_from_dlpack_of_impossible_strides():
    class Producer:
        """Says what DLPack says of an array, but for its shape and strides."""

        def __init__(self, shape, strides):
            self.array, self.shape, self.strides = np.zeros(4, np.float32), shape, strides

        def __dlpack__(self):
            capsule = self.array.__dlpack__()
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            address = get(capsule, b"dltensor")
            self.values = (ctypes.c_int64 * 4)(*self.shape, *self.strides)
            values = ctypes.addressof(self.values)
            ctypes.c_int32.from_address(address + 16).value = 2  # ndim, shape, strides
            ctypes.c_void_p.from_address(address + 24).value = values
            ctypes.c_void_p.from_address(address + 32).value = values + 16
            return capsule

    assert _C.from_dlpack(Producer((2, 2), (2, 1))).shape == (2, 2)
    far = 2**62
    for shape, strides in (
        ((2, 2), (far, far)),
        ((3, 2), (far, 1)),
        ((2, 2), (-far, far)),
        ((1, 1), (2**63 - 1, 1)),
        ((far, far), (1, 1)),
        ((-1, 2), (1, 1)),
    ):
        with pytest.raises(ValueError, match="from_dlpack: "):
            _C.from_dlpack(Producer(shape, strides))


def test_whole_numbers_wrap_around():
    """Equals NumPy; C defines it by a flag of the compiler alone."""
    low = np.array([np.iinfo(np.int64).min, 1])
    x = nd.array(low, dtype="int64")
    np.testing.assert_array_equal((-x).numpy(), -low)
    np.testing.assert_array_equal(abs(x).numpy(), abs(low))
    np.testing.assert_array_equal((x - 1).numpy(), low - 1)
    np.testing.assert_array_equal((x * 3).numpy(), low * 3)
    assert (x + x).sum().item() == 2


# ---- numbers -------------------------------------------------------------------------------------


WHOLE = ("int32", "int64", "uint8", "uint16")
BEYOND = [  # each with what an array of ones would have become
    lambda x, n: x + n,
    lambda x, n: n - x,
    lambda x, n: x * n,
    lambda x, n: nd.maximum(x, n),
    lambda x, n: x.__iadd__(n),
    lambda x, n: x.__imul__(n),
    lambda x, n: x.fill(n),
    lambda x, n: x.fill(2.0 * n),  # no double is 2^63 + 1
    lambda x, n: _C.fill(x, n),
    lambda x, n: x.__setitem__(slice(None), n),
    lambda x, n: x.__setitem__(0, [n]),
    lambda x, n: x.flat.__setitem__(0, n),
    lambda x, n: nd.full(3, n, x.dtype, x.device),
    lambda x, n: nd.array(n, x.dtype, x.device),
    lambda x, n: nd.array([[1, n], [0, 1]], x.dtype, x.device),
    lambda x, n: nd.array([1.0, n], x.dtype, x.device),
    lambda x, n: ndl.Tensor(x) + n,
    lambda x, n: ndl.Tensor(x) - n,
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
    assert (ndl.Tensor([7], dtype="uint8") - 5).item() == 2
