"""Elementwise ops. Two operands broadcast like NumPy; gradients are summed back to each operand's
shape and dtype. Their gradients are built from ops, so that they can be differentiated again,
except for gelu's, which is a kernel of its own."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import FLOATS, Accumulators, FusedOp, Tensor, TensorOp
from needle.backend_ndarray import full
from needle.ops.broadcast import reduced_to
from needle.ops.common import const
from needle.ops.indexing import nonzero_places

NUMBERS = (int, float, np.generic)

# ---- two operands --------------------------------------------------------------------------------


def _with_numbers(combine: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Let a function of two Tensors also take a number, which `combine` takes."""

    def decorate(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
        @functools.wraps(function)
        def called(a: Any, b: Any) -> Tensor:
            is_number = isinstance(a, NUMBERS) or isinstance(b, NUMBERS)
            return combine(a, b) if is_number else function(a, b)

        return called

    return decorate


class EWiseAdd(TensorOp):
    reads_inputs = reads_result = False

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        return _C.add(a, b)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, b = node.inputs
        return reduced_to(out_grad, a), reduced_to(out_grad, b)


@_with_numbers(operator.add)
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b.

    >>> print(ndl.add(ndl.Tensor([[1, 2], [3, 4]]), ndl.Tensor([10, 20])))
    [[11. 22.]
     [13. 24.]]
    """
    return EWiseAdd()(a, b)


class EWiseSub(TensorOp):
    reads_inputs = reads_result = False

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        return _C.subtract(a, b)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, b = node.inputs
        return reduced_to(out_grad, a), reduced_to(negate(out_grad), b)


@_with_numbers(operator.sub)
def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a - b."""
    return EWiseSub()(a, b)


class EWiseMul(TensorOp):
    reads_result = False

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        return _C.multiply(a, b)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, b = node.inputs
        return (
            reduced_to(multiply(out_grad, b), a) if a.requires_grad else None,
            reduced_to(multiply(out_grad, a), b) if b.requires_grad else None,
        )


@_with_numbers(operator.mul)
def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a * b."""
    return EWiseMul()(a, b)


class EWiseDiv(TensorOp):
    reads_result = False

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        return _C.divide(a, b)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, b = node.inputs
        da = divide(out_grad, b)
        # a / b first: b * b would overflow where the quotient does not
        db = negate(multiply(da, divide(a, b))) if b.requires_grad else None
        return (
            reduced_to(da, a) if a.requires_grad else None,
            reduced_to(db, b) if b.requires_grad else None,
        )


@_with_numbers(operator.truediv)
def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b.

    >>> print(ndl.divide(ndl.Tensor([1, 2]), ndl.Tensor([4, 4])))
    [0.25 0.5 ]
    """
    return EWiseDiv()(a, b)


class EWisePow(TensorOp):
    reads_result = False

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        return _C.power(a, b)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        a, b = node.inputs
        base, exponent = a.cached_data, b.cached_data
        zero_base = _C.equal(base, 0.0)
        da = db = None
        if a.requires_grad:
            # b a^(b - 1); where a and b are both 0 the exponent is raised to 0: 0, not 0 * inf
            lift = const(_C.multiply(zero_base, _C.equal(exponent, 0.0)))
            da = multiply(multiply(out_grad, b), power(a, add(add_scalar(b, -1), lift)))
            da = reduced_to(da, a)
        if b.requires_grad:
            # a^b log a; where a is 0 and b is not negative the logarithm is taken of 1: 0, not
            # 0 * -inf
            lift = const(_C.multiply(zero_base, _C.greater_equal(exponent, 0.0)))
            db = reduced_to(multiply(multiply(out_grad, power(a, b)), log(add(a, lift))), b)
        return da, db


@_with_numbers(operator.pow)
def power(a: Tensor, b: Tensor) -> Tensor:
    """a ** b. The gradient for b is NaN where a is negative, as the logarithm of a is.

    >>> print(ndl.power(ndl.Tensor([2, 3]), ndl.Tensor([3, 2])))
    [8. 9.]
    """
    return EWisePow()(a, b)


BITS = {"float32": "int32", "bfloat16": "uint16", "float16": "uint16", "bool": "uint8"}


def _kept_bits(a: NDArray, condition: NDArray) -> NDArray:
    return _C.multiply(a.view(BITS.get(a.dtype, a.dtype)), condition)


class Keep(TensorOp):
    """a where the condition holds, else 0, also in the place of inf and NaN."""

    reads_inputs = reads_result = False

    def __init__(self, condition: NDArray) -> None:
        self.condition = condition  # bool

    def compute(self, a: NDArray) -> NDArray:
        return _kept_bits(a, self.condition).view(a.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return reduced_to(Keep(self.condition)(out_grad), node.inputs[0])


class Where(Keep):
    """a where the condition holds, else b, without arithmetic: bits of one are added to zeros."""

    def compute(self, a: NDArray, b: NDArray) -> NDArray:
        dtype = _C.add(*(_C.empty((0,), x.dtype, x.device) for x in (a, b))).dtype
        if a.dtype == b.dtype:
            dtype = a.dtype
        pairs = zip((a, b), self._conditions())
        return _C.add(*(_kept_bits(x.astype(dtype), chosen) for x, chosen in pairs)).view(dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        return tuple(
            reduced_to(Keep(chosen)(out_grad), x) if x.requires_grad else None
            for x, chosen in zip(node.inputs, self._conditions())
        )

    def _conditions(self) -> tuple[NDArray, NDArray]:
        return self.condition, _C.equal(self.condition, 0)


def _beside(number: Any, x: Tensor) -> Tensor:
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
    beside = a if isinstance(a, Tensor) else b
    if not isinstance(beside, Tensor):
        device = condition.device if isinstance(condition, (Tensor, NDArray)) else _C.cpu()
        kind = {"f": "float32", "b": "bool"}.get(np.result_type(a, b).kind, "int64")
        beside = const(full((), 0, kind, device))
    a, b = (_beside(x, beside) if isinstance(x, Number) else x for x in (a, b))
    if isinstance(condition, Tensor):
        condition = condition.cached_data
    if not isinstance(condition, NDArray):
        condition = _C.array(condition, "bool", beside.device)
    return Where(condition if condition.dtype == "bool" else _C.not_equal(condition, 0))(a, b)


# ---- an operand and a number ---------------------------------------------------------------------


class _ScalarOp(TensorOp):
    def __init__(self, scalar: float) -> None:
        self.scalar = scalar.copy() if isinstance(scalar, np.ndarray) else scalar


class AddScalar(_ScalarOp):
    reads_inputs = reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.add(a, self.scalar)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return reduced_to(out_grad, node.inputs[0])


def add_scalar(a: Tensor, scalar: float) -> Tensor:
    """a + scalar."""
    return AddScalar(scalar)(a)


class SubScalar(AddScalar):
    def compute(self, a: NDArray) -> NDArray:
        return _C.subtract(a, self.scalar)


def subtract_scalar(a: Tensor, scalar: float) -> Tensor:
    """a - scalar; not a + -scalar, which is out of bounds for an unsigned dtype."""
    return SubScalar(scalar)(a)


class MulScalar(_ScalarOp):
    reads_inputs = reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.multiply(a, self.scalar)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return reduced_to(multiply_scalar(out_grad, self.scalar), node.inputs[0])


def multiply_scalar(a: Tensor, scalar: float) -> Tensor:
    """a * scalar."""
    return MulScalar(scalar)(a)


class DivScalar(_ScalarOp):
    reads_inputs = reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.divide(a, self.scalar)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return reduced_to(divide_scalar(out_grad, self.scalar), node.inputs[0])


def divide_scalar(a: Tensor, scalar: float) -> Tensor:
    """a / scalar."""
    return DivScalar(scalar)(a)


class ScalarDiv(_ScalarOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.divide(self.scalar, a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0]
        return negate(multiply(divide(out_grad, a), scalar_divide(self.scalar, a)))


def scalar_divide(scalar: float, a: Tensor) -> Tensor:
    """scalar / a."""
    return ScalarDiv(scalar)(a)


class PowerScalar(_ScalarOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.power(a, self.scalar)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0]
        if self.scalar == 0:
            return const(full(a.shape, 0, out_grad.dtype, out_grad.device))
        if self.scalar == 1:
            return reduced_to(out_grad, a)
        factor = a if self.scalar == 2 else power_scalar(a, self.scalar - 1)
        return multiply(out_grad, multiply_scalar(factor, self.scalar))


def power_scalar(a: Tensor, scalar: float) -> Tensor:
    """a ** scalar. Integers stay integers where the power is a whole number of 0 or more.

    >>> x = ndl.Tensor([1, 2, 3])
    >>> ndl.power_scalar(x, 3).sum().backward()
    >>> print(x.grad)
    [ 3. 12. 27.]
    """
    if a.dtype in FLOATS or not isinstance(scalar, (int, np.integer)) or scalar < 0:
        return PowerScalar(scalar)(a)
    if scalar < 2:
        return a.clone() if scalar else add_scalar(multiply_scalar(a, 0), 1)
    even = power_scalar(multiply(a, a), scalar // 2)
    return multiply(even, a) if scalar % 2 else even


class ScalarPow(_ScalarOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.power(self.scalar, a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0]
        factor = -math.inf if self.scalar == 0 else math.nan
        if self.scalar > 0:
            factor = math.log(self.scalar)
        slope = multiply_scalar(multiply(out_grad, scalar_power(self.scalar, a)), factor)
        return where(a >= 0, 0.0, slope) if self.scalar == 0 else slope


def scalar_power(scalar: float, a: Tensor) -> Tensor:
    """scalar ** a."""
    return ScalarPow(scalar)(a)


# ---- one operand ---------------------------------------------------------------------------------


class Negate(TensorOp):
    reads_inputs = reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.negate(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return negate(out_grad)


def negate(a: Tensor) -> Tensor:
    """-a."""
    return Negate()(a)


class Log(TensorOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.log(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return divide(out_grad, node.inputs[0])


def log(a: Tensor) -> Tensor:
    """The natural logarithm.

    >>> print(ndl.log(ndl.Tensor([1, 0])))
    [  0. -inf]
    """
    return Log()(a)


class Exp(TensorOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.exp(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return multiply(out_grad, exp(node.inputs[0]))


def exp(a: Tensor) -> Tensor:
    """e ** a.

    >>> print(ndl.exp(ndl.Tensor([0, -np.inf])))
    [1. 0.]
    """
    return Exp()(a)


class Sqrt(TensorOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.sqrt(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return divide(out_grad, multiply_scalar(sqrt(node.inputs[0]), 2.0))


def sqrt(a: Tensor) -> Tensor:
    """The square root."""
    return Sqrt()(a)


class Tanh(TensorOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.tanh(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        y = tanh(node.inputs[0])
        return multiply(out_grad, add_scalar(negate(multiply(y, y)), 1.0))


def tanh(a: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return Tanh()(a)


class Sigmoid(TensorOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.sigmoid(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        y = sigmoid(node.inputs[0])
        return multiply(out_grad, multiply(y, add_scalar(negate(y), 1.0)))


def sigmoid(a: Tensor) -> Tensor:
    """1 / (1 + e^-a)."""
    return Sigmoid()(a)


class ReLU(TensorOp):
    reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return _C.relu(a)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        off = _C.less_equal(node.inputs[0].cached_data, 0.0)  # not at NaN
        return Keep(_C.equal(off, 0))(out_grad)


def relu(a: Tensor) -> Tensor:
    """max(a, 0); the gradient at 0 is 0.

    >>> print(ndl.relu(ndl.Tensor([-1, 2])))
    [0. 2.]
    """
    return ReLU()(a)


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

    def backward(self, dout: NDArray, node: Tensor, accumulators: Accumulators) -> tuple:
        x = node.inputs[0].cached_data
        return (_C.gelu_tanh_bwd(x, dout) if self.tanh else _C.gelu_bwd(x, dout),)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit (Hendrycks and Gimpel 2016): x Phi(x) with the exact normal
    distribution function, or with its tanh approximation.

    >>> print(ndl.ops.gelu(ndl.Tensor([-1, 0, 1])).numpy().round(4))
    [-0.1587  0.      0.8413]
    """
    return GELU(approximate)(x)
