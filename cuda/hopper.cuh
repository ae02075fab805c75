/* hopper.cuh - instructions of Hopper (sm_90a), each once, by name. PTX ISA 8.0 and later, sections
 * in brackets.
 *
 * Shared memory is addressed by 32-bit shared-window addresses. A *panel* is how matrices lie
 * there: rows of 64 16-bit elements (128 bytes), the 16-byte chunk c of row r at chunk c ^ (r % 8),
 * its start a multiple of 1024 bytes. That is what the copy engine writes with
 * CU_TENSOR_MAP_SWIZZLE_128B and what wgmma reads with the 128-byte swizzle; neither meets a bank
 * conflict. A matrix of more than 64 columns is several panels, one after the other.
 *
 * Products are issued by a warpgroup, 128 threads that begin at a multiple of 128, all of which
 * call the function, and run on while the threads go on. c[4 n + 2 h + e] of a thread is row 16
 * warp + lane / 4 + 8 h, column 8 n + 2 (lane % 4) + e of the 64 x N result. A in registers is four
 * words of two elements: a[0] row lane / 4, columns 2 (lane % 4) + {0, 1}; a[1] eight rows below;
 * a[2], a[3] the same eight columns to the right. So words made of c[8 s .. 8 s + 7] in order are A
 * of columns 16 s.. of the next product.
 */
#ifndef NEEDLE_HOPPER_CUH
#define NEEDLE_HOPPER_CUH

#include <cuda.h>

#include "common.cuh"

namespace hopper {

constexpr int WARPGROUP = 128;      /* threads */
constexpr int PANEL_COLUMNS = 64;   /* of 16 bits */
constexpr uint32_t PANEL_ROW = 128; /* bytes */
constexpr uint32_t PANEL_ALIGN = 1024;

/* A kernel that uses what follows has an empty body for other architectures, where it is never
 * launched: see hopper_usable(). */
#if defined(__CUDACC__) && (!defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL))
#define HOPPER_CODE 1
#endif

/* ---- host (hopper.cpp) --------------------------------------------------------------------------
 * True if kernels for sm_90a were built and the device (or NEEDLE_ARCH) takes them. */
bool hopper_usable(int device);

/* A tensor map of up to 4 axes, fastest first: elements of bf16 or float16, `strides` in bytes of
 * axes 1 to 3, boxes of box0 x box1 x 1 x 1, which are panels. */
nd_status tensor_map(const char *op, void *data, nd_dtype dtype, const int64_t (&shape)[4],
                     const int64_t (&strides)[3], int box0, int box1, CUtensorMap *out);

/* The same of bytes in boxes of any shape, whose rows lie in shared memory with the swizzle of
 * `swizzle` bytes: 32, 64 or 128. */
nd_status byte_map(const char *op, void *data, const int64_t (&shape)[4],
                   const int64_t (&strides)[3], const int (&box)[4], int swizzle, CUtensorMap *out);

#ifdef HOPPER_CODE

/* Where a block's dynamic shared memory begins: a multiple of PANEL_ALIGN. */
__device__ __forceinline__ uint32_t dynamic_shared() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return (uint32_t)__cvta_generic_to_shared(dynamic_shared_memory);
}

/* ---- barriers in shared memory [mbarrier] -------------------------------------------------------
 * 8 bytes each. A phase ends when `arrivals` threads have arrived and all announced bytes have
 * come; waiting for phase p (0, 1, 0, ...) returns once it has ended. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

/* By the thread that made them, before the __syncthreads after which others use them. */
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and announces bytes that the copy engine will bring. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra.uni over;\n"
                 "bra.uni again;\n"
                 "over:\n"
                 "}\n" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

/* ---- barriers by number [bar]: 1 to 15, of `threads` threads --------------------------------- */
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

/* named_barrier_sync; true if `one` is true for any of the threads. */
__device__ __forceinline__ bool named_barrier_any(int number, int threads, bool one) {
    int any;
    asm volatile("{\n"
                 ".reg .pred one, any;\n"
                 "setp.ne.s32 one, %3, 0;\n"
                 "bar.red.or.pred any, %1, %2, one;\n"
                 "selp.s32 %0, 1, 0, any;\n"
                 "}\n"
                 : "=r"(any)
                 : "r"(number), "r"(threads), "r"((int)one)
                 : "memory");
    return any != 0;
}

/* ---- the copy engine [cp.async.bulk.tensor] -----------------------------------------------------
 * A box of a tensor map (box_map, host) from (c0, c1, c2, c3), fastest first; what lies outside of
 * the tensor arrives as zeros and is not written. One thread calls these. */

/* Completes on the barrier, which must have been told of the bytes of the whole box. */
__device__ __forceinline__ void box_load(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

/* `bytes` in a row, without a tensor map [cp.async.bulk]: addresses and `bytes` are multiples of
 * 16. */
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Writes of threads to shared memory are visible to the copy engine after proxy_fence() by each of
 * them and a barrier. */
__device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void box_store(const CUtensorMap *map, uint32_t from, int c0, int c1,
                                          int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            map),
        "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

/* Added to what is there, each sum rounded to nearest [cp.reduce.async.bulk.tensor]. */
__device__ __forceinline__ void box_add(const CUtensorMap *map, uint32_t from, int c0, int c1,
                                        int c2, int c3) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

/* `bytes` in a row to global memory, stored or added to the floats there [cp.async.bulk,
 * cp.reduce.async.bulk]: addresses and `bytes` are multiples of 16. */
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_add(float *to, uint32_t from, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
        "r"(from), "r"(bytes)
        : "memory");
}

/* Ends the group of this thread's stores and waits until shared memory has been read. */
__device__ __forceinline__ void box_stores_read() {
    asm volatile("cp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group.read 0;" ::
                     : "memory");
}

/* Waits until the groups that this thread has ended are in global memory. */
__device__ __forceinline__ void bulk_stores_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- words of global memory: one thread block waits for another [ld.acquire, st.release] ---- */
__device__ __forceinline__ void store_release(unsigned *to, unsigned x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
/* Returns once the word is `ticket`. What its writer stored before, by the copy engine too, is then
 * visible to this thread and to its requests to the copy engine. */
__device__ __forceinline__ void await_ticket(const unsigned *word, unsigned ticket) {
    unsigned now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    } while (now != ticket);
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* ---- [stmatrix] ---------------------------------------------------------------------------------
 * The way back of load_matrices_transposed (mma.cuh): x[m] of a lane are elements (2 (lane % 4),
 * lane / 4) and (2 (lane % 4) + 1, lane / 4) of matrix m, 8 x 8 16-bit elements, whose row r lies
 * where lane 8 m + r says. */
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, const uint32_t (&x)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
        : "memory");
}

/* The way back of load_matrices. */
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/* ---- registers [setmaxnreg] ---------------------------------------------------------------------
 * Of each thread of the calling warpgroup from here on; a multiple of 8. */
template <int COUNT> __device__ __forceinline__ void registers_down_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_up_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- products [wgmma] ---------------------------------------------------------------------------
 * An operand in panels is the low word of its matrix descriptor. rows: k runs along a row (Q and K
 * of Q K^T); columns: k runs down the rows (V of P V), the next 64 columns are `panel` bytes away.
 * further() is some bytes on: 32 for the next 16 columns, 2048 for the next 16 rows. */
typedef uint32_t Operand;

/* A number that all threads of a warp have, in a uniform register: what follows from it is computed
 * there, and not moved there for each product. All 32 threads call. */
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ Operand rows_operand(uint32_t address) {
    return 1 << 16 | (address & 0x3ffff) >> 4;
}
__device__ __forceinline__ Operand columns_operand(uint32_t address, uint32_t panel) {
    return panel >> 4 << 16 | (address & 0x3ffff) >> 4;
}
__device__ __forceinline__ Operand further(Operand operand, uint32_t bytes) {
    return operand + (bytes >> 4);
}
/* 128-byte swizzle; 1024 bytes from eight rows to the next. */
#define HOPPER_PANELS "0x40000040"

/* Before the first product that reads registers (accumulators too) that the threads have
 * written. */
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/* Ends a group of products. */
__device__ __forceinline__ void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All groups are done but the last LEFT: for all four warps, so that one thread can hand on the
 * memory that they read. */
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* After products_wait: the compiler must not move reads or writes of these above it. */
template <int N> __device__ __forceinline__ void hold(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(c[i])::"memory");
    }
}
template <int M, int N> __device__ __forceinline__ void hold(uint32_t (&a)[M][N]) {
#pragma unroll
    for (int i = 0; i < M * N; i++) {
        asm volatile("" : "+r"(a[i / N][i % N])::"memory");
    }
}

/* Keeps computations above it there: ptxas moves arithmetic below products_wait, where it no
 * longer overlaps with products, but not below a loop. `some` must be 0 or more, which the compiler
 * cannot know. */
__device__ __forceinline__ void stay_above(int some) {
    asm volatile("{\n"
                 ".reg .pred never;\n"
                 "setp.lt.s32 never, %0, 0;\n"
                 "again:\n"
                 "@!never bra over;\n"
                 "nanosleep.u32 0;\n"
                 "bra again;\n"
                 "over:\n"
                 "}\n" ::"r"(some)
                 : "memory");
}

#define HOPPER_C8(c, i)                                                                         \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define HOPPER_C32(c, i) \
    HOPPER_C8(c, i), HOPPER_C8(c, i + 8), HOPPER_C8(c, i + 16), HOPPER_C8(c, i + 24)
#define HOPPER_NAMES32                                                                            \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
    "25,"                                                                                         \
    "%26,%27,%28,%29,%30,%31"
#define HOPPER_NAMES64                                                                             \
    HOPPER_NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50," \
                   "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HOPPER_NAMES128                                                                            \
    HOPPER_NAMES64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82," \
                   "%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,"     \
                   "%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"   \
                   "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
/* SHAPE: "m64n64k16"; KIND: "bf16.bf16"; A .. ADD: the numbers of the operands after c; TA, TB: are
 * they columns_operands. */
#define HOPPER_SHARED(SHAPE, KIND, NAMES, A, B, ADD, TA, TB, ...)                          \
    asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %" #ADD ", 0;\n"   \
                 "mov.b64 a, {%" #A ", " HOPPER_PANELS "};\n"                              \
                 "mov.b64 b, {%" #B ", " HOPPER_PANELS "};\n"                              \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." KIND " {" NAMES "}, a, b, " \
                 "add, 1, 1, %" #TA ", %" #TB ";\n}\n"                                     \
                 : __VA_ARGS__                                                             \
                 : "r"(a), "r"(b), "r"((int)add), "n"(A_COLUMNS), "n"(COLUMNS))
#define HOPPER_REGISTERS(SHAPE, KIND, NAMES, A0, A1, A2, A3, B, ADD, TB, ...)              \
    asm volatile("{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %" #ADD ", 0;\n"      \
                 "mov.b64 b, {%" #B ", " HOPPER_PANELS "};\n"                              \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." KIND " {" NAMES "}, {%" #A0 \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, add, 1, 1, %" #TB ";\n}\n"           \
                 : __VA_ARGS__                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((int)add),      \
                   "n"(COLUMNS))

template <class T> constexpr bool is_bf16 = false;
template <> constexpr bool is_bf16<bf16> = true;

/* FORM: one of the two above; KIND follows from T. */
#define HOPPER_OF_T(FORM, SHAPE, ...)          \
    if constexpr (is_bf16<T>) {                \
        FORM(SHAPE, "bf16.bf16", __VA_ARGS__); \
    } else {                                   \
        FORM(SHAPE, "f16.f16", __VA_ARGS__);   \
    }

/* c = a b, or c += a b with `add`: 64 x 16 by 16 x N. COLUMNS, A_COLUMNS: b, a is a
 * columns_operand. */
template <class T, int COLUMNS, int A_COLUMNS = 0, int C>
__device__ __forceinline__ void product(float (&c)[C], Operand a, Operand b, bool add) {
    static_assert(C == 32 || C == 64 || C == 128, "N is 64, 128 or 256");
    if constexpr (C == 128) {
        HOPPER_OF_T(HOPPER_SHARED, "m64n256k16", HOPPER_NAMES128, 128, 129, 130, 131, 132,
                    HOPPER_C32(c, 0), HOPPER_C32(c, 32), HOPPER_C32(c, 64), HOPPER_C32(c, 96))
    } else if constexpr (C == 64) {
        HOPPER_OF_T(HOPPER_SHARED, "m64n128k16", HOPPER_NAMES64, 64, 65, 66, 67, 68,
                    HOPPER_C32(c, 0), HOPPER_C32(c, 32))
    } else {
        HOPPER_OF_T(HOPPER_SHARED, "m64n64k16", HOPPER_NAMES32, 32, 33, 34, 35, 36,
                    HOPPER_C32(c, 0))
    }
}

/* The same of bytes, a in e4m3 or e5m2, b in e4m3: 64 x 32 by 32 x N; both are rows_operands. */
#define HOPPER_BYTES(SHAPE, KIND, NAMES, A, B, ADD, ...)                                           \
    asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %" #ADD ", 0;\n"           \
                 "mov.b64 a, {%" #A ", " HOPPER_PANELS "};\n"                                      \
                 "mov.b64 b, {%" #B ", " HOPPER_PANELS "};\n"                                      \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." KIND " {" NAMES "}, a, b, add, 1, " \
                 "1;\n}\n"                                                                         \
                 : __VA_ARGS__                                                                     \
                 : "r"(a), "r"(b), "r"((int)add))
#define HOPPER_BYTES_OF(KIND)                                                              \
    if constexpr (C == 128) {                                                              \
        HOPPER_BYTES("m64n256k32", KIND, HOPPER_NAMES128, 128, 129, 130, HOPPER_C32(c, 0), \
                     HOPPER_C32(c, 32), HOPPER_C32(c, 64), HOPPER_C32(c, 96));             \
    } else {                                                                               \
        HOPPER_BYTES("m64n128k32", KIND, HOPPER_NAMES64, 64, 65, 66, HOPPER_C32(c, 0),     \
                     HOPPER_C32(c, 32));                                                   \
    }
template <bool A_E5M2, int C>
__device__ __forceinline__ void product_fp8(float (&c)[C], Operand a, Operand b, bool add) {
    static_assert(C == 64 || C == 128, "N is 128 or 256");
    if constexpr (A_E5M2) {
        HOPPER_BYTES_OF("e5m2.e4m3")
    } else {
        HOPPER_BYTES_OF("e4m3.e4m3")
    }
}

/* The product of 16 bits with a in registers. */
template <class T, int COLUMNS, int C>
__device__ __forceinline__ void product(float (&c)[C], const uint32_t (&a)[4], Operand b,
                                        bool add) {
    static_assert(C == 32 || C == 64, "N is 64 or 128");
    if constexpr (C == 64) {
        HOPPER_OF_T(HOPPER_REGISTERS, "m64n128k16", HOPPER_NAMES64, 64, 65, 66, 67, 68, 69, 70,
                    HOPPER_C32(c, 0), HOPPER_C32(c, 32))
    } else {
        HOPPER_OF_T(HOPPER_REGISTERS, "m64n64k16", HOPPER_NAMES32, 32, 33, 34, 35, 36, 37, 38,
                    HOPPER_C32(c, 0))
    }
}

/* c = a b of a row operand whose rows are 16 columns: 32 bytes, with the swizzle of 32. */
#define HOPPER_THIN(SHAPE, KIND, ...)                                                   \
    asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%36, 0xc0000010};\n"                     \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." KIND " {" HOPPER_NAMES32 \
                 "}, {%32, %33, %34, %35}, b, 0, 1, 1, 0;\n"                            \
                 "}\n"                                                                  \
                 : __VA_ARGS__                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
template <class T>
__device__ __forceinline__ void product_thin(float (&c)[32], const uint32_t (&a)[4], Operand b) {
    HOPPER_OF_T(HOPPER_THIN, "m64n64k16", HOPPER_C32(c, 0))
}

#endif

} // namespace hopper

#endif
