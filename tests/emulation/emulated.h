/* emulated.h - one GPU block on the CPU: what the Hopper kernels use of the hardware, so that their logic
 * (barriers, phases, who reads what when, swizzles, fragments) is tried where no GPU is.
 *
 * A kernel's source is compiled as C++ after this header, which takes the place of mma.cuh and hopper.cuh.
 * Threads are fibers, resumed in turns from a random one on, and those of a warp that is slow for a
 * while seldom; a block ends, or is seen to wait for ever.
 * Whatever the hardware may do late is done late: boxes arrive after some turns, products are
 * computed when they are waited for and read shared memory then, stores read it when they are waited
 * for. Shared memory is NaN before, and so are sums whose product is under way.
 *
 * Not emulated: time, the register file, the caches, other blocks at once. Blocks run one by one.
 */
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "formula.h" /* as the CPU has it */

#define __CUDACC__ 1
#undef __device__
#undef __global__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#undef __align__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;

namespace emulated {

/* ---- fibers ------------------------------------------------------------------------------------ */
constexpr size_t STACK = 96 << 10;
constexpr int SLOW_ROUNDS = 100;
struct Fiber {
    ucontext_t context; /* where it begins ... */
    jmp_buf place;      /* ... and goes on: swapcontext would ask the kernel for signals each time */
    bool begun, done;
    bool (*ready)(void *); /* of what it waits for; NULL: it does not wait */
    void *condition;
};
inline std::vector<Fiber> fibers;
inline std::vector<char> stacks; /* of all fibers, and of those of the next block */
inline jmp_buf scheduler;
inline int current;
inline long progress; /* anything that another fiber may have waited for */
inline std::mt19937 chance;
inline std::function<void()> kernel_body;
inline const char *failure;

inline void fail(const char *what) {
    failure = failure ? failure : what;
    progress++;
}

inline void yield() {
    if (!_setjmp(fibers[current].place)) {
        _longjmp(scheduler, 1);
    }
}

inline void go_on(Fiber &fiber) { /* until it yields */
    if (_setjmp(scheduler)) {
        return;
    }
    if (fiber.begun) {
        _longjmp(fiber.place, 1);
    }
    fiber.begun = true;
    setcontext(&fiber.context);
}

/* The scheduler asks for the condition, where the fiber would: a switch takes far longer. */
template <class F> void wait_until(F condition) {
    if (!condition() && !failure) {
        Fiber &mine = fibers[current];
        mine.ready = [](void *asked) { return (*(F *)asked)(); };
        mine.condition = &condition;
        yield();
        mine.ready = NULL;
    }
    if (failure) { /* no thread goes on */
        fibers[current].done = true;
        yield();
    }
    progress++;
}

/* ---- what is done late --------------------------------------------------------------------------- */
struct Late {
    int turns;
    std::function<void()> run;
};
inline std::deque<Late> late;

struct Barrier {
    int arrivals, missing;
    long bytes;
    uint32_t phase;
    void settle() {
        if (missing == 0 && bytes == 0) {
            phase ^= 1;
            missing = arrivals;
            progress++;
        }
    }
};
inline std::map<uint32_t, Barrier> barriers;
struct Meeting { /* __syncthreads, bar.sync */
    int there;
    long round;
};
inline Meeting meetings[17];

inline void meet(int number, int threads, bool waits) {
    Meeting &m = meetings[number];
    long round = m.round;
    progress++;
    if (++m.there == threads) {
        m.there = 0;
        m.round++;
    } else if (m.there > threads) {
        fail("more threads arrive at a barrier than it is for");
    } else if (waits) {
        wait_until([&] { return m.round != round; });
    }
}

/* A product of a warp: its 16 rows. */
struct Product {
    int columns, lanes;
    bool by_columns, a_by_columns, in_registers, add, done;
    float (*value)(uint16_t);
    uint64_t a, b;
    float *sums[32];
    uint32_t words[32][4];
};
struct Warp {
    std::deque<Product> products;
    size_t issued[32], seen[32]; /* products; so many a lane has waited for */
    std::vector<size_t> groups[32]; /* how many products were issued when a group ended */
    uint64_t exchanged[32];
    int gave, took;
    long round;
};
inline std::vector<Warp> warps;

/* ---- shared memory ------------------------------------------------------------------------------- */
constexpr uint32_t BASE = 4096; /* of its addresses: what is at 0 is a mistake */
alignas(1024) inline unsigned char memory[232 << 10];
inline unsigned char *of_block = memory; /* blocks.h has its own */

inline unsigned char *at(uint32_t address, size_t bytes = 1) {
    if (address < BASE || address + bytes > BASE + sizeof memory) {
        fail("an address outside of shared memory");
        return of_block;
    }
    if (bytes <= 16 && address % bytes != 0) {
        fail("an address that is not aligned");
    }
    return of_block + (address - BASE);
}

/* The copy engine and wgmma swizzle rows of 128 bytes by bits 7 to 9 of the address, of 32 by 7. */
inline uint32_t swizzled(uint32_t address, int row = 128) {
    return address ^ (address >> 7 & (row == 128 ? 7 : 1)) << 4;
}

/* ---- a block --------------------------------------------------------------------------------------- */
struct Index {
    unsigned x, y, z;
};

} // namespace emulated

static emulated::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

inline void fiber_main() {
    kernel_body();
    fibers[current].done = true;
    progress++;
    yield();
}

inline void run_block(int threads) {
    blockDim.x = (unsigned)threads;
    fibers.assign((size_t)threads, Fiber{});
    warps.assign((size_t)threads / 32, Warp{});
    late.clear();
    barriers.clear();
    memset(meetings, 0, sizeof meetings);
    memset(memory, 0xff, sizeof memory);
    stacks.resize(std::max(stacks.size(), fibers.size() * STACK));
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber &fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks.data() + i * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, fiber_main, 0);
    }
    int slow = -1; /* a warp */
    for (int left = threads, idle = 0, round = 0; left > 0 && !failure; round++) {
        long before = progress;
        slow = round % SLOW_ROUNDS == 0 ? (int)(chance() % (unsigned)(threads / 32)) : slow;
        const bool slow_too = idle > 0 || chance() % 16 == 0;
        int first = (int)(chance() % (unsigned)threads);
        for (int i = 0; i < threads; i++) {
            current = (first + i) % threads;
            threadIdx.x = (unsigned)current;
            Fiber &fiber = fibers[(size_t)current];
            if (!fiber.done && (slow_too || current / 32 != slow) && (!fiber.ready || failure || fiber.ready(fiber.condition))) {
                go_on(fiber);
                left -= fiber.done;
            }
        }
        for (size_t i = 0; i < late.size();) {
            if (--late[i].turns > 0) {
                i++;
                continue;
            }
            auto run = late[i].run;
            late.erase(late.begin() + (long)i);
            run();
            progress++;
        }
        idle = progress == before && late.empty() ? idle + 1 : 0;
        if (idle > 2) {
            fail("all threads wait, and nothing is under way");
        }
    }
}

/* ---- exchange within a warp ------------------------------------------------------------------------ */
template <class V> V from_lane(V mine, int lane) {
    Warp &warp = warps[threadIdx.x / 32];
    wait_until([&] { return warp.took == 0; });
    memcpy(&warp.exchanged[threadIdx.x % 32], &mine, sizeof mine);
    long round = warp.round;
    if (++warp.gave == 32) {
        warp.gave = 0;
        warp.took = 32;
        warp.round++;
    }
    wait_until([&] { return warp.round != round; });
    memcpy(&mine, &warp.exchanged[lane & 31], sizeof mine);
    warp.took--;
    return mine;
}

/* ---- products ---------------------------------------------------------------------------------------- */
inline float of_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}
inline float of_f16(uint16_t bits) {
    __half h;
    memcpy(&h, &bits, 2);
    return __half2float(h);
}

/* PTX ISA, "Matrix Descriptor Format" and "Shared Memory Matrix Layout" with the swizzles of 128 and 32
 * bytes. */
inline void compute(Product &p, int warp) {
    auto address = [](uint64_t d) { return (uint32_t)(d & 0x3fff) << 4; };
    auto stride = [](uint64_t d) { return (uint32_t)(d >> 32 & 0x3fff) << 4; };  /* of 8 rows */
    auto leading = [](uint64_t d) { return (uint32_t)(d >> 16 & 0x3fff) << 4; }; /* of 64 columns */
    auto element = [&](uint32_t where, int row = 128) {
        uint16_t bits;
        memcpy(&bits, at(swizzled(where, row), 2), 2);
        return p.value(bits);
    };
    const int row_bytes = p.b >> 62 == 3 ? 32 : 128;
    float a[16][16], b[16][256];
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            if (p.in_registers) {
                uint32_t word = p.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
                a[row][k] = p.value((uint16_t)(k % 2 ? word >> 16 : word));
            } else {
                int r = warp % 4 * 16 + row;
                uint32_t where = p.a_by_columns ? (uint32_t)(r * 2) + (uint32_t)(k / 8) * stride(p.a) +
                                                      (uint32_t)(k % 8 * 128)
                                                : (uint32_t)(r / 8) * stride(p.a) +
                                                      (uint32_t)(r % 8 * 128 + k * 2);
                a[row][k] = element(address(p.a) + where);
            }
        }
    }
    for (int k = 0; k < 16; k++) {
        for (int n = 0; n < p.columns; n++) {
            uint32_t where = p.by_columns
                                 ? (uint32_t)(n / 64) * leading(p.b) + (uint32_t)(n % 64 * 2) +
                                       (uint32_t)(k / 8) * stride(p.b) + (uint32_t)(k % 8 * 128)
                                 : (uint32_t)(n / 8) * stride(p.b) +
                                       (uint32_t)(n % 8 * row_bytes + k * 2);
            b[k][n] = element(address(p.b) + where, row_bytes);
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int n = 0; n < p.columns; n++) {
            float &sum = p.sums[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2];
            sum = p.add ? sum : 0.0f;
            for (int k = 0; k < 16; k++) {
                sum += a[row][k] * b[k][n];
            }
        }
    }
    p.done = true;
}

inline void issue(const Product &asked, float *sums, int count, const uint32_t *words) {
    Warp &warp = warps[threadIdx.x / 32];
    int lane = (int)threadIdx.x % 32;
    size_t number = warp.issued[lane]++;
    if (warp.products.size() <= number) {
        warp.products.push_back(asked);
    }
    Product &p = warp.products[number];
    if (p.a != asked.a || p.b != asked.b || p.add != asked.add || p.columns != asked.columns) {
        fail("the lanes of a warp ask for different products");
    }
    p.sums[lane] = sums;
    if (words) {
        memcpy(p.words[lane], words, sizeof p.words[lane]);
    }
    for (int i = 0; i < count && !asked.add; i++) {
        sums[i] = NAN;
    }
    p.lanes++;
    progress++;
}

struct Map { /* inside of a CUtensorMap */
    unsigned char *data;
    int element, rows, columns, swizzle; /* 128 or 32 */
    int64_t shape[4], strides[4];
    bool is_half;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

/* f(address in shared memory, element of the tensor or NULL where it has none) for each of a box. */
template <class F> void each_of_box(const Map &map, uint32_t place, const int (&from)[4], F &&f) {
    for (int row = 0; row < map.rows; row++) {
        for (int column = 0; column < map.columns; column++) {
            int64_t where[4] = {from[0] + column, from[1] + row, from[2], from[3]};
            unsigned char *element = map.data;
            for (int axis = 0; axis < 4; axis++) {
                bool inside = where[axis] >= 0 && where[axis] < map.shape[axis];
                element = inside && element ? element + where[axis] * map.strides[axis] : NULL;
            }
            uint32_t linear = place + (uint32_t)((row * map.columns + column) * map.element);
            f(map.swizzle ? swizzled(linear, map.swizzle) : linear, element);
        }
    }
}

/* By thread: what reads shared memory late, and what then is to reach global memory. */
inline std::map<unsigned, std::vector<std::function<void()>>> stores, arrivals;

} // namespace emulated

/* ---- CUDA's own names -------------------------------------------------------------------------------- */
inline void __syncthreads() { emulated::meet(16, (int)blockDim.x, true); }
inline void __syncwarp() { emulated::from_lane(0, 0); }
template <class V> inline V __shfl_xor_sync(unsigned, V x, int mask) {
    return emulated::from_lane(x, ((int)threadIdx.x % 32) ^ mask);
}
inline int __shfl_sync(unsigned, int x, int lane) { return emulated::from_lane(x, lane); }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        x = max(x, __shfl_xor_sync(0, x, mask));
    }
    return x;
}
inline int __any_sync(unsigned, int some) { return (int)__reduce_max_sync(0, some != 0); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline void __stwb(uint4 *to, uint4 x) { *to = x; }
inline float4 __ldcg(const float4 *from) { return *from; }

/* ---- mma.cuh -------------------------------------------------------------------------------------------- */
#define NEEDLE_MMA_CUH
#define cuda_launch cuda_launch_on_a_gpu
#define fast_exp2 fast_exp2_on_a_gpu
#define min_or_nan min_or_nan_on_a_gpu
#include "common.cuh"
#undef min_or_nan
#undef fast_exp2
#undef cuda_launch

uint32_t shared_address(const void *pointer);
inline void store_shared4(uint32_t to, uint32_t x) { memcpy(emulated::at(to, 4), &x, 4); }
inline uint32_t load_shared4(uint32_t from) {
    uint32_t x;
    memcpy(&x, emulated::at(from, 4), 4);
    return x;
}
inline unsigned atomicInc(unsigned *counter, unsigned last) {
    unsigned old = *counter;
    *counter = old >= last ? 0 : old + 1;
    return old;
}
inline unsigned atomicMax(unsigned *to, unsigned x) {
    unsigned old = *to;
    *to = old < x ? x : old;
    return old;
}
inline void store_shared16(uint32_t to, const uint32_t (&x)[4]) { memcpy(emulated::at(to, 16), x, 16); }
inline void load_shared16(uint32_t (&x)[4], uint32_t from) { memcpy(x, emulated::at(from, 16), 16); }
/* f(word of x, its bytes in four matrices of 8 rows, whose addresses the lanes have; their number). */
template <class X, class F> void each_word(X (&x)[4], uint32_t row, F f) {
    const int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const uint32_t at = emulated::from_lane(row, 8 * i + lane / 4);
        f(&x[i], emulated::at(at + 4 * (uint32_t)(lane % 4), 4), 4);
    }
}
template <class X, class F> void each_half_word(X (&x)[4], uint32_t row, F f) { /* transposed */
    const int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < 8; i++) {
        const uint32_t at = emulated::from_lane(row, i / 2 * 8 + lane % 4 * 2 + i % 2);
        f((uint16_t *)x + i, emulated::at(at + 2 * (uint32_t)(lane / 4), 2), 2);
    }
}
inline void load_matrices(uint32_t (&x)[4], uint32_t row) { each_word(x, row, memcpy); }
inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t row) {
    each_half_word(x, row, memcpy);
    emulated::from_lane(0, 0); /* no thread writes before all have read */
}
template <class T> uint32_t pack_pair(float low, float high);
template <> inline uint32_t pack_pair<bf16>(float low, float high) {
    return pack(__float2bfloat16_rn(low), __float2bfloat16_rn(high));
}
template <> inline uint32_t pack_pair<f16>(float low, float high) {
    return pack(__float2half_rn(low), __float2half_rn(high));
}
inline float fast_exp2(float x) { return exp2f(x); }
inline float min_or_nan(float x, float y) { return x != x || x < y ? x : y; }
/* Of the portable kernels, which are not emulated. */
void copy_async16(uint32_t to, const void *from, bool inside);
void copy_async_commit();
template <int pending> void copy_async_wait();
template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

/* ---- hopper.cuh: contracts there ------------------------------------------------------------------------ */
#define NEEDLE_HOPPER_CUH
#define HOPPER_CODE 1

namespace hopper {

constexpr int WARPGROUP = 128, PANEL_COLUMNS = 64;
constexpr uint32_t PANEL_ROW = 128, PANEL_ALIGN = 1024;

inline bool hopper_usable(int) { return true; }
inline uint32_t dynamic_shared() { return emulated::BASE; }

inline nd_status emulated_map(void *data, int element, bool is_half, const int64_t (&shape)[4],
                        const int64_t (&strides)[3], int columns, int rows, CUtensorMap *out) {
    const int swizzle = element == 2 ? 128 : 32;
    emulated::Map map = {(unsigned char *)data, element, rows, columns, swizzle, {}, {}, is_half};
    for (int axis = 0; axis < 4; axis++) {
        map.shape[axis] = shape[axis];
        map.strides[axis] = axis == 0 ? element : strides[axis - 1];
    }
    memcpy(out, &map, sizeof map);
    return ND_OK;
}
inline nd_status tensor_map(const char *, void *data, nd_dtype dtype, const int64_t (&shape)[4],
                            const int64_t (&strides)[3], int columns, int rows, CUtensorMap *out) {
    return emulated_map(data, 2, dtype == ND_F16, shape, strides, columns, rows, out);
}
inline nd_status byte_map(const char *op, void *data, const int64_t (&shape)[4],
                          const int64_t (&strides)[3], const int (&box)[4], int swizzle,
                          CUtensorMap *out) {
    return swizzle == 32 ? emulated_map(data, 1, false, shape, strides, box[0], box[1], out)
                         : nd_error(ND_EVALUE, "not emulated");
}

inline emulated::Barrier &barrier_at(uint32_t address) {
    auto found = emulated::barriers.find(address);
    if (found == emulated::barriers.end()) {
        emulated::fail("a barrier that was not initialised");
        return emulated::barriers[address];
    }
    return found->second;
}
inline void barrier_init(uint32_t barrier, int arrivals) {
    emulated::barriers[barrier] = emulated::Barrier{arrivals, arrivals, 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) {
    emulated::Barrier &b = barrier_at(barrier);
    if (--b.missing < 0) {
        emulated::fail("more threads arrive in a phase than the barrier is for");
    }
    b.settle();
    emulated::progress++;
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
    barrier_at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t phase) {
    emulated::wait_until([&] { return barrier_at(barrier).phase != phase; });
}
inline void named_barrier_sync(int number, int threads) { emulated::meet(number, threads, true); }
inline void named_barrier_arrive(int number, int threads) { emulated::meet(number, threads, false); }
inline bool named_barrier_any(int number, int threads, bool one) {
    static bool any[17];
    any[number] |= one;
    named_barrier_sync(number, threads);
    const bool said = any[number];
    named_barrier_sync(number, threads);
    any[number] = false;
    named_barrier_sync(number, threads);
    return said;
}

inline emulated::Map checked(const CUtensorMap *map, uint32_t place) {
    emulated::Map m;
    memcpy(&m, map, sizeof m);
    if (place % (m.swizzle == 128 ? PANEL_ALIGN : m.swizzle == 32 ? 256 : 128) != 0) {
        emulated::fail("a box at a place that is not aligned");
    }
    return m;
}
inline void box_load(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2,
                     int c3) {
    emulated::Map m = checked(map, to);
    emulated::late.push_back({1 + (int)(emulated::chance() % 6), [=] {
        emulated::each_of_box(m, to, {c0, c1, c2, c3}, [&](uint32_t place, unsigned char *from) {
            unsigned char *target = emulated::at(place, (size_t)m.element);
            from ? memcpy(target, from, (size_t)m.element) : memset(target, 0, (size_t)m.element);
        });
        emulated::Barrier &b = barrier_at(barrier);
        b.bytes -= (long)m.rows * m.columns * m.element;
        b.settle();
    }});
}
inline void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16) {
        emulated::fail("a bulk copy that does not begin or end at 16 bytes");
    }
    emulated::late.push_back({1 + (int)(emulated::chance() % 6), [=] {
        memcpy(emulated::at(to, bytes), from, bytes);
        emulated::Barrier &b = barrier_at(barrier);
        b.bytes -= (long)bytes;
        b.settle();
    }});
}
inline void proxy_fence() {}
/* f(there, what was read) for the elements of a box. */
template <class F>
void box_to(const CUtensorMap *map, uint32_t from, const int (&corner)[4], F f) {
    emulated::Map m = checked(map, from);
    if (m.shape[0] * m.element % 16 != 0) {
        emulated::fail("a store of rows that end within 16 bytes, which are written whole");
    }
    emulated::stores[threadIdx.x].push_back([=] {
        emulated::each_of_box(m, from, corner, [&](uint32_t place, unsigned char *to) {
            if (to) {
                f(m, to, emulated::at(place, (size_t)m.element));
            }
        });
    });
}
inline void box_store(const CUtensorMap *map, uint32_t from, int c0, int c1, int c2, int c3) {
    box_to(map, from, {c0, c1, c2, c3}, [](const emulated::Map &m, void *to, const void *read) {
        memcpy(to, read, (size_t)m.element);
    });
}
inline void box_add(const CUtensorMap *map, uint32_t from, int c0, int c1, int c2, int c3) {
    box_to(map, from, {c0, c1, c2, c3}, [](const emulated::Map &m, void *to, const void *read) {
        uint16_t there, x;
        memcpy(&there, to, 2);
        memcpy(&x, read, 2);
        const uint32_t sum =
            m.is_half ? pack_pair<f16>(emulated::of_f16(there) + emulated::of_f16(x), 0)
                      : pack_pair<bf16>(emulated::of_bf16(there) + emulated::of_bf16(x), 0);
        memcpy(to, &sum, 2);
    });
}
/* f(there, what was read) for the floats of a bulk copy, once it arrives in global memory. */
template <class F> void bulk_copy(float *to, uint32_t from, uint32_t bytes, F f) {
    if (from % 16 || (uintptr_t)to % 16 || bytes % 16) {
        emulated::fail("a bulk copy that does not begin or end at 16 bytes");
    }
    const unsigned mine = threadIdx.x;
    emulated::stores[mine].push_back([=] {
        const float *read = (const float *)emulated::at(from, bytes);
        std::vector<float> values(read, read + bytes / 4);
        emulated::arrivals[mine].push_back([=] {
            for (size_t i = 0; i < values.size(); i++) {
                to[i] = f(to[i], values[i]);
            }
        });
    });
}
inline void bulk_store(void *to, uint32_t from, uint32_t bytes) {
    bulk_copy((float *)to, from, bytes, [](float, float x) { return x; });
}
inline void bulk_add(float *to, uint32_t from, uint32_t bytes) {
    bulk_copy(to, from, bytes, [](float there, float x) { return there + x; });
}
inline void store_release(unsigned *to, unsigned x) {
    *to = x;
    emulated::progress++;
}
inline void await_ticket(const unsigned *word, unsigned ticket) {
    emulated::wait_until([&] { return *word == ticket; });
}
inline void box_stores_read() {
    for (unsigned turns = emulated::chance() % 4; turns > 0; turns--) {
        emulated::progress++;
        emulated::yield();
    }
    for (auto &store : emulated::stores[threadIdx.x]) {
        store();
    }
    emulated::stores[threadIdx.x].clear();
}
inline void bulk_stores_done() {
    for (auto &arrival : emulated::arrivals[threadIdx.x]) {
        arrival();
    }
    emulated::arrivals[threadIdx.x].clear();
}

inline void copy_to(const void *from, void *to, size_t bytes) { memcpy(to, from, bytes); }
inline void store_matrices(uint32_t row, const uint32_t (&x)[4]) { each_word(x, row, copy_to); }
inline void store_matrices_transposed(uint32_t row, const uint32_t (&x)[4]) {
    each_half_word(x, row, copy_to);
}

template <int COUNT> void registers_down_to() {}
template <int COUNT> void registers_up_to() {}

/* The bits are those of hopper.cuh. */
constexpr uint64_t LAYOUT = (uint64_t)1 << 62 | (uint64_t)(8 * PANEL_ROW >> 4) << 32;
typedef uint32_t Operand;
inline uint32_t uniform(uint32_t x) { return (uint32_t)__shfl_sync(~0u, (int)x, 0); }
inline Operand rows_operand(uint32_t address) { return 1 << 16 | (address & 0x3ffff) >> 4; }
inline Operand columns_operand(uint32_t address, uint32_t panel) {
    return panel >> 4 << 16 | (address & 0x3ffff) >> 4;
}
inline Operand further(Operand operand, uint32_t bytes) { return operand + (bytes >> 4); }
inline void stay_above(int) {}
inline void products_begin() {}
inline void products_end() {
    emulated::Warp &warp = emulated::warps[threadIdx.x / 32];
    warp.groups[threadIdx.x % 32].push_back(warp.issued[threadIdx.x % 32]);
}
/* A product is the warpgroup's: it is done when it is for all four warps, none of which can be late. */
template <int LEFT> void products_wait() {
    const size_t warp = threadIdx.x / 32;
    auto &groups = emulated::warps[warp].groups[threadIdx.x % 32];
    if (groups.size() <= LEFT) {
        return;
    }
    size_t &i = emulated::warps[warp].seen[threadIdx.x % 32];
    for (; i < groups[groups.size() - 1 - LEFT]; i++) {
        for (size_t each = warp / 4 * 4; each < warp / 4 * 4 + 4; each++) {
            auto &products = emulated::warps[each].products;
            emulated::wait_until([&] { return products.size() > i && products[i].lanes == 32; });
            if (!products[i].done) {
                emulated::compute(products[i], (int)each);
            }
        }
    }
}
template <int N> void hold(float (&)[N]) {}
template <int M, int N> void hold(uint32_t (&)[M][N]) {}

template <class T> constexpr auto value_of = emulated::of_bf16;
template <> constexpr auto value_of<f16> = emulated::of_f16;
constexpr uint64_t THIN = (uint64_t)3 << 62 | (uint64_t)(8 * 32 >> 4) << 32;
template <class T, int COLUMNS, int A_COLUMNS = 0, int C>
void product(float (&c)[C], Operand a, Operand b, bool add) {
    emulated::issue({2 * C, 0, COLUMNS != 0, A_COLUMNS != 0, false, add, false, value_of<T>, LAYOUT | a,
                     LAYOUT | b, {}, {}}, c, C, NULL);
}
template <class T, int COLUMNS, int C>
void product(float (&c)[C], const uint32_t (&a)[4], Operand b, bool add) {
    emulated::issue({2 * C, 0, COLUMNS != 0, false, true, add, false, value_of<T>, 0, LAYOUT | b, {}, {}},
                    c, C, a);
}
template <class T> void product_thin(float (&c)[32], const uint32_t (&a)[4], Operand b) {
    emulated::issue({64, 0, false, false, true, false, false, value_of<T>, 0, THIN | b, {}, {}}, c, 32, a);
}

} // namespace hopper

/* ---- the host -------------------------------------------------------------------------------------------- */
namespace emulated {
/* The blocks of a grid, one by one. */
template <class F> nd_status run_grid(const char *op, unsigned blocks, int threads, F &&before) {
    gridDim.x = blocks;
    failure = NULL;
    for (blockIdx.x = 0; blockIdx.x < blocks && !failure; blockIdx.x++) {
        before();
        run_block(threads);
    }
    return failure ? nd_error(ND_ECUDA, "%s: %s", op, failure) : ND_OK;
}
} // namespace emulated

template <class A>
nd_status cuda_launch(const char *op, int, void (*kernel)(A), unsigned blocks, int threads,
                      size_t shared, const A &argument) {
    if (shared > sizeof emulated::memory) {
        return nd_error(ND_ECUDA, "%s: %zu bytes of shared memory", op, shared);
    }
    emulated::kernel_body = [&] { kernel(argument); };
    return emulated::run_grid(op, blocks, threads, [] {});
}
