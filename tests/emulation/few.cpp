/* few.cpp - linear_few.cu on the CPU. */
#include "emulated.h"
#include "host.h"

const char *nd_dtype_name(nd_dtype) { return ""; }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t order) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        out |= (uint32_t)(bytes >> 8 * (order >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return out;
}

/* Fragments as mma.cuh has them. */
template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int lane = (int)threadIdx.x % 32, group = lane / 4, pair = 2 * (lane % 4);
    float rows[2][16], columns[2][16];
    auto unpack = [](uint32_t word, float *to) {
        to[0] = hopper::value_of<T>((uint16_t)word);
        to[1] = hopper::value_of<T>((uint16_t)(word >> 16));
    };
    for (int i = 0; i < 4; i++) {
        for (int reg = 0; reg < 4; reg++) {
            unpack(emulated::from_lane(a[reg], group * 4 + i), rows[reg % 2] + reg / 2 * 8 + 2 * i);
        }
        for (int n = 0; n < 2; n++) {
            unpack(emulated::from_lane(b0, (pair + n) * 4 + i), columns[n] + 2 * i);
            unpack(emulated::from_lane(b1, (pair + n) * 4 + i), columns[n] + 8 + 2 * i);
        }
    }
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 16; k++) {
            c[i] += rows[i / 2][k] * columns[i % 2][k];
        }
    }
}

namespace {
float4 shared[sizeof emulated::memory / sizeof(float4)];
} // namespace
#define SHARED shared
#include "blocks.h"

/* Weights are read ahead. */
bool cuda_reads_ahead(int, std::initializer_list<const nd_array *>) { return true; }

#include "linear_few.cu"

nd_status cuda_scratch(int, size_t bytes, void **out) {
    static std::vector<char> memory;
    memory.assign(bytes, -1);
    *out = memory.data();
    return ND_OK;
}
nd_status cuda_linear_fwd(int, const linear_fwd_args *) {
    return nd_error(ND_EVALUE, "not served");
}
nd_status cuda_decode_greedy(int, const decode_greedy_args *) { return cuda_linear_fwd(0, nullptr); }

extern "C" const char *output(void *x, void *w, void *b, void *r, void *y, int n, int k, int m,
                              int is_half, unsigned seed) {
    emulated::chance.seed(seed);
    nd_array all[5] = {matrix(x, n, k, is_half), matrix(w, k, m, is_half), matrix(b, 1, m, is_half),
                       matrix(r, n, m, is_half), matrix(y, n, m, is_half)};
    decode_output_args args = {&all[0], &all[1], &all[2], &all[3], &all[4]};
    return result(cuda_decode_output(0, &args));
}

extern "C" const char *greedy(void *x, void *w, void *y, int32_t *tokens, int32_t *positions, int n,
                              int k, int m, int is_half, unsigned seed) {
    emulated::chance.seed(seed);
    nd_array all[3] = {matrix(x, n, k, is_half), matrix(w, k, m, is_half), matrix(y, n, m, is_half)};
    nd_array of[2] = {};
    of[0].data = tokens;
    of[1].data = positions;
    decode_output_greedy_args args = {&all[0], &all[1], &all[2], &of[0], &of[1]};
    return result(cuda_decode_output_greedy(0, &args));
}

extern "C" const char *projections(void *x, void *norms, void *w_qkv, void *b_qkv, void *w1,
                                   void *b1, void *packed, void *g, int n, int c, int p, int m,
                                   int tanh, int is_half, unsigned seed) {
    emulated::chance.seed(seed);
    auto norm = [&](int i) { return matrix((uint16_t *)norms + i * c, 1, c, is_half); };
    nd_array all[11] = {matrix(x, n, c, is_half),
                        norm(0),
                        norm(1),
                        norm(2),
                        norm(3),
                        matrix(w_qkv, c, p, is_half),
                        matrix(b_qkv, 1, p, is_half),
                        matrix(w1, c, m, is_half),
                        matrix(b1, 1, m, is_half),
                        matrix(packed, n, p, is_half),
                        matrix(g, n, m, is_half)};
    decode_projections_args args = {&all[0], &all[1], &all[2], &all[3], &all[4],  1e-5,    &all[5],
                                    &all[6], &all[7], &all[8], tanh,    &all[9], &all[10]};
    return result(cuda_decode_projections(0, &args));
}
