"""Reductions and the log-sum-exp family. Statistics are computed in float32 and rounded once to the
operand's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd.tensor import FLOATS, Tensor, TensorOp
from needle.backend_ndarray import Axes
from needle.ops.broadcast import as_floats, reshape, spread, summation
from needle.ops.common import (
    LARGEST,
    LinearMap,
    axes_or_dim,
    const,
    fixed_axes,
    kept_shape,
    normal_axes,
    normal_axis,
)
from needle.ops.elementwise import maximum, minimum, multiply, subtract
from needle.ops.indexing import IndexSelect
from needle.ops.order import TopK


class Mean(LinearMap):
    def __init__(self, axes: Axes = None, keepdims: bool = False) -> None:
        self.axes = fixed_axes(axes)
        self.keepdims = keepdims

    def compute(self, a: NDArray) -> NDArray:
        axes = normal_axes("mean", self.axes, a.ndim)
        result = a.mean(axis=axes, keepdims=self.keepdims)  # float32
        return result.astype(a.dtype) if a.dtype in FLOATS else result

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        shape = node.inputs[0].shape
        axes = normal_axes("mean", self.axes, len(shape))
        count = math.prod(shape[axis] for axis in axes)
        return spread(out_grad / count if count else out_grad, shape, axes)


def mean(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The mean over `axes` (None: all axes), which disappear, or with keepdims stay with size 1; of
    nothing NaN.

    >>> print(ndl.ops.mean(ndl.Tensor([[1, 2], [3, 4]]), 0))
    [2. 3.]
    """
    return Mean(axes, keepdims)(a)


class Max(TensorOp):
    reads_result = False
    kernel = "max"  # of NDArray; min shares the rest

    def __init__(self, axes: Axes = None, keepdims: bool = False) -> None:
        self.axes = fixed_axes(axes)
        self.keepdims = keepdims

    def compute(self, a: NDArray) -> NDArray:
        axes = normal_axes(self.kernel, self.axes, a.ndim)
        return getattr(a, self.kernel)(axis=axes, keepdims=self.keepdims)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0].cached_data
        axes = normal_axes(self.kernel, self.axes, a.ndim)
        kept = kept_shape(a.shape, axes)
        hit = _C.equal(a, getattr(a, self.kernel)(axis=axes, keepdims=True)).astype("float32")
        weight = _C.divide(hit, hit.sum(axis=axes).reshape(kept)).astype(node.dtype)
        return multiply(spread(out_grad, a.shape, axes), const(weight))


def amax(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The largest element over `axes` (None: all), which disappear, or with keepdims stay with size
    1; equal ones share the gradient equally."""
    return Max(axes, keepdims)(a)


def max(a: Tensor, axes: Any = None, keepdims: bool = False, dim: int | None = None) -> Any:
    """`amax`; along `dim`, as PyTorch has it, (values, indices), of equal ones the first; with a
    Tensor for `axes` `maximum`.

    >>> x = ndl.Tensor([1, 5, 5])
    >>> ndl.ops.max(x).backward()
    >>> print(x.grad, *x.max(dim=0))
    [0.  0.5 0.5] 5.0 1
    """
    return extremum(Max, a, axes, keepdims, dim)


def extremum(op: type[Max], a: Tensor, axes: Any, keepdims: bool, dim: int | None) -> Any:
    """Compute max or min; `op` is the class of one of them."""
    if isinstance(axes, Tensor):
        return {"max": maximum, "min": minimum}[op.kernel](a, axes)
    if dim is None:
        return op(axes, keepdims)(a)
    axis = normal_axis(op.kernel, axes_or_dim(op.kernel, axes, dim), a.ndim)
    places = getattr(a.cached_data, f"arg{op.kernel}")(axis=axis, keepdims=True)
    values = IndexSelect((axis,), axis, places)(a)
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


class LogSumExp(TensorOp):
    reads_result = False

    def __init__(self, axes: Axes = None, keepdims: bool = False) -> None:
        self.axes = fixed_axes(axes)
        self.keepdims = keepdims

    def compute(self, a: NDArray) -> NDArray:
        axes = normal_axes("logsumexp", self.axes, a.ndim)
        m, _, s = _shifted(a, axes, LARGEST)  # inf, where the others are NaN
        out = _C.add(m, _C.log(s)).astype(a.dtype)
        left = tuple(n for i, n in enumerate(a.shape) if i not in axes)
        return out if self.keepdims else out.reshape(left)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0]
        axes = normal_axes("logsumexp", self.axes, len(a.shape))
        return multiply(spread(out_grad, a.shape, axes), softmax(a, axes))


def logsumexp(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(a))) over `axes` (None: all), which disappear, or with keepdims stay with size 1;
    the maximum is taken out first, so that no value overflows. A slice of only -inf gives -inf, and
    no gradient.

    >>> print(ndl.logsumexp(ndl.Tensor([1e10, 1e10])))
    1e+10
    """
    return LogSumExp(axes, keepdims)(as_floats(a))


class Softmax(TensorOp):
    reads_result = False

    def __init__(self, axes: Axes = -1) -> None:
        self.axes = fixed_axes(axes)

    def compute(self, a: NDArray) -> NDArray:
        _, e, s = _shifted(a, normal_axes("softmax", self.axes, a.ndim))
        # a slice that is not all -inf has s >= 1, except where a is NaN, which stays NaN
        return _C.divide(e, _C.add(s, _C.equal(s, 0.0))).astype(a.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0]
        axes = normal_axes("softmax", self.axes, len(a.shape))
        y = softmax(a, axes)
        inner = spread(summation(multiply(out_grad, y), axes), a.shape, axes)
        return multiply(y, subtract(out_grad, inner))


def softmax(a: Tensor, axes: Axes = -1) -> Tensor:
    """exp(a) / sum(exp(a)) over `axes` (the last by default); a slice of only -inf gives zeros.

    >>> print(ndl.ops.softmax(ndl.Tensor([[0, 0], [-np.inf, 1]])))
    [[0.5 0.5]
     [0.  1. ]]
    """
    return Softmax(axes)(as_floats(a))


class LogSoftmax(TensorOp):
    reads_result = False

    def __init__(self, axes: Axes = -1) -> None:
        self.axes = fixed_axes(axes)

    def compute(self, a: NDArray) -> NDArray:
        m, _, s = _shifted(a, normal_axes("logsoftmax", self.axes, a.ndim))
        # (a - m) first: at 1e10 the sum m + log(s) would swallow log(s)
        return _C.subtract(_C.subtract(a, m), _C.log(_C.maximum(s, 1e-38))).astype(a.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0]
        axes = normal_axes("logsoftmax", self.axes, len(a.shape))
        total = spread(summation(out_grad, axes), a.shape, axes)
        return subtract(out_grad, multiply(softmax(a, axes), total))


def logsoftmax(a: Tensor, axes: Axes = -1) -> Tensor:
    """log(softmax(a)) over `axes` (the last by default); -inf stays -inf, also in a slice of only
    -inf.

    >>> print(ndl.logsoftmax(ndl.Tensor([[1e10, 1e10]])).numpy().round(4))
    [[-0.6931 -0.6931]]
    """
    return LogSoftmax(axes)(as_floats(a))
