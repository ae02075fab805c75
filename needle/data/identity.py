"""The identity of data: a SHA-256 of their bytes, which runs, ranks and the cache of text compare.

    up to 8 GiB     all bytes
    above           4,096 blocks of 1 MiB, spread evenly from the first byte to the last

It is the SHA-256 of the SHA-256 of each block, which all cores share; blocks of all bytes have
64 MiB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from needle.data.tokens import map_part

ALL = 1 << 33  # bytes up to which all are hashed
BLOCK = 1 << 26
SAMPLES, SAMPLE = 4096, 1 << 20
SAMPLED = "sampled-"  # before a hash of blocks
Stretch = tuple[Path, int, int]  # a file, the first byte of it, how many


def content_hash(stretches: Sequence[Stretch]) -> str:
    """The hash of the bytes one after the other, however many files hold them. Each file is mapped
    for as long as it is read, since there may be more of them than a process can hold open."""
    ends = np.cumsum([size for _, _, size in stretches])
    total = int(ends[-1])
    if total <= ALL:
        starts, length, kind = range(0, total, BLOCK), BLOCK, ""
    else:
        starts = np.linspace(0, total - SAMPLE, SAMPLES).astype(np.int64).tolist()
        length, kind = SAMPLE, SAMPLED

    def digest(start: int) -> bytes:
        found, stop = hashlib.sha256(), min(start + length, total)
        index = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            end, (path, first, size) = min(stop, int(ends[index])), stretches[index]
            at = first + start - int(ends[index]) + size
            found.update(map_part(path, "u1", at, end - start).ids)
            start, index = end, index + 1
        return found.digest()

    with ThreadPoolExecutor() as pool:
        return kind + hashlib.sha256(b"".join(pool.map(digest, starts))).hexdigest()
