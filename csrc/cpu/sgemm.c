/* sgemm.c - the float32 product of a BLAS, for products that panels.c does not take.
 *
 * NEEDLE_BLAS_SCIPY: OpenBLAS from the scipy-openblas32 package (symbols start with scipy_).
 * NEEDLE_BLAS_SYSTEM: any CBLAS. Neither: the blocked kernel at the end of this file.
 * Always single-threaded: the caller splits the work and runs parts side by side, so that the
 * BLAS's thread pool and OpenMP's never fight for the cores.
 */
#include <limits.h>
#include <stdio.h>

#include "cpu.h"

static void scale_rows(int64_t m, int64_t n, float beta, float *c, int64_t ldc) {
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            c[i * ldc + j] = beta == 0.0f ? 0.0f : beta * c[i * ldc + j];
        }
    }
}

#if defined(NEEDLE_BLAS_SCIPY) || defined(NEEDLE_BLAS_SYSTEM)

#ifdef NEEDLE_BLAS_SCIPY
#define BLAS(name) scipy_##name
#else
#define BLAS(name) name
#pragma weak openblas_set_num_threads
#pragma weak openblas_get_corename
#pragma weak openblas_get_config
#endif

enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };

void BLAS(cblas_sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k,
                       float alpha, const float *a, int lda, const float *b, int ldb, float beta,
                       float *c, int ldc);
void BLAS(openblas_set_num_threads)(int threads);
char *BLAS(openblas_get_corename)(void);
char *BLAS(openblas_get_config)(void); /* "OpenBLAS", its version, and how it was built */

void cpu_sgemm_setup(void) {
#ifdef NEEDLE_BLAS_SYSTEM
    if (openblas_set_num_threads == NULL) {
        return;
    }
#endif
    BLAS(openblas_set_num_threads)(1);
}

const char *cpu_sgemm_library(void) {
    static char text[64];
#ifdef NEEDLE_BLAS_SYSTEM
    if (openblas_get_corename == NULL || openblas_get_config == NULL) {
        return "system CBLAS";
    }
#endif
    const char *config = BLAS(openblas_get_config)();
    size_t name = strcspn(config, " ") + 1;
    size_t version = config[name - 1] == '\0' ? 0 : strcspn(config + name, " ");
    snprintf(text, sizeof text, "OpenBLAS %.*s %s", (int)version, config + name,
             BLAS(openblas_get_corename)());
    return text;
}

void cpu_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
               const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
               int64_t ldc) {
    if (m == 0 || n == 0) {
        return;
    }
    if (k == 0) {
        scale_rows(m, n, beta, c, ldc);
        return;
    }
    BLAS(cblas_sgemm)
    (ROW_MAJOR, transpose_a ? TRANSPOSED : PLAIN, transpose_b ? TRANSPOSED : PLAIN, (int)m, (int)n,
     (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

#else

void cpu_sgemm_setup(void) {}

const char *cpu_sgemm_library(void) {
    return "built-in matrix product (no BLAS at build time: slow)";
}

enum { ROWS = 4, COLUMNS = 32, DEPTH = 256 };

/* One ROWS x COLUMNS tile of c in registers; both panels are packed, padded with zeros. The
 * sanitizers leave it alone: it would be half of their time, and it sees no operand, only the
 * panels, all of whose numbers are in its sums. */
__attribute__((no_sanitize("address", "undefined"))) static void
tile(int64_t depth, const float *restrict a, const float *restrict b, float sums[ROWS][COLUMNS]) {
    float t[ROWS][COLUMNS] = {{0}};
    for (int64_t p = 0; p < depth; p++) {
        for (int i = 0; i < ROWS; i++) {
            float x = a[p * ROWS + i];
#pragma omp simd
            for (int j = 0; j < COLUMNS; j++) {
                t[i][j] += x * b[p * COLUMNS + j];
            }
        }
    }
    memcpy(sums, t, sizeof t);
}

void cpu_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha,
               const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
               int64_t ldc) {
    _Alignas(64) float packed_a[DEPTH * ROWS], packed_b[DEPTH * COLUMNS], sums[ROWS][COLUMNS];
    if (beta != 1.0f) {
        scale_rows(m, n, beta, c, ldc);
    }
    for (int64_t j0 = 0; j0 < n; j0 += COLUMNS) {
        int64_t columns = min_of(COLUMNS, n - j0);
        for (int64_t p0 = 0; p0 < k; p0 += DEPTH) {
            int64_t depth = min_of(DEPTH, k - p0);
            for (int64_t p = 0; p < depth; p++) {
                for (int64_t j = 0; j < COLUMNS; j++) {
                    packed_b[p * COLUMNS + j] = j >= columns  ? 0.0f
                                                : transpose_b ? b[(j0 + j) * ldb + p0 + p]
                                                              : b[(p0 + p) * ldb + j0 + j];
                }
            }
            for (int64_t i0 = 0; i0 < m; i0 += ROWS) {
                int64_t rows = min_of(ROWS, m - i0);
                for (int64_t p = 0; p < depth; p++) {
                    for (int64_t i = 0; i < ROWS; i++) {
                        packed_a[p * ROWS + i] = i >= rows     ? 0.0f
                                                 : transpose_a ? a[(p0 + p) * lda + i0 + i]
                                                               : a[(i0 + i) * lda + p0 + p];
                    }
                }
                tile(depth, packed_a, packed_b, sums);
                for (int64_t i = 0; i < rows; i++) {
                    for (int64_t j = 0; j < columns; j++) {
                        c[(i0 + i) * ldc + j0 + j] += alpha * sums[i][j];
                    }
                }
            }
        }
    }
}

#endif
