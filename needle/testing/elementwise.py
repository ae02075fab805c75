"""Ops of one formula: elementwise, comparisons, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from needle.testing.case import Case
from needle.testing.table import FLOATS, INTEGERS, OPS

erf = np.vectorize(math.erf, otypes=[float])


@dataclass(frozen=True)
class Elementwise:
    f: Callable
    domain: tuple[float, float] = (-4.0, 4.0)
    ulps: float = 0.0  # 0: correctly rounded
    unit: Callable | None = None  # the quantity that an ulp is of; default the result
    second: tuple[float, float] | None = None  # the domain of y, where it is another
    integers: bool = False  # also computed on integer dtypes, where it gives integers


SQRT_2_PI = math.sqrt(2 / math.pi)


def phi(x):
    return 0.5 * (1 + erf(x / math.sqrt(2)))


def gelu(x):
    return x * phi(x)


def gelu_grad(x):
    x = np.clip(x, -40, 40)  # there it is 0 or 1, and inf * 0 is neither
    return phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(SQRT_2_PI * (x + 0.044715 * x * x * x)))


def gelu_tanh_grad(x):
    x = np.clip(x, -40, 40)
    t = np.tanh(SQRT_2_PI * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * SQRT_2_PI * (1 + 3 * 0.044715 * x * x)


def quiet(f):
    """f without a warning where it divides by zero."""
    return np.errstate(all="ignore")(lambda x, y: f(x, y))


def power(x, y):
    """x^y; of whole numbers its whole part, and 0 where x is 0 and y negative."""
    if np.asarray(x).dtype.kind == "f":
        return np.power(x, y)
    z = np.power(np.asarray(x, np.float64), y)
    return np.where((x == 0) & (y < 0), 0, np.trunc(z)).astype(np.int64)


BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")
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
    "sign": Elementwise(np.sign, integers=True),
    "floor": Elementwise(np.floor, integers=True),
    "ceil": Elementwise(np.ceil, integers=True),
    "round": Elementwise(np.rint, integers=True),
    "sin": Elementwise(np.sin, (-40, 40), 3, lambda y, x: np.maximum(np.abs(y), 0.01)),
    "cos": Elementwise(np.cos, (-40, 40), 3, lambda y, x: np.maximum(np.abs(y), 0.01)),
    "erf": Elementwise(erf, ulps=3),
    "log1p": Elementwise(np.log1p, (-0.9, 1e3), 3),
    "expm1": Elementwise(np.expm1, (-20, 11), 3),
    "rsqrt": Elementwise(lambda x: 1 / np.sqrt(x), (1e-6, 1e4), 2),
    "silu": Elementwise(lambda x: x / (1 + np.exp(-x)), (-30, 11), 5),
    "softplus": Elementwise(lambda x: np.logaddexp(x, 0), (-30, 30), 5),
    "add": Elementwise(lambda x, y: x + y, integers=True),
    "subtract": Elementwise(lambda x, y: x - y, integers=True),
    "multiply": Elementwise(lambda x, y: x * y, integers=True),
    "divide": Elementwise(lambda x, y: x / y, (0.1, 8), 0.51),
    "power": Elementwise(
        quiet(power),
        (0.1, 5),
        4,
        lambda z, x, y: z * (1 + np.abs(y * np.log(np.abs(x)))),
        (-3, 3),
        integers=True,
    ),
    "maximum": Elementwise(np.maximum, integers=True),
    "minimum": Elementwise(np.minimum, integers=True),
    "floor_divide": Elementwise(quiet(np.floor_divide), second=(1, 5), integers=True),
    "remainder": Elementwise(quiet(np.remainder), second=(1, 5), integers=True),
    **{name: Elementwise(getattr(np, name), integers=True) for name in BITWISE},
    "gelu_bwd": Elementwise(
        lambda x, y: gelu_grad(x) * y,
        (-6, 6),
        8,
        lambda z, x, y: np.abs(y) * (1 + np.abs(x)),
        (-2, 2),
    ),
    "gelu_tanh_bwd": Elementwise(
        lambda x, y: gelu_tanh_grad(x) * y,
        (-6, 6),
        8,
        lambda z, x, y: np.abs(y) * (1 + x * x),
        (-2, 2),
    ),
}

inf, nan = float("inf"), float("nan")
# Zeros, infinities, NaN, the largest and the smallest, and where formulas change.
LIMITS = [0.0, 1e-45, 2e-38, 1e-30, 1e-20, 0.5, 1.0, 1.5, 2.0, 3.0, 20.0, 88.5, 104.0, 1e4, 1e20]
LIMITS += [3.4028234663852886e38, inf]
LIMITS += [*(-x for x in LIMITS), nan]
# Exact float32 results at the edges: op, operands, result.
SPECIAL = [
    ("exp", ([-inf, inf, 0.0, -1e10, 1e10, nan],), [0, inf, 1, 0, inf, nan]),
    ("exp", ([-0.0, 1e-41, 89.0, -104.0],), [1, 1, inf, 0]),
    ("log", ([0.0, -1.0, inf, 1.0, nan],), [-inf, nan, inf, 0, nan]),
    ("log", ([-0.0, -inf, -1e30],), [-inf, nan, nan]),
    ("sqrt", ([0.0, -1.0, inf, 4.0, nan],), [0, nan, inf, 2, nan]),
    ("tanh", ([-1e10, 1e10, -inf, inf, 0.0, nan],), [-1, 1, -1, 1, 0, nan]),
    ("sigmoid", ([-1e10, 1e10, -inf, inf, 0.0, nan],), [0, 1, 0, 1, 0.5, nan]),
    ("relu", ([-inf, inf, -1.0, 2.0, nan],), [0, inf, 0, 2, nan]),
    ("gelu", ([-1e4, 1e4, 0.0, nan],), [0, 1e4, 0, nan]),
    ("gelu_tanh", ([-1e4, 1e4, 0.0, nan],), [0, 1e4, 0, nan]),
    ("gelu_bwd", ([inf, -inf, nan], [1.0, 1.0, 1.0]), [1, 0, nan]),
    ("maximum", ([nan, 1.0, inf, -inf], [1.0, nan, 2.0, -1.0]), [nan, nan, inf, -1]),
    ("minimum", ([nan, 1.0, inf, -inf], [1.0, nan, 2.0, -1.0]), [nan, nan, 2, -inf]),
    ("divide", ([1.0, -1.0, 0.0, 1.0], [0.0, 0.0, 0.0, inf]), [inf, -inf, nan, 0]),
    ("sign", ([nan, -inf, -0.5, 0.0, inf],), [nan, -1, -1, 0, 1]),
    ("floor", ([nan, -inf, -0.5, 0.5, inf, 1e10],), [nan, -inf, -1, 0, inf, 1e10]),
    ("ceil", ([nan, -inf, -0.5, 0.5, inf],), [nan, -inf, 0, 1, inf]),
    ("round", ([nan, inf, 0.5, 1.5, 2.5, -2.5],), [nan, inf, 0, 2, 2, -2]),
    ("sin", ([nan, inf, 0.0],), [nan, nan, 0]),
    ("erf", ([-inf, inf, nan, 0.0],), [-1, 1, nan, 0]),
    ("log1p", ([-1.0, -2.0, inf, 0.0],), [-inf, nan, inf, 0]),
    ("expm1", ([-inf, inf, 0.0, nan],), [-1, inf, 0, nan]),
    ("rsqrt", ([0.0, inf, -1.0, 4.0],), [inf, 0, nan, 0.5]),
    ("softplus", ([-1e10, 1e10, inf, nan],), [0, 1e10, inf, nan]),
    ("silu", ([-1e4, 1e4, 0.0, nan],), [0, 1e4, 0, nan]),
    (
        "floor_divide",
        ([7.0, -7.0, 7.0, 1.0, -1.0, 1.0], [2, 2, -2, 0, 0, inf]),
        [3, -4, -4, inf, -inf, 0],
    ),
    ("remainder", ([7.0, -7.0, 7.0, 1.0, -6.0, nan], [2, 2, -2, 0, 3, 1]), [1, 1, -1, nan, 0, nan]),
    (
        "power",
        (
            [-2.0, -2.0, 0.0, 0.0, -8.0, 2.0, inf, nan, 1.0],
            [3.0, 2.0, 0.0, -1.0, 0.5, inf, 0.0, 0.0, nan],
        ),
        [-8, 4, 1, inf, nan, inf, 1, 1, 1],
    ),
]

COMPARED = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
COMPARISONS = {op: getattr(np, op) for op in COMPARED}

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
    ((170, 200), 1),
    ((40, 264), 1),  # rows and, transposed, columns of whole 16-byte loads
    ((40, 900), 1),  # columns of several blocks, transposed
    ((4, 20_000), 1),
    ((16, 3, 24), 2),  # two axes that do not merge, transposed
    ((5, 7, 31), 0),
    ((2, 3, 4, 5), 1),
    ((2, 3, 4, 5), 3),
    ((2, 3, 4, 5), 4),
    ((0, 5), 1),
    ((3, 0, 5), 1),
]


def copy_case(op: str, shape: tuple[int, ...]) -> Case:
    """Make a case of `assign` or `fill`, which overwrite an array of this shape."""

    def inputs(rng):
        given = {"source": rng.uniform(0, 4, shape)} if op == "assign" else {"value": 2.0}
        return {"to": rng.uniform(0, 4, shape)} | given

    def reference(r, to, source=None, value=None):
        return {"to": np.full_like(to, value) if op == "fill" else source}

    return Case(op, "x".join(map(str, shape)), inputs, reference, ulps=0)


def formula_case(op: str, shape: tuple[int, ...], axes: int = 1) -> Case:
    """Make a case of an op of one formula: operands of this shape, of which a reduction takes the
    last `axes` axes."""
    label = "x".join(map(str, shape))
    if op in ELEMENTWISE:
        entry = ELEMENTWISE[op]
        domains = [entry.domain, entry.second or entry.domain][: len(OPS[op].inputs)]

        def inputs(rng):
            return {name: rng.uniform(*domain, shape) for name, domain in zip("xy", domains)}

        def reference(r, **values):
            with np.errstate(all="ignore"):
                return {"out": entry.f(*values.values())}

        return Case(op, label, inputs, reference, ulps=entry.ulps, unit=entry.unit)
    if op in COMPARISONS:
        pair = lambda rng: {name: rng.integers(0, 4, shape) for name in "xy"}
        return Case(op, label, pair, lambda r, x, y: {"out": COMPARISONS[op](x, y)})

    def reduced(r, x, axes):
        kept = x.shape[: x.ndim - axes]  # NumPy's argmax takes one axis
        flat = x.reshape(*kept, math.prod(x.shape[x.ndim - axes :]))
        return {"out": REDUCTIONS[op][0](flat, axis=-1)}

    count = math.prod(shape[len(shape) - axes :])
    return Case(
        op,
        label,
        lambda rng: {"x": rng.integers(0, 40, shape) / 4, "axes": axes},
        reduced,
        terms={"sum": count, "sumsq": 1 + count**0.5}.get(op, 1),
        ulps=None if op in ("sum", "sumsq") else 0,
    )
