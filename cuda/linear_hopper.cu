/* linear_hopper.cu - linear_gelu_fwd and linear_gelu_bwd on Hopper: one product c = a b of 16-bit operands,
 * added up in float32, with two ends.
 *
 *   forward   pre = x w + b, y = gelu(pre)                    a is x, b is w as it lies: (depth, columns)
 *   backward  dpre = (dy w^T) gelu'(pre), db += its columns   a is dy, b is w^T: (columns, depth) in memory
 *
 * gelu reads the rounded pre, gelu' multiplies the rounded product, and the column sums (float32) are of the
 * rounded dpre: results are those of the separate ops but for the order of the product's sums. Sums of 128
 * rows go to scratch and are added in their order.
 *
 * Parallel: tiles of 128 x 128. A thread block has one column of tiles, or a few, and walks down its rows; the
 *   blocks of all columns walk together, so that a's rows are read from memory once. Two consumers take
 *   turns, a whole tile each: while one multiplies, the other rounds, applies gelu and writes. A producer
 *   thread asks for a's and b's parts of 64 of the depth, in the order of the tiles.
 * Up to a depth of 512 b's 128 columns stay in shared memory while a block is in them: a tile of 128 x 128
 *   reads 64 bytes a clock at the tensor cores' speed when both operands come anew, more than the L2 gives
 *   all multiprocessors, and half of it so.
 * Results leave a consumer's warp by 16 rows x 64 columns: turned in its own 2 KB of shared memory, then
 *   written in whole lines. pre is read the same way, a piece ahead.
 * Time: 4096 clocks a tile of depth 512 for the products; for the end of a tile 128 elements a thread, so 32
 *   instructions an element.
 */
#include "linear_hopper.cuh"
#include "mma.cuh"
#include "stages.cuh"

using namespace hopper;

/* Not in the namespace below, whose members must all be used. */
namespace linear {

template <bool BACKWARD_, bool RESIDENT_, int STAGES_> struct LinearShape {
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr bool RESIDENT = RESIDENT_; /* b's columns stay: depths up to DEPTH */
    static constexpr int STAGES = STAGES_;      /* of a; of b too, where it does not stay */
    static constexpr int SIDE = 128, STEP = PANEL_COLUMNS, DEPTH = 512;
    static constexpr int CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS);
    /* Registers a thread, of the 168 at the launch: a producer's and a consumer's. */
    static constexpr int KEEP = 24, TAKE = 240;
    static constexpr uint32_t PART = SIDE * PANEL_ROW; /* a step of a or b */
    static constexpr uint32_t B_AT = STAGES * PART;
    static constexpr uint32_t STAGING_AT = B_AT + (RESIDENT ? DEPTH / STEP : STAGES) * PART;
    static constexpr uint32_t STAGING = 16 * PANEL_ROW; /* of a warp */
    static constexpr uint32_t BARRIERS_AT = STAGING_AT + CONSUMERS * WARPGROUP / 32 * STAGING;
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
    const void *bias; /* forward */
    void *pre, *out;  /* rows x columns; backward: pre is read, out is dpre */
    float *partial;   /* backward: row_tiles x columns */
};

#ifdef HOPPER_CODE

template <class Shape> struct Places {
    uint32_t base;

    __device__ __forceinline__ uint32_t a(int stage) const { return base + stage * Shape::PART; }
    /* Of a step whose part of a is in this stage. */
    __device__ __forceinline__ uint32_t b(int step, int stage) const {
        return base + Shape::B_AT + (Shape::RESIDENT ? step : stage) * Shape::PART;
    }
    __device__ __forceinline__ uint32_t staging(int warp) const {
        return base + Shape::STAGING_AT + warp * Shape::STAGING;
    }
    __device__ __forceinline__ uint32_t full(int stage) const {
        return base + Shape::BARRIERS_AT + 8 * stage;
    }
    __device__ __forceinline__ uint32_t empty(int stage) const {
        return full(Shape::STAGES + stage);
    }
};

/* Blocks share the tiles, column by column, in pieces that differ by one at most. */
__device__ __forceinline__ int first_tile(const Linear &f, int block) {
    return (int)((int64_t)f.row_tiles * f.column_tiles * block / (int)gridDim.x);
}

/* ---- the producer -------------------------------------------------------------------------------- */
template <class Shape> __device__ __forceinline__ void produce(const Linear &f, Places<Shape> at) {
    Ring<Shape::STAGES> ring;
    const int end = first_tile(f, blockIdx.x + 1);
    int stays = -1; /* the column of tiles whose b is there */
    for (int tile = first_tile(f, blockIdx.x); tile < end; tile++) {
        const int across = tile / f.row_tiles;
        const int row = (tile - across * f.row_tiles) * Shape::SIDE, column = across * Shape::SIDE;
        const bool fresh = !Shape::RESIDENT || across != stays;
        if (Shape::RESIDENT && fresh) { /* nobody multiplies by the last one any more */
            Ring<Shape::STAGES> each = ring;
            for (int stage = 0; stage < Shape::STAGES; stage++, each.advance()) {
                barrier_wait(at.empty(each.at), each.phase ^ 1);
            }
            stays = across;
        }
        for (int step = 0; step < f.steps; step++, ring.advance()) {
            const uint32_t full = at.full(ring.at), b = at.b(step, ring.at);
            const int deep = step * Shape::STEP;
            barrier_wait(at.empty(ring.at), ring.phase ^ 1);
            barrier_expect(full, fresh ? 2 * Shape::PART : Shape::PART);
            box_load(at.a(ring.at), &f.a, full, deep, row, 0, 0);
            if (fresh && Shape::BACKWARD) {
                box_load(b, &f.b, full, deep, column, 0, 0);
            } else if (fresh) {
                box_load(b, &f.b, full, column, deep, 0, 0);
                box_load(b + Shape::PART / 2, &f.b, full, column + PANEL_COLUMNS, deep, 0, 0);
            }
        }
    }
}

/* ---- a consumer ---------------------------------------------------------------------------------- */
template <class T> __device__ __forceinline__ float2 unpack_pair(uint32_t x);
template <> __device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
}
template <> __device__ __forceinline__ float2 unpack_pair<f16>(uint32_t x) {
    return make_float2(__half2float(__ushort_as_half((unsigned short)x)),
                       __half2float(__ushort_as_half((unsigned short)(x >> 16))));
}

/* word[i] = f(i, the pair in word[i]) */
template <class T, class F>
__device__ __forceinline__ void each_pair(uint32_t (&word)[16], const F &f) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 y = f(i, unpack_pair<T>(word[i]));
        word[i] = pack_pair<T>(y.x, y.y);
    }
}

/* A warp's 16 rows x 64 columns of a matrix of rows x columns, from (row, column); and the words of its lanes
 * as wgmma has them: word[2 n + h] is columns 8 n + 2 (lane % 4) + {0, 1} of row lane / 4 + 8 h. */
struct Piece {
    uint32_t staging; /* 2 KB, the warp's */
    int rows, columns, row, column;

    /* Of the matrices 2 n + h, h = 0, 1 of n and n + 1: the row that this lane has the address of. */
    __device__ __forceinline__ uint32_t matrix_row(int n) const {
        const int lane = threadIdx.x & 31;
        return staging + panel_offset(lane % 16, n + lane / 16);
    }
    /* In memory, as parts i = 0 .. 3 of four rows, 16 bytes a lane: the first one's, whether the matrix has
     * them, how many elements on they are. */
    template <class T> __device__ __forceinline__ T *first_part(void *matrix) const {
        const int lane = threadIdx.x & 31;
        return (T *)matrix + ((int64_t)(row + lane / 8) * columns + column + lane % 8 * 8);
    }
    __device__ __forceinline__ bool has_part(int i) const {
        const int lane = threadIdx.x & 31;
        return row + 4 * i + lane / 8 < rows && column + lane % 8 * 8 < columns;
    }
    __device__ __forceinline__ int64_t part_at(int i) const { return (int64_t)columns * (4 * i); }
    __device__ __forceinline__ uint32_t staged_part(int i) const {
        const int lane = threadIdx.x & 31;
        return staging + panel_offset(4 * i + lane / 8, lane % 8);
    }

    template <class T>
    __device__ __forceinline__ void load(uint32_t (&x)[4][4], void *matrix) const {
        const T *from = first_part<T>(matrix);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 bits = make_uint4(0, 0, 0, 0);
            if (has_part(i)) {
                bits = *reinterpret_cast<const uint4 *>(from + part_at(i));
            }
            x[i][0] = bits.x, x[i][1] = bits.y, x[i][2] = bits.z, x[i][3] = bits.w;
        }
    }
    /* From what load() brought. */
    __device__ __forceinline__ void turn(uint32_t (&word)[16], const uint32_t (&x)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            store_shared16(staged_part(i), x[i]);
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t four[4];
            load_matrices(four, matrix_row(n));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                word[2 * n + i] = four[i];
            }
        }
        __syncwarp();
    }
    template <class T>
    __device__ __forceinline__ void store(void *matrix, const uint32_t (&word)[16]) const {
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const uint32_t four[4] = {word[2 * n], word[2 * n + 1], word[2 * n + 2],
                                      word[2 * n + 3]};
            store_matrices(matrix_row(n), four);
        }
        __syncwarp();
        T *to = first_part<T>(matrix);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t x[4];
            load_shared16(x, staged_part(i));
            if (has_part(i)) {
                __stwb(reinterpret_cast<uint4 *>(to + part_at(i)),
                       make_uint4(x[0], x[1], x[2], x[3]));
            }
        }
        __syncwarp();
    }
};

/* The sums c[m] of rows 64 m .. of a tile become results; begin() asks for what is read, early enough. */
template <class T, class Shape> struct End;

template <class T, int STAGES, bool RESIDENT> struct End<T, LinearShape<false, RESIDENT, STAGES>> {
    uint32_t bias[2][8]; /* pairs of the thread's columns */

    __device__ __forceinline__ void begin(const Linear &f, Piece at) {
        const int mine = at.column + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int column = mine + 8 * i;
            bias[i / 8][i % 8] =
                column < f.columns ? *reinterpret_cast<const uint32_t *>((const T *)f.bias + column)
                                   : 0;
        }
    }

    __device__ __forceinline__ void finish(const Linear &f, Piece at, const float (&c)[2][64], int,
                                           int) {
        const int row = at.row, column = at.column;
#pragma unroll
        for (int unit = 0; unit < 4; unit++) {
            const int panel = unit / 2, m = unit % 2;
            at.row = row + 64 * m;
            at.column = column + PANEL_COLUMNS * panel;
            uint32_t word[16];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float *sum = &c[m][32 * panel + 2 * i];
                const float2 b = unpack_pair<T>(bias[panel][i / 2]);
                word[i] = pack_pair<T>(sum[0] + b.x, sum[1] + b.y);
            }
            at.store<T>(f.pre, word);
            if (f.tanh) {
                each_pair<T>(word, [&](int, float2 x) {
                    return make_float2(nd_gelu_tanh(x.x), nd_gelu_tanh(x.y));
                });
            } else {
                each_pair<T>(
                    word, [&](int, float2 x) { return make_float2(nd_gelu(x.x), nd_gelu(x.y)); });
            }
            at.store<T>(f.out, word);
        }
    }
};

template <class T, int STAGES, bool RESIDENT> struct End<T, LinearShape<true, RESIDENT, STAGES>> {
    uint32_t ahead[4][4]; /* pre of the next piece */

    static __device__ __forceinline__ Piece piece(Piece at, int unit) {
        at.row += 64 * (unit % 2);
        at.column += PANEL_COLUMNS * (unit / 2);
        return at;
    }

    __device__ __forceinline__ void begin(const Linear &f, Piece at) { at.load<T>(ahead, f.pre); }

    __device__ __forceinline__ void finish(const Linear &f, Piece at, const float (&c)[2][64],
                                           int group, int row_tile) {
        const int lane = threadIdx.x & 31;
        float column_sums[2][2]; /* of columns 2 lane + {0, 1} of each panel */
#pragma unroll
        for (int panel = 0; panel < 2; panel++) {
            float sums[16];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                sums[i] = 0.0f;
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int unit = 2 * panel + m;
                uint32_t word[16];
                piece(at, unit).turn(word, ahead);
                if (unit < 3) {
                    piece(at, unit + 1).load<T>(ahead, f.pre);
                }
                auto product = [&](int i) {
                    const float *sum = &c[m][32 * panel + 2 * i];
                    return unpack_pair<T>(pack_pair<T>(sum[0], sum[1]));
                };
                if (f.tanh) {
                    each_pair<T>(word, [&](int i, float2 x) {
                        const float2 g = product(i);
                        return make_float2(nd_gelu_tanh_grad(x.x) * g.x,
                                           nd_gelu_tanh_grad(x.y) * g.y);
                    });
                } else {
                    each_pair<T>(word, [&](int i, float2 x) {
                        const float2 g = product(i);
                        return make_float2(nd_gelu_grad(x.x) * g.x, nd_gelu_grad(x.y) * g.y);
                    });
                }
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const float2 d = unpack_pair<T>(word[i]);
                    sums[i / 2 * 2] += d.x;
                    sums[i / 2 * 2 + 1] += d.y;
                }
                piece(at, unit).store<T>(f.out, word);
            }
            /* Over the eight lanes of a column; each keeps half of what it has, three times. */
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
        /* Over the warps, through the staging, which is not written again before a turn is waited for. */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            store_shared4(at.staging + 4 * (PANEL_COLUMNS * (i / 2) + 2 * lane + i % 2),
                          __float_as_uint(column_sums[i / 2][i % 2]));
        }
        turn_wait(3 + group, WARPGROUP);
        const int thread = threadIdx.x % WARPGROUP, column = at.column + thread;
        const uint32_t first = at.staging - thread / 32 * Shape::STAGING + 4 * thread;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPGROUP / 32; warp++) {
            sum += __uint_as_float(load_shared4(first + warp * Shape::STAGING));
        }
        if (column < f.columns) {
            f.partial[(int64_t)row_tile * f.columns + column] = sum;
        }
    }

  private:
    using Shape = LinearShape<true, RESIDENT, STAGES>;
};

template <class T, class Shape>
__device__ __forceinline__ void consume(const Linear &f, Places<Shape> at, int group) {
    const int warp = (int)(threadIdx.x % WARPGROUP) / 32;
    const bool speaks = threadIdx.x % WARPGROUP == 0; /* for its warpgroup */
    const int my_turn = 1 + group, next_turn = 2 - group;
    const int end = first_tile(f, blockIdx.x + 1);
    Ring<Shape::STAGES> ring;
    if (group == 1) {
        turn_pass(next_turn, 2 * WARPGROUP);
        ring.skip(f.steps);
    }
    for (int tile = first_tile(f, blockIdx.x) + group; tile < end; tile += Shape::CONSUMERS) {
        const int across = tile / f.row_tiles, down = tile - across * f.row_tiles;
        const Piece piece = {at.staging(4 * group + warp), f.rows, f.columns,
                             down * Shape::SIDE + 16 * warp, across * Shape::SIDE};
        End<T, Shape> results;
        results.begin(f, piece);

        float c[2][64];
        int before = 0;
        turn_wait(my_turn, 2 * WARPGROUP);
        for (int step = 0; step < f.steps; step++, ring.advance()) {
            const Operand a = rows_operand(at.a(ring.at));
            const uint32_t b_at = at.b(step, ring.at);
            const Operand b =
                Shape::BACKWARD ? rows_operand(b_at) : columns_operand(b_at, Shape::PART / 2);
            barrier_wait(at.full(ring.at), ring.phase);
            products_begin();
#pragma unroll
            for (int k = 0; k < Shape::STEP / 16; k++) {
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    product<T, !Shape::BACKWARD>(
                        c[m], further(a, m * Shape::PART / 2 + 32 * k),
                        further(b, Shape::BACKWARD ? 32 * k : 16 * PANEL_ROW * k), step + k > 0);
                }
            }
            products_end();
            products_wait<1>();
            if (speaks && step > 0) {
                barrier_arrive(at.empty(before));
            }
            before = ring.at;
        }
        turn_pass(next_turn, 2 * WARPGROUP);
        products_wait<0>();
        hold(c[0]);
        hold(c[1]);
        if (speaks) {
            barrier_arrive(at.empty(before));
        }
        ring.skip(f.steps); /* the other's tile */

        results.finish(f, piece, c, group, down);
    }
}

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    linear_hopper_kernel(const __grid_constant__ Linear f) {
#ifdef HOPPER_CODE
    const Places<Shape> at = {dynamic_shared()};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Shape::STAGES; stage++) {
            barrier_init(at.full(stage), 1);
            barrier_init(at.empty(stage), 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0);
    if (group == 0) {
        registers_down_to<Shape::KEEP>();
        if (threadIdx.x == 0) {
            produce(f, at);
        }
    } else {
        registers_up_to<Shape::TAKE>();
        consume<T>(f, at, group - 1);
    }
#endif
}

/* ---- host ---------------------------------------------------------------------------------------- */
/* Of a matrix of 16 bits as it lies, in boxes of `rows` rows and 64 columns. */
nd_status map_of(const char *op, const nd_array *a, int rows, CUtensorMap *out) {
    const int64_t shape[4] = {a->shape[1], a->shape[0], 1, 1};
    const int64_t strides[3] = {2 * a->shape[1], 0, 0};
    return tensor_map(op, a->data, 2, shape, strides, PANEL_COLUMNS, rows, out);
}

template <class Shape>
nd_status launch(const char *op, int device, Linear f, const nd_array *a, const nd_array *b) {
    f.rows = (int)a->shape[0];
    f.columns = (int)b->shape[Shape::BACKWARD ? 0 : 1];
    f.steps = ceil_div((int)a->shape[1], Shape::STEP);
    f.row_tiles = ceil_div(f.rows, Shape::SIDE);
    f.column_tiles = ceil_div(f.columns, Shape::SIDE);
    ND_TRY(map_of(op, a, Shape::SIDE, &f.a));
    ND_TRY(map_of(op, b, Shape::BACKWARD ? Shape::SIDE : Shape::STEP, &f.b));
    /* As many blocks as run at once; a multiple of the columns of tiles, so that none has parts of two, where
     * that makes no block's share longer. */
    const int64_t tiles = (int64_t)f.row_tiles * f.column_tiles;
    int64_t blocks = cuda_device_limits(device)->processors;
    const int64_t even = blocks / f.column_tiles * f.column_tiles;
    if (tiles < blocks) {
        blocks = tiles;
    } else if (even > 0 && ceil_div(tiles, even) == ceil_div(tiles, blocks)) {
        blocks = even;
    }
    auto kernel =
        a->dtype == ND_BF16 ? linear_hopper_kernel<bf16, Shape> : linear_hopper_kernel<f16, Shape>;
    return cuda_launch(op, device, kernel, f, (unsigned)blocks, Shape::THREADS, Shape::SHARED);
}

template <bool BACKWARD>
nd_status multiply(const char *op, int device, const Linear &f, const nd_array *a,
                   const nd_array *b) {
    using Resident = LinearShape<BACKWARD, true, 5>;
    using Streaming = LinearShape<BACKWARD, false, 6>;
    return a->shape[1] <= Resident::DEPTH ? launch<Resident>(op, device, f, a, b)
                                          : launch<Streaming>(op, device, f, a, b);
}

} // namespace

nd_status linear_gelu_fwd_hopper(int device, const linear_gelu_fwd_args *a) {
    Linear f = {};
    f.tanh = a->tanh != 0;
    f.bias = a->b->data;
    f.pre = a->pre->data;
    f.out = a->y->data;
    return multiply<false>("linear_gelu_fwd", device, f, a->x, a->w);
}

nd_status linear_gelu_bwd_hopper(int device, const linear_gelu_bwd_args *a) {
    const char *op = "linear_gelu_bwd";
    const int64_t columns = a->pre->shape[1];
    const int64_t pieces = ceil_div<int64_t>(a->pre->shape[0], LinearShape<true, true, 1>::SIDE);
    void *partial;
    ND_TRY(cuda_scratch(device, (size_t)(pieces * columns) * sizeof(float), &partial));
    Linear f = {};
    f.tanh = a->tanh != 0;
    f.pre = a->pre->data;
    f.out = a->dpre->data;
    f.partial = (float *)partial;
    ND_TRY(multiply<true>(op, device, f, a->dy, a->w));
    return cuda_add_columns(op, device, f.partial, pieces, columns, data_of<float>(a->db));
}
