"""The identity of data: the SHA-256 of all their bytes, kept beside the states of their files.

    fingerprint of a run    in config.json and each checkpoint: a resumed run reads the same tokens
    ranks of a run          compare it before the first step
    cache of text           is found by it

A state is device, inode, size, and the times of modification and of change in nanoseconds. Hashes
are kept in the folder `hashes` of the cache: files are read again only where a state is another.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from needle.data.text import warn
from needle.data.tokens import DataError, Part
from needle.files import FileError, reading, regular, state_of

BLOCK = 1 << 26  # bytes that one thread hashes at a time
LARGE = 1 << 32  # bytes that take so long that a line says so
# File timestamps have this resolution, in ns; hashes made within it of a write are remade.
SETTLED = 2_000_000_000


class Stretch(NamedTuple):
    """Bytes [offset, end) of a file; Part has the same attributes."""

    path: Path
    offset: int
    end: int
    state: list[int]


def whole(path: Path) -> Stretch:
    status = path.stat()
    return Stretch(path, 0, status.st_size, state_of(status))


def cache_dir() -> Path:
    """$NEEDLE_CACHE, else $XDG_CACHE_HOME/needle, else ~/.cache/needle. FileError for a user
    without a home."""
    own = os.environ.get("NEEDLE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        raise FileError("the cache: this user has no home: set HOME or NEEDLE_CACHE to a folder")
    return Path(base) / "needle"


def remembered(
    path: Path, make: Callable[[], dict[str, Any]], is_current: Callable[[dict], bool]
) -> dict[str, Any]:
    """The JSON object in the file `path`, made and written there where none is current. The file is
    locked meanwhile: of several processes that want the object, one makes it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab+", buffering=0, opener=regular)
    except OSError as error:
        warn(
            f"{path}: {error.strerror}: its content is made again at each start; set NEEDLE_CACHE "
            "to a folder that can be written"
        )
        return make()
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        with contextlib.suppress(ValueError, KeyError, TypeError):  # damaged
            kept = json.loads(file.read())
            if is_current(kept):
                return kept
        made = make()
        with contextlib.suppress(OSError):  # a full disk: it is made again the next time
            file.truncate(0)
            file.write(json.dumps(made).encode())
        return made


def content_hash(stretches: Sequence[Stretch | Part]) -> str:
    """The hash of the bytes one after another, however many files hold them. DataError where a
    file changes meanwhile."""
    states = [stretch.state for stretch in stretches]
    places = [[str(s.path.absolute()), s.offset, s.end] for s in stretches]

    def make() -> dict[str, Any]:
        began = time.time_ns()
        found = hash_bytes(stretches)
        check_unchanged(stretches)
        return {"places": places, "states": states, "began": began, "hash": found}

    def is_current(kept: dict) -> bool:
        settled = all(kept["began"] - state[-1] > SETTLED for state in states)
        return settled and kept["states"] == states

    key = hashlib.sha256(json.dumps([platform.node(), places]).encode()).hexdigest()
    path = cache_dir() / "hashes" / f"{key[:32]}.json"
    return remembered(path, make, is_current)["hash"]


def check_unchanged(stretches: Sequence[Stretch | Part]) -> None:
    """DataError for a file that is no longer in the state in which it was opened."""
    for stretch in stretches:
        try:
            state = state_of(stretch.path.stat())
        except FileNotFoundError:
            state = None
        if state != stretch.state:
            raise DataError(
                f"{stretch.path}: changed while it was read: start again when nothing writes there"
            )


def hash_bytes(stretches: Sequence[Stretch | Part]) -> str:
    """SHA-256 of the SHA-256 of each BLOCK of bytes, which all cores share."""
    size = sum(stretch.end - stretch.offset for stretch in stretches)
    if size >= LARGE:
        print(f"hashing {size:,} bytes of data, and again only when they change", flush=True)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_hash_block, _blocks(stretches))
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _blocks(stretches: Sequence[Stretch | Part]) -> Iterator[list[tuple[Path, int, int]]]:
    """The (path, start, end) of files that make each BLOCK."""
    block, left = [], BLOCK
    for stretch in stretches:
        start = stretch.offset
        while start < stretch.end:
            end = min(start + left, stretch.end)
            block.append((stretch.path, start, end))
            start, left = end, left - (end - start)
            if left == 0:
                yield block
                block, left = [], BLOCK
    if block:
        yield block


def _hash_block(block: list[tuple[Path, int, int]]) -> bytes:
    digest = hashlib.sha256()
    for path, start, end in block:
        with reading(path) as file:
            file.seek(start)
            while data := file.read(min(end - start, 1 << 20)):
                digest.update(data)
                start += len(data)
    return digest.digest()
