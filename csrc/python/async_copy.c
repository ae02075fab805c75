/* async_copy.c - the type AsyncCopy: an asynchronous copy of an array to the host.
 *
 *     later = AsyncCopy(loss)        enqueues the copy after the work that makes `loss`
 *     ... queue the next step ...
 *     later.wait().numpy()          waits for that copy alone, not for work that was queued since
 *
 * NDArray.numpy() would join the end of the queue instead, and the device would run dry.
 */
#include "backends.h"
#include "errors.h"
#include "handle.h"
#include "object.h"
#include "run.h"

typedef struct {
    nd_handle head;
    nd_async_copy *copy; /* NULL once waited for */
    bool missing;        /* while it is waited for, and when it did not come */
    nd_array host;       /* where it arrives: CPU memory */
    PyObject *arrived;   /* the NDArray, once asked for */
} AsyncCopyObject;

static PyObject *async_copy_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"array", NULL};
    PyObject *object;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!:AsyncCopy", names,
                                     (PyObject *)nd.ndarray_type, &object)) {
        return NULL;
    }
    const nd_array *array = nd_array_of(object);
    if (nd_check_live("AsyncCopy", "array", array) < 0) {
        return NULL;
    }
    nd_device *device = array->storage->device;
    AsyncCopyObject *self = nd_handle_new(type, device);
    nd_array packed;
    if (self == NULL ||
        nd_new_array("AsyncCopy", nd_host(), array->dtype, array->ndim, array->shape, &self->host) <
            0 ||
        nd_contiguous(array, &packed) < 0) {
        Py_XDECREF(self);
        return NULL;
    }
    nd_status status =
        ND_CALL(device, async_copy_begin, packed.data, self->host.storage->bytes, &self->copy);
    nd_array_clear(&packed); /* released in the order of the stream: after the copy */
    return nd_handle_made(self, "AsyncCopy", status);
}

/* Take the bytes out and end the copy, which the caller has taken out of self: two may wait. */
static nd_status finish(AsyncCopyObject *self, nd_async_copy *copy) {
    nd_status status;
    ND_CALL_UNLOCKED(status, self->head.device, async_copy_end, copy, self->host.storage->memory);
    return status;
}

static void async_copy_dealloc(PyObject *object) {
    AsyncCopyObject *self = (AsyncCopyObject *)object;
    if (self->copy != NULL && !nd_handle_is_stale(self)) {
        (void)finish(self, self->copy); /* a failure shows at the next call */
    }
    nd_array_clear(&self->host);
    Py_XDECREF(self->arrived);
    nd_handle_free(object);
}

static PyObject *async_copy_wait(PyObject *object, PyObject *unused) {
    AsyncCopyObject *self = (AsyncCopyObject *)object;
    if (self->arrived == NULL) {
        if (nd_handle_check(self) < 0) {
            return NULL;
        }
        if (self->missing) {
            return PyErr_Format(
                PyExc_RuntimeError,
                "AsyncCopy: an earlier wait() failed, or is not over in its thread");
        }
        nd_async_copy *copy = self->copy;
        if (copy != NULL) {
            self->copy = NULL;
            self->missing = true;
            nd_status status = finish(self, copy);
            self->missing = status != ND_OK;
            if (nd_check("AsyncCopy.wait", self->head.device, status) < 0) {
                return NULL;
            }
        }
        self->arrived = nd_wrap_view(&self->host);
    }
    return Py_XNewRef(self->arrived);
}

static PyMethodDef async_copy_methods[] = {
    {"wait", async_copy_wait, METH_NOARGS,
     "wait($self)\n--\n\nThe NDArray on the CPU, as soon as its copy has arrived."},
    {NULL, NULL, 0, NULL},
};

ND_HANDLE_TYPE(AsyncCopy, async_copy, 0,
               "AsyncCopy(array)\n--\n\nBegin to copy an array to the host, after the work that is "
               "queued now; wait() for it later.",
               {Py_tp_methods, async_copy_methods}, )
