/* decode.h - the sizes that decode_projections takes; for the C compiler and nvcc. */
#ifndef NEEDLE_DECODE_H
#define NEEDLE_DECODE_H

#include "needle.h"

enum { ND_STEP_ROWS = 4, ND_STEP_COLUMNS = 1024 }; /* at most; _is_step() in parallel.py asks */

static inline nd_status nd_check_decode_projections(const nd_array *x, const nd_array *w_qkv,
                                                    const nd_array *w1) {
    const int64_t rows = x->shape[0], c = x->shape[1], p = w_qkv->shape[1], m = w1->shape[1];
    if (rows > ND_STEP_ROWS || c < 8 || c > ND_STEP_COLUMNS || c % 8 || p % 8 || m % 8) {
        return nd_error(
            ND_EVALUE,
            "decode_projections: x (%lld, %lld), w_qkv (.., %lld) and w1 (.., %lld): rows "
            "must be at most %d, columns multiples of 8, of x from 8 to %d",
            (long long)rows, (long long)c, (long long)p, (long long)m, ND_STEP_ROWS,
            ND_STEP_COLUMNS);
    }
    return ND_OK;
}

#endif
