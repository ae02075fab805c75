/* exchange.h - NDArray and other libraries: protocols, buffers, pickles (protocols.c), DLPack. */
#ifndef NEEDLE_EXCHANGE_H
#define NEEDLE_EXCHANGE_H

#include "state.h"

#pragma GCC visibility push(hidden)
/* ---- protocols.c ----------------------------------------------------------------------------- */
extern PyMethodDef nd_pickle_functions[]; /* of the module */
nd_method nd_ndarray_numpy, nd_ndarray_tolist, nd_ndarray_reduce;
nd_keyword_method nd_ndarray_array;
PyObject *nd_ndarray_repr(PyObject *self);
PyObject *nd_ndarray_str(PyObject *self);
int nd_ndarray_getbuffer(PyObject *self, Py_buffer *view, int flags);
void nd_ndarray_releasebuffer(PyObject *self, Py_buffer *view);
/* Count what was written into an array through buffers that are handed out. */
void nd_count_outside_writes(nd_state *state, const nd_array *a);
PyObject *nd_array_interface(PyObject *self, void *closure);
PyObject *nd_cuda_array_interface(PyObject *self, void *closure);

/* ---- dlpack.c -------------------------------------------------------------------------------- */
extern PyMethodDef nd_dlpack_functions[]; /* of the module */
nd_method nd_ndarray_dlpack_device;
nd_keyword_method nd_ndarray_dlpack;
#pragma GCC visibility pop
#endif
