/* staging.c - the type Staging: host memory that a device copies from while the host goes on.
 *
 *     staging = Staging(bytes, device)         pinned memory on CUDA, plain memory on the CPU
 *     np.frombuffer(staging, np.int32)[:] = ...
 *     x = staging.send((B, T), "int32")        a new array on the device; the copy is only enqueued
 *     staging.wait()                           before the memory is written again
 *
 * A plain upload of pageable memory would join the end of the device's queue instead. Two or three
 * in turn keep a device fed (needle/data/prefetch.py).
 */
#include "arguments.h"
#include "device.h"
#include "errors.h"
#include "object.h"
#include "streams.h"

typedef struct {
    nd_streamed head;
    nd_staging *staging;
    void *memory;
    Py_ssize_t bytes;
} StagingObject;

static PyObject *staging_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"bytes", "device", NULL};
    nd_state *state = PyType_GetModuleState(type);
    Py_ssize_t bytes;
    PyObject *where = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n|O:Staging", names, &bytes, &where)) {
        return NULL;
    }
    if (bytes <= 0) {
        return PyErr_Format(PyExc_ValueError, "Staging: bytes must be 1 or more, not %zd", bytes);
    }
    nd_device *device;
    if (nd_device_from(state, where, &device) < 0) {
        return NULL;
    }
    StagingObject *self = nd_streamed_new(type, device);
    if (self == NULL) {
        return NULL;
    }
    self->bytes = bytes;
    nd_status status =
        device->backend->staging_new(device->index, (size_t)bytes, &self->staging, &self->memory);
    if (status != ND_OK) {
        Py_DECREF(self);
        return nd_raise(state, "Staging", device, status);
    }
    return (PyObject *)self;
}

static void staging_dealloc(PyObject *object) {
    StagingObject *self = (StagingObject *)object;
    if (self->staging != NULL) {
        nd_status status;
        Py_BEGIN_ALLOW_THREADS
        status = self->head.device->backend->staging_free(self->head.device->index, self->staging);
        (void)status; /* it waited for the last copy */
        Py_END_ALLOW_THREADS
    }
    nd_streamed_free(object);
}

static PyObject *staging_send(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"shape", "dtype", NULL};
    StagingObject *self = (StagingObject *)object;
    nd_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *shape_object, *dtype_object;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO:send", names, &shape_object,
                                     &dtype_object)) {
        return NULL;
    }
    int ndim;
    int64_t shape[ND_MAX_DIMS];
    nd_dtype dtype;
    if (nd_shape_from(shape_object, "shape", &ndim, shape) < 0 ||
        nd_dtype_from(dtype_object, &dtype) < 0 || nd_streamed_check(state, self) < 0) {
        return NULL;
    }
    nd_array array;
    if (nd_new_array(state, "Staging.send", self->head.device, dtype, ndim, shape, &array) < 0) {
        return NULL;
    }
    if (array.storage->bytes > (size_t)self->bytes) {
        PyErr_Format(PyExc_ValueError, "Staging.send: the array has %zu bytes, the staging %zd",
                     array.storage->bytes, self->bytes);
        nd_array_clear(&array);
        return NULL;
    }
    nd_status status = self->head.device->backend->staging_send(
        self->head.device->index, self->staging, array.data, array.storage->bytes);
    if (status != ND_OK) {
        nd_array_clear(&array);
        return nd_raise(state, "Staging.send", self->head.device, status);
    }
    return nd_wrap(state, &array);
}

static PyObject *staging_wait(PyObject *object, PyObject *unused) {
    StagingObject *self = (StagingObject *)object;
    nd_state *state = PyType_GetModuleState(Py_TYPE(object));
    if (nd_streamed_check(state, self) < 0) {
        return NULL;
    }
    nd_status status;
    Py_BEGIN_ALLOW_THREADS
    status = self->head.device->backend->staging_wait(self->head.device->index, self->staging);
    Py_END_ALLOW_THREADS
    return nd_none_or_raise(state, "Staging.wait", self->head.device, status);
}

static int staging_buffer(PyObject *object, Py_buffer *view, int flags) {
    StagingObject *self = (StagingObject *)object;
    return PyBuffer_FillInfo(view, object, self->memory, self->bytes, 0, flags);
}

static PyMethodDef staging_methods[] = {
    {"send", KEYWORD_METHOD(staging_send),
     "send($self, shape, dtype)\n--\n\nA new NDArray on the device, filled from the beginning of "
     "the "
     "memory; the copy is enqueued, not waited for."},
    {"wait", staging_wait, METH_NOARGS,
     "wait($self)\n--\n\nUntil the last send() has read the memory, which may then be written."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot staging_slots[] = {
    {Py_tp_new, staging_new},
    {Py_tp_dealloc, staging_dealloc},
    {Py_tp_methods, staging_methods},
    {Py_bf_getbuffer, staging_buffer},
    {Py_tp_doc, "Staging(bytes, device=None)\n--\n\nHost memory (a writable buffer) that a device "
                "copies from while the host goes on; pinned for CUDA."},
    {0, NULL},
};

PyType_Spec nd_staging_spec = {
    .name = "needle._C.Staging",
    .basicsize = sizeof(StagingObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = staging_slots,
};
