"""An exchange that the side stream of a GPU does, while the host goes on: behind all that was
enqueued on needle's stream before it, and beside what is enqueued later, up to `wait`."""

from __future__ import annotations

from collections.abc import Sequence

from needle._C import Device, Event, NDArray

Parts = Sequence[tuple[int, NDArray]]  # (rank, array)


def checked(device: Device, sends: Parts, receives: Parts) -> tuple[Parts, Parts]:
    """Return the parts that have elements. ValueError for an array that no transport between GPUs
    moves."""
    for peer, array in (*sends, *receives):
        if array.size and (array.device != device or not array.is_compact()):
            raise ValueError(f"exchange: the array for rank {peer} must be compact, on {device}")
    filled = [[(peer, array) for peer, array in parts if array.size] for parts in (sends, receives)]
    return filled[0], filled[1]


class Exchange:
    """Work that the control channel watches (control.Work). An event is recorded before and after
    it: its deadline begins when the GPU reaches the first, and it is done at the second. It keeps
    its arrays up to `wait`: until then their memory is not in the order of needle's stream."""

    def __init__(self, device: Device, sends: Parts, receives: Parts) -> None:
        self.arrays = [array for _, array in (*sends, *receives)]
        self.first, self.last = Event(device), Event(device)
        self.first.record()
        self.first.wait(side=True)

    def enqueued(self) -> Exchange:
        """Mark the end, once all of it is in the side stream."""
        self.last.record(side=True)
        return self

    def begun(self) -> bool:
        return self.first.done()

    def done(self) -> bool:
        return self.last.done()

    def wait(self) -> None:
        self.last.wait()
        self.arrays = []
