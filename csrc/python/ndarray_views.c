/* ndarray_views.c - NDArray's views: permute, reshape, as_strided, indexing, flat.
 *
 * Nothing here copies, but for reshape where no strides can express the result, and for slices of a
 * `flat` that has no 1-D view.
 */
#include "ndarray.h"

#include <string.h>

typedef struct {
    PyObject_HEAD PyObject *base; /* an NDArray */
} FlatObject;

/* ---- views ------------------------------------------------------------------------------------- */
/* Do all elements of the view lie inside its storage? */
int nd_check_bounds(const char *op, const nd_array *a) {
    if (nd_check_shape(a->dtype, a->ndim, a->shape) != ND_OK) {
        PyErr_Format(PyExc_ValueError, "%s: %s", op, nd_last_error());
        return -1;
    }
    if (nd_size(a) == 0) {
        return 0;
    }
    /* Sizes times item are below 2^63 and strides at most that: the sums below stay within 128
     * bits. */
    const char *memory = a->storage->memory;
    int64_t item = (int64_t)nd_dtype_size(a->dtype);
    __int128 first = ((const char *)a->data - memory), last = first;
    for (int i = 0; i < a->ndim; i++) {
        __int128 reach = (__int128)((a->shape[i] - 1) * item) * a->strides[i];
        first += reach < 0 ? reach : 0;
        last += reach > 0 ? reach : 0;
    }
    if (first < 0 || last + item > (__int128)a->storage->bytes) {
        PyErr_Format(PyExc_ValueError,
                     "%s: shape and strides reach outside the array's memory of %zu bytes", op,
                     a->storage->bytes);
        return -1;
    }
    return 0;
}

static PyObject *ndarray_permute(PyObject *self, PyObject *arguments) {
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
    return nd_wrap_view(nd_state_of(self), &view);
}

static PyObject *ndarray_broadcast_to(PyObject *self, PyObject *arguments) {
    nd_state *state = nd_state_of(self);
    int64_t shape[ND_MAX_DIMS];
    int ndim;
    nd_array view;
    if (nd_shape_from_arguments(arguments, "broadcast_to: shape", &ndim, shape) < 0) {
        return NULL;
    }
    nd_status status = nd_broadcast_to(nd_array_of(self), ndim, shape, &view);
    return status != ND_OK ? nd_raise(state, "broadcast_to", NULL, status) : nd_wrap(state, &view);
}

/* Set `view`'s strides so that it walks `a` in the same order under another shape of the same
 * size. False when no strides can. */
bool nd_reshape_strides(const nd_array *a, nd_array *view) {
    const nd_array *operands[1] = {a};
    nd_loop loop;
    nd_collapse(1, operands, &loop);
    if (loop.size == 0 || loop.ndim == 0) {
        nd_contiguous_strides(view->ndim, view->shape, view->strides);
        return true;
    }
    /* From the last axis outwards, each merged run of the old axes is cut into new ones. */
    int run = loop.ndim - 1;
    int64_t left = loop.shape[run], stride = loop.strides[0][run];
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] > 1 && left == 1) {
            run--;
            left = loop.shape[run];
            stride = loop.strides[0][run];
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

/* The -1 of a new shape, and whether the sizes agree. */
static int complete_shape(const nd_array *a, int ndim, int64_t *shape) {
    int64_t size = nd_size(a), known = 1;
    int open = -1;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == -1 && open < 0) {
            open = i;
        } else if (shape[i] < 0) {
            PyErr_Format(PyExc_ValueError, "reshape: axis %d: %s", i,
                         shape[i] == -1 ? "only one axis can be -1" : "negative size");
            return -1;
        } else if (__builtin_mul_overflow(known, shape[i], &known)) {
            known = -1;
            break;
        }
    }
    if (open >= 0 && known > 0 && size % known == 0) {
        shape[open] = size / known;
        known = size;
    }
    if (known != size || (open >= 0 && shape[open] < 0)) {
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

static PyObject *reshaped(nd_state *state, const nd_array *a, int ndim, const int64_t *shape) {
    nd_array view = *a;
    view.ndim = ndim;
    memcpy(view.shape, shape, (size_t)ndim * sizeof *shape);
    if (nd_reshape_strides(a, &view)) {
        return nd_wrap_view(state, &view);
    }
    nd_array copy;
    if (nd_copy(state, a, a->dtype, &copy) < 0) {
        return NULL;
    }
    copy.ndim = ndim;
    memcpy(copy.shape, shape, (size_t)ndim * sizeof *shape);
    nd_contiguous_strides(ndim, copy.shape, copy.strides);
    return nd_wrap(state, &copy);
}

static PyObject *ndarray_reshape(PyObject *self, PyObject *arguments) {
    int64_t shape[ND_MAX_DIMS];
    int ndim;
    if (nd_shape_from_arguments(arguments, "reshape: shape", &ndim, shape) < 0 ||
        complete_shape(nd_array_of(self), ndim, shape) < 0) {
        return NULL;
    }
    return reshaped(nd_state_of(self), nd_array_of(self), ndim, shape);
}

static PyObject *ndarray_as_strided(PyObject *self, PyObject *arguments, PyObject *keywords) {
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
    return nd_check_bounds("as_strided", &view) < 0 ? NULL : nd_wrap_view(nd_state_of(self), &view);
}

static PyObject *ndarray_flip(PyObject *self, PyObject *arguments) {
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
    return nd_wrap_view(nd_state_of(self), &view);
}

static PyObject *ndarray_view(PyObject *self, PyObject *dtype_object) {
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
    return nd_wrap_view(nd_state_of(self), &view);
}

/* ---- indexing ---------------------------------------------------------------------------------- */
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
            PyErr_Format(PyExc_TypeError,
                         "index of axis %d: must be an integer, a slice, ... or None, not %.80s "
                         "(needle.ops.index_select picks by a list)",
                         axis, Py_TYPE(key)->tp_name);
            return -1;
        }
        if (nd_int64_from(key, "index", &at) < 0) {
            return -1;
        }
        if (at < -size || at >= size) {
            PyErr_Format(PyExc_IndexError, "index %lld is out of range for axis %d of size %lld",
                         (long long)at, axis, (long long)size);
            return -1;
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
                PyErr_SetString(PyExc_IndexError, "an index can have one ... only");
                return -1;
            }
            ellipsis = true;
        } else if (keys[i] == Py_None) {
            added++;
        } else {
            indexed++;
        }
    }
    if (indexed > a->ndim) {
        PyErr_Format(PyExc_IndexError, "too many indices: %zd for %d axes", indexed, a->ndim);
        return -1;
    }
    if (a->ndim + added > ND_MAX_DIMS) {
        PyErr_Format(PyExc_IndexError, "an array has at most %d axes", ND_MAX_DIMS);
        return -1;
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

PyObject *nd_ndarray_getitem(PyObject *self, PyObject *key) {
    nd_array view;
    unsigned integers;
    return index_view(nd_array_of(self), key, &view, &integers) < 0
               ? NULL
               : nd_wrap_view(nd_state_of(self), &view);
}

/* Sequence protocol: iteration walks the first axis, each step keeping it with length 1. */
PyObject *nd_ndarray_sequence_item(PyObject *self, Py_ssize_t at) {
    const nd_array *a = nd_array_of(self);
    if (a->ndim == 0 || at < 0 || at >= a->shape[0]) {
        PyErr_Format(PyExc_IndexError, "index %zd is out of range for axis 0", at);
        return NULL;
    }
    PyObject *key = PyLong_FromSsize_t(at);
    PyObject *item = key != NULL ? nd_ndarray_getitem(self, key) : NULL;
    Py_XDECREF(key);
    return item;
}

PyObject *nd_ndarray_iter(PyObject *self) {
    if (nd_array_of(self)->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "cannot iterate over an array without axes");
        return NULL;
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
static int assign_indexed(nd_state *state, const nd_array *to, unsigned integers,
                          const nd_array *from) {
    nd_array dropped = *to, source = *from;
    dropped.ndim = 0;
    for (int i = 0; i < to->ndim; i++) {
        if (!(integers & 1u << i)) {
            dropped.shape[dropped.ndim] = to->shape[i];
            dropped.strides[dropped.ndim++] = to->strides[i];
        }
    }
    if (broadcasts(from, &dropped)) {
        to = &dropped;
    } else if (!broadcasts(from, to)) {
        (void)match_ignoring_ones(to, &source); /* or nd_assign says what does not fit */
    }
    return nd_assign(state, "setitem", to, &source);
}

/* Write an array, a number or an array-like into `to`. */
static int store(nd_state *state, const nd_array *to, unsigned integers, PyObject *value) {
    double number;
    bool is_float;
    nd_array source;
    if (!nd_is_ndarray(state, value)) {
        /* An int64 may be too long for the double that fill takes: it goes as an array. */
        bool exact = to->dtype == ND_I64 && PyLong_Check(value) && !PyBool_Check(value);
        int found = exact ? 0 : nd_number_from(value, &number, &is_float);
        if (found != 0) {
            if (found < 0) {
                return -1;
            }
            return nd_fill(state, to, number);
        }
        if (nd_from_object(state, value, false, to->dtype, to->storage->device, &source) < 0) {
            return -1;
        }
    } else if (nd_to_device(state, nd_array_of(value), to->storage->device, &source) < 0) {
        return -1;
    }
    int result = assign_indexed(state, to, integers, &source);
    nd_array_clear(&source);
    return result;
}

int nd_store(nd_state *state, const nd_array *to, PyObject *value) {
    return store(state, to, 0, value);
}

int nd_ndarray_setitem(PyObject *self, PyObject *key, PyObject *value) {
    nd_array view;
    unsigned integers;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "elements of an array cannot be deleted");
        return -1;
    }
    return index_view(nd_array_of(self), key, &view, &integers) < 0
               ? -1
               : store(nd_state_of(self), &view, integers, value);
}

Py_ssize_t nd_ndarray_length(PyObject *self) {
    const nd_array *a = nd_array_of(self);
    if (a->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "an array without axes has no len()");
        return -1;
    }
    return (Py_ssize_t)a->shape[0];
}

static PyObject *ndarray_process_slice(PyObject *self, PyObject *arguments) {
    const nd_array *a = nd_array_of(self);
    PyObject *slice;
    int dim;
    if (!PyArg_ParseTuple(arguments, "O!i:process_slice", &PySlice_Type, &slice, &dim)) {
        return NULL;
    }
    if (dim < 0 || dim >= a->ndim) {
        return PyErr_Format(PyExc_ValueError, "process_slice: axis %d is out of range for %d axes",
                            dim, a->ndim);
    }
    Py_ssize_t start, stop, step;
    if (PySlice_Unpack(slice, &start, &stop, &step) < 0) {
        return NULL;
    }
    PySlice_AdjustIndices((Py_ssize_t)a->shape[dim], &start, &stop, step);
    /* Backwards to the very first element there is no stop that is not itself an index. */
    PyObject *from = PyLong_FromSsize_t(start), *by = PyLong_FromSsize_t(step);
    PyObject *to = stop < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(stop);
    PyObject *result = from && to && by ? PySlice_New(from, to, by) : NULL;
    Py_XDECREF(from);
    Py_XDECREF(to);
    Py_XDECREF(by);
    return result;
}

/* ---- Flat: a 1-D window on an array whose strides have no 1-D view ----------------------------------- */
static const nd_array *flat_array(PyObject *self) {
    return nd_array_of(((FlatObject *)self)->base);
}

static int flat_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((FlatObject *)self)->base);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int flat_clear(PyObject *self) {
    Py_CLEAR(((FlatObject *)self)->base);
    return 0;
}

static void flat_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    flat_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static Py_ssize_t flat_length(PyObject *self) { return (Py_ssize_t)nd_size(flat_array(self)); }

/* Element `at` in C order, as a view of shape (1,). */
static int flat_element(const nd_array *a, int64_t at, nd_array *view) {
    int64_t size = nd_size(a), offset = 0;
    if (at < -size || at >= size) {
        PyErr_Format(PyExc_IndexError, "index %lld is out of range for flat of size %lld",
                     (long long)at, (long long)size);
        return -1;
    }
    at += at < 0 ? size : 0;
    for (int i = a->ndim - 1; i >= 0; i--) {
        offset += at % a->shape[i] * a->strides[i];
        at /= a->shape[i];
    }
    *view = *a;
    view->ndim = 1;
    view->shape[0] = view->strides[0] = 1;
    view->data = (char *)a->data + offset * (int64_t)nd_dtype_size(a->dtype);
    return 0;
}

/* The elements in C order, as a fresh 1-D array. */
static int flat_copy(nd_state *state, const nd_array *a, nd_array *out) {
    if (nd_copy(state, a, a->dtype, out) < 0) {
        return -1;
    }
    out->shape[0] = nd_size(out);
    out->strides[0] = out->ndim = 1;
    return 0;
}

static PyObject *flat_getitem(PyObject *self, PyObject *key) {
    nd_state *state = nd_state_of(((FlatObject *)self)->base);
    const nd_array *a = flat_array(self);
    nd_array view, copy;
    if (PyIndex_Check(key)) {
        int64_t at;
        if (nd_int64_from(key, "index", &at) < 0 || flat_element(a, at, &view) < 0) {
            return NULL;
        }
        return nd_wrap_view(state, &view);
    }
    if (flat_copy(state, a, &copy) < 0) {
        return NULL;
    }
    unsigned integers;
    PyObject *result =
        index_view(&copy, key, &view, &integers) < 0 ? NULL : nd_wrap_view(state, &view);
    nd_array_clear(&copy);
    return result;
}

static PyObject *flat_sequence_item(PyObject *self, Py_ssize_t at) {
    nd_array view;
    return flat_element(flat_array(self), at, &view) < 0
               ? NULL
               : nd_wrap_view(nd_state_of(((FlatObject *)self)->base), &view);
}

static int flat_setitem(PyObject *self, PyObject *key, PyObject *value) {
    nd_state *state = nd_state_of(((FlatObject *)self)->base);
    const nd_array *a = flat_array(self);
    nd_array view, copy;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "elements of an array cannot be deleted");
        return -1;
    }
    if (PyIndex_Check(key)) {
        int64_t at;
        return nd_int64_from(key, "index", &at) < 0 || flat_element(a, at, &view) < 0
                   ? -1
                   : nd_store(state, &view, value);
    }
    if (flat_copy(state, a, &copy) < 0) {
        return -1;
    }
    unsigned integers;
    int result = index_view(&copy, key, &view, &integers) < 0 ? -1 : nd_store(state, &view, value);
    if (result == 0) {
        copy.ndim = a->ndim;
        memcpy(copy.shape, a->shape, sizeof copy.shape);
        nd_contiguous_strides(copy.ndim, copy.shape, copy.strides);
        result = nd_assign(state, "setitem", a, &copy);
    }
    nd_array_clear(&copy);
    return result;
}

static PyObject *flat_numpy(PyObject *self, PyObject *arguments) {
    (void)arguments;
    nd_state *state = nd_state_of(((FlatObject *)self)->base);
    nd_array copy;
    if (flat_copy(state, flat_array(self), &copy) < 0) {
        return NULL;
    }
    PyObject *result = nd_to_numpy(state, &copy);
    nd_array_clear(&copy);
    return result;
}

/* NumPy's protocol: the elements are gathered, so there is no sharing their memory. */
static PyObject *flat_array_protocol(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|OO:__array__", names, &dtype, &copy)) {
        return NULL;
    }
    if (copy == Py_False) {
        return PyErr_Format(PyExc_ValueError,
                            "__array__: this flat cannot be given without a copy");
    }
    PyObject *array = flat_numpy(self, NULL);
    if (array == NULL || dtype == Py_None) {
        return array;
    }
    PyObject *cast = PyObject_CallMethod(array, "astype", "O", dtype);
    Py_DECREF(array);
    return cast;
}

static PyObject *flat_shape(PyObject *self, void *closure) {
    (void)closure;
    return Py_BuildValue("(n)", flat_length(self));
}

static PyObject *flat_base_attribute(PyObject *self, void *name) {
    return PyObject_GetAttrString(((FlatObject *)self)->base, name);
}

static PyObject *flat_repr(PyObject *self) {
    PyObject *array = flat_numpy(self, NULL);
    PyObject *text = array != NULL ? PyUnicode_FromFormat("Flat(%S)", array) : NULL;
    Py_XDECREF(array);
    return text;
}

static PyMethodDef flat_methods[] = {
    {"numpy", flat_numpy, METH_NOARGS, "numpy($self)\n--\n\nThe elements in C order, copied."},
    {"__array__", KEYWORD_METHOD(flat_array_protocol),
     "__array__($self, dtype=None, copy=None)\n--\n\nNumPy's protocol."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef flat_getset[] = {
    {"shape", flat_shape, NULL, NULL, NULL},
    {"size", flat_base_attribute, NULL, NULL, "size"},
    {"dtype", flat_base_attribute, NULL, NULL, "dtype"},
    {"device", flat_base_attribute, NULL, NULL, "device"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot flat_slots[] = {
    {Py_tp_dealloc, flat_dealloc},
    {Py_tp_traverse, flat_traverse},
    {Py_tp_clear, flat_clear},
    {Py_tp_repr, flat_repr},
    {Py_tp_methods, flat_methods},
    {Py_tp_getset, flat_getset},
    {Py_mp_length, flat_length},
    {Py_mp_subscript, flat_getitem},
    {Py_mp_ass_subscript, flat_setitem},
    {Py_sq_length, flat_length},
    {Py_sq_item, flat_sequence_item},
    {Py_tp_doc, "The elements of an array in C order; what is set here is set there."},
    {0, NULL},
};

PyType_Spec nd_flat_spec = {
    .name = "needle._C.Flat",
    .basicsize = sizeof(FlatObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = flat_slots,
};

PyObject *nd_ndarray_flat(PyObject *self, void *closure) {
    (void)closure;
    nd_state *state = nd_state_of(self);
    nd_array view = *nd_array_of(self);
    view.ndim = 1;
    view.shape[0] = nd_size(nd_array_of(self));
    if (nd_reshape_strides(nd_array_of(self), &view)) {
        return nd_wrap_view(state, &view);
    }
    FlatObject *flat = PyObject_GC_New(FlatObject, state->flat_type);
    if (flat != NULL) {
        flat->base = Py_NewRef(self);
        PyObject_GC_Track(flat);
    }
    return (PyObject *)flat;
}

/* ---- tables ---------------------------------------------------------------------------------- */
PyMethodDef nd_view_methods[] = {
    {"permute", ndarray_permute, METH_VARARGS,
     "permute($self, axes, /)\n--\n\nView with the axes in another order."},
    {"broadcast_to", ndarray_broadcast_to, METH_VARARGS,
     "broadcast_to($self, shape, /)\n--\n\nView stretched with strides of 0; not writable."},
    {"reshape", ndarray_reshape, METH_VARARGS,
     "reshape($self, shape, /)\n--\n\nSame elements in another shape, one axis of which may be -1: "
     "a view where the strides allow it, else a copy."},
    {"as_strided", KEYWORD_METHOD(ndarray_as_strided),
     "as_strided($self, shape, strides)\n--\n\nView with these strides, in elements; ValueError "
     "when "
     "it would reach outside the memory."},
    {"flip", ndarray_flip, METH_VARARGS,
     "flip($self, axes=None, /)\n--\n\nView with the axes (default: all) walked backwards."},
    {"view", ndarray_view, METH_O,
     "view($self, dtype, /)\n--\n\nThe same bits as another dtype of the same size."},
    {"process_slice", ndarray_process_slice, METH_VARARGS,
     "process_slice($self, sl, dim, /)\n--\n\nThe slice with start, stop and step filled in."},
    {NULL, NULL, 0, NULL},
};
