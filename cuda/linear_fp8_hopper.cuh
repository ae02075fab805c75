/* linear_fp8_hopper.cuh - products in FP8 whose epilogue writes FP8, on Hopper; for
 * cross_entropy_fp8.cu and linear_gelu_fp8.cu.
 *
 *   c = x w^T     x (N, C), w (V, C) of bytes; an epilogue makes bytes (N, V) and their transpose
 *
 * Parallel: linear_hopper.cuh. A block walks down the rows of its columns, whose part of w stays in
 *   shared memory. A tile of 64 rows x COLUMNS belongs to one consumer. The consumers take turns:
 *   while one multiplies, the other runs the epilogue of its tile.
 * Layout: the tensor maps reorder each 16 rows of x and of w in shared memory: row 2 t + h goes to
 *   place 8 h + t. So a thread holds rows 2 l and 2 l + 1 (l = lane / 4) of its warp's 16, and of
 *   each 16 columns those from 4 q to 4 q + 3 (q = lane % 4). That is a word of four bytes along a
 *   row; one byte permutation makes pairs along a column. stmatrix stores both.
 * Bytes: x from L2 once for each column of tiles; w once for each run of tiles of a block; the bytes
 *   and their transpose once.
 */
#ifndef NEEDLE_LINEAR_FP8_HOPPER_CUH
#define NEEDLE_LINEAR_FP8_HOPPER_CUH

#include "fp8.cuh"
#include "linear_hopper.cuh"

namespace linear {

constexpr int DEEPEST_FP8 = 1024; /* C */

/* Tiles of COLUMNS columns, for depths up to WEIGHTS / COLUMNS: 256 for 512, 128 for DEEPEST_FP8.
 * WRITES: the epilogue writes bytes; SUMS: and sums of columns. */
template <int COLUMNS_, bool WRITES, bool SUMS_ = false> struct BytesShape : TileShape {
    static constexpr bool SUMS = SUMS_;
    static constexpr int COLUMNS = COLUMNS_, ROWS = OWN, READERS = 1, TAKE = 240;
    static constexpr int STEP = 128;                            /* of the depth: a row of a panel */
    static constexpr uint32_t STAGE = ROWS * hopper::PANEL_ROW; /* a step of x */
    static constexpr uint32_t PART = COLUMNS * hopper::PANEL_ROW; /* a step of w */
    static constexpr uint32_t WEIGHTS = 128 << 10;                /* all steps of w */
    /* Bytes and their transpose take four stages of memory a buffer, for both consumers together;
     * sums take a part of one. */
    static constexpr int BUFFERS = !WRITES ? 0 : COLUMNS == 256 ? 2 : 1;
    static constexpr int STAGES = 12 - 4 * BUFFERS - SUMS, LOADS = 1;
    static constexpr int WRITTEN = 128;               /* columns that are written together */
    static constexpr uint32_t PANEL = WRITTEN * ROWS; /* their bytes */
    static constexpr uint32_t OF_WARP = 4 * WRITTEN;  /* sums */
    static constexpr uint32_t STAGES_AT = WEIGHTS;
    static constexpr uint32_t BUFFERS_AT = STAGES_AT + STAGES * STAGE;
    static constexpr uint32_t SUMS_AT = BUFFERS_AT + CONSUMERS * BUFFERS * 2 * PANEL;
    static constexpr uint32_t BARRIERS_AT = SUMS_AT + SUMS * CONSUMERS * 4 * OF_WARP;
    static constexpr size_t SHARED = BARRIERS_AT + 8 * 2 * (STAGES + LOADS);
};

struct BytesProduct {
    CUtensorMap x, w, q, q_t;    /* q, q_t: the bytes and their transpose */
    int rows, columns, steps;    /* N, V, of C */
    int row_tiles, column_tiles; /* of a shape */
};

#ifdef HOPPER_CODE

/* Calls work(column tile, first tile of rows, number of tiles) for each run of tiles of this block.
 * First whole columns: all blocks go down the rows side by side, so that they share x in L2 and
 * write neighbouring parts of q. Then an equal share of the columns that remain. */
template <class F> __device__ __forceinline__ void each_run(const BytesProduct &f, const F &work) {
    const int whole = f.column_tiles / (int)gridDim.x, before = whole * (int)gridDim.x;
    for (int i = 0; i < whole; i++) {
        work(i * (int)gridDim.x + (int)blockIdx.x, 0, f.row_tiles);
    }
    const int64_t tiles = (int64_t)f.row_tiles * (f.column_tiles - before);
    int64_t tile = tiles * blockIdx.x / gridDim.x;
    const int64_t end = tiles * (blockIdx.x + 1) / gridDim.x;
    while (tile < end) {
        const int across = (int)(tile / f.row_tiles), down = (int)(tile % f.row_tiles);
        const int count = (int)min(end - tile, (int64_t)(f.row_tiles - down));
        work(before + across, down, count);
        tile += count;
    }
}

template <class Shape>
__device__ __forceinline__ void produce_bytes(const BytesProduct &f, Barriers<Shape> at) {
    using namespace hopper;
    Ring<Shape::STAGES> ring;
    Ring<1> run;
    each_run(f, [&](int across, int down, int count) {
        barrier_wait(at.left(0), run.phase ^ 1);
        barrier_expect(at.came(0), f.steps * Shape::PART);
        for (int step = 0; step < f.steps; step++) {
            box_load(at.base + step * Shape::PART, &f.w, at.came(0), step * Shape::STEP, 0, 0,
                     across * (Shape::COLUMNS / 16));
        }
        run.advance();
        for (int tile = down; tile < down + count; tile++) {
            for (int step = 0; step < f.steps; step++, ring.advance()) {
                barrier_wait(at.empty(ring.at), ring.phase ^ 1);
                barrier_expect(at.full(ring.at), Shape::STAGE);
                box_load(at.base + Shape::STAGES_AT + ring.at * Shape::STAGE, &f.x,
                         at.full(ring.at), step * Shape::STEP, 0, 0, tile * (Shape::ROWS / 16));
            }
        }
    });
}

/* The first of a thread's two rows. */
__device__ __forceinline__ int first_row(int tile) {
    const int warp = (int)(threadIdx.x % hopper::WARPGROUP) / 32, lane = threadIdx.x & 31;
    return tile * TileShape::OWN + 16 * warp + lane / 4 * 2;
}
/* The index in c of a thread's row h, column 16 m + 4 q + k. */
__device__ __forceinline__ constexpr int index_of(int m, int h, int k) {
    return 8 * m + 4 * (k & 1) + 2 * h + k / 2;
}

/* Calls, of each of a consumer's tiles, epilogue.begin(column tile, row tile) and, with c = x w^T,
 * epilogue.finish(c, column tile, row tile). X_E5M2: x is in e5m2. */
template <class Shape, bool X_E5M2, class Epilogue>
__device__ __forceinline__ void consume_bytes(const BytesProduct &f, Barriers<Shape> at, int group,
                                              Epilogue &epilogue) {
    using namespace hopper;
    const bool leads = threadIdx.x % WARPGROUP == 0;
    const int my_turn = 1 + group, other_turn = 2 - group;
    Ring<Shape::STAGES> ring;
    Ring<1> run;
    int next = 0; /* the consumer of the tile */
    if (group == 1) {
        named_barrier_arrive(other_turn, 2 * WARPGROUP);
    }
    each_run(f, [&](int across, int down, int count) {
        barrier_wait(at.came(0), run.phase);
        run.advance();
        for (int tile = down; tile < down + count; tile++, next ^= 1) {
            if (next != group) {
                for (int step = 0; step < f.steps; step++) {
                    ring.advance();
                }
                continue;
            }
            epilogue.begin(across, tile);
            float c[Shape::COLUMNS / 2];
            int before = 0;
            named_barrier_sync(my_turn, 2 * WARPGROUP);
            for (int step = 0; step < f.steps; step++, ring.advance()) {
                barrier_wait(at.full(ring.at), ring.phase);
                const Operand x = rows_operand(at.base + Shape::STAGES_AT + ring.at * Shape::STAGE);
                const Operand w = rows_operand(at.base + step * Shape::PART);
                products_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    product_fp8<X_E5M2>(c, further(x, 32 * k), further(w, 32 * k), step + k > 0);
                }
                products_end();
                if (step == f.steps - 1) {
                    named_barrier_arrive(other_turn, 2 * WARPGROUP);
                }
                if (step > 0) {
                    products_wait<1>();
                    if (leads) {
                        barrier_arrive(at.empty(before));
                    }
                }
                before = ring.at;
            }
            products_wait<0>();
            hold(c);
            if (leads) {
                barrier_arrive(at.empty(before));
            }
            epilogue.finish(c, across, tile);
        }
        if (leads) {
            barrier_arrive(at.left(0));
        }
    });
    if (leads) {
        box_stores_read();
    }
}

/* Writes a consumer's bytes and their transpose: begin(), put() WRITTEN columns, end(). All its
 * threads call each at the same place, but for put(). */
template <class Shape> struct BytesWriter {
    const BytesProduct &f;
    const Barriers<Shape> at;
    const int group;
    int buffer = 0;

    __device__ __forceinline__ bool leads() const { return threadIdx.x % hopper::WARPGROUP == 0; }
    /* Among the consumer's threads. */
    __device__ __forceinline__ void sync() const {
        hopper::named_barrier_sync(3 + group, hopper::WARPGROUP);
    }
    /* The bytes in shared memory; PANEL after them, their transpose. */
    __device__ __forceinline__ uint32_t place() const {
        return at.base + Shape::BUFFERS_AT + (Shape::BUFFERS * group + buffer) * 2 * Shape::PANEL;
    }
    __device__ __forceinline__ void begin() const {
        if (Shape::BUFFERS == 1) {
            if (leads()) {
                hopper::box_stores_read();
            }
            sync();
        }
    }
    /* values(m, v): the thread's four numbers of each row in the 16 columns from 16 m on. */
    template <bool E5M2, class F> __device__ __forceinline__ void put(const F &values) const {
        using namespace hopper;
        const int warp = (int)(threadIdx.x % WARPGROUP) / 32, lane = threadIdx.x & 31;
        const int matrix = lane / 8, of_matrix = lane % 8;
        const uint32_t q = place(), q_t = q + Shape::PANEL;
#pragma unroll
        for (int m = 0; m < Shape::WRITTEN / 16; m += 2) {
            uint32_t rows[4], columns[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v[2][4];
                values(m + i, v);
                rows[2 * i] = packed<E5M2>(v[0]);
                rows[2 * i + 1] = packed<E5M2>(v[1]);
                columns[2 * i] = __byte_perm(rows[2 * i], rows[2 * i + 1], 0x5140);
                columns[2 * i + 1] = __byte_perm(rows[2 * i], rows[2 * i + 1], 0x7362);
            }
            const int row = 16 * warp + 2 * of_matrix + (matrix & 1);
            store_matrices(q + panel_offset(row, m + matrix / 2), rows);
            const int column =
                16 * (m + matrix / 2) + of_matrix / 2 * 4 + (matrix & 1) * 2 + (of_matrix & 1);
            store_matrices_transposed(q_t + 64 * column + ((warp ^ (column / 2 & 3)) << 4),
                                      columns);
        }
    }
    /* Writes them to the columns from `column` on of the tile. */
    __device__ __forceinline__ void end(int column, int tile) {
        hopper::proxy_fence();
        if (leads() && Shape::BUFFERS == 2) {
            hopper::box_stores_read(); /* so that the next half may be written there */
        }
        sync();
        if (leads()) {
            hopper::box_store(&f.q, place(), column, tile * Shape::ROWS, 0, 0);
            hopper::box_store(&f.q_t, place() + Shape::PANEL, tile * Shape::ROWS, column, 0, 0);
        }
        buffer ^= Shape::BUFFERS - 1;
    }
};

#endif

/* ---- host ------------------------------------------------------------------------------------ */
/* A matrix of bytes in boxes of `rows` rows and 128 columns, each 16 rows in the order above. */
static inline nd_status bytes_map(const char *op, const nd_array *a, int rows, CUtensorMap *out) {
    const int64_t width = a->shape[1];
    const int64_t shape[4] = {width, 8, 2, a->shape[0] / 16};
    const int64_t strides[3] = {2 * width, width, 16 * width};
    const int box[4] = {128, 8, 2, rows / 16};
    return hopper::byte_map(op, a->data, shape, strides, box, 128, out);
}

static inline nd_status result_map(const char *op, const nd_array *a, int columns, int rows,
                                   CUtensorMap *out) {
    const int64_t shape[4] = {a->shape[1], a->shape[0], 1, 1};
    const int64_t strides[3] = {a->shape[1], 0, 0};
    const int box[4] = {columns, rows, 1, 1};
    return hopper::byte_map(op, a->data, shape, strides, box, columns, out);
}

/* f of these operands, for tiles of COLUMNS columns. */
template <int COLUMNS>
nd_status bytes_product(const char *op, const nd_array *x, const nd_array *w, const nd_array *q,
                        const nd_array *q_t, BytesProduct *f) {
    using Shape = BytesShape<COLUMNS, true>;
    f->rows = (int)x->shape[0];
    f->columns = (int)w->shape[0];
    f->steps = ceil_div((int)x->shape[1], Shape::STEP);
    f->row_tiles = ceil_div(f->rows, Shape::ROWS);
    f->column_tiles = ceil_div(f->columns, COLUMNS);
    ND_TRY(bytes_map(op, x, Shape::ROWS, &f->x));
    ND_TRY(bytes_map(op, w, COLUMNS, &f->w));
    ND_TRY(result_map(op, q, Shape::WRITTEN, Shape::ROWS, &f->q));
    return result_map(op, q_t, Shape::ROWS, Shape::WRITTEN, &f->q_t);
}

/* ND_OK if these kernels run here and take x (rows, depth), called `name`, and w (columns, depth). */
static inline nd_status check_bytes_product(const char *op, int device, const char *name,
                                            const nd_array *x, const nd_array *w) {
    const int64_t rows = x->shape[0], depth = x->shape[1], columns = w->shape[0];
    if (!hopper::hopper_usable(device)) {
        return nd_error(ND_ECUDA,
                        "%s: it needs a GPU of compute capability 9.0, kernels built for sm_90a, "
                        "and no NEEDLE_ARCH below 90",
                        op);
    }
    if (rows % 16 || depth % 16 || columns % 16 || !depth || !columns || depth > DEEPEST_FP8 ||
        rows >= 1 << 30 || columns >= 1 << 30) {
        return nd_error(ND_EVALUE,
                        "%s: %s (%lld, %lld), w (%lld, %lld): sizes must be multiples of 16, below "
                        "2^30, the depth 16 to 1,024",
                        op, name, (long long)rows, (long long)depth, (long long)columns,
                        (long long)depth);
    }
    return ND_OK;
}

} // namespace linear

#endif
