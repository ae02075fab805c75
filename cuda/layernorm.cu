/* layernorm.cu - layer normalisation over the last axis, x (N, C), by one norm, or by two that read
 * the same x (mean and rstd are then the same).
 *
 *   forward   mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + eps)
 *             h = (x - mean) rstd, y = h w + b of each norm
 *   backward  g = dy w, summed over the norms
 *             dx = rstd (g - sum(g) / C - h sum(g h) / C) + dres, where there is a dres
 *             dw += sum over rows of dy h, db += sum over rows of dy, of each norm
 *
 * Everything is computed in float32, and dx is rounded once; the variance is that of the
 * differences from the mean, not a difference of squares.
 *
 * Rows in registers: when C is a multiple of the 16-byte vector, at most 4096, and all rows are
 * aligned, each element is read once. In the forward a group of 32 threads (C <= 1024) or 256 holds
 * the row it works on. In the backward a thread has 8 columns of a row, whatever C: their parts of
 * dw and db stay in its registers over all of the block's rows, and the rows to come wait in shared
 * memory, so that few threads keep enough reads under way. A block leaves one row of partial sums
 * for each dw and db in scratch, and cuda_add_columns_of adds them in a fixed order. Which row goes
 * to which threads depends on N and the device only. Other shapes: a block a row that reads it
 * three times, mostly from cache, and dw and db from a second pass over columns.
 *
 * Bytes, T bytes an element: forward 2 N C T + 8 N, by two norms 3 N C T + 8 N; backward 3 N C T +
 * 8 N, N C T more for the second norm and for dres, and 8 C a block and norm twice.
 */
#include "layernorm.cuh"
#include "mma.cuh"

namespace {

constexpr int threads = 256;

/* The operands of the norms of an x, as arrays and as what kernels take. */
template <class T, int norms> struct Forward {
    const T *x, *w[norms], *b[norms];
    T *y[norms];
    float *mean, *rstd, eps;
    int64_t rows, columns;
};
template <class T, int norms> struct Backward {
    const T *read[2 + norms]; /* rows: x, dres or null, the norms' dy */
    const T *w[norms];
    const float *mean, *rstd;
    T *dx;
    float *partial; /* of each norm dw and db: a row of columns a block */
    int64_t rows, columns;
};
enum { X, DRES, DY };

/* ---- rows in registers ----------------------------------------------------------------------- */
template <class T, int norms, int group, int count>
__global__ void __launch_bounds__(threads, count < 4 ? 1 : 3)
    forward_kernel(const Forward<T, norms> p) {
    await_previous();
    constexpr int N = Vec<T>::size;
    const int64_t rows = p.rows;
    const int columns = (int)p.columns;
    const int lane = threadIdx.x % group;
    for (int64_t base = (int64_t)blockIdx.x * (threads / group); base < rows;
         base += (int64_t)gridDim.x * (threads / group)) {
        int64_t row = base + threadIdx.x / group;
        if (group == 32 && row >= rows) {
            break; /* a whole warp leaves; blocks never do inside the loop */
        }
        Vec<T> xs[count];
        load_row(p.x + row * columns, columns, group, lane, xs);
        float m, r;
        row_statistics<group>(xs, columns, lane, p.eps, m, r);
#pragma unroll
        for (int i = 0; i < count; i++) {
            int c = (i * group + lane) * N;
            if (c < columns) {
#pragma unroll
                for (int n = 0; n < norms; n++) {
                    const Vec<T> ws = load16(p.w[n] + c), bs = load16(p.b[n] + c);
                    store16(p.y[n] + row * columns + c, normalized(xs[i], ws, bs, m, r));
                }
            }
        }
        if (lane == 0) {
            checked(p.mean + row) = m;
            checked(p.rstd + row) = r;
        }
    }
}

/* The backward's block: blockDim.x threads hold a row, blockDim.y rows at a time. */
constexpr int held = 8; /* columns a thread */
constexpr int widest = 4096;
constexpr int most_threads = widest / held;
static inline dim3 backward_block(unsigned columns) {
    const unsigned a_row = ceil_div(columns, 32u * held) * 32;
    return dim3(a_row, a_row < threads ? threads / a_row : 1);
}

/* Both sums over the warps that hold a row. `parts` must not be that of the call before: one
 * barrier is then enough. */
__device__ __forceinline__ float2 row_sums(float2 v, float2 (&parts)[most_threads / 32]) {
    v = make_float2(warp_sum(v.x), warp_sum(v.y));
    const int warps = blockDim.x / 32;
    if (warps == 1) {
        return v;
    }
    float2 *of_row = parts + threadIdx.y * warps;
    if (threadIdx.x % 32 == 0) {
        of_row[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = of_row[0];
    for (int i = 1; i < warps; i++) {
        v.x += of_row[i].x;
        v.y += of_row[i].y;
    }
    return v;
}

/* Prefetch of this thread's part of the next rows into places of shared memory that no other thread
 * reads: no thread waits for another. Absent rows, columns and dres are zeros. */
template <class T, int norms> struct Ahead {
    static constexpr int N = Vec<T>::size, count = held / N, operands = 2 + norms;
    static constexpr int rows = 4 / sizeof(T); /* 96 or 128 bytes a thread are under way */
    static constexpr size_t bytes = sizeof(uint4) * rows * operands * count; /* a thread */

    const Backward<T, norms> &p;
    uint4 *places;

    __device__ __forceinline__ uint4 *place(int slot, int operand, int i) const {
        return places + ((slot * operands + operand) * count + i) * blockDim.x * blockDim.y;
    }
    __device__ __forceinline__ void fetch(int64_t row, int slot) const {
#pragma unroll
        for (int o = 0; o < operands; o++) {
#pragma unroll
            for (int i = 0; i < count; i++) {
                const int c = (i * blockDim.x + threadIdx.x) * N;
                copy_async16(shared_address(place(slot, o, i)), p.read[o] + row * p.columns + c,
                             row < p.rows && c < p.columns && p.read[o] != nullptr);
            }
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void take(int slot, Vec<T> (&to)[operands][count]) const {
        copy_async_wait<rows - 1>();
#pragma unroll
        for (int o = 0; o < operands; o++) {
#pragma unroll
            for (int i = 0; i < count; i++) {
                to[o][i] = load16((const T *)place(slot, o, i));
            }
        }
    }
};

template <class T, int norms>
__global__ void __launch_bounds__(most_threads, 1) backward_kernel(const Backward<T, norms> p) {
    await_previous();
    constexpr int N = Vec<T>::size, count = held / N;
    extern __shared__ uint4 shared[];
    __shared__ float2 parts[2][most_threads / 32];
    const Ahead<T, norms> ahead = {p, shared + threadIdx.y * blockDim.x + threadIdx.x};
    const float inverse = 1.0f / (float)p.columns;
    float sums[2 * norms][count][N] = {}; /* of each norm dw and db */
    Vec<T> ws[norms][count];
#pragma unroll
    for (int n = 0; n < norms; n++) {
        load_row(p.w[n], (int)p.columns, blockDim.x, threadIdx.x, ws[n]);
    }
    const int64_t first = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int64_t step = (int64_t)gridDim.x * blockDim.y;
#pragma unroll
    for (int slot = 0; slot < ahead.rows; slot++) {
        ahead.fetch(first + slot * step, slot);
    }
    float next_mean = first < p.rows ? p.mean[first] : 0.0f;
    float next_rstd = first < p.rows ? p.rstd[first] : 0.0f;
    int parity = 0;
    /* The threads of a block go on together, also those whose last row is not there. */
    for (int64_t row = first; row - threadIdx.y < p.rows; row += step) {
        Vec<T> at[2 + norms][count];
        ahead.take(parity % ahead.rows, at);
        ahead.fetch(row + ahead.rows * step, parity % ahead.rows);
        const float mean = next_mean, rstd = next_rstd;
        if (row + step < p.rows) {
            next_mean = p.mean[row + step];
            next_rstd = p.rstd[row + step];
        }
        float g[count][N];
        float2 sum = make_float2(0.0f, 0.0f); /* of g and of g h */
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                /* beyond the row dy and w are zero, and so is all that is added */
                const float h = (to_float(at[X][i].v[k]) - mean) * rstd;
                g[i][k] = 0.0f;
#pragma unroll
                for (int n = 0; n < norms; n++) {
                    const float d = to_float(at[DY + n][i].v[k]);
                    g[i][k] += d * to_float(ws[n][i].v[k]);
                    sums[2 * n][i][k] += d * h;
                    sums[2 * n + 1][i][k] += d;
                }
                sum.x += g[i][k];
                sum.y += g[i][k] * h;
            }
        }
        sum = row_sums(sum, parts[parity]);
        parity ^= 1;
        sum.x *= inverse;
        sum.y *= inverse;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const int c = (i * blockDim.x + threadIdx.x) * N;
            if (row < p.rows && c < p.columns) {
                Vec<T> out;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    const float h = (to_float(at[X][i].v[k]) - mean) * rstd;
                    const float d = rstd * (g[i][k] - sum.x - h * sum.y);
                    out.v[k] = from_float<T>(d + to_float(at[DRES][i].v[k]));
                }
                store16(p.dx + row * p.columns + c, out);
            }
        }
    }

    /* The threads above each other hold the same columns: each adds what those before it have, and
     * the last writes. The rows that were fetched beyond the end must have come before. */
    copy_async_wait<0>();
    for (int y = 0; y < blockDim.y; y++) {
        __syncthreads();
        if (threadIdx.y != y) {
            continue;
        }
#pragma unroll
        for (int s = 0; s < 2 * norms; s++) {
            float *to = p.partial + ((int64_t)s * gridDim.x + blockIdx.x) * p.columns;
#pragma unroll
            for (int i = 0; i < count; i++) {
                const int c = (i * blockDim.x + threadIdx.x) * N;
#pragma unroll
                for (int k = 0; k < N; k += 4) {
                    float4 *handed = (float4 *)shared;
                    handed += ((s * count + i) * (N / 4) + k / 4) * blockDim.x + threadIdx.x;
                    float4 v = make_float4(sums[s][i][k], sums[s][i][k + 1], sums[s][i][k + 2],
                                           sums[s][i][k + 3]);
                    if (y > 0) {
                        v = make_float4(handed->x + v.x, handed->y + v.y, handed->z + v.z,
                                        handed->w + v.w);
                    }
                    if (y + 1 < blockDim.y) {
                        *handed = v;
                    } else if (c < p.columns) {
                        checked((float4 *)(to + c + k)) = v;
                    }
                }
            }
        }
    }
}

/* ---- any C ----------------------------------------------------------------------------------- */
template <class T, int norms>
__global__ void __launch_bounds__(threads) any_forward_kernel(const Forward<T, norms> p) {
    await_previous();
    const int64_t columns = p.columns;
    const float inverse = 1.0f / (float)columns;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T *from = p.x + row * columns;
        float sum = 0.0f;
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            sum += to_float(from[c]);
        }
        const float m = block_sum(sum) * inverse;
        float squares = 0.0f;
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            float d = to_float(from[c]) - m;
            squares += d * d;
        }
        const float r = 1.0f / sqrtf(block_sum(squares) * inverse + p.eps);
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            float h = (to_float(from[c]) - m) * r;
#pragma unroll
            for (int n = 0; n < norms; n++) {
                float y = h * to_float(p.w[n][c]) + to_float(p.b[n][c]);
                p.y[n][row * columns + c] = from_float<T>(y);
            }
        }
        if (threadIdx.x == 0) {
            checked(p.mean + row) = m;
            checked(p.rstd + row) = r;
        }
    }
}

template <class T, int norms>
__global__ void __launch_bounds__(threads) any_backward_kernel(const Backward<T, norms> p) {
    await_previous();
    const int64_t columns = p.columns;
    const float inverse = 1.0f / (float)columns;
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const float m = p.mean[row], r = p.rstd[row];
        auto h_at = [&](int64_t at) { return (to_float(p.read[X][at]) - m) * r; };
        auto g_at = [&](int64_t c) {
            float g = 0.0f;
#pragma unroll
            for (int n = 0; n < norms; n++) {
                g += to_float(p.read[DY + n][row * columns + c]) * to_float(p.w[n][c]);
            }
            return g;
        };
        float sum_g = 0.0f, sum_gh = 0.0f;
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            const float g = g_at(c);
            sum_g += g;
            sum_gh += g * h_at(row * columns + c);
        }
        sum_g = block_sum(sum_g) * inverse;
        sum_gh = block_sum(sum_gh) * inverse;
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            const int64_t at = row * columns + c;
            const float d = r * (g_at(c) - sum_g - h_at(at) * sum_gh);
            p.dx[at] = from_float<T>(p.read[DRES] ? d + to_float(p.read[DRES][at]) : d);
        }
    }
}

/* Block (i, j): 256 columns, rows [j chunk, (j + 1) chunk). */
template <class T, int norms>
__global__ void __launch_bounds__(threads)
    any_weights_kernel(const Backward<T, norms> p, int64_t chunk) {
    await_previous();
    const int64_t c = (int64_t)blockIdx.x * threads + threadIdx.x;
    if (c >= p.columns) {
        return;
    }
    const int64_t end = min(p.rows, (blockIdx.y + 1) * chunk);
    float sums[2 * norms] = {};
#pragma unroll 4
    for (int64_t row = blockIdx.y * chunk; row < end; row++) {
        const int64_t at = row * p.columns + c;
        const float h = (to_float(p.read[X][at]) - p.mean[row]) * p.rstd[row];
#pragma unroll
        for (int n = 0; n < norms; n++) {
            const float d = to_float(p.read[DY + n][at]);
            sums[2 * n] += d * h;
            sums[2 * n + 1] += d;
        }
    }
#pragma unroll
    for (int s = 0; s < 2 * norms; s++) {
        p.partial[((int64_t)s * gridDim.y + blockIdx.y) * p.columns + c] = sums[s];
    }
}

/* ---- host ------------------------------------------------------------------------------------ */
/* f(group, count): the smallest kernel that holds a row, if one does. */
template <class T, class F> void with_row_in_registers(int64_t columns, F &&f) {
    constexpr int N = Vec<T>::size;
    if (columns == 0 || columns % N != 0 || columns > widest) {
        return;
    }
    int64_t vectors = columns / N;
    if (columns <= 1024) {
        if (vectors <= 32) {
            f(Constant<32>(), Constant<1>());
        } else if (vectors <= 64) {
            f(Constant<32>(), Constant<2>());
        } else if (vectors <= 128) {
            f(Constant<32>(), Constant<4>());
        } else if constexpr (N == 4) {
            f(Constant<32>(), Constant<8>());
        }
    } else if (vectors <= 256) {
        f(Constant<256>(), Constant<1>());
    } else if (vectors <= 512) {
        f(Constant<256>(), Constant<2>());
    } else if constexpr (N == 4) {
        f(Constant<256>(), Constant<4>());
    }
}

/* The operands that each norm has of its own. */
struct ForwardNorm {
    const nd_array *w, *b;
    nd_array *y;
};
struct BackwardNorm {
    const nd_array *dy, *w;
    nd_array *dw, *db;
};

template <int norms>
nd_status forward(const char *op, int device, const nd_array *x, const ForwardNorm (&of)[norms],
                  double eps, nd_array *mean, nd_array *rstd) {
    const int64_t rows = x->shape[0], columns = x->shape[1];
    if (rows == 0) {
        return ND_OK;
    }
    return with_float(op, x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        Forward<T, norms> p;
        p.x = data_of<T>(x);
        bool aligned = is_aligned16(p.x);
        for (int n = 0; n < norms; n++) {
            p.w[n] = data_of<T>(of[n].w);
            p.b[n] = data_of<T>(of[n].b);
            p.y[n] = data_of<T>(of[n].y);
            aligned &= is_aligned16(p.w[n]) && is_aligned16(p.b[n]) && is_aligned16(p.y[n]);
        }
        p.mean = data_of<float>(mean);
        p.rstd = data_of<float>(rstd);
        p.eps = (float)eps;
        p.rows = rows;
        p.columns = columns;
        auto *kernel = any_forward_kernel<T, norms>;
        int64_t blocks = rows;
        if (aligned) {
            with_row_in_registers<T>(columns, [&](auto group, auto count) {
                constexpr int G = decltype(group)::get, K = decltype(count)::get;
                kernel = forward_kernel<T, norms, G, K>;
                blocks = ceil_div<int64_t>(rows, threads / G);
            });
        }
        return cuda_launch(op, device, kernel, cuda_grid(device, blocks, 1024), threads, 0, p);
    });
}

template <int norms>
nd_status backward(const char *op, int device, const nd_array *x, const BackwardNorm (&of)[norms],
                   const nd_array *mean, const nd_array *rstd, const nd_array *dres, nd_array *dx) {
    const int64_t rows = x->shape[0], columns = x->shape[1];
    if (rows == 0 || columns == 0) {
        return ND_OK;
    }
    return with_float(op, x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        Backward<T, norms> p;
        p.read[X] = data_of<T>(x);
        p.read[DRES] = dres ? data_of<T>(dres) : nullptr;
        float *sums[2 * norms];
        for (int n = 0; n < norms; n++) {
            p.read[DY + n] = data_of<T>(of[n].dy);
            p.w[n] = data_of<T>(of[n].w);
            sums[2 * n] = data_of<float>(of[n].dw);
            sums[2 * n + 1] = data_of<float>(of[n].db);
        }
        p.mean = data_of<float>(mean);
        p.rstd = data_of<float>(rstd);
        p.dx = data_of<T>(dx);
        p.rows = rows;
        p.columns = columns;
        bool in_registers = columns % Vec<T>::size == 0 && columns <= widest && is_aligned16(p.dx);
        for (const T *read : p.read) {
            in_registers &= is_aligned16(read); /* null is */
        }
        for (const T *w : p.w) {
            in_registers &= is_aligned16(w);
        }

        /* A row of partial sums a block. 512 threads are what a processor has registers for. */
        const int64_t processors = cuda_device_limits(device)->processors;
        const int64_t strips = ceil_div<int64_t>(columns, threads);
        const dim3 block = in_registers ? backward_block((unsigned)columns) : dim3(threads);
        const int block_threads = block.x * block.y;
        int64_t blocks, chunk = 0;
        if (in_registers) {
            blocks = processors * (most_threads / block_threads);
            blocks = min(blocks, ceil_div<int64_t>(rows, block.y));
        } else {
            chunk = ceil_div(rows, ceil_div(processors * 8, strips));
            blocks = ceil_div(rows, chunk);
        }
        void *scratch;
        ND_TRY(
            cuda_scratch(device, (size_t)(2 * norms * blocks * columns) * sizeof(float), &scratch));
        p.partial = (float *)scratch;

        if (in_registers) {
            const size_t shared = Ahead<T, norms>::bytes * block_threads;
            ND_TRY(cuda_launch(op, device, backward_kernel<T, norms>, (unsigned)blocks, block,
                               shared, p));
        } else {
            ND_TRY(cuda_launch(op, device, any_backward_kernel<T, norms>,
                               cuda_grid(device, rows, 1024), threads, 0, p));
            dim3 grid((unsigned)strips, (unsigned)blocks);
            ND_TRY(
                cuda_launch(op, device, any_weights_kernel<T, norms>, grid, threads, 0, p, chunk));
        }
        return cuda_add_columns_of(op, device, p.partial, blocks, columns, blocks * columns,
                                   2 * norms, sums);
    });
}

} // namespace

nd_status cuda_layernorm_fwd(int device, const layernorm_fwd_args *a) {
    return forward<1>("layernorm_fwd", device, a->x, {{a->w, a->b, a->y}}, a->eps, a->mean,
                      a->rstd);
}

nd_status cuda_layernorm_pair_fwd(int device, const layernorm_pair_fwd_args *a) {
    return forward<2>("layernorm_pair_fwd", device, a->x,
                      {{a->norm_w1, a->norm_b1, a->y1}, {a->norm_w2, a->norm_b2, a->y2}}, a->eps,
                      a->mean, a->rstd);
}

nd_status cuda_layernorm_bwd(int device, const layernorm_bwd_args *a) {
    return backward<1>("layernorm_bwd", device, a->x, {{a->dy, a->w, a->dw, a->db}}, a->mean,
                       a->rstd, a->dres, a->dx);
}

nd_status cuda_layernorm_pair_bwd(int device, const layernorm_pair_bwd_args *a) {
    return backward<2>("layernorm_pair_bwd", device, a->x,
                       {{a->dy1, a->norm_w1, a->dnorm_w1, a->dnorm_b1},
                        {a->dy2, a->norm_w2, a->dnorm_w2, a->dnorm_b2}},
                       a->mean, a->rstd, a->dres, a->dx);
}
