/* philox.h - random bits from a key and a counter, for the C compiler and nvcc.
 *
 * Philox 4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2,
 * 3"): four words from a counter of 128 bits and a key of 64. Word i of what is drawn is word
 * i mod 4 of counter + i / 4: it depends on i alone, not on the device or the thread. A state is
 * three int64 in the memory of a device: key, low and high half of the counter.
 */
#ifndef NEEDLE_PHILOX_H
#define NEEDLE_PHILOX_H

#include "formula.h"
#include "needle.h"

enum { ND_STATE_SIZE = 3, ND_PHILOX_WORDS = 4 };

typedef struct {
    uint64_t key, low, high;
} nd_philox_state;

typedef struct {
    uint32_t word[ND_PHILOX_WORDS];
} nd_philox_words;

ND_FN nd_philox_state nd_philox_read(const int64_t *state) {
    nd_philox_state s = {(uint64_t)state[0], (uint64_t)state[1], (uint64_t)state[2]};
    return s;
}

/* What `words` words take is not drawn again. */
ND_FN void nd_philox_advance(int64_t *state, int64_t words) {
    uint64_t low = (uint64_t)state[1],
             after = low + ((uint64_t)words + ND_PHILOX_WORDS - 1) / ND_PHILOX_WORDS;
    state[1] = (int64_t)after;
    state[2] = (int64_t)((uint64_t)state[2] + (after < low));
}

/* A round of the counter's words a, b, c, d, lowest first; 10 of them give what is drawn. */
#define ND_PHILOX_ROUND(a, b, c, d, key)                                 \
    do {                                                                 \
        uint32_t high_a = (uint32_t)(((uint64_t)(a)*0xd2511f53u) >> 32); \
        uint32_t high_c = (uint32_t)(((uint64_t)(c)*0xcd9e8d57u) >> 32); \
        uint32_t low_a = (a)*0xd2511f53u, low_c = (c)*0xcd9e8d57u;       \
        (a) = high_c ^ (b) ^ (uint32_t)(key);                            \
        (b) = low_c;                                                     \
        (c) = high_a ^ (d) ^ (uint32_t)((key) >> 32);                    \
        (d) = low_a;                                                     \
    } while (0)

/* The key of the round after. */
ND_FN uint64_t nd_philox_next(uint64_t key) {
    uint32_t low = (uint32_t)key + 0x9e3779b9u, high = (uint32_t)(key >> 32) + 0xbb67ae85u;
    return (uint64_t)high << 32 | low;
}

/* The words of counter + at. */
ND_FN nd_philox_words nd_philox(nd_philox_state s, uint64_t at) {
    uint64_t low = s.low + at, high = s.high + (low < at), key = s.key;
    uint32_t a = (uint32_t)low, b = (uint32_t)(low >> 32), c = (uint32_t)high,
             d = (uint32_t)(high >> 32);
    for (int round = 0; round < 10; round++, key = nd_philox_next(key)) {
        ND_PHILOX_ROUND(a, b, c, d, key);
    }
    nd_philox_words words = {{a, b, c, d}};
    return words;
}

/* An element with its word: times 0 where that is below `cut`, else times 1 / (1 - p). */
ND_FN float nd_dropped(float x, uint32_t word, uint32_t cut, float scale) {
    return x * (word < cut ? 0.0f : scale);
}

/* In [0, 1), with 53 bits. */
ND_FN double nd_uniform(nd_philox_words words) {
    return ((words.word[0] >> 5) * 67108864.0 + (words.word[1] >> 6)) * 0x1p-53;
}

/* Of a token, where `top` is the largest logit. */
ND_FN float nd_token_weight(float logit, float top, double temperature) {
    return nd_exp((float)(((double)logit - (double)top) / temperature));
}

/* The share p of all words is below it. */
static inline uint32_t nd_dropout_cut(double p) {
    double cut = rint(p * 0x1p32);
    return cut < 0x1p32 ? (uint32_t)cut : UINT32_MAX;
}

static inline nd_status nd_check_state(const char *op, const char *name, const nd_array *state) {
    if (state->shape[0] != ND_STATE_SIZE) {
        return nd_error(ND_EVALUE, "%s: %s: axis S is %lld, but a state is 3 numbers", op, name,
                        (long long)state->shape[0]);
    }
    return ND_OK;
}

static inline nd_status nd_check_random_tokens(const nd_array *state, const nd_array *logits,
                                               double temperature) {
    ND_TRY(nd_check_state("random_tokens", "state", state));
    if (logits->shape[1] == 0 || logits->shape[1] > INT32_MAX) {
        return nd_error(ND_EVALUE, "random_tokens: logits: %lld tokens to choose from",
                        (long long)logits->shape[1]);
    }
    if (!(temperature > 0 && temperature < (double)INFINITY)) {
        return nd_error(ND_EVALUE, "random_tokens: temperature: must be above 0, but is %g",
                        temperature);
    }
    return ND_OK;
}

static inline nd_status nd_check_dropout(const char *op, const char *name, const nd_array *state,
                                         double p) {
    ND_TRY(nd_check_state(op, name, state));
    if (!(p >= 0 && p < 1)) {
        return nd_error(ND_EVALUE, "%s: p: must be in [0, 1), but is %g", op, p);
    }
    return ND_OK;
}

#endif
