"""Timing of a kernel that may try to keep results from one call to the next.

For each timed call the code is loaded anew, so its variables are as in the source, and its inputs
and outputs are restored. Before it the code is warmed up with other values; without such, each
timed call is the first of its code, some microseconds slower, and a hint says so. Before each call
a buffer larger than any L2 cache is written, so inputs are read from memory. Events in the stream
take the time. Reported are the median and the quartiles of all calls; a time that the device cannot
reach is an error (`judge`).

Not excluded: code may keep from its warm-up results of the numbers, the grid and the block alone,
such as a table of sines; and a kernel may hide data on purpose in the heap of device code or far
beyond the guard bands.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from needle import _C
from needle._C import Device, Event, empty

FLUSH_BYTES = 256 << 20  # as Triton's do_bench: five times an H100's L2
L2_BYTES = FLUSH_BYTES // 4
MOST_FLUSHES = 500
MOST_CALLS = 100
SHORTEST = 1.0  # microseconds: no launch is shorter, an empty kernel takes about 2
MARGIN = 1.25  # how far a kernel may beat the rate at which the device filled the flush buffer
MARGIN_OF_PRODUCTS = 4.0  # and that of products in bfloat16, with FP8 and sparsity
LAUNCH_BOUND = 2.0  # times the time of an empty kernel
HOST = 500.0  # microseconds in which the host has checked and queued a first launch
COLD = (
    "each call is the first of its code, which takes some microseconds, because trials have arrays "
    "in common, or there is one: with Random arguments and trials above 1 it is warm"
)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median and quartiles of `calls`. `rate` is the bytes of all arrays
    by the median, in GB/s; `device_rate` that of the device writing memory. Not `valid`: `reason`
    says why the figures are not to be believed."""

    median: float
    lower: float
    upper: float
    calls: int
    rate: float
    device_rate: float
    valid: bool = True
    reason: str = ""
    hints: tuple[str, ...] = ()


class Clock:
    """Measures times on a device. Attributes: nothing (microseconds of an empty kernel), fill_rate
    (bytes a second at which the device fills memory)."""

    def __init__(self, device: Device) -> None:
        self.device, self.flush = device, empty((FLUSH_BYTES,), "uint8", device)
        tiny = empty((1,), "float32", device)
        fill = min(self.timed(lambda: self.flush.fill(2)) for _ in range(3))
        self.nothing = statistics.median(self.timed(lambda: tiny.fill(1.0)) for _ in range(9))
        self.fill_rate = FLUSH_BYTES / (fill * 1e-6)
        # The device writes for as long as the host needs to queue the launch of code that is new.
        self.flushes = min(math.ceil(HOST / max(fill, 1.0)), MOST_FLUSHES)

    def timed(self, what: Callable[[], object]) -> float:
        """Return microseconds, after a fill of the flush buffer, without waiting for a launch."""
        self.flush.fill(1)
        before, after = Event(self.device), Event(self.device)
        before.record()
        what()
        after.record()
        return before.elapsed(after) * 1e3

    def measure(self, prepare: Callable[[], Callable[[], object]], seconds: float) -> list[float]:
        """Return the microseconds of calls, each of which `prepare()` makes ready: as many as fit
        into the time, at least one and at most MOST_CALLS."""
        times, end = [], time.monotonic() + seconds
        while not times or (len(times) < MOST_CALLS and time.monotonic() < end):
            call = prepare()
            for _ in range(self.flushes - 1):
                self.flush.fill(1)
            times.append(self.timed(call))
            del call  # its code goes
        return times

    def product_rate(self, size: int) -> float:
        """Return the operations a second of a product of two matrices in bfloat16."""
        a = _C.array(np.ones((size, size), np.float32), "bfloat16", self.device)
        return 2 * size**3 / (min(self.timed(lambda: a @ a) for _ in range(4)) * 1e-6)


def least_time(written: int, operations: float, rates: Mapping[str, float]) -> float:
    """Return the microseconds that a device of these rates (fill_rate, product_rate) needs to write
    so many bytes, of which its L2 cache may keep some, and to do so many operations."""
    writing = max(written - L2_BYTES, 0) / (rates["fill_rate"] * MARGIN)
    return max(writing, operations / (rates["product_rate"] * MARGIN_OF_PRODUCTS)) * 1e6


def judge(
    times: Sequence[float],
    clock: Mapping[str, float],
    written: int,
    touched: int,
    local_bytes: int = 0,
    warm: bool = True,
    operations: float = 0,
) -> Timing:
    """Judge times, in microseconds. clock: nothing, fill_rate and product_rate of a Clock. written:
    bytes of outputs, all of which were written; touched: bytes of all arrays, some of which a
    kernel may leave unread; operations: those that a right kernel must do."""
    nothing, fill_rate = clock["nothing"], clock["fill_rate"]
    lower, median, upper = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    )
    least = least_time(written, operations, clock)
    reason, hints = "", []
    if median < SHORTEST:
        reason = f"{median:.3g} us are less than a launch takes"
    elif median < least:
        reason = (
            f"{median:.4g} us for {written:,} bytes of outputs and {operations:,.0f} operations; "
            f"this device needs {least:.4g} us"
        )
    elif touched / (median * 1e-6) > fill_rate * MARGIN:
        hints.append(
            f"{touched:,} bytes of arrays in {median:.4g} us is faster than this device's memory "
            f"({fill_rate / 1e9:,.0f} GB/s): not all of them can have been read"
        )
    if median < LAUNCH_BOUND * nothing:
        hints.append(
            f"launch-bound: a kernel that does nothing takes {nothing:.3g} us; give it more work, "
            "or join it with its neighbours"
        )
    if local_bytes:
        hints.append(
            f"spilling: {local_bytes} bytes of local memory a thread; fewer registers in use, or "
            "__launch_bounds__ with fewer threads, keep values in registers"
        )
    if not warm:
        hints.append(COLD)
    rate = touched / median / 1e3 if median > 0 else 0.0
    return Timing(
        median, lower, upper, len(times), rate, fill_rate / 1e9, not reason, reason, tuple(hints)
    )
