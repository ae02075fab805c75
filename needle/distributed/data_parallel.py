"""Data parallel training whose bits do not depend on the number of ranks.

A step has N micro-batches for any number of ranks: rank r of R computes those from r N / R on. Each
writes its gradient, and gradients are added in the order of one tree (tree.py), first those of a
rank, then, shard by shard, those of all ranks: each sends every other the shard of its sum that the
other owns (the bytes of a reduce-scatter), and the owner adds them. It also keeps the optimizer's
state of that shard alone (ZeRO stage 1, Rajbhandari et al. 2020), steps it, and sends the new
weights to all (an all-gather).

    parallel = DataParallel(group, flat, optimizer, micro_batches)
    for step in range(1, steps + 1):
        for _ in parallel.own_micro_batches:
            optimizer.reset_grad()
            loss.backward()                        scaled by 1 / micro_batches
            parallel.add_micro_batch()
        norm, scale = parallel.reduce(max_norm)
        parallel.step(scale)

A single process (`Group()`) owns everything and sends nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

from needle import _C
from needle._C import NDArray
from needle.backend_ndarray import as_bytes
from needle.distributed.group import Group
from needle.distributed.tree import merges, own_micro_batches, tree_sum
from needle.nn import FlatParameters
from needle.nn.utils import NORM_CHUNK, chunk_norms
from needle.optim import AdamW


def shards(size: int, ranks: int) -> list[slice]:
    """Return the part of a flat buffer of `size` elements that each rank owns: whole chunks of the
    norm, except at the end.

    >>> from needle.distributed.data_parallel import shards
    >>> shards(40000, 2)
    [slice(0, 16384, None), slice(16384, 40000, None)]
    """
    chunks = -(-size // NORM_CHUNK)
    ends = [min(chunks * rank // ranks * NORM_CHUNK, size) for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in zip(ends, ends[1:])]


class DataParallel:
    """Share the micro-batches of a step and the optimizer's state among ranks.

    micro_batches: of a step. context: number of consecutive ranks that share the sequences of each
    micro-batch; a rank has the gradient of 1 / context of the mean over its tokens. Each context
    position sums along its own tree; the `context` sums are then added in one more tree. So the
    bits depend on `context` and not on the number of ranks. ValueError if the ranks cannot share so
    many micro-batches, TypeError for an optimizer that is no AdamW of `flat`.

    Bytes per rank beside its model, for N parameters and R ranks: 4 N for the gradient and for each
    doubling of its micro-batches, 4 N (R - 1) / R for received shards, 8 N / R for the optimizer
    (12 N / R with master weights)."""

    def __init__(
        self,
        group: Group,
        flat: FlatParameters,
        optimizer: AdamW,
        micro_batches: int,
        context: int = 1,
    ) -> None:
        if not isinstance(optimizer, AdamW) or optimizer.flat is not flat:
            raise TypeError(
                "DataParallel: the optimizer must be an AdamW that was made of `flat` itself, but "
                f"is {optimizer!r:.40}"
            )
        self.group, self.flat, self.optimizer = group, flat, optimizer
        self.context = context
        self.own_micro_batches = own_micro_batches(micro_batches, group.rank, group.size, context)
        self.shards = shards(flat.size, group.size)
        self._added = 0
        self._aside: list[NDArray] = []  # the sums of finished subtrees, the largest first ...
        self._buffers: list[NDArray] = []  # ... and where they lie
        self._received: dict[int, NDArray] = {}  # the shard of each other rank's gradient
        if group.size > 1:
            optimizer.keep(self.shards[group.rank])

    def digest(self) -> str:
        """Return a hash of the weights, equal on all ranks between any two steps; "" where there
        is one rank."""
        if self.group.size == 1:
            return ""
        data = as_bytes(self.flat.data).numpy()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    # ---- a step ---------------------------------------------------------------------------------

    def add_micro_batch(self) -> None:
        """Add the gradients set aside to flat.grad, the gradient of this rank's next micro-batch
        alone, as far as its place in the tree says, and set the sum aside. After the last one
        flat.grad is the sum of all of this rank."""
        count = len(self.own_micro_batches)
        if count == 1:
            return  # it is the sum
        grad = self.flat.grad
        for _ in range(merges(self._added, count)):
            grad += self._aside.pop()
        self._added = (self._added + 1) % count
        if self._added:
            depth = len(self._aside)
            if depth == len(self._buffers):
                self._buffers.append(_C.empty(grad.shape, "float32", grad.device))
            _C.assign(self._buffers[depth], grad)
            self._aside.append(self._buffers[depth])

    def reduce(self, max_norm: float = 0.0) -> tuple[NDArray, NDArray]:
        """Sum the gradients over all ranks. Return (norm, scale) as optim.grad_norm. Of flat.grad
        only this rank's shard is then valid."""
        group, grad = self.group, self.flat.grad
        own = grad[self.shards[group.rank]]
        if group.size > 1:
            if not self._received:
                new = lambda: _C.empty(own.shape, "float32", own.device)
                self._received = {rank: new() for rank in group.others}
            sends = [(rank, grad[self.shards[rank]]) for rank in self._received]
            group.exchange("the sum of gradients", sends, [*self._received.items()])
            parts = [self._received.get(rank, own) for rank in range(group.size)]
            tree_sum([tree_sum(parts[c :: self.context], own) for c in range(self.context)], own)
        norms = _C.empty((-(-grad.size // NORM_CHUNK),), "float32", grad.device)
        chunks = [slice(-(-p.start // NORM_CHUNK), -(-p.stop // NORM_CHUNK)) for p in self.shards]
        chunk_norms(own, norms[chunks[group.rank]])
        group.all_gather("the gradient's norm", norms, chunks)
        return _C.grad_norm(norms, max_norm)

    def step(self, scale: NDArray | None = None) -> None:
        """Step the optimizer of this rank's shard, and gather the weights of all in flat.data."""
        self.optimizer.step(scale)
        if self.group.size > 1:
            self.group.all_gather("the weights", self.flat.data, self.shards)

    def losses(self, own: Sequence[NDArray]) -> list[NDArray]:
        """Return the losses (float32 scalars) of all micro-batches, in their order, from those of
        this rank."""
        if self.group.size == 1:
            return list(own)
        count, group = len(own), self.group
        all_losses = _C.empty((count * group.size,), "float32", self.flat.grad.device)
        for i, loss in enumerate(own, group.rank * count):
            _C.assign(all_losses[i : i + 1], loss.reshape((1,)))
        shares = [slice(r * count, (r + 1) * count) for r in range(group.size)]
        group.all_gather("the losses", all_losses, shares)
        shape = group.size // self.context, self.context, count
        losses = _C.sum(all_losses.reshape(shape).permute((0, 2, 1)), 1) / self.context
        losses = losses.reshape((losses.size,))
        return [losses[i].reshape(()) for i in range(losses.size)]

    # ---- the optimizer's state ------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_optimizer(self) -> Iterator[None]:
        """Give rank 0's optimizer the state of all ranks for the block, in host memory, for a
        checkpoint. The others only send theirs."""
        group, optimizer = self.group, self.optimizer
        if group.size == 1:
            yield
            return
        own = optimizer.kept()
        gathered = {slot: self._on_rank_0(f"the optimizer's {slot}", own[slot]) for slot in own}
        if group.rank == 0:
            optimizer.keep(slice(0, self.flat.size), gathered)
        try:
            yield
        finally:
            if group.rank == 0:
                optimizer.keep(self.shards[0], own)

    def _on_rank_0(self, name: str, shard: NDArray) -> NDArray | None:
        """Return the array of all shards, in host memory, on rank 0; None on the others."""
        group, whole = self.group, None
        if group.rank == 0:
            whole = _C.empty((self.flat.size,), "float32", _C.cpu())
            _C.assign(whole[self.shards[0]], shard.to(whole.device))
        for rank, part in enumerate(self.shards[1:], 1):
            sends = [(0, shard)] if rank == group.rank else []
            receives = []
            if whole is not None:
                receives = [(rank, _C.empty((part.stop - part.start,), "float32", shard.device))]
            group.exchange(name, sends, receives)
            if whole is not None:
                _C.assign(whole[part], receives[0][1].to(whole.device))
        return whole
