/* embedding.cu - rows of a table by id, and the gradient of the table.
 *
 *   forward   y[n] = w[ids[n]]; an id outside [0, V) gives a row of NaN
 *   backward  dw[v] += sum over {n: ids[n] = v} of dy[n], in float32; other ids are skipped
 *
 * Forward: a warp a row, 16 bytes a lane. Rows of w may lie apart, or overlap. Reads and writes N C
 * elements.
 *
 * Backward, without atomics. Ids are sorted together with their positions (a stable radix sort over
 * as many bits as V needs). The sorted positions are cut into chunks of 32; one warp walks through
 * a chunk for one strip of columns and keeps the running sum of the current id in registers. A
 * segment (the positions of one id) inside one chunk is added to dw there and then. Of a segment
 * that crosses chunks each chunk leaves its part in scratch, at `head` when the segment began in an
 * earlier chunk, else at `tail`, and crossing_kernel adds the parts, in order. Text has ids in
 * every thirtieth position, so segments of any length must be cheap: the walk does not see their
 * length.
 * Bytes: dy once, dw read and written where touched, 8 C N / 32 of parts written and read, the
 * sort.
 */
#include "common.cuh"

namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int chunk_size = 32; /* a chunk's ids live in the lanes of its warp */

/* ---- forward --------------------------------------------------------------------------------- */
template <class T, int N>
__global__ void __launch_bounds__(threads)
    gather_kernel(const int32_t *ids, const T *w, T *y, int64_t rows, int64_t vocabulary,
                  int64_t columns, int64_t stride) {
    await_previous();
    const int lane = threadIdx.x & 31;
    for (int64_t row = (int64_t)blockIdx.x * warps + threadIdx.x / 32; row < rows;
         row += (int64_t)gridDim.x * warps) {
        const int64_t id = checked(ids + row);
        ND_CHECK_INDEX("ids", row, id, vocabulary);
        const bool valid = id >= 0 && id < vocabulary;
        const T *from = w + (valid ? id : 0) * stride;
        T *to = y + row * columns;
#pragma unroll 4
        for (int64_t c = lane * N; c < columns; c += 32 * N) {
            if constexpr (N == 1) {
                checked(to + c) = valid ? checked(from + c) : from_float<T>(NAN);
            } else {
                Vec<T> v;
                if (valid) {
                    v = load16(from + c);
                } else {
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        v.v[k] = from_float<T>(NAN);
                    }
                }
                store16(to + c, v);
            }
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */
/* Ids out of range become `vocabulary`, which sorts after all others. */
__global__ void __launch_bounds__(threads)
    keys_kernel(const int32_t *ids, uint32_t *keys, int32_t *positions, int64_t rows,
                int64_t vocabulary) {
    await_previous();
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < rows;
         i += (int64_t)gridDim.x * threads) {
        int32_t id = checked(ids + i);
        ND_CHECK_INDEX("ids", i, id, vocabulary);
        checked(keys + i) = id >= 0 && id < vocabulary ? (uint32_t)id : (uint32_t)vocabulary;
        checked(positions + i) = (int32_t)i;
    }
}

/* Adds, or overwrites when the target is scratch. */
template <int N> __device__ __forceinline__ void put(float *to, const float (&sum)[N], bool add) {
    if constexpr (N == 1) {
        checked(to) = add ? checked(to) + sum[0] : sum[0];
    } else {
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            float4 v = make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
            if (add) {
                float4 old = *(const float4 *)(to + k);
                v = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
            }
            __stwb(&checked((float4 *)(to + k)), v);
        }
    }
}

template <int N> __device__ __forceinline__ void get(const float *from, float (&out)[N]) {
    if constexpr (N == 1) {
        out[0] = checked(from);
    } else {
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            float4 v = checked((const float4 *)(from + k));
            out[k] = v.x;
            out[k + 1] = v.y;
            out[k + 2] = v.z;
            out[k + 3] = v.w;
        }
    }
}

template <class T, int N>
__global__ void __launch_bounds__(threads)
    chunk_kernel(const uint32_t *keys, const int32_t *positions, const T *dy, float *dw,
                 float *heads, float *tails, int64_t rows, int64_t vocabulary, int64_t columns) {
    await_previous();
    constexpr int ahead = 4; /* rows loaded before the first of them is added */
    const int lane = threadIdx.x & 31;
    const int64_t strips = ceil_div<int64_t>(columns, 32 * N);
    const int64_t tasks = ceil_div<int64_t>(rows, chunk_size) * strips;
    for (int64_t task = (int64_t)blockIdx.x * warps + threadIdx.x / 32; task < tasks;
         task += (int64_t)gridDim.x * warps) {
        const int64_t chunk = task / strips, first = chunk * chunk_size;
        const int64_t column = (task % strips * 32 + lane) * N;
        const bool mine = column < columns;
        const int count = (int)min((int64_t)chunk_size, rows - first);
        const uint32_t none = (uint32_t)vocabulary;
        const uint32_t my_key = lane < count ? checked(keys + (first + lane)) : none;
        const int32_t my_position = lane < count ? checked(positions + (first + lane)) : 0;
        const uint32_t before = first > 0 ? keys[first - 1] : none;
        const uint32_t after = first + count < rows ? keys[first + count] : none;

        float sum[N];
#pragma unroll
        for (int k = 0; k < N; k++) {
            sum[k] = 0.0f;
        }
        bool began_before = __shfl_sync(0xffffffffu, my_key, 0) == before;
        for (int base = 0; base < count; base += ahead) {
            Vec<T> v[ahead];
            T one[ahead];
            uint32_t key[ahead], next[ahead];
#pragma unroll
            for (int u = 0; u < ahead; u++) {
                const int at = base + u; /* at most 31: ahead divides 32 */
                key[u] = __shfl_sync(0xffffffffu, my_key, at);
                next[u] = __shfl_sync(0xffffffffu, my_key, at < 31 ? at + 1 : 31);
                next[u] = at + 1 < count ? next[u] : after;
                const int64_t position = __shfl_sync(0xffffffffu, my_position, at);
                if (mine && at < count && key[u] != none) {
                    if constexpr (N == 1) {
                        one[u] = checked(dy + position * columns + column);
                    } else {
                        v[u] = load16(dy + position * columns + column);
                    }
                }
            }
#pragma unroll
            for (int u = 0; u < ahead; u++) {
                if (base + u < count && key[u] != none) {
                    if (mine) {
#pragma unroll
                        for (int k = 0; k < N; k++) {
                            if constexpr (N == 1) {
                                sum[k] += to_float(one[u]);
                            } else {
                                sum[k] += to_float(v[u].v[k]);
                            }
                        }
                    }
                    const bool goes_on = base + u + 1 == count && next[u] == key[u];
                    if (goes_on || next[u] != key[u]) {
                        const bool inside = !began_before && !goes_on;
                        float *to = began_before ? heads + chunk * columns
                                    : goes_on    ? tails + chunk * columns
                                                 : dw + (int64_t)key[u] * columns;
                        if (mine) {
                            put<N>(to + column, sum, inside);
                        }
#pragma unroll
                        for (int k = 0; k < N; k++) {
                            sum[k] = 0.0f;
                        }
                        began_before = false;
                    }
                }
            }
        }
    }
}

/* A warp for each chunk in which a segment begins that goes on in the next chunk, and each
 * strip. */
template <int N>
__global__ void __launch_bounds__(threads)
    crossing_kernel(const uint32_t *keys, const float *heads, const float *tails, float *dw,
                    int64_t rows, int64_t vocabulary, int64_t columns) {
    await_previous();
    const int lane = threadIdx.x & 31;
    const int64_t strips = ceil_div<int64_t>(columns, 32 * N);
    const int64_t chunks = ceil_div<int64_t>(rows, chunk_size), tasks = (chunks - 1) * strips;
    for (int64_t task = (int64_t)blockIdx.x * warps + threadIdx.x / 32; task < tasks;
         task += (int64_t)gridDim.x * warps) {
        const int64_t chunk = task / strips, first = chunk * chunk_size;
        const int64_t column = (task % strips * 32 + lane) * N;
        const int64_t end = first + chunk_size; /* < rows: this is not the last chunk */
        const uint32_t key = keys[end - 1];
        if (key == (uint32_t)vocabulary || keys[end] != key ||
            (first > 0 && keys[first - 1] == key)) {
            continue; /* the whole warp */
        }
        /* The last chunk that begins with the key; the lanes look at 32 chunks at once. */
        int64_t last = chunk + 1;
        int run = 32;
        while (run == 32) {
            const int64_t c = last + 1 + lane;
            const bool same = c < chunks && keys[c * chunk_size] == key;
            const uint32_t others = ~__ballot_sync(0xffffffffu, same);
            run = others ? __ffs((int)others) - 1 : 32;
            last += run;
        }
        if (column >= columns) {
            continue;
        }
        float sum[N], part[N];
        get<N>(tails + chunk * columns + column, sum);
#pragma unroll 4
        for (int64_t c = chunk + 1; c <= last; c++) {
            get<N>(heads + c * columns + column, part);
#pragma unroll
            for (int k = 0; k < N; k++) {
                sum[k] += part[k];
            }
        }
        put<N>(dw + (int64_t)key * columns + column, sum, true);
    }
}

} // namespace

nd_status cuda_embedding_fwd(int device, const embedding_fwd_args *a) {
    const int64_t rows = a->ids->shape[0], columns = a->w->shape[1];
    if (rows == 0 || columns == 0) {
        return ND_OK;
    }
    return with_float("embedding_fwd", a->w->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        const T *w = data_of<T>(a->w);
        T *y = data_of<T>(a->y);
        const int32_t *ids = data_of<int32_t>(a->ids);
        const int64_t vocabulary = a->w->shape[0], stride = a->w->strides[0];
        unsigned grid = cuda_grid(device, ceil_div<int64_t>(rows, warps), 64);
        const bool vectors =
            columns % N == 0 && stride % N == 0 && is_aligned16(w) && is_aligned16(y);
        return cuda_launch("embedding_fwd", device,
                           vectors ? gather_kernel<T, N> : gather_kernel<T, 1>, grid, threads, 0,
                           ids, w, y, rows, vocabulary, columns, stride);
    });
}

nd_status cuda_embedding_bwd(int device, const embedding_bwd_args *a) {
    const char *op = "embedding_bwd";
    const int64_t rows = a->ids->shape[0], columns = a->dw->shape[1];
    const int64_t vocabulary = a->dw->shape[0];
    if (rows == 0 || columns == 0 || vocabulary == 0) {
        return ND_OK;
    }
    if (rows > 0x7fffffff || vocabulary > 0x7fffffff) {
        return nd_error(ND_EVALUE, "%s: %lld ids and %lld rows of dw: both must be below 2^31", op,
                        (long long)rows, (long long)vocabulary);
    }
    int bits = 1;
    while (vocabulary >> bits) {
        bits++;
    }
    size_t sort_bytes = 0;
    ND_TRY(cuda_sort_pairs(op, device, nullptr, &sort_bytes, (uint32_t *)nullptr, nullptr, nullptr,
                           nullptr, rows, bits));
    const int64_t chunks = ceil_div<int64_t>(rows, chunk_size);
    const size_t list = padded((size_t)rows * 4), parts = padded((size_t)(chunks * columns) * 4);
    void *scratch;
    ND_TRY(cuda_scratch(device, 4 * list + 2 * parts + sort_bytes, &scratch));
    char *at = (char *)scratch;
    uint32_t *keys = (uint32_t *)at, *sorted = (uint32_t *)(at + list);
    int32_t *positions = (int32_t *)(at + 2 * list), *order = (int32_t *)(at + 3 * list);
    float *heads = (float *)(at + 4 * list), *tails = (float *)(at + 4 * list + parts);
    void *sort_space = at + 4 * list + 2 * parts;

    ND_TRY(cuda_launch(op, device, keys_kernel,
                       cuda_grid(device, ceil_div<int64_t>(rows, threads), 64), threads, 0,
                       data_of<int32_t>(a->ids), keys, positions, rows, vocabulary));
    ND_TRY(cuda_sort_pairs(op, device, sort_space, &sort_bytes, keys, sorted, positions, order,
                           rows, bits));
    return with_float(op, a->dy->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const T *dy = data_of<T>(a->dy);
        float *dw = data_of<float>(a->dw);
        auto launch = [&](auto size) -> nd_status {
            constexpr int N = decltype(size)::get;
            int64_t strips = ceil_div<int64_t>(columns, 32 * N);
            unsigned grid = cuda_grid(device, ceil_div<int64_t>(chunks * strips, warps), 64);
            ND_TRY(cuda_launch(op, device, chunk_kernel<T, N>, grid, threads, 0, sorted, order, dy,
                               dw, heads, tails, rows, vocabulary, columns));
            if (chunks > 1) {
                ND_TRY(cuda_launch(op, device, crossing_kernel<N>, grid, threads, 0, sorted, heads,
                                   tails, dw, rows, vocabulary, columns));
            }
            return ND_OK;
        };
        constexpr int N = Vec<T>::size;
        if (columns % N == 0 && is_aligned16(dy) && is_aligned16(dw)) {
            return launch(Constant<N>());
        }
        return launch(Constant<1>());
    });
}
