"""Methods of a Tensor by NumPy's names: operators, indexing, reductions, views. Each calls
needle.ops, which documents the maths and the arguments. needle.ops imports this module, and sets
`ops` here when it is imported."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from needle._C import Device, NDArray
from needle.backend_ndarray import device_and_dtype
from needle.grad_mode import mode
from needle.graph import views_below

Result = TypeVar("Result")
ops: Any = None


def define_operators(module: Any, names: Iterable[str]) -> None:
    """Let +, @, .sum() and the like of Tensors call the functions of `module`, and give Tensors a
    method of each of the names that has none."""
    global ops
    ops = module
    for name in names:
        if not hasattr(Operators, name):
            setattr(Operators, name, _method(name))


class Size(int):
    """The number of elements; called, as PyTorch has it, the shape or the size of an axis.

    >>> x = ndl.zeros(2, 3)
    >>> x.size, x.size(), x.size(-1)
    (6, (2, 3), 3)
    """

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class _Methods:
    """Makes a method of each name that it is assigned to, by a function of the name."""

    def __init__(self, make: Callable[[str], Callable[..., Any]]) -> None:
        self.make = make

    def __set_name__(self, owner: type, name: str) -> None:
        if not name.startswith("_"):
            setattr(owner, name, self.make(name))


def _method(name: str) -> Callable[..., Any]:
    """The function of needle.ops by this name, whose first argument is the Tensor."""

    def method(self: Any, *args: Any, **words: Any) -> Any:
        return getattr(ops, name)(self, *args, **words)

    method.__name__, method.__qualname__ = name, f"Tensor.{name}"
    method.__doc__ = f"needle.ops.{name} of this Tensor."
    return method


def _outside(name: str) -> Callable[..., Any]:
    """Make the operator of arrays one of Tensors, outside of the graph."""
    of_arrays = getattr(NDArray, name)

    def method(self: Any, other: Any) -> Any:
        beside = other.cached_data if isinstance(other, Operators) else other
        result = of_arrays(self.cached_data, beside)
        return result if result is NotImplemented else self.from_ndarray(result)

    return method


def _in_place(name: str) -> Callable[..., Any]:
    """Make an augmented assignment: the operator of arrays, or an assignment of the graph."""
    of_arrays = getattr(NDArray, f"__i{name}__")

    def method(self: Any, other: Any) -> Any:
        is_tensor = isinstance(other, Operators)
        if mode.enabled and (self.requires_grad or is_tensor and other.requires_grad):
            return self._updated(getattr(self, f"__{name}__")(other))
        result = of_arrays(self.cached_data, other.cached_data if is_tensor else other)
        return result if result is NotImplemented else self

    return method


CASTS = {"bool": "bool", "float": "float32", "half": "float16", "int": "int32", "long": "int64"}


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

    # -- arithmetic

    def __add__(self, other: Any) -> Result:
        return ops.add(self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Result:
        return ops.multiply(self, other)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Result:
        return ops.subtract(self, other)

    def __rsub__(self, other: Any) -> Result:
        return ops.subtract(other, self)

    def __truediv__(self, other: Any) -> Result:
        return ops.divide(self, other)

    def __rtruediv__(self, other: Any) -> Result:
        return ops.divide(other, self)

    def __pow__(self, other: Any) -> Result:
        return ops.power(self, other)

    def __rpow__(self, other: Any) -> Result:
        return ops.power(other, self)

    def __pos__(self) -> Result:
        return self  # type: ignore[return-value]

    def __neg__(self) -> Result:
        return ops.negate(self)

    def __abs__(self) -> Result:
        return ops.abs(self)

    def __mod__(self, other: Any) -> Result:
        return ops.remainder(self, other)

    def __rmod__(self, other: Any) -> Result:
        return ops.remainder(other, self)

    def _updated(self, new: Any) -> Any:
        """Write `new`, of this shape and a dtype that this one holds, and return this Tensor."""
        if new.shape != self.shape:
            raise ValueError(f"in place: the result is {new.shape}, but the Tensor {self.shape}")
        if "float" in new.dtype and "float" not in self.dtype:
            raise TypeError(
                f"in place: the result is {new.dtype}, which a Tensor of {self.dtype} cannot hold; "
                "write x = x ... or astype() first"
            )
        return self.fill_(new)

    def __invert__(self) -> Result:
        return ops.bitwise_not(self)

    def __matmul__(self, other: Any) -> Result:
        return ops.matmul(self, self._operand(other))

    def __rmatmul__(self, other: Any) -> Result:
        return ops.matmul(self._operand(other), self)

    __hash__ = object.__hash__

    def __contains__(self, element: Any) -> bool:
        """True where an element is equal, after broadcasting: `2.0 in x`."""
        found: Any = self == element
        return found is not False and bool(ops.any(found))

    def __bool__(self) -> bool:
        """True if the one value is not 0. ValueError for several: `(a == b)` holds one each."""
        return bool(self.cached_data)

    # -- elements

    def __getitem__(self, index: Any) -> Result:
        """Read by NumPy's rules (ops.get_item): `x[0]` is a row, `x[:, [2, 0]]` two columns."""
        return ops.get_item(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write in place, by the same rules (ops.set_item): `x[1:3] = y`, `x[mask] = 0`."""
        ops.set_item(self, index, value)

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
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        return ops.reshape(self, shape)

    view = reshape

    def expand(self, *shape: Any) -> Result:
        """Broadcast to a shape, in which -1 keeps an axis: PyTorch's broadcast_to."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        own = (1,) * (len(sizes) - self.ndim) + self.shape
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

    copy_ = fill_

    def zero_(self) -> Result:
        """Set all elements to 0, in place: they depend on nothing then, as `w.grad.zero_()`."""
        self.fill_(0)
        base, views = views_below(self)
        if base.op is not None and base.cached_data.size == self.cached_data.size:
            for x in (base, *views):
                x.op, x.inputs, x.requires_grad = None, (), False
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
        return ops.permute(self, axes if isinstance(axes[0], int) else axes[0])

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

    def astype(self, dtype: str) -> Result:
        """The values in another dtype; gradients come back in this one."""
        return ops.astype(self, dtype)

    type = astype

    def to(self, device: Device | str | None = None, dtype: str | None = None) -> Result:
        """The values on another device, `ndl.cuda()` or "cuda:0", or by the name of a dtype in that
        one; gradients come back to where these are."""
        device, dtype = device_and_dtype("to", device, dtype)
        moved: Any = self
        if device is not None or dtype is None:
            moved = ops.to_device(self, device)
        return moved if dtype is None else ops.astype(moved, dtype)

    # -- methods that their names define

    if TYPE_CHECKING:

        def _of_ops(self, *args: Any, **words: Any) -> Result: ...
        def __eq__(self, other: Any) -> Result: ...  # type: ignore[override]

        __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
        __and__ = __or__ = __xor__ = __floordiv__ = __eq__

        def chunk(self, chunks: int, axis: int = 0) -> tuple[Result, ...]: ...
        def max(self, *args: Any, **words: Any) -> Any: ...
        def nonzero(self) -> Any: ...
        def topk(self, k: int, axis: int = -1, largest: bool = True) -> tuple[Result, Result]: ...
        def unique(self, return_inverse: bool = False, return_counts: bool = False) -> Any: ...

        equal = median = min = sort = max
        _updating = _cast = _moved = add_ = div_ = mul_ = sub_ = _of_ops
    else:
        _of_ops = _Methods(_method)
        _updating = _Methods(
            lambda name: lambda x, *args, **words: x._updated(getattr(x, name[:-1])(*args, **words))
        )
        _cast = _Methods(lambda name: lambda x: ops.astype(x, CASTS.get(name, name)))
        _moved = _Methods(lambda name: lambda x: x.to(name))
        chunk = equal = max = median = min = nonzero = sort = topk = unique = _of_ops

    abs = absolute = add = all = allclose = amax = amin = any = argmax = argmin = argsort = _of_ops
    bmm = broadcast_to = ceil = clamp = clip = cos = cumprod = cumsum = diag = diagonal = _of_ops
    div = divide = dot = eq = erf = exp = expm1 = flatten = flip = floor = gather = ge = _of_ops
    gt = index_add = index_select = isclose = isfinite = isinf = isnan = le = lerp = log = _of_ops
    log10 = log1p = log2 = log_softmax = logical_and = logical_not = logical_or = _of_ops
    logsumexp = lt = matmul = maximum = mean = minimum = mm = moveaxis = movedim = mul = _of_ops
    multiply = mv = nan_to_num = ne = neg = negative = norm = outer = pad = pow = power = _of_ops
    prod = ravel = reciprocal = relu = remainder = repeat = repeat_interleave = roll = _of_ops
    round = rsqrt = scatter = scatter_add = sigmoid = sign = silu = sin = softmax = _of_ops
    softplus = sqrt = square = squeeze = std = sub = subtract = sum = swapaxes = _of_ops
    take_along_axis = tan = tanh = tile = trace = tril = triu = true_divide = trunc = _of_ops
    unbind = unsqueeze = var = _of_ops
    clamp_ = masked_fill_ = scatter_ = _updating
    bfloat16 = bool = float = half = int = long = _cast
    cpu = cuda = _moved


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Operators, f"__{_name}__", _outside(f"__{_name}__"))
for _name in ("and", "or", "xor", "floordiv"):
    for _side in ("", "r"):
        setattr(Operators, f"__{_side}{_name}__", _outside(f"__{_side}{_name}__"))
for _name in "add sub mul truediv floordiv mod pow matmul and or xor".split():
    setattr(Operators, f"__i{_name}__", _in_place(_name))
for _name, _operator in {"add": "add", "sub": "sub", "mul": "mul", "div": "truediv"}.items():
    setattr(Operators, f"{_name}_", _in_place(_operator))
