/* test_elementwise.c - elementwise ops, copies, conversions and reductions against plain loops. */
#include "harness.h"

static const nd_dtype float_dtypes[] = {ND_F32, ND_BF16, ND_F16};
static const int64_t shapes[][3] = {{1, 1, 1}, {1, 31, 1},   {3, 5, 257},  {2, 31, 7},   {0, 4, 3},
                                    {3, 0, 2}, {1, 1, 5000}, {2, 65, 130}, {1, 170, 200}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static double phi(double x) { return 0.5 * erfc(-x * sqrt(0.5)); }

#define CHECK_UNARY(name, dtype, shape, how, scale, formula)                          \
    do {                                                                              \
        nd_array xs = make(dtype, 3, shape, how), out = make(dtype, 3, shape, PLAIN); \
        randomise(&xs, scale);                                                        \
        double *want = doubles(nd_size(&xs));                                         \
        for (int64_t i = 0; i < nd_size(&xs); i++) {                                  \
            double x = get(&xs, i);                                                   \
            (void)x;                                                                  \
            want[i] = (formula);                                                      \
        }                                                                             \
        check_ok(cpu_##name(0, &(name##_args){&xs, &out}), #name);                    \
        check_close(&out, want, 1e-6, 1e-6, #name);                                   \
        free(want);                                                                   \
        nd_array_clear(&xs);                                                          \
        nd_array_clear(&out);                                                         \
    } while (0)

#define CHECK_BINARY(name, dtype, out_dtype, shape, x_how, y_how, mode, formula)                  \
    do {                                                                                          \
        nd_array xs = random_array(dtype, 3, shape, x_how);                                       \
        nd_array ys = random_array(dtype, 3, shape, y_how);                                       \
        nd_array out = make(out_dtype, 3, shape, PLAIN);                                          \
        double *want = doubles(nd_size(&xs));                                                     \
        for (int64_t i = 0; i < nd_size(&xs); i++) {                                              \
            double x = (mode) == 2 ? 3 : get(&xs, i), y = (mode) == 1 ? 3 : get(&ys, i);          \
            (void)x, (void)y;                                                                     \
            want[i] = (formula);                                                                  \
        }                                                                                         \
        check_ok(cpu_##name(0, &(name##_args){(mode) == 2 ? NULL : &xs, (mode) == 1 ? NULL : &ys, \
                                              3, 3, &out}),                                       \
                 #name);                                                                          \
        check_close(&out, want, 1e-5, 1e-5, #name);                                               \
        free(want);                                                                               \
        nd_array_clear(&xs);                                                                      \
        nd_array_clear(&ys);                                                                      \
        nd_array_clear(&out);                                                                     \
    } while (0)

static void test_elementwise(void) {
    for (int s = 0; s < SHAPES; s++) {
        for (layout how = PLAIN; how < LAYOUTS; how++) {
            const int64_t *shape = shapes[s];
            for (int f = 0; f < 3; f++) {
                nd_dtype dtype = float_dtypes[f];
                CHECK_UNARY(exp, dtype, shape, how, 5, exp(x));
                CHECK_UNARY(gelu, dtype, shape, how, 4, x * phi(x));
                CHECK_UNARY(negate, dtype, shape, how, 4, -x);
                layout other = (how + 2) % LAYOUTS;
                CHECK_BINARY(add, dtype, dtype, shape, how, other, 0, x + y);
                CHECK_BINARY(multiply, dtype, dtype, shape, how, other, 1, x * y);
                CHECK_BINARY(subtract, dtype, dtype, shape, other, how, 2, x - y);
                CHECK_BINARY(less, dtype, ND_BOOL, shape, how, other, 0, x < y);
                CHECK_BINARY(maximum, dtype, dtype, shape, how, how, 0, x > y ? x : y);
            }
            CHECK_BINARY(add, ND_I32, ND_I32, shape, how, STEPPED, 0, x + y);
            CHECK_BINARY(multiply, ND_I64, ND_I64, shape, how, PLAIN, 0, x * y);
            CHECK_BINARY(equal, ND_U8, ND_BOOL, shape, how, PLAIN, 1, x == y);
            CHECK_BINARY(greater_equal, ND_I64, ND_BOOL, shape, how, PLAIN, 2, x >= y);
        }
    }
    const int64_t shape[3] = {3, 5, 257};
    CHECK_UNARY(tanh, ND_F32, shape, PLAIN, 4, tanh(x));
    CHECK_UNARY(sigmoid, ND_F32, shape, PLAIN, 30, 1 / (1 + exp(-x)));
    CHECK_UNARY(relu, ND_F32, shape, PLAIN, 4, x > 0 ? x : 0);
    CHECK_UNARY(absolute, ND_I64, shape, PLAIN, 4, fabs(x));
    CHECK_UNARY(gelu_tanh, ND_F32, shape, PLAIN, 4,
                0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))));
    CHECK_BINARY(gelu_bwd, ND_F32, ND_F32, shape, PLAIN, PLAIN, 0,
                 (phi(x) + x * exp(-x * x / 2) / sqrt(2 * M_PI)) * y);
    CHECK_BINARY(divide, ND_F32, ND_F32, shape, PLAIN, PLAIN, 1, x / y);
    CHECK_BINARY(power, ND_F32, ND_F32, shape, PLAIN, PLAIN, 1, x * x * x);
    nd_array ints = random_array(ND_I32, 3, shape, PLAIN);
    check_refused(cpu_exp(0, &(exp_args){&ints, &ints}), ND_ETYPE, "exp: x", "exp of integers");
    nd_array_clear(&ints);
}

static void test_special_values(void) {
    const float values[] = {INFINITY, -INFINITY, NAN, 0, -0.0f, 1e-41f, 89, -104, 1e30f, -1e30f};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        double x = values[i];
        float f = values[i];
        check(fabs(nd_exp(f) - (float)exp(x)) <= 2e-45f || nd_exp(f) == (float)exp(x) || isnan(f),
              "exp", "special value");
        check(fabs(nd_tanh(f) - tanh(x)) < 1e-7 || isnan(f), "tanh", "special value");
        bool same = isnan(nd_log(f)) == isnan((float)log(x)) &&
                    (isnan(log(x)) || isinf(log(x)) ? true : fabs(nd_log(f) - log(x)) < 1e-5);
        check(same, "log", "special value");
    }
    check(isnan(nd_exp(NAN)) && isnan(nd_tanh(NAN)) && isnan(nd_gelu(NAN)) &&
              isnan(nd_gelu_grad(NAN)) && isnan(nd_sigmoid(NAN)),
          "NaN", "is lost");
    check(nd_log(0) == -INFINITY && nd_gelu_grad(INFINITY) == 1 && nd_gelu_grad(-INFINITY) == 0,
          "limits", "are wrong");
    for (uint32_t h = 0; h < 0x10000; h++) {
        float x = cpu_from_f16((uint16_t)h), y = cpu_from_bf16((uint16_t)h);
        failed += !isnan(x) && cpu_to_f16(x) != h;
        failed += !isnan(y) && cpu_to_bf16(y) != h;
    }
    check(cpu_from_f16(0x0001) == 0x1p-24f && cpu_from_f16(0x7bff) == 65504 &&
              cpu_to_f16(65520) == 0x7c00 && cpu_to_f16(65519) == 0x7bff &&
              cpu_to_f16(0x1p-25f) == 0 && cpu_to_f16(0x1.8p-25f) == 1 &&
              cpu_to_f16(1 + 0x1p-11f) == 0x3c00 && cpu_to_f16(1 + 0x3p-11f) == 0x3c02 &&
              cpu_to_bf16(1 + 0x1p-8f) == 0x3f80 && cpu_to_bf16(1 + 0x3p-8f) == 0x3f82,
          "halves", "round wrongly");
}

static void test_copies(void) {
    static const nd_dtype dtypes[] = {ND_F32, ND_BF16, ND_F16,  ND_I32,
                                      ND_I64, ND_U8,   ND_BOOL, ND_U16};
    for (int s = 0; s < SHAPES; s++) {
        for (layout how = PLAIN; how < LAYOUTS; how++) {
            for (int pair = 0; pair < 64; pair++) {
                nd_dtype to_dtype = dtypes[pair / 8], from_dtype = dtypes[pair % 8];
                layout to_how = (how + pair) % REPEATED;
                nd_array from = make(from_dtype, 3, shapes[s], how);
                for (int64_t i = 0; i < nd_size(&from); i++) {
                    set(&from, i, floor((uniform() + 1) * 4.99) / (how % 2 ? 1 : 2));
                }
                nd_array to = make(to_dtype, 3, shapes[s], to_how);
                double *want = doubles(nd_size(&to));
                for (int64_t i = 0; i < nd_size(&to); i++) {
                    double x = get(&from, i);
                    want[i] = to_dtype == ND_BOOL           ? x != 0
                              : nd_dtype_is_float(to_dtype) ? x
                                                            : trunc(x);
                }
                check_ok(cpu_assign(0, &(assign_args){&to, &from}), "assign");
                check_close(&to, want, 0, 0, layout_names[how]);
                check_ok(cpu_fill(0, &(fill_args){&to, 3}), "fill");
                for (int64_t i = 0; i < nd_size(&to); i++) {
                    want[i] = to_dtype == ND_BOOL ? 1 : 3;
                }
                check_close(&to, want, 0, 0, "fill");
                free(want);
                nd_array_clear(&from);
                nd_array_clear(&to);
            }
        }
    }
    nd_array huge = make(ND_F32, 1, SHAPE(4), PLAIN), ints = make(ND_I64, 1, SHAPE(4), PLAIN);
    const double wild[] = {1e30, -1e30, NAN, -7.9},
                 cut[] = {9223372036854775807.0, -9223372036854775808.0, 0, -7};
    for (int i = 0; i < 4; i++) {
        set(&huge, i, wild[i]);
    }
    check_ok(cpu_assign(0, &(assign_args){&ints, &huge}), "assign");
    check_close(&ints, cut, 0, 0, "float out of range");
    nd_array_clear(&huge);
    nd_array_clear(&ints);
}

static void test_reductions(void) {
    for (int s = 0; s < SHAPES; s++) {
        for (layout how = PLAIN; how < LAYOUTS; how++) {
            for (int f = 0; f < 4; f++) {
                for (int axes = 0; axes <= 3; axes++) {
                    nd_dtype dtype = f < 3 ? float_dtypes[f] : ND_I32;
                    nd_array x = random_array(dtype, 3, shapes[s], how);
                    nd_array out = make(f < 3 ? ND_F32 : ND_I64, 3 - axes, shapes[s], PLAIN);
                    nd_array where = make(ND_I64, 3 - axes, shapes[s], PLAIN);
                    int64_t outputs = nd_size(&out), size = 1;
                    for (int i = 3 - axes; i < 3; i++) {
                        size *= shapes[s][i];
                    }
                    double *sum = doubles(outputs), *most = doubles(outputs),
                           *least = doubles(outputs), *first = doubles(outputs),
                           *squares = doubles(outputs);
                    for (int64_t o = 0; o < outputs; o++) {
                        most[o] = -INFINITY;
                        least[o] = INFINITY;
                        for (int64_t i = 0; i < size; i++) {
                            double v = get(&x, o * size + i);
                            sum[o] += v;
                            squares[o] += v * v;
                            first[o] = v > most[o] ? (double)i : first[o];
                            most[o] = v > most[o] ? v : most[o];
                            least[o] = v < least[o] ? v : least[o];
                        }
                    }
                    double bound = 1e-6 * (double)(size + 10);
                    check_ok(cpu_sum(0, &(sum_args){&x, axes, &out}), "sum");
                    check_close(&out, sum, bound, 1e-6, "sum");
                    if (f < 3) {
                        check_ok(cpu_sumsq(0, &(sumsq_args){&x, axes, &out}), "sumsq");
                        check_close(&out, squares, bound, 1e-6, "sumsq");
                    }
                    if (size > 0) {
                        check_ok(cpu_max(0, &(max_args){&x, axes, &out}), "max");
                        check_close(&out, most, 0, 0, "max");
                        check_ok(cpu_min(0, &(min_args){&x, axes, &out}), "min");
                        check_close(&out, least, 0, 0, "min");
                        check_ok(cpu_argmax(0, &(argmax_args){&x, axes, &where}), "argmax");
                        check_close(&where, first, 0, 0, "argmax");
                    }
                    free(sum);
                    free(squares);
                    free(most);
                    free(least);
                    free(first);
                    nd_array_clear(&x);
                    nd_array_clear(&out);
                    nd_array_clear(&where);
                }
            }
        }
    }
    nd_array x = random_array(ND_F32, 1, SHAPE(200001), PLAIN), out = zeros(ND_F32, 0, SHAPE(0));
    set(&x, 150000, NAN);
    check_ok(cpu_max(0, &(max_args){&x, 1, &out}), "max");
    check(isnan(get(&out, 0)), "max", "NaN is lost");
    nd_array at = zeros(ND_I64, 0, SHAPE(0));
    check_ok(cpu_argmin(0, &(argmin_args){&x, 1, &at}), "argmin");
    check(get(&at, 0) == 150000, "argmin", "NaN is not the first best");
    nd_array_clear(&x);
    nd_array_clear(&out);
    nd_array_clear(&at);
}

int main(void) {
    test_special_values();
    test_elementwise();
    test_copies();
    test_reductions();
    return finish("test_elementwise");
}
