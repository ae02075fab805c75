"""Tensors, the graph that computed them, and backward(): the engine, no maths.

A Tensor wraps an NDArray (`cached_data`) and, when it was computed from Tensors that require
gradients, remembers the op and the inputs that made it. `backward()` walks that graph from the
result to the leaves.

An op has `compute(*arrays)`, NDArrays in, an NDArray out (of a TensorTupleOp a tuple of them), and
one of two protocols for its gradient (docs/design.md, Two protocols): `gradient(out_grad, node)`, a
Tensor for each input of `node`, built from ops, so that it can be differentiated again; or that of
a FusedOp, `backward(dout, node, into)`, arrays by kernels, which add the gradients of weights into
`into[i]` (Accumulators). The gradient of a tuple is a TensorTuple, or a list, with None for the
elements that have none.

Every `backward()` adds to `.grad`, until `optimizer.reset_grad()` or `x.grad = None`. That of a
Parameter with a gradient buffer is a Tensor over the buffer. That of another leaf has memory of its
own, and a sum is a new Tensor. One exception, from the course: a backward of a gradient,
`x.grad.backward()`, replaces the gradients of Tensors that are no Parameters.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.autograd import operators
from needle.autograd.grad_mode import enable_grad, is_grad_enabled, mode, no_grad
from needle.autograd.graph import Accumulators, InTheGraph, arrays_of, checked_order, find_topo_sort
from needle.autograd.operators import Operators
from needle.backend_ndarray import given_device, ones, zeros

__all__ = [
    "Accumulators",
    "FusedOp",
    "NDArray",
    "Op",
    "Tensor",
    "TensorOp",
    "TensorTuple",
    "TensorTupleOp",
    "Value",
    "compute_gradient_of_variables",
    "enable_grad",
    "find_topo_sort",
    "grad",
    "is_grad_enabled",
    "no_grad",
]

FLOATS = ("float32", "bfloat16", "float16")  # dtypes that gradients are rounded to
GRAPH = ("op", "inputs", "operands", "kept", "writes", "assigned")  # of a Value: its place there
_data_of = operator.attrgetter("cached_data")


# ---- ops -----------------------------------------------------------------------------------------


class Op:
    """One operation. Subclass TensorOp (one result) or TensorTupleOp (several).

    `gradient` may read the data of the inputs and of the result, and arrays in attributes of the
    op; backward() refuses where those changed since the forward. An op whose gradient does not read
    its inputs, or its result, says so.
    """

    reads_inputs: bool = True
    reads_result: bool = True
    writes_input: bool = False  # the result is the first input, written in place
    is_view: bool = False  # the result may lie in the memory of the input

    def reads_input(self, i: int, node: Value) -> bool:
        """True if the gradients that `node` needs read input i. Of an op that reads its inputs."""
        return True

    def reads_output(self, node: Value) -> bool:
        """True if they read the result. Of an op that reads its result."""
        return True

    def compute(self, *args: Any) -> Any:
        """The result as an NDArray (or a tuple of them) from the inputs as NDArrays."""
        raise NotImplementedError(f"{type(self).__name__}.compute is not defined")

    def gradient(self, out_grad: Any, node: Value) -> Any:
        """The gradients for the inputs of `node`, given the gradient `out_grad` of its output."""
        raise NotImplementedError(f"{type(self).__name__}.gradient is not defined")

    def gradient_as_tuple(self, out_grad: Any, node: Value) -> tuple:
        """`gradient`, always as a tuple with one entry an input."""
        grads = self.gradient(out_grad, node)
        if isinstance(grads, (tuple, list)):
            return tuple(grads)
        return (grads,)


class TensorOp(Op):
    """An op whose result is a Tensor."""

    def __call__(self, *args: Value) -> Tensor:
        return Tensor.make_from_op(self, args)


class TensorTupleOp(Op):
    """An op whose result is a TensorTuple; compute returns a tuple of NDArrays. Its `gradient` gets
    a TensorTuple, with zeros for the elements that nothing reached."""

    def __call__(self, *args: Value) -> TensorTuple:
        return TensorTuple.make_from_op(self, args)

    def gradient_as_tuple(self, out_grad: Any, node: Value) -> tuple:
        return super().gradient_as_tuple(_whole(out_grad, node), node)


class _Copy(TensorOp):
    """Copy into new memory."""

    reads_inputs = reads_result = False

    def compute(self, a: NDArray) -> NDArray:
        return a.copy()

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return out_grad


class FusedOp(TensorOp):
    """An op whose forward and backward are kernels, ops of ops.def.

    `compute` may keep arrays for the backward on `self`: make an op for each call.
    Subclasses write `backward(dout, node, into)`. `dout` is the NDArray of the output's gradient in
    the output's dtype. It returns one NDArray or None an input: None where that input needs no
    gradient, and where it has added the gradient into `into[i]` (Accumulators). Weight gradients
    are float32 in models of every dtype. A fused gradient cannot be differentiated again; trying
    raises.
    """

    def backward(self, dout: Any, node: Any, into: Accumulators) -> Sequence[NDArray | None]:
        raise NotImplementedError(f"{type(self).__name__}.backward is not defined")

    def gradient(self, out_grad: Any, node: Any) -> tuple:
        return _backward(self, out_grad, node, Accumulators(node.inputs))


def _backward(op: FusedOp, out_grad: Any, node: Value, into: Accumulators) -> tuple:
    """Run the backward of an op. Return as Tensors what it does not add into gradient buffers."""
    dout, dtype = out_grad.cached_data, node.cached_data.dtype
    try:
        grads = op.backward(dout if dout.dtype == dtype else dout.astype(dtype), node, into)
    except BaseException:
        into.reset_unwritten()
        raise
    parts: list[Tensor | None] = []
    for i, grad in enumerate(grads):
        own = into.own.get(i)
        if own is not None:
            grad = own if grad is None else _C.add(own, grad)
        parts.append(None if grad is None else _severed(grad, op))
    return tuple(parts)


class _Severed(Op):
    """Replace the graph of a fused op's gradient, and raise when it is differentiated."""

    reads_inputs = reads_result = False

    def __init__(self, name: str) -> None:
        self.name = name

    def gradient(self, out_grad: Any, node: Value) -> Any:
        raise NotImplementedError(
            f"backward: {self.name}: the gradient of a fused op cannot be differentiated again; "
            "write the function with elementary ops (matmul, add, exp, ...) where second "
            "derivatives are needed"
        )


def _severed(grad: NDArray, op: Op) -> Tensor:
    """Wrap a gradient whose own gradient is unknown. It keeps no other array alive."""
    out: Tensor = Tensor.make_const(grad)
    if mode.enabled:
        out.op = _Severed(type(op).__name__)
        out.requires_grad = True
    return out


# ---- values --------------------------------------------------------------------------------------


def not_a_tensor(op: str, operand: str, x: Any) -> TypeError:
    """Return the error of an op for an operand of another type."""
    return TypeError(
        f"{op}: {operand} must be a Tensor, but is {type(x).__name__} (ndl.Tensor(array) makes one)"
    )


class Value:
    """A node of the graph: a Tensor or a TensorTuple.

    `op` and `inputs` say how it was computed (None and () for a leaf), `cached_data` holds the
    result, `requires_grad` whether gradients flow to it.
    """

    op: Op | None = None
    inputs: Sequence[Value] = ()
    cached_data: Any = None
    computed: type = NDArray  # the type of `cached_data`
    operands: Sequence[Any] = ()  # the inputs' data, as the op saw it ...
    kept: Sequence[NDArray] = ()  # ... and the arrays in its attributes ...
    writes: int = 0  # ... after so many writes
    assigned: int = 0  # so many writes before the last x[...] = y of the graph
    requires_grad: bool = InTheGraph()  # type: ignore[assignment]
    grad: Any = None
    trained: bool = False  # an nn.Parameter
    has_grad_buffer: bool = False  # of nn.flatten_parameters: gradients are added up in raw_grad
    raw_grad: NDArray | None = None  # a part of the flat gradient; kernels write and add there
    zeros_pending: bool = False  # raw_grad counts as zeros, which fill_zeros() would write
    grad_buffer: NDArray | None = None  # raw_grad after fill_zeros()
    # Called by a backward that adds no more to raw_grad, also where it had no gradient for it.
    post_accumulate_grad_hook: Callable[[Any], None] | None = None
    in_grad_buffer: bool = False  # the `grad` of such a Parameter: its data is that buffer
    viewed: tuple[Op, Value] | None = None  # of a view of a constant: its op and that constant

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graph: a copy, and what is unpickled, is a leaf."""
        left_out = (*GRAPH, "viewed")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def realize_cached_data(self) -> Any:
        """The result. Everything is computed at once, so this is `cached_data`."""
        return self.cached_data

    def is_leaf(self) -> bool:
        """True when no op made it."""
        return self.op is None

    def reset_grad(self) -> None:
        """Count the gradient as zeros."""
        self.grad = None

    @classmethod
    def make_const(cls, data: Any, *, requires_grad: bool = False) -> Any:
        """A leaf over `data`, not copied."""
        value = cls.__new__(cls)
        value.cached_data = data
        value.requires_grad = requires_grad
        return value

    @classmethod
    def make_from_op(cls, op: Op, inputs: Iterable[Value]) -> Any:
        """The result of `op` on `inputs`, with its place in the graph when gradients are wanted."""
        inputs = tuple(inputs)
        value = cls.__new__(cls)
        try:
            operands = [*map(_data_of, inputs)]
            data = value.cached_data = op.compute(*operands)
        except AttributeError:
            for i, x in enumerate(inputs):
                if not isinstance(x, Value):
                    raise not_a_tensor(type(op).__name__, f"operand {i}", x) from None
            raise
        if not isinstance(data, value.computed):
            raise TypeError(
                f"{type(op).__name__}.compute: must return {value.computed.__name__}, "
                f"not {type(data).__name__}"
            )
        if mode.enabled:
            for x in inputs:
                if x.requires_grad:
                    value.op = op
                    value.inputs = inputs
                    value.operands = operands
                    value.kept = arrays_of(op)
                    value.writes = _C.writes()
                    value.requires_grad = True
                    break
            else:
                if op.is_view:
                    value.viewed = op, inputs[0]
                else:
                    value.requires_grad = False
        return value


class TensorTuple(Value):
    """Several Tensors that one op computed (split), or that one op takes (stack)."""

    computed = tuple

    def __len__(self) -> int:
        return len(self.cached_data)

    def __getitem__(self, index: int) -> Tensor:
        return operators.ops.tuple_get_item(self, index)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def tuple(self) -> tuple:
        """The Tensors as a Python tuple."""
        return tuple(self)

    def __add__(self, other: TensorTuple) -> TensorTuple:
        if not isinstance(other, TensorTuple) or len(other) != len(self):
            raise ValueError("TensorTuple + needs another TensorTuple of the same length")
        return operators.ops.make_tuple(*[a + b for a, b in zip(self, other)])

    def detach(self) -> TensorTuple:
        """The same data outside of the graph."""
        return TensorTuple.make_const(self.cached_data)

    def numpy(self) -> tuple:
        """The data as a tuple of NumPy arrays."""
        return tuple(x.numpy() for x in self.cached_data)

    def __repr__(self) -> str:
        return "TensorTuple(" + ",\n".join(repr(x) for x in self) + ")"


class Tensor(Value, Operators["Tensor"]):
    """An NDArray with a place in the graph.

    array: a nested list, number, NumPy array of any dtype (becomes `dtype`, float32 by default), an
    NDArray (copied; keeps its dtype and device unless told) or a Tensor (shares its memory unless
    dtype or device change). requires_grad: by default True for floats, False for other dtypes.

    >>> x = ndl.Tensor([[1, 2], [3, 4]])
    >>> y = (x @ x).sum()
    >>> y
    Tensor(54., dtype=float32, device=cpu(), op=Summation)
    >>> y.backward()
    >>> x.grad
    Tensor([[ 7., 11.],
            [ 9., 13.]], dtype=float32, device=cpu(), op=_Copy)
    """

    __array_ufunc__ = None  # so that numpy_scalar * tensor comes to Tensor.__rmul__

    def __init__(
        self,
        array: Any,
        device: Device | str | None = None,
        dtype: str | None = None,
        requires_grad: bool | None = None,
    ) -> None:
        data = array.cached_data if isinstance(array, Tensor) else array
        if isinstance(data, NDArray):
            data = data if dtype in (None, data.dtype) else data.astype(dtype)
            data = data if device is None else data.to(given_device(device))
            data = data.copy() if data is array else data
        else:
            data = _C.array(array, dtype or "float32", given_device(device))
        self.cached_data = data
        self.requires_grad = data.dtype in FLOATS if requires_grad is None else requires_grad

    @staticmethod
    def from_ndarray(array: NDArray, requires_grad: bool = False) -> Tensor:
        """A leaf Tensor over `array`, which it shares."""
        return Tensor.make_const(array, requires_grad=requires_grad)

    # -- data

    @property
    def shape(self) -> tuple:
        return self.cached_data.shape

    @property
    def dtype(self) -> str:
        return self.cached_data.dtype

    @property
    def device(self) -> Device:
        return self.cached_data.device

    @property
    def ndim(self) -> int:
        return self.cached_data.ndim

    @property
    def data(self) -> Tensor:
        """A detached Tensor over the same memory. Assigning a Tensor replaces the data; a
        flattened parameter copies the values into its place in the flat buffer."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        new = value.cached_data if isinstance(value, Tensor) else value
        if not isinstance(new, NDArray):
            raise TypeError(f"Tensor.data: must be a Tensor, but is {type(value).__name__}")
        if new.dtype != self.dtype:
            raise TypeError(f"Tensor.data: dtype is {self.dtype}, but the new data is {new.dtype}")
        if not (self.has_grad_buffer or self.in_grad_buffer):
            self.cached_data = new
            return
        if new.shape != self.shape:
            raise ValueError(
                f"Tensor.data: a flattened parameter has shape {self.shape}, "
                f"but the new data has {new.shape}"
            )
        _C.assign(self.cached_data, new.to(self.device))

    def detach(self) -> Tensor:
        """The same memory, outside of the graph."""
        return Tensor.make_const(self.cached_data)

    def numpy(self) -> np.ndarray:
        """The values as NumPy (bfloat16 becomes float32); waits for the device."""
        return self.cached_data.numpy()

    def clone(self) -> Tensor:
        """A copy in memory of its own, in the graph, also called copy."""
        return _Copy()(self)

    def __repr__(self) -> str:
        """Print as NumPy does, with the dtype, the device, and the op that computed it."""
        kind = type(self).__name__
        text = repr(self.cached_data).removeprefix("NDArray(").removesuffix(")")
        text = text.replace("\n" + " " * len("NDArray("), "\n" + " " * len(f"{kind}("))
        if self.op is not None:
            text += f", op={type(self.op).__name__}"
        elif self.requires_grad != self.trained:
            text += f", requires_grad={self.requires_grad}"
        return f"{kind}({text})"

    def __str__(self) -> str:
        return str(self.cached_data)

    # -- gradients

    def backward(self, out_grad: Tensor | None = None) -> None:
        """Add to `.grad` of every leaf that this Tensor was computed from.

        out_grad: the gradient of this Tensor, of its shape; ones when not given.
        RuntimeError where an array that a gradient reads was written in place since the forward.
        Writes of other libraries into memory that they share (a NumPy view or memoryview of an
        array, `from_dlpack`) are not seen.
        Threads may call it at the same time where their graphs share no leaf.
        The graph stays, so that it can be walked again: drop the Tensor (`del loss`) to free the
        activations before the next step allocates its own.
        """
        if not self.requires_grad:
            raise RuntimeError(
                "backward: this Tensor does not require gradients: it was computed under no_grad() "
                "or from Tensors with requires_grad=False"
            )
        compute_gradient_of_variables(self, _seed("backward: out_grad", self, out_grad))

    def _operand(self, other: Any) -> Tensor:
        """Return the other operand of an operation as a Tensor, in the dtype that it has beside an
        array."""
        if isinstance(other, Tensor):
            return other
        if isinstance(other, NDArray):
            return Tensor.from_ndarray(other)
        if isinstance(other, (np.ndarray, list)):
            return Tensor.from_ndarray(_C.array(other, None, self.device))
        raise TypeError(f"a Tensor cannot be combined with {type(other).__name__}")


def is_tensor(x: Any) -> bool:
    """True of a Tensor, PyTorch's name of isinstance(x, Tensor)."""
    return isinstance(x, Tensor)


# ---- backward ------------------------------------------------------------------------------------


def compute_gradient_of_variables(output: Value, out_grad: Value) -> None:
    """Walk the graph of `output` in reverse and leave the gradients in the leaves.

    If every leaf is an nn.Parameter, inner gradients are freed as soon as they are used and have no
    graph, which would hold the activations until the garbage collector frees its cycles. Otherwise
    each node keeps its `.grad`, and the gradients of elementary ops can be differentiated again.
    """
    order = checked_order([output])  # before the first gradient is added anywhere
    leaves = [node for node in order if node.op is None]
    training = not [leaf for leaf in leaves if not leaf.trained]
    wanted = leaves if training else order
    with no_grad() if training else contextlib.nullcontext():
        plain = [] if training else [node for node in wanted if not node.trained]
        inside = set(map(id, wanted)) if plain else ()
        if any(id(node.grad) in inside for node in plain):
            for node in plain:
                node.grad = None
        for node, grad in _walk(order, [output], [out_grad], wanted, hooks=True):
            total = _sum(node.grad, grad)
            if total is grad and node.op is None and isinstance(node, Tensor):
                total = _Copy()(total)  # memory of its own
            node.grad = _whole(total, node) if isinstance(total, list) else total


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple:
    """Return the gradients of the sum of `outputs` for each of `inputs`; no `.grad` changes.

    grad_outputs: of each output, ones by default. create_graph: the gradients are in the graph.
    allow_unused: None for an input that no output depends on, otherwise a RuntimeError.

    >>> x = ndl.Tensor([1, 2])
    >>> (slope,) = ndl.autograd.grad((x**3).sum(), x, create_graph=True)
    >>> print(slope, *ndl.autograd.grad(slope.sum(), x), x.grad)
    [ 3. 12.] [ 6. 12.] None
    """
    outputs, wanted = ([x] if isinstance(x, Tensor) else list(x) for x in (outputs, inputs))
    seeds: Any = grad_outputs if isinstance(grad_outputs, (list, tuple)) else [grad_outputs]
    seeds = [None] * len(outputs) if grad_outputs is None else seeds
    seeds = [_seed("grad: grad_outputs", *pair) for pair in zip(outputs, seeds, strict=True)]
    order = checked_order(outputs)
    with contextlib.nullcontext() if create_graph else no_grad():
        walk = _walk(order, outputs, seeds, wanted, buffers=False)
        found = {id(x): _Copy()(part) for x, part in walk}
    for i, x in enumerate(wanted):
        if id(x) not in found and not allow_unused:
            raise RuntimeError(f"grad: no output depends on input {i}; see allow_unused")
    return tuple(found.get(id(x)) for x in wanted)


def grads_within(
    output: Value, out_grad: Value, wanted: Sequence[Value], buffers: bool
) -> list[NDArray | None]:
    """Return the gradients of `wanted` for an op that computes them by a graph of its own. They may
    share memory. buffers: those of flattened parameters are added into their buffers. RuntimeError
    if another leaf of that graph needs a gradient, which would be lost."""
    order = checked_order([output])
    inside = set(map(id, wanted))
    if any(x.op is None and x.requires_grad and id(x) not in inside for x in order):
        raise RuntimeError(
            "backward: the graph that was computed again reads a Tensor that needs a gradient and "
            "is neither the operand nor a parameter of its module"
        )
    with no_grad():
        found = {id(x): grad for x, grad in _walk(order, [output], [out_grad], wanted, buffers)}
    return [found[id(x)].cached_data if id(x) in found else None for x in wanted]


def _seed(name: str, x: Tensor, given: Any) -> Tensor:
    """Return the gradient of x that a backward begins with: the given one, or ones."""
    check_gradient(name, x, given)
    return Tensor.from_ndarray(ones(x.shape, x.dtype, x.device)) if given is None else given


def _sum(a: Any, b: Any) -> Any:
    """Add two gradients, None being zero; those of a tuple element by element."""
    if a is None or b is None:
        return b if a is None else a
    return a + b if isinstance(a, Tensor) else [_sum(x, y) for x, y in zip(a, b)]


def _whole(grads: Any, node: Value) -> TensorTuple:
    """Return the gradient of a tuple as a TensorTuple, with zeros (a broadcast scalar) for None."""
    if isinstance(grads, TensorTuple):
        return grads

    def nothing(x: NDArray) -> Tensor:
        zero = zeros((1,) * x.ndim, x.dtype, x.device)
        return Tensor.from_ndarray(zero.broadcast_to(x.shape))

    pairs = zip(grads, node.cached_data)
    return operators.ops.make_tuple(*[nothing(x) if g is None else g for g, x in pairs])


def _walk(
    order: list[Value],
    outputs: Sequence[Value],
    seeds: Sequence[Any],
    wanted: Sequence[Value],
    buffers: bool = True,
    hooks: bool = False,
) -> Iterator[tuple[Value, Any]]:
    """Walk `order` from `outputs`, whose gradients are `seeds`, to the leaves. Yield each value of
    `wanted` that a gradient reaches, with it.

    buffers: add the gradients of flattened parameters into their buffers; those are not yielded.
    hooks: call the post_accumulate_grad_hook of each.
    """
    ids = set(map(id, wanted))
    pending: dict[int, Any] = {}  # by the id of a value: the sum of the gradients that reached it
    _give(seeds, outputs, pending, buffers)
    for node in reversed(order):
        grad = pending.pop(id(node), None)
        if grad is None:
            if hooks and node.post_accumulate_grad_hook is not None:
                node.post_accumulate_grad_hook(node)
            continue
        op, inputs = node.op, node.inputs
        if op is not None and isinstance(node, Tensor):
            dtype = node.cached_data.dtype
            if grad.cached_data.dtype != dtype and dtype in FLOATS:
                grad = grad.astype(dtype)  # a float32 weight gradient of a weight that was computed
        if id(node) in ids:
            yield node, grad
        if op is None:
            continue
        if isinstance(op, FusedOp):
            parts = _backward(op, grad, node, Accumulators(inputs, buffers, pending))
        else:
            parts = op.gradient_as_tuple(grad, node)
        if len(parts) < len(inputs):
            raise ValueError(
                f"backward: {type(op).__name__}.gradient returned {len(parts)} gradients "
                f"for {len(inputs)} inputs"
            )
        for i, (x, part) in enumerate(zip(inputs, parts)):
            if part is None or not x.requires_grad or isinstance(x, TensorTuple):
                continue
            if not isinstance(part, Tensor) or part.cached_data.shape != x.cached_data.shape:
                check_gradient(f"backward: {type(op).__name__}.gradient: of input {i}", x, part)
        _give(parts, inputs, pending, buffers)
        del grad, parts


def check_gradient(name: str, x: Tensor, given: Any) -> None:
    """Raise a TypeError or ValueError of `name` where a gradient is no Tensor of x's shape."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: must be a Tensor, not {type(given).__name__}")
    if given.cached_data.shape != x.cached_data.shape:
        raise ValueError(f"{name}: the shape must be {x.shape}, but is {given.shape}")


def _give(
    grads: Sequence[Any], values: Sequence[Value], pending: dict[int, Any], buffers: bool
) -> None:
    """Add gradients of `values` to what is pending, or into the buffers of flattened parameters."""
    for grad, x in zip(grads, values):
        if grad is None or not x.requires_grad:
            continue
        if buffers and x.has_grad_buffer:
            _C.assign(x.grad_buffer, _C.add(x.grad_buffer, grad.cached_data))
        else:
            pending[id(x)] = _sum(pending.get(id(x)), grad)
