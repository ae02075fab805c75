/* attention_bwd.cu - the gradients of attention_fwd.cu, dense and block-sparse.
 *
 * Maths, over the pairs (i, j) that the forward saw, with P and dS recomputed and never stored:
 *     P_ij  = exp(scale q_i . k_j - lse_i)        delta_i = do_i . o_i
 *     dS_ij = P_ij (do_i . v_j - delta_i)
 *     dv_j = sum_i P_ij do_i     dk_j = scale sum_i dS_ij q_i     dq_i = scale sum_j dS_ij k_j
 *   A query without a key (lse = -inf) has P = 0. dq, dk, dv are written, or with joins added to what
 *   is there, by one thread or copy each. With cos and sin dq and dk are rotated back by the angles
 *   of their positions, and db is the sum of all rows of a head: by the kernels for Hopper before
 *   rounding (db in parts of 64 rows), else by a pass over dq, dk and dv.
 * Precision: 16-bit operands; products, P, dS and the gradients in float32; P and dS are rounded to
 *   the operands' dtype as operands of the second products. float32 operands: float32 throughout.
 * Same bits from run to run: no atomics. Three kernels, each output element summed by one thread:
 *     stats: lse and delta of every row, side by side
 *     dq:    a thread block a query tile, walking key tiles; 3 products a tile (S, dP, dQ)
 *     dk dv: a thread block a key tile, walking query tiles (sparse: by the transposed lists); 4
 *            products a tile, of S^T = k q^T and dP^T = v do^T, so that P^T and dS^T pass from the
 *            first products to the second in registers
 * Work: 14 D operations a visible pair, of which 10 D are counted as useful: S and dP are computed
 *   twice, the price of neither atomics nor a T x S matrix. The kernels for Hopper do without where
 *   one pass of 10 D serves: dense, head dims up to 64 (attention_dq_hopper.cuh).
 * Bytes: q, do, dq once and k, v once a query tile (dq); k, v, dk, dv once and q, do once a key
 *   tile (dk dv), repeats mostly from L2; do, o once and 8 bytes a row written (stats).
 */
#include "attention_float.cuh"
#include "attention_hopper.cuh"
#include "attention_sums.cuh"

#include <string.h>

using namespace attention;

namespace {

/* ---- row statistics -----------------------------------------------------------------------------
 * (lse, delta) of each row, lse in the unit of the kernel that reads it (times log2 e for 16-bit
 * operands) and +inf for a row without keys, so that its weights exp(s - lse) are 0. Eight lanes a
 * row, four rows a warp; rows in the order (b, t, h) of o. */
constexpr int STATS_THREADS = 256;
constexpr int STATS_ROWS = STATS_THREADS / 8; /* of a thread block */

template <class T>
__global__ void __launch_bounds__(STATS_THREADS)
    attention_stats_kernel(const __grid_constant__ Problem p) {
    await_previous();
    constexpr int V = Vec<T>::size;
    const int lane = threadIdx.x % 8;
    const bool vector = p.o.vector && p.dout.vector;
    const int64_t rows = (int64_t)p.B * p.T * p.H;
    for (int64_t start = (int64_t)blockIdx.x * STATS_ROWS; start < rows;
         start += (int64_t)gridDim.x * STATS_ROWS) {
        int64_t row = start + threadIdx.x / 8;
        bool inside = row < rows;
        int64_t bt = row / p.H;
        int h = (int)(row - bt * p.H), b = (int)(bt / p.T), t = (int)(bt % p.T);
        float sum = 0.0f;
        if (inside) {
            const T *o = p.o.head<const T>(b, h) + t * p.o.t;
            const T *dout = p.dout.head<const T>(b, h) + t * p.dout.t;
            for (int d = lane * V; d < p.D; d += 8 * V) {
                if (vector) {
                    Vec<T> x = load16(o + d), y = load16(dout + d);
#pragma unroll
                    for (int e = 0; e < V; e++) {
                        sum = fmaf(to_float(x.v[e]), to_float(y.v[e]), sum);
                    }
                } else {
                    for (int e = d; e < min(d + V, p.D); e++) {
                        sum = fmaf(to_float(o[e]), to_float(dout[e]), sum);
                    }
                }
            }
        }
        sum = warp_sum<8>(sum);
        if (inside && lane == 0) {
            int64_t head = (int64_t)b * p.H + h;
            float lse = *p.lse.row(b, h, t);
            float unit = sizeof(T) == 4 ? 1.0f : LOG2E;
            p.stats[head * p.T + t] = make_float2(lse == -INFINITY ? INFINITY : lse * unit, sum);
            if constexpr (sizeof(T) == 2) {
                if (p.terms) {
                    store_terms((T *)p.terms + (head * p.T + t) * TERMS,
                                lse == -INFINITY ? NO_KEY : lse / p.scale, sum);
                }
                if (p.tickets && t % CONSUMER_ROWS == 0) {
                    p.tickets[head * ceil_div(p.T, CONSUMER_ROWS) + t / CONSUMER_ROWS] = 0;
                }
            }
        }
    }
    if (p.largest && blockIdx.x == 0 && threadIdx.x == 0) {
        *p.largest = 0;
    }
}

/* ---- 16-bit -------------------------------------------------------------------------------------
 * As in the forward, tiles fit in 99 KiB. */
template <int DP> struct QueryTile { /* the dq kernel */
    static constexpr int QUERIES = 64;
    static constexpr int KEYS = DP <= 64 ? 64 : DP <= 192 ? 32 : 16;
    static constexpr int WARPS = 4;
    static constexpr int CTAS = DP <= 64 ? 4 : 2;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr uint32_t OWN_BYTES = QUERIES * DP * 2;
    static constexpr uint32_t OTHER_BYTES = KEYS * DP * 2;
    static constexpr size_t SHARED = 2 * OWN_BYTES + 4 * OTHER_BYTES;
};

template <class T, int DP>
__global__ void __launch_bounds__(QueryTile<DP>::THREADS, QueryTile<DP>::CTAS)
    attention_dq_kernel(const __grid_constant__ Problem p) {
    await_previous();
    using Tile = QueryTile<DP>;
    constexpr int N = Tile::KEYS / 8;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t q_tile = shared_address(shared_memory);
    const uint32_t dout_tile = q_tile + Tile::OWN_BYTES;
    const uint32_t k_tiles = dout_tile + Tile::OWN_BYTES;
    const uint32_t v_tiles = k_tiles + 2 * Tile::OTHER_BYTES;

    Work work;
    if (!find_work<Tile::QUERIES>(p, p.causal, &work)) {
        return;
    }
    const T *k = p.k.head<const T>(work.b, work.h), *v = p.v.head<const T>(work.b, work.h);
    Span seen = keys_of_queries(p, work.own);
    TileWalk<Tile::KEYS> walk(p, work, seen.begin, seen.end);

    load_tile<T, DP, Tile::QUERIES, Tile::THREADS>(q_tile, p.q, p.q.head<const T>(work.b, work.h),
                                                   work.own, p.D);
    load_tile<T, DP, Tile::QUERIES, Tile::THREADS>(
        dout_tile, p.dout, p.dout.head<const T>(work.b, work.h), work.own, p.D);
    copy_async_commit();
    Span tile = walk.next();
    if (tile.begin >= 0) {
        load_tile<T, DP, Tile::KEYS, Tile::THREADS>(k_tiles, p.k, k, tile, p.D);
        load_tile<T, DP, Tile::KEYS, Tile::THREADS>(v_tiles, p.v, v, tile, p.D);
    }
    copy_async_commit();
    Span next = walk.next();

    const int lane = threadIdx.x & 31;
    const int m0 = (int)(threadIdx.x / 32) * 16;
    const int first_row = work.own.begin + m0; /* of this warp */
    const int last_row = min(first_row + 16, work.own.end) - 1;
    const float2 *stats = p.stats + ((int64_t)work.b * p.H + work.h) * p.T;
    float2 stat[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first_row + 8 * half + lane / 4;
        stat[half] = row < work.own.end ? stats[row] : make_float2(INFINITY, 0.0f);
    }

    copy_async_wait<1>();
    __syncthreads();
    OperandA<DP, 1, false> q, dout;
    q.init(q_tile, m0, 0);
    dout.init(dout_tile, m0, 0);
    float dq[1][DP / 8][4];
    clear(dq);

    for (int stage = 0; tile.begin >= 0; stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads(); /* this stage has arrived, the other has been read */
        if (next.begin >= 0) {
            uint32_t other = (stage ^ 1) * Tile::OTHER_BYTES;
            load_tile<T, DP, Tile::KEYS, Tile::THREADS>(k_tiles + other, p.k, k, next, p.D);
            load_tile<T, DP, Tile::KEYS, Tile::THREADS>(v_tiles + other, p.v, v, next, p.D);
            copy_async_commit();
        }
        Span after = walk.next();

        bool visible = first_row <= last_row && (!p.causal || tile.begin <= last_row + p.offset);
        if (visible) {
            const uint32_t k_tile = k_tiles + stage * Tile::OTHER_BYTES;
            float s[1][N][4], dp[1][N][4];
            product_rows<T, DP>(s, q, k_tile);
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[0][n][i] = fast_exp2(fmaf(s[0][n][i], p.scale_log2, -stat[i / 2].x));
                }
            }
            hide_keys(s, 0.0f, p, tile, first_row, lane);
            product_rows<T, DP>(dp, dout, v_tiles + stage * Tile::OTHER_BYTES);
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[0][n][i] *= dp[0][n][i] - stat[i / 2].y;
                }
            }
            product_columns<T, DP>(dq, s, k_tile, 0);
        }
        tile = next;
        next = after;
    }

    __syncthreads(); /* q is read from the tile that dq leaves through */
    const float factor[1][2] = {{p.scale, p.scale}};
    store_rows<T, DP>(dq, factor, q_tile, m0, 0, p.dq, p.dq.head<T>(work.b, work.h), work.own, p.D,
                      p.joins);
}

/* Above 128 columns, dk and dv of 16 keys are more than the registers of a warp: PARTS warps then
 * share 16 keys, compute the same P and dS, and each keep a part of the columns. */
template <int DP> struct KeyTile { /* the dk dv kernel */
    static constexpr int KEYS = 64;
    static constexpr int QUERIES = DP <= 192 ? 32 : 16;
    static constexpr int PARTS = DP <= 128 ? 1 : 2;
    static constexpr int WARPS = KEYS / 16 * PARTS;
    static constexpr int CTAS = DP <= 64 ? 3 : DP <= 128 ? 2 : 1;
    static constexpr bool KEEP = DP <= 64; /* k and v in registers */
    static constexpr int THREADS = 32 * WARPS;
    static constexpr uint32_t OWN_BYTES = KEYS * DP * 2;
    static constexpr uint32_t OTHER_BYTES = QUERIES * DP * 2;
    static constexpr uint32_t STATS_BYTES = QUERIES * 8;
    static constexpr size_t SHARED = 2 * OWN_BYTES + 4 * OTHER_BYTES + 2 * STATS_BYTES;
};

template <class T, int DP>
__global__ void __launch_bounds__(KeyTile<DP>::THREADS, KeyTile<DP>::CTAS)
    attention_dkdv_kernel(const __grid_constant__ Problem p) {
    await_previous();
    using Tile = KeyTile<DP>;
    constexpr int N = Tile::QUERIES / 8, DN = DP / 8 / Tile::PARTS;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t k_tile = shared_address(shared_memory);
    const uint32_t v_tile = k_tile + Tile::OWN_BYTES;
    const uint32_t q_tiles = v_tile + Tile::OWN_BYTES;
    const uint32_t dout_tiles = q_tiles + 2 * Tile::OTHER_BYTES;
    const uint32_t stats_tiles = dout_tiles + 2 * Tile::OTHER_BYTES;

    Work work;
    if (!find_work<Tile::KEYS>(p, false, &work)) {
        return;
    }
    const T *q = p.q.head<const T>(work.b, work.h);
    const T *dout = p.dout.head<const T>(work.b, work.h);
    const float2 *stats = p.stats + ((int64_t)work.b * p.H + work.h) * p.T;
    Span seen = queries_of_keys(p, work.own);
    TileWalk<Tile::QUERIES> walk(p, work, seen.begin, seen.end);

    auto load_other = [&](Span span, int stage) {
        uint32_t at = stage * Tile::OTHER_BYTES;
        load_tile<T, DP, Tile::QUERIES, Tile::THREADS>(q_tiles + at, p.q, q, span, p.D);
        load_tile<T, DP, Tile::QUERIES, Tile::THREADS>(dout_tiles + at, p.dout, dout, span, p.D);
        if (threadIdx.x < Tile::QUERIES) {
            int row = span.begin + (int)threadIdx.x;
            bool inside = row < span.end;
            copy_async8(stats_tiles + stage * Tile::STATS_BYTES + 8 * threadIdx.x,
                        stats + (inside ? row : 0), inside);
        }
    };
    load_tile<T, DP, Tile::KEYS, Tile::THREADS>(k_tile, p.k, p.k.head<const T>(work.b, work.h),
                                                work.own, p.D);
    load_tile<T, DP, Tile::KEYS, Tile::THREADS>(v_tile, p.v, p.v.head<const T>(work.b, work.h),
                                                work.own, p.D);
    copy_async_commit();
    Span tile = walk.next();
    if (tile.begin >= 0) {
        load_other(tile, 0);
    }
    copy_async_commit();
    Span next = walk.next();

    const int lane = threadIdx.x & 31, warp = (int)(threadIdx.x / 32);
    const int m0 = warp % (Tile::KEYS / 16) * 16;
    const int first_chunk = warp / (Tile::KEYS / 16) * DN;
    const int first_key = work.own.begin + m0; /* of this warp */

    copy_async_wait<1>();
    __syncthreads();
    OperandA<DP, 1, Tile::KEEP> k, v;
    k.init(k_tile, m0, 0);
    v.init(v_tile, m0, 0);
    float dk[1][DN][4], dv[1][DN][4];
    clear(dk);
    clear(dv);

    for (int stage = 0; tile.begin >= 0; stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads(); /* this stage has arrived, the other has been read */
        if (next.begin >= 0) {
            load_other(next, stage ^ 1);
            copy_async_commit();
        }
        Span after = walk.next();

        /* Rows past tile.end are zeros, also their statistics: P is 1 there and meets dout = 0. */
        bool visible =
            first_key < work.own.end && (!p.causal || first_key <= tile.end - 1 + p.offset);
        if (visible) {
            const uint32_t q_tile = q_tiles + stage * Tile::OTHER_BYTES;
            const uint32_t dout_tile = dout_tiles + stage * Tile::OTHER_BYTES;
            float s[1][N][4], dp[1][N][4], delta[N][2];
            product_rows<T, DP>(s, k, q_tile);
#pragma unroll
            for (int n = 0; n < N; n++) {
                uint32_t stat[4]; /* of queries 8 n + 2 (lane % 4) and the next */
                load_shared16(stat,
                              stats_tiles + stage * Tile::STATS_BYTES + 64 * n + 16 * (lane % 4));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float lse = __uint_as_float(stat[2 * (i % 2)]);
                    s[0][n][i] = fast_exp2(fmaf(s[0][n][i], p.scale_log2, -lse));
                }
                delta[n][0] = __uint_as_float(stat[1]);
                delta[n][1] = __uint_as_float(stat[3]);
            }
            if (p.causal && first_key + 15 > tile.begin + p.offset) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int key = first_key + 8 * half + lane / 4;
                    int hidden = key - p.offset - tile.begin - 2 * (lane % 4); /* so many queries */
#pragma unroll
                    for (int n = 0; n < N; n++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            if (8 * n + e < hidden) {
                                s[0][n][2 * half + e] = 0.0f;
                            }
                        }
                    }
                }
            }
            product_columns<T, DP>(dv, s, dout_tile, first_chunk);
            product_rows<T, DP>(dp, v, dout_tile);
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[0][n][i] *= dp[0][n][i] - delta[n][i % 2];
                }
            }
            product_columns<T, DP>(dk, s, q_tile, first_chunk);
        }
        tile = next;
        next = after;
    }

    __syncthreads(); /* k and v are read from the tiles that dk and dv leave through */
    const float one[1][2] = {{1.0f, 1.0f}}, factor[1][2] = {{p.scale, p.scale}};
    store_rows<T, DP>(dk, factor, k_tile, m0, first_chunk, p.dk, p.dk.head<T>(work.b, work.h),
                      work.own, p.D, p.joins);
    store_rows<T, DP>(dv, one, v_tile, m0, first_chunk, p.dv, p.dv.head<T>(work.b, work.h),
                      work.own, p.D, p.joins);
}

/* ---- float32 ------------------------------------------------------------------------------------
 * Scores are rounded exactly as in the forward (no fused multiply-add), so that what is left after
 * subtracting lse is right also where one key has all the weight. */
template <int DP> struct FloatTile {
    static constexpr int M = DP <= 64 ? 4 : DP <= 128 ? 2 : 1; /* rows a thread */
    static constexpr int ROWS = 16 * M;
    static constexpr int TILE = ROWS * FLOAT_STRIDE<DP>;
    static constexpr size_t SHARED = (4 * TILE + ROWS * (ROWS + 4)) * sizeof(float);
};

template <int DP>
__global__ void __launch_bounds__(FLOAT_THREADS, 1)
    attention_dq_float_kernel(const __grid_constant__ Problem p) {
    await_previous();
    using Tile = FloatTile<DP>;
    constexpr int M = Tile::M, ROWS = Tile::ROWS;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    float *q_tile = (float *)shared_memory, *dout_tile = q_tile + Tile::TILE;
    float *k_tile = dout_tile + Tile::TILE, *v_tile = k_tile + Tile::TILE;
    float *weights = v_tile + Tile::TILE;

    Work work;
    if (!find_work<ROWS>(p, p.causal, &work)) {
        return;
    }
    const float *k = p.k.head<const float>(work.b, work.h);
    const float *v = p.v.head<const float>(work.b, work.h);
    Span seen = keys_of_queries(p, work.own);
    TileWalk<ROWS> walk(p, work, seen.begin, seen.end);
    load_float_tile<DP, ROWS>(q_tile, p.q, p.q.head<const float>(work.b, work.h), work.own, p.D);
    load_float_tile<DP, ROWS>(dout_tile, p.dout, p.dout.head<const float>(work.b, work.h), work.own,
                              p.D);

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const float2 *stats = p.stats + ((int64_t)work.b * p.H + work.h) * p.T;
    float dq[M][DP / 64][4];
    clear(dq);
    for (Span tile = walk.next(); tile.begin >= 0; tile = walk.next()) {
        load_float_tile<DP, ROWS>(k_tile, p.k, k, tile, p.D);
        load_float_tile<DP, ROWS>(v_tile, p.v, v, tile, p.D);
        __syncthreads();
        float s[M][M], dp[M][M];
        float_product_rows<DP>(s, q_tile, k_tile, p.D);
        float_product_rows<DP>(dp, dout_tile, v_tile, p.D);
#pragma unroll
        for (int i = 0; i < M; i++) {
            int row = work.own.begin + ty + 16 * i;
            int end = p.causal ? min(tile.end, row + p.offset + 1) : tile.end;
            float2 stat = row < work.own.end ? stats[row] : make_float2(INFINITY, 0.0f);
#pragma unroll
            for (int j = 0; j < M; j++) {
                bool inside = tile.begin + tx + 16 * j < end;
                float weight = expf(__fmul_rn(s[i][j], p.scale) - stat.x);
                s[i][j] = inside ? weight * (dp[i][j] - stat.y) : 0.0f;
            }
        }
        float_store_weights(weights, s);
        __syncthreads();
        float_product_columns<DP>(dq, weights, k_tile);
        __syncthreads();
    }
    float factor[M];
#pragma unroll
    for (int i = 0; i < M; i++) {
        factor[i] = p.scale;
    }
    float_store_rows<DP>(dq, factor, p.dq, p.dq.head<float>(work.b, work.h), work.own, p.D,
                         p.joins);
}

template <int DP>
__global__ void __launch_bounds__(FLOAT_THREADS, 1)
    attention_dkdv_float_kernel(const __grid_constant__ Problem p) {
    await_previous();
    using Tile = FloatTile<DP>;
    constexpr int M = Tile::M, ROWS = Tile::ROWS;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    float *k_tile = (float *)shared_memory, *v_tile = k_tile + Tile::TILE;
    float *q_tile = v_tile + Tile::TILE, *dout_tile = q_tile + Tile::TILE;
    float *weights = dout_tile + Tile::TILE;

    Work work;
    if (!find_work<ROWS>(p, false, &work)) {
        return;
    }
    const float *q = p.q.head<const float>(work.b, work.h);
    const float *dout = p.dout.head<const float>(work.b, work.h);
    Span seen = queries_of_keys(p, work.own);
    TileWalk<ROWS> walk(p, work, seen.begin, seen.end);
    load_float_tile<DP, ROWS>(k_tile, p.k, p.k.head<const float>(work.b, work.h), work.own, p.D);
    load_float_tile<DP, ROWS>(v_tile, p.v, p.v.head<const float>(work.b, work.h), work.own, p.D);

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const float2 *stats = p.stats + ((int64_t)work.b * p.H + work.h) * p.T;
    float dk[M][DP / 64][4], dv[M][DP / 64][4];
    clear(dk);
    clear(dv);
    for (Span tile = walk.next(); tile.begin >= 0; tile = walk.next()) {
        load_float_tile<DP, ROWS>(q_tile, p.q, q, tile, p.D);
        load_float_tile<DP, ROWS>(dout_tile, p.dout, dout, tile, p.D);
        __syncthreads();
        float s[M][M], dp[M][M];
        float_product_rows<DP>(s, k_tile, q_tile, p.D);
        float_product_rows<DP>(dp, v_tile, dout_tile, p.D);
#pragma unroll
        for (int j = 0; j < M; j++) {
            int row = tile.begin + tx + 16 * j;
            float2 stat = row < tile.end ? stats[row] : make_float2(INFINITY, 0.0f);
#pragma unroll
            for (int i = 0; i < M; i++) {
                bool seen_by = !p.causal || work.own.begin + ty + 16 * i <= row + p.offset;
                float weight = expf(__fmul_rn(s[i][j], p.scale) - stat.x);
                s[i][j] = seen_by ? weight : 0.0f;
                dp[i][j] = s[i][j] * (dp[i][j] - stat.y);
            }
        }
        float_store_weights(weights, s);
        __syncthreads();
        float_product_columns<DP>(dv, weights, dout_tile);
        __syncthreads();
        float_store_weights(weights, dp);
        __syncthreads();
        float_product_columns<DP>(dk, weights, q_tile);
        __syncthreads();
    }
    float one[M], factor[M];
#pragma unroll
    for (int i = 0; i < M; i++) {
        one[i] = 1.0f;
        factor[i] = p.scale;
    }
    float_store_rows<DP>(dk, factor, p.dk, p.dk.head<float>(work.b, work.h), work.own, p.D,
                         p.joins);
    float_store_rows<DP>(dv, one, p.dv, p.dv.head<float>(work.b, work.h), work.own, p.D, p.joins);
}

/* ---- host ------------------------------------------------------------------------------------ */
template <class T, int DP, bool FLOAT = sizeof(T) == 4> struct Kernels {
    static constexpr auto dq = attention_dq_kernel<T, DP>, dkdv = attention_dkdv_kernel<T, DP>;
    static constexpr int QUERIES = QueryTile<DP>::QUERIES, KEYS = KeyTile<DP>::KEYS;
    static constexpr int DQ_THREADS = QueryTile<DP>::THREADS, DKDV_THREADS = KeyTile<DP>::THREADS;
    static constexpr size_t DQ_SHARED = QueryTile<DP>::SHARED, DKDV_SHARED = KeyTile<DP>::SHARED;
};

template <class T, int DP> struct Kernels<T, DP, true> {
    static constexpr auto dq = attention_dq_float_kernel<DP>,
                          dkdv = attention_dkdv_float_kernel<DP>;
    static constexpr int QUERIES = FloatTile<DP>::ROWS, KEYS = FloatTile<DP>::ROWS;
    static constexpr int DQ_THREADS = FLOAT_THREADS, DKDV_THREADS = FLOAT_THREADS;
    static constexpr size_t DQ_SHARED = FloatTile<DP>::SHARED, DKDV_SHARED = FloatTile<DP>::SHARED;
};

template <class T> nd_status launch_stats(const char *op, int device, const Problem &p) {
    int64_t rows = (int64_t)p.B * p.T * p.H;
    if (rows > 0) {
        unsigned blocks = cuda_grid(device, ceil_div(rows, (int64_t)STATS_ROWS), 32);
        ND_TRY(cuda_launch(op, device, attention_stats_kernel<T>, blocks, STATS_THREADS, 0, p));
    }
    return ND_OK;
}

template <class T, int DP>
nd_status launch(const char *op, int device, Problem p, const BlockLists &lists,
                 const BlockLists &transposed) {
    using K = Kernels<T, DP>;
    problem_tiles(&p, false, K::QUERIES, lists);
    ND_TRY(problem_launch(op, device, K::dq, p, K::DQ_THREADS, K::DQ_SHARED));
    problem_tiles(&p, true, K::KEYS, transposed);
    return problem_launch(op, device, K::dkdv, p, K::DKDV_THREADS, K::DKDV_SHARED);
}

template <class Args> nd_status check_sums_and_angles(const char *op, const Args *a) {
    if (a->db != NULL && a->db->shape[1] != 3) {
        return nd_error(ND_EVALUE,
                        "%s: db: must be (H, 3, D), of dq, dk and dv, but has %lld parts", op,
                        (long long)a->db->shape[1]);
    }
    const int64_t queries = a->q->shape[1], keys = a->k->shape[1], dims = a->q->shape[3];
    if ((a->cos == NULL) != (a->sin == NULL)) {
        return nd_error(ND_EVALUE, "%s: %s: must be given with the other of cos and sin", op,
                        a->cos == NULL ? "cos" : "sin");
    }
    if (a->cos == NULL) {
        return ND_OK;
    }
    if (keys != queries) {
        return nd_error(ND_EVALUE,
                        "%s: cos: the angles of %lld positions rotate dq and dk, but there are "
                        "%lld keys",
                        op, (long long)queries, (long long)keys);
    }
    const int64_t half = a->cos->shape[1];
    if (2 * half > dims) {
        return nd_error(ND_EVALUE, "%s: cos: %lld angles rotate %lld dims, but a head has %lld", op,
                        (long long)half, (long long)(2 * half), (long long)dims);
    }
    return ND_OK;
}

/* Rotate dq and dk (B, T, H, D) back, with the same strides as two slices of (B, T, H, 2, D). */
nd_status rotate_back(const char *op, int device, const nd_array *dq, const nd_array *dk,
                      const nd_array *cos, const nd_array *sin) {
    const int64_t apart = (const char *)dk->data - (const char *)dq->data;
    const int64_t size = (int64_t)nd_dtype_size(dq->dtype);
    if (apart % size != 0 || memcmp(dq->strides, dk->strides, 4 * sizeof *dq->strides) != 0) {
        ND_TRY(cuda_rotate(op, device, dq, 1, cos, sin, -1.0f));
        return cuda_rotate(op, device, dk, 1, cos, sin, -1.0f);
    }
    nd_array both = *dq;
    both.ndim = 5;
    both.shape[3] = 2;
    both.shape[4] = dq->shape[3];
    both.strides[3] = apart / size;
    both.strides[4] = dq->strides[3];
    return cuda_rotate(op, device, &both, 2, cos, sin, -1.0f);
}

/* The fields that the dense and the sparse op share. */
template <class Args>
nd_status backward(const char *op, int device, const Args *a, const BlockLists &lists,
                   const BlockLists &transposed, RowFloats lse, int64_t joins = 0) {
    Problem p;
    ND_TRY(problem_new(op, a->q, a->k, a->v, a->scale, a->causal, &p));
    ND_TRY(check_sums_and_angles(op, a));
    p.o = rows_of(a->o);
    p.dout = rows_of(a->dout);
    p.dq = rows_of(a->dq);
    p.dk = rows_of(a->dk);
    p.dv = rows_of(a->dv);
    p.lse = lse;
    p.joins = joins != 0;
    void *scratch = NULL;
    const bool on_hopper = hopper_serves(device, p, a->q->dtype, lists.block,
                                         {a->q, a->k, a->v, a->dout, a->dq, a->dk, a->dv});
    const bool rotates = a->cos == NULL || hopper_rotates(a->cos);
    const bool sums_on_the_way = a->db && p.T == p.S && rotates;
    const int64_t heads = (int64_t)p.B * p.H, parts = (int64_t)p.B * ceil_div(p.T, CONSUMER_ROWS);
    const bool largest_on_the_way = a->largest && on_hopper && rotates && heads * p.T > 0;
    p.largest = largest_on_the_way ? (unsigned *)a->largest->data : NULL;
    const int64_t columns = (int64_t)p.H * 3 * p.D;
    const size_t shares = on_hopper && dq_in_one_pass(p.D, lists) ? (size_t)(parts * p.H) : 0;
    const size_t terms = on_hopper ? (size_t)(heads * p.T) * TERMS_ROW : 0;
    const size_t sums = sums_on_the_way ? padded((size_t)(parts * columns) * sizeof(float)) : 0;
    const size_t dq_sums = shares * DQ_SHARE * sizeof(float), tickets = shares * sizeof(unsigned);
    ND_TRY(cuda_scratch(device,
                        dq_sums + terms + (size_t)(heads * p.T) * sizeof(float2) + sums + tickets,
                        &scratch));
    /* First what is held until a layer ends: column_sums.cu. */
    unsigned char *memory = (unsigned char *)scratch + sums;
    float *const sums_of_rows = (float *)scratch;
    p.dq_sums = (float *)memory;
    p.terms = terms ? memory + dq_sums : NULL;
    p.stats = (float2 *)(memory + dq_sums + terms);
    p.tickets = shares ? (unsigned *)(p.stats + heads * p.T) : NULL;
    float *db = a->db ? data_of<float>(a->db) : NULL;
    return with_float(op, a->q->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        ND_TRY(launch_stats<T>(op, device, p));
        bool rotated = a->cos == NULL;
        if (on_hopper) {
            Operands all = {a->q, a->k, a->v, a->o, a->dout, a->dq, a->dk, a->dv};
            if (hopper_rotates(a->cos)) {
                all.cos = a->cos;
                all.sin = a->sin;
                rotated = true;
            }
            all.sums = sums_on_the_way ? sums_of_rows : NULL;
            ND_TRY(attention_bwd_hopper(op, device, p, all, lists, transposed));
            if (all.sums) {
                return cuda_add_columns(op, device, all.sums, parts, columns, db);
            }
        } else {
            auto run = [&](auto columns) -> nd_status {
                return launch<T, decltype(columns)::value>(op, device, p, lists, transposed);
            };
            if constexpr (sizeof(T) == 4) {
                ND_TRY(with_columns32(p.D, run));
            } else {
                ND_TRY(with_columns16(p.D, run));
            }
        }
        if (!rotated) {
            ND_TRY(rotate_back(op, device, a->dq, a->dk, a->cos, a->sin));
        }
        if (a->largest && !largest_on_the_way) {
            ND_TRY(find_largest(op, device, a->q->dtype, p, a->largest));
        }
        return db ? add_sums(op, device, a->q->dtype, p, db) : ND_OK;
    });
}

} // namespace

nd_status cuda_attention_bwd(int device, const attention_bwd_args *a) {
    return backward("attention_bwd", device, a, DENSE, DENSE, row_floats(a->lse, false));
}

nd_status cuda_attention_part_bwd(int device, const attention_part_bwd_args *a) {
    attention_bwd_args part = {};
    part.dout = a->dout;
    part.q = a->q;
    part.k = a->k;
    part.v = a->v;
    part.o = a->o;
    part.scale = a->scale;
    part.causal = a->causal;
    part.dq = a->dq;
    part.dk = a->dk;
    part.dv = a->dv;
    return backward("attention_part_bwd", device, &part, DENSE, DENSE, row_floats(a->lse, true),
                    a->joins);
}

nd_status cuda_block_sparse_attention_bwd(int device, const block_sparse_attention_bwd_args *a) {
    const char *op = "block_sparse_attention_bwd";
    int64_t heads = a->q->shape[2];
    const BlockLists lists = {a->offsets, a->columns, a->order, a->block};
    const BlockLists transposed = {a->offsets_t, a->rows, a->order_t, a->block};
    ND_TRY(check_blocks(op, "", lists, heads, a->q->shape[1]));
    ND_TRY(check_blocks(op, "_t", transposed, heads, a->k->shape[1]));
    return backward(op, device, a, lists, transposed, row_floats(a->lse, false));
}
