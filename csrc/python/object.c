/* object.c - the state of the module, and the array object: made around an nd_array, and gone with
 * its reference on the memory.
 *
 * Results are plain NDArrays, also those of a subclass. An NDArray holds no Python object, so it
 * needs no garbage collection of its own; a Python subclass gets it from Python.
 */
#include "object.h"

nd_state nd;

void nd_ndarray_dealloc(PyObject *object) {
    NDArrayObject *self = (NDArrayObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    nd_array_clear(&self->a);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject *nd_wrap(nd_array *a) {
    NDArrayObject *self = PyObject_New(NDArrayObject, nd.ndarray_type);
    if (self == NULL) {
        nd_array_clear(a);
        return NULL;
    }
    self->a = *a;
    self->made = true;
    self->weak_references = NULL;
    return (PyObject *)self;
}

PyObject *nd_wrap_view(const nd_array *geometry) {
    nd_array view;
    nd_array_view(geometry, &view);
    return nd_wrap(&view);
}
