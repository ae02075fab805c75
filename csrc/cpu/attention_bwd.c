/* attention_bwd.c - softmax attention, dense and block-sparse, backward.
 *
 *   P = exp(scale Q K^T - lse)   recomputed, tile by tile
 *   delta = rowsum(dO o)
 *   dV = P^T dO,  dS = P (dO V^T - delta) scale,  dQ = dS K,  dK = dS^T Q
 *   with cos and sin: dQ and dK rotated back by the angles of their positions before rounding
 *
 * A task is one head, whose dq, dk, dv and part of db belong to it alone: no atomics, the same bits
 * for any number of threads. It walks query tiles of 64; for each, the keys that it sees, 128 at a
 * time, with five products a pair; dQ of the tile stays in scratch, dK and dV are added up in a
 * float32 copy of the head. 10 T S D operations a head, half of that when causal.
 */
#include <omp.h>

#include "attention.h"

typedef struct {
    const nd_array *dout, *q, *k, *v, *o, *lse;
    attention_pattern pattern; /* for each query block, the key blocks that it sees */
    float scale;
    bool causal, joins;
    int64_t lse_steps[3];                  /* of lse along batch, heads and queries */
    const nd_array *cos, *sin;             /* NULL: no rotary */
    nd_array *dq, *dk, *dv, *db, *largest; /* the last two may be NULL */
} backward;

/* One thread's tiles. A column a query: p, ds, qt, doutt, dqt. A row a query: q, dout. A row a key,
 * for all keys of the head: k, v, dk, dv. Rows of q, dout, dk and dv are padded to whole panels.
 * sums: the head's part of db (3, D), NULL where db is not asked for. */
typedef struct {
    float *p, *ds, *qt, *doutt, *dqt, *q, *dout, *k, *v, *dk, *dv, *sums;
    float lse[ATTENTION_QUERIES], delta[ATTENTION_QUERIES];
} workspace;

static size_t workspace_floats(int64_t keys, int64_t d) {
    size_t tiles = 2 * ATTENTION_QUERIES * ATTENTION_KEYS;
    size_t rows = 3 * ATTENTION_QUERIES + 2 * (size_t)keys;
    size_t padded = 2 * ATTENTION_QUERIES + 2 * (size_t)keys;
    return (tiles + rows * (size_t)d + padded * (size_t)tile_padded(d) + 15) / 16 * 16;
}

static workspace workspace_at(float *memory, int64_t keys, int64_t d) {
    int64_t padded = tile_padded(d);
    workspace w;
    w.p = memory;
    w.ds = w.p + ATTENTION_QUERIES * ATTENTION_KEYS;
    w.qt = w.ds + ATTENTION_QUERIES * ATTENTION_KEYS;
    w.doutt = w.qt + ATTENTION_QUERIES * d;
    w.dqt = w.doutt + ATTENTION_QUERIES * d;
    w.k = w.dqt + ATTENTION_QUERIES * d;
    w.v = w.k + keys * d;
    w.q = w.v + keys * d;
    w.dout = w.q + ATTENTION_QUERIES * padded;
    w.dk = w.dout + ATTENTION_QUERIES * padded;
    w.dv = w.dk + keys * padded;
    return w;
}

/* p: scores in, probabilities out; ds: dO V^T in, the scores' gradient out. One key, a panel of
 * queries. */
static void gradient_row(float *restrict p, float *restrict ds, const float *restrict lse,
                         const float *restrict delta, float scale) {
    for (int64_t i = 0; i < TILE_PANEL; i++) {
        float probability = nd_exp_softmax(p[i] - lse[i]);
        p[i] = probability;
        ds[i] = probability * (ds[i] - delta[i]) * scale;
    }
}

/* The rows of a query tile: q and dout in both ways, lse, and delta[t] = dO[t] . o[t]. A query that
 * saw no key, and the columns beyond the last, get probabilities of 0. */
static void load_queries(const backward *b, int64_t batch, int64_t head, int64_t t0, int64_t rows,
                         workspace *w) {
    int64_t d = b->q->shape[3], padded = tile_padded(d), step = b->lse_steps[2];
    attention_rows q_rows = attention_head(b->q, batch, head);
    attention_rows dout_rows = attention_head(b->dout, batch, head);
    attention_load(&q_rows, t0, rows, w->q, padded);
    attention_load(&dout_rows, t0, rows, w->dout, padded);
    attention_columns(w->q, rows, d, padded, b->scale, w->qt);
    attention_columns(w->dout, rows, d, padded, 1.0f, w->doutt);
    const float *lse =
        (const float *)b->lse->data + batch * b->lse_steps[0] + head * b->lse_steps[1] + t0 * step;
    for (int64_t i = 0; i < ATTENTION_QUERIES; i++) {
        w->lse[i] = i < rows && lse[i * step] != -INFINITY ? lse[i * step] : INFINITY;
        w->delta[i] = 0;
    }
    attention_rows o_rows = attention_head(b->o, batch, head);
    attention_load(&o_rows, t0, rows, w->dqt, d);
    for (int64_t i = 0; i < rows; i++) {
        const float *restrict o = w->dqt + i * d, *restrict dout = w->dout + i * padded;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < d; j++) {
            sum += dout[j] * o[j];
        }
        w->delta[i] = sum;
    }
}

/* Rotate rows of dq or dk, from position `first` on, back by their angles, if there are any. */
static void rotate_back(const backward *b, int64_t first, int64_t n, int64_t leading, float *rows) {
    if (b->cos == NULL) {
        return;
    }
    int64_t r = b->cos->shape[1];
    const float *cosines = (const float *)b->cos->data, *sines = (const float *)b->sin->data;
    for (int64_t i = 0; i < n; i++) {
        cpu_rotate(rows + i * leading, cosines + (first + i) * r, sines + (first + i) * r, r,
                   -1.0f);
    }
}

/* sums (D) += n rows, ROWS of which are added to each other first, so that no sum has many
 * terms. */
static void add_rows(const float *rows, int64_t n, int64_t d, int64_t leading, float *sums) {
    enum { ROWS = 256 };
    for (int64_t first = 0; first < n; first += ROWS) {
        for (int64_t j = 0; j < d; j += TILE_LANES) {
            float sum[TILE_LANES] = {0};
            int64_t columns = min_of(TILE_LANES, d - j);
            for (int64_t i = first; i < min_of(n, first + ROWS); i++) {
                for (int64_t c = 0; c < columns; c++) {
                    sum[c] += rows[i * leading + j + c];
                }
            }
            for (int64_t c = 0; c < columns; c++) {
                sums[j + c] += sum[c];
            }
        }
    }
}

/* Rows of a gradient to where they belong, added to what is there where parts are joined. scratch:
 * of n x d. */
static void store_gradient(const backward *b, const attention_rows *to, int64_t first, int64_t n,
                           float *restrict rows, int64_t leading, float *restrict scratch) {
    int64_t d = b->q->shape[3];
    if (b->joins) {
        attention_load(to, first, n, scratch, d);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < d; j++) {
                rows[i * leading + j] += scratch[i * d + j];
            }
        }
    }
    attention_store(to, first, n, rows, leading);
}

/* Queries [t0, t1) of one query block against all keys that they see. */
static void query_tile(const backward *b, int64_t batch, int64_t head, int64_t block, int64_t t0,
                       int64_t t1, workspace *w) {
    int64_t queries = b->q->shape[1], keys = b->k->shape[1], d = b->q->shape[3];
    int64_t rows = t1 - t0, padded = tile_padded(d), s0, s1;
    load_queries(b, batch, head, t0, rows, w);
    memset(w->dqt, 0, (size_t)(ATTENTION_QUERIES * d) * sizeof(float));
    int64_t last = attention_visible(b->causal, t1, queries, keys, 0, keys);
    attention_walk walk = attention_walk_start(&b->pattern, head, block, 0, last, ATTENTION_KEYS);
    while (attention_walk_next(&walk, &s0, &s1)) {
        const float *k = w->k + s0 * d, *v = w->v + s0 * d;
        for (int64_t at = 0; at < rows; at += TILE_PANEL) {
            int64_t n = attention_visible(b->causal, min_of(t0 + at + TILE_PANEL, t1), queries,
                                          keys, s0, s1 - s0);
            float *p = w->p + at, *ds = w->ds + at;
            tile_product(n, TILE_PANEL, d, k, d, 1, w->qt + at, ATTENTION_QUERIES, p,
                         ATTENTION_QUERIES, false);
            tile_product(n, TILE_PANEL, d, v, d, 1, w->doutt + at, ATTENTION_QUERIES, ds,
                         ATTENTION_QUERIES, false);
            attention_hide(b->causal, t0 + at, queries, keys, s0, n, p, ATTENTION_QUERIES);
            for (int64_t key = 0; key < n; key++) {
                gradient_row(p + key * ATTENTION_QUERIES, ds + key * ATTENTION_QUERIES, w->lse + at,
                             w->delta + at, b->scale);
            }
            tile_product(d, TILE_PANEL, n, k, 1, d, ds, ATTENTION_QUERIES, w->dqt + at,
                         ATTENTION_QUERIES, true);
        }
        /* Keys that a panel of queries sees and the panels before it do not: from there on. */
        for (int64_t at = 0, n = 0; at < rows; at += TILE_PANEL) {
            int64_t first = n;
            n = attention_visible(b->causal, min_of(t0 + at + TILE_PANEL, t1), queries, keys, s0,
                                  s1 - s0);
            int64_t from = first * ATTENTION_QUERIES + at, to = (s0 + first) * padded;
            tile_product(n - first, padded, rows - at, w->p + from, ATTENTION_QUERIES, 1,
                         w->dout + at * padded, padded, w->dv + to, padded, true);
            tile_product(n - first, padded, rows - at, w->ds + from, ATTENTION_QUERIES, 1,
                         w->q + at * padded, padded, w->dk + to, padded, true);
        }
    }
    attention_rows dq_rows = attention_head(b->dq, batch, head);
    attention_rows_of(w->dqt, rows, d, NULL, w->q);
    rotate_back(b, t0, rows, d, w->q);
    if (w->sums != NULL) {
        add_rows(w->q, rows, d, d, w->sums);
    }
    store_gradient(b, &dq_rows, t0, rows, w->q, d, w->qt);
}

static void backward_head(const backward *b, int64_t batch, int64_t head, workspace *w) {
    int64_t queries = b->q->shape[1], keys = b->k->shape[1], d = b->q->shape[3];
    int64_t block = b->pattern.block, padded = tile_padded(d);
    attention_rows k_rows = attention_head(b->k, batch, head);
    attention_rows v_rows = attention_head(b->v, batch, head);
    attention_load(&k_rows, 0, keys, w->k, d);
    attention_load(&v_rows, 0, keys, w->v, d);
    memset(w->dk, 0, (size_t)(2 * keys * padded) * sizeof(float)); /* and dv after it */
    for (int64_t i = 0; i < b->pattern.blocks; i++) {
        int64_t end = min_of(queries, (i + 1) * block);
        for (int64_t t0 = i * block; t0 < end; t0 += ATTENTION_QUERIES) {
            query_tile(b, batch, head, i, t0, min_of(end, t0 + ATTENTION_QUERIES), w);
        }
    }
    attention_rows dk_rows = attention_head(b->dk, batch, head);
    attention_rows dv_rows = attention_head(b->dv, batch, head);
    rotate_back(b, 0, keys, padded, w->dk);
    if (w->sums != NULL) {
        add_rows(w->dk, keys, d, padded, w->sums + d);
        add_rows(w->dv, keys, d, padded, w->sums + 2 * d);
    }
    store_gradient(b, &dk_rows, 0, keys, w->dk, padded, w->k);
    store_gradient(b, &dv_rows, 0, keys, w->dv, padded, w->v);
}

static nd_status angles_check(const char *name, const backward *b) {
    int64_t queries = b->q->shape[1], keys = b->k->shape[1], d = b->q->shape[3];
    if ((b->cos == NULL) != (b->sin == NULL)) {
        return nd_error(ND_EVALUE, "%s: %s: must be given with the other of cos and sin", name,
                        b->cos == NULL ? "cos" : "sin");
    }
    if (b->cos == NULL) {
        return ND_OK;
    }
    if (keys != queries) {
        return nd_error(ND_EVALUE,
                        "%s: cos: the angles of %lld positions rotate dq and dk, but there are "
                        "%lld keys",
                        name, (long long)queries, (long long)keys);
    }
    int64_t r = b->cos->shape[1];
    if (2 * r > d) {
        return nd_error(ND_EVALUE, "%s: cos: %lld angles rotate %lld dims, but a head has %lld",
                        name, (long long)r, (long long)(2 * r), (long long)d);
    }
    return ND_OK;
}

static nd_status attention_backward(int device, const char *name, const backward *b) {
    int64_t batches = b->q->shape[0], queries = b->q->shape[1], heads = b->q->shape[2],
            keys = b->k->shape[1], d = b->q->shape[3];
    ND_TRY(attention_check(name, keys, d));
    ND_TRY(angles_check(name, b));
    if (b->db != NULL && b->db->shape[1] != 3) {
        return nd_error(ND_EVALUE,
                        "%s: db: must be (H, 3, D), of dq, dk and dv, but has %lld parts", name,
                        (long long)b->db->shape[1]);
    }
    size_t each = workspace_floats(keys, d), all = each * (size_t)cpu_threads();
    int64_t sums = b->db != NULL ? 3 * d : 0; /* of a head */
    void *scratch;
    ND_TRY(cpu_scratch(device, (all + (size_t)(batches * heads * sums)) * sizeof(float), &scratch));
    float *parts = (float *)scratch + all;
    int64_t scores = batches * heads * queries * keys;
#pragma omp parallel for schedule(dynamic) num_threads(cpu_threads()) if (scores > CPU_GRAIN)
    for (int64_t pair = 0; pair < batches * heads; pair++) {
        workspace w = workspace_at((float *)scratch + each * (size_t)omp_get_thread_num(), keys, d);
        w.sums = sums > 0 ? memset(parts + pair * sums, 0, (size_t)sums * sizeof(float)) : NULL;
        backward_head(b, pair / heads, pair % heads, &w);
    }
    float *db = sums > 0 ? b->db->data : NULL;
    for (int64_t i = 0; i < batches * heads * sums; i++) { /* one batch entry after the other */
        db[i % (heads * sums)] += parts[i];
    }
    uint32_t largest = 0;
    for (int i = 0; i < 3 && b->largest != NULL; i++) {
        uint32_t bits = cpu_largest_bits((const nd_array *[]){b->dq, b->dk, b->dv}[i]);
        largest = bits > largest ? bits : largest;
        *(float *)b->largest->data = nd_bits_float(largest);
    }
    return ND_OK;
}

/* The operands of each op. heads, queries: axes of its lse. */
#define OPERANDS(a, heads, queries)                                                            \
    .dout = (a)->dout, .q = (a)->q, .k = (a)->k, .v = (a)->v, .o = (a)->o, .lse = (a)->lse,    \
    .scale = (float)(a)->scale, .causal = (a)->causal != 0,                                    \
    .lse_steps = {(a)->lse->strides[0], (a)->lse->strides[heads], (a)->lse->strides[queries]}, \
    .dq = (a)->dq, .dk = (a)->dk, .dv = (a)->dv
#define ROTATED(a) .cos = (a)->cos, .sin = (a)->sin, .db = (a)->db, .largest = (a)->largest

static nd_status dense_backward(int device, const char *op, backward *b) {
    ND_TRY(attention_pattern_make(op, "", NULL, NULL, 0, b->q->shape[1], b->k->shape[1],
                                  b->q->shape[2], &b->pattern));
    return attention_backward(device, op, b);
}

nd_status cpu_attention_bwd(int device, const attention_bwd_args *a) {
    return dense_backward(device, "attention_bwd", &(backward){OPERANDS(a, 1, 2), ROTATED(a)});
}

nd_status cpu_attention_part_bwd(int device, const attention_part_bwd_args *a) {
    return dense_backward(device, "attention_part_bwd",
                          &(backward){OPERANDS(a, 2, 1), .joins = a->joins != 0});
}

nd_status cpu_block_sparse_attention_bwd(int device, const block_sparse_attention_bwd_args *args) {
    backward b = {OPERANDS(args, 1, 2), ROTATED(args)};
    attention_pattern transposed; /* for GPUs; checked here as well, so that both say the same */
    ND_TRY(attention_pattern_make("block_sparse_attention_bwd", "offsets_t", args->offsets_t,
                                  args->rows, args->block, args->k->shape[1], args->q->shape[1],
                                  args->q->shape[2], &transposed));
    ND_TRY(attention_order_check(device, "block_sparse_attention_bwd", "order_t", args->order_t,
                                 &transposed));
    ND_TRY(attention_pattern_make("block_sparse_attention_bwd", "offsets", args->offsets,
                                  args->columns, args->block, args->q->shape[1], args->k->shape[1],
                                  args->q->shape[2], &b.pattern));
    ND_TRY(attention_order_check(device, "block_sparse_attention_bwd", "order", args->order,
                                 &b.pattern));
    return attention_backward(device, "block_sparse_attention_bwd", &b);
}
