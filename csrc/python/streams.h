/* streams.h - work in the stream of a device: events, asynchronous copies, recorded graphs; kernels
 * of the user's own (kernels.h) begin alike. */
#ifndef NEEDLE_STREAMS_H
#define NEEDLE_STREAMS_H

#include "state.h"

/* How each of these objects begins. */
typedef struct {
    PyObject_HEAD
    nd_device *device;
    uint64_t generation; /* the device's when made; differs after cuda_reset() */
} nd_streamed;

#pragma GCC visibility push(hidden)
/* ---- streams.c ------------------------------------------------------------------------------- */
void *nd_streamed_new(PyTypeObject *type, nd_device *device); /* the rest of it is zero */
void nd_streamed_free(PyObject *object);
bool nd_streamed_stale(const void *object);
/* 0, or -1: made before a cuda_reset(), or its device is lost. */
int nd_streamed_check(nd_state *state, const void *object);

/* ---- download.c, event.c, graph.c, staging.c ------------------------------------------------- */
extern PyType_Spec nd_download_spec, nd_event_spec, nd_graph_spec, nd_staging_spec;
#pragma GCC visibility pop
#endif
