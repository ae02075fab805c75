/* cross_entropy.c - softmax cross-entropy over a large vocabulary.
 *
 *   forward    lse = log sum exp(logits),  losses = lse - logits[target],  loss = mean of the valid
 *   backward   dlogits = (exp(logits - lse) - onehot(target)) dloss / count
 *   both       logits become exp(logits - lse) - onehot(target), and share = 1 / count
 * Rows with a negative target are ignored: losses 0, dlogits 0. The forward walks a row once, in
 * runs that stay in the first-level cache, with a running maximum; the backward reads and writes
 * each logit once, of both row by row after the forward. Threads take rows; the mean is added up in
 * float64 in the order of the rows.
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

/* A row of dlogits = (exp(logits - lse) - onehot) weight, which may be the same array. */
static void write_gradient(const nd_array *logits, int64_t i, int64_t target, float lse,
                           float weight, nd_array *dlogits) {
    _Alignas(64) float from[RUN], to[RUN];
    int64_t v = logits->shape[1];
    for (int64_t j = 0; j < v; j += RUN) {
        int64_t columns = min_of(RUN, v - j), at = i * v + j;
        float *dx = cpu_target(dlogits, at, to);
        if (target < 0) {
            memset(dx, 0, (size_t)columns * sizeof *dx);
        } else {
            const float *x = cpu_read(logits, at, columns, from);
#pragma omp simd
            for (int64_t k = 0; k < columns; k++) {
                dx[k] = nd_exp_softmax(x[k] - lse) * weight;
            }
            if (target >= j && target < j + columns) {
                dx[target - j] -= weight;
            }
        }
        cpu_write(dlogits, at, columns, dx);
    }
}

/* losses and lse of every row; the sum of losses and how many rows count. Where dlogits is given, a
 * row of it follows, with a weight of 1, while that of the logits, which it may replace, is in a
 * cache. */
static double sum_losses(const nd_array *logits, const int32_t *targets, float *losses, float *lse,
                         nd_array *dlogits, int64_t *count) {
    int64_t n = logits->shape[0], v = logits->shape[1];

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * v > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        lse[i] = row_log_sum_exp(logits, i, v);
        losses[i] = 0;
        if (targets[i] >= 0) {
            float value;
            losses[i] = lse[i] - *cpu_read(logits, i * v + targets[i], 1, &value);
        }
        if (dlogits != NULL) {
            write_gradient(logits, i, targets[i], lse[i], 1.0f, dlogits);
        }
    }
    double total = 0;
    *count = 0;
    for (int64_t i = 0; i < n; i++) {
        total += losses[i];
        *count += targets[i] >= 0;
    }
    return total;
}

nd_status cpu_cross_entropy_fwd(int device, const cross_entropy_fwd_args *args) {
    (void)device;
    int64_t count;
    ND_TRY(cpu_check_targets("cross_entropy_fwd", args->targets, args->logits->shape[1]));
    double total = sum_losses(args->logits, args->targets->data, args->losses->data,
                              args->lse->data, NULL, &count);
    *(float *)args->loss->data = count > 0 ? (float)(total / (double)count) : 0.0f;
    *(float *)args->count->data = (float)count;
    return ND_OK;
}

nd_status cpu_cross_entropy_bwd(int device, const cross_entropy_bwd_args *args) {
    (void)device;
    float count = *(const float *)args->count->data, dloss = *(const float *)args->dloss->data;
    ND_TRY(cpu_check_targets("cross_entropy_bwd", args->targets, args->logits->shape[1]));
    const int32_t *targets = args->targets->data;
    const float *lse = args->lse->data;
    float weight = count > 0 ? dloss / count : 0.0f;
    int64_t n = args->logits->shape[0], v = args->logits->shape[1];

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * v > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        write_gradient(args->logits, i, targets[i], lse[i], weight, args->dlogits);
    }
    return ND_OK;
}

nd_status cpu_cross_entropy_fwd_bwd(int device, const cross_entropy_fwd_bwd_args *args) {
    int64_t count;
    void *lse;
    ND_TRY(cpu_check_targets("cross_entropy_fwd_bwd", args->targets, args->logits->shape[1]));
    ND_TRY(cpu_scratch(device, (size_t)args->logits->shape[0] * sizeof(float), &lse));
    double total = sum_losses(args->logits, args->targets->data, args->losses->data, lse,
                              args->logits, &count);
    *(float *)args->loss->data = count > 0 ? (float)(total / (double)count) : 0.0f;
    *(float *)args->share->data = count > 0 ? 1.0f / (float)count : 0.0f;
    return ND_OK;
}
