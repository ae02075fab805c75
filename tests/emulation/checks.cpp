/* checks.cpp - the checks of a debug build on the CPU: what is inside, and the message of what is not. */
#define NEEDLE_DEBUG 1
#include <stdexcept>

inline unsigned atomicInc(unsigned *counter, unsigned last); /* emulated.h */
static bool __isGlobal(const void *) { return true; }
static void __nanosleep(unsigned) {}
static void __threadfence_system() {}
static void __trap() { throw std::runtime_error("trap"); }

#include "emulated.h"

#include "checks.cu"

#include "host.h"

static needle_fault memory;
extern "C" cudaError_t cudaHostAlloc(void **out, size_t, unsigned) {
    *out = &memory;
    return cudaSuccess;
}
extern "C" cudaError_t cudaMalloc(void **out, size_t bytes) {
    *out = malloc(bytes);
    return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t,
                                          cudaMemcpyKind) {
    memcpy(const_cast<void *>(symbol), from, bytes);
    return cudaSuccess;
}
extern "C" cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **arguments, size_t,
                                        cudaStream_t) {
    publish_kernel(*(nd_operands *)arguments[0], *(nd_operands **)arguments[1]);
    return cudaSuccess;
}
bool nd_byte_range(const nd_array *a, uintptr_t *low, uintptr_t *high) {
    *low = (uintptr_t)a->data;
    *high = *low + (uintptr_t)a->shape[0] * 4;
    return a->shape[0] > 0;
}

/* x has 8 floats, y has 4 after it; which access of which element. Empty where it is inside. */
extern "C" const char *access(int which, int element) {
    alignas(16) static float all[64];
    static char text[320];
    nd_array x = {}, y = {}, none = {};
    x.data = all + 16, x.shape[0] = 8;
    y.data = all + 40, y.shape[0] = 4;
    none.data = all;
    nd_operands operands = {}, *copy;
    memory = needle_fault();
    cuda_note_operand(&operands, "x", &x);
    cuda_note_operand(&operands, "absent", nullptr);
    cuda_note_operand(&operands, "none", &none);
    cuda_note_operand(&operands, "y", &y);
    cuda_connect_checks(&copy);
    cuda_publish_operands(operands, copy, nullptr);
    blockIdx = {2, 1, 0};
    threadIdx = {5, 0, 0};
    const float *from = (const float *)x.data;
    try {
        switch (which) {
        case 0:
            return checked(from + element), "";
        case 1:
            return load16(from + element), "";
        case 2:
            return load_as<float>(from, element, ND_F32), "";
        case 3:
            return store_as<float>((void *)from, element, ND_F32, 1.0f), "";
        case 4:
            return store16((float *)from + element, Vec<float>()), "";
        default:
            ND_CHECK_INDEX("ids", 17, element, 8);
            return "";
        }
    } catch (const std::runtime_error &) {
        cuda_fault_text(text, sizeof text);
        free(copy);
        return text;
    }
}
