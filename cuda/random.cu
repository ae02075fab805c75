/* random.cu - random bits, dropout and tokens, from the words of philox.h.
 *
 *   y[i] = x[i] m[i],  m[i] = 1 / (1 - p) where word i is at least 2^32 p, else 0
 * The backward draws m again, so that no mask is kept. The state lies in the device's memory: a
 * kernel of one thread copies it and advances it, and the kernel after that reads the copy, so that
 * no block reads a state that has moved on. A thread takes 16 bytes, or an element of the last few:
 * words of whole blocks of 4.
 * Tokens: a thread block takes a row of logits, each of its warps a part. The warp in whose part
 * the drawn sum falls looks for it there, 32 weights at a time.
 * Bytes: x read, y written, once each; 80 operations on integers for 4 elements; logits twice.
 */
#include "../csrc/philox.h"
#include "common.cuh"

namespace {

constexpr int threads = 256;

__global__ void advance_kernel(int64_t *state, int64_t words, int64_t *before) {
    await_previous();
    for (int i = 0; i < ND_STATE_SIZE; i++) {
        before[i] = state[i];
    }
    nd_philox_advance(state, words);
}

__global__ void __launch_bounds__(threads)
    bits_kernel(const int64_t *state, int32_t *bits, int64_t size) {
    await_previous();
    const nd_philox_state from = nd_philox_read(state);
    for (int64_t block = (int64_t)blockIdx.x * threads + threadIdx.x;
         block * ND_PHILOX_WORDS < size; block += (int64_t)gridDim.x * threads) {
        const nd_philox_words drawn = nd_philox(from, (uint64_t)block);
#pragma unroll
        for (int k = 0; k < ND_PHILOX_WORDS; k++) {
            if (block * ND_PHILOX_WORDS + k < size) {
                checked(bits + block * ND_PHILOX_WORDS + k) = (int32_t)drawn.word[k];
            }
        }
    }
}

template <class T>
__global__ void __launch_bounds__(threads) dropout_kernel(const int64_t *state, const T *x, T *y,
                                                          int64_t size, uint32_t cut, float scale) {
    await_previous();
    constexpr int N = Vec<T>::size;
    const nd_philox_state from = nd_philox_read(state);
    for (int64_t at = ((int64_t)blockIdx.x * threads + threadIdx.x) * N; at < size;
         at += (int64_t)gridDim.x * threads * N) {
        const bool whole = at + N <= size;
        Vec<T> v;
        if (whole) {
            v = load16(x + at);
        }
#pragma unroll
        for (int k = 0; k < N; k += ND_PHILOX_WORDS) {
            const nd_philox_words drawn = nd_philox(from, (uint64_t)(at + k) / ND_PHILOX_WORDS);
#pragma unroll
            for (int j = 0; j < ND_PHILOX_WORDS; j++) {
                if (whole) {
                    v.v[k + j] =
                        from_float<T>(nd_dropped(to_float(v.v[k + j]), drawn.word[j], cut, scale));
                } else if (at + k + j < size) {
                    checked(y + at + k + j) = from_float<T>(
                        nd_dropped(to_float(checked(x + at + k + j)), drawn.word[j], cut, scale));
                }
            }
        }
        if (whole) {
            store16(y + at, v);
        }
    }
}

constexpr int row_threads = 1024;

template <class T>
__global__ void __launch_bounds__(row_threads)
    tokens_kernel(const int64_t *state, const T *logits, int64_t vocabulary, double temperature,
                  int32_t *tokens, int32_t *positions) {
    await_previous();
    __shared__ double sums[row_threads / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const T *row = logits + blockIdx.x * vocabulary;
    float top = -INFINITY;
    int broken = 0;
    for (int64_t i = threadIdx.x; i < vocabulary; i += row_threads) {
        const float x = to_float(checked(row + i));
        broken |= !(x < INFINITY);
        top = fmaxf(top, x);
    }
    top = block_max(top);
    if (__syncthreads_or(broken) || top == -INFINITY) {
        if (threadIdx.x == 0) {
            checked(tokens + blockIdx.x) = -1;
            checked(positions + blockIdx.x) += 1;
        }
        return;
    }
    const int64_t part = ceil_div<int64_t>(vocabulary, row_threads) * 32;
    const int64_t first = warp * part, end = min(first + part, vocabulary);
    double sum = 0;
    for (int64_t i = first + lane; i < end; i += 32) {
        sum += (double)nd_token_weight(to_float(checked(row + i)), top, temperature);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (lane == 0) {
        sums[warp] = sum;
    }
    __syncthreads();
    double all = 0, before = 0;
    int last = 0; /* warp with any weight */
    for (int w = 0; w < row_threads / 32; w++) {
        all += sums[w];
        last = sums[w] > 0 ? w : last;
    }
    const double most = nd_uniform(nd_philox(nd_philox_read(state), (uint64_t)blockIdx.x)) * all;
    int chosen = 0;
    while (chosen < last && !(before + sums[chosen] > most)) {
        before += sums[chosen];
        chosen++;
    }
    if (warp != chosen) {
        return;
    }
    int64_t token = -1;
    for (int64_t base = first; base < end; base += 32) {
        const bool mine = base + lane < end;
        const double weight =
            mine ? (double)nd_token_weight(to_float(checked(row + base + lane)), top, temperature)
                 : 0;
        double upto = weight;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double other = __shfl_up_sync(0xffffffffu, upto, step);
            upto += lane >= step ? other : 0;
        }
        const uint32_t some = __ballot_sync(0xffffffffu, weight > 0);
        const uint32_t beyond = __ballot_sync(0xffffffffu, weight > 0 && before + upto > most);
        if (some) {
            token = base + (beyond ? __ffs((int)beyond) - 1 : 31 - __clz((int)some));
        }
        if (beyond) {
            break;
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
    if (lane == 0) {
        checked(tokens + blockIdx.x) = (int32_t)token;
        checked(positions + blockIdx.x) += 1;
    }
}

nd_status drop(const char *op, int device, const int64_t *state, const nd_array *x, double p,
               nd_array *y) {
    const int64_t size = x->shape[0];
    if (size == 0) {
        return ND_OK;
    }
    return with_float(op, x->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        const unsigned grid =
            cuda_grid(device, ceil_div<int64_t>(size, threads * Vec<T>::size), 64);
        return cuda_launch(op, device, dropout_kernel<T>, grid, threads, 0, state, data_of<T>(x),
                           data_of<T>(y), size, nd_dropout_cut(p), (float)(1 / (1 - p)));
    });
}

} // namespace

nd_status cuda_random_bits(int device, const random_bits_args *a) {
    const char *op = "random_bits";
    ND_TRY(nd_check_state(op, "state", a->state));
    const int64_t size = a->bits->shape[0];
    void *before;
    ND_TRY(cuda_scratch(device, ND_STATE_SIZE * sizeof(int64_t), &before));
    ND_TRY(cuda_launch(op, device, advance_kernel, 1, 1, 0, data_of<int64_t>(a->state), size,
                       (int64_t *)before));
    if (size == 0) {
        return ND_OK;
    }
    const unsigned grid = cuda_grid(device, ceil_div<int64_t>(size, threads * ND_PHILOX_WORDS), 64);
    return cuda_launch(op, device, bits_kernel, grid, threads, 0, (const int64_t *)before,
                       data_of<int32_t>(a->bits), size);
}

nd_status cuda_dropout_fwd(int device, const dropout_fwd_args *a) {
    const char *op = "dropout_fwd";
    ND_TRY(nd_check_dropout(op, "state", a->state, a->p));
    int64_t *drawn = data_of<int64_t>(a->drawn);
    ND_TRY(cuda_launch(op, device, advance_kernel, 1, 1, 0, data_of<int64_t>(a->state),
                       a->x->shape[0], drawn));
    return drop(op, device, drawn, a->x, a->p, a->y);
}

nd_status cuda_dropout_bwd(int device, const dropout_bwd_args *a) {
    const char *op = "dropout_bwd";
    ND_TRY(nd_check_dropout(op, "drawn", a->drawn, a->p));
    return drop(op, device, data_of<int64_t>(a->drawn), a->dy, a->p, a->dx);
}

nd_status cuda_random_tokens(int device, const random_tokens_args *a) {
    const char *op = "random_tokens";
    ND_TRY(nd_check_random_tokens(a->state, a->logits, a->temperature));
    const int64_t rows = a->logits->shape[0];
    void *before;
    ND_TRY(cuda_scratch(device, ND_STATE_SIZE * sizeof(int64_t), &before));
    ND_TRY(cuda_launch(op, device, advance_kernel, 1, 1, 0, data_of<int64_t>(a->state),
                       rows * ND_PHILOX_WORDS, (int64_t *)before));
    if (rows == 0) {
        return ND_OK;
    }
    return with_float(op, a->logits->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        return cuda_launch(op, device, tokens_kernel<T>, (unsigned)rows, row_threads, 0,
                           (const int64_t *)before, data_of<T>(a->logits), a->logits->shape[1],
                           a->temperature, data_of<int32_t>(a->tokens),
                           data_of<int32_t>(a->positions));
    });
}
