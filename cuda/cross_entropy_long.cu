/* cross_entropy_long.cu - cross_entropy_fwd_bwd of long 16-bit rows: the contract, and every other
 * case, are cross_entropy.cu's.
 *
 * A block of 32 warps walks down rows. A warp takes the same run of chunks (512 bytes: 16 a lane)
 * of each row, six or seven of them at V = 50304, and keeps them in registers from the sum of
 * exponentials to the gradient. So shared memory only receives: of its two slots of a row one is
 * free for the row after next as soon as a thread has read what it has copied there itself, and
 * loads are under way during all of the arithmetic. The block meets once a row, over the maxima and
 * sums of its warps, which every warp merges in the same order.
 * Bytes: 2 N V 2. Two exponentials an element.
 */
#include "cross_entropy.cuh"
#include "mma.cuh"

namespace {

constexpr int warps = 32, threads = 32 * warps;
constexpr int slots = 2;
constexpr int lane_vectors = 8;          /* most of a lane in a row; 16 bytes each */
constexpr int64_t least_columns = 16384; /* below, smaller blocks of cross_entropy.cu */
constexpr int64_t most_columns = (int64_t)lane_vectors * threads * 8;

struct Rows {
    void *logits;
    const int32_t *targets;
    float *losses;
    int64_t rows;
    int columns;
};

constexpr float log2_e = 1.44269504f;

/* -infinity twice, which adds nothing to a maximum or to a sum of exponentials. */
template <class T> constexpr uint32_t lowest_pair = 0xff80ff80;
template <> constexpr uint32_t lowest_pair<f16> = 0xfc00fc00;

/* The larger of the lower halves and that of the upper ones; a NaN may be lost, but shows in the
 * sum. */
template <class T> __device__ __forceinline__ uint32_t max_pair(uint32_t x, uint32_t y) {
    uint32_t most;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("max.bf16x2 %0, %1, %2;\n" : "=r"(most) : "r"(x), "r"(y));
    } else {
        asm("max.f16x2 %0, %1, %2;\n" : "=r"(most) : "r"(x), "r"(y));
    }
    return most;
}

/* Shift to subtract from elements up to `max`: never -inf. */
__device__ __forceinline__ float shift_of(float max) { return max == -INFINITY ? 0.0f : max; }

/* exp(x - shift) of both halves, `scaled` = shift log2(e): one step, which costs 2^-24 |shift|. */
template <class T> __device__ __forceinline__ float2 exponentials(uint32_t pair, float scaled) {
    const float2 x = unpack_pair<T>(pair);
    return make_float2(fast_exp2(fmaf(x.x, log2_e, -scaled)),
                       fast_exp2(fmaf(x.y, log2_e, -scaled)));
}

/* A warp's part of each row. */
struct Run {
    int first, vectors;        /* of 16 bytes */
    int count;                 /* this lane's: first + lane, and so on by 32 */
    uint32_t base, slot_bytes; /* shared memory: of the lane's first in slot 0 */

    __device__ __forceinline__ Run(int columns, int warp, int lane, uint32_t shared) {
        const int all = columns / 8, chunks = ceil_div(all, 32);
        first = warp * chunks / warps * 32;
        const int end = (warp + 1) * chunks / warps * 32;
        vectors = (end < all ? end : all) - first;
        count = (vectors - lane + 31) / 32;
        slot_bytes = (uint32_t)all * 16;
        base = shared + (first + lane) * 16;
    }
    __device__ __forceinline__ uint32_t place(int slot, int v) const {
        return base + slot * slot_bytes + v * 512;
    }
};

/* The log of the sum of a row's exponentials. Each warp gives its maximum and its sum relative to
 * that. */
__device__ __forceinline__ float merge(float2 (&of_warps)[warps], int warp, int lane, float most,
                                       float sum) {
    if (lane == 0) {
        of_warps[warp] = make_float2(most, sum);
    }
    __syncthreads();
    const float2 of_warp = of_warps[lane];
    const float shift = shift_of(warp_max(of_warp.x));
    return shift + logf(warp_sum(of_warp.y * fast_exp2((of_warp.x - shift) * log2_e)));
}

template <class T>
__global__ void __launch_bounds__(threads, 1) cross_entropy_kernel(const Rows r) {
    await_previous();
    /* Alternate, so that a warp can write a row's while another still reads those before. */
    __shared__ float2 of_warps[2][warps];
    extern __shared__ __align__(16) unsigned char kept_rows[];
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const Run run(r.columns, warp, lane, shared_address(kept_rows));
    T *logits = (T *)r.logits;
    auto load = [&](int64_t row, int slot) {
        const T *from = logits + row * r.columns + (run.first + lane) * 8;
        for (int v = 0; row < r.rows && v < run.count; v++) {
            copy_async16(run.place(slot, v), from + v * 256, true);
        }
        copy_async_commit();
    };
    int64_t row = blockIdx.x;
    for (int slot = 0; slot < slots; slot++) {
        load(row + slot * (int64_t)gridDim.x, slot);
    }
    int target = row < r.rows ? r.targets[row] : -1;
    int slot = 0;
    for (int parity = 0; row < r.rows; row += gridDim.x, slot ^= 1) {
        const int64_t next = row + gridDim.x;
        const int next_target = next < r.rows ? r.targets[next] : -1;
        ND_CHECK_INDEX("targets", row, max(target, 0), r.columns);
        const bool counts = target >= 0 && target < r.columns;
        const int in_run = target / 8 - run.first; /* the target's vector */
        const bool owns = counts && in_run >= 0 && in_run < run.vectors && in_run % 32 == lane;

        copy_async_wait<slots - 1>();
        uint32_t x[lane_vectors][4], top = lowest_pair<T>;
#pragma unroll
        for (int v = 0; v < lane_vectors; v++) {
            x[v][0] = x[v][1] = x[v][2] = x[v][3] = lowest_pair<T>;
            if (v < run.count) {
                load_shared16(x[v], run.place(slot, v));
            }
        }
        float of_target = -INFINITY;
        if (owns) {
            const uint32_t pair = load_shared4(run.place(slot, in_run / 32) + target % 8 / 2 * 4);
            of_target = target % 2 ? unpack_pair<T>(pair).y : unpack_pair<T>(pair).x;
        }
#pragma unroll
        for (int v = 0; v < lane_vectors; v++) {
            top = max_pair<T>(
                top, max_pair<T>(max_pair<T>(x[v][0], x[v][1]), max_pair<T>(x[v][2], x[v][3])));
        }
        /* Here, where the thread has what it read, its part of the slot can go. */
        const float most =
            warp_max(fmaxf(of_target, fmaxf(unpack_pair<T>(top).x, unpack_pair<T>(top).y)));
        load(row + slots * (int64_t)gridDim.x, slot);

        T *to = logits + row * r.columns + (run.first + lane) * 8;
        auto store = [&](int v, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
            __stwb(&checked(reinterpret_cast<uint4 *>(to + v * 256)), make_uint4(a, b, c, d));
        };
        if (counts) {
            float2 sum = {0.0f, 0.0f};
#pragma unroll
            for (int v = 0; v < lane_vectors; v++) {
                if (v < run.count) {
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        const float2 e = exponentials<T>(x[v][w], shift_of(most) * log2_e);
                        sum.x += e.x;
                        sum.y += e.y;
                    }
                }
            }
            const float lse = merge(of_warps[parity], warp, lane, most, warp_sum(sum.x + sum.y));
            parity ^= 1;
            auto gradient = [&](uint32_t pair) {
                const float2 p = exponentials<T>(pair, lse * log2_e);
                return pack_pair<T>(p.x, p.y);
            };
#pragma unroll
            for (int v = 0; v < lane_vectors; v++) {
                if (v < run.count) {
                    store(v, gradient(x[v][0]), gradient(x[v][1]), gradient(x[v][2]),
                          gradient(x[v][3]));
                }
            }
            if (owns) { /* the thread that wrote it corrects it */
                logits[row * r.columns + target] =
                    from_float<T>(fast_exp2((of_target - lse) * log2_e) - 1.0f);
                r.losses[row] = lse - of_target;
            }
        } else {
            for (int v = 0; v < run.count; v++) {
                store(v, 0, 0, 0, 0);
            }
            if (threadIdx.x == 0) {
                r.losses[row] = target < 0 ? 0.0f : NAN;
            }
        }
        target = next_target;
    }
}

size_t shared_bytes(int64_t columns) { return slots * (size_t)columns * 2; }

} // namespace

bool cross_entropy_long_serves(int device, const nd_array *logits) {
    const int64_t columns = logits->shape[1];
    const size_t sums = 2 * warps * sizeof(float2);
    return logits->dtype != ND_F32 && is_aligned16(logits->data) && columns % 8 == 0 &&
           columns >= least_columns && columns <= most_columns &&
           sums + shared_bytes(columns) <= cuda_device_limits(device)->block_shared;
}

nd_status cross_entropy_long(int device, const cross_entropy_fwd_bwd_args *a) {
    const int64_t rows = a->logits->shape[0], columns = a->logits->shape[1];
    const Rows r = {a->logits->data, data_of<int32_t>(a->targets), data_of<float>(a->losses), rows,
                    (int)columns};
    if (rows == 0) {
        return ND_OK;
    }
    auto kernel =
        a->logits->dtype == ND_BF16 ? cross_entropy_kernel<bf16> : cross_entropy_kernel<f16>;
    return cuda_launch("cross_entropy_fwd_bwd", device, kernel, cuda_grid(device, rows, 1), threads,
                       shared_bytes(columns), r);
}
