/* download.c - the type Download: an asynchronous copy of an array to the host.
 *
 *     later = Download(loss)        enqueues the copy behind the work that makes `loss`
 *     ... queue the next step ...
 *     later.wait().numpy()          waits for that copy alone, not for what was queued since
 *
 * NDArray.numpy() would join the end of the queue instead, and the device would run dry.
 */
#include "backends.h"
#include "errors.h"
#include "object.h"
#include "run.h"
#include "streams.h"

typedef struct {
    nd_streamed head;
    nd_download *download; /* NULL once waited for */
    bool missing;          /* while it is waited for, and when it did not come */
    nd_array host;         /* where it arrives: CPU memory */
    PyObject *arrived;     /* the NDArray, once asked for */
} DownloadObject;

static PyObject *download_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"array", NULL};
    nd_state *state = PyType_GetModuleState(type);
    PyObject *object;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!:Download", names,
                                     (PyObject *)state->ndarray_type, &object)) {
        return NULL;
    }
    const nd_array *array = nd_array_of(object);
    if (nd_check_live(state, "Download", "array", array) < 0) {
        return NULL;
    }
    nd_device *device = array->storage->device;
    DownloadObject *self = nd_streamed_new(type, device);
    if (self == NULL) {
        return NULL;
    }
    if (nd_new_array(state, "Download", nd_host(), array->dtype, array->ndim, array->shape,
                     &self->host) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    nd_array packed;
    if (nd_is_contiguous(array)) {
        nd_array_view(array, &packed);
    } else if (nd_copy(state, array, array->dtype, &packed) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    nd_status status = device->backend->download_begin(device->index, packed.data,
                                                       self->host.storage->bytes, &self->download);
    nd_array_clear(&packed); /* released in the order of the stream: behind the copy */
    if (status != ND_OK) {
        Py_DECREF(self);
        return nd_raise(state, "Download", device, status);
    }
    return (PyObject *)self;
}

/* Take the bytes out and end the copy, which the caller has taken out of self, with the GIL: two
 * threads may wait. */
static nd_status finish(DownloadObject *self, nd_download *download) {
    return self->head.device->backend->download_end(self->head.device->index, download,
                                                    self->host.storage->memory);
}

static void download_dealloc(PyObject *object) {
    DownloadObject *self = (DownloadObject *)object;
    if (self->download != NULL && !nd_streamed_stale(self)) {
        nd_status status;
        Py_BEGIN_ALLOW_THREADS
        status = finish(self, self->download);
        (void)status; /* nobody asked: a failure shows at the next call */
        Py_END_ALLOW_THREADS
    }
    nd_array_clear(&self->host);
    Py_XDECREF(self->arrived);
    nd_streamed_free(object);
}

static PyObject *download_wait(PyObject *object, PyObject *unused) {
    DownloadObject *self = (DownloadObject *)object;
    nd_state *state = PyType_GetModuleState(Py_TYPE(object));
    if (self->arrived == NULL) {
        if (nd_streamed_check(state, self) < 0) {
            return NULL;
        }
        if (self->missing) {
            return PyErr_Format(PyExc_RuntimeError,
                                "Download: an earlier wait() failed, or is not over in its thread");
        }
        nd_download *download = self->download;
        nd_status status = ND_OK;
        if (download != NULL) {
            self->download = NULL;
            self->missing = true;
            Py_BEGIN_ALLOW_THREADS
            status = finish(self, download);
            Py_END_ALLOW_THREADS
            self->missing = status != ND_OK;
        }
        if (status != ND_OK) {
            return nd_raise(state, "Download.wait", self->head.device, status);
        }
        nd_array arrived;
        nd_array_view(&self->host, &arrived);
        self->arrived = nd_wrap(state, &arrived);
    }
    return Py_XNewRef(self->arrived);
}

static PyMethodDef download_methods[] = {
    {"wait", download_wait, METH_NOARGS,
     "wait($self)\n--\n\nThe NDArray on the CPU, as soon as its copy has arrived."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot download_slots[] = {
    {Py_tp_new, download_new},
    {Py_tp_dealloc, download_dealloc},
    {Py_tp_methods, download_methods},
    {Py_tp_doc,
     "Download(array)\n--\n\nBegin to copy an array to the host, behind the work that is "
     "queued now; wait() for it later."},
    {0, NULL},
};

PyType_Spec nd_download_spec = {
    .name = "needle._C.Download",
    .basicsize = sizeof(DownloadObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = download_slots,
};
