"""Exchanges that the side stream of a GPU does, while the host goes on: behind all that was
enqueued on needle's stream before, and beside what is enqueued later, up to `wait`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from needle._C import Device, Event, NDArray

Parts = Sequence[tuple[int, NDArray]]  # (rank, array)


class StreamTransport(ABC):
    """The transport of arrays on a GPU. A subclass enqueues."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def exchange(self, sends: Parts, receives: Parts) -> Exchange | None:
        """See Ranks.begin. Return None if this rank has no part in it. After an error the ranks
        cannot continue: some may have begun."""
        arrays = [(peer, array) for peer, array in (*sends, *receives) if array.size]
        for peer, array in arrays:
            if array.device != self._device or not array.is_compact():
                raise ValueError(
                    f"exchange: the array for rank {peer} must be compact, on {self._device}"
                )
        if not arrays:
            return None
        work = Exchange(self, self._device, [array for _, array in arrays])
        self._enqueue(*([part for part in parts if part[1].size] for parts in (sends, receives)))
        work.last.record(side=True)
        return work

    @abstractmethod
    def _enqueue(self, sends: Parts, receives: Parts) -> None:
        """Put an exchange of arrays that have elements into the side stream."""

    @abstractmethod
    def look(self) -> None:
        """Raise RankError if an exchange cannot end well. Another thread calls."""

    def close(self) -> None:
        """Wait for all enqueued work. All ranks call it."""
        self._device.synchronize()


class Exchange:
    """Work that the control channel watches (control.Work). An event is recorded before and after
    it: its deadline begins when the GPU reaches the first, and it is done at the second. It keeps
    its arrays up to `wait`: until then their memory is not in the order of needle's stream."""

    def __init__(self, transport: StreamTransport, device: Device, arrays: list[NDArray]) -> None:
        self._transport, self._arrays = transport, arrays
        self.first, self.last = Event(device), Event(device)
        self.first.record()
        self.first.wait(side=True)

    def begun(self) -> bool:
        return self.first.done()

    def done(self) -> bool:
        self._transport.look()
        return self.last.done()

    def wait(self) -> None:
        self.last.wait()
        self._arrays = []
