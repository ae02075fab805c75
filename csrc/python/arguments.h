/* arguments.h - convert Python arguments: dtypes, shapes, numbers (arguments.c); NumPy's and other
 * array-likes (array_likes.c). */
#ifndef NEEDLE_ARGUMENTS_H
#define NEEDLE_ARGUMENTS_H

#include "run.h"

typedef struct {
    bool is_float, is_bool;
    int beyond;      /* of a whole number that no int64 holds: 1 or -1, its sign */
    int64_t integer; /* of any other whole number */
    double value;    /* nearest double; infinity for an int beyond double's range */
} nd_number;

#pragma GCC visibility push(hidden)
/* ---- arguments.c ----------------------------------------------------------------------------- */
/* Is the exception that is set MemoryError? It says nothing about an argument, and stays. */
bool nd_is_out_of_memory(void);
int nd_dtype_from(PyObject *object, nd_dtype *out);
int nd_int64_from(PyObject *object, const char *what, int64_t *out);
int nd_shape_from(PyObject *object, const char *what, int *ndim, int64_t *values);
/* f((2, 3)) and f(2, 3) mean the same. */
int nd_shape_from_arguments(PyObject *arguments, const char *what, int *ndim, int64_t *values);
/* Axes counted from either end -> 0 ... ndim - 1, each at most once. */
int nd_normalise_axes(const char *op, int ndim, int count, int64_t *axes);
PyObject *nd_pack_shape(int ndim, const int64_t *values);
/* An NDArray that is alive, for the operand of an op. */
int nd_check_operand(const char *op, const char *operand, PyObject *object);
bool nd_is_exact(const nd_number *number); /* is `value` the number itself? */
/* OverflowError unless an array of `dtype` holds it: rounded when that is a float, truncated when
 * the number is one. ValueError for NaN among integers. Any number is a bool. */
int nd_check_number(const char *op, const nd_number *number, nd_dtype dtype);
/* The number of an F64 or I64 operand. */
int nd_take_number(const char *op, const field *f, PyObject *object, nd_slot *slot);

/* ---- array_likes.c --------------------------------------------------------------------------- */
int nd_array_likes_init(void);
bool nd_is_numpy_array(PyObject *object);
static inline bool nd_is_array_like(PyObject *object) {
    return nd_is_numpy_array(object) || PyList_Check(object);
}
/* A Python or NumPy number: 1; 0 when it is something else. */
int nd_number_from(PyObject *object, nd_number *out);
/* Any array-like into a fresh array. natural: keep NumPy's dtype where we have it (float64
 * becomes float32), else convert to dtype. */
int nd_from_object(PyObject *object, bool natural, nd_dtype dtype, nd_device *device,
                   nd_array *out);
/* The same for f(object, device=None, dtype=None): on object's own device where it has one. */
int nd_from_arguments(PyObject *object, PyObject *device, PyObject *dtype, nd_dtype otherwise,
                      bool natural, nd_array *out);
/* A NumPy array with a copy of the elements; bfloat16, which NumPy lacks, becomes float32. */
PyObject *nd_to_numpy(const nd_array *a);
#pragma GCC visibility pop
#endif
