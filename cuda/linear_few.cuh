/* linear_few.cuh - entries of linear_few.cu: the ops on few rows, where linear_few_serves() their
 * x and w. */
#ifndef NEEDLE_LINEAR_FEW_CUH
#define NEEDLE_LINEAR_FEW_CUH

#include "common.cuh"

/* Up to so many rows: above them the products of the library are as fast, that with GELU is not. */
constexpr int few_linear_rows = 4, few_gelu_rows = 8;
constexpr int64_t most_bytes = 64 << 10; /* of x, in shared memory beside 32 KiB of sums */

/* ahead: w and b may be read before the work before is done. */
nd_status linear_fwd_few(int device, const linear_fwd_args *a, bool ahead = false);
nd_status linear_gelu_fwd_few(int device, const linear_gelu_fwd_args *a);

/* The rows that the kernel has registers for: `rows` or more. */
static inline int64_t few_rows_of(int64_t rows) { return rows == 3 ? 4 : rows > 4 ? 8 : rows; }

/* True for up to most_rows rows of x (rows, depth) and w (depth, columns) of whole 16 bytes. */
static inline bool linear_few_serves(const nd_array *x, const nd_array *w, int64_t most_rows) {
    const int64_t rows = x->shape[0], depth = x->shape[1], columns = w->shape[1];
    const int64_t n = 16 / (int64_t)nd_dtype_size(x->dtype);
    return rows > 0 && rows <= most_rows && depth > 0 && columns > 0 && depth % n == 0 &&
           columns % n == 0 && few_rows_of(rows) * depth * 16 / n <= most_bytes &&
           is_aligned16(x->data) && is_aligned16(w->data);
}

#endif
