"""Creating Tensors. Random numbers come from NumPy's global generator in float64 and are then cast,
so that `np.random.seed` gives the same model on every device and in every dtype.

Where a function takes them, `device` is cpu() by default (also a name, as "cuda:1"), `dtype`
"float32" for floats, and `requires_grad` False.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.autograd import Tensor
from needle.backend_ndarray import full as full_array
from needle.backend_ndarray import given_device, listed

_meta: contextvars.ContextVar[bool] = contextvars.ContextVar("meta", default=False)


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Make tensors of one element, broadcast to the shape, in this block: nothing is drawn and no
    memory is held. A module that is made here shows its shapes, and takes its values from a file
    (each parameter's `cached_data` is replaced).

    >>> with ndl.init.meta_device():
    ...     layer = nn.Linear(1_000_000, 1_000_000)
    >>> layer.weight.shape
    (1000000, 1000000)
    """
    token = _meta.set(True)
    try:
        yield
    finally:
        _meta.reset(token)


def _sizes(shape: tuple) -> tuple[int, ...]:
    """Return the sizes of `*shape`, which may be one tuple or list of them."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


def _tensor(
    values: np.ndarray, device: Device | str | None, dtype: str, requires_grad: bool
) -> Tensor:
    data = _C.array(values, dtype, given_device(device))
    return Tensor.from_ndarray(data, requires_grad)


def _drawn(
    draw: Callable[[], Any],
    shape: tuple[int, ...],
    device: Device | str | None,
    dtype: str,
    grad: bool,
) -> Tensor:
    if _meta.get():
        return constant(*shape, c=0, device=device, dtype=dtype, requires_grad=grad)
    return _tensor(np.asarray(draw()), device, dtype, grad)


def rand(
    *shape: int | Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    device: Device | str | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """Uniform in [low, high): `np.random.rand(*shape) * (high - low) + low`.

    >>> np.random.seed(0)
    >>> ndl.init.rand(2, 3, low=-1, high=1).shape
    (2, 3)
    """
    shape, width = _sizes(shape), high - low
    return _drawn(lambda: np.random.rand(*shape) * width + low, shape, device, dtype, requires_grad)


def randn(
    *shape: int | Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    device: Device | str | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """Normal: `np.random.randn(*shape) * std + mean`.

    >>> np.random.seed(0)
    >>> print(ndl.init.randn(3, std=0.1).numpy().round(4))
    [0.1764 0.04   0.0979]
    """
    shape = _sizes(shape)

    def draw() -> Any:
        values = np.random.randn(*shape)
        values *= std  # in place: the largest matrices are gigabytes in float64
        values += mean
        return values

    return _drawn(draw, shape, device, dtype, requires_grad)


def randb(
    *shape: int | Sequence[int],
    p: float = 0.5,
    device: Device | str | None = None,
    dtype: str = "bool",
    requires_grad: bool = False,
) -> Tensor:
    """True with probability p: `np.random.rand(*shape) <= p`.

    >>> np.random.seed(0)
    >>> print(ndl.init.randb(3, p=0.6))
    [ True False False]
    """
    shape = _sizes(shape)
    return _drawn(lambda: np.random.rand(*shape) <= p, shape, device, dtype, requires_grad)


def constant(
    *shape: int | Sequence[int],
    c: float = 1.0,
    device: Device | str | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """Every element c.

    >>> print(ndl.init.constant(2, 2, c=7, dtype="int32"))
    [[7 7]
     [7 7]]
    """
    shape = _sizes(shape)
    if _meta.get():
        array = full_array((), c, dtype, device).broadcast_to(shape)
        return Tensor.from_ndarray(array, requires_grad)
    return Tensor.from_ndarray(full_array(shape, c, dtype, device), requires_grad)


def manual_seed(seed: int) -> None:
    """Seed NumPy's generator, of which weights, dropout and random tensors are drawn."""
    np.random.seed(seed)


def ones(*shape: int | Sequence[int], **place: Any) -> Tensor:
    """Every element 1. place: device, dtype and requires_grad of `constant`."""
    return constant(*shape, c=1, **place)


def zeros(*shape: int | Sequence[int], **place: Any) -> Tensor:
    """Every element 0. place: device, dtype and requires_grad of `constant`."""
    return constant(*shape, c=0, **place)


def zeros_like(array: Tensor | NDArray, **place: Any) -> Tensor:
    """Zeros of the shape, dtype and device of `array`, unless `place` gives another: device, dtype
    and requires_grad of `constant`.

    >>> print(ndl.init.zeros_like(ndl.Tensor([1, 2])))
    [0. 0.]
    """
    return full_like(array, 0, **place)


def ones_like(array: Tensor | NDArray, **place: Any) -> Tensor:
    """Ones of the shape, dtype and device of `array`, unless `place` gives another."""
    return full_like(array, 1, **place)


def full_like(array: Tensor | NDArray, fill_value: float, **place: Any) -> Tensor:
    """`fill_value` in the shape, dtype and device of `array`, unless `place` gives another."""
    given = {name: value for name, value in place.items() if value is not None}
    return full(array.shape, fill_value, **{"device": array.device, "dtype": array.dtype, **given})


def rand_like(array: Tensor | NDArray, *, dtype: str | None = None) -> Tensor:
    """`rand` of the shape, device and, unless one is given, dtype of `array`."""
    return rand(*array.shape, device=array.device, dtype=dtype or array.dtype)


def randn_like(array: Tensor | NDArray, *, dtype: str | None = None) -> Tensor:
    """`randn` of the shape, device and, unless one is given, dtype of `array`."""
    return randn(*array.shape, device=array.device, dtype=dtype or array.dtype)


def tensor(
    data: Any,
    dtype: str | None = None,
    device: Device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """PyTorch's constructor: integers become int64, truth values bool, others float32, unless
    `dtype` says otherwise, without gradient. `Tensor`, the course's, makes float32 with one. The
    data are copied; `as_tensor` shares the memory of a Tensor.

    >>> print(ndl.tensor([2, 0]), ndl.tensor([True]), ndl.tensor([1, 0.5]))
    [2 0] [ True] [1.  0.5]
    """
    if not isinstance(data, (Tensor, NDArray)):
        dtype = dtype or _dtype_of(data)
    given = data.cached_data if isinstance(data, Tensor) else data
    return Tensor(given, device, dtype, requires_grad)


def _dtype_of(data: Any) -> str | None:
    """Return PyTorch's dtype of integers and of truth values; None for the default."""
    array = np.asarray(data)
    kind = array.dtype.kind
    if kind == "O" and all(isinstance(item, int) for item in array.flat):
        kind = "i"  # beyond 64 bits, which _C.array refuses
    return {"i": "int64", "u": "int64", "b": "bool"}.get(kind)


def as_tensor(
    data: Any,
    dtype: str | None = None,
    device: Device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """`tensor` over the memory of a Tensor, unless dtype or device change."""
    make = Tensor if isinstance(data, Tensor) else tensor
    return make(data, dtype=dtype, device=device, requires_grad=requires_grad)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    *,
    device: Device | str | None = None,
    dtype: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """start, start + step, ... below stop; from 0 to `start` where that is the only number. Whole
    numbers are int64, as in NumPy, others float32, unless `dtype` says otherwise.

    >>> print(ndl.init.arange(3), ndl.init.arange(1, 2, 0.25))
    [0 1 2] [1.   1.25 1.5  1.75]
    """
    values = np.arange(start, step=step) if stop is None else np.arange(start, stop, step)
    kind = "int64" if values.dtype.kind == "i" else "float32"
    return _tensor(values, device, kind if dtype is None else dtype, requires_grad)


def full(shape: int | Sequence[int], fill_value: float, **place: Any) -> Tensor:
    """Every element `fill_value`. place: device, dtype and requires_grad of `constant`; the dtype
    of integers is int64, of truth values bool, unless it is given.

    >>> print(ndl.full((2,), -100), ndl.full((2,), True))
    [-100 -100] [ True  True]
    """
    if place.get("dtype") is None:
        place["dtype"] = _dtype_of(fill_value) or "float32"
    return constant(*listed(shape), c=fill_value, **place)


def eye(
    n: int,
    m: int | None = None,
    *,
    device: Device | str | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """(n, m), by default (n, n), with 1 on the main diagonal and 0 elsewhere."""
    return _tensor(np.eye(n, m), device, dtype, requires_grad)


def linspace(
    start: float,
    stop: float,
    num: int = 50,
    *,
    steps: int | None = None,
    device: Device | str | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """`num`, PyTorch's `steps`, numbers at equal distances from start to stop, both included.

    >>> print(ndl.linspace(0, 1, 5))
    [0.   0.25 0.5  0.75 1.  ]
    """
    values = np.linspace(start, stop, num if steps is None else steps)
    return _tensor(values, device, dtype, requires_grad)


def randint(
    low: int,
    high: Any = None,
    size: int | Sequence[int] = (),
    *,
    device: Device | str | None = None,
    dtype: str = "int64",
) -> Tensor:
    """Whole numbers in [low, high), or [0, low): `np.random.randint(low, high, size)`, or, as
    PyTorch has it, `randint(high, size)` with a tuple as size."""
    if isinstance(high, (tuple, list)):
        high, size = None, high
    return _tensor(np.asarray(np.random.randint(low, high, size)), device, dtype, False)


def randperm(n: int, *, device: Device | str | None = None, dtype: str = "int64") -> Tensor:
    """The whole numbers below n in random order: `np.random.permutation(n)`."""
    return _tensor(np.random.permutation(n), device, dtype, False)


def multinomial(probs: Tensor | NDArray, num_samples: int, replacement: bool = False) -> Tensor:
    """Draw places of the last axis of `probs` (n,) or (rows, n), which need not sum to 1: int64,
    (num_samples,) or (rows, num_samples). One `np.random.choice` a row. ValueError for negative or
    no probabilities, or fewer positive ones than samples without replacement.

    >>> np.random.seed(0)
    >>> print(ndl.multinomial(ndl.Tensor([0, 1, 3]), 4, replacement=True))
    [2 2 2 2]
    """
    p = probs.numpy().astype(np.float64)
    with np.errstate(all="ignore"):  # np.random.choice refuses NaN
        rows = (p / p.sum(-1, keepdims=True)).reshape(-1, p.shape[-1])
    drawn = [np.random.choice(p.shape[-1], num_samples, replacement, row) for row in rows]
    out = np.array(drawn, np.int64).reshape((*p.shape[:-1], num_samples))
    return _tensor(out, probs.device, "int64", False)


def from_dlpack(array: Any) -> Tensor:
    """A Tensor over the memory of another library's array, on its device, without gradient. What
    the other library marks read-only is copied. `backward()` does not see what that library writes
    there after the forward: the gradient is then that of the new values.

    >>> print(ndl.from_dlpack(np.arange(3, dtype=np.int32)))
    [0 1 2]
    """
    return Tensor.from_ndarray(_C.from_dlpack(array))


def one_hot(
    n: int,
    i: Any,
    device: Device | str | None = None,
    dtype: str = "float32",
    requires_grad: bool = False,
) -> Tensor:
    """Rows of the n x n identity at `i`: indices of any shape give that shape + (n,).

    i: Tensor, NDArray, NumPy array or list of whole numbers in [0, n), else ValueError.

    >>> print(ndl.init.one_hot(3, [2, 0]))
    [[0. 0. 1.]
     [1. 0. 0.]]
    """
    if device is None and isinstance(i, (Tensor, NDArray)):
        device = i.device
    values = np.asarray(i)
    index = values.astype(np.int64)
    if (index != values).any() or (index < 0).any() or (index >= n).any():
        raise ValueError(f"one_hot: indices must be whole numbers in [0, {n})")
    return _tensor(index[..., None] == np.arange(n), device, dtype, requires_grad)


# ---- initialisers of weights ---------------------------------------------------------------------


def xavier_uniform(fan_in: int, fan_out: int, gain: float = 1.0, **kwargs: Any) -> Tensor:
    """(fan_in, fan_out), uniform in +-gain sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio
    2010).

    >>> bool(abs(ndl.init.xavier_uniform(3, 3).numpy()).max() <= 1)
    True
    """
    bound = gain * math.sqrt(6.0 / (fan_in + fan_out))
    return rand(fan_in, fan_out, low=-bound, high=bound, **kwargs)


def xavier_normal(fan_in: int, fan_out: int, gain: float = 1.0, **kwargs: Any) -> Tensor:
    """(fan_in, fan_out), normal with std gain sqrt(2 / (fan_in + fan_out))."""
    std = gain * math.sqrt(2.0 / (fan_in + fan_out))
    return randn(fan_in, fan_out, mean=0.0, std=std, **kwargs)


def _relu_gain(nonlinearity: str) -> float:
    if nonlinearity != "relu":
        raise ValueError(f"kaiming: nonlinearity must be 'relu', not {nonlinearity!r}")
    return math.sqrt(2.0)


def kaiming_uniform(
    fan_in: int,
    fan_out: int,
    shape: Sequence[int] | None = None,
    nonlinearity: str = "relu",
    **kwargs: Any,
) -> Tensor:
    """(fan_in, fan_out), or of `shape`, as a convolution's weights are, uniform in
    +-sqrt(2) sqrt(3 / fan_in) (He et al. 2015).

    >>> bool(abs(ndl.init.kaiming_uniform(6, 2).numpy()).max() <= 1)
    True
    >>> ndl.init.kaiming_uniform(9 * 4, 9 * 8, shape=(3, 3, 4, 8)).shape
    (3, 3, 4, 8)
    """
    bound = _relu_gain(nonlinearity) * math.sqrt(3.0 / fan_in)
    shape = (fan_in, fan_out) if shape is None else shape
    return rand(*shape, low=-bound, high=bound, **kwargs)


def kaiming_normal(fan_in: int, fan_out: int, nonlinearity: str = "relu", **kwargs: Any) -> Tensor:
    """(fan_in, fan_out), normal with std sqrt(2) / sqrt(fan_in)."""
    std = _relu_gain(nonlinearity) / math.sqrt(fan_in)
    return randn(fan_in, fan_out, mean=0.0, std=std, **kwargs)
