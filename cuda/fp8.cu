/* fp8.cu - fp8_quantize: v = scale q in e4m3 or e5m2, q also transposed, v made of x;
 * fp8_layer_weights: that of four weights, and a bound of GELU's argument.
 *
 * Parallel: first, unless a bound is given, the largest |x| of each block's part, from the end of x
 *   on, so that its beginning is what a cache holds afterwards; then tiles of 128 x 128, eight
 *   elements a thread and row, each block finding the scale anew from the parts' maxima. A tile's
 *   bytes are transposed through shared memory, 16 x 4 a thread; words of a row lie at their index
 *   ^ 4 (row / 16), so that neither side meets a bank twice.
 *   Of a layer's weights: in the first launch a block searches 128 bytes of a row times 256 rows, or
 *   all rows of w1, whose columns it sums; in the second the first block finds the bound, and the
 *   others have tiles.
 * Bytes: x is read twice (the second time from L2 where it fits; once with a bound or the largest
 *   given), dgelu read or written once, q and its transpose written.
 */
#include "common.cuh"
#include "fp8.cuh"
#include "gelu.cuh"

namespace {

constexpr int threads = 256, tile = 128, rows_at_once = 16, loads = 2, finders = 512;

enum Way { PLAIN, GELU, GRADIENT };

/* Of numbers without a sign by their bits: infinity and NaN come last. */
struct LargerBits {
    static constexpr float identity = 0.0f;
    __device__ __forceinline__ float operator()(float a, float b) const {
        return __float_as_uint(a) > __float_as_uint(b) ? a : b;
    }
};

template <class T>
__global__ void __launch_bounds__(finders)
    largest_kernel(const T *x, int64_t count, float *largest) {
    await_previous();
    constexpr int N = Vec<T>::size;
    const int64_t vectors = count / N, stride = (int64_t)gridDim.x * finders;
    const int64_t first = (int64_t)blockIdx.x * finders + threadIdx.x;
    const LargerBits larger;
    float most = 0.0f;
    for (int64_t i = vectors * N + first; i < count; i += stride) {
        most = larger(most, fabsf(to_float(checked(x + i))));
    }
#pragma unroll 4
    for (int64_t i = vectors - 1 - first; i >= 0; i -= stride) {
        const Vec<T> v = load16(x + i * N);
#pragma unroll
        for (int k = 0; k < N; k++) {
            most = larger(most, fabsf(to_float(v.v[k])));
        }
    }
    most = block_reduce(most, larger);
    if (threadIdx.x == 0) {
        checked(largest + blockIdx.x) = most;
    }
}

template <class T> struct alignas(16) Eight { T v[8]; };

/* As many of eight as there are, then zeros; `aligned`: all, at a multiple of their size. */
template <class T>
__device__ __forceinline__ Eight<T> load_eight(const T *p, int64_t count, bool aligned) {
    if (aligned && count >= 8) {
        return checked((const Eight<T> *)p);
    }
    Eight<T> some;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        some.v[k] = k < count ? checked(p + k) : from_float<T>(0.0f);
    }
    return some;
}

/* The first `count` of eight; `aligned`: as there. */
template <class T>
__device__ __forceinline__ void store_eight(T *p, const Eight<T> &x, int64_t count, bool aligned) {
    if (aligned && count >= 8) {
#pragma unroll
        for (int k = 0; k < 8; k += Vec<T>::size) {
            store16(p + k, *(const Vec<T> *)(x.v + k));
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k < count) {
            checked(p + k) = x.v[k];
        }
    }
}

/* The first `count` of N words' bytes; `aligned`: all, at a multiple of their size. */
template <int N>
__device__ __forceinline__ void store_words(uint8_t *to, const uint32_t *words, int64_t count,
                                            bool aligned) {
    struct alignas(4 * N) Words {
        uint32_t v[N];
    };
    if (aligned && count >= 4 * N) {
        checked((Words *)to) = *(const Words *)words;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4 * N; k++) {
        if (k < count) {
            checked(to + k) = (uint8_t)(words[k / 4] >> 8 * (k % 4));
        }
    }
}

/* The tile `index` of those of x; the first one writes the scale. */
template <class T, Way WAY, bool E5M2>
__device__ __forceinline__ void
quantize_tile(unsigned index, const T *x, T *dgelu, bool tanh, int64_t rows, int64_t columns,
              const float *largest, int parts, const float *scale_a, const float *scale_b,
              float bound, float *sums, uint8_t *q, uint8_t *q_t, float *scale) {
    __shared__ alignas(16) uint32_t words[tile][tile / 4]; /* four columns of a row */
    const int64_t tiles_across = ceil_div(columns, (int64_t)tile);
    const int64_t tile_row = index / tiles_across, first_row = tile_row * tile;
    const int64_t first_column = index % tiles_across * tile;
    const int strip = threadIdx.x % 16, below = threadIdx.x / 16;
    const int64_t column = first_column + 8 * strip;
    float by = 0.0f, sum[8] = {};
#pragma unroll
    for (int step = 0; step < tile / rows_at_once; step += loads) {
        Eight<T> xs[loads], slopes[loads];
#pragma unroll
        for (int i = 0; i < loads; i++) {
            const int64_t row = first_row + (step + i) * rows_at_once + below;
            const int64_t count = row < rows ? columns - column : 0, at = row * columns + column;
            xs[i] = load_eight(x + at, count, columns % 8 == 0);
            if (WAY == GRADIENT) {
                slopes[i] = load_eight(dgelu + at, count, columns % 8 == 0);
            }
        }
        if (step == 0) { /* while the first loads are on their way */
            float most = 0.0f;
            if (scale_a != nullptr) {
                most = fabsf(bound * checked(scale_a) * checked(scale_b));
            } else {
                for (int i = threadIdx.x; i < parts; i += threads) {
                    most = LargerBits()(most, checked(largest + i));
                }
                most = block_reduce(most, LargerBits());
            }
            const float found = WAY == GRADIENT ? nd_fp8_gradient_scale(most, E5M2)
                                                : nd_fp8_scale(__float_as_uint(most), E5M2);
            by = 1.0f / found; /* powers of two */
            if (index == 0 && threadIdx.x == 0) {
                checked(scale) = found;
            }
        }
#pragma unroll
        for (int i = 0; i < loads; i++) {
            const int64_t row = first_row + (step + i) * rows_at_once + below;
            const int64_t count = row < rows ? columns - column : 0, at = row * columns + column;
            float v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                v[k] = to_float(xs[i].v[k]);
                if (WAY == GELU) {
                    const Gelu g = tanh ? gelu_16<true>(v[k]) : gelu_16<false>(v[k]);
                    v[k] = g.value;
                    slopes[i].v[k] = from_float<T>(g.derivative);
                }
                if (WAY == GRADIENT) {
                    v[k] *= to_float(slopes[i].v[k]);
                    sum[k] += v[k];
                }
                v[k] *= by;
            }
            if (WAY == GELU && dgelu != nullptr) {
                store_eight(dgelu + at, slopes[i], count, columns % 8 == 0);
            }
            alignas(8) const uint32_t two[2] = {packed<E5M2>(v), packed<E5M2>(v + 4)};
            *(uint2 *)&words[(step + i) * rows_at_once + below][2 * strip ^ 4 * (step + i)] =
                make_uint2(two[0], two[1]);
            store_words<2>(q + at, two, count, columns % 8 == 0);
        }
    }
    if constexpr (WAY == GRADIENT) {
        __shared__ float of_rows[rows_at_once][tile];
        if (sums != nullptr) {
#pragma unroll
            for (int k = 0; k < 8; k++) {
                of_rows[below][8 * strip + k] = sum[k];
            }
            __syncthreads();
            if (threadIdx.x < tile && first_column + threadIdx.x < columns) {
                float all = 0.0f;
#pragma unroll
                for (int r = 0; r < rows_at_once; r++) {
                    all += of_rows[r][threadIdx.x];
                }
                checked(sums + tile_row * columns + first_column + threadIdx.x) = all;
            }
        }
    }
    __syncthreads();
    const int block = threadIdx.x % 8, group = threadIdx.x / 8; /* 16 rows, 4 columns */
    const int64_t row = first_row + 16 * block;
    alignas(16) uint32_t of_columns[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t of_rows[4], turned[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            of_rows[k] = words[16 * block + 4 * j + k][group ^ 4 * block];
        }
        transpose_bytes(of_rows, turned);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            of_columns[k][j] = turned[k];
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int64_t of = first_column + 4 * group + k;
        if (of < columns) {
            store_words<4>(q_t + of * rows + row, of_columns[k], rows - row, rows % 16 == 0);
        }
    }
}

template <class T, Way WAY, bool E5M2>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const T *x, T *dgelu, bool tanh, int64_t rows, int64_t columns,
                    const float *largest, int parts, const float *scale_a, const float *scale_b,
                    float bound, float *sums, uint8_t *q, uint8_t *q_t, float *scale) {
    await_previous();
    quantize_tile<T, WAY, E5M2>(blockIdx.x, x, dgelu, tanh, rows, columns, largest, parts, scale_a,
                                scale_b, bound, sums, q, q_t, scale);
}

template <class T, Way WAY, bool E5M2>
nd_status quantize(int device, const fp8_quantize_args *a, int64_t tiles, const float *largest,
                   int parts) {
    return cuda_launch("fp8_quantize", device, quantize_kernel<T, WAY, E5M2>, (unsigned)tiles,
                       threads, 0, data_of<T>(a->x), a->dgelu ? data_of<T>(a->dgelu) : nullptr,
                       a->gelu == 2, a->x->shape[0], a->x->shape[1], largest, parts,
                       a->scale_a ? data_of<float>(a->scale_a) : nullptr,
                       a->scale_b ? data_of<float>(a->scale_b) : nullptr, (float)a->bound,
                       a->sums ? data_of<float>(a->sums) : nullptr, data_of<uint8_t>(a->q),
                       data_of<uint8_t>(a->q_t), data_of<float>(a->scale));
}

/* ---- the weights of a layer ------------------------------------------------------------------ */
constexpr int weights = 4, across = 8, down = finders / across;        /* vectors, rows at once */
template <class T> constexpr int width = 16 * across / (int)sizeof(T); /* columns */

template <class T> struct Weight {
    const T *x;
    uint8_t *q, *q_t;
    float *scale;
    int64_t rows, columns;
};

template <class T> struct Layer {
    Weight<T> of[weights]; /* w1 is the first */
    const T *norm_w, *norm_b, *b1;
    float *bound;
    int first_part[weights + 1] = {}, first_tile[weights + 1] = {}; /* of each weight */
};

/* Rows that a block searches. */
__host__ __device__ constexpr int64_t searched(int weight, int64_t rows) {
    return weight == 0 ? rows : 256;
}

/* The weight of a part, or a tile. */
__device__ __forceinline__ int weight_at(const int (&first)[weights + 1], int index) {
    return (index >= first[1]) + (index >= first[2]) + (index >= first[3]);
}

/* largest: of |x| in each part; squares: in each part of w1 the largest sum of squares of a column whose
 * rows are multiplied as nd_layer_bound() says. */
template <class T>
__global__ void __launch_bounds__(finders, 2)
    search_kernel(const Layer<T> p, float *largest, float *squares) {
    await_previous();
    constexpr int N = Vec<T>::size;
    __shared__ float sums[down][width<T>];
    const int index = weight_at(p.first_part, (int)blockIdx.x);
    const int part = (int)blockIdx.x - p.first_part[index];
    const Weight<T> &w = p.of[index];
    const int64_t strips = ceil_div(w.columns, (int64_t)width<T>), many = searched(index, w.rows);
    const int64_t first = part / strips * many, end = min(first + many, w.rows);
    const int vector = threadIdx.x % across, below = threadIdx.x / across;
    const int64_t column = part % strips * width<T> + vector * N;
    const LargerBits larger;
    float most = 0.0f, sum[N] = {};
    if (column < w.columns) {
        for (int64_t row = first + below; row < end; row += 4 * down) {
            uint4 some[4];
            float factor[4] = {}; /* of w1's rows */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int64_t at = row + i * down;
                const T *from = w.x + at * w.columns + column;
                some[i] = at < end ? checked((const uint4 *)from) : uint4{};
                if (index == 0 && at < end) {
                    const float a = to_float(checked(p.norm_w + at));
                    const float b = to_float(checked(p.norm_b + at));
                    factor[i] = sqrtf(a * a + b * b);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x[N];
                to_floats<T>(some[i], x);
#pragma unroll
                for (int k = 0; k < N; k++) {
                    most = larger(most, fabsf(x[k]));
                    const float scaled = x[k] * factor[i];
                    sum[k] = fmaf(scaled, scaled, sum[k]);
                }
            }
        }
    }
    most = block_reduce(most, larger);
    if (threadIdx.x == 0) {
        checked(largest + blockIdx.x) = most;
    }
    if (index == 0) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            sums[below][vector * N + k] = sum[k];
        }
        __syncthreads();
        float all = 0.0f;
        if (threadIdx.x < width<T>) {
            for (int i = 0; i < down; i++) {
                all += sums[i][threadIdx.x];
            }
        }
        all = block_reduce(all, larger);
        if (threadIdx.x == 0) {
            checked(squares + part) = all;
        }
    }
}

/* By a block. */
template <class T>
__device__ __forceinline__ void find_bound(const Layer<T> &p, const float *largest,
                                           const float *squares) {
    const LargerBits larger;
    const int64_t rows = p.of[0].rows, columns = p.of[0].columns;
    float norm_w = 0.0f, norm_b = 0.0f, w1 = 0.0f, column = 0.0f, b1 = 0.0f;
    for (int64_t i = threadIdx.x; i < rows; i += threads) {
        norm_w = larger(norm_w, fabsf(to_float(checked(p.norm_w + i))));
        norm_b = larger(norm_b, fabsf(to_float(checked(p.norm_b + i))));
    }
    for (int64_t i = threadIdx.x; i < columns; i += threads) {
        b1 = larger(b1, fabsf(to_float(checked(p.b1 + i))));
    }
    for (int i = threadIdx.x; i < p.first_part[1]; i += threads) {
        w1 = larger(w1, checked(largest + i));
        column = larger(column, checked(squares + i));
    }
    norm_w = block_reduce(norm_w, larger);
    norm_b = block_reduce(norm_b, larger);
    w1 = block_reduce(w1, larger);
    column = block_reduce(column, larger);
    b1 = block_reduce(b1, larger);
    if (threadIdx.x == 0) {
        checked(p.bound) = nd_layer_bound(norm_w, norm_b, w1, column, b1, rows);
    }
}

template <class T>
__global__ void __launch_bounds__(threads)
    weights_kernel(const Layer<T> p, const float *largest, const float *squares) {
    await_previous();
    if (blockIdx.x == 0) {
        find_bound(p, largest, squares);
        return;
    }
    const int block = (int)blockIdx.x - 1, index = weight_at(p.first_tile, block);
    const int part = p.first_part[index], parts = p.first_part[index + 1] - part;
    const Weight<T> &w = p.of[index];
    quantize_tile<T, PLAIN, false>(block - p.first_tile[index], w.x, nullptr, false, w.rows,
                                   w.columns, largest + part, parts, nullptr, nullptr, 0.0f,
                                   nullptr, w.q, w.q_t, w.scale);
}

} // namespace

nd_status cuda_fp8_quantize(int device, const fp8_quantize_args *a) {
    const char *op = "fp8_quantize";
    const int64_t rows = a->x->shape[0], columns = a->x->shape[1], count = rows * columns;
    ND_TRY(nd_check_fp8_quantize(a->x, a->gelu, a->dgelu, a->scale_a, a->scale_b, a->sums));
    if (count == 0) {
        fill_args one = {a->scale, 1.0}, zero = {a->sums, 0.0};
        ND_TRY(a->sums ? cuda_fill(device, &zero) : ND_OK);
        return cuda_fill(device, &one);
    }
    const unsigned parts = cuda_grid(device, ceil_div(count, (int64_t)finders * 8), 4);
    const int64_t tiles = ceil_div(rows, (int64_t)tile) * ceil_div(columns, (int64_t)tile);
    if (tiles > 0x7fffffff) {
        return nd_error(ND_EVALUE, "%s: x (%lld, %lld) has more than 2^31 tiles of 128 x 128", op,
                        (long long)rows, (long long)columns);
    }
    void *memory;
    ND_TRY(cuda_scratch(device, parts * sizeof(float), &memory));
    float *largest = (float *)memory;
    return with_float(op, a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        if (!a->scale_a && !a->largest) {
            ND_TRY(cuda_launch(op, device, largest_kernel<T>, parts, finders, 0, data_of<T>(a->x),
                               count, largest));
        }
        const auto run =
            a->gelu    ? (a->e5m2 ? quantize<T, GELU, true> : quantize<T, GELU, false>)
            : a->dgelu ? (a->e5m2 ? quantize<T, GRADIENT, true> : quantize<T, GRADIENT, false>)
            : a->e5m2  ? quantize<T, PLAIN, true>
                       : quantize<T, PLAIN, false>;
        return a->largest ? run(device, a, tiles, data_of<float>(a->largest), 1)
                          : run(device, a, tiles, largest, (int)parts);
    });
}

nd_status cuda_fp8_layer_weights(int device, const fp8_layer_weights_args *a) {
    const char *op = "fp8_layer_weights";
    ND_TRY(nd_check_fp8_layer_weights(a->w_qkv, a->w_o, a->w1));
    return with_float(op, a->w1->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const auto weight = [](const nd_array *x, nd_array *q, nd_array *q_t, nd_array *scale) {
            return Weight<T>{data_of<T>(x),         data_of<uint8_t>(q), data_of<uint8_t>(q_t),
                             data_of<float>(scale), x->shape[0],         x->shape[1]};
        };
        Layer<T> p = {
            {weight(a->w1, a->q1, a->q1_t, a->scale1),
             weight(a->w_qkv, a->q_qkv, a->q_qkv_t, a->scale_qkv),
             weight(a->w_o, a->q_o, a->q_o_t, a->scale_o),
             weight(a->w2, a->q2, a->q2_t, a->scale2)},
            data_of<T>(a->norm_w),
            data_of<T>(a->norm_b),
            data_of<T>(a->b1),
            data_of<float>(a->bound),
        };
        for (int i = 0; i < weights; i++) {
            const int64_t rows = p.of[i].rows, columns = p.of[i].columns;
            const int64_t parts =
                ceil_div(rows, searched(i, rows)) * ceil_div(columns, (int64_t)width<T>);
            const int64_t tiles = ceil_div(rows, (int64_t)tile) * ceil_div(columns, (int64_t)tile);
            p.first_part[i + 1] = p.first_part[i] + (int)parts;
            p.first_tile[i + 1] = p.first_tile[i] + (int)tiles;
        }
        const int parts = p.first_part[weights], tiles = p.first_tile[weights];
        void *memory;
        ND_TRY(cuda_scratch(device, (parts + p.first_part[1]) * sizeof(float), &memory));
        float *largest = (float *)memory, *squares = largest + parts;
        ND_TRY(cuda_launch(op, device, search_kernel<T>, parts, finders, 0, p, largest, squares));
        return cuda_launch(op, device, weights_kernel<T>, tiles + 1, threads, 0, p, largest,
                           squares);
    });
}
