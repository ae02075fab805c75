"""A micro-batch recorded once and replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from needle import _C
from needle._C import Device, NDArray


def worth_recording(device: Device, tokens: int) -> bool:
    """True if a micro-batch of so many tokens is faster as a graph: a GPU finishes fewer tokens
    before the host has queued the next micro-batch.

    >>> ndl.training.worth_recording(ndl.cpu(), 8192)
    False
    """
    return device.records_graphs and tokens <= 1 << 14


class GraphedStep:
    """Replay compute(ids, targets) as one graph, so that the host does not hold up small batches.
    The bits are the same.

    compute: takes int32 NDArrays of `shape`, leaves gradients in buffers that stay where they are,
    and returns the loss, a scalar; each call does the same (`_C.Graph`). ids and targets may be any
    arrays of integers of that shape. The first call computes, the second records, later ones
    replay. The graph owns the memory of one micro-batch. The second call raises ValueError on a
    device that records no graphs.
    """

    def __init__(
        self, compute: Callable[[NDArray, NDArray], NDArray], shape: tuple[int, int], device: Device
    ) -> None:
        self._compute, self._device = compute, device
        self._inputs = [_C.empty(shape, "int32", device) for _ in range(2)]
        self._loss = _C.empty((), "float32", device)
        self._has_computed, self._graph = False, None

    def __call__(self, ids: Any, targets: Any) -> NDArray:
        """Return the loss, float32, on the device."""
        for place, array in zip(self._inputs, (ids, targets)):
            if not isinstance(array, NDArray):
                array = _C.array(array, "int32", self._device)
            _C.assign(place, array)
        if self._graph is not None:
            self._graph.replay()
        elif self._has_computed:
            self._graph = _C.Graph(self._device, self._step)
        else:
            self._step()
            self._has_computed = True
        return self._loss.copy()

    def _step(self) -> None:
        _C.assign(self._loss, self._compute(*self._inputs))
