/* composite.c - frames, arrays and views of composites (composite.h). */
#include "composite.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { BOUNDARY = 256 }; /* bytes; any vector or bulk load may start at a multiple of it */

/* ---- frames ---------------------------------------------------------------------------------- */
nd_status nd_frame_end(nd_frame *f) {
    for (int i = 0; i < f->count; i++) {
        nd_array_clear(&f->arrays[i]);
    }
    return f->status;
}

void (*nd_run_in_frame)(nd_frame *f, nd_op id, const void *args);
void (*nd_hold_sums)(nd_frame *f, bool hold);

void nd_require(nd_frame *f, bool fits, const char *format, ...) {
    if (fits || f->status != ND_OK) {
        return;
    }
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    f->status = nd_error(ND_EVALUE, "%s", text);
}

/* ---- arrays ---------------------------------------------------------------------------------- */
static nd_array without_memory(nd_dtype dtype, int ndim, const int64_t *shape) {
    nd_array a = {.dtype = dtype, .ndim = ndim};
    for (int i = 0; i < ndim; i++) {
        a.shape[i] = shape[i];
    }
    nd_contiguous_strides(ndim, a.shape, a.strides);
    return a;
}

void nd_output(nd_frame *f, nd_dtype dtype, int ndim, const int64_t *shape, nd_array *out) {
    *out = without_memory(dtype, ndim, shape);
    if (f->status == ND_OK) {
        f->status = nd_array_new(f->device, dtype, ndim, shape, out);
    }
}

nd_array *nd_temporary(nd_frame *f, nd_dtype dtype, int ndim, const int64_t *shape) {
    bool fits = f->count < ND_MAX_TEMPORARIES;
    nd_require(f, fits, "more than %d temporary arrays", ND_MAX_TEMPORARIES);
    nd_array *a = &f->arrays[fits ? f->count++ : f->count];
    nd_output(f, dtype, ndim, shape, a);
    return a;
}

nd_array *nd_keep(nd_frame *f, nd_kept *kept, int i, nd_dtype dtype, int ndim,
                  const int64_t *shape) {
    kept->device = f->device;
    kept->generation = f->device->generation;
    nd_output(f, dtype, ndim, shape, &kept->arrays[i]);
    return &kept->arrays[i];
}

nd_array *nd_take(nd_frame *f, const nd_kept *kept, int i, nd_dtype dtype, int ndim,
                  const int64_t *shape) {
    const nd_array *a = &kept->arrays[i];
    bool fits = a->storage != NULL && a->dtype == dtype && a->ndim == ndim;
    for (int axis = 0; axis < ndim && fits; axis++) {
        fits = a->shape[axis] == shape[axis];
    }
    nd_require(f, fits, "saved: array %d is not of a forward with these operands", i);
    return (nd_array *)a;
}

void nd_free_kept(nd_kept *kept) {
    for (int i = 0; i < ND_MAX_KEPT; i++) {
        nd_array_clear(&kept->arrays[i]);
    }
}

void nd_space_open(nd_frame *f, nd_space *space) {
    int64_t bytes = space->end;
    *space = (nd_space){.block = nd_temporary(f, ND_U8, SHAPE(bytes))};
}

nd_array nd_place(nd_space *space, nd_dtype dtype, int ndim, const int64_t *shape) {
    nd_array a = without_memory(dtype, ndim, shape);
    if (space->block != NULL) {
        a.storage = space->block->storage;
        a.data = (char *)space->block->data + space->at;
    }
    int64_t bytes = nd_size(&a) * (int64_t)nd_dtype_size(dtype);
    space->at += (bytes + BOUNDARY - 1) / BOUNDARY * BOUNDARY;
    space->end = space->end > space->at ? space->end : space->at;
    return a;
}

/* ---- views ----------------------------------------------------------------------------------- */
nd_array nd_transposed(const nd_array *matrix) {
    nd_array t = *matrix;
    for (int axis = 0; axis < 2; axis++) {
        t.shape[axis] = matrix->shape[1 - axis];
        t.strides[axis] = matrix->strides[1 - axis];
    }
    return t;
}

nd_array nd_batch_of_1(const nd_array *matrix) {
    nd_array batch = *matrix;
    batch.ndim = 3;
    batch.shape[0] = 1;
    batch.strides[0] = 0;
    memcpy(batch.shape + 1, matrix->shape, 2 * sizeof *batch.shape);
    memcpy(batch.strides + 1, matrix->strides, 2 * sizeof *batch.strides);
    return batch;
}

nd_array nd_part(const nd_array *a, int64_t offset, int ndim, const int64_t *shape,
                 const int64_t *strides) {
    nd_array part = *a;
    if (a->data != NULL) {
        part.data = (char *)a->data + offset * (int64_t)nd_dtype_size(a->dtype);
    }
    part.ndim = ndim;
    memcpy(part.shape, shape, (size_t)ndim * sizeof *shape);
    memcpy(part.strides, strides, (size_t)ndim * sizeof *strides);
    return part;
}
