"""Elementwise ops: rows of ops.def with their derivatives, `where`, and functions composed of them:
rounding, limits, closeness, bits and truth values.

A row here has the name of a row of ops.def, a docstring, and for each operand the rule of its
gradient. The parameters of a rule say what it reads: g, the gradient of the result; x and y, the
operands, Tensors or numbers; out, the result. Rules are made of ops, so that they can be
differentiated again. From a row come the class of the graph's nodes and the function: operands
broadcast like NumPy, and gradients are summed back to each operand's shape and dtype.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd.tensor import FLOATS, Accumulators, FusedOp, Tensor
from needle.backend_ndarray import full, zeros
from needle.ops.broadcast import Rule, Ruled, as_floats, astype, differentiable
from needle.ops.common import LARGEST, const, nonzero_places

# The classes that the course has by other names.
NAMES = {"add": "EWiseAdd", "subtract": "EWiseSub", "multiply": "EWiseMul", "divide": "EWiseDiv"}
NAMES |= {"power": "EWisePow", "relu": "ReLU"}
NUMBER = (Number, np.bool_)
ROWS: dict[str, Callable[..., Tensor]] = {}  # the functions, which are methods of Tensor too


class _Elementwise(Ruled):
    """The op of a row, also where one of two operands is a number, which is its setting."""


def row(kernel: str, doc: str, *rules: Rule) -> Callable[..., Tensor]:
    """Make the function of a row of ops.def. Of two operands one may be a number, or what a Tensor
    is made from."""
    name, compute = NAMES.get(kernel, kernel.capitalize()), getattr(_C, kernel)
    of_tensors = _Elementwise.made(name, compute, rules, __doc__=doc)()
    with_last = _Elementwise.made(name, compute, rules[:1], ("y",))
    with_first = _Elementwise.made(name, lambda y, x: compute(x, y), rules[1:], ("x",), "y")

    def of_one(a: Tensor) -> Tensor:
        return of_tensors(a)

    def of_two(a: Any, b: Any) -> Tensor:
        if isinstance(b, Tensor):
            if isinstance(a, Tensor):
                return of_tensors(a, b)
            return with_first(a)(b) if isinstance(a, NUMBER) else of_tensors(b._operand(a), b)
        if not isinstance(a, Tensor):
            raise TypeError(
                f"{kernel}: a or b must be a Tensor, but they are {type(a).__name__} and "
                f"{type(b).__name__} (ndl.Tensor(array) makes one)"
            )
        return with_last(b)(a) if isinstance(b, NUMBER) else of_tensors(a, a._operand(b))

    function: Callable[..., Tensor] = of_one if len(rules) == 1 else of_two
    function.__name__ = function.__qualname__ = kernel
    function.__doc__ = doc
    ROWS[kernel] = function
    return function


# ---- one operand ---------------------------------------------------------------------------------

negate = row("negate", "-a.", lambda g: -g)
absolute = row("absolute", "|a|; the gradient at 0 is 0.", lambda g, x: g * sign(x))
sign = row("sign", "-1, 0 or 1; NaN for NaN. The gradient is 0.", None)
floor = row("floor", "The largest whole number up to a. The gradient is 0.", None)
ceil = row("ceil", "The smallest whole number from a on. The gradient is 0.", None)
_round = row("round", "The nearest whole number, halves to even. The gradient is 0.", None)
exp = row(
    "exp",
    """e ** a.

    >>> print(ndl.exp(ndl.Tensor([0, -np.inf])))
    [1. 0.]
    """,
    lambda g, out: g * out,
)
expm1 = row("expm1", "e^a - 1, exact for small a.", lambda g, x: g * exp(x))
log = row(
    "log",
    """The natural logarithm.

    >>> print(ndl.log(ndl.Tensor([1, 0])))
    [  0. -inf]
    """,
    lambda g, x: g / x,
)
log1p = row("log1p", "log(1 + a), exact for small a.", lambda g, x: g * (1 / (x + 1)))
sqrt = row("sqrt", "The square root.", lambda g, out: g / (out * 2))
rsqrt = row("rsqrt", "1 / sqrt(a).", lambda g, x, out: g * (out / x * -0.5))
sin = row("sin", "The sine of radians.", lambda g, x: g * cos(x))
cos = row("cos", "The cosine of radians.", lambda g, x: g * -sin(x))
tanh = row("tanh", "The hyperbolic tangent.", lambda g, out: g * (-(out * out) + 1))
erf = row(
    "erf",
    "The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to a.",
    lambda g, x: g * (exp(-(x * x)) * (2 / math.sqrt(math.pi))),
)
sigmoid = row("sigmoid", "1 / (1 + e^-a).", lambda g, out: g * (out * (-out + 1)))
silu = row(
    "silu",
    "a sigmoid(a) (Elfwing et al. 2017), also called swish.",
    lambda g, x: g * _silu_slope(x),
)
softplus = row("softplus", "log(1 + e^a), without overflow.", lambda g, x: g * sigmoid(x))
relu = row(
    "relu",
    """max(a, 0); the gradient at 0 is 0.

    >>> print(ndl.relu(ndl.Tensor([-1, 2])))
    [0. 2.]
    """,
    lambda g, x: _unless(x <= 0, g),
)

# ---- two operands --------------------------------------------------------------------------------

add = row(
    "add",
    """a + b.

    >>> print(ndl.add(ndl.Tensor([[1, 2], [3, 4]]), ndl.Tensor([10, 20])))
    [[11. 22.]
     [13. 24.]]
    """,
    lambda g: g,
    lambda g: g,
)
subtract = row("subtract", "a - b.", lambda g: g, lambda g: -g)
multiply = row("multiply", "a * b.", lambda g, y: g * y, lambda g, x: g * x)
divide = row(
    "divide",
    """a / b.

    >>> print(ndl.divide(ndl.Tensor([1, 2]), ndl.Tensor([4, 4])))
    [0.25 0.5 ]
    """,
    lambda g, y: g / y,
    lambda g, y, out: -(g / y * out),  # y * y would overflow where the quotient does not
)
power = row(
    "power",
    """a ** b. Integers to integers stay integers, except to a number below 0. The gradient for b is
    NaN where a is negative, as the logarithm of a is.

    >>> print(ndl.power(ndl.Tensor([2, 3]), ndl.Tensor([3, 2])))
    [8. 9.]
    >>> x = ndl.Tensor([1, 2, 3])
    >>> ndl.power(x, 3).sum().backward()
    >>> print(x.grad)
    [ 3. 12. 27.]
    """,
    lambda g, x, y: _unless(y == 0, g * (_power_below(x, y) * y)),
    # 0, not 0 * -inf, where x is 0 and the result is not infinite
    lambda g, x, out: _unless((x == 0) & (absolute(out) < math.inf), g * out * _natural_log(x)),
)
maximum = row(
    "maximum",
    """The larger of a and b elementwise, broadcasting; NaN wins. Equal ones share the gradient.

    >>> print(ndl.maximum(ndl.Tensor([-1, 5]), 0))
    [0. 5.]
    """,
    lambda g, x, y: _unless(x < y, g / ((x == y) + 1.0)),
    lambda g, x, y: _unless(y < x, g / ((x == y) + 1.0)),
)
minimum = row(
    "minimum",
    "The smaller of a and b elementwise, broadcasting; NaN wins. Equal ones share the gradient.",
    lambda g, x, y: _unless(y < x, g / ((x == y) + 1.0)),
    lambda g, x, y: _unless(x < y, g / ((x == y) + 1.0)),
)
remainder = row(
    "remainder",
    """a % b, with the sign of b, as Python and NumPy have it; integers % 0 are 0, floats NaN.

    >>> print(ndl.remainder(ndl.Tensor([5, -5]), 3))
    [2. 1.]
    """,
    lambda g: g,
    lambda g, x, y: -(g * floor_divide(x, y)),
)


def floor_divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a // b, rounded down; integers // 0 are 0. Outside of the graph.

    >>> print(ndl.floor_divide(ndl.Tensor([5, -5]), 3))
    [ 1. -2.]
    """
    return const(_C.floor_divide(*(x.cached_data if isinstance(x, Tensor) else x for x in (a, b))))


def _power_below(x: Tensor | float, y: Tensor | float) -> Tensor | float:
    """Return x ** (y - 1), of a square x itself: the kernel of powers takes 20 times a product."""
    if isinstance(y, Number) and y in (1, 2):
        return x if y == 2 else 1
    return x ** (y - 1)


def _silu_slope(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return s * (x * (-s + 1) + 1)


def _natural_log(x: Tensor | float) -> Tensor | float:
    """Return the logarithm of a Tensor or a number."""
    if isinstance(x, Tensor):
        return log(x)
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


# ---- choices -------------------------------------------------------------------------------------

BITS = {"float32": "int32", "bfloat16": "uint16", "float16": "uint16", "bool": "uint8"}


def _kept_bits(a: NDArray, condition: NDArray) -> NDArray:
    return _C.multiply(a.view(BITS.get(a.dtype, a.dtype)), condition)


def _unless(condition: Tensor | bool, a: Tensor) -> Tensor:
    """Return a with 0 where the condition holds, also in the place of inf and NaN."""
    if isinstance(condition, Tensor):
        return keep(a, _C.equal(condition.cached_data, 0))
    return const(zeros(a.shape, a.dtype, a.device)) if condition else a


@differentiable("Keep", lambda g, condition: keep(g, condition))
def keep(a: NDArray, condition: NDArray) -> NDArray:
    """a where the condition, an array of bool, holds, else 0, also in the place of inf and NaN."""
    return _kept_bits(a, condition).view(a.dtype)


@differentiable(
    "Where", lambda g, condition: keep(g, condition), lambda g, inverse: keep(g, inverse)
)
def _where(a: NDArray, b: NDArray, condition: NDArray, inverse: NDArray) -> NDArray:
    """a where the condition holds, else b, without arithmetic: bits of one are added to zeros."""
    dtype = _C.add(*(_C.empty((0,), x.dtype, x.device) for x in (a, b))).dtype
    if a.dtype == b.dtype:
        dtype = a.dtype
    pairs = (a, condition), (b, inverse)
    return _C.add(*(_kept_bits(x.astype(dtype), chosen) for x, chosen in pairs)).view(dtype)


def beside(number: Any, x: Tensor) -> Tensor:
    """A number as a Tensor, of the dtype that it has in a sum with x; 0 and 1 are bool there."""
    keeps = x.dtype in FLOATS or isinstance(number, (bool, np.bool_))
    if keeps or (x.dtype == "bool" and number in (0, 1)):
        return const(full((), number, x.dtype, x.device))
    dtype = _C.add(_C.empty((0,), x.dtype, x.device), number).dtype
    return const(full((), number, dtype, x.device))


def where(condition: Any, a: Any = None, b: Any = None) -> Any:
    """a where the condition is not 0, else b; all broadcast. A number counts as in a sum with the
    other: a fraction makes integers float32. Two numbers give float32, int64 or bool. Elements that
    are not chosen have no effect, not even inf or NaN. The condition alone: its places, as nonzero
    gives them.

    >>> x = ndl.Tensor([4, 0])
    >>> y = ndl.where(x > 0, ndl.log(x), 7)
    >>> print(y.numpy().round(4))
    [1.3863 7.    ]
    """
    if a is None and b is None:
        array = condition.cached_data if isinstance(condition, Tensor) else condition
        return tuple(map(const, nonzero_places(array)))
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        device = condition.device if isinstance(condition, (Tensor, NDArray)) else _C.cpu()
        kind = {"f": "float32", "b": "bool"}.get(np.result_type(a, b).kind, "int64")
        like = const(full((), 0, kind, device))
    a, b = (beside(x, like) if isinstance(x, NUMBER) else like._operand(x) for x in (a, b))
    if isinstance(condition, Tensor):
        condition = condition.cached_data
    if not isinstance(condition, NDArray):
        condition = _C.array(condition, "bool", like.device)
    if condition.dtype != "bool":
        condition = _C.not_equal(condition, 0)
    return _where(a, b, condition, _C.equal(condition, 0))


# ---- composed -----------------------------------------------------------------------------------


def composed(name: str, doc: str, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Give an expression of other ops a name and a docstring. Its operand `a` is a Tensor."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    types = {"a": "Tensor", "b": "Any", "scalar": "float"}
    names = inspect.signature(function).parameters
    function.__annotations__ = {word: types[word] for word in names} | {"return": "Tensor"}
    return function


add_scalar = composed("add_scalar", "a + scalar.", lambda a, scalar: add(a, scalar))
subtract_scalar = composed("subtract_scalar", "a - scalar.", lambda a, scalar: subtract(a, scalar))
multiply_scalar = composed("multiply_scalar", "a * scalar.", lambda a, scalar: multiply(a, scalar))
divide_scalar = composed("divide_scalar", "a / scalar.", lambda a, scalar: divide(a, scalar))
scalar_divide = composed("scalar_divide", "scalar / a.", lambda scalar, a: divide(scalar, a))
power_scalar = composed(
    "power_scalar", "a ** scalar, as `power` has it.", lambda a, scalar: power(a, scalar)
)
scalar_power = composed(
    "scalar_power", "scalar ** a, as `power` has it.", lambda scalar, a: power(scalar, a)
)
tan = composed("tan", "The tangent of radians.", lambda a: sin(a) / cos(a))
reciprocal = composed("reciprocal", "1 / a.", lambda a: 1.0 / a)
log2 = composed("log2", "The logarithm to base 2.", lambda a: log(a) * (1 / math.log(2)))
log10 = composed("log10", "The logarithm to base 10.", lambda a: log(a) * (1 / math.log(10)))
square = composed("square", "a * a, in the dtype of a.", lambda a: a * a)
isnan = composed("isnan", "True where a is NaN.", lambda a: a.ne(a))
logical_not = composed("logical_not", "Where a is 0, as bool.", lambda a: a == 0)
logical_and = composed(
    "logical_and", "Where neither a nor b is 0, as bool.", lambda a, b: (a != 0) & (b != 0)
)
logical_or = composed(
    "logical_or", "Where a or b is not 0, as bool.", lambda a, b: (a != 0) | (b != 0)
)
bitwise_not = composed(
    "bitwise_not",
    "~a of integers, or not a of bool. TypeError for floats.",
    lambda a: const(~a.cached_data),
)
bitwise_and = composed(
    "bitwise_and",
    "a & b of integers or bool; of two bool a bool. TypeError for floats.",
    lambda a, b: a & b,
)
bitwise_or = composed(
    "bitwise_or",
    "a | b of integers or bool; of two bool a bool. TypeError for floats.",
    lambda a, b: a | b,
)
bitwise_xor = composed(
    "bitwise_xor",
    "a ^ b of integers or bool; of two bool a bool. TypeError for floats.",
    lambda a, b: a ^ b,
)
eq = composed("eq", "Where a is b, as bool.", lambda a, b: a == b)
ne = composed("ne", "Where a is not b, as bool.", lambda a, b: a != b)
lt = composed("lt", "Where a is below b, as bool.", lambda a, b: a < b)
le = composed("le", "Where a is at most b, as bool.", lambda a, b: a <= b)
gt = composed("gt", "Where a is above b, as bool.", lambda a, b: a > b)
ge = composed("ge", "Where a is at least b, as bool.", lambda a, b: a >= b)


def round(a: Tensor, decimals: int = 0) -> Tensor:
    """The nearest whole number, or that of so many decimals, halves to even. The gradient is 0."""
    if decimals == 0 or decimals > 0 and a.dtype not in FLOATS:
        return _round(a)
    unit = 10 ** abs(decimals)
    if a.dtype in FLOATS:
        wide = astype(a, "float32")
        wide = _round(wide * unit) / unit if decimals > 0 else _round(wide / unit) * unit
        return astype(wide, a.dtype)
    wide = astype(a, "int64")
    count, rest = wide // unit, wide % unit
    up = (rest * 2 > unit) | ((rest * 2 == unit) & (count % 2 != 0))
    return astype((count + up) * unit, a.dtype)


def trunc(a: Tensor) -> Tensor:
    """The nearest whole number towards 0. The gradient is 0."""
    return where(a < 0, ceil(a), floor(a))


def nan_to_num(
    a: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """`a` with other numbers for NaN, inf and -inf, by default 0 and the largest of the dtype; the
    gradient there is 0.

    >>> print(ndl.nan_to_num(ndl.Tensor([np.nan, 1, -np.inf]), neginf=-9))
    [ 0.  1. -9.]
    """
    if a.dtype not in FLOATS:
        return a.clone()
    most = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}.get(a.dtype, LARGEST)
    for found, number, default in (
        (isnan(a), nan, 0.0),
        (a == math.inf, posinf, most),
        (a == -math.inf, neginf, -most),
    ):
        a = where(found, default if number is None else number, a)
    return a


def leaky_relu(a: Tensor, negative_slope: float = 0.01) -> Tensor:
    """a above 0, negative_slope a elsewhere (Maas et al. 2013).

    >>> print(ndl.ops.leaky_relu(ndl.Tensor([-2, 3]), 0.5))
    [-1.  3.]
    """
    return where(a > 0, a, a * negative_slope)


def elu(a: Tensor, alpha: float = 1.0) -> Tensor:
    """a above 0, alpha (e^a - 1) elsewhere (Clevert et al. 2016)."""
    return where(a > 0, a, expm1(clip(a, max=0)) * alpha)


@differentiable("Clip", lambda g, x, low, high: keep(g, ((x >= low) & (x <= high)).cached_data))
def _clip(a: NDArray, low: float, high: float) -> NDArray:
    return _C.minimum(_C.maximum(a, low), high)


def clip(a: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """a limited to [min, max], numbers or Tensors, None for no limit. The gradient is 0 outside and
    1 at a limit that is a number; one that is a Tensor takes half of it there.

    >>> print(ndl.clip(ndl.Tensor([-2, 0.5, 3]), 0, 1))
    [0.  0.5 1. ]
    """
    numbers = all(x is None or isinstance(x, Number) for x in (min, max))
    if numbers and a.dtype in FLOATS:
        return _clip(a, -math.inf if min is None else min, math.inf if max is None else max)
    if min is None and max is None:
        return a.clone()
    a = a if min is None else maximum(a, min)
    return a if max is None else minimum(a, max)


def lerp(a: Tensor, b: Tensor, weight: Tensor | float) -> Tensor:
    """a + weight (b - a), of integers in float32.

    >>> print(ndl.lerp(ndl.Tensor([0, 2]), ndl.Tensor([4, 2]), 0.25))
    [1. 2.]
    """
    a = as_floats(a)
    return a + (b - a) * weight


# ---- truth values and bits, outside of the graph -------------------------------------------------


def isfinite(a: Tensor) -> Tensor:
    """True where a is neither infinite nor NaN."""
    if a.dtype not in FLOATS:
        return const(full(a.shape, True, "bool", a.device))
    return const(_C.less(_C.absolute(a.cached_data), math.inf))


def isinf(a: Tensor) -> Tensor:
    """Where a is inf or -inf, as bool."""
    return logical_not(bitwise_or(isfinite(a), isnan(a)))


def isclose(a: Tensor, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> Tensor:
    """Where |a - b| <= atol + rtol |b|, or a and b are equal, as bool."""
    b = beside(b, a) if isinstance(b, NUMBER) else a._operand(b)
    off = maximum(a, b) - minimum(a, b)  # also of unsigned integers
    return (a == b) | ((off <= absolute(b * rtol) + atol) & isfinite(b))


def allclose(a: Tensor, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """True where isclose is for each element; waits for the device."""
    return bool(isclose(a, b, rtol, atol).all())


def equal(a: Tensor, b: Any) -> bool:
    """True if a and b have one shape and the same elements: PyTorch's equal, NumPy's array_equal;
    waits for the device."""
    return a.shape == np.shape(b) and bool((a == b).all())


# ---- a kernel for the gradient -------------------------------------------------------------------


def tanh_form(op: str, approximate: str) -> int:
    """Return 1 for "tanh", 0 for "none", the erf form. ValueError for anything else."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{op}: approximate must be 'none' or 'tanh', not {approximate!r}")
    return int(approximate == "tanh")


class GELU(FusedOp):
    reads_result = False

    def __init__(self, approximate: str) -> None:
        self.tanh = tanh_form("gelu", approximate)

    def compute(self, x: NDArray) -> NDArray:
        return _C.gelu_tanh(x) if self.tanh else _C.gelu(x)

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> tuple:
        x = node.inputs[0].cached_data
        return (_C.gelu_tanh_bwd(x, dout) if self.tanh else _C.gelu_bwd(x, dout),)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit (Hendrycks and Gimpel 2016): x Phi(x) with the exact normal
    distribution function, or with its tanh approximation.

    >>> print(ndl.ops.gelu(ndl.Tensor([-1, 0, 1])).numpy().round(4))
    [-0.1587  0.      0.8413]
    """
    return GELU(approximate)(x)
