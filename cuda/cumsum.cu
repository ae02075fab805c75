/* cumsum.cu - running sums of rows, in place. float32 for floats, int64 for the rest.
 *
 * Short rows: a warp a row. Long rows: a block walks through a part of a row, tile by tile. Where
 * rows are too few to fill the GPU a row has several parts, whose sums are computed first; a block
 * then adds those before its own in a fixed order. (CUB's scan over a device reads once instead of
 * twice, but sums floats in an order that differs from run to run.)
 * Bytes: the array read and written once; read once more where rows have parts.
 */
#include <cub/block/block_load.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>

#include "common.cuh"

namespace {

constexpr int threads = 256;
constexpr int items = 8, tile = threads * items;
constexpr int64_t warp_row = 512; /* longest row of a warp */

template <class T> constexpr bool is_float = !std::is_integral_v<T>;
template <class T> using Sum = std::conditional_t<is_float<T>, float, long long>;

template <class T> __device__ __forceinline__ Sum<T> widen(T x) {
    if constexpr (is_float<T>) {
        return to_float(x);
    } else {
        return (long long)x;
    }
}
template <class T> __device__ __forceinline__ T narrow(Sum<T> x) {
    if constexpr (is_float<T>) {
        return from_float<T>(x);
    } else {
        return (T)x;
    }
}

template <class T>
__global__ void __launch_bounds__(threads) warp_kernel(T *x, int64_t rows, int64_t n) {
    await_previous();
    const int lane = threadIdx.x & 31;
    for (int64_t row = ((int64_t)blockIdx.x * threads + threadIdx.x) / 32; row < rows;
         row += (int64_t)gridDim.x * (threads / 32)) {
        Sum<T> before = 0;
        for (int64_t base = 0; base < n; base += 32) {
            const bool mine = base + lane < n;
            T *at = x + row * n + base + lane;
            Sum<T> sum = mine ? widen(checked(at)) : 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const Sum<T> other = __shfl_up_sync(0xffffffffu, sum, step);
                sum += lane >= step ? other : 0;
            }
            sum += before;
            if (mine) {
                checked(at) = narrow<T>(sum);
            }
            before = __shfl_sync(0xffffffffu, sum, 31);
        }
    }
}

/* The elements of one of `parts` parts of a row: whole tiles, but for the last. */
__device__ __forceinline__ void part_of(int64_t n, int parts, int part, int64_t *first,
                                        int64_t *end) {
    const int64_t tiles = ceil_div<int64_t>(n, tile);
    *first = tiles * part / parts * tile;
    *end = min(tiles * (part + 1) / parts * tile, n);
}

template <class T>
__global__ void __launch_bounds__(threads)
    sums_kernel(const T *x, int64_t n, int parts, Sum<T> *sums) {
    await_previous();
    using Reduce = cub::BlockReduce<Sum<T>, threads>;
    __shared__ typename Reduce::TempStorage storage;
    int64_t first, end;
    part_of(n, parts, blockIdx.x % parts, &first, &end);
    const T *row = x + blockIdx.x / parts * n;
    Sum<T> sum = 0;
#pragma unroll 8
    for (int64_t i = first + threadIdx.x; i < end; i += threads) {
        sum += widen(checked(row + i));
    }
    sum = Reduce(storage).Sum(sum);
    if (threadIdx.x == 0) {
        checked(sums + blockIdx.x) = sum;
    }
}

template <class T>
__global__ void __launch_bounds__(threads)
    scan_kernel(T *x, int64_t n, int parts, const Sum<T> *sums) {
    await_previous();
    using Load = cub::BlockLoad<T, threads, items, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
    using Store = cub::BlockStore<T, threads, items, cub::BLOCK_STORE_WARP_TRANSPOSE>;
    using Scan = cub::BlockScan<Sum<T>, threads>;
    using Reduce = cub::BlockReduce<Sum<T>, threads>;
    __shared__ union {
        typename Load::TempStorage load;
        typename Store::TempStorage store;
        typename Scan::TempStorage scan;
        typename Reduce::TempStorage reduce;
    } storage;
    __shared__ Sum<T> start;
    const int part = blockIdx.x % parts;
    const int64_t index = blockIdx.x / parts;
    Sum<T> before = 0;
    if (parts > 1) {
        for (int i = threadIdx.x; i < part; i += threads) {
            before += checked(sums + index * parts + i);
        }
        before = Reduce(storage.reduce).Sum(before);
        if (threadIdx.x == 0) {
            start = before;
        }
        __syncthreads();
        before = start;
    }
    int64_t first, end;
    part_of(n, parts, part, &first, &end);
    T *row = x + index * n;
    for (int64_t base = first; base < end; base += tile) {
        T elements[items];
        Sum<T> sums_here[items], total;
        const int count = (int)min((int64_t)tile, end - base);
        if (count == tile) {
            Load(storage.load).Load(row + base, elements);
        } else {
            Load(storage.load).Load(row + base, elements, count, narrow<T>(0));
        }
#pragma unroll
        for (int i = 0; i < items; i++) {
            sums_here[i] = widen(elements[i]);
        }
        __syncthreads();
        Scan(storage.scan).InclusiveSum(sums_here, sums_here, total);
#pragma unroll
        for (int i = 0; i < items; i++) {
            elements[i] = narrow<T>(before + sums_here[i]);
        }
        before += total;
        __syncthreads();
        if (count == tile) {
            Store(storage.store).Store(row + base, elements);
        } else {
            Store(storage.store).Store(row + base, elements, count);
        }
        __syncthreads();
    }
}

} // namespace

nd_status cuda_cumsum(int device, const cumsum_args *a) {
    const char *op = "cumsum";
    const int64_t rows = a->x->shape[0], n = a->x->shape[1];
    if (rows * n == 0) {
        return ND_OK;
    }
    return with_any(op, a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        T *x = data_of<T>(a->x);
        if (n <= warp_row) {
            return cuda_launch(op, device, warp_kernel<T>,
                               cuda_grid(device, ceil_div<int64_t>(rows, threads / 32), 64),
                               threads, 0, x, rows, n);
        }
        const int64_t blocks = 8 * cuda_device_limits(device)->processors;
        const int64_t wanted = ceil_div(blocks, rows), most = ceil_div<int64_t>(n, 2 * tile);
        const int parts = rows >= blocks / 2 ? 1 : (int)(wanted < most ? wanted : most);
        void *sums = nullptr;
        if (parts > 1) {
            ND_TRY(cuda_scratch(device, (size_t)(rows * parts) * sizeof(Sum<T>), &sums));
            ND_TRY(cuda_launch(op, device, sums_kernel<T>, (unsigned)(rows * parts), threads, 0,
                               (const T *)x, n, parts, (Sum<T> *)sums));
        }
        return cuda_launch(op, device, scan_kernel<T>, (unsigned)(rows * parts), threads, 0, x, n,
                           parts, (const Sum<T> *)sums);
    });
}
