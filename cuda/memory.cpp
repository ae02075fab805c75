/* memory.cpp - the memory of arrays, and scratch for ops.
 *
 * Memory comes from a stream-ordered pool of our own on each device (threshold at its maximum, so
 * that freed memory stays for the next call); reset() can thus give everything back without
 * cudaDeviceReset(), which would also end the context for other libraries in the process. While a
 * graph is recorded, it owns new allocations.
 *
 * A call of the pool takes the host a microsecond, so small blocks that arrays release stay here,
 * idle, for the next array of the same size; the order of the stream makes that safe, as in the
 * pool. Once there are too many, all of them go back to the pool.
 */
#include "device.cuh"
#include "graph.cuh"

namespace {

constexpr size_t scratch_step = (size_t)1 << 20;
constexpr size_t most_idle = (size_t)64 << 20, largest_idle = most_idle / 8;

/* What an idle block counts of most_idle: there are at most 1024. */
size_t idle_share(size_t bytes) { return bytes > most_idle >> 10 ? bytes : most_idle >> 10; }

/* The list in which idle blocks of this size are. */
Bytes **idle_list(Device &d, size_t bytes) {
    return &d.idle[(uint64_t)bytes * 0x9e3779b97f4a7c15u >> 58];
}

/* An idle block of this size, or null. */
void *take_idle(Device &d, size_t bytes) {
    Bytes **at = idle_list(d, bytes);
    while (*at && (*at)->count != bytes) {
        at = &(*at)->next;
    }
    Bytes *block = *at;
    if (!block) {
        return nullptr;
    }
    *at = block->next;
    d.idle_bytes -= idle_share(bytes);
    return block->memory;
}

nd_status free_block(Device &d, void *memory) {
    cudaError_t error = cudaFreeAsync(memory, d.stream);
    if (error == cudaErrorCudartUnloading) {
        return ND_OK; /* the process is ending and takes everything along */
    }
    return error == cudaSuccess ? ND_OK : cuda_error("release", "cudaFreeAsync", error);
}

} // namespace

nd_status cuda_free_idle(Device &d) {
    nd_status status = ND_OK;
    for (Bytes *&first : d.idle) {
        while (first) {
            void *memory = first->memory;
            first = first->next;
            d.blocks.erase(memory);
            nd_status freed = free_block(d, memory);
            status = status == ND_OK ? freed : status;
        }
    }
    d.idle_bytes = 0;
    return status;
}

nd_status cuda_free_scratch(Device &d, Scratch &scratch) {
    d.held.count = 0;
    d.held_bytes = 0;
    if (scratch.memory) {
        CUDA_TRY("scratch", cudaFreeAsync(scratch.memory, d.stream));
        scratch = {};
    }
    return ND_OK;
}

nd_status cuda_scratch(int device, size_t bytes, void **out) {
    Device &d = cuda_device(device);
    Scratch &scratch = d.recording ? cuda_graph_scratch(d.recording) : d.scratch;
    const size_t whole = d.held_bytes + bytes;
    if (whole > scratch.bytes) {
        ND_TRY(cuda_add_held_sums(device));
    }
    if (whole > scratch.bytes) {
        const size_t rounded = ceil_div(whole, scratch_step) * scratch_step;
        if (d.recording) { /* recorded work uses the old bytes in each replay */
            if (scratch.memory) {
                cuda_graph_reuse(d.recording, scratch.memory, scratch.bytes);
                scratch = {};
            }
            ND_TRY(cuda_graph_allocate(device, d.recording, rounded, &scratch.memory));
        } else { /* stream order keeps them for work already enqueued */
            ND_TRY(cuda_free_scratch(d, scratch));
            ND_TRY(cuda_pool_malloc(device, rounded, &scratch.memory));
        }
        scratch.bytes = rounded;
    }
    d.used_scratch = (const char *)scratch.memory;
    *out = (char *)scratch.memory + d.held_bytes;
#ifdef NEEDLE_DEBUG
    cuda_note_range(&d.operands, "scratch", *out, bytes);
#endif
    return ND_OK;
}

nd_status cuda_allocate(int device, size_t bytes, void **out) {
    *out = nullptr;
    if (bytes == 0) {
        return ND_OK;
    }
    if (cuda_faulted()) {
        return cuda_first_fault();
    }
    Exclusive call;
    call.hold(device);
    Device &d = cuda_device(device);
    *out = d.recording ? nullptr : take_idle(d, bytes);
    if (!*out) {
        ND_TRY(cuda_enter(device));
        ND_TRY(d.recording ? cuda_graph_allocate(device, d.recording, bytes, out)
                           : cuda_pool_malloc(device, bytes, out));
    }
    try {
        d.blocks[*out] = {bytes, d.recording};
    } catch (...) { /* no memory to note it in */
        if (d.recording) {
            cuda_graph_reuse(d.recording, *out, bytes);
        } else {
            cudaFreeAsync(*out, d.stream);
        }
        throw;
    }
    d.live_bytes += (int64_t)bytes;
    d.peak_bytes = d.live_bytes > d.peak_bytes ? d.live_bytes : d.peak_bytes;
    return ND_OK;
}

nd_status cuda_release(int device, void *memory) {
    if (!memory || cuda_faulted()) {
        return ND_OK;
    }
    Exclusive call;
    call.hold(device);
    Device &d = cuda_device(device);
    auto found = d.blocks.find(memory);
    if (found == d.blocks.end()) {
        return ND_OK; /* reset() gave it back already */
    }
    Bytes &block = found->second;
    const size_t bytes = block.count;
    d.live_bytes -= (int64_t)bytes;
    if (nd_graph *owner = block.owner) {
        d.blocks.erase(found);
        cuda_graph_reuse(owner, memory, bytes);
        return ND_OK;
    }
    if (d.recording) {
        block.late = true;
        return ND_OK;
    }
    if (bytes > largest_idle) {
        d.blocks.erase(found);
        ND_TRY(cuda_enter(device));
        return free_block(d, memory);
    }
    if (d.idle_bytes + idle_share(bytes) > most_idle) {
        ND_TRY(cuda_enter(device));
        ND_TRY(cuda_free_idle(d));
    }
    Bytes **first = idle_list(d, bytes);
    block.memory = memory;
    block.next = *first;
    *first = &block;
    d.idle_bytes += idle_share(bytes);
    return ND_OK;
}

nd_status cuda_memory_stats(int device, nd_memory_stats *out) {
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    uint64_t reserved = 0;
    CUDA_TRY("memory_stats",
             cudaMemPoolGetAttribute(d.pool, cudaMemPoolAttrReservedMemCurrent, &reserved));
    out->live_bytes = d.live_bytes;
    out->peak_bytes = d.peak_bytes;
    out->reserved_bytes = (int64_t)reserved;
    return ND_OK;
}

nd_status cuda_reset_peak(int device) {
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    d.peak_bytes = d.live_bytes;
    return ND_OK;
}

nd_status cuda_empty_cache(int device) {
    Exclusive call;
    ND_TRY(call.begin(device));
    ND_TRY(cuda_refuse_in_capture(device, "empty_cache"));
    Device &d = cuda_device(device);
    ND_TRY(cuda_add_held_sums(device));
    ND_TRY(cuda_free_scratch(d, d.scratch));
    ND_TRY(cuda_free_idle(d));
    CUDA_TRY("empty_cache", cudaStreamSynchronize(d.stream));
    CUDA_TRY("empty_cache", cudaMemPoolTrimTo(d.pool, 0));
    return ND_OK;
}
