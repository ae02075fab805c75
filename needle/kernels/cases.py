"""Launches for a process of the pool: their arguments, the memory of their arrays, and the
comparison of what they wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.kernels.limits import Entry, Size, triple, whole
from needle.kernels.process import Message

# The dtypes that arrays of a job may have, and that of the array that a kernel gets, since needle
# has fewer. NumPy has no bfloat16: it comes as an NDArray on the host, lies as uint16, and is read
# as float32, which holds it exactly.
SAME = "float32", "bfloat16", "float16", "int32", "int64", "uint8", "uint16", "bool"
OTHERS = {"int8": "uint8", "int16": "uint16", "uint32": "int32", "uint64": "int64"}
DTYPES = dict(zip(SAME, SAME)) | OTHERS | {"float64": "uint8"}
# Default tolerances, absolute and relative: those of KernelBench.
TOLERANCES = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-4, "float64": 1e-8}
Tolerance = float | Sequence[float] | None

ALIGN = 256  # as cudaMalloc aligns
GUARD = 64 << 10  # bytes of a band, at least, on each side of an array
TILE = 131_071  # 16-bit units of the pattern: a prime, so that no stride meets its period
CANONICAL = 0xFFC0  # the negative NaN of bfloat16 that a calculation may give


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


# ---- guarded memory ------------------------------------------------------------------------------


@dataclass
class Array:
    """An array of a launch. All lie in one buffer, each between two guard bands. role: "in" (may
    change), "const" (must not change), "inout" (is returned), "out" (filled with the pattern, is
    returned). elements: their bytes, None of an "out". start: in bytes."""

    name: str
    role: str
    dtype: str
    shape: Sequence[int]
    elements: Any
    start: int

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size * self.itemsize

    @property
    def end(self) -> int:
        """Return where the band behind it ends."""
        return -(-(self.stop + GUARD) // ALIGN) * ALIGN

    @property
    def is_returned(self) -> bool:
        return self.role in ("out", "inout")

    def bytes_of(self, memory: np.ndarray) -> np.ndarray:
        """Return a view of its bytes."""
        return memory[self.start : self.stop]

    def count(self, chosen: np.ndarray) -> str:
        """Return "2 of 6 elements" for (elements,) bool, and where the first of them is."""
        flat = np.flatnonzero(chosen)
        first = place(int(flat[0]), self.shape)
        return f"{flat.size:,} of {self.size:,} elements (the first at {first})"


def place(number: int, shape: Sequence[int]) -> str:
    """Return "[0, 2]" for the element of this number in the order of C."""
    return str([int(i) for i in np.unravel_index(number, tuple(shape) or (1,))])


def fill(memory: np.ndarray) -> None:
    """Fill a buffer ((bytes,) uint8) with a new pattern of 16-bit units from 0xFF81 to 0xFFFE: NaN
    to floats of up to 32 bits, such as no calculation gives, and negative integers. It continues
    from band to band, so that copying one band to another changes it."""
    units = np.random.default_rng().integers(0xFF81, 0xFFFF, TILE, dtype=np.uint16)
    units[units == CANONICAL] += 1
    tile = units.view(np.uint8)
    for at in range(0, memory.size, tile.size):
        part = memory[at : at + tile.size]
        part[:] = tile[: part.size]


def compare(before: np.ndarray, after: np.ndarray, arrays: Sequence[Array]) -> tuple[str, str]:
    """Describe writes beyond an array, which change a band, or into a const one, and the elements
    of outputs that a kernel left out, which still have the pattern; "" if there are none. Small
    integers may equal the pattern by chance: only a comparison finds those."""
    outside, missing = [], []
    for array in arrays:
        item = array.itemsize
        for side, start, stop, nearest in (
            ("before its start", array.start - GUARD, array.start, -1),
            ("after its end", array.stop, array.end, 0),
        ):
            changed = np.flatnonzero(before[start:stop] != after[start:stop])
            if changed.size:
                at = start + int(changed[nearest]) - array.start
                outside.append(
                    f"{array.name}: {changed.size:,} bytes were written {side}, the nearest at "
                    f"byte {at:,} of it (element {at // item:,} of {array.size:,})"
                )
        if array.role not in ("const", "out"):
            continue
        ours, theirs = (array.bytes_of(memory).view(f"u{item}") for memory in (before, after))
        same = ours == theirs
        if array.role == "const" and not same.all():
            outside.append(f"{array.name}: it is const, and {array.count(~same)} were changed")
        if array.role == "out" and (item == 8 or "float" in array.dtype) and same.any():
            missing.append(f"{array.name}: {array.count(same)} were not written")
    return "; ".join(outside), "; ".join(missing)


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
    with np.errstate(invalid="ignore"):
        error = np.abs(a - b)[~right]
    worst, first = max(error[np.isfinite(error)], default=math.nan), place(wrong[0], got.shape)
    return (
        f"{wrong.size:,} of {got.size:,} elements are wrong, the first at {first}: "
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
