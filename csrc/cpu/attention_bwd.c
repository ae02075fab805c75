/* attention_bwd.c - softmax attention, dense and block-sparse, backward.
 *
 *   P = exp(scale Q K^T - lse)   recomputed, tile by tile
 *   delta = rowsum(dO o)
 *   dV = P^T dO,  dS = P (dO V^T - delta) scale,  dQ = dS K,  dK = dS^T Q
 *
 * A task is one head, whose dq, dk and dv belong to it alone: no atomics, the same bits for any
 * number of threads. It walks key tiles of 128; for each, the query tiles of 64 that see it, with
 * five sgemms a pair; dK and dV of the tile stay in scratch, dQ is added up in place (float32) or
 * in a float32 copy of the head (16-bit dtypes). 10 T S D operations a head, half of that when
 * causal.
 */
#include <omp.h>

#include "attention.h"

typedef struct {
    const nd_array *dout, *q, *k, *v, *o, *lse;
    attention_pattern pattern; /* for each key block, the query blocks that see it */
    float scale;
    bool causal;
    nd_array *dq, *dk, *dv;
} backward;

/* One thread's tiles. */
typedef struct {
    float *p, *ds, *q, *dout, *k, *v, *dk, *dv, *dq, *delta;
} workspace;

static size_t workspace_floats(int64_t queries, int64_t d) {
    size_t tiles = 2 * ATTENTION_QUERIES * ATTENTION_KEYS;
    size_t rows = 2 * ATTENTION_QUERIES + 4 * ATTENTION_KEYS + (size_t)queries;
    return (tiles + rows * (size_t)d + (size_t)queries + 15) / 16 * 16;
}

static workspace workspace_at(float *memory, int64_t queries, int64_t d) {
    workspace w;
    w.p = memory;
    w.ds = w.p + ATTENTION_QUERIES * ATTENTION_KEYS;
    w.q = w.ds + ATTENTION_QUERIES * ATTENTION_KEYS;
    w.dout = w.q + ATTENTION_QUERIES * d;
    w.k = w.dout + ATTENTION_QUERIES * d;
    w.v = w.k + ATTENTION_KEYS * d;
    w.dk = w.v + ATTENTION_KEYS * d;
    w.dv = w.dk + ATTENTION_KEYS * d;
    w.dq = w.dv + ATTENTION_KEYS * d;
    w.delta = w.dq + queries * d;
    return w;
}

/* p: scores in, probabilities out; ds: dO V^T in, the scores' gradient out; zero from `visible` on.
 */
static void gradient_row(float *restrict p, float *restrict ds, int64_t visible, int64_t n,
                         float lse, float delta, float scale) {
    if (lse == -INFINITY) {
        visible = 0;
    }
    int64_t padded = (visible + ATTENTION_LANES - 1) & ~(int64_t)(ATTENTION_LANES - 1);
    for (int64_t j = visible; j < padded; j++) {
        p[j] = -INFINITY;
        ds[j] = 0;
    }
    for (int64_t j = 0; j < padded; j++) {
        float probability = nd_exp(p[j] - lse);
        p[j] = probability;
        ds[j] = probability * (ds[j] - delta) * scale;
    }
    for (int64_t j = visible; j < n; j++) {
        p[j] = 0;
        ds[j] = 0;
    }
}

/* delta[t] = dO[t] . o[t] */
static void row_products(const backward *b, const attention_rows *dout_rows, int64_t batch,
                         int64_t head, workspace *w) {
    int64_t queries = b->q->shape[1], heads = b->q->shape[2], d = b->q->shape[3];
    float buffer[256];
    for (int64_t t = 0; t < queries; t++) {
        int64_t leading;
        const float *restrict dout = attention_load(dout_rows, t, 1, w->dout, &leading);
        const float *restrict o =
            cpu_read(b->o, ((batch * queries + t) * heads + head) * d, d, buffer);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < d; j++) {
            sum += dout[j] * o[j];
        }
        w->delta[t] = sum;
    }
}

/* Keys [s0, s1) of one key block against all queries that see them. */
static void key_tile(const backward *b, int64_t batch, int64_t head, int64_t block, int64_t s0,
                     int64_t s1, float *dq, int64_t lddq, workspace *w) {
    int64_t queries = b->q->shape[1], heads = b->q->shape[2], d = b->q->shape[3];
    int64_t keys = b->k->shape[1], n = s1 - s0, width = max_of(d, 1);
    int64_t ldk, ldv, ldq, lddout, t0, t1;
    attention_rows q_rows = attention_head(b->q, batch, head);
    attention_rows k_rows = attention_head(b->k, batch, head);
    attention_rows v_rows = attention_head(b->v, batch, head);
    attention_rows dout_rows = attention_head(b->dout, batch, head);
    const float *k = attention_load(&k_rows, s0, n, w->k, &ldk);
    const float *v = attention_load(&v_rows, s0, n, w->v, &ldv);
    const float *lse = (const float *)b->lse->data + (batch * heads + head) * queries;
    memset(w->dk, 0, (size_t)(n * d) * sizeof(float));
    memset(w->dv, 0, (size_t)(n * d) * sizeof(float));
    int64_t first = b->causal ? max_of(0, s0 - (keys - queries)) : 0;
    attention_walk walk =
        attention_walk_start(&b->pattern, head, block, first, queries, ATTENTION_QUERIES);
    while (attention_walk_next(&walk, &t0, &t1)) {
        int64_t rows = t1 - t0;
        const float *q = attention_load(&q_rows, t0, rows, w->q, &ldq);
        const float *dout = attention_load(&dout_rows, t0, rows, w->dout, &lddout);
        cpu_sgemm(false, true, rows, n, d, b->scale, q, ldq, k, ldk, 0.0f, w->p, ATTENTION_KEYS);
        cpu_sgemm(false, true, rows, n, d, 1.0f, dout, lddout, v, ldv, 0.0f, w->ds, ATTENTION_KEYS);
        for (int64_t i = 0; i < rows; i++) {
            gradient_row(w->p + i * ATTENTION_KEYS, w->ds + i * ATTENTION_KEYS,
                         attention_visible(b->causal, t0 + i, queries, keys, s0, n), n, lse[t0 + i],
                         w->delta[t0 + i], b->scale);
        }
        cpu_sgemm(true, false, n, d, rows, 1.0f, w->p, ATTENTION_KEYS, dout, lddout, 1.0f, w->dv,
                  width);
        cpu_sgemm(true, false, n, d, rows, 1.0f, w->ds, ATTENTION_KEYS, q, ldq, 1.0f, w->dk, width);
        cpu_sgemm(false, false, rows, d, n, 1.0f, w->ds, ATTENTION_KEYS, k, ldk, 1.0f,
                  dq + t0 * lddq, lddq);
    }
    attention_rows dk_rows = attention_head(b->dk, batch, head);
    attention_rows dv_rows = attention_head(b->dv, batch, head);
    attention_store(&dk_rows, s0, n, w->dk);
    attention_store(&dv_rows, s0, n, w->dv);
}

static void backward_head(const backward *b, int64_t batch, int64_t head, workspace *w) {
    int64_t queries = b->q->shape[1], keys = b->k->shape[1], d = b->q->shape[3];
    int64_t block = b->pattern.block;
    attention_rows dout_rows = attention_head(b->dout, batch, head);
    attention_rows dq_rows = attention_head(b->dq, batch, head);
    float *dq = w->dq;
    int64_t lddq = max_of(d, 1);
    if (dq_rows.in_place) {
        dq = (float *)b->dq->data + dq_rows.base;
        lddq = dq_rows.stride;
    }
    for (int64_t t = 0; t < queries; t++) {
        memset(dq + t * lddq, 0, (size_t)d * sizeof(float));
    }
    row_products(b, &dout_rows, batch, head, w);
    for (int64_t i = 0; i < b->pattern.blocks; i++) {
        int64_t end = min_of(keys, (i + 1) * block);
        for (int64_t s0 = i * block; s0 < end; s0 += ATTENTION_KEYS) {
            key_tile(b, batch, head, i, s0, min_of(end, s0 + ATTENTION_KEYS), dq, lddq, w);
        }
    }
    if (!dq_rows.in_place) {
        attention_store(&dq_rows, 0, queries, dq);
    }
}

static nd_status attention_backward(int device, const char *name, const backward *b) {
    int64_t batches = b->q->shape[0], queries = b->q->shape[1], heads = b->q->shape[2],
            d = b->q->shape[3];
    if (d > 256) {
        return nd_error(ND_EVALUE, "%s: q: head dim %lld is above the limit of 256", name,
                        (long long)d);
    }
    size_t each = workspace_floats(queries, d);
    void *scratch;
    ND_TRY(cpu_scratch(device, each * (size_t)cpu_threads() * sizeof(float), &scratch));
    int64_t scores = batches * heads * queries * b->k->shape[1];
#pragma omp parallel for schedule(dynamic) num_threads(cpu_threads()) if (scores > CPU_GRAIN)
    for (int64_t pair = 0; pair < batches * heads; pair++) {
        workspace w =
            workspace_at((float *)scratch + each * (size_t)omp_get_thread_num(), queries, d);
        backward_head(b, pair / heads, pair % heads, &w);
    }
    return ND_OK;
}

nd_status cpu_attention_bwd(int device, const attention_bwd_args *args) {
    backward b = {.dout = args->dout,
                  .q = args->q,
                  .k = args->k,
                  .v = args->v,
                  .o = args->o,
                  .lse = args->lse,
                  .scale = (float)args->scale,
                  .causal = args->causal != 0,
                  .dq = args->dq,
                  .dk = args->dk,
                  .dv = args->dv};
    ND_TRY(attention_pattern_make("attention_bwd", "", NULL, NULL, 0, args->k->shape[1],
                                  args->q->shape[1], args->q->shape[2], &b.pattern));
    return attention_backward(device, "attention_bwd", &b);
}

nd_status cpu_block_sparse_attention_bwd(int device, const block_sparse_attention_bwd_args *args) {
    backward b = {.dout = args->dout,
                  .q = args->q,
                  .k = args->k,
                  .v = args->v,
                  .o = args->o,
                  .lse = args->lse,
                  .scale = (float)args->scale,
                  .causal = args->causal != 0,
                  .dq = args->dq,
                  .dk = args->dk,
                  .dv = args->dv};
    ND_TRY(attention_pattern_make("block_sparse_attention_bwd", "offsets_t", args->offsets_t,
                                  args->rows, args->block, args->k->shape[1], args->q->shape[1],
                                  args->q->shape[2], &b.pattern));
    return attention_backward(device, "block_sparse_attention_bwd", &b);
}
