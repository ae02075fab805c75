"""needle.kernels.Pool without a GPU: "kernels" are Python functions in real processes
(fake_worker.py) that fault, hang, die, cheat, and write out of bounds."""

import os
import signal
import sys
import time

import numpy as np
import pytest
from fake_pool import SECONDS, SHORT, SOURCE, FakePool, X, assert_next_is_right, run
from harness import in_thread, naming, python, state_of, wait_for, wait_until_gone

from needle._C import CudaFatalError, array, cpu, cuda
from needle.kernels import Case, InOut, Out, Random, Reference, process, worker
from needle.kernels import pool as pool_module
from needle.kernels.cases import ALIGN, DTYPES, GUARD

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def pool():
    with FakePool(devices=[0], timeout=SECONDS) as made:
        yield made


# ---- a run ---------------------------------------------------------------------------------------


def test_run_returns_arrays_that_the_kernel_writes(pool):
    n = np.arange(5, dtype=np.int32)
    for entry, args, expected in (
        ("scale", [X.reshape(2, 3), Out((2, 3)), np.float32(0.5), 6], X.reshape(2, 3) / 2),
        ("scale", [X.reshape(2, 3).T, Out((3, 2)), 2.0, 6], 2 * X.reshape(2, 3).T),
        ("increment", [n], n + 1),
        ("apart", [X[:5], Out(1, "int32")], [0]),
        ("scale_c", [X, InOut(np.zeros(6, np.float32)), 2.0, 6], 2 * X),
        ("scale", [array([2.0, 1.0], device=cpu())[::-1], Out(2), 3.0, 2], [3, 6]),
        ("scale", [np.zeros((0, 4), np.float32), Out((0, 4)), 3.0, 0], np.zeros((0, 4))),
        ("copies", [Out(2, "uint8"), b"\xfe\x01"], [254, 1]),
        ("types", [Out(8, "int32"), np.float32(1e-45), np.float16(2), 2**63, float("inf"), True,
                   np.int8(-1), b"xy", np.zeros(1, [("a", "f4"), ("b", "i4")])[0]], np.ones(8)),
    ):  # fmt: skip
        with naming(entry, expected):
            result = run(pool, entry, *args)
            assert (result.status, result.message) == ("ok", "")
            assert (result.device, result.explanation) == (0, "")
            np.testing.assert_array_equal(result.outputs[0], expected)
    compiled = {"registers": 16, "shared_bytes": 0, "local_bytes": 0, "max_threads": 1024}
    assert result.resources == compiled | {"occupancy": 0.5, "blocks_per_sm": 2}
    assert n[0] == 0
    assert run(pool, "scale_c", X, np.zeros(6, np.float32), 2.0, 6).outputs == ()


def test_run_keeps_the_bits_of_each_dtype(pool):
    names = ", ".join(f'x{n}: "const void*", y{n}: "void*"' for n in range(len(DTYPES)))
    copies = "; ".join(f"y{n}[...] = x{n}" for n in range(len(DTYPES)))
    drawn = [Random((300, 2), dtype).array(0, 0) for dtype in DTYPES]
    args = [arg for x, dtype in zip(drawn, DTYPES) for arg in (x, Out((300, 2), dtype))]
    result = pool.run(f"def copy(grid, block, {names}): {copies}", "copy", [4, 2], 1, args)
    assert (result.status, result.message) == ("ok", "")
    for x, y, dtype in zip(drawn, result.outputs, DTYPES):
        with naming(dtype):
            assert y.dtype == ("float32" if dtype == "bfloat16" else dtype)
            np.testing.assert_array_equal(y, x.numpy() if dtype == "bfloat16" else x)
            assert len(np.unique(y)) > (1 if dtype == "bool" else 30)


def test_printed_text_is_cut_and_is_no_answer(pool):
    assert run(pool, "prints", 10).printed == "x" * 10 + "end"
    long = run(pool, "prints", 300_000).printed
    assert long.startswith("x" * 65536 + "\n[234,467 more bytes")
    result = run(pool, "forges")
    assert result.status == "ok" and '"illegal_address"' in result.printed


FAULTY = "illegal_address misaligned_address launch_failure assertion crashed timeout".split()


def test_fault_has_its_status_and_the_next_job_is_right(pool, monkeypatch):
    monkeypatch.setattr(pool, "memory", 1 << 20)
    end = "4 bytes were written after its end, the nearest at byte %s of it"
    start = "4 bytes were written before its start, the nearest at byte -1 of it"
    unwritten = "2 of 500 elements (the first at [498]) were not written"
    for entry, args, status, said in (
        ("fails", [0], "illegal_address", "k: cu"),
        ("fails", [2], "misaligned_address", "k: "),
        ("fails", [3], "launch_failure", "k: "),
        ("fails", [4], "timeout", "k: "),
        ("fails", [5], "launch_failure", "k: "),
        ("fails", [6], "invalid_launch", "k: cu"),
        ("fails", [7], "out_of_memory", "k: "),
        ("fails", [8], "out_of_memory", "9.0 MiB"),
        ("fails", [9], "invalid_launch", "k: args[0]"),
        ("asserts", [], "assertion", "k: "),
        ("signals", [signal.SIGKILL], "crashed", "was ended by SIGKILL"),
        ("breaks", [], "crashed", "exited with code 1"),
        ("hangs", [], "timeout", "no answer after 0.4 s"),
        ("stops", [], "timeout", "the process was killed"),
        ("outside", [X, Out(6), 24], "out_of_bounds", end % 24),
        ("outside", [X, Out(6), 24 + GUARD - 4], "out_of_bounds", end % "65,556"),
        ("outside", [X, Out(6), GUARD + ALIGN - 4], "out_of_bounds", end % "65,788"),
        ("outside", [X, Out(6), -4], "out_of_bounds", start),
        ("before", [Out(6)], "out_of_bounds", start),
        ("changes_const", [X, Out(6)], "out_of_bounds", "it is const, an"),
        ("leaves_out", [Out(500), 498], "wrong_result", unwritten),
        ("leaves_out", [Out(500, "float16"), 498], "wrong_result", unwritten),
        ("leaves_out", [Out(500, "int64"), 498], "wrong_result", unwritten),
        ("leaves_out", [Out(500, "uint8"), 498], "ok", ""),  # they may equal the pattern
        ("scale", [X, Out(1 << 18), 1.0, 6], "out_of_memory", "of 1,048,576 (memory=)"),
        ("leaves_out", [Out(1 << 18), 1 << 18], "ok", ""),  # all of it
        ("absent", [], "compile_error", "absent"),
        ("def k(:", [], "compile_error", "kernel.py(1): error"),
        ("# kill the compiler", [], "crashed", "ended by SIGSEGV"),
        ("# hang the compiler", [], "timeout", "no answer after 0.4 s"),
    ):
        with naming(entry, *args):
            source = SOURCE if entry.isidentifier() else entry
            faults = pool.state()[0]["faults"]
            hangs = "no answer" in said or "killed" in said
            with monkeypatch.context() as patched:
                patched.setattr(pool, "timeout", SHORT if hangs else SECONDS)
                patched.setattr(pool_module, "COMPILE_SECONDS", SHORT if hangs else SECONDS)
                result = pool.run(source, entry, 1, 32, args)
            assert result.status == status and said in result.message, result
            wrote = status in ("ok", "out_of_bounds", "wrong_result")
            assert len(result.outputs) == wrote and X[1] == 1
            assert pool.state()[0]["faults"] == faults + (status in FAULTY)
            assert status not in FAULTY or run(pool, "scale", X, Out(6), 2.0, 6).status == "ok"
    assert_next_is_right(pool)


def test_process_that_died_before_it_was_asked_has_crashed(pool, monkeypatch):
    def late(self, message, seconds):
        if message is not None:  # its first one has come
            self.kill()
            self.process.wait(60)
        return ask(self, message, seconds)

    ask = process.Process.ask
    with monkeypatch.context() as patched:
        patched.setattr(process.Process, "ask", late)
        result = run(pool, "no_results")
    assert (result.status, "was ended by SIGKILL" in result.message) == ("crashed", True), result
    assert_next_is_right(pool)


def test_source_is_compiled_once_for_each_architecture_unless_it_reads_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    log = tmp_path / "log"
    with FakePool.with_variable("FAKE_LOG", log)(devices=[0, 1], timeout=SECONDS) as pool:
        for number in (0, 1, 1, 0):
            other = pool.devices[1 - number]
            other.busy = True
            assert pool.run(SOURCE, "no_results", 1, 1, []).device == number
            assert pool.run(f'{SOURCE}\n#include "mine.h"', "who", 1, 1, [Out(1, "int32")])
            other.busy = False
    assert log.read_text().split().count("no_results") == 2
    assert log.read_text().split().count("who") == 4


# ---- evaluating ----------------------------------------------------------------------------------

CASE = Case(1, 32, [Random(6), Out(6)])


def evaluate(pool, entry, cases, reference=lambda x: 2 * x, source=SOURCE, **more):
    return pool.evaluate(source, entry, cases, reference, **{"trials": 3, **more})


def test_right_kernel_is_timed(pool):
    cases = [Case(1, 32, [Random(n), Out(n), 2.0, n]) for n in (100, 2000)]
    result = evaluate(pool, "scale", cases, lambda x, a, n: a * x)
    assert (result.status, result.message, len(result.timing)) == ("ok", "", 2)
    assert result.deterministic is True
    for timing in result.timing:
        assert timing.valid and 0 < timing.lower <= timing.median <= timing.upper
        assert not any("first of its code" in hint for hint in timing.hints)
    in_place = evaluate(pool, "increment", [Case(1, 1, [Random(5, "int32")])], lambda n: n + 1)
    assert (in_place.status, in_place.message) == ("ok", "")
    untimed = evaluate(pool, "scale", cases, lambda x, a, n: a * x, time=False)
    assert (untimed.status, untimed.timing) == ("ok", ())
    given = evaluate(
        pool, "spills", [Case(1, 32, [X, Out(6)])], [X + 0.5], trials=1, tolerance=(0.6, 0)
    )
    hints = given.timing[0].hints
    assert any("first of its code" in h for h in hints) and any("spilling: 8" in h for h in hints)


# Kernels that cheat or fail: what each does, its cases, and the status and text that are right.
CHEATS = {
    "adds to what it finds in its output": (
        'def k(grid, block, x: "float const*", y: "float*"): y[:] += 2 * x',
        [CASE], "wrong_result", "case 0, trial 0: args[1] (float*): ",
    ),
    "returns its first answer again": (
        """
KEPT = []
def k(grid, block, x: "float const*", y: "float*"):
    if not KEPT: KEPT.append(2 * x)
    y[:] = KEPT[0]
""",
        [CASE], "wrong_result", "case 0, trial 1: args[1] (float*): 6 of 6 elements are wrong",
    ),
    "remembers its first shape": (
        """
KEPT = []
def k(grid, block, x: "float const*", y: "float*"):
    KEPT.append(x.size)
    y[:] = 0
    y[:KEPT[0]] = 2 * x[:KEPT[0]]
""",
        [CASE, Case(1, 32, [Random(9), Out(9)])], "wrong_result", "case 1, trial 0: args[1]",
    ),
    "is right until it is timed": (
        """
os.environ["LOADS"] = os.environ.get("LOADS", "") + "|"
def k(grid, block, x: "float const*", y: "float*"):
    y[:] = 2 * x if len(os.environ["LOADS"]) < 3 else 0
""",
        [CASE], "wrong_result", "case 0, timed: args[1]",
    ),
    "writes out of bounds when it is timed": (
        """
os.environ["LOADS"] = os.environ.get("LOADS", "") + "|"
def k(grid, block, x: "float const*", y: "float*"):
    y[:] = 2 * x
    if len(os.environ["LOADS"]) > 2: ctypes.c_float.from_address(y.ctypes.data + 24).value = 1.0
""",
        [CASE], "out_of_bounds", "case 0, timed: args[1] (float*): 4 bytes were written after",
    ),
    "computes faster than any processor": (
        'def k(grid, block, x: "float const*", y: "float*"): y[:] = 2 * x',
        [Case(1, 32, [Random(6), Out(6)], operations=1e18)], "wrong_result", "case 0, timed: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_kernel_that_cheats_is_found_and_the_next_job_is_right(pool, name):
    source, cases, status, said = CHEATS[name]
    result = evaluate(pool, "k", cases, source=source)
    assert result.status == status and result.message.startswith(said), result
    if "faster" in name:
        assert "1,000,000,000,000,000,000 operations; this device needs" in result.message
        assert not result.timing[0].valid
    assert_next_is_right(pool)


REMEMBERS = """
KNOWN = {}
def k(grid, block, x: "float const*", y: "float*"):
    if x.tobytes() not in KNOWN:
        time.sleep(0.02)
        KNOWN[x.tobytes()] = 2 * x
    y[:] = KNOWN[x.tobytes()]
"""


def test_kernel_that_remembers_results_gains_nothing(pool):
    for x in (Random(6), X):
        with naming(x):
            result = evaluate(pool, "k", [Case(1, 32, [x, Out(6)])], source=REMEMBERS)
            assert (result.status, result.message) == ("ok", "")
            assert result.timing[0].lower >= 20_000


def test_other_bits_in_a_second_run_are_reported(pool):
    source = """
def k(grid, block, x: "float const*", y: "float*", calls=[]):
    calls.append(1)
    y[:] = 2 * x + 1e-6 * (x.size == 6) * (len(calls) % 2)
"""
    steady = Case(1, 32, [Random(9), Out(9)])
    for cases in [CASE], [CASE, steady], [steady, CASE]:
        with naming(cases):
            result = evaluate(pool, "k", cases, source=source)
            assert (result.status, result.deterministic) == ("ok", False)


def test_references(pool):
    case, drawn = Case(1, 32, [X, Out(6), 2.0, 6]), Case(1, 32, [Random(6), Out(6), 2.0, 6])
    sized = "assert (grid, block) == ((7, 1, 1), (8, 1, 1))\n    y.reshape"
    for reference, cases, said in (
        ([[2 * X], X], [case, case], "case 1, trial 0"),
        ([X[:3]], [case], "has shape (6,), and (3,) is expected"),
        (Reference(SOURCE, "scale"), [case, drawn], ""),
        (Reference(SOURCE.replace("y.reshape", sized), "scale", 7, [8], 9), [drawn], ""),
        (Reference(SOURCE.replace("= a * x", "= 2.125 * x"), "scale"), [drawn], "case 0, trial 0"),
    ):
        with naming(said, reference):
            result = evaluate(pool, "scale", cases, reference, time=False)
            assert (result.status == "ok") == (said == "") and said in result.message
    with pytest.raises(ValueError, match="reference: it fails: illegal_address"):
        evaluate(pool, "scale", [Case(1, 1, [0])], Reference(SOURCE, "fails"))


# ---- wrong calls ---------------------------------------------------------------------------------


def test_wrong_calls_name_the_argument_and_cost_no_process(pool):
    wait_for(lambda: len(pool.state()[0]["ready"]) == 2)  # those after the job before
    started = pool.state()[0]["started"]
    launch = lambda source=SOURCE, entry="k", grid=1, args=(), **more: pool.run(
        source, entry, grid, 1, args, **more
    )
    judge = lambda cases=(CASE,), reference=lambda x: x, **more: evaluate(
        pool, "spills", cases, reference, **more
    )
    for error, said, call, more in (
        (TypeError, r"args\[1\]: str is no argument", launch, {"args": [X, "y"]}),
        (ValueError, "sanitizer: must be one of memch", launch, {"sanitizer": "x"}),
        (TypeError, "grid: must be a whole number", launch, {"grid": (1, 2.5)}),
        (ValueError, "grid: must be", launch, {"grid": []}),
        (TypeError, "shared: must be a whole number", launch, {"shared": "x"}),
        (TypeError, "source and entry must be text", launch, {"source": b"k"}),
        (ValueError, "surrogates not allowed", launch, {"source": "k \ud800"}),
        (ValueError, "cases: there must be one", judge, {"cases": []}),
        (ValueError, "reference: 0 for 1 cases", judge, {"reference": []}),
        (ValueError, "reference: 6 for 1 cases", judge, {"reference": X}),
        (ValueError, "tolerance: must be a number", judge, {"tolerance": "x"}),
        (TypeError, "trials: must be a whole number", judge, {"trials": 2.5}),
        (ValueError, "trials: must be 1 or more", judge, {"trials": 0}),
    ):
        with naming(said), pytest.raises(error, match=said):
            call(**more)
    assert pool.state()[0]["started"] == started
    for reference, error, said in (
        (lambda x: None, TypeError, "reference: must give an array, .* NoneType"),
        (lambda x: (x, x), ValueError, "gave 2 outputs, and the kernel has 1: args"),
    ):
        with naming(said), pytest.raises(error, match=said):
            judge(reference=reference)
    assert_next_is_right(pool)


def test_wrong_arguments_of_a_pool_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6")
    for name, value, error, said in (
        ("devices", [2], ValueError, "there is no 2: CUDA_VISIBLE_DEVICES=5,GPU-6"),
        ("devices", [-1], ValueError, "0 or more, not -1"),
        ("timeout", float("inf"), ValueError, "above 0"),
        ("timeout", 0, ValueError, "above 0"),
        ("timeout", "1", ValueError, "number of seconds"),
        ("spares", -1, ValueError, "0 or more"),
        ("memory", 0, ValueError, "1 or more"),
    ):
        with naming(name, value), pytest.raises(error, match=f"{name}: .*{said}"):
            FakePool(**{"devices": [0], name: value})
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    with pytest.raises(RuntimeError, match="MPS is on .*a fault ends the work"):
        FakePool(devices=[0])
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "")  # as if it were unset
    monkeypatch.chdir(tmp_path)
    if not os.path.exists("/tmp/nvidia-mps/control"):
        FakePool(devices=[]).close()


def test_pool_without_a_gpu_says_so():
    if not cuda().enabled():
        with pytest.raises(RuntimeError, match="no GPU to run kernels on: "):
            FakePool()
    with FakePool(devices=[]) as pool:
        for ask, more in (run, ()), (evaluate, ([CASE], Reference(SOURCE, "k"))):
            with pytest.raises(ValueError, match="there is no GPU here"):
                ask(pool, "scale", *more)
        pool.reset(-1)


def test_process_sees_one_gpu_and_nothing_of_the_current_folder(monkeypatch, tmp_path):
    """Modules there have names of Python's own, and of those that a process imports."""
    for name in ("typing.py", "numpy.py", "json.py", "signature.py"):
        (tmp_path / name).write_text("raise SystemExit('of the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    source = "def sees(grid, block): print(os.environ['CUDA_VISIBLE_DEVICES'])"
    with FakePool(devices=[1], timeout=SECONDS, spares=0) as pool:
        result = pool.run(source, "sees", 1, 1, [])
    assert (result.status, result.printed) == ("ok", "GPU-5\n")


# ---- devices and their processes -----------------------------------------------------------------


def test_device_runs_one_job_at_a_time(pool, tmp_path):
    source = f"""
def alone(grid, block, busy: "int*"):
    try: os.mkdir({str(tmp_path / "busy")!r})
    except FileExistsError: busy[0] = 1
    else:
        busy[0] = 0
        time.sleep(0.3)
        os.rmdir({str(tmp_path / "busy")!r})
"""
    wait_for(lambda: len(pool.state()[0]["ready"]) == 2)
    jobs = [in_thread(pool.run, source, "alone", 1, 1, [Out(1, "int32")]) for _ in range(3)]
    assert [job.result(60).outputs[0][0] for job in jobs] == [0] * 3


def test_each_job_has_a_process_that_was_ready_and_is_killed(pool):
    """One that was killed while it waited is left out, and replaced after the job."""
    ready = lambda: pool.state()[0]["ready"]
    for killed in (0, 0, 1, 2):
        wait_for(lambda: len(ready()) == 2)
        before = ready()
        for pid in before[:killed]:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: pid not in ready())
        pid = int(run(pool, "who", Out(1, "int32")).outputs[0][0])
        assert pid in before[killed:] or killed == 2
        wait_for(lambda pid=pid: state_of(pid) is None)  # not even a zombie
    wait_until_gone(int(run(pool, "forks", Out(1, "int32")).outputs[0][0]))


def test_no_process_starts_or_ends_while_a_job_is_timed(pool, monkeypatch):
    """One that starts before has started then, and that of the job before is gone."""
    seen, (device,) = set(), pool.devices.values()

    def watch(self, message, seconds):
        end = time.monotonic() + 0.3
        while message is not None and message["do"] == "time" and time.monotonic() < end:
            seen.update(one.state for one in device.processes if one.runs())
            device.keeper.submit(device._fill, 0.01).result(60)  # as after the job before
        return ask(self, message, seconds)

    ask = process.Process.ask
    monkeypatch.setattr(process.Process, "ask", watch)
    for job in ("fails", 0), ("no_results",):
        run(pool, *job)
        device.keeper.submit(device._fill).result(60)  # one starts
        assert evaluate(pool, "spills", [CASE], lambda x: x).status == "ok"
        assert seen == {"used", "spare"}


def test_device_that_computes_wrongly_is_set_aside_until_reset(tmp_path):
    broken = tmp_path / "broken"
    broken.touch()
    with FakePool.with_variable("FAKE_BROKEN", broken)(devices=[0], timeout=SECONDS) as pool:
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "3 x + 1 is wrong for 4096" in result.message
        assert "does not start" in pool.state()[0]["set_aside"]
        with pytest.raises(RuntimeError, match="3 x \\+ 1 is wrong"):
            pool.reset(0)
        broken.unlink()
        pool.reset(0)
        assert_next_is_right(pool)
        with pytest.raises(KeyError):
            pool.reset(1)


def test_device_that_the_driver_reports_lost_is_set_aside():
    with FakePool(devices=[0, 1], timeout=SECONDS, spares=0) as pool:
        lost = run(pool, "fails", 1)
        assert lost.status == "device_lost" and "ECCUncorrectable" in lost.message
        state = pool.state()
        assert "ECCUncorrectable" in state[lost.device]["set_aside"]
        assert run(pool, "no_results").device == 1 - lost.device  # on the other
        for number in lost.device, 0:
            pool.devices[number].lose("gone")
            pool.reset(number)
            assert pool.state()[number]["set_aside"] is None
    names = "cudaErrorContained CUDA_ERROR_CONTAINED CUDA_ERROR_NVLINK_UNCORRECTABLE "
    names += "cudaErrorDevicesUnavailable CUDA_ERROR_DEVICE_UNAVAILABLE cudaErrorNoDevice"
    for name in names.split():
        with naming(name):
            assert worker.status_of(CudaFatalError(f"k: ... ({name}): lost")) == "device_lost"


def test_process_that_outlives_sigkill_holds_its_device(monkeypatch):
    monkeypatch.setattr(process, "REAP_SECONDS", 0.1)
    with FakePool(devices=[0], timeout=SHORT, spares=0) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(process.Process, "kill", lambda self: None)
            assert run(pool, "hangs").status == "timeout"
            (pid,) = [one.pid for one in pool.devices[0].of("dying")]
            result = run(pool, "no_results")
        assert result.status == "device_lost" and f"{pid} outlives SIGKILL" in result.message
        with pytest.raises(RuntimeError, match="outlives SIGKILL"):
            pool.reset(0)
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
        pool.reset(0)
        pool.timeout = SECONDS
        assert_next_is_right(pool)


def test_cleanup_asks_idle_processes(pool, monkeypatch):
    wait_for(lambda: len(pool.state()[0]["ready"]) == 2)
    assert pool.cleanup() >= 0 and pool.cleanup() == 0
    with monkeypatch.context() as patched:
        patched.setattr(process.Process, "ask", lambda *_: {"freed": 8})
        assert pool.cleanup() == 16
    assert_next_is_right(pool)


BEGIN = """
import os, signal, sys, threading
sys.path.insert(0, "kernels")
from fake_pool import *
from harness import in_thread, wait_for
"""


def test_close_ends_everything():
    """Also jobs of other threads, and the wait for a process; nothing is left."""
    done = python(f"""{BEGIN}
held = lambda: (children(), len(os.listdir("/proc/self/fd")), threading.active_count())
before = held()
with FakePool(devices=[0], timeout=SECONDS) as pool:
    jobs = [in_thread(run, pool, "hangs") for _ in range(2)]  # either may be the first
    wait_for(lambda: pool.state()[0]["used"])
waits, hangs = sorted(jobs, key=lambda job: job.exception(60) is None)
assert hangs.result(60).status == "crashed"
for after_close in (lambda: waits.result(60), lambda: run(pool, "no_results")):
    try:
        after_close()
    except RuntimeError as error:
        assert "this Pool is closed" in str(error)
    else:
        raise AssertionError("a closed pool has run a job")
wait_for(lambda: held() == before)
""")
    assert done.returncode == 0, done.stderr


def test_processes_end_with_the_pools():
    """However that ends: here by SIGKILL, with a kernel that never does."""
    done = python(f"""{BEGIN}
pool = FakePool(devices=[0], timeout=SECONDS)
threading.Thread(target=run, args=(pool, "hangs")).start()
wait_for(lambda: pool.state()[0]["used"] and pool.state()[0]["ready"])
print(*children(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    for pid in pids:
        wait_until_gone(pid)


# ---- compute-sanitizer ---------------------------------------------------------------------------

REPORT = """========= Invalid __global__ write of size 4 bytes
=========     at k(float *)+0x90 in kernel.cu:7
"""


SANITIZER = f"""#!{sys.executable}
import subprocess, sys
worker = next(i for i, word in enumerate(sys.argv) if word == {sys.executable!r})
options = dict(zip(sys.argv[1:worker:2], sys.argv[2:worker:2]))
code = subprocess.call(sys.argv[worker:], pass_fds=[int(sys.argv[-2])])
found = options["--tool"] == "memcheck"
open(options["--log-file"], "w").write({REPORT!r} if found else "no errors")
sys.exit(int(options["--error-exitcode"]) if found else code)
"""


@pytest.fixture
def fake_sanitizer(tmp_path, monkeypatch):
    """A compute-sanitizer that runs the command, writes a report and counts errors."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    monkeypatch.setattr(pool_module, "find_tool", lambda name: str(program))


def test_sanitizer_explains_a_fault_and_finds_errors(pool, fake_sanitizer):
    right, lost = ("scale", X, Out(6), 2.0, 6), ("signals", signal.SIGSEGV)
    for job, more, status, explanation in (
        (("fails", 0), {"explain": True}, "illegal_address", REPORT),
        (("fails", 4), {"explain": True}, "timeout", "no errors"),  # by synccheck
        (("outside", X, Out(6), 24), {"explain": True}, "out_of_bounds", REPORT),
        (right, {"explain": True}, "ok", ""),
        (right, {"sanitizer": "memcheck"}, "wrong_result", REPORT),
        (right, {"sanitizer": "racecheck"}, "ok", "no errors"),
        (lost, {"sanitizer": "synccheck"}, "crashed", "no errors"),
    ):
        with naming(job, more):
            result = run(pool, *job, **more)
            assert (result.status, result.explanation) == (status, explanation), result
            assert (result.status == "wrong_result") == (
                result.message == "memcheck reports errors"
            )
            assert job != right or (result.outputs[0] == 2 * X).all()
            assert_next_is_right(pool)


def test_run_under_the_sanitizer_may_take_longer(pool, fake_sanitizer, monkeypatch):
    monkeypatch.setattr(pool, "timeout", SHORT)
    source = f"def slow(grid, block): time.sleep({2 * SHORT})"
    for more, status in ({}, "timeout"), ({"sanitizer": "racecheck"}, "ok"):
        assert pool.run(source, "slow", 1, 1, [], **more).status == status


def test_missing_sanitizer_is_named(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "find_tool", lambda name: None)
    assert "no compute-sanitizer here" in run(pool, "fails", 0, explain=True).explanation
    with pytest.raises(ValueError, match="sanitizer: there is no compute-sanitizer here"):
        run(pool, "fails", 0, sanitizer="memcheck")
