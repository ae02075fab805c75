/* bf16_product.c - products of bfloat16 matrices by AVX512-BF16's vdpbf16ps, float32 sums.
 *
 *   c = a b  or  c += a b       a (m, k) and b (k, n) bfloat16, c (m, n) float32
 *
 * a and b as IN_MATRIX gives them: along one axis of more than one element the stride is 1.
 *
 * vdpbf16ps multiplies pairs: each float32 lane gets the products of two neighbours in k. So both
 * operands are packed into panels, of ROWS rows of a and COLUMNS columns of b, whose 32-bit words
 * are such pairs; an odd k ends with a zero. ROWS x COLUMNS sums stay in registers over all of k
 * and are then added to c, in an order that depends on k alone.
 *
 * By definition the instruction ignores MXCSR: it rounds to nearest even, takes denormal operands
 * for zeros, and makes denormal sums zeros. Infinities and NaN go through as in float32.
 *
 * Compiled for any x86-64 and chosen when needle starts, where it is faster than products in
 * float32: on AMD's processors, which do as many vdpbf16ps a cycle as float32 FMAs, each worth two.
 * Intel's since Sapphire Rapids do a quarter as many, which is half of float32's rate (measured,
 * docs/measurements.md). NEEDLE_BF16_DOT=1 or 0 decides otherwise.
 */
#include <stdlib.h>

#include "cpu.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 10 : __GNUC__ >= 10)

#include <immintrin.h>

/* 28 sums, two vectors of b and one word of a repeated: 31 of 32 registers. */
enum { ROWS = 14, LANES = 16, COLUMNS = 2 * LANES };
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

static bool chosen;

void cpu_bf16_product_setup(void) {
    const char *asked = getenv("NEEDLE_BF16_DOT");
    bool can = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl");
    bool wanted =
        asked != NULL && asked[0] != '\0' ? strcmp(asked, "0") != 0 : __builtin_cpu_is("amd") != 0;
    chosen = can && wanted;
}

bool cpu_bf16_product_chosen(void) { return chosen; }

static int64_t words(int64_t lanes, int64_t width, int64_t k) {
    return cpu_ceil_div(lanes, width) * width * cpu_ceil_div(k, 2);
}

int64_t cpu_bf16_product_words(int64_t m, int64_t n, int64_t k) {
    return words(m, ROWS, k) + words(n, COLUMNS, k);
}

/* 16 vectors of 16 words, transposed in place. */
AVX512_BF16 static inline void transpose(__m512i x[LANES]) {
    __m512i y[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 4) { /* 4 x 4 words within quarters of vectors */
        __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        __m512i b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]);
        __m512i d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c);
        y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d);
        y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) { /* 4 x 4 quarters */
        __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* `lanes` <= 16 rows or columns, `lane` elements apart, of k elements that are `step` apart: pair p
 * of lane l at to[p * width + l]; zeros from `lanes` to `room`. */
AVX512_BF16 static void pack_lanes(const uint16_t *from, int64_t lane, int64_t step, int64_t lanes,
                                   int64_t k, int64_t room, int64_t width, uint32_t *to) {
    __mmask16 there = (__mmask16)((1u << lanes) - 1), written = (__mmask16)((1u << room) - 1);
    int64_t pairs = cpu_ceil_div(k, 2);
    if (step != 1 && k > 1) { /* so the lanes lie side by side */
        for (int64_t p = 0; p < pairs; p++) {
            const uint16_t *first = from + 2 * p * step;
            __m256i low = _mm256_maskz_loadu_epi16(there, first), high = _mm256_setzero_si256();
            if (2 * p + 1 < k) {
                high = _mm256_maskz_loadu_epi16(there, first + step);
            }
            __m512i pair = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            _mm512_mask_storeu_epi32(to + p * width, written, pair);
        }
        return;
    }
    for (int64_t p0 = 0; p0 < pairs; p0 += LANES) {
        int64_t left = min_of(k - 2 * p0, 2 * LANES);
        __mmask32 inside = (__mmask32)(((uint64_t)1 << left) - 1);
        __m512i x[LANES];
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            x[l] = l < lanes ? _mm512_maskz_loadu_epi16(inside, from + l * lane + 2 * p0)
                             : _mm512_setzero_si512();
        }
        transpose(x);
#pragma GCC unroll 16
        for (int p = 0; p < LANES; p++) {
            if (p0 + p < pairs) {
                _mm512_mask_storeu_epi32(to + (p0 + p) * width, written, x[p]);
            }
        }
    }
}

/* All `lanes` into panels of `width`, one behind the other. */
static void pack(const uint16_t *from, int64_t lane, int64_t step, int64_t lanes, int64_t k,
                 int64_t width, uint32_t *to) {
    for (int64_t l = 0; l < lanes; l += width, to += words(1, width, k)) {
        for (int64_t i = 0; i < width; i += LANES) {
            pack_lanes(from + (l + i) * lane, lane, step, max_of(0, min_of(LANES, lanes - l - i)),
                       k, min_of(LANES, width - i), width, to + i);
        }
    }
}

/* The sums of one panel of a with one of b; `rows`, a constant where this is inlined, are summed
 * and `m` x `n` are stored. */
AVX512_BF16 static inline __attribute__((always_inline)) void
multiply_panels(int rows, int64_t pairs, const uint32_t *a, const uint32_t *b, bool add, float *c,
                int64_t ldc, int64_t m, int64_t n) {
    __m512 sums[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    for (int64_t p = 0; p < pairs; p++) {
        __m512bh first = (__m512bh)_mm512_loadu_si512(b + p * COLUMNS);
        __m512bh second = (__m512bh)_mm512_loadu_si512(b + p * COLUMNS + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32((int)a[p * ROWS + r]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], left, first);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], left, second);
        }
    }
    uint32_t inside = (uint32_t)(((uint64_t)1 << n) - 1);
    __mmask16 masks[2] = {(__mmask16)inside, (__mmask16)(inside >> LANES)};
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        for (int half = 0; half < 2 && r < m; half++) {
            float *to = c + r * ldc + half * LANES;
            __m512 before = _mm512_maskz_loadu_ps(add ? masks[half] : 0, to);
            _mm512_mask_storeu_ps(to, masks[half], _mm512_add_ps(before, sums[r][half]));
        }
    }
}

AVX512_BF16 void cpu_bf16_product(int64_t m, int64_t n, int64_t k, const uint16_t *a, int64_t a_row,
                                  int64_t a_column, const uint16_t *b, int64_t b_row,
                                  int64_t b_column, bool add, float *c, int64_t ldc,
                                  uint32_t *panels) {
    int64_t pairs = cpu_ceil_div(k, 2);
    uint32_t *a_panel = panels, *b_panels = panels + words(m, ROWS, k);
    pack(a, a_row, a_column, m, k, ROWS, a_panel);
    pack(b, b_column, b_row, n, k, COLUMNS, b_panels);
    for (int64_t i = 0; i < m; i += ROWS, a_panel += ROWS * pairs) {
        const uint32_t *b_panel = b_panels;
        int64_t rows = min_of(ROWS, m - i);
        for (int64_t j = 0; j < n; j += COLUMNS, b_panel += COLUMNS * pairs) {
            int64_t columns = min_of(COLUMNS, n - j);
            float *to = c + i * ldc + j;
            if (rows > 4) {
                multiply_panels(ROWS, pairs, a_panel, b_panel, add, to, ldc, rows, columns);
            } else if (rows > 1) {
                multiply_panels(4, pairs, a_panel, b_panel, add, to, ldc, rows, columns);
            } else {
                multiply_panels(1, pairs, a_panel, b_panel, add, to, ldc, rows, columns);
            }
        }
    }
}

#else

void cpu_bf16_product_setup(void) {}

bool cpu_bf16_product_chosen(void) { return false; }

int64_t cpu_bf16_product_words(int64_t m, int64_t n, int64_t k) { return 0; }

void cpu_bf16_product(int64_t m, int64_t n, int64_t k, const uint16_t *a, int64_t a_row,
                      int64_t a_column, const uint16_t *b, int64_t b_row, int64_t b_column,
                      bool add, float *c, int64_t ldc, uint32_t *panels) {}

#endif
