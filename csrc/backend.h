/* backend.h - the backend ABI: memory and time, plus one function for each op of ops.def.
 *
 * cpu/ implements it inside _C; cuda/ inside _cuda.so, which exports exactly one symbol:
 *     const nd_backend *needle_backend(void);
 * Rules for every implementation:
 *   - operands are borrowed: never freed, kept or reallocated; outputs arrive allocated;
 *   - ops are asynchronous on their device's one stream and ordered by it;
 *   - scratch comes from the backend's own cpu_scratch / cuda_scratch(device, bytes, &p) and is
 *     valid until the calling op returns (on CUDA: for work enqueued before that;
 *     sums that are held keep theirs until hold_sums(false));
 *   - every element of an OUT operand is written; IO operands say in ops.def whether they are
 *     accumulated into (+=) or overwritten (=);
 *   - `new` beside a function: the caller owns its result and must free it;
 *   - nothing prints, exits or touches Python; every failure is a status and a message;
 *   - results are the same bits from run to run: no floating-point atomics, no order that depends
 *     on timing or on the number of threads of a run.
 */
#ifndef NEEDLE_BACKEND_H
#define NEEDLE_BACKEND_H

#include "needle.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- argument structs ---------------------------------------------------------------------------
 * Each op expands to `name_args`. Every field is one 8-byte slot, in the order of the operands, so
 * that csrc/python/ can fill any struct through nd_slot[] without knowing it. */
typedef struct nd_kept nd_kept; /* arrays that a composite keeps for its backward (composite.h) */
typedef union {
    nd_array *array;
    nd_kept *kept;
    double real;
    int64_t integer;
} nd_slot;

#define EW1(name, types, formula) \
    typedef struct {              \
        const nd_array *x;        \
        nd_array *out;            \
    } name##_args;
/* x or y is NULL when that operand is the Python scalar in x_scalar / y_scalar; never both.
 * All arrays arrive broadcast to out's shape (zero strides); out is C-contiguous. */
#define EW2(name, types, formula) \
    typedef struct {              \
        const nd_array *x;        \
        const nd_array *y;        \
        double x_scalar;          \
        double y_scalar;          \
        nd_array *out;            \
    } name##_args;
#define CMP(name, formula) EW2(name, ANY, formula)
/* Reduce the LAST `axes` axes of x (any strides); out is contiguous with the axes that stay. */
#define RED(name, types, start, combine, map) \
    typedef struct {                          \
        const nd_array *x;                    \
        int64_t axes;                         \
        nd_array *out;                        \
    } name##_args;
#define ARG(name, better) RED(name, ANY, , , )
#define OP(name, operands) \
    typedef struct {       \
        operands           \
    } name##_args;
#define COMPOSITE(name, operands) OP(name, operands)
#define IN(field, axes, dtype) const nd_array *field;
#define IN_ANY(field, axes, dtype) const nd_array *field;
#define IN_ROWS(field, axes, dtype) const nd_array *field;
#define IN_MATRIX(field, axes, dtype) const nd_array *field;
#define OPT(field, axes, dtype) const nd_array *field;
#define IO(field, axes, dtype) nd_array *field;
#define IO_ANY(field, axes, dtype) nd_array *field;
#define IO_ROWS(field, axes, dtype) nd_array *field;
#define IO_OPT(field, axes, dtype) nd_array *field;
#define OUT(field, axes, dtype) nd_array *field;
#define NEW(field) nd_array *field;
#define KEEP(field) nd_kept *field;
#define KEPT(field) const nd_kept *field;
#define F64(field) double field;
#define I64(field) int64_t field;
#include "ops.def"

/* ---- the vtable ------------------------------------------------------------------------------ */
typedef struct {
    char name[128];
    int64_t total_bytes; /* memory of the device */
    int processors;      /* cores, or multiprocessors */
    int arch;            /* CUDA: 90 for sm_90; CPU: 0 */
    char detail[256];    /* CPU: OpenBLAS core and threads; CUDA: driver and runtime versions */
    char products[256];  /* the library of matrix products, which decides their bits */
    char uuid[64];       /* CUDA: of this GPU alone in the world; CPU: "" */
    char warning[384];   /* for the user to read when the device opens, or "" */
} nd_properties;

typedef struct {
    int64_t live_bytes;     /* in arrays right now */
    int64_t peak_bytes;     /* the most that live_bytes has been since reset_peak */
    int64_t reserved_bytes; /* held by the pool, live or cached */
} nd_memory_stats;

typedef struct nd_event nd_event;                 /* opaque; a point in the device's stream */
typedef struct nd_async_copy nd_async_copy;       /* opaque; an asynchronous copy to the host */
typedef struct nd_graph nd_graph;                 /* opaque; recorded work */
typedef struct nd_pinned_buffer nd_pinned_buffer; /* opaque; host memory that uploads read */
typedef struct nd_module nd_module;               /* opaque; machine code of the user's own */
typedef struct nd_kernel nd_kernel; /* opaque; a kernel of a module, and gone with it */

/* Limits of a device on launches: threads of a multiprocessor, registers and bytes of shared memory
 * of a block. */
typedef struct {
    int arch; /* 90 for sm_90 */
    int processors, sm_threads, block_registers, block_shared;
    int64_t free_bytes; /* of the device's memory, right now */
} nd_launch_limits;

/* One launch of a kernel. arguments[i] points to the bytes of parameter i. */
typedef struct {
    const char *name; /* for messages */
    uint32_t grid[3], block[3], cluster[3];
    bool has_cluster, cooperative;
    uint32_t shared; /* bytes of dynamic shared memory a block */
    void **arguments;
} nd_launch;

typedef struct nd_backend {
    uint64_t abi; /* nd_abi() of its build; of a backend inside _C: 0, it is the same build */
    bool is_host; /* the host reads its memory, and its ops are done when they return */
    uintptr_t alignment;             /* of the data of IN, OPT, IO and IO_OPT operands, in bytes */
    const char *(*last_error)(void); /* this thread's message after a failure; never NULL */

    /* 0 and ND_OK when there is none; a failure says why there can be none (no driver, ...). */
    nd_status (*device_count)(int *count);
    nd_status (*open)(int device); /* create context and stream; idempotent */
    nd_status (*properties)(int device, nd_properties *out);
    /* Free everything of a healthy context; ND_EFATAL after a fatal fault (restart). */
    nd_status (*reset)(int device);

    nd_status (*allocate)(int device, size_t bytes, void **out); /* new; 64-byte aligned */
    nd_status (*release)(int device, void *memory); /* stream-ordered; no-op after fatal fault */
    nd_status (*upload)(int device, void *to, const void *from_host, size_t bytes);
    nd_status (*download)(int device, void *to_host, const void *from, size_t bytes); /* waits */
    /* The same in two halves: begin enqueues the copy and returns, end waits for that copy alone,
     * writes the bytes to to_host (NULL: drops them) and ends the copy, also on failure. */
    nd_status (*async_copy_begin)(int device, const void *from, size_t bytes, nd_async_copy **out);
    nd_status (*async_copy_end)(int device, nd_async_copy *copy, void *to_host);
    /* Host memory that is sent from again and again: send enqueues the copy of its first bytes and
     * returns, wait returns when the last copy is done and the memory may be written. */
    nd_status (*pinned_buffer_new)(int device, size_t bytes, nd_pinned_buffer **out, void **memory);
    nd_status (*pinned_buffer_send)(int device, nd_pinned_buffer *buffer, void *to, size_t bytes);
    nd_status (*pinned_buffer_wait)(int device, nd_pinned_buffer *buffer);
    nd_status (*pinned_buffer_free)(int device, nd_pinned_buffer *buffer); /* waits */
    nd_status (*synchronize)(int device);
    /* As other libraries take it; host: NULL. side: the device's second stream, of work of such
     * libraries that runs beside its ops; events alone order it with them. */
    nd_status (*stream)(int device, bool side, void **out);
    nd_status (*memory_stats)(int device, nd_memory_stats *out);
    nd_status (*reset_peak)(int device);
    nd_status (*empty_cache)(int device);

    /* hold: what this thread's ops add to float32 gradients of biases and norms may wait until it
     * is called with false; nothing may read those before. NULL in a backend that never waits. */
    nd_status (*hold_sums)(int device, bool hold);

    nd_status (*event_new)(int device, nd_event **out); /* new */
    /* side: of the second stream. wait enqueues: what is enqueued in that stream after it begins
     * after the last record. */
    nd_status (*event_record)(int device, nd_event *event, bool side);
    nd_status (*event_wait)(int device, nd_event *event, bool side);
    nd_status (*event_query)(int device, nd_event *event, bool *done); /* does not wait */
    nd_status (*event_elapsed)(int device, nd_event *from, nd_event *to, double *milliseconds);
    nd_status (*event_free)(int device, nd_event *event);

    /* Work recorded once and enqueued again by one call, on the same memory. From begin to end ops
     * are recorded and do not run, and the graph owns what they allocate. In between no other caller
     * may use the device, and nothing may be uploaded, downloaded or waited for. free gives up a
     * recording that has not come to its end.
     * All NULL in a backend that records none (the CPU). */
    nd_status (*graph_begin)(int device, nd_graph **out); /* new */
    nd_status (*graph_end)(int device, nd_graph *graph);
    nd_status (*graph_launch)(int device, nd_graph *graph);
    nd_status (*graph_free)(int device, nd_graph *graph);

    /* Kernels that needle does not have, from machine code. The caller has checked the launch
     * against the limits and the kernel; the arguments of a launch stay until it has run. unload
     * waits for enqueued work; graphs that launch from the module have gone before.
     * All NULL in a backend that runs none (the CPU). */
    nd_status (*launch_limits)(int device, nd_launch_limits *out);
    nd_status (*module_load)(int device, const void *code, nd_module **out); /* copies; new */
    nd_status (*module_kernel)(int device, nd_module *module, const char *symbol, nd_kernel **out);
    nd_status (*module_unload)(int device, nd_module *module);
    /* Blocks of so many threads and bytes of dynamic shared memory that a multiprocessor holds. */
    nd_status (*kernel_blocks)(int device, nd_kernel *kernel, int threads, uint32_t shared,
                               int *out);
    nd_status (*kernel_launch)(int device, nd_kernel *kernel, const nd_launch *launch);

#define EACH_OP(name) nd_status (*name)(int device, const name##_args *args);
#include "ops.def"
} nd_backend;

/* A hash (FNV-1a) of the table's text, as the preprocessor sees it, and of the struct's size. _C
 * refuses a backend in a file of its own that has another: it was built from another ops.def. */
static inline uint64_t nd_abi(void) {
    static const char table[] =
#define EW1(name, types, formula) "EW1 " #name " " #types " " #formula ";"
#define EW2(name, types, formula) "EW2 " #name " " #types " " #formula ";"
#define CMP(name, formula) "CMP " #name " " #formula ";"
#define RED(name, types, start, combine, map) \
    "RED " #name " " #types " " #start " " #combine " " #map ";"
#define ARG(name, better) "ARG " #name " " #better ";"
#define OP(name, operands) "OP " #name operands ";"
#define OPERAND(kind, field, axes, dtype) " " #kind " " #field " " axes " " #dtype
#define F64(field) " F64 " #field
#define I64(field) " I64 " #field
#include "ops.def"
        ;
    uint64_t hash = 0xcbf29ce484222325u ^ sizeof(nd_backend);
    for (size_t i = 0; i + 1 < sizeof table; i++) {
        hash = (hash ^ (unsigned char)table[i]) * 0x100000001b3u;
    }
    return hash;
}

/* ---- devices ------------------------------------------------------------------------------------
 * Those of a process stand in the table of csrc/python/backends.c. */
struct nd_device {
    const nd_backend *backend;
    int index;
    uint64_t generation; /* grows with each reset(): older storages are stale */
};

#ifdef __cplusplus
}
#endif
#endif
