"""Timing, flags and output shared by the benchmarks. Importing it chooses needle as checkout.py
says, so it stands before the import of needle."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()
import needle as ndl
from needle import _C, models
from needle.processes import program

Call = Callable[[], Any]
Timer = Callable[[Call, int], float]  # milliseconds of so many calls


# ---- programs and their baselines ----------------------------------------------------------------


def parser(text: str, *flags: tuple[Any, ...]) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the program.

    A flag is (name, default, metavar, help, *choices). Its type is that of the default, or the
    default itself where it is a type or a function of text, which leaves None. A list takes one
    value or more, a bool is a switch.
    """
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, metavar, about, *choices in flags:
        if default is bool:
            made.add_argument(name, action="store_true", help=about)
            continue
        many = isinstance(default, list)
        one = default[0] if many else default
        known, shown = not callable(one), " ".join(map(str, default)) if many else default
        made.add_argument(
            name,
            type=type(one) if known else one,
            default=default if known else None,
            nargs="+" if many else None,
            choices=choices or None,
            metavar=metavar,
            help=f"{about} (default: {shown})".strip() if known else about,
        )
    return made


MODEL = ("--model", "pythia-70m", None, "", *models.preset_names())
DEVICE = ("--device", str, None, "default: cuda where there is one", "cpu", "cuda")
DTYPE = ("--dtype", str, None, "default: bfloat16 on a GPU, else float32", "float32", "bfloat16")


def device_of(args: argparse.Namespace) -> ndl.Device:
    """Return the device that DEVICE names, and set args.device and args.dtype where they are None.
    SystemExit for a GPU where there is none."""
    args.device = args.device or ("cuda" if ndl.cuda().enabled() else "cpu")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return need_gpu() if args.device == "cuda" else ndl.cpu()


def run(main: Callable[[], int | None]) -> None:
    sys.exit(program(main))


def has(*modules: str) -> bool:
    """True if the modules of a baseline are installed. Prints which are missing."""
    missing = " and ".join(name for name in modules if not importlib.util.find_spec(name))
    if missing:
        print(f"{missing} not installed: only needle is timed", flush=True)
    return not missing


def need_gpu() -> ndl.Device:
    """Return the first GPU. SystemExit where there is none."""
    if not ndl.cuda().enabled():
        raise SystemExit(f"{Path(sys.argv[0]).name}: no CUDA device: {ndl.cuda().reason()}")
    return ndl.cuda()


def describe(device: ndl.Device) -> str:
    properties = device.properties()
    return f"{properties['name']}, {properties['detail']}"


# ---- operands ------------------------------------------------------------------------------------


def normal(
    device: ndl.Device, shape: Sequence[int], dtype: str = "bfloat16", seed: int = 0
) -> _C.NDArray:
    """Normally distributed numbers, which repeat every 2^20: the host would take seconds for more,
    and zeros run faster than a training's operands."""
    out = _C.empty(tuple(shape), dtype, device)
    flat, part = out.reshape((out.size,)), min(out.size, 1 << 20)
    some = np.random.default_rng(seed).standard_normal(part, dtype=np.float32)
    drawn = _C.array(some, dtype, device)
    for start in range(0, out.size, max(part, 1)):
        _C.assign(flat[start : start + part], drawn[: min(part, out.size - start)])
    return out


# ---- timing --------------------------------------------------------------------------------------


def needle_timer(device: ndl.Device) -> Timer:
    """Times calls between two events of needle's stream."""
    start, end = _C.Event(device), _C.Event(device)
    return _timer(start, end, device.synchronize, start.elapsed)


def torch_timer() -> Timer:
    """Times calls between two events of PyTorch's stream."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    return _timer(start, end, torch.cuda.synchronize, start.elapsed_time)


def _timer(start: Any, end: Any, synchronize: Call, elapsed: Callable[[Any], float]) -> Timer:
    def milliseconds(call: Call, count: int) -> float:
        start.record()
        for _ in range(count):
            call()
        end.record()
        synchronize()
        return elapsed(end)

    return milliseconds


def seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def repeats_for(milliseconds: float, timer: Timer, call: Call) -> int:
    """Count the calls that take about so long; warms up."""
    timer(call, 2)
    return max(1, round(milliseconds / max(timer(call, 3) / 3, 1e-3)))


def in_turns(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """The samples of each side, which take turns, so that all see the same machine."""
    samples: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, sample in sides.items():
            samples[name].append(sample())
    return samples


def load(work: Callable[[], Any], seconds: float) -> None:
    """Runs work() again and again for so long: a GPU that has idled is faster for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()


# ---- output --------------------------------------------------------------------------------------


def spread(values: Iterable[float], form: str) -> str:
    """The median and, in brackets, the least and the most."""
    values = list(values)
    middle = statistics.median(values)
    return f"{middle:{form}} ({min(values):{form}} to {max(values):{form}})"


class GpuState:
    """Asks nvidia-smi for clock, power and temperature while work goes on."""

    def __init__(self) -> None:
        query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def during(self, work: Callable[[], Any]) -> str:
        """The answer, work() repeated until it comes."""
        while self._process.poll() is None:
            work()
        return self.text()

    def text(self) -> str:
        return self._process.communicate()[0].strip()
