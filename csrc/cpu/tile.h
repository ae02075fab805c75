/* tile.h - products of small float32 tiles in registers, for attention.
 *
 * A BLAS packs both operands of every call anew, which for tiles of 64 x 128 takes a third of the
 * product's time. Here the caller lays its operands out once: lanes of vectors run along the
 * columns of b and c, which are padded to whole panels, and a may have any strides.
 */
#ifndef NEEDLE_CPU_TILE_H
#define NEEDLE_CPU_TILE_H

#include <stdint.h>

#include "../formula.h"

/* The registers of the architecture hold ROWS x 2 vectors of sums, 2 of b and one of a. */
#if defined(__AVX512F__)
enum { TILE_LANES = 16, TILE_ROWS = 14 };
#elif defined(__AVX__)
enum { TILE_LANES = 8, TILE_ROWS = 6 };
#else
enum { TILE_LANES = 4, TILE_ROWS = 6 };
#endif
/* Columns that are multiplied together; leading dimensions of b and c are multiples of it. */
enum { TILE_PANEL = 2 * TILE_LANES };

typedef float tile_vector __attribute__((vector_size(4 * TILE_LANES), aligned(4)));

ND_FN int64_t tile_padded(int64_t columns) {
    return (columns + TILE_PANEL - 1) / TILE_PANEL * TILE_PANEL;
}

/* The sums over depth of one panel and `rows` rows, a constant where this is inlined. */
ND_FN void tile_panel(int rows, int64_t depth, const float *restrict a, int64_t a_row,
                      int64_t a_depth, const float *restrict b, int64_t ldb, float *restrict c,
                      int64_t ldc, bool add) {
    tile_vector sums[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const tile_vector *from = (const tile_vector *)(c + r * ldc);
        sums[r][0] = add ? from[0] : (tile_vector){0};
        sums[r][1] = add ? from[1] : (tile_vector){0};
    }
    for (int64_t p = 0; p < depth; p++) {
        const tile_vector *right = (const tile_vector *)(b + p * ldb);
        tile_vector first = right[0], second = right[1];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            float left = a[r * a_row + p * a_depth];
            sums[r][0] += left * first;
            sums[r][1] += left * second;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        tile_vector *to = (tile_vector *)(c + r * ldc);
        to[0] = sums[r][0];
        to[1] = sums[r][1];
    }
}

/* c[i][j] = (add: +=) sum over p of a[i a_row + p a_depth] b[p ldb + j], for i < rows and
 * j < columns, a multiple of TILE_PANEL. Sums in the order of p. */
ND_FN void tile_product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                        int64_t a_depth, const float *b, int64_t ldb, float *c, int64_t ldc,
                        bool add) {
#define TILE_PANELS(count)                                                                       \
    for (; rows - i >= count; i += count) {                                                      \
        for (int64_t j = 0; j < columns; j += TILE_PANEL) {                                      \
            tile_panel(count, depth, a + i * a_row, a_row, a_depth, b + j, ldb, c + i * ldc + j, \
                       ldc, add);                                                                \
        }                                                                                        \
    }
    int64_t i = 0;
    TILE_PANELS(TILE_ROWS)
#ifdef __AVX512F__
    TILE_PANELS(8)
#endif
    TILE_PANELS(4)
    TILE_PANELS(2)
    TILE_PANELS(1)
#undef TILE_PANELS
}

#endif
