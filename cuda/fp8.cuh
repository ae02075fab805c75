/* fp8.cuh - four floats as bytes of FP8, four rows of bytes as columns; for kernels that quantize.
 */
#ifndef NEEDLE_FP8_CUH
#define NEEDLE_FP8_CUH

#include "common.cuh"
#include "fp8.h"

/* Four floats as the bytes of a word, the first in the lowest. */
template <bool E5M2> __device__ __forceinline__ uint32_t packed(const float *v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t low, high;
    if (E5M2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(low) : "f"(v[1]), "f"(v[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(high) : "f"(v[3]), "f"(v[2]));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(low) : "f"(v[1]), "f"(v[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(high) : "f"(v[3]), "f"(v[2]));
    }
    return low | (uint32_t)high << 16;
#else
    uint32_t word = 0;
    for (int k = 0; k < 4; k++) {
        word |= (uint32_t)(E5M2 ? nd_to_e5m2(v[k]) : nd_to_e4m3(v[k])) << 8 * k;
    }
    return word;
#endif
}

/* Word k of column c: byte c of each of four rows' words. */
__device__ __forceinline__ void transpose_bytes(const uint32_t *of_rows, uint32_t *of_columns) {
    const uint32_t low01 = __byte_perm(of_rows[0], of_rows[1], 0x5140);
    const uint32_t low23 = __byte_perm(of_rows[2], of_rows[3], 0x5140);
    const uint32_t high01 = __byte_perm(of_rows[0], of_rows[1], 0x7362);
    const uint32_t high23 = __byte_perm(of_rows[2], of_rows[3], 0x7362);
    of_columns[0] = __byte_perm(low01, low23, 0x5410);
    of_columns[1] = __byte_perm(low01, low23, 0x7632);
    of_columns[2] = __byte_perm(high01, high23, 0x5410);
    of_columns[3] = __byte_perm(high01, high23, 0x7632);
}

#endif
