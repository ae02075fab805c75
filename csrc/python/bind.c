/* bind.c - a row of ops.def becomes a Python callable.
 *
 * For each call: parse, check devices, dtypes (promotion for EW2 and CMP) and shapes (equal letters
 * are equal sizes), give operands the layout that the row demands (copying those that lack it, and
 * copying IO operands back), allocate outputs, release the GIL, run the backend's function, trace.
 * Kernels therefore see only what ops.def promises them. Nobody else raises for an operation.
 */
#include "bind.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- the table ------------------------------------------------------------------------------- */
#define OPERAND(kind, field, axes, dtype) {kind, #field, axes, CLASS_##dtype},
#define IN(field, axes, dtype) OPERAND(KIND_IN, field, axes, dtype)
#define IN_ANY(field, axes, dtype) OPERAND(KIND_IN_ANY, field, axes, dtype)
#define IN_ROWS(field, axes, dtype) OPERAND(KIND_IN_ROWS, field, axes, dtype)
#define IN_MATRIX(field, axes, dtype) OPERAND(KIND_IN_MATRIX, field, axes, dtype)
#define OPT(field, axes, dtype) OPERAND(KIND_OPT, field, axes, dtype)
#define IO(field, axes, dtype) OPERAND(KIND_IO, field, axes, dtype)
#define IO_ANY(field, axes, dtype) OPERAND(KIND_IO_ANY, field, axes, dtype)
#define IO_ROWS(field, axes, dtype) OPERAND(KIND_IO_ROWS, field, axes, dtype)
#define IO_OPT(field, axes, dtype) OPERAND(KIND_IO_OPT, field, axes, dtype)
#define OUT(field, axes, dtype) OPERAND(KIND_OUT, field, axes, dtype)
#define F64(field) {KIND_F64, #field, "", CLASS_ANY},
#define I64(field) {KIND_I64, #field, "", CLASS_ANY},
#define OP(name, operands) \
    static const field name##_fields[] = {operands{KIND_END, NULL, NULL, CLASS_ANY}};
#include "ops.def"

/* One plain function type for all rows: the cast of the arguments happens where their type is
 * known. */
#define RUN(name)                                                                               \
    static nd_status dispatch_##name(const nd_backend *backend, int device, const void *args) { \
        _Static_assert(sizeof(name##_args) <= ND_MAX_FIELDS * sizeof(nd_slot), #name);          \
        return backend->name(device, args);                                                     \
    }
#define EW1(name, types, formula) RUN(name)
#define EW2(name, types, formula) RUN(name)
#define CMP(name, formula) RUN(name)
#define RED(name, types, start, combine, map) RUN(name)
#define ARG(name, better) RUN(name)
#define OP(name, operands) RUN(name)
#include "ops.def"

const row_info nd_rows[NUM_ROWS] = {
#define EW1(name, types, formula) {ROW_KIND_EW1, TYPES_##types, #name, NULL, dispatch_##name},
#define EW2(name, types, formula) {ROW_KIND_EW2, TYPES_##types, #name, NULL, dispatch_##name},
#define CMP(name, formula) {ROW_KIND_CMP, TYPES_ANY, #name, NULL, dispatch_##name},
#define RED(name, types, start, combine, map) \
    {ROW_KIND_RED, TYPES_##types, #name, NULL, dispatch_##name},
#define ARG(name, better) {ROW_KIND_ARG, TYPES_ANY, #name, NULL, dispatch_##name},
#define OP(name, operands) {ROW_KIND_OP, TYPES_ANY, #name, name##_fields, dispatch_##name},
#include "ops.def"
};

/* ---- errors ---------------------------------------------------------------------------------- */
int nd_check_live(nd_state *state, const char *op, const char *operand, const nd_array *a) {
    nd_device *device = a->storage->device;
    if (a->storage->generation != device->generation) {
        char text[24];
        FAIL(PyExc_RuntimeError,
             "%s: %s: this array lived on %s before cuda_reset() freed it; "
             "make it anew",
             op, operand, nd_device_text(device, text));
    }
    return nd_check_alive(state, device);
}

int nd_take_number(const row_info *row, const field *f, PyObject *object, nd_slot *slot) {
    if (f->kind == KIND_F64) {
        slot->real = PyFloat_AsDouble(object);
        if (slot->real == -1.0 && PyErr_Occurred()) {
            FAIL(PyExc_TypeError, "%s: %s: must be a number, not %.80s", row->name, f->name,
                 Py_TYPE(object)->tp_name);
        }
    } else {
        PyObject *index = PyNumber_Index(object);
        slot->integer = index ? (int64_t)PyLong_AsLongLong(index) : -1;
        Py_XDECREF(index);
        if (slot->integer == -1 && PyErr_Occurred()) {
            bool overflow = PyErr_ExceptionMatches(PyExc_OverflowError);
            FAIL(overflow ? PyExc_ValueError : PyExc_TypeError, "%s: %s: must be an integer%s",
                 row->name, f->name, overflow ? " of 64 bits" : "");
        }
    }
    return 0;
}

int nd_ndarray_operand(nd_state *state, const char *op, const char *operand, PyObject *object) {
    if (!nd_is_ndarray(state, object)) {
        FAIL(PyExc_TypeError, "%s: %s: must be an NDArray, not %.80s", op, operand,
             Py_TYPE(object)->tp_name);
    }
    return nd_check_live(state, op, operand, nd_array_of(object));
}

/* ---- tracing and running ----------------------------------------------------------------------- */
static double microseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int describe(char *text, size_t room, const char *name, const nd_array *a) {
    int used = snprintf(text, room, " %s:%s(", name, nd_dtype_name(a->dtype));
    for (int i = 0; i < a->ndim; i++) {
        used += snprintf(text + used, (size_t)used < room ? room - (size_t)used : 0, "%s%lld",
                         i ? "," : "", (long long)a->shape[i]);
    }
    return used + snprintf(text + used, (size_t)used < room ? room - (size_t)used : 0, ")");
}

void nd_show(shown *s, const char *name, const nd_array *array) {
    if (array != NULL && s->count < ND_MAX_FIELDS) {
        s->list[s->count].name = name;
        s->list[s->count++].array = array;
    }
}

static void trace_line(const row_info *row, const nd_device *device, double took, const shown *s) {
    char text[1024], name[24];
    int used = 0;
    text[0] = 0;
    for (int i = 0; i < s->count && used < (int)sizeof text - 200; i++) {
        used +=
            describe(text + used, sizeof text - (size_t)used, s->list[i].name, s->list[i].array);
    }
    fprintf(stderr, "needle: %-22s %-7s %10.1f us %s\n", row->name, nd_device_text(device, name),
            took, text);
}

void nd_trace_copy(nd_state *state, const char *op, const char *operand, const nd_array *a) {
    if (state->trace) {
        char text[256];
        describe(text, sizeof text, operand, a);
        fprintf(stderr, "needle: %-22s copies its operand%s: not in the layout it needs\n", op,
                text);
    }
}

/* `work` is the number of elements touched: a small CPU op is over sooner than the GIL could be
 * given to anybody. */
int nd_run_row(nd_state *state, nd_row id, nd_device *device, const nd_slot *slots, int64_t work,
               const shown *s) {
    const row_info *row = &nd_rows[id];
    double start = state->trace ? microseconds_now() : 0;
    nd_status status;
    if (work < 4096 && nd_is_cpu(device)) {
        status = row->run(device->backend, device->index, slots);
    } else {
        Py_BEGIN_ALLOW_THREADS status = row->run(device->backend, device->index, slots);
        if (status == ND_OK && (state->sync || state->trace)) {
            status = device->backend->synchronize(device->index);
        }
        Py_END_ALLOW_THREADS
    }
    if (status != ND_OK) {
        nd_raise(state, row->name, device, status);
        return -1;
    }
    if (state->trace) {
        trace_line(row, device, microseconds_now() - start, s);
    }
    return 0;
}

/* ---- copies ------------------------------------------------------------------------------------ */
/* to = from, same shape, no overlap to care about. */
int nd_run_assign(nd_state *state, const nd_array *to, const nd_array *from) {
    int64_t size = nd_size(to);
    if (size == 0) {
        return 0;
    }
    nd_slot slots[2] = {{.array = (nd_array *)to}, {.array = (nd_array *)from}};
    shown s = {.count = 0};
    nd_show(&s, "to", to);
    nd_show(&s, "source", from);
    return nd_run_row(state, ROW_assign, to->storage->device, slots, size, &s);
}

/* Elements that share memory within one view cannot be written one by one. */
int nd_check_writable(const char *op, const char *operand, const nd_array *a) {
    for (int i = 0; i < a->ndim; i++) {
        if (a->strides[i] == 0 && a->shape[i] > 1 && nd_size(a) > 0) {
            FAIL(PyExc_ValueError,
                 "%s: %s: cannot write into a broadcast view: along axis %d all "
                 "elements are the same memory; take a copy() first",
                 op, operand, i);
        }
    }
    return 0;
}

int nd_fill(nd_state *state, const nd_array *to, double value) {
    if (nd_check_live(state, "fill", "to", to) < 0 || nd_check_writable("fill", "to", to) < 0) {
        return -1;
    }
    int64_t size = nd_size(to);
    if (size == 0) {
        return 0;
    }
    nd_slot slots[2] = {{.array = (nd_array *)to}, {.real = value}};
    shown s = {.count = 0};
    nd_show(&s, "to", to);
    return nd_run_row(state, ROW_fill, to->storage->device, slots, size, &s);
}

int nd_new_array(nd_state *state, const char *op, nd_device *device, nd_dtype dtype, int ndim,
                 const int64_t *shape, nd_array *out) {
    nd_status status = nd_array_new(device, dtype, ndim, shape, out);
    if (status != ND_OK) {
        nd_raise(state, op, NULL, status);
        return -1;
    }
    return 0;
}

int nd_copy(nd_state *state, const nd_array *a, nd_dtype dtype, nd_array *out) {
    if (nd_check_live(state, "copy", "source", a) < 0 ||
        nd_new_array(state, "copy", a->storage->device, dtype, a->ndim, a->shape, out) < 0) {
        return -1;
    }
    if (nd_run_assign(state, out, a) < 0) {
        nd_array_clear(out);
        return -1;
    }
    return 0;
}

bool nd_same_geometry(const nd_array *a, const nd_array *b) {
    if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim) {
        return false;
    }
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i] || a->strides[i] != b->strides[i]) {
            return false;
        }
    }
    return true;
}

int nd_assign(nd_state *state, const char *op, const nd_array *to, const nd_array *from) {
    if (nd_check_live(state, op, "to", to) < 0 || nd_check_live(state, op, "source", from) < 0 ||
        nd_check_writable(op, "to", to) < 0) {
        return -1;
    }
    /* NumPy drops leading axes of size 1 of the source. */
    nd_array source = *from;
    while (source.ndim > to->ndim && source.shape[0] == 1) {
        source.ndim--;
        memmove(source.shape, source.shape + 1, (size_t)source.ndim * sizeof *source.shape);
        memmove(source.strides, source.strides + 1, (size_t)source.ndim * sizeof *source.strides);
    }
    nd_array wide;
    nd_status status = nd_broadcast_to(&source, to->ndim, to->shape, &wide);
    if (status != ND_OK) {
        FAIL(PyExc_ValueError, "%s: source: %s", op, nd_last_error());
    }
    int result;
    if (nd_same_geometry(to, &wide)) {
        result = 0;
    } else if (nd_may_overlap(to, &wide)) {
        nd_array copy;
        result = nd_copy(state, &source, source.dtype, &copy);
        if (result == 0) {
            nd_array_clear(&wide);
            nd_broadcast_to(&copy, to->ndim, to->shape, &wide);
            nd_array_clear(&copy);
            result = nd_run_assign(state, to, &wide);
        }
    } else {
        result = nd_run_assign(state, to, &wide);
    }
    nd_array_clear(&wide);
    return result;
}

/* ---- the callables ----------------------------------------------------------------------------- */
/* The operands a caller passes: all but OUT. */
static int parameter_count(const row_info *row) {
    switch (row->kind) {
    case ROW_KIND_EW1:
        return 1;
    case ROW_KIND_OP: {
        int count = 0;
        for (const field *f = row->fields; f->kind != KIND_END; f++) {
            count += f->kind != KIND_OUT;
        }
        return count;
    }
    default:
        return 2;
    }
}

static const char *parameter_name(const row_info *row, int index) {
    if (row->kind != ROW_KIND_OP) {
        bool reduction = row->kind == ROW_KIND_RED || row->kind == ROW_KIND_ARG;
        return index == 0 ? "x" : reduction ? "axes" : "y";
    }
    for (const field *f = row->fields;; f++) {
        if (f->kind != KIND_OUT && index-- == 0) {
            return f->name;
        }
    }
}

int nd_bind_init(nd_state *state) {
    for (int row = 0; row < NUM_ROWS; row++) {
        int count = parameter_count(&nd_rows[row]);
        for (int i = 0; i < count; i++) {
            PyObject *name = PyUnicode_InternFromString(parameter_name(&nd_rows[row], i));
            if (name == NULL) {
                return -1;
            }
            state->field_names[row][i] = name;
        }
    }
    return 0;
}

/* Positional and keyword arguments into given[]. Names at a call site are interned, so that
 * comparing pointers nearly always finds them. */
static int parse(nd_state *state, nd_row id, PyObject *const *arguments, Py_ssize_t positional,
                 PyObject *keywords, PyObject **given) {
    const row_info *row = &nd_rows[id];
    PyObject *const *names = state->field_names[id];
    int count = parameter_count(row);
    if (positional > count) {
        FAIL(PyExc_TypeError, "%s() takes %d arguments, but %zd were given", row->name, count,
             positional);
    }
    for (int i = 0; i < count; i++) {
        given[i] = i < positional ? arguments[i] : NULL;
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
            FAIL(PyExc_TypeError, "%s() has no argument %R", row->name, name);
        }
        if (given[at] != NULL) {
            FAIL(PyExc_TypeError, "%s() got %R twice", row->name, name);
        }
        given[at] = arguments[positional + k];
    }
    for (int i = 0; i < count; i++) {
        if (given[i] == NULL) {
            FAIL(PyExc_TypeError, "%s() lacks its argument %R", row->name, names[i]);
        }
    }
    return 0;
}

static PyObject *call_binary(nd_state *state, nd_row id, PyObject *const *given) {
    bool unsupported;
    PyObject *result = nd_binary(state, id, given[0], given[1], NULL, &unsupported);
    if (unsupported) {
        PyErr_Format(PyExc_TypeError,
                     "%s: takes an NDArray and an NDArray or a number, not %.80s "
                     "and %.80s",
                     nd_rows[id].name, Py_TYPE(given[0])->tp_name, Py_TYPE(given[1])->tp_name);
    }
    return result;
}

static PyObject *call_reduction(nd_state *state, nd_row id, PyObject *const *given) {
    static const field axes = {KIND_I64, "axes", "", CLASS_ANY};
    nd_slot slot;
    nd_array out;
    if (nd_ndarray_operand(state, nd_rows[id].name, "x", given[0]) < 0 ||
        nd_take_number(&nd_rows[id], &axes, given[1], &slot) < 0) {
        return NULL;
    }
    const nd_array *x = nd_array_of(given[0]);
    int count = slot.integer < 0 || slot.integer > x->ndim ? x->ndim + 1 : (int)slot.integer;
    return nd_reduce(state, id, x, count, &out) < 0 ? NULL : nd_wrap(state, &out);
}

static PyObject *call_row(PyObject *module, nd_row id, PyObject *const *arguments,
                          Py_ssize_t positional, PyObject *keywords) {
    nd_state *state = nd_module_state(module);
    PyObject *given[ND_MAX_FIELDS];
    if (parse(state, id, arguments, positional, keywords, given) < 0) {
        return NULL;
    }
    switch (nd_rows[id].kind) {
    case ROW_KIND_EW1:
        return nd_unary(state, id, given[0]);
    case ROW_KIND_EW2:
    case ROW_KIND_CMP:
        return call_binary(state, id, given);
    case ROW_KIND_RED:
    case ROW_KIND_ARG:
        return call_reduction(state, id, given);
    case ROW_KIND_OP:
        break;
    }
    return nd_call_structured(state, id, given);
}

#define CALLABLE(name)                                                                         \
    static PyObject *py_##name(PyObject *module, PyObject *const *arguments, Py_ssize_t count, \
                               PyObject *keywords) {                                           \
        return call_row(module, ROW_##name, arguments, count, keywords);                       \
    }
#define EW1(name, types, formula) CALLABLE(name)
#define EW2(name, types, formula) CALLABLE(name)
#define CMP(name, formula) CALLABLE(name)
#define RED(name, types, start, combine, map) CALLABLE(name)
#define ARG(name, better) CALLABLE(name)
#define OP(name, operands) CALLABLE(name)
#include "ops.def"

/* Signatures and summaries for help(): the row's own text. */
#define TEXT(field, axes) ", " #field
#define IN(field, axes, dtype) TEXT(field, axes)
#define IN_ANY(field, axes, dtype) TEXT(field, axes)
#define IN_ROWS(field, axes, dtype) TEXT(field, axes)
#define IN_MATRIX(field, axes, dtype) TEXT(field, axes)
#define OPT(field, axes, dtype) TEXT(field, axes)
#define IO(field, axes, dtype) TEXT(field, axes)
#define IO_ANY(field, axes, dtype) TEXT(field, axes)
#define IO_ROWS(field, axes, dtype) TEXT(field, axes)
#define IO_OPT(field, axes, dtype) TEXT(field, axes)
#define OUT(field, axes, dtype)
#define F64(field) TEXT(field, )
#define I64(field) TEXT(field, )
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
PyMethodDef nd_row_methods[] = {
#include "ops.def"
    {NULL, NULL, 0, NULL},
};
