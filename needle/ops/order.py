"""Order along an axis: sort, argsort, topk, nonzero, unique, bincount; running sums and
products."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd.tensor import FLOATS, Tensor
from needle.backend_ndarray import zeros
from needle.ops.broadcast import astype, differentiable, of_products, reshape, rounded
from needle.ops.common import const, nonzero_places, normal_axis, rows_of
from needle.ops.indexing import five_axes, gather
from needle.ops.shape import concatenate, flip, moveaxis, split_sizes, stack


def _axis_last(op: str, a: Tensor, axis: int | None) -> tuple[Tensor, int]:
    """`a` with `axis` last (None: flat), and where that axis belongs."""
    if axis is None:
        return reshape(a, (-1,)), 0
    axis = normal_axis(op, axis, a.ndim)
    return moveaxis(a, axis, -1), axis


@differentiable("Sort", lambda g, like, indices: _unsort(g, indices, like.shape[-1]))
def _sort(a: NDArray, descending: bool, indices: NDArray) -> NDArray:
    """The first elements of the sorted last axis; writes where on it they were to `indices`."""
    values = _C.empty(indices.shape, a.dtype, a.device)
    _C.sort(rows_of(a), int(descending), rows_of(values), rows_of(indices))
    return values


@differentiable("Unsort", lambda g, indices: gather(g, -1, indices))
def _unsort(a: NDArray, indices: NDArray, size: int) -> NDArray:
    """Zeros of `size` along the last axis, with the elements of `a` at `indices`."""
    out = zeros((*a.shape[:-1], size), a.dtype, a.device)
    _C.put(*(five_axes(x, x.ndim - 1) for x in (a, indices, out)))
    return out


def _sorted(op: str, a: Tensor, axis: int | None, descending: bool, count: Any) -> tuple:
    rows, back = _axis_last(op, a, axis)
    count = rows.shape[-1] if count is None else operator.index(count)
    if not 0 <= count <= rows.shape[-1]:
        raise ValueError(f"{op}: k is {count}, but the axis has {rows.shape[-1]} elements")
    indices = _C.empty((*rows.shape[:-1], count), "int64", a.device)
    values = _sort(rows, descending, indices)
    return moveaxis(values, -1, back), moveaxis(const(indices), -1, back)


def sort(a: Tensor, axis: int | None = -1, descending: bool = False, dim: int | None = None) -> Any:
    """`a` in order along `axis` (None: flat), NaN last; `descending` is the reverse, NaN first.
    Along `dim`, as PyTorch has it, (values, indices).

    >>> print(ndl.sort(ndl.Tensor([3, 1, 2])), *ndl.sort(ndl.Tensor([3, 1, 2]), dim=0))
    [1. 2. 3.] [1. 2. 3.] [1 2 0]
    """
    if dim is None:
        return _sorted("sort", a, axis, descending, None)[0]
    if axis != -1:
        raise TypeError("sort: axis and dim are the same: give one of them")
    return TopK(*_sorted("sort", a, dim, descending, None))


def argsort(a: Tensor, axis: int | None = -1, descending: bool = False) -> Tensor:
    """Indices along `axis` of the elements of `sort`, as int64. Stable: equal elements stay in
    their order, also descending; -0 is before 0.

    >>> print(ndl.argsort(ndl.Tensor([3, 1, 2])))
    [1 2 0]
    """
    return _sorted("argsort", a, axis, descending, None)[1]


class TopK(NamedTuple):
    values: Tensor
    indices: Tensor


def topk(a: Tensor, k: int, axis: int = -1, largest: bool = True) -> TopK:
    """The `k` largest elements along `axis`, the largest first, and where they are, as int64; the
    smallest with largest=False. Of equal ones the first; NaN counts as the largest. Gradients flow
    to those elements. ValueError for more elements than the axis has.

    >>> values, places = ndl.topk(ndl.Tensor([3, 1, 2]), 2)
    >>> print(values, places)
    [3. 2.] [0 2]
    """
    return TopK(*_sorted("topk", a, axis, largest, k))


def nonzero(a: Tensor, as_tuple: bool = True) -> Any:
    """The places of the elements that are not 0: an int64 Tensor for each axis, as NumPy has it, so
    that `a[nonzero(a)]` are those elements; with as_tuple=False one of (places, axes), as PyTorch.

    >>> rows, columns = ndl.nonzero(ndl.Tensor([[0, 1], [2, 0]]))
    >>> print(rows, columns)
    [0 1] [1 0]
    """
    places = nonzero_places(a.cached_data)
    columns = tuple(map(const, places))
    return columns if as_tuple else stack(columns, 1)


def unique(a: Tensor, *, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The different elements of `a` in order; also where each element of `a` is among them, and how
    often each occurs, as int64. Computed on the host.

    >>> print(*ndl.unique(ndl.Tensor([3, 1, 3]), return_counts=True))
    [1. 3.] [1 2]
    """
    found = np.unique(a.numpy(), return_inverse=return_inverse, return_counts=return_counts)
    values, *numbers = found if isinstance(found, tuple) else (found,)
    if return_inverse:
        numbers[0] = numbers[0].reshape(a.shape)  # flat in NumPy 1
    elements = const(_C.array(values, a.dtype, a.device))
    places = [const(_C.array(n, "int64", a.device)) for n in numbers]
    return (elements, *places) if places else elements


def bincount(a: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each whole number from 0 on occurs in `a`, as int64, or the float32 sums of its
    weights; `minlength` numbers at least. Computed on the host.

    >>> print(ndl.bincount(ndl.tensor([1, 3, 1])))
    [0 2 0 1]
    """
    if a.ndim != 1 or a.dtype in FLOATS:
        raise ValueError(
            f"bincount: a must be a vector of whole numbers, but is {a.dtype} of shape {a.shape}"
        )
    found = np.bincount(a.numpy(), None if weights is None else weights.numpy(), minlength)
    return const(_C.array(found, "int64" if weights is None else "float32", a.device))


@differentiable("CumSum", lambda g: flip(_cumsum(flip(g, -1)), -1))
def _cumsum(a: NDArray) -> NDArray:
    out = a.copy()
    _C.cumsum(rows_of(out))
    return out


def cumsum(a: Tensor, axis: int | None = None) -> Tensor:
    """The running sums along `axis` (None: of the flat elements), in float32; of integers and bool
    in int64.

    >>> print(ndl.cumsum(ndl.Tensor([[1, 2], [3, 4]]), 0))
    [[1. 2.]
     [4. 6.]]
    """
    rows, back = _axis_last("cumsum", a, axis)
    return moveaxis(_cumsum(rows if a.dtype in FLOATS else astype(rows, "int64")), -1, back)


def cumprod(a: Tensor, axis: int | None = None) -> Tensor:
    """The running products along `axis` (None: of the flat elements), in float32; of integers and
    bool in int64.

    >>> print(ndl.cumprod(ndl.Tensor([2, 3, 4])))
    [ 2.  6. 24.]
    """
    rows, back = _axis_last("cumprod", of_products(a), axis)
    done, n = 1, rows.shape[-1]  # each element is the product of so many
    while done < n:
        first, rest = split_sizes(rows, [done, n - done], -1)
        before, _ = split_sizes(rows, [n - done, done], -1)
        rows, done = concatenate([first, rest * before], -1), 2 * done
    return rounded(moveaxis(rows if n > 1 else rows.clone(), -1, back), a)
