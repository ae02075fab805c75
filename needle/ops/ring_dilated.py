"""Dilated attention (dilated.py) over a sequence that several ranks share (ring_attention.py).

Keys and values are gathered. A rank's run of tokens is cut where segments begin. Segments that lie
in it whole are attended to as on one device. Of another one it has the tokens [x, y): in a branch
of dilation r they are queries to the keys o, o + r, ... of the segment, with causal attention of
those before y alone. The last query is then the last key, which is what `causal` of the kernels
means with fewer queries than keys. So runs need not fit segments, nor segments runs.

Branches are joined as on one device, a run at a time: the kernels join what they compute with what
the run's results are by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.dilated import (
    Branch,
    View,
    checked,
    heads_of,
    joined,
    to_join,
    tokens_before,
    views_of,
)
from needle.ops.ring_attention import Ranks, SharedSequence, exact

Call = tuple[View, View]  # of a run its queries, of all tokens the keys


def calls_of(
    shape: tuple[int, ...], run: slice, time: int, branch: Branch, causal: bool
) -> Iterator[Call]:
    """One of the kernels each; shape: (B, tokens of the run, H, ...)."""
    (batch, _, heads), (width, dilation) = shape[:3], branch
    begin = run.start
    while begin < run.stop:
        segment = begin - begin % width
        whole = (run.stop - segment) // width * width
        if begin == segment and whole:
            stop = segment + whole
            for view in views_of((batch, whole, heads), width, dilation, batch == 1):
                yield view.later(begin - run.start), view.later(begin)
        else:
            stop = min(segment + width, run.stop)
            end = stop if causal else min(segment + width, time)
            bounds = begin - segment, stop - segment, end - segment
            for offset, head, together, next_head in heads_of(heads, dilation, *bounds):
                steps = (1, 0, 0), (0, dilation, 0), next_head
                before, last, keys = (tokens_before(b, offset, dilation) for b in bounds)
                first = segment + offset + before * dilation - run.start
                yield (
                    View((0, first, head), (batch, last - before, together), steps),
                    View((0, segment + offset, head), (batch, keys, together), steps),
                )
        begin = stop


class RingDilatedAttention(FusedOp):
    def __init__(
        self, group: Ranks, layout: str, branches: Sequence[Branch], scale: float, causal: bool
    ) -> None:
        self.group, self.layout = group, layout
        self.branches, self.scale, self.causal = joined(branches), scale, int(causal)

    def compute(self, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        self.sequence = SharedSequence(self.group, q.shape[1], self.layout)
        keys, values = self.sequence.gathered(k, v)
        out, self.lse = to_join(self.branches, q.shape, q.dtype, q.device)
        for local, queries, seen, joins in self._calls(q):
            own, o, lse = (queries(x[:, local]) for x in (q, out, self.lse))
            _C.attention_part_fwd(
                own, seen(keys), seen(values), self.scale, self.causal, joins, o, lse
            )
        return out

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        sequence, (q, k, v) = self.sequence, (x.cached_data for x in node.inputs)
        keys, values = map(exact, sequence.gathered(k, v))
        q, dout, result = map(exact, (q, dout.compact(), node.cached_data))
        dq = _C.empty(q.shape, q.dtype, q.device)
        pair = [sequence.empty(x, dtype="float32") for x in (k, v)]
        for total in pair:
            total.fill(0)
        if self.branches[0][1]:
            dq.fill(0)
        for local, queries, seen, joins in self._calls(q):
            of = dout, q, result, self.lse, dq
            given, own, o, lse, to = (queries(x[:, local]) for x in of)
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
        ends = [[sequence.time] * self.group.size]
        return sequence.gradients(node.inputs, dq, [pair], ends)

    def _calls(self, own: NDArray) -> Iterator[tuple[slice, View, View, int]]:
        """One of the kernels each: where a run of this rank's tokens lies, of it the queries, of
        all tokens the keys, and `joins`."""
        for local, run in self.sequence.own():
            shape = own[:, local].shape
            for branch, joins in self.branches:
                for queries, seen in calls_of(
                    shape, run, self.sequence.time, branch, bool(self.causal)
                ):
                    yield local, queries, seen, joins


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
    return RingDilatedAttention(group, layout, *checks)(q, k, v)
