"""Data parallel training whose bits do not depend on the number of ranks.

A step has N micro-batches for any number of ranks: rank r of R computes those from r N / R on. Each
writes its gradient, and gradients are added in the order of one tree (tree.py), first those of a
rank, then those of all ranks. The flat buffer is cut into regions, each region into a shard a rank:
each rank sends every other the shard of its sum that the other owns (the bytes of a
reduce-scatter), and the owner adds them. It also keeps the optimizer's state of its shards alone
(ZeRO stage 1, Rajbhandari et al. 2020), steps them, and sends the new weights to all (an
all-gather).

    parallel = DataParallel(group, flat, optimizer, micro_batches)
    for step in range(1, steps + 1):
        for _ in parallel.own_micro_batches:
            optimizer.reset_grad()
            loss = ...
            parallel.send_early()
            loss.backward()                        scaled by 1 / micro_batches
            parallel.add_micro_batch()
        norm, scale = parallel.reduce(max_norm)
        parallel.step(scale)

A single process (`Group()`) owns everything and sends nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

from needle import _C
from needle._C import NDArray
from needle.backend_ndarray import as_bytes
from needle.distributed.group import Group, Wait
from needle.distributed.tree import merges, own_micro_batches, tree_sum
from needle.nn import FlatParameters, Parameter
from needle.nn.utils import NORM_CHUNK, chunk_norms
from needle.optim import AdamW

REGIONS = 8  # at most, but for those where the decayed parameters end


def shards(size: int, ranks: int) -> list[slice]:
    """Return the part of a region of `size` elements that each rank owns: whole chunks of the norm,
    except at the end.

    >>> from needle.distributed.data_parallel import shards
    >>> shards(40000, 2)
    [slice(0, 16384, None), slice(16384, 40000, None)]
    """
    chunks = -(-size // NORM_CHUNK)
    ends = [min(chunks * rank // ranks * NORM_CHUNK, size) for rank in range(ranks + 1)]
    return [slice(start, end) for start, end in zip(ends, ends[1:])]


@dataclasses.dataclass(eq=False)
class Region:
    """A part of the flat buffers that ranks exchange at once."""

    part: slice  # whole chunks of the norm, except at the end
    shards: list[slice]  # of each rank, in the flat buffers
    own: slice  # where this rank's shard lies in AdamW.kept(), which joins its shards
    parameters: list[Parameter]  # that it has elements of
    missing: int = 0  # those whose gradients are not in the buffer yet
    wait: Wait = lambda: None  # for the exchange, once it has begun


def regions(flat: FlatParameters, rank: int, ranks: int) -> list[Region]:
    """Cut the flat buffers of one of several ranks into regions. Each begins with the first chunk
    of the norm that begins in, or behind, some parameter."""
    ends = [0]
    for offset in flat.offsets if ranks > 1 else ():
        is_enough = offset - ends[-1] >= flat.size // REGIONS or offset == flat.decay_size
        end = -(-offset // NORM_CHUNK) * NORM_CHUNK
        if is_enough and ends[-1] < end < flat.size:
            ends.append(end)
    found, place = [], 0
    for start, end in pairwise([*ends, flat.size]):
        parts = [slice(start + x.start, start + x.stop) for x in shards(end - start, ranks)]
        own = slice(place, place + parts[rank].stop - parts[rank].start)
        inside = [
            p for p, at in zip(flat.parameters, flat.offsets) if at < end and at + p.size > start
        ]
        found.append(Region(slice(start, end), parts, own, inside))
        place = own.stop
    return found


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
        self.regions = regions(flat, group.rank, group.size)
        # Of each rank, its shards of all regions.
        self.shards = [[x.shards[rank] for x in self.regions] for rank in range(group.size)]
        self._regions_of: dict[int, list[Region]] = {}  # by the id of a parameter
        for region in self.regions:
            for p in region.parameters:
                self._regions_of.setdefault(id(p), []).append(region)
        self._grad = flat.grad  # without the zeros of later resets
        self._added = 0
        # The regions as a backward fills them, on every rank in this order: the decayed ones from
        # behind, then those of all layers' vectors. So many of them are on their way.
        self._order = sorted(
            self.regions, key=lambda x: (x.part.start >= flat.decay_size, -x.part.start)
        )
        self._begun = 0
        self.sends_early = True
        self._aside: list[NDArray] = []  # the sums of finished subtrees, the largest first ...
        self._buffers: list[NDArray] = []  # ... and where they lie
        self._received: dict[int, NDArray] = {}  # this rank's shards of each other's gradient
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

    def send_early(self) -> None:
        """Let the next backward, if it is that of this rank's last micro-batch, send the gradients
        of a region as soon as they are in the buffer, beside its rest. It must be the last one that
        adds gradients. Else add_micro_batch() sends all: where `sends_early` is False, as for
        backwards that a graph replays, and where ranks share sequences, whose own exchanges another
        graph on another rank would have elsewhere between these."""
        is_last = self._added == len(self.own_micro_batches) - 1
        if self.group.size == 1 or self.context > 1 or not self.sends_early or not is_last:
            return
        for region in self.regions:
            region.missing = len(region.parameters)

        def count(p: Parameter) -> None:
            p.fill_zeros()  # where none of its ops had a gradient for it
            for region in self._regions_of[id(p)]:
                region.missing -= 1
            for region in self._order[self._begun :]:
                if region.missing:
                    break
                self._begin(region)

        for p in self.flat.parameters:
            p.post_accumulate_grad_hook = count

    def add_micro_batch(self) -> None:
        """Add the gradients set aside to flat.grad, the gradient of this rank's next micro-batch
        alone, as far as its place in the tree says, and set the sum aside. After the last one
        flat.grad is the sum of all of this rank, on its way to the others."""
        grad = self.flat.grad
        if self._added == len(self.own_micro_batches) - 1:
            for p in self.flat.parameters:
                p.post_accumulate_grad_hook = None
            for region in self._order[self._begun :]:
                self._begin(region)
            self._added, self._aside = 0, []
            return
        for _ in range(merges(self._added, len(self.own_micro_batches))):
            grad += self._aside.pop()
        self._added += 1
        depth = len(self._aside)
        if depth == len(self._buffers):
            self._buffers.append(_C.empty(grad.shape, "float32", grad.device))
        _C.assign(self._buffers[depth], grad)
        self._aside.append(self._buffers[depth])

    def _begin(self, region: Region) -> None:
        """Make the sum of this rank's micro-batches in a region, and send it."""
        group, grad = self.group, self._grad
        for sums in reversed(self._aside):
            part = grad[region.part]
            part += sums[region.part]
        if group.size > 1 and not self._received:
            size = self.regions[-1].own.stop
            new = lambda: _C.empty((size,), "float32", grad.device)
            self._received = {rank: new() for rank in group.others}
        sends = [(rank, grad[region.shards[rank]]) for rank in self._received]
        receives = [(rank, array[region.own]) for rank, array in self._received.items()]
        region.wait = group.begin("the sum of gradients", sends, receives)
        self._begun += 1

    def reduce(self, max_norm: float = 0.0) -> tuple[NDArray, NDArray]:
        """Sum the gradients over all ranks, after the last add_micro_batch() of a step. Return
        (norm, scale) as optim.grad_norm. Of flat.grad only this rank's shards are then valid."""
        group, grad = self.group, self._grad
        norms = _C.empty((-(-grad.size // NORM_CHUNK),), "float32", grad.device)
        for region in self._order:  # sums of the first beside the exchange of the last
            region.wait()
            own = grad[region.shards[group.rank]]
            if group.size > 1:
                sums = {rank: array[region.own] for rank, array in self._received.items()}
                parts = [sums.get(rank, own) for rank in range(group.size)]
                trees = [tree_sum(parts[c :: self.context], own) for c in range(self.context)]
                tree_sum(trees, own)
            chunk_norms(own, norms[_chunks(region.shards[group.rank])])
        self._begun = 0
        chunks = [[*map(_chunks, parts)] for parts in self.shards]
        group.all_gather("the gradient's norm", norms, chunks)
        return _C.grad_norm(norms, max_norm)

    def step(self, scale: NDArray | None = None) -> None:
        """Step the optimizer of this rank's shards, and gather the weights of all in flat.data."""
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
        shares = [[slice(r * count, (r + 1) * count)] for r in range(group.size)]
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
            optimizer.keep([slice(0, self.flat.size)], gathered)
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
            self._place(whole, 0, shard)
        for rank, parts in enumerate(self.shards[1:], 1):
            sends = [(0, shard)] if rank == group.rank else []
            receives = []
            if whole is not None:
                size = sum(part.stop - part.start for part in parts)
                receives = [(rank, _C.empty((size,), "float32", shard.device))]
            group.exchange(name, sends, receives)
            if whole is not None:
                self._place(whole, rank, receives[0][1])
        return whole

    def _place(self, whole: NDArray, rank: int, shard: NDArray) -> None:
        """Write what a rank keeps to its places."""
        shard, end = shard.to(whole.device), 0
        for part in self.shards[rank]:
            start, end = end, end + part.stop - part.start
            _C.assign(whole[part], shard[start:end])


def _chunks(part: slice) -> slice:
    """The chunks of the norm in a part of a flat buffer."""
    return slice(-(-part.start // NORM_CHUNK), -(-part.stop // NORM_CHUNK))
