/* convert.c - strided runs of any dtype to and from float32 and int64, and loop cursors.
 *
 * Every kernel that is not float32 and contiguous goes through these, a cache-sized run at a time.
 */
#include "cpu.h"

#define LOAD(code, T, convert)                  \
    case code: {                                \
        const T *p = from;                      \
        if (stride == 1) {                      \
            for (int64_t i = 0; i < n; i++) {   \
                to[i] = convert(p[i]);          \
            }                                   \
        } else {                                \
            for (int64_t i = 0; i < n; i++) {   \
                to[i] = convert(p[i * stride]); \
            }                                   \
        }                                       \
        break;                                  \
    }

#define STORE(code, T, convert)                   \
    case code: {                                  \
        T *p = to;                                \
        if (stride == 1) {                        \
            for (int64_t i = 0; i < n; i++) {     \
                p[i] = convert(from[i]);          \
            }                                     \
        } else {                                  \
            for (int64_t i = 0; i < n; i++) {     \
                p[i * stride] = convert(from[i]); \
            }                                     \
        }                                         \
        break;                                    \
    }

/* 2^63 is the first float32 that an int64 cannot hold. */
ND_FN int64_t truncated(float x) {
    float safe = x >= 0x1p63f || x < -0x1p63f || x != x ? 0.0f : x;
    int64_t y = (int64_t)safe;
    y = x >= 0x1p63f ? INT64_MAX : y;
    return x < -0x1p63f ? INT64_MIN : y;
}

#define AS_IS(x) (x)
#define NONZERO(x) ((x) != 0)
#define TO_I32(x) ((int32_t)truncated(x))
#define TO_U8(x) ((uint8_t)truncated(x))
#define TO_U16(x) ((uint16_t)truncated(x))
#define CUT_I32(x) ((int32_t)(x))
#define CUT_U8(x) ((uint8_t)(x))
#define CUT_U16(x) ((uint16_t)(x))
#define I64_BF16(x) cpu_to_bf16((float)(x))
#define I64_F16(x) cpu_to_f16((float)(x))
#define BF16_I64(x) truncated(cpu_from_bf16(x))
#define F16_I64(x) truncated(cpu_from_f16(x))
#define TO_FLOAT(x) ((float)(x))

/* A dtype, its type in C, and its conversions: to float32 and int64, and from them. */
#define CONVERSIONS(X)                                                   \
    X(ND_F32, float, AS_IS, truncated, AS_IS, TO_FLOAT)                  \
    X(ND_BF16, uint16_t, cpu_from_bf16, BF16_I64, cpu_to_bf16, I64_BF16) \
    X(ND_F16, uint16_t, cpu_from_f16, F16_I64, cpu_to_f16, I64_F16)      \
    X(ND_I32, int32_t, TO_FLOAT, AS_IS, TO_I32, CUT_I32)                 \
    X(ND_I64, int64_t, TO_FLOAT, AS_IS, truncated, AS_IS)                \
    X(ND_U8, uint8_t, TO_FLOAT, AS_IS, TO_U8, CUT_U8)                    \
    X(ND_BOOL, uint8_t, TO_FLOAT, AS_IS, NONZERO, NONZERO)               \
    X(ND_U16, uint16_t, TO_FLOAT, AS_IS, TO_U16, CUT_U16)

#define LOAD_F32(code, T, to_f32, to_i64, from_f32, from_i64) LOAD(code, T, to_f32)
#define LOAD_I64(code, T, to_f32, to_i64, from_f32, from_i64) LOAD(code, T, to_i64)
#define STORE_F32(code, T, to_f32, to_i64, from_f32, from_i64) STORE(code, T, from_f32)
#define STORE_I64(code, T, to_f32, to_i64, from_f32, from_i64) STORE(code, T, from_i64)

#define CONVERT(CASE)     \
    switch (dtype) {      \
        CONVERSIONS(CASE) \
    case ND_NUM_DTYPES:   \
        break;            \
    }

void cpu_load_f32(float *restrict to, const void *from, nd_dtype dtype, int64_t stride, int64_t n) {
    CONVERT(LOAD_F32)
}

void cpu_load_i64(int64_t *restrict to, const void *from, nd_dtype dtype, int64_t stride,
                  int64_t n) {
    CONVERT(LOAD_I64)
}

void cpu_store_f32(void *to, nd_dtype dtype, int64_t stride, const float *restrict from,
                   int64_t n) {
    CONVERT(STORE_F32)
}

void cpu_store_i64(void *to, nd_dtype dtype, int64_t stride, const int64_t *restrict from,
                   int64_t n) {
    CONVERT(STORE_I64)
}

void cpu_loop_make(int n, const nd_array *const *operands, nd_loop *loop) {
    nd_collapse(n, operands, loop);
    if (loop->ndim == 0) {
        loop->ndim = 1;
        loop->shape[0] = 1;
        for (int k = 0; k < n; k++) {
            loop->strides[k][0] = 0;
        }
    }
}

void cpu_cursor_seek(const nd_loop *loop, int n, int64_t row, cpu_cursor *cursor) {
    for (int k = 0; k < n; k++) {
        cursor->offset[k] = 0;
    }
    for (int axis = loop->ndim - 2; axis >= 0; axis--) {
        cursor->index[axis] = row % loop->shape[axis];
        row /= loop->shape[axis];
        for (int k = 0; k < n; k++) {
            cursor->offset[k] += cursor->index[axis] * loop->strides[k][axis];
        }
    }
}
