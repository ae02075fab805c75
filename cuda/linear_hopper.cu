/* linear_hopper.cu - linear_gelu_fwd and linear_gelu_bwd on Hopper.
 *
 *   forward   y = gelu(pre), dgelu = gelu'(pre), pre = x w + b   a is x, b is w: (depth, columns)
 *   backward  dpre = (dy w^T) dgelu, db += its column sums       a is dy, b is w: (columns, depth)
 *
 * Precision: 16-bit operands; pre and dy w^T stay in float32. The column sums (float32) are of the
 *   rounded dpre; sums of 64 rows go to scratch and are added in their order.
 * Parallel: linear_hopper.cuh, tiles of 128 x 256, 64 rows for each consumer, stages of 64 of the
 *   depth. Depths up to 512 are linear_shallow_hopper.cu's.
 * Bytes: the L2 cache bounds smaller tiles: 64 x 128 read 12 bytes for 1,000 FLOP, these half of
 *   it. Results go from registers to memory, 8 bytes a lane: neighbouring lanes exchange a word, so
 *   that four lanes hold 32 bytes of a row. dgelu is read the same way; it and the bias are asked
 *   for 64 columns ahead.
 */
#include "linear_hopper.cuh"

using namespace hopper;

/* Not in the namespace below, whose members must all be used. */
namespace linear {

template <bool BACKWARD_> struct LinearShape : TileShape {
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int ROWS = CONSUMERS * OWN, COLUMNS = 256, PANELS = COLUMNS / PANEL_COLUMNS;
    static constexpr int B_ROWS = BACKWARD ? COLUMNS : STEP;
    static constexpr int STAGES = 4, LOADS = 0;
    /* Registers a thread: at the launch, and a consumer's. */
    static constexpr int EACH = 65536 / THREADS / 8 * 8;
    static constexpr int TAKE = EACH + (EACH - KEEP) / CONSUMERS / 8 * 8;
    static constexpr uint32_t A_PART = ROWS * PANEL_ROW, B_PART = COLUMNS * PANEL_ROW; /* a step */
    static constexpr uint32_t B_AT = STAGES * A_PART;
    static constexpr uint32_t SUMS_AT = B_AT + STAGES * B_PART;
    static constexpr uint32_t SUMS = 4 * COLUMNS; /* of a warp, backward */
    static constexpr uint32_t BARRIERS_AT = SUMS_AT + CONSUMERS * WARPGROUP / 32 * SUMS;
    static constexpr size_t SHARED = BARRIERS_AT + 8 * 2 * STAGES;
};

} // namespace linear

using linear::LinearShape;

namespace {

struct Linear {
    CUtensorMap a, b;
    int rows, columns, steps; /* of c; of the depth */
    int row_tiles, column_tiles;
    bool tanh;
    const void *bias;  /* forward */
    void *dgelu, *out; /* rows x columns; backward: dgelu is read, out is dpre */
    int64_t out_row;   /* elements from a row of out to the next */
    float *partial;    /* backward: CONSUMERS row_tiles x columns */
};

#ifdef HOPPER_CODE

template <class Shape> struct Places : linear::Barriers<Shape> {
    __device__ __forceinline__ uint32_t a(int stage) const {
        return this->base + stage * Shape::A_PART;
    }
    __device__ __forceinline__ uint32_t b(int stage) const {
        return this->base + Shape::B_AT + stage * Shape::B_PART;
    }
    __device__ __forceinline__ uint32_t sums(int warp) const {
        return this->base + Shape::SUMS_AT + warp * Shape::SUMS;
    }
};

/* The first tile of a block. Shares differ by one tile at most. */
__device__ __forceinline__ int first_tile(const Linear &f, int block) {
    return (int)((int64_t)f.row_tiles * f.column_tiles * block / (int)gridDim.x);
}

/* ---- the producer ---------------------------------------------------------------------------- */
template <class Shape> __device__ __forceinline__ void produce(const Linear &f, Places<Shape> at) {
    Ring<Shape::STAGES> ring;
    const int end = first_tile(f, blockIdx.x + 1);
    for (int tile = first_tile(f, blockIdx.x); tile < end; tile++) {
        const int across = tile / f.row_tiles;
        const int row = (tile - across * f.row_tiles) * Shape::ROWS,
                  column = across * Shape::COLUMNS;
        for (int step = 0; step < f.steps; step++, ring.advance()) {
            const uint32_t full = at.full(ring.at), b = at.b(ring.at);
            const int deep = step * Shape::STEP;
            barrier_wait(at.empty(ring.at), ring.phase ^ 1);
            barrier_expect(full, Shape::A_PART + Shape::B_PART);
            box_load(at.a(ring.at), &f.a, full, deep, row, 0, 0);
            if (Shape::BACKWARD) {
                box_load(b, &f.b, full, deep, column, 0, 0);
            } else {
                for (int i = 0; i < Shape::PANELS; i++) {
                    box_load(b + i * (Shape::B_PART / Shape::PANELS), &f.b, full,
                             column + i * PANEL_COLUMNS, deep, 0, 0);
                }
            }
        }
    }
}

/* ---- a consumer ------------------------------------------------------------------------------ */
/* dgelu and y of a panel's sums: pairs of columns of two rows in turns. */
template <class T, bool TANH>
__device__ __forceinline__ void apply_gelu(const float *sums, const uint32_t (&bias)[8],
                                           uint32_t (&dgelu)[16], uint32_t (&y)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 b = unpack_pair<T>(bias[i / 2]);
        linear::gelu_pair<T, TANH>(&sums[2 * i], b.x, b.y, dgelu[i], y[i]);
    }
}

/* A warp's 16 rows x 64 columns of a matrix of the result's size, from (row, column). Words of
 * lanes lie as wgmma has them: word[2 n + h] is columns 8 n + 2 (lane % 4) + {0, 1} of row lane / 4
 * + 8 h. */
struct Fragment {
    const Linear &f;
    int row, column;

    /* In memory a lane has four columns of each 16 of a row: even lanes of the first eight, odd
     * lanes of the others. place() is its place in the first 16, has() whether the matrix has
     * it. */
    static __device__ __forceinline__ bool is_odd() { return threadIdx.x & 1; }
    __device__ __forceinline__ int first_column() const {
        return column + 8 * (threadIdx.x & 1) + 2 * (threadIdx.x & 2);
    }
    template <class T>
    __device__ __forceinline__ T *place(void *matrix, int64_t stride, int h) const {
        const int lane = threadIdx.x & 31;
        return (T *)matrix + (row + lane / 4 + 8 * h) * stride + first_column();
    }
    __device__ __forceinline__ bool has(int h, int p) const {
        const int lane = threadIdx.x & 31;
        return row + lane / 4 + 8 * h < f.rows && first_column() + 16 * p < f.columns;
    }

    template <class T> __device__ __forceinline__ void load(uint2 (&x)[2][4], void *matrix) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const T *from = place<T>(matrix, f.columns, h);
#pragma unroll
            for (int p = 0; p < 4; p++) {
                x[h][p] = make_uint2(0, 0);
                if (has(h, p)) {
                    x[h][p] = *reinterpret_cast<const uint2 *>(from + 16 * p);
                }
            }
        }
    }
    /* From what load() brought. */
    static __device__ __forceinline__ void exchange(uint32_t (&word)[16], const uint2 (&x)[2][4]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const uint2 y = x[h][p];
                const uint32_t got = __shfl_xor_sync(~0u, is_odd() ? y.x : y.y, 1);
                word[4 * p + h] = is_odd() ? got : y.x;
                word[4 * p + 2 + h] = is_odd() ? y.y : got;
            }
        }
    }
    template <class T>
    __device__ __forceinline__ void store(void *matrix, int64_t stride,
                                          const uint32_t (&word)[16]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            T *to = place<T>(matrix, stride, h);
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const uint32_t a = word[4 * p + h], b = word[4 * p + 2 + h];
                const uint32_t got = __shfl_xor_sync(~0u, is_odd() ? a : b, 1);
                if (has(h, p)) {
                    *reinterpret_cast<uint2 *>(to + 16 * p) =
                        make_uint2(is_odd() ? got : a, is_odd() ? b : got);
                }
            }
        }
    }
};

/* Makes results of a tile's sums; begin() requests the operands that it reads. */
template <class T, class Shape> struct Epilogue;

template <class T> struct Epilogue<T, LinearShape<false>> {
    using Shape = LinearShape<false>;
    uint32_t bias[8]; /* of the next fragment: columns 8 i + 2 (lane % 4) + {0, 1} */

    __device__ __forceinline__ void load(const Linear &f, int first_column) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int column = first_column + 8 * i + 2 * (threadIdx.x % 4);
            bias[i] = 0;
            if (column < f.columns) {
                bias[i] = *reinterpret_cast<const uint32_t *>((const T *)f.bias + column);
            }
        }
    }
    __device__ __forceinline__ void begin(const Linear &f, Fragment at) { load(f, at.column); }

    __device__ __forceinline__ void finish(const Linear &f, Fragment at, const float *c, uint32_t,
                                           int, int) {
#pragma unroll
        for (int panel = 0; panel < Shape::PANELS; panel++, at.column += PANEL_COLUMNS) {
            uint32_t dgelu[16], y[16];
            if (f.tanh) {
                apply_gelu<T, true>(c + 32 * panel, bias, dgelu, y);
            } else {
                apply_gelu<T, false>(c + 32 * panel, bias, dgelu, y);
            }
            if (panel + 1 < Shape::PANELS) {
                load(f, at.column + PANEL_COLUMNS);
            }
            at.store<T>(f.dgelu, f.columns, dgelu);
            at.store<T>(f.out, f.out_row, y);
        }
    }
};

template <class T> struct Epilogue<T, LinearShape<true>> {
    using Shape = LinearShape<true>;
    uint2 ahead[2][4]; /* dgelu of the next fragment */

    __device__ __forceinline__ void begin(const Linear &f, Fragment at) {
        at.load<T>(ahead, f.dgelu);
    }

    __device__ __forceinline__ void finish(const Linear &f, Fragment at, const float *c,
                                           uint32_t my_sums, int group, int row_tile) {
        const int lane = threadIdx.x & 31, tile_column = at.column;
        float column_sums[Shape::PANELS][2]; /* of columns 2 lane + {0, 1} of each panel */
#pragma unroll
        for (int panel = 0; panel < Shape::PANELS; panel++, at.column += PANEL_COLUMNS) {
            uint32_t word[16];
            Fragment::exchange(word, ahead);
            if (panel + 1 < Shape::PANELS) {
                Fragment{f, at.row, at.column + PANEL_COLUMNS}.load<T>(ahead, f.dgelu);
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                word[i] = linear::times_dgelu<T>(&c[32 * panel + 2 * i], word[i]);
            }
            at.store<T>(f.out, f.out_row, word);
            float sums[16]; /* of the thread's two rows */
#pragma unroll
            for (int i = 0; i < 16; i += 2) {
                const float2 upper = unpack_pair<T>(word[i]), lower = unpack_pair<T>(word[i + 1]);
                sums[i] = upper.x + lower.x;
                sums[i + 1] = upper.y + lower.y;
            }
            /* Over the eight lanes of a column; each keeps half of its sums, three times. */
#pragma unroll
            for (int halving = 0; halving < 3; halving++) {
                const int kept = 8 >> halving;
                const bool upper = lane & 2 * kept;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (i < kept) {
                        float mine = upper ? sums[i + kept] : sums[i];
                        float other = upper ? sums[i] : sums[i + kept];
                        sums[i] = mine + __shfl_xor_sync(~0u, other, 2 * kept);
                    }
                }
            }
            column_sums[panel][0] = sums[0];
            column_sums[panel][1] = sums[1];
        }
        /* Over the warps, through shared memory; the first wait: all have read the last tile's. */
        named_barrier_sync(1 + group, WARPGROUP);
#pragma unroll
        for (int i = 0; i < 2 * Shape::PANELS; i++) {
            store_shared4(my_sums + 4 * (PANEL_COLUMNS * (i / 2) + 2 * lane + i % 2),
                          __float_as_uint(column_sums[i / 2][i % 2]));
        }
        named_barrier_sync(1 + group, WARPGROUP);
        const int thread = threadIdx.x % WARPGROUP;
        const int64_t row = (int64_t)row_tile * Shape::CONSUMERS + group;
#pragma unroll
        for (int i = thread; i < Shape::COLUMNS; i += WARPGROUP) {
            const uint32_t first = my_sums - thread / 32 * Shape::SUMS + 4 * i;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPGROUP / 32; warp++) {
                sum += __uint_as_float(load_shared4(first + warp * Shape::SUMS));
            }
            if (tile_column + i < f.columns) {
                f.partial[row * f.columns + tile_column + i] = sum;
            }
        }
    }
};

template <class T, class Shape>
__device__ __forceinline__ void consume(const Linear &f, Places<Shape> at, int group) {
    const int warp = (int)(threadIdx.x % WARPGROUP) / 32;
    const bool leads = threadIdx.x % WARPGROUP == 0; /* for its warpgroup */
    const int end = first_tile(f, blockIdx.x + 1);
    Ring<Shape::STAGES> ring;
    for (int tile = first_tile(f, blockIdx.x); tile < end; tile++) {
        const int across = tile / f.row_tiles, down = tile - across * f.row_tiles;
        const Fragment fragment = {f, down * Shape::ROWS + group * Shape::OWN + 16 * warp,
                                   across * Shape::COLUMNS};
        Epilogue<T, Shape> results;
        results.begin(f, fragment);

        float c[32 * Shape::PANELS];
        int before = 0;
        for (int step = 0; step < f.steps; step++, ring.advance()) {
            const Operand a =
                rows_operand(at.a(ring.at) + group * (Shape::A_PART / Shape::CONSUMERS));
            const uint32_t b_at = at.b(ring.at);
            const Operand b = Shape::BACKWARD
                                  ? rows_operand(b_at)
                                  : columns_operand(b_at, Shape::B_PART / Shape::PANELS);
            barrier_wait(at.full(ring.at), ring.phase);
            products_begin();
#pragma unroll
            for (int k = 0; k < Shape::STEP / 16; k++) {
                product<T, !Shape::BACKWARD>(
                    c, further(a, 32 * k),
                    further(b, Shape::BACKWARD ? 32 * k : 16 * PANEL_ROW * k), step + k > 0);
            }
            products_end();
            products_wait<1>();
            if (leads && step > 0) {
                barrier_arrive(at.empty(before));
            }
            before = ring.at;
        }
        products_wait<0>();
        hold(c);
        if (leads) {
            barrier_arrive(at.empty(before));
        }
        results.finish(f, fragment, c, at.sums(4 * group + warp), group, down);
    }
}

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    linear_hopper_kernel(const __grid_constant__ Linear f) {
    await_previous();
#ifdef HOPPER_CODE
    const Places<Shape> at = {dynamic_shared()};
    linear::run_block<Shape>(
        at.base, [&]() { produce(f, at); }, [&](int group) { consume<T>(f, at, group); });
#endif
}

template <class Shape>
nd_status launch(const char *op, int device, Linear f, const nd_array *a, const nd_array *b) {
    f.steps = ceil_div((int)a->shape[1], Shape::STEP);
    return linear::launch<Shape>(op, device, linear_hopper_kernel<bf16, Shape>,
                                 linear_hopper_kernel<f16, Shape>, f, a, b);
}

} // namespace

nd_status linear_gelu_fwd_hopper(int device, const linear_gelu_fwd_args *a) {
    if (a->x->shape[1] <= linear::SHALLOW) {
        return linear_gelu_fwd_shallow(device, a);
    }
    Linear f = {};
    f.tanh = a->tanh != 0;
    f.bias = a->b->data;
    f.dgelu = a->dgelu->data;
    f.out = a->y->data;
    f.out_row = a->y->strides[0];
    return launch<LinearShape<false>>("linear_gelu_fwd", device, f, a->x, a->w);
}

nd_status linear_gelu_bwd_hopper(int device, const linear_gelu_bwd_args *a) {
    if (a->dy->shape[1] <= linear::SHALLOW) {
        return linear_gelu_bwd_shallow(device, a);
    }
    Linear f = {};
    f.dgelu = a->dgelu->data;
    f.out = a->dpre->data;
    f.out_row = a->dgelu->shape[1];
    return linear::with_column_sums<LinearShape<true>>(device, a, f, [&](const Linear &full) {
        return launch<LinearShape<true>>("linear_gelu_bwd", device, full, a->dy, a->w);
    });
}
