/* cross_entropy_fp8.cu - fp8_cross_entropy on Hopper: a language-model head and its loss, of which
 * neither the logits nor the softmax are stored.
 *
 *   logits = scale x w^T,  losses[n] = lse[n] - logits[n, targets[n]]   x (N, C), w (V, C) in e4m3
 *   d[n, v] = (exp(logits[n, v] - lse[n]) - (v == targets[n])) 2^15     and its transpose, in e5m2
 *
 * Two passes, each of which multiplies anew. The first finds the maximum and the sum of
 *   exponentials of each row in each tile; merged in the order of the tiles they give lse. The
 *   second computes d from lse. Multiplying twice costs less than writing and reading the logits,
 *   and both layouts of d are written from registers.
 * Precision: sums of wgmma's FP8 products (about 14 bits of mantissa) over C; all else float32.
 * Parallel: linear_hopper.cuh. A block walks down the rows of its columns, whose part of w stays in
 *   shared memory. A tile of 64 rows x COLUMNS belongs to one consumer. The consumers take turns:
 *   while one multiplies, the other runs the epilogue of its tile.
 * Layout: the tensor maps reorder each 16 rows of x and of w in shared memory: row 2 t + h goes to
 *   place 8 h + t. So a thread holds rows 2 l and 2 l + 1 (l = lane / 4) of its warp's 16, and of
 *   each 16 columns those from 4 q to 4 q + 3 (q = lane % 4). That is a word of four bytes along a
 *   row; one byte permutation makes pairs along a column. stmatrix stores both.
 * Bytes: x from L2 once for each column of tiles; w once for each run of tiles of a block; d and
 *   its transpose once.
 */
#include "cross_entropy.cuh"
#include "linear_hopper.cuh"

using namespace hopper;

/* Not in the namespace below, whose members must all be used. */
namespace linear {

/* Tiles of COLUMNS columns, for depths up to WEIGHTS / COLUMNS. GRADIENT: the second pass. */
template <int COLUMNS_, bool GRADIENT_> struct HeadShape : TileShape {
    static constexpr bool GRADIENT = GRADIENT_;
    static constexpr int COLUMNS = COLUMNS_, ROWS = 64, READERS = 1, TAKE = 240;
    static constexpr int STEP = 128;                            /* of the depth: a row of a panel */
    static constexpr uint32_t STAGE = ROWS * hopper::PANEL_ROW; /* a step of x */
    static constexpr uint32_t PART = COLUMNS * hopper::PANEL_ROW; /* a step of w */
    static constexpr uint32_t WEIGHTS = 128 << 10;                /* all steps of w */
    /* d and its transpose take four stages of memory a buffer, for both consumers together. */
    static constexpr int BUFFERS = !GRADIENT ? 0 : COLUMNS == 256 ? 2 : 1;
    static constexpr int STAGES = 12 - 4 * BUFFERS, LOADS = 1;
    static constexpr int HALF = 128;               /* columns that are written together */
    static constexpr uint32_t PANEL = HALF * ROWS; /* d of HALF columns */
    static constexpr uint32_t STAGES_AT = WEIGHTS;
    static constexpr uint32_t BUFFERS_AT = STAGES_AT + STAGES * STAGE;
    static constexpr uint32_t BARRIERS_AT = BUFFERS_AT + CONSUMERS * BUFFERS * 2 * PANEL;
    static constexpr size_t SHARED = BARRIERS_AT + 8 * 2 * (STAGES + LOADS);
};

} // namespace linear

using linear::HeadShape;

namespace {

struct Head {
    CUtensorMap x, w, d, d_t;
    int rows, columns, steps; /* N, V, of C */
    int row_tiles, column_tiles;
    const float *scale;
    const int32_t *targets;
    float2 *partial; /* column_tiles x N: log2 of the largest exponential, their sum by that */
    float *target;   /* N: logits[targets] log2(e) */
    float *shift;    /* N: lse log2(e) - 15, infinite for rows that do not count */
};

#ifdef HOPPER_CODE

constexpr float log2_e = 1.44269504f;
constexpr float d_scale = 32768.0f; /* of d: 2^15 */

/* Calls work(column tile, first tile of rows, number of tiles) for each run of tiles of this block.
 * First whole columns: all blocks go down the rows side by side, so that they share x in L2 and
 * write neighbouring parts of d. Then an equal share of the columns that remain. */
template <class F> __device__ __forceinline__ void each_run(const Head &f, const F &work) {
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
__device__ __forceinline__ void produce(const Head &f, linear::Barriers<Shape> at) {
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

/* ---- epilogues of a tile ------------------------------------------------------------------------
 * c[8 m + 4 b + 2 h + e] of a thread: row 2 l + h of its warp's 16, column 16 m + 4 q + 2 e + b. */
__device__ __forceinline__ int column_of(int i) {
    return i / 8 * 16 + (threadIdx.x & 3) * 4 + (i & 1) * 2 + (i >> 2 & 1);
}

template <int C>
__device__ __forceinline__ void sums_of(const Head &f, float (&c)[C], float scale, int across,
                                        int row) {
    const int first = across * 2 * C, left = (f.columns - first) / 16;
    if (left < C / 8) { /* beyond the last column */
#pragma unroll
        for (int i = 0; i < C; i++) {
            c[i] = i / 8 < left ? c[i] : -INFINITY;
        }
    }
    int target[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        target[h] = row + h < f.rows ? f.targets[row + h] - first : -1;
    }
    if (__any_sync(~0u, (target[0] >= 0 && target[0] < 2 * C) ||
                            (target[1] >= 0 && target[1] < 2 * C))) {
#pragma unroll
        for (int i = 0; i < C; i++) {
            if (column_of(i) == target[i >> 1 & 1]) {
                f.target[row + (i >> 1 & 1)] = c[i] * scale;
            }
        }
    }
    constexpr int WAYS = 4; /* chains of dependent instructions, of each row */
    float most[2][WAYS], sum[2][WAYS];
#pragma unroll
    for (int i = 0; i < C; i++) {
        const int h = i >> 1 & 1, way = (i & 1) + (i >> 2 & 1) * 2;
        most[h][way] = i < 8 ? c[i] : fmaxf(most[h][way], c[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        most[h][0] =
            warp_max<4>(fmaxf(fmaxf(most[h][0], most[h][1]), fmaxf(most[h][2], most[h][3]))) *
            scale;
    }
#pragma unroll
    for (int i = 0; i < C; i++) {
        const int h = i >> 1 & 1, way = (i & 1) + (i >> 2 & 1) * 2;
        const float p = fast_exp2(fmaf(c[i], scale, -most[h][0]));
        sum[h][way] = i < 8 ? p : sum[h][way] + p;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float all = warp_sum<4>((sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]));
        if (threadIdx.x % 4 == 0 && row + h < f.rows) {
            f.partial[(int64_t)across * f.rows + row + h] = make_float2(most[h][0], all);
        }
    }
}

/* Two floats rounded to e5m2, `low` in the lower byte; too large ones become the largest number. */
__device__ __forceinline__ uint32_t pack_e5m2(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

/* Writes d of HALF columns, from the thread's 64 results c, to shared memory at `d`, its transpose
 * at `d_t`. target[h]: of row h, counted from the first of these columns, maybe not one of them. */
template <class Shape, bool TARGETS>
__device__ __forceinline__ void gradient_of(const float *c, float scale, const float (&shift)[2],
                                            const int (&target)[2], uint32_t d, uint32_t d_t) {
    const int warp = (int)(threadIdx.x % WARPGROUP) / 32, lane = threadIdx.x & 31;
    const int matrix = lane / 8, of_matrix = lane % 8;
#pragma unroll
    for (int m = 0; m < Shape::HALF / 16; m += 2) {
        uint32_t rows[4], columns[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float v[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int from = 8 * (m + i) + 4 * (k & 1) + 2 * h + k / 2;
                    v[k] = fast_exp2(fmaf(c[from], scale, -shift[h]));
                    if (TARGETS && target[h] == 16 * (m + i) + 4 * (lane & 3) + k) {
                        v[k] -= d_scale;
                    }
                }
                rows[2 * i + h] = pack_e5m2(v[0], v[1]) | pack_e5m2(v[2], v[3]) << 16;
            }
            columns[2 * i] = __byte_perm(rows[2 * i], rows[2 * i + 1], 0x5140);
            columns[2 * i + 1] = __byte_perm(rows[2 * i], rows[2 * i + 1], 0x7362);
        }
        const int row = 16 * warp + 2 * of_matrix + (matrix & 1);
        store_matrices(d + panel_offset(row, m + matrix / 2), rows);
        const int column =
            16 * (m + matrix / 2) + of_matrix / 2 * 4 + (matrix & 1) * 2 + (of_matrix & 1);
        store_matrices_transposed(d_t + 64 * column + ((warp ^ (column / 2 & 3)) << 4), columns);
    }
}

template <class Shape>
__device__ __forceinline__ void consume(const Head &f, linear::Barriers<Shape> at, int group) {
    const int lane = threadIdx.x & 31, warp = (int)(threadIdx.x % WARPGROUP) / 32;
    const bool leads = threadIdx.x % WARPGROUP == 0;
    const int my_turn = 1 + group, other_turn = 2 - group, mine_alone = 3 + group;
    const float scale = *f.scale * log2_e;
    Ring<Shape::STAGES> ring;
    Ring<1> run;
    int next = 0, buffer = 0; /* the consumer of the tile; the buffer of d */
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
                    product_e4m3(c, further(x, 32 * k), further(w, 32 * k), step + k > 0);
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

            const int row = tile * Shape::ROWS + 16 * warp + lane / 4 * 2;
            if constexpr (!Shape::GRADIENT) {
                sums_of(f, c, scale, across, row);
            } else {
                float shift[2];
                int target[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const bool inside = row + h < f.rows;
                    shift[h] = inside ? f.shift[row + h] : INFINITY;
                    target[h] = inside && shift[h] != INFINITY ? f.targets[row + h] : -1;
                    target[h] -= across * Shape::COLUMNS;
                }
#pragma unroll
                for (int half = 0; half < Shape::COLUMNS / Shape::HALF; half++) {
                    const uint32_t d = at.base + Shape::BUFFERS_AT +
                                       (Shape::BUFFERS * group + buffer) * 2 * Shape::PANEL;
                    const uint32_t d_t = d + Shape::PANEL;
                    const bool has = (target[0] >= 0 && target[0] < Shape::HALF) ||
                                     (target[1] >= 0 && target[1] < Shape::HALF);
                    const float *mine = c + half * (Shape::HALF / 2);
                    if (Shape::BUFFERS == 1) {
                        if (leads) {
                            box_stores_read();
                        }
                        named_barrier_sync(mine_alone, WARPGROUP);
                    }
                    if (__any_sync(~0u, has)) {
                        gradient_of<Shape, true>(mine, scale, shift, target, d, d_t);
                    } else {
                        gradient_of<Shape, false>(mine, scale, shift, target, d, d_t);
                    }
                    proxy_fence();
                    if (leads && Shape::BUFFERS == 2) {
                        box_stores_read(); /* so that the next half may be written there */
                    }
                    named_barrier_sync(mine_alone, WARPGROUP);
                    if (leads) {
                        const int column = across * Shape::COLUMNS + half * Shape::HALF;
                        box_store(&f.d, d, column, tile * Shape::ROWS, 0, 0);
                        box_store(&f.d_t, d_t, tile * Shape::ROWS, column, 0, 0);
                    }
                    buffer ^= Shape::BUFFERS - 1;
                    target[0] -= Shape::HALF;
                    target[1] -= Shape::HALF;
                }
            }
        }
        if (leads) {
            barrier_arrive(at.left(0));
        }
    });
    if (leads) {
        box_stores_read();
    }
}

#endif

template <class Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1) head_kernel(const __grid_constant__ Head f) {
    await_previous();
#ifdef HOPPER_CODE
    const linear::Barriers<Shape> at = {dynamic_shared()};
    linear::run_block<Shape>(
        at.base, [&]() { produce<Shape>(f, at); },
        [&](int group) { consume<Shape>(f, at, group); });
#endif
}

/* Merges the column tiles' sums of each row: 32 rows a block, eight threads a row, each of which
 * takes neighbouring tiles. */
constexpr int merge_rows = 32, merge_parts = 8;
__global__ void __launch_bounds__(merge_rows *merge_parts)
    merge_kernel(const float2 *partial, const float *target_logits, const int32_t *targets,
                 float *losses, float *shift, int rows, int columns, int column_tiles) {
    await_previous();
    __shared__ float2 sums[merge_parts][merge_rows];
    const int row = blockIdx.x * merge_rows + threadIdx.x;
    const int each = ceil_div(column_tiles, merge_parts), first = threadIdx.y * each;
    const int last = min(first + each, column_tiles);
    auto add = [](float2 &to, float2 more) {
        const float most = fmaxf(to.x, more.x);
        to.y =
            to.x == -INFINITY ? more.y : to.y * exp2f(to.x - most) + more.y * exp2f(more.x - most);
        to.x = most;
    };
    float2 all = make_float2(-INFINITY, 0.0f);
    if (row < rows) {
#pragma unroll 4
        for (int tile = first; tile < last; tile++) {
            add(all, checked(partial + (int64_t)tile * rows + row));
        }
    }
    sums[threadIdx.y][threadIdx.x] = all;
    __syncthreads();
    if (threadIdx.y != 0 || row >= rows) {
        return;
    }
    for (int part = 1; part < merge_parts; part++) {
        if (part * each < column_tiles) {
            add(all, sums[part][threadIdx.x]);
        }
    }
    const int target = checked(targets + row);
    ND_CHECK_INDEX("targets", row, max((int64_t)target, (int64_t)0), columns);
    const bool counts = target >= 0 && target < columns;
    const float lse = all.x + log2f(all.y);
    checked(shift + row) = counts ? lse - 15.0f : INFINITY;
    checked(losses + row) = target < 0 ? 0.0f
                            : target >= columns
                                ? NAN
                                : (lse - checked(target_logits + row)) * 0.69314718f;
}

/* ---- host ------------------------------------------------------------------------------------ */
/* A matrix of bytes in boxes of `rows` rows and 128 columns, each 16 rows in the order above. */
nd_status rows_map(const char *op, const nd_array *a, int rows, CUtensorMap *out) {
    const int64_t width = a->shape[1];
    const int64_t shape[4] = {width, 8, 2, a->shape[0] / 16};
    const int64_t strides[3] = {2 * width, width, 16 * width};
    const int box[4] = {128, 8, 2, rows / 16};
    return byte_map(op, a->data, shape, strides, box, 128, out);
}

nd_status result_map(const char *op, const nd_array *a, int columns, int rows, CUtensorMap *out) {
    const int64_t shape[4] = {a->shape[1], a->shape[0], 1, 1};
    const int64_t strides[3] = {a->shape[1], 0, 0};
    const int box[4] = {columns, rows, 1, 1};
    return byte_map(op, a->data, shape, strides, box, columns, out);
}

template <int COLUMNS> nd_status run(int device, const fp8_cross_entropy_args *a, Head f) {
    const char *op = "fp8_cross_entropy";
    using Sums = HeadShape<COLUMNS, false>;
    using Gradient = HeadShape<COLUMNS, true>;
    f.row_tiles = ceil_div(f.rows, Sums::ROWS);
    f.column_tiles = ceil_div(f.columns, COLUMNS);
    const size_t sums = padded(sizeof(float2) * (size_t)f.column_tiles * f.rows);
    const size_t of_rows = padded(sizeof(float) * (size_t)f.rows);
    void *scratch;
    ND_TRY(cuda_scratch(device, sums + 2 * of_rows, &scratch));
    f.partial = (float2 *)scratch;
    f.target = (float *)((char *)scratch + sums);
    f.shift = (float *)((char *)scratch + sums + of_rows);
    ND_TRY(rows_map(op, a->x, Sums::ROWS, &f.x));
    ND_TRY(rows_map(op, a->w, COLUMNS, &f.w));
    ND_TRY(result_map(op, a->d, Gradient::HALF, Gradient::ROWS, &f.d));
    ND_TRY(result_map(op, a->d_t, Gradient::ROWS, Gradient::HALF, &f.d_t));
    const unsigned blocks = linear::blocks_for(device, f.row_tiles, f.column_tiles);
    ND_TRY(cuda_launch(op, device, head_kernel<Sums>, blocks, Sums::THREADS, Sums::SHARED, f));
    ND_TRY(cuda_launch(op, device, merge_kernel, (unsigned)ceil_div(f.rows, merge_rows),
                       dim3(merge_rows, merge_parts), 0, f.partial, f.target, f.targets,
                       data_of<float>(a->losses), f.shift, f.rows, f.columns, f.column_tiles));
    return cuda_launch(op, device, head_kernel<Gradient>, blocks, Gradient::THREADS,
                       Gradient::SHARED, f);
}

} // namespace

nd_status cuda_fp8_cross_entropy(int device, const fp8_cross_entropy_args *a) {
    const char *op = "fp8_cross_entropy";
    const int64_t rows = a->x->shape[0], depth = a->x->shape[1], columns = a->w->shape[0];
    Head f = {};
    f.rows = (int)rows;
    f.columns = (int)columns;
    f.steps = (int)ceil_div(depth, (int64_t)HeadShape<128, false>::STEP);
    f.scale = data_of<float>(a->scale);
    f.targets = data_of<int32_t>(a->targets);
    if (!hopper_usable(device)) {
        return nd_error(ND_ECUDA,
                        "%s: it needs a GPU of compute capability 9.0, kernels built for sm_90a, "
                        "and no NEEDLE_ARCH below 90",
                        op);
    }
    if (rows % 16 || depth % 16 || columns % 16 || !depth || !columns || depth > 1024 ||
        rows >= 1 << 30 || columns >= 1 << 30) {
        return nd_error(ND_EVALUE,
                        "%s: x (%lld, %lld), w (%lld, %lld): sizes must be multiples of 16, below "
                        "2^30, the columns 16 to 1,024",
                        op, (long long)rows, (long long)depth, (long long)columns,
                        (long long)depth);
    }
    if (rows > 0) {
        ND_TRY(depth <= 512 ? run<256>(device, a, f) : run<128>(device, a, f));
    }
    return cuda_mean_loss(op, device, data_of<float>(a->losses), f.targets, data_of<float>(a->loss),
                          data_of<float>(a->share), true, rows);
}
