/* gelu.cuh - the erf form of GELU in half of the instructions of formula.h, where it stands at the end of a
 * product and its result has 16 bits.
 *
 * Of a = |x|, the upper tail of the normal distribution Q(a) = 2^q(a), and log2 Q is so smooth that a
 * polynomial of degree 7 gives Q with a relative error of 2^-18 up to a = 4.5, 2^-14 up to 6.5, where Q is
 * 4e-11; beyond it is as good as 0, and rightly 0 behind 16. The coefficients are a minimax fit to the float64
 * function on [0, 6]. A NaN stays one.
 */
#ifndef NEEDLE_GELU_CUH
#define NEEDLE_GELU_CUH

#include "common.cuh"

/* |x|, at most 16: q ends before infinity does. */
__device__ __forceinline__ float gelu_magnitude(float x) { return min_or_nan(fabsf(x), 16.0f); }

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

/* x Phi(x) = max(x, 0) - |x| Q(|x|) */
__device__ __forceinline__ float gelu_16(float x) {
    const float a = gelu_magnitude(x);
    return fmaxf(x, 0.0f) - a * gelu_tail(a);
}

/* Phi(x) + x phi(x): r = Q(a) - a phi(a) where x is negative, 1 - r where it is not */
__device__ __forceinline__ float gelu_grad_16(float x) {
    const float a = gelu_magnitude(x);
    const float r = gelu_tail(a) - a * 0.398942280f * nd_normal_exp(a);
    return 0.5f + copysignf(0.5f - r, x);
}

#endif
