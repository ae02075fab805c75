"""Every op of csrc/ops.def as data: inputs, float64 references, bad inputs.

ELEMENTWISE, COMPARISONS, REDUCTIONS   ops of one formula
CASES          structured ops: inputs by operand name, a reference that returns what the op writes
BAD            wrong calls with the exception and what its message must say

A reference gets a rounding function `r` first and applies it to each intermediate that a naive
computation would store: with the identity it is the exact result, with bfloat16's rounding the
naive one. Arrays that ops.def calls F arrive rounded to the dtype under test.
"""

from cases import attention, layers
from cases.attention import *
from cases.bad import *
from cases.case import *
from cases.elementwise import *
from cases.layers import *

CASES = layers.CASES + attention.CASES
