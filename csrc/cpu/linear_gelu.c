/* linear_gelu.c - linear_gelu_fwd: y = gelu(pre), pre = x w + b; linear_gelu_bwd: dpre = dy w^T gelu'(pre),
 * db += its column sums. The ops that they stand for, one after the other, so that their bits are those of
 * linear_fwd and gelu, matmul, gelu_bwd and bias_bwd.
 */
#include "cpu.h"

/* y = gelu(pre), whatever the stride of y's rows. */
static void apply_gelu(const nd_array *pre, bool tanh_form, nd_array *y) {
    int64_t rows = pre->shape[0], columns = pre->shape[1];

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (rows * columns > CPU_GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t j = 0; j < columns; j += CPU_RUN) {
            int64_t run = min_of(CPU_RUN, columns - j), to = row * y->strides[0] + j;
            cpu_run from, out;
            const float *x = cpu_read(pre, row * columns + j, run, from.f32);
            float *g = cpu_target(y, to, out.f32);
            for (int64_t i = 0; tanh_form && i < run; i++) {
                g[i] = nd_gelu_tanh(x[i]);
            }
            for (int64_t i = 0; !tanh_form && i < run; i++) {
                g[i] = nd_gelu(x[i]);
            }
            cpu_write(y, to, run, g);
        }
    }
}

nd_status cpu_linear_gelu_fwd(int device, const linear_gelu_fwd_args *args) {
    linear_fwd_args product = {.x = args->x, .w = args->w, .b = args->b, .y = args->pre};
    ND_TRY(cpu_linear_fwd(device, &product));
    apply_gelu(args->pre, args->tanh, args->y);
    return ND_OK;
}

/* dpre, which is the product, becomes gelu'(pre) times it. */
static void multiply_derivative(const nd_array *pre, bool tanh_form, nd_array *dpre) {
    int64_t size = nd_size(dpre);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (size > CPU_GRAIN)
    for (int64_t i = 0; i < size; i += CPU_RUN) {
        int64_t run = min_of(CPU_RUN, size - i);
        cpu_run from, to;
        const float *x = cpu_read(pre, i, run, from.f32);
        float *d = cpu_target(dpre, i, to.f32);
        if (dpre->dtype != ND_F32) {
            cpu_read(dpre, i, run, d);
        }
        for (int64_t j = 0; tanh_form && j < run; j++) {
            d[j] *= nd_gelu_tanh_grad(x[j]);
        }
        for (int64_t j = 0; !tanh_form && j < run; j++) {
            d[j] *= nd_gelu_grad(x[j]);
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
    multiply_derivative(args->pre, args->tanh, args->dpre);
    bias_bwd_args sums = {.dy = args->dpre, .db = args->db};
    return cpu_bias_bwd(device, &sums);
}
