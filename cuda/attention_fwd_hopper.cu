/* attention_fwd_hopper.cu - attention_fwd.cu on Hopper, for 16-bit operands of head dims up to 128
 * whose rows the copy engine takes. Maths, precision and results are those of attention_fwd.cu, but
 * that weights are relative to another score than the largest so far: see Softmax.
 *
 * Parallel: dense, a team of three consumer warpgroups (two for head dims above 64, and where tiles
 *   of three leave too many multiprocessors idle at the end), which own 64 queries each and walk
 *   key tiles of 128. With lists of blocks of 128, two teams of two consumers and key tiles of 64,
 *   of smaller blocks four teams of one; above 64 dims one team of two and tiles of 128, or two of
 *   one and 64. The producer alone reads lists. The scores of tile j + 1 are multiplied while the
 *   weights of tile j are: a consumer issues Q K^T of j + 1 and P V of j together, and turns scores
 *   into weights while P V runs. Consumers take turns in issuing, so that one's exponentials
 *   overlap with the others' products.
 * A consumer whose queries see none of a tile passes it on unread (the causal triangle's edge);
 *   only tiles that the edge or the end of the keys cuts are masked.
 * Shared memory: Q twice, so that the next item's queries are there; O leaves through it. K and V
 *   in STAGES stages each.
 * With JOINS the copy engine brings what o is of other keys beside the products, and a thread joins
 *   its part of that with its o before it stages it.
 * Bytes: those of attention_fwd.cu.
 */
#include "attention_hopper.cuh"

#include <float.h>

using namespace attention;
using namespace hopper;

/* Not in the namespace below, whose members must all be used. */
namespace attention {

template <int PANELS_, int TEAMS_, int CONSUMERS_, int KEYS_, int STAGES_, bool LISTS_,
          bool JOINS_ = false>
struct ForwardShape {
    static constexpr int PANELS = PANELS_, TEAMS = TEAMS_, CONSUMERS = CONSUMERS_;
    static constexpr int KEYS = KEYS_, STAGES = STAGES_; /* of a tile; tiles in shared memory */
    static constexpr bool LISTS = LISTS_, JOINS = JOINS_;
    static constexpr int CTAS = 1, QUERIES = CONSUMER_ROWS * CONSUMERS;
    static constexpr int THREADS = WARPGROUP * (1 + TEAMS * CONSUMERS);
    /* Registers a thread: at the launch, and a producer's and a consumer's thereafter. */
    static constexpr int EACH = 65536 / THREADS / 8 * 8, KEEP = 32;
    static constexpr int SPARE = (EACH - KEEP) / (TEAMS * CONSUMERS) / 8 * 8;
    static constexpr int TAKE = EACH + SPARE < 240 ? EACH + SPARE : 240;
    static constexpr uint32_t HALF_PANEL = CONSUMER_ROWS * PANEL_ROW;
    static constexpr uint32_t Q_PANEL = QUERIES * PANEL_ROW, KV_PANEL = KEYS * PANEL_ROW;
    static constexpr uint32_t Q_BYTES = PANELS * Q_PANEL, KV_BYTES = PANELS * KV_PANEL;
    static constexpr uint32_t K_AT = 2 * Q_BYTES, V_AT = K_AT + STAGES * KV_BYTES;
    static constexpr uint32_t BEFORE_AT = V_AT + STAGES * KV_BYTES;
    static constexpr uint32_t BARRIERS_AT = BEFORE_AT + JOINS * Q_BYTES;
    static constexpr int BARRIERS = 4 + 4 * STAGES + JOINS * CONSUMERS;
    static constexpr uint32_t ITEMS_AT = BARRIERS_AT + (8 * BARRIERS + 15) / 16 * 16;
    static constexpr uint32_t TILES_AT = ITEMS_AT + 2 * ITEM_BYTES;
    static constexpr uint32_t TEAM =
        (TILES_AT + 4 * STAGES + PANEL_ALIGN - 1) / PANEL_ALIGN * PANEL_ALIGN;
    static constexpr size_t SHARED = TEAMS * TEAM;
};

} // namespace attention

namespace {

struct Forward {
    CUtensorMap q, k, v, o;
    Problem p;
};

#ifdef HOPPER_CODE

/* Addresses in a team's shared memory. Tile number n uses the barriers of stage n % STAGES. */
template <class Shape> struct Places {
    uint32_t base;

    __device__ __forceinline__ uint32_t q(int slot) const { return base + slot * Shape::Q_BYTES; }
    __device__ __forceinline__ uint32_t k(int stage) const {
        return base + Shape::K_AT + stage * Shape::KV_BYTES;
    }
    __device__ __forceinline__ uint32_t v(int stage) const {
        return base + Shape::V_AT + stage * Shape::KV_BYTES;
    }
    /* What o is over other keys. */
    __device__ __forceinline__ uint32_t before() const { return base + Shape::BEFORE_AT; }
    __device__ __forceinline__ uint32_t barrier(int number) const {
        return base + Shape::BARRIERS_AT + 8 * number;
    }
    /* The item whose queries are in a slot. */
    __device__ __forceinline__ uint32_t item(int slot) const {
        return base + Shape::ITEMS_AT + ITEM_BYTES * slot;
    }
    /* With lists: the first key of the tile in a stage, + 1 with the last of an item. */
    __device__ __forceinline__ uint32_t tile(int stage) const {
        return base + Shape::TILES_AT + 4 * stage;
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
    __device__ __forceinline__ uint32_t before_full(int group) const {
        return barrier(4 + 4 * Shape::STAGES + group);
    }
};

/* ---- the producer ---------------------------------------------------------------------------- */
template <class Shape>
__device__ __forceinline__ void produce(const Forward &f, Places<Shape> at, int team) {
    const Problem &p = f.p;
    const unsigned int producers = gridDim.x * Shape::TEAMS;
    Ring<2> q;
    Ring<Shape::STAGES> kv;
    const int items = p.tiles * p.B * p.H;
    for (int index = blockIdx.x + gridDim.x * team;; index = next_item(producers)) {
        barrier_wait(at.q_empty(q.at), q.phase ^ 1);
        WorkItem item = {0, 0, -1, false};
        if (index < items) {
            item = item_at(p, index, p.causal);
            if (item.tile * Shape::QUERIES >= p.T) { /* a last block is shorter than the others */
                continue;
            }
        }
        if (item.tile < 0) {
            store_item(at.item(q.at), item);
            barrier_arrive(at.q_full(q.at));
            break;
        }
        int first = item.tile * Shape::QUERIES;
        PartWalk<Shape::LISTS, Shape::KEYS> walk(p, item.h, first, 0,
                                                 keys_end(p, first + Shape::QUERIES));
        int tile = walk.next();
        item.meets = tile >= 0;
        store_item(at.item(q.at), item);
        barrier_expect(at.q_full(q.at), Shape::Q_BYTES);
        for (int panel = 0; panel < Shape::PANELS; panel++) {
            for (int part = 0; part < Shape::CONSUMERS; part++) {
                box_load(at.q(q.at) + panel * Shape::Q_PANEL + part * Shape::HALF_PANEL, &f.q,
                         at.q_full(q.at), panel * PANEL_COLUMNS, first + part * CONSUMER_ROWS,
                         item.h, item.b);
            }
        }
        q.advance();
        auto load = [&](const CUtensorMap *map, uint32_t to, uint32_t full) {
            barrier_expect(full, Shape::KV_BYTES);
            for (int panel = 0; panel < Shape::PANELS; panel++) {
                box_load(to + panel * Shape::KV_PANEL, map, full, panel * PANEL_COLUMNS, tile,
                         item.h, item.b);
            }
        };
        for (; tile >= 0; kv.advance()) {
            int following = walk.next();
            barrier_wait(at.k_empty(kv.at), kv.phase ^ 1);
            if (Shape::LISTS) {
                store_shared4(at.tile(kv.at), tile + (following < 0));
            }
            load(&f.k, at.k(kv.at), at.k_full(kv.at));
            barrier_wait(at.v_empty(kv.at), kv.phase ^ 1);
            load(&f.v, at.v(kv.at), at.v_full(kv.at));
            tile = following;
        }
    }
    end_producer(producers);
}

/* ---- a consumer ------------------------------------------------------------------------------ */
/* Of a thread's two rows the power of 2 that weights are relative to, and its part of their sum. The
 * power is that of the largest score of the first tile, so that no other tile waits for its largest
 * score. It follows the scores once the weights of a row and tile that a thread has add up to more
 * than MOST: weights above 1 are as exact as others, but float16 ends at 65,504, and so does o in
 * float32 for values of bfloat16 above 2^100. */
struct Softmax {
    static constexpr float MOST = 32768.0f;
    float shift[2], sum[2], shrink[2];

    __device__ __forceinline__ void init() {
        shift[0] = shift[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }

    /* Scores of a row become weights relative to 2^from. Return their sum. */
    template <int N>
    static __device__ __forceinline__ float weights(float (&s)[N], int half, float scale_log2,
                                                    float from) {
        float parts[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 2 * half; i < N; i += 4) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                s[i + e] = fast_exp2(fmaf(s[i + e], scale_log2, -from));
                parts[e] += s[i + e];
            }
        }
        return parts[0] + parts[1];
    }

    /* Scores become weights, `parts` this thread's sum of each row. False if a sum is above MOST, or
     * not a number, as where a row had no key so far. */
    template <int N>
    __device__ __forceinline__ bool try_weights(float (&s)[N], float (&parts)[2],
                                                float scale_log2) const {
        parts[0] = weights(s, 0, scale_log2, shift[0]);
        parts[1] = weights(s, 1, scale_log2, shift[1]);
        return parts[0] <= MOST && parts[1] <= MOST;
    }

    /* Scores become weights relative to the largest score so far; what was added up before must be
     * multiplied by `shrink`. */
    template <int N> __device__ __forceinline__ void follow(float (&s)[N], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = -INFINITY;
#pragma unroll
            for (int i = 2 * half; i < N; i += 4) {
                top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            }
            const float before = shift[half];
            shift[half] = fmaxf(before, warp_max<4>(top) * scale_log2);
            /* -inf - -inf is not a number: rows without a key subtract 0 */
            const float from = shift[half] == -INFINITY ? 0.0f : shift[half];
            shrink[half] = fast_exp2(before - from);
            sum[half] = sum[half] * shrink[half] + weights(s, half, scale_log2, from);
        }
    }
};

/* -inf for the keys of a tile that a thread's upper or lower row, which sees `columns`, does not
 * see. */
template <int N>
__device__ __forceinline__ void hide(float (&s)[N], int columns, int half, int lane) {
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (8 * n + e >= columns - 2 * (lane % 4)) {
                s[4 * n + 2 * half + e] = -INFINITY;
            }
        }
    }
}

/* A thread of a consumer, which owns 64 queries of each item. */
template <class T, class Shape> struct Consumer {
    static constexpr int PANELS = Shape::PANELS, CONSUMERS = Shape::CONSUMERS;
    static constexpr int WEIGHTS = Shape::KEYS / 16; /* steps of 16 keys */
    static constexpr int SCORES = Shape::KEYS / 2;

    const Forward &f;
    const Problem &p;
    const Places<Shape> at;
    const int group, lane, my_row;
    const int my_turn, next_turn, my_barrier;
    const bool leads; /* for its warpgroup */
    Ring<2> q;
    Ring<Shape::STAGES> kv, before; /* before: the tile whose values wait for w */
    /* Of an item: its end of keys, my first query, the end of keys of all mine and of my first. */
    WorkItem item;
    int end, mine, my_end, least;
    uint32_t my_q;
    int tile;  /* its first key */
    bool more; /* with lists: after this tile */
    uint32_t before_phase = 0;
    float o[32 * PANELS];
    uint32_t w[WEIGHTS][4]; /* the weights of the tile before, rounded */
    Softmax softmax;

    __device__ __forceinline__ Consumer(const Forward &f, Places<Shape> at, int team, int group)
        : f(f), p(f.p), at(at), group(group), lane(threadIdx.x & 31),
          my_row((int)(threadIdx.x % WARPGROUP) / 32 * 16 + lane / 4),
          my_turn(1 + team * CONSUMERS + group),
          next_turn(1 + team * CONSUMERS + (group + 1) % CONSUMERS),
          my_barrier(my_turn + Shape::TEAMS * CONSUMERS), leads(threadIdx.x % WARPGROUP == 0) {}

    __device__ __forceinline__ void run() {
        if (group == CONSUMERS - 1) {
            pass_turn();
        }
        for (; begin(); q.advance()) {
            next_tile();
            if (tile < my_end) {
                attend();
            }
#pragma unroll 1
            for (; tile < end; next_tile()) { /* beyond the edge of mine */
                pass_tile();
            }
            store();
        }
    }

    /* ---- load -------------------------------------------------------------------------------- */
    /* Waits for the queries of the next item, if there is one. */
    __device__ __forceinline__ bool begin() {
        barrier_wait(at.q_full(q.at), q.phase);
        item = load_item(at.item(q.at));
        if (item.tile < 0) {
            return false;
        }
        const int first = item.tile * Shape::QUERIES;
        end = keys_end(p, first + Shape::QUERIES);
        mine = first + CONSUMER_ROWS * group;
        my_end = mine < p.T ? keys_end(p, mine + CONSUMER_ROWS) : 0;
        least = p.causal ? min(p.S, mine + p.offset + 1) : p.S;
        my_q = at.q(q.at) + group * Shape::HALF_PANEL;
        tile = -Shape::KEYS;
        more = item.meets;
        softmax.init();
#pragma unroll
        for (int i = 0; i < 32 * PANELS; i++) {
            o[i] = 0.0f;
        }
        if constexpr (Shape::JOINS) {
            fetch_before();
        }
        return true;
    }

    /* Waits for the keys of the next tile, if one begins before `end`. Only the producer reads
     * lists: it leaves word of a tile beside it, which all of a consumer's threads must have read
     * when the tile is handed back. */
    __device__ __forceinline__ void next_tile() {
        tile = Shape::LISTS ? INT_MAX : tile + Shape::KEYS;
        if (Shape::LISTS ? !more : tile >= end) {
            return;
        }
        barrier_wait(at.k_full(kv.at), kv.phase);
        if constexpr (Shape::LISTS) {
            int word = (int)uniform(load_shared4(at.tile(kv.at)));
            tile = word & ~1;
            more = word == tile;
        }
    }

    /* Asks for what o is over other keys; all threads have read that of the item before. */
    __device__ __forceinline__ void fetch_before() {
        if (leads) {
            barrier_expect(at.before_full(group), PANELS * Shape::HALF_PANEL);
            for (int panel = 0; panel < PANELS; panel++) {
                box_load(at.before() + panel * Shape::Q_PANEL + group * Shape::HALF_PANEL, &f.o,
                         at.before_full(group), panel * PANEL_COLUMNS, mine, item.h, item.b);
            }
        }
    }

    /* A tile that my queries do not see. */
    __device__ __forceinline__ void pass_tile() {
        take_turn();
        pass_turn();
        named_barrier_sync(my_barrier, WARPGROUP);
        if (leads) {
            barrier_arrive(at.k_empty(kv.at));
            barrier_wait(at.v_full(kv.at), kv.phase);
            barrier_arrive(at.v_empty(kv.at));
        }
        kv.advance();
    }

    /* ---- product ----------------------------------------------------------------------------- */
    __device__ __forceinline__ void take_turn() {
        if (CONSUMERS > 1) {
            named_barrier_sync(my_turn, 2 * WARPGROUP);
        }
    }
    __device__ __forceinline__ void pass_turn() {
        if (CONSUMERS > 1) {
            named_barrier_arrive(next_turn, 2 * WARPGROUP);
        }
    }

    /* s = Q K^T */
    __device__ __forceinline__ void multiply_keys(float (&s)[SCORES]) {
        const Operand queries = rows_operand(my_q), keys = rows_operand(at.k(uniform(kv.at)));
        products_begin();
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
#pragma unroll
            for (int step = 0; step < PANEL_COLUMNS / 16; step++) {
                product<T, 0>(s, further(queries, panel * Shape::Q_PANEL + 32 * step),
                              further(keys, panel * Shape::KV_PANEL + 32 * step), panel + step > 0);
            }
        }
        products_end();
    }

    /* o += P V, of the tile before */
    __device__ __forceinline__ void multiply_values() {
        const Operand values = columns_operand(at.v(uniform(before.at)), Shape::KV_PANEL);
        barrier_wait(at.v_full(before.at), before.phase);
        products_begin();
#pragma unroll
        for (int step = 0; step < WEIGHTS; step++) {
            product<T, 1>(o, w[step], further(values, step * 16 * PANEL_ROW), true);
        }
        products_end();
    }

    __device__ __forceinline__ void values_done() {
        products_wait<0>();
        hold(o);
        hold(w);
        if (leads) {
            barrier_arrive(at.v_empty(before.at));
        }
    }

    /* ---- softmax ----------------------------------------------------------------------------- */
    /* -inf for the keys of a tile that my queries do not see. */
    __device__ __forceinline__ void hide_unseen(float (&s)[SCORES]) {
        if (tile + Shape::KEYS > least) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = mine + my_row + 8 * half;
                int seen = p.causal ? min(p.S, row + p.offset + 1) : p.S;
                hide(s, seen - tile, half, lane);
            }
        }
    }

    /* From scores that have been multiplied to weights, but for rounding them. True if o must be
     * multiplied by softmax.shrink. Once weights prove too large the scores are gone, so that Q K^T
     * is repeated: by all four warps, as wgmma needs, and before the keys are handed back. */
    template <bool FIRST> __device__ __forceinline__ bool weigh(float (&s)[SCORES]) {
        bool follows = FIRST;
        hold(s);
        hide_unseen(s);
        if constexpr (!FIRST) {
            float parts[2];
            const bool good = softmax.try_weights(s, parts, p.scale_log2);
            follows = named_barrier_any(my_barrier, WARPGROUP, !good);
            if (follows) {
                multiply_keys(s);
                products_wait<0>();
                hold(s);
                hide_unseen(s);
            } else {
                softmax.sum[0] += parts[0];
                softmax.sum[1] += parts[1];
            }
        }
        if (leads) {
            barrier_arrive(at.k_empty(kv.at));
        }
        if (follows) {
            softmax.follow(s, p.scale_log2);
        }
        return follows;
    }

    __device__ __forceinline__ void round(const float (&s)[SCORES]) {
#pragma unroll
        for (int i = 0; i < 4 * WEIGHTS; i++) {
            w[i / 4][i % 4] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
        }
        before = kv;
        kv.advance();
    }

    /* The tiles that my queries see. */
    __device__ __forceinline__ void attend() {
        float s[SCORES];
        take_turn();
        multiply_keys(s);
        pass_turn();
        products_wait<0>();
        weigh<true>(s);
        round(s);
        for (next_tile(); tile < my_end; next_tile()) {
            take_turn();
            multiply_keys(s);
            multiply_values();
            pass_turn();
            products_wait<1>();
            const bool follows = weigh<false>(s);
            values_done();
            if (follows) {
#pragma unroll
                for (int i = 0; i < 32 * PANELS; i++) {
                    o[i] *= softmax.shrink[i / 2 % 2];
                }
            }
            round(s);
        }
        multiply_values();
        values_done();
    }

    /* ---- store ------------------------------------------------------------------------------- */
    /* A row's o, times factor, is added to what it was before, times `weight`. */
    __device__ __forceinline__ void join_row(int half, float factor, float weight) {
#pragma unroll
        for (int i = 0; i < 8 * PANELS; i++) {
            const float2 before = unpack_pair<T>(
                load_shared4(at.before() + i / 8 * Shape::Q_PANEL + group * Shape::HALF_PANEL +
                             panel_offset(my_row + 8 * half, i % 8) + 4 * (lane % 4)));
            float *pair = o + 4 * i + 2 * half;
            pair[0] = pair[0] * factor + (weight > 0.0f ? weight * before.x : 0.0f);
            pair[1] = pair[1] * factor + (weight > 0.0f ? weight * before.y : 0.0f);
        }
    }

    /* o and lse; o over my queries in shared memory, and from there. */
    __device__ __forceinline__ void store() {
        named_barrier_sync(my_barrier, WARPGROUP); /* the products with my_q are done */
        float factors[2], *lses = p.lse.row(item.b, item.h, mine + my_row);
        if constexpr (Shape::JOINS) {
            barrier_wait(at.before_full(group), before_phase);
            before_phase ^= 1;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = warp_sum<4>(softmax.sum[half]);
            int row = mine + my_row + 8 * half;
            factors[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
            float lse = sum == 0.0f ? -INFINITY : softmax.shift[half] * LN2 + logf(sum);
            if constexpr (Shape::JOINS) {
                const float before = row < p.T ? lses[8 * half * p.lse.t] : -INFINITY;
                const float2 weights = join_parts(&lse, before);
                join_row(half, factors[half] * weights.x, weights.y);
                factors[half] = 1.0f;
                __syncwarp(); /* lse has been read */
            }
            if (lane % 4 == 0 && row < p.T) {
                lses[8 * half * p.lse.t] = lse;
            }
        }
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            stage_rows<T>(my_q + panel * Shape::Q_PANEL, o, 32 * panel, factors);
        }
        proxy_fence();
        named_barrier_sync(my_barrier, WARPGROUP);
        if (leads && mine < p.T) {
            for (int panel = 0; panel < PANELS; panel++) {
                box_store(&f.o, my_q + panel * Shape::Q_PANEL, panel * PANEL_COLUMNS, mine, item.h,
                          item.b);
            }
            box_stores_read();
        }
        barrier_arrive(at.q_empty(q.at)); /* by every thread: each has read which item it was */
    }
};

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::CTAS)
    attention_fwd_hopper_kernel(const __grid_constant__ Forward f) {
    await_previous();
#ifdef HOPPER_CODE
    const uint32_t shared = dynamic_shared();
    for (int team = 0; team < Shape::TEAMS && threadIdx.x == 0; team++) {
        Places<Shape> at{shared + team * Shape::TEAM};
        for (int slot = 0; slot < 2; slot++) {
            barrier_init(at.q_full(slot), 1);
            barrier_init(at.q_empty(slot), Shape::CONSUMERS * WARPGROUP);
        }
        for (int group = 0; group < Shape::JOINS * Shape::CONSUMERS; group++) {
            barrier_init(at.before_full(group), 1);
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
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    if (warp < WARPGROUP / 32) {
        registers_down_to<Shape::KEEP>();
        if (warp < Shape::TEAMS && threadIdx.x % 32 == 0) {
            produce(f, Places<Shape>{shared + warp * Shape::TEAM}, warp);
        }
    } else {
        registers_up_to<Shape::TAKE>();
        const int number = warp / (WARPGROUP / 32) - 1, team = number / Shape::CONSUMERS;
        Consumer<T, Shape>(f, Places<Shape>{shared + team * Shape::TEAM}, team,
                           number % Shape::CONSUMERS)
            .run();
    }
#endif
}

/* ---- host ------------------------------------------------------------------------------------ */
template <class Shape>
nd_status launch(const char *op, int device, Forward f, const Operands &a,
                 const BlockLists &lists) {
    problem_tiles(&f.p, false, Shape::QUERIES, lists);
    ND_TRY(box_map(op, a.q, CONSUMER_ROWS, &f.q));
    ND_TRY(box_map(op, a.k, Shape::KEYS, &f.k));
    ND_TRY(box_map(op, a.v, Shape::KEYS, &f.v));
    ND_TRY(box_map(op, a.o, CONSUMER_ROWS, &f.o));
    if (a.q->dtype == ND_BF16) {
        return hopper_launch<Shape>(op, device, attention_fwd_hopper_kernel<bf16, Shape>, f);
    }
    return hopper_launch<Shape>(op, device, attention_fwd_hopper_kernel<f16, Shape>, f);
}

/* About how long the busiest of a device's multiprocessors computes tiles of `queries`, in times of
 * a query that sees all keys: items are taken longest first, so that one takes item k * processors
 * after k that are no shorter. */
float time_of_tiles(int device, const Problem &p, int queries) {
    const int64_t processors = cuda_device_limits(device)->processors;
    const int64_t items = ceil_div<int64_t>(p.T, queries) * p.B * p.H;
    const float falls = p.causal ? fminf((float)p.T / (float)p.S, 1) : 0; /* from the longest on */
    float most = (1 - falls / 2) * (float)items / (float)processors;
    for (int64_t before = 0; before < items; before += processors) {
        const float length = 1 - falls * (float)before / (float)items;
        most = fmaxf(most, (float)(before / processors + 1) * length);
    }
    return most * (float)queries;
}

} // namespace

nd_status attention::attention_fwd_hopper(const char *op, int device, Problem p, const Operands &a,
                                          const BlockLists &lists) {
    Forward f = {};
    f.p = p;
    /* ForwardShape<panels, teams, consumers, keys of a tile, tiles in shared memory, ...>. */
    auto run = [&](auto shape) { return launch<decltype(shape)>(op, device, f, a, lists); };
    bool wide = p.D > PANEL_COLUMNS;
    if (p.joins) {
        return wide ? run(ForwardShape<2, 1, 2, 128, 2, false, true>())
                    : run(ForwardShape<1, 1, 3, 128, 4, false, true>());
    }
    if (lists.offsets == NULL) {
        if (wide) {
            return run(ForwardShape<2, 1, 2, 128, 2, false>());
        }
        /* A query takes some quarter longer in a tile of two consumers. */
        const float three = time_of_tiles(device, p, 3 * CONSUMER_ROWS);
        return three > 3 * CONSUMER_ROWS &&
                       1.25f * time_of_tiles(device, p, 2 * CONSUMER_ROWS) < three
                   ? run(ForwardShape<1, 1, 2, 128, 4, false>())
                   : run(ForwardShape<1, 1, 3, 128, 4, false>());
    }
    if (lists.block % (2 * CONSUMER_ROWS) == 0) {
        return wide ? run(ForwardShape<2, 1, 2, 128, 2, true>())
                    : run(ForwardShape<1, 2, 2, 64, 4, true>());
    }
    return wide ? run(ForwardShape<2, 2, 1, 64, 2, true>())
                : run(ForwardShape<1, 4, 1, 64, 2, true>());
}
