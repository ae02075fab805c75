/* decode.cu - one step of generation: attention of a new token over its cache, and the next token.
 *
 * decode_attention. For row b with the new token at p = positions[b], each head h: q, k rotated by
 *     the angle of p and rounded;  keys[b, h, p] = k,  values[b, h, p] = v
 *     o = sum_{j <= p} softmax_j(scale q . keys[j]) values[j]
 *   A thread block owns a head, or one of `splits` equal splits of its cached keys where there are
 *   fewer heads than multiprocessors. In it, groups of G lanes take keys in turn: each lane holds P
 *   vectors of N dims of q, of the key and of the output, with a running maximum and sum; the
 *   groups meet in shared memory at the end. The first split also rotates and stores the new key
 *   and value and attends to them, so that no block reads another block's writes. With splits > 1
 *   the splits go through scratch to a second kernel. All sums have a fixed order. How a head is
 *   split depends on the shapes alone, never on positions, so that a captured graph stays right.
 *   Bytes: 2 (p + 1) D a head, once.
 *
 * decode_greedy. A thread block takes a row of logits: the first largest, or -1 where one is not
 *   finite. Reads the logits once.
 */
#include "common.cuh"

namespace {

constexpr int threads = 256, max_dims = 256;
constexpr int keys_a_split = 512; /* shorter splits cost more in the second kernel than they save */

/* N consecutive elements. */
template <class T, int N> struct alignas(sizeof(T) * N) Dims { T v[N]; };

template <class T, int N>
__device__ __forceinline__ void load_dims(const T *row, int at, int dims, Dims<T, N> &out) {
    out = at < dims ? checked((const Dims<T, N> *)(row + at)) : Dims<T, N>();
}

struct Decode {
    int64_t capacity, angles; /* S, X */
    int64_t o_row, o_head;    /* strides of o */
    int heads, dims, half, splits;
    float scale;
};

/* Where o of a head, b H + h, lies. */
template <class T> __device__ __forceinline__ T *o_of(T *o, const Decode &s, int64_t head) {
    return o + head / s.heads * s.o_row + head % s.heads * s.o_head;
}

/* A split leaves in scratch D sums, the maximum and the sum of weights. */
__device__ __forceinline__ float *share_of(float *scratch, int64_t block, int dims) {
    return scratch + block * (dims + 2);
}

/* unroll: keys that a group has in flight. */
template <class T, int N, int G, int P, int unroll>
__global__ void __launch_bounds__(threads)
    decode_attention_kernel(const T *qkv, const float *cosines, const float *sines,
                            const int32_t *positions, T *keys, T *values, T *o, float *scratch,
                            Decode s) {
    await_previous();
    constexpr int groups = threads / G;
    __shared__ float new_q[max_dims], new_k[max_dims];
    __shared__ float tops[groups], totals[groups];
    __shared__ float sums[groups * G * N * P];
    const int64_t head = (int64_t)blockIdx.x / s.splits; /* b H + h */
    const int split = (int)((int64_t)blockIdx.x % s.splits);
    const int64_t position = checked(positions + head / s.heads);
    ND_CHECK_INDEX("positions", head / s.heads, position, min(s.capacity, s.angles));
    const int tid = (int)threadIdx.x, lane = tid % G, group = tid / G;
    if (position < 0 || position >= s.capacity || position >= s.angles) {
        for (int d = tid; d < s.dims + 2; d += threads) {
            if (s.splits > 1) {
                share_of(scratch, blockIdx.x, s.dims)[d] = NAN;
            } else if (d < s.dims) {
                checked(o_of(o, s, head) + d) = from_float<T>(NAN);
            }
        }
        return;
    }
    const T *packed = qkv + head * 3 * s.dims;
    T *own_keys = keys + head * s.capacity * s.dims,
      *own_values = values + head * s.capacity * s.dims;
    for (int d = tid; d < s.dims; d += threads) {
        float q = to_float(packed[d]), k = to_float(packed[s.dims + d]);
        if (d < 2 * s.half) {
            const bool first = d < s.half;
            const int at = first ? d : d - s.half, other = first ? d + s.half : d - s.half;
            const float c = cosines[position * s.half + at];
            const float n = (first ? -1.0f : 1.0f) * sines[position * s.half + at];
            q = q * c + to_float(packed[other]) * n;
            k = k * c + to_float(packed[s.dims + other]) * n;
        }
        new_q[d] = to_float(from_float<T>(q));
        new_k[d] = to_float(from_float<T>(k));
        if (split == 0) {
            checked(own_keys + position * s.dims + d) = from_float<T>(k);
            checked(own_values + position * s.dims + d) = packed[2 * s.dims + d];
        }
    }
    __syncthreads();

    float q[P][N], acc[P][N];
#pragma unroll
    for (int p = 0; p < P; p++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int d = (p * G + lane) * N + n;
            q[p][n] = d < s.dims ? new_q[d] * s.scale : 0.0f;
            acc[p][n] = 0.0f;
        }
    }
    float top = -INFINITY, total = 0.0f;
    const int64_t chunk = ceil_div<int64_t>(position, s.splits);
    const int64_t start = chunk * split, end = min(start + chunk, position);
    for (int64_t base = start; base < end; base += groups * unroll) {
        Dims<T, N> k[unroll][P], v[unroll][P];
        float score[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int64_t key = base + u * groups + group;
            const int dims = key < end ? s.dims : 0;
#pragma unroll
            for (int p = 0; p < P; p++) {
                const int d = (p * G + lane) * N;
                load_dims<T, N>(own_keys + key * s.dims, d, dims, k[u][p]);
                load_dims<T, N>(own_values + key * s.dims, d, dims, v[u][p]);
            }
        }
        float highest = top;
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            float sum = 0.0f;
#pragma unroll
            for (int p = 0; p < P; p++) {
#pragma unroll
                for (int n = 0; n < N; n++) {
                    sum += q[p][n] * to_float(k[u][p].v[n]);
                }
            }
            sum = warp_sum<G>(sum);
            score[u] = base + u * groups + group < end ? sum : -INFINITY;
            highest = fmaxf(highest, score[u]);
        }
        if (base + group >= end) {
            continue; /* no key for this group: nothing below needs the other lanes */
        }
        const float shrink = expf(top - highest);
        top = highest;
        total *= shrink;
#pragma unroll
        for (int p = 0; p < P; p++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                acc[p][n] *= shrink;
            }
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const float weight = expf(score[u] - top);
            total += weight;
#pragma unroll
            for (int p = 0; p < P; p++) {
#pragma unroll
                for (int n = 0; n < N; n++) {
                    acc[p][n] += weight * to_float(v[u][p].v[n]);
                }
            }
        }
    }
#pragma unroll
    for (int p = 0; p < P; p++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            sums[group * (G * N * P) + (p * G + lane) * N + n] = acc[p][n];
        }
    }
    if (lane == 0) {
        tops[group] = top;
        totals[group] = total;
    }
    /* The new key, by all threads alike: D products, as the groups sum theirs. */
    float own = tid < s.dims ? new_q[tid] * s.scale * new_k[tid] : 0.0f;
    own = block_sum(own);
    __syncthreads();
    float highest = split == 0 ? own : -INFINITY;
    for (int g = 0; g < groups; g++) {
        highest = fmaxf(highest, tops[g]);
    }
    /* A split without keys weighs nothing; exp(-inf - -inf) would be NaN. */
    const float reference = highest == -INFINITY ? 0.0f : highest;
    float weight = split == 0 ? expf(own - reference) : 0.0f;
    float all = weight;
    float sum = tid < s.dims ? weight * to_float(packed[2 * s.dims + tid]) : 0.0f;
    for (int g = 0; g < groups; g++) {
        const float w = expf(tops[g] - reference);
        all += w * totals[g];
        if (tid < s.dims) {
            sum += w * sums[g * (G * N * P) + tid];
        }
    }
    if (s.splits == 1) {
        if (tid < s.dims) {
            checked(o_of(o, s, head) + tid) = from_float<T>(sum / all);
        }
        return;
    }
    float *to = share_of(scratch, blockIdx.x, s.dims);
    if (tid < s.dims) {
        to[tid] = sum;
    }
    if (tid == 0) {
        to[s.dims] = highest;
        to[s.dims + 1] = all;
    }
}

/* Shares of one head -> o. */
template <class T>
__global__ void __launch_bounds__(max_dims)
    decode_combine_kernel(const float *scratch, T *o, Decode s) {
    await_previous();
    const int dims = s.dims;
    const float *first = scratch + (int64_t)blockIdx.x * s.splits * (dims + 2);
    float top = first[dims], sum = 0.0f, all = 0.0f;
    for (int i = 1; i < s.splits; i++) {
        top = fmaxf(top, first[i * (dims + 2) + dims]);
    }
    for (int i = 0; i < s.splits; i++) {
        const float *split = first + i * (dims + 2);
        const float weight = expf(split[dims] - top);
        all += weight * split[dims + 1];
        if ((int)threadIdx.x < dims) {
            sum += weight * split[threadIdx.x];
        }
    }
    if ((int)threadIdx.x < dims) {
        checked(o_of(o, s, blockIdx.x) + threadIdx.x) = from_float<T>(sum / all);
    }
}

template <class T, int N, int G, int P>
nd_status decode(int device, const decode_attention_args *a, const Decode &s, int64_t heads) {
    void *scratch = nullptr;
    if (s.splits > 1) {
        ND_TRY(cuda_scratch(device, (size_t)(heads * s.splits * (s.dims + 2)) * sizeof(float),
                            &scratch));
    }
    /* Where blocks are few, waiting for keys is most of the time. */
    constexpr int most = P == 1 ? 8 : 4;
    const bool few = heads * s.splits <= cuda_device_limits(device)->processors;
    auto kernel =
        few ? decode_attention_kernel<T, N, G, P, most> : decode_attention_kernel<T, N, G, P, 4>;
    ND_TRY(cuda_launch("decode_attention", device, kernel, (unsigned)(heads * s.splits), threads, 0,
                       data_of<T>(a->qkv), data_of<float>(a->cos), data_of<float>(a->sin),
                       data_of<int32_t>(a->positions), data_of<T>(a->keys), data_of<T>(a->values),
                       data_of<T>(a->o), (float *)scratch, s));
    if (s.splits > 1) {
        ND_TRY(cuda_launch("decode_attention", device, decode_combine_kernel<T>, (unsigned)heads,
                           max_dims, 0, (const float *)scratch, data_of<T>(a->o), s));
    }
    return ND_OK;
}

/* ---- the next token -------------------------------------------------------------------------- */
struct Best {
    float value;
    int32_t at; /* -1: something is not finite */
};

__device__ __forceinline__ Best better(Best a, Best b) {
    if (a.at < 0 || b.at < 0) {
        return {a.value, -1};
    }
    const bool second = b.value > a.value || (b.value == a.value && b.at < a.at);
    return second ? b : a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        Best other;
        other.value = __shfl_xor_sync(0xffffffffu, best.value, offset);
        other.at = __shfl_xor_sync(0xffffffffu, best.at, offset);
        best = better(best, other);
    }
    return best;
}

constexpr int greedy_threads = 1024;

template <class T, int N>
__global__ void __launch_bounds__(greedy_threads)
    decode_greedy_kernel(const T *logits, int64_t vocabulary, int32_t *tokens, int32_t *positions) {
    await_previous();
    __shared__ Best warps[32];
    const T *row = logits + blockIdx.x * vocabulary;
    Best best = {-INFINITY, 0x7fffffff};
    bool finite = true;
    for (int64_t i = (int64_t)threadIdx.x * N; i < vocabulary; i += greedy_threads * N) {
        Dims<T, N> x;
        load_dims<T, N>(row + i, 0, 1, x);
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float value = to_float(x.v[k]);
            finite = finite && value - value == 0.0f;
            if (value > best.value) {
                best = {value, (int32_t)(i + k)};
            }
        }
    }
    if (!finite) {
        best.at = -1;
    }
    best = warp_best(best);
    if ((threadIdx.x & 31) == 0) {
        warps[threadIdx.x >> 5] = best;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        best = warp_best(warps[threadIdx.x]);
        if (threadIdx.x == 0) {
            tokens[blockIdx.x] = best.at;
            positions[blockIdx.x] += 1;
        }
    }
}

} // namespace

nd_status cuda_decode_attention(int device, const decode_attention_args *a) {
    const char *op = "decode_attention";
    const int64_t *shape = a->qkv->shape;
    const int64_t heads = shape[0] * shape[1], dims = shape[3], half = a->cos->shape[1];
    if (shape[2] != 3) {
        return nd_error(ND_EVALUE, "%s: qkv: axis P is %lld, must be 3: q, k and v", op,
                        (long long)shape[2]);
    }
    if (dims > max_dims) {
        return nd_error(ND_EVALUE, "%s: qkv: head dim %lld is above the limit of %d", op,
                        (long long)dims, max_dims);
    }
    if (2 * half > dims) {
        return nd_error(ND_EVALUE, "%s: cos: rotates 2 x %lld dims, but a head has %lld", op,
                        (long long)half, (long long)dims);
    }
    if (heads == 0 || dims == 0) {
        return ND_OK;
    }
    Decode s;
    s.capacity = a->keys->shape[2];
    s.angles = a->cos->shape[0];
    s.o_row = a->o->strides[0];
    s.o_head = a->o->strides[1];
    s.heads = (int)shape[1];
    s.dims = (int)dims;
    s.half = (int)half;
    s.scale = (float)a->scale;
    int64_t processors = cuda_device_limits(device)->processors;
    int64_t wanted = heads < processors ? ceil_div(processors, heads) : 1;
    int64_t most = ceil_div<int64_t>(s.capacity, keys_a_split);
    s.splits = (int)(wanted < most ? wanted : most > 0 ? most : 1);
    if (heads * s.splits > 0x7fffffff) {
        return nd_error(ND_EVALUE, "%s: qkv: %lld heads in all: must be below 2^31", op,
                        (long long)heads);
    }
    return with_float(op, a->qkv->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        if (dims % N != 0) {
            return decode<T, 1, 32, max_dims / 32>(device, a, s, heads);
        }
        if (dims <= 8 * N) {
            return decode<T, N, 8, 1>(device, a, s, heads);
        }
        if (dims <= 16 * N) {
            return decode<T, N, 16, 1>(device, a, s, heads);
        }
        return decode<T, N, 32, max_dims / (32 * N)>(device, a, s, heads);
    });
}

nd_status cuda_decode_greedy(int device, const decode_greedy_args *a) {
    const int64_t rows = a->logits->shape[0], vocabulary = a->logits->shape[1];
    if (vocabulary == 0 || vocabulary > 0x7fffffff) {
        return nd_error(ND_EVALUE, "decode_greedy: logits: %lld tokens to choose from",
                        (long long)vocabulary);
    }
    if (rows == 0) {
        return ND_OK;
    }
    return with_float("decode_greedy", a->logits->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        const T *logits = data_of<T>(a->logits);
        int32_t *tokens = data_of<int32_t>(a->tokens), *positions = data_of<int32_t>(a->positions);
        auto kernel = vocabulary % N == 0 ? decode_greedy_kernel<T, N> : decode_greedy_kernel<T, 1>;
        return cuda_launch("decode_greedy", device, kernel, (unsigned)rows, greedy_threads, 0,
                           logits, vocabulary, tokens, positions);
    });
}
