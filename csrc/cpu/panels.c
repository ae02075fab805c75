/* panels.c - matrix products of packed panels by AVX-512 and AMX: float32, bfloat16 and float16.
 *
 *   c = base + a b       a (m, k) and b (k, n) of one dtype; c float32, and base: c, a bias, or 0
 *
 * a and b lie as IN_MATRIX gives them: along one axis of more than one element the stride is 1.
 * Both are packed, from any such layout and dtype in one pass, into panels of ROWS rows of a and
 * COLUMNS columns of b: all of b, for the second cache, then a, of which a panel stays in the
 * first. ROWS x COLUMNS sums stay in registers over all of k and are then added to base. Their
 * order depends on k alone: neither strides, tiles nor threads change a bit.
 *
 * A panel's words are float32, multiplied by FMAs, or pairs of bfloat16 that are neighbours in k,
 * multiplied by AVX512-BF16's vdpbf16ps, whose float32 lanes get two products each; an odd k ends
 * with a zero. By definition that instruction ignores MXCSR: it rounds to nearest even, takes
 * denormal operands for zeros, and makes denormal sums zeros. Infinities and NaN go through as in
 * float32. With AMX (amx.h) the pairs of 32 rows of a lie by rows, and those of a step of k are
 * filled up with zeros to whole tiles.
 *
 * Compiled for any x86-64 and chosen when needle starts. Intel's processors since Sapphire Rapids
 * do a quarter as many vdpbf16ps a cycle as FMAs (measured, docs/measurements.md), but multiply by
 * tiles: AMX is taken where it is. AMD's do as many as published, and take pairs. Elsewhere bfloat16
 * becomes float32 while it is packed. Float32 was not measured beside OpenBLAS on AMD's, so it is
 * multiplied here on Intel's alone. NEEDLE_CPU_PRODUCTS=blas, avx512, avx512_bf16 or avx512_amx
 * decides otherwise.
 */
#include <stdlib.h>

#include "cpu.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 10 : __GNUC__ >= 10)

#include "transpose16.h"

#define INLINE static inline __attribute__((always_inline))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

#include "amx.h"

enum { FEWEST_ROWS = 32 }; /* of float32: below, packing b takes longer than a BLAS multiplies */
/* 28 sums, two vectors of b and one word of a repeated: 31 of 32 registers. */
enum { ROWS = 14, LANES = 16, COLUMNS = CPU_PANEL_COLUMNS };
enum { GROUP = 8 }; /* panels of a that are packed together, where its rows lie side by side */

static bool chosen, floats_chosen, pairs_chosen, tiles_chosen;

void cpu_panels_setup(void) {
    const char *asked = getenv("NEEDLE_CPU_PRODUCTS");
    asked = asked == NULL ? "" : asked;
    bool plain = strcmp(asked, "avx512") == 0, pairs = strcmp(asked, "avx512_bf16") == 0;
    chosen = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && strcmp(asked, "blas") != 0;
    floats_chosen =
        chosen && (__builtin_cpu_is("intel") || plain || pairs || strcmp(asked, "avx512_amx") == 0);
    pairs_chosen = chosen && __builtin_cpu_supports("avx512bf16") &&
                   (pairs || (__builtin_cpu_is("amd") && !plain));
    tiles_chosen = chosen && !plain && !pairs && tiles_granted();
}

bool cpu_panels_take(nd_dtype dtype, int64_t m) {
    return chosen && (dtype != ND_F32 || (floats_chosen && m >= FEWEST_ROWS));
}

const char *cpu_panels_instructions(void) {
    if (tiles_chosen) {
        return floats_chosen ? "AMX-BF16 (float32 too)" : "AMX-BF16";
    }
    if (floats_chosen) {
        return pairs_chosen ? "AVX512-BF16 (float32 too)" : "AVX-512 (float32 too)";
    }
    return pairs_chosen ? "AVX512-BF16" : chosen ? "AVX-512" : NULL;
}

/* The type that an operand's elements become. */
typedef enum { TILES, PAIRS, FROM_F32, FROM_BF16, FROM_F16 } form;

static form form_of(nd_dtype dtype) {
    return dtype == ND_F32   ? FROM_F32
           : dtype == ND_F16 ? FROM_F16
           : tiles_chosen    ? TILES
           : pairs_chosen    ? PAIRS
                             : FROM_BF16;
}

/* The words of k elements. */
ND_FN int64_t words_of(form f, int64_t k) {
    return f == TILES ? cpu_ceil_div(k, 2 * TILE) * TILE : f == PAIRS ? cpu_ceil_div(k, 2) : k;
}

/* The rows of a panel of a. */
ND_FN int64_t height_of(form f) { return f == TILES ? TILE_ROWS : ROWS; }

static int64_t panel_words(form f, int64_t lanes, int64_t width, int64_t k) {
    return cpu_ceil_div(lanes, width) * width * words_of(f, k);
}

int64_t cpu_panels_rows(nd_dtype dtype) { return height_of(form_of(dtype)); }

int64_t cpu_panels_words(nd_dtype dtype, int64_t n, int64_t k) {
    form f = form_of(dtype);
    int64_t height = height_of(f);
    return chosen ? panel_words(f, GROUP * height, height, k) + panel_words(f, n, COLUMNS, k) : 0;
}

/* The first n <= 16 of elements side by side, a float32 each, then zeros. */
AVX512 INLINE __m512i load(form f, const char *from, int64_t n) {
    __mmask16 inside = (__mmask16)((1u << n) - 1);
    if (f == FROM_F32) {
        return _mm512_maskz_loadu_epi32(inside, from);
    }
    __m256i halves = _mm256_maskz_loadu_epi16(inside, from);
    return f == FROM_F16 ? _mm512_castps_si512(_mm512_cvtph_ps(halves))
                         : _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

/* Pairs of k at `from` and `step` bytes behind it, of n <= 16 lanes side by side. left: of k. */
AVX512 INLINE __m512i load_pairs(const char *from, int64_t step, int64_t n, int64_t left) {
    /* bfloat16 is the upper half of float32 */
    __m512i low = load(FROM_BF16, from, left > 0 ? n : 0);
    __m512i high = load(FROM_BF16, from + step, left > 1 ? n : 0);
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
}

/* The first n <= 32 of bfloat16 side by side, then zeros. */
AVX512 INLINE __m512i load_row(const char *from, int64_t n) {
    return _mm512_maskz_loadu_epi16((__mmask32)(((uint64_t)1 << n) - 1), from);
}

/* `lanes` <= 16 rows or columns, `lane` bytes apart, of k elements that are `step` bytes apart:
 * word w of lane l at to[w * width + l]; zeros from `lanes` to `room`. */
AVX512 INLINE void pack_lanes(form f, const char *from, int64_t lane, int64_t step, int64_t lanes,
                              int64_t k, int64_t room, int64_t width, uint32_t *to) {
    __mmask16 written = (__mmask16)((1u << room) - 1);
    int64_t words = words_of(f, k), size = f == FROM_F32 ? 4 : 2;
    if (step != size && k > 1) { /* so the lanes lie side by side */
        for (int64_t w = 0; w < words; w++) {
            __m512i x;
            if (f == PAIRS || f == TILES) {
                x = load_pairs(from + 2 * w * step, step, lanes, k - 2 * w);
            } else {
                x = load(f, from + w * step, lanes);
            }
            _mm512_mask_storeu_epi32(to + w * width, written, x);
        }
        return;
    }
    for (int64_t w0 = 0; w0 < words; w0 += LANES) {
        __m512i x[LANES];
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            if (l >= lanes) {
                x[l] = _mm512_setzero_si512();
            } else if (f == PAIRS || f == TILES) {
                x[l] = load_row(from + l * lane + 2 * w0 * size, min_of(k - 2 * w0, 2 * LANES));
            } else {
                x[l] = load(f, from + l * lane + w0 * size, min_of(k - w0, LANES));
            }
        }
        transpose16(x);
#pragma GCC unroll 16
        for (int w = 0; w < LANES; w++) {
            if (w0 + w < words) {
                _mm512_mask_storeu_epi32(to + (w0 + w) * width, written, x[w]);
            }
        }
    }
}

/* All lanes into panels of `width`, one after the other. Strides in elements. Lanes that lie side
 * by side are read some steps at a time over all panels: memory is faster where addresses rise. */
AVX512 INLINE void pack_form(form f, const void *from, int64_t lane, int64_t step, int64_t lanes,
                             int64_t k, int64_t width, uint32_t *to) {
    int64_t size = f == FROM_F32 ? 4 : 2, panel = panel_words(f, 1, width, k);
    int64_t steps = step == 1 ? k : 64;
    for (int64_t k0 = 0; k0 < k; k0 += steps, to += words_of(f, steps) * width) {
        const char *first = (const char *)from + k0 * step * size;
        for (int64_t l = 0; l < lanes; l += width) {
            for (int64_t i = 0; i < width; i += LANES) {
                pack_lanes(f, first + (l + i) * lane * size, lane * size, step * size,
                           max_of(0, min_of(LANES, lanes - l - i)), min_of(steps, k - k0),
                           min_of(LANES, width - i), width, to + l / width * panel + i);
            }
        }
    }
}

/* The form is a constant in each case, so that the compiler makes one of the above for each. */
AVX512 static void pack(form f, const void *from, int64_t lane, int64_t step, int64_t lanes,
                        int64_t k, int64_t width, uint32_t *to) {
    switch (f) {
    case TILES:
        pack_form(TILES, from, lane, step, lanes, k, width, to);
        break;
    case PAIRS:
        pack_form(PAIRS, from, lane, step, lanes, k, width, to);
        break;
    case FROM_F32:
        pack_form(FROM_F32, from, lane, step, lanes, k, width, to);
        break;
    case FROM_BF16:
        pack_form(FROM_BF16, from, lane, step, lanes, k, width, to);
        break;
    case FROM_F16:
        pack_form(FROM_F16, from, lane, step, lanes, k, width, to);
        break;
    }
}

/* Rows of a, of k elements, into panels for tiles. Strides in elements. */
AVX512 static void pack_rows(const char *from, int64_t row, int64_t step, int64_t rows, int64_t k,
                             uint32_t *to) {
    for (int64_t r = 0; r < cpu_ceil_div(rows, TILE_ROWS) * TILE_ROWS; r += TILE) {
        uint32_t *panel = to + r / TILE_ROWS * TILE_ROWS * words_of(TILES, k);
        const char *first = from + r * row * 2;
        int64_t some = max_of(0, min_of(TILE, rows - r));
        for (int64_t w0 = 0; w0 < words_of(TILES, k); w0 += TILE) {
            __m512i x[TILE];
            for (int64_t i = 0; i < TILE; i++) {
                int64_t at = 2 * (step == 1 ? w0 : w0 + i); /* of k */
                x[i] = step != 1  ? load_pairs(first + at * step * 2, step * 2, some, k - at)
                       : i < some ? load_row(first + (i * row + at) * 2, min_of(k - at, 2 * TILE))
                                  : _mm512_setzero_si512();
            }
            if (step != 1) {
                transpose16(x);
            }
            for (int64_t i = 0; i < TILE; i++) {
                _mm512_storeu_si512(panel + w0 * TILE_ROWS + (r % TILE_ROWS + i) * TILE, x[i]);
            }
        }
    }
}

/* Lines of a cache that will be packed: rows of 2^shift lines each, `pitch` bytes apart; of all of
 * them, counted row by row, those from `first` to `last`, or none. Row by row, since each row is in
 * another page. */
typedef struct {
    const char *at;
    int64_t pitch, shift, first, last;
} lines;
enum { LINE = 64 };
static const lines NO_LINES = {.last = -1};

static lines lines_of(form f, const char *at, int64_t lane, int64_t step, int64_t lanes,
                      int64_t k) {
    int64_t size = f == FROM_F32 ? 4 : 2;
    bool by_lanes = step != 1;
    lines l = {.at = at, .pitch = (by_lanes ? step : lane) * size};
    while ((LINE << l.shift) < (by_lanes ? lanes : k) * size) {
        l.shift++;
    }
    l.last = ((by_lanes ? k : lanes) << l.shift) - 1;
    return l;
}

/* Prefetched while products are made, because hardware prefetch misses it: the next panels of a
 * and, with the last `products` of a tile's part of k, those of b. */
typedef struct {
    lines a, b;
    int64_t products;
} foresight;

/* The lines for one product of `words` words: one every other word, as fast as they come. */
ND_FN lines foresee(foresight *f, int64_t words, const void *here) {
    int64_t each = words / 2;
    lines *from = f->a.first <= f->a.last ? &f->a : &f->b;
    f->products--;
    if (from->first > from->last ||
        (from == &f->b && f->products * each > from->last - from->first)) {
        return (lines){.at = here};
    }
    lines some = *from;
    some.last = min_of(some.last, some.first + max_of(each, 1) - 1);
    from->first = some.last + 1;
    return some;
}

/* The sums of one panel of a with one of b, of which m <= `rows` x n are stored; `rows` is a
 * constant where it is inlined. */
#define KERNEL(name, TARGET, MULTIPLY)                                                             \
    TARGET INLINE void name(int rows, int64_t words, const uint32_t *a, const uint32_t *b,         \
                            const float *base, int64_t base_row, float *c, int64_t ldc, int64_t m, \
                            int64_t n, lines ask) {                                                \
        uint32_t inside = (uint32_t)(((uint64_t)1 << n) - 1);                                      \
        __mmask16 masks[2] = {(__mmask16)inside, (__mmask16)(inside >> LANES)};                    \
        __m512 sums[ROWS][2];                                                                      \
        _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) {                                  \
            sums[r][0] = sums[r][1] = _mm512_setzero_ps();                                         \
            __builtin_prefetch(c + (r < m ? r : 0) * ldc, 1);                                      \
            __builtin_prefetch(c + (r < m ? r : 0) * ldc + LANES, 1);                              \
        }                                                                                          \
        int64_t in_row = (1 << ask.shift) - 1;                                                     \
        for (int64_t w = 0; w < words; w++) {                                                      \
            __m512i first = _mm512_loadu_si512(b + w * COLUMNS);                                   \
            __m512i second = _mm512_loadu_si512(b + w * COLUMNS + LANES);                          \
            int64_t line = min_of(ask.first + w / 2, ask.last);                                    \
            _mm_prefetch(ask.at + (line >> ask.shift) * ask.pitch + (line & in_row) * LINE,        \
                         _MM_HINT_T1);                                                             \
            _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) {                              \
                __m512i left = _mm512_set1_epi32((int)a[w * ROWS + r]);                            \
                sums[r][0] = MULTIPLY(sums[r][0], left, first);                                    \
                sums[r][1] = MULTIPLY(sums[r][1], left, second);                                   \
            }                                                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) {                                  \
            for (int half = 0; half < 2 && r < m; half++) {                                        \
                float *to = c + r * ldc + half * LANES;                                            \
                const float *from = base ? base + r * base_row + half * LANES : to;                \
                __m512 before = _mm512_maskz_loadu_ps(base ? masks[half] : 0, from);               \
                _mm512_mask_storeu_ps(to, masks[half], _mm512_add_ps(before, sums[r][half]));      \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    /* One panel of a with all of b. */                                                            \
    TARGET static void name##_row(int64_t m, int64_t n, int64_t words, const uint32_t *a,          \
                                  const uint32_t *b, const float *base, int64_t base_row,          \
                                  float *c, int64_t ldc, foresight *ahead) {                       \
        for (int64_t j = 0; j < n; j += COLUMNS, c += COLUMNS, b += COLUMNS * words) {             \
            int64_t columns = min_of(n - j, COLUMNS);                                              \
            const float *from = base ? base + j : NULL;                                            \
            lines ask = foresee(ahead, words, a);                                                  \
            if (m > 8) {                                                                           \
                name(ROWS, words, a, b, from, base_row, c, ldc, m, columns, ask);                  \
            } else if (m > 4) {                                                                    \
                name(8, words, a, b, from, base_row, c, ldc, m, columns, ask);                     \
            } else {                                                                               \
                name(4, words, a, b, from, base_row, c, ldc, m, columns, ask);                     \
            }                                                                                      \
        }                                                                                          \
    }

#define FMA(sum, a, b) _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum)
#define DOT(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
KERNEL(multiply_floats, AVX512, FMA)
KERNEL(multiply_pairs, AVX512_BF16, DOT)

void cpu_panels_product(nd_dtype dtype, int64_t m, int64_t n, int64_t k, const void *a,
                        const int64_t *a_strides, const void *b, const int64_t *b_strides,
                        const float *base, int64_t base_row, float *c, int64_t ldc, int64_t more,
                        uint32_t *panels) {
    form f = form_of(dtype);
    int64_t size = (int64_t)nd_dtype_size(dtype);
    int64_t words = words_of(f, k), row_bytes = a_strides[0] * size, height = height_of(f);
    int64_t group = a_strides[1] == 1 ? height : GROUP * height;
    uint32_t *b_panels = panels + panel_words(f, GROUP * height, height, k);
    pack(f, b, b_strides[1], b_strides[0], n, k, COLUMNS, b_panels);
    foresight ahead = {NO_LINES, NO_LINES, cpu_ceil_div(m, height) * cpu_ceil_div(n, COLUMNS)};
    if (f == TILES) {
        tiles_begin();
    }
    if (more > 0) {
        ahead.b = lines_of(f, (const char *)b + k * b_strides[0] * size, b_strides[1], b_strides[0],
                           n, more);
    }
    for (int64_t i = 0; i < m; i += height, c += height * ldc) {
        uint32_t *a_panel = panels + panel_words(f, i % group, height, k);
        if (i % group == 0) {
            const char *from = (const char *)a + i * row_bytes;
            int64_t packed = min_of(m - i, group);
            if (f == TILES) {
                pack_rows(from, a_strides[0], a_strides[1], packed, k, panels);
            } else {
                pack(f, from, a_strides[0], a_strides[1], packed, k, ROWS, panels);
            }
            ahead.a = NO_LINES;
            if (i + group < m) {
                ahead.a = lines_of(f, from + group * row_bytes, a_strides[0], a_strides[1],
                                   min_of(m - i - group, group), k);
            } else if (more > 0) {
                ahead.a = lines_of(f, (const char *)a + k * a_strides[1] * size, a_strides[0],
                                   a_strides[1], min_of(m, group), more);
            }
        }
        int64_t rows = min_of(m - i, height);
        if (f == TILES) {
            multiply_tiles_row(rows, n, words, a_panel, b_panels, base, base_row, c, ldc);
        } else if (f == PAIRS) {
            multiply_pairs_row(rows, n, words, a_panel, b_panels, base, base_row, c, ldc, &ahead);
        } else {
            multiply_floats_row(rows, n, words, a_panel, b_panels, base, base_row, c, ldc, &ahead);
        }
        base = base ? base + height * base_row : NULL;
    }
    if (f == TILES) {
        tiles_end();
    }
}

#else

void cpu_panels_setup(void) {}

const char *cpu_panels_instructions(void) { return NULL; }

bool cpu_panels_take(nd_dtype dtype, int64_t m) { return false; }

int64_t cpu_panels_rows(nd_dtype dtype) { return 1; }

int64_t cpu_panels_words(nd_dtype dtype, int64_t n, int64_t k) { return 0; }

void cpu_panels_product(nd_dtype dtype, int64_t m, int64_t n, int64_t k, const void *a,
                        const int64_t *a_strides, const void *b, const int64_t *b_strides,
                        const float *base, int64_t base_row, float *c, int64_t ldc, int64_t more,
                        uint32_t *panels) {}

#endif
