"""train_step.py --profile: needle's step by operation.

While a Recorder records, every op of csrc/ops.def that Python calls stands between two events of
the device's stream. Bytes are those of the operands and results by the table: IN once, IO twice,
OUT once. The time between operations is a row of its own: transfers of tokens and loss, the
events, and the device's waiting for the host.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from needle import _C

# FLOP of an op: a factor, and the axes whose product it multiplies; causal attention is half of it.
FLOP = {
    "matmul": (2, "BMKN"),
    "matmul_acc": (2, "BMKN"),
    "linear_fwd": (2, "NKM"),
    "fp8_matmul": (2, "MKN"),
    "fp8_cross_entropy": (2, "NCV"),
    "fp8_linear_gelu_fwd": (2, "NKM"),
    "fp8_linear_gelu_bwd": (2, "NCM"),
    "linear_gelu_fwd": (2, "NKM"),
    "linear_gelu_bwd": (2, "NKM"),
    "linear_rotary_fwd": (2, "BTKHPD"),
    "attention_fwd": (4, "BHTSD"),
    "attention_bwd": (10, "BHTSD"),
}
# IO operands that are written and not read.
WRITTEN = {
    "assign": ("to",),
    "fill": ("to",),
    "linear_gelu_fwd": ("y",),
    "attention_fwd": ("o",),
    "block_sparse_attention_fwd": ("o",),
    "attention_bwd": ("dq", "dk", "dv"),
    "block_sparse_attention_bwd": ("dq", "dk", "dv"),
    "adamw": ("p_low",),
}
# Operands of which at most N rows are touched.
GATHERED = {"embedding_fwd": "w", "embedding_bwd": "dw"}
# The methods of arrays that a training step uses, and the ops that they are.
METHODS = {"fill": "fill", "__matmul__": "matmul"}
# A part of a GPU's name: bytes/s of a copy, read and write, and FLOP/s of a bfloat16 product of
# 8192^3, measured there.
RATES = {"H200": (4.2e12, 688e12)}
WITHIN = 0.03  # of the step without events, the rows must add up


@dataclasses.dataclass
class Operation:
    """A row: all calls of an op with operands of the same sizes. bytes and flop are of one call."""

    name: str
    bytes: int
    flop: float
    calls: int = 0
    ms: float = 0.0

    def floor(self, rates: tuple[float, float]) -> float:
        """Milliseconds of a call at so many bytes/s and FLOP/s."""
        return 1e3 * max(self.bytes / rates[0], self.flop / rates[1])


class Recorder:
    """The ops that ran while `recording()`."""

    def __init__(self, device: _C.Device) -> None:
        self.device = device
        self._calls: list[tuple[str, tuple, tuple, _C.Event, _C.Event]] = []

    def _watched(self, op: str, function: Callable) -> Callable:
        names = [name for how, name, _, _ in _C.table()[op][1] if how != "OUT"]

        def call(*given: Any) -> Any:
            start, end = _C.Event(self.device), _C.Event(self.device)
            start.record()
            results = function(*given)
            end.record()
            operands = tuple(map(_seen, names, given))
            outputs = results if isinstance(results, tuple) else (results,)
            self._calls.append((op, operands, tuple(map(_size, outputs)), start, end))
            return results

        return call

    @contextmanager
    def recording(self) -> Iterator[None]:
        places = [(_C, op, op) for op in _C.table()]
        places += [(_C.NDArray, method, op) for method, op in METHODS.items()]
        before = [vars(owner)[name] for owner, name, _ in places]
        try:
            for (owner, name, op), function in zip(places, before):
                setattr(owner, name, self._watched(op, function))
            yield
        finally:
            for (owner, name, _), function in zip(places, before):
                setattr(owner, name, function)

    def operations(self) -> list[Operation]:
        """The longest first."""
        rows: dict[tuple, Operation] = {}
        for op, given, results, start, end in self._calls:
            if (op, given) not in rows:
                rows[op, given] = described(op, given, results)
            rows[op, given].calls += 1
            rows[op, given].ms += start.elapsed(end)
        return sorted(rows.values(), key=lambda row: -row.ms)


def _seen(name: str, value: Any) -> tuple | bool | None:
    """Key of equal calls of an op. Of an array (shape, bytes an element), which keeps no
    memory; of numbers only whether attention is causal."""
    if isinstance(value, _C.NDArray):
        return value.shape, value.nbytes // max(value.size, 1)
    return bool(value) if name == "causal" else None


def _size(result: Any) -> int:
    return result.nbytes if isinstance(result, _C.NDArray) else 0


def described(op: str, given: tuple, results: tuple[int, ...]) -> Operation:
    """The row of a call, which is yet to be counted."""
    operands = [operand for operand in _C.table()[op][1] if operand[0] != "OUT"]
    arrays = [
        (how, name, letters, *value)
        for (how, name, letters, _), value in zip(operands, given)
        if isinstance(value, tuple)
    ]
    axes: dict[str, int] = {}
    for _, _, letters, shape, _ in arrays:
        axes |= _axes(letters, shape)
    moved = sum(results)
    for how, name, _, shape, each in arrays:
        if GATHERED.get(op) == name:
            shape = (min(shape[0], axes["N"]), *shape[1:])
        read_too = how.startswith("IO") and name not in WRITTEN.get(op, ())
        moved += prod(shape) * each * (2 if read_too else 1)
    factor, letters = FLOP.get(op, (0, ""))
    flop = factor * prod(axes.get(letter, 1) for letter in letters)
    if True in given:  # causal
        flop /= 2
    named = " ".join(f"{letter} {size}" for letter, size in axes.items())
    shown = named or " x ".join(map(str, arrays[0][3])) or "one number"
    return Operation(f"{op}  {shown}", moved, flop)


def _axes(letters: str, shape: tuple[int, ...]) -> dict[str, int]:
    """The size of each letter; leading axes beyond the letters count into the first."""
    if letters == "*":
        return {}
    extra = max(len(shape) - len(letters), 0)
    shape = (prod(shape[: extra + 1]), *shape[extra + 1 :])
    return dict(zip(letters[len(letters) - len(shape) :], shape))


def profile(side, block: Callable, steps: int, blocks: int) -> None:
    """Prints the table of `side`, a NeedleSide that is under load."""
    plain, watched, recorder = [], [], Recorder(side.device)
    for _ in range(blocks):
        plain.append(block(side, steps)[0])
        with recorder.recording():
            watched.append(block(side, steps)[0])
    name, rates = side.device.properties()["name"], None
    if side.model.config.dtype == "bfloat16":
        rates = next((known for part, known in RATES.items() if part in name), None)
    step_ms, plain_ms = statistics.fmean(watched), statistics.fmean(plain)
    report(recorder.operations(), steps * blocks, step_ms, plain_ms, rates)


def report(
    rows: list[Operation],
    steps: int,
    step_ms: float,
    plain_ms: float,
    rates: tuple[float, float] | None,
) -> None:
    """rows: of so many steps, of which each took step_ms; without events it takes plain_ms."""
    wide = max(len(row.name) for row in rows)
    print(f"{'':{wide}} {'calls':>6} {'ms':>9} {'share':>7} {'MB':>9} {'GFLOP':>9} {'floor ms':>9}")

    def line(name: str, calls: float, ms: float, moved: float, flop: float, floor: float) -> None:
        text = f"{name:{wide}} {calls:6g} {ms:9.3f} {ms / step_ms:7.1%} {moved / 1e6:9.1f} "
        print(f"{text}{flop / 1e9:9.1f} " + (f"{floor:9.3f}" if rates else f"{'-':>9}"))

    totals = [0.0] * 5
    for row in rows:
        calls = row.calls / steps
        floor = calls * row.floor(rates) if rates else 0.0
        cells = calls, row.ms / steps, calls * row.bytes, calls * row.flop, floor
        line(row.name, *cells)
        totals = [a + b for a, b in zip(totals, cells)]
    line("between operations", 0, step_ms - totals[1], 0, 0, 0)
    line("the step", totals[0], step_ms, *totals[2:])
    apart = step_ms / plain_ms - 1
    print(f"without events the step takes {plain_ms:.3f} ms: the rows are {apart:+.1%} off")
    if abs(apart) > WITHIN:
        print(f"THIS PROFILE DOES NOT COUNT: its rows must add up to the step within {WITHIN:.0%}")
