"""Methods of NDArray whose time does not count: printing, pickling, NumPy's protocols, Python's
numbers, `flat`, `mean`, `pad`, `process_slice`.

`needle._C` has the type with all that a training step calls; importing this module adds these.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle import _C
from needle._C import CudaError, CudaFatalError, Device, NDArray


class Flat:
    """The elements of an array in C order, where no strides express it. An integer gives a view;
    a slice gives a copy, and is copied back when it is assigned."""

    def __init__(self, base: NDArray) -> None:
        self._base = base

    shape = property(lambda self: (self._base.size,))
    size = property(lambda self: self._base.size)
    dtype = property(lambda self: self._base.dtype)
    device = property(lambda self: self._base.device)

    def __len__(self) -> int:
        return self._base.size

    def _element(self, at: int) -> NDArray:
        if not -self.size <= at < self.size:
            raise IndexError(f"index {at} is out of range for flat of size {self.size}")
        at = at % self.size
        place = tuple(map(int, np.unravel_index(at, self._base.shape)))
        return NDArray.__getitem__(self._base, place).reshape((1,))

    def _copy(self) -> NDArray:
        return self._base.copy().reshape((self.size,))

    def __getitem__(self, key: Any) -> NDArray:
        return (
            self._element(operator.index(key)) if hasattr(key, "__index__") else self._copy()[key]
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        if hasattr(key, "__index__"):
            self._element(operator.index(key))[:] = value
        else:
            copy = self._copy()
            copy[key] = value
            NDArray.__setitem__(self._base, ..., copy.reshape(self._base.shape))

    def numpy(self) -> np.ndarray:
        """The elements in C order, copied."""
        return self._base.numpy().reshape(-1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """NumPy's protocol: ValueError for copy=False, as the elements are gathered."""
        if copy is False:
            raise ValueError("__array__: this flat cannot be given without a copy")
        return np.asarray(self.numpy(), dtype)

    def __repr__(self) -> str:
        return f"Flat({self.numpy()})"


def _flat(self: NDArray) -> NDArray | Flat:
    """The elements in C order, writable: a 1-D view where the strides allow one."""
    walked = [(n, step) for n, step in zip(self.shape, self.strides) if n != 1]
    inner = walked[1:]
    if self.size and any(step != n * s for (_, step), (n, s) in zip(walked, inner)):
        return Flat(self)
    return self.as_strided((self.size,), (walked[-1][1] if walked else 1,))


def _array(self: NDArray, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """NumPy's protocol: copy=False asks for shared memory, else ValueError."""
    if copy is not False:
        return np.asarray(self.numpy(), dtype)
    try:
        shared = np.asarray(memoryview(self))  # type: ignore[arg-type]  # has a buffer
    except BufferError:
        raise ValueError(
            f"__array__: an array of {self.dtype} on {self.device} cannot be given without a copy"
        ) from None
    if dtype is not None and np.dtype(dtype) != shared.dtype:
        raise ValueError("__array__: another dtype needs a copy")
    return shared


def _interface(self: NDArray, name: str, version: int, on: bool) -> dict[str, Any]:
    if not on:
        raise AttributeError(f"{name}: the array is on {self.device}")
    if self.dtype == "bfloat16":
        raise AttributeError(f"{name}: bfloat16 has no type code; use DLPack")
    item = np.dtype(self.dtype)
    strides = None if self.is_compact() else tuple(item.itemsize * s for s in self.strides)
    return {
        "shape": self.shape,
        "typestr": item.str,
        "data": (self.data_ptr, False),
        "strides": strides,
        "version": version,
    }


def _array_interface(self: NDArray) -> dict[str, Any]:
    """NumPy's protocol, on the CPU."""
    return _interface(self, "__array_interface__", 3, self.device.is_host)


def _cuda_array_interface(self: NDArray) -> dict[str, Any]:
    """CUDA's protocol. It names no stream, so the device is waited for."""
    on = self.device.name == "cuda"
    if on:
        self.device.synchronize()
    return _interface(self, "__cuda_array_interface__", 2, on)


def _tolist(self: NDArray) -> Any:
    """Nested lists of Python numbers."""
    return self.numpy().tolist()


def _repr(self: NDArray) -> str:
    """Adds the shape where the elements do not tell it: no elements, or memory that is lost."""
    where = f"dtype={self.dtype}, device={self.device})"
    try:
        array = self.numpy()
    except RuntimeError as error:
        if isinstance(error, CudaError) and not isinstance(error, CudaFatalError):
            raise
        return f"NDArray(its memory is lost, shape={self.shape}, {where}"
    text = np.array2string(array, separator=", ", prefix="NDArray(")
    return f"NDArray({text}, {'' if array.size else f'shape={self.shape}, '}{where}"


def _rebuild(values: np.ndarray, dtype: str, device: Device) -> NDArray:
    """An unpickled array; on the CPU where its device is not here."""
    array = _C.array(values, str(values.dtype)).view(dtype)
    return array.to(device) if device.enabled() else array


def _reduce(self: NDArray) -> tuple[Any, ...]:
    bits = self.view("uint16") if self.dtype == "bfloat16" else self
    return _rebuild, (bits.numpy(), self.dtype, self.device)


def _mean(
    self: NDArray, axis: int | Sequence[int] | None = None, keepdims: bool = False
) -> NDArray:
    """Mean, in float32; integers sum in int64."""
    halves = self.dtype in ("bfloat16", "float16")
    total = (self.astype("float32") if halves else self).sum(axis, keepdims)
    if total.dtype != "float32":
        total = total.astype("float32")
    total /= float(self.size // max(total.size, 1))
    return total


def _pad(self: NDArray, axes: Sequence[Sequence[int]], /) -> NDArray:
    """A copy with (before, after) zeros added on each axis."""
    pairs = [tuple(map(operator.index, pair)) for pair in axes]
    if len(pairs) != self.ndim or any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
        raise ValueError(
            "pad: needs ((before, after), ...), one pair of sizes of 0 or more for each of the "
            f"{self.ndim} axes"
        )
    shape = [before + n + after for n, (before, after) in zip(self.shape, pairs)]
    out = _C.empty(shape, self.dtype, self.device)
    out.fill(0)
    out[tuple(slice(before, before + n) for n, (before, _) in zip(self.shape, pairs))] = self
    return out


def _process_slice(self: NDArray, sl: slice, dim: int, /) -> slice:
    """The slice with start, stop and step filled in."""
    if not 0 <= dim < self.ndim:
        raise ValueError(f"process_slice: axis {dim} is out of range for {self.ndim} axes")
    start, stop, step = slice.indices(sl, self.shape[dim])
    return slice(start, None if stop < 0 else stop, step)


def _index_select(self: NDArray, axis: int, indices: Any, /) -> NDArray:
    """The slices at `indices` along `axis`, repeats allowed. IndexError outside of the axis."""
    ids = np.asarray(indices)
    if not -self.ndim <= operator.index(axis) < self.ndim:
        raise IndexError(f"index_select: axis {axis} is out of range for {self.ndim} axes")
    axis = operator.index(axis) % self.ndim
    n = self.shape[axis]
    if ids.ndim != 1 or ids.dtype.kind not in "iu" and ids.size:
        raise IndexError("index_select: indices must be whole numbers along one axis")
    if ids.size and not -n <= ids.min() <= ids.max() < n:
        raise IndexError(f"index_select: an index is out of range for axis {axis} of size {n}")
    before, after = math.prod(self.shape[:axis]), math.prod(self.shape[axis:][1:])
    places = _C.array(ids.astype(np.int64), "int64", self.device).reshape((1, 1, ids.size, 1, 1))
    places = places.broadcast_to((1, before, ids.size, 1, after))
    out = _C.take(self.reshape((1, before, n, 1, after)), places)
    return out.reshape((*self.shape[:axis], ids.size, *self.shape[axis:][1:]))


for _name, _method in {
    "index_select": _index_select,
    "contiguous": NDArray.compact,
    "is_contiguous": NDArray.is_compact,
    "pad": _pad,
    "process_slice": _process_slice,
    "mean": _mean,
    "tolist": _tolist,
    "flat": property(_flat),
    "__array__": _array,
    "__array_interface__": property(_array_interface),
    "__cuda_array_interface__": property(_cuda_array_interface),
    "__reduce__": _reduce,
    "__contains__": lambda self, element: bool(_C.equal(self, element).sum()),
    "__bool__": lambda self: bool(self.item()),
    "__float__": lambda self: float(self.item()),
    "__int__": lambda self: int(self.item()),
    "__repr__": _repr,
    "__str__": lambda self: str(self.numpy()),
}.items():
    setattr(NDArray, _name, _method)
