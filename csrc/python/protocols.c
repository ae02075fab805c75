/* protocols.c - NDArray to everybody else: NumPy, the buffer protocol, __array_interface__ and
 * __cuda_array_interface__, pickling, printing.
 *
 * numpy() and pickling copy. The buffer protocol and the interfaces share memory; an exported
 * buffer holds a reference on the memory itself. bfloat16, which NumPy does not have, leaves as
 * float32 where a copy is made anyway, and is refused where memory would be shared.
 */
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "exchange.h"
#include "object.h"

/* The buffer protocol's formats. */
static const char *const formats[ND_NUM_DTYPES] = {
    [ND_F32] = "f", [ND_F16] = "e",  [ND_I32] = "i", [ND_I64] = "q",
    [ND_U8] = "B",  [ND_BOOL] = "?", [ND_U16] = "H",
};

static bool has_buffer(const nd_array *a) {
    return a->storage->device->backend->is_host && formats[a->dtype] != NULL;
}

/* ---- copies ---------------------------------------------------------------------------------- */
PyObject *nd_ndarray_numpy(PyObject *self, PyObject *unused) {
    return nd_to_numpy(nd_state_of(self), nd_array_of(self));
}

PyObject *nd_ndarray_tolist(PyObject *self, PyObject *unused) {
    PyObject *array = nd_ndarray_numpy(self, unused);
    PyObject *list = array != NULL ? PyObject_CallMethod(array, "tolist", NULL) : NULL;
    Py_XDECREF(array);
    return list;
}

/* NumPy's protocol: copy=False asks for shared memory or ValueError. */
PyObject *nd_ndarray_array(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|OO:__array__", names, &dtype, &copy)) {
        return NULL;
    }
    const nd_array *a = nd_array_of(self);
    if (copy == Py_False && !has_buffer(a)) {
        char where[24];
        return PyErr_Format(PyExc_ValueError,
                            "__array__: an array of %s on %s cannot be given without a copy",
                            nd_dtype_name(a->dtype), nd_device_text(a->storage->device, where));
    }
    PyObject *array = copy == Py_False ? nd_numpy_from_buffer(self) : nd_ndarray_numpy(self, NULL);
    return nd_numpy_cast(array, dtype, copy != Py_False);
}

/* ---- printing -------------------------------------------------------------------------------- */
PyObject *nd_ndarray_str(PyObject *self) {
    PyObject *array = nd_ndarray_numpy(self, NULL);
    PyObject *text = array != NULL ? PyObject_Str(array) : NULL;
    Py_XDECREF(array);
    return text;
}

static PyObject *array_text(PyObject *array) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *print = numpy != NULL ? PyObject_GetAttrString(numpy, "array2string") : NULL;
    PyObject *positional = PyTuple_Pack(1, array);
    PyObject *named = Py_BuildValue("{ss ss}", "separator", ", ", "prefix", "NDArray(");
    PyObject *text = print && positional && named ? PyObject_Call(print, positional, named) : NULL;
    Py_XDECREF(numpy);
    Py_XDECREF(print);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    return text;
}

/* NDArray([[1., 2.],
 *          [3., 4.]], dtype=float32, device=cpu())
 * The shape is shown where the elements do not tell it: an empty array, one whose memory is lost. */
PyObject *nd_ndarray_repr(PyObject *self) {
    const nd_array *a = nd_array_of(self);
    char device[24];
    const char *where = nd_device_text(a->storage->device, device);
    const char *dtype = nd_dtype_name(a->dtype);
    PyObject *array = nd_ndarray_numpy(self, NULL);
    if (array == NULL) {
        nd_state *state = nd_state_of(self);
        bool lost = PyErr_ExceptionMatches(PyExc_RuntimeError) &&
                    (!PyErr_ExceptionMatches(state->cuda_error) ||
                     PyErr_ExceptionMatches(state->cuda_fatal_error));
        if (!lost) {
            return NULL;
        }
        PyErr_Clear(); /* whoever prints an array, to see what is wrong, must be able to */
    }
    PyObject *body = array != NULL ? array_text(array) : PyUnicode_FromString("its memory is lost");
    PyObject *shape = nd_pack_shape(a->ndim, a->shape);
    PyObject *text = NULL;
    if (body != NULL && shape != NULL) {
        text = array == NULL || nd_size(a) == 0
                   ? PyUnicode_FromFormat("NDArray(%U, shape=%R, dtype=%s, device=%s)", body, shape,
                                          dtype, where)
                   : PyUnicode_FromFormat("NDArray(%U, dtype=%s, device=%s)", body, dtype, where);
    }
    Py_XDECREF(array);
    Py_XDECREF(body);
    Py_XDECREF(shape);
    return text;
}

/* ---- the buffer protocol --------------------------------------------------------------------- */
/* One that asks to write counts as a write when it is handed out and when it is released. NumPy and
 * memoryview do not ask, and may write: a hash of the elements tells whether they did, at the
 * release and, while the buffer is held, whenever a graph asks about the array. */
struct nd_exported {
    nd_exported *next;
    nd_array array; /* holds a reference on the memory */
    bool writable;
    bool hashed;
    uint64_t hash;
    Py_ssize_t shape[ND_MAX_DIMS];
    Py_ssize_t strides[ND_MAX_DIMS];
};

static uint64_t hash_of(const nd_array *a) {
    uint64_t lanes[4] = {1, 2, 3, 4}, word;
    uintptr_t low = 0, high = 0;
    nd_byte_range(a, &low, &high);
    const char *memory = (const char *)low;
    size_t bytes = high - low, i = 0;
    for (; i + sizeof lanes <= bytes; i += sizeof lanes) {
        for (size_t k = 0; k < 4; k++) {
            memcpy(&word, memory + i + 8 * k, 8);
            lanes[k] = (lanes[k] ^ word) * 0x9e3779b97f4a7c15u;
            lanes[k] ^= lanes[k] >> 32;
        }
    }
    for (; i < bytes; i++) {
        lanes[i % 4] = (lanes[i % 4] ^ (uint8_t)memory[i]) * 0x9e3779b97f4a7c15u;
    }
    for (size_t k = 1; k < 4; k++) {
        lanes[0] = (lanes[0] ^ lanes[k]) * 0x9e3779b97f4a7c15u;
        lanes[0] ^= lanes[0] >> 32;
    }
    return lanes[0];
}

static void look_at(nd_state *state, nd_exported *hold) {
    uint64_t before = hold->hash;
    hold->hash = hash_of(&hold->array);
    if (hold->hashed && hold->hash != before) {
        nd_count_write(state, &hold->array);
    }
    hold->hashed = true;
}

void nd_count_outside_writes(nd_state *state, const nd_array *a) {
    for (nd_exported *hold = state->exported; hold != NULL; hold = hold->next) {
        if (hold->array.storage == a->storage) {
            look_at(state, hold);
        }
    }
}

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
    nd_exported *hold = calloc(1, sizeof *hold);
    if (hold == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t item = (Py_ssize_t)nd_dtype_size(a->dtype);
    for (int i = 0; i < a->ndim; i++) {
        hold->shape[i] = (Py_ssize_t)a->shape[i];
        hold->strides[i] = (Py_ssize_t)a->strides[i] * item;
    }
    nd_state *state = nd_state_of(self);
    nd_array_view(a, &hold->array);
    hold->writable = (flags & PyBUF_WRITABLE) == PyBUF_WRITABLE;
    if (hold->writable) {
        nd_count_write(state, a);
    } else if (flags != PyBUF_SIMPLE) { /* plain bytes are asked for to be read: files, hashes */
        look_at(state, hold);
    }
    hold->next = state->exported;
    state->exported = hold;
    static char nothing[8]; /* an empty array has no memory, but a buffer may not be NULL */
    view->buf = a->data != NULL ? a->data : nothing;
    view->obj = Py_NewRef(self);
    view->len = (Py_ssize_t)nd_size(a) * item;
    view->readonly = 0;
    view->itemsize = item;
    view->format = flags & PyBUF_FORMAT ? (char *)formats[a->dtype] : NULL;
    view->ndim = flags & PyBUF_ND ? a->ndim : 1; /* one axis, of bytes, to who asks for no shape */
    view->shape = flags & PyBUF_ND ? hold->shape : NULL;
    view->strides = has_strides ? hold->strides : NULL;
    view->suboffsets = NULL;
    view->internal = hold;
    return 0;
}

void nd_ndarray_releasebuffer(PyObject *self, Py_buffer *view) {
    nd_exported *hold = view->internal;
    nd_state *state = nd_state_of(self);
    if (hold->writable) {
        nd_count_write(state, &hold->array);
    } else if (hold->hashed) {
        look_at(state, hold);
    }
    nd_exported **link = &state->exported;
    while (*link != hold) {
        link = &(*link)->next;
    }
    *link = hold->next;
    nd_array_clear(&hold->array);
    free(hold);
}

/* ---- array interfaces ------------------------------------------------------------------------ */
static PyObject *interface(PyObject *self, const char *name, int version) {
    static const char *const types[ND_NUM_DTYPES] = {
        [ND_F32] = "<f4", [ND_F16] = "<f2",  [ND_I32] = "<i4", [ND_I64] = "<i8",
        [ND_U8] = "|u1",  [ND_BOOL] = "|b1", [ND_U16] = "<u2",
    };
    nd_state *state = nd_state_of(self);
    const nd_array *a = nd_array_of(self);
    if (types[a->dtype] == NULL) {
        return PyErr_Format(PyExc_AttributeError, "%s: %s has no type code; use DLPack", name,
                            nd_dtype_name(a->dtype));
    }
    int64_t bytes[ND_MAX_DIMS];
    for (int i = 0; i < a->ndim; i++) {
        bytes[i] = a->strides[i] * (int64_t)nd_dtype_size(a->dtype);
    }
    if (nd_check_live(state, name, "x", a) < 0) {
        return NULL;
    }
    nd_count_write(state, a); /* whoever asks may write */
    PyObject *strides = nd_is_contiguous(a) ? Py_NewRef(Py_None) : nd_pack_shape(a->ndim, bytes);
    PyObject *address = PyLong_FromVoidPtr(a->data);
    return Py_BuildValue("{sN ss s(NO) sN si}", "shape", nd_pack_shape(a->ndim, a->shape),
                         "typestr", types[a->dtype], "data", address, Py_False, "strides", strides,
                         "version", version);
}

PyObject *nd_array_interface(PyObject *self, void *closure) {
    nd_device *device = nd_array_of(self)->storage->device;
    char text[24];
    if (!device->backend->is_host) {
        return PyErr_Format(PyExc_AttributeError, "__array_interface__: the array is on %s",
                            nd_device_text(device, text));
    }
    return interface(self, "__array_interface__", 3);
}

PyObject *nd_cuda_array_interface(PyObject *self, void *closure) {
    nd_device *device = nd_array_of(self)->storage->device;
    char text[24];
    if (device != nd_device_at(BACKEND_cuda, device->index)) {
        return PyErr_Format(PyExc_AttributeError, "__cuda_array_interface__: the array is on %s",
                            nd_device_text(device, text));
    }
    /* Without a stream in the interface the reader may use the memory at once. */
    nd_status status = device->backend->synchronize(device->index);
    if (status != ND_OK) {
        return nd_raise(nd_state_of(self), "__cuda_array_interface__", device, status);
    }
    return interface(self, "__cuda_array_interface__", 2);
}

/* ---- pickling: by value ---------------------------------------------------------------------- */
PyObject *nd_ndarray_reduce(PyObject *self, PyObject *unused) {
    nd_state *state = nd_state_of(self);
    const nd_array *a = nd_array_of(self);
    nd_array host, compact;
    if (nd_to_device(state, a, nd_host(), &host) < 0) {
        return NULL;
    }
    int copied = nd_copy(state, &host, a->dtype, &compact);
    nd_array_clear(&host);
    if (copied < 0) {
        return NULL;
    }
    PyObject *module = PyType_GetModule(state->ndarray_type);
    PyObject *rebuild = module != NULL ? PyObject_GetAttrString(module, "_rebuild") : NULL;
    PyObject *device = nd_device_object(state, a->storage->device);
    PyObject *result = NULL;
    if (rebuild != NULL && device != NULL) {
        result = Py_BuildValue("O(y#NsO)", rebuild, compact.data != NULL ? compact.data : "",
                               (Py_ssize_t)compact.storage->bytes,
                               nd_pack_shape(compact.ndim, compact.shape),
                               nd_dtype_name(compact.dtype), device);
    }
    Py_XDECREF(rebuild);
    Py_XDECREF(device);
    nd_array_clear(&compact);
    return result;
}

/* An array pickled on a device that is not here comes back on the CPU. */
static PyObject *module_rebuild(PyObject *module, PyObject *arguments) {
    nd_state *state = nd_module_state(module);
    Py_buffer bytes;
    PyObject *shape_object, *dtype_object, *device_object;
    nd_array host, there;
    int64_t shape[ND_MAX_DIMS];
    int ndim;
    nd_dtype dtype;
    nd_device *device;
    if (!PyArg_ParseTuple(arguments, "y*OOO:_rebuild", &bytes, &shape_object, &dtype_object,
                          &device_object)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (nd_dtype_from(dtype_object, &dtype) < 0 ||
        nd_shape_from(shape_object, "_rebuild", &ndim, shape) < 0 ||
        nd_new_array(state, "_rebuild", nd_host(), dtype, ndim, shape, &host) < 0) {
        goto done;
    }
    if ((size_t)bytes.len != (size_t)nd_size(&host) * nd_dtype_size(dtype)) {
        nd_array_clear(&host);
        PyErr_SetString(PyExc_ValueError, "_rebuild: the bytes are not those of the shape");
        goto done;
    }
    if (bytes.len > 0) {
        memcpy(host.data, bytes.buf, (size_t)bytes.len);
    }
    if (nd_device_from(state, device_object, &device) < 0) {
        if (nd_is_out_of_memory()) {
            nd_array_clear(&host);
            goto done;
        }
        PyErr_Clear();
        device = nd_host();
    }
    if (nd_to_device(state, &host, device, &there) == 0) {
        result = nd_wrap(state, &there);
    }
    nd_array_clear(&host);
done:
    PyBuffer_Release(&bytes);
    return result;
}

PyMethodDef nd_pickle_functions[] = {
    {"_rebuild", module_rebuild, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
