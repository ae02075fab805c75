/* attention_bwd_hopper.cuh - what the roles of attention's backward on Hopper share: the shape of a
 * thread block, its shared memory and barriers, the walk over the other side, the ends of rows.
 */
#ifndef NEEDLE_ATTENTION_BWD_HOPPER_CUH
#define NEEDLE_ATTENTION_BWD_HOPPER_CUH

#include "attention_hopper.cuh"

namespace attention {

using namespace hopper;

template <bool OWN_KEYS_, int PANELS_, int CONSUMERS_, int SLOTS_, int STAGES_, bool LISTS_,
          bool ONE_PASS_ = false>
struct BackwardShape {
    static constexpr bool OWN_KEYS = OWN_KEYS_; /* are the own rows keys: dk dv */
    static constexpr int PANELS = PANELS_, CONSUMERS = CONSUMERS_, SLOTS = SLOTS_, STAGES = STAGES_;
    static constexpr bool LISTS = LISTS_;
    static constexpr bool ONE_PASS = ONE_PASS_; /* dq too: see attention_dq_hopper.cuh */
    static_assert(!ONE_PASS || (OWN_KEYS && PANELS == 1 && CONSUMERS == 2 && !LISTS),
                  "written for it");
    static constexpr int GRADIENTS = OWN_KEYS ? 2 : 1;
    /* Are there registers for what the second products read and both first ones write at once? */
    static constexpr bool OVERLAP = !OWN_KEYS || (PANELS == 1 && CONSUMERS > 1);
    static constexpr bool IN_REGISTERS = !(OWN_KEYS && PANELS == 2) && !ONE_PASS; /* X and Y */
    static constexpr int ROWS = CONSUMER_ROWS * CONSUMERS;
    static constexpr int THREADS = WARPGROUP * (1 + ONE_PASS + CONSUMERS);
    static constexpr int CTAS = CONSUMERS == 1 && PANELS == 1 ? 2 : 1;
    /* Registers of a thread: of the producers, of dq's warpgroup, of consumers. */
    static constexpr int KEEP = CTAS == 2 ? 40 : 24;
    static constexpr int KEEP_DQ = 72;
    static constexpr int TAKE = CTAS == 2 ? 216 : ONE_PASS ? 208 : 240;
    static constexpr uint32_t PART = CONSUMER_ROWS * PANEL_ROW; /* bytes of 64 rows of a panel */
    static constexpr uint32_t OWN_PANEL = CONSUMERS * PART, OWN = PANELS * OWN_PANEL;
    static constexpr uint32_t OTHER = PANELS * PART;
    static constexpr uint32_t TERMS_BYTES = OWN_KEYS ? CONSUMER_ROWS * TERMS_ROW : 0;
    static constexpr int WEIGHTS = ONE_PASS ? 2 : 0, SHARES = ONE_PASS ? 2 : 0;
    static constexpr uint32_t SHARE = 2 * PART;                  /* 64 x 64 floats */
    static constexpr uint32_t SUMS = PANELS * PANEL_COLUMNS * 4; /* of a warp */
    static constexpr uint32_t OTHER_AT = SLOTS * 2 * OWN;
    static constexpr uint32_t WEIGHTS_AT = OTHER_AT + STAGES * 2 * OTHER;
    static constexpr uint32_t SHARES_AT = WEIGHTS_AT + WEIGHTS * OWN_PANEL;
    static constexpr uint32_t STAGED_AT = SHARES_AT + SHARES * SHARE;
    static constexpr uint32_t TERMS_AT = STAGED_AT + (ONE_PASS ? OWN : 0);
    static constexpr uint32_t SUMS_AT = TERMS_AT + STAGES * TERMS_BYTES;
    static constexpr uint32_t BARRIERS_AT = SUMS_AT + (CONSUMERS * GRADIENTS + ONE_PASS) * 4 * SUMS;
    static constexpr int BARRIERS = 2 * SLOTS + 2 * STAGES + 2 * WEIGHTS + 2 * SHARES;
    static constexpr uint32_t ITEMS_AT = BARRIERS_AT + (8 * BARRIERS + 15) / 16 * 16;
    static constexpr uint32_t ORDERS_AT = ITEMS_AT + ITEM_BYTES * SLOTS;
    static constexpr uint32_t PARTS_AT = ORDERS_AT + 16 * SHARES;
    static constexpr size_t SHARED = PARTS_AT + LISTS * 4 * STAGES;
};

struct Backward {
    CUtensorMap own[2], other[2], gradient[2]; /* of X, Y; x, y; dX, dY */
    CUtensorMap dq;                            /* in one pass */
    CUtensorMap terms;                         /* of 64 queries a box */
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
    __device__ __forceinline__ uint32_t terms(int stage) const {
        return base + Shape::TERMS_AT + stage * Shape::TERMS_BYTES;
    }
    /* Where dX and dY are placed for the copy engine: over X and Y, which are no longer needed. But
     * in one pass k is: shares of dq are still computed from it when dk is done. */
    __device__ __forceinline__ uint32_t staged(int slot, int which) const {
        return Shape::ONE_PASS && which == 0 ? base + Shape::STAGED_AT : own(slot, which);
    }
    /* dS^T of 128 keys and 64 queries. */
    __device__ __forceinline__ uint32_t weights(int i) const {
        return base + Shape::WEIGHTS_AT + i * Shape::OWN_PANEL;
    }
    /* A share of dq of 64 queries; what to do with it (ShareUse, place, tile). */
    __device__ __forceinline__ uint32_t share(int i) const {
        return base + Shape::SHARES_AT + i * Shape::SHARE;
    }
    __device__ __forceinline__ uint32_t order(int i) const {
        return base + Shape::ORDERS_AT + 16 * i;
    }
    /* Of four warps: of a consumer's dX or dY; after them of dq. */
    __device__ __forceinline__ uint32_t sums(int group, int which) const {
        return base + Shape::SUMS_AT + (group * Shape::GRADIENTS + which) * 4 * Shape::SUMS;
    }
    /* The item whose rows are in a slot. */
    __device__ __forceinline__ uint32_t item(int slot) const {
        return base + Shape::ITEMS_AT + ITEM_BYTES * slot;
    }
    /* With lists: the first row of the part in a stage, + 1 with the last of an item. */
    __device__ __forceinline__ uint32_t part(int stage) const {
        return base + Shape::PARTS_AT + 4 * stage;
    }
    __device__ __forceinline__ uint32_t barrier(int number) const {
        return base + Shape::BARRIERS_AT + 8 * number;
    }
    __device__ __forceinline__ uint32_t own_full(int slot) const { return barrier(slot); }
    __device__ __forceinline__ uint32_t own_empty(int slot) const {
        return barrier(Shape::SLOTS + slot);
    }
    __device__ __forceinline__ uint32_t full(int stage) const {
        return barrier(2 * Shape::SLOTS + stage);
    }
    __device__ __forceinline__ uint32_t empty(int stage) const {
        return full(Shape::STAGES + stage);
    }
    __device__ __forceinline__ uint32_t weights_full(int i) const {
        return full(2 * Shape::STAGES + i);
    }
    __device__ __forceinline__ uint32_t weights_empty(int i) const {
        return weights_full(Shape::WEIGHTS + i);
    }
    __device__ __forceinline__ uint32_t share_full(int i) const {
        return weights_full(2 * Shape::WEIGHTS + i);
    }
    __device__ __forceinline__ uint32_t share_empty(int i) const {
        return share_full(Shape::SHARES + i);
    }
};

/* Dense parts, the last first. */
struct PartsDown {
    int at, from;

    __device__ __forceinline__ int next() {
        const int part = at;
        at -= CONSUMER_ROWS;
        return part >= from ? part : -1;
    }
};

/* The parts that the block's own rows from `first` on meet. In one pass the first keys meet all
 * queries, so that each query has a key tile that writes its dq. */
template <class Shape>
__device__ __forceinline__ auto walk_of(const Problem &p, const WorkItem &item, int first) {
    if constexpr (Shape::ONE_PASS) {
        const int from = p.causal && item.tile > 0 ? max(first - p.offset, 0) : 0;
        return PartsDown{(p.T - 1) / CONSUMER_ROWS * CONSUMER_ROWS,
                         from / CONSUMER_ROWS * CONSUMER_ROWS};
    } else if constexpr (Shape::OWN_KEYS) {
        return PartWalk<Shape::LISTS, CONSUMER_ROWS>(p, item.h, first,
                                                     p.causal ? max(first - p.offset, 0) : 0, p.T);
    } else {
        return PartWalk<Shape::LISTS, CONSUMER_ROWS>(p, item.h, first, 0,
                                                     keys_end(p, first + Shape::ROWS));
    }
}

/* A box of a gradient, which no other item stores: the one sum of each element is of launches. */
__device__ __forceinline__ void gradient_store(const Problem &p, const CUtensorMap *map,
                                               uint32_t from, int column, int row, int h, int b) {
    if (p.joins) {
        box_add(map, from, column, row, h, b);
    } else {
        box_store(map, from, column, row, h, b);
    }
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

/* The larger of `most` and the magnitudes of a thread's part of a gradient, times `factor`, as bits. */
template <int N>
__device__ __forceinline__ uint32_t larger(uint32_t most, const float (&c)[N],
                                           const bool (&rows)[2], float factor) {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        found = max(found, rows[i / 2 % 2] ? __float_as_uint(c[i]) & 0x7fffffffu : 0u);
    }
    return max(most, __float_as_uint(__uint_as_float(found) * factor) & 0x7fffffffu);
}

/* Joins what each thread of a warp found, rounded, to `largest`. Once a warp: each tile's took as long
 * as a pass over the gradients. */
template <class T> __device__ __forceinline__ void join_largest(uint32_t most, unsigned *largest) {
    if (largest) {
        most = __reduce_max_sync(~0u, most);
        if (threadIdx.x % 32 == 0) {
            const float stored = to_float(from_float<T>(__uint_as_float(most)));
            atomicMax(largest, __float_as_uint(stored));
        }
    }
}

/* Adds what sum_rows left of four warps, for `columns` columns. */
template <class Shape>
__device__ __forceinline__ void add_warps(uint32_t from, float *to, int columns) {
    for (int column = threadIdx.x % WARPGROUP; column < columns; column += WARPGROUP) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < 4; warp++) {
            sum += __uint_as_float(load_shared4(from + 4 * column + warp * Shape::SUMS));
        }
        to[column] = sum;
    }
}

#endif
} // namespace attention

#endif
