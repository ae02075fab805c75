/* device.cpp - the state of each device, faults, and the way into a call.
 *
 * Faults. The first error that ends the context is kept; from then on every call returns it and
 * release() does nothing. The state is never destroyed, so that nothing here runs after the
 * runtime's own shutdown at exit.
 */
#include "device.cuh"

#include <atomic>
#include <stdio.h>

namespace {

struct State {
    Device devices[cuda_max_devices];
    std::mutex fault_lock;
    std::atomic<bool> faulted{false};
    char fault[1024] = "";
};

State &state() {
    static State *the = new State; /* never destroyed */
    return *the;
}

/* ---- faults ---------------------------------------------------------------------------------- */
/* Errors after which every call on the context fails. */
bool ends_context(cudaError_t error) {
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
    case cudaErrorUnknown:
        return true;
    default:
        return false;
    }
}

} // namespace

nd_status cuda_first_fault(void) {
    State &s = state();
    std::lock_guard<std::mutex> guard(s.fault_lock);
    return nd_error(ND_EFATAL, "%s", s.fault);
}

nd_status cuda_error(const char *op, const char *what, cudaError_t error) {
    cudaGetLastError();
    char found[320];
    cuda_fault_text(found, sizeof found);
    if (!ends_context(error)) {
        return nd_error(ND_ECUDA, "%s: %s: %s (%s)", op, what, cudaGetErrorString(error),
                        cudaGetErrorName(error));
    }
    State &s = state();
    {
        std::lock_guard<std::mutex> guard(s.fault_lock);
        if (!s.faulted.load(std::memory_order_relaxed)) {
            snprintf(s.fault, sizeof s.fault,
                     "%s: %s: %s (%s)%s: the CUDA context is lost and this process must end; start "
                     "again from the last checkpoint. The fault may come from an earlier op: "
                     "NEEDLE_SYNC=1 finds which",
                     op, what, cudaGetErrorString(error), cudaGetErrorName(error), found);
            s.faulted.store(true, std::memory_order_release);
        }
    }
    return cuda_first_fault();
}

bool cuda_faulted(void) { return state().faulted.load(std::memory_order_acquire); }

/* ---- entering a call ------------------------------------------------------------------------- */
nd_status cuda_enter(int device) {
    if (cuda_faulted()) {
        return cuda_first_fault();
    }
    if (device < 0 || device >= cuda_max_devices || !state().devices[device].opened) {
        return nd_error(ND_EVALUE, "cuda(%d): the device has not been opened", device);
    }
    CUDA_TRY("cuda", cudaSetDevice(device));
    cudaError_t stale = cudaGetLastError();
    if (stale != cudaSuccess && ends_context(stale)) {
        return cuda_error("cuda", "an earlier kernel or another library", stale);
    }
    return ND_OK;
}

void Exclusive::hold(int device) {
    if (device >= 0 && device < cuda_max_devices) {
        lock = &state().devices[device].lock;
        lock->lock();
    }
}

nd_status Exclusive::begin(int device) {
    hold(device);
    return cuda_enter(device);
}

Device &cuda_device(int device) { return state().devices[device]; }

/* ---- the pool -------------------------------------------------------------------------------- */
nd_status cuda_pool_malloc(int device, size_t bytes, void **out) {
    Device &d = cuda_device(device);
    /* A graph that is being recorded is not to allocate at each launch. */
    cudaStream_t stream = d.recording ? d.side_stream : d.stream;
    cudaError_t error = cudaMallocFromPoolAsync(out, bytes, d.pool, stream);
    if (error == cudaErrorMemoryAllocation) {
        /* memory freed lately, but in pieces of other sizes, may be enough */
        cudaGetLastError();
        if (!d.recording) {
            ND_TRY(cuda_free_idle(d));
        }
        CUDA_TRY("allocate", cudaStreamSynchronize(stream));
        CUDA_TRY("allocate", cudaMemPoolTrimTo(d.pool, 0));
        error = cudaMallocFromPoolAsync(out, bytes, d.pool, stream);
    }
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        size_t free_bytes = 0, total = 0;
        CUDA_TRY("allocate", cudaMemGetInfo(&free_bytes, &total));
        double mib = 1.0 / (1 << 20);
        return nd_error(ND_ECUDA,
                        "allocate: out of memory on cuda(%d): %.1f MiB asked for, %.1f MiB in "
                        "arrays, %.1f of %.1f MiB free; use a smaller batch, or free arrays",
                        device, bytes * mib, d.live_bytes * mib, free_bytes * mib, total * mib);
    }
    if (error != cudaSuccess) {
        return cuda_error("allocate", "cudaMallocFromPoolAsync", error);
    }
    return ND_OK;
}

/* ---- limits and launches, for the ops (common.cuh) ------------------------------------------- */
const cuda_limits *cuda_device_limits(int device) { return &cuda_device(device).limits; }

cudaStream_t cuda_stream(int device, bool side) {
    const Device &d = cuda_device(device);
    return side ? d.side_stream : d.stream;
}

int cuda_arch(int device) { return cuda_device(device).arch; }

/* Prepare a kernel for launches, cached: dynamic shared memory above 48 KiB is requested once. */
static nd_status prepare(const char *op, int device, const void *kernel, int threads, size_t shared,
                         bool *overlaps) {
    Device &d = cuda_device(device);
    auto found = d.prepared.find(kernel);
    if (found != d.prepared.end() && shared <= found->second.shared) {
        *overlaps = found->second.overlaps;
        return ND_OK;
    }
    cudaFuncAttributes attributes;
    CUDA_TRY(op, cudaFuncGetAttributes(&attributes, kernel));
    if (threads > attributes.maxThreadsPerBlock) {
        return nd_error(ND_ECUDA,
                        "%s: needs blocks of %d threads, and cuda(%d) runs this kernel with "
                        "at most %d",
                        op, threads, device, attributes.maxThreadsPerBlock);
    }
    size_t whole = shared + attributes.sharedSizeBytes;
    if (whole > d.limits.block_shared) {
        return nd_error(ND_ECUDA,
                        "%s: needs %zu bytes of shared memory a block, and cuda(%d) has %zu", op,
                        whole, device, d.limits.block_shared);
    }
    if (whole > 48 * 1024) {
        CUDA_TRY(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)shared));
    }
    /* Compiled for less, await_previous() is empty, whatever the device. */
    *overlaps = attributes.ptxVersion >= 90;
    d.prepared[kernel] = {shared, *overlaps};
    return ND_OK;
}

nd_status cuda_launch_kernel(const char *op, int device, const void *kernel, dim3 grid, dim3 block,
                             size_t shared, void **arguments) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    bool overlaps = false;
    ND_TRY(prepare(op, device, kernel, (int)(block.x * block.y * block.z), shared, &overlaps));
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = cuda_stream(device);
    config.attrs = &overlap;
    config.numAttrs = overlaps ? 1 : 0;
#ifdef NEEDLE_DEBUG
    ND_TRY(cuda_publish_operands(cuda_device(device).operands, cuda_device(device).published,
                                 config.stream));
#endif
    CUDA_TRY(op, cudaLaunchKernelExC(&config, kernel, arguments));
    return ND_OK;
}
