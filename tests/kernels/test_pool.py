"""needle.kernels.Pool without a GPU: "kernels" are Python functions in real worker processes
(fake_worker.py) that fault, hang, die, and write out of bounds.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from fake_pool import SECONDS, SHORT, SOURCE, FakePool, X, assert_next_is_right, run
from harness import ROOT, naming, python, wait_for

from needle._C import array, cpu
from needle.kernels import Case, InOut, Out, Random, workers
from needle.kernels import pool as pool_module

pytestmark = pytest.mark.slow

# ---- outputs -------------------------------------------------------------------------------------


def test_run_returns_outputs_and_resources(pool):
    result = run(pool, "scale", X.reshape(2, 3), Out((2, 3)), np.float32(0.5), 6)
    assert (result.status, result.device, result.explanation) == ("ok", 0, ())
    (y,) = result.outputs
    assert (y == X.reshape(2, 3) / 2).all() and y.dtype == np.float32
    compiled = {"registers": 16, "shared_bytes": 0, "local_bytes": 0, "max_threads": 1024}
    launched = {"occupancy": 0.5, "limiter": "threads", "blocks_per_sm": 2}
    assert result.resources == compiled | launched


def test_run_returns_arrays_that_the_kernel_writes(pool):
    n = np.arange(5, dtype=np.int32)
    result = run(pool, "increment", n)
    assert (result.status, result.message) == ("ok", "") and n[0] == 0
    assert (result.outputs[0] == n + 1).all()
    given = run(pool, "scale_c", X, np.zeros(6, np.float32), 2.0, 6)
    assert given.status == "ok" and given.outputs == ()
    (y,) = run(pool, "scale_c", X, InOut(np.zeros(6, np.float32)), 2.0, 6).outputs
    assert (y == 2 * X).all()
    (y,) = run(pool, "scale", array([1.0, 2.0], device=cpu()), Out(2), 3.0, 2).outputs
    assert (y == [3, 6]).all()
    result = run(pool, "scale", np.zeros((0, 4), np.float32), Out((0, 4)), 3.0, 0)
    assert result.status == "ok" and result.outputs[0].shape == (0, 4)


def test_run_keeps_the_bits_of_each_dtype(pool):
    source = 'def copy(grid, block, x: "", y: "void*"): y[...] = x'
    for dtype in ("bfloat16", "float16", "float64", "int8", "uint32", "bool", "complex128"):
        with naming(dtype):
            x = Random((3, 5), dtype).array(0, 0)
            result = pool.run(source, "copy", 1, 1, [x, Out((3, 5), dtype)])
            assert (result.status, result.message) == ("ok", "")
            expected = x.numpy() if dtype == "bfloat16" else x
            assert (result.outputs[0] == expected).all() and result.outputs[0].shape == (3, 5)


def test_run_keeps_the_types_of_numbers(pool):
    record = np.zeros(1, [("a", "f4"), ("b", "i4")])[0]
    given = [np.float32(1e-45), np.float16(2), 2**63, float("inf"), True, np.int8(-1), b"xy"]
    result = run(pool, "types", Out(8, "int32"), *given, record)
    assert (result.status, result.message) == ("ok", "") and result.outputs[0].all()
    args = [X, Out((6,)), 2.0, 6]
    result = pool.run(SOURCE, "scale", np.array([4, 2]), np.array([32]), args)
    assert (result.status, result.message) == ("ok", "")


def test_printed_text_is_cut_and_is_no_answer(pool):
    assert run(pool, "prints", 10).printed == "x" * 10 + "end"
    long = run(pool, "prints", 300_000).printed
    assert long.startswith("x" * 65536 + "\n[234,467 more bytes")
    assert run(pool, "no_results").printed == ""
    result = run(pool, "forges")
    assert result.status == "ok" and '"illegal_address"' in result.printed


def test_memory_of_a_job_is_limited(pool, monkeypatch):
    monkeypatch.setattr(pool, "memory", 1 << 20)
    assert_next_is_right(pool)
    result = run(pool, "scale", X, Out(1 << 18), 1.0, 6)
    assert result.status == "out_of_memory" and "this Pool allows 1,048,576" in result.message
    result = evaluate(pool, "scale", [Case(1, 1, [X, Out(6), 1.0, 6])], [X])
    assert result.status == "out_of_memory" and result.message.startswith("case 0, timed: the ")
    monkeypatch.setattr(pool, "memory", None)
    result = run(pool, "scale", X, Out(1 << 50), 1.0, 6)
    assert result.status == "out_of_memory" and "and the device has" in result.message
    monkeypatch.setattr(pool_module, "available", lambda: 1 << 20)
    result = run(pool, "scale", X, Out(1 << 18), 1.0, 6)
    assert result.status == "out_of_memory" and "the host's, which has 1,048,576" in result.message


# ---- faults, and the job after them --------------------------------------------------------------


def test_faults_have_a_status_and_the_next_job_is_right(pool, monkeypatch):
    for entry, args, status, said, fault in (
        ("fails", [0], "illegal_address", "k: cu", True),
        ("fails", [6], "invalid_launch", "k: cu", False),
        ("asserts", [], "assertion", "kernel.cu:5: k: block: [0,0,0], thread: [3,0,0] Ass", True),
        ("signals", [signal.SIGSEGV], "crashed", "it was ended by SIGSEGV", True),
        ("signals", [signal.SIGKILL], "crashed", "it was ended by SIGKILL", True),
        ("breaks", [], "crashed", "a defect of the worker", True),
        ("hangs", [], "timeout", "no answer after 0.4 s", True),
        ("stops", [], "timeout", "the process was killed", True),
    ):
        with naming(entry, *args):
            faults = pool.state()[0]["faults"]
            with monkeypatch.context() as patched:
                if status == "timeout":
                    patched.setattr(pool, "timeout", SHORT)
                began = time.monotonic()
                result = run(pool, entry, *args)
            assert result.status == status and said in result.message and result.outputs == ()
            assert status != "timeout" or SHORT <= time.monotonic() - began
            assert pool.state()[0]["faults"] == faults + fault
            assert_next_is_right(pool)


def test_an_idle_process_that_is_killed_or_stopped_is_replaced(pool):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        with naming(number.name):
            assert_next_is_right(pool)
            waiting = pool.state()[0]["ready"]
            assert waiting
            for pid in waiting:
                os.kill(pid, number)
            time.sleep(0.05)
            assert_next_is_right(pool)
            assert not set(pool.state()[0]["ready"]) & set(waiting)


# ---- guard bands ---------------------------------------------------------------------------------


def test_writes_out_of_bounds_are_named(pool):
    for where, said in (
        (24, "args[1] (float*): 4 bytes were written after its end, the first 0 bytes after it"),
        (-4, "args[1] (float*): 4 bytes were written before its start, the nearest 1 bytes before"),
        (4096, "the first 4,072 bytes after it (element 1,024 of 6)"),
    ):
        result = run(pool, "outside", X, Out(6), where)
        assert result.status == "out_of_bounds" and said in result.message
        assert len(result.outputs) == 1
    result = run(pool, "changes_const", X, Out(6))
    assert result.status == "out_of_bounds"
    assert "takes it as const, and 1 of 6 elements were changed, the first at [1]" in result.message
    assert X[1] == 1
    assert_next_is_right(pool)


def test_unwritten_elements_are_named(pool):
    for dtype in ("float32", "uint8", "bool", "float16"):
        with naming(dtype):
            assert run(pool, "leaves_out", Out(500, dtype), 500).status == "ok"
            result = run(pool, "leaves_out", Out(500, dtype), 498)
            assert result.status == "wrong_result"
            assert "2 of 500 elements were not written, the first at [498]" in result.message
            assert (result.outputs[0][:498] == 1).all()


def test_an_output_may_equal_the_poison(pool):
    source = 'def all_bytes(grid, block, y: "unsigned char*"): y[:] = np.arange(y.size) % 256'
    for _ in range(3):
        result = pool.run(source, "all_bytes", 1, 1, [Out(100_000, "uint8")])
        assert (result.status, result.message) == ("ok", "")


# ---- the compiler --------------------------------------------------------------------------------


def test_failures_of_compiling_have_a_status(pool, monkeypatch):
    result = pool.run("def broken(:", "broken", 1, 1, [])
    assert result.status == "compile_error" and "kernel.py(1): error" in result.message
    assert pool.run(SOURCE, "absent", 1, 1, []).status == "compile_error"
    with monkeypatch.context() as patched:
        patched.setattr(pool_module, "COMPILE_SECONDS", 0.3)
        result = pool.run("# hang the compiler", "k", 1, 1, [])
    assert (result.status, result.message) == ("timeout", "compiling took longer than 0.3 s")
    result = pool.run("# kill the compiler", "k", 1, 1, [])
    assert result.status == "crashed" and "ended by SIGSEGV" in result.message
    assert_next_is_right(pool)


def test_the_compiler_has_limits_and_the_runner_none(pool, tmp_path):
    source = """
import resource
def limits(grid, block, out: "int*"): pass
open(%r, "w").write(str([resource.getrlimit(n)[0] for n in (9, resource.RLIMIT_CORE)]))
"""
    path = tmp_path / "limits"
    pool.run(source % str(path), "limits", 1, 1, [Out(1, "int32")])
    assert path.read_text() == "[-1, 0]"  # the runner executes the same text
    pool.run(source % str(path) + "\nraise SyntaxError", "limits", 1, 1, [])
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert path.read_text() == f"[{min(1 << 34, half)}, 0]"


# ---- wrong calls ---------------------------------------------------------------------------------


def test_wrong_calls_name_the_argument_and_cost_no_process(pool, monkeypatch):
    assert_next_is_right(pool)
    before = pool.state()
    for error, said, source, entry, grid, args, more in (
        (TypeError, r"args\[1\]: str is no argument", SOURCE, "scale", 1, [X, "y"], {}),
        (TypeError, r"args\[0\] .*: an array of dtype >f4; there", SOURCE, "scale", 1,
         [X.astype(">f4"), Out(6), 2.0, 6], {}),
        (ValueError, "sanitizer: must be one of memch", SOURCE, "k", 1, [], {"sanitizer": "x"}),
        (TypeError, "grid: must be a whole number", SOURCE, "no_results", (1, 2.5), [], {}),
        (TypeError, "grid: must be a whole number", SOURCE, "no_results", "1", [], {}),
        (ValueError, "grid: .* not 0", SOURCE, "no_results", [], [], {}),
        (ValueError, "grid: .* not 3,000,000", SOURCE, "no_results", [1] * 3_000_000, [], {}),
        (TypeError, "shared: must be a whole number", SOURCE, "no_results", 1, [], {"shared": "x"}),
        (TypeError, "source and entry must be text", SOURCE.encode(), "no_results", 1, [], {}),
        (ValueError, "surrogates not allowed", "k \ud800", "k", 1, [], {}),
    ):  # fmt: skip
        with naming(said), pytest.raises(error, match=said):
            pool.run(source, entry, grid, 1, args, **more)
    assert pool.state() == before
    assert_next_is_right(pool)


def test_wrong_arguments_of_a_pool_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6")
    for name, value, error, said in (
        ("devices", [3], ValueError, "there is no 3, since CUDA_VISIBLE_DEVICES=5,GPU-6 shows 2"),
        ("devices", [-1], ValueError, "0 or more, not -1"),
        ("devices", [0, 1, 0], ValueError, "0 is there twice"),
        ("devices", [], ValueError, "one at least"),
        ("devices", ["0"], TypeError, "whole number"),
        ("devices", [True], TypeError, "not True"),
        ("devices", "0", TypeError, "must be a list"),
        ("devices", 0, TypeError, "must be a list"),
        ("timeout", 0, ValueError, "above 0"),
        ("timeout", float("inf"), ValueError, "finite"),
        ("timeout", float("nan"), ValueError, "finite"),
        ("timeout", "1", TypeError, "number of seconds"),
        ("spares", -1, ValueError, "0 or more"),
        ("spares", 1.5, TypeError, "whole number"),
        ("memory", 0, ValueError, "1 or more"),
        ("memory", "1 GB", TypeError, "whole number"),
        ("fresh", "never", ValueError, "must be"),
    ):
        with naming(name, value), pytest.raises(error, match=f"{name}: .*{said}"):
            FakePool(**{"devices": [0], name: value})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="there is no 0, since CUDA_VISIBLE_DEVICES= shows none"):
        FakePool(devices=[0])


def test_mps_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    with pytest.raises(RuntimeError, match="MPS is on .*a fault ends the work"):
        FakePool(devices=[0])


def test_a_process_counts_the_devices(monkeypatch):
    with FakePool(timeout=1e9, spares=0) as pool:  # poll(2) waits 24 days at most
        assert [d["device"] for d in pool.state()] == [0]
        assert_next_is_right(pool)
    monkeypatch.setenv("FAKE_NONE", "1")
    with pytest.raises(RuntimeError, match="no GPU to run kernels on: no NVIDIA driver"):
        FakePool()


def test_a_runner_sees_one_device(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert FakePool._environment(None, 1)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert FakePool._environment(None, 1)["CUDA_VISIBLE_DEVICES"] == "GPU-5"


def test_a_process_finds_needle_with_a_safe_path(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    start = Path(pool_module.__file__).with_name("start.py")
    done = subprocess.run([sys.executable, start, "no role", "0"], capture_output=True, text=True)
    assert "No module named" not in done.stderr, done.stderr


def test_the_pool_opens_no_gpu():
    code = "from needle.kernels.pool import Pool; print(open('/proc/self/maps').read())"
    maps = python(code).stdout
    assert "needle/_C" in maps
    assert not any(name in maps for name in ("_cuda.so", "libcuda", "libnvrtc"))


def test_cleanup_frees_memory_of_idle_processes(pool):
    assert_next_is_right(pool)
    assert pool.cleanup() > 0 and pool.cleanup() == 0
    assert_next_is_right(pool)


# ---- evaluating ----------------------------------------------------------------------------------

CASE = Case(1, 32, [Random(6), Out(6)])


def evaluate(pool, entry, cases, reference=lambda x: 2 * x, **more):
    return pool.evaluate(SOURCE, entry, cases, reference, **{"trials": 3, **more})


def test_a_right_kernel_is_timed(pool):
    cases = [Case(1, 32, [Random(n), Out(n), 2.0, n]) for n in (100, 2000)]
    result = evaluate(pool, "scale", cases, lambda x, a, n: a * x)
    assert (result.status, result.message, len(result.timing)) == ("ok", "", 2)
    for timing in result.timing:
        assert timing.valid and 0 < timing.lower <= timing.median <= timing.upper
    untimed = evaluate(pool, "scale", cases, lambda x, a, n: a * x, time=False)
    assert untimed.timing == ()
    result = evaluate(pool, "spills", [CASE], lambda x: x, trials=70)
    assert any("spilling: 8 bytes" in hint for hint in result.timing[0].hints)


def test_a_wrong_kernel_is_found_in_the_trial_that_shows_it(pool):
    case = Case(1, 32, [Random(40), Out(40)])
    result = evaluate(pool, "uneven", [case], trials=40)
    assert result.status == "wrong_result" and result.timing == ()
    assert result.message.startswith("case 0, trial ") and "elements are wrong" in result.message
    assert len(result.outputs) == 1
    for tolerance in ((1.0, 0.0), [1.0, 0.0]):
        assert evaluate(pool, "uneven", [case], trials=2, tolerance=tolerance).status == "ok"


def test_a_kernel_that_works_once_is_found(pool):
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


def test_a_kernel_that_remembers_results_gains_nothing(pool):
    for x in (Random(6), X, np.zeros(6, np.float32)):
        for w in (Random(6), np.ones(6, np.float32)):
            with naming(x, w):
                case = Case(1, 32, [x, w, Out(6)])
                result = pool.evaluate(REMEMBERS, "remembers", [case], lambda x, w: 2 * x + w)
                assert (result.status, result.message) == ("ok", "")
                (timing,) = result.timing
                assert timing.lower >= 20_000
                drawn = isinstance(x, Random) and isinstance(w, Random)
                assert any("the first of its code" in hint for hint in timing.hints) != drawn


def test_an_impossible_time_is_a_wrong_result(pool, monkeypatch):
    real = pool_module.Timing
    invalid = {"valid": False, "reason": "0.1 us are less than a launch takes"}
    monkeypatch.setattr(pool_module, "Timing", lambda **fields: real(**(fields | invalid)))
    result = evaluate(pool, "scale", [Case(1, 1, [X, Out(6), 2.0, 6])], [[2 * X]])
    assert result.status == "wrong_result" and "less than a launch takes" in result.message


def test_a_fault_ends_an_evaluation(pool):
    result = evaluate(pool, "fails", [Case(1, 1, [0])], lambda kind: [])
    assert result.status == "illegal_address" and result.message.startswith("case 0, trial 0: ")
    result = evaluate(pool, "outside", [Case(1, 1, [X, Out(6), 24])], lambda x, where: 0 * x)
    assert result.status == "out_of_bounds"
    source = """
def late(grid, block, y: "float*"):
    y[:] = 0
    os.environ["CALLS"] = os.environ.get("CALLS", "") + "|"
    if os.environ["CALLS"] != "|":
        ctypes.c_float.from_address(y.ctypes.data + 24).value = 1.0
"""
    result = pool.evaluate(source, "late", [Case(1, 1, [Out(6)])], [np.zeros(6)], trials=1)
    assert result.status == "out_of_bounds" and result.message.startswith("case 0, timed: ")
    assert_next_is_right(pool)


def test_references(pool):
    case = Case(1, 32, [X, Out(6), 2.0, 6])
    assert evaluate(pool, "scale", [case], [2 * X]).status == "ok"
    assert evaluate(pool, "scale", [case, case], [[2 * X], X]).message.startswith("case 1, trial 0")
    assert evaluate(pool, "scale", [case], [X[:3]]).message.endswith("and (3,) is expected")


def test_wrong_evaluations_name_the_argument_and_cost_no_process(pool):
    assert_next_is_right(pool)
    before = pool.state()[0]
    for arguments, error, said in (
        ({"cases": []}, ValueError, "cases: there must be one"),
        ({"cases": [(1, 1, [])]}, TypeError, r"cases\[0\]: must be a Case, not tuple"),
        ({"cases": CASE}, TypeError, "cases: must be a list of Case, not Case"),
        ({"reference": []}, ValueError, "reference: 0 for 1 cases"),
        ({"reference": iter([X])}, TypeError, "reference: must be a function, or a list"),
        ({"reference": lambda x: None}, TypeError, "reference: must give an array, .* NoneType"),
        ({"reference": lambda x: (x, x)}, ValueError, "gave 2 outputs, and the kernel has 1: args"),
        ({"tolerance": "x"}, TypeError, "tolerance: must be a number"),
        ({"trials": 2.5}, TypeError, "trials: must be a whole number"),
        ({"trials": 0}, ValueError, "trials: must be 1 or more"),
    ):
        with naming(said), pytest.raises(error, match=said):
            evaluate(pool, "spills", **{"cases": [CASE], **arguments})
    assert pool.state()[0] == before


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
    monkeypatch.setattr(pool_module, "find_tool", lambda name: str(program))


def test_a_fault_is_explained(pool, fake_sanitizer):
    result = run(pool, "fails", 0, explain=True)
    assert result.status == "illegal_address"
    (finding,) = result.explanation
    assert (finding.line, finding.thread, finding.block) == (7, (3, 0, 0), (1, 0, 0))
    assert "memcheck: Invalid __global__ write" in result.message and "line 7" in result.message
    assert run(pool, "fails", 6, explain=True).explanation == ()
    assert run(pool, "scale", X, Out(6), 2.0, 6, explain=True).explanation == ()


def test_a_run_under_a_sanitizer(pool, fake_sanitizer, monkeypatch):
    result = run(pool, "scale", X, Out(6), 2.0, 6, sanitizer="memcheck")
    assert result.status == "out_of_bounds" and "line 7" in result.message
    result = run(pool, "scale", X, Out(6), 2.0, 6, sanitizer="racecheck")
    assert result.status == "ok" and (result.outputs[0] == 2 * X).all()
    monkeypatch.setattr(pool_module, "SLOWER", 0.2)
    for entry, args, status in (
        ("fails", [0], "illegal_address"),
        ("signals", [signal.SIGSEGV], "crashed"),
        ("hangs", [], "timeout"),
    ):
        with naming(entry):
            before = pool.state()[0]["faults"]
            assert run(pool, entry, *args, sanitizer="synccheck").status == status
            assert pool.state()[0]["faults"] == before + 1
            assert_next_is_right(pool)


def test_a_process_that_outlives_sigkill_holds_its_device(fake_sanitizer, monkeypatch):
    """Also one under compute-sanitizer."""
    undying, ended, kill = [], workers.Worker.ended, workers.Worker.kill
    monkeypatch.setattr(workers.Worker, "ended", lambda w: w.pid not in undying and ended(w))
    monkeypatch.setattr(workers.Worker, "kill", lambda w: (undying.append(w.pid), kill(w)))
    monkeypatch.setattr(workers, "REAP_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "SLOWER", 1)
    with FakePool(devices=[0, 1], timeout=SECONDS, spares=0) as pool:
        wait_for(lambda: all(len(d["ready"]) == 1 for d in pool.state()))
        for device, more in ((0, {}), (1, {"sanitizer": "synccheck"})):
            pool.timeout = SHORT
            result = run(pool, "hangs", **more)
            assert (result.status, result.device) == ("timeout", device)
            pool.timeout = SECONDS
            if device == 0:
                assert_next_is_right(pool)  # on the other device
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "still there 0 s after SIGKILL" in result.message
        with pytest.raises(RuntimeError, match="still does not end"):
            pool.reset(0)
        monkeypatch.undo()
        for device in (0, 1):
            pool.reset(device)
        assert_next_is_right(pool)


def test_without_a_sanitizer_the_message_says_so(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "find_tool", lambda name: None)
    result = run(pool, "fails", 0, explain=True)
    assert result.status == "illegal_address" and "no compute-sanitizer here" in result.message
    with pytest.raises(ValueError, match="sanitizer: there is no compute-sanitizer here"):
        run(pool, "fails", 0, sanitizer="memcheck")
    wait_for(lambda: pool.state()[0]["ready"])
    assert_next_is_right(pool)
