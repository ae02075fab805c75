"""Selection by places of elements: gather, take_along_axis, scatter_add, index_add, nonzero, and
assignment to places, scatter among it. The arrays of an assignment's index are read on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Tensor, TensorOp, is_grad_enabled
from needle.autograd.graph import assigned, find_topo_sort, shares_memory, take_place, views_below
from needle.ops.broadcast import astype, reduced_to, reshape
from needle.ops.common import const, normal_axis
from needle.ops.elementwise import add, where
from needle.ops.indexing import (
    add_at_places,
    along,
    five_axes,
    get_item,
    index_items,
    is_array,
    nonzero_places,
    picked_axes_at,
    picks,
    place_item,
    places_on,
    select_places,
    view_at,
)
from needle.ops.shape import stack


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
    return select_places(a, (axis,), axis, index)


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
        return gather(a, 0, index.reshape((index.size,)))
    axis = normal_axis("take_along_axis", axis, a.ndim)
    index = places_on("take_along_axis", indices, a, axis)
    if index.ndim != a.ndim:
        raise ValueError(f"take_along_axis: indices have {index.ndim} axes, but a has {a.ndim}")
    own = [1 if i == axis else n for i, n in enumerate(a.shape)]
    wide = list(
        np.broadcast_shapes(own, [1 if i == axis else n for i, n in enumerate(index.shape)])
    )
    if wide != own:
        a = a.broadcast_to([a.shape[axis] if i == axis else n for i, n in enumerate(wide)])
    wide[axis] = index.shape[axis]
    return gather(a, axis, index.broadcast_to(wide))


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
    shape = tuple(a.shape[i] if i == axis else n for i, n in enumerate(ids.shape))
    sums = add_at_places(part, (axis,), axis, ids, shape)
    if shape != a.shape:
        sums = place_item(sums, _beside(shape, axis), a.shape)
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
    ids = along(ids, axis, a.ndim)
    return _added(a, add_at_places(source, (axis,), axis, ids, a.shape))


def _added(a: Tensor, sums: Tensor) -> Tensor:
    return astype(add(a, sums), "bool") if a.dtype == sums.dtype == "bool" else add(a, sums)


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
            _C.assign(view_at(a, self.index), _fitting(value, view_at(a, self.index).ndim))
            return
        plain, axes, at, ids, shape = picks(self.index, a.shape, a.device)
        view = view_at(a, plain)
        view = view.permute(picked_axes_at(view.ndim, axes, at))
        before, after = view.shape[:at], view.shape[at + len(axes) :]
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
        x = place.reshape((*before, math.prod(view.shape[at : at + len(axes)]), *after))
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
    `value` was computed from it and its ops do not read `a` again.

    >>> x, y = ndl.zeros(3), ndl.Tensor([2])
    >>> x[1:2] = y * y
    >>> x.sum().backward()
    >>> print(x, y.grad)
    [0. 4. 0.] [4.]
    """
    if not isinstance(value, Tensor):
        value = const(_C.array(value, a.dtype, a.device))
    items = tuple(
        np.array(item.numpy() if isinstance(item, NDArray) else item) if is_array(item) else item
        for item in index_items(index, a.shape)
    )
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
        node.writes, node.grad, node.requires_grad = new.writes, None, True
    assigned((base, *path), base.cached_data.written)


GRAPH = ("op", "inputs", "operands", "kept", "writes", "assigned")


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
