/* call.c - each op of ops.def as a function of the module: arguments by position or name, checks,
 * layout, outputs. Signature and summary come from the table, which tools get as data.
 *
 * Operands are checked in order: type, device, dtype, axes. An operand without the
 * layout its kernel needs is copied (NEEDLE_TRACE=1 shows it), and copied back when it is
 * changed in place. An operand that is read is also copied when it overlaps one that is written.
 */
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "errors.h"
#include "ops.h"

/* ---- operands of an OP ----------------------------------------------------------------------- */
static const char *const class_texts[] = {[CLASS_F] = "float32, bfloat16, float16",
                                          [CLASS_f4] = "float32",
                                          [CLASS_i4] = "int32",
                                          [CLASS_i8] = "int64",
                                          [CLASS_u1] = "uint8",
                                          [CLASS_b1] = "bool"};
static const nd_dtype class_dtypes[] = {[CLASS_f4] = ND_F32,
                                        [CLASS_i4] = ND_I32,
                                        [CLASS_i8] = ND_I64,
                                        [CLASS_u1] = ND_U8,
                                        [CLASS_b1] = ND_BOOL};

static bool class_allows(dtype_class class, nd_dtype dtype) {
    return class == CLASS_ANY || class == CLASS_T ||
           (class == CLASS_F ? nd_dtype_is_float(dtype) : dtype == class_dtypes[class]);
}

typedef struct {
    nd_array array;    /* for the kernel */
    nd_array original; /* of an IO operand that works on a copy */
    bool owned;        /* array holds a reference made here */
    bool copy_back;
} operand;

typedef struct {
    const nd_op_info *info;
    int64_t sizes[128]; /* by axis letter; -1: not seen yet */
    nd_device *device;
    const char *device_from; /* operand that decided it */
    nd_dtype shared_dtype;
    const char *shared_from; /* operand that decided F or T; NULL: none yet */
    int star_ndim;           /* the shape of "*"; -1: not seen yet */
    int64_t star[ND_MAX_DIMS];
    bool no_batch; /* the operands were given without their leading B */
    bool batch_known;
    int count; /* of fields; each has a slot and an operand */
    nd_slot *slots;
    operand *operands;
    PyObject *kept; /* the capsule of KEEP */
} call;

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

static int check_device(call *c, const field *f, const nd_array *a) {
    if (nd_check_live(c->info->name, f->name, a) < 0) {
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

static int check_dtype(call *c, const field *f, const nd_array *a) {
    const char *op = c->info->name;
    if (!class_allows(f->dtype, a->dtype)) {
        FAIL(PyExc_TypeError, "%s: %s: dtype is %s; allowed: %s", op, f->name,
             nd_dtype_name(a->dtype), class_texts[f->dtype]);
    }
    if (f->dtype == CLASS_F || f->dtype == CLASS_T) {
        if (c->shared_from == NULL) {
            c->shared_from = f->name;
            c->shared_dtype = a->dtype;
        } else if (a->dtype != c->shared_dtype) {
            FAIL(PyExc_TypeError, "%s: %s: dtype is %s, but %s is %s; they must be equal", op,
                 f->name, nd_dtype_name(a->dtype), c->shared_from, nd_dtype_name(c->shared_dtype));
        }
    }
    return 0;
}

/* Match the sizes of `a` to the letters. A matrix product takes its operands without B as well: all
 * of them then, and `a` gets a leading axis of 1. */
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

static int take_array(call *c, const field *f, PyObject *object, operand *o) {
    const char *op = c->info->name;
    if (!nd_is_ndarray(object)) {
        FAIL(PyExc_TypeError, "%s: %s: must be an NDArray%s, not %.80s", op, f->name,
             nd_may_be_none(f->kind) ? " or None" : "", Py_TYPE(object)->tp_name);
    }
    o->array = *nd_array_of(object);
    if (check_device(c, f, &o->array) < 0 || check_dtype(c, f, &o->array) < 0 ||
        check_axes(c, f, &o->array) < 0) {
        return -1;
    }
    return nd_is_changed(f->kind) ? nd_check_writable(op, f->name, &o->array) : 0;
}

/* ---- what a composite keeps ------------------------------------------------------------------ */
#define KEPT_NAME "needle.kept"

static void free_kept(PyObject *capsule) {
    nd_kept *kept = PyCapsule_GetPointer(capsule, KEPT_NAME);
    nd_free_kept(kept);
    PyMem_Free(kept);
}

static int make_kept(call *c, nd_slot *slot) {
    slot->kept = PyMem_Calloc(1, sizeof *slot->kept);
    c->kept =
        slot->kept != NULL ? PyCapsule_New(slot->kept, KEPT_NAME, free_kept) : PyErr_NoMemory();
    if (c->kept == NULL) {
        PyMem_Free(slot->kept);
        return -1;
    }
    return 0;
}

static int take_kept(const call *c, const field *f, PyObject *object, nd_slot *slot) {
    if (object == Py_None) {
        return 0;
    }
    if (!PyCapsule_IsValid(object, KEPT_NAME)) {
        FAIL(PyExc_TypeError, "%s: %s: must be what the forward kept, or None, not %.80s",
             c->info->name, f->name, Py_TYPE(object)->tp_name);
    }
    slot->kept = PyCapsule_GetPointer(object, KEPT_NAME);
    if (slot->kept->device != c->device || slot->kept->generation != c->device->generation) {
        FAIL(PyExc_RuntimeError, "%s: %s: was kept on another device, or before cuda_reset()",
             c->info->name, f->name);
    }
    return 0;
}

/* ---- operands, one after the other ----------------------------------------------------------- */
/* Does the caller pass it? */
static bool is_given(field_kind kind) {
    return kind != KIND_OUT && kind != KIND_NEW && kind != KIND_KEEP;
}

static int take_number(call *c, const field *f, PyObject *object, nd_slot *slot) {
    const field *first = c->info->fields;
    nd_number number;
    if (nd_take_number(c->info->name, f, object, slot) < 0) {
        return -1;
    }
    /* One that becomes elements of the first operand, which is of any dtype. */
    int found = first->dtype == CLASS_ANY ? nd_number_from(object, &number) : 0;
    return found <= 0 ? found : nd_check_number(c->info->name, &number, c->slots[0].array->dtype);
}

static int take_operand(call *c, int i, PyObject *object) {
    const field *f = &c->info->fields[i];
    nd_slot *slot = &c->slots[i];
    if (nd_is_number(f->kind)) {
        return take_number(c, f, object, slot);
    }
    if (f->kind == KIND_KEPT) {
        return take_kept(c, f, object, slot);
    }
    if (object == Py_None && nd_may_be_none(f->kind)) {
        return 0;
    }
    slot->array = &c->operands[i].array;
    return take_array(c, f, object, &c->operands[i]);
}

static int take_operands(call *c, PyObject *const *given) {
    for (int i = 0; i < c->count; i++) {
        c->operands[i].owned = c->operands[i].copy_back = false;
        c->slots[i].array = NULL;
    }
    for (int i = 0; i < c->count; i++) {
        if (is_given(c->info->fields[i].kind) && take_operand(c, i, *given++) < 0) {
            return -1;
        }
    }
    return 0;
}

static bool overlaps_changed(const call *c, const nd_array *a) {
    for (int i = 0; i < c->count; i++) {
        if (nd_is_changed(c->info->fields[i].kind) && c->slots[i].array != NULL &&
            nd_may_overlap(a, c->slots[i].array)) {
            return true;
        }
    }
    return false;
}

/* Give the operand its layout; keep it apart from what a kernel writes before it reads it. */
static int lay_out(call *c, const field *f, operand *o) {
    bool changed = nd_is_changed(f->kind);
    nd_array *a = &o->array, copy;
    if (f->axes[0] == '*' && f->kind == KIND_IN_ANY) {
        if (nd_broadcast_to(a, c->star_ndim, c->star, &copy) != ND_OK) {
            FAIL(PyExc_ValueError, "%s: %s: %s", c->info->name, f->name, nd_last_error());
        }
        *a = copy;
        o->owned = true;
    }
    if ((changed || !overlaps_changed(c, a)) && nd_has_layout(f->kind, a) &&
        nd_is_aligned(c->device, f->kind, a)) {
        return 0;
    }
    nd_trace_copy(c->info->name, f->name, a);
    if (nd_copy(a, a->dtype, &copy) < 0) {
        return -1;
    }
    o->original = *a;
    if (o->owned) {
        nd_array_clear(a);
    }
    *a = copy;
    o->owned = true;
    o->copy_back = changed;
    return 0;
}

static int allocate(call *c, const field *f, operand *o) {
    int64_t shape[ND_MAX_DIMS];
    int ndim = (int)strlen(f->axes);
    for (int k = 0; k < ndim; k++) {
        shape[k] = c->sizes[(int)f->axes[k]];
    }
    bool shared = f->dtype == CLASS_F || f->dtype == CLASS_T;
    nd_dtype dtype = shared ? c->shared_dtype : class_dtypes[f->dtype];
    if (nd_new_array(c->info->name, c->device, dtype, ndim, shape, &o->array) < 0) {
        return -1;
    }
    o->owned = true;
    return 0;
}

static int prepare(call *c) {
    for (int i = 0; i < c->count; i++) {
        const field *f = &c->info->fields[i];
        if (f->kind < KIND_OUT && c->slots[i].array != NULL && lay_out(c, f, &c->operands[i]) < 0) {
            return -1;
        }
    }
    for (int i = 0; i < c->count; i++) {
        const field *f = &c->info->fields[i];
        operand *o = &c->operands[i];
        if (f->kind == KIND_KEEP) {
            if (make_kept(c, &c->slots[i]) < 0) {
                return -1;
            }
        } else if (f->kind == KIND_OUT || f->kind == KIND_NEW) {
            o->array.storage = NULL;
            if (f->kind == KIND_OUT && allocate(c, f, o) < 0) {
                return -1;
            }
            o->owned = true;
            c->slots[i].array = &o->array;
        }
    }
    return 0;
}

/* Count the writes, and the elements that the op touches; -1: it has none to write. */
static int64_t count_work(const call *c) {
    bool writes = false;
    int64_t work = 0;
    for (int i = 0; i < c->count; i++) {
        const field *f = &c->info->fields[i];
        const operand *o = &c->operands[i];
        writes |= f->kind == KIND_NEW;
        if (f->kind > KIND_OUT || c->slots[i].array == NULL) {
            continue;
        }
        int64_t size = nd_size(&o->array);
        if (nd_is_changed(f->kind)) {
            nd_count_write(o->copy_back ? &o->original : &o->array);
        }
        writes |= size > 0 && (f->kind == KIND_OUT || nd_is_changed(f->kind));
        work += size;
    }
    return writes ? work : -1;
}

static int copy_back(const call *c) {
    for (int i = 0; i < c->count; i++) {
        const operand *o = &c->operands[i];
        if (o->copy_back && nd_run_assign(&o->original, &o->array) < 0) {
            return -1;
        }
    }
    return 0;
}

/* None, the one output, or a tuple of them. */
static PyObject *wrap_outputs(call *c) {
    PyObject *list[ND_MAX_FIELDS];
    int count = 0;
    for (int i = 0; i < c->count; i++) {
        const field *f = &c->info->fields[i];
        if (f->kind == KIND_KEEP) {
            list[count++] = Py_NewRef(c->kept);
        }
        if (f->kind != KIND_OUT && f->kind != KIND_NEW) {
            continue;
        }
        nd_array *a = &c->operands[i].array;
        if (c->no_batch && f->axes[0] == 'B') {
            nd_drop_first_axis(a);
        }
        c->operands[i].owned = false;
        list[count++] = nd_wrap(a);
    }
    if (count == 1) {
        return list[0];
    }
    PyObject *tuple = count > 0 ? PyTuple_New(count) : Py_NewRef(Py_None);
    for (int i = 0; i < count; i++) {
        if (tuple != NULL && list[i] != NULL) {
            PyTuple_SET_ITEM(tuple, i, list[i]);
        } else {
            Py_XDECREF(list[i]);
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

PyObject *nd_structured(nd_op id, PyObject *const *given) {
    nd_slot slots[ND_MAX_FIELDS];
    operand operands[ND_MAX_FIELDS];
    call c = {.info = &nd_ops[id],
              .shared_dtype = ND_F32,
              .star_ndim = -1,
              .slots = slots,
              .operands = operands};
    memset(c.sizes, -1, sizeof c.sizes);
    while (c.info->fields[c.count].kind != KIND_END) {
        c.count++;
    }
    PyObject *result = NULL;
    if (take_operands(&c, given) == 0 && prepare(&c) == 0) {
        int64_t work = count_work(&c);
        if (work < 0 || (nd_run_op(id, c.device, slots, work) == 0 && copy_back(&c) == 0)) {
            result = wrap_outputs(&c);
        }
    }
    Py_XDECREF(c.kept);
    for (int i = 0; i < c.count; i++) {
        if (operands[i].owned) {
            nd_array_clear(&operands[i].array);
        }
    }
    return result;
}

/* ---- arguments ------------------------------------------------------------------------------- */
/* Parameters are all operands that the caller passes; the names of an op end with NULL. */
static int intern_names(void) {
    for (int id = 0; id < NUM_OPS; id++) {
        PyObject **to = nd.field_names[id];
        for (const field *f = nd_ops[id].fields; f->kind != KIND_END; f++) {
            if (is_given(f->kind) && (*to++ = PyUnicode_InternFromString(f->name)) == NULL) {
                return -1;
            }
        }
    }
    return 0;
}

/* Positional and keyword arguments into given[]. Names at a call site are interned, so that
 * comparing pointers nearly always finds them. */
static int parse(nd_op id, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords,
                 PyObject **given) {
    const char *op = nd_ops[id].name;
    PyObject *const *names = nd.field_names[id];
    int count = 0;
    for (; names[count] != NULL; count++) {
        given[count] = count < positional ? arguments[count] : NULL;
    }
    if (positional > count) {
        FAIL(PyExc_TypeError, "%s() takes %d arguments, but %zd were given", op, count, positional);
    }
    Py_ssize_t named = keywords != NULL ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t k = 0; k < named; k++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, k);
        int at = 0;
        while (at < count && names[at] != name) {
            at++;
        }
        for (int i = 0; at == count && i < count; i++) {
            if (PyUnicode_Compare(names[i], name) == 0) {
                at = i;
            }
        }
        if (at == count) {
            FAIL(PyExc_TypeError, "%s() has no argument %R", op, name);
        }
        if (given[at] != NULL) {
            FAIL(PyExc_TypeError, "%s() got %R twice", op, name);
        }
        given[at] = arguments[positional + k];
    }
    for (int i = 0; i < count; i++) {
        if (given[i] == NULL) {
            FAIL(PyExc_TypeError, "%s() lacks its argument %R", op, names[i]);
        }
    }
    return 0;
}

static PyObject *call_binary(nd_op id, PyObject *const *given) {
    bool unsupported;
    PyObject *result = nd_binary(id, given[0], given[1], NULL, &unsupported);
    if (unsupported) {
        PyErr_Format(PyExc_TypeError,
                     "%s: takes an NDArray and an NDArray or a number, not %.80s "
                     "and %.80s",
                     nd_ops[id].name, Py_TYPE(given[0])->tp_name, Py_TYPE(given[1])->tp_name);
    }
    return result;
}

static PyObject *call_reduction(nd_op id, PyObject *const *given) {
    const nd_op_info *info = &nd_ops[id];
    nd_slot axes;
    nd_array out;
    if (nd_check_operand(info->name, "x", given[0]) < 0 ||
        nd_take_number(info->name, &info->fields[1], given[1], &axes) < 0) {
        return NULL;
    }
    const nd_array *x = nd_array_of(given[0]);
    int count = axes.integer < 0 || axes.integer > x->ndim ? x->ndim + 1 : (int)axes.integer;
    return nd_reduce(id, x, count, &out) < 0 ? NULL : nd_wrap(&out);
}

#define FUNCTION(name, call)                                                                   \
    static PyObject *py_##name(PyObject *module, PyObject *const *arguments, Py_ssize_t count, \
                               PyObject *keywords) {                                           \
        PyObject *given[ND_MAX_FIELDS];                                                        \
        return parse(OP_##name, arguments, count, keywords, given) < 0 ? NULL : call;          \
    }
#define EW1(name, types, formula) FUNCTION(name, nd_unary(OP_##name, given[0]))
#define EW2(name, types, formula) FUNCTION(name, call_binary(OP_##name, given))
#define CMP(name, formula) FUNCTION(name, call_binary(OP_##name, given))
#define RED(name, types, start, combine, map) FUNCTION(name, call_reduction(OP_##name, given))
#define ARG(name, better) FUNCTION(name, call_reduction(OP_##name, given))
#define OP(name, operands) FUNCTION(name, nd_structured(OP_##name, given))
#define COMPOSITE(name, operands) OP(name, operands)
#include "ops.def"

/* Signatures and summaries for help(): the table's own text. */
#define OPERAND(kind, field, axes, dtype) ", " #field
#define OUT(field, axes, dtype)
#define NEW(field)
#define KEEP(field)
#define KEPT(field) ", " #field
#define F64(field) ", " #field
#define I64(field) ", " #field
#define METHOD(name, signature, summary)                                           \
    {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL | METH_KEYWORDS, \
     #name "($module" signature ")\n--\n\n" summary},
#define EW1(name, types, formula) METHOD(name, ", x", "Elementwise: " #formula)
#define EW2(name, types, formula) METHOD(name, ", x, y", "Elementwise, broadcasting: " #formula)
#define CMP(name, formula) METHOD(name, ", x, y", "Elementwise, broadcasting, to bool: " #formula)
#define RED(name, types, start, combine, map) \
    METHOD(name, ", x, axes", "Reduce the last `axes` axes of x: " #name)
#define ARG(name, better) \
    METHOD(name, ", x, axes", "Index (int64) of the " #name " over the last `axes` axes of x")
#define OP(name, operands) METHOD(name, operands, "Operation " #name " of csrc/ops.def")
#define COMPOSITE(name, operands) OP(name, operands)
static PyMethodDef methods[] = {
#include "ops.def"
    {NULL, NULL, 0, NULL},
};

/* ---- the table as data ----------------------------------------------------------------------- */
/* (kind, ((how, name, axes, dtype), ...)) */
static PyObject *describe(const nd_op_info *info) {
    PyObject *list = PyList_New(0);
    for (const field *f = info->fields; list != NULL && f->kind != KIND_END; f++) {
        PyObject *one = Py_BuildValue("(ssss)", f->kind_text, f->name, f->axes, f->dtype_text);
        if (one == NULL || PyList_Append(list, one) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(one);
    }
    PyObject *operands = list != NULL ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return operands == NULL ? NULL : Py_BuildValue("(sN)", info->kind_text, operands);
}

static PyObject *module_table(PyObject *module, PyObject *unused) {
    PyObject *table = PyDict_New();
    for (int id = 0; table != NULL && id < NUM_OPS; id++) {
        PyObject *entry = describe(&nd_ops[id]);
        if (entry == NULL || PyDict_SetItemString(table, nd_ops[id].name, entry) < 0) {
            Py_CLEAR(table);
        }
        Py_XDECREF(entry);
    }
    return table;
}

static PyMethodDef table_method[] = {
    {"table", module_table, METH_NOARGS,
     "table($module)\n--\n\ncsrc/ops.def as a dict: op -> (kind, operands), an operand being (how "
     "it "
     "is used, name, axes, dtype)."},
    {NULL, NULL, 0, NULL},
};

int nd_callables_init(PyObject *module) {
    nd_run_init();
    bool failed = intern_names() < 0 || PyModule_AddFunctions(module, methods) < 0;
    return failed ? -1 : PyModule_AddFunctions(module, table_method);
}
