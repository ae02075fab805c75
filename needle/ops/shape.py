"""Ops that move elements without computing: transpose, permute, flip, stack, concatenate, split,
tuples, pad, roll, triangles, diagonals. Where the strides allow it the result is a view of the
input's memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Tensor, TensorOp, TensorTuple, TensorTupleOp
from needle.backend_ndarray import Axes, full, listed, zeros
from needle.ops.broadcast import broadcast_to, differentiable, reshape, summation
from needle.ops.common import (
    axes_or_dim,
    check_tensors,
    const,
    kept_shape,
    normal_axes,
    normal_axis,
)
from needle.ops.elementwise import where
from needle.ops.indexing import index_select


def transpose(a: Tensor, axes: Any = None, other: int | None = None) -> Tensor:
    """`a` with two axes swapped, the last two by default, given as a pair or one by one; or with
    all of its three axes or more in another order, as NumPy has it.

    >>> ndl.transpose(ndl.ones(2, 3, 4)).shape
    (2, 4, 3)
    >>> ndl.transpose(ndl.ones(2, 3, 4), (0, 1)).shape
    (3, 2, 4)
    """
    check_tensors("transpose", a=a)
    if other is not None:
        axes = (axes, other)
    axes = (-2, -1) if axes is None else axes
    if len(axes) == a.ndim > 2:
        return permute(a, axes)
    if len(axes) != 2:
        raise ValueError(f"transpose: axes must be the two to swap, not {axes}; see permute")
    order = list(range(a.ndim))
    i, j = (normal_axis("transpose", axis, a.ndim) for axis in axes)
    order[i], order[j] = j, i
    return permute(a, order)


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
    is_view = True

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
    "Concatenate", lambda g, like, axis: make_tuple(*(g[key] for key in _parts([*like], axis)))
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
    tensors = tuple(args)
    if not tensors:
        raise ValueError(f"{op}: needs one Tensor or more")
    return _concatenate(make_tuple(*tensors), normal_axis(op, axis, tensors[0].ndim), op)


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
    is_view = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def compute(self, a: NDArray) -> tuple:
        axis = normal_axis("split", self.axis, a.ndim)
        return tuple(a.at((*[slice(None)] * axis, i)) for i in range(a.shape[axis]))

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
    if isinstance(sizes, (int, np.integer)):
        if sizes < 1:
            raise ValueError(f"split: the size must be 1 or more, but is {sizes}")
        sizes = [min(sizes, n - at) for at in range(0, max(n, 1), sizes)]
    elif sum(sizes) != n or min(sizes, default=0) < 0:
        raise ValueError(
            f"split: sizes {sizes} are below 0 or do not sum to {n}, the size of axis {axis}"
        )
    ends = list(itertools.accumulate(sizes))
    lead = (slice(None),) * axis
    return tuple(a[(*lead, slice(end - n, end))] for n, end in zip(sizes, ends))


# ---- composed of those ---------------------------------------------------------------------------


def squeeze(a: Tensor, axes: Axes = None, dim: Axes = None) -> Tensor:
    """`a` without its axes of size 1, or without those of `axes`, which must have size 1, as NumPy
    has it; longer ones of `dim` stay, as PyTorch has it."""
    gone = normal_axes("squeeze", axes_or_dim("squeeze", axes, dim), a.ndim)
    if axes is not None and any(a.shape[i] != 1 for i in gone):
        raise ValueError(f"squeeze: axes {axes} of shape {a.shape} are not all of size 1")
    return reshape(a, [n for i, n in enumerate(a.shape) if i not in gone or n != 1])


def unsqueeze(a: Tensor, axis: int) -> Tensor:
    """`a` with a new axis of size 1, which becomes axis `axis`."""
    axis = normal_axis("unsqueeze", axis, a.ndim + 1)
    return reshape(a, (*a.shape[:axis], 1, *a.shape[axis:]))


def flatten(a: Tensor, start: int = 0, end: int = -1) -> Tensor:
    """`a` with its axes from `start` to `end` merged into one."""
    if a.ndim == 0:
        return reshape(a, (1,))
    first, last = (normal_axis("flatten", axis, a.ndim) for axis in (start, end))
    if first > last:
        raise ValueError(f"flatten: start {start} comes after end {end} in shape {a.shape}")
    size = math.prod(a.shape[first : last + 1])
    return reshape(a, (*a.shape[:first], size, *a.shape[last + 1 :]))


def tile(a: Tensor, reps: int | Sequence[int]) -> Tensor:
    """`a` repeated reps[i] times along axis i, as one block after the other.

    >>> print(ndl.tile(ndl.Tensor([1, 2]), (2, 2)))
    [[1. 2. 1. 2.]
     [1. 2. 1. 2.]]
    """
    times = listed(reps)
    times = (1,) * (a.ndim - len(times)) + times
    a = reshape(a, (1,) * (len(times) - a.ndim) + a.shape)
    for axis, count in enumerate(times):
        if count != 1:
            lead, rest = a.shape[:axis], a.shape[axis:]
            a = broadcast_to(unsqueeze(a, axis), (*lead, count, *rest))
            a = reshape(a, (*lead, count * rest[0], *rest[1:]))
    return a.contiguous() if any(count != 1 for count in times) else a.clone()


def repeat(a: Tensor, repeats: Any, axis: int | None = None) -> Tensor:
    """Repeat each slice along `axis` (None: each element of flat `a`): NumPy's repeat, which is
    PyTorch's repeat_interleave; PyTorch's repeat is `tile`. repeats: a number, or one a slice.

    >>> print(ndl.repeat(ndl.Tensor([1, 2]), 2), ndl.repeat(ndl.Tensor([1, 2]), [0, 3]))
    [1. 1. 2. 2.] [2. 2. 2.]
    """
    if axis is None:
        a, axis = reshape(a, (-1,) if a.size else (0,)), 0
    axis = normal_axis("repeat", axis, a.ndim)
    if isinstance(repeats, (Tensor, NDArray)):
        repeats = repeats.numpy()
    try:
        places = np.repeat(np.arange(a.shape[axis]), repeats)
    except ValueError as error:
        raise ValueError(f"repeat: {repeats} repeats along axis {axis}: {error}") from None
    return index_select(a, axis, places)


def chunk(a: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """Cut `a` along `axis` into at most `chunks` parts, all of one size but the last.

    >>> print(*ndl.chunk(ndl.Tensor([1, 2, 3]), 2))
    [1. 2.] [3.]
    """
    axis = normal_axis("chunk", axis, a.ndim)
    if chunks < 1:
        raise ValueError(f"chunk: chunks must be 1 or more, but is {chunks}")
    return split_sizes(a, int(max(1, -(-a.shape[axis] // chunks))), axis)


def roll(a: Tensor, shifts: int | Sequence[int], axes: Axes = None) -> Tensor:
    """`a` shifted along `axes` (None: its flat elements); elements that leave the end come back at
    the beginning.

    >>> print(ndl.roll(ndl.Tensor([1, 2, 3]), 1))
    [3. 1. 2.]
    """
    if axes is None:
        return reshape(roll(reshape(a, (a.size,)), shifts, 0), a.shape)
    steps, axes = listed(shifts), listed(axes)
    if len(steps) not in (1, len(axes)):
        raise ValueError(f"roll: {len(steps)} shifts for {len(axes)} axes")
    for step, axis in zip(itertools.cycle(steps), axes):
        axis = normal_axis("roll", axis, a.ndim)
        n = a.shape[axis]
        if n:
            a = concatenate(split_sizes(a, [n - step % n, step % n], axis)[::-1], axis)
    return a if axes else a.clone()


def pad(a: Tensor, widths: Any, value: float = 0) -> Tensor:
    """`a` with elements `value` around it. widths: ((before, after), ...) for each axis, (before,
    after) for all axes, or a number for both.

    >>> print(ndl.pad(ndl.Tensor([1, 2]), (1, 2), value=9))
    [9. 1. 2. 9. 9.]
    """
    try:
        pairs = np.broadcast_to(np.asarray(widths, np.int64), (a.ndim, 2)).tolist()
    except ValueError as error:
        raise ValueError(f"pad: widths {widths} for {a.ndim} axes: {error}") from None
    if any(n < 0 for pair in pairs for n in pair):
        raise ValueError(f"pad: widths must be 0 or more, but are {widths}")
    shape = tuple(n + before + after for n, (before, after) in zip(a.shape, pairs))
    inner = tuple(slice(before, before + n) for n, (before, _) in zip(a.shape, pairs))
    out = const(full(shape, value, a.dtype, a.device))
    out[inner] = a
    return out


def _triangle(op: str, a: Tensor, k: int) -> np.ndarray:
    if a.ndim < 2:
        raise ValueError(f"{op}: a must have 2 axes or more, but is {a.shape}")
    return np.tri(*a.shape[-2:], k, dtype=bool)


def tril(a: Tensor, k: int = 0) -> Tensor:
    """The lower triangle of each matrix, up to the k-th diagonal above the main one; 0 elsewhere.

    >>> print(ndl.tril(ndl.ones(2, 2)))
    [[1. 0.]
     [1. 1.]]
    """
    return where(_triangle("tril", a, k), a, False)


def triu(a: Tensor, k: int = 0) -> Tensor:
    """The upper triangle of each matrix, from the k-th diagonal above the main one; 0 elsewhere."""
    return where(_triangle("triu", a, k - 1), False, a)


@differentiable("Diagonal", lambda g, like: _on_diagonal(g, like.shape), view=True)
def _diagonal(a: NDArray) -> NDArray:
    """The main diagonal of the last two axes."""
    *steps, down, right = a.strides
    return a.as_strided((*a.shape[:-2], min(a.shape[-2:])), (*steps, down + right))


@differentiable("OnDiagonal", lambda g: _diagonal(g))
def _on_diagonal(a: NDArray, shape: tuple[int, ...]) -> NDArray:
    """Zeros of a shape with `a` on the main diagonal: the inverse in gradient of `_diagonal`."""
    out = zeros(shape, a.dtype, a.device)
    out.as_strided(a.shape, (*out.strides[:-2], sum(out.strides[-2:])))[...] = a
    return out


def diagonal(a: Tensor, k: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The k-th diagonal above the main one of the matrices of two axes, as the last axis: a view.

    >>> x = ndl.zeros(2, 3)
    >>> ndl.diagonal(x, 1).fill_(5)
    Tensor([5., 5.], dtype=float32, device=cpu())
    >>> print(x)
    [[0. 5. 0.]
     [0. 0. 5.]]
    """
    if a.ndim < 2:
        raise ValueError(f"diagonal: a must have 2 axes or more, but is {a.shape}")
    pair = [normal_axis("diagonal", axis, a.ndim) for axis in (axis1, axis2)]
    if pair[0] == pair[1]:
        raise ValueError(f"diagonal: axis1 and axis2 are both {axis1}")
    a = permute(a, [*(i for i in range(a.ndim) if i not in pair), *pair])
    return _diagonal(a[..., max(-k, 0) :, max(k, 0) :])


def diag(a: Tensor, k: int = 0) -> Tensor:
    """The k-th diagonal of a matrix; of a vector the matrix that has it there, and 0 elsewhere.

    >>> print(ndl.diag(ndl.Tensor([1, 2])), ndl.diag(ndl.Tensor([[1, 2], [3, 4]]), 1))
    [[1. 0.]
     [0. 2.]] [2.]
    """
    if a.ndim > 2:
        raise ValueError(f"diag: a must be a vector or a matrix, but is {a.shape}")
    if a.ndim != 1:
        return diagonal(a, k).clone()
    places, n = np.arange(a.size), a.size + abs(k)
    out = const(full((n, n), 0, a.dtype, a.device))
    out[places - min(k, 0), places + max(k, 0)] = a
    return out


def trace(a: Tensor, k: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The sum of a `diagonal`, which has the arguments."""
    return summation(diagonal(a, k, axis1, axis2), -1)


def meshgrid(*tensors: Any, indexing: str = "xy") -> tuple[Tensor, ...]:
    """Vectors broadcast against each other, the i-th along axis i with indexing "ij"; with "xy", as
    NumPy has it, the first two change places.

    >>> print(*ndl.meshgrid(ndl.arange(2), ndl.arange(3), indexing="ij"))
    [[0 0 0]
     [1 1 1]] [[0 1 2]
     [0 1 2]]
    """
    if indexing not in ("ij", "xy"):
        raise ValueError(f"meshgrid: indexing must be 'ij' or 'xy', not {indexing!r}")
    vectors = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    axes = list(range(len(vectors)))
    if indexing == "xy":
        axes[:2] = axes[1::-1]
    shape = [vectors[axis].size for axis in axes]
    return tuple(
        broadcast_to(reshape(x, [-1 if axis == i else 1 for i in range(len(axes))]), shape)
        for x, axis in zip(vectors, axes)
    )
