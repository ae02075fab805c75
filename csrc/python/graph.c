/* graph.c - the type Graph: a step of work recorded once and enqueued again by one call.
 *
 *     graph = Graph(device, step)   calls step() twice: for real, then recorded
 *     graph.replay()                does the work of step() once more, on the same arrays; with
 *                                   NEEDLE_SYNC by step() itself, so that a fault carries its op
 *
 * A step may use arrays of the one device only: nothing is uploaded, downloaded or waited for in it,
 * and numbers of Python are frozen into it. It must do the same in both calls and keep no array that
 * it makes: its results go into arrays made before, which the graph keeps alive through step. The
 * modules whose kernels it launches are kept as well, until the graph itself has gone.
 */
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "streams.h"

typedef struct {
    nd_streamed head;
    nd_graph *graph; /* NULL: recording failed */
    PyObject *step;  /* keeps what the recorded work uses */
    PyObject *modules;
} GraphObject;

static int record_steps(nd_state *state, GraphObject *self) {
    nd_device *device = self->head.device;
    const nd_backend *backend = device->backend;
    nd_status status;
    PyObject *result = PyObject_CallNoArgs(self->step);
    Py_XDECREF(result); /* gone before the second call asks for the same memory */
    if (result == NULL) {
        return -1;
    }
    status = backend->graph_capture(device->index, self->graph);
    if (nd_check(state, "Graph", device, status) < 0) {
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
    return nd_check(state, "Graph", device, backend->graph_end(device->index, self->graph));
}

static int record(nd_state *state, GraphObject *self) {
    nd_device *device = self->head.device;
    nd_status status = device->backend->graph_begin(device->index, &self->graph);
    if (nd_check(state, "Graph", device, status) < 0) {
        return -1;
    }
    PyObject **recorded = &state->recorded[nd_device_slot(device)];
    *recorded = self->modules;
    int result = record_steps(state, self);
    *recorded = NULL;
    return result;
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
    if (device->backend->graph_begin == NULL) {
        return PyErr_Format(PyExc_ValueError,
                            "Graph: the %s backend records no graphs; call the step itself",
                            nd_device_title(device));
    }
    GraphObject *self = nd_streamed_new(type, device);
    if (self == NULL) {
        return NULL;
    }
    self->step = Py_NewRef(step);
    self->modules = PySet_New(NULL);
    if (self->modules == NULL || record(state, self) < 0) {
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
    PyObject_GC_UnTrack(object);
    if (self->graph != NULL && !nd_streamed_stale(self)) {
        (void)self->head.device->backend->graph_free(self->head.device->index, self->graph);
    }
    graph_clear(object);
    Py_XDECREF(self->modules); /* after the graph, also where the collector cleared it before */
    nd_streamed_free(object);
}

static PyObject *graph_replay(PyObject *object, PyObject *unused) {
    GraphObject *self = (GraphObject *)object;
    nd_state *state = PyType_GetModuleState(Py_TYPE(object));
    if (nd_streamed_check(state, self) < 0) {
        return NULL;
    }
    if (state->sync) {
        PyObject *result = PyObject_CallNoArgs(self->step);
        Py_XDECREF(result);
        return result == NULL ? NULL : Py_NewRef(Py_None);
    }
    nd_status status =
        self->head.device->backend->graph_launch(self->head.device->index, self->graph);
    return nd_none_or_raise(state, "Graph.replay", self->head.device, status);
}

static PyMethodDef graph_methods[] = {
    {"replay", graph_replay, METH_NOARGS,
     "replay($self)\n--\n\nEnqueue the recorded work once more; its results land in the same "
     "arrays. While each op is\nwaited for (NEEDLE_SYNC=1), call step() instead."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot graph_slots[] = {
    {Py_tp_new, graph_new},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_traverse, graph_traverse},
    {Py_tp_clear, graph_clear},
    {Py_tp_methods, graph_methods},
    {Py_tp_doc, "Graph(device, step)\n--\n\nCalls step() twice, once for real and once to record "
                "what it does on the device; replay() does it again. ValueError where "
                "device.records_graphs is False."},
    {0, NULL},
};

PyType_Spec nd_graph_spec = {
    .name = "needle._C.Graph",
    .basicsize = sizeof(GraphObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = graph_slots,
};
