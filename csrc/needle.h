/* needle.h - shared by every part of needle: status codes, dtypes, memory, strided views.
 *
 * An nd_array is a strided view on refcounted memory. Strides and offsets count ELEMENTS, are
 * signed 64-bit, and may be zero (broadcast) or negative (flip). `data` already includes the
 * offset, so element (i, j) of a matrix is ((T *)a->data)[i * a->strides[0] + j * a->strides[1]].
 * Nothing here knows Python, CUDA or any operation.
 */
#ifndef NEEDLE_H
#define NEEDLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ND_MAX_DIMS 8

/* ---- status -------------------------------------------------------------------------------------
 * A function that can fail returns nd_status; on failure it has left "op: operand: what" in the
 * calling thread's message. csrc/python/errors.c raises the exception named beside each code. */
typedef enum {
    ND_OK = 0,
    ND_EVALUE,  /* ValueError: a shape, size or value is wrong */
    ND_ETYPE,   /* TypeError: a dtype or device is wrong */
    ND_EINDEX,  /* IndexError */
    ND_EMEMORY, /* MemoryError: host memory */
    ND_ECUDA,   /* needle.CudaError: can be retried (device memory, launch configuration) */
    ND_EFATAL,  /* needle.CudaFatalError: the context is lost, the process must end */
    ND_ESYSTEM, /* RuntimeError: a library or the system refused */
} nd_status;

/* Record a printf-style message for this thread and return `status` (so: return nd_error(...)).
 * Linked into each shared object with hidden visibility; a backend hands its own message out
 * through nd_backend.last_error. */
nd_status nd_error(nd_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
const char *nd_last_error(void);

#define ND_TRY(call)                       \
    do {                                   \
        nd_status nd_try_status_ = (call); \
        if (nd_try_status_ != ND_OK) {     \
            return nd_try_status_;         \
        }                                  \
    } while (0)

/* ---- dtypes -------------------------------------------------------------------------------------
 * X(code, name, bytes, is_float): the one list; the enum, names and sizes come from it. */
#define ND_DTYPES(X)             \
    X(ND_F32, "float32", 4, 1)   \
    X(ND_BF16, "bfloat16", 2, 1) \
    X(ND_F16, "float16", 2, 1)   \
    X(ND_I32, "int32", 4, 0)     \
    X(ND_I64, "int64", 8, 0)     \
    X(ND_U8, "uint8", 1, 0)      \
    X(ND_BOOL, "bool", 1, 0)     \
    X(ND_U16, "uint16", 2, 0)

typedef enum {
#define X(code, name, bytes, is_float) code,
    ND_DTYPES(X)
#undef X
        ND_NUM_DTYPES
} nd_dtype;

const char *nd_dtype_name(nd_dtype dtype);
size_t nd_dtype_size(nd_dtype dtype);
bool nd_dtype_is_float(nd_dtype dtype);

/* ---- memory ---------------------------------------------------------------------------------- */
typedef struct nd_device nd_device; /* in backend.h; equal devices are equal pointers */

typedef struct nd_storage {
    int64_t references; /* atomic */
    void *memory;       /* device memory on CUDA; NULL only when bytes == 0 */
    size_t bytes;
    nd_device *device;
    uint64_t generation; /* the device's generation when made; differs after cuda_reset(): stale */
    void *owner;         /* memory borrowed from elsewhere (a NumPy array, DLPack) ... */
    void (*release)(void *owner); /* ... and how to give it back; NULL: the backend frees memory */
    uint64_t written;             /* process-wide number of the last write; 0: only initialised */
} nd_storage;

typedef struct nd_array {
    nd_storage *storage; /* a counted reference held by the maker of the view */
    void *data;          /* storage->memory plus the offset */
    nd_dtype dtype;
    int ndim;
    int64_t shape[ND_MAX_DIMS];
    int64_t strides[ND_MAX_DIMS];
} nd_array;

/* All in array.c. Functions that fill an nd_array give it a NEW reference; nd_array_clear drops
 * it. */
nd_status nd_storage_new(nd_device *device, size_t bytes, nd_storage **out);
nd_status nd_storage_borrow(nd_device *device, void *memory, size_t bytes, void *owner,
                            void (*release)(void *), nd_storage **out);
void nd_storage_retain(nd_storage *storage);
void nd_storage_release(nd_storage *storage);

/* A fresh C-contiguous array; its elements are undefined. ND_EVALUE when the size overflows. */
nd_status nd_array_new(nd_device *device, nd_dtype dtype, int ndim, const int64_t *shape,
                       nd_array *out);
void nd_array_view(const nd_array *of, nd_array *out); /* same geometry, one more reference */
void nd_array_clear(nd_array *a);

/* ND_EVALUE for a negative size, or when the elements are more than any memory could hold. Size 0
 * counts as 1: strides are still computed from the other sizes. */
nd_status nd_check_shape(nd_dtype dtype, int ndim, const int64_t *shape);
int64_t nd_size(const nd_array *a);       /* number of elements; 1 for 0-d */
bool nd_is_contiguous(const nd_array *a); /* C order, size-1 axes ignored, empty is true */
void nd_contiguous_strides(int ndim, const int64_t *shape, int64_t *strides);
/* A C-contiguous array as a matrix, its first `lead` axes in one and the others in one; as a vector
 * where lead is 0. Borrows the storage: never cleared. */
nd_array nd_merged(const nd_array *a, int lead);
/* One view over both along the first axis, which borrows as nd_merged does. False where b does not
 * follow a in memory, is of another shape beyond that axis, or one is not C-contiguous. */
bool nd_joined(const nd_array *a, const nd_array *b, nd_array *out);
/* Stretch `a` to `shape` with zero strides, NumPy's rule. ND_EVALUE names the axis that cannot,
 * or says what is wrong with the shape. */
nd_status nd_broadcast_to(const nd_array *a, int ndim, const int64_t *shape, nd_array *out);
/* NumPy's common shape of two operands. */
nd_status nd_broadcast_shape(const nd_array *a, const nd_array *b, int *ndim, int64_t *shape);
/* Set `view`'s strides so that it walks `a` in the same order under another shape of the same size.
 * False when no strides can. */
bool nd_reshape_strides(const nd_array *a, nd_array *view);
/* The bytes of a view lie from data + first to data + last; both 0 when it has none. ND_EVALUE
 * where they, or the stride of any axis, pass 64 bits. */
nd_status nd_extent(const nd_array *a, int64_t *first, int64_t *last);
/* ND_EVALUE unless all elements of the view lie inside its storage. */
nd_status nd_check_bounds(const nd_array *a);
/* The bytes [low, high) that a view's elements lie in. False when it has none. */
bool nd_byte_range(const nd_array *a, uintptr_t *low, uintptr_t *high);
/* Do the two views possibly touch the same element? (conservative: compares byte ranges) */
bool nd_may_overlap(const nd_array *a, const nd_array *b);

/* Iteration space of n same-shaped operands after merging axes that every operand walks alike and
 * dropping size-1 axes: what elementwise kernels loop over. shape[0..ndim), innermost last. */
#define ND_MAX_OPERANDS 4
typedef struct {
    int ndim;     /* 0: a single element */
    int64_t size; /* product of shape; 0: nothing to do */
    int64_t shape[ND_MAX_DIMS];
    int64_t strides[ND_MAX_OPERANDS][ND_MAX_DIMS];
} nd_loop;
/* An operand given as NULL (a scalar) walks with zero strides. `shape` is that of operands[0]. */
void nd_collapse(int n, const nd_array *const *operands, nd_loop *loop);

#ifdef __cplusplus
}
#endif
#endif
