/* layernorm.c - layer normalisation over the last axis, by one norm or by two of the same x, whose
 * results may end in FP8.
 *
 *   forward    mean = sum x / C,  var = sum (x - mean)^2 / C,  rstd = 1 / sqrt(var + eps)
 *              xhat = (x - mean) rstd,  y = xhat w + b of each norm
 *   backward   g = sum over the norms of dy w
 *              dx = rstd (g - mean(g) - xhat mean(g xhat)) + dres, where there is a dres
 *              of each norm dw += sum over rows of dy xhat,  db += sum over rows of dy
 * All in float32, the variance from the centred values. Threads take rows; for dw and db they take
 * chunks of rows whose sums are added in order. Moves x and each y once (each dy, x, dres, dx
 * once).
 */
#include <omp.h>

#include "../fp8.h"

#include "cpu.h"

/* The operands that each norm has of its own. */
typedef struct {
    const nd_array *w, *b;
    nd_array *y;
} forward_norm;
typedef struct {
    const nd_array *dy, *w;
    nd_array *dw, *db;
} backward_norm;

static void row_statistics(const float *restrict x, int64_t c, float eps, float *mean,
                           float *rstd) {
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < c; j++) {
        sum += x[j];
    }
    *mean = sum / (float)c;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < c; j++) {
        float d = x[j] - *mean;
        squares += d * d;
    }
    *rstd = 1.0f / sqrtf(squares / (float)c + eps);
}

static nd_status forward(int device, const nd_array *x_rows, int norms, const forward_norm *of,
                         double epsilon, nd_array *mean_rows, nd_array *rstd_rows) {
    int64_t n = x_rows->shape[0], c = x_rows->shape[1];
    void *scratch;
    ND_TRY(cpu_scratch(device,
                       (size_t)((cpu_threads() * 2 + 2 * norms) * max_of(c, 1)) * sizeof(float),
                       &scratch));
    float *parameters = scratch, *buffers = parameters + 2 * norms * c;
    float *means = mean_rows->data, *rstds = rstd_rows->data;
    float eps = (float)epsilon;
    const float *ws[2], *bs[2];
    for (int k = 0; k < norms; k++) {
        ws[k] = cpu_read(of[k].w, 0, c, parameters + 2 * k * c);
        bs[k] = cpu_read(of[k].b, 0, c, parameters + (2 * k + 1) * c);
    }

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        float *buffer = buffers + 2 * omp_get_thread_num() * c;
        const float *restrict x = cpu_read(x_rows, i * c, c, buffer);
        float mean, rstd;
        row_statistics(x, c, eps, &mean, &rstd);
        for (int k = 0; k < norms; k++) {
            const float *restrict w = ws[k], *restrict b = bs[k];
            float *restrict y = cpu_target(of[k].y, i * c, buffer + c);
            for (int64_t j = 0; j < c; j++) {
                y[j] = (x[j] - mean) * rstd * w[j] + b[j];
            }
            cpu_write(of[k].y, i * c, c, y);
        }
        means[i] = mean;
        rstds[i] = rstd;
    }
    return ND_OK;
}

/* ---- FP8 ------------------------------------------------------------------------------------- */
nd_status cpu_layernorm_pair_fp8(int device, const layernorm_pair_fp8_args *args) {
    const nd_array *of[4] = {args->norm_w1, args->norm_b1, args->norm_w2, args->norm_b2};
    uint8_t *q[2] = {args->q1->data, args->q2->data};
    uint8_t *q_t[2] = {args->q1_t->data, args->q2_t->data};
    float *scales[2] = {args->scale1->data, args->scale2->data};
    float *means = args->mean->data, *rstds = args->rstd->data;
    int64_t n = args->x->shape[0], c = args->x->shape[1];
    void *scratch;
    ND_TRY(nd_check_layernorm_pair_fp8(args->x));
    ND_TRY(cpu_scratch(device, (size_t)((cpu_threads() + 4) * max_of(c, 1)) * sizeof(float),
                       &scratch));
    float *parameters = scratch, *buffers = parameters + 4 * c;
    const float *values[4];
    for (int k = 0; k < 4; k++) {
        values[k] = cpu_read(of[k], 0, c, parameters + k * c);
    }
    for (int k = 0; k < 2; k++) {
        float w = nd_bits_float(cpu_largest_bits(of[2 * k]));
        float b = nd_bits_float(cpu_largest_bits(of[2 * k + 1]));
        float bound = nd_norm_bound(w, b, c);
        *scales[k] = nd_fp8_scale(nd_float_bits(bound), false);
    }

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        const float *x = cpu_read(args->x, i * c, c, buffers + omp_get_thread_num() * c);
        float mean, rstd;
        row_statistics(x, c, (float)args->eps, &mean, &rstd);
        for (int k = 0; k < 2; k++) {
            const float *w = values[2 * k], *b = values[2 * k + 1];
            float times = 1.0f / *scales[k]; /* powers of two */
            for (int64_t j = 0; j < c; j++) {
                float y = (x[j] - mean) * rstd * w[j] + b[j];
                q[k][i * c + j] = nd_to_e4m3(y * times);
            }
            for (int64_t j = 0; j < c; j++) {
                q_t[k][j * n + i] = q[k][i * c + j];
            }
        }
        means[i] = mean;
        rstds[i] = rstd;
    }
    return ND_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */
/* One norm's part of a row: g = (add: +=) dy w, and dw and db of the row are added. */
static void norm_backward(const float *restrict dy, const float *restrict x,
                          const float *restrict w, float mean, float rstd, int64_t c, bool add,
                          float *restrict g, float *restrict dw, float *restrict db) {
    for (int64_t j = 0; j < c; j++) {
        g[j] = (add ? g[j] : 0.0f) + dy[j] * w[j];
        dw[j] += dy[j] * ((x[j] - mean) * rstd);
        db[j] += dy[j];
    }
}

/* dx holds the g of the row and gets its gradient; dres may be NULL. */
static void row_backward(const float *restrict x, const float *restrict dres, float mean,
                         float rstd, int64_t c, float *restrict dx) {
    float sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t j = 0; j < c; j++) {
        sum += dx[j];
        product += dx[j] * ((x[j] - mean) * rstd);
    }
    sum /= (float)c;
    product /= (float)c;
    for (int64_t j = 0; j < c; j++) {
        float d = rstd * (dx[j] - sum - (x[j] - mean) * rstd * product);
        dx[j] = dres ? d + dres[j] : d;
    }
}

static nd_status backward(int device, const nd_array *x_rows, int norms, const backward_norm *of,
                          const nd_array *mean_rows, const nd_array *rstd_rows,
                          const nd_array *dres, nd_array *dx_rows) {
    int64_t n = x_rows->shape[0], c = x_rows->shape[1];
    if (n == 0 || c == 0) {
        return ND_OK;
    }
    int64_t rows = max_of(32, cpu_ceil_div(n, 256)), chunks = cpu_ceil_div(n, rows);
    int64_t width = 2 * norms * c; /* of a chunk's sums: dw and db of each norm */
    void *scratch;
    ND_TRY(cpu_scratch(device,
                       (size_t)((cpu_threads() * 3 + norms) * c + chunks * width) * sizeof(float),
                       &scratch));
    float *partial = scratch, *parameters = partial + chunks * width;
    float *buffers = parameters + norms * c;
    const float *means = mean_rows->data, *rstds = rstd_rows->data;
    const float *ws[2];
    for (int k = 0; k < norms; k++) {
        ws[k] = cpu_read(of[k].w, 0, c, parameters + k * c);
    }

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float *buffer = buffers + 3 * omp_get_thread_num() * c;
        float *sums = partial + chunk * width;
        memset(sums, 0, (size_t)width * sizeof *sums);
        for (int64_t i = chunk * rows; i < min_of(n, (chunk + 1) * rows); i++) {
            const float *x = cpu_read(x_rows, i * c, c, buffer + c);
            float *dx = cpu_target(dx_rows, i * c, buffer + 2 * c);
            for (int k = 0; k < norms; k++) {
                norm_backward(cpu_read(of[k].dy, i * c, c, buffer), x, ws[k], means[i], rstds[i], c,
                              k > 0, dx, sums + 2 * k * c, sums + (2 * k + 1) * c);
            }
            row_backward(x, dres ? cpu_read(dres, i * c, c, buffer) : NULL, means[i], rstds[i], c,
                         dx);
            cpu_write(dx_rows, i * c, c, dx);
        }
    }
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (chunks * c > CPU_GRAIN)
    for (int64_t j = 0; j < c; j++) {
        for (int k = 0; k < norms; k++) {
            float *dw = of[k].dw->data, *db = of[k].db->data;
            double dw_sum = 0, db_sum = 0;
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                dw_sum += partial[chunk * width + 2 * k * c + j];
                db_sum += partial[chunk * width + (2 * k + 1) * c + j];
            }
            dw[j] += (float)dw_sum;
            db[j] += (float)db_sum;
        }
    }
    return ND_OK;
}

nd_status cpu_layernorm_fwd(int device, const layernorm_fwd_args *a) {
    const forward_norm of[] = {{a->w, a->b, a->y}};
    return forward(device, a->x, 1, of, a->eps, a->mean, a->rstd);
}

nd_status cpu_layernorm_pair_fwd(int device, const layernorm_pair_fwd_args *a) {
    const forward_norm of[] = {{a->norm_w1, a->norm_b1, a->y1}, {a->norm_w2, a->norm_b2, a->y2}};
    return forward(device, a->x, 2, of, a->eps, a->mean, a->rstd);
}

nd_status cpu_layernorm_bwd(int device, const layernorm_bwd_args *a) {
    const backward_norm of[] = {{a->dy, a->w, a->dw, a->db}};
    return backward(device, a->x, 1, of, a->mean, a->rstd, a->dres, a->dx);
}

nd_status cpu_layernorm_pair_bwd(int device, const layernorm_pair_bwd_args *a) {
    const backward_norm of[] = {{a->dy1, a->norm_w1, a->dnorm_w1, a->dnorm_b1},
                                {a->dy2, a->norm_w2, a->dnorm_w2, a->dnorm_b2}};
    return backward(device, a->x, 2, of, a->mean, a->rstd, a->dres, a->dx);
}
