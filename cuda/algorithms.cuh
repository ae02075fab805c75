/* algorithms.cuh - the table of algorithms: which of cuBLASLt's answers a product takes on a GPU.
 * Host only, and without a call of CUDA.
 */
#ifndef NEEDLE_ALGORITHMS_CUH
#define NEEDLE_ALGORITHMS_CUH

#include <initializer_list>
#include <stdio.h>
#include <string.h>

#include "needle.h"

namespace algorithms {

/* Row-major: c (m x n) = a (m x k) b (k x n), a and b in bfloat16. Flags are 0 or 1. */
struct Product {
    int64_t m, n, k, transpose_a, transpose_b, out, bias, add, scaled; /* out: an nd_dtype */
};

struct Row {
    const char *gpu;
    size_t version; /* cublasLtGetVersion() */
    Product product;
    int answer;
};

#define ALGORITHM(gpu, version, m, n, k, transpose_a, transpose_b, out, bias, add, scaled, answer) \
    {gpu, version, {m, n, k, transpose_a, transpose_b, ND_##out, bias, add, scaled}, answer},
constexpr Row rows[] = {
#include "algorithms.def"
    {"", 0, {}, 0}};

/* The listed answer, or 0, the first. */
inline int answer_for(const char *gpu, size_t version, const Product &product) {
    for (const Row &row : rows) {
        if (memcmp(&row.product, &product, sizeof product) == 0 && row.version == version &&
            strcmp(row.gpu, gpu) == 0) {
            return row.answer;
        }
    }
    return 0;
}

/* FNV-1a of the table. */
inline uint32_t hash() {
    uint32_t hash = 0x811c9dc5u;
    auto mix = [&](uint32_t word) { hash = (hash ^ word) * 0x01000193u; };
    for (const Row &row : rows) {
        const Product &p = row.product;
        for (const char *c = row.gpu; *c; c++) {
            mix((uint8_t)*c);
        }
        for (int64_t number : {(int64_t)row.version, p.m, p.n, p.k, p.transpose_a, p.transpose_b,
                               p.out, p.bias, p.add, p.scaled, (int64_t)row.answer}) {
            mix((uint32_t)number);
        }
    }
    return hash;
}

inline void version_text(size_t version, char (&text)[32]) {
    snprintf(text, sizeof text, "%zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
}

/* For the user, where the table lists the GPU, but with another version of cuBLASLt; else "". */
inline void warning(const char *gpu, size_t version, char *text, size_t size) {
    const Row *other = nullptr;
    text[0] = 0;
    for (const Row &row : rows) {
        if (strcmp(row.gpu, gpu) == 0) {
            if (row.version == version) {
                return;
            }
            other = &row;
        }
    }
    if (other) {
        char listed[32], found[32];
        version_text(other->version, listed);
        version_text(version, found);
        snprintf(text, size,
                 "cuda/algorithms.def lists cuBLASLt %s for %s, and cuBLASLt %s is loaded: its "
                 "algorithms are off, products may be slower. Make the table anew, then build: "
                 "python benchmarks/algorithms.py --write",
                 listed, gpu, found);
    }
}

} // namespace algorithms

#endif
