"""Elementwise functions by NumPy's and PyTorch's names, made of the rows of elementwise.py:
rounding, limits, closeness, bits and truth values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd.tensor import FLOATS, Tensor
from needle.backend_ndarray import full
from needle.ops.broadcast import as_floats, astype, differentiable
from needle.ops.common import LARGEST, const
from needle.ops.elementwise import (
    NUMBER,
    _round,
    absolute,
    beside,
    ceil,
    cos,
    expm1,
    floor,
    keep,
    log,
    maximum,
    minimum,
    sin,
    where,
)


def round(a: Tensor, decimals: int = 0) -> Tensor:
    """The nearest whole number, or that of so many decimals, halves to even. The gradient is 0."""
    if decimals == 0 or decimals > 0 and a.dtype not in FLOATS:
        return _round(a)
    if decimals > 0:
        return _round(a * 10.0**decimals) / 10.0**decimals
    unit = 10**-decimals
    if a.dtype in FLOATS:
        return _round(a / unit) * unit
    wide = astype(a, "int64")
    count, rest = wide // unit, wide % unit
    up = (rest * 2 > unit) | ((rest * 2 == unit) & (count % 2 != 0))
    return astype((count + up) * unit, a.dtype)


def trunc(a: Tensor) -> Tensor:
    """The nearest whole number towards 0. The gradient is 0."""
    return where(a < 0, ceil(a), floor(a))


def tan(a: Tensor) -> Tensor:
    """The tangent of radians."""
    return sin(a) / cos(a)


def nan_to_num(
    a: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """`a` with other numbers for NaN, inf and -inf, by default 0 and the largest of the dtype; the
    gradient there is 0.

    >>> print(ndl.nan_to_num(ndl.Tensor([np.nan, 1, -np.inf]), neginf=-9))
    [ 0.  1. -9.]
    """
    if a.dtype not in FLOATS:
        return a.clone()
    most = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}.get(a.dtype, LARGEST)
    for found, number, default in (
        (isnan(a), nan, 0.0),
        (a == math.inf, posinf, most),
        (a == -math.inf, neginf, -most),
    ):
        a = where(found, default if number is None else number, a)
    return a


def leaky_relu(a: Tensor, negative_slope: float = 0.01) -> Tensor:
    """a above 0, negative_slope a elsewhere (Maas et al. 2013).

    >>> print(ndl.ops.leaky_relu(ndl.Tensor([-2, 3]), 0.5))
    [-1.  3.]
    """
    return where(a > 0, a, a * negative_slope)


def elu(a: Tensor, alpha: float = 1.0) -> Tensor:
    """a above 0, alpha (e^a - 1) elsewhere (Clevert et al. 2016)."""
    return where(a > 0, a, expm1(clip(a, max=0)) * alpha)


def reciprocal(a: Tensor) -> Tensor:
    """1 / a."""
    return 1.0 / a


def log2(a: Tensor) -> Tensor:
    """The logarithm to base 2."""
    return log(a) * (1 / math.log(2))


def log10(a: Tensor) -> Tensor:
    """The logarithm to base 10."""
    return log(a) * (1 / math.log(10))


def square(a: Tensor) -> Tensor:
    """a * a, in the dtype of a."""
    return a * a


def _inside(x: Tensor, low: float, high: float) -> NDArray:
    """Where x is within both limits, as bool."""
    a = x.cached_data
    return _C.not_equal(_C.multiply(_C.greater_equal(a, low), _C.less_equal(a, high)), 0)


@differentiable("Clip", lambda g, x, low, high: keep(g, _inside(x, low, high)))
def _clip(a: NDArray, low: float, high: float) -> NDArray:
    return _C.minimum(_C.maximum(a, low), high)


def clip(a: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """a limited to [min, max], numbers or Tensors, None for no limit. The gradient is 0 outside and
    1 at a limit that is a number; one that is a Tensor takes half of it there.

    >>> print(ndl.clip(ndl.Tensor([-2, 0.5, 3]), 0, 1))
    [0.  0.5 1. ]
    """
    numbers = all(x is None or isinstance(x, Number) for x in (min, max))
    if numbers and a.dtype in FLOATS:
        return _clip(a, -math.inf if min is None else min, math.inf if max is None else max)
    if min is None and max is None:
        return a.clone()
    a = a if min is None else maximum(a, min)
    return a if max is None else minimum(a, max)


def lerp(a: Tensor, b: Tensor, weight: Tensor | float) -> Tensor:
    """a + weight (b - a), of integers in float32.

    >>> print(ndl.lerp(ndl.Tensor([0, 2]), ndl.Tensor([4, 2]), 0.25))
    [1. 2.]
    """
    a = as_floats(a)
    return a + (b - a) * weight


# ---- truth values and bits, outside of the graph -------------------------------------------------


def isnan(a: Tensor) -> Tensor:
    """True where a is NaN."""
    return const(_C.not_equal(a.cached_data, a.cached_data))


def isfinite(a: Tensor) -> Tensor:
    """True where a is neither infinite nor NaN."""
    if a.dtype not in FLOATS:
        return const(full(a.shape, True, "bool", a.device))
    return const(_C.less(_C.absolute(a.cached_data), math.inf))


def isinf(a: Tensor) -> Tensor:
    """Where a is inf or -inf, as bool."""
    return logical_not(bitwise_or(isfinite(a), isnan(a)))


def isclose(a: Tensor, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> Tensor:
    """Where |a - b| <= atol + rtol |b|, or a and b are equal, as bool."""
    b = beside(b, a) if isinstance(b, NUMBER) else a._operand(b)
    off = maximum(a, b) - minimum(a, b)  # also of unsigned integers
    return (a == b) | ((off <= absolute(b * rtol) + atol) & isfinite(b))


def allclose(a: Tensor, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """True where isclose is for each element; waits for the device."""
    return bool(isclose(a, b, rtol, atol).all())


def equal(a: Tensor, b: Any) -> bool:
    """True if a and b have one shape and the same elements: PyTorch's equal, NumPy's array_equal;
    waits for the device."""
    return a.shape == np.shape(b) and bool((a == b).all())


def _comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: compare(a, b)


eq, ne, lt, le, gt, ge = map(
    _comparison, (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
)


def logical_and(a: Tensor, b: Any) -> Tensor:
    """Where neither a nor b is 0, as bool."""
    return (a != 0) & (b != 0)


def logical_or(a: Tensor, b: Any) -> Tensor:
    """Where a or b is not 0, as bool."""
    return (a != 0) | (b != 0)


def logical_not(a: Tensor) -> Tensor:
    """Where a is 0, as bool."""
    return a == 0


def bitwise_and(a: Tensor, b: Any) -> Tensor:
    """a & b of integers or bool; of two bool a bool. TypeError for floats."""
    return a & b


def bitwise_or(a: Tensor, b: Any) -> Tensor:
    """a | b of integers or bool; of two bool a bool. TypeError for floats."""
    return a | b


def bitwise_xor(a: Tensor, b: Any) -> Tensor:
    """a ^ b of integers or bool; of two bool a bool. TypeError for floats."""
    return a ^ b


def bitwise_not(a: Tensor) -> Tensor:
    """~a of integers, or not a of bool. TypeError for floats."""
    return const(~a.cached_data)
