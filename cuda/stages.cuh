/* stages.cuh - between hopper.cuh and the kernels that use it: a place in a ring of stages, the
 * places of a panel.
 */
#ifndef NEEDLE_STAGES_CUH
#define NEEDLE_STAGES_CUH

#include "hopper.cuh"

namespace hopper {

#ifdef HOPPER_CODE

/* A place in a ring of N, and the phase of its barriers. */
template <int N> struct Ring {
    int at = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++at == N) {
            at = 0;
            phase ^= 1;
        }
    }
};

/* Byte offset of chunk `chunk` (16 bytes) of row `row` of a panel. */
__device__ __forceinline__ uint32_t panel_offset(int row, int chunk) {
    return (uint32_t)(row * PANEL_ROW + ((chunk ^ (row & 7)) << 4));
}

#endif

} // namespace hopper

#endif
