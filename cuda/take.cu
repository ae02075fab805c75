/* take.cu - elements by their places along an axis (take), and assignment to places (put).
 *
 * The walk is that of an assignment between y and x, in which the picked axis of x has stride 0 and
 * the id adds its place. Where one id picks a whole row, the row moves in words of up to 16 bytes;
 * where ids and y are contiguous rows, a thread reads two ids at once.
 * Bytes: each id read, each element read once and written once; a row of x may be read through L2
 * as often as blocks share it.
 */
#include "words.cuh"

namespace {

constexpr int threads = 256;

/* Operands of the walk: to, from, ids; it counts N elements that lie side by side in ids and in y.
 * The id counts steps of the picked axis of x: TAKE picks from `from`, and writes `none` for an id
 * outside; else the id picks from `to`. `across`: the other step of x, from one of the N to the
 * next. A block works on `parts` neighbouring parts, so that a row of x is read into one L1. */
template <class Word, bool TAKE, int N>
__global__ void __launch_bounds__(threads, N > 1 ? 5 : 1)
    pick_kernel(Word *to, const Word *from, const int64_t *ids, int64_t n, int64_t step,
                int64_t across, Word none, int parts, Walk<3> walk) {
    await_previous();
    struct alignas(N * sizeof(Word)) Words {
        Word v[N];
    };
    struct alignas(N * sizeof(int64_t)) Ids {
        int64_t v[N];
    };
    constexpr int unroll = 4;
    const int64_t part = threads * unroll;
    const int64_t end = ceil_div(walk.size, part);
    for (int64_t p = (int64_t)blockIdx.x * parts; p < end;
         p += (p + 1) % parts ? 1 : (int64_t)(gridDim.x - 1) * parts + 1) {
        const int64_t first = p * part + threadIdx.x;
        int64_t at[unroll][3];
        Ids id[unroll];
        Words words[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int64_t i = first + u * threads;
            at[u][0] = at[u][1] = at[u][2] = 0;
            if (i < walk.size) {
                if constexpr (N > 1) { /* rows of one length, fewer than 2^31 */
                    const uint32_t row = (uint32_t)i / (uint32_t)walk.shape[1];
                    const uint32_t column = (uint32_t)i - row * (uint32_t)walk.shape[1];
#pragma unroll
                    for (int k = 0; k < 3; k++) {
                        at[u][k] = row * walk.strides[k][0] + column * walk.strides[k][1];
                    }
                } else {
                    walk.add_offsets(i, at[u]);
                }
                id[u] = checked((const Ids *)(ids + at[u][2]));
            }
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int64_t i = first + u * threads;
            if (!TAKE && i < walk.size) {
                words[u] = checked((const Words *)(from + at[u][1]));
            }
#pragma unroll
            for (int k = 0; k < N && i < walk.size; k++) {
                id[u].v[k] += id[u].v[k] < 0 ? n : 0;
                ND_CHECK_INDEX("ids", i * N + k, id[u].v[k], n);
                const bool valid = (uint64_t)id[u].v[k] < (uint64_t)n;
                const int64_t place = at[u][TAKE ? 1 : 0] + id[u].v[k] * step + k * across;
                if (TAKE) {
                    words[u].v[k] = none;
                    if (valid) {
                        words[u].v[k] = checked(from + place);
                    }
                } else if (valid) {
                    checked(to + place) = words[u].v[k];
                }
            }
        }
        if (TAKE) {
#pragma unroll
            for (int u = 0; u < unroll; u++) {
                if (first + u * threads < walk.size) {
                    checked((Words *)(to + at[u][0])) = words[u];
                }
            }
        }
    }
}

/* `loop`: to, from, ids. */
template <class Word, bool TAKE>
nd_status pick(int device, nd_loop loop, void *to, const void *from, const nd_array *ids, int64_t n,
               int64_t step, const void *bits) {
    Word none;
    memcpy(&none, bits, sizeof none);
    const void *data[3] = {to, from, ids->data};
    if (loop.ndim == 1) { /* one row */
        loop.ndim = 2;
        loop.shape[1] = loop.shape[0];
        loop.shape[0] = 1;
        for (int k = 0; k < 3; k++) {
            loop.strides[k][1] = loop.strides[k][0];
            loop.strides[k][0] = 0;
        }
    }
    const int y = TAKE ? 0 : 1;
    int64_t across = 0;
    bool pairs =
        sizeof(Word) <= 8 && loop.ndim == 2 && loop.shape[1] % 2 == 0 && loop.size < INT32_MAX;
    for (int k : {y, 2}) {
        const size_t size = k == 2 ? sizeof(int64_t) : sizeof(Word);
        pairs = pairs && loop.strides[k][1] == 1 && loop.strides[k][0] % 2 == 0 &&
                (uintptr_t)data[k] % (2 * size) == 0;
    }
    if (pairs) {
        across = loop.strides[1 - y][1];
        loop.size /= 2;
        loop.shape[1] /= 2;
        for (int k = 0; k < 3; k++) {
            loop.strides[k][1] *= 2;
        }
    }
    const int64_t blocks = ceil_div<int64_t>(loop.size, threads * 4);
    const int parts = blocks < cuda_device_limits(device)->processors * 32 ? 1 : 4;
    const unsigned grid = cuda_grid(device, ceil_div<int64_t>(blocks, parts), 4096);
    constexpr int N = sizeof(Word) <= 8 ? 2 : 1;
    return cuda_launch(TAKE ? "take" : "put", device,
                       pairs ? pick_kernel<Word, TAKE, N> : pick_kernel<Word, TAKE, 1>, grid,
                       threads, 0, (Word *)to, (const Word *)from, data_of<int64_t>(ids), n, step,
                       across, none, parts, Walk<3>(loop));
}

template <bool TAKE>
nd_status move_by_ids(int device, nd_array *to, const nd_array *from, const nd_array *ids) {
    /* The picked axis has as many places as there are ids, all of them the first. */
    nd_array sides[2] = {*to, *from};
    nd_array *picked = &sides[TAKE ? 1 : 0];
    constexpr int axis = 2;
    const int64_t n = picked->shape[axis];
    int64_t step = picked->strides[axis];
    picked->shape[axis] = ids->shape[axis];
    picked->strides[axis] = 0;
    const nd_array *operands[3] = {&sides[0], &sides[1], ids};
    nd_loop loop;
    nd_collapse(3, operands, &loop);
    if (loop.size == 0) {
        return ND_OK;
    }
    const void *data[2] = {to->data, from->data};
    const size_t size = nd_dtype_size(to->dtype);
    int64_t words = 1;
    if (loop.ndim > 0 && loop.strides[2][loop.ndim - 1] == 0) {
        words = word_elements(loop, 2, data, size);
        while (step % words != 0) {
            words /= 2;
        }
        /* The ids are not counted in words, and have no stride along the axis that is. */
        widen(&loop, 2, words);
        step /= words;
    }
    unsigned char bits[16];
    repeated_bits(to->dtype, nd_dtype_is_float(to->dtype) ? NAN : -1, bits);
    switch (words * size) {
    case 1:
        return pick<uint8_t, TAKE>(device, loop, to->data, from->data, ids, n, step, bits);
    case 2:
        return pick<uint16_t, TAKE>(device, loop, to->data, from->data, ids, n, step, bits);
    case 4:
        return pick<uint32_t, TAKE>(device, loop, to->data, from->data, ids, n, step, bits);
    case 8:
        return pick<uint2, TAKE>(device, loop, to->data, from->data, ids, n, step, bits);
    default:
        return pick<uint4, TAKE>(device, loop, to->data, from->data, ids, n, step, bits);
    }
}

} // namespace

nd_status cuda_take(int device, const take_args *a) {
    return move_by_ids<true>(device, a->y, a->x, a->ids);
}

nd_status cuda_put(int device, const put_args *a) {
    return move_by_ids<false>(device, a->x, a->y, a->ids);
}
