/* cpu_ops.c - the CPU backend without Python: structured ops on odd sizes beside plain loops in double.
 *
 * Built from the C files of csrc and csrc/cpu alone, so that it also runs where no Python is, as under
 * qemu-user after a cross-compiler. Prints the largest error of each op; exits with 1 where one is above
 * 2e-5 of the largest value.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../csrc/cpu/cpu.h"

static int failures;
static uint64_t seed = 1;

static double uniform(void) { /* xorshift*, in [-1, 1) */
    seed ^= seed >> 12, seed ^= seed << 25, seed ^= seed >> 27;
    return (double)(seed * 0x2545f4914f6cdd1dULL >> 11) * 0x1p-52 - 1.0;
}

/* A contiguous float32 array of random numbers; a shape ends with its first 0. */
static nd_array array(int64_t a, int64_t b, int64_t c, int64_t d) {
    nd_array x = {.dtype = ND_F32, .shape = {a, b, c, d}};
    while (x.ndim < 4 && x.shape[x.ndim] > 0) {
        x.ndim++;
    }
    nd_contiguous_strides(x.ndim, x.shape, x.strides);
    float *data = malloc((size_t)nd_size(&x) * sizeof *data);
    for (int64_t i = 0; i < nd_size(&x); i++) {
        data[i] = (float)uniform();
    }
    x.data = data;
    return x;
}

static double at(const nd_array *x, int64_t i) { return ((const float *)x->data)[i]; }

static void check(const char *what, nd_status status, const nd_array *got, const double *wanted) {
    double error = 0, largest = 1e-30;
    for (int64_t i = 0; i < nd_size(got); i++) {
        double off = fabs(at(got, i) - wanted[i]);
        error = off <= error ? error : off; /* a NaN stays */
        largest = fmax(largest, fabs(wanted[i]));
    }
    bool good = status == ND_OK && error <= 2e-5 * largest;
    printf("%-24s %.2g of %.2g%s\n", what, error, largest, good ? "" : "  FAILED");
    failures += !good;
}

static void products(int64_t m, int64_t k, int64_t n) {
    nd_array a = array(1, m, k, 0), b = array(1, k, n, 0), c = array(1, m, n, 0);
    double *wanted = calloc((size_t)(m * n), sizeof *wanted);
    for (int64_t i = 0; i < m * n; i++) {
        for (int64_t l = 0; l < k; l++) {
            wanted[i] += at(&a, i / n * k + l) * at(&b, l * n + i % n);
        }
    }
    check("matmul", cpu_matmul(0, &(matmul_args){.a = &a, .b = &b, .c = &c}), &c, wanted);
    free(wanted), free(a.data), free(b.data), free(c.data);
}

/* Causal attention of one sequence and its gradients. */
static void attention(int64_t t, int64_t h, int64_t d) {
    enum { Q, K, V, DO, O, DQ, DK, DV, ALL };
    nd_array x[ALL], lse = array(1, h, t, 0);
    double *wanted[ALL], scale = 1 / sqrt((double)d);
    for (int i = 0; i < ALL; i++) {
        x[i] = array(1, t, h, d);
        wanted[i] = calloc((size_t)(t * h * d), sizeof *wanted[i]);
    }
#define OF(i, time, head, dim) (((time) * h + (head)) * d + (dim))
    double *p = malloc((size_t)t * sizeof *p), *dp = malloc((size_t)t * sizeof *dp);
    for (int64_t head = 0; head < h; head++) {
        for (int64_t i = 0; i < t; i++) {
            double sum = 0, delta = 0;
            for (int64_t j = 0; j <= i; j++) {
                double score = dp[j] = 0;
                for (int64_t e = 0; e < d; e++) {
                    score += at(&x[Q], OF(Q, i, head, e)) * at(&x[K], OF(K, j, head, e)) * scale;
                    dp[j] += at(&x[DO], OF(DO, i, head, e)) * at(&x[V], OF(V, j, head, e));
                }
                sum += p[j] = exp(score);
            }
            for (int64_t j = 0; j <= i; j++) {
                delta += (p[j] /= sum) * dp[j];
            }
            for (int64_t j = 0; j <= i; j++) {
                double ds = p[j] * (dp[j] - delta) * scale;
                for (int64_t e = 0; e < d; e++) {
                    int64_t query = OF(Q, i, head, e), key = OF(K, j, head, e);
                    wanted[O][query] += p[j] * at(&x[V], key);
                    wanted[DV][key] += p[j] * at(&x[DO], query);
                    wanted[DQ][query] += ds * at(&x[K], key);
                    wanted[DK][key] += ds * at(&x[Q], query);
                }
            }
        }
    }
    attention_fwd_args forward = {.q = &x[Q], .k = &x[K], .v = &x[V], .scale = scale, .causal = 1,
                                  .o = &x[O], .lse = &lse};
    check("attention_fwd", cpu_attention_fwd(0, &forward), &x[O], wanted[O]);
    attention_bwd_args backward = {.dout = &x[DO], .q = &x[Q], .k = &x[K], .v = &x[V],
                                   .o = &x[O], .lse = &lse, .scale = scale, .causal = 1,
                                   .dq = &x[DQ], .dk = &x[DK], .dv = &x[DV]};
    nd_status status = cpu_attention_bwd(0, &backward);
    check("attention_bwd: dq", status, &x[DQ], wanted[DQ]);
    check("attention_bwd: dk", status, &x[DK], wanted[DK]);
    check("attention_bwd: dv", status, &x[DV], wanted[DV]);
    for (int i = 0; i < ALL; i++) {
        free(x[i].data), free(wanted[i]);
    }
    free(lse.data), free(p), free(dp);
}

int main(void) {
    int64_t sizes[][3] = {{1, 1, 1}, {33, 70, 17}, {130, 515, 65}};
    for (int i = 0; i < 3; i++) {
        int64_t m = sizes[i][0], k = sizes[i][1], n = sizes[i][2];
        products(m, k, n);
        attention(m, 3, n);
    }
    printf("%d failed\n", failures);
    return failures > 0;
}
