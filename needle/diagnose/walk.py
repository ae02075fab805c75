"""The walk: every op of ops.def on a device, point by point, in each dtype and as views, against
the CPU; it names the first point of an op that is off.

The CPU itself is held to NumPy where NumPy has an op of that name, and its views to contiguous
operands. Bounds are those of a gross error (a wrong kernel, a wrong stride, broken memory), wide
enough for any right rounding; tests/csrc holds the ops to tight ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.diagnose import operands
from needle.diagnose.children import Teller
from needle.diagnose.operands import FLOATS, Values

# Of the largest number that an operand of the result should have.
TOLERANCE = {"float32": 2e-4, "float16": 2**-6, "bfloat16": 2**-4}
SMALLEST = 1e-2  # what is below counts as that large
LAYOUTS = ("contiguous", "transposed", "stepped", "reversed", "offset")
ENOUGH = 5  # ops that are off: the rest is no news
FLAKY = "look at the ECC and Xid lines of the GPU, and run this again on another"
REMEDY = (
    "build needle again (make clean lib); if it stays, NEEDLE_ARCH=80 takes the kernels for older "
    "GPUs; try another GPU"
)


@dataclasses.dataclass(frozen=True)
class Point:
    op: str
    dtype: str
    sizes: str
    layout: str

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.sizes} {self.layout}"


def points(is_full: bool) -> Iterator[Point]:
    """In the order of the walk: first each op once, so that a short time sees all of them."""
    table = _C.table()
    for op in table:
        yield Point(op, "float32", "odd", "contiguous")
    for op in table:
        for dtype in operands.dtypes_of(op, is_full):
            for sizes in operands.SIZES if is_full else ("odd",):
                layouts = LAYOUTS if is_full else LAYOUTS[:3]
                for layout in layouts if is_full or dtype == "float32" else LAYOUTS[:1]:
                    point = Point(op, dtype, sizes, layout)
                    if point != Point(op, "float32", "odd", "contiguous"):
                        yield point


def lay(values: Any, dtype: str, device: Any, layout: str) -> NDArray:
    """An array of `values` that lies in memory as `layout` says, garbage between its elements."""
    host = np.asarray(values).astype(np.float32 if dtype in FLOATS else dtype)
    if host.ndim == 0 or layout == "contiguous":
        return _C.array(host, dtype, device)
    garbage = np.nan if dtype in FLOATS else 1
    if layout == "transposed":
        turned = _C.array(np.ascontiguousarray(host.T), dtype, device)
        return turned.permute(tuple(reversed(range(host.ndim))))
    if layout == "reversed":
        back = (slice(None, None, -1),) * host.ndim
        return _C.array(np.ascontiguousarray(host[back]), dtype, device)[back]
    if layout == "stepped":
        base = np.full((*host.shape[:-1], max(2 * host.shape[-1] - 1, 0)), garbage, host.dtype)
        view = (slice(None),) * (host.ndim - 1) + (slice(None, None, 2),)
    else:
        base = np.full(tuple(n + 3 for n in host.shape), garbage, host.dtype)
        view = tuple(slice(1, 1 + n) for n in host.shape)
    base[view] = host
    return _C.array(base, dtype, device)[view]


def call(point: Point, values: Values, device: Any) -> dict[str, np.ndarray]:
    """Everything that the op makes and changes, by name."""
    given: dict[str, Any] = {}
    for operand in operands.inputs(point.op):
        name, value = operand[1], values[operand[1]]
        if not operands.is_number(operand):
            value = lay(value, operands.dtype_of(operand, point.dtype), device, point.layout)
        given[name] = value
    made = getattr(_C, point.op)(*given.values())
    names = operands.outputs(point.op)
    results = list(made) if isinstance(made, tuple) else [] if made is None else [made]
    results += [given[name] for name in names[len(results) :]]
    return {name: array.numpy() for name, array in zip(names, results, strict=True)}


def numpy_says(point: Point, values: Values) -> dict[str, np.ndarray] | None:
    """The same by NumPy in float64; None where it has no op of this name."""
    function = getattr(np, point.op, None)
    if function is None or point.dtype not in FLOATS[:1] or point.layout != "contiguous":
        return None
    arrays = [np.float32(value).astype(float) for value in values.values()]
    kind = _C.table()[point.op][0]
    with np.errstate(all="ignore"):
        if kind in ("RED", "ARG"):
            return {"out": np.asarray(function(arrays[0], axis=-1))}
        result = np.asarray(function(*arrays[:2]))
        return {operands.outputs(point.op)[0]: result * values.get("scale", 1)}  # matmul's


def difference(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], dtype: str) -> str | None:
    """How the first result that is off is off; None where all is as wanted."""
    for name, want in wanted.items():
        have = got[name]
        if have.shape != want.shape:
            return f"{name} has shape {have.shape}, should be {want.shape}"
        if not want.size:
            continue
        a, b = np.asarray(have, float), np.asarray(want, float)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        finite = np.isfinite(a) & np.isfinite(b)
        if np.issubdtype(want.dtype, np.floating) and finite.any():
            scale = max(SMALLEST, float(np.abs(b[finite]).max()))
            with np.errstate(invalid="ignore"):
                same |= finite & (np.abs(a - b) <= TOLERANCE.get(dtype, 0) * scale)
        if not same.all():
            at = tuple(int(i) for i in np.argwhere(~same)[0])
            return (
                f"{(~same).sum()} of {same.size} elements of {name} {want.shape} are off, the "
                f"first at {at}: {a[at]:.6g}, should be {b[at]:.6g}"
            )
    return None


def examine(teller: Teller, device: Any) -> bool:
    """Walks until the time is up. Whether nothing was off."""
    host = _C.cpu()
    todo = list(points(teller.is_full))
    done = 0
    wrong: set[str] = set()
    for point in todo:
        if point.op in wrong:
            continue
        if teller.left() < 0 or len(wrong) == ENOUGH:
            break
        teller.at(str(point), point.op)
        off = try_point(point, device, host)
        done += 1
        if off is not None:
            wrong.add(point.op)
            text, is_steady = off
            teller.failed("op", f"{point}: {text}", REMEDY if is_steady else FLAKY, point.op)
    against = str(_C.cpu())
    if done and not wrong:
        walked = {point.op for point in todo[:done]}
        ops = len(walked)
        if device.is_host:
            known = sum(hasattr(np, op) for op in walked)
            against = f"their own contiguous operands, {known} of them with NumPy"
        teller.ok("ops", f"{ops} ops agree with {against} at {done} points")
    if done < len(todo) and len(wrong) < ENOUGH and not wrong:
        teller.note("ops", f"the time was up after {done} of {len(todo)} points: --full walks all")
    teller.at("behind the ops")
    return not wrong


def try_point(point: Point, device: Any, host: Any) -> tuple[str, bool] | None:
    """What is off at a point, and whether it is the same each time; None where nothing is."""
    values = operands.draw(point.op, point.sizes, point.dtype)
    plain = dataclasses.replace(point, layout="contiguous")
    wanted = (numpy_says(point, values) if device.is_host else None) or call(plain, values, host)
    got = call(point, values, device)
    off = difference(got, wanted, point.dtype)
    if off is None:
        return None
    again = [call(point, values, device) for _ in range(2)]
    is_steady = all(
        np.array_equal(one[name], got[name], equal_nan=True) for one in again for name in got
    )
    return f"{off} ({'the same each time' if is_steady else 'another result each time'})", is_steady
