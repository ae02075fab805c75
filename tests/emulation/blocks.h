/* blocks.h - launches of whole blocks on the CPU, and copies beside them (cp.async). SHARED is the
 * kernel's shared memory. */
#pragma once
#include "emulated.h"

/* Of a thread by groups, the last one open. They arrive at once, or when they are waited for. */
static std::map<unsigned, std::deque<std::vector<std::function<void()>>>> copies;

uint32_t shared_address(const void *pointer) {
    return emulated::BASE + (uint32_t)((const char *)pointer - (const char *)SHARED);
}
void copy_async16(uint32_t to, const void *from, bool inside) {
    to -= emulated::BASE;
    if (to % 16 || (uintptr_t)from % 16 || to + 16 > sizeof SHARED) {
        emulated::fail("a copy that does not begin at 16 bytes, or outside of shared memory");
        return;
    }
    auto copy = [=] {
        const char zeros[16] = {};
        memcpy((char *)SHARED + to, inside ? from : zeros, 16);
    };
    auto &groups = copies[threadIdx.x];
    groups.resize(groups.empty() ? 1 : groups.size());
    emulated::chance() % 2 ? copy() : groups.back().push_back(copy);
}
void copy_async_commit() {
    auto &groups = copies[threadIdx.x];
    groups.resize(groups.empty() ? 2 : groups.size() + 1);
}
template <int pending> void copy_async_wait() {
    auto &groups = copies[threadIdx.x];
    for (; groups.size() > pending + 1; groups.pop_front()) {
        for (auto &copy : groups.front()) {
            copy();
        }
    }
}

template <class... A>
nd_status run_blocks(const char *op, int, void (*kernel)(A...), unsigned blocks, int threads,
                     size_t, std::enable_if_t<true, A>... arguments) {
    emulated::of_block = (unsigned char *)SHARED;
    emulated::kernel_body = [&] { kernel(arguments...); };
    return emulated::run_grid(op, blocks, threads, [] {
        memset(SHARED, 0xff, sizeof SHARED);
        copies.clear();
    });
}

#define cuda_launch run_blocks
