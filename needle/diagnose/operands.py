"""Operands for any op of ops.def, drawn from the table: sizes by axis letter, values by dtype.

What the letters and dtypes cannot tell stands here by the operand's own name: the range of an
index, numbers that have a meaning, lists of blocks that must fit. An op whose operands need no
more than that is walked without an edit here.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from needle import _C

FLOATS = ("float32", "bfloat16", "float16")
SIGNED = ("int32", "int64")
UNSIGNED = ("uint8", "bool")
STORED = {"f4": "float32", "i4": "int32", "i8": "int64", "b1": "bool"}
BLOCK = 16

# Sizes by axis letter, "*" for any shape. P is 3 where it packs q, k and v; R is at most D / 2.
SIZES: dict[str, dict[str, Any]] = {
    "odd": dict(B=2, T=33, S=40, H=3, D=16, N=31, C=65, K=37, M=29, V=53, R=4, X=45)
    | {"*": (31, 33)},
    "ones": dict(B=1, T=1, S=1, H=1, D=1, N=1, C=1, K=1, M=1, V=1, R=0, X=1) | {"*": (1,)},
    "large": dict(B=3, T=130, S=150, H=2, D=64, N=257, C=1030, K=300, M=259, V=1031, R=8, X=160)
    | {"*": (5, 130, 67)},
}
OFFSETS = {"lse": 6.0}  # as of rows whose probabilities are below 1: nothing overflows float16
# Indices lie below the size of these axes; where none is named, all are 0.
INDEX = {"ids": "V", "targets": "V", "positions": "SX", "tokens": "V"}
NUMBERS = {"sign": 1.0, "step": 3, "parts": 2, "causal": 1, "block": BLOCK, "axes": 1}
DEFAULT = {"F64": 0.125, "I64": 1}

Operand = tuple[str, str, str, str]  # how it is used, name, axes, dtype: of _C.table()
Values = dict[str, Any]


def inputs(op: str) -> list[Operand]:
    """The operands that a caller gives."""
    return [operand for operand in _C.table()[op][1] if operand[0] != "OUT"]


def outputs(op: str) -> list[str]:
    """The names of what it makes, and then of what it changes."""
    operands = _C.table()[op][1]
    made = [name for how, name, _, _ in operands if how == "OUT"]
    return made + [name for how, name, _, _ in operands if how.startswith("IO")]


def is_number(operand: Operand) -> bool:
    return operand[0] in DEFAULT


def dtype_of(operand: Operand, dtype: str) -> str:
    return STORED.get(operand[3], dtype)


def dtypes_of(op: str, is_full: bool) -> tuple[str, ...]:
    """Those that the op computes in, float32 first."""
    kind, operands = _C.table()[op]
    classes = {dtype for _, _, _, dtype in operands}
    if "F" not in classes and "ANY" not in classes:
        return FLOATS[:1]
    found: tuple[str, ...] = FLOATS if is_full else FLOATS[:2]
    if "ANY" in classes and is_full:
        found += SIGNED
        found += UNSIGNED if kind in ("CMP", "RED", "ARG", "OP") else ()
    return found


def draw(op: str, sizes: str, dtype: str) -> Values:
    """A value of each operand by name: a float64 or int64 array, or a number. The same for the
    same arguments."""
    rng = np.random.default_rng(zlib.crc32(f"{op} {sizes}".encode()))
    size = dict(SIZES[sizes])
    operands = inputs(op)
    if {"cos", "dk"} <= {name for _, name, _, _ in operands}:
        size["S"] = size["T"]  # angles turn both
    letters = "".join(axes for _, _, axes, _ in operands)
    lists = blocks(size) if {"columns", "kept"} & {name for _, name, _, _ in operands} else {}
    if op == "block_lists":  # makes them, in arrays of their sizes
        lists |= {"offsets": 0 * lists["offsets"], "entries": 0 * lists["columns"]}
    values: Values = {}
    for operand in operands:
        how, name, axes, kind = operand
        if is_number(operand):
            values[name] = NUMBERS.get(name, DEFAULT[how])
        elif name in lists:
            values[name] = lists[name]
        else:
            shape = size["*"] if axes == "*" else tuple(size.get(a, 3) for a in axes)
            if kind in ("i4", "i8"):
                below = [size[a] for a in INDEX.get(name, "") if a in letters]
                values[name] = rng.integers(0, min(below, default=1), shape)
            else:
                drawn = elements(rng, shape, dtype_of(operand, dtype), kind)
                values[name] = drawn + OFFSETS.get(name, 0)
    return values


def elements(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, kind: str) -> np.ndarray:
    """Away from zero, so that sums do not cancel to nothing and quotients stay small. Statistics
    and counts (float32 whatever the op computes in) are positive, as of what has both signs."""
    if dtype not in FLOATS:
        return rng.integers(0, 2 if dtype in UNSIGNED else 10, shape)
    if kind == "f4":
        return rng.uniform(0.5, 1.5, shape)
    return rng.uniform(0.25, 2, shape) * rng.choice([-1, 1, 1], shape)


def blocks(size: dict[str, int]) -> Values:
    """An irregular mask for each head, `kept`, and its lists: offsets, columns, order, offsets_t,
    rows, order_t."""
    heads, queries, keys = (size["H"], -(-size["T"] // BLOCK), -(-size["S"] // BLOCK))
    g, i, j = np.ogrid[:heads, :queries, :keys]
    kept = (i * 7 + j * 3 + g) % 5 < 3

    def lists(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        counts = np.concatenate([[0], np.cumsum(mask.sum(-1))])
        rows = mask.shape[1]
        offsets = np.stack([counts[n * rows : (n + 1) * rows + 1] for n in range(heads)])
        return offsets, np.nonzero(mask)[2], np.argsort(-mask.sum(-1), axis=-1, kind="stable")

    both = dict(zip(("offsets", "columns", "order"), lists(kept)))
    both |= zip(("offsets_t", "rows", "order_t"), lists(kept.transpose(0, 2, 1)))
    return {"kept": kept} | both
