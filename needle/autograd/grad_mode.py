"""Switch recording of the graph on and off in a thread: no_grad() and enable_grad()."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator
from typing import Any, TypeVar

Entered = TypeVar("Entered", bound="_Set")


class _Mode(threading.local):
    enabled = True

    def __init__(self) -> None:
        self.before: list[bool] = []  # outside of each block that was entered


mode = _Mode()


class _Set(ContextDecorator):
    wanted: bool

    def __enter__(self: Entered) -> Entered:
        mode.before.append(mode.enabled)
        mode.enabled = self.wanted
        return self

    def __exit__(self, *exc: object) -> None:
        mode.enabled = mode.before.pop()

    def __call__(self, function: Any) -> Any:
        """Decorate a function; of a generator the body, not what runs between its steps."""
        if not inspect.isgeneratorfunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        def steps(*args: Any, **words: Any) -> Iterator[Any]:
            rest = function(*args, **words)
            while True:
                with self:
                    try:
                        step = next(rest)
                    except StopIteration:
                        return
                yield step

        return steps


class no_grad(_Set):
    """Record no graph inside `with no_grad():`, or in a function decorated with `@no_grad()`:
    results do not require gradients. Blocks nest. Other threads are not affected.

    >>> x = ndl.Tensor([1, 2])
    >>> with ndl.no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """

    wanted = False


class enable_grad(_Set):
    """Record the graph again, inside a no_grad() block."""

    wanted = True


class set_grad_enabled:
    """Record the graph, or none, from here on, or until a `with` block ends."""

    def __init__(self, enabled: bool) -> None:
        self.before, mode.enabled = mode.enabled, enabled

    def __enter__(self) -> set_grad_enabled:
        return self

    def __exit__(self, *exc: object) -> None:
        mode.enabled = self.before


def is_grad_enabled() -> bool:
    """Return False inside `no_grad()`."""
    return mode.enabled
