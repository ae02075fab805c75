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


class FrameError(ValueError):
    """What came is no frame."""


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
        return header, bytes(self._exactly(block_bytes)), files

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
