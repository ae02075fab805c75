"""Batches of (inputs, targets) from tokens: which sample comes when, exactly.

An epoch is a stream of ids, of which sample i is T + 1 ids from i * stride on, and the order in
which the samples are drawn:

    flat array        ids as they lie       stride T      an order of its own an epoch
    documents         shuffled documents    stride T      GPT-NeoX's order for the seed
    preshuffled rows  ids as they lie       stride T + 1  that of the file, as the Pythias' training

Each stream of documents has those of `passes` walks through the data, shuffled together; a further
epoch begins with seed + 1.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any

import numpy as np

from needle.data import megatron
from needle.data.readers import TokenData
from needle.data.tokens import DataError, Documents, FlatTokens, in_memory, to_ids


class Stream:
    """The ids of an epoch. order: numbers of documents, one after the other; None: all ids as they
    lie."""

    def __init__(self, tokens: FlatTokens, order: np.ndarray | None = None) -> None:
        self.tokens, self.order = tokens, order
        self.ends = None if order is None else np.cumsum(tokens.sizes[order], dtype=np.int64)

    def read(self, *samples: tuple[int, int], vocab_size: int | None = None) -> np.ndarray:
        """The ids of samples [start, stop), start < stop, as FlatTokens.read returns them."""
        stretches = [one for sample in samples for one in self._stretches(*sample)]
        return self.tokens.read(*stretches, vocab_size=vocab_size)

    def _stretches(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        if self.order is None:
            return [(start, stop)]
        first, last = np.searchsorted(self.ends, (start, stop - 1), side="right")
        documents = self.order[first : last + 1]
        starts, stops = self.tokens.borders[documents], self.tokens.borders[documents + 1]
        starts[0] = stops[0] - (self.ends[first] - start)
        stops[-1] -= self.ends[last] - stop
        return zip(starts.tolist(), stops.tolist())


def _samples(
    tokens: FlatTokens, seq_len: int, seed: int, count: int, passes: int | None, epoch: int
) -> tuple[Stream, np.ndarray]:
    """(stream, numbers of its samples in the order in which they are drawn) of an epoch."""
    if passes is not None:
        sizes, seed = tokens.sizes, seed + epoch
        documents, order = megatron.shuffled(sizes, 0, len(sizes), seq_len, seed, passes)
        return Stream(tokens, documents), order
    if isinstance(tokens, Documents):
        return Stream(tokens), np.arange(count)
    return Stream(tokens), np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


class Batches:
    """Batches of samples of seq_len ids, without end.

    tokens: ids (N,), or what open_data gave, of which `train` is read. samples: how many a
    whole run draws; GPT-NeoX's order depends on it through the number of walks that it shuffles
    together (default: one walk). vocab_size: ids must lie in [0, vocab_size), else DataError with
    file and offset. Iterating is calling `next`, without end; `len` is the batches of an epoch.

    Samples that fill no whole batch are left out of an epoch. The order depends on tokens, seed and
    epoch alone: `position` is all there is to remember, and `seek(position)` goes there exactly.

    >>> from needle.data import Batches
    >>> batches = Batches(np.arange(100, 117), batch_size=2, seq_len=4, seed=1)
    >>> ids, targets = batches.next()
    >>> ids.shape, bool((targets - ids == 1).all()), batches.position
    ((2, 4), True, {'epoch': 0, 'batch': 1})
    >>> batches
    Batches(2 x 4 of 17 tokens, 2 an epoch; next is epoch 0, batch 1)
    """

    def __init__(
        self,
        tokens: Any,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        samples: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
            if not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(
                    f"Batches: {name} must be 1 or more, a whole number, but is {size!r}"
                )
        source = tokens.source if isinstance(tokens, TokenData) else None
        tokens = in_memory(tokens.train if source else tokens)
        self.tokens, self.batch_size, self.seq_len = tokens, batch_size, seq_len
        self.vocab_size = vocab_size
        self.stride, self.passes = seq_len, None
        if isinstance(tokens, Documents) and tokens.row_length:
            self.stride = tokens.row_length
            if self.stride != seq_len + 1:
                raise DataError(
                    f"{tokens.parts[0].path}: preshuffled rows of {self.stride:,} "
                    f"tokens are for --seq-len {self.stride - 1}, not {seq_len}"
                )
        elif isinstance(tokens, Documents):
            self.passes = megatron.passes_for(samples or 1, len(tokens), seq_len)
        self.count = self._count(self.passes)  # samples an epoch
        if len(self) == 0:
            raise DataError(
                f"{source or repr(tokens)}: fewer than one batch of {batch_size} x {seq_len} "
                "(+ 1); give more text (--data), a smaller batch (--batch-size) or shorter "
                "sequences (--seq-len)"
            )
        self._samples = functools.lru_cache(2)(functools.partial(_samples, tokens, seq_len, seed))
        self.number = 0  # of the next batch, in all epochs
        self.share(range(1), 1)
        # (rows, number of the batch) -> the rows to draw instead; a target without a loss is ~id.
        self.edits: Callable[[np.ndarray, int], np.ndarray] | None = None

    def __repr__(self) -> str:
        next_one = "next is epoch {epoch}, batch {batch}".format_map(self.position)
        size = f"{self.batch_size} x {self.seq_len} of {len(self.tokens):,} tokens"
        return f"Batches({size}, {len(self):,} an epoch; {next_one})"

    def _count(self, passes: int | None) -> int:
        """Count the samples of an epoch."""
        ids = len(self.tokens) * (1 if passes is None else passes)
        return max(ids - self.seq_len - 1 + self.stride, 0) // self.stride

    def __len__(self) -> int:
        """Batches an epoch."""
        return self.count // self.batch_size

    @property
    def position(self) -> dict[str, int]:
        """Position of the next batch, as a checkpoint keeps it."""
        epoch = max(self.number - 1, 0) // len(self)  # one ends with the next one's first batch
        position = {"epoch": epoch, "batch": self.number - epoch * len(self)}
        return position if self.passes is None else {**position, "passes": self.passes}

    def seek(self, position: dict[str, int]) -> None:
        """Go to a `position` that batches of the same tokens, sizes and seed have had. DataError
        for what is none."""
        if not all(isinstance(position.get(name), Integral) for name in self.position):
            numbers = ", ".join(self.position)
            raise DataError(f"no position: {position}, but one has the numbers {numbers}")
        epoch, batch, passes = position["epoch"], position["batch"], self.passes
        if passes is not None:  # a run whose length was changed keeps the order it began with
            passes = position["passes"]
        count = self._count(passes)
        batches = count // self.batch_size
        if batches == 0 or not 0 <= epoch < 1 << 31 or not 0 <= batch <= batches:
            raise DataError(f"no position: {position}: an epoch has {batches} batches")
        self.passes, self.count = passes, count
        self.number, self._drawn = epoch * batches + batch, 0

    def seek_batch(self, number: int) -> None:
        """Go to the batch that a run draws as its `number`-th, from 0."""
        epoch, batch = divmod(number, len(self))
        self.seek({**self.position, "epoch": epoch, "batch": batch})

    def copy(self, position: dict[str, int] | None = None) -> Batches:
        """Return batches at a position, by default the same, of which none are left to other
        ranks."""
        other = copy.copy(self)
        other.share(range(1), 1)
        if position is not None:
            other.seek(position)
        return other

    def share(self, own: range, every: int, columns: np.ndarray | None = None) -> None:
        """Draw from here on, of each `every` batches in a row, those numbered `own`: the share of
        one of several ranks. After a rank's last own batch, `position` skips to the end of the
        group of `every`, equal on all ranks. columns: draw the tokens at these places of each
        sequence, in this order.

        >>> from needle.data import Batches
        >>> batches = Batches(np.arange(100), batch_size=2, seq_len=4)
        >>> batches.share(range(1, 2), every=4)
        >>> _ = batches.next()
        >>> batches.position
        {'epoch': 0, 'batch': 4}
        """
        self._own, self._every, self.columns = own, every, columns
        self._drawn = 0  # of this rank's own batches, of the `every` that are under way

    @property
    def width(self) -> int:
        """Tokens of a sequence that are drawn."""
        return self.seq_len if self.columns is None else len(self.columns)

    def samples(self, epoch: int) -> tuple[Stream, np.ndarray]:
        """(stream, numbers of its samples in the order in which they are drawn) of an epoch. Those
        of two epochs are held."""
        return self._samples(self.count, self.passes, epoch)

    def drawn(self, number: int, count: int = 1) -> tuple[int, np.ndarray]:
        """(epoch, numbers of its samples) of `count` batches of one epoch, of which the first is
        the `number`-th of a run."""
        epoch, batch = divmod(number, len(self))
        order = self.samples(epoch)[1]
        return epoch, order[batch * self.batch_size : (batch + count) * self.batch_size]

    def read(self, epoch: int, chosen: np.ndarray) -> np.ndarray:
        """integers (len(chosen), seq_len + 1), int32 or int64: samples by their numbers."""
        stream, starts = self.samples(epoch)[0], (chosen.astype(np.int64) * self.stride).tolist()
        length = self.seq_len + 1
        ids = stream.read(*[(at, at + length) for at in starts], vocab_size=self.vocab_size)
        return to_ids(ids).reshape(len(chosen), length)

    def next_rows(self) -> np.ndarray:
        """integers (batch_size, seq_len + 1), int32 or int64: the next batch."""
        number = self.number + (self._own.start if self._drawn == 0 else 0)
        rows = self.read(*self.drawn(number))
        if self.edits is not None:
            rows = self.edits(rows, number)
        self.number, self._drawn = number + 1, (self._drawn + 1) % len(self._own)
        if self._drawn == 0:
            self.number += self._every - self._own.stop
        return rows

    def parts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of rows (batch_size, seq_len + 1), (batch_size, width) each."""
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.edits is not None:
            inputs = np.maximum(inputs, ~inputs)
        if self.columns is None:
            return inputs, targets
        return inputs[:, self.columns], targets[:, self.columns]

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), integers (batch_size, width); goes on for ever."""
        return self.parts(self.next_rows())

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield self.next()

    def in_order(self, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield at most `limit` batches for evaluation, evenly spread and always the same."""
        own = np.arange(self.batch_size)
        for first in np.linspace(0, len(self) - 1, min(limit, len(self))).astype(int):
            yield self.parts(self.read(0, first * self.batch_size + own))
