"""Messages between ranks: JSON arrays of a word and its arguments, one a line, over TCP."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any


class Connection:
    """One end of a TCP connection. Any thread may send, one thread receives.

    Nothing here waits beyond a given time: multiprocessing.connection has no deadlines."""

    def __init__(self, sock: socket.socket, deadline: float = 60.0) -> None:
        """`deadline`: seconds of a collective. A reader that keeps the buffers full for a quarter
        of it counts as gone."""
        self._socket, self._received, self._lock = sock, bytearray(), threading.Lock()
        self.ended: str | None = None  # why no more can be received
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        microseconds = max(1, int(deadline * 250_000))
        timeout = struct.pack("ll", *divmod(microseconds, 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Send a message. OSError if the other end is gone."""
        self.send_bytes(json.dumps(message).encode() + b"\n")

    def send_bytes(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> None:
        """Take what has arrived, without waiting. `ended` is set if the other end is gone."""
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self.ended = error.strerror or str(error)
            return
        self._received += data
        if not data:
            self.ended = "closed by the other end"

    def bytes_of(self, size: int) -> bytes | None:
        """Return and remove so many of the received bytes; None if there are fewer."""
        if len(self._received) < size:
            return None
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def message(self) -> list[Any] | None:
        """Return and remove the first received message; None if none is complete."""
        size = self._received.find(b"\n") + 1
        return json.loads(self.bytes_of(size)) if size else None

    def wait(self, read: Callable[[], Any], seconds: float) -> Any:
        """Return what `read()` (of this connection) gives once it is not None. TimeoutError;
        EOFError if the other end is gone before."""
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self, select.POLLIN)
        while (found := read()) is None:
            if self.ended is not None:
                raise EOFError(self.ended)
            if not poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
                raise TimeoutError("no answer")
            self.receive()
        return found

    def end_sending(self) -> None:
        """Let the other end see the end after all that was sent."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone already

    def close(self) -> None:
        with self._lock:
            self._socket.close()
