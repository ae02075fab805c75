/* attention_fwd_hopper.cu - attention_fwd.cu on Hopper, for 16-bit operands of head dims up to 128 whose
 * rows the copy engine takes. Maths, precision and results are those of attention_fwd.cu.
 *
 * Parallel: three consumer warpgroups (two for head dims above 64, and with lists) own 64 queries
 *   each and walk key tiles of 128. The scores of tile j + 1 are multiplied while the weights of tile j
 *   are: a consumer issues Q K^T of j + 1 and P V of j together, and turns scores into weights while P V
 *   runs. Consumers take turns in issuing, so that one's exponentials fall into the others' products.
 * A consumer whose queries see none of a tile passes it on unread (the causal triangle's edge); only
 *   tiles that the edge or the end of the keys cuts are masked.
 * Shared memory: Q twice, so that the next piece's queries are there; O leaves through it. K and V in STAGES
 *   stages each.
 */
#include "attention_hopper.cuh"

#include <float.h>

using namespace attention;
using namespace hopper;

/* Not in the namespace below, whose members must all be used. */
namespace attention {

template <int PANELS_, int CONSUMERS_, int STAGES_, bool LISTS_> struct ForwardShape {
    static constexpr int PANELS = PANELS_, CONSUMERS = CONSUMERS_, STAGES = STAGES_;
    static constexpr bool LISTS = LISTS_;
    static constexpr int QUERIES = HALF * CONSUMERS, KEYS = 2 * HALF;
    static constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
    static constexpr int CTAS = CONSUMERS == 1 && PANELS == 1 ? 2 : 1;
    static constexpr int KEEP = CONSUMERS == 3 ? 32 : CTAS == 2 ? 56 : 24; /* producer's */
    static constexpr int TAKE = CONSUMERS == 3 ? 160 : CTAS == 2 ? 192 : 240;
    static constexpr uint32_t HALF_PANEL = HALF * PANEL_ROW;
    static constexpr uint32_t Q_PANEL = QUERIES * PANEL_ROW, KV_PANEL = KEYS * PANEL_ROW;
    static constexpr uint32_t Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * KV_PANEL;
    static constexpr uint32_t K_AT = 2 * Q_BYTES, V_AT = K_AT + STAGES * KV_BYTES;
    static constexpr uint32_t BARRIERS_AT = V_AT + STAGES * KV_BYTES;
    static constexpr uint32_t PIECES_AT = BARRIERS_AT + 8 * (4 + 4 * STAGES);
    static constexpr size_t SHARED = PIECES_AT + 2 * PIECE_BYTES;
};

} // namespace attention

namespace {

struct Forward {
    CUtensorMap q, k, v, o;
    Problem p;
};

#ifdef HOPPER_CODE

/* Where what lies in shared memory; the barriers of tile number n are those of stage n % STAGES. */
template <class Shape> struct Places {
    uint32_t base;

    __device__ __forceinline__ uint32_t q(int slot) const { return base + slot * Shape::Q_BYTES; }
    __device__ __forceinline__ uint32_t k(int stage) const {
        return base + Shape::K_AT + stage * Shape::KV_BYTES;
    }
    __device__ __forceinline__ uint32_t v(int stage) const {
        return base + Shape::V_AT + stage * Shape::KV_BYTES;
    }
    __device__ __forceinline__ uint32_t barrier(int number) const {
        return base + Shape::BARRIERS_AT + 8 * number;
    }
    /* The piece whose queries are in a slot. */
    __device__ __forceinline__ uint32_t piece(int slot) const {
        return base + Shape::PIECES_AT + PIECE_BYTES * slot;
    }
    __device__ __forceinline__ uint32_t q_full(int slot) const { return barrier(slot); }
    __device__ __forceinline__ uint32_t q_empty(int slot) const { return barrier(2 + slot); }
    __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(4 + stage); }
    __device__ __forceinline__ uint32_t k_empty(int stage) const {
        return barrier(4 + Shape::STAGES + stage);
    }
    __device__ __forceinline__ uint32_t v_full(int stage) const {
        return barrier(4 + 2 * Shape::STAGES + stage);
    }
    __device__ __forceinline__ uint32_t v_empty(int stage) const {
        return barrier(4 + 3 * Shape::STAGES + stage);
    }
};

/* The halves of a key tile by their first key; the second is -1 where there are no more. */
struct Halves {
    int first, second;
};

template <bool LISTS> struct KeyWalk {
    PartWalk<LISTS> parts;

    __device__ __forceinline__ KeyWalk(const Problem &p, const Piece &piece, int first_query,
                                       int end)
        : parts(p, piece.h, first_query, 0, end) {}

    __device__ __forceinline__ bool next(Halves *tile) {
        tile->first = parts.next();
        if constexpr (LISTS) {
            tile->second = tile->first < 0 ? -1 : parts.next();
        } else {
            parts.next();
            tile->second = tile->first + HALF;
        }
        return tile->first >= 0;
    }
};

/* ---- the producer -------------------------------------------------------------------------------- */
template <class Shape> __device__ __forceinline__ void produce(const Forward &f, Places<Shape> at) {
    const Problem &p = f.p;
    Ring<2> q;
    Ring<Shape::STAGES> kv;
    const int pieces = p.tiles * p.B * p.H;
    for (int index = blockIdx.x;; index = next_piece()) {
        barrier_wait(at.q_empty(q.at), q.phase ^ 1);
        Piece piece = {0, 0, -1};
        if (index < pieces) {
            piece = piece_at(p, index, p.causal);
            if (piece.tile * Shape::QUERIES >= p.T) { /* a last block is shorter than the others */
                continue;
            }
        }
        store_piece(at.piece(q.at), piece);
        if (piece.tile < 0) {
            barrier_arrive(at.q_full(q.at));
            break;
        }
        int first = piece.tile * Shape::QUERIES;
        barrier_expect(at.q_full(q.at), Shape::Q_BYTES);
        for (int panel = 0; panel < Shape::PANELS; panel++) {
            for (int part = 0; part < Shape::CONSUMERS; part++) {
                box_load(at.q(q.at) + panel * Shape::Q_PANEL + part * Shape::HALF_PANEL, &f.q,
                         at.q_full(q.at), panel * PANEL_COLUMNS, first + part * HALF, piece.h,
                         piece.b);
            }
        }
        q.advance();
        auto load = [&](const CUtensorMap *map, uint32_t to, uint32_t full, uint32_t empty,
                        Halves tile) {
            barrier_wait(empty, kv.phase ^ 1);
            barrier_expect(full, Shape::KV_BYTES);
            for (int panel = 0; panel < Shape::PANELS; panel++) {
                uint32_t place = to + panel * Shape::KV_PANEL;
                box_load(place, map, full, panel * PANEL_COLUMNS, tile.first, piece.h, piece.b);
                if (Shape::LISTS) { /* what is not listed comes from beyond the end, as zeros */
                    box_load(place + Shape::HALF_PANEL, map, full, panel * PANEL_COLUMNS,
                             tile.second < 0 ? p.S : tile.second, piece.h, piece.b);
                }
            }
        };
        KeyWalk<Shape::LISTS> walk(p, piece, first, keys_end(p, first + Shape::QUERIES));
        for (Halves tile; walk.next(&tile); kv.advance()) {
            load(&f.k, at.k(kv.at), at.k_full(kv.at), at.k_empty(kv.at), tile);
            load(&f.v, at.v(kv.at), at.v_full(kv.at), at.v_empty(kv.at), tile);
        }
    }
    leave_pieces();
}

/* ---- a consumer ---------------------------------------------------------------------------------- */
/* The two rows of a thread: running maximum (of all four threads of a row) and sum (its own part). */
struct Softmax {
    float maximum[2], sum[2], shrink[2];

    __device__ __forceinline__ void init() {
        maximum[0] = maximum[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }

    /* Scores become weights; what was added up before them must be multiplied by `shrink`. */
    template <int N> __device__ __forceinline__ void weights(float (&s)[N], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float old = maximum[half], top = old;
#pragma unroll
            for (int i = 2 * half; i < N; i += 4) {
                top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            }
            top = warp_max<4>(top);
            /* -inf - -inf is not a number: rows without a key so far subtract 0 */
            float shift = top == -INFINITY ? 0.0f : top * scale_log2;
            shrink[half] = fast_exp2(fmaf(old, scale_log2, -shift));
            float total = sum[half] * shrink[half];
#pragma unroll
            for (int i = 2 * half; i < N; i += 4) {
#pragma unroll
                for (int e = i; e < i + 2; e++) {
                    s[e] = fast_exp2(fmaf(s[e], scale_log2, -shift));
                    total += s[e];
                }
            }
            maximum[half] = top;
            sum[half] = total;
        }
    }
};

/* -inf for the keys of one half (s[from .. from + 31]) that a row does not see. */
template <int N>
__device__ __forceinline__ void hide(float (&s)[N], int from, int first_key, int end, int half,
                                     int lane) {
    int columns = first_key < 0 ? 0 : end - first_key - 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < HALF / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (8 * n + e >= columns) {
                s[from + 4 * n + 2 * half + e] = -INFINITY;
            }
        }
    }
}

template <class T, class Shape>
__device__ __forceinline__ void consume(const Forward &f, Places<Shape> at) {
    constexpr int PANELS = Shape::PANELS, CONSUMERS = Shape::CONSUMERS;
    constexpr int WEIGHTS = Shape::KEYS / 16; /* steps of 16 keys */
    const Problem &p = f.p;
    const int group = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0) - 1,
              lane = threadIdx.x & 31;
    const int row_in_tile = HALF * group + (int)(threadIdx.x % WARPGROUP) / 32 * 16 + lane / 4;
    const bool speaks = threadIdx.x % WARPGROUP == 0; /* for its warpgroup */
    const int my_turn = 1 + group, next_turn = 1 + (group + 1) % CONSUMERS;
    Ring<2> q;
    Ring<Shape::STAGES> kv;
    if (CONSUMERS > 1 && group == CONSUMERS - 1) {
        turn_pass(next_turn, 2 * WARPGROUP);
    }
    for (;;) {
        barrier_wait(at.q_full(q.at), q.phase);
        const Piece piece = load_piece(at.piece(q.at));
        if (piece.tile < 0) {
            break;
        }
        const int first = piece.tile * Shape::QUERIES, mine = first + HALF * group;
        const int my_end = mine < p.T ? keys_end(p, mine + HALF) : 0;
        const int least =
            p.causal ? min(p.S, mine + p.offset + 1) : p.S; /* my first row sees so many */
        const uint32_t my_q = at.q(q.at) + group * Shape::HALF_PANEL;

        float o[32 * PANELS];
#pragma unroll
        for (int i = 0; i < 32 * PANELS; i++) {
            o[i] = 0.0f;
        }
        uint32_t w[WEIGHTS][4]; /* the weights of the tile before, rounded */
        Softmax softmax;
        softmax.init();
        Ring<Shape::STAGES> before; /* whose values wait for w */

        auto take_turn = [&]() {
            if (CONSUMERS > 1) {
                turn_wait(my_turn, 2 * WARPGROUP);
            }
        };
        auto pass_turn = [&]() {
            if (CONSUMERS > 1) {
                turn_pass(next_turn, 2 * WARPGROUP);
            }
        };
        auto multiply_keys = [&](float(&s)[64]) {
            const Operand queries = rows_operand(my_q), keys = rows_operand(at.k(kv.at));
            products_begin();
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
#pragma unroll
                for (int step = 0; step < PANEL_COLUMNS / 16; step++) {
                    product<T, 0>(s, further(queries, panel * Shape::Q_PANEL + 32 * step),
                                  further(keys, panel * Shape::KV_PANEL + 32 * step),
                                  panel + step > 0);
                }
            }
            products_end();
        };
        auto multiply_values = [&]() {
            const Operand values = columns_operand(at.v(before.at), Shape::KV_PANEL);
            barrier_wait(at.v_full(before.at), before.phase);
            products_begin();
#pragma unroll
            for (int step = 0; step < WEIGHTS; step++) {
                product<T, 1>(o, w[step], further(values, step * 16 * PANEL_ROW), true);
            }
            products_end();
        };
        auto values_done = [&]() {
            products_wait<0>();
            hold(o);
            hold(w);
            if (speaks) {
                barrier_arrive(at.v_empty(before.at));
            }
        };
        /* From scores that have been multiplied to weights, but for rounding them. */
        auto weigh = [&](float(&s)[64], Halves tile) {
            hold(s);
            if (speaks) {
                barrier_arrive(at.k_empty(kv.at));
            }
            if ((Shape::LISTS && tile.second < 0) || max(tile.first, tile.second) + HALF > least) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = first + row_in_tile + 8 * half;
                    int end = p.causal ? min(p.S, row + p.offset + 1) : p.S;
                    hide(s, 0, tile.first, end, half, lane);
                    hide(s, 32, tile.second, end, half, lane);
                }
            }
            softmax.weights(s, p.scale_log2);
        };
        auto round = [&](const float(&s)[64]) {
#pragma unroll
            for (int i = 0; i < 4 * WEIGHTS; i++) {
                w[i / 4][i % 4] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
            }
            before = kv;
            kv.advance();
        };

        KeyWalk<Shape::LISTS> walk(p, piece, first, keys_end(p, first + Shape::QUERIES));
        Halves tile;
        bool there = walk.next(&tile);
        if (there && tile.first < my_end) {
            float s[64];
            barrier_wait(at.k_full(kv.at), kv.phase);
            take_turn();
            multiply_keys(s);
            pass_turn();
            products_wait<0>();
            weigh(s, tile);
            round(s);
            for (there = walk.next(&tile); there && tile.first < my_end; there = walk.next(&tile)) {
                barrier_wait(at.k_full(kv.at), kv.phase);
                take_turn();
                multiply_keys(s);
                multiply_values();
                pass_turn();
                products_wait<1>();
                weigh(s, tile);
                values_done();
#pragma unroll
                for (int i = 0; i < 32 * PANELS; i++) {
                    o[i] *= softmax.shrink[i / 2 % 2];
                }
                round(s);
            }
            multiply_values();
            values_done();
        }
        for (; there; there = walk.next(&tile)) { /* beyond the edge: passed on unread */
            take_turn();
            pass_turn();
            if (speaks) {
                barrier_wait(at.k_full(kv.at), kv.phase);
                barrier_arrive(at.k_empty(kv.at));
                barrier_wait(at.v_full(kv.at), kv.phase);
                barrier_arrive(at.v_empty(kv.at));
            }
            kv.advance();
        }

        turn_wait(1 + CONSUMERS + group, WARPGROUP); /* nobody multiplies by my_q any more */
        float factors[2];
        float *lse = p.lse + ((int64_t)piece.b * p.H + piece.h) * p.T;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = warp_sum<4>(softmax.sum[half]);
            float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
            int row = first + row_in_tile + 8 * half;
            if (lane % 4 == 0 && row < p.T) {
                lse[row] = sum == 0.0f ? -INFINITY
                                       : softmax.maximum[half] * p.scale_log2 * LN2 + logf(sum);
            }
            factors[half] = factor;
        }
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            stage_rows<T>(my_q + panel * Shape::Q_PANEL, o, 32 * panel, factors);
        }
        proxy_fence();
        turn_wait(1 + CONSUMERS + group, WARPGROUP);
        if (speaks) {
            if (mine < p.T) {
                for (int panel = 0; panel < PANELS; panel++) {
                    box_store(&f.o, my_q + panel * Shape::Q_PANEL, panel * PANEL_COLUMNS, mine,
                              piece.h, piece.b);
                }
                box_stores_read();
            }
            barrier_arrive(at.q_empty(q.at));
        }
        q.advance();
    }
}

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::CTAS)
    attention_fwd_hopper_kernel(const __grid_constant__ Forward f) {
#ifdef HOPPER_CODE
    Places<Shape> at{dynamic_shared()};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < 2; slot++) {
            barrier_init(at.q_full(slot), 1);
            barrier_init(at.q_empty(slot), Shape::CONSUMERS);
        }
        for (int stage = 0; stage < Shape::STAGES; stage++) {
            barrier_init(at.k_full(stage), 1);
            barrier_init(at.k_empty(stage), Shape::CONSUMERS);
            barrier_init(at.v_full(stage), 1);
            barrier_init(at.v_empty(stage), Shape::CONSUMERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_down_to<Shape::KEEP>();
        if (threadIdx.x == 0) {
            produce(f, at);
        }
    } else {
        registers_up_to<Shape::TAKE>();
        consume<T>(f, at);
    }
#endif
}

/* ---- host ---------------------------------------------------------------------------------------- */
template <class Shape>
nd_status launch(const char *op, int device, Forward f, const Operands &a,
                 const BlockLists &lists) {
    problem_tiles(&f.p, false, Shape::QUERIES, lists);
    const int key_rows = Shape::LISTS ? HALF : 2 * HALF;
    ND_TRY(box_map(op, a.q, HALF, &f.q));
    ND_TRY(box_map(op, a.k, key_rows, &f.k));
    ND_TRY(box_map(op, a.v, key_rows, &f.v));
    ND_TRY(box_map(op, a.o, HALF, &f.o));
    if (a.q->dtype == ND_BF16) {
        return hopper_launch<Shape>(op, device, attention_fwd_hopper_kernel<bf16, Shape>, f);
    }
    return hopper_launch<Shape>(op, device, attention_fwd_hopper_kernel<f16, Shape>, f);
}

} // namespace

nd_status attention::attention_fwd_hopper(const char *op, int device, Problem p, const Operands &a,
                                          const BlockLists &lists) {
    Forward f = {};
    f.p = p;
    auto run = [&](auto shape) { return launch<decltype(shape)>(op, device, f, a, lists); };
    bool wide = p.D > PANEL_COLUMNS;
    if (lists.offsets == NULL) {
        return wide ? run(ForwardShape<2, 2, 2, false>()) : run(ForwardShape<1, 3, 4, false>());
    }
    if (lists.block % (2 * HALF) == 0) {
        return wide ? run(ForwardShape<2, 2, 2, true>()) : run(ForwardShape<1, 2, 4, true>());
    }
    return wide ? run(ForwardShape<2, 1, 2, true>()) : run(ForwardShape<1, 1, 2, true>());
}
