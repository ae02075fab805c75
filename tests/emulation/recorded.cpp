/* recorded.cpp - the memory of recorded work on the CPU: graph.cpp and memory.cpp over malloc. */
#include "graph.cuh"
#include "host.h"
#include "pool.h"

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *) { return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *, cudaGraph_t, unsigned long long) {
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
nd_status cuda_add_held_sums(int) { return ND_OK; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, unsigned) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

#define cuda_stream(device) NULL
#include "graph.cpp"
#include "memory.cpp"

/* An array in memory that a device hands out now. */
struct Made {
    nd_storage storage = {};
    nd_array array = {};

    Made() {
        cuda_allocate(0, 1024, &storage.memory);
        array.storage = &storage;
        array.data = (char *)storage.memory + 512;
    }
    ~Made() { cuda_release(0, storage.memory); }
};

/* Whether operands may be read ahead: [run][which], of a recorded run and another, of one made before,
 * one made in the run, both, and none. */
extern "C" const char *reads_ahead(int (*answers)[4]) {
    nd_graph *graph;
    Made before;
    cuda_graph_begin(0, &graph);
    for (int run = 0; run < 2; run++) {
        if (run == 1) {
            cuda_graph_end(0, graph);
        }
        Made now;
        const nd_array *of[2] = {&before.array, &now.array};
        answers[run][0] = cuda_reads_ahead(0, {of[0], NULL});
        answers[run][1] = cuda_reads_ahead(0, {of[1]});
        answers[run][2] = cuda_reads_ahead(0, {of[0], of[1]});
        answers[run][3] = cuda_reads_ahead(0, {NULL});
    }
    return result(cuda_graph_free(0, graph));
}
