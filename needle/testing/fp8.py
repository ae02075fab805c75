"""FP8: numbers of a byte, quantizing, norms, weights, products, and the loss of the head."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from needle.testing.bounds import assert_near
from needle.testing.case import cases_of, draw, normal
from needle.testing.elementwise import gelu, gelu_grad, gelu_tanh, gelu_tanh_grad
from needle.testing.layers import cross_entropy_fwd, layernorm_fwd

# Format: bits of the mantissa, bias of the exponent, numbers that are not negative.
FORMATS = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}


def _numbers(kind: str) -> np.ndarray:
    """The numbers of the bytes 0 to 127; NaN, and infinities of e5m2, at the end."""
    mantissa, bias, count = FORMATS[kind]
    values = []
    for exponent, fraction in itertools.product(range(2 ** (7 - mantissa)), range(2**mantissa)):
        whole = 2**mantissa if exponent else 0
        values.append((whole + fraction) * 2.0 ** (max(exponent, 1) - bias - mantissa))
    values[count:] = [np.nan] * (128 - count)
    if kind == "e5m2":
        values[count] = np.inf
    return np.array(values)


NUMBERS = {kind: _numbers(kind) for kind in FORMATS}


def decoded(q: Any, kind: str) -> np.ndarray:
    """The float64 numbers of bytes."""
    q = np.asarray(q, np.uint8)
    return NUMBERS[kind][q & 0x7F] * np.where(q & 0x80, -1.0, 1.0)


def encoded(x: Any, kind: str) -> np.ndarray:
    """The byte of the nearest number, of two equally near ones the even byte; the largest beyond
    it; 0x7f of NaN."""
    mantissa, bias, count = FORMATS[kind]
    x = np.asarray(x, np.float64)
    size = np.minimum(np.abs(x), NUMBERS[kind][count - 1])
    exponent = np.frexp(np.maximum(size, 2.0 ** (1 - bias)))[1] - 1
    q = np.rint(np.ldexp(size, mantissa - exponent)) + (exponent + bias - 1) * 2**mantissa
    q += np.signbit(x) * 128
    return np.where(np.isnan(x), 0x7F, q).astype(np.uint8)


def scale_of(largest: float, kind: str) -> np.float64:
    """The scale of fp8_quantize."""
    if not np.isfinite(largest):
        return np.float64(np.nan)
    # largest = m 2^e, m in [0.5, 1); 448 = 0.875 * 2^9, 57344 = 0.875 * 2^16
    exponent = np.frexp(largest)[1] - {"e4m3": 9, "e5m2": 16}[kind]
    exponent += largest > NUMBERS[kind][FORMATS[kind][2] - 1] * 2.0**exponent
    return np.float64(2.0 ** max(exponent, -126) if largest else 1.0)


# Tensor cores keep about 14 bits of a sum of FP8 products: units in the last place, in float32, of
# the sum of the products' magnitudes.
OF_SUMS = 2.0**11
# The same of GELU and its derivative beside FP8, of |x|: a kernel may approximate them for 16 bits.
OF_GELU = 2.0**10
FORMS = {1: (gelu, gelu_grad), 2: (gelu_tanh, gelu_tanh_grad)}


@dataclass(frozen=True)
class Near:
    """A result whose elements are, before one rounding, at most `ulps` units in the last place of
    `unit`, in float32, from the exact ones. kind: the format of bytes; else the array's dtype."""

    exact: np.ndarray
    unit: np.ndarray
    ulps: float
    kind: str | None = None

    @property
    def T(self) -> Near:
        return Near(self.exact.T, self.unit.T, self.ulps, self.kind)

    def check(self, got: np.ndarray, dtype: str, what: str) -> None:
        """Raise AssertionError at the first element that is beyond the bound."""
        if self.kind is not None:
            got, dtype = decoded(got, self.kind), self.kind
        assert_near(got, self.exact, self.unit, self.ulps, dtype, what)


def fp8_quantize(r, x, gelu, dgelu, e5m2, largest, scale_a, scale_b, bound, sums):
    kind = ("e4m3", "e5m2")[e5m2]
    bounded = scale_a is not None and x.size
    if bounded:
        largest = bound * scale_a * scale_b
    elif largest is None:
        largest = np.abs(x).max(initial=0)
    gradient = dgelu is not None and gelu == 0
    scale = scale_of(largest * (1.25 if gradient else 1), kind)
    if gelu == 0 and not gradient:
        with np.errstate(invalid="ignore"):
            q = encoded(x / scale, kind)
        return {"q": q, "q_t": q.T, "scale": scale}
    if gradient:
        v, ulps = x * dgelu, 1.0
        unit = np.abs(v)
    else:
        f, df = FORMS[gelu]
        v, unit, ulps = f(x), np.abs(x), OF_GELU
    q = Near(v / scale, unit / scale, ulps, kind)
    found = {"q": q, "q_t": q.T, "scale": scale}
    if dgelu is not None:
        found["dgelu"] = Near(df(x), 1 + x * x, OF_GELU) if gelu else dgelu
    if sums is not None:
        both = [[np.add.reduce(a[i : i + 128]) for i in range(0, len(a), 128)] for a in (v, unit)]
        found["sums"] = Near(*(np.reshape(a, sums.shape) for a in both), 128.0)
    return found


def layernorm_pair_fp8(r, x, norm_w1, norm_b1, norm_w2, norm_b2, eps):
    c, found = x.shape[1], {}
    for n, w, b in ("1", norm_w1, norm_b1), ("2", norm_w2, norm_b2):
        largest = np.sqrt(c) * np.abs(w).max(initial=0) + np.abs(b).max(initial=0)
        scale = scale_of(largest * (1 + 2.0**-10), "e4m3")
        with np.errstate(invalid="ignore"):
            one = layernorm_fwd(r, x, w, b, eps)
            exact = layernorm_fwd(lambda a: a, x, w, b, eps)
            off = (np.abs(x) + np.abs(exact["mean"])[:, None]) * exact["rstd"][:, None]
            unit = off * np.abs(w) + np.abs(b)
            q = Near(exact["y"] / scale, unit / scale, 4 + c**0.5, "e4m3")
        found |= {"q" + n: q, f"q{n}_t": q.T, "scale" + n: scale}
    return found | {"mean": one["mean"], "rstd": one["rstd"]}


def fp8_layer_weights(r, norm_w, norm_b, w_qkv, w_o, w1, b1, w2):
    found = {}
    for name, w in ("_qkv", w_qkv), ("_o", w_o), ("1", w1), ("2", w2):
        one = fp8_quantize(r, w, 0, None, 0, None, None, None, 0.0, None)
        found |= {"q" + name: one["q"], f"q{name}_t": one["q_t"], "scale" + name: one["scale"]}
    with np.errstate(invalid="ignore"):
        c, factors = len(w1), np.sqrt(norm_w**2 + norm_b**2)[:, None]
        columns = 1.125 * np.sqrt(2 * c * (((w1 * factors) ** 2).sum(0).max() + 2.0**-100))
        row = np.sqrt(c) * np.abs(norm_w).max() + np.abs(norm_b).max()
        denormals = c * 2.0**-16 * row * (1 + 2.0**-10) * np.abs(w1).max()
        bound = (columns + denormals + np.abs(b1).max()) * (1 + 2.0**-6)
    return found | {"bound": Near(bound, bound, 16.0)}


def fp8_matmul(rounded, a, a_e5m2, a_scale, b, b_e5m2, b_scale, bias, r, add, c):
    a, b = (decoded(q, ("e4m3", "e5m2")[wide]) for q, wide in ((a, a_e5m2), (b, b_e5m2)))
    scale, r = a_scale * b_scale, c if add else r
    added = [x for x in (r, bias) if x is not None]
    unit = abs(scale) * (np.abs(a) @ np.abs(b).T) + sum(map(np.abs, added))
    return {"c": Near(scale * (a @ b.T) + sum(added), unit, OF_SUMS)}


def fp8_linear_gelu_fwd(r, x, x_scale, w, w_scale, b, largest, tanh):
    x, w, scale = decoded(x, "e4m3"), decoded(w, "e4m3"), x_scale * w_scale
    pre, unit = scale * (x @ w.T) + b, abs(scale) * (np.abs(x) @ np.abs(w).T) + np.abs(b)
    (f, df), of_y = FORMS[1 + tanh], scale_of(largest, "e4m3")
    # gelu' is 1.13 at most, gelu'' 0.8
    y = Near(np.minimum(f(pre) / of_y, 448), unit / of_y, 1.13 * OF_SUMS + OF_GELU, "e4m3")
    dgelu = Near(df(pre), 1 + unit + pre * pre, OF_SUMS)
    return {"y": y, "y_t": y.T, "scale": of_y, "dgelu": dgelu}


def fp8_linear_gelu_bwd(r, d, d_scale, w, w_scale, dgelu, bound, db):
    d, w, scale = decoded(d, "e5m2"), decoded(w, "e4m3"), d_scale * w_scale
    v, unit = scale * (d @ w.T) * dgelu, abs(scale) * (np.abs(d) @ np.abs(w).T) * np.abs(dgelu)
    of_q = scale_of(1.25 * abs(bound * scale), "e5m2")
    q = Near(np.clip(v / of_q, -57344, 57344), unit / of_q, OF_SUMS, "e5m2")
    found = {"q": q, "q_t": q.T, "scale": of_q}
    if db is not None:
        found["db"] = Near(db + v.sum(0), np.abs(db) + unit.sum(0), OF_SUMS + len(d))
    return found


def fp8_cross_entropy(r, x, w, scale, targets):
    x, w = decoded(x, "e4m3"), decoded(w, "e4m3")
    logits, sums = scale * (x @ w.T), abs(scale) * (np.abs(x) @ np.abs(w).T)
    off = 2 * sums.max(1, initial=0) + 0.1  # of a logit and of the lse
    forward, valid = cross_entropy_fwd(r, logits, targets), targets[:, None] >= 0
    p = np.exp(logits - logits.max(1, keepdims=True, initial=-1e300))
    p = p / p.sum(1, keepdims=True) * valid
    hit = (np.arange(len(w)) == targets[:, None]) & valid
    d = Near((p - hit) * 2.0**15, (p + hit) * 2.0**15 * off[:, None], OF_SUMS, "e5m2")
    count = valid.sum()
    return {
        "losses": Near(forward["losses"], off, OF_SUMS),
        "loss": Near(forward["loss"], (off * valid[:, 0]).sum() / max(count, 1), OF_SUMS),
        "share": 1 / count if count else np.float64(0),
        "d": d,
        "d_t": d.T,
    }


def numbers(*shape: int, kind: str = "e4m3", std: float = 60.0):
    """Make a maker of bytes of normally distributed numbers."""
    return lambda rng: encoded(rng.standard_normal(shape) * std, kind)


def quantized_inputs(
    n, c, std=1.0, at=(), value=0.0, e5m2=0, form=0, slope=False, bound=0.0, known=None
):
    def inputs(rng):
        x = rng.standard_normal((n, c)) * std
        x.reshape(-1)[list(at)] = value
        dgelu, sums = (np.full((n, c), np.nan) if slope else None), None
        if slope and not form:
            dgelu = rng.uniform(-0.13, 1.13, (n, c))
            sums = np.full((-(-n // 128), c), np.nan) if e5m2 else None
        scales = [np.float64(x) if bound else None for x in (2.0**-9, 2.0**-14)]
        given = {"gelu": form, "dgelu": dgelu, "e5m2": e5m2, "largest": known}
        scaled = {"scale_a": scales[0], "scale_b": scales[1], "bound": bound}
        return {"x": x, **given, **scaled, "sums": sums}

    return inputs


def norm_inputs(n, c, sizes=(1.0, 1.0, 1.0, 1.0), operand="x", at=(), value=0.0):
    """Rows of means about 1; weights and biases about as large as `sizes`; `value` at places."""

    def inputs(rng):
        x = rng.standard_normal((n, c)) * 2 + 1
        made = [rng.standard_normal(c) * size for size in sizes]
        values = {"x": x, **dict(zip("norm_w1 norm_b1 norm_w2 norm_b2".split(), made)), "eps": 1e-5}
        values[operand].reshape(-1)[list(at)] = value
        return values

    return inputs


def weights_inputs(c, p, i, m, stds=(1.0,) * 7, operand="w1", at=(), value=0.0):
    """Operands about as large as `stds`; `value` at places of one."""

    def inputs(rng):
        shapes = {"norm_w": (c,), "norm_b": (c,), "w_qkv": (c, p), "w_o": (i, c)}
        shapes |= {"w1": (c, m), "b1": (m,), "w2": (m, c)}
        values = {
            name: rng.standard_normal(shape) * std
            for (name, shape), std in zip(shapes.items(), stds)
        }
        values[operand].reshape(-1)[list(at)] = value
        return values

    return inputs


def product_inputs(m, n, k, wide="", add=1, bias=False, r=False):
    return draw(
        a=numbers(m, k, kind="e5m2" if wide == "a" else "e4m3"),
        a_e5m2=int(wide == "a"),
        a_scale=np.float64(2.0**-7),
        b=numbers(n, k, kind="e5m2" if wide == "b" else "e4m3"),
        b_e5m2=int(wide == "b"),
        b_scale=np.float64(2.0**-5),
        bias=normal(n) if bias else None,
        r=normal(m, n) if r else None,
        add=add,
        # written without being read: a NaN would stay
        c=normal(m, n) if add else np.full((m, n), np.nan),
    )


def gelu_inputs(n, k, m, tanh=0, largest=16.0, bad=()):
    """pre is about 2; NaN in x at the places `bad`."""

    def inputs(rng):
        x, w = numbers(n, k)(rng), numbers(m, k)(rng)
        x.reshape(-1)[list(bad)] = 0x7F
        scale = np.float64(2.0 ** -np.round(np.log2(1800 * k**0.5)))
        scales = {"x_scale": scale * 64, "w_scale": np.float64(2.0**-6)}
        given = {"b": rng.standard_normal(m), "largest": np.float64(largest), "tanh": tanh}
        return {"x": x, "w": w, **scales, **given}

    return inputs


def gelu_grad_inputs(n, c, m, summed=True, bound=2.0**21, bad=()):
    def inputs(rng):
        d, w = numbers(n, c, kind="e5m2", std=200.0)(rng), numbers(m, c)(rng)
        d.reshape(-1)[list(bad)] = 0x7F
        scales = {"d_scale": np.float64(2.0**-20), "w_scale": np.float64(2.0**-9)}
        slopes = rng.uniform(-0.13, 1.13, (n, m))
        db = rng.standard_normal(m) * 0.1 if summed else None
        return {"d": d, "w": w, **scales, "dgelu": slopes, "bound": bound, "db": db}

    return inputs


def loss_inputs(n, c, v, ignored=()):
    def inputs(rng):
        targets = rng.integers(0, v, n)
        targets[list(ignored)] = -100
        scale = np.float64(2.0 ** -np.round(np.log2(1200 * max(c, 1) ** 0.5)))  # logits about 3
        return {
            **draw(x=numbers(n, c), w=numbers(v, c))(rng),
            **{"scale": scale, "targets": targets},
        }

    return inputs


QUANTIZED = {
    "odd": (31, 257, 1e-4, (), 0.0, 1, 1, True),
    "1x1": (1, 1),
    "31x257": (31, 257),
    "257x31": (257, 31, 1e4),
    "144x512": (144, 512, 1e-3),
    "300x1040": (300, 1040),
    "zeros": (31, 5, 0.0),
    "448": (16, 48, 1.0, (5,), -448.0),
    "above-448": (16, 48, 1.0, (5,), 450.0),
    "tiny": (7, 33, 1e-39),
    "nan": (16, 33, 1.0, (200,), np.nan),
    "infinity": (16, 33, 1.0, (200,), -np.inf),
    "none": (0, 8),
    "e5m2-257x272": (257, 272, 1e-4, (), 0.0, 1),
    "e5m2-nan": (16, 33, 1.0, (200,), np.nan, 1),
    "gelu-31x257": (31, 257, 2.0, (), 0.0, 0, 1),
    "gelu-tanh-144x272": (144, 272, 2.0, (3,), -12.0, 0, 2, True),
    "gradient-300x1040": (300, 1040, 30.0, (), 0.0, 1, 0, True),
    "gradient-e4m3-144x48": (144, 48, 1.0, (), 0.0, 0, 0, True),
    "known-300x272": (300, 272, 1.0, (), 0.0, 0, 0, False, 0.0, np.float64(2.0)),  # exceeded
    "bound-300x272": (300, 272, 1e-4, (5,), -1.0, 1, 0, True, 2.0**24),
    "nan-below-a-bound": (16, 33, 1e-4, (200,), np.nan, 1, 0, False, 2.0**24),
    "infinity-below-a-bound": (16, 33, 1e-4, (200,), np.inf, 1, 0, False, 2.0**24),
    "bound-none": (0, 8, 1.0, (), 0.0, 1, 0, True, 2.0**24),
    "gradient-none": (0, 8, 1.0, (), 0.0, 1, 0, True),
}

NORMS = {  # rows of half a block, columns beyond 256, 512 and 1,024
    **{f"{n}x{c}": (n, c) for n, c in [(16, 48), (48, 16), (400, 768), (48, 1024), (80, 4112)]},
    "none": (0, 32),
    "unlike": (48, 2048, (1e-3, 1e-6, 40.0, 300.0)),
    "zeros": (16, 32, (0.0, 0.0, 0.0, 2.0)),
    "sqrt-c-w-is-448": (16, 16, (1.0, 0.0, 1.0, 0.0), "norm_w1", (3,), 112.0),
    "one-far": (32, 1040, (1.0, 1.0, 1.0, 1.0), "x", range(7, 32 * 1040, 1040), -6e4),
    "nan": (64, 272, (1.0, 1.0, 1.0, 1.0), "x", (300, 40 * 272), np.nan),
    "infinity": (64, 1296, (1.0, 1.0, 1.0, 1.0), "x", (1500, 40 * 1296 + 1295), -np.inf),
    "nan-in-norm_w2": (16, 48, (1.0, 1.0, 1.0, 1.0), "norm_w2", (47,), np.nan),
    "infinity-in-norm_b1": (16, 272, (1.0, 1.0, 1.0, 1.0), "norm_b1", (271,), np.inf),
}

WEIGHTS = {  # widths about strips of 32 and 64, heights about 64 and 256 rows, tiles of 128
    "16": (16, 16, 16, 16),
    "48x80x32x144": (48, 80, 32, 144),
    "272x48x528x208": (272, 48, 528, 208),
    "528x400x272x1040": (528, 400, 272, 1040, (1.0, 1.0, 0.02, 0.05, 0.02, 1.0, 0.02)),
    "unlike": (64, 144, 64, 272, (1e-2, 30.0, 1e-8, 1e4, 3e-3, 1e-4, 0.0)),
    "zeros": (32, 96, 32, 128, (1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)),
    "b1-alone": (32, 96, 32, 128, (1.0, 1.0, 1.0, 1.0, 0.0, 3.0, 1.0)),
    "last-column": (80, 96, 32, 112, (1.0,) * 7, "w1", range(111, 80 * 112, 112), 50.0),
    "nan-in-w1": (80, 96, 32, 112, (1.0,) * 7, "w1", (80 * 112 - 1,), np.nan),
    "infinity-in-w1": (80, 96, 32, 112, (1.0,) * 7, "w1", (0,), -np.inf),
    "nan-in-w_o": (48, 96, 272, 112, (1.0,) * 7, "w_o", (272 * 48 - 1,), np.nan),
    "nan-in-norm_w": (48, 96, 32, 112, (1.0,) * 7, "norm_w", (47,), np.nan),
    "infinity-in-norm_b": (48, 96, 32, 112, (1.0,) * 7, "norm_b", (3,), np.inf),
    "nan-in-b1": (48, 96, 32, 112, (1.0,) * 7, "b1", (111,), np.nan),
}

# Multiples of 16, which is what CUDA takes, also beyond tiles of 128 and 256.
PRODUCTS = {
    "x".join(map(str, shape[:3])) + "".join(f"-{x}" for x in shape[3:]): shape
    for shape in [
        (16, 32, 48),
        (64, 272, 48, "a", 0),
        (48, 272, 64, "b", 1),
        (144, 1040, 512, "", 0),
        (144, 512, 1040, "a", 1),
        (512, 1040, 144, "b", 0),
        (64, 272, 48, "", 0, True),
        (144, 512, 1040, "", 0, False, True),
        (144, 1040, 512, "", 0, True, True),
        (48, 272, 64, "a", 1, True),
    ]
}
GELU = {  # rows about tiles of 64, columns about 128, depths about steps of 128
    "16": (16, 16, 16),
    "80x272x144-tanh": (80, 272, 144, 1),
    "144x1024x400": (144, 1024, 400),
    "208x512x272-tanh": (208, 512, 272, 1, 10.0),
    "beyond-the-largest": (32, 48, 80, 0, 0.5),
    "nan": (96, 48, 144, 0, 16.0, (3, 70 * 48 + 47)),
    "no-bound": (32, 48, 144, 0, np.inf),
}
GELU_GRADIENT = {
    "16": (16, 16, 16),
    "80x272x144": (80, 272, 144),
    "144x1024x400": (144, 1024, 400, True, 2.0**26),
    "208x512x272-no-db": (208, 512, 272, False),
    "beyond-the-bound": (48, 48, 80, True, 2.0**8),
    "nan": (96, 48, 144, True, 2.0**21, (3, 70 * 48 + 47)),
    "no-bound": (32, 48, 144, True, np.inf),
}
LOSSES = {
    "16x32x48": (16, 32, 48),
    "64x48x272": (64, 48, 272, (0, 3, 63)),
    "144x512x1040": (144, 512, 1040, (1, 130)),
    "272x64x4096": (272, 64, 4096),
    "all-ignored": (16, 48, 32, range(16)),
}

# Sizes that the CPU alone takes.
ODD = [
    *cases_of(
        fp8_matmul,
        product_inputs,
        {
            "1": (1, 1, 1),
            "31x257x1": (31, 257, 1, "a"),
            "257x1x31": (257, 1, 31, "b", 0),
            "empty": (3, 5, 0),
            "empty-bias": (3, 5, 0, "", 0, True, True),
        },
        lambda m, n, k, *more: k,
    ),
    *cases_of(
        fp8_cross_entropy,
        loss_inputs,
        {"1": (1, 1, 1), "31": (31, 257, 1), "257": (257, 1, 31, (256,)), "none": (0, 4, 5)},
        lambda n, c, v, *more: max(c, v),
    ),
]

# More tiles than a GPU has multiprocessors, down a column and across columns; of the loss at depths
# above and below 512.
WALKED = {"9232x400x400": (9232, 400, 400), "48x48x17040": (48, 48, 17040)}
LARGE = [
    *cases_of(
        fp8_cross_entropy,
        loss_inputs,
        {"208x1024x17040": (208, 1024, 17040, (7,)), "144x96x34064": (144, 96, 34064, (143,))},
    ),
    *cases_of(fp8_linear_gelu_fwd, gelu_inputs, WALKED),
    *cases_of(fp8_linear_gelu_bwd, gelu_grad_inputs, WALKED),
]

CASES = [
    *cases_of(fp8_quantize, quantized_inputs, QUANTIZED),
    *cases_of(layernorm_pair_fp8, norm_inputs, NORMS, lambda n, c, *more: c),
    *cases_of(fp8_layer_weights, weights_inputs, WEIGHTS),
    *cases_of(fp8_matmul, product_inputs, PRODUCTS, lambda m, n, k, *more: k),
    *cases_of(fp8_linear_gelu_fwd, gelu_inputs, GELU),
    *cases_of(fp8_linear_gelu_bwd, gelu_grad_inputs, GELU_GRADIENT),
    *cases_of(fp8_cross_entropy, loss_inputs, LOSSES, lambda n, c, v, *more: max(c, v)),
]
