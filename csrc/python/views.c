/* views.c - NDArray's views: permute, broadcast_to, reshape, as_strided, joined, flip, view.
 *
 * Nothing here copies, but for reshape where no strides can express the result.
 */
#include <string.h>

#include "arguments.h"
#include "errors.h"
#include "methods.h"
#include "object.h"

PyObject *nd_ndarray_permute(PyObject *self, PyObject *arguments) {
    const nd_array *a = nd_array_of(self);
    int64_t axes[ND_MAX_DIMS];
    int count;
    if (nd_shape_from_arguments(arguments, "permute: axes", &count, axes) < 0 ||
        nd_normalise_axes("permute", a->ndim, count, axes) < 0) {
        return NULL;
    }
    if (count != a->ndim) {
        return PyErr_Format(PyExc_ValueError, "permute: axes: names %d of %d axes", count, a->ndim);
    }
    nd_array view = *a;
    for (int i = 0; i < count; i++) {
        view.shape[i] = a->shape[axes[i]];
        view.strides[i] = a->strides[axes[i]];
    }
    return nd_wrap_view(&view);
}

PyObject *nd_ndarray_broadcast_to(PyObject *self, PyObject *arguments) {
    int64_t shape[ND_MAX_DIMS];
    int ndim;
    nd_array view;
    if (nd_shape_from_arguments(arguments, "broadcast_to: shape", &ndim, shape) < 0) {
        return NULL;
    }
    nd_status status = nd_broadcast_to(nd_array_of(self), ndim, shape, &view);
    return status != ND_OK ? nd_raise("broadcast_to", NULL, status) : nd_wrap(&view);
}

/* The -1 of a new shape, and whether the sizes agree. */
static int complete_shape(const nd_array *a, int ndim, int64_t *shape) {
    int64_t size = nd_size(a), known = 1;
    int open = -1;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == -1 && open < 0) {
            open = i;
        } else if (shape[i] < 0) {
            FAIL(PyExc_ValueError, "reshape: axis %d: %s", i,
                 shape[i] == -1 ? "only one axis can be -1" : "negative size");
        } else if (__builtin_mul_overflow(known, shape[i], &known)) {
            known = -1;
            break;
        }
    }
    if (open >= 0 && known > 0 && size % known == 0) {
        shape[open] = size / known;
        known = size;
    }
    bool fits = known == size && (open < 0 || shape[open] >= 0);
    if (!fits || nd_check_shape(a->dtype, ndim, shape) != ND_OK) {
        PyObject *from = nd_pack_shape(a->ndim, a->shape), *to = nd_pack_shape(ndim, shape);
        if (from != NULL && to != NULL) {
            PyErr_Format(PyExc_ValueError, "reshape: %lld elements of shape %R do not fit %R",
                         (long long)size, from, to);
        }
        Py_XDECREF(from);
        Py_XDECREF(to);
        return -1;
    }
    return 0;
}

static PyObject *reshaped(const nd_array *a, int ndim, const int64_t *shape) {
    nd_array view = *a;
    view.ndim = ndim;
    memcpy(view.shape, shape, (size_t)ndim * sizeof *shape);
    if (nd_reshape_strides(a, &view)) {
        return nd_wrap_view(&view);
    }
    nd_array copy;
    if (nd_copy(a, a->dtype, &copy) < 0) {
        return NULL;
    }
    copy.ndim = ndim;
    memcpy(copy.shape, shape, (size_t)ndim * sizeof *shape);
    nd_contiguous_strides(ndim, copy.shape, copy.strides);
    return nd_wrap(&copy);
}

PyObject *nd_ndarray_reshape(PyObject *self, PyObject *arguments) {
    int64_t shape[ND_MAX_DIMS];
    int ndim;
    if (nd_shape_from_arguments(arguments, "reshape: shape", &ndim, shape) < 0 ||
        complete_shape(nd_array_of(self), ndim, shape) < 0) {
        return NULL;
    }
    return reshaped(nd_array_of(self), ndim, shape);
}

PyObject *nd_ndarray_as_strided(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"shape", "strides", NULL};
    PyObject *shape, *strides;
    nd_array view = *nd_array_of(self);
    int count;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO:as_strided", names, &shape,
                                     &strides) ||
        nd_shape_from(shape, "as_strided: shape", &view.ndim, view.shape) < 0 ||
        nd_shape_from(strides, "as_strided: strides", &count, view.strides) < 0) {
        return NULL;
    }
    if (count != view.ndim) {
        return PyErr_Format(PyExc_ValueError, "as_strided: %d strides for %d axes", count,
                            view.ndim);
    }
    nd_status status = nd_check_bounds(&view);
    return status != ND_OK ? nd_raise("as_strided", NULL, status) : nd_wrap_view(&view);
}

PyObject *nd_ndarray_joined(PyObject *self, PyObject *other) {
    if (nd_check_operand("joined", "other", other) < 0) {
        return NULL;
    }
    nd_array view;
    if (!nd_joined(nd_array_of(self), nd_array_of(other), &view)) {
        Py_RETURN_NONE;
    }
    return nd_wrap_view(&view);
}

PyObject *nd_ndarray_flip(PyObject *self, PyObject *arguments) {
    nd_array view = *nd_array_of(self);
    int64_t axes[ND_MAX_DIMS];
    int count = view.ndim;
    for (int i = 0; i < count; i++) {
        axes[i] = i;
    }
    bool all = PyTuple_GET_SIZE(arguments) == 0 ||
               (PyTuple_GET_SIZE(arguments) == 1 && PyTuple_GET_ITEM(arguments, 0) == Py_None);
    if (!all && (nd_shape_from_arguments(arguments, "flip: axes", &count, axes) < 0 ||
                 nd_normalise_axes("flip", view.ndim, count, axes) < 0)) {
        return NULL;
    }
    bool empty = nd_size(&view) == 0;
    for (int i = 0; i < count && !empty; i++) {
        int64_t stride = view.strides[axes[i]];
        view.data = (char *)view.data +
                    (view.shape[axes[i]] - 1) * stride * (int64_t)nd_dtype_size(view.dtype);
        view.strides[axes[i]] = -stride;
    }
    return nd_wrap_view(&view);
}

PyObject *nd_ndarray_view(PyObject *self, PyObject *dtype_object) {
    nd_array view = *nd_array_of(self);
    nd_dtype dtype;
    if (nd_dtype_from(dtype_object, &dtype) < 0) {
        return NULL;
    }
    if (nd_dtype_size(dtype) != nd_dtype_size(view.dtype)) {
        return PyErr_Format(PyExc_TypeError,
                            "view: %s has %zu bytes an element, %s has %zu; "
                            "astype() converts",
                            nd_dtype_name(view.dtype), nd_dtype_size(view.dtype),
                            nd_dtype_name(dtype), nd_dtype_size(dtype));
    }
    view.dtype = dtype;
    return nd_wrap_view(&view);
}
