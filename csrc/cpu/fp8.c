/* fp8.c - FP8 for training: fp8_quantize, fp8_layer_weights, fp8_matmul, fp8_linear_gelu_fwd and
 * _bwd, fp8_cross_entropy.
 *
 *   quantize       scale from the largest |x|, q = v / scale of v = x, gelu(x) or x dgelu, and its
 *                  transpose
 *   layer_weights  that of four weights, and a bound of GELU's argument
 *   matmul         c = r + scales a b^T + bias
 *   linear_gelu    products and GELU, quantized at their ends: the two above, in float32 between
 *   cross_entropy  logits = scale x w^T, their losses, d = 2^15 (softmax - onehot) in e5m2
 * Operands of a product become bfloat16, which holds each number of FP8, and matmul.c multiplies.
 * The loss takes ROWS rows at a time, whose float32 logits cross_entropy.c turns into their
 * gradient. Threads take strips of rows; the largest |x| is found among bits, in any order.
 */
#include "../fp8.h"

#include "cpu.h"

enum { ROWS = 128, STRIP = 16, SUMMED = 128 };

/* b^T of a matrix b. */
static nd_array transposed(const nd_array *b) {
    nd_array t = *b;
    for (int axis = 0; axis < 2; axis++) {
        t.shape[axis] = b->shape[1 - axis];
        t.strides[axis] = b->strides[1 - axis];
    }
    return t;
}

static nd_array matrix_of(void *data, nd_dtype dtype, int64_t rows, int64_t columns) {
    nd_array a = {.data = data, .dtype = dtype, .ndim = 2, .shape = {rows, columns}};
    nd_contiguous_strides(a.ndim, a.shape, a.strides);
    return a;
}

/* to[j, i] = from[i, j]; rows of `to` are `stride` bytes apart. */
static void transpose(const uint8_t *from, int64_t rows, int64_t columns, uint8_t *to,
                      int64_t stride) {
    for (int64_t j = 0; j < columns; j++) {
        for (int64_t i = 0; i < rows; i++) {
            to[j * stride + i] = from[i * columns + j];
        }
    }
}

/* ---- fp8_quantize ---------------------------------------------------------------------------- */
uint32_t cpu_largest_bits(const nd_array *x) {
    const nd_array *operands[1] = {x};
    nd_loop loop;
    cpu_loop_make(1, operands, &loop);
    int64_t row = loop.shape[loop.ndim - 1], stride = loop.strides[0][loop.ndim - 1];
    int64_t runs = cpu_ceil_div(row, CPU_RUN), rows = row > 0 ? loop.size / row : 0;
    uint32_t largest = 0;

#pragma omp parallel for reduction(max        \
                                   : largest) \
    num_threads(cpu_threads()) if (loop.size > CPU_GRAIN)
    for (int64_t task = 0; task < rows * runs; task++) {
        cpu_cursor cursor;
        cpu_run some;
        int64_t begin = task % runs * CPU_RUN, run = min_of(CPU_RUN, row - begin);
        cpu_cursor_seek(&loop, 1, task / runs, &cursor);
        cpu_load_f32(some.f32, cpu_at(x, cursor.offset[0] + begin * stride), x->dtype, stride, run);
        for (int64_t k = 0; k < run; k++) {
            uint32_t bits = nd_float_bits(some.f32[k]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
    }
    return largest;
}

nd_status cpu_fp8_quantize(int device, const fp8_quantize_args *args) {
    int64_t n = args->x->shape[0], c = args->x->shape[1];
    uint8_t *q = args->q->data, *q_t = args->q_t->data;
    bool tanh = args->gelu == 2, gradient = args->dgelu && !args->gelu;
    ND_TRY(nd_check_fp8_quantize(args->x, args->gelu, args->dgelu, args->scale_a, args->scale_b,
                                 args->sums));
    float largest = args->largest && n * c > 0 ? *(const float *)args->largest->data
                                               : nd_bits_float(cpu_largest_bits(args->x));
    if (args->scale_a && n * c > 0) {
        const float *a = args->scale_a->data, *b = args->scale_b->data;
        largest = fabsf((float)args->bound * *a * *b);
    }
    bool e5m2 = args->e5m2 != 0;
    float scale = gradient ? nd_fp8_gradient_scale(largest, e5m2)
                           : nd_fp8_scale(nd_float_bits(largest), e5m2);
    float times = 1.0f / scale;
    *(float *)args->scale->data = scale;

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t i = 0; i < n; i += SUMMED) {
        int64_t rows = min_of(SUMMED, n - i), to = (i + rows) * c;
        float *sums = args->sums ? (float *)args->sums->data + i / SUMMED * c : NULL;
        if (sums) {
            memset(sums, 0, (size_t)c * sizeof *sums);
        }
        for (int64_t at = i * c; at < to; at += CPU_RUN) {
            cpu_run from, more;
            float made[CPU_RUN];
            int64_t run = min_of(CPU_RUN, to - at);
            const float *v = cpu_read(args->x, at, run, from.f32);
            if (args->gelu) {
                float *slope = args->dgelu ? cpu_target(args->dgelu, at, more.f32) : more.f32;
                for (int64_t k = 0; k < run; k++) {
                    float grad;
                    made[k] =
                        tanh ? nd_gelu_tanh_and_grad(v[k], &grad) : nd_gelu_and_grad(v[k], &grad);
                    slope[k] = grad;
                }
                if (args->dgelu) {
                    cpu_write(args->dgelu, at, run, slope);
                }
                v = made;
            } else if (gradient) {
                const float *slope = cpu_read(args->dgelu, at, run, more.f32);
                for (int64_t k = 0; k < run; k++) {
                    made[k] = v[k] * slope[k];
                }
                v = made;
            }
            for (int64_t k = 0; k < run && sums; k++) {
                sums[(at + k) % c] += v[k];
            }
            for (int64_t k = 0; k < run; k++) { /* all NaN where the scale is */
                q[at + k] = e5m2 ? nd_to_e5m2(v[k] * times) : nd_to_e4m3(v[k] * times);
            }
        }
        transpose(q + i * c, rows, c, q_t + i, n);
    }
    return ND_OK;
}

/* ---- fp8_layer_weights ----------------------------------------------------------------------- */
/* to[j] = the sum of squares of column j of x, row i times factors[i]. */
static void column_squares(const nd_array *x, const float *factors, float *to) {
    int64_t n = x->shape[0], c = x->shape[1];

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t j = 0; j < c; j += CPU_RUN) {
        cpu_run some;
        int64_t run = min_of(CPU_RUN, c - j);
        memset(to + j, 0, (size_t)run * sizeof *to);
        for (int64_t i = 0; i < n; i++) {
            const float *v = cpu_read(x, i * c + j, run, some.f32);
            for (int64_t k = 0; k < run; k++) {
                float factor = v[k] * factors[i];
                to[j + k] += factor * factor;
            }
        }
    }
}

nd_status cpu_fp8_layer_weights(int device, const fp8_layer_weights_args *args) {
    int64_t c = args->w1->shape[0], m = args->w1->shape[1];
    fp8_quantize_args of[4] = {
        {.x = args->w_qkv, .q = args->q_qkv, .q_t = args->q_qkv_t, .scale = args->scale_qkv},
        {.x = args->w_o, .q = args->q_o, .q_t = args->q_o_t, .scale = args->scale_o},
        {.x = args->w1, .q = args->q1, .q_t = args->q1_t, .scale = args->scale1},
        {.x = args->w2, .q = args->q2, .q_t = args->q2_t, .scale = args->scale2},
    };
    ND_TRY(nd_check_fp8_layer_weights(args->w_qkv, args->w_o, args->w1));
    for (int i = 0; i < 4; i++) {
        ND_TRY(cpu_fp8_quantize(device, &of[i]));
    }
    void *scratch;
    ND_TRY(cpu_scratch(device, (size_t)(m + 3 * c) * sizeof(float), &scratch));
    float *squares = scratch, *factors = squares + m;
    const float *norm_w = cpu_read(args->norm_w, 0, c, factors + c);
    const float *norm_b = cpu_read(args->norm_b, 0, c, factors + 2 * c);
    for (int64_t i = 0; i < c; i++) {
        factors[i] = sqrtf(norm_w[i] * norm_w[i] + norm_b[i] * norm_b[i]);
    }
    column_squares(args->w1, factors, squares);
    nd_array of_w1 = matrix_of(squares, ND_F32, 1, m);
    const nd_array *const of_bound[5] = {args->norm_w, args->norm_b, args->w1, &of_w1, args->b1};
    float largest[5];
    for (int i = 0; i < 5; i++) {
        largest[i] = nd_bits_float(cpu_largest_bits(of_bound[i]));
    }
    *(float *)args->bound->data =
        nd_layer_bound(largest[0], largest[1], largest[2], largest[3], largest[4], c);
    return ND_OK;
}

/* ---- fp8_matmul ------------------------------------------------------------------------------ */
/* `to`: q as bfloat16, in memory that the caller releases. */
static nd_status decode(int device, const nd_array *q, bool e5m2, nd_array *to) {
    int64_t n = nd_size(q);
    const uint8_t *from = q->data;
    void *memory;
    ND_TRY(cpu_allocate(device, (size_t)n * sizeof(uint16_t), &memory));
    *to = matrix_of(memory, ND_BF16, q->shape[0], q->shape[1]);
    uint16_t table[256], *values = memory;
    for (int i = 0; i < 256; i++) {
        table[i] = cpu_to_bf16(e5m2 ? nd_from_e5m2((uint8_t)i) : nd_from_e4m3((uint8_t)i));
    }

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        values[i] = table[from[i]];
    }
    return ND_OK;
}

/* c = scale a b^T, all of them float32 or bfloat16, with `add` c += it in float32. */
static nd_status multiply(int device, const nd_array *a, const nd_array *b, const nd_array *scale,
                          bool add, nd_array *c) {
    nd_array b_t = transposed(b);
    matmul_acc_args product = {.a = a, .b = &b_t, .scale = scale, .add = add, .c = c};
    return cpu_matmul_acc(device, &product);
}

/* The rows of sums = r + bias; either may be NULL. */
static void start_sums(const nd_array *r, const nd_array *bias, nd_array *sums) {
    int64_t m = sums->shape[0], n = sums->shape[1];

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (m * n > CPU_GRAIN)
    for (int64_t at = 0; at < m * n; at += CPU_RUN) {
        cpu_run of_r;
        float *to = (float *)sums->data + at;
        int64_t run = min_of(CPU_RUN, m * n - at);
        const float *from = r ? cpu_read(r, at, run, of_r.f32) : NULL;
        for (int64_t k = 0; k < run; k++) {
            float value, b = bias ? *cpu_read(bias, (at + k) % n, 1, &value) : 0.0f;
            to[k] = from ? from[k] + b : b;
        }
    }
}

nd_status cpu_fp8_matmul(int device, const fp8_matmul_args *args) {
    nd_array a = {0}, b = {0}, *c = args->c, sums = c->dtype == ND_F32 ? *c : a;
    const nd_array *r = args->add ? c : args->r;
    float scale = *(const float *)args->a_scale->data * *(const float *)args->b_scale->data;
    nd_array of_both = {.data = &scale, .dtype = ND_F32};
    int64_t n = nd_size(c);
    if (args->a_e5m2 && args->b_e5m2) {
        return nd_error(ND_EVALUE, "fp8_matmul: b_e5m2: a and b are both e5m2; one must be e4m3");
    }
    nd_status status = decode(device, args->a, args->a_e5m2 != 0, &a);
    if (status == ND_OK) {
        status = decode(device, args->b, args->b_e5m2 != 0, &b);
    }
    if (status == ND_OK && c->dtype != ND_F32) {
        void *memory = NULL;
        status = cpu_allocate(device, (size_t)n * sizeof(float), &memory);
        sums = matrix_of(memory, ND_F32, c->shape[0], c->shape[1]);
    }
    if (status == ND_OK) {
        if (r || args->bias) {
            start_sums(r, args->bias, &sums);
        }
        status = multiply(device, &a, &b, &of_both, r || args->bias, &sums);
    }
    if (c->dtype != ND_F32) {
        if (status == ND_OK) {
            cpu_store_f32(c->data, c->dtype, 1, sums.data, n);
        }
        cpu_release(device, sums.data);
    }
    cpu_release(device, b.data);
    cpu_release(device, a.data);
    return status;
}

/* ---- fp8_linear_gelu_fwd, fp8_linear_gelu_bwd ------------------------------------------------ */
/* c = a_scale b_scale a b^T + bias in float32, in memory that the caller releases; b is in e4m3. */
static nd_status product(int device, const nd_array *a, bool e5m2, const nd_array *a_scale,
                         const nd_array *b, const nd_array *b_scale, const nd_array *bias,
                         nd_array *c) {
    void *memory;
    int64_t m = a->shape[0], n = b->shape[0];
    ND_TRY(cpu_allocate(device, (size_t)(m * n) * sizeof(float), &memory));
    *c = matrix_of(memory, ND_F32, m, n);
    fp8_matmul_args args = {.a = a,
                            .a_e5m2 = e5m2,
                            .a_scale = a_scale,
                            .b = b,
                            .b_scale = b_scale,
                            .bias = bias,
                            .c = c};
    return cpu_fp8_matmul(device, &args);
}

nd_status cpu_fp8_linear_gelu_fwd(int device, const fp8_linear_gelu_fwd_args *args) {
    ND_TRY(nd_check_fp8_linear_gelu("fp8_linear_gelu_fwd", "x", args->x, args->w));
    nd_array pre = {0};
    nd_status status =
        product(device, args->x, false, args->x_scale, args->w, args->w_scale, args->b, &pre);
    if (status == ND_OK) {
        fp8_quantize_args end = {.x = &pre,
                                 .gelu = args->tanh ? 2 : 1,
                                 .dgelu = args->dgelu,
                                 .largest = args->largest,
                                 .q = args->y,
                                 .q_t = args->y_t,
                                 .scale = args->scale};
        status = cpu_fp8_quantize(device, &end);
    }
    cpu_release(device, pre.data);
    return status;
}

nd_status cpu_fp8_linear_gelu_bwd(int device, const fp8_linear_gelu_bwd_args *args) {
    ND_TRY(nd_check_fp8_linear_gelu("fp8_linear_gelu_bwd", "d", args->d, args->w));
    int64_t m = args->w->shape[0], parts = cpu_ceil_div(args->d->shape[0], SUMMED);
    nd_array gradient = {0}, sums = {0};
    void *memory = NULL;
    nd_status status =
        product(device, args->d, true, args->d_scale, args->w, args->w_scale, NULL, &gradient);
    if (status == ND_OK && args->db) {
        status = cpu_allocate(device, (size_t)(parts * m) * sizeof(float), &memory);
        sums = matrix_of(memory, ND_F32, parts, m);
    }
    if (status == ND_OK) {
        fp8_quantize_args end = {.x = &gradient,
                                 .dgelu = (nd_array *)args->dgelu, /* only read */
                                 .e5m2 = 1,
                                 .scale_a = args->d_scale,
                                 .scale_b = args->w_scale,
                                 .bound = args->bound,
                                 .sums = args->db ? &sums : NULL,
                                 .q = args->q,
                                 .q_t = args->q_t,
                                 .scale = args->scale};
        status = cpu_fp8_quantize(device, &end);
    }
    if (status == ND_OK && args->db) {
        bias_bwd_args add = {.dy = &sums, .db = args->db};
        status = cpu_bias_bwd(device, &add);
    }
    cpu_release(device, memory);
    cpu_release(device, gradient.data);
    return status;
}

/* ---- fp8_cross_entropy ----------------------------------------------------------------------- */
/* Rows [at, at + rows): losses and d. `logits` is memory for as many. */
static nd_status take_rows(int device, const fp8_cross_entropy_args *args, const nd_array *x,
                           const nd_array *w, int64_t at, int64_t rows, float *logits) {
    int64_t n = x->shape[0], c = x->shape[1], v = w->shape[0];
    nd_array some = matrix_of((uint16_t *)x->data + at * c, ND_BF16, rows, c);
    nd_array gradient = matrix_of(logits, ND_F32, rows, v);
    ND_TRY(multiply(device, &some, w, args->scale, false, &gradient));

    float mean, share;
    nd_array targets = {.data = (int32_t *)args->targets->data + at, .shape = {rows}};
    nd_array losses = {.data = (float *)args->losses->data + at};
    nd_array loss = {.data = &mean}, factor = {.data = &share};
    cross_entropy_fwd_bwd_args both = {&gradient, &targets, &losses, &loss, &factor};
    ND_TRY(cpu_cross_entropy_fwd_bwd(device, &both));

    uint8_t *d = args->d->data, *d_t = args->d_t->data;
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (rows * v > CPU_GRAIN)
    for (int64_t i = 0; i < rows; i += STRIP) {
        int64_t strip = min_of(STRIP, rows - i);
        uint8_t *to = d + (at + i) * v;
        for (int64_t k = 0; k < strip * v; k++) {
            to[k] = nd_to_e5m2(logits[i * v + k] * 0x1p15f);
        }
        transpose(to, strip, v, d_t + at + i, n);
    }
    return ND_OK;
}

nd_status cpu_fp8_cross_entropy(int device, const fp8_cross_entropy_args *args) {
    int64_t n = args->x->shape[0], v = args->w->shape[0];
    ND_TRY(cpu_check_targets("fp8_cross_entropy", args->targets, v));
    nd_array x = {0}, w = {0};
    void *logits = NULL;
    nd_status status = decode(device, args->x, false, &x);
    if (status == ND_OK) {
        status = decode(device, args->w, false, &w);
    }
    if (status == ND_OK) {
        status = cpu_allocate(device, (size_t)(min_of(ROWS, n) * v) * sizeof(float), &logits);
    }
    for (int64_t i = 0; i < n && status == ND_OK; i += ROWS) {
        status = take_rows(device, args, &x, &w, i, min_of(ROWS, n - i), logits);
    }
    cpu_release(device, logits);
    cpu_release(device, w.data);
    cpu_release(device, x.data);
    ND_TRY(status);

    const float *losses = args->losses->data;
    const int32_t *targets = args->targets->data;
    double total = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        total += losses[i];
        count += targets[i] >= 0;
    }
    *(float *)args->loss->data = count > 0 ? (float)(total / (double)count) : 0.0f;
    *(float *)args->share->data = count > 0 ? 1.0f / (float)count : 0.0f;
    return ND_OK;
}
