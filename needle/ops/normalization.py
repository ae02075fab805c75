"""Layer normalisation (Ba, Kiros and Hinton 2016), fused."""

from __future__ import annotations

from collections.abc import Sequence

from needle import _C
from needle._C import NDArray
from needle.autograd import FusedOp, Tensor
from needle.ops.common import rows_of, sink_of


class LayerNorm(FusedOp):
    """y = (x - mean) rstd w + b over the last axis; keeps mean and rstd (float32), not y."""

    reads_result = False

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def compute(self, x: NDArray, w: NDArray, b: NDArray) -> NDArray:
        y, self.mean, self.rstd = _C.layernorm_fwd(rows_of(x), w, b, self.eps)
        return y.reshape(x.shape)

    def backward(
        self, dout: NDArray, node: Tensor, sinks: Sequence[NDArray | None]
    ) -> list[NDArray | None]:
        x, w, _ = node.inputs
        grads: list[NDArray | None] = [None, None, None]
        into = [sink_of(sinks, grads, node, i) for i in (1, 2)]
        dx = _C.layernorm_bwd(
            rows_of(dout), rows_of(x.cached_data), w.cached_data, self.mean, self.rstd, None, *into
        )
        if x.requires_grad:
            grads[0] = dx.reshape(x.shape)
        return grads


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b, mean and biased variance over the last axis.

    x: (..., C); w, b: (C,). The gradients of w and b are float32 in every dtype.

    >>> x = ndl.Tensor([[1, 2, 3]])
    >>> print(ndl.ops.layer_norm(x, ndl.ones(3), ndl.zeros(3)).numpy().round(3))
    [[-1.225  0.     1.225]]
    """
    return LayerNorm(eps)(x, w, b)
