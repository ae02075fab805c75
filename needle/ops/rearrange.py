"""Shapes by NumPy's and PyTorch's names, of views, indexing and concatenation: squeeze, unsqueeze,
flatten, tile, repeat, chunk, roll, pad, tril, triu, diagonals, meshgrid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle._C import NDArray
from needle.autograd import Tensor
from needle.backend_ndarray import Axes, full
from needle.ops.broadcast import broadcast_to, reshape, summation
from needle.ops.common import axes_or_dim, const, normal_axes, normal_axis
from needle.ops.elementwise import where
from needle.ops.indexing import get_item, index_select
from needle.ops.select import set_item
from needle.ops.shape import concatenate, moveaxis, permute, split_sizes


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
    times = (reps,) if isinstance(reps, int) else tuple(reps)
    times = (1,) * (a.ndim - len(times)) + times
    a = reshape(a, (1,) * (len(times) - a.ndim) + a.shape)
    for axis, count in enumerate(times):
        if count != 1:
            lead, rest = a.shape[:axis], a.shape[axis:]
            a = broadcast_to(unsqueeze(a, axis), (*lead, count, *rest))
            a = reshape(a, (*lead, count * rest[0], *rest[1:]))
    return a if any(count != 1 for count in times) else a.clone()


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
    return index_select(a, axis, np.repeat(np.arange(a.shape[axis]), repeats))


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
    listed = (axes,) if isinstance(axes, int) else tuple(axes)
    steps = (shifts,) * len(listed) if isinstance(shifts, int) else tuple(shifts)
    for step, axis in zip(steps, listed, strict=True):
        axis = normal_axis("roll", axis, a.ndim)
        n = a.shape[axis]
        if n:
            a = concatenate(split_sizes(a, [n - step % n, step % n], axis)[::-1], axis)
    return a if listed else a.clone()


def pad(a: Tensor, widths: Any, value: float = 0) -> Tensor:
    """`a` with elements `value` around it. widths: ((before, after), ...) for each axis, (before,
    after) for all axes, or a number for both.

    >>> print(ndl.pad(ndl.Tensor([1, 2]), (1, 2), value=9))
    [9. 1. 2. 9. 9.]
    """
    pairs = np.broadcast_to(np.asarray(widths, np.int64), (a.ndim, 2)).tolist()
    if any(n < 0 for pair in pairs for n in pair):
        raise ValueError(f"pad: widths must be 0 or more, but are {widths}")
    shape = tuple(n + before + after for n, (before, after) in zip(a.shape, pairs))
    inner = tuple(slice(before, before + n) for n, (before, _) in zip(a.shape, pairs))
    out = const(full(shape, value, a.dtype, a.device))
    set_item(out, inner, a)
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


def diagonal(a: Tensor, k: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The k-th diagonal above the main one of the matrices of two axes, as the last axis."""
    if a.ndim < 2:
        raise ValueError(f"diagonal: a must have 2 axes or more, but is {a.shape}")
    pair = [normal_axis("diagonal", axis, a.ndim) for axis in (axis1, axis2)]
    if pair[0] == pair[1]:
        raise ValueError(f"diagonal: axis1 and axis2 are both {axis1}")
    a = permute(a, [*pair, *(i for i in range(a.ndim) if i not in pair)])
    rows, columns = a.shape[:2]
    places = np.arange(max(0, min(rows + min(k, 0), columns - max(k, 0))))
    return moveaxis(get_item(a, (places - min(k, 0), places + max(k, 0))), 0, -1)


def diag(a: Tensor, k: int = 0) -> Tensor:
    """The k-th diagonal of a matrix; of a vector the matrix that has it there, and 0 elsewhere.

    >>> print(ndl.diag(ndl.Tensor([1, 2])), ndl.diag(ndl.Tensor([[1, 2], [3, 4]]), 1))
    [[1. 0.]
     [0. 2.]] [2.]
    """
    if a.ndim > 2:
        raise ValueError(f"diag: a must be a vector or a matrix, but is {a.shape}")
    if a.ndim != 1:
        return diagonal(a, k)
    places, n = np.arange(a.size), a.size + abs(k)
    out = const(full((n, n), 0, a.dtype, a.device))
    set_item(out, (places - min(k, 0), places + max(k, 0)), a)
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
