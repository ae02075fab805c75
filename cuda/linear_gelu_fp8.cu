/* linear_gelu_fp8.cu - fp8_linear_gelu_fwd and fp8_linear_gelu_bwd on Hopper: products in FP8 whose
 * results are quantized at their ends.
 *
 *   forward   y = gelu(pre) in e4m3, dgelu = gelu'(pre), pre = x w^T + b    x, w in e4m3
 *   backward  dpre = (d w^T) dgelu in e5m2, db += its column sums           d in e5m2, w in e4m3
 *
 * Precision: sums of wgmma's FP8 products (about 14 bits of mantissa); all else float32, also dpre
 *   of the column sums. Sums of 64 rows go to scratch and are added in their order.
 * Parallel, layout: linear_fp8_hopper.cuh.
 * Bytes: as there; dgelu is written or read once, four elements a lane, so that four lanes hold 16
 *   columns of a row; the backward asks for it before the product, the forward for b.
 */
#include "gelu.cuh"
#include "linear_fp8_hopper.cuh"

using namespace hopper;

namespace {

struct GeluProduct : linear::BytesProduct {
    const float *x_scale, *w_scale; /* backward: x is d */
    const float *largest;           /* forward: a bound of |pre| */
    float bound;                    /* backward: with x_scale w_scale of |d w^T| */
    bool tanh;
    const void *b;  /* forward */
    void *dgelu;    /* N, V */
    float *scale;   /* of the result */
    float *partial; /* backward: row_tiles x V, or NULL */
};

constexpr int COLUMNS = 128; /* of a tile, at any depth */

/* Four neighbours of a row, as they lie in memory. */
template <class T> struct alignas(4 * sizeof(T)) Four { uint32_t words[sizeof(T)]; };

#ifdef HOPPER_CODE

template <class T> __device__ __forceinline__ void unpack_four(const Four<T> &x, float (&v)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if constexpr (sizeof(T) == 4) {
            v[k] = __uint_as_float(x.words[k]);
        } else {
            const float2 pair = unpack_pair<T>(x.words[k / 2]);
            v[k] = k % 2 ? pair.y : pair.x;
        }
    }
}
template <class T> __device__ __forceinline__ Four<T> pack_four(const float (&v)[4]) {
    Four<T> x;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if constexpr (sizeof(T) == 4) {
            x.words[k] = __float_as_uint(v[k]);
        } else if (k % 2) {
            x.words[k / 2] = pack_pair<T>(v[k - 1], v[k]);
        }
    }
    return x;
}

/* Base of the epilogues: scales, and places of the thread's numbers. */
template <class T, class Shape> struct Epilogue {
    static_assert(Shape::COLUMNS == Shape::WRITTEN, "a tile is written at once");
    static constexpr int BLOCKS = Shape::COLUMNS / 16;
    const GeluProduct &f;
    const float of_product; /* the scale of c */
    const float by;         /* 1 / scale of the result */
    linear::BytesWriter<Shape> to;

    /* Of the thread's four in a block of 16. */
    static __device__ __forceinline__ int first_column(int across, int block) {
        return across * Shape::COLUMNS + 16 * block + 4 * (int)(threadIdx.x & 3);
    }
    __device__ __forceinline__ bool has(int row, int column) const {
        return row < f.rows && column < f.columns;
    }
    __device__ __forceinline__ Four<T> *dgelu_at(int row, int column) const {
        return (Four<T> *)((T *)f.dgelu + (int64_t)row * f.columns + column);
    }
};

template <class T, class Shape> struct Forward : Epilogue<T, Shape> {
    using Base = Epilogue<T, Shape>;
    Four<T> bias[Base::BLOCKS];

    __device__ __forceinline__ void begin(int across, int) {
#pragma unroll
        for (int m = 0; m < Base::BLOCKS; m++) {
            const int column = Base::first_column(across, m);
            bias[m] = column < this->f.columns ? *(const Four<T> *)((const T *)this->f.b + column)
                                               : Four<T>{};
        }
    }
    template <int C> __device__ __forceinline__ void finish(float (&c)[C], int across, int tile) {
        this->to.begin();
        if (this->f.tanh) {
            apply<true>(c, across, tile);
        } else {
            apply<false>(c, across, tile);
        }
        this->to.end(across * Shape::COLUMNS, tile);
    }
    template <bool TANH>
    __device__ __forceinline__ void apply(const float *c, int across, int tile) {
        const int row = linear::first_row(tile);
        this->to.template put<false>([&](int m, float(&v)[2][4]) {
            const int column = Base::first_column(across, m);
            float added[4];
            unpack_four<T>(bias[m], added);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float slopes[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const Gelu g = gelu_16<TANH>(
                        fmaf(c[linear::index_of(m, h, k)], this->of_product, added[k]));
                    slopes[k] = g.derivative;
                    v[h][k] = g.value * this->by;
                }
                if (this->has(row + h, column)) {
                    *this->dgelu_at(row + h, column) = pack_four<T>(slopes);
                }
            }
        });
    }
};

template <class T, class Shape> struct Backward : Epilogue<T, Shape> {
    using Base = Epilogue<T, Shape>;
    Four<T> dgelu[Base::BLOCKS][2]; /* of the tile */

    __device__ __forceinline__ void begin(int across, int tile) {
        const int row = linear::first_row(tile);
#pragma unroll
        for (int m = 0; m < Base::BLOCKS; m++) {
            const int column = Base::first_column(across, m);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                dgelu[m][h] =
                    this->has(row + h, column) ? *this->dgelu_at(row + h, column) : Four<T>{};
            }
        }
    }
    template <int C> __device__ __forceinline__ void finish(float (&c)[C], int across, int tile) {
        const float by = this->of_product * this->by; /* powers of two */
        float sums[4 * Base::BLOCKS];
        this->to.begin();
        this->to.template put<true>([&](int m, float(&v)[2][4]) {
            float products[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float slopes[4];
                unpack_four<T>(dgelu[m][h], slopes);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    products[h][k] = c[linear::index_of(m, h, k)] * slopes[k];
                    v[h][k] = products[h][k] * by;
                }
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sums[4 * m + k] = products[0][k] + products[1][k];
            }
        });
        this->to.end(across * Shape::COLUMNS, tile);
        if (this->f.partial != nullptr) {
            add_rows(sums, across * Shape::COLUMNS, tile);
        }
    }
    /* Writes the sums over the tile's rows. Over the eight lanes of a column first: each keeps half
     * of its sums, three times, in the end those of columns 4 lane to 4 lane + 3. */
    __device__ __forceinline__ void add_rows(float (&sums)[4 * Base::BLOCKS], int column,
                                             int tile) const {
        const int thread = (int)threadIdx.x % WARPGROUP, lane = thread % 32;
#pragma unroll
        for (int halving = 0; halving < 3; halving++) {
            const int kept = 2 * Base::BLOCKS >> halving;
            const bool upper = lane & kept;
#pragma unroll
            for (int i = 0; i < 2 * Base::BLOCKS; i++) {
                if (i < kept) {
                    const float mine = upper ? sums[i + kept] : sums[i];
                    const float other = upper ? sums[i] : sums[i + kept];
                    sums[i] = mine + __shfl_xor_sync(~0u, other, kept);
                }
            }
        }
        /* Over the warps. All read these sums before begin() and end() of the next tile. */
        const uint32_t base =
            this->to.at.base + Shape::SUMS_AT + this->to.group * (WARPGROUP / 32) * Shape::OF_WARP;
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            words[k] = __float_as_uint(sums[k]);
        }
        store_shared16(base + thread / 32 * Shape::OF_WARP + 16 * lane, words);
        this->to.sync();
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPGROUP / 32; warp++) {
            sum += __uint_as_float(load_shared4(base + warp * Shape::OF_WARP + 4 * thread));
        }
        if (column + thread < this->f.columns) {
            this->f.partial[(int64_t)tile * this->f.columns + column + thread] =
                sum * this->of_product;
        }
    }
};

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, 1)
    gelu_kernel(const __grid_constant__ GeluProduct f) {
    await_previous();
#ifdef HOPPER_CODE
    constexpr bool BACKWARD = Shape::SUMS;
    const linear::Barriers<Shape> at = {dynamic_shared()};
    linear::run_block<Shape>(
        at.base, [&]() { linear::produce_bytes<Shape>(f, at); },
        [&](int group) {
            const float of_product = *f.x_scale * *f.w_scale;
            const float scale =
                BACKWARD ? nd_fp8_gradient_scale(fabsf(f.bound * *f.x_scale * *f.w_scale), true)
                         : nd_fp8_scale(__float_as_uint(*f.largest), false);
            if (blockIdx.x == 0 && group == 0 && threadIdx.x == WARPGROUP) {
                *f.scale = scale;
            }
            if constexpr (BACKWARD) {
                Backward<T, Shape> epilogue = {{f, of_product, 1.0f / scale, {f, at, group}}, {}};
                linear::consume_bytes<Shape, true>(f, at, group, epilogue);
            } else {
                Forward<T, Shape> epilogue = {{f, of_product, 1.0f / scale, {f, at, group}}, {}};
                linear::consume_bytes<Shape, false>(f, at, group, epilogue);
            }
        });
#endif
}

template <bool BACKWARD>
nd_status run(const char *op, int device, GeluProduct f, nd_dtype dtype, const nd_array *x,
              const nd_array *w, const nd_array *q, const nd_array *q_t, nd_array *db) {
    using Shape = linear::BytesShape<COLUMNS, true, BACKWARD>;
    ND_TRY(linear::bytes_product<COLUMNS>(op, x, w, q, q_t, &f));
    if (db) {
        void *scratch;
        const int64_t parts = (int64_t)f.row_tiles * f.columns;
        ND_TRY(cuda_scratch(device, (size_t)parts * sizeof(float), &scratch));
        f.partial = (float *)scratch;
    }
    ND_TRY(with_float(op, dtype, [&](auto tag) -> nd_status {
        return cuda_launch(op, device, gelu_kernel<typename decltype(tag)::type, Shape>,
                           linear::blocks_for(device, f.row_tiles, f.column_tiles), Shape::THREADS,
                           Shape::SHARED, f);
    }));
    return db ? cuda_add_columns(op, device, f.partial, f.row_tiles, f.columns, data_of<float>(db))
              : ND_OK;
}

} // namespace

nd_status cuda_fp8_linear_gelu_fwd(int device, const fp8_linear_gelu_fwd_args *a) {
    const char *op = "fp8_linear_gelu_fwd";
    GeluProduct f = {};
    ND_TRY(nd_check_fp8_linear_gelu(op, "x", a->x, a->w));
    ND_TRY(linear::check_bytes_product(op, device, "x", a->x, a->w));
    f.x_scale = data_of<float>(a->x_scale);
    f.w_scale = data_of<float>(a->w_scale);
    f.largest = data_of<float>(a->largest);
    f.tanh = a->tanh != 0;
    f.b = a->b->data;
    f.dgelu = a->dgelu->data;
    f.scale = data_of<float>(a->scale);
    return run<false>(op, device, f, a->b->dtype, a->x, a->w, a->y, a->y_t, nullptr);
}

nd_status cuda_fp8_linear_gelu_bwd(int device, const fp8_linear_gelu_bwd_args *a) {
    const char *op = "fp8_linear_gelu_bwd";
    GeluProduct f = {};
    ND_TRY(nd_check_fp8_linear_gelu(op, "d", a->d, a->w));
    ND_TRY(linear::check_bytes_product(op, device, "d", a->d, a->w));
    f.x_scale = data_of<float>(a->d_scale);
    f.w_scale = data_of<float>(a->w_scale);
    f.bound = (float)a->bound;
    f.dgelu = a->dgelu->data;
    f.scale = data_of<float>(a->scale);
    return run<true>(op, device, f, a->dgelu->dtype, a->d, a->w, a->q, a->q_t, a->db);
}
