"""The command line: types of arguments for argparse, and lines that fit a terminal."""

from __future__ import annotations

import argparse
import functools
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from needle.files import described, named, printable

MOST = 2**63 - 1
COLUMNS = 80  # of a line


def wrapped(text: str, indent: int = 2) -> str:
    """Break lines between words, so that they fit a terminal; a path stays whole, and control
    characters of text from outside are written as escapes. indent: of what follows a break."""
    whole_words = {"break_long_words": False, "break_on_hyphens": False}
    fill = textwrap.TextWrapper(COLUMNS, subsequent_indent=" " * indent, **whole_words).fill
    return "\n".join(map(fill, printable(text).split("\n")))


def told(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of values that `read` takes; its ValueError is the message."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


path = told(named)  # of files and folders


def path_name(text: str) -> str:
    """The type of paths that are kept as they are written, as in config.json."""
    path(text)
    return text


def whole(low: int, high: int = MOST) -> Callable[[str], int]:
    """The type of whole numbers from `low`, 0 or more, to `high`."""

    def parse(text: str) -> int:
        digits = text.replace("_", "")
        value = int(digits) if digits.isdecimal() else -1
        if not low <= value <= high:
            limit = f"of {low} or more" if high == MOST > value else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be a whole number {limit}, not {text!r}")
        return value

    return parse


def number(low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """The type of finite numbers from `low`, or `above` it, to `high`."""
    if above:
        limit = f"above {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
    else:
        limit = f"from {low:g} to {high:g}" if high < math.inf else f"of {low:g} or more"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf or (above and value == low):
            raise argparse.ArgumentTypeError(f"must be a number {limit}, not {text!r}")
        return value

    return parse


def flag_words(name: str, value: object) -> list[str]:
    """Return the words of a flag and its value, which may look like a flag itself."""
    text = str(value)
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def reporting(name: str) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Have a `main` say its errors that users meet in a line, and return the exit code: 1, and 130
    after a Ctrl-C. name: of the command."""

    def decorate(main: Callable[[Any], int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                return main(argv)
            except BrokenPipeError:  # which ends a program, see processes.program
                raise
            except (ValueError, OSError, RuntimeError) as error:
                print(f"{name}: {described(error)}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print(f"{name}: interrupted", file=sys.stderr)
                return 130

        return run

    return decorate


class Parser(argparse.ArgumentParser):
    """A parser whose errors, which quote the command line, can be printed."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Print the default of each flag that has one, except for switches, which are off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, []) or action.default is False:
            return action.help
        return super()._get_help_string(action)
