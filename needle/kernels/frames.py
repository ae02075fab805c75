"""Frames: what the pool and its processes say to each other, over a socket that only they have.

A frame is a head of 16 bytes, a JSON object, and a block of bytes that the object describes; open
files travel with the head. Nothing else is read: no pickle, and nothing from standard output, where
a kernel may print whatever looks like an answer. Lengths are checked before memory is taken.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

HEAD = struct.Struct("<4sIQ")  # a mark, the bytes of the JSON, the bytes of the block
MARK = b"ndlk"
JSON_BYTES = 4 << 20
BLOCK_BYTES = 256 << 20
OPEN_FILES = 64  # that one frame may bring


STATUSES = (
    "ok",
    "wrong_result",
    "out_of_bounds",
    "compile_error",
    "invalid_launch",
    "illegal_address",
    "misaligned_address",
    "assertion",
    "launch_failure",
    "timeout",
    "out_of_memory",
    "crashed",
    "device_lost",
)

# The forms of answers (`fits`): of a process that is ready, or is not, and to "prove"; of a
# runner; of one that counts devices; to "answer" and "clean"; of a compiler; of a run, of a timing.
FACTS = dict.fromkeys(("name", "arch", "detail", "products", "uuid"), str)
FACTS |= dict.fromkeys(("total_bytes", "processors"), int)
YES, NO = frozenset({True}), frozenset({False})
FAILED = {"ready": NO, "message": str}
READY = ({"ready": YES}, FAILED)
RUNNER_READY = ({"ready": YES, "facts": FACTS}, FAILED)
COUNTED = ({"ready": YES, "devices": int}, FAILED)
THERE: dict[str, Any] = {}
CLEANED = {"freed": int}
PARAMETER = {"type": str, "const": (bool, type(None))}
COMPILED = (
    {
        "status": frozenset({"ok"}),
        "log": str,
        "resources": dict.fromkeys(
            ("registers", "shared_bytes", "local_bytes", "max_threads"), int
        ),
        "parameters": [PARAMETER],
        "allocates": bool,
    },
    {"status": frozenset(STATUSES) - {"ok"}, "message": str},
)
RAN = {
    "status": frozenset(STATUSES),
    "message?": str,
    "faulted?": bool,
    "occupancy?": {"occupancy": float, "limiter": str, "blocks_per_sm": int},
}
TIMED = RAN | {
    "timing?": dict.fromkeys(("median", "lower", "upper", "rate", "device_rate"), float)
    | {"calls": int, "valid": bool, "reason": str, "hints": [str]}
}


class FrameError(ValueError):
    """What came is no frame, or holds another answer than was asked for."""


def fits(value: Any, form: Any) -> bool:
    """Whether a JSON value has a form: a type; a set of texts or truth values; [form] of a list;
    {name: form} of an object, which has those names alone, where one that ends in ? may be missing;
    a tuple of forms, of which one fits. Numbers are finite and of 64 bits; a float may be whole."""
    if isinstance(form, tuple):
        return any(fits(value, one) for one in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(one, form[0]) for one in value)
    if isinstance(form, frozenset):
        return isinstance(value, (str, bool)) and value in form
    if isinstance(form, dict):
        parts = {name.rstrip("?"): part for name, part in form.items()}
        return (
            isinstance(value, dict)
            and {name for name in form if name[-1] != "?"} <= value.keys() <= parts.keys()
            and all(fits(one, parts[name]) for name, one in value.items())
        )
    if form in (int, float):
        return type(value) in (int, form) and -(2**63) <= value < 2**63
    return type(value) is form


def wait_for_ever(sock: socket.socket, events: int) -> None:
    """Until the socket can be read or written (`select.POLLIN`, `POLLOUT`)."""
    ready = select.poll()
    ready.register(sock, events)
    ready.poll()


def fitting(header: dict[str, Any], block: bytes = b"", files: Sequence[int] = ()) -> bytes:
    """The JSON of a frame. ValueError for what no frame holds; whoever asks before a process is
    chosen loses none to it."""
    text = json.dumps(header).encode()
    if len(text) > JSON_BYTES or len(block) > BLOCK_BYTES or len(files) > OPEN_FILES:
        raise ValueError(
            f"a frame of {len(text):,} bytes of JSON, {len(block):,} bytes and {len(files)} "
            f"files; it holds {JSON_BYTES:,}, {BLOCK_BYTES:,} and {OPEN_FILES}"
        )
    return text


class Channel:
    """One end of the socket. `wait(sock, events)` returns when the socket is ready, or raises: so
    its owner has deadlines, and other things to do while it waits."""

    def __init__(
        self, sock: socket.socket, wait: Callable[[socket.socket, int], None] = wait_for_ever
    ) -> None:
        sock.setblocking(False)
        self.sock, self.wait = sock, wait

    def close(self) -> None:
        self.sock.close()

    def send(self, header: dict[str, Any], block: bytes = b"", files: Sequence[int] = ()) -> None:
        """ValueError for what no frame holds; OSError when the other end is gone."""
        text = fitting(header, block, files)
        rest = memoryview(HEAD.pack(MARK, len(text), len(block)) + text)
        while rest:
            try:
                sent = socket.send_fds(self.sock, [rest], files) if files else self.sock.send(rest)
            except BlockingIOError:
                self.wait(self.sock, select.POLLOUT)
                continue
            rest, files = rest[sent:], ()
            if not rest and block:
                rest, block = memoryview(block), b""

    def receive(self) -> tuple[dict[str, Any], bytes, list[int]]:
        """(object, block, open files). EOFError when the other end is gone, FrameError for what is
        no frame; the files are the caller's to close."""
        files: list[int] = []
        try:
            return (*self._receive(files), files)
        except BaseException:
            for file in files:
                os.close(file)
            raise

    def _receive(self, files: list[int]) -> tuple[dict[str, Any], bytes]:
        head = b""
        while len(head) < HEAD.size:
            try:
                part, brought, _, _ = socket.recv_fds(self.sock, HEAD.size - len(head), OPEN_FILES)
            except BlockingIOError:
                self.wait(self.sock, select.POLLIN)
                continue
            if not part:
                raise EOFError("the other end is gone")
            head += part
            for file in brought:  # Python 3.11 gives MSG_CMSG_CLOEXEC no way through
                os.set_inheritable(file, False)
            files += brought
        mark, text_bytes, block_bytes = HEAD.unpack(head)
        if mark != MARK or text_bytes > JSON_BYTES or block_bytes > BLOCK_BYTES:
            raise FrameError(f"no frame begins with {head!r}")
        try:
            header = json.loads(self._exactly(text_bytes))
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame whose JSON cannot be read: {error}") from error
        if not isinstance(header, dict):
            raise FrameError(f"a frame holds an object, not {type(header).__name__}")
        return header, bytes(self._exactly(block_bytes))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self.sock.recv_into(rest)
            except BlockingIOError:
                self.wait(self.sock, select.POLLIN)
                continue
            if not count:
                raise EOFError("the other end is gone")
            rest = rest[count:]
        return data
