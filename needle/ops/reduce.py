"""Reductions and the log-sum-exp family. Statistics are computed in float32 and rounded once to the
operand's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd.tensor import FLOATS, Tensor
from needle.backend_ndarray import Axes
from needle.ops.broadcast import as_floats, differentiable, reshape, spread, summation
from needle.ops.common import LARGEST, axes_of, axes_or_dim, const, kept_shape, normal_axis
from needle.ops.elementwise import maximum, minimum, multiply, subtract
from needle.ops.indexing import select_places
from needle.ops.order import TopK


def _mean_of(a: NDArray, axes: tuple[int, ...], keepdims: bool) -> NDArray:
    result = a.mean(axis=axes, keepdims=keepdims)  # float32
    return result.astype(a.dtype) if a.dtype in FLOATS else result


def _mean_slope(g: Tensor, like: Tensor, axes: tuple[int, ...]) -> Tensor:
    count = math.prod(like.shape[axis] for axis in axes)
    return spread(g / count if count else g, like.shape, axes)


_mean = differentiable("Mean", _mean_of, _mean_slope)


def mean(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The mean over `axes` (None: all axes), which disappear, or with keepdims stay with size 1; of
    nothing NaN.

    >>> print(ndl.ops.mean(ndl.Tensor([[1, 2], [3, 4]]), 0))
    [2. 3.]
    """
    return _mean(a, axes_of("mean", a, axes), keepdims)


def _extreme(kernel: str) -> Any:
    """Make max or min, methods of NDArray."""

    def compute(a: NDArray, axes: tuple[int, ...], keepdims: bool) -> NDArray:
        return getattr(a, kernel)(axis=axes, keepdims=keepdims)

    def slope(g: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        a = x.cached_data
        hit = _C.equal(a, compute(a, axes, True)).astype("float32")
        share = _C.divide(hit, hit.sum(axis=axes).reshape(kept_shape(a.shape, axes)))
        return multiply(spread(g, a.shape, axes), const(share.astype(a.dtype)))

    return differentiable(kernel.capitalize(), compute, slope)


_max, _min = _extreme("max"), _extreme("min")


def amax(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The largest element over `axes` (None: all), which disappear, or with keepdims stay with size
    1; equal ones share the gradient equally."""
    return _max(a, axes_of("max", a, axes), keepdims)


def amin(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The smallest element over `axes`; equal ones share the gradient equally."""
    return _min(a, axes_of("min", a, axes), keepdims)


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
    values = select_places(a, (axis,), axis, places)
    shape = values.shape if keepdims else (*a.shape[:axis], *a.shape[axis + 1 :])
    return TopK(reshape(values, shape), const(places.reshape(shape)))


def _shifted(
    a: NDArray, axes: Sequence[int], most: float = math.inf
) -> tuple[NDArray, NDArray, NDArray]:
    """(m, e, s): m the maximum over `axes`, kept, finite for -inf and up to `most`, e = exp(a - m),
    s = sum e, all in float32. A slice of only -inf has e = 0 and s = 0, one with inf NaN."""
    a = a.astype("float32")
    m = a.max(axis=tuple(axes), keepdims=True)
    m = _C.minimum(_C.maximum(m, -LARGEST), most)
    e = _C.exp(_C.subtract(a, m))
    return m, e, e.sum(axis=tuple(axes), keepdims=True)


def _logsumexp_of(a: NDArray, axes: tuple[int, ...], keepdims: bool) -> NDArray:
    m, _, s = _shifted(a, axes, LARGEST)  # inf, where the others are NaN
    out = _C.add(m, _C.log(s)).astype(a.dtype)
    return out if keepdims else out.reshape([n for i, n in enumerate(a.shape) if i not in axes])


_logsumexp = differentiable(
    "LogSumExp",
    _logsumexp_of,
    lambda g, x, axes: multiply(spread(g, x.shape, axes), softmax(x, axes)),
)


def logsumexp(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(a))) over `axes` (None: all), which disappear, or with keepdims stay with size 1;
    the maximum is taken out first, so that no value overflows. A slice of only -inf gives -inf, and
    no gradient.

    >>> print(ndl.logsumexp(ndl.Tensor([1e10, 1e10])))
    1e+10
    """
    return _logsumexp(as_floats(a), axes_of("logsumexp", a, axes), keepdims)


def _softmax_of(a: NDArray, axes: tuple[int, ...]) -> NDArray:
    _, e, s = _shifted(a, axes)
    # a slice that is not all -inf has s >= 1, except where a is NaN, which stays NaN
    return _C.divide(e, _C.add(s, _C.equal(s, 0.0))).astype(a.dtype)


def _softmax_slope(g: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    y = softmax(x, axes)
    inner = spread(summation(multiply(g, y), axes), x.shape, axes)
    return multiply(y, subtract(g, inner))


_softmax = differentiable("Softmax", _softmax_of, _softmax_slope)


def softmax(a: Tensor, axes: Axes = -1) -> Tensor:
    """exp(a) / sum(exp(a)) over `axes` (the last by default); a slice of only -inf gives zeros.

    >>> print(ndl.ops.softmax(ndl.Tensor([[0, 0], [-np.inf, 1]])))
    [[0.5 0.5]
     [0.  1. ]]
    """
    return _softmax(as_floats(a), axes_of("softmax", a, axes))


def _logsoftmax_of(a: NDArray, axes: tuple[int, ...]) -> NDArray:
    m, _, s = _shifted(a, axes)
    # (a - m) first: at 1e10 the sum m + log(s) would swallow log(s)
    return _C.subtract(_C.subtract(a, m), _C.log(_C.maximum(s, 1e-38))).astype(a.dtype)


def _logsoftmax_slope(g: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    total = spread(summation(g, axes), x.shape, axes)
    return subtract(g, multiply(softmax(x, axes), total))


_logsoftmax = differentiable("LogSoftmax", _logsoftmax_of, _logsoftmax_slope)


def logsoftmax(a: Tensor, axes: Axes = -1) -> Tensor:
    """log(softmax(a)) over `axes` (the last by default); -inf stays -inf, also in a slice of only
    -inf.

    >>> print(ndl.logsoftmax(ndl.Tensor([[1e10, 1e10]])).numpy().round(4))
    [[-0.6931 -0.6931]]
    """
    return _logsoftmax(as_floats(a), axes_of("logsoftmax", a, axes))
