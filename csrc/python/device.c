/* device.c - devices: the table, the CUDA backend's loading, errors, and the types Device and Event.
 *
 * What belongs to the process rather than to an interpreter is global, and is all here: the table
 * of devices (equal devices are equal pointers), the CUDA backend once loaded or the reason why it
 * could not be, and the message of the first fatal CUDA fault. The GIL guards all three. Importing
 * needle touches no GPU: the backend is opened by the first question about a CUDA device.
 *
 * After a fatal fault each later use of CUDA raises the first message, and the process ends with
 * exit code 75, whoever catches what: a function registered with atexit when the module is imported
 * (so that it runs after all others) flushes the standard streams and calls _exit(75).
 */
#include "python.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXIT_FATAL 75 /* EX_TEMPFAIL: start again from the last checkpoint */

extern const nd_backend cpu_backend;

/* ---- the process ----------------------------------------------------------------------------- */
static nd_device devices[1 + ND_MAX_CUDA]; /* [0] is the CPU */
static bool opened[1 + ND_MAX_CUDA];
static const nd_backend *cuda_backend; /* NULL until loaded */
static int cuda_count;
static bool cuda_tried;
static char cuda_reason[1024];   /* why there is none */
static char cuda_path[4096];     /* of _cuda.so */
static char fatal_message[1024]; /* empty: no fatal fault yet */

const char *nd_cuda_path(void) { return cuda_path; }

nd_device *nd_cpu_device(void) { return &devices[0]; }

nd_device *nd_cuda_device(int64_t index) {
    return index >= 0 && index < ND_MAX_CUDA ? &devices[1 + index] : NULL;
}

bool nd_is_cpu(const nd_device *device) { return device == &devices[0]; }

const char *nd_device_text(const nd_device *device, char text[24]) {
    if (nd_is_cpu(device)) {
        return "cpu()";
    }
    if (device->index == 0) {
        return "cuda()";
    }
    snprintf(text, 24, "cuda(%d)", device->index);
    return text;
}

/* ---- errors ---------------------------------------------------------------------------------- */
static PyObject *raise_fatal(nd_state *state) {
    PyErr_Format(state->cuda_fatal_error,
                 "%s\nThe CUDA context is lost and nothing on the device can be trusted: this "
                 "process must end (exit code 75). Start it again from its last checkpoint; "
                 "NEEDLE_SYNC=1 names the operation that fails.",
                 fatal_message);
    return NULL;
}

int nd_check_alive(nd_state *state, const nd_device *device) {
    if (fatal_message[0] == 0 || nd_is_cpu(device)) {
        return 0;
    }
    raise_fatal(state);
    return -1;
}

PyObject *nd_raise(nd_state *state, const char *op, nd_device *device, nd_status status) {
    const char *what = device != NULL ? device->backend->last_error() : nd_last_error();
    size_t length = op != NULL ? strlen(op) : 0;
    bool named = op == NULL || (strncmp(what, op, length) == 0 && what[length] == ':');
    char text[1024];
    snprintf(text, sizeof text, "%s%s%s", named ? "" : op, named ? "" : ": ", what);
    PyObject *exception = PyExc_RuntimeError;
    switch (status) {
    case ND_EVALUE:
        exception = PyExc_ValueError;
        break;
    case ND_ETYPE:
        exception = PyExc_TypeError;
        break;
    case ND_EINDEX:
        exception = PyExc_IndexError;
        break;
    case ND_EMEMORY:
        exception = PyExc_MemoryError;
        break;
    case ND_ECUDA:
        exception = state->cuda_error;
        break;
    case ND_EFATAL:
        if (fatal_message[0] == 0) {
            snprintf(fatal_message, sizeof fatal_message, "%s", text);
        }
        return raise_fatal(state);
    case ND_OK:
    case ND_ESYSTEM:
        break;
    }
    /* Messages may carry bytes of a library or a path: never fail to raise over their encoding. */
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message != NULL) {
        PyErr_SetObject(exception, message);
        Py_DECREF(message);
    }
    return NULL;
}

static PyObject *exit_after_fatal(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    if (fatal_message[0] != 0) {
        for (int i = 0; i < 2; i++) {
            PyObject *stream = PySys_GetObject(i ? "stderr" : "stdout");
            PyObject *done = stream ? PyObject_CallMethod(stream, "flush", NULL) : NULL;
            Py_XDECREF(done);
            PyErr_Clear(); /* a closed stream has nothing to flush */
        }
        fflush(NULL);
        _exit(EXIT_FATAL);
    }
    Py_RETURN_NONE;
}

/* ---- the CUDA backend ------------------------------------------------------------------------ */
#define REBUILD "build it with: NEEDLE_CUDA=1 pip install -e .  (or: make lib NEEDLE_CUDA=1)"

static void find_cuda_path(void) {
    Dl_info self;
    if (dladdr(devices, &self) == 0 || self.dli_fname == NULL) {
        return;
    }
    const char *slash = strrchr(self.dli_fname, '/');
    int folder = slash != NULL ? (int)(slash - self.dli_fname) : 1;
    snprintf(cuda_path, sizeof cuda_path, "%.*s/_cuda.so", folder,
             slash != NULL ? self.dli_fname : ".");
}

/* Loads the backend once; leaves cuda_backend or cuda_reason. */
static void load_cuda(void) {
    if (cuda_tried) {
        return;
    }
    cuda_tried = true;
    if (access(cuda_path, F_OK) != 0) {
        snprintf(cuda_reason, sizeof cuda_reason,
                 "needle was built without CUDA (there is no %.600s); " REBUILD, cuda_path);
        return;
    }
    void *library = dlopen(cuda_path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *error = dlerror();
        error = error != NULL ? error : "unknown error";
        const char *mend = strstr(error, "libcublas") != NULL
                               ? "; it comes with the CUDA toolkit, or: pip install nvidia-cublas"
                               : "";
        snprintf(cuda_reason, sizeof cuda_reason, "cannot load the CUDA backend: %.700s%s", error,
                 mend);
        return;
    }
    const nd_backend *(*entry)(void) = NULL;
    *(void **)&entry = dlsym(library, "needle_backend");
    const nd_backend *backend = entry != NULL ? entry() : NULL;
    if (backend == NULL || backend->abi != ND_ABI) {
        snprintf(cuda_reason, sizeof cuda_reason,
                 "%.600s is not of the same build as _C (ABI %u, expected %u); " REBUILD, cuda_path,
                 backend != NULL ? backend->abi : 0, ND_ABI);
        return;
    }
    int count = 0;
    if (backend->device_count(&count) != ND_OK) {
        snprintf(cuda_reason, sizeof cuda_reason, "CUDA cannot be used here: %.900s",
                 backend->last_error());
        return;
    }
    if (count == 0) {
        snprintf(cuda_reason, sizeof cuda_reason, "CUDA found no device (CUDA_VISIBLE_DEVICES=%s)",
                 getenv("CUDA_VISIBLE_DEVICES") ? getenv("CUDA_VISIBLE_DEVICES") : "unset");
        return;
    }
    cuda_count = count < ND_MAX_CUDA ? count : ND_MAX_CUDA;
    cuda_backend = backend;
    for (int i = 1; i <= ND_MAX_CUDA; i++) {
        devices[i].backend = backend;
    }
}

int nd_device_ready(nd_state *state, nd_device *device) {
    int at = (int)(device - devices);
    if (opened[at]) {
        return nd_check_alive(state, device);
    }
    load_cuda();
    char text[24];
    if (cuda_backend == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%s: %s", nd_device_text(device, text), cuda_reason);
        return -1;
    }
    if (device->index >= cuda_count) {
        PyErr_Format(PyExc_RuntimeError, "%s: no such device: there %s %d (cuda() to cuda(%d))",
                     nd_device_text(device, text), cuda_count == 1 ? "is" : "are", cuda_count,
                     cuda_count - 1);
        return -1;
    }
    if (nd_check_alive(state, device) < 0) {
        return -1;
    }
    nd_status status = device->backend->open(device->index);
    if (status != ND_OK) {
        nd_raise(state, nd_device_text(device, text), device, status);
        return -1;
    }
    opened[at] = true;
    return 0;
}

/* ---- Device ---------------------------------------------------------------------------------- */
typedef struct {
    PyObject_HEAD nd_device *device;
} DeviceObject;

static nd_device *device_of(PyObject *self) { return ((DeviceObject *)self)->device; }
static nd_state *state_of_type(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

PyObject *nd_device_object(nd_state *state, nd_device *device) {
    PyObject **cached = &state->devices[device - devices];
    if (*cached == NULL) {
        DeviceObject *object = PyObject_New(DeviceObject, state->device_type);
        if (object == NULL) {
            return NULL;
        }
        object->device = device;
        *cached = (PyObject *)object;
    }
    return Py_NewRef(*cached);
}

int nd_device_from(nd_state *state, PyObject *object, nd_device **out) {
    if (object == NULL || object == Py_None) {
        *out = nd_cpu_device();
        return 0;
    }
    if (!PyObject_TypeCheck(object, state->device_type)) {
        PyErr_Format(PyExc_TypeError, "device: must be a Device such as needle.cpu(), not %.80s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    *out = device_of(object);
    return nd_device_ready(state, *out);
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

static Py_hash_t device_hash(PyObject *self) { return (Py_hash_t)(device_of(self) - devices) + 1; }

static PyObject *device_enabled(PyObject *self, PyObject *unused) {
    (void)unused;
    nd_device *device = device_of(self);
    if (!nd_is_cpu(device)) {
        load_cuda();
    }
    return PyBool_FromLong(nd_is_cpu(device) ||
                           (cuda_backend != NULL && device->index < cuda_count));
}

static PyObject *device_reason(PyObject *self, PyObject *unused) {
    (void)unused;
    nd_device *device = device_of(self);
    if (nd_is_cpu(device)) {
        Py_RETURN_NONE;
    }
    load_cuda();
    if (cuda_backend == NULL) {
        return PyUnicode_DecodeUTF8(cuda_reason, (Py_ssize_t)strlen(cuda_reason), "replace");
    }
    if (device->index >= cuda_count) {
        return PyUnicode_FromFormat("no such device: there are %d", cuda_count);
    }
    Py_RETURN_NONE;
}

/* Call one of the backend's functions that take a device alone. */
static PyObject *device_call(PyObject *self, const char *what, size_t offset) {
    nd_state *state = state_of_type(self);
    nd_device *device = device_of(self);
    if (nd_device_ready(state, device) < 0) {
        return NULL;
    }
    nd_status (*function)(int);
    memcpy(&function, (const char *)device->backend + offset, sizeof function);
    nd_status status;
    Py_BEGIN_ALLOW_THREADS status = function(device->index);
    Py_END_ALLOW_THREADS if (status != ND_OK) { return nd_raise(state, what, device, status); }
    Py_RETURN_NONE;
}

static PyObject *device_synchronize(PyObject *self, PyObject *unused) {
    (void)unused;
    return device_call(self, "synchronize", offsetof(nd_backend, synchronize));
}

static PyObject *device_reset_peak(PyObject *self, PyObject *unused) {
    (void)unused;
    return device_call(self, "reset_peak", offsetof(nd_backend, reset_peak));
}

static PyObject *device_empty_cache(PyObject *self, PyObject *unused) {
    (void)unused;
    return device_call(self, "empty_cache", offsetof(nd_backend, empty_cache));
}

static PyObject *device_memory_stats(PyObject *self, PyObject *unused) {
    (void)unused;
    nd_state *state = state_of_type(self);
    nd_device *device = device_of(self);
    nd_memory_stats stats = {0};
    if (nd_device_ready(state, device) < 0) {
        return NULL;
    }
    nd_status status = device->backend->memory_stats(device->index, &stats);
    if (status != ND_OK) {
        return nd_raise(state, "memory_stats", device, status);
    }
    return Py_BuildValue("{sL sL sL}", "live_bytes", (long long)stats.live_bytes, "peak_bytes",
                         (long long)stats.peak_bytes, "reserved_bytes",
                         (long long)stats.reserved_bytes);
}

static PyObject *device_properties(PyObject *self, PyObject *unused) {
    (void)unused;
    nd_state *state = state_of_type(self);
    nd_device *device = device_of(self);
    nd_properties properties;
    memset(&properties, 0, sizeof properties);
    if (nd_device_ready(state, device) < 0) {
        return NULL;
    }
    nd_status status = device->backend->properties(device->index, &properties);
    if (status != ND_OK) {
        return nd_raise(state, "properties", device, status);
    }
    return Py_BuildValue("{ss sL si si ss}", "name", properties.name, "total_bytes",
                         (long long)properties.total_bytes, "processors", properties.processors,
                         "arch", properties.arch, "detail", properties.detail);
}

static PyObject *device_name(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_FromString(nd_is_cpu(device_of(self)) ? "cpu" : "cuda");
}

static PyObject *device_index(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(device_of(self)->index);
}

static PyObject *device_reduce(PyObject *self, PyObject *unused) {
    (void)unused;
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    PyObject *make =
        module ? PyObject_GetAttrString(module, nd_is_cpu(device_of(self)) ? "cpu" : "cuda") : NULL;
    if (make == NULL) {
        return NULL;
    }
    return nd_is_cpu(device_of(self)) ? Py_BuildValue("N()", make)
                                      : Py_BuildValue("N(i)", make, device_of(self)->index);
}

static PyMethodDef device_methods[] = {
    {"enabled", device_enabled, METH_NOARGS,
     "enabled($self)\n--\n\nCan arrays live here? Never raises."},
    {"reason", device_reason, METH_NOARGS,
     "reason($self)\n--\n\nWhy enabled() is False and how to mend it; None when it is True."},
    {"synchronize", device_synchronize, METH_NOARGS,
     "synchronize($self)\n--\n\nWait until all work given to the device is done."},
    {"properties", device_properties, METH_NOARGS,
     "properties($self)\n--\n\nname, total_bytes, processors, arch, detail."},
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

static PyGetSetDef device_getset[] = {
    {"name", device_name, NULL, "\"cpu\" or \"cuda\"", NULL},
    {"index", device_index, NULL, "The number among devices of its name", NULL},
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

/* ---- Event ----------------------------------------------------------------------------------- */
typedef struct {
    PyObject_HEAD nd_device *device;
    nd_event *event;
    uint64_t generation;
} EventObject;

static PyObject *event_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"device", NULL};
    nd_state *state = PyType_GetModuleState(type);
    PyObject *object = Py_None;
    nd_device *device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|O:Event", names, &object) ||
        nd_device_from(state, object, &device) < 0) {
        return NULL;
    }
    EventObject *self = (EventObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->device = device;
    self->generation = device->generation;
    nd_status status = device->backend->event_new(device->index, &self->event);
    if (status != ND_OK) {
        self->event = NULL;
        Py_DECREF(self);
        return nd_raise(state, "Event", device, status);
    }
    return (PyObject *)self;
}

static void event_dealloc(PyObject *object) {
    EventObject *self = (EventObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->event != NULL && self->generation == self->device->generation) {
        (void)self->device->backend->event_free(self->device->index, self->event);
    }
    type->tp_free(object);
    Py_DECREF(type);
}

static int event_check(nd_state *state, EventObject *self) {
    if (self->generation != self->device->generation) {
        PyErr_SetString(PyExc_RuntimeError, "Event: was made before cuda_reset(); make it anew");
        return -1;
    }
    return nd_check_alive(state, self->device);
}

static PyObject *event_record(PyObject *object, PyObject *unused) {
    (void)unused;
    EventObject *self = (EventObject *)object;
    nd_state *state = state_of_type(object);
    if (event_check(state, self) < 0) {
        return NULL;
    }
    nd_status status = self->device->backend->event_record(self->device->index, self->event);
    if (status != ND_OK) {
        return nd_raise(state, "Event.record", self->device, status);
    }
    Py_RETURN_NONE;
}

static PyObject *event_elapsed(PyObject *object, PyObject *other_object) {
    EventObject *self = (EventObject *)object, *other = (EventObject *)other_object;
    nd_state *state = state_of_type(object);
    if (!PyObject_TypeCheck(other_object, state->event_type) || self->device != other->device) {
        PyErr_SetString(PyExc_TypeError, "Event.elapsed: other: must be an Event of this device");
        return NULL;
    }
    if (event_check(state, self) < 0 || event_check(state, other) < 0) {
        return NULL;
    }
    double milliseconds = 0;
    nd_status status;
    Py_BEGIN_ALLOW_THREADS status = self->device->backend->event_elapsed(
        self->device->index, self->event, other->event, &milliseconds);
    Py_END_ALLOW_THREADS if (status != ND_OK) {
        return nd_raise(state, "Event.elapsed", self->device, status);
    }
    return PyFloat_FromDouble(milliseconds);
}

static PyMethodDef event_methods[] = {
    {"record", event_record, METH_NOARGS,
     "record($self)\n--\n\nMark the present point of the device's stream of work."},
    {"elapsed", event_elapsed, METH_O,
     "elapsed($self, other)\n--\n\nMilliseconds from this event to a later one; waits for both."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_methods},
    {Py_tp_doc, "Event(device=None)\n--\n\nA point in a device's stream of work, for timing."},
    {0, NULL},
};

static PyType_Spec event_spec = {
    .name = "needle._C.Event",
    .basicsize = sizeof(EventObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = event_slots,
};

/* ---- functions of the module ------------------------------------------------------------------ */
static PyObject *module_cpu(PyObject *module, PyObject *unused) {
    (void)unused;
    return nd_device_object(nd_module_state(module), nd_cpu_device());
}

static PyObject *module_cuda(PyObject *module, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"index", NULL};
    long long index = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|L:cuda", names, &index)) {
        return NULL;
    }
    nd_device *device = nd_cuda_device(index);
    if (device == NULL) {
        return PyErr_Format(PyExc_ValueError, "cuda: index: %lld is not in 0 ... %d", index,
                            ND_MAX_CUDA - 1);
    }
    return nd_device_object(nd_module_state(module), device);
}

static PyObject *module_all_devices(PyObject *module, PyObject *unused) {
    (void)unused;
    nd_state *state = nd_module_state(module);
    load_cuda();
    int shown = cuda_count > 1 ? cuda_count : 1; /* cuda() is named even where there is none */
    PyObject *list = PyList_New(1 + shown);
    for (int i = 0; list != NULL && i <= shown; i++) {
        PyObject *device = nd_device_object(state, &devices[i]);
        if (device == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, i, device);
        }
    }
    return list;
}

static PyObject *module_cuda_init(PyObject *module, PyObject *unused) {
    (void)unused;
    if (nd_device_ready(nd_module_state(module), nd_cuda_device(0)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *module_cuda_reset(PyObject *module, PyObject *unused) {
    (void)unused;
    nd_state *state = nd_module_state(module);
    if (nd_device_ready(state, nd_cuda_device(0)) < 0) { /* refuses after a fatal fault */
        return NULL;
    }
    for (int i = 1; i <= ND_MAX_CUDA; i++) {
        if (!opened[i]) {
            continue;
        }
        nd_status status = cuda_backend->reset(devices[i].index);
        if (status != ND_OK) {
            return nd_raise(state, "cuda_reset", &devices[i], status);
        }
        devices[i].generation++;
        opened[i] = false;
        if (nd_device_ready(state, &devices[i]) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"cpu", module_cpu, METH_NOARGS, "cpu($module)\n--\n\nThe host's processor and memory."},
    {"cuda", (PyCFunction)(void (*)(void))module_cuda, METH_VARARGS | METH_KEYWORDS,
     "cuda($module, index=0)\n--\n\nA CUDA device, by number; touches no GPU until it is used."},
    {"all_devices", module_all_devices, METH_NOARGS,
     "all_devices($module)\n--\n\n[cpu(), cuda(), ...]; ask each whether it is enabled()."},
    {"cuda_init", module_cuda_init, METH_NOARGS,
     "cuda_init($module)\n--\n\nOpen cuda() now rather than at its first use. RuntimeError says "
     "why "
     "it cannot be."},
    {"cuda_reset", module_cuda_reset, METH_NOARGS,
     "cuda_reset($module)\n--\n\nFree everything on the CUDA devices in use and start new "
     "contexts. "
     "Arrays that lived there raise RuntimeError afterwards. After a fatal fault it raises "
     "CudaFatalError: only a new process helps."},
    {"_exit_after_fatal", exit_after_fatal, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* ---- import ---------------------------------------------------------------------------------- */
int nd_device_init(PyObject *module, nd_state *state) {
    if (devices[0].backend == NULL) {
        for (int i = 0; i <= ND_MAX_CUDA; i++) {
            devices[i] = (nd_device){.index = i == 0 ? 0 : i - 1, .generation = 1};
        }
        devices[0].backend = &cpu_backend;
        find_cuda_path();
        nd_status status = cpu_backend.open(0);
        if (status != ND_OK) {
            nd_raise(state, "cpu", &devices[0], status);
            return -1;
        }
        opened[0] = true;
    }
    state->device_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &device_spec, NULL);
    state->event_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &event_spec, NULL);
    if (state->device_type == NULL || state->event_type == NULL ||
        PyModule_AddType(module, state->device_type) < 0 ||
        PyModule_AddType(module, state->event_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
