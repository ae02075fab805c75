/* formula.h - scalar formulas and their derivatives, compiled by both the C compiler and nvcc.
 *
 * float32 in, float32 out. On the CPU the transcendental functions are branch-free polynomials that
 * the compiler vectorises (libm calls would stop it), good to about 2 units in the last place over
 * the whole range, denormal results, infinities and NaN included; on CUDA they are the library's
 * accurate functions. The normal distribution is the same polynomial on both: the library's erfc
 * alone costs more than gelu's memory traffic. The coefficients are weighted minimax fits to the
 * float64 functions.
 * nd_max and nd_min work on any arithmetic type and let a NaN win, as NumPy does.
 *
 *   nd_exp nd_log nd_sqrt nd_rsqrt nd_tanh nd_sigmoid nd_pow
 *   nd_gelu       x Phi(x), Phi the normal distribution (the "erf form")
 *   nd_gelu_tanh  x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3); equals x/2 (1 + tanh u)
 *   nd_gelu_grad, nd_gelu_tanh_grad   their derivatives
 *   nd_softplus   log(1 + e^x)
 *   nd_floor_divide, nd_remainder   as Python's // and %, of float or int64_t
 *   nd_pow, nd_floor, nd_ceil, nd_rint   of float or int64_t
 */
#ifndef NEEDLE_FORMULA_H
#define NEEDLE_FORMULA_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define ND_FN static __device__ __forceinline__
#else
#define ND_FN static inline __attribute__((always_inline, unused))
#endif

#define nd_max(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define nd_min(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

#ifdef __CUDACC__

ND_FN uint32_t nd_float_bits(float x) { return __float_as_uint(x); }
ND_FN float nd_bits_float(uint32_t x) { return __uint_as_float(x); }
ND_FN float nd_exp(float x) { return expf(x); }
ND_FN float nd_log(float x) { return logf(x); }
ND_FN float nd_sqrt(float x) { return sqrtf(x); }
ND_FN float nd_rsqrt(float x) { return rsqrtf(x); }
ND_FN float nd_tanh(float x) { return tanhf(x); }
/* For the normal distribution: one instruction for 1/x, good to 1 unit in the last place, and one
 * for the 2^x of exp(-x^2/2), good to 2 beside what rounding x^2 costs; below 2^-126 it is 0. */
ND_FN float nd_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
ND_FN float nd_normal_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(-0.72134752f * x * x));
    return y;
}
/* e^x for 1 / (1 + e^x), -88 <= x <= 88. An error of |x| units hardly changes that: where |x| is
 * large, e^x or 1 / e^x is as well. */
ND_FN float nd_logistic_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
    return y;
}

#else

/* Bit patterns through a union: the vectoriser sees through it. */
ND_FN uint32_t nd_float_bits(float x) {
    union {
        float f;
        uint32_t u;
    } v = {.f = x};
    return v.u;
}
ND_FN float nd_bits_float(uint32_t x) {
    union {
        uint32_t u;
        float f;
    } v = {.u = x};
    return v.f;
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2): exp(r), and n in the low bits of `power`. Adding
 * 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits: no conversion that would
 * be undefined for a NaN. */
ND_FN float nd_exp_parts(float x, uint32_t *power) {
    const float magic = 12582912.0f;
    float t = x * 1.44269504f + magic;
    float n = t - magic;
    float r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    float p = 0.00139517174f;
    p = p * r + 0.00836959854f;
    p = p * r + 0.0416661873f;
    p = p * r + 0.166665122f;
    p = p * r + 0.5f;
    *power = nd_float_bits(t);
    return p * r * r + r + 1.0f;
}

/* 2^n is applied in two halves, so that overflow and denormal results come out by themselves. */
ND_FN float nd_exp(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -105.0f ? -105.0f : x;
    uint32_t power;
    float p = nd_exp_parts(x, &power);
    int32_t k = (int32_t)(power - 0x4b400000u);
    int32_t half = k >> 1;
    float s1 = nd_bits_float((uint32_t)(half + 127) << 23);
    float s2 = nd_bits_float((uint32_t)(k - half + 127) << 23);
    return p * s1 * s2;
}

/* The same for arguments that are not above 88, as softmax has them: 2^n in one piece. What would
 * be denormal is 0. */
ND_FN float nd_exp_softmax(float x) {
    uint32_t power;
    float p = nd_exp_parts(x, &power);
    return x < -87.0f ? 0.0f : p * nd_bits_float((power << 23) + 0x3f800000u);
}

/* log(x) = e ln 2 + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)); denormals are scaled up first. */
ND_FN float nd_log(float x) {
    float scaled = x < 1.17549435e-38f ? x * 8388608.0f : x;
    float offset = x < 1.17549435e-38f ? -23.0f : 0.0f;
    uint32_t bits = nd_float_bits(scaled) - 0x3f3504f3u;
    float e = (float)((int32_t)bits >> 23) + offset;
    float f = nd_bits_float((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    float p = -0.0763442963f;
    p = p * f + 0.127615497f;
    p = p * f - 0.131601945f;
    p = p * f + 0.142017618f;
    p = p * f - 0.166233569f;
    p = p * f + 0.200012267f;
    p = p * f - 0.250008225f;
    p = p * f + 0.333333313f;
    float y = p * f * f * f + e * 1.42860677e-6f - 0.5f * f * f;
    y = y + f + e * 0.693145752f;
    y = x > 3.40282347e38f ? x : y;
    y = x == 0.0f ? -INFINITY : y;
    y = x < 0.0f || x != x ? NAN : y;
    return y;
}

ND_FN float nd_sqrt(float x) { return sqrtf(x); }
ND_FN float nd_rsqrt(float x) { return 1.0f / nd_sqrt(x); }

/* An odd polynomial near zero, where 1 - 2 / (exp(2x) + 1) would cancel. */
ND_FN float nd_tanh(float x) {
    float z = x * x;
    float p = -0.00571703678f;
    p = p * z + 0.0206505787f;
    p = p * z - 0.0537434965f;
    p = p * z + 0.133314908f;
    p = p * z - 0.333332837f;
    p = p * z * x + x;
    float a = x < 0.0f ? -x : x;
    float q = 1.0f - 2.0f / (nd_exp(2.0f * a) + 1.0f);
    q = x < 0.0f ? -q : q;
    return a < 0.625f ? p : q;
}

ND_FN float nd_reciprocal(float x) { return 1.0f / x; }
ND_FN float nd_normal_exp(float x) { return nd_exp(-0.5f * x * x); }
/* 2^n is added to the exponent, which is exact: a sum after a product would be rounded once or
 * twice, as the compiler likes. */
ND_FN float nd_logistic_exp(float x) {
    uint32_t power;
    float p = nd_exp_parts(x, &power);
    return nd_bits_float(nd_float_bits(p) + (power << 23));
}

#endif

/* Phi(x) and the density's exponential exp(-x^2/2). The upper tail of the normal distribution is
 * exp(-a^2/2) t P(t) with t = 1 / (1 + 0.35 a). */
ND_FN float nd_normal_cdf(float x, float *density) {
    float a = x < 0.0f ? -x : x;
    float t = nd_reciprocal(1.0f + 0.35f * a);
    float p = -0.0291517191f;
    p = p * t + 0.144000351f;
    p = p * t - 0.255774558f;
    p = p * t + 0.159244463f;
    p = p * t - 0.0231593065f;
    p = p * t + 0.105529457f;
    p = p * t + 0.119827293f;
    p = p * t + 0.139862657f;
    p = p * t + 0.139621362f;
    float d = nd_normal_exp(x);
    float tail = p * t * d;
    *density = d;
    return x < 0.0f ? tail : 1.0f - tail;
}

ND_FN float nd_sigmoid(float x) { return 1.0f / (1.0f + nd_exp(-x)); }

/* x^2, the power that losses and norms use, is one exact product. */
ND_FN float nd_pow_f32(float x, float y) { return y == 2.0f ? x * x : powf(x, y); }
/* Wraps around; x^-n is the whole part of 1 / x^n, and 0 for x = 0. */
ND_FN int64_t nd_pow_i64(int64_t x, int64_t y) {
    if (y < 0) {
        return x == 1 || (x == -1 && y % 2 == 0) ? 1 : x == -1 ? -1 : 0;
    }
    uint64_t power = 1;
    for (uint64_t square = (uint64_t)x; y > 0; y >>= 1, square *= square) {
        power *= y & 1 ? square : 1;
    }
    return (int64_t)power;
}
ND_FN int64_t nd_whole_i64(int64_t x) { return x; }

ND_FN float nd_gelu(float x) {
    float density;
    return x * nd_normal_cdf(x, &density);
}

/* Phi(x) + x phi(x). Outside +-20 it is 0 or 1 to the last bit; clamping keeps inf * 0 away. */
ND_FN float nd_gelu_grad(float x) {
    x = x > 20.0f ? 20.0f : x;
    x = x < -20.0f ? -20.0f : x;
    float density;
    float cdf = nd_normal_cdf(x, &density);
    return cdf + x * 0.398942280f * density;
}

/* Both, the bits of each. Where the density is 0, x may be infinite. */
ND_FN float nd_gelu_and_grad(float x, float *grad) {
    float density;
    float cdf = nd_normal_cdf(x, &density);
    *grad = cdf + (density > 0.0f ? x : 0.0f) * 0.398942280f * density;
    return x * cdf;
}

/* s = sigmoid(2 u), and the derivative s + x s (1 - s) 2 u', whose 1 - s = s exp(-2 u) does not
 * cancel. Outside +-10 s is 1 to the last bit, or 1e-38 and counts as 0. */
ND_FN float nd_gelu_tanh_sigmoid(float x, float *grad) {
    float low = x < -10.0f ? -10.0f : x;
    float a = low > 10.0f ? 10.0f : low;
    float z = a * a;
    float e = nd_logistic_exp(-a * (1.59576912f + 0.0713548163f * z));
    float s = nd_reciprocal(1.0f + e);
    *grad = s + a * s * (s * e) * (1.59576912f + 0.214064449f * z);
    return s;
}

/* Both. */
ND_FN float nd_gelu_tanh_and_grad(float x, float *grad) {
    float s = nd_gelu_tanh_sigmoid(x, grad);
    return x * (x < -10.0f ? 0.0f : s);
}

ND_FN float nd_gelu_tanh(float x) {
    float grad;
    return nd_gelu_tanh_and_grad(x, &grad);
}

ND_FN float nd_gelu_tanh_grad(float x) {
    float grad;
    (void)nd_gelu_tanh_and_grad(x, &grad);
    return grad;
}

ND_FN float nd_softplus(float x) {
    float a = x < 0.0f ? -x : x;
    return nd_max(x, 0.0f) + log1pf(nd_exp(-a));
}

/* Python's // and %: the quotient is rounded down, the remainder has the sign of y. Of floats they
 * are computed by fmod, so that they fit each other; x // 0 is x / 0, x % 0 is NaN. Of integers
 * x // 0 and x % 0 are 0, and -2^63 // -1 wraps around. */
ND_FN float nd_remainder_f32(float x, float y) {
    float r = fmodf(x, y);
    return r == 0.0f ? copysignf(0.0f, y) : (r < 0.0f) != (y < 0.0f) ? r + y : r;
}
ND_FN float nd_floor_divide_f32(float x, float y) {
    float r = fmodf(x, y), q = (x - r) / y;
    q = r != 0.0f && (r < 0.0f) != (y < 0.0f) ? q - 1.0f : q;
    float down = floorf(q);
    down = q - down > 0.5f ? down + 1.0f : down;
    return y == 0.0f ? x / y : q == 0.0f ? copysignf(0.0f, x / y) : down;
}
ND_FN int64_t nd_remainder_i64(int64_t x, int64_t y) {
    if (y == 0 || y == -1) {
        return 0;
    }
    int64_t r = x % y;
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
ND_FN int64_t nd_floor_divide_i64(int64_t x, int64_t y) {
    if (y == 0 || y == -1) {
        return y == 0 ? 0 : (int64_t)(0 - (uint64_t)x);
    }
    int64_t q = x / y;
    return x % y != 0 && (x < 0) != (y < 0) ? q - 1 : q;
}
#ifdef __CUDACC__
ND_FN float nd_floor(float x) { return floorf(x); }
ND_FN float nd_ceil(float x) { return ceilf(x); }
ND_FN float nd_rint(float x) { return rintf(x); }
ND_FN int64_t nd_floor(int64_t x) { return x; }
ND_FN int64_t nd_ceil(int64_t x) { return x; }
ND_FN int64_t nd_rint(int64_t x) { return x; }
ND_FN float nd_pow(float x, float y) { return nd_pow_f32(x, y); }
ND_FN int64_t nd_pow(int64_t x, int64_t y) { return nd_pow_i64(x, y); }
ND_FN float nd_remainder(float x, float y) { return nd_remainder_f32(x, y); }
ND_FN int64_t nd_remainder(int64_t x, int64_t y) { return nd_remainder_i64(x, y); }
ND_FN float nd_floor_divide(float x, float y) { return nd_floor_divide_f32(x, y); }
ND_FN int64_t nd_floor_divide(int64_t x, int64_t y) { return nd_floor_divide_i64(x, y); }
#else
#define nd_floor(x) _Generic((x), float : floorf, int64_t : nd_whole_i64)(x)
#define nd_ceil(x) _Generic((x), float : ceilf, int64_t : nd_whole_i64)(x)
#define nd_rint(x) _Generic((x), float : rintf, int64_t : nd_whole_i64)(x)
#define nd_pow(x, y) _Generic((x), float : nd_pow_f32, int64_t : nd_pow_i64)(x, y)
#define nd_remainder(x, y) _Generic((x), float : nd_remainder_f32, int64_t : nd_remainder_i64)(x, y)
#define nd_floor_divide(x, y) \
    _Generic((x), float : nd_floor_divide_f32, int64_t : nd_floor_divide_i64)(x, y)
#endif

#endif
