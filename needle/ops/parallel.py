"""The two halves of a layer with a parallel residual (GPT-J, GPT-NeoX), fused at their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.block_mask import BlockMask
from needle.grad_mode import mode
from needle.ops.attention import Cached, Kernel, PackedKernel, RotaryLayer, array_on
from needle.ops.common import accumulator_and_beta, accumulator_of, check_tensors, rows_of, vector
from needle.ops.elementwise import tanh_form
from needle.ops.fp8 import ProductFP8, Quantized, whole_sizes
from needle.ops.matmul import check_residual, weight_grad
from needle.ops.mlp import GeluLayer
from needle.ops.normalization import layer_norm_pair, norm_grads


def _heads_of(both: NDArray, b: int, t: int, heads: int, inner: int) -> NDArray:
    """z as (B, T, H, D), in its place beside g."""
    d, width = inner // heads, both.shape[1]
    return both.as_strided((b, t, heads, d), (t * width, width, d, 1))


def _last_product(
    both: NDArray,
    w_o: NDArray,
    b_o: NDArray,
    w2: NDArray,
    b2: NDArray,
    r: NDArray,
    add: Callable[[NDArray, NDArray], NDArray],
) -> NDArray:
    """r + [z g] [w_o; w2] + b_o + b2."""
    w, inner = w_o.joined(w2), w_o.shape[0]
    if w is None:
        w = _C.empty((both.shape[1], w2.shape[1]), w2.dtype, w2.device)
        _C.assign(w[:inner], w_o)
        _C.assign(w[inner:], w2)
    bias = add(vector(b_o), vector(b2))
    return _C.linear_fwd(both, w, bias, rows_of(r)).reshape(r.shape)


class AttentionMLP(FusedOp):
    """y = r + z w_o + b_o + g w2 + b2, z = attention(rotary(x1 w_qkv + b_qkv)),
    g = gelu(x2 w1 + b1).

    z and g lie side by side in one matrix [z g]. If w2 follows w_o in memory, as in a flattened
    model, y is one product of depth C + M, and so is the gradient of both weights:
    [dw_o; dw2] += [z g]^T dy. Otherwise the weights are copied into one matrix, and two products
    give their gradients. db_o and db2 are the same sums. With `cached`, there are no gradients."""

    reads_result = False
    X1, W_QKV, B_QKV, W_O, B_O, X2, W1, B1, W2, B2, R = range(11)  # the inputs

    def __init__(
        self,
        heads: int,
        cos: NDArray,
        sin: NDArray,
        mask: BlockMask | None,
        approximate: str,
        cached: Cached | None = None,
    ) -> None:
        self.heads, self.cos, self.sin = heads, cos, sin
        self.mask, self.approximate, self.cached = mask, approximate, cached

    def compute(self, *inputs: NDArray) -> NDArray:
        x1, w_qkv, b_qkv, w_o, b_o, x2, w1, b1, w2, b2, r = inputs
        rows, inner = rows_of(x2), w_o.shape[0]
        self.both = _C.empty((rows.shape[0], inner + w1.shape[1]), x2.dtype, x2.device)
        self.up = GeluLayer("attention_mlp", self.approximate)
        self._attend(x1, w_qkv, b_qkv, _heads_of(self.both, *x1.shape[:2], self.heads, inner))
        self.up.forward(rows, w1, b1, self.both[:, inner:])
        add = _C.add if self.cached is None else self.cached.last_bias
        return _last_product(self.both, w_o, b_o, w2, b2, r, add)

    def _attend(self, x1: NDArray, w_qkv: NDArray, b_qkv: NDArray, into: NDArray) -> None:
        """z, in `into`."""
        if self.cached is not None:
            packed = _C.linear_fwd(rows_of(x1), w_qkv, vector(b_qkv), None)
            packed = packed.reshape((*x1.shape[:2], self.heads, 3, into.shape[3]))
            self.cached.attend(packed, self.cos, self.sin, into)
            return
        kernel = Kernel("attention_mlp", None, True, self.mask)
        self.projection = RotaryLayer(self.heads, self.cos, self.sin)
        self.attention = PackedKernel(kernel, self.cos, self.sin)
        self.attention.forward(self.projection.forward(x1, w_qkv, b_qkv), into)

    def backward(
        self, dout: NDArray, node: Tensor, accumulators: Accumulators
    ) -> list[NDArray | None]:
        if self.cached is not None:
            raise RuntimeError("attention_mlp: over a cache it has no gradients: use no_grad()")
        inputs, dy = node.inputs, rows_of(dout)
        w_o, w2 = inputs[self.W_O], inputs[self.W2]
        grads: list[NDArray | None] = [None] * len(inputs)
        self._weight_grads(dy, node, accumulators, grads)
        self._last_bias_grads(dy, node, accumulators, grads)
        self.up.backward(dy, w2.cached_data, node, self.X2, accumulators, grads)
        if any(x.requires_grad for x in inputs[self.X1 : self.B_QKV + 1]):
            dz = dy @ w_o.cached_data.permute((1, 0))
            d = self._projection_grad(dz, node, accumulators, grads)
            del dz
            self.projection.backward(d, node, self.X1, accumulators, grads)
        if inputs[self.R].requires_grad:
            grads[self.R] = dout
        return grads

    def _last_bias_grads(
        self, dy: NDArray, node: Tensor, accumulators: Accumulators, grads: list
    ) -> None:
        if node.inputs[self.B_O].requires_grad or node.inputs[self.B2].requires_grad:
            sums = (
                vector(accumulator_of(accumulators, grads, node, i)) for i in (self.B_O, self.B2)
            )
            _C.bias_bwd(dy, *sums)

    def _projection_grad(
        self,
        dz: NDArray,
        node: Tensor,
        accumulators: Accumulators,
        grads: list,
        largest: NDArray | None = None,
    ) -> NDArray:
        """The gradient (B, T, H, 3, D) of x1 w_qkv + b_qkv from dz; that of b_qkv is its sum.
        largest: see Kernel.backward."""
        db = None
        if node.inputs[self.B_QKV].requires_grad:
            packed = self.attention.rotated.shape[2:]
            db = accumulator_of(accumulators, grads, node, self.B_QKV).reshape(packed)
        return self.attention.backward(dz.reshape(self.attention.kernel.o.shape), db, largest)

    def _weight_grads(
        self, dy: NDArray, node: Tensor, accumulators: Accumulators, grads: list
    ) -> None:
        inner = node.inputs[self.W_O].shape[0]
        parts = [(self.W_O, self.both[:, :inner]), (self.W2, self.both[:, inner:])]
        parts = [(i, rows) for i, rows in parts if node.inputs[i].requires_grad]
        into = [accumulator_and_beta(accumulators, grads, node, i) for i, _ in parts]
        if len(into) == 2 and into[0][1] == into[1][1]:
            together = into[0][0].joined(into[1][0])
            if together is not None:
                weight_grad(self.both, dy, (together, into[0][1]))
                return
        for (_, rows), one in zip(parts, into):
            weight_grad(rows, dy, one)


class AttentionMLPFP8(AttentionMLP):
    """Compute AttentionMLP with its products in FP8, for sizes that whole_sizes() accepts.
    Attention and sums are as there; y is rounded between the products of w_o and w2."""

    def compute(self, *inputs: NDArray) -> NDArray:
        b_qkv, b_o, b1, b2 = (vector(inputs[i]) for i in (self.B_QKV, self.B_O, self.B1, self.B2))
        inner = inputs[self.W_O].shape[0]
        x1, x2, r = self._operands(inputs)
        gelu = 1 + tanh_form("attention_mlp", self.approximate)
        weights, largest = self._weights(inputs)
        self.products = {i: ProductFP8() for i in weights}
        qkv, out, up, down = self.products.values()
        packed = qkv.forward(x1, weights.pop(self.W_QKV), b_qkv)
        del x1
        packed = packed.reshape((*r.shape[:2], self.heads, 3, inner // self.heads))
        _C.rotary(packed, self.cos, self.sin, 2, 1.0)
        kernel = Kernel("attention_mlp", None, True, self.mask)
        self.attention = PackedKernel(kernel, self.cos, self.sin)
        z = self.attention.forward(packed).reshape((rows_of(r).shape[0], inner))
        y = out.forward(Quantized(z), weights.pop(self.W_O), _C.add(b_o, b2), rows_of(r))
        g, self.dgelu = up.forward_gelu(x2, weights.pop(self.W1), b1, gelu, largest)
        del x2
        down.forward(g, weights.pop(self.W2), into=y)
        return y.reshape(r.shape)

    def _operands(self, inputs: tuple[NDArray, ...]) -> tuple[Quantized, Quantized, NDArray]:
        """The rows of x1 and x2, and r."""
        x1, x2 = (Quantized(rows_of(inputs[i])) for i in (self.X1, self.X2))
        return x1, x2, inputs[self.R]

    def _weights(self, inputs: tuple[NDArray, ...]) -> tuple[dict[int, Quantized], NDArray | None]:
        """w_qkv, w_o, w1 and w2; a bound of x2 w1 + b1, if known."""
        of = self.W_QKV, self.W_O, self.W1, self.W2
        return {i: Quantized(inputs[i]) for i in of}, None

    def backward(
        self, dout: NDArray, node: Tensor, accumulators: Accumulators
    ) -> list[NDArray | None]:
        inputs, dy = node.inputs, rows_of(dout)
        grads: list[NDArray | None] = [None] * len(inputs)
        wanted, dxs = self._wanted(inputs), dict[int, NDArray]()

        def weight_grad(i: int, d: Quantized) -> None:
            if inputs[i].requires_grad:
                into = accumulator_and_beta(accumulators, grads, node, i)
                self.products[i].weight_grad(d, into)

        def through(i: int, d: Quantized) -> None:
            """The gradient of w, input i, and in dxs that of the rows it multiplies, from d."""
            weight_grad(i, d)
            if wanted[i]:
                dxs[i] = self.products[i].input_grad(d)

        d = Quantized(dy, e5m2=True)
        weight_grad(self.W_O, d)
        weight_grad(self.W2, d)
        self._last_bias_grads(dy, node, accumulators, grads)
        if wanted[self.W1] or any(inputs[i].requires_grad for i in (self.W1, self.B1)):
            db1 = None
            if inputs[self.B1].requires_grad:
                db1 = vector(accumulator_of(accumulators, grads, node, self.B1))
            dpre = self.products[self.W2].input_grad_gelu(d, self.dgelu, db1)
            through(self.W1, dpre)
        if wanted[self.W_QKV] or any(inputs[i].requires_grad for i in (self.W_QKV, self.B_QKV)):
            dz = self.products[self.W_O].input_grad(d)
            largest = _C.empty((), "float32", dy.device)
            dqkv = self._projection_grad(dz, node, accumulators, grads, largest)
            del dz
            rows = dqkv.reshape((dy.shape[0], inputs[self.W_QKV].shape[1]))
            through(self.W_QKV, Quantized(rows, e5m2=True, largest=largest))
        self._operand_grads(dxs, dout, node, accumulators, grads)
        return grads

    def _wanted(self, inputs: Sequence[Tensor]) -> dict[int, bool]:
        """By the weights of the first products: if the gradient of what they multiply is needed."""
        x1, x2 = (inputs[i].requires_grad for i in (self.X1, self.X2))
        return {self.W_QKV: x1, self.W1: x2}

    def _operand_grads(
        self,
        dxs: dict[int, NDArray],
        dout: NDArray,
        node: Tensor,
        accumulators: Accumulators,
        grads: list[NDArray | None],
    ) -> None:
        """The gradients of x1, x2 and r: of r it is dout, of the others in dxs as in _wanted()."""
        for i, dx in (self.X1, dxs.get(self.W_QKV)), (self.X2, dxs.get(self.W1)), (self.R, dout):
            if node.inputs[i].requires_grad:
                grads[i] = dx.reshape(node.inputs[i].shape)


class NormAttentionMLPFP8(AttentionMLPFP8):
    """Compute AttentionMLPFP8 of x1 and x2, two norms of x, and of r = x. The norms are written in
    FP8 alone. Their scales, and but for float16 that of GELU's result, are from bounds."""

    X, NORM_W1, NORM_B1, NORM_W2, NORM_B2 = range(5)
    W_QKV, B_QKV, W_O, B_O, W1, B1, W2, B2 = range(5, 13)

    def __init__(self, eps: float, *layer: Any) -> None:
        super().__init__(*layer)
        self.eps = eps

    def _operands(self, inputs: tuple[NDArray, ...]) -> tuple[Quantized, Quantized, NDArray]:
        x, of_norms = inputs[self.X], inputs[self.NORM_W1 : self.NORM_B2 + 1]
        *parts, self.mean, self.rstd = _C.layernorm_pair_fp8(rows_of(x), *of_norms, self.eps)
        x1, x2 = (Quantized.from_parts(x.dtype, *some) for some in (parts[:3], parts[3:]))
        return x1, x2, x

    def _weights(self, inputs: tuple[NDArray, ...]) -> tuple[dict[int, Quantized], NDArray | None]:
        """No bound in float16, which infinities end in: it would make them finite."""
        of = self.W_QKV, self.W_O, self.W1, self.W2
        w_qkv, w_o, w1, w2 = (inputs[i] for i in of)
        norm, b1 = inputs[self.NORM_W2 : self.NORM_B2 + 1], vector(inputs[self.B1])
        *parts, bound = _C.fp8_layer_weights(*norm, w_qkv, w_o, w1, b1, w2)
        found = (Quantized.from_parts(w1.dtype, *parts[k : k + 3]) for k in range(0, 12, 3))
        return dict(zip(of, found)), None if w1.dtype == "float16" else bound

    def _wanted(self, inputs: Sequence[Tensor]) -> dict[int, bool]:
        x, w1, b1, w2, b2 = (one.requires_grad for one in inputs[: self.NORM_B2 + 1])
        return {self.W_QKV: x or w1 or b1, self.W1: x or w2 or b2}

    def _operand_grads(
        self,
        dxs: dict[int, NDArray],
        dout: NDArray,
        node: Tensor,
        accumulators: Accumulators,
        grads: list[NDArray | None],
    ) -> None:
        dys = [dxs.get(self.W_QKV), dxs.get(self.W1)]
        norm_grads(dys, dout, node, self.mean, self.rstd, accumulators, grads)


def attention_mlp(
    x1: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    heads: int,
    cos: Any,
    sin: Any,
    w_o: Tensor,
    b_o: Tensor,
    x2: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    residual: Tensor,
    approximate: str = "none",
    mask: BlockMask | None = None,
    fp8: bool = False,
    cached: Cached | None = None,
) -> Tensor:
    """residual + linear(causal qkv_attention(linear(x1, w_qkv, b_qkv)), w_o, b_o)
    + gelu_mlp(x2, w1, b1, w2, b2): a layer with a parallel residual in fewer products
    than its parts, and the rotation of q and k at the end of the product that makes them.

    x1: (B, T, K1); w_qkv: (K1, 3 H D), its columns [head 0: q k v][head 1: q k v]... of `heads`
    heads; cos, sin: (T, R) float32, as in `rotary`; w_o: (H D, C); x2: (B, T, K2), w1: (K2, M),
    w2: (M, C); residual and the result: (B, T, C). Biases in any shape, w_o and w2 best neighbours
    in memory (`Module.neighbours`). The gradients of weights and biases are float32 in every dtype.

    fp8: compute the products in FP8, with or without gradients, where B T and all sizes of weights
    are multiples of 16: their operands in e4m3, the gradients that they multiply in e5m2, each
    array times a power of two. On a GPU: compute capability 9.0 (Hopper).
    cached: attends in the place of attention, for no gradients; cos and sin are whole tables then.

    >>> config = ndl.PythiaConfig(vocab_size=9, hidden_size=16, num_layers=1, num_heads=2)
    >>> layer = ndl.Pythia(config).layers[0]
    >>> attention, mlp, x = layer.attention, layer.mlp, ndl.randn(1, 3, 16)
    >>> cos, sin = map(nd.array, nn.rotary_tables(3, 2))
    >>> packed, out = attention.query_key_value, attention.dense
    >>> up, down = mlp.dense_h_to_4h, mlp.dense_4h_to_h
    >>> y = ndl.ops.attention_mlp(
    ...     x, packed.weight, packed.bias, 2, cos, sin, out.weight, out.bias,
    ...     x, up.weight, up.bias, down.weight, down.bias, residual=x, approximate="tanh")
    >>> parts = attention(x, (cos, sin)) + mlp(x)
    >>> bool(abs((y - (x + parts)).numpy()).max() < 1e-5)
    True
    """
    operands = {"x1": x1, "w_qkv": w_qkv, "b_qkv": b_qkv, "w_o": w_o, "b_o": b_o}
    operands |= {"x2": x2, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "residual": residual}
    cos, sin = _checked("attention_mlp", operands, heads, cos, sin, cached)
    op = AttentionMLPFP8 if fp8 and cached is None and _take_fp8(operands) else AttentionMLP
    return op(int(heads), cos, sin, mask, approximate, cached)(*operands.values())


def norm_attention_mlp(
    x: Tensor,
    norm_w1: Tensor,
    norm_b1: Tensor,
    norm_w2: Tensor,
    norm_b2: Tensor,
    eps: float,
    w_qkv: Tensor,
    b_qkv: Tensor,
    heads: int,
    cos: Any,
    sin: Any,
    w_o: Tensor,
    b_o: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    approximate: str = "none",
    mask: BlockMask | None = None,
    fp8: bool = False,
    cached: Cached | None = None,
) -> Tensor:
    """attention_mlp of x1 = layer_norm(x, norm_w1, norm_b1, eps), x2 = layer_norm(x, norm_w2,
    norm_b2, eps) and residual = x: the whole layer. With fp8, where attention_mlp takes it, the
    norms are one op with the rest, and never written in x's dtype. With `cached`, as there, norms
    and first products of one token are one op where no gradients are recorded, on a GPU, for up to
    4 rows of up to 1024 features, all sizes multiples of 8.

    >>> config = ndl.PythiaConfig(vocab_size=9, hidden_size=16, num_layers=1, num_heads=2)
    >>> layer, x = ndl.Pythia(config).layers[0], ndl.randn(1, 3, 16)
    >>> attention, mlp, norms = layer.attention, layer.mlp, [layer.input_layernorm]
    >>> norms += [layer.post_attention_layernorm]
    >>> cos, sin = map(nd.array, nn.rotary_tables(3, 2))
    >>> packed, out = attention.query_key_value, attention.dense
    >>> up, down = mlp.dense_h_to_4h, mlp.dense_4h_to_h
    >>> y = ndl.ops.norm_attention_mlp(
    ...     x, norms[0].weight, norms[0].bias, norms[1].weight, norms[1].bias, norms[0].eps,
    ...     packed.weight, packed.bias, 2, cos, sin, out.weight, out.bias,
    ...     up.weight, up.bias, down.weight, down.bias, approximate="tanh")
    >>> parts = attention(norms[0](x), (cos, sin)) + mlp(norms[1](x))
    >>> bool(abs((y - (x + parts)).numpy()).max() < 1e-5)
    True
    """
    of_norms = {"norm_w1": norm_w1, "norm_b1": norm_b1, "norm_w2": norm_w2, "norm_b2": norm_b2}
    check_tensors("norm_attention_mlp", x=x, **of_norms)
    for name, p in of_norms.items():
        if p.shape != x.shape[-1:] or p.dtype != x.dtype:
            raise ValueError(
                f"norm_attention_mlp: for x {x.shape} of {x.dtype} {name} must be {x.shape[-1:]} "
                f"of it, but is {p.shape} of {p.dtype}"
            )
    weights = {"w_qkv": w_qkv, "b_qkv": b_qkv, "w_o": w_o, "b_o": b_o}
    weights |= {"w1": w1, "b1": b1, "w2": w2, "b2": b2}
    operands = {"x1": x, "x2": x, **weights, "residual": x}
    cos, sin = _checked("norm_attention_mlp", operands, heads, cos, sin, cached)
    if cached is not None and _is_step(x, w_qkv, w1):
        given = (one.cached_data for one in (x, *of_norms.values(), *weights.values()))
        return Tensor.from_ndarray(_step(*given, eps, int(heads), cos, sin, approximate, cached))
    if fp8 and cached is None and _take_fp8(operands):
        op = NormAttentionMLPFP8(eps, int(heads), cos, sin, mask, approximate)
        return op(x, *of_norms.values(), *weights.values())
    x1, x2, x = layer_norm_pair(x, *of_norms.values(), eps)
    attention, mlp = (w_qkv, b_qkv, heads, cos, sin, w_o, b_o), (w1, b1, w2, b2)
    return attention_mlp(x1, *attention, x2, *mlp, x, approximate, mask, cached=cached)


def _is_step(x: Tensor, w_qkv: Tensor, w1: Tensor) -> bool:
    """True for one token of a few rows on a GPU, where decode_projections saves launches."""
    b, t, c = x.shape
    columns = c, w_qkv.shape[1], w1.shape[1]
    few = t == 1 and 0 < b <= 4 and 8 <= c <= 1024 and all(n % 8 == 0 for n in columns)
    return few and not x.device.is_host and not mode.enabled


def _step(
    x: NDArray,
    norm_w1: NDArray,
    norm_b1: NDArray,
    norm_w2: NDArray,
    norm_b2: NDArray,
    w_qkv: NDArray,
    b_qkv: NDArray,
    w_o: NDArray,
    b_o: NDArray,
    w1: NDArray,
    b1: NDArray,
    w2: NDArray,
    b2: NDArray,
    eps: float,
    heads: int,
    cos: NDArray,
    sin: NDArray,
    approximate: str,
    cached: Cached,
) -> NDArray:
    """A layer over a cache where _is_step(): norms and first products are one op."""
    b, t, _ = x.shape
    inner = w_o.shape[0]
    both = _C.empty((b, inner + w1.shape[1]), x.dtype, x.device)
    norms, tanh = (norm_w1, norm_b1, norm_w2, norm_b2), tanh_form("attention_mlp", approximate)
    first = w_qkv, vector(b_qkv), w1, vector(b1)
    packed = _C.decode_projections(rows_of(x), *norms, eps, *first, tanh, both[:, inner:])
    packed = packed.reshape((b, t, heads, 3, inner // heads))
    cached.attend(packed, cos, sin, _heads_of(both, b, t, heads, inner))
    return _last_product(both, w_o, b_o, w2, b2, x, cached.last_bias)


def _take_fp8(operands: dict[str, Tensor]) -> bool:
    b, t, _ = operands["x1"].shape
    sizes = [size for name in ("w_qkv", "w_o", "w1") for size in operands[name].shape]
    return whole_sizes(b * t, *sizes)


def _checked(
    op: str,
    operands: dict[str, Tensor],
    heads: Any,
    cos: Any,
    sin: Any,
    cached: Cached | None = None,
) -> tuple[NDArray, NDArray]:
    """Check the operands of attention_mlp, for `op`. Return cos and sin as arrays."""
    check_tensors(op, **operands)
    x1, w_qkv, w_o, x2, w1, w2 = (operands[n] for n in ("x1", "w_qkv", "w_o", "x2", "w1", "w2"))
    if not isinstance(heads, (int, np.integer)) or heads < 1:
        raise ValueError(f"{op}: heads must be an int of 1 or more, not {heads!r:.40}")
    if x1.ndim != 3:
        raise ValueError(f"{op}: x1 must be (B, T, K1), but is {x1.shape}")
    b, t, k = x1.shape
    if w_qkv.ndim != 2 or w_qkv.shape[0] != k or w_qkv.shape[1] % (3 * heads):
        raise ValueError(
            f"{op}: for x1 {x1.shape} and {heads} heads w_qkv must be ({k}, 3 x {heads} x "
            f"D), but is {w_qkv.shape}"
        )
    inner = w_qkv.shape[1] // 3
    fits = w_o.ndim == w1.ndim == w2.ndim == 2 and x2.ndim == 3 and w_o.shape[0] == inner
    fits = fits and tuple(x2.shape) == (b, t, w1.shape[0]) and w2.shape[0] == w1.shape[1]
    if not fits:
        raise ValueError(
            f"{op}: for x1 {x1.shape} and w_qkv {w_qkv.shape} w_o must be ({inner}, C), "
            f"x2 ({b}, {t}, K2), w1 (K2, M) and w2 (M, C), but they are {w_o.shape}, {x2.shape}, "
            f"{w1.shape} and {w2.shape}"
        )
    if w2.shape[1] != w_o.shape[1]:
        raise ValueError(f"{op}: w_o {w_o.shape} and w2 {w2.shape} must have one width")
    for bias, of in ("b_qkv", "w_qkv"), ("b_o", "w_o"), ("b1", "w1"), ("b2", "w2"):
        columns = operands[of].shape[1]
        if operands[bias].size != columns:
            raise ValueError(
                f"{op}: {bias} must have {columns} elements, as {of} "
                f"{operands[of].shape} has columns, but is {operands[bias].shape}"
            )
    for name, x in operands.items():
        if x.dtype != x1.dtype:
            raise TypeError(
                f"{op}: {name}: dtype is {x.dtype}, but x1 is {x1.dtype}; they must be equal"
            )
    check_residual(op, operands["residual"], x2, w2)
    cos, sin = (array_on(table, x1.device) for table in (cos, sin))
    for name, table in ("cos", cos), ("sin", sin):
        fits = table.ndim == 2 and table.shape == cos.shape
        if not fits or (cached is None and table.shape[0] != t):
            raise ValueError(
                f"{op}: cos and sin must be ({t if cached is None else 'S'}, R) for x1 {x1.shape}, "
                f"but {name} is {table.shape}"
            )
    return cos, sin
