/* random.c - random bits, dropout and tokens, from the words of philox.h.
 *
 *   y[i] = x[i] m[i],  m[i] = 1 / (1 - p) where word i is at least 2^32 p, else 0
 * The backward draws m again, so that no mask is kept. Threads take blocks; a run of words stays in
 * the first-level cache.
 */
#include "../philox.h"
#include "cpu.h"

/* LANES * 4 divides CPU_RUN. */
enum { BLOCK = 32 * CPU_RUN, LANES = 64 };

/* Words [first, first + n) of what is drawn, first a multiple of 4, and those up to LANES counters
 * further: as nd_philox, a round of all counters at a time. */
static void draw(nd_philox_state state, int64_t first, int64_t n, uint32_t *restrict words) {
    for (int64_t at = 0; at < n; at += LANES * ND_PHILOX_WORDS) {
        uint32_t a[LANES], b[LANES], c[LANES], d[LANES];
        uint64_t from = (uint64_t)(first + at) / ND_PHILOX_WORDS, key = state.key;
        for (int i = 0; i < LANES; i++) {
            uint64_t low = state.low + from + (uint64_t)i,
                     high = state.high + (low < from + (uint64_t)i);
            a[i] = (uint32_t)low;
            b[i] = (uint32_t)(low >> 32);
            c[i] = (uint32_t)high;
            d[i] = (uint32_t)(high >> 32);
        }
        for (int round = 0; round < 10; round++, key = nd_philox_next(key)) {
            for (int i = 0; i < LANES; i++) {
                ND_PHILOX_ROUND(a[i], b[i], c[i], d[i], key);
            }
        }
        for (int i = 0; i < LANES; i++) {
            words[at + ND_PHILOX_WORDS * i] = a[i];
            words[at + ND_PHILOX_WORDS * i + 1] = b[i];
            words[at + ND_PHILOX_WORDS * i + 2] = c[i];
            words[at + ND_PHILOX_WORDS * i + 3] = d[i];
        }
    }
}

nd_status cpu_random_bits(int device, const random_bits_args *args) {
    ND_TRY(nd_check_state("random_bits", "state", args->state));
    nd_philox_state state = nd_philox_read(args->state->data);
    int64_t size = args->bits->shape[0];
    int32_t *bits = args->bits->data;
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (size > CPU_GRAIN)
    for (int64_t at = 0; at < size; at += CPU_RUN) {
        uint32_t words[CPU_RUN];
        int64_t n = min_of(CPU_RUN, size - at);
        draw(state, at, n, words);
        memcpy(bits + at, words, (size_t)n * sizeof *words);
    }
    nd_philox_advance(args->state->data, size);
    return ND_OK;
}

static void drop(nd_philox_state state, const nd_array *x, double p, nd_array *y) {
    const uint32_t cut = nd_dropout_cut(p);
    const float scale = (float)(1 / (1 - p));
    int64_t size = x->shape[0];
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (size > CPU_GRAIN)
    for (int64_t block = 0; block < size; block += BLOCK) {
        cpu_run from, to;
        uint32_t words[CPU_RUN];
        for (int64_t at = block; at < min_of(size, block + BLOCK); at += CPU_RUN) {
            int64_t n = min_of(CPU_RUN, size - at);
            const float *restrict values = cpu_read(x, at, n, from.f32);
            float *restrict target = cpu_target(y, at, to.f32);
            draw(state, at, n, words);
            for (int64_t i = 0; i < n; i++) {
                target[i] = nd_dropped(values[i], words[i], cut, scale);
            }
            cpu_write(y, at, n, target);
        }
    }
}

nd_status cpu_dropout_fwd(int device, const dropout_fwd_args *args) {
    ND_TRY(nd_check_dropout("dropout_fwd", "state", args->state, args->p));
    int64_t *state = args->state->data;
    memcpy(args->drawn->data, state, ND_STATE_SIZE * sizeof *state);
    drop(nd_philox_read(state), args->x, args->p, args->y);
    nd_philox_advance(state, args->x->shape[0]);
    return ND_OK;
}

nd_status cpu_dropout_bwd(int device, const dropout_bwd_args *args) {
    ND_TRY(nd_check_dropout("dropout_bwd", "drawn", args->drawn, args->p));
    drop(nd_philox_read(args->drawn->data), args->dy, args->p, args->dx);
    return ND_OK;
}

/* The largest logit of a row; NaN where there is no token to draw. */
static float top_of(const nd_array *logits, int64_t row, int64_t v) {
    float top = -INFINITY;
    bool drawable = true;
    for (int64_t first = 0; first < v; first += CPU_RUN) {
        cpu_run run;
        int64_t n = min_of(CPU_RUN, v - first);
        const float *x = cpu_read(logits, row * v + first, n, run.f32);
        for (int64_t i = 0; i < n; i++) {
            drawable &= x[i] < INFINITY;
            top = x[i] > top ? x[i] : top;
        }
    }
    return drawable && top > -INFINITY ? top : NAN;
}

/* The sum of a row's weights; with `most` the first token at which it exceeds that, or the last of
 * any weight. */
static double weigh(const nd_array *logits, int64_t row, int64_t v, float top, double temperature,
                    const double *most, int32_t *token) {
    double sum = 0;
    for (int64_t first = 0; first < v; first += CPU_RUN) {
        cpu_run run;
        _Alignas(64) float weights[CPU_RUN];
        int64_t n = min_of(CPU_RUN, v - first);
        const float *x = cpu_read(logits, row * v + first, n, run.f32);
        for (int64_t i = 0; i < n; i++) {
            weights[i] = nd_token_weight(x[i], top, temperature);
        }
        for (int64_t i = 0; i < n; i++) {
            sum += (double)weights[i];
            if (most != NULL && weights[i] > 0) {
                *token = (int32_t)(first + i);
                if (sum > *most) {
                    return sum;
                }
            }
        }
    }
    return sum;
}

nd_status cpu_random_tokens(int device, const random_tokens_args *args) {
    ND_TRY(nd_check_random_tokens(args->state, args->logits, args->temperature));
    int64_t rows = args->logits->shape[0], v = args->logits->shape[1];
    int32_t *tokens = args->tokens->data, *positions = args->positions->data;
    nd_philox_state state = nd_philox_read(args->state->data);
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (rows * v > CPU_GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        float top = top_of(args->logits, row, v);
        tokens[row] = -1;
        if (top == top) {
            double all = weigh(args->logits, row, v, top, args->temperature, NULL, NULL);
            double most = nd_uniform(nd_philox(state, (uint64_t)row)) * all;
            weigh(args->logits, row, v, top, args->temperature, &most, tokens + row);
        }
        positions[row] += 1;
    }
    nd_philox_advance(args->state->data, rows * ND_PHILOX_WORDS);
    return ND_OK;
}
