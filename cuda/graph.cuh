/* graph.cuh - work recorded once and launched many times, with the memory it uses.
 *
 * Memory used by a recorded kernel must not return to the pool: the graph owns what the step
 * allocates, blocks and scratch. They come from the pool in the order of the side stream, so that
 * the graph holds no memory nodes.
 */
#ifndef NEEDLE_GRAPH_CUH
#define NEEDLE_GRAPH_CUH

#include "common.cuh"

/* ---- memory while a graph is being recorded (under the device's lock) ------------------------ */
/* Memory of an array: a block of the graph, an idle one of this size if there is one. */
nd_status cuda_graph_allocate(int device, nd_graph *graph, size_t bytes, void **out);
/* `memory`, a block of the graph, is idle again; the next allocation of its size may have it. */
void cuda_graph_reuse(nd_graph *graph, void *memory, size_t bytes);
/* cuda_scratch of recorded work: the graph's own, because the device's may move. */
struct Scratch &cuda_graph_scratch(nd_graph *graph);

/* ---- recording ------------------------------------------------------------------------------- */
/* ND_EVALUE while recording: a recorded copy would read or write the host's memory at each
 * launch. */
nd_status cuda_refuse_in_capture(int device, const char *op);

/* ---- the vtable's functions (contracts in backend.h) ----------------------------------------- */
nd_status cuda_graph_begin(int device, nd_graph **out);
nd_status cuda_graph_end(int device, nd_graph *graph);
nd_status cuda_graph_launch(int device, nd_graph *graph);
/* Ends a recording that is under way, frees idle blocks and everything else; blocks that arrays still
 * use become their own. */
nd_status cuda_graph_free(int device, nd_graph *graph);
/* reset(): free every graph of the device. Under its lock. */
nd_status cuda_graph_reset(int device);

#endif
