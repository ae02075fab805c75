"""Ops that are one another's gradients: broadcasting and summing, reshaping, casting, moving. Those
of all other families use them to bring a gradient back to the shape and dtype of its operand."""

from __future__ import annotations

from collections.abc import Sequence

from needle._C import Device, NDArray
from needle.autograd.tensor import FLOATS, Tensor
from needle.backend_ndarray import Axes
from needle.ops.common import LinearMap, View, fixed_axes, kept_shape, normal_axes


def reduced_to(grad: Tensor, like: Tensor) -> Tensor:
    """`grad` summed over the axes that were broadcast from the shape of `like`, in its dtype."""
    shape = like.shape
    if grad.shape != shape:
        extra = len(grad.shape) - len(shape)
        if extra < 0:  # of a value that was assigned without its first axes, of size 1
            return reduced_to(reshape(grad, (1,) * -extra + grad.shape), like)
        axes = tuple(range(extra)) + tuple(
            i + extra for i, n in enumerate(shape) if n == 1 and grad.shape[i + extra] != 1
        )
        if axes:
            grad = summation(grad, axes)
        if grad.shape != shape:
            grad = reshape(grad, shape)
    if grad.dtype != like.dtype and like.dtype in FLOATS:
        grad = astype(grad, like.dtype)
    return grad


def as_floats(a: Tensor) -> Tensor:
    """`a`, or integers and bool as float32."""
    return a if a.dtype in FLOATS else astype(a, "float32")


def spread(a: Tensor, shape: Sequence[int], axes: Sequence[int]) -> Tensor:
    """Broadcast a reduced Tensor back over the reduced axes."""
    kept = kept_shape(shape, axes)
    if a.shape != kept:
        a = reshape(a, kept)
    return broadcast_to(a, shape) if kept != tuple(shape) else a


class Reshape(View):
    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def compute(self, a: NDArray) -> NDArray:
        return a.reshape(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return reshape(out_grad, node.inputs[0].shape)


def reshape(a: Tensor, shape: int | Sequence[int]) -> Tensor:
    """The same elements in another shape; one -1 is worked out.

    >>> ndl.reshape(ndl.ones(4, 3), (2, -1)).shape
    (2, 6)
    """
    return Reshape((shape,) if isinstance(shape, int) else shape)(a)


class BroadcastTo(View):
    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def compute(self, a: NDArray) -> NDArray:
        return a.broadcast_to(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return reduced_to(out_grad, node.inputs[0])


def broadcast_to(a: Tensor, shape: Sequence[int]) -> Tensor:
    """`a` stretched to `shape`, by NumPy's rules.

    >>> x = ndl.Tensor([[1], [2]])
    >>> ndl.broadcast_to(x, (2, 3)).sum().backward()
    >>> print(x.grad)
    [[3.]
     [3.]]
    """
    return BroadcastTo(shape)(a)


class Summation(LinearMap):
    def __init__(self, axes: Axes = None, keepdims: bool = False) -> None:
        self.axes = fixed_axes(axes)
        self.keepdims = keepdims

    def compute(self, a: NDArray) -> NDArray:
        axes = normal_axes("summation", self.axes, a.ndim)
        return a.sum(axis=axes, keepdims=self.keepdims)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        a = node.inputs[0]
        return spread(out_grad, a.shape, normal_axes("summation", self.axes, len(a.shape)))


def summation(a: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The sum over `axes` (None: all axes), which disappear, or with keepdims stay with size 1.

    >>> print(ndl.summation(ndl.Tensor([[1, 2], [3, 4]]), axes=1))
    [3. 7.]
    """
    return Summation(axes, keepdims)(a)


class AsType(LinearMap):
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def compute(self, a: NDArray) -> NDArray:
        return a.astype(self.dtype)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return reduced_to(out_grad, node.inputs[0])


def astype(a: Tensor, dtype: str) -> Tensor:
    """a in another dtype.

    >>> ndl.ops.astype(ndl.Tensor([1.5]), "bfloat16").dtype
    'bfloat16'
    """
    return AsType(dtype)(a)


class ToDevice(LinearMap):
    def __init__(self, device: Device) -> None:
        self.device = device

    def compute(self, a: NDArray) -> NDArray:
        return a.to(self.device)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return to_device(out_grad, node.inputs[0].device)


def to_device(a: Tensor, device: Device) -> Tensor:
    """a on another device; the gradient comes back to this one."""
    return ToDevice(device)(a)


class Contiguous(LinearMap):
    def compute(self, a: NDArray) -> NDArray:
        return a.compact()

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return out_grad


def contiguous(a: Tensor) -> Tensor:
    """a with its elements one after the other in memory: copied, where they are not."""
    return Contiguous()(a)
