/* layernorm_fp8.cu - layernorm_pair_fp8: two norms of x (N, C) in e4m3, also transposed.
 *
 *   mean = sum(x) / C, rstd = 1 / sqrt(sum((x - mean)^2) / C + eps), h = (x - mean) rstd
 *   q = (h w + b) / scale of each norm, in float32, rounded once
 *
 * Parallel: a block has 32 rows, a warp four of them, a lane every 32nd group of eight columns. Up to
 *   1,024 columns (512 in float32) wait in shared memory. Of wider rows chunks do, whose means and
 *   squares are joined (Chan et al. 1983); to be quantized they come again, from the last one on,
 *   which is still there. Each block finds both scales by itself while its first rows are on the
 *   way.
 *   Four rows of four columns become a word of each column. A lane's words take the place of its x,
 *   and threads then gather those of four warps, so that q_t is written in runs of 32 rows, which
 *   are whole sectors.
 * Bytes: N C (T + 4), T bytes an element of x: x once (all chunks but the last twice, the second
 *   time from L2), q and q_t of both norms. Each block reads w and b from L2.
 */
#include "common.cuh"
#include "fp8.cuh"
#include "mma.cuh"

namespace {

constexpr int block_rows = 32, warp_rows = 4, warps = block_rows / warp_rows, threads = 32 * warps;
constexpr int parts = block_rows / 16; /* of a column of q_t, 16 bytes each */

template <class T> struct Norms {
    const T *x, *of[4]; /* norm_w1, norm_b1, norm_w2, norm_b2 */
    uint8_t *q[2], *q_t[2];
    float *scale[2], *mean, *rstd, eps;
    int64_t rows;
    int columns, width, last; /* of x, of a chunk; the first one of the last chunk */
    int line;                 /* pieces of 16 bytes */
};

/* Eight neighbouring elements of a row, in the words of memory. */
template <class T> struct alignas(16) Eight {
    uint32_t words[2 * sizeof(T)];

    __device__ __forceinline__ float operator[](int k) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(words[k]);
        } else {
            const float2 pair = unpack_pair<T>(words[k / 2]);
            return k % 2 ? pair.y : pair.x;
        }
    }
    /* Make the compiler unpack the numbers again, instead of keeping them in registers. */
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (uint32_t &word : words) {
            asm volatile("" : "+r"(word));
        }
    }
};

/* Shared memory, in pieces of 16 bytes. A warp has lines of one piece a group of eight columns: row r
 * of x takes `pieces` lines from line pieces r on; then line 2 n + half takes the words of norm n,
 * of columns 4 half to 4 half + 3 of each group. The 2 pieces between lines and 1 between warps let
 * a warp gather words of 16 columns without bank conflicts. */
template <class T> constexpr int pieces = sizeof(T) / 2;
template <class T> __host__ __device__ constexpr int pieces_of_warp(int line) {
    return warp_rows * pieces<T> * line + 1;
}

/* 1 / scale of both norms, by all threads of a block. The first block writes the scales. */
template <class T> __device__ __forceinline__ void find_scales(const Norms<T> &p, float (&by)[2]) {
    __shared__ uint32_t of_warps[4][warps];
    uint32_t most[4] = {}; /* bits of |w1|, |b1|, ...: those of a NaN are the largest */
#pragma unroll 1
    for (int c = 8 * threadIdx.x; c < p.columns; c += 8 * threads) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const Eight<T> v = checked((const Eight<T> *)(p.of[k] + c));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                most[k] = max(most[k], __float_as_uint(fabsf(v[i])));
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        most[k] = __reduce_max_sync(0xffffffffu, most[k]);
        if (threadIdx.x % 32 == 0) {
            of_warps[k][threadIdx.x / 32] = most[k];
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        most[k] = __reduce_max_sync(0xffffffffu, of_warps[k][threadIdx.x % warps]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float w = __uint_as_float(most[2 * n]), b = __uint_as_float(most[2 * n + 1]);
        const float bound = nd_norm_bound(w, b, p.columns);
        const float scale = nd_fp8_scale(__float_as_uint(bound), false);
        by[n] = 1.0f / scale; /* powers of two */
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            checked(p.scale[n]) = scale;
        }
    }
}

/* A warp's rows in a chunk of `here` columns; each lane sees the groups that it copied alone. */
template <class T> struct Chunk {
    uint4 *lines;
    int line, here;

    /* x's row r begins at from + r columns; zeros where it is not there. */
    __device__ __forceinline__ void fetch(const T *from, int columns, bool is_there) const {
        for (int group = threadIdx.x % 32; 8 * group < here; group += 32) {
#pragma unroll
            for (int i = 0; i < warp_rows * pieces<T>; i++) {
                copy_async16(shared_address(lines + i * line + group),
                             from + (int64_t)columns * (i / pieces<T>)+8 * group +
                                 4 * (i % pieces<T>),
                             is_there);
            }
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void take(int group, Eight<T> (&xs)[warp_rows]) const {
#pragma unroll
        for (int i = 0; i < warp_rows * pieces<T>; i++) {
            const uint4 piece = lines[i * line + group];
            uint32_t *to = xs[i / pieces<T>].words + i % pieces<T> * 4;
            to[0] = piece.x;
            to[1] = piece.y;
            to[2] = piece.z;
            to[3] = piece.w;
        }
    }
    /* mean and squares (about it) of `before` columns become those of before + here columns. */
    __device__ __forceinline__ void join(float before, float (&mean)[warp_rows],
                                         float (&squares)[warp_rows]) const {
        const float count = (float)here, inverse = 1.0f / count;
        const float share = count / (before + count), rest = before / (before + count);
        float own[warp_rows] = {}, sum[warp_rows] = {};
        Eight<T> xs[warp_rows];
        for (int group = threadIdx.x % 32; 8 * group < here; group += 32) {
            take(group, xs);
#pragma unroll
            for (int r = 0; r < warp_rows; r++) {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    own[r] += xs[r][k];
                }
            }
        }
#pragma unroll
        for (int r = 0; r < warp_rows; r++) {
            own[r] = warp_sum(own[r]) * inverse;
        }
        for (int group = threadIdx.x % 32; 8 * group < here; group += 32) {
            take(group, xs);
#pragma unroll
            for (int r = 0; r < warp_rows; r++) {
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const float d = xs[r][k] - own[r];
                    sum[r] += d * d;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < warp_rows; r++) {
            const float shift = own[r] - mean[r];
            mean[r] = mean[r] * rest + own[r] * share; /* an infinity stays */
            squares[r] += warp_sum(sum[r]) + shift * (before * share) * shift;
        }
    }
};

/* Of eight columns from c on of four rows: q of norm n, and the words of columns for q_t. */
template <class T>
__device__ __forceinline__ void
quantize(const Norms<T> &p, int n, float by, const Eight<T> (&xs)[warp_rows],
         const float (&mean)[warp_rows], const float (&rstd)[warp_rows], int64_t row, int c,
         uint4 (&of_columns)[2]) {
    const Eight<T> ws = checked((const Eight<T> *)(p.of[2 * n] + c));
    const Eight<T> bs = checked((const Eight<T> *)(p.of[2 * n + 1] + c));
    uint32_t of_rows[2][warp_rows];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float w[4], b[4];
#pragma unroll
        for (int k = 0; k < 4; k++) { /* exact: by is a power of two */
            w[k] = ws[4 * half + k] * by;
            b[k] = bs[4 * half + k] * by;
        }
#pragma unroll
        for (int r = 0; r < warp_rows; r++) {
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                v[k] = (xs[r][4 * half + k] - mean[r]) * rstd[r] * w[k] + b[k];
            }
            of_rows[half][r] = packed<false>(v);
        }
        uint32_t turned[4];
        transpose_bytes(of_rows[half], turned);
        of_columns[half] = make_uint4(turned[0], turned[1], turned[2], turned[3]);
    }
    if (row < p.rows) {
#pragma unroll
        for (int r = 0; r < warp_rows; r++) {
            checked((uint2 *)(p.q[n] + (row + r) * p.columns + c)) =
                make_uint2(of_rows[0][r], of_rows[1][r]);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(threads, sizeof(T) == 2 ? 4 : 3) norms_kernel(const Norms<T> p) {
    await_previous();
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % parts;
    const int of_warp = pieces_of_warp<T>(p.line);
    const int64_t first_row = (int64_t)blockIdx.x * block_rows, row = first_row + warp_rows * warp;
    const auto chunk_at = [&](int first) {
        return Chunk<T>{shared + warp * of_warp, p.line, min(p.width, p.columns - first)};
    };
    const bool is_there = row < p.rows; /* as are the three after it: N is a multiple of 16 */
    const auto fetch = [&](int first) {
        chunk_at(first).fetch(p.x + row * p.columns + first, p.columns, is_there);
    };
    float by[2], mean[warp_rows] = {}, squares[warp_rows] = {}, rstd[warp_rows];
    fetch(0);
    find_scales(p, by);
    for (int first = 0; first <= p.last; first += p.width) {
        if (first > 0) {
            fetch(first);
        }
        copy_async_wait<0>();
        chunk_at(first).join((float)first, mean, squares);
    }
    const float inverse = 1.0f / (float)p.columns;
#pragma unroll
    for (int r = 0; r < warp_rows; r++) {
        rstd[r] = 1.0f / sqrtf(squares[r] * inverse + p.eps);
    }
    if (is_there && lane == 0) {
        checked((float4 *)(p.mean + row)) = make_float4(mean[0], mean[1], mean[2], mean[3]);
        checked((float4 *)(p.rstd + row)) = make_float4(rstd[0], rstd[1], rstd[2], rstd[3]);
    }
    for (int first = p.last; first >= 0; first -= p.width) {
        const Chunk<T> chunk = chunk_at(first);
        if (first < p.last) {
            __syncthreads(); /* until the words of the chunk before are gathered */
            fetch(first);
            copy_async_wait<0>();
        }
#pragma unroll 1
        for (int group = lane; 8 * group < chunk.here; group += 32) {
            Eight<T> xs[warp_rows];
            chunk.take(group, xs);
#pragma unroll 1
            for (int n = 0; n < 2; n++) { /* in 64 registers: h is not kept for the other norm */
#pragma unroll
                for (Eight<T> &x : xs) {
                    x.forget();
                }
                uint4 of_columns[2];
                quantize(p, n, n == 0 ? by[0] : by[1], xs, mean, rstd, row, first + 8 * group,
                         of_columns);
                chunk.lines[2 * n * p.line + group] = of_columns[0];
                chunk.lines[(2 * n + 1) * p.line + group] = of_columns[1];
            }
        }
        __syncthreads();
        const int64_t at = first_row + 16 * part;
        if (at < p.rows) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll 2
                for (int c = threadIdx.x / parts; c < chunk.here; c += threads / parts) {
                    const uint4 *piece = shared + 4 * part * of_warp;
                    piece += (2 * n + c % 8 / 4) * p.line + c / 8;
                    uint32_t v[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        v[k] = ((const uint32_t *)(piece + k * of_warp))[c % 4];
                    }
                    checked((uint4 *)(p.q_t[n] + (first + c) * p.rows + at)) =
                        make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
        }
    }
}

} // namespace

nd_status cuda_layernorm_pair_fp8(int device, const layernorm_pair_fp8_args *a) {
    const char *op = "layernorm_pair_fp8";
    ND_TRY(nd_check_layernorm_pair_fp8(a->x));
    return with_float(op, a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const int64_t rows = a->x->shape[0], columns = a->x->shape[1];
        if (columns >= 1 << 30) {
            return nd_error(ND_EVALUE, "%s: x: %lld columns, but there may be less than 2^30", op,
                            (long long)columns);
        }
        const int64_t most = 2048 / sizeof(T); /* columns that wait in shared memory */
        const int64_t chunks = columns > most ? ceil_div(columns, most) : 1;
        const int64_t multiple = chunks > 1 ? 256 : 16; /* chunks, but the last, of whole warps */
        const int64_t width =
            max(ceil_div(ceil_div(columns, chunks), multiple), (int64_t)1) * multiple;
        Norms<T> p = {
            data_of<T>(a->x),
            {data_of<T>(a->norm_w1), data_of<T>(a->norm_b1), data_of<T>(a->norm_w2),
             data_of<T>(a->norm_b2)},
            {data_of<uint8_t>(a->q1), data_of<uint8_t>(a->q2)},
            {data_of<uint8_t>(a->q1_t), data_of<uint8_t>(a->q2_t)},
            {data_of<float>(a->scale1), data_of<float>(a->scale2)},
            data_of<float>(a->mean),
            data_of<float>(a->rstd),
            (float)a->eps,
            rows,
            (int)columns,
            (int)width,
            (int)((chunks - 1) * width),
            (int)ceil_div(width, (int64_t)64) * 8 + 2,
        };
        const size_t shared = sizeof(uint4) * warps * pieces_of_warp<T>(p.line);
        const unsigned blocks = rows > 0 ? (unsigned)ceil_div(rows, (int64_t)block_rows) : 1;
        return cuda_launch(op, device, norms_kernel<T>, blocks, threads, shared, p);
    });
}
