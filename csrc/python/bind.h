/* bind.h - what the three files that make rows callable share: the table of rows, and running one.
 */
#ifndef NEEDLE_BIND_H
#define NEEDLE_BIND_H

#include "python.h"

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
    KIND_F64,
    KIND_I64,
    KIND_END,
} field_kind;

typedef enum {
    CLASS_F,
    CLASS_f4,
    CLASS_i4,
    CLASS_i8,
    CLASS_ANY
} dtype_class;
typedef enum {
    TYPES_ANY,
    TYPES_FLOAT
} row_types;
typedef enum {
    ROW_KIND_EW1,
    ROW_KIND_EW2,
    ROW_KIND_CMP,
    ROW_KIND_RED,
    ROW_KIND_ARG,
    ROW_KIND_OP
} row_kind;

typedef struct {
    field_kind kind;
    const char *name;
    const char *axes;
    dtype_class dtype;
} field;

typedef struct {
    row_kind kind;
    row_types types;
    const char *name;
    const field *fields; /* of an OP; ends with KIND_END */
    nd_status (*run)(const nd_backend *backend, int device, const void *arguments);
} row_info;

/* Return -1 with an exception. */
#define FAIL(exception, ...)                  \
    do {                                      \
        PyErr_Format(exception, __VA_ARGS__); \
        return -1;                            \
    } while (0)

/* Operands that a trace line shows. */
typedef struct {
    int count;
    struct {
        const char *name;
        const nd_array *array;
    } list[ND_MAX_FIELDS];
} shown;

/* ---- bind.c ---------------------------------------------------------------------------------- */
extern const row_info nd_rows[NUM_ROWS] ND_HIDDEN;
void nd_show(shown *s, const char *name, const nd_array *array) ND_HIDDEN;
void nd_trace_copy(nd_state *state, const char *op, const char *operand,
                   const nd_array *a) ND_HIDDEN;
/* `work` is the number of elements touched: a small CPU op is over sooner than the GIL could be
 * given to anybody. */
int nd_run_row(nd_state *state, nd_row id, nd_device *device, const nd_slot *slots, int64_t work,
               const shown *s) ND_HIDDEN;
/* to = from, same shape, no overlap to care about. */
int nd_run_assign(nd_state *state, const nd_array *to, const nd_array *from) ND_HIDDEN;
int nd_new_array(nd_state *state, const char *op, nd_device *device, nd_dtype dtype, int ndim,
                 const int64_t *shape, nd_array *out) ND_HIDDEN;
bool nd_same_geometry(const nd_array *a, const nd_array *b) ND_HIDDEN;
/* Elements that share memory within one view cannot be written one by one. */
int nd_check_writable(const char *op, const char *operand, const nd_array *a) ND_HIDDEN;
int nd_ndarray_operand(nd_state *state, const char *op, const char *operand,
                       PyObject *object) ND_HIDDEN;
int nd_take_number(const row_info *row, const field *f, PyObject *object, nd_slot *slot) ND_HIDDEN;

/* ---- bind_structured.c ----------------------------------------------------------------------- */
PyObject *nd_call_structured(nd_state *state, nd_row id, PyObject *const *given) ND_HIDDEN;

#endif
