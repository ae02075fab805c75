/* ops.h - the ops as functions on arrays and as functions of the module. */
#ifndef NEEDLE_OPS_H
#define NEEDLE_OPS_H

#include "object.h"

#pragma GCC visibility push(hidden)
/* ---- elementwise.c --------------------------------------------------------------------------- */
PyObject *nd_unary(nd_op id, PyObject *x);
/* into: NULL for a new array, or the array that takes the result in place. Returns NULL without
 * an exception, but *unsupported set, when an operand is nothing that can be computed with. */
PyObject *nd_binary(nd_op id, PyObject *x, PyObject *y, NDArrayObject *into, bool *unsupported);
/* Reduce the last `axes` axes of x; fills *out with a fresh array. */
int nd_reduce(nd_op id, const nd_array *x, int axes, nd_array *out);

/* ---- call.c ---------------------------------------------------------------------------------- */
/* given: what the caller passes, in the order of ops.def, without OUT. */
PyObject *nd_structured(nd_op id, PyObject *const *given);
int nd_callables_init(PyObject *module);
#pragma GCC visibility pop
#endif
