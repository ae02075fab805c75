"""Hostile objects, and the other words of the lines that the fuzz runs.

A hostile object answers each protocol method with the next of its `answers` (an exception is
raised; the last is repeated), after it has called `then`, which may do anything to anybody. What a
line says, it says again when it is pasted.
"""

from __future__ import annotations

# Many of these are words of the lines alone.
# ruff: noqa: F401
import copy
import ctypes
import functools
import gc
import importlib.util
import io
import itertools
import operator
import pickle
import sys
import threading
import weakref
from decimal import Decimal
from fractions import Fraction

import numpy as np

from needle import _C
from needle.testing import CASES, OPS, dtype_of, prepare, to_ndarray


class Raised(Exception):
    """What a hostile object raises."""


class Fault(AssertionError):
    """What must not be, seen by a line itself."""


# What calls of the core may raise, and what lines raise of themselves: a name that is gone, a proxy
# of what is gone, a pickle or copy that its type refuses.
ALLOWED = (
    (TypeError, ValueError, OverflowError, IndexError, MemoryError, BufferError, RuntimeError)
    + (AttributeError, Raised, StopIteration)
    + (NameError, ReferenceError, pickle.PicklingError, copy.Error)
)
FAULTS: list[str] = []  # seen where nothing can be raised: in threads, destructors, callbacks


def judge(error: BaseException, where: str) -> None:
    if not isinstance(error, ALLOWED):
        FAULTS.append(f"{type(error).__name__} in {where}: {error}")


sys.unraisablehook = lambda seen: judge(seen.exc_value, f"{seen.object!r:.80}")


# ---- objects -------------------------------------------------------------------------------------
class Hostile:
    def __init__(self, *answers, then=None):
        self.answers, self.then, self.asked = answers, then, 0

    def answer(self, *given, **named):
        self.asked += 1
        if self.then is not None and self.asked < 9:
            self.then()
        reply = self.answers[min(self.asked, len(self.answers)) - 1]
        if isinstance(reply, type) and issubclass(reply, BaseException):
            raise reply("hostile")
        return reply


class Words(dict):
    """Its own KeyError is none of the core's (slices are keys from Python 3.12 on)."""

    def __missing__(self, key):
        raise Raised(key)


def speaks(kind: str, /, *methods: str, base: type = Hostile, **more) -> type:
    return type(kind, (base,), dict.fromkeys(methods, Hostile.answer) | more)


asked = property(Hostile.answer)
NUMERIC = ("__index__", "__int__", "__float__")
Index = speaks("Index", "__index__")
Float = speaks("Float", "__float__")
Number = speaks("Number", *NUMERIC, "__bool__", "__complex__")
Array = speaks("Array", "__array__")
Item = speaks("Item", *NUMERIC, "__array__")
Interface = speaks("Interface", __array_interface__=asked)
Struct = speaks("Struct", __array_struct__=asked)
Producer = speaks("Producer", "__dlpack__", "__dlpack_device__")
Callable = speaks("Callable", "__call__")
Truth = speaks("Truth", "__bool__")
Path = speaks("Path", "__fspath__", "__str__", "__repr__")
Named = speaks("Named", name=asked)
Missing = speaks("Missing", "__getattr__")
Equal = speaks("Equal", "__eq__", "__hash__", "__lt__", "__ne__", "__gt__")
Iterable = speaks("Iterable", "__iter__")
REFLECTED = [f"__{kind}{op}__" for kind in ("r", "") for op in ("add", "sub", "mul", "matmul")]
Reflected = speaks("Reflected", *REFLECTED, "__rtruediv__", "__rpow__", "__pow__", "__eq__")


class Sequence(Hostile):
    """Its length is the first answer; its items are the others, to which there is an end."""

    __len__ = Hostile.answer

    def __getitem__(self, at):
        if self.asked > len(self.answers) + 8:
            raise IndexError("the end")
        return self.answer()


def own(base: type, value, *methods: str, **more) -> type:
    """A subclass of `base`, made with `value`, that answers for itself."""

    def new(cls, *answers, then=None):
        return base.__new__(cls, value)

    answers = dict.fromkeys(methods, Hostile.answer) | more | {"__new__": new}
    return type(f"Own{base.__name__}", (Hostile, base), answers)


OwnInt = own(int, 3, *NUMERIC)
OwnFloat = own(float, 1.5, *NUMERIC)
OwnStr = own(str, "float32", "__eq__", "__repr__", "__str__", __hash__=str.__hash__)
OwnList = own(list, (), "__iter__", "__len__", "__getitem__")
OwnTuple = own(tuple, (2, 3), "__iter__", "__len__", "__getitem__")
OwnFloat32 = own(np.float32, 1.5, *NUMERIC)  # NumPy itself does not survive converting these
OwnInt64 = own(np.int64, 3, *NUMERIC)


class Around(np.ndarray):
    """An array of NumPy whose copies and views meet a callback."""

    then = None

    def __array_finalize__(self, of):
        if self.then is not None:
            self.then(self, of)


def around(array: np.ndarray, then) -> np.ndarray:
    """`array`, whose next copies and views are seen by then(made, of)."""
    return array.view(type("AroundOnce", (Around,), {"then": staticmethod(then)}))


class Sub(_C.NDArray):
    """A subclass with a dictionary, which the collector knows."""


class Slim(_C.NDArray):
    __slots__ = ()


class Dying(_C.NDArray):
    """Calls `then` of its class when it dies."""

    then = None

    def __del__(self):
        if self.then is not None:
            self.then()


class Loud(_C.NDArray):
    """Overrides what C might ask for through Python."""

    shape = ndim = size = dtype = device = property(lambda self: Index(Raised).answer())

    def __len__(self):
        raise Raised

    def __getitem__(self, key):
        raise Raised

    def __array__(self, *given, **named):
        raise Raised


def dying(array, then):
    """An array in a cycle that only the collector ends; it calls `then` at its end."""
    made = type("DyingOnce", (Dying,), {"then": staticmethod(then)})(array)
    made.cycle = made
    return made


def unmade(kind: type = _C.NDArray):
    return kind.__new__(kind)


def changing(items: list, at: int, how: str, kind: type = Number) -> list:
    """A list that changes when its item `at`, or the first number in it, is asked for its value."""
    kept = list(items)

    def change():
        if how == "clear":
            items.clear()
        elif how == "pop":
            del items[-1:]
        elif how == "grow":
            items.extend([1] * 20)
        elif how == "replace":
            items[:] = [object(), None, "text"]
        elif hostile.asked > 1:  # by the second reading
            items[:] = [nested(12)] * len(kept)
        gc.collect(0)

    if "__array__" in vars(kind):  # NumPy itself does not survive another length while it reads
        how = "deepen"
    if items:
        at %= len(items)
        inside = isinstance(items[at], tuple)
        value = items[at][0] if inside else items[at]
        hostile = kind(np.array(value) if kind is Array else value, then=change)
        items[at] = [hostile, *items[at][1:]] if inside else hostile
        kept.append(items[at])
    return items


def nested(depth: int) -> list:
    return functools.reduce(lambda inner, _: [inner], range(depth), 1.0)


def selfish(kind=list):
    box = []
    box.append(kind(box) if kind is tuple else box)
    return box


# ---- arrays --------------------------------------------------------------------------------------
def made(shape, dtype="float32", layout="contiguous", seed=0):
    """An NDArray of small numbers; the layouts are those of tests/harness.py."""
    rng = np.random.default_rng(seed)
    whole = dtype.startswith(("int", "uint", "bool"))
    values = rng.integers(0, 4, shape) if whole else rng.standard_normal(shape) * 2
    if dtype.startswith("int") and seed % 3 == 0:
        values = values - 1
    return to_ndarray(np.asarray(values), dtype, None, layout)


def wild(dtype, shape, how, seed=0):
    """An array of NumPy that lies in memory as few do."""
    rng = np.random.default_rng(seed)
    values = np.asarray(rng.integers(0, 4, shape)).astype(dtype)
    if how == "misaligned" and values.dtype.kind not in "OV":
        memory = np.zeros(values.nbytes + 1, np.uint8)[1:]
        memory[:] = np.frombuffer(values.tobytes(), np.uint8)
        values = memory.view(values.dtype).reshape(values.shape)
    elif how == "fortran":
        values = np.asfortranarray(values)
    elif how == "negative":
        values = values[(slice(None, None, -1),) * values.ndim]
    elif how == "stepped":
        values = np.repeat(values, 2, -1)[..., ::2] if values.ndim else values
    elif how == "swapped":
        values = values.astype(values.dtype.newbyteorder("S"))
    elif how == "broadcast":
        values = np.broadcast_to(values, (2, *values.shape))
    elif how == "readonly":
        values.flags.writeable = False
    return values


def wide(n: int, *more: int):
    """(n, 2, 2) elements, or (n, *more, 2, 2), of four."""
    return made((2, 2)).broadcast_to((n, *more, 2, 2))


@functools.cache
def small_cases(op: str) -> list:
    """Cases of needle.testing that take no long time."""

    def size(case):
        return sum(np.size(value) for value in case.inputs(np.random.default_rng(0)).values())

    return [case for case in CASES if case.op == op and size(case) < 30_000]


def operands(op: str, case: int, dtype="float32", layout="contiguous") -> dict:
    """The operands of a case by name, as the op takes them."""
    values = prepare(small_cases(op)[case % len(small_cases(op))], dtype)
    return {
        o.name: to_ndarray(values[o.name], dtype_of(o, dtype), None, layout)
        if o.is_array and values[o.name] is not None
        else values[o.name]
        for o in OPS[op].inputs
    }


# ---- DLPack --------------------------------------------------------------------------------------
class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = (
    ctypes.py_object,
    (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
)
LENT: set[int] = set()  # addresses of structures that nobody has given back
KEPT: list[tuple] = []  # what they are made of, until the case is over


@Deleter
def delete(address):
    if address not in LENT:
        FAULTS.append("a DLPack deleter was called twice")
    LENT.discard(address)
    gc.collect(0)


def capsule(
    shape, strides=None, dtype=(2, 32, 1), ndim=None, device=(1, 0), byte_offset=0,
    start=0, version=None, flags=0, name=None, deletes=True,
):  # fmt: skip
    """A DLPack capsule over 4096 zeros, as the arguments say, true or not."""
    memory = (ctypes.c_uint8 * 4096)()
    made = Versioned() if version else Managed()
    tensor = made.tensor
    tensor.data, tensor.byte_offset = ctypes.addressof(memory) + start, byte_offset
    tensor.device[:] = device
    tensor.ndim = len(shape) if ndim is None else ndim
    tensor.code, tensor.bits, tensor.lanes = dtype
    sizes = (ctypes.c_int64 * 8)(*shape)
    steps = (ctypes.c_int64 * 8)(*strides) if strides is not None else None
    tensor.shape, tensor.strides = sizes, steps
    made.deleter = delete if deletes else Deleter(0)
    if version:
        made.version[:] = version
        made.flags = flags
    address = ctypes.addressof(made)
    text = (b"dltensor_versioned" if version else b"dltensor") if name is None else name
    KEPT.append((made, memory, sizes, steps, text))
    LENT.add(address)
    return new_capsule(address, text, None)


# ---- ways to call --------------------------------------------------------------------------------
def refused(call) -> None:
    """Whatever it raises, it must raise."""
    try:
        call()
    except ALLOWED:
        return
    raise Fault("the call was not refused")


def was(operand):
    """An operand that is to be changed: where it has become a dtype, of which NumPy takes the index
    of an array for a field and raises KeyError, it stays."""
    if isinstance(operand, np.dtype):
        raise TypeError("no operand any more")
    return operand


def together(*calls, times: int = 4) -> None:
    """The calls, each in a thread of its own, at once."""
    gate = threading.Barrier(len(calls))

    def work(call):
        gate.wait(20)
        for _ in range(times):
            try:
                call()
            except BaseException as error:
                judge(error, "a thread")

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def aside(call):
    """The call in another thread, while this one waits."""
    together(call, times=1)


def deep(call, room: int = 30):
    """The call where the interpreter's stack has little room."""
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1

    def down(left):
        return call() if left <= 0 else down(left - 1)

    return down(sys.getrecursionlimit() - depth - room)


def first(iterable, n: int = 5) -> list:
    return list(itertools.islice(iterable, n))


def round_trip(value, protocol: int):
    return pickle.loads(pickle.dumps(value, protocol))


def weak(value, then=None):
    return weakref.ref(value, then and (lambda _: then()))
