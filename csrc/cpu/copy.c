/* copy.c - assign (to = from, any strides, any two dtypes) and fill.
 *
 * The axes are reordered so that `to` is written along its smallest stride. Equal dtypes move as
 * opaque 1, 2, 4 or 8 byte items: whole rows by memcpy where both are contiguous, 2-D blocks where
 * `from` runs along another axis (a transpose touches each cache line once), single items
 * otherwise. Unequal dtypes go through float32 or int64 runs. Every element moves once, so any
 * split among threads gives the same bits.
 */
#include "cpu.h"

enum { RUN = CPU_RUN, BLOCK = 32768, TILE = 32 };

static int64_t magnitude(int64_t stride) { return stride < 0 ? -stride : stride; }

static void swap_axes(nd_loop *loop, int n, int i, int j) {
    int64_t t = loop->shape[i];
    loop->shape[i] = loop->shape[j];
    loop->shape[j] = t;
    for (int k = 0; k < n; k++) {
        t = loop->strides[k][i];
        loop->strides[k][i] = loop->strides[k][j];
        loop->strides[k][j] = t;
    }
}

/* Innermost: the axis along which operand 0 moves least. */
static void sort_axes(nd_loop *loop, int n) {
    for (int i = 0; i < loop->ndim; i++) {
        for (int j = i + 1; j < loop->ndim; j++) {
            if (magnitude(loop->strides[0][i]) < magnitude(loop->strides[0][j])) {
                swap_axes(loop, n, i, j);
            }
        }
    }
}

/* Items of any type, moved by their size. */
typedef uint8_t __attribute__((may_alias)) item1;
typedef uint16_t __attribute__((may_alias)) item2;
typedef uint32_t __attribute__((may_alias)) item4;
typedef uint64_t __attribute__((may_alias)) item8;

#define COPY_ITEMS(T)                                                         \
    {                                                                         \
        T *p = to;                                                            \
        const T *q = from;                                                    \
        for (int64_t i = 0; i < rows; i++) {                                  \
            for (int64_t j = 0; j < n; j++) {                                 \
                p[i * to_row + j * to_stride] = q[i * from_row + j * stride]; \
            }                                                                 \
        }                                                                     \
        break;                                                                \
    }

static void copy_items(size_t size, void *to, int64_t to_row, int64_t to_stride, const void *from,
                       int64_t from_row, int64_t stride, int64_t rows, int64_t n) {
    if (to_stride == 1 && stride == 1) {
        for (int64_t i = 0; i < rows; i++) {
            memcpy((char *)to + i * to_row * (int64_t)size,
                   (const char *)from + i * from_row * (int64_t)size, (size_t)n * size);
        }
        return;
    }
    switch (size) {
    case 1:
        COPY_ITEMS(item1)
    case 2:
        COPY_ITEMS(item2)
    case 4:
        COPY_ITEMS(item4)
    default:
        COPY_ITEMS(item8)
    }
}

/* Columns of `from` become rows of `to` through a small square, so that whole cache lines are read
 * and written even where strides are powers of two and lines evict one another. */
#define TRANSPOSE_ITEMS(T)                                       \
    {                                                            \
        T square[TILE][TILE];                                    \
        T *p = to;                                               \
        const T *q = from;                                       \
        for (int64_t j = 0; j < TILE; j++) {                     \
            memcpy(square[j], q + j * stride, sizeof square[j]); \
        }                                                        \
        for (int64_t i = 0; i < TILE; i++) {                     \
            for (int64_t j = 0; j < TILE; j++) {                 \
                p[i * to_row + j] = square[j][i];                \
            }                                                    \
        }                                                        \
        break;                                                   \
    }

/* TILE x TILE items; `to` is contiguous along j, `from` along i. */
static void transpose_items(size_t size, void *to, int64_t to_row, const void *from,
                            int64_t stride) {
    switch (size) {
    case 1:
        TRANSPOSE_ITEMS(item1)
    case 2:
        TRANSPOSE_ITEMS(item2)
    case 4:
        TRANSPOSE_ITEMS(item4)
    default:
        TRANSPOSE_ITEMS(item8)
    }
}

static void convert_run(nd_array *to, int64_t at, int64_t to_stride, const nd_array *from,
                        int64_t from_at, int64_t stride, int64_t n) {
    cpu_run buffer;
    for (int64_t i = 0; i < n; i += RUN) {
        int64_t m = min_of(RUN, n - i);
        void *p = cpu_at(to, at + i * to_stride);
        const void *q = cpu_at(from, from_at + i * stride);
        if (nd_dtype_is_float(from->dtype)) {
            cpu_load_f32(buffer.f32, q, from->dtype, stride, m);
            cpu_store_f32(p, to->dtype, to_stride, buffer.f32, m);
        } else {
            cpu_load_i64(buffer.i64, q, from->dtype, stride, m);
            cpu_store_i64(p, to->dtype, to_stride, buffer.i64, m);
        }
    }
}

/* The axis along which `from` is contiguous, when the innermost one is not it; else -1. */
static int transposed_axis(const nd_loop *loop) {
    int inner = loop->ndim - 1;
    if (magnitude(loop->strides[1][inner]) > 1 && loop->shape[inner] >= TILE) {
        for (int axis = 0; axis < inner; axis++) {
            if (magnitude(loop->strides[1][axis]) == 1 && loop->shape[axis] >= TILE) {
                return axis;
            }
        }
    }
    return -1;
}

/* The last two axes in TILE x TILE blocks; threads take a strip of TILE rows. */
static void copy_transposed(nd_array *to, const nd_array *from, const nd_loop *loop) {
    int inner = loop->ndim - 1, row = loop->ndim - 2;
    int64_t strips = cpu_ceil_div(loop->shape[row], TILE);
    nd_loop outer = *loop; /* one cursor row a matrix */
    outer.ndim = loop->ndim - 1;
    int64_t matrices = loop->size / (loop->shape[row] * loop->shape[inner]);
    size_t size = nd_dtype_size(to->dtype);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (loop->size > CPU_GRAIN)
    for (int64_t task = 0; task < matrices * strips; task++) {
        cpu_cursor cursor;
        cpu_cursor_seek(&outer, 2, task / strips, &cursor);
        int64_t i = task % strips * TILE, rows = min_of(TILE, loop->shape[row] - i);
        bool square = rows == TILE && loop->strides[0][inner] == 1 && loop->strides[1][row] == 1;
        for (int64_t j = 0; j < loop->shape[inner]; j += TILE) {
            int64_t n = min_of(TILE, loop->shape[inner] - j);
            void *p = cpu_at(to, cursor.offset[0] + i * loop->strides[0][row] +
                                     j * loop->strides[0][inner]);
            const void *q = cpu_at(from, cursor.offset[1] + i * loop->strides[1][row] +
                                             j * loop->strides[1][inner]);
            if (square && n == TILE) {
                transpose_items(size, p, loop->strides[0][row], q, loop->strides[1][inner]);
            } else {
                copy_items(size, p, loop->strides[0][row], loop->strides[0][inner], q,
                           loop->strides[1][row], loop->strides[1][inner], rows, n);
            }
        }
    }
}

nd_status cpu_assign(int device, const assign_args *args) {
    nd_array *to = args->to;
    const nd_array *from = args->source;
    const nd_array *operands[2] = {to, from};
    nd_loop loop;
    cpu_loop_make(2, operands, &loop);
    if (loop.size == 0) {
        return ND_OK;
    }
    sort_axes(&loop, 2);
    bool same = to->dtype == from->dtype;
    int axis = same ? transposed_axis(&loop) : -1;
    if (axis >= 0) {
        swap_axes(&loop, 2, axis, loop.ndim - 2);
        copy_transposed(to, from, &loop);
        return ND_OK;
    }
    int inner = loop.ndim - 1;
    int64_t row = loop.shape[inner], to_stride = loop.strides[0][inner],
            stride = loop.strides[1][inner], blocks = cpu_ceil_div(loop.size, BLOCK);
    size_t size = nd_dtype_size(to->dtype);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (blocks > 1)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * BLOCK, end = min_of(loop.size, begin + BLOCK);
        int64_t position = begin % row;
        cpu_cursor cursor;
        cpu_cursor_seek(&loop, 2, begin / row, &cursor);
        for (int64_t i = begin, n; i < end; i += n) {
            n = min_of(row - position, end - i);
            int64_t at = cursor.offset[0] + position * to_stride;
            int64_t from_at = cursor.offset[1] + position * stride;
            if (same) {
                copy_items(size, cpu_at(to, at), 0, to_stride, cpu_at(from, from_at), 0, stride, 1,
                           n);
            } else {
                convert_run(to, at, to_stride, from, from_at, stride, n);
            }
            position = 0;
            cpu_cursor_next(&loop, 2, &cursor);
        }
    }
    return ND_OK;
}

nd_status cpu_fill(int device, const fill_args *args) {
    nd_array *to = args->to;
    union {
        float f32;
        int64_t i64;
        uint8_t u8;
    } item = {.i64 = 0}; /* the value in to's dtype */
    if (nd_dtype_is_float(to->dtype)) {
        float value = (float)args->value;
        cpu_store_f32(&item, to->dtype, 1, &value, 1);
    } else if (to->dtype == ND_BOOL) {
        item.u8 = args->value != 0;
    } else {
        int64_t value = (int64_t)args->value;
        cpu_store_i64(&item, to->dtype, 1, &value, 1);
    }
    const nd_array *operands[1] = {to};
    nd_loop loop;
    cpu_loop_make(1, operands, &loop);
    sort_axes(&loop, 1);
    int inner = loop.ndim - 1;
    int64_t row = loop.shape[inner], stride = loop.strides[0][inner],
            blocks = cpu_ceil_div(loop.size, BLOCK);
    size_t size = nd_dtype_size(to->dtype);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (blocks > 1)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t begin = block * BLOCK, end = min_of(loop.size, begin + BLOCK);
        int64_t position = begin % row;
        cpu_cursor cursor;
        cpu_cursor_seek(&loop, 1, begin / row, &cursor);
        for (int64_t i = begin, n; i < end; i += n) {
            n = min_of(row - position, end - i);
            copy_items(size, cpu_at(to, cursor.offset[0] + position * stride), 0, stride, &item, 0,
                       0, 1, n);
            position = 0;
            cpu_cursor_next(&loop, 1, &cursor);
        }
    }
    return ND_OK;
}
