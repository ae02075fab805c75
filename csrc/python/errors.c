/* errors.c - raising: the exception of each nd_status.
 *
 * The message of the first fatal fault is kept; the GIL guards it. From then on each use of a
 * device but the host raises it, and needle/core.py ends the process with exit code 75
 * (os.EX_TEMPFAIL) even if the program catches that.
 */
#include "errors.h"

#include <stdio.h>
#include <string.h>

static char fatal_message[1024]; /* empty: no fatal fault yet */

static PyObject *raise_fatal(void) {
    return PyErr_Format(
        nd.cuda_fatal_error,
        "%s\nThe CUDA context is lost and nothing on the device can be trusted: this "
        "process must end (exit code 75). Start it again from its last checkpoint; "
        "NEEDLE_SYNC=1 names the operation that fails.",
        fatal_message);
}

int nd_check_alive(const nd_device *device) {
    if (fatal_message[0] == 0 || (device->backend != NULL && device->backend->is_host)) {
        return 0;
    }
    raise_fatal();
    return -1;
}

PyObject *nd_raise(const char *op, nd_device *device, nd_status status) {
    const char *what = device != NULL ? device->backend->last_error() : nd_last_error();
    size_t length = op != NULL ? strlen(op) : 0;
    bool named = op == NULL || (strncmp(what, op, length) == 0 && what[length] == ':');
    char text[1024];
    snprintf(text, sizeof text, "%s%s%s", named ? "" : op, named ? "" : ": ", what);
    PyObject *const exceptions[] = {
        [ND_EVALUE] = PyExc_ValueError, [ND_ETYPE] = PyExc_TypeError,
        [ND_EINDEX] = PyExc_IndexError, [ND_EMEMORY] = PyExc_MemoryError,
        [ND_ECUDA] = nd.cuda_error,     [ND_ESYSTEM] = PyExc_RuntimeError,
    };
    if (status == ND_EFATAL) {
        if (fatal_message[0] == 0) {
            snprintf(fatal_message, sizeof fatal_message, "%s", text);
        }
        return raise_fatal();
    }
    /* Messages may carry bytes of a library or a path: never fail to raise over their encoding. */
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message != NULL) {
        PyErr_SetObject(exceptions[status], message);
        Py_DECREF(message);
    }
    return NULL;
}

int nd_check(const char *op, nd_device *device, nd_status status) {
    if (status != ND_OK) {
        nd_raise(op, device, status);
        return -1;
    }
    return 0;
}

PyObject *nd_none_or_raise(const char *op, nd_device *device, nd_status status) {
    return nd_check(op, device, status) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- import ---------------------------------------------------------------------------------- */
static PyObject *new_exception(PyObject *module, const char *name, const char *doc,
                               PyObject *base) {
    char full[64];
    snprintf(full, sizeof full, "needle.%s", name);
    PyObject *exception = PyErr_NewExceptionWithDoc(full, doc, base, NULL);
    if (exception != NULL && PyModule_AddObjectRef(module, name, exception) < 0) {
        Py_CLEAR(exception);
    }
    return exception;
}

static PyObject *module_fatal_fault(PyObject *module, PyObject *unused) {
    return PyBool_FromLong(fatal_message[0] != 0);
}

static PyMethodDef functions[] = {
    {"_fatal_fault", module_fatal_fault, METH_NOARGS,
     "_fatal_fault($module)\n--\n\nTrue after the context of a device is lost: the process must "
     "end."},
    {NULL, NULL, 0, NULL},
};

int nd_errors_init(PyObject *module) {
    nd.cuda_error = new_exception(module, "CudaError",
                                  "CUDA refused; the call can be tried again (memory, "
                                  "launch configuration).",
                                  PyExc_RuntimeError);
    if (nd.cuda_error == NULL) {
        return -1;
    }
    nd.cuda_fatal_error = new_exception(module, "CudaFatalError",
                                        "The CUDA context is lost; the process must end. "
                                        "It does so with exit code 75.",
                                        nd.cuda_error);
    return nd.cuda_fatal_error == NULL ? -1 : PyModule_AddFunctions(module, functions);
}
