/* dilated.cu - dilated_merge and dilated_sum join the branches of dilated attention.
 *
 *   merge   total = log(sum of exp(lse_n)),  out = sum of exp(lse_n - total) parts_n
 *   sum     out = sum of parts_n
 *
 * over the branches n that hold token t for head h: t mod segment mod dilation = h mod dilation. In
 * float32, branches in their order, rounded once. Tokens that a branch
 * does not hold are never read.
 *
 * A thread takes 16 bytes of a row, an element where D is no multiple of the vector, and walks the
 * branches once: the sum that it has so far shrinks when a larger lse comes, as in the softmax of
 * attention. Bytes: of each branch of dilation r 1/r of a (B, T, H, D) array read, and one written.
 */
#include "common.cuh"

namespace {

struct Shape {
    int64_t rows, items; /* B T H of a branch; times the vectors of D */
    int branches, times, heads, dims, vectors;
};

struct Place {
    int64_t row;
    int t, h, at; /* at: the first of the dims */
};

template <class I, int N> __device__ __forceinline__ Place split(I item, const Shape &s) {
    const I row = item / (I)s.vectors, token = row / (I)s.heads;
    return Place{(int64_t)row, (int)(token % (I)s.times), (int)(row - token * (I)s.heads),
                 (int)(item - row * (I)s.vectors) * N};
}

/* In 32 bits where they do: 64-bit divisions would cost more than the memory. */
template <int N> __device__ __forceinline__ Place place_of(int64_t item, const Shape &s) {
    return s.items <= 0x7fffffff ? split<uint32_t, N>((uint32_t)item, s)
                                 : split<uint64_t, N>((uint64_t)item, s);
}

__device__ __forceinline__ bool holds(int segment, int dilation, const Place &p) {
    return (p.t % max(segment, 1) - p.h) % max(dilation, 1) == 0;
}

template <class T, int N> __device__ __forceinline__ void load(float (&to)[N], const T *part) {
    if constexpr (N == 1) {
        to[0] = to_float(checked(part));
    } else {
        const Vec<T> v = load16(part);
#pragma unroll
        for (int k = 0; k < N; k++) {
            to[k] = to_float(v.v[k]);
        }
    }
}

template <class T, int N>
__device__ __forceinline__ void store(T *out, const float (&sum)[N], float factor) {
    if constexpr (N == 1) {
        checked(out) = from_float<T>(sum[0] * factor);
    } else {
        Vec<T> v;
#pragma unroll
        for (int k = 0; k < N; k++) {
            v.v[k] = from_float<T>(sum[k] * factor);
        }
        store16(out, v);
    }
}

template <class T, int N>
__global__ void __launch_bounds__(256)
    dilated_merge_kernel(const T *parts, const float *lse, const int *segments,
                         const int *dilations, T *out, float *total, Shape s) {
    await_previous();
    const int64_t start = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t item = start; item < s.items; item += (int64_t)gridDim.x * blockDim.x) {
        const Place p = place_of<N>(item, s);
        float sum[N] = {}, weights = 0.0f, top = -INFINITY;
        for (int n = 0; n < s.branches; n++) {
            if (!holds(segments[n], dilations[n], p)) {
                continue;
            }
            const int64_t row = n * s.rows + p.row;
            float part[N] = {}; /* loaded beside lse, not after it */
            if (s.dims > 0) {
                load<T, N>(part, parts + row * s.dims + p.at);
            }
            const float one = checked(lse + row), next = nd_max(top, one);
            if (next == -INFINITY) { /* it saw no key; the difference would be NaN */
                continue;
            }
            const float shrink = expf(top - next), weight = expf(one - next);
            top = next;
            weights = weights * shrink + weight;
#pragma unroll
            for (int k = 0; k < N; k++) {
                sum[k] = sum[k] * shrink + part[k] * weight;
            }
        }
        const bool none = weights == 0.0f;
        if (s.dims > 0) {
            store<T, N>(out + p.row * s.dims + p.at, sum, none ? 0.0f : 1.0f / weights);
        }
        if (p.at == 0) {
            total[p.row] = none ? -INFINITY : top + logf(weights);
        }
    }
}

template <class T, int N>
__global__ void __launch_bounds__(256)
    dilated_sum_kernel(const T *parts, const int *segments, const int *dilations, T *out, Shape s) {
    await_previous();
    const int64_t start = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t item = start; item < s.items; item += (int64_t)gridDim.x * blockDim.x) {
        const Place p = place_of<N>(item, s);
        float sum[N] = {};
        for (int n = 0; n < s.branches; n++) {
            if (holds(segments[n], dilations[n], p)) {
                float part[N];
                load<T, N>(part, parts + (n * s.rows + p.row) * s.dims + p.at);
#pragma unroll
                for (int k = 0; k < N; k++) {
                    sum[k] += part[k];
                }
            }
        }
        store<T, N>(out + p.row * s.dims + p.at, sum, 1.0f);
    }
}

/* Calls f(Type<T>(), Constant<N>(), shape), where N is how many elements a thread takes. */
template <class F> nd_status with_shape(const char *op, const nd_array *parts, F &&f) {
    const int64_t *shape = parts->shape, most = 0x7fffffff;
    for (int axis = 0; axis < 5; axis++) {
        if (axis != 1 && shape[axis] > most) {
            return nd_error(ND_EVALUE, "%s: parts: axis %d is %lld: must be below 2^31", op, axis,
                            (long long)shape[axis]);
        }
    }
    return with_float(op, parts->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        const bool whole = shape[4] > 0 && shape[4] % N == 0;
        /* Rows without dims still have a total. */
        const int64_t vectors = whole ? shape[4] / N : shape[4] > 0 ? shape[4] : 1;
        const int64_t rows = shape[1] * shape[2] * shape[3];
        const Shape s = {rows,          rows * vectors, (int)shape[0], (int)shape[2],
                         (int)shape[3], (int)shape[4],  (int)vectors};
        return whole ? f(tag, Constant<N>(), s) : f(tag, Constant<1>(), s);
    });
}

} // namespace

nd_status cuda_dilated_merge(int device, const dilated_merge_args *a) {
    return with_shape(
        "dilated_merge", a->parts, [&](auto tag, auto n, const Shape &s) -> nd_status {
            using T = typename decltype(tag)::type;
            constexpr int N = decltype(n)::get;
            if (s.items > 0) {
                const unsigned blocks = cuda_grid(device, ceil_div<int64_t>(s.items, 256), 8);
                ND_TRY(cuda_launch("dilated_merge", device, dilated_merge_kernel<T, N>, blocks, 256,
                                   0, data_of<T>(a->parts), data_of<float>(a->lse),
                                   data_of<int>(a->segments), data_of<int>(a->dilations),
                                   data_of<T>(a->out), data_of<float>(a->total), s));
            }
            return ND_OK;
        });
}

nd_status cuda_dilated_sum(int device, const dilated_sum_args *a) {
    return with_shape("dilated_sum", a->parts, [&](auto tag, auto n, const Shape &s) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = decltype(n)::get;
        if (s.items > 0 && s.dims > 0) {
            const unsigned blocks = cuda_grid(device, ceil_div<int64_t>(s.items, 256), 8);
            ND_TRY(cuda_launch("dilated_sum", device, dilated_sum_kernel<T, N>, blocks, 256, 0,
                               data_of<T>(a->parts), data_of<int>(a->segments),
                               data_of<int>(a->dilations), data_of<T>(a->out), s));
        }
        return ND_OK;
    });
}
