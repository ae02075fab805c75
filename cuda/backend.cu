/* backend.cu - the CUDA backend's frame: devices, the one stream of each, memory, faults, the vtable.
 *
 * Memory comes from a stream-ordered pool of our own on each device (threshold at its maximum, so
 * that freed memory stays for the next call); reset() can thus give everything back without
 * cudaDeviceReset(), which would also end the context for other libraries in the process.
 *
 * Threads. A device's ops are enqueued one at a time, under its lock, because they share scratch
 * and the order of enqueuing is the order of results. Copies and waits do not hold it.
 * reset() must not run while another thread uses the device.
 *
 * Faults. The first error that ends the context is kept; from then on every call returns it and
 * release() does nothing. The state is never destroyed, so that nothing here runs after the
 * runtime's own shutdown at exit.
 */
#include <atomic>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.cuh"
#include "graph.cuh"

namespace {

constexpr int max_devices = 64;
constexpr size_t scratch_step = (size_t)1 << 20;

struct State {
    Device devices[max_devices];
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

nd_status first_fault() {
    State &s = state();
    std::lock_guard<std::mutex> guard(s.fault_lock);
    return nd_error(ND_EFATAL, "%s", s.fault);
}

} // namespace

nd_status cuda_error(const char *op, const char *what, cudaError_t error) {
    cudaGetLastError();
    if (!ends_context(error)) {
        return nd_error(ND_ECUDA, "%s: %s: %s (%s)", op, what, cudaGetErrorString(error),
                        cudaGetErrorName(error));
    }
    State &s = state();
    {
        std::lock_guard<std::mutex> guard(s.fault_lock);
        if (!s.faulted.load(std::memory_order_relaxed)) {
            snprintf(s.fault, sizeof s.fault,
                     "%s: %s: %s (%s): the CUDA context is lost and this process must end; start "
                     "again from the last checkpoint. The fault may come from an earlier op: "
                     "NEEDLE_SYNC=1 finds which",
                     op, what, cudaGetErrorString(error), cudaGetErrorName(error));
            s.faulted.store(true, std::memory_order_release);
        }
    }
    return first_fault();
}

bool cuda_faulted(void) { return state().faulted.load(std::memory_order_acquire); }

/* ---- entering a call ------------------------------------------------------------------------- */
nd_status cuda_enter(int device) {
    if (cuda_faulted()) {
        return first_fault();
    }
    if (device < 0 || device >= max_devices || !state().devices[device].opened) {
        return nd_error(ND_EVALUE, "cuda(%d): the device has not been opened", device);
    }
    CUDA_TRY("cuda", cudaSetDevice(device));
    cudaError_t stale = cudaGetLastError();
    if (stale != cudaSuccess && ends_context(stale)) {
        return cuda_error("cuda", "an earlier kernel or another library", stale);
    }
    return ND_OK;
}

nd_status Exclusive::begin(int device) {
    if (device >= 0 && device < max_devices) {
        lock = &state().devices[device].lock;
        lock->lock();
    }
    return cuda_enter(device);
}

Device &cuda_device(int device) { return state().devices[device]; }

namespace {

/* ---- devices --------------------------------------------------------------------------------- */
__global__ void probe_kernel() {}

#ifdef __CUDA_ARCH_LIST__
const int built_archs[] = {__CUDA_ARCH_LIST__}; /* 800 for 8.0 */
#else
#error "nvcc did not define __CUDA_ARCH_LIST__: CUDA 11.5 or newer is needed"
#endif

/* Machine code for x.y runs on x.z with z >= y. */
bool built_for(int major, int minor) {
    for (int arch : built_archs) {
        if (arch / 100 == major && arch / 10 % 10 <= minor) {
            return true;
        }
    }
    return false;
}

/* Also true when PTX in this build can be compiled for it; makes the device's context. */
bool can_run(int device) {
    cudaFuncAttributes attributes;
    bool can = cudaSetDevice(device) == cudaSuccess &&
               cudaFuncGetAttributes(&attributes, (const void *)probe_kernel) == cudaSuccess;
    cudaGetLastError();
    return can;
}

nd_status no_kernels(const char *name, int device, int major, int minor) {
    char list[256] = "";
    size_t used = 0;
    for (int arch : built_archs) {
        int written = snprintf(list + used, sizeof list - used, "%s%d.%d", used ? ", " : "",
                               arch / 100, arch / 10 % 10);
        used += written > 0 && used + (size_t)written < sizeof list ? (size_t)written : 0;
    }
    return nd_error(ND_ECUDA,
                    "cuda(%d): %s has compute capability %d.%d, and this build has kernels for %s "
                    "only; build again with NEEDLE_CUDA_ARCHS=%d%d",
                    device, name, major, minor, list, major, minor);
}

nd_status cuda_device_count(int *count) {
    *count = 0;
    if (cuda_faulted()) {
        return first_fault();
    }
    int driver = 0, runtime = 0, found = 0;
    CUDA_TRY("cuda", cudaRuntimeGetVersion(&runtime));
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        cudaGetLastError();
        return nd_error(ND_ECUDA,
                        "cuda: no NVIDIA driver (libcuda.so.1) was found on this machine; "
                        "install the driver, or use needle.cpu()");
    }
    cudaError_t error = cudaGetDeviceCount(&found);
    if (error == cudaErrorNoDevice) {
        cudaGetLastError();
        return nd_error(ND_ECUDA,
                        "cuda: the driver is installed but sees no GPU; look at nvidia-smi "
                        "and at CUDA_VISIBLE_DEVICES (now %s)",
                        getenv("CUDA_VISIBLE_DEVICES") ? getenv("CUDA_VISIBLE_DEVICES") : "unset");
    }
    if (error == cudaErrorInsufficientDriver) {
        cudaGetLastError();
        return nd_error(
            ND_ECUDA,
            "cuda: the NVIDIA driver is too old: it supports CUDA %d.%d, and this build "
            "uses CUDA %d.%d; update the driver or build with an older toolkit",
            driver / 1000, driver / 10 % 100, runtime / 1000, runtime / 10 % 100);
    }
    if (error != cudaSuccess) {
        return cuda_error("cuda", "counting devices", error);
    }
    found = found < max_devices ? found : max_devices;
    bool usable = found == 0;
    int major = 0, minor = 0;
    for (int i = 0; i < found && !usable; i++) {
        CUDA_TRY("cuda", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i));
        CUDA_TRY("cuda", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i));
        usable = built_for(major, minor) || can_run(i);
    }
    if (!usable) {
        cudaDeviceProp prop;
        CUDA_TRY("cuda", cudaGetDeviceProperties(&prop, found - 1));
        return no_kernels(prop.name, found - 1, prop.major, prop.minor);
    }
    *count = found;
    return ND_OK;
}

nd_status pool_new(int device, cudaMemPool_t *out) {
    cudaMemPoolProps props;
    memset(&props, 0, sizeof props);
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = device;
    cudaMemPool_t pool;
    CUDA_TRY("cuda", cudaMemPoolCreate(&pool, &props));
    uint64_t most = UINT64_MAX;
    cudaError_t error = cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &most);
    if (error != cudaSuccess) {
        cudaMemPoolDestroy(pool);
        return cuda_error("cuda", "cudaMemPoolAttrReleaseThreshold", error);
    }
    *out = pool;
    return ND_OK;
}

/* With the device's lock held. */
nd_status open_locked(int device) {
    Device &d = cuda_device(device);
    if (d.opened) {
        return ND_OK;
    }
    CUDA_TRY("cuda", cudaSetDevice(device));
    cudaDeviceProp prop;
    CUDA_TRY("cuda", cudaGetDeviceProperties(&prop, device));
    if (!can_run(device)) {
        return no_kernels(prop.name, device, prop.major, prop.minor);
    }
    int pools = 0;
    CUDA_TRY("cuda", cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device));
    if (!pools) {
        return nd_error(ND_ECUDA,
                        "cuda(%d): %s: the driver offers no stream-ordered memory pools, "
                        "which needle needs; update it",
                        device, prop.name);
    }
    d.limits.processors = prop.multiProcessorCount;
    d.limits.arch = prop.major * 10 + prop.minor;
    d.limits.block_threads = prop.maxThreadsPerBlock;
    d.limits.block_shared = prop.sharedMemPerBlockOptin;
    d.limits.l2_bytes = (size_t)prop.l2CacheSize;
    d.reads_pages = prop.integrated || prop.pageableMemoryAccessUsesHostPageTables;
    d.arch = d.limits.arch;
    const char *asked = getenv("NEEDLE_ARCH");
    if (asked && *asked) {
        int arch = atoi(asked);
        if (arch < 80) {
            return nd_error(ND_EVALUE, "NEEDLE_ARCH=%s: must be an architecture such as 80 or 90",
                            asked);
        }
        d.arch = arch < d.arch ? arch : d.arch;
    }
    ND_TRY(pool_new(device, &d.pool));
    cudaError_t error = cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) {
        cudaMemPoolDestroy(d.pool);
        d.pool = nullptr;
        return cuda_error("cuda", "cudaStreamCreateWithFlags", error);
    }
    d.opened = true;
    return ND_OK;
}

nd_status cuda_open(int device) {
    int count = 0;
    ND_TRY(cuda_device_count(&count));
    if (device < 0 || device >= count) {
        return nd_error(ND_EVALUE,
                        "cuda(%d): no such device; this machine has %d (cuda(0) to "
                        "cuda(%d))",
                        device, count, count - 1);
    }
    std::lock_guard<std::mutex> guard(cuda_device(device).lock);
    return open_locked(device);
}

/* The version of the kernel module ("580.65.06"), which CUDA itself cannot tell. */
void driver_release(char *text, size_t size) {
    text[0] = '\0';
    FILE *file = fopen("/sys/module/nvidia/version", "r");
    if (file) {
        if (!fgets(text, (int)size, file)) {
            text[0] = '\0';
        }
        fclose(file);
        text[strcspn(text, "\r\n")] = '\0';
    }
}

nd_status cuda_properties(int device, nd_properties *out) {
    ND_TRY(cuda_enter(device));
    cudaDeviceProp prop;
    int driver = 0, runtime = 0;
    char release[64];
    CUDA_TRY("cuda", cudaGetDeviceProperties(&prop, device));
    CUDA_TRY("cuda", cudaDriverGetVersion(&driver));
    CUDA_TRY("cuda", cudaRuntimeGetVersion(&runtime));
    driver_release(release, sizeof release);
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%.127s", prop.name);
    out->total_bytes = (int64_t)prop.totalGlobalMem;
    out->processors = prop.multiProcessorCount;
    out->arch = prop.major * 10 + prop.minor;
    snprintf(out->detail, sizeof out->detail, "driver %s (CUDA %d.%d), runtime CUDA %d.%d",
             release[0] ? release : "of unknown release", driver / 1000, driver / 10 % 100,
             runtime / 1000, runtime / 10 % 100);
    return ND_OK;
}

} // namespace

/* ---- memory ---------------------------------------------------------------------------------- */
nd_status cuda_pool_malloc(int device, size_t bytes, void **out) {
    Device &d = cuda_device(device);
    cudaError_t error = cudaMallocFromPoolAsync(out, bytes, d.pool, d.stream);
    if (error == cudaErrorMemoryAllocation) {
        /* what was freed lately, but in pieces of other sizes, may be enough */
        cudaGetLastError();
        CUDA_TRY("allocate", cudaStreamSynchronize(d.stream));
        CUDA_TRY("allocate", cudaMemPoolTrimTo(d.pool, 0));
        error = cudaMallocFromPoolAsync(out, bytes, d.pool, d.stream);
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

static nd_status free_scratch(Device &d) {
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
        return cuda_graph_scratch(device, d.recording, bytes, out);
    }
    if (bytes > d.scratch_bytes) {
        /* Stream order keeps the old bytes alive for work already enqueued. */
        ND_TRY(free_scratch(d));
        size_t rounded = ceil_div(bytes, scratch_step) * scratch_step;
        ND_TRY(cuda_pool_malloc(device, rounded, &d.scratch));
        d.scratch_bytes = rounded;
    }
    *out = d.scratch;
    return ND_OK;
}

namespace {

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
    d.live[*out] = {bytes, d.recording};
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
    d.live.erase(found);
    if (bytes.owner) {
        cuda_graph_reuse(bytes.owner, memory, bytes.count);
        return ND_OK;
    }
    if (cuda_is_capturing(device)) {
        cuda_graph_release_later(d.recording, memory);
        return ND_OK;
    }
    cudaError_t error = cudaFreeAsync(memory, d.stream);
    if (error == cudaErrorCudartUnloading) {
        return ND_OK; /* the process is ending and takes everything along */
    }
    return error == cudaSuccess ? ND_OK : cuda_error("release", "cudaFreeAsync", error);
}

nd_status cuda_synchronize(int device) {
    ND_TRY(cuda_enter(device));
    ND_TRY(cuda_refuse_in_capture(device, "synchronize"));
    CUDA_TRY("synchronize", cudaStreamSynchronize(cuda_stream(device)));
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
    Device &d = cuda_device(device);
    ND_TRY(free_scratch(d));
    CUDA_TRY("empty_cache", cudaStreamSynchronize(d.stream));
    CUDA_TRY("empty_cache", cudaMemPoolTrimTo(d.pool, 0));
    return ND_OK;
}

nd_status cuda_reset(int device) {
    if (cuda_faulted()) {
        first_fault();
        char fault[1024];
        snprintf(fault, sizeof fault, "%s", nd_last_error());
        return nd_error(ND_EFATAL,
                        "reset: a CUDA context that has faulted cannot be reset; end this "
                        "process and start again from the last checkpoint. The fault was: "
                        "%s",
                        fault);
    }
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    ND_TRY(cuda_graph_reset(device));
    CUDA_TRY("reset", cudaStreamSynchronize(d.stream));
    for (auto &entry : d.live) {
        CUDA_TRY("reset", cudaFreeAsync(entry.first, d.stream));
    }
    d.live.clear();
    d.live_bytes = d.peak_bytes = 0;
    d.prepared.clear();
    ND_TRY(free_scratch(d));
    ND_TRY(cuda_transfer_reset(device));
    ND_TRY(cuda_matmul_reset(device));
    CUDA_TRY("reset", cudaStreamSynchronize(d.stream));
    CUDA_TRY("reset", cudaMemPoolTrimTo(d.pool, 0));
    CUDA_TRY("reset", cudaMemPoolDestroy(d.pool));
    CUDA_TRY("reset", cudaStreamDestroy(d.stream));
    d.pool = nullptr;
    d.stream = nullptr;
    d.opened = false;
    return open_locked(device);
}

/* ---- the vtable ------------------------------------------------------------------------------ */
#define EW1(name, types, formula)                                \
    nd_status call_##name(int device, const name##_args *args) { \
        Exclusive call;                                          \
        ND_TRY(call.begin(device));                              \
        return cuda_##name(device, args);                        \
    }
#define EW2(name, types, formula) EW1(name, types, formula)
#define CMP(name, formula) EW1(name, , )
#define RED(name, types, start, combine, map) EW1(name, , )
#define ARG(name, better) EW1(name, , )
#define OP(name, operands) EW1(name, , )
#include "../csrc/ops.def"

nd_backend make_backend() {
    nd_backend b;
    memset(&b, 0, sizeof b);
    b.abi = nd_abi();
    b.alignment = 16; /* one load of a vector */
    b.last_error = nd_last_error;
    b.device_count = cuda_device_count;
    b.open = cuda_open;
    b.properties = cuda_properties;
    b.reset = cuda_reset;
    b.allocate = cuda_allocate;
    b.release = cuda_release;
    b.upload = cuda_upload;
    b.download = cuda_download;
    b.download_begin = cuda_download_begin;
    b.download_end = cuda_download_end;
    b.staging_new = cuda_staging_new;
    b.staging_send = cuda_staging_send;
    b.staging_wait = cuda_staging_wait;
    b.staging_free = cuda_staging_free;
    b.synchronize = cuda_synchronize;
    b.memory_stats = cuda_memory_stats;
    b.reset_peak = cuda_reset_peak;
    b.empty_cache = cuda_empty_cache;
    b.event_new = cuda_event_new;
    b.event_record = cuda_event_record;
    b.event_elapsed = cuda_event_elapsed;
    b.event_free = cuda_event_free;
    b.graph_begin = cuda_graph_begin;
    b.graph_capture = cuda_graph_capture;
    b.graph_end = cuda_graph_end;
    b.graph_launch = cuda_graph_launch;
    b.graph_free = cuda_graph_free;
#define EW1(name, types, formula) b.name = call_##name;
#define EW2(name, types, formula) EW1(name, types, formula)
#define CMP(name, formula) EW1(name, , )
#define RED(name, types, start, combine, map) EW1(name, , )
#define ARG(name, better) EW1(name, , )
#define OP(name, operands) EW1(name, , )
#include "../csrc/ops.def"
    return b;
}

} // namespace

extern "C" __attribute__((visibility("default"))) const nd_backend *needle_backend(void) {
    static const nd_backend the = make_backend();
    return &the;
}

/* ---- what the ops use (common.cuh) ----------------------------------------------------------- */
const cuda_limits *cuda_device_limits(int device) { return &cuda_device(device).limits; }

cudaStream_t cuda_stream(int device) { return cuda_device(device).stream; }

int cuda_arch(int device) { return cuda_device(device).arch; }

nd_status cuda_prepare(const char *op, int device, const void *kernel, int threads, size_t shared) {
    Device &d = cuda_device(device);
    auto found = d.prepared.find(kernel);
    if (found != d.prepared.end() && shared <= found->second.count) {
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
    d.prepared[kernel] = {shared, nullptr};
    return ND_OK;
}
