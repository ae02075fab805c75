/* backends.h - the backends: loading them, and the devices that they have. */
#ifndef NEEDLE_BACKENDS_H
#define NEEDLE_BACKENDS_H

#include "state.h"

/* Call a function of a device's backend; the second form without the GIL. */
#define ND_CALL(device, function, ...) (device)->backend->function((device)->index, ##__VA_ARGS__)
#define ND_CALL_UNLOCKED(status, device, function, ...)    \
    do {                                                   \
        Py_BEGIN_ALLOW_THREADS                             \
        status = ND_CALL(device, function, ##__VA_ARGS__); \
        Py_END_ALLOW_THREADS                               \
    } while (0)

#pragma GCC visibility push(hidden)
int nd_backends_init(void);
const char *nd_library_path(nd_backend_id id); /* where the file of a backend is looked for */

/* The device whose memory the host reads, ready since import. */
nd_device *nd_host(void);
nd_device *nd_device_at(nd_backend_id id, int64_t index); /* NULL: no such index */
nd_device *nd_device_of_dlpack(int type, int64_t index);  /* NULL: no such device */
int nd_dlpack_type(const nd_device *device);              /* DLPack's number */
int nd_device_slot(const nd_device *device);              /* 0 ... of all that can be named */
const char *nd_device_name(const nd_device *device);      /* "cuda", also when not loaded */
const char *nd_device_title(const nd_device *device);     /* "CUDA" */
const char *nd_device_text(const nd_device *device, char text[24]); /* "cuda(1)" */
int nd_device_count(nd_backend_id id); /* 0 when the backend cannot be had */

/* NULL, or why arrays cannot live there. Loads the backend at the first call. */
const char *nd_device_missing(nd_device *device);
/* Make the device ready to allocate and run: load the backend, open the device. A device that is
 * not there raises RuntimeError with the reason. */
int nd_device_ready(nd_device *device);
/* Free everything on the open devices of a backend and open them anew. */
int nd_backend_reset(nd_backend_id id);
#pragma GCC visibility pop
#endif
