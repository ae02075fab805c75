/* sort.cu - rows in order, or the first of it.
 *
 *   rows of at most `block_row` elements   a block sorts a row in shared memory
 *   longer rows                            CUB's radix sort of (row, key) with the index, all rows
 *                                          of a group at once; what does not fit into 64 bits, and
 *                                          up to `few` rows, row by row
 *   the first K of rows above `select_row` select_kernel leaves K candidates of each row, in the
 *                                          order of their indices, and they are sorted. Where rows
 *                                          are too few to fill the GPU, it leaves K of each part of
 *                                          a row first, then K of each part of those
 * All are stable, and equal from run to run.
 *
 * Selection: a block finds the K-th key digit by digit, from the top: a histogram of the digits of
 * the keys whose upper digits are those found, 11 bits at a time, so that float32 takes three
 * passes over the row and one that writes.
 *
 * CUB's algorithms over a device are compiled here alone, for other files too.
 */
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "../csrc/sort_key.h"
#include "common.cuh"

namespace {

constexpr int block_row = 4096;
constexpr int few = 4;
constexpr int select_row = 1024; /* shorter rows are sorted whole */
constexpr int threads = 512;
constexpr int digit_bits = 11, bins = 1 << digit_bits;

template <class K> __device__ __forceinline__ K key_of(K x, nd_sort_order o) {
    if constexpr (sizeof(K) == 8) {
        return nd_sort_key64(x, o);
    } else {
        return nd_sort_key32(x, o);
    }
}
template <class K> __device__ __forceinline__ K element_of(K key, nd_sort_order o) {
    if constexpr (sizeof(K) == 8) {
        return nd_sort_element64(key, o);
    } else {
        return nd_sort_element32(key, o);
    }
}

/* Unsigned type of a key of an element stored as U. */
template <class U> using KeyOf = std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t>;

/* Rows of n elements; from: the indices that they have (nullptr: 0, 1, ...). */
template <class U> struct Rows {
    const U *x;
    const uint32_t *from;
    int64_t rows, n;
};

/* ---- short rows ------------------------------------------------------------------------------ */
template <class U, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    block_kernel(Rows<U> in, nd_sort_order order, int64_t k, U *values, int64_t *indices) {
    await_previous();
    using Key = KeyOf<U>;
    using Sort = cub::BlockRadixSort<Key, THREADS, ITEMS, uint16_t>;
    __shared__ typename Sort::TempStorage storage;
    for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
        Key keys[ITEMS];
        uint16_t places[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int at = threadIdx.x * ITEMS + i;
            places[i] = (uint16_t)at;
            keys[i] = ~(Key)0; /* after all others: equal keys stay in their order */
            if (at < in.n) {
                keys[i] = key_of<Key>(checked(in.x + row * in.n + at), order);
            }
        }
        __syncthreads();
        Sort(storage).SortBlockedToStriped(keys, places, 0, order.bits);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int at = i * THREADS + threadIdx.x;
            if (at < k) {
                checked(values + row * k + at) = (U)element_of<Key>(keys[i], order);
                checked(indices + row * k + at) =
                    in.from == nullptr ? places[i] : checked(in.from + row * in.n + places[i]);
            }
        }
    }
}

template <class U>
nd_status sort_short(int device, Rows<U> in, nd_sort_order order, int64_t k, U *values,
                     int64_t *indices) {
    auto launch = [&](auto size, auto items) -> nd_status {
        constexpr int T = decltype(size)::get, I = decltype(items)::get;
        return cuda_launch("sort", device, block_kernel<U, T, I>, cuda_grid(device, in.rows, 64), T,
                           0, in, order, k, values, indices);
    };
    return in.n <= 128    ? launch(Constant<32>(), Constant<4>())
           : in.n <= 512  ? launch(Constant<128>(), Constant<4>())
           : in.n <= 2048 ? launch(Constant<256>(), Constant<8>())
                          : launch(Constant<512>(), Constant<8>());
}

/* ---- long rows ------------------------------------------------------------------------------- */
/* Key: the row, if any, above the key of the element. */
template <class U, class Key>
__global__ void __launch_bounds__(threads)
    keys_kernel(Rows<U> in, nd_sort_order order, Key *keys, uint32_t *places) {
    await_previous();
    const int64_t size = in.rows * in.n;
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < size;
         i += (int64_t)gridDim.x * threads) {
        const uint32_t row = (uint32_t)i / (uint32_t)in.n; /* size is below 2^31 */
        Key key = key_of<KeyOf<U>>(checked(in.x + i), order);
        if (in.rows > 1) {
            key |= (Key)row << order.bits;
        }
        checked(keys + i) = key;
        checked(places + i) =
            in.from == nullptr ? (uint32_t)i - row * (uint32_t)in.n : checked(in.from + i);
    }
}

template <class U, class Key>
__global__ void __launch_bounds__(threads)
    elements_kernel(const Key *keys, const uint32_t *places, int64_t rows, int64_t n,
                    nd_sort_order order, int64_t k, U *values, int64_t *indices) {
    await_previous();
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < rows * k;
         i += (int64_t)gridDim.x * threads) {
        const uint32_t row = (uint32_t)i / (uint32_t)k;
        const int64_t at = k == n ? i : row * n + (i - row * k);
        const KeyOf<U> key = (KeyOf<U>)(checked(keys + at) & (Key)order.mask);
        checked(values + i) = (U)element_of<KeyOf<U>>(key, order);
        checked(indices + i) = checked(places + at);
    }
}

/* The scratch of a radix sort of so many elements. */
template <class Key> nd_status radix_bytes(int64_t size, int bits, size_t *bytes) {
    *bytes = 0;
    cub::DoubleBuffer<Key> keys(nullptr, nullptr);
    cub::DoubleBuffer<uint32_t> places(nullptr, nullptr);
    CUDA_TRY("sort", cub::DeviceRadixSort::SortPairs(nullptr, *bytes, keys, places, (int)size, 0,
                                                     bits, (cudaStream_t) nullptr));
    return ND_OK;
}

template <class U, class Key>
nd_status sort_group(int device, Rows<U> in, nd_sort_order order, int bits, int64_t k, U *values,
                     int64_t *indices, char *scratch) {
    const int64_t size = in.rows * in.n;
    const size_t list = padded((size_t)size * sizeof(Key));
    const size_t place = padded((size_t)size * 4);
    size_t bytes;
    ND_TRY(radix_bytes<Key>(size, bits, &bytes));
    cub::DoubleBuffer<Key> keys((Key *)scratch, (Key *)(scratch + list));
    cub::DoubleBuffer<uint32_t> places((uint32_t *)(scratch + 2 * list),
                                       (uint32_t *)(scratch + 2 * list + place));
    const unsigned grid = cuda_grid(device, ceil_div<int64_t>(size, threads), 16);
    ND_TRY(cuda_launch("sort", device, keys_kernel<U, Key>, grid, threads, 0, in, order,
                       keys.Current(), places.Current()));
    CUDA_TRY("sort",
             cub::DeviceRadixSort::SortPairs(scratch + 2 * list + 2 * place, bytes, keys, places,
                                             (int)size, 0, bits, cuda_stream(device)));
    return cuda_launch("sort", device, elements_kernel<U, Key>, grid, threads, 0,
                       (const Key *)keys.Current(), (const uint32_t *)places.Current(), in.rows,
                       in.n, order, k, values, indices);
}

/* How many rows go into one radix sort, the bits of its keys, and what it needs of scratch. */
struct Grouping {
    int64_t rows;
    int bits;
    size_t bytes;
};

template <class U> nd_status grouping_of(Rows<U> in, nd_sort_order order, Grouping *g) {
    int row_bits = 0;
    g->rows = sizeof(U) == 8 || in.rows <= few ? 1 : in.rows;
    g->rows = g->rows * in.n < INT32_MAX ? g->rows : INT32_MAX / in.n;
    while ((g->rows - 1) >> row_bits) {
        row_bits++;
    }
    g->bits = order.bits + row_bits;
    const int64_t size = g->rows * in.n;
    const size_t key = g->bits > 32 ? 8 : 4;
    ND_TRY(key == 8 ? radix_bytes<uint64_t>(size, g->bits, &g->bytes)
                    : radix_bytes<uint32_t>(size, g->bits, &g->bytes));
    g->bytes += 2 * padded((size_t)size * key) + 2 * padded((size_t)size * 4);
    return ND_OK;
}

template <class U>
nd_status sort_long(int device, Rows<U> in, nd_sort_order order, Grouping g, int64_t k, U *values,
                    int64_t *indices, char *scratch) {
    for (int64_t row = 0; row < in.rows; row += g.rows) {
        Rows<U> group = in;
        group.x += row * in.n;
        group.from = in.from == nullptr ? nullptr : in.from + row * in.n;
        group.rows = g.rows < in.rows - row ? g.rows : in.rows - row;
        U *to = values + row * k;
        int64_t *to_indices = indices + row * k;
        if constexpr (sizeof(U) == 8) {
            ND_TRY((
                sort_group<U, uint64_t>(device, group, order, g.bits, k, to, to_indices, scratch)));
        } else if (g.bits > 32) {
            ND_TRY((
                sort_group<U, uint64_t>(device, group, order, g.bits, k, to, to_indices, scratch)));
        } else {
            ND_TRY((
                sort_group<U, uint32_t>(device, group, order, g.bits, k, to, to_indices, scratch)));
        }
    }
    return ND_OK;
}

/* ---- the first K of long rows ---------------------------------------------------------------- */
/* Of each of `parts` parts of each row its first k in order, written in the order of indices. */
template <class U>
__global__ void __launch_bounds__(threads)
    select_kernel(Rows<U> in, int parts, int64_t k, nd_sort_order order, U *to, uint32_t *to_from) {
    await_previous();
    using Key = KeyOf<U>;
    constexpr int per_thread = bins / threads, items = 4;
    using Scan = cub::BlockScan<uint32_t, threads>;
    __shared__ typename Scan::TempStorage storage;
    __shared__ uint32_t counts[bins];
    __shared__ uint32_t found[3]; /* digit, keys below it, keys that have it */

    const int64_t row = blockIdx.x / parts, part = blockIdx.x % parts;
    const int64_t first = in.n * part / parts, n = in.n * (part + 1) / parts - first;
    const U *x = in.x + row * in.n + first;

    /* Keys whose bits of `high` are below `prefix` are taken, and `rest` of those that equal it. */
    Key prefix = 0, high = 0;
    uint32_t rest = (uint32_t)k;
    for (int shift = order.bits; shift > 0;) {
        const int width = shift < digit_bits ? shift : digit_bits;
        shift -= width;
        for (int i = threadIdx.x; i < bins; i += threads) {
            counts[i] = 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < n; i += threads) {
            const Key key = key_of<Key>(checked(x + i), order);
            if ((key & high) == prefix) {
                atomicAdd(&counts[(key >> shift) & ((1u << width) - 1)], 1u);
            }
        }
        __syncthreads();
        uint32_t mine[per_thread], before[per_thread];
#pragma unroll
        for (int i = 0; i < per_thread; i++) {
            mine[i] = counts[threadIdx.x * per_thread + i];
        }
        Scan(storage).ExclusiveSum(mine, before);
#pragma unroll
        for (int i = 0; i < per_thread; i++) {
            if (before[i] < rest && rest <= before[i] + mine[i]) {
                found[0] = threadIdx.x * per_thread + i;
                found[1] = before[i];
                found[2] = mine[i];
            }
        }
        __syncthreads();
        prefix |= (Key)found[0] << shift;
        high |= (((Key)1 << width) - 1) << shift;
        rest -= found[1];
        if (rest == found[2]) {
            break; /* all that have this prefix are taken */
        }
        __syncthreads();
    }
    __syncthreads();

    to += blockIdx.x * k;
    to_from += blockIdx.x * k;
    const uint32_t below = (uint32_t)k - rest;
    uint32_t less = 0, equal = 0; /* met so far */
    for (int64_t base = 0; base < n && less + min(equal, rest) < below + rest;
         base += threads * items) {
        U element[items];
        uint32_t kinds[items], met[items], total; /* less, and equal << 16 */
#pragma unroll
        for (int i = 0; i < items; i++) {
            const int64_t at = base + threadIdx.x * items + i;
            kinds[i] = 0;
            if (at < n) {
                element[i] = checked(x + at);
                const Key key = key_of<Key>(element[i], order) & high;
                kinds[i] = key < prefix ? 1u : key == prefix ? 1u << 16 : 0u;
            }
        }
        Scan(storage).ExclusiveSum(kinds, met, total);
#pragma unroll
        for (int i = 0; i < items; i++) {
            const uint32_t equals = equal + (met[i] >> 16);
            if ((kinds[i] & 0xffff) != 0 || (kinds[i] != 0 && equals < rest)) {
                const int64_t at = base + threadIdx.x * items + i;
                const int64_t place = less + (met[i] & 0xffff) + min(equals, rest);
                checked(to + place) = element[i];
                checked(to_from + place) = in.from == nullptr
                                               ? (uint32_t)(first + at)
                                               : checked(in.from + row * in.n + first + at);
            }
        }
        less += total & 0xffff;
        equal += total >> 16;
        __syncthreads();
    }
}

/* Parts of a row to select k of: enough to fill the GPU, each of 4 k elements or more. */
static int parts_of(int device, int64_t rows, int64_t n, int64_t k) {
    const int64_t wanted = ceil_div<int64_t>(2 * cuda_device_limits(device)->processors, rows);
    const int64_t most = n / (4 * k > 8192 ? 4 * k : 8192);
    const int64_t parts = wanted < most ? wanted : most;
    return parts > 1 ? (int)parts : 1;
}

template <class U> nd_status sort_rows(int device, const sort_args *a) {
    const int64_t k = a->values->shape[1];
    const nd_sort_order order = nd_sort_order_of(a->x->dtype, a->descending != 0);
    U *values = (U *)a->values->data;
    int64_t *indices = data_of<int64_t>(a->indices);
    Rows<U> in = {(const U *)a->x->data, nullptr, a->x->shape[0], a->x->shape[1]};
    const bool select = in.n > select_row && k <= in.n / 4;

    /* Scratch: the candidates of one selection, of the next, and what a sort of long rows needs. */
    Rows<U> last = in;
    size_t list = 0, list_from = 0;
    int parts = 1;
    if (select) {
        last.n = k;
        parts = parts_of(device, in.rows, in.n, k);
        const size_t candidates = (size_t)(in.rows * parts * k);
        list = padded(candidates * sizeof(U));
        list_from = padded(candidates * 4);
    }
    Grouping g = {};
    if (last.n > block_row) {
        ND_TRY(grouping_of(last, order, &g));
    }
    const size_t lists = 2 * (list + list_from);
    void *scratch = nullptr;
    ND_TRY(cuda_scratch(device, lists + g.bytes, &scratch));
    char *to = (char *)scratch, *other = to + list + list_from;
    for (bool more = select; more;) {
        ND_TRY(cuda_launch("sort", device, select_kernel<U>, (unsigned)(in.rows * parts), threads,
                           0, in, parts, k, order, (U *)to, (uint32_t *)(to + list)));
        in = {(const U *)to, (const uint32_t *)(to + list), in.rows, parts * k};
        more = parts > 1;
        parts = parts_of(device, in.rows, in.n, k);
        char *filled = to;
        to = other;
        other = filled;
    }
    if (in.n <= block_row) {
        return sort_short(device, in, order, k, values, indices);
    }
    return sort_long(device, in, order, g, k, values, indices, (char *)scratch + lists);
}

template <class Key>
nd_status sort_pairs(const char *op, int device, void *space, size_t *bytes, const Key *keys,
                     Key *sorted, const int32_t *values, int32_t *order, int64_t count, int bits) {
    CUDA_TRY(op, cub::DeviceRadixSort::SortPairs(space, *bytes, keys, sorted,
                                                 (const uint32_t *)values, (uint32_t *)order,
                                                 (int)count, 0, bits, cuda_stream(device)));
    return ND_OK;
}

} // namespace

nd_status cuda_sort_pairs(const char *op, int device, void *space, size_t *bytes,
                          const uint32_t *keys, uint32_t *sorted, const int32_t *values,
                          int32_t *order, int64_t count, int bits) {
    return sort_pairs(op, device, space, bytes, keys, sorted, values, order, count, bits);
}

nd_status cuda_sort_pairs(const char *op, int device, void *space, size_t *bytes,
                          const uint64_t *keys, uint64_t *sorted, const int32_t *values,
                          int32_t *order, int64_t count, int bits) {
    return sort_pairs(op, device, space, bytes, keys, sorted, values, order, count, bits);
}

nd_status cuda_sums_before(const char *op, int device, void *space, size_t *bytes, const int64_t *x,
                           int64_t *sums, int64_t count) {
    CUDA_TRY(
        op, cub::DeviceScan::ExclusiveSum(space, *bytes, x, sums, (int)count, cuda_stream(device)));
    return ND_OK;
}

nd_status cuda_sort(int device, const sort_args *a) {
    ND_TRY(nd_check_sort(a->x, a->values));
    if (a->x->shape[0] * a->values->shape[1] == 0) {
        return ND_OK;
    }
    switch (nd_dtype_size(a->x->dtype)) {
    case 1:
        return sort_rows<uint8_t>(device, a);
    case 2:
        return sort_rows<uint16_t>(device, a);
    case 4:
        return sort_rows<uint32_t>(device, a);
    default:
        return sort_rows<uint64_t>(device, a);
    }
}
