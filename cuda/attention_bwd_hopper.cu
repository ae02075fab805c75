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
            item = item_at(p, index, p.causal && !Shape::OWN_KEYS);
            if (item.tile * Shape::ROWS >=
                p.own_rows) { /* a last block is shorter than the others */
                continue;
            }
        }
        if (item.tile < 0) {
            store_item(at.item(slot.at), item);
            barrier_arrive(at.own_full(slot.at));
            break;
        }
        int first = item.tile * Shape::ROWS;
        for (int which = 0; which < 2; which++) {
            for (int panel = 0; panel < Shape::PANELS; panel++) {
                for (int group = 0; group < Shape::CONSUMERS; group++) {
                    box_load(at.own(slot.at, which) + panel * Shape::OWN_PANEL +
                                 group * Shape::PART,
                             &f.own[which], at.own_full(slot.at), panel * PANEL_COLUMNS,
                             first + group * CONSUMER_ROWS, item.h, item.b);
                }
            }
        }
        /* Lists are read while these rows come: own_full waits for barrier_expect. */
        auto walk = walk_of<Shape>(p, item, first);
        int part = walk.next();
        item.meets = part >= 0;
        store_item(at.item(slot.at), item);
        barrier_expect(at.own_full(slot.at), 2 * Shape::OWN);
        slot.advance();
        for (; part >= 0; stage.advance()) {
            const int next = walk.next();
            barrier_wait(at.empty(stage.at), stage.phase ^ 1);
            if (Shape::LISTS) {
                store_shared4(at.part(stage.at), part + (next < 0));
            }
            barrier_expect(at.full(stage.at), 2 * Shape::OTHER + Shape::TERMS_BYTES);
            for (int which = 0; which < 2; which++) {
                for (int panel = 0; panel < Shape::PANELS; panel++) {
                    box_load(at.other(stage.at, which) + panel * Shape::PART, &f.other[which],
                             at.full(stage.at), panel * PANEL_COLUMNS, part, item.h, item.b);
                }
            }
            if (Shape::OWN_KEYS) {
                box_load(at.terms(stage.at), &f.terms, at.full(stage.at), 0, part, item.h, item.b);
            }
            part = next;
        }
    }
    end_producer(gridDim.x);
}

/* ---- a consumer ------------------------------------------------------------------------------ */
/* A thread of a consumer has two of its 64 rows: `row` and the eighth after it. */
template <class Shape> struct Thread {
    const int group = __shfl_sync(~0u, (int)threadIdx.x / WARPGROUP, 0) - 1 - Shape::ONE_PASS;
    const int lane = threadIdx.x & 31;
    const int row = (int)(threadIdx.x % WARPGROUP) / 32 * 16 + lane / 4;
    const bool leads = threadIdx.x % WARPGROUP == 0; /* for its warpgroup */
};

/* The 64 rows of X and Y into registers, as operands of the first products. */
template <class Shape>
__device__ __forceinline__ void load_own(uint32_t (&own)[8 * Shape::PANELS][4], Thread<Shape> me,
                                         Places<Shape> at, int slot) {
    constexpr int PANELS = Shape::PANELS;
#pragma unroll
    for (int i = 0; i < 8 * PANELS; i++) {
        int which = i / (4 * PANELS), panel = i / 4 % PANELS, step = i % 4;
        int row = (me.row - me.lane / 4) + (me.lane & 15);
        load_matrices(own[i], at.own(slot, which) + panel * Shape::OWN_PANEL +
                                  me.group * Shape::PART +
                                  panel_offset(row, 2 * step + (me.lane >> 4)));
    }
}

/* Of two rows, `row` and the eighth after it: lse, delta. */
__device__ __forceinline__ void load_stats(float (&stat)[2][2], const Problem &p,
                                           const WorkItem &item, int row) {
    const float2 *stats = p.stats + ((int64_t)item.b * p.H + item.h) * p.T;
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8) {
        float2 pair = row < p.T ? stats[row] : make_float2(INFINITY, 0.0f);
        stat[half][0] = pair.x;
        stat[half][1] = pair.y;
    }
}

/* Of parts after `none` and before `end` a consumer's rows see something; on one side of `edge`
 * they see not all. */
struct Visible {
    int none, end, edge;
    __device__ __forceinline__ bool sees(int part) const { return part > none && part < end; }
};
template <class Shape>
__device__ __forceinline__ Visible visible_parts(const Problem &p, int mine) {
    if constexpr (Shape::OWN_KEYS) {
        const int end = mine < p.S ? p.T : 0;
        if (p.causal) {
            return {mine - p.offset - CONSUMER_ROWS, end, mine - p.offset + CONSUMER_ROWS - 1};
        }
        /* In one pass dS of keys beyond the end must not reach dq. */
        return {-1, end, Shape::ONE_PASS && mine + CONSUMER_ROWS > p.S ? INT_MAX : INT_MIN};
    } else {
        return {-1, mine < p.T ? keys_end(p, mine + CONSUMER_ROWS) : 0,
                p.causal ? min(mine + p.offset - CONSUMER_ROWS + 1, p.S - CONSUMER_ROWS)
                         : p.S - CONSUMER_ROWS};
    }
}

/* A slot or stage, for products: see uniform(), with which the kernels of lists are 2 % slower. */
template <class Shape> __device__ __forceinline__ int place(int at) {
    return Shape::ONE_PASS ? (int)uniform(at) : at;
}

/* c = X x^T (0) or Y y^T (1), with the terms of columns. */
template <class T, class Shape, int N>
__device__ __forceinline__ void
first_product(int which, float (&c)[32], const uint32_t (&own)[N][4], const ColumnTerms<T> &terms,
              Thread<Shape> me, Places<Shape> at, int slot, int stage) {
    constexpr int PANELS = Shape::PANELS;
    const Operand other = rows_operand(at.other(place<Shape>(stage), which));
    const Operand ours = rows_operand(at.own(place<Shape>(slot), which) + me.group * Shape::PART);
    products_begin();
    if constexpr (Shape::OWN_KEYS) {
        terms.product(c, which, at.terms(stage));
    }
#pragma unroll
    for (int i = 0; i < 4 * PANELS; i++) {
        const bool add = Shape::OWN_KEYS || i > 0;
        const Operand b = further(other, i / 4 * Shape::PART + i % 4 * 32);
        if constexpr (Shape::IN_REGISTERS) {
            product<T, 0>(c, own[which * 4 * PANELS + i], b, add);
        } else {
            product<T, 0>(c, further(ours, i / 4 * Shape::OWN_PANEL + i % 4 * 32), b, add);
        }
    }
    products_end();
}

/* dX += dS x, dY += P y. */
template <class T, class Shape>
__device__ __forceinline__ void
second_products(float (&gradient)[Shape::GRADIENTS][32 * Shape::PANELS],
                const uint32_t (&w)[Shape::GRADIENTS][4][4], Places<Shape> at, int stage) {
    const Operand others = columns_operand(at.other(place<Shape>(stage), 0), Shape::PART);
    products_begin();
#pragma unroll
    for (int which = 0; which < Shape::GRADIENTS; which++) {
#pragma unroll
        for (int step = 0; step < 4; step++) {
            product<T, 1>(gradient[which], w[which][step],
                          further(others, which * Shape::OTHER + step * 16 * PANEL_ROW), true);
        }
    }
    products_end();
}

/* Mask scores of a part from `part` on: a key above the query's offset is not seen, nor one beyond
 * the end. row: the thread's first. */
template <class Shape>
__device__ __forceinline__ void hide(float (&s)[32], const Problem &p, int row, int part,
                                     int lane) {
    const int first = part + 2 * (lane % 4);
    const int distance = !p.causal ? (Shape::OWN_KEYS ? INT_MIN / 2 : p.S)
                                   : row - first + (Shape::OWN_KEYS ? -p.offset : p.offset);
    const int last = p.S - 1 - first; /* column, of keys */
    const int beyond = p.S - row;     /* row, of keys */
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int row = i / 2 % 2 * 8, column = i / 4 * 8 + i % 2;
        bool hidden = Shape::OWN_KEYS ? distance + row > column || row >= beyond
                                      : column > min(distance + row, last);
        s[i] = hidden ? -INFINITY : s[i];
    }
}

/* P of scores; lse belongs to rows, or is in the scores. */
template <class Shape>
__device__ __forceinline__ void exponentials(float (&s)[32], float scale_log2,
                                             const float (&stat)[2][2]) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if constexpr (Shape::OWN_KEYS) {
            s[i] = fast_exp2(s[i] * scale_log2);
        } else {
            s[i] = fast_exp2(fmaf(s[i], scale_log2, -stat[i / 2 % 2][0]));
        }
    }
}

/* One pass: store dS of my keys for the warpgroup that computes dq. */
template <class Shape>
__device__ __forceinline__ void hand_on(const uint32_t (&ds)[4][4], Ring<Shape::WEIGHTS> &weights,
                                        Thread<Shape> me, Places<Shape> at) {
    barrier_wait(at.weights_empty(weights.at), weights.phase ^ 1);
    stage_words(at.weights(weights.at) + me.group * Shape::PART, ds);
    proxy_fence();
    __syncwarp();
    if (me.lane == 0) {
        barrier_arrive(at.weights_full(weights.at));
    }
    weights.advance();
}

/* The parts of an item as they come, for a consumer: next() waits for one, and returns its first row,
 * or -1 after the last. Only the producer reads lists: it leaves word of a part beside it, which all of
 * a consumer's threads must have read when the part is handed back. */
template <class Shape, bool LISTS = Shape::LISTS> struct Parts {
    decltype(walk_of<Shape>(Problem(), WorkItem(), 0)) walk;

    __device__ __forceinline__ Parts(const Problem &p, const WorkItem &item, int first)
        : walk(walk_of<Shape>(p, item, first)) {}
    __device__ __forceinline__ int next(Places<Shape> at, Ring<Shape::STAGES> stage) {
        const int part = walk.next();
        if (part >= 0) {
            barrier_wait(at.full(stage.at), stage.phase);
        }
        return part;
    }
};
template <class Shape> struct Parts<Shape, true> {
    bool more;

    __device__ __forceinline__ Parts(const Problem &, const WorkItem &item, int)
        : more(item.meets) {}
    __device__ __forceinline__ int next(Places<Shape> at, Ring<Shape::STAGES> stage) {
        if (!more) {
            return -1;
        }
        barrier_wait(at.full(stage.at), stage.phase);
        const int word = (int)uniform(load_shared4(at.part(stage.at)));
        more = (word & 1) == 0;
        return word & ~1;
    }
};

/* The end of an item: dX and dY are rotated back, their sums and largest taken, and stored. mine:
 * the first of the 64 rows; most: see larger(). */
template <class T, class Shape>
__device__ __forceinline__ void
store_gradients(float (&gradient)[Shape::GRADIENTS][32 * Shape::PANELS], uint32_t &most,
                const Backward &f, const WorkItem &item, int mine, Thread<Shape> me,
                Places<Shape> at, int slot) {
    constexpr int PANELS = Shape::PANELS, GRADIENTS = Shape::GRADIENTS;
    const Problem &p = f.p;
    const int own_rows = Shape::OWN_KEYS ? p.S : p.T;
    /* Beyond the end any angle does: nothing is stored there. */
    const int positions[2] = {min(mine + me.row, own_rows - 1),
                              min(mine + me.row + 8, own_rows - 1)};
    if (f.half == 8) {
        rotate_back<8>(gradient[0], f, positions);
    } else if (f.half == 16) {
        rotate_back<16>(gradient[0], f, positions);
    }
    named_barrier_sync(1 + me.group, WARPGROUP); /* these rows have been read */
#pragma unroll
    for (int which = 0; which < GRADIENTS; which++) {
        float factor = which == 0 ? p.scale : 1.0f;
        float factors[2] = {factor, factor};
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            stage_rows<T>(at.staged(slot, which) + panel * Shape::OWN_PANEL +
                              me.group * Shape::PART,
                          gradient[which], 32 * panel, factors);
        }
    }
    const bool count[2] = {mine + me.row < own_rows, mine + me.row + 8 < own_rows};
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
                             at.sums(me.group, which) +
                                 (threadIdx.x % WARPGROUP) / 32 * Shape::SUMS);
        }
    }
    proxy_fence();
    named_barrier_sync(1 + me.group, WARPGROUP);
    if (f.sums && mine < own_rows) { /* of the warps, in shared memory until the next such wait */
        const int64_t part = (int64_t)item.b * ((own_rows + CONSUMER_ROWS - 1) / CONSUMER_ROWS) +
                             mine / CONSUMER_ROWS;
        float *to = f.sums + (part * p.H + item.h) * 3 * p.D + (Shape::OWN_KEYS ? p.D : 0);
        for (int which = 0; which < GRADIENTS; which++) {
            add_warps<Shape>(at.sums(me.group, which), to + which * p.D, p.D);
        }
    }
    if (me.leads) {
        if (mine < own_rows) {
            for (int which = 0; which < GRADIENTS; which++) {
                for (int panel = 0; panel < PANELS; panel++) {
                    gradient_store(p, &f.gradient[which],
                                   at.staged(slot, which) + panel * Shape::OWN_PANEL +
                                       me.group * Shape::PART,
                                   panel * PANEL_COLUMNS, mine, item.h, item.b);
                }
            }
            box_stores_read();
        }
    }
}

template <class T, class Shape>
__device__ __forceinline__ void consume(const Backward &f, Places<Shape> at) {
    constexpr int PANELS = Shape::PANELS;
    constexpr int GRADIENTS = Shape::GRADIENTS;
    const Problem &p = f.p;
    const Thread<Shape> me;
    const ColumnTerms<T> terms;
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
        const int first = item.tile * Shape::ROWS, mine = first + CONSUMER_ROWS * me.group;
        float stat[2][2];
        if constexpr (!Shape::OWN_KEYS) {
            load_stats(stat, p, item, mine + me.row);
        }
        uint32_t own[Shape::IN_REGISTERS ? 8 * PANELS : 1][4];
        if constexpr (Shape::IN_REGISTERS) {
            load_own<Shape>(own, me, at, slot.at);
        }
        float gradient[GRADIENTS][32 * PANELS] = {};
        float s[32], dp[32];
        uint32_t w[GRADIENTS][4][4]; /* dS and P of the part before, rounded */
        Ring<Shape::STAGES> before;

        const Visible visible = visible_parts<Shape>(p, mine);

        auto product_of = [&](int which, float(&c)[32]) {
            first_product<T, Shape>(which, c, own, terms, me, at, slot.at, stage.at);
        };
        auto second_products_done = [&]() {
            products_wait<0>();
#pragma unroll
            for (int which = 0; which < GRADIENTS; which++) {
                hold(gradient[which]);
                hold(w[which]);
            }
            if (me.leads) {
                barrier_arrive(at.empty(before.at));
            }
        };
        auto round = [&]() {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                w[0][i / 4][i % 4] = pack_pair<T>(dp[2 * i], dp[2 * i + 1]);
                if constexpr (Shape::OWN_KEYS) {
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
            product_of(0, s);
            if constexpr (Shape::OVERLAP) {
                product_of(1, dp);
            }
            if constexpr (PENDING) {
                second_products<T, Shape>(gradient, w, at, before.at);
                if constexpr (Shape::ONE_PASS) {
                    hand_on<Shape>(w[0], weights, me, at);
                }
            }
            products_wait<PENDING + Shape::OVERLAP>();
            hold(s);
            if (Shape::OWN_KEYS ? part < visible.edge : part > visible.edge) {
                hide<Shape>(s, p, mine + me.row, part, me.lane);
            }
            exponentials<Shape>(s, p.scale_log2, stat);
            hold(s);
            stay_above(p.D);
            if constexpr (Shape::OVERLAP) {
                products_wait<PENDING>();
            } else {
                if constexpr (PENDING) {
                    second_products_done();
                }
                product_of(1, dp);
                products_wait<0>();
            }
            hold(dp);
#pragma unroll
            for (int i = 0; i < 32; i++) {
                dp[i] = s[i] * (Shape::OWN_KEYS ? dp[i] : dp[i] - stat[i / 2 % 2][1]);
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
            named_barrier_sync(1 + me.group, WARPGROUP); /* all have seen it come */
            if (me.leads) {
                barrier_arrive(at.empty(stage.at));
            }
            stage.advance();
            if constexpr (Shape::ONE_PASS) {
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    w[0][i / 4][i % 4] = 0;
                }
                hand_on<Shape>(w[0], weights, me, at);
            }
        };

        Parts<Shape> parts(p, item, first);
        auto next = [&]() { return parts.next(at, stage); };
        int part = next();
        for (; part >= 0 && !visible.sees(part); part = next()) {
            pass();
        }
        if (part >= 0) {
            work(part, std::integral_constant<int, 0>());
            for (part = next(); part >= 0 && visible.sees(part); part = next()) {
                work(part, std::integral_constant<int, 1>());
            }
            second_products<T, Shape>(gradient, w, at, before.at);
            if constexpr (Shape::ONE_PASS) {
                hand_on<Shape>(w[0], weights, me, at);
            }
            second_products_done();
        }
        for (; part >= 0; part = next()) {
            pass();
        }

        store_gradients<T, Shape>(gradient, most, f, item, mine, me, at, slot.at);
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
    constexpr bool KEYS = Shape::OWN_KEYS;
    problem_tiles(&f.p, KEYS, Shape::ROWS, lists);
    if (Shape::ONE_PASS) {
        f.p.heads_together = dq_heads_together(device, f.p);
        ND_TRY(box_map(op, a.dq, CONSUMER_ROWS, &f.dq));
    }
    const nd_array *own[] = {KEYS ? a.k : a.q, KEYS ? a.v : a.dout};
    const nd_array *other[] = {KEYS ? a.q : a.k, KEYS ? a.dout : a.v};
    const nd_array *gradient[] = {KEYS ? a.dk : a.dq, KEYS ? a.dv : a.dq};
    for (int which = 0; which < 2; which++) {
        ND_TRY(box_map(op, own[which], CONSUMER_ROWS, &f.own[which]));
        ND_TRY(box_map(op, other[which], CONSUMER_ROWS, &f.other[which]));
        ND_TRY(box_map(op, gradient[which], CONSUMER_ROWS, &f.gradient[which]));
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
                    {TERMS_ROW, CONSUMER_ROWS, 1, 1}, TERMS_ROW, &f.terms));
    if (a.q->dtype == ND_BF16) {
        return hopper_launch<Shape>(op, device, attention_bwd_hopper_kernel<bf16, Shape>, f);
    }
    return hopper_launch<Shape>(op, device, attention_bwd_hopper_kernel<f16, Shape>, f);
}

/* BackwardShape<own rows are keys, panels, consumers, own tiles and parts in shared memory, ...> */
template <bool KEYS, class Run>
nd_status with_shape(bool wide, const BlockLists &lists, Run &&run) {
    if (lists.offsets == NULL) {
        return run(BackwardShape<KEYS, 2, 2, 1, 4, false>());
    }
    if (lists.block % (2 * CONSUMER_ROWS) == 0) {
        return wide ? run(BackwardShape<KEYS, 2, 2, 1, 4, true>())
                    : run(BackwardShape<KEYS, 1, 2, 3, 6, true>());
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
