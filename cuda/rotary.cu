/* rotary.cu - rotary position embedding of packed heads, x (B, T, H, P, D), in place.
 *
 * In the slices p < parts (q and k of packed q, k, v), for i < R, with s = sign sin[t, i] and
 * c = cos[t, i]:
 *     x[i], x[i + R] = x[i] c - x[i + R] s, x[i + R] c + x[i] s
 * All else is not touched. The backward is the same with sign = -1. Computed in float32, rounded once.
 *
 * A thread takes 16 bytes of x[0 .. R) and their partners; when R or D is not a multiple of the vector,
 * the same kernel takes an element. Bytes: the rotated ones read and written, in whole sectors of 32;
 * cos and sin T R each.
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
    int64_t items, times;           /* (b, t, h, p < parts, N of R); T */
    int heads, slices, parts, dims; /* H, P, parts, D */
    int half;                       /* R */
};

template <class T, int N>
__global__ void __launch_bounds__(256)
    rotary_kernel(T *x, const float *cosines, const float *sines, float sign, Shape s) {
    const uint32_t pieces = (uint32_t)(s.half / N), parts = (uint32_t)s.parts;
    const uint32_t a_row = pieces * parts * (uint32_t)s.heads; /* items of a (b, t) */
    const int64_t start = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t item = start; item < s.items; item += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = item / a_row, t = row % s.times;
        const uint32_t rest = (uint32_t)(item - row * a_row);
        const uint32_t slice = rest / pieces, head = slice / parts;
        const int at = (int)(rest - slice * pieces) * N;
        const int64_t from = (row * s.heads + head) * s.slices + (slice - head * parts);
        T *place = x + from * s.dims + at;
        Piece<T, N> first = load_piece<T, N>(place), second = load_piece<T, N>(place + s.half);
        const float *c = cosines + t * s.half + at, *n = sines + t * s.half + at;
        constexpr int step = N == 1 ? 1 : 4;
#pragma unroll
        for (int base = 0; base < N; base += step) {
            Piece<float, step> cs = load_piece<float, step>(c + base);
            Piece<float, step> ns = load_piece<float, step>(n + base);
#pragma unroll
            for (int j = 0; j < step; j++) {
                const float a = to_float(first.v[base + j]), b = to_float(second.v[base + j]);
                const float sine = sign * ns.v[j];
                first.v[base + j] = from_float<T>(a * cs.v[j] - b * sine);
                second.v[base + j] = from_float<T>(b * cs.v[j] + a * sine);
            }
        }
        store_piece<T, N>(place, first);
        store_piece<T, N>(place + s.half, second);
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
    const int64_t rows = shape[0] * shape[1];
    if (rows == 0 || shape[2] == 0 || a->parts == 0 || half == 0) {
        return ND_OK;
    }
    if (shape[2] * shape[3] * shape[4] > 0x7fffffff) {
        return nd_error(ND_EVALUE, "rotary: x: H P D is %lld: must be below 2^31",
                        (long long)(shape[2] * shape[3] * shape[4]));
    }
    return with_float("rotary", a->x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        T *x = data_of<T>(a->x);
        const float *cosines = data_of<float>(a->cos), *sines = data_of<float>(a->sin);
        bool vectors = shape[4] % N == 0 && half % N == 0 && is_aligned16(x) &&
                       is_aligned16(cosines) && is_aligned16(sines);
        Shape s = {rows * shape[2] * a->parts * (vectors ? half / N : half),
                   shape[1],
                   (int)shape[2],
                   (int)shape[3],
                   (int)a->parts,
                   (int)shape[4],
                   (int)half};
        unsigned grid = cuda_grid(device, ceil_div<int64_t>(s.items, 256), 8);
        if (vectors) {
            rotary_kernel<T, N>
                <<<grid, 256, 0, cuda_stream(device)>>>(x, cosines, sines, (float)a->sign, s);
        } else {
            rotary_kernel<T, 1>
                <<<grid, 256, 0, cuda_stream(device)>>>(x, cosines, sines, (float)a->sign, s);
        }
        CUDA_LAUNCHED("rotary");
        return ND_OK;
    });
}
