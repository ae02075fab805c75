/* copy.cu - assign (to = from, any dtypes, any strides) and fill.
 *
 * assign: equal dtypes, both contiguous and not small: one device copy. Equal dtypes otherwise:
 * bits are moved in the widest words (1 to 16 bytes) that the innermost axis and all strides allow,
 * so a permuted view whose last axis stays is copied 16 bytes at a time. Float to float, both
 * contiguous and aligned: eight elements a thread. All other pairs: an element a thread, dtypes at
 * run time.
 * fill: zero bits on contiguous memory that is not small is a memset; otherwise a store an element
 * (16 bytes a store when contiguous). The kernels around a copy or memset do not overlap with it.
 * Bytes: each element read once and written once.
 */
#include "words.cuh"

namespace {

constexpr int threads = 256;
constexpr size_t small = (size_t)64 << 10; /* bytes */

template <class Word>
__global__ void __launch_bounds__(threads) move_kernel(Word *to, const Word *from, Walk<2> walk) {
    await_previous();
    constexpr int unroll = 4;
    const int64_t step = (int64_t)gridDim.x * threads;
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < walk.size;
         i += step * unroll) {
        Word words[unroll];
        int64_t target[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            int64_t at[2] = {0, 0};
            if (i + u * step < walk.size) {
                walk.add_offsets(i + u * step, at);
                words[u] = checked(from + at[1]);
            }
            target[u] = at[0];
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            if (i + u * step < walk.size) {
                checked(to + target[u]) = words[u];
            }
        }
    }
}

/* Eight contiguous elements a thread; `tail` more after the last eight. */
template <class To, class From>
__global__ void __launch_bounds__(threads)
    convert_kernel(To *to, const From *from, int64_t groups, int tail) {
    await_previous();
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < groups;
         i += (int64_t)gridDim.x * threads) {
        Vec<From> in[8 / Vec<From>::size];
        Vec<To> out[8 / Vec<To>::size];
#pragma unroll
        for (int k = 0; k < 8 / Vec<From>::size; k++) {
            in[k] = load16(from + i * 8 + k * Vec<From>::size);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k / Vec<To>::size].v[k % Vec<To>::size] =
                from_float<To>(to_float(in[k / Vec<From>::size].v[k % Vec<From>::size]));
        }
#pragma unroll
        for (int k = 0; k < 8 / Vec<To>::size; k++) {
            store16(to + i * 8 + k * Vec<To>::size, out[k]);
        }
    }
    if (blockIdx.x == 0 && (int)threadIdx.x < tail) {
        int64_t i = groups * 8 + threadIdx.x;
        checked(to + i) = from_float<To>(to_float(checked(from + i)));
    }
}

/* to: page-locked memory of the host. */
__global__ void __launch_bounds__(threads)
    send_kernel(unsigned char *to, const unsigned char *from, size_t bytes) {
    await_previous();
    for (size_t i = threadIdx.x; i < bytes; i += threads) {
        to[i] = from[i];
    }
}

template <class V>
__global__ void __launch_bounds__(threads)
    assign_kernel(void *to, nd_dtype to_dtype, const void *from, nd_dtype from_dtype,
                  Walk<2> walk) {
    await_previous();
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < walk.size;
         i += (int64_t)gridDim.x * threads) {
        int64_t at[2] = {0, 0};
        walk.add_offsets(i, at);
        store_as<V>(to, at[0], to_dtype, load_as<V>(from, at[1], from_dtype));
    }
}

template <class Word>
__global__ void __launch_bounds__(threads) fill_kernel(Word *to, Word value, Walk<1> walk) {
    await_previous();
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < walk.size;
         i += (int64_t)gridDim.x * threads) {
        int64_t at[1] = {0};
        walk.add_offsets(i, at);
        checked(to + at[0]) = value;
    }
}

bool is_flat(const nd_loop &loop, int operands) {
    for (int k = 0; k < operands; k++) {
        if (loop.ndim > 1 || (loop.ndim == 1 && loop.strides[k][0] != 1)) {
            return false;
        }
    }
    return true;
}

template <class Word> nd_status move(int device, void *to, const void *from, const nd_loop &loop) {
    unsigned grid = cuda_grid(device, ceil_div<int64_t>(loop.size, threads * 4), 4096);
    return cuda_launch("assign", device, move_kernel<Word>, grid, threads, 0, (Word *)to,
                       (const Word *)from, Walk<2>(loop));
}

nd_status move_bits(int device, void *to, const void *from, nd_loop loop, size_t size) {
    const void *data[2] = {to, from};
    int64_t n = word_elements(loop, 2, data, size);
    widen(&loop, 2, n);
    switch (n * size) {
    case 1:
        return move<uint8_t>(device, to, from, loop);
    case 2:
        return move<uint16_t>(device, to, from, loop);
    case 4:
        return move<uint32_t>(device, to, from, loop);
    case 8:
        return move<uint2>(device, to, from, loop);
    default:
        return move<uint4>(device, to, from, loop);
    }
}

nd_status convert_floats(int device, const nd_array *to, const nd_array *from, int64_t size) {
    return with_float("assign", to->dtype, [&](auto to_tag) -> nd_status {
        return with_float("assign", from->dtype, [&](auto from_tag) -> nd_status {
            using To = typename decltype(to_tag)::type;
            using From = typename decltype(from_tag)::type;
            unsigned grid = cuda_grid(device, ceil_div<int64_t>(size / 8, threads), 4096);
            return cuda_launch("assign", device, convert_kernel<To, From>, grid, threads, 0,
                               (To *)to->data, (const From *)from->data, size / 8, (int)(size % 8));
        });
    });
}

template <class Word> nd_status fill(int device, void *to, const void *bits, const nd_loop &loop) {
    Word value;
    memcpy(&value, bits, sizeof value);
    unsigned grid = cuda_grid(device, ceil_div<int64_t>(loop.size, threads), 64);
    return cuda_launch("fill", device, fill_kernel<Word>, grid, threads, 0, (Word *)to, value,
                       Walk<1>(loop));
}

} // namespace

nd_status cuda_assign(int device, const assign_args *a) {
    const nd_array *operands[2] = {a->to, a->source};
    nd_loop loop;
    nd_collapse(2, operands, &loop);
    if (loop.size == 0) {
        return ND_OK;
    }
    void *to = a->to->data;
    const void *from = a->source->data;
    size_t size = nd_dtype_size(a->to->dtype);
    bool flat = is_flat(loop, 2);
    if (a->to->dtype == a->source->dtype) {
        if (flat && (size_t)loop.size * size > small) {
            CUDA_TRY("assign", cudaMemcpyAsync(to, from, (size_t)loop.size * size,
                                               cudaMemcpyDeviceToDevice, cuda_stream(device)));
            return ND_OK;
        }
        return move_bits(device, to, from, loop, size);
    }
    bool from_float = nd_dtype_is_float(a->source->dtype);
    if (flat && from_float && nd_dtype_is_float(a->to->dtype) && is_aligned16(to) &&
        is_aligned16(from)) {
        return convert_floats(device, a->to, a->source, loop.size);
    }
    unsigned grid = cuda_grid(device, ceil_div<int64_t>(loop.size, threads), 4096);
    auto kernel = from_float ? assign_kernel<float> : assign_kernel<int64_t>;
    return cuda_launch("assign", device, kernel, grid, threads, 0, to, a->to->dtype, from,
                       a->source->dtype, Walk<2>(loop));
}

nd_status cuda_send(const char *op, int device, const void *from, size_t bytes, void *to) {
    if (bytes > 1024) {
        CUDA_TRY(op, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cuda_stream(device)));
        return ND_OK;
    }
    return bytes == 0 ? ND_OK
                      : cuda_launch(op, device, send_kernel, 1, threads, 0, (unsigned char *)to,
                                    (const unsigned char *)from, bytes);
}

nd_status cuda_fill(int device, const fill_args *a) {
    const nd_array *operands[1] = {a->to};
    nd_loop loop;
    nd_collapse(1, operands, &loop);
    if (loop.size == 0) {
        return ND_OK;
    }
    void *to = a->to->data;
    size_t size = nd_dtype_size(a->to->dtype);
    unsigned char bits[16];
    repeated_bits(a->to->dtype, a->value, bits);
    uint64_t one = 0;
    memcpy(&one, bits, size);
    const bool is_large = (size_t)loop.size * size > small;
    if (is_flat(loop, 1) && is_large && (one == 0 || size == 1)) {
        CUDA_TRY("fill",
                 cudaMemsetAsync(to, bits[0], (size_t)loop.size * size, cuda_stream(device)));
        return ND_OK;
    }
    const void *data[1] = {to};
    int64_t n = word_elements(loop, 1, data, size);
    widen(&loop, 1, n);
    switch (n * size) {
    case 1:
        return fill<uint8_t>(device, to, bits, loop);
    case 2:
        return fill<uint16_t>(device, to, bits, loop);
    case 4:
        return fill<uint32_t>(device, to, bits, loop);
    case 8:
        return fill<uint2>(device, to, bits, loop);
    default:
        return fill<uint4>(device, to, bits, loop);
    }
}
