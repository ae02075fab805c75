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

import numpy as np

from needle.data.tokens import FlatTokens, Part

ALL = 1 << 33  # bytes up to which all are hashed
BLOCK = 1 << 26
SAMPLES, SAMPLE = 4096, 1 << 20
SAMPLED = "sampled-"  # before a hash of blocks


def content_hash(parts: Sequence[Part]) -> str:
    """The hash of the bytes of mapped parts, one after the other, however many files hold them."""
    content = FlatTokens([part._replace(ids=part.ids.view(np.uint8)) for part in parts])
    if len(content) <= ALL:
        starts, length, kind = range(0, len(content), BLOCK), BLOCK, ""
    else:
        starts = np.linspace(0, len(content) - SAMPLE, SAMPLES).astype(np.int64).tolist()
        length, kind = SAMPLE, SAMPLED

    def digest(start: int) -> bytes:
        found = hashlib.sha256()
        for part in content.within(start, min(start + length, len(content))):
            found.update(part.ids)
        return found.digest()

    with ThreadPoolExecutor() as pool:
        return kind + hashlib.sha256(b"".join(pool.map(digest, starts))).hexdigest()
