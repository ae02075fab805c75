/* attention_float.cuh - float32 tiles of the attention kernels: rows of DP = 64, 128 or 256 columns
 * and 4 floats of padding; 16 x 16 threads, each with rows ty + 16 i and columns tx + 16 j of a
 * product; plain float32 arithmetic.
 */
#ifndef NEEDLE_ATTENTION_FLOAT_CUH
#define NEEDLE_ATTENTION_FLOAT_CUH

#include "attention.cuh"

#ifdef __CUDACC__

namespace attention {

constexpr int FLOAT_THREADS = 256;

template <int DP> constexpr int FLOAT_STRIDE = DP + 4;

template <int DP, int ROWS>
__device__ __forceinline__ void load_float_tile(float *tile, const Rows &rows, const float *head,
                                                Span span, int D) {
    for (int index = threadIdx.x; index < ROWS * DP; index += FLOAT_THREADS) {
        int row = index / DP, d = index % DP;
        bool inside = span.begin + row < span.end && d < D;
        tile[row * FLOAT_STRIDE<DP> + d] =
            inside ? checked(head + (span.begin + row) * rows.t + d) : 0.0f;
    }
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float c) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, c))));
}

/* c[i][j] = row ty + 16 i of a times row tx + 16 j of b, over D columns. */
template <int DP, int M>
__device__ __forceinline__ void float_product_rows(float (&c)[M][M], const float *a, const float *b,
                                                   int D) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < M; i++) {
#pragma unroll
        for (int j = 0; j < M; j++) {
            c[i][j] = 0.0f;
        }
    }
#pragma unroll 2
    for (int d = 0; d < D; d += 4) {
        float4 right[M];
#pragma unroll
        for (int j = 0; j < M; j++) {
            right[j] = *(const float4 *)(b + (tx + 16 * j) * FLOAT_STRIDE<DP> + d);
        }
#pragma unroll
        for (int i = 0; i < M; i++) {
            float4 left = *(const float4 *)(a + (ty + 16 * i) * FLOAT_STRIDE<DP> + d);
#pragma unroll
            for (int j = 0; j < M; j++) {
                c[i][j] = dot4(left, right[j], c[i][j]);
            }
        }
    }
}

/* c[i][g][e] += row ty + 16 i of the weights (16 M wide, padded by 4) times column
 * 64 g + 4 tx + e of b. */
template <int DP, int M>
__device__ __forceinline__ void float_product_columns(float (&c)[M][DP / 64][4], const float *w,
                                                      const float *b) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll 2
    for (int n = 0; n < 16 * M; n++) {
        float weight[M];
#pragma unroll
        for (int i = 0; i < M; i++) {
            weight[i] = w[(ty + 16 * i) * (16 * M + 4) + n];
        }
#pragma unroll
        for (int g = 0; g < DP / 64; g++) {
            float4 x = *(const float4 *)(b + n * FLOAT_STRIDE<DP> + 64 * g + 4 * tx);
#pragma unroll
            for (int i = 0; i < M; i++) {
                c[i][g][0] = fmaf(weight[i], x.x, c[i][g][0]);
                c[i][g][1] = fmaf(weight[i], x.y, c[i][g][1]);
                c[i][g][2] = fmaf(weight[i], x.z, c[i][g][2]);
                c[i][g][3] = fmaf(weight[i], x.w, c[i][g][3]);
            }
        }
    }
}

/* The other way round: own product elements into a weights tile. */
template <int M>
__device__ __forceinline__ void float_store_weights(float *w, const float (&c)[M][M]) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < M; i++) {
#pragma unroll
        for (int j = 0; j < M; j++) {
            w[(ty + 16 * i) * (16 * M + 4) + tx + 16 * j] = c[i][j];
        }
    }
}

template <int DP, int M>
__device__ __forceinline__ void float_store_rows(const float (&c)[M][DP / 64][4],
                                                 const float (&factor)[M], const Rows &rows,
                                                 float *head, Span span, int D, bool add = false) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < M; i++) {
        int row = span.begin + ty + 16 * i;
        if (row >= span.end) {
            continue;
        }
#pragma unroll
        for (int g = 0; g < DP / 64; g++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int d = 64 * g + 4 * tx + e;
                if (d < D) {
                    float *to = head + row * rows.t + d;
                    checked(to) = add ? *to + c[i][g][e] * factor[i] : c[i][g][e] * factor[i];
                }
            }
        }
    }
}

} // namespace attention

#endif

#endif
