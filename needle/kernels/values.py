"""Arguments of a kernel in a process of its own, their validation, and comparing results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.kernels.limits import Size

# The dtypes that arrays of a job may have. NumPy has no bfloat16: it comes as an NDArray on the
# host, or of ml_dtypes, lies as uint16, and is read as float32, which holds it exactly.
DTYPES = (
    "float32 bfloat16 float16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool "
    "complex64 complex128"
).split()
# Default tolerances, absolute and relative: those of KernelBench.
TOLERANCES = {
    "float16": 1e-2,
    "bfloat16": 1e-2,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float64": 1e-8,
    "complex128": 1e-8,
}
Tolerance = float | Sequence[float] | None


def whole(name: str, value: Any, least: int) -> int:
    """Check that an argument is a whole number of at least `least`. TypeError, ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name}: must be {least} or more, not {value}")
    return value.__index__()


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

    def __post_init__(self) -> None:
        if not isinstance(self.array, (np.ndarray, np.generic, NDArray, Random)):
            raise TypeError(
                f"InOut: takes an array or Random, not {type(self.array).__name__}; Out is "
                "returned by itself"
            )


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
        if not hasattr(self.seed, "__index__") or self.seed < 0:
            raise ValueError(f"Random: seed must be a whole number of 0 or more, not {self.seed!r}")
        if self.bounds is not None:
            (low, high), (least, most) = self.bounds, _range(self.dtype)
            if not least <= low < high <= most or high - low == np.inf:
                raise ValueError(
                    f"Random: low and high are {low} and {high}; {self.dtype} takes numbers from "
                    f"{least:g} to {most:g}, low below high"
                )

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of a uniform distribution; None: standard normal, or truth values."""
        if self.dtype.startswith(("int", "uint")):
            return self.low or 0, 100 if self.high is None else self.high
        if self.dtype == "bool" or self.low is None or self.high is None:
            return None
        return self.low, self.high

    def array(self, trial: int, place: int) -> np.ndarray | NDArray:
        random = np.random.default_rng([self.seed, trial, place])
        dtype = "float32" if self.dtype == "bfloat16" else self.dtype
        if dtype == "bool":
            return random.integers(0, 2, self.shape).astype(bool)
        if self.bounds is None:
            drawn = random.standard_normal(self.shape)
        elif np.dtype(dtype).kind in "iu":
            low, high = self.bounds
            return random.integers(int(low), int(high), self.shape, dtype)
        else:
            drawn = random.uniform(*self.bounds, self.shape)
        array = drawn.astype(dtype)
        return _C.array(array, "bfloat16", _C.cpu()) if self.dtype == "bfloat16" else array


@dataclass(frozen=True)
class Case:
    """A launch for `Pool.evaluate`: sizes as of CUDA, arguments as of `Pool.run`, and bytes of
    dynamic shared memory."""

    grid: Size
    block: Size
    args: Sequence[Any]
    shared: int = 0

    def drawn(self, trial: int) -> Case:
        """Replace each Random by its array of that trial."""

        def draw(place: int, value: Any) -> Any:
            if isinstance(value, Random):
                return value.array(trial, place)
            return InOut(draw(place, value.array)) if isinstance(value, InOut) else value

        return replace(self, args=[draw(place, value) for place, value in enumerate(self.args)])


def _shape(what: str, shape: Any, dtype: str) -> tuple[int, ...]:
    if dtype not in DTYPES:
        raise TypeError(f"{what}: dtype {dtype!r}; there are {', '.join(DTYPES)}")
    sizes = (shape,) if hasattr(shape, "__index__") else tuple(shape)
    if not all(hasattr(n, "__index__") and n >= 0 for n in sizes):
        raise ValueError(f"{what}: a shape is whole numbers of 0 or more, not {sizes}")
    return tuple(n.__index__() for n in sizes)


def _range(dtype: str) -> tuple[int | float, int | float]:
    """Return the least and the greatest finite number of a dtype; integers: one above it."""
    if dtype.startswith(("int", "uint")):
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max) + 1
    most = float(np.finfo("float32" if dtype == "bfloat16" else dtype).max)
    return -most, most


def host_array(value: Any) -> tuple[str, np.ndarray]:
    """Return (dtype, the elements in C order, bfloat16 as uint16) of an array. TypeError."""
    if isinstance(value, NDArray):
        if not value.device.is_host:
            raise TypeError(
                f"an array of {value.device}: a pool opens no GPU; pass array.to(needle.cpu())"
            )
        bits = value.compact().view("uint16") if value.dtype == "bfloat16" else value
        return value.dtype, bits.numpy()
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    name = array.dtype.name
    if name == "bfloat16":  # of ml_dtypes
        return name, array.view(np.uint16)
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
    """Return (absolute, relative) of a caller's tolerance. TypeError, ValueError."""
    if tolerance is None:
        return None
    pair = (tolerance, tolerance) if isinstance(tolerance, (int, float, np.number)) else tolerance
    said = f"tolerance: must be a number, or (absolute, relative), not {tolerance!r}"
    if isinstance(pair, str) or not isinstance(pair, (Sequence, np.ndarray)):
        raise TypeError(said)
    if not all(isinstance(number, (int, float, np.number)) for number in pair):
        raise TypeError(said)
    if len(pair) != 2 or not all(0 <= number < np.inf for number in pair):
        raise ValueError(f"{said}; both are finite, and 0 or more")
    return float(pair[0]), float(pair[1])


def difference(
    got: np.ndarray, expected: np.ndarray, dtype: str, tolerance: Tolerance
) -> str | None:
    """Describe where two arrays differ by more than `tolerance`; None if nowhere. An element is
    right if |got - expected| <= absolute + relative |expected|, or if both are the same infinity
    or NaN."""
    if got.shape != expected.shape:
        return f"has shape {got.shape}, and {expected.shape} is expected"
    if not got.size:
        return None
    own = TOLERANCES.get(dtype, 0.0)
    absolute, relative = both(tolerance) or (own, own)
    if got.dtype.kind in "biu" and expected.dtype.kind in "biu" and not (absolute or relative):
        right, error = got == expected, None
    else:
        wide = np.complex128 if "c" in got.dtype.kind + expected.dtype.kind else np.float64
        with np.errstate(invalid="ignore"):  # NaN of any kind
            a, b = got.astype(wide), expected.astype(wide)
            error = np.abs(a - b)
            near = (error <= absolute + relative * np.abs(b)) & np.isfinite(b)
            right = near | (a == b)
        right |= np.isnan(a) & np.isnan(b)
    if right.all():
        return None
    wrong = np.flatnonzero(~right)
    place = ", ".join(str(int(i)) for i in np.unravel_index(wrong[0], got.shape or (1,)))
    text = (
        f"{wrong.size:,} of {got.size:,} elements are wrong, the first at [{place}]: "
        f"{got.reshape(-1)[wrong[0]]}, expected {expected.reshape(-1)[wrong[0]]}"
    )
    if error is not None:
        worst = error.reshape(-1)[wrong]
        finite = worst[np.isfinite(worst)]
        if finite.size:
            text += f"; the largest error is {finite.max():.3g}"
    return f"{text} (tolerance: {absolute:g} absolute, {relative:g} relative)"
