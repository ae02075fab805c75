/* flat.c - NDArray.flat: a 1-D view where the strides allow one, else a Flat, a window on the array.
 *
 * Slices of a Flat copy, and are copied back when they are assigned.
 */
#include <string.h>

#include "arguments.h"
#include "methods.h"
#include "object.h"

typedef struct {
    PyObject_HEAD
    PyObject *base; /* an NDArray */
} FlatObject;

static const nd_array *flat_array(PyObject *self) {
    return nd_array_of(((FlatObject *)self)->base);
}

static int flat_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((FlatObject *)self)->base);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int flat_clear(PyObject *self) {
    Py_CLEAR(((FlatObject *)self)->base);
    return 0;
}

static void flat_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    flat_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static Py_ssize_t flat_length(PyObject *self) { return (Py_ssize_t)nd_size(flat_array(self)); }

/* Element `at` in C order, as a view of shape (1,). */
static int flat_element(const nd_array *a, int64_t at, nd_array *view) {
    int64_t size = nd_size(a), offset = 0;
    if (at < -size || at >= size) {
        FAIL(PyExc_IndexError, "index %lld is out of range for flat of size %lld", (long long)at,
             (long long)size);
    }
    at += at < 0 ? size : 0;
    for (int i = a->ndim - 1; i >= 0; i--) {
        offset += at % a->shape[i] * a->strides[i];
        at /= a->shape[i];
    }
    *view = *a;
    view->ndim = 1;
    view->shape[0] = view->strides[0] = 1;
    view->data = (char *)a->data + offset * (int64_t)nd_dtype_size(a->dtype);
    return 0;
}

/* The elements in C order, as a fresh 1-D array. */
static int flat_copy(nd_state *state, const nd_array *a, nd_array *out) {
    if (nd_copy(state, a, a->dtype, out) < 0) {
        return -1;
    }
    out->shape[0] = nd_size(out);
    out->strides[0] = out->ndim = 1;
    return 0;
}

static PyObject *flat_getitem(PyObject *self, PyObject *key) {
    nd_state *state = nd_state_of(((FlatObject *)self)->base);
    const nd_array *a = flat_array(self);
    nd_array view, copy;
    if (PyIndex_Check(key)) {
        int64_t at;
        if (nd_int64_from(key, "index", &at) < 0 || flat_element(a, at, &view) < 0) {
            return NULL;
        }
        return nd_wrap_view(state, &view);
    }
    if (flat_copy(state, a, &copy) < 0) {
        return NULL;
    }
    unsigned integers;
    PyObject *result =
        nd_index_view(&copy, key, &view, &integers) < 0 ? NULL : nd_wrap_view(state, &view);
    nd_array_clear(&copy);
    return result;
}

static PyObject *flat_sequence_item(PyObject *self, Py_ssize_t at) {
    nd_array view;
    return flat_element(flat_array(self), at, &view) < 0
               ? NULL
               : nd_wrap_view(nd_state_of(((FlatObject *)self)->base), &view);
}

static int flat_setitem(PyObject *self, PyObject *key, PyObject *value) {
    nd_state *state = nd_state_of(((FlatObject *)self)->base);
    const nd_array *a = flat_array(self);
    nd_array view, copy;
    if (value == NULL) {
        FAIL(PyExc_TypeError, "elements of an array cannot be deleted");
    }
    if (PyIndex_Check(key)) {
        int64_t at;
        return nd_int64_from(key, "index", &at) < 0 || flat_element(a, at, &view) < 0
                   ? -1
                   : nd_store(state, &view, value);
    }
    if (flat_copy(state, a, &copy) < 0) {
        return -1;
    }
    unsigned integers;
    int result =
        nd_index_view(&copy, key, &view, &integers) < 0 ? -1 : nd_store(state, &view, value);
    if (result == 0) {
        copy.ndim = a->ndim;
        memcpy(copy.shape, a->shape, sizeof copy.shape);
        nd_contiguous_strides(copy.ndim, copy.shape, copy.strides);
        result = nd_assign(state, "setitem", a, &copy);
    }
    nd_array_clear(&copy);
    return result;
}

static PyObject *flat_numpy(PyObject *self, PyObject *arguments) {
    nd_state *state = nd_state_of(((FlatObject *)self)->base);
    nd_array copy;
    if (flat_copy(state, flat_array(self), &copy) < 0) {
        return NULL;
    }
    PyObject *result = nd_to_numpy(state, &copy);
    nd_array_clear(&copy);
    return result;
}

/* NumPy's protocol: the elements are gathered, so there is no sharing their memory. */
static PyObject *flat_array_protocol(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|OO:__array__", names, &dtype, &copy)) {
        return NULL;
    }
    if (copy == Py_False) {
        return PyErr_Format(PyExc_ValueError,
                            "__array__: this flat cannot be given without a copy");
    }
    return nd_numpy_cast(flat_numpy(self, NULL), dtype, true);
}

static PyObject *flat_shape(PyObject *self, void *closure) {
    return Py_BuildValue("(n)", flat_length(self));
}

static PyObject *flat_base_attribute(PyObject *self, void *name) {
    return PyObject_GetAttrString(((FlatObject *)self)->base, name);
}

static PyObject *flat_repr(PyObject *self) {
    PyObject *array = flat_numpy(self, NULL);
    PyObject *text = array != NULL ? PyUnicode_FromFormat("Flat(%S)", array) : NULL;
    Py_XDECREF(array);
    return text;
}

static PyMethodDef flat_methods[] = {
    {"numpy", flat_numpy, METH_NOARGS, "numpy($self)\n--\n\nThe elements in C order, copied."},
    {"__array__", KEYWORD_METHOD(flat_array_protocol),
     "__array__($self, dtype=None, copy=None)\n--\n\nNumPy's protocol."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef flat_getset[] = {
    {"shape", flat_shape, NULL, NULL, NULL},
    {"size", flat_base_attribute, NULL, NULL, "size"},
    {"dtype", flat_base_attribute, NULL, NULL, "dtype"},
    {"device", flat_base_attribute, NULL, NULL, "device"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot flat_slots[] = {
    {Py_tp_dealloc, flat_dealloc},
    {Py_tp_traverse, flat_traverse},
    {Py_tp_clear, flat_clear},
    {Py_tp_repr, flat_repr},
    {Py_tp_methods, flat_methods},
    {Py_tp_getset, flat_getset},
    {Py_mp_length, flat_length},
    {Py_mp_subscript, flat_getitem},
    {Py_mp_ass_subscript, flat_setitem},
    {Py_sq_length, flat_length},
    {Py_sq_item, flat_sequence_item},
    {Py_tp_doc, "The elements of an array in C order; what is set here is set there."},
    {0, NULL},
};

PyType_Spec nd_flat_spec = {
    .name = "needle._C.Flat",
    .basicsize = sizeof(FlatObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = flat_slots,
};

PyObject *nd_ndarray_flat(PyObject *self, void *closure) {
    nd_state *state = nd_state_of(self);
    nd_array view = *nd_array_of(self);
    view.ndim = 1;
    view.shape[0] = nd_size(nd_array_of(self));
    if (nd_reshape_strides(nd_array_of(self), &view)) {
        return nd_wrap_view(state, &view);
    }
    FlatObject *flat = PyObject_GC_New(FlatObject, state->flat_type);
    if (flat != NULL) {
        flat->base = Py_NewRef(self);
        PyObject_GC_Track(flat);
    }
    return (PyObject *)flat;
}
