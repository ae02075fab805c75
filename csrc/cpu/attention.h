/* attention.h - what attention_fwd.c and attention_bwd.c share: row tiles and lists of key ranges.
 */
#ifndef NEEDLE_CPU_ATTENTION_H
#define NEEDLE_CPU_ATTENTION_H

#include <limits.h>

#include "cpu.h"

enum { ATTENTION_QUERIES = 64, ATTENTION_KEYS = 128, ATTENTION_LANES = 16 };

/* Rows (of D values) of one head of a (B, T, H, D) view; sgemm reads them in place when it can. */
typedef struct {
    const nd_array *array;
    int64_t base;   /* element offset of the head */
    int64_t stride; /* from row to row */
    bool in_place;
} attention_rows;

ND_FN attention_rows attention_head(const nd_array *a, int64_t batch, int64_t head) {
    int64_t d = a->shape[3], stride = a->shape[1] <= 1 ? max_of(d, 1) : a->strides[1];
    return (attention_rows){.array = a,
                            .base = batch * a->strides[0] + head * a->strides[2],
                            .stride = stride,
                            .in_place =
                                a->dtype == ND_F32 && stride >= max_of(d, 1) && stride <= INT_MAX};
}

/* Rows [first, first + n) as float32 with a leading dimension, converted into `buffer` if need be.
 */
ND_FN const float *attention_load(const attention_rows *rows, int64_t first, int64_t n,
                                  float *buffer, int64_t *leading) {
    int64_t d = rows->array->shape[3], at = rows->base + first * rows->stride;
    if (rows->in_place) {
        *leading = rows->stride;
        return (const float *)rows->array->data + at;
    }
    for (int64_t i = 0; i < n; i++) {
        cpu_load_f32(buffer + i * d, cpu_at(rows->array, at + i * rows->stride), rows->array->dtype,
                     1, d);
    }
    *leading = max_of(d, 1);
    return buffer;
}

ND_FN void attention_store(const attention_rows *rows, int64_t first, int64_t n,
                           const float *from) {
    int64_t d = rows->array->shape[3], at = rows->base + first * rows->stride;
    for (int64_t i = 0; i < n; i++) {
        cpu_store_f32(cpu_at(rows->array, at + i * rows->stride), rows->array->dtype, 1,
                      from + i * d, d);
    }
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

/* How many of the n keys from `key` on query t sees. */
ND_FN int64_t attention_visible(bool causal, int64_t t, int64_t queries, int64_t keys, int64_t key,
                                int64_t n) {
    int64_t visible = causal ? t + keys - queries + 1 - key : n;
    return max_of(0, min_of(visible, n));
}

#endif
