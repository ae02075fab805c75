"""Token ids in files: parts of mapped files that read as one flat array, and their hash.

    FlatTokens = part 0 | part 1 | ...      a part: (file, byte offset, ids)
    Documents  = FlatTokens + the size of each document

Nothing is held in memory: the files are mapped, and each read copies the ids that it returns. A
process that reads a mapped file after it has shrunk ends by SIGBUS.

The identity of data, which runs, ranks and the cache of text compare, is a SHA-256 of their bytes:

    up to 8 GiB     all bytes
    above           4,096 blocks of 1 MiB, spread evenly from the first byte to the last

It is the SHA-256 of the SHA-256 of each block, which all cores share; blocks of all bytes have
64 MiB.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from needle.files import FileError, reading

LOOKED_AT = 1 << 22  # ids at a time
ALL = 1 << 33  # bytes up to which all are hashed
BLOCK = 1 << 26
SAMPLES, SAMPLE = 4096, 1 << 20
SAMPLED = "sampled-"  # before a hash of blocks
DataError = FileError  # data that cannot be used; the message names it and says what to do


class Part(NamedTuple):
    """Ids from byte `offset` of a file on; of ids in memory the path is None."""

    path: Path | None
    offset: int
    ids: np.ndarray

    def between(self, start: int, stop: int) -> Part:
        """Ids [start, stop) of these."""
        return Part(self.path, self.offset + start * self.ids.itemsize, self.ids[start:stop])


def map_part(path: Path, dtype: Any, offset: int = 0, count: int | None = None) -> Part:
    """Map `count` ids of `dtype` from byte `offset` of a file, by default all to its end. DataError
    where the file cannot be opened, or ends within an id."""
    dtype = np.dtype(dtype)
    with reading(path) as file:
        if count is None:
            size = os.fstat(file.fileno()).st_size - offset
            count, rest = divmod(size, dtype.itemsize)
            if rest:
                raise DataError(
                    f"{path}: {size:,} bytes are no whole number of {dtype} tokens: the file is "
                    "truncated, or of another format"
                )
        if count == 0:  # which cannot be mapped
            return Part(path, offset, np.empty(0, dtype))
        return Part(path, offset, np.asarray(np.memmap(file, dtype, "r", offset, (count,))))


def spans(ends: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield which of several parts, one after the other, [start, stop) covers, and from where to
    where in each. ends: of the parts."""
    index = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        begin, end = int(ends[index - 1]) if index else 0, min(stop, int(ends[index]))
        yield index, start - begin, end - begin
        start, index = end, index + 1


class FlatTokens:
    """The ids of one part or several, one after the other. Reads like a one-dimensional array:
    len, dtype, shape, slices (copied), integer arrays, np.asarray (all of it, copied)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        if len({part.ids.dtype for part in parts}) != 1:
            listed = ", ".join(f"{part.path}: {part.ids.dtype}" for part in parts)
            raise DataError(f"files of several types do not make one array ({listed})")
        self.parts = list(parts)
        self.dtype = self.parts[0].ids.dtype
        self._ends = np.cumsum([len(part.ids) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __repr__(self) -> str:
        files = ", ".join(str(part.path or "memory") for part in self.parts[:3])
        more = f" and {len(self.parts) - 3} more" if len(self.parts) > 3 else ""
        return f"{type(self).__name__}({len(self):,} {self.dtype} tokens of {files}{more})"

    def within(self, start: int, stop: int) -> list[Part]:
        """The ids [start, stop), 0 <= start <= stop <= len, as parts of the parts."""
        found = spans(self._ends, start, stop)
        return [self.parts[index].between(low, high) for index, low, high in found]

    def between(self, start: int, stop: int) -> FlatTokens:
        """The ids [start, stop) as FlatTokens; nothing is read."""
        return FlatTokens(self.within(start, stop) or [self.parts[0].between(0, 0)])

    def read(self, *stretches: tuple[int, int], vocab_size: int | None = None) -> np.ndarray:
        """A copy of the ids of stretches [start, stop), one after the other. DataError, with file
        and offset, for the first that lies outside [0, vocab_size)."""
        found = [part for one in stretches for part in self.within(*one)]
        ids = np.concatenate([part.ids for part in found]) if found else np.empty(0, self.dtype)
        # As unsigned numbers, negative ids lie above every vocabulary.
        unsigned = ids.view(ids.dtype.str.replace("i", "u"))
        if vocab_size is not None and (unsigned >= vocab_size).any():
            index = int(np.argmax(unsigned >= vocab_size))
            (part,) = FlatTokens(found).within(index, index + 1)
            place = f"token {part.offset // self.dtype.itemsize:,}"
            if part.path is not None:
                place = f"{part.path}: offset {part.offset:,}"
            raise DataError(f"{place}: id {ids[index]} is outside the vocabulary of {vocab_size}")
        return ids

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step > 0:
                return self.read((start, max(start, stop)))[::step]
            return np.asarray(self)[index]
        chosen = np.asarray(index)
        if chosen.dtype.kind not in "iu":
            raise IndexError(f"tokens are indexed by integers and slices, not by {chosen.dtype}")
        places = [range(len(self))[place] for place in chosen.ravel().tolist()]
        return self.read(*[(at, at + 1) for at in places]).reshape(chosen.shape)[()]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.read((0, len(self))).astype(dtype or self.dtype, copy=False)

    def tolist(self) -> list[int]:
        return np.asarray(self).tolist()


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

    @functools.cached_property
    def borders(self) -> np.ndarray:
        """int64 (N + 1,): document i is the ids [borders[i], borders[i + 1])."""
        return np.append(0, np.cumsum(self.sizes, dtype=np.int64))


def borders_of(tokens: FlatTokens, end: int | None) -> np.ndarray:
    """Return the borders of documents, int64 (N + 1,), which are those of Documents, or the places
    behind each id `end` of flat tokens, with both ends of all."""
    if isinstance(tokens, Documents):
        return tokens.borders
    found = [np.array([0, len(tokens)])]
    for start in range(0, len(tokens) if end is not None else 0, LOOKED_AT):
        ids = tokens.read((start, min(start + LOOKED_AT, len(tokens))))
        found.append(np.flatnonzero(ids == end) + start + 1)
    return np.unique(np.concatenate(found))


def to_ids(values: np.ndarray) -> np.ndarray:
    """int32 where every value of the type fits, else int64."""
    return values.astype(np.int32 if np.can_cast(values.dtype, np.int32) else np.int64)


def in_memory(tokens: Any) -> FlatTokens:
    """Integers (N,) as tokens; those that are FlatTokens stay. TypeError for anything else."""
    if isinstance(tokens, FlatTokens):
        return tokens
    ids = np.asarray(tokens.numpy() if hasattr(tokens, "numpy") else tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        found = f"{ids.dtype} of shape {ids.shape}"
        raise TypeError(f"tokens must be integers of one axis (N,), but are {found}")
    return FlatTokens([Part(None, 0, ids)])


def content_hash(stretches: Sequence[tuple[Path, int, int]]) -> str:
    """The hash of the bytes of stretches (file, first byte, how many), one after the other, however
    many files hold them. Each file is mapped for as long as it is read, since there may be more of
    them than a process can hold open."""
    ends = np.cumsum([size for _, _, size in stretches])
    total = int(ends[-1])
    if total <= ALL:
        starts, length, kind = range(0, total, BLOCK), BLOCK, ""
    else:
        starts = np.linspace(0, total - SAMPLE, SAMPLES).astype(np.int64).tolist()
        length, kind = SAMPLE, SAMPLED

    def digest(start: int) -> bytes:
        found = hashlib.sha256()
        for index, low, high in spans(ends, start, min(start + length, total)):
            path, first, _ = stretches[index]
            found.update(map_part(path, "u1", first + low, high - low).ids)
        return found.digest()

    with ThreadPoolExecutor() as pool:
        return kind + hashlib.sha256(b"".join(pool.map(digest, starts))).hexdigest()
