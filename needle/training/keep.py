"""The steps of --keep: numbers, and the ones that follow their pattern."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container

from needle.command import MOST


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
    numbers, before, kept = set(), [], []
    for at, word in enumerate(words):
        if word == "...":
            after = "".join(words[at + 1 : at + 2])  # which the next round refuses if it is bad
            kept.append(_following(before, int(after) if after.isdecimal() else MOST))
            before = []
        elif not word.isdecimal() or int(word) <= max(numbers, default=-1):
            raise ValueError(f"{word!r} is no whole number larger than the one before")
        else:
            numbers.add(int(word))
            before = [] if at and words[at - 1] == "..." else [*before, int(word)]
    return lambda step: any(step in some for some in (numbers, *kept))


def _following(before: list[int], last: int) -> Container[int]:
    """Return the numbers that go on with the pattern of those before, below the last."""
    end = before[-3:]
    if len(end) == 3 and end[0] and end[1] % end[0] == 0 and end[1] ** 2 == end[0] * end[2]:
        ratio = end[1] // end[0]
        return {power for power in (end[2] * ratio**n for n in range(64)) if power < last}
    end = [0, *end] if len(end) == 1 else end
    differences = {high - low for low, high in zip(end, end[1:])} - {0}
    if len(differences) != 1:
        raise ValueError("'...' follows no numbers of one ratio or one difference")
    return range(end[-1], last, *differences)
