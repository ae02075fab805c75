"""Dilated attention (LongNet: Ding et al. 2023, "Scaling Transformers to 1,000,000,000 Tokens").

A branch (w, r) cuts the sequence into segments of w tokens; in each segment head h attends among
the tokens o, o + r, o + 2 r, ... with o = h mod r, so that r heads together see every token.
Branches are joined as LongNet joins them, each weighted by the sum of the exponentials of its
scores: a query then attends once to the keys of all its branches, as often as they hold a key. So
with L the log-sum-exp over all branches, P = exp(score - L) and the output o, each branch's
gradient is the plain one for L and o: its weight needs no gradient of its own.

A dilation is a stride: every branch is a few views of q, k and v through the dense kernels, which
join what they compute with the same views of the result, where they write it. Elements of tokens
outside the branch are neither written nor read, and there is no array of a branch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from needle import _C
from needle._C import Device, NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.attention import scale_of

Steps = tuple[int, int, int]  # along batch, time and heads


@dataclass(frozen=True)
class View:
    """View (B', T', H', ...) of a (B, T, H, ...): where it starts, its sizes, and how far the
    next of each of its axes is."""

    start: Steps
    shape: Steps
    steps: tuple[Steps, Steps, Steps]

    def __call__(self, x: NDArray) -> NDArray:
        first, shape, strides = _placed(self, x.shape, x.strides)
        return x[first].as_strided(shape, strides)

    def later(self, tokens: int) -> View:
        batch, time, head = self.start
        return replace(self, start=(batch, time + tokens, head))


@functools.lru_cache(maxsize=1024)  # each training step asks for the same views
def _placed(view: View, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple:
    """(index of the first element, shape, strides) of the view of an array."""
    first = tuple(slice(at, None) for at in view.start)
    steps = [sum(n * s for n, s in zip(step, strides)) for step in view.steps]
    return first, (*view.shape, *shape[3:]), (*steps, *strides[3:])


def views_of(shape: tuple[int, ...], width: int, dilation: int, merges: bool) -> Iterator[View]:
    """Yield the whole segments of one branch and the rest after them. B' is the batch, or the
    segments, or both where `merges` says that batch and time are one axis."""
    batch, time, heads = shape[:3]
    count = time // width
    for start, length, segments in ((0, width, count), (count * width, time % width, 1)):
        if segments == 0 or length == 0:
            continue
        if segments == 1:
            sequences, step = [(0, batch)], (1, 0, 0)
        elif batch == 1 or (merges and time % width == 0):
            sequences, step = [(0, batch * segments)], (0, width, 0)
        else:
            sequences, step = [(one, segments) for one in range(batch)], (0, width, 0)
        for first, number in sequences:
            for offset, head, together, next_head in heads_of(heads, dilation, 0, length):
                size = tokens_before(length, offset, dilation)
                yield View(
                    (first, start + offset, head),
                    (number, size, together),
                    (step, (0, dilation, 0), next_head),
                )


def tokens_before(end: int, offset: int, dilation: int) -> int:
    """Count those of offset, offset + dilation, ... that are below `end`."""
    return max(0, -(-(end - offset) // dilation))


def heads_of(heads: int, dilation: int, *bounds: int) -> list[tuple[int, int, int, Steps]]:
    """Return groups of heads that can share one strided view: (first token, first head, number of
    heads, step to the next head). A group holds heads `dilation` apart, which begin at the same
    token, or up to `dilation` neighbours, each of which begins one token later; the way with fewer
    groups is taken. All heads of a group have the same number of tokens before each bound, and at
    least one between the first two. For 8 heads and dilation 4: heads 0-3 from tokens 0-3, and
    heads 4-7 from tokens 0-3.

    >>> from needle.ops.dilated import heads_of
    >>> heads_of(8, 4, 0, 8)
    [(0, 0, 4, (0, 1, 1)), (0, 4, 4, (0, 1, 1))]
    """
    offsets = [
        (o, o, -(-(heads - o) // dilation), (0, 0, dilation)) for o in range(min(dilation, heads))
    ]
    neighbours = []
    cuts = sorted({0, dilation} | {bound % dilation for bound in bounds})
    for head in range(0, heads, dilation):
        most = min(dilation, heads - head)
        for begin, end in pairwise(cuts):
            if begin < most:
                neighbours.append((begin, head + begin, min(end, most) - begin, (0, 1, 1)))

    def filled(views: list[tuple[int, int, int, Steps]]) -> list[tuple[int, int, int, Steps]]:
        before = [[tokens_before(b, view[0], dilation) for b in bounds[:2]] for view in views]
        return [view for view, (begin, end) in zip(views, before) if begin < end]

    return min(filled(offsets), filled(neighbours), key=len)


def _merges(x: NDArray) -> bool:
    """Are batch and time one axis of a (B, T, H, X) array?"""
    return x.shape[0] == 1 or x.strides[0] == x.shape[1] * x.strides[1]


Branch = tuple[int, int]  # segment, dilation


def joined(branches: Sequence[Branch]) -> tuple[tuple[Branch, int], ...]:
    """Return the branches from the one with most tokens on, each with `joins` of its kernels: 0
    where it overwrites all tokens, being the first and without dilation."""
    ordered = sorted(branches, key=lambda branch: branch[1])
    return tuple((branch, int(i > 0 or branch[1] > 1)) for i, branch in enumerate(ordered))


@functools.lru_cache(maxsize=64)
def views_to_join(
    shape: tuple[int, ...], branches: tuple[tuple[Branch, int], ...], merges: bool
) -> list[tuple[View, int]]:
    """Return the views of all branches in their order, each with its `joins`."""
    return [(view, joins) for of, joins in branches for view in views_of(shape, *of, merges)]


def to_join(
    branches: Sequence[tuple[Branch, int]], shape: tuple[int, ...], dtype: str, device: Device
) -> list[NDArray]:
    """Return the result (B, T, H, D) and its log-sum-exp (B, T, H) before the first branch."""
    arrays = [_C.empty(shape, dtype, device), _C.empty(shape[:3], "float32", device)]
    if branches[0][1]:
        for array, value in zip(arrays, (0, -math.inf)):
            array.fill(value)
    return arrays


class DilatedAttention(FusedOp):
    def __init__(self, branches: Sequence[Branch], scale: float, causal: bool) -> None:
        self.branches, self.scale, self.causal = joined(branches), scale, int(causal)

    def compute(self, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        merges = all(map(_merges, (q, k, v)))
        self.out, self.lse = to_join(self.branches, q.shape, q.dtype, q.device)
        self.views = views_to_join(q.shape, self.branches, merges)
        for view, joins in self.views:
            _C.attention_part_fwd(
                view(q), view(k), view(v), self.scale, self.causal, joins,
                view(self.out), view(self.lse),
            )  # fmt: skip
        return self.out

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        q, k, v = (x.cached_data for x in node.inputs)
        dout = dout.compact()
        grads = dq, dk, dv = [_C.empty(x.shape, x.dtype, x.device) for x in (q, k, v)]
        if self.branches[0][1]:
            for grad in grads:
                grad.fill(0)
        for view, joins in self.views:
            _C.attention_part_bwd(
                view(dout), view(q), view(k), view(v), view(self.out), view(self.lse),
                self.scale, self.causal, joins, view(dq), view(dk), view(dv),
            )  # fmt: skip
        return [grad if x.requires_grad else None for x, grad in zip(node.inputs, grads)]


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
    branches, whole numbers in sequences; a segment longer than T is one of T, the last one of T may
    be shorter. causal: a query sees keys at or before it. scale: 1 / sqrt(D) by default. A token
    that no branch holds for a head gives 0 there; with a dilation of 1 in one branch there is none.
    ValueError for shapes and numbers that do not fit, TypeError for segments that are no sequence.

    >>> q = ndl.randn(1, 100, 4, 16)
    >>> ndl.ops.dilated_attention(q, q, q, segments=(16, 64), dilations=(1, 4)).shape
    (1, 100, 4, 16)
    """
    return DilatedAttention(
        *checked("dilated_attention", (q, k, v), segments, dilations, causal, scale)
    )(q, k, v)


def checked(
    op: str,
    qkv: Sequence[Tensor],
    segments: Sequence[int],
    dilations: Sequence[int],
    causal: bool,
    scale: float | None,
    ranks: int = 1,
) -> tuple[list[tuple[int, int]], float, bool]:
    """The branches, the scale and `causal`, of sequences that so many ranks share. ValueError of
    `op`."""
    shapes = [tuple(x.shape) for x in qkv]
    if any(shape != shapes[0] for shape in shapes) or len(shapes[0]) != 4:
        raise ValueError(f"{op}: q, k and v must have one shape (B, T, H, D), but have {shapes}")
    widths, strides = ([operator.index(n) for n in given] for given in (segments, dilations))
    if len(widths) != len(strides) or min([*widths, *strides], default=0) < 1:
        raise ValueError(
            f"{op}: segments and dilations must be numbers above 0, one a branch, but are "
            f"{widths} and {strides}"
        )
    _, time, heads, size = shapes[0]
    most = max(time * ranks, 1)  # above these numbers a branch stays as it is
    branches = [(min(w, most), min(r, max(most, heads))) for w, r in zip(widths, strides)]
    return branches, scale_of(scale, size), bool(causal)
