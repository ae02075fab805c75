/* graph.c - the type Graph: a step of work recorded once and enqueued again by one call.
 *
 *     graph = Graph(device, step)   calls step() twice: for real, then recorded
 *     graph.replay()                does the work of step() once more, on the same arrays
 *
 * A step may use arrays of the one device only: nothing is uploaded, downloaded or waited for in it,
 * and numbers of Python are frozen into it. It must do the same in both calls and keep no array that
 * it makes: its results go into arrays made before, which the graph keeps alive through step.
 */
#include "python.h"

typedef struct {
    PyObject_HEAD nd_device *device;
    uint64_t generation;
    nd_graph *graph; /* NULL: recording failed */
    PyObject *step;  /* keeps what the recorded work uses */
} GraphObject;

static nd_state *state_of(PyObject *object) { return PyType_GetModuleState(Py_TYPE(object)); }

static int record(nd_state *state, GraphObject *self) {
    const nd_backend *backend = self->device->backend;
    int index = self->device->index;
    nd_status status = backend->graph_begin(index, &self->graph);
    if (status != ND_OK) {
        nd_raise(state, "Graph", self->device, status);
        return -1;
    }
    PyObject *result = PyObject_CallNoArgs(self->step);
    Py_XDECREF(result); /* gone before the second call asks for the same memory */
    if (result == NULL) {
        return -1;
    }
    status = backend->graph_capture(index, self->graph);
    if (status != ND_OK) {
        nd_raise(state, "Graph", self->device, status);
        return -1;
    }
    bool sync = state->sync, trace = state->trace; /* neither can wait for recorded work */
    state->sync = state->trace = false;
    result = PyObject_CallNoArgs(self->step);
    state->sync = sync;
    state->trace = trace;
    Py_XDECREF(result);
    if (result == NULL) {
        return -1;
    }
    status = backend->graph_end(index, self->graph);
    if (status != ND_OK) {
        nd_raise(state, "Graph", self->device, status);
        return -1;
    }
    return 0;
}

static PyObject *graph_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"device", "step", NULL};
    nd_state *state = PyType_GetModuleState(type);
    PyObject *object, *step;
    nd_device *device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO:Graph", names, &object, &step) ||
        nd_device_from(state, object, &device) < 0) {
        return NULL;
    }
    if (!PyCallable_Check(step)) {
        return PyErr_Format(PyExc_TypeError, "Graph: step: must be callable, not %.80s",
                            Py_TYPE(step)->tp_name);
    }
    GraphObject *self = (GraphObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->device = device;
    self->generation = device->generation;
    self->step = Py_NewRef(step);
    if (record(state, self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int graph_traverse(PyObject *object, visitproc visit, void *arg) {
    GraphObject *self = (GraphObject *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->step);
    return 0;
}

static int graph_clear(PyObject *object) {
    GraphObject *self = (GraphObject *)object;
    Py_CLEAR(self->step);
    return 0;
}

static void graph_dealloc(PyObject *object) {
    GraphObject *self = (GraphObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->graph != NULL && self->generation == self->device->generation) {
        (void)self->device->backend->graph_free(self->device->index, self->graph);
    }
    graph_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *graph_replay(PyObject *object, PyObject *unused) {
    (void)unused;
    GraphObject *self = (GraphObject *)object;
    nd_state *state = state_of(object);
    if (self->generation != self->device->generation) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Graph: was recorded before cuda_reset(); record it anew");
        return NULL;
    }
    if (nd_check_alive(state, self->device) < 0) {
        return NULL;
    }
    nd_status status = self->device->backend->graph_launch(self->device->index, self->graph);
    if (status != ND_OK) {
        return nd_raise(state, "Graph.replay", self->device, status);
    }
    Py_RETURN_NONE;
}

static PyMethodDef graph_methods[] = {
    {"replay", graph_replay, METH_NOARGS,
     "replay($self)\n--\n\nEnqueue the recorded work once more; its results land in the same "
     "arrays."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot graph_slots[] = {
    {Py_tp_new, graph_new},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_traverse, graph_traverse},
    {Py_tp_clear, graph_clear},
    {Py_tp_methods, graph_methods},
    {Py_tp_doc, "Graph(device, step)\n--\n\nCalls step() twice, once for real and once to record "
                "what it does on the device; replay() does it again. ValueError on the CPU."},
    {0, NULL},
};

static PyType_Spec graph_spec = {
    .name = "needle._C.Graph",
    .basicsize = sizeof(GraphObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = graph_slots,
};

int nd_graph_init(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &graph_spec, NULL);
    int result = type == NULL ? -1 : PyModule_AddObjectRef(module, "Graph", type);
    Py_XDECREF(type);
    return result;
}
