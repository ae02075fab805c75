/* composite.h - what the composites of ops.def are written with: functions over other ops.
 *
 * A frame remembers the first failure, after which nothing of it runs any more, so that a composite
 * reads as a list of ops. It frees its temporary arrays when it ends. Nothing here needs the GIL.
 */
#ifndef NEEDLE_COMPOSITE_H
#define NEEDLE_COMPOSITE_H

#include "backend.h"

/* ---- the ops, in the order of ops.def -------------------------------------------------------- */
typedef enum {
#define EACH_OP(name) OP_##name,
#define EACH_COMPOSITE(name) OP_##name,
#include "ops.def"
    NUM_OPS
} nd_op;

#pragma GCC visibility push(hidden)
#define EACH_COMPOSITE(name) nd_status nd_##name(nd_device *device, const void *args);
#include "ops.def"

/* ---- frames ---------------------------------------------------------------------------------- */
#define ND_MAX_TEMPORARIES 32
typedef struct {
    nd_device *device;
    nd_status status;
    int count;
    nd_array arrays[ND_MAX_TEMPORARIES + 1]; /* the last: without memory, of one too many */
} nd_frame;

/* Free the temporary arrays; the status is the frame's. */
nd_status nd_frame_end(nd_frame *f);
/* Let the frame fail unless `fits`; printf-style. */
void nd_require(nd_frame *f, bool fits, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Run one op, unless the frame has failed: run_in_frame of csrc/python/run.c takes operands in
 * the layout that ops.def says, traces, waits under NEEDLE_SYNC=1, and names the op in a failure. */
extern void (*nd_run_in_frame)(nd_frame *f, nd_op id, const void *args);
#define RUN(f, op, ...) nd_run_in_frame(f, OP_##op, &(op##_args){__VA_ARGS__})

/* Let the sums of bias and norm gradients wait for one launch, and at the end, with false, have
 * them added, also after a failure. Under NEEDLE_SYNC=1 and NEEDLE_TRACE=1 none waits. */
extern void (*nd_hold_sums)(nd_frame *f, bool hold);

/* ---- arrays: all have their shape, and no memory once the frame has failed ------------------- */
#define SHAPE(...) \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }
void nd_output(nd_frame *f, nd_dtype dtype, int ndim, const int64_t *shape, nd_array *out);
/* Freed when the frame ends, or before it by nd_array_clear(): its memory serves the next. */
nd_array *nd_temporary(nd_frame *f, nd_dtype dtype, int ndim, const int64_t *shape);

/* Arrays that a forward keeps for its backward, by their number. */
#define ND_MAX_KEPT 24
struct nd_kept {
    nd_device *device;
    uint64_t generation;
    nd_array arrays[ND_MAX_KEPT];
};
nd_array *nd_keep(nd_frame *f, nd_kept *kept, int i, nd_dtype dtype, int ndim,
                  const int64_t *shape);
/* The frame fails where dtype or shape are not those of the array that was kept. */
nd_array *nd_take(nd_frame *f, const nd_kept *kept, int i, nd_dtype dtype, int ndim,
                  const int64_t *shape);
void nd_free_kept(nd_kept *kept);

/* One block of memory for arrays of which some take the place of others. nd_place() is called twice
 * for each, with the same sizes: before nd_space_open(), which adds them up, and after it. `at`
 * may be set back, to what it was, for arrays that come in the place of those since. */
typedef struct {
    nd_array *block; /* NULL: adding up */
    int64_t at, end; /* bytes */
} nd_space;
void nd_space_open(nd_frame *f, nd_space *space);
nd_array nd_place(nd_space *space, nd_dtype dtype, int ndim, const int64_t *shape);

/* ---- views; they borrow. V(view) is the address of one, for the block around ----------------- */
#define V(view) ((nd_array[1]){view})
#define ROWS(a) V(nd_merged(a, (a)->ndim - 1))
#define FLAT(a) V(nd_merged(a, 0))
nd_array nd_transposed(const nd_array *matrix);
/* (M, N) as (1, M, N): matmul takes batches. */
nd_array nd_batch_of_1(const nd_array *matrix);
/* `offset`: elements from the first of `a`. */
nd_array nd_part(const nd_array *a, int64_t offset, int ndim, const int64_t *shape,
                 const int64_t *strides);
#pragma GCC visibility pop
#endif
