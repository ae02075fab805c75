"""Which files a path names, and what each holds by its first bytes.

Names decide only what bytes cannot: flat tokens (.bin), and .npy and JSON lines (.jsonl, .ndjson)
whose beginning is damaged.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from needle.data.tokens import DataError
from needle.files import MissingFileError, named, reading

TAKES = (
    "data are text, JSON lines, a folder of either, Megatron's .bin/.idx, nanoGPT's train.bin, or "
    ".npy"
)
NPY, FLAT, LINES, JSON, TEXT = ".npy", "flat uint16", "JSON lines", "JSON", "text"
# gzip, or a frame of Zstandard, or one that it skips.
PACKED = re.compile(rb"(\x1f\x8b)|\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
SHARDS = (20240520, 20240801)  # of llm.c
# The first bytes of tables, and what of the package `datasets` reads them.
TABLES = {
    b"\xff\xff\xff\xff": "load_from_disk(FOLDER)",
    b"ARROW1\0\0": 'load_dataset("arrow", data_files=FILES)["train"]',
    b"PAR1\x15": 'load_dataset("parquet", data_files=FILES)["train"]',
}
NAMED_LINES = re.compile(r"\.(jsonl|ndjson)(\.gz|\.zst)?$", re.IGNORECASE)
HEAD = 1 << 20  # bytes in which the first values of JSON are looked for


class TextFile(NamedTuple):
    """A file of text: LINES, TEXT or JSON, which is read as text."""

    path: Path
    kind: str


# ---- which files -------------------------------------------------------------------------------


def files_at(path: Path) -> list[Path]:
    """The file, the files below the folder, or those that the pattern matches. MissingFileError
    where there are none."""
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = list(walk(path))
    else:
        found = [file for file in map(Path, sorted(glob.glob(str(path)))) if file.is_file()]
    if not found:
        raise MissingFileError(f"{path}: no such file or folder, or an empty one; {TAKES}")
    for file in found:
        named(file)
    return found


def walk(root: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    """Regular files below root, sorted by name, those of a folder before those of the folders in
    it; hidden ones left out. Links are followed. DataError for a link that leads back to a folder
    it lies in, and for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in skipped)
        for path in (Path(folder, name) for name in folders):
            if os.path.islink(path) and any(path.samefile(above) for above in path.parents):
                raise DataError(f"{path}: a circle of links, to a folder it lies in; remove it")
        for path in (Path(folder, name) for name in sorted(files) if name[0] != "."):
            if os.path.isfile(path):
                yield path
            elif not os.path.exists(path):
                raise DataError(f"{path}: a link that leads nowhere, or not to be read; remove it")


# ---- their content -----------------------------------------------------------------------------


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, unpacked where it begins as gzip or Zstandard do. DataError for a file
    that cannot be read, and for one that is damaged or truncated."""
    with reading(path) as file:
        packed = PACKED.match(file.read(4))
        file.seek(0)
        try:
            if packed and packed[1]:
                file = gzip.open(file)
            elif packed:
                zstd = zstd_module(path)
                widest = {zstd.DecompressionParameter.window_log_max: 31}  # of zstd --long=31
                file = zstd.open(file, options=widest)
            yield file
        except Exception as error:  # each library that unpacks has its own
            if isinstance(error, ValueError) or packed is None:
                raise
            raise DataError(
                f"{path}: cannot be unpacked, it is damaged or truncated: {error} (at or after "
                f"offset {file.tell():,} of what it holds)"
            ) from error


def zstd_module(path: Path) -> Any:
    """compression.zstd of Python 3.14, or its backport. DataError where there is neither."""
    try:
        from compression import zstd
    except ImportError:
        try:
            from backports import zstd
        except ImportError as error:
            raise DataError(
                f"{path}: needs Python 3.14 or the package `backports.zstd`: {sys.executable} -m "
                "pip install backports.zstd (or unpack the file)"
            ) from error
    return zstd


def kind_of(path: Path, field: str = "text") -> str:
    """NPY, FLAT, LINES (objects of JSON, one a line), JSON (any other), or TEXT, of which some is
    none. field: of JSON lines, which holds the text. DataError for shards of llm.c and for
    tables."""
    with reading(path) as file:
        head = file.read(8)
    if head.startswith(b"\x93NUMPY") or path.suffix.lower() == ".npy":
        return NPY
    if path.suffix.lower() == ".bin":
        if int.from_bytes(head[:4], "little") in SHARDS:
            raise DataError(
                f"{path}: a shard of llm.c, which needle does not read: its tokens as .npy are "
                "np.save(OUT, np.fromfile(FILE, 'uint16')[512:])"
            )
        return FLAT  # tokens may begin as anything does
    for magic, call in TABLES.items():
        if head.startswith(magic):
            call = call.replace("FOLDER", repr(str(path.parent))).replace("FILES", repr(str(path)))
            raise DataError(
                f"{path}: a table of Arrow or Parquet, which needle does not read: take it out, or "
                f'write JSON lines by the package datasets: {call}.to_json("texts.jsonl")'
            )
    if NAMED_LINES.search(path.name):
        return LINES
    with open_bytes(path) as file:
        start = file.read(64)
        if not start.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[", b"null")):
            return TEXT
        start += file.read(HEAD)
    text = start.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    lines = [line for line in text.split("\n") if line.strip()][:2]
    if any(isinstance(found := json_value(line), dict) and field in found for line in lines):
        return LINES
    if len(lines) == 1 and len(start) > HEAD and f'"{field}":' in text.replace(" ", ""):
        return LINES  # of which the first goes on
    first = json_value(text.lstrip("[ \t\r\n"), more=True)
    has_object = isinstance(first, dict) and first != {}
    return JSON if has_object or isinstance(json_value(text), list) else TEXT


def json_value(text: str, more: bool = False) -> Any:
    """The value of JSON that a text is, or with `more` begins with; None where it is none."""
    try:
        return json.JSONDecoder().raw_decode(text)[0] if more else json.loads(text)
    except (ValueError, RecursionError):
        return None


def text_files(path: Path, field: str = "text") -> list[TextFile]:
    """The files of text at `path`. DataError for a file of JSON that was named itself and is not
    one object a line. Among others such a file is a text."""
    files = [TextFile(file, kind_of(file, field)) for file in files_at(path)]
    if [file.kind for file in files] == [JSON]:
        raise DataError(
            f"{files[0].path}: JSON, but not one object a line with a string `{field}`, as needle "
            "reads it: jq -c '.[]' of an array, or jq -c . of objects, writes lines, and `needle "
            "data prepare --field` names another string"
        )
    return files


def text_kind(files: Sequence[TextFile]) -> str:
    kinds = [file.kind for file in files]
    if {*kinds} == {LINES}:
        return LINES
    count = kinds.count(JSON)
    return f"text, JSON in {count:,} file(s) read as text" if count else "text"
