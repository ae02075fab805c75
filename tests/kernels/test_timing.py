"""needle/kernels/timing.py: the calls of a timing, on the host, and the judgement of times."""

import time
import weakref

import pytest

from needle import _C
from needle.kernels import timing
from needle.kernels.timing import Timing, judge

GB = 1e9


@pytest.mark.parametrize("warm", [True, False])
def test_each_call_finds_its_inputs_restored_and_its_code_new(warm):
    """Sets come in turn, and the last call of each is handed over. The warm-up of new code is with
    another set."""
    done = []

    def load():
        done.append("load")
        return lambda: (done.append("call"), time.sleep(0.002))

    times, nothing, rate = timing.measure(
        load,
        lambda number: done.append(number),
        lambda number: done.append(f"keep {number}"),
        3,
        warm,
        _C.cpu(),
        flush_bytes=4096,
        seconds=0.02,
    )
    assert len(times) >= timing.LEAST_CALLS and min(times) > 1900
    assert 0 < nothing < 1900 and rate > 0
    kept = [entry for entry in done if str(entry).startswith("keep")]
    assert sorted(kept) == ["keep 0", "keep 1", "keep 2"] and done[-1] == kept[-1]
    rest = [entry for entry in done if entry not in kept]
    sets = [n % 3 for n in (*range(timing.WARM_UP), *range(len(times)))]
    wanted = []
    for one in sets:
        wanted += ["load", *([(one + 1) % 3, "call"] if warm else []), one, "call"]
    assert rest == wanted
    for number in range(3):
        assert done[done.index(f"keep {number}") - 2 :][:2] == [number, "call"]


def test_the_code_is_gone_before_it_is_loaded_anew():
    alive = weakref.WeakSet()

    class Code:
        def __init__(self):
            assert not alive
            alive.add(self)

        def __call__(self):
            pass

    timing.measure(Code, lambda _: None, lambda _: None, 2, True, _C.cpu(), 4096, 0.01)
    assert not alive


def test_the_number_of_calls_follows_the_time():
    def calls(seconds, load=lambda: lambda: time.sleep(0.001)):
        nothing = lambda _: None
        times, _, _ = timing.measure(load, nothing, nothing, 1, False, _C.cpu(), 4096, seconds)
        return len(times)

    def slowly():
        time.sleep(0.02)
        return lambda: None

    assert calls(0.0) == timing.LEAST_CALLS
    assert 6 <= calls(0.02) <= 20
    assert calls(100.0) == timing.MOST_CALLS
    assert 5 <= calls(0.04, slowly) <= 10


def judged(times, nothing=2.0, rate=4000 * GB, written=0, touched=0, local=0) -> Timing:
    return judge(times, nothing, rate, written, touched, local)


def test_median_and_quartiles():
    timing = judged([50.0, 10.0, 20.0, 40.0, 30.0], touched=30_000)
    assert (timing.lower, timing.median, timing.upper, timing.calls) == (20.0, 30.0, 40.0, 5)
    assert timing.rate == pytest.approx(1.0) and timing.device_rate == 4000
    assert timing.valid and timing.hints == () and timing.reason == ""
    assert judged([7.0]).median == judged([7.0]).upper == 7.0


def test_a_time_that_cannot_be_is_an_error():
    assert judged([0.5]).reason == "0.5 us are less than a launch takes"
    written = (
        timing.L2_BYTES + 5_000_000_000
    )  # 1 ms at 1.25 times 4,000 GB/s, and what the cache keeps
    assert judged([1001.0], written=written).valid
    short = judged([999.0], written=written)
    assert not short.valid and short.reason.startswith("999 us for 5,067,108,864 bytes of outputs;")
    assert judged([20.0], written=timing.L2_BYTES).valid


def test_hints():
    assert "launch-bound: a kernel that does nothing takes 2 us" in judged([3.9]).hints[0]
    assert "spilling: 48 bytes" in judged([30.0], local=48).hints[0]
    (hint,) = judge([30.0], 2.0, 4000 * GB, 0, 0, 0, warm=False).hints
    assert "the first of its code" in hint and "Random arguments and trials above 1" in hint
    (hint,) = judged([30.0], touched=1 << 30).hints
    assert "not all of them can have been read" in hint
