/* rotary.cu - rotary position embedding of packed heads, x (B, T, H, P, D) -> y.
 *
 * In the slices p < parts (q and k of packed q, k, v), for i < R, with s = sign sin[t, i] and
 * c = cos[t, i]:
 *     y[i] = x[i] c - x[i + R] s,   y[i + R] = x[i + R] c + x[i] s
 * All else is copied. The backward is the same with sign = -1. Computed in float32, rounded once.
 *
 * A block takes the rows (b, t) one after the other, a thread 16 bytes of y. A thread whose bytes
 * turn also loads their partners, which the neighbouring thread has just brought into the cache.
 * When R or D is not a multiple of the vector, the same kernel runs an element a thread.
 * Bytes: x once, y once, cos and sin T R each.
 */
#include "common.cuh"

namespace {

template <class T, int N> struct Piece { T v[N]; };
template <class T, int N> __device__ __forceinline__ Piece<T, N> load_piece(const T *p) {
    Piece<T, N> out;
    if constexpr (N == 1) {
        out.v[0] = *p;
    } else {
        Vec<T> v = load16(p);
#pragma unroll
        for (int k = 0; k < N; k++) {
            out.v[k] = v.v[k];
        }
    }
    return out;
}
template <class T, int N> __device__ __forceinline__ void store_piece(T *p, const Piece<T, N> &x) {
    if constexpr (N == 1) {
        *p = x.v[0];
    } else {
        Vec<T> v;
#pragma unroll
        for (int k = 0; k < N; k++) {
            v.v[k] = x.v[k];
        }
        store16(p, v);
    }
}

struct Shape {
    int64_t rows, times, width;    /* B T, T, H P D */
    int slices, parts, dims, half; /* P, parts, D, R */
};

template <class T, int N>
__global__ void __launch_bounds__(256)
    rotary_kernel(const T *x, const float *cosines, const float *sines, float sign, T *y, Shape s) {
    const uint32_t pieces = (uint32_t)(s.width / N), a_slice = (uint32_t)(s.dims / N);
    for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        const T *from = x + row * s.width;
        T *to = y + row * s.width;
        const int64_t t = row % s.times;
        for (uint32_t i = threadIdx.x; i < pieces; i += blockDim.x) {
            const uint32_t slice = i / a_slice;
            const int d = (int)(i - slice * a_slice) * N;
            const int part = (int)(slice % (uint32_t)s.slices);
            Piece<T, N> own = load_piece<T, N>(from + (int64_t)i * N);
            if (part < s.parts && d < 2 * s.half) {
                const bool first = d < s.half;
                const int at = first ? d : d - s.half;
                Piece<T, N> other =
                    load_piece<T, N>(from + (int64_t)i * N + (first ? s.half : -s.half));
                const float *c = cosines + t * s.half + at, *n = sines + t * s.half + at;
                const float signed_sine = first ? -sign : sign;
                constexpr int step = N == 1 ? 1 : 4;
#pragma unroll
                for (int base = 0; base < N; base += step) {
                    Piece<float, step> cs = load_piece<float, step>(c + base);
                    Piece<float, step> ns = load_piece<float, step>(n + base);
#pragma unroll
                    for (int j = 0; j < step; j++) {
                        const int k = base + j;
                        own.v[k] = from_float<T>(to_float(own.v[k]) * cs.v[j] +
                                                 to_float(other.v[k]) * (signed_sine * ns.v[j]));
                    }
                }
            }
            store_piece<T, N>(to + (int64_t)i * N, own);
        }
    }
}

} // namespace

nd_status cuda_rotary(int device, const rotary_args *a) {
    const int64_t *shape = a->x->shape;
    const int64_t half = a->cos->shape[1];
    if (2 * half > shape[4]) {
        return nd_error(ND_EVALUE, "rotary: cos: %lld angles rotate %lld dims, but x has %lld",
                        (long long)half, (long long)(2 * half), (long long)shape[4]);
    }
    if (a->parts < 0 || a->parts > shape[3]) {
        return nd_error(ND_EVALUE, "rotary: parts: %lld: must be between 0 and %lld",
                        (long long)a->parts, (long long)shape[3]);
    }
    Shape s;
    s.rows = shape[0] * shape[1];
    s.times = shape[1];
    s.width = shape[2] * shape[3] * shape[4];
    s.slices = (int)shape[3];
    s.parts = (int)a->parts;
    s.dims = (int)shape[4];
    s.half = (int)half;
    if (s.rows == 0 || s.width == 0) {
        return ND_OK;
    }
    if (s.width > 0x7fffffff) {
        return nd_error(ND_EVALUE, "rotary: x: H P D is %lld: must be below 2^31",
                        (long long)s.width);
    }
    return with_float("rotary", a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        const T *x = data_of<T>(a->x);
        T *y = data_of<T>(a->y);
        const float *cosines = data_of<float>(a->cos), *sines = data_of<float>(a->sin);
        bool vectors = s.dims % N == 0 && s.half % N == 0 && is_aligned16(x) && is_aligned16(y) &&
                       is_aligned16(cosines) && is_aligned16(sines);
        int64_t pieces = vectors ? s.width / N : s.width;
        int threads = (int)(pieces < 256 ? ceil_div<int64_t>(pieces, 32) * 32 : 256);
        unsigned grid = cuda_grid(device, s.rows, 64);
        if (vectors) {
            rotary_kernel<T, N><<<grid, threads, 0, cuda_stream(device)>>>(x, cosines, sines,
                                                                           (float)a->sign, y, s);
        } else {
            rotary_kernel<T, 1><<<grid, threads, 0, cuda_stream(device)>>>(x, cosines, sines,
                                                                           (float)a->sign, y, s);
        }
        CUDA_LAUNCHED("rotary");
        return ND_OK;
    });
}
