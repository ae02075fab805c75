"""needle.testing: right results pass, wrong ones are refused by op, array and element."""

import numpy as np
import pytest
from harness import naming

from needle import _C, testing
from needle.testing.bounds import HALF_ULP

CASES = {op: next(case for case in testing.CASES if case.op == op) for op in ("matmul", "adamw")}
CASES |= {op: testing.formula_case(op, (3, 5)) for op in ("exp", "less", "argmax", "sum", "max")}
CASES |= {op: testing.copy_case(op, (3, 5)) for op in ("assign", "fill")}


def test_check_right_result_passes_and_wrong_one_is_named():
    for (op, case), layout in [(pair, x) for pair in CASES.items() for x in testing.LAYOUTS[:5]]:
        with naming(case, layout):
            layouts = {operand.name: layout for operand in testing.OPS[op].inputs}
            values = testing.prepare(case, "float32", layouts)
            written = testing.call(case, values, "float32", _C.cpu(), layouts)
            testing.check(case, values, written, "float32")
            name = list(written)[-1]
            wrong = np.array(written[name].numpy())
            wrong.reshape(-1)[-1] = not wrong.reshape(-1)[-1] if wrong.dtype == bool else 1e3
            written[name] = _C.array(wrong, written[name].dtype)
            with pytest.raises(AssertionError, match=f"{op}: {name}"):
                testing.check(case, values, written, "float32")
            written[name] = _C.array(wrong, "float16")
            with pytest.raises(AssertionError, match=f"{op}: {name} is float16"):
                testing.check(case, values, written, "float32")


def test_bounds_pass_half_a_unit_and_refuse_forty():
    exact = np.array([1.0, 3.0, np.inf, np.nan])
    for dtype, half in HALF_ULP.items():
        with naming(dtype):
            testing.assert_within(exact + half, exact, exact, dtype)
            testing.assert_near(exact + half, exact, exact, 0, dtype)
            refused = pytest.raises(AssertionError, match=r"y: 2 of 4 .* first at \(0,\): got")
            with refused:
                testing.assert_within(exact + 40 * half, exact, exact, dtype, what="y")
            with refused:
                testing.assert_near(exact + 40 * half, exact, exact, 0, dtype, "y")
    for got in ([1.0, 3.0, 5.0, np.nan], [1.0, np.nan, np.inf, np.nan], [1.0, 3.0, np.inf, 0.0]):
        with pytest.raises(AssertionError, match="1 of 4"):
            testing.assert_within(got, exact, exact, "float32")
    with pytest.raises(AssertionError, match=r"shape \(3,\), expected \(4,\)"):
        testing.assert_within(exact[:3], exact, exact, "float32")


def test_each_layout_holds_the_values_in_strides_of_its_own():
    values = np.arange(12.0).reshape(3, 4)
    layouts = testing.LAYOUTS[:5]
    views = [testing.to_ndarray(values, "float32", _C.cpu(), layout) for layout in layouts]
    assert len({view.strides for view in views}) == len(layouts)
    for view in views:
        np.testing.assert_array_equal(view.numpy(), values)
    _, _, stepped, _, offset = views  # between their elements is NaN
    assert np.isnan(stepped.as_strided((3, 7), (7, 1)).numpy()[:, 1::2]).all()
    assert np.isnan(offset.as_strided((3, 6), (7, 1)).numpy()[:, 4:]).all()
