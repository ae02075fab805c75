/* array.c - refcounted memory and strided views: all of needle.h that is not a status.
 *
 * Linked into _C and _cuda.so alike: nothing here keeps state. Memory comes from and goes back to
 * the backend of its device; a storage that a cuda_reset() has outlived is dropped without a call.
 */
#include "needle.h"

#include <stdlib.h>
#include <string.h>

#include "backend.h"

/* ---- dtypes ---------------------------------------------------------------------------------- */
const char *nd_dtype_name(nd_dtype dtype) {
    static const char *const names[] = {
#define X(code, name, bytes, is_float) name,
        ND_DTYPES(X)
#undef X
    };
    return dtype >= 0 && dtype < ND_NUM_DTYPES ? names[dtype] : "unknown";
}

size_t nd_dtype_size(nd_dtype dtype) {
    static const uint8_t sizes[] = {
#define X(code, name, bytes, is_float) bytes,
        ND_DTYPES(X)
#undef X
    };
    return sizes[dtype];
}

bool nd_dtype_is_float(nd_dtype dtype) {
    static const bool floats[] = {
#define X(code, name, bytes, is_float) is_float,
        ND_DTYPES(X)
#undef X
    };
    return floats[dtype];
}

/* ---- memory ---------------------------------------------------------------------------------- */
static nd_status storage_make(nd_device *device, nd_storage **out) {
    nd_storage *storage = calloc(1, sizeof *storage);
    if (storage == NULL) {
        return nd_error(ND_EMEMORY, "out of host memory");
    }
    storage->references = 1;
    storage->device = device;
    storage->generation = device->generation;
    *out = storage;
    return ND_OK;
}

nd_status nd_storage_new(nd_device *device, size_t bytes, nd_storage **out) {
    nd_storage *storage = NULL;
    ND_TRY(storage_make(device, &storage));
    storage->bytes = bytes;
    if (bytes > 0) {
        nd_status status = device->backend->allocate(device->index, bytes, &storage->memory);
        if (status != ND_OK) {
            free(storage);
            /* The message may be in another shared object: bring it here. */
            return nd_error(status, "%s", device->backend->last_error());
        }
    }
    *out = storage;
    return ND_OK;
}

nd_status nd_storage_borrow(nd_device *device, void *memory, size_t bytes, void *owner,
                            void (*release)(void *), nd_storage **out) {
    nd_storage *storage = NULL;
    ND_TRY(storage_make(device, &storage));
    storage->memory = memory;
    storage->bytes = bytes;
    storage->owner = owner;
    storage->release = release;
    *out = storage;
    return ND_OK;
}

void nd_storage_retain(nd_storage *storage) {
    __atomic_fetch_add(&storage->references, 1, __ATOMIC_RELAXED);
}

void nd_storage_release(nd_storage *storage) {
    if (storage == NULL || __atomic_sub_fetch(&storage->references, 1, __ATOMIC_ACQ_REL) > 0) {
        return;
    }
    if (storage->release != NULL) {
        storage->release(storage->owner);
    } else if (storage->memory != NULL && storage->generation == storage->device->generation) {
        /* A destructor cannot report a failure; the next call on the device does. */
        (void)storage->device->backend->release(storage->device->index, storage->memory);
    }
    free(storage);
}

/* ---- arrays ---------------------------------------------------------------------------------- */
nd_status nd_check_shape(nd_dtype dtype, int ndim, const int64_t *shape) {
    int64_t bytes = (int64_t)nd_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) {
            return nd_error(ND_EVALUE, "axis %d has the negative size %lld", i,
                            (long long)shape[i]);
        }
        if (__builtin_mul_overflow(bytes, shape[i] ? shape[i] : 1, &bytes)) {
            return nd_error(ND_EVALUE, "the size passes 2^63 bytes");
        }
    }
    return ND_OK;
}

nd_status nd_array_new(nd_device *device, nd_dtype dtype, int ndim, const int64_t *shape,
                       nd_array *out) {
    if (ndim < 0 || ndim > ND_MAX_DIMS) {
        return nd_error(ND_EVALUE, "an array has at most %d axes, not %d", ND_MAX_DIMS, ndim);
    }
    ND_TRY(nd_check_shape(dtype, ndim, shape));
    size_t bytes = nd_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) {
        bytes *= (size_t)shape[i];
    }
    nd_storage *storage = NULL;
    ND_TRY(nd_storage_new(device, bytes, &storage));
    out->storage = storage;
    out->data = storage->memory;
    out->dtype = dtype;
    out->ndim = ndim;
    if (ndim > 0) {
        memcpy(out->shape, shape, (size_t)ndim * sizeof *shape);
    }
    nd_contiguous_strides(ndim, shape, out->strides);
    return ND_OK;
}

void nd_array_view(const nd_array *of, nd_array *out) {
    nd_storage_retain(of->storage);
    if (out != of) {
        *out = *of;
    }
}

void nd_array_clear(nd_array *a) {
    nd_storage_release(a->storage);
    a->storage = NULL;
    a->data = NULL;
}

int64_t nd_size(const nd_array *a) {
    int64_t size = 1;
    for (int i = 0; i < a->ndim; i++) {
        size *= a->shape[i];
    }
    return size;
}

bool nd_is_contiguous(const nd_array *a) {
    int64_t expected = 1;
    bool matches = true;
    for (int i = a->ndim - 1; i >= 0; i--) {
        if (a->shape[i] == 0) {
            return true;
        }
        matches &= a->shape[i] == 1 || a->strides[i] == expected;
        expected *= a->shape[i];
    }
    return matches;
}

void nd_contiguous_strides(int ndim, const int64_t *shape, int64_t *strides) {
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
}

nd_array nd_merged(const nd_array *a, int lead) {
    nd_array merged = *a;
    int last = lead > 0;
    merged.ndim = last + 1;
    merged.shape[0] = merged.shape[last] = 1;
    for (int axis = 0; axis < a->ndim; axis++) {
        merged.shape[axis < lead ? 0 : last] *= a->shape[axis];
    }
    nd_contiguous_strides(merged.ndim, merged.shape, merged.strides);
    return merged;
}

bool nd_joined(const nd_array *a, const nd_array *b, nd_array *out) {
    bool fits = a->storage == b->storage && a->dtype == b->dtype && a->ndim == b->ndim &&
                a->ndim > 0 && nd_is_contiguous(a) && nd_is_contiguous(b) &&
                (char *)a->data + nd_size(a) * (int64_t)nd_dtype_size(a->dtype) == b->data;
    for (int i = 1; i < a->ndim && fits; i++) {
        fits = a->shape[i] == b->shape[i];
    }
    if (fits) {
        *out = *a;
        out->shape[0] += b->shape[0];
        nd_contiguous_strides(out->ndim, out->shape, out->strides);
    }
    return fits;
}

nd_status nd_broadcast_to(const nd_array *a, int ndim, const int64_t *shape, nd_array *out) {
    if (ndim < a->ndim || ndim > ND_MAX_DIMS) {
        return nd_error(ND_EVALUE, "%d axes cannot be broadcast to %d", a->ndim, ndim);
    }
    ND_TRY(nd_check_shape(a->dtype, ndim, shape));
    nd_array result = {.storage = a->storage, .data = a->data, .dtype = a->dtype, .ndim = ndim};
    for (int i = 0; i < ndim; i++) {
        int own = i - (ndim - a->ndim);
        result.shape[i] = shape[i];
        if (own < 0) {
            result.strides[i] = 0;
        } else if (a->shape[own] == shape[i]) {
            result.strides[i] = a->strides[own];
        } else if (a->shape[own] == 1) {
            result.strides[i] = 0;
        } else {
            return nd_error(ND_EVALUE, "axis %d has size %lld, which cannot be broadcast to %lld",
                            own, (long long)a->shape[own], (long long)shape[i]);
        }
    }
    nd_array_view(&result, out);
    return ND_OK;
}

nd_status nd_broadcast_shape(const nd_array *a, const nd_array *b, int *ndim, int64_t *shape) {
    int n = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int i = 1; i <= n; i++) { /* counted from the last axis */
        int64_t left = i <= a->ndim ? a->shape[a->ndim - i] : 1;
        int64_t right = i <= b->ndim ? b->shape[b->ndim - i] : 1;
        if (left != right && left != 1 && right != 1) {
            return nd_error(ND_EVALUE,
                            "axis %d from the end is %lld in one operand, %lld in the "
                            "other: sizes must be equal or 1",
                            i, (long long)left, (long long)right);
        }
        shape[n - i] = left == 1 ? right : left;
    }
    *ndim = n;
    return ND_OK;
}

bool nd_byte_range(const nd_array *a, uintptr_t *low, uintptr_t *high) {
    int64_t first = 0, last = 0;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] == 0) {
            return false;
        }
        int64_t reach = (a->shape[i] - 1) * a->strides[i];
        if (reach < 0) {
            first += reach;
        } else {
            last += reach;
        }
    }
    int64_t item = (int64_t)nd_dtype_size(a->dtype);
    *low = (uintptr_t)a->data + (uintptr_t)(first * item);
    *high = (uintptr_t)a->data + (uintptr_t)((last + 1) * item);
    return true;
}

bool nd_may_overlap(const nd_array *a, const nd_array *b) {
    bool both_own = a->storage->release == NULL && b->storage->release == NULL;
    if (both_own && a->storage != b->storage) {
        return false;
    }
    uintptr_t a_low, a_high, b_low, b_high;
    return a->storage->device == b->storage->device && nd_byte_range(a, &a_low, &a_high) &&
           nd_byte_range(b, &b_low, &b_high) && a_low < b_high && b_low < a_high;
}

/* ---- loops ----------------------------------------------------------------------------------- */
void nd_collapse(int n, const nd_array *const *operands, nd_loop *loop) {
    const nd_array *model = NULL;
    for (int k = 0; k < n && model == NULL; k++) {
        model = operands[k];
    }
    loop->ndim = 0;
    loop->size = 1;
    for (int i = 0; i < model->ndim; i++) {
        int64_t extent = model->shape[i];
        loop->size *= extent;
        if (extent == 1) {
            continue;
        }
        /* The axis merges into the one outside it when every operand's outer step equals the
         * whole way along this axis. */
        int outer = loop->ndim - 1;
        bool merge = outer >= 0;
        for (int k = 0; k < n && merge; k++) {
            int64_t stride = operands[k] != NULL ? operands[k]->strides[i] : 0;
            merge = loop->strides[k][outer] == stride * extent;
        }
        int at = merge ? outer : loop->ndim++;
        loop->shape[at] = merge ? loop->shape[outer] * extent : extent;
        for (int k = 0; k < n; k++) {
            loop->strides[k][at] = operands[k] != NULL ? operands[k]->strides[i] : 0;
        }
    }
}

bool nd_reshape_strides(const nd_array *a, nd_array *view) {
    const nd_array *operands[1] = {a};
    nd_loop loop;
    nd_collapse(1, operands, &loop);
    if (loop.size == 0 || loop.ndim == 0) {
        nd_contiguous_strides(view->ndim, view->shape, view->strides);
        return true;
    }
    /* From the last axis outwards, each merged axis of the old shape is cut into new ones. */
    int at = loop.ndim - 1;
    int64_t left = loop.shape[at], stride = loop.strides[0][at];
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] > 1 && left == 1) {
            at--;
            left = loop.shape[at];
            stride = loop.strides[0][at];
        }
        if (left % view->shape[i] != 0) {
            return false;
        }
        view->strides[i] = stride;
        stride *= view->shape[i];
        left /= view->shape[i];
    }
    return true;
}

nd_status nd_extent(const nd_array *a, int64_t *first, int64_t *last) {
    ND_TRY(nd_check_shape(a->dtype, a->ndim, a->shape));
    int64_t item = (int64_t)nd_dtype_size(a->dtype), most = INT64_MAX / item;
    __int128 low = 0, high = item; /* sizes and strides times item are below 2^63 */
    for (int i = 0; i < a->ndim; i++) {
        if (a->strides[i] > most || a->strides[i] < -most) {
            return nd_error(ND_EVALUE, "the stride %lld of axis %d reaches outside 2^63 bytes",
                            (long long)a->strides[i], i);
        }
        __int128 reach = (__int128)((a->shape[i] - 1) * item) * a->strides[i];
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    bool empty = nd_size(a) == 0;
    if (!empty && (low < INT64_MIN / 2 || high > INT64_MAX / 2)) {
        return nd_error(ND_EVALUE, "shape and strides reach outside 2^63 bytes");
    }
    *first = empty ? 0 : (int64_t)low;
    *last = empty ? 0 : (int64_t)high;
    return ND_OK;
}

nd_status nd_check_bounds(const nd_array *a) {
    int64_t first, last;
    ND_TRY(nd_extent(a, &first, &last));
    int64_t offset = (const char *)a->data - (const char *)a->storage->memory;
    if (last > first && (first + offset < 0 || last + offset > (int64_t)a->storage->bytes)) {
        return nd_error(ND_EVALUE,
                        "shape and strides reach outside the array's memory of %zu bytes",
                        a->storage->bytes);
    }
    return ND_OK;
}
