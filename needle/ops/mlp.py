"""Two linear layers with a GELU between them, fused."""

from __future__ import annotations

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.common import rows_of, vector
from needle.ops.elementwise import tanh_form
from needle.ops.matmul import check_residual, linear_grads, weight_grad


class GeluMLP(FusedOp):
    """y = r + g w2 + b2, g = gelu(pre), pre = x w1 + b1; keeps g and gelu'(pre). r is there or not.

    dpre = dy w2^T gelu'(pre),  dx = dpre w1^T;  dr = dy;
    float32: dw1 += x^T dpre,  db1 += sum dpre,  dw2 += g^T dy,  db2 += sum dy.
    """

    reads_result = False

    def __init__(self, approximate: str) -> None:
        self.tanh = tanh_form("gelu_mlp", approximate)

    def compute(
        self, x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray, *residual: NDArray
    ) -> NDArray:
        r = rows_of(residual[0]) if residual else None
        rows = rows_of(x)
        self.g = _C.empty((rows.shape[0], w1.shape[1]), x.dtype, x.device)
        self.dgelu = _C.linear_gelu_fwd(rows, w1, vector(b1), self.tanh, self.g)
        return _C.linear_fwd(self.g, w2, vector(b2), r).reshape(x.shape[:-1] + (w2.shape[1],))

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        x, w1, b1, w2, b2, *residual = node.inputs
        dx, dy = None, rows_of(dout)
        if w2.requires_grad:
            weight_grad(self.g, dy, into.with_add(3))
        if b2.requires_grad:
            _C.bias_bwd(dy, vector(into[4]), None)
        if x.requires_grad or w1.requires_grad or b1.requires_grad:
            dpre = _C.linear_gelu_bwd(dy, w2.cached_data, self.dgelu, vector(into[2]))
            dx = linear_grads(dpre, node, into, bias=False)
        return [dx, None, None, None, None, *([dout] if residual else [])]


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
    if not w1.ndim == w2.ndim == 2:
        raise ValueError(
            f"gelu_mlp: w1 must be (K, M) and w2 (M, L), but they are {w1.shape} and {w2.shape}"
        )
    operands = [x, w1, b1, w2, b2]
    if residual is not None:
        check_residual("gelu_mlp", residual, x, w2)
        operands.append(residual)
    return GeluMLP(approximate)(*operands)
