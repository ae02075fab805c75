/* elementwise.c - the EW1, EW2 and CMP ops of ops.def: out = formula(x, y), element by element.
 *
 * Each becomes one small loop over contiguous float32 (and one over int64 for those of type ANY)
 * that the compiler vectorises; the driver below brings every dtype, stride and scalar into that
 * form, at most RUN elements at a time, so that temporaries stay in the first-level cache. float32
 * runs with unit stride are read and written in place. Outputs are contiguous.
 * Threads take blocks of BLOCK elements.
 */
#include "cpu.h"

enum { RUN = CPU_RUN, BLOCK = 32768, SHORT_ROW = 128 };

typedef enum { VECTOR_VECTOR, VECTOR_SCALAR, SCALAR_VECTOR } operand_mode;

/* xs or ys points to a single value in the scalar modes; a formula of one operand ignores y. */
typedef void (*apply_fn)(void *out, const void *xs, const void *ys, operand_mode mode, int64_t n);

#define LOOP_OF_ONE(function, T, O, formula)                                              \
    static void function(void *out_, const void *xs_, const void *ys_, operand_mode mode, \
                         int64_t n) {                                                     \
        O *restrict out = out_;                                                           \
        const T *restrict xs = xs_;                                                       \
        for (int64_t i = 0; i < n; i++) {                                                 \
            const T x = xs[i];                                                            \
            out[i] = (O)(formula);                                                        \
        }                                                                                 \
    }

#define LOOP_OF_TWO(function, T, O, formula)                                              \
    static void function(void *out_, const void *xs_, const void *ys_, operand_mode mode, \
                         int64_t n) {                                                     \
        O *restrict out = out_;                                                           \
        const T *restrict xs = xs_, *restrict ys = ys_;                                   \
        if (mode == VECTOR_VECTOR) {                                                      \
            for (int64_t i = 0; i < n; i++) {                                             \
                const T x = xs[i], y = ys[i];                                             \
                out[i] = (O)(formula);                                                    \
            }                                                                             \
        } else if (mode == VECTOR_SCALAR) {                                               \
            const T y = *ys;                                                              \
            for (int64_t i = 0; i < n; i++) {                                             \
                const T x = xs[i];                                                        \
                out[i] = (O)(formula);                                                    \
            }                                                                             \
        } else {                                                                          \
            const T x = *xs;                                                              \
            for (int64_t i = 0; i < n; i++) {                                             \
                const T y = ys[i];                                                        \
                out[i] = (O)(formula);                                                    \
            }                                                                             \
        }                                                                                 \
    }

typedef struct {
    const nd_array *array; /* NULL: the scalar */
    double scalar;
} operand;

/* One operand of a run: its values, either in place, or loaded into `buffer`, or one scalar. */
typedef struct {
    const nd_array *array;
    const int64_t *strides; /* per axis of the loop */
    bool constant;          /* one value for the whole op: in buffer[0] */
    void *buffer;
} source;

static void load(void *to, const nd_array *a, int64_t offset, int64_t stride, int64_t n,
                 bool floats) {
    if (floats) {
        cpu_load_f32(to, cpu_at(a, offset), a->dtype, stride, n);
    } else {
        cpu_load_i64(to, cpu_at(a, offset), a->dtype, stride, n);
    }
}

static bool start_source(source *s, operand from, const int64_t *strides, int ndim, bool floats,
                         void *buffer) {
    s->array = from.array;
    s->strides = strides;
    s->buffer = buffer;
    s->constant = true;
    for (int axis = 0; axis < ndim; axis++) {
        s->constant = s->constant && strides[axis] == 0;
    }
    if (from.array == NULL) {
        if (floats) {
            *(float *)buffer = (float)from.scalar;
        } else {
            *(int64_t *)buffer = (int64_t)from.scalar;
        }
    } else if (s->constant) {
        load(buffer, from.array, 0, 0, 1, floats);
    }
    return s->constant;
}

/* Spread the first value of a buffer over n. */
static void spread(void *buffer, bool floats, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        if (floats) {
            ((float *)buffer)[i] = *(float *)buffer;
        } else {
            ((int64_t *)buffer)[i] = *(int64_t *)buffer;
        }
    }
}

/* n elements from inside one row; *scalar says that all are the one returned. */
static const void *row_values(const source *s, int axis, int64_t row, int64_t position, int64_t n,
                              bool floats, bool *scalar) {
    int64_t stride = s->strides[axis];
    *scalar = s->constant || stride == 0;
    if (s->constant) {
        return s->buffer;
    }
    int64_t offset = row + position * stride;
    if (floats && s->array->dtype == ND_F32 && (stride == 1 || stride == 0)) {
        return cpu_at(s->array, offset);
    }
    load(s->buffer, s->array, offset, stride, stride == 0 ? 1 : n, floats);
    return s->buffer;
}

static void block_of_long_rows(const nd_loop *loop, source *sources, apply_fn apply, bool floats,
                               bool unary, nd_array *out, bool direct, void *result, int64_t begin,
                               int64_t end) {
    int axis = loop->ndim - 1;
    int64_t inner = loop->shape[axis];
    int64_t position = begin % inner;
    cpu_cursor cursor;
    cpu_cursor_seek(loop, 3, begin / inner, &cursor);
    for (int64_t i = begin, n; i < end; i += n) {
        n = min_of(min_of(RUN, inner - position), end - i);
        bool x_scalar, y_scalar = true;
        const void *x =
            row_values(&sources[0], axis, cursor.offset[1], position, n, floats, &x_scalar);
        const void *y =
            unary ? NULL
                  : row_values(&sources[1], axis, cursor.offset[2], position, n, floats, &y_scalar);
        if (x_scalar && y_scalar) {
            size_t size = floats ? sizeof(float) : sizeof(int64_t);
            if (x != sources[0].buffer) {
                memcpy(sources[0].buffer, x, size);
            }
            x = sources[0].buffer;
            spread(sources[0].buffer, floats, n);
            x_scalar = false;
        }
        void *to = direct ? cpu_at(out, i) : result;
        apply(to, x, y, x_scalar ? SCALAR_VECTOR : y_scalar ? VECTOR_SCALAR : VECTOR_VECTOR, n);
        if (!direct && floats) {
            cpu_store_f32(cpu_at(out, i), out->dtype, 1, result, n);
        } else if (!direct) {
            cpu_store_i64(cpu_at(out, i), out->dtype, 1, result, n);
        }
        position += n;
        if (position == inner) {
            position = 0;
            cpu_cursor_next(loop, 3, &cursor);
        }
    }
}

/* Rows too short to be worth a run of their own are gathered, many to a run. */
static void block_of_short_rows(const nd_loop *loop, source *sources, apply_fn apply, bool floats,
                                bool unary, nd_array *out, bool direct, void *result, int64_t begin,
                                int64_t end) {
    int axis = loop->ndim - 1;
    int64_t inner = loop->shape[axis];
    int64_t position = begin % inner;
    size_t size = floats ? sizeof(float) : sizeof(int64_t);
    int count = unary ? 1 : 2;
    cpu_cursor cursor;
    cpu_cursor_seek(loop, 3, begin / inner, &cursor);
    for (int64_t i = begin, n; i < end; i += n) {
        n = min_of(RUN, end - i);
        for (int64_t filled = 0, part; filled < n; filled += part) {
            part = min_of(inner - position, n - filled);
            for (int k = 0; k < count; k++) {
                const source *s = &sources[k];
                if (!s->constant) {
                    load((char *)s->buffer + (size_t)filled * size, s->array,
                         cursor.offset[k + 1] + position * s->strides[axis], s->strides[axis], part,
                         floats);
                }
            }
            position += part;
            if (position == inner) {
                position = 0;
                cpu_cursor_next(loop, 3, &cursor);
            }
        }
        bool x_scalar = sources[0].constant, y_scalar = unary || sources[1].constant;
        if (x_scalar && y_scalar) {
            spread(sources[0].buffer, floats, n);
            x_scalar = false;
        }
        void *to = direct ? cpu_at(out, i) : result;
        apply(to, sources[0].buffer, sources[1].buffer,
              x_scalar   ? SCALAR_VECTOR
              : y_scalar ? VECTOR_SCALAR
                         : VECTOR_VECTOR,
              n);
        if (!direct && floats) {
            cpu_store_f32(cpu_at(out, i), out->dtype, 1, result, n);
        } else if (!direct) {
            cpu_store_i64(cpu_at(out, i), out->dtype, 1, result, n);
        }
    }
}

/* `compare`: the loop itself writes bool. `integers` is NULL for ops of type FLOAT. */
static nd_status elementwise(const char *name, operand x, operand y, bool unary, bool compare,
                             apply_fn floats_apply, apply_fn integers_apply, nd_array *out) {
    bool floats = integers_apply == NULL || (x.array && nd_dtype_is_float(x.array->dtype)) ||
                  (y.array && nd_dtype_is_float(y.array->dtype));
    if (integers_apply == NULL && !nd_dtype_is_float(out->dtype)) {
        return nd_error(ND_ETYPE, "%s: x: needs a float dtype, not %s", name,
                        nd_dtype_name(out->dtype));
    }
    nd_loop loop;
    const nd_array *operands[3] = {out, x.array, y.array};
    cpu_loop_make(3, operands, &loop);
    bool direct = compare || (floats && out->dtype == ND_F32) || (!floats && out->dtype == ND_I64);
    apply_fn apply = floats ? floats_apply : integers_apply;
    int64_t blocks = cpu_ceil_div(loop.size, BLOCK);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (blocks > 1)
    for (int64_t block = 0; block < blocks; block++) {
        cpu_run buffers[3];
        source sources[2];
        start_source(&sources[0], x, loop.strides[1], loop.ndim, floats, &buffers[0]);
        if (!unary) {
            start_source(&sources[1], y, loop.strides[2], loop.ndim, floats, &buffers[1]);
        } else {
            sources[1] = (source){.buffer = &buffers[1]};
        }
        int64_t begin = block * BLOCK, end = min_of(loop.size, begin + BLOCK);
        bool short_rows = loop.ndim > 1 && loop.shape[loop.ndim - 1] < SHORT_ROW;
        (short_rows ? block_of_short_rows : block_of_long_rows)(
            &loop, sources, apply, floats, unary, out, direct, &buffers[2], begin, end);
    }
    return ND_OK;
}

#define INTEGER_FLOAT(kind, name, formula)
#define INTEGER_ANY(kind, name, formula) kind(name##_i64, int64_t, int64_t, formula)
#define INTEGER_WHOLE INTEGER_ANY
#define INTEGER_FN_FLOAT(name) NULL
#define INTEGER_FN_ANY(name) name##_i64
#define INTEGER_FN_WHOLE(name) name##_i64

#define EW1(name, types, formula)                                                              \
    INTEGER_##types(LOOP_OF_ONE, name, formula) LOOP_OF_ONE(name##_f32, float, float, formula) \
        nd_status cpu_##name(int device, const name##_args *args) {                            \
        return elementwise(#name, (operand){args->x, 0}, (operand){NULL, 0}, true, false,      \
                           name##_f32, INTEGER_FN_##types(name), args->out);                   \
    }
#define EW2(name, types, formula)                                                              \
    INTEGER_##types(LOOP_OF_TWO, name, formula) LOOP_OF_TWO(name##_f32, float, float, formula) \
        nd_status cpu_##name(int device, const name##_args *args) {                            \
        return elementwise(#name, (operand){args->x, args->x_scalar},                          \
                           (operand){args->y, args->y_scalar}, false, false, name##_f32,       \
                           INTEGER_FN_##types(name), args->out);                               \
    }
#define CMP(name, formula)                                                              \
    LOOP_OF_TWO(name##_f32, float, uint8_t, formula)                                    \
    LOOP_OF_TWO(name##_i64, int64_t, uint8_t, formula)                                  \
    nd_status cpu_##name(int device, const name##_args *args) {                         \
        return elementwise(#name, (operand){args->x, args->x_scalar},                   \
                           (operand){args->y, args->y_scalar}, false, true, name##_f32, \
                           name##_i64, args->out);                                      \
    }
#include "../ops.def"
