"""The arena of a job: all its arrays in one piece of memory, with guard bands between them.

The pool lays it out and fills it in shared memory: a pattern in the bands and in the outputs
(poison), the inputs in their places. The process of the kernel copies it to the device as it is,
runs, copies it back and compares: a byte of a band that changed was written out of bounds, an input
that changed although it is `const` too, and an element of an output that did not was not written.

The pattern is 16-bit units above 0xFF80: NaN to every float format but float64, to which it is
huge; as integers it is negative, so that reading it shows. It is drawn anew for each arena and goes
on from band to band, so that a copy from beyond one array to beyond the next is seen. An element
may hold by its own right what the poison was: then a second run with the complement tells
(`complement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ALIGN = 256  # as cudaMalloc aligns
GUARD = 64 << 10  # bytes of a band, at least
TILE = 131_071  # 16-bit units of the pattern: a prime, so that no stride meets its period
# What NumPy has no name for lies as its bits do.
BITS = {"bfloat16": "uint16"}


@dataclass(frozen=True)
class Place:
    """An array of the arena. `role`: "in" (may change, is not looked at), "const" (must not
    change), "inout" (comes back), "out" (poisoned, comes back). `start` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    start: int

    @property
    def itemsize(self) -> int:
        return np.dtype(BITS.get(self.dtype, self.dtype)).itemsize

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def bytes_of(self, memory: np.ndarray) -> np.ndarray:
        """(nbytes,) uint8, a view."""
        return memory[self.start : self.stop]

    def array_of(self, memory: np.ndarray) -> np.ndarray:
        """The array, a view; bfloat16 as uint16."""
        return self.bytes_of(memory).view(BITS.get(self.dtype, self.dtype)).reshape(self.shape)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Place:
        return Place(**{**fields, "shape": tuple(fields["shape"])})


def lay_out(arrays: Iterable[tuple[str, str, tuple[int, ...], str]]) -> tuple[list[Place], int]:
    """The places of arrays given as (name, dtype, shape, role), and the bytes of the arena."""
    places, end = [], 0
    for name, dtype, shape, role in arrays:
        start = -(-(end + GUARD) // ALIGN) * ALIGN
        places.append(Place(name, dtype, tuple(shape), role, start))
        end = places[-1].stop
    return places, -(-(end + GUARD) // ALIGN) * ALIGN


def bands(places: Sequence[Place], size: int) -> list[tuple[int, int]]:
    """(start, stop) of the guard bands: one more than there are arrays."""
    return list(
        zip([0, *(place.stop for place in places)], [*(place.start for place in places), size])
    )


def poison(memory: np.ndarray, places: Sequence[Place]) -> None:
    """The pattern, in the bands and in the outputs of an arena ((bytes,) uint8)."""
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
    """A copy of an arena whose outputs hold another poison, different in every byte."""
    other = memory.copy()
    for place in places:
        if place.role == "out":
            np.invert(place.bytes_of(other), out=place.bytes_of(other))
    return other


# ---- what a run left -----------------------------------------------------------------------------


def written_outside(before: np.ndarray, after: np.ndarray, places: Sequence[Place]) -> str | None:
    """What was written that no kernel may write: beyond an array, or into a const one."""
    found = []
    for k, (start, stop) in enumerate(bands(places, before.size)):
        changed = np.flatnonzero(before[start:stop] != after[start:stop])
        if not changed.size:
            continue
        # A band lies behind one array and before another: what changed belongs to the nearer.
        middle = (stop - start) // 2 if 0 < k < len(places) else (stop - start) * (k > 0)
        behind, ahead = changed[changed < middle], changed[changed >= middle]
        if behind.size:
            place = places[k - 1]
            element = place.nbytes // place.itemsize + int(behind[0]) // place.itemsize
            found.append(
                f"{place.name}: {behind.size:,} bytes were written behind its end, the first "
                f"{int(behind[0]):,} bytes behind it (element {element:,} of {_count(place):,})"
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
                f"{_count(place):,} elements were changed, the first {_index(place, changed[0])}"
            )
    return "; ".join(found) or None


def suspects(
    before: np.ndarray, after: np.ndarray, places: Sequence[Place]
) -> dict[int, np.ndarray]:
    """Of each output (by its number) the flat indices of elements that still hold the poison."""
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
    """What a kernel left out: suspects of two runs, with different poison."""
    named = []
    for number, first in found.items():
        both = np.intersect1d(first, again.get(number, first[:0]), assume_unique=True)
        if both.size:
            place = places[number]
            named.append(
                f"{place.name}: {both.size:,} of {_count(place):,} elements were not written, the "
                f"first {_index(place, both[0])}"
            )
    return "; ".join(named) or None


def _equal(place: Place, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """(elements,) bool: the same bits?"""
    word = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(place.itemsize)
    a, b = place.bytes_of(before), place.bytes_of(after)
    if word is None:
        return (a.reshape(-1, place.itemsize) == b.reshape(-1, place.itemsize)).all(axis=1)
    return a.view(word) == b.view(word)


def _count(place: Place) -> int:
    return place.nbytes // place.itemsize


def _index(place: Place, flat: int) -> str:
    index = tuple(int(i) for i in np.unravel_index(int(flat), place.shape or (1,)))
    return f"at [{', '.join(map(str, index))}]"
