/* gelu.cuh - GELU and its derivative together, in float32 to be rounded to 16 bits.
 *
 * The erf form takes half of the instructions of formula.h. Of a = |x|, the upper tail of the
 * normal distribution is Q(a) = 2^q(a); log2 Q is so smooth that a polynomial of degree 7 gives Q
 * with a relative error of 2^-18 up to a = 4.5, 2^-14 up to 6.5, where Q is 4e-11. The coefficients
 * are a minimax fit to the float64 function on [0, 6]. Beyond 16 Q is 0. A NaN stays one.
 */
#ifndef NEEDLE_GELU_CUH
#define NEEDLE_GELU_CUH

#include "common.cuh"

/* gelu(x) and gelu'(x). */
struct Gelu {
    float value, derivative;
};

/* Q(a) */
__device__ __forceinline__ float gelu_tail(float a) {
    float q = -1.81107339e-06f;
    q = q * a + 6.1187493e-05f;
    q = q * a - 0.000927798275f;
    q = q * a + 0.00849915203f;
    q = q * a - 0.0539461225f;
    q = q * a - 0.458474636f;
    q = q * a - 1.15124834f;
    q = q * a - 0.99999541f;
    return fast_exp2(q);
}

/* x Phi(x) = max(x, 0) - a Q(a); its derivative is r = Q(a) - a phi(a) where x < 0, else 1 - r. a
 * phi(a) = b 2^(-b^2 + log2 s), b^2 = a^2 log2(e) / 2, s = a / (b sqrt(2 pi)). a = |x|, at most 16,
 * since q ends before infinity does. */
__device__ __forceinline__ Gelu gelu_erf_16(float x) {
    const float a = min_or_nan(fabsf(x), 16.0f), tail = gelu_tail(a);
    const float b = a * 0.849321800f, r = tail - b * fast_exp2(fmaf(-b, b, -1.09013125f));
    return {fmaxf(x, 0.0f) - a * tail, 0.5f + copysignf(0.5f - r, x)};
}

/* x is clamped at -10, where y is -1e-37. */
__device__ __forceinline__ Gelu gelu_tanh_16(float x) {
    Gelu g;
    const float s = nd_gelu_tanh_sigmoid(x, &g.derivative);
    g.value = (x < -10.0f ? -10.0f : x) * s;
    return g;
}

template <bool TANH> __device__ __forceinline__ Gelu gelu_16(float x) {
    return TANH ? gelu_tanh_16(x) : gelu_erf_16(x);
}

#endif
