"""Picking elements: indexing by NumPy's rules, index_select, and their gradients.

Slices are views. Elements picked by arrays of integers are gathered in place, whatever the strides,
by the kernel that looks up embeddings, and their gradient is summed in float32 by that
kernel's backward. The arrays of an index are read on the host, where they are checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import FLOATS, Tensor, TensorOp
from needle.backend_ndarray import zeros
from needle.ops.broadcast import reshape
from needle.ops.common import id_array, normal_axes

ROWS = 2**31  # fewer than these can be told apart by the ids of a kernel

# ---- integers, slices, None, ... -----------------------------------------------------------------


def view_at(a: NDArray, index: tuple) -> NDArray:
    """a[index], where integers drop their axes as in NumPy. index: int, slice, None; an item for
    each axis of a."""
    view = a[index]
    kept = [i for i, item in enumerate(index) if not isinstance(item, int)]
    if len(kept) == view.ndim:
        return view
    return view.as_strided([view.shape[i] for i in kept], [view.strides[i] for i in kept])


class GetItem(TensorOp):
    """A view of a, and the inverse in gradient of PlaceItem."""

    reads_inputs = reads_result = False

    def __init__(self, index: tuple) -> None:
        self.index = index

    def compute(self, a: NDArray) -> NDArray:
        return view_at(a, self.index)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return PlaceItem(self.index, node.inputs[0].shape)(out_grad)


class PlaceItem(TensorOp):
    """Zeros of a shape with a at the index."""

    reads_inputs = reads_result = False

    def __init__(self, index: tuple, shape: tuple[int, ...]) -> None:
        self.index = index
        self.shape = shape

    def compute(self, a: NDArray) -> NDArray:
        out = zeros(self.shape, a.dtype, a.device)
        _C.assign(view_at(out, self.index), a)
        return out

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return GetItem(self.index)(out_grad)


# ---- arrays of integers --------------------------------------------------------------------------


class IndexSelect(TensorOp):
    """The slices of a at `ids`, which number the elements of `axes` in row-major order, along one
    axis `at` in the place of those; linear in a, and the inverse in gradient of IndexAdd."""

    reads_inputs = reads_result = False

    def __init__(self, axes: tuple[int, ...], at: int, ids: np.ndarray) -> None:
        self.axes = axes
        self.at = at
        self.ids = ids

    def compute(self, a: NDArray) -> NDArray:
        sizes = tuple(a.shape[i] for i in self.axes)
        if math.prod(sizes) >= ROWS:
            raise ValueError(f"indices pick among fewer than 2^31 places, not among {sizes}")
        places = (self.ids,) * len(sizes)
        if len(sizes) > 1 and self.ids.size:
            places = np.unravel_index(self.ids, sizes)
        return gather(a, self.axes, self.at, places)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return IndexAdd(self.axes, self.at, self.ids, node.inputs[0].shape)(out_grad)


class IndexAdd(TensorOp):
    """Zeros of a shape, to whose slices at `ids` those of a are added, in float32."""

    reads_inputs = reads_result = False

    def __init__(
        self, axes: tuple[int, ...], at: int, ids: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        self.axes = axes
        self.at = at
        self.ids = ids
        self.shape = shape

    def compute(self, a: NDArray) -> NDArray:
        rest = [i for i in range(len(self.shape)) if i not in self.axes]
        order = [*self.axes, *rest]
        shape = [self.shape[i] for i in order]
        count, columns = (math.prod(n) for n in (shape[: len(self.axes)], shape[len(self.axes) :]))
        front = a.permute((self.at, *(i for i in range(a.ndim) if i != self.at)))
        if a.dtype not in FLOATS:  # the kernel's dtypes
            sums = np.zeros((count, columns), "int64")
            np.add.at(sums, self.ids, front.numpy().reshape(self.ids.size, columns))
            out = _C.array(sums, a.dtype, a.device).reshape(shape)
            return out.permute(tuple(order.index(i) for i in range(len(order))))
        out = zeros((count, columns), "float32", a.device)
        ids = _C.array(self.ids, "int32", a.device)
        _C.embedding_bwd(ids, front.reshape((self.ids.size, columns)), out)
        back = tuple(order.index(i) for i in range(len(order)))
        return out.astype(a.dtype).reshape(shape).permute(back)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return IndexSelect(self.axes, self.at, self.ids)(out_grad)


def gather(a: NDArray, axes: tuple[int, ...], at: int, places: Sequence[np.ndarray]) -> NDArray:
    """a at `places`, an array of integers for each of `axes`, along one axis `at` of the result."""
    rest = [i for i in range(a.ndim) if i not in axes]
    shape = [a.shape[i] for i in rest]
    shape.insert(at, places[0].size)
    if math.prod(shape) == 0:
        return _C.empty(shape, a.dtype, a.device)
    if a.dtype not in FLOATS:  # the kernel's dtypes; integers need no gradient
        front = a.numpy().transpose((*axes, *rest))[tuple(places)]
        return _C.array(np.moveaxis(front, 0, at), a.dtype, a.device)
    columns, lead = 1, len(rest)  # the run of elements that also the result has side by side
    while lead > at and a.strides[rest[lead - 1]] == columns:
        lead -= 1
        columns *= a.shape[rest[lead]]
    stride = math.gcd(*(a.strides[i] for i in (*axes, *rest[:lead]))) or 1
    steps = [np.arange(a.shape[i]) * (a.strides[i] // stride) for i in rest[:lead]]
    steps.insert(at, sum(p * (a.strides[i] // stride) for i, p in zip(axes, places)))
    return _rows_at(a, steps, stride, columns).reshape(shape)


def _rows_at(a: NDArray, steps: list[np.ndarray], stride: int, columns: int) -> NDArray:
    """Rows of `columns` elements that begin at all sums of one element of each of `steps`, counted
    in strides from the first element of a. They are looked up as overlapping rows of one matrix; of
    several, where int32 cannot number its rows."""
    lows = [int(step.min()) for step in steps]
    last = sum(int(step.max()) - low for step, low in zip(steps, lows))
    if last >= ROWS:
        i = next(i for i, step in enumerate(steps) if step.size > 1)
        halves = np.array_split(steps[i], 2)
        parts = [_rows_at(a, [*steps[:i], s, *steps[i + 1 :]], stride, columns) for s in halves]
        out = _C.empty((sum(part.shape[0] for part in parts), columns), a.dtype, a.device)
        _C.assign(out[: parts[0].shape[0]], parts[0])
        _C.assign(out[parts[0].shape[0] :], parts[1])
        return out
    ids = np.zeros(1, np.int32)
    for step, low in zip(steps, lows):
        ids = np.add.outer(ids, (step - low).astype(np.int32)).reshape(-1)
    backwards = [i for i in range(a.ndim) if a.strides[i] < 0]
    first = sum(lows) * stride - sum((a.shape[i] - 1) * a.strides[i] for i in backwards)
    lowest = a.flip(tuple(backwards)) if backwards else a  # begins at the lowest address
    memory = lowest.as_strided((first + last * stride + columns,), (1,))[first:]
    rows = memory.as_strided((last + 1, columns), (stride, 1))
    return _C.embedding_fwd(_C.array(ids, "int32", a.device), rows)


def index_select(a: Tensor, axis: int, indices: Any) -> Tensor:
    """The slices of `a` at `indices` along `axis`, in that order, repeats allowed.

    indices: 1-D whole numbers; a negative one counts from the end. ValueError outside the axis.

    >>> print(ndl.ops.index_select(ndl.Tensor([[1, 2, 3]]), 1, [2, 2, -3]))
    [[3. 3. 1.]]
    """
    axis = normal_axes("index_select", axis, len(a.shape))[0]
    n = a.shape[axis]
    if isinstance(indices, Tensor):
        indices = indices.cached_data
    values = indices.numpy() if isinstance(indices, NDArray) else np.asarray(indices)
    if values.ndim != 1:
        raise ValueError(f"index_select: indices must have one axis, not {values.ndim}")
    ids = id_array("index_select", values, _C.cpu(), n, lowest=-n).numpy()
    return IndexSelect((axis,), axis, np.where(ids < 0, ids + n, ids))(a)


# ---- NumPy's rules -------------------------------------------------------------------------------


def get_item(a: Tensor, index: Any) -> Tensor:
    """a[index] by NumPy's rules: integers drop their axes; slices, None and ...; arrays or lists of
    integers or bool, alone, together and beside slices. A view, where no array is in the index.

    Arrays are NumPy's, NDArrays or Tensors, on any device; they are read on the host. IndexError
    for what NumPy refuses; bool without axes is refused, too.

    >>> x = ndl.Tensor([[1, 2, 3], [4, 5, 6]])
    >>> print(ndl.ops.get_item(x, (..., slice(None, None, -2))))
    [[3. 1.]
     [6. 4.]]
    >>> print(x[[1, 0], [0, 2]], x[x > 3])
    [4. 3.] [4. 5. 6.]
    """
    items = index_items(index, a.shape)
    axis = 0
    plain: list[Any] = []  # the index with a slice where an array, and then each integer, picks
    picked: dict[int, Any] = {}  # axis of a[plain]: array or integer
    has_arrays = any(isinstance(item, np.ndarray) for item in items)
    for item in items:
        if has_arrays and isinstance(item, (int, np.ndarray)):
            picked[axis] = item
            item = slice(None)
        plain.append(item)
        axis += not isinstance(item, int)
    if not has_arrays or plain != [slice(None)] * len(plain):
        a = GetItem(tuple(plain))(a)
    if not picked:
        return a
    axes = tuple(picked)
    sizes = [a.shape[i] for i in axes]
    for i, place in picked.items():
        bad = np.asarray(place)[(np.asarray(place) < -a.shape[i]) | (place >= np.int64(a.shape[i]))]
        if bad.size:
            raise IndexError(
                f"index {bad.flat[0]} is out of range for axis {i} of size {a.shape[i]}"
            )
    try:
        places = np.broadcast_arrays(*picked.values())
    except ValueError:
        shapes = ", ".join(str(np.shape(place)) for place in picked.values())
        raise IndexError(f"the arrays of an index have shapes that differ: {shapes}") from None
    shape = places[0].shape
    ids = np.zeros(places[0].size, np.int64)
    for place, n in zip(places, sizes):
        ids = ids * n + place.reshape(-1).astype(np.int64) % max(n, 1)
    at = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0  # NumPy's rule
    out = IndexSelect(axes, at, ids)(a)
    return out if len(shape) == 1 else reshape(out, out.shape[:at] + shape + out.shape[at + 1 :])


def index_items(index: Any, shape: tuple[int, ...]) -> list[Any]:
    """The index item by item: int, slice, None or an array of int64, with a slice for each axis
    that ... or its end stands for, and its coordinates for an array of bool."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, (Tensor, NDArray, np.ndarray, list)):
            array = item.numpy() if isinstance(item, (Tensor, NDArray)) else np.asarray(item)
            if array.size == 0 and isinstance(item, list):
                array = array.astype(np.int64)
            if array.ndim == 0 and array.dtype.kind in "iu":
                items.append(int(array))
            elif array.ndim > 0 and array.dtype.kind in "iub":
                items.append(array)
            else:
                raise IndexError(
                    "an array in an index must hold integers, or bool and have axes, "
                    f"but is {array.dtype} with {array.ndim} axes (dtype='int32' makes ids)"
                )
        elif item is None or item is Ellipsis or isinstance(item, slice):
            items.append(item)
        elif isinstance(item, (bool, np.bool_)):
            raise IndexError(
                f"{item} alone is no index: None adds an axis, an array of bool picks elements, "
                "0 or 1 is a place"
            )
        elif not hasattr(item, "__index__"):
            raise IndexError(
                "an index must be an integer, a slice, ..., None, or an array or list of integers "
                f"or bool, not {type(item).__name__}"
            )
        else:
            items.append(item.__index__())
    widths = [0 if i is None else i.ndim if _is_mask(i) else 1 for i in items if i is not Ellipsis]
    missing = len(shape) - sum(widths)
    if missing < 0:
        raise IndexError(f"too many indices: {sum(widths)} for {len(shape)} axes")
    dots = [n for n, item in enumerate(items) if item is Ellipsis] or [len(items)]
    if len(dots) > 1:
        raise IndexError("an index can have one ... only")
    items[dots[0] : dots[0] + 1] = [slice(None)] * missing
    out: list[Any] = []
    axis = 0
    for item in items:
        if not _is_mask(item):
            out.append(item)
            axis += item is not None
            continue
        if item.shape != shape[axis : axis + item.ndim]:
            raise IndexError(
                f"an array of bool has shape {item.shape}, but picks from axes of sizes "
                f"{shape[axis : axis + item.ndim]}"
            )
        out += np.nonzero(item)
        axis += item.ndim
    return out


def _is_mask(item: Any) -> bool:
    return isinstance(item, np.ndarray) and item.dtype == np.bool_
