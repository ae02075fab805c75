/* methods.h - the NDArray type (ndarray.c) and the methods that its tables name. */
#ifndef NEEDLE_METHODS_H
#define NEEDLE_METHODS_H

#include "state.h"

#pragma GCC visibility push(hidden)
/* ---- views.c --------------------------------------------------------------------------------- */
nd_method nd_ndarray_permute, nd_ndarray_broadcast_to, nd_ndarray_reshape, nd_ndarray_flip;
nd_method nd_ndarray_view, nd_ndarray_joined;
nd_keyword_method nd_ndarray_as_strided;

/* ---- indexing.c ------------------------------------------------------------------------------ */
nd_method nd_ndarray_getitem, nd_ndarray_at;
PyObject *nd_ndarray_sequence_item(PyObject *self, Py_ssize_t at);
PyObject *nd_ndarray_iter(PyObject *self);
Py_ssize_t nd_ndarray_length(PyObject *self);
int nd_ndarray_setitem(PyObject *self, PyObject *key, PyObject *value);
/* Write an array, a number or an array-like into `to`. */
int nd_store(const nd_array *to, PyObject *value);

/* ---- math.c ---------------------------------------------------------------------------------- */
nd_method nd_ndarray_add, nd_ndarray_subtract, nd_ndarray_multiply, nd_ndarray_divide;
nd_method nd_ndarray_floor_divide, nd_ndarray_remainder, nd_ndarray_matmul;
nd_method nd_ndarray_bitwise_and, nd_ndarray_bitwise_or, nd_ndarray_bitwise_xor;
nd_method nd_ndarray_inplace_add, nd_ndarray_inplace_subtract, nd_ndarray_inplace_multiply;
nd_method nd_ndarray_inplace_divide, nd_ndarray_inplace_floor_divide, nd_ndarray_inplace_remainder;
nd_method nd_ndarray_inplace_bitwise_and, nd_ndarray_inplace_bitwise_or;
nd_method nd_ndarray_inplace_bitwise_xor, nd_ndarray_inplace_matmul;
nd_keyword_method nd_ndarray_power, nd_ndarray_inplace_power;
PyObject *nd_ndarray_negate(PyObject *x);
PyObject *nd_ndarray_absolute(PyObject *x);
PyObject *nd_ndarray_positive(PyObject *x);
PyObject *nd_ndarray_invert(PyObject *x);
PyObject *nd_ndarray_compare(PyObject *x, PyObject *y, int op);
nd_method nd_ndarray_exp, nd_ndarray_log, nd_ndarray_tanh, nd_ndarray_sqrt;
nd_method nd_ndarray_maximum, nd_ndarray_minimum;
nd_keyword_method nd_ndarray_sum, nd_ndarray_max, nd_ndarray_min;
nd_keyword_method nd_ndarray_argmax, nd_ndarray_argmin;

/* ---- values.c -------------------------------------------------------------------------------- */
nd_method nd_ndarray_copy, nd_ndarray_compact, nd_ndarray_is_compact, nd_ndarray_astype;
nd_method nd_ndarray_to, nd_ndarray_fill, nd_ndarray_item, nd_ndarray_numpy;

/* ---- ndarray.c ------------------------------------------------------------------------------- */
int nd_ndarray_init(PyObject *module);
#pragma GCC visibility pop
#endif
