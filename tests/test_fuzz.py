"""Random calls of every callable of needle._C, mostly with one wrong operand.

An example is a few calls on arrays of every dtype and layout. None may crash, raise an exception
outside the contract, change an array that it only reads, or leave memory allocated. `make fuzz`
runs 5,000 examples under the address and undefined-behaviour sanitizers; --hypothesis-seed=N
repeats a run, and NEEDLE_TEST_EXAMPLES sets the number of examples.
"""

import contextlib
import functools
import operator
import os

import numpy as np
from harness import bits, live_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from needle import _C
from needle.testing import CASES, LAYOUTS, OPS, dtype_of, prepare, to_ndarray

EXAMPLES = int(os.environ.get("NEEDLE_TEST_EXAMPLES", 50))
LARGEST = 20_000  # elements of an array that later calls use

ALLOWED = (TypeError, ValueError, OverflowError, IndexError, MemoryError, BufferError, RuntimeError)
ALLOWED += (AttributeError, ZeroDivisionError)
DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool", "uint16")
NOT_DTYPES = ("float64", "", "\ud800", None, 3, object, np.complex64, np.dtype(">f4"), b"int32")
NUMBERS = (0, 1, 2, 3, 7, -1, -2, 0.5, -0.0, 1e300, float("nan"), -float("inf"), True, None)
NUMBERS += (2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, np.float32(1.5))
NUMBERS += (np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.str_("3"), 1j)
THINGS = (
    object(),
    "text",
    b"bytes",
    {},
    ...,
    slice(None, None, -2),
    print,
    NotImplemented,
    [[1], 2],
)
THINGS += (_C.cpu(), _C.cpu(1), _C.NDArray, np.array(1.5), np.zeros(3, [("a", "f4")]), [], ())
THINGS += (np.zeros((1,) * 12), np.array([None, 2], object), np.ones((2, 3))[::-1], [1, [2, 3]])

SKIPPED = ("_exit_after_fatal", "cuda_reset", "cuda_init", "sync_each_op", "Module", "Kernel")
FUNCTIONS = [getattr(_C, n) for n in sorted(dir(_C)) if n[:2] != "__" and n not in SKIPPED]
FUNCTIONS = [f for f in FUNCTIONS if callable(f) and not f.__name__.endswith("Error")]
METHODS = sorted({n for n in dir(_C.NDArray) if callable(getattr(_C.NDArray, n))} - {*dir(object)})
METHODS += ["__init__", "__repr__", "__eq__", "__lt__", "__reduce_ex__", "__sizeof__"]
OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul)
ON_ARRAYS = [getattr(_C.NDArray, name) for name in METHODS]  # and what is called with one first
ON_ARRAYS += [
    *OPERATORS,
    hash,
    operator.pow,
    operator.iadd,
    operator.imul,
    operator.getitem,
    operator.setitem,
]
ON_ARRAYS += [np.asarray, memoryview, bytes, np.from_dlpack, _C.from_dlpack, list, iter]
WRITERS = {"fill", "assign", "__init__", "__setitem__", "_rebuild", "process_slice", "make"}
IN_PLACE = "add sub mul truediv floordiv mod pow matmul and or xor".split()
WRITERS |= {name for sign in IN_PLACE for name in (f"__i{sign}__", f"i{sign}")}
WRITERS |= {
    "setitem",
    *(name for name, op in OPS.items() if any(o.is_written for o in op.operands)),
}


@functools.cache
def is_small(case) -> bool:
    """Whether an op takes little time."""
    return sum(np.size(value) for value in case.inputs(np.random.default_rng(0)).values()) < LARGEST


class Caller:
    """Draws calls by `draw` and makes them on a pool of arrays."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.pool = [self.made() for _ in range(3)]

    def one_of(self, *values):
        return self.draw(st.sampled_from(values))

    # -- operands

    def made(self):
        shape = self.draw(st.lists(st.integers(0, 5), max_size=4))
        dtype, layout = self.one_of(*DTYPES), self.one_of(*LAYOUTS)
        values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 - (dtype == "float32")
        return to_ndarray(values, dtype, None, layout)

    def array(self):
        x = self.one_of(*self.pool)
        with contextlib.suppress(IndexError):
            return x[self.one_of(..., slice(1, None), slice(None, None, -1), (..., None), (..., 0))]
        return x

    def integers(self):
        sizes = st.integers(-2, 8) | st.sampled_from((2**31, 2**40, 2**63, -(2**63), 1.5, None))
        return self.draw(st.lists(sizes, max_size=9).map(tuple) | sizes)

    def anything(self):
        kinds = (self.array, self.array, self.integers, lambda: self.one_of(*NUMBERS))
        kinds += (lambda: self.one_of(*DTYPES, *NOT_DTYPES), lambda: self.one_of(*THINGS))
        return self.one_of(*kinds)()

    def arguments(self) -> list:
        return [self.anything() for _ in range(self.draw(st.integers(0, 4)))]

    # -- calls: (function, arguments)

    def op(self):
        """An op on the operands of a case, of which at most two are replaced."""
        case = self.one_of(*CASES)
        while not is_small(case):
            case = self.one_of(*CASES)
        dtype = self.one_of("float32", "bfloat16", "int32")
        values = prepare(case, dtype if dtype != "int32" else "float32")
        operands = [
            to_ndarray(values[o.name], dtype_of(o, dtype), None, self.one_of(*LAYOUTS))
            if o.is_array and values[o.name] is not None
            else values[o.name]
            for o in OPS[case.op].inputs
        ]
        for _ in range(self.draw(st.integers(0, 2))):
            at = self.draw(st.integers(0, len(operands) - 1))
            operands[at] = self.anything() if self.draw(st.booleans()) else self.one_of(*operands)
        return getattr(_C, case.op), operands

    def function(self):
        return self.one_of(*FUNCTIONS), self.arguments()

    def on_array(self):
        function, arguments = self.one_of(*ON_ARRAYS), [self.array(), *self.arguments()]
        if self.draw(st.booleans()):
            if function in OPERATORS:  # as a number or a list beside an array
                arguments[:2] = arguments[1::-1]
            elif len(arguments) > 2:  # a key of several
                arguments[1:3] = [tuple(arguments[1:3])]
        return function, arguments

    def view(self):
        """A view of any strides, which is refused or lies within its memory."""
        axes = self.draw(st.integers(1, 3))
        shape = self.draw(st.tuples(*[st.integers(0, 6)] * axes))
        strides = self.draw(st.tuples(*[st.integers(-8, 8)] * axes))
        return lambda x: x.as_strided(shape, strides).copy(), [self.array()]

    def call(self) -> None:
        function, arguments = self.one_of(self.op, self.function, self.on_array, self.view)()
        reads = function.__name__ not in WRITERS
        before = [(x, bits(x)) for x in self.pool] if reads else []
        try:
            result = function(*arguments)
        except ALLOWED:
            result = None
        for x, values in before:
            assert np.array_equal(bits(x), values), f"{function.__name__} changed an operand"
        results = result if isinstance(result, tuple) else (result,)
        found = [x for x in results if isinstance(x, _C.NDArray) and x.size <= LARGEST]
        self.pool += [x for x in found if max(x.shape, default=0) <= LARGEST]
        self.pool = self.pool[-6:] or [self.made()]


@settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_random_calls_raise_documented_errors_and_leave_nothing(data):
    before = live_bytes(_C.cpu())
    caller = Caller(data.draw)
    with np.errstate(all="ignore"):
        for _ in range(data.draw(st.integers(1, 10))):
            caller.call()
    del caller
    assert live_bytes(_C.cpu()) == before
