/* embedding.c - rows of a table by token id, and the gradient of the table.
 *
 *   forward    y[n] = w[ids[n]]; rows of w may lie apart, or overlap
 *   backward   dw[ids[n]] += dy[n], in float32, in the order of n
 * The backward splits the channels among threads, so that each adds up its own in order whatever
 * ids repeat. An id outside [0, V) is refused before anything is written.
 */
#include "cpu.h"

static nd_status check_ids(const char *name, const nd_array *ids, int64_t vocabulary) {
    const int32_t *id = ids->data;
    for (int64_t n = 0; n < ids->shape[0]; n++) {
        if (id[n] < 0 || id[n] >= vocabulary) {
            return nd_error(ND_EVALUE,
                            "%s: ids: token id %d at position %lld is outside the vocabulary of "
                            "%lld",
                            name, (int)id[n], (long long)n, (long long)vocabulary);
        }
    }
    return ND_OK;
}

nd_status cpu_embedding_fwd(int device, const embedding_fwd_args *args) {
    int64_t n = args->ids->shape[0], c = args->w->shape[1], stride = args->w->strides[0];
    const int32_t *ids = args->ids->data;
    ND_TRY(check_ids("embedding_fwd", args->ids, args->w->shape[0]));
    if (c == 0) {
        return ND_OK;
    }
    size_t bytes = (size_t)c * nd_dtype_size(args->w->dtype);

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t i = 0; i < n; i++) {
        memcpy(cpu_at(args->y, i * c), cpu_at(args->w, ids[i] * stride), bytes);
    }
    return ND_OK;
}

nd_status cpu_embedding_bwd(int device, const embedding_bwd_args *args) {
    enum { CHANNELS = 64 };
    int64_t n = args->ids->shape[0], c = args->dw->shape[1];
    const int32_t *ids = args->ids->data;
    float *dw = args->dw->data;
    ND_TRY(check_ids("embedding_bwd", args->ids, args->dw->shape[0]));

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * c > CPU_GRAIN)
    for (int64_t j = 0; j < c; j += CHANNELS) {
        float buffer[CHANNELS];
        int64_t channels = min_of(CHANNELS, c - j);
        for (int64_t i = 0; i < n; i++) {
            const float *restrict dy = cpu_read(args->dy, i * c + j, channels, buffer);
            float *restrict sums = dw + ids[i] * c + j;
            for (int64_t k = 0; k < channels; k++) {
                sums[k] += dy[k];
            }
        }
    }
    return ND_OK;
}
