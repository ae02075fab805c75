/* device.h - the type Device, and the functions of the module that make one. */
#ifndef NEEDLE_DEVICE_H
#define NEEDLE_DEVICE_H

#include "state.h"

#pragma GCC visibility push(hidden)
int nd_device_init(PyObject *module);
PyObject *nd_device_object(nd_device *device); /* new reference */
/* Device or None (the host) -> *out, made ready. */
int nd_device_from(PyObject *object, nd_device **out);
#pragma GCC visibility pop
#endif
