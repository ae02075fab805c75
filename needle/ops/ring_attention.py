"""Attention over a sequence that several ranks share: each has its queries, keys and values.

Keys and values are gathered, and each rank attends from its queries to them by the kernels of one
device: a query meets all its keys in one call, whose accumulator and log-sum-exp are float32. The
backward gives for each run of a rank's queries a part of the gradients of all keys. The parts are
sent to the rank that owns the keys, which adds them in float32 in a fixed order, on the CPU that of
ranks and of their runs. So the bits depend on the number of ranks alone. Each part comes out of its
kernel, and is sent, in the kernel's dtype: float32 on the CPU; on a GPU, whose tensor cores take 16
bits, that of the operands, which rounds a gradient of keys once for each run of queries.

In zigzag with causal attention the first run of queries needs the first runs of all ranks alone:
the second ones travel beside its kernel (Group.begin), right behind the first, so that NCCL has its
multiprocessors before the kernel takes the others. Elements that a rank receives, of H
heads of D dims and T tokens on N ranks: forward 2 T H D (N - 1) / N, backward these again and as
many of gradients; half of the gathered ones are waited for, and the gradients. Rejected: gradients
of the first run beside the kernel of the second (of two ranks, one sends all after the second).

Layouts: which tokens a rank has, of 2 N chunks of T / 2 N tokens each.

    zigzag       chunk r and chunk 2 N - 1 - r: with causal attention all have the same work
                 (Zhu 2024, ring-flash-attention; Dubey et al. 2024, Llama 3, 3.3.2)
    contiguous   chunks 2 r and 2 r + 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.block_mask import BlockMask, as_block_mask
from needle.ops.attention import Kernel

LAYOUTS = ("zigzag", "contiguous")
Parts = Sequence[tuple[int, NDArray]]  # (rank, array)
Wait = Callable[[], None]


class Ranks(Protocol):
    """needle.distributed.group.Group; all its ranks call."""

    rank: int
    size: int

    @property
    def others(self) -> list[int]: ...
    def begin(self, name: str, sends: Parts, receives: Parts) -> Wait: ...


def ring_chunks(time: int, rank: int, ranks: int, layout: str = "zigzag") -> list[slice]:
    """The tokens of a rank, of a sequence of `time`, as neighbouring runs in the order in which it
    holds them. ValueError where they cannot be shared.

    >>> ndl.ops.ring_chunks(24, 1, 3)
    [slice(4, 8, None), slice(16, 20, None)]
    """
    if layout not in LAYOUTS:
        raise ValueError(f"ring_attention: layout must be one of {LAYOUTS}, not {layout!r}")
    if not 0 <= rank < ranks:
        raise ValueError(f"ring_attention: rank {rank} is none of {ranks} ranks")
    if ranks == 1:
        return [slice(0, time)]
    if time % (2 * ranks):
        raise ValueError(
            f"ring_attention: {time} tokens cannot be shared by {ranks} ranks: "
            f"a multiple of {2 * ranks} can"
        )
    width = time // (2 * ranks)
    if layout == "contiguous":
        return [slice(2 * rank * width, 2 * (rank + 1) * width)]
    chunks = rank, 2 * ranks - 1 - rank
    return [slice(chunk * width, (chunk + 1) * width) for chunk in chunks]


class SharedSequence:
    """The tokens of sequences that the ranks of a group share; this rank has `own_time` of each."""

    def __init__(self, group: Ranks, own_time: int, layout: str) -> None:
        self.group, self.time = group, own_time * group.size
        self._runs = [
            ring_chunks(self.time, rank, group.size, layout) for rank in range(group.size)
        ]
        # Of each run of this rank's tokens: where it lies in its arrays, and which tokens it is.
        width, runs = own_time // len(self._runs[0]), self._runs[group.rank]
        self.own = [(slice(i * width, (i + 1) * width), run) for i, run in enumerate(runs)]

    def gathered(
        self, k: NDArray, v: NDArray, causal: bool
    ) -> Iterator[tuple[slice, slice, NDArray, NDArray]]:
        """Gather keys and values, a run of each rank at a time. Yield for each run of this rank's
        tokens where it lies, which tokens it is, and the keys and values that it sees: all, or with
        `causal` those up to its end, of the ranks' runs of its place and of before. The device then
        computes before it waits for the second runs."""
        whole, waits = (k, v), []
        if self.group.size > 1:
            whole = self.empty(k), self.empty(v)
            for local, tokens in self.own:
                for x, to in zip((k, v), whole):
                    _C.assign(to[:, tokens], x[:, local])
            for runs in zip(*self._runs):
                parts = [_of_sequences(whole, run) for run in runs]
                sends = [(rank, x) for rank in self.group.others for x in parts[self.group.rank]]
                receives = [(rank, x) for rank in self.group.others for x in parts[rank]]
                waits.append(self.group.begin("the keys and values", sends, receives))
        arriving = iter(waits)
        for local, tokens in self.own:
            for wait in islice(arriving, 1 if causal else None):
                wait()
            seen = slice(tokens.stop if causal else self.time)
            yield local, tokens, whole[0][:, seen], whole[1][:, seen]

    def empty(self, x: NDArray, dtype: str | None = None) -> NDArray:
        """Return memory like x (B, T, H, D), of all tokens."""
        b, _, h, d = x.shape
        return _C.empty((b, self.time, h, d), dtype or x.dtype, x.device)

    def gradients(
        self, qkv: Sequence[Tensor], dq: NDArray, pairs: Sequence[Sequence[NDArray]], causal: bool
    ) -> list[NDArray | None]:
        """Return the gradients of this rank's q, k and v. pairs: for each run of its queries, or
        one for all of them, those of the keys and of the values that it sees. All ranks call."""
        q, k, v = (x.cached_data for x in qkv)
        grads = [dq, *(_C.empty(x.shape, x.dtype, x.device) for x in (k, v))]
        for (local, _), parts in zip(self.own, self._exchanged(pairs, causal)):
            total = _C.sum(parts.permute((1, 2, 3, 4, 5, 0)), 1)
            for which, dx in enumerate(grads[1:]):
                _C.assign(dx[:, local], total.at((which,)))
        return [
            (dx if dx.dtype == x.dtype else dx.astype(x.dtype)) if x.requires_grad else None
            for x, dx in zip(qkv, grads)
        ]

    def _exchanged(self, pairs: Sequence[Sequence[NDArray]], causal: bool) -> list[NDArray]:
        """Send `pairs` to the ranks that own the keys. Return for each run of this rank's keys the
        parts of their gradients, in the order of the sum: (parts, 2, B, tokens, H, D)."""
        rank, (b, _, h, d) = self.group.rank, pairs[0][0].shape
        ranks = [*enumerate(self._runs)]
        stacks, sends, receives, copies = [], [], [], []
        for owner, run in [(owner, run) for owner, runs in ranks for run in runs]:
            parts = [
                (giver, pair)
                for giver, queries in ranks
                for pair, seen in zip(pairs, queries)
                if run.start < (seen.stop if causal else self.time)
            ]
            if owner != rank:
                given = [pair for giver, pair in parts if giver == rank]
                sends += [(owner, x) for pair in given for x in _of_sequences(pair, run)]
                continue
            shape = len(parts), 2, b, run.stop - run.start, h, d
            stack = _C.empty(shape, pairs[0][0].dtype, pairs[0][0].device)
            stacks.append(stack)
            for i, (giver, pair) in enumerate(parts):
                for which, x in enumerate(pair):
                    if giver == rank:
                        copies.append((stack[i, which], x[:, run]))
                    else:
                        receives += [(giver, stack[i, which, n]) for n in range(b)]
        wait = self.group.begin("the gradients of keys and values", sends, receives)
        for to, x in copies:
            _C.assign(to, x)
        wait()
        return stacks


class RingAttention(FusedOp):
    def __init__(
        self, group: Ranks, causal: bool, scale: float | None, mask: BlockMask | None, layout: str
    ) -> None:
        self.group, self.causal, self.scale, self.layout = group, causal, scale, layout
        self.mask = None if mask is None else as_block_mask("ring_attention", mask)

    def compute(self, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        if q.ndim != 4 or q.shape != k.shape or k.shape != v.shape:
            raise ValueError(
                "ring_attention: q, k and v must be (B, T / ranks, H, D) alike, but are "
                f"{q.shape}, {k.shape} and {v.shape}"
            )
        self.sequence = SharedSequence(self.group, q.shape[1], self.layout)
        out, self.kernels = _C.empty(q.shape, q.dtype, q.device), []
        for local, tokens, *seen in self.sequence.gathered(k, v, self.causal):
            mask = self._mask_of(tokens, seen[0].shape[1])
            kernel = Kernel("ring_attention", self.scale, self.causal, mask)
            kernel.forward(q[:, local], *seen, out[:, local])
            kernel.o = None  # it is in the result
            self.kernels.append(kernel)
        return out

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        q, k, v = (x.cached_data for x in node.inputs)
        # Gathered again: kept from the forward they would be N times the operands.
        runs = self.sequence.gathered(k, v, self.causal)
        q, dout, result = (exact(x) for x in (q, dout, node.cached_data))
        dq, pairs = _C.empty(q.shape, q.dtype, q.device), []
        for kernel, (local, _, *seen) in zip(self.kernels, runs):
            pairs.append([_C.empty(x.shape, q.dtype, q.device) for x in seen])
            kernel.o = result[:, local]
            operands = q[:, local], *map(exact, seen)
            kernel.backward(dout[:, local], operands, [dq[:, local], *pairs[-1]])
            kernel.o = None
        return self.sequence.gradients(node.inputs, dq, pairs, self.causal)

    def _mask_of(self, tokens: slice, end: int) -> BlockMask | None:
        """Return the visible part of the first `end` keys for the queries of these tokens."""
        mask, time = self.mask, self.sequence.time
        if mask is None:
            return None
        if (mask.T, mask.S) != (time, time):
            raise ValueError(
                f"ring_attention: the mask is for {mask.T} queries and {mask.S} keys, "
                f"but there are {time} tokens in all"
            )
        if tokens.start % mask.block or (tokens.stop % mask.block and tokens.stop != time):
            raise ValueError(
                f"ring_attention: a rank's run of {tokens.stop - tokens.start} tokens is cut by "
                f"blocks of {mask.block}: it must be a multiple of them"
            )
        rows = slice(tokens.start // mask.block, -(-tokens.stop // mask.block))
        kept = mask.blocks[:, rows, : -(-end // mask.block)]
        return BlockMask(np.ascontiguousarray(kept), mask.block, tokens.stop - tokens.start, end)


def exact(x: NDArray) -> NDArray:
    """Return the operands of the backward kernels: those of the CPU are float32."""
    return x.astype("float32") if x.device.is_host and x.dtype != "float32" else x


def _of_sequences(arrays: Sequence[NDArray], tokens: slice) -> list[NDArray]:
    """Return the memory of tokens of compact arrays (B, T, H, D), that of each sequence apart."""
    return [x[n, tokens] for x in arrays for n in range(len(x))]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    causal: bool = True,
    scale: float | None = None,
    mask: BlockMask | None = None,
    layout: str = "zigzag",
) -> Tensor:
    """`attention` of a sequence of T tokens that the ranks of `group` share; all of them call.

    q, k, v: (B, T / ranks, H, D), this rank's tokens, those of `ring_chunks(T, rank, ranks,
    layout)`; so is the result. mask: over all T tokens, in blocks that no run of a rank's tokens
    cuts. With one rank it is `attention`, or block_sparse_attention.

    >>> from needle.distributed.group import Group
    >>> x = ndl.randn(1, 8, 2, 4)
    >>> ndl.ops.ring_attention(x, x, x, Group()).shape
    (1, 8, 2, 4)
    """
    return RingAttention(group, causal, scale, mask, layout)(q, k, v)
