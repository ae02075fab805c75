"""Token ids in files: parts of files that read as one flat array.

    FlatTokens = part 0 | part 1 | ...      a part: (file, byte offset, dtype, count)
    Documents  = FlatTokens + the size of each document

Nothing is held in memory: each read copies the ids that it returns. Samples are short and lie
anywhere, so the system's readahead, up to megabytes each, is off; the samples of a batch are
announced together, which fetches their own pages alone and all at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle.files import FileError, OpenFile, not_regular, reading, state_of

DataError = FileError  # data that cannot be used; the message names it and says what to do


def absent(path: str | os.PathLike, what: str = "file") -> str:
    """Return why `path` cannot be read: no such file, or something else than a file."""
    return not_regular(path) or f"no such {what}"


class Part:
    """`count` ids of `dtype` from byte `offset` of a file. Raises DataError where the file cannot
    be opened or is too short."""

    def __init__(self, path: Path, offset: int, dtype: np.dtype, count: int) -> None:
        self.path, self.offset, self.dtype, self.count = path, offset, np.dtype(dtype), count
        self.end = offset + count * self.dtype.itemsize
        with reading(path) as file:
            status = os.fstat(file.fileno())
            self.state, self._file = state_of(status), OpenFile(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        if status.st_size < self.end:
            raise self._cut("is truncated", status.st_size)

    def _cut(self, problem: str, size: int) -> DataError:
        return DataError(
            f"{self.path}: {problem}: the file ends at offset {size:,}, its tokens at {self.end:,}"
        )

    def announce(self, start: int, stop: int) -> None:
        """Ask the system to fetch ids [start, stop), which are read soon; returns at once."""
        item = self.dtype.itemsize
        self._file.announce(self.offset + start * item, (stop - start) * item)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of ids [start, stop)."""
        ids = np.empty(max(stop - start, 0), self.dtype)
        offset = self.offset + start * self.dtype.itemsize
        if self._file.read_into(memoryview(ids.view(np.uint8)), offset) < ids.nbytes:
            raise self._cut("has shrunk since it was opened", self._file.size())
        return ids

    def __reduce__(self):
        return Part, (self.path, self.offset, self.dtype, self.count)


def whole_file(path: Path, dtype: np.dtype) -> Part:
    """A file that holds ids of `dtype` and nothing else."""
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size:,} bytes are no whole number of {dtype} tokens: the file is "
            "truncated, or of another format"
        )
    return Part(path, 0, dtype, size // dtype.itemsize)


class FlatTokens:
    """The ids of one part or several, one after the other. Reads like a one-dimensional array:
    len, dtype, shape, slices (copied), integer arrays, np.asarray (all of it, copied)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        if len({part.dtype for part in parts}) != 1:
            listed = ", ".join(f"{part.path}: {part.dtype}" for part in parts)
            raise DataError(f"files of several types do not make one array ({listed})")
        self.parts = list(parts)
        self.dtype = self.parts[0].dtype
        self._ends = np.cumsum([part.count for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __repr__(self) -> str:
        files = ", ".join(str(part.path) for part in self.parts[:3])
        more = f" and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        return f"{type(self).__name__}({len(self):,} {self.dtype} tokens of {files}{more})"

    def _within(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """(part, start, stop) within each part that holds some of ids [start, stop)."""
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            part = self.parts[index]
            before = int(self._ends[index]) - part.count
            end = min(stop, before + part.count)
            if end > start:
                yield part, start - before, end - before
            start, index = end, index + 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of ids [start, stop), 0 <= start <= stop <= len."""
        found = [part.read(low, high) for part, low, high in self._within(start, stop)]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, self.dtype)

    def rows(self, rows: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
        """(len(rows), T): of each row the ids of its stretches [start, stop), T in all, one after
        the other."""
        for start, stop in itertools.chain.from_iterable(rows):
            for part, low, high in self._within(start, stop):
                part.announce(low, high)
        return np.stack([np.concatenate([self.read(*one) for one in row]) for row in rows])

    def between(self, start: int, stop: int) -> FlatTokens:
        """The ids [start, stop) as FlatTokens; nothing is read."""
        parts = [
            Part(part.path, part.offset + low * part.dtype.itemsize, part.dtype, high - low)
            for part, low, high in self._within(start, stop)
        ]
        first = self.parts[0]
        return FlatTokens(parts or [Part(first.path, first.offset, first.dtype, 0)])

    def where(self, position: int) -> tuple[Path, int]:
        """(file, byte offset) of an id."""
        ((part, place, _),) = self._within(position, position + 1)
        return part.path, part.offset + place * part.dtype.itemsize

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step > 0:
                return self.read(start, max(start, stop))[::step]
            return np.asarray(self)[index]
        chosen = np.asarray(index)
        if chosen.dtype.kind not in "iu":
            raise IndexError(f"tokens are indexed by integers and slices, not by {chosen.dtype}")
        places = [range(len(self))[place] for place in chosen.ravel().tolist()]
        ids = [self.read(place, place + 1)[0] for place in places]
        return np.array(ids, self.dtype).reshape(chosen.shape)[()]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.read(0, len(self)).astype(dtype or self.dtype, copy=False)

    def tolist(self) -> list[int]:
        return self.read(0, len(self)).tolist()


class Documents(FlatTokens):
    """Tokens of documents, one after the other: `sizes`, integers (N,).

    row_length: the length of all documents where they are rows of a preshuffled set, as Pythia's
    2,049, which are read in the order of the file; else None.
    """

    def __init__(
        self, parts: Sequence[Part], sizes: np.ndarray, row_length: int | None = None
    ) -> None:
        super().__init__(parts)
        self.sizes, self.row_length = sizes, row_length


def place_of(tokens: Any, position: int) -> str:
    """The file and offset of an id, for errors; its position where `tokens` are in memory."""
    if not isinstance(tokens, FlatTokens):
        return f"token {position:,}"
    path, offset = tokens.where(position)
    return f"{path}: offset {offset:,}"


def is_broken(values: np.ndarray) -> np.ndarray:
    """bool: True where a float is no whole number."""
    with np.errstate(all="ignore"):  # a signalling NaN warns
        return ~(np.isfinite(values) & (np.floor(values) == values) & (abs(values) < 2.0**53))


def to_ids(values: np.ndarray) -> np.ndarray:
    """int32 where every value of the type fits, else int64: a broken id must not wrap into a good
    one before it is checked. Floats must be whole numbers."""
    if values.dtype.kind == "f":
        broken = is_broken(values)
        if broken.any():
            raise DataError(
                f"tokens are {values.dtype}, and one of them is "
                f"{values[broken].flat[0]}: no whole number"
            )
        return values.astype(np.int64)
    small = values.dtype.itemsize < 4 or values.dtype.newbyteorder("=") == np.int32
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        values = np.minimum(values, np.uint64(2**63 - 1))
    return values.astype(np.int32 if small else np.int64)


def check_ids(ids: np.ndarray, vocab_size: int, place: Callable[..., str]) -> None:
    """DataError for the first of `ids`, as to_ids gives them, that lies outside [0, vocab_size);
    place(*index) says where that is."""
    # One pass: as unsigned numbers, negative ids lie above every vocabulary.
    wrong = ids.view(np.uint32 if ids.dtype == np.int32 else np.uint64) >= vocab_size
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise DataError(
            f"{place(*index)}: id {int(ids[index])} is outside the vocabulary of {vocab_size}"
        )
