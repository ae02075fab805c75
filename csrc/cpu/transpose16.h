/* transpose16.h - transpose 16 x 16 words in registers, by AVX-512, for packing the operands of
 * products and transposing tiles of attention. Callers are compiled for AVX-512 or check
 * the processor.
 */
#ifndef NEEDLE_CPU_TRANSPOSE16_H
#define NEEDLE_CPU_TRANSPOSE16_H

#include <immintrin.h>

/* 16 vectors of 16 words, transposed in place. */
__attribute__((target("avx512f"), always_inline)) static inline void transpose16(__m512i x[16]) {
    __m512i y[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) { /* 4 x 4 words within quarters of vectors */
        __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        __m512i b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]);
        __m512i d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c);
        y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d);
        y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) { /* 4 x 4 quarters */
        __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

#endif
