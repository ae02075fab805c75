/* checks.cu - the host's side of checks.cuh: the record of a fault, and the operands of an op. */
#include <mutex>
#include <stdio.h>
#include <string.h>
#include <vector>

#include "device.cuh"

namespace {

needle_fault *record; /* never freed: it is read after the context is lost */
std::mutex record_lock;

} // namespace

nd_status cuda_fault_record(const char *op, needle_fault **out) {
    std::lock_guard<std::mutex> guard(record_lock);
    if (!record) {
        void *memory;
        CUDA_TRY(op, cudaHostAlloc(&memory, sizeof *record, cudaHostAllocPortable));
        memset(memory, 0, sizeof *record);
        record = (needle_fault *)memory;
    }
    *out = record;
    return ND_OK;
}

void cuda_fault_text(char *text, size_t size) {
    std::lock_guard<std::mutex> guard(record_lock);
    text[0] = '\0';
    if (!record || !record->found) {
        return;
    }
    const needle_fault f = *record;
    char index[64] = "", line[96] = "";
    if (f.from_data) {
        snprintf(index, sizeof index, ": index %lld", f.index);
    }
    if (f.line > 0) {
        snprintf(line, sizeof line, "; %.63s:%d", f.file, f.line);
    }
    snprintf(text, size,
             ": %.23s: element %lld%s is outside of %lld (block %u,%u,%u, thread %u,%u,%u%s)",
             f.operand, f.element, index, f.bound, f.block[0], f.block[1], f.block[2], f.thread[0],
             f.thread[1], f.thread[2], line);
}

#ifdef NEEDLE_DEBUG

namespace {

std::vector<const void *> &symbols() {
    static std::vector<const void *> the;
    return the;
}

__global__ void publish_kernel(nd_operands operands, nd_operands *to) {
    await_previous();
    *to = operands;
}

} // namespace

bool cuda_register_checks(const void *symbol) {
    symbols().push_back(symbol);
    return true;
}

nd_status cuda_connect_checks(nd_operands **device_copy) {
    nd_checks checks = {};
    void *memory;
    ND_TRY(cuda_fault_record("cuda", &checks.fault));
    CUDA_TRY("cuda", cudaMalloc(&memory, sizeof **device_copy));
    *device_copy = (nd_operands *)memory;
    checks.operands = *device_copy;
    for (const void *symbol : symbols()) {
        CUDA_TRY("cuda", cudaMemcpyToSymbol(symbol, &checks, sizeof checks));
    }
    return ND_OK;
}

void cuda_note_range(nd_operands *operands, const char *name, const void *memory, size_t bytes) {
    nd_operand *one = &operands->list[operands->count++];
    snprintf(one->name, sizeof one->name, "%s", name);
    one->low = (uintptr_t)memory;
    one->high = one->low + bytes;
    one->size = 1;
}

void cuda_note_operand(nd_operands *operands, const char *name, const nd_array *array) {
    uintptr_t low, high;
    if (array && nd_byte_range(array, &low, &high)) {
        cuda_note_range(operands, name, (const void *)low, high - low);
        operands->list[operands->count - 1].size = (int64_t)nd_dtype_size(array->dtype);
    }
}

nd_status cuda_publish_operands(const nd_operands &operands, nd_operands *device_copy,
                                cudaStream_t stream) {
    void *arguments[] = {(void *)&operands, &device_copy};
    CUDA_TRY("operands",
             cudaLaunchKernel((const void *)publish_kernel, 1, 1, arguments, 0, stream));
    return ND_OK;
}

#endif
