"""Reductions: sums and means, extremes, log-sum-exp and softmax, and those composed of ops: median,
prod, var, std, norm. Statistics are computed in float32 and rounded once to the operand's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Number
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd.tensor import FLOATS, Tensor
from needle.backend_ndarray import Axes, ones, zeros
from needle.ops.broadcast import (
    astype,
    differentiable,
    of_products,
    reshape,
    rounded,
    spread,
    summation,
)
from needle.ops.common import (
    LARGEST,
    axes_of,
    axes_or_dim,
    const,
    kept_shape,
    normal_axes,
    normal_axis,
)
from needle.ops.elementwise import isnan, maximum, minimum, sqrt, where
from needle.ops.indexing import index_select, select_places
from needle.ops.order import TopK, sort, topk
from needle.ops.shape import concatenate, permute


def _mean_slope(g: Tensor, like: Tensor, axes: tuple[int, ...]) -> Tensor:
    count = math.prod(like.shape[axis] for axis in axes)
    return spread(g / count if count else g, like.shape, axes)


@differentiable("Mean", _mean_slope, reduces=True)
def mean(a: NDArray, axes: Axes = None, keepdims: bool = False) -> NDArray:
    """The mean over `axes` (None: all axes), which disappear, or with keepdims stay with size 1; of
    nothing NaN.

    >>> print(ndl.ops.mean(ndl.Tensor([[1, 2], [3, 4]]), 0))
    [2. 3.]
    """
    return rounded(a.mean(axes, keepdims), a)


def _shared_by(extreme: Callable[..., NDArray]) -> Callable[..., Tensor]:
    """Make the rule by which the elements that are the extreme share its gradient."""

    def slope(g: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        a = x.cached_data
        hit = _C.equal(a, extreme(a, axes, True)).astype("float32")
        share = _C.divide(hit, hit.sum(axes, True))
        return spread(g, a.shape, axes) * const(share.astype(a.dtype))

    return slope


@differentiable("Max", _shared_by(NDArray.max), reduces="max")
def amax(a: NDArray, axes: Axes = None, keepdims: bool = False) -> NDArray:
    """The largest element over `axes` (None: all), which disappear, or with keepdims stay with size
    1; equal ones share the gradient equally."""
    return a.max(axes, keepdims)


@differentiable("Min", _shared_by(NDArray.min), reduces="min")
def amin(a: NDArray, axes: Axes = None, keepdims: bool = False) -> NDArray:
    """The smallest element over `axes`; equal ones share the gradient equally."""
    return a.min(axes, keepdims)


def max(a: Tensor, axes: Any = None, keepdims: bool = False, dim: int | None = None) -> Any:
    """`amax`; along `dim`, as PyTorch has it, (values, indices), of equal ones the first; with a
    Tensor for `axes` `maximum`.

    >>> x = ndl.Tensor([1, 5, 5])
    >>> ndl.ops.max(x).backward()
    >>> print(x.grad, *x.max(dim=0))
    [0.  0.5 0.5] 5.0 1
    """
    return extremum("max", a, axes, keepdims, dim)


def min(a: Tensor, axes: Any = None, keepdims: bool = False, dim: int | None = None) -> Any:
    """`amin`, and with `dim` or a Tensor as `max` has it."""
    return extremum("min", a, axes, keepdims, dim)


def extremum(op: str, a: Tensor, axes: Any, keepdims: bool, dim: int | None) -> Any:
    """Compute "max" or "min"."""
    if isinstance(axes, Tensor):
        return {"max": maximum, "min": minimum}[op](a, axes)
    if dim is None:
        return {"max": amax, "min": amin}[op](a, axes, keepdims)
    axis = normal_axis(op, axes_or_dim(op, axes, dim), a.ndim)
    places = getattr(a.cached_data, f"arg{op}")(axis=axis, keepdims=True)
    values = select_places(a, axis, places)
    shape = kept_shape(values.shape, (axis,), keepdims)
    return TopK(reshape(values, shape), const(places.reshape(shape)))


def _shifted(a: NDArray, axes: Any, most: float = math.inf) -> tuple[NDArray, NDArray, NDArray]:
    """(m, e, s): m the maximum over `axes`, kept, finite for -inf and up to `most`, e = exp(a - m),
    s = sum e, all in float32. A slice of only -inf has e = 0 and s = 0, one with inf NaN."""
    a = a.astype("float32")
    m = a.max(axes, True) if a.size else zeros(kept_shape(a.shape, axes), "float32", a.device)
    m = _C.minimum(_C.maximum(m, -LARGEST), most)
    e = _C.exp(_C.subtract(a, m))
    return m, e, e.sum(axes, True)


@differentiable(
    "LogSumExp", lambda g, x, axes: spread(g, x.shape, axes) * softmax(x, axes), reduces=True
)
def logsumexp(a: NDArray, axes: Axes = None, keepdims: bool = False) -> NDArray:
    """log(sum(exp(a))) over `axes` (None: all), which disappear, or with keepdims stay with size 1;
    the maximum is taken out first, so that no value overflows. A slice of only -inf gives -inf, and
    no gradient.

    >>> print(ndl.logsumexp(ndl.Tensor([1e3, 1e3])))
    1000.6932
    """
    m, _, s = _shifted(a, axes, LARGEST)  # inf, where the others are NaN
    return rounded(_C.add(m, _C.log(s)), a).reshape(kept_shape(a.shape, axes, keepdims))


def _softmax_slope(g: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    y = softmax(x, axes)
    return y * (g - summation(g * y, axes, True))


@differentiable("Softmax", _softmax_slope, reduces=True)
def softmax(a: NDArray, axes: Axes = -1) -> NDArray:
    """exp(a) / sum(exp(a)) over `axes` (the last by default); a slice of only -inf gives zeros.

    >>> print(ndl.ops.softmax(ndl.Tensor([[0, 0], [-np.inf, 1]])))
    [[0.5 0.5]
     [0.  1. ]]
    """
    _, e, s = _shifted(a, axes)
    # a slice that is not all -inf has s >= 1, except where a is NaN, which stays NaN
    return rounded(_C.divide(e, _C.add(s, _C.equal(s, 0.0))), a)


@differentiable(
    "LogSoftmax", lambda g, x, axes: g - softmax(x, axes) * summation(g, axes, True), reduces=True
)
def logsoftmax(a: NDArray, axes: Axes = -1) -> NDArray:
    """log(softmax(a)) over `axes` (the last by default); -inf stays -inf, also in a slice of only
    -inf.

    >>> print(ndl.logsoftmax(ndl.Tensor([[1e10, 1e10]])).numpy().round(4))
    [[-0.6931 -0.6931]]
    """
    m, _, s = _shifted(a, axes)
    # (a - m) first: at 1e10 the sum m + log(s) would swallow log(s)
    return rounded(_C.subtract(_C.subtract(a, m), _C.log(_C.maximum(s, 1e-38))), a)


def any(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """True if an element over `axes` is not 0; False over no element."""
    axes = axes_of("any", a, axes)
    return const(_C.not_equal(a.cached_data, 0).sum(axes, keepdims)) != 0


def all(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """True if no element over `axes` is 0; True over no element."""
    axes = axes_of("all", a, axes)
    return const(_C.equal(a.cached_data, 0).sum(axes, keepdims)) == 0


def count_nonzero(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The number of elements over `axes` (None: all) that are not 0, as int64."""
    return summation(astype(a != 0, "int64"), axes, keepdims)


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
    """The product over `axes`, of nothing 1, computed in float32; of integers in int64. Factors are
    multiplied in pairs, then the products in pairs, and so on.

    >>> print(ndl.prod(ndl.Tensor([[1, 2], [3, 4]]), 1))
    [ 2. 12.]
    """
    wide = of_products(a)
    gone = normal_axes("prod", axes, a.ndim)
    kept = [i for i in range(a.ndim) if i not in gone]
    shape = kept_shape(a.shape, gone, keepdims)
    sizes = [a.shape[i] for i in kept]
    n = math.prod(a.shape[i] for i in gone)
    out = reshape(permute(wide, (*kept, *gone)), (*sizes, n))
    if n == 0:
        out = summation(wide, gone, keepdims) + 1
    elif n == 1:
        out = out.clone()
    while n > 1:
        half = n // 2
        pairs = out[..., :half] * out[..., half : 2 * half]
        if n % 2:
            pairs = concatenate([pairs, out[..., n - 1 :]], -1)
        out, n = pairs, half + n % 2
    return rounded(reshape(out, shape), a)


def var(
    a: Tensor,
    axes: Axes = None,
    correction: float | None = None,
    keepdims: bool = False,
    dim: Axes = None,
) -> Tensor:
    """The variance over `axes`, or over `dim`: squared distances from the mean, summed and divided
    by their number less `correction`; by default 0 as in NumPy, with `dim` 1 as in PyTorch.
    Computed in float32.

    >>> print(ndl.var(ndl.Tensor([1, 3])), ndl.var(ndl.Tensor([1, 3]), dim=0))
    1.0 2.0
    """
    if correction is None:
        correction = 0 if dim is None else 1
    axes = axes_or_dim("var", axes, dim)
    count = math.prod(a.shape[i] for i in normal_axes("var", axes, a.ndim))
    wide = astype(a, "float32")
    off = wide - mean(wide, axes, True)
    total = summation(off * off, axes, keepdims)
    out = total / float(count - correction if count > correction else 0)
    return rounded(out, a)


def std(
    a: Tensor,
    axes: Axes = None,
    correction: float | None = None,
    keepdims: bool = False,
    dim: Axes = None,
) -> Tensor:
    """The standard deviation, the root of `var`, which has the arguments; its gradient at 0 is
    0."""
    wide, scale = _scaled(astype(a, "float32"), axes_or_dim("std", axes, dim), "max")
    out = _root(var(wide, axes, correction, keepdims, dim))
    return rounded(out * reshape(scale, out.shape), a)


def _root(a: Tensor) -> Tensor:
    """The square root, whose gradient at 0 is 0."""
    zero = _C.equal(a.cached_data, 0)
    return where(zero, 0.0, sqrt(a + const(zero)))


def _scaled(a: Tensor, axes: Axes, by: str) -> tuple[Tensor, Tensor]:
    """(a / s, s), s the power of two below the "max" or "min" of |a| over `axes`: sums of powers of
    a / s neither overflow nor vanish, and the division rounds nothing."""
    axes = normal_axes("norm", axes, a.ndim)
    if a.size == 0:
        return a, const(ones(kept_shape(a.shape, axes), "float32", a.device))
    size = getattr(_C.absolute(a.cached_data), by)(axis=axes, keepdims=True)
    exponent = _C.bitwise_and(size.view("int32"), 0x7F800000).view("float32")
    scale = const(_C.minimum(_C.maximum(exponent, 2.0**-126), 2.0**127))
    return a / scale, scale


def var_mean(
    a: Tensor, axes: Axes = None, correction: float = 1, keepdims: bool = False
) -> tuple[Tensor, Tensor]:
    """(var, mean) over `axes`, as PyTorch has them: var with `correction` 1."""
    return var(a, axes, correction, keepdims), mean(a, axes, keepdims)


def std_mean(
    a: Tensor, axes: Axes = None, correction: float = 1, keepdims: bool = False
) -> tuple[Tensor, Tensor]:
    """(std, mean) over `axes`, as PyTorch has them: std with `correction` 1."""
    return std(a, axes, correction, keepdims), mean(a, axes, keepdims)


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
            out = _root(summation(wide * wide, axes, keepdims))
        else:
            zero = _C.equal(wide.cached_data, 0)
            powers = (abs(wide) + const(zero)) ** ord
            powers = where(zero, 0.0 if ord > 0 else math.inf, powers)
            out = summation(powers, axes, keepdims) ** (1 / ord)
        out = out * reshape(scale, out.shape)
    return rounded(out, a)
