"""Matrix products: matmul, elementary and batched, linear, fused with its bias, and two of
them with a GELU between them, fused."""

from __future__ import annotations

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.broadcast import differentiable, reshape
from needle.ops.common import rows_of, vector
from needle.ops.elementwise import tanh_form
from needle.ops.shape import transpose


def _right_slope(g: Tensor, x: Tensor, like: Tensor) -> Tensor:
    if x.ndim > 2 and like.ndim == 2:
        return matmul(transpose(rows_of(x)), rows_of(g))
    return matmul(transpose(x), g)


@differentiable("MatMul", lambda g, y: matmul(g, transpose(y)), _right_slope)
def _matmul(a: NDArray, b: NDArray) -> NDArray:
    if min(a.ndim, b.ndim) > 1 and a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: {a.shape} @ {b.shape}: the last axis of a is {a.shape[-1]}, "
            f"but the last but one of b is {b.shape[-2]}"
        )
    return a @ b


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over the last two axes; leading axes broadcast like NumPy's. A vector on the left is a
    row, one on the right a column, whose axis of size 1 the result lacks.

    >>> ndl.matmul(ndl.ones(5, 2, 3), ndl.ones(3, 4)).shape
    (5, 2, 4)
    >>> ndl.matmul(ndl.ones(5, 2, 3), ndl.ones(3)).shape
    (5, 2)
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor) and 1 in (a.ndim, b.ndim):
        left = reshape(a, (1, a.size)) if a.ndim == 1 else a
        product = matmul(left, reshape(b, (b.size, 1)) if b.ndim == 1 else b)
        gone = {product.ndim - 2} if a.ndim == 1 else set()
        gone |= {product.ndim - 1} if b.ndim == 1 else set()
        return reshape(product, [n for i, n in enumerate(product.shape) if i not in gone])
    return _matmul(a, b)


def weight_grad(
    x: NDArray, y: NDArray, into_and_add: tuple[NDArray, int], scale: NDArray | None = None
) -> None:
    """Compute into = scale * x^T y, with `add` into += that, of rows x (N, K) and y (N, M); into
    (K, M) is float32."""
    into, add = into_and_add
    n, k, m = *x.shape, y.shape[1]
    x_t = x.permute((1, 0)).reshape((1, k, n))
    _C.matmul_acc(x_t, y.reshape((1, n, m)), scale, add, into.reshape((1, k, m)))


def linear_grads(
    dy: NDArray, node: Tensor, into: Accumulators, bias: bool = True
) -> NDArray | None:
    """Return the gradient of x, and add those of w and, with `bias`, b, the first inputs of the op,
    from dy, the rows of that of x w + b: dx = dy w^T;  float32: dw += x^T dy,  db += sum dy."""
    x, w = node.inputs[:2]
    dx = (dy @ w.cached_data.permute((1, 0))).reshape(x.shape) if x.requires_grad else None
    if w.requires_grad:
        weight_grad(rows_of(x.cached_data), dy, into.with_add(1))
    if bias and node.inputs[2].requires_grad:
        _C.bias_bwd(dy, vector(into[2]), None)
    return dx


class LinearOp(FusedOp):
    """y = r + x w + b;  dx = dy w^T,  dw += x^T dy (float32, by the product itself),  db += sum dy,
    dr = dy. b and r are there or not."""

    reads_result = False

    def __init__(self, has_bias: bool, has_residual: bool) -> None:
        self.has_bias, self.has_residual = has_bias, has_residual

    def compute(self, x: NDArray, w: NDArray, *rest: NDArray) -> NDArray:
        b = vector(rest[0]) if self.has_bias else None
        r = rows_of(rest[-1]) if self.has_residual else None
        return _C.linear_fwd(rows_of(x), w, b, r).reshape(x.shape[:-1] + (w.shape[1],))

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        grads: list[NDArray | None] = [None] * len(node.inputs)
        if self.has_residual:
            grads[-1] = dout
        grads[0] = linear_grads(rows_of(dout), node, into, self.has_bias)
        return grads


class LinearTransposedOp(FusedOp):
    """y = x w^T;  dx = dy w,  dw += dy^T x (float32, by the product itself)."""

    reads_result = False

    def compute(self, x: NDArray, w: NDArray) -> NDArray:
        return (rows_of(x) @ w.permute((1, 0))).reshape(x.shape[:-1] + (w.shape[0],))

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        x, w = node.inputs
        dy = rows_of(dout)
        dx = (dy @ w.cached_data).reshape(x.shape) if x.requires_grad else None
        if w.requires_grad:
            weight_grad(dy, rows_of(x.cached_data), into.with_add(1))
        return [dx, None]


def linear_transposed(x: Tensor, w: Tensor) -> Tensor:
    """x @ w^T over the last axis of x: (..., K) and (M, K) give (..., M); w is read as it lies.

    The gradient of w is float32 in every dtype. For a head that shares the embedding's weight.

    >>> print(ndl.ops.linear_transposed(ndl.ones(1, 2), ndl.Tensor([[1, 2], [3, 4], [5, 6]])))
    [[ 3.  7. 11.]]
    """
    return LinearTransposedOp()(x, w)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """residual + x @ w + b over the last axis of x: (..., K) and (K, M) give (..., M).

    b: M elements in any shape, or None. residual: of the result's shape, or None; the sum is then
    rounded once on CUDA, where the product adds to it. The gradients of w and b are float32 in
    every dtype.

    >>> x, w, b = ndl.ones(1, 2), ndl.Tensor([[1, 2, 3], [4, 5, 6]]), ndl.Tensor([10, 20, 30])
    >>> print(ndl.ops.linear(x, w, b))
    [[15. 27. 39.]]
    >>> print(ndl.ops.linear(x, w, b, residual=ndl.ones(1, 3)))
    [[16. 28. 40.]]
    """
    operands = [x, w] if b is None else [x, w, b]
    if residual is not None:
        check_residual("linear", residual, x, w)
        operands.append(residual)
    return LinearOp(b is not None, residual is not None)(*operands)


def check_residual(op: str, residual: Tensor, x: Tensor, w: Tensor) -> None:
    """ValueError where it has not the shape of x @ w."""
    shape = tuple(x.shape[:-1]) + tuple(w.shape[1:])
    if tuple(residual.shape) != shape:
        raise ValueError(f"{op}: residual must be {shape}, as the result, but is {residual.shape}")


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
