/* test_structured.c - products, normalisation, rotary, embedding, cross-entropy and the optimizer.
 *  */
#include <omp.h>

#include "harness.h"

static const nd_dtype float_dtypes[] = {ND_F32, ND_BF16, ND_F16};

static void test_matmul(void) {
    static const int64_t sizes[][4] = {{1, 1, 1, 1},   {2, 31, 5, 257},   {3, 257, 31, 1},
                                       {1, 1, 600, 9}, {1, 130, 0, 3},    {0, 3, 4, 5},
                                       {2, 0, 4, 5},   {1, 33, 1100, 40}, {1, 150, 90, 200}};
    static const layout layouts[] = {PLAIN, SWAPPED, PADDED, REPEATED};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int f = 0; f < 3; f++) {
            for (int pair = 0; pair < 16; pair++) {
                int64_t b = sizes[s][0], m = sizes[s][1], k = sizes[s][2], n = sizes[s][3];
                nd_array x = random_array(float_dtypes[f], 3, SHAPE(b, m, k), layouts[pair / 4]);
                nd_array y = random_array(float_dtypes[f], 3, SHAPE(b, k, n), layouts[pair % 4]);
                nd_array c = make(float_dtypes[f], 3, SHAPE(b, m, n), PLAIN);
                nd_array sum = random_array(ND_F32, 3, SHAPE(b, m, n), PLAIN);
                double *want = doubles(b * m * n), *want_sum = doubles(b * m * n);
                for (int64_t i = 0; i < b * m * n; i++) {
                    int64_t row = i / n, batch = row / (m > 0 ? m : 1);
                    for (int64_t p = 0; p < k; p++) {
                        want[i] += get(&x, row * k + p) * get(&y, (batch * k + p) * n + i % n);
                    }
                    want_sum[i] = want[i] + get(&sum, i);
                }
                check_ok(cpu_matmul(0, &(matmul_args){&x, &y, &c}), "matmul");
                check_close(&c, want, 1e-4, 1e-5, "matmul");
                check_ok(cpu_matmul_acc(0, &(matmul_acc_args){&x, &y, &sum}), "matmul_acc");
                check_close(&sum, want_sum, 1e-4, 1e-5, "matmul_acc");
                free(want);
                free(want_sum);
                nd_array_clear(&x);
                nd_array_clear(&y);
                nd_array_clear(&c);
                nd_array_clear(&sum);
            }
        }
    }
}

static void test_linear(void) {
    static const int64_t sizes[][3] = {{1, 1, 1}, {31, 257, 5},   {257, 31, 1100},
                                       {0, 3, 4}, {600, 64, 130}, {5, 0, 3}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int f = 0; f < 3; f++) {
            int64_t n = sizes[s][0], k = sizes[s][1], m = sizes[s][2];
            nd_dtype dtype = float_dtypes[f];
            nd_array x = random_array(dtype, 2, SHAPE(n, k), PLAIN);
            nd_array w = random_array(dtype, 2, SHAPE(k, m), PLAIN);
            nd_array b = random_array(dtype, 1, SHAPE(m), PLAIN);
            nd_array y = make(dtype, 2, SHAPE(n, m), PLAIN);
            nd_array db = random_array(ND_F32, 1, SHAPE(m), PLAIN);
            double *plain = doubles(n * m), *biased = doubles(n * m), *sums = doubles(m);
            for (int64_t i = 0; i < n * m; i++) {
                for (int64_t p = 0; p < k; p++) {
                    plain[i] += get(&x, i / m * k + p) * get(&w, p * m + i % m);
                }
                biased[i] = plain[i] + get(&b, i % m);
            }
            check_ok(cpu_linear_fwd(0, &(linear_fwd_args){&x, &w, NULL, &y}), "linear_fwd");
            check_close(&y, plain, 1e-4, 1e-5, "linear_fwd without bias");
            check_ok(cpu_linear_fwd(0, &(linear_fwd_args){&x, &w, &b, &y}), "linear_fwd");
            check_close(&y, biased, 1e-4, 1e-5, "linear_fwd");
            for (int64_t j = 0; j < m; j++) {
                sums[j] = get(&db, j);
                for (int64_t i = 0; i < n; i++) {
                    sums[j] += get(&y, i * m + j);
                }
            }
            check_ok(cpu_bias_bwd(0, &(bias_bwd_args){&y, &db}), "bias_bwd");
            check_close(&db, sums, 1e-3, 1e-5, "bias_bwd");
            free(plain);
            free(biased);
            free(sums);
            nd_array_clear(&x);
            nd_array_clear(&w);
            nd_array_clear(&b);
            nd_array_clear(&y);
            nd_array_clear(&db);
        }
    }
}

static void test_layernorm(void) {
    static const int64_t sizes[][2] = {{1, 1}, {31, 257}, {257, 31}, {0, 8}, {3, 5000}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int f = 0; f < 3; f++) {
            int64_t n = sizes[s][0], c = sizes[s][1];
            nd_dtype dtype = float_dtypes[f];
            nd_array x = random_array(dtype, 2, SHAPE(n, c), PLAIN);
            nd_array dy = random_array(dtype, 2, SHAPE(n, c), PLAIN);
            nd_array w = random_array(dtype, 1, SHAPE(c), PLAIN);
            nd_array b = random_array(dtype, 1, SHAPE(c), PLAIN);
            nd_array y = make(dtype, 2, SHAPE(n, c), PLAIN),
                     dx = make(dtype, 2, SHAPE(n, c), PLAIN);
            nd_array mean = make(ND_F32, 1, SHAPE(n), PLAIN),
                     rstd = make(ND_F32, 1, SHAPE(n), PLAIN);
            nd_array dw = random_array(ND_F32, 1, SHAPE(c), PLAIN),
                     db = random_array(ND_F32, 1, SHAPE(c), PLAIN);
            double *ys = doubles(n * c), *dxs = doubles(n * c), *dws = doubles(c),
                   *dbs = doubles(c);
            for (int64_t j = 0; j < c; j++) {
                dws[j] = get(&dw, j);
                dbs[j] = get(&db, j);
            }
            for (int64_t i = 0; i < n; i++) {
                double m = 0, var = 0, g_sum = 0, g_xhat = 0;
                for (int64_t j = 0; j < c; j++) {
                    m += get(&x, i * c + j) / (double)c;
                }
                for (int64_t j = 0; j < c; j++) {
                    var += pow(get(&x, i * c + j) - m, 2) / (double)c;
                }
                double r = 1 / sqrt(var + 1e-5);
                for (int64_t j = 0; j < c; j++) {
                    double xhat = (get(&x, i * c + j) - m) * r, d = get(&dy, i * c + j);
                    ys[i * c + j] = xhat * get(&w, j) + get(&b, j);
                    g_sum += d * get(&w, j) / (double)c;
                    g_xhat += d * get(&w, j) * xhat / (double)c;
                    dws[j] += d * xhat;
                    dbs[j] += d;
                }
                for (int64_t j = 0; j < c; j++) {
                    double xhat = (get(&x, i * c + j) - m) * r;
                    dxs[i * c + j] = r * (get(&dy, i * c + j) * get(&w, j) - g_sum - xhat * g_xhat);
                }
            }
            check_ok(
                cpu_layernorm_fwd(0, &(layernorm_fwd_args){&x, &w, &b, 1e-5, &y, &mean, &rstd}),
                "layernorm_fwd");
            check_close(&y, ys, 2e-5, 1e-5, "layernorm_fwd");
            check_ok(cpu_layernorm_bwd(
                         0, &(layernorm_bwd_args){&dy, &x, &w, &mean, &rstd, &dw, &db, &dx}),
                     "layernorm_bwd");
            check_close(&dx, dxs, 2e-4, 1e-4, "layernorm_bwd dx");
            check_close(&dw, dws, 2e-4, 1e-4, "layernorm_bwd dw");
            check_close(&db, dbs, 2e-4, 1e-4, "layernorm_bwd db");
            free(ys);
            free(dxs);
            free(dws);
            free(dbs);
            nd_array *all[] = {&x, &dy, &w, &b, &y, &dx, &mean, &rstd, &dw, &db};
            for (int i = 0; i < 10; i++) {
                nd_array_clear(all[i]);
            }
        }
    }
}

static void test_rotary(void) {
    static const int64_t sizes[][6] = {{2, 31, 3, 3, 16, 2},
                                       {1, 257, 2, 1, 31, 15},
                                       {1, 1, 1, 1, 2, 1},
                                       {0, 4, 1, 3, 8, 2},
                                       {1, 3, 2, 3, 5, 0}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int f = 0; f < 3; f++) {
            const int64_t *z = sizes[s];
            int64_t d = z[4], r = z[5], parts = z[3] > 1 ? 2 : 1;
            nd_array x = random_array(float_dtypes[f], 5, z, PLAIN),
                     y = make(float_dtypes[f], 5, z, PLAIN);
            nd_array cosines = random_array(ND_F32, 2, SHAPE(z[1], r), PLAIN);
            nd_array sines = random_array(ND_F32, 2, SHAPE(z[1], r), PLAIN);
            double *want = doubles(nd_size(&x));
            for (int64_t i = 0; i < nd_size(&x); i++) {
                int64_t j = i % d, slice = i / d % z[3], t = i / (d * z[3] * z[2]) % z[1];
                want[i] = get(&x, i);
                if (slice < parts && j < 2 * r) {
                    double c = get(&cosines, t * r + j % r), sn = -get(&sines, t * r + j % r);
                    want[i] = j < r ? get(&x, i) * c - get(&x, i + r) * sn
                                    : get(&x, i) * c + get(&x, i - r) * sn;
                }
            }
            check_ok(cpu_rotary(0, &(rotary_args){&x, &cosines, &sines, parts, -1, &y}), "rotary");
            check_close(&y, want, 1e-5, 1e-5, "rotary");
            check_refused(cpu_rotary(0, &(rotary_args){&x, &cosines, &sines, 9, 1, &y}), ND_EVALUE,
                          "parts", "rotary parts");
            free(want);
            nd_array_clear(&x);
            nd_array_clear(&y);
            nd_array_clear(&cosines);
            nd_array_clear(&sines);
        }
    }
}

static void test_embedding(void) {
    for (int f = 0; f < 3; f++) {
        for (int64_t n = 0; n <= 2000; n = n * 9 + 1) {
            int64_t v = 11, c = 97;
            nd_array ids = make(ND_I32, 1, SHAPE(n), PLAIN);
            nd_array w = random_array(float_dtypes[f], 2, SHAPE(v, c), PLAIN);
            nd_array y = make(float_dtypes[f], 2, SHAPE(n, c), PLAIN);
            nd_array dw = random_array(ND_F32, 2, SHAPE(v, c), PLAIN);
            double *ys = doubles(n * c), *dws = doubles(v * c);
            for (int64_t i = 0; i < v * c; i++) {
                dws[i] = get(&dw, i);
            }
            for (int64_t i = 0; i < n; i++) {
                int64_t id = (i * 7) % v;
                set(&ids, i, (double)id);
                for (int64_t j = 0; j < c; j++) {
                    ys[i * c + j] = get(&w, id * c + j);
                    dws[id * c + j] += ys[i * c + j];
                }
            }
            check_ok(cpu_embedding_fwd(0, &(embedding_fwd_args){&ids, &w, &y}), "embedding_fwd");
            check_close(&y, ys, 0, 0, "embedding_fwd");
            check_ok(cpu_embedding_bwd(0, &(embedding_bwd_args){&ids, &y, &dw}), "embedding_bwd");
            check_close(&dw, dws, 1e-3, 1e-5, "embedding_bwd");
            if (n > 0) {
                set(&ids, n - 1, 11);
                check_refused(cpu_embedding_fwd(0, &(embedding_fwd_args){&ids, &w, &y}), ND_EVALUE,
                              "token id 11", "id too large");
                set(&ids, n - 1, -1);
                check_refused(cpu_embedding_bwd(0, &(embedding_bwd_args){&ids, &y, &dw}), ND_EVALUE,
                              "token id -1", "negative id");
            }
            free(ys);
            free(dws);
            nd_array_clear(&ids);
            nd_array_clear(&w);
            nd_array_clear(&y);
            nd_array_clear(&dw);
        }
    }
}

static void test_cross_entropy(void) {
    static const int64_t sizes[][2] = {{1, 1}, {31, 257}, {257, 31}, {0, 5}, {3, 9001}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (int f = 0; f < 3; f++) {
            for (int ignore = 0; ignore < 3; ignore++) { /* none, some, all */
                int64_t n = sizes[s][0], v = sizes[s][1], valid = 0;
                nd_array x = make(float_dtypes[f], 2, SHAPE(n, v), PLAIN),
                         dx = make(float_dtypes[f], 2, SHAPE(n, v), PLAIN);
                randomise(&x, 20);
                nd_array targets = make(ND_I32, 1, SHAPE(n), PLAIN),
                         losses = make(ND_F32, 1, SHAPE(n), PLAIN),
                         lse = make(ND_F32, 1, SHAPE(n), PLAIN);
                nd_array loss = make(ND_F32, 0, SHAPE(0), PLAIN),
                         count = make(ND_F32, 0, SHAPE(0), PLAIN),
                         dloss = make(ND_F32, 0, SHAPE(0), PLAIN);
                double *want = doubles(n), *dxs = doubles(n * v), mean = 0;
                for (int64_t i = 0; i < n; i++) {
                    set(&targets, i,
                        ignore == 2 || (ignore == 1 && i % 3 == 0) ? -100 : (double)(i * 13 % v));
                    valid += get(&targets, i) >= 0;
                }
                for (int64_t i = 0; i < n; i++) {
                    double sum = 0;
                    int64_t target = (int64_t)get(&targets, i);
                    for (int64_t j = 0; j < v; j++) {
                        sum += exp(get(&x, i * v + j));
                    }
                    if (target >= 0) {
                        want[i] = log(sum) - get(&x, i * v + target);
                        mean += want[i] / (double)valid;
                        for (int64_t j = 0; j < v; j++) {
                            dxs[i * v + j] = 1.5 * (exp(get(&x, i * v + j)) / sum - (j == target)) /
                                             (double)valid;
                        }
                    }
                }
                set(&dloss, 0, 1.5);
                check_ok(cpu_cross_entropy_fwd(0, &(cross_entropy_fwd_args){&x, &targets, &losses,
                                                                            &lse, &loss, &count}),
                         "cross_entropy_fwd");
                check_close(&losses, want, 2e-5, 1e-5, "losses");
                check_close(&loss, &mean, 2e-5, 1e-5, "loss");
                check(get(&count, 0) == (double)valid, "count", "is wrong");
                check_ok(cpu_cross_entropy_bwd(
                             0, &(cross_entropy_bwd_args){&x, &targets, &lse, &count, &dloss, &dx}),
                         "cross_entropy_bwd");
                check_close(&dx, dxs, f == 2 ? 1e-7 : 1e-9, 1e-4, "cross_entropy_bwd");
                if (n > 0) {
                    set(&targets, 0, (double)v);
                    check_refused(
                        cpu_cross_entropy_fwd(0, &(cross_entropy_fwd_args){&x, &targets, &losses,
                                                                           &lse, &loss, &count}),
                        ND_EVALUE, "targets", "target too large");
                }
                free(want);
                free(dxs);
                nd_array *all[] = {&x, &dx, &targets, &losses, &lse, &loss, &count, &dloss};
                for (int i = 0; i < 8; i++) {
                    nd_array_clear(all[i]);
                }
            }
        }
    }
}

static void test_optimizer(void) {
    for (int f = 0; f < 3; f++) {
        for (int64_t n = 0; n < 150000; n = n * 371 + 1) {
            nd_array p = random_array(ND_F32, 1, SHAPE(n), PLAIN),
                     g = random_array(ND_F32, 1, SHAPE(n), PLAIN);
            nd_array m = random_array(ND_F32, 1, SHAPE(n), PLAIN),
                     v = random_array(ND_F32, 1, SHAPE(n), PLAIN);
            nd_array low = random_array(float_dtypes[f], 1, SHAPE(n), PLAIN);
            nd_array norm = make(ND_F32, 0, SHAPE(0), PLAIN),
                     scale = make(ND_F32, 0, SHAPE(0), PLAIN);
            double squares = 0, *want = doubles(n);
            for (int64_t i = 0; i < n; i++) {
                set(&v, i, fabs(get(&v, i)));
                squares += get(&g, i) * get(&g, i);
            }
            double factor = fmin(1, 0.5 / (sqrt(squares) + 1e-6)), length = sqrt(squares);
            check_ok(cpu_grad_norm(0, &(grad_norm_args){&g, 0, &norm, &scale}), "grad_norm");
            check(get(&scale, 0) == 1, "grad_norm", "scales without a maximum");
            check_ok(cpu_grad_norm(0, &(grad_norm_args){&g, 0.5, &norm, &scale}), "grad_norm");
            check_close(&norm, &length, 0, 1e-6, "norm");
            check_close(&scale, &factor, 0, 1e-6, "scale");
            for (int64_t i = 0; i < n; i++) {
                double gradient = get(&g, i) * factor;
                double m1 = 0.9 * get(&m, i) + 0.1 * gradient;
                double v1 = 0.95 * get(&v, i) + 0.05 * gradient * gradient;
                want[i] = get(&p, i) * (1 - 0.01 * 0.1) -
                          0.01 * (m1 / (1 - pow(0.9, 3))) / (sqrt(v1 / (1 - pow(0.95, 3))) + 1e-8);
            }
            adamw_args step = {&p, &g, &m, &v, &low, &scale, 0.01, 0.9, 0.95, 1e-8, 0.1, 3};
            check_ok(cpu_adamw(0, &step), "adamw");
            check_close(&p, want, 1e-5, 1e-5, "adamw p");
            check_close(&low, want, 1e-5, 1e-5, "adamw p_low");
            if (n > 0) {
                for (int64_t i = 0; i < n; i++) {
                    want[i] = get(&p, i);
                }
                set(&g, n - 1, INFINITY);
                check_ok(cpu_grad_norm(0, &(grad_norm_args){&g, 0.5, &norm, &scale}), "grad_norm");
                check(!isfinite(get(&scale, 0)), "grad_norm", "hides a broken gradient");
                check_ok(cpu_adamw(0, &step), "adamw");
                check_close(&p, want, 0, 0, "adamw after a broken gradient");
            }
            free(want);
            nd_array *all[] = {&p, &g, &m, &v, &low, &norm, &scale};
            for (int i = 0; i < 7; i++) {
                nd_array_clear(all[i]);
            }
        }
    }
}

/* One op with partial sums and one product, with 1, 2 and 5 threads: the same bits. */
static void test_threads(void) {
    nd_array x = random_array(ND_F32, 2, SHAPE(1000, 130), PLAIN);
    nd_array w = random_array(ND_F32, 2, SHAPE(130, 300), PLAIN);
    nd_array y[3], db[3];
    int before = omp_get_max_threads();
    for (int i = 0; i < 3; i++) {
        omp_set_num_threads(i == 2 ? 5 : i + 1);
        y[i] = make(ND_F32, 2, SHAPE(1000, 300), PLAIN);
        db[i] = zeros(ND_F32, 1, SHAPE(300));
        check_ok(cpu_linear_fwd(0, &(linear_fwd_args){&x, &w, NULL, &y[i]}), "linear_fwd");
        check_ok(cpu_bias_bwd(0, &(bias_bwd_args){&y[i], &db[i]}), "bias_bwd");
        for (int64_t sample = 0; sample < 1000 * 300; sample += 997) {
            double want = 0;
            for (int64_t k = 0; k < 130; k++) {
                want += get(&x, sample / 300 * 130 + k) * get(&w, k * 300 + sample % 300);
            }
            check(fabs(get(&y[i], sample) - want) < 1e-4, "linear_fwd in tiles", "is wrong");
        }
        check(memcmp(y[i].data, y[0].data, 1000 * 300 * 4) == 0 &&
                  memcmp(db[i].data, db[0].data, 300 * 4) == 0,
              "threads", "change bits");
    }
    omp_set_num_threads(before);
    for (int i = 0; i < 3; i++) {
        nd_array_clear(&y[i]);
        nd_array_clear(&db[i]);
    }
    nd_array_clear(&x);
    nd_array_clear(&w);
}

static void test_backend(void) {
    nd_memory_stats before, during, after;
    nd_properties properties;
    cpu_backend.memory_stats(0, &before);
    for (int64_t n = 0; n < 60000000; n = n * 7 + 1) {
        nd_array a;
        check_ok(nd_array_new(&device, ND_U8, 1, &n, &a), "allocate");
        cpu_backend.memory_stats(0, &during);
        check(during.live_bytes - before.live_bytes == n && (uintptr_t)a.data % 64 == 0, "allocate",
              "counts or aligns wrongly");
        if (n > 0) {
            memset(a.data, 1, (size_t)n);
        }
        nd_array_clear(&a);
    }
    check_ok(cpu_backend.empty_cache(0), "empty_cache");
    cpu_backend.memory_stats(0, &after);
    check(after.live_bytes == before.live_bytes && after.reserved_bytes == before.reserved_bytes,
          "memory", "is not given back");
    void *memory;
    check_refused(cpu_backend.allocate(0, (size_t)1 << 62, &memory), ND_EMEMORY, "any machine",
                  "an absurd allocation");
    check_ok(cpu_backend.properties(0, &properties), "properties");
    check(properties.processors > 0 && properties.detail[0] != '\0', "properties", "are empty");
    check_refused(cpu_backend.open(3), ND_EVALUE, "index 0", "a CPU that is not there");
    nd_event *from, *to;
    double elapsed = -1;
    check_ok(cpu_backend.event_new(0, &from), "event");
    check_ok(cpu_backend.event_new(0, &to), "event");
    check_ok(cpu_backend.event_record(0, from), "event");
    check_ok(cpu_backend.event_record(0, to), "event");
    check_ok(cpu_backend.event_elapsed(0, from, to, &elapsed), "event");
    check(elapsed >= 0 && elapsed < 1000, "event", "tells a wrong time");
    cpu_backend.event_free(0, from);
    cpu_backend.event_free(0, to);
}

int main(void) {
    check_ok(cpu_backend.open(0), "open");
    test_backend();
    test_matmul();
    test_linear();
    test_layernorm();
    test_rotary();
    test_embedding();
    test_cross_entropy();
    test_optimizer();
    test_threads();
    return finish("test_structured");
}
