"""PyTorch's torch.nn.functional: needle.ops, with PyTorch's arguments where the others differ.

import needle.nn.functional as F
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from needle import init, ops
from needle.autograd import Tensor
from needle.backend_ndarray import listed
from needle.ops import *  # noqa: F403
from needle.ops.reduce import rounded


def pad(a: Tensor, widths: Sequence[int], mode: str = "constant", value: float = 0) -> Tensor:
    """`a` with elements `value` around it: (before, after) of the last axis, then of the one before
    it, and so on.

    >>> print(nn.functional.pad(ndl.ones(1, 1), (1, 0, 0, 1)))
    [[0. 1.]
     [0. 0.]]
    """
    if mode != "constant" or len(widths) % 2 or len(widths) > 2 * a.ndim:
        raise ValueError(f"pad: needs pairs for the last of {a.ndim} axes, and the mode 'constant'")
    pairs = [(0, 0)] * (a.ndim - len(widths) // 2)
    pairs += [(widths[i], widths[i + 1]) for i in range(len(widths) - 2, -1, -2)]
    return ops.pad(a, pairs, value)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """int64 rows of the identity at whole numbers; by default up to the largest."""
    classes = num_classes if num_classes >= 0 else int(tensor.max().item()) + 1
    return init.one_hot(classes, tensor, dtype="int64")


def layer_norm(
    x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """ops.layer_norm over the last axis, of size `shape`, by default without weight and bias."""
    shape = listed(shape)
    if shape != x.shape[-1:]:
        raise ValueError(f"layer_norm: normalises the last axis, {x.shape[-1:]}, not {shape}")
    like = {"device": x.device, "dtype": x.dtype}
    weight = init.ones(*shape, **like) if weight is None else weight
    return ops.layer_norm(x, weight, init.zeros(*shape, **like) if bias is None else bias, eps)


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """ops.attention of q, k and v (B, H, T, D), (H, T, D) or (T, D); is_causal: query i sees keys
    j <= i, of as many or more. ValueError for a mask and for dropout, which it does not have."""
    if attn_mask is not None or dropout_p:
        raise ValueError(
            "scaled_dot_product_attention: has no attn_mask and no dropout_p: take is_causal, "
            "ops.block_sparse_attention for blocks, or softmax with where and dropout"
        )
    if 2 <= q.ndim < 4:
        wide = (x.unsqueeze(0) for x in (q, k, v))
        return scaled_dot_product_attention(*wide, is_causal=is_causal, scale=scale).squeeze(0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if is_causal:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    return ops.attention(q, k, v, is_causal, scale).transpose(1, 2)


def normalize(a: Tensor, p: float = 2, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """`a` divided by its norm along `dim`, or by eps where that is larger."""
    wide = ops.astype(a, "float32")  # eps is 0 in float16
    out = wide / wide.norm(p, dim, True).maximum(eps)
    return rounded(out, a)


def cosine_similarity(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The dot product along `dim` of a and b, each divided by its norm, or by eps where that is
    larger."""
    x, y = (normalize(ops.astype(operand, "float32"), 2, dim, eps) for operand in (a, b))
    out = (x * y).sum(dim)
    return rounded(out, a)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias for a weight (out, in); those of nn.Linear are (in, out)."""
    out = ops.linear_transposed(x, weight)
    return out if bias is None else out + bias


def nll_loss(input: Tensor, target: Any, *, ignore_index: int = -100) -> Tensor:
    """The mean of -input[target] over the rows of log-probabilities (N, V) whose target, a Tensor,
    array or list, is not `ignore_index`; 0 with no row left."""
    given = target if isinstance(target, Tensor) else init.tensor(target, device=input.device)
    classes = given.reshape(-1, 1)
    counts = classes != operator.index(ignore_index)
    if bool((counts & (classes < 0)).any()):
        raise ValueError("nll_loss: target has a number below 0, which is no class")
    picked = ops.astype(input.gather(1, classes * counts), "float32")
    return rounded(-ops.where(counts, picked, 0.0).sum() / ops.maximum(counts.sum(), 1), input)
