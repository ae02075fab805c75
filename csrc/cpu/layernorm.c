/* layernorm.c - layer normalisation over the last axis.
 *
 *   forward    mean = sum x / C,  var = sum (x - mean)^2 / C,  rstd = 1 / sqrt(var + eps)
 *              xhat = (x - mean) rstd,  y = xhat w + b
 *   backward   g = dy w,  dx = rstd (g - mean(g) - xhat mean(g xhat))
 *              dw += sum over rows of dy xhat,  db += sum over rows of dy
 * All in float32, the variance from the centred values. Threads take rows; for dw and db they take
 * pieces of rows whose sums are added in order. Moves x and y once (dy, x and dx once).
 */
#include <omp.h>

#include "cpu.h"

nd_status cpu_layernorm_fwd(int device, const layernorm_fwd_args *args) {
    int64_t n = args->x->shape[0], c = args->x->shape[1];
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)((cpu_threads() * 2 + 2) * max_of(c, 1)) * sizeof(float),
                       &scratch));
    float *parameters = scratch;
    const float *restrict w = cpu_read(args->w, 0, c, parameters);
    const float *restrict b = cpu_read(args->b, 0, c, parameters + c);
    float *means = args->mean->data, *rstds = args->rstd->data;
    float eps = (float)args->eps;

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        float *buffer = parameters + (2 + 2 * omp_get_thread_num()) * c;
        const float *restrict x = cpu_read(args->x, i * c, c, buffer);
        float *restrict y = cpu_target(args->y, i * c, buffer + c);
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < c; j++) {
            sum += x[j];
        }
        float mean = sum / (float)c;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < c; j++) {
            float d = x[j] - mean;
            squares += d * d;
        }
        float rstd = 1.0f / sqrtf(squares / (float)c + eps);
        for (int64_t j = 0; j < c; j++) {
            y[j] = (x[j] - mean) * rstd * w[j] + b[j];
        }
        cpu_write(args->y, i * c, c, y);
        means[i] = mean;
        rstds[i] = rstd;
    }
    return ND_OK;
}

/* dx of one row; the row's part of dw and db is added to sums[0..c) and sums[c..2c). */
static void row_backward(const float *restrict dy, const float *restrict x, const float *restrict w,
                         float mean, float rstd, int64_t c, float *restrict dx, float *restrict dw,
                         float *restrict db) {
    float sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t j = 0; j < c; j++) {
        float g = dy[j] * w[j];
        sum += g;
        product += g * ((x[j] - mean) * rstd);
    }
    sum /= (float)c;
    product /= (float)c;
    for (int64_t j = 0; j < c; j++) {
        float xhat = (x[j] - mean) * rstd;
        dw[j] += dy[j] * xhat;
        db[j] += dy[j];
        dx[j] = rstd * (dy[j] * w[j] - sum - xhat * product);
    }
}

nd_status cpu_layernorm_bwd(int device, const layernorm_bwd_args *args) {
    int64_t n = args->x->shape[0], c = args->x->shape[1];
    if (n == 0 || c == 0) {
        return ND_OK;
    }
    int64_t rows = max_of(32, cpu_ceil_div(n, 256)), pieces = cpu_ceil_div(n, rows);
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)((cpu_threads() * 3 + 1 + 2 * pieces) * c) * sizeof(float),
                       &scratch));
    float *partial = scratch, *buffers = partial + 2 * pieces * c;
    const float *w = cpu_read(args->w, 0, c, buffers);
    const float *means = args->mean->data, *rstds = args->rstd->data;
    float *restrict dw = args->dw->data, *restrict db = args->db->data;

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t piece = 0; piece < pieces; piece++) {
        float *buffer = buffers + (1 + 3 * omp_get_thread_num()) * c;
        float *sums = partial + 2 * piece * c;
        memset(sums, 0, (size_t)(2 * c) * sizeof *sums);
        for (int64_t i = piece * rows; i < min_of(n, (piece + 1) * rows); i++) {
            float *dx = cpu_target(args->dx, i * c, buffer + 2 * c);
            row_backward(cpu_read(args->dy, i * c, c, buffer),
                         cpu_read(args->x, i * c, c, buffer + c), w, means[i], rstds[i], c, dx,
                         sums, sums + c);
            cpu_write(args->dx, i * c, c, dx);
        }
    }
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (pieces * c > CPU_GRAIN)
    for (int64_t j = 0; j < c; j++) {
        double dw_sum = 0, db_sum = 0;
        for (int64_t piece = 0; piece < pieces; piece++) {
            dw_sum += partial[2 * piece * c + j];
            db_sum += partial[(2 * piece + 1) * c + j];
        }
        dw[j] += (float)dw_sum;
        db[j] += (float)db_sum;
    }
    return ND_OK;
}
