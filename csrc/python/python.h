/* python.h - what the files that know Python share: the module's state, the NDArray object, and
 * the functions that module.c, bind.c, ndarray.c and interop.c offer one another.
 *
 * A function here that returns PyObject * or int follows Python's rule: NULL or -1 with an
 * exception set. Everything below these four files speaks nd_status instead.
 */
#ifndef NEEDLE_PYTHON_H
#define NEEDLE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "backend.h"

#define ND_MAX_CUDA 64   /* devices that can be named */
#define ND_MAX_FIELDS 24 /* operands of a row */
#define ND_HIDDEN __attribute__((visibility("hidden")))

/* The rows, in the order of ops.def. */
typedef enum {
#define EW1(name, types, formula) ROW_##name,
#define EW2(name, types, formula) ROW_##name,
#define CMP(name, formula) ROW_##name,
#define RED(name, types, start, combine, map) ROW_##name,
#define ARG(name, better) ROW_##name,
#define OP(name, operands) ROW_##name,
#include "ops.def"
    NUM_ROWS
} nd_row;

typedef struct {
    PyTypeObject *ndarray_type;
    PyTypeObject *device_type;
    PyTypeObject *handle_type;
    PyTypeObject *flat_type;
    PyTypeObject *event_type;
    PyObject *cuda_error;
    PyObject *cuda_fatal_error;
    PyObject *devices[1 + ND_MAX_CUDA];             /* Device objects: cpu(), cuda(0), ... */
    PyObject *field_names[NUM_ROWS][ND_MAX_FIELDS]; /* interned */
    bool trace;                                     /* NEEDLE_TRACE=1 */
    bool sync;                                      /* NEEDLE_SYNC=1 */
} nd_state;

typedef struct {
    PyObject_HEAD nd_array a;
    PyObject *weak_references;
} NDArrayObject;

/* ---- module.c -------------------------------------------------------------------------------- */
nd_state *nd_module_state(PyObject *module) ND_HIDDEN;

/* ---- device.c: devices, errors ----------------------------------------------------------------- */
int nd_device_init(PyObject *module, nd_state *state) ND_HIDDEN;
const char *nd_cuda_path(void) ND_HIDDEN; /* where _cuda.so is looked for */
nd_device *nd_cpu_device(void) ND_HIDDEN;
nd_device *nd_cuda_device(int64_t index) ND_HIDDEN; /* NULL: no such index */
bool nd_is_cpu(const nd_device *device) ND_HIDDEN;
const char *nd_device_text(const nd_device *device, char text[24]) ND_HIDDEN; /* "cuda(1)" */
PyObject *nd_device_object(nd_state *state, nd_device *device) ND_HIDDEN;     /* new */
/* Device or None (the CPU) -> *out, made ready to allocate and run: loads the backend, opens the
 * device; a CUDA that is not there raises RuntimeError with the reason. */
int nd_device_from(nd_state *state, PyObject *object, nd_device **out) ND_HIDDEN;
int nd_device_ready(nd_state *state, nd_device *device) ND_HIDDEN;
/* Raise the exception of a failed call. op may be NULL; device NULL: the message is the core's,
 * else the backend's. A fatal fault is remembered here. */
PyObject *nd_raise(nd_state *state, const char *op, nd_device *device, nd_status status) ND_HIDDEN;
/* 0, or -1 with CudaFatalError when the device has had a fatal fault. */
int nd_check_alive(nd_state *state, const nd_device *device) ND_HIDDEN;

/* ---- bind.c: rows ------------------------------------------------------------------------------ */
extern PyMethodDef nd_row_methods[] ND_HIDDEN;
int nd_bind_init(nd_state *state) ND_HIDDEN;
PyObject *nd_unary(nd_state *state, nd_row row, PyObject *x) ND_HIDDEN;
/* into: NULL for a new array, or the array that takes the result in place. Returns NULL without
 * an exception, but *unsupported set, when an operand is nothing that can be computed with. */
PyObject *nd_binary(nd_state *state, nd_row row, PyObject *x, PyObject *y, NDArrayObject *into,
                    bool *unsupported) ND_HIDDEN;
/* Reduce the last `axes` axes of x; fills *out with a fresh array. */
int nd_reduce(nd_state *state, nd_row row, const nd_array *x, int axes, nd_array *out) ND_HIDDEN;
/* c = a b on (B, M, K) and (B, K, N). */
int nd_matmul(nd_state *state, const nd_array *a, const nd_array *b, nd_array *out) ND_HIDDEN;
/* to = from: same device, broadcasts, converts, safe when the two overlap. op names the caller. */
int nd_assign(nd_state *state, const char *op, const nd_array *to, const nd_array *from) ND_HIDDEN;
int nd_fill(nd_state *state, const nd_array *to, double value) ND_HIDDEN;
/* 0, or -1: the memory went with a cuda_reset(), or its device is lost. */
int nd_check_live(nd_state *state, const char *op, const char *operand,
                  const nd_array *a) ND_HIDDEN;

/* ---- ndarray.c: the type ----------------------------------------------------------------------- */
int nd_ndarray_init(PyObject *module, nd_state *state) ND_HIDDEN;
nd_state *nd_state_of(PyObject *object) ND_HIDDEN; /* NULL when it is no NDArray; no exception */
PyObject *nd_wrap(nd_state *state, nd_array *a) ND_HIDDEN; /* takes over a's reference */
/* A contiguous, writable copy on the same device. */
int nd_copy(nd_state *state, const nd_array *a, nd_dtype dtype, nd_array *out) ND_HIDDEN;
int nd_to_device(nd_state *state, const nd_array *a, nd_device *device, nd_array *out) ND_HIDDEN;
int nd_dtype_from(PyObject *object, nd_dtype *out) ND_HIDDEN;
int nd_shape_from(PyObject *object, const char *what, int *ndim, int64_t *values) ND_HIDDEN;
PyObject *nd_item(nd_state *state, const nd_array *a) ND_HIDDEN;
PyObject *nd_pack_shape(int ndim, const int64_t *values) ND_HIDDEN;
static inline bool nd_is_ndarray(nd_state *state, PyObject *object) {
    return PyObject_TypeCheck(object, state->ndarray_type);
}
static inline nd_array *nd_array_of(PyObject *object) { return &((NDArrayObject *)object)->a; }

/* ---- download.c ------------------------------------------------------------------------------- */
int nd_download_init(PyObject *module) ND_HIDDEN;

/* ---- graph.c ---------------------------------------------------------------------------------- */
int nd_graph_init(PyObject *module) ND_HIDDEN;

/* ---- staging.c -------------------------------------------------------------------------------- */
int nd_staging_init(PyObject *module) ND_HIDDEN;

/* ---- ndarray_interop.c, ndarray_dlpack.c --------------------------------------------------------- */
int nd_interop_init(void) ND_HIDDEN;
extern PyMethodDef nd_interop_functions[] ND_HIDDEN; /* of the module */
extern PyMethodDef nd_dlpack_functions[] ND_HIDDEN;
bool nd_is_numpy_array(PyObject *object) ND_HIDDEN;
/* A Python or NumPy number: 1, *value and *is_float; 0 when it is something else. */
int nd_number_from(PyObject *object, double *value, bool *is_float) ND_HIDDEN;
/* Any array-like into a fresh array. natural: keep NumPy's dtype where we have it (float64
 * becomes float32), else convert to dtype. */
int nd_from_object(nd_state *state, PyObject *object, bool natural, nd_dtype dtype,
                   nd_device *device, nd_array *out) ND_HIDDEN;
PyObject *nd_to_numpy(nd_state *state, const nd_array *a) ND_HIDDEN;

#endif
