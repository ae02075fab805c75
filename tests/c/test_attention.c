/* test_attention.c - dense and block-sparse attention against the plain T x S computation. */
#include <omp.h>

#include "harness.h"

typedef struct {
    int64_t b, t, s, h, d;
    int64_t block; /* 0: dense */
    int64_t groups;
    bool causal;
    nd_dtype dtype;
    bool packed; /* q, k, v are slices of one (B, T, H, 3, D) array */
} attention_case;

/* Block (i, j) of mask g is kept: an irregular pattern with empty rows and columns. */
static bool kept(const attention_case *c, int64_t g, int64_t i, int64_t j) {
    return c->block == 0 || ((i * 7 + j * 3 + g) % 5 < 3 && i % 4 != 3);
}

static void lists(const attention_case *c, bool transposed, nd_array *offsets, nd_array *entries) {
    int64_t ni = cpu_ceil_div(transposed ? c->s : c->t, c->block);
    int64_t nj = cpu_ceil_div(transposed ? c->t : c->s, c->block), total = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) {
            *offsets = make(ND_I32, 2, SHAPE(c->groups, ni + 1), PLAIN);
            *entries = make(ND_I32, 1, SHAPE(total), PLAIN);
        }
        total = 0;
        for (int64_t g = 0; g < c->groups; g++) {
            for (int64_t i = 0; i <= ni; i++) {
                if (pass == 1) {
                    set(offsets, g * (ni + 1) + i, (double)total);
                }
                for (int64_t j = 0; i < ni && j < nj; j++) {
                    if (transposed ? kept(c, g, j, i) : kept(c, g, i, j)) {
                        if (pass == 1) {
                            set(entries, total, (double)j);
                        }
                        total++;
                    }
                }
            }
        }
    }
}

static nd_array slice(const nd_array *packed, int part) {
    nd_array a = {.dtype = packed->dtype, .ndim = 4, .storage = packed->storage};
    static const int axes[] = {0, 1, 2, 4};
    for (int i = 0; i < 4; i++) {
        a.shape[i] = packed->shape[axes[i]];
        a.strides[i] = packed->strides[axes[i]];
    }
    a.data = cpu_at(packed, part * packed->strides[3]);
    nd_storage_retain(a.storage);
    return a;
}

static void test_case(const attention_case *c) {
    char what[128];
    snprintf(what, sizeof what, "attention B%lld T%lld S%lld H%lld D%lld block %lld x%lld %s",
             (long long)c->b, (long long)c->t, (long long)c->s, (long long)c->h, (long long)c->d,
             (long long)c->block, (long long)c->groups, c->causal ? "causal" : "");
    const int64_t q_shape[] = {c->b, c->t, c->h, c->d}, k_shape[] = {c->b, c->s, c->h, c->d};
    nd_array packed = {0}, dpacked = {0}, q, k, v, dq, dk, dv;
    if (c->packed) {
        packed = random_array(c->dtype, 5, SHAPE(c->b, c->t, c->h, 3, c->d), PLAIN);
        dpacked = make(c->dtype, 5, SHAPE(c->b, c->t, c->h, 3, c->d), PLAIN);
        q = slice(&packed, 0), k = slice(&packed, 1), v = slice(&packed, 2);
        dq = slice(&dpacked, 0), dk = slice(&dpacked, 1), dv = slice(&dpacked, 2);
    } else {
        q = random_array(c->dtype, 4, q_shape, PLAIN),
        k = random_array(c->dtype, 4, k_shape, PLAIN);
        v = random_array(c->dtype, 4, k_shape, PLAIN);
        dq = make(c->dtype, 4, q_shape, PLAIN), dk = make(c->dtype, 4, k_shape, PLAIN);
        dv = make(c->dtype, 4, k_shape, PLAIN);
    }
    nd_array dout = random_array(c->dtype, 4, q_shape, PLAIN),
             o = make(c->dtype, 4, q_shape, PLAIN);
    nd_array lse = make(ND_F32, 3, SHAPE(c->b, c->h, c->t), PLAIN);
    double *os = doubles(nd_size(&q)), *lses = doubles(c->b * c->h * c->t);
    double *dqs = doubles(nd_size(&q)), *dks = doubles(nd_size(&k)), *dvs = doubles(nd_size(&k));
    double *p = doubles(c->s), scale = 0.3;
    for (int64_t row = 0; row < c->b * c->h * c->t; row++) {
        int64_t b = row / (c->h * c->t), h = row / c->t % c->h, t = row % c->t;
        int64_t at = ((b * c->t + t) * c->h + h) * c->d;
        double sum = 0, delta = 0;
        for (int64_t s = 0; s < c->s; s++) {
            int64_t key = ((b * c->s + s) * c->h + h) * c->d;
            double score = 0;
            for (int64_t j = 0; j < c->d; j++) {
                score += get(&q, at + j) * get(&k, key + j) * scale;
            }
            bool visible =
                (!c->causal || s <= t + c->s - c->t) &&
                (c->block == 0 || kept(c, c->groups == 1 ? 0 : h, t / c->block, s / c->block));
            p[s] = visible ? exp(score) : 0;
            sum += p[s];
        }
        lses[row] = log(sum);
        if (sum == 0) {
            continue;
        }
        for (int64_t s = 0; s < c->s; s++) {
            int64_t key = ((b * c->s + s) * c->h + h) * c->d;
            p[s] /= sum;
            for (int64_t j = 0; j < c->d; j++) {
                os[at + j] += p[s] * get(&v, key + j);
            }
        }
        for (int64_t j = 0; j < c->d; j++) {
            delta += os[at + j] * get(&dout, at + j);
        }
        for (int64_t s = 0; s < c->s && c->d > 0; s++) {
            int64_t key = ((b * c->s + s) * c->h + h) * c->d;
            double dp = 0;
            for (int64_t j = 0; j < c->d; j++) {
                dp += get(&dout, at + j) * get(&v, key + j);
            }
            double ds = p[s] * (dp - delta) * scale;
            for (int64_t j = 0; j < c->d; j++) {
                dqs[at + j] += ds * get(&k, key + j);
                dks[key + j] += ds * get(&q, at + j);
                dvs[key + j] += p[s] * get(&dout, at + j);
            }
        }
    }
    nd_array offsets = {0}, columns = {0}, offsets_t = {0}, rows = {0};
    if (c->block == 0) {
        check_ok(
            cpu_attention_fwd(0, &(attention_fwd_args){&q, &k, &v, scale, c->causal, &o, &lse}),
            what);
        check_ok(cpu_attention_bwd(0, &(attention_bwd_args){&dout, &q, &k, &v, &o, &lse, scale,
                                                            c->causal, &dq, &dk, &dv}),
                 what);
    } else {
        lists(c, false, &offsets, &columns);
        lists(c, true, &offsets_t, &rows);
        check_ok(cpu_block_sparse_attention_fwd(
                     0, &(block_sparse_attention_fwd_args){&q, &k, &v, &offsets, &columns, c->block,
                                                           scale, c->causal, &o, &lse}),
                 what);
        check_ok(cpu_block_sparse_attention_bwd(
                     0, &(block_sparse_attention_bwd_args){&dout, &q, &k, &v, &o, &lse, &offsets,
                                                           &columns, &offsets_t, &rows, c->block,
                                                           scale, c->causal, &dq, &dk, &dv}),
                 what);
        if (nd_size(&columns) > 0) {
            set(&columns, nd_size(&columns) - 1, 1e6);
            check_refused(
                cpu_block_sparse_attention_fwd(
                    0, &(block_sparse_attention_fwd_args){&q, &k, &v, &offsets, &columns, c->block,
                                                          scale, c->causal, &o, &lse}),
                ND_EVALUE, "lists block 1000000", "a block that is not there");
        }
    }
    /* A 16-bit o enters the backward rounded: its error is that of a sum over D terms. */
    double loose = c->dtype == ND_F32 ? 2e-5 : c->dtype == ND_F16 ? 4e-3 : 4e-2;
    check_close(&o, os, 1e-5, 1e-5, what);
    check_close(&lse, lses, 1e-5, 1e-5, what);
    check_close(&dq, dqs, loose * 4, 1e-4, what);
    check_close(&dk, dks, loose * 4, 1e-4, what);
    check_close(&dv, dvs, loose, 1e-4, what);
    free(os);
    free(lses);
    free(dqs);
    free(dks);
    free(dvs);
    free(p);
    nd_array *all[] = {&q, &k, &v, &dq, &dk, &dv, &dout, &o, &lse};
    for (int i = 0; i < 9; i++) {
        nd_array_clear(all[i]);
    }
    nd_array *optional[] = {&packed, &dpacked, &offsets, &columns, &offsets_t, &rows};
    for (int i = 0; i < 6; i++) {
        if (optional[i]->storage != NULL) {
            nd_array_clear(optional[i]);
        }
    }
}

/* The same bits with 1, 2 and 5 threads. */
static void test_threads(void) {
    const int64_t shape[] = {2, 200, 3, 40};
    nd_array q = random_array(ND_F32, 4, shape, PLAIN), k = random_array(ND_F32, 4, shape, PLAIN);
    nd_array v = random_array(ND_F32, 4, shape, PLAIN), o[3], dq[3], dk[3], dv[3];
    nd_array lse = make(ND_F32, 3, SHAPE(2, 3, 200), PLAIN);
    size_t bytes = 2 * 200 * 3 * 40 * sizeof(float);
    int before = omp_get_max_threads();
    for (int i = 0; i < 3; i++) {
        omp_set_num_threads(i == 2 ? 5 : i + 1);
        nd_array *results[] = {&o[i], &dq[i], &dk[i], &dv[i]};
        for (int j = 0; j < 4; j++) {
            *results[j] = make(ND_F32, 4, shape, PLAIN);
        }
        check_ok(cpu_attention_fwd(0, &(attention_fwd_args){&q, &k, &v, 0.2, 1, &o[i], &lse}),
                 "attention_fwd");
        check_ok(cpu_attention_bwd(0, &(attention_bwd_args){&q, &q, &k, &v, &o[i], &lse, 0.2, 1,
                                                            &dq[i], &dk[i], &dv[i]}),
                 "attention_bwd");
        check(memcmp(o[i].data, o[0].data, bytes) == 0 &&
                  memcmp(dq[i].data, dq[0].data, bytes) == 0 &&
                  memcmp(dk[i].data, dk[0].data, bytes) == 0 &&
                  memcmp(dv[i].data, dv[0].data, bytes) == 0,
              "threads", "change bits");
    }
    omp_set_num_threads(before);
    for (int i = 0; i < 3; i++) {
        nd_array_clear(&o[i]);
        nd_array_clear(&dq[i]);
        nd_array_clear(&dk[i]);
        nd_array_clear(&dv[i]);
    }
    nd_array_clear(&q);
    nd_array_clear(&k);
    nd_array_clear(&v);
    nd_array_clear(&lse);
}

int main(void) {
    static const attention_case cases[] = {
        {1, 1, 1, 1, 1, 0, 1, true, ND_F32, false},
        {2, 31, 31, 2, 16, 0, 1, true, ND_F32, true},
        {1, 257, 257, 2, 31, 0, 1, true, ND_F32, true},
        {1, 257, 257, 1, 8, 0, 1, false, ND_F32, false},
        {1, 5, 140, 2, 32, 0, 1, true, ND_F32, false},
        {1, 140, 5, 2, 32, 0, 1, true, ND_F32, false},
        {1, 66, 66, 1, 256, 0, 1, true, ND_F32, false},
        {0, 3, 3, 1, 4, 0, 1, true, ND_F32, false},
        {1, 0, 3, 1, 4, 0, 1, false, ND_F32, false},
        {1, 3, 0, 1, 4, 0, 1, false, ND_F32, false},
        {2, 70, 70, 2, 16, 0, 1, true, ND_BF16, true},
        {1, 130, 130, 2, 20, 0, 1, true, ND_F16, false},
        {1, 100, 100, 2, 16, 1, 1, true, ND_F32, true},
        {2, 131, 131, 3, 16, 16, 3, true, ND_F32, true},
        {1, 257, 257, 2, 8, 31, 2, false, ND_F32, false},
        {1, 300, 300, 2, 8, 128, 1, true, ND_F32, true},
        {1, 700, 700, 1, 4, 200, 1, true, ND_F32, false},
        {1, 40, 90, 2, 8, 16, 2, true, ND_F32, false},
        {1, 90, 90, 2, 16, 32, 1, true, ND_BF16, true},
        {1, 90, 0, 2, 16, 32, 1, false, ND_F32, false},
    };
    check_ok(cpu_backend.open(0), "open");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_case(&cases[i]);
    }
    test_threads();
    return finish("test_attention");
}
