"""A transformer layer with a parallel residual (GPT-J, GPT-NeoX) as one operation: csrc/layer.c."""

from __future__ import annotations

from typing import Any, Protocol

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.autograd.grad_mode import mode
from needle.block_mask import BlockMask, as_block_mask
from needle.ops.attention import array_on
from needle.ops.common import rows_of, vector
from needle.ops.elementwise import tanh_form

DENSE = (None,) * 6 + (0,)  # no lists of blocks, and no size of them
ADD_BITS = {5: 1, 7: 2, 9: 4, 11: 8}  # by input: ADD_QKV, ADD_O, ADD_1 and ADD_2 of csrc/layer.h


class ParallelLayer(FusedOp):
    """y = x + attention(norm1(x)) + mlp(norm2(x)): layer_fwd and layer_bwd of ops.def. Inputs: x,
    and the 12 weights and biases in the order of `layer`, whose gradients are float32."""

    reads_result = False

    def __init__(self, settings: tuple[Any, ...], keep: bool) -> None:
        self.settings, self.keep = settings, keep

    def compute(self, *inputs: NDArray) -> NDArray:
        y, saved = _C.layer_fwd(*inputs, *self.settings, self.keep)
        self.saved = saved if self.keep else None
        return y

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        bits, weights = 0, []
        for i, x in enumerate(node.inputs):
            if i and x.requires_grad:
                weights.append(i)
        sums: list[NDArray | None] = [None] * 13
        for i, (array, add) in zip(weights, into.all_with_add(weights)):
            sums[i] = array
            if add:
                bits |= ADD_BITS.get(i, 0)
            elif i not in ADD_BITS:  # not flat, or a bias (1, out): kernels only add to it
                array.fill(0)
        dx = _C.layer_bwd(dout, *node.operands, *self.settings, self.saved, bits, *sums[1:])
        return [dx, *[None] * 12]


def layer(
    x: Tensor,
    norm_w1: Tensor,
    norm_b1: Tensor,
    norm_w2: Tensor,
    norm_b2: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    w_o: Tensor,
    b_o: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    heads: int,
    cos: Any,
    sin: Any,
    eps: float = 1e-5,
    approximate: str = "none",
    mask: BlockMask | None = None,
    fp8: bool = False,
    recompute: bool = False,
) -> Tensor:
    """x + linear(causal qkv_attention(linear(n1, w_qkv, b_qkv)), w_o, b_o)
    + linear(gelu(linear(n2, w1, b1)), w2, b2) with n1 and n2 two layer norms of x: a layer in fewer
    products than its parts, and one call forward and back.

    x and the result: (B, T, C); norm_w1 ... norm_b2: (C,); w_qkv: (C, 3 H D), its columns
    [head 0: q k v][head 1: q k v]... of `heads` heads; w_o: (H D, C), w1: (C, M), w2: (M, C), w_o
    and w2 best neighbours in memory (`Module.neighbours`); biases in any shape; cos, sin: (T, R)
    float32, as in `rotary`; approximate as in `gelu`; mask as in `attention`. All of one float
    dtype; the gradients of weights and biases are float32 in every dtype.

    fp8: compute the products in FP8 where B T and all sizes of weights are multiples of 16: their
    operands in e4m3, the gradients that they multiply in e5m2, each array times a power of two. On
    a GPU: compute capability 9.0 (Hopper). recompute: keep x alone; the backward computes the rest
    again, with the same bits.

    TypeError for other dtypes and devices, ValueError for other shapes, which name the operand.

    >>> config = ndl.PythiaConfig(vocab_size=9, hidden_size=16, num_layers=1, num_heads=2)
    >>> one, x = ndl.Pythia(config).layers[0], ndl.randn(1, 3, 16)
    >>> norm1, norm2 = one.input_layernorm, one.post_attention_layernorm
    >>> at, mlp = one.attention, one.mlp
    >>> parts = norm1, norm2, at.query_key_value, at.dense, mlp.dense_h_to_4h, mlp.dense_4h_to_h
    >>> weights = [p for part in parts for p in (part.weight, part.bias)]
    >>> cos, sin = map(nd.array, nn.rotary_tables(3, 2))
    >>> y = ndl.ops.layer(x, *weights, 2, cos, sin, approximate="tanh")
    >>> z = x + at(norm1(x), (cos, sin)) + mlp(norm2(x))
    >>> bool(abs((y - z).numpy()).max() < 1e-5)
    True
    """
    if not (type(cos) is NDArray and type(sin) is NDArray):
        cos, sin = array_on(cos, x.device), array_on(sin, x.device)
    lists: tuple[Any, ...] = DENSE
    if mask is not None:
        t = x.shape[1]
        as_block_mask("layer", mask).check("layer", t, t, heads)
        lists = (*mask.causal().lists(x.device), mask.block)
    settings = (cos, sin, *lists, heads, eps, tanh_form("layer", approximate), fp8)
    op = ParallelLayer(settings, keep=mode.enabled and not recompute)
    weights = (norm_w1, norm_b1, norm_w2, norm_b2, w_qkv, b_qkv, w_o, b_o, w1, b1, w2, b2)
    return Tensor.make_from_op(op, (x, *weights))


class Cached(Protocol):
    """How a layer attends over a cache of keys and values, without gradients."""

    def attend(self, packed: NDArray, cos: NDArray, sin: NDArray, into: NDArray) -> None:
        """packed: (B, T, H, 3, D) before it is rotated, may be overwritten; cos, sin: whole tables;
        into: where the result (B, T, H, D) shall lie."""
        ...

    def last_bias(self, b_o: NDArray, b2: NDArray) -> NDArray:
        """b_o + b2, the biases at the layer's end."""
        ...


def _is_step(x: NDArray, w_qkv: NDArray, w1: NDArray) -> bool:
    """True for one token of a few rows on a GPU, where decode_projections saves launches. More
    than 4 rows need tensor cores, so 16 bits."""
    b, t, c = x.shape
    if t != 1 or x.device.is_host:
        return False
    most = 4 if x.dtype == "float32" else 32
    return 0 < b <= most and 8 <= c <= 1024 and (c | w_qkv.shape[1] | w1.shape[1]) % 8 == 0


def cached_layer(
    cached: Cached,
    x: NDArray,
    weights: list[NDArray],
    heads: int,
    cos: NDArray,
    sin: NDArray,
    eps: float,
    approximate: str,
) -> NDArray:
    """`layer` over a cache, without gradients, x (B, T, C) and its 12 weights as arrays; w2 must
    follow w_o in memory. Norms and first products of one token a row are one operation on a GPU,
    for up to 32 rows (4 in float32) of up to 1024 features, all sizes multiples of 8."""
    *norms, w_qkv, b_qkv, w_o, b_o, w1, b1, w2, b2 = weights
    rows, tanh = rows_of(x), tanh_form("layer", approximate)
    (b, t, _), inner, width = x.shape, w_o.shape[0], w_o.shape[0] + w1.shape[1]
    size = inner // heads
    both = _C.empty((b * t, width), x.dtype, x.device)
    z, g = both.as_strided((b, t, heads, size), (t * width, width, size, 1)), both[:, inner:]
    if _is_step(x, w_qkv, w1):
        first = w_qkv, vector(b_qkv), w1, vector(b1)
        packed = _C.decode_projections(rows, *norms, eps, *first, tanh, g)
    else:
        n1, n2, _, _ = _C.layernorm_pair_fwd(rows, *norms, eps)
        packed = _C.linear_fwd(n1, w_qkv, vector(b_qkv), None)
        _C.linear_gelu_fwd(n2, w1, vector(b1), tanh, g)
    cached.attend(packed.reshape((b, t, heads, 3, size)), cos, sin, z)
    bias = cached.last_bias(vector(b_o), vector(b2))
    last = w_o.joined(w2), bias, rows
    if t == 1:
        return _C.decode_output(both, *last).reshape(x.shape)
    return _C.linear_fwd(both, *last).reshape(x.shape)
