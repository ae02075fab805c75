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
 * Parallel, layout, bytes: linear_fp8_hopper.cuh.
 */
#include "cross_entropy.cuh"
#include "linear_fp8_hopper.cuh"

using namespace hopper;

namespace {

struct Head : linear::BytesProduct {
    const float *scale;
    const int32_t *targets;
    float2 *partial; /* column_tiles x N: log2 of the largest exponential, their sum by that */
    float *target;   /* N: logits[targets] log2(e) */
    float *shift;    /* N: lse log2(e) - 15, infinite for rows that do not count */
};

#ifdef HOPPER_CODE

constexpr float log2_e = 1.44269504f;
constexpr float d_scale = 32768.0f; /* of d: 2^15 */

/* ---- epilogues of a tile --------------------------------------------------------------------- */
/* The column of c[i], counted from the tile's first. */
__device__ __forceinline__ int column_of(int i) {
    return i / 8 * 16 + (threadIdx.x & 3) * 4 + (i & 1) * 2 + (i >> 2 & 1);
}

/* Targets of the thread's two rows. By begin(): the product hides the wait. */
__device__ __forceinline__ void load_targets(const Head &f, int tile, int (&target)[2]) {
    const int row = linear::first_row(tile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        target[h] = row + h < f.rows ? f.targets[row + h] : -1;
    }
}

template <int C>
__device__ __forceinline__ void sums_of(const Head &f, float (&c)[C], float scale, int across,
                                        int row, int (&target)[2]) {
    const int first = across * 2 * C, left = (f.columns - first) / 16;
    if (left < C / 8) { /* beyond the last column */
#pragma unroll
        for (int i = 0; i < C; i++) {
            c[i] = i / 8 < left ? c[i] : -INFINITY;
        }
    }
    target[0] -= first;
    target[1] -= first;
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

struct SumsEpilogue {
    const Head &f;
    const float scale;
    int target[2]; /* of the tile's rows; finish() counts them from its own columns */

    __device__ __forceinline__ void begin(int, int tile) { load_targets(f, tile, target); }
    template <int C> __device__ __forceinline__ void finish(float (&c)[C], int across, int tile) {
        sums_of(f, c, scale, across, linear::first_row(tile), target);
    }
};

/* Puts d of WRITTEN columns, from the thread's results c. target[h]: of row h, counted from the
 * first of these columns, maybe not one of them. */
template <bool TARGETS, class Shape>
__device__ __forceinline__ void put_gradient(const linear::BytesWriter<Shape> &to, const float *c,
                                             float scale, const float (&shift)[2],
                                             const int (&target)[2]) {
    to.template put<true>([&](int m, float(&v)[2][4]) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int h = i / 4, k = i % 4;
            v[h][k] = fast_exp2(fmaf(c[linear::index_of(m, h, k)], scale, -shift[h]));
            if (TARGETS && target[h] == 16 * m + 4 * (int)(threadIdx.x & 3) + k) {
                v[h][k] -= d_scale;
            }
        }
    });
}

template <class Shape> struct GradientEpilogue {
    const Head &f;
    const float scale;
    linear::BytesWriter<Shape> to;
    int target[2]; /* of the tile's rows; finish() counts them from its own columns */
    float shift[2];

    __device__ __forceinline__ void begin(int, int tile) {
        const int row = linear::first_row(tile);
        load_targets(f, tile, target);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            shift[h] = row + h < f.rows ? f.shift[row + h] : INFINITY;
        }
    }
    template <int C> __device__ __forceinline__ void finish(float (&c)[C], int across, int tile) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            target[h] = (shift[h] != INFINITY ? target[h] : -1) - across * Shape::COLUMNS;
        }
#pragma unroll
        for (int half = 0; half < Shape::COLUMNS / Shape::WRITTEN; half++) {
            const bool has = (target[0] >= 0 && target[0] < Shape::WRITTEN) ||
                             (target[1] >= 0 && target[1] < Shape::WRITTEN);
            const float *mine = c + half * (Shape::WRITTEN / 2);
            to.begin();
            if (__any_sync(~0u, has)) {
                put_gradient<true>(to, mine, scale, shift, target);
            } else {
                put_gradient<false>(to, mine, scale, shift, target);
            }
            to.end(across * Shape::COLUMNS + half * Shape::WRITTEN, tile);
            target[0] -= Shape::WRITTEN;
            target[1] -= Shape::WRITTEN;
        }
    }
};

#endif

template <class Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1) head_kernel(const __grid_constant__ Head f) {
    await_previous();
#ifdef HOPPER_CODE
    const linear::Barriers<Shape> at = {dynamic_shared()};
    linear::run_block<Shape>(
        at.base, [&]() { linear::produce_bytes<Shape>(f, at); },
        [&](int group) {
            const float scale = *f.scale * log2_e;
            if constexpr (Shape::BUFFERS > 0) {
                GradientEpilogue<Shape> epilogue = {f, scale, {f, at, group}, {}, {}};
                linear::consume_bytes<Shape, false>(f, at, group, epilogue);
            } else {
                SumsEpilogue epilogue = {f, scale, {}};
                linear::consume_bytes<Shape, false>(f, at, group, epilogue);
            }
        });
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
template <int COLUMNS> nd_status run(int device, const fp8_cross_entropy_args *a, Head f) {
    const char *op = "fp8_cross_entropy";
    using Sums = linear::BytesShape<COLUMNS, false>;
    using Gradient = linear::BytesShape<COLUMNS, true>;
    ND_TRY(linear::bytes_product<COLUMNS>(op, a->x, a->w, a->d, a->d_t, &f));
    const size_t sums = padded(sizeof(float2) * (size_t)f.column_tiles * f.rows);
    const size_t of_rows = padded(sizeof(float) * (size_t)f.rows);
    void *scratch;
    ND_TRY(cuda_scratch(device, sums + 2 * of_rows, &scratch));
    f.partial = (float2 *)scratch;
    f.target = (float *)((char *)scratch + sums);
    f.shift = (float *)((char *)scratch + sums + of_rows);
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
    const int64_t rows = a->x->shape[0], depth = a->x->shape[1];
    Head f = {};
    f.scale = data_of<float>(a->scale);
    f.targets = data_of<int32_t>(a->targets);
    ND_TRY(linear::check_bytes_product(op, device, "x", a->x, a->w));
    if (rows > 0) {
        ND_TRY(depth <= 512 ? run<256>(device, a, f) : run<128>(device, a, f));
    }
    return cuda_mean_loss(op, device, data_of<float>(a->losses), f.targets, data_of<float>(a->loss),
                          data_of<float>(a->share), rows);
}
