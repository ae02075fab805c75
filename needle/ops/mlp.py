"""Two linear layers with a GELU between them, fused."""

from __future__ import annotations

from needle import _C
from needle._C import NDArray
from needle.autograd import FusedOp, Sinks, Tensor
from needle.ops.common import claim_of, rows_of, sink_of
from needle.ops.matmul import check_residual, weight_grad


class GeluMLP(FusedOp):
    """y = r + g w2 + b2, g = gelu(pre), pre = x w1 + b1; keeps pre and g. r is there or not.

    dpre = dy w2^T gelu'(pre),  dx = dpre w1^T;  float32: dw2 += g^T dy,  db2 += sum dy,
    dw1 += x^T dpre,  db1 += sum dpre;  dr = dy.
    """

    reads_result = False

    def __init__(self, approximate: str) -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"gelu_mlp: approximate must be 'none' or 'tanh', not {approximate!r}")
        self.tanh = int(approximate == "tanh")

    def compute(
        self, x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray, *residual: NDArray
    ) -> NDArray:
        b1, b2 = (b.reshape((b.size,)) for b in (b1, b2))
        r = rows_of(residual[0]) if residual else None
        self.pre, self.g = _C.linear_gelu_fwd(rows_of(x), w1, b1, self.tanh)
        return _C.linear_fwd(self.g, w2, b2, r).reshape(x.shape[:-1] + (w2.shape[1],))

    def backward(self, dout: NDArray, node: Tensor, sinks: Sinks) -> list[NDArray | None]:
        x, w1, _, w2 = (t.cached_data for t in node.inputs[:4])
        needed = [t.requires_grad for t in node.inputs]
        dy = rows_of(dout)
        grads: list[NDArray | None] = [None] * len(needed)
        if needed[3]:
            weight_grad(self.g, dy, claim_of(sinks, grads, node, 3))
        if needed[4]:
            db2 = sink_of(sinks, grads, node, 4)
            _C.bias_bwd(dy, db2.reshape((db2.size,)))
        if any(needed[:3]):
            db1 = sink_of(sinks, grads, node, 2)
            dpre = _C.linear_gelu_bwd(dy, w2, self.pre, self.tanh, db1.reshape((db1.size,)))
            if needed[0]:
                grads[0] = (dpre @ w1.permute((1, 0))).reshape(x.shape)
            if needed[1]:
                weight_grad(rows_of(x), dpre, claim_of(sinks, grads, node, 1))
        if needed[5:] == [True]:
            grads[5] = dout
        return grads


def gelu_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    approximate: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gelu(x @ w1 + b1) @ w2 + b2 over the last axis of x: (..., K), (K, M) and (M, L)
    give (..., L), as linear, gelu and linear do.

    b1, b2: M and L elements in any shape; residual: of the result's shape, or None. The gradients
    of weights and biases are float32 in every dtype.

    >>> x, w, b = ndl.ones(1, 2), ndl.ones(2, 2), ndl.zeros(2)
    >>> print(ndl.ops.gelu_mlp(x, w, b, w, b).numpy().round(4))
    [[3.909 3.909]]
    """
    operands = [x, w1, b1, w2, b2]
    if residual is not None:
        check_residual("gelu_mlp", residual, x, w2)
        operands.append(residual)
    return GeluMLP(approximate)(*operands)
