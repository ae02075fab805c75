"""The two halves of a layer with a parallel residual (GPT-J, GPT-NeoX), fused at their end."""

from __future__ import annotations

from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd import FusedOp, Sinks, Tensor
from needle.block_mask import BlockMask
from needle.ops.attention import QKVAttention, array_on
from needle.ops.common import claim_of, rows_of, sink_of, vector
from needle.ops.matmul import check_residual, weight_grad
from needle.ops.mlp import GeluLayer


class AttentionMLP(FusedOp):
    """y = r + z w_o + b_o + g w2 + b2, z = attention(qkv), g = gelu(x w1 + b1).

    z and g lie side by side in one matrix, so that y is one product, of depth C + M, where the rows
    of w_o and w2 follow each other in memory; and so is the gradient of these:
    [dw_o; dw2] += [z g]^T dy. db_o and db2 are the same sums. Where they do not follow each other,
    as in a model that was not flattened, the weights are copied and two products give gradients."""

    reads_result = False
    QKV, W_O, B_O, X, W1, B1, W2, B2, R = range(9)  # the inputs

    def __init__(self, attention: QKVAttention, approximate: str) -> None:
        self.attention, self.approximate = attention, approximate

    def compute(
        self,
        qkv: NDArray,
        w_o: NDArray,
        b_o: NDArray,
        x: NDArray,
        w1: NDArray,
        b1: NDArray,
        w2: NDArray,
        b2: NDArray,
        r: NDArray,
    ) -> NDArray:
        rows, inner, width = rows_of(x), w_o.shape[0], w_o.shape[0] + w1.shape[1]
        self.both = _C.empty((rows.shape[0], width), x.dtype, x.device)
        self.up = GeluLayer("attention_mlp", self.approximate)
        self.attention.compute(qkv, self._heads(qkv.shape, width))
        self.up.forward(rows, w1, b1, self.both[:, inner:])
        w = w_o.joined(w2)
        if w is None:
            w = _C.empty((width, w2.shape[1]), w2.dtype, w2.device)
            _C.assign(w[:inner], w_o)
            _C.assign(w[inner:], w2)
        bias = _C.add(vector(b_o), vector(b2))
        return _C.linear_fwd(self.both, w, bias, rows_of(r)).reshape(r.shape)

    def _heads(self, packed: tuple[int, ...], width: int) -> NDArray:
        """z as (B, T, H, D), in its place beside g."""
        b, t, h, _, d = packed
        return self.both.as_strided((b, t, h, d), (t * width, width, d, 1))

    def backward(self, dout: NDArray, node: Tensor, sinks: Sinks) -> list[NDArray | None]:
        inputs, dy = node.inputs, rows_of(dout)
        w_o, w2 = inputs[self.W_O], inputs[self.W2]
        grads: list[NDArray | None] = [None] * len(inputs)
        self._weight_grads(dy, node, sinks, grads)
        if inputs[self.B_O].requires_grad or inputs[self.B2].requires_grad:
            sums = (vector(sink_of(sinks, grads, node, i)) for i in (self.B_O, self.B2))
            _C.bias_bwd(dy, *sums)
        self.up.backward(dy, w2.cached_data, node, self.X, sinks, grads)
        if inputs[self.QKV].requires_grad:
            b, t, h, _, d = inputs[self.QKV].shape
            dz = dy @ w_o.cached_data.permute((1, 0))
            grads[self.QKV] = self.attention.gradient_of_qkv(dz.reshape((b, t, h, d)))
        if inputs[self.R].requires_grad:
            grads[self.R] = dout
        return grads

    def _weight_grads(self, dy: NDArray, node: Tensor, sinks: Sinks, grads: list) -> None:
        inner = node.inputs[self.W_O].shape[0]
        parts = [(self.W_O, self.both[:, :inner]), (self.W2, self.both[:, inner:])]
        parts = [(i, rows) for i, rows in parts if node.inputs[i].requires_grad]
        claims = [claim_of(sinks, grads, node, i) for i, _ in parts]
        if len(claims) == 2 and claims[0][1] == claims[1][1]:
            together = claims[0][0].joined(claims[1][0])
            if together is not None:
                weight_grad(self.both, dy, (together, claims[0][1]))
                return
        for (_, rows), claim in zip(parts, claims):
            weight_grad(rows, dy, claim)


def attention_mlp(
    qkv: Tensor,
    cos: Any,
    sin: Any,
    w_o: Tensor,
    b_o: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    residual: Tensor,
    approximate: str = "none",
    mask: BlockMask | None = None,
    overwrite: bool = False,
) -> Tensor:
    """residual + linear(causal qkv_attention(qkv), w_o, b_o) + gelu_mlp(x, w1, b1, w2, b2): what a
    layer with a parallel residual adds, in fewer products than its parts.

    qkv: (B, T, H, 3, D); cos, sin: (T, R) float32, as in `rotary`; w_o: (H D, C); x: (B, T, K), w1:
    (K, M), w2: (M, C); residual and the result: (B, T, C). Biases in any shape, w_o and w2 best
    neighbours in memory (`Module.neighbours`). overwrite: see qkv_attention. The gradients of
    weights and biases are float32 in every dtype.

    >>> config = ndl.PythiaConfig(vocab_size=9, hidden_size=16, num_layers=1, num_heads=2)
    >>> layer = ndl.Pythia(config).layers[0]
    >>> attention, mlp, x = layer.attention, layer.mlp, ndl.randn(1, 3, 16)
    >>> cos, sin = map(nd.array, nn.rotary_tables(3, 2))
    >>> out, up, down = attention.dense, mlp.dense_h_to_4h, mlp.dense_4h_to_h
    >>> y = ndl.ops.attention_mlp(
    ...     attention.packed(x), cos, sin, out.weight, out.bias,
    ...     x, up.weight, up.bias, down.weight, down.bias, residual=x, approximate="tanh")
    >>> parts = attention(x, (cos, sin)) + mlp(x)
    >>> bool(abs((y - (x + parts)).numpy()).max() < 1e-5)
    True
    """
    if len(qkv.shape) != 5 or qkv.shape[3] != 3:
        raise ValueError(f"attention_mlp: qkv must be (B, T, H, 3, D), but is {qkv.shape}")
    b, t, h, _, d = qkv.shape
    fits = w_o.ndim == w1.ndim == w2.ndim == 2 and x.ndim == 3
    if not fits or w_o.shape[0] != h * d or tuple(x.shape[:2]) != (b, t):
        raise ValueError(
            f"attention_mlp: for qkv {qkv.shape} w_o must be ({h * d}, C), x ({b}, {t}, K), w1 (K, "
            f"M) and w2 (M, C), but they are {w_o.shape}, {x.shape}, {w1.shape} and {w2.shape}"
        )
    if w2.shape[1] != w_o.shape[1]:
        raise ValueError(f"attention_mlp: w_o {w_o.shape} and w2 {w2.shape} must have one width")
    check_residual("attention_mlp", residual, x, w2)
    cos, sin = (array_on(table, qkv.device) for table in (cos, sin))
    attention = QKVAttention(cos, sin, None, True, mask, overwrite, "attention_mlp")
    return AttentionMLP(attention, approximate)(qkv, w_o, b_o, x, w1, b1, w2, b2, residual)
