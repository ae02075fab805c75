/* ndarray.h - what the files of the NDArray type share: its slots and its tables of methods. */
#ifndef NEEDLE_NDARRAY_H
#define NEEDLE_NDARRAY_H

#include "python.h"

#define KEYWORD_METHOD(function) \
    (PyCFunction)(void (*)(void)) function, METH_VARARGS | METH_KEYWORDS

/* ---- ndarray.c ------------------------------------------------------------------------------- */
PyObject *nd_wrap_view(nd_state *state, const nd_array *geometry) ND_HIDDEN; /* borrows storage */
int nd_int64_from(PyObject *object, const char *what, int64_t *out) ND_HIDDEN;
/* f((2, 3)) and f(2, 3) mean the same. */
int nd_shape_from_arguments(PyObject *arguments, const char *what, int *ndim,
                            int64_t *values) ND_HIDDEN;
/* Axes counted from either end -> 0 ... ndim - 1, each at most once. */
int nd_normalise_axes(const char *op, int ndim, int count, int64_t *axes) ND_HIDDEN;

/* ---- ndarray_views.c ------------------------------------------------------------------------- */
extern PyMethodDef nd_view_methods[] ND_HIDDEN;
extern PyType_Spec nd_flat_spec ND_HIDDEN;
int nd_check_bounds(const char *op, const nd_array *a) ND_HIDDEN; /* all inside the storage? */
bool nd_reshape_strides(const nd_array *a, nd_array *view) ND_HIDDEN;
int nd_store(nd_state *state, const nd_array *to, PyObject *value) ND_HIDDEN;
PyObject *nd_ndarray_getitem(PyObject *self, PyObject *key) ND_HIDDEN;
int nd_ndarray_setitem(PyObject *self, PyObject *key, PyObject *value) ND_HIDDEN;
PyObject *nd_ndarray_sequence_item(PyObject *self, Py_ssize_t at) ND_HIDDEN;
PyObject *nd_ndarray_iter(PyObject *self) ND_HIDDEN;
Py_ssize_t nd_ndarray_length(PyObject *self) ND_HIDDEN;
PyObject *nd_ndarray_flat(PyObject *self, void *closure) ND_HIDDEN;

/* ---- ndarray_math.c -------------------------------------------------------------------------- */
extern PyMethodDef nd_math_methods[] ND_HIDDEN;
PyObject *nd_ndarray_add(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_subtract(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_multiply(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_divide(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_power(PyObject *x, PyObject *y, PyObject *modulus) ND_HIDDEN;
PyObject *nd_ndarray_inplace_add(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_inplace_subtract(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_inplace_multiply(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_inplace_divide(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_inplace_power(PyObject *x, PyObject *y, PyObject *modulus) ND_HIDDEN;
PyObject *nd_ndarray_negate(PyObject *x) ND_HIDDEN;
PyObject *nd_ndarray_absolute(PyObject *x) ND_HIDDEN;
PyObject *nd_ndarray_positive(PyObject *x) ND_HIDDEN;
PyObject *nd_ndarray_matmul(PyObject *x, PyObject *y) ND_HIDDEN;
PyObject *nd_ndarray_compare(PyObject *x, PyObject *y, int op) ND_HIDDEN;

/* ---- ndarray_interop.c ----------------------------------------------------------------------- */
extern PyMethodDef nd_interop_methods[] ND_HIDDEN;
PyObject *nd_ndarray_repr(PyObject *self) ND_HIDDEN;
PyObject *nd_ndarray_str(PyObject *self) ND_HIDDEN;
int nd_ndarray_getbuffer(PyObject *self, Py_buffer *view, int flags) ND_HIDDEN;
void nd_ndarray_releasebuffer(PyObject *self, Py_buffer *view) ND_HIDDEN;
PyObject *nd_array_interface(PyObject *self, void *closure) ND_HIDDEN;
PyObject *nd_cuda_array_interface(PyObject *self, void *closure) ND_HIDDEN;

/* ---- ndarray_dlpack.c ------------------------------------------------------------------------ */
extern PyMethodDef nd_dlpack_methods[] ND_HIDDEN;

#endif
