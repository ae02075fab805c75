"""Data parallel training whose bits do not depend on the number of ranks.

A step is `leaves` micro-batches, whoever computes them: rank r of R those from r leaves / R on.
Each leaf writes its gradient, and they are added in the order of one tree (tree.py), first those of
a rank, then, piece by piece, those of all ranks: each sends every other the piece of its sum that
the other owns, the bytes of a reduce-scatter, and the owner adds them. It also keeps the
optimizer's state of its pieces alone (ZeRO stage 1, Rajbhandari et al. 2020), steps them, and sends
the new weights round.

    parallel = DataParallel(group, flat, optimizer, leaves)
    for step in range(1, steps + 1):
        for leaf in parallel.own_leaves:
            optimizer.reset_grad()
            loss.backward(on_final=parallel.on_final(leaf))      scaled by 1 / leaves
            parallel.add_leaf()
        norm, scale = parallel.reduce(max_norm)
        parallel.step(scale)

The flat buffer is cut into buckets (`buckets`), each of them into pieces of all ranks, so that each
bucket's way is that of a small reduce-scatter, with all links at work. A bucket is added to the sum
of the rank's earlier leaves and sent as soon as its gradients are final in the backward of the
rank's last leaf, and travels beside the rest of that backward; `reduce` sends what is left, waits
for one bucket after the other, on the device, and adds it while the next one travels. So do the new
weights, while the optimizer steps the next bucket. The order of the buckets is that of the flat
buffer, never of time, and the same on all ranks: a backward in another order sends them later, and
one that does not say what is final (a recorded graph's replay) leaves all of them to `reduce`. No
bit depends on where buckets begin, nor on when they are sent.

From `on_final` to `reduce` the gradient must be left as it is, and an error there is the end of the
work of all ranks: some may have sent what others wait for.

Alone (`Group()`) a rank owns everything and sends nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Value
from needle.backend_ndarray import as_bytes
from needle.distributed.group import Group
from needle.distributed.tree import merges, own_leaves, tree_sum
from needle.nn import FlatParameters
from needle.optim import NORM_CHUNK, AdamW, chunk_norms, total_norm

BUCKET = 1 << 22  # elements at least, where there are more: below 16 MiB links are not busy
MOST_BUCKETS = 16  # of about one size; each costs the host some calls


def buckets(flat: FlatParameters) -> list[slice]:
    """The parts of the flat buffer that travel together, whole chunks of the norm, in the order in
    which a backward is done with them: the decayed matrices from the last one to the first; but
    before the part with the first, which is the embedding, the vectors of all layers.

    A matrix is not cut; one that fills a bucket has it alone. A chunk that two of them share is of
    the later one's bucket.
    """
    least, end = max(BUCKET, flat.size // MOST_BUCKETS), flat.decay_size
    vectors = flat.size if end == flat.size else end // NORM_CHUNK * NORM_CHUNK
    bounds, stop = [vectors], end  # of the matrices' buckets, from the end on
    for start in reversed([offset for offset in flat.offsets if offset < flat.decay_size]):
        if end < stop and (stop - end >= least or end - start >= least):
            bounds.append(min(-(-end // NORM_CHUNK) * NORM_CHUNK, vectors))
            stop = end
        end = start
    found = [slice(start, stop) for stop, start in zip(bounds, [*bounds[1:], 0])]
    found.insert(-1, slice(vectors, flat.size))
    return [part for part in found if part.start < part.stop]


def pieces(part: slice, ranks: int) -> list[slice]:
    """Which piece of a bucket each rank owns: whole chunks of the norm, but for the end.

    >>> from needle.distributed.data_parallel import pieces
    >>> pieces(slice(16384, 60000), 2)
    [slice(16384, 32768, None), slice(32768, 60000, None)]
    """
    first, chunks = part.start // NORM_CHUNK, -(-(part.stop - part.start) // NORM_CHUNK)
    ends = [first + chunks * rank // ranks for rank in range(ranks + 1)]
    ends = [min(end * NORM_CHUNK, part.stop) for end in ends]
    return [slice(start, end) for start, end in zip(ends, ends[1:])]


def chunks_of(part: slice) -> range:
    """The numbers of its chunks of the norm."""
    return range(part.start // NORM_CHUNK, -(-part.stop // NORM_CHUNK))


class DataParallel:
    """ValueError where the group's ranks cannot share so many leaves.

    context: so many neighbouring ranks share each leaf, as tokens of its sequences; each has the
    gradient of 1 / context of the mean over its tokens. Their sums, each along the tree, are added
    along one: the bits depend on `context`, and not on how many ranks there are.

    `own` are the slices of the flat buffer that this rank owns, one of each bucket.

    Bytes that a rank keeps beside its model, of N parameters and R ranks: the gradient 4 N, a copy
    of it for each doubling of its leaves, received pieces 4 N (R - 1) / R, and of the optimizer 8 N
    / R, 12 N / R where it has master weights."""

    def __init__(
        self, group: Group, flat: FlatParameters, optimizer: AdamW, leaves: int, context: int = 1
    ) -> None:
        self.group, self.flat, self.optimizer = group, flat, optimizer
        self.context, device = context, flat.data.device
        self.own_leaves = own_leaves(leaves, group.rank // context, group.size // context)
        self.buckets = buckets(flat) if group.size > 1 else [slice(0, flat.size)]
        self.pieces = [pieces(bucket, group.size) for bucket in self.buckets]
        self.own = [of_ranks[group.rank] for of_ranks in self.pieces]
        self._added = 0
        self._sums: list[NDArray] = []  # of finished subtrees, the largest first ...
        self._buffers: list[NDArray] = []  # ... and where they lie
        self._sent: list[Callable[[], None]] = []  # of the buckets that are on their way
        sizes = [piece.stop - piece.start for piece in self.own]
        self._received = [
            [_C.empty((0 if r == group.rank else n,), "float32", device) for r in range(group.size)]
            for n in sizes
        ]
        # The norms of chunks as they travel, one rank's behind another's; where that of each is.
        of_ranks = [[n for p in own for n in chunks_of(p)] for own in zip(*self.pieces)]
        ends = [0, *itertools.accumulate(map(len, of_ranks))]
        self._norms_of = [slice(*ends_of) for ends_of in itertools.pairwise(ends)]
        places = np.argsort(np.concatenate(of_ranks)).astype(np.int32)
        self._norm_places = _C.array(places, "int32", device)
        if group.size > 1:
            optimizer.keep(self.own)

    def digest(self) -> str:
        """Of the weights' bytes: equal on all ranks, between any two steps."""
        if self.group.size == 1:
            return ""
        data = as_bytes(self.flat.data).numpy()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    # ---- a step ---------------------------------------------------------------------------------

    def on_final(self, leaf: int) -> Callable[[Value], None] | None:
        """What the last of this rank's leaves gives to `backward`, so that buckets leave during it;
        None for the others."""
        if self.group.size == 1 or leaf != self.own_leaves[-1]:
            return None
        open_parts: dict[int, list[int]] = {}  # the buckets of each parameter
        missing = []  # parameters of each bucket
        for number, bucket in enumerate(self.buckets):
            inside = self.flat.within(bucket)
            missing.append(len(inside))
            for i in inside:
                open_parts.setdefault(id(self.flat.parameters[i]), []).append(number)

        def on_final(parameter: Value) -> None:
            for number in open_parts.get(id(parameter), ()):
                missing[number] -= 1
            while len(self._sent) < len(missing) and missing[len(self._sent)] == 0:
                self._send_bucket()

        return on_final

    def add_leaf(self) -> None:
        """flat.grad is the gradient of this rank's next leaf. The last one's `reduce` adds."""
        count = len(self.own_leaves)
        i, self._added = self._added, (self._added + 1) % count
        if self._added == 0:
            return
        grad = self.flat.grad
        for _ in range(merges(i, count)):
            grad += self._sums.pop()
        depth = len(self._sums)
        if depth == len(self._buffers):
            self._buffers.append(_C.empty(grad.shape, "float32", grad.device))
        _C.assign(self._buffers[depth], grad)
        self._sums.append(self._buffers[depth])

    def _send_bucket(self) -> None:
        """The next one, in which the last leaf's gradients are final."""
        number, group = len(self._sent), self.group
        bucket = self.buckets[number]
        grad = self.flat.grad_of(bucket)
        for earlier in reversed(self._sums):  # all are merged behind the last leaf
            grad += earlier[bucket]
        begin = bucket.start
        sends = [
            None if r == group.rank else grad[piece.start - begin : piece.stop - begin]
            for r, piece in enumerate(self.pieces[number])
        ]
        self._sent.append(group.start("the sum of gradients", sends, self._received[number]))

    def reduce(self, max_norm: float = 0.0) -> tuple[NDArray, NDArray]:
        """(norm, scale) as optim.grad_norm; this rank's pieces of flat.grad (`own`) are then the
        sum over all ranks, and the rest of no meaning."""
        group, grad = self.group, self.flat.grad
        while len(self._sent) < len(self.buckets):
            self._send_bucket()
        norms = _C.empty((self._norm_places.size,), "float32", grad.device)
        begin = self._norms_of[group.rank].start
        for own, received, arrive in zip(self.own, self._received, self._sent):
            arrive()
            self._add(grad[own], received)
            end = begin + len(chunks_of(own))
            chunk_norms(grad[own], norms[begin:end])
            begin = end
        self._sent, self._sums = [], []
        if group.size > 1:
            group.all_gather("the gradient's norm", norms, self._norms_of)
            in_order = _C.embedding_fwd(self._norm_places, norms.reshape((norms.size, 1)))
            norms = in_order.reshape((norms.size,))
        return total_norm(norms, max_norm)

    def _add(self, own: NDArray, received: Sequence[NDArray]) -> None:
        """What the ranks have sent of a piece, to this rank's part of it."""
        parts = [own if r == self.group.rank else x for r, x in enumerate(received)]
        of_tokens = [tree_sum(parts[c :: self.context]) for c in range(self.context)]
        total = tree_sum(of_tokens)
        if total is not own:
            _C.assign(own, total)

    def step(self, scale: NDArray | None = None) -> None:
        """The optimizer's, of this rank's pieces; flat.data then has the weights of all."""
        if self.group.size == 1:
            self.optimizer.step(scale)
            return
        data, sent = as_bytes(self.flat.data), []
        width = data.size // self.flat.size

        def send(number: int) -> None:
            wide = [slice(p.start * width, p.stop * width) for p in self.pieces[number]]
            sent.append(self.group.start_gather("the weights", data, wide))

        self.optimizer.step(scale, send)
        for arrive in sent:
            arrive()

    def losses(self, own: Sequence[NDArray]) -> list[NDArray]:
        """The float32 scalars of all leaves, in their order, from those of this rank."""
        if self.group.size == 1:
            return list(own)
        count, group = len(own), self.group
        all_losses = _C.empty((count * group.size,), "float32", self.flat.grad.device)
        for i, loss in enumerate(own, group.rank * count):
            _C.assign(all_losses[i : i + 1], loss.reshape((1,)))
        shares = [slice(r * count, (r + 1) * count) for r in range(group.size)]
        group.all_gather("the losses", all_losses, shares)
        shape = group.size // self.context, self.context, count
        leaves = _C.sum(all_losses.reshape(shape).permute((0, 2, 1)), 1) / self.context
        leaves = leaves.reshape((leaves.size,))
        return [leaves[i].reshape(()) for i in range(leaves.size)]

    # ---- the optimizer's state ------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_optimizer(self) -> Iterator[None]:
        """In the block rank 0's optimizer holds the state of all ranks, in the memory of the host:
        what a checkpoint is written from. The others hold theirs, and only send."""
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
                optimizer.keep(self.own, own)

    def _on_rank_0(self, name: str, own: NDArray) -> NDArray | None:
        """The whole of which each rank has its pieces, in the host's memory, on rank 0."""
        group = self.group
        whole = _C.empty((self.flat.size,), "float32", _C.cpu()) if group.rank == 0 else None
        nothing: list[NDArray | None] = [None] * group.size
        for rank, parts in enumerate(zip(*self.pieces)):
            if whole is None:
                sends = [own if group.rank == rank else None, *nothing[1:]]
                group.exchange(name, sends, nothing)
            else:
                size = sum(part.stop - part.start for part in parts)
                given = own if rank == 0 else _C.empty((size,), "float32", own.device)
                receives = [given if r == rank != 0 else None for r in range(group.size)]
                group.exchange(name, nothing, receives)
                given, begin = given.to(whole.device), 0
                for part in parts:
                    end = begin + part.stop - part.start
                    _C.assign(whole[part], given[begin:end])
                    begin = end
        return whole
