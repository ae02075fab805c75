/* matmul.c - matrix products: matmul, matmul_acc, linear_fwd, bias_bwd.
 *
 *   matmul      c  = scale a b      (batched)
 *   matmul_acc  c (+)= scale a b    c float32: a weight gradient
 *   linear_fwd  y  = r + x w + b    the product is added to the bias; r last
 *   bias_bwd    db += column sums of dy
 *
 * The result is cut into tiles over M and N (never over K); OpenMP hands the tiles to threads, each
 * tile is one single-threaded product. K is cut into equal parts of at most K_PANEL, added in their
 * order, but where sgemm reads both operands in place.
 *
 * With AVX-512 panels.c multiplies, and bits depend on K alone. Else sgemm does, in tiles whose
 * sizes depend on the shape alone, so that bits do not depend on the number of threads either. It
 * reads transposed operands through its flags. Operands of 16 bits, or of strides that no BLAS
 * takes, are converted panel by panel into scratch; sums are float32 and rounded once.
 */
#include <limits.h>
#include <omp.h>

#include "cpu.h"

enum { K_PANEL = 512, FEWEST_TILES = 32, SMALLEST_TILE = 64, SMALLEST_GOOD_TILE = 256 };
static const double SMALLEST_TILE_WORK = 4e6;  /* multiply-adds worth handing to a thread */
static const double SMALLEST_SPLIT_WORK = 1e6; /* below: one tile, no threads */

/* A matrix as a tile sees it: rows x columns elements at row * stride[0] + column * stride[1]. */
typedef struct {
    const nd_array *array;
    int64_t strides[2];
    int64_t leading; /* for sgemm in place ... */
    bool transposed;
    bool in_place; /* ... or through scratch */
} matrix;

static matrix matrix_of(const nd_array *a) {
    int row = a->ndim - 2, column = a->ndim - 1;
    int64_t rows = a->shape[row], columns = a->shape[column];
    matrix m = {.array = a, .strides = {a->strides[row], a->strides[column]}};
    bool by_rows = (columns <= 1 || m.strides[1] == 1) && (rows <= 1 || m.strides[0] >= columns);
    bool by_columns = (rows <= 1 || m.strides[0] == 1) && (columns <= 1 || m.strides[1] >= rows);
    if (by_rows) {
        m.leading = rows <= 1 ? columns : m.strides[0];
    } else if (by_columns) {
        m.leading = columns <= 1 ? rows : m.strides[1];
        m.transposed = true;
    }
    m.leading = max_of(m.leading, 1);
    m.in_place = a->dtype == ND_F32 && (by_rows || by_columns) && m.leading <= INT_MAX;
    return m;
}

/* The matrix's element offset in its batch: strides over the axes in front of the last two. */
static int64_t batch_offset(const nd_array *a, int64_t batch) {
    int64_t offset = 0;
    for (int axis = a->ndim - 3; axis >= 0; axis--) {
        offset += batch % a->shape[axis] * a->strides[axis];
        batch /= a->shape[axis];
    }
    return offset;
}

/* rows x columns of the matrix into `to`, row-major, converted to float32. */
static void pack(const matrix *m, int64_t offset, int64_t rows, int64_t columns, float *to) {
    if (m->strides[1] == 1 || m->strides[0] != 1) {
        for (int64_t i = 0; i < rows; i++) {
            cpu_load_f32(to + i * columns, cpu_at(m->array, offset + i * m->strides[0]),
                         m->array->dtype, m->strides[1], columns);
        }
        return;
    }
    /* Contiguous along the other axis: convert a few runs, then transpose them. */
    enum { STRIP = 16, LENGTH = 256 };
    float strip[STRIP][LENGTH];
    for (int64_t j0 = 0; j0 < columns; j0 += STRIP) {
        int64_t strips = min_of(STRIP, columns - j0);
        for (int64_t i0 = 0; i0 < rows; i0 += LENGTH) {
            int64_t length = min_of(LENGTH, rows - i0);
            for (int64_t j = 0; j < strips; j++) {
                cpu_load_f32(strip[j], cpu_at(m->array, offset + (j0 + j) * m->strides[1] + i0),
                             m->array->dtype, 1, length);
            }
            for (int64_t i = 0; i < length; i++) {
                for (int64_t j = 0; j < strips; j++) {
                    to[(i0 + i) * columns + j0 + j] = strip[j][i];
                }
            }
        }
    }
}

typedef struct {
    matrix a, b;
    const nd_array *bias; /* or NULL */
    nd_array *c;          /* C-contiguous, (..., M, N) */
    bool add;
    bool direct; /* tiles are made where they stay, not in scratch */
    float scale;
    bool by_panels; /* panels.c multiplies */
    int64_t m, n, k;
    int64_t tile_m, tile_n, step; /* of k, in one pass */
    cpu_tile_fn *finish;          /* or NULL */
    const void *finish_of;
} product;

/* Of n elements of 4 bytes: those of whole lines of a cache. */
static int64_t in_lines(int64_t n) { return cpu_ceil_div(n, 16) * 16; }

/* Words of 4 bytes that a tile needs beside its operands: its result, the bias, packed panels. */
static size_t scratch_words(const product *p) {
    size_t c = p->direct ? 0 : (size_t)in_lines(p->tile_m * p->tile_n);
    if (p->by_panels) {
        return c + (size_t)(p->bias != NULL ? in_lines(p->tile_n) : 0) +
               (size_t)cpu_panels_words(p->a.array->dtype, p->tile_n, K_PANEL);
    }
    size_t a = p->a.in_place ? 0 : (size_t)(p->tile_m * K_PANEL);
    size_t b = p->b.in_place ? 0 : (size_t)(p->tile_n * K_PANEL);
    return a + b + c;
}

/* c = (add: +=) the product of rows x depth of a with depth x columns of b. */
static void by_sgemm(const product *p, int64_t at_a, int64_t at_b, int64_t rows, int64_t columns,
                     int64_t depth, bool add, float *c, int64_t ldc, float *scratch) {
    const float *a = (const float *)p->a.array->data + at_a;
    const float *b = (const float *)p->b.array->data + at_b;
    if (!p->a.in_place) {
        pack(&p->a, at_a, rows, depth, scratch);
        a = scratch;
        scratch += p->tile_m * K_PANEL;
    }
    if (!p->b.in_place) {
        pack(&p->b, at_b, depth, columns, scratch);
        b = scratch;
    }
    cpu_sgemm(p->a.in_place && p->a.transposed, p->b.in_place && p->b.transposed, rows, columns,
              depth, 1.0f, a, p->a.in_place ? p->a.leading : max_of(depth, 1), b,
              p->b.in_place ? p->b.leading : columns, add ? 1.0f : 0.0f, c, ldc);
}

static void run_tile(const product *p, int64_t batch, int64_t i, int64_t j, float *scratch) {
    int64_t rows = min_of(p->tile_m, p->m - i), columns = min_of(p->tile_n, p->n - j);
    int64_t at_a = batch_offset(p->a.array, batch) + i * p->a.strides[0];
    int64_t at_b = batch_offset(p->b.array, batch) + j * p->b.strides[1];
    int64_t at_c = (batch * p->m + i) * p->n + j;
    float *c = p->direct ? (float *)p->c->data + at_c : scratch;
    int64_t ldc = p->direct ? p->n : columns;
    scratch += p->direct ? 0 : in_lines(p->tile_m * p->tile_n);

    const float *base = p->add && p->direct ? c : NULL; /* what the product is added to */
    int64_t base_row = ldc;
    if (p->bias != NULL) {
        float *bias = p->by_panels ? scratch : c;
        cpu_load_f32(bias, cpu_at(p->bias, j), p->bias->dtype, 1, columns);
        base = bias;
        if (p->by_panels) {
            base_row = 0;
            scratch += in_lines(p->tile_n);
        }
        for (int64_t r = 1; r < rows && !p->by_panels; r++) { /* sgemm adds to c alone */
            memcpy(c + r * ldc, c, (size_t)columns * sizeof *c);
        }
    }
    for (int64_t k0 = 0; k0 < max_of(p->k, 1); k0 += p->step) {
        int64_t depth = min_of(p->step, p->k - k0);
        int64_t a0 = at_a + k0 * p->a.strides[1], b0 = at_b + k0 * p->b.strides[0];
        if (p->by_panels) {
            cpu_panels_product(p->a.array->dtype, rows, columns, depth, cpu_at(p->a.array, a0),
                               p->a.strides, cpu_at(p->b.array, b0), p->b.strides, base, base_row,
                               c, ldc, min_of(p->step, p->k - k0 - depth), (uint32_t *)scratch);
        } else {
            by_sgemm(p, a0, b0, rows, columns, depth, base != NULL, c, ldc, scratch);
        }
        base = c;
        base_row = ldc;
    }
    for (int64_t r = 0; r < rows && !p->direct; r++) {
        float *row = c + r * columns;
        if (p->add) { /* float32 */
            float *to = (float *)p->c->data + at_c + r * p->n;
            for (int64_t i = 0; i < columns; i++) {
                to[i] += p->scale * row[i];
            }
            continue;
        }
        for (int64_t i = 0; i < columns; i++) {
            row[i] *= p->scale;
        }
        cpu_store_f32(cpu_at(p->c, at_c + r * p->n), p->c->dtype, 1, row, columns);
    }
    if (p->finish) {
        p->finish(p->finish_of, i, j, rows, columns);
    }
}

/* Halve the longer side until there are tiles for many threads or they get too small. Each tile
 * packs its panels anew: of small ones only as many as there are threads, and the rows of each are
 * whole panels. */
static void choose_tiles(product *p, int64_t batches) {
    double work = (double)p->m * (double)p->n * (double)max_of(p->k, 1);
    p->tile_m = p->m;
    p->tile_n = p->n;
    /* b's panels must fit into the second cache: 512 columns, or all of them where k is short. Then
     * a tile has whole rows, and c's part of it fits too. */
    bool whole_rows = p->by_panels && p->n > 512 && p->n * p->step <= 512 * 512;
    int64_t most = INT64_MAX, widest = INT_MAX / 2;
    if (p->by_panels) {
        most = whole_rows ? 288 * 1024 : 576 * 1024;
        widest = whole_rows ? p->n : 512;
    } else if (scratch_words(p) > 0) {
        most = 512 * 512;
    }
    int64_t fewest = p->by_panels ? min_of(FEWEST_TILES, 4 * cpu_threads()) : FEWEST_TILES;
    int64_t needed = p->by_panels ? min_of(FEWEST_TILES, cpu_threads()) : FEWEST_TILES;
    for (;;) {
        int64_t tiles = batches * cpu_ceil_div(p->m, p->tile_m) * cpu_ceil_div(p->n, p->tile_n);
        double tile_work = work * (double)batches / (double)tiles;
        bool too_wide = p->tile_n > widest;
        bool too_large = p->tile_m > INT_MAX / 2 || p->tile_m * p->tile_n > most;
        bool halve = tiles < fewest && tile_work > 2 * SMALLEST_TILE_WORK;
        bool taller = p->tile_m > p->tile_n + (p->by_panels ? CPU_PANEL_COLUMNS : 0);
        int64_t *longer = taller && !too_wide ? &p->tile_m : &p->tile_n;
        int64_t smallest = tiles < needed ? SMALLEST_TILE : SMALLEST_GOOD_TILE;
        if (!too_large && !too_wide && (!halve || *longer < 2 * smallest)) {
            return;
        }
        bool by_rows = p->by_panels && longer == &p->tile_m;
        int64_t unit = by_rows ? cpu_panels_rows(p->a.array->dtype) : 32;
        *longer = cpu_ceil_div(cpu_ceil_div(*longer, 2), unit) * unit;
    }
}

static nd_status multiply(int device, const char *name, const nd_array *a, const nd_array *b,
                          const nd_array *bias, const nd_array *scale, bool add, nd_array *c,
                          cpu_tile_fn *finish, const void *finish_of) {
    product p = {.a = matrix_of(a),
                 .b = matrix_of(b),
                 .bias = bias,
                 .c = c,
                 .add = add,
                 .direct = c->dtype == ND_F32 && scale == NULL,
                 .scale = scale == NULL ? 1.0f : *(const float *)scale->data,
                 .m = a->shape[a->ndim - 2],
                 .n = b->shape[b->ndim - 1],
                 .k = a->shape[a->ndim - 1],
                 .finish = finish,
                 .finish_of = finish_of};
    p.by_panels = cpu_panels_take(a->dtype, p.m);
    bool whole = p.a.in_place && p.b.in_place && !p.by_panels;
    int64_t passes = whole ? 1 : max_of(cpu_ceil_div(p.k, K_PANEL), 1);
    p.step = max_of(cpu_ceil_div(p.k, passes), 1);
    if (p.m == 0 || p.n == 0 || nd_size(c) == 0) {
        return ND_OK;
    }
    if (p.k > INT_MAX) {
        return nd_error(ND_EVALUE,
                        "%s: a: an inner size of %lld is more than the matrix product "
                        "takes; split it",
                        name, (long long)p.k);
    }
    if (p.n > INT_MAX) {
        return nd_error(ND_EVALUE,
                        "%s: b: %lld columns are more than the matrix product takes; "
                        "split them",
                        name, (long long)p.n);
    }
    int64_t batches = nd_size(c) / (p.m * p.n);
    choose_tiles(&p, batches);
    int64_t down = cpu_ceil_div(p.m, p.tile_m), across = cpu_ceil_div(p.n, p.tile_n);
    int64_t tiles = batches * down * across;
    bool parallel = tiles > 1 &&
                    (double)p.m * (double)p.n * (double)p.k * (double)batches > SMALLEST_SPLIT_WORK;
    size_t each = (scratch_words(&p) + 15) / 16 * 16;
    void *scratch = NULL;
    if (each > 0) {
        size_t threads = parallel ? (size_t)cpu_threads() : 1;
        ND_TRY(cpu_scratch(device, each * threads * sizeof(float), &scratch));
    }

#pragma omp parallel for schedule(dynamic) num_threads(cpu_threads()) if (parallel)
    for (int64_t tile = 0; tile < tiles; tile++) {
        float *mine = each > 0 ? (float *)scratch + each * (size_t)omp_get_thread_num() : NULL;
        run_tile(&p, tile / (down * across), tile / across % down * p.tile_m,
                 tile % across * p.tile_n, mine);
    }
    return ND_OK;
}

nd_status cpu_matmul(int device, const matmul_args *args) {
    return multiply(device, "matmul", args->a, args->b, NULL, args->scale, false, args->c, NULL,
                    NULL);
}

nd_status cpu_matmul_acc(int device, const matmul_acc_args *args) {
    return multiply(device, "matmul_acc", args->a, args->b, NULL, args->scale, args->add != 0,
                    args->c, NULL, NULL);
}

nd_status cpu_linear_fwd(int device, const linear_fwd_args *args) {
    ND_TRY(cpu_linear_tiles(device, args, NULL, NULL));
    add_args sum = {.x = args->r, .y = args->y, .out = args->y}; /* as if it were another op */
    return args->r == NULL ? ND_OK : cpu_add(device, &sum);
}

nd_status cpu_linear_tiles(int device, const linear_fwd_args *args, cpu_tile_fn *finish,
                           const void *of) {
    return multiply(device, "linear_fwd", args->x, args->w, args->b, NULL, false, args->y, finish,
                    of);
}

nd_status cpu_bias_bwd(int device, const bias_bwd_args *args) {
    return cpu_column_sums(device, args->dy, NULL, NULL, args->db, args->db2);
}

/* Each chunk of ROWS rows sums its columns into a row of `partial`; those are added in order. */
nd_status cpu_column_sums(int device, const nd_array *x, const nd_array *times, nd_array *product,
                          nd_array *to, nd_array *to2) {
    enum { ROWS = 256, COLUMNS = 1024 };
    int64_t n = x->shape[0], m = x->shape[1], chunks = cpu_ceil_div(n, ROWS);
    void *scratch;
    if (n == 0 || m == 0) {
        return ND_OK;
    }
    ND_TRY(cpu_scratch(device, (size_t)(chunks * m) * sizeof(float), &scratch));
    float *partial = scratch;
    float *db = to->data, *db2 = to2 ? to2->data : NULL;

#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (n * m > CPU_GRAIN)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float buffer[COLUMNS], factors[COLUMNS];
        float *sums = partial + chunk * m;
        memset(sums, 0, (size_t)m * sizeof *sums);
        for (int64_t i = chunk * ROWS; i < min_of(n, (chunk + 1) * ROWS); i++) {
            for (int64_t j = 0; j < m; j += COLUMNS) {
                int64_t columns = min_of(COLUMNS, m - j), at = i * m + j;
                const float *row = cpu_read(x, at, columns, buffer);
                float *restrict sum = sums + j;
                if (times) {
                    const float *factor = cpu_read(times, at, columns, factors);
                    float *result = cpu_target(product, at, buffer);
                    for (int64_t c = 0; c < columns; c++) {
                        result[c] = row[c] * factor[c];
                    }
                    cpu_write(product, at, columns, result);
                    row = cpu_read(product, at, columns, buffer); /* rounded */
                }
                for (int64_t c = 0; c < columns; c++) {
                    sum[c] += row[c];
                }
            }
        }
    }
#pragma omp parallel for schedule(static) num_threads(cpu_threads()) if (chunks * m > CPU_GRAIN)
    for (int64_t j = 0; j < m; j += 64) {
        for (int64_t c = j; c < min_of(m, j + 64); c++) {
            double sum = 0;
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                sum += partial[chunk * m + c];
            }
            db[c] += (float)sum;
            if (db2) {
                db2[c] += (float)sum;
            }
        }
    }
    return ND_OK;
}
