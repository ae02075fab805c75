/* rotary.c - rotary position embedding (Su et al. 2021) with halves rotated, as in GPT-NeoX.
 *
 * In the first `parts` slices of each head, for r < R:
 *     y[r]     = x[r] cos - x[R + r] s        s = sign * sin
 *     y[R + r] = x[R + r] cos + x[r] s
 * dims from 2 R on and the other slices are copied. The rotation is orthogonal: its backward is the
 * same with sign = -1. Threads take positions; x and y move once.
 */
#include "cpu.h"

nd_status cpu_rotary(int device, const rotary_args *args) {
    const int64_t *shape = args->x->shape;
    int64_t positions = shape[0] * shape[1], t = shape[1], heads = shape[2], slices = shape[3],
            d = shape[4], r = args->cos->shape[1];
    if (args->parts < 0 || args->parts > slices) {
        return nd_error(ND_EVALUE, "rotary: parts: %lld of %lld slices cannot be rotated",
                        (long long)args->parts, (long long)slices);
    }
    if (2 * r > d) {
        return nd_error(
            ND_EVALUE,
            "rotary: cos: rotates 2 x %lld dims, but a head has %lld (give at most D / 2 "
            "angles)",
            (long long)r, (long long)d);
    }
    if (d > CPU_RUN) {
        return nd_error(ND_EVALUE, "rotary: x: head dim %lld is above the limit of %d",
                        (long long)d, CPU_RUN);
    }
    float sign = (float)args->sign;

#pragma omp parallel for schedule(static) \
    num_threads(cpu_threads()) if (positions * heads * slices * d > CPU_GRAIN)
    for (int64_t position = 0; position < positions; position++) {
        cpu_run from, to;
        const float *restrict cosines = (const float *)args->cos->data + position % t * r;
        const float *restrict sines = (const float *)args->sin->data + position % t * r;
        for (int64_t slice = 0; slice < heads * slices; slice++) {
            int64_t at = (position * heads * slices + slice) * d;
            if (slice % slices >= args->parts) {
                memcpy(cpu_at(args->y, at), cpu_at(args->x, at),
                       (size_t)d * nd_dtype_size(args->x->dtype));
                continue;
            }
            const float *restrict x = cpu_read(args->x, at, d, from.f32);
            float *restrict y = cpu_target(args->y, at, to.f32);
            for (int64_t i = 0; i < r; i++) {
                float s = sign * sines[i];
                y[i] = x[i] * cosines[i] - x[r + i] * s;
                y[r + i] = x[r + i] * cosines[i] + x[i] * s;
            }
            for (int64_t i = 2 * r; i < d; i++) {
                y[i] = x[i];
            }
            cpu_write(args->y, at, d, y);
        }
    }
    return ND_OK;
}
