/* ndarray.h - the NDArray type. */
#ifndef NEEDLE_NDARRAY_H
#define NEEDLE_NDARRAY_H

#include "state.h"

#pragma GCC visibility push(hidden)

int nd_ndarray_init(PyObject *module, nd_state *state);

#pragma GCC visibility pop

#endif
