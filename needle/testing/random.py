"""Random bits by Philox 4x32-10 (Salmon et al. 2011), and dropout, from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.testing.case import cases_of, draw, normal

LOW = np.uint64(0xFFFFFFFF)


def counters(low: int, high: int, count: int) -> list[np.ndarray]:
    """The four words of 128 bits from (low, high) on, lowest first."""
    lows = np.uint64(low) + np.arange(count, dtype=np.uint64)
    highs = np.uint64(high) + (lows < low)
    return [x >> shift & LOW for x in (lows, highs) for shift in np.uint64([0, 32])]


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


def random_tokens(r, state, logits, temperature, tokens, positions):
    words = philox(state, 4 * len(logits)).astype(np.float64)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        weights = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    found = []
    for row, (high, low) in zip(weights, words.reshape(-1, 4)[:, :2]):
        u = (high // 32 * 2**26 + low // 64) / 2**53
        found.append((np.cumsum(row) > u * row.sum()).argmax() if np.isfinite(row).all() else -1)
    return {
        "state": advanced(state, 4 * len(logits)),
        "tokens": np.array(found, np.int64),
        "positions": positions + 1,
    }


def token_inputs(b, v, temperature=1.0, bad=(), masked=()):
    """bad: values at the middle of the rows 0, 1 ...; masked: columns of -inf."""

    def inputs(rng):
        logits = rng.standard_normal((b, v)) * 2
        logits[:, list(masked)] = -np.inf
        for row, value in enumerate(bad):
            logits[row, v // 2 :: v] = value
        return {
            "state": state_of("odd"),
            "logits": logits,
            "temperature": temperature,
            "tokens": np.full(b, 7),
            "positions": np.arange(b),
        }

    return inputs


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
    *cases_of(
        random_tokens,
        token_inputs,
        {
            "odd": (31, 257),
            "one": (1, 1),
            "many": (3, 50304),
            "tile": (2, 1024),
            "few": (5, 31, 3.0),
            "cold": (7, 300, 0.05),
            "coldest": (4, 300, 5e-324),
            "broken": (4, 70, 1.0, (np.nan, np.inf, -np.inf)),
            "masked": (6, 1100, 1.0, (), range(40, 1100)),
            "none": (0, 7),
        },
    ),
]
