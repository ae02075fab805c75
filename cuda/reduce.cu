/* reduce.cu - the RED and ARG ops: over the last `axes` axes of x, any strides.
 *
 * Floats accumulate in float32, integers and bool in int64; ARG ops carry (value, index) and prefer
 * the first of equals; a NaN is better than any number, and an empty reduction gives the start
 * value (index 0). The reduced elements of an output are split in a way that depends on the device
 * and the sizes only, the number of outputs among them; each part is folded in a fixed order, and
 * the parts are then folded in a fixed order. Dense rows of up to 1,024 elements are never split
 * (optim.chunk_norms relies on it).
 *
 * Parallel: a thread loads vectors: 16 bytes where the elements that lie side by side are
 * aligned floats, else an element, and several before it folds the first. Rows: neighbouring
 * threads take neighbouring reduced elements, a warp or a block an output. Columns: when the
 * reduced elements are apart but the outputs' are neighbours, neighbouring threads take
 * neighbouring outputs, as many as a vector has elements each, and the block's rows of threads take
 * the reduced elements in turn. When there are few outputs, several blocks share one and leave
 * parts in scratch, which fold_kernel folds, as columns.
 * Bytes: each element once, and 8 (ARG: 32) for each part. Instructions: about 4 an element for a
 * sum, and 6 for an ARG, 4 of them comparisons and selections, of which a multiprocessor does 64 a
 * clock; HBM brings it 9 two-byte elements.
 */
#include <algorithm>

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

template <class V> struct Found {
    V value;
    int64_t index;
};

/* A folding rule: start() is the empty Part; add(part, x, r) folds elements r, r + 1, ... into a
 * part of smaller r, sums as a tree, so that additions overlap; combine(a, b) takes parts of any
 * elements and is associative up to rounding. */
#define RED(name, types, start_value, combine_text, map_text)                              \
    template <class V> struct name##_fold {                                                \
        typedef V Part;                                                                    \
        static __device__ __forceinline__ Part start() { return (V)(start_value); }        \
        static __device__ __forceinline__ V map(V x) { return (V)(map_text); }             \
        static __device__ __forceinline__ Part combine(Part a, Part b) {                   \
            return (V)(combine_text);                                                      \
        }                                                                                  \
        template <int N>                                                                   \
        static __device__ __forceinline__ void add(Part &part, const V (&x)[N], int64_t) { \
            V tree[N];                                                                     \
            _Pragma("unroll") for (int k = 0; k < N; k++) { tree[k] = map(x[k]); }         \
            _Pragma("unroll") for (int step = N / 2; step > 0; step /= 2) {                \
                _Pragma("unroll") for (int k = 0; k < step; k++) {                         \
                    tree[k] = combine(tree[k], tree[k + step]);                            \
                }                                                                          \
            }                                                                              \
            part = combine(part, tree[0]);                                                 \
        }                                                                                  \
        static __device__ __forceinline__ V value(Part a) { return a; }                    \
    };

/* The empty fold is the worst value at no index. An element of that value is not better and leaves
 * it so: where nothing is better than the worst, all are equal and the first is the answer. */
constexpr int64_t no_index = INT64_MAX;
#define ARG(name, better)                                                                     \
    template <class V> struct name##_fold {                                                   \
        typedef Found<V> Part;                                                                \
        static __device__ __forceinline__ bool beats(V a, V b) { return better; }             \
        /* x beats best, or is the first NaN: written so, two comparisons do. */              \
        static __device__ __forceinline__ bool replaces(V best, V x) {                        \
            return !(beats(best, x) || best == x) && best == best;                            \
        }                                                                                     \
        static __device__ __forceinline__ Part start() {                                      \
            return {beats(highest<V>(), lowest<V>()) ? lowest<V>() : highest<V>(), no_index}; \
        }                                                                                     \
        static __device__ __forceinline__ Part combine(Part p, Part q) {                      \
            bool q_wins = replaces(p.value, q.value), p_wins = replaces(q.value, p.value);    \
            return q_wins || (!p_wins && q.index < p.index) ? q : p;                          \
        }                                                                                     \
        template <int N>                                                                      \
        static __device__ __forceinline__ void add(Part &part, const V (&x)[N], int64_t r) {  \
            V best = x[0];                                                                    \
            int at = 0;                                                                       \
            _Pragma("unroll") for (int k = 1; k < N; k++) {                                   \
                bool wins = replaces(best, x[k]);                                             \
                best = wins ? x[k] : best;                                                    \
                at = wins ? k : at;                                                           \
            }                                                                                 \
            bool wins = replaces(part.value, best);                                           \
            part.value = wins ? best : part.value;                                            \
            part.index = wins ? r + at : part.index;                                          \
        }                                                                                     \
        static __device__ __forceinline__ int64_t value(Part a) {                             \
            return a.index == no_index ? 0 : a.index;                                         \
        }                                                                                     \
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

/* N parts a thread, over the threads whose numbers differ by a multiple of `width` (a power of
 * two); the results are right in threads 0 to width - 1. */
template <class Fold, int N>
__device__ __forceinline__ void fold_columns(typename Fold::Part (&part)[N], int width) {
    __shared__ typename Fold::Part parts[N][threads / 2];
    const int t = threadIdx.x;
    for (int step = threads / 2; step >= width; step /= 2) {
        if (t >= step && t < 2 * step) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                parts[k][t - step] = part[k];
            }
        }
        __syncthreads();
        if (t < step) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                part[k] = Fold::combine(part[k], parts[k][t]);
            }
        }
        __syncthreads();
    }
}

/* Geometry of one reduction. Split s of output o covers reduced elements [s * chunk, ...). */
struct Plan {
    const void *x;
    nd_dtype dtype;
    Walk<1> kept, reduced; /* kept.size outputs of reduced.size elements each */
    int64_t chunk, splits;
    int width; /* columns: neighbouring threads that take neighbouring outputs, a power of two */
    void *out; /* parts[split * outputs + o] when splits > 1, else the results */
    nd_dtype out_dtype;
    bool wide_stores; /* results are of x's dtype, and leave 16 bytes at a time */
};

/* The offset of an element, as Walk's, in a loop that stays one: it runs once an output, and
 * unrolled its divisions take the registers of the loads. */
template <class I> __device__ __forceinline__ int64_t rolled(const Walk<1> &walk, I i) {
    int64_t offset = 0;
#pragma unroll 1
    for (int d = walk.ndim - 1; d > 0; d--) {
        I next = i / (I)walk.shape[d];
        offset += (int64_t)(i - next * (I)walk.shape[d]) * walk.strides[0][d];
        i = next;
    }
    return walk.ndim > 0 ? offset + (int64_t)i * walk.strides[0][0] : offset;
}
__device__ __forceinline__ int64_t offset_of(const Walk<1> &walk, int64_t i) {
    return walk.size <= 0x7fffffff ? rolled(walk, (uint32_t)i) : rolled(walk, (uint64_t)i);
}

template <class Fold>
__device__ __forceinline__ void leave(const Plan &p, int64_t split, int64_t o,
                                      typename Fold::Part part) {
    if (p.splits > 1) {
        checked((typename Fold::Part *)p.out + split * p.kept.size + o) = part;
    } else {
        store_as(p.out, o, p.out_dtype, Fold::value(part));
    }
}

/* One load of a thread: 16 bytes of floats T (`vectors`), or an element. Where T is
 * int64_t it is one of any integer dtype. */
template <class T, bool vectors> struct Load {
    typedef std::conditional_t<std::is_same_v<T, int64_t>, int64_t, float> V;
    static constexpr int size = vectors ? Vec<T>::size : 1;
    static constexpr int ahead = 4; /* loads before the first is folded */
    std::conditional_t<vectors, uint4, T> raw;

    __device__ __forceinline__ void load(const void *x, int64_t at, nd_dtype dtype) {
        if constexpr (vectors) {
            raw = checked((const uint4 *)((const T *)x + at));
        } else if constexpr (std::is_same_v<T, int64_t>) {
            raw = load_as<int64_t>(x, at, dtype);
        } else {
            raw = checked((const T *)x + at);
        }
    }
    __device__ __forceinline__ void get(V (&x)[size]) const {
        if constexpr (vectors) {
            const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int w = 0; w < 4; w++) {
                if constexpr (sizeof(T) == 2) {
                    const float2 pair = unpack_pair<T>(words[w]);
                    x[2 * w] = pair.x;
                    x[2 * w + 1] = pair.y;
                } else {
                    x[w] = __uint_as_float(words[w]);
                }
            }
        } else if constexpr (std::is_same_v<T, int64_t>) {
            x[0] = raw;
        } else {
            x[0] = to_float(raw);
        }
    }
};

template <class L, int ahead, class Offset, class Take>
__device__ __forceinline__ void scan_ahead(const Plan &p, int64_t first, int64_t end, int64_t step,
                                           Offset offset, Take take) {
    for (; first < end; first += ahead * step) {
        L loads[ahead];
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            if (first + u * step < end) {
                loads[u].load(p.x, offset(first + u * step), p.dtype);
            }
        }
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            if (first + u * step < end) {
                typename L::V x[L::size];
                loads[u].get(x);
                take(x, first + u * step);
            }
        }
    }
}

/* take(values, r) of the vectors at r = first, first + step, ... before `end` of the reduced
 * elements, which begin at `from`. One axis is read ahead; several cost divisions, and the code of
 * those is long. */
template <class L, class Take>
__device__ __forceinline__ void scan(const Plan &p, int64_t from, int64_t first, int64_t end,
                                     int64_t step, Take take) {
    if (p.reduced.ndim == 1) {
        const int64_t stride = p.reduced.strides[0][0];
        scan_ahead<L, L::ahead>(
            p, first, end, step, [&](int64_t r) { return from + r * stride; }, take);
    } else {
        scan_ahead<L, 1>(
            p, first, end, step, [&](int64_t r) { return from + offset_of(p.reduced, r); }, take);
    }
}

/* `group` threads (32 or all) an output and split. `vectors`: vectors of reduced elements,
 * and chunks are whole vectors. */
template <class Fold, class T, int group, bool vectors>
__global__ void __launch_bounds__(threads) rows_kernel(Plan p) {
    await_previous();
    typedef Load<T, vectors> L;
    const int lane = threadIdx.x % group;
    const int64_t tasks = p.kept.size * p.splits;
    for (int64_t base = (int64_t)blockIdx.x * (threads / group); base < tasks;
         base += (int64_t)gridDim.x * (threads / group)) {
        int64_t task = base + threadIdx.x / group;
        int64_t split = p.splits > 1 ? task / p.kept.size : 0, o = task - split * p.kept.size;
        typename Fold::Part part = Fold::start();
        if (task < tasks) {
            scan<L>(p, offset_of(p.kept, o), split * p.chunk + lane * L::size,
                    min((split + 1) * p.chunk, p.reduced.size), group * L::size,
                    [&](const typename L::V(&x)[L::size], int64_t r) { Fold::add(part, x, r); });
        }
        part = group == 32 ? fold_warp<Fold>(part) : fold_block<Fold>(part);
        if (lane == 0 && task < tasks) {
            leave<Fold>(p, split, o, part);
        }
    }
}

/* A block takes `width` vectors of neighbouring outputs, threads / width reduced elements at a
 * time. */
template <class Fold, class T, bool vectors>
__global__ void __launch_bounds__(threads) columns_kernel(Plan p) {
    await_previous();
    typedef Load<T, vectors> L;
    const int column = threadIdx.x & (p.width - 1), row = threadIdx.x / p.width;
    const int64_t tiles = ceil_div<int64_t>(p.kept.size, p.width * L::size);
    const int64_t tasks = tiles * p.splits;
    for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
        int64_t split = p.splits > 1 ? task / tiles : 0;
        int64_t o = ((task - split * tiles) * p.width + column) * L::size;
        typename Fold::Part part[L::size];
#pragma unroll
        for (int k = 0; k < L::size; k++) {
            part[k] = Fold::start();
        }
        if (o < p.kept.size) {
            scan<L>(p, offset_of(p.kept, o), split * p.chunk + row,
                    min((split + 1) * p.chunk, p.reduced.size), threads / p.width,
                    [&](const typename L::V(&x)[L::size], int64_t r) {
#pragma unroll
                        for (int k = 0; k < L::size; k++) {
                            typename L::V one[1] = {x[k]};
                            Fold::add(part[k], one, r);
                        }
                    });
        }
        fold_columns<Fold>(part, p.width);
        if (row != 0 || o >= p.kept.size) {
            continue;
        }
        if constexpr (vectors) {
            if (p.wide_stores) {
                Vec<T> values;
#pragma unroll
                for (int k = 0; k < L::size; k++) {
                    values.v[k] = from_float<T>((float)Fold::value(part[k]));
                }
                store16((T *)p.out + o, values);
                continue;
            }
        }
#pragma unroll
        for (int k = 0; k < L::size; k++) {
            leave<Fold>(p, split, o + k, part[k]);
        }
    }
}

/* parts[split * outputs + o] -> the results. */
template <class Fold>
__global__ void __launch_bounds__(threads)
    fold_kernel(const typename Fold::Part *parts, int64_t splits, int64_t outputs, int width,
                void *out, nd_dtype out_dtype) {
    await_previous();
    const int column = threadIdx.x & (width - 1), row = threadIdx.x / width;
    for (int64_t base = (int64_t)blockIdx.x * width; base < outputs;
         base += (int64_t)gridDim.x * width) {
        int64_t o = base + column;
        typename Fold::Part part[1] = {Fold::start()};
        if (o < outputs) {
#pragma unroll 4
            for (int64_t s = row; s < splits; s += threads / width) {
                part[0] = Fold::combine(part[0], parts[s * outputs + o]);
            }
        }
        fold_columns<Fold>(part, width);
        if (row == 0 && o < outputs) {
            store_as(out, o, out_dtype, Fold::value(part[0]));
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

/* Do the elements of the last axis lie side by side? */
bool is_dense(const Walk<1> &walk) { return walk.ndim > 0 && walk.strides[0][walk.ndim - 1] == 1; }

/* Can 16 bytes be read at a time along the last axis of `dense`? */
bool vectors_fit(const Plan &p, const Walk<1> &dense, const Walk<1> &other) {
    const int64_t size = (int64_t)nd_dtype_size(p.dtype), count = 16 / size;
    bool fit = nd_dtype_is_float(p.dtype) && is_dense(dense) && is_aligned16(p.x) &&
               dense.shape[dense.ndim - 1] % count == 0;
    for (int d = 0; d < dense.ndim - 1; d++) {
        fit = fit && dense.strides[0][d] % count == 0;
    }
    for (int d = 0; d < other.ndim; d++) {
        fit = fit && other.strides[0][d] % count == 0;
    }
    return fit;
}

/* Threads of a block that take neighbouring columns: a warp, or fewer where the columns that lie
 * side by side are fewer, and more where there are too few rows for all threads. */
int columns_width(int64_t columns, int64_t rows) {
    int width = 32;
    while (width > 1 && width / 2 >= columns && threads / width < rows) {
        width /= 2;
    }
    while (width < threads && threads / width > rows) {
        width *= 2;
    }
    return width;
}

template <class Fold, class T, bool vectors>
nd_status launch(const char *op, int device, const Plan &p, bool columns, bool warps,
                 unsigned grid) {
    auto kernel = columns ? columns_kernel<Fold, T, vectors>
                  : warps ? rows_kernel<Fold, T, 32, vectors>
                          : rows_kernel<Fold, T, threads, vectors>;
    return cuda_launch(op, device, kernel, grid, threads, 0, p);
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
    const int64_t outputs = p.kept.size;
    const int64_t elements = p.reduced.size > 0 ? p.reduced.size : 1;
    if (outputs == 0) {
        return ND_OK;
    }
    const int processors = cuda_device_limits(device)->processors;
    const bool columns = is_dense(p.kept) && !is_dense(p.reduced) && outputs > 1;
    const bool vectors =
        columns ? vectors_fit(p, p.kept, p.reduced) : vectors_fit(p, p.reduced, p.kept);
    const int together = vectors ? 16 / (int)nd_dtype_size(x->dtype) : 1;
    p.width = columns ? columns_width(ceil_div<int64_t>(p.kept.shape[p.kept.ndim - 1], together),
                                      elements)
                      : 1;
    /* A warp an output where the row is short, or not long and there are warps' worth of rows. */
    const bool warps =
        !columns && (elements <= 1024 || (elements <= 8192 && outputs >= (int64_t)processors * 32));

    /* Enough blocks to fill the device, and no split shorter than 16 elements a thread. */
    int64_t blocks = ceil_div<int64_t>(outputs, columns ? p.width * together
                                                : warps ? threads / 32
                                                        : 1);
    int64_t least = columns ? threads / p.width * 16 : threads * 16;
    int64_t wanted = ceil_div<int64_t>((int64_t)processors * 8, blocks);
    int64_t most = ceil_div(elements, least);
    p.splits = warps ? 1 : (wanted < most ? wanted : most);
    p.chunk = ceil_div(ceil_div(elements, p.splits), (int64_t)16) * 16;
    p.splits = ceil_div(elements, p.chunk);
    if (p.splits > 1) {
        ND_TRY(cuda_scratch(device, (size_t)(p.splits * outputs) * sizeof(Part), &p.out));
    }
    p.wide_stores = p.splits == 1 && out->dtype == x->dtype && is_aligned16(out->data);
    const unsigned grid = cuda_grid(device, blocks * p.splits, 64);

    if constexpr (std::is_same_v<V, float>) {
        ND_TRY(with_float(op, x->dtype, [&](auto tag) -> nd_status {
            using T = typename decltype(tag)::type;
            return vectors ? launch<Fold, T, true>(op, device, p, columns, warps, grid)
                           : launch<Fold, T, false>(op, device, p, columns, warps, grid);
        }));
    } else {
        ND_TRY((launch<Fold, V, false>(op, device, p, columns, warps, grid)));
    }
    if (p.splits > 1) {
        const int width = columns_width(outputs, p.splits);
        const unsigned fold_grid = cuda_grid(device, ceil_div<int64_t>(outputs, width), 64);
        ND_TRY(cuda_launch(op, device, fold_kernel<Fold>, fold_grid, threads, 0,
                           (const Part *)p.out, p.splits, outputs, width, out->data, out->dtype));
    }
    return ND_OK;
}

} // namespace

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
