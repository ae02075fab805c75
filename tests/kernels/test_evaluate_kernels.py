"""needle/kernels/isolate.py without a GPU: evaluating against references, timing, and the reports
of compute-sanitizer.
"""

import os
import signal
import sys
import textwrap

import numpy as np
import pytest
from fake_pool import SECONDS, SHORT, SOURCE, FakePool, X, assert_next_is_right, run

from needle.kernels import crew, frames, isolate, sanitizer
from needle.kernels.values import Case, Out, Random

pytestmark = pytest.mark.slow


def test_the_memory_of_a_job_is_bounded(pool, monkeypatch):
    monkeypatch.setattr(pool, "memory", 1 << 20)
    assert_next_is_right(pool)
    result = run(pool, "scale", X, Out(1 << 18), 1.0, 6)
    assert result.status == "out_of_memory" and "this Pool allows 1,048,576" in result.message
    case = Case(1, 1, [X, Out(6), 1.0, 6])
    result = evaluate(pool, "scale", [case], [X])
    assert result.status == "out_of_memory" and result.message.startswith("case 0, timed: the ")
    monkeypatch.setattr(pool, "memory", None)
    result = run(pool, "scale", X, Out(1 << 50), 1.0, 6)
    assert result.status == "out_of_memory" and "and the device has" in result.message
    monkeypatch.setattr(isolate, "available", lambda: 1 << 20)
    result = run(pool, "scale", X, Out(1 << 18), 1.0, 6)
    assert (
        result.status == "out_of_memory" and "of the host's, which has 1,048,576" in result.message
    )


# ---- evaluating ----------------------------------------------------------------------------------


def double(x):
    return 2 * x


def evaluate(pool, entry, cases, reference=double, **more):
    return pool.evaluate(SOURCE, entry, cases, reference, **{"trials": 3, **more})


def test_a_right_kernel_is_timed(pool):
    cases = [Case(1, 32, [Random(n), Out(n), 2.0, n]) for n in (100, 2000)]
    result = evaluate(pool, "scale", cases, lambda x, a, n: a * x)
    assert (result.status, result.message) == ("ok", "")
    assert len(result.timing) == 2
    for timing in result.timing:
        assert timing.valid and 0 < timing.lower <= timing.median <= timing.upper
    untimed = evaluate(pool, "scale", cases, lambda x, a, n: a * x, time=False)
    assert untimed.timing == ()


def test_a_spill_is_hinted_at(pool):
    result = evaluate(pool, "spills", [Case(1, 1, [Random(9), Out(9)])], lambda x: x)
    assert any("spilling: 8 bytes" in hint for hint in result.timing[0].hints)


def test_a_wrong_kernel_is_found_in_the_trial_that_shows_it(pool):
    case = Case(1, 32, [Random(40), Out(40)])
    result = evaluate(pool, "uneven", [case], trials=40)
    assert result.status == "wrong_result" and result.timing == ()
    assert result.message.startswith("case 0, trial ") and "elements are wrong" in result.message
    assert len(result.outputs) == 1
    assert evaluate(pool, "uneven", [case], trials=2, tolerance=(1.0, 0.0)).status == "ok"


def test_a_kernel_that_leans_on_its_last_call_is_found(pool):
    """It is right once, and then keeps what it finds: the timed calls show it."""
    case = Case(1, 32, [Random(40), Out(40)])
    assert evaluate(pool, "only_once", [case], time=False).status == "ok"
    result = evaluate(pool, "only_once", [case])
    assert result.status == "wrong_result" and "case 0, timed: args[1]" in result.message


REMEMBERS = """
KNOWN = {}
def remembers(grid, block, x: "float const*", w: "float const*", y: "float*"):
    key = x.tobytes() if x[0] else w.tobytes()
    if key not in KNOWN:
        time.sleep(0.02)
        KNOWN[key] = 2 * x + w
    y[:] = KNOWN[key]
"""


@pytest.mark.parametrize("x", [Random(50), X, np.zeros(6, np.float32)], ids=["drawn", "given", "0"])
@pytest.mark.parametrize("w", [Random(6), X], ids=["drawn", "given"])
def test_a_kernel_that_remembers_gains_nothing(pool, x, w):
    """It computes each set of inputs once, and copies from then on: from one load of its code to
    the next it forgets, and what its warm-up saw is no part of what it is timed with."""
    size = x.shape[0]
    w = Random(size) if isinstance(w, Random) else np.ones(size, np.float32)
    case = Case(1, 32, [x, w, Out(size)])
    result = pool.evaluate(REMEMBERS, "remembers", [case], lambda x, w: 2 * x + w)
    assert (result.status, result.message) == ("ok", "")
    (timing,) = result.timing
    assert timing.lower >= 20_000
    drawn = isinstance(x, Random) and isinstance(w, Random)
    assert any("the first of its code" in hint for hint in timing.hints) != drawn


def test_an_impossible_time_is_no_result(pool, monkeypatch):
    real = isolate.Timing.from_json

    def impossible(fields):
        return real({**fields, "valid": False, "reason": "0.1 us are less than a launch takes"})

    monkeypatch.setattr(isolate.Timing, "from_json", staticmethod(impossible))
    result = evaluate(pool, "scale", [Case(1, 1, [X, Out(6), 2.0, 6])], [[2 * X]])
    assert result.status == "wrong_result" and "less than a launch takes" in result.message


def test_a_fault_ends_an_evaluation(pool):
    result = evaluate(pool, "fails", [Case(1, 1, [0])], lambda kind: [])
    assert result.status == "illegal_address" and result.message.startswith("case 0, trial 0: ")
    result = evaluate(pool, "outside", [Case(1, 1, [X, Out(6), 24])], lambda x, where: 0 * x)
    assert result.status == "out_of_bounds"
    assert_next_is_right(pool)


def test_references(pool):
    case = Case(1, 32, [X, Out(6), 2.0, 6])
    assert evaluate(pool, "scale", [case], [2 * X]).status == "ok"
    assert evaluate(pool, "scale", [case, case], [[2 * X], X]).message.startswith("case 1, trial 0")
    with pytest.raises(ValueError, match="gave 2 outputs, and the kernel has 1: args"):
        evaluate(pool, "scale", [case], lambda *_: (X, X))
    with pytest.raises(ValueError, match="trials"):
        evaluate(pool, "scale", [case], [2 * X], trials=0)
    assert evaluate(pool, "scale", [case], [X[:3]]).message.endswith("and (3,) is expected")


CASE = Case(1, 32, [Random(6), Out(6)])


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"cases": []}, ValueError, "cases: there must be one"),
        ({"cases": [(1, 1, [])]}, TypeError, r"cases\[0\]: must be a Case, not tuple"),
        ({"reference": []}, ValueError, "reference: 0 for 1 cases"),
        ({"reference": iter([X])}, TypeError, "reference: must be a function, or a list"),
        ({"cases": CASE}, TypeError, "cases: must be a list of Case, not Case"),
        ({"reference": lambda x: None}, TypeError, "reference: must give an array, .* NoneType"),
        ({"tolerance": "x"}, TypeError, "tolerance: must be a number"),
        ({"trials": 2.5}, TypeError, "trials: must be a whole number"),
    ],
)
def test_wrong_evaluations(pool, arguments, error, said):
    before = pool.state()[0]
    with pytest.raises(error, match=said):
        evaluate(pool, "spills", **{"cases": [CASE], **arguments})
    assert pool.state()[0] == before


def test_more_trials_than_a_frame_has_files(pool):
    before = pool.state()[0]
    result = evaluate(pool, "spills", [CASE], lambda x: x, trials=frames.OPEN_FILES + 1)
    assert (result.status, len(result.timing)) == ("ok", 1)
    assert pool.state()[0] == before


def test_a_tolerance_may_be_a_list(pool):
    assert evaluate(pool, "spills", [CASE], lambda x: x, tolerance=[1e-4, 1e-4]).status == "ok"


# ---- compute-sanitizer ---------------------------------------------------------------------------

REPORT = """========= Invalid __global__ write of size 4 bytes
=========     at k(float *)+0x90 in kernel.cu:7
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f1ea0000080 is out of bounds
"""


@pytest.fixture
def fake_sanitizer(tmp_path, monkeypatch):
    """A compute-sanitizer that runs the command and writes a report."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(f"""
            import subprocess, sys
            worker = next(i for i, word in enumerate(sys.argv) if word == {sys.executable!r})
            options = sys.argv[:worker]
            fd = int(sys.argv[-1])
            code = subprocess.call(sys.argv[worker:], pass_fds=[fd])
            tool = options[options.index("--tool") + 1]
            report = {REPORT!r} if tool == "memcheck" else ""
            open(options[options.index("--log-file") + 1], "w").write(report)
            sys.exit(code)
        """)
    )
    program.chmod(0o755)
    monkeypatch.setattr(isolate, "find_sanitizer", lambda: str(program))


def test_a_fault_is_explained(pool, fake_sanitizer):
    result = run(pool, "fails", 0, explain=True)
    assert result.status == "illegal_address"
    (finding,) = result.explanation
    assert (finding.line, finding.thread, finding.block) == (7, (3, 0, 0), (1, 0, 0))
    assert "memcheck: Invalid __global__ write" in result.message and "line 7" in result.message
    assert run(pool, "fails", 6, explain=True).explanation == ()
    assert run(pool, "scale", X, Out(6), 2.0, 6, explain=True).explanation == ()


def test_a_sanitizer_may_be_asked_for_at_once(pool, fake_sanitizer):
    result = run(pool, "scale", X, Out(6), 2.0, 6, sanitizer="memcheck")
    assert result.status == "out_of_bounds" and "line 7" in result.message
    result = run(pool, "scale", X, Out(6), 2.0, 6, sanitizer="racecheck")
    assert result.status == "ok" and (result.outputs[0] == 2 * X).all()
    assert run(pool, "signals", signal.SIGSEGV, sanitizer="synccheck").status == "crashed"
    assert_next_is_right(pool)


@pytest.mark.parametrize("entry, args", [("fails", [0]), ("signals", [9]), ("hangs", [])])
def test_a_fault_below_a_sanitizer_counts(pool, fake_sanitizer, short, monkeypatch, entry, args):
    monkeypatch.setattr(isolate, "SLOWER", 1)
    before = pool.state()[0]["faults"]
    run(pool, entry, *args, sanitizer="synccheck")
    assert pool.state()[0]["faults"] == before + 1
    monkeypatch.setattr(pool, "timeout", SECONDS)
    assert run(pool, "scale", X, Out(6), 2.0, 6, sanitizer="racecheck").status == "ok"
    assert pool.state()[0]["faults"] == before + 1
    assert_next_is_right(pool)


def test_a_sanitized_process_that_outlives_sigkill_holds_its_device(fake_sanitizer, monkeypatch):
    undying, real = [], crew.Worker.ended
    monkeypatch.setattr(crew.Worker, "ended", lambda w: w.pid not in undying and real(w))
    monkeypatch.setattr(crew, "REAP_SECONDS", 0.2)
    monkeypatch.setattr(crew.Worker, "kill", lambda w, kill=crew.Worker.kill: (
        undying.append(w.pid) if "traced" in w.process.args else None, kill(w)
    ))  # fmt: skip
    monkeypatch.setattr(isolate, "SLOWER", 1)
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as pool:
        assert_next_is_right(pool)
        pool.timeout = SHORT
        assert run(pool, "hangs", sanitizer="synccheck").status == "timeout"
        pool.timeout = SECONDS
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "after SIGKILL and holds" in result.message
        undying.clear()
        pool.reset(0)
        assert_next_is_right(pool)


def test_no_sanitizer(pool, monkeypatch):
    monkeypatch.setattr(isolate, "find_sanitizer", lambda: None)
    result = run(pool, "fails", 0, explain=True)
    assert result.status == "illegal_address" and "no compute-sanitizer here" in result.message
    with pytest.raises(ValueError, match="sanitizer: there is no compute-sanitizer here"):
        run(pool, "fails", 0, sanitizer="memcheck")
    assert_next_is_right(pool)
    assert sanitizer.find_sanitizer() is None or os.access(sanitizer.find_sanitizer(), os.X_OK)
