/* layer.c - a transformer layer with a parallel residual: forward, recomputation, backward.
 *
 *   n1, n2 = norm1(x), norm2(x)                      each (B, T, C)
 *   qkv    = rotary(n1 w_qkv + b_qkv)                (B, T, Q), by head (B, T, heads, 3, D)
 *   z      = attention(q, k, v)                      (B, T, K)
 *   g      = gelu(n2 w1 + b1)                        (B, T, M)
 *   y      = x + [z g] [w_o; w2] + (b_o + b2)        `both` is [z g], (B, T, K + M)
 *
 *   [dw_o; dw2] (+)= [z g]^T dy                      += with its bit of `add`, else =
 *   dpre = dy w2^T gelu'(n2 w1 + b1)                 (B, T, M)
 *   dw1 (+)= n2^T dpre, dn2 = dpre w1^T
 *   dz = dy w_o^T, dqkv from dz                      through attention and rotary
 *   dw_qkv (+)= n1^T dqkv, dn1 = dqkv w_qkv^T
 *   dx = dy + the gradients of norm1 and norm2       from dn1 and dn2
 *
 * z and g lie side by side, so that y is one product of depth K + M where w2 follows w_o in memory,
 * as in a flattened model, and so is the gradient of both weights. All of it is ops of ops.def, the
 * same for each backend and dtype. layer_fp8.c has the products in FP8.
 */
#include "layer.h"

enum { N1, N2, MEAN, RSTD, QKV, LSE, BOTH, DGELU }; /* the arrays that are kept */

/* ---- parts ----------------------------------------------------------------------------------- */
static void check(nd_frame *f, const layer_fwd_args *a, const nd_layer_sizes *s) {
    nd_require(f, s->heads > 0 && s->q == 3 * s->k && s->k % s->heads == 0,
               "w_qkv: must be (%lld, 3 x heads x D), w_o (heads x D, %lld), but they have %lld "
               "columns and %lld rows for %lld heads",
               (long long)s->c, (long long)s->c, (long long)s->q, (long long)s->k,
               (long long)s->heads);
    nd_require(f, nd_size(a->b_qkv) == s->q, "b_qkv: must have an element a column of w_qkv");
    nd_require(f, nd_size(a->b_o) == s->c, "b_o: must have an element a column of w_o");
    nd_require(f, nd_size(a->b1) == s->m, "b1: must have an element a column of w1");
    nd_require(f, nd_size(a->b2) == s->c, "b2: must have an element a column of w2");
    nd_require(f, 2 * a->cos->shape[1] <= s->d, "cos: more angles than half of D");
}

/* `count` columns of the rows of a, from `first` on. */
static nd_array columns(const nd_array *a, int64_t first, int64_t count) {
    nd_array rows = nd_merged(a, a->ndim - 1);
    return nd_part(&rows, first, 2, (int64_t[]){rows.shape[0], count}, rows.strides);
}

/* dx = dy w^T. */
static void input_grad(nd_frame *f, const nd_array *dy, const nd_array *w, nd_array *dx) {
    RUN(f, matmul, .a = V(nd_batch_of_1(dy)), .b = V(nd_batch_of_1(V(nd_transposed(w)))),
        .c = V(nd_batch_of_1(dx)));
}

/* dw (+)= x^T dy, where it is wanted; of w1 that is (C, N) times (N, M). */
static void weight_grad(nd_frame *f, const nd_array *x, const nd_array *dy, bool add,
                        nd_array *dw) {
    if (dw != NULL) {
        RUN(f, matmul_acc, .a = V(nd_batch_of_1(V(nd_transposed(x)))), .b = V(nd_batch_of_1(dy)),
            .add = add, .c = V(nd_batch_of_1(dw)));
    }
}

/* [w_o; w2]: in place where one follows the other, else a copy. */
static nd_array last_weight(nd_frame *f, const nd_array *w_o, const nd_array *w2) {
    nd_array w;
    if (!nd_joined(w_o, w2, &w)) {
        int64_t k = w_o->shape[0], m = w2->shape[0], c = w2->shape[1], strides[2] = {c, 1};
        w = *nd_temporary(f, w2->dtype, SHAPE(k + m, c));
        RUN(f, assign, .to = V(nd_part(&w, 0, 2, w_o->shape, strides)), .source = w_o);
        RUN(f, assign, .to = V(nd_part(&w, k * c, 2, w2->shape, strides)), .source = w2);
    }
    return w;
}

/* [dw_o; dw2] (+)= [z g]^T dy, as one product where they are neighbours. */
static void last_weight_grads(nd_frame *f, const layer_bwd_args *a, const nd_array *both,
                              const nd_array *dy) {
    int64_t k = a->w_o->shape[0], m = a->w2->shape[0];
    bool add_o = a->add & ADD_O, add_2 = a->add & ADD_2;
    nd_array dw;
    if (a->dw_o != NULL && a->dw2 != NULL && add_o == add_2 && nd_joined(a->dw_o, a->dw2, &dw)) {
        weight_grad(f, ROWS(both), dy, add_o, &dw);
        return;
    }
    weight_grad(f, V(columns(both, 0, k)), dy, add_o, a->dw_o);
    weight_grad(f, V(columns(both, k, m)), dy, add_2, a->dw2);
}

/* ---- the layer ------------------------------------------------------------------------------- */
/* All but y, into `kept`. */
static void activations(nd_frame *f, const layer_fwd_args *a, nd_kept *kept) {
    nd_layer_sizes s = nd_sizes_of(a);
    nd_array *n1 = nd_keep(f, kept, N1, s.dtype, SHAPE(s.b, s.t, s.c)),
             *n2 = nd_keep(f, kept, N2, s.dtype, SHAPE(s.b, s.t, s.c)),
             *mean = nd_keep(f, kept, MEAN, ND_F32, SHAPE(s.n)),
             *rstd = nd_keep(f, kept, RSTD, ND_F32, SHAPE(s.n)),
             *qkv = nd_keep(f, kept, QKV, s.dtype, SHAPE(s.b, s.t, s.q)),
             *lse = nd_keep(f, kept, LSE, ND_F32, SHAPE(s.b, s.heads, s.t)),
             *both = nd_keep(f, kept, BOTH, s.dtype, SHAPE(s.b, s.t, s.k + s.m)),
             *dgelu = nd_keep(f, kept, DGELU, s.dtype, SHAPE(s.n, s.m));

    RUN(f, layernorm_pair_fwd, .x = ROWS(a->x), .norm_w1 = a->norm_w1, .norm_b1 = a->norm_b1,
        .norm_w2 = a->norm_w2, .norm_b2 = a->norm_b2, .eps = a->eps, .y1 = ROWS(n1), .y2 = ROWS(n2),
        .mean = mean, .rstd = rstd);
    RUN(f, linear_rotary_fwd, .x = n1, .w = V(nd_by_heads(a->w_qkv, 1, &s)),
        .b = V(nd_by_heads(a->b_qkv, 0, &s)), .cos = a->cos, .sin = a->sin, .parts = 2,
        .y = V(nd_by_heads(qkv, 2, &s)));
    nd_attend(f, a, qkv, V(nd_heads_of(both, &s)), lse);
    RUN(f, linear_gelu_fwd, .x = ROWS(n2), .w = a->w1, .b = FLAT(a->b1), .tanh = a->tanh,
        .dgelu = dgelu, .y = V(columns(both, s.k, s.m)));
}

static void result(nd_frame *f, const layer_fwd_args *a, const nd_kept *kept) {
    const nd_array *both = &kept->arrays[BOTH];
    nd_array w = last_weight(f, a->w_o, a->w2);
    nd_array *bias = nd_temporary(f, a->b2->dtype, SHAPE(nd_size(a->b2)));
    RUN(f, add, .x = FLAT(a->b_o), .y = FLAT(a->b2), .out = bias);
    RUN(f, linear_fwd, .x = ROWS(both), .w = &w, .b = bias, .r = ROWS(a->x), .y = ROWS(a->y));
}

/* Gradients that the backward alone sees. */
typedef struct {
    nd_array dn2, dpre; /* (N, C), (N, M) */
    nd_array dz, dqkv;  /* (B, T, K), (B, T, Q), in the place of dpre */
    nd_array dn1;       /* (N, C), in the place of dz */
} between;

static between place(nd_space *space, const nd_layer_sizes *s) {
    between grads;
    grads.dn2 = nd_place(space, s->dtype, SHAPE(s->n, s->c));
    int64_t start = space->at;
    grads.dpre = nd_place(space, s->dtype, SHAPE(s->n, s->m));
    space->at = start;
    grads.dn1 = nd_place(space, s->dtype, SHAPE(s->n, s->c));
    int64_t after = space->at;
    space->at = start;
    grads.dz = nd_place(space, s->dtype, SHAPE(s->b, s->t, s->k));
    space->at = after > space->at ? after : space->at;
    grads.dqkv = nd_place(space, s->dtype, SHAPE(s->b, s->t, s->q));
    return grads;
}

static void backward(nd_frame *f, const layer_bwd_args *a, const nd_kept *kept) {
    layer_fwd_args of = nd_forward_of(a);
    nd_layer_sizes s = nd_sizes_of(&of);
    nd_array *n1 = nd_take(f, kept, N1, s.dtype, SHAPE(s.b, s.t, s.c)),
             *n2 = nd_take(f, kept, N2, s.dtype, SHAPE(s.b, s.t, s.c)),
             *mean = nd_take(f, kept, MEAN, ND_F32, SHAPE(s.n)),
             *rstd = nd_take(f, kept, RSTD, ND_F32, SHAPE(s.n)),
             *qkv = nd_take(f, kept, QKV, s.dtype, SHAPE(s.b, s.t, s.q)),
             *lse = nd_take(f, kept, LSE, ND_F32, SHAPE(s.b, s.heads, s.t)),
             *both = nd_take(f, kept, BOTH, s.dtype, SHAPE(s.b, s.t, s.k + s.m)),
             *dgelu = nd_take(f, kept, DGELU, s.dtype, SHAPE(s.n, s.m));
    /* All arrays come first: where their memory is lacking no gradient has been written. */
    nd_space space = {0};
    place(&space, &s);
    nd_space_open(f, &space);
    between grads = place(&space, &s);
    nd_vector_grads vectors = nd_vectors(f, a);
    nd_array dy = nd_merged(a->dy, 2);

    last_weight_grads(f, a, both, &dy);
    nd_bias_grads(f, &dy, a->db_o, a->db2);

    RUN(f, linear_gelu_bwd, .dy = &dy, .w = a->w2, .dgelu = dgelu, .dpre = &grads.dpre,
        .db = &vectors.db1);
    input_grad(f, &grads.dpre, a->w1, &grads.dn2);
    weight_grad(f, ROWS(n2), &grads.dpre, a->add & ADD_1, a->dw1);

    input_grad(f, &dy, a->w_o, ROWS(&grads.dz));
    nd_attention_grads(f, a, qkv, V(nd_heads_of(both, &s)), lse, V(nd_heads_of(&grads.dz, &s)),
                       &grads.dqkv, NULL);
    input_grad(f, ROWS(&grads.dqkv), a->w_qkv, &grads.dn1);
    weight_grad(f, ROWS(n1), ROWS(&grads.dqkv), a->add & ADD_QKV, a->dw_qkv);

    nd_norm_grads(f, a, &vectors, &grads.dn1, &grads.dn2, mean, rstd);
}

/* ---- entries --------------------------------------------------------------------------------- */
nd_status nd_layer_fwd(nd_device *device, const void *args) {
    const layer_fwd_args *a = args;
    nd_frame f = {.device = device};
    nd_kept own = {.device = device}, *kept = a->keep ? a->saved : &own;
    nd_layer_sizes s = nd_sizes_of(a);
    check(&f, a, &s);
    nd_output(&f, s.dtype, 3, a->x->shape, a->y);
    if (a->fp8 && nd_takes_fp8(&s)) {
        nd_layer_forward_fp8(&f, a, kept);
    } else {
        activations(&f, a, kept);
        result(&f, a, kept);
    }
    nd_free_kept(&own);
    return nd_frame_end(&f);
}

nd_status nd_layer_bwd(nd_device *device, const void *args) {
    const layer_bwd_args *a = args;
    nd_frame f = {.device = device};
    nd_kept own = {.device = device};
    layer_fwd_args of = nd_forward_of(a);
    nd_layer_sizes s = nd_sizes_of(&of);
    bool fp8 = a->fp8 && nd_takes_fp8(&s);
    check(&f, &of, &s);
    nd_require(&f, a->db_qkv == NULL || nd_size(a->db_qkv) == s.q, "db_qkv: must be as b_qkv");
    nd_require(&f, a->db_o == NULL || nd_size(a->db_o) == s.c, "db_o: must be as b_o");
    nd_require(&f, a->db2 == NULL || nd_size(a->db2) == s.c, "db2: must be as b2");
    if (a->saved == NULL) {
        (fp8 ? nd_layer_activations_fp8 : activations)(&f, &of, &own);
    }
    nd_output(&f, s.dtype, 3, a->x->shape, a->dx);
    nd_hold_sums(&f, true);
    (fp8 ? nd_layer_backward_fp8 : backward)(&f, a, a->saved != NULL ? a->saved : &own);
    nd_hold_sums(&f, false);
    nd_free_kept(&own);
    return nd_frame_end(&f);
}
