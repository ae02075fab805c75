/* cpu.h - shared by the files of the CPU backend: prototypes, dtype conversion, iteration,
 * scratch, the matrix products.
 *
 * Arithmetic happens in float32 (or int64): a kernel works on rows or tiles, reads float32 memory
 * in place and converts any other dtype into a small buffer on the stack or in scratch.
 *
 * Threads: an op splits its work into chunks whose size depends on the shapes alone, never on the
 * number of threads, and lets OpenMP hand the chunks out; partial sums belong to chunks and are
 * combined in their order. So the bits do not depend on the number of threads.
 */
#ifndef NEEDLE_CPU_H
#define NEEDLE_CPU_H

#include <string.h>

#include "../backend.h"
#include "../formula.h"

/* The table of the backend dictates the parameters of the functions in it. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* ---- the ops. Hidden, and so a function that is missing does not link ------------------------ */
#pragma GCC visibility push(hidden)
#define EACH_OP(name) nd_status cpu_##name(int device, const name##_args *args);
#include "../ops.def"

extern const nd_backend cpu_backend; /* backend.c */

/* Work (in elements) below which waking other threads costs more than it brings. */
#define CPU_GRAIN 32768

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t cpu_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- 16-bit floats: branch-free, so that loops over them vectorise; round to nearest even ---- */
ND_FN float cpu_from_bf16(uint16_t h) { return nd_bits_float((uint32_t)h << 16); }
ND_FN uint16_t cpu_to_bf16(float x) {
    uint32_t bits = nd_float_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
/* The exponent bias differs by 112: one exact product serves normal and denormal halves. */
ND_FN float cpu_from_f16(uint16_t h) {
    uint32_t magnitude = h & 0x7fffu;
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t finite = nd_float_bits(nd_bits_float(magnitude << 13) * 0x1p112f);
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    return nd_bits_float(sign | (magnitude >= 0x7c00u ? special : finite));
}
/* Below 2^-14 adding 0.5 rounds to the spacing of denormal halves, 2^-24. */
ND_FN uint16_t cpu_to_f16(float x) {
    uint32_t bits = nd_float_bits(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t a = bits & 0x7fffffffu;
    uint32_t normal = ((a + 0xfffu + ((a >> 13) & 1u)) >> 13) - (112u << 10);
    uint32_t denormal = nd_float_bits(nd_bits_float(a) + 0.5f) - 0x3f000000u;
    uint32_t h = a < 0x38800000u ? denormal : normal;
    h = a >= 0x477ff000u ? 0x7c00u : h;
    h = a > 0x7f800000u ? 0x7e00u : h;
    return (uint16_t)(sign | h);
}

/* A run of values in the one type or the other. */
enum { CPU_RUN = 1024 };
typedef union {
    _Alignas(64) float f32[CPU_RUN];
    int64_t i64[CPU_RUN];
} cpu_run;

/* ---- convert.c: n elements, `stride` elements apart, from or to any dtype -----------------------
 * Floats truncate towards zero when stored as integers (out of range: the
 * nearest int64, NaN: 0, then cut to size); anything but zero is true. */
void cpu_load_f32(float *restrict to, const void *from, nd_dtype dtype, int64_t stride, int64_t n);
void cpu_load_i64(int64_t *restrict to, const void *from, nd_dtype dtype, int64_t stride,
                  int64_t n);
void cpu_store_f32(void *to, nd_dtype dtype, int64_t stride, const float *restrict from, int64_t n);
void cpu_store_i64(void *to, nd_dtype dtype, int64_t stride, const int64_t *restrict from,
                   int64_t n);

ND_FN void *cpu_at(const nd_array *a, int64_t offset) {
    return (char *)a->data + offset * (int64_t)nd_dtype_size(a->dtype);
}

/* n consecutive elements as float32: in place when they are, else converted into `buffer`. */
ND_FN const float *cpu_read(const nd_array *a, int64_t offset, int64_t n, float *buffer) {
    if (a->dtype == ND_F32) {
        return (const float *)a->data + offset;
    }
    cpu_load_f32(buffer, cpu_at(a, offset), a->dtype, 1, n);
    return buffer;
}
/* Where to compute n consecutive float32 results; cpu_write then puts them into the array. */
ND_FN float *cpu_target(nd_array *a, int64_t offset, float *buffer) {
    return a->dtype == ND_F32 ? (float *)a->data + offset : buffer;
}
ND_FN void cpu_write(nd_array *a, int64_t offset, int64_t n, const float *buffer) {
    if (a->dtype != ND_F32) {
        cpu_store_f32(cpu_at(a, offset), a->dtype, 1, buffer, n);
    }
}

/* fp8.c: the bits of the largest |x|; infinity, and then NaN, are above numbers. */
uint32_t cpu_largest_bits(const nd_array *x);

/* ---- iteration over the rows (innermost axis) of an nd_loop -------------------------------------
 * `offset` is where the current row of each operand starts, in elements. */
typedef struct {
    int64_t index[ND_MAX_DIMS];
    int64_t offset[ND_MAX_OPERANDS];
} cpu_cursor;

/* At least one axis, so that loops have an innermost one. */
void cpu_loop_make(int n, const nd_array *const *operands, nd_loop *loop);
void cpu_cursor_seek(const nd_loop *loop, int n, int64_t row, cpu_cursor *cursor);

ND_FN void cpu_cursor_next(const nd_loop *loop, int n, cpu_cursor *cursor) {
    for (int axis = loop->ndim - 2; axis >= 0; axis--) {
        if (++cursor->index[axis] < loop->shape[axis]) {
            for (int k = 0; k < n; k++) {
                cursor->offset[k] += loop->strides[k][axis];
            }
            return;
        }
        cursor->index[axis] = 0;
        for (int k = 0; k < n; k++) {
            cursor->offset[k] -= loop->strides[k][axis] * (loop->shape[axis] - 1);
        }
    }
}

/* ---- threads.c: each parallel region says num_threads(cpu_threads()) ------------------------- */
void cpu_threads_setup(void); /* once */
int cpu_threads(void);

/* ---- rotary.c -----------------------------------------------------------------------------------
 * Rotate the first 2 R dims of a row of float32 by sign times the R angles of its position. */
void cpu_rotate(float *restrict x, const float *restrict cosines, const float *restrict sines,
                int64_t r, float sign);
/* ND_EVALUE where `parts` slices of x (..., P, D) cannot be rotated by the angles of cos (T, R). */
nd_status cpu_check_turn(const char *op, const nd_array *x, int64_t parts, const nd_array *cos);

/* ---- memory.c: contracts in backend.h -------------------------------------------------------- */
void cpu_memory_setup(void); /* once */
nd_status cpu_allocate(int device, size_t bytes, void **out);
nd_status cpu_release(int device, void *memory);
nd_status cpu_empty_cache(int device);
nd_status cpu_memory_stats(int device, nd_memory_stats *out);
nd_status cpu_reset_peak(int device);
/* Scratch: 64-byte aligned, this thread's until its next cpu_scratch. */
nd_status cpu_scratch(int device, size_t bytes, void **out);

/* ---- sgemm.c: c = alpha op(a) op(b) + beta c, row-major, on the calling thread ------------------
 * op(a) is m x k, op(b) is k x n. Sizes and leading dimensions must fit an int.
 * The bits depend on the shape alone. */
void cpu_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
               const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
               int64_t ldc);
void cpu_sgemm_setup(void);          /* keeps the BLAS from starting threads of its own */
const char *cpu_sgemm_library(void); /* e.g. "OpenBLAS SkylakeX" */

/* ---- panels.c: c = base + a b on the calling thread, a and b of one dtype, c and base float32 ---
 * Strides of a and b in elements, of which one is 1. A row of base is `base_row` elements after the
 * one before: 0 for a bias, ldc for c itself; NULL is zeros. `more`: k steps of the next call,
 * prefetched now. `panels` has room for cpu_panels_words, 0 only if panels cannot be used. */
enum { CPU_PANEL_COLUMNS = 32 };
void cpu_panels_setup(void);                     /* chooses */
bool cpu_panels_take(nd_dtype dtype, int64_t m); /* true if they multiply m rows of a */
const char *cpu_panels_instructions(void);       /* and the dtypes: another, other bits; or NULL */
int64_t cpu_panels_rows(nd_dtype dtype);         /* of a panel of a */
int64_t cpu_panels_words(nd_dtype dtype, int64_t n, int64_t k);
void cpu_panels_product(nd_dtype dtype, int64_t m, int64_t n, int64_t k, const void *a,
                        const int64_t *a_strides, const void *b, const int64_t *b_strides,
                        const float *base, int64_t base_row, float *c, int64_t ldc, int64_t more,
                        uint32_t *panels);

/* ---- cross_entropy.c ----------------------------------------------------------------------------
 * ND_EVALUE, with the name of the op, for a target that is not below `vocabulary`. */
nd_status cpu_check_targets(const char *name, const nd_array *targets, int64_t vocabulary);

/* ---- matmul.c -----------------------------------------------------------------------------------
 * linear_fwd without a residual. The thread that computed rows [i, i + rows) and columns
 * [j, j + columns) of y then calls finish(of, i, j, rows, columns), which may change them. */
typedef void cpu_tile_fn(const void *of, int64_t i, int64_t j, int64_t rows, int64_t columns);
nd_status cpu_linear_tiles(int device, const linear_fwd_args *args, cpu_tile_fn *finish,
                           const void *of);
/* to (and to2, where not NULL) += the column sums of x (N, M); where `times` is not NULL, of
 * product = x times, which may be x. */
nd_status cpu_column_sums(int device, const nd_array *x, const nd_array *times, nd_array *product,
                          nd_array *to, nd_array *to2);

#pragma GCC visibility pop

#endif
