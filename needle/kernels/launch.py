"""A launch as the pool sends it to a process, and the comparison of its outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from needle._C import NDArray
from needle.kernels.compile import Entry
from needle.kernels.guard import itemsize
from needle.kernels.limits import Size, whole_numbers
from needle.kernels.messages import Message
from needle.kernels.values import (
    Case,
    InOut,
    Out,
    Tolerance,
    difference,
    host_array,
    readable,
    whole,
)


class Launch:
    """A case with its arrays drawn. TypeError and ValueError for arguments that cannot be sent.

    Attributes: arrays (those that are sent), nbytes (of all), written (bytes of the Outs), outputs
    (name, dtype, shape of each array that comes back, once there was a `message`).
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtypes: list[str] = []
        self.arrays: list[np.ndarray] = []
        self.plain: list[Message | None] = []  # of each argument; None: an array
        self.written = 0
        for number, value in enumerate(case.args):
            is_array = isinstance(value, (Out, InOut, np.ndarray, NDArray))
            self.plain.append(None if is_array else _plain(number, value))
            if isinstance(value, Out):
                self.written += math.prod(value.shape) * itemsize(value.dtype)
            elif is_array:
                try:
                    dtype, array = host_array(getattr(value, "array", value))
                except TypeError as error:
                    raise TypeError(f"args[{number}]: {error}") from None
                self.dtypes.append(dtype)
                self.arrays.append(array)
        self.nbytes = self.written + sum(array.nbytes for array in self.arrays)
        self.way: Message = {
            "grid": _sizes("grid", case.grid),
            "block": _sizes("block", case.block),
            "shared": whole("shared", case.shared, -(2**63)),
            "arguments": self.plain,
        }

    def message(self, entry: Entry) -> Message:
        """Return the launch of a kernel, whose signature shows which arrays it writes."""
        places, given = [], iter(zip(self.dtypes, self.arrays))
        known = entry.signature.parameters
        for number, value in enumerate(self.case.args):
            if self.plain[number] is not None:
                continue
            parameter = known[number] if number < len(known) else None
            name = f"args[{number}]" + (f" ({parameter})" if parameter else "")
            if isinstance(value, Out):
                places.append((name, value.dtype, value.shape, "out"))
                continue
            dtype, array = next(given)
            role = "in" if parameter is None or parameter.kind == "unknown" else "const"
            if isinstance(value, InOut) or (parameter and parameter.written):
                role = "inout"
            places.append((name, dtype, array.shape, role))
        self.outputs = [place[:3] for place in places if place[3] in ("out", "inout")]
        return {**self.way, "places": places}

    def read(self, blocks: list[bytes]) -> tuple[np.ndarray, ...]:
        """Return the outputs that a process sent; bfloat16 as float32."""
        found = []
        for block, (_, dtype, shape) in zip(blocks, self.outputs):
            flat = np.frombuffer(block, "uint16" if dtype == "bfloat16" else dtype)
            found.append(readable(dtype, flat).reshape(shape))
        return tuple(found)

    def inputs(self) -> list[Any]:
        """Return copies of the arguments without Out, as a reference takes them."""
        given = iter(zip(self.dtypes, self.arrays))
        return [
            value if plain is not None else readable(*next(given))
            for plain, value in zip(self.plain, self.case.args)
            if not isinstance(value, Out)
        ]

    def right(self, reference: Any) -> list[np.ndarray]:
        """Return the outputs that a reference gives, a function or the outputs themselves."""
        if callable(reference):
            reference = reference(*self.inputs())
        single = isinstance(reference, (np.ndarray, np.generic, NDArray))
        if not single and not isinstance(reference, Iterable):
            said = "reference: must give an array, or several, one for each output, not "
            raise TypeError(f"{said}{type(reference).__name__}")
        found = [reference] if single else list(reference)
        names = [name for name, _, _ in self.outputs]
        if len(found) != len(names):
            said = f"reference: gave {len(found)} outputs, and the kernel has {len(names)}: "
            raise ValueError(f"{said}{', '.join(names) or 'none'}")
        return [np.asarray(array) for array in found]

    def compared(
        self, outputs: Sequence[np.ndarray], right: Sequence[np.ndarray], tolerance: Tolerance
    ) -> str | None:
        """Describe the first output that differs."""
        for (name, dtype, _), got, expected in zip(self.outputs, outputs, right):
            wrong = difference(got, expected, dtype, tolerance)
            if wrong is not None:
                return f"{name}: {wrong}"
        return None

    def shares_with(self, other: Launch) -> bool:
        """True if an input array is the same in both."""
        pairs = zip(self.arrays, other.arrays)
        return any(
            a.size and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc") for a, b in pairs
        )


def _plain(number: int, value: Any) -> Message:
    if isinstance(value, (bytes, np.void)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"number": value.item(), "dtype": value.dtype.name}
    if isinstance(value, (bool, int, float)):
        return {"number": value}
    raise TypeError(
        f"args[{number}]: {type(value).__name__} is no argument of a kernel; pass an array, Out, "
        "InOut, Random, a number, or bytes for a struct"
    )


def _sizes(what: str, size: Size) -> list[int]:
    """Return a size as JSON. The process checks it against the device."""
    sizes = whole_numbers(what, size)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{what}: must be a whole number or 1 to 3 of them, not {len(sizes):,}")
    return list(sizes)
