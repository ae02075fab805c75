"""A launch as the pool sends it to a runner: machine code, numbers, arrays in a guarded buffer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from needle._C import NDArray
from needle.kernels import guard
from needle.kernels.compile import Compiled, Entry
from needle.kernels.guard import Place
from needle.kernels.limits import Size, whole_numbers
from needle.kernels.values import Case, InOut, Out, host_array, readable, whole


@dataclass(frozen=True)
class Code:
    """A kernel as the compiler's process returned it, by the name that was asked for. allocates: it
    may leave allocations in the heap of its context."""

    name: str
    block: bytes  # Compiled.pack()
    entry: Entry
    allocates: bool

    @staticmethod
    def unpack(name: str, block: bytes) -> Code:
        compiled = Compiled.unpack(block)
        return Code(name, block, compiled[name], b"\0malloc\0" in compiled.cubin)

    @property
    def resources(self) -> dict[str, Any]:
        names = ("registers", "shared_bytes", "local_bytes", "max_threads")
        return {name: getattr(self.entry, name) for name in names}


class Launch:
    """A launch with its arguments: the message for a runner, and reading of the outputs.
    TypeError and ValueError for arguments that cannot be sent."""

    def __init__(self, code: Code, case: Case) -> None:
        self.code, self.case = code, case
        self.numbers: list[dict[str, Any] | None] = []  # None: an array
        self.values: list[np.ndarray | None] = []  # of each array; None: an Out
        described, parameters = [], code.entry.signature.parameters
        for number, value in enumerate(case.args):
            if not isinstance(value, (Out, InOut, np.ndarray, NDArray)):
                self.numbers.append(_plain(number, value))
                continue
            self.numbers.append(None)
            known = parameters[number] if number < len(parameters) else None
            name = f"args[{number}]" + (f" ({known.type})" if known and known.type else "")
            if isinstance(value, Out):
                described.append((name, value.dtype, value.shape, "out"))
                self.values.append(None)
                continue
            try:
                dtype, array = host_array(getattr(value, "array", value))
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            if isinstance(value, InOut) or (known and known.written):
                role = "inout"
            else:
                role = "in" if known is None or known.kind == "unknown" else "const"
            described.append((name, dtype, array.shape, role))
            self.values.append(array)
        self.places, self.size = guard.lay_out(described)
        self.message = {
            "entry": code.name,
            "grid": _sizes("grid", case.grid),
            "block": _sizes("block", case.block),
            "shared": whole("shared", case.shared, -(2**63)),
            "local_bytes": code.entry.local_bytes,
            "arguments": self.numbers,
            "places": [asdict(place) for place in self.places],
        }

    @property
    def outputs(self) -> list[Place]:
        return [place for place in self.places if place.returned]

    def shares_with(self, other: Launch) -> bool:
        """True if an input array is the same in both."""
        return any(
            np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
            for a, b in zip(self.values, other.values)
            if a is not None and b is not None and a.size
        )

    def fill(self, memory: np.ndarray) -> None:
        guard.poison(memory, self.places)
        for place, array in zip(self.places, self.values):
            if array is not None:
                place.array_of(memory)[...] = array

    def read(self, memory: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return copies of the outputs; bfloat16 as float32."""
        return tuple(readable(place.dtype, place.array_of(memory)) for place in self.outputs)

    def inputs(self) -> list[Any]:
        """Return copies of the arguments without Out, as a reference takes them."""
        arrays = iter(zip(self.places, self.values))
        found = []
        for number, value in zip(self.numbers, self.case.args):
            if number is not None:
                found.append(value)
                continue
            place, array = next(arrays)
            if array is not None:
                found.append(readable(place.dtype, array))
        return found


def _plain(number: int, value: Any) -> dict[str, Any]:
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
    """Return a size as JSON. The runner checks it against the device."""
    sizes = whole_numbers(what, size)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{what}: must be a whole number or 1 to 3 of them, not {len(sizes):,}")
    return list(sizes)
