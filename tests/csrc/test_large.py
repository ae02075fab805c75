"""Structured ops at sizes past each blocking constant (large_cases.py), by value."""

import itertools

import pytest
from harness import poison
from large_cases import LARGE

from needle.testing import call, check, prepare


@pytest.mark.parametrize("op", dict.fromkeys(case.op for case in LARGE))
def test_structured_past_each_block_size(op, device):
    for case, dtype in itertools.product(LARGE, ("float32", "bfloat16")):
        if case.op == op:
            values = prepare(case, dtype)
            poison(device)
            try:
                check(case, values, call(case, values, dtype, device), dtype)
            except AssertionError as error:
                raise AssertionError(f"{case} in {dtype}") from error
