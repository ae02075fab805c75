"""Bytes between GPUs of one machine by their copy engines: no kernel, so that all multiprocessors
compute beside an exchange.

Each rank has an inbox in its GPU's memory for each other rank, of SLOTS messages, and two numbers:
of the last message that arrived from there, and of the last of its own that was taken there. Ranks
map each other's (CUDA IPC). A message is copied into a slot of the inbox, and its number written
behind it; the receiving GPU waits for the number, copies the message to its place, and writes the
number back, which frees the slot:

    sender        wait: taken >= n - SLOTS    copy: slot n % SLOTS    write: arrived = n
    receiver      wait: arrived >= n          copy: to the arrays     write: taken = n

All of that is enqueued (`cuStreamWaitValue32`, `cuStreamWriteValue32`): sends in a stream of their
own, receives in the side stream of needle's device (enqueued.py). A rank that is gone leaves the
others' streams waiting, which the control channel's deadline ends.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from needle._C import Device, NDArray
from needle.distributed.control import RankError
from needle.distributed.enqueued import Parts, StreamTransport

NAME = "libcuda.so.1"
SLOT = 32 << 20  # bytes of a message, at most
SLOTS = 2  # messages on their way from one rank to another
ALIGNED = 256  # bytes: where arrays begin in a message
NUMBER = 4  # bytes of a message's number, which counts modulo 2^32
NUMBERS = 1 << 12  # bytes of all numbers of a rank, two for each of its machine
NON_BLOCKING, NO_TIMING, PEER_ACCESS = 1, 2, 1  # CU_STREAM_, CU_EVENT_, CU_IPC_MEM_LAZY_...
REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ: modulo 2^32


class Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_POINTER, _ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
_NUMBER, _FLAGS, _INT = ctypes.c_uint32, ctypes.c_uint, ctypes.c_int
# Of functions that return CUresult: their parameters.
FUNCTIONS: dict[str, list[Any]] = {
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [ctypes.POINTER(_ADDRESS), _SIZE],
    "cuMemsetD8_v2": [_ADDRESS, ctypes.c_ubyte, _SIZE],
    "cuIpcGetMemHandle": [ctypes.POINTER(Handle), _ADDRESS],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_ADDRESS), Handle, _FLAGS],
    "cuStreamCreate": [ctypes.POINTER(_POINTER), _FLAGS],
    "cuEventCreate": [ctypes.POINTER(_POINTER), _FLAGS],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuStreamWaitEvent": [_POINTER, _POINTER, _FLAGS],
    "cuStreamWaitValue32_v2": [_POINTER, _ADDRESS, _NUMBER, _FLAGS],
    "cuStreamWriteValue32_v2": [_POINTER, _ADDRESS, _NUMBER, _FLAGS],
    "cuMemcpyDtoDAsync_v2": [_ADDRESS, _ADDRESS, _SIZE, _POINTER],
    "cuGetErrorName": [_INT, ctypes.POINTER(ctypes.c_char_p)],
}
Gather = Callable[[str, Any], list]  # (name, JSON value) -> those of all ranks
Piece = tuple[int, int, int]  # of a message: its address, its bytes, its place in the slot


class Driver:
    """The functions of CUDA's driver, in the context of the calling thread, which is that of the
    device whose event it recorded last. Calls raise RankError, which names the error. OSError or
    AttributeError if there is no such driver."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(NAME)
        for name, parameters in FUNCTIONS.items():
            getattr(self._library, name).argtypes = parameters

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(said))
            words = (said.value or b"?").decode()
            raise RankError(f"{name}: {words}: the GPUs of this machine cannot exchange arrays")

    def made(self, name: str, flags: int) -> ctypes.c_void_p:
        """Return what a function makes: a stream, an event."""
        made = _POINTER()
        self.call(name, ctypes.byref(made), flags)
        return made

    def allocate(self, count: int) -> tuple[int, str]:
        """Return the address of so many zeros, which stay up to the end of the process, and the
        handle by which others map them."""
        address, handle = _ADDRESS(), Handle()
        self.call("cuMemAlloc_v2", ctypes.byref(address), count)
        self.call("cuMemsetD8_v2", address, 0, count)
        self.call("cuCtxSynchronize")
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return address.value, bytes(handle).hex()

    def mapped(self, handle: str) -> int:
        """Return the address here of another process's memory."""
        address, known = _ADDRESS(), Handle.from_buffer_copy(bytes.fromhex(handle))
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), known, PEER_ACCESS)
        return address.value


def connect(rank: int, size: int, device: Device, gather: Gather) -> PeerTransport | None:
    """Connect the ranks of one machine. Return None where a GPU cannot map the memory of another,
    as where a launcher hides it, or cannot write numbers there. All ranks call."""
    device.synchronize()  # makes it this thread's device
    handle = transport = None
    with contextlib.suppress(OSError, AttributeError, RankError):
        driver = Driver()
        own, handle = driver.allocate(NUMBERS + (size - 1) * SLOTS * SLOT)
    handles = gather("the memory of the GPUs", handle)
    if not all(handles):
        return None
    with contextlib.suppress(RankError):
        others = enumerate(handles)
        blocks = [own if at == rank else driver.mapped(known) for at, known in others]
        transport = PeerTransport(driver, rank, blocks, device)
    connected = gather("the GPUs that reach each other", transport is not None)
    return transport if all(connected) else None


def _messages(arrays: Sequence[NDArray]) -> Iterator[list[Piece]]:
    """Cut arrays into messages, each of which fills a slot but the last."""
    message: list[Piece] = []
    place = 0
    for array in arrays:
        start, end = array.data_ptr, array.data_ptr + array.nbytes
        while start < end:
            if place >= SLOT:
                yield message
                message, place = [], 0
            count = min(end - start, SLOT - place)
            message.append((start, count, place))
            start += count
            place += -(-count // ALIGNED) * ALIGNED
    yield message


class PeerTransport(StreamTransport):
    """blocks: the addresses of each rank's memory: its numbers, then its inboxes."""

    def __init__(self, driver: Driver, rank: int, blocks: list[int], device: Device) -> None:
        super().__init__(device)
        self._driver, self._rank, self._blocks = driver, rank, blocks
        self._sent, self._received = ([0] * len(blocks) for _ in range(2))
        self._sending = driver.made("cuStreamCreate", NON_BLOCKING)
        self._begun, self._are_sent = (driver.made("cuEventCreate", NO_TIMING) for _ in range(2))
        for other in range(len(blocks)):
            if other != rank:  # an error, where streams cannot
                self._wait(self._sending, self._taken(rank, other), 0)
                self._write(self._sending, self._arrived(other, rank), 0)

    def _enqueue(self, sends: Parts, receives: Parts) -> None:
        call, receiving = self._driver.call, self._device.side_stream
        call("cuEventRecord", self._begun, receiving)
        call("cuStreamWaitEvent", self._sending, self._begun, 0)
        for sent, received in zip_longest(self._rounds(sends), self._rounds(receives)):
            for rank, message in sent or ():
                self._send(rank, message)
            for rank, message in received or ():
                self._receive(rank, message)
        call("cuEventRecord", self._are_sent, self._sending)
        call("cuStreamWaitEvent", receiving, self._are_sent, 0)

    def look(self) -> None:
        """Nothing: the driver's calls raise, and a rank that is gone leaves the streams waiting."""

    def _rounds(self, parts: Parts) -> Iterator[list[tuple[int, list[Piece]]]]:
        """Yield the first message of each rank, then the second ones, beginning with the next rank,
        so that not all ranks begin with one. A message waits for those of earlier rounds alone."""
        arrays: dict[int, list[NDArray]] = {}
        for rank, array in parts:
            arrays.setdefault(rank, []).append(array)
        ranks = sorted(arrays, key=lambda rank: (rank - self._rank) % len(self._blocks))
        for messages in zip_longest(*(_messages(arrays[rank]) for rank in ranks)):
            yield [(rank, message) for rank, message in zip(ranks, messages) if message]

    def _send(self, rank: int, message: list[Piece]) -> None:
        stream = self._sending
        self._sent[rank] = number = self._sent[rank] + 1
        self._wait(stream, self._taken(self._rank, rank), number - SLOTS)
        slot = self._slot(rank, self._rank, number)
        for address, count, place in message:
            self._driver.call("cuMemcpyDtoDAsync_v2", slot + place, address, count, stream)
        self._write(stream, self._arrived(rank, self._rank), number)

    def _receive(self, rank: int, message: list[Piece]) -> None:
        stream = self._device.side_stream
        self._received[rank] = number = self._received[rank] + 1
        self._wait(stream, self._arrived(self._rank, rank), number)
        slot = self._slot(self._rank, rank, number)
        for address, count, place in message:
            self._driver.call("cuMemcpyDtoDAsync_v2", address, slot + place, count, stream)
        self._write(stream, self._taken(rank, self._rank), number)

    def _wait(self, stream: Any, address: int, number: int) -> None:
        self._driver.call("cuStreamWaitValue32_v2", stream, address, number, REACHED)

    def _write(self, stream: Any, address: int, number: int) -> None:
        self._driver.call("cuStreamWriteValue32_v2", stream, address, number, 0)

    # Addresses in the memory of rank `at`.

    def _slot(self, at: int, sender: int, number: int) -> int:
        """Where a message of `sender` lies."""
        inbox = sender - (sender > at)
        return self._blocks[at] + NUMBERS + (inbox * SLOTS + number % SLOTS) * SLOT

    def _arrived(self, at: int, sender: int) -> int:
        """The number of the last message that arrived from `sender`."""
        return self._blocks[at] + 2 * sender * NUMBER

    def _taken(self, at: int, receiver: int) -> int:
        """The number of the last message of `at` that `receiver` has taken."""
        return self._blocks[at] + (2 * receiver + 1) * NUMBER
