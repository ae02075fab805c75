"""Messages between the pool and its processes: a line of JSON, then a block of bytes.

Each process has a socket that only the pool shares, so what a kernel prints is never taken for an
answer. Open files travel with the line. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

MOST_FILES = 64  # open files of one message


class Channel:
    """One end of the socket: one message at a time, in turns. OSError (BrokenPipeError, EOFError)
    when the other end is closed, TimeoutError after `deadline` (by time.monotonic())."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.deadline: float | None = None

    def close(self) -> None:
        self.sock.close()

    def send(self, message: dict[str, Any], block: bytes = b"", files: Sequence[int] = ()) -> None:
        line = json.dumps({**message, "block_bytes": len(block)}).encode() + b"\n"
        self._limit()
        sent = socket.send_fds(self.sock, [line], files) if files else 0
        self.sock.sendall(line[sent:] + block)

    def receive(self) -> tuple[dict[str, Any], bytes, list[int]]:
        """Return (message, block, open files). The caller closes the files."""
        data, files = bytearray(), []
        while b"\n" not in data:
            self._limit()
            part, brought, _, _ = socket.recv_fds(self.sock, 1 << 16, MOST_FILES)
            if not part:
                raise EOFError("the other end is closed")
            for file in brought:  # Python 3.11 gives MSG_CMSG_CLOEXEC no way through
                os.set_inheritable(file, False)
            data += part
            files += brought
        line, _, block = data.partition(b"\n")
        message = json.loads(line)
        rest = message.pop("block_bytes") - len(block)
        while rest:
            self._limit()
            part = self.sock.recv(min(rest, 1 << 20))
            if not part:
                raise EOFError("the other end is closed")
            block += part
            rest -= len(part)
        return message, bytes(block), files

    def _limit(self) -> None:
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.sock.settimeout(min(left, 1e6))
