"""The weights of a model layer by layer and head by head, by the names of TransformerLens.

`model.W_Q` is a new Tensor (L, H, C, D) of the heads of all layers; of one layer,
`model.layers[i].attention.W_Q` (H, C, D) is a view of the parameter. Gradients reach the
parameters. Axis letters: L layers, H heads, C channels, D head dim, F channels of the MLP, V
vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from needle import nn, ops
from needle.autograd import Tensor
from needle.interp.activations import absence


def _stacked(part: str, name: str, shape: str) -> Any:
    def stack(self: Any) -> Tensor:
        weights = [getattr(getattr(layer, part), name, None) for layer in self.layers]
        if any(weight is None for weight in weights):
            raise AttributeError(f"{name}: {absence(self, name) or 'not all layers have one'}")
        return ops.stack(weights)

    return property(stack, doc=f"{shape}, a copy.")


class FactoredWeights:
    """W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O, W_in, b_in, W_out, b_out, W_E and W_U."""

    layers: list[Any]
    embed_in: Any
    embed_out: Any

    W_Q = _stacked("attention", "W_Q", "(L, H, C, D)")
    W_K = _stacked("attention", "W_K", "(L, H, C, D)")
    W_V = _stacked("attention", "W_V", "(L, H, C, D)")
    W_O = _stacked("attention", "W_O", "(L, H, D, C)")
    b_Q = _stacked("attention", "b_Q", "(L, H, D)")
    b_K = _stacked("attention", "b_K", "(L, H, D)")
    b_V = _stacked("attention", "b_V", "(L, H, D)")
    b_O = _stacked("attention", "b_O", "(L, C)")
    W_in = _stacked("mlp", "W_in", "(L, C, F)")
    b_in = _stacked("mlp", "b_in", "(L, F)")
    W_out = _stacked("mlp", "W_out", "(L, F, C)")
    b_out = _stacked("mlp", "b_out", "(L, C)")

    @property
    def W_E(self) -> Tensor:
        """(V, C), the embedding."""
        return self.embed_in.weight

    @property
    def W_U(self) -> Tensor:
        """(C, V), the head; a view where it is tied to the embedding."""
        head = self.embed_out
        return ops.transpose(head.weight) if isinstance(head, nn.TiedHead) else head.weight

    def token_directions(self, tokens: Any) -> Tensor:
        """Return the columns of W_U of tokens, ids or texts of one token each, of any shape:
        (..., C) in float32."""
        ids = np.asarray(tokens)
        if ids.dtype.kind == "U":
            ids = np.vectorize(self.to_single_token)(ids)  # type: ignore[attr-defined]
        columns = ops.index_select(ops.transpose(self.W_U), 0, ids.reshape(-1))
        return ops.astype(columns, "float32").reshape((*ids.shape, columns.shape[1]))
