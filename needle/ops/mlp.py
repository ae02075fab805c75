"""Two linear layers with a GELU between them, fused."""

from __future__ import annotations

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.common import accumulator_and_beta, accumulator_of, rows_of, vector
from needle.ops.elementwise import tanh_form
from needle.ops.matmul import check_residual, linear_grads, weight_grad


class GeluLayer:
    """g = gelu(pre), pre = x w1 + b1, in front of a product with w2; keeps g and gelu'(pre).

    dpre = dy w2^T gelu'(pre),  dx = dpre w1^T;  float32: dw1 += x^T dpre,  db1 += sum dpre.
    """

    def __init__(self, op: str, approximate: str) -> None:
        self.tanh = tanh_form(op, approximate)

    def forward(self, x: NDArray, w1: NDArray, b1: NDArray, into: NDArray) -> NDArray:
        """g, in `into`; rows of x (N, K)."""
        self.dgelu, self.g = _C.linear_gelu_fwd(x, w1, vector(b1), self.tanh, into), into
        return into

    def backward(
        self,
        dy: NDArray,
        w2: NDArray,
        node: Tensor,
        at: int,
        accumulators: Accumulators,
        grads: list,
    ) -> None:
        """The gradients of x, w1 and b1, inputs at, at + 1 and at + 2 of the op."""
        if not any(t.requires_grad for t in node.inputs[at : at + 3]):
            return
        db1 = vector(accumulator_of(accumulators, grads, node, at + 2))
        dpre = _C.linear_gelu_bwd(dy, w2, self.dgelu, db1)
        linear_grads(dpre, node, at, accumulators, grads, bias=False)


class GeluMLP(FusedOp):
    """y = r + g w2 + b2, g = gelu(x w1 + b1): GeluLayer. r is there or not.

    float32: dw2 += g^T dy,  db2 += sum dy;  dr = dy.
    """

    reads_result = False

    def __init__(self, approximate: str) -> None:
        self.approximate = approximate

    def compute(
        self, x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray, *residual: NDArray
    ) -> NDArray:
        self.up = GeluLayer("gelu_mlp", self.approximate)
        r = rows_of(residual[0]) if residual else None
        rows = rows_of(x)
        g = self.up.forward(rows, w1, b1, _C.empty((rows.shape[0], w1.shape[1]), x.dtype, x.device))
        return _C.linear_fwd(g, w2, vector(b2), r).reshape(x.shape[:-1] + (w2.shape[1],))

    def backward(
        self, dout: NDArray, node: Tensor, accumulators: Accumulators
    ) -> list[NDArray | None]:
        _, _, _, w2, b2, *residual = node.inputs
        dy = rows_of(dout)
        grads: list[NDArray | None] = [None] * len(node.inputs)
        if w2.requires_grad:
            weight_grad(self.up.g, dy, accumulator_and_beta(accumulators, grads, node, 3))
        if b2.requires_grad:
            _C.bias_bwd(dy, vector(accumulator_of(accumulators, grads, node, 4)), None)
        self.up.backward(dy, w2.cached_data, node, 0, accumulators, grads)
        if residual and residual[0].requires_grad:
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
    if not w1.ndim == w2.ndim == 2:
        raise ValueError(
            f"gelu_mlp: w1 must be (K, M) and w2 (M, L), but they are {w1.shape} and {w2.shape}"
        )
    operands = [x, w1, b1, w2, b2]
    if residual is not None:
        check_residual("gelu_mlp", residual, x, w2)
        operands.append(residual)
    return GeluMLP(approximate)(*operands)
