/* linear.cpp - linear_hopper.cu and linear_shallow_hopper.cu on the CPU. Matrices of 16 bits,
 * row-major.
 */
#include "emulated.h"
#include "host.h"

#include "linear_hopper.cu"
#include "linear_shallow_hopper.cu"

static std::vector<char> scratch;
nd_status cuda_scratch(int, size_t bytes, void **out) {
    scratch.assign(bytes, (char)0xff);
    *out = scratch.data();
    return ND_OK;
}
nd_status cuda_add_columns(const char *, int, const float *partial, int64_t rows, int64_t columns,
                           float *to) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            to[c] += partial[r * columns + c];
        }
    }
    return ND_OK;
}

/* The rows of y are `row` elements apart. */
extern "C" const char *forward(void *x, void *w, void *b, void *dgelu, void *y, int n, int k, int m,
                               int row, int tanh, int is_half, unsigned seed) {
    emulated::chance.seed(seed);
    nd_array all[5] = {matrix(x, n, k, is_half), matrix(w, k, m, is_half), matrix(b, 1, m, is_half),
                       matrix(dgelu, n, m, is_half), matrix(y, n, m, is_half)};
    all[4].strides[0] = row;
    if (!linear_hopper_serves(0, {&all[0], &all[1], &all[2], &all[3], &all[4]})) {
        return "not served";
    }
    linear_gelu_fwd_args args = {&all[0], &all[1], &all[2], tanh, &all[3], &all[4]};
    return result(linear_gelu_fwd_hopper(0, &args));
}

/* y of a product of b x t rows, by matrices as linear_rotary.cu has them. bias: or NULL. */
extern "C" const char *rotary(void *x, void *w, void *bias, float *cos, float *sin, void *y, int b, int t,
                              int k, int heads, int dim, int r, int parts, int is_half,
                              unsigned seed) {
    emulated::chance.seed(seed);
    const int columns = 3 * heads * dim;
    nd_array all[4] = {matrix(x, b * t, k, is_half), matrix(w, k, columns, is_half),
                       matrix(bias, 1, columns, is_half), matrix(y, b * t, columns, is_half)};
    nd_array tables[2] = {matrix(cos, t, r, 0), matrix(sin, t, r, 0)}, packed = all[3];
    packed.shape[3] = 3;
    packed.shape[4] = dim;
    linear_rotary_fwd_args args = {};
    args.b = bias ? &all[2] : NULL;
    args.cos = &tables[0];
    args.sin = &tables[1];
    args.parts = parts;
    args.y = &packed;
    if (!linear_rotary_shallow_serves(0, &args, &all[0], &all[1], &all[3])) {
        return "not served";
    }
    return result(linear_rotary_fwd_shallow(0, &args, &all[0], &all[1], &all[3]));
}

extern "C" const char *backward(void *dy, void *w, void *dgelu, void *dpre, float *db, int n,
                                int m, int k, int is_half, unsigned seed) {
    emulated::chance.seed(seed);
    nd_array all[4] = {matrix(dy, n, m, is_half), matrix(w, k, m, is_half),
                       matrix(dgelu, n, k, is_half), matrix(dpre, n, k, is_half)};
    if (!linear_hopper_serves(0, {&all[0], &all[1], &all[2], &all[3]})) {
        return "not served";
    }
    nd_array sums = {};
    sums.data = db;
    linear_gelu_bwd_args args = {&all[0], &all[1], &all[2], &all[3], &sums};
    return result(linear_gelu_bwd_hopper(0, &args));
}
