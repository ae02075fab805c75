/* cross_entropy.cuh - what the files of the cross-entropy have of each other. */
#ifndef NEEDLE_CROSS_ENTROPY_CUH
#define NEEDLE_CROSS_ENTROPY_CUH

#include "common.cuh"

/* cross_entropy.cu: the mean of the losses over the rows whose target is not negative, 0 without
 * any; and how many those are, with `inverse` 1 by that (0 without any). */
nd_status cuda_mean_loss(const char *op, int device, const float *losses, const int32_t *targets,
                         float *loss, float *count, bool inverse, int64_t rows);

/* cross_entropy_long.cu: 16 bits, rows that start at multiples of 16 bytes and are long, though two fit into shared
 * memory. */
bool cross_entropy_long_serves(int device, const nd_array *logits);

/* The losses and the logits' gradient of cross_entropy_fwd_bwd; neither loss nor share. */
nd_status cross_entropy_long(int device, const cross_entropy_fwd_bwd_args *a);

#endif
