/* device.cuh - a device's state and the way into a call, for the files that fill the vtable beside
 * its ops: memory.cpp, transfer.cpp, event.cpp, graph.cpp, module.cpp and backend.cu. Ops need
 * common.cuh alone.
 *
 * Each function of the vtable that works on a device begins with cuda_enter(device), or with an
 * Exclusive where it changes the state below or enqueues what must not come between an op's calls;
 * when either succeeds the device is open. allocate and release hold the lock alone, and enter
 * where they call CUDA. A function that frees does nothing if cuda_faulted(): the memory goes with
 * the process. Freeing allocates nothing: its bookkeeping was reserved at allocation. A
 * std::bad_alloc of the others becomes ND_EMEMORY in the vtable.
 */
#ifndef NEEDLE_DEVICE_CUH
#define NEEDLE_DEVICE_CUH

#include <mutex>
#include <unordered_map>
#include <vector>

#include "common.cuh"

/* ---- the state ------------------------------------------------------------------------------- */
/* A type of this project's, so that the maps below have hidden visibility like everything here. */
struct Bytes {
    size_t count;
    nd_graph *owner = nullptr; /* the graph whose block it is */
    bool late = false;         /* released while recording: the graph's when that ends */
    void *memory = nullptr;    /* of an idle block: its address ... */
    Bytes *next = nullptr;     /* ... and the next one in its list */
};

struct Scratch {
    void *memory = nullptr;
    size_t bytes = 0;
};

/* to[c] += the sum over r of partial[r * columns + c]. */
struct ColumnSum {
    const float *partial;
    int64_t rows, columns;
    float *to;
};
constexpr int most_sums = 8;
struct ColumnSums {
    ColumnSum sums[most_sums];
    int count;
};

struct Prepared {
    size_t shared; /* dynamic shared memory allowed */
    bool overlaps; /* it begins with await_previous(), not with nothing in its place */
};

constexpr int cuda_max_devices = 64;

struct Device {
    std::mutex lock;
    bool opened = false;
    cudaStream_t stream = nullptr, side_stream = nullptr;
    cudaMemPool_t pool = nullptr;
    cuda_limits limits = {};
    int arch = 0;             /* limits.arch, or NEEDLE_ARCH when that is less */
    bool reads_pages = false; /* copies may read pageable host memory after the call returns */
    Scratch scratch;
    ColumnSums held = {};            /* to be added: column_sums.cu */
    size_t held_bytes = 0;           /* their part of scratch, from its start */
    const char *used_scratch = NULL; /* the start of what cuda_scratch last gave a part of */
    int64_t live_bytes = 0, peak_bytes = 0;
    std::unordered_map<void *, Bytes> blocks; /* of arrays, and idle ones */
    Bytes *idle[64] = {};                     /* lists of idle blocks, by a hash of their size */
    size_t idle_bytes = 0;
    nd_async_copy *idle_copies = nullptr; /* to be used again: the first, which knows the next */
    std::vector<nd_graph *> graphs;
    std::vector<nd_module *> modules;
    nd_graph *recording = nullptr;                       /* between graph_begin and graph_end */
    std::unordered_map<const void *, Prepared> prepared; /* kernels that were launched */
#ifdef NEEDLE_DEBUG
    nd_operands operands = {};        /* of the op that runs */
    nd_operands *published = nullptr; /* the same on the device */
#endif
};

/* ---- entering a call (device.cpp) ------------------------------------------------------------ */
bool cuda_faulted(void);
nd_status cuda_first_fault(void); /* ND_EFATAL, with its message */

/* Refuse after a fault and before open(), make the device current, clear errors of other users of
 * the runtime in this thread. */
nd_status cuda_enter(int device);

/* The same for work that must be enqueued alone; the lock lasts as long as the object. */
struct Exclusive {
    std::mutex *lock = nullptr;
    Exclusive() = default;
    Exclusive(const Exclusive &) = delete;
    Exclusive &operator=(const Exclusive &) = delete;
    ~Exclusive() {
        if (lock) {
            lock->unlock();
        }
    }
    void hold(int device); /* the lock alone, for work without calls of CUDA */
    nd_status begin(int device);
};

Device &cuda_device(int device);

/* ---- memory.cpp (contracts in backend.h) ----------------------------------------------------- */
nd_status cuda_allocate(int device, size_t bytes, void **out);
nd_status cuda_release(int device, void *memory);
nd_status cuda_memory_stats(int device, nd_memory_stats *out);
nd_status cuda_reset_peak(int device);
nd_status cuda_empty_cache(int device);
/* Under the device's lock. */
nd_status cuda_free_scratch(Device &d, Scratch &scratch);
nd_status cuda_free_idle(Device &d);

/* ---- column_sums.cu -------------------------------------------------------------------------- */
nd_status cuda_hold_sums(int device, bool hold); /* contract in backend.h */
nd_status cuda_add_held_sums(int device);        /* under the device's lock */

/* ---- module.cpp (contracts in backend.h) ----------------------------------------------------- */
nd_status cuda_launch_limits(int device, nd_launch_limits *out);
nd_status cuda_module_load(int device, const void *code, nd_module **out);
nd_status cuda_module_kernel(int device, nd_module *module, const char *symbol, nd_kernel **out);
nd_status cuda_module_unload(int device, nd_module *module);
nd_status cuda_kernel_launch(int device, nd_kernel *kernel, const nd_launch *launch);
nd_status cuda_kernel_blocks(int device, nd_kernel *kernel, int threads, uint32_t shared, int *out);
/* reset(): unload every module of the device. Under its lock, with nothing enqueued. */
nd_status cuda_module_reset(int device);

/* ---- transfer.cpp and event.cpp (contracts in backend.h) ------------------------------------- */
nd_status cuda_upload(int device, void *to, const void *from_host, size_t bytes);
nd_status cuda_download(int device, void *to_host, const void *from, size_t bytes);
nd_status cuda_async_copy_begin(int device, const void *from, size_t bytes, nd_async_copy **out);
nd_status cuda_async_copy_end(int device, nd_async_copy *copy, void *to_host);
nd_status cuda_pinned_buffer_new(int device, size_t bytes, nd_pinned_buffer **out, void **memory);
nd_status cuda_pinned_buffer_send(int device, nd_pinned_buffer *buffer, void *to, size_t bytes);
nd_status cuda_pinned_buffer_wait(int device, nd_pinned_buffer *buffer);
nd_status cuda_pinned_buffer_free(int device, nd_pinned_buffer *buffer);
/* reset(): free the blocks of finished copies to the host. Under the device's lock. */
nd_status cuda_transfer_reset(int device);

nd_status cuda_event_new(int device, nd_event **out);
nd_status cuda_event_record(int device, nd_event *event, bool side);
nd_status cuda_event_wait(int device, nd_event *event, bool side);
nd_status cuda_event_query(int device, nd_event *event, bool *done);
nd_status cuda_event_elapsed(int device, nd_event *from, nd_event *to, double *milliseconds);
nd_status cuda_event_free(int device, nd_event *event);

#endif
