"""Products, normalisation, embedding, order of rows, the loss and the optimizer."""

from functools import partial

import numpy as np

from needle.testing.case import cases_of, draw, normal, targets
from needle.testing.elementwise import gelu, gelu_grad, gelu_tanh, gelu_tanh_grad


def matmul(r, a, b, scale):
    return {"c": r(a @ b * (1.0 if scale is None else scale))}


def matmul_acc(r, a, b, scale, add, c):
    return {"c": (c if add else 0) + a @ b * (1.0 if scale is None else scale)}


def linear_fwd(rounded, x, w, b, r):
    y = rounded(x @ w)
    y = y if b is None else rounded(y + b)
    return {"y": y if r is None else rounded(r + y)}


def decode_output(rounded, x, w, b, r):
    return linear_fwd(rounded, x, w, b, r)


def bias_bwd(r, dy, db, db2):
    sums = dy.sum(0)
    return {"db": db + sums} | ({} if db2 is None else {"db2": db2 + sums})


def linear_gelu_fwd(r, x, w, b, tanh, y):
    pre = r(r(x @ w) + b)
    f, df = (gelu_tanh, gelu_tanh_grad) if tanh else (gelu, gelu_grad)
    return {"dgelu": r(df(pre)), "y": r(f(pre))}


def linear_gelu_bwd(r, dy, w, dgelu, db):
    dpre = r(r(dy @ w.T) * dgelu)
    return {"dpre": dpre, "db": db + dpre.sum(0)}


def layernorm_fwd(r, x, w, b, eps):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
    y = r(r(r(r(x - mean) * rstd) * w) + b)
    return {"y": y, "mean": mean[..., 0], "rstd": rstd[..., 0]}


def layernorm_bwd(r, dy, x, w, mean, rstd, dres, dw, db):
    xhat = r(r(x - mean[:, None]) * rstd[:, None])
    g = r(dy * w)
    inner = r(g - g.mean(-1, keepdims=True) - r(xhat * (g * xhat).mean(-1, keepdims=True)))
    dx = r(inner * rstd[:, None])
    return {
        "dw": dw + (dy * (x - mean[:, None]) * rstd[:, None]).sum(0),
        "db": db + dy.sum(0),
        "dx": dx if dres is None else r(dres + dx),
    }


def layernorm_pair_fwd(r, x, norm_w1, norm_b1, norm_w2, norm_b2, eps):
    one = layernorm_fwd(r, x, norm_w1, norm_b1, eps)
    other = layernorm_fwd(r, x, norm_w2, norm_b2, eps)
    return {"y1": one["y"], "y2": other["y"], "mean": one["mean"], "rstd": one["rstd"]}


def decode_projections(
    r, x, norm_w1, norm_b1, norm_w2, norm_b2, eps, w_qkv, b_qkv, w1, b1, tanh, g
):
    of = layernorm_pair_fwd(r, x, norm_w1, norm_b1, norm_w2, norm_b2, eps)
    packed = linear_fwd(r, of["y1"], w_qkv, b_qkv, None)["y"]
    return {"packed": packed, "g": linear_gelu_fwd(r, of["y2"], w1, b1, tanh, g)["y"]}


def layernorm_pair_bwd(
    r, dy1, dy2, x, norm_w1, norm_w2, mean, rstd, dres, dnorm_w1, dnorm_b1, dnorm_w2, dnorm_b2
):
    one = layernorm_bwd(r, dy1, x, norm_w1, mean, rstd, dres, dnorm_w1, dnorm_b1)
    other = layernorm_bwd(r, dy2, x, norm_w2, mean, rstd, one["dx"], dnorm_w2, dnorm_b2)
    sums = {"dnorm_w1": one["dw"], "dnorm_b1": one["db"], "dx": other["dx"]}
    return sums | {"dnorm_w2": other["dw"], "dnorm_b2": other["db"]}


def embedding_fwd(r, ids, w):
    return {"y": w[ids]}


def embedding_bwd(r, ids, dy, dw):
    dw = dw.copy()
    np.add.at(dw, ids, dy)
    return {"dw": dw}


def sort(r, x, descending, values, indices):
    backwards = -1 if descending else 1  # of the reversed row, so that equal ones keep their order
    order = np.argsort(x[:, ::backwards], axis=1, kind="stable")[:, ::backwards]
    order = (x.shape[1] - 1 - order if descending else order)[:, : values.shape[1]]
    return {"values": np.take_along_axis(x, order, 1), "indices": order}


def take(r, x, ids):
    wide = (*x.shape[:2], ids.shape[2], *x.shape[3:])
    return {"y": np.take_along_axis(x, np.broadcast_to(ids, wide), 2)}


def put(r, y, ids, x):
    x = x.copy()
    np.put_along_axis(x, ids, y, 2)
    return {"x": x}


def places(rng, shape, count):
    """Different places along the middle axis of an array of `shape`, some counted from its end."""
    n = shape[2]
    ids = np.broadcast_to(np.arange(n)[:, None, None], shape)
    ids = rng.permuted(ids, axis=2)[:, :, :count]
    return np.where(rng.random(ids.shape) < 0.3, ids - n, ids)


def cumsum(r, x):
    return {"x": np.cumsum(x, 1).astype(x.dtype)}


def cross_entropy_fwd(r, logits, targets):
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    valid = targets >= 0
    picked = logits[np.arange(len(targets)), np.where(valid, targets, 0)]
    losses = np.where(valid, lse - picked, 0)
    return {"losses": losses, "loss": np.float64(losses.sum() / max(valid.sum(), 1))}


def cross_entropy_fwd_bwd(r, logits, targets):
    valid = targets >= 0
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = r(p / p.sum(-1, keepdims=True))
    p[np.arange(len(targets)), np.where(valid, targets, 0)] -= valid
    return cross_entropy_fwd(r, logits, targets) | {
        "logits": r(np.where(valid[:, None], p, 0)),
        "share": np.float64(1 / valid.sum() if valid.any() else 0),
    }


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


def layernorm_bwd_inputs(n, c, residual=True, norms=("",)):
    norm = norms[0] and "norm_"  # begins the names of weights and biases

    def inputs(rng):
        x = rng.standard_normal((n, c)) * 2 + 1
        return {
            **{f"dy{i}": rng.standard_normal((n, c)) for i in norms},
            "x": x,
            **{f"{norm}w{i}": 1 + 0.3 * rng.standard_normal(c) for i in norms},
            "mean": x.mean(-1),
            "rstd": 1 / np.sqrt(x.var(-1) + 1e-5),
            "dres": rng.standard_normal((n, c)) if residual else None,
            **{f"d{norm}{p}{i}": rng.standard_normal(c) for i in norms for p in "wb"},
        }

    return inputs


def linear_inputs(n, k, m, b=True, r=False):
    b, r = normal(m) if b else None, normal(n, m) if r else None
    return draw(x=normal(n, k), w=normal(k, m), b=b, r=r)


def bias_inputs(n, m, two=False):
    return draw(dy=normal(n, m, mean=0.5), db=normal(m), db2=normal(m) if two else None)


def linear_gelu_inputs(n, k, m, tanh):
    """y is overwritten."""
    x, y = normal(n, k, std=(k or 1) ** -0.5), np.full((n, m), np.nan)
    return draw(x=x, w=normal(k, m), b=normal(m), tanh=tanh, y=y)


def linear_gelu_grad_inputs(n, m, k, *more):
    return draw(dy=normal(n, m), w=normal(k, m), dgelu=normal(n, k), db=normal(k))


def embedding_grad_inputs(n, v, c):
    return draw(ids=targets(n, v), dy=normal(n, c), dw=normal(v, c))


def norm_inputs(n, limit):
    return draw(g=normal(n), max_norm=limit)


# How many terms an element sums, by a case's sizes.
def first_size(n, *more):
    return n


def second_size(n, k, *more):
    return k


def larger_size(n, m, *more):
    return max(n, m)


def optimizer_inputs(n, low=True, scale=None, step=3, eps=1e-8):
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
        eps=eps,
        weight_decay=0.1,
        step=step,
    )


def losses_inputs(n, v, ignored=(), std=3.0):
    def inputs(rng):
        logits = rng.standard_normal((n, v)) * std
        return {"logits": logits, "targets": targets(n, v, ignored)(rng)}

    return inputs


# Of the backward on CUDA: rows of 32, 64, 96 and 512 threads, and of some that have nothing to do;
# more rows than the blocks take at once, twice and more.
NORMS = [(1, 3), (31, 257), (257, 31), (3, 1024), (300, 5), (0, 8)]
NORMS += [(7000, 8), (1100, 264), (9, 776), (5, 4096)]

ROWS = [(1, 1), (31, 257), (257, 31), (3, 1024), (5, 4100), (0, 8)]  # of a norm forward
BACKWARD = {f"{n}x{c}": (n, c) for n, c in NORMS}
BACKWARD |= {f"{n}x{c}-alone": (n, c, False) for n, c in NORMS[1:4]}

LOSSES = {
    "one": (1, 1),
    "31x257": (31, 257),
    "257x31": (257, 31),
    "ignored": (31, 50, (0, 3, 30)),
    "all-ignored": (3, 5, (0, 1, 2)),
    "vocabulary": (3, 50304),
    "none": (0, 7),
}

# Rows, inner size, columns, form: odd, and as an own kernel takes them, in tiles of 128 x 128 x 64.
MLPS = {
    f"{n}x{k}x{m}-{'tanh' if tanh else 'erf'}": (n, k, m, tanh)
    for n, k, m, tanh in [
        (1, 1, 1, 0),
        (31, 257, 31, 1),
        (65, 64, 1, 0),
        (1, 8, 8, 1),
        (2, 2056, 136, 0),
        (7, 264, 520, 1),
        (300, 72, 264, 0),
        (260, 520, 136, 1),
        (700, 1032, 264, 0),
        (260, 512, 392, 1),
        (40, 24, 700, 0),  # wider than a tile of the CPU's products
        (0, 8, 16, 1),
        (5, 0, 8, 0),
        (5, 8, 0, 1),
    ]
}

FEW = [(1, 8, 8), (2, 2056, 520), (3, 1032, 72), (7, 264, 2056)]  # rows of a step of generation

TAKEN = {  # ids along the picked axis, and the five axes of x
    "1": (1, 1, 1, 1, 1, 1),
    "each": (7, 2, 3, 31, 4, 5),
    "rows": (31, 1, 257, 100, 1, 1),
    "columns": (5, 1, 1, 31, 1, 257),
    "pairs": (64, 1, 31, 640, 1, 1),
    "words": (40, 1, 1, 100, 1, 256),
    "long": (33_001, 1, 2, 70_003, 1, 1),
    "wide": (2, 1, 1, 3, 1, 40_009),
    "none": (0, 1, 2, 3, 1, 1),
    "no-rows": (3, 0, 2, 5, 1, 1),
}

CASES = [
    *cases_of(
        matmul,
        lambda b, m, k, n, scale=None: draw(a=normal(b, m, k), b=normal(b, k, n), scale=scale),
        [
            (1, 1, 1, 1),
            (1, 31, 257, 31),
            (2, 257, 31, 1),
            (3, 1, 257, 65),
            (1, 64, 64, 64),
            (2, 5, 0, 3),
            (0, 4, 5, 6),
            (2, 0, 3, 4),
            (1, 130, 300, 257),
            (1, 33, 1100, 40),
            (1, 130, 300, 257, np.float64(0.3)),
            (3, 31, 1100, 40, np.float64(-2.5)),
            (2, 5, 0, 3, np.float64(2.0)),
        ],
        lambda b, m, k, n, *scale: k,
    ),
    *cases_of(
        matmul_acc,
        lambda b, m, k, n, scale=None, add=1: draw(
            a=normal(b, m, k),
            b=normal(b, k, n),
            scale=scale,
            add=add,
            # written without being read: a NaN would stay
            c=normal(b, m, n) if add else np.full((b, m, n), np.nan),
        ),
        {
            "x".join(map(str, shape[:4])) + "".join(f"-{x}" for x in shape[4:]): shape
            for shape in [
                (1, 1, 1, 1),
                (1, 31, 257, 17),
                (2, 31, 31, 257),
                (1, 5, 0, 3),
                (0, 2, 3, 4),
                (1, 31, 257, 17, None, 0),
                (2, 31, 31, 257, np.float64(-0.75), 0),
                (1, 130, 600, 65, np.float64(0.3), 1),
                (1, 5, 0, 3, np.float64(2.0), 0),
            ]
        },
        lambda b, m, k, n, *more: k,
    ),
    *cases_of(
        linear_fwd,
        linear_inputs,
        [(1, 1, 1), (31, 257, 31), (65, 64, 1), (0, 3, 4), (5, 0, 4), *FEW],
        second_size,
    ),
    *cases_of(
        linear_fwd,
        linear_inputs,
        {"257x31x1100-no-bias": (257, 31, 1100, 0), "2x72x34008-no-bias": (2, 72, 34_008, 0)},
        second_size,
    ),
    *cases_of(
        linear_fwd,
        linear_inputs,
        {
            f"{n}x{k}x{m}-residual{'' if b else '-no-bias'}": (n, k, m, b, 1)
            for n, k, m in [(1, 1, 1), (31, 257, 31), (64, 64, 136), (5, 0, 4), (0, 3, 4), *FEW]
            for b in (1, 0)
        },
        second_size,
    ),
    *cases_of(
        bias_bwd,
        bias_inputs,
        [(1, 1), (31, 257), (257, 31), (1000, 3), (1000, 300), (0, 4), (4, 0)],
        first_size,
    ),
    *cases_of(
        bias_bwd,
        bias_inputs,
        {"257x31-two": (257, 31, 1), "70x512-two": (70, 512, 1), "0x4-two": (0, 4, 1)},
        first_size,
    ),
    *cases_of(linear_gelu_fwd, linear_gelu_inputs, MLPS, second_size),
    *cases_of(
        linear_gelu_bwd,
        linear_gelu_grad_inputs,
        [shape[:3] for shape in MLPS.values()],
        larger_size,
        of_rounded=("db",),
    ),
    *cases_of(
        layernorm_fwd,
        lambda n, c: draw(
            x=normal(n, c, mean=1, std=2), w=normal(c, mean=1), b=normal(c), eps=1e-5
        ),
        ROWS,
        second_size,
    ),
    # Far from zero, where E[x^2] - E[x]^2 has no digits left.
    *cases_of(
        layernorm_fwd,
        lambda n, c: draw(x=normal(n, c, mean=64, std=0.5), w=normal(c), b=normal(c), eps=1e-5),
        {"far": (7, 300)},
        lambda n, c: c * 64**2,
    ),
    *cases_of(layernorm_bwd, layernorm_bwd_inputs, BACKWARD, larger_size),
    *cases_of(
        layernorm_pair_fwd,
        lambda n, c: draw(
            x=normal(n, c, mean=1, std=2),
            norm_w1=normal(c, mean=1),
            norm_b1=normal(c),
            norm_w2=normal(c, mean=1),
            norm_b2=normal(c),
            eps=1e-5,
        ),
        ROWS,
        second_size,
    ),
    *cases_of(
        decode_projections,
        lambda n, c, p, m, tanh: draw(
            x=normal(n, c, mean=1, std=2),
            norm_w1=normal(c, mean=1, std=c**-0.5),
            norm_b1=normal(c, std=c**-0.5),
            norm_w2=normal(c, std=c**-0.5),
            norm_b2=normal(c, mean=1, std=c**-0.5),
            eps=0.1,
            w_qkv=normal(c, p, std=c**-0.5),
            b_qkv=normal(p),
            w1=normal(c, m, std=c**-0.5),
            b1=normal(m),
            tanh=tanh,
            g=np.full((n, m), np.nan),  # overwritten
        ),
        {
            f"{n}x{c}x{p}-{m}-{tanh}": (n, c, p, m, tanh)
            for n, c, p, m, tanh in [
                (2, 776, 24, 40, 0),
                (1, 512, 1536, 2048, 1),
                (3, 8, 8, 304, 1),
                (4, 1024, 304, 8, 0),
                (0, 64, 8, 8, 1),
                (5, 8, 8, 304, 0),
                (8, 1024, 24, 8, 1),
                (9, 264, 72, 40, 1),
                (17, 776, 304, 8, 0),
                (32, 512, 48, 2048, 1),
            ]
        },
        second_size,
    ),
    *cases_of(
        decode_output,
        linear_inputs,
        {
            f"{n}x{k}x{m}-{b}-{r}": (n, k, m, b, r)
            for n, k, m, b, r in [
                *((n, k, m, 1, 1) for n, k, m in [(9, 31, 7), (4, 2560, 512), (0, 8, 8), *FEW]),
                (1, 72, 34_008, 1, 1),
                (3, 512, 1024, 0, 0),
                (1, 8, 264, 1, 0),
                (31, 257, 31, 0, 1),
            ]
        },
        second_size,
    ),
    *cases_of(layernorm_pair_bwd, partial(layernorm_bwd_inputs, norms="12"), BACKWARD, larger_size),
    *cases_of(
        embedding_fwd,
        lambda n, v, c: draw(ids=targets(n, v), w=normal(v, c)),
        [(1, 1, 1), (31, 257, 31), (257, 31, 257), (0, 5, 4)],
    ),
    *cases_of(
        embedding_bwd,
        embedding_grad_inputs,
        [(1, 1, 1), (31, 257, 31), (257, 31, 257), (1000, 2, 3), (0, 5, 4)],
        lambda n, v, c: max(1, n / v),
    ),
    *cases_of(
        sort,
        lambda rows, n, k, descending: draw(
            x=normal(rows, n),
            descending=descending,
            values=normal(rows, k),
            indices=lambda rng: rng.integers(0, 9, (rows, k)),
        ),
        {
            "1x1": (1, 1, 1, 0),
            "31x257": (31, 257, 100, 1),
            **{f"{n}": (3, n, n, n % 2) for n in (2, 128, 512, 1999, 4096)},
            "few-long": (3, 5001, 5001, 0),
            "long": (6, 5001, 5001, 1),
            "half": (6, 5001, 2500, 0),
            "first": (40, 5001, 7, 1),
            "parts": (2, 70_003, 100, 0),
            "many-of-parts": (1, 40_009, 5000, 1),
            "no-rows": (0, 5, 3, 0),
            "none": (5, 5, 0, 0),
        },
    ),
    *cases_of(
        take,
        lambda i, *shape: draw(
            x=normal(*shape),
            ids=lambda rng: rng.integers(-shape[2], shape[2], (*shape[:2], i, *shape[3:])),
        ),
        TAKEN | {"more": (257, 2, 3, 31, 4, 5)},
    ),
    *cases_of(
        put,
        lambda i, *shape: draw(
            y=normal(*shape[:2], i, *shape[3:]),
            ids=partial(places, shape=shape, count=i),
            x=normal(*shape),
        ),
        TAKEN,
    ),
    *cases_of(
        cumsum,
        lambda rows, n: draw(x=normal(rows, n)),
        [(1, 1), (31, 257), (3, 512), (1500, 513), (3, 5001), (2, 70_003), (0, 5), (5, 0)],
        second_size,
    ),
    *cases_of(cross_entropy_fwd, losses_inputs, LOSSES | {"large": (9, 33, (), 1e3)}, second_size),
    *cases_of(
        cross_entropy_fwd_bwd,
        losses_inputs,
        LOSSES | {"long": (3, 120_007), "wide": (5, 50_304, (1,))},
        second_size,
    ),
    *cases_of(
        grad_norm,
        norm_inputs,
        {
            f"{n}-max-{limit:g}": (n, limit)
            for n, limit in [(1, 1.0), (31, 1e2), (257, 1.0), (100_003, 1.0), (257, 0.0), (0, 1.0)]
        },
        first_size,
    ),
    *cases_of(
        adamw,
        optimizer_inputs,
        {
            "1": (1,),
            "31-scaled": (31, True, 0.25),
            "257-first-step": (257, True, None, 1),
            "257-no-low": (257, False, None, 10_000),
            "257-large-eps": (257, True, None, 2, 0.1),
            "100003": (100_003,),
            "0": (0,),
        },
    ),
]
