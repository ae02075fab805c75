"""Helpers of the programs of tests/ that pytest does not start (soak.py, nth_allocation.py).

They import this before anything that may be missing.
"""

import importlib.util
import sys
from pathlib import Path


class Failure(AssertionError):
    """Something that had been saved is gone, or a run hung, ended otherwise than it should, or went
    another way."""


def need_pytest() -> None:
    """Ends the program with exit code 2 where there is no pytest, which their helpers import."""
    if importlib.util.find_spec("pytest") is None:
        print(
            f"{Path(sys.argv[0]).name}: needs the package pytest: "
            f"{sys.executable} -m pip install pytest",
            file=sys.stderr,
        )
        sys.exit(2)


def first_paragraph(text: str | None) -> str:
    """First paragraph of a docstring, for --help."""
    return (text or "").split("\n\n")[0]
