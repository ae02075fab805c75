/* blake2s.cu - the hashes of an array's leaves, as blake2s.h has them. A thread takes a leaf.
 * Per 64 bytes: 80 mixes of 14 operations on integers; each byte is read once. */
#define ND_LANES 1
#include "../csrc/blake2s.h"
#include "common.cuh"

namespace {

constexpr int threads = 128;

__global__ void __launch_bounds__(threads)
    leaf_hashes_kernel(const uint8_t *x, int64_t bytes, int32_t *hashes, int64_t leaves) {
    await_previous();
    for (int64_t leaf = (int64_t)blockIdx.x * threads + threadIdx.x; leaf < leaves;
         leaf += (int64_t)gridDim.x * threads) {
        const uint8_t *from = x + leaf * ND_LEAF_BYTES;
        const int size[1] = {(int)min(bytes - leaf * ND_LEAF_BYTES, (int64_t)ND_LEAF_BYTES)};
        nd_blake2s s;
        nd_blake2s_begin(&s);
        for (int first = 0; first < size[0]; first += ND_CHUNK_BYTES) {
            uint32_t m[ND_CHUNK_WORDS][1];
            if (first + ND_CHUNK_BYTES <= size[0]) {
#pragma unroll
                for (int i = 0; i < ND_CHUNK_WORDS; i += 4) {
                    const uint4 v = checked((const uint4 *)(from + first + 4 * i));
                    m[i][0] = v.x;
                    m[i + 1][0] = v.y;
                    m[i + 2][0] = v.z;
                    m[i + 3][0] = v.w;
                }
            } else {
#pragma unroll
                for (int i = 0; i < ND_CHUNK_WORDS; i++) {
                    m[i][0] = 0;
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const int at = first + 4 * i + k;
                        m[i][0] |= at < size[0] ? (uint32_t)checked(from + at) << (8 * k) : 0;
                    }
                }
            }
            nd_blake2s_add(&s, m, first, size);
        }
#pragma unroll
        for (int i = 0; i < ND_HASH_WORDS; i++) {
            checked(hashes + leaf * ND_HASH_WORDS + i) = (int32_t)s.h[i][0];
        }
    }
}

} // namespace

nd_status cuda_leaf_hashes(int device, const leaf_hashes_args *a) {
    ND_TRY(nd_check_leaf_hashes(a->x, a->hashes));
    const int64_t leaves = a->hashes->shape[0];
    if (leaves == 0) {
        return ND_OK;
    }
    const unsigned grid = cuda_grid(device, ceil_div<int64_t>(leaves, threads), 64);
    return cuda_launch("leaf_hashes", device, leaf_hashes_kernel, grid, threads, 0,
                       data_of<uint8_t>(a->x), a->x->shape[0], data_of<int32_t>(a->hashes), leaves);
}
