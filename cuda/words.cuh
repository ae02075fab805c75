/* words.cuh - elements moved as the widest words that their places allow, and a value as such words.
 */
#ifndef NEEDLE_WORDS_CUH
#define NEEDLE_WORDS_CUH

#include <string.h>

#include "common.cuh"

/* The widest word, in elements of `size` bytes, that every row can be cut into. */
static inline int64_t word_elements(const nd_loop &loop, int operands, const void *const *data,
                                    size_t size) {
    for (int64_t n = (int64_t)(16 / size); n > 1; n /= 2) {
        bool fits = loop.ndim > 0 && loop.shape[loop.ndim - 1] % n == 0;
        for (int k = 0; fits && k < operands; k++) {
            fits = loop.strides[k][loop.ndim - 1] == 1 && (uintptr_t)data[k] % (n * size) == 0;
            for (int d = 0; fits && d < loop.ndim - 1; d++) {
                fits = loop.strides[k][d] % n == 0;
            }
        }
        if (fits) {
            return n;
        }
    }
    return 1;
}

/* Count in words of n elements instead of elements. */
static inline void widen(nd_loop *loop, int operands, int64_t n) {
    if (n == 1) {
        return;
    }
    int last = loop->ndim - 1;
    loop->size /= n;
    loop->shape[last] /= n;
    for (int k = 0; k < operands; k++) {
        for (int d = 0; d < last; d++) {
            loop->strides[k][d] /= n;
        }
    }
}

/* The bits of `value` in that dtype; float16 and bfloat16 are rounded to nearest even. */
template <class T> static inline void put_bits(void *bits, T value) {
    memcpy(bits, &value, sizeof value);
}
static inline void value_bits(nd_dtype dtype, double value, void *bits) {
    switch (dtype) {
    case ND_F32:
        return put_bits(bits, (float)value);
    case ND_BF16:
        return put_bits(bits, __float2bfloat16_rn((float)value));
    case ND_F16:
        return put_bits(bits, __float2half_rn((float)value));
    case ND_I32:
        return put_bits(bits, (int32_t)(int64_t)value);
    case ND_I64:
        return put_bits(bits, (int64_t)value);
    case ND_U8:
        return put_bits(bits, (uint8_t)(int64_t)value);
    case ND_U16:
        return put_bits(bits, (uint16_t)(int64_t)value);
    default:
        return put_bits(bits, (uint8_t)(value != 0));
    }
}

/* The value's bits again and again, through 16 bytes. */
static inline void repeated_bits(nd_dtype dtype, double value, unsigned char (&bits)[16]) {
    const size_t size = nd_dtype_size(dtype);
    value_bits(dtype, value, bits);
    for (size_t at = size; at < sizeof bits; at++) {
        bits[at] = bits[at - size];
    }
}

#endif
