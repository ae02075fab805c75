/* reduce.cu - the RED and ARG ops: over the last `axes` axes of x, any strides.
 *
 * Floats accumulate in float32, integers and bool in int64; ARG ops carry (value, index) and prefer
 * the first of equals; a NaN is better than any number, and an empty reduction gives the start value
 * (index 0). The reduced elements of an output are split in a way that depends on the sizes and the
 * device only, each part is folded in a fixed order, and the parts are then folded in a fixed order.
 *
 * Who does what. Rows: neighbouring threads take neighbouring reduced elements, a warp or a block an
 * output (16-byte loads when the reduced elements are contiguous floats). Columns: when the reduced
 * elements are apart but the outputs' are neighbours, neighbouring threads take neighbouring outputs.
 * When there are few outputs, several blocks share one and leave parts in scratch, which
 * fold_kernel folds, a warp an output.
 * Bytes: each element once.
 */
#include "common.cuh"

namespace {

enum Types { FLOAT, ANY };

constexpr int threads = 256;

template <class V> __device__ __forceinline__ V lowest();
template <> __device__ __forceinline__ float lowest<float>() { return -INFINITY; }
template <> __device__ __forceinline__ int64_t lowest<int64_t>() { return INT64_MIN; }
template <class V> __device__ __forceinline__ V highest();
template <> __device__ __forceinline__ float highest<float>() { return INFINITY; }
template <> __device__ __forceinline__ int64_t highest<int64_t>() { return INT64_MAX; }

#define ND_LOWEST lowest<V>()
#define ND_HIGHEST highest<V>()

/* A folding rule: Part is what is folded, start() the empty fold, take(x, r) that of one element at
 * reduced index r, combine(a, b) is associative up to rounding, a before b. */
#define RED(name, types, start_value, combine_text, map_text)                               \
    template <class V> struct name##_fold {                                                 \
        typedef V Part;                                                                     \
        static __device__ __forceinline__ Part start() { return (V)(start_value); }         \
        static __device__ __forceinline__ Part take(V x, int64_t) { return (V)(map_text); } \
        static __device__ __forceinline__ Part combine(Part a, Part b) {                    \
            return (V)(combine_text);                                                       \
        }                                                                                   \
        static __device__ __forceinline__ V value(Part a) { return a; }                     \
    };
#define ARG(name, better)                                                              \
    template <class V> struct name##_fold {                                            \
        typedef Found<V> Part;                                                         \
        static __device__ __forceinline__ bool beats(V a, V b) { return better; }      \
        static __device__ __forceinline__ Part start() { return {(V)0, -1}; }          \
        static __device__ __forceinline__ Part take(V x, int64_t r) { return {x, r}; } \
        static __device__ __forceinline__ Part combine(Part p, Part q) {               \
            if (p.index < 0 || q.index < 0) {                                          \
                return p.index < 0 ? q : p;                                            \
            }                                                                          \
            V a = p.value, b = q.value;                                                \
            bool p_nan = a != a, q_nan = b != b;                                       \
            bool p_wins = p_nan || q_nan ? p_nan && !q_nan : beats(a, b);              \
            bool q_wins = p_nan || q_nan ? q_nan && !p_nan : beats(b, a);              \
            return p_wins || (!q_wins && p.index < q.index) ? p : q;                   \
        }                                                                              \
        static __device__ __forceinline__ int64_t value(Part a) {                      \
            return a.index < 0 ? 0 : a.index;                                          \
        }                                                                              \
    };

template <class V> struct Found {
    V value;
    int64_t index; /* -1: none yet */
};

#include "../csrc/ops.def"

__device__ __forceinline__ float shuffle_xor(float v, int mask) {
    return __shfl_xor_sync(0xffffffffu, v, mask);
}
__device__ __forceinline__ int64_t shuffle_xor(int64_t v, int mask) {
    return (int64_t)__shfl_xor_sync(0xffffffffu, (long long)v, mask);
}
template <class V> __device__ __forceinline__ Found<V> shuffle_xor(Found<V> v, int mask) {
    return {shuffle_xor(v.value, mask), shuffle_xor(v.index, mask)};
}

/* The lower lane's part goes first, so that every lane folds in the same order. */
template <class Fold>
__device__ __forceinline__ typename Fold::Part fold_warp(typename Fold::Part part) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
        typename Fold::Part other = shuffle_xor(part, mask);
        part = (threadIdx.x & mask) ? Fold::combine(other, part) : Fold::combine(part, other);
    }
    return part;
}

/* The result is right in thread 0 only. */
template <class Fold>
__device__ __forceinline__ typename Fold::Part fold_block(typename Fold::Part part) {
    __shared__ typename Fold::Part parts[threads / 32];
    part = fold_warp<Fold>(part);
    if ((threadIdx.x & 31) == 0) {
        parts[threadIdx.x >> 5] = part;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < threads / 32; w++) {
            part = Fold::combine(part, parts[w]);
        }
    }
    __syncthreads();
    return part;
}

/* Geometry of one reduction. Split s of output o covers reduced elements [s * chunk, ...). */
struct Plan {
    const void *x;
    nd_dtype dtype;
    Walk<1> kept, reduced; /* kept.size outputs of reduced.size elements each */
    int64_t chunk, splits;
    void *out; /* parts[split * outputs + o] when splits > 1, else the results */
    nd_dtype out_dtype;
};

template <class Fold>
__device__ __forceinline__ void leave(const Plan &p, int64_t split, int64_t o,
                                      typename Fold::Part part) {
    if (p.splits > 1) {
        ((typename Fold::Part *)p.out)[split * p.kept.size + o] = part;
    } else {
        store_as(p.out, o, p.out_dtype, Fold::value(part));
    }
}

/* `group` threads (32 or all) an output and split. Elements of any strides and dtype are read as V;
 * `vectors`: they are contiguous, 16-byte aligned floats V; chunk and the rows are whole vectors. */
template <class Fold, class V, int group, bool vectors>
__global__ void __launch_bounds__(threads) rows_kernel(Plan p) {
    const int lane = threadIdx.x % group;
    const int64_t tasks = p.kept.size * p.splits;
    for (int64_t base = (int64_t)blockIdx.x * (threads / group); base < tasks;
         base += (int64_t)gridDim.x * (threads / group)) {
        int64_t task = base + threadIdx.x / group;
        typename Fold::Part part = Fold::start();
        int64_t o = task % p.kept.size, split = task / p.kept.size;
        if (task < tasks) {
            int64_t at[1] = {0};
            p.kept.add_offsets(o, at);
            int64_t end = min((split + 1) * p.chunk, p.reduced.size);
            if constexpr (vectors) {
                constexpr int N = Vec<V>::size;
                const V *x = (const V *)p.x + at[0];
#pragma unroll 4
                for (int64_t r = split * p.chunk + lane * N; r < end; r += group * N) {
                    Vec<V> v = load16(x + r);
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        part = Fold::combine(part, Fold::take(to_float(v.v[k]), r + k));
                    }
                }
            } else {
                for (int64_t r = split * p.chunk + lane; r < end; r += group) {
                    int64_t from[1] = {at[0]};
                    p.reduced.add_offsets(r, from);
                    part = Fold::combine(part, Fold::take(load_as<V>(p.x, from[0], p.dtype), r));
                }
            }
        }
        part = group == 32 ? fold_warp<Fold>(part) : fold_block<Fold>(part);
        if (lane == 0 && task < tasks) {
            leave<Fold>(p, split, o, part);
        }
    }
}

/* 32 neighbouring outputs a block, 8 threads for each. */
template <class Fold, class V> __global__ void __launch_bounds__(threads) columns_kernel(Plan p) {
    __shared__ typename Fold::Part parts[threads / 32][32];
    const int column = threadIdx.x & 31, row = threadIdx.x >> 5;
    const int64_t tiles = ceil_div<int64_t>(p.kept.size, 32), tasks = tiles * p.splits;
    for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
        int64_t o = task % tiles * 32 + column, split = task / tiles;
        typename Fold::Part part = Fold::start();
        if (o < p.kept.size) {
            int64_t at[1] = {0};
            p.kept.add_offsets(o, at);
            int64_t end = min((split + 1) * p.chunk, p.reduced.size);
#pragma unroll 4
            for (int64_t r = split * p.chunk + row; r < end; r += threads / 32) {
                int64_t from[1] = {at[0]};
                p.reduced.add_offsets(r, from);
                part = Fold::combine(part, Fold::take(load_as<V>(p.x, from[0], p.dtype), r));
            }
        }
        parts[row][column] = part;
        __syncthreads();
        if (row == 0 && o < p.kept.size) {
            for (int k = 1; k < threads / 32; k++) {
                part = Fold::combine(part, parts[k][column]);
            }
            leave<Fold>(p, split, o, part);
        }
        __syncthreads();
    }
}

/* parts[split * outputs + o] -> the results, a warp an output. */
template <class Fold>
__global__ void __launch_bounds__(threads)
    fold_kernel(const typename Fold::Part *parts, int64_t splits, int64_t outputs, void *out,
                nd_dtype out_dtype) {
    const int lane = threadIdx.x & 31;
    for (int64_t o = (int64_t)blockIdx.x * (threads / 32) + (threadIdx.x >> 5); o < outputs;
         o += (int64_t)gridDim.x * (threads / 32)) {
        typename Fold::Part part = Fold::start();
        for (int64_t s = lane; s < splits; s += 32) {
            part = Fold::combine(part, parts[s * outputs + o]);
        }
        part = fold_warp<Fold>(part);
        if (lane == 0) {
            store_as(out, o, out_dtype, Fold::value(part));
        }
    }
}

/* ---- host ------------------------------------------------------------------------------------ */
Walk<1> walk_of(const nd_array *x, int first, int count) {
    nd_array part = *x;
    part.ndim = count;
    for (int d = 0; d < count; d++) {
        part.shape[d] = x->shape[first + d];
        part.strides[d] = x->strides[first + d];
    }
    const nd_array *operands[1] = {&part};
    nd_loop loop;
    nd_collapse(1, operands, &loop);
    return Walk<1>(loop);
}

int64_t last_stride(const Walk<1> &walk) {
    return walk.ndim > 0 ? walk.strides[0][walk.ndim - 1] : 0;
}

bool rows_are_vectors(const Plan &p, int count, size_t size) {
    bool fit = p.reduced.ndim == 1 && p.reduced.strides[0][0] == 1 && p.reduced.size % count == 0 &&
               (uintptr_t)p.x % (count * size) == 0;
    for (int d = 0; d < p.kept.ndim; d++) {
        fit = fit && p.kept.strides[0][d] % count == 0;
    }
    return fit;
}

template <class Fold, class V>
nd_status reduce(const char *op, int device, const nd_array *x, int64_t axes, nd_array *out) {
    typedef typename Fold::Part Part;
    Plan p;
    p.x = x->data;
    p.dtype = x->dtype;
    p.kept = walk_of(x, 0, x->ndim - (int)axes);
    p.reduced = walk_of(x, x->ndim - (int)axes, (int)axes);
    p.out = out->data;
    p.out_dtype = out->dtype;
    const int64_t outputs = p.kept.size, elements = p.reduced.size;
    if (outputs == 0) {
        return ND_OK;
    }
    cudaStream_t stream = cuda_stream(device);
    bool columns = last_stride(p.reduced) != 1 && last_stride(p.kept) == 1 && outputs >= 32;
    bool warps = !columns && elements <= 1024;

    /* Enough blocks to fill the device, and no split shorter than 16 elements a thread. */
    int64_t blocks = columns ? ceil_div<int64_t>(outputs, 32)
                     : warps ? ceil_div<int64_t>(outputs, threads / 32)
                             : outputs;
    int64_t least = columns ? 128 : threads * 16;
    int64_t wanted = ceil_div<int64_t>((int64_t)cuda_device_limits(device)->processors * 8, blocks);
    int64_t most = ceil_div(elements > 0 ? elements : (int64_t)1, least);
    p.splits = warps ? 1 : (wanted < most ? wanted : most);
    p.chunk = ceil_div(ceil_div(elements > 0 ? elements : (int64_t)1, p.splits), (int64_t)16) * 16;
    p.splits = ceil_div(elements > 0 ? elements : (int64_t)1, p.chunk);
    if (p.splits > 1) {
        ND_TRY(cuda_scratch(device, (size_t)(p.splits * outputs) * sizeof(Part), &p.out));
    }
    unsigned grid = cuda_grid(device, blocks * p.splits, 64);

    bool done = false;
    if constexpr (std::is_same_v<V, float>) {
        if (!columns &&
            rows_are_vectors(p, 16 / (int)nd_dtype_size(x->dtype), nd_dtype_size(x->dtype))) {
            done = true;
            ND_TRY(with_float(op, x->dtype, [&](auto tag) -> nd_status {
                using T = typename decltype(tag)::type;
                if (warps) {
                    rows_kernel<Fold, T, 32, true><<<grid, threads, 0, stream>>>(p);
                } else {
                    rows_kernel<Fold, T, threads, true><<<grid, threads, 0, stream>>>(p);
                }
                return ND_OK;
            }));
        }
    }
    if (!done && columns) {
        columns_kernel<Fold, V><<<grid, threads, 0, stream>>>(p);
    } else if (!done && warps) {
        rows_kernel<Fold, V, 32, false><<<grid, threads, 0, stream>>>(p);
    } else if (!done) {
        rows_kernel<Fold, V, threads, false><<<grid, threads, 0, stream>>>(p);
    }
    CUDA_LAUNCHED(op);
    if (p.splits > 1) {
        unsigned fold_grid = cuda_grid(device, ceil_div<int64_t>(outputs, threads / 32), 64);
        fold_kernel<Fold><<<fold_grid, threads, 0, stream>>>((const Part *)p.out, p.splits, outputs,
                                                             out->data, out->dtype);
        CUDA_LAUNCHED(op);
    }
    return ND_OK;
}

/* Sums of a tall matrix's columns: 32 columns a block, 32 threads a column. */
__global__ void __launch_bounds__(1024)
    add_columns_kernel(const float *partial, int64_t rows, int64_t columns, float *to) {
    __shared__ float sums[32][33];
    const int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < columns) {
#pragma unroll 4
        for (int64_t r = threadIdx.y; r < rows; r += 32) {
            sum += partial[r * columns + c];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    __syncthreads();
    if (threadIdx.x == 0) {
        sums[0][threadIdx.y] = sum;
    }
    __syncthreads();
    if (threadIdx.y == 0 && c < columns) {
        to[c] += sums[0][threadIdx.x];
    }
}

} // namespace

nd_status cuda_add_columns(const char *op, int device, const float *partial, int64_t rows,
                           int64_t columns, float *to) {
    add_columns_kernel<<<(unsigned)ceil_div<int64_t>(columns, 32), dim3(32, 32), 0,
                         cuda_stream(device)>>>(partial, rows, columns, to);
    CUDA_LAUNCHED(op);
    return ND_OK;
}

#define RED(name, types, start, combine, map)                                                   \
    nd_status cuda_##name(int device, const name##_args *a) {                                   \
        if (nd_dtype_is_float(a->x->dtype)) {                                                   \
            return reduce<name##_fold<float>, float>(#name, device, a->x, a->axes, a->out);     \
        }                                                                                       \
        if constexpr (types == ANY) {                                                           \
            return reduce<name##_fold<int64_t>, int64_t>(#name, device, a->x, a->axes, a->out); \
        }                                                                                       \
        return nd_error(ND_ETYPE, #name ": dtype %s: must be float32, bfloat16 or float16",     \
                        nd_dtype_name(a->x->dtype));                                            \
    }
#define ARG(name, better) RED(name, ANY, , , )
#include "../csrc/ops.def"
