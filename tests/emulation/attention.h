/* attention.h - for forward.cpp and backward.cpp: arrays from Python, and what the host's side needs. */
#pragma once
#include "emulated.h"
#include "host.h"

/* Two heads of 200 rows and 64 dims, one of 128. */
#define NEEDLE_SECTION_BYTES (128 << 10)
#include "attention_hopper.cuh"

using namespace attention;

/* Of 16 bits, (B, T, H, D) with strides in elements. */
struct Given {
    void *data;
    int64_t shape[4], strides[4];
};

static inline nd_array array_of(const Given &given, bool is_half) {
    nd_array array = {};
    array.data = given.data;
    array.dtype = is_half ? ND_F16 : ND_BF16;
    array.ndim = 4;
    memcpy(array.shape, given.shape, sizeof given.shape);
    memcpy(array.strides, given.strides, sizeof given.strides);
    return array;
}

/* Lists of blocks: (G, P) offsets, E entries and the order (G, P - 1); G is 0 when dense. */
struct GivenLists {
    int *offsets, *entries, *order;
    int64_t groups, points, count, block;
};

struct GivenBlocks {
    nd_array offsets = {}, entries = {}, order = {};
    BlockLists lists = DENSE;
    explicit GivenBlocks(const GivenLists &given) {
        if (given.groups == 0) {
            return;
        }
        offsets.data = given.offsets;
        offsets.shape[0] = given.groups;
        offsets.shape[1] = given.points;
        entries.data = given.entries;
        entries.shape[0] = given.count;
        order.data = given.order;
        order.shape[0] = given.groups;
        order.shape[1] = given.points - 1;
        lists = {&offsets, &entries, &order, given.block};
    }
    GivenBlocks(const GivenBlocks &) = delete;
};
