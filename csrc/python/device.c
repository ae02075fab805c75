/* device.c - the type Device: a backend and an index.
 *
 * The backend says how devices differ: is_host, records_graphs,
 * runs_kernels, properties(), limits().
 */
#include "device.h"

#include <string.h>

#include "backends.h"
#include "errors.h"

typedef struct {
    PyObject_HEAD
    nd_device *device;
} DeviceObject;

static nd_device *device_of(PyObject *self) { return ((DeviceObject *)self)->device; }

PyObject *nd_device_object(nd_device *device) {
    PyObject **cached = &nd.devices[nd_device_slot(device)];
    if (*cached == NULL) {
        DeviceObject *object = PyObject_New(DeviceObject, nd.device_type);
        if (object == NULL) {
            return NULL;
        }
        object->device = device;
        *cached = (PyObject *)object;
    }
    return Py_NewRef(*cached);
}

int nd_device_from(PyObject *object, nd_device **out) {
    if (object == NULL || object == Py_None) {
        *out = nd_host();
        return 0;
    }
    if (!PyObject_TypeCheck(object, nd.device_type)) {
        FAIL(PyExc_TypeError, "device: must be a Device such as needle.cpu(), not %.80s",
             Py_TYPE(object)->tp_name);
    }
    *out = device_of(object);
    return nd_device_ready(*out);
}

static void device_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *device_repr(PyObject *self) {
    char text[24];
    return PyUnicode_FromString(nd_device_text(device_of(self), text));
}

static PyObject *device_compare(PyObject *self, PyObject *other, int op) {
    if ((op != Py_EQ && op != Py_NE) || Py_TYPE(self) != Py_TYPE(other)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    return PyBool_FromLong((device_of(self) == device_of(other)) == (op == Py_EQ));
}

static Py_hash_t device_hash(PyObject *self) {
    return (Py_hash_t)nd_device_slot(device_of(self)) + 1;
}

static PyObject *device_enabled(PyObject *self, PyObject *unused) {
    return PyBool_FromLong(nd_device_missing(device_of(self)) == NULL);
}

static PyObject *device_reason(PyObject *self, PyObject *unused) {
    const char *reason = nd_device_missing(device_of(self));
    if (reason == NULL) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace");
}

/* The device of `self`, ready; NULL with an exception. */
static nd_device *ready(PyObject *self) {
    return nd_device_ready(device_of(self)) < 0 ? NULL : device_of(self);
}

#define DEVICE_CALL(name)                                              \
    static PyObject *device_##name(PyObject *self, PyObject *unused) { \
        nd_device *device = ready(self);                               \
        nd_status status;                                              \
        if (device == NULL) {                                          \
            return NULL;                                               \
        }                                                              \
        ND_CALL_UNLOCKED(status, device, name);                        \
        return nd_none_or_raise(#name, device, status);                \
    }
DEVICE_CALL(synchronize)
DEVICE_CALL(reset_peak)
DEVICE_CALL(empty_cache)

static PyObject *device_memory_stats(PyObject *self, PyObject *unused) {
    nd_device *device = ready(self);
    nd_memory_stats s;
    if (device == NULL || nd_check("memory_stats", device, ND_CALL(device, memory_stats, &s)) < 0) {
        return NULL;
    }
    return Py_BuildValue("{sL sL sL}", "live_bytes", (long long)s.live_bytes, "peak_bytes",
                         (long long)s.peak_bytes, "reserved_bytes", (long long)s.reserved_bytes);
}

static PyObject *device_properties(PyObject *self, PyObject *unused) {
    nd_device *device = ready(self);
    nd_properties p = {.total_bytes = 0};
    if (device == NULL || nd_check("properties", device, ND_CALL(device, properties, &p)) < 0) {
        return NULL;
    }
    return Py_BuildValue("{ss sL si si ss ss ss}", "name", p.name, "total_bytes",
                         (long long)p.total_bytes, "processors", p.processors, "arch", p.arch,
                         "detail", p.detail, "products", p.products, "uuid", p.uuid);
}

static PyObject *device_limits(PyObject *self, PyObject *unused) {
    nd_device *device = ready(self);
    nd_launch_limits l;
    if (device == NULL) {
        return NULL;
    }
    if (device->backend->launch_limits == NULL) {
        return PyErr_Format(PyExc_ValueError, "limits: the %s backend runs no kernels of one's own",
                            nd_device_title(device));
    }
    if (nd_check("limits", device, ND_CALL(device, launch_limits, &l)) < 0) {
        return NULL;
    }
    return Py_BuildValue("{si si si si si sL}", "arch", l.arch, "processors", l.processors,
                         "sm_threads", l.sm_threads, "block_registers", l.block_registers,
                         "block_shared", l.block_shared, "free_bytes", (long long)l.free_bytes);
}

static PyObject *device_name(PyObject *self, void *closure) {
    return PyUnicode_FromString(nd_device_name(device_of(self)));
}

static PyObject *device_index(PyObject *self, void *closure) {
    return PyLong_FromLong(device_of(self)->index);
}

static PyObject *device_stream(PyObject *self, void *closure) {
    nd_device *device = ready(self);
    void *stream = NULL;
    if (device == NULL ||
        nd_check("stream", device, ND_CALL(device, stream, closure != NULL, &stream)) < 0) {
        return NULL;
    }
    return PyLong_FromVoidPtr(stream);
}

/* The backend's table; NULL when arrays cannot live there. */
static const nd_backend *usable_backend(PyObject *self) {
    return nd_device_missing(device_of(self)) == NULL ? device_of(self)->backend : NULL;
}

static PyObject *device_is_host(PyObject *self, void *closure) {
    const nd_backend *backend = usable_backend(self);
    return PyBool_FromLong(backend != NULL && backend->is_host);
}

static PyObject *device_records_graphs(PyObject *self, void *closure) {
    const nd_backend *backend = usable_backend(self);
    return PyBool_FromLong(backend != NULL && backend->graph_begin != NULL);
}

static PyObject *device_runs_kernels(PyObject *self, void *closure) {
    const nd_backend *backend = usable_backend(self);
    return PyBool_FromLong(backend != NULL && backend->kernel_launch != NULL);
}

static PyObject *device_reduce(PyObject *self, PyObject *unused) {
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    PyObject *make =
        module ? PyObject_GetAttrString(module, nd_device_name(device_of(self))) : NULL;
    return make != NULL ? Py_BuildValue("N(i)", make, device_of(self)->index) : NULL;
}

static PyMethodDef device_methods[] = {
    {"enabled", device_enabled, METH_NOARGS,
     "enabled($self)\n--\n\nCan arrays live here? Never raises."},
    {"reason", device_reason, METH_NOARGS,
     "reason($self)\n--\n\nWhy enabled() is False and how to mend it; None when it is True."},
    {"synchronize", device_synchronize, METH_NOARGS,
     "synchronize($self)\n--\n\nWait until all work given to the device is done."},
    {"properties", device_properties, METH_NOARGS,
     "properties($self)\n--\n\nname, total_bytes, processors, arch, detail, products, uuid."},
    {"limits", device_limits, METH_NOARGS,
     "limits($self)\n--\n\nWhat a kernel of one's own may ask for: arch, processors, sm_threads, "
     "block_registers, block_shared, free_bytes."},
    {"memory_stats", device_memory_stats, METH_NOARGS,
     "memory_stats($self)\n--\n\nlive_bytes (in arrays), peak_bytes (the most since reset_peak()), "
     "reserved_bytes (held by the pool)."},
    {"reset_peak", device_reset_peak, METH_NOARGS,
     "reset_peak($self)\n--\n\nLet peak_bytes start again from live_bytes."},
    {"empty_cache", device_empty_cache, METH_NOARGS,
     "empty_cache($self)\n--\n\nGive memory that no array uses back to the system."},
    {"__reduce__", device_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *device_generation(PyObject *self, void *unused) {
    return PyLong_FromUnsignedLongLong(device_of(self)->generation);
}

static PyGetSetDef device_getset[] = {
    {"name", device_name, NULL, "The backend: \"cpu\" or \"cuda\"", NULL},
    {"index", device_index, NULL, "The number among devices of its name", NULL},
    {"generation", device_generation, NULL,
     "Grows with each cuda_reset(): what is kept for a device is kept for one of these", NULL},
    {"stream", device_stream, NULL,
     "The stream of all its work, as the device's libraries take it (cudaStream_t); the CPU's is 0",
     NULL},
    {"side_stream", device_stream, NULL,
     "A second stream, for other libraries' work beside that of the first; Event orders the two",
     "side"},
    {"is_host", device_is_host, NULL,
     "The host reads its memory directly, and its ops are done when they return", NULL},
    {"records_graphs", device_records_graphs, NULL, "Graph(device, step) works", NULL},
    {"runs_kernels", device_runs_kernels, NULL, "needle.kernels.compile() can load kernels here",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_repr, device_repr},
    {Py_tp_richcompare, device_compare},
    {Py_tp_hash, device_hash},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {Py_tp_doc, "Where arrays live: cpu(), cuda(), cuda(1) ... Equal when it is the same device."},
    {0, NULL},
};

static PyType_Spec device_spec = {
    .name = "needle._C.Device",
    .basicsize = sizeof(DeviceObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = device_slots,
};

/* ---- functions of the module ----------------------------------------------------------------- */
static PyObject *device_by_index(PyObject *module, nd_backend_id id, const char *format,
                                 PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"index", NULL};
    long long index = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, format, names, &index)) {
        return NULL;
    }
    nd_device *device = nd_device_at(id, index);
    if (device == NULL) {
        return PyErr_Format(PyExc_ValueError, "%s: index: %lld is not in 0 ... %d", format + 3,
                            index, ND_MAX_DEVICES - 1);
    }
    return nd_device_object(device);
}

#define X(name, title, dlpack, table, file)                                                     \
    static PyObject *module_##name(PyObject *module, PyObject *arguments, PyObject *keywords) { \
        return device_by_index(module, BACKEND_##name, "|L:" #name, arguments, keywords);       \
    }
ND_BACKENDS(X)
#undef X

static PyObject *module_all_devices(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    for (int id = 0; id < NUM_BACKENDS; id++) {
        int count = nd_device_count((nd_backend_id)id);
        for (int i = 0; list != NULL && i < (count > 1 ? count : 1); i++) {
            PyObject *device = nd_device_object(nd_device_at((nd_backend_id)id, i));
            if (device == NULL || PyList_Append(list, device) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(device);
        }
    }
    return list;
}

static PyObject *module_cuda_init(PyObject *module, PyObject *unused) {
    return nd_device_ready(nd_device_at(BACKEND_cuda, 0)) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *module_cuda_reset(PyObject *module, PyObject *unused) {
    PyObject *ready = module_cuda_init(module, NULL); /* refuses after a fatal fault */
    return ready == NULL || nd_backend_reset(BACKEND_cuda) < 0 ? NULL : ready;
}

static PyMethodDef functions[] = {
#define X(name, title, dlpack, table, file) \
    {#name, KEYWORD_METHOD(module_##name),  \
     #name "($module, index=0)\n--\n\n"     \
           "A device of the " title " backend, by number; nothing is opened until it is used."},
    ND_BACKENDS(X)
#undef X
        {"all_devices", module_all_devices, METH_NOARGS,
         "all_devices($module)\n--\n\n[cpu(), cuda(), ...]; ask each whether it is enabled()."},
    {"cuda_init", module_cuda_init, METH_NOARGS,
     "cuda_init($module)\n--\n\nOpen cuda() now rather than at its first use. RuntimeError says "
     "why it cannot be."},
    {"cuda_reset", module_cuda_reset, METH_NOARGS,
     "cuda_reset($module)\n--\n\nFree all that needle holds on the CUDA devices in use; their "
     "contexts stay. Arrays that lived there raise RuntimeError afterwards. After a fatal fault it "
     "raises CudaFatalError: only a new process helps."},
    {NULL, NULL, 0, NULL},
};

int nd_device_init(PyObject *module) {
    nd.device_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &device_spec, NULL);
    if (nd.device_type == NULL || PyModule_AddType(module, nd.device_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
