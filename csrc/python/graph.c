/* graph.c - the type Graph: a step of work recorded once and enqueued again by one call.
 *
 *     graph = Graph(device, step)   calls step() once: its work is recorded and does not run
 *     graph.replay()                does that work, on the same arrays; with NEEDLE_SYNC by step()
 *                                   itself, so that a fault carries its op
 *
 * A step may use arrays of the one device only: nothing is uploaded, downloaded or waited for in
 * it, and numbers of Python are frozen into it. Arrays that it makes belong to the graph: one that
 * is kept holds what the latest replay left in it. The graph keeps alive, through step, the arrays
 * that the work uses, and the modules whose kernels it launches until the graph itself has gone.
 */
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "handle.h"

typedef struct {
    nd_handle head;
    nd_graph *graph; /* NULL: recording failed */
    PyObject *step;  /* keeps what the recorded work uses */
    PyObject *modules;
} GraphObject;

static int call_step(GraphObject *self) {
    PyObject *result = PyObject_CallNoArgs(self->step);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int record(GraphObject *self) {
    nd_device *device = self->head.device;
    if (nd_check("Graph", device, ND_CALL(device, graph_begin, &self->graph)) < 0) {
        return -1;
    }
    PyObject **recorded = &nd.recorded[nd_device_slot(device)];
    bool sync = nd.sync, trace = nd.trace;
    nd.sync = nd.trace = false; /* neither can wait for recorded work */
    *recorded = self->modules;
    int result = call_step(self);
    *recorded = NULL;
    nd.sync = sync;
    nd.trace = trace;
    return result < 0 ? -1 : nd_check("Graph", device, ND_CALL(device, graph_end, self->graph));
}

static PyObject *graph_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"device", "step", NULL};
    PyObject *where, *step;
    nd_device *device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO:Graph", names, &where, &step) ||
        nd_device_from(where, &device) < 0) {
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
    GraphObject *self = nd_handle_new(type, device);
    if (self == NULL) {
        return NULL;
    }
    self->step = Py_NewRef(step);
    self->modules = PySet_New(NULL);
    if (self->modules == NULL || record(self) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int graph_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((GraphObject *)object)->step);
    return 0;
}

static int graph_clear(PyObject *object) {
    Py_CLEAR(((GraphObject *)object)->step);
    return 0;
}

static void graph_dealloc(PyObject *object) {
    GraphObject *self = (GraphObject *)object;
    PyObject_GC_UnTrack(object);
    if (self->graph != NULL && !nd_handle_is_stale(self)) {
        (void)ND_CALL(self->head.device, graph_free, self->graph);
    }
    graph_clear(object);
    Py_XDECREF(self->modules); /* after the graph, also where the collector cleared it before */
    nd_handle_free(object);
}

static PyObject *graph_replay(PyObject *object, PyObject *unused) {
    GraphObject *self = (GraphObject *)object;
    if (nd_handle_check(self) < 0) {
        return NULL;
    }
    if (nd.sync) {
        return call_step(self) < 0 ? NULL : Py_NewRef(Py_None);
    }
    return nd_handle_none(self, "Graph.replay",
                          ND_CALL(self->head.device, graph_launch, self->graph));
}

static PyMethodDef graph_methods[] = {
    {"replay", graph_replay, METH_NOARGS,
     "replay($self)\n--\n\nEnqueue the recorded work; its results land in the same arrays. While "
     "each op is\nwaited for (NEEDLE_SYNC=1), call step() instead."},
    {NULL, NULL, 0, NULL},
};

ND_HANDLE_TYPE(Graph, graph, Py_TPFLAGS_HAVE_GC,
               "Graph(device, step)\n--\n\nCalls step() once and records what it would do on the "
               "device; replay() does it. ValueError where device.records_graphs is False.",
               {Py_tp_traverse, graph_traverse}, {Py_tp_clear, graph_clear},
               {Py_tp_methods, graph_methods}, )
