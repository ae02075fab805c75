"""Methods of a Tensor that are more than a function of needle.ops: indexing, shapes, in place.

Those that are a function are made of the table in needle/ops/spellings.py. needle.ops imports this
module, and sets `ops` here when it is imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from needle._C import Device, NDArray
from needle.autograd.grad_mode import mode
from needle.autograd.graph import views_below
from needle.backend_ndarray import device_and_dtype, listed

Result = TypeVar("Result")
ops: Any = None


class Size(int):
    """The number of elements; called, as PyTorch has it, the shape or the size of an axis.

    >>> x = ndl.zeros(2, 3)
    >>> x.size, x.size(), x.size(-1)
    (6, (2, 3), 3)
    """

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator with the Tensor on the right."""
    return lambda self, other: function(other, self)


def updating(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that writes the result of a function into its Tensor."""
    return lambda self, *args, **words: self._updated(function(self, *args, **words))


def of_arrays(name: str) -> Callable[..., Any]:
    """Return the operator of arrays as one of Tensors, outside of the graph."""
    operator_of_arrays = getattr(NDArray, name)

    def method(self: Any, other: Any):
        beside = other.cached_data if isinstance(other, Operators) else other
        result = operator_of_arrays(self.cached_data, beside)
        return result if result is NotImplemented else self.from_ndarray(result)

    return method


def augmented(name: str) -> Callable[..., Any]:
    """Return an augmented assignment: the operator of arrays, or an assignment of the graph."""
    operator_of_arrays = getattr(NDArray, f"__i{name}__")

    def method(self: Any, other: Any):
        is_tensor = isinstance(other, Operators)
        in_graph = mode.enabled and (self.requires_grad or is_tensor and other.requires_grad)
        if in_graph:
            result = getattr(self, f"__{name}__")(other)
        else:
            result = operator_of_arrays(self.cached_data, other.cached_data if is_tensor else other)
        if result is NotImplemented:
            raise TypeError(f"in place: a Tensor cannot be combined with {type(other).__name__}")
        return self._updated(result) if in_graph else self

    return method


def cast(dtype: str) -> Callable[..., Any]:
    """Return the method that converts to a dtype."""
    return lambda self: ops.astype(self, dtype)


def _one_by_one(given: tuple) -> tuple:
    """Return whole numbers that were given one by one, or as one sequence."""
    return listed(given[0]) if len(given) == 1 else given


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
    shape: Any
    ndim: Any
    clone: Callable[[Any], Result]
    requires_grad: bool
    op: Any
    inputs: Any
    assigned: int
    _operand: Callable[[Any], Result]
    from_ndarray: Callable[..., Result]

    # -- operators

    def __pos__(self) -> Result:
        return self  # type: ignore[return-value]

    def __matmul__(self, other: Any) -> Result:
        return ops.matmul(self, self._factor(other))

    def __rmatmul__(self, other: Any) -> Result:
        return ops.matmul(self._factor(other), self)

    def _factor(self, other: Any) -> Any:
        """The operand of a product: of an array-like whole numbers as well."""
        beside: Any = self._operand(other)
        is_whole = beside is not other and "float" not in beside.dtype
        return ops.astype(beside, self.dtype) if is_whole else beside

    __hash__ = object.__hash__

    def _updated(self, new: Any) -> Any:
        """Write `new`, of this shape and a dtype that this one holds, and return this Tensor."""
        if new.shape != self.shape:
            raise ValueError(f"in place: the result is {new.shape}, but the Tensor {self.shape}")
        if "float" in new.dtype and "float" not in self.dtype:
            raise TypeError(
                f"in place: the result is {new.dtype}, which a Tensor of {self.dtype} cannot hold; "
                "write x = x ... or astype() first"
            )
        op, inputs = new.op, new.inputs
        if op is not None and any(
            x is self and op.reads_inputs and op.reads_input(i, new) for i, x in enumerate(inputs)
        ):  # the gradient is to read what is overwritten
            before = self.clone()
            new.inputs = tuple(before if x is self else x for x in inputs)
            new.operands = [x.cached_data for x in new.inputs]
        return self.fill_(new)

    def __contains__(self, element: Any) -> bool:
        """True where an element is equal, after broadcasting: `2.0 in x`."""
        found: Any = self == element
        return found is not False and bool(ops.any(found))

    def __bool__(self) -> bool:
        """True if the one value is not 0. ValueError for several: `(a == b)` holds one each."""
        return bool(self.cached_data)

    # -- elements: __getitem__ is ops.get_item, __setitem__ ops.set_item

    def __index__(self) -> int:
        """The one whole number, in ranges and slices: `data[i : i + 8]`. TypeError for a float."""
        return operator.index(self.cached_data.item())

    def __len__(self) -> int:
        return len(self.cached_data)

    def __iter__(self) -> Iterator[Result]:
        return (self[i] for i in range(len(self)))

    # -- as numbers, and for other libraries

    def item(self) -> float | int | bool:
        """The one value of a Tensor of size 1."""
        if self.size != 1:
            raise ValueError(f"Tensor.item: the size must be 1, but the shape is {self.shape}")
        return self.cached_data.numpy().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""
        return self.cached_data.numpy().tolist()

    def __format__(self, spec: str) -> str:
        """f"{loss:.4f}" formats the one value of a Tensor of size 1; without a format, as str()."""
        return format(self.item(), spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """NumPy's protocol: np.asarray(tensor) holds the values, in the host's memory."""
        return self.cached_data.__array__(dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """The protocol by which other libraries read this memory: torch.from_dlpack(tensor)."""
        return self.cached_data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.cached_data.__dlpack_device__()

    # -- shape, dtype, device

    def reshape(self, *shape: Any) -> Result:
        """The same elements in another shape: `x.reshape((2, 3))` or `x.reshape(2, 3)`."""
        return ops.reshape(self, _one_by_one(shape))

    def expand(self, *shape: Any) -> Result:
        """Broadcast to a shape, in which -1 keeps an axis: PyTorch's broadcast_to."""
        sizes = _one_by_one(shape)
        own = (-1,) * (len(sizes) - self.ndim) + self.shape
        return ops.broadcast_to(self, [m if n == -1 else n for n, m in zip(sizes, own)])

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Result, ...]:
        """PyTorch's split, ops.split_sizes: parts of so many elements, or of given sizes."""
        return ops.split_sizes(self, sizes, dim)

    def where(self, condition: Any, other: Any) -> Result:
        """This Tensor where the condition is true, which broadcasts, and `other` elsewhere."""
        return ops.where(condition, self, other)

    def masked_select(self, mask: Any) -> Result:
        """The elements where the mask is true, as one axis: `x[mask]`."""
        return self[mask]

    def view_as(self, other: Any) -> Result:
        """The same elements in the shape of another Tensor."""
        return self.reshape(other.shape)

    def expand_as(self, other: Any) -> Result:
        """Broadcast to the shape of another Tensor."""
        return ops.broadcast_to(self, other.shape)

    def type_as(self, other: Any) -> Result:
        """The values in the dtype of another Tensor."""
        return ops.astype(self, other.dtype)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether gradients flow to this leaf, and return it."""
        self.requires_grad = requires_grad
        return self

    def fill_(self, value: Any) -> Result:
        """Set all elements, in place, as `x[...] = value`."""
        self[...] = value
        return self  # type: ignore[return-value]

    def zero_(self) -> Result:
        """Set all elements to 0, in place: they depend on nothing then, as `w.grad.zero_()`."""
        self.fill_(0)
        base, _ = views_below(self)
        if base.op is not None and base.cached_data.size == self.cached_data.size:
            base.op, base.inputs, base.requires_grad = None, (), False
        return self  # type: ignore[return-value]

    def masked_fill(self, mask: Any, value: Any) -> Result:
        """`value` where the mask is true, which broadcasts, and this Tensor elsewhere."""
        return ops.where(mask, value, self)

    @property
    def size(self) -> Size:
        size = Size(self.cached_data.size)
        size.shape = self.shape
        return size

    def copy(self) -> Result:
        """NumPy's name of clone."""
        return self.clone()

    def dim(self) -> int:
        """The number of axes, as `ndim`."""
        return self.ndim

    def numel(self) -> int:
        """The number of elements, as `size`."""
        return self.size

    def element_size(self) -> int:
        """The bytes of one element."""
        return NDArray.make((1,), device=self.device, dtype=self.dtype).nbytes

    def stride(self, dim: int | None = None) -> Any:
        """The steps in memory along the axes, or along one, in elements."""
        strides = self.cached_data.strides
        return strides if dim is None else strides[dim]

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.cached_data.data_ptr

    nbytes = property(lambda self: self.cached_data.nbytes, doc="The bytes of all elements.")
    is_cuda = property(lambda self: self.device.name == "cuda", doc="True on a GPU.")
    grad_fn = property(lambda self: self.op, doc="The op that computed it, None for a leaf.")

    def t(self) -> Result:
        """The transpose, as `T`."""
        return self.T

    def transpose(self, *axes: Any) -> Result:
        """Swap two axes, the last two by default: `x.transpose((0, 1))` or `x.transpose(0, 1)`."""
        return ops.transpose(self, axes[0] if len(axes) == 1 else axes or None)

    def permute(self, *axes: Any) -> Result:
        """The axes in another order: `x.permute((2, 0, 1))` or `x.permute(2, 0, 1)`."""
        return ops.permute(self, _one_by_one(axes))

    @property
    def T(self) -> Result:
        """The transpose: all axes in the opposite order."""
        return ops.permute(self, range(self.cached_data.ndim)[::-1])

    @property
    def mT(self) -> Result:
        """The transpose of each matrix: the last two axes swapped."""
        return ops.transpose(self)

    def contiguous(self) -> Result:
        """The elements one after the other in memory: itself where they are."""
        return self if self.is_contiguous() else ops.contiguous(self)  # type: ignore[return-value]

    def is_contiguous(self) -> bool:
        """True if the elements lie in memory in the order of their indices, without gaps."""
        return self.cached_data.is_compact()

    def to(self, device: Device | str | None = None, dtype: str | None = None) -> Result:
        """The values on another device, `ndl.cuda()` or "cuda:0", or by the name of a dtype in that
        one; gradients come back to where these are."""
        device, dtype = device_and_dtype("to", device, dtype)
        moved: Any = self
        if device is not None or dtype is None:
            moved = ops.to_device(self, device)
        return moved if dtype is None else ops.astype(moved, dtype)

    def cpu(self) -> Result:
        """The values on the CPU."""
        return self.to("cpu")

    def cuda(self) -> Result:
        """The values on the first GPU."""
        return self.to("cuda")
