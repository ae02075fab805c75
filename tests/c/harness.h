/* harness.h - arrays, layouts and comparisons for the C tests of the CPU backend.
 *
 * Every array is its own malloc of exactly the bytes that its view spans, so that the address
 * sanitizer sees each access beside it. Reference values are computed in double by plain loops.
 */
#ifndef NEEDLE_TEST_HARNESS_H
#define NEEDLE_TEST_HARNESS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/cpu/cpu.h"

#define UNUSED __attribute__((unused))

static nd_device device = {.backend = &cpu_backend, .index = 0, .generation = 1};
static int passed, failed;

static UNUSED void check(bool good, const char *what, const char *detail) {
    if (good) {
        passed++;
    } else {
        failed++;
        printf("FAILED %s: %s\n", what, detail);
    }
}

static UNUSED int finish(const char *name) {
    printf("%s: %d passed, %d failed\n", name, passed, failed);
    return failed > 0;
}

/* ---- random numbers: the same in each run ---------------------------------------------------- */
static uint64_t random_state = 88172645463325252ull;

static UNUSED double uniform(void) { /* [-1, 1) */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(random_state >> 11) * 0x1p-52 - 1.0;
}

/* ---- arrays ---------------------------------------------------------------------------------- */
typedef enum { PLAIN, SWAPPED, STEPPED, REVERSED, PADDED, REPEATED, LAYOUTS } layout;
static UNUSED const char *const layout_names[] = {"plain",    "swapped", "stepped",
                                                  "reversed", "padded",  "repeated"};

/* SWAPPED: the last two axes exchanged in memory. STEPPED: every second element of the last axis.
 * REVERSED: last axis backwards. PADDED: rows three elements apart. REPEATED: stride 0 in axis 0.
 *  */
static UNUSED nd_array make(nd_dtype dtype, int ndim, const int64_t *shape, layout how) {
    nd_array a = {.dtype = dtype, .ndim = ndim};
    int order[ND_MAX_DIMS];
    for (int i = 0; i < ndim; i++) {
        a.shape[i] = shape[i];
        order[i] = i;
    }
    if (how == SWAPPED && ndim >= 2) {
        order[ndim - 1] = ndim - 2;
        order[ndim - 2] = ndim - 1;
    }
    int64_t span = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        int axis = order[i];
        int64_t stride = how == STEPPED && i == ndim - 1 ? 2 : span;
        a.strides[axis] = how == REPEATED && axis == 0 ? 0 : stride;
        int64_t length = how == REPEATED && axis == 0 ? 1 : shape[axis];
        span = stride * length + (how == PADDED && i == ndim - 1 ? 3 : 0);
    }
    int64_t elements = 0, lowest = 0;
    if (nd_size(&a) > 0) {
        elements = 1;
        for (int i = 0; i < ndim; i++) {
            elements += (shape[i] - 1) * a.strides[i];
        }
    }
    if (how == REVERSED && ndim > 0 && elements > 0) {
        lowest = (shape[ndim - 1] - 1) * a.strides[ndim - 1];
        a.strides[ndim - 1] = -a.strides[ndim - 1];
    }
    size_t bytes = (size_t)elements * nd_dtype_size(dtype);
    void *memory = bytes > 0 ? malloc(bytes) : NULL;
    memset(memory != NULL ? memory : &bytes, memory != NULL ? 0xff : 0, memory != NULL ? bytes : 0);
    if (nd_storage_borrow(&device, memory, bytes, memory, free, &a.storage) != ND_OK ||
        (bytes > 0 && memory == NULL)) {
        printf("FAILED: no memory for the test\n");
        exit(2);
    }
    a.data = (char *)memory + lowest * (int64_t)nd_dtype_size(dtype);
    return a;
}

/* The i-th element in row-major order of the view, as double. */
static UNUSED void *element(const nd_array *a, int64_t i) {
    int64_t offset = 0;
    for (int axis = a->ndim - 1; axis >= 0; axis--) {
        offset += i % a->shape[axis] * a->strides[axis];
        i /= a->shape[axis];
    }
    return cpu_at(a, offset);
}

static UNUSED double get(const nd_array *a, int64_t i) {
    const void *p = element(a, i);
    switch (a->dtype) {
    case ND_F32:
        return *(const float *)p;
    case ND_BF16:
        return cpu_from_bf16(*(const uint16_t *)p);
    case ND_F16:
        return cpu_from_f16(*(const uint16_t *)p);
    case ND_I32:
        return *(const int32_t *)p;
    case ND_I64:
        return (double)*(const int64_t *)p;
    case ND_U16:
        return *(const uint16_t *)p;
    default:
        return *(const uint8_t *)p;
    }
}

static UNUSED void set(nd_array *a, int64_t i, double value) {
    void *p = element(a, i);
    switch (a->dtype) {
    case ND_F32:
        *(float *)p = (float)value;
        break;
    case ND_BF16:
        *(uint16_t *)p = cpu_to_bf16((float)value);
        break;
    case ND_F16:
        *(uint16_t *)p = cpu_to_f16((float)value);
        break;
    case ND_I32:
        *(int32_t *)p = (int32_t)value;
        break;
    case ND_I64:
        *(int64_t *)p = (int64_t)value;
        break;
    case ND_U16:
        *(uint16_t *)p = (uint16_t)value;
        break;
    case ND_BOOL:
        *(uint8_t *)p = value != 0;
        break;
    default:
        *(uint8_t *)p = (uint8_t)value;
    }
}

/* Floats in (-scale, scale), integers in [0, 9], bools. */
static UNUSED void randomise(nd_array *a, double scale) {
    for (int64_t i = 0; i < nd_size(a); i++) {
        double u = uniform();
        set(a, i,
            nd_dtype_is_float(a->dtype) ? u * scale
            : a->dtype == ND_BOOL       ? u > 0
                                        : floor(fabs(u) * 9.99));
    }
}

static UNUSED nd_array random_array(nd_dtype dtype, int ndim, const int64_t *shape, layout how) {
    nd_array a = make(dtype, ndim, shape, how);
    randomise(&a, 2.0);
    return a;
}

static UNUSED nd_array zeros(nd_dtype dtype, int ndim, const int64_t *shape) {
    nd_array a = make(dtype, ndim, shape, PLAIN);
    for (int64_t i = 0; i < nd_size(&a); i++) {
        set(&a, i, 0);
    }
    return a;
}

#define SHAPE(...) ((const int64_t[]){__VA_ARGS__})

/* Half a unit in the last place of the dtype, with room for float32's own errors. */
static UNUSED double rounding(nd_dtype dtype) {
    return dtype == ND_BF16 ? 0.0042 : dtype == ND_F16 ? 0.00055 : 0.0;
}

/* |a - want| <= absolute + (rounding of the dtype + relative) |want|, everywhere. */
static UNUSED void check_close(const nd_array *a, const double *want, double absolute,
                               double relative, const char *what) {
    char detail[256] = "";
    bool good = true;
    for (int64_t i = 0; i < nd_size(a) && good; i++) {
        double have = get(a, i);
        double bound = absolute + (rounding(a->dtype) + relative) * fabs(want[i]);
        bool same = (isnan(have) && isnan(want[i])) || have == want[i];
        if (!same && !(fabs(have - want[i]) <= bound)) {
            snprintf(detail, sizeof detail, "%s, element %lld of %lld is %.9g, not %.9g",
                     nd_dtype_name(a->dtype), (long long)i, (long long)nd_size(a), have, want[i]);
            good = false;
        }
    }
    check(good, what, detail);
}

static UNUSED void check_ok(nd_status status, const char *what) {
    check(status == ND_OK, what, status == ND_OK ? "" : nd_last_error());
}

static UNUSED void check_refused(nd_status status, nd_status want, const char *part,
                                 const char *what) {
    check(status == want && strstr(nd_last_error(), part) != NULL, what, nd_last_error());
}

static UNUSED double *doubles(int64_t n) {
    double *p = calloc((size_t)(n > 0 ? n : 1), sizeof *p);
    if (p == NULL) {
        printf("FAILED: no memory for the test\n");
        exit(2);
    }
    return p;
}

#endif
