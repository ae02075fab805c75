"""Batches made ahead on another thread, so that the device never waits for data.

    thread:  wait for the last copy of a slot -> read rows into its pinned memory
    next():  the slot read first -> enqueue its copy to the device -> have the thread read it again

A slot has two buffers of pinned memory, for ids and targets. On the CPU it has none, and next()
returns NumPy arrays. `position` counts the batches that next() has returned, which a checkpoint
keeps; the thread may have read more.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from needle._C import Device, PinnedBuffer
from needle.data.batches import Batches


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
        self._shape = batches.batch_size, batches.width
        new = lambda: PinnedBuffer(4 * math.prod(self._shape), device)
        self._slots = [[new(), new()] if on_gpu else [] for _ in range(depth + on_gpu)]
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
        if slot:
            batch = tuple(buffer.send(self._shape, "int32") for buffer in slot)
        self.position = position
        self._ahead.popleft()
        self._ahead.append(self._submit(slot))
        return batch

    def _submit(self, slot: list[PinnedBuffer]) -> Future:
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


def _read(batches: Batches, slot: list[PinnedBuffer]) -> tuple:
    batch = batches.parts(batches.next_rows())
    for buffer, part in zip(slot, batch):
        buffer.wait()
        np.frombuffer(buffer, np.int32).reshape(part.shape)[:] = part
    return slot, batch, batches.position
