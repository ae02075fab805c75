"""needle/kernels/measure.py: what is timed, on the host; and what a time is taken for."""

import time

import pytest

from needle import _C
from needle.kernels import measure
from needle.kernels.measure import Timing, judge

GB = 1e9


def test_each_call_finds_its_inputs_restored():
    """Sets come in turn, warm-up included, and the last call of each is handed over."""
    done = []
    times, nothing, rate = measure.measure(
        lambda: (done.append("call"), time.sleep(0.002)),
        lambda number: done.append(number),
        lambda number: done.append(f"keep {number}"),
        3,
        _C.cpu(),
        flush_bytes=4096,
        seconds=0.02,
    )
    assert len(times) >= measure.LEAST_CALLS and min(times) > 1900
    assert 0 < nothing < 1900 and rate > 0
    restored = [entry for entry in done if isinstance(entry, int)]
    assert restored == [*[0, 1, 2], *[n % 3 for n in range(len(times))]]
    for before, after in zip(done, done[1:]):
        assert (after == "call") == isinstance(before, int)
    kept = [entry for entry in done if str(entry).startswith("keep")]
    assert sorted(kept) == ["keep 0", "keep 1", "keep 2"]
    assert done[-1] in kept


def test_the_number_of_calls_follows_the_time():
    def calls(seconds):
        return len(
            measure.measure(
                lambda: time.sleep(0.001),
                lambda _: None,
                lambda _: None,
                1,
                _C.cpu(),
                4096,
                seconds,
            )[0]
        )

    assert calls(0.0) == measure.LEAST_CALLS
    assert 8 <= calls(0.02) <= 20
    assert calls(100.0) == measure.MOST_CALLS


def judged(times, nothing=2.0, rate=4000 * GB, written=0, touched=0, local=0) -> Timing:
    return judge(times, nothing, rate, written, touched, local, l2_bytes=50 << 20)


def test_median_and_quartiles():
    timing = judged([50.0, 10.0, 20.0, 40.0, 30.0], touched=30_000)
    assert (timing.lower, timing.median, timing.upper, timing.calls) == (20.0, 30.0, 40.0, 5)
    assert timing.rate == pytest.approx(1.0) and timing.device_rate == 4000
    assert timing.valid and timing.hints == () and timing.reason == ""
    assert judged([7.0]).median == judged([7.0]).upper == 7.0


def test_a_time_that_cannot_be_is_an_error():
    assert judged([0.5]).reason == "0.5 us are less than a launch takes"
    written = (50 << 20) + 5_000_000_000  # 1 ms at 1.25 times 4,000 GB/s, and what the cache keeps
    assert judged([1001.0], written=written).valid
    short = judged([999.0], written=written)
    assert not short.valid and short.reason.startswith("999 us for 5,052,428,800 bytes of outputs;")
    assert judged([20.0], written=50 << 20).valid


def test_hints():
    assert "launch-bound: a kernel that does nothing takes 2 us" in judged([3.9]).hints[0]
    assert "spilling: 48 bytes" in judged([30.0], local=48).hints[0]
    (hint,) = judged([30.0], touched=1 << 30).hints
    assert "not all of them can have been read" in hint


def test_a_timing_survives_json():
    import dataclasses
    import json

    timing = judged([3.0], local=4)
    assert Timing.from_json(json.loads(json.dumps(dataclasses.asdict(timing)))) == timing
