/* linear_few.cu - products of few rows, as a step of generation has them.
 *
 *   linear_fwd           y = r + x w + b
 *   linear_gelu_fwd      y = gelu(pre), dgelu = gelu'(pre), pre = x w + b
 *   decode_projections   one of each, without dgelu, of two norms of x, in one launch
 *   of few rows of x, whole 16 bytes in rows of x and of w
 *
 * Precision: float32 sums, in an order that the shape of w decides: a row has the same bits beside
 * any others. Parallel: a block owns LANES vectors of columns, its threads share the depth:
 * LANES neighbours read a row of w, and the groups meet through shuffles and shared memory.
 * Bytes: w once; x once a block, into shared memory; normalised there by a warp a row.
 */
#include "decode.h"
#include "layernorm.cuh"
#include "linear_few.cuh"

namespace {

constexpr int threads = 512, warps = threads / 32;

/* What becomes of a sum. */
struct Finish {
    enum { LINEAR, GELU, GELU_TANH } kind;
    const void *b, *r; /* or null */
    void *y, *dgelu;   /* dgelu: or null */
    int64_t y_stride;
};

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

/* y, and dgelu, of a sum that has its bias and residual. */
template <class T>
__device__ __forceinline__ void put(const Finish &f, int64_t row, int64_t column, int64_t columns,
                                    float sum) {
    if (f.kind != Finish::LINEAR) {
        const bool tanh = f.kind == Finish::GELU_TANH;
        if (f.dgelu) {
            checked((T *)f.dgelu + row * columns + column) =
                from_float<T>(tanh ? nd_gelu_tanh_grad(sum) : nd_gelu_grad(sum));
        }
        sum = tanh ? nd_gelu_tanh(sum) : nd_gelu(sum);
    }
    checked((T *)f.y + row * f.y_stride + column) = from_float<T>(sum);
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

template <class T, int ROWS, int LANES, bool NORM>
__global__ void __launch_bounds__(threads, ROWS > 4 ? 1 : 2)
    few_kernel(const T *x, const __grid_constant__ Products<T> products, int rows, int depth,
               float eps) {
    await_previous();
    constexpr int N = Vec<T>::size, SIZE = ROWS * N, groups = threads / LANES;
    /* A thread's part of up to ND_STEP_COLUMNS rows of w is 4 vectors. */
    constexpr int unroll = ROWS > 1 || NORM ? 4 : 8;
    constexpr int kept = SIZE * LANES >= 32 ? SIZE * LANES / 32 : 1;
    const Product<T> &p = products.of[NORM && blockIdx.x >= products.of[1].first_block];
    const T *w = p.w;
    const int64_t columns = p.columns;
    extern __shared__ float4 shared[];
    float *sums = (float *)shared;              /* [warps][ROWS N][LANES] */
    T *xs = (T *)(sums + warps * SIZE * LANES); /* [ROWS][depth] */
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
    if (has_own && p.finish.r) {
        residual = checked((const T *)p.finish.r + row * columns + own);
    }
    if constexpr (NORM) {
        if (tid / 32 < ROWS) {
            const int r = tid / 32, warp_lane = tid % 32;
            Vec<T> parts[ND_STEP_COLUMNS / 32 / N];
            load_row(x + r * depth, r < rows ? depth : 0, 32, warp_lane, parts);
            float mean, rstd;
            row_statistics<32>(parts, depth, warp_lane, eps, mean, rstd);
#pragma unroll
            for (int i = 0; i < ND_STEP_COLUMNS / 32 / N; i++) {
                const int c = (i * 32 + warp_lane) * N;
                if (c < depth) {
                    const Vec<T> ws = load16(p.norm_w + c), bs = load16(p.norm_b + c);
                    *(Vec<T> *)(xs + r * depth + c) = normalized(parts[i], ws, bs, mean, rstd);
                }
            }
        }
    }
    for (int i = tid * N; !NORM && i < ROWS * depth; i += threads * N) {
        Vec<T> part = {};
        if (i < rows * depth) {
            part = load16(x + i);
        }
        *(Vec<T> *)(xs + i) = part;
    }
    __syncthreads();

    float acc[SIZE] = {};
    for (int base = tid / LANES; base < depth && column < columns; base += groups * unroll) {
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int k = base + u * groups;
            float factors[N];
            to_floats<T>(v[u], factors);
            load(k + groups * unroll, v[u]);
#pragma unroll
            for (int r = 0; r < ROWS && k < depth; r++) {
                const float x_k = to_float(xs[r * depth + k]);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    acc[r * N + n] += x_k * factors[n];
                }
            }
        }
    }
    int at = 0;
    bool writes = true;
    sum_and_scatter<SIZE, LANES>(acc, at, writes);
#pragma unroll
    for (int i = 0; i < kept; i++) {
        if (writes) {
            sums[(tid / 32 * SIZE + at + i) * LANES + lane] = acc[i];
        }
    }
    __syncthreads();
    if (has_own) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < warps; s++) {
            sum += sums[s * SIZE * LANES + tid];
        }
        put<T>(p.finish, row, own, columns, sum + (to_float(bias) + to_float(residual)));
    }
}

template <class T, int ROWS, bool NORM>
nd_status few(const char *op, int device, const nd_array *x, Products<T> products, double eps) {
    const int depth = (int)x->shape[1];
    auto launch = [&](auto lanes) -> nd_status {
        constexpr int LANES = decltype(lanes)::get, N = Vec<T>::size;
        static_assert(ROWS * N * LANES <= threads, "a thread has one result");
        const size_t bytes = sizeof(float) * warps * ROWS * N * LANES + sizeof(T) * ROWS * depth;
        unsigned blocks = 0;
        for (Product<T> &p : products.of) {
            p.first_block = blocks;
            blocks += (unsigned)ceil_div<int64_t>(p.columns, LANES * N);
        }
        return cuda_launch(op, device, few_kernel<T, ROWS, LANES, NORM>, blocks, threads, bytes,
                           data_of<T>(x), products, (int)x->shape[0], depth, (float)eps);
    };
    /* Whole lines of w where that leaves enough blocks, else sectors. */
    const int64_t lines = products.of[0].columns * (int64_t)sizeof(T) / 128;
    if constexpr (!NORM) {
        if (lines >= 2 * cuda_device_limits(device)->processors) {
            return launch(Constant<8>());
        }
    }
    return launch(Constant<2>());
}

nd_status few_rows(const char *op, int device, const nd_array *x, const nd_array *w,
                   const Finish &f) {
    return with_float(op, x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const Products<T> p = {{{data_of<T>(w), f, w->shape[1]}}};
        switch (few_rows_of(x->shape[0])) {
        case 1:
            return few<T, 1, false>(op, device, x, p, 0);
        case 2:
            return few<T, 2, false>(op, device, x, p, 0);
        case 4:
            return few<T, 4, false>(op, device, x, p, 0);
        default:
            return few<T, 8, false>(op, device, x, p, 0);
        }
    });
}

} // namespace

nd_status linear_fwd_few(int device, const linear_fwd_args *a) {
    const Finish f = {Finish::LINEAR,
                      a->b ? a->b->data : nullptr,
                      a->r ? a->r->data : nullptr,
                      a->y->data,
                      nullptr,
                      a->y->shape[1]};
    return few_rows("linear_fwd", device, a->x, a->w, f);
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
    return with_float(op, a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const Products<T> p = {{{data_of<T>(a->w_qkv), packed, a->w_qkv->shape[1],
                                 data_of<T>(a->norm_w1), data_of<T>(a->norm_b1)},
                                {data_of<T>(a->w1), g, a->w1->shape[1], data_of<T>(a->norm_w2),
                                 data_of<T>(a->norm_b2)}}};
        switch (few_rows_of(a->x->shape[0])) {
        case 1:
            return few<T, 1, true>(op, device, a->x, p, a->eps);
        case 2:
            return few<T, 2, true>(op, device, a->x, p, a->eps);
        default:
            return few<T, 4, true>(op, device, a->x, p, a->eps);
        }
    });
}
