"""A launch as the pool sends it: machine code, numbers, and arrays in memory that is shared."""

from __future__ import annotations

import fcntl
import mmap
import operator
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from needle._C import NDArray
from needle.kernels import arena
from needle.kernels.arena import Place
from needle.kernels.limits import whole_numbers
from needle.kernels.values import Case, InOut, Out, Size, host_array, readable


@dataclass(frozen=True)
class Code:
    """A kernel as the compiler process gave it."""

    entry: str
    block: bytes  # machine code, packed
    parameters: list[dict[str, Any]]
    resources: dict[str, Any]
    allocates: bool  # it may leave something in the heap of its context


class Image:
    """An arena in memory that the pool shares with one process: made here, of a size that nobody
    can change, so that reading it cannot fail whatever the process does."""

    def __init__(self, size: int) -> None:
        self.file = os.memfd_create("needle-kernels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size)
            fcntl.fcntl(
                self.file,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            self.memory = np.frombuffer(mmap.mmap(self.file, size), np.uint8)
        except BaseException:
            os.close(self.file)
            raise

    def close(self) -> None:
        os.close(self.file)


class Launch:
    """A launch with its arguments: what is sent, and what is read from the answer."""

    def __init__(self, code: Code, case: Case) -> None:
        self.code, self.case = code, case
        self.numbers: list[dict[str, Any] | None] = []
        self.values: list[np.ndarray | None] = []
        described = []
        for number, value in enumerate(case.args):
            if not isinstance(value, (Out, InOut, np.ndarray, NDArray)):
                self.numbers.append(_plain(number, value))
                continue
            self.numbers.append(None)
            known = code.parameters[number] if number < len(code.parameters) else {}
            name = f"args[{number}]" + (f" ({known['type']})" if known.get("type") else "")
            if isinstance(value, Out):
                dtype, array, role = value.dtype, None, "out"
                shape = value.shape
            else:
                try:
                    dtype, array = host_array(getattr(value, "array", value))
                except TypeError as error:
                    raise TypeError(f"{name}: {error}") from None
                shape = array.shape
                role = {True: "const", False: "inout", None: "in"}[known.get("const")]
                if isinstance(value, InOut):
                    role = "inout"
            described.append((name, dtype, shape, role))
            self.values.append(array)
        self.places, self.size = arena.lay_out(described)

    @property
    def outputs(self) -> list[Place]:
        return [place for place in self.places if place.role in ("out", "inout")]

    def header(self, do: str, **more: Any) -> dict[str, Any]:
        """TypeError and ValueError for what cannot be sent."""
        return {
            "do": do,
            "entry": self.code.entry,
            "grid": _sizes("grid", self.case.grid),
            "block": _sizes("block", self.case.block),
            "shared": _whole("shared", self.case.shared),
            "local_bytes": self.code.resources["local_bytes"],
            "arguments": self.numbers,
            "places": [place.to_json() for place in self.places],
            **more,
        }

    def shares_with(self, other: Launch) -> bool:
        """Whether an array that is read is the same in both."""
        pairs = zip(self.values, other.values)
        return any(
            np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
            for a, b in pairs
            if a is not None and b is not None and a.size
        )

    def fill(self, memory: np.ndarray) -> None:
        arena.poison(memory, self.places)
        for place, array in zip(self.places, self.values):
            if array is not None:
                place.array_of(memory)[...] = array

    def read(self, memory: np.ndarray) -> tuple[np.ndarray, ...]:
        """Copies of what came back; bfloat16 as float32."""
        return tuple(readable(place.dtype, place.array_of(memory)) for place in self.outputs)

    def inputs(self) -> list[Any]:
        """Copies of the arguments but Out, as a reference takes them."""
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
    """As JSON; the runner says whether a device takes them."""
    sizes = whole_numbers(what, size)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{what}: must be a whole number or 1 to 3 of them, not {len(sizes):,}")
    return list(sizes)


def _whole(what: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{what}: must be a whole number, not {number!r}") from None
