"""Rates of a GPU: products, memory, copies from and to the host, launches; those far below the data
sheet of its kind are failures. Each is the median of a few samples, whose size grows until they are
long enough; clocks and their limits are read under load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from needle import _C, nvml
from needle.diagnose import machine
from needle.diagnose.examination import Reporter
from needle.peaks import peak

ENOUGH_MS = 2.0  # a sample of this length is believed, and those of the largest size
SAMPLES = 5
LOAD_MS = 60.0  # of work while clocks are read
# A rate below this part of the data sheet's is far below. cuBLASLt reaches 0.7 of the products and
# a copy 0.87 of the memory on an H200.
FAR_BELOW = {"bfloat16": 0.4, "memory": 0.5}
HOST = 2e9  # bytes/s that any link to the host makes
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}  # of PCIe, by generation
PART_OF_LINK = 0.05  # pageable memory, on a busy host: an H200 was seen to make 0.09
SLOW_LAUNCH = 50e-6
REMEDY = (
    "see whether another process computes on it, and its throttling, temperature and power lines "
    "(nvidia-smi -q -d PERFORMANCE); a start of the machine frees a GPU that is stuck at low clocks"
)
LINK_REMEDY = "see whether the host is busy, and the PCIe generation and width in `nvidia-smi -q`"


def seconds_of(device: Any, work: Callable[[], object]) -> float:
    """Seconds of one call of `work` until the device is idle: the median after a warm-up."""
    work()
    device.synchronize()
    times = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return max(statistics.median(times), 1e-9)


def grown(device: Any, make: Callable[[int], Callable[[], object]], sizes: list[int]) -> Any:
    """(size, seconds, work) of the smallest size that takes long enough, or of the largest that
    fits."""
    best = None
    for size in sizes:
        try:
            work = make(size)
            taken = seconds_of(device, work)
        except _C.CudaFatalError:
            raise
        except (MemoryError, _C.CudaError):
            if best is None:
                raise
            break
        best = size, taken, work
        if taken * 1e3 >= ENOUGH_MS:
            break
    return best


def product(device: Any) -> tuple[float, Callable[[], object]]:
    """FLOP/s of a square bfloat16 product, and the work."""

    def make(n: int) -> Callable[[], object]:
        values = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
        a, b = (_C.empty((n, n), "bfloat16", device) for _ in "ab")
        _C.assign(a, _C.array(values, "bfloat16", device))  # each row the same numbers
        _C.assign(b, _C.array(values[::-1].copy(), "bfloat16", device))
        return lambda: _C.matmul(a, b, None)

    n, taken, work = grown(device, make, [512, 1024, 2048, 4096, 8192])
    return 2 * n**3 / taken, work


def memory(device: Any) -> float:
    """Bytes/s read and written by a copy within the device."""

    def make(size: int) -> Callable[[], object]:
        a, b = (_C.empty((size // 4,), "float32", device) for _ in "ab")
        a.fill(1.0)
        return lambda: _C.assign(b, a)

    size, taken, _ = grown(device, make, [1 << n for n in (20, 24, 27, 29)])
    return 2 * size / taken


def to_device(device: Any, size: int) -> float:
    """Bytes/s from pinned memory."""
    buffer = _C.PinnedBuffer(size, device)

    def send() -> None:
        buffer.send((size,), "uint8")
        buffer.wait()

    return size / seconds_of(device, send)


def from_device(device: Any, size: int) -> float:
    """Bytes/s into pinned memory."""
    array = _C.empty((size,), "uint8", device)
    array.fill(1)
    held: list[object] = []

    def fetch() -> None:
        held[:] = [_C.AsyncCopy(array)]  # the next one takes its block of pinned memory

    return size / seconds_of(device, fetch)


def launch(device: Any) -> float:
    """Seconds that the host needs to enqueue a small op."""
    x, count = _C.array([1.0], device=device), 500
    for _ in range(50):
        _C.add(x, 1.0)
    device.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        _C.add(x, 1.0)
    taken = time.perf_counter() - start
    device.synchronize()
    return taken / count


def under_load(device: Any, work: Callable[[], object]) -> dict[str, Any] | None:
    """The figures of the device's GPU (`Nvml.describe`) under load; None without NVML."""
    try:
        opened = nvml.Nvml()
        handle = opened.handle_of(device.properties()["uuid"])
    except (OSError, nvml.NvmlError):
        return None
    for _ in range(min(1000, int(LOAD_MS / 1e3 / seconds_of(device, work)) + 1)):
        work()
    try:
        found = opened.describe(handle)
    except nvml.NvmlError:
        found = None
    device.synchronize()
    return found


def examine(reporter: Reporter, device: Any) -> None:
    """Findings about the rates, which are reported as the fact `rates`."""
    name = device.properties()["name"]
    reporter.at("measuring products", "matmul")
    flops, work = product(device)
    reporter.at("reading the clocks under load", "matmul")
    gpu = under_load(device, work)
    del work
    reporter.at("measuring memory", "assign")
    moved = memory(device)
    reporter.at("measuring copies to and from the host")
    size = 1 << (26 if moved > 1e11 else 22)
    up, down = to_device(device, size), from_device(device, size)
    reporter.at("measuring launches", "add")
    enqueue = launch(device)
    device.empty_cache()
    rates = {"bfloat16": flops, "memory": moved, "launch": enqueue}
    rates |= {"to_device": up, "from_device": down}
    reporter.fact("rates", rates)
    reporter.ok("rates", in_words(rates))
    judge(reporter, name, rates, gpu)


def in_words(rates: dict[str, float]) -> str:
    return (
        f"{rates['bfloat16'] / 1e12:.3g} TFLOP/s of bfloat16 products, memory "
        f"{rates['memory'] / 1e9:,.0f} GB/s, host to device {rates['to_device'] / 1e9:.1f} GB/s, "
        f"back {rates['from_device'] / 1e9:.1f} GB/s, a launch {rates['launch'] * 1e6:.1f} us"
    )


def judge(
    reporter: Reporter, name: str, rates: dict[str, float], gpu: dict[str, Any] | None
) -> None:
    """The findings about rates far below those of such a GPU: failures, or notes if another process
    shares it. gpu: its figures under load."""
    if "MIG" in name:  # a part of a GPU has no data sheet
        return
    others = [one for one in gpu["holders"] if not machine.is_ours(one["pid"])] if gpu else []
    shared = "; " + ", ".join(f"process {one['pid']}" for one in others) if others else ""

    def tell(what: str, text: str, remedy: str) -> None:
        if others:
            reporter.note("rates", f"{text}{shared} shares it")
        else:
            reporter.failed("rates", text, remedy, what)

    for what, op, unit, scale in (
        ("bfloat16", "matmul", "TFLOP/s", 1e12),
        ("memory", "assign", "GB/s", 1e9),
    ):
        best = peak(name, what)
        if best and rates[what] < FAR_BELOW[what] * best:
            made, could = f"{rates[what] / scale:,.3g}", f"{best / scale:,.4g}"
            text = f"{made} {unit} are far below the {could} {unit} of the data sheet of {name}"
            tell(op, text, REMEDY)
    least = HOST
    pcie = gpu["pcie"] if gpu else {}
    if pcie.get("generation") in LANE and pcie.get("width"):
        least = max(HOST, PART_OF_LINK * LANE[pcie["generation"]] * pcie["width"])
    for what, words in (("to_device", "to the device"), ("from_device", "from the device")):
        if peak(name, "memory") and rates[what] < least:
            text = f"{rates[what] / 1e9:.2g} GB/s {words} are far below its link's"
            tell("assign", text, LINK_REMEDY)
    if rates["launch"] > SLOW_LAUNCH:
        text = f"a launch takes {rates['launch'] * 1e6:.0f} us: the host is busy or slow"
        reporter.note("launch", text)
    if gpu:
        clocks = gpu["clocks"]
        reporter.find(*machine.throttling(clocks["reasons"], reporter.subject, ", under load"))
        if clocks["sm"] and clocks["sm_max"]:
            mhz = f"{clocks['sm']} of {clocks['sm_max']} MHz"
            reporter.detail(f"under load: {mhz}, {gpu['power']} W")
