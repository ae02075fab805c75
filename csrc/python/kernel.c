/* kernel.c - the types Module (machine code on a device) and Kernel (one of its kernels, called).
 *
 *     kernel(grid, block, *arguments, shared=0, cluster=None, cooperative=False)
 *
 * enqueues a launch in the device's stream. A Kernel is made by a class in Python that derives from
 * it (needle/kernels/compile.py) and has a method
 *
 *     admit(grid, block, shared, cluster, cooperative)
 *
 * that raises where a launch does not fit, else returns the five with all sizes as three numbers.
 * `admit` runs once per launch configuration; the last 8 are cached. Arguments are checked at each
 * call.
 * The machine code stays on the device as long as its Module, a Kernel of it, or a Graph that
 * launches from it.
 */
#include "kernels.h"

#include <string.h>

#include "backends.h"
#include "device.h"
#include "errors.h"
#include "handle.h"
#include "object.h"
#include "run.h"

/* ---- Module ---------------------------------------------------------------------------------- */
typedef struct {
    nd_handle head;
    nd_module *module;
} ModuleObject;

static PyObject *module_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"device", "code", NULL};
    PyObject *where, *code;
    nd_device *device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OS:Module", names, &where, &code) ||
        nd_device_from(where, &device) < 0) {
        return NULL;
    }
    if (device->backend->module_load == NULL) {
        return PyErr_Format(PyExc_ValueError, "Module: the %s backend runs no kernels of one's own",
                            nd_device_title(device));
    }
    ModuleObject *self = nd_handle_new(type, device);
    if (self == NULL) {
        return NULL;
    }
    nd_status status;
    ND_CALL_UNLOCKED(status, device, module_load, PyBytes_AS_STRING(code), &self->module);
    return nd_handle_made(self, "Module", status);
}

/* Unloading waits for the kernels that are queued, of which one may never end: that is done before
 * it, without the GIL and without the backend's lock. Meanwhile there may have been a cuda_reset(),
 * which unloads by itself. A failure shows at the next call. */
static void module_dealloc(PyObject *object) {
    ModuleObject *self = (ModuleObject *)object;
    const nd_device *device = self->head.device;
    if (self->module != NULL && !nd_handle_is_stale(self)) {
        nd_status status;
        ND_CALL_UNLOCKED(status, device, synchronize);
        (void)status;
    }
    if (self->module != NULL && !nd_handle_is_stale(self)) {
        (void)ND_CALL(device, module_unload, self->module);
    }
    nd_handle_free(object);
}

ND_HANDLE_TYPE(Module, module, 0,
               "Module(device, code)\n--\n\nMachine code, loaded. ValueError where "
               "device.runs_kernels is False.", )

/* ---- Kernel ---------------------------------------------------------------------------------- */
/* A way to launch; no padding, so that two can be compared as bytes. */
typedef struct {
    int64_t grid[3], block[3], cluster[3]; /* cluster[0] is 0 where there is none */
    int64_t shared, cooperative;
} way;

#define WAYS 8

typedef struct {
    nd_handle head;
    PyObject *module;
    nd_parameters *parameters;
    nd_kernel *kernel;
    way admitted[WAYS];
    int count, next;
} KernelObject;

static void kernel_dealloc(PyObject *object) {
    KernelObject *self = (KernelObject *)object;
    Py_XDECREF(self->module);
    Py_XDECREF(self->parameters);
    nd_handle_free(object);
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"owner", "symbol", "parameters", NULL};
    PyObject *module, *parameters;
    const char *symbol;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!sO!:Kernel", names, nd.module_type,
                                     &module, &symbol, nd.parameters_type, &parameters)) {
        return NULL;
    }
    if (nd_handle_check(module) < 0) {
        return NULL;
    }
    nd_device *device = ((ModuleObject *)module)->head.device;
    KernelObject *self = nd_handle_new(type, device);
    if (self == NULL) {
        return NULL;
    }
    self->module = Py_NewRef(module);
    self->parameters = (nd_parameters *)Py_NewRef(parameters);
    nd_status status =
        ND_CALL(device, module_kernel, ((ModuleObject *)module)->module, symbol, &self->kernel);
    return nd_handle_made(self, "Kernel", status);
}

/* A size as Python's ints, at once; false, without an exception, for all else: admit() says what is
 * wrong with it. */
static bool read_number(PyObject *object, int64_t *out) {
    int beyond = 0;
    if (!PyLong_CheckExact(object)) {
        return false;
    }
    *out = PyLong_AsLongLongAndOverflow(object, &beyond);
    return beyond == 0;
}

static bool read_size(PyObject *object, int64_t *out) {
    if (!PyTuple_CheckExact(object)) {
        return read_number(object, out);
    }
    Py_ssize_t count = PyTuple_GET_SIZE(object);
    bool good = count >= 1 && count <= 3;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        good = read_number(PyTuple_GET_ITEM(object, i), &out[i]);
    }
    return good;
}

/* grid, block, shared, cluster, cooperative */
#define WAY_PARTS 5

static bool read_way(PyObject *const *parts, way *out) {
    *out = (way){.grid = {1, 1, 1}, .block = {1, 1, 1}, .cluster = {1, 1, 1}};
    if (parts[3] == Py_None) {
        memset(out->cluster, 0, sizeof out->cluster);
    } else if (!read_size(parts[3], out->cluster)) {
        return false;
    }
    out->cooperative = parts[4] == Py_True;
    return read_size(parts[0], out->grid) && read_size(parts[1], out->block) &&
           read_number(parts[2], &out->shared) && PyBool_Check(parts[4]);
}

/* The way that was asked for, once it is known to fit. */
static int admit(KernelObject *self, PyObject *const *parts, way *out) {
    if (read_way(parts, out)) {
        for (int i = 0; i < self->count; i++) {
            if (memcmp(&self->admitted[i], out, sizeof *out) == 0) {
                return 0;
            }
        }
    }
    PyObject *said = PyObject_CallMethod((PyObject *)self, "admit", "OOOOO", parts[0], parts[1],
                                         parts[2], parts[3], parts[4]);
    if (said == NULL) {
        return -1;
    }
    bool good = PyTuple_Check(said) && PyTuple_GET_SIZE(said) == WAY_PARTS &&
                read_way(&PyTuple_GET_ITEM(said, 0), out);
    Py_DECREF(said);
    if (!good) {
        FAIL(PyExc_TypeError, "Kernel: admit() must return grid, block, shared, cluster and "
                              "cooperative");
    }
    self->admitted[self->next] = *out;
    self->next = (self->next + 1) % WAYS;
    self->count += self->count < WAYS;
    return 0;
}

static int read_keywords(const char *name, PyObject *keywords, PyObject **parts) {
    static const char *const names[] = {"shared", "cluster", "cooperative"};
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (keywords != NULL && PyDict_Next(keywords, &at, &key, &value)) {
        int i = 0;
        while (i < 3 && PyUnicode_CompareWithASCIIString(key, names[i]) != 0) {
            i++;
        }
        if (i == 3) {
            FAIL(PyExc_TypeError, "%s() has no argument %R", name, key);
        }
        parts[2 + i] = value;
    }
    return 0;
}

static void trace(KernelObject *self, const nd_packed *packed, double took) {
    nd_trace line = {.used = 0};
    for (Py_ssize_t i = 0; i < packed->count; i++) {
        if (packed->held[i] != NULL) {
            nd_trace_operand(&line, nd_parameter_type(self->parameters, i),
                             nd_array_of(packed->held[i]));
        }
    }
    nd_trace_run(nd_parameters_name(self->parameters), self->head.device, took, &line);
}

static nd_launch launch_of(const char *name, const way *w, void **arguments) {
    nd_launch launch = {.name = name,
                        .has_cluster = w->cluster[0] != 0,
                        .cooperative = w->cooperative != 0,
                        .shared = (uint32_t)w->shared,
                        .arguments = arguments};
    for (int i = 0; i < 3; i++) {
        launch.grid[i] = (uint32_t)w->grid[i];
        launch.block[i] = (uint32_t)w->block[i];
        launch.cluster[i] = (uint32_t)w->cluster[i];
    }
    return launch;
}

static int run(KernelObject *self, const way *w, const nd_packed *packed) {
    nd_device *device = self->head.device;
    const char *name = nd_parameters_name(self->parameters);
    PyObject *recorded = nd.recorded[nd_device_slot(device)];
    if (recorded != NULL && PySet_Add(recorded, self->module) < 0) {
        return -1;
    }
    nd_launch launch = launch_of(name, w, packed->pointers);
    nd_count_kernel_writes(self->parameters, packed);
    double start = nd.trace ? nd_microseconds() : 0;
    nd_status status;
    Py_BEGIN_ALLOW_THREADS
    status = device->backend->kernel_launch(device->index, self->kernel, &launch);
    if (status == ND_OK && (nd.sync || nd.trace)) {
        status = device->backend->synchronize(device->index);
    }
    Py_END_ALLOW_THREADS
    if (nd_check(name, device, status) < 0) {
        return -1;
    }
    if (nd.trace) {
        trace(self, packed, nd_microseconds() - start);
    }
    return 0;
}

static PyObject *kernel_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    KernelObject *self = (KernelObject *)object;
    const char *name = nd_parameters_name(self->parameters);
    Py_ssize_t given = PyTuple_GET_SIZE(arguments);
    if (given < 2) {
        return PyErr_Format(PyExc_TypeError, "%s() takes a grid, a block, then its arguments",
                            name);
    }
    PyObject *parts[WAY_PARTS] = {PyTuple_GET_ITEM(arguments, 0), PyTuple_GET_ITEM(arguments, 1),
                                  NULL, Py_None, Py_False};
    way w;
    nd_packed packed;
    if (nd_handle_check(self) < 0 || read_keywords(name, keywords, parts) < 0) {
        return NULL;
    }
    PyObject *nothing = NULL;
    if (parts[2] == NULL) {
        parts[2] = nothing = PyLong_FromLong(0);
    }
    int good = admit(self, parts, &w);
    Py_XDECREF(nothing);
    if (good < 0 || nd_pack(self->parameters, self->head.device, &PyTuple_GET_ITEM(arguments, 2),
                            given - 2, &packed) < 0) {
        return NULL;
    }
    good = run(self, &w, &packed);
    nd_unpack(&packed);
    return good < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *kernel_blocks(PyObject *object, PyObject *arguments) {
    KernelObject *self = (KernelObject *)object;
    int threads, blocks;
    unsigned shared;
    if (!PyArg_ParseTuple(arguments, "iI:blocks", &threads, &shared) || nd_handle_check(self) < 0) {
        return NULL;
    }
    nd_status status =
        ND_CALL(self->head.device, kernel_blocks, self->kernel, threads, shared, &blocks);
    if (nd_check(nd_parameters_name(self->parameters), self->head.device, status) < 0) {
        return NULL;
    }
    return PyLong_FromLong(blocks);
}

static PyMethodDef kernel_methods[] = {
    {"blocks", kernel_blocks, METH_VARARGS,
     "blocks($self, threads, shared, /)\n--\n\nBlocks of so many threads and bytes of dynamic "
     "shared memory that a multiprocessor holds."},
    {NULL, NULL, 0, NULL},
};

ND_HANDLE_TYPE(
    Kernel, kernel, Py_TPFLAGS_BASETYPE,
    "Kernel(owner, symbol, parameters)\n--\n\nA kernel of a Module. A class that derives "
    "from it has admit(grid, block, shared, cluster, cooperative).",
    {Py_tp_call, kernel_call}, {Py_tp_methods, kernel_methods}, )
