/* linear_gelu.c - linear_gelu_fwd: y = gelu(pre), slope = gelu'(pre), pre = x w + b;
 * linear_gelu_bwd: dpre = dy w^T slope, db += its column sums. One after the other: y has the bits of linear_fwd
 * and gelu, dpre those of matmul and multiply.
 */
#include "cpu.h"

/* What lies in slope is pre, and becomes gelu'(pre); y = gelu(pre), whatever the stride of y's rows. */
static void apply_gelu(nd_array *slope, bool tanh_form, nd_array *y) {
    int64_t rows = slope->shape[0], columns = slope->shape[1];

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (rows * columns > CPU_GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t j = 0; j < columns; j += CPU_RUN) {
            int64_t run = min_of(CPU_RUN, columns - j);
            int64_t from = row * columns + j, to = row * y->strides[0] + j;
            cpu_run pre, out, derivative;
            const float *x = cpu_read(slope, from, run, pre.f32);
            float *g = cpu_target(y, to, out.f32), *dg = cpu_target(slope, from, derivative.f32);
            if (tanh_form) {
                for (int64_t i = 0; i < run; i++) {
                    g[i] = nd_gelu_tanh(x[i]);
                }
#pragma omp simd /* dg may be x */
                for (int64_t i = 0; i < run; i++) {
                    dg[i] = nd_gelu_tanh_grad(x[i]);
                }
            } else {
                for (int64_t i = 0; i < run; i++) {
                    g[i] = nd_gelu(x[i]);
                }
#pragma omp simd
                for (int64_t i = 0; i < run; i++) {
                    dg[i] = nd_gelu_grad(x[i]);
                }
            }
            cpu_write(y, to, run, g);
            cpu_write(slope, from, run, dg);
        }
    }
}

nd_status cpu_linear_gelu_fwd(int device, const linear_gelu_fwd_args *args) {
    linear_fwd_args product = {.x = args->x, .w = args->w, .b = args->b, .y = args->slope};
    ND_TRY(cpu_linear_fwd(device, &product));
    apply_gelu(args->slope, args->tanh, args->y);
    return ND_OK;
}

/* dpre, which is the product, becomes slope times it. */
static void multiply_slope(const nd_array *slope, nd_array *dpre) {
    int64_t size = nd_size(dpre);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (size > CPU_GRAIN)
    for (int64_t i = 0; i < size; i += CPU_RUN) {
        int64_t run = min_of(CPU_RUN, size - i);
        cpu_run from, to;
        const float *dg = cpu_read(slope, i, run, from.f32);
        float *d = cpu_target(dpre, i, to.f32);
        if (dpre->dtype != ND_F32) {
            cpu_read(dpre, i, run, d);
        }
        for (int64_t j = 0; j < run; j++) {
            d[j] *= dg[j];
        }
        cpu_write(dpre, i, run, d);
    }
}

nd_status cpu_linear_gelu_bwd(int device, const linear_gelu_bwd_args *args) {
    nd_array w_t = *args->w;
    for (int axis = 0; axis < 2; axis++) {
        w_t.shape[axis] = args->w->shape[1 - axis];
        w_t.strides[axis] = args->w->strides[1 - axis];
    }
    matmul_args product = {.a = args->dy, .b = &w_t, .c = args->dpre};
    ND_TRY(cpu_matmul(device, &product));
    multiply_slope(args->slope, args->dpre);
    bias_bwd_args sums = {.dy = args->dpre, .db = args->db};
    return cpu_bias_bwd(device, &sums);
}
