"""Timing of a kernel that may try to keep results from one call to the next.

For each timed call the code is loaded anew, so its variables are as in the source, and its inputs
and poisoned outputs are restored. The last call of each set of inputs is compared. Warm up with
another input set, if sets share no array; otherwise each timed call is the first of its code, some
microseconds slower, and a hint says so.

Before each call a buffer larger than any L2 cache is written, so inputs are read from memory.
Events in the stream take the time, without a stop of the host between them. Reported are the median
and the quartiles of all calls; a time that the device cannot reach is an error (`judge`).

Not excluded: code may keep from its warm-up results of the numbers, the grid and the block alone,
such as a table of sines; and a kernel may hide data on purpose in the heap of device code or far
beyond the guard bands.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from needle._C import Device, Event, empty

FLUSH_BYTES = 256 << 20  # as Triton's do_bench: five times an H100's L2
L2_BYTES = FLUSH_BYTES // 4
MOST_FLUSHES = 500
WARM_UP = 3
MOST_CALLS = 100
LEAST_CALLS = 5
SHORTEST = 1.0  # microseconds: no launch is shorter, an empty kernel takes about 2
MARGIN = 1.25  # how far a kernel may beat the rate at which the device filled the flush buffer
LAUNCH_BOUND = 2.0  # times the time of an empty kernel
HOST = 500.0  # microseconds in which the host has checked and queued a first launch
COLD = (
    "each call is the first of its code, which takes some microseconds, because sets of inputs "
    "have arrays in common, or there is one: with Random arguments and trials above 1 it is warm"
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
    hints: tuple[str, ...] = field(default=())


def measure(
    load: Callable[[], Callable[[], object]],
    restore: Callable[[int], object],
    keep: Callable[[int], object],
    sets: int,
    warm: bool,
    device: Device,
    flush_bytes: int = FLUSH_BYTES,
    seconds: float = 0.2,
) -> tuple[list[float], float, float]:
    """Return (microseconds of each timed call, those of an empty kernel, the bytes a second at
    which the device fills memory).

    `load()` loads the code anew and returns its call; `restore(i)` restores set i of the inputs;
    `keep(i)` stores the outputs of the last call of that set. `warm`: each timed call comes after
    one with the next set. As many calls as fit into `seconds` of the device, and with their
    loads into five times as many, 5 to 100, and one for each set at least.
    """
    flush = empty((flush_bytes,), "uint8", device)
    tiny = empty((1,), "float32", device)

    def timed(what: Callable[[], object]) -> float:
        """Return microseconds, after a fill of the flush buffer, without waiting for a launch."""
        flush.fill(1)
        before, after = Event(device), Event(device)
        before.record()
        what()
        after.record()
        return before.elapsed(after) * 1e3

    fills = [timed(lambda: flush.fill(2)) for _ in range(WARM_UP)]
    nothing = statistics.median(timed(lambda: tiny.fill(1.0)) for _ in range(9))
    # The device writes for as long as the host needs to queue the launch of code that is new.
    flushes = min(math.ceil(HOST / max(min(fills), 1.0)), MOST_FLUSHES)

    def once(number: int) -> float:
        """Microseconds of a call with a set. The code goes when it returns."""
        call = load()
        if warm:
            restore((number + 1) % sets)
            call()
        restore(number % sets)
        for _ in range(flushes - 1):
            flush.fill(1)
        return timed(call)

    began = time.perf_counter()
    first = [once(i) for i in range(WARM_UP)]
    each = (time.perf_counter() - began) / WARM_UP
    wanted = seconds * 1e6 / max(min(first) + flushes * min(fills), SHORTEST)
    calls = max(min(int(wanted), int(5 * seconds / each), MOST_CALLS), LEAST_CALLS, sets)
    times = []
    for n in range(calls):
        times.append(once(n))
        if n >= calls - sets:
            keep(n % sets)
    return times, nothing, flush_bytes / (min(fills) * 1e-6)


def judge(
    times: list[float],
    nothing: float,
    device_rate: float,
    written: int,
    touched: int,
    local_bytes: int,
    warm: bool = True,
) -> Timing:
    """Return a Timing of the result of `measure`. written: bytes of outputs, all of which were
    written; touched: bytes of all arrays, some of which a kernel may leave unread."""
    lower, median, upper = (
        statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    )
    fastest = device_rate * MARGIN
    reason, hints = "", []
    # Data in the L2 cache at the end need not have reached memory.
    least = max(written - L2_BYTES, 0) / fastest * 1e6
    if median < SHORTEST:
        reason = f"{median:.3g} us are less than a launch takes"
    elif median < least:
        reason = (
            f"{median:.4g} us for {written:,} bytes of outputs; this device needs {least:.4g} us "
            "to write them"
        )
    elif touched / (median * 1e-6) > fastest:
        hints.append(
            f"{touched:,} bytes of arrays in {median:.4g} us is faster than this device's memory "
            f"({device_rate / 1e9:,.0f} GB/s): not all of them can have been read"
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
        median, lower, upper, len(times), rate, device_rate / 1e9, not reason, reason, tuple(hints)
    )
