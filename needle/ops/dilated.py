"""Dilated attention (LongNet: Ding et al. 2023, "Scaling Transformers to 1,000,000,000 Tokens").

A branch (w, r) cuts the sequence into segments of w tokens; in each segment head h attends among
the tokens o, o + r, o + 2 r, ... with o = h mod r, so that r heads together see every token.
Branches are joined as LongNet joins them, each weighted by the sum of the exponentials of its
scores: a query then attends once to the keys of all its branches, as often as they hold a key. So
with L the log-sum-exp over all branches, P = exp(score - L) and the output o, each branch's
gradient is the plain one for L and o: its weight needs no gradient of its own.

A dilation is a stride: every branch is a few views of q, k and v through the dense kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd import FusedOp, Tensor

LOWEST = -3e38  # instead of -inf, where a difference is taken


@dataclass(frozen=True)
class _Piece:
    """A view (B', T', H', X) of a (B, T, H, X): of the segments of `width` tokens from `start` on
    the `size` tokens `dilation` apart, of the heads from `head` on those as far apart. `count`
    segments of one of the batch, or with `batch` None of all of them, as one axis."""

    batch: int | None
    count: int
    width: int
    start: int
    size: int
    head: int
    dilation: int

    def __call__(self, x: NDArray) -> NDArray:
        time, head, last = x.strides[1:]
        segments = self.count if self.batch is not None else x.shape[0] * self.count
        heads = -(-(x.shape[2] - self.head) // self.dilation)
        return x[self.batch or 0 :, self.start :, self.head :, :].as_strided(
            (segments, self.size, heads, x.shape[3]),
            (self.width * time, self.dilation * time, self.dilation * head, last),
        )


def _pieces(shape: tuple[int, ...], width: int, dilation: int, merges: bool) -> Iterator[_Piece]:
    """Of one branch: the whole segments and what is left behind them, for each offset of heads."""
    batch, time, heads, _ = shape
    count = time // width
    together = merges and time % width == 0
    for start, length, segments in ((0, width, count), (count * width, time % width, 1)):
        for offset in range(min(dilation, heads, length) if segments else 0):
            size = -(-(length - offset) // dilation)
            for one in (None,) if together else range(batch):
                yield _Piece(one, segments, width, start + offset, size, offset, dilation)


def _merges(x: NDArray) -> bool:
    """Are batch and time one axis of a (B, T, H, X) array?"""
    return x.shape[0] == 1 or x.strides[0] == x.shape[1] * x.strides[1]


def _add(to: NDArray, what: NDArray) -> None:
    _C.assign(to, to + what)


class DilatedAttention(FusedOp):
    def __init__(self, branches: Sequence[tuple[int, int]], scale: float, causal: bool) -> None:
        self.branches, self.scale, self.causal = branches, scale, causal

    def compute(self, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        shape, device, merges = q.shape, q.device, all(map(_merges, (q, k, v)))
        self.pieces = [
            piece for branch in self.branches for piece in _pieces(shape, *branch, merges)
        ]
        self.lse = _C.empty((*shape[:3], 1), "float32", device)
        self.lse.fill(-math.inf)
        parts = []
        for piece in self.pieces:
            o, lse = _C.attention_fwd(piece(q), piece(k), piece(v), self.scale, int(self.causal))
            lse = _by_time(lse)
            total = piece(self.lse)
            top = total.maximum(lse).maximum(LOWEST)
            _C.assign(total, top + ((total - top).exp() + (lse - top).exp()).log())
            parts.append((o, lse))
        out = _C.empty(shape, "float32", device)
        out.fill(0.0)
        for piece, (o, lse) in zip(self.pieces, parts):
            weight = (lse - piece(self.lse).maximum(LOWEST)).exp()
            _add(piece(out), weight.broadcast_to(o.shape) * o.astype("float32"))
        self.out = out.astype(q.dtype)
        return self.out

    def backward(
        self, dout: NDArray, node: Tensor, sinks: Sequence[NDArray | None]
    ) -> list[NDArray | None]:
        arrays = [x.cached_data for x in node.inputs]
        dout = dout.compact()
        totals = [_C.empty(x.shape, "float32", x.device) for x in arrays]
        for total in totals:
            total.fill(0.0)
        for piece in self.pieces:
            qkv = [piece(x) for x in arrays]
            into = [_C.empty(x.shape, x.dtype, x.device) for x in qkv]
            _C.attention_bwd(
                piece(dout), *qkv, piece(self.out), _by_time(piece(self.lse)), self.scale,
                int(self.causal), *into,
            )  # fmt: skip
            for total, part in zip(totals, into):
                _add(piece(total), part.astype("float32"))
        return [
            total.astype(x.dtype) if x.requires_grad else None
            for x, total in zip(node.inputs, totals)
        ]


def _by_time(lse: NDArray) -> NDArray:
    """(B, H, T) as (B, T, H, 1), and back."""
    if lse.ndim == 3:
        return lse.reshape((*lse.shape, 1)).permute((0, 2, 1, 3))
    b, t, h, _ = lse.shape
    return lse.permute((0, 2, 1, 3)).compact().reshape((b, h, t))


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[int],
    dilations: Sequence[int],
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention within segments, of which the longer hold fewer tokens; its gradient is exact.

    q, k, v: (B, T, H, D), floats; the result is (B, T, H, D). segments, dilations: those of the
    branches, whole numbers; a segment longer than T is one of T, the last one of T may be shorter.
    causal: a query sees keys at or before it. scale: 1 / sqrt(D) by default. A token that no branch
    holds for a head gives 0 there; with a dilation of 1 in one branch there is none.
    ValueError for shapes and numbers that do not fit.

    >>> q = ndl.randn(1, 100, 4, 16)
    >>> ndl.ops.dilated_attention(q, q, q, segments=(16, 64), dilations=(1, 4)).shape
    (1, 100, 4, 16)
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if any(shape != shapes[0] for shape in shapes) or len(shapes[0]) != 4:
        raise ValueError(
            f"dilated_attention: q, k and v must have one shape (B, T, H, D), but have {shapes}"
        )
    branches = list(zip(segments, dilations))
    if len(segments) != len(dilations) or not branches:
        raise ValueError(
            "dilated_attention: segments and dilations must be as many, one a branch, but are "
            f"{len(segments)} and {len(dilations)}"
        )
    for name, numbers in (("segments", segments), ("dilations", dilations)):
        for number in numbers:
            _check(name, number)
    time, size = shapes[0][1], shapes[0][3]
    scale = 1.0 / math.sqrt(max(size, 1)) if scale is None else float(scale)
    whole = [(min(width, max(time, 1)), dilation) for width, dilation in branches]
    return DilatedAttention(whole, scale, causal)(q, k, v)


def _check(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(
            f"dilated_attention: {name} must be whole numbers above 0, but has {number!r:.40}"
        )
