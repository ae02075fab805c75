/* block_lists.h - the sizes that kept_blocks takes; for the C compiler and nvcc. */
#ifndef NEEDLE_BLOCK_LISTS_H
#define NEEDLE_BLOCK_LISTS_H

#include "needle.h"

static inline nd_status nd_check_kept_blocks(const nd_array *dense, int64_t block,
                                             const nd_array *kept) {
    if (block < 1) {
        return nd_error(ND_EVALUE, "kept_blocks: block: is %lld, but must be above 0",
                        (long long)block);
    }
    for (int axis = 1; axis < 3; axis++) {
        int64_t tokens = dense->shape[axis], found = kept->shape[axis];
        int64_t wanted = tokens > 0 ? (tokens - 1) / block + 1 : 0;
        if (found != wanted) {
            return nd_error(ND_EVALUE,
                            "kept_blocks: kept: axis %c is %lld, but %lld tokens need %lld",
                            "GRC"[axis], (long long)found, (long long)tokens, (long long)wanted);
        }
    }
    return ND_OK;
}

#endif
