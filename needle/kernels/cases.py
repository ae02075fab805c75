"""Launches for a process of the pool: their arguments, and the comparison of their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.kernels.guard import GUARD, Array
from needle.kernels.limits import Entry, Size, triple, whole
from needle.kernels.process import Message

# The dtypes that arrays of a job may have. NumPy has no bfloat16: it comes as an NDArray on the
# host, lies as uint16, and is read as float32, which holds it exactly.
FLOATS = "float32", "bfloat16", "float16", "float64"
DTYPES = *FLOATS, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"
# Default tolerances, absolute and relative: those of KernelBench.
TOLERANCES = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-4, "float64": 1e-8}
Tolerance = float | Sequence[float] | None


def _shape(what: str, shape: Any, dtype: str) -> tuple[int, ...]:
    if dtype not in DTYPES:
        raise TypeError(f"{what}: dtype {dtype!r}; there are {', '.join(DTYPES)}")
    sizes = (shape,) if hasattr(shape, "__index__") else tuple(shape)
    return tuple(whole(f"{what}: a size of its shape", size, 0) for size in sizes)


@dataclass(frozen=True)
class Out:
    """An array that the kernel writes, every element of it."""

    shape: int | tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape("Out", self.shape, self.dtype))


@dataclass(frozen=True)
class InOut:
    """An array (NumPy, an NDArray on the host, or Random) that the kernel changes and that is
    returned."""

    array: Any


@dataclass(frozen=True)
class Random:
    """An array of numbers drawn from `seed`: floats of a standard normal distribution, or uniform
    between `low` and `high` if both are given; whole numbers from `low` (0) to below `high` (100).
    The same seed at another place among the arguments, or in another trial, gives other numbers."""

    shape: int | tuple[int, ...]
    dtype: str = "float32"
    seed: int = 0
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape("Random", self.shape, self.dtype))
        whole("Random: seed", self.seed, 0)

    def array(self, trial: int, place: int) -> np.ndarray | NDArray:
        """Draw it. ValueError for whole numbers that the dtype does not hold."""
        random, shape = np.random.default_rng([self.seed, trial, place]), self.shape
        dtype = "float32" if self.dtype == "bfloat16" else self.dtype
        if dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        if np.dtype(dtype).kind in "iu":
            high = 100 if self.high is None else self.high
            return random.integers(int(self.low or 0), int(high), shape, dtype)
        if self.low is None or self.high is None:
            drawn = random.standard_normal(shape)
        else:
            drawn = random.uniform(self.low, self.high, shape)
        array = drawn.astype(dtype)
        return _C.array(array, "bfloat16", _C.cpu()) if self.dtype == "bfloat16" else array


@dataclass(frozen=True)
class Case:
    """A launch for `Pool.evaluate`: sizes as of CUDA, arguments as of `Pool.run`, bytes of dynamic
    shared memory, and the floating-point operations that a right kernel needs at least (0: not
    known), for which a time can be too short."""

    grid: Size
    block: Size
    args: Sequence[Any]
    shared: int = 0
    operations: float = 0


@dataclass(frozen=True)
class Reference:
    """A kernel whose outputs are right, for the same arguments. Sizes that it omits are those of
    the case."""

    source: str
    entry: str
    grid: Size | None = None
    block: Size | None = None
    shared: int | None = None

    def of(self, case: Case) -> Case:
        """Return the launch of this kernel for a case."""
        own = {name: getattr(self, name) for name in ("grid", "block", "shared")}
        return replace(case, **{name: size for name, size in own.items() if size is not None})


def host_array(value: Any) -> tuple[str, tuple[int, ...], np.ndarray]:
    """Return (dtype, shape, the bytes of the elements in C order) of an array. TypeError."""
    if isinstance(value, NDArray):
        if not value.device.is_host:
            raise TypeError(f"an array of {value.device}: pass array.to(needle.cpu())")
        name = value.dtype
        array = (value.compact().view("uint16") if name == "bfloat16" else value).numpy()
    else:
        array = np.ascontiguousarray(value)
        name = array.dtype.name
        if name not in DTYPES or not array.dtype.isnative:
            raise TypeError(f"an array of dtype {array.dtype}; there are {', '.join(DTYPES)}")
    return name, np.shape(value), array.reshape(-1).view(np.uint8)


def readable(dtype: str, shape: Sequence[int], block: Any) -> np.ndarray:
    """Return an array from the bytes of its elements; bfloat16 as float32."""
    if dtype == "bfloat16":
        flat = (np.frombuffer(block, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(block, dtype).copy()
    return flat.reshape(shape)


# ---- comparing -----------------------------------------------------------------------------------


def both(tolerance: Tolerance) -> tuple[float, float] | None:
    """Return (absolute, relative) of a caller's tolerance. ValueError."""
    if tolerance is None:
        return None
    try:
        absolute, relative = np.broadcast_to(np.asarray(tolerance, np.float64), 2).tolist()
    except (TypeError, ValueError):
        absolute = relative = math.nan
    if not 0 <= absolute < math.inf or not 0 <= relative < math.inf:
        said = f"tolerance: must be a number, or (absolute, relative), not {tolerance!r}"
        raise ValueError(f"{said}; both are finite, and 0 or more")
    return absolute, relative


def difference(
    got: np.ndarray, expected: np.ndarray, dtype: str, tolerance: Tolerance
) -> str | None:
    """Describe where two arrays differ by more than `tolerance`; None if nowhere. An element is
    right if |got - expected| <= absolute + relative |expected|, or if both are the same infinity
    or NaN."""
    if got.shape != expected.shape:
        return f"has shape {got.shape}, and {expected.shape} is expected"
    own = TOLERANCES.get(dtype, 0.0)
    absolute, relative = both(tolerance) or (own, own)
    a, b = got.astype(np.float64), expected.astype(np.float64)
    if got.dtype.kind in "biu" and expected.dtype.kind in "biu" and not (absolute or relative):
        right = got == expected  # float64 does not hold all of int64
    else:
        right = np.isclose(a, b, relative, absolute, equal_nan=True)
    if right.all():
        return None
    wrong = np.flatnonzero(~right)
    place = ", ".join(str(int(i)) for i in np.unravel_index(wrong[0], got.shape or (1,)))
    with np.errstate(invalid="ignore"):
        error = np.abs(a - b)[~right]
    worst = max(error[np.isfinite(error)], default=math.nan)
    return (
        f"{wrong.size:,} of {got.size:,} elements are wrong, the first at [{place}]: "
        f"{got.flat[wrong[0]]}, expected {expected.flat[wrong[0]]}; the largest error is "
        f"{worst:.3g} (tolerance: {absolute:g} absolute, {relative:g} relative)"
    )


# ---- a launch ------------------------------------------------------------------------------------


class Launch:
    """A case with the arrays of a trial. TypeError and ValueError for arguments that cannot be
    sent.

    Attributes: message (the launch as it is sent; None among its arguments is the next array),
    arrays (by the number of the argument), nbytes (of all arrays), written (bytes of the Outs),
    given (an array is the same in each trial), right (the outputs that are expected, once they are
    known).
    """

    def __init__(self, case: Case, trial: int = 0) -> None:
        self.case = case
        self.arrays: dict[int, Array] = {}
        self.nbytes = self.written = 0
        self.given = False
        self.right: list[np.ndarray] = []
        arguments: list[Any] = []
        end = 0
        for number, value in enumerate(case.args):
            name, role = f"args[{number}]", "in"
            if isinstance(value, InOut):
                value, role = value.array, "inout"
            drawn = isinstance(value, Random)
            value = value.array(trial, number) if drawn else value
            if isinstance(value, Out):
                array = Array(name, "out", value.dtype, value.shape, None, end + GUARD)
                self.written += array.stop - array.start
            elif role == "inout" or isinstance(value, (np.ndarray, NDArray)):
                try:
                    array = Array(name, role, *host_array(value), end + GUARD)
                except TypeError as error:
                    raise TypeError(f"{name}: {error}") from None
                self.nbytes += array.elements.size
                self.given |= array.size > 0 and not drawn
            else:
                arguments.append(plain(name, value))
                continue
            self.arrays[number], end = array, array.end
            arguments.append(None)
        self.nbytes += self.written
        self.message: Message = {
            "grid": triple("grid", case.grid),
            "block": triple("block", case.block),
            "shared": whole("shared", case.shared, 0),
            "arguments": arguments,
            "arrays": [vars(array) for array in self.arrays.values()],
        }

    def bind(self, entry: Entry) -> None:
        """Name the arrays by the parameters of a kernel, which show those that it writes."""
        known = entry.signature.parameters
        for number, array in self.arrays.items():
            if number >= len(known):
                continue
            array.name = f"args[{number}] ({known[number]})"
            if array.role == "in" and known[number].kind != "unknown":
                array.role = "inout" if known[number].written else "const"

    def outputs(self) -> list[Array]:
        return [array for array in self.arrays.values() if array.is_returned]

    def read(self, answer: Message) -> tuple[np.ndarray, ...]:
        """Return the outputs that a process sent."""
        pairs = zip(self.outputs(), answer.get("outputs", ()))
        return tuple(readable(array.dtype, array.shape, block) for array, block in pairs)

    def expect(self, reference: Any, tolerance: Tolerance) -> None:
        """Take the right outputs, of a function of the arguments without Out, or themselves."""
        self.tolerance = tolerance
        if callable(reference):
            inputs = list(self.case.args)
            for number, array in self.arrays.items():
                if array.role != "out":
                    inputs[number] = readable(array.dtype, array.shape, array.elements)
            reference = reference(*[value for value in inputs if not isinstance(value, Out)])
        single = isinstance(reference, (np.ndarray, np.generic, NDArray))
        if not single and not isinstance(reference, Iterable):
            said = "reference: must give an array, or several, one for each output, not "
            raise TypeError(f"{said}{type(reference).__name__}")
        self.right = [np.asarray(one) for one in ([reference] if single else reference)]
        names = [array.name for array in self.outputs()]
        if len(self.right) != len(names):
            said = f"reference: gave {len(self.right)} outputs, and the kernel has {len(names)}: "
            raise ValueError(f"{said}{', '.join(names) or 'none'}")

    def wrong(self, outputs: Sequence[np.ndarray]) -> str:
        """Describe the first output that is not as expected; "" if there is none."""
        for array, got, right in zip(self.outputs(), outputs, self.right):
            said = difference(got, right, array.dtype, self.tolerance)
            if said is not None:
                return f"{array.name}: {said}"
        return ""


def plain(name: str, value: Any) -> Any:
    """Return an argument that is no array as it is sent."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"number": value.tobytes(), "dtype": value.dtype.name}
    if isinstance(value, (bytes, np.void)):
        return bytes(value)
    if isinstance(value, (bool, int, float)):
        return value
    raise TypeError(
        f"{name}: {type(value).__name__} is no argument of a kernel; pass an array, Out, "
        "InOut, Random, a number, or bytes for a struct"
    )
