/* dilated.c - the branches of dilated attention joined: dilated_merge and dilated_sum.
 *
 *   merge   total = log(sum of exp(lse_n)),  out = sum of exp(lse_n - total) parts_n
 *   sum     out = sum of parts_n
 *
 * over the branches n that hold token t for head h: t mod segment mod dilation = h mod dilation. In
 * float32, rounded once; tokens outside of a branch are never read. Threads take tokens.
 */
#include "cpu.h"

typedef struct {
    const nd_array *parts, *segments, *dilations;
    const float *lse;
    nd_array *out;
    float *total; /* NULL: each part counts once */
} branches;

static bool holds(const branches *b, int64_t n, int64_t t, int64_t h) {
    int64_t segment = ((const int32_t *)b->segments->data)[n];
    int64_t dilation = ((const int32_t *)b->dilations->data)[n];
    return (t % max_of(segment, 1) - h) % max_of(dilation, 1) == 0;
}

/* `row` is that of token t and head h among `rows` of a branch. */
static void join_row(const branches *b, int64_t rows, int64_t row, int64_t t, int64_t h) {
    int64_t count = b->parts->shape[0], d = b->parts->shape[4];
    bool weighted = b->total != NULL;
    float top = -INFINITY, sum = 0;
    if (weighted) {
        for (int64_t n = 0; n < count; n++) {
            if (holds(b, n, t, h)) {
                top = nd_max(top, b->lse[n * rows + row]);
            }
        }
        for (int64_t n = 0; n < count; n++) {
            if (top != -INFINITY && holds(b, n, t, h)) {
                sum += nd_exp(b->lse[n * rows + row] - top);
            }
        }
        b->total[row] = top == -INFINITY ? top : top + nd_log(sum);
    }
    cpu_run from, to;
    for (int64_t at = 0; at < d; at += CPU_RUN) {
        int64_t run = min_of(CPU_RUN, d - at);
        float *restrict out = cpu_target(b->out, row * d + at, to.f32);
        memset(out, 0, (size_t)run * sizeof *out);
        for (int64_t n = 0; n < count; n++) {
            if (!holds(b, n, t, h) || (weighted && top == -INFINITY)) {
                continue;
            }
            float weight = weighted ? nd_exp(b->lse[n * rows + row] - top) / sum : 1.0f;
            const float *restrict part =
                cpu_read(b->parts, (n * rows + row) * d + at, run, from.f32);
            for (int64_t i = 0; i < run; i++) {
                out[i] += weight * part[i];
            }
        }
        cpu_write(b->out, row * d + at, run, out);
    }
}

static nd_status join(const branches *b) {
    const int64_t *shape = b->parts->shape;
    int64_t tokens = shape[1] * shape[2], heads = shape[3], rows = tokens * heads;

#pragma omp parallel for schedule(static) \
    num_threads(cpu_threads()) if (shape[0] * rows * shape[4] > CPU_GRAIN)
    for (int64_t token = 0; token < tokens; token++) {
        for (int64_t h = 0; h < heads; h++) {
            join_row(b, rows, token * heads + h, token % shape[2], h);
        }
    }
    return ND_OK;
}

nd_status cpu_dilated_merge(int device, const dilated_merge_args *args) {
    branches b = {.parts = args->parts,
                  .segments = args->segments,
                  .dilations = args->dilations,
                  .lse = (const float *)args->lse->data,
                  .out = args->out,
                  .total = (float *)args->total->data};
    return join(&b);
}

nd_status cpu_dilated_sum(int device, const dilated_sum_args *args) {
    branches b = {.parts = args->parts,
                  .segments = args->segments,
                  .dilations = args->dilations,
                  .out = args->out};
    return join(&b);
}
