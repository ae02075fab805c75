/* fp8.cu - fp8_quantize: x = scale q in e4m3, q also transposed.
 *
 * Parallel: first the largest |x| of each block's part, then tiles of 128 x 128 in shared memory,
 *   four elements a thread and access; each block finds the scale anew from the parts' maxima.
 * Bytes: x is read twice (the second time from L2 where it fits), q and its transpose are written.
 */
#include "common.cuh"
#include "fp8.h"

namespace {

constexpr int threads = 256, tile = 128;

/* The bits of |x|: their order is that of the numbers, infinity and NaN come last. */
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
    return __float_as_uint(x) & 0x7fffffff;
}

struct Larger {
    __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const {
        return a > b ? a : b;
    }
};

/* Of a block of `threads`; every thread gets it. */
__device__ __forceinline__ uint32_t block_largest(uint32_t most) {
    __shared__ uint32_t of_warps[threads / 32];
    most = warp_reduce(most, Larger());
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
    __syncthreads();
    return warp_reduce<threads / 32>(of_warps[threadIdx.x % (threads / 32)], Larger());
}

template <class T>
__global__ void __launch_bounds__(threads)
    largest_kernel(const T *x, int64_t count, uint32_t *largest) {
    await_previous();
    constexpr int N = Vec<T>::size;
    const int64_t vectors = count / N, stride = (int64_t)gridDim.x * threads;
    const int64_t first = (int64_t)blockIdx.x * threads + threadIdx.x;
    uint32_t most = 0;
#pragma unroll 4
    for (int64_t i = first; i < vectors; i += stride) {
        const Vec<T> v = load16(x + i * N);
#pragma unroll
        for (int k = 0; k < N; k++) {
            most = max(most, magnitude_bits(to_float(v.v[k])));
        }
    }
    for (int64_t i = vectors * N + first; i < count; i += stride) {
        most = max(most, magnitude_bits(to_float(checked(x + i))));
    }
    most = block_largest(most);
    if (threadIdx.x == 0) {
        checked(largest + blockIdx.x) = most;
    }
}

/* The first `count` bytes of a word; `whole`: all, at a multiple of four. */
__device__ __forceinline__ void store_bytes(uint8_t *to, uint32_t word, int64_t count, bool whole) {
    if (whole && count >= 4) {
        checked((uint32_t *)to) = word;
        return;
    }
    for (int k = 0; k < 4 && k < count; k++) {
        checked(to + k) = (uint8_t)(word >> 8 * k);
    }
}

template <class T>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const T *x, int64_t rows, int64_t columns, const uint32_t *largest, int parts,
                    uint8_t *q, uint8_t *q_t, float *scale) {
    await_previous();
    __shared__ uint32_t words[tile][tile / 4 + 1]; /* four columns of a row */
    uint32_t most = 0;
    for (int i = threadIdx.x; i < parts; i += threads) {
        most = max(most, largest[i]);
    }
    most = block_largest(most);
    const float found = nd_e4m3_scale(most), by = 1.0f / found; /* powers of two */
    const int64_t tiles_across = ceil_div(columns, (int64_t)tile);
    const int64_t first_row = blockIdx.x / tiles_across * tile;
    const int64_t first_column = blockIdx.x % tiles_across * tile;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *scale = found;
    }
#pragma unroll 4
    for (int r = warp; r < tile; r += threads / 32) {
        const int64_t row = first_row + r, column = first_column + 4 * lane;
        uint32_t word = 0;
        const int64_t count = row < rows ? columns - column : 0;
        if (columns % 4 == 0 && count > 0) {
            struct alignas(4 * sizeof(T)) Four {
                T x[4];
            };
            const Four four = checked((const Four *)(x + row * columns + column));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                word |= (uint32_t)nd_to_e4m3(to_float(four.x[k]) * by) << 8 * k;
            }
        } else {
            for (int k = 0; k < 4 && k < count; k++) {
                const float one = to_float(checked(x + row * columns + column + k));
                word |= (uint32_t)nd_to_e4m3(one * by) << 8 * k;
            }
        }
        words[r][lane] = word;
        store_bytes(q + row * columns + column, word, count, columns % 4 == 0);
    }
    __syncthreads();
    for (int group = warp; group < tile / 4; group += threads / 32) {
        const int64_t row = first_row + 4 * lane;
        uint32_t of_rows[4], pairs[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            of_rows[k] = words[4 * lane + k][group];
        }
        pairs[0] = __byte_perm(of_rows[0], of_rows[1], 0x5140);
        pairs[1] = __byte_perm(of_rows[2], of_rows[3], 0x5140);
        pairs[2] = __byte_perm(of_rows[0], of_rows[1], 0x7362);
        pairs[3] = __byte_perm(of_rows[2], of_rows[3], 0x7362);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int64_t column = first_column + 4 * group + k;
            const uint32_t word =
                __byte_perm(pairs[k / 2 * 2], pairs[k / 2 * 2 + 1], k % 2 ? 0x7632 : 0x5410);
            if (column < columns) {
                store_bytes(q_t + column * rows + row, word, rows - row, rows % 4 == 0);
            }
        }
    }
}

} // namespace

nd_status cuda_fp8_quantize(int device, const fp8_quantize_args *a) {
    const char *op = "fp8_quantize";
    const int64_t rows = a->x->shape[0], columns = a->x->shape[1], count = rows * columns;
    if (count == 0) {
        fill_args one = {a->scale, 1.0};
        return cuda_fill(device, &one);
    }
    const unsigned parts = cuda_grid(device, ceil_div(count, (int64_t)threads * 8), 4);
    const int64_t tiles = ceil_div(rows, (int64_t)tile) * ceil_div(columns, (int64_t)tile);
    if (tiles > 0x7fffffff) {
        return nd_error(ND_EVALUE, "%s: x (%lld, %lld) has more than 2^31 tiles of 128 x 128", op,
                        (long long)rows, (long long)columns);
    }
    void *largest;
    ND_TRY(cuda_scratch(device, parts * sizeof(uint32_t), &largest));
    return with_float(op, a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        ND_TRY(cuda_launch(op, device, largest_kernel<T>, parts, threads, 0, data_of<T>(a->x),
                           count, (uint32_t *)largest));
        return cuda_launch(op, device, quantize_kernel<T>, (unsigned)tiles, threads, 0,
                           data_of<T>(a->x), rows, columns, (const uint32_t *)largest, (int)parts,
                           data_of<uint8_t>(a->q), data_of<uint8_t>(a->q_t),
                           data_of<float>(a->scale));
    });
}
