/* memory.cpp - the memory of arrays, and scratch for ops.
 *
 * Memory comes from a stream-ordered pool of our own on each device (threshold at its maximum, so
 * that freed memory stays for the next call); reset() can thus give everything back without
 * cudaDeviceReset(), which would also end the context for other libraries in the process. While a
 * graph is recorded, it owns new allocations.
 */
#include "device.cuh"
#include "graph.cuh"

namespace {

constexpr size_t scratch_step = (size_t)1 << 20;

} // namespace

nd_status cuda_free_scratch(Device &d) {
    if (d.scratch) {
        CUDA_TRY("scratch", cudaFreeAsync(d.scratch, d.stream));
        d.scratch = nullptr;
        d.scratch_bytes = 0;
    }
    return ND_OK;
}

nd_status cuda_scratch(int device, size_t bytes, void **out) {
    Device &d = cuda_device(device);
    if (d.recording) {
        ND_TRY(cuda_graph_scratch(device, d.recording, bytes, out));
    } else if (bytes > d.scratch_bytes) {
        /* Stream order keeps the old bytes alive for work already enqueued. */
        ND_TRY(cuda_free_scratch(d));
        size_t rounded = ceil_div(bytes, scratch_step) * scratch_step;
        ND_TRY(cuda_pool_malloc(device, rounded, &d.scratch));
        d.scratch_bytes = rounded;
    }
    *out = d.recording ? *out : d.scratch;
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
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    if (d.recording) {
        ND_TRY(cuda_graph_allocate(device, d.recording, bytes, out));
    } else {
        ND_TRY(cuda_pool_malloc(device, bytes, out));
    }
    try {
        d.live[*out] = {bytes, d.recording};
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
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    auto found = d.live.find(memory);
    if (found == d.live.end()) {
        return ND_OK; /* reset() gave it back already */
    }
    const Bytes bytes = found->second;
    d.live_bytes -= (int64_t)bytes.count;
    if (!bytes.owner && cuda_is_capturing(device)) {
        found->second.late = true;
        return ND_OK;
    }
    d.live.erase(found);
    if (bytes.owner) {
        cuda_graph_reuse(bytes.owner, memory, bytes.count);
        return ND_OK;
    }
    cudaError_t error = cudaFreeAsync(memory, d.stream);
    if (error == cudaErrorCudartUnloading) {
        return ND_OK; /* the process is ending and takes everything along */
    }
    return error == cudaSuccess ? ND_OK : cuda_error("release", "cudaFreeAsync", error);
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
    Device &d = cuda_device(device);
    ND_TRY(cuda_free_scratch(d));
    CUDA_TRY("empty_cache", cudaStreamSynchronize(d.stream));
    CUDA_TRY("empty_cache", cudaMemPoolTrimTo(d.pool, 0));
    return ND_OK;
}
