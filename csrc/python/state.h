/* state.h - the ops, the backends and the state of the module.
 *
 * In this folder a function that returns PyObject * or int follows Python's rule: NULL or -1 with
 * an exception set. Functions below the folder return nd_status instead.
 */
#ifndef NEEDLE_STATE_H
#define NEEDLE_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "composite.h"

/* Python's tables dictate the parameters of the functions in them. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define ND_MAX_FIELDS 48  /* operands of an op */
#define ND_MAX_DEVICES 64 /* of a backend that can be named */

/* The backends, the host's first. A further one is a folder and its line here:
 *     name in Python, name in messages, DLPack's number for its memory,
 *     its table when it is linked into _C, else the file beside _C that exports
 *     needle_backend(). */
#define ND_BACKENDS(X)                   \
    X(cpu, "CPU", 1, &cpu_backend, NULL) \
    X(cuda, "CUDA", 2, NULL, "_cuda.so")

typedef enum {
#define X(name, title, dlpack, table, file) BACKEND_##name,
    ND_BACKENDS(X)
#undef X
        NUM_BACKENDS
} nd_backend_id;

/* The one state of the process, guarded by the GIL. */
typedef struct {
    PyTypeObject *ndarray_type, *device_type, *handle_type, *module_type, *parameters_type;
    PyObject *cuda_error, *cuda_fatal_error;
    PyObject *devices[NUM_BACKENDS * ND_MAX_DEVICES]; /* Device objects, once asked for */
    /* Of each device that is recording a Graph, the modules that the graph launches from. */
    PyObject *recorded[NUM_BACKENDS * ND_MAX_DEVICES];
    PyObject *field_names[NUM_OPS][ND_MAX_FIELDS]; /* interned */
    nd_storage *nothing;                           /* of arrays that are not made yet */
    uint64_t writes;                               /* into arrays that were there */
    bool trace;                                    /* NEEDLE_TRACE=1 */
    bool sync;                                     /* NEEDLE_SYNC=1 */
} nd_state;
extern nd_state nd __attribute__((visibility("hidden"))); /* in object.c */

/* Return -1 with an exception. */
#define FAIL(exception, ...)                  \
    do {                                      \
        PyErr_Format(exception, __VA_ARGS__); \
        return -1;                            \
    } while (0)

/* The two signatures of methods and of functions of the module. */
typedef PyObject *nd_method(PyObject *self, PyObject *argument);
typedef PyObject *nd_keyword_method(PyObject *self, PyObject *arguments, PyObject *keywords);
#define KEYWORD_METHOD(function) \
    (PyCFunction)(void (*)(void)) function, METH_VARARGS | METH_KEYWORDS

#endif
