"""Batches made ahead on another thread, so that the device never waits for data.

    thread:  free slot -> wait for its last copy -> read rows into its pinned memory -> ready
    next():  ready slot -> enqueue its copy to the device, without waiting -> free slot

On the CPU a slot is None and next() returns NumPy arrays. `position` counts the batches that next()
has returned, which a checkpoint keeps; the thread may have read more. `waited` is the time that
next() has waited for the thread: where it grows, reading is slower than the steps.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref

import numpy as np

from needle._C import Device, NDArray, PinnedBuffer
from needle.data.batches import Batches


class _Slot:
    """Pinned memory for the ids and targets of a batch."""

    def __init__(self, shape: tuple[int, int], device: Device) -> None:
        self.shape = shape
        self.buffers = [PinnedBuffer(4 * shape[0] * shape[1], device) for _ in range(2)]
        self.arrays = [np.frombuffer(buffer, np.int32).reshape(shape) for buffer in self.buffers]

    def fill(self, parts: tuple[np.ndarray, np.ndarray]) -> None:
        for buffer, array, part in zip(self.buffers, self.arrays, parts):
            buffer.wait()
            array[:] = part

    def send(self) -> tuple[NDArray, NDArray]:
        ids, targets = (buffer.send(self.shape, "int32") for buffer in self.buffers)
        return ids, targets


class Prefetch:
    """The batches that `batches` draws, up to `depth` of them ahead of next().

    device: None or the CPU: next() gives NumPy arrays; a GPU: int32 NDArrays there, (B, T) each.
    For a GPU `batches` must have its vocab_size: the device does not check ids. An error of the
    thread is raised by the next() that would have returned its batch.
    """

    def __init__(self, batches: Batches, device: Device | None = None, depth: int = 2) -> None:
        on_gpu = device is not None and not device.is_host
        if on_gpu and batches.vocab_size is None:
            raise ValueError(
                "Prefetch: batches for a GPU need vocab_size: the device does not check ids"
            )
        self.batches, self.position = batches, batches.position
        self.waited = 0.0  # seconds, in all
        self._next: tuple | None = None  # read by the thread, not yet returned by next()
        self._slots = [
            _Slot((batches.batch_size, batches.width), device) if on_gpu else None
            for _ in range(depth + 1 if on_gpu else depth)
        ]
        self._thread = None

    def _start(self) -> None:
        self._free, self._ready = queue.SimpleQueue(), queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        # The thread knows the queues, not this object, so that dropping the object ends it.
        self._end = weakref.finalize(self, self._free.put, _END)
        self._thread = threading.Thread(
            target=_work,
            name="needle.data.Prefetch",
            daemon=True,
            args=(self.batches, self._free, self._ready),
        )
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self.position["epoch"]

    @property
    def batch(self) -> int:
        return self.position["batch"]

    def __repr__(self) -> str:
        return (
            f"Prefetch({self.batches.batch_size} x {self.batches.seq_len}, {len(self):,} an "
            f"epoch; next is epoch {self.epoch}, batch {self.batch}; waited {self.waited:.3f} "
            "s)"
        )

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self.batches)

    def next(self) -> tuple:
        """(inputs, targets), integers (batch_size, batches.width); goes on for ever."""
        if self._thread is None:
            self._start()
        if self._next is None:
            began = time.perf_counter()
            self._next = self._ready.get()
            self.waited += time.perf_counter() - began
        slot, batch, position = self._next
        if isinstance(batch, BaseException):
            raise batch  # and so each next() from now on
        if slot is not None:
            batch = slot.send()
        self.position, self._next = position, None
        self._free.put(slot)
        return batch

    def seek(self, position: dict[str, int]) -> None:
        """Seek as Batches do, and drop the batches that were read ahead."""
        self.close()
        self.batches.seek(position)
        self.position = self.batches.position

    def close(self) -> None:
        """End the thread; a further next() goes on at `position`."""
        if self._thread is not None:
            self._end()
            self._thread.join()
            self._thread = self._next = None
            self.batches.seek(self.position)


_END = object()


def _work(batches: Batches, free: queue.SimpleQueue, ready: queue.SimpleQueue) -> None:
    while (slot := free.get()) is not _END:
        try:
            batch = batches.parts(batches.next_rows())
            if slot is not None:
                slot.fill(batch)
        except BaseException as error:
            ready.put((slot, error, None))
            return
        ready.put((slot, batch, batches.position))
