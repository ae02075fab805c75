"""Messages between the pool and its processes: JSON, then arrays as raw bytes. Nothing is pickled
or unpickled, so a process can at most send wrong numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

Message = dict[str, Any]


def send(
    connection: Connection, message: Message, arrays: Sequence[bytes | np.ndarray] = ()
) -> None:
    connection.send_bytes(json.dumps({**message, "arrays": len(arrays)}).encode())
    for array in arrays:
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        connection.send_bytes(array)


def receive(connection: Connection) -> tuple[Message, list[bytes]]:
    """Wait for a message. EOFError when the other end is closed, OSError when it stops halfway."""
    message = json.loads(connection.recv_bytes())
    return message, [connection.recv_bytes() for _ in range(message.pop("arrays"))]
