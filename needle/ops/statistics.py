"""Reductions composed of ops: any, all, min, median, prod, var, std, norm, argmin."""

from __future__ import annotations

import math
from numbers import Number
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd.tensor import FLOATS, Tensor
from needle.backend_ndarray import Axes, ones
from needle.ops.broadcast import astype, reshape, summation
from needle.ops.common import axes_or_dim, const, kept_shape, normal_axes, normal_axis
from needle.ops.elementwise import add, divide, multiply, sqrt, subtract, where
from needle.ops.indexing import get_item, index_select
from needle.ops.order import TopK, sort, topk
from needle.ops.pointwise import isnan
from needle.ops.reduce import amax, amin, extremum, mean
from needle.ops.shape import concatenate, permute


def _count(a: Tensor, compare: object, axes: Axes, keepdims: bool) -> NDArray:
    found = compare(a.cached_data, 0)  # type: ignore[operator]
    return found.sum(axis=normal_axes("any", axes, a.ndim), keepdims=keepdims)


def any(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """True if an element over `axes` is not 0; False over no element."""
    return const(_C.not_equal(_count(a, _C.not_equal, axes, keepdims), 0))


def all(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """True if no element over `axes` is 0; True over no element."""
    return const(_C.equal(_count(a, _C.equal, axes, keepdims), 0))


def median(
    a: Tensor, axes: int | None = None, keepdims: bool = False, dim: int | None = None
) -> Any:
    """The middle along `axes` (None: of all elements), of an even number the mean of the two, NaN
    where there is one; along `dim`, as PyTorch has it, (values, indices), of two the lower, of
    NaN the first. ValueError where there are no elements.

    >>> print(ndl.median(ndl.Tensor([4, 1, 2, 3])), *ndl.median(ndl.Tensor([4, 1, 2, 3]), dim=0))
    2.5 2.0 2
    """
    given = axes_or_dim("median", axes, dim)
    axis = 0 if given is None else normal_axis("median", given, a.ndim)
    n = a.size if given is None else a.shape[axis]
    if n == 0:
        raise ValueError(f"median: a, of shape {a.shape}, has no elements to choose from")
    if dim is not None:
        return _lower_median(a, axis, keepdims)
    ordered = sort(a, axes)
    out = mean(index_select(ordered, axis, [(n - 1) // 2, n // 2]), axis)
    if a.dtype in FLOATS:
        last = amax(index_select(ordered, axis, [-1]), axis)
        out = where(isnan(last), last, out)
    gone = normal_axes("median", axes, a.ndim)
    return reshape(out, kept_shape(a.shape, gone)) if keepdims else out


def _lower_median(a: Tensor, axis: int, keepdims: bool) -> TopK:
    lower = topk(a, (a.shape[axis] + 1) // 2, axis, largest=False)
    last = (*[slice(None)] * axis, slice(-1, None) if keepdims else -1)
    values, indices = (x[last] for x in lower)
    if a.dtype in FLOATS:
        top = extremum("max", a, None, keepdims, axis)
        values, indices = (
            where(isnan(top.values), of_nan, x) for of_nan, x in zip(top, (values, indices))
        )
    return TopK(values, indices)


def argmax(a: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Index of the first largest element along `axis` (None: of the flat elements), as int64."""
    return const(a.cached_data.argmax(axis=axis, keepdims=keepdims))


def argmin(a: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Index of the first smallest element along `axis` (None: of the flat elements), as int64."""
    return const(a.cached_data.argmin(axis=axis, keepdims=keepdims))


def prod(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The product over `axes`, of nothing 1; of integers in int64. Factors are multiplied in pairs,
    then the products in pairs, and so on.

    >>> print(ndl.prod(ndl.Tensor([[1, 2], [3, 4]]), 1))
    [ 2. 12.]
    """
    if a.dtype not in FLOATS:
        a = astype(a, "int64")
    gone = normal_axes("prod", axes, a.ndim)
    kept = [i for i in range(a.ndim) if i not in gone]
    shape = kept_shape(a.shape, gone) if keepdims else tuple(a.shape[i] for i in kept)
    sizes = [a.shape[i] for i in kept]
    n = math.prod(a.shape[i] for i in gone)
    out = reshape(permute(a, (*kept, *gone)), (*sizes, n))
    if n == 0:
        return const(ones(shape, a.dtype, a.device))
    if n == 1:
        return reshape(a, shape).clone()
    while n > 1:
        half = n // 2
        pair = [get_item(out, (..., slice(i * half, (i + 1) * half))) for i in (0, 1)]
        pairs = multiply(*pair)
        if n % 2:
            pairs = concatenate([pairs, get_item(out, (..., slice(n - 1, n)))], -1)
        out, n = pairs, half + n % 2
    return reshape(out, shape)


def var(
    a: Tensor,
    axes: Axes = None,
    keepdims: bool = False,
    correction: float | None = None,
    dim: Axes = None,
) -> Tensor:
    """The variance over `axes`, or over `dim`: squared distances from the mean, summed and divided
    by their number less `correction`; by default 0 as in NumPy, with `dim` 1 as in PyTorch.
    Computed in float32.

    >>> print(ndl.var(ndl.Tensor([1, 3])), ndl.var(ndl.Tensor([1, 3]), dim=0))
    1.0 2.0
    """
    correction = _correction(correction, dim)
    axes = axes_or_dim("var", axes, dim)
    count = math.prod(a.shape[i] for i in normal_axes("var", axes, a.ndim))
    wide = astype(a, "float32")
    off = subtract(wide, mean(wide, axes, True))
    total = summation(multiply(off, off), axes, keepdims)
    out = total / float(count - correction if count > correction else 0)
    return astype(out, a.dtype) if a.dtype in FLOATS else out


def _correction(given: float | None, dim: Axes) -> float:
    return (0 if dim is None else 1) if given is None else given


def std(
    a: Tensor,
    axes: Axes = None,
    keepdims: bool = False,
    correction: float | None = None,
    dim: Axes = None,
) -> Tensor:
    """The standard deviation, the root of `var`, which has the arguments; its gradient at 0 is
    0."""
    axes, correction = axes_or_dim("std", axes, dim), _correction(correction, dim)
    wide, scale = _scaled(astype(a, "float32"), axes, "max")
    out = _root(var(wide, axes, keepdims, correction))
    out = multiply(out, reshape(scale, out.shape))
    return astype(out, a.dtype) if a.dtype in FLOATS else out


def _root(a: Tensor) -> Tensor:
    """The square root, whose gradient at 0 is 0."""
    zero = _C.equal(a.cached_data, 0)
    return where(zero, 0.0, sqrt(add(a, const(zero))))


def _scaled(a: Tensor, axes: Axes, by: str) -> tuple[Tensor, Tensor]:
    """(a / s, s), s the power of two below the "max" or "min" of |a| over `axes`: sums of powers of
    a / s neither overflow nor vanish, and the division rounds nothing."""
    axes = normal_axes("norm", axes, a.ndim)
    if a.size == 0:
        return a, const(ones(kept_shape(a.shape, axes), "float32", a.device))
    size = getattr(_C.absolute(a.cached_data), by)(axis=axes, keepdims=True)
    exponent = _C.bitwise_and(size.view("int32"), 0x7F800000).view("float32")
    scale = const(_C.minimum(_C.maximum(exponent, 2.0**-126), 2.0**127))
    return divide(a, scale), scale


def var_mean(
    a: Tensor, axes: Axes = None, keepdims: bool = False, correction: float = 1
) -> tuple[Tensor, Tensor]:
    """(var, mean) over `axes`, as PyTorch has them: var with `correction` 1."""
    return var(a, axes, keepdims, correction), mean(a, axes, keepdims)


def std_mean(
    a: Tensor, axes: Axes = None, keepdims: bool = False, correction: float = 1
) -> tuple[Tensor, Tensor]:
    """(std, mean) over `axes`, as PyTorch has them: std with `correction` 1."""
    return std(a, axes, keepdims, correction), mean(a, axes, keepdims)


def norm(a: Tensor, ord: Any = 2, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The vector norm over `axes`: sum(|a|^ord)^(1 / ord); the largest |a| for inf, the smallest
    for -inf, the number of elements that are not 0 for 0; "fro" is 2. Computed in float32, without
    overflow of powers. The gradient of elements that are 0 is 0. TypeError for another ord.

    >>> print(ndl.norm(ndl.Tensor([3, 4])), ndl.norm(ndl.Tensor([3, -4]), 1))
    5.0 7.0
    """
    wide = astype(a, "float32")
    if ord != "fro" and not isinstance(ord, Number):
        raise TypeError(f"norm: ord must be a number or 'fro', not {ord!r}")
    if ord in (math.inf, -math.inf):
        out = (amax if ord > 0 else amin)(abs(wide), axes, keepdims)
    elif ord == 0:
        out = summation(astype(wide != 0, "float32"), axes, keepdims)
    elif ord == 1:
        out = summation(abs(wide), axes, keepdims)
    else:
        wide, scale = _scaled(wide, axes, "max" if ord == "fro" or ord > 0 else "min")
        if ord in (2, "fro"):
            out = _root(summation(multiply(wide, wide), axes, keepdims))
        else:
            zero = _C.equal(wide.cached_data, 0)
            powers = add(abs(wide), const(zero)) ** ord
            powers = where(zero, 0.0 if ord > 0 else math.inf, powers)
            out = summation(powers, axes, keepdims) ** (1 / ord)
        out = multiply(out, reshape(scale, out.shape))
    return astype(out, a.dtype) if a.dtype in FLOATS else out
