"""Launches for a process of the pool: their arguments, and the comparison of their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.kernels.guard import itemsize
from needle.kernels.limits import Entry, Size, triple, whole
from needle.kernels.process import Message

# The dtypes that arrays of a job may have. NumPy has no bfloat16: it comes as an NDArray on the
# host, lies as uint16, and is read as float32, which holds it exactly.
DTYPES = (
    "float32 bfloat16 float16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool "
    "complex64 complex128"
).split()
# Default tolerances, absolute and relative: those of KernelBench.
TOLERANCES = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-4, "complex64": 1e-4}
TOLERANCES |= {"float64": 1e-8, "complex128": 1e-8}
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


def host_array(value: Any) -> tuple[str, np.ndarray]:
    """Return (dtype, the elements in C order, bfloat16 as uint16) of an array. TypeError."""
    if isinstance(value, NDArray):
        if not value.device.is_host:
            raise TypeError(f"an array of {value.device}: pass array.to(needle.cpu())")
        bits = value.compact().view("uint16") if value.dtype == "bfloat16" else value
        return value.dtype, bits.numpy()
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    name = array.dtype.name
    if name not in DTYPES or not array.dtype.isnative:
        raise TypeError(f"an array of dtype {array.dtype}; there are {', '.join(DTYPES)}")
    return name, array


def readable(dtype: str, array: np.ndarray) -> np.ndarray:
    """Return a copy; bfloat16, which lies as uint16, as float32."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.copy()


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
    wide = np.complex128 if "c" in got.dtype.kind + expected.dtype.kind else np.float64
    if got.dtype.kind in "biu" and expected.dtype.kind in "biu" and not (absolute or relative):
        right = got == expected  # float64 does not hold all of int64
    else:
        a, b = got.astype(wide), expected.astype(wide)
        right = np.isclose(a, b, relative, absolute, equal_nan=True)
    if right.all():
        return None
    wrong = np.flatnonzero(~right)
    place = ", ".join(str(int(i)) for i in np.unravel_index(wrong[0], got.shape or (1,)))
    a, b = (array.reshape(-1)[wrong] for array in (got, expected))
    with np.errstate(invalid="ignore"):
        error = np.abs(a.astype(wide) - b.astype(wide))
    worst = max(error[np.isfinite(error)], default=math.nan)
    return (
        f"{wrong.size:,} of {got.size:,} elements are wrong, the first at [{place}]: {a[0]}, "
        f"expected {b[0]}; the largest error is {worst:.3g} (tolerance: {absolute:g} absolute, "
        f"{relative:g} relative)"
    )


# ---- a launch ------------------------------------------------------------------------------------


class Launch:
    """A case with the arrays of a trial. TypeError and ValueError for arguments that cannot be
    sent.

    Attributes: arguments (as they are sent: numbers, NumPy's as arrays without axes, bytes, or of
    an array its role, dtype, shape and elements), arrays (of those), nbytes (of all), written
    (bytes of the Outs), outputs (name, dtype, shape of each array that comes back, once there was a
    `message`).
    """

    def __init__(self, case: Case, trial: int = 0) -> None:
        self.case = case
        self.arguments: list[Any] = []
        self.arrays: list[np.ndarray] = []
        self.written = 0
        for number, value in enumerate(case.args):
            role = "inout" if isinstance(value, InOut) else "in"
            value = value.array if isinstance(value, InOut) else value
            value = value.array(trial, number) if isinstance(value, Random) else value
            if isinstance(value, Out):
                given: Any = {"role": "out", "dtype": value.dtype, "shape": value.shape}
                self.written += math.prod(value.shape) * itemsize(value.dtype)
            elif role == "inout" or isinstance(value, (np.ndarray, NDArray)):
                try:
                    dtype, array = host_array(value)
                except TypeError as error:
                    raise TypeError(f"args[{number}]: {error}") from None
                given = {"role": role, "dtype": dtype, "shape": array.shape, "array": array}
                self.arrays.append(array)
            else:
                given = plain(number, value)
            self.arguments.append(given)
        self.nbytes = self.written + sum(array.nbytes for array in self.arrays)
        self.way: Message = {
            "grid": triple("grid", case.grid),
            "block": triple("block", case.block),
            "shared": whole("shared", case.shared, 0),
            "arguments": self.arguments,
        }

    def message(self, entry: Entry) -> Message:
        """Return the launch of a kernel, whose signature shows which arrays it writes."""
        places, known = [], entry.signature.parameters
        for number, given in enumerate(self.arguments):
            if not isinstance(given, dict):
                continue
            role, parameter = given["role"], known[number] if number < len(known) else None
            name = f"args[{number}]" + (f" ({parameter})" if parameter else "")
            if role == "in" and parameter is not None and parameter.kind != "unknown":
                role = "inout" if parameter.written else "const"
            places.append((name, given["dtype"], given["shape"], role))
        self.outputs = [place[:3] for place in places if place[3] in ("out", "inout")]
        return {**self.way, "places": places}

    def read(self, answer: Message) -> tuple[np.ndarray, ...]:
        """Return the outputs that a process sent; bfloat16 as float32."""
        found = []
        for block, (_, dtype, shape) in zip(answer.get("outputs", ()), self.outputs):
            flat = np.frombuffer(block, "uint16" if dtype == "bfloat16" else dtype)
            found.append(readable(dtype, flat).reshape(shape))
        return tuple(found)

    def inputs(self) -> list[Any]:
        """Return copies of the arguments without Out, as a reference takes them."""
        return [
            readable(given["dtype"], given["array"]) if isinstance(given, dict) else value
            for given, value in zip(self.arguments, self.case.args)
            if not isinstance(value, Out)
        ]

    def right(self, reference: Any) -> list[np.ndarray]:
        """Return the outputs that a reference gives, a function or the outputs themselves."""
        if callable(reference):
            reference = reference(*self.inputs())
        single = isinstance(reference, (np.ndarray, np.generic, NDArray))
        if not single and not isinstance(reference, Iterable):
            said = "reference: must give an array, or several, one for each output, not "
            raise TypeError(f"{said}{type(reference).__name__}")
        found = [reference] if single else list(reference)
        names = [name for name, _, _ in self.outputs]
        if len(found) != len(names):
            said = f"reference: gave {len(found)} outputs, and the kernel has {len(names)}: "
            raise ValueError(f"{said}{', '.join(names) or 'none'}")
        return [np.asarray(array) for array in found]

    def compared(
        self, outputs: Sequence[np.ndarray], right: Sequence[np.ndarray], tolerance: Tolerance
    ) -> str | None:
        """Describe the first output that differs."""
        for (name, dtype, _), got, expected in zip(self.outputs, outputs, right):
            wrong = difference(got, expected, dtype, tolerance)
            if wrong is not None:
                return f"{name}: {wrong}"
        return None

    def shares_with(self, other: Launch) -> bool:
        """True if an input array is the same in both."""
        pairs = zip(self.arrays, other.arrays)
        return any(
            a.size and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc") for a, b in pairs
        )


def plain(number: int, value: Any) -> Any:
    """Return an argument that is no array as it is sent."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return np.asarray(value)  # JSON has no float64 apart from Python's
    if isinstance(value, (bytes, np.void)):
        return bytes(value)
    if isinstance(value, (bool, int, float)):
        return value
    raise TypeError(
        f"args[{number}]: {type(value).__name__} is no argument of a kernel; pass an array, Out, "
        "InOut, Random, a number, or bytes for a struct"
    )
