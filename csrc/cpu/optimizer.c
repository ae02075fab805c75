/* optimizer.c - the global gradient norm and AdamW, each one pass over flat buffers.
 *
 *   grad_norm  norm = |g|_2,  scale = min(1, max_norm / (norm + 1e-6)), or 1 when max_norm <= 0;
 *              NaN when the norm is not finite, so that the step that uses it does nothing
 *   adamw      g' = g scale
 *              m = beta1 m + (1 - beta1) g',  v = beta2 v + (1 - beta2) g'^2
 *              p = p (1 - lr weight_decay) - lr (m / (1 - beta1^step))
 *                                              / (sqrt(v / (1 - beta2^step)) + eps)
 *              p_low = p rounded
 * Float32; the squares are added in float32 runs, the runs in float64, in order. AdamW moves 28
 * bytes a parameter (30 with p_low).
 */
#include "cpu.h"

enum { CHUNK = 65536, BLOCK = 16384 };

static double sum_of_squares(const float *restrict g, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n; i += CPU_RUN) {
        int64_t end = min_of(n, i + CPU_RUN);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = i; j < end; j++) {
            sum += g[j] * g[j];
        }
        total += sum;
    }
    return total;
}

nd_status cpu_grad_norm(int device, const grad_norm_args *args) {
    int64_t n = args->g->shape[0], chunks = cpu_ceil_div(n, CHUNK);
    const float *g = args->g->data;
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)(chunks + 1) * sizeof(double), &scratch));
    double *sums = scratch, total = 0;

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (chunks > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int64_t begin = chunk * CHUNK;
        sums[chunk] = sum_of_squares(g + begin, min_of(CHUNK, n - begin));
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        total += sums[chunk];
    }
    float norm = (float)sqrt(total), scale = 1.0f;
    if (args->max_norm > 0) {
        scale = nd_min((float)args->max_norm / (norm + 1e-6f), 1.0f);
    }
    *(float *)args->norm->data = norm;
    *(float *)args->scale->data = isfinite(norm) ? scale : NAN;
    return ND_OK;
}

nd_status cpu_adamw(int device, const adamw_args *args) {
    float scale = args->scale != NULL ? *(const float *)args->scale->data : 1.0f;
    if (!isfinite(scale)) {
        return ND_OK;
    }
    if (args->step < 1) {
        return nd_error(ND_EVALUE, "adamw: step: counts from 1, not %lld", (long long)args->step);
    }
    int64_t n = args->p->shape[0], blocks = cpu_ceil_div(n, BLOCK);
    float beta1 = (float)args->beta1, beta2 = (float)args->beta2, eps = (float)args->eps;
    float rest1 = (float)(1.0 - args->beta1), rest2 = (float)(1.0 - args->beta2);
    float decay = (float)(1.0 - args->lr * args->weight_decay);
    float step_size = (float)(args->lr / (1.0 - pow(args->beta1, (double)args->step)));
    float correction = (float)(1.0 / sqrt(1.0 - pow(args->beta2, (double)args->step)));

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n > CPU_GRAIN)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * BLOCK, count = min_of(BLOCK, n - begin);
        float *restrict p = (float *)args->p->data + begin;
        float *restrict m = (float *)args->m->data + begin;
        float *restrict v = (float *)args->v->data + begin;
        const float *restrict g = (const float *)args->g->data + begin;
        for (int64_t i = 0; i < count; i++) {
            float gradient = g[i] * scale;
            m[i] = beta1 * m[i] + rest1 * gradient;
            v[i] = beta2 * v[i] + rest2 * gradient * gradient;
            p[i] = p[i] * decay - step_size * m[i] / (sqrtf(v[i]) * correction + eps);
        }
        if (args->p_low != NULL) {
            cpu_store_f32(cpu_at(args->p_low, begin), args->p_low->dtype, 1, p, count);
        }
    }
    return ND_OK;
}
