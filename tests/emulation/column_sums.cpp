/* column_sums.cpp - the host's side of column_sums.cu and of scratch on the CPU: which sums wait, in
 * which memory, and that no op writes there. What is freed, or handed out as scratch, is NaN.
 */
#include "emulated.h"
#include "host.h"

#include <cmath>

struct ColumnSums;
static int launches;
template <class K>
nd_status add_in_order(const char *, int, K, dim3, dim3, size_t, const ColumnSums &all);

#define cuda_launch add_in_order
#include "column_sums.cu"
#include "memory.cpp"
#include "pool.h"
#undef cuda_launch

struct nd_graph {
    Scratch scratch;
};
static nd_graph graph;

template <class K>
nd_status add_in_order(const char *, int, K, dim3, dim3, size_t, const ColumnSums &all) {
    launches++;
    for (int i = 0; i < all.count; i++) {
        const ColumnSum &of = all.sums[i];
        for (int64_t at = 0; at < of.rows * of.columns; at++) {
            of.to[at % of.columns] += of.partial[at];
        }
    }
    return ND_OK;
}

nd_status cuda_graph_allocate(int device, nd_graph *, size_t bytes, void **out) {
    return cuda_pool_malloc(device, bytes, out);
}
void cuda_graph_reuse(nd_graph *, void *memory, size_t) { cudaFreeAsync(memory, NULL); }
nd_status cuda_refuse_in_capture(int, const char *) { return ND_OK; }
Scratch &cuda_graph_scratch(nd_graph *graph) { return graph->scratch; }

/* ---- a layer: ops; rows x columns times its number are added to rows of `to` from `target` on --- */
struct Step {
    int64_t rows, columns, count, target, beside; /* floats of scratch after the sums */
};

static nd_status run(const Step *steps, int count, float *to, int64_t width) {
    for (int i = 0; i < count; i++) {
        const Step &step = steps[i];
        const int64_t floats = step.rows * step.columns * step.count + step.beside;
        void *scratch;
        ND_TRY(cuda_scratch(0, (size_t)floats * 4, &scratch));
        memset(scratch, 0xff, (size_t)floats * 4);
        if (step.count == 0) {
            continue;
        }
        float *targets[4], *partial = (float *)scratch;
        std::fill(partial, partial + floats - step.beside, (float)(i + 1));
        for (int64_t k = 0; k < step.count; k++) {
            targets[k] = to + (step.target + k) * width;
        }
        ND_TRY(cuda_add_columns_of("op", 0, partial, step.rows, step.columns,
                                   step.rows * step.columns, (int)step.count, targets));
    }
    return ND_OK;
}

/* recorded: ops of a graph. */
extern "C" const char *layer(const Step *steps, int count, float *to, int width, int hold,
                             int recorded, int empties, int *launched) {
    device.recording = recorded ? &graph : NULL;
    launches = 0;
    nd_status status = cuda_hold_sums(0, hold);
    status = status == ND_OK ? run(steps, count, to, width) : status;
    if (empties && status == ND_OK) {
        status = cuda_empty_cache(0);
    }
    const nd_status added = cuda_hold_sums(0, false);
    *launched = launches;
    return result(status == ND_OK ? added : status);
}
