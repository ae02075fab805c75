"""The steps of --keep: numbers, and the ones that follow their pattern."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable


@functools.cache
def keeps(text: str) -> Callable[[int], bool]:
    """Return the test of a step for --keep: numbers, and "..." for those that follow the pattern of
    the numbers before it, up to the number after it. Three numbers of one ratio give powers,
    others of one difference multiples, a single number its own multiples; `log` is 0,1,2,4,...
    ValueError for any other text.

    >>> from needle.training.keep import keeps
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
