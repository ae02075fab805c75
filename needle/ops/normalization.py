"""Layer normalisation (Ba, Kiros and Hinton 2016), fused.

A residual stream feeds one norm or two and continues beside them: x + f(norm(x)). The last result
of `layer_norm_residual` and `layer_norm_pair` is x itself; used for the residual, its gradient is
added by the kernel of the norms' gradients.
"""

from __future__ import annotations

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, FusedTupleOp, Tensor, TensorTuple
from needle.ops.common import rows_of


class LayerNorm(FusedOp):
    """y = (x - mean) rstd w + b over the last axis; keeps mean and rstd (float32), not y."""

    reads_result = False

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def compute(self, x: NDArray, w: NDArray, b: NDArray) -> NDArray:
        y, self.mean, self.rstd = _C.layernorm_fwd(rows_of(x), w, b, self.eps)
        return y.reshape(x.shape)

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        x, w = (operand.cached_data for operand in node.inputs[:2])
        statistics = self.mean, self.rstd, None
        dx = _C.layernorm_bwd(rows_of(dout), rows_of(x), w, *statistics, into[1], into[2])
        return [dx.reshape(x.shape), None, None]


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b, mean and biased variance over the last axis.

    x: (..., C); w, b: (C,). The gradients of w and b are float32 in every dtype.

    >>> x = ndl.Tensor([[1, 2, 3]])
    >>> print(ndl.ops.layer_norm(x, ndl.ones(3), ndl.zeros(3)).numpy().round(3))
    [[-1.225  0.     1.225]]
    """
    return LayerNorm(eps)(x, w, b)


class LayerNormResidual(FusedTupleOp):
    """(y, x), or (y1, y2, x) with two norms of the same x; keeps mean and rstd (float32), which are
    the same for both. x is handed through: no copy."""

    reads_result = False

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def compute(self, x: NDArray, *of_norms: NDArray) -> tuple:
        forward = _C.layernorm_fwd if len(of_norms) == 2 else _C.layernorm_pair_fwd
        *ys, self.mean, self.rstd = forward(rows_of(x), *of_norms, self.eps)
        return (*(y.reshape(x.shape) for y in ys), x)

    def backward(
        self, dout: list[NDArray | None], node: TensorTuple, into: Accumulators
    ) -> list[NDArray | None]:
        *dys, dres = dout
        x, *of_norms = (operand.cached_data for operand in node.inputs)
        rest = [None] * len(of_norms)
        used = [n for n, dy in enumerate(dys) if dy is not None]
        if not used:
            return [dres, *rest]
        kernel = _C.layernorm_bwd if len(used) == 1 else _C.layernorm_pair_bwd
        dx = kernel(
            *(rows_of(dys[n]) for n in used),
            rows_of(x),
            *(of_norms[2 * n] for n in used),
            self.mean,
            self.rstd,
            None if dres is None else rows_of(dres),
            *(into[1 + 2 * n + i] for n in used for i in (0, 1)),
        )
        return [dx.reshape(x.shape), *rest]


def layer_norm_residual(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> TensorTuple:
    """(layer_norm(x, w, b, eps), x), of which the second is x for the residual connection.

    >>> x, w, b = ndl.Tensor([[1, 2, 3]]), ndl.ones(3), ndl.zeros(3)
    >>> y, x = ndl.ops.layer_norm_residual(x, w, b)
    >>> print((x + y).numpy().round(3))
    [[-0.225  2.     4.225]]
    """
    return LayerNormResidual(eps)(x, w, b)


def layer_norm_pair(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, eps: float = 1e-5
) -> TensorTuple:
    """(layer_norm(x, w1, b1, eps), layer_norm(x, w2, b2, eps), x), which read x once; the third is
    x for the residual connection.

    >>> x, w, b = ndl.Tensor([[1, 2, 3]]), ndl.ones(3), ndl.zeros(3)
    >>> one, other, x = ndl.ops.layer_norm_pair(x, w, b, 2 * w, b)
    >>> print((x + one + other).numpy().round(3))
    [[-2.674  2.     6.674]]
    """
    return LayerNormResidual(eps)(x, w1, b1, w2, b2)
