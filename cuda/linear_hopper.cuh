/* linear_hopper.cuh - what linear_gelu.cu asks of linear_hopper.cu. */
#ifndef NEEDLE_LINEAR_HOPPER_CUH
#define NEEDLE_LINEAR_HOPPER_CUH

#include <initializer_list>

#include "hopper.cuh"

/* Both where linear_hopper_serves() all their operands. */
nd_status linear_gelu_fwd_hopper(int device, const linear_gelu_fwd_args *a);
nd_status linear_gelu_bwd_hopper(int device, const linear_gelu_bwd_args *a);

/* 16 bits, something to do, rows that start at multiples of 16 bytes. */
static inline bool linear_hopper_serves(int device,
                                        std::initializer_list<const nd_array *> operands) {
    bool good = hopper::hopper_usable(device);
    for (const nd_array *a : operands) {
        int64_t rows = a->shape[0], columns = a->shape[a->ndim - 1];
        good = good && a->dtype != ND_F32 && is_aligned16(a->data) && rows > 0 && columns > 0 &&
               columns % 8 == 0 && (a->ndim == 1 || rows == 1 || a->strides[0] % 8 == 0) &&
               rows < (1 << 30) && columns < (1 << 30);
    }
    return good;
}

#endif
