/* decode.cu - one step of generation: attention of a new token over its cache, and the next token.
 *
 * decode_attention. For row b with the new token at p = positions[b], each head h: q, k rotated by
 *     the angle of p and rounded;  keys[b, h, p] = k,  values[b, h, p] = v
 *     o = sum_{j <= p} softmax_j(scale q . keys[j]) values[j]
 *   A thread block owns a head, or one of `splits` equal splits of its cached keys where there are
 *   fewer heads than multiprocessors. In it, groups of G lanes take keys in turn: each lane holds P
 *   vectors of N dims of q, of the key and of the output, with a running maximum and sum. The groups
 *   of a warp meet through shuffles, the warps in shared memory at the end. The first split also
 *   rotates and stores the new key and value, and its first group begins with them, so that no block
 *   reads another block's writes. With splits > 1 the splits go through scratch to a second kernel.
 *   All sums have a fixed order. How a head is split depends on the shapes alone, never on positions,
 *   so that a captured graph stays right.
 *   Bytes: 2 (p + 1) D a head, once.
 *
 * decode_greedy. A thread block takes a row of logits: the first largest, or -1 where one is NaN
 *   or inf, or all are -inf. Reads the logits once.
 */
#include "common.cuh"

namespace {

constexpr int max_dims = 256;
constexpr int keys_a_split = 512; /* shorter splits cost more in the second kernel than they save */

/* N consecutive elements as memory holds them: one, or those of 16 bytes. */
template <class T, int N> using Dims = std::conditional_t<N == 1, T, uint4>;

template <class T, int N>
__device__ __forceinline__ Dims<T, N> load_dims(const T *row, int at, int dims) {
    return at < dims ? checked((const Dims<T, N> *)(row + at)) : Dims<T, N>{};
}

/* Beside to_floats() of 16 bytes. */
template <class T> __device__ __forceinline__ void to_floats(T element, float (&x)[1]) {
    x[0] = to_float(element);
}

struct Decode {
    int64_t capacity, angles; /* S, X */
    int64_t o_row, o_head;    /* strides of o */
    int heads, dims, half, splits;
    bool ahead; /* the cache is read before the work before is done */
    float scale;
};

/* Where o of a head, b H + h, lies. */
template <class T> __device__ __forceinline__ T *o_of(T *o, const Decode &s, int head) {
    return o + head / s.heads * s.o_row + head % s.heads * s.o_head;
}

/* A split leaves in scratch D sums, the maximum and the sum of weights. */
__device__ __forceinline__ float *share_of(float *scratch, int64_t block, int dims) {
    return scratch + block * (dims + 2);
}

/* Over the lanes of a warp that are multiples of G apart, in a fixed order. */
template <int G, class Op> __device__ __forceinline__ float across_groups(float v, Op op) {
#pragma unroll
    for (int offset = 16; offset >= G; offset /= 2) {
        v = op(v, __shfl_xor_sync(0xffffffffu, v, offset));
    }
    return v;
}

/* What exp() is taken of has this subtracted; exp(-inf - -inf) would be NaN. */
__device__ __forceinline__ float reference_of(float top) { return top == -INFINITY ? 0.0f : top; }

/* unroll: keys that a group has in flight. */
template <class T, int N, int G, int P, int unroll, int threads>
__global__ void __launch_bounds__(threads)
    decode_attention_kernel(const T *qkv, const float *cosines, const float *sines,
                            const int32_t *positions, T *keys, T *values, T *o, float *scratch,
                            Decode s) {
    await_previous(s.ahead);
    constexpr int groups = threads / G, warps = threads / 32, width = G * N * P;
    static_assert(threads >= max_dims, "a thread rotates one dim");
    __shared__ float new_q[max_dims], new_k[max_dims];
    __shared__ float tops[warps], totals[warps], sums[warps * width];
    const int head = (int)(blockIdx.x / (unsigned)s.splits); /* b H + h */
    const int split = (int)(blockIdx.x % (unsigned)s.splits);
    const int tid = (int)threadIdx.x, lane = tid % G, group = tid / G;
    const int64_t position = checked(positions + head / s.heads);
    const bool inside = position >= 0 && position < s.capacity && position < s.angles;
    const int cached = inside ? (int)position : 0, chunk = ceil_div(cached, s.splits);
    const int start = chunk * split, end = min(start + chunk, cached);
    const bool has_dim = tid < s.dims, rotates = tid < 2 * s.half, first = tid < s.half;
    const int other = first ? tid + s.half : tid - s.half;
    T *own_keys = keys + head * s.capacity * s.dims,
      *own_values = values + head * s.capacity * s.dims;
    Dims<T, N> k[unroll][P], v[unroll][P];
    auto load = [&](int base) {
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int key = base + u * groups + group;
            const int dims = key < end ? s.dims : 0;
#pragma unroll
            for (int p = 0; p < P; p++) {
                const int d = (p * G + lane) * N;
                k[u][p] = load_dims<T, N>(own_keys + (int64_t)key * s.dims, d, dims);
                v[u][p] = load_dims<T, N>(own_values + (int64_t)key * s.dims, d, dims);
            }
        }
    };
    load(start);
    float cosine = 1.0f, sine = 0.0f;
    if (rotates && inside) {
        const int64_t angle = position * s.half + (first ? tid : other);
        cosine = cosines[angle];
        sine = (first ? -1.0f : 1.0f) * sines[angle];
    }
    if (s.ahead) {
        await_previous();
    }

    const T *packed = qkv + (int64_t)head * 3 * s.dims;
    float q_d = 0.0f, k_d = 0.0f, q_other = 0.0f, k_other = 0.0f;
    if (has_dim) {
        q_d = to_float(packed[tid]);
        k_d = to_float(packed[s.dims + tid]);
    }
    if (rotates) {
        q_other = to_float(packed[other]);
        k_other = to_float(packed[s.dims + other]);
    }
    const bool has_new = split == 0 && group == 0; /* this group attends to the new key */
    Dims<T, N> new_v[P];
#pragma unroll
    for (int p = 0; p < P; p++) {
        new_v[p] = load_dims<T, N>(packed + 2 * s.dims, (p * G + lane) * N, has_new ? s.dims : 0);
    }
    ND_CHECK_INDEX("positions", head / s.heads, position, min(s.capacity, s.angles));
    if (!inside) {
        for (int d = tid; d < s.dims + 2; d += threads) {
            if (s.splits > 1) {
                share_of(scratch, blockIdx.x, s.dims)[d] = NAN;
            } else if (d < s.dims) {
                checked(o_of(o, s, head) + d) = from_float<T>(NAN);
            }
        }
        return;
    }
    if (has_dim) {
        const T new_key = from_float<T>(k_d * cosine + k_other * sine);
        new_q[tid] = to_float(from_float<T>(q_d * cosine + q_other * sine));
        new_k[tid] = to_float(new_key);
        if (split == 0) {
            checked(own_keys + position * s.dims + tid) = new_key;
        }
    }
    __syncthreads();

    float q[P][N], acc[P][N], own = 0.0f;
#pragma unroll
    for (int p = 0; p < P; p++) {
        const int first_d = (p * G + lane) * N;
        if (has_new && first_d < s.dims) {
            checked((Dims<T, N> *)(own_values + position * s.dims + first_d)) = new_v[p];
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int d = first_d + n;
            q[p][n] = d < s.dims ? new_q[d] * s.scale : 0.0f;
            own += d < s.dims ? q[p][n] * new_k[d] : 0.0f;
        }
        to_floats<T>(new_v[p], acc[p]);
    }
    own = warp_sum<G>(own);
    float top = has_new ? own : -INFINITY, total = has_new ? 1.0f : 0.0f;
    for (int base = start; base < end; base += groups * unroll) {
        float score[unroll], highest = top;
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            score[u] = -INFINITY;
            if (u > 0 && base + u * groups >= end) { /* for all groups */
                continue;
            }
            float sum = 0.0f;
#pragma unroll
            for (int p = 0; p < P; p++) {
                float key[N];
                to_floats<T>(k[u][p], key);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    sum += q[p][n] * key[n];
                }
            }
            sum = warp_sum<G>(sum);
            score[u] = base + u * groups + group < end ? sum : -INFINITY;
            highest = fmaxf(highest, score[u]);
        }
        const float shrink = expf(top - reference_of(highest));
        top = highest;
        /* The first key also shrinks the sums. fmaf says which product is not rounded: the compiler
         * chooses by the branches around it. */
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            if (u > 0 && base + u * groups >= end) {
                continue;
            }
            const float weight = expf(score[u] - reference_of(top));
            total = u == 0 ? fmaf(total, shrink, weight) : total + weight;
#pragma unroll
            for (int p = 0; p < P; p++) {
                float value[N];
                to_floats<T>(v[u][p], value);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    acc[p][n] = u == 0 ? fmaf(acc[p][n], shrink, weight * value[n])
                                       : fmaf(weight, value[n], acc[p][n]);
                }
            }
        }
        if (base + groups * unroll < end) {
            load(base + groups * unroll);
        }
    }

    /* The groups of a warp, then the warps. */
    const int warp = tid / 32, warp_lane = tid % 32;
    const float warp_top = across_groups<G>(top, MaxOp());
    const float share = expf(top - reference_of(warp_top));
    total = across_groups<G>(total * share, SumOp());
#pragma unroll
    for (int p = 0; p < P; p++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float sum = across_groups<G>(acc[p][n] * share, SumOp());
            if (warp_lane < G) {
                sums[warp * width + (p * G + lane) * N + n] = sum;
            }
        }
    }
    if (warp_lane == 0) {
        tops[warp] = warp_top;
        totals[warp] = total;
    }
    __syncthreads();
    if (!has_dim) {
        return;
    }
    float highest = -INFINITY;
#pragma unroll
    for (int w = 0; w < warps; w++) {
        highest = fmaxf(highest, tops[w]);
    }
    float all = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < warps; w++) {
        const float weight = expf(tops[w] - reference_of(highest));
        all += weight * totals[w];
        sum += weight * sums[w * width + tid];
    }
    if (s.splits == 1) {
        checked(o_of(o, s, head) + tid) = from_float<T>(sum / all);
        return;
    }
    float *to = share_of(scratch, blockIdx.x, s.dims);
    to[tid] = sum;
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
        checked(o_of(o, s, (int)blockIdx.x) + threadIdx.x) = from_float<T>(sum / all);
    }
}

template <class T, int N, int G, int P>
nd_status decode(int device, const decode_attention_args *a, Decode s, int64_t heads) {
    void *scratch = nullptr;
    if (s.splits > 1) {
        ND_TRY(cuda_scratch(device, (size_t)(heads * s.splits * (s.dims + 2)) * sizeof(float),
                            &scratch));
    }
    /* Where blocks are few, waiting for keys is most of the time. */
    constexpr int most = P == 1 ? 8 : 2;
    const bool few = heads * s.splits <= cuda_device_limits(device)->processors;
    auto kernel = few ? decode_attention_kernel<T, N, G, P, most, 512>
                      : decode_attention_kernel<T, N, G, P, 4, 256>;
    ND_TRY(cuda_launch("decode_attention", device, kernel, (unsigned)(heads * s.splits),
                       few ? 512 : 256, 0, data_of<T>(a->qkv), data_of<float>(a->cos),
                       data_of<float>(a->sin), data_of<int32_t>(a->positions), data_of<T>(a->keys),
                       data_of<T>(a->values), data_of<T>(a->o), (float *)scratch, s));
    if (s.splits > 1) {
        ND_TRY(cuda_launch("decode_attention", device, decode_combine_kernel<T>, (unsigned)heads,
                           max_dims, 0, (const float *)scratch, data_of<T>(a->o), s));
    }
    return ND_OK;
}

/* ---- the next token -------------------------------------------------------------------------- */
constexpr int greedy_threads = 1024;

/* Over the block, for all threads; each call has a `parts` of its own. */
template <class V, class Op> __device__ __forceinline__ V block_wide(V v, V (&parts)[32], Op op) {
    v = warp_reduce(v, op);
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = v;
    }
    __syncthreads();
    return warp_reduce(parts[threadIdx.x % 32], op);
}

/* A thread knows the largest logit of its vectors, and the vector; those whose is the largest of all
 * find its place. NaN is the largest. */
template <class T, int N>
__global__ void __launch_bounds__(greedy_threads)
    decode_greedy_kernel(const T *logits, int64_t vocabulary, int32_t *tokens, int32_t *positions) {
    await_previous();
    constexpr int unroll = 4, stride = greedy_threads * N;
    __shared__ float tops[32];
    __shared__ int firsts[32];
    const T *row = logits + blockIdx.x * vocabulary;
    auto larger = [](float a, float b) { return a > b || a != a ? a : b; };
    float top = -INFINITY;
    int64_t at = 0;
    for (int64_t base = (int64_t)threadIdx.x * N; base < vocabulary; base += unroll * stride) {
        Dims<T, N> loaded[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            const int64_t i = base + u * stride;
            loaded[u] = load_dims<T, N>(row + (i < vocabulary ? i : base), 0, 1);
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            float x[N];
            to_floats<T>(loaded[u], x);
            float highest = x[0];
#pragma unroll
            for (int k = 1; k < N; k++) {
                highest = larger(highest, x[k]);
            }
            if (highest > top || highest != highest) {
                top = highest;
                at = base + u * stride;
            }
        }
    }
    const float of_all = block_wide(top, tops, larger);
    int first = 0x7fffffff;
    if (top == of_all) {
        float x[N];
        to_floats<T>(load_dims<T, N>(row + at, 0, 1), x);
#pragma unroll
        for (int k = N - 1; k >= 0; k--) {
            first = x[k] == of_all ? (int)at + k : first;
        }
    }
    first = block_wide(first, firsts, [](int a, int b) { return a < b ? a : b; });
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = of_all > -INFINITY && of_all < INFINITY ? first : -1;
        positions[blockIdx.x] += 1;
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
    s.ahead = cuda_reads_ahead(device, {a->cos, a->sin, a->positions, a->keys, a->values});
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
