/* attention.cuh - shared by the forward and backward attention kernels: the problem, the walk over
 * tiles, tiles in shared memory, products of tiles.
 *
 * One core serves dense and block-sparse attention. The rows of queries and of keys are cut into
 * blocks (dense: one block with all rows) and each block into tiles, the last of a block being
 * shorter; a thread block owns one tile and walks the tiles of the blocks that its list names
 * (dense: of the only block). Own rows are the tile's queries, other rows its keys; in the kernel
 * for dk and dv, own rows are keys and other rows queries. A tile never crosses a block's edge,
 * rows past its end are zeros in shared memory, so blocks of any size work and blocks that are not
 * listed are never read. Causal tiles beyond the diagonal are left out; single elements are masked
 * only in tiles that the diagonal or a ragged edge cuts.
 *
 * Two kinds of tiles:
 *   16-bit: rows of DP = 32, 64, 96, 128, 192 or 256 columns (head dim D, then zeros), 16-byte
 *           chunks permuted so that eight neighbouring rows of a chunk column lie in different
 *           banks; products by mma.sync with float32 accumulators.
 *   float32: see attention_float.cuh.
 */
#ifndef NEEDLE_ATTENTION_CUH
#define NEEDLE_ATTENTION_CUH

#include "common.cuh"
#include "mma.cuh"

namespace attention {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr int MAX_HEAD_DIM = 256;

/* Heads whose other rows fit in this part of the L2 cache, a section, are worked on together. The
 * tests on the CPU take a smaller one, so that their small problems have several. */
#ifndef NEEDLE_SECTION_BYTES
#define NEEDLE_SECTION_BYTES ((int64_t)16 << 20)
#endif

/* ---- the problem ----------------------------------------------------------------------------- */
/* A (B, T, H, D) operand: strides in elements, unit stride in D. */
struct Rows {
    void *data;
    int64_t b, t, h;
    bool vector; /* every row starts at a multiple of 16 bytes and is a whole number of them */

    template <class T> __device__ __forceinline__ T *head(int batch, int head) const {
        return (T *)data + batch * b + head * h;
    }
};

/* A float of each row of (B, H, T), any strides. */
struct RowFloats {
    float *data;
    int64_t b, h, t;

    __device__ __forceinline__ float *row(int batch, int head, int row) const {
        return data + batch * b + head * h + row * t;
    }
};

/* Which blocks a block meets; offsets is NULL when there is one block, and it meets it. */
struct Lists {
    const int *offsets, *entries, *order;
    int64_t head_stride;  /* of offsets: 0 when all heads share one mask */
    int64_t order_stride; /* the same of order */
    int size;             /* of entries */
    int blocks;           /* entries lie in [0, blocks); others are ignored */
};

/* Work for a kernel in which each thread block owns a tile of "own" rows (queries, or keys in the
 * kernel for dk and dv) and walks tiles of "other" rows. */
struct Problem {
    int B, H, T, S, D;
    int causal;
    int offset;              /* S - T: query i sees keys j <= i + offset */
    int own_block, own_rows; /* rows of a block, rows in all */
    int other_block, other_rows;
    int tiles_per_block, tiles; /* own tiles: of a block, of a head */
    int heads_together;         /* see find_work */
    Lists lists;
    float scale;
    float scale_log2; /* of scores, times log2 e; positive in the forward */
    uint32_t flip;    /* 0x80008000 where q must change sign in the forward, else 0 */
    Rows q, k, v, o, dout, dq, dk, dv;
    RowFloats lse;
    int joins;     /* o and lse, or dq, dk and dv, hold parts: see attention_part_fwd */
    float2 *stats; /* (B, H, T): what the backward needs of a row, see there */
    /* Of the backward on Hopper, or NULL: see attention_hopper.cuh. */
    void *terms;       /* (B, H, T, TERMS) */
    unsigned *tickets; /* (B, H, parts of 64 queries) */
    float *dq_sums;    /* (B, H, parts, DQ_SHARE) */
    unsigned *largest; /* the bits of the largest magnitude in dq, dk and dv */
};

/* ---- host: filling it ------------------------------------------------------------------------ */
static inline Rows rows_of(const nd_array *a) {
    int64_t per_chunk = 16 / (int64_t)nd_dtype_size(a->dtype);
    bool vector = is_aligned16(a->data) && a->shape[3] % per_chunk == 0;
    for (int axis = 0; axis < 3; axis++) {
        vector = vector && (a->shape[axis] <= 1 || a->strides[axis] % per_chunk == 0);
    }
    return Rows{a->data, a->strides[0], a->strides[1], a->strides[2], vector};
}

/* Axes (B, H, T), or (B, T, H) of the ops that join parts. */
static inline RowFloats row_floats(const nd_array *a, bool time_first) {
    return RowFloats{(float *)a->data, a->strides[0], a->strides[time_first ? 2 : 1],
                     a->strides[time_first ? 1 : 2]};
}

static inline nd_status problem_new(const char *op, const nd_array *q, const nd_array *k,
                                    const nd_array *v, double scale, int64_t causal, Problem *p) {
    const int64_t most = (int64_t)1 << 30;
    if (q->shape[3] > MAX_HEAD_DIM) {
        return nd_error(ND_EVALUE, "%s: q: head dim is %lld, but at most %d is supported", op,
                        (long long)q->shape[3], MAX_HEAD_DIM);
    }
    if (q->shape[1] > most || k->shape[1] > most || q->shape[0] * q->shape[2] > most) {
        return nd_error(ND_EVALUE, "%s: q: T, S and B * H must each be at most 2^30", op);
    }
    *p = Problem();
    p->B = (int)q->shape[0];
    p->T = (int)q->shape[1];
    p->H = (int)q->shape[2];
    p->D = (int)q->shape[3];
    p->S = (int)k->shape[1];
    p->causal = causal != 0;
    p->offset = p->S - p->T;
    p->scale = (float)scale;
    p->scale_log2 = (float)scale * LOG2E;
    p->q = rows_of(q);
    p->k = rows_of(k);
    p->v = rows_of(v);
    return ND_OK;
}

/* The operands that list the blocks which blocks of `block` own rows meet; arrays are NULL when
 * dense. */
struct BlockLists {
    const nd_array *offsets, *entries, *order;
    int64_t block;
};
constexpr BlockLists DENSE = {NULL, NULL, NULL, 0};

/* The tile geometry: `tile` own rows a thread block. */
static inline void problem_tiles(Problem *p, bool own_keys, int tile, const BlockLists &lists) {
    int longest = p->T > p->S ? p->T : p->S;
    p->own_rows = own_keys ? p->S : p->T;
    p->other_rows = own_keys ? p->T : p->S;
    if (lists.offsets != NULL) {
        bool shared = lists.offsets->shape[0] == 1;
        p->own_block = p->other_block = (int)(lists.block < longest ? lists.block : longest);
        p->lists.offsets = data_of<int>(lists.offsets);
        p->lists.entries = data_of<int>(lists.entries);
        p->lists.order = data_of<int>(lists.order);
        p->lists.head_stride = shared ? 0 : lists.offsets->shape[1];
        p->lists.order_stride = shared ? 0 : lists.order->shape[1];
        p->lists.size = (int)lists.entries->shape[0];
        p->lists.blocks = p->other_block > 0 ? ceil_div(p->other_rows, p->other_block) : 0;
    } else {
        p->own_block = p->own_rows;
        p->other_block = p->other_rows;
        p->lists = Lists{NULL, NULL, NULL, 0, 0, 1, 1};
    }
    p->tiles_per_block = ceil_div(p->own_block, tile);
    int blocks = p->own_block > 0 ? ceil_div(p->own_rows, p->own_block) : 0;
    p->tiles = p->tiles_per_block * blocks;

    int64_t head_bytes = (int64_t)p->other_rows * p->D * 4 + 1;
    int64_t heads = NEEDLE_SECTION_BYTES / head_bytes, all = (int64_t)p->B * p->H;
    heads = heads < all ? heads : all;
    p->heads_together = heads > 0 ? (int)heads : 1;
}

/* `suffix`: after the names of the operands, "_t" of the transposed lists. */
static inline nd_status check_blocks(const char *op, const char *suffix, const BlockLists &lists,
                                     int64_t heads, int64_t rows) {
    const nd_array *offsets = lists.offsets, *entries = lists.entries, *order = lists.order;
    const int64_t block = lists.block;
    if (block < 1) {
        return nd_error(ND_EVALUE, "%s: block is %lld, but must be at least 1", op,
                        (long long)block);
    }
    int64_t blocks = rows / block + (rows % block != 0);
    if (offsets->shape[0] != 1 && offsets->shape[0] != heads) {
        return nd_error(ND_EVALUE, "%s: offsets%s: axis G is %lld, but must be 1 or the %lld heads",
                        op, suffix, (long long)offsets->shape[0], (long long)heads);
    }
    if (offsets->shape[1] != blocks + 1) {
        return nd_error(ND_EVALUE,
                        "%s: offsets%s: %lld offsets a mask, but %lld rows in blocks of %lld need "
                        "%lld",
                        op, suffix, (long long)offsets->shape[1], (long long)rows, (long long)block,
                        (long long)(blocks + 1));
    }
    if (order->shape[1] != blocks) {
        return nd_error(ND_EVALUE, "%s: order%s: names %lld blocks a mask, but there are %lld", op,
                        suffix, (long long)order->shape[1], (long long)blocks);
    }
    if (entries->shape[0] > INT32_MAX) {
        return nd_error(ND_EVALUE, "%s: offsets%s: %lld listed blocks, but at most 2^31 - 1 can be",
                        op, suffix, (long long)entries->shape[0]);
    }
    return ND_OK;
}

/* One thread block for each tile of each head. */
static inline nd_status problem_launch(const char *op, int device, void (*kernel)(Problem),
                                       const Problem &p, int threads, size_t shared) {
    int64_t blocks = (int64_t)p.tiles * p.B * p.H;
    if (blocks == 0) {
        return ND_OK;
    }
    if (blocks > INT32_MAX) {
        return nd_error(ND_EVALUE, "%s: q: %lld tiles, but one launch takes at most 2^31 - 1", op,
                        (long long)blocks);
    }
    return cuda_launch(op, device, kernel, (unsigned)blocks, threads, shared, p);
}

/* Calls f(Columns<DP>()) with the tile width for a head dim. */
template <int DP> struct Columns { static constexpr int value = DP; };

template <class F> static inline nd_status with_columns16(int D, F &&f) {
    return D <= 32    ? f(Columns<32>())
           : D <= 64  ? f(Columns<64>())
           : D <= 96  ? f(Columns<96>())
           : D <= 128 ? f(Columns<128>())
           : D <= 192 ? f(Columns<192>())
                      : f(Columns<256>());
}

template <class F> static inline nd_status with_columns32(int D, F &&f) {
    return D <= 64 ? f(Columns<64>()) : D <= 128 ? f(Columns<128>()) : f(Columns<256>());
}

#ifdef __CUDACC__

/* ---- device: whose tile, which tiles --------------------------------------------------------- */
/* Rows [begin, end) of a head; no tile when begin < 0. */
struct Span {
    int begin, end;
};

struct Work {
    int b, h;
    int block; /* of the own rows */
    Span own;
};

/* The own tile of a head that has a place in the order of work: the longest come first, by the
 * order of the lists, or dense by `descending`: a causal query tile is the longer the later it is.
 * An order that names no block there gives the last. */
__device__ __forceinline__ int tile_at(const Problem &p, int head, int place, bool descending) {
    if (p.lists.order != NULL) {
        unsigned at = place / p.tiles_per_block, blocks = p.tiles / p.tiles_per_block;
        unsigned block = (unsigned)p.lists.order[head * p.lists.order_stride + at];
        ND_CHECK_INDEX("order", head * p.lists.order_stride + at, (int)block, blocks);
        return min(block, blocks - 1) * p.tiles_per_block + place % p.tiles_per_block;
    }
    return descending ? p.tiles - 1 - place : place;
}

/* Thread blocks start in the order of their index, so the longest rows come first, and within that
 * order the heads of a section go together, so that the keys and values of a section stay in the L2
 * cache. */
template <int TILE>
__device__ __forceinline__ bool find_work(const Problem &p, bool descending, Work *work) {
    int heads = p.B * p.H;
    int64_t section_size = (int64_t)p.heads_together * p.tiles;
    int section = (int)(blockIdx.x / section_size);
    int index = (int)(blockIdx.x - section * section_size);
    int first = section * p.heads_together;
    int together = min(p.heads_together, heads - first);
    int head = first + index % together;
    work->b = head / p.H;
    work->h = head % p.H;
    int tile = tile_at(p, work->h, index / together, descending);
    work->block = tile / p.tiles_per_block;
    int start = work->block * p.own_block;
    work->own.begin = start + tile % p.tiles_per_block * TILE;
    work->own.end = min(min(start + p.own_block, p.own_rows), work->own.begin + TILE);
    return work->own.begin < work->own.end;
}

/* The tiles of the listed blocks that meet rows [from, to), in the order of the list. */
template <int TILE> struct TileWalk {
    const int *entries;
    int entry, last, sub;
    int block, blocks, rows, from, to;

    __device__ __forceinline__ TileWalk(const Problem &p, const Work &work, int from, int to)
        : entries(p.lists.entries), entry(0), last(1), sub(0), block(p.other_block),
          blocks(p.lists.blocks), rows(p.other_rows), from(from), to(to) {
        if (p.lists.offsets != NULL) {
            const int *offsets = p.lists.offsets + work.h * p.lists.head_stride + work.block;
            ND_CHECK_INDEX("offsets", offsets - p.lists.offsets, checked(offsets),
                           p.lists.size + 1);
            ND_CHECK_INDEX("offsets", offsets + 1 - p.lists.offsets, checked(offsets + 1),
                           p.lists.size + 1);
            entry = max(offsets[0], 0);
            last = min(offsets[1], p.lists.size);
        } else {
            sub = from / TILE;
        }
    }

    __device__ __forceinline__ Span next() {
        while (entry < last) {
            int index = entries == NULL ? 0 : checked(entries + entry);
            ND_CHECK_INDEX("block list", entry, index, blocks);
            bool known = (unsigned)index < (unsigned)blocks;
            int start = known ? index * block : 0;
            int begin = start + sub * TILE;
            int end = min(min(start + block, rows), begin + TILE);
            sub++;
            if (!known || begin + TILE >= start + block || begin >= to) {
                sub = 0;
                entry++;
            }
            if (known && begin < end && end > from && begin < to) {
                return Span{begin, end};
            }
        }
        return Span{-1, -1};
    }
};

/* First and one past the last other row that any own row of the tile meets. */
__device__ __forceinline__ Span keys_of_queries(const Problem &p, Span queries) {
    return Span{0, p.causal ? max(min(p.S, queries.end + p.offset), 0) : p.S};
}

__device__ __forceinline__ Span queries_of_keys(const Problem &p, Span keys) {
    return Span{p.causal ? max(keys.begin - p.offset, 0) : 0, p.T};
}

/* Of a softmax over keys in two parts, whose log-sum-exps are `mine` and `before`: the weights of
 * the parts, and the log-sum-exp of both in `mine`. */
__device__ __forceinline__ float2 join_parts(float *mine, float before) {
    const float top = nd_max(*mine, before);
    if (before == -INFINITY || top == -INFINITY) {
        return make_float2(1.0f, 0.0f);
    }
    const float x = expf(*mine - top), y = expf(before - top);
    *mine = top + logf(x + y);
    return make_float2(x / (x + y), y / (x + y));
}

/* ---- device: 16-bit tiles -------------------------------------------------------------------- */
/* Byte offset of 16-byte chunk `chunk` of row `row`. */
template <int DP> __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    int key = DP % 64 == 0 ? row & 7 : (row >> 1) & 3;
    return (uint32_t)(row * DP * 2 + ((chunk ^ key) << 4));
}

/* Start copying rows [span.begin, span.end) of a head into a tile of ROWS rows; zeros elsewhere.
 * The 16-byte copies belong to the caller's next copy_async_commit(); rows that are not made of
 * aligned chunks are copied element by element, and are there when this returns. */
template <class T, int DP, int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(uint32_t tile, const Rows &rows, const T *head, Span span,
                                          int D) {
    constexpr int CHUNKS = DP / 8;
    constexpr int GROUP = CHUNKS % 16 == 0  ? 16
                          : CHUNKS % 8 == 0 ? 8
                                            : 4; /* threads side by side */
    constexpr int PASS = THREADS / GROUP;        /* rows at a time */
    static_assert(ROWS % PASS == 0 && PASS % 8 == 0, "every thread copies as much as the others");
    const int first_row = (int)threadIdx.x / GROUP, first_chunk = (int)threadIdx.x % GROUP;
    if (rows.vector) {
#pragma unroll
        for (int pass = 0; pass < ROWS / PASS; pass++) {
            int row = first_row + pass * PASS;
            const T *from = head + (span.begin + row) * rows.t;
#pragma unroll
            for (int panel = 0; panel < CHUNKS / GROUP; panel++) {
                int chunk = first_chunk + panel * GROUP;
                bool inside = span.begin + row < span.end && chunk * 8 < D;
                copy_async16(tile + chunk_offset<DP>(row, chunk), inside ? from + chunk * 8 : head,
                             inside);
            }
        }
        return;
    }
#pragma unroll 1
    for (int index = 0; index < ROWS / PASS * (CHUNKS / GROUP); index++) {
        int row = first_row + index / (CHUNKS / GROUP) * PASS;
        int chunk = first_chunk + index % (CHUNKS / GROUP) * GROUP;
        const T *from = head + (span.begin + row) * rows.t + chunk * 8;
        int count = span.begin + row < span.end ? D - chunk * 8 : 0;
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float low = 2 * w < count ? to_float(checked(from + 2 * w)) : 0.0f;
            float high = 2 * w + 1 < count ? to_float(checked(from + 2 * w + 1)) : 0.0f;
            words[w] = pack_pair<T>(low, high);
        }
        store_shared16(tile + chunk_offset<DP>(row, chunk), words);
    }
}

/* Fragments (mma.cuh) of a tile stored [row][column]. load_a: A of rows m0.. (m) and columns
 * 16 step.. (k); load_b: B of rows n0.. (n) and columns 16 step.. (k); load_b_transposed: B of rows
 * k0.. (k) and columns 16 pair.. (n). b[2..3] is eight rows or columns after b[0..1]. */
template <int DP>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t tile, int m0, int step) {
    int lane = threadIdx.x & 31;
    load_matrices(a, tile + chunk_offset<DP>(m0 + (lane & 15), 2 * step + (lane >> 4)));
}

template <int DP>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t tile, int n0, int step) {
    int lane = threadIdx.x & 31;
    int row = n0 + (lane & 7) + ((lane >> 4) << 3);
    load_matrices(b, tile + chunk_offset<DP>(row, 2 * step + ((lane >> 3) & 1)));
}

template <int DP>
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], uint32_t tile, int k0,
                                                  int pair) {
    int lane = threadIdx.x & 31;
    load_matrices_transposed(b, tile + chunk_offset<DP>(k0 + (lane & 15), 2 * pair + (lane >> 4)));
}

/* A warp's rows of an A operand over all of DP: in registers, or read from the tile when needed. */
template <int DP, int MI, bool IN_REGISTERS> struct OperandA {
    uint32_t tile;
    int m0;
    uint32_t flip; /* the sign of both halves of each word */
    uint32_t kept[IN_REGISTERS ? DP / 16 : 1][MI][4];

    __device__ __forceinline__ void fetch(uint32_t (&a)[MI][4], int step) const {
#pragma unroll
        for (int mi = 0; mi < MI; mi++) {
            load_a<DP>(a[mi], tile, m0 + 16 * mi, step);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[mi][i] ^= flip;
            }
        }
    }

    __device__ __forceinline__ void init(uint32_t from, int row, uint32_t sign) {
        tile = from;
        m0 = row;
        flip = sign;
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int step = 0; step < DP / 16; step++) {
                fetch(kept[step], step);
            }
        }
    }

    __device__ __forceinline__ void get(uint32_t (&a)[MI][4], int step) const {
        if constexpr (IN_REGISTERS) {
#pragma unroll
            for (int mi = 0; mi < MI; mi++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    a[mi][i] = kept[step][mi][i];
                }
            }
        } else {
            fetch(a, step);
        }
    }
};

template <int MI, int N> __device__ __forceinline__ void clear(float (&c)[MI][N][4]) {
#pragma unroll
    for (int mi = 0; mi < MI; mi++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                c[mi][n][i] = 0.0f;
            }
        }
    }
}

/* c = a b^T, with b a tile of 8 N rows; sums over DP. */
template <class T, int DP, int MI, int N, bool KEPT>
__device__ __forceinline__ void product_rows(float (&c)[MI][N][4],
                                             const OperandA<DP, MI, KEPT> &left, uint32_t b_tile) {
    clear(c);
#pragma unroll
    for (int step = 0; step < DP / 16; step++) {
        uint32_t a[MI][4];
        left.get(a, step);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            load_b<DP>(b, b_tile, 8 * n, step);
#pragma unroll
            for (int mi = 0; mi < MI; mi++) {
                multiply_add<T>(c[mi][n], a[mi], b[0], b[1]);
                multiply_add<T>(c[mi][n + 1], a[mi], b[2], b[3]);
            }
        }
    }
}

/* c += w b, with w the C fragments of an earlier product (rounded to T) and b a tile of 8 K rows,
 * of which the 8 N columns from chunk `first` on. */
template <class T, int DP, int MI, int K, int N>
__device__ __forceinline__ void product_columns(float (&c)[MI][N][4], const float (&w)[MI][K][4],
                                                uint32_t b_tile, int first) {
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        uint32_t a[MI][4];
#pragma unroll
        for (int mi = 0; mi < MI; mi++) {
            a[mi][0] = pack_pair<T>(w[mi][k][0], w[mi][k][1]);
            a[mi][1] = pack_pair<T>(w[mi][k][2], w[mi][k][3]);
            a[mi][2] = pack_pair<T>(w[mi][k + 1][0], w[mi][k + 1][1]);
            a[mi][3] = pack_pair<T>(w[mi][k + 1][2], w[mi][k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            load_b_transposed<DP>(b, b_tile, 8 * k, (first + n) / 2);
#pragma unroll
            for (int mi = 0; mi < MI; mi++) {
                multiply_add<T>(c[mi][n], a[mi], b[0], b[1]);
                multiply_add<T>(c[mi][n + 1], a[mi], b[2], b[3]);
            }
        }
    }
}

/* A warp's scores of queries first_row.. with a tile of 8 N keys: `hidden` where the query does not
 * see the key. Most tiles are seen whole and left as they are. */
template <int MI, int N>
__device__ __forceinline__ void hide_keys(float (&s)[MI][N][4], float hidden, const Problem &p,
                                          Span keys, int first_row, int lane) {
    bool cut = keys.begin + 8 * N > keys.end || (p.causal && keys.end - 1 > first_row + p.offset);
    if (!cut) {
        return;
    }
#pragma unroll
    for (int mi = 0; mi < MI; mi++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first_row + 16 * mi + 8 * half + lane / 4;
            int end = p.causal ? min(keys.end, row + p.offset + 1) : keys.end;
            int columns = end - keys.begin - 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (8 * n + e >= columns) {
                        s[mi][n][2 * half + e] = hidden;
                    }
                }
            }
        }
    }
}

/* Write a warp's accumulators, times factor[mi][half row], to rows span.begin + m0.. of a head
 * (those before span.end) and columns 8 first..; through `tile`, whose rows m0.. and chunks
 * first.. are free. joins: they are added to what is there, times the rows' `weights` in shared
 * memory (0: 1); where a weight is 0 nothing is read. */
template <class T, int DP, int MI, int N>
__device__ __forceinline__ void store_rows(const float (&c)[MI][N][4], const float (&factor)[MI][2],
                                           uint32_t tile, int m0, int first, const Rows &rows,
                                           T *head, Span span, int D, int joins = 0,
                                           uint32_t weights = 0) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int mi = 0; mi < MI; mi++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = m0 + 16 * mi + 8 * half + lane / 4;
                uint32_t to = tile + chunk_offset<DP>(row, first + n) + 4 * (lane % 4);
                store_shared4(to, pack_pair<T>(c[mi][n][2 * half] * factor[mi][half],
                                               c[mi][n][2 * half + 1] * factor[mi][half]));
            }
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int index = lane; index < 16 * MI * N; index += 32) {
        int row = m0 + index / N, chunk = first + index % N;
        int count = span.begin + row < span.end ? D - chunk * 8 : 0;
        if (count <= 0) {
            continue;
        }
        T *to = head + (span.begin + row) * rows.t + chunk * 8;
        union {
            uint32_t words[4];
            unsigned short elements[8];
        } u;
        load_shared16(u.words, tile + chunk_offset<DP>(row, chunk));
        const float weight = weights ? __uint_as_float(load_shared4(weights + 4 * row)) : 1.0f;
        if (joins && weight > 0.0f) {
#pragma unroll
            for (int e = 0; e < 8; e++) {
                if (e < count) {
                    const float before = to_float(checked(to + e));
                    T *sum = (T *)u.elements + e;
                    *sum = from_float<T>(fmaf(weight, before, to_float(*sum)));
                }
            }
        }
        if (rows.vector) {
            checked((uint4 *)to) = make_uint4(u.words[0], u.words[1], u.words[2], u.words[3]);
        } else {
#pragma unroll
            for (int e = 0; e < 8; e++) {
                if (e < count) {
                    checked((unsigned short *)to + e) = u.elements[e];
                }
            }
        }
    }
}

#endif
} // namespace attention

#endif
