/* attention_fwd.cu - o = softmax(scale q k^T) v and its log-sum-exp, dense and block-sparse.
 *
 * Maths, for a query i and the keys j it sees (causal: j <= i + S - T; sparse: of listed blocks):
 *     s_ij = scale q_i . k_j     lse_i = log sum_j exp(s_ij)     o_i = sum_j exp(s_ij - lse_i) v_j
 *   A query that sees no key: o_i = 0, lse_i = -inf. With joins o' and lse' of other keys are there
 *   before, and o_i becomes exp(lse'_i - L_i) o'_i + exp(lse_i - L_i) o_i, and lse_i
 *   L_i = log(exp(lse'_i) + exp(lse_i)). Computed in one pass (Milakov and Gimelshein 2018; Dao
 *   2023): running maximum m, sum l and accumulator o, l and o rescaled by exp(m_old - m_new) when
 *   the maximum grows. For 16-bit operands exponentials are base 2, with log2 e folded into the
 *   scale.
 * Precision: 16-bit operands, products and all statistics in float32; the weights exp(s - m) are
 *   rounded to the operands' dtype for the second product, l sums them unrounded. float32 operands:
 *   float32 throughout, no TF32.
 * Parallel: a thread block owns a tile of queries of one head and walks the key tiles
 *   (attention.cuh). A warp owns 16 or 32 whole rows, so row statistics need four lanes only and
 *   the weights pass from the first product to the second in registers. Keys and values are double
 *   buffered: tile n + 1 is copied while tile n is computed; one barrier a tile.
 * Work: 4 D operations a visible (query, key) pair; causal about half of 4 T S D a head.
 * Bytes: q and o once; k and v once a query tile, mostly from L2; lse 4 a row.
 */
#include "attention_float.cuh"
#include "attention_hopper.cuh"

#include <float.h>

using namespace attention;

namespace {

/* ---- 16-bit -------------------------------------------------------------------------------------
 * Tiles fit in the 99 KiB of shared memory that a block has on the smallest devices (sm_86, 89,
 * 120). CTAS is how many thread blocks should share a multiprocessor (limits the registers). */
template <int DP> struct ForwardTile {
    static constexpr int QUERIES = DP <= 128 ? 128 : 64;
    static constexpr int KEYS = DP <= 128 ? 64 : 32;
    static constexpr int WARPS = 4;
    static constexpr int CTAS = 2;
    static constexpr bool KEEP_Q = DP <= 64; /* in registers */
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int MI = QUERIES / (16 * WARPS);
    static constexpr uint32_t Q_BYTES = QUERIES * DP * 2;
    static constexpr uint32_t K_BYTES = KEYS * DP * 2;
    static constexpr size_t SHARED = Q_BYTES + 4 * K_BYTES; /* k and v, two stages */
};

/* Row statistics of a warp's MI x 2 rows a lane; the four lanes of a row hold the same maximum and
 * each a part of the sum. */
template <int MI> struct Softmax {
    float maximum[MI][2], sum[MI][2];

    __device__ __forceinline__ void init() {
#pragma unroll
        for (int mi = 0; mi < MI; mi++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                maximum[mi][half] = -INFINITY;
                sum[mi][half] = 0.0f;
            }
        }
    }

    /* Scores become weights; the accumulator is rescaled to the new maximum. */
    template <int N, int DN>
    __device__ __forceinline__ void update(float (&s)[MI][N][4], float (&o)[MI][DN][4],
                                           float scale_log2) {
#pragma unroll
        for (int mi = 0; mi < MI; mi++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float old = maximum[mi][half], top = old;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    top = fmaxf(top, fmaxf(s[mi][n][2 * half], s[mi][n][2 * half + 1]));
                }
                top = warp_max<4>(top);
                /* -inf - -inf is not a number: rows without a key so far subtract 0 */
                float shift = top == -INFINITY ? 0.0f : top * scale_log2;
                float shrink = fast_exp2(fmaf(old, scale_log2, -shift));
                float total = sum[mi][half] * shrink;
#pragma unroll
                for (int n = 0; n < N; n++) {
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        s[mi][n][e] = fast_exp2(fmaf(s[mi][n][e], scale_log2, -shift));
                        total += s[mi][n][e];
                    }
                }
#pragma unroll
                for (int n = 0; n < DN; n++) {
                    o[mi][n][2 * half] *= shrink;
                    o[mi][n][2 * half + 1] *= shrink;
                }
                maximum[mi][half] = top;
                sum[mi][half] = total;
            }
        }
    }
};

template <class T, int DP>
__global__ void __launch_bounds__(ForwardTile<DP>::THREADS, ForwardTile<DP>::CTAS)
    attention_fwd_kernel(const __grid_constant__ Problem p) {
    await_previous();
    using Tile = ForwardTile<DP>;
    constexpr int MI = Tile::MI, N = Tile::KEYS / 8;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t q_tile = shared_address(shared_memory);
    const uint32_t k_tiles = q_tile + Tile::Q_BYTES;
    const uint32_t v_tiles = k_tiles + 2 * Tile::K_BYTES;

    Work work;
    if (!find_work<Tile::QUERIES>(p, p.causal, &work)) {
        return;
    }
    const T *k = p.k.head<const T>(work.b, work.h), *v = p.v.head<const T>(work.b, work.h);
    Span seen = keys_of_queries(p, work.own);
    TileWalk<Tile::KEYS> walk(p, work, seen.begin, seen.end);

    load_tile<T, DP, Tile::QUERIES, Tile::THREADS>(q_tile, p.q, p.q.head<const T>(work.b, work.h),
                                                   work.own, p.D);
    copy_async_commit();
    Span tile = walk.next();
    if (tile.begin >= 0) {
        load_tile<T, DP, Tile::KEYS, Tile::THREADS>(k_tiles, p.k, k, tile, p.D);
        load_tile<T, DP, Tile::KEYS, Tile::THREADS>(v_tiles, p.v, v, tile, p.D);
    }
    copy_async_commit();
    Span next = walk.next();

    const int lane = threadIdx.x & 31;
    const int m0 = (int)(threadIdx.x / 32) * 16 * MI;
    const int first_row = work.own.begin + m0; /* of this warp */
    const int last_row = min(first_row + 16 * MI, work.own.end) - 1;

    copy_async_wait<1>();
    __syncthreads();
    OperandA<DP, MI, Tile::KEEP_Q> q;
    q.init(q_tile, m0, p.flip);
    float o[MI][DP / 8][4];
    clear(o);
    Softmax<MI> softmax;
    softmax.init();

    for (int stage = 0; tile.begin >= 0; stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads(); /* this stage has arrived, the other has been read */
        if (next.begin >= 0) {
            uint32_t other = (stage ^ 1) * Tile::K_BYTES;
            load_tile<T, DP, Tile::KEYS, Tile::THREADS>(k_tiles + other, p.k, k, next, p.D);
            load_tile<T, DP, Tile::KEYS, Tile::THREADS>(v_tiles + other, p.v, v, next, p.D);
            copy_async_commit();
        }
        Span after = walk.next();

        bool visible = first_row <= last_row && (!p.causal || tile.begin <= last_row + p.offset);
        if (visible) {
            float s[MI][N][4];
            product_rows<T, DP>(s, q, k_tiles + stage * Tile::K_BYTES);
            hide_keys(s, -INFINITY, p, tile, first_row, lane);
            softmax.update(s, o, p.scale_log2);
            product_columns<T, DP>(o, s, v_tiles + stage * Tile::K_BYTES, 0);
        }
        tile = next;
        next = after;
    }

    __syncthreads(); /* q is read from the tile that o leaves through */
    float factor[MI][2];
#pragma unroll
    for (int mi = 0; mi < MI; mi++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = warp_sum<4>(softmax.sum[mi][half]);
            int row = first_row + 16 * mi + 8 * half + lane / 4;
            factor[mi][half] = sum == 0.0f ? 0.0f : 1.0f / sum;
            float lse = sum == 0.0f ? -INFINITY
                                    : softmax.maximum[mi][half] * p.scale_log2 * LN2 + logf(sum);
            if (lane % 4 == 0 && row < work.own.end) {
                float &to = checked(p.lse.row(work.b, work.h, row));
                if (p.joins) {
                    const float2 weights = join_parts(&lse, to);
                    store_shared4(k_tiles + 4 * (row - work.own.begin), __float_as_uint(weights.y));
                    factor[mi][half] *= weights.x;
                }
                to = lse;
            }
            factor[mi][half] = __shfl_sync(~0u, factor[mi][half], lane & ~3);
        }
    }
    store_rows<T, DP>(o, factor, q_tile, m0, 0, p.o, p.o.head<T>(work.b, work.h), work.own, p.D,
                      p.joins, p.joins ? k_tiles : 0);
}

/* ---- float32 --------------------------------------------------------------------------------- */
template <int DP> struct FloatForwardTile {
    static constexpr int M = DP <= 128 ? 4 : 2; /* rows a thread */
    static constexpr int ROWS = 16 * M;         /* queries and keys of a tile */
    static constexpr size_t SHARED =
        (2 * ROWS * FLOAT_STRIDE<DP> + ROWS * (ROWS + 4)) * sizeof(float);
};

template <int DP>
__global__ void __launch_bounds__(FLOAT_THREADS, 1)
    attention_fwd_float_kernel(const __grid_constant__ Problem p) {
    await_previous();
    using Tile = FloatForwardTile<DP>;
    constexpr int M = Tile::M, ROWS = Tile::ROWS;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    float *q_tile = (float *)shared_memory;
    float *kv_tile = q_tile + ROWS * FLOAT_STRIDE<DP>; /* keys, then values */
    float *weights = kv_tile + ROWS * FLOAT_STRIDE<DP>;

    Work work;
    if (!find_work<ROWS>(p, p.causal, &work)) {
        return;
    }
    const float *k = p.k.head<const float>(work.b, work.h);
    const float *v = p.v.head<const float>(work.b, work.h);
    Span seen = keys_of_queries(p, work.own);
    TileWalk<ROWS> walk(p, work, seen.begin, seen.end);
    load_float_tile<DP, ROWS>(q_tile, p.q, p.q.head<const float>(work.b, work.h), work.own, p.D);

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    float o[M][DP / 64][4], maximum[M], sum[M];
#pragma unroll
    for (int i = 0; i < M; i++) {
        maximum[i] = -INFINITY;
        sum[i] = 0.0f;
    }
    clear(o);

    for (Span tile = walk.next(); tile.begin >= 0; tile = walk.next()) {
        load_float_tile<DP, ROWS>(kv_tile, p.k, k, tile, p.D);
        __syncthreads();
        float s[M][M];
        float_product_rows<DP>(s, q_tile, kv_tile, p.D);
#pragma unroll
        for (int i = 0; i < M; i++) {
            int row = work.own.begin + ty + 16 * i;
            int end = p.causal ? min(tile.end, row + p.offset + 1) : tile.end;
            float top = maximum[i];
#pragma unroll
            for (int j = 0; j < M; j++) {
                bool inside = tile.begin + tx + 16 * j < end;
                s[i][j] = inside ? __fmul_rn(s[i][j], p.scale) : -INFINITY;
                top = fmaxf(top, s[i][j]);
            }
            top = warp_max<16>(top);
            float shift = top == -INFINITY ? 0.0f : top;
            float shrink = expf(maximum[i] - shift);
            sum[i] *= shrink;
#pragma unroll
            for (int j = 0; j < M; j++) {
                s[i][j] = expf(s[i][j] - shift);
                sum[i] += s[i][j];
            }
#pragma unroll
            for (int g = 0; g < DP / 64; g++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    o[i][g][e] *= shrink;
                }
            }
            maximum[i] = top;
        }
        float_store_weights(weights, s);
        __syncthreads();
        load_float_tile<DP, ROWS>(kv_tile, p.v, v, tile, p.D);
        __syncthreads();
        float_product_columns<DP>(o, weights, kv_tile);
        __syncthreads();
    }

    float factor[M];
    float *head = p.o.head<float>(work.b, work.h);
#pragma unroll
    for (int i = 0; i < M; i++) {
        int row = work.own.begin + ty + 16 * i;
        float total = warp_sum<16>(sum[i]);
        factor[i] = total == 0.0f ? 0.0f : 1.0f / total;
        float *to = p.lse.row(work.b, work.h, row);
        float lse = total == 0.0f ? -INFINITY : maximum[i] + logf(total);
        if (p.joins && row < work.own.end) {
            const float2 weights = join_parts(&lse, checked(to));
            for (int e = 0; e < DP / 16; e++) {
                const int d = e / 4 * 64 + 4 * tx + e % 4;
                float &x = o[i][e / 4][e % 4];
                x *= factor[i] * weights.x;
                if (weights.y > 0.0f && d < p.D) {
                    x += weights.y * checked(head + row * p.o.t + d);
                }
            }
            factor[i] = 1.0f;
        }
        __syncwarp(); /* lse has been read */
        if (tx == 0 && row < work.own.end) {
            checked(to) = lse;
        }
    }
    float_store_rows<DP>(o, factor, p.o, head, work.own, p.D);
}

/* ---- host ------------------------------------------------------------------------------------ */
nd_status forward(const char *op, int device, const nd_array *q, const nd_array *k,
                  const nd_array *v, const BlockLists &lists, double scale, int64_t causal,
                  nd_array *o, RowFloats lse, int64_t joins) {
    Problem p;
    ND_TRY(problem_new(op, q, k, v, scale, causal, &p));
    p.o = rows_of(o);
    p.lse = lse;
    p.joins = joins != 0;
    if (hopper_serves(device, p, q->dtype, lists.block, {q, k, v, o})) {
        return attention_fwd_hopper(op, device, p, Operands{q, k, v, o, NULL, NULL, NULL, NULL},
                                    lists);
    }
    return with_float(op, q->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        if constexpr (sizeof(T) == 4) {
            return with_columns32(p.D, [&](auto columns) -> nd_status {
                constexpr int DP = decltype(columns)::value;
                using Tile = FloatForwardTile<DP>;
                problem_tiles(&p, false, Tile::ROWS, lists);
                return problem_launch(op, device, attention_fwd_float_kernel<DP>, p, FLOAT_THREADS,
                                      Tile::SHARED);
            });
        } else {
            /* The maximum of the scaled scores is the scaled maximum only for a positive scale. */
            p.flip = p.scale_log2 < 0.0f ? 0x80008000u : 0u;
            p.scale_log2 = fmaxf(fabsf(p.scale_log2), FLT_MIN);
            return with_columns16(p.D, [&](auto columns) -> nd_status {
                constexpr int DP = decltype(columns)::value;
                using Tile = ForwardTile<DP>;
                problem_tiles(&p, false, Tile::QUERIES, lists);
                return problem_launch(op, device, attention_fwd_kernel<T, DP>, p, Tile::THREADS,
                                      Tile::SHARED);
            });
        }
    });
}

} // namespace

nd_status cuda_attention_fwd(int device, const attention_fwd_args *a) {
    return forward("attention_fwd", device, a->q, a->k, a->v, DENSE, a->scale, a->causal, a->o,
                   row_floats(a->lse, false), 0);
}

nd_status cuda_attention_part_fwd(int device, const attention_part_fwd_args *a) {
    return forward("attention_part_fwd", device, a->q, a->k, a->v, DENSE, a->scale, a->causal, a->o,
                   row_floats(a->lse, true), a->joins);
}

nd_status cuda_block_sparse_attention_fwd(int device, const block_sparse_attention_fwd_args *a) {
    const char *op = "block_sparse_attention_fwd";
    const BlockLists lists = {a->offsets, a->columns, a->order, a->block};
    ND_TRY(check_blocks(op, "", lists, a->q->shape[2], a->q->shape[1]));
    return forward(op, device, a->q, a->k, a->v, lists, a->scale, a->causal, a->o,
                   row_floats(a->lse, false), 0);
}
