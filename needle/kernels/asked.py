"""What a pool is asked for, checked before a process is started or chosen for it: whoever calls it
wrongly is told by the name of the argument, and costs nobody anything."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from needle.kernels.frames import fitting
from needle.kernels.launch import Launch
from needle.kernels.values import Case, Tolerance, both


def visible_devices() -> list[str] | None:
    """The devices that CUDA programs of this environment see, by the names it gives them; None:
    it does not say."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else [name for name in said.split(",") if name]


def device_numbers(devices: Any) -> list[int]:
    """As a caller gives them. TypeError and ValueError."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(f"devices: must be a list of numbers, not {devices!r}")
    numbers, visible = [], visible_devices()
    for device in devices:
        if isinstance(device, bool) or not hasattr(device, "__index__"):
            raise TypeError(f"devices: must be whole numbers, as of needle.cuda(i), not {device!r}")
        number = device.__index__()
        if number < 0:
            raise ValueError(f"devices: {number} is no device; they count from 0")
        if visible is not None and number >= len(visible):
            shown = f"{len(visible)}, from 0 to {len(visible) - 1}" if visible else "none"
            raise ValueError(
                f"devices: there is no {number}, since CUDA_VISIBLE_DEVICES={','.join(visible)} "
                f"shows {shown}"
            )
        if number in numbers:
            raise ValueError(f"devices: {number} is there twice")
        numbers.append(number)
    if not numbers:
        raise ValueError("devices: there must be one at least")
    return numbers


def pool_numbers(timeout: Any, memory: Any, spares: Any) -> None:
    """TypeError and ValueError for what no pool has."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)):
        raise TypeError(f"timeout: must be a number of seconds, not {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout: must be above 0 and finite, not {timeout}")
    for name, value, least in (("memory", memory, 1), ("spares", spares, 0)):
        if value is None and name == "memory":
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: must be a whole number, not {value!r}")
        if value < least:
            raise ValueError(f"{name}: must be {least} or more, not {value}")


def evaluation(
    cases: Sequence[Case],
    reference: Callable[..., Any] | Sequence[Any],
    tolerance: Tolerance,
    trials: int,
) -> list[Case]:
    """The cases. TypeError and ValueError."""
    if isinstance(trials, bool) or not hasattr(trials, "__index__"):
        raise TypeError(f"trials: must be a whole number, not {trials!r}")
    if trials < 1:
        raise ValueError(f"trials: must be 1 or more, not {trials}")
    both(tolerance)
    if not isinstance(cases, Iterable):
        raise TypeError(f"cases: must be a list of Case, not {type(cases).__name__}")
    found = list(cases)
    for number, case in enumerate(found):
        if not isinstance(case, Case):
            raise TypeError(f"cases[{number}]: must be a Case, not {type(case).__name__}")
    if not found:
        raise ValueError("cases: there must be one at least")
    if not callable(reference) and not hasattr(reference, "__len__"):
        raise TypeError(
            "reference: must be a function, or a list with the outputs of each case, not "
            f"{type(reference).__name__}"
        )
    if not callable(reference) and len(reference) != len(found):
        raise ValueError(f"reference: {len(reference)} for {len(found)} cases; give one each")
    return found


def encoded(what: str, text: Any) -> bytes:
    """A source or an entry as it is sent. TypeError and ValueError."""
    if not isinstance(text, str):
        raise TypeError(f"source and entry must be text; {what} is {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what}: letter {error.start} is half a surrogate pair, which is no text"
        ) from None


def sendable(launch: Launch, do: str, **more: Any) -> dict[str, Any]:
    """The header of a job, before a process is chosen for it. TypeError and ValueError."""
    header = launch.header(do, **more)
    try:
        fitting(header, launch.code.block)
    except ValueError as error:
        raise ValueError(f"the launch has too many arguments, or too long: {error}") from None
    return header
