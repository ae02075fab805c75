/* buffer.c - the buffer protocol of NDArray, which shares its memory.
 *
 * A buffer that is handed out holds a reference on the memory itself. bfloat16 has no format.
 */
#include <stdlib.h>

#include "backends.h"
#include "exchange.h"
#include "object.h"
#include "run.h"

/* The buffer protocol's formats. */
static const char *const formats[ND_NUM_DTYPES] = {
    [ND_F32] = "f", [ND_F16] = "e",  [ND_I32] = "i", [ND_I64] = "q",
    [ND_U8] = "B",  [ND_BOOL] = "?", [ND_U16] = "H",
};

static bool has_buffer(const nd_array *a) {
    return a->storage->device->backend->is_host && formats[a->dtype] != NULL;
}

/* A buffer that asks to write counts as a write when it is handed out and when it is released. NumPy
 * and memoryview do not ask, and may write: that is not seen. */
typedef struct {
    nd_array array; /* holds a reference on the memory */
    bool writable;
    Py_ssize_t shape[ND_MAX_DIMS];
    Py_ssize_t strides[ND_MAX_DIMS];
} exported;

static bool is_fortran(const nd_array *a) {
    nd_array reversed = *a;
    for (int i = 0; i < a->ndim; i++) {
        reversed.shape[i] = a->shape[a->ndim - 1 - i];
        reversed.strides[i] = a->strides[a->ndim - 1 - i];
    }
    return nd_is_contiguous(&reversed);
}

int nd_ndarray_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    const nd_array *a = nd_array_of(self);
    view->obj = NULL;
    if (!has_buffer(a)) {
        char where[24];
        FAIL(PyExc_BufferError, "an array of %s on %s has no buffer to share; numpy() copies it",
             nd_dtype_name(a->dtype), nd_device_text(a->storage->device, where));
    }
    bool c_order = nd_is_contiguous(a), f_order = is_fortran(a);
    bool has_strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES;
    if (((flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS && !c_order) ||
        ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !f_order) ||
        ((flags & PyBUF_ANY_CONTIGUOUS) == PyBUF_ANY_CONTIGUOUS && !c_order && !f_order) ||
        (!has_strides && !c_order)) {
        FAIL(PyExc_BufferError, "the array is not contiguous; compact() copies it");
    }
    exported *hold = calloc(1, sizeof *hold);
    if (hold == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t item = (Py_ssize_t)nd_dtype_size(a->dtype);
    for (int i = 0; i < a->ndim; i++) {
        hold->shape[i] = (Py_ssize_t)a->shape[i];
        hold->strides[i] = (Py_ssize_t)a->strides[i] * item;
    }
    nd_array_view(a, &hold->array);
    hold->writable = (flags & PyBUF_WRITABLE) == PyBUF_WRITABLE;
    if (hold->writable) {
        nd_count_write(a);
    }
    static char nothing[8]; /* an empty array has no memory, but a buffer may not be NULL */
    view->buf = a->data != NULL ? a->data : nothing;
    view->obj = Py_NewRef(self);
    view->len = (Py_ssize_t)nd_size(a) * item;
    view->readonly = 0;
    view->itemsize = item;
    view->format = flags & PyBUF_FORMAT ? (char *)formats[a->dtype] : NULL;
    view->ndim = flags & PyBUF_ND ? a->ndim : 1; /* without a shape one axis, of bytes */
    view->shape = flags & PyBUF_ND ? hold->shape : NULL;
    view->strides = has_strides ? hold->strides : NULL;
    view->suboffsets = NULL;
    view->internal = hold;
    return 0;
}

void nd_ndarray_releasebuffer(PyObject *self, Py_buffer *view) {
    exported *hold = view->internal;
    if (hold->writable) {
        nd_count_write(&hold->array);
    }
    nd_array_clear(&hold->array);
    free(hold);
}
