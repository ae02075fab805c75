/* handle.h - Python objects that own an object of a backend: an event, an asynchronous copy, a
 * pinned buffer, a recorded graph, machine code.
 */
#ifndef NEEDLE_HANDLE_H
#define NEEDLE_HANDLE_H

#include "state.h"

/* How each of these objects begins. */
typedef struct {
    PyObject_HEAD
    nd_device *device;
    uint64_t generation; /* the device's when made; differs after cuda_reset() */
} nd_handle;

/* The type needle._C.Name of NameObject, from what_new, what_dealloc and the slots that follow. */
#define ND_HANDLE_TYPE(Name, what, more_flags, doc, ...)                       \
    static PyType_Slot what##_slots[] = {{Py_tp_new, what##_new},              \
                                         {Py_tp_dealloc, what##_dealloc},      \
                                         {Py_tp_doc, doc},                     \
                                         __VA_ARGS__{0, NULL}};                \
    PyType_Spec nd_##what##_spec = {                                           \
        .name = "needle._C." #Name,                                            \
        .basicsize = sizeof(Name##Object),                                     \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (more_flags), \
        .slots = what##_slots,                                                 \
    };

#pragma GCC visibility push(hidden)
/* ---- handle.c -------------------------------------------------------------------------------- */
void *nd_handle_new(PyTypeObject *type, nd_device *device); /* the rest is zero */
void nd_handle_free(PyObject *object);
/* self, or NULL with the exception of a backend that could not make it; op names the call. */
PyObject *nd_handle_made(void *self, const char *op, nd_status status);
bool nd_handle_is_stale(const void *self);
/* 0, or -1: made before a cuda_reset(), or its device is lost. */
int nd_handle_check(const void *self);
/* None, or NULL with the exception of a failed call. */
PyObject *nd_handle_none(const void *self, const char *op, nd_status status);

/* ---- a file for each ------------------------------------------------------------------------- */
extern PyType_Spec nd_async_copy_spec, nd_event_spec, nd_graph_spec, nd_pinned_buffer_spec;
extern PyType_Spec nd_module_spec, nd_kernel_spec; /* kernel.c */
#pragma GCC visibility pop
#endif
