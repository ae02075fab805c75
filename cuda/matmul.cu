/* matmul.cu - matrix products by cuBLASLt, and the bias gradient.
 *
 *   matmul      c[b] = scale a[b] b[b]      matmul_acc   c[b] (+)= scale a[b] b[b], c in float32
 *   linear_fwd  y = r + x w + bias (in the product's epilogue)
 *   fp8_matmul  c = r + a_scale b_scale a b^T + bias, a and b in FP8
 *   bias_bwd    db, db2 += column sums of dy   (linear's other gradients: matmul and matmul_acc)
 *
 * All products accumulate in float32; TF32 only with NEEDLE_TF32=1. cuBLASLt is
 * column-major: a row-major matrix is the transpose of a column-major one with the same leading
 * dimension, so c = a b is passed as c^T = b^T a^T and no element is moved.
 *
 * Plans. What cuBLASLt needs for one kind of product (descriptors, layouts, the algorithm) is kept
 * by shape, strides, transposes, dtypes, epilogue, beta and the alignment of each pointer. The
 * algorithm is the heuristic's first answer, or the one that algorithms.def lists for this GPU,
 * version and shape; never the winner of a timing, so that a resumed run takes the same. Partial
 * sums of split products are added in float32. NEEDLE_ALGORITHM=n takes answer n everywhere, to
 * make the table.
 *
 * bias_bwd: blocks of 32 x 8 threads walk down strips of columns, 16 bytes a thread and row;
 * partial sums a block in scratch, added in a fixed order. Reads dy once.
 */
#include <cublasLt.h>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unordered_map>

#include "algorithms.cuh"
#include "common.cuh"
#include "linear_few.cuh"

namespace {

constexpr int ANSWERS = 8; /* as many as are asked for */
constexpr int64_t E4M3 = ND_NUM_DTYPES, E5M2 = E4M3 + 1;

/* One product as cuBLASLt sees it: column-major d (m x n) = op(a) (m x k) op(b) (k x n). All fields
 * are 8 bytes wide, so that the struct has no padding and its bytes can be hashed. */
struct Key {
    int64_t m, n, k, batch;
    int64_t lda, ldb, ldc, stride_a, stride_b, stride_c;
    int64_t transpose_a, transpose_b;
    int64_t in_a, in_b, out; /* nd_dtype, or one of the two below */
    int64_t bias, add;       /* epilogue bias; beta = 1 */
    int64_t scaled;          /* alpha and beta are read on the device */
    int64_t align_a, align_b, align_c, align_from;

    bool operator==(const Key &other) const { return memcmp(this, &other, sizeof *this) == 0; }
};

struct KeyHash {
    size_t operator()(const Key &key) const {
        uint64_t words[sizeof(Key) / 8], hash = 0x9e3779b97f4a7c15u;
        memcpy(words, &key, sizeof key);
        for (uint64_t word : words) {
            hash = (hash ^ word) * 0xff51afd7ed558ccdu;
            hash ^= hash >> 32;
        }
        return (size_t)hash;
    }
};

struct Plan {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
    cublasLtMatmulAlgo_t algo;
    bool supported = false;

    Plan() { memset(&algo, 0, sizeof algo); }
    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;
    ~Plan() {
        if (c) {
            cublasLtMatrixLayoutDestroy(c);
        }
        if (b) {
            cublasLtMatrixLayoutDestroy(b);
        }
        if (a) {
            cublasLtMatrixLayoutDestroy(a);
        }
        if (product) {
            cublasLtMatmulDescDestroy(product);
        }
    }
};

/* Never destroyed: the library may be gone at exit. */
struct Blas {
    cublasLtHandle_t handle = nullptr;
    void *workspace = nullptr;
    size_t workspace_bytes = 0;
    bool tf32 = false;
    char gpu[256] = "";
    std::unordered_map<Key, Plan, KeyHash> plans;
};

/* Each entry is guarded by its device's lock; finding it needs one of its own. References into the
 * map stay good. */
Blas &blas_of(int device) {
    static auto *lock = new std::mutex;
    static auto *all = new std::unordered_map<int, Blas>;
    std::lock_guard<std::mutex> guard(*lock);
    return (*all)[device];
}

#define BLAS_TRY(op, call)                                  \
    do {                                                    \
        cublasStatus_t blas_try_status_ = (call);           \
        if (blas_try_status_ != CUBLAS_STATUS_SUCCESS) {    \
            return blas_error(op, #call, blas_try_status_); \
        }                                                   \
    } while (0)

nd_status blas_error(const char *op, const char *what, cublasStatus_t status) {
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        return cuda_error(op, what, error);
    }
    return nd_error(ND_ECUDA, "%s: %s: %s", op, what, cublasLtGetStatusString(status));
}

nd_status ready(const char *op, int device, Blas **out) {
    Blas &blas = blas_of(device);
    if (!blas.handle) {
        const char *asked = getenv("NEEDLE_TF32");
        blas.tf32 = asked && strcmp(asked, "1") == 0;
        cudaDeviceProp properties;
        CUDA_TRY(op, cudaGetDeviceProperties(&properties, device));
        memcpy(blas.gpu, properties.name, sizeof blas.gpu);
        BLAS_TRY(op, cublasLtCreate(&blas.handle));
    }
    if (!blas.workspace) {
        size_t bytes = (size_t)(cuda_device_limits(device)->arch == 90 ? 64 : 32) << 20;
        ND_TRY(cuda_pool_malloc(device, bytes, &blas.workspace));
        blas.workspace_bytes = bytes;
    }
    *out = &blas;
    return ND_OK;
}

cudaDataType_t data_type(int64_t dtype) {
    return dtype == E4M3      ? CUDA_R_8F_E4M3
           : dtype == E5M2    ? CUDA_R_8F_E5M2
           : dtype == ND_F32  ? CUDA_R_32F
           : dtype == ND_BF16 ? CUDA_R_16BF
                              : CUDA_R_16F;
}

/* The largest power of two, up to 256, that divides the address of every matrix of a batch. */
int64_t alignment(const void *p, int64_t batch_stride, int64_t dtype) {
    size_t size = dtype >= E4M3 ? 1 : nd_dtype_size((nd_dtype)dtype);
    uintptr_t step = (uintptr_t)batch_stride * size;
    uintptr_t bits = (uintptr_t)p | step | 256;
    return (int64_t)(bits & (~bits + 1));
}

nd_status layout(const char *op, cublasLtMatrixLayout_t *out, int64_t dtype, int64_t rows,
                 int64_t columns, int64_t ld, int64_t batch, int64_t stride) {
    BLAS_TRY(op, cublasLtMatrixLayoutCreate(out, data_type(dtype), (uint64_t)rows,
                                            (uint64_t)columns, ld));
    if (batch > 1) {
        int32_t count = (int32_t)batch;
        BLAS_TRY(op, cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                      &count, sizeof count));
        BLAS_TRY(op,
                 cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                  &stride, sizeof stride));
    }
    return ND_OK;
}

/* The index of cuBLASLt's answer to take. Column-major a and b are row-major b and a. */
int answer_for(const Blas &blas, const Key &key) {
    const char *asked = getenv("NEEDLE_ALGORITHM");
    if (asked) {
        return atoi(asked);
    }
    if (key.batch != 1 || key.in_a != ND_BF16) {
        return 0;
    }
    return algorithms::answer_for(blas.gpu, cublasLtGetVersion(),
                                  {key.n, key.m, key.k, key.transpose_b, key.transpose_a, key.out,
                                   key.bias, key.add, key.scaled});
}

nd_status choose(const char *op, const Blas &blas, const Key &key, const void *bias,
                 cublasLtMatmulPreference_t preference, Plan *plan) {
    uint64_t workspace = blas.workspace_bytes;
    uint32_t aligned_a = (uint32_t)key.align_a, aligned_b = (uint32_t)key.align_b,
             aligned_c = (uint32_t)key.align_c, aligned_from = (uint32_t)key.align_from;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    struct {
        cublasLtMatmulPreferenceAttributes_t which;
        const void *value;
        size_t size;
    } wishes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aligned_a, sizeof aligned_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aligned_b, sizeof aligned_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &aligned_from, sizeof aligned_from},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &aligned_c, sizeof aligned_c},
    };
    for (const auto &wish : wishes) {
        BLAS_TRY(op, cublasLtMatmulPreferenceSetAttribute(preference, wish.which, wish.value,
                                                          wish.size));
    }
    if (key.bias) {
        BLAS_TRY(op, cublasLtMatmulDescSetAttribute(
                         plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    }
    cublasLtMatmulHeuristicResult_t found[ANSWERS];
    int count = 0, answer = answer_for(blas, key);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(blas.handle, plan->product, plan->a, plan->b, plan->c,
                                       plan->c, preference, ANSWERS, found, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) {
        return ND_OK; /* plan->supported stays false */
    }
    BLAS_TRY(op, status);
    answer =
        answer >= 0 && answer < count && found[answer].state == CUBLAS_STATUS_SUCCESS ? answer : 0;
    BLAS_TRY(op, found[answer].state);
    plan->algo = found[answer].algo;
    plan->supported = true;
    return ND_OK;
}

nd_status fill_plan(const char *op, const Blas &blas, const Key &key, const void *bias,
                    Plan *plan) {
    bool tf32 = blas.tf32 && key.in_a == ND_F32;
    BLAS_TRY(op, cublasLtMatmulDescCreate(&plan->product,
                                          tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                          CUDA_R_32F));
    cublasOperation_t op_a = key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    BLAS_TRY(op, cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSA, &op_a,
                                                sizeof op_a));
    BLAS_TRY(op, cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSB, &op_b,
                                                sizeof op_b));
    if (key.scaled) {
        cublasLtPointerMode_t mode = CUBLASLT_POINTER_MODE_DEVICE;
        BLAS_TRY(op, cublasLtMatmulDescSetAttribute(
                         plan->product, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode));
    }
    if (key.bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        cudaDataType_t type = data_type(key.out);
        BLAS_TRY(op, cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                                    &epilogue, sizeof epilogue));
        BLAS_TRY(op, cublasLtMatmulDescSetAttribute(
                         plan->product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
    }
    ND_TRY(layout(op, &plan->a, key.in_a, key.transpose_a ? key.k : key.m,
                  key.transpose_a ? key.m : key.k, key.lda, key.batch, key.stride_a));
    ND_TRY(layout(op, &plan->b, key.in_b, key.transpose_b ? key.n : key.k,
                  key.transpose_b ? key.k : key.n, key.ldb, key.batch, key.stride_b));
    ND_TRY(layout(op, &plan->c, key.out, key.m, key.n, key.ldc, key.batch, key.stride_c));
    cublasLtMatmulPreference_t preference;
    BLAS_TRY(op, cublasLtMatmulPreferenceCreate(&preference));
    nd_status status = choose(op, blas, key, bias, preference, plan);
    cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

/* beta where alpha is read on the device. */
__device__ const float zero_one[2] = {0.0f, 1.0f};

/* `supported` comes back false when cuBLASLt has no kernel for this product. What is added to, with
 * key.add, is `from`. */
nd_status run(const char *op, int device, const Key &key, const void *a, const void *b,
              const void *from, void *c, const void *bias, const float *scale, bool *supported,
              const float *a_scale = nullptr, const float *b_scale = nullptr) {
    Blas *blas;
    ND_TRY(ready(op, device, &blas));
    auto found = blas->plans.find(key);
    if (found == blas->plans.end()) {
        found = blas->plans.try_emplace(key).first;
        nd_status status = fill_plan(op, *blas, key, bias, &found->second);
        if (status != ND_OK) {
            blas->plans.erase(found);
            return status;
        }
    }
    Plan &plan = found->second;
    *supported = plan.supported;
    if (!plan.supported) {
        return ND_OK;
    }
    if (key.bias) {
        BLAS_TRY(op, cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                    &bias, sizeof bias));
    }
    if (a_scale) {
        BLAS_TRY(op,
                 cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                                &a_scale, sizeof a_scale));
        BLAS_TRY(op,
                 cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                                                &b_scale, sizeof b_scale));
    }
    const float one = 1.0f, added = key.add ? 1.0f : 0.0f;
    const float *alpha = &one, *beta = &added;
    if (key.scaled) {
        void *constants;
        CUDA_TRY(op, cudaGetSymbolAddress(&constants, zero_one));
        alpha = scale ? scale : (const float *)constants + 1;
        beta = (const float *)constants + key.add;
    }
    BLAS_TRY(op, cublasLtMatmul(blas->handle, plan.product, alpha, a, plan.a, b, plan.b, beta, from,
                                plan.c, c, plan.c, &plan.algo, blas->workspace,
                                blas->workspace_bytes, cuda_stream(device)));
    return ND_OK;
}

/* ---- from row-major views -------------------------------------------------------------------- */
/* A matrix in memory: `transposed` when its columns, not its rows, are contiguous. */
struct Matrix {
    const char *data;
    int64_t ld, batch_stride;
    bool transposed;
};

nd_status matrix_of(const char *op, const char *operand, const nd_array *x, Matrix *out) {
    int64_t rows = x->shape[x->ndim - 2], columns = x->shape[x->ndim - 1];
    int64_t down = x->strides[x->ndim - 2], right = x->strides[x->ndim - 1];
    out->data = (const char *)x->data;
    out->batch_stride = x->ndim == 3 ? x->strides[0] : 0;
    if ((right == 1 || columns == 1) && (rows == 1 || down >= columns)) {
        out->transposed = false;
        out->ld = rows == 1 ? columns : down;
        return ND_OK;
    }
    if ((down == 1 || rows == 1) && (columns == 1 || right >= rows)) {
        out->transposed = true;
        out->ld = columns == 1 ? rows : right;
        return ND_OK;
    }
    return nd_error(ND_EVALUE,
                    "%s: %s: strides (%lld, %lld) of the last two axes: one of them must be 1 and "
                    "the other no smaller than the first's size",
                    op, operand, (long long)down, (long long)right);
}

struct Product {
    int64_t batch, m, n, k; /* row-major c (m x n) = a (m x k) b (k x n) */
    Matrix a, b;
    char *c;            /* contiguous */
    const void *from;   /* what is added to, with `add`: c, or another array like it */
    const void *bias;   /* of n elements, in c's dtype, or null */
    const float *scale; /* on the device, or null */
    nd_dtype in, out;
    bool add;
};

nd_status multiply_once(const char *op, int device, const Product &p, bool *supported) {
    Key key;
    memset(&key, 0, sizeof key);
    key.m = p.n;
    key.n = p.m;
    key.k = p.k;
    key.batch = p.batch;
    key.lda = p.b.ld;
    key.ldb = p.a.ld;
    key.ldc = p.n;
    key.stride_a = p.batch > 1 ? p.b.batch_stride : 0;
    key.stride_b = p.batch > 1 ? p.a.batch_stride : 0;
    key.stride_c = p.batch > 1 ? p.m * p.n : 0;
    key.transpose_a = p.b.transposed;
    key.transpose_b = p.a.transposed;
    key.in_a = key.in_b = p.in;
    key.out = p.out;
    key.bias = p.bias != nullptr;
    key.add = p.add;
    key.scaled = p.scale != nullptr;
    key.align_a = alignment(p.b.data, key.stride_a, p.in);
    key.align_b = alignment(p.a.data, key.stride_b, p.in);
    key.align_c = alignment(p.c, key.stride_c, p.out);
    key.align_from = alignment(p.from, key.stride_c, p.out);
    return run(op, device, key, p.b.data, p.a.data, p.from, p.c, p.bias, p.scale, supported);
}

nd_status no_kernel(const char *op, const Product &p) {
    return nd_error(ND_ECUDA,
                    "%s: cuBLASLt has no kernel for %lld x (%lld x %lld) (%lld x %lld) %s -> %s, "
                    "leading dimensions %lld, %lld",
                    op, (long long)p.batch, (long long)p.m, (long long)p.k, (long long)p.k,
                    (long long)p.n, nd_dtype_name(p.in), nd_dtype_name(p.out), (long long)p.a.ld,
                    (long long)p.b.ld);
}

nd_status multiply(const char *op, int device, const Product &p) {
    size_t size = nd_dtype_size(p.in), out_size = nd_dtype_size(p.out);
    bool together = p.a.batch_stride >= 0 && p.b.batch_stride >= 0 && p.batch <= 0x7fffffff;
    bool supported = false;
    if (together || p.batch == 1) {
        ND_TRY(multiply_once(op, device, p, &supported));
        if (supported) {
            return ND_OK;
        }
        if (p.batch == 1) {
            return no_kernel(op, p);
        }
    }
    Product one = p;
    one.batch = 1;
    for (int64_t i = 0; i < p.batch; i++) {
        one.a.data = p.a.data + i * p.a.batch_stride * (int64_t)size;
        one.b.data = p.b.data + i * p.b.batch_stride * (int64_t)size;
        one.c = p.c + i * p.m * p.n * (int64_t)out_size;
        one.from = one.c; /* batches add to c alone */
        ND_TRY(multiply_once(op, device, one, &supported));
        if (!supported) {
            return no_kernel(op, one);
        }
    }
    return ND_OK;
}

nd_status matmul(const char *op, int device, const nd_array *a, const nd_array *b,
                 const nd_array *scale, bool add, nd_array *c) {
    Product p;
    p.batch = c->shape[0];
    p.m = c->shape[1];
    p.n = c->shape[2];
    p.k = a->shape[2];
    p.bias = nullptr;
    p.scale = scale ? data_of<float>(scale) : nullptr;
    p.in = a->dtype;
    p.out = c->dtype;
    p.from = p.c = (char *)c->data;
    p.add = add;
    if (p.batch == 0 || p.m == 0 || p.n == 0) {
        return ND_OK;
    }
    if (p.k == 0) {
        if (!add) {
            CUDA_TRY(op, cudaMemsetAsync(c->data, 0, (size_t)nd_size(c) * nd_dtype_size(c->dtype),
                                         cuda_stream(device)));
        }
        return ND_OK;
    }
    ND_TRY(matrix_of(op, "a", a, &p.a));
    ND_TRY(matrix_of(op, "b", b, &p.b));
    return multiply(op, device, p);
}

/* As many rows as y has, each of them bias. */
nd_array repeated(const nd_array *bias, const nd_array *y) {
    nd_array rows = *bias;
    rows.ndim = 2;
    rows.shape[0] = y->shape[0];
    rows.shape[1] = y->shape[1];
    rows.strides[0] = 0;
    rows.strides[1] = bias->strides[0];
    return rows;
}

/* ---- bias_bwd -------------------------------------------------------------------------------- */
constexpr int strip_rows = 8; /* threads side by side in rows; 32 in columns */

/* partial[block row][column] = the sum over that block's rows. N columns a thread. */
template <class T, int N>
__global__ void __launch_bounds__(32 * strip_rows)
    column_sums_kernel(const T *dy, int64_t rows, int64_t columns, int64_t chunk, float *partial) {
    await_previous();
    __shared__ float sums[strip_rows][32 * N + 1];
    const int64_t first = ((int64_t)blockIdx.x * 32 + threadIdx.x) * N;
    const int64_t start = (int64_t)blockIdx.y * chunk;
    const int64_t end = min(start + chunk, rows);
    float sum[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        sum[k] = 0.0f;
    }
    if (first < columns) {
#pragma unroll 4
        for (int64_t r = start + threadIdx.y; r < end; r += strip_rows) {
            if constexpr (N == 1) {
                sum[0] += to_float(checked(dy + r * columns + first));
            } else {
                Vec<T> v = load16(dy + r * columns + first);
#pragma unroll
                for (int k = 0; k < N; k++) {
                    sum[k] += to_float(v.v[k]);
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
        sums[threadIdx.y][threadIdx.x * N + k] = sum[k];
    }
    __syncthreads();
    for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * N; c += 32 * strip_rows) {
        int64_t column = (int64_t)blockIdx.x * 32 * N + c;
        if (column < columns) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < strip_rows; w++) {
                all += sums[w][c];
            }
            checked(partial + blockIdx.y * columns + column) = all;
        }
    }
}

} // namespace

nd_status cuda_matmul(int device, const matmul_args *a) {
    return matmul("matmul", device, a->a, a->b, a->scale, false, a->c);
}

nd_status cuda_matmul_acc(int device, const matmul_acc_args *a) {
    return matmul("matmul_acc", device, a->a, a->b, a->scale, a->add != 0, a->c);
}

/* cuBLASLt takes FP8 where k runs along the rows of both, and rows are whole 16 bytes. Sums go to
 * float32 registers after each 128 of k (no CUBLASLT_MATMUL_DESC_FAST_ACCUM). */
nd_status cuda_fp8_matmul(int device, const fp8_matmul_args *a) {
    const char *op = "fp8_matmul";
    const int64_t m = a->a->shape[0], n = a->b->shape[0], k = a->a->shape[1];
    if (a->a_e5m2 && a->b_e5m2) {
        return nd_error(ND_EVALUE, "%s: b_e5m2: a and b are both e5m2; one must be e4m3", op);
    }
    if (m == 0 || n == 0) {
        return ND_OK;
    }
    nd_array *c = a->c;
    const nd_array *r = a->add ? c : a->r;
    Key key;
    memset(&key, 0, sizeof key);
    key.m = key.ldc = n;
    key.n = m;
    key.k = key.lda = key.ldb = k;
    /* scaled: with alpha on the host cuBLASLt 13.1 rounds the product before it adds r */
    key.batch = key.transpose_a = key.scaled = 1;
    key.in_a = a->b_e5m2 ? E5M2 : E4M3;
    key.in_b = a->a_e5m2 ? E5M2 : E4M3;
    key.out = c->dtype;
    key.align_a = alignment(a->b->data, 0, key.in_a);
    key.align_b = alignment(a->a->data, 0, key.in_b);
    key.align_c = alignment(c->data, 0, key.out);
    bool supported = false;
    auto product = [&](const nd_array *from, const nd_array *bias) -> nd_status {
        key.add = from != nullptr;
        key.bias = bias != nullptr;
        from = from ? from : c;
        key.align_from = alignment(from->data, 0, key.out);
        return run(op, device, key, a->b->data, a->a->data, from->data, c->data,
                   bias ? bias->data : nullptr, nullptr, &supported, data_of<float>(a->b_scale),
                   data_of<float>(a->a_scale));
    };
    if (m % 16 == 0 && n % 16 == 0 && k % 16 == 0 && k > 0) {
        ND_TRY(product(r, a->bias));
        if (!supported && a->bias) { /* a float32 result has no such epilogue */
            ND_TRY(product(r, nullptr));
            nd_array rows = repeated(a->bias, c);
            add_args sum = {c, &rows, 0, 0, c};
            ND_TRY(supported ? cuda_add(device, &sum) : ND_OK);
        }
    }
    return supported ? ND_OK
                     : nd_error(ND_EVALUE,
                                "%s: a (%lld, %lld), b (%lld, %lld): this GPU's cuBLASLt has no "
                                "product for them; it takes FP8 from compute capability 8.9 on, "
                                "and sizes that are multiples of 16",
                                op, (long long)m, (long long)k, (long long)n, (long long)k);
}

nd_status cuda_linear_fwd(int device, const linear_fwd_args *a) {
    const char *op = "linear_fwd";
    Product p;
    p.batch = 1;
    p.m = a->y->shape[0];
    p.n = a->y->shape[1];
    p.k = a->x->shape[1];
    p.in = p.out = a->x->dtype;
    p.c = (char *)a->y->data;
    p.from = a->r ? a->r->data : p.c;
    p.bias = nullptr;
    p.scale = nullptr;
    p.add = a->r != nullptr;
    if (p.m == 0 || p.n == 0) {
        return ND_OK;
    }
    if (linear_few_serves(a->x, a->w, few_linear_rows)) {
        return linear_fwd_few(device, a);
    }
    if (p.k > 0) {
        ND_TRY(matrix_of(op, "x", a->x, &p.a));
        ND_TRY(matrix_of(op, "w", a->w, &p.b));
        if (!a->b && !a->r) {
            return multiply(op, device, p);
        }
        if (!a->b || is_aligned16(a->b->data)) {
            bool supported = false;
            p.bias = a->b ? a->b->data : nullptr;
            ND_TRY(multiply_once(op, device, p, &supported));
            if (supported) {
                return ND_OK;
            }
            p.bias = nullptr;
        }
    }
    /* The same sum without the epilogue: start from the bias, r comes last. */
    if (a->b) {
        nd_array rows = repeated(a->b, a->y);
        assign_args start = {a->y, &rows};
        ND_TRY(cuda_assign(device, &start));
    } else {
        fill_args zero = {a->y, 0.0};
        ND_TRY(cuda_fill(device, &zero));
    }
    p.from = p.c;
    p.add = true;
    if (p.k > 0) {
        ND_TRY(multiply(op, device, p));
    }
    add_args sum = {a->r, a->y, 0, 0, a->y}; /* each thread reads its elements before it writes */
    return a->r ? cuda_add(device, &sum) : ND_OK;
}

nd_status cuda_bias_bwd(int device, const bias_bwd_args *a) {
    const int64_t rows = a->dy->shape[0], columns = a->dy->shape[1];
    if (rows == 0 || columns == 0) {
        return ND_OK;
    }
    return with_float("bias_bwd", a->dy->dtype, [&](auto tag) -> nd_status {
        using T = typename decltype(tag)::type;
        constexpr int N = Vec<T>::size;
        const T *dy = data_of<T>(a->dy);
        bool vectors = columns % N == 0 && is_aligned16(dy);
        int64_t strips = ceil_div<int64_t>(columns, vectors ? 32 * N : 32);
        /* About eight blocks a processor, but at least 32 rows for each. */
        int64_t wanted = ceil_div<int64_t>(cuda_device_limits(device)->processors * 8, strips);
        int64_t most = ceil_div<int64_t>(rows, 32);
        int64_t chunks = wanted < most ? wanted : most;
        int64_t chunk = ceil_div(rows, chunks);
        chunks = ceil_div(rows, chunk);
        void *partial;
        ND_TRY(cuda_scratch(device, (size_t)(chunks * columns) * sizeof(float), &partial));
        dim3 grid((unsigned)strips, (unsigned)chunks), block(32, strip_rows);
        auto kernel = vectors ? column_sums_kernel<T, N> : column_sums_kernel<T, 1>;
        ND_TRY(cuda_launch("bias_bwd", device, kernel, grid, block, 0, dy, rows, columns, chunk,
                           (float *)partial));
        float *const to[2] = {data_of<float>(a->db), a->db2 ? data_of<float>(a->db2) : nullptr};
        return cuda_add_columns_of("bias_bwd", device, (const float *)partial, chunks, columns, 0,
                                   a->db2 ? 2 : 1, to);
    });
}

nd_status cuda_matmul_reset(int device) {
    Blas &blas = blas_of(device);
    blas.plans.clear();
    if (blas.handle) {
        cublasLtHandle_t handle = blas.handle;
        blas.handle = nullptr;
        BLAS_TRY("reset", cublasLtDestroy(handle));
    }
    if (blas.workspace) {
        void *workspace = blas.workspace;
        blas.workspace = nullptr;
        CUDA_TRY("reset", cudaFreeAsync(workspace, cuda_stream(device)));
    }
    return ND_OK;
}

void cuda_products(const char *gpu, nd_properties *out) {
    char version[32];
    algorithms::version_text(cublasLtGetVersion(), version);
    snprintf(out->products, sizeof out->products, "cuBLASLt %s, plans %08x", version,
             algorithms::hash());
    algorithms::warning(gpu, cublasLtGetVersion(), out->warning, sizeof out->warning);
}
