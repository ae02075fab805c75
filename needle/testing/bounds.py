"""The error model: how far a result may lie from a float64 reference.

    error <= 2 |naive - exact| + ulp / 2 + 4 eps sqrt(K)

naive: the reference with every intermediate rounded to the dtype. exact: the reference in float64.
ulp: a unit in the last place of the result. 4 eps sqrt(K): the error of a float32 accumulator over
K terms. Ops of one formula are bounded element by element instead, in units in the last place of
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

EPS32 = 2.0**-24  # half a unit in the last place of 1.0
# Half a unit in the last place of 1.0, and the smallest normal number.
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
HALF_ULP |= {"e5m2": 2.0**-3, "e4m3": 2.0**-4}
TINY = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}
TINY |= {"e5m2": 2.0**-14, "e4m3": 2.0**-6}
EXPONENT64 = np.uint64(0x7FF << 52)  # the bits of a float64's exponent


def rounder(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Make a function that rounds float64 to the nearest value of `dtype`, ties to even; the result
    is float64. "float64" rounds nothing."""
    if dtype == "float64":
        return lambda a: np.asarray(a, np.float64)
    if dtype in ("float32", "float16"):
        return lambda a: np.asarray(a, np.float64).astype(dtype).astype(np.float64)

    def to_bfloat16(a):
        with np.errstate(all="ignore"):
            a = np.array(a, np.float32, order="C")
        nan, bits = np.isnan(a), a.reshape(-1).view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        bits &= 0xFFFF0000
        a[nan] = np.nan
        return a.astype(np.float64)

    return to_bfloat16


def half_ulp(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance of each number to its neighbour in `dtype`."""
    bits = np.asarray(np.maximum(np.abs(exact), TINY[dtype])).view(np.uint64)
    power = (bits & EXPONENT64).view(np.float64)  # without the mantissa: a power of two
    return HALF_ULP[dtype] * power


def assert_within(
    got: Any, exact: Any, naive: Any, dtype: str, terms: float = 1, what: str = ""
) -> None:
    """Raise AssertionError if `got` is beyond the bound in the maximum norm: `naive` is the result
    of the naive computation in `dtype`, `terms` the number of terms that an element sums. Infinite
    and NaN elements of `exact` must be equal."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    _same_shape(got, exact, what)
    naive = np.asarray(naive, np.float64)
    finite = np.isfinite(exact)
    with np.errstate(invalid="ignore"):
        off = np.abs(naive - exact).max(where=finite, initial=0.0)
    largest = np.abs(exact).max(where=finite, initial=0.0)
    bound = half_ulp(exact, dtype) + 2 * off + 4 * EPS32 * np.sqrt(max(terms, 1)) * largest
    _refuse_beyond(bound, got, exact, what)


def assert_near(got: Any, exact: Any, unit: Any, ulps: float, dtype: str, what: str = "") -> None:
    """Raise AssertionError if an element of `got` is more than `ulps` float32 units in the last
    place of `unit` from `exact` before one rounding to `dtype`, which may make it infinite."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    _same_shape(got, exact, what)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite and NaN elements must be equal
        rounded = rounder(dtype)(exact)
        exact = np.where(np.isinf(rounded), rounded, exact)
        bound = ulps * 2 * EPS32 * np.abs(unit) + half_ulp(exact, dtype) * 1.001
        bound = bound + TINY[dtype] * 2.0**-9
    _refuse_beyond(bound, got, exact, what)


def _same_shape(got: np.ndarray, exact: np.ndarray, what: str) -> None:
    if got.shape != exact.shape:
        raise AssertionError(f"{what}: shape {got.shape}, expected {exact.shape}")


def assert_equal(got: Any, exact: Any, what: str = "") -> None:
    """Raise AssertionError if an element differs."""
    got, exact = np.asarray(got), np.asarray(exact)
    _same_shape(got, exact, what)
    _refuse(got != exact, got, exact, what)


def _refuse_beyond(bound: np.ndarray, got: np.ndarray, exact: np.ndarray, what: str) -> None:
    with np.errstate(invalid="ignore"):
        near = np.isfinite(exact) & (np.abs(got - exact) <= bound)
    if not near.all():
        near |= (got == exact) | (np.isnan(got) & np.isnan(exact))
        _refuse(~near, got, exact, what)


def _refuse(wrong: np.ndarray, got: np.ndarray, exact: np.ndarray, what: str) -> None:
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} elements are off, the first at {at}: got "
            f"{float(got[at]):.7g}, expected {float(exact[at]):.7g}"
        )
