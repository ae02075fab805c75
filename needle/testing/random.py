"""Random bits by Philox 4x32-10 (Salmon et al. 2011), and dropout, from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.testing.case import cases_of, draw, normal

LOW = np.uint64(0xFFFFFFFF)


def counters(low: int, high: int, count: int) -> list[np.ndarray]:
    """The four words of 128 bits from (low, high) on, lowest first."""
    numbers = [(((high << 64) | low) + i) % 2**128 for i in range(count)]
    return [np.array([n >> 32 * k & 0xFFFFFFFF for n in numbers], np.uint64) for k in range(4)]


def philox(state: Any, count: int) -> np.ndarray:
    """The first `count` words, uint32, that are drawn from a state, int64 (3,)."""
    key, low, high = (int(x) % 2**64 for x in state)
    a, b, c, d = counters(low, high, -(-count // 4))
    keys = [key % 2**32, key >> 32]
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        k, l = map(np.uint64, keys)
        a, b, c, d = (q >> np.uint64(32)) ^ b ^ k, q & LOW, (p >> np.uint64(32)) ^ d ^ l, p & LOW
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return np.stack([a, b, c, d], 1).astype(np.uint32).reshape(-1)[:count]


def advanced(state: Any, words: int) -> np.ndarray:
    """The state after so many words."""
    key, low, high = (int(x) % 2**64 for x in state)
    counter = ((high << 64 | low) + -(-words // 4)) % 2**128
    return np.array([key, counter % 2**64, counter >> 64], np.uint64).view(np.int64)


def random_bits(r, state, bits):
    return {"state": advanced(state, bits.size), "bits": philox(state, bits.size).view(np.int32)}


def dropout_fwd(r, state, x, p):
    y = dropout_bwd(r, state, x, p)["dx"]
    return {"state": advanced(state, x.size), "y": y, "drawn": state}


def dropout_bwd(r, drawn, dy, p):
    keeps = philox(drawn, dy.size) >= round(p * 2**32)
    return {"dx": r(dy * keeps / (1 - p))}


# Of a counter whose low half carries into the high one, and of one that starts again at 0.
STATES = {
    "odd": (1, 0, 0),
    "carry": (-(2**62), -2, 5),
    "wrap": (2**63 - 1, -1, -1),
    "next": (0x1234_5678_9ABC_DEF0, 2**63 - 1, 0),
}


def state_of(label: str) -> np.ndarray:
    return np.array(STATES[label], np.int64)


SIZES = {
    "odd": ("odd", 31),
    "carry": ("carry", 257),
    "wrap": ("wrap", 1030),
    "next": ("next", 4096),
    "many": ("carry", 100_003),
    "one": ("odd", 1),
    "none": ("wrap", 0),
}

CASES = [
    *cases_of(
        random_bits, lambda label, n: draw(state=state_of(label), bits=np.zeros(n, np.int64)), SIZES
    ),
    *cases_of(
        dropout_fwd, lambda label, n, p=0.3: draw(state=state_of(label), x=normal(n), p=p), SIZES
    ),
    *cases_of(
        dropout_bwd, lambda label, n, p=0.3: draw(drawn=state_of(label), dy=normal(n), p=p), SIZES
    ),
    *cases_of(
        dropout_fwd,
        lambda p: draw(state=state_of("next"), x=normal(1000), p=p),
        {"all": (0.0,), "few": (1 - 2.0**-20,), "half": (0.5,)},
    ),
]
