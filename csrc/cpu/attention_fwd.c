/* attention_fwd.c - softmax attention, dense and block-sparse, forward.
 *
 *   S = scale Q K^T (masked),  P = exp(S - lse),  o = P V,  lse = log of the row sums of exp(S)
 *
 * A task is a tile of up to 64 queries of one head. It walks the keys it may see, 128 at a time:
 * one sgemm for the scores, an online softmax over them (running maximum and sum; when the maximum
 * grows, the accumulated output shrinks), one sgemm that adds P V. No T x S matrix exists, memory
 * is a tile a thread. Keys behind a query's causal limit cost nothing but the rest of their tile;
 * blocks that a sparse pattern does not list are never read. Everything in float32; tasks are
 * independent, so threads do not change bits. 4 T S D operations a head, half of that when causal.
 */
#include <omp.h>

#include "attention.h"

nd_status attention_pattern_make(const char *name, const char *field, const nd_array *offsets,
                                 const nd_array *lists, int64_t block, int64_t length,
                                 int64_t other, int64_t heads, attention_pattern *out) {
    if (offsets == NULL) {
        *out = (attention_pattern){.groups = 1, .blocks = 1, .block = length};
        return ND_OK;
    }
    if (block < 1) {
        return nd_error(ND_EVALUE, "%s: block: must be positive, not %lld", name, (long long)block);
    }
    block = min_of(block, max_of(max_of(length, other), 1)); /* longer ones are one block as well */
    *out = (attention_pattern){.offsets = offsets->data,
                               .lists = lists->data,
                               .groups = offsets->shape[0],
                               .blocks = cpu_ceil_div(length, block),
                               .block = block};
    if (out->groups != 1 && out->groups != heads) {
        return nd_error(ND_EVALUE, "%s: %s: %lld masks for %lld heads; give 1 or one a head", name,
                        field, (long long)out->groups, (long long)heads);
    }
    if (offsets->shape[1] != out->blocks + 1) {
        return nd_error(ND_EVALUE,
                        "%s: %s: %lld offsets a mask, but %lld rows in blocks of %lld need %lld",
                        name, field, (long long)offsets->shape[1], (long long)length,
                        (long long)block, (long long)out->blocks + 1);
    }
    int64_t entries = lists->shape[0], others = cpu_ceil_div(other, block);
    for (int64_t i = 0; i < out->groups * (out->blocks + 1); i++) {
        int64_t least = i % (out->blocks + 1) > 0 ? out->offsets[i - 1] : 0;
        if (out->offsets[i] < least || out->offsets[i] > entries) {
            return nd_error(ND_EVALUE, "%s: %s: entry %lld is %d, outside [%lld, %lld]", name,
                            field, (long long)i, (int)out->offsets[i], (long long)least,
                            (long long)entries);
        }
    }
    for (int64_t i = 0; i < entries; i++) {
        if (out->lists[i] < 0 || out->lists[i] >= others) {
            return nd_error(ND_EVALUE,
                            "%s: %s: lists block %d at %lld, but the other side has %lld blocks",
                            name, field, (int)out->lists[i], (long long)i, (long long)others);
        }
    }
    return ND_OK;
}

typedef struct {
    const nd_array *q, *k, *v;
    attention_pattern pattern;
    float scale;
    bool causal;
    nd_array *o, *lse;
} forward;

/* One thread's tiles. */
typedef struct {
    float *scores, *out, *q, *k, *v;
    float maximum[ATTENTION_QUERIES], sum[ATTENTION_QUERIES];
} workspace;

static size_t workspace_floats(int64_t d) {
    size_t tile = ATTENTION_QUERIES * ATTENTION_KEYS;
    return tile + (size_t)d * 2 * (ATTENTION_QUERIES + ATTENTION_KEYS);
}

/* A row of scores becomes exp(score - maximum), zero from `visible` on; the row's running maximum,
 * sum and output follow. Whole vectors: the rest of the last one is -inf, whose exponential is 0.
 */
static void softmax_row(float *restrict scores, int64_t visible, int64_t n, float *maximum,
                        float *sum, float *restrict out, int64_t d) {
    int64_t padded = (visible + ATTENTION_LANES - 1) & ~(int64_t)(ATTENTION_LANES - 1);
    for (int64_t j = visible; j < padded; j++) {
        scores[j] = -INFINITY;
    }
    float highest = *maximum, part = 0;
#pragma omp simd reduction(max : highest)
    for (int64_t j = 0; j < padded; j++) {
        highest = scores[j] > highest ? scores[j] : highest;
    }
    float shift = highest == -INFINITY ? 0.0f : highest;
#pragma omp simd reduction(+ : part)
    for (int64_t j = 0; j < padded; j++) {
        scores[j] = nd_exp(scores[j] - shift);
        part += scores[j];
    }
    for (int64_t j = padded; j < n; j++) {
        scores[j] = 0;
    }
    if (highest != *maximum) {
        float shrink = nd_exp(*maximum - shift);
        *sum *= shrink;
        for (int64_t j = 0; j < d; j++) {
            out[j] *= shrink;
        }
    }
    *sum += part;
    *maximum = highest;
}

static void forward_tile(const forward *f, int64_t batch, int64_t head, int64_t block, int64_t t0,
                         int64_t t1, workspace *w) {
    int64_t d = f->q->shape[3], queries = f->q->shape[1], keys = f->k->shape[1];
    int64_t heads = f->q->shape[2], rows = t1 - t0, ldq, ldk, ldv, s0, s1;
    attention_rows q_rows = attention_head(f->q, batch, head);
    attention_rows k_rows = attention_head(f->k, batch, head);
    attention_rows v_rows = attention_head(f->v, batch, head);
    const float *q = attention_load(&q_rows, t0, rows, w->q, &ldq);
    memset(w->out, 0, (size_t)(rows * d) * sizeof(float));
    for (int64_t i = 0; i < rows; i++) {
        w->maximum[i] = -INFINITY;
        w->sum[i] = 0;
    }
    int64_t last = attention_visible(f->causal, t1 - 1, queries, keys, 0, keys);
    attention_walk walk = attention_walk_start(&f->pattern, head, block, 0, last, ATTENTION_KEYS);
    while (attention_walk_next(&walk, &s0, &s1)) {
        int64_t n = s1 - s0;
        const float *k = attention_load(&k_rows, s0, n, w->k, &ldk);
        cpu_sgemm(false, true, rows, n, d, f->scale, q, ldq, k, ldk, 0.0f, w->scores,
                  ATTENTION_KEYS);
        for (int64_t i = 0; i < rows; i++) {
            softmax_row(w->scores + i * ATTENTION_KEYS,
                        attention_visible(f->causal, t0 + i, queries, keys, s0, n), n,
                        &w->maximum[i], &w->sum[i], w->out + i * d, d);
        }
        const float *v = attention_load(&v_rows, s0, n, w->v, &ldv);
        cpu_sgemm(false, false, rows, d, n, 1.0f, w->scores, ATTENTION_KEYS, v, ldv, 1.0f, w->out,
                  max_of(d, 1));
    }
    float *lse = (float *)f->lse->data + (batch * heads + head) * queries + t0;
    for (int64_t i = 0; i < rows; i++) {
        float *restrict out = w->out + i * d;
        bool empty = w->maximum[i] == -INFINITY && w->sum[i] == 0;
        float inverse = empty ? 0.0f : 1.0f / w->sum[i];
        for (int64_t j = 0; j < d; j++) {
            out[j] *= inverse;
        }
        lse[i] = empty ? -INFINITY : w->maximum[i] + nd_log(w->sum[i]);
        cpu_store_f32(cpu_at(f->o, ((batch * queries + t0 + i) * heads + head) * d), f->o->dtype, 1,
                      out, d);
    }
}

static nd_status attention_forward(int device, const char *name, const forward *f) {
    int64_t batches = f->q->shape[0], queries = f->q->shape[1], heads = f->q->shape[2],
            d = f->q->shape[3], block = f->pattern.block;
    if (batches * queries * heads == 0) {
        return ND_OK;
    }
    if (d > 256) {
        return nd_error(ND_EVALUE, "%s: q: head dim %lld is above the limit of 256", name,
                        (long long)d);
    }
    int64_t tiles_of_block = cpu_ceil_div(block, ATTENTION_QUERIES);
    int64_t tiles = f->pattern.blocks * tiles_of_block, tasks = tiles * batches * heads;
    size_t each = workspace_floats(d);
    void *scratch;
    ND_TRY(cpu_scratch(device, each * (size_t)cpu_threads() * sizeof(float), &scratch));
    int64_t scores = batches * heads * queries * f->k->shape[1];
#pragma omp parallel num_threads(cpu_threads()) if (scores > CPU_GRAIN)
    {
        workspace w;
        w.scores = (float *)scratch + each * (size_t)omp_get_thread_num();
        w.out = w.scores + ATTENTION_QUERIES * ATTENTION_KEYS;
        w.q = w.out + ATTENTION_QUERIES * d;
        w.k = w.q + ATTENTION_QUERIES * d;
        w.v = w.k + ATTENTION_KEYS * d;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            /* Late queries see most keys: they go first, so that no thread ends with a long one. */
            int64_t tile = tiles - 1 - task / (batches * heads);
            int64_t pair = task % (batches * heads), of_block = tile / tiles_of_block;
            int64_t t0 = of_block * block + tile % tiles_of_block * ATTENTION_QUERIES;
            int64_t end = min_of(queries, (of_block + 1) * block);
            if (t0 < end) {
                forward_tile(f, pair / heads, pair % heads, of_block, t0,
                             min_of(end, t0 + ATTENTION_QUERIES), &w);
            }
        }
    }
    return ND_OK;
}

nd_status cpu_attention_fwd(int device, const attention_fwd_args *args) {
    forward f = {.q = args->q,
                 .k = args->k,
                 .v = args->v,
                 .scale = (float)args->scale,
                 .causal = args->causal != 0,
                 .o = args->o,
                 .lse = args->lse};
    ND_TRY(attention_pattern_make("attention_fwd", "", NULL, NULL, 0, args->q->shape[1],
                                  args->k->shape[1], args->q->shape[2], &f.pattern));
    return attention_forward(device, "attention_fwd", &f);
}

nd_status cpu_block_sparse_attention_fwd(int device, const block_sparse_attention_fwd_args *args) {
    forward f = {.q = args->q,
                 .k = args->k,
                 .v = args->v,
                 .scale = (float)args->scale,
                 .causal = args->causal != 0,
                 .o = args->o,
                 .lse = args->lse};
    ND_TRY(attention_pattern_make("block_sparse_attention_fwd", "offsets", args->offsets,
                                  args->columns, args->block, args->q->shape[1], args->k->shape[1],
                                  args->q->shape[2], &f.pattern));
    return attention_forward(device, "block_sparse_attention_fwd", &f);
}
