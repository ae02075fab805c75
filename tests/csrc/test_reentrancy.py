"""Python code run by a call of the core: an operand's own methods change lists, make arrays,
answer differently the second time. `make fuzz` calls with more of them."""

import ctypes
import threading

import numpy as np
import pytest

from needle import _C


class Item:
    """A number that calls `then` when it is asked for its value."""

    def __init__(self, value, then):
        self.value, self.then = value, then

    def __index__(self):
        self.then()
        return self.value


@pytest.mark.parametrize(
    "call",
    [
        _C.empty,
        lambda shape: _C.array(np.zeros(6)).reshape(shape),
        lambda shape: _C.array(np.zeros((2, 3, 1))).broadcast_to(shape),
        lambda shape: _C.array(np.zeros(6)).as_strided(shape, (3, 1, 1)),
        lambda shape: _C.NDArray.make(shape, handle=_C.empty(6)._handle),
    ],
    ids=["empty", "reshape", "broadcast_to", "as_strided", "make"],
)
def test_a_shape_that_is_cleared_while_it_is_read(call):
    shape = [2, 3, 1]
    shape[0] = Item(2, lambda: (shape.clear(), shape.extend(["other"] * 5), shape.clear()))
    assert call(shape).shape == (2, 3, 1)
    assert shape == []


class Broken(Exception):
    pass


def broken(*given):
    raise Broken


def iterate():
    yield 1
    raise Broken


@pytest.mark.parametrize(
    "call",
    [
        lambda: _C.empty(iterate()),
        lambda: _C.empty((1, Item(1, broken))),
        lambda: _C.empty(1, type("Dtype", (), {"name": property(broken)})()),
        lambda: _C.fill(_C.empty(1), type("Value", (), {"__float__": broken})()),
        lambda: _C.sum(_C.empty(1), Item(1, broken)),
        lambda: _C.from_dlpack(type("Producer", (), {"__dlpack__": property(broken)})()),
    ],
    ids=["shape", "size", "dtype", "float", "integer", "__dlpack__"],
)
def test_errors_of_arguments_propagate(call):
    with pytest.raises(Broken):
        call()


def test_a_list_is_read_once():
    class Deeper:
        def __array__(self, dtype=None, copy=None):
            return np.array(1)

        def __int__(self):
            items[:] = [[[[[[[[[[[[1]]]]]]]]]]]]
            return 1

    items = [Deeper()]
    assert _C.array(items, "int32").tolist() == [1] and len(items) == 1


@pytest.mark.parametrize("name", ["sum", "mean", "max", "argmin"])
def test_an_array_that_is_made_by_its_own_axis(name):
    """The call is about the array that it began with."""
    x = _C.NDArray.__new__(_C.NDArray)
    axis = Item(0, lambda: x.__init__(np.ones((2,) * 8)))
    if name in ("sum", "mean"):
        assert getattr(x, name)((axis,)).shape == ()
    else:
        with pytest.raises(ValueError, match="has no elements"):
            getattr(x, name)((axis,))
    assert x.shape == (2,) * 8


def test_a_number_that_is_none_when_it_is_asked_again():
    class Fickle(np.int64):
        def __index__(self):
            raise OSError("a second time")

    with pytest.raises(OSError, match="a second time"):
        _C.fill(_C.empty(3), Fickle(3))


def test_async_copy_is_taken_by_one_of_three_threads():
    """One takes it; another gets the same array, or is told that it is not there yet."""
    array = _C.array(np.arange(1 << 20) % 7)

    def wait():
        gate.wait()
        try:
            arrived.append(copy.wait())
        except RuntimeError as error:
            refusals.append(str(error))

    for _ in range(100):
        copy, gate, arrived, refusals = _C.AsyncCopy(array), threading.Barrier(3), [], []
        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert arrived and all(x is arrived[0] for x in arrived)
        assert all("is not over in its thread" in text for text in refusals)
        assert copy.wait() is arrived[0]


# ---- DLPack --------------------------------------------------------------------------------------


def capsule_of(address: int, name: bytes):
    """A capsule without a destructor."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    return new(address, name, None)


def test_dl_device_is_a_tuple():
    for wrong in (3, [1, 0], "ab"):
        with pytest.raises(TypeError, match="dl_device: must be a tuple"):
            _C.empty(3).__dlpack__(dl_device=wrong)


def test_a_deleter_that_runs_python_while_an_exception_is_on_its_way():
    """A read-only tensor is copied: its producer gets it back when the copy cannot be had."""
    deleted = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def delete(address):
        deleted.append(len("Python"))

    shape, strides = (ctypes.c_int64 * 1)(2**46), (ctypes.c_int64 * 1)(0)
    one = (ctypes.c_float * 1)(1)
    managed = (ctypes.c_uint64 * 11)()  # version, context, deleter, flags, and the tensor
    at = ctypes.addressof(managed)
    managed[0], managed[2], managed[3] = 1, ctypes.cast(delete, ctypes.c_void_p).value, 1
    managed[4], managed[5] = ctypes.addressof(one), 1
    managed[6] = 1 | (2 | 32 << 8 | 1 << 16) << 32
    managed[7], managed[8] = ctypes.addressof(shape), ctypes.addressof(strides)
    name = b"dltensor_versioned"  # kept: the capsule has its address
    with pytest.raises(MemoryError, match="70368744177664|281474976710656"):
        _C.from_dlpack(capsule_of(at, name))
    assert deleted == [6]


def test_an_empty_tensor_at_any_offset():
    managed = (ctypes.c_uint64 * 8)(*[0] * 8)
    memory, shape = (ctypes.c_float * 1)(), (ctypes.c_int64 * 1)(0)
    managed[0], managed[1] = ctypes.addressof(memory), 1
    managed[2] = 1 | (2 | 32 << 8 | 1 << 16) << 32
    managed[3], managed[5] = ctypes.addressof(shape), 2**63
    name = b"dltensor"
    assert _C.from_dlpack(capsule_of(ctypes.addressof(managed), name)).tolist() == []
