/* ndarray_math.c - NDArray's operators, matrix product and reductions, in terms of rows.
 */
#include "ndarray.h"

#include <string.h>

/* ---- operators --------------------------------------------------------------------------------- */
static PyObject *binary(PyObject *x, PyObject *y, nd_row row, NDArrayObject *into) {
    nd_state *state = nd_state_of(x);
    if (state == NULL) {
        state = nd_state_of(y);
    }
    bool unsupported;
    PyObject *result = nd_binary(state, row, x, y, into, &unsupported);
    if (unsupported) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return result;
}

#define OPERATOR(name, row)                                         \
    PyObject *nd_ndarray_##name(PyObject *x, PyObject *y) {         \
        return binary(x, y, ROW_##row, NULL);                       \
    }                                                               \
    PyObject *nd_ndarray_inplace_##name(PyObject *x, PyObject *y) { \
        return binary(x, y, ROW_##row, (NDArrayObject *)x);         \
    }
OPERATOR(add, add)
OPERATOR(subtract, subtract)
OPERATOR(multiply, multiply)
OPERATOR(divide, divide)

PyObject *nd_ndarray_power(PyObject *x, PyObject *y, PyObject *modulus) {
    if (modulus != Py_None) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return binary(x, y, ROW_power, NULL);
}

PyObject *nd_ndarray_inplace_power(PyObject *x, PyObject *y, PyObject *modulus) {
    if (modulus != Py_None) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return binary(x, y, ROW_power, (NDArrayObject *)x);
}

PyObject *nd_ndarray_negate(PyObject *x) { return nd_unary(nd_state_of(x), ROW_negate, x); }
PyObject *nd_ndarray_absolute(PyObject *x) { return nd_unary(nd_state_of(x), ROW_absolute, x); }
PyObject *nd_ndarray_positive(PyObject *x) { return Py_NewRef(x); }

PyObject *nd_ndarray_compare(PyObject *x, PyObject *y, int op) {
    static const nd_row comparisons[] = {
        [Py_LT] = ROW_less,      [Py_LE] = ROW_less_equal, [Py_EQ] = ROW_equal,
        [Py_NE] = ROW_not_equal, [Py_GT] = ROW_greater,    [Py_GE] = ROW_greater_equal};
    return binary(x, y, comparisons[op], NULL);
}

#define UNARY_METHOD(name)                                           \
    static PyObject *ndarray_##name(PyObject *x, PyObject *unused) { \
        (void)unused;                                                \
        return nd_unary(nd_state_of(x), ROW_##name, x);              \
    }
UNARY_METHOD(exp)
UNARY_METHOD(log)
UNARY_METHOD(tanh)
UNARY_METHOD(sqrt)

static PyObject *ndarray_extremum(PyObject *x, PyObject *y, nd_row row, const char *name) {
    PyObject *result = binary(x, y, row, NULL);
    if (result == Py_NotImplemented) {
        Py_DECREF(result);
        return PyErr_Format(PyExc_TypeError, "%s: takes an array or a number, not %.80s", name,
                            Py_TYPE(y)->tp_name);
    }
    return result;
}

static PyObject *ndarray_maximum(PyObject *x, PyObject *y) {
    return ndarray_extremum(x, y, ROW_maximum, "maximum");
}

static PyObject *ndarray_minimum(PyObject *x, PyObject *y) {
    return ndarray_extremum(x, y, ROW_minimum, "minimum");
}

/* ---- matrix product ------------------------------------------------------------------------------ */
/* An operand with all its batch axes merged into one: a view when the strides allow, else a copy. */
static int merge_batch(nd_state *state, const nd_array *a, int ndim, const int64_t *batch,
                       nd_array *out) {
    int64_t shape[ND_MAX_DIMS], merged[3] = {1, a->shape[a->ndim - 2], a->shape[a->ndim - 1]};
    for (int i = 0; i < ndim; i++) {
        shape[i] = batch[i];
        merged[0] *= batch[i];
    }
    shape[ndim] = merged[1];
    shape[ndim + 1] = merged[2];
    nd_array wide;
    if (nd_broadcast_to(a, ndim + 2, shape, &wide) != ND_OK) {
        nd_raise(state, "matmul", NULL, ND_EVALUE);
        return -1;
    }
    /* Only the batch axes may merge, whatever the matrix axes look like: reshape them alone. */
    nd_array batches = wide, flat = wide;
    batches.ndim = ndim;
    flat.ndim = 1;
    flat.shape[0] = merged[0];
    if (merged[0] == 0 || nd_reshape_strides(&batches, &flat)) {
        *out = wide;
        out->ndim = 3;
        memcpy(out->shape, merged, sizeof merged);
        out->strides[1] = wide.strides[ndim];
        out->strides[2] = wide.strides[ndim + 1];
        out->strides[0] = merged[0] > 0 ? flat.strides[0] : 0;
        return 0;
    }
    int result = nd_copy(state, &wide, wide.dtype, out);
    nd_array_clear(&wide);
    if (result == 0) {
        out->ndim = 3;
        memcpy(out->shape, merged, sizeof merged);
        nd_contiguous_strides(3, out->shape, out->strides);
    }
    return result;
}

static int matmul(nd_state *state, const nd_array *a, const nd_array *b, nd_array *out) {
    if (a->ndim < 2 || b->ndim < 2) {
        PyErr_Format(PyExc_ValueError,
                     "matmul: %s: has %d axes, must have 2 or more; reshape a "
                     "vector to (1, n) or (n, 1)",
                     a->ndim < 2 ? "a" : "b", a->ndim < 2 ? a->ndim : b->ndim);
        return -1;
    }
    int64_t m = a->shape[a->ndim - 2], n = b->shape[b->ndim - 1];
    int64_t batch[ND_MAX_DIMS];
    int ndim;
    nd_array left = *a, right = *b, x, y;
    left.ndim -= 2;
    right.ndim -= 2;
    if (nd_broadcast_shape(&left, &right, &ndim, batch) != ND_OK) {
        nd_error(ND_EVALUE, "batch axes: %s", nd_last_error());
        nd_raise(state, "matmul", NULL, ND_EVALUE);
        return -1;
    }
    /* One matrix on the right of many rows is one large product. */
    nd_array rows = *a;
    rows.ndim = 3;
    rows.shape[0] = 1;
    rows.shape[1] = nd_size(a) > 0 ? nd_size(a) / a->shape[a->ndim - 1] : -1;
    rows.shape[2] = a->shape[a->ndim - 1];
    if (b->ndim == 2 && a->ndim > 2 && rows.shape[1] >= 0 && nd_reshape_strides(a, &rows)) {
        nd_array_view(&rows, &x);
        right = *b;
        int64_t one = 1;
        if (merge_batch(state, b, 1, &one, &y) < 0) {
            nd_array_clear(&x);
            return -1;
        }
    } else {
        if (merge_batch(state, a, ndim, batch, &x) < 0) {
            return -1;
        }
        if (merge_batch(state, b, ndim, batch, &y) < 0) {
            nd_array_clear(&x);
            return -1;
        }
    }
    int result = nd_matmul(state, &x, &y, out);
    nd_array_clear(&x);
    nd_array_clear(&y);
    if (result == 0) {
        batch[ndim] = m;
        batch[ndim + 1] = n;
        out->ndim = ndim + 2;
        memcpy(out->shape, batch, (size_t)out->ndim * sizeof *batch);
        nd_contiguous_strides(out->ndim, out->shape, out->strides);
    }
    return result;
}

PyObject *nd_ndarray_matmul(PyObject *px, PyObject *py) {
    nd_state *state = nd_state_of(px);
    if (state == NULL) {
        state = nd_state_of(py);
    }
    PyObject *objects[2] = {px, py};
    nd_array operands[2] = {{.storage = NULL}, {.storage = NULL}}, out;
    nd_device *device = nd_array_of(nd_is_ndarray(state, px) ? px : py)->storage->device;
    PyObject *result = NULL;
    for (int i = 0; i < 2; i++) {
        if (nd_is_ndarray(state, objects[i])) {
            nd_array_view(nd_array_of(objects[i]), &operands[i]);
        } else if (!nd_is_numpy_array(objects[i])) {
            result = Py_NewRef(Py_NotImplemented);
            goto done;
        } else if (nd_from_object(state, objects[i], true, ND_F32, device, &operands[i]) < 0) {
            goto done;
        }
    }
    if (matmul(state, &operands[0], &operands[1], &out) == 0) {
        result = nd_wrap(state, &out);
    }
done:
    nd_array_clear(&operands[0]);
    nd_array_clear(&operands[1]);
    return result;
}

/* ---- reductions -------------------------------------------------------------------------------- */
/* axis=None|int|tuple, keepdims -> a fresh array; *reduced counts the elements behind each result. */
static int reduce(nd_state *state, nd_row row, const char *name, const nd_array *a,
                  PyObject *arguments, PyObject *keywords, nd_array *out, int64_t *reduced) {
    static char *names[] = {"axis", "keepdims", NULL};
    PyObject *axis = Py_None;
    int keepdims = 0, count = a->ndim;
    int64_t axes[ND_MAX_DIMS];
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|Op", names, &axis, &keepdims)) {
        return -1;
    }
    bool gone[ND_MAX_DIMS];
    for (int i = 0; i < a->ndim; i++) {
        gone[i] = axis == Py_None;
    }
    if (axis != Py_None) {
        if (nd_shape_from(axis, name, &count, axes) < 0 ||
            nd_normalise_axes(name, a->ndim, count, axes) < 0) {
            return -1;
        }
        for (int i = 0; i < count; i++) {
            gone[axes[i]] = true;
        }
    }
    nd_array view = *a;
    int at = 0;
    *reduced = 1;
    for (int pass = 0; pass < 2; pass++) { /* axes that stay, then those that go */
        for (int i = 0; i < a->ndim; i++) {
            if (gone[i] == (pass == 1)) {
                view.shape[at] = a->shape[i];
                view.strides[at++] = a->strides[i];
                *reduced *= gone[i] ? a->shape[i] : 1;
            }
        }
    }
    if (nd_reduce(state, row, &view, count, out) < 0) {
        return -1;
    }
    if (keepdims) {
        out->ndim = a->ndim;
        for (int i = 0; i < a->ndim; i++) {
            out->shape[i] = gone[i] ? 1 : a->shape[i];
        }
        nd_contiguous_strides(out->ndim, out->shape, out->strides);
    }
    return 0;
}

#define REDUCTION(name)                                                                        \
    static PyObject *ndarray_##name(PyObject *self, PyObject *arguments, PyObject *keywords) { \
        nd_state *state = nd_state_of(self);                                                   \
        nd_array out;                                                                          \
        int64_t reduced;                                                                       \
        return reduce(state, ROW_##name, #name, nd_array_of(self), arguments, keywords, &out,  \
                      &reduced) < 0                                                            \
                   ? NULL                                                                      \
                   : nd_wrap(state, &out);                                                     \
    }
REDUCTION(sum)
REDUCTION(max)
REDUCTION(min)
REDUCTION(argmax)
REDUCTION(argmin)

static PyObject *ndarray_mean(PyObject *self, PyObject *arguments, PyObject *keywords) {
    nd_state *state = nd_state_of(self);
    nd_array wide, out;
    int64_t reduced;
    if (nd_array_of(self)->dtype == ND_F32) {
        nd_array_view(nd_array_of(self), &wide);
    } else if (nd_copy(state, nd_array_of(self), ND_F32, &wide) < 0) {
        return NULL;
    }
    int result = reduce(state, ROW_sum, "mean", &wide, arguments, keywords, &out, &reduced);
    nd_array_clear(&wide);
    PyObject *sum = result < 0 ? NULL : nd_wrap(state, &out);
    PyObject *count = sum != NULL ? PyFloat_FromDouble((double)reduced) : NULL;
    PyObject *mean = count != NULL ? nd_ndarray_inplace_divide(sum, count) : NULL;
    Py_XDECREF(sum);
    Py_XDECREF(count);
    return mean;
}

/* ---- tables ---------------------------------------------------------------------------------- */
#define AXIS_TEXT "($self, axis=None, keepdims=False)\n--\n\n"

PyMethodDef nd_math_methods[] = {
    {"exp", ndarray_exp, METH_NOARGS, "exp($self)\n--\n\n"},
    {"log", ndarray_log, METH_NOARGS, "log($self)\n--\n\nNatural logarithm."},
    {"tanh", ndarray_tanh, METH_NOARGS, "tanh($self)\n--\n\n"},
    {"sqrt", ndarray_sqrt, METH_NOARGS, "sqrt($self)\n--\n\n"},
    {"maximum", ndarray_maximum, METH_O, "maximum($self, other, /)\n--\n\nElementwise; NaN wins."},
    {"minimum", ndarray_minimum, METH_O, "minimum($self, other, /)\n--\n\nElementwise; NaN wins."},
    {"sum", KEYWORD_METHOD(ndarray_sum),
     "sum" AXIS_TEXT "Sum over axis: None, int or tuple. "
     "Integers sum in int64."},
    {"mean", KEYWORD_METHOD(ndarray_mean), "mean" AXIS_TEXT "Mean, in float32."},
    {"max", KEYWORD_METHOD(ndarray_max), "max" AXIS_TEXT "Largest; ValueError of no elements."},
    {"min", KEYWORD_METHOD(ndarray_min), "min" AXIS_TEXT "Smallest; ValueError of no elements."},
    {"argmax", KEYWORD_METHOD(ndarray_argmax),
     "argmax" AXIS_TEXT "Index (int64) of the first largest, counted row by row within the axes."},
    {"argmin", KEYWORD_METHOD(ndarray_argmin),
     "argmin" AXIS_TEXT "Index (int64) of the first smallest, counted row by row within the axes."},
    {NULL, NULL, 0, NULL},
};
