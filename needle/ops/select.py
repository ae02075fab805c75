"""Selection by places of elements: gather, take_along_axis, scatter_add, index_add, nonzero, and
assignment to places. Indices are read on the host, where they are checked."""

from __future__ import annotations

from numbers import Number
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import FLOATS, Tensor, TensorOp, is_grad_enabled
from needle.backend_ndarray import full
from needle.graph import memory_of
from needle.ops.broadcast import reduced_to, reshape
from needle.ops.common import const, normal_axes
from needle.ops.elementwise import add, where
from needle.ops.indexing import IndexAdd, get_item, index_items, view_at


def _whole(op: str, index: Any) -> np.ndarray:
    """Indices of any kind as whole numbers on the host."""
    values = index.numpy() if isinstance(index, (Tensor, NDArray)) else np.asarray(index)
    if values.dtype.kind not in "iu" and values.size:
        raise TypeError(f"{op}: index must hold whole numbers, not {values.dtype}")
    return values.astype(np.int64)


def _places(op: str, shape: tuple[int, ...], axis: int, index: np.ndarray) -> tuple:
    """For each element of `index` its place in an array of `shape`: `index` along the axis, its own
    place along the others."""
    if index.ndim != len(shape):
        raise ValueError(f"{op}: index has {index.ndim} axes, but the operand has {len(shape)}")
    n = shape[axis]
    for i, (have, most) in enumerate(zip(index.shape, shape)):
        if i != axis and have > most:
            raise ValueError(f"{op}: axis {i} of index is {have}, but of the operand {most}")
    bad = index[(index < -n) | (index >= n)]
    if bad.size:
        raise IndexError(f"{op}: index {bad[0]} is out of range for axis {axis} of size {n}")
    places: list[Any] = list(np.ogrid[tuple(slice(size) for size in index.shape)])
    places[axis] = index % max(n, 1)
    return tuple(places)


def gather(a: Tensor, axis: int, index: Any) -> Tensor:
    """The elements of `a` at `index` along `axis`: out[i][j] = a[index[i][j]][j] for axis 0, as
    PyTorch has it. index: as many axes as `a`, none but `axis` longer than that of `a`.

    >>> print(ndl.gather(ndl.Tensor([[1, 2], [3, 4]]), 1, [[0, 0], [1, 0]]))
    [[1. 1.]
     [4. 3.]]
    """
    axis = normal_axes("gather", axis, a.ndim)[0]
    return get_item(a, _places("gather", a.shape, axis, _whole("gather", index)))


def take_along_axis(a: Tensor, indices: Any, axis: int | None = -1) -> Tensor:
    """`gather` with NumPy's shapes: the other axes of `a` and `indices` broadcast. None: of the
    flat elements.

    >>> x = ndl.Tensor([[3, 1], [2, 4]])
    >>> print(ndl.take_along_axis(x, x.argmax(1, keepdims=True), axis=1))
    [[3.]
     [4.]]
    """
    index = _whole("take_along_axis", indices)
    if axis is None:
        return gather(reshape(a, (-1,)), 0, index.reshape(-1))
    axis = normal_axes("take_along_axis", axis, a.ndim)[0]
    if index.ndim != a.ndim:
        raise ValueError(f"take_along_axis: indices have {index.ndim} axes, but a has {a.ndim}")
    own = [1 if i == axis else n for i, n in enumerate(a.shape)]
    wide = list(
        np.broadcast_shapes(own, [1 if i == axis else n for i, n in enumerate(index.shape)])
    )
    if wide != own:
        a = a.broadcast_to([a.shape[axis] if i == axis else n for i, n in enumerate(wide)])
    wide[axis] = index.shape[axis]
    return gather(a, axis, np.broadcast_to(index, wide))


def scatter_add(a: Tensor, axis: int, index: Any, src: Tensor) -> Tensor:
    """`a` with the elements of `src` added at `index` along `axis`, the inverse of gather, as
    PyTorch has it: no axis of index is longer than that of `src`, none but `axis` than that of `a`.
    Sums are float32.

    >>> print(ndl.scatter_add(ndl.zeros(3), 0, [0, 2, 2], ndl.Tensor([1, 2, 3])))
    [1. 0. 5.]
    """
    axis = normal_axes("scatter_add", axis, a.ndim)[0]
    ids = _whole("scatter_add", index)
    places = np.broadcast_arrays(*_places("scatter_add", a.shape, axis, ids))
    if src.ndim != ids.ndim or any(n > most for n, most in zip(ids.shape, src.shape)):
        raise ValueError(f"scatter_add: src is {src.shape}, too small for index {ids.shape}")
    part = get_item(src, tuple(slice(n) for n in ids.shape))
    flat = np.zeros(ids.size, np.int64)
    for place, n in zip(places, a.shape):
        flat = flat * n + place.reshape(-1)
    return add(a, IndexAdd(tuple(range(a.ndim)), 0, flat, a.shape)(reshape(part, (ids.size,))))


def index_add(a: Tensor, axis: int, index: Any, source: Tensor) -> Tensor:
    """`a` with the slices of `source` along `axis` added to those at `index`, in float32.

    >>> print(ndl.index_add(ndl.zeros(3), 0, [2, 2], ndl.Tensor([1, 2])))
    [0. 0. 3.]
    """
    axis = normal_axes("index_add", axis, a.ndim)[0]
    ids, n = _whole("index_add", index), a.shape[axis]
    shape = (*a.shape[:axis], ids.size, *a.shape[axis + 1 :])
    if ids.ndim != 1 or source.shape != shape:
        raise ValueError(
            f"index_add: source must be {shape} for {ids.size} indices of one axis, "
            f"but is {source.shape}"
        )
    if ids.size and not -n <= ids.min() <= ids.max() < n:
        raise IndexError(f"index_add: an index is out of range for axis {axis} of size {n}")
    return add(a, IndexAdd((axis,), axis, ids % max(n, 1), a.shape)(source))


def nonzero(a: Tensor, as_tuple: bool = True) -> Any:
    """The places of the elements that are not 0: an int64 Tensor for each axis, as NumPy has it, so
    that `a[nonzero(a)]` are those elements; with as_tuple=False one of (places, axes), as PyTorch.

    >>> rows, columns = ndl.nonzero(ndl.Tensor([[0, 1], [2, 0]]))
    >>> print(rows, columns)
    [0 1] [1 0]
    """
    found = [_C.array(places, "int64", a.device) for places in np.nonzero(a.numpy())]
    if as_tuple:
        return tuple(map(const, found))
    return const(_C.array(np.argwhere(a.numpy()), "int64", a.device))


# ---- assignment ----------------------------------------------------------------------------------


class SetItem(TensorOp):
    """Write `value` into the memory of `a` at an index. The gradient is that of the places: 0 for
    `a` where it was overwritten, the rest for `value`."""

    reads_inputs = reads_result = False

    def __init__(self, index: tuple) -> None:
        self.index = index

    def compute(self, a: NDArray, value: NDArray) -> NDArray:
        if not any(isinstance(item, np.ndarray) for item in self.index):
            place = view_at(a, self.index)
            while value.ndim > place.ndim and value.shape[0] == 1:
                value = value.reshape(value.shape[1:])
            _C.assign(place, value.astype(a.dtype))
            return a
        values = a.numpy()
        values[self.index] = value.numpy()
        _C.assign(a, _C.array(values, a.dtype, a.device))
        return a

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, value = node.inputs
        kept = np.ones(a.shape, bool)
        kept[self.index] = False
        return (
            where(kept, out_grad, 0.0) if a.requires_grad else None,
            reduced_to(get_item(out_grad, self.index), value) if value.requires_grad else None,
        )


def set_item(a: Tensor, index: Any, value: Any) -> None:
    """a[index] = value, in place, by NumPy's rules of get_item. `a` becomes the result of the
    assignment in the graph: gradients flow to `value`, and not to what was overwritten.

    RuntimeError for a leaf that requires gradients (write under `no_grad()`), and for a view of
    another Tensor of the graph. A backward through a result that was computed from `a` before the
    assignment is refused.

    >>> x, y = ndl.zeros(3), ndl.Tensor([2])
    >>> x[1:2] = y * y
    >>> x.sum().backward()
    >>> print(x, y.grad)
    [0. 4. 0.] [4.]
    """
    if isinstance(value, Number):
        if a.dtype not in FLOATS:
            value = int(value)  # type: ignore[call-overload]  # as NumPy truncates
        value = const(full((), value, a.dtype, a.device))
    value = a._operand(value)
    items = tuple(
        item.copy() if isinstance(item, np.ndarray) else item
        for item in index_items(index, a.shape)
    )
    op = SetItem(items)
    if not is_grad_enabled() or not (a.requires_grad or value.requires_grad):
        op.compute(a.cached_data, value.cached_data)
        return
    if a.requires_grad and a.op is None:
        raise RuntimeError(
            "assignment: this Tensor is a leaf that requires gradients: write into it under "
            "no_grad(), or into x.clone()"
        )
    base: Any = a
    while isinstance(base.op, SetItem):  # itself before its last assignment
        base = base.inputs[0]
    if set(memory_of(a)) & set(memory_of(*base.inputs)):
        raise RuntimeError(
            "assignment: this Tensor is a view of another one of the graph: write into that one, "
            "or into x.clone()"
        )
    old = Tensor.make_const(a.cached_data, requires_grad=a.requires_grad)
    graph = ("op", "inputs", "operands", "kept", "writes")
    for name in graph:
        setattr(old, name, getattr(a, name))
    new = op(old, value)
    for name in (*graph, "requires_grad"):
        setattr(a, name, getattr(new, name))
    a.grad, a.assigned = None, a.cached_data.written
