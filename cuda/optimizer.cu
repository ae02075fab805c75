/* optimizer.cu - the gradient's norm and AdamW over flat buffers.
 *
 *   grad_norm  norm = sqrt(sum g^2), scale = min(1, max_norm / (norm + 1e-6)), or 1 for
 *              max_norm <= 0; NaN when the norm is not finite, so that AdamW skips the step
 *   adamw      g' = scale g, m = beta1 m + (1 - beta1) g', v = beta2 v + (1 - beta2) g'^2,
 *              p = p (1 - lr weight_decay) - lr (m / (1 - beta1^step)) /
 *                  (sqrt(v / (1 - beta2^step)) + eps),  p_low = p rounded
 *              A scale that is not finite changes nothing.
 *
 * Both wait for nothing: the scale stays on the device. The norm is summed in a fixed order: a
 * thread's elements, a block's threads, the blocks.
 * Bytes: grad_norm 4 N; adamw 28 N (p, m, v in and out, g in), and sizeof(p_low) N.
 */
#include <math.h>

#include "common.cuh"

namespace {

constexpr int threads = 256;

template <int N> struct Floats { float v[N]; };
template <int N> __device__ __forceinline__ Floats<N> load(const float *p) {
    Floats<N> out;
    if constexpr (N == 4) {
        const float4 four = checked((const float4 *)p);
        out.v[0] = four.x;
        out.v[1] = four.y;
        out.v[2] = four.z;
        out.v[3] = four.w;
    } else {
        out.v[0] = checked(p);
    }
    return out;
}
template <int N> __device__ __forceinline__ void store(float *p, const Floats<N> &x) {
    if constexpr (N == 4) {
        __stwb(&checked((float4 *)p), make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
    } else {
        checked(p) = x.v[0];
    }
}
template <class T, int N> __device__ __forceinline__ void store_low(T *p, const Floats<N> &x) {
    if constexpr (N == 4 && sizeof(T) == 2) {
        checked((uint2 *)p) = make_uint2(pack(from_float<T>(x.v[0]), from_float<T>(x.v[1])),
                                         pack(from_float<T>(x.v[2]), from_float<T>(x.v[3])));
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) {
            checked(p + k) = from_float<T>(x.v[k]);
        }
    }
}

/* partial[block] = the sum of its squares */
template <int N>
__global__ void __launch_bounds__(threads)
    squares_kernel(const float *g, int64_t count, float *partial) {
    await_previous();
    const int64_t step = (int64_t)gridDim.x * threads;
    const int64_t groups = count / N;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < groups; i += step) {
        Floats<N> x = load<N>(g + i * N);
#pragma unroll
        for (int k = 0; k < N; k++) {
            sum += x.v[k] * x.v[k];
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < count - groups * N) {
        float x = g[groups * N + threadIdx.x];
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
    }
}

__global__ void __launch_bounds__(threads)
    norm_kernel(const float *partial, int blocks, float max_norm, float *norm, float *scale) {
    await_previous();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < blocks; i += threads) {
        sum += partial[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        const float root = sqrtf(sum);
        *norm = root;
        float by = 1.0f;
        if (!isfinite(root)) {
            by = NAN;
        } else if (max_norm > 0.0f && max_norm < root + 1e-6f) {
            by = max_norm / (root + 1e-6f);
        }
        *scale = by;
    }
}

/* The values that depend on the step alone, computed by the host in float64. */
struct Rates {
    float beta1, rest1, beta2, rest2; /* rest = 1 - beta */
    float keep;                       /* 1 - lr weight_decay */
    float step;                       /* lr / (1 - beta1^step) */
    float root;                       /* 1 / sqrt(1 - beta2^step) */
    float eps;
};

template <class Low, int N>
__global__ void __launch_bounds__(threads)
    adamw_kernel(float *p, const float *g, float *m, float *v, Low *p_low, const float *scale,
                 int64_t count, Rates r) {
    await_previous();
    const float by = scale ? *scale : 1.0f;
    if (!isfinite(by)) {
        return;
    }
    const int64_t groups = count / N; /* N is 1 when it does not divide count */
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < groups;
         i += (int64_t)gridDim.x * threads) {
        const int64_t at = i * N;
        Floats<N> gs = load<N>(g + at), ms = load<N>(m + at), vs = load<N>(v + at);
        Floats<N> ps = load<N>(p + at);
#pragma unroll
        for (int k = 0; k < N; k++) {
            /* Spelled out: left to contract as it likes, the compiler rounds the two widths
             * differently, and a parameter's bits would depend on its neighbours. */
            const float x = __fmul_rn(gs.v[k], by);
            ms.v[k] = __fmaf_rn(r.beta1, ms.v[k], __fmul_rn(r.rest1, x));
            vs.v[k] = __fmaf_rn(r.beta2, vs.v[k], __fmul_rn(r.rest2, __fmul_rn(x, x)));
            const float root = __fmaf_rn(__fsqrt_rn(vs.v[k]), r.root, r.eps);
            const float ratio = __fdiv_rn(ms.v[k], root);
            ps.v[k] = __fmaf_rn(-r.step, ratio, __fmul_rn(ps.v[k], r.keep));
        }
        store(m + at, ms);
        store(v + at, vs);
        store(p + at, ps);
        if (p_low) {
            store_low(p_low + at, ps);
        }
    }
}

} // namespace

nd_status cuda_grad_norm(int device, const grad_norm_args *a) {
    const char *op = "grad_norm";
    const int64_t count = a->g->shape[0];
    const float *g = data_of<float>(a->g);
    unsigned blocks = cuda_grid(device, ceil_div<int64_t>(count, threads * 4), 8);
    void *partial;
    ND_TRY(cuda_scratch(device, blocks * sizeof(float), &partial));
    auto squares = is_aligned16(g) ? squares_kernel<4> : squares_kernel<1>;
    ND_TRY(cuda_launch(op, device, squares, blocks, threads, 0, g, count, (float *)partial));
    return cuda_launch(op, device, norm_kernel, 1, threads, 0, (const float *)partial, (int)blocks,
                       (float)a->max_norm, data_of<float>(a->norm), data_of<float>(a->scale));
}

nd_status cuda_adamw(int device, const adamw_args *a) {
    const char *op = "adamw";
    const int64_t count = a->p->shape[0];
    if (a->step < 1) {
        return nd_error(ND_EVALUE, "adamw: step: %lld: counts from 1", (long long)a->step);
    }
    if (count == 0) {
        return ND_OK;
    }
    Rates r;
    r.beta1 = (float)a->beta1;
    r.rest1 = (float)(1.0 - a->beta1);
    r.beta2 = (float)a->beta2;
    r.rest2 = (float)(1.0 - a->beta2);
    r.keep = (float)(1.0 - a->lr * a->weight_decay);
    r.step = (float)(a->lr / (1.0 - pow(a->beta1, (double)a->step)));
    r.root = (float)(1.0 / sqrt(1.0 - pow(a->beta2, (double)a->step)));
    r.eps = (float)a->eps;
    float *p = data_of<float>(a->p), *m = data_of<float>(a->m), *v = data_of<float>(a->v);
    const float *g = data_of<float>(a->g);
    const float *scale = a->scale ? data_of<float>(a->scale) : nullptr;
    void *low = a->p_low ? a->p_low->data : nullptr;
    bool vectors = count % 4 == 0 && is_aligned16(p) && is_aligned16(g) && is_aligned16(m) &&
                   is_aligned16(v) && (uintptr_t)low % 8 == 0;
    unsigned grid =
        cuda_grid(device, ceil_div<int64_t>(count, vectors ? threads * 4 : threads), 64);
    return with_float(op, a->p_low ? a->p_low->dtype : ND_F32, [&](auto tag) -> nd_status {
        using Low = typename decltype(tag)::type;
        auto kernel = vectors ? adamw_kernel<Low, 4> : adamw_kernel<Low, 1>;
        return cuda_launch(op, device, kernel, grid, threads, 0, p, g, m, v, (Low *)low, scale,
                           count, r);
    });
}
