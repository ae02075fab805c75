"""Recipes of the published Pythias as settings of a run (Biderman et al. 2023, table 6, and the
configurations in EleutherAI/pythia).

A flag overrides each value; `changes` lists the overridden ones for config.json. Every run has the
rest of the recipe: AdamW with betas 0.9 and 0.95 and eps 1e-8, no decay of biases and norms,
Pythia's initialisation, the tanh GELU. The recipe's float16 with loss scaling is not followed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

SEQUENCES = 1024  # a step

# Peak learning rates; other models have that of the 70m.
PEAK_LR = {
    "pythia-160m": 6e-4,
    "pythia-410m": 3e-4,
    "pythia-1b": 3e-4,
    "pythia-1.4b": 2e-4,
    "pythia-2.8b": 1.6e-4,
    "pythia-6.9b": 1.2e-4,
    "pythia-12b": 1.2e-4,
}

_VALUES = {
    "seq_len": 2048,
    "steps": 143_000,
    "warmup": 1_430,
    "weight_decay": 0.1,
    "clip": 1.0,
    "seed": 1234,
}
# `pythia` follows the schedule that GPT-NeoX computed, `pythia-fixed` the one that it announced.
SCHEDULES = {"pythia": "pythia", "pythia-fixed": "cosine"}
NAMES = tuple(SCHEDULES)


def values(recipe: str, model: str) -> dict:
    """Return the settings of a recipe for a model."""
    return {**_VALUES, "schedule": SCHEDULES[recipe], "lr": PEAK_LR.get(model, 1e-3)}


def changes(settings: Any) -> dict[str, dict]:
    """Return where the Settings of a run differ from its recipe: {setting: {"recipe": value, "run":
    value}}."""
    wanted = {**values(settings.recipe, settings.model), "sparse": None}
    wanted["sequences_per_step"] = SEQUENCES
    actual = {**vars(settings), "sequences_per_step": settings.sequences}
    return {
        name: {"recipe": value, "run": actual[name]}
        for name, value in wanted.items()
        if actual[name] != value
    }


# The checkpoints of the suite: step 0 is before the first.
PUBLISHED = "0,1,2,4,...,512,1000,..."


@functools.cache
def keeps(text: str) -> Callable[[int], bool]:
    """Return the test of a step for --keep: numbers, and "..." for those that follow the pattern of
    the numbers before it, up to the number after it. Three numbers of one ratio give powers,
    others of one difference multiples, a single number its own multiples; `log` is 0,1,2,4,...
    ValueError for any other text.

    >>> from needle.training.recipes import keeps
    >>> [step for step in range(3001) if keeps("1,2,4,...,64,1000,...")(step)]
    [1, 2, 4, 8, 16, 32, 64, 1000, 2000, 3000]
    """
    words = ("0,1,2,4,..." if text == "log" else text).replace(" ", "").split(",")
    numbers, before, patterns = set(), [], []
    for at, word in enumerate(words):
        if word == "...":
            last = int(words[at + 1]) if at + 1 < len(words) else math.inf
            patterns.append((*_pattern(before), last))
            before = []
        elif not word.isdecimal() or int(word) <= max(numbers, default=-1):
            raise ValueError(f"{word!r} is no whole number larger than the one before")
        else:
            numbers.add(int(word))
            before = [] if at and words[at - 1] == "..." else [*before, int(word)]

    def kept(step: int) -> bool:
        return step in numbers or any(_follows(step, *pattern) for pattern in patterns)

    return kept


def _pattern(before: list[int]) -> tuple[int, int, int]:
    """Return (first, ratio, difference) of the sequence that goes on: ratio 1 or difference 0."""
    end = before[-3:]
    if len(end) == 3 and end[0] and end[1] % end[0] == 0 and end[1] ** 2 == end[0] * end[2]:
        return end[2], end[1] // end[0], 0
    if len(end) == 1 and end[0] > 0:
        return end[0], 1, end[0]
    if len(end) > 1 and (len(end) == 2 or end[2] - end[1] == end[1] - end[0]):
        return end[-1], 1, end[-1] - end[-2]
    raise ValueError("'...' follows no numbers of one ratio or one difference")


def _follows(step: int, first: int, ratio: int, difference: int, last: float) -> bool:
    if difference:
        return first <= step <= last and (step - first) % difference == 0
    while first < step <= last:
        first *= ratio
    return first == step <= last
