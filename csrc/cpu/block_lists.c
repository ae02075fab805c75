/* block_lists.c - from masks to the blocks that they keep, and to the lists that attention reads.
 *
 * Blocks: the rows of tokens of a row of blocks are joined, a run of columns at a time, then the
 * columns of each block. Threads take rows of blocks.
 * Lists: rows are counted, the counts summed up to where each list begins, then the columns
 * written; threads share the rows in both passes. The order of work is a counting sort by length,
 * which keeps equal rows in their order.
 */
#include <limits.h>

#include "../block_lists.h"
#include "cpu.h"

enum { JOINED = 4096 };

/* joined[j] |= dense[j] of n elements of a row of tokens. */
static void join_row(const uint8_t *restrict dense, int64_t stride, int64_t n,
                     uint8_t *restrict joined) {
    if (stride == 1) {
        for (int64_t j = 0; j < n; j++) {
            joined[j] |= dense[j];
        }
    } else {
        for (int64_t j = 0; j < n; j++) {
            joined[j] |= dense[j * stride];
        }
    }
}

nd_status cpu_kept_blocks(int device, const kept_blocks_args *args) {
    ND_TRY(nd_check_kept_blocks(args->dense, args->block, args->kept));
    const nd_array *dense = args->dense;
    const int64_t *strides = dense->strides, block = args->block;
    int64_t rows = args->kept->shape[1], columns = args->kept->shape[2];
    int64_t t = dense->shape[1], s = dense->shape[2], all = dense->shape[0] * rows;
#pragma omp parallel for schedule(static) \
    num_threads(cpu_threads()) if (all * block * s > CPU_GRAIN)
    for (int64_t row = 0; row < all; row++) {
        uint8_t *kept = (uint8_t *)args->kept->data + row * columns;
        const uint8_t *data = (const uint8_t *)dense->data + row / rows * strides[0];
        int64_t top = row % rows * block, end = min_of(top + block, t);
        memset(kept, 0, (size_t)columns);
        for (int64_t first = 0; first < s; first += JOINED) {
            uint8_t joined[JOINED] = {0};
            int64_t n = min_of(JOINED, s - first);
            for (int64_t i = top; i < end; i++) {
                join_row(data + i * strides[1] + first * strides[2], strides[2], n, joined);
            }
            for (int64_t j = 0; j < n; j++) {
                kept[(first + j) / block] |= joined[j] != 0;
            }
        }
    }
    return ND_OK;
}

/* Where a row of all begins; an empty array has no memory to point into. */
static int64_t row_at(const nd_array *kept, int64_t row) {
    int64_t rows = kept->shape[1];
    return row / rows * kept->strides[0] + row % rows * kept->strides[1];
}

static int64_t count_row(const nd_array *kept, int64_t row) {
    const uint8_t *data = kept->data;
    int64_t at = row_at(kept, row), stride = kept->strides[2], count = 0;
    for (int64_t j = 0; j < kept->shape[2]; j++) {
        count += data[at + j * stride] != 0;
    }
    return count;
}

/* The columns of a row become entries[to ..]. */
static void list_row(const nd_array *kept, int64_t row, int32_t *entries, int64_t to) {
    const uint8_t *data = kept->data;
    int64_t at = row_at(kept, row), stride = kept->strides[2];
    for (int64_t j = 0; j < kept->shape[2]; j++) {
        if (data[at + j * stride] != 0) {
            entries[to++] = (int32_t)j;
        }
    }
}

/* The rows by falling count, none of which is above `longest`; places: longest + 1 numbers. */
static void order_rows(const int64_t *counts, int64_t rows, int64_t longest, int64_t *places,
                       int32_t *order) {
    for (int64_t length = 0; length <= longest; length++) {
        places[length] = 0;
    }
    for (int64_t i = 0; i < rows; i++) {
        places[counts[i]]++;
    }
    int64_t place = 0;
    for (int64_t length = longest; length >= 0; length--) {
        int64_t equal = places[length];
        places[length] = place;
        place += equal;
    }
    for (int64_t i = 0; i < rows; i++) {
        order[places[counts[i]]++] = (int32_t)i;
    }
}

nd_status cpu_block_lists(int device, const block_lists_args *args) {
    const nd_array *kept = args->kept;
    int64_t masks = kept->shape[0], rows = kept->shape[1], columns = kept->shape[2];
    int64_t all = masks * rows, size = args->entries->shape[0];
    int32_t *offsets = args->offsets->data, *entries = args->entries->data;
    int32_t *order = args->order->data;
    if (args->offsets->shape[1] != rows + 1) {
        return nd_error(ND_EVALUE, "block_lists: offsets: axis P is %lld, but %lld rows need %lld",
                        (long long)args->offsets->shape[1], (long long)rows, (long long)(rows + 1));
    }
    if (all > INT_MAX || columns > INT_MAX || size > INT_MAX) {
        return nd_error(
            ND_EVALUE, "block_lists: kept: rows of all masks, columns and kept blocks must each be "
                       "below 2^31");
    }
    int64_t longest = min_of(columns, size);
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)(all + longest + 1) * sizeof(int64_t), &scratch));
    int64_t *counts = scratch, *places = counts + all, total = 0;

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (all * columns > CPU_GRAIN)
    for (int64_t row = 0; row < all; row++) {
        counts[row] = count_row(kept, row);
    }
    for (int64_t row = 0; row < all; row++) {
        total += counts[row];
    }
    if (total != size) {
        return nd_error(ND_EVALUE, "block_lists: entries: axis E is %lld, but %lld blocks are kept",
                        (long long)size, (long long)total);
    }
    int64_t end = 0;
    for (int64_t g = 0; g < masks; g++) {
        offsets[g * (rows + 1)] = (int32_t)end;
        for (int64_t i = 0; i < rows; i++) {
            end += counts[g * rows + i];
            offsets[g * (rows + 1) + i + 1] = (int32_t)end;
        }
        order_rows(counts + g * rows, rows, longest, places, order + g * rows);
    }
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (all * columns > CPU_GRAIN)
    for (int64_t row = 0; row < all; row++) {
        list_row(kept, row, entries, offsets[row / rows * (rows + 1) + row % rows]);
    }
    return ND_OK;
}
