"""Looking up rows: the embedding of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.common import id_array, rows_of


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
