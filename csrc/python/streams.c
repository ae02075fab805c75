/* streams.c - the beginning that Event, Download, Staging and Graph share: a device, and whether
 * what was made on it is still there.
 */
#include "streams.h"

#include <string.h>

#include "errors.h"

void *nd_streamed_new(PyTypeObject *type, nd_device *device) {
    nd_streamed *self = (nd_streamed *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->device = device;
        self->generation = device->generation;
    }
    return self;
}

void nd_streamed_free(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

bool nd_streamed_stale(const void *object) {
    const nd_streamed *self = object;
    return self->generation != self->device->generation;
}

int nd_streamed_check(nd_state *state, const void *object) {
    const nd_streamed *self = object;
    if (nd_streamed_stale(self)) {
        const char *name = Py_TYPE(self)->tp_name, *dot = strrchr(name, '.');
        FAIL(PyExc_RuntimeError, "%s: was made before cuda_reset(); make it anew",
             dot != NULL ? dot + 1 : name); /* a class in Python has no dot */
    }
    return nd_check_alive(state, self->device);
}
