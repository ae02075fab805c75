/* attention_sums.cuh - passes over the p.dq, p.dk and p.dv of one dtype (attention_sums.cu). */
#ifndef NEEDLE_ATTENTION_SUMS_CUH
#define NEEDLE_ATTENTION_SUMS_CUH

#include "attention.cuh"

namespace attention {

/* db (H, 3, D) += the sums of dq, dk and dv over their rows. */
nd_status add_sums(const char *op, int device, nd_dtype dtype, const Problem &p, float *db);
/* largest (): the largest magnitude in them; infinity, and then NaN, are above all numbers. */
nd_status find_largest(const char *op, int device, nd_dtype dtype, Problem p, nd_array *largest);

} // namespace attention

#endif
