/* values.c - NDArray's copies and conversions: copy, astype, to, fill, item, numpy.
 */
#include <math.h>
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "methods.h"
#include "object.h"

/* One element of any strides, from the device. */
static PyObject *element(const nd_array *a) {
    union {
        float f32;
        uint16_t u16;
        int32_t i32;
        int64_t i64;
        uint8_t u8;
    } value = {.i64 = 0};
    if (nd_check_live("item", "x", a) < 0) {
        return NULL;
    }
    nd_device *device = a->storage->device;
    nd_status status;
    if (device->backend->is_host) {
        memcpy(&value, a->data, nd_dtype_size(a->dtype));
        status = ND_OK;
    } else {
        ND_CALL_UNLOCKED(status, device, download, &value, a->data, nd_dtype_size(a->dtype));
    }
    if (status != ND_OK) {
        return nd_raise("item", device, status);
    }
    switch (a->dtype) {
    case ND_F32:
        return PyFloat_FromDouble((double)value.f32);
    case ND_BF16: {
        uint32_t bits = (uint32_t)value.u16 << 16;
        float f32;
        memcpy(&f32, &bits, sizeof f32);
        return PyFloat_FromDouble((double)f32);
    }
    case ND_F16: {
        int exponent = value.u16 >> 10 & 31;
        double fraction = (double)(value.u16 & 1023);
        double size = exponent == 0   ? ldexp(fraction, -24)
                      : exponent < 31 ? ldexp(fraction + 1024, exponent - 25)
                      : fraction == 0 ? (double)INFINITY
                                      : (double)NAN;
        return PyFloat_FromDouble(value.u16 & 0x8000 ? -size : size);
    }
    case ND_I32:
        return PyLong_FromLong(value.i32);
    case ND_I64:
        return PyLong_FromLongLong(value.i64);
    case ND_U8:
        return PyLong_FromLong(value.u8);
    case ND_BOOL:
        return PyBool_FromLong(value.u8);
    case ND_U16:
        return PyLong_FromLong(value.u16);
    case ND_NUM_DTYPES:
        break;
    }
    Py_UNREACHABLE();
}

static PyObject *item_of(const nd_array *a) {
    int64_t size = nd_size(a);
    if (size != 1) {
        return PyErr_Format(PyExc_ValueError,
                            "only an array with one element becomes a Python number; "
                            "this one has %lld",
                            (long long)size);
    }
    return element(a);
}

PyObject *nd_ndarray_copy(PyObject *self, PyObject *unused) {
    nd_array copy;
    const nd_array *a = nd_array_of(self);
    return nd_copy(a, a->dtype, &copy) < 0 ? NULL : nd_wrap(&copy);
}

PyObject *nd_ndarray_compact(PyObject *self, PyObject *unused) {
    return nd_is_contiguous(nd_array_of(self)) ? Py_NewRef(self) : nd_ndarray_copy(self, unused);
}

PyObject *nd_ndarray_is_compact(PyObject *self, PyObject *unused) {
    return PyBool_FromLong(nd_is_contiguous(nd_array_of(self)));
}

PyObject *nd_ndarray_astype(PyObject *self, PyObject *dtype_object) {
    nd_dtype dtype;
    nd_array copy;
    if (nd_dtype_from(dtype_object, &dtype) < 0 || nd_copy(nd_array_of(self), dtype, &copy) < 0) {
        return NULL;
    }
    return nd_wrap(&copy);
}

PyObject *nd_ndarray_to(PyObject *self, PyObject *device_object) {
    nd_device *device;
    nd_array moved;
    if (nd_device_from(device_object, &device) < 0) {
        return NULL;
    }
    if (device == nd_array_of(self)->storage->device) {
        return Py_NewRef(self);
    }
    return nd_to_device(nd_array_of(self), device, &moved) < 0 ? NULL : nd_wrap(&moved);
}

PyObject *nd_ndarray_fill(PyObject *self, PyObject *value) {
    nd_number number;
    int found = nd_number_from(value, &number);
    if (found <= 0) {
        return found < 0 ? NULL
                         : PyErr_Format(PyExc_TypeError, "fill: value: must be a number, not %.80s",
                                        Py_TYPE(value)->tp_name);
    }
    const nd_array *a = nd_array_of(self);
    if (nd_check_number("fill", &number, a->dtype) < 0 || nd_store(a, value) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *nd_ndarray_numpy(PyObject *self, PyObject *unused) {
    return nd_to_numpy(nd_array_of(self));
}

PyObject *nd_ndarray_item(PyObject *self, PyObject *unused) { return item_of(nd_array_of(self)); }
