/* layer_fp8.c - layer.c with its products in FP8 (fp8.h): each operand a power of two times e4m3,
 * the gradients that they multiply e5m2. Norms, weights and GELU's result are quantized where they
 * are made; attention, sums and the residual stay as in layer.c. y is rounded between the products
 * of w_o and w2, and no weight needs a neighbour.
 */
#include "layer.h"

enum { MEAN, RSTD, QKV, Z, LSE, DGELU, FIRST_FP8 }; /* of what is kept, and then pairs: */
enum { X1, X2, W_QKV, W_O, W1, W2, ZQ, G };         /* columns, of a weight rows, and the scale */
enum { DEEPEST = 1024 }; /* largest C of the kernels that end in a GELU */
_Static_assert(FIRST_FP8 + 2 * (G + 1) <= ND_MAX_KEPT, "a pair of each");
#define LARGEST_E4M3 448.0
#define LARGEST_E5M2 57344.0

/* A matrix times its scale: q (N, C), its transpose q_t (C, N), scale (). */
typedef struct {
    nd_array *q, *q_t, *scale;
} fp8;

/* GELU, or its gradient, is an op of its own. In float16 a bound would make infinities finite. */
static bool is_apart(const nd_layer_sizes *s) { return s->dtype == ND_F16 || s->c > DEEPEST; }

bool nd_takes_fp8(const nd_layer_sizes *s) {
    int64_t sizes[] = {s->n, s->c, s->k, s->q, s->m};
    bool takes = true;
    for (int i = 0; i < 5; i++) {
        takes = takes && sizes[i] > 0 && sizes[i] % 16 == 0;
    }
    return takes;
}

/* ---- matrices -------------------------------------------------------------------------------- */
/* Of (N, C): its columns are kept, as the operand of a weight's gradient; of a weight its rows. */
static fp8 made(nd_frame *f, nd_kept *kept, int which, bool rows, int64_t n, int64_t c) {
    int at = FIRST_FP8 + 2 * which;
    fp8 x;
    x.q = rows ? nd_keep(f, kept, at, ND_U8, SHAPE(n, c)) : nd_temporary(f, ND_U8, SHAPE(n, c));
    x.q_t = rows ? nd_temporary(f, ND_U8, SHAPE(c, n)) : nd_keep(f, kept, at, ND_U8, SHAPE(c, n));
    x.scale = nd_keep(f, kept, at + 1, ND_F32, 0, NULL);
    return x;
}

/* What made() kept, (N, C) or transposed (C, N). */
static fp8 kept_one(nd_frame *f, const nd_kept *kept, int which, int64_t rows, int64_t columns) {
    int at = FIRST_FP8 + 2 * which;
    nd_array *a = nd_take(f, kept, at, ND_U8, SHAPE(rows, columns));
    return (fp8){.q = a, .q_t = a, .scale = nd_take(f, kept, at + 1, ND_F32, 0, NULL)};
}

/* y = r + x w + b, or with `add` y += x w + b. */
static void product(nd_frame *f, fp8 x, fp8 w, const nd_array *b, const nd_array *r, bool add,
                    nd_array *y) {
    RUN(f, fp8_matmul, .a = x.q, .a_scale = x.scale, .b = w.q_t, .b_scale = w.scale, .bias = b,
        .r = r, .add = add, .c = y);
}

/* dx = d w^T. */
static void fp8_input_grad(nd_frame *f, fp8 d, fp8 w, nd_array *dx) {
    RUN(f, fp8_matmul, .a = d.q, .a_e5m2 = 1, .a_scale = d.scale, .b = w.q, .b_scale = w.scale,
        .c = dx);
}

/* dw (+)= x^T d, where it is wanted. */
static void fp8_weight_grad(nd_frame *f, fp8 x, fp8 d, bool add, nd_array *dw) {
    if (dw != NULL) {
        RUN(f, fp8_matmul, .a = x.q_t, .a_scale = x.scale, .b = d.q_t, .b_e5m2 = 1,
            .b_scale = d.scale, .add = add, .c = dw);
    }
}

/* ---- the layer ------------------------------------------------------------------------------- */
/* The operands of the last products, beside what is kept. */
typedef struct {
    fp8 z, w_o, g, w2;
} last;

static last fp8_activations(nd_frame *f, const layer_fwd_args *a, nd_kept *kept) {
    nd_layer_sizes s = nd_sizes_of(a);
    nd_array *mean = nd_keep(f, kept, MEAN, ND_F32, SHAPE(s.n)),
             *rstd = nd_keep(f, kept, RSTD, ND_F32, SHAPE(s.n)),
             *qkv = nd_keep(f, kept, QKV, s.dtype, SHAPE(s.b, s.t, s.q)),
             *z = nd_keep(f, kept, Z, s.dtype, SHAPE(s.b, s.t, s.k)),
             *lse = nd_keep(f, kept, LSE, ND_F32, SHAPE(s.b, s.heads, s.t)),
             *dgelu = nd_keep(f, kept, DGELU, s.dtype, SHAPE(s.n, s.m));
    fp8 x1 = made(f, kept, X1, false, s.n, s.c), x2 = made(f, kept, X2, false, s.n, s.c),
        w_qkv = made(f, kept, W_QKV, true, s.c, s.q), w_o = made(f, kept, W_O, true, s.k, s.c),
        w1 = made(f, kept, W1, true, s.c, s.m), w2 = made(f, kept, W2, true, s.m, s.c);
    nd_array *bound = nd_temporary(f, ND_F32, 0, NULL);

    RUN(f, layernorm_pair_fp8, .x = ROWS(a->x), .norm_w1 = a->norm_w1, .norm_b1 = a->norm_b1,
        .norm_w2 = a->norm_w2, .norm_b2 = a->norm_b2, .eps = a->eps, .q1 = x1.q, .q1_t = x1.q_t,
        .scale1 = x1.scale, .q2 = x2.q, .q2_t = x2.q_t, .scale2 = x2.scale, .mean = mean,
        .rstd = rstd);
    RUN(f, fp8_layer_weights, .norm_w = a->norm_w2, .norm_b = a->norm_b2, .w_qkv = a->w_qkv,
        .w_o = a->w_o, .w1 = a->w1, .b1 = FLAT(a->b1), .w2 = a->w2, .q_qkv = w_qkv.q,
        .q_qkv_t = w_qkv.q_t, .scale_qkv = w_qkv.scale, .q_o = w_o.q, .q_o_t = w_o.q_t,
        .scale_o = w_o.scale, .q1 = w1.q, .q1_t = w1.q_t, .scale1 = w1.scale, .q2 = w2.q,
        .q2_t = w2.q_t, .scale2 = w2.scale, .bound = bound);

    product(f, x1, w_qkv, FLAT(a->b_qkv), NULL, false, ROWS(qkv));
    nd_array_clear(x1.q);
    nd_array_clear(w_qkv.q_t);
    RUN(f, rotary, .x = V(nd_by_heads(qkv, 2, &s)), .cos = a->cos, .sin = a->sin, .parts = 2,
        .sign = 1.0);
    nd_attend(f, a, qkv, V(nd_heads_of(z, &s)), lse);
    fp8 zq = made(f, kept, ZQ, false, s.n, s.k);
    RUN(f, fp8_quantize, .x = ROWS(z), .q = zq.q, .q_t = zq.q_t, .scale = zq.scale);

    fp8 g = made(f, kept, G, false, s.n, s.m);
    if (is_apart(&s)) {
        nd_array *pre = nd_temporary(f, s.dtype, SHAPE(s.n, s.m));
        product(f, x2, w1, FLAT(a->b1), NULL, false, pre);
        RUN(f, fp8_quantize, .x = pre, .gelu = 1 + a->tanh, .dgelu = dgelu,
            .largest = s.dtype == ND_F16 ? NULL : bound, .q = g.q, .q_t = g.q_t, .scale = g.scale);
        nd_array_clear(pre);
    } else {
        RUN(f, fp8_linear_gelu_fwd, .x = x2.q, .x_scale = x2.scale, .w = w1.q_t,
            .w_scale = w1.scale, .b = FLAT(a->b1), .largest = bound, .tanh = a->tanh, .y = g.q,
            .y_t = g.q_t, .scale = g.scale, .dgelu = dgelu);
    }
    nd_array_clear(x2.q);
    nd_array_clear(w1.q_t);
    return (last){.z = zq, .w_o = w_o, .g = g, .w2 = w2};
}

void nd_layer_activations_fp8(nd_frame *f, const layer_fwd_args *a, nd_kept *kept) {
    last operands = fp8_activations(f, a, kept);
    nd_array_clear(operands.z.q);
    nd_array_clear(operands.w_o.q_t);
    nd_array_clear(operands.g.q);
    nd_array_clear(operands.w2.q_t);
}

void nd_layer_forward_fp8(nd_frame *f, const layer_fwd_args *a, nd_kept *kept) {
    last operands = fp8_activations(f, a, kept);
    nd_array *bias = nd_temporary(f, a->b2->dtype, SHAPE(nd_size(a->b2)));
    RUN(f, add, .x = FLAT(a->b_o), .y = FLAT(a->b2), .out = bias);
    product(f, operands.z, operands.w_o, bias, ROWS(a->x), false, ROWS(a->y));
    product(f, operands.g, operands.w2, NULL, NULL, true, ROWS(a->y));
}

/* What the backward alone sees. The FP8 of three gradients, each with its transpose: */
typedef struct {
    nd_array d, d_t;             /* of dy */
    nd_array dn2;                /* (N, C) */
    nd_array dpre, dpre_t, dg;   /* (N, M); dg = dy w2^T, before gelu', where that is apart */
    nd_array dqkv, dz, dq, dq_t; /* in the place of dpre; dq, of dqkv, in the place of dz */
    nd_array dn1;                /* (N, C), in the place of dqkv */
} fp8_between;

static fp8_between fp8_place(nd_space *space, const nd_layer_sizes *s) {
    fp8_between grads;
    grads.d = nd_place(space, ND_U8, SHAPE(s->n, s->c));
    grads.d_t = nd_place(space, ND_U8, SHAPE(s->c, s->n));
    grads.dn2 = nd_place(space, s->dtype, SHAPE(s->n, s->c));
    int64_t start = space->at;
    grads.dpre = nd_place(space, ND_U8, SHAPE(s->n, s->m));
    grads.dpre_t = nd_place(space, ND_U8, SHAPE(s->m, s->n));
    grads.dg = nd_place(space, s->dtype, SHAPE(is_apart(s) ? s->n : 0, s->m));
    space->at = start;
    grads.dn1 = nd_place(space, s->dtype, SHAPE(s->n, s->c));
    int64_t after = space->at;
    space->at = start;
    grads.dqkv = nd_place(space, s->dtype, SHAPE(s->b, s->t, s->q));
    start = after > space->at ? after : space->at; /* dq is read while dn1 is written */
    space->at = start;
    grads.dz = nd_place(space, s->dtype, SHAPE(s->b, s->t, s->k));
    space->at = start;
    grads.dq = nd_place(space, ND_U8, SHAPE(s->n, s->q));
    grads.dq_t = nd_place(space, ND_U8, SHAPE(s->q, s->n));
    return grads;
}

void nd_layer_backward_fp8(nd_frame *f, const layer_bwd_args *a, const nd_kept *kept) {
    layer_fwd_args of = nd_forward_of(a);
    nd_layer_sizes s = nd_sizes_of(&of);
    nd_array *mean = nd_take(f, kept, MEAN, ND_F32, SHAPE(s.n)),
             *rstd = nd_take(f, kept, RSTD, ND_F32, SHAPE(s.n)),
             *qkv = nd_take(f, kept, QKV, s.dtype, SHAPE(s.b, s.t, s.q)),
             *z = nd_take(f, kept, Z, s.dtype, SHAPE(s.b, s.t, s.k)),
             *lse = nd_take(f, kept, LSE, ND_F32, SHAPE(s.b, s.heads, s.t)),
             *dgelu = nd_take(f, kept, DGELU, s.dtype, SHAPE(s.n, s.m));
    fp8 x1 = kept_one(f, kept, X1, s.c, s.n), x2 = kept_one(f, kept, X2, s.c, s.n),
        w_qkv = kept_one(f, kept, W_QKV, s.c, s.q), w_o = kept_one(f, kept, W_O, s.k, s.c),
        w1 = kept_one(f, kept, W1, s.c, s.m), w2 = kept_one(f, kept, W2, s.m, s.c),
        zq = kept_one(f, kept, ZQ, s.k, s.n), g = kept_one(f, kept, G, s.m, s.n);
    bool bounded = s.dtype != ND_F16, apart = is_apart(&s);
    /* All memory comes first: where it is lacking no gradient has been written. */
    nd_space space = {0};
    fp8_place(&space, &s);
    nd_space_open(f, &space);
    fp8_between grads = fp8_place(&space, &s);
    nd_array *scales[3], *largest = nd_temporary(f, ND_F32, 0, NULL);
    for (int i = 0; i < 3; i++) {
        scales[i] = nd_temporary(f, ND_F32, 0, NULL);
    }
    nd_array *sums = nd_temporary(f, ND_F32, SHAPE(apart ? (s.n + 127) / 128 : 0, s.m));
    nd_vector_grads vectors = nd_vectors(f, a);
    fp8 d = {&grads.d, &grads.d_t, scales[0]}, dpre = {&grads.dpre, &grads.dpre_t, scales[1]},
        dq = {&grads.dq, &grads.dq_t, scales[2]};
    nd_array dy = nd_merged(a->dy, 2);
    double bound = bounded ? (double)s.c * LARGEST_E5M2 * LARGEST_E4M3 : 0.0;

    RUN(f, fp8_quantize, .x = &dy, .e5m2 = 1, .q = d.q, .q_t = d.q_t, .scale = d.scale);
    fp8_weight_grad(f, zq, d, a->add & ADD_O, a->dw_o);
    fp8_weight_grad(f, g, d, a->add & ADD_2, a->dw2);
    nd_bias_grads(f, &dy, a->db_o, a->db2);

    if (apart) {
        fp8_input_grad(f, d, w2, &grads.dg);
        RUN(f, fp8_quantize, .x = &grads.dg, .dgelu = dgelu, .e5m2 = 1,
            .scale_a = bounded ? d.scale : NULL, .scale_b = bounded ? w2.scale : NULL,
            .bound = bound, .sums = sums, .q = dpre.q, .q_t = dpre.q_t, .scale = dpre.scale);
        nd_bias_grads(f, sums, a->db1, NULL);
    } else {
        RUN(f, fp8_linear_gelu_bwd, .d = d.q, .d_scale = d.scale, .w = w2.q, .w_scale = w2.scale,
            .dgelu = dgelu, .bound = bound, .db = a->db1 != NULL ? &vectors.db1 : NULL, .q = dpre.q,
            .q_t = dpre.q_t, .scale = dpre.scale);
    }
    fp8_input_grad(f, dpre, w1, &grads.dn2);
    fp8_weight_grad(f, x2, dpre, a->add & ADD_1, a->dw1);

    fp8_input_grad(f, d, w_o, ROWS(&grads.dz));
    nd_attention_grads(f, a, qkv, V(nd_heads_of(z, &s)), lse, V(nd_heads_of(&grads.dz, &s)),
                       &grads.dqkv, largest);
    RUN(f, fp8_quantize, .x = ROWS(&grads.dqkv), .e5m2 = 1, .largest = largest, .q = dq.q,
        .q_t = dq.q_t, .scale = dq.scale);
    fp8_input_grad(f, dq, w_qkv, &grads.dn1);
    fp8_weight_grad(f, x1, dq, a->add & ADD_QKV, a->dw_qkv);

    nd_norm_grads(f, a, &vectors, &grads.dn1, &grads.dn2, mean, rstd);
}
