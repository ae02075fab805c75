/* transfer.cpp - bytes between host and device: blocking and asynchronous copies, pinned buffers.
 *
 * An asynchronous copy goes through pinned memory, because one from or to pageable memory blocks
 * its caller. An event after the last copy of a block tells when the block may be read or written
 * again; work that is enqueued later goes on. The block of a finished copy is used again by
 * the next one that fits; a pinned buffer keeps its own.
 */
#include <string.h>

#include "device.cuh"
#include "graph.cuh"

namespace {

struct Pinned {
    void *memory;
    cudaEvent_t copied;
};

nd_status pinned_new(const char *op, size_t bytes, Pinned *out) {
    cudaError_t error = cudaMallocHost(&out->memory, bytes);
    if (error == cudaSuccess) {
        error = cudaEventCreateWithFlags(&out->copied, cudaEventDisableTiming);
        if (error != cudaSuccess) {
            cudaFreeHost(out->memory);
        }
    }
    return error == cudaSuccess ? ND_OK : cuda_error(op, "pinned host memory", error);
}

cudaError_t pinned_free(const Pinned &block) {
    cudaError_t error = cudaEventDestroy(block.copied);
    return error == cudaSuccess ? cudaFreeHost(block.memory) : error;
}

} // namespace

struct nd_async_copy {
    Pinned block;
    size_t capacity, bytes; /* of the block, on their way */
    nd_async_copy *next;    /* among the idle ones */
};

struct nd_pinned_buffer {
    Pinned block;
};

/* ---- copies that wait ------------------------------------------------------------------------ */
nd_status cuda_upload(int device, void *to, const void *from_host, size_t bytes) {
    ND_TRY(cuda_enter(device));
    if (bytes == 0) {
        return ND_OK;
    }
    const Device &d = cuda_device(device);
    ND_TRY(cuda_refuse_in_capture(device, "upload"));
    /* Pageable memory has been staged when the call returns; pinned memory has not. */
    cudaPointerAttributes attributes;
    CUDA_TRY("upload", cudaPointerGetAttributes(&attributes, from_host));
    CUDA_TRY("upload", cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, d.stream));
    if (attributes.type != cudaMemoryTypeUnregistered || d.reads_pages) {
        CUDA_TRY("upload", cudaStreamSynchronize(d.stream));
    }
    return ND_OK;
}

nd_status cuda_download(int device, void *to_host, const void *from, size_t bytes) {
    ND_TRY(cuda_enter(device));
    cudaStream_t stream = cuda_stream(device);
    ND_TRY(cuda_refuse_in_capture(device, "download"));
    if (bytes > 0) {
        CUDA_TRY("download", cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, stream));
    }
    CUDA_TRY("download", cudaStreamSynchronize(stream));
    return ND_OK;
}

/* ---- asynchronous copies to the host, in two halves ------------------------------------------ */
namespace {

/* An idle block when one fits: making one costs far more than a copy. Blocks are rounded up so that
 * few sizes exist. */
nd_status copy_block(Device &d, size_t bytes, nd_async_copy **out) {
    for (nd_async_copy **idle = &d.idle_copies; *idle; idle = &(*idle)->next) {
        size_t capacity = (*idle)->capacity;
        if (capacity >= bytes && capacity <= 2 * bytes + 4096) {
            *out = *idle;
            *idle = (*idle)->next;
            return ND_OK;
        }
    }
    nd_async_copy *made = new nd_async_copy{};
    made->capacity = (bytes / 4096 + 1) * 4096;
    nd_status status = pinned_new("async_copy", made->capacity, &made->block);
    if (status != ND_OK) {
        delete made;
        return status;
    }
    *out = made;
    return ND_OK;
}

/* Under the device's lock. */
void put_back(Device &d, nd_async_copy *copy) {
    copy->next = d.idle_copies;
    d.idle_copies = copy;
}

} // namespace

nd_status cuda_async_copy_begin(int device, const void *from, size_t bytes, nd_async_copy **out) {
    *out = nullptr;
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    ND_TRY(cuda_refuse_in_capture(device, "async_copy"));
    nd_async_copy *copy = nullptr;
    ND_TRY(copy_block(d, bytes, &copy));
    copy->bytes = bytes;
    const Pinned &block = copy->block;
    nd_status status = cuda_send("async_copy", device, from, bytes, block.memory);
    if (status == ND_OK) {
        cudaError_t error = cudaEventRecord(block.copied, d.stream);
        status = error ? cuda_error("async_copy", "cudaEventRecord", error) : ND_OK;
    }
    if (status != ND_OK) {
        put_back(d, copy);
        return status;
    }
    *out = copy;
    return ND_OK;
}

nd_status cuda_async_copy_end(int device, nd_async_copy *copy, void *to_host) {
    ND_TRY(cuda_enter(device)); /* after a fault the block goes with the process */
    cudaError_t error = cudaEventSynchronize(copy->block.copied);
    if (error == cudaSuccess && to_host) {
        memcpy(to_host, copy->block.memory, copy->bytes);
    }
    Device &d = cuda_device(device);
    {
        std::lock_guard<std::mutex> guard(d.lock);
        put_back(d, copy);
    }
    return error == cudaSuccess ? ND_OK : cuda_error("async_copy", "cudaEventSynchronize", error);
}

nd_status cuda_transfer_reset(int device) {
    Device &d = cuda_device(device);
    while (d.idle_copies) {
        nd_async_copy *first = d.idle_copies;
        d.idle_copies = first->next;
        cudaError_t error = pinned_free(first->block);
        delete first;
        CUDA_TRY("reset", error);
    }
    return ND_OK;
}

/* ---- pinned buffers -------------------------------------------------------------------------- */
nd_status cuda_pinned_buffer_new(int device, size_t bytes, nd_pinned_buffer **out, void **memory) {
    *out = nullptr;
    ND_TRY(cuda_enter(device));
    nd_pinned_buffer *made = new nd_pinned_buffer{};
    nd_status status = pinned_new("pinned_buffer", bytes, &made->block);
    if (status != ND_OK) {
        delete made;
        return status;
    }
    *out = made;
    *memory = made->block.memory;
    return ND_OK;
}

nd_status cuda_pinned_buffer_send(int device, nd_pinned_buffer *buffer, void *to, size_t bytes) {
    Exclusive call;
    ND_TRY(call.begin(device));
    ND_TRY(cuda_refuse_in_capture(device, "pinned_buffer"));
    cudaStream_t stream = cuda_stream(device);
    const Pinned &block = buffer->block;
    if (bytes > 0) {
        CUDA_TRY("pinned_buffer",
                 cudaMemcpyAsync(to, block.memory, bytes, cudaMemcpyHostToDevice, stream));
    }
    CUDA_TRY("pinned_buffer", cudaEventRecord(block.copied, stream));
    return ND_OK;
}

/* An event that was never recorded is done. */
nd_status cuda_pinned_buffer_wait(int device, nd_pinned_buffer *buffer) {
    ND_TRY(cuda_enter(device));
    CUDA_TRY("pinned_buffer", cudaEventSynchronize(buffer->block.copied));
    return ND_OK;
}

nd_status cuda_pinned_buffer_free(int device, nd_pinned_buffer *buffer) {
    if (cuda_faulted()) {
        return ND_OK; /* goes with the process */
    }
    ND_TRY(cuda_enter(device));
    cudaError_t error = cudaEventSynchronize(buffer->block.copied);
    if (error == cudaSuccess) {
        error = pinned_free(buffer->block);
    }
    delete buffer;
    if (error == cudaErrorCudartUnloading) {
        return ND_OK; /* the process is ending and takes everything along */
    }
    return error == cudaSuccess ? ND_OK : cuda_error("pinned_buffer", "cudaFreeHost", error);
}
