/* structured.c - the OP ops: check operands against their entry, give them its layout, run.
 *
 * The order of an error is that of the operands: type, device, dtype, axes. An operand without the
 * layout its kernel needs is copied (NEEDLE_TRACE=1 shows it), and copied back when it is changed
 * in place. An operand that is read is also copied when it overlaps one that is written.
 */
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "errors.h"
#include "ops.h"

/* ---- operands -------------------------------------------------------------------------------- */
static const char *const class_texts[] = {[CLASS_F] = "float32, bfloat16, float16",
                                          [CLASS_f4] = "float32",
                                          [CLASS_i4] = "int32",
                                          [CLASS_i8] = "int64",
                                          [CLASS_b1] = "bool"};
static const nd_dtype class_dtypes[] = {
    [CLASS_f4] = ND_F32, [CLASS_i4] = ND_I32, [CLASS_i8] = ND_I64, [CLASS_b1] = ND_BOOL};

static bool class_allows(dtype_class class, nd_dtype dtype) {
    return class == CLASS_ANY ||
           (class == CLASS_F ? nd_dtype_is_float(dtype) : dtype == class_dtypes[class]);
}

typedef struct {
    nd_array array;    /* what the kernel gets */
    nd_array original; /* of an IO operand that works on a copy */
    bool owned;        /* array holds a reference made here */
    bool copy_back;
} structured;

typedef struct {
    nd_state *state;
    const nd_op_info *info;
    int64_t sizes[128]; /* by axis letter; -1: not seen yet */
    nd_device *device;
    const char *device_from; /* operand that decided it */
    nd_dtype float_dtype;
    const char *float_from; /* operand that decided F; NULL: none yet */
    int star_ndim;          /* the shape behind "*"; -1: not seen yet */
    int64_t star[ND_MAX_DIMS];
    bool no_batch; /* the operands were given without their leading B */
    bool batch_known;
} call;

static bool is_output_kind(field_kind kind) {
    return kind == KIND_IO || kind == KIND_IO_ANY || kind == KIND_IO_ROWS || kind == KIND_IO_OPT;
}

/* "(B, T, H, D)" */
static const char *axes_text(const char *axes, char *text) {
    char *to = text;
    *to++ = '(';
    for (const char *axis = axes; *axis; axis++) {
        if (axis != axes) {
            *to++ = ',';
            *to++ = ' ';
        }
        *to++ = *axis;
    }
    *to++ = ')';
    *to = 0;
    return text;
}

static int check_dtype(call *c, const field *f, const nd_array *a) {
    const char *op = c->info->name;
    if (!class_allows(f->dtype, a->dtype)) {
        FAIL(PyExc_TypeError, "%s: %s: dtype is %s; allowed: %s", op, f->name,
             nd_dtype_name(a->dtype), class_texts[f->dtype]);
    }
    if (f->dtype == CLASS_F) {
        if (c->float_from == NULL) {
            c->float_from = f->name;
            c->float_dtype = a->dtype;
        } else if (a->dtype != c->float_dtype) {
            FAIL(PyExc_TypeError, "%s: %s: dtype is %s, but %s is %s; they must be equal", op,
                 f->name, nd_dtype_name(a->dtype), c->float_from, nd_dtype_name(c->float_dtype));
        }
    }
    return 0;
}

static int check_device(call *c, const field *f, const nd_array *a) {
    if (nd_check_live(c->state, c->info->name, f->name, a) < 0) {
        return -1;
    }
    if (c->device == NULL) {
        c->device = a->storage->device;
        c->device_from = f->name;
    } else if (c->device != a->storage->device) {
        char own[24], other[24];
        FAIL(PyExc_TypeError, "%s: %s: is on %s, but %s is on %s; move one with .to(device)",
             c->info->name, f->name, nd_device_text(a->storage->device, own), c->device_from,
             nd_device_text(c->device, other));
    }
    return 0;
}

/* Match the sizes of `a` to the letters. A matrix product takes its operands without B as well: then
 * all of them, and `a` gets a leading axis of 1. */
static int check_axes(call *c, const field *f, nd_array *a) {
    const char *op = c->info->name;
    if (f->axes[0] == '*') {
        if (c->star_ndim < 0) {
            c->star_ndim = a->ndim;
            memcpy(c->star, a->shape, sizeof c->star);
        }
        return 0;
    }
    int ndim = (int)strlen(f->axes);
    if (c->info->fields[0].kind == KIND_IN_MATRIX && f->axes[0] == 'B') {
        if (!c->batch_known) {
            c->batch_known = true;
            c->no_batch = a->ndim == ndim - 1;
        }
        if (c->no_batch && a->ndim == ndim - 1) {
            memmove(a->shape + 1, a->shape, (size_t)a->ndim * sizeof *a->shape);
            memmove(a->strides + 1, a->strides, (size_t)a->ndim * sizeof *a->strides);
            a->shape[0] = 1;
            a->strides[0] = 0;
            a->ndim++;
        } else if (c->no_batch) {
            ndim = -1;
        }
    }
    if (a->ndim != ndim) {
        char text[48];
        FAIL(PyExc_ValueError, "%s: %s: has %d axes, must have %d: %s", op, f->name, a->ndim,
             ndim < 0 ? 2 : ndim, axes_text(ndim < 0 ? f->axes + 1 : f->axes, text));
    }
    for (int i = 0; i < ndim; i++) {
        int64_t *size = &c->sizes[(int)f->axes[i]];
        if (*size < 0) {
            *size = a->shape[i];
        } else if (*size != a->shape[i]) {
            FAIL(PyExc_ValueError, "%s: %s: axis %c is %lld, but was %lld", op, f->name, f->axes[i],
                 (long long)a->shape[i], (long long)*size);
        }
    }
    return 0;
}

/* Does the view have the layout? Strides of axes of size 1 say nothing, so they are set to what a
 * kernel expects to see. */
static bool has_layout(field_kind kind, nd_array *a) {
    if (kind == KIND_IN_ANY || kind == KIND_IO_ANY) {
        return true;
    }
    if (nd_is_contiguous(a)) {
        nd_contiguous_strides(a->ndim, a->shape, a->strides);
        return true;
    }
    int last = a->ndim - 1;
    if (kind == KIND_IN_ROWS || kind == KIND_IO_ROWS) {
        if (a->shape[last] == 1) {
            a->strides[last] = 1;
        }
        return a->strides[last] == 1;
    }
    if (kind != KIND_IN_MATRIX) {
        return false;
    }
    int64_t *rows_stride = &a->strides[last - 1], *columns_stride = &a->strides[last];
    int64_t m = a->shape[last - 1], n = a->shape[last];
    if (n == 1) {
        *columns_stride = 1;
    }
    if (m == 1) {
        *rows_stride = *columns_stride == 1 ? n : 1;
    }
    return (*columns_stride == 1 && *rows_stride >= n) ||
           (*rows_stride == 1 && *columns_stride >= m);
}

/* Kernels of contiguous operands may read whole vectors: a view that begins between two is copied,
 * so that its results have the same bits as those of the copy. */
static bool is_aligned(const call *c, field_kind kind, const nd_array *a) {
    bool whole = kind == KIND_IN || kind == KIND_OPT || kind == KIND_IO || kind == KIND_IO_OPT;
    return !whole || (uintptr_t)a->data % c->device->backend->alignment == 0;
}

static int replace_by_copy(call *c, const field *f, structured *s) {
    nd_array copy;
    nd_trace_copy(c->state, c->info->name, f->name, &s->array);
    if (nd_copy(c->state, &s->array, s->array.dtype, &copy) < 0) {
        return -1;
    }
    s->array = copy;
    s->owned = true;
    return 0;
}

static int take_array(call *c, const field *f, PyObject *object, structured *s) {
    const char *op = c->info->name;
    if (!nd_is_ndarray(c->state, object)) {
        FAIL(PyExc_TypeError, "%s: %s: must be an NDArray%s, not %.80s", op, f->name,
             f->kind == KIND_OPT || f->kind == KIND_IO_OPT ? " or None" : "",
             Py_TYPE(object)->tp_name);
    }
    s->array = *nd_array_of(object);
    if (check_device(c, f, &s->array) < 0 || check_dtype(c, f, &s->array) < 0 ||
        check_axes(c, f, &s->array) < 0) {
        return -1;
    }
    return is_output_kind(f->kind) ? nd_check_writable(op, f->name, &s->array) : 0;
}

/* Give the operands their layouts; keep apart what a kernel could read after writing it. */
static int lay_out(call *c, const field *fields, const nd_slot *slots, structured *operands) {
    for (int i = 0; fields[i].kind != KIND_END; i++) {
        const field *f = &fields[i];
        structured *s = &operands[i];
        if (f->kind >= KIND_OUT || slots[i].array == NULL) {
            continue;
        }
        bool output = is_output_kind(f->kind);
        if (!output && f->axes[0] == '*' && f->kind == KIND_IN_ANY) {
            nd_array wide;
            if (nd_broadcast_to(&s->array, c->star_ndim, c->star, &wide) != ND_OK) {
                FAIL(PyExc_ValueError, "%s: %s: %s", c->info->name, f->name, nd_last_error());
            }
            s->array = wide;
            s->owned = true;
        }
        bool overlaps = false;
        for (int j = 0; !output && fields[j].kind != KIND_END; j++) {
            overlaps |= is_output_kind(fields[j].kind) && slots[j].array != NULL &&
                        nd_may_overlap(&s->array, &operands[j].array);
        }
        if (overlaps || !has_layout(f->kind, &s->array) || !is_aligned(c, f->kind, &s->array)) {
            nd_array before = s->array;
            bool owned = s->owned;
            s->original = before;
            if (replace_by_copy(c, f, s) < 0) {
                return -1;
            }
            s->copy_back = output;
            if (owned) {
                nd_array_clear(&before);
            }
        }
    }
    return 0;
}

static int allocate_outputs(call *c, const field *fields, nd_slot *slots, structured *operands) {
    for (int i = 0; fields[i].kind != KIND_END; i++) {
        const field *f = &fields[i];
        if (f->kind != KIND_OUT) {
            continue;
        }
        int64_t shape[ND_MAX_DIMS];
        int ndim = (int)strlen(f->axes);
        for (int k = 0; k < ndim; k++) {
            shape[k] = c->sizes[(int)f->axes[k]];
        }
        nd_dtype dtype = f->dtype == CLASS_F ? c->float_dtype : class_dtypes[f->dtype];
        if (nd_new_array(c->state, c->info->name, c->device, dtype, ndim, shape,
                         &operands[i].array) < 0) {
            return -1;
        }
        operands[i].owned = true;
        slots[i].array = &operands[i].array;
    }
    return 0;
}

static int run_structured(call *c, nd_op id, const field *fields, const nd_slot *slots,
                          structured *operands) {
    bool writes = false;
    int64_t work = 0;
    shown s = {.count = 0};
    for (int i = 0; fields[i].kind != KIND_END; i++) {
        if (fields[i].kind > KIND_OUT || slots[i].array == NULL) {
            continue;
        }
        int64_t size = nd_size(slots[i].array);
        if (is_output_kind(fields[i].kind)) {
            nd_count_write(c->state,
                           operands[i].copy_back ? &operands[i].original : &operands[i].array);
        }
        writes |= size > 0 && (fields[i].kind == KIND_OUT || is_output_kind(fields[i].kind));
        work += size;
        if (fields[i].kind != KIND_OUT) {
            nd_show(&s, fields[i].name, slots[i].array);
        }
    }
    if (!writes) {
        return 0;
    }
    if (nd_run_op(c->state, id, c->device, slots, work, &s) < 0) {
        return -1;
    }
    for (int i = 0; fields[i].kind != KIND_END; i++) {
        if (operands[i].copy_back &&
            nd_run_assign(c->state, &operands[i].original, &operands[i].array) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *wrap_outputs(call *c, const field *fields, structured *operands) {
    PyObject *list[ND_MAX_FIELDS];
    int count = 0;
    for (int i = 0; fields[i].kind != KIND_END; i++) {
        if (fields[i].kind != KIND_OUT) {
            continue;
        }
        nd_array *a = &operands[i].array;
        if (c->no_batch && fields[i].axes[0] == 'B') {
            a->ndim--;
            memmove(a->shape, a->shape + 1, (size_t)a->ndim * sizeof *a->shape);
            memmove(a->strides, a->strides + 1, (size_t)a->ndim * sizeof *a->strides);
        }
        operands[i].owned = false;
        list[count] = nd_wrap(c->state, a);
        if (list[count] == NULL) {
            while (count > 0) {
                Py_DECREF(list[--count]);
            }
            return NULL;
        }
        count++;
    }
    if (count == 0) {
        Py_RETURN_NONE;
    }
    if (count == 1) {
        return list[0];
    }
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; i < count; i++) {
        if (tuple != NULL) {
            PyTuple_SET_ITEM(tuple, i, list[i]);
        } else {
            Py_DECREF(list[i]);
        }
    }
    return tuple;
}

PyObject *nd_structured(nd_state *state, nd_op id, PyObject *const *given) {
    const nd_op_info *info = &nd_ops[id];
    const field *fields = info->fields;
    nd_slot slots[ND_MAX_FIELDS] = {0};
    structured operands[ND_MAX_FIELDS];
    call c = {.state = state, .info = info, .float_dtype = ND_F32, .star_ndim = -1};
    memset(c.sizes, -1, sizeof c.sizes);
    PyObject *result = NULL;
    int next = 0, count = 0;
    for (; fields[count].kind != KIND_END; count++) {
        operands[count].owned = operands[count].copy_back = false;
    }
    for (int i = 0; i < count; i++) {
        const field *f = &fields[i];
        if (f->kind == KIND_OUT) {
            continue;
        }
        PyObject *object = given[next++];
        if (f->kind == KIND_F64 || f->kind == KIND_I64) {
            nd_number number;
            if (nd_take_number(info->name, f, object, &slots[i]) < 0) {
                goto done;
            }
            /* One that becomes elements of an array, which fields[0] says may be of any dtype. */
            int found = fields[0].dtype == CLASS_ANY ? nd_number_from(object, &number) : 0;
            if (found < 0 ||
                (found > 0 && nd_check_number(info->name, &number, slots[0].array->dtype) < 0)) {
                goto done;
            }
        } else if (!((f->kind == KIND_OPT || f->kind == KIND_IO_OPT) && object == Py_None)) {
            if (take_array(&c, f, object, &operands[i]) < 0) {
                goto done;
            }
            slots[i].array = &operands[i].array;
        }
    }
    if (lay_out(&c, fields, slots, operands) == 0 &&
        allocate_outputs(&c, fields, slots, operands) == 0 &&
        run_structured(&c, id, fields, slots, operands) == 0) {
        result = wrap_outputs(&c, fields, operands);
    }
done:
    for (int i = 0; i < count; i++) {
        if (operands[i].owned) {
            nd_array_clear(&operands[i].array);
        }
    }
    return result;
}
