"""The file of edits of a training: TOML, read, checked and returned as JSON values.

    [[edit]]                                an edit after the other; an empty file changes nothing
    do = "drop"
    where = { document = [17, "20:29"] }    or text, ids; or a step with its rows
    fill = "mask"                           or blank, reserve (with a seed), shift

docs/replay.md describes every key. The form alone is checked here: needle/data/edited.py finds the
places in the data, and the trainer applies the edits of TRAINING.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from needle.data.tokens import DataError
from needle.files import named, reading

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WITH = ("with", "with_ids", "with_document")
# do -> groups of keys, one of each of which must be given, and keys that may be.
FORMS: dict[str, tuple[list[tuple[str, ...]], tuple[str, ...]]] = {
    "drop": ([("where",)], ("fill", "seed")),
    "replace": ([("where",), WITH], ("fill", "seed")),
    "insert": ([("where",), WITH], ("fill", "at")),
    "swap": ([("where",), ("to",)], ("fill", "seed")),
    "repeat": ([("where",), ("to",)], ("fill", "seed")),
    "reorder": ([("where",), ("seed",)], ()),
    "rate": ([("steps",), ("factor", "value", "to")], ()),
    "moments": ([("to", "from")], ("parts",)),
    "weights": ([("from",), ("parts",)], ()),
}
TRAINING = ("rate", "moments", "weights")
FILLS = ("mask", "blank", "reserve", "shift")


def read_edits(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Read and check a file of edits. Numbers of documents, steps and rows become lists of [first,
    last]; the numbers in a file of `ids` are read; paths are relative to the file's folder and
    become absolute; `fill` and `at` are filled in. DataError names file, edit and key.

    >>> _ = (folder / "edits.toml").write_text('''
    ... [[edit]]
    ... do = "drop"
    ... where = { document = [17, "20:29"] }
    ... ''')
    >>> ndl.data.edits.read_edits(folder / "edits.toml")
    [{'do': 'drop', 'where': {'document': [[17, 17], [20, 29]]}, 'fill': 'mask'}]
    """
    path = named(path)
    with reading(path) as file:
        try:
            content = tomllib.load(file)
        except ValueError as error:
            raise DataError(f"{path}: no TOML: {error}") from error
    edits = content.pop("edit", [])
    if content or not isinstance(edits, list) or not all(isinstance(e, dict) for e in edits):
        found = ", ".join(content) or "edit, which is no list of tables"
        raise DataError(f"{path}: must hold tables [[edit]] alone, but holds {found}")
    checked = []
    for number, edit in enumerate(edits, 1):
        try:
            checked.append(_checked(edit, path.parent))
        except ValueError as error:
            raise DataError(f"{path}: edit {number}, {error}") from error
    return checked


def _checked(edit: dict[str, Any], folder: Path) -> dict[str, Any]:
    do = edit.get("do")
    if do not in list(FORMS):
        raise ValueError(f"do: must be one of {', '.join(FORMS)}, but is {do!r:.40}")
    groups, others = FORMS[do]
    known = ["do", *(key for group in groups for key in group), *others]
    checked: dict[str, Any] = {"do": do}
    for group in groups:
        if sum(key in edit for key in group) != 1:
            one = "must be given" if len(group) == 1 else "exactly one of these must be given"
            raise ValueError(f"{', '.join(group)}: {one} to {do}")
    for key, value in edit.items():
        if key not in known:
            raise ValueError(f"{key}: no key of {do}, which takes {', '.join(known[1:])}")
        if key != "do":
            try:
                checked[key] = (CHECKS.get(f"{do}.{key}") or CHECKS[key])(value, folder)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
    _check_together(checked)
    if do == "insert":
        return {**checked, "at": checked.get("at", 0)}
    return {**checked, "fill": checked.get("fill", "mask")} if "fill" in known else checked


def _check_together(edit: dict[str, Any]) -> None:
    """ValueError for keys that contradict each other."""
    do, fill, where, to = (edit.get(key) for key in ("do", "fill", "where", "to"))
    if do == "insert" and fill not in (None, "shift"):
        raise ValueError('fill: of insert is "shift", or is left out to write over what is there')
    if fill == "shift" and (do == "repeat" or "step" in where):
        raise ValueError(
            "fill: a sequence has a fixed length, in which nothing shifts: take mask, blank or "
            "reserve, or name a document"
        )
    if do != "reorder" and (fill == "reserve") != ("seed" in edit):
        raise ValueError('seed: belongs to fill = "reserve", which needs one')
    if do == "reorder" and [*where] != ["step"]:
        raise ValueError("where: of reorder is steps alone, whose rows change places")
    if do == "repeat" and "step" not in to:
        raise ValueError("to: of repeat is a step and a row")
    if do == "swap" and ("step" in where) != ("step" in to):
        raise ValueError("to: must name a document where `where` does, else a sequence")


# ---- values ------------------------------------------------------------------------------------


def merged(pairs: Iterable[Iterable[int]]) -> list[list[int]]:
    """Ranges [first, last] of whole numbers, sorted, as few as hold the same numbers."""
    found: list[list[int]] = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return found


def _ranges(value: Any) -> list[list[int]]:
    """Ranges from a number, "first:last", or a list of these."""
    pairs = []
    for one in value if isinstance(value, list) else [value]:
        match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", one) if isinstance(one, str) else None
        pair = [int(match[1]), int(match[2])] if match else [one, one]
        if not all(type(n) is int for n in pair) or not 0 <= pair[0] <= pair[1]:
            raise ValueError(
                f'must be a number from 0 on, "first:last" or a list of these, but is {one!r:.40}'
            )
        pairs.append(pair)
    if not pairs:
        raise ValueError("is an empty list: name a number")
    return merged(pairs)


def _numbers_in(value: Any, folder: Path) -> list[list[int]]:
    """The numbers in a file, one a line, as ranges."""
    path = Path(_existing(value, folder))
    with reading(path) as file:
        lines = file.read().splitlines()
    try:
        numbers = [int(line) for line in lines if line.strip()]
        return _ranges(numbers)
    except ValueError as error:
        raise ValueError(f"{path}: must hold a number of a document a line: {error}") from error


def _pattern(value: Any, folder: Path) -> str:
    try:
        re.compile(_text(value, folder))
    except re.error as error:
        raise ValueError(f"{value!r:.60} is no regular expression: {error}") from error
    return value


def _place(value: Any, folder: Path) -> dict[str, Any]:
    """A table that names documents or sequences."""
    readers = {"text": _pattern, "ids": _numbers_in}
    whole = ("document", "step", "row")
    if not isinstance(value, dict) or not value:
        raise ValueError("must be a table, as { document = 17 } or { step = 120, row = 3 }")
    found = {}
    for key, one in value.items():
        if key not in (*whole, *readers):
            raise ValueError(f"{key}: no key of a place, which has {', '.join((*whole, *readers))}")
        try:
            found[key] = _ranges(one) if key in whole else readers[key](one, folder)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    if "row" in found and "step" not in found:
        raise ValueError("row: is a sequence of a step: name the step too")
    if "step" in found and found.keys() - {"step", "row"}:
        raise ValueError("names documents and sequences: take one of them")
    return found


def _text(value: Any, folder: Path) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text that is not empty, but is {value!r:.40}")
    return value


def _existing(value: Any, folder: Path) -> str:
    path = (folder / named(_text(value, folder))).resolve()
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    return str(path)


def _one_of(*names: str) -> Callable[[Any, Path], str]:
    def check(value: Any, folder: Path) -> str:
        if value not in list(names):
            raise ValueError(f"must be {' or '.join(map(repr, names))}, but is {value!r:.40}")
        return value

    return check


def _whole(value: Any, folder: Path) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"must be a whole number from 0 to 2^31 - 1, but is {value!r:.40}")
    return value


def _number(most: float) -> Callable[[Any, Path], float]:
    def check(value: Any, folder: Path) -> float:
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise ValueError(f"must be a number from 0 to {most:g}, but is {value!r:.40}")
        return float(value)

    return check


def _ids(value: Any, folder: Path) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of ids that is not empty")
    return [_whole(one, folder) for one in value]


def _steps(value: Any, folder: Path) -> list[int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be [first, last], the steps from 1 on")
    first, last = (_whole(one, folder) for one in value)
    if not 1 <= first <= last:
        raise ValueError(f"must be [first, last], the steps from 1 on, but is {value}")
    return [first, last]


CHECKS: dict[str, Callable[[Any, Path], Any]] = {
    "where": _place,
    "to": _place,
    "fill": _one_of(*FILLS),
    "seed": _whole,
    "at": _whole,
    "with": _text,
    "with_ids": _ids,
    "with_document": _whole,
    "steps": _steps,
    "factor": _number(1e6),
    "value": _number(1e6),
    "rate.to": _number(1),
    "moments.to": _one_of("zero"),
    "from": _existing,
    "parts": _text,
}
