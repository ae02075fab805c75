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

Ranks that share a sequence (ring_attention.py): a rank's run of tokens is cut where segments begin.
Segments that lie in it whole are attended to as on one device, on which all do. Of another one it
has the tokens [x, y): in a branch of dilation r they are queries to the keys o, o + r, ... of the
segment, with causal attention of those before y alone. The last query is then the last key, which
is what `causal` of the kernels means with fewer queries than keys. So runs need not fit segments,
nor segments runs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.attention import scale_of
from needle.ops.ring_attention import Ranks, SharedSequence, exact

Steps = tuple[int, int, int]  # along batch, time and heads
ALONE: Any = SimpleNamespace(rank=0, size=1)  # the group of one device


class View(NamedTuple):
    """View (B', T', H', ...) of a (B, T, H, ...): where it starts, its sizes, and how far the
    next of each of its axes is."""

    start: Steps
    shape: Steps
    steps: tuple[Steps, Steps, Steps]

    def __call__(self, x: NDArray) -> NDArray:
        first, shape, strides = _placed(self, x.shape, x.strides)
        return x[first].as_strided(shape, strides)


@functools.lru_cache(maxsize=1024)  # each training step asks for the same views
def _placed(view: View, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple:
    """(index of the first element, shape, strides) of the view of an array."""
    first = tuple(slice(at, None) for at in view.start)
    steps = [sum(n * s for n, s in zip(step, strides)) for step in view.steps]
    return first, (*view.shape, *shape[3:]), (*steps, *strides[3:])


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


Branch = tuple[int, int]  # segment, dilation
Call = tuple[View, View, int]  # of a kernel: its queries, its keys, and its `joins`


def joined(branches: Sequence[Branch]) -> tuple[tuple[Branch, int], ...]:
    """Return the branches from the one with most tokens on, each with `joins` of its kernels: 0
    where it overwrites all tokens, being the first and without dilation."""
    ordered = sorted(branches, key=lambda branch: branch[1])
    return tuple((branch, int(i > 0 or branch[1] > 1)) for i, branch in enumerate(ordered))


@functools.lru_cache(maxsize=64)  # each training step asks for the same
def calls_of(
    batch: int,
    heads: int,
    run: tuple[int, int],
    time: int,
    branches: tuple[tuple[Branch, int], ...],
    causal: bool,
    merges: bool,
) -> list[Call]:
    """Return the kernels of a run [start, stop) of tokens, in the order of branches: views of the
    run, and of all tokens. B' of those of whole segments is the batch, or the segments, or both
    where `merges` says that batch and time are one axis."""
    start, stop = run
    calls: list[Call] = []
    for (width, dilation), joins in branches:
        at = start
        while at < stop:
            segment = at - at % width
            whole = (stop - segment) // width if at == segment else 0
            end = segment + whole * width if whole else min(segment + width, stop)
            last = end if causal else min(segment + width, time)
            bounds = at - segment, min(end - segment, width), min(last - segment, width)
            step, sequences = (1, 0, 0), [(0, batch)]
            if whole > 1:
                step, sequences = (0, width, 0), [(one, whole) for one in range(batch)]
                if batch == 1 or (merges and end - at == time):
                    sequences = [(0, batch * whole)]
            for one, number in sequences:
                for offset, head, together, next_head in heads_of(heads, dilation, *bounds):
                    steps = step, (0, dilation, 0), next_head
                    before, own, keys = (tokens_before(b, offset, dilation) for b in bounds)
                    first = segment + offset + before * dilation - start
                    queries = View((one, first, head), (number, own - before, together), steps)
                    seen = View((one, segment + offset, head), (number, keys, together), steps)
                    calls.append((queries, seen, joins))
            at = end
    return calls


class DilatedAttention(FusedOp):
    def __init__(
        self,
        branches: Sequence[Branch],
        scale: float,
        causal: bool,
        group: Ranks | None = None,
        layout: str = "zigzag",
    ) -> None:
        self.branches, self.scale, self.causal = joined(branches), scale, int(causal)
        self.group, self.layout = group or ALONE, layout

    def compute(self, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        self.sequence = SharedSequence(self.group, q.shape[1], self.layout)
        self.merges = self.group.size == 1 and all(
            x.shape[0] == 1 or x.strides[0] == x.shape[1] * x.strides[1] for x in (q, k, v)
        )
        *_, keys, values = next(self.sequence.gathered(k, v, False))
        self.out = _C.empty(q.shape, q.dtype, q.device)
        self.lse = _C.empty(q.shape[:3], "float32", q.device)
        if self.branches[0][1]:
            self.out.fill(0)
            self.lse.fill(-math.inf)
        for (own, out, lse), calls in self._runs(q, self.out, self.lse):
            for queries, seen, joins in calls:
                _C.attention_part_fwd(
                    queries(own), seen(keys), seen(values), self.scale, self.causal, joins,
                    queries(out), queries(lse),
                )  # fmt: skip
        return self.out

    def _runs(self, *arrays: NDArray) -> Iterator[tuple[list[NDArray], list[Call]]]:
        """Yield of each run of this rank's tokens the parts of arrays, and its kernels."""
        batch, _, heads = arrays[0].shape[:3]
        for local, run in self.sequence.own:
            tokens = (run.start, run.stop), self.sequence.time, self.branches
            calls = calls_of(batch, heads, *tokens, bool(self.causal), self.merges)
            yield [x[:, local] for x in arrays], calls

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        arrays = [x.cached_data for x in node.inputs]
        grads = [_C.empty(x.shape, x.dtype, x.device) for x in arrays]
        if self.branches[0][1]:
            for grad in grads:
                grad.fill(0)
        for parts, calls in self._runs(dout.compact(), *arrays, self.out, self.lse, *grads):
            for view, _, joins in calls:
                *given, dq, dk, dv = map(view, parts)
                _C.attention_part_bwd(*given, self.scale, self.causal, joins, dq, dk, dv)
        return [grad if x.requires_grad else None for x, grad in zip(node.inputs, grads)]


class RingDilatedAttention(DilatedAttention):
    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        sequence, (q, k, v) = self.sequence, (x.cached_data for x in node.inputs)
        keys, values = map(exact, next(sequence.gathered(k, v, False))[2:])
        q, dout, result = map(exact, (q, dout.compact(), self.out))
        dq = _C.empty(q.shape, q.dtype, q.device)
        pair = [sequence.empty(x, dtype="float32") for x in (k, v)]
        for total in pair:
            total.fill(0)
        if self.branches[0][1]:
            dq.fill(0)
        for parts, calls in self._runs(dout, q, result, self.lse, dq):
            for queries, seen, joins in calls:
                given, own, o, lse, to = map(queries, parts)
                k, v = seen(keys), seen(values)
                grads = dk, dv = [_C.empty(x.shape, q.dtype, q.device) for x in (k, v)]
                if joins:
                    for dx in grads:
                        dx.fill(0)
                _C.attention_part_bwd(
                    given, own, k, v, o, lse, self.scale, self.causal, joins, to, dk, dv
                )
                for total, dx in zip(pair, grads):
                    place = seen(total)
                    place += dx if dx.dtype == "float32" else dx.astype("float32")
        return sequence.gradients(node.inputs, dq, [pair], False)


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


def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    segments: Sequence[int],
    dilations: Sequence[int],
    causal: bool = True,
    scale: float | None = None,
    layout: str = "zigzag",
) -> Tensor:
    """`dilated_attention` of a sequence of T tokens that the ranks of `group` share; all of them
    call.

    q, k, v: (B, T / ranks, H, D), this rank's tokens, those of `ring_chunks(T, rank, ranks,
    layout)`; so is the result. Segments are those of the T tokens, of any width: a rank may have a
    part of one, or of several. Powers of two cost the least.

    >>> from needle.distributed.group import Group
    >>> x = ndl.randn(1, 100, 4, 16)
    >>> ndl.ops.ring_dilated_attention(x, x, x, Group(), (16, 64), (1, 4)).shape
    (1, 100, 4, 16)
    """
    checks = checked(
        "ring_dilated_attention", (q, k, v), segments, dilations, causal, scale, group.size
    )
    return RingDilatedAttention(*checks, group, layout)(q, k, v)


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
