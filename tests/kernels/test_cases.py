"""What the pool and its processes share: arguments and the comparison of results (cases.py), guard
bands (guard.py), times and their judgement (timing.py), the status of errors (worker.py)."""

import time

import numpy as np
import pytest
from harness import naming

from needle import _C
from needle._C import CudaError, CudaFatalError
from needle.kernels import LaunchError, Timing, guard, timing
from needle.kernels.cases import (
    DTYPES,
    Case,
    InOut,
    Launch,
    Out,
    Random,
    both,
    difference,
    host_array,
    readable,
)
from needle.kernels.guard import GUARD
from needle.kernels.timing import Clock, judge
from needle.kernels.worker import status_of

# ---- arguments -----------------------------------------------------------------------------------


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


def test_seed_gives_other_numbers_at_each_place_and_trial():
    same = Random(100, seed=3)
    a, b = (Launch(Case(1, 1, [same, 2, same, InOut(same)]), trial).arrays for trial in (0, 1))
    assert len({array.tobytes() for array in (*a, *b)}) == 6
    assert (Launch(Case(1, 1, [same])).arrays[0] == a[0]).all()
    numpys = np.random.default_rng([3, 1, 2]).standard_normal(100)  # a client draws the same
    assert (b[1] == numpys.astype(np.float32)).all()


def test_random_numbers_have_their_bounds():
    for dtype, low, high, expected in (
        ("int32", -3, 4, range(-3, 4)),
        ("int8", 127, 128, [127]),
        ("uint64", 2**64 - 2, 2**64, [2**64 - 2, 2**64 - 1]),
        ("int16", None, None, range(100)),
    ):
        with naming(dtype):
            assert {*Random(2000, dtype, 0, low, high).array(0, 0).tolist()} == {*expected}
    flat = Random(1000, "float64", low=2, high=3).array(0, 0)
    assert 2 <= flat.min() < 2.1 and 2.9 < flat.max() < 3


def test_views_are_made_contiguous():
    array = np.arange(12, dtype=np.int16).reshape(3, 4).T
    name, bits = host_array(array)
    assert name == "int16" and bits.flags.c_contiguous and (bits == array).all()
    assert host_array(np.float32(3))[1].shape == ()
    view = _C.array(np.arange(6).reshape(2, 3), "bfloat16", _C.cpu()).permute((1, 0))
    assert (readable("bfloat16", host_array(view)[1]) == np.arange(6).reshape(2, 3).T).all()


def test_wrong_arguments_are_named():
    for error, said, make in (
        (TypeError, "there are float32, bfloat16", lambda: host_array(np.array(["a"]))),
        (TypeError, "Out: dtype 'float8'", lambda: Out(3, "float8")),
        (TypeError, "Out: a size of its shape: must be a whole", lambda: Out((2, 1.5))),
        (ValueError, "Random: a size of its shape: must be 0 or more", lambda: Random((2, -1))),
        (ValueError, "Random: seed: must be 0 or more", lambda: Random(3, seed=-1)),
        (ValueError, "high", lambda: Random(3, "int8", low=0, high=129).array(0, 0)),
        (ValueError, "low", lambda: Random(3, "uint8", low=-1).array(0, 0)),
        *((ValueError, "tolerance: must be a number, or", lambda given=given: both(given))
          for given in ("x", (1, "x"), (1, 2, 3), (), (-1e-4, 0), (0, NAN), INF)),
    ):  # fmt: skip
        with naming(said), pytest.raises(error, match=said):
            make()
    assert Out(3).shape == Random([3]).shape == (3,)
    assert both(1) == both([1, 1.0]) == both(np.float32(1)) == both(np.ones(2)) == (1.0, 1.0)


# ---- comparing -----------------------------------------------------------------------------------

F = np.float32
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


def test_difference_is_described():
    got = np.zeros((2, 3), F)
    got[1, 2], got[1, 1] = 5, 0.5
    assert difference(got, np.zeros((2, 3), F), "float32", None) == (
        "2 of 6 elements are wrong, the first at [1, 1]: 0.5, expected 0.0; the largest error is 5 "
        "(tolerance: 0.0001 absolute, 0.0001 relative)"
    )
    assert difference(got, got[0], "float32", None) == "has shape (2, 3), and (3,) is expected"


# ---- guard bands ---------------------------------------------------------------------------------

ARRAYS = [
    ("x", "float32", (5, 3), "const"),
    ("y", "bfloat16", (7,), "out"),
    ("n", "uint8", (2, 2), "inout"),
    ("none", "int64", (0, 4), "out"),
    ("s", "float32", (), "in"),
]


@pytest.fixture
def filled():
    """(places by name, a buffer with its arrays, and the buffer after a right kernel)."""
    places, size = guard.lay_out(ARRAYS)
    before = np.zeros(size, np.uint8)
    guard.fill(before, places)
    after = before.copy()
    for place in places:
        for memory in (before, after) if place.role != "out" else (after,):
            place.bytes_of(memory)[:] = 3
    return {place.name: place for place in places}, before, after


def test_write_outside_is_named(filled):
    places, before, right = filled
    after_end, before_start = "2 bytes were written after its end, the first ", "2 bytes were "
    before_start += "written before its start, the nearest "
    const = "it is const, and 1 of 15 elements (the first at [%s]) were changed"
    for name, edge, offset, said in (
        ("y", "stop", 0, f"{after_end}0 bytes after it (element 7 of 7)"),
        ("s", "stop", 4, f"{after_end}4 bytes after it (element 2 of 1)"),
        ("s", "stop", GUARD - 2, f"{after_end}65,534 bytes after it (element 16,384 of 1)"),
        ("y", "start", -2, f"{before_start}1 bytes before it (element -1)"),
        ("x", "start", -GUARD, f"{before_start}65,535 bytes before it (element -16384)"),
        ("x", "start", 58, const % "4, 2"),
    ):
        with naming(name, edge, offset):
            after = right.copy()
            first = getattr(places[name], edge) + offset
            after[first : first + 2] ^= 0x55
            found = guard.written_outside(before, after, [*places.values()])
            assert found == f"{name}: {said}"
    assert guard.written_outside(before, right, [*places.values()]) == ""
    after[places["s"].stop] ^= 1
    assert guard.written_outside(before, after, [*places.values()]).count("; ") == 1  # both


def test_bands_differ_and_lie_on_both_sides_of_aligned_arrays(filled):
    places, before, _ = filled
    assert all(place.start % 256 == 0 for place in places.values())
    spans = guard.bands([*places.values()], before.size)
    assert len(spans) == len(places) + 1 and all(stop - at >= GUARD for at, stop in spans)
    first, second = (before[at : at + GUARD] for at, _ in spans[:2])
    assert (first != second).mean() > 0.4
    again = before.copy()
    guard.fill(again, [*places.values()])
    assert (again != before).any()


# ---- time ----------------------------------------------------------------------------------------


def test_call_is_prepared_and_timed():
    done = []

    def prepare():
        done.append("prepared")
        return lambda: (done.append("called"), time.sleep(0.002))

    clock = Clock(_C.cpu(), 4096)
    times = clock.measure(prepare, 0.02)
    assert min(times) > 1900 and done == ["prepared", "called"] * len(times)
    assert clock.nothing > 0 and clock.fill_rate > 0 and clock.product_rate(32) > 0
    for seconds, calls in ((0.0, 1), (1e9, timing.MOST_CALLS)):
        assert len(clock.measure(lambda: lambda: None, seconds)) == calls


def judged(times, written=0, touched=0, **more) -> Timing:
    clock = {"nothing": 2.0, "fill_rate": 4e12, "product_rate": 1e12}
    return judge(times, clock, written, touched, **more)


def test_median_and_quartiles():
    timing = judged([50.0, 10.0, 20.0, 40.0, 30.0], touched=30_000)
    assert (timing.lower, timing.median, timing.upper, timing.calls) == (20.0, 30.0, 40.0, 5)
    assert timing.rate == pytest.approx(1.0) and timing.device_rate == 4000
    assert timing.valid and timing.hints == () and timing.reason == ""
    assert judged([7.0]).median == judged([7.0]).upper == 7.0


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
    ):
        with naming(us, more):
            found = judged([us], **more)
            assert reason in found.reason and found.valid == (found.reason == "") == (reason == "")
            assert hint in " ".join(found.hints) and (hint or reason or not found.hints)


# ---- errors --------------------------------------------------------------------------------------

LOST = "scale: cudaStreamSynchronize: ... (%s): the CUDA context is lost and this process must end"


def test_error_has_its_status():
    for error, status in (
        (CudaFatalError(LOST % "cudaErrorIllegalAddress"), "illegal_address"),
        (CudaFatalError(LOST % "CUDA_ERROR_ILLEGAL_ADDRESS"), "illegal_address"),
        (CudaFatalError(LOST % "cudaErrorMisalignedAddress"), "misaligned_address"),
        (CudaFatalError(LOST % "cudaErrorAssert"), "assertion"),
        (CudaFatalError(LOST % "cudaErrorLaunchFailure"), "launch_failure"),
        (CudaFatalError(LOST % "cudaErrorIllegalInstruction"), "launch_failure"),
        (CudaFatalError(LOST % "cudaErrorLaunchTimeout"), "timeout"),
        (CudaFatalError(LOST % "cudaErrorECCUncorrectable"), "device_lost"),
        (CudaError("k: ... (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"), "invalid_launch"),
        (CudaError("allocate: out of memory on cuda(0): 9.0 MiB asked for"), "out_of_memory"),
        (CudaError("k: ... (cudaErrorMemoryAllocation)"), "out_of_memory"),
        (LaunchError("k: block (2048, 1, 1) has 2,048 threads"), "invalid_launch"),
        (TypeError("k: args[0]: must be an array"), "invalid_launch"),
        (MemoryError(), "out_of_memory"),
    ):
        with naming(error):
            assert status_of(error) == status
