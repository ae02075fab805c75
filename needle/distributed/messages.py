"""Messages on a TCP connection: four bytes of length, then so much JSON: an array of a word of
FORMS and its arguments.

A message that FORMS does not allow, and a length beyond the limit, are a ValueError as soon as they
are seen, so that the readers of messages check no types. Nothing here waits for a reader or for the
rest of a message: multiprocessing.connection does, in accept(), too, and cannot keep a deadline.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from typing import Any

LIMIT = 1 << 20  # bytes of a message
MOST = 1e9  # seconds, and the largest number: beyond it waiting overflows
PLACE = int, str, int  # number, name and step of a collective
# By word, the types of the arguments; int and float are 0 to MOST, a list is one of texts.
FORMS: dict[str, tuple[type, ...]] = {
    # rendezvous.py
    "hello": (str,),
    "proof": (str, str),
    "rank": (str, str),
    "heard": (float,),
    "stranger": (str,),
    "welcome": (),
    "missing": (str,),
    "differ": (str,),
    # control.py
    "at": (*PLACE, str, float, *PLACE, str, float),
    "value": (*PLACE, str),
    "values": (int, list),
    "late": (*PLACE, str, float),
    "end": (str, str, int),
    "bye": PLACE,
    "left": (str,),
}


def encode(message: Any, limit: int = LIMIT) -> bytes:
    """ValueError where it would be longer than the limit."""
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > limit:
        raise ValueError(
            f"a message of {len(text):,} bytes: the control channel is for small ones, up to "
            f"{limit:,} bytes; arrays take another way"
        )
    return struct.pack(">I", len(text)) + text


def decode(text: str | bytes) -> Any:
    """The JSON of another process. ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def checked(message: Any) -> list[Any]:
    """The message, where it is one of FORMS. ValueError."""
    word = message[0] if isinstance(message, list) and message else None
    form = FORMS.get(word) if isinstance(word, str) else None
    if form is None or len(message) != 1 + len(form):
        raise ValueError(f"no message of this protocol: {message!r:.60}")
    for value, kind in zip(message[1:], form):
        if kind is float:
            fits = type(value) in (int, float) and 0 <= value <= MOST
        else:
            fits = type(value) is kind and (kind is not int or 0 <= value <= MOST)
        if kind is list and fits:
            fits = all(type(text) is str for text in value)
        if not fits:
            raise ValueError(f"{word!r} with {value!r:.60} in place of {kind.__name__}")
    return message


class Connection:
    """One end: `send` from any thread, `receive` from one. `limit` is that of what arrives,
    `deadline` the seconds after which a machine that has vanished counts as gone."""

    def __init__(self, sock: socket.socket, limit: int = LIMIT, deadline: float = 60.0) -> None:
        self.limit = limit
        self._socket, self._heard, self._lock = sock, bytearray(), threading.Lock()
        sock.settimeout(None)
        seconds, ms = max(1, int(deadline / 4)), max(1, int(1000 * deadline))
        tcp, base = socket.IPPROTO_TCP, socket.SOL_SOCKET
        for level, option, value in (
            (tcp, socket.TCP_NODELAY, 1),
            (base, socket.SO_KEEPALIVE, 1),
            (tcp, socket.TCP_KEEPIDLE, seconds),
            (tcp, socket.TCP_KEEPINTVL, seconds),
            (tcp, socket.TCP_KEEPCNT, 3),
            (tcp, socket.TCP_USER_TIMEOUT, ms),
            # Who does not read for so long that the buffers are full is as good as gone.
            (base, socket.SO_SNDTIMEO, struct.pack("ll", *divmod(ms * 250, 1_000_000))),
        ):
            sock.setsockopt(level, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """What `encode` made. OSError where the other end is gone."""
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> list[list[Any]]:
        """The messages that have arrived whole. EOFError when the other end is gone."""
        self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def wait(self, seconds: float) -> list[Any]:
        """The next message, and no more. TimeoutError; EOFError."""
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self, select.POLLIN)
        while (message := self._next()) is None:
            if not poll.poll(min(1e9, max(0.0, 1000 * (end - time.monotonic())))):
                raise TimeoutError("no answer")
            self._read()
        return message

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(error.strerror or str(error)) from error
        if not data:
            raise EOFError("closed by the other end")
        self._heard += data

    def _next(self) -> list[Any] | None:
        """Of what was read; None where no message is whole."""
        if len(self._heard) < 4:
            return None
        (length,) = struct.unpack_from(">I", self._heard)
        if length > self.limit:
            raise ValueError(f"a message of {length:,} bytes: at most {self.limit:,}")
        if len(self._heard) < 4 + length:
            return None
        text = bytes(self._heard[4 : 4 + length])
        del self._heard[: 4 + length]
        return checked(decode(text))

    def end_sending(self) -> None:
        """The other end sees all that was sent, then the end."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone already

    def close(self) -> None:
        with self._lock:
            self._socket.close()
