/* module.cpp - kernels of the user's own: machine code loaded, looked up, launched, unloaded.
 *
 * A module is a library of the runtime. A kernel lives as long as its module; the shared memory
 * that it may use beyond the 48 KiB that every kernel has is asked for when a launch first needs
 * it. Unloading while a graph is captured, when nothing may be waited for, is put off until the
 * next module is unloaded.
 */
#include <new>

#include "device.cuh"
#include "graph.cuh"

struct nd_kernel {
    cudaKernel_t handle;
    nd_kernel *next;
    size_t fixed_shared; /* static */
    size_t open_shared;  /* dynamic that a launch may have */
};

struct nd_module {
    cudaLibrary_t library;
    nd_kernel *kernels;
    bool leaving; /* to be unloaded */
};

namespace {

constexpr size_t every_kernel_shared = 48 * 1024;

nd_status unload(nd_module *module) {
    cudaError_t error = cudaLibraryUnload(module->library);
    while (module->kernels) {
        nd_kernel *kernel = module->kernels;
        module->kernels = kernel->next;
        delete kernel;
    }
    delete module;
    if (error != cudaSuccess && error != cudaErrorCudartUnloading) {
        return cuda_error("module", "cudaLibraryUnload", error);
    }
    return ND_OK;
}

/* Those whose time has come, under the device's lock and with nothing enqueued. */
nd_status unload_leaving(Device &d, bool all) {
    nd_status status = ND_OK;
    size_t kept = 0;
    for (nd_module *module : d.modules) {
        if (all || module->leaving) {
            nd_status one = unload(module);
            status = status == ND_OK ? one : status;
        } else {
            d.modules[kept++] = module;
        }
    }
    d.modules.resize(kept);
    return status;
}

nd_status open_shared(const char *name, nd_kernel *kernel, uint32_t bytes) {
    if (bytes > kernel->open_shared) {
        CUDA_TRY(name,
                 cudaFuncSetAttribute((const void *)kernel->handle,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        kernel->open_shared = bytes;
    }
    return ND_OK;
}

} // namespace

nd_status cuda_launch_limits(int device, nd_launch_limits *out) {
    ND_TRY(cuda_enter(device));
    const struct {
        cudaDeviceAttr attribute;
        int *to;
    } asked[] = {
        {cudaDevAttrMultiProcessorCount, &out->processors},
        {cudaDevAttrMaxThreadsPerMultiProcessor, &out->sm_threads},
        {cudaDevAttrMaxRegistersPerBlock, &out->block_registers},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, &out->block_shared},
    };
    for (const auto &one : asked) {
        CUDA_TRY("launch_limits", cudaDeviceGetAttribute(one.to, one.attribute, device));
    }
    size_t free_bytes = 0, total = 0;
    CUDA_TRY("launch_limits", cudaMemGetInfo(&free_bytes, &total));
    out->free_bytes = (int64_t)free_bytes;
    out->arch = cuda_device_limits(device)->arch;
    return ND_OK;
}

nd_status cuda_module_load(int device, const void *code, nd_module **out) {
    *out = nullptr;
    Exclusive call;
    ND_TRY(call.begin(device));
    Device &d = cuda_device(device);
    d.modules.reserve(d.modules.size() + 1); /* nothing may fail once the library is loaded */
    nd_module *module = new (std::nothrow) nd_module{nullptr, nullptr, false};
    if (!module) {
        return nd_error(ND_EMEMORY, "module: out of host memory");
    }
    cudaError_t error =
        cudaLibraryLoadData(&module->library, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (error != cudaSuccess) {
        delete module;
        return cuda_error("module", "cudaLibraryLoadData", error);
    }
    d.modules.push_back(module);
    *out = module;
    return ND_OK;
}

nd_status cuda_module_kernel(int device, nd_module *module, const char *symbol, nd_kernel **out) {
    *out = nullptr;
    Exclusive call;
    ND_TRY(call.begin(device));
    cudaKernel_t handle;
    CUDA_TRY(symbol, cudaLibraryGetKernel(&handle, module->library, symbol));
    /* Asking for it also brings it onto the device, which a launch that is captured could not. */
    cudaFuncAttributes attributes;
    CUDA_TRY(symbol, cudaFuncGetAttributes(&attributes, (const void *)handle));
    nd_kernel *kernel =
        new (std::nothrow) nd_kernel{handle, module->kernels, attributes.sharedSizeBytes, 0};
    if (!kernel) {
        return nd_error(ND_EMEMORY, "module: out of host memory");
    }
    if (kernel->fixed_shared < every_kernel_shared) {
        kernel->open_shared = every_kernel_shared - kernel->fixed_shared;
    }
    module->kernels = *out = kernel;
    return ND_OK;
}

nd_status cuda_kernel_launch(int device, nd_kernel *kernel, const nd_launch *launch) {
    Exclusive call;
    ND_TRY(call.begin(device));
    ND_TRY(open_shared(launch->name, kernel, launch->shared));
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
    config.blockDim = dim3(launch->block[0], launch->block[1], launch->block[2]);
    config.dynamicSmemBytes = launch->shared;
    config.stream = cuda_stream(device);
    config.attrs = attributes;
    if (launch->has_cluster) {
        cudaLaunchAttribute *cluster = &attributes[config.numAttrs++];
        cluster->id = cudaLaunchAttributeClusterDimension;
        cluster->val.clusterDim.x = launch->cluster[0];
        cluster->val.clusterDim.y = launch->cluster[1];
        cluster->val.clusterDim.z = launch->cluster[2];
    }
    if (launch->cooperative) {
        cudaLaunchAttribute *cooperative = &attributes[config.numAttrs++];
        cooperative->id = cudaLaunchAttributeCooperative;
        cooperative->val.cooperative = 1;
    }
    CUDA_TRY(launch->name,
             cudaLaunchKernelExC(&config, (const void *)kernel->handle, launch->arguments));
    return ND_OK;
}

nd_status cuda_kernel_blocks(int device, nd_kernel *kernel, int threads, uint32_t shared,
                             int *out) {
    Exclusive call;
    ND_TRY(call.begin(device));
    ND_TRY(open_shared("occupancy", kernel, shared));
    CUDA_TRY("occupancy", cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                              out, (const void *)kernel->handle, threads, shared));
    return ND_OK;
}

nd_status cuda_module_unload(int device, nd_module *module) {
    if (cuda_faulted()) {
        return ND_OK; /* it goes with the process */
    }
    Exclusive call;
    ND_TRY(call.begin(device));
    module->leaving = true;
    if (cuda_is_recording(device)) {
        return ND_OK;
    }
    CUDA_TRY("module", cudaStreamSynchronize(cuda_stream(device)));
    return unload_leaving(cuda_device(device), false);
}

nd_status cuda_module_reset(int device) { return unload_leaving(cuda_device(device), true); }
