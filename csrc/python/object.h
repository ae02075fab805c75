/* object.h - the array object of Python: an nd_array that it owns. */
#ifndef NEEDLE_OBJECT_H
#define NEEDLE_OBJECT_H

#include "state.h"

typedef struct {
    PyObject_HEAD
    nd_array a;
    bool made; /* what an array is, shape and memory, stays: an op reads it while others run */
    PyObject *weak_references;
} NDArrayObject;

static inline bool nd_is_ndarray(nd_state *state, PyObject *object) {
    return PyObject_TypeCheck(object, state->ndarray_type);
}
static inline nd_array *nd_array_of(PyObject *object) { return &((NDArrayObject *)object)->a; }

#pragma GCC visibility push(hidden)
void nd_ndarray_dealloc(PyObject *object);
nd_state *nd_state_of_type(PyTypeObject *type);  /* of NDArray or a subclass; NULL: neither */
nd_state *nd_state_of(PyObject *object);         /* NULL when it is no NDArray; no exception */
PyObject *nd_wrap(nd_state *state, nd_array *a); /* takes over a's reference */
PyObject *nd_wrap_view(nd_state *state, const nd_array *geometry); /* borrows its storage */
#pragma GCC visibility pop
#endif
