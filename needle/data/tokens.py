"""Token ids in files: memory-mapped parts that read as one flat array.

    FlatTokens = part 0 | part 1 | ...      a part: (file, byte offset, dtype, count)
    Documents  = FlatTokens + the size of each document

Nothing is copied whole: `rows` and slices copy what they return. Before each read the size of the
file is asked for again: touching a page behind the end of a file that has shrunk would end the
process with SIGBUS, so it is a DataError here.

Samples are short and lie anywhere. A touch of a page that is not in memory makes the system read
ahead, up to megabytes, so samples are announced first: that brings in their own pages alone, and
those of a whole batch together.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle.files import not_regular, regular, state_of


class DataError(ValueError):
    """Data that cannot be used; the message names it and says what to do."""


def absent(path: str | os.PathLike, what: str = "file") -> str:
    """Why there is nothing to read at `path`: no such file, or what lies there instead."""
    return not_regular(path) or f"no such {what}"


class Part:
    """`count` ids of `dtype` from byte `offset` of a file, mapped. Raises DataError where the file
    cannot be opened or is too short."""

    def __init__(self, path: Path, offset: int, dtype: np.dtype, count: int) -> None:
        self.path, self.offset, self.dtype, self.count = path, offset, np.dtype(dtype), count
        self.end = offset + count * self.dtype.itemsize
        self._map, self._ids = None, np.empty(0, self.dtype)
        try:
            with open(path, "rb", opener=regular) as file:
                status = os.fstat(file.fileno())
                self.state = state_of(status)
                self._check_size(status.st_size, "is truncated")
                if count:  # an empty map is refused by the system
                    self._map = mmap.mmap(file.fileno(), self.end, access=mmap.ACCESS_READ)
                    self._ids = np.frombuffer(self._map, self.dtype, count, offset)
        except (OSError, OverflowError) as error:
            raise DataError(f"{path}: cannot be mapped: {error}") from error

    def _check_size(self, size: int, problem: str) -> None:
        if size < self.end:
            raise DataError(
                f"{self.path}: {problem}: the file ends at offset {size:,}, its tokens "
                f"at {self.end:,}"
            )

    def announce(self, start: int, stop: int) -> None:
        """The system begins to fetch ids [start, stop), which will be read soon; nobody waits."""
        if start < stop:
            low = self.offset + start * self.dtype.itemsize
            low -= low % mmap.PAGESIZE
            with contextlib.suppress(OSError):  # what is slow then is right nevertheless
                self._map.madvise(
                    mmap.MADV_WILLNEED, low, self.offset + stop * self.dtype.itemsize - low
                )

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of ids [start, stop)."""
        if self._map is not None:
            self._check_size(self._map.size(), "has shrunk since it was opened")  # of the file
            self.announce(start, stop)
        return np.array(self._ids[start:stop])

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
    """The ids of one part or several, one behind the other. Reads like a one-dimensional array:
    len, dtype, shape, slices (copied), integer arrays, np.asarray (all of it, copied)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        dtypes = {part.dtype for part in parts}
        if len(dtypes) != 1:
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

    @property
    def size(self) -> int:
        return len(self)

    def __repr__(self) -> str:
        files = ", ".join(str(part.path) for part in self.parts[:3])
        more = f" and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        return f"{type(self).__name__}({len(self):,} {self.dtype} tokens of {files}{more})"

    def _within(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """(part, start, stop) within each part that ids [start, stop) touch."""
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            part = self.parts[index]
            before = int(self._ends[index]) - part.count
            end = min(stop, int(self._ends[index]))
            if end > start:
                yield part, start - before, end - before
            start, index = end, index + 1

    def announce(self, start: int, stop: int) -> None:
        """As Part.announce."""
        for part, low, high in self._within(start, stop):
            part.announce(low, high)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of ids [start, stop), 0 <= start <= stop <= len."""
        pieces = [part.read(low, high) for part, low, high in self._within(start, stop)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def between(self, start: int, stop: int) -> FlatTokens:
        """The ids [start, stop) as FlatTokens; nothing is read."""
        parts = []
        for part, end in zip(self.parts, self._ends):
            before = int(end) - part.count
            low, high = max(start - before, 0), min(stop - before, part.count)
            if low < high:
                parts.append(
                    Part(part.path, part.offset + low * part.dtype.itemsize, part.dtype, high - low)
                )
        first = self.parts[0]
        return FlatTokens(parts or [Part(first.path, first.offset, first.dtype, 0)])

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(len(starts), length): the ids from each start on."""
        out = np.empty((len(starts), length), self.dtype)
        for start in starts:
            self.announce(int(start), int(start) + length)
        for row, start in zip(out, starts):
            row[:] = self.read(int(start), int(start) + length)
        return out

    def where(self, position: int) -> tuple[Path, int]:
        """(file, byte offset) of an id."""
        index = int(np.searchsorted(self._ends, position, side="right"))
        part = self.parts[index]
        local = position - (int(self._ends[index]) - part.count)
        return part.path, part.offset + local * part.dtype.itemsize

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step > 0:
                return self.read(start, max(start, stop))[::step]
            return np.asarray(self)[index]
        chosen = np.asarray(index)
        if chosen.dtype.kind not in "iu":
            raise IndexError(f"tokens are indexed by integers and slices, not by {chosen.dtype}")
        flat = np.where(chosen < 0, chosen + len(self), chosen).ravel()
        if flat.size and not (0 <= flat.min() and flat.max() < len(self)):
            raise IndexError(f"index {index} is outside {len(self):,} tokens")
        values = self.rows(flat, 1).reshape(chosen.shape)
        return values if chosen.ndim else values[()]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.read(0, len(self)).astype(dtype or self.dtype, copy=False)

    def tolist(self) -> list[int]:
        return self.read(0, len(self)).tolist()


class Documents(FlatTokens):
    """Tokens that are cut into documents, one behind the other: `sizes`, integers (N,).

    row_length: the length of all documents where they are rows of a preshuffled set, as Pythia's
    2,049, which are read in the order of the file; else None.
    """

    def __init__(
        self, parts: Sequence[Part], sizes: np.ndarray, row_length: int | None = None
    ) -> None:
        super().__init__(parts)
        self.sizes, self.row_length = sizes, row_length


def place_of(tokens: Any, position: int) -> str:
    """Where an id of `tokens` stands, for errors: file and offset, if they lie in files."""
    if not isinstance(tokens, FlatTokens):
        return f"token {position:,}"
    path, offset = tokens.where(position)
    return f"{path}: offset {offset:,}"


def is_broken(values: np.ndarray) -> np.ndarray:
    """bool: which of the floats are no whole numbers."""
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
