/* event.c - the type Event: a point in a device's stream of work, for timing and for asking whether
 * the work before it is done.
 */
#include "device.h"
#include "errors.h"
#include "streams.h"

typedef struct {
    nd_streamed head;
    nd_event *event;
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
    EventObject *self = nd_streamed_new(type, device);
    if (self == NULL) {
        return NULL;
    }
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
    if (self->event != NULL && !nd_streamed_stale(self)) {
        (void)self->head.device->backend->event_free(self->head.device->index, self->event);
    }
    nd_streamed_free(object);
}

static PyObject *event_record(PyObject *object, PyObject *unused) {
    EventObject *self = (EventObject *)object;
    nd_state *state = PyType_GetModuleState(Py_TYPE(object));
    if (nd_streamed_check(state, self) < 0) {
        return NULL;
    }
    nd_status status =
        self->head.device->backend->event_record(self->head.device->index, self->event);
    return nd_none_or_raise(state, "Event.record", self->head.device, status);
}

static PyObject *event_done(PyObject *object, PyObject *unused) {
    EventObject *self = (EventObject *)object;
    nd_state *state = PyType_GetModuleState(Py_TYPE(object));
    if (nd_streamed_check(state, self) < 0) {
        return NULL;
    }
    bool done = false;
    nd_status status;
    Py_BEGIN_ALLOW_THREADS
    status = self->head.device->backend->event_query(self->head.device->index, self->event, &done);
    Py_END_ALLOW_THREADS
    return status == ND_OK ? PyBool_FromLong(done)
                           : nd_raise(state, "Event.done", self->head.device, status);
}

static PyObject *event_elapsed(PyObject *object, PyObject *other_object) {
    EventObject *self = (EventObject *)object, *other = (EventObject *)other_object;
    nd_state *state = PyType_GetModuleState(Py_TYPE(object));
    if (!PyObject_TypeCheck(other_object, state->event_type) ||
        self->head.device != other->head.device) {
        return PyErr_Format(PyExc_TypeError,
                            "Event.elapsed: other: must be an Event of this device");
    }
    if (nd_streamed_check(state, self) < 0 || nd_streamed_check(state, other) < 0) {
        return NULL;
    }
    double milliseconds = 0;
    nd_status status;
    Py_BEGIN_ALLOW_THREADS
    status = self->head.device->backend->event_elapsed(self->head.device->index, self->event,
                                                       other->event, &milliseconds);
    Py_END_ALLOW_THREADS
    if (status != ND_OK) {
        return nd_raise(state, "Event.elapsed", self->head.device, status);
    }
    return PyFloat_FromDouble(milliseconds);
}

static PyMethodDef event_methods[] = {
    {"record", event_record, METH_NOARGS,
     "record($self)\n--\n\nMark the present point of the device's stream of work."},
    {"done", event_done, METH_NOARGS,
     "done($self)\n--\n\nIs all work before the marked point done? Does not wait."},
    {"elapsed", event_elapsed, METH_O,
     "elapsed($self, other)\n--\n\nMilliseconds from this event to a later one; waits for both."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_methods},
    {Py_tp_doc, "Event(device=None)\n--\n\nA point in a device's stream of work."},
    {0, NULL},
};

PyType_Spec nd_event_spec = {
    .name = "needle._C.Event",
    .basicsize = sizeof(EventObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = event_slots,
};
