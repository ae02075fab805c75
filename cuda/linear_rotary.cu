/* linear_rotary.cu - linear_rotary_fwd: y = rotary(x w + b), x (B, T, K), w (K, H, P, D), packed
 * projections of which q and k are rotated.
 *
 * Precision: float32 sums. Parallel: on Hopper, in 16 bits, one kernel for the shapes of Pythia-70m
 * (linear_shallow_hopper.cu), which rotates before it rounds; elsewhere linear_fwd, then rotary in
 * place, which reads and writes the rotated dims once more.
 */
#include "linear_hopper.cuh"

nd_status cuda_linear_rotary_fwd(int device, const linear_rotary_fwd_args *a) {
    const char *op = "linear_rotary_fwd";
    ND_TRY(cuda_check_rotation(op, a->y, a->parts, a->cos));
    nd_array x = nd_merged(a->x, 2), w = nd_merged(a->w, 1), y = nd_merged(a->y, 2), b = {};
    linear_fwd_args product = {};
    product.x = &x;
    product.w = &w;
    product.y = &y;
    if (a->b) {
        b = nd_merged(a->b, 0);
        product.b = &b;
    }
    if (linear_rotary_shallow_serves(device, a, &x, &w, &y)) {
        return linear_rotary_fwd_shallow(device, a, &x, &w, &y);
    }
    ND_TRY(cuda_linear_fwd(device, &product));
    return cuda_rotate(op, device, a->y, a->parts, a->cos, a->sin, 1.0f);
}
