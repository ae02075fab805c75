"""Helpers shared by op families: base classes, axes, rows, checked ids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.autograd.tensor import Op, Tensor, not_a_tensor
from needle.backend_ndarray import Axes

LARGEST = 3.4028234663852886e38  # of float32


def axes_of(op: str, a: Any, axes: Axes) -> tuple[int, ...]:
    """Return `axes` of a Tensor as normal_axes does. TypeError where `a` is no Tensor."""
    check_tensors(op, a=a)
    return normal_axes(op, axes, a.ndim)


def normal_axes(op: str, axes: Axes, ndim: int) -> tuple[int, ...]:
    """Return `axes` (None: all) as sorted non-negative numbers. TypeError for what is no whole
    number; ValueError for an axis that does not exist or is named twice."""
    if axes is None:
        return tuple(range(ndim))
    out = []
    for axis in axes if isinstance(axes, Iterable) else (axes,):
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise TypeError(f"{op}: an axis is a whole number, not {axis!r}")
        if not -ndim <= axis < ndim:
            raise ValueError(f"{op}: axis {axis} does not exist in an array of {ndim} axes")
        out.append(int(axis) % ndim)
    if len(set(out)) != len(out):
        raise ValueError(f"{op}: an axis is named twice in {tuple(axes)}")
    return tuple(sorted(out))


def normal_axis(op: str, axis: Any, ndim: int) -> int:
    """Return one axis as a non-negative number. TypeError for several, or None; ValueError for one
    that does not exist."""
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"{op}: takes one axis, a whole number, not {axis!r}")
    return normal_axes(op, axis, ndim)[0]


def axes_or_dim(op: str, axes: Any, dim: Any) -> Any:
    """Return the axes of a function in which `dim` has PyTorch's meaning and `axes` NumPy's.
    TypeError for both."""
    if axes is not None and dim is not None:
        raise TypeError(f"{op}: axes and dim are the same: give one of them")
    return axes if dim is None else dim


def kept_shape(shape: Sequence[int], axes: Any, keepdims: bool = True) -> tuple[int, ...]:
    """Return `shape` with 1 at `axes`, as keepdims has it, or without them."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape) if keepdims or i not in axes)


def const(array: NDArray) -> Tensor:
    """Wrap an array as a Tensor outside the graph."""
    return Tensor.from_ndarray(array)


def check_tensors(op: str, **operands: Any) -> None:
    """Raise TypeError that names the first operand that is no Tensor."""
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            raise not_a_tensor(op, name, x)


def rows_of(x: Any) -> Any:
    """Return x, an array or a Tensor, as (N, last axis) with the leading axes merged, a view where
    strides allow it."""
    return x.reshape((math.prod(x.shape[:-1]), *x.shape[-1:]))


def vector(x: NDArray) -> NDArray:
    """Flatten a bias of any shape."""
    return x.reshape((x.size,))


def id_array(
    op: str, ids: Any, device: Device, limit: int, lowest: int | None = 0, name: str = "ids"
) -> NDArray:
    """Return ids as a 1-D int32 NDArray on `device`; check them while they are on the host.

    ids: Tensor, NDArray, NumPy array or nested list, any shape, of whole numbers in
    [lowest, limit); lowest None allows any negative number; `name` is their
    name in messages. TypeError for other types; ValueError names the first bad id, or uneven rows.
    Ids on a GPU are not checked, since that would wait: the kernel marks a bad row with NaN.
    """
    if isinstance(ids, Tensor):
        ids = ids.cached_data
    if isinstance(ids, NDArray):
        if not ids.device.is_host and ids.dtype != "bool":
            if ids.dtype != "int32":
                ids = ids.astype("int32")
            return ids.to(device).reshape((ids.size,))
        ids = ids.numpy()
    try:
        values = np.asarray(ids)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{op}: {name}: {error}") from None
    if values.dtype.kind not in "iuf" and values.size:
        raise TypeError(f"{op}: {name} must be whole numbers, but are {ids!r:.40}")
    bad = values >= limit
    if lowest is not None:
        bad |= values < lowest
    if values.dtype.kind == "f":
        bad |= ~np.isfinite(values) | (values != np.trunc(values))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        wanted = f"below {limit}" if lowest is None else f"from {lowest} to {limit - 1}"
        raise ValueError(f"{op}: {values[where]} at {where} is not a whole number {wanted}")
    if lowest is None:  # all negative numbers mean the same: let none wrap around in 32 bits
        values = values.astype(np.int64).clip(-1)
    return _C.array(np.ascontiguousarray(values, dtype=np.int32).reshape(-1), "int32", device)


def nonzero_places(a: NDArray) -> list[NDArray]:
    """Return the indices along each axis, int64, of the elements of a that are not 0, row-major.
    Waits for their count."""
    if a.device.is_host:
        numbers = _C.array(np.flatnonzero(a.numpy()), "int64", a.device)
    else:
        flags = _C.not_equal(a, 0).reshape((1, a.size))
        count = int(flags.sum().item())
        numbers = _C.empty((1, count), "int64", a.device)
        _C.sort(flags, 1, _C.empty((1, count), "bool", a.device), numbers)  # stable
        numbers = numbers.reshape((count,))
    places: list[NDArray] = []
    for n in reversed(a.shape[1:]):
        places.insert(0, _C.remainder(numbers, n))
        numbers = _C.floor_divide(numbers, n)
    return [numbers, *places]


def classes_of(files: Iterable[Any]) -> dict[str, type[Op]]:
    """Return the classes of ops that files define, by name."""
    return {
        name: value
        for file in files
        for name, value in getattr(file, "__dict__", {}).items()
        if isinstance(value, type) and issubclass(value, Op) and name[0] != "_"
        if value.__module__ == file.__name__
    }
