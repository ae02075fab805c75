"""Looking up rows: embedding of token ids, and index_select along any axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import FusedOp, Tensor, TensorOp
from needle.backend_ndarray import zeros
from needle.ops.common import id_array, normal_axes, rows_of, sink_of


class EmbeddingOp(FusedOp):
    """y[n] = w[ids[n]];  dw[ids[n]] += dy[n], in float32."""

    reads_inputs = reads_result = False

    def __init__(self, ids: NDArray, shape: tuple) -> None:
        self.ids = ids  # (N,) int32
        self.shape = shape

    def compute(self, w: NDArray) -> NDArray:
        return _C.embedding_fwd(self.ids, w).reshape(self.shape + (w.shape[1],))

    def backward(
        self, dout: NDArray, node: Tensor, sinks: Sequence[NDArray | None]
    ) -> list[NDArray | None]:
        grads: list[NDArray | None] = [None]
        _C.embedding_bwd(self.ids, rows_of(dout), sink_of(sinks, grads, node, 0))
        return grads


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
    if len(w.shape) != 2:
        raise ValueError(f"embedding: w must be (V, C), but its shape is {w.shape}")
    shape = tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)
    return EmbeddingOp(id_array("embedding", ids, w.device, w.shape[0]), shape)(w)


class IndexSelect(TensorOp):
    """Rows of a along one axis; linear in a, and the inverse in gradient of IndexAdd."""

    reads_inputs = reads_result = False

    def __init__(self, axis: int, ids: NDArray) -> None:
        self.axis = axis
        self.ids = ids

    def compute(self, a: NDArray) -> NDArray:
        front = _axis_first(a, self.axis)
        rows = front.reshape((front.shape[0], -1 if a.size else 0))
        out = _C.embedding_fwd(self.ids, rows)
        return _axis_back(out.reshape((self.ids.size,) + front.shape[1:]), self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return IndexAdd(self.axis, self.ids, node.inputs[0].shape[self.axis])(out_grad)


class IndexAdd(TensorOp):
    """Zeros of `size` along the axis, with slice n of a added at ids[n]; the sum is in float32."""

    reads_inputs = reads_result = False

    def __init__(self, axis: int, ids: NDArray, size: int) -> None:
        self.axis = axis
        self.ids = ids
        self.size = size

    def compute(self, a: NDArray) -> NDArray:
        front = _axis_first(a, self.axis)
        rows = front.reshape((front.shape[0], -1 if a.size else 0))
        out = zeros((self.size, rows.shape[1]), "float32", a.device)
        _C.embedding_bwd(self.ids, rows, out)
        return _axis_back(out.astype(a.dtype).reshape((self.size,) + front.shape[1:]), self.axis)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return IndexSelect(self.axis, self.ids)(out_grad)


def _axis_first(a: NDArray, axis: int) -> NDArray:
    return a.permute((axis,) + tuple(i for i in range(a.ndim) if i != axis))


def _axis_back(a: NDArray, axis: int) -> NDArray:
    order = list(range(1, a.ndim))
    order.insert(axis, 0)
    return a.permute(tuple(order))


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
    return IndexSelect(axis, _C.array(np.where(ids < 0, ids + n, ids), "int32", a.device))(a)
