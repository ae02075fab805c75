"""The lines of the diagnosis: a label and a text, which begins with `ok`, `note` or `FAILED` if it
is the result of a check.

Two kinds of lines are for the parent (parts.py) and not shown: what a part tries now, which the
parent names if the part dies or hangs there, and the result of a part as JSON.
"""

from __future__ import annotations

import json
from typing import Any

from needle.files import printable

TRYING, RESULT, FAILED = "... ", "=== ", " FAILED: "
current = "its start"  # what this part tries now


def row(label: str, text: str) -> str:
    return f"{label:<14} {printable(' '.join(text.splitlines()))}"


def failure(label: str, text: str, remedy: str) -> str:
    """Return the line of a failed check. remedy: empty if the text names it."""
    mend = f". To mend it: {remedy}" if remedy else ""
    return row(label, f"{FAILED.strip()} {text.rstrip('.')}{mend}")


def show(label: str, text: str) -> None:
    print(row(label, text), flush=True)


def failed(label: str, text: str, remedy: str = "") -> None:
    print(failure(label, text, remedy), flush=True)


def trying(what: str) -> None:
    global current
    current = what
    print(TRYING + what, flush=True)


def tell(result: Any) -> None:
    print(RESULT + json.dumps(result), flush=True)
