"""Methods of a Tensor by NumPy's names: operators, indexing, reductions, views. Each calls
needle.ops, which documents the maths and the arguments. needle.ops imports this module, and sets
`ops` here when it is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import Any, Generic, TypeVar

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.backend_ndarray import DTYPES, Axes, check_device_name, choose_device

Result = TypeVar("Result")
ops: Any = None


def define_operators(module: Any) -> None:
    """From now on +, @, .sum() and the like of Tensors call the functions of `module`."""
    global ops
    ops = module


def _one_of(op: str, axes: Any, axis: Any) -> Any:
    """The one of two words for the same that was given."""
    if axes is not None and axis is not None:
        raise TypeError(f"{op}: axes and axis are the same: give one of them")
    return axis if axes is None else axes


class Operators(Generic[Result]):
    """The base of Tensor, which is its Result and gives it array and operands.

    Comparisons are elementwise and give bool Tensors outside of the graph; with what is no
    operand, as None, `==` is False. A Tensor is hashed by its identity: dicts and sets find it.

    >>> x = ndl.Tensor([[1, 2, 3], [4, 5, 6]])
    >>> print(x[:, -1], x[x > 4], x.T.shape, len(x))
    [3. 6.] [5. 6.] (3, 2) 2
    >>> x[0].sum().backward()
    >>> print(x.grad)
    [[1. 1. 1.]
     [0. 0. 0.]]
    """

    cached_data: Any
    _operand: Callable[[Any], Result]
    from_ndarray: Callable[..., Result]

    # -- arithmetic

    def __add__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.add_scalar(self, other)
        return ops.add(self, self._operand(other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.multiply_scalar(self, other)
        return ops.multiply(self, self._operand(other))

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.subtract_scalar(self, other)  # type: ignore[operator]
        return ops.subtract(self, self._operand(other))

    def __rsub__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.add_scalar(ops.negate(self), other)
        return ops.subtract(self._operand(other), self)

    def __truediv__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.divide_scalar(self, other)
        return ops.divide(self, self._operand(other))

    def __rtruediv__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.scalar_divide(other, self)
        return ops.divide(self._operand(other), self)

    def __pow__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.power_scalar(self, other)
        return ops.power(self, self._operand(other))

    def __rpow__(self, other: Any) -> Result:
        if isinstance(other, Number):
            return ops.scalar_power(other, self)
        return ops.power(self._operand(other), self)

    def __neg__(self) -> Result:
        return ops.negate(self)

    def __matmul__(self, other: Any) -> Result:
        return ops.matmul(self, self._operand(other))

    def __rmatmul__(self, other: Any) -> Result:
        return ops.matmul(self._operand(other), self)

    def matmul(self, other: Result) -> Result:
        return ops.matmul(self, other)

    def exp(self) -> Result:
        return ops.exp(self)

    def log(self) -> Result:
        return ops.log(self)

    def sqrt(self) -> Result:
        return ops.sqrt(self)

    # -- comparisons

    def _compared(self, compare: Callable[[Any, Any], NDArray], other: Any) -> Any:
        if isinstance(other, (Number, np.bool_)):
            return self.from_ndarray(compare(self.cached_data, other))
        if isinstance(other, (Operators, NDArray, np.ndarray, list)):
            beside: Any = self._operand(other)
            return self.from_ndarray(compare(self.cached_data, beside.cached_data))
        return NotImplemented

    def __eq__(self, other: Any) -> Result:  # type: ignore[override]
        return self._compared(_C.equal, other)

    def __ne__(self, other: Any) -> Result:  # type: ignore[override]
        return self._compared(_C.not_equal, other)

    def __lt__(self, other: Any) -> Result:
        return self._compared(_C.less, other)

    def __le__(self, other: Any) -> Result:
        return self._compared(_C.less_equal, other)

    def __gt__(self, other: Any) -> Result:
        return self._compared(_C.greater, other)

    def __ge__(self, other: Any) -> Result:
        return self._compared(_C.greater_equal, other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        """True if the one value is not 0. ValueError for several: `(a == b)` holds one each."""
        return bool(self.cached_data)

    # -- elements

    def __getitem__(self, index: Any) -> Result:
        """By NumPy's rules (ops.get_item): `x[0]` is a row, `x[:, [2, 0]]` two columns."""
        return ops.get_item(self, index)

    def __len__(self) -> int:
        return len(self.cached_data)

    def __iter__(self) -> Iterator[Result]:
        return (self[i] for i in range(len(self)))

    def index_select(self, axis: int, indices: Any) -> Result:
        """The slices at `indices` along `axis`."""
        return ops.index_select(self, axis, indices)

    # -- reductions over `axes` (None: all), which disappear, or with keepdims stay with size 1;
    # `axis` is NumPy's word for it

    def sum(self, axes: Axes = None, keepdims: bool = False, *, axis: Axes = None) -> Result:
        return ops.summation(self, _one_of("sum", axes, axis), keepdims)

    def mean(self, axes: Axes = None, keepdims: bool = False, *, axis: Axes = None) -> Result:
        return ops.mean(self, _one_of("mean", axes, axis), keepdims)

    def max(self, axes: Axes = None, keepdims: bool = False, *, axis: Axes = None) -> Result:
        return ops.max(self, _one_of("max", axes, axis), keepdims)

    def argmax(
        self, axis: int | None = None, keepdims: bool = False, *, axes: int | None = None
    ) -> Result:
        """Index of the first largest element: int64, without gradient."""
        axis = _one_of("argmax", axes, axis)
        return self.from_ndarray(self.cached_data.argmax(axis=axis, keepdims=keepdims))

    # -- shape, dtype, device

    def broadcast_to(self, shape: Sequence[int]) -> Result:
        return ops.broadcast_to(self, shape)

    def reshape(self, *shape: Any) -> Result:
        """The same elements in another shape: `x.reshape((2, 3))` or `x.reshape(2, 3)`."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        return ops.reshape(self, shape)

    def transpose(self, axes: Sequence[int] | None = None) -> Result:
        """Swap the two `axes` (the last two by default)."""
        return ops.transpose(self, axes)

    @property
    def T(self) -> Result:
        """All axes in the opposite order."""
        return ops.permute(self, range(self.cached_data.ndim)[::-1])

    def contiguous(self) -> Result:
        """The elements one after the other in memory: itself where they are."""
        return self if self.is_contiguous() else ops.contiguous(self)  # type: ignore[return-value]

    def is_contiguous(self) -> bool:
        """True if the elements lie in memory in the order of their indices, without gaps."""
        return self.cached_data.is_compact()

    def astype(self, dtype: str) -> Result:
        """The values in another dtype; gradients come back in this one."""
        return ops.astype(self, dtype)

    def to(self, device: Device | str) -> Result:
        """The values on another device, `ndl.cuda()` or "cuda:0", or by the name of a dtype in that
        one; gradients come back to where these are."""
        if not isinstance(device, str):
            return ops.to_device(self, device)
        if device in DTYPES:
            return ops.astype(self, device)
        try:
            check_device_name(device)
        except ValueError:
            raise ValueError(
                f"to: must name a device (cpu, cuda, cuda:INDEX) or a dtype ({', '.join(DTYPES)}), "
                f"not {device!r}"
            ) from None
        return ops.to_device(self, choose_device(device))
