/* block_lists.cu - the blocks that masks keep, and their lists, which attention reads.
 *
 * Blocks: a thread block looks at some rows of tokens of one, all its columns, and sets what memset
 * cleared; all that set a block write the same.
 * Lists: a warp counts the kept columns of a row; a scan over all rows says where each list begins;
 * a warp writes a row's list, a lane's entries after those of the lanes below it. The order of work
 * is a stable radix sort of the rows by (mask, falling count). Integers, no atomics: the same bits
 * each time.
 * Bytes: G T S of a dense mask; G R C of kept twice, 4 E of entries, some 100 a row.
 */
#include "../csrc/block_lists.h"
#include "common.cuh"

namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int64_t part_rows = 64; /* of tokens that a thread block looks at */

struct Dense {
    const uint8_t *data;
    int64_t times, keys, block;
    int64_t rows, columns, parts; /* of blocks; of a block, part_rows each */
    int64_t mask_stride, row_stride, column_stride;
};

__global__ void __launch_bounds__(threads) kept_kernel(Dense d, int64_t items, uint8_t *kept) {
    await_previous();
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t part = item % d.parts, at = item / d.parts, column = at % d.columns;
        const int64_t mask = at / d.columns / d.rows, row = at / d.columns % d.rows;
        const int64_t top = row * d.block + part * part_rows;
        const int64_t bottom = min(min(top + part_rows, (row + 1) * d.block), d.times);
        const int64_t right = min((column + 1) * d.block, d.keys);
        uint32_t found = 0;
        for (int64_t i = top + warp; i < bottom; i += warps) {
            const uint8_t *from = d.data + mask * d.mask_stride + i * d.row_stride;
#pragma unroll 4
            for (int64_t j = column * d.block + lane; j < right; j += 32) {
                found |= checked(from + j * d.column_stride);
            }
        }
        if (__syncthreads_or((int)found) && threadIdx.x == 0) {
            checked(kept + at) = 1;
        }
    }
}

struct Kept {
    const uint8_t *data;
    int64_t all, rows, columns; /* rows of all masks, of one */
    int64_t mask_stride, row_stride, column_stride;

    __device__ __forceinline__ const uint8_t *row(int64_t row) const {
        int64_t mask = row / rows;
        return data + mask * mask_stride + (row - mask * rows) * row_stride;
    }

    /* Which of the 32 columns from `first` on are kept, a bit a lane. */
    __device__ __forceinline__ uint32_t found(const uint8_t *row, int64_t first) const {
        int64_t column = first + (threadIdx.x & 31);
        bool is_kept = column < columns && checked(row + column * column_stride) != 0;
        return __ballot_sync(0xffffffffu, is_kept);
    }
};

__global__ void __launch_bounds__(threads)
    count_kernel(Kept kept, int64_t *counts, uint64_t *keys, int32_t *numbers) {
    await_previous();
    for (int64_t row = (int64_t)blockIdx.x * warps + threadIdx.x / 32; row < kept.all;
         row += (int64_t)gridDim.x * warps) {
        const uint8_t *from = kept.row(row);
        int64_t count = 0;
#pragma unroll 4
        for (int64_t first = 0; first < kept.columns; first += 32) {
            count += __popc(kept.found(from, first));
        }
        if ((threadIdx.x & 31) == 0) {
            int64_t mask = row / kept.rows;
            counts[row] = count;
            keys[row] = (uint64_t)(mask * (kept.columns + 1) + kept.columns - count);
            numbers[row] = (int32_t)(row - mask * kept.rows);
        }
    }
}

/* More than fits: the largest, so that offsets never fall. */
__device__ __forceinline__ int32_t offset_of(int64_t begin) {
    return (int32_t)min(begin, (int64_t)INT32_MAX);
}

__global__ void __launch_bounds__(threads)
    list_kernel(Kept kept, const int64_t *begins, int32_t *offsets, int32_t *entries,
                int64_t size) {
    await_previous();
    const int lane = threadIdx.x & 31;
    const uint32_t below = (1u << lane) - 1;
    for (int64_t row = (int64_t)blockIdx.x * warps + threadIdx.x / 32; row < kept.all;
         row += (int64_t)gridDim.x * warps) {
        const uint8_t *from = kept.row(row);
        const int64_t mask = row / kept.rows;
        int64_t at = begins[row];
        if (lane == 0) {
            offsets[row + mask] = offset_of(at); /* a mask has one more than rows */
        }
#pragma unroll 4
        for (int64_t first = 0; first < kept.columns; first += 32) {
            const uint32_t found = kept.found(from, first);
            const int64_t place = at + __popc(found & below);
            if ((found >> lane & 1) != 0) {
                ND_CHECK_INDEX("entries", row, place, size);
                if (place < size) {
                    checked(entries + place) = (int32_t)(first + lane);
                }
            }
            at += __popc(found);
        }
        if (lane == 0 && row == (mask + 1) * kept.rows - 1) {
            offsets[row + mask + 1] = offset_of(at);
        }
    }
}

} // namespace

nd_status cuda_kept_blocks(int device, const kept_blocks_args *a) {
    const char *op = "kept_blocks";
    ND_TRY(nd_check_kept_blocks(a->dense, a->block, a->kept));
    const int64_t *shape = a->dense->shape, *strides = a->dense->strides;
    const int64_t rows = a->kept->shape[1], columns = a->kept->shape[2];
    const int64_t all = shape[0] * rows * columns;
    if (all == 0) {
        return ND_OK;
    }
    CUDA_TRY(op, cudaMemsetAsync(a->kept->data, 0, (size_t)all, cuda_stream(device)));
    const int64_t parts = ceil_div(a->block < shape[1] ? a->block : shape[1], part_rows);
    const Dense dense = {data_of<uint8_t>(a->dense),
                         shape[1],
                         shape[2],
                         a->block,
                         rows,
                         columns,
                         parts,
                         strides[0],
                         strides[1],
                         strides[2]};
    const unsigned grid = cuda_grid(device, all * parts, 64);
    return cuda_launch(op, device, kept_kernel, grid, threads, 0, dense, all * parts,
                       data_of<uint8_t>(a->kept));
}

nd_status cuda_block_lists(int device, const block_lists_args *a) {
    const char *op = "block_lists";
    const int64_t masks = a->kept->shape[0], rows = a->kept->shape[1], columns = a->kept->shape[2];
    const int64_t all = masks * rows, size = a->entries->shape[0];
    const int64_t *strides = a->kept->strides;
    if (a->offsets->shape[1] != rows + 1) {
        return nd_error(ND_EVALUE, "%s: offsets: axis P is %lld, but %lld rows need %lld", op,
                        (long long)a->offsets->shape[1], (long long)rows, (long long)(rows + 1));
    }
    if (all > INT32_MAX || columns > INT32_MAX || size > INT32_MAX) {
        return nd_error(ND_EVALUE,
                        "%s: kept: rows of all masks, columns and kept blocks must each be below "
                        "2^31",
                        op);
    }
    cudaStream_t stream = cuda_stream(device);
    if (all == 0) {
        CUDA_TRY(op, cudaMemsetAsync(a->offsets->data, 0, (size_t)masks * 4, stream));
        return ND_OK;
    }
    int bits = 1;
    while (masks * (columns + 1) >> bits) {
        bits++;
    }
    size_t sort_bytes = 0, scan_bytes = 0;
    ND_TRY(cuda_sums_before(op, device, nullptr, &scan_bytes, nullptr, nullptr, all));
    ND_TRY(cuda_sort_pairs(op, device, nullptr, &sort_bytes, (uint64_t *)nullptr, nullptr, nullptr,
                           nullptr, all, bits));
    const size_t wide = padded((size_t)all * 8), narrow = padded((size_t)all * 4);
    size_t cub_bytes = sort_bytes > scan_bytes ? sort_bytes : scan_bytes;
    void *scratch;
    ND_TRY(cuda_scratch(device, 4 * wide + narrow + cub_bytes, &scratch));
    char *at = (char *)scratch;
    int64_t *counts = (int64_t *)at, *begins = (int64_t *)(at + wide);
    uint64_t *keys = (uint64_t *)(at + 2 * wide), *sorted = (uint64_t *)(at + 3 * wide);
    int32_t *numbers = (int32_t *)(at + 4 * wide);
    void *cub_space = at + 4 * wide + narrow;

    const Kept kept = {
        data_of<uint8_t>(a->kept), all, rows, columns, strides[0], strides[1], strides[2]};
    const unsigned grid = cuda_grid(device, ceil_div<int64_t>(all, warps), 64);
    ND_TRY(cuda_launch(op, device, count_kernel, grid, threads, 0, kept, counts, keys, numbers));
    ND_TRY(cuda_sums_before(op, device, cub_space, &scan_bytes, counts, begins, all));
    ND_TRY(cuda_launch(op, device, list_kernel, grid, threads, 0, kept, begins,
                       data_of<int32_t>(a->offsets), data_of<int32_t>(a->entries), size));
    return cuda_sort_pairs(op, device, cub_space, &sort_bytes, keys, sorted, numbers,
                           data_of<int32_t>(a->order), all, bits);
}
