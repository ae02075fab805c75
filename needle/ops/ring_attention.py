"""Attention over a sequence that several ranks share: each has its queries, keys and values.

Keys and values are gathered, and each rank attends from its queries to them by the kernels of one
device: a query meets all its keys in one call, whose accumulator and log-sum-exp are float32. The
backward gives each rank's part of the gradients of all keys. Each part is sent to the rank that
owns the keys, which adds the parts in the order of the ranks, in float32. So the bits depend on the
number of ranks alone. Each part comes out of its kernel in the kernel's dtype: float32 on the CPU;
on a GPU, whose tensor cores take 16 bits, that of the operands, which rounds a gradient of keys
once for each run of queries. Bytes that a rank receives, of H heads of D dims and T tokens on N
ranks: forward 2 T H D (N - 1) / N elements of the operands' dtype, backward these again and as many
of float32.

Layouts: which tokens a rank has, of 2 N chunks of T / 2 N tokens each.

    zigzag       chunk r and chunk 2 N - 1 - r: with causal attention all have the same work
                 (Zhu 2024, ring-flash-attention; Dubey et al. 2024, Llama 3, 3.3.2)
    contiguous   chunks 2 r and 2 r + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor
from needle.backend_ndarray import as_bytes
from needle.block_mask import BlockMask, as_block_mask
from needle.ops.attention import Kernel

LAYOUTS = ("zigzag", "contiguous")


class Ranks(Protocol):
    """needle.distributed.group.Group; all its ranks call."""

    rank: int
    size: int

    def all_gather(self, name: str, flat: NDArray, shards: Sequence[slice]) -> None: ...
    def exchange(
        self, name: str, sends: Sequence[NDArray | None], receives: Sequence[NDArray | None]
    ) -> None: ...


def ring_chunks(time: int, rank: int, ranks: int, layout: str = "zigzag") -> list[slice]:
    """The tokens of a rank, of a sequence of `time`, as neighbouring runs in the order in which it
    holds them. ValueError where they cannot be shared.

    >>> ndl.ops.ring_chunks(24, 1, 3)
    [slice(4, 8, None), slice(16, 20, None)]
    """
    if layout not in LAYOUTS:
        raise ValueError(f"ring_attention: layout must be one of {LAYOUTS}, not {layout!r}")
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
        self._chunks = [
            ring_chunks(self.time, rank, group.size, layout) for rank in range(group.size)
        ]

    def own(self) -> list[tuple[slice, slice]]:
        """(where a run of this rank's tokens lies in its arrays, which tokens it is)."""
        return _placed(self._chunks[self.group.rank])

    def gathered(self, *parts: NDArray) -> list[NDArray]:
        """Gather each array of this rank into the one of all tokens, in their order."""
        group, shape = self.group, parts[0].shape
        if group.size == 1:
            return list(parts)
        both = _C.empty((group.size, len(parts), *shape), parts[0].dtype, parts[0].device)
        for i, part in enumerate(parts):
            _C.assign(both[group.rank : group.rank + 1, i : i + 1], part.reshape((1, 1, *shape)))
        share = both.nbytes // group.size
        slices = [slice(rank * share, (rank + 1) * share) for rank in range(group.size)]
        group.all_gather("the keys and values", as_bytes(both), slices)
        found = []
        for i in range(len(parts)):
            whole = _C.empty((shape[0], self.time, *shape[2:]), both.dtype, both.device)
            for rank in range(group.size):
                theirs = both[rank : rank + 1, i : i + 1].reshape(shape)
                for local, tokens in _placed(self._chunks[rank]):
                    _C.assign(whole[:, tokens], theirs[:, local])
            found.append(whole)
        return found

    def backward_operands(self, dout: NDArray, node: Tensor) -> list[NDArray]:
        """Return q, all keys, all values, dout and the result as the backward kernels take them, an
        empty dq, and float32 zeros for the gradients of all keys and of all values."""
        q, k, v = (x.cached_data for x in node.inputs)
        # Gathered again: kept from the forward they would be N times the operands.
        read = [exact(x) for x in (q, *self.gathered(k, v), dout, node.cached_data)]
        sums = [_C.empty(x.shape, "float32", x.device) for x in read[1:3]]
        for total in sums:
            total.fill(0)
        return [*read, _C.empty(q.shape, read[0].dtype, q.device), *sums]

    def gradients(
        self, qkv: Sequence[Tensor], dq: NDArray, sums: Sequence[NDArray]
    ) -> list[NDArray | None]:
        """Return the gradients of this rank's q, k and v. sums: its part of the gradients of all
        keys and of all values."""
        return [
            (dx if dx.dtype == x.dtype else dx.astype(x.dtype)) if x.requires_grad else None
            for x, dx in zip(qkv, (dq, *self._scattered(sums)))
        ]

    def _scattered(self, sums: Sequence[NDArray]) -> list[NDArray]:
        """Reduce-scatter gradients of all tokens to this rank's tokens."""
        group = self.group
        if group.size == 1:
            return list(sums)
        (b, _, h, d), device = sums[0].shape, sums[0].device
        shape = (len(sums), b, self.time // group.size, h, d)
        sends = [_C.empty(shape, "float32", device) for _ in range(group.size)]
        for i, total in enumerate(sums):
            for rank in range(group.size):
                place = sends[rank][i : i + 1].reshape(shape[1:])
                for local, tokens in _placed(self._chunks[rank]):
                    _C.assign(place[:, local], total[:, tokens])
        receives = [_C.empty(shape, "float32", device) for _ in range(group.size)]
        receives[group.rank] = sends[group.rank]
        group.exchange(
            "the gradients of keys and values",
            [None if rank == group.rank else part for rank, part in enumerate(sends)],
            [None if rank == group.rank else part for rank, part in enumerate(receives)],
        )
        total, *rest = receives
        for part in rest:
            total += part
        return [total[i : i + 1].reshape(shape[1:]) for i in range(len(sums))]


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
        keys, values = self.sequence.gathered(k, v)
        out, self.kernels = _C.empty(q.shape, q.dtype, q.device), []
        for local, tokens in self.sequence.own():
            kernel = Kernel("ring_attention", self.scale, self.causal, self._mask_of(tokens))
            end = tokens.stop if self.causal else self.sequence.time
            _C.assign(out[:, local], kernel.forward(q[:, local], keys[:, :end], values[:, :end]))
            kernel.o = None  # it is in the result
            self.kernels.append(kernel)
        return out

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        q, keys, values, dout, result, dq, *sums = self.sequence.backward_operands(dout, node)
        for kernel, (local, tokens) in zip(self.kernels, self.sequence.own()):
            end = tokens.stop if self.causal else self.sequence.time
            operands = q[:, local], keys[:, :end], values[:, :end]
            grads = [dq[:, local], *(_C.empty(x.shape, q.dtype, q.device) for x in operands[1:])]
            kernel.o = result[:, local]
            kernel.backward(dout[:, local], operands, grads)
            kernel.o = None
            for total, part in zip(sums, grads[1:]):
                total[:, :end] += part if part.dtype == "float32" else part.astype("float32")
        return self.sequence.gradients(node.inputs, dq, sums)

    def _mask_of(self, tokens: slice) -> BlockMask | None:
        """Return the visible part of the given keys for the queries of these tokens."""
        mask, time = self.mask, self.sequence.time
        end = tokens.stop if self.causal else time
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


def _placed(chunks: Sequence[slice]) -> list[tuple[slice, slice]]:
    placed, begin = [], 0
    for tokens in chunks:
        size = tokens.stop - tokens.start
        placed.append((slice(begin, begin + size), tokens))
        begin += size
    return placed


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
