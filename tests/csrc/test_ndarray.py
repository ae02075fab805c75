"""The NDArray of api.md: making, views and indexing, against NumPy."""

import weakref

import numpy as np
import pytest
from harness import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from needle import backend_ndarray as nd

quick = settings(max_examples=60, deadline=None, derandomize=True)


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
    np.testing.assert_array_equal(
        nd.array(numbers(4, 6).T[::-2], device=device).numpy(), numbers(4, 6).T[::-2]
    )
    again = nd.array(made, device=device)
    again.fill(0)
    assert made.numpy().sum() == 10  # a copy
    assert nd.array(7, device=device).shape == ()
    assert nd.array([], device=device).shape == (0,)
    np.testing.assert_array_equal(nd.full((2, 3), 2.5, device=device).numpy(), np.full((2, 3), 2.5))
    np.testing.assert_array_equal(nd.ones((2, 3), device=device).numpy(), np.ones((2, 3)))
    np.testing.assert_array_equal(nd.zeros((2, 0), device=device).numpy(), np.zeros((2, 0)))
    empty = nd.empty((3, 4), dtype="int64", device=device)
    assert (empty.shape, empty.strides, empty.size, empty.ndim, empty.dtype) == (
        (3, 4),
        (4, 1),
        12,
        2,
        "int64",
    )


def test_dtypes_round_trip():
    for dtype in ("float32", "float16", "int32", "int64", "uint8", "bool", "uint16"):
        host = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
        made = nd.array(host, dtype=dtype)
        assert made.dtype == dtype and made.numpy().dtype == dtype
        np.testing.assert_array_equal(made.numpy(), host)


def test_bfloat16_rounds_to_nearest_even():
    host = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -np.inf, np.nan, 1e-40], np.float32)
    made = nd.array(host, dtype="bfloat16")
    assert made.numpy().dtype == np.float32
    np.testing.assert_array_equal(made.numpy()[:3], [1.0, 1.0, 1 + 2**-6])
    assert np.isinf(made.numpy()[3]) and np.isinf(made.numpy()[4]) and np.isnan(made.numpy()[5])
    assert made.view("uint16").numpy()[0] == 0x3F80
    assert_same_bits(made.view("uint16").view("bfloat16"), made)


def test_every_half_survives_float32():
    every = nd.array(np.arange(65536), dtype="uint16")
    for dtype in ("float16", "bfloat16"):
        halves = every.view(dtype)
        known = ~np.isnan(halves.numpy())
        again = halves.astype("float32").astype(dtype).view("uint16")
        np.testing.assert_array_equal(again.numpy()[known], np.arange(65536)[known])


def test_float16_rounds_to_nearest_even():
    least = 2.0**-24
    host = np.array(
        [65520, 65519, least / 2, 1.5 * least / 2, least, 1 + 2**-11, 1 + 3 * 2**-11, 65504],
        np.float32,
    )
    made = nd.array(host).astype("float16")
    np.testing.assert_array_equal(
        made.numpy(), [np.inf, 65504, 0, least, least, 1, 1 + 2**-9, 65504]
    )
    halves = nd.array([least, -3 * least, 2.0**-14, 1.5, np.inf, -np.inf, np.nan], dtype="float16")
    np.testing.assert_array_equal([half.item() for half in halves], halves.numpy())


def test_floats_out_of_range_become_the_nearest_integer(device):
    made = nd.array([1e30, -1e30, np.nan, -7.9], device=device).astype("int64")
    np.testing.assert_array_equal(made.numpy(), [2**63 - 1, -(2**63), 0, -7])


def test_constructor_and_subclass():
    host, array = pair(3, 4)
    np.testing.assert_array_equal(nd.NDArray(array).numpy(), host)
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
    loud[0] = 5
    np.testing.assert_array_equal(loud.numpy()[0], np.full(4, 5))
    loud.colour = "red"  # a Python subclass has a dict
    assert loud.colour == "red"
    known = weakref.ref(array)
    assert known() is array
    del array
    assert known() is None


def test_make(device):
    base = nd.array(numbers(12), device=device)
    view = nd.NDArray.make((3, 2), strides=(4, 1), device=device, handle=base._handle, offset=1)
    np.testing.assert_array_equal(view.numpy(), numbers(12).reshape(3, 4)[:, 1:3])
    assert view._handle.ptr() == base._handle.ptr()
    before = base.written
    assert view.data_ptr == base.data_ptr + 4 and base.written > before
    view.fill(0)
    assert base.numpy()[1] == 0
    assert nd.NDArray.make((2, 5), device=device).strides == (5, 1)
    with pytest.raises(ValueError):
        nd.NDArray.make((4, 4), device=device, handle=base._handle)
    with pytest.raises(ValueError):
        nd.NDArray.make((3,), strides=(1,), device=device, handle=base._handle, offset=10)
    with pytest.raises(ValueError):
        nd.NDArray.make((3,), strides=(-1,), device=device, handle=base._handle, offset=1)
    for shape in ((0,), (1,)):
        for offset in (-1, -(2**63), 13):
            with pytest.raises(ValueError, match="offset|outside"):
                nd.NDArray.make(shape, device=device, handle=base._handle, offset=offset)
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
    ]:
        assert shares(made, array)
        assert made.shape == expected.shape
        np.testing.assert_array_equal(made.numpy(), expected)
        np.testing.assert_array_equal(made.compact().numpy(), expected)
        assert made.compact().is_compact()
    assert array.permute((2, 0, 1)).strides == (1, 20, 5)
    assert array[:, 1:2].broadcast_to((3, 7, 5)).strides == (20, 0, 1)
    assert array[::-1, :, 1].strides[0] == -20
    assert array.is_compact() and not array.permute((2, 1, 0)).is_compact()
    array.permute((2, 1, 0))[0, 0, 0] = 99
    assert array.numpy()[0, 0, 0] == 99


def test_reshape_of_a_view():
    host, array = pair(4, 6)
    np.testing.assert_array_equal(
        array.permute((1, 0)).reshape((8, 3)).numpy(), host.T.reshape(8, 3)
    )
    np.testing.assert_array_equal(
        array[::2, ::-2].reshape((-1,)).numpy(), host[::2, ::-2].reshape(-1)
    )


def test_flat_writes_through():
    host, array = pair(3, 4)
    assert array.flat.shape == (12,) and shares(array.flat, array)
    np.testing.assert_array_equal(array.flat[7].numpy(), [host.flat[7]])
    array.flat[7] += 2.5
    host.flat[7] += 2.5
    np.testing.assert_array_equal(array.numpy(), host)
    turned = array.permute((1, 0)).flat  # elements that no strides reach in this order
    np.testing.assert_array_equal(turned[-1].numpy(), [host[-1, -1]])
    np.testing.assert_array_equal(turned[2:5].numpy(), host.T.reshape(-1)[2:5])
    turned[-2] = 50
    turned[2:5] = [7, 8, 9]
    host.T.flat[-2], host.T.flat[2:5] = 50, [7, 8, 9]
    np.testing.assert_array_equal(array.numpy(), host)
    for at in (12, -13):
        with pytest.raises(IndexError, match=f"{at} is out of range"):
            turned[at]


slices = st.slices(5) | st.integers(-5, 4)


@quick
@given(st.tuples(slices, slices, slices), st.permutations(range(3)))
def test_indexing_is_numpys(index, order):
    """An integer keeps its axis, with length 1."""
    host, array = pair(5, 5, 5)
    kept = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in index)
    host, array = host.transpose(order), array.permute(tuple(order))
    np.testing.assert_array_equal(array[index].numpy(), host[kept])
    walked = [(s, n) for s, n in zip(array[index].strides, array[index].shape) if n > 1]
    if array[index].size:  # strides of an axis that is not walked do not matter
        assert [s * 4 for s, _ in walked] == [
            s for s, n in zip(host[kept].strides, host[kept].shape) if n > 1
        ]


@quick
@given(
    st.tuples(slices, slices), st.sampled_from(["scalar", "same", "reversed", "transposed", "row"])
)
def test_setitem_from_strided_sources(index, kind):
    host, array = pair(5, 5)
    kept = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in index)
    shape = host[kept].shape
    source = numbers(*shape) * 3 + 1
    if kind == "scalar":
        array[index] = 7
        host[kept] = 7
    elif kind == "row":
        array[index] = nd.array(np.arange(shape[1]))
        host[kept] = np.arange(shape[1])
    elif kind == "same":
        array[index] = nd.array(source)
        host[kept] = source
    elif kind == "reversed":
        array[index] = nd.array(source)[::-1, ::-1]
        host[kept] = source[::-1, ::-1]
    else:
        array[index] = nd.array(np.ascontiguousarray(source.T)).permute((1, 0))
        host[kept] = source
    np.testing.assert_array_equal(array.numpy(), host)


def test_setitem(device):
    host, array = pair(4, 5, device=device)
    array[1:] = array[:-1]  # they overlap
    host[1:] = host[:-1].copy()
    array[::-1] = array
    host[:] = host[::-1].copy()
    array[:, :4] = array[:, :4].permute((1, 0))  # from the same place on, in another order
    host[:, :4] = host[:, :4].T.copy()
    array[:, 0] = nd.array(np.arange(4).reshape(4, 1), device=device)
    host[:, 0] = np.arange(4)
    array[2, 3] = -1
    host[2, 3] = -1
    array[..., 1] = 8
    host[..., 1] = 8
    np.testing.assert_array_equal(array.numpy(), host)
    array[0] = nd.array(np.arange(5), dtype="int32", device=device)  # converts
    np.testing.assert_array_equal(array.numpy()[0], np.arange(5))
    with pytest.raises(ValueError):
        array[0] = nd.array(np.arange(4), device=device)


def test_setitem_of_as_many_elements():
    """The course's arrays are assigned by their number of elements when an integer index left a
    length-1 axis: (3, 1, 4) takes (3, 4)."""
    host, array = pair(3, 2, 4)
    array[:, 1, :] = nd.array(numbers(3, 4))
    host[:, 1, :] = numbers(3, 4)
    array[:, :, 1] = nd.array([5, 6])  # broadcasts to the shape without that axis
    host[:, :, 1] = [5, 6]
    np.testing.assert_array_equal(array.numpy(), host)
    every = slice(None)
    for number, index in enumerate([(None, every, 1), (every, None, 1), (..., None, 1)]):
        row = numbers(array[index].shape[-1]) + number
        array[index] = nd.array(row)
        host[index] = row
        np.testing.assert_array_equal(array.numpy(), host)
    for wrong in ((3, 4, 2), (2, 3, 4), (4, 3)):
        with pytest.raises(ValueError, match="setitem"):
            array[:, 1, :] = nd.array(numbers(*wrong))
    np.testing.assert_array_equal(array.numpy(), host)


def test_setitem_of_values_that_broadcast():
    """Of square arrays too, where a value fits the shape with the axis of an integer and without
    it: NumPy's rule, without it, comes first."""
    every = slice(None)
    for shape in ((3, 3, 2), (2, 2, 2), (3, 4, 2), (3, 3, 3)):
        for index in ((every, every, 1), (every, 1), (0,), (every, 1, 1), (-1, every, 0), (..., 1)):
            host, array = pair(*shape)
            place = host[index].shape
            for ones in np.ndindex(*[2] * len(place)):  # each size as it is, or 1
                of = tuple(1 if one else size for one, size in zip(ones, place))
                for start in range(len(of) + 1):  # and without leading axes
                    if all(size == 1 for size in of[:start]):
                        value = numbers(*of[start:]) + 100 * start
                        host[index], array[index] = value, nd.array(value)
                        np.testing.assert_array_equal(array.numpy(), host, f"{shape} {index} {of}")


def test_indices_refused():
    _, array = pair(5, 5)
    for index in (5, -6, (0, 5), (0, 0, 0)):
        with pytest.raises(IndexError):
            array[index]
        with pytest.raises(IndexError):
            array[index] = 1
    for index in ("text", 1.5, slice(0, 5, 0), slice("a", None)):
        with pytest.raises((TypeError, ValueError, IndexError)):
            array[index]


def test_process_slice():
    _, array = pair(7)
    for given_, expected in [
        (slice(None), slice(0, 7, 1)),
        (slice(2, None), slice(2, 7, 1)),
        (slice(-3, -1), slice(4, 6, 1)),
        (slice(1, 100, 2), slice(1, 7, 2)),
        (slice(None, None, -1), slice(6, None, -1)),
        (slice(5, 1, -2), slice(5, 1, -2)),
    ]:
        assert array.process_slice(given_, 0) == expected


def test_views_refused():
    _, array = pair(3, 4)
    for view, *arguments in (
        *((array.permute, axes) for axes in ((0,), (0, 0), (0, 2), (0, 1, 2))),
        *((array.broadcast_to, shape) for shape in ((3, 5), (4,), (2, 3, 5))),
        *((array.reshape, shape) for shape in ((5, 5), (-1, -1), (7, -1), (-2, 12), (-1, 0))),
        (array.as_strided, (4, 4), (4, 1)),
        (array.as_strided, (3,), (-1,)),
    ):
        with pytest.raises(ValueError):
            view(*arguments)


def test_views_of_impossible_shapes():
    """Sizes whose product wraps around in 64 bits made arrays of no elements, and negative ones
    passed."""
    one = nd.ones((1,))
    for shape in ((-5,), (-5, 3), (0, -5)):
        for make in (one.broadcast_to, lambda s: one.as_strided(s, (0,) * len(s))):
            with pytest.raises(ValueError, match="negative size -5"):
                make(shape)
        with pytest.raises(ValueError, match="negative size -5"):
            nd.NDArray.make(shape, strides=(0,) * len(shape), handle=one._handle)
    for shape in ((2**32, 2**32), (2**62, 2**62), (2**63 - 1,)):
        with pytest.raises(ValueError, match="passes 2"):
            one.broadcast_to(shape)
        for strides in ((0,) * len(shape), (2**62,) * len(shape)):
            with pytest.raises(ValueError, match="passes 2"):
                one.as_strided(shape, strides)
    with pytest.raises(ValueError, match="outside"):
        nd.ones((4,)).as_strided((2**30, 2**30), (2**62, -(2**62)))


def test_whole_numbers_that_no_double_holds():
    array = nd.array([2**53 + 1, 5], dtype="int64")
    np.testing.assert_array_equal((array + (2**53 + 1)).numpy(), [2**54 + 2, 2**53 + 6])
    np.testing.assert_array_equal(((2**60 + 1) - array).numpy(), [2**60 - 2**53, 2**60 - 4])
    np.testing.assert_array_equal((array == 2**53 + 1).numpy(), [True, False])
    array += 2**53 + 1
    np.testing.assert_array_equal(array.numpy(), [2**54 + 2, 2**53 + 6])
    assert (nd.array([5.0]) < 2**70).item() is True


def test_flat_is_an_array_to_numpy():
    host = np.arange(12.0).reshape(3, 4).T
    flat = nd.array(host.T).permute((1, 0)).flat
    assert type(flat).__name__ == "Flat"
    for given_ in ({}, {"copy": True}, {"dtype": np.float64}, {"dtype": int, "copy": True}):
        made = np.array(flat, **given_)
        np.testing.assert_array_equal(made, host.ravel())
        assert made.dtype == given_.get("dtype", np.float32)
    if int(np.__version__[0]) >= 2:
        with pytest.raises(ValueError, match="copy"):
            np.asarray(flat, copy=False)


def test_flip_and_pad(device):
    host, array = pair(3, 4, 2, device=device)
    for axes in ((0,), (1, 2), (0, 1, 2), ()):
        np.testing.assert_array_equal(array.flip(axes).numpy(), np.flip(host, axes))
    np.testing.assert_array_equal(array.flip(1).numpy(), np.flip(host, 1))
    padding = ((1, 0), (0, 2), (3, 1))
    np.testing.assert_array_equal(array.pad(padding).numpy(), np.pad(host, padding))
    np.testing.assert_array_equal(
        array[::-1, ::2].pad(padding).numpy(), np.pad(host[::-1, ::2], padding)
    )
    for wrong in (((1, 0),), ((1, 0), (0, -2), (3, 1)), ((-1, 0), (0, 2), (3, 1))):
        with pytest.raises(ValueError, match="pad: needs"):
            array.pad(wrong)


def test_neighbours_in_memory_join():
    host, array = pair(6, 4)
    one, other = array[:2], array[2:6]
    both = one.joined(other)
    np.testing.assert_array_equal(both.numpy(), host)
    both[1:3] = 7
    assert (array.numpy()[1:3] == 7).all()
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
    with pytest.raises(TypeError, match="joined: other"):
        one.joined([1])
