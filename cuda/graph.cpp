/* graph.cpp - CUDA graphs: the memory of recorded work, its capture, its launch (graph.cuh).
 *
 * Blocks are handed out by their exact rounded size, last in first out. Two arrays that live at the
 * same time never share a block.
 */
#include <map>
#include <vector>

#include "device.cuh"
#include "graph.cuh"

namespace {

/* A type of this project's around the pointer: a vector of plain pointers would be exported. */
struct Block {
    void *memory;
};

/* The blocks of one size: those that are idle, with room for all. */
struct Blocks {
    std::vector<Block> idle;
    size_t made = 0;
};

constexpr size_t block_step = 512;

size_t rounded(size_t bytes) { return ceil_div(bytes, block_step) * block_step; }

} // namespace

struct nd_graph {
    cudaGraphExec_t exec = nullptr;
    std::map<size_t, Blocks> blocks; /* by rounded size */
    Scratch scratch;
};

/* ---- memory ---------------------------------------------------------------------------------- */
nd_status cuda_graph_allocate(int device, nd_graph *graph, size_t bytes, void **out) {
    Blocks &blocks = graph->blocks[rounded(bytes)];
    if (!blocks.idle.empty()) {
        *out = blocks.idle.back().memory;
        blocks.idle.pop_back();
        return ND_OK;
    }
    blocks.idle.reserve(blocks.made + 1);
    ND_TRY(cuda_pool_malloc(device, rounded(bytes), out));
    blocks.made++;
    return ND_OK;
}

void cuda_graph_reuse(nd_graph *graph, void *memory, size_t bytes) {
    graph->blocks.find(rounded(bytes))->second.idle.push_back({memory});
}

Scratch &cuda_graph_scratch(nd_graph *graph) { return graph->scratch; }

/* ---- capture --------------------------------------------------------------------------------- */
bool cuda_is_recording(int device) { return cuda_device(device).recording; }

bool cuda_reads_ahead(int device, std::initializer_list<const nd_array *> operands) {
    const Device &d = cuda_device(device);
    bool good = d.recording;
#ifdef NEEDLE_DEBUG
    good = false;
#endif
    for (const nd_array *a : operands) {
        auto found = good && a ? d.blocks.find(a->storage->memory) : d.blocks.end();
        good = good && (found == d.blocks.end() || found->second.owner != d.recording);
    }
    return good;
}

nd_status cuda_refuse_in_capture(int device, const char *op) {
    return cuda_is_recording(device)
               ? nd_error(ND_EVALUE,
                          "%s: a graph is being recorded, and what it does may not go to the host "
                          "or come from it; do it before or after",
                          op)
               : ND_OK;
}

nd_status cuda_graph_begin(int device, nd_graph **out) {
    *out = nullptr;
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    if (d.recording) {
        return nd_error(ND_EVALUE, "graph: cuda(%d) is recording one already", device);
    }
    d.graphs.reserve(d.graphs.size() + 1);
    nd_graph *graph = new nd_graph;
    /* Relaxed: other threads may use other streams. */
    cudaError_t error = cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeRelaxed);
    if (error != cudaSuccess) {
        delete graph;
        return cuda_error("graph", "cudaStreamBeginCapture", error);
    }
    d.graphs.push_back(graph);
    d.recording = *out = graph;
    return ND_OK;
}

namespace {

/* Ends the capture whatever became of it; *captured is null when it was broken. */
nd_status stop_capture(int device, nd_graph *graph, cudaGraph_t *captured) {
    Device &d = cuda_device(device);
    *captured = nullptr;
    d.recording = nullptr;
    cudaError_t error = cudaStreamEndCapture(d.stream, captured);
    cudaEvent_t allocated; /* what uses or frees the graph's memory comes after it */
    cudaError_t made = cudaEventCreateWithFlags(&allocated, cudaEventDisableTiming);
    if (made == cudaSuccess) {
        made = cudaEventRecord(allocated, d.side_stream);
        made = made == cudaSuccess ? cudaStreamWaitEvent(d.stream, allocated, 0) : made;
        cudaEventDestroy(allocated);
    }
    error = error == cudaSuccess ? made : error;
    for (auto entry = d.blocks.begin(); entry != d.blocks.end();) {
        if (entry->second.late) { /* recorded work may read it in each replay */
            graph->blocks[rounded(entry->second.count)].idle.push_back({entry->first});
            entry = d.blocks.erase(entry);
        } else {
            ++entry;
        }
    }
    return error == cudaSuccess ? ND_OK : cuda_error("graph", "cudaStreamEndCapture", error);
}

/* Everything but the blocks that arrays still use. */
nd_status free_graph(int device, nd_graph *graph) {
    nd_status status = ND_OK;
    if (cuda_device(device).recording == graph) {
        cudaGraph_t captured;
        stop_capture(device, graph, &captured); /* its failure is why the graph goes */
        if (captured) {
            cudaGraphDestroy(captured);
        }
    }
    cudaStream_t stream = cuda_stream(device);
    cudaError_t error = cudaSuccess;
    if (graph->exec) { /* lasts until the launches that are queued are done */
        error = cudaGraphExecDestroy(graph->exec);
    }
    for (auto &size : graph->blocks) {
        for (Block &block : size.second.idle) {
            cudaError_t freed = cudaFreeAsync(block.memory, stream);
            error = error == cudaSuccess ? freed : error;
        }
    }
    if (graph->scratch.memory) {
        cudaError_t freed = cudaFreeAsync(graph->scratch.memory, stream);
        error = error == cudaSuccess ? freed : error;
    }
    delete graph;
    if (error != cudaSuccess && error != cudaErrorCudartUnloading) {
        status = cuda_error("graph", "giving its memory back", error);
    }
    return status;
}

} // namespace

nd_status cuda_graph_end(int device, nd_graph *graph) {
    Exclusive call;
    ND_TRY(call.begin(device));
    cudaGraph_t captured;
    ND_TRY(stop_capture(device, graph, &captured));
    cudaError_t error = cudaGraphInstantiateWithFlags(&graph->exec, captured, 0);
    cudaGraphDestroy(captured);
    return error == cudaSuccess ? ND_OK
                                : cuda_error("graph", "cudaGraphInstantiateWithFlags", error);
}

nd_status cuda_graph_launch(int device, nd_graph *graph) {
    Exclusive call;
    ND_TRY(call.begin(device));
    CUDA_TRY("graph", cudaGraphLaunch(graph->exec, cuda_stream(device)));
    return ND_OK;
}

nd_status cuda_graph_free(int device, nd_graph *graph) {
    if (cuda_faulted()) {
        return ND_OK; /* it goes with the process */
    }
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    for (auto &entry : d.blocks) {
        if (entry.second.owner == graph) {
            entry.second.owner = nullptr; /* now the array's own */
        }
    }
    for (size_t i = 0; i < d.graphs.size(); i++) {
        if (d.graphs[i] == graph) {
            d.graphs.erase(d.graphs.begin() + (ptrdiff_t)i);
            break;
        }
    }
    return free_graph(device, graph);
}

nd_status cuda_graph_reset(int device) {
    Device &d = cuda_device(device);
    for (nd_graph *graph : d.graphs) {
        ND_TRY(free_graph(device, graph));
    }
    d.graphs.clear();
    return ND_OK;
}
