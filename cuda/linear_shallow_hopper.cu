/* linear_shallow_hopper.cu - products of depths up to 512: linear_hopper.cu's two ops, and
 *
 *   rotary   y = rotary(x w + b)     a is x, b is w: (depth, columns)
 *
 * Precision: linear_hopper.cu's; rotary rotates float32 before rounding.
 * Parallel: linear_hopper.cuh, tiles of 128 x 128, 64 columns for each consumer. The transposed
 *   result is computed, c^T = b^T a^T: b^T stays in registers for a column of tiles (64 columns x
 *   512 of depth, 128 registers a thread). The consumers take turns: one multiplies, one finishes.
 * Bytes: products read 64 bytes a clock of shared memory, half of its rate. Results leave, and
 *   dgelu comes, by the copy engine, 64 rows at a time; stmatrix and ldmatrix transpose them.
 *   Angles come with a tile's rows; a thread's columns i and i + 8 are a pair of rotary (R is 8).
 * Time: 32,768 x 512 x 2048 take 91 us without the epilogues, 178 and 134 with them (forward with
 *   GELU, backward), on an H200 under load. Sums pass through the register file's ports, which
 *   slows the other consumer's arithmetic: each instruction of an epilogue counts (gelu.cuh).
 */
#include "linear_hopper.cuh"

using namespace hopper;

/* Not in the namespace below, whose members must all be used. */
namespace linear {

enum class Kind { gelu, gelu_backward, rotary };

template <Kind KIND> struct ShallowShape : TileShape {
    static constexpr bool BACKWARD = KIND == Kind::gelu_backward;
    static constexpr int ROWS = 128, COLUMNS = 128, B_ROWS = 64, STEPS = SHALLOW / STEP;
    static constexpr int HALF = OWN;   /* rows that are written together */
    static constexpr int AT_ONCE = 32; /* rows that are worked on together */
    static constexpr int TAKE = 240;
    static constexpr uint32_t PANEL = 64 * PANEL_ROW;
    /* A stage is a step of a, or of b's 64 columns of each consumer. */
    static constexpr int STAGES = 10;
    static constexpr uint32_t STAGE = 2 * PANEL;
    /* Of a consumer: dgelu and y of two halves; y of two; or of four dgelu, replaced by dpre. */
    static constexpr int BUFFERS = BACKWARD ? 4 : 2, PANELS = KIND == Kind::gelu ? 2 : 1;
    static constexpr uint32_t BUFFERS_AT = STAGES * STAGE;
    /* Of both consumers: cos and sin of a tile's rows. */
    static constexpr int TABLES = KIND == Kind::rotary ? 4 : 0;
    static constexpr uint32_t TABLES_AT = BUFFERS_AT + CONSUMERS * BUFFERS * PANELS * PANEL;
    static constexpr uint32_t ANGLES = 4 * SHALLOW_ANGLES, HALF_TABLE = ROWS * ANGLES; /* bytes */
    static constexpr uint32_t BARRIERS_AT = TABLES_AT + TABLES * 2 * HALF_TABLE;
    /* Loaded beside a and b, and handed back: dgelu, or a table. */
    static constexpr int LOADS = BACKWARD ? BUFFERS : TABLES;
    static constexpr size_t SHARED = BARRIERS_AT + 8 * 2 * (STAGES + LOADS);
};

} // namespace linear

using linear::Kind;
using linear::ShallowShape;

namespace {

struct Shallow {
    CUtensorMap a, b, dgelu, out;
    int rows, columns; /* of c */
    int row_tiles, column_tiles;
    const void *bias; /* forward; rotary: or NULL */
    bool tanh;        /* forward */
    float *partial;   /* backward: 2 row_tiles x columns */
    /* Rotary: angles of `times` positions. A head has `slices` of `head` dims; the first `parts` of
     * them are rotated. */
    const float *cosines, *sines;
    int times, head, slices, parts;
};

#ifdef HOPPER_CODE

template <class Shape> struct ShallowPlaces : linear::Barriers<Shape> {
    __device__ __forceinline__ uint32_t stage(int i) const { return this->base + i * Shape::STAGE; }
    __device__ __forceinline__ uint32_t buffer(int consumer, int i) const {
        return this->base + Shape::BUFFERS_AT +
               (consumer * Shape::BUFFERS + i) * Shape::PANELS * Shape::PANEL;
    }
    __device__ __forceinline__ uint32_t table(int i) const {
        return this->base + Shape::TABLES_AT + i * 2 * Shape::HALF_TABLE;
    }
};

/* Calls work(first column, first tile of rows, how many) for each column of tiles of the block. */
template <class Shape, class F>
__device__ __forceinline__ void each_run(const Shallow &f, const F &work) {
    const int64_t tiles = (int64_t)f.row_tiles * f.column_tiles;
    int tile = (int)(tiles * blockIdx.x / gridDim.x);
    const int end = (int)(tiles * (blockIdx.x + 1) / gridDim.x);
    while (tile < end) {
        const int across = tile / f.row_tiles, down = tile - across * f.row_tiles;
        const int count = min(end - tile, f.row_tiles - down);
        work(across * Shape::COLUMNS, down, count);
        tile += count;
    }
}

/* ---- the producer ---------------------------------------------------------------------------- */
/* cos and sin of `count` rows of a from `row` on: positions follow each other, and begin again. */
template <class Shape>
__device__ __forceinline__ void load_table(const Shallow &f, uint32_t to, uint32_t came, int row,
                                           int count) {
    barrier_expect(came, 2 * count * Shape::ANGLES);
    for (int done = 0; done < count;) {
        const int time = (row + done) % f.times, run = min(count - done, f.times - time);
        const int64_t from = (int64_t)time * linear::SHALLOW_ANGLES;
        const uint32_t there = to + done * Shape::ANGLES, bytes = run * Shape::ANGLES;
        bulk_load(there, f.cosines + from, bytes, came);
        bulk_load(there + Shape::HALF_TABLE, f.sines + from, bytes, came);
        done += run;
    }
}

template <class Shape>
__device__ __forceinline__ void produce(const Shallow &f, ShallowPlaces<Shape> at) {
    Ring<Shape::STAGES> ring;
    Ring<Shape::LOADS ? Shape::LOADS : 1> read;
    auto stage = [&]() {
        barrier_wait(at.empty(ring.at), ring.phase ^ 1);
        barrier_expect(at.full(ring.at), Shape::STAGE);
        return at.stage(ring.at);
    };
    each_run<Shape>(f, [&](int column, int down, int count) {
        for (int step = 0; step < Shape::STEPS; step++, ring.advance()) {
            const int deep = step * Shape::STEP;
            const uint32_t to = stage();
            for (int i = 0; i < Shape::CONSUMERS; i++) {
                const int mine = column + i * PANEL_COLUMNS;
                box_load(to + i * Shape::PANEL, &f.b, at.full(ring.at),
                         Shape::BACKWARD ? deep : mine, Shape::BACKWARD ? mine : deep, 0, 0);
            }
        }
        for (int tile = down; tile < down + count; tile++) {
            const int row = tile * Shape::ROWS;
            for (int step = 0; step < Shape::STEPS; step++, ring.advance()) {
                box_load(stage(), &f.a, at.full(ring.at), step * Shape::STEP, row, 0, 0);
            }
            for (int half = 0; Shape::BACKWARD && half < 2; half++, read.advance()) {
                const uint32_t came = at.came(read.at);
                barrier_wait(at.left(read.at), read.phase ^ 1);
                barrier_expect(came, Shape::CONSUMERS * Shape::PANEL);
                for (int i = 0; i < Shape::CONSUMERS; i++) {
                    box_load(at.buffer(i, read.at), &f.dgelu, came, column + i * PANEL_COLUMNS,
                             row + half * Shape::HALF, 0, 0);
                }
            }
            if constexpr (Shape::TABLES > 0) {
                barrier_wait(at.left(read.at), read.phase ^ 1);
                load_table<Shape>(f, at.table(read.at), at.came(read.at), row,
                                  min(Shape::ROWS, f.rows - row));
                read.advance();
            }
        }
    });
}

/* ---- a consumer ------------------------------------------------------------------------------ */
/* rows() makes results of AT_ONCE rows of a tile, from `row` on: enough work for a warp while it
 * waits for each. A thread's c[4 s + 2 h + e] is row 8 s + 2 (lane % 4) + e, column 16 warp + lane
 * / 4 + 8 h of the consumer's 64. free() is called once the stores have been read. */
template <class T, class Shape> struct ShallowEpilogue;

/* Of the thread's two columns, the first of which is `column`. */
template <class T>
__device__ __forceinline__ void load_bias(float (&bias)[2], const Shallow &f, int column) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int mine = column + 8 * h;
        bias[h] = f.bias && mine < f.columns ? to_float(((const T *)f.bias)[mine]) : 0.0f;
    }
}

template <int N>
__device__ __forceinline__ void store_rows(const uint32_t (&word)[N][4], uint32_t place) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        store_matrices_transposed(place + 16 * PANEL_ROW * i, word[i]);
    }
}

template <class T> struct ShallowEpilogue<T, ShallowShape<Kind::gelu>> {
    using Shape = ShallowShape<Kind::gelu>;
    float bias[2];
    bool tanh;
    int buffer = 0;

    __device__ __forceinline__ void run(const Shallow &f, int column) {
        tanh = f.tanh;
        load_bias<T>(bias, f, column);
    }
    __device__ __forceinline__ void begin(ShallowPlaces<Shape>) {}

    template <bool TANH> __device__ __forceinline__ void rows_of(const float *c, uint32_t place) {
        uint32_t dgelu[Shape::AT_ONCE / 16][4], y[Shape::AT_ONCE / 16][4];
#pragma unroll
        for (int i = 0; i < Shape::AT_ONCE / 4; i++) {
            linear::gelu_pair<T, TANH>(&c[2 * i], bias[i % 2], bias[i % 2], dgelu[i / 4][i % 4],
                                       y[i / 4][i % 4]);
        }
        store_rows(dgelu, place);
        store_rows(y, place + Shape::PANEL);
    }
    __device__ __forceinline__ void rows(const float *c, uint32_t place, int) {
        tanh ? rows_of<true>(c, place) : rows_of<false>(c, place);
    }

    __device__ __forceinline__ void finish(const Shallow &, int, int) {}
    __device__ __forceinline__ void store(const Shallow &f, ShallowPlaces<Shape>, uint32_t from,
                                          int column, int row) {
        box_store(&f.dgelu, from, column, row, 0, 0);
        box_store(&f.out, from + Shape::PANEL, column, row, 0, 0);
    }
    __device__ __forceinline__ void advance() { buffer ^= 1; }
    __device__ __forceinline__ void free(ShallowPlaces<Shape>) {}
};

template <class T> struct ShallowEpilogue<T, ShallowShape<Kind::rotary>> {
    using Shape = ShallowShape<Kind::rotary>;
    float bias[2];
    bool rotates; /* the warp has the rotated dims of a head */
    int buffer = 0;
    Ring<Shape::TABLES> tables;
    uint32_t angles; /* of the thread's column, in a tile's first row */

    __device__ __forceinline__ void run(const Shallow &f, int column) {
        const int of_warp = column - (threadIdx.x & 31) / 4;
        rotates = of_warp % f.head == 0 && of_warp / f.head % f.slices < f.parts;
        load_bias<T>(bias, f, column);
    }
    __device__ __forceinline__ void begin(ShallowPlaces<Shape> at) {
        barrier_wait(at.came(tables.at), tables.phase);
        angles = at.table(tables.at) + (threadIdx.x & 31) / 4 * 4;
    }

    __device__ __forceinline__ void rows(const float *c, uint32_t place, int row) {
        uint32_t word[Shape::AT_ONCE / 16][4];
        const uint32_t first = angles + (row + threadIdx.x % 4 * 2) * Shape::ANGLES;
#pragma unroll
        for (int i = 0; i < Shape::AT_ONCE / 8; i++) {
            float x[2], y[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                x[e] = c[4 * i + e] + bias[0];
                y[e] = c[4 * i + 2 + e] + bias[1];
                if (rotates) {
                    const uint32_t angle = first + (8 * i + e) * Shape::ANGLES;
                    const float cosine = __uint_as_float(load_shared4(angle));
                    const float sine = __uint_as_float(load_shared4(angle + Shape::HALF_TABLE));
                    const float rotated = x[e] * cosine - y[e] * sine;
                    y[e] = y[e] * cosine + x[e] * sine;
                    x[e] = rotated;
                }
            }
            word[i / 2][i % 2 * 2] = pack_pair<T>(x[0], x[1]);
            word[i / 2][i % 2 * 2 + 1] = pack_pair<T>(y[0], y[1]);
        }
        store_rows(word, place);
    }

    __device__ __forceinline__ void finish(const Shallow &, int, int) {}
    __device__ __forceinline__ void store(const Shallow &f, ShallowPlaces<Shape>, uint32_t from,
                                          int column, int row) {
        box_store(&f.out, from, column, row, 0, 0);
    }
    __device__ __forceinline__ void advance() {
        buffer ^= 1;
        if (buffer == 0) {
            tables.advance();
        }
    }
    /* Only a consumer's first warp reads the table. */
    __device__ __forceinline__ void free(ShallowPlaces<Shape> at) {
        if (buffer == 1) {
            barrier_arrive(at.left(tables.at));
        }
    }
};

template <class T> struct ShallowEpilogue<T, ShallowShape<Kind::gelu_backward>> {
    using Shape = ShallowShape<Kind::gelu_backward>;
    float sums[2];
    int buffer = 0, stored = -1;
    uint32_t phase = 0;

    __device__ __forceinline__ void run(const Shallow &, int) {}
    __device__ __forceinline__ void begin(ShallowPlaces<Shape> at) {
        barrier_wait(at.came(buffer), phase);
        sums[0] = sums[1] = 0.0f;
    }

    __device__ __forceinline__ void rows(const float *c, uint32_t place, int) {
        uint32_t word[Shape::AT_ONCE / 16][4];
#pragma unroll
        for (int i = 0; i < Shape::AT_ONCE / 16; i++) {
            load_matrices_transposed(word[i], place + 16 * PANEL_ROW * i);
        }
#pragma unroll
        for (int i = 0; i < Shape::AT_ONCE / 4; i++) {
            word[i / 4][i % 4] = linear::times_dgelu<T>(&c[2 * i], word[i / 4][i % 4]);
            const float2 d = unpack_pair<T>(word[i / 4][i % 4]);
            sums[i % 2] += d.x + d.y;
        }
        store_rows(word, place);
    }

    __device__ __forceinline__ void finish(const Shallow &f, int part, int column) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sums[h] += __shfl_xor_sync(~0u, sums[h], 1);
            sums[h] += __shfl_xor_sync(~0u, sums[h], 2);
            if (threadIdx.x % 4 == 0 && column + 8 * h < f.columns) {
                f.partial[(int64_t)part * f.columns + column + 8 * h] = sums[h];
            }
        }
    }
    __device__ __forceinline__ void store(const Shallow &f, ShallowPlaces<Shape>, uint32_t from,
                                          int column, int row) {
        box_store(&f.out, from, column, row, 0, 0);
        stored = buffer;
    }
    __device__ __forceinline__ void advance() {
        if (++buffer == Shape::BUFFERS) {
            buffer = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void free(ShallowPlaces<Shape> at) {
        if (stored >= 0) {
            barrier_arrive(at.left(stored));
            stored = -1;
        }
    }
};

template <class T, class Shape>
__device__ __forceinline__ void consume(const Shallow &f, ShallowPlaces<Shape> at, int group) {
    const int warp = (int)(threadIdx.x % WARPGROUP) / 32, lane = threadIdx.x & 31;
    const bool leads = threadIdx.x % WARPGROUP == 0; /* for its warpgroup */
    const int my_turn = 1 + group, other_turn = 2 - group, mine_alone = 3 + group;
    const uint32_t in_panel = panel_offset(lane / 16 * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1));
    Ring<Shape::STAGES> ring;
    ShallowEpilogue<T, Shape> end;
    if (group == 1) {
        named_barrier_arrive(other_turn, 2 * WARPGROUP);
    }
    each_run<Shape>(f, [&](int block_column, int down, int count) {
        const int first = block_column + group * PANEL_COLUMNS;
        const int column = first + 16 * warp + lane / 4;
        end.run(f, column);

        /* b^T of the consumer's columns, as it lies in memory, from shared memory to registers. */
        uint32_t b[4 * Shape::STEPS][4];
#pragma unroll
        for (int step = 0; step < Shape::STEPS; step++, ring.advance()) {
            const uint32_t panel = at.stage(ring.at) + group * Shape::PANEL;
            barrier_wait(at.full(ring.at), ring.phase);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if constexpr (Shape::BACKWARD) {
                    const int row = 16 * warp + (lane & 15), chunk = 2 * k + lane / 16;
                    load_matrices(b[4 * step + k], panel + panel_offset(row, chunk));
                } else {
                    const int row = 16 * k + lane / 16 * 8 + (lane & 7),
                              chunk = 2 * warp + (lane >> 3 & 1);
                    load_matrices_transposed(b[4 * step + k], panel + panel_offset(row, chunk));
                }
            }
            named_barrier_sync(mine_alone, WARPGROUP);
            if (leads) {
                barrier_arrive(at.empty(ring.at));
            }
        }

        for (int tile = down; tile < down + count; tile++) {
            float c[64];
            int before = 0;
            named_barrier_sync(my_turn, 2 * WARPGROUP);
#pragma unroll
            for (int step = 0; step < Shape::STEPS; step++, ring.advance()) {
                barrier_wait(at.full(ring.at), ring.phase);
                const Operand a = rows_operand(at.stage(ring.at));
                products_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    product<T, 0>(c, b[4 * step + k], further(a, 32 * k), step + k > 0);
                }
                products_end();
                if (step > 0) {
                    products_wait<1>();
                    if (leads) {
                        barrier_arrive(at.empty(before));
                    }
                }
                before = ring.at;
                if (step == Shape::STEPS - 2) { /* the other comes while the last one is computed */
                    named_barrier_arrive(other_turn, 2 * WARPGROUP);
                }
            }
            products_wait<0>();
            hold(c);
            if (leads) {
                barrier_arrive(at.empty(before));
            }

#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t buffer = at.buffer(group, end.buffer);
                end.begin(at);
#pragma unroll
                for (int s = 0; s < Shape::HALF; s += Shape::AT_ONCE) {
                    end.rows(c + 32 * half + s / 2, buffer + in_panel + PANEL_ROW * s,
                             Shape::HALF * half + s);
                }
                end.finish(f, 2 * tile + half, column);
                proxy_fence();
                if (leads) {
                    box_stores_read(); /* so that the next half may be written there */
                    end.free(at);
                }
                named_barrier_sync(mine_alone, WARPGROUP);
                if (leads) {
                    end.store(f, at, buffer, first, tile * Shape::ROWS + half * Shape::HALF);
                }
                end.advance();
            }
        }
    });
    if (leads) {
        box_stores_read();
    }
}

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    linear_shallow_kernel(const __grid_constant__ Shallow f) {
    await_previous();
#ifdef HOPPER_CODE
    const ShallowPlaces<Shape> at = {dynamic_shared()};
    linear::run_block<Shape>(
        at.base, [&]() { produce(f, at); }, [&](int group) { consume<T>(f, at, group); });
#endif
}

/* ---- host ------------------------------------------------------------------------------------ */
template <class Shape>
nd_status launch(const char *op, int device, Shallow f, const nd_array *a, const nd_array *b,
                 const nd_array *dgelu, const nd_array *out) {
    if (dgelu) {
        ND_TRY(linear::map_of(op, dgelu, Shape::HALF, &f.dgelu));
    }
    ND_TRY(linear::map_of(op, out, Shape::HALF, &f.out));
    return linear::launch<Shape>(op, device, linear_shallow_kernel<bf16, Shape>,
                                 linear_shallow_kernel<f16, Shape>, f, a, b);
}

} // namespace

nd_status linear_gelu_fwd_shallow(int device, const linear_gelu_fwd_args *a) {
    Shallow f = {};
    f.bias = a->b->data;
    f.tanh = a->tanh != 0;
    return launch<ShallowShape<Kind::gelu>>("linear_gelu_fwd", device, f, a->x, a->w, a->dgelu,
                                            a->y);
}

nd_status linear_gelu_bwd_shallow(int device, const linear_gelu_bwd_args *a) {
    using Shape = ShallowShape<Kind::gelu_backward>;
    return linear::with_column_sums<Shape>(device, a, Shallow{}, [&](const Shallow &f) {
        return launch<Shape>("linear_gelu_bwd", device, f, a->dy, a->w, a->dgelu, a->dpre);
    });
}

bool linear_rotary_shallow_serves(int device, const linear_rotary_fwd_args *a, const nd_array *x,
                                  const nd_array *w, const nd_array *y) {
    return linear_hopper_serves(device, {x, w, y}) && x->shape[1] <= linear::SHALLOW &&
           a->cos->shape[1] == linear::SHALLOW_ANGLES && a->y->shape[4] % PANEL_COLUMNS == 0 &&
           is_aligned16(a->cos->data) && is_aligned16(a->sin->data);
}

nd_status linear_rotary_fwd_shallow(int device, const linear_rotary_fwd_args *a, const nd_array *x,
                                    const nd_array *w, const nd_array *y) {
    Shallow f = {};
    f.bias = a->b ? a->b->data : nullptr;
    f.cosines = data_of<float>(a->cos);
    f.sines = data_of<float>(a->sin);
    f.times = (int)a->cos->shape[0];
    f.slices = (int)a->y->shape[3];
    f.head = (int)a->y->shape[4];
    f.parts = (int)a->parts;
    return launch<ShallowShape<Kind::rotary>>("linear_rotary_fwd", device, f, x, w, nullptr, y);
}
