"""Bytes by NCCL between GPUs that do not map each other's memory, as those of several machines. It
is loaded at first use; no arithmetic is NCCL's.

`libnccl.so.2` is the pip wheel's (the extra `gpus`), else the system's. Sends and receives are
enqueued on the side stream of needle's device (enqueued.py). The host does not wait: the control
channel's thread watches the returned work (control.py). Rejected: the host waits for the step
before (waits may stand anywhere, in a loss, an evaluation or a checkpoint, and each would need a
watch).

The communicator is blocking. NCCL finds and connects ranks on the host at the first exchange, in
the caller's `watched`, which ends a hang. Nothing is aborted: a process whose ranks are gone ends.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

from needle._C import Device
from needle.distributed.control import RankError
from needle.distributed.enqueued import Parts, StreamTransport

NAME = "libnccl.so.2"
OLDEST = 21800  # 2.18.0, as ncclGetVersion tells it
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
INT8 = 0  # ncclDataType_t
ID_BYTES = 128
INSTALL = "pip install nvidia-nccl-cu13, into the environment of each rank"


class UniqueId(ctypes.Structure):
    """Passed by value."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
# Of functions that return ncclResult_t: their parameters.
FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, UniqueId, _INT],
    "ncclCommDestroy": [_POINTER],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(_INT)],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
}


def find_library() -> str:
    """Return the library of the pip wheel, else the name for the system's loader."""
    paths = [Path(folder, "nvidia/nccl/lib", NAME) for folder in sys.path]
    return next((str(path) for path in paths if path.is_file()), NAME)


class Library:
    """NCCL. `version` is 22809 for 2.28.9. ValueError if it is missing or too old. Calls raise
    RankError, a RuntimeError, with NCCL's own message: its errors are mostly a rank or a network
    that is gone, and a restart may help."""

    def __init__(self, path: str | None = None) -> None:
        path = path or find_library()
        try:
            self._library = ctypes.CDLL(path)
            for name, parameters in FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = parameters, _INT
            for name, parameter in ("ncclGetErrorString", _INT), ("ncclGetLastError", _POINTER):
                function = getattr(self._library, name)
                function.argtypes, function.restype = [parameter], ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise ValueError(
                "GPUs that do not reach each other's memory need NCCL, which cannot be loaded "
                f"({error}): {INSTALL}"
            ) from error
        version = _INT()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < OLDEST:
            raise ValueError(
                f"{path} is NCCL {self.version_text}, and needle needs 2.18 or newer: {INSTALL}"
            )

    @property
    def version_text(self) -> str:
        return f"{self.version // 10000}.{self.version % 10000 // 100}.{self.version % 100}"

    def call(self, name: str, *arguments: Any) -> None:
        self.check(name, getattr(self._library, name)(*arguments))

    def check(self, name: str, result: int) -> None:
        """Raise RankError for an error that a function returned, or for an asynchronous one."""
        if result == SUCCESS:
            return
        words = self._library.ncclGetErrorString(result) or b"?"
        last = self._library.ncclGetLastError(None) or b""
        more = f" ({last.decode(errors='replace').strip()})" if last.strip() else ""
        raise RankError(
            f"NCCL: {name}: {words.decode(errors='replace')}{more}: NCCL_DEBUG=INFO in the "
            "environment of the ranks prints its attempts"
        )

    def unique_id(self) -> bytes:
        """Return the id that all ranks of a communicator share. One of them calls it."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


class NCCLTransport(StreamTransport):
    """Join the communicator of `size` ranks. All of them call it."""

    def __init__(
        self, library: Library, rank: int, size: int, unique_id: bytes, device: Device
    ) -> None:
        super().__init__(device)
        self._library = library
        self._lock = threading.Lock()  # the watching thread must not use a destroyed communicator
        device.synchronize()  # makes it this thread's device, on which NCCL begins
        communicator = _POINTER()
        library.call(
            "ncclCommInitRank",
            ctypes.byref(communicator),
            size,
            UniqueId.from_buffer_copy(unique_id),
            rank,
        )
        self._communicator: ctypes.c_void_p | None = communicator

    def _enqueue(self, sends: Parts, receives: Parts) -> None:
        call, stream = self._library.call, self._device.side_stream
        call("ncclGroupStart")
        for name, parts in ("ncclSend", sends), ("ncclRecv", receives):
            for peer, array in parts:
                call(name, array.data_ptr, array.nbytes, INT8, peer, self._communicator, stream)
        call("ncclGroupEnd")

    def look(self) -> None:
        with self._lock:
            if self._communicator is not None:
                state = _INT()
                self._library.call("ncclCommGetAsyncError", self._communicator, ctypes.byref(state))
                if state.value != IN_PROGRESS:
                    self._library.check("an exchange", state.value)

    def close(self) -> None:
        super().close()
        with self._lock:
            communicator, self._communicator = self._communicator, None
        self._library.call("ncclCommDestroy", communicator)
