/* cross_entropy_long.cuh - cross_entropy_long.cu's entry into cross_entropy.cu. */
#ifndef NEEDLE_CROSS_ENTROPY_LONG_CUH
#define NEEDLE_CROSS_ENTROPY_LONG_CUH

#include "common.cuh"

/* 16 bits, rows that start at multiples of 16 bytes and are long, though two fit into shared
 * memory. */
bool cross_entropy_long_serves(int device, const nd_array *logits);

/* The losses and the logits' gradient of cross_entropy_fwd_bwd; neither loss nor share. */
nd_status cross_entropy_long(int device, const cross_entropy_fwd_bwd_args *a);

#endif
