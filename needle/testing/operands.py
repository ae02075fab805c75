"""Arrays in every memory layout; a case that is prepared, called and checked."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from needle import _C
from needle.testing.bounds import assert_equal, assert_near, assert_within, rounder
from needle.testing.case import Case
from needle.testing.fp8 import Near
from needle.testing.table import FLOATS, OPS, dtype_of, made_dtype

# Memory layouts of an operand. Values stay the same, except with `broadcast`, which repeats the
# first index of the first axis. `backwards`, which is not in the list, reverses whole rows.
LAYOUTS = ("contiguous", "transposed", "stepped", "reversed", "offset", "broadcast")


def rng_of(*what: Any) -> np.random.Generator:
    """A generator seeded by the text of its arguments."""
    return np.random.default_rng(zlib.crc32(" ".join(map(str, what)).encode()))


def laid_out_values(values: np.ndarray, layout: str) -> np.ndarray:
    """The values that an array of this layout has."""
    if layout == "broadcast" and values.ndim and values.shape[0] > 1:
        return np.broadcast_to(values[:1], values.shape)
    return values


def to_ndarray(
    values: Any, dtype: str, device: _C.Device | None, layout: str = "contiguous"
) -> _C.NDArray:
    """Make an NDArray of `values` with this memory layout. Memory between its elements is garbage
    (NaN for floats), so that a kernel that ignores strides is wrong."""
    values = np.asarray(values)
    host = values.astype({"bfloat16": "float32", "float16": "float32"}.get(dtype, dtype))
    if host.ndim == 0 or layout == "contiguous":
        return _C.array(host, dtype=dtype, device=device)
    garbage = np.nan if dtype in FLOATS else 1
    if layout == "transposed":
        base = _C.array(np.ascontiguousarray(host.T), dtype=dtype, device=device)
        return base.permute(tuple(reversed(range(host.ndim))))
    if layout == "stepped":
        base = np.full((*host.shape[:-1], max(2 * host.shape[-1] - 1, 0)), garbage, host.dtype)
        base[..., ::2] = host
        every_other = (slice(None),) * (host.ndim - 1) + (slice(None, None, 2),)
        return _C.array(base, dtype=dtype, device=device)[every_other]
    if layout == "reversed":
        flip = (slice(None, None, -1),) * host.ndim
        return _C.array(np.ascontiguousarray(host[flip]), dtype=dtype, device=device)[flip]
    if layout == "backwards":
        return _C.array(np.ascontiguousarray(host[::-1]), dtype=dtype, device=device)[::-1]
    if layout == "offset":
        base = np.full(tuple(n + 3 for n in host.shape), garbage, host.dtype)
        inner = tuple(slice(1, 1 + n) for n in host.shape)
        base[inner] = host
        return _C.array(base, dtype=dtype, device=device)[inner]
    first = _C.array(np.ascontiguousarray(host[:1]), dtype=dtype, device=device)
    return first.broadcast_to(host.shape)


@functools.lru_cache(maxsize=1)  # a case is prepared in each dtype and layout, one after the other
def _drawn(case: Case) -> dict[str, Any]:
    return case.inputs(rng_of(case))


def prepare(case: Case, dtype: str, layouts: dict[str, str] | None = None) -> dict[str, Any]:
    """Draw the operands of a case by name, rounded to the dtypes in which they are stored. The same
    for the same case."""
    values = dict(_drawn(case))
    for operand in OPS[case.op].inputs:
        value = values[operand.name]
        if operand.is_array and value is not None:
            value = laid_out_values(
                np.asarray(value), (layouts or {}).get(operand.name, "contiguous")
            )
            stored = dtype_of(operand, dtype)
            if stored in FLOATS:
                value = rounder(stored)(value)
            elif operand.dtype in ("ANY", "T", "W"):
                value = value.astype(stored)
            values[operand.name] = value
    return values


def call(
    case: Case,
    values: dict[str, Any],
    dtype: str,
    device: _C.Device,
    layouts: dict[str, str] | None = None,
) -> dict[str, _C.NDArray]:
    """Run the op of a case; the written arrays by name, which are outputs and changed operands."""
    op = OPS[case.op]
    arguments = {}
    for operand in op.inputs:
        value = values[operand.name]
        if operand.is_array and value is not None:
            layout = (layouts or {}).get(operand.name, "contiguous")
            value = to_ndarray(value, dtype_of(operand, dtype), device, layout)
        arguments[operand.name] = value
    results = getattr(_C, case.op)(*arguments.values())
    if len(op.outputs) < 2:
        results = (results,) if op.outputs else ()
    written = {operand.name: result for operand, result in zip(op.outputs, results, strict=True)}
    changed = {o.name: arguments[o.name] for o in op.inputs if o.is_written}
    return written | {name: array for name, array in changed.items() if array is not None}


def check(case: Case, values: dict[str, Any], written: dict[str, _C.NDArray], dtype: str) -> None:
    """Compare all written arrays with the reference. Raise AssertionError, which names the op and
    the array, at the first one beyond its bound (needle/testing/bounds.py)."""
    exact = case.reference(rounder("float64"), **values)
    naive = functools.cache(lambda computed_in: case.reference(rounder(computed_in), **values))
    op = OPS[case.op]
    for operand in op.operands:
        if operand.name not in written:
            continue
        stored, what = made_dtype(op, operand, dtype), f"{case.op}: {operand.name}"
        array, wanted = written[operand.name], exact[operand.name]
        if array.dtype != stored:
            raise AssertionError(f"{what} is {array.dtype}, expected {stored}")
        if isinstance(wanted, Near):
            wanted.check(array.numpy(), stored, what)
        elif stored not in FLOATS:
            assert_equal(array.numpy(), wanted, what)
        elif case.ulps is not None:
            unit = wanted if case.unit is None else case.unit(wanted, *values.values())
            assert_near(array.numpy(), wanted, unit, case.ulps, stored, what)
        else:
            computed_in = dtype if operand.name in case.of_rounded else stored
            rounded = rounder(stored)(naive(computed_in)[operand.name])
            assert_within(array.numpy(), wanted, rounded, stored, case.terms, what)
