"""Every op of ops.def as data: inputs, float64 references, bad inputs.

ELEMENTWISE, COMPARISONS, REDUCTIONS   ops of one formula
CASES          structured ops: inputs by operand name, a reference that returns what the op writes
BAD            wrong calls with the exception and what its message must say

A reference gets a rounding function `r` first and applies it to each intermediate that a naive
computation would store: with the identity it is the exact result, with bfloat16's rounding the
naive one. Arrays that ops.def calls F arrive rounded to the dtype under test.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int64", "uint8", "uint16", "bool")
erf = np.vectorize(math.erf, otypes=[float])

# ---- elementwise ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elementwise:
    f: Callable
    domain: tuple[float, float] = (-4.0, 4.0)
    ulps: float = 0.0  # 0: correctly rounded
    unit: Callable | None = None  # what an ulp is measured in; default the result
    integers: bool = False  # also computed on integer dtypes, where it gives integers


SQRT_2_PI = math.sqrt(2 / math.pi)


def phi(x):
    return 0.5 * (1 + erf(x / math.sqrt(2)))


def gelu(x):
    return x * phi(x)


def gelu_grad(x):
    return phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(SQRT_2_PI * (x + 0.044715 * x**3)))


def gelu_tanh_grad(x):
    t = np.tanh(SQRT_2_PI * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * SQRT_2_PI * (1 + 3 * 0.044715 * x * x)


ELEMENTWISE = {
    "negate": Elementwise(lambda x: -x, integers=True),
    "absolute": Elementwise(np.abs, integers=True),
    "relu": Elementwise(lambda x: np.maximum(x, 0), integers=True),
    "exp": Elementwise(np.exp, (-80, 11), 3),
    "log": Elementwise(np.log, (1e-6, 1e4), 3, lambda y, x: np.maximum(np.abs(y), 0.1)),
    "sqrt": Elementwise(np.sqrt, (0, 1e4), 0.51),
    "tanh": Elementwise(np.tanh, (-12, 12), 4),
    "sigmoid": Elementwise(lambda x: 1 / (1 + np.exp(-x)), (-30, 30), 4),
    "gelu": Elementwise(gelu, (-6, 6), 4, lambda y, x: np.abs(x)),
    "gelu_tanh": Elementwise(gelu_tanh, (-6, 6), 4, lambda y, x: np.abs(x)),
    "add": Elementwise(lambda x, y: x + y, integers=True),
    "subtract": Elementwise(lambda x, y: x - y, integers=True),
    "multiply": Elementwise(lambda x, y: x * y, integers=True),
    "divide": Elementwise(lambda x, y: x / y, (0.1, 8), 0.51),
    "power": Elementwise(np.power, (0.1, 5), 4, lambda z, x, y: z * (1 + np.abs(y * np.log(x)))),
    "maximum": Elementwise(np.maximum, integers=True),
    "minimum": Elementwise(np.minimum, integers=True),
    "gelu_bwd": Elementwise(
        lambda x, y: gelu_grad(x) * y, (-6, 6), 8, lambda z, x, y: np.abs(y) * (1 + np.abs(x))
    ),
    "gelu_tanh_bwd": Elementwise(
        lambda x, y: gelu_tanh_grad(x) * y, (-6, 6), 8, lambda z, x, y: np.abs(y) * (1 + x * x)
    ),
}

inf, nan = float("inf"), float("nan")
# Exact float32 results at the edges: op, operands, result.
SPECIAL = [
    ("exp", ([-inf, inf, 0.0, -1e10, 1e10, nan],), [0, inf, 1, 0, inf, nan]),
    ("log", ([0.0, -1.0, inf, 1.0, nan],), [-inf, nan, inf, 0, nan]),
    ("sqrt", ([0.0, -1.0, inf, 4.0, nan],), [0, nan, inf, 2, nan]),
    ("tanh", ([-1e10, 1e10, -inf, inf, 0.0, nan],), [-1, 1, -1, 1, 0, nan]),
    ("sigmoid", ([-1e10, 1e10, -inf, inf, 0.0, nan],), [0, 1, 0, 1, 0.5, nan]),
    ("relu", ([-inf, inf, -1.0, 2.0, nan],), [0, inf, 0, 2, nan]),
    ("gelu", ([-1e4, 1e4, 0.0, nan],), [0, 1e4, 0, nan]),
    ("gelu_tanh", ([-1e4, 1e4, 0.0, nan],), [0, 1e4, 0, nan]),
    ("maximum", ([nan, 1.0, inf, -inf], [1.0, nan, 2.0, -1.0]), [nan, nan, inf, -1]),
    ("minimum", ([nan, 1.0, inf, -inf], [1.0, nan, 2.0, -1.0]), [nan, nan, 2, -inf]),
    ("divide", ([1.0, -1.0, 0.0, 1.0], [0.0, 0.0, 0.0, inf]), [inf, -inf, nan, 0]),
    (
        "power",
        (
            [-2.0, -2.0, 0.0, 0.0, -8.0, 2.0, inf, nan, 1.0],
            [3.0, 2.0, 0.0, -1.0, 0.5, inf, 0.0, 0.0, nan],
        ),
        [-8, 4, 1, inf, nan, inf, 1, 1, 1],
    ),
]

COMPARISONS = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}

REDUCTIONS = {
    "sum": (np.sum, FLOATS + INTEGERS),
    "sumsq": (lambda x, axis: np.sum(x * x, axis=axis), FLOATS),
    "max": (np.max, FLOATS + INTEGERS),
    "min": (np.min, FLOATS + INTEGERS),
    "argmax": (np.argmax, FLOATS + INTEGERS),
    "argmin": (np.argmin, FLOATS + INTEGERS),
}
REDUCED_SHAPES = [  # shape, how many of the last axes
    ((1,), 1),
    ((31,), 1),
    ((257,), 1),
    ((100_003,), 1),
    ((31, 257), 1),
    ((257, 31), 1),
    ((257, 3), 2),
    ((5, 7, 31), 2),
    ((2, 3, 4, 5), 1),
    ((2, 3, 4, 5), 3),
    ((2, 3, 4, 5), 4),
    ((0, 5), 1),
    ((3, 0, 5), 1),
]

# ---- structured ops ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    inputs: Callable[[np.random.Generator], dict]  # operand name -> float64 array, number or None
    reference: Callable[..., dict]  # (r, **inputs) -> name of each OUT and IO operand -> array
    terms: float = 1  # how many terms one element sums

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def matmul(r, a, b):
    return {"c": r(a @ b)}


def matmul_acc(r, a, b, c):
    return {"c": c + a @ b}


def linear_fwd(r, x, w, b):
    y = r(x @ w)
    return {"y": y if b is None else r(y + b)}


def bias_bwd(r, dy, db):
    return {"db": db + dy.sum(0)}


def layernorm_fwd(r, x, w, b, eps):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
    y = r(r(r(r(x - mean) * rstd) * w) + b)
    return {"y": y, "mean": mean[..., 0], "rstd": rstd[..., 0]}


def layernorm_bwd(r, dy, x, w, mean, rstd, dw, db):
    xhat = r(r(x - mean[:, None]) * rstd[:, None])
    g = r(dy * w)
    inner = r(g - g.mean(-1, keepdims=True) - r(xhat * (g * xhat).mean(-1, keepdims=True)))
    return {
        "dw": dw + (dy * (x - mean[:, None]) * rstd[:, None]).sum(0),
        "db": db + dy.sum(0),
        "dx": r(inner * rstd[:, None]),
    }


def rotary(r, x, cos, sin, parts, sign):
    """x (B, T, H, P, D), cos and sin (T, R): pairs (i, i + R) of the first 2 R are rotated."""
    y = x.copy()
    half = cos.shape[1]
    c, s = cos[None, :, None, None, :], sign * sin[None, :, None, None, :]
    first, second = x[..., :parts, :half], x[..., :parts, half : 2 * half]
    y[..., :parts, :half] = r(r(first * c) - r(second * s))
    y[..., :parts, half : 2 * half] = r(r(second * c) + r(first * s))
    return {"y": y}


def visible(t: int, s: int, causal) -> np.ndarray:
    """(T, S): which keys a query sees."""
    see = np.ones((t, s), bool)
    return np.tril(see, s - t) if causal else see


def attention_scores(r, q, k, scale, see):
    scores = r(scale * r(np.einsum("bthd,bshd->bhts", q, k)))
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
    o = r(np.einsum("bhts,bshd->bthd", p, v))
    return {"o": o, "lse": lse[..., 0]}


def softmax_attention_bwd(r, dout, q, k, v, o, lse, scale, see):
    scores = attention_scores(r, q, k, scale, see)
    with np.errstate(all="ignore"):
        p = r(np.where(np.isfinite(scores), np.exp(scores - lse[..., None]), 0))
    dp = r(np.einsum("bthd,bshd->bhts", dout, v))
    delta = r((dout * o).sum(-1)).transpose(0, 2, 1)[..., None]
    ds = r(p * r(dp - delta))
    return {
        "dq": r(scale * np.einsum("bhts,bshd->bthd", ds, k)),
        "dk": r(scale * np.einsum("bhts,bthd->bshd", ds, q)),
        "dv": r(np.einsum("bhts,bthd->bshd", p, dout)),
    }


def attention_fwd(r, q, k, v, scale, causal):
    return softmax_attention(r, q, k, v, scale, visible(q.shape[1], k.shape[1], causal))


def attention_bwd(r, dout, q, k, v, o, lse, scale, causal, dq, dk, dv):
    see = visible(q.shape[1], k.shape[1], causal)
    return softmax_attention_bwd(r, dout, q, k, v, o, lse, scale, see)


def block_lists(blocks: np.ndarray) -> dict:
    """Blocks (G, query blocks, key blocks) of bool as the lists of ops.def, and transposed."""

    def lists(of):
        offsets = np.zeros((of.shape[0], of.shape[1] + 1), np.int64)
        entries, start = [], 0
        for g in range(of.shape[0]):
            offsets[g, 0] = start
            for i in range(of.shape[1]):
                found = np.flatnonzero(of[g, i])
                entries.extend(found)
                start += len(found)
                offsets[g, i + 1] = start
        return offsets, np.array(entries, np.int64)

    offsets, columns = lists(blocks)
    offsets_t, rows = lists(blocks.transpose(0, 2, 1))
    return {"offsets": offsets, "columns": columns, "offsets_t": offsets_t, "rows": rows}


def see_blocks(t, s, offsets, columns, block, causal) -> np.ndarray:
    see = np.zeros((offsets.shape[0], t, s), bool)
    for g in range(offsets.shape[0]):
        for i in range(offsets.shape[1] - 1):
            for j in columns[offsets[g, i] : offsets[g, i + 1]]:
                see[g, i * block : (i + 1) * block, j * block : (j + 1) * block] = True
    return (see & visible(t, s, causal))[None]


def block_sparse_attention_fwd(r, q, k, v, offsets, columns, block, scale, causal):
    see = see_blocks(q.shape[1], k.shape[1], offsets, columns, block, causal)
    return softmax_attention(r, q, k, v, scale, see)


def block_sparse_attention_bwd(
    r, dout, q, k, v, o, lse, offsets, columns, offsets_t, rows, block, scale, causal, dq, dk, dv
):
    see = see_blocks(q.shape[1], k.shape[1], offsets, columns, block, causal)
    return softmax_attention_bwd(r, dout, q, k, v, o, lse, scale, see)


def decode_attention(r, qkv, cos, sin, positions, scale, keys, values):
    """qkv (B, H, 3, D), caches (B, H, S, D): row b's new token at positions[b]."""
    keys, values, o = keys.copy(), values.copy(), []
    for b, p in enumerate(positions):
        packed = qkv[b].transpose(1, 0, 2)[None, None]  # (1, 1, 3, H, D): slices before heads
        rotated = rotary(r, packed.transpose(0, 1, 3, 2, 4), cos[[p]], sin[[p]], 2, 1.0)["y"]
        q, k, v = (rotated[:, :, :, i] for i in range(3))  # (1, 1, H, D) each
        keys[b, :, p], values[b, :, p] = k[0, 0], v[0, 0]
        seen = (c[b : b + 1, :, : p + 1].transpose(0, 2, 1, 3) for c in (keys, values))
        o.append(softmax_attention(r, q, *seen, scale, True)["o"][0, 0])
    return {"keys": keys, "values": values, "o": np.array(o).reshape(len(positions), *q_shape(qkv))}


def q_shape(qkv):
    return qkv.shape[1], qkv.shape[3]


def decode_greedy(r, logits, tokens, positions):
    return {"tokens": logits.argmax(-1), "positions": positions + 1}


def embedding_fwd(r, ids, w):
    return {"y": w[ids]}


def embedding_bwd(r, ids, dy, dw):
    dw = dw.copy()
    np.add.at(dw, ids, dy)
    return {"dw": dw}


def cross_entropy_fwd(r, logits, targets):
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    valid = targets >= 0
    picked = logits[np.arange(len(targets)), np.where(valid, targets, 0)]
    losses = np.where(valid, lse - picked, 0)
    count = float(valid.sum())
    return {
        "losses": losses,
        "lse": lse,
        "loss": np.float64(losses.sum() / max(count, 1)),
        "count": np.float64(count),
    }


def cross_entropy_bwd(r, logits, targets, lse, count, dloss):
    valid = targets >= 0
    p = r(np.exp(logits - lse[:, None]))
    p[np.arange(len(targets)), np.where(valid, targets, 0)] -= valid
    return {"dlogits": r(r(p) * np.where(valid, dloss / max(count, 1), 0)[:, None])}


def grad_norm(r, g, max_norm):
    norm = np.sqrt((g * g).sum())
    scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    return {"norm": norm, "scale": np.float64(scale)}


def adamw(r, p, g, m, v, p_low, scale, lr, beta1, beta2, eps, weight_decay, step):
    g = r(g * (1.0 if scale is None else scale))
    m = r(r(beta1 * m) + r((1 - beta1) * g))
    v = r(r(beta2 * v) + r((1 - beta2) * r(g * g)))
    update = r(r(m / (1 - beta1**step)) / r(np.sqrt(v / (1 - beta2**step)) + eps))
    p = r(p - r(lr * r(update + r(weight_decay * p))))
    return {"p": p, "m": m, "v": v, "p_low": p}


def normal(*shape, mean=0.0, std=1.0):
    return lambda rng: rng.standard_normal(shape) * std + mean


def draw(**made):
    """inputs from makers: what is callable gets the generator, what is not is taken as it is."""

    def inputs(rng):
        return {k: f(rng) if callable(f) else f for k, f in made.items()}

    return inputs


def layernorm_bwd_inputs(n, c):
    def inputs(rng):
        x = rng.standard_normal((n, c)) * 2 + 1
        return {
            "dy": rng.standard_normal((n, c)),
            "x": x,
            "w": 1 + 0.3 * rng.standard_normal(c),
            "mean": x.mean(-1),
            "rstd": 1 / np.sqrt(x.var(-1) + 1e-5),
            "dw": rng.standard_normal(c),
            "db": rng.standard_normal(c),
        }

    return inputs


def rotary_inputs(b, t, h, p, d, half, parts, sign):
    def inputs(rng):
        angle = np.arange(t)[:, None] / 100.0 ** (np.arange(half) / max(half, 1))
        x = rng.standard_normal((b, t, h, p, d))
        return {"x": x, "cos": np.cos(angle), "sin": np.sin(angle), "parts": parts, "sign": sign}

    return inputs


def decode_inputs(b, h, d, s, half, positions, scale=None):
    def inputs(rng):
        angle = np.arange(s)[:, None] / 100.0 ** (np.arange(half) / max(half, 1))
        return {
            "qkv": rng.standard_normal((b, h, 3, d)),
            "cos": np.cos(angle),
            "sin": np.sin(angle),
            "positions": np.resize(positions, b).astype(np.int64),
            "scale": 1 / math.sqrt(d) if scale is None else scale,
            "keys": rng.standard_normal((b, h, s, d)),
            "values": rng.standard_normal((b, h, s, d)),
        }

    return inputs


def logits_inputs(b, v):
    def inputs(rng):
        return {
            "logits": rng.permuted(np.tile(np.arange(v) % 200 - 100.0, (b, 1)), axis=1),
            "tokens": np.zeros(b, np.int64),
            "positions": np.arange(b),
        }

    return inputs


def attention_inputs(b, t, s, h, d, causal, scale=None, blocks=None, block=None, backward=False):
    """blocks: (G, query blocks, key blocks) of bool for the block-sparse ops."""

    def inputs(rng):
        of = {"q": (b, t, h, d), "k": (b, s, h, d), "v": (b, s, h, d)}
        made = {name: rng.standard_normal(shape) for name, shape in of.items()}
        last = {"scale": d**-0.5 if scale is None else scale, "causal": int(causal)}
        lists = {} if blocks is None else block_lists(np.asarray(blocks, bool))
        if backward:
            see = visible(t, s, causal)
            if lists:
                see = see_blocks(t, s, lists["offsets"], lists["columns"], block, causal)
            made["dout"] = rng.standard_normal((b, t, h, d))
            made |= softmax_attention(
                lambda a: a, **{n: made[n] for n in of}, scale=last["scale"], see=see
            )
            # dq, dk and dv are overwritten: whatever is in them must not matter.
            made |= {"d" + n: np.full(shape, np.nan) for n, shape in of.items()}
        else:
            lists = {n: lists[n] for n in ("offsets", "columns") if n in lists}
        return made | lists | ({"block": block} if lists else {}) | last

    return inputs


def causal_blocks(n: int, keep: Callable[[int, int], bool]) -> np.ndarray:
    return np.array([[[j <= i and keep(i, j) for j in range(n)] for i in range(n)]])


LOCAL = causal_blocks(5, lambda i, j: i - j < 2)
STRIDED = causal_blocks(5, lambda i, j: i == j or j % 2 == 0)
PER_HEAD = np.concatenate([LOCAL, STRIDED, causal_blocks(5, lambda i, j: j == 0 or i == j)])
WITH_EMPTY_ROW = LOCAL & (np.arange(5) != 2)[None, :, None]  # the queries of block 2 see nothing
NOT_CAUSAL = np.array([[[1, 0, 1], [0, 1, 0], [1, 1, 1]]], bool)

ATTENTION = [  # label, B, T, S, H, D, causal
    ("one", 1, 1, 1, 1, 1, 1),
    ("odd", 2, 31, 31, 3, 16, 1),
    ("257", 1, 257, 257, 1, 8, 1),
    ("full", 1, 33, 33, 2, 12, 0),
    ("more-keys", 2, 17, 40, 1, 20, 1),
    ("cross", 1, 40, 17, 2, 8, 0),
    ("fewer-keys", 2, 40, 17, 2, 8, 1),  # the first queries see nothing
    ("d64", 1, 130, 130, 2, 64, 1),
    ("d80", 1, 65, 65, 1, 80, 1),
    ("d128", 1, 70, 70, 1, 128, 1),
    ("d256", 1, 66, 66, 1, 256, 1),
    ("d1", 1, 20, 20, 2, 1, 1),
    ("d7", 1, 19, 19, 2, 7, 1),
    ("zero-batch", 0, 5, 5, 2, 8, 1),
    ("zero-queries", 1, 0, 4, 2, 8, 1),
    ("zero-keys", 2, 3, 0, 1, 4, 0),
]
SPARSE = [  # label, B, T, S, H, D, causal, blocks, block
    ("local", 2, 80, 80, 2, 16, 1, LOCAL, 16),
    ("ragged", 1, 71, 71, 1, 24, 1, STRIDED, 16),
    ("per-head", 1, 77, 77, 3, 8, 1, PER_HEAD, 16),
    ("empty-row", 1, 75, 75, 2, 8, 1, WITH_EMPTY_ROW, 16),
    ("full", 1, 47, 47, 1, 64, 0, NOT_CAUSAL, 16),
    ("block-64", 1, 300, 300, 1, 64, 1, LOCAL, 64),
    ("block-1", 1, 5, 5, 1, 8, 1, STRIDED, 1),
    ("d128", 1, 150, 150, 1, 128, 1, STRIDED, 32),
    ("block-7", 1, 33, 33, 2, 5, 1, LOCAL, 7),
    ("zero-batch", 0, 80, 80, 1, 8, 1, LOCAL, 16),
]


def optimizer_inputs(n, low=True, scale=None, step=3):
    return draw(
        p=normal(n),
        g=normal(n),
        m=normal(n, std=0.1),
        v=lambda rng: rng.random(n) * 0.1 + 1e-3,
        p_low=normal(n) if low else None,
        scale=None if scale is None else np.float64(scale),
        lr=1e-2,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=step,
    )


def targets(n, v, ignored=()):
    def make(rng):
        t = rng.integers(0, v, n)
        t[list(ignored)] = -100
        return t

    return make


def losses_inputs(n, v, ignored=(), std=3.0, backward=False):
    def inputs(rng):
        made = {"logits": rng.standard_normal((n, v)) * std, "targets": targets(n, v, ignored)(rng)}
        if backward:
            forward = cross_entropy_fwd(None, **made)
            made |= {"lse": forward["lse"], "count": forward["count"], "dloss": np.float64(1.7)}
        return made

    return inputs


CASES = [
    *(
        Case(
            "matmul",
            "x".join(map(str, (b, m, k, n))),
            draw(a=normal(b, m, k), b=normal(b, k, n)),
            matmul,
            k,
        )
        for b, m, k, n in [
            (1, 1, 1, 1),
            (1, 31, 257, 31),
            (2, 257, 31, 1),
            (3, 1, 257, 65),
            (1, 64, 64, 64),
            (2, 5, 0, 3),
            (0, 4, 5, 6),
            (2, 0, 3, 4),
            (1, 130, 300, 257),
        ]
    ),
    *(
        Case(
            "matmul_acc",
            "x".join(map(str, (b, m, k, n))),
            draw(a=normal(b, m, k), b=normal(b, k, n), c=normal(b, m, n)),
            matmul_acc,
            k,
        )
        for b, m, k, n in [
            (1, 1, 1, 1),
            (1, 31, 257, 17),
            (2, 31, 31, 257),
            (1, 5, 0, 3),
            (0, 2, 3, 4),
        ]
    ),
    *(
        Case(
            "linear_fwd",
            f"{n}x{k}x{m}" + ("" if bias else "-no-bias"),
            draw(x=normal(n, k), w=normal(k, m), b=normal(m) if bias else None),
            linear_fwd,
            k,
        )
        for n, k, m, bias in [
            (1, 1, 1, True),
            (31, 257, 31, True),
            (257, 31, 96, False),
            (65, 64, 1, True),
            (0, 3, 4, True),
            (5, 0, 4, True),
        ]
    ),
    *(
        Case("bias_bwd", f"{n}x{m}", draw(dy=normal(n, m, mean=0.5), db=normal(m)), bias_bwd, n)
        for n, m in [(1, 1), (31, 257), (257, 31), (1000, 3), (0, 4), (4, 0)]
    ),
    *(
        Case(
            "layernorm_fwd",
            f"{n}x{c}",
            draw(x=normal(n, c, mean=1, std=2), w=normal(c, mean=1), b=normal(c), eps=1e-5),
            layernorm_fwd,
            c,
        )
        for n, c in [(1, 1), (31, 257), (257, 31), (3, 1024), (5, 4100), (0, 8)]
    ),
    # Far from zero, where E[x^2] - E[x]^2 has no digits left.
    Case(
        "layernorm_fwd",
        "far",
        draw(x=normal(7, 300, mean=64, std=0.5), w=normal(300), b=normal(300), eps=1e-5),
        layernorm_fwd,
        300 * 64**2,
    ),
    *(
        Case("layernorm_bwd", f"{n}x{c}", layernorm_bwd_inputs(n, c), layernorm_bwd, max(n, c))
        for n, c in [(1, 3), (31, 257), (257, 31), (3, 1024), (300, 5), (0, 8)]
    ),
    *(
        Case("rotary", f"{label}", rotary_inputs(*shape), rotary)
        for label, shape in {
            "qkv": (2, 31, 3, 3, 16, 2, 2, 1.0),
            "backward": (2, 31, 3, 3, 16, 2, 2, -1.0),
            "whole-head": (1, 5, 1, 1, 8, 4, 1, 1.0),
            "all-parts": (1, 7, 2, 3, 20, 5, 3, 1.0),
            "no-part": (1, 3, 2, 3, 8, 2, 0, 1.0),
            "257": (1, 257, 1, 2, 6, 1, 1, -1.0),
            "pythia": (1, 9, 2, 3, 64, 8, 2, 1.0),
            "zero-size": (2, 0, 3, 3, 16, 2, 2, 1.0),
        }.items()
    ),
    *(
        Case(
            "attention_fwd", label, attention_inputs(*shape), attention_fwd, max(shape[4], shape[2])
        )
        for label, *shape in ATTENTION
    ),
    *(
        Case(
            "attention_bwd",
            label,
            attention_inputs(*shape, backward=True),
            attention_bwd,
            4 * max(shape[4], shape[2]),
        )
        for label, *shape in ATTENTION
    ),
    Case(
        "attention_fwd",
        "large-scores",
        attention_inputs(1, 40, 40, 1, 16, 1, scale=30.0),
        attention_fwd,
        10**4,
    ),
    *(
        Case(
            "block_sparse_attention_fwd",
            label,
            attention_inputs(*shape, blocks=blocks, block=block),
            block_sparse_attention_fwd,
            max(shape[4], shape[2]),
        )
        for label, *shape, blocks, block in SPARSE
    ),
    *(
        Case(
            "block_sparse_attention_bwd",
            label,
            attention_inputs(*shape, blocks=blocks, block=block, backward=True),
            block_sparse_attention_bwd,
            4 * max(shape[4], shape[2]),
        )
        for label, *shape, blocks, block in SPARSE
    ),
    *(
        Case("decode_attention", label, decode_inputs(*shape), decode_attention, max(shape[2:4]))
        for label, shape in {
            "odd": (3, 2, 16, 37, 4, [36, 0, 20]),
            "one": (1, 1, 1, 1, 0, [0]),
            "odd-dims": (2, 3, 20, 70, 5, [69, 31]),
            "pythia": (2, 2, 64, 300, 8, [299, 128]),
            "80": (2, 1, 80, 130, 10, [64, 129]),
            "96-whole-head": (1, 2, 96, 40, 48, [33]),
            "256": (2, 1, 256, 70, 32, [69, 1]),
            "255": (1, 1, 255, 70, 1, [69]),
            "shares": (2, 2, 64, 1300, 8, [1299, 3]),
            "shares-of-nothing": (1, 1, 8, 2100, 2, [0]),
            "no-head": (2, 0, 16, 8, 4, [0]),
            "none": (0, 2, 16, 8, 4, [0]),
        }.items()
    ),
    Case(
        "decode_attention",
        "large-scores",
        decode_inputs(2, 1, 16, 90, 4, [89, 40], scale=30.0),
        decode_attention,
        10**4,
    ),
    *(
        Case("decode_greedy", f"{b}x{v}", logits_inputs(b, v), decode_greedy)
        for b, v in [(31, 257), (1, 1), (3, 50304), (2, 1024), (5, 31), (0, 7)]
    ),
    *(
        Case(
            "embedding_fwd", f"{n}x{v}x{c}", draw(ids=targets(n, v), w=normal(v, c)), embedding_fwd
        )
        for n, v, c in [(1, 1, 1), (31, 257, 31), (257, 31, 257), (0, 5, 4)]
    ),
    *(
        Case(
            "embedding_bwd",
            f"{n}x{v}x{c}",
            draw(ids=targets(n, v), dy=normal(n, c), dw=normal(v, c)),
            embedding_bwd,
            max(1, n / v),
        )
        for n, v, c in [(1, 1, 1), (31, 257, 31), (257, 31, 257), (1000, 2, 3), (0, 5, 4)]
    ),
    *(
        Case("cross_entropy_fwd", label, losses_inputs(*arguments), cross_entropy_fwd, arguments[1])
        for label, arguments in {
            "one": (1, 1),
            "31x257": (31, 257),
            "257x31": (257, 31),
            "ignored": (31, 50, (0, 3, 30)),
            "all-ignored": (3, 5, (0, 1, 2)),
            "vocabulary": (3, 50304),
            "large": (9, 33, (), 1e3),
            "none": (0, 7),
        }.items()
    ),
    *(
        Case(
            "cross_entropy_bwd",
            label,
            losses_inputs(*arguments, backward=True),
            cross_entropy_bwd,
            arguments[1],
        )
        for label, arguments in {
            "one": (1, 1),
            "31x257": (31, 257),
            "257x31": (257, 31),
            "ignored": (31, 50, (0, 3, 30)),
            "all-ignored": (3, 5, (0, 1, 2)),
            "vocabulary": (3, 50304),
            "none": (0, 7),
        }.items()
    ),
    *(
        Case("grad_norm", f"{n}-max-{limit:g}", draw(g=normal(n), max_norm=limit), grad_norm, n)
        for n, limit in [(1, 1.0), (31, 100.0), (257, 1.0), (100_003, 1.0), (257, 0.0), (0, 1.0)]
    ),
    Case("adamw", "1", optimizer_inputs(1), adamw),
    Case("adamw", "31-scaled", optimizer_inputs(31, scale=0.25), adamw),
    Case("adamw", "257-first-step", optimizer_inputs(257, step=1), adamw),
    Case("adamw", "257-no-low", optimizer_inputs(257, low=False, step=10_000), adamw),
    Case("adamw", "0", optimizer_inputs(0), adamw),
]


# ---- bad inputs ----------------------------------------------------------------------------------
# What every structured op must refuse (an axis that differs, a missing axis, a wrong dtype, no
# array at all) is made from the table itself in test_bad_inputs.py. Here is what only the operation
# knows: op, label, the changes to the first case's inputs, exception, what the message says.


def long_ids(n, bad):
    ids = np.zeros(n, np.int64)
    ids[n // 2] = bad
    return ids


BAD = [
    (
        "matmul",
        "inner sizes",
        {"a": np.ones((1, 2, 3)), "b": np.ones((1, 4, 5))},
        ValueError,
        r"matmul: b: axis K",
    ),
    (
        "rotary",
        "rotates more than D",
        {"x": np.ones((1, 3, 1, 3, 4)), "cos": np.ones((3, 3)), "sin": np.ones((3, 3))},
        ValueError,
        r"rotary: cos",
    ),
    ("rotary", "more parts than P", {"parts": 4}, ValueError, r"rotary: parts"),
    ("rotary", "negative parts", {"parts": -1}, ValueError, r"rotary: parts"),
    (
        "attention_fwd",
        "head dim 257",
        {n: np.ones((1, 2, 1, 257)) for n in "qkv"},
        ValueError,
        r"attention_fwd: .*256",
    ),
    (
        "block_sparse_attention_fwd",
        "block 0",
        {"block": 0},
        ValueError,
        r"block_sparse_attention_fwd: block",
    ),
    (
        "block_sparse_attention_fwd",
        "too few query blocks",
        {"offsets": np.zeros((1, 2))},
        ValueError,
        r"block_sparse_attention_fwd: offsets",
    ),
    (
        "block_sparse_attention_fwd",
        "two masks for three heads",
        {
            "q": np.ones((1, 80, 3, 4)),
            "k": np.ones((1, 80, 3, 4)),
            "v": np.ones((1, 80, 3, 4)),
            "offsets": np.zeros((2, 6)),
        },
        ValueError,
        r"block_sparse_attention_fwd: offsets",
    ),
    (
        "decode_attention",
        "two slices",
        {"qkv": np.ones((3, 2, 2, 16))},
        ValueError,
        r"decode_attention: qkv: axis P",
    ),
    (
        "decode_attention",
        "head dim 257",
        {
            "qkv": np.ones((3, 2, 3, 257)),
            "keys": np.ones((3, 2, 37, 257)),
            "values": np.ones((3, 2, 37, 257)),
        },
        ValueError,
        r"decode_attention: .*256",
    ),
    (
        "decode_attention",
        "rotates more than D",
        {n: np.ones((37, 9)) for n in ("cos", "sin")},
        ValueError,
        r"decode_attention: cos",
    ),
    ("decode_greedy", "no tokens", {"logits": np.ones((31, 0))}, ValueError, r"decode_greedy: log"),
    ("adamw", "step 0", {"step": 0}, ValueError, r"adamw: step"),
]
# Values that the CPU looks at; CUDA, where nobody can look without waiting, gives NaN instead.
BAD_VALUES = [
    (
        "decode_attention",
        "position S",
        {"positions": np.array([1, 37, 2])},
        r"decode_attention: positions: row 1 is at 37",
    ),
    (
        "decode_attention",
        "position -1",
        {"positions": np.array([-1, 1, 2])},
        r"decode_attention: positions: row 0 is at -1",
    ),
    ("embedding_fwd", "id -1", {"ids": long_ids(31, -1)}, r"embedding_fwd: ids: .*-1"),
    ("embedding_fwd", "id V", {"ids": long_ids(31, 257)}, r"embedding_fwd: ids: .*257"),
    ("embedding_bwd", "id V", {"ids": long_ids(31, 257)}, r"embedding_bwd: ids: .*257"),
    (
        "cross_entropy_fwd",
        "target V",
        {"targets": long_ids(31, 257)},
        r"cross_entropy_fwd: targets: .*257",
    ),
    (
        "cross_entropy_bwd",
        "target V",
        {"targets": long_ids(31, 257)},
        r"cross_entropy_bwd: targets: .*257",
    ),
]
