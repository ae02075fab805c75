/* cross_entropy.c - softmax cross-entropy over a large vocabulary.
 *
 *   forward    lse = log sum exp(logits),  losses = lse - logits[target],  loss = mean of the valid
 *   both       logits become exp(logits - lse) - onehot(target), and share = 1 / count of the valid
 * Rows with a negative target are ignored: losses 0, and logits become 0. The forward walks a row
 * once, in runs that stay in the first-level cache, with a running maximum; the backward of a row
 * follows, and reads and writes each logit once. Threads take rows; the mean is added up in float64
 * in the order of the rows.
 */
#include "cpu.h"

enum { RUN = 4 * CPU_RUN, PREFETCHED = 256 };

nd_status cpu_check_targets(const char *name, const nd_array *targets, int64_t vocabulary) {
    const int32_t *target = targets->data;
    for (int64_t n = 0; n < targets->shape[0]; n++) {
        if (target[n] >= vocabulary) {
            return nd_error(ND_EVALUE,
                            "%s: targets: token id %d at position %lld is outside the vocabulary "
                            "of %lld (negative: ignored)",
                            name, (int)target[n], (long long)n, (long long)vocabulary);
        }
    }
    return ND_OK;
}

static float row_log_sum_exp(const nd_array *logits, int64_t row, int64_t v) {
    _Alignas(64) float buffer[RUN];
    float maximum = -INFINITY, sum = 0;
    for (int64_t j = 0; j < v; j += RUN) {
        int64_t n = min_of(RUN, v - j);
        const float *restrict x = cpu_read(logits, row * v + j, n, buffer);
        float highest = maximum, part = 0;
#pragma omp simd reduction(max : highest)
        for (int64_t i = 0; i < n; i++) {
            highest = x[i] > highest ? x[i] : highest;
        }
        /* Nothing but -inf so far: any finite shift gives exp = 0, and a NaN still shows. */
        float shift = highest == -INFINITY ? 0.0f : highest;
        for (int64_t i = 0; i < n; i += PREFETCHED) {
            int64_t m = min_of(PREFETCHED, n - i);
            const float *restrict some = x + i;
            for (int64_t k = 0; k < m; k += 16) { /* the hardware stops at each page */
                __builtin_prefetch(some + RUN + k);
            }
#pragma omp simd reduction(+ : part)
            for (int64_t k = 0; k < m; k++) {
                part += nd_exp_softmax(some[k] - shift);
            }
        }
        sum = sum * nd_exp_softmax(maximum - shift) + part;
        maximum = highest;
    }
    return (maximum == -INFINITY ? 0.0f : maximum) + nd_log(sum);
}

/* A row of logits becomes exp(logits - lse) - onehot. */
static void write_gradient(nd_array *logits, int64_t i, int64_t target, float lse) {
    _Alignas(64) float from[RUN], to[RUN];
    int64_t v = logits->shape[1];
    for (int64_t j = 0; j < v; j += RUN) {
        int64_t columns = min_of(RUN, v - j), at = i * v + j;
        float *dx = cpu_target(logits, at, to);
        if (target < 0) {
            memset(dx, 0, (size_t)columns * sizeof *dx);
        } else {
            const float *x = cpu_read(logits, at, columns, from);
#pragma omp simd
            for (int64_t k = 0; k < columns; k++) {
                dx[k] = nd_exp_softmax(x[k] - lse);
            }
            if (target >= j && target < j + columns) {
                dx[target - j] -= 1.0f;
            }
        }
        cpu_write(logits, at, columns, dx);
    }
}

/* The loss of every row, and their mean; how many rows count. Where dlogits is given, which is the
 * logits, a row of it follows while that of the logits is in a cache. */
static int64_t mean_loss(const nd_array *logits, const int32_t *targets, float *losses,
                         nd_array *dlogits, float *loss) {
    int64_t n = logits->shape[0], v = logits->shape[1], count = 0;

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * v > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        float lse = row_log_sum_exp(logits, i, v);
        losses[i] = 0;
        if (targets[i] >= 0) {
            float value;
            losses[i] = lse - *cpu_read(logits, i * v + targets[i], 1, &value);
        }
        if (dlogits != NULL) {
            write_gradient(dlogits, i, targets[i], lse);
        }
    }
    double total = 0;
    for (int64_t i = 0; i < n; i++) {
        total += losses[i];
        count += targets[i] >= 0;
    }
    *loss = count > 0 ? (float)(total / (double)count) : 0.0f;
    return count;
}

nd_status cpu_cross_entropy_fwd(int device, const cross_entropy_fwd_args *args) {
    (void)device;
    ND_TRY(cpu_check_targets("cross_entropy_fwd", args->targets, args->logits->shape[1]));
    mean_loss(args->logits, args->targets->data, args->losses->data, NULL, args->loss->data);
    return ND_OK;
}

nd_status cpu_cross_entropy_fwd_bwd(int device, const cross_entropy_fwd_bwd_args *args) {
    (void)device;
    ND_TRY(cpu_check_targets("cross_entropy_fwd_bwd", args->targets, args->logits->shape[1]));
    int64_t count = mean_loss(args->logits, args->targets->data, args->losses->data, args->logits,
                              args->loss->data);
    *(float *)args->share->data = count > 0 ? 1.0f / (float)count : 0.0f;
    return ND_OK;
}
