/* copy.c - arrays made, filled, assigned and copied, within a device and between devices.
 *
 * A write never lands in a broadcast view, and a source that overlaps its target is copied first.
 */
#include <string.h>

#include "backends.h"
#include "errors.h"
#include "run.h"

int nd_run_assign(const nd_array *to, const nd_array *from) {
    int64_t size = nd_size(to);
    if (size == 0) {
        return 0;
    }
    nd_slot slots[2] = {{.array = (nd_array *)to}, {.array = (nd_array *)from}};
    return nd_run_op(OP_assign, to->storage->device, slots, size);
}

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

int nd_fill(const nd_array *to, double value) {
    if (nd_check_live("fill", "to", to) < 0 || nd_check_writable("fill", "to", to) < 0) {
        return -1;
    }
    int64_t size = nd_size(to);
    if (size == 0) {
        return 0;
    }
    nd_count_write(to);
    nd_slot slots[2] = {{.array = (nd_array *)to}, {.real = value}};
    return nd_run_op(OP_fill, to->storage->device, slots, size);
}

int nd_new_array(const char *op, nd_device *device, nd_dtype dtype, int ndim, const int64_t *shape,
                 nd_array *out) {
    return nd_check(op, NULL, nd_array_new(device, dtype, ndim, shape, out));
}

int nd_copy(const nd_array *a, nd_dtype dtype, nd_array *out) {
    if (nd_check_live("copy", "source", a) < 0 ||
        nd_new_array("copy", a->storage->device, dtype, a->ndim, a->shape, out) < 0) {
        return -1;
    }
    if (nd_run_assign(out, a) < 0) {
        nd_array_clear(out);
        return -1;
    }
    return 0;
}

int nd_contiguous(const nd_array *a, nd_array *out) {
    if (!nd_is_contiguous(a)) {
        return nd_copy(a, a->dtype, out);
    }
    nd_array_view(a, out);
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

void nd_drop_first_axis(nd_array *a) {
    a->ndim--;
    memmove(a->shape, a->shape + 1, (size_t)a->ndim * sizeof *a->shape);
    memmove(a->strides, a->strides + 1, (size_t)a->ndim * sizeof *a->strides);
}

int nd_assign(const char *op, const nd_array *to, const nd_array *from) {
    if (nd_check_live(op, "to", to) < 0 || nd_check_live(op, "source", from) < 0 ||
        nd_check_writable(op, "to", to) < 0) {
        return -1;
    }
    /* NumPy drops leading axes of size 1 of the source. */
    nd_array source = *from;
    while (source.ndim > to->ndim && source.shape[0] == 1) {
        nd_drop_first_axis(&source);
    }
    nd_array wide;
    nd_status status = nd_broadcast_to(&source, to->ndim, to->shape, &wide);
    if (status != ND_OK) {
        FAIL(PyExc_ValueError, "%s: source: %s", op, nd_last_error());
    }
    int result;
    nd_count_write(to);
    if (nd_same_geometry(to, &wide)) {
        result = 0;
    } else if (nd_may_overlap(to, &wide)) {
        nd_array copy;
        result = nd_copy(&source, source.dtype, &copy);
        if (result == 0) {
            nd_array_clear(&wide);
            nd_broadcast_to(&copy, to->ndim, to->shape, &wide);
            nd_array_clear(&copy);
            result = nd_run_assign(to, &wide);
        }
    } else {
        result = nd_run_assign(to, &wide);
    }
    nd_array_clear(&wide);
    return result;
}

/* ---- between devices ------------------------------------------------------------------------- */
static nd_status transfer(const nd_array *from, const nd_array *to) {
    nd_device *source = from->storage->device, *target = to->storage->device;
    size_t bytes = (size_t)nd_size(from) * nd_dtype_size(from->dtype);
    nd_status status;
    if (source->backend->is_host) {
        status = target->backend->upload(target->index, to->data, from->data, bytes);
        return status == ND_OK ? ND_OK : nd_error(status, "%s", target->backend->last_error());
    }
    if (target->backend->is_host) {
        status = source->backend->download(source->index, to->data, from->data, bytes);
        return status == ND_OK ? ND_OK : nd_error(status, "%s", source->backend->last_error());
    }
    nd_array host;
    ND_TRY(nd_array_new(nd_host(), from->dtype, from->ndim, from->shape, &host));
    status = transfer(from, &host);
    if (status == ND_OK) {
        status = transfer(&host, to);
    }
    nd_array_clear(&host);
    return status;
}

int nd_to_device(const nd_array *a, nd_device *device, nd_array *out) {
    if (nd_check_live("to", "x", a) < 0) {
        return -1;
    }
    if (a->storage->device == device) {
        nd_array_view(a, out);
        return 0;
    }
    nd_array compact;
    if (nd_contiguous(a, &compact) < 0) {
        return -1;
    }
    nd_status status = nd_array_new(device, a->dtype, a->ndim, a->shape, out);
    if (status == ND_OK && nd_size(a) > 0) {
        Py_BEGIN_ALLOW_THREADS
        status = transfer(&compact, out);
        Py_END_ALLOW_THREADS
        if (status != ND_OK) {
            nd_array_clear(out);
        }
    }
    nd_array_clear(&compact);
    return nd_check("to", NULL, status);
}
