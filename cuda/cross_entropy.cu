/* cross_entropy.cu - cross-entropy over the vocabulary, logits (N, V).
 *
 *   forward   lse[n] = log sum_v exp(logits[n, v]),  losses[n] = lse[n] - logits[n, targets[n]]
 *             loss = sum(losses) / count, count = the number of targets >= 0 (loss 0 when none)
 *   both      logits[n, v] = exp(logits[n, v] - lse[n]) - (v == targets[n]); share = 1 / count
 *
 * A negative target gives losses 0, a target >= V losses NaN; their logits become 0.
 * Computed in float32. A block takes a row. Forward: each thread keeps a running maximum and the
 * sum of exponentials relative to it, rescaled when the maximum grows, so one read of the row is
 * enough; the threads' pairs are merged in a fixed order. A row may start anywhere (V odd): the
 * elements before its first 16-byte boundary and after its last go one by one.
 * Both: where two rows fit into shared memory a block walks down rows, and the next arrives while
 * it works on one; longer rows are read twice, the second time mostly from L2. Long 16-bit
 * rows that start at multiples of 16 bytes: cross_entropy_long.cu.
 * Bytes, T bytes an element: forward N V T; both 2 N V T (3 N V T for long rows). An exponential an
 * element, two in both.
 */
#include "cross_entropy.cuh"
#include "mma.cuh"

namespace {

constexpr int most_threads = 512;
constexpr int unroll = 4; /* vectors in flight */
constexpr float log2_e = 1.44269504f;

/* A row cut into `head` single elements, whole vectors, and the rest. */
struct Cut {
    int head, vectors, tail; /* tail: index of the first element after the vectors */
};
template <class T> __device__ __forceinline__ Cut cut_row(const T *row, int columns) {
    constexpr int N = Vec<T>::size;
    int head = (16 - (int)((uintptr_t)row & 15)) % 16 / (int)sizeof(T);
    Cut cut;
    cut.head = head < columns ? head : columns;
    cut.vectors = (columns - cut.head) / N;
    cut.tail = cut.head + cut.vectors * N;
    return cut;
}

/* sum_i exp(x_i - max), and max; max is -inf before the first finite element. */
struct Running {
    float max, sum;

    /* Room for elements up to `x`. Returns what to subtract from them: never -inf. */
    __device__ __forceinline__ float raise(float x) {
        const float up = fmaxf(max, x);
        const float shift = up == -INFINITY ? 0.0f : up;
        sum *= fast_exp2((max - shift) * log2_e);
        max = up;
        return shift;
    }
    __device__ __forceinline__ void add(float x) {
        const float shift = raise(x);
        sum += exp2f((x - shift) * log2_e);
    }
};

/* The larger of each pair of a vector's elements; a NaN may be lost, but shows in the sum. */
__device__ __forceinline__ float vector_max(const Vec<float> &v) {
    return fmaxf(fmaxf(v.v[0], v.v[1]), fmaxf(v.v[2], v.v[3]));
}
template <class T, class Pair> __device__ __forceinline__ float pairs_max(const Vec<T> &v) {
    const Pair *p = reinterpret_cast<const Pair *>(&v);
    const Pair top = __hmax2(__hmax2(p[0], p[1]), __hmax2(p[2], p[3]));
    return fmaxf(to_float(top.x), to_float(top.y));
}
__device__ __forceinline__ float vector_max(const Vec<bf16> &v) {
    return pairs_max<bf16, __nv_bfloat162>(v);
}
__device__ __forceinline__ float vector_max(const Vec<f16> &v) {
    return pairs_max<f16, __half2>(v);
}

/* exp(x - shift). Of 16 bits in one step less, which costs 2^-24 |shift|. */
template <class T> struct Exponential {
    float shift;

    __device__ __forceinline__ explicit Exponential(float by)
        : shift(sizeof(T) == 2 ? by * log2_e : by) {}
    __device__ __forceinline__ float operator()(T x) const {
        const float f = to_float(x);
        return fast_exp2(sizeof(T) == 2 ? fmaf(f, log2_e, -shift) : (f - shift) * log2_e);
    }
};

/* The log of the sum of a row's exponentials, by the whole block; get(i) is the vector from element
 * i on. */
template <class T, class Get>
__device__ __forceinline__ float log_sum_exp(const T *x, const Cut &cut, int columns, Get &&get) {
    constexpr int N = Vec<T>::size;
    Running r = {-INFINITY, 0.0f};
    const int vectors = cut.vectors, stride = blockDim.x;
    auto take = [&](int first, auto count) {
        constexpr int COUNT = decltype(count)::get;
        Vec<T> v[COUNT];
        float most = -INFINITY;
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            v[u] = get(cut.head + (first + u * stride) * N);
        }
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
            most = fmaxf(most, vector_max(v[u]));
        }
        const Exponential<T> weight(r.raise(most));
#pragma unroll
        for (int u = 0; u < COUNT; u++) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                r.sum += weight(v[u].v[k]);
            }
        }
    };
    int i = threadIdx.x;
    for (; i + (unroll - 1) * stride < vectors; i += unroll * stride) {
        take(i, Constant<unroll>());
    }
    for (; i < vectors; i += stride) {
        take(i, Constant<1>());
    }
    for (int c = threadIdx.x; c < cut.head; c += stride) {
        r.add(to_float(checked(x + c)));
    }
    for (int c = cut.tail + threadIdx.x; c < columns; c += stride) {
        r.add(to_float(checked(x + c)));
    }
    const float max = block_max(r.max);
    r.raise(max);
    const float sum = block_sum(r.sum);
    return (max == -INFINITY ? 0.0f : max) + logf(sum);
}

template <class T>
__global__ void __launch_bounds__(most_threads)
    forward_kernel(const T *logits, const int32_t *targets, float *losses, int64_t rows,
                   int64_t columns) {
    await_previous();
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = logits + row * columns;
        const Cut cut = cut_row(x, (int)columns);
        const float all = log_sum_exp(x, cut, (int)columns, [&](int i) { return load16(x + i); });
        if (threadIdx.x == 0) {
            const int64_t target = checked(targets + row);
            ND_CHECK_INDEX("targets", row, max(target, (int64_t)0), columns);
            checked(losses + row) = target < 0          ? 0.0f
                                    : target >= columns ? NAN
                                                        : all - to_float(x[target]);
        }
    }
}

/* One block: the mean over the rows whose target counts; 1 divided by how many those are. */
__global__ void __launch_bounds__(1024) mean_kernel(const float *losses, const int32_t *targets,
                                                    float *loss, float *share, int64_t rows) {
    await_previous();
    float sum = 0.0f, valid = 0.0f;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < rows; i += 1024) {
        sum += losses[i];
        valid += targets[i] >= 0 ? 1.0f : 0.0f;
    }
    sum = block_sum(sum);
    valid = block_sum(valid);
    if (threadIdx.x == 0) {
        *loss = valid > 0.0f ? sum / valid : 0.0f;
        if (share != nullptr) {
            *share = valid > 0.0f ? 1.0f / valid : 0.0f;
        }
    }
}

/* AHEAD: two rows are in shared memory, row_bytes each. The vectors of a row begin 16 bytes after its
 * slot does, wherever the row begins in memory: a thread reads what it has copied itself, and copies
 * the next row over nothing that another thread still reads. */
template <class T, bool AHEAD>
__global__ void __launch_bounds__(1024)
    both_kernel(T *logits, const int32_t *targets, float *losses, int64_t rows, int64_t columns,
                int64_t row_bytes) {
    await_previous();
    constexpr int N = Vec<T>::size;
    extern __shared__ __align__(16) unsigned char kept_bytes[];
    auto place = [&](int slot, const T *x) {
        const int place_in_16 = (int)((uintptr_t)x & 15);
        return reinterpret_cast<T *>(kept_bytes + slot * row_bytes +
                                     (place_in_16 ? place_in_16 : 16));
    };
    auto fetch = [&](int64_t row, int slot) {
        const T *x = logits + row * columns;
        if (row < rows) {
            const Cut cut = cut_row(x, (int)columns);
            T *kept = place(slot, x);
            for (int i = threadIdx.x; i < cut.vectors; i += blockDim.x) {
                const int first = cut.head + i * N;
                copy_async16(shared_address(kept + first), x + first, true);
            }
        }
        copy_async_commit();
    };
    const int width = (int)columns, stride = blockDim.x;
    int64_t row = blockIdx.x;
    if (AHEAD) {
        fetch(row, 0);
        fetch(row + gridDim.x, 1);
    }
    int target = row < rows ? targets[row] : -1;
    for (int slot = 0; row < rows; row += gridDim.x, slot ^= 1) {
        const int next_target = row + gridDim.x < rows ? targets[row + gridDim.x] : -1;
        T *x = logits + row * columns;
        ND_CHECK_INDEX("targets", row, max(target, 0), columns);
        const Cut cut = cut_row(x, width);
        const T *kept = place(slot, x);
        auto get = [&](int i) {
            return AHEAD ? *reinterpret_cast<const Vec<T> *>(kept + i) : load16(x + i);
        };
        if (AHEAD) {
            copy_async_wait<1>();
        }
        auto write = [&](auto value) {
#pragma unroll 4
            for (int i = threadIdx.x; i < cut.vectors; i += stride) {
                Vec<T> v = get(cut.head + i * N);
#pragma unroll
                for (int k = 0; k < N; k++) {
                    v.v[k] = from_float<T>(value(v.v[k]));
                }
                store16(x + cut.head + i * N, v);
            }
            for (int c = threadIdx.x; c < cut.head; c += stride) {
                checked(x + c) = from_float<T>(value(checked(x + c)));
            }
            for (int c = cut.tail + threadIdx.x; c < width; c += stride) {
                checked(x + c) = from_float<T>(value(checked(x + c)));
            }
        };
        if (target >= 0 && target < width) {
            const float of_target = to_float(x[target]);
            /* After it the target's logit is not read. */
            const float all = log_sum_exp(x, cut, width, get);
            write(Exponential<T>(all));
            const int by = target < cut.head   ? target
                           : target < cut.tail ? (target - cut.head) / N
                                               : target - cut.tail;
            if (by % stride == threadIdx.x) { /* the thread that wrote it corrects it */
                x[target] = from_float<T>(fast_exp2((of_target - all) * log2_e) - 1.0f);
                losses[row] = all - of_target;
            }
        } else {
            write([](T) { return 0.0f; });
            if (threadIdx.x == 0) {
                losses[row] = target < 0 ? 0.0f : NAN;
            }
        }
        if (AHEAD) {
            fetch(row + 2 * (int64_t)gridDim.x, slot);
        }
        target = next_target;
    }
}

nd_status check_columns(const char *op, int64_t columns) {
    return columns <= INT32_MAX - (1 << 20)
               ? ND_OK
               : nd_error(ND_EVALUE, "%s: logits: axis V is %lld: must be below 2^31 - 2^20", op,
                          (long long)columns);
}

int threads_for(int64_t columns) {
    return columns >= 16384 ? most_threads : columns >= 2048 ? 256 : 64;
}

} // namespace

nd_status cuda_mean_loss(const char *op, int device, const float *losses, const int32_t *targets,
                         float *loss, float *share, int64_t rows) {
    return cuda_launch(op, device, mean_kernel, 1, 1024, 0, losses, targets, loss, share, rows);
}

nd_status cuda_cross_entropy_fwd(int device, const cross_entropy_fwd_args *a) {
    const int64_t rows = a->logits->shape[0], columns = a->logits->shape[1];
    const int32_t *targets = data_of<int32_t>(a->targets);
    float *losses = data_of<float>(a->losses);
    ND_TRY(check_columns("cross_entropy_fwd", columns));
    return with_float("cross_entropy_fwd", a->logits->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        if (rows > 0) {
            ND_TRY(cuda_launch("cross_entropy_fwd", device, forward_kernel<T>,
                               cuda_grid(device, rows, 1024), threads_for(columns), 0,
                               data_of<T>(a->logits), targets, losses, rows, columns));
        }
        return cuda_mean_loss("cross_entropy_fwd", device, losses, targets, data_of<float>(a->loss),
                              nullptr, rows);
    });
}

nd_status cuda_cross_entropy_fwd_bwd(int device, const cross_entropy_fwd_bwd_args *a) {
    const char *op = "cross_entropy_fwd_bwd";
    const int64_t rows = a->logits->shape[0], columns = a->logits->shape[1];
    const cuda_limits *limits = cuda_device_limits(device);
    const int32_t *targets = data_of<int32_t>(a->targets);
    float *losses = data_of<float>(a->losses);
    ND_TRY(check_columns(op, columns));
    auto portable = [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const int64_t row_bytes = (columns * (int64_t)sizeof(T) + 31) / 16 * 16;
        const size_t two_rows = 2 * (size_t)row_bytes, reductions = 1024;
        const bool ahead = two_rows + reductions <= limits->block_shared;
        if (rows > 0) {
            auto *kernel = ahead ? both_kernel<T, true> : both_kernel<T, false>;
            const int threads = columns >= 16384 ? 1024 : threads_for(columns);
            const size_t shared = ahead ? two_rows : 0;
            const int fit = (int)(limits->block_shared / (shared + reductions));
            const int together = fit < 2048 / threads ? fit : 2048 / threads;
            ND_TRY(cuda_launch(op, device, kernel, cuda_grid(device, rows, together), threads,
                               shared, data_of<T>(a->logits), targets, losses, rows, columns,
                               row_bytes));
        }
        return ND_OK;
    };
    ND_TRY(cross_entropy_long_serves(device, a->logits)
               ? cross_entropy_long(device, a)
               : with_float(op, a->logits->dtype, portable));
    return cuda_mean_loss(op, device, losses, targets, data_of<float>(a->loss),
                          data_of<float>(a->share), rows);
}
