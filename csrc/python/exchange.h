/* exchange.h - NDArray and other libraries: the buffer protocol (buffer.c), DLPack. */
#ifndef NEEDLE_EXCHANGE_H
#define NEEDLE_EXCHANGE_H

#include "state.h"

#pragma GCC visibility push(hidden)
/* ---- buffer.c -------------------------------------------------------------------------------- */
int nd_ndarray_getbuffer(PyObject *self, Py_buffer *view, int flags);
void nd_ndarray_releasebuffer(PyObject *self, Py_buffer *view);

/* ---- dlpack.c -------------------------------------------------------------------------------- */
extern PyMethodDef nd_dlpack_functions[]; /* of the module */
nd_method nd_ndarray_dlpack_device;
nd_keyword_method nd_ndarray_dlpack;
#pragma GCC visibility pop
#endif
