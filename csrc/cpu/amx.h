/* amx.h - bfloat16 products of packed panels by AMX's tiles, for panels.c.
 *
 *   c = base + a b       32 rows of a by 32 columns of b in four tiles of sums
 *
 * A tile has 16 rows of 64 bytes. tdpbf16ps adds to 16 x 16 float32 sums the products of 32 steps of
 * k: pairs of neighbours in k, rows of the first operand by columns of the second. As vdpbf16ps it
 * ignores MXCSR: it rounds to nearest even, and denormals count as zeros.
 *
 * Linux gives a process the registers of tiles when it asks (arch_prctl); a thread configures them
 * for a product and releases them behind it, so that a switch of threads saves none in between.
 */
#ifndef NEEDLE_CPU_AMX_H
#define NEEDLE_CPU_AMX_H

enum {
    TILE = 16,
    TILE_ROWS = 2 * TILE
}; /* words of a tile's row, and rows; rows of a panel of a */

#ifdef NEEDLE_TILES /* a file that computes what the instructions do, on any processor, for tests */
#include NEEDLE_TILES
#define AMX AVX512
#elif defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")))

/* True if the processor has tiles and bfloat16, and the kernel lets this process use them. */
static bool tiles_granted(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d, wanted = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE */
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

#ifdef AMX
typedef struct {
    uint8_t palette, start, zeros[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* A constant: to compilers ldtilecfg reads its first word alone, and of a variable they leave the rest
 * unwritten. */
static const tile_shapes shapes = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
};
_Static_assert(sizeof shapes == 64 && TILE * 4 == 64, "as the processor reads it");

AMX static void tiles_begin(void) { _tile_loadconfig(&shapes); }

AMX static void tiles_end(void) { _tile_release(); }

/* One panel of a, of m <= TILE_ROWS rows that are stored, with all panels of b, of TILE_ROWS columns
 * each. words: pairs of k, a multiple of TILE. A panel of a: by TILE words, rows of TILE words; of
 * b: words of 32 columns. */
AMX static void multiply_tiles_row(int64_t m, int64_t n, int64_t words, const uint32_t *a,
                                   const uint32_t *b, const float *base, int64_t base_row, float *c,
                                   int64_t ldc) {
    enum { COLUMNS_OF_B = 2 * TILE };
    __asm__ volatile("" ::: "memory"); /* to compilers tileloadd reads no memory */
    for (int64_t j = 0; j < n; j += COLUMNS_OF_B, b += COLUMNS_OF_B * words) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t w = 0; w < words; w += TILE) {
            const uint32_t *rows = a + w * TILE_ROWS, *columns = b + w * COLUMNS_OF_B;
            _tile_loadd(6, columns, COLUMNS_OF_B * 4);
            _tile_loadd(7, columns + TILE, COLUMNS_OF_B * 4);
            _tile_loadd(4, rows, TILE * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (m > TILE) {
                _tile_loadd(5, rows + TILE * TILE, TILE * 4);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        float sums[TILE_ROWS][COLUMNS_OF_B] __attribute__((aligned(64)));
        _tile_stored(0, sums[0], sizeof sums[0]);
        _tile_stored(1, sums[0] + TILE, sizeof sums[0]);
        _tile_stored(2, sums[TILE], sizeof sums[0]);
        _tile_stored(3, sums[TILE] + TILE, sizeof sums[0]);
        for (int64_t r = 0; r < m; r++) {
            const float *from = base ? base + r * base_row + j : NULL;
            for (int64_t i = 0; i < min_of(n - j, COLUMNS_OF_B); i++) {
                c[r * ldc + j + i] = (from ? from[i] : 0.0f) + sums[r][i];
            }
        }
    }
}
#else /* a compiler that knows no tiles */
static bool tiles_granted(void) { return false; }
static void tiles_begin(void) {}
static void tiles_end(void) {}
static void multiply_tiles_row(int64_t m, int64_t n, int64_t words, const uint32_t *a,
                               const uint32_t *b, const float *base, int64_t base_row, float *c,
                               int64_t ldc) {}
#endif

#endif
