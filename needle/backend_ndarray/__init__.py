"""NDArray and devices: what `from needle import backend_ndarray as nd` gives.

An NDArray is a strided view on memory of one device, written in C (`needle._C`). This module adds
the creation functions and the few module-level functions that the course's array API has;
everything else is a method of NDArray.

Dtypes are strings: float32 (the default of everything), bfloat16, float16, int32, int64, uint8,
bool, uint16. Shapes are tuples of int; strides count elements.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray, all_devices, array, cpu
from needle.backend_ndarray import array_methods  # noqa: F401  which adds methods to NDArray

Axes = int | Sequence[int] | None
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = (*FLOAT_DTYPES, "int32", "int64", "uint8", "bool", "uint16")
DRIVER = Path("/dev/nvidiactl")  # NVIDIA's driver is here

__all__ = [
    "BackendDevice",
    "Device",
    "NDArray",
    "add",
    "all_devices",
    "array",
    "broadcast_to",
    "check_device_name",
    "choose_device",
    "commit",
    "cpu",
    "cuda",
    "default_device",
    "empty",
    "exp",
    "flip",
    "full",
    "log",
    "maximum",
    "negative",
    "ones",
    "power",
    "reshape",
    "sqrt",
    "sum",
    "summation",
    "tanh",
    "zeros",
]

BackendDevice = Device  # the course's name of the type


class _Cuda:
    """The type of `needle.cuda`: `cuda(index)` is a GPU; `is_available` and `device_count` are as
    in torch.cuda."""

    def __call__(self, index: int = 0) -> Device:
        return _C.cuda(index)

    def is_available(self) -> bool:
        """True if the first GPU can be used."""
        return _C.cuda().enabled()

    def device_count(self) -> int:
        """The number of GPUs that can be used."""
        return len([d for d in all_devices() if d.name == "cuda" and d.enabled()])


cuda = _Cuda()


def default_device() -> Device:
    """The device of arrays made without naming one: `cpu()`."""
    return cpu()


def given_device(device: Device | str | None) -> Device:
    """`device`, also by its name, by default default_device(). TypeError for what is none,
    ValueError for another name and for a GPU that cannot be used."""
    if device is None:
        return default_device()
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device: must be a Device such as needle.cpu(), not {device!r:.40}")
    try:
        kind, _, index = check_device_name(device).partition(":")
    except ValueError as error:
        raise ValueError(f"device {error}") from error
    if kind == "auto":
        if cuda().enabled():
            return cuda()
        if DRIVER.exists() and "cannot load" in cuda().reason():  # a library is missing
            print(f"needle: warning: {cuda().reason()}", file=sys.stderr)
        return cpu()
    found = cpu() if kind == "cpu" else cuda(int(index or 0))
    if not found.enabled():
        raise ValueError(f"device {device}: {found.reason()}")
    return found


def check_device_name(name: str) -> str:
    """`name`, which must be auto, cpu, cuda or cuda:INDEX: ValueError."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", name) is None:
        raise ValueError(f"must be auto, cpu, cuda or cuda:INDEX, not {name!r}")
    return name


def device_and_dtype(
    op: str, device: Device | str | None, dtype: str | None
) -> tuple[Device | None, str | None]:
    """Return the device and the dtype that `to` was given: the name of a dtype may stand in the
    place of a device. ValueError for another name."""
    if not isinstance(device, str):
        return None if device is None else given_device(device), dtype
    if device in DTYPES:
        return None, dtype or device
    try:
        check_device_name(device)
    except ValueError:
        raise ValueError(
            f"{op}: must name a device (cpu, cuda, cuda:INDEX) or a dtype ({', '.join(DTYPES)}), "
            f"not {device!r}"
        ) from None
    return given_device(device), dtype


def choose_device(name: str) -> Device:
    """The device that a command line names: auto (the first GPU where it can be used, else the
    CPU), cpu, cuda or cuda:INDEX. ValueError for other words, and with the reason for a device that
    cannot be used.

    >>> nd.choose_device("cpu")
    cpu()
    """
    device = given_device(name)
    if name != "auto":
        device.synchronize()  # an enabled GPU can still refuse: out of memory, lost
    return device


def commit(changes: Iterable[tuple[Any, Any, Any]]) -> None:
    """`place[key] = value` for each (place, key, value): an array with ..., a list, the dict of an
    object's attributes. All are made, or none is: a value lies on its array's device already, in
    its shape, and so nothing here asks for memory.

    >>> x, names = nd.zeros(2), ["old"]
    >>> nd.commit([(x, ..., nd.ones(2)), (names, 0, "new")])
    >>> x.tolist(), names
    ([1.0, 1.0], ['new'])
    """
    for place, key, value in changes:
        place[key] = value


def listed(given: Any) -> tuple[Any, ...]:
    """Return whole numbers, of Python or NumPy, of which one may be given alone."""
    return (given,) if isinstance(given, (int, np.integer)) else tuple(given)


def as_bytes(array: NDArray) -> NDArray:
    """A view of all memory of an array that is no view itself, as flat uint8: bytes to send."""
    return NDArray.make((array.nbytes,), handle=array._handle, dtype="uint8")


def empty(
    shape: int | Sequence[int], dtype: str = "float32", device: Device | None = None
) -> NDArray:
    """A C-contiguous array whose elements are undefined."""
    return _C.empty(listed(shape), dtype, given_device(device))


def full(
    shape: int | Sequence[int],
    fill_value: float,
    dtype: str = "float32",
    device: Device | None = None,
) -> NDArray:
    """A C-contiguous array with every element `fill_value`.

    >>> nd.full((2, 2), 3, dtype="int32")
    NDArray([[3, 3],
             [3, 3]], dtype=int32, device=cpu())
    """
    out = empty(shape, dtype, device)
    out.fill(fill_value)
    return out


def zeros(
    shape: int | Sequence[int], dtype: str = "float32", device: Device | None = None
) -> NDArray:
    """A C-contiguous array of zeros."""
    return full(shape, 0, dtype, device)


def ones(
    shape: int | Sequence[int], dtype: str = "float32", device: Device | None = None
) -> NDArray:
    """A C-contiguous array of ones."""
    return full(shape, 1, dtype, device)


# The course's functions, of the same meaning as methods and ops.
broadcast_to, reshape, flip = NDArray.broadcast_to, NDArray.reshape, NDArray.flip
sum = summation = NDArray.sum
add, power, maximum, negative = _C.add, _C.power, _C.maximum, _C.negate
exp, log, sqrt, tanh = _C.exp, _C.log, _C.sqrt, _C.tanh
