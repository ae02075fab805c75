/* object.h - the array object of Python: an nd_array that it owns. */
#ifndef NEEDLE_OBJECT_H
#define NEEDLE_OBJECT_H

#include "state.h"

typedef struct {
    PyObject_HEAD
    nd_array a;
    bool made; /* shape and memory stay: an op reads them while others run */
    PyObject *weak_references;
} NDArrayObject;

static inline bool nd_is_ndarray(PyObject *object) {
    return PyObject_TypeCheck(object, nd.ndarray_type);
}
static inline nd_array *nd_array_of(PyObject *object) { return &((NDArrayObject *)object)->a; }

#pragma GCC visibility push(hidden)
void nd_ndarray_dealloc(PyObject *object);
PyObject *nd_wrap(nd_array *a);                   /* takes over a's reference */
PyObject *nd_wrap_view(const nd_array *geometry); /* borrows its storage */
#pragma GCC visibility pop
#endif
