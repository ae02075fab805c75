/* blake2s.c - the hashes of an array's leaves, as blake2s.h has them: LANES side by side, which the
 * compiler makes vectors of. Threads take groups of leaves. */
#define ND_LANES 16
#include "../blake2s.h"
#include "cpu.h"

/* Words of the chunks that begin at byte `first` of leaves which lie one after the other. */
static void gather(const uint8_t *leaves, int first, const int size[ND_LANES],
                   uint32_t m[ND_CHUNK_WORDS][ND_LANES]) {
    for (int lane = 0; lane < ND_LANES; lane++) {
        uint32_t words[ND_CHUNK_WORDS] = {0};
        int n = size[lane] - first;
        if (n > 0) {
            memcpy(words, leaves + (size_t)lane * ND_LEAF_BYTES + first,
                   n < ND_CHUNK_BYTES ? (size_t)n : ND_CHUNK_BYTES);
        }
        for (int i = 0; i < ND_CHUNK_WORDS; i++) {
            m[i][lane] = words[i];
        }
    }
}

nd_status cpu_leaf_hashes(int device, const leaf_hashes_args *args) {
    ND_TRY(nd_check_leaf_hashes(args->x, args->hashes));
    const uint8_t *x = args->x->data;
    int32_t *hashes = args->hashes->data;
    int64_t bytes = args->x->shape[0], leaves = args->hashes->shape[0];
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (bytes > CPU_GRAIN)
    for (int64_t at = 0; at < leaves; at += ND_LANES) {
        nd_blake2s s;
        int size[ND_LANES];
        uint32_t m[ND_CHUNK_WORDS][ND_LANES];
        for (int lane = 0; lane < ND_LANES; lane++) {
            int64_t left = bytes - (at + lane) * ND_LEAF_BYTES;
            size[lane] = (int)(left < 0 ? 0 : min_of(left, ND_LEAF_BYTES));
        }
        nd_blake2s_begin(&s);
        for (int first = 0; first < size[0]; first += ND_CHUNK_BYTES) {
            gather(x + at * ND_LEAF_BYTES, first, size, m);
            nd_blake2s_add(&s, m, first, size);
        }
        for (int lane = 0; lane < min_of(ND_LANES, leaves - at); lane++) {
            for (int i = 0; i < ND_HASH_WORDS; i++) {
                hashes[(at + lane) * ND_HASH_WORDS + i] = (int32_t)s.h[i][lane];
            }
        }
    }
    return ND_OK;
}
