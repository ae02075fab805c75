"""Guarded buffer: all arrays of a job in one block of memory, with guard bands between them.

The pool lays the buffer out in shared memory and fills it: a pattern ("poison") in the bands and
outputs, the inputs in their places. The process of the kernel copies it to the device, runs, copies
it back and compares: a changed byte of a band was written out of bounds, and so was a changed
`const` input. An unchanged element of an output was not written.

The pattern is 16-bit units above 0xFF80: NaN to float formats of up to 32 bits, negative integers.
It is random and continues from band to band, so copying band to band is detected. An element may
equal the poison by chance: a second run with the complement tells.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ALIGN = 256  # as cudaMalloc aligns
GUARD = 64 << 10  # bytes of a band, at least
TILE = 131_071  # 16-bit units of the pattern: a prime, so that no stride meets its period
BITS = {"bfloat16": "uint16"}  # NumPy has no bfloat16


@dataclass(frozen=True)
class Place:
    """An array of the buffer. role: "in" (may change), "const" (must not change), "inout" (is
    returned), "out" (poisoned, is returned). start: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    start: int

    @property
    def itemsize(self) -> int:
        return np.dtype(BITS.get(self.dtype, self.dtype)).itemsize

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object))

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    @property
    def returned(self) -> bool:
        return self.role in ("out", "inout")

    def bytes_of(self, memory: np.ndarray) -> np.ndarray:
        """Return a view (nbytes,) uint8."""
        return memory[self.start : self.stop]

    def array_of(self, memory: np.ndarray) -> np.ndarray:
        """Return a view of the array; bfloat16 as uint16."""
        return self.bytes_of(memory).view(BITS.get(self.dtype, self.dtype)).reshape(self.shape)


class SharedBuffer:
    """Memory of a sealed memfd, which the other process can neither shrink nor grow."""

    def __init__(self, size: int) -> None:
        self.file = os.memfd_create("needle-kernels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals)
            self.memory = np.frombuffer(mmap.mmap(self.file, size), np.uint8)
        except BaseException:
            os.close(self.file)
            raise

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.file)


def lay_out(arrays: Iterable[tuple[str, str, tuple[int, ...], str]]) -> tuple[list[Place], int]:
    """Return the places of arrays (name, dtype, shape, role), and the bytes of the buffer."""
    places, end = [], 0
    for name, dtype, shape, role in arrays:
        places.append(Place(name, dtype, tuple(shape), role, -(-(end + GUARD) // ALIGN) * ALIGN))
        end = places[-1].stop
    return places, -(-(end + GUARD) // ALIGN) * ALIGN


def bands(places: Sequence[Place], size: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the guard bands: one more than there are arrays."""
    return list(
        zip([0, *(place.stop for place in places)], [*(place.start for place in places), size])
    )


def poison(memory: np.ndarray, places: Sequence[Place]) -> None:
    """Fill the bands and outputs of a buffer ((bytes,) uint8) with the pattern."""
    units = np.random.default_rng().integers(0xFF81, 0x10000, TILE, dtype=np.uint16)
    tile = units.view(np.uint8)
    spans = bands(places, memory.size)
    spans += [(place.start, place.stop) for place in places if place.role == "out"]
    for start, stop in spans:
        at = start
        while at < stop:
            begin = at % tile.size  # even where `at` is: a unit stays on a multiple of 2
            count = min(tile.size - begin, stop - at)
            memory[at : at + count] = tile[begin : begin + count]
            at += count


def complement(memory: np.ndarray, places: Sequence[Place]) -> np.ndarray:
    """Return a copy whose outputs hold another poison, different in every byte."""
    other = memory.copy()
    for place in places:
        if place.role == "out":
            np.invert(place.bytes_of(other), out=place.bytes_of(other))
    return other


# ---- after a run ---------------------------------------------------------------------------------


def written_outside(before: np.ndarray, after: np.ndarray, places: Sequence[Place]) -> str | None:
    """Describe writes beyond an array or into a const one; None if there are none."""
    found = []
    for k, (start, stop) in enumerate(bands(places, before.size)):
        changed = np.flatnonzero(before[start:stop] != after[start:stop])
        if not changed.size:
            continue
        # A band lies after one array and before another: a change belongs to the nearer one.
        middle = (stop - start) // 2 if 0 < k < len(places) else (stop - start) * (k > 0)
        beyond, ahead = changed[changed < middle], changed[changed >= middle]
        if beyond.size:
            place, distance = places[k - 1], int(beyond[0])
            found.append(
                f"{place.name}: {beyond.size:,} bytes were written after its end, the first "
                f"{distance:,} bytes after it (element {place.size + distance // place.itemsize:,} "
                f"of {place.size:,})"
            )
        if ahead.size:
            place, distance = places[k], stop - start - int(ahead[-1])
            found.append(
                f"{place.name}: {ahead.size:,} bytes were written before its start, the nearest "
                f"{distance:,} bytes before it (element {-distance // place.itemsize})"
            )
    for place in places:
        if place.role != "const":
            continue
        changed = np.flatnonzero(~_equal(place, before, after))
        if changed.size:
            found.append(
                f"{place.name}: the kernel takes it as const, and {changed.size:,} of "
                f"{place.size:,} elements were changed, the first {_index(place, changed[0])}"
            )
    return "; ".join(found) or None


def suspects(
    before: np.ndarray, after: np.ndarray, places: Sequence[Place]
) -> dict[int, np.ndarray]:
    """Return {number of the output: flat indices of elements that still hold the poison}."""
    found = {}
    for number, place in enumerate(places):
        if place.role == "out":
            same = np.flatnonzero(_equal(place, before, after))
            if same.size:
                found[number] = same
    return found


def unwritten(
    found: dict[int, np.ndarray], again: dict[int, np.ndarray], places: Sequence[Place]
) -> str | None:
    """Describe the elements that a kernel left out, from the suspects of two runs with different
    poison; None if there are none."""
    named = []
    for number, first in found.items():
        both = np.intersect1d(first, again.get(number, first[:0]), assume_unique=True)
        if both.size:
            place = places[number]
            named.append(
                f"{place.name}: {both.size:,} of {place.size:,} elements were not written, the "
                f"first {_index(place, both[0])}"
            )
    return "; ".join(named) or None


def _equal(place: Place, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return (elements,) bool: equal bits."""
    word = f"u{min(place.itemsize, 8)}"
    a, b = (place.bytes_of(memory).view(word) for memory in (before, after))
    return (a == b).reshape(place.size, -1).all(axis=1) if place.itemsize > 8 else a == b


def _index(place: Place, flat: int) -> str:
    index = tuple(int(i) for i in np.unravel_index(int(flat), place.shape or (1,)))
    return f"at [{', '.join(map(str, index))}]"
