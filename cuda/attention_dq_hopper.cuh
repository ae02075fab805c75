/* attention_dq_hopper.cuh - dq in the same pass as dk and dv: the fifth product of a part, summed
 * over key tiles in a fixed order.
 *
 *     dq_i = scale sum_j dS_ij k_j
 *
 * A tile of 128 keys adds one share, dS k, to dq of 64 queries. Consumers store dS^T in shared
 * memory as panels (keys x queries), which the tensor core reads along their columns, as it reads
 * k. One warpgroup computes the shares in float32 and stores them in shared memory; one thread for
 * each buffer passes them to the copy engine.
 *
 * Order: ascending key tiles. The first tile stores its share in dq_sums; each following one adds
 * its share there, in the L2 cache, once the ticket says that the tile before it has been added.
 * The last tile starts its product from that sum, rotates, rounds and stores dq: no other pass
 * clears or converts. A ticket counts the shares in a sum. It is released after the bulk copy has
 * completed [PTX, cp.async.bulk.wait_group without .read] and acquired with a fence between
 * proxies.
 * No deadlock: blocks take tiles in ascending order, so a tile waits only for tiles that a running
 * block has taken. Little waiting: every tile walks the queries from the last to the first, at the
 * same speed.
 */
#ifndef NEEDLE_ATTENTION_DQ_HOPPER_CUH
#define NEEDLE_ATTENTION_DQ_HOPPER_CUH

#include "attention_bwd_hopper.cuh"

namespace attention {

/* About four key tiles of a head run at a time: they share loads of queries, and only the first
 * tiles of a section wait for each other. */
static inline int dq_heads_together(int device, const Problem &p) {
    const int heads = cuda_device_limits(device)->processors / 4;
    return heads < p.B * p.H ? (heads > 0 ? heads : 1) : p.B * p.H;
}

#ifdef HOPPER_CODE

/* What to do with a share. Its place is (b, h, part) in one number. */
enum ShareUse { SHARE_END, SHARE_STORE, SHARE_ADD, SHARE_IS_DQ };

/* ---- the warpgroup that computes shares ------------------------------------------------------ */
template <class T, class Shape>
__device__ __forceinline__ void sum_queries(const Backward &f, Places<Shape> at) {
    const Problem &p = f.p;
    const int thread = threadIdx.x % WARPGROUP, lane = thread & 31;
    const int my_row = thread / 32 * 16 + lane / 4;
    const int parts = (p.T + CONSUMER_ROWS - 1) / CONSUMER_ROWS;
    Ring<Shape::SLOTS> slot;
    Ring<Shape::WEIGHTS> weights;
    Ring<Shape::SHARES> share;
    uint32_t most = 0; /* see larger() */
    /* Hands on the share that all threads have stored. */
    auto send = [&](ShareUse use, int place, int tile) {
        if (thread == 0) {
            const uint32_t words[4] = {(uint32_t)use, (uint32_t)place, (uint32_t)tile, 0};
            store_shared16(at.order(share.at), words);
        }
        proxy_fence();
        barrier_arrive(at.share_full(share.at));
        share.advance();
    };
    for (;;) {
        barrier_wait(at.own_full(slot.at), slot.phase);
        const WorkItem item = load_item(at.item(slot.at));
        if (item.tile < 0) {
            break;
        }
        const Operand keys = columns_operand(at.own(uniform(slot.at), 0), Shape::PART);
        PartsDown walk = walk_of<Shape>(p, item, item.tile * Shape::ROWS);
        for (int part = walk.next(); part >= 0; part = walk.next()) {
            const int place = (item.b * p.H + item.h) * parts + part / CONSUMER_ROWS;
            const bool last =
                item.tile == max(keys_end(p, part + CONSUMER_ROWS) - 1, 0) / Shape::ROWS;
            float c[32];
            if (last && item.tile > 0) {
                if (thread == 0) {
                    await_ticket(p.tickets + place, item.tile);
                }
                named_barrier_sync(1 + Shape::CONSUMERS, WARPGROUP);
                const float4 *sum = (const float4 *)(p.dq_sums + (int64_t)place * DQ_SHARE);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float4 before = __ldcg(sum + i * WARPGROUP + thread);
                    c[4 * i] = before.x;
                    c[4 * i + 1] = before.y;
                    c[4 * i + 2] = before.z;
                    c[4 * i + 3] = before.w;
                }
            }
            barrier_wait(at.weights_full(weights.at), weights.phase);
            const Operand ds = columns_operand(at.weights(uniform(weights.at)), Shape::PART);
            auto multiply = [&](auto keys_seen) {
                products_begin();
#pragma unroll
                for (int step = 0; step < decltype(keys_seen)::get / 16; step++) {
                    const uint32_t on = step * 16 * PANEL_ROW;
                    product<T, 1, 1>(c, further(ds, on), further(keys, on),
                                     step > 0 || (last && item.tile > 0));
                }
                products_end();
            };
            /* Keys that none of the part sees stay out: a NaN of theirs would pass through zeros. */
            if (keys_end(p, part + CONSUMER_ROWS) > item.tile * Shape::ROWS + CONSUMER_ROWS) {
                multiply(Constant<Shape::ROWS>());
            } else {
                multiply(Constant<CONSUMER_ROWS>());
            }
            products_wait<0>();
            hold(c);
            if (keys_end(p, part + CONSUMER_ROWS) == 0) {
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    c[i] = 0.0f;
                }
            }
            if (thread == 0) {
                barrier_arrive(at.weights_empty(weights.at));
            }
            weights.advance();
            if (!last) {
                barrier_wait(at.share_empty(share.at), share.phase ^ 1);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    uint32_t words[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        words[e] = __float_as_uint(c[4 * i + e]);
                    }
                    store_shared16(at.share(share.at) + (i * WARPGROUP + thread) * 16, words);
                }
                send(item.tile == 0 ? SHARE_STORE : SHARE_ADD, place, item.tile);
                continue;
            }
            const int rows[2] = {part + my_row, part + my_row + 8};
            const int positions[2] = {min(rows[0], p.T - 1), min(rows[1], p.T - 1)};
            if (f.half == 8) {
                rotate_back<8>(c, f, positions);
            } else if (f.half == 16) {
                rotate_back<16>(c, f, positions);
            }
            const bool count[2] = {rows[0] < p.T, rows[1] < p.T};
            if (p.largest) {
                most = larger(most, c, count, p.scale);
            }
            if (f.sums) {
                const uint32_t sums = at.sums(Shape::CONSUMERS, 0);
                named_barrier_sync(1 + Shape::CONSUMERS, WARPGROUP); /* the last ones are read */
                sum_rows<1>(c, count, p.scale, sums + thread / 32 * Shape::SUMS);
                named_barrier_sync(1 + Shape::CONSUMERS, WARPGROUP);
                const int64_t row = (int64_t)item.b * parts + part / CONSUMER_ROWS;
                add_warps<Shape>(sums, f.sums + (row * p.H + item.h) * 3 * p.D, p.D);
            }
            barrier_wait(at.share_empty(share.at), share.phase ^ 1);
            const float factors[2] = {p.scale, p.scale};
            stage_rows<T>(at.share(share.at), c, 0, factors);
            send(SHARE_IS_DQ, place, item.tile);
        }
        barrier_arrive(at.own_empty(slot.at));
        slot.advance();
    }
    join_largest<T>(most, p.largest);
    for (int i = 0; i < Shape::SHARES; i++) {
        barrier_wait(at.share_empty(share.at), share.phase ^ 1);
        send(SHARE_END, 0, 0);
    }
}

/* ---- the thread that writes the shares of a buffer ------------------------------------------- */
template <class Shape>
__device__ __forceinline__ void write_shares(const Backward &f, Places<Shape> at, int share) {
    const Problem &p = f.p;
    const int parts = (p.T + CONSUMER_ROWS - 1) / CONSUMER_ROWS;
    for (uint32_t phase = 0;; phase ^= 1) {
        barrier_wait(at.share_full(share), phase);
        uint32_t words[4];
        load_shared16(words, at.order(share));
        const int use = (int)words[0], place = (int)words[1], tile = (int)words[2];
        if (use == SHARE_END) {
            return;
        }
        float *sum = p.dq_sums + (int64_t)place * DQ_SHARE;
        if (use == SHARE_IS_DQ) {
            const int head = place / parts;
            gradient_store(p, &f.dq, at.share(share), 0, place % parts * CONSUMER_ROWS, head % p.H,
                           head / p.H);
        } else if (use == SHARE_STORE) {
            bulk_store(sum, at.share(share), Shape::SHARE);
        } else {
            await_ticket(p.tickets + place, tile);
            bulk_add(sum, at.share(share), Shape::SHARE);
        }
        box_stores_read();
        barrier_arrive(at.share_empty(share));
        if (use != SHARE_IS_DQ) {
            bulk_stores_done();
            store_release(p.tickets + place, tile + 1);
        }
    }
}

#endif
} // namespace attention

#endif
