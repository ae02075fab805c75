/* maps.cpp - the table of hopper.cpp on the CPU, with a driver that writes a map's operands. */
#include <cstdio>
#include <cstring>

#include "hopper.cuh"
#include "host.h"

int cuda_arch(int) { return 90; }
static int encoded;

static CUresult encode(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t, void *data,
                       const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                       const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    encoded++;
    unsigned char *to = (unsigned char *)out;
    memset(to, 0, sizeof *out);
    memcpy(to, &data, 8);
    memcpy(to + 8, shape, 32);
    memcpy(to + 40, strides, 24);
    memcpy(to + 64, box, 16);
    memcpy(to + 80, &type, 4);
    memcpy(to + 84, &swizzle, 4);
    return shape[0] > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *how) {
    *out = (void *)encode;
    *how = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

#include "hopper.cpp"

/* The map of bytes: shape, strides, box, swizzle. Returns how many were encoded so far. */
extern "C" const char *byte_map(void *data, const int64_t *given, void *map, int *count) {
    const int64_t shape[4] = {given[0], given[1], given[2], given[3]};
    const int64_t strides[3] = {given[4], given[5], given[6]};
    const int box[4] = {(int)given[7], (int)given[8], (int)given[9], (int)given[10]};
    const nd_status status =
        hopper::byte_map("op", data, shape, strides, box, (int)given[11], (CUtensorMap *)map);
    *count = encoded;
    return result(status);
}
