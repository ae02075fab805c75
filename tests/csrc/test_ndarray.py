"""The NDArray: making, views, indexing, reductions, copies and exchange, against NumPy.

Operators and their dtypes: tests/test_operators.py; values of ops: test_ops.py.
"""

import copy
import ctypes
import hashlib
import io
import pickle
import sys
import weakref

import numpy as np
import pytest
from harness import assert_same_bits, naming
from hypothesis import given, settings
from hypothesis import strategies as st

from needle import _C
from needle import backend_ndarray as nd
from needle.testing import FLOATS, rounder

quick = settings(max_examples=60, deadline=None, derandomize=True)
EVERY = slice(None)


def numbers(*shape) -> np.ndarray:
    """Different small integers, so that float32 arithmetic is exact."""
    return (np.arange(np.prod(shape, dtype=int)) % 97 - 40).astype(np.float32).reshape(shape)


def pair(*shape, device=None):
    host = numbers(*shape)
    return host, nd.array(host, device=device)


# ---- making --------------------------------------------------------------------------------------


def test_making(device):
    for source in (
        [[1, 2], [3, 4]],
        np.array([[1, 2], [3, 4]], np.int8),
        np.array([[1.0, 2], [3, 4]]),
    ):
        made = nd.array(source, device=device)
        assert (made.dtype, made.shape, made.device) == ("float32", (2, 2), device)
        np.testing.assert_array_equal(made.numpy(), [[1, 2], [3, 4]])
    again = nd.array(made, device=device)
    again.fill(0)
    assert made.numpy().sum() == 10  # a copy
    host = numbers(4, 6).T[::-2]
    for got, wanted in (
        (nd.array(host, device=device), host),
        (nd.array(7, device=device), np.array(7)),
        (nd.array([], device=device), np.zeros(0)),
        (nd.full((2, 3), 2.5, device=device), np.full((2, 3), 2.5)),
        (nd.ones((2, 3), device=device), np.ones((2, 3))),
        (nd.zeros((2, 0), device=device), np.zeros((2, 0))),
    ):
        assert got.shape == wanted.shape
        np.testing.assert_array_equal(got.numpy(), wanted)
    empty = nd.empty((3, 4), dtype="int64", device=device)
    known = (empty.shape, empty.strides, empty.size, empty.ndim, empty.dtype)
    assert known == ((3, 4), (4, 1), 12, 2, "int64")
    for dtype in ("float32", "float16", "int32", "int64", "uint8", "bool", "uint16"):
        host = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
        made = nd.array(host, dtype=dtype, device=device)
        assert made.dtype == dtype and made.numpy().dtype == dtype
        np.testing.assert_array_equal(made.numpy(), host)


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_16_bits_round_to_nearest_even(dtype):
    """All values of the dtype, what lies in the middle between two, and just beside that."""
    every = nd.array(np.arange(65536), dtype="uint16").view(dtype)
    values = np.sort(every.numpy()[np.isfinite(every.numpy())]).astype(np.float64)
    middle = (values[1:] + values[:-1]) / 2
    beside = np.nextafter(np.float32(middle), np.float32(0))
    host = np.concatenate([values, middle, beside, values[-1:] * 1.0001, values[-1:] * 1.003])
    host = np.concatenate([host, -host, [np.inf, np.nan]]).astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = rounder(dtype)(host)
        for made in (nd.array(host, dtype=dtype), nd.array(host).astype(dtype)):
            assert made.numpy().dtype == (np.float32 if dtype == "bfloat16" else dtype)
            np.testing.assert_array_equal(made.numpy().astype(np.float64), wanted)
    again = every.astype("float32").astype(dtype)
    known = ~np.isnan(every.numpy())
    np.testing.assert_array_equal(again.view("uint16").numpy()[known], np.arange(65536)[known])


def test_floats_out_of_range_become_the_nearest_integer(device):
    given = [1e30, 2.0**63, -(2.0**63), -1e30, np.nan, -7.9]
    made = nd.array(given, device=device).astype("int64")
    most, least = 2**63 - 1, -(2**63)
    np.testing.assert_array_equal(made.numpy(), [most, most, least, least, 0, -7])


def test_constructor_and_subclass():
    host, array = pair(3, 4)
    np.testing.assert_array_equal(nd.NDArray(host, device=nd.cpu()).numpy(), host)

    class Loud(nd.NDArray):
        """Counts its indexing, and indexes as NumPy does."""

        asked = 0

        def __getitem__(self, index):
            type(self).asked += 1
            return super().__getitem__(index)

    loud = Loud(host)
    assert isinstance(loud, nd.NDArray) and loud.shape == (3, 4)
    np.testing.assert_array_equal(loud[1:].numpy(), host[1:])
    assert Loud.asked == 1
    np.testing.assert_array_equal((loud + 1).numpy(), host + 1)
    np.testing.assert_array_equal(nd.NDArray(loud).numpy(), host)
    loud.colour = "red"  # a Python subclass has a dict
    known = weakref.ref(array)
    assert loud.colour == "red" and known() is array
    del array
    assert known() is None


def test_make(device):
    base = nd.array(numbers(12), device=device)
    view = nd.NDArray.make((3, 2), strides=(4, 1), device=device, handle=base._handle, offset=1)
    np.testing.assert_array_equal(view.numpy(), numbers(12).reshape(3, 4)[:, 1:3])
    before = base.written
    assert shares(view, base) and view.data_ptr == base.data_ptr + 4 and base.written > before
    view.fill(0)
    assert base.numpy()[1] == 0
    assert nd.NDArray.make((2, 5), device=device).strides == (5, 1)
    whole = nd.array([1, 2], dtype="int64", device=device)
    assert nd.NDArray.make((2,), handle=whole._handle).dtype == "int64"
    assert nd.NDArray.make((4,), handle=whole._handle, dtype="int32").dtype == "int32"


# ---- views ---------------------------------------------------------------------------------------


def shares(view, base) -> bool:
    return view._handle.ptr() == base._handle.ptr()


def test_views_share_memory(device):
    host, array = pair(3, 4, 5, device=device)
    for made, expected in [
        (array.permute((2, 0, 1)), host.transpose(2, 0, 1)),
        (array.reshape((12, 5)), host.reshape(12, 5)),
        (array.reshape((-1,)), host.reshape(-1)),
        (array.reshape((3, -1, 2, 5)), host.reshape(3, -1, 2, 5)),
        (array[1:, ::2, ::-1], host[1:, ::2, ::-1]),
        (array[:, 1:2].broadcast_to((3, 7, 5)), np.broadcast_to(host[:, 1:2], (3, 7, 5))),
        (array.as_strided((2, 3), (5, 2)), host.reshape(-1)[[[0, 2, 4], [5, 7, 9]]]),
        (array.flip((0, 2)), np.flip(host, (0, 2))),
        (array.flip(1), np.flip(host, 1)),
        (array.flip(()), host),
        (array[..., :4], host[..., :4]),  # rows of 16 bytes that do not begin at multiples of them
        (array[1:1], host[1:1]),
    ]:
        assert shares(made, array)
        assert made.shape == expected.shape
        np.testing.assert_array_equal(made.numpy(), expected)
        np.testing.assert_array_equal((made + 1).numpy(), expected + 1)
        np.testing.assert_array_equal(made.compact().numpy(), expected)
        assert made.compact().is_compact()
    for view, shape in ((array.permute((1, 0, 2)), (6, 10)), (array[::2, :, ::-2], (-1,))):
        np.testing.assert_array_equal(view.reshape(shape).numpy(), view.numpy().reshape(shape))
    assert array.permute((2, 0, 1)).strides == (1, 20, 5)
    assert array[:, 1:2].broadcast_to((3, 7, 5)).strides == (20, 0, 1)
    assert array[::-1, :, 1].strides[0] == -20
    assert array.is_compact() and not array.permute((2, 1, 0)).is_compact()
    array.permute((2, 1, 0))[0, 0, 0] = 99
    assert array.numpy()[0, 0, 0] == 99
    padding = ((1, 0), (0, 2), (3, 1))
    view, host = array[::-1, ::2], array.numpy()[::-1, ::2]
    np.testing.assert_array_equal(view.pad(padding).numpy(), np.pad(host, padding))


def test_flat_writes_through_and_is_an_array_to_numpy():
    host, array = pair(3, 4)
    assert array.flat.shape == (12,) and shares(array.flat, array)
    array.flat[7] += 2.5
    host.flat[7] += 2.5
    turned = array.permute((1, 0)).flat  # elements that no strides reach in this order
    np.testing.assert_array_equal(turned[-1].numpy(), [host[-1, -1]])
    np.testing.assert_array_equal(turned[2:5].numpy(), host.T.reshape(-1)[2:5])
    turned[-2] = 50
    turned[2:5] = [7, 8, 9]
    host.T.flat[-2], host.T.flat[2:5] = 50, [7, 8, 9]
    np.testing.assert_array_equal(array.numpy(), host)
    for words in ({}, {"copy": True}, {"dtype": np.float64}, {"dtype": int, "copy": True}):
        made = np.array(turned, **words)
        np.testing.assert_array_equal(made, host.T.ravel().astype(made.dtype))
        assert made.dtype == words.get("dtype", np.float32)
    if int(np.__version__[0]) >= 2:
        with pytest.raises(ValueError, match="copy"):
            np.asarray(turned, copy=False)


def test_neighbours_in_memory_join():
    host, array = pair(6, 4)
    one, other = array[:2], array[2:6]
    both = one.joined(other)
    np.testing.assert_array_equal(both.numpy(), host)
    assert shares(both, array)
    parts = array.reshape((3, 2, 4))
    assert parts[:1].joined(parts[1:3]).shape == (3, 2, 4)
    for a, b in [
        (other, one),
        (one, array[3:6]),
        (array[:, :2], array[2:6]),
        (one, array[2:6, :3]),
        (one, other.copy()),
        (one, other.view("int32")),
        (one, other.reshape((2, 2, 4))),
        (one, other.reshape((2, 8))),
        (nd.ones(()), nd.ones(())),
    ]:
        assert a.joined(b) is None


# ---- indexing ------------------------------------------------------------------------------------

slices = st.slices(5) | st.integers(-5, 4)


def kept_axes(index) -> tuple:
    """NumPy's index of an index whose integers keep their axis, with length 1."""
    return tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in index)


@quick
@given(st.tuples(slices, slices, slices), st.permutations(range(3)))
def test_indexing_is_numpys(index, order):
    host, array = pair(5, 5, 5)
    host, array = host.transpose(order), array.permute(tuple(order))
    wanted, got = host[kept_axes(index)], array[index]
    np.testing.assert_array_equal(got.numpy(), wanted)
    np.testing.assert_array_equal(array.at(index).numpy(), host[index])
    if got.size:  # strides of an axis that is not walked do not matter
        walked = [(s * 4, t) for s, t, n in zip(got.strides, wanted.strides, got.shape) if n > 1]
        assert all(one == other for one, other in walked)
    for axis, (of, size) in enumerate(zip(index, host.shape)):
        if isinstance(of, slice):
            filled = array.process_slice(of, axis)
            assert range(size)[filled] == range(size)[of]
            assert None not in (filled.start, filled.step)


def test_setitem_of_overlapping_views_and_other_dtypes(device):
    host, array = pair(4, 5, device=device)
    array[1:] = array[:-1]
    host[1:] = host[:-1].copy()
    array[:, :4] = array[:, :4].permute((1, 0))  # from the same place on, in another order
    host[:, :4] = host[:, :4].T.copy()
    array[..., 1] = 8
    host[..., 1] = 8
    array[0] = nd.array(np.arange(5), dtype="int32", device=device)
    host[0] = np.arange(5)
    np.testing.assert_array_equal(array.numpy(), host)
    for size in (35, 5000, 100_000):  # read while it is written, at once and in parts
        d = nd.array(np.arange(size), device=device)
        d += d[::-1]
        np.testing.assert_array_equal(d.numpy(), np.full(size, size - 1))


def test_setitem_of_values_that_broadcast():
    """Arrays are assigned by their number of elements where an integer index left a length-1 axis:
    (3, 1, 4) takes (3, 4). Of square arrays too, where a value fits the shape with the axis of an
    integer and without it: NumPy's rule, without it, comes first."""
    for shape in ((3, 3, 2), (2, 2, 2), (3, 4, 2), (3, 3, 3), (3, 2, 4)):
        for index in (
            *((EVERY, EVERY, 1), (EVERY, 1), (0,), (EVERY, 1, 1), (-1, EVERY, 0), (..., 1)),
            *((None, EVERY, 1), (EVERY, None, 1), (..., None, 1)),
        ):
            host, array = pair(*shape)
            place = host[index].shape
            for ones in np.ndindex(*[2] * len(place)):  # each size as it is, or 1
                of = tuple(1 if one else size for one, size in zip(ones, place))
                for start in range(len(of) + 1):  # and without leading axes
                    if all(size == 1 for size in of[:start]):
                        value = numbers(*of[start:]) + 100 * start
                        host[index], array[index] = value, nd.array(value)
                        np.testing.assert_array_equal(array.numpy(), host, f"{shape} {index} {of}")
    array = nd.zeros((2, 2))
    array[:] = nd.array(numbers(2, 1, 1, 2))  # several axes of one element
    np.testing.assert_array_equal(array.numpy(), numbers(2, 2))


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = [  # calls on a (3, 4), cube (3, 2, 4), one (1,) and zero (0, 3); words of their error
    (IndexError, None, "a[5] ; a[-6] ; a[0, 5] ; a[0, 0, 0] ; set(a, 5, 1) ; set(a, (0, 0, 0), 1)"),
    (IndexError, "12 is out of range", "a.flat[12] ; a.permute((1, 0)).flat[12]"),
    (IndexError, "-13 is out of range", "a.permute((1, 0)).flat[-13]"),
    ((TypeError, ValueError, IndexError), None, "a['text'] ; a[1.5] ; a[0:5:0] ; a['a':]"),
    (ValueError, None, "a.permute((0,)) ; a.permute((0, 0)) ; a.permute((0, 2))"),
    (ValueError, None, "a.permute((0, 1, 2)) ; a.broadcast_to((3, 5)) ; a.broadcast_to((4,))"),
    (ValueError, None, "a.broadcast_to((2, 3, 5)) ; a.reshape((5, 5)) ; a.reshape((-1, -1))"),
    (ValueError, None, "a.reshape((7, -1)) ; a.reshape((-2, 12)) ; a.reshape((-1, 0))"),
    (ValueError, None, "a.as_strided((4, 4), (4, 1)) ; a.as_strided((3,), (-1,))"),
    (ValueError, "setitem", "set(cube, (all, 1), numbers(3, 4, 2)) ; set(a, 0, numbers(3))"),
    (ValueError, "setitem", "set(cube, (all, 1), numbers(2, 3, 4))"),
    (ValueError, "setitem", "set(cube, (all, 1), numbers(4, 3))"),
    (ValueError, "pad: needs", "a.pad(((1, 0),)) ; a.pad(((1, 0), (0, -2)))"),
    (ValueError, "pad: needs", "a.pad(((-1, 0), (0, 2)))"),
    # Sizes whose product wraps around in 64 bits made arrays of no elements; negative ones passed.
    (ValueError, "negative size -5", "one.broadcast_to((-5, 3)) ; one.as_strided((0, -5), (0, 0))"),
    (ValueError, "negative size -5", "make((-5,), strides=(0,), handle=one._handle)"),
    (ValueError, "passes 2", "one.broadcast_to((2**32, 2**32)) ; one.broadcast_to((2**63 - 1,))"),
    (ValueError, "passes 2", "one.as_strided((2**32, 2**32), (0, 0))"),
    (ValueError, "passes 2", "one.as_strided((2**62, 2**62), (2**62, 2**62))"),
    (ValueError, "outside", "a.as_strided((2**30, 2**30), (2**62, -(2**62)))"),
    (ValueError, "stride .* outside 2.63 bytes", "one.as_strided((1,), (2**62,))"),
    (ValueError, "stride .* outside 2.63 bytes", "one.as_strided((1,), (-(2**63),))"),
    (ValueError, "stride .* outside 2.63 bytes", "one.as_strided((0, 5), (2**62, -(2**62)))"),
    (ValueError, "stride .* outside 2.63 bytes", "make((1,), (2**62,), handle=one._handle)"),
    (ValueError, "do not fit", "zero.reshape((0, 2**62, 2**62))"),
    (ValueError, None, "make((4, 4), handle=a._handle)"),
    (ValueError, None, "make((3,), strides=(1,), handle=a._handle, offset=10)"),
    (ValueError, None, "make((3,), strides=(-1,), handle=a._handle, offset=1)"),
    (ValueError, "offset|outside", "make((0,), handle=a._handle, offset=-1)"),
    (ValueError, "offset|outside", "make((1,), handle=a._handle, offset=-(2**63))"),
    (ValueError, "offset|outside", "make((0,), handle=a._handle, offset=13)"),
    (ValueError, None, "nd.empty((-1,)) ; nd.empty((2**40, 2**40)) ; nd.empty((1,) * 9)"),
    ((ValueError, TypeError), None, "nd.array([[1.0], [1.0, 2.0]]) ; a.view('int64')"),
    (TypeError, "float64", "nd.array([1.0], dtype='float64') ; a.astype('float64')"),
    (TypeError, None, "a.astype('text') ; a.astype('')"),
    (ValueError, "add: ", "a + one.broadcast_to((3,))"),
    (ValueError, "matmul: b: axis K is 3, but was 4", "a @ a"),
    (
        ValueError,
        "^matmul: batch axes: axis 1 from the end is 3",
        "cube @ cube[:2].reshape((2, 4, 2))",
    ),
    (ValueError, "matmul: a: has no axes", "nd.ones(()) @ a"),
    (ValueError, "matmul: b: has no axes", "a @ nd.ones(())"),
    (TypeError, None, "a @ a.permute((1, 0)).astype('bfloat16') ; a @ 2"),
    (TypeError, None, "a + 'x' ; None * a ; a + object()"),
    (TypeError, "array: None", "nd.array(None) ; nd.array([1, None], 'int64') ; set(a, 0, [None])"),
    (TypeError, "joined: other", "one.joined([1])"),
    (TypeError, "dl_device: must be a tuple", "a.__dlpack__(dl_device=3)"),
    (TypeError, "dl_device: must be a tuple", "a.__dlpack__(dl_device=[1, 0])"),
    (
        BufferError,
        "another device",
        "a.__dlpack__(dl_device=(1, 3)) ; a.__dlpack__(dl_device=(2, 0))",
    ),
    (TypeError, "view: float32 has 4 bytes", "a.view('int64') ; a.view('uint16')"),
    (TypeError, "NDArray", "_C.AsyncCopy([1.0])"),
    (ValueError, None, "zero.max(axis=0) ; zero.min(axis=0) ; zero.argmax(axis=0)"),
    (ValueError, None, "a.sum(axis=2) ; a.sum(axis=-3) ; a.sum(axis=(0, 0))"),
    (BufferError, None, "memoryview(a.astype('bfloat16'))"),
    (ValueError, "not aligned", "_C.from_dlpack(unaligned)"),
]


@pytest.mark.parametrize("error, words, calls", REFUSED, ids=[calls for *_, calls in REFUSED])
def test_wrong_call_is_refused(error, words, calls):
    names = {"a": nd.array(numbers(3, 4)), "cube": nd.array(numbers(3, 2, 4)), "one": nd.ones((1,))}
    names |= {"zero": nd.zeros((0, 3)), "unaligned": np.zeros(18, np.uint8)[2:].view(np.float32)}
    names |= {"nd": nd, "_C": _C, "make": nd.NDArray.make, "all": EVERY}
    names |= {"set": lambda x, i, v: x.__setitem__(i, nd.array(v)), "numbers": numbers}
    for call in calls.split(" ; "):
        with naming(call), pytest.raises(error, match=words):
            eval(call, dict(names))
    np.testing.assert_array_equal(names["a"].numpy(), numbers(3, 4))
    np.testing.assert_array_equal(names["cube"].numpy(), numbers(3, 2, 4))


# ---- reductions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, most", [("uint8", 255), ("bool", 1), ("uint16", 65535), ("int32", 1 << 30)]
)
def test_reductions_of_integers_need_no_wide_copy(dtype, most):
    """Sums of uint8 in int64, means in float32, in the memory of the operand and the result."""
    values = np.random.default_rng(3).integers(0, most, (1000, 4001), endpoint=True)
    x = nd.array(values, dtype)
    views = (x, values), (x.permute((1, 0)), values.T), (x[:, ::3], values[:, ::3])
    for view, wanted in views:
        nd.cpu().reset_peak()
        before = nd.cpu().memory_stats()["live_bytes"]
        for axis in (None, 0, 1):
            total, mean = view.sum(axis=axis), view.mean(axis=axis)
            assert total.dtype == "int64" and mean.dtype == "float32"
            np.testing.assert_array_equal(total.numpy(), wanted.sum(axis=axis))
            np.testing.assert_allclose(mean.numpy(), wanted.mean(axis=axis), rtol=1e-6)
        assert nd.cpu().memory_stats()["peak_bytes"] - before < 200_000, view.strides


# ---- copies and exchange -------------------------------------------------------------------------


def test_copies(device):
    host, array = pair(3, 4, device=device)
    ways = array.copy(), array.astype("float32"), copy.copy(array), copy.deepcopy(array)
    for made in (*ways, array.to(nd.cpu()), pickle.loads(pickle.dumps(array))):
        np.testing.assert_array_equal(made.numpy(), host)
        assert not shares(made, array) or made is array
    array.copy().fill(0)
    np.testing.assert_array_equal(array.numpy(), host)
    assert array.astype("int32").dtype == "int32" and array.to(nd.cpu()).device == nd.cpu()
    np.testing.assert_array_equal(array.astype("bool").numpy(), host.astype(bool))
    restored = pickle.loads(pickle.dumps(array[::-1, ::2]))
    np.testing.assert_array_equal(restored.numpy(), host[::-1, ::2])
    assert restored.device == array.device
    low = array.astype("bfloat16")
    assert_same_bits(pickle.loads(pickle.dumps(low)), low)


def test_exchange_with_numpy():
    host, array = pair(3, 4)
    for made in (np.asarray(array), np.from_dlpack(array), np.asarray(memoryview(array))):
        np.testing.assert_array_equal(made, host)
    shared = np.from_dlpack(array)
    array[0, 0] = 77
    assert shared[0, 0] == 77
    view = np.from_dlpack(array[::-1, ::2])
    np.testing.assert_array_equal(view, array.numpy()[::-1, ::2])
    capsule = array[1:].__dlpack__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    fields = (ctypes.c_uint64 * 6).from_address(pointer_of(capsule, b"dltensor"))
    fields[0], fields[5] = fields[0] - 16, 16  # data and byte_offset of a DLTensor
    np.testing.assert_array_equal(_C.from_dlpack(capsule).numpy(), array.numpy()[1:])
    for copied in (False, True):  # DLPACK_FLAG_BITMASK_IS_COPIED
        capsule = array.__dlpack__(max_version=(1, 0), copy=copied)
        versioned = pointer_of(capsule, b"dltensor_versioned")
        assert ctypes.c_uint64.from_address(versioned + 24).value == 2 * copied
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(array, copy=True), shared)
    interface = array.permute((1, 0)).__array_interface__
    assert interface["shape"] == (4, 3) and interface["typestr"] == "<f4"
    buffer = memoryview(array.permute((1, 0)))
    known = (buffer.shape, buffer.strides, buffer.format, buffer.itemsize)
    assert known == ((4, 3), (4, 16), "f", 4)
    digest = hashlib.sha256(array.numpy().tobytes()).digest()
    assert hashlib.sha256(array).digest() == digest  # asked for without a shape it is bytes
    assert io.BytesIO(bytes(48)).readinto(array) == 48 and not array.numpy().any()
    array[...] = nd.array(host)
    del array
    np.testing.assert_array_equal(shared, host)  # the memory outlives the array
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1):  # before, it exports none
        host.flags.writeable = False
        references = sys.getrefcount(host)
        _C.from_dlpack(host).fill(0)  # a copy: arrays can be written to
        assert host[0, 0] == -40 and sys.getrefcount(host) == references
    np.testing.assert_array_equal(np.asarray(nd.array([1, 2], dtype="bfloat16")), [1, 2])


def test_buffer_is_given_in_the_order_that_is_asked_for():
    """The flags of CPython's buffer protocol: without strides only elements in C order."""
    simple, strides, c_order, f_order, any_order = 0, 0x18, 0x38, 0x58, 0x98
    array = nd.array(np.ones((3, 4)))
    for one, orders in (
        (array, {simple, strides, c_order, any_order}),
        (array.permute((1, 0)), {strides, f_order, any_order}),
        (array[:, ::2], {strides}),
        (array[0], {simple, strides, c_order, f_order, any_order}),
    ):
        for flags in (simple, strides, c_order, f_order, any_order):
            buffer = ctypes.create_string_buffer(256)  # longer than a Py_buffer
            fits = True
            try:
                ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(one), buffer, flags)
                ctypes.pythonapi.PyBuffer_Release(buffer)
            except BufferError:
                fits = False
            assert fits == (flags in orders), (one.strides, hex(flags))


def test_repr(device):
    _, array = pair(2, 2, device=device)
    text = repr(array)
    assert "-40" in text and "float32" in text and str(array.device) in text
    assert "shape=(0, 3)" in repr(nd.zeros((0, 3), device=device))
    assert repr(nd.zeros((1000, 1000), device=device)).count("\n") < 50
