/* linear_gelu.c - linear_gelu_fwd: y = gelu(pre), dgelu = gelu'(pre), pre = x w + b;
 * linear_gelu_bwd: dpre = dy w^T dgelu, db += its column sums. y has the bits of linear_fwd and
 * gelu, dpre those of matmul and multiply.
 */
#include "cpu.h"

/* In a tile: the derivative's memory (holding pre) becomes gelu'(pre), y becomes gelu(pre). y may
 * be strided. */
static void apply_gelu(const void *of, int64_t i, int64_t j, int64_t rows, int64_t columns) {
    const linear_gelu_fwd_args *args = of;
    for (int64_t row = i; row < i + rows; row++) {
        for (int64_t column = j; column < j + columns; column += CPU_RUN) {
            int64_t run = min_of(CPU_RUN, j + columns - column);
            int64_t from = row * args->dgelu->shape[1] + column;
            int64_t to = row * args->y->strides[0] + column;
            cpu_run pre, out, derivative;
            const float *x = cpu_read(args->dgelu, from, run, pre.f32);
            float *restrict g = cpu_target(args->y, to, out.f32);
            float *dg = cpu_target(args->dgelu, from, derivative.f32); /* may be x */
            if (args->tanh) {
#pragma omp simd
                for (int64_t k = 0; k < run; k++) {
                    float grad;
                    g[k] = nd_gelu_tanh_and_grad(x[k], &grad);
                    dg[k] = grad;
                }
            } else {
#pragma omp simd
                for (int64_t k = 0; k < run; k++) {
                    float grad;
                    g[k] = nd_gelu_and_grad(x[k], &grad);
                    dg[k] = grad;
                }
            }
            cpu_write(args->y, to, run, g);
            cpu_write(args->dgelu, from, run, dg);
        }
    }
}

nd_status cpu_linear_gelu_fwd(int device, const linear_gelu_fwd_args *args) {
    linear_fwd_args product = {.x = args->x, .w = args->w, .b = args->b, .y = args->dgelu};
    return cpu_linear_tiles(device, &product, apply_gelu, args);
}

nd_status cpu_linear_gelu_bwd(int device, const linear_gelu_bwd_args *args) {
    nd_array w_t = *args->w;
    for (int axis = 0; axis < 2; axis++) {
        w_t.shape[axis] = args->w->shape[1 - axis];
        w_t.strides[axis] = args->w->strides[1 - axis];
    }
    matmul_args product = {.a = args->dy, .b = &w_t, .c = args->dpre};
    ND_TRY(cpu_matmul(device, &product));
    return cpu_column_sums(device, args->dpre, args->dgelu, args->dpre, args->db, NULL);
}
