/* kernels.h - kernels of the user's own: their parameters (parameters.c), modules of machine code
 * and the launch (kernel.c). */
#ifndef NEEDLE_KERNELS_H
#define NEEDLE_KERNELS_H

#include "state.h"

typedef struct nd_parameters nd_parameters; /* a Python object, of nd.parameters_type */

/* Arguments made ready for one launch. */
typedef struct {
    Py_ssize_t count;
    char *bytes;                    /* of each, at its parameter's offset */
    void **pointers;                /* to each, in bytes */
    PyObject **held;                /* the array of each that is one, a new reference; else NULL */
    _Alignas(16) char memory[2048]; /* where the three lie when that is enough */
} nd_packed;

#pragma GCC visibility push(hidden)
/* ---- parameters.c ---------------------------------------------------------------------------- */
extern PyType_Spec nd_parameters_spec;
const char *nd_parameters_name(nd_parameters *parameters); /* of the kernel, for messages */
/* The arguments of a call, checked for a device. Ends with nd_unpack, when this gives 0. */
int nd_pack(nd_parameters *parameters, nd_device *device, PyObject *const *arguments,
            Py_ssize_t count, nd_packed *packed);
void nd_unpack(nd_packed *packed);
/* Say that the arrays which the kernel may write are written. */
void nd_count_kernel_writes(nd_parameters *parameters, const nd_packed *packed);
const char *nd_parameter_type(nd_parameters *parameters, Py_ssize_t index);
#pragma GCC visibility pop
#endif
