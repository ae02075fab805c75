/* parameters.c - the type Parameters: check and pack the arguments of a kernel.
 *
 *     Parameters(name, [(type, kind, size, offset, dtype, written, alignment), ...])
 *
 * needle/kernels/signature.py lists the arguments that each kind of parameter takes; its Parameter
 * has these fields. A wrong argument is a TypeError, ValueError or OverflowError that names the
 * kernel, the parameter's position and its type. Arguments are packed at their offsets.
 */
#include "kernels.h"

#include <math.h>
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "device.h"
#include "object.h"

#define KINDS(X) X(array) X(int) X(uint) X(float) X(bool) X(bytes) X(unknown)

typedef enum {
#define X(name) TAKES_##name,
    KINDS(X)
#undef X
        NUM_TAKES
} takes;

static const char *const kind_names[NUM_TAKES] = {
#define X(name) #name,
    KINDS(X)
#undef X
};

#define ANY_DTYPE (-1)
#define MOST_BYTES 32764 /* of all parameters of a kernel */

typedef struct {
    PyObject *type; /* as C++ spells it */
    takes kind;
    Py_ssize_t size, offset, alignment;
    int dtype; /* of an array, or ANY_DTYPE */
    bool written;
} parameter;

struct nd_parameters {
    PyObject_VAR_HEAD PyObject *name;
    Py_ssize_t bytes;
    parameter list[];
};

const char *nd_parameters_name(nd_parameters *self) { return PyUnicode_AsUTF8(self->name); }

const char *nd_parameter_type(nd_parameters *self, Py_ssize_t index) {
    return PyUnicode_AsUTF8(self->list[index].type);
}

/* ---- the object ------------------------------------------------------------------------------ */
static int read_parameter(PyObject *object, Py_ssize_t index, parameter *p) {
    const char *kind, *dtype;
    PyObject *type;
    int written;
    if (!PyTuple_Check(object)) {
        FAIL(PyExc_TypeError, "Parameters: %zd: must be a tuple, not %.80s", index,
             Py_TYPE(object)->tp_name);
    }
    if (!PyArg_ParseTuple(object, "Usnnzpn:Parameters", &type, &kind, &p->size, &p->offset, &dtype,
                          &written, &p->alignment)) {
        return -1;
    }
    int at = 0;
    while (at < NUM_TAKES && strcmp(kind, kind_names[at]) != 0) {
        at++;
    }
    if (at == NUM_TAKES) {
        FAIL(PyExc_ValueError, "Parameters: %zd: no kind is called %.80s", index, kind);
    }
    p->kind = (takes)at;
    bool number = p->kind == TAKES_int || p->kind == TAKES_uint;
    bool fits = p->kind == TAKES_array   ? p->size == 8
                : p->kind == TAKES_float ? p->size == 2 || p->size == 4 || p->size == 8
                : p->kind == TAKES_bool  ? p->size == 1
                : number ? p->size == 1 || p->size == 2 || p->size == 4 || p->size == 8
                         : true;
    if (!fits || p->size < 1 || p->size > MOST_BYTES || p->offset < 0 || p->offset > MOST_BYTES ||
        p->alignment < 1) {
        FAIL(PyExc_ValueError, "Parameters: %zd: %zd bytes at %zd, aligned to %zd, are no %s",
             index, p->size, p->offset, p->alignment, kind);
    }
    p->dtype = ANY_DTYPE;
    for (int d = 0; dtype != NULL && d < ND_NUM_DTYPES; d++) {
        p->dtype = strcmp(dtype, nd_dtype_name((nd_dtype)d)) == 0 ? d : p->dtype;
    }
    if (dtype != NULL && p->dtype == ANY_DTYPE) {
        FAIL(PyExc_ValueError, "Parameters: %zd: no dtype is called %.80s", index, dtype);
    }
    p->written = written != 0;
    p->type = Py_NewRef(type);
    return 0;
}

static PyObject *parameters_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"name", "parameters", NULL};
    PyObject *name, *object;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "UO:Parameters", names, &name, &object) ||
        PyUnicode_AsUTF8(name) == NULL) {
        return NULL;
    }
    PyObject *list = PySequence_Fast(object, "Parameters: parameters: must be a list of tuples");
    if (list == NULL) {
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    nd_parameters *self = (nd_parameters *)type->tp_alloc(type, count);
    for (Py_ssize_t i = 0; self != NULL && i < count; i++) {
        parameter *p = &self->list[i];
        if (read_parameter(PySequence_Fast_GET_ITEM(list, i), i, p) < 0) {
            Py_CLEAR(self);
        } else if (p->offset + p->size > self->bytes) {
            self->bytes = p->offset + p->size;
        }
    }
    Py_DECREF(list);
    if (self != NULL) {
        self->name = Py_NewRef(name);
    }
    return (PyObject *)self;
}

static void parameters_dealloc(PyObject *object) {
    nd_parameters *self = (nd_parameters *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        Py_XDECREF(self->list[i].type);
    }
    Py_XDECREF(self->name);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- one argument ---------------------------------------------------------------------------- */
/* Where a mistake is: which kernel, which parameter. */
typedef struct {
    nd_device *device;
    nd_parameters *of;
    Py_ssize_t index;
    const parameter *p;
} place;

static int wrong(const place *w, PyObject *exception, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyObject *what = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    if (what != NULL) {
        PyErr_Format(exception, "%U: parameter %zd (%U): %U", w->of->name, w->index, w->p->type,
                     what);
        Py_DECREF(what);
    }
    return -1;
}

static bool is_array(const place *w, PyObject *object, PyObject **array) {
    if (nd_is_ndarray(object)) {
        *array = Py_NewRef(object);
        return true;
    }
    *array = PyObject_GetAttrString(object, "cached_data"); /* of a Tensor */
    if (*array != NULL && nd_is_ndarray(*array)) {
        return true;
    }
    PyErr_Clear();
    Py_CLEAR(*array);
    return false;
}

static int take_array(const place *w, PyObject *array, char *to) {
    const parameter *p = w->p;
    const nd_array *a = nd_array_of(array);
    char here[24], there[24];
    if (nd_check_live(nd_parameters_name(w->of), "an array", a) < 0) {
        return -1;
    }
    if (a->storage->device != w->device) {
        return wrong(w, PyExc_TypeError,
                     "the array is on %s, and the kernel on %s; move it with .to(device)",
                     nd_device_text(a->storage->device, here), nd_device_text(w->device, there));
    }
    if (p->dtype != ANY_DTYPE && (int)a->dtype != p->dtype) {
        const char *wanted = nd_dtype_name((nd_dtype)p->dtype);
        if (p->dtype == ND_U8 && p->alignment > 1) { /* elements that needle has no dtype for */
            return wrong(w, PyExc_TypeError,
                         "the array is %s, and must be the bytes of what is pointed to, as uint8: "
                         "upload NumPy's .view(\"uint8\")",
                         nd_dtype_name(a->dtype));
        }
        return wrong(w, PyExc_TypeError,
                     "the array is %s, and must be %s; convert it with .astype(\"%s\")",
                     nd_dtype_name(a->dtype), wanted, wanted);
    }
    if (!nd_is_contiguous(a)) {
        return wrong(w, PyExc_ValueError,
                     "the array is a view that is not contiguous; a kernel sees memory alone: copy "
                     "it with .compact()");
    }
    if ((uintptr_t)a->data % (uintptr_t)p->alignment != 0) {
        return wrong(w, PyExc_ValueError,
                     "the array begins %zu bytes past a multiple of %zd, and must lie on one; copy "
                     "it with .copy()",
                     (size_t)((uintptr_t)a->data % (uintptr_t)p->alignment), p->alignment);
    }
    memcpy(to, &a->data, (size_t)p->size);
    return 0;
}

static int take_integer(const place *w, PyObject *object, char *to) {
    if (!PyIndex_Check(object)) {
        return wrong(w, PyExc_TypeError, "must be a whole number, not %.80s",
                     Py_TYPE(object)->tp_name);
    }
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) {
        return -1;
    }
    uint64_t bits;
    bool fits;
    int width = (int)w->p->size * 8;
    if (w->p->kind == TAKES_int) {
        int beyond = 0;
        int64_t value = PyLong_AsLongLongAndOverflow(index, &beyond);
        int64_t most = (int64_t)(UINT64_MAX >> 1 >> (64 - width));
        fits = beyond == 0 && value <= most && value >= -most - 1;
        bits = (uint64_t)value;
    } else {
        bits = PyLong_AsUnsignedLongLong(index);
        fits = !PyErr_Occurred() && bits <= UINT64_MAX >> (64 - width);
        PyErr_Clear();
    }
    if (fits) {
        memcpy(to, &bits, (size_t)w->p->size); /* little-endian, like the GPU */
    } else {
        wrong(w, PyExc_OverflowError, "%S is out of bounds for it", index);
    }
    Py_DECREF(index);
    return fits ? 0 : -1;
}

/* The nearest 16-bit float with so many bits of mantissa, ties to even; beyond range: infinity. */
static uint16_t narrow(double x, int mantissa, int bias) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    uint16_t infinity = (uint16_t)((2 * bias + 1) << mantissa);
    if (isnan(x)) {
        return (uint16_t)(sign | infinity | 1 << (mantissa - 1));
    }
    double size = fabs(x);
    int exponent = size < ldexp(1.0, 1 - bias) ? 1 - bias : ilogb(size);
    if (exponent > bias) {
        return sign | infinity;
    }
    int steps = (int)nearbyint(ldexp(size, mantissa - exponent)); /* may carry into the exponent */
    return (uint16_t)(sign | (((exponent + bias - 1) << mantissa) + steps));
}

static int take_float(const place *w, PyObject *object, char *to) {
    nd_number number;
    int is_number = nd_number_from(object, &number);
    if (is_number < 0) {
        return -1;
    }
    if (is_number == 0) {
        return wrong(w, PyExc_TypeError, "must be a number, not %.80s", Py_TYPE(object)->tp_name);
    }
    if (number.beyond && isinf(number.value)) {
        return wrong(w, PyExc_OverflowError, "the integer is too large for a float");
    }
    if (w->p->size == 8) {
        memcpy(to, &number.value, 8);
    } else if (w->p->size == 4) {
        float single = (float)number.value;
        memcpy(to, &single, 4);
    } else {
        bool brain = PyUnicode_CompareWithASCIIString(w->p->type, "__nv_bfloat16") == 0;
        uint16_t half = brain ? narrow(number.value, 7, 127) : narrow(number.value, 10, 15);
        memcpy(to, &half, 2);
    }
    return 0;
}

static int take_bool(const place *w, PyObject *object, char *to) {
    nd_number number;
    int is_number = nd_number_from(object, &number);
    if (is_number < 0) {
        return -1;
    }
    if (is_number == 0 || number.is_float || number.beyond || (number.integer & ~1) != 0) {
        return wrong(w, PyExc_TypeError, "must be True or False, not %R", object);
    }
    *to = (char)number.integer;
    return 0;
}

static int take_bytes(const place *w, PyObject *object, char *to) {
    Py_buffer view;
    if (PyUnicode_Check(object) || PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return wrong(w, PyExc_TypeError,
                     "must be its %zd bytes (bytes, or a ctypes or NumPy structure), not %.80s",
                     w->p->size, Py_TYPE(object)->tp_name);
    }
    bool fits = view.len == w->p->size;
    if (fits) {
        memcpy(to, view.buf, (size_t)view.len);
    } else {
        wrong(w, PyExc_ValueError, "has %zd bytes, and %zd were given", w->p->size, view.len);
    }
    PyBuffer_Release(&view);
    return fits ? 0 : -1;
}

static int take_unknown(const place *w, PyObject *object, char *to) {
    if (PyFloat_CheckExact(object) || PyLong_CheckExact(object) || PyBool_Check(object)) {
        return wrong(w, PyExc_TypeError,
                     "the symbol does not tell its type, so that a Python number has no one form: "
                     "pass a NumPy number such as numpy.float32(2), or declare the types: "
                     "module.kernel(\"%U\", signature=\"const float*, int\")",
                     w->of->name);
    }
    if (nd_is_numpy_array(object)) {
        return wrong(w, PyExc_TypeError,
                     "a NumPy array lies in the host's memory, where no kernel reads it; make an "
                     "NDArray of it");
    }
    return take_bytes(w, object, to);
}

static int take(const place *w, PyObject *object, char *to, PyObject **held) {
    bool array = w->p->kind == TAKES_array || (w->p->kind == TAKES_unknown && w->p->size == 8);
    if (array && is_array(w, object, held)) {
        return take_array(w, *held, to);
    }
    switch (w->p->kind) {
    case TAKES_int:
    case TAKES_uint:
        return take_integer(w, object, to);
    case TAKES_float:
        return take_float(w, object, to);
    case TAKES_bool:
        return take_bool(w, object, to);
    case TAKES_bytes:
        return take_bytes(w, object, to);
    case TAKES_unknown:
        return take_unknown(w, object, to);
    default:
        return wrong(w, PyExc_TypeError, "must be an NDArray or a Tensor, not %.80s",
                     Py_TYPE(object)->tp_name);
    }
}

/* ---- all of them ----------------------------------------------------------------------------- */
int nd_pack(nd_parameters *self, nd_device *device, PyObject *const *arguments, Py_ssize_t count,
            nd_packed *packed) {
    if (count != Py_SIZE(self)) {
        FAIL(PyExc_TypeError, "%U takes %zd arguments after grid and block, but %zd were given",
             self->name, Py_SIZE(self), count);
    }
    size_t bytes = ((size_t)self->bytes + 15) & ~(size_t)15;
    size_t each = (size_t)count * sizeof(void *);
    char *memory = packed->memory;
    if (bytes + 2 * each > sizeof packed->memory) {
        memory = PyMem_Malloc(bytes + 2 * each);
        if (memory == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    packed->count = count;
    packed->bytes = memory;
    packed->pointers = (void **)(memory + bytes);
    packed->held = (PyObject **)(memory + bytes + each);
    memset(memory, 0, bytes); /* padding between arguments, too */
    memset(packed->held, 0, each);
    for (Py_ssize_t i = 0; i < count; i++) {
        const place where = {device, self, i, &self->list[i]};
        packed->pointers[i] = memory + self->list[i].offset;
        if (take(&where, arguments[i], packed->pointers[i], &packed->held[i]) < 0) {
            nd_unpack(packed);
            return -1;
        }
    }
    return 0;
}

void nd_unpack(nd_packed *packed) {
    for (Py_ssize_t i = 0; i < packed->count; i++) {
        Py_XDECREF(packed->held[i]);
    }
    if (packed->bytes != packed->memory) {
        PyMem_Free(packed->bytes);
    }
}

void nd_count_kernel_writes(nd_parameters *self, const nd_packed *packed) {
    for (Py_ssize_t i = 0; i < packed->count; i++) {
        bool unknown = self->list[i].kind == TAKES_unknown;
        if (packed->held[i] != NULL && (self->list[i].written || unknown)) {
            nd_count_write(nd_array_of(packed->held[i]));
        }
    }
}

/* ---- Python ---------------------------------------------------------------------------------- */
static PyObject *parameters_pack(PyObject *object, PyObject *both) {
    nd_parameters *self = (nd_parameters *)object;
    PyObject *where, *arguments;
    nd_device *device;
    nd_packed packed;
    if (!PyArg_ParseTuple(both, "OO!:pack", &where, &PyTuple_Type, &arguments) ||
        nd_device_from(where, &device) < 0 ||
        nd_pack(self, device, &PyTuple_GET_ITEM(arguments, 0), PyTuple_GET_SIZE(arguments),
                &packed) < 0) {
        return NULL;
    }
    PyObject *bytes = PyBytes_FromStringAndSize(packed.bytes, self->bytes);
    nd_unpack(&packed);
    return bytes;
}

static PyMethodDef parameters_methods[] = {
    {"pack", parameters_pack, METH_VARARGS,
     "pack($self, device, arguments, /)\n--\n\nThe arguments (a tuple) of a launch on a device, "
     "checked, as the bytes that the kernel is given."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot parameters_slots[] = {
    {Py_tp_new, parameters_new},
    {Py_tp_dealloc, parameters_dealloc},
    {Py_tp_methods, parameters_methods},
    {Py_tp_doc, "Parameters(name, parameters)\n--\n\nWhat a kernel takes. parameters: for each its "
                "type, kind, size, offset, dtype, written, alignment "
                "(needle.kernels.signature.Parameter)."},
    {0, NULL},
};

PyType_Spec nd_parameters_spec = {
    .name = "needle._C.Parameters",
    .basicsize = sizeof(nd_parameters),
    .itemsize = sizeof(parameter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = parameters_slots,
};
