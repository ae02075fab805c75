"""Every operation of csrc/ops.def as data: operands, float64 references and an error model.

    case = testing.CASES[0]                    an op, a label, its operands, its reference
    values = testing.prepare(case, "bfloat16")               operands in float64, rounded
    written = testing.call(case, values, "bfloat16", ndl.cuda())     {name: NDArray}
    testing.check(case, values, written, "bfloat16")         AssertionError beyond the bound

`CASES` has the structured ops, several shapes each. `ELEMENTWISE`, `COMPARISONS` and `REDUCTIONS`
have the ops of one formula, and `formula_case` makes a `Case` of one, `copy_case` of `assign`
and `fill`. `OPS` is the table of all.

A reference gets a rounding function `r` first and applies it to each intermediate that a naive
computation stores: with the identity the result is exact, with bfloat16's rounding it is the naive
one. `bounds` has the error model. The package needs NumPy alone and is imported by name, never by
`import needle`.
"""

from needle.testing import attention, fp8, hashes, layers, random
from needle.testing.bounds import assert_near, assert_within, rounder
from needle.testing.case import Case, cases_of, draw, normal
from needle.testing.elementwise import COMPARISONS, ELEMENTWISE, REDUCTIONS, copy_case, formula_case
from needle.testing.operands import (
    LAYOUTS,
    call,
    check,
    laid_out_values,
    prepare,
    rng_of,
    to_ndarray,
)
from needle.testing.table import FLOATS, INTEGERS, OPS, dtype_of

CASES = layers.CASES + attention.CASES + fp8.CASES + random.CASES + hashes.CASES
