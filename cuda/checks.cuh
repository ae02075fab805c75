/* checks.cuh - bounds checked on the device, and the message that outlives the context.
 *
 * The first index out of bounds is written into a needle_fault, in pinned host memory, and the
 * kernel traps; cuda_error() adds it to the message of the fault. (The driver may drop what a
 * kernel printed before a trap.)
 *
 * needle's kernels do so in a debug build (NEEDLE_DEBUG=1); in others the macros are empty. An
 * address in global memory must lie in an operand or the scratch of the op that runs (checked,
 * load16, store16, load_as, store_as, copy_async); an index that comes from data is compared with
 * its own bound (ND_CHECK_INDEX). Boxes of the copy engine are bounded by their tensor map; kernels
 * of cuBLASLt and CUB are not checked. Kernels that take registers from each other (setmaxnreg) may
 * call no function: they have ND_CHECK_INDEX alone.
 */
#ifndef NEEDLE_CHECKS_CUH
#define NEEDLE_CHECKS_CUH

#include <cuda_runtime.h>

#include "../csrc/backend.h"

struct needle_fault {
    int found;     /* the rest is written */
    int line;      /* of file; 0: unknown */
    int from_data; /* element is where the index was read, else the index itself */
    unsigned block[3], thread[3];
    long long element, index, bound;
    char operand[24], file[64];
};

/* The record of this process, on any device at the same address. */
nd_status cuda_fault_record(const char *op, needle_fault **out);
/* Text of the fault: ": ids: element 17: index 60000 is outside of 50304 (block ..)", or
 * nothing. */
void cuda_fault_text(char *text, size_t size);

#ifdef NEEDLE_DEBUG

/* The operands of the op that runs; its scratch is the last of them. */
struct nd_operand {
    char name[16];
    uintptr_t low, high;
    int64_t size; /* of an element, in bytes */
};
struct nd_operands {
    int count;
    nd_operand list[26];
};
struct nd_checks {
    needle_fault *fault;
    const nd_operands *operands;
    unsigned taken;
};

/* Note the checks of a file of kernels, which open() connects (static initialisers call it). */
bool cuda_register_checks(const void *symbol);
nd_status cuda_connect_checks(nd_operands **device_copy);
void cuda_note_operand(nd_operands *operands, const char *name, const nd_array *array);
void cuda_note_range(nd_operands *operands, const char *name, const void *memory, size_t bytes);
/* Enqueue a copy of the operands to the device, also into a graph that is captured. */
nd_status cuda_publish_operands(const nd_operands &operands, nd_operands *device_copy,
                                cudaStream_t stream);

#define ND_HERE , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define ND_TAKEN , const char *file, int line
#define ND_PASS , file, line
#define ND_CHECK(pointer, bytes) nd_check_address(pointer, bytes, file, line)
#define ND_CHECK_INDEX(operand, element, index, bound)                                 \
    do {                                                                               \
        const long long nd_index_ = (index), nd_bound_ = (bound);                      \
        if (nd_index_ < 0 || nd_index_ >= nd_bound_) {                                 \
            nd_fail(operand, element, true, nd_index_, nd_bound_, __FILE__, __LINE__); \
        }                                                                              \
    } while (0)

#ifdef __CUDACC__
namespace {
__device__ nd_checks checks;
[[maybe_unused]] const bool checks_registered = cuda_register_checks((const void *)&checks);
} // namespace

__device__ __forceinline__ void nd_copy_text(char *to, const char *from, int size) {
    for (int i = 0; i < size - 1 && from[i]; i++) {
        to[i] = from[i];
    }
}

/* The first thread writes and traps; the others wait for that end, but not for ever. */
__device__ __forceinline__ void nd_fail(const char *operand, long long element, bool from_data,
                                        long long index, long long bound, const char *file,
                                        int line) {
    needle_fault *fault = checks.fault;
    if (atomicInc(&checks.taken, 0xffffffffu) != 0) {
        for (int i = 0; i < 100000; i++) {
            __nanosleep(1000);
        }
        __trap();
    }
    fault->line = line;
    fault->from_data = from_data;
    fault->block[0] = blockIdx.x, fault->block[1] = blockIdx.y, fault->block[2] = blockIdx.z;
    fault->thread[0] = threadIdx.x, fault->thread[1] = threadIdx.y, fault->thread[2] = threadIdx.z;
    fault->element = element;
    fault->index = index;
    fault->bound = bound;
    nd_copy_text(fault->operand, operand, sizeof fault->operand);
    nd_copy_text(fault->file, file, sizeof fault->file);
    __threadfence_system();
    fault->found = 1;
    __threadfence_system();
    __trap();
}

/* The message names the operand that is nearest. */
__device__ __noinline__ inline void nd_check_address(const void *pointer, int bytes,
                                                     const char *file, int line) {
    const uintptr_t first = (uintptr_t)pointer, end = first + bytes;
    if (bytes == 0 || !__isGlobal(pointer)) {
        return;
    }
    const nd_operands &known = *checks.operands;
    const nd_operand *nearest = nullptr;
    uintptr_t least = UINTPTR_MAX;
    for (int i = 0; i < known.count; i++) {
        const nd_operand &one = known.list[i];
        if (first >= one.low && end <= one.high) {
            return;
        }
        const uintptr_t away = first < one.low ? one.low - first : end - one.high;
        if (away < least) {
            nearest = &one;
            least = away;
        }
    }
    if (nearest) {
        const int64_t size = nearest->size;
        const int64_t element = first < nearest->low
                                    ? -(int64_t)((nearest->low - first + size - 1) / size)
                                    : (int64_t)((end - 1 - nearest->low) / size);
        nd_fail(nearest->name, element, false, element, (nearest->high - nearest->low) / size, file,
                line);
    }
}
#endif

#else
#define ND_HERE
#define ND_TAKEN
#define ND_PASS
#define ND_CHECK(pointer, bytes)
#define ND_CHECK_INDEX(operand, element, index, bound)
#endif

#ifdef __CUDACC__
/* *p, where p points into an operand: checked(x + i) for x[i]. */
template <class T> __device__ __forceinline__ T &checked(T *p ND_HERE) {
    ND_CHECK(p, (int)sizeof(T));
    return *p;
}
#endif

#endif
