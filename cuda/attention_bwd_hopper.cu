/* attention_bwd_hopper.cu - attention_bwd.cu on Hopper, for 16-bit operands of head dims up to 128
 * whose rows the copy engine takes. Maths and precision are those of attention_bwd.cu: the same
 * bits from run to run.
 *
 * One kernel serves both directions. It owns rows of X and Y and walks parts of 64 rows of x and y:
 *     S = X x^T   dP = Y y^T   P = exp(scale S - lse)   dS = P (dP - delta)   dX = scale sum dS x
 *   for dk dv: X, Y are k, v     x, y are q, do    lse and delta belong to columns; dY = sum P y
 *   for dq:    X, Y are q, do    x, y are k, v     they belong to rows
 * Dense and up to head dim 64 the first computes dq too, five products instead of seven: see
 *   attention_dq_hopper.cuh.
 * lse and delta of columns enter as 16 more columns of the first products (ColumnTerms): read from
 *   shared memory by each thread they would take as much of its bandwidth as a product.
 * Parallel: a consumer warpgroup owns 64 rows; P and dS pass from the first products to the second
 *   in registers. The first products of a part and the second of the part before are issued
 *   together; P and dS are formed while the latter run. Time is bound by the instructions around
 *   the products. X and Y are in registers where they fit, else they are read from shared memory.
 * With angles dq and dk are rotated back in registers, where a thread holds both dims of a pair.
 *   The sums of a consumer's rows, for the bias of a projection, cost shuffles between lanes.
 * Rows beyond the end arrive as zeros. Queries there add nothing; keys there have score 0, so they
 *   are masked, as are pairs that causality cuts.
 * Bytes: those of attention_bwd.cu, and 32 bytes of terms a query once a key tile. In one pass 8
 *   bytes a value of dq and key tile more, mostly in the L2 cache, and 256 bytes of scratch a query
 *   and head.
 */
#include "attention_dq_hopper.cuh"

using namespace attention;
using namespace hopper;

namespace {

#ifdef HOPPER_CODE

/* ---- the producer ---------------------------------------------------------------------------- */
template <class Shape>
__device__ __forceinline__ void produce(const Backward &f, Places<Shape> at) {
    const Problem &p = f.p;
    Ring<Shape::SLOTS> slot;
    Ring<Shape::STAGES> stage;
    const int items = p.tiles * p.B * p.H;
    /* In one pass an item waits for others, so that none belongs to a block that has not begun. */
    const unsigned given = Shape::ONE_PASS ? 0 : gridDim.x;
    for (int index = Shape::ONE_PASS ? next_item(0) : blockIdx.x;; index = next_item(given)) {
        barrier_wait(at.own_empty(slot.at), slot.phase ^ 1);
        WorkItem item = {0, 0, -1, false};
        if (index < items) {
            item = item_at(p, index, p.causal && !Shape::KEYS);
            if (item.tile * Shape::ROWS >=
                p.own_rows) { /* a last block is shorter than the others */
                continue;
            }
        }
        store_item(at.item(slot.at), item);
        if (item.tile < 0) {
            barrier_arrive(at.own_full(slot.at));
            break;
        }
        int first = item.tile * Shape::ROWS;
        barrier_expect(at.own_full(slot.at), 2 * Shape::OWN);
        for (int which = 0; which < 2; which++) {
            for (int panel = 0; panel < Shape::PANELS; panel++) {
                for (int part = 0; part < Shape::CONSUMERS; part++) {
                    box_load(at.own(slot.at, which) + panel * Shape::OWN_PANEL + part * Shape::PART,
                             &f.own[which], at.own_full(slot.at), panel * PANEL_COLUMNS,
                             first + part * HALF, item.h, item.b);
                }
            }
        }
        slot.advance();
        auto walk = walk_of<Shape>(p, item, first);
        for (int part = walk.next(); part >= 0; part = walk.next()) {
            barrier_wait(at.empty(stage.at), stage.phase ^ 1);
            barrier_expect(at.full(stage.at), 2 * Shape::OTHER + Shape::TERMS);
            for (int which = 0; which < 2; which++) {
                for (int panel = 0; panel < Shape::PANELS; panel++) {
                    box_load(at.other(stage.at, which) + panel * Shape::PART, &f.other[which],
                             at.full(stage.at), panel * PANEL_COLUMNS, part, item.h, item.b);
                }
            }
            if (Shape::KEYS) {
                box_load(at.terms(stage.at), &f.terms, at.full(stage.at), 0, part, item.h, item.b);
            }
            stage.advance();
        }
    }
    end_producer(gridDim.x);
}

/* ---- a consumer ------------------------------------------------------------------------------ */
template <class T, class Shape>
__device__ __forceinline__ void consume(const Backward &f, Places<Shape> at) {
    constexpr int PANELS = Shape::PANELS;
    constexpr int GRADIENTS = Shape::GRADIENTS;
    const Problem &p = f.p;
    const int group = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0) - 1 - Shape::ONE_PASS,
              lane = threadIdx.x & 31;
    const int my_row = (int)(threadIdx.x % WARPGROUP) / 32 * 16 + lane / 4;
    const ColumnTerms<T> terms;
    const bool leads = threadIdx.x % WARPGROUP == 0; /* for its warpgroup */
    const int own_rows = Shape::KEYS ? p.S : p.T;
    Ring<Shape::SLOTS> slot;
    Ring<Shape::STAGES> stage;
    Ring<Shape::WEIGHTS> weights;
    uint32_t most = 0; /* see larger() */
    for (;;) {
        barrier_wait(at.own_full(slot.at), slot.phase);
        const WorkItem item = load_item(at.item(slot.at));
        if (item.tile < 0) {
            break;
        }
        const int first = item.tile * Shape::ROWS, mine = first + HALF * group;
        float stat[2][2]; /* of the two rows: lse, delta */
        if constexpr (!Shape::KEYS) {
            const float2 *stats = p.stats + ((int64_t)item.b * p.H + item.h) * p.T;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = mine + my_row + 8 * half;
                float2 pair = row < p.T ? stats[row] : make_float2(INFINITY, 0.0f);
                stat[half][0] = pair.x;
                stat[half][1] = pair.y;
            }
        }

        uint32_t own[Shape::IN_REGISTERS ? 2 * 4 * PANELS : 1][4];
        if constexpr (Shape::IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 8 * PANELS; i++) {
                int which = i / (4 * PANELS), panel = i / 4 % PANELS, step = i % 4;
                int row = (my_row - lane / 4) + (lane & 15);
                load_matrices(own[i], at.own(slot.at, which) + panel * Shape::OWN_PANEL +
                                          group * Shape::PART +
                                          panel_offset(row, 2 * step + (lane >> 4)));
            }
        }
        float gradient[GRADIENTS][32 * PANELS];
#pragma unroll
        for (int which = 0; which < GRADIENTS; which++) {
#pragma unroll
            for (int i = 0; i < 32 * PANELS; i++) {
                gradient[which][i] = 0.0f;
            }
        }
        float s[32], dp[32];
        uint32_t w[GRADIENTS][4][4]; /* dS and P of the part before, rounded */
        Ring<Shape::STAGES> before;

        /* Of these parts my rows see something: after `none`, before `end`; on one side of `edge`
         * they see not all. */
        int none = -1, end = mine < own_rows ? p.T : 0, edge = INT_MIN;
        if constexpr (Shape::KEYS) {
            if (p.causal) {
                none = mine - p.offset - HALF;
                edge = mine - p.offset + HALF - 1;
            } else if (Shape::ONE_PASS && mine + HALF > p.S) {
                edge = INT_MAX; /* dS of keys beyond the end must not reach dq */
            }
        } else {
            end = mine < own_rows ? keys_end(p, mine + HALF) : 0;
            edge = p.causal ? min(mine + p.offset - HALF + 1, p.S - HALF) : p.S - HALF;
        }
        auto sees = [&](int part) { return part > none && part < end; };

        auto first_product = [&](int which) {
            const Operand other = rows_operand(at.other(stage.at, which));
            const Operand ours = rows_operand(at.own(slot.at, which) + group * Shape::PART);
            float(&c)[32] = which == 0 ? s : dp;
            products_begin();
            if constexpr (Shape::KEYS) {
                terms.product(c, which, at.terms(stage.at));
            }
#pragma unroll
            for (int i = 0; i < 4 * PANELS; i++) {
                const bool add = Shape::KEYS || i > 0;
                const Operand b = further(other, i / 4 * Shape::PART + i % 4 * 32);
                if constexpr (Shape::IN_REGISTERS) {
                    product<T, 0>(c, own[which * 4 * PANELS + i], b, add);
                } else {
                    product<T, 0>(c, further(ours, i / 4 * Shape::OWN_PANEL + i % 4 * 32), b, add);
                }
            }
            products_end();
        };
        auto second_products = [&]() {
            const Operand others = columns_operand(at.other(before.at, 0), Shape::PART);
            products_begin();
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    product<T, 1>(gradient[which], w[which][step],
                                  further(others, which * Shape::OTHER + step * 16 * PANEL_ROW),
                                  true);
                }
            }
            products_end();
        };
        auto second_products_done = [&]() {
            products_wait<0>();
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
                hold(gradient[which]);
                hold(w[which]);
            }
            if (leads) {
                barrier_arrive(at.empty(before.at));
            }
        };
        /* key - query above the offset is not seen, nor a key beyond the end */
        auto hide = [&](int part) {
            const int first = part + 2 * (lane % 4);
            const int distance = !p.causal
                                     ? (Shape::KEYS ? INT_MIN / 2 : p.S)
                                     : mine + my_row - first + (Shape::KEYS ? -p.offset : p.offset);
            const int last = p.S - 1 - first;         /* column, of keys */
            const int beyond = p.S - (mine + my_row); /* row, of keys */
#pragma unroll
            for (int i = 0; i < 32; i++) {
                int row = i / 2 % 2 * 8, column = i / 4 * 8 + i % 2;
                bool hidden = Shape::KEYS ? distance + row > column || row >= beyond
                                          : column > min(distance + row, last);
                s[i] = hidden ? -INFINITY : s[i];
            }
        };
        /* One pass: store dS of my keys, in w, for the warpgroup that computes dq. */
        auto hand_on = [&]() {
            if constexpr (Shape::ONE_PASS) {
                barrier_wait(at.weights_empty(weights.at), weights.phase ^ 1);
                const int row = (my_row - lane / 4) + (lane & 15);
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    store_matrices(at.weights(weights.at) + group * Shape::PART +
                                       panel_offset(row, 2 * step + (lane >> 4)),
                                   w[0][step]);
                }
                proxy_fence();
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(at.weights_full(weights.at));
                }
                weights.advance();
            }
        };
        auto round = [&]() {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                w[0][i / 4][i % 4] = pack_pair<T>(dp[2 * i], dp[2 * i + 1]);
                if constexpr (Shape::KEYS) {
                    w[GRADIENTS - 1][i / 4][i % 4] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
                }
            }
            before = stage;
            stage.advance();
        };
        /* A part's S and dP become w. `following`: the second products of the part before are
         * issued on the way, to be done at its end. */
        auto work = [&](int part, auto following) {
            constexpr int PENDING = decltype(following)::value;
            first_product(0);
            if constexpr (Shape::OVERLAP) {
                first_product(1);
            }
            if constexpr (PENDING) {
                second_products();
                hand_on();
            }
            products_wait<PENDING + Shape::OVERLAP>();
            hold(s);
            if (Shape::KEYS ? part < edge : part > edge) {
                hide(part);
            }
#pragma unroll
            for (int i = 0; i < 32; i++) {
                if constexpr (Shape::KEYS) {
                    s[i] = fast_exp2(s[i] * p.scale_log2);
                } else {
                    s[i] = fast_exp2(fmaf(s[i], p.scale_log2, -stat[i / 2 % 2][0]));
                }
            }
            hold(s);
            stay_above(p.D);
            if constexpr (Shape::OVERLAP) {
                products_wait<PENDING>();
            } else {
                if constexpr (PENDING) {
                    second_products_done();
                }
                first_product(1);
                products_wait<0>();
            }
            hold(dp);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                dp[i] = s[i] * (Shape::KEYS ? dp[i] : dp[i] - stat[i / 2 % 2][1]);
            }
            if constexpr (PENDING && Shape::OVERLAP) {
                hold(s);
                hold(dp);
                stay_above(p.D);
                second_products_done();
            }
            round();
        };
        /* A part that none of my rows meets. */
        auto pass = [&]() {
            if (leads) {
                barrier_wait(at.full(stage.at), stage.phase);
                barrier_arrive(at.empty(stage.at));
            }
            stage.advance();
            if constexpr (Shape::ONE_PASS) {
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    w[0][i / 4][i % 4] = 0;
                }
                hand_on();
            }
        };

        auto walk = walk_of<Shape>(p, item, first);
        int part = walk.next();
        for (; part >= 0 && !sees(part); part = walk.next()) {
            pass();
        }
        if (part >= 0) {
            barrier_wait(at.full(stage.at), stage.phase);
            work(part, std::integral_constant<int, 0>());
            for (part = walk.next(); part >= 0 && sees(part); part = walk.next()) {
                barrier_wait(at.full(stage.at), stage.phase);
                work(part, std::integral_constant<int, 1>());
            }
            second_products();
            hand_on();
            second_products_done();
        }
        for (; part >= 0; part = walk.next()) {
            pass();
        }

        /* Beyond the end any angle does: nothing is stored there. */
        const int positions[2] = {min(mine + my_row, own_rows - 1),
                                  min(mine + my_row + 8, own_rows - 1)};
        if (f.half == 8) {
            rotate_back<8>(gradient[0], f, positions);
        } else if (f.half == 16) {
            rotate_back<16>(gradient[0], f, positions);
        }
        named_barrier_sync(1 + group, WARPGROUP); /* these rows have been read */
#pragma unroll
        for (int which = 0; which < GRADIENTS; which++) {
            float factor = which == 0 ? p.scale : 1.0f;
            float factors[2] = {factor, factor};
#pragma unroll
            for (int panel = 0; panel < PANELS; panel++) {
                stage_rows<T>(at.staged(slot.at, which) + panel * Shape::OWN_PANEL +
                                  group * Shape::PART,
                              gradient[which], 32 * panel, factors);
            }
        }
        const bool count[2] = {mine + my_row < own_rows, mine + my_row + 8 < own_rows};
        if (p.largest) {
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
                most = larger(most, gradient[which], count, which == 0 ? p.scale : 1.0f);
            }
        }
        if (f.sums) {
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
                sum_rows<PANELS>(gradient[which], count, which == 0 ? p.scale : 1.0f,
                                 at.sums(group, which) +
                                     (threadIdx.x % WARPGROUP) / 32 * Shape::SUMS);
            }
        }
        proxy_fence();
        named_barrier_sync(1 + group, WARPGROUP);
        if (f.sums &&
            mine < own_rows) { /* of the warps, in shared memory until the next such wait */
            const int64_t part = (int64_t)item.b * ((own_rows + HALF - 1) / HALF) + mine / HALF;
            float *to = f.sums + (part * p.H + item.h) * 3 * p.D + (Shape::KEYS ? p.D : 0);
            for (int which = 0; which < GRADIENTS; which++) {
                add_warps<Shape>(at.sums(group, which), to + which * p.D, p.D);
            }
        }
        if (leads) {
            if (mine < own_rows) {
                for (int which = 0; which < GRADIENTS; which++) {
                    for (int panel = 0; panel < PANELS; panel++) {
                        gradient_store(p, &f.gradient[which],
                                       at.staged(slot.at, which) + panel * Shape::OWN_PANEL +
                                           group * Shape::PART,
                                       panel * PANEL_COLUMNS, mine, item.h, item.b);
                    }
                }
                box_stores_read();
            }
        }
        /* by every thread: each has read which item it was */
        barrier_arrive(at.own_empty(slot.at));
        slot.advance();
    }
    join_largest<T>(most, p.largest);
}

#endif

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::THREADS, Shape::CTAS)
    attention_bwd_hopper_kernel(const __grid_constant__ Backward f) {
    await_previous();
#ifdef HOPPER_CODE
    Places<Shape> at{dynamic_shared()};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Shape::SLOTS; slot++) {
            barrier_init(at.own_full(slot), 1);
            barrier_init(at.own_empty(slot), (Shape::ONE_PASS + Shape::CONSUMERS) * WARPGROUP);
        }
        for (int stage = 0; stage < Shape::STAGES; stage++) {
            barrier_init(at.full(stage), 1);
            barrier_init(at.empty(stage), Shape::CONSUMERS);
        }
        for (int i = 0; i < Shape::WEIGHTS; i++) {
            barrier_init(at.weights_full(i), 4 * Shape::CONSUMERS); /* warps */
            barrier_init(at.weights_empty(i), 1);
        }
        for (int i = 0; i < Shape::SHARES; i++) {
            barrier_init(at.share_full(i), WARPGROUP);
            barrier_init(at.share_empty(i), 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_down_to<Shape::KEEP>();
        if (threadIdx.x == 0) {
            produce(f, at);
        } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= Shape::SHARES) {
            if constexpr (Shape::ONE_PASS) {
                write_shares(f, at, threadIdx.x / 32 - 1);
            }
        }
        return;
    }
    if constexpr (Shape::ONE_PASS) {
        if (threadIdx.x < 2 * WARPGROUP) {
            registers_down_to<Shape::KEEP_DQ>();
            sum_queries<T>(f, at);
            return;
        }
    }
    registers_up_to<Shape::TAKE>();
    consume<T>(f, at);
#endif
}

/* ---- host ------------------------------------------------------------------------------------ */
template <class Shape>
nd_status launch(const char *op, int device, Backward f, const Operands &a,
                 const BlockLists &lists) {
    constexpr bool KEYS = Shape::KEYS;
    problem_tiles(&f.p, KEYS, Shape::ROWS, lists);
    if (Shape::ONE_PASS) {
        f.p.heads_together = dq_heads_together(device, f.p);
        ND_TRY(box_map(op, a.dq, HALF, &f.dq));
    }
    const nd_array *own[] = {KEYS ? a.k : a.q, KEYS ? a.v : a.dout};
    const nd_array *other[] = {KEYS ? a.q : a.k, KEYS ? a.dout : a.v};
    const nd_array *gradient[] = {KEYS ? a.dk : a.dq, KEYS ? a.dv : a.dq};
    for (int which = 0; which < 2; which++) {
        ND_TRY(box_map(op, own[which], HALF, &f.own[which]));
        ND_TRY(box_map(op, other[which], HALF, &f.other[which]));
        ND_TRY(box_map(op, gradient[which], HALF, &f.gradient[which]));
    }
    if (a.cos != NULL) {
        f.cosines = data_of<float>(a.cos);
        f.sines = data_of<float>(a.sin);
        f.half = (int)a.cos->shape[1];
    }
    f.sums = a.sums;
    const Problem &p = f.p;
    const int64_t line = (int64_t)TERMS_ROW * p.T;
    ND_TRY(byte_map(op, p.terms, {TERMS_ROW, p.T, p.H, p.B}, {TERMS_ROW, line, line * p.H},
                    {TERMS_ROW, HALF, 1, 1}, TERMS_ROW, &f.terms));
    if (a.q->dtype == ND_BF16) {
        return hopper_launch<Shape>(op, device, attention_bwd_hopper_kernel<bf16, Shape>, f);
    }
    return hopper_launch<Shape>(op, device, attention_bwd_hopper_kernel<f16, Shape>, f);
}

template <bool KEYS, class Run>
nd_status with_shape(bool wide, const BlockLists &lists, Run &&run) {
    if (lists.offsets == NULL) {
        return run(BackwardShape<KEYS, 2, 2, 1, 4, false>());
    }
    if (lists.block % (2 * HALF) == 0) {
        return wide ? run(BackwardShape<KEYS, 2, 2, 1, 4, true>())
                    : run(BackwardShape<KEYS, 1, 2, 2, 4, true>());
    }
    return wide ? run(BackwardShape<KEYS, 2, 1, 2, 4, true>())
                : run(BackwardShape<KEYS, 1, 1, 2, 4, true>());
}

} // namespace

nd_status attention::attention_bwd_hopper(const char *op, int device, Problem p, const Operands &a,
                                          const BlockLists &lists, const BlockLists &transposed) {
    Backward f = {};
    f.p = p;
    if (dq_in_one_pass(p.D, lists)) {
        return launch<BackwardShape<true, 1, 2, 2, 4, false, true>>(op, device, f, a, lists);
    }
    const bool wide = p.D > PANEL_COLUMNS;
    auto dq = [&](auto shape) { return launch<decltype(shape)>(op, device, f, a, lists); };
    auto dkdv = [&](auto shape) { return launch<decltype(shape)>(op, device, f, a, transposed); };
    ND_TRY(with_shape<false>(wide, lists, dq));
    return with_shape<true>(wide, transposed, dkdv);
}
