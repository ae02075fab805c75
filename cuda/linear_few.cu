/* linear_few.cu - products of few rows, as a step of generation has them.
 *
 *   linear_fwd           y = r + x w + b; decode_output is the same
 *   linear_gelu_fwd      y = gelu(pre), dgelu = gelu'(pre), pre = x w + b
 *   decode_projections   one of each, without dgelu, of two norms of x, in one launch
 *   decode_output_greedy the column of the largest y of a row, too: each warp of wide_kernel leaves the
 *                        largest of its own, a second kernel chooses among them
 *   of few rows of x, whole 16 bytes in rows of x and of w
 *
 * Precision: float32 sums, in an order that the shape of w decides: a row has the same bits beside
 * any others. Parallel: float32 in few_kernel: a block owns LANES vectors of columns, its threads
 * share the depth: LANES neighbours read a row of w, and the groups meet through shuffles and shared
 * memory. wide_kernel the same with several such tiles a block. 16 bits in tiles_kernel: a block owns
 * columns, its warps share the depth by tensor cores.
 * Bytes: w once; x once a block; normalised in shared memory by a warp a row.
 */
#include <algorithm>

#include "decode.h"
#include "layernorm.cuh"
#include "linear_few.cuh"
#include "mma.cuh"

namespace {

constexpr int threads = 512, warps = threads / 32;
template <bool NORM> constexpr int tile_columns = NORM ? 32 : 16;

/* What becomes of a sum. */
struct Finish {
    enum { LINEAR, GELU, GELU_TANH } kind;
    const void *b, *r; /* or null */
    void *y, *dgelu;   /* dgelu: or null */
    int64_t y_stride;
    uint64_t *largest = nullptr; /* of wide_kernel, or null: [rows][blocks][warps of a row] */
};

/* Orders the results of a row: the larger first, then that of the earlier column. */
constexpr uint32_t key_of_infinity = 0xff800000u;
__device__ __forceinline__ uint64_t key_of(float result, int64_t column) {
    const uint32_t bits = __float_as_uint(result + 0.0f); /* -0 is 0 */
    const uint32_t key = result != result ? 0xffffffffu : bits >> 31 ? ~bits : bits | 1u << 31;
    return (uint64_t)key << 32 | ~(uint32_t)column;
}
__device__ __forceinline__ uint64_t larger_of(uint64_t a, uint64_t b) { return a > b ? a : b; }

template <class T> struct Product {
    const T *w;
    Finish finish;
    int64_t columns;
    const T *norm_w = nullptr, *norm_b = nullptr; /* where the rows are normalised before */
    unsigned first_block = 0;
};
template <class T> struct Products {
    Product<T> of[2] = {}; /* one, or two of normalised rows */
};

/* y, and dgelu, of a sum that has its bias and residual. Returns y as it is stored. */
template <class T>
__device__ __forceinline__ T put(const Finish &f, int64_t row, int64_t column, int64_t columns,
                                 float sum) {
    if (f.kind != Finish::LINEAR) {
        const bool tanh = f.kind == Finish::GELU_TANH;
        if (f.dgelu) {
            checked((T *)f.dgelu + row * columns + column) =
                from_float<T>(tanh ? nd_gelu_tanh_grad(sum) : nd_gelu_grad(sum));
        }
        sum = tanh ? nd_gelu_tanh(sum) : nd_gelu(sum);
    }
    return checked((T *)f.y + row * f.y_stride + column) = from_float<T>(sum);
}

/* Sum v over the lanes that are multiples of OFFSET apart. Each keeps some of the sums, v[0], ...,
 * which were v[first], ...; of lanes that have the same ones one `writes`. */
template <int COUNT, int OFFSET, int SIZE>
__device__ __forceinline__ void sum_and_scatter(float (&v)[SIZE], int &first, bool &writes) {
    if constexpr (OFFSET < 32) {
        const bool upper = (threadIdx.x & OFFSET) != 0;
        constexpr int half = COUNT / 2;
        if constexpr (half == 0) {
            v[0] += __shfl_xor_sync(0xffffffffu, v[0], OFFSET);
            writes = writes && !upper;
            sum_and_scatter<1, OFFSET * 2>(v, first, writes);
        } else {
#pragma unroll
            for (int i = 0; i < half; i++) {
                const float other = upper ? v[i] : v[half + i];
                v[i] = (upper ? v[half + i] : v[i]) + __shfl_xor_sync(0xffffffffu, other, OFFSET);
            }
            first += upper ? half : 0;
            sum_and_scatter<half, OFFSET * 2>(v, first, writes);
        }
    }
}

/* acc[r][n] += xs[r][k] factors[n], unless k is beyond the depth. */
template <int ROWS, int N, class T>
__device__ __forceinline__ void add_products(float (&acc)[ROWS * N], const float (&factors)[N],
                                             const T *xs, int k, int depth) {
#pragma unroll
    for (int r = 0; r < ROWS && k < depth; r++) {
        const float x_k = to_float(xs[r * depth + k]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            acc[r * N + n] += x_k * factors[n];
        }
    }
}

/* A warp's sums over its groups into sums, [warps][SIZE][LANES]. */
template <int LANES, int SIZE>
__device__ __forceinline__ void leave_sums(float (&acc)[SIZE], float *sums) {
    constexpr int kept = SIZE * LANES >= 32 ? SIZE * LANES / 32 : 1;
    const int tid = (int)threadIdx.x;
    int at = 0;
    bool writes = true;
    sum_and_scatter<SIZE, LANES>(acc, at, writes);
#pragma unroll
    for (int i = 0; i < kept; i++) {
        if (writes) {
            sums[(tid / 32 * SIZE + at + i) * LANES + tid % LANES] = acc[i];
        }
    }
}

/* The thread's result, over all warps. */
template <int SIZE> __device__ __forceinline__ float whole_sum(const float *sums) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < warps; s++) {
        sum += sums[s * SIZE + threadIdx.x];
    }
    return sum;
}

/* x, and zeros up to ROWS, into shared memory, for all threads. */
template <int ROWS, class T>
__device__ __forceinline__ void stage_rows(const T *x, T *xs, int rows, int depth) {
    constexpr int N = Vec<T>::size;
    for (int i = (int)threadIdx.x * N; i < ROWS * depth; i += threads * N) {
        Vec<T> part = {};
        if (i < rows * depth) {
            part = load16(x + i);
        }
        *(Vec<T> *)(xs + i) = part;
    }
    __syncthreads();
}

/* Weight and bias of the norm into shared memory, for all threads. */
template <class T>
__device__ __forceinline__ void stage_scales(const Product<T> &p, T *scales, int depth) {
    constexpr int N = Vec<T>::size;
#pragma unroll 1
    for (int i = (int)threadIdx.x * N; i < depth; i += threads * N) {
        *(Vec<T> *)(scales + i) = load16(p.norm_w + i);
        *(Vec<T> *)(scales + depth + i) = load16(p.norm_b + i);
    }
    __syncthreads();
}

/* A row that a warp holds, normalised, into shared memory. */
template <class T, int count>
__device__ __forceinline__ void normalize_row(const Vec<T> (&parts)[count], const T *scales, T *to,
                                              int depth, int lane, float eps) {
    float mean, rstd;
    row_statistics<32>(parts, depth, lane, eps, mean, rstd);
#pragma unroll
    for (int i = 0; i < count; i++) {
        const int c = (i * 32 + lane) * Vec<T>::size;
        if (c < depth) {
            const Vec<T> w = *(const Vec<T> *)(scales + c);
            const Vec<T> b = *(const Vec<T> *)(scales + depth + c);
            *(Vec<T> *)(to + c) = normalized(parts[i], w, b, mean, rstd);
        }
    }
}

template <class T, int ROWS, int LANES, bool NORM>
__global__ void __launch_bounds__(threads, ROWS > 4 ? 1 : 2)
    few_kernel(const T *x, const __grid_constant__ Products<T> products, int rows, int depth,
               float eps, bool ahead) {
    await_previous(ahead);
    constexpr int N = Vec<T>::size, SIZE = ROWS * N, groups = threads / LANES;
    /* A thread's part of up to ND_STEP_COLUMNS rows of w is 4 vectors. */
    constexpr int unroll = ROWS > 1 || NORM ? 4 : 8;
    const Product<T> &p = products.of[NORM && blockIdx.x >= products.of[1].first_block];
    const T *w = p.w;
    const int64_t columns = p.columns;
    extern __shared__ float4 shared[];
    float *sums = (float *)shared;              /* [warps][ROWS N][LANES] */
    T *xs = (T *)(sums + warps * SIZE * LANES); /* [ROWS][depth] */
    T *scales = xs + ROWS * depth;              /* NORM: [2][depth] */
    const int tid = (int)threadIdx.x, lane = tid % LANES;
    const int64_t first = (int64_t)(blockIdx.x - p.first_block) * LANES * N,
                  column = first + lane * N;
    uint4 v[unroll];
    auto load = [&](int k, uint4 &row) {
        if (k < depth && column < columns) {
            row = checked((const uint4 *)(w + k * columns + column));
        }
    };
#pragma unroll
    for (int u = 0; u < unroll; u++) {
        load(tid / LANES + u * groups, v[u]);
    }
    /* The thread's own result, if any, and what is added to its sum: used last, so not waited for
     * before x. */
    const int row = tid / LANES / N;
    const int64_t own = first + tid % LANES * N + tid / LANES % N;
    const bool has_own = row < rows && own < columns;
    T bias = {}, residual = {};
    if (has_own && p.finish.b) {
        bias = checked((const T *)p.finish.b + own);
    }
    if constexpr (NORM) {
        stage_scales(p, scales, depth);
    }
    if (ahead) {
        await_previous();
    }
    if (has_own && p.finish.r) {
        residual = checked((const T *)p.finish.r + row * columns + own);
    }
    if constexpr (NORM) {
        if (tid / 32 < ROWS) {
            const int r = tid / 32, warp_lane = tid % 32;
            Vec<T> parts[ND_STEP_COLUMNS / 32 / N];
            load_row(x + r * depth, r < rows ? depth : 0, 32, warp_lane, parts);
            normalize_row(parts, scales, xs + r * depth, depth, warp_lane, eps);
        }
    }
    if constexpr (NORM) {
        __syncthreads();
    } else {
        stage_rows<ROWS>(x, xs, rows, depth);
    }

    float acc[SIZE] = {};
    for (int base = tid / LANES; base < depth && column < columns; base += groups * unroll) {
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int k = base + u * groups;
            float factors[N];
            to_floats<T>(v[u], factors);
            load(k + groups * unroll, v[u]);
            add_products<ROWS>(acc, factors, xs, k, depth);
        }
    }
    leave_sums<LANES>(acc, sums);
    __syncthreads();
    if (has_own) {
        put<T>(p.finish, row, own, columns,
               whole_sum<SIZE * LANES>(sums) + (to_float(bias) + to_float(residual)));
    }
}

/* ---- many columns ----------------------------------------------------------------------------- */
/* A block takes tiles of LANES vectors in turn. Each thread has STAGES vectors of w on their way
 * through shared memory, in the order in which it multiplies them, also those of its next tiles.
 * Sums are those of few_kernel with as many lanes. */
constexpr int wide_lanes = 8, wide_stages = 8;

template <class T, int ROWS>
__global__ void __launch_bounds__(threads, ROWS > 4 ? 1 : 2)
    wide_kernel(const T *x, const __grid_constant__ Product<T> p, int rows, int depth, int tiles,
                bool ahead) {
    await_previous(ahead);
    constexpr int LANES = wide_lanes, STAGES = wide_stages, N = Vec<T>::size, SIZE = ROWS * N;
    constexpr int groups = threads / LANES;
    const int64_t columns = p.columns;
    extern __shared__ float4 shared[];
    uint4 *ring = (uint4 *)shared;                    /* [STAGES][threads] */
    float *sums = (float *)(ring + STAGES * threads); /* [warps][ROWS N][LANES] */
    T *xs = (T *)(sums + warps * SIZE * LANES);       /* [ROWS][depth] */
    const int tid = (int)threadIdx.x, lane = tid % LANES, group = tid / LANES;
    int coming_tile = (int)blockIdx.x, coming = group, stage = 0; /* the next vector to fetch */
    auto fetch = [&](int to) {
        const int64_t column = ((int64_t)coming_tile * LANES + lane) * N;
        const bool inside = coming_tile < tiles && column < columns && coming < depth;
        copy_async16(shared_address(ring + to * threads + tid),
                     p.w + (inside ? coming * columns + column : 0), inside);
        copy_async_commit();
        coming += groups;
        if (coming - group >= depth) {
            coming = group;
            coming_tile += (int)gridDim.x;
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        fetch(s);
    }
    if (ahead) {
        await_previous();
    }
    stage_rows<ROWS>(x, xs, rows, depth);

    const int row = group / N;
    uint64_t largest = 0;
    for (int tile = (int)blockIdx.x; tile < tiles; tile += (int)gridDim.x) {
        const int64_t own = ((int64_t)tile * LANES + lane) * N + group % N;
        const bool has_own = row < rows && own < columns;
        T bias = {}, residual = {};
        if (has_own && p.finish.b) {
            bias = checked((const T *)p.finish.b + own);
        }
        if (has_own && p.finish.r) {
            residual = checked((const T *)p.finish.r + row * columns + own);
        }
        float acc[SIZE] = {};
        for (int k = group; k - group < depth; k += groups) {
            copy_async_wait<STAGES - 1>();
            float factors[N];
            to_floats<T>(ring[stage * threads + tid], factors);
            fetch(stage);
            stage = (stage + 1) % STAGES;
            add_products<ROWS>(acc, factors, xs, k, depth);
        }
        leave_sums<LANES>(acc, sums);
        __syncthreads();
        if (has_own) {
            const T y =
                put<T>(p.finish, row, own, columns,
                       whole_sum<SIZE * LANES>(sums) + (to_float(bias) + to_float(residual)));
            largest = larger_of(largest, key_of(to_float(y), own));
        }
        __syncthreads(); /* sums are read */
    }
    if (p.finish.largest && row < rows) {
        constexpr int parts = LANES * N / 32; /* warps of a row */
        largest = warp_reduce(largest, larger_of);
        if (tid % 32 == 0) {
            p.finish.largest[((int64_t)row * gridDim.x + blockIdx.x) * parts + tid / 32 % parts] =
                largest;
        }
    }
}

/* A block for each row: the first largest of its shares. */
__global__ void __launch_bounds__(threads)
    choose_kernel(const uint64_t *largest, int shares, int32_t *tokens, int32_t *positions) {
    await_previous();
    __shared__ uint64_t of_warps[warps];
    uint64_t own = 0;
    for (int i = (int)threadIdx.x; i < shares; i += threads) {
        own = larger_of(own, largest[(int64_t)blockIdx.x * shares + i]);
    }
    own = warp_reduce(own, larger_of);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = own;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < warps; warp++) {
            own = larger_of(own, of_warps[warp]);
        }
        const uint32_t key = (uint32_t)(own >> 32);
        tokens[blockIdx.x] = key > ~key_of_infinity && key < key_of_infinity ? ~(int)own : -1;
        positions[blockIdx.x] += 1;
    }
}

/* ---- 16 bits, by tensor cores ------------------------------------------------------------------ */
/* A block owns COLUMNS columns, its warps share the depth in steps of 16. A warp multiplies w^T, the
 * operand A of mma.cuh, by 8 TILES rows of x. `round` rows of w, all of them where they fit, are on
 * their way to shared memory before the wait, in chunks of 16 bytes that lie apart so that eight rows
 * are read at once. NORM: one of two products of normalised rows, whose depth is at most NORM. The
 * code is kept short: a kernel of a step runs once through it, and waits for it. */
template <class T, int TILES, int NORM>
__global__ void __launch_bounds__(threads, TILES == 1 ? 2 : 1)
    tiles_kernel(const T *x, const __grid_constant__ Products<T> products, int rows, int depth,
                 int round, float eps, bool ahead) {
    await_previous(ahead);
    constexpr int N = Vec<T>::size, R = 8 * TILES, COLUMNS = tile_columns<(NORM > 0)>;
    constexpr int chunks = COLUMNS / N, pitch = COLUMNS + 4;
    const Product<T> &p = products.of[NORM && blockIdx.x >= products.of[1].first_block];
    const int64_t columns = p.columns;
    extern __shared__ float4 shared[];
    float *sums = (float *)shared; /* [warps][R][pitch], after the products */
    T *ws = (T *)shared;           /* [round][COLUMNS], before */
    T *xs = ws + round * COLUMNS;  /* [rows][depth + 8] */
    float2 *statistics = (float2 *)(xs + rows * (depth + 8)); /* NORM: [rows] */
    const int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, group = lane / 4;
    const int64_t first = (int64_t)(blockIdx.x - p.first_block) * COLUMNS;
    auto place = [&](int k, int chunk) {
        return shared_address(ws + (k * chunks + (chunk ^ k * chunks / 8 % chunks)) * N);
    };
    auto fetch = [&](int base) {
#pragma unroll 1
        for (int i = tid; i < round * chunks; i += threads) {
            const int k = i / chunks, chunk = i % chunks;
            const int64_t column = first + chunk * N;
            const bool inside = base + k < depth && column < columns;
            copy_async16(place(k, chunk), p.w + (inside ? (base + k) * columns + column : 0),
                         inside);
        }
    };
    fetch(0);
    /* The thread's results are of one column. */
    const int64_t result_column = first + tid % COLUMNS;
    T bias = {}, residual = {};
    if (p.finish.b && result_column < columns) {
        bias = checked((const T *)p.finish.b + result_column);
    }
    const int own = tid * 2; /* the thread normalises two columns */
    T norm_w[2] = {}, norm_b[2] = {};
    if (NORM && own < depth) {
        memcpy(norm_w, &checked((const uint32_t *)(p.norm_w + own)), sizeof norm_w);
        memcpy(norm_b, &checked((const uint32_t *)(p.norm_b + own)), sizeof norm_b);
    }
    if (ahead) {
        await_previous();
    }
    if constexpr (NORM) {
        static_assert(NORM <= 2 * threads);
#pragma unroll 1
        for (int row = warp; row < rows; row += warps) {
            Vec<T> parts[NORM / 32 / N];
            load_row(x + row * depth, depth, 32, lane, parts);
            float2 of_row;
            row_statistics<32>(parts, depth, lane, eps, of_row.x, of_row.y);
            if (lane == 0) {
                statistics[row] = of_row;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int row = 0; row < rows && own < depth; row++) {
            const float2 of_row = statistics[row];
            T of_x[2];
            memcpy(of_x, &checked((const uint32_t *)(x + row * depth + own)), sizeof of_x);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                xs[row * (depth + 8) + own + i] =
                    normalized(of_x[i], norm_w[i], norm_b[i], of_row.x, of_row.y);
            }
        }
    } else {
        static_assert(R * COLUMNS <= threads, "a thread has one result");
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
#pragma unroll 1
            for (int k = tid * N; k < depth; k += threads * N) {
                copy_async16(shared_address(xs + row * (depth + 8) + k), x + row * depth + k, true);
            }
        }
        if (p.finish.r && tid < rows * COLUMNS && result_column < columns) {
            residual = checked((const T *)p.finish.r + tid / COLUMNS * columns + result_column);
        }
    }

    float acc[COLUMNS / 16][TILES][4] = {};
#pragma unroll 1
    for (int base = 0; base < depth; base += round) {
        if (base > 0) {
            __syncthreads();
            fetch(base);
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll 2
        for (int k = warp * 16; k < round && base + k < depth; k += 16 * warps) {
            uint32_t of_x[TILES][2];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const int row = min(8 * i + group, rows - 1); /* those beyond are not used */
                const T *from = xs + row * (depth + 8) + base + k + tid % 4 * 2;
                of_x[i][0] = *(const uint32_t *)from;
                of_x[i][1] = base + k + 8 < depth ? *(const uint32_t *)(from + 8) : 0;
            }
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; j++) {
                uint32_t of_w[4];
                load_matrices_transposed(of_w,
                                         place(k + lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    multiply_add<T>(acc[j][i], of_w, of_x[i][0], of_x[i][1]);
                }
            }
        }
    }
    __syncthreads(); /* ws and xs are read */
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; j++) {
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) {
            const int row = i / 4 * 8 + tid % 4 * 2 + i % 2;
            if (row < rows) {
                sums[(warp * R + row) * pitch + j * 16 + i % 4 / 2 * 8 + group] =
                    acc[j][i / 4][i % 4];
            }
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int result = tid; result < rows * COLUMNS && result_column < columns; result += threads) {
        const int row = result / COLUMNS;
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < warps; s++) {
            sum += sums[(s * R + row) * pitch + tid % COLUMNS];
        }
        put<T>(p.finish, row, result_column, columns, sum + (to_float(bias) + to_float(residual)));
    }
}

template <class T, int TILES, int NORM>
nd_status tiles(const char *op, int device, const nd_array *x, Products<T> products, double eps,
                bool ahead) {
    const int rows = (int)x->shape[0], depth = (int)x->shape[1], R = 8 * TILES;
    constexpr int COLUMNS = tile_columns<(NORM > 0)>;
    unsigned blocks = 0;
    for (Product<T> &p : products.of) {
        p.first_block = blocks;
        blocks += (unsigned)ceil_div<int64_t>(p.columns, COLUMNS);
    }
    const size_t sums = sizeof(float) * warps * R * (COLUMNS + 4);
    const size_t of_x = rows * (sizeof(T) * (depth + 8) + sizeof(float2));
    /* Whole steps of all warps, so that the sums do not depend on the memory of a block. */
    const size_t row = sizeof(T) * COLUMNS, step = 16 * warps;
    const size_t fit = (cuda_device_limits(device)->block_shared - of_x) / row / step * step;
    const size_t all = ceil_div<size_t>(depth, 16) * 16, round = all < fit ? all : fit;
    return cuda_launch(op, device, tiles_kernel<T, TILES, NORM>, blocks, threads,
                       std::max(round * row + of_x, sums), data_of<T>(x), products, rows, depth,
                       (int)round, (float)eps, ahead);
}

/* Blocks of wide_kernel for a w of so many columns, and their shared memory; 0 for fewer columns. */
unsigned wide_blocks(int device, const nd_array *x, int64_t columns, size_t *bytes) {
    const size_t size = nd_dtype_size(x->dtype), rows = few_rows_of(x->shape[0]);
    const unsigned blocks = 2 * (unsigned)cuda_device_limits(device)->processors;
    *bytes = 16 * threads * wide_stages + sizeof(float) * warps * rows * (16 / size) * wide_lanes +
             size * rows * x->shape[1];
    return columns * (int64_t)size / 16 >= wide_lanes * (int64_t)blocks ? blocks : 0;
}

template <class T, int ROWS, bool NORM>
nd_status few(const char *op, int device, const nd_array *x, Products<T> products, double eps,
              bool ahead) {
    const int depth = (int)x->shape[1];
    auto launch = [&](auto lanes) -> nd_status {
        constexpr int LANES = decltype(lanes)::get, N = Vec<T>::size;
        static_assert(ROWS * N * LANES <= threads, "a thread has one result");
        const size_t bytes =
            sizeof(float) * warps * ROWS * N * LANES + sizeof(T) * (ROWS + 2 * NORM) * depth;
        unsigned blocks = 0;
        for (Product<T> &p : products.of) {
            p.first_block = blocks;
            blocks += (unsigned)ceil_div<int64_t>(p.columns, LANES * N);
        }
        return cuda_launch(op, device, few_kernel<T, ROWS, LANES, NORM>, blocks, threads, bytes,
                           data_of<T>(x), products, (int)x->shape[0], depth, (float)eps, ahead);
    };
    /* Whole lines of w where that leaves enough blocks, else sectors. */
    if constexpr (!NORM) {
        const int64_t vectors = products.of[0].columns * (int64_t)sizeof(T) / 16;
        size_t bytes;
        const unsigned blocks = wide_blocks(device, x, products.of[0].columns, &bytes);
        if (blocks > 0 && bytes > cuda_device_limits(device)->block_shared) {
            return launch(Constant<wide_lanes>()); /* the same sums */
        }
        if (blocks > 0) {
            return cuda_launch(op, device, wide_kernel<T, ROWS>, blocks, threads, bytes,
                               data_of<T>(x), products.of[0], (int)x->shape[0], depth,
                               (int)ceil_div<int64_t>(vectors, wide_lanes), ahead);
        }
    }
    if constexpr (sizeof(T) == 2) {
        return tiles<T, 1, 0>(op, device, x, products, eps, ahead);
    } else {
        return launch(Constant<2>());
    }
}

nd_status few_rows(const char *op, int device, const nd_array *x, const nd_array *w,
                   const Finish &f, bool ahead = false) {
    return with_float(op, x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const Products<T> p = {{{data_of<T>(w), f, w->shape[1]}}};
        switch (few_rows_of(x->shape[0])) {
        case 1:
            return few<T, 1, false>(op, device, x, p, 0, ahead);
        case 2:
            return few<T, 2, false>(op, device, x, p, 0, ahead);
        case 4:
            return few<T, 4, false>(op, device, x, p, 0, ahead);
        default:
            return few<T, 8, false>(op, device, x, p, 0, ahead);
        }
    });
}

} // namespace

nd_status linear_fwd_few(int device, const linear_fwd_args *a, bool ahead) {
    const Finish f = {Finish::LINEAR,
                      a->b ? a->b->data : nullptr,
                      a->r ? a->r->data : nullptr,
                      a->y->data,
                      nullptr,
                      a->y->shape[1]};
    return few_rows("linear_fwd", device, a->x, a->w, f, ahead);
}

nd_status linear_gelu_fwd_few(int device, const linear_gelu_fwd_args *a) {
    const Finish f = {a->tanh ? Finish::GELU_TANH : Finish::GELU,
                      a->b->data,
                      nullptr,
                      a->y->data,
                      a->dgelu->data,
                      a->y->strides[0]};
    return few_rows("linear_gelu_fwd", device, a->x, a->w, f);
}

nd_status cuda_decode_output(int device, const decode_output_args *a) {
    const linear_fwd_args product = {a->x, a->w, a->b, a->r, a->y};
    return linear_few_serves(a->x, a->w, few_linear_rows)
               ? linear_fwd_few(device, &product, cuda_reads_ahead(device, {a->w, a->b}))
               : cuda_linear_fwd(device, &product);
}

nd_status cuda_decode_output_greedy(int device, const decode_output_greedy_args *a) {
    const char *op = "decode_output_greedy";
    const int64_t rows = a->x->shape[0], columns = a->w->shape[1];
    size_t bytes;
    const unsigned blocks = wide_blocks(device, a->x, columns, &bytes);
    if (!linear_few_serves(a->x, a->w, few_linear_rows) || blocks == 0 ||
        bytes > cuda_device_limits(device)->block_shared) {
        const decode_output_args product = {a->x, a->w, nullptr, nullptr, a->logits};
        const decode_greedy_args choice = {a->logits, a->tokens, a->positions};
        ND_TRY(cuda_decode_output(device, &product));
        return cuda_decode_greedy(device, &choice);
    }
    const int shares = (int)(blocks * wide_lanes * 16 / nd_dtype_size(a->x->dtype) / 32);
    void *largest;
    ND_TRY(cuda_scratch(device, sizeof(uint64_t) * rows * shares, &largest));
    const Finish f = {Finish::LINEAR,     nullptr, nullptr, a->logits->data, nullptr, columns,
                      (uint64_t *)largest};
    ND_TRY(few_rows(op, device, a->x, a->w, f, cuda_reads_ahead(device, {a->w})));
    return cuda_launch(op, device, choose_kernel, (unsigned)rows, threads, 0,
                       (const uint64_t *)largest, shares, data_of<int32_t>(a->tokens),
                       data_of<int32_t>(a->positions));
}

nd_status cuda_decode_projections(int device, const decode_projections_args *a) {
    const char *op = "decode_projections";
    ND_TRY(nd_check_decode_projections(a->x, a->w_qkv, a->w1));
    if (a->x->shape[0] == 0) {
        return ND_OK;
    }
    const Finish packed = {Finish::LINEAR,  a->b_qkv->data, nullptr,
                           a->packed->data, nullptr,        a->packed->shape[1]};
    const Finish g = {a->tanh ? Finish::GELU_TANH : Finish::GELU,
                      a->b1->data,
                      nullptr,
                      a->g->data,
                      nullptr,
                      a->g->strides[0]};
    const bool ahead = cuda_reads_ahead(
        device, {a->norm_w1, a->norm_b1, a->norm_w2, a->norm_b2, a->w_qkv, a->b_qkv, a->w1, a->b1});
    return with_float(op, a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        Products<T> p = {{{data_of<T>(a->w_qkv), packed, a->w_qkv->shape[1], data_of<T>(a->norm_w1),
                           data_of<T>(a->norm_b1)},
                          {data_of<T>(a->w1), g, a->w1->shape[1], data_of<T>(a->norm_w2),
                           data_of<T>(a->norm_b2)}}};
        const int64_t rows = a->x->shape[0];
        if constexpr (sizeof(T) == 2) {
            auto of_depth = [&](auto most) {
                constexpr int NORM = decltype(most)::get;
                return rows <= 8    ? tiles<T, 1, NORM>
                       : rows <= 16 ? tiles<T, 2, NORM>
                                    : tiles<T, 4, NORM>;
            };
            auto run = a->x->shape[1] <= 512 ? of_depth(Constant<512>())
                                             : of_depth(Constant<ND_STEP_COLUMNS>());
            return run(op, device, a->x, p, a->eps, ahead);
        } else {
            nd_array x = *a->x;
            for (int64_t left = rows; left > 0; left -= few_linear_rows) {
                x.shape[0] = left < few_linear_rows ? left : few_linear_rows;
                auto run = left == 1   ? few<T, 1, true>
                           : left == 2 ? few<T, 2, true>
                                       : few<T, 4, true>;
                ND_TRY(run(op, device, &x, p, a->eps, ahead));
                x.data = data_of<T>(&x) + few_linear_rows * x.shape[1];
                for (Product<T> &product : p.of) {
                    product.finish.y =
                        (T *)product.finish.y + few_linear_rows * product.finish.y_stride;
                }
            }
        }
        return ND_OK;
    });
}
