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
import io
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from needle.data.text import warn
from needle.data.tokens import DataError, Part
from needle.files import regular, state_of

BLOCK = 1 << 26  # bytes that one thread hashes at a time
LARGE = 1 << 32  # bytes that take so long that a line says so
# The clock of a file system may stand still for so many nanoseconds: a second write changes no
# state, and a hash that was made within them is not kept.
SETTLED = 2_000_000_000
Piece = tuple[Path, int, int]


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
    """$NEEDLE_CACHE, else $XDG_CACHE_HOME/needle, else ~/.cache/needle."""
    own = os.environ.get("NEEDLE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "needle"


def content_hash(stretches: Sequence[Stretch | Part]) -> str:
    """The hash of the bytes one after another, however many files hold them. DataError where a
    file changes meanwhile."""
    states = [stretch.state for stretch in stretches]
    places = [[str(s.path.absolute()), s.offset, s.end] for s in stretches]
    key = hashlib.sha256(json.dumps([platform.node(), places]).encode()).hexdigest()
    with _record(cache_dir() / "hashes" / f"{key[:32]}.json") as record:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            kept = json.loads(record.read())
            if kept["states"] == states:
                return kept["hash"]
        settled = all(time.time_ns() - state[-1] > SETTLED for state in states)
        found = hash_bytes(stretches)
        check_unchanged(stretches)
        if settled:
            with contextlib.suppress(OSError):  # what is not kept is made again
                record.truncate(0)
                kept = {"places": places, "states": states, "hash": found}
                record.write(json.dumps(kept).encode())
    return found


def _record(path: Path) -> BinaryIO:
    """The file that keeps a hash. It is locked: where several processes want the hash, one reads
    the data. In memory where the cache cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = open(path, "ab+", buffering=0, opener=regular)
    except OSError as error:
        warn(
            f"{path}: {error.strerror}: the data are read at each start to hash them; set "
            "NEEDLE_CACHE to a folder that can be written"
        )
        return io.BytesIO()
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(record, fcntl.LOCK_EX)
    record.seek(0)
    return record


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


def _blocks(stretches: Sequence[Stretch | Part]) -> Iterator[list[Piece]]:
    """The pieces of files that make each BLOCK."""
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


def _hash_block(block: list[Piece]) -> bytes:
    digest = hashlib.sha256()
    for path, start, end in block:
        try:
            with open(path, "rb", buffering=0, opener=regular) as file:
                file.seek(start)
                while data := file.read(min(end - start, 1 << 20)):
                    digest.update(data)
                    start += len(data)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.digest()
