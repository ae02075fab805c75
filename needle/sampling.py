"""Choosing the next token from logits, on the host."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

# top_p first looks among this many of the likeliest tokens, which nearly always suffice.
NUCLEUS = 1024
BROKEN = (
    "the logits of a row are not finite: NaN or inf, as of broken weights, or -inf for every token"
)


def check_sampling(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
) -> None:
    """ValueError that says what is allowed."""
    if not (isinstance(temperature, Real) and 0 <= temperature < math.inf):
        raise ValueError(f"temperature must be a number of 0 or more, not {temperature!r}")
    if top_k is not None and not (isinstance(top_k, Integral) and top_k >= 1):
        raise ValueError(f"top_k must be a whole number of 1 or more, not {top_k!r}")
    if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p!r}")
    if not (isinstance(repetition_penalty, Real) and 0 < repetition_penalty < math.inf):
        raise ValueError(f"repetition_penalty must be a number above 0, not {repetition_penalty!r}")
    if seed is not None and not (isinstance(seed, Integral) and 0 <= seed < 1 << 32):
        raise ValueError(f"seed must be a whole number from 0 to 2^32 - 1, not {seed!r}")


def penalized(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """logits (B, V) with those of tokens that a row has `seen` (B, V) divided by `penalty` where
    they are positive, multiplied where they are negative (Keskar et al. 2019, in the form of
    `transformers`)."""
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    random: Any = np.random,
) -> np.ndarray:
    """logits (B, V) -> ids (B,), one uniform number of `random` a row.

    temperature 0 takes the likeliest token, the first of equals, and draws nothing. top_k keeps
    the k likeliest; top_p the fewest whose probabilities sum to p or more (nucleus sampling,
    Holtzman et al. 2020). Both may be given: k first. A token whose logit is -inf is never taken.
    ValueError for other settings, and for a row with NaN or inf, or of -inf alone.

    >>> print(ndl.sampling.sample(np.array([[0.0, 2.0, 1.0]]), temperature=0))
    [1]
    """
    check_sampling(temperature, top_k, top_p)
    if not np.isfinite(logits.max(axis=-1)).all():
        raise ValueError(BROKEN)
    if temperature == 0:
        return logits.argmax(axis=-1)
    return np.array([_draw(row, temperature, top_k, top_p, random) for row in logits], np.int64)


def _draw(
    values: np.ndarray, temperature: float, top_k: int | None, top_p: float | None, random
) -> int:
    order = np.arange(len(values)) if top_k is None else likeliest(values, top_k)
    scaled = values[order].astype(np.float64)
    with np.errstate(over="ignore"):  # of a small temperature: -inf, and the weight 0
        scaled = (scaled - scaled.max()) / temperature
    weights = np.exp(scaled)
    if top_p is not None:
        enough = top_p * weights.sum() * (1 - 1e-12)
        for count in (NUCLEUS, len(order)):
            kept = likeliest(scaled, count)
            cumulative = np.cumsum(weights[kept])
            if cumulative[-1] >= enough:
                break
        kept = kept[: np.searchsorted(cumulative, enough) + 1]
        order, weights = order[kept], weights[kept]
    cumulative = np.cumsum(weights)
    choice = np.searchsorted(cumulative, random.random_sample() * cumulative[-1], side="right")
    return int(order[min(choice, len(order) - 1)])


def likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest of values (V,), largest first; of equals the first ones, so
    that ties fall the same way everywhere."""
    least = np.partition(values, -count)[-count] if count < len(values) else -math.inf
    found = np.flatnonzero(values >= least)
    return found[np.argsort(-values[found], kind="stable")][:count]
