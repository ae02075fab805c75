"""Guarded buffer: all arrays of a launch in one block of memory, each between two guard bands.

The bands and the outputs are filled with a random pattern before each launch. A byte of a band that
has changed was written out of bounds, and so was a changed `const` input. An element of an output
that has not changed was not written.

The pattern is 16-bit units from 0xFF81 to 0xFFFE: NaN to float formats of up to 32 bits, and
negative integers of few values. No calculation gives these NaNs, so an unchanged float was left
out. It continues from band to band, so that copying one band to another changes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGN = 256  # as cudaMalloc aligns
GUARD = 64 << 10  # bytes of a band, at least, on each side of an array
TILE = 131_071  # 16-bit units of the pattern: a prime, so that no stride meets its period
CANONICAL = 0xFFC0  # the negative NaN of bfloat16 that a calculation may give


@dataclass
class Array:
    """An array of the buffer. role: "in" (may change), "const" (must not change), "inout" (is
    returned), "out" (filled with the pattern, is returned). elements: their bytes, None of an
    "out". start: in bytes."""

    name: str
    role: str
    dtype: str
    shape: Sequence[int]
    elements: Any
    start: int

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size * self.itemsize

    @property
    def end(self) -> int:
        """Return where the band behind it ends."""
        return -(-(self.stop + GUARD) // ALIGN) * ALIGN

    @property
    def is_returned(self) -> bool:
        return self.role in ("out", "inout")

    def bytes_of(self, memory: np.ndarray) -> np.ndarray:
        """Return a view of its bytes."""
        return memory[self.start : self.stop]

    def count(self, chosen: np.ndarray) -> str:
        """Return "2 of 6 elements" for (elements,) bool, and where the first of them is."""
        flat = np.flatnonzero(chosen)
        index = ", ".join(str(int(i)) for i in np.unravel_index(flat[0], self.shape or (1,)))
        return f"{flat.size:,} of {self.size:,} elements (the first at [{index}])"


def fill(memory: np.ndarray) -> None:
    """Fill a buffer ((bytes,) uint8) with a new pattern."""
    units = np.random.default_rng().integers(0xFF81, 0xFFFF, TILE, dtype=np.uint16)
    units[units == CANONICAL] += 1
    tile = units.view(np.uint8)
    for at in range(0, memory.size, tile.size):
        part = memory[at : at + tile.size]
        part[:] = tile[: part.size]


def compare(before: np.ndarray, after: np.ndarray, arrays: Sequence[Array]) -> tuple[str, str]:
    """Describe writes beyond an array or into a const one, and the elements of outputs that a
    kernel left out; "" if there are none. Small integers may equal the pattern by chance: only a
    comparison finds those."""
    outside, missing = [], []
    for array in arrays:
        item = array.itemsize
        for side, start, stop, nearest in (
            ("before its start", array.start - GUARD, array.start, -1),
            ("after its end", array.stop, array.end, 0),
        ):
            changed = np.flatnonzero(before[start:stop] != after[start:stop])
            if changed.size:
                at = start + int(changed[nearest]) - array.start
                outside.append(
                    f"{array.name}: {changed.size:,} bytes were written {side}, the nearest at "
                    f"byte {at:,} of it (element {at // item:,} of {array.size:,})"
                )
        if array.role not in ("const", "out"):
            continue
        ours, theirs = (array.bytes_of(memory).view(f"u{item}") for memory in (before, after))
        same = ours == theirs
        if array.role == "const" and not same.all():
            outside.append(f"{array.name}: it is const, and {array.count(~same)} were changed")
        if array.role == "out" and (item == 8 or "float" in array.dtype) and same.any():
            missing.append(f"{array.name}: {array.count(same)} were not written")
    return "; ".join(outside), "; ".join(missing)
