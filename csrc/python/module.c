/* module.c - the module needle._C: its functions and types, and checks at import.
 *
 * Initialised in phases, with all of its Python objects in the module's state. setup.py passes the
 * values of build_info() as NEEDLE_BUILD_*.
 */
#include <stdlib.h>
#include <string.h>

#include "arguments.h"
#include "backends.h"
#include "device.h"
#include "errors.h"
#include "exchange.h"
#include "handle.h"
#include "kernels.h"
#include "methods.h"
#include "ops.h"

#ifdef NEEDLE_DEBUG
#define IS_DEBUG true /* waits after each op, so that a check that fails has its name */
#else
#define IS_DEBUG false
#endif

PyMODINIT_FUNC PyInit__C(void);

/* ---- functions of the module ----------------------------------------------------------------- */
static PyObject *module_build_info(PyObject *module, PyObject *unused) {
#ifdef _OPENMP
    PyObject *openmp = Py_True;
#else
    PyObject *openmp = Py_False;
#endif
    return Py_BuildValue("{ss ss ss ss ss sO sO ss ss ss sK}", "version", NEEDLE_BUILD_VERSION,
                         "commit", NEEDLE_BUILD_COMMIT, "compiler", NEEDLE_BUILD_COMPILER, "march",
                         NEEDLE_BUILD_MARCH, "blas", NEEDLE_BUILD_BLAS, "openmp", openmp, "debug",
                         IS_DEBUG ? Py_True : Py_False, "cuda", NEEDLE_BUILD_CUDA, "cuda_archs",
                         NEEDLE_BUILD_CUDA_ARCHS, "cuda_library", nd_library_path(BACKEND_cuda),
                         "abi", (unsigned long long)nd_abi());
}

static PyObject *module_sync_each_op(PyObject *module, PyObject *on) {
    int wanted = PyObject_IsTrue(on);
    if (wanted < 0) {
        return NULL;
    }
    PyObject *before = PyBool_FromLong(nd.sync);
    nd.sync = wanted || IS_DEBUG;
    return before;
}

static PyMethodDef module_methods[] = {
    {"build_info", module_build_info, METH_NOARGS,
     "build_info($module)\n--\n\nHow this build was made, as a dict."},
    {"sync_each_op", module_sync_each_op, METH_O,
     "sync_each_op($module, on, /)\n--\n\nWhether each op waits for its device, so that a fault "
     "carries its name; at first what\nNEEDLE_SYNC says, in a debug build always. Returns what was "
     "so "
     "before."},
    {NULL, NULL, 0, NULL},
};

/* ---- import ---------------------------------------------------------------------------------- */
static int check_processor(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    const char *missing = NULL;
    __builtin_cpu_init();
#define REQUIRE(feature)                    \
    if (!__builtin_cpu_supports(feature)) { \
        missing = feature;                  \
    }
#ifdef __AVX__
    REQUIRE("avx")
#endif
#ifdef __AVX2__
    REQUIRE("avx2")
#endif
#ifdef __FMA__
    REQUIRE("fma")
#endif
#ifdef __BMI2__
    REQUIRE("bmi2")
#endif
#ifdef __AVX512F__
    REQUIRE("avx512f")
#endif
#ifdef __AVX512BW__
    REQUIRE("avx512bw")
#endif
#ifdef __AVX512VL__
    REQUIRE("avx512vl")
#endif
#undef REQUIRE
    if (missing != NULL) {
        FAIL(PyExc_ImportError,
             "needle was built for a processor with %s (NEEDLE_MARCH=%s), which this one "
             "lacks; build it again here, or for every machine you use: "
             "NEEDLE_MARCH=portable pip install -e .  (or: make clean lib "
             "NEEDLE_MARCH=portable)",
             missing, NEEDLE_BUILD_MARCH);
    }
#endif
    return 0;
}

static bool is_on(const char *variable) {
    const char *value = getenv(variable);
    return value != NULL && value[0] != 0 && strcmp(value, "0") != 0;
}

static int module_init(PyObject *module) {
    static const struct {
        PyType_Spec *spec;
        PyTypeObject **keep; /* NULL: nothing asks for it */
    } types[] = {
        {&nd_event_spec, NULL},
        {&nd_async_copy_spec, NULL},
        {&nd_pinned_buffer_spec, NULL},
        {&nd_graph_spec, NULL},
        {&nd_module_spec, &nd.module_type},
        {&nd_parameters_spec, &nd.parameters_type},
        {&nd_kernel_spec, NULL},
    };
    nd.trace = is_on("NEEDLE_TRACE");
    nd.sync = is_on("NEEDLE_SYNC") || IS_DEBUG;
    if (check_processor() < 0 || nd_errors_init(module) < 0 || nd_backends_init() < 0 ||
        nd_device_init(module) < 0 || nd_array_likes_init() < 0 || nd_callables_init(module) < 0 ||
        nd_ndarray_init(module) < 0 || PyModule_AddFunctions(module, nd_dlpack_functions) < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (type == NULL || PyModule_AddType(module, type) < 0) {
            return -1;
        }
        if (types[i].keep != NULL) {
            *types[i].keep = type;
        }
    }
    return 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "needle._C",
    .m_doc = "The C core of needle: NDArray, devices, and one function for each op of ops.def.",
    .m_size = -1, /* one of a process, like its devices */
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__C(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && module_init(module) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
