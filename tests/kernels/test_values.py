"""What the pool and its processes share: arguments, the comparison of results (values.py), guard
bands (guard.py), times and their judgement (timing.py), the status of errors (worker.py)."""

import time

import numpy as np
import pytest
from harness import naming

from needle import _C
from needle._C import CudaError, CudaFatalError
from needle.kernels import LaunchError, Timing, guard, timing
from needle.kernels.guard import GUARD, Place
from needle.kernels.timing import Clock, judge
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
from needle.kernels.worker import failure, status_of

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
    with pytest.raises(ValueError, match="Random: a size of its shape: must be 0 or more"):
        Random((2, -1))
    with pytest.raises(TypeError, match="Out: a size of its shape: must be a whole number"):
        Out((2, 1.5))


def test_numbers_that_a_dtype_does_not_hold_are_refused():
    for dtype, low, high in (
        ("int8", 0, 129),
        ("uint8", -1, 5),
        ("int32", 5, 5),
        ("int32", 100, None),
    ):
        with naming(dtype), pytest.raises(ValueError, match="high|low"):
            Random(3, dtype, low=low, high=high).array(0, 0)
    assert Random(3, "int8", low=127, high=128).array(0, 0).tolist() == [127] * 3
    assert Random(3, "uint64", low=2**63, high=2**64).array(0, 0).min() >= 2**63
    with pytest.raises(ValueError, match="Random: seed: must be 0 or more"):
        Random(3, seed=-1)


# ---- comparing -----------------------------------------------------------------------------------


def test_tolerances():
    assert both(None) is None
    assert both(1) == both([1, 1.0]) == both(np.float32(1)) == both(np.ones(2)) == (1.0, 1.0)
    assert difference(F([2.0, 3.0]), F([1.0, 1.0]), "float32", [2, 0]) is None
    infinite = float("inf")
    for given in ("x", (1, "x"), {1: 2}, (1, 2, 3), (), -1e-4, (0, float("nan")), infinite):
        with naming(given), pytest.raises(ValueError, match="tolerance: must be a number, or"):
            both(given)


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
    said = difference(a + 1, a, "int64", None)
    assert said.startswith("2 of 2 elements are wrong, the first at [0, 0]: 4611686018427387905")
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
    """(places, a buffer with its arrays)."""
    places, size = guard.lay_out(ARRAYS)
    memory = np.zeros(size, np.uint8)
    guard.fill(memory, places)
    for place in places:
        if place.role != "out":
            place.bytes_of(memory)[:] = 3
    return places, memory


def place_of(places: list[Place], name: str) -> Place:
    return next(place for place in places if place.name == name)


def write_all(places, memory) -> np.ndarray:
    """Result of a right kernel."""
    after = memory.copy()
    for place in places:
        if place.role == "out":
            place.bytes_of(after)[:] = 1
    return after


def test_every_array_has_a_band_on_both_sides_and_starts_aligned(filled):
    places, memory = filled
    bands = guard.bands(places, memory.size)
    assert len(bands) == len(places) + 1
    for start, stop in bands:
        assert stop - start >= GUARD
    assert all(place.start % 256 == 0 for place in places)
    assert [place.stop - place.start for place in places] == [60, 14, 4, 0, 4]


def test_the_pattern_is_nan_and_never_the_same(filled):
    places, memory = filled
    for start, stop in guard.bands(places, memory.size):
        even = memory[start + start % 2 : stop - stop % 2]
        assert np.isnan(even.view(np.float16)).all()
        words = even[: even.size // 4 * 4].view(np.uint32)
        assert np.isnan(words.view(np.float32)).all()
    first, second = (memory[a:b][:GUARD] for a, b in guard.bands(places, memory.size)[:2])
    assert (first != second).mean() > 0.4
    again = memory.copy()
    guard.fill(again, places)
    assert (again != memory).any()


def test_a_write_outside_is_named(filled):
    after_end, before_start = "2 bytes were written after its end, the first ", "2 bytes were "
    before_start += "written before its start, the nearest "
    const = "it is const, and 1 of 15 elements (the first at [%s]) were changed"
    for name, edge, offset, said in (
        ("y", "stop", 0, f"{after_end}0 bytes after it (element 7 of 7)"),
        ("y", "stop", 100, f"{after_end}100 bytes after it (element 57 of 7)"),
        ("s", "stop", 4, f"{after_end}4 bytes after it (element 2 of 1)"),
        ("s", "stop", GUARD - 2, f"{after_end}65,534 bytes after it (element 16,384 of 1)"),
        ("y", "start", -2, f"{before_start}1 bytes before it (element -1)"),
        ("x", "start", -GUARD, f"{before_start}65,535 bytes before it (element -16384)"),
        ("x", "start", 4, const % "0, 1"),
        ("x", "start", 58, const % "4, 2"),
    ):
        with naming(name, edge, offset):
            places, memory = filled
            after = write_all(places, memory)
            first = getattr(place_of(places, name), edge) + offset
            after[first : first + 2] ^= 0x55
            assert guard.written_outside(memory, after, places) == f"{name}: {said}"
    assert guard.written_outside(memory, write_all(places, memory), places) == ""


def test_two_faults_are_both_named(filled):
    places, memory = filled
    after = write_all(places, memory)
    after[place_of(places, "x").stop] ^= 1
    after[place_of(places, "s").stop] ^= 1
    assert guard.written_outside(memory, after, places).count(" after its end") == 2


def test_unwritten_elements_of_floats_are_named(filled):
    places, memory = filled
    after, y = write_all(places, memory), place_of(places, "y")
    assert guard.unwritten(memory, after, places) == ""
    y.bytes_of(after)[6:8] = y.bytes_of(memory)[6:8]
    said = "y: 1 of 7 elements (the first at [3]) were not written"
    assert guard.unwritten(memory, after, places) == said


# ---- time ----------------------------------------------------------------------------------------

GB = 1e9


def test_each_call_is_prepared_and_timed():
    done = []

    def prepare():
        done.append("prepared")
        return lambda: (done.append("called"), time.sleep(0.002))

    clock = Clock(_C.cpu(), 4096)
    times = clock.measure(prepare, 0.05)
    assert 2 <= len(times) <= 25 and min(times) > 1900
    assert done == ["prepared", "called"] * len(times)
    assert 0 < clock.nothing < 1900 and clock.fill_rate > 0 and clock.product_rate(32) > 0
    assert len(clock.measure(lambda: lambda: None, 0.0)) == 1
    assert len(clock.measure(lambda: lambda: None, 100.0)) == timing.MOST_CALLS


def judged(times, nothing=2.0, rate=4000 * GB, written=0, touched=0, **more) -> Timing:
    clock = {"nothing": nothing, "fill_rate": rate, "product_rate": 1e12}
    return judge(times, clock, written, touched, **more)


def test_median_and_quartiles():
    timing = judged([50.0, 10.0, 20.0, 40.0, 30.0], touched=30_000)
    assert (timing.lower, timing.median, timing.upper, timing.calls) == (20.0, 30.0, 40.0, 5)
    assert timing.rate == pytest.approx(1.0) and timing.device_rate == 4000
    assert timing.valid and timing.hints == () and timing.reason == ""
    assert judged([7.0]).median == judged([7.0]).upper == 7.0


def test_a_time_that_cannot_be_is_an_error():
    assert judged([0.5]).reason == "0.5 us are less than a launch takes"
    # 1 ms at 1.25 times 4,000 GB/s, and what the cache keeps
    written = timing.L2_BYTES + 5_000_000_000
    assert judged([1001.0], written=written).valid
    short = judged([999.0], written=written)
    assert not short.valid and short.reason.startswith("999 us for 5,067,108,864 bytes of outputs")
    assert judged([20.0], written=timing.L2_BYTES).valid
    # 100 us at 4 times 1 TFLOP/s
    assert judged([101.0], operations=4e8).valid and not judged([99.0], operations=4e8).valid


def test_hints():
    assert "launch-bound: a kernel that does nothing takes 2 us" in judged([3.9]).hints[0]
    assert "spilling: 48 bytes" in judged([30.0], local_bytes=48).hints[0]
    (hint,) = judged([30.0], warm=False).hints
    assert "the first of its code" in hint and "Random arguments and trials above 1" in hint
    (hint,) = judged([30.0], touched=1 << 30).hints
    assert "not all of them can have been read" in hint


# ---- errors --------------------------------------------------------------------------------------

FATAL = "scale: cudaStreamSynchronize: ... (%s): the CUDA context is lost and this process must end"


def test_each_error_has_its_status():
    for name, status in (
        ("cudaErrorIllegalAddress", "illegal_address"),
        ("cudaErrorMisalignedAddress", "misaligned_address"),
        ("cudaErrorAssert", "assertion"),
        ("cudaErrorLaunchFailure", "launch_failure"),
        ("cudaErrorIllegalInstruction", "launch_failure"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "illegal_address"),
        ("cudaErrorLaunchTimeout", "timeout"),
        ("cudaErrorECCUncorrectable", "device_lost"),
    ):
        with naming(name):
            assert status_of(CudaFatalError(FATAL % name)) == status
    for error, status in (
        (CudaError("k: ... (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"), "invalid_launch"),
        (CudaError("allocate: out of memory on cuda(0): 9.0 MiB asked for"), "out_of_memory"),
        (CudaError("k: ... (cudaErrorMemoryAllocation)"), "out_of_memory"),
        (LaunchError("k: block (2048, 1, 1) has 2,048 threads"), "invalid_launch"),
        (TypeError("k: args[0]: must be an array"), "invalid_launch"),
        (MemoryError(), "out_of_memory"),
    ):
        with naming(error):
            assert status_of(error) == status
    assert failure("out_of_memory", MemoryError())["message"] == "MemoryError"
    assert failure("invalid_launch", KeyError("no kernel 'x'"))["message"] == "no kernel 'x'"
    assert len(failure("crashed", ValueError("x" * 10**6))["message"]) == 64 << 10
