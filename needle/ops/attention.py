"""Attention and rotary position embedding. No T x S matrix is ever stored: the forward keeps the
output and the log-sum-exp of each query, and the backward recomputes the rest.

Layout everywhere: (B, T, H, D), any strides whose last is 1. The packed projection is
(B, T, H, 3, D), as in GPT-NeoX; q, k and v are strided views of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.block_mask import BlockMask, as_block_mask
from needle.ops.broadcast import differentiable
from needle.ops.common import check_tensors


def array_on(x: Any, device: Any) -> NDArray:
    """A table of angles in any form, float32 where it has none."""
    if isinstance(x, Tensor):
        x = x.cached_data
    if not isinstance(x, NDArray):
        x = _C.array(x, "float32", device)
    return x if x.device == device else x.to(device)


# ---- rotary --------------------------------------------------------------------------------------


@differentiable("Rotary", lambda g, cos, sin, parts, sign: _rotary(g, cos, sin, parts, -sign))
def _rotary(x: NDArray, cos: NDArray, sin: NDArray, parts: int, sign: float) -> NDArray:
    """Rotate pairs of dims by the angle of their position times `sign`."""
    y = x.copy()
    _C.rotary(y, cos, sin, parts, sign)
    return y


def rotary(x: Tensor, cos: Any, sin: Any, parts: int) -> Tensor:
    """Rotary position embedding (Su et al. 2021) in the form of GPT-NeoX.

    x: (B, T, H, P, D); cos, sin: (T, R) float32 with 2 R <= D. In the first `parts` of the P slices
    dims (i, i + R), i < R, rotate by the angle of position t; everything else is copied.
    """
    check_tensors("rotary", x=x)
    device = x.device
    return _rotary(x, array_on(cos, device), array_on(sin, device), parts, 1.0)


# ---- kernels, dense or by blocks -----------------------------------------------------------------


def scale_of(scale: float | None, size: int) -> float:
    """Return the scale of heads of `size` dims, 1 / sqrt(size) by default."""
    return 1.0 / math.sqrt(max(size, 1)) if scale is None else float(scale)


class Kernel:
    """One call of `op`. Forward keeps the arrays that backward reads."""

    def __init__(self, op: str, scale: float | None, causal: bool, mask: BlockMask | None) -> None:
        self.op, self.scale, self.causal = op, scale, int(causal)
        self.mask = None if mask is None else as_block_mask(op, mask)

    def forward(self, q: NDArray, k: NDArray, v: NDArray, out: NDArray | None = None) -> NDArray:
        """Return the result, in `out` if that is given."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4:
                raise ValueError(f"{self.op}: {name} must be (B, T, H, D), but is {x.shape}")
        self.factor = scale_of(self.scale, q.shape[3])
        t, s = q.shape[1], k.shape[1]
        if self.causal and s < t:
            raise ValueError(
                f"{self.op}: causal needs no fewer keys than queries, but there are {s} for {t}; "
                "pass causal=False where a query may see all keys"
            )
        self.o = _C.empty(q.shape, q.dtype, q.device) if out is None else out
        last = self.factor, self.causal, self.o
        if self.mask is None:
            self.lse = _C.attention_fwd(q, k, v, *last)
        else:
            self.mask.check(self.op, t, s, q.shape[2])
            mask = self.mask.causal() if self.causal else self.mask
            self.lists = mask.lists(q.device)
            self.block = mask.block
            self.lse = _C.block_sparse_attention_fwd(q, k, v, *self.lists[:3], self.block, *last)
        return self.o

    def backward(
        self,
        dout: NDArray,
        qkv: Sequence[NDArray],
        grads: Sequence[NDArray],
        cos: NDArray | None = None,
        sin: NDArray | None = None,
    ) -> None:
        """Overwrite the arrays `grads` with dq, dk and dv. With cos and sin, q and k have been
        rotated, and dq and dk are the gradients before rotation."""
        last = (self.factor, self.causal, cos, sin, *grads, None, None)
        if self.mask is None:
            _C.attention_bwd(dout, *qkv, self.o, self.lse, *last)
        else:
            _C.block_sparse_attention_bwd(
                dout, *qkv, self.o, self.lse, *self.lists, self.block, *last
            )


class Attention(FusedOp):
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def compute(self, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        return self.kernel.forward(q, k, v)

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        qkv = [x.cached_data for x in node.inputs]
        grads = [_C.empty(x.shape, x.dtype, x.device) for x in qkv]
        self.kernel.backward(dout, qkv, grads)
        return [*grads]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    mask: BlockMask | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, exact.

    q: (B, T, H, D); k, v: (B, S, H, D); the result is (B, T, H, D). scale: 1 / sqrt(D) by default.
    causal: query i sees keys j <= i + S - T, which needs S >= T. mask: only these blocks of keys,
    and of them only what `causal` allows. A query that sees no key gives 0.

    >>> q, k = ndl.zeros(1, 2, 1, 4), ndl.zeros(1, 2, 1, 4)  # B T H D: equal scores
    >>> v = ndl.Tensor([[0, 0, 0, 0], [2, 4, 6, 8]]).reshape((1, 2, 1, 4))
    >>> print(ndl.ops.attention(q, k, v).reshape((2, 4)))  # token 0 sees itself alone
    [[0. 0. 0. 0.]
     [1. 2. 3. 4.]]
    """
    return Attention(Kernel("attention", scale, causal, mask))(q, k, v)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """`attention` over the blocks of `mask` alone; blocks that are not in it are never touched.

    Which blocks are fast on which GPU, and for which operands: BlockMask.

    >>> q = ndl.randn(1, 100, 2, 16)
    >>> mask = ndl.BlockMask.local(T=100, window=32, block=16)
    >>> ndl.block_sparse_attention(q, q, q, mask).shape
    (1, 100, 2, 16)
    """
    name = "block_sparse_attention"
    return Attention(Kernel(name, scale, causal, as_block_mask(name, mask)))(q, k, v)


class QKVAttention(FusedOp):
    """Rotate q and k of the packed projection and attend to views of it. Keep that, the output and
    its log-sum-exp. The kernels rotate dq and dk back. With `overwrite` the projection is rotated
    where it lies."""

    reads_inputs = False

    def __init__(self, kernel: Kernel, cos: NDArray, sin: NDArray, overwrite: bool) -> None:
        self.kernel, self.cos, self.sin, self.overwrite = kernel, cos, sin, overwrite

    def compute(self, qkv: NDArray) -> NDArray:
        if qkv.ndim != 5 or qkv.shape[3] != 3:
            raise ValueError(f"qkv_attention: qkv must be (B, T, H, 3, D), but is {qkv.shape}")
        self.rotated = qkv if self.overwrite and qkv.is_compact() else qkv.copy()
        _C.rotary(self.rotated, self.cos, self.sin, 2, 1.0)
        return self.kernel.forward(*qkv_parts(self.rotated))

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> tuple:
        dqkv = _C.empty(self.rotated.shape, self.rotated.dtype, self.rotated.device)
        qkv, grads = qkv_parts(self.rotated), qkv_parts(dqkv)
        self.kernel.backward(dout, qkv, grads, self.cos, self.sin)
        return (dqkv,)


def qkv_parts(packed: NDArray) -> list[NDArray]:
    """The views q, k, v (B, T, H, D) of a packed (B, T, H, 3, D)."""
    return [packed.at((..., i, slice(None))) for i in range(3)]


def qkv_attention(
    qkv: Tensor,
    cos: Any,
    sin: Any,
    causal: bool = True,
    scale: float | None = None,
    mask: BlockMask | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Self-attention of a packed projection: rotates q and k, then `attention`.

    qkv: (B, T, H, 3, D); cos, sin: (T, R) float32, as in `rotary`; the result is (B, T, H, D).
    overwrite: qkv has no other reader and may be rotated in place, which saves a copy.
    """
    check_tensors("qkv_attention", qkv=qkv)
    cos, sin = array_on(cos, qkv.device), array_on(sin, qkv.device)
    return QKVAttention(Kernel("qkv_attention", scale, causal, mask), cos, sin, overwrite)(qkv)
