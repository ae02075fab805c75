/* transfer.cu - bytes between host and device: copies that wait, asynchronous copies, staging.
 *
 * An asynchronous copy goes through pinned memory, because one from or to pageable memory blocks
 * its caller. An event after the last copy of a block tells when the block may be read or written
 * again; work that is enqueued later goes on. The block of a finished copy is used again by
 * the next one that fits; a staging keeps its own.
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

struct nd_download {
    Pinned block;
    size_t capacity, bytes; /* of the block, on their way */
    nd_download *next;      /* among the idle ones */
};

struct nd_staging {
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
nd_status download_block(Device &d, size_t bytes, nd_download **out) {
    for (nd_download **idle = &d.idle_downloads; *idle; idle = &(*idle)->next) {
        size_t capacity = (*idle)->capacity;
        if (capacity >= bytes && capacity <= 2 * bytes + 4096) {
            *out = *idle;
            *idle = (*idle)->next;
            return ND_OK;
        }
    }
    nd_download *made = new nd_download{};
    made->capacity = (bytes / 4096 + 1) * 4096;
    nd_status status = pinned_new("download", made->capacity, &made->block);
    if (status != ND_OK) {
        delete made;
        return status;
    }
    *out = made;
    return ND_OK;
}

/* Under the device's lock. */
void put_back(Device &d, nd_download *download) {
    download->next = d.idle_downloads;
    d.idle_downloads = download;
}

} // namespace

nd_status cuda_download_begin(int device, const void *from, size_t bytes, nd_download **out) {
    *out = nullptr;
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    ND_TRY(cuda_refuse_in_capture(device, "download"));
    nd_download *download = nullptr;
    ND_TRY(download_block(d, bytes, &download));
    download->bytes = bytes;
    const Pinned &block = download->block;
    cudaError_t error = cudaSuccess;
    if (bytes > 0) {
        error = cudaMemcpyAsync(block.memory, from, bytes, cudaMemcpyDeviceToHost, d.stream);
    }
    if (error == cudaSuccess) {
        error = cudaEventRecord(block.copied, d.stream);
    }
    if (error != cudaSuccess) {
        put_back(d, download);
        return cuda_error("download", "cudaMemcpyAsync", error);
    }
    *out = download;
    return ND_OK;
}

nd_status cuda_download_end(int device, nd_download *download, void *to_host) {
    ND_TRY(cuda_enter(device)); /* after a fault the block goes with the process */
    cudaError_t error = cudaEventSynchronize(download->block.copied);
    if (error == cudaSuccess && to_host) {
        memcpy(to_host, download->block.memory, download->bytes);
    }
    Device &d = cuda_device(device);
    {
        std::lock_guard<std::mutex> guard(d.lock);
        put_back(d, download);
    }
    return error == cudaSuccess ? ND_OK : cuda_error("download", "cudaEventSynchronize", error);
}

nd_status cuda_transfer_reset(int device) {
    Device &d = cuda_device(device);
    while (d.idle_downloads) {
        nd_download *first = d.idle_downloads;
        d.idle_downloads = first->next;
        cudaError_t error = pinned_free(first->block);
        delete first;
        CUDA_TRY("reset", error);
    }
    return ND_OK;
}

/* ---- staging --------------------------------------------------------------------------------- */
nd_status cuda_staging_new(int device, size_t bytes, nd_staging **out, void **memory) {
    *out = nullptr;
    ND_TRY(cuda_enter(device));
    nd_staging *made = new nd_staging{};
    nd_status status = pinned_new("staging", bytes, &made->block);
    if (status != ND_OK) {
        delete made;
        return status;
    }
    *out = made;
    *memory = made->block.memory;
    return ND_OK;
}

nd_status cuda_staging_send(int device, nd_staging *staging, void *to, size_t bytes) {
    Exclusive call;
    ND_TRY(call.begin(device));
    ND_TRY(cuda_refuse_in_capture(device, "staging"));
    cudaStream_t stream = cuda_stream(device);
    const Pinned &block = staging->block;
    if (bytes > 0) {
        CUDA_TRY("staging",
                 cudaMemcpyAsync(to, block.memory, bytes, cudaMemcpyHostToDevice, stream));
    }
    CUDA_TRY("staging", cudaEventRecord(block.copied, stream));
    return ND_OK;
}

/* An event that was never recorded is done. */
nd_status cuda_staging_wait(int device, nd_staging *staging) {
    ND_TRY(cuda_enter(device));
    CUDA_TRY("staging", cudaEventSynchronize(staging->block.copied));
    return ND_OK;
}

nd_status cuda_staging_free(int device, nd_staging *staging) {
    if (cuda_faulted()) {
        return ND_OK; /* goes with the process */
    }
    ND_TRY(cuda_enter(device));
    cudaError_t error = cudaEventSynchronize(staging->block.copied);
    if (error == cudaSuccess) {
        error = pinned_free(staging->block);
    }
    delete staging;
    if (error == cudaErrorCudartUnloading) {
        return ND_OK; /* the process is ending and takes everything along */
    }
    return error == cudaSuccess ? ND_OK : cuda_error("staging", "cudaFreeHost", error);
}
