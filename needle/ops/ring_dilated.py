"""Dilated attention (dilated.py) over a sequence that several ranks share (ring_attention.py).

Keys and values are gathered. A rank's run of tokens is cut where segments begin. Segments that lie
in it whole are attended to as on one device. Of another one it has the tokens [x, y): in a branch
of dilation r they are queries to the keys o, o + r, ... of the segment, with causal attention of
those before y alone. The last query is then the last key, which is what `causal` of the kernels
means with fewer queries than keys. So runs need not fit segments, nor segments runs.

Branches are joined as on one device, a run at a time. The join counts the tokens of a branch from
the run's first token. Where counting from the segment's start gives other tokens, those outside the
branch are filled with values that add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.ops.dilated import View, checked, each, heads_of, numbers_of, tokens_before, views_of
from needle.ops.ring_attention import Ranks, SharedSequence

Branch = tuple[int, int]  # segment, dilation
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


def counts_from_its_run(branch: Branch, run: slice) -> bool:
    """Does a branch hold the tokens that it would hold if the run's first were the sequence's?"""
    width, dilation = branch
    begin = run.start % width
    return begin == 0 or (begin % dilation == 0 and begin + run.stop - run.start <= width)


class RingDilatedAttention(FusedOp):
    def __init__(
        self, group: Ranks, layout: str, branches: Sequence[Branch], scale: float, causal: bool
    ) -> None:
        self.group, self.layout = group, layout
        self.branches, self.scale, self.causal = branches, scale, int(causal)

    def compute(self, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        self.sequence = SharedSequence(self.group, q.shape[1], self.layout)
        keys, values = self.sequence.gathered(k, v)
        out, self.lses = _C.empty(q.shape, q.dtype, q.device), []
        for local, run in self.sequence.own():
            own = q[:, local]
            parts = _C.empty((len(self.branches), *own.shape), q.dtype, q.device)
            lses = _C.empty(parts.shape[:4], "float32", q.device)
            for branch, part, to in zip(self.branches, each(parts), each(lses)):
                if not counts_from_its_run(branch, run):
                    part.fill(0)
                    to.fill(-math.inf)
                for queries, seen in self._calls(own, run, branch):
                    lse = _C.attention_fwd(
                        queries(own), seen(keys), seen(values), self.scale, self.causal,
                        queries(part),
                    )  # fmt: skip
                    _C.assign(queries(to), lse.permute((0, 2, 1)))
            joined, lse = _C.dilated_merge(parts, lses, *self._numbers(own, run))
            _C.assign(out[:, local], joined)
            self.lses.append(lse)
        return out

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        operands = self.sequence.backward_operands(dout.compact(), node)
        q, keys, values, dout, result, dq, *sums = operands
        for (local, run), lse in zip(self.sequence.own(), self.lses):
            own, given, found = (x[:, local] for x in (q, dout, result))
            parts = _C.empty((len(self.branches), *own.shape), q.dtype, q.device)
            for branch, part in zip(self.branches, each(parts)):
                if not counts_from_its_run(branch, run):
                    part.fill(0)
                for queries, seen in self._calls(own, run, branch):
                    operands = seen(keys), seen(values)
                    grads = [_C.empty(x.shape, q.dtype, q.device) for x in operands]
                    _C.attention_bwd(
                        queries(given), queries(own), *operands, queries(found),
                        queries(lse).permute((0, 2, 1)).compact(), self.scale, self.causal,
                        None, None, queries(part), *grads, None, None,
                    )  # fmt: skip
                    for total, dx in zip(sums, grads):
                        place = seen(total)
                        place += dx if dx.dtype == "float32" else dx.astype("float32")
            _C.assign(dq[:, local], _C.dilated_sum(parts, *self._numbers(own, run)))
        return self.sequence.gradients(node.inputs, dq, sums)

    def _calls(self, own: NDArray, run: slice, branch: Branch) -> Iterator[Call]:
        return calls_of(own.shape, run, self.sequence.time, branch, bool(self.causal))

    def _numbers(self, own: NDArray, run: slice) -> list[NDArray]:
        """Segments and dilations by which the branches are joined."""
        held = [b if counts_from_its_run(b, run) else (1, 1) for b in self.branches]
        return numbers_of(tuple(held), own.device, own.device.generation)


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
