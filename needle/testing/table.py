"""The table of ops (csrc/ops.def) as Python objects, by name in `OPS`."""

from __future__ import annotations

from dataclasses import dataclass

from needle import _C

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int64", "uint8", "uint16", "bool")
# Dtypes that the table fixes.
STORED = {"f4": "float32", "i4": "int32", "i8": "int64", "u1": "uint8", "b1": "bool"}


@dataclass(frozen=True)
class Operand:
    mode: str  # IN, IN_ROWS, OPT, IO, OUT, F64, ...
    name: str
    axes: str
    dtype: str  # F, T, ANY, W (integers and bool) or one of STORED

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


OPS = {
    name: Op(kind, name, tuple(Operand(*operand) for operand in operands))
    for name, (kind, operands) in _C.table().items()
    if kind != "COMPOSITE"  # they run others: tests/ops/test_layer.py
}


def dtype_of(operand: Operand, dtype: str) -> str:
    """The dtype of an operand in a computation in `dtype`."""
    if operand.dtype == "W" and dtype in FLOATS:
        return "int32"
    return STORED.get(operand.dtype, dtype)


def made_dtype(op: Op, operand: Operand, dtype: str) -> str:
    """The dtype of a written operand in a computation in `dtype`."""
    if op.kind == "CMP":
        return "bool"
    if op.kind == "ARG" or (op.name == "sum" and dtype not in FLOATS):
        return "int64"
    return dtype_of(operand, dtype)
