/* linear_rotary.c - linear_rotary_fwd: y = rotary(x w + b). Calls linear_fwd, then rotary, so its
 * bits are theirs.
 */
#include "cpu.h"

nd_status cpu_linear_rotary_fwd(int device, const linear_rotary_fwd_args *args) {
    ND_TRY(cpu_check_turn("linear_rotary_fwd", args->y, args->parts, args->cos));
    nd_array x = nd_merged(args->x, 2), w = nd_merged(args->w, 1), y = nd_merged(args->y, 2), b;
    linear_fwd_args product = {.x = &x, .w = &w, .y = &y};
    if (args->b != NULL) {
        b = nd_merged(args->b, 0);
        product.b = &b;
    }
    ND_TRY(cpu_linear_fwd(device, &product));
    rotary_args rotation = {args->y, args->cos, args->sin, args->parts, 1.0};
    return cpu_rotary(device, &rotation);
}
