"""Ops that are one another's gradients: broadcasting and summing, reshaping, casting, moving. Those
of all other families use them to bring a gradient back to the shape and dtype of its operand."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from needle._C import Device, NDArray
from needle.autograd.tensor import FLOATS, Tensor, TensorOp, Value
from needle.backend_ndarray import Axes, listed, zeros
from needle.ops.common import axes_of, const, kept_shape

Rule = Callable[..., Any] | None  # None: the gradient is 0


class Ruled(TensorOp):
    """A function of arrays and settings, and for each operand the rule of its gradient."""

    function: Callable[..., NDArray]
    operands: str  # their names in rules, a letter each
    names: tuple[str, ...]  # of the settings
    rules: tuple[Rule, ...]
    reads: tuple[tuple[str, ...], ...]  # the parameters of each rule

    def __init__(self, *settings: Any) -> None:
        self.settings = settings

    @classmethod
    def made(
        cls,
        name: str,
        function: Callable[..., NDArray],
        rules: tuple[Rule, ...],
        names: tuple[str, ...] = (),
        operands: str = "xy",
        **parts: Any,
    ) -> type[Any]:
        """Return the class of an op, called `name`."""
        reads = tuple(tuple(inspect.signature(rule).parameters) if rule else () for rule in rules)
        read = {name for names in reads for name in names}
        own = {"function": staticmethod(function), "rules": rules, "reads": reads}
        own |= {"reads_inputs": not read.isdisjoint(operands), "reads_result": "out" in read}
        return type(name, (cls,), {**own, "names": names, "operands": operands, **parts})

    def reads_input(self, i: int, node: Any) -> bool:
        return self._reads(self.operands[i], node)

    def reads_output(self, node: Any) -> bool:
        return self._reads("out", node)

    def _reads(self, name: str, node: Any) -> bool:
        """True if the rule of an operand that needs a gradient reads this."""
        return any(name in read and x.requires_grad for read, x in zip(self.reads, node.inputs))

    def compute(self, *arrays: Any) -> NDArray:
        return self.function(*arrays, *self.settings)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple:
        inputs = node.inputs
        given = dict(zip((*self.names, *self.operands), (*self.settings, *inputs)))
        given |= {"g": out_grad, "out": node}
        return tuple([_part(*part, given) for part in zip(self.rules, self.reads, inputs)])


def _part(rule: Rule, names: Sequence[str], x: Value, given: dict[str, Any]) -> Any:
    if not x.requires_grad:
        return None
    if rule is None:
        return const(zeros(x.shape, x.dtype, x.device))
    part = rule(*[x if name == "like" else given[name] for name in names])
    return reduced_to(part, x) if isinstance(x, Tensor) else part


def differentiable(
    name: str, *rules: Rule, view: bool = False, reduces: str | bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function of arrays and settings: its arrays become Tensors, with these gradients.

    rules: the gradient of each operand. Their parameters say what they read: g, the gradient of the
    result; x and y, the operands; out, the result; like, the operand whose gradient it is, of which
    they read shape, dtype and device alone; and settings by their names in the function. They are
    made of ops, so that they can be differentiated again. Gradients are summed back to the
    operand's shape and dtype. view: the result may lie in the memory of the operand. reduces: the
    first setting is `axes`, which the function and its rule get as normal_axes gives them; or that,
    and the name that errors of axes have. A setting that is a Sequence is kept as a tuple.
    """
    count = len(rules)

    def of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        types = function.__annotations__.items()
        function.__annotations__ = {k: "Tensor" if v == "NDArray" else v for k, v in types}
        signature = inspect.signature(function)
        names = tuple(signature.parameters)
        defaults = dict(zip(names[::-1], (function.__defaults__ or ())[::-1]))
        shown = reduces if isinstance(reduces, str) else function.__name__
        is_sequence = count < len(names) and "Sequence" in function.__annotations__[names[count]]
        kind = Ruled.made(name, function, rules, names[count:], is_view=view)

        @functools.wraps(function)
        def of_tensors(*given: Any, **words: Any) -> Any:
            if words or len(given) != len(names):
                missing, known = names[len(given) :], {**defaults, **words}
                if not words.keys() <= {*missing} <= known.keys() or len(given) > len(names):
                    try:
                        signature.bind(*given, **words)
                    except TypeError as error:
                        raise TypeError(f"{function.__name__}: {error}") from None
                given += tuple([known[word] for word in missing])
            if reduces:
                given = (given[0], axes_of(shown, *given[:2]), *given[2:])
            elif is_sequence:
                given = (*given[:count], listed(given[count]), *given[count + 1 :])
            return kind(*given[count:])(*given[:count])

        return of_tensors

    return of_arrays


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


def of_products(a: Tensor) -> Tensor:
    """`a` in the dtype in which products are computed: float32, or int64 of integers and bool."""
    return a if a.dtype == "float32" else astype(a, "float32" if a.dtype in FLOATS else "int64")


def rounded(result: Any, a: Any) -> Any:
    """Return a result of float32 in the dtype of `a`, or of no float dtype as it is."""
    known = result.dtype == a.dtype or a.dtype not in FLOATS
    return result if known else result.astype(a.dtype)


def spread(a: Tensor, shape: Sequence[int], axes: Sequence[int]) -> Tensor:
    """Broadcast a reduced Tensor back over the reduced axes."""
    kept = kept_shape(shape, axes)
    if a.shape != kept:
        a = reshape(a, kept)
    return broadcast_to(a, shape) if kept != tuple(shape) else a


@differentiable("Reshape", lambda g, like: reshape(g, like.shape), view=True)
def reshape(a: NDArray, shape: int | Sequence[int]) -> NDArray:
    """The same elements in another shape; one -1 is worked out.

    >>> ndl.reshape(ndl.ones(4, 3), (2, -1)).shape
    (2, 6)
    """
    return a.reshape(shape)


@differentiable("BroadcastTo", lambda g: g, view=True)
def broadcast_to(a: NDArray, shape: Sequence[int]) -> NDArray:
    """`a` stretched to `shape`, by NumPy's rules.

    >>> x = ndl.Tensor([[1], [2]])
    >>> ndl.broadcast_to(x, (2, 3)).sum().backward()
    >>> print(x.grad)
    [[3.]
     [3.]]
    """
    return a.broadcast_to(shape)


@differentiable("Summation", lambda g, like, axes: spread(g, like.shape, axes), reduces=True)
def summation(a: NDArray, axes: Axes = None, keepdims: bool = False) -> NDArray:
    """The sum over `axes` (None: all axes), which disappear, or with keepdims stay with size 1.

    >>> print(ndl.summation(ndl.Tensor([[1, 2], [3, 4]]), axes=1))
    [3. 7.]
    """
    return a.sum(axes, keepdims)


@differentiable("AsType", lambda g: g)
def astype(a: NDArray, dtype: str) -> NDArray:
    """a in another dtype.

    >>> ndl.ops.astype(ndl.Tensor([1.5]), "bfloat16").dtype
    'bfloat16'
    """
    return a.astype(dtype)


@differentiable("ToDevice", lambda g, like: to_device(g, like.device))
def to_device(a: NDArray, device: Device) -> NDArray:
    """a on another device; the gradient comes back to this one."""
    return a.to(device)


@differentiable("Contiguous", lambda g: g)
def contiguous(a: NDArray) -> NDArray:
    """a with its elements one after the other in memory: copied, where they are not."""
    return a.compact()
