/* array_likes.c - NumPy's C API: array-likes and numbers to arrays, arrays to NumPy's.
 *
 * Both ways copy. bfloat16, which NumPy does not have, goes through float32. The only file that
 * knows NumPy.
 */
#include "arguments.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>
#include <math.h>
#include <numpy/arrayscalars.h>
#include <string.h>

#include "backends.h"
#include "device.h"
#include "errors.h"
#include "object.h"

#ifndef NPY_RAVEL_AXIS /* NumPy 1 */
#define NPY_RAVEL_AXIS NPY_MAXDIMS
#endif

static const int numpy_types[ND_NUM_DTYPES] = {
    [ND_F32] = NPY_FLOAT32, [ND_BF16] = NPY_FLOAT32, [ND_F16] = NPY_FLOAT16, [ND_I32] = NPY_INT32,
    [ND_I64] = NPY_INT64,   [ND_U8] = NPY_UINT8,     [ND_BOOL] = NPY_BOOL,   [ND_U16] = NPY_UINT16,
};

int nd_array_likes_init(void) {
    import_array1(-1);
    return 0;
}

bool nd_is_numpy_array(PyObject *object) { return PyArray_Check(object); }

int nd_number_from(PyObject *object, nd_number *out) {
    *out = (nd_number){.is_float = false};
    PyObject *number;
    if (PyFloat_Check(object)) {
        out->value = PyFloat_AS_DOUBLE(object);
        out->is_float = true;
        return 1;
    }
    if (PyLong_Check(object)) { /* bool as well */
        number = Py_NewRef(object);
    } else if (PyArray_IsScalar(object, Integer)) {
        number = PyNumber_Index(object);
    } else if (PyArray_IsScalar(object, Floating)) {
        number = PyNumber_Float(object);
        out->is_float = true;
    } else if (PyArray_IsScalar(object, Bool)) {
        number = PyBool_FromLong(PyObject_IsTrue(object));
    } else {
        return 0;
    }
    if (number == NULL) {
        return -1;
    }
    out->is_bool = PyBool_Check(number);
    if (!out->is_float) {
        out->integer = PyLong_AsLongLongAndOverflow(number, &out->beyond);
    }
    out->value = out->is_float || out->beyond ? PyFloat_AsDouble(number) : (double)out->integer;
    Py_DECREF(number);
    if (out->beyond && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        out->value = out->beyond * (double)INFINITY;
    }
    return PyErr_Occurred() ? -1 : 1;
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
    if (descr->kind == 'O') { /* whatever converts to numbers; of None NumPy makes NaN */
        if (PySequence_Contains((PyObject *)array, Py_None) > 0) {
            FAIL(PyExc_TypeError, "array: None is no number");
        }
        PyErr_Clear(); /* of arrays in an array, which do not convert: that is told below */
        *out = ND_F32;
        return 0;
    }
    FAIL(PyExc_TypeError,
         "array: cannot make an NDArray of NumPy's %S; its real and integer "
         "dtypes can be",
         descr);
}

/* OverflowError unless `dtype` holds the smallest and the largest number of an array. */
static int check_range(PyArrayObject *array, nd_dtype dtype) {
    for (int i = 0; i < 2 && PyArray_SIZE(array) > 0; i++) {
        nd_number number;
        PyObject *extreme = (i ? PyArray_Max : PyArray_Min)(array, NPY_RAVEL_AXIS, NULL);
        int found = extreme != NULL ? nd_number_from(extreme, &number) : -1;
        Py_XDECREF(extreme);
        if (found < 0 || (found > 0 && nd_check_number("array", &number, dtype) < 0)) {
            return -1;
        }
    }
    return 0;
}

int nd_from_object(PyObject *object, bool natural, nd_dtype dtype, nd_device *device,
                   nd_array *out) {
    if (nd_is_ndarray(object)) {
        nd_array there;
        const nd_array *a = nd_array_of(object);
        if (nd_to_device(a, device, &there) < 0) {
            return -1;
        }
        int result = nd_copy(&there, natural ? a->dtype : dtype, out);
        nd_array_clear(&there);
        return result;
    }
    nd_number number;
    int found = natural ? 0 : nd_number_from(object, &number);
    if (found < 0 || (found > 0 && nd_check_number("array", &number, dtype) < 0)) {
        return -1;
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
    /* An array may wrap around, as in NumPy; numbers of Python's own are refused, and those of
     * uint64, which become int64. */
    bool is_list = PyList_Check(object) || PyTuple_Check(object);
    bool is_uint64 = PyArray_DESCR(any)->kind == 'u' && PyArray_ITEMSIZE(any) == 8;
    if (!nd_dtype_is_float(dtype) && dtype != ND_BOOL && (natural ? is_uint64 : is_list) &&
        check_range(any, dtype) < 0) {
        Py_DECREF(any);
        return -1;
    }
    PyArray_Descr *descr = PyArray_DescrFromType(numpy_types[dtype]);
    int flags =
        NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST;
    PyArrayObject *host = (PyArrayObject *)PyArray_FromArray(any, descr, flags);
    Py_DECREF(any);
    if (host == NULL) {
        return -1;
    }
    /* Asked of `host` alone: converting may run Python, which may change the object. */
    if (PyArray_NDIM(host) > ND_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "array: has %d axes; an NDArray has at most %d",
                     PyArray_NDIM(host), ND_MAX_DIMS);
        Py_DECREF(host);
        return -1;
    }
    int64_t shape[ND_MAX_DIMS];
    for (int i = 0; i < PyArray_NDIM(host); i++) {
        shape[i] = PyArray_DIM(host, i);
    }
    nd_array made;
    nd_dtype staged = dtype == ND_BF16 ? ND_F32 : dtype;
    if (nd_new_array("array", device, staged, PyArray_NDIM(host), shape, &made) < 0) {
        Py_DECREF(host);
        return -1;
    }
    nd_status status = ND_OK;
    size_t bytes = (size_t)nd_size(&made) * nd_dtype_size(staged);
    if (bytes > 0) {
        ND_CALL_UNLOCKED(status, device, upload, made.data, PyArray_DATA(host), bytes);
    }
    Py_DECREF(host);
    int result = nd_check("array", device, status);
    if (result == 0 && staged == dtype) {
        *out = made;
        return 0;
    }
    if (result == 0) {
        result = nd_copy(&made, dtype, out);
    }
    nd_array_clear(&made);
    return result;
}

int nd_from_arguments(PyObject *object, PyObject *device, PyObject *dtype, nd_dtype otherwise,
                      bool natural, nd_array *out) {
    nd_device *where;
    if (dtype != Py_None && nd_dtype_from(dtype, &otherwise) < 0) {
        return -1;
    }
    if (device == Py_None && nd_is_ndarray(object)) {
        where = nd_array_of(object)->storage->device;
    } else if (nd_device_from(device, &where) < 0) {
        return -1;
    }
    return nd_from_object(object, natural, otherwise, where, out);
}

PyObject *nd_to_numpy(const nd_array *a) {
    nd_dtype dtype = a->dtype == ND_BF16 ? ND_F32 : a->dtype;
    nd_array compact;
    if (nd_check_live("numpy", "x", a) < 0) {
        return NULL;
    }
    if (dtype == a->dtype && nd_is_contiguous(a)) {
        nd_array_view(a, &compact);
    } else if (nd_copy(a, dtype, &compact) < 0) {
        return NULL;
    }
    npy_intp shape[ND_MAX_DIMS];
    for (int i = 0; i < compact.ndim; i++) {
        shape[i] = (npy_intp)compact.shape[i];
    }
    PyObject *array = PyArray_SimpleNew(compact.ndim, shape, numpy_types[dtype]);
    size_t bytes = (size_t)nd_size(&compact) * nd_dtype_size(dtype);
    if (array != NULL && bytes > 0) {
        nd_device *device = compact.storage->device;
        void *to = PyArray_DATA((PyArrayObject *)array);
        nd_status status;
        ND_CALL_UNLOCKED(status, device, download, to, compact.data, bytes);
        if (status != ND_OK) {
            Py_CLEAR(array);
            nd_raise("numpy", device, status);
        }
    }
    nd_array_clear(&compact);
    return array;
}
