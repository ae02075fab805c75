"""Cost of isolation: medians of a warm job, of compiling, and of the recovery from a fault.

    python benchmarks/isolation.py [--runs 15]

"After" is from the answer to the faulty job to that to the next good one; both are as a caller sees
them, compiling (cached) included. Without a spare, a process starts when the fault is seen.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import bench
import numpy as np
from bench import seconds

from needle.kernels import Out, Pool, build

N = 1 << 16
X = np.arange(N, dtype=np.float32)
GOOD = """
__global__ void scale(const float* x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
"""
FAULTS = {
    "an illegal write": "__global__ void k(float* y) { y[1ll << 40] = 1; }",
    "a trap": "__global__ void k(float* y) { y[0] = 1; __trap(); }",
    "a timeout": "__global__ void k(float* y) { volatile float* v = y; while (v[0] != 3.5f) {} }",
}


def scaled(pool: Pool, source: str) -> Any:
    return pool.run(source, "scale", N // 256, 256, [X, Out(N), 3.0, N])


def good(pool: Pool) -> None:
    result = scaled(pool, GOOD)
    if result.status != "ok" or not (result.outputs[0] == 3 * X).all():
        sys.exit(f"a good job went wrong: {result.status}: {result.message}")


def row(what: str, times: list[float]) -> None:
    ms = sorted(1e3 * t for t in times)
    print(f"{what:52} {statistics.median(ms):9.2f} {ms[0]:9.2f} {ms[-1]:9.2f}", flush=True)


def after(pool: Pool, source: str, runs: int, spare: bool) -> list[float]:
    times = []
    for _ in range(runs):
        while spare and len(pool.state()[0]["ready"]) < 2:
            time.sleep(0.01)
        time.sleep(1.0)  # remains of the last fault are gone
        result = pool.run(source, "k", 1, 1, [Out(1)])
        if result.status == "ok":
            sys.exit(f"no fault: {source}")
        times.append(seconds(lambda: good(pool)))
    return times


def main() -> None:
    runs = bench.parser(__doc__, ("--runs", 15, "N", "of each row")).parse_args().runs
    print(f"{'milliseconds':52} {'median':>9} {'least':>9} {'most':>9}")

    def start() -> None:
        with Pool(devices=[0], spares=0) as pool:
            good(pool)

    row("a pool, its first job, and its end", [seconds(start) for _ in range(3)])
    built = [seconds(lambda n=n: build(f"{GOOD}// {n}", "scale")) for n in range(runs)]
    row("compiling a kernel, in process", built)
    row("the same, cached", [seconds(lambda: build(f"{GOOD}// 0", "scale")) for _ in range(runs)])
    with Pool(devices=[0], timeout=0.5) as pool:
        good(pool)
        warm = [seconds(lambda: good(pool)) for _ in range(99)]
        row("a warm job (256 KiB in, 256 KiB out)", warm)
        new = [f"{GOOD}// of this run: {n}" for n in range(runs)]
        row("a job with a new source", [seconds(lambda s=s: scaled(pool, s)) for s in new])
        for name, source in FAULTS.items():
            row(f"next good result after {name}, with a spare", after(pool, source, runs, True))
    with Pool(devices=[0], timeout=0.5, spares=0) as pool:
        good(pool)
        for name, source in FAULTS.items():
            row(f"next good result after {name}, without", after(pool, source, runs, False))


if __name__ == "__main__":
    bench.run(main)
