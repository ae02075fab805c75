/* linear_hopper.cuh - what linear_gelu.cu asks of linear_hopper.cu, that and linear_rotary.cu of
 * linear_shallow_hopper.cu, and what the two have in common.
 */
#ifndef NEEDLE_LINEAR_HOPPER_CUH
#define NEEDLE_LINEAR_HOPPER_CUH

#include <initializer_list>

#include "hopper.cuh"

/* Both where linear_hopper_serves() all their operands. */
nd_status linear_gelu_fwd_hopper(int device, const linear_gelu_fwd_args *a);
nd_status linear_gelu_bwd_hopper(int device, const linear_gelu_bwd_args *a);

namespace linear {

constexpr int SHALLOW = 512;
constexpr int SHALLOW_ANGLES = 8; /* R */

/* A tensor map of a matrix of 16 bits, in boxes of `rows` rows and 64 columns. */
static inline nd_status map_of(const char *op, const nd_array *a, int rows, CUtensorMap *out) {
    const int64_t shape[4] = {a->shape[1], a->shape[0], 1, 1};
    const int64_t row = a->shape[0] > 1 ? a->strides[0] : (a->shape[1] + 7) / 8 * 8;
    const int64_t strides[3] = {2 * row, 0, 0};
    return hopper::tensor_map(op, a->data, 2, shape, strides, hopper::PANEL_COLUMNS, rows, out);
}

/* As many blocks as run at once; a multiple of the columns of tiles, so that none has parts of two, where that
 * makes no block's share longer by more than a sixteenth. */
static inline unsigned blocks_for(int device, int row_tiles, int column_tiles) {
    const int64_t tiles = (int64_t)row_tiles * column_tiles;
    const int64_t blocks = cuda_device_limits(device)->processors;
    const int64_t even = blocks / column_tiles * column_tiles;
    if (tiles < blocks) {
        return (unsigned)tiles;
    }
    const bool is_short = even > 0 && 16 * ceil_div(tiles, even) <= 17 * ceil_div(tiles, blocks);
    return (unsigned)(is_short ? even : blocks);
}

} // namespace linear

/* linear_shallow_hopper.cu: for depths up to SHALLOW. */
nd_status linear_gelu_fwd_shallow(int device, const linear_gelu_fwd_args *a);
nd_status linear_gelu_bwd_shallow(int device, const linear_gelu_bwd_args *a);
/* The op with x, w and y as matrices, where it serves them. */
bool linear_rotary_shallow_serves(int device, const linear_rotary_fwd_args *a, const nd_array *x,
                                  const nd_array *w, const nd_array *y);
nd_status linear_rotary_fwd_shallow(int device, const linear_rotary_fwd_args *a, const nd_array *x,
                                    const nd_array *w, const nd_array *y);

/* 16 bits, something to do, rows of whole 16 bytes. */
static inline bool linear_hopper_serves(int device,
                                        std::initializer_list<const nd_array *> operands) {
    bool good = hopper::hopper_usable(device);
    for (const nd_array *a : operands) {
        int64_t rows = a->shape[0], columns = a->shape[a->ndim - 1];
        good = good && a->dtype != ND_F32 && is_boxable(a) && rows > 0 && columns > 0 &&
               columns % 8 == 0 && rows < (1 << 30) && columns < (1 << 30);
    }
    return good;
}

#endif
