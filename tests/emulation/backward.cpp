/* backward.cpp - attention_bwd_hopper.cu on the CPU. */
#include "attention.h"

#include "attention_bwd_hopper.cu"

/* stats: (B, H, T) pairs of lse, times log2 e, and delta. given, turned: the lists of queries, of keys.
 * cos, sin: (T, half), NULL where nothing is rotated. sums, largest: see Operands, Problem; or NULL. */
extern "C" const char *backward(const Given *q, const Given *k, const Given *v, const Given *dout,
                                const Given *dq, const Given *dk, const Given *dv, float *stats,
                                const GivenLists *given, const GivenLists *turned, float *cos,
                                float *sin, int half, float *sums, unsigned *largest, int causal,
                                int joins, double scale, int is_half, unsigned seed) {
    emulated::chance.seed(seed);
    nd_array arrays[7] = {array_of(*q, is_half),    array_of(*k, is_half),  array_of(*v, is_half),
                          array_of(*dout, is_half), array_of(*dq, is_half), array_of(*dk, is_half),
                          array_of(*dv, is_half)};
    Problem p;
    if (problem_new("backward", &arrays[0], &arrays[1], &arrays[2], scale, causal, &p) != ND_OK) {
        return message;
    }
    p.stats = (float2 *)stats;
    p.joins = joins;
    const int64_t rows = (int64_t)p.B * p.H * p.T,
                  parts = (int64_t)p.B * p.H * ceil_div(p.T, CONSUMER_ROWS);
    std::vector<uint4> terms((size_t)rows * 2);
    p.terms = terms.data();
    for (int64_t row = 0; row < rows; row++) { /* as attention_stats_kernel writes them */
        const float lse = isinf(stats[2 * row]) ? NO_KEY : stats[2 * row] / p.scale_log2;
        if (is_half) {
            store_terms((f16 *)p.terms + row * TERMS, lse, stats[2 * row + 1]);
        } else {
            store_terms((bf16 *)p.terms + row * TERMS, lse, stats[2 * row + 1]);
        }
    }
    std::vector<float4> dq_sums((size_t)parts * DQ_SHARE / 4, float4{NAN, NAN, NAN, NAN});
    std::vector<unsigned> tickets((size_t)parts, 0);
    p.dq_sums = (float *)dq_sums.data();
    p.tickets = tickets.data();
    p.largest = largest;
    for (const nd_array &array : arrays) {
        if (!hopper_serves(0, p, array.dtype, given->block, {&array})) {
            return "not served";
        }
    }
    nd_array angles[2] = {};
    angles[0].data = cos;
    angles[1].data = sin;
    for (nd_array &array : angles) {
        array.dtype = ND_F32;
        array.ndim = 2;
        array.shape[0] = p.T;
        array.shape[1] = half;
    }
    if (cos != NULL && !hopper_rotates(&angles[0])) {
        return "not rotated";
    }
    GivenBlocks blocks(*given), transposed(*turned);
    Operands all = {&arrays[0], &arrays[1], &arrays[2], NULL,
                    &arrays[3], &arrays[4], &arrays[5], &arrays[6]};
    if (cos != NULL) {
        all.cos = &angles[0];
        all.sin = &angles[1];
    }
    all.sums = sums;
    nd_status status = attention_bwd_hopper("backward", 0, p, all, blocks.lists, transposed.lists);
    return status == ND_OK ? "" : message;
}
