/* decode.c - one step of generation: the first products of a layer, attention of a new token over its
 * cache, and the next token.
 *
 *   q, k rotated by the angle of p = positions[b];  keys[b, :, p] = k,  values[b, :, p] = v
 *   o[b, h] = sum_{j <= p} softmax_j(scale q . keys[b, h, j]) values[b, h, j]
 *
 * A task is one head of one row. It walks the cache once, a run of keys at a time, with a running
 * maximum and sum; the rotated q and k are rounded to the dtype as the whole-sequence path rounds
 * them, all else is float32. Tasks are independent, so threads do not change bits. Reads
 * 2 (p + 1) D cached values a head.
 */
#include <math.h>

#include "../decode.h"

#include "cpu.h"

enum {
    MAX_DIMS = 256 /* as of attention_fwd */
};

static nd_status check_positions(const decode_attention_args *args) {
    int64_t capacity = min_of(args->keys->shape[2], args->cos->shape[0]);
    const int32_t *positions = args->positions->data;
    for (int64_t b = 0; b < args->positions->shape[0]; b++) {
        if (positions[b] < 0 || positions[b] >= capacity) {
            return nd_error(ND_EVALUE,
                            "decode_attention: positions: row %lld is at %d, but the cache and the "
                            "angles have room for %lld",
                            (long long)b, (int)positions[b], (long long)capacity);
        }
    }
    return ND_OK;
}

/* x rotated by its position, rounded to the array's dtype and read back. */
static void rotate(const nd_array *x, int64_t at, int64_t d, const float *cosines,
                   const float *sines, int64_t r, float *out) {
    float buffer[MAX_DIMS];
    unsigned char rounded[MAX_DIMS * sizeof(float)];
    const float *from = cpu_read(x, at, d, buffer);
    memcpy(out, from, (size_t)d * sizeof *out);
    cpu_rotate(out, cosines, sines, r, 1.0f);
    cpu_store_f32(rounded, x->dtype, 1, out, d);
    cpu_load_f32(out, rounded, x->dtype, 1, d);
}

static void attend(const decode_attention_args *args, int64_t task) {
    const int64_t *shape = args->keys->shape;
    int64_t heads = shape[1], capacity = shape[2], d = shape[3], r = args->cos->shape[1];
    int64_t position = ((const int32_t *)args->positions->data)[task / heads];
    const float *cosines = (const float *)args->cos->data + position * r;
    const float *sines = (const float *)args->sin->data + position * r;
    size_t size = nd_dtype_size(args->qkv->dtype);
    int64_t base = task * capacity * d, new_row = base + position * d;

    float q[MAX_DIMS], k[MAX_DIMS];
    rotate(args->qkv, task * 3 * d, d, cosines, sines, r, q);
    rotate(args->qkv, (task * 3 + 1) * d, d, cosines, sines, r, k);
    cpu_store_f32(cpu_at(args->keys, new_row), args->keys->dtype, 1, k, d);
    memcpy(cpu_at(args->values, new_row), cpu_at(args->qkv, (task * 3 + 2) * d), (size_t)d * size);

    float scale = (float)args->scale, top = -INFINITY, total = 0;
    float o[MAX_DIMS] = {0}, scores[CPU_RUN];
    cpu_run run;
    int64_t chunk = CPU_RUN / d;
    for (int64_t first = 0; first <= position; first += chunk) {
        int64_t count = min_of(chunk, position + 1 - first);
        const float *restrict keys = cpu_read(args->keys, base + first * d, count * d, run.f32);
        float highest = top;
        for (int64_t j = 0; j < count; j++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < d; i++) {
                sum += q[i] * keys[j * d + i];
            }
            scores[j] = scale * sum;
            highest = nd_max(highest, scores[j]);
        }
        float shrink = nd_exp(top - highest);
        top = highest;
        total *= shrink;
        for (int64_t i = 0; i < d; i++) {
            o[i] *= shrink;
        }
        const float *restrict values = cpu_read(args->values, base + first * d, count * d, run.f32);
        for (int64_t j = 0; j < count; j++) {
            float weight = nd_exp(scores[j] - top);
            total += weight;
            for (int64_t i = 0; i < d; i++) {
                o[i] += weight * values[j * d + i];
            }
        }
    }
    for (int64_t i = 0; i < d; i++) {
        o[i] /= total;
    }
    int64_t at = task / heads * args->o->strides[0] + task % heads * args->o->strides[1];
    cpu_store_f32(cpu_at(args->o, at), args->o->dtype, 1, o, d);
}

nd_status cpu_decode_attention(int device, const decode_attention_args *args) {
    const int64_t *shape = args->qkv->shape;
    int64_t tasks = shape[0] * shape[1], d = shape[3], r = args->cos->shape[1];
    if (shape[2] != 3) {
        return nd_error(ND_EVALUE, "decode_attention: qkv: axis P is %lld, must be 3: q, k and v",
                        (long long)shape[2]);
    }
    if (d > MAX_DIMS) {
        return nd_error(ND_EVALUE, "decode_attention: qkv: head dim %lld is above the limit of 256",
                        (long long)d);
    }
    if (2 * r > d) {
        return nd_error(ND_EVALUE,
                        "decode_attention: cos: rotates 2 x %lld dims, but a head has %lld",
                        (long long)r, (long long)d);
    }
    ND_TRY(check_positions(args));
    if (tasks == 0 || d == 0) {
        return ND_OK;
    }
    int64_t work = tasks * args->keys->shape[2] * d;
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (work > CPU_GRAIN)
    for (int64_t task = 0; task < tasks; task++) {
        attend(args, task);
    }
    return ND_OK;
}

nd_status cpu_decode_projections(int device, const decode_projections_args *args) {
    const nd_array *x = args->x;
    int64_t rows = x->shape[0], c = x->shape[1], m = args->w1->shape[1];
    ND_TRY(nd_check_decode_projections(x, args->w_qkv, args->w1));
    void *memory; /* y1, y2, what linear_gelu_fwd keeps, all in x's dtype */
    size_t element = nd_dtype_size(x->dtype), norm = (size_t)(rows * c) * element;
    ND_TRY(cpu_allocate(device, 2 * norm + (size_t)(rows * m) * element, &memory));
    float statistics[2][ND_STEP_ROWS];
    nd_array y1 = *x, y2 = *x, dgelu = *x, mean = {.data = statistics[0]}, rstd = mean;
    y1.data = memory;
    y2.data = (char *)memory + norm;
    dgelu.data = (char *)memory + 2 * norm;
    dgelu.shape[1] = dgelu.strides[0] = m;
    rstd.data = statistics[1];
    layernorm_pair_fwd_args norms = {.x = x,
                                     .norm_w1 = args->norm_w1,
                                     .norm_b1 = args->norm_b1,
                                     .norm_w2 = args->norm_w2,
                                     .norm_b2 = args->norm_b2,
                                     .eps = args->eps,
                                     .y1 = &y1,
                                     .y2 = &y2,
                                     .mean = &mean,
                                     .rstd = &rstd};
    linear_fwd_args first = {.x = &y1, .w = args->w_qkv, .b = args->b_qkv, .y = args->packed};
    linear_gelu_fwd_args second = {
        .x = &y2, .w = args->w1, .b = args->b1, .tanh = args->tanh, .dgelu = &dgelu, .y = args->g};
    nd_status status = cpu_layernorm_pair_fwd(device, &norms);
    status = status ? status : cpu_linear_fwd(device, &first);
    status = status ? status : cpu_linear_gelu_fwd(device, &second);
    cpu_release(device, memory);
    return status;
}

nd_status cpu_decode_output(int device, const decode_output_args *args) {
    linear_fwd_args product = {args->x, args->w, args->b, args->r, args->y};
    return cpu_linear_fwd(device, &product);
}

nd_status cpu_decode_greedy(int device, const decode_greedy_args *args) {
    int64_t rows = args->logits->shape[0], v = args->logits->shape[1];
    int32_t *tokens = args->tokens->data, *positions = args->positions->data;
    if (v == 0 || v > INT32_MAX) {
        return nd_error(ND_EVALUE, "decode_greedy: logits: %lld tokens to choose from",
                        (long long)v);
    }
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (rows * v > CPU_GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        cpu_run run;
        float best = -INFINITY;
        int64_t at = 0;
        bool drawable = true;
        for (int64_t first = 0; first < v; first += CPU_RUN) {
            int64_t count = min_of(CPU_RUN, v - first);
            const float *x = cpu_read(args->logits, row * v + first, count, run.f32);
            for (int64_t i = 0; i < count; i++) {
                drawable &= x[i] < INFINITY;
                if (x[i] > best) {
                    best = x[i];
                    at = first + i;
                }
            }
        }
        tokens[row] = drawable && best > -INFINITY ? (int32_t)at : -1;
        positions[row] += 1;
    }
    return ND_OK;
}

nd_status cpu_decode_output_greedy(int device, const decode_output_greedy_args *args) {
    linear_fwd_args product = {.x = args->x, .w = args->w, .y = args->logits};
    decode_greedy_args choice = {args->logits, args->tokens, args->positions};
    nd_status status = cpu_linear_fwd(device, &product);
    return status ? status : cpu_decode_greedy(device, &choice);
}
