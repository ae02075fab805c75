"""Batches made ahead on another thread, so that the device never waits for data.

    thread:  wait for the last copy of a slot -> read rows into its pinned memory
    next():  the slot read first -> enqueue its copy to the device -> have the thread read it again

On the CPU a slot is None and next() returns NumPy arrays. `position` counts the batches that next()
has returned, which a checkpoint keeps; the thread may have read more.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

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
            raise ValueError("Prefetch: batches for a GPU need vocab_size: it checks no ids")
        self.batches, self.position = batches, batches.position
        self._slots = [
            _Slot((batches.batch_size, batches.width), device) if on_gpu else None
            for _ in range(depth + 1 if on_gpu else depth)
        ]
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self.batches)

    def next(self) -> tuple:
        """(inputs, targets), integers (batch_size, batches.width); goes on for ever."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "needle.data.Prefetch")
            self._ahead = deque(map(self._submit, self._slots))
        slot, batch, position = self._ahead[0].result()  # its error again at each next()
        if slot is not None:
            batch = slot.send()
        self.position = position
        self._ahead.popleft()
        self._ahead.append(self._submit(slot))
        return batch

    def _submit(self, slot: _Slot | None) -> Future:
        # The thread knows the batches, not this object, so that dropping the object ends it.
        return self._thread.submit(_read, self.batches, slot)

    def seek(self, position: dict[str, int]) -> None:
        """Seek as Batches do, and drop the batches that were read ahead."""
        self.close()
        self.batches.seek(position)
        self.position = self.batches.position

    def close(self) -> None:
        """End the thread; a further next() goes on at `position`."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
            self.batches.seek(self.position)


def _read(batches: Batches, slot: _Slot | None) -> tuple:
    batch = batches.parts(batches.next_rows())
    if slot is not None:
        slot.fill(batch)
    return slot, batch, batches.position
