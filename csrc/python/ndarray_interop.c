/* ndarray_interop.c - NDArray to and from everybody else: NumPy's C API, the buffer protocol,
 * __array_interface__ and __cuda_array_interface__, pickling, printing.
 *
 * array() and numpy() copy. The buffer protocol and the interfaces share memory; an exported
 * buffer holds a reference on the memory itself. bfloat16, which NumPy does not have, leaves as float32 where a copy is made anyway, and
 * is refused where memory would be shared.
 */
#include "ndarray.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
#include <stdlib.h>
#include <string.h>

/* ---- dtypes elsewhere ------------------------------------------------------------------------- */
/* NumPy's number and the buffer protocol's format; bfloat16 goes through float32. */
static const struct {
    int numpy;
    const char *format;
} foreign[ND_NUM_DTYPES] = {
    [ND_F32] = {NPY_FLOAT32, "f"}, [ND_BF16] = {NPY_FLOAT32, NULL}, [ND_F16] = {NPY_FLOAT16, "e"},
    [ND_I32] = {NPY_INT32, "i"},   [ND_I64] = {NPY_INT64, "q"},     [ND_U8] = {NPY_UINT8, "B"},
    [ND_BOOL] = {NPY_BOOL, "?"},   [ND_U16] = {NPY_UINT16, "H"},
};

bool nd_is_numpy_array(PyObject *object) { return PyArray_Check(object); }

int nd_number_from(PyObject *object, double *value, bool *is_float) {
    *is_float = false;
    PyObject *number;
    if (PyFloat_Check(object)) {
        *value = PyFloat_AS_DOUBLE(object);
        *is_float = true;
        return 1;
    }
    if (PyBool_Check(object)) {
        *value = object == Py_True;
        return 1;
    }
    if (PyLong_Check(object)) {
        number = Py_NewRef(object);
    } else if (PyArray_IsScalar(object, Integer)) {
        number = PyNumber_Index(object);
    } else if (PyArray_IsScalar(object, Floating)) {
        number = PyNumber_Float(object);
        *is_float = true;
    } else if (PyArray_IsScalar(object, Bool)) {
        number = PyBool_FromLong(PyObject_IsTrue(object));
    } else {
        return 0;
    }
    *value = number != NULL ? PyFloat_AsDouble(number) : -1.0;
    Py_XDECREF(number);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 1;
}

/* The dtype that keeps a NumPy array's numbers best. */
static int natural_dtype(PyArrayObject *array, nd_dtype *out) {
    PyArray_Descr *descr = PyArray_DESCR(array);
    npy_intp bytes = PyArray_ITEMSIZE(array);
    switch (descr->kind) {
    case 'f':
        *out = bytes == 2 ? ND_F16 : ND_F32;
        return 0;
    case 'i':
        *out = bytes <= 4 ? ND_I32 : ND_I64;
        return 0;
    case 'u':
        *out = bytes == 1 ? ND_U8 : bytes == 2 ? ND_U16 : ND_I64;
        return 0;
    case 'b':
        *out = ND_BOOL;
        return 0;
    default:
        break;
    }
    if (strstr(descr->typeobj->tp_name, "bfloat16") != NULL) {
        *out = ND_BF16;
        return 0;
    }
    if (descr->kind == 'O') { /* whatever converts to numbers */
        *out = ND_F32;
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "array: cannot make an NDArray of NumPy's %S; its real and integer "
                 "dtypes can be",
                 descr);
    return -1;
}

int nd_from_object(nd_state *state, PyObject *object, bool natural, nd_dtype dtype,
                   nd_device *device, nd_array *out) {
    if (nd_is_ndarray(state, object)) {
        nd_array there;
        const nd_array *a = nd_array_of(object);
        if (nd_to_device(state, a, device, &there) < 0) {
            return -1;
        }
        int result = nd_copy(state, &there, natural ? a->dtype : dtype, out);
        nd_array_clear(&there);
        return result;
    }
    PyArrayObject *any = (PyArrayObject *)PyArray_FROM_O(object);
    if (any == NULL) {
        return -1;
    }
    nd_dtype own;
    if (natural_dtype(any, &own) < 0) {
        Py_DECREF(any);
        return -1;
    }
    dtype = natural ? own : dtype;
    if (PyArray_NDIM(any) > ND_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "array: has %d axes; an NDArray has at most %d",
                     PyArray_NDIM(any), ND_MAX_DIMS);
        Py_DECREF(any);
        return -1;
    }
    PyArrayObject *host = (PyArrayObject *)PyArray_FromArray(
        any, PyArray_DescrFromType(foreign[dtype].numpy),
        NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST);
    Py_DECREF(any);
    if (host == NULL) {
        return -1;
    }
    int64_t shape[ND_MAX_DIMS];
    for (int i = 0; i < PyArray_NDIM(host); i++) {
        shape[i] = PyArray_DIM(host, i);
    }
    nd_array made;
    nd_dtype staged = dtype == ND_BF16 ? ND_F32 : dtype;
    nd_status status = nd_array_new(device, staged, PyArray_NDIM(host), shape, &made);
    if (status != ND_OK) {
        Py_DECREF(host);
        nd_raise(state, "array", NULL, status);
        return -1;
    }
    size_t bytes = (size_t)nd_size(&made) * nd_dtype_size(staged);
    if (bytes > 0) {
        Py_BEGIN_ALLOW_THREADS status =
            device->backend->upload(device->index, made.data, PyArray_DATA(host), bytes);
        Py_END_ALLOW_THREADS
    }
    Py_DECREF(host);
    int result = 0;
    if (status != ND_OK) {
        nd_raise(state, "array", device, status);
        result = -1;
    } else if (staged == dtype) {
        *out = made;
        return 0;
    } else {
        result = nd_copy(state, &made, dtype, out);
    }
    nd_array_clear(&made);
    return result;
}

PyObject *nd_to_numpy(nd_state *state, const nd_array *a) {
    nd_dtype dtype = a->dtype == ND_BF16 ? ND_F32 : a->dtype;
    nd_array compact;
    if (nd_check_live(state, "numpy", "x", a) < 0) {
        return NULL;
    }
    if (dtype == a->dtype && nd_is_contiguous(a)) {
        nd_array_view(a, &compact);
    } else if (nd_copy(state, a, dtype, &compact) < 0) {
        return NULL;
    }
    npy_intp shape[ND_MAX_DIMS];
    for (int i = 0; i < a->ndim; i++) {
        shape[i] = (npy_intp)a->shape[i];
    }
    PyObject *array = PyArray_SimpleNew(a->ndim, shape, foreign[dtype].numpy);
    size_t bytes = (size_t)nd_size(a) * nd_dtype_size(dtype);
    if (array != NULL && bytes > 0) {
        nd_device *device = a->storage->device;
        void *to = PyArray_DATA((PyArrayObject *)array);
        nd_status status;
        Py_BEGIN_ALLOW_THREADS status =
            device->backend->download(device->index, to, compact.data, bytes);
        Py_END_ALLOW_THREADS if (status != ND_OK) {
            Py_CLEAR(array);
            nd_raise(state, "numpy", device, status);
        }
    }
    nd_array_clear(&compact);
    return array;
}

static PyObject *ndarray_numpy(PyObject *self, PyObject *unused) {
    (void)unused;
    return nd_to_numpy(nd_state_of(self), nd_array_of(self));
}

static PyObject *ndarray_tolist(PyObject *self, PyObject *unused) {
    PyObject *array = ndarray_numpy(self, unused);
    PyObject *list = array != NULL ? PyArray_ToList((PyArrayObject *)array) : NULL;
    Py_XDECREF(array);
    return list;
}

/* NumPy's protocol: copy=False asks for shared memory or ValueError. */
static PyObject *ndarray_array(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None, *copy = Py_None, *array;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|OO:__array__", names, &dtype, &copy)) {
        return NULL;
    }
    if (copy == Py_False) {
        const nd_array *a = nd_array_of(self);
        if (!nd_is_cpu(a->storage->device) || foreign[a->dtype].format == NULL) {
            return PyErr_Format(PyExc_ValueError,
                                "__array__: an array of %s %s cannot be given "
                                "without a copy",
                                nd_dtype_name(a->dtype),
                                nd_is_cpu(a->storage->device) ? "on the CPU" : "on CUDA");
        }
        PyObject *buffer = PyMemoryView_FromObject(self);
        array = buffer != NULL ? PyArray_FROM_O(buffer) : NULL;
        Py_XDECREF(buffer);
    } else {
        array = ndarray_numpy(self, NULL);
    }
    if (array == NULL || dtype == Py_None) {
        return array;
    }
    PyArray_Descr *wanted = NULL;
    if (!PyArray_DescrConverter(dtype, &wanted)) {
        Py_DECREF(array);
        return NULL;
    }
    if (copy == Py_False && !PyArray_EquivTypes(wanted, PyArray_DESCR((PyArrayObject *)array))) {
        Py_DECREF(array);
        Py_DECREF(wanted);
        return PyErr_Format(PyExc_ValueError, "__array__: another dtype needs a copy");
    }
    PyObject *cast = PyArray_FromArray((PyArrayObject *)array, wanted, NPY_ARRAY_FORCECAST);
    Py_DECREF(array);
    return cast;
}

/* ---- printing ---------------------------------------------------------------------------------- */
PyObject *nd_ndarray_str(PyObject *self) {
    PyObject *array = ndarray_numpy(self, NULL);
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
    PyObject *array = ndarray_numpy(self, NULL);
    if (array == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
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

/* ---- the buffer protocol ----------------------------------------------------------------------- */
typedef struct {
    nd_storage *storage;
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
    if (!nd_is_cpu(a->storage->device) || foreign[a->dtype].format == NULL) {
        PyErr_Format(PyExc_BufferError,
                     "an array of %s %s has no buffer to share; numpy() copies it",
                     nd_dtype_name(a->dtype),
                     nd_is_cpu(a->storage->device) ? "(which NumPy lacks)" : "on CUDA");
        return -1;
    }
    bool c_order = nd_is_contiguous(a), f_order = is_fortran(a);
    bool has_strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES;
    if (((flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS && !c_order) ||
        ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !f_order) ||
        ((flags & PyBUF_ANY_CONTIGUOUS) == PyBUF_ANY_CONTIGUOUS && !c_order && !f_order) ||
        (!has_strides && !c_order)) {
        PyErr_SetString(PyExc_BufferError, "the array is not contiguous; compact() copies it");
        return -1;
    }
    exported *hold = malloc(sizeof *hold);
    if (hold == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t item = (Py_ssize_t)nd_dtype_size(a->dtype);
    for (int i = 0; i < a->ndim; i++) {
        hold->shape[i] = (Py_ssize_t)a->shape[i];
        hold->strides[i] = (Py_ssize_t)a->strides[i] * item;
    }
    hold->storage = a->storage;
    nd_storage_retain(hold->storage);
    static char nothing[8]; /* an empty array has no memory, but a buffer may not be NULL */
    view->buf = a->data != NULL ? a->data : nothing;
    view->obj = Py_NewRef(self);
    view->len = (Py_ssize_t)nd_size(a) * item;
    view->readonly = 0;
    view->itemsize = item;
    view->format = flags & PyBUF_FORMAT ? (char *)foreign[a->dtype].format : NULL;
    view->ndim = a->ndim;
    view->shape = flags & PyBUF_ND ? hold->shape : NULL;
    view->strides = has_strides ? hold->strides : NULL;
    view->suboffsets = NULL;
    view->internal = hold;
    return 0;
}

void nd_ndarray_releasebuffer(PyObject *self, Py_buffer *view) {
    (void)self;
    exported *hold = view->internal;
    nd_storage_release(hold->storage);
    free(hold);
}

/* ---- array interfaces -------------------------------------------------------------------------- */
static PyObject *interface(PyObject *self, int version) {
    static const char *const types[ND_NUM_DTYPES] = {
        [ND_F32] = "<f4", [ND_F16] = "<f2",  [ND_I32] = "<i4", [ND_I64] = "<i8",
        [ND_U8] = "|u1",  [ND_BOOL] = "|b1", [ND_U16] = "<u2",
    };
    nd_state *state = nd_state_of(self);
    const nd_array *a = nd_array_of(self);
    bool cpu = nd_is_cpu(a->storage->device);
    const char *name = version == 3 && cpu ? "__array_interface__" : "__cuda_array_interface__";
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
    PyObject *strides = nd_is_contiguous(a) ? Py_NewRef(Py_None) : nd_pack_shape(a->ndim, bytes);
    PyObject *address = PyLong_FromVoidPtr(a->data);
    return Py_BuildValue("{sN ss s(NO) sN si}", "shape", nd_pack_shape(a->ndim, a->shape),
                         "typestr", types[a->dtype], "data", address, Py_False, "strides", strides,
                         "version", version);
}

PyObject *nd_array_interface(PyObject *self, void *closure) {
    (void)closure;
    if (!nd_is_cpu(nd_array_of(self)->storage->device)) {
        return PyErr_Format(PyExc_AttributeError, "__array_interface__: the array is on CUDA");
    }
    return interface(self, 3);
}

PyObject *nd_cuda_array_interface(PyObject *self, void *closure) {
    (void)closure;
    nd_device *device = nd_array_of(self)->storage->device;
    if (nd_is_cpu(device)) {
        return PyErr_Format(PyExc_AttributeError,
                            "__cuda_array_interface__: the array is on the CPU");
    }
    /* Without a stream in the interface the reader may use the memory at once. */
    nd_status status = device->backend->synchronize(device->index);
    if (status != ND_OK) {
        return nd_raise(nd_state_of(self), "__cuda_array_interface__", device, status);
    }
    return interface(self, 2);
}

/* ---- pickling: by value -------------------------------------------------------------------------- */
static PyObject *ndarray_reduce(PyObject *self, PyObject *unused) {
    (void)unused;
    nd_state *state = nd_state_of(self);
    const nd_array *a = nd_array_of(self);
    nd_array host, compact;
    if (nd_to_device(state, a, nd_cpu_device(), &host) < 0) {
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
                               (Py_ssize_t)nd_size(a) * (Py_ssize_t)nd_dtype_size(a->dtype),
                               nd_pack_shape(a->ndim, a->shape), nd_dtype_name(a->dtype), device);
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
        nd_shape_from(shape_object, "_rebuild", &ndim, shape) < 0) {
        goto done;
    }
    nd_status status = nd_array_new(nd_cpu_device(), dtype, ndim, shape, &host);
    if (status != ND_OK) {
        nd_raise(state, "_rebuild", NULL, status);
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
        PyErr_Clear();
        device = nd_cpu_device();
    }
    if (nd_to_device(state, &host, device, &there) == 0) {
        result = nd_wrap(state, &there);
    }
    nd_array_clear(&host);
done:
    PyBuffer_Release(&bytes);
    return result;
}

/* ---- making arrays -------------------------------------------------------------------------------- */
static PyObject *module_array(PyObject *module, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"obj", "dtype", "device", NULL};
    nd_state *state = nd_module_state(module);
    PyObject *object, *dtype_object = Py_None, *device_object = Py_None;
    nd_dtype dtype = ND_F32;
    nd_device *device;
    nd_array out;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OO:array", names, &object,
                                     &dtype_object, &device_object) ||
        (dtype_object != Py_None && nd_dtype_from(dtype_object, &dtype) < 0)) {
        return NULL;
    }
    if (device_object == Py_None && nd_is_ndarray(state, object)) {
        device = nd_array_of(object)->storage->device;
    } else if (nd_device_from(state, device_object, &device) < 0) {
        return NULL;
    }
    return nd_from_object(state, object, false, dtype, device, &out) < 0 ? NULL
                                                                         : nd_wrap(state, &out);
}

static PyObject *module_empty(PyObject *module, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"shape", "dtype", "device", NULL};
    nd_state *state = nd_module_state(module);
    PyObject *shape_object, *dtype_object = Py_None, *device_object = Py_None;
    nd_dtype dtype = ND_F32;
    nd_device *device;
    int64_t shape[ND_MAX_DIMS];
    int ndim;
    nd_array out;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OO:empty", names, &shape_object,
                                     &dtype_object, &device_object) ||
        nd_shape_from(shape_object, "empty: shape", &ndim, shape) < 0 ||
        (dtype_object != Py_None && nd_dtype_from(dtype_object, &dtype) < 0) ||
        nd_device_from(state, device_object, &device) < 0) {
        return NULL;
    }
    nd_status status = nd_array_new(device, dtype, ndim, shape, &out);
    return status != ND_OK ? nd_raise(state, "empty", NULL, status) : nd_wrap(state, &out);
}

PyMethodDef nd_interop_methods[] = {
    {"numpy", ndarray_numpy, METH_NOARGS,
     "numpy($self)\n--\n\nA NumPy array with a copy of the elements; bfloat16 becomes float32."},
    {"tolist", ndarray_tolist, METH_NOARGS, "tolist($self)\n--\n\nNested lists of Python numbers."},
    {"__array__", (PyCFunction)(void (*)(void))ndarray_array, METH_VARARGS | METH_KEYWORDS,
     "__array__($self, dtype=None, copy=None)\n--\n\nNumPy's protocol."},
    {"__reduce__", ndarray_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyMethodDef nd_interop_functions[] = {
    {"array", (PyCFunction)(void (*)(void))module_array, METH_VARARGS | METH_KEYWORDS,
     "array($module, obj, dtype='float32', device=None)\n--\n\nA new NDArray with a copy of a "
     "NumPy "
     "array of any real dtype, an NDArray, a number or nested lists."},
    {"empty", (PyCFunction)(void (*)(void))module_empty, METH_VARARGS | METH_KEYWORDS,
     "empty($module, shape, dtype='float32', device=None)\n--\n\nA new NDArray whose elements are "
     "not set."},
    {"_rebuild", module_rebuild, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int nd_interop_init(void) {
    import_array1(-1);
    return 0;
}
