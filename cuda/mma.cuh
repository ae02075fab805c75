/* mma.cuh - the PTX of the portable kernels, for sm_80 and later: asynchronous copies into shared
 * memory, fragment loads and 16-bit tensor core products.
 *
 * Fragments. In a warp let group = lane / 4 and pair = 2 (lane % 4). A 32-bit register holds two
 * 16-bit elements, the lower column (or k) in the lower half.
 *   A, 16 x 16, a[0..3]: rows group, group + 8, group, group + 8; columns pair + 0, 0, 8, 8
 *   B, 16 x 8,  b[0..1]: column group; rows (k) pair + 0, pair + 8
 *   C, 16 x 8,  c[0..3]: (group, pair), (group, pair + 1), (group + 8, pair), (group + 8, pair + 1)
 * so two neighbouring C tiles, rounded and packed, are one A fragment: products chain in registers.
 */
#ifndef NEEDLE_MMA_CUH
#define NEEDLE_MMA_CUH

#include "common.cuh"

/* A shared-memory pointer as the 32-bit address that these instructions take. */
__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Copy 16 bytes (or 8) to shared memory without waiting; zeros when !inside, and then `from` is not
 * read. Both addresses are multiples of the size. */
__device__ __forceinline__ void copy_async16(uint32_t to, const void *from, bool inside ND_HERE) {
    ND_CHECK(from, inside ? 16 : 0);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async8(uint32_t to, const void *from, bool inside ND_HERE) {
    ND_CHECK(from, inside ? 8 : 0);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to), "l"(from),
                 "r"(inside ? 8 : 0)
                 : "memory");
}

/* Close a group of copies; wait until at most `pending` of this thread's groups are under way. */
__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

template <int pending> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void store_shared16(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

__device__ __forceinline__ void store_shared4(uint32_t to, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to), "r"(x) : "memory");
}

__device__ __forceinline__ uint32_t load_shared4(uint32_t from) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void load_shared16(uint32_t (&x)[4], uint32_t from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

/* Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8,
 * and receives in x[m] the elements (group, pair) and (group, pair + 1) of matrix m. */
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

/* The same, each matrix transposed: x[m] holds elements (pair, group) and (pair + 1, group). */
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

/* c += a b in float32. */
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<f16>(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two floats rounded to T, `low` in the lower half. */
template <class T> __device__ __forceinline__ uint32_t pack_pair(float low, float high);

template <> __device__ __forceinline__ uint32_t pack_pair<bf16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <> __device__ __forceinline__ uint32_t pack_pair<f16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

#endif
