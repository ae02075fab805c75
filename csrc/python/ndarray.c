/* ndarray.c - the NDArray type: what Python objects become arrays, what arrays become.
 *
 * An NDArray owns one nd_array: a strided view on refcounted memory. Whatever only changes shape,
 * strides or offset returns a view (ndarray_views.c); whatever computes goes through a row of
 * ops.def (ndarray_math.c, bind.c); interchange with other libraries is in ndarray_interop.c and
 * ndarray_dlpack.c. Results are plain NDArrays, also those of a subclass. An NDArray holds no
 * Python object, so it needs no garbage collection of its own; a Python subclass gets it from
 * Python.
 */
#include "ndarray.h"

#include <math.h>
#include <string.h>

typedef struct {
    PyObject_HEAD nd_storage *storage;
    nd_dtype dtype;
} HandleObject;

static void ndarray_dealloc(PyObject *self);

/* ---- from and to Python ------------------------------------------------------------------------ */
/* The NDArray type itself is recognised by its own deallocator, which no subclass made in Python
 * has; its module holds the state. */
nd_state *nd_state_of(PyObject *object) {
    for (PyTypeObject *type = Py_TYPE(object); type != NULL; type = type->tp_base) {
        if (type->tp_dealloc == ndarray_dealloc) {
            return PyType_GetModuleState(type);
        }
    }
    return NULL;
}

PyObject *nd_wrap(nd_state *state, nd_array *a) {
    NDArrayObject *self = PyObject_New(NDArrayObject, state->ndarray_type);
    if (self == NULL) {
        nd_array_clear(a);
        return NULL;
    }
    self->a = *a;
    self->weak_references = NULL;
    return (PyObject *)self;
}

/* A view: `geometry` borrows its storage, the result owns a reference. */
PyObject *nd_wrap_view(nd_state *state, const nd_array *geometry) {
    nd_array view;
    nd_array_view(geometry, &view);
    return nd_wrap(state, &view);
}

int nd_dtype_from(PyObject *object, nd_dtype *out) {
    PyObject *name = NULL;
    if (PyUnicode_Check(object)) {
        name = Py_NewRef(object);
    } else { /* numpy.dtype has .name, numpy.float32 and float have .__name__ */
        name = PyObject_GetAttrString(object, PyType_Check(object) ? "__name__" : "name");
        if (name == NULL || !PyUnicode_Check(name)) {
            PyErr_Clear();
            Py_XDECREF(name);
            PyErr_Format(PyExc_TypeError, "dtype: must be a name such as \"float32\", not %.80s",
                         Py_TYPE(object)->tp_name);
            return -1;
        }
    }
    for (int d = 0; d < ND_NUM_DTYPES; d++) {
        if (PyUnicode_CompareWithASCIIString(name, nd_dtype_name((nd_dtype)d)) == 0) {
            *out = (nd_dtype)d;
            Py_DECREF(name);
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError,
                 "dtype: %R is none of ours; allowed: float32, bfloat16, float16, "
                 "int32, int64, uint8, bool, uint16",
                 name);
    Py_DECREF(name);
    return -1;
}

int nd_int64_from(PyObject *object, const char *what, int64_t *out) {
    if (PyBool_Check(object) || !PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: must be integers, not %.80s", what,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *index = PyNumber_Index(object);
    *out = index != NULL ? (int64_t)PyLong_AsLongLong(index) : -1;
    Py_XDECREF(index);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

int nd_shape_from(PyObject *object, const char *what, int *ndim, int64_t *values) {
    if (PyIndex_Check(object)) {
        *ndim = 1;
        return nd_int64_from(object, what, values);
    }
    PyObject *list = PySequence_Fast(object, "");
    if (list == NULL) {
        PyErr_Format(PyExc_TypeError, "%s: must be an integer or a sequence of them, not %.80s",
                     what, Py_TYPE(object)->tp_name);
        return -1;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    if (count > ND_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: has %zd entries; an array has at most %d axes", what,
                     count, ND_MAX_DIMS);
        Py_DECREF(list);
        return -1;
    }
    *ndim = (int)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (nd_int64_from(PySequence_Fast_GET_ITEM(list, i), what, &values[i]) < 0) {
            Py_DECREF(list);
            return -1;
        }
    }
    Py_DECREF(list);
    return 0;
}

/* f((2, 3)) and f(2, 3) mean the same. */
int nd_shape_from_arguments(PyObject *arguments, const char *what, int *ndim, int64_t *values) {
    bool single = PyTuple_GET_SIZE(arguments) == 1;
    return nd_shape_from(single ? PyTuple_GET_ITEM(arguments, 0) : arguments, what, ndim, values);
}

/* Axes counted from either end -> 0 ... ndim - 1, each at most once. */
int nd_normalise_axes(const char *op, int ndim, int count, int64_t *axes) {
    unsigned seen = 0;
    for (int i = 0; i < count; i++) {
        if (axes[i] < -ndim || axes[i] >= ndim) {
            PyErr_Format(PyExc_ValueError, "%s: axis %lld is out of range for %d axes", op,
                         (long long)axes[i], ndim);
            return -1;
        }
        axes[i] += axes[i] < 0 ? ndim : 0;
        if (seen & (1u << axes[i])) {
            PyErr_Format(PyExc_ValueError, "%s: axis %lld is named twice", op, (long long)axes[i]);
            return -1;
        }
        seen |= 1u << axes[i];
    }
    return 0;
}

PyObject *nd_pack_shape(int ndim, const int64_t *values) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; tuple != NULL && i < ndim; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, i, value);
        }
    }
    return tuple;
}

/* One element of any strides, from the device. */
static PyObject *element(nd_state *state, const nd_array *a) {
    union {
        float f32;
        uint16_t u16;
        int32_t i32;
        int64_t i64;
        uint8_t u8;
    } value = {.i64 = 0};
    if (nd_check_live(state, "item", "x", a) < 0) {
        return NULL;
    }
    nd_device *device = a->storage->device;
    nd_status status;
    if (nd_is_cpu(device)) {
        memcpy(&value, a->data, nd_dtype_size(a->dtype));
        status = ND_OK;
    } else {
        Py_BEGIN_ALLOW_THREADS status =
            device->backend->download(device->index, &value, a->data, nd_dtype_size(a->dtype));
        Py_END_ALLOW_THREADS
    }
    if (status != ND_OK) {
        return nd_raise(state, "item", device, status);
    }
    switch (a->dtype) {
    case ND_F32:
        return PyFloat_FromDouble((double)value.f32);
    case ND_BF16: {
        uint32_t bits = (uint32_t)value.u16 << 16;
        float f32;
        memcpy(&f32, &bits, sizeof f32);
        return PyFloat_FromDouble((double)f32);
    }
    case ND_F16: {
        int exponent = value.u16 >> 10 & 31;
        double fraction = (double)(value.u16 & 1023);
        double size = exponent == 0   ? ldexp(fraction, -24)
                      : exponent < 31 ? ldexp(fraction + 1024, exponent - 25)
                      : fraction == 0 ? (double)INFINITY
                                      : (double)NAN;
        return PyFloat_FromDouble(value.u16 & 0x8000 ? -size : size);
    }
    case ND_I32:
        return PyLong_FromLong(value.i32);
    case ND_I64:
        return PyLong_FromLongLong(value.i64);
    case ND_U8:
        return PyLong_FromLong(value.u8);
    case ND_BOOL:
        return PyBool_FromLong(value.u8);
    case ND_U16:
        return PyLong_FromLong(value.u16);
    case ND_NUM_DTYPES:
        break;
    }
    Py_UNREACHABLE();
}

PyObject *nd_item(nd_state *state, const nd_array *a) {
    int64_t size = nd_size(a);
    if (size != 1) {
        PyErr_Format(PyExc_ValueError,
                     "only an array with one element becomes a Python number; "
                     "this one has %lld",
                     (long long)size);
        return NULL;
    }
    return element(state, a);
}

/* ---- between devices ----------------------------------------------------------------------------- */
static nd_status transfer(const nd_array *from, const nd_array *to) {
    nd_device *source = from->storage->device, *target = to->storage->device;
    size_t bytes = (size_t)nd_size(from) * nd_dtype_size(from->dtype);
    nd_status status;
    if (nd_is_cpu(source)) {
        status = target->backend->upload(target->index, to->data, from->data, bytes);
        return status == ND_OK ? ND_OK : nd_error(status, "%s", target->backend->last_error());
    }
    if (nd_is_cpu(target)) {
        status = source->backend->download(source->index, to->data, from->data, bytes);
        return status == ND_OK ? ND_OK : nd_error(status, "%s", source->backend->last_error());
    }
    nd_array host;
    ND_TRY(nd_array_new(nd_cpu_device(), from->dtype, from->ndim, from->shape, &host));
    status = transfer(from, &host);
    if (status == ND_OK) {
        status = transfer(&host, to);
    }
    nd_array_clear(&host);
    return status;
}

int nd_to_device(nd_state *state, const nd_array *a, nd_device *device, nd_array *out) {
    if (nd_check_live(state, "to", "x", a) < 0) {
        return -1;
    }
    if (a->storage->device == device) {
        nd_array_view(a, out);
        return 0;
    }
    nd_array compact;
    if (nd_is_contiguous(a)) {
        nd_array_view(a, &compact);
    } else if (nd_copy(state, a, a->dtype, &compact) < 0) {
        return -1;
    }
    nd_status status = nd_array_new(device, a->dtype, a->ndim, a->shape, out);
    if (status == ND_OK && nd_size(a) > 0) {
        Py_BEGIN_ALLOW_THREADS status = transfer(&compact, out);
        Py_END_ALLOW_THREADS if (status != ND_OK) { nd_array_clear(out); }
    }
    nd_array_clear(&compact);
    if (status != ND_OK) {
        nd_raise(state, "to", NULL, status);
        return -1;
    }
    return 0;
}

/* ---- construction -------------------------------------------------------------------------------- */
static PyObject *ndarray_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)arguments;
    (void)keywords;
    NDArrayObject *self = (NDArrayObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    int64_t nothing = 0; /* until __init__ an empty array, so that no method meets half an object */
    if (nd_array_new(nd_cpu_device(), ND_F32, 1, &nothing, &self->a) != ND_OK) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int ndarray_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"other", "device", "dtype", NULL};
    nd_state *state = nd_state_of(object);
    PyObject *other, *device_object = Py_None, *dtype_object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OO:NDArray", names, &other,
                                     &device_object, &dtype_object)) {
        return -1;
    }
    nd_dtype dtype = nd_is_ndarray(state, other) ? nd_array_of(other)->dtype : ND_F32;
    if (dtype_object != Py_None && nd_dtype_from(dtype_object, &dtype) < 0) {
        return -1;
    }
    nd_device *device;
    if (device_object == Py_None && nd_is_ndarray(state, other)) {
        device = nd_array_of(other)->storage->device;
    } else if (nd_device_from(state, device_object, &device) < 0) {
        return -1;
    }
    nd_array made;
    if (nd_from_object(state, other, false, dtype, device, &made) < 0) {
        return -1;
    }
    nd_array *own = nd_array_of(object);
    nd_array_clear(own);
    *own = made;
    return 0;
}

static void ndarray_dealloc(PyObject *object) {
    NDArrayObject *self = (NDArrayObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    nd_array_clear(&self->a);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *ndarray_make(PyObject *class, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"shape", "strides", "device", "handle", "offset", "dtype", NULL};
    PyObject *shape, *strides = Py_None, *device_object = Py_None, *handle = Py_None;
    PyObject *dtype_object = Py_None;
    long long offset = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OOOLO:make", names, &shape, &strides,
                                     &device_object, &handle, &offset, &dtype_object)) {
        return NULL;
    }
    nd_state *state = NULL;
    for (PyTypeObject *type = (PyTypeObject *)class; type != NULL; type = type->tp_base) {
        if (type->tp_dealloc == ndarray_dealloc) {
            state = PyType_GetModuleState(type);
        }
    }
    nd_array a = {.dtype = ND_F32};
    if (nd_shape_from(shape, "make: shape", &a.ndim, a.shape) < 0 ||
        (dtype_object != Py_None && nd_dtype_from(dtype_object, &a.dtype) < 0)) {
        return NULL;
    }
    nd_contiguous_strides(a.ndim, a.shape, a.strides);
    if (strides != Py_None) {
        int count;
        if (nd_shape_from(strides, "make: strides", &count, a.strides) < 0) {
            return NULL;
        }
        if (count != a.ndim) {
            return PyErr_Format(PyExc_ValueError, "make: %d strides for %d axes", count, a.ndim);
        }
    }
    if (handle != Py_None) {
        if (!PyObject_TypeCheck(handle, state->handle_type)) {
            return PyErr_Format(PyExc_TypeError, "make: handle: must be the _handle of an NDArray");
        }
        HandleObject *h = (HandleObject *)handle;
        a.storage = h->storage;
        a.dtype = dtype_object == Py_None ? h->dtype : a.dtype;
        nd_storage_retain(a.storage);
    } else {
        nd_device *device;
        nd_array fresh;
        if (nd_device_from(state, device_object, &device) < 0) {
            return NULL;
        }
        nd_status status = nd_array_new(device, a.dtype, a.ndim, a.shape, &fresh);
        if (status != ND_OK) {
            return nd_raise(state, "make", NULL, status);
        }
        a.storage = fresh.storage;
    }
    int64_t item = (int64_t)nd_dtype_size(a.dtype), bytes = (int64_t)a.storage->bytes;
    if (offset < 0 || offset > bytes / item) {
        nd_array_clear(&a);
        return PyErr_Format(PyExc_ValueError,
                            "make: offset %lld is outside the memory of %lld "
                            "elements",
                            offset, (long long)(bytes / item));
    }
    a.data = (char *)a.storage->memory + offset * item;
    if (nd_check_bounds("make", &a) < 0) {
        nd_array_clear(&a);
        return NULL;
    }
    return nd_wrap(state, &a);
}

/* ---- copies and conversions ----------------------------------------------------------------------- */
static PyObject *ndarray_copy(PyObject *self, PyObject *unused) {
    (void)unused;
    nd_state *state = nd_state_of(self);
    nd_array copy;
    const nd_array *a = nd_array_of(self);
    return nd_copy(state, a, a->dtype, &copy) < 0 ? NULL : nd_wrap(state, &copy);
}

static PyObject *ndarray_compact(PyObject *self, PyObject *unused) {
    return nd_is_contiguous(nd_array_of(self)) ? Py_NewRef(self) : ndarray_copy(self, unused);
}

static PyObject *ndarray_is_compact(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(nd_is_contiguous(nd_array_of(self)));
}

static PyObject *ndarray_astype(PyObject *self, PyObject *dtype_object) {
    nd_state *state = nd_state_of(self);
    nd_dtype dtype;
    nd_array copy;
    if (nd_dtype_from(dtype_object, &dtype) < 0 ||
        nd_copy(state, nd_array_of(self), dtype, &copy) < 0) {
        return NULL;
    }
    return nd_wrap(state, &copy);
}

static PyObject *ndarray_to(PyObject *self, PyObject *device_object) {
    nd_state *state = nd_state_of(self);
    nd_device *device;
    nd_array moved;
    if (nd_device_from(state, device_object, &device) < 0) {
        return NULL;
    }
    if (device == nd_array_of(self)->storage->device) {
        return Py_NewRef(self);
    }
    return nd_to_device(state, nd_array_of(self), device, &moved) < 0 ? NULL
                                                                      : nd_wrap(state, &moved);
}

static PyObject *ndarray_fill(PyObject *self, PyObject *value) {
    double number;
    bool is_float;
    int found = nd_number_from(value, &number, &is_float);
    if (found <= 0) {
        return found < 0 ? NULL
                         : PyErr_Format(PyExc_TypeError, "fill: value: must be a number, not %.80s",
                                        Py_TYPE(value)->tp_name);
    }
    if (nd_store(nd_state_of(self), nd_array_of(self), value) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *ndarray_pad(PyObject *self, PyObject *widths) {
    nd_state *state = nd_state_of(self);
    const nd_array *a = nd_array_of(self);
    int64_t pairs[ND_MAX_DIMS][ND_MAX_DIMS], shape[ND_MAX_DIMS];
    PyObject *list = PySequence_Fast(widths, "pad: must be ((before, after), ...), a pair an axis");
    if (list == NULL) {
        return NULL;
    }
    bool good = PySequence_Fast_GET_SIZE(list) == a->ndim;
    for (int i = 0; good && i < a->ndim; i++) {
        int count;
        if (nd_shape_from(PySequence_Fast_GET_ITEM(list, i), "pad", &count, pairs[i]) < 0) {
            Py_DECREF(list);
            return NULL;
        }
        good = count == 2 && pairs[i][0] >= 0 && pairs[i][1] >= 0 &&
               !__builtin_add_overflow(pairs[i][0], pairs[i][1], &shape[i]) &&
               !__builtin_add_overflow(shape[i], a->shape[i], &shape[i]);
    }
    Py_DECREF(list);
    if (!good) {
        return PyErr_Format(PyExc_ValueError,
                            "pad: needs ((before, after), ...), one pair of "
                            "sizes of 0 or more for each of the %d axes",
                            a->ndim);
    }
    nd_array out;
    nd_status status = nd_array_new(a->storage->device, a->dtype, a->ndim, shape, &out);
    if (status != ND_OK) {
        return nd_raise(state, "pad", NULL, status);
    }
    nd_array inner = out;
    int64_t offset = 0;
    for (int i = 0; i < a->ndim; i++) {
        inner.shape[i] = a->shape[i];
        offset += pairs[i][0] * out.strides[i];
    }
    if (nd_size(&inner) > 0) {
        inner.data = (char *)out.data + offset * (int64_t)nd_dtype_size(a->dtype);
    }
    if (nd_fill(state, &out, 0.0) < 0 || nd_assign(state, "pad", &inner, a) < 0) {
        nd_array_clear(&out);
        return NULL;
    }
    return nd_wrap(state, &out);
}

static PyObject *ndarray_item(PyObject *self, PyObject *unused) {
    (void)unused;
    return nd_item(nd_state_of(self), nd_array_of(self));
}

static int ndarray_bool(PyObject *self) {
    PyObject *item = ndarray_item(self, NULL);
    int truth = item != NULL ? PyObject_IsTrue(item) : -1;
    Py_XDECREF(item);
    return truth;
}

static PyObject *ndarray_float(PyObject *self) {
    PyObject *item = ndarray_item(self, NULL);
    PyObject *number = item != NULL ? PyNumber_Float(item) : NULL;
    Py_XDECREF(item);
    return number;
}

static PyObject *ndarray_int(PyObject *self) {
    PyObject *item = ndarray_item(self, NULL);
    PyObject *number = item != NULL ? PyNumber_Long(item) : NULL;
    Py_XDECREF(item);
    return number;
}

/* ---- attributes -------------------------------------------------------------------------------- */
static PyObject *get_shape(PyObject *self, void *closure) {
    (void)closure;
    return nd_pack_shape(nd_array_of(self)->ndim, nd_array_of(self)->shape);
}

static PyObject *get_strides(PyObject *self, void *closure) {
    (void)closure;
    return nd_pack_shape(nd_array_of(self)->ndim, nd_array_of(self)->strides);
}

static PyObject *get_size(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(nd_size(nd_array_of(self)));
}

static PyObject *get_nbytes(PyObject *self, void *closure) {
    (void)closure;
    const nd_array *a = nd_array_of(self);
    return PyLong_FromLongLong(nd_size(a) * (int64_t)nd_dtype_size(a->dtype));
}

static PyObject *get_ndim(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(nd_array_of(self)->ndim);
}

static PyObject *get_dtype(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_InternFromString(nd_dtype_name(nd_array_of(self)->dtype));
}

static PyObject *get_device(PyObject *self, void *closure) {
    (void)closure;
    return nd_device_object(nd_state_of(self), nd_array_of(self)->storage->device);
}

static PyObject *get_handle(PyObject *self, void *closure) {
    (void)closure;
    HandleObject *handle = PyObject_New(HandleObject, nd_state_of(self)->handle_type);
    if (handle != NULL) {
        handle->storage = nd_array_of(self)->storage;
        handle->dtype = nd_array_of(self)->dtype;
        nd_storage_retain(handle->storage);
    }
    return (PyObject *)handle;
}

/* ---- Handle: the memory behind an array ------------------------------------------------------------ */
static void handle_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    nd_storage_release(((HandleObject *)self)->storage);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *handle_ptr(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(((HandleObject *)self)->storage->memory);
}

static PyMethodDef handle_methods[] = {
    {"ptr", handle_ptr, METH_NOARGS,
     "ptr($self)\n--\n\nAddress of the memory; equal for all views of it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_methods, handle_methods},
    {Py_tp_doc, "The memory that views share."},
    {0, NULL},
};

static PyType_Spec handle_spec = {
    .name = "needle._C.Handle",
    .basicsize = sizeof(HandleObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = handle_slots,
};

/* ---- the type ---------------------------------------------------------------------------------- */
static PyMethodDef ndarray_methods[] = {
    {"make", (PyCFunction)(void (*)(void))ndarray_make, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "make($type, shape, strides=None, device=None, handle=None, offset=0, dtype=None)\n--\n\n"
     "A view on the memory of `handle` (another array's _handle), or on fresh memory; strides and "
     "offset in elements. ValueError when it would reach outside."},
    {"copy", ndarray_copy, METH_NOARGS, "copy($self)\n--\n\nA contiguous copy."},
    {"__copy__", ndarray_copy, METH_NOARGS, NULL},
    {"__deepcopy__", ndarray_copy, METH_O, NULL},
    {"compact", ndarray_compact, METH_NOARGS,
     "compact($self)\n--\n\nThis array when it is contiguous, else a copy that is."},
    {"is_compact", ndarray_is_compact, METH_NOARGS,
     "is_compact($self)\n--\n\nAre the elements contiguous, in C order?"},
    {"astype", ndarray_astype, METH_O,
     "astype($self, dtype, /)\n--\n\nA copy converted to dtype; floats truncate to integers."},
    {"to", ndarray_to, METH_O,
     "to($self, device, /)\n--\n\nThis array when it lives there, else a copy that does."},
    {"fill", ndarray_fill, METH_O, "fill($self, value, /)\n--\n\nSet every element."},
    {"pad", ndarray_pad, METH_O,
     "pad($self, axes, /)\n--\n\nA copy with (before, after) zeros added on each axis."},
    {"item", ndarray_item, METH_NOARGS, "item($self)\n--\n\nThe only element, as a Python number."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ndarray_getset[] = {
    {"shape", get_shape, NULL, "Sizes of the axes", NULL},
    {"strides", get_strides, NULL, "Steps along the axes, in elements", NULL},
    {"size", get_size, NULL, "Number of elements", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of the elements", NULL},
    {"ndim", get_ndim, NULL, "Number of axes", NULL},
    {"dtype", get_dtype, NULL, "Name of the element type", NULL},
    {"device", get_device, NULL, "Where the memory is", NULL},
    {"flat", nd_ndarray_flat, NULL, "The elements in C order, writable", NULL},
    {"_handle", get_handle, NULL, "The memory that views share", NULL},
    {"__array_interface__", nd_array_interface, NULL, "NumPy's protocol (CPU)", NULL},
    {"__cuda_array_interface__", nd_cuda_array_interface, NULL, "CUDA's protocol", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef ndarray_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(NDArrayObject, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ndarray_slots[] = {
    {Py_tp_new, ndarray_new},
    {Py_tp_init, ndarray_init},
    {Py_tp_dealloc, ndarray_dealloc},
    {Py_tp_methods, ndarray_methods},
    {Py_tp_getset, ndarray_getset},
    {Py_tp_members, ndarray_members},
    {Py_tp_iter, nd_ndarray_iter},
    {Py_tp_richcompare, nd_ndarray_compare},
    {Py_tp_repr, nd_ndarray_repr},
    {Py_tp_str, nd_ndarray_str},
    {Py_mp_length, nd_ndarray_length},
    {Py_mp_subscript, nd_ndarray_getitem},
    {Py_mp_ass_subscript, nd_ndarray_setitem},
    {Py_sq_length, nd_ndarray_length},
    {Py_sq_item, nd_ndarray_sequence_item},
    {Py_nb_add, nd_ndarray_add},
    {Py_nb_subtract, nd_ndarray_subtract},
    {Py_nb_multiply, nd_ndarray_multiply},
    {Py_nb_true_divide, nd_ndarray_divide},
    {Py_nb_power, nd_ndarray_power},
    {Py_nb_inplace_add, nd_ndarray_inplace_add},
    {Py_nb_inplace_subtract, nd_ndarray_inplace_subtract},
    {Py_nb_inplace_multiply, nd_ndarray_inplace_multiply},
    {Py_nb_inplace_true_divide, nd_ndarray_inplace_divide},
    {Py_nb_inplace_power, nd_ndarray_inplace_power},
    {Py_nb_negative, nd_ndarray_negate},
    {Py_nb_positive, nd_ndarray_positive},
    {Py_nb_absolute, nd_ndarray_absolute},
    {Py_nb_matrix_multiply, nd_ndarray_matmul},
    {Py_nb_bool, ndarray_bool},
    {Py_nb_float, ndarray_float},
    {Py_nb_int, ndarray_int},
    {Py_bf_getbuffer, nd_ndarray_getbuffer},
    {Py_bf_releasebuffer, nd_ndarray_releasebuffer},
    {Py_tp_doc, "NDArray(other, device=None, dtype=None)\n--\n\nA strided view on memory of a "
                "device, made by copying an array, a number or nested lists."},
    {0, NULL},
};

static PyType_Spec ndarray_spec = {
    .name = "needle._C.NDArray",
    .basicsize = sizeof(NDArrayObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = ndarray_slots,
};

static int add_methods(PyTypeObject *type, PyMethodDef *methods) {
    for (PyMethodDef *method = methods; method->ml_name != NULL; method++) {
        PyObject *descriptor = PyDescr_NewMethod(type, method);
        int set = descriptor != NULL
                      ? PyObject_SetAttrString((PyObject *)type, method->ml_name, descriptor)
                      : -1;
        Py_XDECREF(descriptor);
        if (set < 0) {
            return -1;
        }
    }
    return 0;
}

int nd_ndarray_init(PyObject *module, nd_state *state) {
    state->handle_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &handle_spec, NULL);
    state->flat_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &nd_flat_spec, NULL);
    state->ndarray_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ndarray_spec, NULL);
    PyTypeObject *type = state->ndarray_type;
    if (state->handle_type == NULL || state->flat_type == NULL || type == NULL ||
        add_methods(type, nd_view_methods) < 0 || add_methods(type, nd_math_methods) < 0 ||
        add_methods(type, nd_interop_methods) < 0 || add_methods(type, nd_dlpack_methods) < 0) {
        return -1;
    }
    /* NumPy leaves `numpy_array + ndarray` to the reflected operators here. */
    if (PyObject_SetAttrString((PyObject *)type, "__array_ufunc__", Py_None) < 0) {
        return -1;
    }
    return PyModule_AddType(module, type);
}
