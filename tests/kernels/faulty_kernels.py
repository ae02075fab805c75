"""Kernels with a fault each, for a pool on a GPU, and what is to be said of them.

A line of FAULTS is a kernel's source, how it is launched, the status that is right, and a word that
the message has. `good` is the job that must be right after any of them.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from needle.kernels import Out

N = 1000
X = np.arange(N, dtype=np.float32)

GOOD = """
__global__ void scale(const float* x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
"""


def good(pool) -> None:
    """A job whose answer is known."""
    result = pool.run(GOOD, "scale", 8, 128, [X, Out(N), 3.0, N])
    assert (result.status, result.message) == ("ok", ""), result
    assert (result.outputs[0] == 3 * X).all()


@dataclass(frozen=True)
class Fault:
    source: str
    status: str  # or several, with spaces between
    said: str
    args: list[Any] = field(default_factory=lambda: [Out(32)])
    grid: Any = 1
    block: Any = 32
    shared: int = 0


def body(text: str, parameters: str = "float* y") -> str:
    return f'extern "C" __global__ void k({parameters}) {{ {text} }}'


FAULTS = {
    "illegal read": Fault(
        body("y[threadIdx.x] = *(float*)0x10;"), "illegal_address", "IllegalAddress"
    ),
    "illegal write": Fault(
        body("y[threadIdx.x + (1ll << 40)] = 1;"), "illegal_address", "IllegalAddress"
    ),
    "misaligned address": Fault(
        body("*(float4*)(y + 1 + threadIdx.x) = make_float4(1, 2, 3, 4);"),
        "misaligned_address",
        "MisalignedAddress",
    ),
    "assert": Fault(body("y[threadIdx.x] = 0; assert(threadIdx.x < 3);"), "assertion", "Assert"),
    "trap": Fault(body("y[threadIdx.x] = 0; __trap();"), "launch_failure", "cudaError"),
    "stack overflow": Fault(
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
        "launch_failure illegal_address",
        "cudaError",
        [Out(32), np.int32(1_000_000)],
    ),
    "endless loop": Fault(
        body("volatile float* v = y; while (v[0] != 12345.f) v[1] = 1;"), "timeout", "killed"
    ),
    "barrier deadlock": Fault(
        """
        extern "C" __global__ void k(float* y, int* flag) {
            volatile int* v = flag;
            if (threadIdx.x == 0) { while (v[0] != 777) {} }
            __syncthreads();
            y[threadIdx.x] = 1;
        }
        """,
        "timeout",
        "killed",
        [Out(32), np.zeros(1, np.int32)],
    ),
    "printf flood": Fault(
        body(
            'y[threadIdx.x] = 0; for (int i = 0; i < 1000; i++) printf("line %d of %d\\n", i, '
            "threadIdx.x);"
        ),
        "ok",
        "",
    ),
    "forged result": Fault(
        body(
            "y[threadIdx.x] = 0;"
            ' if (!threadIdx.x) printf("{\\"status\\": \\"illegal_address\\"}\\nndlk\\n");'
        ),
        "ok",
        "",
    ),
    "device heap leak": Fault(
        body("y[threadIdx.x] = malloc(100000) != nullptr;"), "ok", "", grid=8
    ),
    "device heap used up": Fault(
        body("float* p; do { p = (float*)malloc(1 << 20); p[0] = 1; } while (p); y[0] = 1;"),
        "illegal_address",
        "IllegalAddress",
    ),
    "out of memory": Fault(
        body("y[threadIdx.x] = 0;"), "out_of_memory", "", [Out((1 << 41,), "uint8")]
    ),
    "2,048 threads": Fault(
        body("y[threadIdx.x] = 0;"), "invalid_launch", "block.x is 2,048", block=2048
    ),
    "grid.y 65,536": Fault(
        body("y[threadIdx.x] = 0;"), "invalid_launch", "grid.y is 65,536", grid=(1, 65536)
    ),
    "300 KB shared memory": Fault(
        body("extern __shared__ float s[]; s[threadIdx.x] = 1; y[threadIdx.x] = s[0];"),
        "invalid_launch",
        "of shared memory a block",
        shared=300_000,
    ),
    "too many registers": Fault(
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
        "invalid_launch",
        "registers",
        [np.ones(200 * 32 + 1024, np.float32), Out(1024)],
        1,
        1024,
    ),
    "too few arguments": Fault(GOOD.replace("scale", "k"), "invalid_launch", "", [X, Out(N), 3.0]),
    "wrong dtype": Fault(
        GOOD.replace("scale", "k"), "invalid_launch", "", [X.astype(np.int32), Out(N), 3.0, N]
    ),
    "written past the end": Fault(
        "__global__ void k(const float* x, float* y) { y[threadIdx.x] = x[0]; }",
        "out_of_bounds",
        "args[1] (float*): 4 bytes were written after its end",
        [X, Out(31)],
    ),
    "written before the start": Fault(
        "__global__ void k(const float* x, float* y) { y[(int)threadIdx.x - 1] = x[0]; }",
        "out_of_bounds",
        "written before its start",
        [X, Out(31)],
    ),
    "const written": Fault(
        "__global__ void k(const float* x, float* y) { y[threadIdx.x] = 0; ((float*)x)[5] = -1; }",
        "out_of_bounds",
        "takes it as const",
        [X, Out(32)],
    ),
    "not all written": Fault(
        "__global__ void k(float* y) { if (threadIdx.x != 7) y[threadIdx.x] = 0; }",
        "wrong_result",
        "1 of 32 elements were not written, the first at [7]",
    ),
    "does not compile": Fault(body("y[0] = undeclared;"), "compile_error", "undeclared"),
}


def inject(pool, name: str, explain: bool = False):
    fault = FAULTS[name]
    return pool.run(
        fault.source, "k", fault.grid, fault.block, fault.args, fault.shared, explain=explain
    )


def check(name: str, result) -> None:
    fault = FAULTS[name]
    assert result.status in fault.status.split(), f"{name}: {result}"
    assert fault.said in result.message, f"{name}: {result}"
