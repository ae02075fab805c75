/* run.c - running an op: the table that ops.def expands to, dispatch with the GIL given up, trace.
 *
 * Callers of nd_run_op give the operands the layout that ops.def promises to a kernel.
 */
#include "run.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "backends.h"
#include "errors.h"

/* ---- the table ------------------------------------------------------------------------------- */
#define OPERAND(kind, field, axes, dtype) FIELD(kind, field, axes, dtype)
#define FIELD(kind, field, axes, dtype) {KIND_##kind, CLASS_##dtype, #field, axes, #kind, #dtype},
#define F64(field) {KIND_F64, CLASS_ANY, #field, "", "F64", ""},
#define I64(field) {KIND_I64, CLASS_ANY, #field, "", "I64", ""},
#define NEW(field) {KIND_NEW, CLASS_F, #field, "", "NEW", ""},
#define KEEP(field) {KIND_KEEP, CLASS_ANY, #field, "", "KEEP", ""},
#define KEPT(field) {KIND_KEPT, CLASS_ANY, #field, "", "KEPT", ""},
/* The operands of entries that write none out. */
#define OF_ANY ANY
#define OF_FLOAT F
#define OF_WHOLE W
#define X(types) OPERAND(IN_ANY, x, "*", OF_##types)
#define RESULT(types) OPERAND(OUT, out, "*", OF_##types)
#define EW1(name, types, formula) OP(name, X(types) RESULT(types))
#define EW2(name, types, formula) \
    OP(name, X(types) OPERAND(IN_ANY, y, "*", OF_##types) RESULT(types))
#define CMP(name, formula) EW2(name, ANY, formula)
#define RED(name, types, start, combine, map) OP(name, X(types) I64(axes) RESULT(types))
#define ARG(name, better) OP(name, X(ANY) I64(axes) RESULT(ANY))
#define OP(name, operands) static const field name##_fields[] = {operands{.kind = KIND_END}};
#define COMPOSITE(name, operands) static const field name##_fields[] = {operands{.kind = KIND_END}};
#include "ops.def"

/* One plain function type for all ops: the cast of the arguments happens where their type is
 * known, of a composite in its function. */
#define FITS(name) _Static_assert(sizeof(name##_args) <= ND_MAX_FIELDS * sizeof(nd_slot), #name);
#define EACH_OP(name)                                                       \
    static nd_status dispatch_##name(nd_device *device, const void *args) { \
        FITS(name)                                                          \
        return device->backend->name(device->index, args);                  \
    }
#define EACH_COMPOSITE(name) FITS(name)
#include "ops.def"

const nd_op_info nd_ops[NUM_OPS] = {
#define ENTRY(kind, types, name) \
    {OP_KIND_##kind, TYPES_##types, #kind, #name, name##_fields, dispatch_##name, false},
#define EW1(name, types, formula) ENTRY(EW1, types, name)
#define EW2(name, types, formula) ENTRY(EW2, types, name)
#define CMP(name, formula) ENTRY(CMP, ANY, name)
#define RED(name, types, start, combine, map) ENTRY(RED, types, name)
#define ARG(name, better) ENTRY(ARG, ANY, name)
#define OP(name, operands) ENTRY(OP, ANY, name)
#define COMPOSITE(name, operands) \
    {OP_KIND_OP, TYPES_ANY, "COMPOSITE", #name, name##_fields, nd_##name, true},
#include "ops.def"
};

/* ---- layouts --------------------------------------------------------------------------------- */
bool nd_has_layout(field_kind kind, nd_array *a) {
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

bool nd_is_aligned(const nd_device *device, field_kind kind, const nd_array *a) {
    bool whole = kind == KIND_IN || kind == KIND_IO || kind == KIND_OUT || nd_may_be_none(kind);
    return !whole || (uintptr_t)a->data % device->backend->alignment == 0;
}

/* ---- running --------------------------------------------------------------------------------- */
int nd_check_live(const char *op, const char *operand, const nd_array *a) {
    nd_device *device = a->storage->device;
    if (a->storage->generation != device->generation) {
        char text[24];
        FAIL(PyExc_RuntimeError,
             "%s: %s: this array lived on %s before cuda_reset() freed it; "
             "make it anew",
             op, operand, nd_device_text(device, text));
    }
    return nd_check_alive(device);
}

double nd_microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

void nd_trace_operand(nd_trace *line, const char *name, const nd_array *a) {
    char *to = line->text + line->used, *end = line->text + sizeof line->text;
    if (end - to < 200) { /* an operand has 8 sizes at most */
        return;
    }
    to += snprintf(to, (size_t)(end - to), " %.40s:%s(", name, nd_dtype_name(a->dtype));
    for (int i = 0; i < a->ndim; i++) {
        to += snprintf(to, (size_t)(end - to), "%s%lld", i ? "," : "", (long long)a->shape[i]);
    }
    line->used += (size_t)(to + snprintf(to, (size_t)(end - to), ")") - line->text) - line->used;
}

void nd_trace_run(const char *op, const nd_device *device, double took, const nd_trace *line) {
    char name[24];
    fprintf(stderr, "needle: %-22s %-7s %10.1f us %.*s\n", op, nd_device_text(device, name), took,
            (int)line->used, line->text);
}

void nd_trace_copy(const char *op, const char *operand, const nd_array *a) {
    if (nd.trace) {
        nd_trace line = {.used = 0};
        nd_trace_operand(&line, operand, a);
        fprintf(stderr, "needle: %-22s copies its operand%.*s: not in the layout it needs\n", op,
                (int)line.used, line.text);
    }
}

/* The array of field i, or NULL: two numbers lie before the output of EW2 and CMP. */
static nd_array *array_of(const nd_op_info *info, const nd_slot *slots, int i) {
    bool two = info->kind == OP_KIND_EW2 || info->kind == OP_KIND_CMP;
    return nd_is_number(info->fields[i].kind) ? NULL : slots[two && i == 2 ? 4 : i].array;
}

static void trace_op(const nd_op_info *info, const nd_device *device, const nd_slot *slots,
                     double took) {
    nd_trace line = {.used = 0};
    for (int i = 0; info->fields[i].kind != KIND_END; i++) {
        const nd_array *a = array_of(info, slots, i);
        if (info->fields[i].kind < KIND_OUT && a != NULL) {
            nd_trace_operand(&line, info->fields[i].name, a);
        }
    }
    nd_trace_run(info->name, device, took, &line);
}

int nd_run_op(nd_op id, nd_device *device, const nd_slot *slots, int64_t work) {
    const nd_op_info *info = &nd_ops[id];
    double start = nd.trace ? nd_microseconds() : 0;
    nd_status status;
    if (work < 4096 && device->backend->is_host) {
        status = info->run(device, slots);
    } else {
        Py_BEGIN_ALLOW_THREADS
        status = info->run(device, slots);
        if (status == ND_OK && (nd.sync || nd.trace)) {
            status = device->backend->synchronize(device->index);
        }
        Py_END_ALLOW_THREADS
    }
    if (nd_check(info->name, info->is_composite ? NULL : device, status) < 0) {
        return -1;
    }
    if (nd.trace && !info->is_composite) {
        trace_op(info, device, slots, nd_microseconds() - start);
    }
    return 0;
}

/* Bring the backend's message here, with the op's name before it. */
static nd_status named(const nd_op_info *info, const nd_device *device, nd_status status) {
    const char *what = device->backend->last_error();
    size_t length = strlen(info->name);
    bool is_named = strncmp(what, info->name, length) == 0 && what[length] == ':';
    return nd_error(status, "%s%s%s", is_named ? "" : info->name, is_named ? "" : ": ", what);
}

/* With or without the GIL. */
static void run_in_frame(nd_frame *f, nd_op id, const void *args) {
    const nd_op_info *info = &nd_ops[id];
    nd_device *device = f->device;
    if (f->status != ND_OK) {
        return;
    }
    bool writes = false;
    for (int i = 0; info->fields[i].kind != KIND_END; i++) {
        const field *operand = &info->fields[i];
        field_kind kind = operand->kind;
        nd_array *a = array_of(info, args, i);
        if (a == NULL) {
            continue;
        }
        writes |= (kind == KIND_OUT || nd_is_changed(kind)) && nd_size(a) > 0;
        nd_require(f, nd_has_layout(kind, a) && nd_is_aligned(device, kind, a),
                   "%s: %s: not in the layout it needs", info->name, operand->name);
    }
    if (!writes || f->status != ND_OK) {
        return;
    }
    double start = nd.trace ? nd_microseconds() : 0;
    nd_status status = info->run(device, args);
    if (status == ND_OK && (nd.sync || nd.trace)) {
        status = device->backend->synchronize(device->index);
    }
    if (status != ND_OK) {
        f->status = named(info, device, status);
    } else if (nd.trace) {
        trace_op(info, device, args, nd_microseconds() - start);
    }
}

static void hold_sums(nd_frame *f, bool hold) {
    const nd_backend *backend = f->device->backend;
    if (backend->hold_sums == NULL || (hold && (nd.sync || nd.trace))) {
        return;
    }
    nd_status status = backend->hold_sums(f->device->index, hold);
    if (status != ND_OK && f->status == ND_OK) {
        f->status = nd_error(status, "%s", backend->last_error());
    }
}

void nd_run_init(void) {
    nd_run_in_frame = run_in_frame;
    nd_hold_sums = hold_sums;
}
