/* linear_gelu.cu - products with GELU.
 *
 *   linear_gelu_fwd   y = gelu(pre), dgelu = gelu'(pre), pre = x w + b
 *   linear_gelu_bwd   dpre = (dy w^T) dgelu, db += its column sums
 *
 * Precision: float32 sums. Parallel: few rows, and on Hopper all in 16 bits, are one kernel
 * (linear_few.cu, linear_hopper.cuh); elsewhere a product and a pass over its result, with the bits
 * of linear_fwd and gelu, matmul and multiply. Bytes of the pass forward: pre is read once, dgelu
 * and y are written once.
 */
#include "linear_few.cuh"
#include "linear_hopper.cuh"

namespace {

/* A matrix (rows, columns), or its transpose, as a batch of one for matmul. */
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

/* y = gelu(pre). dgelu holds pre, and is overwritten. N elements at a time; the rows of y are
 * `stride` elements apart. */
template <class T, bool TANH, int N>
__global__ void __launch_bounds__(256)
    gelu_rows_kernel(T *dgelu, int64_t rows, int64_t columns, int64_t stride, T *y) {
    await_previous();
    const int64_t step = (int64_t)gridDim.x * blockDim.x * N;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N; i < rows * columns;
         i += step) {
        T *to = y + i / columns * stride + i % columns;
        auto gelu = [](T x) {
            return from_float<T>(TANH ? nd_gelu_tanh(to_float(x)) : nd_gelu(to_float(x)));
        };
        auto derivative = [](T x) {
            return from_float<T>(TANH ? nd_gelu_tanh_grad(to_float(x)) : nd_gelu_grad(to_float(x)));
        };
        if constexpr (N == 1) {
            const T x = checked(dgelu + i);
            checked(to) = gelu(x);
            checked(dgelu + i) = derivative(x);
        } else {
            const Vec<T> x = load16(dgelu + i);
            Vec<T> f, df;
#pragma unroll
            for (int k = 0; k < N; k++) {
                f.v[k] = gelu(x.v[k]);
                df.v[k] = derivative(x.v[k]);
            }
            store16(to, f);
            store16(dgelu + i, df);
        }
    }
}

} // namespace

nd_status cuda_linear_gelu_fwd(int device, const linear_gelu_fwd_args *a) {
    if (linear_few_serves(a->x, a->w, few_gelu_rows)) {
        return linear_gelu_fwd_few(device, a);
    }
    if (linear_hopper_serves(device, {a->x, a->w, a->b, a->dgelu, a->y})) {
        return linear_gelu_fwd_hopper(device, a);
    }
    linear_fwd_args product = {};
    product.x = a->x;
    product.w = a->w;
    product.b = a->b;
    product.y = a->dgelu;
    ND_TRY(cuda_linear_fwd(device, &product));
    const int64_t rows = a->dgelu->shape[0], columns = a->dgelu->shape[1];
    if (rows == 0 || columns == 0) {
        return ND_OK;
    }
    return with_float("linear_gelu_fwd", a->dgelu->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        T *dgelu = data_of<T>(a->dgelu), *y = data_of<T>(a->y);
        const int64_t stride = a->y->strides[0];
        const bool vectors = columns % N == 0 && (rows == 1 || stride % N == 0) &&
                             is_aligned16(dgelu) && is_aligned16(y);
        auto kernel =
            a->tanh ? (vectors ? gelu_rows_kernel<T, true, N> : gelu_rows_kernel<T, true, 1>)
                    : (vectors ? gelu_rows_kernel<T, false, N> : gelu_rows_kernel<T, false, 1>);
        const int64_t groups = ceil_div<int64_t>(rows * columns, 256 * (vectors ? N : 1));
        return cuda_launch("linear_gelu_fwd", device, kernel, cuda_grid(device, groups, 32), 256, 0,
                           dgelu, rows, columns, stride, y);
    });
}

nd_status cuda_linear_gelu_bwd(int device, const linear_gelu_bwd_args *a) {
    if (linear_hopper_serves(device, {a->dy, a->w, a->dgelu, a->dpre})) {
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
    multiply_args times = {a->dgelu, a->dpre, 0, 0, a->dpre};
    ND_TRY(cuda_multiply(device, &times));
    bias_bwd_args sums = {a->dpre, a->db, nullptr};
    return cuda_bias_bwd(device, &sums);
}
