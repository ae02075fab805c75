"""Kernels that the tests of this folder compile, and whether they can be compiled here."""

import pytest
from harness import nvrtc_missing

MISSING = nvrtc_missing()
needs_nvrtc = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# One kernel of each kind: a template, a plain one, one of a namespace, one with C's name, two of
# one name; a struct by value, and every sort of number.
SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Affine { int shift; double unused; };

template <class T>
__global__ void scale(const T *x, T *y, float s, long long n, Affine a) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = (T)((float)x[i] * s + (float)a.shift);
}

extern "C" __global__ void plain(const float *x, float *y, float s, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * s;
}

namespace inner { __global__ void fill(int *y, int value) { y[threadIdx.x] = value; } }
namespace { __global__ void hidden(int *y) { y[0] = 1; } }

__global__ void twice(float *y) { y[0] *= 2; }
__global__ void twice(int *y) { y[0] *= 2; }

__global__ void numbers(
    bool a, char b, signed char c, unsigned char d, short e, unsigned short f, int g, unsigned h,
    long i, unsigned long j, long long k, unsigned long long l, float m, double n, __half o,
    __nv_bfloat16 p, float4 q, Affine r, const void *s, float *const *t, __half2 *u, uchar4 *v,
    double *w, const long long *x, bool *y, const __grid_constant__ Affine z) {}

__global__ void tile(float *y) {
    __shared__ float held[100];
    held[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = held[99 - threadIdx.x];
}

__global__ void barriers(int *y) {
    for (int i = 0; i < y[0]; i++) {
        asm volatile("bar.sync 5, 64;");
        y[i]++;
    }
}

__global__ void __launch_bounds__(128) bounded(float *y) { y[threadIdx.x] = 1; }

__global__ void stack(float *y, int i) {
    float much[1000];
    for (int k = 0; k < 1000; k++) much[k] = y[k];
    y[0] = much[i] + much[i + 1];
}

__global__ void nothing() {}
"""
SCALES = [f"scale<{name}>" for name in ("float", "__half", "__nv_bfloat16", "int", "unsigned char")]
