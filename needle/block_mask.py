"""BlockMask: which blocks of keys each block of queries attends to.

A pattern over single tokens (a window, a stride, some global tokens, any dense mask) is covered by
blocks: a block is kept when at least one of its (query, key) pairs is in the pattern, and a kept
block is attended to as a whole, except for what causality hides. T and S need not be multiples of
the block: the last one is shorter.

The kernels read lists: for mask g and block row i the key blocks
`columns[offsets[g, i] .. offsets[g, i + 1])`, ascending, and the transposed lists for the backward.
Block rows are worked on from the longest list to the shortest, so that no long one begins when the
others end. `_C.block_lists` makes lists and order on the device, once a mask.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray

DRAWN = 48  # blocks a side of what print() draws
SHADES = "·░▒▓█"


def _sizes(block: Any, T: Any, S: Any) -> tuple[int, int, int, tuple[int, int]]:
    """block, T, S, by default T, and the numbers of blocks of queries and of keys."""
    block, T = _positive("block", block), _positive("T", T)
    S = T if S is None else _positive("S", S)
    return block, T, S, (-(-T // block), -(-S // block))


def _positive(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value <= 0:
        raise ValueError(f"BlockMask: {what} must be a whole number above 0, but is {value!r}")
    return int(value)


class BlockMask:
    """An immutable set of blocks over (T queries, S keys), one for all heads or one a head.

    blocks: bool (query blocks, key blocks) or (H, query blocks, key blocks); block: tokens a side;
    T, S: tokens (S is T by default). Two masks are equal when they keep the same blocks.

    Any block works everywhere. Hopper GPUs (H100, H200) have their fast kernels for multiples of 64
    alone, with q, k and v in bfloat16 or float16, head dims of 8, 16, ... 128 and a scale above 0;
    whatever else there is goes through the kernels of older GPUs.

    >>> mask = ndl.BlockMask.local(T=8, window=2, block=2)
    >>> mask
    BlockMask(T=8, S=8, block=2, density=0.625)
    >>> print(mask.causal())
    BlockMask(T=8, S=8, block=2, density=0.438)
    ██······
    ████····
    ··████··
    ····████
    >>> mask.ideal_speedup  # of causal attention: of 36 pairs 24 are left
    1.5
    """

    T: int
    S: int
    block: int
    blocks: np.ndarray

    def __init__(self, blocks: Any, block: int, T: int, S: int | None = None) -> None:
        block, T, S, want = _sizes(block, T, S)
        kept = np.array(blocks)
        if kept.dtype != np.bool_:
            raise ValueError(f"BlockMask: blocks must be bool, but are {kept.dtype}")
        if kept.ndim == 2:
            kept = kept[None]
        if kept.ndim != 3 or kept.shape[0] == 0 or kept.shape[1:] != want:
            raise ValueError(
                f"BlockMask: blocks must be {want} or (H, {want[0]}, {want[1]}) for {T} queries "
                f"and {S} keys in blocks of {block}, but are {np.shape(blocks)}"
            )
        kept.setflags(write=False)
        known = T, S, block, kept.shape[0], kept.tobytes()
        made = {"_known": known, "_lists": {}, "_causal": None}  # what depends on the blocks
        self.__dict__.update(T=T, S=S, block=block, blocks=kept, **made)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a BlockMask is immutable; make a new one")

    def __reduce__(self) -> tuple:
        return (BlockMask, (np.array(self.blocks), self.block, self.T, self.S))

    # -- patterns

    @staticmethod
    def local(T: int, window: int, block: int) -> BlockMask:
        """Keys less than `window` tokens away: |i - j| < window. With causality a query sees itself
        and the window - 1 tokens before it, rounded out to blocks."""
        window = _positive("window", window)
        lowest, highest = _distances(T, block)
        return BlockMask((lowest < window) & (highest > -window), block, T)

    @staticmethod
    def strided(T: int, stride: int, block: int) -> BlockMask:
        """Keys a multiple of `stride` tokens away: (i - j) % stride == 0 (Child et al. 2019). Only
        a stride of more than two blocks leaves any block out."""
        stride = _positive("stride", stride)
        lowest, highest = _distances(T, block)
        return BlockMask(highest // stride * stride >= lowest, block, T)

    @staticmethod
    def global_(T: int, n_global: int, block: int) -> BlockMask:
        """The first `n_global` tokens see and are seen by all: i < n_global or j < n_global."""
        n_global = _positive("n_global", n_global)
        block, T, _, (rows, _) = _sizes(block, T, T)
        reached = np.arange(rows) * block < n_global
        return BlockMask(reached[:, None] | reached, block, T)

    @staticmethod
    def dilated(T: int, segment: int, dilation: int, block: int) -> BlockMask:
        """Keys of the query's segment of `segment` tokens that are a multiple of `dilation` tokens
        away, as a branch of ops.dilated_attention has them for all its heads together."""
        segment, dilation = _positive("segment", segment), _positive("dilation", dilation)
        block, T, _, shape = _sizes(block, T, T)
        kept = np.zeros(shape, bool)
        for start in range(0, T, segment):
            end = min(start + segment, T)
            within = slice(start // block, -(-end // block))  # the blocks that the segment meets
            lowest, highest = _distances(end, block, start)
            kept[within, within] |= highest // dilation * dilation >= lowest
        return BlockMask(kept, block, T)

    @staticmethod
    def random(T: int, n_random: int, block: int, seed: int = 0) -> BlockMask:
        """Keep, for each block of queries, its own keys and `n_random` earlier blocks (all, where
        there are fewer), drawn from the seed (Zaheer et al. 2020)."""
        n_random = _positive("n_random", n_random)
        block, T, _, (rows, _) = _sizes(block, T, T)
        generator = np.random.default_rng(seed)
        kept = np.eye(rows, dtype=bool)
        for row in range(rows):
            kept[row, generator.permutation(row)[:n_random]] = True
        return BlockMask(kept, block, T)

    @staticmethod
    def mixed(
        T: int,
        window: int | None = None,
        stride: int | None = None,
        n_global: int | None = None,
        block: int = 64,
        n_random: int | None = None,
        seed: int = 0,
    ) -> BlockMask:
        """The union of the local, strided, global and random patterns that are given (not None)."""
        parts = [
            make(T, value, block)
            for make, value in (
                (BlockMask.local, window),
                (BlockMask.strided, stride),
                (BlockMask.global_, n_global),
                (functools.partial(BlockMask.random, seed=seed), n_random),
            )
            if value is not None
        ]
        if not parts:
            raise ValueError("BlockMask.mixed: give window, stride, n_global or n_random")
        return functools.reduce(operator.or_, parts)

    @staticmethod
    def dense(T: int, block: int = 64, S: int | None = None) -> BlockMask:
        """Every block: plain attention."""
        block, T, S, shape = _sizes(block, T, S)
        return BlockMask(np.ones(shape, dtype=bool), block, T, S)

    @staticmethod
    def from_function(
        keep: Callable[[np.ndarray, np.ndarray], Any], T: int, block: int, S: int | None = None
    ) -> BlockMask:
        """Keep the blocks for which `keep(query block, key block)` is true. It is called once, with
        block numbers of shape (query blocks, 1) and (1, key blocks), so conditions are joined by &
        and |. Its bool result broadcasts to (query blocks, key blocks), or to (H, query blocks, key
        blocks) for a mask a head.

        >>> ndl.BlockMask.from_function(lambda i, j: (i - j) % 3 == 0, T=64, block=16)
        BlockMask(T=64, S=64, block=16, density=0.375)
        """
        block, T, S, (rows, columns) = _sizes(block, T, S)
        kept = np.asarray(keep(np.arange(rows)[:, None], np.arange(columns)[None, :]))
        return BlockMask(np.broadcast_to(kept, (*kept.shape[:-2], rows, columns)), block, T, S)

    # -- combining

    def __or__(self, other: BlockMask) -> BlockMask:
        """The blocks of either; a mask for all heads joins one a head."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        one, two = ((mask.T, mask.S, mask.block, mask.heads) for mask in (self, other))
        if one[:3] != two[:3] or len({1, self.heads, other.heads}) > 2:
            raise ValueError(f"BlockMask: union: T, S, block, heads are {one} and {two}")
        return BlockMask(self.blocks | other.blocks, self.block, self.T, self.S)

    def causal(self) -> BlockMask:
        """Drop the blocks in which no query i may see a key j <= i + S - T."""
        if self._causal is None:
            last_query = np.minimum((np.arange(self.blocks.shape[1]) + 1) * self.block, self.T) - 1
            first_key = np.arange(self.blocks.shape[2]) * self.block
            visible = first_key[None, :] <= last_query[:, None] + self.S - self.T
            if (self.blocks <= visible).all():
                return self
            lower = BlockMask(self.blocks & visible, self.block, self.T, self.S)
            self.__dict__["_causal"] = lower
        return self._causal

    # -- looking at it

    @property
    def heads(self) -> int:
        """1 when all heads are alike, else their number."""
        return self.blocks.shape[0]

    @property
    def density(self) -> float:
        """The kept fraction of all blocks."""
        return float(self.blocks.mean())

    @property
    def ideal_speedup(self) -> float:
        """Speed-up of causal attention by this mask over causal dense attention if time goes by
        pairs of query and key; inf when no pair is left."""
        _, rows, columns = self.blocks.shape
        query = np.minimum(np.arange(rows + 1) * self.block, self.T)[:, None]
        key = np.minimum(np.arange(columns + 1) * self.block, self.S)[None, :]
        # The last query before an edge sees `side` keys after another, each query before it one
        # less: their pairs are a triangle, and those of a block the difference of four.
        side = np.maximum(query + self.S - self.T - key, 0)
        pairs = -np.diff(np.diff(side * (side + 1) // 2, axis=0), axis=1)
        kept = int((pairs * self.blocks.sum(axis=0)).sum())
        return float(pairs.sum() * self.heads / kept) if kept else math.inf

    def head(self, number: int) -> BlockMask:
        """The mask of one head, as print() and plot() show it."""
        if self.heads == 1:
            return self
        return BlockMask(self.blocks[number], self.block, self.T, self.S)

    def to_dense(self) -> np.ndarray:
        """The kept blocks as a bool array over tokens: (T, S), or (H, T, S) with one mask a
        head."""
        wide = self.blocks.repeat(self.block, axis=1).repeat(self.block, axis=2)
        wide = wide[:, : self.T, : self.S]
        return wide[0] if self.heads == 1 else wide

    def check(self, op: str, T: int, S: int, heads: int) -> None:
        """ValueError of `op` unless the mask fits T queries, S keys and this number of heads."""
        if (T, S) != (self.T, self.S):
            raise ValueError(
                f"{op}: the mask is for {self.T} queries and {self.S} keys, but q and k have "
                f"{T} and {S}"
            )
        if self.heads not in (1, heads):
            raise ValueError(f"{op}: the mask is for {self.heads} heads, but q has {heads}")

    def lists(self, device: Device) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray, NDArray]:
        """(offsets, columns, order, offsets_t, rows, order_t) as int32 on `device`; made once a
        device, and again when it was reset."""
        generation, lists = self._lists.get(device, (None, None))
        if generation != device.generation:
            kept, count = _C.array(self.blocks, "bool", device), int(self.blocks.sum())
            transposed = kept.permute((0, 2, 1))
            lists = (*_listed(kept, count), *_listed(transposed, count))
            self._lists[device] = device.generation, lists
        return lists

    def __eq__(self, other: object) -> bool:
        return self._known == other._known if isinstance(other, BlockMask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._known)

    def __str__(self) -> str:
        """The line of repr(), and the blocks as a drawing: two letters a block, or where there are
        more than DRAWN a side two for as many blocks as needed, darker the more of them are kept.
        Where each head has a mask, that of the first; head(n) has the others."""
        kept = self.blocks[0]
        step = -(-max(kept.shape) // DRAWN)
        rows, columns = (range(0, n, step) for n in kept.shape)
        parts = [[kept[i : i + step, j : j + step].mean() for j in columns] for i in rows]
        levels = np.ceil(np.array(parts) * (len(SHADES) - 1)).astype(int)
        lines = ["".join(SHADES[level] * 2 for level in row) for row in levels]
        note = "" if self.heads == 1 else f"\nhead 0 of {self.heads}, another by head(n):"
        return "\n".join([repr(self) + note, *lines])

    def plot(self, path: str | os.PathLike) -> None:
        """Save a picture of the kept blocks, queries downwards, a panel a head: of the first 16,
        and head(n).plot() of any; the ending of the path says which kind of file."""
        from matplotlib.figure import Figure

        shown = self.blocks[:16]
        columns = math.ceil(math.sqrt(len(shown)))
        rows = -(-len(shown) // columns)
        figure = Figure(figsize=(4 * columns, 4 * rows), layout="constrained")
        title = textwrap.fill(repr(self), 36 * columns)  # so many letters are 4 inches
        figure.suptitle(f"{title}\nideal speed-up {self.ideal_speedup:.2f}")
        for head, blocks in enumerate(shown):
            axes = figure.add_subplot(rows, columns, head + 1)
            axes.imshow(blocks, cmap="Greys", vmin=0, extent=(0, self.S, self.T, 0), aspect="auto")
            axes.set_xlabel("key")
            axes.set_ylabel("query")
            if self.heads > 1:
                axes.set_title(f"head {head}")
        figure.savefig(path)

    def __repr__(self) -> str:
        heads = "" if self.heads == 1 else f", heads={self.heads}"
        return (
            f"BlockMask(T={self.T}, S={self.S}, block={self.block}{heads}, "
            f"density={self.density:.3f})"
        )


def _distances(T: int, block: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest i - j of queries i and keys j of [start, T), by pair of blocks."""
    block, T, _, (rows, _) = _sizes(block, T, T)
    edges = np.arange(start // block, rows + 1) * block
    first, last = np.maximum(edges[:-1], start), np.minimum(edges[1:], T) - 1
    return first[:, None] - last, last[:, None] - first


def _listed(kept: NDArray, count: int) -> tuple[NDArray, NDArray, NDArray]:
    """(offsets, entries, order) of bool (G, rows, columns), of which `count` are true."""
    heads, rows, _ = kept.shape
    offsets = _C.empty((heads, rows + 1), "int32", kept.device)
    entries = _C.empty((count,), "int32", kept.device)
    return offsets, entries, _C.block_lists(kept, offsets, entries)


def as_block_mask(op: str, mask: Any) -> BlockMask:
    """Return `mask` if it is a BlockMask. TypeError of `op` if not."""
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"{op}: mask must be a BlockMask, not {type(mask).__name__}; "
            "convert_to_block_mask makes one from a dense mask"
        )
    return mask


def convert_to_block_mask(dense_mask: Any, block: int) -> BlockMask:
    """The blocks that hold at least one true entry of a dense mask.

    dense_mask: bool (T, S), or (H, T, S) for one mask a head: a NumPy array, NDArray, Tensor or
    nested list; numbers count as true when above 0. T and S need not be multiples of `block`. A
    mask that is added to scores, 0 where a query sees a key and -inf or -1e9 elsewhere, has
    negative numbers and is refused: pass mask == 0. An NDArray or Tensor is read on its device.

    >>> ndl.convert_to_block_mask(np.tri(4, dtype=bool), block=2)
    BlockMask(T=4, S=4, block=2, density=0.750)
    """
    block = _positive("block", block)
    dense = getattr(dense_mask, "cached_data", dense_mask)
    if not isinstance(dense, NDArray):
        dense = np.asarray(dense)
    if len(dense.shape) not in (2, 3) or 0 in dense.shape:
        raise ValueError(
            f"convert_to_block_mask: the mask must be (T, S) or (H, T, S) and not empty, "
            f"but its shape is {dense.shape}"
        )
    if dense.dtype != "bool" and not (dense >= 0).min().item():
        raise ValueError(
            "convert_to_block_mask: the mask has negative numbers or NaN, so it seems to be added "
            "to scores; pass mask == 0 or another bool mask"
        )
    T, S = dense.shape[-2:]
    if isinstance(dense, np.ndarray):
        dense = _C.array(dense.astype(bool, copy=False), "bool", _C.cpu())
    dense = dense.astype("bool").reshape((dense.size // (T * S), T, S))
    kept = _C.empty((dense.shape[0], -(-T // block), -(-S // block)), "bool", dense.device)
    _C.kept_blocks(dense, block, kept)
    return BlockMask(kept.numpy(), block, T, S)
