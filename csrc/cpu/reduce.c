/* reduce.c - the RED and ARG ops of ops.def: reductions over the last `axes` axes of any view.
 *
 * A kernel reduces one run of contiguous values in LANES independent lanes (float32, or int64),
 * which the compiler keeps in vector registers; runs of RUN values are combined in float64 (or
 * int64), so that the error does not grow with the length. Other dtypes and strides are loaded into
 * a buffer first. When the values that stay are contiguous and those reduced are not (a sum over
 * rows), whole rows are added up instead.
 * Threads take outputs; when there are few outputs with many values each, they take chunks of
 * CHUNK values, whose results are combined in their order.
 */
#include "cpu.h"

enum { LANES = 64, RUN = CPU_RUN, CHUNK = 65536, COLUMNS = 256, ROWS = 512 };
enum { AHEAD = 4096 }; /* bytes; the processor's own foresight ends with a page */

/* Combine n values into *result. */
typedef void (*reduce_f32_fn)(double *result, const float *values, int64_t n);
typedef void (*reduce_i64_fn)(int64_t *result, const int64_t *values, int64_t n);
/* sums[j] = combine(sums[j], map(values[j])) */
typedef void (*columns_fn)(float *restrict sums, const float *restrict values, int64_t n);
typedef struct {
    double start_f32;
    int64_t start_i64;
    reduce_f32_fn run_f32;
    reduce_i64_fn run_i64; /* NULL: FLOAT op */
    void (*join)(double *result, double with);
    columns_fn columns;
} reduction;

/* The view split into the axes that stay and those reduced. */
typedef struct {
    const nd_array *x;
    nd_loop kept, reduced;
} geometry;

static void geometry_make(const nd_array *x, int64_t axes, geometry *g) {
    int split = x->ndim - (int)axes;
    nd_array part = *x;
    const nd_array *operand[1] = {&part};
    g->x = x;
    part.ndim = split;
    cpu_loop_make(1, operand, &g->kept);
    part.ndim = (int)axes;
    memcpy(part.shape, x->shape + split, sizeof(int64_t) * (size_t)axes);
    memcpy(part.strides, x->strides + split, sizeof(int64_t) * (size_t)axes);
    cpu_loop_make(1, operand, &g->reduced);
}

static int64_t row_offset(const nd_loop *loop, int64_t index) {
    cpu_cursor cursor;
    int axis = loop->ndim - 1;
    cpu_cursor_seek(loop, 1, index / loop->shape[axis], &cursor);
    return cursor.offset[0] + index % loop->shape[axis] * loop->strides[0][axis];
}

/* Values [begin, end) of the reduced axes of one output. */
static void reduce_range(const geometry *g, const reduction *r, bool floats, int64_t base,
                         int64_t begin, int64_t end, void *result) {
    if (begin == end) {
        return;
    }
    cpu_run buffer;
    const nd_loop *loop = &g->reduced;
    int axis = loop->ndim - 1;
    int64_t inner = loop->shape[axis], stride = loop->strides[0][axis], position = begin % inner;
    cpu_cursor cursor;
    cpu_cursor_seek(loop, 1, begin / inner, &cursor);
    for (int64_t i = begin; i < end;) {
        int64_t filled = 0;
        const void *values = &buffer;
        while (filled < RUN && i < end) {
            int64_t n = min_of(min_of(inner - position, end - i), RUN - filled);
            int64_t at = base + cursor.offset[0] + position * stride;
            bool in_place = floats && filled == 0 && stride == 1 && g->x->dtype == ND_F32 &&
                            (n == RUN || i + n == end);
            if (in_place) {
                values = cpu_at(g->x, at);
            } else if (floats) {
                cpu_load_f32(buffer.f32 + filled, cpu_at(g->x, at), g->x->dtype, stride, n);
            } else {
                cpu_load_i64(buffer.i64 + filled, cpu_at(g->x, at), g->x->dtype, stride, n);
            }
            filled += n;
            i += n;
            position += n;
            if (position == inner) {
                position = 0;
                cpu_cursor_next(loop, 1, &cursor);
            }
        }
        if (floats) {
            r->run_f32(result, values, filled);
        } else {
            r->run_i64(result, values, filled);
        }
    }
}

static void store_result(nd_array *out, int64_t at, bool floats, const void *result) {
    if (floats) {
        float value = (float)*(const double *)result;
        cpu_store_f32(cpu_at(out, at), out->dtype, 1, &value, 1);
    } else {
        cpu_store_i64(cpu_at(out, at), out->dtype, 1, result, 1);
    }
}

/* Sum over rows: COLUMNS outputs at a time, ROWS rows in float32, then in float64. */
static void reduce_columns(const geometry *g, const reduction *r, nd_array *out) {
    int64_t length = g->kept.shape[g->kept.ndim - 1], rows = g->reduced.size;
    int64_t blocks = cpu_ceil_div(length, COLUMNS);
    int64_t tasks = g->kept.size / length * blocks;

#pragma omp parallel for schedule(static) \
    num_threads(cpu_threads()) if (g->kept.size * rows > CPU_GRAIN)
    for (int64_t task = 0; task < tasks; task++) {
        _Alignas(64) float sums[COLUMNS], buffer[COLUMNS];
        double totals[COLUMNS];
        int64_t first = task / blocks * length + task % blocks * COLUMNS;
        int64_t n = min_of(COLUMNS, length - task % blocks * COLUMNS);
        int64_t base = row_offset(&g->kept, first);
        int axis = g->reduced.ndim - 1;
        int64_t inner = g->reduced.shape[axis], stride = g->reduced.strides[0][axis];
        cpu_cursor cursor;
        cpu_cursor_seek(&g->reduced, 1, 0, &cursor);
        for (int64_t j = 0; j < n; j++) {
            totals[j] = r->start_f32;
        }
        for (int64_t row = 0, position = 0; row < rows;) {
            for (int64_t j = 0; j < n; j++) {
                sums[j] = (float)r->start_f32;
            }
            for (int64_t end = min_of(rows, row + ROWS); row < end; row++) {
                r->columns(sums,
                           cpu_read(g->x, base + cursor.offset[0] + position * stride, n, buffer),
                           n);
                if (++position == inner) {
                    position = 0;
                    cpu_cursor_next(&g->reduced, 1, &cursor);
                }
            }
            for (int64_t j = 0; j < n; j++) {
                r->join(&totals[j], sums[j]);
            }
        }
        for (int64_t j = 0; j < n; j++) {
            store_result(out, first + j, true, &totals[j]);
        }
    }
}

static nd_status reduce_chunks(int device, const geometry *g, const reduction *r, bool floats,
                               nd_array *out) {
    int64_t outputs = g->kept.size, size = g->reduced.size, chunks = cpu_ceil_div(size, CHUNK);
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)(outputs * chunks) * sizeof(int64_t), &scratch));

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (outputs * size > CPU_GRAIN)
    for (int64_t task = 0; task < outputs * chunks; task++) {
        char *result = (char *)scratch + task * (int64_t)sizeof(int64_t);
        memcpy(result, floats ? (const void *)&r->start_f32 : (const void *)&r->start_i64,
               sizeof(int64_t));
        int64_t begin = task % chunks * CHUNK;
        reduce_range(g, r, floats, row_offset(&g->kept, task / chunks), begin,
                     min_of(size, begin + CHUNK), result);
    }
    for (int64_t i = 0; i < outputs; i++) {
        char *first = (char *)scratch + i * chunks * (int64_t)sizeof(int64_t);
        for (int64_t chunk = 1; chunk < chunks; chunk++) {
            if (floats) {
                r->join((double *)first, ((double *)first)[chunk]);
            } else {
                r->run_i64((int64_t *)first, (int64_t *)first + chunk, 1);
            }
        }
        store_result(out, i, floats, first);
    }
    return ND_OK;
}

static nd_status reduce(int device, const char *name, const nd_array *x, int64_t axes,
                        nd_array *out, const reduction *r) {
    bool floats = r->run_i64 == NULL || nd_dtype_is_float(x->dtype);
    if (axes < 0 || axes > x->ndim) {
        return nd_error(ND_EVALUE, "%s: axes: %lld of %d axes cannot be reduced", name,
                        (long long)axes, x->ndim);
    }
    if (floats && !nd_dtype_is_float(x->dtype)) {
        return nd_error(ND_ETYPE, "%s: x: needs a float dtype, not %s", name,
                        nd_dtype_name(x->dtype));
    }
    geometry g;
    geometry_make(x, axes, &g);
    int64_t outputs = g.kept.size, size = g.reduced.size;
    if (outputs == 0) {
        return ND_OK;
    }
    int64_t kept_stride = g.kept.strides[0][g.kept.ndim - 1];
    int64_t inner_stride = g.reduced.strides[0][g.reduced.ndim - 1];
    if (floats && size > 1 && kept_stride == 1 && inner_stride != 1 &&
        g.kept.shape[g.kept.ndim - 1] >= 16) {
        reduce_columns(&g, r, out);
        return ND_OK;
    }
    if (size > CHUNK) {
        return reduce_chunks(device, &g, r, floats, out);
    }
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (outputs * size > CPU_GRAIN)
    for (int64_t i = 0; i < outputs; i++) {
        union {
            double f32;
            int64_t i64;
        } result;
        if (floats) {
            result.f32 = r->start_f32;
        } else {
            result.i64 = r->start_i64;
        }
        reduce_range(&g, r, floats, row_offset(&g.kept, i), 0, size, &result);
        store_result(out, i, floats, &result);
    }
    return ND_OK;
}

/* A kernel in lanes: T the values' type, R the result's. `map` sees x, `combine` sees a and b. */
#define RUN_KERNEL(function, T, R, start, combine, map)           \
    static void function(R *result, const T *values, int64_t n) { \
        T lanes[LANES];                                           \
        int64_t i = 0;                                            \
        R total = *result;                                        \
        if (n >= LANES) {                                         \
            for (int l = 0; l < LANES; l++) {                     \
                const T x = values[l];                            \
                lanes[l] = (map);                                 \
            }                                                     \
            for (i = LANES; i + LANES <= n; i += LANES) {         \
                for (size_t b = 0; b < sizeof lanes; b += 64) {   \
                    const char *at = (const char *)(values + i);  \
                    __builtin_prefetch(at + AHEAD + b);           \
                }                                                 \
                for (int l = 0; l < LANES; l++) {                 \
                    const T x = values[i + l];                    \
                    const T a = lanes[l], b = (map);              \
                    lanes[l] = (combine);                         \
                }                                                 \
            }                                                     \
            for (int half = LANES / 2; half > 0; half /= 2) {     \
                for (int l = 0; l < half; l++) {                  \
                    const T a = lanes[l], b = lanes[l + half];    \
                    lanes[l] = (combine);                         \
                }                                                 \
            }                                                     \
            const R a = total, b = lanes[0];                      \
            total = (combine);                                    \
        }                                                         \
        for (; i < n; i++) {                                      \
            const T x = values[i];                                \
            const R a = total, b = (map);                         \
            total = (combine);                                    \
        }                                                         \
        *result = total;                                          \
    }

#define INTEGERS_FLOAT(name, start, combine, map)
#define INTEGERS_ANY(name, start, combine, map) \
    RUN_KERNEL(name##_i64, int64_t, int64_t, start, combine, map)
#define INTEGERS_FN_FLOAT(name) NULL
#define INTEGERS_FN_ANY(name) name##_i64
/* The lowest and the highest value of ops.def, as float and as integer. */
#define AS_FLOAT_0 0
#define AS_FLOAT_ND_LOWEST -INFINITY
#define AS_FLOAT_ND_HIGHEST INFINITY
#define AS_INTEGER_0 0
#define AS_INTEGER_ND_LOWEST INT64_MIN
#define AS_INTEGER_ND_HIGHEST INT64_MAX

#define RED(name, types, start, combine, map)                               \
    RUN_KERNEL(name##_f32, float, double, start, combine, map)              \
    INTEGERS_##types(name, start, combine, map) static void name##_columns( \
        float *restrict sums, const float *restrict values, int64_t n) {    \
        for (int64_t j = 0; j < n; j++) {                                   \
            const float x = values[j];                                      \
            const float a = sums[j], b = (map);                             \
            sums[j] = (combine);                                            \
        }                                                                   \
    }                                                                       \
    static void name##_join(double *result, double with) {                  \
        const double a = *result, b = with;                                 \
        *result = (combine);                                                \
    }                                                                       \
    nd_status cpu_##name(int device, const name##_args *args) {             \
        static const reduction r = {                                        \
            AS_FLOAT_##start,          AS_INTEGER_##start, name##_f32,      \
            INTEGERS_FN_##types(name), name##_join,        name##_columns}; \
        return reduce(device, #name, args->x, args->axes, args->out, &r);   \
    }

/* ---- argmax, argmin: one pass, first best wins, the first NaN beats everything (as in NumPy) - */
typedef int64_t (*find_f32_fn)(float *best, const float *values, int64_t n);
typedef int64_t (*find_i64_fn)(int64_t *best, const int64_t *values, int64_t n);

static nd_status find(const char *name, const nd_array *x, int64_t axes, nd_array *out,
                      find_f32_fn find_f32, find_i64_fn find_i64) {
    if (axes < 0 || axes > x->ndim) {
        return nd_error(ND_EVALUE, "%s: axes: %lld of %d axes cannot be reduced", name,
                        (long long)axes, x->ndim);
    }
    geometry g;
    geometry_make(x, axes, &g);
    int64_t size = g.reduced.size;
    bool floats = nd_dtype_is_float(x->dtype);
    if (g.kept.size > 0 && size == 0) {
        return nd_error(ND_EVALUE, "%s: x: there is no best of zero elements", name);
    }
#pragma omp parallel for schedule(static) \
    num_threads(cpu_threads()) if (g.kept.size * size > CPU_GRAIN)
    for (int64_t i = 0; i < g.kept.size; i++) {
        cpu_run buffer;
        union {
            float f32;
            int64_t i64;
        } best = {0};
        const nd_loop *loop = &g.reduced;
        int axis = loop->ndim - 1;
        int64_t inner = loop->shape[axis], stride = loop->strides[0][axis];
        int64_t base = row_offset(&g.kept, i), winner = 0;
        cpu_cursor cursor;
        cpu_cursor_seek(loop, 1, 0, &cursor);
        for (int64_t at = 0, position = 0, n; at < size; at += n) {
            n = min_of(RUN, inner - position);
            const void *from = cpu_at(x, base + cursor.offset[0] + position * stride);
            int64_t found;
            if (floats) {
                cpu_load_f32(buffer.f32, from, x->dtype, stride, n);
                best.f32 = at == 0 ? buffer.f32[0] : best.f32;
                found = find_f32(&best.f32, buffer.f32, n);
            } else {
                cpu_load_i64(buffer.i64, from, x->dtype, stride, n);
                best.i64 = at == 0 ? buffer.i64[0] : best.i64;
                found = find_i64(&best.i64, buffer.i64, n);
            }
            winner = found >= 0 ? at + found : winner;
            position += n;
            if (position == inner) {
                position = 0;
                cpu_cursor_next(loop, 1, &cursor);
            }
        }
        cpu_store_i64(cpu_at(out, i), out->dtype, 1, &winner, 1);
    }
    return ND_OK;
}

#define FIND_KERNEL(function, T, better)                           \
    static int64_t function(T *best, const T *values, int64_t n) { \
        T b = *best;                                               \
        int64_t winner = -1;                                       \
        for (int64_t i = 0; i < n; i++) {                          \
            const T a = values[i];                                 \
            if ((better) || (a != a && b == b)) {                  \
                b = a;                                             \
                winner = i;                                        \
            }                                                      \
        }                                                          \
        *best = b;                                                 \
        return winner;                                             \
    }

#define ARG(name, better)                                                           \
    FIND_KERNEL(name##_f32, float, better)                                          \
    FIND_KERNEL(name##_i64, int64_t, better)                                        \
    nd_status cpu_##name(int device, const name##_args *args) {                     \
        return find(#name, args->x, args->axes, args->out, name##_f32, name##_i64); \
    }
#include "../ops.def"
