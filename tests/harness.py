"""Shared by the tests: the ops of ops.def, rounding, layouts of operands, and the one bound.

The bound of a computation in dtype d, against a float64 reference: at most twice the error of the
naive computation in d (the reference with every intermediate rounded to d), plus half a unit in the
last place of the output, plus the float32 accumulator's own error over K terms, 4 eps sqrt(K).
"""

import contextlib
import ctypes
import gc
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cases import FLOATS

import needle as ndl
from needle import _C

ROOT = Path(__file__).resolve().parent.parent
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
EPS32 = 2.0**-24  # half a unit in the last place of 1.0
# Half a unit in the last place of 1.0, and the smallest normal number.
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def device_of(name: str):
    return {"cpu": ndl.cpu, "cuda": ndl.cuda}[name]()


@contextlib.contextmanager
def naming(*case) -> Iterator[None]:
    """Name the case of a loop in the error of a test that fails at it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{' '.join(map(str, case))}: {error}") from error


def nvrtc_missing() -> str | None:
    """Why no kernel can be compiled here, or None."""
    from needle.kernels.compile import find_toolkit

    try:
        find_toolkit()
    except RuntimeError as error:
        return f"needle: no NVRTC: {error}"
    return None


# ---- the ops of ops.def --------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    mode: str  # IN, IN_ROWS, OPT, IO, OUT, F64, ...
    name: str
    axes: str = ""
    dtype: str = ""

    @property
    def is_array(self) -> bool:
        return self.mode not in ("F64", "I64")

    @property
    def is_written(self) -> bool:
        return self.mode.startswith("IO")


@dataclass(frozen=True)
class Op:
    kind: str  # EW1, EW2, CMP, RED, ARG, OP
    name: str
    operands: tuple[Operand, ...]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.mode != "OUT")

    @property
    def outputs(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.mode == "OUT")


def read_ops() -> dict[str, Op]:
    text = (ROOT / "csrc" / "ops.def").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    x, y = Operand("IN_ANY", "x", "*", "F"), Operand("IN_ANY", "y", "*", "F")
    out = Operand("OUT", "out", "*", "F")
    implied = {
        "EW1": (x, out),
        "EW2": (x, y, out),
        "CMP": (x, y, out),
        "RED": (x, Operand("I64", "axes"), out),
        "ARG": (x, Operand("I64", "axes"), out),
    }
    ops = {}
    starts = list(re.finditer(r"^(EW1|EW2|CMP|RED|ARG|OP)\((\w+),", text, re.MULTILINE))
    for start, end in zip(starts, [m.start() for m in starts[1:]] + [len(text)]):
        kind, name = start.groups()
        found = re.findall(
            r"\b(IN\w*|OPT|IO\w*|OUT|F64|I64)\(\s*(\w+)(?:,\s*\"([^\"]*)\",\s*(\w+))?\)",
            text[start.end() : end],
        )
        ops[name] = Op(kind, name, implied.get(kind) or tuple(Operand(*f) for f in found))
    return ops


OPS = read_ops()


def attended(op: Callable, q: _C.NDArray, *rest) -> tuple[_C.NDArray, _C.NDArray]:
    """(o, lse) of attention_fwd or block_sparse_attention_fwd, o a new array."""
    o = _C.empty(q.shape, q.dtype, q.device)
    return o, op(q, *rest, o)


# ---- rounding ------------------------------------------------------------------------------------


def rounder(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Rounds float64 to the nearest value of `dtype` (ties to even), kept in float64."""
    if dtype == "float64":
        return lambda a: np.asarray(a, np.float64)
    if dtype in ("float32", "float16"):
        return lambda a: np.asarray(a, np.float64).astype(dtype).astype(np.float64)

    def to_bfloat16(a):
        a = np.asarray(a, np.float64).astype(np.float32)
        bits = a.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return np.where(np.isnan(a), np.nan, bits.astype(np.uint32).view(np.float32).astype(float))

    def quietly(a):
        with np.errstate(all="ignore"):
            return to_bfloat16(a)

    return quietly


# ---- operands ------------------------------------------------------------------------------------

# How an operand lies in memory. Each gives the same values from another layout, except `broadcast`,
# which repeats the first index of its first axis.
LAYOUTS = ("contiguous", "transposed", "stepped", "reversed", "offset", "broadcast")
GARBAGE = {"float32": np.nan, "bfloat16": np.nan, "float16": np.nan}


def laid_out_values(values: np.ndarray, layout: str) -> np.ndarray:
    if layout == "broadcast" and values.ndim and values.shape[0] > 1:
        return np.broadcast_to(values[:1], values.shape)
    return values


def to_ndarray(values: np.ndarray, dtype: str, device, layout: str = "contiguous"):
    """An NDArray of `values` whose memory is laid out as `layout` says; what lies between its
    elements is garbage (NaN for floats), so that a kernel that ignores strides cannot be right."""
    values = np.asarray(values)
    host = values.astype({"bfloat16": "float32", "float16": "float32"}.get(dtype, dtype))
    if host.ndim == 0 or layout == "contiguous":
        return _C.array(host, dtype=dtype, device=device)
    garbage = GARBAGE.get(dtype, 1)
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
    if layout == "backwards":  # whole rows, in the opposite order
        return _C.array(np.ascontiguousarray(host[::-1]), dtype=dtype, device=device)[::-1]
    if layout == "offset":
        base = np.full(tuple(n + 3 for n in host.shape), garbage, host.dtype)
        inner = tuple(slice(1, 1 + n) for n in host.shape)
        base[inner] = host
        return _C.array(base, dtype=dtype, device=device)[inner]
    first = _C.array(np.ascontiguousarray(host[:1]), dtype=dtype, device=device)
    return first.broadcast_to(host.shape)


def bits(array) -> np.ndarray:
    """The exact bits of an NDArray, so that NaN and the sign of zero count."""
    names = {"bfloat16": "uint16", "float16": "uint16", "float32": "int32"}
    if array.dtype in names:
        array = array.compact().view(names[array.dtype])
    return array.numpy()


def assert_same_bits(one, other, what: str = "") -> None:
    assert one.shape == other.shape and one.dtype == other.dtype, what
    np.testing.assert_array_equal(bits(one), bits(other), err_msg=what)


LIBC, M_PERTURB = ctypes.CDLL(None), -6  # of malloc.h


def poison(device, size: int = 1 << 12) -> None:
    """Fill memory that the next allocations will get with NaN, so that an output element that a
    kernel forgets to write is seen. The CPU's small blocks come from malloc, which need not give
    these again: glibc is told to fill all that it gives (bytes of 0xfe, the float -1.7e38)."""
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_PERTURB, 0x01)
    held = [_C.empty((n,), "float32", device) for n in (1, 33, size, 4 * size) for _ in range(4)]
    for array in held:
        array.fill(float("nan"))


def live_bytes(device) -> int:
    """Bytes in arrays right now. Gradients that can be differentiated again hold their graph, which
    holds them: such cycles go when the collector runs."""
    gc.collect()
    return device.memory_stats()["live_bytes"]


# ---- the bound -----------------------------------------------------------------------------------


def half_ulp(exact: np.ndarray, dtype: str) -> np.ndarray:
    return HALF_ULP[dtype] * np.maximum(
        2.0 ** np.floor(np.log2(np.abs(exact) + TINY[dtype])), TINY[dtype]
    )


def assert_within(got, exact, naive, dtype: str, terms: float = 1, what: str = "") -> None:
    """The bound at the top of this file, in the maximum norm."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    naive = np.asarray(naive, np.float64)
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite], err_msg=what)
    got, exact, naive = got[finite], exact[finite], naive[finite]
    if not got.size:
        return
    scale = np.abs(exact).max()
    bound = 2 * np.abs(naive - exact).max() + half_ulp(exact, dtype)
    bound = bound + 4 * EPS32 * np.sqrt(max(terms, 1)) * scale
    error = np.abs(got - exact)
    assert np.isfinite(got).all(), f"{what}: {(~np.isfinite(got)).sum()} elements are not finite"
    assert (error <= bound).all(), (
        f"{what}: error {error.max():.3g} passes its bound {bound.max():.3g} at "
        f"{(error > bound).sum()} of {error.size} elements (scale {scale:.3g})"
    )


def assert_near(got, exact, unit, ulps: float, dtype: str, what: str = "") -> None:
    """Elementwise: within `ulps` float32 units of `unit`, and then rounded once to `dtype`."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    bound = ulps * 2 * EPS32 * np.abs(unit) + half_ulp(exact, dtype) * 1.001 + TINY[dtype] * 2.0**-9
    error = np.abs(got - exact)
    wrong = ~(error <= bound)
    assert not wrong.any(), (
        f"{what}: {wrong.sum()} of {wrong.size} elements are off, the first: got "
        f"{got[wrong].flat[0]!r}, expected {exact[wrong].flat[0]!r}"
    )


# ---- structured ops --------------------------------------------------------------------------

STORED = {"F": None, "f4": "float32", "i4": "int32", "i8": "int64", "b1": "bool"}


def rng_of(*what):
    return np.random.default_rng(zlib.crc32(" ".join(map(str, what)).encode()))


def dtype_of(operand, dtype: str) -> str:
    return STORED.get(operand.dtype) or dtype


def prepare(case, dtype: str, layouts=None) -> dict:
    """The case's inputs, rounded to the dtypes that they are stored in."""
    values = case.inputs(rng_of(case))
    for operand in OPS[case.op].inputs:
        value = values[operand.name]
        if operand.is_array and value is not None:
            value = laid_out_values(
                np.asarray(value), (layouts or {}).get(operand.name, "contiguous")
            )
            stored = dtype_of(operand, dtype)
            values[operand.name] = rounder(stored)(value) if stored in FLOATS else value
    return values


def call(case, values: dict, dtype: str, device, layouts=None) -> dict:
    """Run the op; what it wrote by name: outputs and changed operands."""
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


def check(case, values: dict, written: dict, dtype: str) -> None:
    """Everything written, against the reference, within the bound."""
    exact = case.reference(rounder("float64"), **values)
    naive = {name: case.reference(rounder(name), **values) for name in {dtype, "float32"}}
    for operand in OPS[case.op].operands:
        if operand.name not in written:
            continue
        stored = dtype_of(operand, dtype)
        array = written[operand.name]
        assert array.dtype == stored, f"{operand.name} is {array.dtype}"
        if stored not in FLOATS:
            np.testing.assert_array_equal(array.numpy(), exact[operand.name], err_msg=operand.name)
            continue
        computed_in = dtype if operand.name in case.of_rounded else stored
        rounded = rounder(stored)(naive[computed_in][operand.name])
        assert_within(
            array.numpy(),
            exact[operand.name],
            rounded,
            stored,
            case.terms,
            f"{case.op}: {operand.name}",
        )


# ---- numerical gradients -------------------------------------------------------------------------


def central_differences(
    f: Callable[..., float], arrays: list[np.ndarray], h: float = 1e-6
) -> Iterator:
    """d f / d array for each array, by central differences in float64."""
    arrays = [np.array(a, np.float64) for a in arrays]
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + h
            above = f(*arrays)
            array[index] = kept - h
            below = f(*arrays)
            array[index] = kept
            gradient[index] = (above - below) / (2 * h)
        yield gradient
