/* fp8.h - FP8 numbers in bytes, and the scale of an array; for the C compiler and nvcc.
 *
 *   e4m3   sign, 4 bits of exponent, 3 of mantissa, bias 7:  448 at most, no infinity, NaN 0x7f
 *   e5m2   sign, 5 bits of exponent, 2 of mantissa, bias 15: 57344 at most, infinity 0x7c
 * Rounded to nearest even. Larger numbers, and infinities, become the largest; a NaN 0x7f. Each
 * number of both is one of bfloat16 too. Branch-free, so that loops over them vectorise.
 */
#ifndef NEEDLE_FP8_H
#define NEEDLE_FP8_H

#include "formula.h"
#include "needle.h"

/* Below 2^(1 - bias) adding 2^(24 - bias - mantissa) rounds to the spacing of denormals. */
ND_FN uint8_t nd_to_fp8(float x, uint32_t mantissa, uint32_t bias, uint32_t largest) {
    uint32_t bits = nd_float_bits(x), a = bits & 0x7fffffffu, shift = 23u - mantissa;
    uint32_t half = (1u << (shift - 1u)) - 1u + ((a >> shift) & 1u);
    uint32_t normal = ((a + half) >> shift) - ((127u - bias) << mantissa);
    uint32_t spacing = (127u + 24u - bias - mantissa) << 23;
    uint32_t denormal = nd_float_bits(nd_bits_float(a) + nd_bits_float(spacing)) - spacing;
    uint32_t magnitude = a < (128u - bias) << 23 ? denormal : normal;
    magnitude = a >= 0x47800000u || magnitude > largest ? largest : magnitude;
    return (uint8_t)(a > 0x7f800000u ? 0x7fu : ((bits >> 24) & 0x80u) | magnitude);
}
ND_FN uint8_t nd_to_e4m3(float x) { return nd_to_fp8(x, 3, 7, 0x7e); }
ND_FN uint8_t nd_to_e5m2(float x) { return nd_to_fp8(x, 2, 15, 0x7b); }

/* As in cpu_from_f16: one exact product serves normal and denormal numbers. */
ND_FN float nd_from_fp8(uint32_t q, uint32_t mantissa, uint32_t bias, uint32_t special) {
    uint32_t sign = (q & 0x80u) << 24, field = (q & 0x7fu) << (23u - mantissa);
    float least = nd_bits_float((254u - bias) << 23);
    uint32_t finite = nd_float_bits(nd_bits_float(field) * least);
    return nd_bits_float(sign | ((q & 0x7fu) >= special ? field | 0x7f800000u : finite));
}
ND_FN float nd_from_e4m3(uint8_t q) { return nd_from_fp8(q, 3, 7, 0x7f); }
ND_FN float nd_from_e5m2(uint8_t q) { return nd_from_fp8(q, 2, 15, 0x7c); }

/* The smallest power of two, from 2^-126 on, of which 448 = 1.75 x 2^8 (with e5m2 57344 = 1.75 x
 * 2^15) are not less than a number, given by its bits: 1 for 0, NaN for an infinity or a NaN. */
ND_FN float nd_fp8_scale(uint32_t largest, bool e5m2) {
    int32_t exponent =
        (int32_t)(largest >> 23) - (e5m2 ? 15 : 8) + ((largest & 0x7fffffu) > 0x600000u);
    float scale = nd_bits_float((uint32_t)(exponent < 1 ? 1 : exponent) << 23);
    return largest >= 0x7f800000u ? nd_bits_float(0x7fc00000u) : largest == 0u ? 1.0f : scale;
}

/* The scale of x gelu'(y), |x| at most `largest`: gelu' is 1.13 at most. */
ND_FN float nd_fp8_gradient_scale(float largest, bool e5m2) {
    return nd_fp8_scale(nd_float_bits(1.25f * largest), e5m2);
}

/* More than any |y| of a norm y = h w + b over C columns, from the largest |w| and |b|: h is at most
 * sqrt(C). The last factor is for what float32 rounds. The same bits everywhere. */
ND_FN float nd_norm_bound(float w, float b, int64_t columns) {
    return fmaf(sqrtf((float)columns), w, b) * (1.0f + 1.0f / 1024.0f);
}

/* The bound of fp8_layer_weights, from max |norm_w|, max |norm_b|, max |w1|, the largest sum of
 * squares of a column, and max |b1|. */
ND_FN float nd_layer_bound(float norm_w, float norm_b, float w1, float column, float b1,
                           int64_t columns) {
    float c = (float)columns,
          denormals = c * 0x1p-16f * nd_norm_bound(norm_w, norm_b, columns) * w1;
    return (1.125f * sqrtf(2.0f * c) * sqrtf(column + 0x1p-100f) + denormals + b1) *
           (1.0f + 1.0f / 64.0f);
}

static inline nd_status nd_check_fp8_sizes(const char *op, const char *name, const nd_array *x) {
    const long long rows = x->shape[0], columns = x->shape[1];
    if (rows % 16 || columns % 16 || !rows || !columns) {
        return nd_error(ND_EVALUE, "%s: %s: (%lld, %lld), but %s", op, name, rows, columns,
                        "products in FP8 take multiples of 16 above 0");
    }
    return ND_OK;
}

/* The sizes that fp8_layer_weights takes; those of w2 are of w1 and w_o. */
static inline nd_status nd_check_fp8_layer_weights(const nd_array *w_qkv, const nd_array *w_o,
                                                   const nd_array *w1) {
    ND_TRY(nd_check_fp8_sizes("fp8_layer_weights", "w_qkv", w_qkv));
    ND_TRY(nd_check_fp8_sizes("fp8_layer_weights", "w_o", w_o));
    return nd_check_fp8_sizes("fp8_layer_weights", "w1", w1);
}

/* Of fp8_linear_gelu_fwd and _bwd. */
static inline nd_status nd_check_fp8_linear_gelu(const char *op, const char *name,
                                                 const nd_array *x, const nd_array *w) {
    ND_TRY(nd_check_fp8_sizes(op, name, x));
    return nd_check_fp8_sizes(op, "w", w);
}

/* What the axes of layernorm_pair_fp8 do not say. */
static inline nd_status nd_check_layernorm_pair_fp8(const nd_array *x) {
    const long long rows = x->shape[0], columns = x->shape[1];
    if (rows % 16 || columns % 16) {
        return nd_error(ND_EVALUE, "layernorm_pair_fp8: x: (%lld, %lld), but %s", rows, columns,
                        "products in FP8 take multiples of 16");
    }
    return ND_OK;
}

/* What the axes of fp8_quantize do not say. */
static inline nd_status nd_check_fp8_quantize(const nd_array *x, int64_t gelu,
                                              const nd_array *dgelu, bool bounded, bool twice,
                                              const nd_array *sums) {
    const int64_t parts = (x->shape[0] + 127) / 128;
    if (gelu < 0 || gelu > 2) {
        return nd_error(ND_EVALUE, "fp8_quantize: gelu is %lld, but must be 0, 1 (erf) or 2 (tanh)",
                        (long long)gelu);
    }
    if (bounded != twice) {
        return nd_error(ND_EVALUE, "fp8_quantize: scale_a and scale_b: give both or none");
    }
    if (sums && (gelu || !dgelu)) {
        return nd_error(ND_EVALUE,
                        "fp8_quantize: sums: they are of a gradient alone: give dgelu and "
                        "0 for gelu");
    }
    if (sums && sums->shape[0] != parts) {
        return nd_error(ND_EVALUE, "fp8_quantize: sums: (%lld, C), but it must be (%lld, C)",
                        (long long)sums->shape[0], (long long)parts);
    }
    return ND_OK;
}

#endif
