/* take.c - elements by their places along an axis, and assignment to places.
 *
 * The walk is that of an assignment between y and x, in which the picked axis of x has stride 0 and
 * the id adds its place. Elements move as items of their size, and whole rows by memcpy where one
 * id picks a contiguous row. Each moves once, so any split among threads gives the same bits.
 */
#include "cpu.h"

enum { BLOCK = 32768, PICKED = 2 /* the axis */ };

static nd_status check_ids(const char *op, const nd_array *ids, int64_t n) {
    nd_array once = *ids;
    for (int i = 0; i < once.ndim; i++) {
        once.shape[i] = once.strides[i] == 0 && once.shape[i] > 0 ? 1 : once.shape[i];
    }
    const nd_array *operands[1] = {&once};
    nd_loop loop;
    cpu_loop_make(1, operands, &loop);
    if (loop.size == 0) {
        return ND_OK;
    }
    int64_t row = loop.shape[loop.ndim - 1], stride = loop.strides[0][loop.ndim - 1];
    int64_t wrong = 0;
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) reduction(+ : wrong) \
    if (loop.size > CPU_GRAIN)
    for (int64_t i = 0; i < loop.size / row; i++) {
        cpu_cursor cursor;
        cpu_cursor_seek(&loop, 1, i, &cursor);
        const int64_t *id = (const int64_t *)ids->data + cursor.offset[0];
        for (int64_t j = 0; j < row; j++) {
            wrong += id[j * stride] < -n || id[j * stride] >= n;
        }
    }
    if (wrong > 0) {
        return nd_error(ND_EVALUE, "%s: ids: %lld of them are outside of the axis of size %lld", op,
                        (long long)wrong, (long long)n);
    }
    return ND_OK;
}

/* A row of items. `step`: of the picked axis on the side of x, else 0. */
typedef struct {
    char *data;
    int64_t stride, step;
} items;

#define MOVE_ITEMS(bytes)                                                        \
    for (int64_t i = 0; i < count; i++) {                                        \
        int64_t id = ids[i * ids_stride];                                        \
        id += id < 0 ? n : 0;                                                    \
        memcpy(to.data + (i * to.stride + id * to.step) * (bytes),               \
               from.data + (i * from.stride + id * from.step) * (bytes), bytes); \
    }                                                                            \
    break;

static void move_row(size_t size, items to, items from, const int64_t *ids, int64_t ids_stride,
                     int64_t n, int64_t count) {
    if (ids_stride == 0 && to.stride == 1 && from.stride == 1) {
        int64_t id = (ids[0] + (ids[0] < 0 ? n : 0)) * (int64_t)size;
        memcpy(to.data + id * to.step, from.data + id * from.step, (size_t)count * size);
        return;
    }
    switch (size) {
    case 1:
        MOVE_ITEMS(1)
    case 2:
        MOVE_ITEMS(2)
    case 4:
        MOVE_ITEMS(4)
    default:
        MOVE_ITEMS(8)
    }
}

/* `x`: the one of `to` and `from` from which the ids pick. */
static nd_status move(const char *op, const nd_array *to, const nd_array *from, const nd_array *x,
                      const nd_array *ids) {
    int64_t n = x->shape[PICKED], step = x->strides[PICKED];
    ND_TRY(check_ids(op, ids, n));
    nd_array spread = *x; /* as many places as ids, all of them the first */
    spread.shape[PICKED] = ids->shape[PICKED];
    spread.strides[PICKED] = 0;
    const nd_array *operands[3] = {x == to ? &spread : to, x == from ? &spread : from, ids};
    nd_loop loop;
    cpu_loop_make(3, operands, &loop);
    if (loop.size == 0) {
        return ND_OK;
    }
    int inner = loop.ndim - 1;
    int64_t row = loop.shape[inner], blocks = cpu_ceil_div(loop.size, BLOCK);
    int64_t strides[3] = {loop.strides[0][inner], loop.strides[1][inner], loop.strides[2][inner]};

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (blocks > 1)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * BLOCK, end = min_of(loop.size, begin + BLOCK);
        int64_t position = begin % row;
        cpu_cursor cursor;
        cpu_cursor_seek(&loop, 3, begin / row, &cursor);
        for (int64_t i = begin, count; i < end; i += count) {
            count = min_of(row - position, end - i);
            items to_row = {cpu_at(to, cursor.offset[0] + position * strides[0]), strides[0],
                            x == to ? step : 0};
            items from_row = {cpu_at(from, cursor.offset[1] + position * strides[1]), strides[1],
                              x == from ? step : 0};
            move_row(nd_dtype_size(to->dtype), to_row, from_row,
                     (const int64_t *)ids->data + cursor.offset[2] + position * strides[2],
                     strides[2], n, count);
            position = 0;
            cpu_cursor_next(&loop, 3, &cursor);
        }
    }
    return ND_OK;
}

nd_status cpu_take(int device, const take_args *args) {
    return move("take", args->y, args->x, args->x, args->ids);
}

nd_status cpu_put(int device, const put_args *args) {
    return move("put", args->x, args->y, args->x, args->ids);
}
