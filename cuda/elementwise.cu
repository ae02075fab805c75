/* elementwise.cu - the EW1, EW2 and CMP ops of ops.def: out[i] = formula(x[i], y[i]).
 *
 * The formulas are those of ops.def and formula.h, in float32 for float dtypes (rounded once, at
 * the store) and in int64 for integers and bool.
 *
 * Three kernels an op. flat_kernel: whole float tensors, nothing broadcast, as in most calls of a
 * training step. vector_kernel: float operands whose innermost axis is contiguous (or repeats one
 * element) and 16-byte aligned: rows broadcast along an axis, a Python scalar on either side. Both
 * move 16 bytes a load, all loads of a thread before its first store. any_kernel: everything else
 * (any strides, integers), an element at a time, the dtype looked up at run time, which keeps the
 * number of kernels small.
 * Bytes: each distinct input element is read once, each output written once.
 */
#include "common.cuh"

namespace {

enum Types { FLOAT, ANY, WHOLE = ANY };

constexpr int threads = 256;
constexpr int unroll = 2; /* 16-byte vectors a thread has in flight, for each operand */

/* Operand 0 is out, 1 is x, 2 is y; a null x or y is the scalar. */
struct Operands {
    void *out;
    const void *x, *y;
    double x_scalar, y_scalar;
};

/* One thread's results, in one store. */
template <class T> __device__ __forceinline__ void store_results(T *to, const Vec<T> &x) {
    store16(to, x);
}
/* Four booleans a word. */
template <int count> struct Truths { bool v[count]; };
template <int count>
__device__ __forceinline__ void store_results(bool *to, const Truths<count> &x) {
    uint32_t words[count / 4];
#pragma unroll
    for (int w = 0; w < count / 4; w++) {
        words[w] = (uint32_t)x.v[4 * w] | (uint32_t)x.v[4 * w + 1] << 8 |
                   (uint32_t)x.v[4 * w + 2] << 16 | (uint32_t)x.v[4 * w + 3] << 24;
    }
    if constexpr (count == 8) {
        checked(reinterpret_cast<uint2 *>(to)) = make_uint2(words[0], words[1]);
    } else {
        checked(reinterpret_cast<uint32_t *>(to)) = words[0];
    }
}

template <class O> __device__ __forceinline__ O result(float x) { return from_float<O>(x); }
template <> __device__ __forceinline__ bool result<bool>(float x) { return x != 0.0f; }

/* x and, with `binary`, y and out are flat arrays of vectors; `tail` elements are left after
 * them. */
template <class Fn, class T, class O, bool binary>
__global__ void __launch_bounds__(threads) flat_kernel(Operands a, int64_t vectors, int tail) {
    await_previous();
    constexpr int N = Vec<T>::size;
    const T *x = (const T *)a.x, *y = (const T *)a.y;
    O *out = (O *)a.out;
    const Fn fn;
    const int64_t base = (int64_t)blockIdx.x * (threads * unroll) + threadIdx.x;
    Vec<T> xs[unroll], ys[unroll];
#pragma unroll
    for (int u = 0; u < unroll; u++) {
        if (base + u * threads < vectors) {
            xs[u] = load16(x + (base + u * threads) * N);
            if constexpr (binary) {
                ys[u] = load16(y + (base + u * threads) * N);
            }
        }
    }
#pragma unroll
    for (int u = 0; u < unroll; u++) {
        if (base + u * threads < vectors) {
            std::conditional_t<sizeof(O) == 1, Truths<N>, Vec<T>> r;
#pragma unroll
            for (int k = 0; k < N; k++) {
                r.v[k] = result<O>(
                    (float)fn(to_float(xs[u].v[k]), binary ? to_float(ys[u].v[k]) : 0.0f));
            }
            store_results(out + (base + u * threads) * N, r);
        }
    }
    if (blockIdx.x == 0 && (int)threadIdx.x < tail) {
        int64_t i = vectors * N + threadIdx.x;
        checked(out + i) = result<O>(
            (float)fn(to_float(checked(x + i)), binary ? to_float(checked(y + i)) : 0.0f));
    }
}

/* O: T, or bool for comparisons. walk.shape's last axis counts vectors; the strides of the last
 * axis are 1 or 0 (repeat), all others count elements. `tail` elements are left after the last full
 * vector (only when the walk is flat). */
template <class Fn, class T, class O>
__global__ void __launch_bounds__(threads)
    vector_kernel(Operands a, Walk<3> walk, int64_t vectors, int tail) {
    await_previous();
    constexpr int N = Vec<T>::size;
    const T *x = (const T *)a.x, *y = (const T *)a.y;
    O *out = (O *)a.out;
    const float x_scalar = (float)a.x_scalar, y_scalar = (float)a.y_scalar;
    const int last = walk.ndim - 1;
    const bool x_repeats = !x || walk.strides[1][last] == 0;
    const bool y_repeats = !y || walk.strides[2][last] == 0;
    const Fn fn;

    for (int64_t base = (int64_t)blockIdx.x * (threads * unroll) + threadIdx.x; base < vectors;
         base += (int64_t)gridDim.x * (threads * unroll)) {
        Vec<T> xs[unroll], ys[unroll];
        float x_one[unroll], y_one[unroll];
        int64_t to[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            int64_t i = base + u * threads;
            x_one[u] = x_scalar;
            y_one[u] = y_scalar;
            to[u] = 0;
            if (i < vectors) {
                int64_t at[3] = {i * N, i * N, i * N};
                if (last > 0) {
                    at[0] = at[1] = at[2] = 0;
                    walk.add_offsets(i, at);
                }
                to[u] = at[0];
                if (!x_repeats) {
                    xs[u] = load16(x + at[1]);
                } else if (x) {
                    x_one[u] = to_float(x[last > 0 ? at[1] : 0]);
                }
                if (!y_repeats) {
                    ys[u] = load16(y + at[2]);
                } else if (y) {
                    y_one[u] = to_float(y[last > 0 ? at[2] : 0]);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            if (base + u * threads < vectors) {
                std::conditional_t<sizeof(O) == 1, Truths<N>, Vec<T>> r;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    float p = x_repeats ? x_one[u] : to_float(xs[u].v[k]);
                    float q = y_repeats ? y_one[u] : to_float(ys[u].v[k]);
                    r.v[k] = result<O>((float)fn(p, q));
                }
                store_results(out + to[u], r);
            }
        }
    }
    if (blockIdx.x == 0 && (int)threadIdx.x < tail) {
        int64_t i = vectors * N + threadIdx.x;
        float p = x ? to_float(checked(x + (x_repeats ? 0 : i))) : x_scalar;
        float q = y ? to_float(checked(y + (y_repeats ? 0 : i))) : y_scalar;
        checked(out + i) = result<O>((float)fn(p, q));
    }
}

template <class Fn, class V>
__global__ void __launch_bounds__(threads)
    any_kernel(Operands a, Walk<3> walk, nd_dtype dtype, nd_dtype out_dtype) {
    await_previous();
    const V x_scalar = (V)a.x_scalar, y_scalar = (V)a.y_scalar;
    const Fn fn;
    for (int64_t i = (int64_t)blockIdx.x * threads + threadIdx.x; i < walk.size;
         i += (int64_t)gridDim.x * threads) {
        int64_t at[3] = {0, 0, 0};
        walk.add_offsets(i, at);
        V x = a.x ? load_as<V>(a.x, at[1], dtype) : x_scalar;
        V y = a.y ? load_as<V>(a.y, at[2], dtype) : y_scalar;
        store_as<V>(a.out, at[0], out_dtype, (V)fn(x, y));
    }
}

/* Can 16 bytes be read at a time? Every operand's rows must start on such a boundary. */
bool vectors_fit(const Operands &a, const nd_loop &loop, int count, size_t size, size_t out_size) {
    if (loop.ndim == 0) {
        return false;
    }
    int last = loop.ndim - 1;
    if (loop.strides[0][last] != 1 || (uintptr_t)a.out % (count * out_size) != 0 ||
        (last > 0 && loop.shape[last] % count != 0)) {
        return false;
    }
    const void *data[3] = {nullptr, a.x, a.y};
    for (int k = 0; k < 3; k++) {
        bool repeats = k > 0 && (!data[k] || loop.strides[k][last] == 0);
        if (repeats) {
            continue;
        }
        if (loop.strides[k][last] != 1 || (k > 0 && (uintptr_t)data[k] % (count * size) != 0)) {
            return false;
        }
        for (int d = 0; d < last; d++) {
            if (loop.strides[k][d] % count != 0) {
                return false;
            }
        }
    }
    return true;
}

/* The kernels of an op, those of floats for float32, bfloat16 and float16; any_integer is for ops
 * of ANY type alone. What launches them is compiled once, for all ops. */
struct Kernels {
    void (*flat[3])(Operands a, int64_t vectors, int tail);
    void (*vector[3])(Operands a, Walk<3> walk, int64_t vectors, int tail);
    void (*any_float)(Operands a, Walk<3> walk, nd_dtype dtype, nd_dtype out_dtype);
    void (*any_integer)(Operands a, Walk<3> walk, nd_dtype dtype, nd_dtype out_dtype);
    Types types;
    bool compares, binary;
};

template <bool compares, class T> using Result = std::conditional_t<compares, bool, T>;

template <class Fn, Types types, bool compares, bool binary>
const Kernels kernels_of = {
    {flat_kernel<Fn, float, Result<compares, float>, binary>,
     flat_kernel<Fn, bf16, Result<compares, bf16>, binary>,
     flat_kernel<Fn, f16, Result<compares, f16>, binary>},
    {vector_kernel<Fn, float, Result<compares, float>>,
     vector_kernel<Fn, bf16, Result<compares, bf16>>,
     vector_kernel<Fn, f16, Result<compares, f16>>},
    any_kernel<Fn, float>,
    any_kernel<Fn, std::conditional_t<types == ANY, int64_t, float>>,
    types,
    compares,
    binary,
};

/* x and y both arrays (unary ops have no y), and one axis that all of them walk densely. */
bool is_flat(const Kernels &kernels, const Operands &a, const nd_loop &loop) {
    return loop.ndim == 1 && a.x && loop.strides[1][0] == 1 &&
           (!kernels.binary || (a.y && loop.strides[2][0] == 1));
}

nd_status elementwise(const char *op, int device, const Kernels &kernels, const nd_array *x,
                      const nd_array *y, double x_scalar, double y_scalar, nd_array *out) {
    const nd_array *operands[3] = {out, x, y};
    nd_loop loop;
    nd_collapse(3, operands, &loop);
    if (loop.size == 0) {
        return ND_OK;
    }
    const nd_dtype dtype = x ? x->dtype : y->dtype;
    const bool is_float = nd_dtype_is_float(dtype);
    if (!is_float && kernels.types == FLOAT) {
        return nd_error(ND_ETYPE, "%s: dtype %s: must be float32, bfloat16 or float16", op,
                        nd_dtype_name(dtype));
    }
    Operands a = {out->data, x ? x->data : nullptr, y ? y->data : nullptr, x_scalar, y_scalar};
    Walk<3> walk(loop);
    const int count = (int)(16 / nd_dtype_size(dtype)); /* elements of a vector */
    if (!is_float || out->dtype != (kernels.compares ? ND_BOOL : dtype) ||
        !vectors_fit(a, loop, count, nd_dtype_size(dtype), nd_dtype_size(out->dtype))) {
        const unsigned grid = cuda_grid(device, ceil_div<int64_t>(loop.size, threads), 4096);
        return cuda_launch(op, device, is_float ? kernels.any_float : kernels.any_integer, grid,
                           threads, 0, a, walk, dtype, out->dtype);
    }
    const int kind = dtype == ND_F32 ? 0 : dtype == ND_BF16 ? 1 : 2, last = loop.ndim - 1;
    const int tail = (int)(loop.shape[last] % count);
    const int64_t vectors = loop.size / count;
    const int64_t blocks = ceil_div<int64_t>(vectors, threads * unroll);
    if (is_flat(kernels, a, loop)) {
        return cuda_launch(op, device, kernels.flat[kind], blocks ? (unsigned)blocks : 1, threads,
                           0, a, vectors, tail);
    }
    walk.shape[last] /= count;
    walk.size = vectors;
    for (int k = 0; k < 3; k++) {
        walk.strides[k][last] *= count; /* a step is a vector now; 0 still repeats */
    }
    return cuda_launch(op, device, kernels.vector[kind], cuda_grid(device, blocks, 4096), threads,
                       0, a, walk, vectors, tail);
}

#define EW1(name, types, formula)                                                  \
    struct name##_fn {                                                             \
        template <class V> __device__ __forceinline__ V operator()(V x, V) const { \
            return (V)(formula);                                                   \
        }                                                                          \
    };
#define EW2(name, types, formula)                                                    \
    struct name##_fn {                                                               \
        template <class V> __device__ __forceinline__ V operator()(V x, V y) const { \
            return (V)(formula);                                                     \
        }                                                                            \
    };
#define CMP(name, formula) EW2(name, ANY, formula)
#include "../csrc/ops.def"

} // namespace

#define EW1(name, types, formula)                                                           \
    nd_status cuda_##name(int device, const name##_args *a) {                               \
        return elementwise(#name, device, kernels_of<name##_fn, types, false, false>, a->x, \
                           nullptr, 0, 0, a->out);                                          \
    }
#define EW2(name, types, formula)                                                                \
    nd_status cuda_##name(int device, const name##_args *a) {                                    \
        return elementwise(#name, device, kernels_of<name##_fn, types, false, true>, a->x, a->y, \
                           a->x_scalar, a->y_scalar, a->out);                                    \
    }
#define CMP(name, formula)                                                                    \
    nd_status cuda_##name(int device, const name##_args *a) {                                 \
        return elementwise(#name, device, kernels_of<name##_fn, ANY, true, true>, a->x, a->y, \
                           a->x_scalar, a->y_scalar, a->out);                                 \
    }
#include "../csrc/ops.def"
