/* linear_hopper.cuh - products with an epilogue on Hopper: their entries, and the skeleton that
 * linear_hopper.cu, linear_shallow_hopper.cu and linear_fp8_hopper.cuh fill with shapes.
 *
 *   c (rows x columns) = a b     16-bit operands, float32 sums; an epilogue makes results of c
 *
 * Parallel: tiles of c, column by column, shared among the thread blocks; a block walks down the
 *   rows of its columns. One warpgroup is the producer: a single thread requests parts of a and b,
 *   a stage each. The other two are consumers: they multiply and run the epilogue.
 */
#ifndef NEEDLE_LINEAR_HOPPER_CUH
#define NEEDLE_LINEAR_HOPPER_CUH

#include <initializer_list>

#include "gelu.cuh"
#include "hopper.cuh"
#include "mma.cuh"
#include "stages.cuh"

/* ---- entries ------------------------------------------------------------------------------------
 * The ops on matrices, where linear_hopper_serves() all their operands. */
nd_status linear_gelu_fwd_hopper(int device, const linear_gelu_fwd_args *a);
nd_status linear_gelu_bwd_hopper(int device, const linear_gelu_bwd_args *a);

/* linear_shallow_hopper.cu: for depths up to linear::SHALLOW. */
nd_status linear_gelu_fwd_shallow(int device, const linear_gelu_fwd_args *a);
nd_status linear_gelu_bwd_shallow(int device, const linear_gelu_bwd_args *a);
bool linear_rotary_shallow_serves(int device, const linear_rotary_fwd_args *a, const nd_array *x,
                                  const nd_array *w, const nd_array *y);
nd_status linear_rotary_fwd_shallow(int device, const linear_rotary_fwd_args *a, const nd_array *x,
                                    const nd_array *w, const nd_array *y);

/* True for non-empty 16-bit matrices whose rows are whole 16 bytes. */
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

/* ---- the skeleton ---------------------------------------------------------------------------- */
namespace linear {

constexpr int SHALLOW = 512;
constexpr int SHALLOW_ANGLES = 8; /* R */

/* Base of the shapes. A shape adds BACKWARD, ROWS and COLUMNS of a tile, B_ROWS of a box
 * of b, STAGES, LOADS (further barriers), BARRIERS_AT, TAKE and SHARED. */
struct TileShape {
    static constexpr int CONSUMERS = 2, THREADS = hopper::WARPGROUP * (1 + CONSUMERS);
    static constexpr int OWN = 64;                     /* rows of a partial column sum */
    static constexpr int STEP = hopper::PANEL_COLUMNS; /* of the depth */
    static constexpr int READERS = CONSUMERS;          /* of a stage */
    static constexpr int KEEP = 24; /* registers of a producer's thread; TAKE: of a consumer's */
};

#ifdef HOPPER_CODE

/* Shared memory of a block. Full and empty: a stage; came and left: further loads. */
template <class Shape> struct Barriers {
    uint32_t base;

    __device__ __forceinline__ uint32_t full(int stage) const {
        return base + Shape::BARRIERS_AT + 8 * stage;
    }
    __device__ __forceinline__ uint32_t empty(int stage) const {
        return full(Shape::STAGES + stage);
    }
    __device__ __forceinline__ uint32_t came(int i) const { return full(2 * Shape::STAGES + i); }
    __device__ __forceinline__ uint32_t left(int i) const { return came(Shape::LOADS + i); }
};

/* The body of a kernel: initialises the barriers, then each warpgroup takes its role. */
template <class Shape, class Produce, class Consume>
__device__ __forceinline__ void run_block(uint32_t shared, Produce produce, Consume consume) {
    using namespace hopper;
    const Barriers<Shape> at = {shared};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Shape::STAGES; stage++) {
            barrier_init(at.full(stage), 1);
            barrier_init(at.empty(stage), Shape::READERS);
        }
        for (int i = 0; i < Shape::LOADS; i++) {
            barrier_init(at.came(i), 1);
            barrier_init(at.left(i), Shape::CONSUMERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0);
    if (group == 0) {
        registers_down_to<Shape::KEEP>();
        if (threadIdx.x == 0) {
            produce();
        }
    } else {
        registers_up_to<Shape::TAKE>();
        consume(group - 1);
    }
}

/* gelu'(c + bias) and gelu(c + bias) of two neighbours, rounded to T. */
template <class T, bool TANH>
__device__ __forceinline__ void gelu_pair(const float *c, float bias0, float bias1, uint32_t &dgelu,
                                          uint32_t &y) {
    const Gelu first = gelu_16<TANH>(c[0] + bias0), second = gelu_16<TANH>(c[1] + bias1);
    dgelu = pack_pair<T>(first.derivative, second.derivative);
    y = pack_pair<T>(first.value, second.value);
}

/* dpre = c gelu' of two neighbours, rounded to T. */
template <class T> __device__ __forceinline__ uint32_t times_dgelu(const float *c, uint32_t dgelu) {
    const float2 by = unpack_pair<T>(dgelu);
    return pack_pair<T>(c[0] * by.x, c[1] * by.y);
}

#endif

/* ---- host ------------------------------------------------------------------------------------ */
/* A tensor map of a matrix of 16 bits, in boxes of `rows` rows and 64 columns. */
static inline nd_status map_of(const char *op, const nd_array *a, int rows, CUtensorMap *out) {
    const int64_t shape[4] = {a->shape[1], a->shape[0], 1, 1};
    const int64_t row = a->shape[0] > 1 ? a->strides[0] : (a->shape[1] + 7) / 8 * 8;
    const int64_t strides[3] = {2 * row, 0, 0};
    return hopper::tensor_map(op, a->data, a->dtype, shape, strides, hopper::PANEL_COLUMNS, rows,
                              out);
}

/* As many blocks as run at once. Rounded down to a multiple of column_tiles if that lengthens a
 * block's work by at most 1/16; each block then stays in one column. */
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

/* Launches the kernel of a's dtype. b is (depth, columns), transposed where Shape::BACKWARD. */
template <class Shape, class F>
nd_status launch(const char *op, int device, void (*bf16_kernel)(F), void (*f16_kernel)(F), F f,
                 const nd_array *a, const nd_array *b) {
    f.rows = (int)a->shape[0];
    f.columns = (int)b->shape[Shape::BACKWARD ? 0 : 1];
    f.row_tiles = ceil_div(f.rows, Shape::ROWS);
    f.column_tiles = ceil_div(f.columns, Shape::COLUMNS);
    ND_TRY(map_of(op, a, Shape::ROWS, &f.a));
    ND_TRY(map_of(op, b, Shape::B_ROWS, &f.b));
    return cuda_launch(op, device, a->dtype == ND_BF16 ? bf16_kernel : f16_kernel,
                       blocks_for(device, f.row_tiles, f.column_tiles), Shape::THREADS,
                       Shape::SHARED, f);
}

/* linear_gelu_bwd by `run(f)`, f.partial in scratch: sums of OWN rows, added to db in their
 * order. */
template <class Shape, class F, class Run>
nd_status with_column_sums(int device, const linear_gelu_bwd_args *a, F f, const Run &run) {
    const int64_t columns = a->dgelu->shape[1];
    const int64_t parts =
        Shape::ROWS / Shape::OWN * ceil_div<int64_t>(a->dgelu->shape[0], Shape::ROWS);
    void *partial;
    ND_TRY(cuda_scratch(device, (size_t)(parts * columns) * sizeof(float), &partial));
    f.partial = (float *)partial;
    ND_TRY(run(f));
    return cuda_add_columns("linear_gelu_bwd", device, f.partial, parts, columns,
                            data_of<float>(a->db));
}

} // namespace linear

#endif
