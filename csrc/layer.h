/* layer.h - what layer.c and layer_fp8.c share: layer_parts.c. Axis letters: LAYER of ops.def, and
 * N = B T rows. */
#ifndef NEEDLE_LAYER_H
#define NEEDLE_LAYER_H

#include "composite.h"

/* Bits of layer_bwd's `add`: add to dw_qkv, dw_o, dw1, dw2; without its bit it is written. */
enum { ADD_QKV = 1, ADD_O = 2, ADD_1 = 4, ADD_2 = 8 };

typedef struct {
    nd_dtype dtype;
    int64_t b, t, n, c, heads, d, k, q, m; /* n = B T, k = heads D, q = 3 k */
} nd_layer_sizes;

/* Where a backward writes gradients: those that are not wanted go into temporary arrays. */
typedef struct {
    nd_array dnorm_w1, dnorm_b1, dnorm_w2, dnorm_b2; /* (C,) */
    nd_array db1;                                    /* (M,) */
} nd_vector_grads;

#pragma GCC visibility push(hidden)
nd_layer_sizes nd_sizes_of(const layer_fwd_args *a);
/* The layer of a backward. */
layer_fwd_args nd_forward_of(const layer_bwd_args *a);

/* Columns of qkv (..., Q) as heads: with `lead` axes before them (..., heads, 3, D). */
nd_array nd_by_heads(const nd_array *a, int lead, const nd_layer_sizes *s);
/* q, k or v (B, T, heads, D) of qkv (B, T, Q), for i of 0, 1, 2. */
nd_array nd_third(const nd_array *qkv, int i, const nd_layer_sizes *s);
/* z (B, T, heads, D), the first K columns of (B, T, width). */
nd_array nd_heads_of(const nd_array *a, const nd_layer_sizes *s);

void nd_attend(nd_frame *f, const layer_fwd_args *a, const nd_array *qkv, nd_array *z,
               nd_array *lse);
/* dqkv from dz, before rotation; db_qkv += where it is wanted. largest (): the largest |dqkv|, or
 * NULL. */
void nd_attention_grads(nd_frame *f, const layer_bwd_args *a, const nd_array *qkv,
                        const nd_array *z, const nd_array *lse, const nd_array *dz, nd_array *dqkv,
                        nd_array *largest);
/* db and db2 += the column sums of dy, where they are wanted. */
void nd_bias_grads(nd_frame *f, const nd_array *dy, nd_array *db, nd_array *db2);
nd_vector_grads nd_vectors(nd_frame *f, const layer_bwd_args *a);
/* dx = dy + the gradients of both norms. */
void nd_norm_grads(nd_frame *f, const layer_bwd_args *a, nd_vector_grads *into, nd_array *dn1,
                   nd_array *dn2, const nd_array *mean, const nd_array *rstd);

/* ---- layer_fp8.c: the same in FP8, where all sizes are multiples of 16 ----------------------- */
bool nd_takes_fp8(const nd_layer_sizes *s);
void nd_layer_forward_fp8(nd_frame *f, const layer_fwd_args *a, nd_kept *kept);
void nd_layer_activations_fp8(nd_frame *f, const layer_fwd_args *a, nd_kept *kept);
void nd_layer_backward_fp8(nd_frame *f, const layer_bwd_args *a, const nd_kept *kept);
#pragma GCC visibility pop
#endif
