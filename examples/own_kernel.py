#!/usr/bin/env python3
"""A kernel of one's own: an op with a gradient, both written in CUDA, in any float dtype.

    python examples/own_kernel.py            needs an NVIDIA GPU and NVRTC

The op is SwiGLU (Shazeer 2020): y = silu(a) b, with silu(a) = a sigmoid(a). needle's ops compute it
in three kernels and keep what lies between them; here it is one kernel forward and one backward,
computed in float32 and rounded once. The script compares both with the composition of needle's ops,
and times them.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()

import needle as ndl  # noqa: E402
from needle.autograd import Accumulators, FusedOp, NDArray, Tensor  # noqa: E402
from needle.backend_ndarray import empty  # noqa: E402
from needle.processes import program  # noqa: E402

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

template <class T> __global__ void forward(const T *a, const T *b, T *y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) {
        float x = (float)a[i];
        y[i] = (T)(x * sigmoid(x) * (float)b[i]);
    }
}

/* da = dy b (s + x s (1 - s)),  db = dy x s,  with x = a and s = sigmoid(a) */
template <class T>
__global__ void backward(const T *a, const T *b, const T *dy, T *da, T *db, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) {
        float x = (float)a[i], d = (float)dy[i], s = sigmoid(x);
        da[i] = (T)(d * (float)b[i] * (s + x * s * (1 - s)));
        db[i] = (T)(d * x * s);
    }
}
"""
TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}
BLOCK = 256


@functools.cache
def kernels(dtype: str) -> tuple[ndl.kernels.Kernel, ndl.kernels.Kernel]:
    names = [f"{way}<{TYPES[dtype]}>" for way in ("forward", "backward")]
    module = ndl.kernels.compile(SOURCE, names)
    return module[names[0]], module[names[1]]


def like(x: NDArray) -> NDArray:
    return empty(x.shape, dtype=x.dtype, device=x.device)


class SwiGLU(FusedOp):
    """A kernel sees memory alone, so that views are copied; what is empty needs no launch."""

    reads_result = False

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        a, b, y = a.compact(), b.compact(), like(a)
        if y.size:
            kernels(a.dtype)[0](-(-y.size // BLOCK), BLOCK, a, b, y, y.size)
        return y

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> tuple[NDArray, NDArray]:
        a, b, dout = (x.compact() for x in (*(t.cached_data for t in node.inputs), dout))
        da, db = like(a), like(b)
        if a.size:
            kernels(a.dtype)[1](-(-a.size // BLOCK), BLOCK, a, b, dout, da, db, a.size)
        return da, db


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) b, elementwise; a and b of one shape and one float dtype."""
    if a.shape != b.shape:
        raise ValueError(f"swiglu: a is {a.shape}, and b {b.shape}")
    return SwiGLU()(a, b)


def composed(a: Tensor, b: Tensor) -> Tensor:
    return a * ndl.sigmoid(a) * b


def main() -> int:
    if not ndl.cuda().enabled():
        print(f"this example needs a GPU: {ndl.cuda().reason()}")
        return 1
    print(kernels("bfloat16")[0].check(1 << 14, BLOCK))
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((2048, 2048)) for _ in range(3)]
    for dtype in TYPES:
        worst, times = 0.0, []
        results = []
        for function in (swiglu, composed):
            a, b, dy = (ndl.Tensor(v, device=ndl.cuda(), dtype=dtype) for v in values)
            function(a, b).backward(dy)  # a warm-up
            a.grad = b.grad = None
            start, end = ndl.Event(ndl.cuda()), ndl.Event(ndl.cuda())
            start.record()
            y = function(a, b)
            y.backward(dy)
            end.record()
            times.append(start.elapsed(end))
            results.append([x.numpy() for x in (y, a.grad, b.grad)])
        for one, other in zip(*results):
            worst = max(worst, float(np.abs(one - other).max() / np.abs(other).max()))
        print(f"{dtype:9} {times[0]:.3f} ms, composed {times[1]:.3f} ms; {worst:.1e} apart")
    return 0


if __name__ == "__main__":
    sys.exit(program(main))
