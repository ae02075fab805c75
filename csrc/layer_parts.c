/* layer_parts.c - what a layer has alike in each precision: sizes, views, attention, and the
 * gradients of biases and norms (layer.h).
 */
#include "layer.h"

#include <math.h>

/* ---- sizes and views ------------------------------------------------------------------------- */
nd_layer_sizes nd_sizes_of(const layer_fwd_args *a) {
    int64_t b = a->x->shape[0], t = a->x->shape[1], k = a->w_o->shape[0];
    return (nd_layer_sizes){.dtype = a->x->dtype,
                            .b = b,
                            .t = t,
                            .n = b * t,
                            .c = a->x->shape[2],
                            .heads = a->heads,
                            .d = a->heads > 0 ? k / a->heads : 0,
                            .k = k,
                            .q = a->w_qkv->shape[1],
                            .m = a->w1->shape[1]};
}

layer_fwd_args nd_forward_of(const layer_bwd_args *a) {
#define SAME(field) .field = a->field
    return (layer_fwd_args){
        SAME(x),         SAME(norm_w1), SAME(norm_b1), SAME(norm_w2), SAME(norm_b2), SAME(w_qkv),
        SAME(b_qkv),     SAME(w_o),     SAME(b_o),     SAME(w1),      SAME(b1),      SAME(w2),
        SAME(b2),        SAME(cos),     SAME(sin),     SAME(offsets), SAME(columns), SAME(order),
        SAME(offsets_t), SAME(rows),    SAME(order_t), SAME(block),   SAME(heads),   SAME(eps),
        SAME(tanh),      SAME(fp8)};
#undef SAME
}

nd_array nd_by_heads(const nd_array *a, int lead, const nd_layer_sizes *s) {
    int64_t shape[ND_MAX_DIMS], strides[ND_MAX_DIMS];
    for (int i = 0; i < lead; i++) {
        shape[i] = a->shape[i];
    }
    shape[lead] = s->heads;
    shape[lead + 1] = 3;
    shape[lead + 2] = s->d;
    nd_contiguous_strides(lead + 3, shape, strides);
    return nd_part(a, 0, lead + 3, shape, strides);
}

nd_array nd_third(const nd_array *qkv, int i, const nd_layer_sizes *s) {
    int64_t strides[4] = {s->t * s->q, s->q, 3 * s->d, 1};
    return nd_part(qkv, i * s->d, 4, (int64_t[]){s->b, s->t, s->heads, s->d}, strides);
}

nd_array nd_heads_of(const nd_array *a, const nd_layer_sizes *s) {
    int64_t width = a->shape[2], strides[4] = {s->t * width, width, s->d, 1};
    return nd_part(a, 0, 4, (int64_t[]){s->b, s->t, s->heads, s->d}, strides);
}

/* ---- parts ----------------------------------------------------------------------------------- */
static double scale_of(const nd_layer_sizes *s) { return 1.0 / sqrt((double)s->d); }

void nd_attend(nd_frame *f, const layer_fwd_args *a, const nd_array *qkv, nd_array *z,
               nd_array *lse) {
    nd_layer_sizes s = nd_sizes_of(a);
    nd_array q = nd_third(qkv, 0, &s), k = nd_third(qkv, 1, &s), v = nd_third(qkv, 2, &s);
    if (a->offsets == NULL) {
        RUN(f, attention_fwd, .q = &q, .k = &k, .v = &v, .scale = scale_of(&s), .causal = 1, .o = z,
            .lse = lse);
    } else {
        RUN(f, block_sparse_attention_fwd, .q = &q, .k = &k, .v = &v, .offsets = a->offsets,
            .columns = a->columns, .order = a->order, .block = a->block, .scale = scale_of(&s),
            .causal = 1, .o = z, .lse = lse);
    }
}

void nd_attention_grads(nd_frame *f, const layer_bwd_args *a, const nd_array *qkv,
                        const nd_array *z, const nd_array *lse, const nd_array *dz, nd_array *dqkv,
                        nd_array *largest) {
    layer_fwd_args forward = nd_forward_of(a);
    nd_layer_sizes s = nd_sizes_of(&forward);
    nd_array q = nd_third(qkv, 0, &s), k = nd_third(qkv, 1, &s), v = nd_third(qkv, 2, &s);
    nd_array dq = nd_third(dqkv, 0, &s), dk = nd_third(dqkv, 1, &s), dv = nd_third(dqkv, 2, &s);
    nd_array *db = a->db_qkv != NULL ? V(nd_by_heads(a->db_qkv, 0, &s)) : NULL;
    if (a->offsets == NULL) {
        RUN(f, attention_bwd, .dout = dz, .q = &q, .k = &k, .v = &v, .o = z, .lse = lse,
            .scale = scale_of(&s), .causal = 1, .cos = a->cos, .sin = a->sin, .dq = &dq, .dk = &dk,
            .dv = &dv, .db = db, .largest = largest);
    } else {
        RUN(f, block_sparse_attention_bwd, .dout = dz, .q = &q, .k = &k, .v = &v, .o = z,
            .lse = lse, .offsets = a->offsets, .columns = a->columns, .order = a->order,
            .offsets_t = a->offsets_t, .rows = a->rows, .order_t = a->order_t, .block = a->block,
            .scale = scale_of(&s), .causal = 1, .cos = a->cos, .sin = a->sin, .dq = &dq, .dk = &dk,
            .dv = &dv, .db = db, .largest = largest);
    }
}

void nd_bias_grads(nd_frame *f, const nd_array *dy, nd_array *db, nd_array *db2) {
    nd_array *first = db != NULL ? db : db2, *second = db != NULL ? db2 : NULL;
    if (first != NULL) {
        RUN(f, bias_bwd, .dy = dy, .db = FLAT(first), .db2 = second != NULL ? FLAT(second) : NULL);
    }
}

nd_vector_grads nd_vectors(nd_frame *f, const layer_bwd_args *a) {
    int64_t c = a->x->shape[2], m = a->w1->shape[1];
    nd_vector_grads into;
    nd_array *to[] = {&into.dnorm_w1, &into.dnorm_b1, &into.dnorm_w2, &into.dnorm_b2, &into.db1};
    nd_array *wanted[] = {a->dnorm_w1, a->dnorm_b1, a->dnorm_w2, a->dnorm_b2, a->db1};
    for (int i = 0; i < 5; i++) {
        int64_t size = i < 4 ? c : m;
        *to[i] =
            wanted[i] != NULL ? nd_merged(wanted[i], 0) : *nd_temporary(f, ND_F32, SHAPE(size));
    }
    nd_require(f, into.db1.shape[0] == m, "db1: must have the elements of b1");
    return into;
}

void nd_norm_grads(nd_frame *f, const layer_bwd_args *a, nd_vector_grads *into, nd_array *dn1,
                   nd_array *dn2, const nd_array *mean, const nd_array *rstd) {
    RUN(f, layernorm_pair_bwd, .dy1 = dn1, .dy2 = dn2, .x = ROWS(a->x), .norm_w1 = a->norm_w1,
        .norm_w2 = a->norm_w2, .mean = mean, .rstd = rstd, .dres = ROWS(a->dy),
        .dnorm_w1 = &into->dnorm_w1, .dnorm_b1 = &into->dnorm_b1, .dnorm_w2 = &into->dnorm_w2,
        .dnorm_b2 = &into->dnorm_b2, .dx = ROWS(a->dx));
}
