/* column_sums.cu - the sums of tall matrices' columns, added to gradients of biases and norms: the
 * second step of ops that leave a row of partial sums a thread block in scratch.
 *
 * Parallel: 32 columns a thread block, 32 threads a column, the order fixed by the rows.
 * The sums of a transformer layer are held, up to `most_sums`, and added by one launch at its end:
 * on small models a launch takes longer than its sums. Scratch of held sums is not handed out
 * again.
 */
#include <algorithm>

#include "device.cuh"

namespace {

/* blockIdx.y tells which of the sums. */
__global__ void __launch_bounds__(1024) add_columns_kernel(const __grid_constant__ ColumnSums all) {
    await_previous();
    const ColumnSum &of = all.sums[blockIdx.y];
    __shared__ float sums[32][33];
    const int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < of.columns) {
#pragma unroll 4
        for (int64_t r = threadIdx.y; r < of.rows; r += 32) {
            sum += of.partial[r * of.columns + c];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    const int64_t own = (int64_t)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && own < of.columns) {
        of.to[own] += sum;
    }
}

nd_status launch(const char *op, int device, const ColumnSums &all) {
    int64_t columns = 0;
    for (int i = 0; i < all.count; i++) {
        columns = std::max(columns, all.sums[i].columns);
    }
    dim3 grid((unsigned)ceil_div<int64_t>(columns, 32), (unsigned)all.count);
    return cuda_launch(op, device, add_columns_kernel, grid, dim3(32, 32), 0, all);
}

/* The device whose sums this thread holds; other threads' ops add theirs at once. */
thread_local int holding = -1;

} // namespace

nd_status cuda_add_held_sums(int device) {
    Device &d = cuda_device(device);
    const ColumnSums all = d.held;
    d.held.count = 0;
    d.held_bytes = 0;
    return all.count > 0 ? launch("layer_bwd", device, all) : ND_OK;
}

nd_status cuda_hold_sums(int device, bool hold) {
    holding = hold ? device : -1;
    if (hold) {
        return ND_OK;
    }
    Exclusive call;
    ND_TRY(call.begin(device));
    return cuda_add_held_sums(device);
}

nd_status cuda_add_columns_of(const char *op, int device, const float *partial, int64_t rows,
                              int64_t columns, int64_t apart, int count, float *const *to) {
    Device &d = cuda_device(device);
    ColumnSums now = {};
    ColumnSums &all = holding == device ? d.held : now;
    for (int i = 0; i < count; i++) {
        auto same = [&](const ColumnSum &sum) { return sum.to == to[i]; };
        if (all.count == most_sums || std::any_of(all.sums, all.sums + all.count, same)) {
            ND_TRY(launch(op, device, all));
            all.count = 0;
        }
        all.sums[all.count++] = {partial + i * apart, rows, columns, to[i]};
    }
    if (holding == device) {
        const char *end = (const char *)(partial + (count - 1) * apart + rows * columns);
        d.held_bytes = padded((size_t)(end - d.used_scratch));
        return ND_OK;
    }
    return launch(op, device, all);
}

nd_status cuda_add_columns(const char *op, int device, const float *partial, int64_t rows,
                           int64_t columns, float *to) {
    return cuda_add_columns_of(op, device, partial, rows, columns, 0, 1, &to);
}
