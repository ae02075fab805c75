/* blake2s.h - BLAKE2s-256 (RFC 7693) of the leaves of a tree, for the C compiler and nvcc.
 *
 * The bytes of an array are cut into leaves of ND_LEAF_BYTES, the last one perhaps shorter. Each
 * has a hash of its own, of ND_HASH_WORDS little-endian words, so that any part of an array can be
 * hashed where it lies. ND_LANES hashes are computed side by side: the includer defines it.
 */
#ifndef NEEDLE_BLAKE2S_H
#define NEEDLE_BLAKE2S_H

#include "formula.h"
#include "needle.h"

enum { ND_LEAF_BYTES = 1024, ND_HASH_WORDS = 8, ND_CHUNK_BYTES = 64, ND_CHUNK_WORDS = 16 };

/* Hashes h of which chunk after chunk of the message is taken in. */
typedef struct {
    uint32_t h[ND_HASH_WORDS][ND_LANES];
} nd_blake2s;

#define ND_BLAKE2S_IV                                                                              \
    {                                                                                              \
        0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au, 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, \
            0x5be0cd19u                                                                            \
    }

/* The order of the message's words in each round. */
#define ND_BLAKE2S_SIGMA                                              \
    {                                                                 \
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},       \
            {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},   \
            {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},   \
            {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},   \
            {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},   \
            {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},   \
            {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},   \
            {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},   \
            {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, { \
            10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0      \
        }                                                             \
    }

#ifdef __CUDACC__
#define ND_UNROLL _Pragma("unroll")
#else
#define ND_UNROLL
#endif

ND_FN uint32_t nd_rotated(uint32_t x, int right) { return x >> right | x << (32 - right); }

ND_FN void nd_blake2s_begin(nd_blake2s *s) {
    const uint32_t iv[ND_HASH_WORDS] = ND_BLAKE2S_IV;
    ND_UNROLL
    for (int i = 0; i < ND_HASH_WORDS; i++) {
        for (int lane = 0; lane < ND_LANES; lane++) {
            s->h[i][lane] = iv[i] ^ (i == 0 ? 0x01010020u : 0); /* 32 bytes, no key, no tree */
        }
    }
}

ND_FN void nd_blake2s_mix(uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d, const uint32_t *x,
                          const uint32_t *y) {
    for (int lane = 0; lane < ND_LANES; lane++) {
        a[lane] += b[lane] + x[lane];
        d[lane] = nd_rotated(d[lane] ^ a[lane], 16);
        c[lane] += d[lane];
        b[lane] = nd_rotated(b[lane] ^ c[lane], 12);
        a[lane] += b[lane] + y[lane];
        d[lane] = nd_rotated(d[lane] ^ a[lane], 8);
        c[lane] += d[lane];
        b[lane] = nd_rotated(b[lane] ^ c[lane], 7);
    }
}

/* Take in the chunk m, which begins at byte `first` of leaves of `size` bytes. A leaf that has
 * ended stays as it is; of a chunk beyond its end the words are 0. */
ND_FN void nd_blake2s_add(nd_blake2s *s, const uint32_t m[ND_CHUNK_WORDS][ND_LANES], int first,
                          const int size[ND_LANES]) {
    const unsigned char sigma[10][ND_CHUNK_WORDS] = ND_BLAKE2S_SIGMA;
    const uint32_t iv[ND_HASH_WORDS] = ND_BLAKE2S_IV;
    uint32_t v[2 * ND_HASH_WORDS][ND_LANES];
    ND_UNROLL
    for (int i = 0; i < ND_HASH_WORDS; i++) {
        for (int lane = 0; lane < ND_LANES; lane++) {
            const int end = first + ND_CHUNK_BYTES;
            v[i][lane] = s->h[i][lane];
            v[i + 8][lane] = iv[i];
            v[i + 8][lane] ^= i == 4 ? (uint32_t)(end < size[lane] ? end : size[lane]) : 0;
            v[i + 8][lane] ^= i == 6 && end >= size[lane] ? ~0u : 0; /* the last chunk */
        }
    }
    ND_UNROLL
    for (int r = 0; r < 10; r++) {
        const unsigned char *at = sigma[r];
        nd_blake2s_mix(v[0], v[4], v[8], v[12], m[at[0]], m[at[1]]);
        nd_blake2s_mix(v[1], v[5], v[9], v[13], m[at[2]], m[at[3]]);
        nd_blake2s_mix(v[2], v[6], v[10], v[14], m[at[4]], m[at[5]]);
        nd_blake2s_mix(v[3], v[7], v[11], v[15], m[at[6]], m[at[7]]);
        nd_blake2s_mix(v[0], v[5], v[10], v[15], m[at[8]], m[at[9]]);
        nd_blake2s_mix(v[1], v[6], v[11], v[12], m[at[10]], m[at[11]]);
        nd_blake2s_mix(v[2], v[7], v[8], v[13], m[at[12]], m[at[13]]);
        nd_blake2s_mix(v[3], v[4], v[9], v[14], m[at[14]], m[at[15]]);
    }
    ND_UNROLL
    for (int i = 0; i < ND_HASH_WORDS; i++) {
        for (int lane = 0; lane < ND_LANES; lane++) {
            s->h[i][lane] ^= first < size[lane] ? v[i][lane] ^ v[i + 8][lane] : 0;
        }
    }
}

static inline int64_t nd_leaves(int64_t bytes) {
    return (bytes + ND_LEAF_BYTES - 1) / ND_LEAF_BYTES;
}

static inline nd_status nd_check_leaf_hashes(const nd_array *x, const nd_array *hashes) {
    if (hashes->shape[0] != nd_leaves(x->shape[0]) || hashes->shape[1] != ND_HASH_WORDS) {
        return nd_error(ND_EVALUE,
                        "leaf_hashes: hashes: is (%lld, %lld), but %lld bytes are %lld leaves of 8 "
                        "words",
                        (long long)hashes->shape[0], (long long)hashes->shape[1],
                        (long long)x->shape[0], (long long)nd_leaves(x->shape[0]));
    }
    return ND_OK;
}

#endif
