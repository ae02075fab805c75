"""The Transformer of the course (Vaswani et al. 2017, with the norm first), written out in
elementary ops. Pythia uses the fused attention of `needle.ops` instead.

Axis letters: B batch, H heads, T queries, S keys, D head dim, C features.
"""

from __future__ import annotations

import math

import numpy as np

from needle import _C, init, ops
from needle._C import Device
from needle.autograd import Tensor
from needle.backend_ndarray import given_device
from needle.nn.basic import (
    Dropout,
    Embedding,
    LayerNorm1d,
    Linear,
    ReLU,
    Sequential,
    check_features,
)
from needle.nn.module import Module


class MultiHeadAttention(Module):
    """softmax(q k^T / sqrt(D)) v, with dropout on the probabilities.

    q: (B, H, T, D); k, v: (B, H, S, D). Returns the result (B, H, T, D) and the probabilities
    (B, H, T, S). causal: query i sees keys j <= i + S - T.

    >>> x = ndl.randn(2, 4, 6, 8)
    >>> result, probabilities = nn.MultiHeadAttention(causal=True)(x, x, x)
    >>> result.shape, probabilities.shape
    ((2, 4, 6, 8), (2, 4, 6, 6))
    """

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        causal: bool = False,
        device: Device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.device = device
        self.dtype = dtype
        self.causal = causal
        self.dropout = Dropout(dropout)

    def create_causal_mask(self, i: int, j: int, device: Device | None) -> _C.NDArray:
        """(1, 1, i, j) of the lowest float32 where a query may not look, and 0 elsewhere."""
        hidden = np.triu(np.ones((1, 1, i, j), dtype=np.float32), j - i + 1)
        lowest = -np.finfo(np.float32).max
        return _C.array(hidden * lowest, "float32", given_device(device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        fits = q.ndim == k.ndim == 4 and k.shape == v.shape
        if not fits or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
            raise ValueError(
                "MultiHeadAttention: q must be (B, H, T, D), k and v (B, H, S, D), but they are "
                f"{q.shape}, {k.shape} and {v.shape}"
            )
        scores = ops.matmul(q, ops.transpose(k)) / math.sqrt(q.shape[3])
        if self.causal:
            mask = self.create_causal_mask(q.shape[2], k.shape[2], q.device)
            scores = scores + Tensor.from_ndarray(mask)
        probabilities = self.dropout(ops.astype(ops.softmax(scores), q.dtype))
        return ops.matmul(probabilities, v), probabilities


class AttentionLayer(Module):
    """A norm before each of q, k, v, bias-free projections, multi-head attention, a projection.

    q: (B, T, q_features), k and v: (B, S, ...), q itself by default; gives (B, T, out_features).
    Projections are drawn in the order q, k, v, out.
    """

    def __init__(
        self,
        q_features: int,
        num_head: int,
        dim_head: int,
        *,
        k_features: int | None = None,
        v_features: int | None = None,
        out_features: int | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        device: Device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        k_features = q_features if k_features is None else k_features
        v_features = q_features if v_features is None else v_features
        out_features = q_features if out_features is None else out_features
        place = {"device": device, "dtype": dtype}
        inner = num_head * dim_head
        self.num_head = num_head
        self.dim_head = dim_head
        self.out_features = out_features
        self.prenorm_q = LayerNorm1d(q_features, **place)
        self.prenorm_k = LayerNorm1d(k_features, **place)
        self.prenorm_v = LayerNorm1d(v_features, **place)
        self.q_projection = Linear(q_features, inner, bias=False, **place)
        self.k_projection = Linear(k_features, inner, bias=False, **place)
        self.v_projection = Linear(v_features, inner, bias=False, **place)
        self.attn = MultiHeadAttention(dropout=dropout, causal=causal, **place)
        self.out_projection = Linear(inner, out_features, bias=False, **place)

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k = q if k is None else k
        v = q if v is None else v
        result, _ = self.attn(
            self._heads(self.q_projection(self.prenorm_q(q))),
            self._heads(self.k_projection(self.prenorm_k(k))),
            self._heads(self.v_projection(self.prenorm_v(v))),
        )
        batch, _, time, _ = result.shape
        together = ops.transpose(result, (1, 2)).reshape((batch, time, -1))
        return self.out_projection(together)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H D) -> (B, H, T, D)."""
        batch, time, _ = x.shape
        return ops.transpose(x.reshape((batch, time, self.num_head, self.dim_head)), (1, 2))


class TransformerLayer(Module):
    """x + drop(attention(x)), then x + drop(W2 drop(relu(W1 norm(x)))), on (B, T, q_features)."""

    def __init__(
        self,
        q_features: int,
        num_head: int,
        dim_head: int,
        hidden_size: int,
        *,
        dropout: float = 0.0,
        causal: bool = True,
        device: Device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.attention = AttentionLayer(
            q_features, num_head, dim_head, dropout=dropout, causal=causal, **place
        )
        self.dropout = Dropout(dropout)
        self.mlp = Sequential(
            LayerNorm1d(q_features, **place),
            Linear(q_features, hidden_size, **place),
            ReLU(),
            Dropout(dropout),
            Linear(hidden_size, q_features, **place),
            Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(x))
        return x + self.mlp(x)


class Transformer(Module):
    """Learned positions (drawn first) and `num_layers` Transformer layers.

    x: (T, B, embedding_size), or (B, T, embedding_size) with batch_first. Returns (x, h) in the
    same layout; h are zeros like x, so that it stands where the course has recurrent layers.

    >>> model = nn.Transformer(16, 32, 2, num_head=2, dim_head=8, batch_first=True, sequence_len=12)
    >>> model(ndl.randn(3, 12, 16))[0].shape
    (3, 12, 16)
    """

    def __init__(
        self,
        embedding_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        num_head: int = 8,
        dim_head: int = 32,
        dropout: float = 0.0,
        causal: bool = True,
        device: Device | str | None = None,
        dtype: str = "float32",
        batch_first: bool = False,
        sequence_len: int = 2048,
    ) -> None:
        super().__init__()
        self.embedding_size = embedding_size
        self.batch_first = batch_first
        self.sequence_len = sequence_len
        self.embedding = Embedding(sequence_len, embedding_size, device=device, dtype=dtype)
        sizes = embedding_size, num_head, dim_head, hidden_size
        options = {"dropout": dropout, "causal": causal, "device": device, "dtype": dtype}
        self.layers = [TransformerLayer(*sizes, **options) for _ in range(num_layers)]

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_features(self, x, "embedding_size")
        if not self.batch_first:
            x = ops.transpose(x, (0, 1))
        time = x.shape[1]
        if time > self.sequence_len:
            raise ValueError(
                f"Transformer: {time} steps, but sequence_len, the number of positions, is "
                f"{self.sequence_len}"
            )
        x = x + self.embedding(np.arange(time))
        for layer in self.layers:
            x = layer(x)
        if not self.batch_first:
            x = ops.transpose(x, (0, 1))
        return x, init.zeros_like(x)
