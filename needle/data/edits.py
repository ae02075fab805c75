"""The file of edits of a training (docs/replay.md): read, checked and returned as JSON values.

The form alone is checked here: needle/data/edited.py finds the places in the data, and the trainer
does the edits of TRAINING.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from needle.data.tokens import DataError
from needle.files import named, read_toml, reading

WITH = ("with", "with_ids", "with_document")
# do -> groups of keys, of each of which one must be given, and keys that may be given.
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
# do.key -> what names its place, of documents or of sequences.
PLACES = {"reorder.where": ("step",), "repeat.to": ("step", "row")}
ANY_PLACE = ("document", "text", "ids", "step", "row")


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
    content = read_toml(path)
    edits = content.pop("edit", [])
    if content or not isinstance(edits, list):
        found = ", ".join(content) or "an edit that is no table"
        raise DataError(f"{path}: must hold tables [[edit]] alone, but holds {found}")
    return check_edits(edits, path.parent, str(path))


def check_edits(
    edits: Iterable[dict[str, Any]], folder: Path, name: str = "edits"
) -> list[dict[str, Any]]:
    """Check edits as read_edits does. folder: of relative paths. name: of the list in errors.
    NumPy's numbers and arrays become those of JSON."""
    plain = json.dumps([*edits], default=lambda value: getattr(value, "tolist", value.__str__)())
    checked = []
    for number, edit in enumerate(json.loads(plain), 1):
        if not isinstance(edit, dict):
            raise DataError(f"{name}: edit {number} is no table: {edit!r:.40}")
        try:
            checked.append(_checked(edit, folder))
        except ValueError as error:
            raise DataError(f"{name}: edit {number}, {error}") from error
    return checked


def _checked(edit: dict[str, Any], folder: Path) -> dict[str, Any]:
    do = edit.get("do")
    if do not in list(FORMS):
        raise ValueError(f"do: must be one of {', '.join(FORMS)}, but is {do!r:.40}")
    groups, others = FORMS[do]
    known = [*(key for group in groups for key in group), *others]
    for key in sorted(edit.keys() - {"do", *known}):
        raise ValueError(f"{key}: no key of {do}, which takes {', '.join(known)}")
    for group in groups:
        if len(edit.keys() & {*group}) != 1:
            one = "is needed" if len(group) == 1 else "exactly one of them is needed"
            raise ValueError(f"{', '.join(group)}: {one} by {do}")
    checked = {key: _value(do, key, value, folder) for key, value in edit.items()}
    if do == "insert":
        checked.setdefault("at", 0)
    elif "fill" in known:
        checked.setdefault("fill", "mask")
    fill, where, to = (checked.get(key) for key in ("fill", "where", "to"))
    if fill == "shift" and "step" in (to if do == "repeat" else where):
        raise ValueError("fill: a sequence has a fixed length: take mask, blank or reserve")
    if do != "reorder" and (fill == "reserve") != ("seed" in edit):
        raise ValueError('seed: goes with fill = "reserve", which needs one')
    if do == "swap" and ("step" in where) != ("step" in to):
        raise ValueError("to: must name a document where `where` does, else a sequence")
    return checked


# ---- values ------------------------------------------------------------------------------------


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_whole, value))


WHOLE = _is_whole, "a whole number from 0 on"
NUMBER = _is_number, "a number from 0 on"
TEXT = (lambda x: isinstance(x, str) and x != ""), "a text that is not empty"
STEPS = (lambda x: _is_list(x) and len(x) == 2 and 1 <= x[0] <= x[1]), "[first, last], from 1 on"
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "do": TEXT,
    "fill": (lambda x: x in list(FILLS), f"one of {', '.join(FILLS)}"),
    "insert.fill": (lambda x: x == "shift", '"shift", or left out: insert writes over a place'),
    "seed": WHOLE,
    "at": WHOLE,
    "with": TEXT,
    "with_ids": (_is_list, "a list of ids"),
    "with_document": WHOLE,
    "steps": STEPS,
    "factor": NUMBER,
    "value": NUMBER,
    "rate.to": (lambda x: _is_number(x) and x <= 1, "a share of the rate, from 0 to 1"),
    "moments.to": (lambda x: x == "zero", '"zero"'),
    "from": TEXT,
    "parts": TEXT,
}


def _value(do: str, key: str, value: Any, folder: Path) -> Any:
    if key in ("where", "to") and f"{do}.{key}" not in VALUES:
        return _place(key, value, PLACES.get(f"{do}.{key}", ANY_PLACE), folder)
    is_good, words = VALUES.get(f"{do}.{key}") or VALUES[key]
    if not is_good(value):
        raise ValueError(f"{key}: must be {words}, but is {value!r:.60}")
    if key == "from":
        value = str((folder / value).resolve())
        if not os.path.exists(value):
            raise ValueError(f"{key}: {value}: no such file or folder")
    return value


def _place(key: str, value: Any, names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """A table that names documents or sequences."""
    if not isinstance(value, dict) or not value or value.keys() - {*names}:
        raise ValueError(f"{key}: must be a table of {', '.join(names)}, but is {value!r:.60}")
    if value.keys() & {"step", "row"} and ("step" not in value or value.keys() - {"step", "row"}):
        raise ValueError(f"{key}: names documents, or a step with its rows: {', '.join(value)}")
    found = {}
    for name, one in value.items():
        where = f"{key}, {name}"
        if name == "text":
            try:
                re.compile(one)
            except (re.error, TypeError) as error:
                raise ValueError(f"{where}: no regular expression: {error}") from error
        elif name == "ids":
            path = folder / str(one)
            where = f"{where}: {path}"
            with reading(path) as file:
                one = [int(n) if n.isdigit() else n.decode("latin1") for n in file.read().split()]
        found[name] = one if name == "text" else _ranges(where, one)
    return found


def _ranges(where: str, value: Any) -> list[list[int]]:
    """Ranges from a number, "first:last", or a list of these."""
    pairs = []
    for one in value if isinstance(value, list) and value else [value]:
        is_range = isinstance(one, str) and re.fullmatch(r"\d{1,10}:\d{1,10}", one)
        pair = [int(n) for n in one.split(":")] if is_range else [one, one]
        if not all(map(_is_whole, pair)) or pair[0] > pair[1]:
            kinds = 'a whole number from 0 on, "first:last" or a list of these'
            raise ValueError(f"{where}: must be {kinds}, but is {one!r:.60}")
        pairs.append(pair)
    return merged(pairs)


def merged(pairs: Iterable[Iterable[int]]) -> list[list[int]]:
    """Sort ranges [first, last] of whole numbers, and join those that touch."""
    found: list[list[int]] = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return found
