/* attention_fwd.c - softmax attention, dense and block-sparse, forward.
 *
 *   S = scale Q K^T (masked),  P = exp(S - lse),  o = P V,  lse = log of the row sums of exp(S)
 *
 * A task is a tile of up to 64 queries of one head, or, where heads are many and short, all tiles
 * of a head, so that k and v stay in L2. A tile walks its keys 128 at a time, one query panel at a
 * time: one product for the scores, an online softmax over them (running maximum and sum; when the
 * maximum grows, the accumulated output shrinks), one product that adds V^T P^T. No T x S matrix
 * exists; memory is a tile a thread, and k and v of the heads in work as float32, side by side.
 * Keys after a panel's causal limit cost nothing; blocks that a sparse pattern does not list are
 * never met. Everything in float32; tasks are independent, so threads do not change bits. 4 T S D
 * operations a head, half of that when causal.
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

nd_status attention_order_check(int device, const char *name, const char *field,
                                const nd_array *order, const attention_pattern *p) {
    if (order->shape[1] != p->blocks) {
        return nd_error(ND_EVALUE, "%s: %s: names %lld blocks a mask, but there are %lld", name,
                        field, (long long)order->shape[1], (long long)p->blocks);
    }
    const int32_t *blocks = order->data;
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)p->blocks, &scratch));
    uint8_t *named = scratch;
    for (int64_t i = 0; i < p->groups * p->blocks; i++) {
        if (i % p->blocks == 0) {
            memset(named, 0, (size_t)p->blocks);
        }
        if (blocks[i] < 0 || blocks[i] >= p->blocks || named[blocks[i]]) {
            return nd_error(ND_EVALUE,
                            "%s: %s: names block %d at %lld, but must name each of %lld blocks "
                            "once",
                            name, field, (int)blocks[i], (long long)i, (long long)p->blocks);
        }
        named[blocks[i]] = 1;
    }
    return ND_OK;
}

typedef struct {
    const nd_array *q, *k, *v;
    attention_pattern pattern;
    float scale;
    bool causal, joins;
    nd_array *o, *lse;
    int64_t lse_steps[3]; /* of lse along batch, heads and queries */
} forward;

/* One thread's tiles: scores (KEYS, PANEL), out and q (D, QUERIES), rows (QUERIES, D). */
typedef struct {
    float *scores, *out, *q, *rows;
    float maximum[ATTENTION_QUERIES], sum[ATTENTION_QUERIES];
} workspace;

static size_t workspace_floats(int64_t d) {
    return TILE_PANEL * ATTENTION_KEYS + 3 * ATTENTION_QUERIES * (size_t)d;
}

/* Scores of n keys become exp(score - maximum); each query's running maximum, sum and output
 * follow. All are of one panel. */
static void softmax_panel(float *restrict scores, int64_t n, float *restrict maximum,
                          float *restrict sum, float *restrict out, int64_t d) {
    float top[TILE_PANEL], shrink[TILE_PANEL], part[TILE_PANEL] = {0};
    bool grown = false;
    memcpy(top, maximum, sizeof top);
    for (int64_t key = 0; key < n; key++) {
        const float *row = scores + key * TILE_PANEL;
        for (int64_t i = 0; i < TILE_PANEL; i++) {
            top[i] = row[i] > top[i] ? row[i] : top[i];
        }
    }
    for (int64_t i = 0; i < TILE_PANEL; i++) {
        float old = maximum[i];
        grown |= top[i] != old;
        maximum[i] = top[i];
        top[i] = top[i] == -INFINITY ? 0.0f : top[i]; /* -inf - -inf is not a number */
        shrink[i] = nd_exp_softmax(old - top[i]);
    }
    for (int64_t key = 0; key < n; key++) {
        float *row = scores + key * TILE_PANEL;
        for (int64_t i = 0; i < TILE_PANEL; i++) {
            row[i] = nd_exp_softmax(row[i] - top[i]);
            part[i] += row[i];
        }
    }
    for (int64_t i = 0; i < TILE_PANEL; i++) {
        sum[i] = sum[i] * shrink[i] + part[i];
    }
    if (grown) {
        for (int64_t j = 0; j < d; j++) {
            for (int64_t i = 0; i < TILE_PANEL; i++) {
                out[j * ATTENTION_QUERIES + i] *= shrink[i];
            }
        }
    }
}

/* Rows of o and their lse, over some keys, become those over these and the keys whose results lie
 * in `before`, with an lse of `before_lse`. */
static void join_row(float *restrict o, const float *restrict before, int64_t d, float *lse,
                     float before_lse) {
    float top = nd_max(*lse, before_lse);
    if (before_lse == -INFINITY) {
        return;
    }
    float mine = nd_exp(*lse - top), theirs = nd_exp(before_lse - top), sum = mine + theirs;
    for (int64_t j = 0; j < d; j++) {
        o[j] = (mine * o[j] + theirs * before[j]) / sum;
    }
    *lse = top + nd_log(sum);
}

/* k, v: the head's, (S, D). */
static void forward_tile(const forward *f, int64_t batch, int64_t head, const float *k,
                         const float *v, int64_t block, int64_t t0, int64_t t1, workspace *w) {
    int64_t d = f->q->shape[3], queries = f->q->shape[1], keys = f->k->shape[1];
    int64_t rows = t1 - t0, s0, s1;
    attention_rows q_rows = attention_head(f->q, batch, head);
    attention_load(&q_rows, t0, rows, w->rows, d);
    attention_columns(w->rows, rows, d, d, f->scale, w->q);
    memset(w->out, 0, (size_t)(ATTENTION_QUERIES * d) * sizeof(float));
    for (int64_t i = 0; i < ATTENTION_QUERIES; i++) {
        w->maximum[i] = -INFINITY;
        w->sum[i] = 0;
    }
    int64_t last = attention_visible(f->causal, t1, queries, keys, 0, keys);
    attention_walk walk = attention_walk_start(&f->pattern, head, block, 0, last, ATTENTION_KEYS);
    while (attention_walk_next(&walk, &s0, &s1)) {
        for (int64_t at = 0; at < rows; at += TILE_PANEL) {
            int64_t end = min_of(t0 + at + TILE_PANEL, t1);
            int64_t n = attention_visible(f->causal, end, queries, keys, s0, s1 - s0);
            if (n == 0) {
                continue;
            }
            tile_product(n, TILE_PANEL, d, k + s0 * d, d, 1, w->q + at, ATTENTION_QUERIES,
                         w->scores, TILE_PANEL, false);
            attention_hide(f->causal, t0 + at, queries, keys, s0, n, w->scores, TILE_PANEL);
            softmax_panel(w->scores, n, w->maximum + at, w->sum + at, w->out + at, d);
            tile_product(d, TILE_PANEL, n, v + s0 * d, 1, d, w->scores, TILE_PANEL, w->out + at,
                         ATTENTION_QUERIES, true);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        bool empty = w->maximum[i] == -INFINITY && w->sum[i] == 0;
        w->maximum[i] = empty ? -INFINITY : w->maximum[i] + nd_log(w->sum[i]);
        w->sum[i] = empty ? 0.0f : 1.0f / w->sum[i];
    }
    attention_rows_of(w->out, rows, d, w->sum, w->rows);
    attention_rows o_rows = attention_head(f->o, batch, head);
    if (f->joins) {
        attention_load(&o_rows, t0, rows, w->out, d);
    }
    float *lse = (float *)f->lse->data + batch * f->lse_steps[0] + head * f->lse_steps[1];
    for (int64_t i = 0; i < rows; i++) {
        float *to = lse + (t0 + i) * f->lse_steps[2];
        if (f->joins) {
            join_row(w->rows + i * d, w->out + i * d, d, &w->maximum[i], *to);
        }
        *to = w->maximum[i];
    }
    attention_store(&o_rows, t0, rows, w->rows, d);
}

static int64_t tiles_of(int64_t block) { return cpu_ceil_div(block, ATTENTION_QUERIES); }

/* The tile of that number, of a head that lay_out left there. */
static void numbered_tile(const forward *f, int64_t pair, int64_t tile, const float *head,
                          workspace *w) {
    const float *values = head + f->k->shape[1] * f->q->shape[3];
    int64_t heads = f->q->shape[2], tiles_of_block = tiles_of(f->pattern.block);
    int64_t block = tile / tiles_of_block, start = block * f->pattern.block;
    int64_t t0 = start + tile % tiles_of_block * ATTENTION_QUERIES;
    int64_t end = min_of(f->q->shape[1], start + f->pattern.block);
    if (t0 < end) {
        forward_tile(f, pair / heads, pair % heads, head, values, block, t0,
                     min_of(end, t0 + ATTENTION_QUERIES), w);
    }
}

/* Rows [s0, s0 + n) of k and v of a head, laid out: each (S, D), v after k. */
static void lay_out(const forward *f, int64_t pair, int64_t s0, int64_t n, float *values) {
    int64_t heads = f->q->shape[2], keys = f->k->shape[1], d = f->q->shape[3];
    attention_rows k = attention_head(f->k, pair / heads, pair % heads);
    attention_rows v = attention_head(f->v, pair / heads, pair % heads);
    attention_load(&k, s0, n, values + s0 * d, d);
    attention_load(&v, s0, n, values + (keys + s0) * d, d);
}

/* Bytes of k and v that are laid out before the tiles of their heads begin. */
static const int64_t GROUP_BYTES = 32 << 20;
/* A head's that the second cache holds beside all else. */
static const int64_t HEAD_BYTES = 512 << 10;

static nd_status attention_forward(int device, const char *name, const forward *f) {
    int64_t queries = f->q->shape[1], heads = f->q->shape[2], d = f->q->shape[3];
    int64_t pairs = f->q->shape[0] * heads, keys = f->k->shape[1], threads = cpu_threads();
    if (pairs * queries == 0) {
        return ND_OK;
    }
    ND_TRY(attention_check(name, keys, d));
    int64_t tiles = f->pattern.blocks * tiles_of(f->pattern.block);
    int64_t parts = cpu_ceil_div(keys, ATTENTION_KEYS);
    int64_t head_floats = 2 * keys * d, head_bytes = head_floats * (int64_t)sizeof(float);
    /* With enough short heads a thread takes whole ones, and some that lie side by side. */
    bool by_heads = head_bytes <= HEAD_BYTES && pairs >= 4 * threads;
    int64_t some = max_of(1, pairs / (8 * threads));
    int64_t group = max_of(1, min_of(pairs, GROUP_BYTES / max_of(head_bytes, 1)));
    int64_t laid_out = by_heads ? threads : group;
    size_t each = (workspace_floats(d) + 15) / 16 * 16;
    void *scratch;
    ND_TRY(cpu_scratch(device,
                       each * (size_t)threads * sizeof(float) + (size_t)(laid_out * head_bytes),
                       &scratch));
    float *values = (float *)scratch + each * (size_t)threads;
#pragma omp parallel num_threads(cpu_threads()) if (pairs * queries * keys > CPU_GRAIN)
    {
        workspace w;
        w.scores = (float *)scratch + each * (size_t)omp_get_thread_num();
        w.out = w.scores + TILE_PANEL * ATTENTION_KEYS;
        w.q = w.out + ATTENTION_QUERIES * d;
        w.rows = w.q + ATTENTION_QUERIES * d;
        for (int64_t first = 0; first < pairs && !by_heads; first += group) {
            int64_t count = min_of(group, pairs - first);
#pragma omp for schedule(static)
            for (int64_t task = 0; task < count * parts; task++) {
                int64_t s0 = task % parts * ATTENTION_KEYS;
                lay_out(f, first + task / parts, s0, min_of(ATTENTION_KEYS, keys - s0),
                        values + task / parts * head_floats);
            }
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tiles * count; task++) {
                /* Late queries see most keys: they go first, so that no thread ends with a long
                 * one. */
                numbered_tile(f, first + task % count, tiles - 1 - task / count,
                              values + task % count * head_floats, &w);
            }
        }
        float *head = values + omp_get_thread_num() * head_floats;
#pragma omp for schedule(dynamic, some)
        for (int64_t pair = 0; pair < (by_heads ? pairs : 0); pair++) {
            lay_out(f, pair, 0, keys, head);
            for (int64_t tile = 0; tile < tiles; tile++) {
                numbered_tile(f, pair, tile, head, &w);
            }
        }
    }
    return ND_OK;
}

/* The operands of each op. heads, queries: axes of its lse. */
#define OPERANDS(a, heads, queries)                                                                \
    .q = (a)->q, .k = (a)->k, .v = (a)->v, .scale = (float)(a)->scale, .causal = (a)->causal != 0, \
    .o = (a)->o, .lse = (a)->lse,                                                                  \
    .lse_steps = {(a)->lse->strides[0], (a)->lse->strides[heads], (a)->lse->strides[queries]}

static nd_status dense_forward(int device, const char *op, forward *f) {
    ND_TRY(attention_pattern_make(op, "", NULL, NULL, 0, f->q->shape[1], f->k->shape[1],
                                  f->q->shape[2], &f->pattern));
    return attention_forward(device, op, f);
}

nd_status cpu_attention_fwd(int device, const attention_fwd_args *a) {
    return dense_forward(device, "attention_fwd", &(forward){OPERANDS(a, 1, 2)});
}

nd_status cpu_attention_part_fwd(int device, const attention_part_fwd_args *a) {
    return dense_forward(device, "attention_part_fwd",
                         &(forward){OPERANDS(a, 2, 1), .joins = a->joins != 0});
}

nd_status cpu_block_sparse_attention_fwd(int device, const block_sparse_attention_fwd_args *a) {
    forward f = {OPERANDS(a, 1, 2)};
    const char *op = "block_sparse_attention_fwd";
    ND_TRY(attention_pattern_make(op, "offsets", a->offsets, a->columns, a->block, a->q->shape[1],
                                  a->k->shape[1], a->q->shape[2], &f.pattern));
    ND_TRY(attention_order_check(device, op, "order", a->order, &f.pattern));
    return attention_forward(device, op, &f);
}
