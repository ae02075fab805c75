/* download.c - the type Download: an array on its way to the host while the device works on.
 *
 *     later = Download(loss)        enqueues the copy behind the work that makes `loss`
 *     ... queue the next step ...
 *     later.wait().numpy()          waits for that copy alone, not for what was queued since
 *
 * NDArray.numpy() would join the end of the queue instead, and the device would run dry.
 */
#include "python.h"

typedef struct {
    PyObject_HEAD nd_device *device;
    uint64_t generation;
    nd_download *download; /* NULL once waited for */
    nd_array host;         /* where it arrives: CPU memory */
    PyObject *arrived;     /* the NDArray, once waited for */
} DownloadObject;

static nd_state *state_of(PyObject *object) { return PyType_GetModuleState(Py_TYPE(object)); }

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
    DownloadObject *self = (DownloadObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->device = device;
    self->generation = device->generation;
    nd_status status =
        nd_array_new(nd_cpu_device(), array->dtype, array->ndim, array->shape, &self->host);
    if (status != ND_OK) {
        Py_DECREF(self);
        return nd_raise(state, "Download", NULL, status);
    }
    nd_array packed;
    if (nd_is_contiguous(array)) {
        nd_array_view(array, &packed);
    } else if (nd_copy(state, array, array->dtype, &packed) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    status = device->backend->download_begin(device->index, packed.data, self->host.storage->bytes,
                                             &self->download);
    nd_array_clear(&packed); /* released in the order of the stream: behind the copy */
    if (status != ND_OK) {
        Py_DECREF(self);
        return nd_raise(state, "Download", device, status);
    }
    return (PyObject *)self;
}

/* Take the bytes out and give the download back. */
static nd_status finish(DownloadObject *self) {
    nd_download *download = self->download;
    self->download = NULL;
    return self->device->backend->download_end(self->device->index, download,
                                               self->host.storage->memory);
}

static void download_dealloc(PyObject *object) {
    DownloadObject *self = (DownloadObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->download != NULL && self->generation == self->device->generation) {
        (void)finish(self); /* nobody asked: a failure shows at the next call */
    }
    nd_array_clear(&self->host);
    Py_XDECREF(self->arrived);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *download_wait(PyObject *object, PyObject *unused) {
    (void)unused;
    DownloadObject *self = (DownloadObject *)object;
    nd_state *state = state_of(object);
    if (self->arrived == NULL) {
        if (self->generation != self->device->generation) {
            PyErr_SetString(PyExc_RuntimeError,
                            "Download: was begun before cuda_reset(); the array is gone");
            return NULL;
        }
        if (nd_check_alive(state, self->device) < 0) {
            return NULL;
        }
        if (self->download == NULL) {
            PyErr_SetString(PyExc_RuntimeError, "Download: an earlier wait() failed");
            return NULL;
        }
        nd_status status;
        Py_BEGIN_ALLOW_THREADS status = finish(self);
        Py_END_ALLOW_THREADS if (status != ND_OK) {
            return nd_raise(state, "Download.wait", self->device, status);
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

static PyType_Spec download_spec = {
    .name = "needle._C.Download",
    .basicsize = sizeof(DownloadObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = download_slots,
};

int nd_download_init(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &download_spec, NULL);
    int result = type == NULL ? -1 : PyModule_AddObjectRef(module, "Download", type);
    Py_XDECREF(type);
    return result;
}
