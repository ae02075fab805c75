/* attention_hopper.cuh - shared by the attention kernels for Hopper: tensor maps of their operands,
 * the order of work, the walk over tiles of the other side.
 *
 * A team is a producer, one thread that requests tiles from the copy engine, and CONSUMERS
 * warpgroups, each of which owns 64 rows (queries, or keys in the kernel for dk and dv) and
 * computes. It lives as long as the grid and takes one work item after another, the longest
 * first, whenever it is free. Which team computes an item changes none of its bits. A thread block
 * has one warpgroup for its producers.
 *
 * Tiles of the other side are 128 or 64 rows. Dense, they follow each other; with lists, they are
 * parts of the listed blocks. Rows beyond the end arrive as zeros.
 */
#ifndef NEEDLE_ATTENTION_HOPPER_CUH
#define NEEDLE_ATTENTION_HOPPER_CUH

#include <limits.h>

#include <initializer_list>

#include "attention.cuh"
#include "stages.cuh"

namespace attention {

constexpr int CONSUMER_ROWS = 64;   /* rows of a consumer */
constexpr uint32_t ITEM_BYTES = 16; /* of a WorkItem in shared memory */
constexpr int TERMS = 16;           /* of a query: see ColumnTerms */
constexpr int TERMS_ROW = 2 * TERMS;
constexpr float NO_KEY = 1.3e8f; /* for lse / scale in terms, finite: 0 times infinity is no 0 */
constexpr int DQ_SHARE =
    CONSUMER_ROWS * 64; /* floats of dq_sums for CONSUMER_ROWS queries: see dq_in_one_pass */

/* ---- host ---------------------------------------------------------------------------------------
 * Called by attention_fwd.cu and attention_bwd.cu when hopper_serves(). The problem is filled but
 * for the tiles. */
struct Operands {
    const nd_array *q, *k, *v, *o;
    const nd_array *dout, *dq, *dk, *dv;     /* backward only */
    const nd_array *cos = NULL, *sin = NULL; /* where dq and dk are rotated: see hopper_rotates */
    /* (B, ceil(T / CONSUMER_ROWS), H, 3, D), S is T: of so many rows of dq, dk and dv each */
    float *sums = NULL;
};

nd_status attention_fwd_hopper(const char *op, int device, Problem p, const Operands &a,
                               const BlockLists &lists);

/* dq, dk and dv; p.stats and p.terms are there, and where dq is made in one pass with dk and dv
 * p.dq_sums, of (B, H, ceil(T / CONSUMER_ROWS), DQ_SHARE), and p.tickets, all 0. */
nd_status attention_bwd_hopper(const char *op, int device, Problem p, const Operands &a,
                               const BlockLists &lists, const BlockLists &transposed);

static inline bool dq_in_one_pass(int head_dim, const BlockLists &lists) {
    return head_dim <= hopper::PANEL_COLUMNS && lists.offsets == NULL;
}

/* True if the backward rotates dq and dk itself: where both of a pair of dims lie in one thread, in
 * as many registers as the kernel has code for. */
static inline bool hopper_rotates(const nd_array *cos) {
    return cos != NULL && (cos->shape[1] == 8 || cos->shape[1] == 16);
}

/* 16 bits, head dims up to 128 of whole chunks of 16 bytes (the copy engine writes no less), blocks
 * of whole parts, something to do. */
static inline bool hopper_serves(int device, const Problem &p, nd_dtype dtype, int64_t block,
                                 std::initializer_list<const nd_array *> operands) {
    bool good = hopper::hopper_usable(device) && dtype != ND_F32 && p.D % 8 == 0 && p.D >= 8 &&
                p.D <= 128 && p.scale > 0 && block % CONSUMER_ROWS == 0 && p.B > 0 && p.H > 0 &&
                p.T > 0 && p.S > 0 &&
                (int64_t)p.B * p.H * (p.T / CONSUMER_ROWS + p.S / CONSUMER_ROWS + 1) <
                    (1 << 29); /* half of the items */
    for (const nd_array *operand : operands) {
        good = good && is_boxable(operand);
    }
    return good;
}

/* The map of an operand, in boxes of `rows` rows of a head and 64 columns. */
static inline nd_status box_map(const char *op, const nd_array *a, int rows, CUtensorMap *out) {
    const int64_t shape[4] = {a->shape[3], a->shape[1], a->shape[2], a->shape[0]};
    const int64_t strides[3] = {2 * a->strides[1], 2 * a->strides[2], 2 * a->strides[0]};
    return hopper::tensor_map(op, a->data, a->dtype, shape, strides, hopper::PANEL_COLUMNS, rows,
                              out);
}

/* As many thread blocks as run at once, each of which takes one item after the other. Launches of
 * one file must follow each other on the device, as those of needle's one stream do: see
 * next_item. */
template <class Shape, class Arguments>
static inline nd_status hopper_launch(const char *op, int device, void (*kernel)(Arguments),
                                      const Arguments &arguments) {
    const Problem &p = arguments.p;
    int64_t items = (int64_t)p.tiles * p.B * p.H;
    int64_t most = (int64_t)cuda_device_limits(device)->processors * Shape::CTAS;
    return cuda_launch(op, device, kernel, (unsigned)(items < most ? items : most), Shape::THREADS,
                       Shape::SHARED, arguments);
}

#ifdef __CUDACC__

/* ---- device: lse and delta as columns of a product ----------------------------------------------
 * Store a query's row of TERMS values: -lse / scale in the first three of the first eight, -delta
 * in those of the second, as 2048 x[0] + x[1] + x[2] / 2048 with the precision of float32. The
 * others are 0. float16 overflows at 1.34e8, where scores or gradients have overflowed before. */
template <class T> __device__ __forceinline__ void store_terms(T *row, float lse, float delta) {
    const float values[2] = {-lse, -delta};
    alignas(16) T x[TERMS];
#pragma unroll
    for (int i = 0; i < TERMS; i++) {
        x[i] = from_float<T>(0.0f);
    }
#pragma unroll
    for (int which = 0; which < 2; which++) {
        T *of = x + 8 * which;
        of[0] = from_float<T>(values[which] / 2048);
        const float rest = values[which] - 2048 * to_float(of[0]);
        of[1] = from_float<T>(rest);
        of[2] = from_float<T>(2048 * (rest - to_float(of[1])));
        ((uint4 *)row)[which] = *(const uint4 *)of;
    }
}

#endif
#ifdef HOPPER_CODE

/* The other factor: 64 rows of the weights 2048, 1, 1 / 2048, in the first eight columns for
 * scores, in the second for dP. */
template <class T> struct ColumnTerms {
    uint32_t weights;

    __device__ __forceinline__ ColumnTerms() {
        const int place = threadIdx.x % 4;
        weights = place == 0   ? pack_pair<T>(2048.0f, 1.0f)
                  : place == 1 ? pack_pair<T>(1.0f / 2048, 0.0f)
                               : 0;
    }

    /* c = the terms of 64 columns, whose rows are at `rows`. */
    __device__ __forceinline__ void product(float (&c)[32], bool of_dp, uint32_t rows) const {
        const uint32_t score = of_dp ? 0 : weights, dp = of_dp ? weights : 0;
        const uint32_t a[4] = {score, score, dp, dp};
        hopper::product_thin<T>(c, a, hopper::rows_operand(rows));
    }
};

/* ---- device: the order of work ------------------------------------------------------------------
 * Heads that share the L2 go together, in them the longest items first. The producer finds an item
 * by its index and writes it to shared memory; tile is -1 after the last one. */
struct WorkItem {
    int b, h, tile;
    bool meets; /* the item has a part of the other side; false with block lists only */
};

__device__ __forceinline__ WorkItem item_at(const Problem &p, int index, bool descending) {
    int section_size = p.heads_together * p.tiles;
    int section = index / section_size;
    int rest = index - section * section_size;
    int first = section * p.heads_together;
    int together = min(p.heads_together, p.B * p.H - first);
    int head = first + rest % together, h = head % p.H;
    return WorkItem{head / p.H, h, tile_at(p, h, rest / together, descending), true};
}

__device__ __forceinline__ void store_item(uint32_t to, const WorkItem &item) {
    const uint32_t words[4] = {(uint32_t)item.b, (uint32_t)item.h, (uint32_t)item.tile, item.meets};
    store_shared16(to, words);
}
__device__ __forceinline__ WorkItem load_item(uint32_t from) {
    uint32_t words[4];
    load_shared16(words, from);
    return WorkItem{(int)words[0], (int)words[1], (int)words[2], words[3] != 0};
}

/* The index of the next item for one of `producers` producers in the grid: its first is its own
 * number, further ones are counted off. The last producer to leave sets both counters back for the
 * next launch. */
static __device__ unsigned int items_taken, producers_gone;

__device__ __forceinline__ int next_item(unsigned int producers) {
    return (int)(producers + atomicInc(&items_taken, UINT_MAX));
}

__device__ __forceinline__ void end_producer(unsigned int producers) {
    if (atomicInc(&producers_gone, producers - 1) == producers - 1) { /* it is 0 again */
        items_taken = 0;
    }
}

/* One past the last key that any of the queries before `end` sees. */
__device__ __forceinline__ int keys_end(const Problem &p, int end) {
    return p.causal ? max(min(p.S, min(end, p.T) + p.offset), 0) : p.S;
}

/* Iterate over the key (or query) tiles of ROWS rows that the tile at `own` attends to: ascending,
 * within [from, to), all of them or those of the listed blocks. */
template <bool LISTS, int ROWS> struct PartWalk {
    const int *entries;
    int entry, last, at, block, blocks, from, to;

    __device__ __forceinline__ PartWalk(const Problem &p, int head, int own, int from, int to)
        : entries(p.lists.entries), entry(0), last(0), at(LISTS ? 0 : from / ROWS * ROWS),
          block(p.other_block), blocks(p.lists.blocks), from(from), to(to) {
        if constexpr (LISTS) {
            const int *offsets = p.lists.offsets + head * p.lists.head_stride + own / p.own_block;
            ND_CHECK_INDEX("offsets", offsets - p.lists.offsets, offsets[0], p.lists.size + 1);
            ND_CHECK_INDEX("offsets", offsets + 1 - p.lists.offsets, offsets[1], p.lists.size + 1);
            entry = max(offsets[0], 0);
            last = min(offsets[1], p.lists.size);
        }
    }

    /* The first row of the next part; -1 at the end. */
    __device__ __forceinline__ int next() {
        if constexpr (LISTS) {
            while (entry < last) {
                int index = entries[entry], start = index * block + at;
                ND_CHECK_INDEX("block list", entry, index, blocks);
                bool inside = (unsigned)index < (unsigned)blocks && start < to;
                at += ROWS;
                if (!inside || at >= block) {
                    at = 0;
                    entry++;
                }
                if (inside && start + ROWS > from) {
                    return start;
                }
            }
            return -1;
        } else {
            int start = at;
            at += ROWS;
            return start < to ? start : -1;
        }
    }
};

/* A warpgroup's words of 64 columns, as A of a product has them, into the 64 rows of a panel. */
__device__ __forceinline__ void stage_words(uint32_t panel, const uint32_t (&words)[4][4]) {
    const int lane = threadIdx.x & 31,
              row = (int)(threadIdx.x % hopper::WARPGROUP) / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        hopper::store_matrices(panel + hopper::panel_offset(row, 2 * step + lane / 16),
                               words[step]);
    }
}

/* The same of a panel's 32 of a consumer's accumulators, times factor[half], rounded. */
template <class T, int N>
__device__ __forceinline__ void stage_rows(uint32_t panel, const float (&c)[N], int from,
                                           const float (&factor)[2]) {
    uint32_t words[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        words[i / 4][i % 4] =
            pack_pair<T>(c[from + 2 * i] * factor[i % 2], c[from + 2 * i + 1] * factor[i % 2]);
    }
    stage_words(panel, words);
}

#endif
} // namespace attention

#endif
