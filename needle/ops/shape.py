"""Ops that move elements without computing: transpose, permute, flip, stack, concatenate, split,
tuples. Where the strides allow it the result is a view of the input's memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Tensor, TensorOp, TensorTuple, TensorTupleOp
from needle.backend_ndarray import Axes
from needle.ops.broadcast import differentiable, reshape
from needle.ops.common import check_tensors, kept_shape, normal_axis
from needle.ops.indexing import get_item


def _swapped(op: str, shape: tuple[int, ...], axes: Sequence[int]) -> list[int]:
    """Return the order of axes in which two of them are swapped."""
    if len(axes) != 2:
        raise ValueError(f"{op}: axes must be the two to swap, not {axes}; see permute")
    order = list(range(len(shape)))
    i, j = (normal_axis(op, axis, len(shape)) for axis in axes)
    order[i], order[j] = j, i
    return order


def transpose(a: Tensor, axes: Any = None, other: int | None = None) -> Tensor:
    """`a` with two axes swapped, the last two by default, given as a pair or one by one; or with
    all of its three axes or more in another order, as NumPy has it.

    >>> ndl.transpose(ndl.ones(2, 3, 4)).shape
    (2, 4, 3)
    >>> ndl.transpose(ndl.ones(2, 3, 4), (0, 1)).shape
    (3, 2, 4)
    """
    if other is not None:
        axes = (axes, other)
    if isinstance(axes, (tuple, list)) and len(axes) == a.ndim > 2:
        return permute(a, axes)
    check_tensors("transpose", a=a)
    return permute(a, _swapped("transpose", a.shape, (-2, -1) if axes is None else axes))


@differentiable(
    "Permute",
    lambda g, axes: g.permute(np.argsort([axis % len(axes) for axis in axes]).tolist()),
    view=True,
)
def permute(a: NDArray, axes: Sequence[int]) -> NDArray:
    """`a` with its axes in another order: axis i of the result is axis axes[i] of `a`.

    >>> ndl.ops.permute(ndl.ones(2, 3, 4), (2, 0, 1)).shape
    (4, 2, 3)
    """
    return a.permute(axes)


@differentiable("Flip", lambda g, axes: g.flip(axes), view=True, reduces=True)
def flip(a: NDArray, axes: Axes = None) -> NDArray:
    """`a` with the order of its elements reversed along `axes` (None: all).

    >>> print(ndl.flip(ndl.Tensor([[1, 2], [3, 4]]), 1))
    [[2. 1.]
     [4. 3.]]
    """
    return a.flip(axes)


# ---- tuples --------------------------------------------------------------------------------------


class MakeTensorTuple(TensorTupleOp):
    reads_inputs = reads_result = False

    def compute(self, *arrays: NDArray) -> tuple:
        return arrays

    def gradient(self, out_grad: TensorTuple, node: TensorTuple) -> tuple:
        return tuple(out_grad[i] for i in range(len(out_grad)))


def make_tuple(*args: Tensor) -> TensorTuple:
    """Several Tensors as one value of the graph."""
    return MakeTensorTuple()(*args)


class TensorTupleGetItem(TensorOp):
    reads_inputs = reads_result = False

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, a: TensorTuple) -> Tensor:
        if isinstance(a.op, MakeTensorTuple):
            return a.inputs[self.index]  # the very Tensor that was put in
        return Tensor.make_from_op(self, (a,))

    def compute(self, a: tuple) -> NDArray:
        return a[self.index]

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        parts: list[Tensor | None] = [None] * len(node.inputs[0])
        parts[self.index] = out_grad
        return (parts,)


def tuple_get_item(value: TensorTuple, index: int) -> Tensor:
    """Element `index` of a tuple.

    >>> print(ndl.tuple_get_item(ndl.make_tuple(ndl.Tensor([1]), ndl.Tensor([2])), 1))
    [2.]
    """
    if not -len(value) <= index < len(value):
        raise IndexError(f"tuple_get_item: index {index} in a tuple of {len(value)}")
    return TensorTupleGetItem(index)(value)


def _nth_slice(a: NDArray, axis: int, i: int) -> NDArray:
    """A view of a[..., i, ...] without that axis."""
    index = tuple(slice(i, i + 1) if k == axis else slice(None) for k in range(a.ndim))
    shape = tuple(n for k, n in enumerate(a.shape) if k != axis)
    strides = tuple(s for k, s in enumerate(a.strides) if k != axis)
    return a[index].as_strided(shape, strides)


def stack(args: Sequence[Tensor] | TensorTuple, axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis.

    >>> print(ndl.stack([ndl.Tensor([1, 2]), ndl.Tensor([3, 4])], axis=1))
    [[1. 3.]
     [2. 4.]]
    """
    tensors = tuple(args)
    check_tensors("stack", **{f"Tensor {i}": x for i, x in enumerate(tensors)})
    for i, x in enumerate(tensors):
        if x.shape != (first := tensors[0].shape):
            raise ValueError(f"stack: Tensor {i} has shape {x.shape}, but the first has {first}")
    axis = normal_axis("stack", axis, tensors[0].ndim + 1) if tensors else 0
    rows = [reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in tensors]
    return _joined("stack", rows, axis)


@differentiable(
    "Concatenate",
    lambda g, like, axis: make_tuple(*(get_item(g, key) for key in _parts([*like], axis))),
)
def _concatenate(arrays: tuple, axis: int, op: str) -> NDArray:
    first = arrays[0]
    for i, a in enumerate(arrays):
        if a.ndim != first.ndim or kept_shape(a.shape, [axis]) != kept_shape(first.shape, [axis]):
            raise ValueError(
                f"{op}: Tensor {i} has shape {a.shape}, but the first has {first.shape}: they may "
                f"differ in axis {axis} alone"
            )
        if a.dtype != first.dtype:
            raise TypeError(f"{op}: Tensor {i} is {a.dtype}, but the first is {first.dtype}")
    size = sum(a.shape[axis] for a in arrays)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    out = _C.empty(shape, first.dtype, first.device)
    for a, key in zip(arrays, _parts(arrays, axis)):
        _C.assign(out[key], a)
    return out


def _joined(op: str, args: Sequence[Tensor] | TensorTuple, axis: int) -> Tensor:
    tensors = args if isinstance(args, TensorTuple) else tuple(args)
    if not len(tensors):
        raise ValueError(f"{op}: needs one Tensor or more")
    tensors = tensors if isinstance(tensors, TensorTuple) else make_tuple(*tensors)
    return _concatenate(tensors, normal_axis(op, axis, tensors[0].ndim), op)


def _parts(arrays: Sequence[Any], axis: int) -> Iterator[tuple]:
    """The index of each array in the concatenation."""
    end = 0
    for a in arrays:
        begin, end = end, end + a.shape[axis]
        yield (*[slice(None)] * axis, slice(begin, end), *[slice(None)] * (a.ndim - axis - 1))


def concatenate(args: Sequence[Tensor] | TensorTuple, axis: int = 0) -> Tensor:
    """Tensors joined along an axis that is there, in which alone their shapes may differ.

    >>> print(ndl.concatenate([ndl.Tensor([[1, 2]]), ndl.Tensor([[3]])], axis=1))
    [[1. 2. 3.]]
    """
    return _joined("concatenate", args, axis)


def hstack(args: Sequence[Tensor]) -> Tensor:
    """Tensors joined along axis 1, those of one axis along that."""
    return concatenate(args, 0 if args[0].ndim == 1 else 1)


def vstack(args: Sequence[Tensor]) -> Tensor:
    """Tensors joined along axis 0, those of one axis as rows."""
    return stack(args) if args[0].ndim == 1 else concatenate(args)


def moveaxis(a: Tensor, source: int, destination: int) -> Tensor:
    """`a` with axis `source` moved to `destination`; the others stay in their order."""
    order = list(range(a.ndim))
    taken = order.pop(normal_axis("moveaxis", source, a.ndim))
    order.insert(normal_axis("moveaxis", destination, a.ndim), taken)
    return permute(a, order)


class Split(TensorTupleOp):
    reads_inputs = reads_result = False

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def compute(self, a: NDArray) -> tuple:
        axis = normal_axis("split", self.axis, a.ndim)
        return tuple(_nth_slice(a, axis, i) for i in range(a.shape[axis]))

    def gradient(self, out_grad: TensorTuple, node: TensorTuple) -> Tensor:
        return stack(out_grad, self.axis)


def split(a: Tensor, axis: Any = None, dim: int | None = None) -> Any:
    """The slices of `a` along `axis`, by default the first, or along `dim`, without that axis: the
    inverse of stack, which PyTorch calls unbind. With both it is PyTorch's split(a, sizes, dim=1),
    `split_sizes`.

    >>> left, right = ndl.split(ndl.Tensor([[1, 2], [3, 4]]), axis=1)
    >>> print(left, right)
    [1. 3.] [2. 4.]
    """
    if axis is not None and dim is not None:
        return split_sizes(a, axis, dim)
    return Split((axis or 0) if dim is None else dim)(a)


def split_sizes(a: Tensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Parts of `a` along `axis`, of so many elements, the last of the rest, or of given sizes:
    `x.split(2, dim=-1)`, as PyTorch has it.

    >>> print(*ndl.Tensor([1, 2, 3]).split(2))
    [1. 2.] [3.]
    """
    axis = normal_axis("split", axis, a.ndim)
    n = a.shape[axis]
    if isinstance(sizes, int):
        if sizes < 1:
            raise ValueError(f"split: the size must be 1 or more, but is {sizes}")
        sizes = [min(sizes, n - at) for at in range(0, max(n, 1), sizes)]
    elif sum(sizes) != n or min(sizes, default=0) < 0:
        raise ValueError(
            f"split: sizes {sizes} are below 0 or do not sum to {n}, the size of axis {axis}"
        )
    ends = list(itertools.accumulate(sizes))
    lead = (slice(None),) * axis
    return tuple(get_item(a, (*lead, slice(end - n, end))) for n, end in zip(sizes, ends))
