/* test_decode.c - the step of generation: attention behind a cache, and the likeliest token.
 *  */
#include "harness.h"

static const nd_dtype float_dtypes[] = {ND_F32, ND_BF16, ND_F16};

/* Rows at the first, a middle and the last position of a cache without capacity to spare. */
static void attend(nd_dtype dtype, int64_t h, int64_t d, int64_t s, int64_t r) {
    int64_t b = 3, positions_of[] = {0, s / 2, s - 1};
    nd_array qkv = random_array(dtype, 4, SHAPE(b, h, 3, d), PLAIN);
    nd_array keys = random_array(dtype, 4, SHAPE(b, h, s, d), PLAIN);
    nd_array values = random_array(dtype, 4, SHAPE(b, h, s, d), PLAIN);
    nd_array cosines = make(ND_F32, 2, SHAPE(s, r), PLAIN),
             sines = make(ND_F32, 2, SHAPE(s, r), PLAIN);
    nd_array positions = make(ND_I32, 1, SHAPE(b), PLAIN),
             o = make(dtype, 3, SHAPE(b, h, d), PLAIN);
    for (int64_t i = 0; i < s * r; i++) {
        set(&cosines, i, 0); /* a quarter turn: (x1, x2) -> (-x2, x1), exact in every dtype */
        set(&sines, i, 1);
    }
    double *want = doubles(b * h * d), *q = doubles(d), *scores = doubles(s);
    for (int64_t row = 0; row < b; row++) {
        set(&positions, row, (double)positions_of[row]);
        for (int64_t head = row * h; head < (row + 1) * h; head++) {
            int64_t last = positions_of[row], cache = head * s * d;
            double *k = doubles(d);
            for (int64_t i = 0; i < d; i++) {
                int64_t from = i < r ? i + r : i < 2 * r ? i - r : i;
                q[i] = (i < r ? -1 : 1) * get(&qkv, head * 3 * d + from);
                k[i] = (i < r ? -1 : 1) * get(&qkv, (head * 3 + 1) * d + from);
            }
            double total = 0;
            for (int64_t j = 0; j <= last; j++) {
                scores[j] = 0;
                for (int64_t i = 0; i < d; i++) {
                    scores[j] += 0.25 * q[i] * (j == last ? k[i] : get(&keys, cache + j * d + i));
                }
                total += exp(scores[j]);
            }
            for (int64_t j = 0; j <= last; j++) {
                for (int64_t i = 0; i < d; i++) {
                    want[head * d + i] += exp(scores[j]) / total *
                                          (j == last ? get(&qkv, (head * 3 + 2) * d + i)
                                                     : get(&values, cache + j * d + i));
                }
            }
            free(k);
        }
    }
    decode_attention_args args = {&qkv, &cosines, &sines, &positions, 0.25, &keys, &values, &o};
    check_ok(cpu_decode_attention(0, &args), "decode_attention");
    check_close(&o, want, 1e-5, 1e-5, "decode_attention");
    set(&positions, 1, (double)s);
    check_refused(cpu_decode_attention(0, &args), ND_EVALUE, "positions", "position beyond S");
    free(want);
    free(q);
    free(scores);
    nd_array_clear(&qkv);
    nd_array_clear(&keys);
    nd_array_clear(&values);
    nd_array_clear(&cosines);
    nd_array_clear(&sines);
    nd_array_clear(&positions);
    nd_array_clear(&o);
}

static void greedy(nd_dtype dtype, int64_t v) {
    nd_array logits = make(dtype, 2, SHAPE(3, v), PLAIN);
    nd_array tokens = make(ND_I32, 1, SHAPE(3), PLAIN),
             positions = make(ND_I32, 1, SHAPE(3), PLAIN);
    for (int64_t i = 0; i < 3 * v; i++) {
        set(&logits, i, (double)(i % v % 7) - 9);
    }
    set(&logits, 2 * v + v / 2, INFINITY);
    for (int64_t row = 0; row < 3; row++) {
        set(&positions, row, (double)row);
    }
    check_ok(cpu_decode_greedy(0, &(decode_greedy_args){&logits, &tokens, &positions}), "greedy");
    double first = v < 7 ? (double)v - 1 : 6;
    check_close(&tokens, (double[]){first, first, -1}, 0, 0, "greedy tokens");
    check_close(&positions, (double[]){1, 2, 3}, 0, 0, "greedy positions");
    nd_array_clear(&logits);
    nd_array_clear(&tokens);
    nd_array_clear(&positions);
}

int main(void) {
    static const int64_t sizes[][4] = {
        {1, 1, 1, 0}, {2, 16, 9, 2}, {3, 31, 257, 15}, {1, 256, 9, 8}, {2, 64, 1100, 32}};
    for (int f = 0; f < 3; f++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            attend(float_dtypes[f], sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3]);
        }
        greedy(float_dtypes[f], 1);
        greedy(float_dtypes[f], 31);
        greedy(float_dtypes[f], 2500);
    }
    return finish("test_decode");
}
