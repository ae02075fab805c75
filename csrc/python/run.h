/* run.h - running an op: the table of ops.def, dispatch and trace (run.c), copies (copy.c). */
#ifndef NEEDLE_RUN_H
#define NEEDLE_RUN_H

#include "state.h"

typedef enum {
    KIND_IN,
    KIND_IN_ANY,
    KIND_IN_ROWS,
    KIND_IN_MATRIX,
    KIND_OPT,
    KIND_IO,
    KIND_IO_ANY,
    KIND_IO_ROWS,
    KIND_IO_OPT,
    KIND_OUT,
    KIND_NEW,
    KIND_KEEP,
    KIND_KEPT,
    KIND_F64,
    KIND_I64,
    KIND_END,
} field_kind;

static inline bool nd_is_number(field_kind kind) { return kind == KIND_F64 || kind == KIND_I64; }
static inline bool nd_is_changed(field_kind kind) {
    return kind == KIND_IO || kind == KIND_IO_ANY || kind == KIND_IO_ROWS || kind == KIND_IO_OPT;
}
static inline bool nd_may_be_none(field_kind kind) {
    return kind == KIND_OPT || kind == KIND_IO_OPT;
}

typedef enum {
    CLASS_F,
    CLASS_f4,
    CLASS_i4,
    CLASS_i8,
    CLASS_u1,
    CLASS_b1,
    CLASS_T,
    CLASS_W, /* of elementwise ops of type WHOLE */
    CLASS_ANY
} dtype_class;
typedef enum { TYPES_ANY, TYPES_FLOAT, TYPES_WHOLE } op_types;
typedef enum {
    OP_KIND_EW1,
    OP_KIND_EW2,
    OP_KIND_CMP,
    OP_KIND_RED,
    OP_KIND_ARG,
    OP_KIND_OP
} op_kind;

typedef struct {
    field_kind kind;
    dtype_class dtype;
    const char *name, *axes;
    const char *kind_text, *dtype_text; /* as ops.def spells them */
} field;

typedef struct {
    op_kind kind;
    op_types types; /* of those that are computed elementwise */
    const char *kind_text, *name;
    const field *fields; /* ends with KIND_END */
    nd_status (*run)(nd_device *device, const void *arguments);
    bool is_composite; /* runs other ops; its message is in _C, not in a backend */
} nd_op_info;

/* A line of NEEDLE_TRACE=1: operands with their dtypes and shapes. */
typedef struct {
    size_t used;
    char text[1024];
} nd_trace;

#pragma GCC visibility push(hidden)
/* ---- run.c ----------------------------------------------------------------------------------- */
extern const nd_op_info nd_ops[NUM_OPS];
/* Has the view the layout of an operand of this kind? Strides of axes of size 1 say nothing, so
 * they are set to what a kernel expects to see. */
bool nd_has_layout(field_kind kind, nd_array *a);
/* Kernels of contiguous operands may read whole vectors, from a boundary of the backend's on. */
bool nd_is_aligned(const nd_device *device, field_kind kind, const nd_array *a);
/* Set nd_run_in_frame of composite.h. */
void nd_run_init(void);
/* Run the op on a device and trace it. `work` is the number of elements touched: small CPU
 * ops keep the GIL: releasing it costs more. */
int nd_run_op(nd_op id, nd_device *device, const nd_slot *slots, int64_t work);
void nd_trace_operand(nd_trace *line, const char *name, const nd_array *a);
/* Print the line of an op or kernel that took so many microseconds, by this clock. */
void nd_trace_run(const char *name, const nd_device *device, double took, const nd_trace *line);
double nd_microseconds(void);
/* NEEDLE_TRACE=1: say that an operand is copied. */
void nd_trace_copy(const char *op, const char *operand, const nd_array *a);
/* 0, or -1: the memory went with a cuda_reset(), or its device is lost. */
int nd_check_live(const char *op, const char *operand, const nd_array *a);

/* Say that an array which was there before is written to. */
static inline void nd_count_write(const nd_array *a) { a->storage->written = ++nd.writes; }

/* ---- copy.c ---------------------------------------------------------------------------------- */
int nd_new_array(const char *op, nd_device *device, nd_dtype dtype, int ndim, const int64_t *shape,
                 nd_array *out);
/* Elements that share memory within one view cannot be written one by one. */
int nd_check_writable(const char *op, const char *operand, const nd_array *a);
bool nd_same_geometry(const nd_array *a, const nd_array *b);
int nd_fill(const nd_array *to, double value);
/* to = from: same device, broadcasts, converts, safe when the two overlap. op names the caller. */
int nd_assign(const char *op, const nd_array *to, const nd_array *from);
/* Without its first axis, of size 1: borrowed as before. */
void nd_drop_first_axis(nd_array *a);
/* to = from, same shape, no overlap to care about. */
int nd_run_assign(const nd_array *to, const nd_array *from);
/* A contiguous, writable copy on the same device. */
int nd_copy(const nd_array *a, nd_dtype dtype, nd_array *out);
/* The array itself when it is contiguous, else a copy that is. */
int nd_contiguous(const nd_array *a, nd_array *out);
/* The array itself where it lives there, else a contiguous copy that does. */
int nd_to_device(const nd_array *a, nd_device *device, nd_array *out);
#pragma GCC visibility pop
#endif
