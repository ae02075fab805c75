/* dlpack.c - NDArray to and from any library that speaks DLPack, sharing memory.
 *
 * An export holds a reference on the memory itself; an import holds the producer's structure until
 * the last view is gone. Both forms of capsule are made and taken. The structures are laid out as
 * DLPack's specification says. On CUDA a producer is told our stream, which it lets wait for its
 * work, and gets its memory back once our work there is done.
 */
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "errors.h"
#include "exchange.h"
#include "object.h"
#include "run.h"

/* DLPack's codes: 0 int, 1 unsigned, 2 float, 4 bfloat, 6 bool. */
static const uint8_t codes[ND_NUM_DTYPES] = {
    [ND_F32] = 2, [ND_BF16] = 4, [ND_F16] = 2,  [ND_I32] = 0,
    [ND_I64] = 0, [ND_U8] = 1,   [ND_BOOL] = 6, [ND_U16] = 1,
};

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };
enum { DL_READ_ONLY = 1, DL_COPIED = 2 };

typedef struct {
    int32_t type;
    int32_t index;
} dl_device;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} dl_dtype;

typedef struct {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_versioned {
    struct {
        uint32_t major;
        uint32_t minor;
    } version;
    void *context;
    void (*deleter)(struct dl_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_versioned;

/* An export owns the view, and both forms of the structure (one is used). */
typedef struct {
    nd_array view;
    dl_managed managed;
    dl_versioned versioned;
} dl_export;

static void export_free(dl_export *hold) {
    nd_array_clear(&hold->view);
    free(hold);
}

static void export_delete_managed(dl_managed *self) { export_free(self->context); }
static void export_delete_versioned(dl_versioned *self) { export_free(self->context); }

/* A capsule that was not consumed still owns the export. */
static void capsule_free(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        versioned->deleter(versioned);
    }
}

static dl_device dlpack_device(const nd_array *a) {
    nd_device *device = a->storage->device;
    return (dl_device){nd_dlpack_type(device), device->index};
}

PyObject *nd_ndarray_dlpack_device(PyObject *self, PyObject *unused) {
    dl_device device = dlpack_device(nd_array_of(self));
    return Py_BuildValue("(ii)", device.type, device.index);
}

PyObject *nd_ndarray_dlpack(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *max_version = Py_None, *wanted = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|$OOOO:__dlpack__", names, &stream,
                                     &max_version, &wanted, &copy)) {
        return NULL;
    }
    const nd_array *a = nd_array_of(self);
    nd_device *device = a->storage->device;
    if (nd_check_live("__dlpack__", "x", a) < 0) {
        return NULL;
    }
    long major = 0;
    if (max_version != Py_None) {
        PyObject *first = PySequence_GetItem(max_version, 0);
        major = first != NULL ? PyLong_AsLong(first) : -1;
        Py_XDECREF(first);
        if (major == -1 && PyErr_Occurred()) {
            return NULL;
        }
    }
    if (wanted != Py_None) {
        dl_device own = dlpack_device(a), other;
        if (!PyTuple_Check(wanted)) {
            return PyErr_Format(PyExc_TypeError,
                                "__dlpack__: dl_device: must be a tuple (type, index), not %.80s",
                                Py_TYPE(wanted)->tp_name);
        }
        if (!PyArg_ParseTuple(wanted, "ii", &other.type, &other.index)) {
            return NULL;
        }
        if (other.type != own.type || other.index != own.index) {
            return PyErr_Format(PyExc_BufferError,
                                "__dlpack__: the array is on another device; use .to(device)");
        }
    }
    dl_export *hold = calloc(1, sizeof *hold);
    if (hold == NULL) {
        return PyErr_NoMemory();
    }
    if (copy != Py_True) {
        nd_count_write(a); /* the consumer may write */
        nd_array_view(a, &hold->view);
    } else if (nd_copy(a, a->dtype, &hold->view) < 0) {
        free(hold);
        return NULL;
    }
    /* The consumer's stream is not ours: all work on the memory is waited for. */
    nd_status status = ND_OK;
    ND_CALL_UNLOCKED(status, device, synchronize);
    if (status != ND_OK) {
        export_free(hold);
        return nd_raise("__dlpack__", device, status);
    }
    nd_dtype dtype = hold->view.dtype;
    dl_tensor tensor = {.data = hold->view.data,
                        .device = dlpack_device(&hold->view),
                        .ndim = hold->view.ndim,
                        .dtype = {codes[dtype], (uint8_t)(8 * nd_dtype_size(dtype)), 1},
                        .shape = hold->view.shape,
                        .strides = hold->view.strides};
    PyObject *capsule;
    if (major >= 1) {
        hold->versioned.version.major = 1;
        hold->versioned.context = hold;
        hold->versioned.deleter = export_delete_versioned;
        hold->versioned.flags = copy == Py_True ? DL_COPIED : 0;
        hold->versioned.tensor = tensor;
        capsule = PyCapsule_New(&hold->versioned, "dltensor_versioned", capsule_free);
    } else {
        hold->managed.tensor = tensor;
        hold->managed.context = hold;
        hold->managed.deleter = export_delete_managed;
        capsule = PyCapsule_New(&hold->managed, "dltensor", capsule_free);
    }
    if (capsule == NULL) {
        export_free(hold);
    }
    return capsule;
}

/* Of memory there: the CPU's also where it is pinned, CUDA's also where it is managed. NULL: neither
 * the one nor the other. */
static nd_device *device_of(dl_device place) {
    if (place.type == DL_CPU || place.type == DL_CUDA_HOST) {
        return nd_host();
    }
    return nd_device_of_dlpack(place.type == DL_CUDA_MANAGED ? DL_CUDA : place.type, place.index);
}

/* A producer's deleter may run Python, also while an exception is set; the interpreter may be gone
 * when the last view goes. */
#define IMPORT_RELEASE(form)                                                           \
    static void import_release_##form(void *owner) {                                   \
        dl_##form *producer = owner;                                                   \
        if (producer->deleter != NULL && Py_IsInitialized()) {                         \
            nd_device *device = device_of(producer->tensor.device);                    \
            (void)ND_CALL(device, synchronize); /* a failure shows at the next call */ \
            PyGILState_STATE gil = PyGILState_Ensure();                                \
            PyObject *type, *value, *traceback;                                        \
            PyErr_Fetch(&type, &value, &traceback);                                    \
            producer->deleter(producer);                                               \
            PyErr_Restore(type, value, traceback);                                     \
            PyGILState_Release(gil);                                                   \
        }                                                                              \
    }
IMPORT_RELEASE(managed)
IMPORT_RELEASE(versioned)

static int import_dtype(dl_dtype dtype, nd_dtype *out) {
    for (int d = 0; d < ND_NUM_DTYPES; d++) {
        if (dtype.lanes == 1 && dtype.code == codes[d] &&
            dtype.bits == 8 * nd_dtype_size((nd_dtype)d)) {
            *out = (nd_dtype)d;
            return 0;
        }
    }
    FAIL(PyExc_TypeError,
         "from_dlpack: dtype (code %d, %d bits, %d lanes) is none of ours; "
         "convert it to float32, bfloat16, float16, int32, int64, uint8, bool or uint16 "
         "first",
         dtype.code, dtype.bits, dtype.lanes);
}

/* A view on the producer's memory; `owner` goes to the storage only on success. */
static int import_tensor(const dl_tensor *tensor, void *owner, void (*release)(void *),
                         nd_array *out) {
    nd_device *device = device_of(tensor->device);
    if (device == NULL) {
        FAIL(PyExc_TypeError,
             "from_dlpack: a device of DLPack's type %d is neither the CPU nor CUDA",
             (int)tensor->device.type);
    }
    if (nd_device_ready(device) < 0 || import_dtype(tensor->dtype, &out->dtype) < 0) {
        return -1;
    }
    if (tensor->ndim < 0 || tensor->ndim > ND_MAX_DIMS) {
        FAIL(PyExc_ValueError, "from_dlpack: has %d axes; an NDArray has at most %d", tensor->ndim,
             ND_MAX_DIMS);
    }
    out->ndim = tensor->ndim;
    memcpy(out->shape, tensor->shape, (size_t)out->ndim * sizeof *out->shape);
    nd_contiguous_strides(out->ndim, out->shape, out->strides);
    if (tensor->strides != NULL) {
        memcpy(out->strides, tensor->strides, (size_t)out->ndim * sizeof *out->strides);
    }
    int64_t first, last;
    if (nd_check("from_dlpack", NULL, nd_extent(out, &first, &last)) < 0) {
        return -1;
    }
    /* As numbers: an empty tensor may say any offset. */
    uintptr_t data = (uintptr_t)tensor->data + (uintptr_t)tensor->byte_offset;
    if (data % nd_dtype_size(out->dtype) != 0 && last > first) {
        FAIL(PyExc_ValueError, "from_dlpack: the memory is not aligned to its elements");
    }
    out->data = (void *)data;
    void *memory = last > first ? (char *)out->data + first : NULL;
    return nd_check(
        "from_dlpack", NULL,
        nd_storage_borrow(device, memory, (size_t)(last - first), owner, release, &out->storage));
}

/* Our stream on the producer's device, as its __dlpack__ takes it; None on the CPU, or where it has
 * not said its device. */
static PyObject *stream_for(PyObject *producer) {
    PyObject *said = PyObject_CallMethod(producer, "__dlpack_device__", NULL);
    dl_device place = {DL_CPU, 0};
    if (said == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    } else if (said == NULL || !PyArg_Parse(said, "(ii)", &place.type, &place.index)) {
        Py_XDECREF(said);
        return NULL;
    }
    Py_XDECREF(said);
    nd_device *device = device_of(place);
    void *stream = NULL;
    if (device == NULL || device == nd_host()) {
        return Py_NewRef(Py_None); /* another device is refused later */
    }
    if (nd_device_ready(device) < 0 ||
        nd_check("from_dlpack", device, ND_CALL(device, stream, false, &stream)) < 0) {
        return NULL;
    }
    return PyLong_FromVoidPtr(stream);
}

/* The producer's capsule, versioned where it can. */
static PyObject *request_capsule(PyObject *object) {
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    if (method == NULL && nd_is_out_of_memory()) {
        return NULL;
    }
    if (method == NULL) {
        return PyErr_ExceptionMatches(PyExc_AttributeError)
                   ? PyErr_Format(PyExc_TypeError, "from_dlpack: %.80s has no __dlpack__()",
                                  Py_TYPE(object)->tp_name)
                   : NULL;
    }
    PyObject *capsule = NULL, *nothing = PyTuple_New(0), *stream = stream_for(object);
    PyObject *named = stream ? Py_BuildValue("{s(ii)}", "max_version", 1, 0) : NULL;
    if (nothing != NULL && named != NULL &&
        (stream == Py_None || PyDict_SetItemString(named, "stream", stream) == 0)) {
        capsule = PyObject_Call(method, nothing, named);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* a producer from before versions */
            (void)PyDict_DelItemString(named, "max_version");
            capsule = PyObject_Call(method, nothing, named);
        }
    }
    Py_DECREF(method);
    Py_XDECREF(nothing);
    Py_XDECREF(stream);
    Py_XDECREF(named);
    return capsule;
}

static PyObject *module_from_dlpack(PyObject *module, PyObject *object) {
    PyObject *capsule = PyCapsule_CheckExact(object) ? Py_NewRef(object) : request_capsule(object);
    if (capsule == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    nd_array view;
    bool read_only = false;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (versioned->version.major != 1) {
            PyErr_Format(PyExc_BufferError, "from_dlpack: version %u of DLPack is not known",
                         versioned->version.major);
            goto done;
        }
        read_only = versioned->flags & DL_READ_ONLY;
        if (import_tensor(&versioned->tensor, versioned, import_release_versioned, &view) < 0) {
            goto done;
        }
        PyCapsule_SetName(capsule, "used_dltensor_versioned");
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (import_tensor(&managed->tensor, managed, import_release_managed, &view) < 0) {
            goto done;
        }
        PyCapsule_SetName(capsule, "used_dltensor");
    } else {
        PyErr_SetString(PyExc_TypeError, "from_dlpack: not a DLPack capsule, or one already used");
        goto done;
    }
    if (read_only) { /* arrays of ours can be written to */
        nd_array copy;
        int copied = nd_copy(&view, view.dtype, &copy);
        nd_array_clear(&view);
        if (copied < 0) {
            goto done;
        }
        view = copy;
    }
    result = nd_wrap(&view);
done:
    Py_DECREF(capsule);
    return result;
}

PyMethodDef nd_dlpack_functions[] = {
    {"from_dlpack", module_from_dlpack, METH_O,
     "from_dlpack($module, obj, /)\n--\n\nA view on the memory of an object with __dlpack__ (a "
     "copy "
     "when that is read-only)."},
    {NULL, NULL, 0, NULL},
};
