/* common.cuh - shared by every CUDA file: errors, launches, scratch, vectors, sums.
 *
 * How an op runs. The vtable in backend.cu wraps each cuda_<op>: it refuses after a fatal fault,
 * takes the device's lock, makes the device current and then calls cuda_<op>(device, args), which
 * enqueues on cuda_stream(device) and returns. So an op needs no prologue of its own: it checks its
 * operands, allocates scratch at most once, and launches.
 * Indices are checked by checks.cuh in a debug build.
 *
 * Errors. Every CUDA call goes through CUDA_TRY, every launch through cuda_launch.
 * cuda_error() clears the runtime's last error and distinguishes faults that end the context
 * (ND_EFATAL: illegal address, assertion, ECC, ...; the backend is poisoned, its first message is
 * kept) from those that can be retried (ND_ECUDA: memory, launch configuration).
 */
#ifndef NEEDLE_COMMON_CUH
#define NEEDLE_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <initializer_list>
#include <type_traits>

#include "../csrc/backend.h"
#include "../csrc/formula.h"
#include "checks.cuh"

/* ---- the ops: a function that is missing is a link error ------------------------------------- */
#define EACH_OP(name) nd_status cuda_##name(int device, const name##_args *a);
#include "../csrc/ops.def"

/* ---- errors (device.cpp) --------------------------------------------------------------------- */
nd_status cuda_error(const char *op, const char *what, cudaError_t error);

#define CUDA_TRY(op, call)                                 \
    do {                                                   \
        cudaError_t cuda_try_error_ = (call);              \
        if (cuda_try_error_ != cudaSuccess) {              \
            return cuda_error(op, #call, cuda_try_error_); \
        }                                                  \
    } while (0)

/* ---- the device (device.cpp); valid inside an op, that is, after open() ---------------------- */
typedef struct {
    int processors;      /* multiprocessors */
    int arch;            /* 90 for compute capability 9.0 */
    int block_threads;   /* most threads of a block */
    size_t block_shared; /* most shared memory of a block, after opting in */
    size_t l2_bytes;
} cuda_limits;

const cuda_limits *cuda_device_limits(int device);
cudaStream_t cuda_stream(int device, bool side = false);
/* graph.cpp: true where launches become those of a graph that is being recorded. */
bool cuda_is_recording(int device);
/* graph.cpp: true where an op may read `operands` (or NULL) before the work before is done: in a graph
 * that is being recorded, and where none of them lies in memory of that graph, which other work in it
 * writes: an operand without the layout that the op needs is copied there. Not in a debug build,
 * where a kernel before it publishes its operands. */
bool cuda_reads_ahead(int device, std::initializer_list<const nd_array *> operands);
/* The architecture to choose kernels for: the device's, or less when NEEDLE_ARCH (say 80) asks for
 * the portable kernels on a newer device. */
int cuda_arch(int device);

/* memory.cpp: for this op alone, 256-byte aligned, undefined contents; valid for work enqueued
 * before the op returns. One call an op: a second one may hand out the same bytes. */
nd_status cuda_scratch(int device, size_t bytes, void **out);

/* device.cpp: launches on the device's stream. Threads and shared memory beyond the device's limits
 * are ND_ECUDA with both numbers. Blocks may start while the work before still runs (programmatic
 * dependent launch, compute capability 9.0), so every kernel begins with await_previous(). */
nd_status cuda_launch_kernel(const char *op, int device, const void *kernel, dim3 grid, dim3 block,
                             size_t shared, void **arguments);

/* The same with arguments of the types that the kernel takes. */
template <class... A>
static inline nd_status cuda_launch(const char *op, int device, void (*kernel)(A...), dim3 grid,
                                    dim3 block, size_t shared,
                                    std::enable_if_t<true, A>... arguments) {
    void *pointers[] = {(void *)&arguments...};
    return cuda_launch_kernel(op, device, (const void *)kernel, grid, block, shared, pointers);
}

/* The first act of every kernel, by all of its threads: lets the launch after this one come onto
 * the multiprocessors, and returns once all work before this one is done and its writes are
 * visible. Nothing in memory that another launch writes may be touched earlier [griddepcontrol].
 * With `ahead` it returns at once: await_previous() follows before anything else is touched. */
__device__ __forceinline__ void await_previous([[maybe_unused]] bool ahead = false) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (!ahead) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }
#endif
}

/* column_sums.cu: to[c] += the sum over r of partial[r * columns + c], rows in a fixed order. The
 * last call of an op, as the sums of a layer are added at its end; `partial` is in scratch. */
nd_status cuda_add_columns(const char *op, int device, const float *partial, int64_t rows,
                           int64_t columns, float *to);
/* The same of `count` matrices, `apart` elements from each other (0: of one), each to
 * an array of its own. */
nd_status cuda_add_columns_of(const char *op, int device, const float *partial, int64_t rows,
                              int64_t columns, int64_t apart, int count, float *const *to);

/* sort.cu: CUB's stable radix sort by the lower bits of the keys, and int64 sums of all that stands
 * before. Without space they write the bytes that they need of it. */
nd_status cuda_sort_pairs(const char *op, int device, void *space, size_t *bytes,
                          const uint32_t *keys, uint32_t *sorted, const int32_t *values,
                          int32_t *order, int64_t count, int bits);
nd_status cuda_sort_pairs(const char *op, int device, void *space, size_t *bytes,
                          const uint64_t *keys, uint64_t *sorted, const int32_t *values,
                          int32_t *order, int64_t count, int bits);
nd_status cuda_sums_before(const char *op, int device, void *space, size_t *bytes, const int64_t *x,
                           int64_t *sums, int64_t count);

/* rotary.cu: in x (B, T, H, D), or the slices p < parts of x (B, T, H, P, D), unit stride in D, the
 * first 2 R dims rotated by sign times the angles of their position; cos and sin are (T, R), 2 R <=
 * D. */
nd_status cuda_rotate(const char *op, int device, const nd_array *x, int64_t parts,
                      const nd_array *cos, const nd_array *sin, float sign);
/* ND_EVALUE where `parts` slices of x (..., P, D) cannot be rotated by the angles of cos (T, R). */
nd_status cuda_check_rotation(const char *op, const nd_array *x, int64_t parts,
                              const nd_array *cos);

/* copy.cu: copy to page-locked memory of the host, by a kernel where bytes are few: the copy engine
 * and the kernels wait for each other for some 7 us. */
nd_status cuda_send(const char *op, int device, const void *from, size_t bytes, void *to);

/* Memory of the device's pool that stays (freed by cudaFreeAsync); not counted as an array's. */
nd_status cuda_pool_malloc(int device, size_t bytes, void **out);

/* matmul.cu: drop plans, handle and workspace of the device (reset). */
nd_status cuda_matmul_reset(int device);

/* matmul.cu: fills in `products`, the library and the table that decide the bits of products, and
 * `warning`, where the table of this GPU is of another version of the library. */
void cuda_products(const char *gpu, nd_properties *out);

/* Blocks for a grid-stride loop: `wanted`, but no more than `per_processor` on each processor. */
static inline unsigned cuda_grid(int device, int64_t wanted, int per_processor) {
    int64_t most = (int64_t)cuda_device_limits(device)->processors * per_processor;
    int64_t blocks = wanted < most ? wanted : most;
    return (unsigned)(blocks > 0 ? blocks : 1);
}

template <class I> __host__ __device__ constexpr I ceil_div(I a, I b) { return (a + b - 1) / b; }

/* Bytes of a part of scratch, so that the next part is as aligned as scratch is. */
static inline size_t padded(size_t bytes) { return ceil_div(bytes, (size_t)256) * 256; }

static inline bool is_aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

/* True if Hopper's copy engine takes an operand of 16 bits: rows of unit stride that start at
 * multiples of 16 bytes, no axis backwards. */
static inline bool is_boxable(const nd_array *a) {
    const int64_t most = (int64_t)1 << 38;
    const int last = a->ndim - 1;
    bool good = is_aligned16(a->data) && (a->shape[last] == 1 || a->strides[last] == 1);
    for (int axis = 0; axis < last; axis++) {
        int64_t stride = a->strides[axis];
        good = good && (a->shape[axis] <= 1 || (stride > 0 && stride % 8 == 0 && stride < most));
    }
    return good;
}

/* ---- dtypes ---------------------------------------------------------------------------------- */
typedef __nv_bfloat16 bf16;
typedef __half f16;

template <class T> struct Type { typedef T type; };

/* A compile-time int as an argument of a generic lambda. */
template <int value> struct Constant { static constexpr int get = value; };

/* with_float(op, dtype, [&](auto tag) -> nd_status { using T = typename decltype(tag)::type; ... })
 * calls the function with the C++ type of a float dtype. */
template <class F> static inline nd_status with_float(const char *op, nd_dtype dtype, F &&f) {
    switch (dtype) {
    case ND_F32:
        return f(Type<float>());
    case ND_BF16:
        return f(Type<bf16>());
    case ND_F16:
        return f(Type<f16>());
    default:
        return nd_error(ND_ETYPE, "%s: dtype %s: must be float32, bfloat16 or float16", op,
                        nd_dtype_name(dtype));
    }
}

/* The same over all dtypes; bool is the C++ type bool (one byte, 0 or 1). */
template <class F> static inline nd_status with_any(const char *op, nd_dtype dtype, F &&f) {
    switch (dtype) {
    case ND_I32:
        return f(Type<int32_t>());
    case ND_I64:
        return f(Type<int64_t>());
    case ND_U8:
        return f(Type<uint8_t>());
    case ND_BOOL:
        return f(Type<bool>());
    case ND_U16:
        return f(Type<uint16_t>());
    default:
        return with_float(op, dtype, (F &&) f);
    }
}

template <class T> static inline const T *data_of(const nd_array *a) { return (const T *)a->data; }
template <class T> static inline T *data_of(nd_array *a) { return (T *)a->data; }

#ifdef __CUDACC__
/* ---- strided walks ------------------------------------------------------------------------------
 * An nd_loop cut to what a kernel takes by value: row-major index -> offset of each operand. */
template <int operands> struct Walk {
    int64_t size;
    int ndim;
    int64_t shape[ND_MAX_DIMS];
    int64_t strides[operands][ND_MAX_DIMS];

    Walk() = default;
    explicit Walk(const nd_loop &loop) : size(loop.size), ndim(loop.ndim) {
        for (int d = 0; d < ND_MAX_DIMS; d++) {
            shape[d] = d < ndim ? loop.shape[d] : 1;
            for (int k = 0; k < operands; k++) {
                strides[k][d] = d < ndim ? loop.strides[k][d] : 0;
            }
        }
    }

    /* offset[k] += that of the element `i`. Division in 32 bits where the size allows it: it costs
     * a fifth of the 64-bit one. */
    __device__ __forceinline__ void add_offsets(int64_t i, int64_t (&offset)[operands]) const {
        if (size <= 0x7fffffff) {
            split((uint32_t)i, offset);
        } else {
            split((uint64_t)i, offset);
        }
    }

  private:
    template <class I>
    __device__ __forceinline__ void split(I i, int64_t (&offset)[operands]) const {
#pragma unroll 1 /* unrolled it is most of the code of elementwise.cu */
        for (int d = ndim - 1; d > 0; d--) {
            I next = i / (I)shape[d];
            I at = i - next * (I)shape[d];
            i = next;
#pragma unroll
            for (int k = 0; k < operands; k++) {
                offset[k] += (int64_t)at * strides[k][d];
            }
        }
        if (ndim > 0) {
#pragma unroll
            for (int k = 0; k < operands; k++) {
                offset[k] += (int64_t)i * strides[k][0];
            }
        }
    }
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

/* Round to nearest even; float16 overflows to infinity. */
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }

/* 2^x on the special function unit: relative error below 2^-22, exp2(-inf) = 0, and
 * what is below 2^-126 is 0. */
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/* The two 16-bit floats of a word, the one in the lower half first. */
template <class T> __device__ __forceinline__ float2 unpack_pair(uint32_t x);

template <> __device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
}

template <> __device__ __forceinline__ float2 unpack_pair<f16>(uint32_t x) {
    return make_float2(__half2float(__ushort_as_half((unsigned short)x)),
                       __half2float(__ushort_as_half((unsigned short)(x >> 16))));
}

/* fminf, but a NaN wins. */
__device__ __forceinline__ float min_or_nan(float x, float y) {
    float less;
    asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(less) : "f"(x), "f"(y));
    return less;
}

/* ---- any dtype, known at run time ---------------------------------------------------------------
 * V is float for float dtypes and int64_t for integers and bool. The branch is the same for the
 * whole grid. Floats truncate to integers; all but zero is true. */
template <class V>
__device__ __forceinline__ V load_as(const void *p, int64_t i, nd_dtype dtype ND_HERE);
template <>
__device__ __forceinline__ float load_as<float>(const void *p, int64_t i, nd_dtype dtype ND_TAKEN) {
    return dtype == ND_F32    ? checked((const float *)p + i ND_PASS)
           : dtype == ND_BF16 ? to_float(checked((const bf16 *)p + i ND_PASS))
                              : to_float(checked((const f16 *)p + i ND_PASS));
}
template <>
__device__ __forceinline__ int64_t load_as<int64_t>(const void *p, int64_t i,
                                                    nd_dtype dtype ND_TAKEN) {
    return dtype == ND_I32   ? checked((const int32_t *)p + i ND_PASS)
           : dtype == ND_I64 ? checked((const int64_t *)p + i ND_PASS)
           : dtype == ND_U16
               ? checked((const uint16_t *)p + i ND_PASS)
               : checked((const uint8_t *)p + i ND_PASS); /* bool is the byte 0 or 1 */
}

/* Out of range: the nearest int64, to be cut to size; NaN: 0. */
__device__ __forceinline__ int64_t truncated(float x) { return x == x ? (int64_t)x : 0; }
__device__ __forceinline__ int64_t truncated(int64_t x) { return x; }

template <class V>
__device__ __forceinline__ void store_as(void *p, int64_t i, nd_dtype dtype, V x ND_HERE) {
    switch (dtype) {
    case ND_F32:
        checked((float *)p + i ND_PASS) = (float)x;
        break;
    case ND_BF16:
        checked((bf16 *)p + i ND_PASS) = from_float<bf16>((float)x);
        break;
    case ND_F16:
        checked((f16 *)p + i ND_PASS) = from_float<f16>((float)x);
        break;
    case ND_I32:
        checked((int32_t *)p + i ND_PASS) = (int32_t)truncated(x);
        break;
    case ND_I64:
        checked((int64_t *)p + i ND_PASS) = truncated(x);
        break;
    case ND_U8:
        checked((uint8_t *)p + i ND_PASS) = (uint8_t)truncated(x);
        break;
    case ND_U16:
        checked((uint16_t *)p + i ND_PASS) = (uint16_t)truncated(x);
        break;
    default:
        checked((bool *)p + i ND_PASS) = x != 0;
        break;
    }
}

/* ---- 16-byte accesses ---------------------------------------------------------------------------
 * A Vec lives in registers when it is indexed by unrolled loops only. */
template <class T> struct alignas(16) Vec {
    static constexpr int size = 16 / sizeof(T);
    T v[size];
};

template <class T> __device__ __forceinline__ Vec<T> load16(const T *p ND_HERE) {
    ND_CHECK(p, 16);
    union {
        uint4 bits;
        Vec<T> vec;
    } u = {*reinterpret_cast<const uint4 *>(p)};
    return u.vec;
}

/* The elements of 16 bytes. */
template <class T> __device__ __forceinline__ void to_floats(uint4 bits, float (&x)[Vec<T>::size]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4) {
            x[i] = __uint_as_float(words[i]);
        } else {
            const float2 pair = unpack_pair<T>(words[i]);
            x[2 * i] = pair.x;
            x[2 * i + 1] = pair.y;
        }
    }
}

/* Two 16-bit floats as the word that memory holds. */
__device__ __forceinline__ uint32_t pack(bf16 low, bf16 high) {
    return (uint32_t)__bfloat16_as_ushort(low) | (uint32_t)__bfloat16_as_ushort(high) << 16;
}
__device__ __forceinline__ uint32_t pack(f16 low, f16 high) {
    return (uint32_t)__half_as_ushort(low) | (uint32_t)__half_as_ushort(high) << 16;
}

/* By name, because the compiler may split the copy of a struct into stores of its members. */
template <class T> __device__ __forceinline__ void store16(T *p, const Vec<T> &x ND_HERE) {
    ND_CHECK(p, 16);
    uint4 bits;
    if constexpr (sizeof(T) == 4) {
        bits = make_uint4(__float_as_uint(x.v[0]), __float_as_uint(x.v[1]), __float_as_uint(x.v[2]),
                          __float_as_uint(x.v[3]));
    } else {
        bits = make_uint4(pack(x.v[0], x.v[1]), pack(x.v[2], x.v[3]), pack(x.v[4], x.v[5]),
                          pack(x.v[6], x.v[7]));
    }
    __stwb(reinterpret_cast<uint4 *>(p), bits);
}

/* ---- reductions ---------------------------------------------------------------------------------
 * In a fixed order, so the same bits each time; every thread gets the result. */
struct SumOp {
    static constexpr float identity = 0.0f;
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct MaxOp {
    static constexpr float identity = -INFINITY;
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/* Over the `width` neighbouring lanes (a power of two) that hold this thread. */
template <int width = 32, class V, class Op> __device__ __forceinline__ V warp_reduce(V v, Op op) {
#pragma unroll
    for (int offset = width / 2; offset > 0; offset /= 2) {
        v = op(v, __shfl_xor_sync(0xffffffffu, v, offset));
    }
    return v;
}

template <int width = 32> __device__ __forceinline__ float warp_sum(float v) {
    return warp_reduce<width>(v, SumOp());
}
template <int width = 32> __device__ __forceinline__ float warp_max(float v) {
    return warp_reduce<width>(v, MaxOp());
}

/* Over a 1-D block of whole warps; all threads must call it. */
template <class Op> __device__ __forceinline__ float block_reduce(float v, Op op) {
    __shared__ float partial[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = warp_reduce(v, op);
    if (warps == 1) {
        return v;
    }
    if (lane == 0) {
        partial[warp] = v;
    }
    __syncthreads();
    v = warp_reduce(lane < warps ? partial[lane] : Op::identity, op);
    __syncthreads(); /* the next call writes partial again */
    return v;
}
__device__ __forceinline__ float block_sum(float v) { return block_reduce(v, SumOp()); }
__device__ __forceinline__ float block_max(float v) { return block_reduce(v, MaxOp()); }

#endif
#endif
