"""Landlock: a process gives up, for ever, all files but those in a few folders, which it may read.

The kernel's own sandbox for programs without privileges (landlock(7), Linux 5.13 and newer), by
system call. A process gives up reading, writing and making files; from version 4 of the interface
TCP, from 5 commands to device files, from 6 signals to and sockets of processes outside. Open files
stay open, and mapped memory stays mapped.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
ASK_VERSION = 1
PATH_BENEATH = 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWUSER = 0x10000000

# Rights by the version of the interface that brought them.
FIRST_FS = (1 << 13) - 1  # to execute, write, read, list, remove and make files
REFER, TRUNCATE, IOCTL = 1 << 13, 1 << 14, 1 << 15
TCP = 0b11  # to bind, to connect
SCOPES = 0b11  # to reach abstract sockets and processes outside


class LandlockError(RuntimeError):
    """Raised where the system cannot confine a process; the text says why."""


def _syscall(number: int, *arguments: object) -> int:
    """Call the kernel. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    got = libc.syscall(ctypes.c_long(number), *arguments)
    if got < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(got)


def version() -> int:
    """Return the version of Landlock's interface. LandlockError if there is none."""
    try:
        return _syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(ASK_VERSION))
    except OSError as error:
        raise LandlockError(
            f"this kernel ({os.uname().release}) has no Landlock ({error.strerror}): that needs "
            "Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK, landlock in its lsm=, and a "
            "container whose seccomp profile lets the system calls through"
        ) from None


def ruleset(known: int) -> bytes:
    """Return struct landlock_ruleset_attr with all rights that a kernel of that version knows. It
    refuses unknown ones."""
    files = FIRST_FS
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL)):
        files |= right if known >= since else 0
    if known < 4:
        return struct.pack("=Q", files)
    if known < 6:
        return struct.pack("=QQ", files, TCP)
    return struct.pack("=QQQ", files, TCP, SCOPES)


def path_beneath(rights: int, folder: int) -> bytes:
    """struct landlock_path_beneath_attr, which is packed."""
    return struct.pack("=Qi", rights, folder)


def confine(readable: Iterable[str | os.PathLike]) -> None:
    """Let this process and its children read `readable` (files, folders) alone, and write nothing,
    for ever. It must have one thread, since others would keep their rights. LandlockError."""
    known = version()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise LandlockError(f"this process has {threads} threads; confine it while it has one")
    attr = ruleset(known)
    try:
        rules = _syscall(CREATE_RULESET, attr, ctypes.c_size_t(len(attr)), ctypes.c_uint32(0))
        try:
            for path in readable:
                _allow(rules, Path(path))
            if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
            _syscall(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
        finally:
            os.close(rules)
    except OSError as error:
        raise LandlockError(f"Landlock (version {known}): {error}") from error
    _check()


def enter(folder: str | os.PathLike) -> bool:
    """Make `folder` the root of all paths of this process by chroot(2), as root or in a user
    namespace of its own. Under Landlock alone a path through a folder still shows whether the
    folder exists. Return False if the system allows neither. The process must have one thread."""
    for _ in range(2):
        try:
            os.chroot(folder)
        except PermissionError:
            ctypes.CDLL(None).unshare(CLONE_NEWUSER)
        else:
            os.chdir("/")
            return True
    return False


def _allow(rules: int, path: Path) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        # A rule for a file may not name a right of folders.
        folder = stat.S_ISDIR(os.fstat(place).st_mode)
        rule = path_beneath(READ_FILE | (READ_DIR if folder else 0), place)
        _syscall(ADD_RULE, ctypes.c_int(rules), PATH_BENEATH, rule, ctypes.c_uint32(0))
    finally:
        os.close(place)


def _check() -> None:
    """Find a kernel or a container that accepts the rules and does not keep them."""
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
    except PermissionError:
        return
    raise LandlockError("the kernel took the rules of Landlock and does not keep them")
