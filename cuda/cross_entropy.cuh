/* cross_entropy.cuh - functions that the files of the cross-entropy share. */
#ifndef NEEDLE_CROSS_ENTROPY_CUH
#define NEEDLE_CROSS_ENTROPY_CUH

#include "common.cuh"

/* cross_entropy.cu: loss = the mean over the rows whose target is not negative; share, unless NULL,
 * = 1 divided by their number. Both are 0 if there is no such row. */
nd_status cuda_mean_loss(const char *op, int device, const float *losses, const int32_t *targets,
                         float *loss, float *share, int64_t rows);

#endif
