/* linear_gelu.cu - linear_gelu_fwd: y = gelu(pre), pre = x w + b; linear_gelu_bwd: dpre = dy w^T gelu'(pre),
 * db += its column sums.
 *
 * On Hopper, in 16 bits, one kernel: linear_hopper.cu. Elsewhere the ops that they stand for, one after the
 * other, with the bits of these.
 */
#include "linear_hopper.cuh"

namespace {

/* A matrix (rows, columns) as matmul takes it, a batch of one; `transposed`: its columns by its rows. */
nd_array batch_of_one(const nd_array *a, bool transposed) {
    nd_array batch = *a;
    batch.ndim = 3;
    batch.shape[0] = 1;
    batch.strides[0] = nd_size(a);
    for (int axis = 0; axis < 2; axis++) {
        batch.shape[1 + axis] = a->shape[transposed ? 1 - axis : axis];
        batch.strides[1 + axis] = a->strides[transposed ? 1 - axis : axis];
    }
    return batch;
}

} // namespace

nd_status cuda_linear_gelu_fwd(int device, const linear_gelu_fwd_args *a) {
    if (linear_hopper_serves(device, {a->x, a->w, a->b, a->pre, a->y})) {
        return linear_gelu_fwd_hopper(device, a);
    }
    linear_fwd_args product = {};
    product.x = a->x;
    product.w = a->w;
    product.b = a->b;
    product.y = a->pre;
    ND_TRY(cuda_linear_fwd(device, &product));
    if (a->tanh) {
        gelu_tanh_args gelu = {a->pre, a->y};
        return cuda_gelu_tanh(device, &gelu);
    }
    gelu_args gelu = {a->pre, a->y};
    return cuda_gelu(device, &gelu);
}

nd_status cuda_linear_gelu_bwd(int device, const linear_gelu_bwd_args *a) {
    if (linear_hopper_serves(device, {a->dy, a->w, a->pre, a->dpre})) {
        return linear_gelu_bwd_hopper(device, a);
    }
    nd_array dy = batch_of_one(a->dy, false), w_t = batch_of_one(a->w, true),
             dpre = batch_of_one(a->dpre, false);
    matmul_args product = {};
    product.a = &dy;
    product.b = &w_t;
    product.c = &dpre;
    ND_TRY(cuda_matmul(device, &product));
    /* In place: each thread reads its elements before it writes them. */
    if (a->tanh) {
        gelu_tanh_bwd_args gelu = {a->pre, a->dpre, 0, 0, a->dpre};
        ND_TRY(cuda_gelu_tanh_bwd(device, &gelu));
    } else {
        gelu_bwd_args gelu = {a->pre, a->dpre, 0, 0, a->dpre};
        ND_TRY(cuda_gelu_bwd(device, &gelu));
    }
    bias_bwd_args sums = {a->dpre, a->db};
    return cuda_bias_bwd(device, &sums);
}
