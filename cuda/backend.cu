/* backend.cu - devices of the CUDA backend, opening, reset, and the vtable.
 *
 * Threads. A device's ops are enqueued one at a time, under its lock, because they share scratch
 * and the order of enqueuing is the order of results. Copies and waits do not hold it.
 * reset() must not run while another thread uses the device.
 */
#include <mutex>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.cuh"
#include "graph.cuh"

namespace {

/* ---- devices --------------------------------------------------------------------------------- */
__global__ void probe_kernel() { await_previous(); }

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
        return cuda_first_fault();
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
    found = found < cuda_max_devices ? found : cuda_max_devices;
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
    int lowest = 0, highest = 0;
    cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    /* First wherever a multiprocessor becomes free: a rank that is late holds up another one. */
    if (error == cudaSuccess &&
        (error = cudaStreamCreateWithPriority(&d.side_stream, cudaStreamNonBlocking, highest)) !=
            cudaSuccess) {
        cudaStreamDestroy(d.stream);
    }
    if (error != cudaSuccess) {
        cudaMemPoolDestroy(d.pool);
        d.pool = nullptr;
        return cuda_error("cuda", "cudaStreamCreate", error);
    }
#ifdef NEEDLE_DEBUG
    ND_TRY(cuda_connect_checks(&d.published));
#endif
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
    cuda_products(prop.name, out);
    const unsigned char *id = (const unsigned char *)prop.uuid.bytes;
    size_t used = (size_t)snprintf(out->uuid, sizeof out->uuid, "GPU");
    for (int i = 0; i < 16; i++) {
        bool first = i == 0 || i == 4 || i == 6 || i == 8 || i == 10; /* of a group */
        used += (size_t)snprintf(out->uuid + used, sizeof out->uuid - used, "%s%02x",
                                 first ? "-" : "", id[i]);
    }
    return ND_OK;
}

nd_status cuda_synchronize(int device) {
    ND_TRY(cuda_enter(device));
    ND_TRY(cuda_refuse_in_capture(device, "synchronize"));
    CUDA_TRY("synchronize", cudaStreamSynchronize(cuda_stream(device)));
    return ND_OK;
}

nd_status cuda_stream_handle(int device, bool side, void **out) {
    ND_TRY(cuda_enter(device));
    *out = cuda_stream(device, side);
    return ND_OK;
}

nd_status cuda_reset(int device) {
    if (cuda_faulted()) {
        cuda_first_fault();
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
    CUDA_TRY("reset", cudaStreamSynchronize(d.side_stream));
    CUDA_TRY("reset", cudaStreamSynchronize(d.stream));
    ND_TRY(cuda_module_reset(device));
    ND_TRY(cuda_free_idle(d));
    for (auto &entry : d.blocks) {
        CUDA_TRY("reset", cudaFreeAsync(entry.first, d.stream));
    }
    d.blocks.clear();
    d.live_bytes = d.peak_bytes = 0;
    d.prepared.clear();
    ND_TRY(cuda_free_scratch(d, d.scratch));
    ND_TRY(cuda_transfer_reset(device));
    ND_TRY(cuda_matmul_reset(device));
    CUDA_TRY("reset", cudaStreamSynchronize(d.stream));
    CUDA_TRY("reset", cudaMemPoolTrimTo(d.pool, 0));
    CUDA_TRY("reset", cudaMemPoolDestroy(d.pool));
    CUDA_TRY("reset", cudaStreamDestroy(d.stream));
    CUDA_TRY("reset", cudaStreamDestroy(d.side_stream));
    d.pool = nullptr;
    d.stream = d.side_stream = nullptr;
    d.opened = false;
    return open_locked(device);
}

/* ---- the vtable ------------------------------------------------------------------------------ */
#ifdef NEEDLE_DEBUG
#define NOTE(field) cuda_note_operand(operands, #field, a->field);
#define NOTES(name, ...) \
    void note(nd_operands *operands, const name##_args *a) { __VA_ARGS__ }
#define EW1(name, types, formula) NOTES(name, NOTE(x) NOTE(out))
#define EW2(name, types, formula) NOTES(name, NOTE(x) NOTE(y) NOTE(out))
#define CMP(name, formula) EW2(name, , )
#define RED(name, types, start, combine, map) EW1(name, , )
#define ARG(name, better) EW1(name, , )
#define OP(name, operands) NOTES(name, operands)
#define OPERAND(kind, field, axes, dtype) NOTE(field)
#define F64(field)
#define I64(field)
#include "../csrc/ops.def"
#define NOTE_OPERANDS(device, args)         \
    cuda_device(device).operands.count = 0; \
    note(&cuda_device(device).operands, args);
#else
#define NOTE_OPERANDS(device, args)
#endif

#define EACH_OP(name)                                            \
    nd_status call_##name(int device, const name##_args *args) { \
        Exclusive call;                                          \
        ND_TRY(call.begin(device));                              \
        NOTE_OPERANDS(device, args)                              \
        return cuda_##name(device, args);                        \
    }
#include "../csrc/ops.def"

/* A function of the vtable, out of which no exception comes. */
template <auto function> struct Guarded;
template <class... Args, nd_status (*function)(Args...)> struct Guarded<function> {
    static nd_status call(Args... args) {
        try {
            return function(args...);
        } catch (const std::bad_alloc &) {
            return nd_error(ND_EMEMORY, "cuda: out of host memory");
        }
    }
};

nd_backend make_backend() {
    nd_backend b;
    memset(&b, 0, sizeof b);
    b.abi = nd_abi();
    b.alignment = 16; /* one load of a vector */
    b.last_error = nd_last_error;
    b.device_count = Guarded<cuda_device_count>::call;
    b.open = Guarded<cuda_open>::call;
    b.properties = Guarded<cuda_properties>::call;
    b.reset = Guarded<cuda_reset>::call;
    b.allocate = Guarded<cuda_allocate>::call;
    b.release = Guarded<cuda_release>::call;
    b.upload = Guarded<cuda_upload>::call;
    b.download = Guarded<cuda_download>::call;
    b.async_copy_begin = Guarded<cuda_async_copy_begin>::call;
    b.async_copy_end = Guarded<cuda_async_copy_end>::call;
    b.pinned_buffer_new = Guarded<cuda_pinned_buffer_new>::call;
    b.pinned_buffer_send = Guarded<cuda_pinned_buffer_send>::call;
    b.pinned_buffer_wait = Guarded<cuda_pinned_buffer_wait>::call;
    b.pinned_buffer_free = Guarded<cuda_pinned_buffer_free>::call;
    b.synchronize = Guarded<cuda_synchronize>::call;
    b.stream = Guarded<cuda_stream_handle>::call;
    b.memory_stats = Guarded<cuda_memory_stats>::call;
    b.reset_peak = Guarded<cuda_reset_peak>::call;
    b.empty_cache = Guarded<cuda_empty_cache>::call;
    b.hold_sums = Guarded<cuda_hold_sums>::call;
    b.event_new = Guarded<cuda_event_new>::call;
    b.event_record = Guarded<cuda_event_record>::call;
    b.event_wait = Guarded<cuda_event_wait>::call;
    b.event_query = Guarded<cuda_event_query>::call;
    b.event_elapsed = Guarded<cuda_event_elapsed>::call;
    b.event_free = Guarded<cuda_event_free>::call;
    b.graph_begin = Guarded<cuda_graph_begin>::call;
    b.graph_end = Guarded<cuda_graph_end>::call;
    b.graph_launch = Guarded<cuda_graph_launch>::call;
    b.graph_free = Guarded<cuda_graph_free>::call;
    b.launch_limits = Guarded<cuda_launch_limits>::call;
    b.module_load = Guarded<cuda_module_load>::call;
    b.module_kernel = Guarded<cuda_module_kernel>::call;
    b.module_unload = Guarded<cuda_module_unload>::call;
    b.kernel_launch = Guarded<cuda_kernel_launch>::call;
    b.kernel_blocks = Guarded<cuda_kernel_blocks>::call;
#define EACH_OP(name) b.name = Guarded<call_##name>::call;
#include "../csrc/ops.def"
    return b;
}

} // namespace

extern "C" __attribute__((visibility("default"))) const nd_backend *needle_backend(void) {
    static const nd_backend the = make_backend();
    return &the;
}
