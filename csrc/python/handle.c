/* handle.c - the head of Event, AsyncCopy, PinnedBuffer, Graph, Module and Kernel: a device, and a
 * check that the object made on it still exists.
 */
#include "handle.h"

#include <string.h>

#include "errors.h"

void *nd_handle_new(PyTypeObject *type, nd_device *device) {
    nd_handle *self = (nd_handle *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->device = device;
        self->generation = device->generation;
    }
    return self;
}

void nd_handle_free(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject *nd_handle_made(void *self, const char *op, nd_status status) {
    nd_handle *handle = self;
    if (nd_check(op, handle->device, status) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

bool nd_handle_is_stale(const void *self) {
    const nd_handle *handle = self;
    return handle->generation != handle->device->generation;
}

int nd_handle_check(const void *self) {
    const nd_handle *handle = self;
    if (nd_handle_is_stale(self)) {
        const char *name = Py_TYPE(self)->tp_name, *dot = strrchr(name, '.');
        FAIL(PyExc_RuntimeError, "%s: was made before cuda_reset(); make it anew",
             dot != NULL ? dot + 1 : name); /* a class in Python has no dot */
    }
    return nd_check_alive(handle->device);
}

PyObject *nd_handle_none(const void *self, const char *op, nd_status status) {
    const nd_handle *handle = self;
    return nd_none_or_raise(op, handle->device, status);
}
