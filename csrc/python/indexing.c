/* indexing.c - NDArray's reading and writing by index: views, iteration, assignment.
 *
 * An integer keeps its axis, with size 1. An assigned value has the shape with or without that
 * axis.
 */
#include <string.h>

#include "arguments.h"
#include "methods.h"
#include "object.h"

static int index_one(const nd_array *a, int axis, PyObject *key, nd_array *view, int64_t *offset,
                     unsigned *integers) {
    int64_t size = a->shape[axis];
    int to = view->ndim;
    if (PySlice_Check(key)) {
        Py_ssize_t start, stop, step;
        if (PySlice_Unpack(key, &start, &stop, &step) < 0) {
            return -1;
        }
        view->shape[to] = PySlice_AdjustIndices((Py_ssize_t)size, &start, &stop, step);
        view->strides[to] = view->shape[to] > 1 ? a->strides[axis] * step : a->strides[axis];
        *offset += view->shape[to] > 0 ? start * a->strides[axis] : 0;
    } else {
        int64_t at;
        if (PyBool_Check(key) || !PyIndex_Check(key)) {
            FAIL(PyExc_TypeError,
                 "index of axis %d: must be an integer, a slice, ... or None, not %.80s "
                 "(needle.ops.index_select picks by a list)",
                 axis, Py_TYPE(key)->tp_name);
        }
        if (nd_int64_from(key, "index", &at) < 0) {
            return -1;
        }
        if (at < -size || at >= size) {
            FAIL(PyExc_IndexError, "index %lld is out of range for axis %d of size %lld",
                 (long long)at, axis, (long long)size);
        }
        *integers |= 1u << to;
        view->shape[to] = 1; /* an integer keeps its axis */
        view->strides[to] = a->strides[axis];
        *offset += (at < 0 ? at + size : at) * a->strides[axis];
    }
    view->ndim++;
    return 0;
}

/* The view that `key` names; it borrows a's storage. Bit i of *integers: axis i of the view comes
 * from an integer. */
static int index_view(const nd_array *a, PyObject *key, nd_array *view, unsigned *integers) {
    *integers = 0;
    PyObject *one[1] = {key};
    PyObject **keys = one;
    Py_ssize_t count = 1;
    if (PyTuple_Check(key)) {
        keys = &PyTuple_GET_ITEM(key, 0);
        count = PyTuple_GET_SIZE(key);
    }
    Py_ssize_t indexed = 0, added = 0;
    bool ellipsis = false;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (keys[i] == Py_Ellipsis) {
            if (ellipsis) {
                FAIL(PyExc_IndexError, "an index can have one ... only");
            }
            ellipsis = true;
        } else if (keys[i] == Py_None) {
            added++;
        } else {
            indexed++;
        }
    }
    if (indexed > a->ndim) {
        FAIL(PyExc_IndexError, "too many indices: %zd for %d axes", indexed, a->ndim);
    }
    if (a->ndim + added > ND_MAX_DIMS) {
        FAIL(PyExc_IndexError, "an array has at most %d axes", ND_MAX_DIMS);
    }
    *view = *a;
    view->ndim = 0;
    int axis = 0;
    int64_t offset = 0;
    Py_ssize_t skipped = a->ndim - indexed; /* axes that ... or the end of the index stand for */
    for (Py_ssize_t i = 0; i <= count; i++) {
        if (i == count ? !ellipsis : keys[i] == Py_Ellipsis) {
            for (; skipped > 0; skipped--, axis++, view->ndim++) {
                view->shape[view->ndim] = a->shape[axis];
                view->strides[view->ndim] = a->strides[axis];
            }
        } else if (i < count && keys[i] == Py_None) {
            view->shape[view->ndim] = 1;
            view->strides[view->ndim++] = 0;
        } else if (i < count && index_one(a, axis++, keys[i], view, &offset, integers) < 0) {
            return -1;
        }
    }
    if (nd_size(view) > 0) {
        view->data = (char *)a->data + offset * (int64_t)nd_dtype_size(a->dtype);
    }
    return 0;
}

/* A view without the axes that come from integers. */
static nd_array without_integers(const nd_array *view, unsigned integers) {
    nd_array dropped = *view;
    dropped.ndim = 0;
    for (int i = 0; i < view->ndim; i++) {
        if (!(integers & 1u << i)) {
            dropped.shape[dropped.ndim] = view->shape[i];
            dropped.strides[dropped.ndim++] = view->strides[i];
        }
    }
    return dropped;
}

PyObject *nd_ndarray_at(PyObject *self, PyObject *key) {
    nd_array view;
    unsigned integers;
    if (index_view(nd_array_of(self), key, &view, &integers) < 0) {
        return NULL;
    }
    nd_array dropped = without_integers(&view, integers);
    return nd_wrap_view(&dropped);
}

PyObject *nd_ndarray_getitem(PyObject *self, PyObject *key) {
    nd_array view;
    unsigned integers;
    return index_view(nd_array_of(self), key, &view, &integers) < 0 ? NULL : nd_wrap_view(&view);
}

/* Sequence protocol: iteration walks the first axis, each step keeping it with length 1. */
PyObject *nd_ndarray_sequence_item(PyObject *self, Py_ssize_t at) {
    const nd_array *a = nd_array_of(self);
    if (a->ndim == 0 || at < 0 || at >= a->shape[0]) {
        return PyErr_Format(PyExc_IndexError, "index %zd is out of range for axis 0", at);
    }
    PyObject *key = PyLong_FromSsize_t(at);
    PyObject *item = key != NULL ? nd_ndarray_getitem(self, key) : NULL;
    Py_XDECREF(key);
    return item;
}

PyObject *nd_ndarray_iter(PyObject *self) {
    if (nd_array_of(self)->ndim == 0) {
        return PyErr_Format(PyExc_TypeError, "cannot iterate over an array without axes");
    }
    return PySeqIter_New(self);
}

static bool broadcasts(const nd_array *from, const nd_array *to) {
    for (int i = 1; i <= from->ndim; i++) { /* counted from the last axis */
        int64_t size = from->shape[from->ndim - i];
        if (size != 1 && (i > to->ndim || size != to->shape[to->ndim - i])) {
            return false;
        }
    }
    return true;
}

/* `from` as `to`'s shape when they differ by axes of size 1 alone. */
static bool match_ignoring_ones(const nd_array *to, nd_array *from) {
    nd_array matched = *from;
    int at = 0;
    for (int i = 0; i < to->ndim; i++) {
        matched.shape[i] = to->shape[i];
        matched.strides[i] = 0;
        if (to->shape[i] != 1) {
            while (at < from->ndim && from->shape[at] == 1) {
                at++;
            }
            if (at == from->ndim || from->shape[at] != to->shape[i]) {
                return false;
            }
            matched.strides[i] = from->strides[at++];
        }
    }
    for (; at < from->ndim; at++) {
        if (from->shape[at] != 1) {
            return false;
        }
    }
    matched.ndim = to->ndim;
    *from = matched;
    return true;
}

/* x[:, 1, :] keeps its middle axis here, but not in NumPy: a value is taken that broadcasts to the
 * shape without the axes of integers, that broadcasts to the shape with them, or that has the same
 * sizes but for axes of size 1. */
static int assign_indexed(const nd_array *to, unsigned integers, const nd_array *from) {
    nd_array dropped = without_integers(to, integers), source = *from;
    if (broadcasts(from, &dropped)) {
        to = &dropped;
    } else if (!broadcasts(from, to)) {
        (void)match_ignoring_ones(to, &source); /* or nd_assign says what does not fit */
    }
    return nd_assign("setitem", to, &source);
}

/* Write an array, a number or an array-like into `to`. */
static int store(const nd_array *to, unsigned integers, PyObject *value) {
    nd_number number;
    nd_array source;
    if (!nd_is_ndarray(value)) {
        int found = nd_number_from(value, &number);
        if (found < 0 || (found > 0 && nd_check_number("setitem", &number, to->dtype) < 0)) {
            return -1;
        }
        /* An int64 may be too long for the double that fill takes: it goes as an array. */
        if (found > 0 && (to->dtype != ND_I64 || nd_is_exact(&number))) {
            return nd_fill(to, number.value);
        }
        if (nd_from_object(value, false, to->dtype, to->storage->device, &source) < 0) {
            return -1;
        }
    } else if (nd_to_device(nd_array_of(value), to->storage->device, &source) < 0) {
        return -1;
    }
    int result = assign_indexed(to, integers, &source);
    nd_array_clear(&source);
    return result;
}

int nd_store(const nd_array *to, PyObject *value) { return store(to, 0, value); }

int nd_ndarray_setitem(PyObject *self, PyObject *key, PyObject *value) {
    nd_array view;
    unsigned integers;
    if (value == NULL) {
        FAIL(PyExc_TypeError, "elements of an array cannot be deleted");
    }
    return index_view(nd_array_of(self), key, &view, &integers) < 0 ? -1
                                                                    : store(&view, integers, value);
}

Py_ssize_t nd_ndarray_length(PyObject *self) {
    const nd_array *a = nd_array_of(self);
    if (a->ndim == 0) {
        FAIL(PyExc_TypeError, "an array without axes has no len()");
    }
    return (Py_ssize_t)a->shape[0];
}
