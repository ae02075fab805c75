"""Host time of a launch of a user kernel, beside CuPy's.

    python benchmarks/launch.py            pip install cupy-cuda13x for its column

The kernel adds 1 to one element, so that the GPU is never waited for; a sample is a burst of
launches between two synchronisations, as many as the queue takes, and its time is that of the host
until the last is enqueued. Samples of both libraries alternate; the table shows medians in
microseconds a launch, and the quickest sample.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import bench
import numpy as np

import needle as ndl

BURST = 500  # launches; the driver's queue takes about 1,000
SOURCE = """
extern "C" __global__ void bump(float *x) { x[0] += 1; }
extern "C" __global__ void many(const float *a, const float *b, const float *c, float *x, float s,
                                float t, int n, int m) { if (n == m) x[0] += s * t; }
"""


def sample(launch: Callable[[], None], wait: Callable[[], None]) -> float:
    """Microseconds a launch."""
    wait()
    start = time.perf_counter()
    for _ in range(BURST):
        launch()
    took = time.perf_counter() - start
    wait()
    return took / BURST * 1e6


def needle_cases() -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    device = ndl.cuda()
    module = ndl.kernels.compile(SOURCE)
    bump = module.kernel("bump", signature="float*")
    many = module.kernel(
        "many", signature="const float*, const float*, const float*, float*, float, float, int, int"
    )
    x = ndl.NDArray(np.zeros(4), device=device)
    t = ndl.Tensor.from_ndarray(x)
    cases = {
        "1 array": lambda: bump((1,), (1,), x),
        "1 Tensor": lambda: bump((1,), (1,), t),
        "4 arrays, 4 numbers": lambda: many((1,), (1,), x, x, x, x, 2.0, 3.0, 4, 5),
    }
    return cases, device.synchronize


def cupy_cases() -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    import cupy

    module = cupy.RawModule(code=SOURCE)
    bump, many = module.get_function("bump"), module.get_function("many")
    x = cupy.zeros(4, cupy.float32)
    s, t, n, m = np.float32(2), np.float32(3), np.int32(4), np.int32(5)
    cases = {
        "1 array": lambda: bump((1,), (1,), (x,)),
        "4 arrays, 4 numbers": lambda: many((1,), (1,), (x, x, x, x, s, t, n, m)),
    }
    return cases, cupy.cuda.Device().synchronize


def main() -> None:
    samples = bench.parser(__doc__, ("--samples", 100, "N", "")).parse_args().samples
    device = bench.need_gpu()
    sides = {"needle": needle_cases()}
    if bench.has("cupy"):
        sides["CuPy"] = cupy_cases()
    bursts = {
        (name, side): lambda launch=launch, wait=wait: sample(launch, wait)
        for side, (cases, wait) in sides.items()
        for name, launch in cases.items()
    }
    bench.in_turns(bursts, 10)  # warms up
    times = bench.in_turns(bursts, samples)
    print(f"{device.properties()['name']}, {samples} samples of {BURST} launches")
    print(f"{'a launch with':22}" + "".join(f"{side + ', us':>14}{'best':>8}" for side in sides))
    for name in sides["needle"][0]:
        cells = f"{name:22}"
        for side in sides:
            taken = times.get((name, side))
            cells += (
                f"{statistics.median(taken):14.2f}{min(taken):8.2f}"
                if taken
                else f"{'-':>14}{'':8}"
            )
        print(cells)


if __name__ == "__main__":
    bench.run(main)
