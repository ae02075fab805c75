/* decode.h - the sizes that decode_projections takes; for the C compiler and nvcc. */
#ifndef NEEDLE_DECODE_H
#define NEEDLE_DECODE_H

#include "needle.h"

/* At most; _is_step() in needle/ops/layer.py asks. */
enum { ND_STEP_ROWS = 32, ND_STEP_COLUMNS = 1024 };

static inline nd_status nd_check_decode_projections(const nd_array *x, const nd_array *w_qkv,
                                                    const nd_array *w1) {
    const nd_array *of[3] = {x, w_qkv, w1};
    const char *names[3] = {"x", "w_qkv", "w1"};
    const long long rows = x->shape[0], c = x->shape[1];
    if (rows > ND_STEP_ROWS || c < 8 || c > ND_STEP_COLUMNS) {
        return nd_error(
            ND_EVALUE,
            "decode_projections: x: is (%lld, %lld), but must have at most %d rows, and "
            "8 to %d columns",
            rows, c, ND_STEP_ROWS, ND_STEP_COLUMNS);
    }
    for (int i = 0; i < 3; i++) {
        if (of[i]->shape[1] % 8) {
            return nd_error(
                ND_EVALUE,
                "decode_projections: %s: has %lld columns, but must have a multiple of 8", names[i],
                (long long)of[i]->shape[1]);
        }
    }
    return ND_OK;
}

#endif
