/* attention_bwd_hopper.cu - attention_bwd.cu on Hopper, for 16-bit operands of head dims up to 128
 * whose rows the copy engine takes. Maths, precision and order of sums are those of
 * attention_bwd.cu: the same bits from run to run, no atomics.
 *
 * One kernel serves both directions. It owns rows of X and Y and walks parts of 64 rows of x and y:
 *     S = X x^T   dP = Y y^T   P = exp(scale S - lse)   dS = P (dP - delta)   dX = scale sum dS x
 *   for dq:    X, Y are q, do    x, y are k, v     lse and delta belong to rows
 *   for dk dv: X, Y are k, v     x, y are q, do    they belong to columns, and dY = sum P y
 * Parallel: a consumer warpgroup owns 64 rows; P and dS pass from the first products to the second
 *   in registers. The first products of a part and the second of the part before are issued
 *   together; P and dS are formed while the latter run. Time is
 *   bound by the instructions around the products. Where they fit, three consumers share the
 *   processor (dq: X and Y are then read from shared memory), else two with X and Y in registers.
 * With angles dq and dk are rotated back in registers, where a thread holds both dims of a pair.
 *   The sums of a consumer's rows, for the bias of a projection, cost shuffles between lanes.
 * Rows beyond the end arrive as zeros. Queries there add nothing; keys there have score 0, so they
 *   are masked, as are pairs that causality cuts.
 * Bytes: those of attention_bwd.cu.
 */
#include "attention_hopper.cuh"

using namespace attention;
using namespace hopper;

/* Not in the namespace below, whose members must all be used. */
namespace attention {

template <bool KEYS_, int PANELS_, int CONSUMERS_, int SLOTS_, int STAGES_, bool LISTS_>
struct BackwardShape {
    static constexpr bool KEYS = KEYS_; /* are the own rows keys: dk dv */
    static constexpr int PANELS = PANELS_, CONSUMERS = CONSUMERS_, SLOTS = SLOTS_, STAGES = STAGES_;
    static constexpr bool LISTS = LISTS_;
    /* Are there registers for what the second products read and both first ones write at once? */
    static constexpr bool OVERLAP = !KEYS || (PANELS == 1 && CONSUMERS > 1);
    /* Are S and dP waited for together, so that lse and delta of columns are loaded once? */
    static constexpr bool TOGETHER = KEYS && OVERLAP;
    static constexpr bool IN_REGISTERS = !(KEYS && PANELS == 2) && CONSUMERS < 3; /* X and Y */
    static constexpr int ROWS = HALF * CONSUMERS;
    static constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
    static constexpr int CTAS = CONSUMERS == 1 && PANELS == 1 ? 2 : 1;
    static constexpr int KEEP = CONSUMERS == 3 ? 32 : CTAS == 2 ? 56 : 24; /* producer's */
    static constexpr int TAKE = CONSUMERS == 3 ? 160 : CTAS == 2 ? 192 : 240;
    static constexpr uint32_t PART = HALF * PANEL_ROW; /* bytes of 64 rows of a panel */
    static constexpr uint32_t OWN_PANEL = CONSUMERS * PART, OWN = PANELS * OWN_PANEL;
    static constexpr uint32_t OTHER = PANELS * PART;
    static constexpr uint32_t STATS = KEYS ? HALF * 8 : 0;
    static constexpr uint32_t OTHER_AT = SLOTS * 2 * OWN, STATS_AT = OTHER_AT + STAGES * 2 * OTHER;
    static constexpr uint32_t SUMS = PANELS * PANEL_COLUMNS * 4; /* of a warp */
    static constexpr uint32_t SUMS_AT = STATS_AT + STAGES * STATS;
    static constexpr uint32_t BARRIERS_AT = SUMS_AT + CONSUMERS * (KEYS ? 2 : 1) * 4 * SUMS;
    static constexpr uint32_t ITEMS_AT = BARRIERS_AT + 8 * (2 * SLOTS + 2 * STAGES);
    static constexpr size_t SHARED = ITEMS_AT + ITEM_BYTES * SLOTS;
};

} // namespace attention

namespace {

struct Backward {
    CUtensorMap own[2], other[2], gradient[2]; /* of X, Y; x, y; dX, dY */
    CUtensorMap stats;                         /* (lse, delta) of 64 queries a box */
    const float *cosines, *sines;              /* (T, R) */
    int half;                                  /* R: 8 or 16; 0: no rotation */
    float *sums;                               /* see Operands; or NULL */
    Problem p;
};

#ifdef HOPPER_CODE

template <class Shape> struct Places {
    uint32_t base;

    /* which: 0 for X or x, 1 for Y or y */
    __device__ __forceinline__ uint32_t own(int slot, int which) const {
        return base + (2 * slot + which) * Shape::OWN;
    }
    __device__ __forceinline__ uint32_t other(int stage, int which) const {
        return base + Shape::OTHER_AT + (2 * stage + which) * Shape::OTHER;
    }
    __device__ __forceinline__ uint32_t stats(int stage) const {
        return base + Shape::STATS_AT + stage * Shape::STATS;
    }
    __device__ __forceinline__ uint32_t barrier(int number) const {
        return base + Shape::BARRIERS_AT + 8 * number;
    }
    /* Of a consumer, of dX or dY: those of four warps. */
    __device__ __forceinline__ uint32_t sums(int group, int which) const {
        return base + Shape::SUMS_AT + (group * (Shape::KEYS ? 2 : 1) + which) * 4 * Shape::SUMS;
    }
    /* The item whose rows are in a slot. */
    __device__ __forceinline__ uint32_t item(int slot) const {
        return base + Shape::ITEMS_AT + ITEM_BYTES * slot;
    }
    __device__ __forceinline__ uint32_t own_full(int slot) const { return barrier(slot); }
    __device__ __forceinline__ uint32_t own_empty(int slot) const {
        return barrier(Shape::SLOTS + slot);
    }
    __device__ __forceinline__ uint32_t full(int stage) const {
        return barrier(2 * Shape::SLOTS + stage);
    }
    __device__ __forceinline__ uint32_t empty(int stage) const {
        return barrier(2 * Shape::SLOTS + Shape::STAGES + stage);
    }
};

/* The parts that the block's own rows from `first` on meet. */
template <class Shape>
__device__ __forceinline__ PartWalk<Shape::LISTS, HALF> walk_of(const Problem &p,
                                                                const WorkItem &item, int first) {
    if constexpr (Shape::KEYS) {
        return PartWalk<Shape::LISTS, HALF>(p, item.h, first,
                                            p.causal ? max(first - p.offset, 0) : 0, p.T);
    } else {
        return PartWalk<Shape::LISTS, HALF>(p, item.h, first, 0, keys_end(p, first + Shape::ROWS));
    }
}

/* ---- the producer ---------------------------------------------------------------------------- */
template <class Shape>
__device__ __forceinline__ void produce(const Backward &f, Places<Shape> at) {
    const Problem &p = f.p;
    Ring<Shape::SLOTS> slot;
    Ring<Shape::STAGES> stage;
    const int items = p.tiles * p.B * p.H;
    for (int index = blockIdx.x;; index = next_item(gridDim.x)) {
        barrier_wait(at.own_empty(slot.at), slot.phase ^ 1);
        WorkItem item = {0, 0, -1, false};
        if (index < items) {
            item = item_at(p, index, p.causal && !Shape::KEYS);
            if (item.tile * Shape::ROWS >=
                p.own_rows) { /* a last block is shorter than the others */
                continue;
            }
        }
        store_item(at.item(slot.at), item);
        if (item.tile < 0) {
            barrier_arrive(at.own_full(slot.at));
            break;
        }
        int first = item.tile * Shape::ROWS;
        barrier_expect(at.own_full(slot.at), 2 * Shape::OWN);
        for (int which = 0; which < 2; which++) {
            for (int panel = 0; panel < Shape::PANELS; panel++) {
                for (int part = 0; part < Shape::CONSUMERS; part++) {
                    box_load(at.own(slot.at, which) + panel * Shape::OWN_PANEL + part * Shape::PART,
                             &f.own[which], at.own_full(slot.at), panel * PANEL_COLUMNS,
                             first + part * HALF, item.h, item.b);
                }
            }
        }
        slot.advance();
        PartWalk<Shape::LISTS, HALF> walk = walk_of<Shape>(p, item, first);
        for (int part = walk.next(); part >= 0; part = walk.next()) {
            barrier_wait(at.empty(stage.at), stage.phase ^ 1);
            barrier_expect(at.full(stage.at), 2 * Shape::OTHER + Shape::STATS);
            for (int which = 0; which < 2; which++) {
                for (int panel = 0; panel < Shape::PANELS; panel++) {
                    box_load(at.other(stage.at, which) + panel * Shape::PART, &f.other[which],
                             at.full(stage.at), panel * PANEL_COLUMNS, part, item.h, item.b);
                }
            }
            if (Shape::KEYS) {
                box_load(at.stats(stage.at), &f.stats, at.full(stage.at), 2 * part, item.h, item.b,
                         0);
            }
            stage.advance();
        }
    }
    end_producer(gridDim.x);
}

/* Rotates rows of a gradient back by the angles of their positions: a thread has columns 2 (lane %
 * 4) and the next, of each eight, of two rows. */
template <int R, int N>
__device__ __forceinline__ void rotate_back(float (&c)[N], const Backward &f,
                                            const int (&rows)[2]) {
    const int column = 2 * (int)(threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t at = (int64_t)rows[half] * R + column;
#pragma unroll
        for (int n = 0; n < R / 8; n++) {
            const float2 cosine = *(const float2 *)(f.cosines + at + 8 * n);
            const float2 sine = *(const float2 *)(f.sines + at + 8 * n);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float cos = e == 0 ? cosine.x : cosine.y, sin = e == 0 ? sine.x : sine.y;
                float &first = c[4 * n + 2 * half + e];
                float &second = c[4 * (n + R / 8) + 2 * half + e];
                const float before = first;
                first = before * cos + second * sin;
                second = second * cos - before * sin;
            }
        }
    }
}

/* Half of the sums go to a lane that has other rows of the same columns, and its rows of the other
 * half come. */
template <int KEPT> __device__ __forceinline__ void halve(float (&sums)[16]) {
    const bool upper = threadIdx.x & 2 * KEPT;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const float low = sums[i], high = sums[i + KEPT];
        const float given = upper ? low : high;
        sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, given, 2 * KEPT);
    }
}

/* The sums of a warp's 16 rows, times `factor`, to shared memory. rows: which of the thread's two
 * count. */
template <int PANELS>
__device__ __forceinline__ void sum_rows(const float (&c)[32 * PANELS], const bool (&rows)[2],
                                         float factor, uint32_t to) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        float sums[16]; /* of columns 8 n + 2 (lane % 4) + e at 2 n + e; in the end of one n */
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int at = 32 * panel + i / 2 * 4 + i % 2;
            sums[i] = (rows[0] ? c[at] : 0.0f) + (rows[1] ? c[at + 2] : 0.0f);
        }
        halve<8>(sums);
        halve<4>(sums);
        halve<2>(sums);
        const int n = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
        const uint32_t place = to + 4 * (PANEL_COLUMNS * panel + 8 * n + 2 * (lane % 4));
        store_shared4(place, __float_as_uint(sums[0] * factor));
        store_shared4(place + 4, __float_as_uint(sums[1] * factor));
    }
}

/* ---- a consumer ------------------------------------------------------------------------------ */
template <class T, class Shape>
__device__ __forceinline__ void consume(const Backward &f, Places<Shape> at) {
    constexpr int PANELS = Shape::PANELS;
    constexpr int GRADIENTS = Shape::KEYS ? 2 : 1;
    const Problem &p = f.p;
    const int group = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0) - 1,
              lane = threadIdx.x & 31;
    const int my_row = (int)(threadIdx.x % WARPGROUP) / 32 * 16 + lane / 4;
    const bool leads = threadIdx.x % WARPGROUP == 0; /* for its warpgroup */
    const int own_rows = Shape::KEYS ? p.S : p.T;
    Ring<Shape::SLOTS> slot;
    Ring<Shape::STAGES> stage;
    for (;;) {
        barrier_wait(at.own_full(slot.at), slot.phase);
        const WorkItem item = load_item(at.item(slot.at));
        if (item.tile < 0) {
            break;
        }
        const int first = item.tile * Shape::ROWS, mine = first + HALF * group;
        float stat[2][2]; /* of the two rows: lse, delta */
        if constexpr (!Shape::KEYS) {
            const float2 *stats = p.stats + ((int64_t)item.b * p.H + item.h) * p.stats_stride;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = mine + my_row + 8 * half;
                float2 pair = row < p.T ? stats[row] : make_float2(INFINITY, 0.0f);
                stat[half][0] = pair.x;
                stat[half][1] = pair.y;
            }
        }

        uint32_t own[Shape::IN_REGISTERS ? 2 * 4 * PANELS : 1][4];
        if constexpr (Shape::IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 8 * PANELS; i++) {
                int which = i / (4 * PANELS), panel = i / 4 % PANELS, step = i % 4;
                int row = (my_row - lane / 4) + (lane & 15);
                load_matrices(own[i], at.own(slot.at, which) + panel * Shape::OWN_PANEL +
                                          group * Shape::PART +
                                          panel_offset(row, 2 * step + (lane >> 4)));
            }
        }
        float gradient[GRADIENTS][32 * PANELS];
#pragma unroll
        for (int which = 0; which < GRADIENTS; which++) {
#pragma unroll
            for (int i = 0; i < 32 * PANELS; i++) {
                gradient[which][i] = 0.0f;
            }
        }
        float s[32], dp[32];
        uint32_t w[GRADIENTS][4][4]; /* dS and P of the part before, rounded */
        Ring<Shape::STAGES> before;

        /* Of these parts my rows see something: after `none`, before `end`; on one side of `edge`
         * they see not all. */
        int none = -1, end = mine < own_rows ? p.T : 0, edge = INT_MIN;
        if constexpr (Shape::KEYS) {
            if (p.causal) {
                none = mine - p.offset - HALF;
                edge = mine - p.offset + HALF - 1;
            }
        } else {
            end = mine < own_rows ? keys_end(p, mine + HALF) : 0;
            edge = p.causal ? min(mine + p.offset - HALF + 1, p.S - HALF) : p.S - HALF;
        }
        auto sees = [&](int part) { return part > none && part < end; };

        auto first_product = [&](int which) {
            const Operand other = rows_operand(at.other(stage.at, which));
            const Operand ours = rows_operand(at.own(slot.at, which) + group * Shape::PART);
            float(&c)[32] = which == 0 ? s : dp;
            products_begin();
#pragma unroll
            for (int i = 0; i < 4 * PANELS; i++) {
                const Operand b = further(other, i / 4 * Shape::PART + i % 4 * 32);
                if constexpr (Shape::IN_REGISTERS) {
                    product<T, 0>(c, own[which * 4 * PANELS + i], b, i > 0);
                } else {
                    product<T, 0>(c, further(ours, i / 4 * Shape::OWN_PANEL + i % 4 * 32), b,
                                  i > 0);
                }
            }
            products_end();
        };
        auto second_products = [&]() {
            const Operand others = columns_operand(at.other(before.at, 0), Shape::PART);
            products_begin();
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    product<T, 1>(gradient[which], w[which][step],
                                  further(others, which * Shape::OTHER + step * 16 * PANEL_ROW),
                                  true);
                }
            }
            products_end();
        };
        auto second_products_done = [&]() {
            products_wait<0>();
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
                hold(gradient[which]);
                hold(w[which]);
            }
            if (leads) {
                barrier_arrive(at.empty(before.at));
            }
        };
        /* Of two columns a thread, of eight in all: lse, delta, lse, delta. */
        auto load_columns = [&](uint32_t(&columns)[4], int n) {
            load_shared16(columns, at.stats(stage.at) + (8 * n + 2 * (lane % 4)) * 8);
        };
        auto lse_of = [&](const uint32_t(&columns)[4], int i) {
            if constexpr (Shape::KEYS) {
                return __uint_as_float(columns[i % 2 * 2]);
            } else {
                return stat[i / 2 % 2][0];
            }
        };
        auto delta_of = [&](const uint32_t(&columns)[4], int i) {
            if constexpr (Shape::KEYS) {
                return __uint_as_float(columns[i % 2 * 2 + 1]);
            } else {
                return stat[i / 2 % 2][1];
            }
        };
        /* key - query above the offset is not seen, nor a key beyond the end */
        auto hide = [&](int part) {
            const int first = part + 2 * (lane % 4);
            const int distance = !Shape::KEYS && !p.causal
                                     ? p.S
                                     : mine + my_row - first + (Shape::KEYS ? -p.offset : p.offset);
            const int last = p.S - 1 - first; /* column, of keys */
#pragma unroll
            for (int i = 0; i < 32; i++) {
                int row = i / 2 % 2 * 8, column = i / 4 * 8 + i % 2;
                bool hidden =
                    Shape::KEYS ? distance + row > column : column > min(distance + row, last);
                s[i] = hidden ? -INFINITY : s[i];
            }
        };
        auto round = [&]() {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                w[0][i / 4][i % 4] = pack_pair<T>(dp[2 * i], dp[2 * i + 1]);
                if constexpr (Shape::KEYS) {
                    w[GRADIENTS - 1][i / 4][i % 4] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
                }
            }
            before = stage;
            stage.advance();
        };
        /* A part's S and dP become w. `following`: the second products of the part before are
         * issued on the way, to be done at its end. */
        auto work = [&](int part, auto following) {
            constexpr int PENDING = decltype(following)::value;
            first_product(0);
            if constexpr (Shape::OVERLAP) {
                first_product(1);
            }
            if constexpr (PENDING) {
                second_products();
            }
            products_wait<PENDING + (Shape::OVERLAP && !Shape::TOGETHER)>();
            hold(s);
            if (Shape::KEYS ? part < edge : part > edge) {
                hide(part);
            }
            uint32_t columns[4];
            if constexpr (Shape::TOGETHER) {
                hold(dp);
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    if (i % 4 == 0) {
                        load_columns(columns, i / 4);
                    }
                    s[i] = fast_exp2(fmaf(s[i], p.scale_log2, -lse_of(columns, i)));
                    dp[i] = s[i] * (dp[i] - delta_of(columns, i));
                }
            } else {
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    if (Shape::KEYS && i % 4 == 0) {
                        load_columns(columns, i / 4);
                    }
                    s[i] = fast_exp2(fmaf(s[i], p.scale_log2, -lse_of(columns, i)));
                }
                hold(s);
                stay_above(p.D);
                if constexpr (Shape::OVERLAP) {
                    products_wait<PENDING>();
                } else {
                    if constexpr (PENDING) {
                        second_products_done();
                    }
                    first_product(1);
                    products_wait<0>();
                }
                hold(dp);
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    if (Shape::KEYS && i % 4 == 0) {
                        load_columns(columns, i / 4);
                    }
                    dp[i] = s[i] * (dp[i] - delta_of(columns, i));
                }
            }
            if constexpr (PENDING && Shape::OVERLAP) {
                hold(s);
                hold(dp);
                stay_above(p.D);
                second_products_done();
            }
            round();
        };
        /* A part that none of my rows meets. */
        auto pass = [&]() {
            if (leads) {
                barrier_wait(at.full(stage.at), stage.phase);
                barrier_arrive(at.empty(stage.at));
            }
            stage.advance();
        };

        PartWalk<Shape::LISTS, HALF> walk = walk_of<Shape>(p, item, first);
        int part = walk.next();
        for (; part >= 0 && !sees(part); part = walk.next()) {
            pass();
        }
        if (part >= 0) {
            barrier_wait(at.full(stage.at), stage.phase);
            work(part, std::integral_constant<int, 0>());
            for (part = walk.next(); part >= 0 && sees(part); part = walk.next()) {
                barrier_wait(at.full(stage.at), stage.phase);
                work(part, std::integral_constant<int, 1>());
            }
            second_products();
            second_products_done();
        }
        for (; part >= 0; part = walk.next()) {
            pass();
        }

        /* Beyond the end any angle does: nothing is stored there. */
        const int positions[2] = {min(mine + my_row, own_rows - 1),
                                  min(mine + my_row + 8, own_rows - 1)};
        if (f.half == 8) {
            rotate_back<8>(gradient[0], f, positions);
        } else if (f.half == 16) {
            rotate_back<16>(gradient[0], f, positions);
        }
        named_barrier_sync(1 + group, WARPGROUP); /* these rows have been read */
#pragma unroll
        for (int which = 0; which < GRADIENTS; which++) {
            float factor = which == 0 ? p.scale : 1.0f;
            float factors[2] = {factor, factor};
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                stage_rows<T>(at.own(slot.at, which) + panel * Shape::OWN_PANEL +
                                  group * Shape::PART,
                              gradient[which], 32 * panel, factors);
            }
        }
        if (f.sums) {
            const bool count[2] = {mine + my_row < own_rows, mine + my_row + 8 < own_rows};
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
                sum_rows<PANELS>(gradient[which], count, which == 0 ? p.scale : 1.0f,
                                 at.sums(group, which) +
                                     (threadIdx.x % WARPGROUP) / 32 * Shape::SUMS);
            }
        }
        proxy_fence();
        named_barrier_sync(1 + group, WARPGROUP);
        if (f.sums &&
            mine < own_rows) { /* of the warps, in shared memory until the next such wait */
            const int64_t part = (int64_t)item.b * ((own_rows + HALF - 1) / HALF) + mine / HALF;
            float *to = f.sums + (part * p.H + item.h) * 3 * p.D + (Shape::KEYS ? p.D : 0);
            const int width = PANELS * PANEL_COLUMNS;
            for (int i = threadIdx.x % WARPGROUP; i < GRADIENTS * width; i += WARPGROUP) {
                const int which = i / width, column = i % width;
                const uint32_t from = at.sums(group, which) + 4 * column;
                float sum = 0.0f;
#pragma unroll
                for (int warp = 0; warp < 4; warp++) {
                    sum += __uint_as_float(load_shared4(from + warp * Shape::SUMS));
                }
                if (column < p.D) {
                    to[which * p.D + column] = sum;
                }
            }
        }
        if (leads) {
            if (mine < own_rows) {
                for (int which = 0; which < GRADIENTS; which++) {
                    for (int panel = 0; panel < PANELS; panel++) {
                        box_store(&f.gradient[which],
                                  at.own(slot.at, which) + panel * Shape::OWN_PANEL +
                                      group * Shape::PART,
                                  panel * PANEL_COLUMNS, mine, item.h, item.b);
                    }
                }
                box_stores_read();
            }
        }
        /* by every thread: each has read which item it was */
        barrier_arrive(at.own_empty(slot.at));
        slot.advance();
    }
}

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::CTAS)
    attention_bwd_hopper_kernel(const __grid_constant__ Backward f) {
    await_previous();
#ifdef HOPPER_CODE
    Places<Shape> at{dynamic_shared()};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Shape::SLOTS; slot++) {
            barrier_init(at.own_full(slot), 1);
            barrier_init(at.own_empty(slot), Shape::CONSUMERS * WARPGROUP);
        }
        for (int stage = 0; stage < Shape::STAGES; stage++) {
            barrier_init(at.full(stage), 1);
            barrier_init(at.empty(stage), Shape::CONSUMERS);
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

/* ---- host ------------------------------------------------------------------------------------ */
template <class Shape>
nd_status launch(const char *op, int device, Backward f, const Operands &a,
                 const BlockLists &lists) {
    constexpr bool KEYS = Shape::KEYS;
    problem_tiles(&f.p, KEYS, Shape::ROWS, lists);
    const nd_array *own[] = {KEYS ? a.k : a.q, KEYS ? a.v : a.dout};
    const nd_array *other[] = {KEYS ? a.q : a.k, KEYS ? a.dout : a.v};
    const nd_array *gradient[] = {KEYS ? a.dk : a.dq, KEYS ? a.dv : a.dq};
    for (int which = 0; which < 2; which++) {
        ND_TRY(box_map(op, own[which], HALF, &f.own[which]));
        ND_TRY(box_map(op, other[which], HALF, &f.other[which]));
        ND_TRY(box_map(op, gradient[which], HALF, &f.gradient[which]));
    }
    if (a.cos != NULL) {
        f.cosines = data_of<float>(a.cos);
        f.sines = data_of<float>(a.sin);
        f.half = (int)a.cos->shape[1];
    }
    f.sums = a.sums;
    const Problem &p = f.p;
    const int64_t row = 8 * p.stats_stride; /* bytes */
    ND_TRY(tensor_map(op, p.stats, 4, {2 * p.T, p.H, p.B, 1}, {row, row * p.H, 16}, 2 * HALF, 1,
                      &f.stats));
    if (a.q->dtype == ND_BF16) {
        return hopper_launch<Shape>(op, device, attention_bwd_hopper_kernel<bf16, Shape>, f);
    }
    return hopper_launch<Shape>(op, device, attention_bwd_hopper_kernel<f16, Shape>, f);
}

template <bool KEYS, class Run>
nd_status with_shape(bool wide, const BlockLists &lists, Run &&run) {
    if (lists.offsets == NULL) {
        constexpr int CONSUMERS = KEYS ? 2 : 3; /* that many have registers enough */
        return wide ? run(BackwardShape<KEYS, 2, 2, 1, 4, false>())
                    : run(BackwardShape<KEYS, 1, CONSUMERS, 2, 4, false>());
    }
    if (lists.block % (2 * HALF) == 0) {
        return wide ? run(BackwardShape<KEYS, 2, 2, 1, 4, true>())
                    : run(BackwardShape<KEYS, 1, 2, 2, 4, true>());
    }
    return wide ? run(BackwardShape<KEYS, 2, 1, 2, 4, true>())
                : run(BackwardShape<KEYS, 1, 1, 2, 4, true>());
}

} // namespace

nd_status attention::attention_bwd_hopper(const char *op, int device, Problem p, const Operands &a,
                                          bool keys, const BlockLists &lists) {
    Backward f = {};
    f.p = p;
    auto run = [&](auto shape) { return launch<decltype(shape)>(op, device, f, a, lists); };
    bool wide = p.D > PANEL_COLUMNS;
    return keys ? with_shape<true>(wide, lists, run) : with_shape<false>(wide, lists, run);
}
