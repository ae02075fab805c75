"""Causal self-attention with rotary positions, as GPT-NeoX has it (Black et al. 2022).

Axis letters: B batch, T time, C features, H heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle import _C, ops
from needle._C import Device, NDArray
from needle.autograd import Tensor
from needle.block_mask import BlockMask, as_block_mask
from needle.nn.basic import Linear
from needle.nn.module import Module, fuses_as
from needle.ops.layer import Cached

PROJECTIONS = ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k")
PATTERNS = ("hook_attn_scores", "hook_pattern")
RESULT = "hook_result"
POSITIONS = 2**31 - 1  # positions are int32


def rotary_tables(length: int, dims: int, base: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (length, dims / 2) in float32, for heads of which the first `dims` dimensions are
    rotated (Su et al. 2021). The angles are rounded to float32 as every GPT-NeoX rounds them: the
    published weights have learned those."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(max(dims, 1))
    frequencies = np.float32(1) / np.float32(base) ** exponents
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


class Attention(Module):
    """(B, T, C) -> (B, T, C): a projection to q, k and v, attention, a projection back.

    The output axis of `query_key_value` is [head 0: q k v][head 1: q k v]..., so that
    (B, T, H, 3, D) is a view of it. in_std, out_std: of the two projections' weights, as in Linear.

    >>> rotary = tuple(map(nd.array, nn.rotary_tables(16, 4)))
    >>> nn.Attention(32, 2)(ndl.randn(1, 16, 32), rotary).shape
    (1, 16, 32)
    """

    fuses = True
    hook_points = dict.fromkeys((*PROJECTIONS, *PATTERNS, "hook_z", RESULT))
    group: Any = None  # the ranks that share each sequence (ops.ring_attention), this one's tokens

    def __init__(
        self,
        features: int,
        heads: int,
        bias: bool = True,
        device: Device | str | None = None,
        dtype: str = "float32",
        in_std: float | None = None,
        out_std: float | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or features % heads:
            raise ValueError(f"Attention: features {features} are no multiple of heads {heads}")
        self.heads, self.head_dim = heads, features // heads
        self.query_key_value = Linear(features, 3 * features, bias, device, dtype, in_std)
        self.dense = Linear(features, features, bias, device, dtype, out_std)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[NDArray, NDArray] | None = None,
        mask: BlockMask | None = None,
        cache: Cached | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Training and evaluation attend within x, prefill and decoding over what `cache` holds.
        residual (B, T, C) is added to the result.

        rotary: tables (S, R) with S >= T, 2 R <= D; None rotates nothing. mask: only these blocks
        of keys. Scores and pattern, T x T numbers a head in float32, are computed only for hooks on
        them; q, k and v one by one only for hooks on those.
        """
        qkv = self.query_key_value(x).reshape((*x.shape[:2], self.heads, 3, self.head_dim))
        if rotary is None:
            rotary = (_C.empty((POSITIONS, 0), "float32", x.device),) * 2
        cos, sin = (table[: x.shape[1]] for table in rotary)
        if cache is not None:
            if mask is not None:
                raise ValueError(
                    "Attention: over a cache there is no mask: a model that has one returns it "
                    "from block_mask(time), and generates without a cache"
                )
            shape = (*x.shape[:2], self.heads, self.head_dim)
            seen = Tensor.from_ndarray(_C.empty(shape, x.dtype, x.device))
            cache.attend(qkv.cached_data, *rotary, seen.cached_data)
        elif self.group is not None or self.is_hooked_at(*PROJECTIONS, *PATTERNS):
            seen = self._by_parts(qkv, cos, sin, mask)
        else:
            seen = ops.qkv_attention(qkv, cos, sin, causal=True, mask=mask, overwrite=True)
        seen = self.hook("hook_z", seen)
        if self.is_hooked_at(RESULT):
            y = self._by_head(seen)
        elif residual is not None and fuses_as(self.dense, Linear):
            return self.dense(seen.reshape(x.shape), residual=residual)
        else:
            y = self.dense(seen.reshape(x.shape))
        return y if residual is None else residual + y

    def has_hook_point(self, name: str) -> bool:
        """False for the results of heads where the projection back is no plain Linear, which alone
        is a sum over heads of a product with its weight."""
        return name != RESULT or fuses_as(self.dense, Linear)

    # ---- weights by head, as TransformerLens has them --------------------------------------------

    W_Q = property(lambda self: self._weight(0), doc="(H, C, D), a view of query_key_value's.")
    W_K = property(lambda self: self._weight(1), doc="(H, C, D), a view.")
    W_V = property(lambda self: self._weight(2), doc="(H, C, D), a view.")
    b_Q = property(lambda self: self._bias(0), doc="(H, D), a view.")
    b_K = property(lambda self: self._bias(1), doc="(H, D), a view.")
    b_V = property(lambda self: self._bias(2), doc="(H, D), a view.")

    @property
    def W_O(self) -> Tensor:
        """(H, D, C), a view of the projection back."""
        weight = self.dense.weight
        return weight.reshape((self.heads, self.head_dim, weight.shape[1]))

    @property
    def b_O(self) -> Tensor | None:
        return self.dense.bias

    def _weight(self, part: int) -> Tensor:
        weight = self.query_key_value.weight
        shape = (weight.shape[0], self.heads, 3, self.head_dim)
        return ops.transpose(weight.reshape(shape)[:, :, part], (0, 1))

    def _bias(self, part: int) -> Tensor | None:
        bias = self.query_key_value.bias
        return None if bias is None else bias.reshape((self.heads, 3, self.head_dim))[:, part]

    # ---- forward ---------------------------------------------------------------------------------

    def _by_parts(self, qkv: Tensor, cos: NDArray, sin: NDArray, mask: BlockMask | None) -> Tensor:
        q, k, v = (self.hook(name, x) for name, x in zip(PROJECTIONS, ops.split(qkv, 3)))
        q = self.hook("hook_rot_q", _rotated(q, cos, sin))
        k = self.hook("hook_rot_k", _rotated(k, cos, sin))
        if self.is_hooked_at(*PATTERNS):
            if self.group is not None:
                raise ValueError(
                    f"Attention: {' and '.join(PATTERNS)} are of whole sequences, which ranks "
                    "share here: take these hooks away, or end share_sequences"
                )
            return self._plain(q, k, v, mask)
        if self.group is not None:
            return ops.ring_attention(q, k, v, self.group, mask=mask)
        return ops.attention(q, k, v, causal=True, mask=mask)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
        """Causal attention of (B, T, H, D) with all its probabilities, in float32."""
        time, heads, size = q.shape[1:]
        visible = np.tri(time, dtype=bool)[None]
        if mask is not None:
            as_block_mask("Attention", mask).check("Attention", time, time, heads)
            visible = visible & mask.to_dense().reshape((-1, time, time))
        q, k, wide = (ops.transpose(ops.astype(x, "float32"), (1, 2)) for x in (q, k, v))
        scores = ops.matmul(q, ops.transpose(k)) / math.sqrt(size)
        scores = self.hook("hook_attn_scores", ops.where(visible[None], scores, -math.inf))
        pattern = self.hook("hook_pattern", ops.softmax(scores))
        return ops.astype(ops.transpose(ops.matmul(pattern, wide), (1, 2)), v.dtype)

    def _by_head(self, seen: Tensor) -> Tensor:
        """The projection back of (B, T, H, D), head by head in float32."""
        weight = ops.astype(self.dense.weight, "float32")
        weight = weight.reshape((self.heads, self.head_dim, weight.shape[1]))
        wide = ops.transpose(ops.astype(seen, "float32"), (1, 2))
        result = self.hook(RESULT, ops.transpose(ops.matmul(wide, weight), (1, 2)))
        y = result.sum(2)
        if self.dense.bias is not None:
            y = y + ops.astype(self.dense.bias, "float32")
        return ops.astype(y, seen.dtype)


def _rotated(x: Tensor, cos: NDArray, sin: NDArray) -> Tensor:
    """(B, T, H, D) rotated by position."""
    batch, time, heads, size = x.shape
    return ops.rotary(x.reshape((batch, time, heads, 1, size)), cos, sin, 1).reshape(x.shape)
