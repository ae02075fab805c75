"""needle/kernels/values.py: arguments of kernels, and the comparison of results."""

import numpy as np
import pytest
from harness import naming

from needle import _C
from needle.kernels.values import (
    DTYPES,
    Case,
    InOut,
    Out,
    Random,
    both,
    difference,
    host_array,
    readable,
)


def test_random_arrays_have_their_dtype_and_come_back():
    for dtype in DTYPES:
        with naming(dtype):
            array = Random((300, 2), dtype).array(0, 0)
            name, bits = host_array(array)
            assert (name, bits.shape) == (dtype, (300, 2))
            values = readable(dtype, bits)
            assert values.dtype == ("float32" if dtype == "bfloat16" else dtype)
            assert values is not bits and len(np.unique(values)) > (1 if dtype == "bool" else 30)
            if dtype == "bfloat16":
                assert (values == array.numpy()).all()


def test_the_same_seed_gives_other_numbers_elsewhere():
    same = Random(100, seed=3)
    a = Case(1, 1, [same, 2, same, InOut(same)]).drawn(0).args
    b = Case(1, 1, [same, 2, same, InOut(same)]).drawn(1).args
    assert a[1] == 2
    different = [a[0], a[2], a[3].array, b[0], b[2], b[3].array]
    assert len({array.tobytes() for array in different}) == 6
    assert (Case(1, 1, [same]).drawn(0).args[0] == a[0]).all()
    numpys = np.random.default_rng([3, 1, 2]).standard_normal(100)  # a client draws the same
    assert (b[2] == numpys.astype(np.float32)).all()


def test_bounds_of_random_numbers():
    whole = Random(1000, "int32", low=-3, high=4).array(0, 0)
    assert set(whole) == set(range(-3, 4))
    flat = Random(1000, "float64", low=2, high=3).array(0, 0)
    assert 2 <= flat.min() < 2.1 and 2.9 < flat.max() < 3


def test_a_strided_array_is_made_contiguous_and_zero_axes_stay():
    array = np.arange(12, dtype=np.int16).reshape(3, 4).T
    name, bits = host_array(array)
    assert name == "int16" and bits.flags.c_contiguous and (bits == array).all()
    assert host_array(np.float32(3))[1].shape == ()
    view = _C.array(np.arange(6).reshape(2, 3), "bfloat16", _C.cpu()).permute((1, 0))
    assert (readable("bfloat16", host_array(view)[1]) == np.arange(6).reshape(2, 3).T).all()


def test_other_arrays_are_refused():
    for array in (np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, "longdouble")):
        with naming(array), pytest.raises(TypeError, match="there are float32, bfloat16"):
            host_array(array)


def test_shapes_and_dtypes_are_checked():
    assert Out(3).shape == Random([3]).shape == (3,)
    with pytest.raises(TypeError, match="Out: dtype 'float8'"):
        Out(3, "float8")
    with pytest.raises(ValueError, match="Random: a shape"):
        Random((2, -1))
    with pytest.raises(ValueError, match="Out: a shape"):
        Out((2, 1.5))


def test_bounds_that_a_dtype_does_not_hold():
    for dtype, low, high in (
        ("float16", 0, 70000.0),
        ("bfloat16", 0, 1e39),
        ("float64", -1e308, 1.5e308),
        ("float32", 2, 1),
        ("float32", float("nan"), 1),
        ("int8", 0, 129),
        ("uint8", -1, 5),
        ("int32", 5, 5),
        ("int32", 100, None),
    ):
        with naming(dtype):
            said = f"Random: low and high are .*{dtype} takes numbers from"
            with pytest.raises(ValueError, match=said):
                Random(3, dtype, low=low, high=high)


def test_bounds_at_the_edge(recwarn):
    assert Random(3, "float16", low=0, high=65504).array(0, 0).dtype == np.float16
    assert Random(3, "int8", low=127, high=128).array(0, 0).tolist() == [127] * 3
    assert Random(3, "uint64", low=2**63, high=2**64).array(0, 0).min() >= 2**63
    assert not recwarn
    with pytest.raises(ValueError, match="Random: seed must be"):
        Random(3, seed=-1)


def test_inout_takes_arrays():
    for array in (Out(3), InOut(np.zeros(3)), [1, 2], 5, "x"):
        with naming(array):
            with pytest.raises(TypeError, match="InOut: takes an array or Random, not"):
                InOut(array)


def test_tolerances_that_are_none():
    for given, error in (
        ("x", TypeError),
        ("xy", TypeError),
        ((1, "x"), TypeError),
        ({1: 2}, TypeError),
        ((1, 2, 3), ValueError),
        ((), ValueError),
        (-1e-4, ValueError),
        ((0, float("nan")), ValueError),
        (float("inf"), ValueError),
    ):
        with naming(given):
            said = "tolerance: must be a number, or .absolute, relative., not"
            with pytest.raises(error, match=said):
                both(given)


def test_tolerances():
    assert both(None) is None
    assert both(1) == both([1, 1.0]) == both(np.float32(1)) == both(np.ones(2)) == (1.0, 1.0)
    assert difference(F([2.0, 3.0]), F([1.0, 1.0]), "float32", [2, 0]) is None


F = np.float32
NAN, INF = float("nan"), float("inf")


def test_results_within_the_tolerance_are_right():
    for got, expected, dtype, tolerance in (
        ([1.0, NAN, INF, -INF], [1.0, NAN, INF, -INF], "float32", 0.0),
        ([1.00009], [1.0], "float32", None),
        ([100.009], [100.0], "float32", None),
        ([1.009], [1.0], "bfloat16", None),
        ([2.0], [1.0], "float32", (0.0, 1.0)),
        ([2.0], [1.0], "float32", (1.0, 0.0)),
        ([], [], "float32", None),
    ):
        with naming(got):
            assert difference(F(got), F(expected), dtype, tolerance) is None


def test_results_beyond_the_tolerance_are_wrong():
    for got, expected, dtype, tolerance in (
        ([1.0003], [1.0], "float32", None),
        ([1.03], [1.0], "bfloat16", None),
        ([NAN], [1.0], "float32", 1e9),
        ([1.0], [NAN], "float32", 1e9),
        ([1.0], [INF], "float32", None),
        ([INF], [1e30], "float32", None),
        ([INF], [-INF], "float32", None),
        ([2.0], [1.0], "float32", (0.0, 0.99)),
    ):
        with naming(got):
            assert difference(F(got), F(expected), dtype, tolerance) is not None


def test_whole_numbers_are_compared_exactly():
    a = np.array([[2**62, 5]])
    assert difference(a, a, "int64", None) is None
    assert difference(a + 1, a, "int64", None) == (
        "2 of 2 elements are wrong, the first at [0, 0]: 4611686018427387905, expected "
        "4611686018427387904 (tolerance: 0 absolute, 0 relative)"
    )
    assert difference(a + 1, a, "int64", 1) is None


def test_a_difference_is_described():
    got = np.zeros((2, 3), F)
    got[1, 2], got[1, 1] = 5, 0.5
    said = difference(got, np.zeros((2, 3), F), "float32", None)
    assert said == (
        "2 of 6 elements are wrong, the first at [1, 1]: 0.5, expected 0.0; the largest error is 5 "
        "(tolerance: 0.0001 absolute, 0.0001 relative)"
    )
    assert difference(got, got[0], "float32", None) == "has shape (2, 3), and (3,) is expected"
