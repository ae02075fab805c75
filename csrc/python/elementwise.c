/* elementwise.c - the EW1, EW2, CMP, RED and ARG ops: promotion, broadcasting, in place.
 *
 * Dtypes are promoted here and nowhere else (docs/design.md says how). Operands reach a kernel
 * broadcast to the shape of the result; kernels write contiguous memory, so a result in place is
 * written directly into a contiguous array that overlaps nothing still to be read, else through a
 * temporary.
 */
#include <math.h>
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "errors.h"
#include "ops.h"

/* ---- elementwise ----------------------------------------------------------------------------- */
/* A view of x in `dtype`: x itself, or converted. Gives a new reference. */
static int converted(const nd_array *x, nd_dtype dtype, nd_array *out) {
    if (x->dtype == dtype) {
        nd_array_view(x, out);
        return 0;
    }
    return nd_copy(x, dtype, out);
}

PyObject *nd_unary(nd_op id, PyObject *object) {
    const nd_op_info *info = &nd_ops[id];
    if (nd_check_operand(info->name, "x", object) < 0) {
        return NULL;
    }
    const nd_array *x = nd_array_of(object);
    nd_array temporary = {.storage = NULL}, out;
    nd_dtype dtype = id == OP_negate && x->dtype == ND_BOOL ? ND_I32 : x->dtype;
    if (info->types == TYPES_FLOAT && !nd_dtype_is_float(dtype)) {
        dtype = ND_F32;
    }
    if (dtype != x->dtype) {
        if (nd_copy(x, dtype, &temporary) < 0) {
            return NULL;
        }
        x = &temporary;
    }
    int result = nd_new_array(info->name, x->storage->device, x->dtype, x->ndim, x->shape, &out);
    if (result == 0) {
        int64_t size = nd_size(&out);
        if (size > 0) {
            nd_slot slots[2] = {{.array = (nd_array *)x}, {.array = &out}};
            result = nd_run_op(id, x->storage->device, slots, size);
        }
        if (result < 0) {
            nd_array_clear(&out);
        }
    }
    nd_array_clear(&temporary);
    return result < 0 ? NULL : nd_wrap(&out);
}

static nd_dtype promoted(nd_dtype a, nd_dtype b) {
    if (a == b) {
        return a;
    }
    bool a_float = nd_dtype_is_float(a), b_float = nd_dtype_is_float(b);
    if (a_float && b_float) {
        return ND_F32;
    }
    if (a_float || b_float) {
        return a_float ? a : b;
    }
    if (a == ND_BOOL || b == ND_BOOL) {
        return a == ND_BOOL ? b : a;
    }
    static const int width[ND_NUM_DTYPES] = {[ND_U8] = 1, [ND_U16] = 2, [ND_I32] = 3, [ND_I64] = 4};
    return width[a] > width[b] ? a : b;
}

typedef struct {
    bool is_array;
    const nd_array *array;
    nd_number number;
    nd_array owned; /* storage NULL unless made here */
} operand;

/* bool, integers, floats: what is written in place has the rank of the result, or a higher one. */
static int rank_of(const nd_array *array, const nd_number *number) {
    if (array == NULL) {
        return number->is_float ? 2 : !number->is_bool;
    }
    return nd_dtype_is_float(array->dtype) ? 2 : array->dtype != ND_BOOL;
}

/* 1: taken; 0: nothing to compute with; -1: exception. Array-likes are taken in a second pass, when
 * the device is known. */
static int take_operand(const char *op, const char *name, PyObject *object, operand *out) {
    out->owned.storage = NULL;
    out->array = NULL;
    out->is_array = true;
    out->number = (nd_number){.is_float = false};
    if (nd_is_ndarray(object)) {
        out->array = nd_array_of(object);
        return nd_check_live(op, name, out->array) < 0 ? -1 : 1;
    }
    int number = nd_number_from(object, &out->number);
    if (number != 0) {
        out->is_array = false;
        return number;
    }
    return nd_is_array_like(object);
}

/* The second pass: array-likes, and numbers that must be arrays, on the device of `anchor`. */
static int take_likes(const nd_op_info *info, const nd_array *anchor, PyObject *const objects[2],
                      operand operands[2]) {
    for (int i = 0; i < 2; i++) {
        operand *o = &operands[i];
        nd_number *number = &o->number;
        bool whole = !nd_dtype_is_float(anchor->dtype), exact = o->is_array || nd_is_exact(number);
        if (!exact && whole && info->kind == OP_KIND_CMP &&
            (number->beyond || anchor->dtype != ND_I64)) {
            /* No element is as large: it compares as an infinity does. */
            *number = (nd_number){.is_float = true, .value = copysign(INFINITY, number->value)};
        }
        /* An int64 may be too long for the double that a scalar is: it goes as an array. */
        exact = exact || anchor->dtype != ND_I64 || number->is_float || number->beyond;
        if (o->is_array ? o->array == NULL : !exact) {
            if (nd_from_object(objects[i], exact, ND_I64, anchor->storage->device, &o->owned) < 0) {
                return -1;
            }
            o->array = &o->owned;
        }
    }
    const nd_array *x = operands[0].array, *y = operands[1].array;
    if (x != NULL && y != NULL && x->storage->device != y->storage->device) {
        char left[24], right[24];
        FAIL(PyExc_TypeError, "%s: y: is on %s, but x is on %s; move one with .to(device)",
             info->name, nd_device_text(y->storage->device, right),
             nd_device_text(x->storage->device, left));
    }
    return 0;
}

/* The dtype that is computed in. rank: the highest of the operands. */
static int computed_dtype(nd_op id, const nd_array *anchor, const operand operands[2], int rank,
                          nd_dtype *dtype) {
    const nd_op_info *info = &nd_ops[id];
    const nd_array *x = operands[0].array, *y = operands[1].array;
    const nd_number *number = x != NULL && y != NULL ? NULL : &operands[x != NULL].number;
    if (info->types == TYPES_WHOLE && rank == 2) {
        FAIL(PyExc_TypeError, "%s: needs integers or bool, not floats", info->name);
    }
    *dtype = number == NULL ? promoted(x->dtype, y->dtype) : anchor->dtype;
    bool chooses = info->types == TYPES_WHOLE || id == OP_maximum || id == OP_minimum;
    bool inverts = id == OP_power && y == NULL && number->value < 0; /* x ** -1 */
    bool is_float = info->types == TYPES_FLOAT || inverts || (number != NULL && number->is_float);
    if (is_float && !nd_dtype_is_float(*dtype)) {
        *dtype = ND_F32;
    } else if (info->kind == OP_KIND_EW2 && *dtype == ND_BOOL && (!chooses || rank > 0)) {
        *dtype = ND_I32;
    }
    bool compares = info->kind == OP_KIND_CMP && !nd_dtype_is_float(*dtype);
    return number != NULL && !number->is_float && !compares
               ? nd_check_number(info->name, number, *dtype)
               : 0;
}

/* Can a result be written into `own`? */
static int check_in_place(const char *op, const nd_array *own, nd_dtype dtype, int rank, int ndim,
                          const int64_t *shape) {
    if ((nd_dtype_is_float(dtype) ? 2 : rank) > rank_of(own, NULL)) {
        FAIL(PyExc_TypeError,
             "%s in place: the result is %s, which an array of %s cannot hold; write x = x ... or "
             "astype() first",
             op, nd_dtype_name(dtype), nd_dtype_name(own->dtype));
    }
    bool fits = ndim == own->ndim;
    for (int i = 0; fits && i < ndim; i++) {
        fits = shape[i] == own->shape[i];
    }
    if (!fits) {
        FAIL(PyExc_ValueError, "%s in place: y: broadcasting would change the shape of x", op);
    }
    return nd_check_writable(op, "x", own);
}

PyObject *nd_binary(nd_op id, PyObject *px, PyObject *py, NDArrayObject *into, bool *unsupported) {
    const nd_op_info *info = &nd_ops[id];
    const char *op = info->name;
    operand operands[2];
    PyObject *objects[2] = {px, py};
    *unsupported = false;
    for (int i = 0; i < 2; i++) {
        int taken = take_operand(op, i ? "y" : "x", objects[i], &operands[i]);
        if (taken <= 0) {
            *unsupported = taken == 0;
            return NULL;
        }
    }
    const nd_array *anchor = operands[0].array != NULL ? operands[0].array : operands[1].array;
    if (anchor == NULL) {
        *unsupported = true;
        return NULL;
    }
    nd_device *device = anchor->storage->device;
    PyObject *result = NULL;
    nd_array temporaries[2] = {{.storage = NULL}, {.storage = NULL}};
    nd_array wide[2] = {{.storage = NULL}, {.storage = NULL}};
    nd_array out = {.storage = NULL};

    if (take_likes(info, anchor, objects, operands) < 0) {
        goto done;
    }
    const nd_array *arrays[2] = {operands[0].array, operands[1].array};
    int rank = rank_of(arrays[0], &operands[0].number);
    int other = rank_of(arrays[1], &operands[1].number);
    rank = other > rank ? other : rank;
    nd_dtype dtype;
    if (computed_dtype(id, anchor, operands, rank, &dtype) < 0) {
        goto done;
    }
    int ndim = anchor->ndim;
    int64_t shape[ND_MAX_DIMS];
    memcpy(shape, anchor->shape, sizeof shape);
    if (arrays[0] && arrays[1] && nd_broadcast_shape(arrays[0], arrays[1], &ndim, shape) != ND_OK) {
        nd_raise(op, NULL, ND_EVALUE);
        goto done;
    }

    nd_array *target = &out;
    nd_dtype out_dtype = info->kind == OP_KIND_CMP ? ND_BOOL : dtype;
    bool direct = false;
    if (into != NULL) {
        nd_array *own = &into->a;
        if (check_in_place(op, own, out_dtype, rank, ndim, shape) < 0) {
            goto done;
        }
        direct = out_dtype == own->dtype && nd_is_contiguous(own) &&
                 (arrays[1] == NULL || nd_same_geometry(arrays[1], own) ||
                  !nd_may_overlap(arrays[1], own));
        if (direct) {
            nd_count_write(own);
            target = own;
        }
    }
    for (int i = 0; i < 2; i++) {
        if (arrays[i] == NULL) {
            continue;
        }
        if (converted(arrays[i], dtype, &temporaries[i]) < 0) {
            goto done;
        }
        if (nd_broadcast_to(&temporaries[i], ndim, shape, &wide[i]) != ND_OK) {
            nd_raise(op, NULL, ND_EVALUE);
            goto done;
        }
    }
    if (!direct && nd_new_array(op, device, out_dtype, ndim, shape, &out) < 0) {
        goto done;
    }
    int64_t size = nd_size(target);
    if (size > 0) {
        nd_slot slots[5] = {{.array = arrays[0] ? &wide[0] : NULL},
                            {.array = arrays[1] ? &wide[1] : NULL},
                            {.real = operands[0].number.value},
                            {.real = operands[1].number.value},
                            {.array = target}};
        if (nd_run_op(id, device, slots, size) < 0) {
            goto done;
        }
    }
    if (into == NULL) {
        result = nd_wrap(&out);
        out.storage = NULL;
    } else if (direct || nd_assign(op, &into->a, &out) == 0) {
        result = Py_NewRef((PyObject *)into);
    }
done:
    for (int i = 0; i < 2; i++) {
        nd_array_clear(&temporaries[i]);
        nd_array_clear(&wide[i]);
        nd_array_clear(&operands[i].owned);
    }
    nd_array_clear(&out);
    return result;
}

/* ---- reductions ------------------------------------------------------------------------------ */
int nd_reduce(nd_op id, const nd_array *x, int axes, nd_array *out) {
    const nd_op_info *info = &nd_ops[id];
    const char *op = info->name;
    if (nd_check_live(op, "x", x) < 0) {
        return -1;
    }
    if (axes < 0 || axes > x->ndim) {
        FAIL(PyExc_ValueError, "%s: axes: cannot reduce the last %d of %d axes", op, axes, x->ndim);
    }
    nd_dtype dtype = x->dtype;
    if (info->types == TYPES_FLOAT && !nd_dtype_is_float(dtype)) {
        dtype = ND_F32;
    }
    nd_array view;
    if (converted(x, dtype, &view) < 0) {
        return -1;
    }
    int kept = view.ndim - axes;
    int result = -1;
    int64_t size = nd_size(&view);
    /* Sums of narrow integers are int64, as NumPy's are. */
    bool wide = info->kind == OP_KIND_ARG || (id == OP_sum && !nd_dtype_is_float(dtype));
    nd_dtype out_dtype = wide ? ND_I64 : dtype;
    if (nd_new_array(op, view.storage->device, out_dtype, kept, view.shape, out) < 0) {
        goto done;
    }
    if (nd_size(out) == 0) {
        result = 0;
    } else if (size == 0) {
        if (id == OP_sum || id == OP_sumsq) {
            result = nd_fill(out, 0.0);
        } else {
            PyErr_Format(PyExc_ValueError,
                         "%s: x: has no elements along the axes to reduce: there "
                         "is no %s of nothing",
                         op, op);
        }
    } else {
        if (axes == 0 && view.ndim < ND_MAX_DIMS) { /* over no axis: over one of a single element */
            view.shape[view.ndim] = 1;
            view.strides[view.ndim++] = 1;
            axes = 1;
        }
        nd_slot slots[3] = {{.array = &view}, {.integer = axes}, {.array = out}};
        result = nd_run_op(id, view.storage->device, slots, size);
    }
    if (result < 0) {
        nd_array_clear(out);
    }
done:
    nd_array_clear(&view);
    return result;
}
