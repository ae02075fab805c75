/* forward.cpp - attention_fwd_hopper.cu on the CPU. */
#include "attention.h"

#include "attention_fwd_hopper.cu"

extern "C" const char *forward(const Given *q, const Given *k, const Given *v, const Given *o, float *lse,
                               const GivenLists *given, int causal, int joins, double scale,
                               int is_half, unsigned seed) {
    emulated::chance.seed(seed);
    nd_array arrays[4] = {array_of(*q, is_half), array_of(*k, is_half), array_of(*v, is_half),
                          array_of(*o, is_half)};
    Problem p;
    if (problem_new("forward", &arrays[0], &arrays[1], &arrays[2], scale, causal, &p) != ND_OK) {
        return message;
    }
    p.lse = RowFloats{lse, (int64_t)p.H * p.T, p.T, 1};
    p.joins = joins;
    if (!hopper_serves(0, p, arrays[0].dtype, given->block, {&arrays[0], &arrays[1], &arrays[2], &arrays[3]})) {
        return "not served";
    }
    GivenBlocks blocks(*given);
    Operands all = {&arrays[0], &arrays[1], &arrays[2], &arrays[3], NULL, NULL, NULL, NULL};
    nd_status status = attention_fwd_hopper("forward", 0, p, all, blocks.lists);
    return status == ND_OK ? "" : message;
}
