/* sort.c - rows in order, running sums.
 *
 * A row is sorted by a radix sort of (key, index) pairs, eight bits a pass, lowest first; a pass in
 * which all keys have the same eight bits is left out. Threads take rows.
 */
#include <omp.h>

#include "../sort_key.h"
#include "cpu.h"

typedef struct {
    uint64_t key;
    int64_t index;
} pair;

static uint64_t load_bits(const nd_array *x, int64_t offset, size_t bytes) {
    uint64_t bits = 0;
    memcpy(&bits, (const char *)x->data + offset * (int64_t)bytes, bytes); /* little-endian */
    return bits;
}

/* Sort n pairs of `a` with the help of `b`; return the one of the two that holds the result. */
static pair *sort_pairs(pair *a, pair *b, int64_t n, int bits) {
    for (int shift = 0; shift < bits; shift += 8) {
        int64_t starts[256] = {0}, start = 0;
        for (int64_t i = 0; i < n; i++) {
            starts[a[i].key >> shift & 255]++;
        }
        if (starts[a[0].key >> shift & 255] == n) {
            continue;
        }
        for (int digit = 0; digit < 256; digit++) {
            int64_t count = starts[digit];
            starts[digit] = start;
            start += count;
        }
        for (int64_t i = 0; i < n; i++) {
            b[starts[a[i].key >> shift & 255]++] = a[i];
        }
        pair *sorted = b;
        b = a;
        a = sorted;
    }
    return a;
}

nd_status cpu_sort(int device, const sort_args *args) {
    int64_t rows = args->x->shape[0], n = args->x->shape[1], k = args->values->shape[1];
    ND_TRY(nd_check_sort(args->x, args->values));
    if (rows * k == 0) {
        return ND_OK;
    }
    nd_sort_order order = nd_sort_order_of(args->x->dtype, args->descending != 0);
    size_t bytes = nd_dtype_size(args->x->dtype);
    bool parallel = rows > 1 && rows * n > CPU_GRAIN;
    int64_t threads = parallel ? cpu_threads() : 1;
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)(threads * 2 * n) * sizeof(pair), &scratch));

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (parallel)
    for (int64_t r = 0; r < rows; r++) {
        pair *a = (pair *)scratch + omp_get_thread_num() * 2 * n;
        for (int64_t i = 0; i < n; i++) {
            a[i].key = nd_sort_key64(load_bits(args->x, r * n + i, bytes), order);
            a[i].index = i;
        }
        a = sort_pairs(a, a + n, n, order.bits);
        for (int64_t i = 0; i < k; i++) {
            uint64_t element = nd_sort_element64(a[i].key, order);
            memcpy(cpu_at(args->values, r * k + i), &element, bytes);
            ((int64_t *)args->indices->data)[r * k + i] = a[i].index;
        }
    }
    return ND_OK;
}

nd_status cpu_cumsum(int device, const cumsum_args *args) {
    int64_t rows = args->x->shape[0], n = args->x->shape[1];
    bool is_float = nd_dtype_is_float(args->x->dtype);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (rows * n > CPU_GRAIN)
    for (int64_t r = 0; r < rows; r++) {
        float sum = 0;
        uint64_t whole = 0; /* wraps around as int64 does elsewhere */
        for (int64_t j = 0; j < n; j += CPU_RUN) {
            cpu_run run;
            int64_t count = min_of(CPU_RUN, n - j);
            void *at = cpu_at(args->x, r * n + j);
            if (is_float) {
                cpu_load_f32(run.f32, at, args->x->dtype, 1, count);
                for (int64_t i = 0; i < count; i++) {
                    run.f32[i] = sum += run.f32[i];
                }
                cpu_store_f32(at, args->x->dtype, 1, run.f32, count);
            } else {
                cpu_load_i64(run.i64, at, args->x->dtype, 1, count);
                for (int64_t i = 0; i < count; i++) {
                    run.i64[i] = (int64_t)(whole += (uint64_t)run.i64[i]);
                }
                cpu_store_i64(at, args->x->dtype, 1, run.i64, count);
            }
        }
    }
    return ND_OK;
}
