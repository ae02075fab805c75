/* pinned_buffer.c - the type PinnedBuffer: host memory that a device copies from asynchronously.
 *
 *     buffer = PinnedBuffer(bytes, device)     pinned memory on CUDA, plain memory on the CPU
 *     np.frombuffer(buffer, np.int32)[:] = ...
 *     x = buffer.send((B, T), "int32")         a new array on the device; the copy is only enqueued
 *     buffer.wait()                            before the memory is written again
 *
 * A plain upload of pageable memory would join the end of the device's queue instead. Two or three
 * in turn keep a device fed (needle/data/prefetch.py).
 */
#include "arguments.h"
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "handle.h"
#include "object.h"

typedef struct {
    nd_handle head;
    nd_pinned_buffer *buffer;
    void *memory;
    Py_ssize_t bytes;
} PinnedBufferObject;

static PyObject *pinned_buffer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"bytes", "device", NULL};
    Py_ssize_t bytes;
    PyObject *where = Py_None;
    nd_device *device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n|O:PinnedBuffer", names, &bytes,
                                     &where)) {
        return NULL;
    }
    if (bytes <= 0) {
        return PyErr_Format(PyExc_ValueError, "PinnedBuffer: bytes must be 1 or more, not %zd",
                            bytes);
    }
    if (nd_device_from(where, &device) < 0) {
        return NULL;
    }
    PinnedBufferObject *self = nd_handle_new(type, device);
    if (self == NULL) {
        return NULL;
    }
    self->bytes = bytes;
    return nd_handle_made(
        self, "PinnedBuffer",
        ND_CALL(device, pinned_buffer_new, (size_t)bytes, &self->buffer, &self->memory));
}

static void pinned_buffer_dealloc(PyObject *object) {
    PinnedBufferObject *self = (PinnedBufferObject *)object;
    if (self->buffer != NULL) { /* memory of the host, which outlives a cuda_reset() */
        nd_status status;
        ND_CALL_UNLOCKED(status, self->head.device, pinned_buffer_free, self->buffer);
        (void)status; /* it waited for the last copy */
    }
    nd_handle_free(object);
}

static PyObject *pinned_buffer_send(PyObject *object, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"shape", "dtype", NULL};
    PinnedBufferObject *self = (PinnedBufferObject *)object;
    nd_device *device = self->head.device;
    PyObject *shape_object, *dtype_object;
    int ndim;
    int64_t shape[ND_MAX_DIMS];
    nd_dtype dtype;
    nd_array array;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO:send", names, &shape_object,
                                     &dtype_object) ||
        nd_shape_from(shape_object, "shape", &ndim, shape) < 0 ||
        nd_dtype_from(dtype_object, &dtype) < 0 || nd_handle_check(self) < 0 ||
        nd_new_array("PinnedBuffer.send", device, dtype, ndim, shape, &array) < 0) {
        return NULL;
    }
    size_t bytes = array.storage->bytes;
    if (bytes > (size_t)self->bytes) {
        PyErr_Format(PyExc_ValueError, "PinnedBuffer.send: the array has %zu bytes, the buffer %zd",
                     bytes, self->bytes);
    } else {
        nd_status status = ND_CALL(device, pinned_buffer_send, self->buffer, array.data, bytes);
        if (nd_check("PinnedBuffer.send", device, status) == 0) {
            return nd_wrap(&array);
        }
    }
    nd_array_clear(&array);
    return NULL;
}

static PyObject *pinned_buffer_wait(PyObject *object, PyObject *unused) {
    PinnedBufferObject *self = (PinnedBufferObject *)object;
    nd_status status;
    if (nd_handle_check(self) < 0) {
        return NULL;
    }
    ND_CALL_UNLOCKED(status, self->head.device, pinned_buffer_wait, self->buffer);
    return nd_handle_none(self, "PinnedBuffer.wait", status);
}

static int pinned_buffer_memory(PyObject *object, Py_buffer *view, int flags) {
    PinnedBufferObject *self = (PinnedBufferObject *)object;
    return PyBuffer_FillInfo(view, object, self->memory, self->bytes, 0, flags);
}

static PyMethodDef pinned_buffer_methods[] = {
    {"send", KEYWORD_METHOD(pinned_buffer_send),
     "send($self, shape, dtype)\n--\n\nA new NDArray on the device, filled from the beginning of "
     "the "
     "memory; the copy is enqueued, not waited for."},
    {"wait", pinned_buffer_wait, METH_NOARGS,
     "wait($self)\n--\n\nUntil the last send() has read the memory, which may then be written."},
    {NULL, NULL, 0, NULL},
};

ND_HANDLE_TYPE(
    PinnedBuffer, pinned_buffer, 0,
    "PinnedBuffer(bytes, device=None)\n--\n\nHost memory (a writable buffer) that a device "
    "copies from while the host goes on; pinned for CUDA.",
    {Py_tp_methods, pinned_buffer_methods}, {Py_bf_getbuffer, pinned_buffer_memory}, )
