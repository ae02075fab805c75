/* amx_tiles.h - what AMX's instructions for bfloat16 do, in C, for csrc/cpu/amx.h on any processor
 * (Intel's Architecture Instruction Set Extensions, tdpbf16ps): a thread's tiles, which keep nothing
 * that was not configured.
 */
#include <math.h>
#include <string.h>

static _Thread_local struct {
    unsigned char palette;
    unsigned short row_bytes[16];
    unsigned char rows[16];
    unsigned char words[8][16][64];
} tiles;

static bool tiles_granted(void) { return true; }

static void emulated_config(const void *from) {
    const unsigned char *bytes = from;
    tiles.palette = bytes[0];
    memcpy(tiles.row_bytes, bytes + 16, sizeof tiles.row_bytes);
    memcpy(tiles.rows, bytes + 48, sizeof tiles.rows);
    memset(tiles.words, 0, sizeof tiles.words);
}

static void emulated_check(int tile) {
    if (tiles.palette != 1 || tiles.rows[tile] == 0 || tiles.rows[tile] > 16 ||
        tiles.row_bytes[tile] == 0 || tiles.row_bytes[tile] > 64) {
        abort(); /* the processor raises #UD */
    }
}

static void emulated_copy(int tile, void *memory, long stride, bool store) {
    emulated_check(tile);
    for (int r = 0; r < tiles.rows[tile]; r++) {
        void *row = (char *)memory + r * stride;
        memcpy(store ? row : tiles.words[tile][r], store ? tiles.words[tile][r] : row,
               tiles.row_bytes[tile]);
    }
}

/* The sums work within the tiles above: the sanitizers check what copies into and out of them. */
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))

UNCHECKED static float flushed(float x) { return fpclassify(x) == FP_SUBNORMAL ? 0.0f : x; }

/* bfloat16 of the lower or upper half, and a float32: denormals are zeros. */
UNCHECKED static float emulated_half(unsigned word, int upper) {
    union {
        unsigned bits;
        float value;
    } x = {upper ? word & 0xffff0000u : word << 16};
    return flushed(x.value);
}

/* The products of the lower halves and those of the upper halves are summed apart, from zero, by
 * k; the two sums are added, and their sum to the result. */
UNCHECKED static void emulated_dot(int to, int left, int right) {
    emulated_check(to);
    for (int m = 0; m < tiles.rows[to]; m++) {
        for (int n = 0; n < tiles.row_bytes[to] / 4; n++) {
            float sums[2] = {0, 0}, result;
            for (int k = 0; k < tiles.row_bytes[left] / 4; k++) {
                unsigned a, b;
                memcpy(&a, tiles.words[left][m] + 4 * k, 4);
                memcpy(&b, tiles.words[right][k] + 4 * n, 4);
                for (int half = 0; half < 2; half++) {
                    sums[half] = flushed(
                        fmaf(emulated_half(a, half), emulated_half(b, half), sums[half]));
                }
            }
            memcpy(&result, tiles.words[to][m] + 4 * n, 4);
            result = flushed(flushed(result) + flushed(sums[0] + sums[1]));
            memcpy(tiles.words[to][m] + 4 * n, &result, 4);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated_config(from)
#define _tile_release() ((void)(tiles.palette = 0))
#define _tile_zero(t) (emulated_check(t), (void)memset(tiles.words[t], 0, sizeof tiles.words[t]))
#define _tile_loadd(t, from, stride) emulated_copy(t, (void *)(from), stride, false)
#define _tile_stored(t, to, stride) emulated_copy(t, to, stride, true)
#define _tile_dpbf16ps(to, left, right) emulated_dot(to, left, right)
