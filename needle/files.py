"""Files that survive: read with errors that name them, and replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class FileError(ValueError):
    """A file that cannot be read or written; the message names the file and the problem."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading. An error of the system within the block becomes a FileError."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` when the block ends well and vanishes when it does not:
    temporary file, fsync, rename, fsync of the folder. FileError where it cannot be written."""
    path = Path(path)
    work = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(work, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written: {error.strerror or error}; files "
            "written earlier are as they were"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            work.unlink(missing_ok=True)
