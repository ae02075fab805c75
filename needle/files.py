"""Files that survive: read with errors that name them, replaced whole or not at all, in folders
that one process at a time works in."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import glob
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def printable(text: str) -> str:
    """Return text from outside (a name, a key, a sample) for a terminal, which would obey its
    escape sequences: control characters other than tabs and line ends are written as \\x1b."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class FileError(ValueError):
    """A file that cannot be read or written; the message names the file and the problem."""

    def __str__(self) -> str:
        return printable(super().__str__())


class MissingFileError(FileError, FileNotFoundError):
    """A file that is not there."""


class BusyError(FileError):
    """A folder that another process works in."""


SHORTEST = 20  # characters of a secret


def named(path: str | os.PathLike) -> Path:
    """The path of this name. FileError for the empty one, which Path takes for the current folder,
    and for one that cannot be printed nor written into a file of text."""
    if not os.fspath(path):
        raise FileError("an empty name ('') of a file or folder: the current folder is '.'")
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise FileError(f"{os.fsencode(path)!r} is a name that is not UTF-8; rename it") from None
    return Path(path)


def similar(path: Path) -> str:
    """Return "; there is ..." of names like that of `path` in its folder, or ""."""
    try:
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), 3)
    except OSError:
        return ""
    return f"; there is {', '.join(str(path.parent / name) for name in near)}" if near else ""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The file, open for reading. An error of the system within the block becomes a FileError."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    with reading(path) as file:
        text = file.read()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file."""
    with reading(path) as file:
        try:
            return tomllib.load(file)
        except ValueError as error:
            raise FileError(f"{path}: no TOML: {error}") from error


def described(error: Exception) -> str:
    """Return an error as a line to print: file and reason for one of the system, else its text."""
    if not isinstance(error, OSError) or error.filename is None:
        return printable(str(error))
    more = "; see to its permissions" if isinstance(error, PermissionError) else ""
    return printable(f"{error.filename}: {error.strerror}{more}")


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """An OSError that says no file, as those of writing do (a full disk), gets this one's name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` when the block ends well and vanishes when it does not:
    temporary file, fsync, rename, fsync of the folder. The temporary file has a name that no other
    writer has, and follows no link. FileError where it cannot be written."""
    path = Path(path)
    work = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(work, "xb") as file:  # O_EXCL follows no link
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


def replace_text(path: Path, text: str) -> None:
    """Write a file of text whole or not at all, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in `folder`: temporary files of `replacing`. The caller alone
    writes there, as by the folder's Lock: another writer at work would lose its file."""
    for left in Path(folder).glob(".?*.tmp"):
        if left.is_symlink() or not left.is_dir():
            left.unlink()


class Lock:
    """A folder that one process at a time works in, by flock on its file `lock`, which names the
    process. It is given up with this object, and with the process and those that it has forked,
    however they end. BusyError where another process holds it; `held` is False on file systems that
    know no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / "lock"
        self._file = None
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be opened: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held = True
        except BlockingIOError:
            holder = os.read(self._file, 200).decode(errors="replace").strip()
            self.release()
            raise BusyError(
                f"{folder}: {holder or 'another process'} is working in this folder; stop it, or "
                "choose another folder"
            ) from None
        except OSError:
            self.held = False
            return
        with naming(self.path):
            os.ftruncate(self._file, 0)
            os.write(self._file, f"process {os.getpid()} on {platform.node()}\n".encode())

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.release()


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Make a folder beside `path`, and remove it after the block. Remove those of processes that
    were killed."""
    prefix = f".{path.name}-again-"
    for left in path.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(FileError):  # a process works there
            if Lock(left).held:
                shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
    try:
        lock = Lock(made)
        made = made.rename(made.with_name(f"{prefix}{made.name[1:]}"))  # whose lock is held
        yield made
        lock.release()
    finally:
        shutil.rmtree(made, ignore_errors=True)


# ---- secrets -------------------------------------------------------------------------------------


def user_folder(variable: str, default: str, noun: str, named_by: str) -> Path:
    """Return the folder `needle` in $variable, or in `default` in the user's home. FileError for a
    user without a home: it says that `named_by` names a folder for the `noun`."""
    base = os.environ.get(variable) or os.path.expanduser(f"~/{default}")
    if base.startswith("~"):
        raise FileError(f"{noun}: this user has no home: set {named_by} to a folder")
    return Path(base, "needle")


def settings_file(name: str) -> Path:
    """Return the path of a file in the user's folder of settings, $XDG_CONFIG_HOME or ~/.config."""
    return user_folder("XDG_CONFIG_HOME", ".config", name, "HOME or XDG_CONFIG_HOME") / name


def read_secret(path: Path, noun: str) -> str:
    """The secret of this user in a file; the first time, a random one is written there. FileError
    where others can read it, and where the file holds none. `noun` is the secret's name in
    messages."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of mode 0600
                file.write(secrets.token_urlsafe() + "\n")
                file.flush()
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)
        mode, secret = stat.S_IMODE(path.stat().st_mode), path.read_bytes().strip()
    except OSError as error:
        why = error.strerror or error
        raise FileError(f"{path}: the {noun} cannot be read or made: {why}") from None
    if mode & 0o077:
        raise FileError(
            f"{path}: its mode is {mode:04o}, so that others can read the {noun}. Delete it, and a "
            f"new one is made; or keep it by: chmod 600 {path}"
        )
    if len(secret) < SHORTEST or not secret.isascii() or secret.split() != [secret]:
        raise FileError(
            f"{path}: holds no {noun}, of {SHORTEST} characters or more in a word. Delete it, and "
            "a new one is made"
        )
    return secret.decode()
