"""Kernels in processes of their own, on a GPU: what isolation costs, and that nothing goes wrong.

    python benchmarks/isolation.py [--runs 15] [--jobs 1000] [--seed 0]

First medians: of a start, of a job, and of the next good result after a fault, as a caller sees
them, with a spare that is ready; a new source is compiled. Then so many mixed jobs with three
spares, a quarter of them faults, a third from other threads: each is compared with what is right,
and memory of host and GPU, files, threads and processes must be what they were, and the GPU idle. A
thousand take some five minutes. The exit code is 1 when anything was wrong, and when another
program keeps the GPU busy, which would be measured too. 0 leaves a part out.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
import numpy as np
from bench import seconds, spread

from needle.kernels import Case, Out, Pool, Random, Result
from needle.kernels.toolkit import nvidia_smi

HUNG_SECONDS = 120  # without a job that ends
FIGURES = ("memory.used", "utilization.gpu")
SPARES = 3
SECONDS = 2.0  # that a launch may take: the driver reports some faults after half a second
MEBIBYTES_LEFT = 64  # that host or GPU may have more at the end

# ---- jobs, and what is right ---------------------------------------------------------------------

N = 1000
X = np.arange(N, dtype=np.float32)
GOOD = """
__global__ void scale(const float* x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
"""


def good(pool: Pool, source: str = GOOD) -> None:
    """A job whose answer is known."""
    result = pool.run(source, "scale", 8, 128, [X, Out(N), 3.0, N])
    assert (result.status, result.message) == ("ok", ""), result
    assert (result.outputs[0] == 3 * X).all()


def timed(pool: Pool) -> None:
    """The same, drawn anew, compared and timed."""
    case = Case(8, 128, [Random(N), Out(N), 3.0, N])
    result = pool.evaluate(GOOD, "scale", [case], lambda x, a, n: np.float32(a) * x, trials=3)
    assert (result.status, result.deterministic) == ("ok", True), result
    assert result.timing[0].valid and result.timing[0].median > 1, result


@dataclass(frozen=True)
class Fault:
    """A kernel with a fault: the status that is right, or several with spaces between; a word that
    the message has; and its source, or the body of k(float* y)."""

    status: str
    said: str
    code: str
    args: list[Any] = field(default_factory=lambda: [Out(32)])
    grid: Any = 1
    block: Any = 32
    shared: int = 0

    @property
    def source(self) -> str:
        whole = "__global__" in self.code
        return self.code if whole else f'extern "C" __global__ void k(float* y) {{ {self.code} }}'


FAULTS = {
    "illegal read": Fault("illegal_address", "IllegalAddress", "y[threadIdx.x] = *(float*)0x10;"),
    "illegal write": Fault(
        "illegal_address", "IllegalAddress", "y[threadIdx.x + (1ll << 40)] = 1;"
    ),
    "misaligned address": Fault(
        "misaligned_address",
        "MisalignedAddress",
        "*(float4*)(y + 1 + threadIdx.x) = make_float4(1, 2, 3, 4);",
    ),
    "assert": Fault("assertion", "Assert", "y[threadIdx.x] = 0; assert(threadIdx.x < 3);"),
    "trap": Fault("launch_failure", "cudaError", "y[threadIdx.x] = 0; __trap();"),
    "stack overflow": Fault(
        "launch_failure illegal_address",
        "cudaError",
        """
        __device__ __noinline__ float deep(volatile float* y, int n) {
            float here[64];
            for (int i = 0; i < 64; i++) here[i] = y[(i + n) % 32];
            float below = n > 0 ? deep(y, n - 1) : 0;
            for (int i = 0; i < 64; i++) below += here[(i * n) % 64];
            return below;
        }
        extern "C" __global__ void k(float* y, int n) { y[threadIdx.x] = deep(y, n); }
        """,
        [Out(32), np.int32(1_000_000)],
    ),
    "endless loop": Fault(
        "timeout", "killed", "volatile float* v = y; while (v[0] != 12345.f) v[1] = 1;"
    ),
    "barrier deadlock": Fault(
        "timeout",
        "killed",
        """
        extern "C" __global__ void k(float* y, int* flag) {
            volatile int* v = flag;
            if (threadIdx.x == 0) { while (v[0] != 777) {} }
            __syncthreads();
            y[threadIdx.x] = 1;
        }
        """,
        [Out(32), np.zeros(1, np.int32)],
    ),
    "printf flood": Fault(
        "ok",
        "",
        'y[threadIdx.x] = 0; for (int i = 0; i < 1000; i++) printf("line %d of %d\\n", i, '
        "threadIdx.x);",
    ),
    "forged result": Fault(
        "ok",
        "",
        "y[threadIdx.x] = 0;"
        ' if (!threadIdx.x) printf("{\\"status\\": \\"illegal_address\\"}\\nndlk\\n");',
    ),
    "device heap leak": Fault("ok", "", "y[threadIdx.x] = malloc(100000) != nullptr;", grid=8),
    "device heap used up": Fault(
        "illegal_address",
        "IllegalAddress",
        "float* p; do { p = (float*)malloc(1 << 20); p[0] = 1; } while (p); y[0] = 1;",
    ),
    "out of memory": Fault("out_of_memory", "", "y[threadIdx.x] = 0;", [Out((1 << 41,), "uint8")]),
    "2,048 threads": Fault(
        "invalid_launch", "threads a block: 2,048", "y[threadIdx.x] = 0;", block=2048
    ),
    "grid.y 65,536": Fault(
        "invalid_launch", "grid.y: 65,536", "y[threadIdx.x] = 0;", grid=(1, 65536)
    ),
    "300 KB shared memory": Fault(
        "invalid_launch",
        "of shared memory a block",
        "extern __shared__ float s[]; s[threadIdx.x] = 1; y[threadIdx.x] = s[0];",
        shared=300_000,
    ),
    "too many registers": Fault(
        "invalid_launch",
        "registers",
        """
        extern "C" __global__ void k(const float* x, float* y) {
            float r[200];
            #pragma unroll
            for (int i = 0; i < 200; i++) r[i] = x[i * 32 + threadIdx.x];
            __syncthreads();
            float s = 0;
            #pragma unroll
            for (int i = 0; i < 200; i++) s += r[i] * r[199 - i] + r[(i * 7) % 200];
            y[threadIdx.x] = s;
        }
        """,
        [np.ones(200 * 32 + 1024, np.float32), Out(1024)],
        1,
        1024,
    ),
    "too few arguments": Fault("invalid_launch", "", GOOD.replace("scale", "k"), [X, Out(N), 3.0]),
    "wrong dtype": Fault(
        "invalid_launch", "", GOOD.replace("scale", "k"), [X.astype(np.int32), Out(N), 3.0, N]
    ),
    "written past the end": Fault(
        "out_of_bounds",
        "args[1] (float*): 4 bytes were written after its end",
        "__global__ void k(const float* x, float* y) { y[threadIdx.x] = x[0]; }",
        [X, Out(31)],
    ),
    "written before the start": Fault(
        "out_of_bounds",
        "written before its start",
        "__global__ void k(const float* x, float* y) { y[(int)threadIdx.x - 1] = x[0]; }",
        [X, Out(31)],
    ),
    "const written": Fault(
        "out_of_bounds",
        "it is const",
        "__global__ void k(const float* x, float* y) { y[threadIdx.x] = 0; ((float*)x)[5] = -1; }",
        [X, Out(32)],
    ),
    "not all written": Fault(
        "wrong_result",
        "1 of 32 elements (the first at [7]) were not written",
        "__global__ void k(float* y) { if (threadIdx.x != 7) y[threadIdx.x] = 0; }",
    ),
    "does not compile": Fault("compile_error", "undeclared", "y[0] = undeclared;"),
}


def inject(pool: Pool, name: str) -> Result:
    fault = FAULTS[name]
    way = fault.grid, fault.block, fault.args, fault.shared
    result = pool.run(fault.source, "k", *way)
    assert result.status in fault.status.split(), f"{name}: {result}"
    assert fault.said in result.message, f"{name}: {result}"
    return result


# ---- what it costs -------------------------------------------------------------------------------


def row(what: str, job: Callable[[], Any], runs: int, before: Callable[[], Any]) -> None:
    """Print milliseconds of a job, `before` each of which something else happens."""
    times = []
    for _ in range(runs):
        before()
        times.append(1e3 * seconds(job))
    print(f"{what:51} {spread(times, '.2f')}", flush=True)


def all_ready(pool: Pool) -> None:
    while len(pool.state()[0]["ready"]) <= SPARES:
        time.sleep(0.01)


def costs(runs: int) -> None:
    print(f"{'milliseconds':51} median (least to most)")

    def start() -> None:
        with Pool(devices=[0], spares=0) as pool:
            good(pool)

    row("a pool, its first job, and its end", start, 3, lambda: None)
    with Pool(devices=[0], timeout=SECONDS, spares=SPARES) as pool:
        sources = iter(f"{GOOD}// of this run: {n}" for n in range(10**6))
        kinds: dict[str, Callable[[], None]] = {
            "source cached": lambda: good(pool),
            "new source": lambda: good(pool, next(sources)),
        }
        good(pool)
        for kind, job in kinds.items():
            row(f"a job, {kind}", job, runs, lambda: all_ready(pool))
        for fault in ("illegal write", "trap", "endless loop"):

            def before(fault: str = fault) -> None:
                all_ready(pool)
                inject(pool, fault)

            for kind, job in kinds.items():
                row(f"next good result after {fault}, {kind}", job, runs, before)


# ---- a thousand mixed jobs -----------------------------------------------------------------------


def gpu(uuid: str) -> tuple[int, int]:
    """Return MiB in use and percent of the last second at work of a GPU, for all programs; zeros
    where nvidia-smi has no figures."""
    time.sleep(2.0)
    for row in nvidia_smi("gpu", ["uuid", *FIGURES]):
        if row["uuid"] == uuid:
            used, busy = (int(row[name]) if row[name].isdigit() else 0 for name in FIGURES)
            return used, busy
    return 0, 0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def held() -> tuple[int, bool, int]:
    """Return the number of open files, whether there are child processes, and that of threads."""
    gc.collect()
    children = True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        children = False
    return len(os.listdir("/proc/self/fd")), children, threading.active_count()


def kill_one(pool: Pool) -> None:
    """Kill a process that waits or works."""
    state = pool.state()[0]
    for pid in (state["ready"] + state["used"])[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def mixed(count: int, seed: int, uuid: str) -> int:
    """Print a line a kind of job, and what is left; return the number of wrong answers."""
    rng = random.Random(seed)
    gpu_before, _ = gpu(uuid)
    before = held()
    seen: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    kills = threading.Semaphore(0)  # each may end one job, of any thread, which is repeated
    jobs: dict[str, Callable[[Pool], Any]] = {
        "good": good,
        "good, a new source": lambda pool: good(pool, f"{GOOD}// {rng.random()}"),
        "good, timed": timed,
        "killed": good,
    }

    def one(name: str) -> None:
        job = jobs.get(name, lambda pool: inject(pool, name))
        if name == "killed":
            kills.release()
            kill_one(pool)
        while True:
            try:
                job(pool)
            except Exception as error:
                if "SIGKILL" in str(error) and kills.acquire(blocking=False):
                    continue
                wrong.append(f"{name}: {str(error)[:300]}")
            break
        if name == "killed":
            kills.acquire(blocking=False)
        seen[name] += 1

    with (
        Pool(devices=[0], timeout=SECONDS, spares=SPARES) as pool,
        ThreadPoolExecutor(3) as threads,
    ):
        good(pool)
        early, began = resident(), time.monotonic()
        while sum(seen.values()) < count:
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
            names = rng.choices(["good", "good, a new source", "good, timed"], [6, 2, 1], k=3)
            names = [
                rng.choice([*FAULTS, "killed"]) if rng.random() < 0.25 else name for name in names
            ]
            run = threads.map if rng.random() < 1 / 3 else map
            list(run(one, names))
        faulthandler.cancel_dump_traceback_later()
        took = time.monotonic() - began
        good(pool)
        late, state = resident(), pool.state()[0]
    gpu_after, busy = gpu(uuid)
    after = held()
    for name, times in sorted(seen.items()):
        print(f"{times:5}  {name}")
    total = sum(seen.values())
    print(
        f"{total} jobs in {took:.0f} s, {total / took:.1f} a second, {len(wrong)} wrong; "
        f"{state['faults']} faults, {state['started']} processes, set aside: {state['set_aside']}"
    )
    print(f"files, processes left, threads: {before} before, {after} after")
    print(f"host memory: {late - early:+} MiB; GPU: {gpu_after - gpu_before:+} MiB, {busy} % busy")
    for line in wrong[:20]:
        print("wrong:", line)
    grown = max(late - early, gpu_after - gpu_before) > MEBIBYTES_LEFT
    return len(wrong) + (before != after) + grown + (busy > 0)


def main() -> int:
    args = bench.parser(
        __doc__,
        ("--runs", 15, "N", "of each row"),
        ("--jobs", 1000, "N", "mixed jobs"),
        ("--seed", 0, "N", "of their order"),
    ).parse_args()
    with Pool(devices=[0], spares=0) as pool:
        good(pool)
        inject(pool, "trap")  # the first one of a machine takes the driver over half a second
        uuid = pool.state()[0]["facts"]["uuid"]
    if gpu(uuid)[1] > 0:
        print(f"another program keeps {uuid} busy, and would be measured too: wait, or end it")
        return 1
    if args.runs:
        costs(args.runs)
    return int(args.jobs > 0 and mixed(args.jobs, args.seed, uuid) > 0)


if __name__ == "__main__":
    bench.run(main)
