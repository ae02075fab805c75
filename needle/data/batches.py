"""Batches of (inputs, targets) from tokens: which sample comes when, exactly.

Windows   a flat array      windows of T + 1 ids that share one, in an order of its own an epoch
Packed    documents         GPT-NeoX's samples in GPT-NeoX's order for the seed
Rows      preshuffled rows  batch i is rows B i to B (i + 1) - 1, as the Pythias were trained
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from needle.data import megatron
from needle.data.readers import TokenData
from needle.data.tokens import DataError, Documents, FlatTokens, in_memory, to_ids


class Windows:
    """Window i is tokens [i T, i T + T + 1): inputs are its first T tokens, targets its last T, so
    that each token is predicted once an epoch."""

    def __init__(self, tokens: FlatTokens, seq_len: int, seed: int) -> None:
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.stride = seq_len
        self.count = max(len(tokens) - 1, 0) // seq_len

    def order(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.count)

    def stretches(self, sample: int) -> list[tuple[int, int]]:
        """(start, stop) in the flat array of each stretch of a sample."""
        start = sample * self.stride
        return [(start, start + self.seq_len + 1)]

    def rows(self, chosen: np.ndarray, vocab_size: int | None) -> np.ndarray:
        """(len(chosen), T + 1): the ids of these samples, below vocab_size."""
        read = self.tokens.read
        rows = [read(*self.stretches(i), vocab_size=vocab_size) for i in chosen.tolist()]
        return np.stack(rows)


class Rows(Windows):
    """Rows of T + 1 tokens, in the order of the file."""

    def __init__(self, tokens: Documents, seq_len: int, seed: int) -> None:
        super().__init__(tokens, seq_len, seed)
        if tokens.row_length != seq_len + 1:
            raise DataError(
                f"{tokens.parts[0].path}: preshuffled rows of {tokens.row_length:,} "
                f"tokens are for --seq-len {tokens.row_length - 1}, not {seq_len}"
            )
        self.stride = seq_len + 1
        self.count = len(tokens) // self.stride

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(self.count)


class Packed(Windows):
    """GPT-NeoX's samples: the documents of `passes` walks through the data, shuffled together and
    cut every T tokens. An epoch here is all of that order; a further one begins with seed + 1."""

    def __init__(self, documents: Documents, seq_len: int, seed: int, passes: int) -> None:
        super().__init__(documents, seq_len, seed)
        self.passes = passes
        self.starts = np.concatenate([[0], np.cumsum(documents.sizes, dtype=np.int64)])
        self.count = (len(documents) * passes - 1) // seq_len
        self._epoch = None  # of the arrays of `order`

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch, and make the arrays that `stretches` reads."""
        if self._epoch != epoch:
            sizes, seed = self.tokens.sizes, self.seed + epoch
            self.doc_idx, self.sample_idx, self.shuffle_idx = megatron.sample_order(
                sizes, 0, len(sizes), self.seq_len, seed, self.passes
            )
            self._epoch = epoch
        return self.shuffle_idx

    def stretches(self, sample: int) -> list[tuple[int, int]]:
        (first, begin), (last, end) = self.sample_idx[sample : sample + 2].tolist()
        documents = self.doc_idx[first : last + 1]
        starts, stops = self.starts[documents], self.starts[documents + 1]
        stops[-1] = starts[-1] + end + 1
        starts[0] += begin
        return list(zip(starts.tolist(), stops.tolist()))


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
    >>> ids.shape, (targets - ids == 1).all(), batches.position
    ((2, 4), np.True_, {'epoch': 0, 'batch': 1})
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
        tokens = in_memory(tokens.train if isinstance(tokens, TokenData) else tokens)
        self.tokens, self.batch_size, self.seq_len, self.seed = tokens, batch_size, seq_len, seed
        self.vocab_size = vocab_size
        if isinstance(tokens, Documents) and tokens.row_length:
            samples_of_run = Rows(tokens, seq_len, seed)
        elif isinstance(tokens, Documents):
            passes = megatron.passes_for(samples or 1, len(tokens), seq_len)
            samples_of_run = Packed(tokens, seq_len, seed, passes)
        else:
            samples_of_run = Windows(tokens, seq_len, seed)
        self._go(samples_of_run, 0, 0)
        self._own, self._every = range(1), 1
        self.columns: np.ndarray | None = None
        # (rows, epoch, batch) -> the rows to draw instead; a target without a loss is ~id.
        self.edits: Callable[[np.ndarray, int, int], np.ndarray] | None = None

    def _go(self, samples: Windows, epoch: int, batch: int) -> None:
        """Go to a batch of `samples`; DataError where they have none such."""
        count = samples.count // self.batch_size
        if count == 0:
            raise DataError(
                f"{self.tokens!r}: fewer than one batch of {self.batch_size} x {self.seq_len} "
                "(+ 1); give more text (--data), a smaller batch (--batch-size) or shorter "
                "sequences (--seq-len)"
            )
        if not 0 <= epoch < 1 << 31 or not 0 <= batch <= count:
            raise DataError(
                f"no position epoch {epoch}, batch {batch}: an epoch has {count} batches"
            )
        self._order, self._samples = samples.order(epoch), samples
        self.epoch, self.batch = epoch, batch
        self._drawn = 0  # of this rank's own batches, of the `every` that are under way

    def __repr__(self) -> str:
        return (
            f"Batches({self.batch_size} x {self.seq_len} of {len(self.tokens):,} tokens, "
            f"{len(self):,} an epoch; next is epoch {self.epoch}, batch {self.batch})"
        )

    def __len__(self) -> int:
        """Batches an epoch."""
        return self._samples.count // self.batch_size

    @property
    def position(self) -> dict[str, int]:
        """Position of the next batch, as a checkpoint keeps it."""
        position = {"epoch": self.epoch, "batch": self.batch}
        if isinstance(self._samples, Packed):
            position["passes"] = self._samples.passes
        return position

    def seek(self, position: dict[str, int]) -> None:
        """Go to a `position` that batches of the same tokens, sizes and seed have had. DataError
        for what is none."""
        samples = self._samples
        if not position.keys() >= self.position.keys():
            raise DataError(f"no position: {position}, but one has {', '.join(self.position)}")
        passes = position.get("passes")
        if isinstance(samples, Packed) and passes != samples.passes:
            # A run whose length was changed keeps the order that it began with.
            if passes < 1:
                raise DataError(f"no position: passes is {passes}: the run draws {samples.passes}")
            samples = Packed(self.tokens, self.seq_len, self.seed, passes)
        self._go(samples, position["epoch"], position["batch"])

    def seek_batch(self, number: int) -> None:
        """Go to the batch that a run draws as its `number`-th, from 0."""
        epoch, batch = divmod(number, len(self))
        self.seek({**self.position, "epoch": epoch, "batch": batch})

    def copy(self) -> Batches:
        """Return batches at the same position, of which none are left to other ranks."""
        other = copy.copy(self)
        other._samples = copy.copy(self._samples)  # which holds the order of an epoch
        if self.edits is not None:
            other.edits = copy.copy(self.edits)
            other.edits.batches = other
        other.share(range(1), 1)
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
        self._own, self._every, self._drawn = own, every, 0
        self.columns = columns

    @property
    def width(self) -> int:
        """Tokens of a sequence that are drawn."""
        return self.seq_len if self.columns is None else len(self.columns)

    def parts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of rows (batch_size, seq_len + 1), (batch_size, width) each."""
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.edits is not None:
            inputs = np.maximum(inputs, ~inputs)
        if self.columns is None:
            return inputs, targets
        return inputs[:, self.columns], targets[:, self.columns]

    def _skip(self, count: int) -> None:
        """Go on as if `count` batches had been drawn."""
        while count > 0:
            self._turn()
            here = min(count, len(self) - self.batch)
            self.batch, count = self.batch + here, count - here

    def _turn(self) -> None:
        """Begin the next epoch where this one is at its end."""
        if self.batch == len(self):
            self.epoch, self.batch = self.epoch + 1, 0
            self._order = self._samples.order(self.epoch)

    def next_rows(self) -> np.ndarray:
        """integers (batch_size, seq_len + 1), int32 or int64: the next batch."""
        if self._drawn == 0:
            self._skip(self._own.start)
        self._turn()
        chosen = self._order[self.batch * self.batch_size : (self.batch + 1) * self.batch_size]
        rows = self.read(self._samples, chosen)
        if self.edits is not None:
            rows = self.edits(rows, self.epoch, self.batch)
        self.batch += 1
        self._drawn = (self._drawn + 1) % len(self._own)
        if self._drawn == 0:
            self._skip(self._every - self._own.stop)
        return rows

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
            yield self.parts(self.read(self._samples, first * self.batch_size + own))

    def drawn_in(self, epoch: int) -> tuple[Windows, np.ndarray]:
        """(samples, the numbers of those that are drawn, in order) of an epoch."""
        if epoch == self.epoch:
            return self._samples, self._order
        samples = copy.copy(self._samples)
        return samples, samples.order(epoch)

    def read(self, samples: Windows, chosen: np.ndarray) -> np.ndarray:
        """integers (len(chosen), seq_len + 1), int32 or int64: samples by their numbers."""
        return to_ids(samples.rows(chosen, self.vocab_size))
