/* math.c - NDArray's operators, matrix product and reductions, in terms of ops.
 *
 * The matrix product broadcasts leading axes; one matrix on the right makes all rows on the left
 * one product, here and nowhere else.
 */
#include <string.h>

#include "arguments.h"
#include "errors.h"
#include "methods.h"
#include "ops.h"

/* ---- operators ------------------------------------------------------------------------------- */
static PyObject *binary(PyObject *x, PyObject *y, nd_op id, NDArrayObject *into) {
    bool unsupported;
    PyObject *result = nd_binary(id, x, y, into, &unsupported);
    if (unsupported) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return result;
}

#define OPERATOR(name)                                              \
    PyObject *nd_ndarray_##name(PyObject *x, PyObject *y) {         \
        return binary(x, y, OP_##name, NULL);                       \
    }                                                               \
    PyObject *nd_ndarray_inplace_##name(PyObject *x, PyObject *y) { \
        return binary(x, y, OP_##name, (NDArrayObject *)x);         \
    }
OPERATOR(add)
OPERATOR(subtract)
OPERATOR(multiply)
OPERATOR(divide)
OPERATOR(floor_divide)
OPERATOR(remainder)
OPERATOR(bitwise_and)
OPERATOR(bitwise_or)
OPERATOR(bitwise_xor)

PyObject *nd_ndarray_power(PyObject *x, PyObject *y, PyObject *modulus) {
    if (modulus != Py_None) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return binary(x, y, OP_power, NULL);
}

PyObject *nd_ndarray_inplace_power(PyObject *x, PyObject *y, PyObject *modulus) {
    if (modulus != Py_None) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return binary(x, y, OP_power, (NDArrayObject *)x);
}

PyObject *nd_ndarray_negate(PyObject *x) { return nd_unary(OP_negate, x); }
PyObject *nd_ndarray_absolute(PyObject *x) { return nd_unary(OP_absolute, x); }
PyObject *nd_ndarray_positive(PyObject *x) { return Py_NewRef(x); }
PyObject *nd_ndarray_invert(PyObject *x) {
    static const long ones[ND_NUM_DTYPES] = {
        [ND_I32] = -1, [ND_I64] = -1, [ND_U8] = UINT8_MAX, [ND_U16] = UINT16_MAX};
    nd_dtype dtype = nd_array_of(x)->dtype;
    PyObject *mask = dtype == ND_BOOL ? Py_NewRef(Py_True) : PyLong_FromLong(ones[dtype]);
    PyObject *result = mask != NULL ? binary(x, mask, OP_bitwise_xor, NULL) : NULL;
    Py_XDECREF(mask);
    return result;
}

PyObject *nd_ndarray_compare(PyObject *x, PyObject *y, int op) {
    static const nd_op comparisons[] = {
        [Py_LT] = OP_less,      [Py_LE] = OP_less_equal, [Py_EQ] = OP_equal,
        [Py_NE] = OP_not_equal, [Py_GT] = OP_greater,    [Py_GE] = OP_greater_equal};
    return binary(x, y, comparisons[op], NULL);
}

#define UNARY_METHOD(name)                                       \
    PyObject *nd_ndarray_##name(PyObject *x, PyObject *unused) { \
        (void)unused;                                            \
        return nd_unary(OP_##name, x);                           \
    }
UNARY_METHOD(exp)
UNARY_METHOD(log)
UNARY_METHOD(tanh)
UNARY_METHOD(sqrt)

#define EXTREMUM(name)                                                                            \
    PyObject *nd_ndarray_##name(PyObject *x, PyObject *y) {                                       \
        PyObject *result = binary(x, y, OP_##name, NULL);                                         \
        if (result == Py_NotImplemented) {                                                        \
            Py_DECREF(result);                                                                    \
            return PyErr_Format(PyExc_TypeError, #name ": takes an array or a number, not %.80s", \
                                Py_TYPE(y)->tp_name);                                             \
        }                                                                                         \
        return result;                                                                            \
    }
EXTREMUM(maximum)
EXTREMUM(minimum)

/* ---- matrix product -------------------------------------------------------------------------- */
/* `a`, whose reference is consumed, with the three axes of `view`: the view if it `fits`, else a
 * copy. */
static int three_axes(nd_array *a, nd_array *view, bool fits, nd_array *out) {
    view->ndim = 3;
    if (fits) {
        *out = *view;
        return 0;
    }
    int result = nd_copy(a, a->dtype, out);
    nd_array_clear(a);
    if (result == 0) {
        out->ndim = 3;
        memcpy(out->shape, view->shape, sizeof out->shape);
        nd_contiguous_strides(3, out->shape, out->strides);
    }
    return result;
}

/* An operand with all its batch axes merged into one. */
static int merge_batch(const nd_array *a, int ndim, const int64_t *batch, nd_array *out) {
    int64_t shape[ND_MAX_DIMS], size = 1;
    for (int i = 0; i < ndim; i++) {
        shape[i] = batch[i];
        size *= batch[i];
    }
    shape[ndim] = a->shape[a->ndim - 2];
    shape[ndim + 1] = a->shape[a->ndim - 1];
    nd_array wide;
    if (nd_check("matmul", NULL, nd_broadcast_to(a, ndim + 2, shape, &wide)) < 0) {
        return -1;
    }
    /* Only the batch axes may merge, whatever the matrix axes look like: reshape them alone. */
    nd_array batches = wide, flat = wide;
    batches.ndim = ndim;
    flat.ndim = 1;
    flat.shape[0] = size;
    bool fits = nd_reshape_strides(&batches, &flat);
    for (int i = 0; i < 2; i++) {
        flat.shape[i + 1] = shape[ndim + i];
        flat.strides[i + 1] = wide.strides[ndim + i];
    }
    return three_axes(&wide, &flat, fits, out);
}

/* x of (B, M, K) and y of (B, K, N), as the op takes them. */
static int batches(const nd_array *a, const nd_array *b, int ndim, const int64_t *batch,
                   nd_array *x, nd_array *y) {
    static const int64_t ones[ND_MAX_DIMS] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t rows = a->shape[a->ndim - 2];
    bool one = a->ndim > 2 && a->ndim >= b->ndim;
    for (int i = 0; i < b->ndim - 2; i++) {
        one = one && b->shape[i] == 1;
    }
    int result;
    if (one) {
        /* One matrix on the right: all rows on the left are one large product. */
        nd_array own, flat = *a;
        for (int i = 0; i < ndim; i++) {
            rows *= batch[i];
        }
        flat.ndim = 3;
        flat.shape[0] = 1;
        flat.shape[1] = rows;
        flat.shape[2] = a->shape[a->ndim - 1];
        nd_array_view(a, &own);
        result = three_axes(&own, &flat, nd_reshape_strides(a, &flat), x);
        ndim = b->ndim > 3 ? b->ndim - 2 : 1;
        batch = ones;
    } else {
        result = merge_batch(a, ndim, batch, x);
    }
    if (result == 0 && (result = merge_batch(b, ndim, batch, y)) < 0) {
        nd_array_clear(x);
    }
    return result;
}

static PyObject *matmul(const nd_array *a, const nd_array *b) {
    if (a->ndim < 1 || b->ndim < 1) {
        return PyErr_Format(PyExc_ValueError, "matmul: %s: has no axes; * multiplies by a number",
                            a->ndim < 1 ? "a" : "b");
    }
    /* A vector is a matrix of one row or one column, whose axis of size 1 the result lacks. */
    const bool is_row = a->ndim == 1, is_column = b->ndim == 1;
    nd_array row = *a, column = *b;
    if (is_row) {
        row.ndim = 2;
        row.shape[1] = a->shape[0];
        row.strides[1] = a->strides[0];
        row.shape[0] = 1;
        row.strides[0] = a->shape[0] * a->strides[0];
        a = &row;
    }
    if (is_column) {
        column.ndim = 2;
        column.shape[1] = 1;
        column.strides[1] = 1;
        b = &column;
    }
    int64_t shape[ND_MAX_DIMS];
    int ndim;
    nd_array left = *a, right = *b, x, y;
    left.ndim -= 2;
    right.ndim -= 2;
    if (nd_broadcast_shape(&left, &right, &ndim, shape) != ND_OK) {
        nd_error(ND_EVALUE, "batch axes: %s", nd_last_error());
        return nd_raise("matmul", NULL, ND_EVALUE);
    }
    if (batches(a, b, ndim, shape, &x, &y) < 0) {
        return NULL;
    }
    PyObject *operands[3] = {nd_wrap(&x), nd_wrap(&y), Py_None};
    PyObject *result = operands[0] && operands[1] ? nd_structured(OP_matmul, operands) : NULL;
    Py_XDECREF(operands[0]);
    Py_XDECREF(operands[1]);
    if (result != NULL) { /* (B, M, N), contiguous and not shared: its batch axes come back */
        if (!is_row) {
            shape[ndim++] = a->shape[a->ndim - 2];
        }
        if (!is_column) {
            shape[ndim++] = b->shape[b->ndim - 1];
        }
        nd_array *out = nd_array_of(result);
        out->ndim = ndim;
        memcpy(out->shape, shape, (size_t)out->ndim * sizeof *shape);
        nd_contiguous_strides(out->ndim, out->shape, out->strides);
    }
    return result;
}

PyObject *nd_ndarray_matmul(PyObject *px, PyObject *py) {
    PyObject *objects[2] = {px, py};
    nd_array operands[2] = {{.storage = NULL}, {.storage = NULL}};
    nd_device *device = nd_array_of(nd_is_ndarray(px) ? px : py)->storage->device;
    PyObject *result = NULL;
    for (int i = 0; i < 2; i++) {
        if (nd_is_ndarray(objects[i])) {
            nd_array_view(nd_array_of(objects[i]), &operands[i]);
        } else if (!nd_is_array_like(objects[i])) {
            result = Py_NewRef(Py_NotImplemented);
            goto done;
        } else if (nd_from_object(objects[i], true, ND_F32, device, &operands[i]) < 0) {
            goto done;
        }
    }
    for (int i = 0; i < 2; i++) { /* whole numbers of an array-like become the other's floats */
        nd_dtype own = operands[i].dtype, other = operands[1 - i].dtype;
        nd_array floats;
        if (!nd_is_ndarray(objects[i]) && !nd_dtype_is_float(own) && nd_dtype_is_float(other)) {
            if (nd_copy(&operands[i], other, &floats) < 0) {
                goto done;
            }
            nd_array_clear(&operands[i]);
            operands[i] = floats;
        }
    }
    result = matmul(&operands[0], &operands[1]);
done:
    nd_array_clear(&operands[0]);
    nd_array_clear(&operands[1]);
    return result;
}

PyObject *nd_ndarray_inplace_matmul(PyObject *x, PyObject *y) {
    PyObject *product = nd_ndarray_matmul(x, y);
    if (product == NULL || product == Py_NotImplemented) {
        return product;
    }
    const nd_array *to = nd_array_of(x), *from = nd_array_of(product);
    bool fits = to->ndim == from->ndim;
    for (int i = 0; fits && i < to->ndim; i++) {
        fits = to->shape[i] == from->shape[i];
    }
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "matmul in place: y: would change the shape of x");
    }
    bool written = fits && nd_assign("matmul", to, from) == 0;
    Py_DECREF(product);
    return written ? Py_NewRef(x) : NULL;
}

/* ---- reductions ------------------------------------------------------------------------------ */
/* axis=None|int|tuple, keepdims. */
static PyObject *reduce(PyObject *self, nd_op id, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"axis", "keepdims", NULL};
    const char *name = nd_ops[id].name;
    const nd_array own = *nd_array_of(self), *a = &own; /* the arguments may call its __init__ */
    PyObject *axis = Py_None;
    int keepdims = 0, count = a->ndim;
    int64_t axes[ND_MAX_DIMS];
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|Op", names, &axis, &keepdims)) {
        return NULL;
    }
    bool gone[ND_MAX_DIMS];
    for (int i = 0; i < a->ndim; i++) {
        gone[i] = axis == Py_None;
    }
    if (axis != Py_None) {
        if (nd_shape_from(axis, name, &count, axes) < 0 ||
            nd_normalise_axes(name, a->ndim, count, axes) < 0) {
            return NULL;
        }
        for (int i = 0; i < count; i++) {
            gone[axes[i]] = true;
        }
    }
    nd_array view = *a, out;
    int at = 0;
    for (int pass = 0; pass < 2; pass++) { /* axes that stay, then those that go */
        for (int i = 0; i < a->ndim; i++) {
            if (gone[i] == (pass == 1)) {
                view.shape[at] = a->shape[i];
                view.strides[at++] = a->strides[i];
            }
        }
    }
    if (nd_reduce(id, &view, count, &out) < 0) {
        return NULL;
    }
    if (keepdims) {
        out.ndim = a->ndim;
        for (int i = 0; i < a->ndim; i++) {
            out.shape[i] = gone[i] ? 1 : a->shape[i];
        }
        nd_contiguous_strides(out.ndim, out.shape, out.strides);
    }
    return nd_wrap(&out);
}

#define REDUCTION(name)                                                                    \
    PyObject *nd_ndarray_##name(PyObject *self, PyObject *arguments, PyObject *keywords) { \
        return reduce(self, OP_##name, arguments, keywords);                               \
    }
REDUCTION(sum)
REDUCTION(max)
REDUCTION(min)
REDUCTION(argmax)
REDUCTION(argmin)
