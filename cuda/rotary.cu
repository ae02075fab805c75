/* rotary.cu - rotary position embedding of packed heads, x (B, T, H, P, D), in place.
 *
 * In the slices p < parts (q and k of packed q, k, v), for i < R, with s = sign sin[t, i] and c =
 * cos[t, i]:
 *     x[i], x[i + R] = x[i] c - x[i + R] s, x[i + R] c + x[i] s
 * All else is not touched. The backward is the same with sign = -1. Computed in float32, rounded
 * once.
 *
 * Two neighbouring lanes share 16 bytes of x[0 .. R) and their partners, one each, and exchange
 * them: where 2 R dims are a sector of memory, a warp reads and writes whole ones.
 * When R or a stride is not a multiple of the vector, the same kernel takes elements. Bytes: the
 * rotated ones read and written, in whole sectors of 32; cos and sin T R each.
 */
#include "common.cuh"

namespace {

template <class T, int N> struct Pack { T v[N]; };
template <class T, int N> __device__ __forceinline__ Pack<T, N> load_pack(const T *p) {
    Pack<T, N> out;
    if constexpr (N == 1) {
        out.v[0] = checked(p);
    } else {
        Vec<T> v = load16(p);
#pragma unroll
        for (int k = 0; k < N; k++) {
            out.v[k] = v.v[k];
        }
    }
    return out;
}
template <class T, int N> __device__ __forceinline__ void store_pack(T *p, const Pack<T, N> &x) {
    if constexpr (N == 1) {
        checked(p) = x.v[0];
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
    int64_t items;             /* (b, t, h, p < parts, vector of R, which of the pair) */
    int64_t times, heads;      /* T; H */
    int parts, half;           /* of P; R */
    int64_t b, t, head, slice; /* strides of x */
};

/* One of the rotated pair, in a lane whose neighbour has the other. */
template <class T, int N>
__device__ __forceinline__ Pack<T, N> rotated(const Pack<T, N> &mine, const float *cosines,
                                              const float *sines, float sign) {
    constexpr int step = N == 1 ? 1 : 4;
    Pack<T, N> out;
#pragma unroll
    for (int base = 0; base < N; base += step) {
        const Pack<float, step> c = load_pack<float, step>(cosines + base);
        const Pack<float, step> s = load_pack<float, step>(sines + base);
#pragma unroll
        for (int j = 0; j < step; j++) {
            const float x = to_float(mine.v[base + j]);
            const float other = __shfl_xor_sync(~0u, x, 1);
            out.v[base + j] = from_float<T>(fmaf(x, c.v[j], other * (sign * s.v[j])));
        }
    }
    return out;
}

template <class T, int N>
__global__ void __launch_bounds__(256)
    rotary_kernel(T *x, const float *cosines, const float *sines, float sign, Shape s) {
    await_previous();
    const int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= s.items) { /* and so is its neighbour */
        return;
    }
    const int64_t packs = 2 * (s.half / N), slices = item / packs, heads = slices / s.parts;
    const int64_t times = heads / s.heads, batch = times / s.times;
    const int pack = (int)(item - slices * packs), at = pack / 2 * N;
    const bool second = pack % 2 != 0; /* of the pair */
    const int64_t t = times - batch * s.times;
    T *to = x + batch * s.b + t * s.t + (heads - times * s.heads) * s.head +
            (slices - heads * s.parts) * s.slice + at + (second ? s.half : 0);
    const int64_t angle = t * s.half + at;
    const Pack<T, N> mine = load_pack<T, N>(to);
    store_pack<T, N>(to,
                     rotated<T, N>(mine, cosines + angle, sines + angle, second ? sign : -sign));
}

} // namespace

nd_status cuda_rotate(const char *op, int device, const nd_array *x, int64_t parts,
                      const nd_array *cos, const nd_array *sin, float sign) {
    const int64_t *shape = x->shape, *strides = x->strides, half = cos->shape[1];
    const int64_t slices = shape[0] * shape[1] * shape[2] * parts;
    if (slices * half == 0) {
        return ND_OK;
    }
    return with_float(op, x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        const float *cosines = data_of<float>(cos), *sines = data_of<float>(sin);
        bool vectors =
            half % N == 0 && is_aligned16(x->data) && is_aligned16(cosines) && is_aligned16(sines);
        for (int axis = 0; axis < x->ndim - 1; axis++) {
            vectors = vectors && (shape[axis] == 1 || strides[axis] % N == 0);
        }
        const Shape s = {2 * slices * (vectors ? half / N : half),
                         shape[1],
                         shape[2],
                         (int)parts,
                         (int)half,
                         strides[0],
                         strides[1],
                         strides[2],
                         x->ndim == 5 ? strides[3] : 0};
        const int64_t blocks = ceil_div<int64_t>(s.items, 256);
        if (blocks > INT32_MAX) {
            return nd_error(ND_EVALUE, "%s: %lld dims to rotate, but one launch takes at most 2^39",
                            op, (long long)s.items);
        }
        auto kernel = vectors ? rotary_kernel<T, N> : rotary_kernel<T, 1>;
        return cuda_launch(op, device, kernel, (unsigned)blocks, 256, 0, (T *)x->data, cosines,
                           sines, sign, s);
    });
}

nd_status cuda_check_rotation(const char *op, const nd_array *x, int64_t parts,
                              const nd_array *cos) {
    const int64_t slices = x->shape[x->ndim - 2], d = x->shape[x->ndim - 1], half = cos->shape[1];
    if (2 * half > d) {
        return nd_error(ND_EVALUE,
                        "%s: cos: %lld angles rotate %lld dims, but a head has %lld (give at most "
                        "D / 2 angles)",
                        op, (long long)half, (long long)(2 * half), (long long)d);
    }
    if (parts < 0 || parts > slices) {
        return nd_error(ND_EVALUE, "%s: parts: %lld: must be between 0 and %lld", op,
                        (long long)parts, (long long)slices);
    }
    return ND_OK;
}

nd_status cuda_rotary(int device, const rotary_args *a) {
    ND_TRY(cuda_check_rotation("rotary", a->x, a->parts, a->cos));
    return cuda_rotate("rotary", device, a->x, a->parts, a->cos, a->sin, (float)a->sign);
}
