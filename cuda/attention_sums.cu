/* attention_sums.cu - passes over dq, dk and dv (B, T or S, H, D): their sums over all rows, and their
 * largest magnitude, where the kernels that wrote them did neither on the way.
 *
 * Sums in float32, in an order that the shapes decide; a maximum, of bits, has no order. Bytes: dq, dk
 * and dv once each.
 */
#include "attention_sums.cuh"

using namespace attention;

namespace {

constexpr int THREADS = 256;

/* A block sums `chunk` rows, of all batch entries one after the other, of 32 columns of dq, dk or
 * dv (blockIdx.z): partial (chunks, H, 3, D). */
template <class T>
__global__ void __launch_bounds__(THREADS)
    sums_kernel(const __grid_constant__ Problem p, int64_t chunk, float *partial) {
    await_previous();
    __shared__ float sums[THREADS];
    const int which = blockIdx.z, times = which == 0 ? p.T : p.S;
    const Rows &rows = which == 0 ? p.dq : which == 1 ? p.dk : p.dv;
    const int column = blockIdx.x * 32 + threadIdx.x % 32;
    const bool inside = column < p.H * p.D;
    const int h = inside ? column / p.D : 0, d = column - h * p.D;
    const int64_t end = min((int64_t)p.B * times, (blockIdx.y + 1) * chunk);
    float sum = 0.0f;
    for (int64_t i = blockIdx.y * chunk + threadIdx.x / 32; inside && i < end; i += THREADS / 32) {
        const int64_t b = i / times, t = i - b * times;
        sum += to_float(rows.head<const T>((int)b, h)[t * rows.t + d]);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 32 && inside) {
        for (int i = 1; i < THREADS / 32; i++) {
            sum += sums[32 * i + threadIdx.x];
        }
        partial[((int64_t)blockIdx.y * p.H + h) * 3 * p.D + which * p.D + d] = sum;
    }
}

/* The largest magnitude in dq, dk and dv (blockIdx.y), a warp a row. */
template <class T>
__global__ void __launch_bounds__(THREADS) largest_kernel(const __grid_constant__ Problem p) {
    await_previous();
    const int which = blockIdx.y, length = which == 0 ? p.T : p.S;
    const Rows &x = which == 0 ? p.dq : which == 1 ? p.dk : p.dv;
    const int64_t rows = (int64_t)p.B * length * p.H, step = (int64_t)gridDim.x * THREADS / 32;
    unsigned most = 0;
    for (int64_t row = (blockIdx.x * THREADS + threadIdx.x) / 32; row < rows; row += step) {
        const int64_t bt = row / p.H, t = bt % length;
        const T *of = x.head<const T>((int)(bt / length), (int)(row % p.H)) + t * x.t;
        for (int d = threadIdx.x % 32; d < p.D; d += 32) {
            most = max(most, __float_as_uint(fabsf(to_float(of[d]))));
        }
    }
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) {
        atomicMax(p.largest, most);
    }
}

} // namespace

nd_status attention::add_sums(const char *op, int device, nd_dtype dtype, const Problem &p,
                              float *db) {
    const int64_t most = (int64_t)p.B * (p.T > p.S ? p.T : p.S), columns = (int64_t)p.H * p.D;
    if (most == 0 || columns == 0) {
        return ND_OK;
    }
    const int64_t strips = ceil_div<int64_t>(columns, 32), chunk = ceil_div<int64_t>(most, 64);
    const int64_t chunks = ceil_div(most, chunk);
    void *partial;
    ND_TRY(cuda_scratch(device, (size_t)(chunks * 3 * columns) * sizeof(float), &partial));
    dim3 grid((unsigned)strips, (unsigned)chunks, 3);
    ND_TRY(with_float(op, dtype, [&](auto tag) -> nd_status {
        return cuda_launch(op, device, sums_kernel<typename decltype(tag)::type>, grid, THREADS, 0,
                           p, chunk, (float *)partial);
    }));
    return cuda_add_columns(op, device, (const float *)partial, chunks, 3 * columns, db);
}

nd_status attention::find_largest(const char *op, int device, nd_dtype dtype, Problem p,
                                  nd_array *largest) {
    const int64_t rows = (int64_t)p.B * (p.T > p.S ? p.T : p.S) * p.H;
    fill_args zero = {largest, 0.0};
    ND_TRY(cuda_fill(device, &zero));
    p.largest = (unsigned *)largest->data;
    const dim3 grid(cuda_grid(device, ceil_div<int64_t>(rows, THREADS / 32), 4), 3);
    return with_float(op, dtype, [&](auto tag) -> nd_status {
        return cuda_launch(op, device, largest_kernel<typename decltype(tag)::type>, grid, THREADS,
                           0, p);
    });
}
