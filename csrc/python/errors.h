/* errors.h - a failed nd_status becomes an exception; a fatal fault ends the process. */
#ifndef NEEDLE_ERRORS_H
#define NEEDLE_ERRORS_H

#include "state.h"

#pragma GCC visibility push(hidden)
int nd_errors_init(PyObject *module);
/* Raise the exception of a failed call. op may be NULL; device NULL: the message is the core's,
 * else the backend's. A fatal fault is remembered here. */
PyObject *nd_raise(const char *op, nd_device *device, nd_status status);
/* 0, or -1 with that exception. */
int nd_check(const char *op, nd_device *device, nd_status status);
/* None, or NULL with that exception. */
PyObject *nd_none_or_raise(const char *op, nd_device *device, nd_status status);
/* 0, or -1 with CudaFatalError after a fatal fault; host arrays stay usable. */
int nd_check_alive(const nd_device *device);
#pragma GCC visibility pop
#endif
