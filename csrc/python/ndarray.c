/* ndarray.c - the NDArray type, put together: construction, attributes, the tables of its methods.
 *
 * A method that only changes shape, strides or offset returns a view; one that computes calls an
 * op of ops.def.
 */
#include "arguments.h"
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "exchange.h"
#include "methods.h"
#include "object.h"
#include "run.h"

typedef struct {
    PyObject_HEAD
    nd_storage *storage;
    nd_dtype dtype;
} HandleObject;

/* ---- construction ---------------------------------------------------------------------------- */
static PyObject *ndarray_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    NDArrayObject *self = (NDArrayObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    /* Until __init__ an empty array, so that no method meets half an object. Its memory outlives
     * that, for a method that is still at work. */
    nd_array nothing = {.storage = nd.nothing, .ndim = 1, .strides = {1}};
    nd_array_view(&nothing, &self->a);
    return (PyObject *)self;
}

static int ndarray_init(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"other", "device", "dtype", NULL};
    PyObject *other, *device = Py_None, *dtype = Py_None;
    nd_array made;
    NDArrayObject *self = (NDArrayObject *)object;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OO:NDArray", names, &other, &device,
                                     &dtype)) {
        return -1;
    }
    nd_dtype otherwise = nd_is_ndarray(other) ? nd_array_of(other)->dtype : ND_F32;
    if (nd_from_arguments(other, device, dtype, otherwise, false, &made) < 0) {
        return -1;
    }
    if (self->made) {
        nd_array_clear(&made);
        FAIL(PyExc_TypeError,
             "NDArray: __init__ was called before; x[:] = ... writes into an array");
    }
    nd_array_clear(&self->a);
    self->a = made;
    self->made = true;
    return 0;
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
        if (!PyObject_TypeCheck(handle, nd.handle_type)) {
            return PyErr_Format(PyExc_TypeError, "make: handle: must be the _handle of an NDArray");
        }
        HandleObject *h = (HandleObject *)handle;
        a.storage = h->storage;
        a.dtype = dtype_object == Py_None ? h->dtype : a.dtype;
        nd_storage_retain(a.storage);
    } else {
        nd_device *device;
        nd_array fresh;
        if (nd_device_from(device_object, &device) < 0 ||
            nd_new_array("make", device, a.dtype, a.ndim, a.shape, &fresh) < 0) {
            return NULL;
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
    nd_status status = nd_check_bounds(&a);
    if (status != ND_OK) {
        nd_array_clear(&a);
        return nd_raise("make", NULL, status);
    }
    return nd_wrap(&a);
}

static PyObject *module_array(PyObject *module, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"obj", "dtype", "device", NULL};
    PyObject *object, *dtype = NULL, *device = Py_None;
    nd_array out;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|OO:array", names, &object, &dtype,
                                     &device) ||
        nd_from_arguments(object, device, dtype != NULL ? dtype : Py_None, ND_F32, dtype == Py_None,
                          &out) < 0) {
        return NULL;
    }
    return nd_wrap(&out);
}

static PyObject *module_empty(PyObject *module, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"shape", "dtype", "device", NULL};
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
        nd_device_from(device_object, &device) < 0 ||
        nd_new_array("empty", device, dtype, ndim, shape, &out) < 0) {
        return NULL;
    }
    return nd_wrap(&out);
}

/* ---- attributes ------------------------------------------------------------------------------ */
static PyObject *get_shape(PyObject *self, void *closure) {
    return nd_pack_shape(nd_array_of(self)->ndim, nd_array_of(self)->shape);
}

static PyObject *get_strides(PyObject *self, void *closure) {
    return nd_pack_shape(nd_array_of(self)->ndim, nd_array_of(self)->strides);
}

static PyObject *get_size(PyObject *self, void *closure) {
    return PyLong_FromLongLong(nd_size(nd_array_of(self)));
}

static PyObject *get_nbytes(PyObject *self, void *closure) {
    const nd_array *a = nd_array_of(self);
    return PyLong_FromLongLong(nd_size(a) * (int64_t)nd_dtype_size(a->dtype));
}

static PyObject *get_ndim(PyObject *self, void *closure) {
    return PyLong_FromLong(nd_array_of(self)->ndim);
}

static PyObject *get_dtype(PyObject *self, void *closure) {
    return PyUnicode_InternFromString(nd_dtype_name(nd_array_of(self)->dtype));
}

static PyObject *get_device(PyObject *self, void *closure) {
    return nd_device_object(nd_array_of(self)->storage->device);
}

static PyObject *get_written(PyObject *self, void *closure) {
    return PyLong_FromUnsignedLongLong(nd_array_of(self)->storage->written);
}

static PyObject *get_data_ptr(PyObject *self, void *closure) {
    const nd_array *a = nd_array_of(self);
    if (nd_check_live("data_ptr", "x", a) < 0) {
        return NULL;
    }
    nd_count_write(a); /* the caller may write */
    return PyLong_FromVoidPtr(a->data);
}

static PyObject *get_handle(PyObject *self, void *closure) {
    HandleObject *handle = PyObject_New(HandleObject, nd.handle_type);
    if (handle != NULL) {
        handle->storage = nd_array_of(self)->storage;
        handle->dtype = nd_array_of(self)->dtype;
        nd_storage_retain(handle->storage);
    }
    return (PyObject *)handle;
}

/* ---- Handle: the memory of an array ---------------------------------------------------------- */
static void handle_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    nd_storage_release(((HandleObject *)self)->storage);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *handle_ptr(PyObject *self, PyObject *unused) {
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

/* ---- the type -------------------------------------------------------------------------------- */
#define AXIS_TEXT "($self, axis=None, keepdims=False)\n--\n\n"

static PyMethodDef ndarray_methods[] = {
    {"make", (PyCFunction)(void (*)(void))ndarray_make, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     "make($type, shape, strides=None, device=None, handle=None, offset=0, dtype=None)\n--\n\n"
     "A view on the memory of `handle` (another array's _handle), or on fresh memory; strides and "
     "offset in elements. ValueError when it would reach outside."},
    {"copy", nd_ndarray_copy, METH_NOARGS, "copy($self)\n--\n\nA contiguous copy."},
    {"__copy__", nd_ndarray_copy, METH_NOARGS, NULL},
    {"__deepcopy__", nd_ndarray_copy, METH_O, NULL},
    {"compact", nd_ndarray_compact, METH_NOARGS,
     "compact($self)\n--\n\nThis array when it is contiguous, else a copy that is."},
    {"is_compact", nd_ndarray_is_compact, METH_NOARGS,
     "is_compact($self)\n--\n\nAre the elements contiguous, in C order?"},
    {"astype", nd_ndarray_astype, METH_O,
     "astype($self, dtype, /)\n--\n\nA copy converted to dtype; floats truncate to integers."},
    {"to", nd_ndarray_to, METH_O,
     "to($self, device, /)\n--\n\nThis array when it lives there, else a copy that does."},
    {"fill", nd_ndarray_fill, METH_O, "fill($self, value, /)\n--\n\nSet every element."},
    {"item", nd_ndarray_item, METH_NOARGS,
     "item($self)\n--\n\nThe only element, as a Python number."},
    {"permute", nd_ndarray_permute, METH_VARARGS,
     "permute($self, axes, /)\n--\n\nView with the axes in another order."},
    {"broadcast_to", nd_ndarray_broadcast_to, METH_VARARGS,
     "broadcast_to($self, shape, /)\n--\n\n"
     "View stretched with strides of 0. Writing an element twice raises ValueError."},
    {"reshape", nd_ndarray_reshape, METH_VARARGS,
     "reshape($self, shape, /)\n--\n\nSame elements in another shape, one axis of which may be -1: "
     "a view where the strides allow it, else a copy."},
    {"as_strided", KEYWORD_METHOD(nd_ndarray_as_strided),
     "as_strided($self, shape, strides)\n--\n\nView with these strides, in elements; ValueError "
     "when "
     "it would reach outside the memory."},
    {"at", nd_ndarray_at, METH_O,
     "at($self, key, /)\n--\n\nView as x[key], where integers drop their axes, as in NumPy."},
    {"joined", nd_ndarray_joined, METH_O,
     "joined($self, other, /)\n--\n\nOne view over both, along the first axis, where other lies "
     "right after this array in the same memory; else None."},
    {"flip", nd_ndarray_flip, METH_VARARGS,
     "flip($self, axes=None, /)\n--\n\nView with the axes (default: all) walked backwards."},
    {"view", nd_ndarray_view, METH_O,
     "view($self, dtype, /)\n--\n\nThe same bits as another dtype of the same size."},
    {"exp", nd_ndarray_exp, METH_NOARGS, "exp($self)\n--\n\n"},
    {"log", nd_ndarray_log, METH_NOARGS, "log($self)\n--\n\nNatural logarithm."},
    {"tanh", nd_ndarray_tanh, METH_NOARGS, "tanh($self)\n--\n\n"},
    {"sqrt", nd_ndarray_sqrt, METH_NOARGS, "sqrt($self)\n--\n\n"},
    {"maximum", nd_ndarray_maximum, METH_O,
     "maximum($self, other, /)\n--\n\nElementwise; NaN wins."},
    {"minimum", nd_ndarray_minimum, METH_O,
     "minimum($self, other, /)\n--\n\nElementwise; NaN wins."},
    {"sum", KEYWORD_METHOD(nd_ndarray_sum),
     "sum" AXIS_TEXT "Sum over axis: None, int or tuple. "
     "Integers sum in int64."},
    {"max", KEYWORD_METHOD(nd_ndarray_max), "max" AXIS_TEXT "Largest; ValueError of no elements."},
    {"min", KEYWORD_METHOD(nd_ndarray_min), "min" AXIS_TEXT "Smallest; ValueError of no elements."},
    {"argmax", KEYWORD_METHOD(nd_ndarray_argmax),
     "argmax" AXIS_TEXT "Index (int64) of the first largest, counted row by row within the axes."},
    {"argmin", KEYWORD_METHOD(nd_ndarray_argmin),
     "argmin" AXIS_TEXT "Index (int64) of the first smallest, counted row by row within the axes."},
    {"numpy", nd_ndarray_numpy, METH_NOARGS,
     "numpy($self)\n--\n\nA NumPy array with a copy of the elements; bfloat16 becomes float32."},
    {"__dlpack__", KEYWORD_METHOD(nd_ndarray_dlpack),
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
     "A capsule that shares the memory."},
    {"__dlpack_device__", nd_ndarray_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self)\n--\n\nDLPack's (device type, index)."},
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
    {"written", get_written, NULL,
     "Number of the last write into the memory that views share (0: none since it was made)", NULL},
    {"_handle", get_handle, NULL, "The memory that views share", NULL},
    {"data_ptr", get_data_ptr, NULL,
     "Address of the first element, for a library that works in the device's stream and so needs "
     "no "
     "wait; counts as a write",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef ndarray_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(NDArrayObject, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ndarray_slots[] = {
    {Py_tp_new, ndarray_new},
    {Py_tp_init, ndarray_init},
    {Py_tp_dealloc, nd_ndarray_dealloc},
    {Py_tp_methods, ndarray_methods},
    {Py_tp_getset, ndarray_getset},
    {Py_tp_members, ndarray_members},
    {Py_tp_iter, nd_ndarray_iter},
    {Py_tp_richcompare, nd_ndarray_compare},
    {Py_mp_length, nd_ndarray_length},
    {Py_mp_subscript, nd_ndarray_getitem},
    {Py_mp_ass_subscript, nd_ndarray_setitem},
    {Py_sq_length, nd_ndarray_length},
    {Py_sq_item, nd_ndarray_sequence_item},
    {Py_nb_add, nd_ndarray_add},
    {Py_nb_subtract, nd_ndarray_subtract},
    {Py_nb_multiply, nd_ndarray_multiply},
    {Py_nb_true_divide, nd_ndarray_divide},
    {Py_nb_floor_divide, nd_ndarray_floor_divide},
    {Py_nb_remainder, nd_ndarray_remainder},
    {Py_nb_and, nd_ndarray_bitwise_and},
    {Py_nb_or, nd_ndarray_bitwise_or},
    {Py_nb_xor, nd_ndarray_bitwise_xor},
    {Py_nb_power, nd_ndarray_power},
    {Py_nb_inplace_add, nd_ndarray_inplace_add},
    {Py_nb_inplace_subtract, nd_ndarray_inplace_subtract},
    {Py_nb_inplace_multiply, nd_ndarray_inplace_multiply},
    {Py_nb_inplace_true_divide, nd_ndarray_inplace_divide},
    {Py_nb_inplace_floor_divide, nd_ndarray_inplace_floor_divide},
    {Py_nb_inplace_remainder, nd_ndarray_inplace_remainder},
    {Py_nb_inplace_and, nd_ndarray_inplace_bitwise_and},
    {Py_nb_inplace_or, nd_ndarray_inplace_bitwise_or},
    {Py_nb_inplace_xor, nd_ndarray_inplace_bitwise_xor},
    {Py_nb_inplace_power, nd_ndarray_inplace_power},
    {Py_nb_negative, nd_ndarray_negate},
    {Py_nb_positive, nd_ndarray_positive},
    {Py_nb_absolute, nd_ndarray_absolute},
    {Py_nb_invert, nd_ndarray_invert},
    {Py_nb_matrix_multiply, nd_ndarray_matmul},
    {Py_nb_inplace_matrix_multiply, nd_ndarray_inplace_matmul},
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

static PyObject *module_writes(PyObject *module, PyObject *nothing) {
    return PyLong_FromUnsignedLongLong(nd.writes);
}

static PyMethodDef functions[] = {
    {"writes", module_writes, METH_NOARGS,
     "writes($module, /)\n--\n\nHow often arrays were written to that were there before: the last "
     "of these writes into an array is its `written`. Writes through buffers that NumPy or a "
     "memoryview hold are not seen."},
    {"array", KEYWORD_METHOD(module_array),
     "array($module, obj, dtype='float32', device=None)\n--\n\nA new NDArray with a copy of a "
     "NumPy array of any real dtype, an NDArray, a number or nested lists. dtype None: that "
     "which it has beside an NDArray."},
    {"empty", KEYWORD_METHOD(module_empty),
     "empty($module, shape, dtype='float32', device=None)\n--\n\nA new NDArray whose elements are "
     "not set."},
    {NULL, NULL, 0, NULL},
};

int nd_ndarray_init(PyObject *module) {
    nd.handle_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &handle_spec, NULL);
    nd.ndarray_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ndarray_spec, NULL);
    PyTypeObject *type = nd.ndarray_type;
    /* NumPy leaves `numpy_array + ndarray` to the reflected operators here. */
    if (nd.handle_type == NULL || type == NULL ||
        PyObject_SetAttrString((PyObject *)type, "__array_ufunc__", Py_None) < 0 ||
        PyModule_AddType(module, type) < 0 ||
        nd_check("NDArray", NULL, nd_storage_new(nd_host(), 0, &nd.nothing)) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
