"""Picking elements: indexing and assignment by NumPy's rules, index_select, gather, scatter,
index_add, embedding, and their gradients.

Slices are views. Elements picked by arrays are taken whatever the strides; their gradient is summed
in float32 by the kernel of the embedding's backward. Arrays of an index that are on the host are
checked there; those of a GPU stay on it, but those of an assignment are read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.autograd.grad_mode import is_grad_enabled
from needle.autograd.graph import assigned, find_topo_sort, shares_memory, take_place, views_below
from needle.autograd.tensor import FLOATS, GRAPH, Accumulators, FusedOp, Tensor, TensorOp
from needle.backend_ndarray import zeros
from needle.ops.broadcast import astype, differentiable, reduced_to, reshape
from needle.ops.common import const, id_array, kept_shape, nonzero_places, normal_axis, rows_of
from needle.ops.elementwise import add, where

ROWS = 2**31  # fewer than these can be told apart by the ids of a kernel
INTEGERS = ("int32", "int64", "uint8", "uint16")

# ---- integers, slices, None, ... -----------------------------------------------------------------


@differentiable("GetItem", lambda g, like, index: place_item(g, index, like.shape), view=True)
def _view(a: NDArray, index: tuple) -> NDArray:
    return a.at(index)


@differentiable("PlaceItem", lambda g, index: _view(g, index))
def place_item(a: NDArray, index: tuple, shape: tuple[int, ...]) -> NDArray:
    """Zeros of a shape with `a` at the index: the inverse in gradient of a view."""
    out = zeros(shape, a.dtype, a.device)
    _C.assign(out.at(index), a)
    return out


# ---- arrays of integers --------------------------------------------------------------------------


def along(ids: NDArray, at: int, ndim: int) -> NDArray:
    """Ids of one axis as an array of `ndim` axes with that axis `at`."""
    return ids.reshape((1,) * at + (ids.size,) + (1,) * (ndim - at - 1))


def places_on(op: str, index: Any, a: Tensor, axis: int) -> NDArray:
    """Return an index of whole numbers for an axis of `a` as int64 on its device. IndexError for a
    number outside the axis; an index on a GPU is not checked, as that would wait."""
    n, device = a.shape[axis], a.device
    on_gpu = isinstance(index, (Tensor, NDArray)) and not index.device.is_host
    if on_gpu and not device.is_host and index.dtype in INTEGERS:
        data = index.cached_data if isinstance(index, Tensor) else index
        return data.astype("int64").to(device)
    values = index.numpy() if isinstance(index, (Tensor, NDArray)) else np.asarray(index)
    if values.dtype.kind not in "iu" and values.size:
        raise TypeError(f"{op}: index must hold whole numbers, not {values.dtype}")
    _check_range(f"{op}: ", values, axis, n)
    return _C.array(values.astype(np.int64), "int64", device)


def _check_range(op: str, values: np.ndarray, axis: int, n: int) -> None:
    bad = values[(values < -n) | (values >= np.int64(n))]
    if bad.size:
        raise IndexError(f"{op}index {bad.flat[0]} is out of range for axis {axis} of size {n}")


def from_beginning(ids: NDArray, n: int) -> tuple[NDArray, NDArray]:
    """Ids along an axis of size n counted from its beginning; 1 where they are on it, else 0."""
    ids = ids + n * _C.less(ids, 0).astype("int64")
    return ids, (_C.greater_equal(ids, 0) & _C.less(ids, n)).astype("int64")


def five_axes(x: NDArray, at: int) -> NDArray:
    """Merge axes of x into two before `at` and two after it, for the kernels take and put. A view,
    unless more than two axes on a side have strides of their own."""
    lead, tail = x.shape[:at], x.shape[at + 1 :]
    around = lead[:-1], lead[-1:], (x.shape[at],), tail[:1], tail[1:]
    return x.reshape(tuple(math.prod(sizes) for sizes in around))


@differentiable("IndexSelect", lambda g, like, at, ids: add_at_places(g, at, ids, like.shape[at]))
def select_places(a: NDArray, at: int, ids: NDArray) -> NDArray:
    """The elements of a at `ids` along axis `at`.

    ids: int64 on the device of a, with the axes of the result, each of its size or 1. On a GPU one
    outside of the axis gives NaN, of integers -1.
    """
    shape = (*a.shape[:at], ids.shape[at], *a.shape[at + 1 :])
    y = _C.take(five_axes(a, at), five_axes(ids.broadcast_to(shape), at))
    return y.reshape(shape)


@differentiable("IndexAdd", lambda g, at, ids: select_places(g, at, ids))
def add_at_places(a: NDArray, at: int, ids: NDArray, n: int) -> NDArray:
    """Zeros, n along axis `at`, to which the elements of a are added at `ids`, in float32."""
    rest = [i for i in range(a.ndim) if i != at]
    found, inside = from_beginning(ids, n)
    columns = math.prod(a.shape[i] for i in rest)
    order, count = [at, *rest], n
    if ids.size != ids.shape[at]:  # an id an element instead of one a slice
        rows = np.arange(0, columns * n, max(n, 1)).reshape([a.shape[i] for i in rest])
        found = found + _C.array(np.expand_dims(rows, at), "int64", a.device)
        order, count, columns = [*rest, at], columns * n, 1
    if count >= ROWS:
        raise ValueError(f"indices pick among fewer than 2^31 places, not among {count}")
    found = ((found + 1) * inside - 1).permute(order)
    found = found.reshape((found.size,))  # -1: nowhere
    front = a.permute(order).reshape((found.size, columns))
    if a.dtype in FLOATS:
        out = zeros((count, columns), "float32", a.device)
        _C.embedding_bwd(found.astype("int32"), front, out)
        out = out.astype(a.dtype)
    else:
        sums = np.zeros((count, columns), "int64")
        np.add.at(sums, found.numpy(), front.numpy())
        out = _C.array(sums, a.dtype, a.device)
    shape = [n if i == at else a.shape[i] for i in order]
    return out.reshape(shape).permute([order.index(i) for i in range(a.ndim)])


def index_select(a: Tensor, axis: int, indices: Any) -> Tensor:
    """The slices of `a` at `indices` along `axis`, in that order, repeats allowed.

    indices: 1-D whole numbers; a negative one counts from the end. ValueError outside the axis;
    indices on a GPU are not checked: one outside gives NaN, of integers -1.

    >>> print(ndl.ops.index_select(ndl.Tensor([[1, 2, 3]]), 1, [2, 2, -3]))
    [[3. 3. 1.]]
    """
    axis = normal_axis("index_select", axis, len(a.shape))
    n, ndim = a.shape[axis], indices.ndim if hasattr(indices, "ndim") else np.ndim(indices)
    if ndim != 1:
        raise ValueError(f"index_select: indices must have one axis, not {ndim}")
    ids = id_array("index_select", indices, a.device, n, lowest=-n).astype("int64")
    return select_places(a, axis, along(ids, axis, a.ndim))


# ---- rows of a table -----------------------------------------------------------------------------


class EmbeddingOp(FusedOp):
    """y[n] = w[ids[n]];  dw[ids[n]] += dy[n], in float32."""

    reads_inputs = reads_result = False

    def __init__(self, ids: NDArray, shape: tuple) -> None:
        self.ids = ids  # (N,) int32
        self.shape = shape

    def compute(self, w: NDArray) -> NDArray:
        return _C.embedding_fwd(self.ids, w).reshape(self.shape + (w.shape[1],))

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        _C.embedding_bwd(self.ids, rows_of(dout), into[0])
        return [None]


def embedding(ids: Any, w: Tensor) -> Tensor:
    """The rows of w at `ids`: (...) and (V, C) give (..., C).

    ids: Tensor, NDArray, NumPy array or list of whole numbers in [0, V); one outside raises
    ValueError while the ids are on the host (on CUDA its row becomes NaN). The gradient of w is
    float32 in every dtype.

    >>> w = ndl.Tensor([[0, 1], [2, 3], [4, 5]])
    >>> print(ndl.ops.embedding([2, 0], w))
    [[4. 5.]
     [0. 1.]]
    """
    shape = tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)
    return EmbeddingOp(id_array("embedding", ids, w.device, w.shape[0]), shape)(w)


# ---- NumPy's rules -------------------------------------------------------------------------------


def get_item(a: Tensor, index: Any) -> Tensor:
    """a[index] by NumPy's rules: integers drop their axes; slices, None and ...; arrays or lists of
    integers or bool, alone, together and beside slices. A view, where no array is in the index.

    Arrays are NumPy's, NDArrays or Tensors. IndexError for what NumPy refuses; bool without axes is
    refused, too. Integers on a GPU are not checked: one outside gives NaN, of integers -1.

    >>> x = ndl.Tensor([[1, 2, 3], [4, 5, 6]])
    >>> print(ndl.ops.get_item(x, (..., slice(None, None, -2))))
    [[3. 1.]
     [6. 4.]]
    >>> print(x[[1, 0], [0, 2]], x[x > 3])
    [4. 3.] [4. 5. 6.]
    """
    items = index_items(index, a.shape)
    if not any(map(is_array, items)):
        return _view(a, tuple(items))
    plain, order, axes, ids, shape = picks(items, a.shape, a.device)
    if plain != (slice(None),) * len(plain):
        a = _view(a, plain)
    at = axes.start
    if axes.stop > at + 1:
        a = merged(a.permute(order), axes)
    out = select_places(a, at, along(ids, at, a.ndim))
    return out if len(shape) == 1 else reshape(out, out.shape[:at] + shape + out.shape[at + 1 :])


def merged(x: Any, axes: slice) -> Any:
    """x, an array or a Tensor, with these axes as one."""
    return x.reshape((*x.shape[: axes.start], math.prod(x.shape[axes]), *x.shape[axes.stop :]))


def picks(items: Sequence[Any], shape: tuple[int, ...], device: Device) -> tuple:
    """Return for an index with arrays: the index with a slice where an array, and then each
    integer, picks; the order of the axes of the result of that, in which those from which they pick
    are neighbours; which of them these are; the numbers of the picked places on these, int64 of one
    axis; their shape."""
    axis = 0
    plain: list[Any] = []
    picked: dict[int, Any] = {}  # axis of a[plain]: array or integer
    sizes = []
    left = list(shape)
    before = parted = 0
    for item in items:
        if item is Ellipsis:
            before = len(picked)
            continue
        if isinstance(item, int) or is_array(item):
            parted = before
            sizes.append(left[0])
            picked[axis] = item
            item = slice(None)
        if item is not None:
            left.pop(0)
        plain.append(item)
        axis += 1
    for n, (i, place) in zip(sizes, picked.items()):
        if not isinstance(place, NDArray):
            _check_range("", np.asarray(place), i, n)
    try:
        joint = np.broadcast_shapes(*(getattr(place, "shape", ()) for place in picked.values()))
    except ValueError:
        shapes = ", ".join(str(getattr(place, "shape", ())) for place in picked.values())
        raise IndexError(f"the arrays of an index have shapes that differ: {shapes}") from None
    axes = list(picked)
    at = axes[0] if axes[-1] - axes[0] == len(axes) - 1 and not parted else 0  # NumPy's rule
    order = [i for i in range(axis) if i not in picked]
    order[at:at] = axes
    ids = _numbers(list(picked.values()), sizes, joint, device)
    return tuple(plain), order, slice(at, at + len(axes)), ids, joint


def _numbers(
    places: list[Any], sizes: list[int], shape: tuple[int, ...], device: Device
) -> NDArray:
    """The row-major numbers, among all of `sizes`, of places given axis by axis."""
    if not any(isinstance(place, NDArray) for place in places):
        numbers = np.ravel_multi_index(tuple(places), tuple(sizes), mode="wrap")
        return _C.array(numbers.reshape(-1), "int64", device)
    arrays = [
        place.astype("int64").to(device)
        if isinstance(place, NDArray)
        else _C.array(np.asarray(place), "int64", device)
        for place in places
    ]
    if len(arrays) == 1:
        return arrays[0].reshape((arrays[0].size,))
    outside = math.prod(sizes) + 1
    ids, inside = from_beginning(arrays[0], sizes[0])
    for array, n in zip(arrays[1:], sizes[1:]):
        place, good = from_beginning(array, n)
        ids, inside = ids * n + place, inside * good
    ids = ((ids + outside) * inside - outside).broadcast_to(shape)
    return ids.reshape((ids.size,))


def index_items(index: Any, shape: tuple[int, ...]) -> list[Any]:
    """The index item by item: int, slice, None or an array of integers, NumPy's or an NDArray of a
    GPU, with a slice for each axis that ... or its end stands for, and its coordinates for an array
    of bool. Beside arrays ... stays where it stands for no axis."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, (Tensor, NDArray, np.ndarray, list, range)):
            array = item.cached_data if isinstance(item, Tensor) else item
            if not isinstance(array, NDArray) or array.device.is_host or array.ndim == 0:
                array = array.numpy() if isinstance(array, NDArray) else np.asarray(array)
            if array.size == 0 and isinstance(item, (list, range)):
                array = array.astype(np.int64)
            is_whole = getattr(array.dtype, "name", array.dtype).startswith(("int", "uint"))
            if array.ndim == 0 and is_whole:
                items.append(int(array))
            elif array.ndim > 0 and (is_whole or array.dtype == "bool"):
                items.append(array)
            else:
                raise _no_index(f"an array of {array.dtype} with {array.ndim} axes")
        elif item is None or item is Ellipsis or isinstance(item, slice):
            items.append(item)
        elif isinstance(item, (bool, np.bool_)) or not hasattr(item, "__index__"):
            raise _no_index(f"{item!r:.40}")
        else:
            items.append(item.__index__())
    widths = [0 if i is None else i.ndim if _is_mask(i) else 1 for i in items if i is not Ellipsis]
    missing = len(shape) - sum(widths)
    if missing < 0:
        raise IndexError(f"too many indices: {sum(widths)} for {len(shape)} axes")
    dots = [n for n, item in enumerate(items) if item is Ellipsis] or [len(items)]
    if len(dots) > 1:
        raise IndexError("an index can have one ... only")
    if missing or not any(map(is_array, items)):  # ... without axes still parts arrays
        items[dots[0] : dots[0] + 1] = [slice(None)] * missing
    out: list[Any] = []
    axis = 0
    for item in items:
        if not _is_mask(item):
            out.append(item)
            axis += item is not None and item is not Ellipsis
            continue
        if item.shape != shape[axis : axis + item.ndim]:
            raise IndexError(
                f"an array of bool has shape {item.shape}, but picks from axes of sizes "
                f"{shape[axis : axis + item.ndim]}"
            )
        out += nonzero_places(item) if isinstance(item, NDArray) else np.nonzero(item)
        axis += item.ndim
    return out


def _no_index(what: str) -> IndexError:
    return IndexError(
        "an index must be an integer, a slice, ..., None, or an array or list of integers "
        f"(dtype='int32' makes them) or of bool with axes, not {what}"
    )


def is_array(item: Any) -> bool:
    return isinstance(item, (np.ndarray, NDArray))


def _is_mask(item: Any) -> bool:
    return is_array(item) and item.dtype == "bool"


# ---- places of elements --------------------------------------------------------------------------


def _check_shape(op: str, shape: tuple[int, ...], axis: int, index: NDArray) -> None:
    if index.ndim != len(shape):
        raise ValueError(f"{op}: index has {index.ndim} axes, but the operand has {len(shape)}")
    for i, (have, most) in enumerate(zip(index.shape, shape)):
        if i != axis and have > most:
            raise ValueError(f"{op}: axis {i} of index is {have}, but of the operand {most}")


def _beside(shape: tuple[int, ...], axis: int) -> tuple[slice, ...]:
    """The index of the first elements, as many as `shape` has, along all axes but one."""
    return tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(shape))


def _covering(op: str, src: Tensor, ids: NDArray) -> Tensor:
    """The elements of `src` that belong to ids."""
    if any(n > most for n, most in zip(ids.shape, src.shape)) or src.ndim != ids.ndim:
        raise ValueError(f"{op}: src is {src.shape}, too small for index {ids.shape}")
    return get_item(src, tuple(slice(n) for n in ids.shape))


def gather(a: Tensor, axis: int, index: Any) -> Tensor:
    """The elements of `a` at `index` along `axis`: out[i][j] = a[index[i][j]][j] for axis 0, as
    PyTorch has it. index: as many axes as `a`, none but `axis` longer than that of `a`. On a GPU it
    is not checked: a number outside gives NaN, of integers -1.

    >>> print(ndl.gather(ndl.Tensor([[1, 2], [3, 4]]), 1, [[0, 0], [1, 0]]))
    [[1. 1.]
     [4. 3.]]
    """
    axis = normal_axis("gather", axis, a.ndim)
    index = places_on("gather", index, a, axis)
    _check_shape("gather", a.shape, axis, index)
    if any(have < n and i != axis for i, (have, n) in enumerate(zip(index.shape, a.shape))):
        a = get_item(a, _beside(index.shape, axis))
    return select_places(a, axis, index)


def take_along_axis(a: Tensor, indices: Any, axis: int | None = -1) -> Tensor:
    """`gather` with NumPy's shapes: the other axes of `a` and `indices` broadcast. None: of the
    flat elements.

    >>> x = ndl.Tensor([[3, 1], [2, 4]])
    >>> print(ndl.take_along_axis(x, x.argmax(1, keepdims=True), axis=1))
    [[3.]
     [4.]]
    """
    if axis is None:
        a = reshape(a, (-1,))
        index = places_on("take_along_axis", indices, a, 0)
        return select_places(a, 0, index.reshape((index.size,)))
    axis = normal_axis("take_along_axis", axis, a.ndim)
    index = places_on("take_along_axis", indices, a, axis)
    if index.ndim != a.ndim:
        raise ValueError(f"take_along_axis: indices have {index.ndim} axes, but a has {a.ndim}")
    own = kept_shape(a.shape, (axis,))
    wide = np.broadcast_shapes(own, kept_shape(index.shape, (axis,)))
    if wide != own:
        a = a.broadcast_to((*wide[:axis], a.shape[axis], *wide[axis + 1 :]))
    return select_places(a, axis, index)


def scatter_add(a: Tensor, axis: int, index: Any, src: Tensor) -> Tensor:
    """`a` with the elements of `src` added at `index` along `axis`, the inverse of gather, as
    PyTorch has it: no axis of index is longer than that of `src`, none but `axis` than that of `a`.
    Sums are float32.

    >>> print(ndl.scatter_add(ndl.zeros(3), 0, [0, 2, 2], ndl.Tensor([1, 2, 3])))
    [1. 0. 5.]
    """
    axis = normal_axis("scatter_add", axis, a.ndim)
    ids = places_on("scatter_add", index, a, axis)
    _check_shape("scatter_add", a.shape, axis, ids)
    part = _covering("scatter_add", src, ids)
    sums = add_at_places(part, axis, ids, a.shape[axis])
    if sums.shape != a.shape:
        sums = place_item(sums, _beside(sums.shape, axis), a.shape)
    return _added(a, sums)


def index_add(a: Tensor, axis: int, index: Any, source: Tensor) -> Tensor:
    """`a` with the slices of `source` along `axis` added to those at `index`, in float32.

    >>> print(ndl.index_add(ndl.zeros(3), 0, [2, 2], ndl.Tensor([1, 2])))
    [0. 0. 3.]
    """
    axis = normal_axis("index_add", axis, a.ndim)
    ids = places_on("index_add", index, a, axis)
    shape = (*a.shape[:axis], ids.size, *a.shape[axis + 1 :])
    if ids.ndim != 1 or source.shape != shape:
        raise ValueError(
            f"index_add: source must be {shape} for {ids.size} indices of one axis, "
            f"but is {source.shape}"
        )
    return _added(a, add_at_places(source, axis, along(ids, axis, a.ndim), a.shape[axis]))


def _added(a: Tensor, sums: Tensor) -> Tensor:
    return astype(add(a, sums), "bool") if a.dtype == sums.dtype == "bool" else add(a, sums)


# ---- assignment ----------------------------------------------------------------------------------


class SetItem(TensorOp):
    """Write `value` into the memory of `a` at an index of a view of it: the last of `views`, from
    `a` on. The gradient is that of the places: 0 for `a` where it was overwritten, the rest for
    `value`."""

    reads_inputs = reads_result = False
    writes_input = True

    def __init__(self, index: tuple, views: Sequence[Tensor] = ()) -> None:
        self.index = index
        self.views = lambda: views  # no arrays that the gradient reads

    def compute(self, whole: NDArray, value: NDArray) -> NDArray:
        a = whole
        for view in self.views():
            a = view.op.compute(a)
        self.write(a, value)
        return whole

    def write(self, a: NDArray, value: NDArray) -> None:
        value = value.astype(a.dtype)
        if not any(isinstance(item, np.ndarray) for item in self.index):
            view = a.at(self.index)
            _C.assign(view, _fitting(value, view.ndim))
            return
        plain, order, axes, ids, shape = picks(self.index, a.shape, a.device)
        view, at = a.at(plain).permute(order), axes.start
        before, after = view.shape[:at], view.shape[axes.stop :]
        value = _fitting(value, len(before) + len(shape) + len(after))
        value = value.broadcast_to((*before, *shape, *after)).reshape((*before, ids.size, *after))
        # Of ids that repeat the last counts.
        numbers = ids.numpy()
        _, first = np.unique(numbers[::-1], return_index=True)
        if first.size < ids.size:
            last = ids.size - 1 - first
            ids = _C.array(numbers[last], "int64", a.device)
            value = value.index_select(at, last)
        place = view.compact()
        x = merged(place, axes)
        ids = along(ids, at, x.ndim).broadcast_to(value.shape)
        _C.put(five_axes(value, at), five_axes(ids, at), five_axes(x, at))
        if not view.is_compact():
            _C.assign(view, place)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, value = node.inputs
        places, views = out_grad, self.views()
        for view in views:
            places = view.op(places)
        written = np.zeros(places.shape, np.float32)
        written[self.index] = 1
        hit = const(_C.array(written, device=a.device))
        for view in reversed(views):
            (hit,) = view.op.gradient_as_tuple(hit, view)
        return (
            where(hit == 0, out_grad, 0.0) if a.requires_grad else None,
            reduced_to(get_item(places, self.index), value) if value.requires_grad else None,
        )


def _fitting(value: NDArray, ndim: int) -> NDArray:
    """`value` without the leading axes of size 1 that it has beyond `ndim`, as NumPy assigns it."""
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    return value


def set_item(a: Tensor, index: Any, value: Any) -> None:
    """a[index] = value, in place, by NumPy's rules of get_item. `a` becomes the result of the
    assignment in the graph: gradients flow to `value`, and not to what was overwritten.

    RuntimeError for a leaf that requires gradients, and a view of one: write under `no_grad()`. A
    backward through a result that was computed from `a` before the assignment is refused, unless
    `value` was computed from it and its ops do not read `a` again. Of places that repeat the last
    counts, and the gradient goes to all, as PyTorch has it.

    >>> x, y = ndl.zeros(3), ndl.Tensor([2])
    >>> x[1:2] = y * y
    >>> x.sum().backward()
    >>> print(x, y.grad)
    [0. 4. 0.] [4.]
    """
    if not isinstance(value, Tensor):
        value = const(_C.array(value, a.dtype, a.device))
    items = tuple(np.array(x) if is_array(x) else x for x in index_items(index, a.shape))
    if not is_grad_enabled() or not (a.requires_grad or value.requires_grad):
        SetItem(items).compute(a.cached_data, value.cached_data)
        return
    base: Any = a
    while base.viewed is not None:
        base = take_place(base)
    base, path = views_below(a)
    if base.requires_grad and base.op is None:
        raise RuntimeError(
            f"assignment: this Tensor is a {'view of a ' if path else ''}leaf that requires "
            "gradients: write into it under no_grad(), or into x.clone()"
        )
    if any(len(view.inputs) > 1 or view.op.reads_inputs for view in path):
        raise RuntimeError(
            "assignment: this Tensor is memory of another one of the graph: write into x.clone()"
        )
    old = _as_before(base)
    views = []
    for view in reversed(path):
        views.append(_as_before(view))
        views[-1].inputs = (views[-2] if views[1:] else old,)
    new = SetItem(items, views)(old, old if value is base else value)
    base.inputs, before = (), {id(base): old}
    for node in find_topo_sort([value]):  # computed from `a` before, as in x[0] += y
        if any(id(x) in before for x in node.inputs):
            if shares_memory(node, base):
                before[id(node)] = node = _as_before(node)
            node.inputs = tuple(before.get(id(x), x) for x in node.inputs)
    new.inputs = old, before.get(id(value), value)
    for name in (*GRAPH[:-1], "requires_grad"):
        setattr(base, name, getattr(new, name))
    for node in (base, *path):
        node.writes, node.grad = new.writes, None
    for view in path:
        view.requires_grad = True
    assigned((base, *path), base.cached_data.written)


def _as_before(x: Any) -> Any:
    """A node in the place of `x` as it stands in the graph, of which `x` becomes another one."""
    node = type(x).make_const(x.cached_data, requires_grad=x.requires_grad)
    for name in GRAPH:
        setattr(node, name, getattr(x, name))
    return node


def scatter(a: Tensor, axis: int, index: Any, src: Tensor | float) -> Tensor:
    """`a` with the elements of `src`, or that number, at `index` along `axis`, as PyTorch has it;
    no axis of index is longer than that of `src`, none but `axis` than that of `a`. The index is
    read on the host; of places that repeat the last counts, and the gradient goes to all.

    >>> print(ndl.scatter(ndl.zeros(3), 0, [2, 0], ndl.Tensor([5, 7])))
    [7. 0. 5.]
    """
    axis = normal_axis("scatter", axis, a.ndim)
    ids = places_on("scatter", index, a, axis)
    _check_shape("scatter", a.shape, axis, ids)
    if isinstance(src, Tensor):
        src = _covering("scatter", src, ids)
    places: list[Any] = list(np.ogrid[tuple(map(slice, ids.shape))])
    places[axis] = ids.numpy()
    out = a.clone()
    set_item(out, tuple(places), src)
    return out
