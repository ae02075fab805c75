/* sort_key.h - unsigned numbers in the order of a dtype's elements, for radix sorts; compiled by
 * both the C compiler and nvcc.
 *
 * Floats: -0 before 0, NaN after everything. With `descending` the order is the reverse. An element
 * comes back from its key, with the payload of a NaN lost.
 */
#ifndef NEEDLE_SORT_KEY_H
#define NEEDLE_SORT_KEY_H

#include "formula.h"
#include "needle.h"

typedef struct {
    int bits;          /* of an element and of its key */
    uint64_t mask;     /* that many ones */
    uint64_t sign;     /* the sign's bit; 0 for unsigned dtypes */
    uint64_t infinity; /* the bits of infinity; 0 for integers */
    uint64_t flip;     /* applied to a key: mask for descending, else 0 */
} nd_sort_order;

static inline nd_sort_order nd_sort_order_of(nd_dtype dtype, int descending) {
    nd_sort_order o;
    o.bits = 8 * (int)nd_dtype_size(dtype);
    o.mask = ~(uint64_t)0 >> (64 - o.bits);
    o.sign = dtype == ND_BOOL || dtype == ND_U8 || dtype == ND_U16 ? 0 : o.mask / 2 + 1;
    o.infinity = dtype == ND_F32    ? 0x7f800000u
                 : dtype == ND_BF16 ? 0x7f80u
                 : dtype == ND_F16  ? 0x7c00u
                                    : 0;
    o.flip = descending ? o.mask : 0;
    return o;
}

#define ND_SORT_KEYS(K, key_of, element_of)                                   \
    ND_FN K key_of(K x, nd_sort_order o) {                                    \
        const K mask = (K)o.mask, sign = (K)o.sign, infinity = (K)o.infinity; \
        K key = x ^ sign;                                                     \
        if (infinity) {                                                       \
            key = x & sign ? ~x & mask : key;                                 \
            key = (x & ~sign) > infinity ? mask : key;                        \
        }                                                                     \
        return key ^ (K)o.flip;                                               \
    }                                                                         \
    ND_FN K element_of(K key, nd_sort_order o) {                              \
        const K mask = (K)o.mask, sign = (K)o.sign;                           \
        key ^= (K)o.flip;                                                     \
        return o.infinity && !(key & sign) ? ~key & mask : key ^ sign;        \
    }
/* The conditions of sort that axis letters cannot express. */
static inline nd_status nd_check_sort(const nd_array *x, const nd_array *values) {
    int64_t n = x->shape[1], k = values->shape[1];
    if (k > n || n > INT32_MAX) {
        return nd_error(ND_EVALUE,
                        "sort: the first %lld of %lld elements: at most all, and fewer "
                        "than 2^31 in a row",
                        (long long)k, (long long)n);
    }
    return ND_OK;
}

ND_SORT_KEYS(uint32_t, nd_sort_key32, nd_sort_element32)
ND_SORT_KEYS(uint64_t, nd_sort_key64, nd_sort_element64)

#endif
