"""Hashes of an array's leaves: BLAKE2s-256 of each 1,024 bytes, by hashlib."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from needle.testing.case import cases_of, draw

LEAF = 1024


def leaf_hashes(r: Any, x: np.ndarray, hashes: np.ndarray) -> dict[str, np.ndarray]:
    data = np.asarray(x).astype(np.uint8).tobytes()
    leaves = [data[at : at + LEAF] for at in range(0, len(data), LEAF)]
    found = b"".join(hashlib.blake2s(leaf).digest() for leaf in leaves)
    return {"hashes": np.frombuffer(found, "<i4").reshape(hashes.shape).astype(np.int64)}


CASES = cases_of(
    leaf_hashes,
    lambda n: draw(
        x=lambda rng: rng.integers(0, 256, n), hashes=np.full((-(-n // LEAF), 8), -7, np.int64)
    ),
    [(300_001,), (0,), (1,), (63,), (64,), (65,), (1023,), (1024,), (1025,), (16 * 1024 + 64,)],
)
