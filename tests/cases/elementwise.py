"""Ops of one formula: elementwise, comparisons, reductions."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int64", "uint8", "uint16", "bool")
erf = np.vectorize(math.erf, otypes=[float])


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
