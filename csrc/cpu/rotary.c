/* rotary.c - rotary position embedding (Su et al. 2021) with halves rotated, as in GPT-NeoX.
 *
 * In place, in the first `parts` slices of each head, for r < R:
 *     x[r], x[R + r] = x[r] cos - x[R + r] s, x[R + r] cos + x[r] s        s = sign * sin
 * Dims from 2 R on and the other slices are not touched. The rotation is orthogonal: its backward
 * is the same with sign = -1. Threads take positions.
 */
#include "cpu.h"

void cpu_rotate(float *restrict x, const float *restrict cosines, const float *restrict sines,
                int64_t r, float sign) {
    for (int64_t i = 0; i < r; i++) {
        float first = x[i], second = x[r + i], s = sign * sines[i];
        x[i] = first * cosines[i] - second * s;
        x[r + i] = second * cosines[i] + first * s;
    }
}

nd_status cpu_check_turn(const char *op, const nd_array *x, int64_t parts, const nd_array *cos) {
    int64_t slices = x->shape[x->ndim - 2], d = x->shape[x->ndim - 1], r = cos->shape[1];
    if (parts < 0 || parts > slices) {
        return nd_error(ND_EVALUE,
                        "%s: parts: %lld of %lld slices cannot be rotated (give 0 to %lld)", op,
                        (long long)parts, (long long)slices, (long long)slices);
    }
    if (2 * r > d) {
        return nd_error(
            ND_EVALUE,
            "%s: cos: rotates 2 x %lld dims, but a head has %lld (give at most D / 2 angles)", op,
            (long long)r, (long long)d);
    }
    if (d > CPU_RUN) {
        return nd_error(ND_EVALUE, "%s: head dim %lld is above the limit of %d", op, (long long)d,
                        CPU_RUN);
    }
    return ND_OK;
}

nd_status cpu_rotary(int device, const rotary_args *args) {
    const int64_t *shape = args->x->shape;
    int64_t positions = shape[0] * shape[1], t = shape[1], heads = shape[2], slices = shape[3],
            d = shape[4], r = args->cos->shape[1];
    ND_TRY(cpu_check_turn("rotary", args->x, args->parts, args->cos));
    float sign = (float)args->sign;

#pragma omp parallel for schedule(static) \
    num_threads(cpu_threads()) if (positions * heads * args->parts * r > CPU_GRAIN)
    for (int64_t position = 0; position < positions; position++) {
        cpu_run rotated;
        const float *cosines = (const float *)args->cos->data + position % t * r;
        const float *sines = (const float *)args->sin->data + position % t * r;
        for (int64_t slice = 0; slice < heads * slices; slice++) {
            if (slice % slices >= args->parts) {
                continue;
            }
            int64_t at = (position * heads * slices + slice) * d;
            float *x = cpu_target(args->x, at, rotated.f32);
            if (x == rotated.f32) {
                cpu_load_f32(x, cpu_at(args->x, at), args->x->dtype, 1, 2 * r);
            }
            cpu_rotate(x, cosines, sines, r, sign);
            cpu_write(args->x, at, 2 * r, x);
        }
    }
    return ND_OK;
}
