"""Elementwise functions by NumPy's and PyTorch's names: of one operand from a table of kernels and
derivatives; maximum, minimum, clip, floor_divide, remainder; bits and truth values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.array_methods import bitwise, inverted
from needle.autograd import FLOATS, Tensor, TensorOp
from needle.backend_ndarray import full, zeros
from needle.ops.broadcast import reduced_to
from needle.ops.common import LARGEST, const
from needle.ops.elementwise import (
    Keep,
    add,
    add_scalar,
    divide,
    divide_scalar,
    exp,
    log,
    multiply,
    multiply_scalar,
    negate,
    scalar_divide,
    sigmoid,
    subtract,
    where,
)

# ---- one operand ---------------------------------------------------------------------------------

SLOPES: dict[str, Callable[[Tensor], Tensor] | None] = {}  # kernel: derivative; None: 0


class Pointwise(TensorOp):
    """A kernel of one operand by its name in ops.def."""

    reads_result = False

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.reads_inputs = SLOPES[kernel] is not None

    def compute(self, a: NDArray) -> NDArray:
        if self.kernel in ("floor", "ceil", "round") and a.dtype not in FLOATS:
            return a.copy()
        return getattr(_C, self.kernel)(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        slope = SLOPES[self.kernel]
        if slope is None:
            return const(zeros(out_grad.shape, out_grad.dtype, out_grad.device))
        return multiply(out_grad, slope(node.inputs[0]))


def _function(
    kernel: str, doc: str, slope: Callable[[Tensor], Tensor] | None, name: str = ""
) -> Callable[[Tensor], Tensor]:
    """The function of a kernel, and its line in SLOPES."""
    SLOPES[kernel] = slope

    def function(a: Tensor) -> Tensor:
        return Pointwise(kernel)(a)

    function.__name__ = function.__qualname__ = name or kernel
    function.__doc__ = doc
    return function


def _silu_slope(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return multiply(s, add_scalar(multiply(x, add_scalar(negate(s), 1.0)), 1.0))


abs = _function("absolute", "|a|; the gradient at 0 is 0.", lambda x: sign(x), "abs")
sign = _function("sign", "-1, 0 or 1; NaN for NaN. The gradient is 0.", None)
floor = _function("floor", "The largest whole number up to a. The gradient is 0.", None)
ceil = _function("ceil", "The smallest whole number from a on. The gradient is 0.", None)
_round = _function("round", "", None)
sin = _function("sin", "The sine of radians.", lambda x: cos(x))
cos = _function("cos", "The cosine of radians.", lambda x: negate(sin(x)))
erf = _function(
    "erf",
    "The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to a.",
    lambda x: multiply_scalar(exp(negate(multiply(x, x))), 2 / math.sqrt(math.pi)),
)
log1p = _function(
    "log1p", "log(1 + a), exact for small a.", lambda x: scalar_divide(1.0, add_scalar(x, 1.0))
)
expm1 = _function("expm1", "e^a - 1, exact for small a.", lambda x: exp(x))
rsqrt = _function("rsqrt", "1 / sqrt(a).", lambda x: multiply_scalar(divide(rsqrt(x), x), -0.5))
silu = _function("silu", "a sigmoid(a) (Elfwing et al. 2017), also called swish.", _silu_slope)
softplus = _function("softplus", "log(1 + e^a), without overflow.", lambda x: sigmoid(x))


def round(a: Tensor, decimals: int = 0) -> Tensor:
    """The nearest whole number, or that of so many decimals, halves to even. The gradient is 0."""
    if decimals == 0 or a.dtype not in FLOATS:
        return _round(a)
    return divide_scalar(_round(multiply_scalar(a, 10.0**decimals)), 10.0**decimals)


def trunc(a: Tensor) -> Tensor:
    """The nearest whole number towards 0. The gradient is 0."""
    return where(a < 0, ceil(a), floor(a))


def tan(a: Tensor) -> Tensor:
    """The tangent of radians."""
    return divide(sin(a), cos(a))


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
    return where(a > 0, a, multiply_scalar(a, negative_slope))


def elu(a: Tensor, alpha: float = 1.0) -> Tensor:
    """a above 0, alpha (e^a - 1) elsewhere (Clevert et al. 2016)."""
    return where(a > 0, a, multiply_scalar(expm1(clip(a, max=0)), alpha))


def reciprocal(a: Tensor) -> Tensor:
    """1 / a."""
    return scalar_divide(1.0, a)


def log2(a: Tensor) -> Tensor:
    """The logarithm to base 2."""
    return multiply_scalar(log(a), 1 / math.log(2))


def log10(a: Tensor) -> Tensor:
    """The logarithm to base 10."""
    return multiply_scalar(log(a), 1 / math.log(10))


def square(a: Tensor) -> Tensor:
    """a * a, in the dtype of a."""
    return multiply(a, a)


# ---- two operands --------------------------------------------------------------------------------


def _operands(op: str, a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Both as Tensors; a number takes the other's dtype, a float beside integers float32."""
    beside = a if isinstance(a, Tensor) else b
    if not isinstance(beside, Tensor):
        raise TypeError(f"{op}: a or b must be a Tensor")

    def tensor(x: Any) -> Tensor:
        if not isinstance(x, Number):
            return beside._operand(x)
        dtype = beside.dtype
        if dtype not in FLOATS and isinstance(x, float):
            dtype = "float32"
        elif dtype == "bool" and not isinstance(x, bool):
            dtype = "int32"
        return const(full((), x, dtype, beside.device))  # type: ignore[arg-type]

    return tensor(a), tensor(b)


class Extremum(TensorOp):
    """The larger or the smaller operand; equal ones share the gradient."""

    reads_result = False

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        out = getattr(_C, self.kernel)(a, b)
        return out.astype("bool") if a.dtype == b.dtype == "bool" else out

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, b = node.inputs
        x, y = a.cached_data, b.cached_data
        half = _C.multiply(_C.equal(x, y).astype(out_grad.dtype), 0.5)
        shared = multiply(out_grad, const(_C.subtract(1.0, half)))
        lost = [_C.less(x, y), _C.greater(x, y)][:: 1 if self.kernel == "maximum" else -1]
        return tuple(
            reduced_to(Keep(_C.equal(off, 0))(shared), operand)
            for off, operand in zip(lost, (a, b))
        )


def maximum(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The larger of a and b elementwise, broadcasting; NaN wins. Equal ones share the gradient.

    >>> print(ndl.maximum(ndl.Tensor([-1, 5]), 0))
    [0. 5.]
    """
    return Extremum("maximum")(*_operands("maximum", a, b))


def minimum(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The smaller of a and b elementwise, broadcasting; NaN wins. Equal ones share the gradient."""
    return Extremum("minimum")(*_operands("minimum", a, b))


class Clip(TensorOp):
    reads_result = False

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def compute(self, a: NDArray) -> NDArray:
        return _C.minimum(_C.maximum(a, self.low), self.high)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        x = node.inputs[0].cached_data
        inside = _C.multiply(_C.greater_equal(x, self.low), _C.less_equal(x, self.high))
        return Keep(inside)(out_grad)


def clip(a: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """a limited to [min, max], numbers or Tensors, None for no limit. The gradient is 0 outside and
    1 at a limit that is a number; one that is a Tensor takes half of it there.

    >>> print(ndl.clip(ndl.Tensor([-2, 0.5, 3]), 0, 1))
    [0.  0.5 1. ]
    """
    numbers = all(x is None or isinstance(x, Number) for x in (min, max))
    if numbers and a.dtype in FLOATS:
        return Clip(-math.inf if min is None else min, math.inf if max is None else max)(a)
    a = a if min is None else maximum(a, min)
    return a if max is None else minimum(a, max)


class Remainder(TensorOp):
    reads_result = False

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        return _C.remainder(a, b)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, b = node.inputs
        whole = const(_C.floor_divide(a.cached_data, b.cached_data))
        return reduced_to(out_grad, a), reduced_to(negate(multiply(out_grad, whole)), b)


def remainder(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a % b, with the sign of b, as Python and NumPy have it; integers % 0 are 0, floats NaN.

    >>> print(ndl.remainder(ndl.Tensor([5, -5]), 3))
    [2. 1.]
    """
    return Remainder()(*_operands("remainder", a, b))


def floor_divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a // b, rounded down; integers // 0 are 0. Outside of the graph.

    >>> print(ndl.floor_divide(ndl.Tensor([5, -5]), 3))
    [ 1. -2.]
    """
    return const(_C.floor_divide(*(x.cached_data for x in _operands("floor_divide", a, b))))


def lerp(a: Tensor, b: Tensor, weight: Tensor | float) -> Tensor:
    """a + weight (b - a).

    >>> print(ndl.lerp(ndl.Tensor([0, 2]), ndl.Tensor([4, 2]), 0.25))
    [1. 2.]
    """
    return add(a, multiply(subtract(b, a), weight))


# ---- truth values and bits, outside of the graph -------------------------------------------------


def isnan(a: Tensor) -> Tensor:
    """True where a is NaN."""
    return const(_C.not_equal(a.cached_data, a.cached_data))


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
    near = abs(subtract(a, b)) <= abs(multiply(b, rtol)) + atol
    return (a == b) | (near & isfinite(b))


def allclose(a: Tensor, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """True where isclose is for each element; waits for the device."""
    return bool(isclose(a, b, rtol, atol).all())


def equal(a: Tensor, b: Any) -> bool:
    """True if a and b have one shape and the same elements: PyTorch's equal, NumPy's array_equal;
    waits for the device."""
    return a.shape == np.shape(b) and bool((a == b).all())


eq, ne, lt, le, gt, ge = (
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge
)  # fmt: skip


def logical_and(a: Tensor, b: Any) -> Tensor:
    """Where neither a nor b is 0, as bool."""
    return (a != 0) & (b != 0)


def logical_or(a: Tensor, b: Any) -> Tensor:
    """Where a or b is not 0, as bool."""
    return (a != 0) | (b != 0)


def logical_not(a: Tensor) -> Tensor:
    """Where a is 0, as bool."""
    return a == 0


def _data(a: Tensor, x: Any) -> Any:
    return x if isinstance(x, Number) else a._operand(x).cached_data


def bitwise_and(a: Tensor, b: Any) -> Tensor:
    """a & b of integers or bool; of two bool a bool. TypeError for floats."""
    return const(bitwise("bitwise_and", a.cached_data, _data(a, b)))


def bitwise_or(a: Tensor, b: Any) -> Tensor:
    """a | b of integers or bool; of two bool a bool. TypeError for floats."""
    return const(bitwise("bitwise_or", a.cached_data, _data(a, b)))


def bitwise_xor(a: Tensor, b: Any) -> Tensor:
    """a ^ b of integers or bool; of two bool a bool. TypeError for floats."""
    return const(bitwise("bitwise_xor", a.cached_data, _data(a, b)))


def bitwise_not(a: Tensor) -> Tensor:
    """~a of integers, or not a of bool. TypeError for floats."""
    return const(inverted(a.cached_data))
