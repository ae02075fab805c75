/* layernorm.cuh - a row of layer normalisation in the registers of a group of threads: the same bits
 * in layernorm.cu and where a product reads normalised rows.
 */
#ifndef NEEDLE_LAYERNORM_CUH
#define NEEDLE_LAYERNORM_CUH

#include "common.cuh"

/* Sum over the group of 32 or 256 neighbouring threads. */
template <int group> __device__ __forceinline__ float group_sum(float v) {
    return group == 32 ? warp_sum(v) : block_sum(v);
}

/* count vectors of T a thread, `group` vectors apart; beyond the row nothing is read: zeros. */
template <class T, int count>
__device__ __forceinline__ void load_row(const T *row, int columns, int group, int lane,
                                         Vec<T> (&out)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        int c = (i * group + lane) * Vec<T>::size;
        if (c < columns) {
            out[i] = load16(row + c);
        } else {
#pragma unroll
            for (int k = 0; k < Vec<T>::size; k++) {
                out[i].v[k] = from_float<T>(0.0f);
            }
        }
    }
}

/* Of a row of `columns` in xs: mean and 1 / sqrt(variance + eps). */
template <int group, class T, int count>
__device__ __forceinline__ void row_statistics(const Vec<T> (&xs)[count], int columns, int lane,
                                               float eps, float &mean, float &rstd) {
    constexpr int N = Vec<T>::size;
    const float inverse = 1.0f / (float)columns;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < count; i++) {
        if ((i * group + lane) * N < columns) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                sum += to_float(xs[i].v[k]);
            }
        }
    }
    mean = group_sum<group>(sum) * inverse;
#pragma unroll
    for (int i = 0; i < count; i++) {
        if ((i * group + lane) * N < columns) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float d = to_float(xs[i].v[k]) - mean;
                squares += d * d;
            }
        }
    }
    rstd = 1.0f / sqrtf(group_sum<group>(squares) * inverse + eps);
}

template <class T> __device__ __forceinline__ T normalized(T x, T w, T b, float mean, float rstd) {
    const float h = (to_float(x) - mean) * rstd;
    return from_float<T>(h * to_float(w) + to_float(b));
}

template <class T>
__device__ __forceinline__ Vec<T> normalized(const Vec<T> &x, const Vec<T> &w, const Vec<T> &b,
                                             float mean, float rstd) {
    Vec<T> y;
#pragma unroll
    for (int k = 0; k < Vec<T>::size; k++) {
        y.v[k] = normalized(x.v[k], w.v[k], b.v[k], mean, rstd);
    }
    return y;
}

#endif
