/* layernorm.cu - layer normalisation over the last axis, x (N, C).
 *
 *   forward   mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + eps)
 *             h = (x - mean) rstd, y = h w + b
 *   backward  g = dy w
 *             dx = rstd (g - sum(g) / C - h sum(g h) / C)
 *             dw += sum over rows of dy h, db += sum over rows of dy
 *
 * Everything is computed in float32; the variance is that of the differences from the mean, not a
 * difference of squares.
 *
 * Rows in registers: when C is a multiple of the 16-byte vector, at most 4096, and all rows are
 * aligned, a group of 32 threads (C <= 1024) or 256 holds the row it works on, so that x (and dy) is
 * read once. In the backward each group keeps its columns' part of dw and db in registers over
 * all of its rows; a block leaves one row of partial sums for each in scratch, and
 * cuda_add_columns adds them in a fixed order. Which row goes to which group depends on N and the
 * device only. Other shapes: a block a row that reads it three times, mostly from cache, and dw and
 * db from a second pass over columns.
 *
 * Bytes, T bytes an element: forward 2 N C T + 8 N; backward 3 N C T + 8 N, and 8 C a block twice.
 */
#include "common.cuh"

namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;

/* Sum over the group of 32 or 256 neighbouring threads. */
template <int group> __device__ __forceinline__ float group_sum(float v) {
    return group == 32 ? warp_sum(v) : block_sum(v);
}

/* count vectors of T a thread, `group` vectors apart; beyond the row nothing is read: zeros. */
template <class T, int group, int count>
__device__ __forceinline__ void load_row(const T *row, int columns, int lane,
                                         Vec<T> (&out)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
        int c = (i * group + lane) * Vec<T>::size;
        if (c < columns) {
            out[i] = load16(row + c);
        } else {
#pragma unroll
            for (int k = 0; k < Vec<T>::size; k++) {
                out[i].v[k] = from_float<T>(0.0f);
            }
        }
    }
}

/* ---- rows in registers ----------------------------------------------------------------------- */
template <class T, int group, int count>
__global__ void __launch_bounds__(threads)
    forward_kernel(const T *x, const T *w, const T *b, float eps, T *y, float *mean, float *rstd,
                   int64_t rows, int columns) {
    constexpr int N = Vec<T>::size;
    const int lane = threadIdx.x % group;
    const float inverse = 1.0f / (float)columns;
    for (int64_t base = (int64_t)blockIdx.x * (threads / group); base < rows;
         base += (int64_t)gridDim.x * (threads / group)) {
        int64_t row = base + threadIdx.x / group;
        if (group == 32 && row >= rows) {
            break; /* a whole warp leaves; blocks never do inside the loop */
        }
        Vec<T> xs[count];
        load_row<T, group, count>(x + row * columns, columns, lane, xs);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                sum += to_float(xs[i].v[k]);
            }
        }
        const float m = group_sum<group>(sum) * inverse;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < count; i++) {
            if ((i * group + lane) * N < columns) {
#pragma unroll
                for (int k = 0; k < N; k++) {
                    float d = to_float(xs[i].v[k]) - m;
                    squares += d * d;
                }
            }
        }
        const float r = 1.0f / sqrtf(group_sum<group>(squares) * inverse + eps);
#pragma unroll
        for (int i = 0; i < count; i++) {
            int c = (i * group + lane) * N;
            if (c < columns) {
                Vec<T> ws = load16(w + c), bs = load16(b + c), ys;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    float h = (to_float(xs[i].v[k]) - m) * r;
                    ys.v[k] = from_float<T>(h * to_float(ws.v[k]) + to_float(bs.v[k]));
                }
                store16(y + row * columns + c, ys);
            }
        }
        if (lane == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
}

/* partial: gridDim.x rows of dw, then gridDim.x rows of db. */
template <class T, int group, int count>
__global__ void __launch_bounds__(threads)
    backward_kernel(const T *dy, const T *x, const T *w, const float *mean, const float *rstd,
                    T *dx, float *partial, int64_t rows, int columns) {
    constexpr int N = Vec<T>::size;
    const int lane = threadIdx.x % group;
    const float inverse = 1.0f / (float)columns;
    float dw[count][N], db[count][N];
    Vec<T> ws[count];
    load_row<T, group, count>(w, columns, lane, ws);
#pragma unroll
    for (int i = 0; i < count; i++) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            dw[i][k] = db[i][k] = 0.0f;
        }
    }
    for (int64_t base = (int64_t)blockIdx.x * (threads / group); base < rows;
         base += (int64_t)gridDim.x * (threads / group)) {
        int64_t row = base + threadIdx.x / group;
        if (group == 32 && row >= rows) {
            break;
        }
        Vec<T> xs[count], ds[count];
        load_row<T, group, count>(x + row * columns, columns, lane, xs);
        load_row<T, group, count>(dy + row * columns, columns, lane, ds);
        const float m = mean[row], r = rstd[row];
        float sum_g = 0.0f, sum_gh = 0.0f;
#pragma unroll
        for (int i = 0; i < count; i++) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                /* beyond the row dy and w are zero, and so is all that is added */
                float d = to_float(ds[i].v[k]), h = (to_float(xs[i].v[k]) - m) * r;
                float g = d * to_float(ws[i].v[k]);
                sum_g += g;
                sum_gh += g * h;
                dw[i][k] += d * h;
                db[i][k] += d;
            }
        }
        sum_g = group_sum<group>(sum_g) * inverse;
        sum_gh = group_sum<group>(sum_gh) * inverse;
#pragma unroll
        for (int i = 0; i < count; i++) {
            int c = (i * group + lane) * N;
            if (c < columns) {
                Vec<T> out;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    float h = (to_float(xs[i].v[k]) - m) * r;
                    float g = to_float(ds[i].v[k]) * to_float(ws[i].v[k]);
                    out.v[k] = from_float<T>(r * (g - sum_g - h * sum_gh));
                }
                store16(dx + row * columns + c, out);
            }
        }
    }

    float *to_dw = partial + (int64_t)blockIdx.x * columns;
    float *to_db = partial + ((int64_t)gridDim.x + blockIdx.x) * columns;
    if (group == 32) {
        /* The block's warps hold the same columns: one warp after the other adds its part. */
        __shared__ float sums[2][32 * count * N];
        const int warp = threadIdx.x / 32;
        for (int turn = 0; turn < warps; turn++) {
            if (warp == turn) {
#pragma unroll
                for (int i = 0; i < count; i++) {
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        int at = (i * N + k) * 32 + lane;
                        sums[0][at] = turn == 0 ? dw[i][k] : sums[0][at] + dw[i][k];
                        sums[1][at] = turn == 0 ? db[i][k] : sums[1][at] + db[i][k];
                    }
                }
            }
            __syncthreads();
        }
        for (int c = threadIdx.x; c < columns; c += threads) {
            int i = c / (32 * N), in_row = c % (32 * N);
            int at = (i * N + in_row % N) * 32 + in_row / N;
            to_dw[c] = sums[0][at];
            to_db[c] = sums[1][at];
        }
    } else {
#pragma unroll
        for (int i = 0; i < count; i++) {
            int c = (i * group + lane) * N;
            if (c < columns) {
#pragma unroll
                for (int k = 0; k < N; k += 4) {
                    *(float4 *)(to_dw + c + k) =
                        make_float4(dw[i][k], dw[i][k + 1], dw[i][k + 2], dw[i][k + 3]);
                    *(float4 *)(to_db + c + k) =
                        make_float4(db[i][k], db[i][k + 1], db[i][k + 2], db[i][k + 3]);
                }
            }
        }
    }
}

/* ---- any C ----------------------------------------------------------------------------------- */
template <class T>
__global__ void __launch_bounds__(threads)
    any_forward_kernel(const T *x, const T *w, const T *b, float eps, T *y, float *mean,
                       float *rstd, int64_t rows, int64_t columns) {
    const float inverse = 1.0f / (float)columns;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *from = x + row * columns;
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
        const float r = 1.0f / sqrtf(block_sum(squares) * inverse + eps);
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            float h = (to_float(from[c]) - m) * r;
            y[row * columns + c] = from_float<T>(h * to_float(w[c]) + to_float(b[c]));
        }
        if (threadIdx.x == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
}

template <class T>
__global__ void __launch_bounds__(threads)
    any_backward_kernel(const T *dy, const T *x, const T *w, const float *mean, const float *rstd,
                        T *dx, int64_t rows, int64_t columns) {
    const float inverse = 1.0f / (float)columns;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const float m = mean[row], r = rstd[row];
        float sum_g = 0.0f, sum_gh = 0.0f;
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            float g = to_float(dy[row * columns + c]) * to_float(w[c]);
            sum_g += g;
            sum_gh += g * ((to_float(x[row * columns + c]) - m) * r);
        }
        sum_g = block_sum(sum_g) * inverse;
        sum_gh = block_sum(sum_gh) * inverse;
        for (int64_t c = threadIdx.x; c < columns; c += threads) {
            float g = to_float(dy[row * columns + c]) * to_float(w[c]);
            float h = (to_float(x[row * columns + c]) - m) * r;
            dx[row * columns + c] = from_float<T>(r * (g - sum_g - h * sum_gh));
        }
    }
}

/* Block (i, j): 256 columns, rows [j chunk, (j + 1) chunk). */
template <class T>
__global__ void __launch_bounds__(threads)
    any_weights_kernel(const T *dy, const T *x, const float *mean, const float *rstd,
                       float *partial, int64_t rows, int64_t columns, int64_t chunk) {
    const int64_t c = (int64_t)blockIdx.x * threads + threadIdx.x;
    if (c >= columns) {
        return;
    }
    const int64_t end = min(rows, (blockIdx.y + 1) * chunk);
    float dw = 0.0f, db = 0.0f;
#pragma unroll 4
    for (int64_t row = blockIdx.y * chunk; row < end; row++) {
        float d = to_float(dy[row * columns + c]);
        dw += d * ((to_float(x[row * columns + c]) - mean[row]) * rstd[row]);
        db += d;
    }
    partial[blockIdx.y * columns + c] = dw;
    partial[((int64_t)gridDim.y + blockIdx.y) * columns + c] = db;
}

/* ---- host ------------------------------------------------------------------------------------ */
/* f(group, count): the smallest kernel that holds a row, or false when none does. */
template <class T, class F> bool with_row_in_registers(int64_t columns, F &&f) {
    constexpr int N = Vec<T>::size;
    if (columns == 0 || columns % N != 0 || columns > 4096) {
        return false;
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
    return true;
}

} // namespace

nd_status cuda_layernorm_fwd(int device, const layernorm_fwd_args *a) {
    const int64_t rows = a->x->shape[0], columns = a->x->shape[1];
    if (rows == 0) {
        return ND_OK;
    }
    cudaStream_t stream = cuda_stream(device);
    return with_float("layernorm_fwd", a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const T *x = data_of<T>(a->x), *w = data_of<T>(a->w), *b = data_of<T>(a->b);
        T *y = data_of<T>(a->y);
        float *mean = data_of<float>(a->mean), *rstd = data_of<float>(a->rstd), eps = (float)a->eps;
        bool aligned = is_aligned16(x) && is_aligned16(w) && is_aligned16(b) && is_aligned16(y);
        bool done =
            aligned && with_row_in_registers<T>(columns, [&](auto group, auto count) {
                constexpr int G = decltype(group)::get, K = decltype(count)::get;
                unsigned grid = cuda_grid(device, ceil_div<int64_t>(rows, threads / G), 1024);
                forward_kernel<T, G, K>
                    <<<grid, threads, 0, stream>>>(x, w, b, eps, y, mean, rstd, rows, (int)columns);
            });
        if (!done) {
            any_forward_kernel<T><<<cuda_grid(device, rows, 1024), threads, 0, stream>>>(
                x, w, b, eps, y, mean, rstd, rows, columns);
        }
        CUDA_LAUNCHED("layernorm_fwd");
        return ND_OK;
    });
}

nd_status cuda_layernorm_bwd(int device, const layernorm_bwd_args *a) {
    const char *op = "layernorm_bwd";
    const int64_t rows = a->x->shape[0], columns = a->x->shape[1];
    if (rows == 0 || columns == 0) {
        return ND_OK;
    }
    cudaStream_t stream = cuda_stream(device);
    return with_float(op, a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const T *dy = data_of<T>(a->dy), *x = data_of<T>(a->x), *w = data_of<T>(a->w);
        const float *mean = data_of<float>(a->mean), *rstd = data_of<float>(a->rstd);
        T *dx = data_of<T>(a->dx);
        bool aligned = is_aligned16(x) && is_aligned16(w) && is_aligned16(dy) && is_aligned16(dx);

        /* Partial rows of dw (and as many of db). Two blocks of 256 threads a processor fill it. */
        int64_t strips = ceil_div<int64_t>(columns, threads);
        int64_t blocks = cuda_device_limits(device)->processors * 2;
        bool in_registers = aligned && with_row_in_registers<T>(columns, [](auto, auto) {});
        int64_t chunk = 0;
        if (in_registers) {
            int64_t groups = ceil_div<int64_t>(rows, columns <= 1024 ? warps : 1);
            blocks = groups < blocks ? groups : blocks;
        } else {
            chunk = ceil_div(rows, ceil_div(blocks * 4, strips));
            blocks = ceil_div(rows, chunk);
        }
        void *scratch;
        ND_TRY(cuda_scratch(device, (size_t)(2 * blocks * columns) * sizeof(float), &scratch));
        float *partial = (float *)scratch;

        if (in_registers) {
            with_row_in_registers<T>(columns, [&](auto group, auto count) {
                constexpr int G = decltype(group)::get, K = decltype(count)::get;
                backward_kernel<T, G, K><<<(unsigned)blocks, threads, 0, stream>>>(
                    dy, x, w, mean, rstd, dx, partial, rows, (int)columns);
            });
            CUDA_LAUNCHED(op);
        } else {
            any_backward_kernel<T><<<cuda_grid(device, rows, 1024), threads, 0, stream>>>(
                dy, x, w, mean, rstd, dx, rows, columns);
            CUDA_LAUNCHED(op);
            dim3 grid((unsigned)strips, (unsigned)blocks);
            any_weights_kernel<T>
                <<<grid, threads, 0, stream>>>(dy, x, mean, rstd, partial, rows, columns, chunk);
            CUDA_LAUNCHED(op);
        }
        ND_TRY(cuda_add_columns(op, device, partial, blocks, columns, data_of<float>(a->dw)));
        return cuda_add_columns(op, device, partial + blocks * columns, blocks, columns,
                                data_of<float>(a->db));
    });
}
