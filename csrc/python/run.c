/* run.c - running an op: the table that ops.def expands to, dispatch with the GIL given up, trace.
 *
 * Callers of nd_run_op give the operands the layout that ops.def promises to a kernel.
 */
#include "run.h"

#include <stdio.h>
#include <time.h>

#include "backends.h"
#include "errors.h"

/* ---- the table ------------------------------------------------------------------------------- */
#define OPERAND(kind, field, axes, dtype) FIELD(kind, field, axes, dtype)
#define FIELD(kind, field, axes, dtype) {KIND_##kind, CLASS_##dtype, #field, axes, #kind, #dtype},
#define F64(field) {KIND_F64, CLASS_ANY, #field, "", "F64", ""},
#define I64(field) {KIND_I64, CLASS_ANY, #field, "", "I64", ""},
/* The operands of entries that write none out. */
#define OF_ANY ANY
#define OF_FLOAT F
#define X(types) OPERAND(IN_ANY, x, "*", OF_##types)
#define RESULT(types) OPERAND(OUT, out, "*", OF_##types)
#define EW1(name, types, formula) OP(name, X(types) RESULT(types))
#define EW2(name, types, formula) \
    OP(name, X(types) OPERAND(IN_ANY, y, "*", OF_##types) RESULT(types))
#define CMP(name, formula) EW2(name, ANY, formula)
#define RED(name, types, start, combine, map) OP(name, X(types) I64(axes) RESULT(types))
#define ARG(name, better) OP(name, X(ANY) I64(axes) RESULT(ANY))
#define OP(name, operands) static const field name##_fields[] = {operands{.kind = KIND_END}};
#include "ops.def"

/* One plain function type for all ops: the cast of the arguments happens where their type is
 * known. */
#define EACH_OP(name)                                                                           \
    static nd_status dispatch_##name(const nd_backend *backend, int device, const void *args) { \
        _Static_assert(sizeof(name##_args) <= ND_MAX_FIELDS * sizeof(nd_slot), #name);          \
        return backend->name(device, args);                                                     \
    }
#include "ops.def"

const nd_op_info nd_ops[NUM_OPS] = {
#define ENTRY(kind, types, name) \
    {OP_KIND_##kind, TYPES_##types, #kind, #name, name##_fields, dispatch_##name},
#define EW1(name, types, formula) ENTRY(EW1, types, name)
#define EW2(name, types, formula) ENTRY(EW2, types, name)
#define CMP(name, formula) ENTRY(CMP, ANY, name)
#define RED(name, types, start, combine, map) ENTRY(RED, types, name)
#define ARG(name, better) ENTRY(ARG, ANY, name)
#define OP(name, operands) ENTRY(OP, ANY, name)
#include "ops.def"
};

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

/* Operands lie in the first slots, but for the output of EW2 and CMP, which is not shown. */
static void trace_op(const nd_op_info *info, const nd_device *device, const nd_slot *slots,
                     double took) {
    nd_trace line = {.used = 0};
    for (int i = 0; info->fields[i].kind != KIND_END; i++) {
        if (info->fields[i].kind < KIND_OUT && slots[i].array != NULL) {
            nd_trace_operand(&line, info->fields[i].name, slots[i].array);
        }
    }
    nd_trace_run(info->name, device, took, &line);
}

int nd_run_op(nd_op id, nd_device *device, const nd_slot *slots, int64_t work) {
    const nd_op_info *info = &nd_ops[id];
    double start = nd.trace ? nd_microseconds() : 0;
    nd_status status;
    if (work < 4096 && device->backend->is_host) {
        status = info->run(device->backend, device->index, slots);
    } else {
        Py_BEGIN_ALLOW_THREADS
        status = info->run(device->backend, device->index, slots);
        if (status == ND_OK && (nd.sync || nd.trace)) {
            status = device->backend->synchronize(device->index);
        }
        Py_END_ALLOW_THREADS
    }
    if (nd_check(info->name, device, status) < 0) {
        return -1;
    }
    if (nd.trace) {
        trace_op(info, device, slots, nd_microseconds() - start);
    }
    return 0;
}
