/* attention.h - shared by attention_fwd.c and attention_bwd.c: row tiles and lists of key ranges.
 *
 * Scores lie transposed, S^T: a row a key, a column a query, so that a vector holds as many queries
 * and nothing is summed across its lanes. Columns beyond the queries of a tile hold zeros for q.
 */
#ifndef NEEDLE_CPU_ATTENTION_H
#define NEEDLE_CPU_ATTENTION_H

#include <limits.h>

#include "cpu.h"
#include "tile.h"
#ifdef __AVX512F__
#include "transpose16.h"
#endif

enum { ATTENTION_QUERIES = 64, ATTENTION_KEYS = 128 }; /* of a tile; whole panels */

/* Rows (of D values) of one head of a (B, T, H, D) view. */
typedef struct {
    const nd_array *array;
    int64_t base;   /* element offset of the head */
    int64_t stride; /* from row to row */
} attention_rows;

ND_FN attention_rows attention_head(const nd_array *a, int64_t batch, int64_t head) {
    return (attention_rows){
        .array = a, .base = batch * a->strides[0] + head * a->strides[2], .stride = a->strides[1]};
}

/* ND_OK if the head dim is in range and the keys of a head can be copied to float32: an array that
 * repeats one key may have 2^60 of them. */
ND_FN nd_status attention_check(const char *name, int64_t keys, int64_t d) {
    if (d > 256) {
        return nd_error(ND_EVALUE, "%s: q: head dim %lld is above the limit of 256", name,
                        (long long)d);
    }
    if (keys > ((int64_t)1 << 44) / max_of(tile_padded(d), 1)) {
        return nd_error(ND_EMEMORY, "%s: k: %lld keys of %lld dims are too many to be copied", name,
                        (long long)keys, (long long)d);
    }
    return ND_OK;
}

enum { ATTENTION_AHEAD = 8 }; /* rows; hardware prefetch misses such strides */

/* Ask for a row of so many bytes before it is read or written. */
ND_FN void attention_fetch(const char *row, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(row + b);
    }
}

/* Of d floats; a row is too short for a call of memcpy. */
ND_FN void attention_copy(float *restrict to, const float *restrict from, int64_t d) {
    int64_t j = 0;
#pragma GCC unroll 2
    for (; j + TILE_LANES <= d; j += TILE_LANES) {
        /* volatile, or the compiler sees a memcpy */
        *(volatile tile_vector *)(to + j) = *(const tile_vector *)(from + j);
    }
    for (; j < d; j++) {
        to[j] = from[j];
    }
}

/* Rows [first, first + n) as float32, side by side: rows of a large stride share few sets of the
 * cache. Zeros from column D to `leading`. */
ND_FN void attention_load(const attention_rows *rows, int64_t first, int64_t n, float *restrict to,
                          int64_t leading) {
    nd_dtype dtype = rows->array->dtype;
    int64_t d = rows->array->shape[3], size = (int64_t)nd_dtype_size(dtype);
    const char *from = (const char *)rows->array->data + (rows->base + first * rows->stride) * size;
    for (int64_t i = 0; i < n; i++, from += rows->stride * size, to += leading) {
        if (i + ATTENTION_AHEAD < n) {
            attention_fetch(from + ATTENTION_AHEAD * rows->stride * size, d * size);
        }
        if (dtype == ND_F32) {
            attention_copy(to, (const float *)from, d);
        } else {
            cpu_load_f32(to, from, dtype, 1, d);
        }
        for (int64_t j = d; j < leading; j++) {
            to[j] = 0;
        }
    }
}

ND_FN void attention_store(const attention_rows *rows, int64_t first, int64_t n, const float *from,
                           int64_t leading) {
    nd_dtype dtype = rows->array->dtype;
    int64_t d = rows->array->shape[3], size = (int64_t)nd_dtype_size(dtype);
    char *to = (char *)rows->array->data + (rows->base + first * rows->stride) * size;
    for (int64_t i = 0; i < n; i++, to += rows->stride * size, from += leading) {
        if (i + ATTENTION_AHEAD < n) {
            attention_fetch(to + ATTENTION_AHEAD * rows->stride * size, d * size);
        }
        if (dtype == ND_F32) {
            attention_copy((float *)to, from, d);
        } else {
            cpu_store_f32(to, dtype, 1, from, d);
        }
    }
}

/* to[j * to_row + i] = from[i * from_row + j] times a factor, for i < n and j < d: the factor is
 * one for all, or of_j[j]. */
ND_FN void attention_transpose(const float *restrict from, int64_t from_row, int64_t n, int64_t d,
                               float factor, const float *restrict of_j, float *restrict to,
                               int64_t to_row) {
    int64_t whole_n = 0, whole_d = 0;
#ifdef __AVX512F__
    whole_n = n / 16 * 16;
    whole_d = d / 16 * 16;
    for (int64_t i = 0; i < whole_n; i += 16) {
        for (int64_t j = 0; j < whole_d; j += 16) {
            __m512i x[16];
#pragma GCC unroll 16
            for (int l = 0; l < 16; l++) {
                x[l] = _mm512_loadu_si512(from + (i + l) * from_row + j);
            }
            transpose16(x);
#pragma GCC unroll 16
            for (int l = 0; l < 16; l++) {
                __m512 times = _mm512_set1_ps(of_j == NULL ? factor : of_j[j + l]);
                _mm512_storeu_ps(to + (j + l) * to_row + i,
                                 _mm512_mul_ps(_mm512_castsi512_ps(x[l]), times));
            }
        }
    }
#endif
    for (int64_t j = 0; j < d; j++) {
        float times = of_j == NULL ? factor : of_j[j];
        for (int64_t i = j < whole_d ? whole_n : 0; i < n; i++) {
            to[j * to_row + i] = from[i * from_row + j] * times;
        }
    }
}

/* n <= ATTENTION_QUERIES rows of D as columns, times scale; zeros for the columns that are left. */
ND_FN void attention_columns(const float *restrict rows, int64_t n, int64_t d, int64_t leading,
                             float scale, float *restrict to) {
    attention_transpose(rows, leading, n, d, scale, NULL, to, ATTENTION_QUERIES);
    for (int64_t j = 0; j < d && n < ATTENTION_QUERIES; j++) {
        memset(to + j * ATTENTION_QUERIES + n, 0, (size_t)(ATTENTION_QUERIES - n) * sizeof *to);
    }
}

/* Columns back to n rows of D, each times its factor where there are factors. */
ND_FN void attention_rows_of(const float *restrict columns, int64_t n, int64_t d,
                             const float *restrict factor, float *restrict to) {
    attention_transpose(columns, ATTENTION_QUERIES, d, n, 1.0f, factor, to, d);
}

/* For each block of one side, the blocks of the other that it meets. Dense attention is one block
 * that meets everything: lists NULL. */
typedef struct {
    const int32_t *offsets; /* (G, blocks + 1) */
    const int32_t *lists;
    int64_t groups;
    int64_t blocks;
    int64_t block; /* rows in a block */
} attention_pattern;

/* The pattern over a side of `length` rows, its lists (when not NULL) checked: ascending offsets
 * within the lists, block numbers within the other side of `other` rows. */
nd_status attention_pattern_make(const char *name, const char *field, const nd_array *offsets,
                                 const nd_array *lists, int64_t block, int64_t length,
                                 int64_t other, int64_t heads, attention_pattern *out);

/* Checked although threads here take blocks as they come, so that both backends refuse the same
 * calls: `order` names each block of the pattern once, for each of its masks. */
nd_status attention_order_check(int device, const char *name, const char *field,
                                const nd_array *order, const attention_pattern *p);

/* Walks the rows of the other side in [first, last) that a block meets, at most `step` at a time;
 * listed blocks that touch are merged, so that small blocks still make full tiles. */
typedef struct {
    const int32_t *list, *end;
    int64_t block, first, last, step;
    int64_t next, stop;
} attention_walk;

ND_FN attention_walk attention_walk_start(const attention_pattern *p, int64_t head, int64_t block,
                                          int64_t first, int64_t last, int64_t step) {
    attention_walk walk = {.block = p->block, .first = first, .last = last, .step = step};
    if (p->offsets == NULL) {
        walk.next = first;
        walk.stop = last;
    } else {
        const int32_t *offsets = p->offsets + (p->groups == 1 ? 0 : head) * (p->blocks + 1) + block;
        walk.list = p->lists + offsets[0];
        walk.end = p->lists + offsets[1];
    }
    return walk;
}

ND_FN bool attention_walk_next(attention_walk *walk, int64_t *begin, int64_t *end) {
    while (walk->next >= walk->stop) {
        if (walk->list == walk->end) {
            return false;
        }
        int64_t start = *walk->list++ * walk->block;
        int64_t stop = start + walk->block;
        while (walk->list != walk->end && *walk->list * walk->block == stop) {
            stop += walk->block;
            walk->list++;
        }
        walk->next = max_of(start, walk->first);
        walk->stop = min_of(stop, walk->last);
    }
    *begin = walk->next;
    *end = min_of(walk->next + walk->step, walk->stop);
    walk->next = *end;
    return true;
}

/* How many of the n keys from s on some query before t sees. */
ND_FN int64_t attention_visible(bool causal, int64_t t, int64_t queries, int64_t keys, int64_t s,
                                int64_t n) {
    return causal ? max_of(0, min_of(t + keys - queries - s, n)) : n;
}

/* The scores of a panel of queries from t on and n keys from s on: -inf where a query does not see
 * a key. */
ND_FN void attention_hide(bool causal, int64_t t, int64_t queries, int64_t keys, int64_t s,
                          int64_t n, float *scores, int64_t leading) {
    int64_t all =
        attention_visible(causal, t + 1, queries, keys, s, n); /* that the first query sees */
    for (int64_t key = all; key < n; key++) {
        int64_t first = min_of(s + key - (keys - queries) - t, TILE_PANEL);
        for (int64_t i = 0; i < first; i++) {
            scores[key * leading + i] = -INFINITY;
        }
    }
}

#endif
