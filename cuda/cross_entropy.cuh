/* cross_entropy.cuh - functions that the files of the cross-entropy share. */
#ifndef NEEDLE_CROSS_ENTROPY_CUH
#define NEEDLE_CROSS_ENTROPY_CUH

#include "common.cuh"

/* cross_entropy.cu: loss = the mean over the rows whose target is not negative; share, unless NULL,
 * = 1 divided by their number. Both are 0 if there is no such row. */
nd_status cuda_mean_loss(const char *op, int device, const float *losses, const int32_t *targets,
                         float *loss, float *share, int64_t rows);

/* cross_entropy_long.cu: true for 16-bit rows that start at multiples of 16 bytes and are long, but
 * short enough that two fit into shared memory. */
bool cross_entropy_long_serves(int device, const nd_array *logits);

/* Computes losses and the logits' gradient of cross_entropy_fwd_bwd, but not loss and share. */
nd_status cross_entropy_long(int device, const cross_entropy_fwd_bwd_args *a);

#endif
