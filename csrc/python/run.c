/* run.c - running an op: the table that ops.def expands to, dispatch with the GIL given up, trace.
 *
 * Whoever calls nd_run_op has given the operands the layout that ops.def promises to a kernel.
 */
#include "run.h"

#include <stdio.h>
#include <time.h>

#include "backends.h"
#include "errors.h"

/* ---- the table ------------------------------------------------------------------------------- */
#define OPERAND(kind, field, axes, dtype) {KIND_##kind, #field, axes, CLASS_##dtype},
#define F64(field) {KIND_F64, #field, "", CLASS_ANY},
#define I64(field) {KIND_I64, #field, "", CLASS_ANY},
#define OP(name, operands) \
    static const field name##_fields[] = {operands{KIND_END, NULL, NULL, CLASS_ANY}};
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
#define EW1(name, types, formula) {OP_KIND_EW1, TYPES_##types, #name, NULL, dispatch_##name},
#define EW2(name, types, formula) {OP_KIND_EW2, TYPES_##types, #name, NULL, dispatch_##name},
#define CMP(name, formula) {OP_KIND_CMP, TYPES_ANY, #name, NULL, dispatch_##name},
#define RED(name, types, start, combine, map) \
    {OP_KIND_RED, TYPES_##types, #name, NULL, dispatch_##name},
#define ARG(name, better) {OP_KIND_ARG, TYPES_ANY, #name, NULL, dispatch_##name},
#define OP(name, operands) {OP_KIND_OP, TYPES_ANY, #name, name##_fields, dispatch_##name},
#include "ops.def"
};

/* ---- running --------------------------------------------------------------------------------- */
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

double nd_microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int describe(char *text, size_t capacity, const char *name, const nd_array *a) {
    int used = snprintf(text, capacity, " %s:%s(", name, nd_dtype_name(a->dtype));
    for (int i = 0; i < a->ndim; i++) {
        used += snprintf(text + used, (size_t)used < capacity ? capacity - (size_t)used : 0,
                         "%s%lld", i ? "," : "", (long long)a->shape[i]);
    }
    return used + snprintf(text + used, (size_t)used < capacity ? capacity - (size_t)used : 0, ")");
}

void nd_show(shown *s, const char *name, const nd_array *array) {
    if (array != NULL && s->count < ND_MAX_FIELDS) {
        s->list[s->count].name = name;
        s->list[s->count++].array = array;
    }
}

void nd_trace_run(const char *op, const nd_device *device, double took, const shown *s) {
    char text[1024], name[24];
    int used = 0;
    text[0] = 0;
    for (int i = 0; i < s->count && used < (int)sizeof text - 200; i++) {
        used +=
            describe(text + used, sizeof text - (size_t)used, s->list[i].name, s->list[i].array);
    }
    fprintf(stderr, "needle: %-22s %-7s %10.1f us %s\n", op, nd_device_text(device, name), took,
            text);
}

void nd_trace_copy(nd_state *state, const char *op, const char *operand, const nd_array *a) {
    if (state->trace) {
        char text[256];
        describe(text, sizeof text, operand, a);
        fprintf(stderr, "needle: %-22s copies its operand%s: not in the layout it needs\n", op,
                text);
    }
}

int nd_run_op(nd_state *state, nd_op id, nd_device *device, const nd_slot *slots, int64_t work,
              const shown *s) {
    const nd_op_info *info = &nd_ops[id];
    double start = state->trace ? nd_microseconds() : 0;
    nd_status status;
    if (work < 4096 && device->backend->is_host) {
        status = info->run(device->backend, device->index, slots);
    } else {
        Py_BEGIN_ALLOW_THREADS
        status = info->run(device->backend, device->index, slots);
        if (status == ND_OK && (state->sync || state->trace)) {
            status = device->backend->synchronize(device->index);
        }
        Py_END_ALLOW_THREADS
    }
    if (nd_check(state, info->name, device, status) < 0) {
        return -1;
    }
    if (state->trace) {
        nd_trace_run(info->name, device, nd_microseconds() - start, s);
    }
    return 0;
}
