/* event.c - the type Event: a point in a device's stream of work, for timing and for asking whether
 * the work before it is done.
 */
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "handle.h"

typedef struct {
    nd_handle head;
    nd_event *event;
} EventObject;

static PyObject *event_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"device", NULL};
    PyObject *where = Py_None;
    nd_device *device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|O:Event", names, &where) ||
        nd_device_from(where, &device) < 0) {
        return NULL;
    }
    EventObject *self = nd_handle_new(type, device);
    return self == NULL ? NULL
                        : nd_handle_made(self, "Event", ND_CALL(device, event_new, &self->event));
}

static void event_dealloc(PyObject *object) {
    EventObject *self = (EventObject *)object;
    if (self->event != NULL && !nd_handle_is_stale(self)) {
        (void)ND_CALL(self->head.device, event_free, self->event);
    }
    nd_handle_free(object);
}

/* The `side` of a call, or -1 with an exception. */
static int side_of(EventObject *self, PyObject *arguments, PyObject *keywords, const char *format) {
    static char *names[] = {"side", NULL};
    int side = 0;
    return PyArg_ParseTupleAndKeywords(arguments, keywords, format, names, &side) &&
                   nd_handle_check(self) == 0
               ? side
               : -1;
}

static PyObject *event_record(PyObject *object, PyObject *arguments, PyObject *keywords) {
    EventObject *self = (EventObject *)object;
    const int side = side_of(self, arguments, keywords, "|p:record");
    return side < 0 ? NULL
                    : nd_handle_none(self, "Event.record",
                                     ND_CALL(self->head.device, event_record, self->event, side));
}

static PyObject *event_wait(PyObject *object, PyObject *arguments, PyObject *keywords) {
    EventObject *self = (EventObject *)object;
    const int side = side_of(self, arguments, keywords, "|p:wait");
    return side < 0 ? NULL
                    : nd_handle_none(self, "Event.wait",
                                     ND_CALL(self->head.device, event_wait, self->event, side));
}

static PyObject *event_done(PyObject *object, PyObject *unused) {
    EventObject *self = (EventObject *)object;
    bool done = false;
    nd_status status;
    if (nd_handle_check(self) < 0) {
        return NULL;
    }
    ND_CALL_UNLOCKED(status, self->head.device, event_query, self->event, &done);
    return nd_check("Event.done", self->head.device, status) < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *event_elapsed(PyObject *object, PyObject *other_object) {
    EventObject *self = (EventObject *)object, *other = (EventObject *)other_object;
    double milliseconds = 0;
    nd_status status;
    if (Py_TYPE(object) != Py_TYPE(other_object) || self->head.device != other->head.device) {
        return PyErr_Format(PyExc_TypeError,
                            "Event.elapsed: other: must be an Event of this device");
    }
    if (nd_handle_check(self) < 0 || nd_handle_check(other) < 0) {
        return NULL;
    }
    ND_CALL_UNLOCKED(status, self->head.device, event_elapsed, self->event, other->event,
                     &milliseconds);
    return nd_check("Event.elapsed", self->head.device, status) < 0
               ? NULL
               : PyFloat_FromDouble(milliseconds);
}

static PyMethodDef event_methods[] = {
    {"record", (PyCFunction)(void (*)(void))event_record, METH_VARARGS | METH_KEYWORDS,
     "record($self, side=False)\n--\n\nMark the present point of the device's stream of work, or "
     "of its side stream."},
    {"wait", (PyCFunction)(void (*)(void))event_wait, METH_VARARGS | METH_KEYWORDS,
     "wait($self, side=False)\n--\n\nLet the device's stream, or its side stream, go on after the "
     "marked point alone. The host does not wait."},
    {"done", event_done, METH_NOARGS,
     "done($self)\n--\n\nTrue if all work before the marked point is done. Does not wait."},
    {"elapsed", event_elapsed, METH_O,
     "elapsed($self, other)\n--\n\nMilliseconds from this event to a later one; waits for both."},
    {NULL, NULL, 0, NULL},
};

ND_HANDLE_TYPE(Event, event, 0, "Event(device=None)\n--\n\nA point in a device's stream of work.",
               {Py_tp_methods, event_methods}, )
