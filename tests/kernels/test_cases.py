"""What the pool and its processes share: arguments and the comparison of results (cases.py), times
and their judgement (timing.py)."""

import numpy as np
import pytest
from harness import naming

from needle import _C
from needle.kernels import Reference, Timing, cases, timing
from needle.kernels.cases import Case, InOut, Launch, Out, Random, both, difference, host_array
from needle.kernels.timing import judge

F, X = np.float32, np.arange(3.0)

# ---- arguments -----------------------------------------------------------------------------------


def test_seed_gives_other_numbers_at_each_place_and_trial():
    same = Random(100, seed=3)
    case = Case(1, 1, [same, 2, same, InOut(same)])
    a, b = (
        [array.elements.view(np.float32) for array in Launch(case, trial).arrays.values()]
        for trial in (0, 1)
    )
    assert len({array.tobytes() for array in (*a, *b)}) == 6
    (again,) = Launch(Case(1, 1, [same])).arrays.values()
    assert again.elements.tobytes() == a[0].tobytes()
    numpys = np.random.default_rng([3, 1, 2]).standard_normal(100)  # a client draws the same
    assert (b[1] == numpys.astype(np.float32)).all()


def test_array_that_is_given_is_the_same_in_each_trial():
    """A timed call is not warmed up by such."""
    for given, args in (
        (True, [Random(9), X]),
        (True, [InOut(X)]),
        (False, [Random(9), InOut(Random(9)), X[:0], Out(3), 2]),
    ):
        with naming(args):
            assert Launch(Case(1, 1, args)).given == given


def test_random_numbers_have_their_bounds():
    for dtype, low, high, expected in (
        ("int32", -3, 4, range(-3, 4)),
        ("int32", -3, 0, range(-3, 0)),
        ("int8", 127, 128, [127]),
        ("uint64", 2**64 - 2, 2**64, [2**64 - 2, 2**64 - 1]),
        ("int16", None, None, range(100)),
    ):
        with naming(dtype):
            assert {*Random(2000, dtype, 0, low, high).array(0, 0).tolist()} == {*expected}
    for low in 2, 0, -1:
        flat = Random(1000, "float64", low=low, high=low + 1).array(0, 0) - low
        assert 0 <= flat.min() < 0.1 and 0.9 < flat.max() < 1
    for bounds in {"low": 2}, {"high": 3}:  # one alone bounds no floats
        assert Random(1000, **bounds).array(0, 0).tobytes() == Random(1000).array(0, 0).tobytes()


def test_wrong_arguments_are_named():
    for error, said, make in (
        (TypeError, "there are float32, bfloat16", lambda: host_array(np.array(["a"]))),
        (TypeError, "an array of dtype >f4", lambda: host_array(np.ones(2, ">f4"))),
        (TypeError, "Out: dtype 'float8'", lambda: Out(3, "float8")),
        (TypeError, "Out: a size of its shape: must be a whole", lambda: Out((2, 1.5))),
        (ValueError, "Random: a size of its shape: must be 0 or more", lambda: Random((2, -1))),
        (ValueError, "Random: seed: must be 0 or more", lambda: Random(3, seed=-1)),
        (ValueError, "high", lambda: Random(3, "int8", low=0, high=129).array(0, 0)),
        (TypeError, r"args\[0\]: complex64 is no", lambda: Launch(Case(1, 1, [np.complex64(1)]))),
        (ValueError, "low", lambda: Random(3, "uint8", low=-1).array(0, 0)),
        *((ValueError, "tolerance: must be a number, or", lambda given=given: both(given))
          for given in ("x", (1, "x"), (1, 2, 3), (), (-1e-4, 0), (0, NAN), INF)),
    ):  # fmt: skip
        with naming(said), pytest.raises(error, match=said):
            make()
    assert Out(3).shape == Random([3]).shape == (3,)
    assert both(1) == both([1, 1.0]) == both(np.float32(1)) == both(np.ones(2)) == (1.0, 1.0)


def test_array_is_sent_with_its_shape_and_its_elements_in_the_order_of_c():
    square = np.array([[1.0, 2.0], [3.0, 4.0]])
    turned = _C.array(square, "bfloat16", _C.cpu()).permute((1, 0))
    for given, dtype, shape, wanted in (
        (F(3), "float32", (), F(3)),
        (square.T, "float64", (2, 2), square.T.copy()),
        (turned, "bfloat16", (2, 2), np.uint16([0x3F80, 0x4040, 0x4000, 0x4080])),
    ):
        with naming(dtype):
            *facts, elements = host_array(given)
            assert (facts, elements.tobytes()) == ([dtype, shape], wanted.tobytes())


def test_reference_gives_one_output_and_keeps_its_own_sizes():
    launch = Launch(Case(1, 1, [Random(9), Out(())]))
    launch.expect(lambda x: x.sum(), None)  # a number of NumPy's
    assert [right.shape for right in launch.right] == [()]
    launch.expect(lambda x: _C.array(x), None)  # one array, not one for each row
    assert [right.shape for right in launch.right] == [(9,)]
    own = Reference("", "", grid=7, shared=0).of(Case(1, (2, 3), [], 9))
    assert (own.grid, own.block, own.shared) == (7, (2, 3), 0)


def test_pattern_of_outputs_is_nan_that_no_calculation_gives():
    memory = np.empty(1 << 20, np.uint8)
    cases.fill(memory)
    units = memory.view(np.uint16)
    assert 0xFF81 <= units.min() and units.max() <= 0xFFFE and 0xFFC0 not in units


# ---- comparing -----------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
BIG = np.array([[2**62, 5]])


def test_element_is_right_within_its_tolerance():
    for right, got, expected, dtype, tolerance in (
        (True, F([1.0, NAN, INF, -INF]), F([1.0, NAN, INF, -INF]), "float32", 0.0),
        (True, F([1.00009]), F([1.0]), "float32", None),
        (True, F([100.009]), F([100.0]), "float32", None),
        (True, F([1.009]), F([1.0]), "bfloat16", None),
        (True, F([2.0]), F([1.0]), "float32", (0.0, 1.0)),
        (True, F([2.0, 2.0]), F([0.1, 0.1]), "float32", [2, 0]),
        (True, F([]), F([]), "float32", None),
        (True, BIG, BIG, "int64", None),
        (True, BIG + 1, BIG, "int64", 1),
        (False, F([1.0003]), F([1.0]), "float32", None),
        (False, F([1.00009]), F([1.0]), "float32", 0),
        (False, F([1.03]), F([1.0]), "bfloat16", None),
        (False, F([NAN]), F([1.0]), "float32", 1e9),
        (False, F([1.0]), F([NAN]), "float32", 1e9),
        (False, F([INF]), F([1e30]), "float32", None),
        (False, F([INF]), F([-INF]), "float32", None),
        (False, F([2.0]), F([1.0]), "float32", (0.0, 0.99)),
        (False, F([2.0]), F([0.1]), "float32", (0.0, 2.0)),
        (False, BIG + 1, BIG, "int64", None),
    ):
        with naming(got, expected, dtype):
            assert (difference(got, expected, dtype, tolerance) is None) == right


def test_wrong_elements_are_counted_and_the_largest_error_is_told():
    said = difference(F([[1, 3], [9, 2]]), F([[1, 2], [2, 2]]), "float32", None)
    assert said == (
        "2 of 4 elements are wrong, the first at [0, 1]: 3.0, expected 2.0; the largest error is 7 "
        "(tolerance: 0.0001 absolute, 0.0001 relative)"
    )
    for got, expected, place, worst in (
        (F(3.0), F(1.0), "[0]", "2"),  # a number
        (F([INF, 3.0]), F([1.0, 1.0]), "[0]", "2"),  # of those that are finite
        (F([0.0, NAN]), F([0.0, 1.0]), "[1]", "nan"),
    ):
        with naming(got):
            said = difference(got, expected, "float32", None)
            assert f"the first at {place}: " in said and f"largest error is {worst} (" in said


# ---- time ----------------------------------------------------------------------------------------


def judged(times, written=0, touched=0, **more) -> Timing:
    clock = {"nothing": 2.0, "fill_rate": 4e12, "product_rate": 1e12}
    return judge(times, clock, written, touched, **more)


def test_time_that_cannot_be_is_an_error_and_others_get_hints():
    written = timing.L2_BYTES + 5_000_000_000  # 1 ms at 1.25 times 4,000 GB/s, and the cache's
    for us, more, reason, hint in (
        (0.5, {}, "0.5 us are less than a launch takes", ""),
        (1001.0, {"written": written}, "", ""),
        (999.0, {"written": written}, "999 us for 5,067,108,864 bytes of outputs", ""),
        (20.0, {"written": timing.L2_BYTES}, "", ""),
        (101.0, {"operations": 4e8}, "", ""),  # 100 us at 4 times 1 TFLOP/s
        (99.0, {"operations": 4e8}, "400,000,000 operations; this device needs 100 us", ""),
        (3.9, {}, "", "launch-bound: a kernel that does nothing takes 2 us"),
        (4.1, {}, "", ""),
        (30.0, {"local_bytes": 48}, "", "spilling: 48 bytes"),
        (30.0, {"warm": False}, "", "the first of its code"),
        (30.0, {"touched": 1 << 30}, "", "not all of them can have been read"),
        (30.0, {"touched": 151_000_000}, "", "not all of them can have been read"),
        (30.0, {"touched": 149_000_000}, "", ""),  # 1.24 times the rate of filling
    ):
        with naming(us, more):
            found = judged([us], **more)
            assert reason in found.reason and found.valid == (found.reason == "") == (reason == "")
            assert hint in " ".join(found.hints) and (hint or reason or not found.hints)


def test_calls_are_timed_as_long_as_the_time_lasts_but_one_at_least():
    clock = object.__new__(timing.Clock)
    clock.flushes, clock.timed = 1, lambda call: call()
    assert clock.measure(lambda: lambda: 5.0, 0.0) == [5.0]
    assert clock.measure(lambda: lambda: 5.0, 60.0) == [5.0] * timing.MOST_CALLS


def test_time_is_the_median_between_the_quartiles_and_the_rate_is_that_of_all_arrays():
    found = judged([1.0, 3.0], written=4_000, touched=12_000)
    assert (found.median, found.lower, found.upper, found.calls) == (2.0, 1.5, 2.5, 2)
    assert found.rate == pytest.approx(6.0) and found.device_rate == pytest.approx(4000.0)  # GB/s
