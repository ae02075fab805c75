"""Rotary embedding, attention dense, in parts and block-sparse, and the step of generation."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from needle.testing.case import cases_of, draw, normal


def rotary(r, x, cos, sin, parts, sign):
    """x (B, T, H, P, D), cos and sin (T, R): pairs (i, i + R) of the first 2 R are rotated."""
    y = x.copy()
    half = cos.shape[1]
    c, s = cos[None, :, None, None, :], sign * sin[None, :, None, None, :]
    first, second = x[..., :parts, :half], x[..., :parts, half : 2 * half]
    y[..., :parts, :half] = r(r(first * c) - r(second * s))
    y[..., :parts, half : 2 * half] = r(r(second * c) + r(first * s))
    return {"x": y}


def linear_rotary_fwd(r, x, w, b, cos, sin, parts):
    y = r(np.tensordot(x, w, 1))
    y = y if b is None else r(y + b)
    return {"y": rotary(r, y, cos, sin, parts, 1.0)["x"]}


def by_heads(x):
    """(B, H, T, D) of (B, T, H, D), and back."""
    return x.transpose(0, 2, 1, 3)


def pair_products(q, k):
    """(B, H, T, S): of each q (B, T, H, D) with each k (B, S, H, D). By matmul, which is a BLAS's:
    of products with axes in common einsum makes plain loops."""
    return by_heads(q) @ by_heads(k).swapaxes(2, 3)


def weighted(p, v):
    """(B, T, H, D): the sums of v (B, S, H, D) by the weights p (B, H, T, S)."""
    return by_heads(p @ by_heads(v))


def attention_gradients(p, q, k, v, dout, scale):
    """dq, dk, dv, by the softmax's weights p (B, H, T, S)."""
    dp = pair_products(dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return weighted(ds, k), weighted(ds.swapaxes(2, 3), q), weighted(p.swapaxes(2, 3), dout)


def visible(t: int, s: int, causal) -> np.ndarray:
    """(T, S): which keys a query sees."""
    see = np.ones((t, s), bool)
    return np.tril(see, s - t) if causal else see


def attention_scores(r, q, k, scale, see):
    scores = r(scale * r(pair_products(q, k)))
    return np.where(see, scores, -np.inf)


def softmax_attention(r, q, k, v, scale, see):
    """The plain computation. `see` broadcasts to (B, H, T, S)."""
    b, t, h, _ = q.shape
    scores = attention_scores(r, q, k, scale, see)
    with np.errstate(all="ignore"):
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0)
        p = r(np.exp(scores - top))
        total = p.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.log(total) + top, -np.inf)
        p = r(np.where(total > 0, p / total, 0))
    o = r(weighted(p, v))
    return {"o": o, "lse": lse[..., 0]}


def softmax_attention_bwd(r, dout, q, k, v, o, lse, scale, see):
    scores = attention_scores(r, q, k, scale, see)
    with np.errstate(all="ignore"):
        p = r(np.where(np.isfinite(scores), np.exp(scores - lse[..., None]), 0))
    dp = r(pair_products(dout, v))
    delta = r((dout * o).sum(-1)).transpose(0, 2, 1)[..., None]
    ds = r(p * r(dp - delta))
    return {
        "dq": r(scale * weighted(ds, k)),
        "dk": r(scale * weighted(ds.swapaxes(2, 3), q)),
        "dv": r(weighted(p.swapaxes(2, 3), dout)),
    }


def attention_fwd(r, q, k, v, scale, causal, o):
    return softmax_attention(r, q, k, v, scale, visible(q.shape[1], k.shape[1], causal))


def rotated_back(r, gradients, cos, sin):
    """Rotate dq and dk back: the gradients of q and k before rotary. dv stays."""
    if cos is None:
        return gradients
    rotated = {
        name: rotary(r, gradients[name][:, :, :, None], cos, sin, 1, -1.0)["x"][:, :, :, 0]
        for name in ("dq", "dk")
    }
    return gradients | rotated


def summed_up(r, gradients, db):
    """db (H, 3, D) += the sums of dq, dk and dv over B and T."""
    if db is None:
        return gradients
    sums = [r(gradients[name].sum((0, 1))) for name in ("dq", "dk", "dv")]
    return gradients | {"db": r(db + np.stack(sums, 1))}


def attention_bwd(r, dout, q, k, v, o, lse, scale, causal, cos, sin, dq, dk, dv, db, largest):
    see = visible(q.shape[1], k.shape[1], causal)
    gradients = softmax_attention_bwd(r, dout, q, k, v, o, lse, scale, see)
    return summed_up(r, rotated_back(r, gradients, cos, sin), db)


def attention_part_fwd(r, q, k, v, scale, causal, joins, o, lse):
    """lse is (B, T, H)."""
    found = attention_fwd(r, q, k, v, scale, causal, o)
    mine = found["lse"].transpose(0, 2, 1)
    if not joins:
        return {"o": found["o"], "lse": mine}
    total = np.logaddexp(lse, mine)
    with np.errstate(invalid="ignore"):  # of -inf and -inf
        weights = [np.where(x > -np.inf, np.exp(x - total), 0)[..., None] for x in (lse, mine)]
    before = np.where(weights[0] > 0, o, 0)
    return {"o": r(weights[0] * before + weights[1] * found["o"]), "lse": total}


def attention_part_bwd(r, dout, q, k, v, o, lse, scale, causal, joins, dq, dk, dv):
    see = visible(q.shape[1], k.shape[1], causal)
    lse = lse.transpose(0, 2, 1)
    gradients = softmax_attention_bwd(r, dout, q, k, v, o, lse, scale, see)
    before = {"dq": dq, "dk": dk, "dv": dv} if joins else {}
    return {name: r(x + before.get(name, 0)) for name, x in gradients.items()}


def kept_blocks(r, dense, block, kept):
    """dense (G, T, S): of each block, whether an element is true."""
    kept = np.zeros_like(kept)
    for g, i, j in zip(*np.nonzero(dense)):
        kept[g, i // block, j // block] = 1
    return {"kept": kept}


def block_lists(r, kept, offsets, entries):
    """kept (G, R, C): of each row its columns, and the rows of each mask by falling length."""
    offsets, found, order = np.zeros_like(offsets), [], []
    for g, mask in enumerate(kept):
        lists = [np.flatnonzero(row) for row in mask]
        for i, entries_of_row in enumerate(lists):
            offsets[g, i] = len(found)
            found.extend(entries_of_row)
        offsets[g, len(lists)] = len(found)
        order.append(sorted(range(len(lists)), key=lambda i: (-len(lists[i]), i)))
    order = np.array(order, np.int64).reshape(kept.shape[:2])
    return {"offsets": offsets, "entries": np.array(found, np.int64), "order": order}


def both_lists(blocks: np.ndarray) -> dict:
    """The lists of blocks (G, query blocks, key blocks), and those of the transposed blocks."""

    def lists(of):
        return block_lists(None, of, np.zeros((of.shape[0], of.shape[1] + 1), np.int64), None)

    one, other = lists(blocks), lists(blocks.transpose(0, 2, 1))
    return {
        "offsets": one["offsets"],
        "columns": one["entries"],
        "order": one["order"],
        "offsets_t": other["offsets"],
        "rows": other["entries"],
        "order_t": other["order"],
    }


def see_blocks(t, s, offsets, columns, block, causal) -> np.ndarray:
    see = np.zeros((offsets.shape[0], t, s), bool)
    for g in range(offsets.shape[0]):
        for i in range(offsets.shape[1] - 1):
            for j in columns[offsets[g, i] : offsets[g, i + 1]]:
                see[g, i * block : (i + 1) * block, j * block : (j + 1) * block] = True
    return (see & visible(t, s, causal))[None]


def block_sparse_attention_fwd(r, q, k, v, offsets, columns, order, block, scale, causal, o):
    see = see_blocks(q.shape[1], k.shape[1], offsets, columns, block, causal)
    return softmax_attention(r, q, k, v, scale, see)


def block_sparse_attention_bwd(
    r, dout, q, k, v, o, lse, offsets, columns, block, scale, causal, cos, sin, db, **unread
):
    see = see_blocks(q.shape[1], k.shape[1], offsets, columns, block, causal)
    gradients = softmax_attention_bwd(r, dout, q, k, v, o, lse, scale, see)
    return summed_up(r, rotated_back(r, gradients, cos, sin), db)


def decode_attention(r, qkv, cos, sin, positions, scale, keys, values, o):
    """qkv (B, H, 3, D), caches (B, H, S, D): row b's new token at positions[b]."""
    keys, values, seen = keys.copy(), values.copy(), []
    for b, p in enumerate(positions):
        packed = qkv[b].transpose(1, 0, 2)[None, None]  # (1, 1, 3, H, D): slices before heads
        rotated = rotary(r, packed.transpose(0, 1, 3, 2, 4), cos[[p]], sin[[p]], 2, 1.0)["x"]
        q, k, v = (rotated[:, :, :, i] for i in range(3))  # (1, 1, H, D) each
        keys[b, :, p], values[b, :, p] = k[0, 0], v[0, 0]
        cached = (c[b : b + 1, :, : p + 1].transpose(0, 2, 1, 3) for c in (keys, values))
        seen.append(softmax_attention(r, q, *cached, scale, True)["o"][0, 0])
    return {"keys": keys, "values": values, "o": np.array(seen).reshape(o.shape)}


def decode_greedy(r, logits, tokens, positions):
    return {"tokens": logits.argmax(-1), "positions": positions + 1}


def decode_output_greedy(rounded, x, w, tokens, positions):
    logits = rounded(x @ w)
    return {"logits": logits} | decode_greedy(rounded, logits, tokens, positions)


def angles(t: int, half: int) -> dict:
    angle = np.arange(t)[:, None] / 100.0 ** (np.arange(half) / max(half, 1))
    return {"cos": np.cos(angle), "sin": np.sin(angle)}


def rotary_inputs(b, t, h, p, d, half, parts, sign):
    def inputs(rng):
        x = rng.standard_normal((b, t, h, p, d))
        return {"x": x, "parts": parts, "sign": sign} | angles(t, half)

    return inputs


def linear_rotary_inputs(b, t, k, h, p, d, half, parts, bias=True):
    return draw(
        x=normal(b, t, k),
        w=normal(k, h, p, d, std=(k or 1) ** -0.5),
        b=normal(h, p, d) if bias else None,
        parts=parts,
        **angles(t, half),
    )


def decode_inputs(b, h, d, s, half, positions, scale=None, count=None):
    def inputs(rng):
        return angles(count or s, half) | {
            "qkv": rng.standard_normal((b, h, 3, d)),
            "positions": np.resize(positions, b).astype(np.int64),
            "scale": 1 / math.sqrt(d) if scale is None else scale,
            "keys": rng.standard_normal((b, h, s, d)),
            "values": rng.standard_normal((b, h, s, d)),
            "o": np.full((b, h, d), np.nan),
        }

    return inputs


def products_inputs(b, k, v):
    """Products that are the logits of logits_inputs, so that many are the largest."""

    def inputs(rng):
        given = logits_inputs(k, v)(rng)
        x = np.eye(k)[rng.integers(0, k, b)]
        return {"x": x, "w": given["logits"], "tokens": np.zeros(b), "positions": np.arange(b)}

    return inputs


def logits_inputs(b, v):
    """Whole numbers, of which a long row has the largest more than once."""
    return draw(
        logits=lambda rng: rng.integers(-100, 100, (b, v), np.int8).astype(float),
        tokens=np.zeros(b, np.int64),
        positions=np.arange(b),
    )


def attention_inputs(
    b, t, s, h, d, causal, scale=None, blocks=None, block=None, backward=False, half=None, db=False
):
    """blocks: (G, query blocks, key blocks) of bool for the block-sparse ops. half: the number of
    angles that rotate dq and dk back. db: their sums are added too. Arrays that are overwritten
    hold NaN before."""

    def inputs(rng):
        of = {"q": (b, t, h, d), "k": (b, s, h, d), "v": (b, s, h, d)}
        made = {name: rng.standard_normal(shape) for name, shape in of.items()}
        last = {"scale": d**-0.5 if scale is None else scale, "causal": int(causal)}
        lists = {} if blocks is None else both_lists(np.asarray(blocks, bool))
        if backward:
            see = visible(t, s, causal)
            if lists:
                see = see_blocks(t, s, lists["offsets"], lists["columns"], block, causal)
            made["dout"] = rng.standard_normal((b, t, h, d))
            made |= softmax_attention(
                lambda a: a, **{n: made[n] for n in of}, scale=last["scale"], see=see
            )
            made |= {"cos": None, "sin": None} if half is None else angles(t, half)
            made |= {"d" + n: np.full(shape, np.nan) for n, shape in of.items()}
            made["db"] = rng.standard_normal((h, 3, d)) if db else None
            made["largest"] = None  # tests/harness.py compares it with what is stored
        else:
            lists = {n: lists[n] for n in ("offsets", "columns", "order") if n in lists}
            made["o"] = np.full((b, t, h, d), np.nan)
        return made | lists | ({"block": block} if lists else {}) | last

    return inputs


def part_inputs(b, t, s, h, d, causal, joins, backward=False):
    """Results of parts before are random; a few queries saw no key in those, where o is NaN."""

    def inputs(rng):
        made = attention_inputs(b, t, s, h, d, causal, backward=backward)(rng) | {"joins": joins}
        if backward:
            for name in ("cos", "sin", "db", "largest"):
                del made[name]
            made["lse"] = made["lse"].transpose(0, 2, 1) + rng.random((b, t, h))
            changed = ("dq", "dk", "dv")
        else:
            made["lse"] = 3 + rng.standard_normal((b, t, h))
            changed = ("o",)
        if joins:
            made |= {name: rng.standard_normal(made[name].shape) for name in changed}
        if not backward:
            none = rng.random((b, t, h)) < 0.1
            made["lse"][none], made["o"][none] = -np.inf, np.nan
        return made

    return inputs


def dense_inputs(g, t, s, block, kept=0.02):
    """kept: the share of true elements, or the place of the one that is; blocks are overwritten."""

    def inputs(rng):
        dense = np.zeros((g, t, s), bool)
        if isinstance(kept, tuple):
            dense[(g - 1, *kept)] = True
        else:
            dense = rng.random((g, t, s)) < kept
        blocks = np.ones((g, -(-t // block), -(-s // block)), bool)
        return {"dense": dense, "block": block, "kept": blocks}

    return inputs


def kept_inputs(g, r, c, density=0.4):
    """offsets and entries are overwritten: whatever is in them must not matter."""

    def inputs(rng):
        kept = rng.random((g, r, c)) < density
        return {"kept": kept, "offsets": np.full((g, r + 1), 7), "entries": np.full(kept.sum(), 7)}

    return inputs


def causal_blocks(n: int, keep: Callable[[int, int], bool]) -> np.ndarray:
    return np.array([[[j <= i and keep(i, j) for j in range(n)] for i in range(n)]])


LOCAL = causal_blocks(5, lambda i, j: i - j < 2)
STRIDED = causal_blocks(5, lambda i, j: i == j or j % 2 == 0)
PER_HEAD = np.concatenate([LOCAL, STRIDED, causal_blocks(5, lambda i, j: j == 0 or i == j)])
WITH_EMPTY_ROW = LOCAL & (np.arange(5) != 2)[None, :, None]  # the queries of block 2 see nothing
NOT_CAUSAL = np.array([[[1, 0, 1], [0, 1, 0], [1, 1, 1]]], bool)


def irregular(heads: int, rows: int, columns: int) -> np.ndarray:
    """Blocks without order, a mask a head, some rows and columns empty."""
    g, i, j = np.ogrid[:heads, :rows, :columns]
    return ((i * 7 + j * 3 + g) % 5 < 3) & (i % 4 != 3)


ROTATED = {  # label: B, T, S, H, D, causal, R or None: only summed up
    "rotated": (2, 31, 31, 3, 16, 1, 4),
    "rotated-16-of-64": (2, 130, 130, 2, 64, 1, 8),
    "rotated-32-of-64": (1, 70, 70, 1, 64, 0, 16),
    "rotated-32-of-128": (1, 193, 193, 2, 128, 1, 16),
    "rotated-16-of-128": (1, 65, 65, 1, 128, 1, 8),
    "rotated-whole-head": (1, 67, 67, 2, 16, 1, 8),
    "rotated-24-of-96": (1, 71, 71, 2, 96, 1, 12),
    "rotated-odd-dims": (1, 33, 33, 2, 21, 1, 5),
    "rotated-256": (1, 40, 40, 1, 256, 1, 32),
    "rotated-by-nothing": (1, 17, 17, 1, 8, 1, 0),
    # Of one token, or nearly so of two, dq is a difference of equal sums: nothing but rounding.
    "rotated-two-dims": (1, 9, 9, 1, 2, 1, 1),
    "rotated-zero-size": (2, 0, 0, 3, 16, 1, 4),
    "summed": (2, 31, 31, 3, 16, 1, None),
    "summed-64": (2, 130, 130, 2, 64, 1, None),
    "summed-128": (1, 193, 193, 2, 128, 0, None),
    "summed-more-keys": (2, 40, 150, 2, 64, 1, None),
    "summed-fewer-keys": (1, 131, 33, 3, 64, 0, None),
    "summed-no-keys": (1, 7, 0, 2, 16, 0, None),
}
ROTATED_SPARSE = {  # label: B, T, S, H, D, causal, blocks, block, R or None
    "rotated": (1, 77, 77, 3, 9, 1, PER_HEAD, 16, 3),
    "rotated-16-of-64": (1, 300, 300, 3, 64, 1, PER_HEAD, 64, 8),
    "rotated-32-of-128": (1, 601, 601, 2, 128, 1, STRIDED, 128, 16),
    "rotated-20-of-40": (1, 71, 71, 2, 40, 0, irregular(2, 5, 5), 16, 10),
    "summed-64": (1, 300, 300, 3, 64, 1, PER_HEAD, 64, None),
    "summed-more-keys": (1, 40, 90, 2, 64, 1, irregular(2, 3, 6), 16, None),
}

ATTENTION = {  # label: B, T, S, H, D, causal
    "one": (1, 1, 1, 1, 1, 1),
    "odd": (2, 31, 31, 3, 16, 1),
    "257": (1, 257, 257, 1, 8, 1),
    "full": (1, 33, 33, 2, 12, 0),
    "more-keys": (2, 17, 40, 1, 20, 1),
    "cross": (1, 40, 17, 2, 8, 0),
    "fewer-keys": (2, 40, 17, 2, 8, 1),  # the first queries see nothing
    "d64": (1, 130, 130, 2, 64, 1),
    "d80": (1, 65, 65, 1, 80, 1),
    "d128": (1, 70, 70, 1, 128, 1),
    "d256": (1, 66, 66, 1, 256, 1),
    "d1": (1, 20, 20, 2, 1, 1),
    "d7": (1, 19, 19, 2, 7, 1),
    "zero-batch": (0, 5, 5, 2, 8, 1),
    "zero-queries": (1, 0, 4, 2, 8, 1),
    "zero-keys": (2, 3, 0, 1, 4, 0),
}
PARTS = {  # the same, and joins
    f"{label}-{way}": (*shape, joins)
    for label, shape in (ATTENTION | {"two-tiles-d128": (1, 260, 260, 2, 128, 1)}).items()
    for joins, way in enumerate(("first", "joins"))
}
SPARSE = {  # label: B, T, S, H, D, causal, blocks, block
    "local": (2, 80, 80, 2, 16, 1, LOCAL, 16),
    "ragged": (1, 71, 71, 1, 24, 1, STRIDED, 16),
    "per-head": (1, 77, 77, 3, 8, 1, PER_HEAD, 16),
    "empty-row": (1, 75, 75, 2, 8, 1, WITH_EMPTY_ROW, 16),
    "full": (1, 47, 47, 1, 64, 0, NOT_CAUSAL, 16),
    "block-64": (1, 300, 300, 1, 64, 1, LOCAL, 64),
    "block-1": (1, 5, 5, 1, 8, 1, STRIDED, 1),
    "d128": (1, 150, 150, 1, 128, 1, STRIDED, 32),
    "block-7": (1, 33, 33, 2, 5, 1, LOCAL, 7),
    "zero-batch": (0, 80, 80, 1, 8, 1, LOCAL, 16),
    "more-keys": (1, 40, 90, 2, 8, 1, irregular(2, 3, 6), 16),
    "block-31": (1, 257, 257, 2, 8, 0, irregular(2, 9, 9), 31),
    "block-200": (1, 450, 450, 1, 4, 1, irregular(1, 3, 3), 200),
    "zero-keys": (1, 90, 0, 2, 16, 0, irregular(1, 3, 0), 32),
    "block-above-queries": (1, 5, 40, 2, 8, 1, irregular(2, 1, 3), 16),
    "block-above-keys": (1, 40, 5, 2, 8, 0, irregular(2, 3, 1), 16),
}


def sparse_inputs(*shape, backward=False):
    *dense, blocks, block = shape
    return attention_inputs(*dense, blocks=blocks, block=block, backward=backward)


def rotated_inputs(*shape):
    *dense, half = shape
    return attention_inputs(*dense, backward=True, half=half, db=True)


def rotated_sparse_inputs(*shape):
    *dense, blocks, block, half = shape
    return attention_inputs(*dense, blocks=blocks, block=block, backward=True, half=half, db=True)


def forward_terms(b, t, s, h, d, *more):
    return max(d, s)


def backward_terms(*shape):
    return 4 * forward_terms(*shape)


CASES = [
    *cases_of(
        rotary,
        rotary_inputs,
        {
            "qkv": (2, 31, 3, 3, 16, 2, 2, 1.0),
            "backward": (2, 31, 3, 3, 16, 2, 2, -1.0),
            "whole-head": (1, 5, 1, 1, 8, 4, 1, 1.0),
            "all-parts": (1, 7, 2, 3, 20, 5, 3, 1.0),
            "no-part": (1, 3, 2, 3, 8, 2, 0, 1.0),
            "no-angle": (1, 3, 2, 3, 5, 0, 2, -1.0),
            "odd-dims": (1, 257, 2, 1, 31, 15, 1, -1.0),
            "257": (1, 257, 1, 2, 6, 1, 1, -1.0),
            "pythia": (1, 9, 2, 3, 64, 8, 2, 1.0),
            "zero-size": (2, 0, 3, 3, 16, 2, 2, 1.0),
        },
    ),
    *cases_of(
        linear_rotary_fwd,
        linear_rotary_inputs,
        {
            "qkv": (2, 31, 65, 3, 3, 16, 2, 2),
            "no-bias": (2, 31, 65, 3, 3, 16, 2, 2, False),
            "one": (1, 1, 1, 1, 3, 2, 1, 2),
            "one-head": (3, 17, 40, 1, 3, 24, 6, 2),
            "whole-head": (2, 33, 64, 2, 3, 16, 8, 2),
            "odd-dims": (2, 257, 31, 2, 3, 31, 15, 2),
            "no-angle": (2, 5, 33, 2, 3, 8, 0, 2),
            "no-part": (1, 3, 8, 2, 3, 8, 2, 0),
            "all-parts": (1, 7, 24, 2, 3, 20, 5, 3),
            "pythia": (2, 130, 512, 8, 3, 64, 8, 2),
            "seldom-rotated": (40, 7, 72, 1, 3, 128, 8, 1, False),
            "head-80": (3, 70, 160, 2, 3, 80, 10, 2),
            "whole-128": (1, 300, 72, 2, 3, 128, 64, 2, False),
            "no-token": (2, 0, 8, 3, 3, 16, 2, 2),
            "no-row": (0, 5, 8, 3, 3, 16, 2, 2),
            "over-nothing": (2, 5, 0, 2, 3, 8, 2, 2),
            "no-head": (2, 5, 8, 0, 3, 8, 2, 2),
            "no-dim": (2, 5, 8, 2, 3, 0, 0, 2),
        },
        lambda b, t, k, *more: k + 2,
    ),
    *cases_of(attention_fwd, attention_inputs, ATTENTION, forward_terms),
    *cases_of(attention_bwd, partial(attention_inputs, backward=True), ATTENTION, backward_terms),
    *cases_of(attention_bwd, rotated_inputs, ROTATED, backward_terms, of_rounded=("db",)),
    *cases_of(
        attention_fwd,
        attention_inputs,
        {"large-scores": (1, 40, 40, 1, 16, 1, 30.0)},
        lambda *shape: 10**4,
    ),
    *cases_of(
        attention_fwd,
        attention_inputs,
        {"negative-scale": (1, 70, 70, 2, 16, 1, -0.5)},
        forward_terms,
    ),
    *cases_of(
        kept_blocks,
        dense_inputs,
        {
            "odd": (3, 70, 45, 16),
            "one": (1, 1, 1, 1, 1.0),
            "tokens": (2, 31, 17, 1, 0.3),
            "wide": (1, 5, 9000, 64, 0.003),  # about half of the blocks
            "wide-48": (1, 5, 9000, 48, 0.003),  # runs of columns that end within a block
            "tall": (2, 700, 5, 300),
            "one-block": (1, 257, 40, 1000),
            "none-kept": (2, 40, 40, 8, 0.0),
            "last": (2, 130, 70, 64, (-1, -1)),
            "first": (2, 130, 70, 64, (0, 0)),
            "no-rows": (2, 0, 5, 8),
            "no-columns": (2, 5, 0, 8),
            "no-masks": (0, 3, 5, 8),
        },
    ),
    *cases_of(
        block_lists,
        kept_inputs,
        {
            "odd": (3, 31, 45),
            "one": (1, 1, 1, 1.0),
            "300": (1, 300, 300),
            "wide": (2, 5, 1100),
            "tall": (2, 1100, 5),
            "sparse": (4, 67, 33, 0.02),  # most rows are empty
            "none-kept": (2, 9, 40, 0.0),
            "all-kept": (2, 9, 40, 1.0),
            "no-rows": (2, 0, 5),
            "no-columns": (2, 5, 0),
            "no-masks": (0, 3, 5),
        },
    ),
    *cases_of(block_sparse_attention_fwd, sparse_inputs, SPARSE, forward_terms),
    *cases_of(
        block_sparse_attention_bwd, partial(sparse_inputs, backward=True), SPARSE, backward_terms
    ),
    *cases_of(
        block_sparse_attention_bwd,
        rotated_sparse_inputs,
        ROTATED_SPARSE,
        backward_terms,
        of_rounded=("db",),
    ),
    *cases_of(attention_part_fwd, part_inputs, PARTS, forward_terms),
    *cases_of(attention_part_bwd, partial(part_inputs, backward=True), PARTS, backward_terms),
    *cases_of(
        decode_attention,
        decode_inputs,
        {
            "odd": (3, 2, 16, 37, 4, [36, 0, 20]),
            "one": (1, 1, 1, 1, 0, [0]),
            "odd-dims": (2, 3, 20, 70, 5, [69, 31]),
            "pythia": (2, 2, 64, 300, 8, [299, 128]),
            "more-angles": (2, 2, 16, 40, 4, [39, 7], None, 64),
            "80": (2, 1, 80, 130, 10, [64, 129]),
            "96-whole-head": (1, 2, 96, 40, 48, [33]),
            "256": (2, 1, 256, 70, 32, [69, 1]),
            "255": (1, 1, 255, 70, 1, [69]),
            "32-lengths": (5, 2, 32, 704, 4, [0, 62, 63, 64, 511]),
            "128-lengths": (4, 3, 128, 704, 16, [65, 512, 513, 700]),
            "many-heads": (12, 20, 32, 130, 4, [0, 1, 127, 128, 129]),
            "last-of-2048": (1, 2, 64, 2048, 8, [2047]),
            "shares": (2, 2, 64, 1300, 8, [1299, 3]),
            "shares-that-differ": (2, 2, 64, 1300, 8, [1297, 2]),
            "shares-of-nothing": (1, 1, 8, 2100, 2, [0]),
            "no-head": (2, 0, 16, 8, 4, [0]),
            "none": (0, 2, 16, 8, 4, [0]),
        },
        lambda b, h, d, s, *more: max(d, s),
    ),
    *cases_of(
        decode_attention,
        decode_inputs,
        {"large-scores": (2, 1, 16, 90, 4, [89, 40], 30.0)},
        lambda *shape: 10**4,
    ),
    *cases_of(
        decode_greedy, logits_inputs, [(31, 257), (1, 1), (3, 50304), (2, 1024), (5, 31), (0, 7)]
    ),
    *cases_of(
        decode_output_greedy,
        products_inputs,
        [(31, 9, 257), (1, 1, 1), (1, 520, 50_304), (3, 72, 34_008), (4, 8, 16_904), (0, 8, 7)],
    ),
]
