/* arguments.c - dtypes, shapes, axes and numbers as Python passes them.
 */
#include "arguments.h"

#include <math.h>

#include "object.h"

bool nd_is_out_of_memory(void) { return PyErr_ExceptionMatches(PyExc_MemoryError); }

int nd_dtype_from(PyObject *object, nd_dtype *out) {
    PyObject *name = NULL;
    if (object == (PyObject *)&PyLong_Type || object == (PyObject *)&PyFloat_Type) {
        *out = object == (PyObject *)&PyLong_Type ? ND_I64 : ND_F32; /* no float64 */
        return 0;
    }
    if (PyUnicode_Check(object)) {
        name = Py_NewRef(object);
    } else { /* numpy.dtype has .name, numpy.float32 and bool have .__name__ */
        name = PyObject_GetAttrString(object, PyType_Check(object) ? "__name__" : "name");
        if (name == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1; /* what the object raised */
        }
        if (name == NULL || !PyUnicode_Check(name)) {
            PyErr_Clear();
            Py_XDECREF(name);
            FAIL(PyExc_TypeError, "dtype: must be a name such as \"float32\", not %.80s",
                 Py_TYPE(object)->tp_name);
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
        FAIL(PyExc_TypeError, "%s: must be integers, not %.80s", what, Py_TYPE(object)->tp_name);
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
    /* A tuple of our own: an item's __index__ may change the caller's list. */
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: must be an integer or a sequence of them, not %.80s",
                         what, Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    if (count > ND_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: has %zd entries; an array has at most %d axes", what,
                     count, ND_MAX_DIMS);
        Py_DECREF(items);
        return -1;
    }
    *ndim = (int)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (nd_int64_from(PyTuple_GET_ITEM(items, i), what, &values[i]) < 0) {
            Py_DECREF(items);
            return -1;
        }
    }
    Py_DECREF(items);
    return 0;
}

int nd_shape_from_arguments(PyObject *arguments, const char *what, int *ndim, int64_t *values) {
    bool single = PyTuple_GET_SIZE(arguments) == 1;
    return nd_shape_from(single ? PyTuple_GET_ITEM(arguments, 0) : arguments, what, ndim, values);
}

int nd_normalise_axes(const char *op, int ndim, int count, int64_t *axes) {
    unsigned seen = 0;
    for (int i = 0; i < count; i++) {
        if (axes[i] < -ndim || axes[i] >= ndim) {
            FAIL(PyExc_ValueError, "%s: axis %lld is out of range for %d axes", op,
                 (long long)axes[i], ndim);
        }
        axes[i] += axes[i] < 0 ? ndim : 0;
        if (seen & (1u << axes[i])) {
            FAIL(PyExc_ValueError, "%s: axis %lld is named twice", op, (long long)axes[i]);
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

bool nd_is_exact(const nd_number *number) {
    const int64_t most = (int64_t)1 << 53;
    return number->is_float ||
           (!number->beyond && number->integer <= most && number->integer >= -most);
}

int nd_check_number(const char *op, const nd_number *number, nd_dtype dtype) {
    static const int64_t limits[ND_NUM_DTYPES][2] = {[ND_I32] = {INT32_MIN, INT32_MAX},
                                                     [ND_I64] = {INT64_MIN, INT64_MAX},
                                                     [ND_U8] = {0, UINT8_MAX},
                                                     [ND_U16] = {0, UINT16_MAX}};
    const char *name = nd_dtype_name(dtype);
    if (nd_dtype_is_float(dtype)) {
        if (number->beyond && isinf(number->value)) {
            FAIL(PyExc_OverflowError, "%s: the integer is too large for %s", op, name);
        }
        return 0;
    }
    if (dtype == ND_BOOL) {
        return 0;
    }
    if (isnan(number->value)) {
        FAIL(PyExc_ValueError, "%s: NaN is no integer, which %s holds", op, name);
    }
    /* 2^63 - 1 is no double: the next one is the first that is too large. */
    double truncated = trunc(number->value);
    bool float_beyond = number->is_float && (truncated < -0x1p63 || truncated >= 0x1p63);
    int64_t integer = !number->is_float ? number->integer : float_beyond ? 0 : (int64_t)truncated;
    if (number->beyond || float_beyond) {
        FAIL(PyExc_OverflowError, "%s: a number of more than 64 bits is out of bounds for %s", op,
             name);
    }
    if (integer < limits[dtype][0] || integer > limits[dtype][1]) {
        FAIL(PyExc_OverflowError, "%s: %lld is out of bounds for %s", op, (long long)integer, name);
    }
    return 0;
}

int nd_take_number(const char *op, const field *f, PyObject *object, nd_slot *slot) {
    bool real = f->kind == KIND_F64;
    if (real) {
        slot->real = PyFloat_AsDouble(object);
    } else {
        PyObject *index = PyNumber_Index(object);
        slot->integer = index != NULL ? (int64_t)PyLong_AsLongLong(index) : -1;
        Py_XDECREF(index);
    }
    if (!PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        FAIL(PyExc_TypeError, "%s: %s: must be %s, not %.80s", op, f->name,
             real ? "a number" : "an integer", Py_TYPE(object)->tp_name);
    }
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        FAIL(real ? PyExc_OverflowError : PyExc_ValueError, "%s: %s: %s", op, f->name,
             real ? "the integer is too large for a float" : "must be an integer of 64 bits");
    }
    return -1;
}

int nd_check_operand(const char *op, const char *operand, PyObject *object) {
    if (!nd_is_ndarray(object)) {
        FAIL(PyExc_TypeError, "%s: %s: must be an NDArray, not %.80s", op, operand,
             Py_TYPE(object)->tp_name);
    }
    return nd_check_live(op, operand, nd_array_of(object));
}
