"""Choosing the next token from logits, on the host."""

from __future__ import annotations

import numpy as np


def sample(logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None,
           top_p: float | None = None, random=np.random) -> np.ndarray:
    """logits (B, V) -> ids (B,), one uniform number of `random` a row.

    temperature 0 takes the likeliest token and draws nothing. top_k keeps the k likeliest; top_p
    the fewest whose probabilities sum to p or more (nucleus sampling, Holtzman et al. 2020). Both
    may be given: k first. Bad values raise ValueError that says what is allowed.
    """
    if not (temperature >= 0 and np.isfinite(temperature)):
        raise ValueError(f"temperature must be a number of 0 or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 or more, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
    if not np.isfinite(logits).all():
        raise ValueError("the logits are not finite: the model's weights are broken")
    if temperature == 0:
        return logits.argmax(axis=-1)
    drawn = np.empty(len(logits), np.int64)
    for row, values in enumerate(logits.astype(np.float64)):
        # Likeliest first; the stable sort makes ties fall the same way everywhere.
        order = np.argsort(-values, kind="stable")[:top_k]
        weights = np.exp((values[order] - values[order[0]]) / temperature)
        cumulative = np.cumsum(weights / weights.sum())
        if top_p is not None:
            cumulative = cumulative[: np.searchsorted(cumulative, top_p * (1 - 1e-12)) + 1]
        choice = np.searchsorted(cumulative, random.random_sample() * cumulative[-1], side="right")
        drawn[row] = order[min(choice, len(cumulative) - 1)]
    return drawn
