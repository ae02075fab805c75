"""Sweep of ops: each op of csrc/ops.def on a device, against its float64 reference.

Cases, references and bounds are those of needle.testing. The first wrong point of an op is named,
and whether the result is the same each time: that of a wrong kernel is, that of a broken memory is
not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from needle import _C, testing
from needle.diagnose.examination import Reporter
from needle.testing import FLOATS, OPS, Case

LAYOUTS = testing.LAYOUTS[:5]  # `broadcast` would repeat indices that must differ
SHAPES = [(31, 33), (1,), (5, 130, 67)]  # of ops of one formula
SMALL, MEDIUM, LARGE = 200, 30_000, 300_000  # elements of the operands of a case
ENOUGH = 5  # wrong ops, after which the sweep ends
FLAKY = "look at the ECC and Xid lines of the GPU, and run this again on another"
REMEDY = (
    "build needle again (make clean lib); if it stays, NEEDLE_ARCH=80 takes the kernels for older "
    "GPUs; try another GPU"
)


@dataclasses.dataclass(frozen=True)
class Point:
    case: Case
    dtype: str
    layout: str

    def __str__(self) -> str:
        return f"{self.case} {self.dtype} {self.layout}"


def size(case: Case) -> int:
    """The elements of its operands."""
    return sum(np.size(value) for value in case.inputs(testing.rng_of(case)).values())


def cases(op: str, is_full: bool) -> list[Case]:
    """The cases of an op; without --full one of medium size."""
    if op in ("assign", "fill"):
        found = [testing.copy_case(op, shape) for shape in SHAPES]
    elif OPS[op].kind != "OP":
        found = [testing.formula_case(op, shape) for shape in SHAPES]
    else:
        found = [case for case in testing.CASES if case.op == op]
    least, most = (0, LARGE) if is_full else (SMALL, MEDIUM)
    fitting = (case for case in found if least <= size(case) <= most)
    return list(fitting if is_full else itertools.islice(fitting, 1))


def dtypes(op: str, is_full: bool) -> tuple[str, ...]:
    """The dtypes in which an op computes, float32 first."""
    classes = {operand.dtype for operand in OPS[op].operands}
    if not classes & {"F", "ANY", "T"}:
        return FLOATS[:1]
    if not is_full:
        return FLOATS[:2]
    integers: tuple[str, ...] = ("int32", "int64") if classes & {"ANY", "T"} else ()
    unsigned = ("uint8", "bool") if integers and OPS[op].kind not in ("EW1", "EW2") else ()
    return FLOATS + integers + unsigned


def points(is_full: bool) -> Iterator[Point]:
    """The points in order: each case in float32 first, so that a short time covers all ops."""
    found = {op: cases(op, is_full) for op in OPS}
    for dtype in dict.fromkeys(dtype for op in OPS for dtype in dtypes(op, is_full)):
        for op in OPS:
            if dtype in dtypes(op, is_full):
                yield from (Point(case, dtype, LAYOUTS[0]) for case in found[op])
    for layout in LAYOUTS[1:] if is_full else LAYOUTS[1:3]:
        for op in OPS:
            yield from (Point(case, "float32", layout) for case in found[op])


def wrong(point: Point, device: Any) -> tuple[str, bool] | None:
    """The first wrong element and whether it is the same each time; None if the point is right, or
    the op says that it needs a GPU of another compute capability."""
    case, dtype = point.case, point.dtype
    layouts = {operand.name: point.layout for operand in OPS[case.op].inputs}
    values = testing.prepare(case, dtype, layouts)
    try:
        written = testing.call(case, values, dtype, device, layouts)
    except (ValueError, _C.CudaError) as error:
        if "compute capability" in str(error):
            return None
        raise
    try:
        testing.check(case, values, written, dtype)
        return None
    except AssertionError as error:
        text = str(error)
    again = [testing.call(case, values, dtype, device, layouts) for _ in range(2)]
    is_steady = all(
        np.array_equal(one[name].numpy(), written[name].numpy(), equal_nan=True)
        for one in again
        for name in written
    )
    return (
        f"{text} ({'the same each time' if is_steady else 'another result each time'})",
        is_steady,
    )


def examine(reporter: Reporter, device: Any) -> bool:
    """Sweep until the time is up. Return whether all results were right."""
    todo = list(points(reporter.is_full))
    failed: set[str] = set()
    done = 0
    for point in todo:
        op = point.case.op
        if op in failed:
            continue
        if reporter.left() < 0 or len(failed) == ENOUGH:
            break
        reporter.at(str(point), op)
        found = wrong(point, device)
        done += 1
        if found is not None:
            failed.add(op)
            text, is_steady = found
            reporter.failed("op", f"{point}: {text}", REMEDY if is_steady else FLAKY, op)
    if failed:
        return False
    count = len({point.case.op for point in todo[:done]})
    if done:
        reporter.ok("ops", f"{count} ops agree with float64 references at {done} points")
    if done < len(todo):
        text = f"the time was up after {done} of {len(todo)} points: --full walks all"
        reporter.note("ops", text)
    reporter.at("the end of the ops")
    return True
