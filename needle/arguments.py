"""Types of the arguments of the command line, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from needle.files import FileError, named


def path(text: str) -> Path:
    """The type of names of files and folders (needle.files.named)."""
    try:
        return named(text)
    except FileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    """The type of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            limit = f"of {low} or more" if high == 2**63 - 1 else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be a whole number {limit}, not {text!r}")
        return int(text)

    return parse
