"""needle/kernels/isolate.py, crew.py and worker.py without a GPU: "kernels" are Python functions in
real worker processes (fake_worker.py) that fault, hang, die, forge, and write where none may.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_pool import SECONDS, SHORT, SOURCE, FakePool, X, assert_next_is_right, run
from harness import ROOT

from needle._C import array, cpu
from needle.kernels import frames, isolate
from needle.kernels.values import Case, InOut, Out, Random

pytestmark = pytest.mark.slow

# ---- what comes back -----------------------------------------------------------------------------


def test_outputs_and_resources(pool):
    result = run(pool, "scale", X.reshape(2, 3), Out((2, 3)), np.float32(0.5), 6)
    assert (result.status, result.device, result.explanation) == ("ok", 0, ())
    (y,) = result.outputs
    assert (y == X.reshape(2, 3) / 2).all() and y.dtype == np.float32
    assert result.resources == {
        "registers": 16,
        "shared_bytes": 0,
        "local_bytes": 0,
        "max_threads": 1024,
        "occupancy": 0.5,
        "limiter": "threads",
        "blocks_per_sm": 2,
    }


def test_what_the_signature_shows_as_written_comes_back(pool):
    n = np.arange(5, dtype=np.int32)
    (changed,) = run(pool, "increment", n).outputs
    assert (changed == n + 1).all() and n[0] == 0
    given = run(pool, "scale_c", X, np.zeros(6, np.float32), 2.0, 6)
    assert given.status == "ok" and given.outputs == ()
    (y,) = run(pool, "scale_c", X, InOut(np.zeros(6, np.float32)), 2.0, 6).outputs
    assert (y == 2 * X).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int8", "uint32", "bool"])
def test_dtypes(pool, dtype):
    """Bits arrive as they are; needle has no name for some, which go as bytes or as signed ones."""
    source = 'def copy(grid, block, x: "", y: "void*"): y[...] = x'
    x = Random((3, 5), dtype).array(0, 0)
    result = pool.run(source, "copy", 1, 1, [x, Out((3, 5), dtype)])
    assert (result.status, result.message) == ("ok", "")
    expected = x.numpy() if dtype == "bfloat16" else x
    assert (result.outputs[0] == expected).all() and result.outputs[0].shape == (3, 5)


def test_numbers_arrive_as_they_are(pool):
    """Of an `extern "C"` kernel the runner knows sizes only, and NumPy's types tell them."""
    record = np.zeros(1, [("a", "f4"), ("b", "i4")])[0]
    given = [
        np.float32(1e-45),
        np.float16(2),
        2**63,
        float("inf"),
        True,
        np.int8(-1),
        b"xy",
        record,
    ]
    result = run(pool, "types", Out(8, "int32"), *given)
    assert (result.status, result.message) == ("ok", "") and result.outputs[0].all()


def test_arrays_of_needle_and_empty_ones(pool):
    (y,) = run(pool, "scale", array([1.0, 2.0], device=cpu()), Out(2), 3.0, 2).outputs
    assert (y == [3, 6]).all()
    result = run(pool, "scale", np.zeros((0, 4), np.float32), Out((0, 4)), 3.0, 0)
    assert result.status == "ok" and result.outputs[0].shape == (0, 4)


def test_what_is_printed_is_drained_and_cut(pool):
    assert run(pool, "prints", 10).printed == "x" * 10 + "end"
    long = run(pool, "prints", 300_000).printed
    assert long.startswith("x" * 65536 + "\n[234,467 more bytes")
    assert run(pool, "no_results").printed == ""


def test_a_forged_answer_is_only_text(pool):
    result = run(pool, "forges")
    assert result.status == "ok" and '"illegal_address"' in result.printed
    assert_next_is_right(pool)


def test_shared_memory_keeps_its_size(pool):
    """Else the pool would die of reading what a process cut off."""
    source = """
def cut(grid, block, out: "int*"):
    out[:] = 0
    for n in os.listdir("/proc/self/fd"):
        if os.path.lexists("/proc/self/fd/" + n) and "memfd" in os.readlink("/proc/self/fd/" + n):
            for size in (0, 1 << 30):
                try:
                    os.ftruncate(int(n), size)
                except PermissionError:
                    out[0] += 1
"""
    result = pool.run(source, "cut", 1, 1, [Out(1, "int32")])
    assert (result.status, result.message) == ("ok", "") and result.outputs[0] == 2


# ---- faults, and the job after them --------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 6])
def test_a_fatal_error_costs_the_process_and_no_other(pool, kind):
    before = pool.state()[0]
    result = run(pool, "fails", kind)
    assert result.status == {0: "illegal_address", 6: "invalid_launch"}[kind]
    assert result.message.startswith("k: cu") and result.outputs == ()
    assert pool.state()[0]["faults"] == before["faults"] + (kind == 0)
    assert_next_is_right(pool)


def assert_next_is_right_in_time(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout", SECONDS)
    assert_next_is_right(pool)


def test_a_job_that_does_not_end_is_killed(pool, short, monkeypatch):
    began = time.monotonic()
    result = run(pool, "hangs")
    assert result.status == "timeout" and "no answer after 0.4 s" in result.message
    assert SHORT <= time.monotonic() - began
    assert_next_is_right_in_time(pool, monkeypatch)


def test_a_stopped_process_is_killed(pool, short, monkeypatch):
    result = run(pool, "stops")
    assert result.status == "timeout" and "stood still (SIGSTOP)" in result.message
    assert_next_is_right_in_time(pool, monkeypatch)


def test_a_process_that_is_stopped_while_it_waits_is_replaced(pool):
    assert_next_is_right(pool)  # and its process waits again
    waiting = pool.state()[0]["ready"]
    assert waiting
    for pid in waiting:
        os.kill(pid, signal.SIGSTOP)
    assert_next_is_right(pool)
    assert not set(pool.state()[0]["ready"]) & set(waiting)


def test_an_endless_flood_does_not_outlast_the_deadline(pool, short, monkeypatch):
    result = run(pool, "floods")
    assert result.status == "timeout" and len(result.printed) < 66_000
    assert_next_is_right_in_time(pool, monkeypatch)


@pytest.mark.parametrize(
    "entry, args, said",
    [
        ("signals", (signal.SIGSEGV,), "ended by SIGSEGV"),
        ("signals", (signal.SIGKILL,), "ended by SIGKILL"),
        ("breaks", (), "exit code 1"),
        ("garbage", (), "it gave an answer that cannot be read"),
    ],
)
def test_a_process_that_dies_or_lies_has_crashed(pool, entry, args, said, monkeypatch):
    result = run(pool, entry, *args)
    assert result.status == "crashed" and said in result.message
    assert entry != "breaks" or "a defect of the worker" in result.printed
    assert_next_is_right(pool)


RAN = {
    "status": "ok",
    "message": "",
    "faulted": False,
    "occupancy": {"occupancy": 0.5, "limiter": "threads", "blocks_per_sm": 2},
}
TIMING = dict.fromkeys(("median", "lower", "upper", "rate", "device_rate"), 5.0)
TIMING |= {"calls": 9, "valid": True, "reason": "", "hints": ["a hint"]}
BIG = 10**400
LIES = {
    "status": [None, 1, "OK", [], {}],
    "message": [None, 1, ["it"], {}],
    "faulted": [None, 0, "yes", []],
    "occupancy": [None, [], 1, {}, {"registers": 1}]
    + [RAN["occupancy"] | {"occupancy": value} for value in (None, "1", True, float("nan"), BIG)]
    + [RAN["occupancy"] | {"limiter": value} for value in (None, 1, ["threads"])]
    + [RAN["occupancy"] | {"blocks_per_sm": value} for value in (None, 1.5, "2", BIG)],
    "unknown": [1],
}
TIMED_LIES = [None, [], 1, {}, {"median": 1.0}, TIMING | {"more": 1}]
TIMED_LIES += [TIMING | {name: [1.0]} for name in TIMING]
TIMED_LIES += [TIMING | {"median": float("inf")}, TIMING | {"hints": [1]}, TIMING | {"valid": 1}]


def frame(answer) -> np.ndarray:
    return np.frombuffer(json.dumps(answer).encode(), np.uint8)


def lied(result, pool, faults) -> bool:
    """Whether a job failed for its runner's answer, and the runner was killed."""
    assert result.status == "crashed" and "gave an answer of another form" in result.message
    return pool.state()[0]["faults"] == faults + 1


def test_an_answer_of_another_form_costs_its_runner(pool):
    """Each field of the answer to a run."""
    assert run(pool, "says", frame(RAN)).status == "ok"
    for name, values in LIES.items():
        faults, answer = pool.state()[0]["faults"], RAN | {name: values[-1]}
        assert lied(run(pool, "says", frame(answer)), pool, faults), answer
        for value in values:
            assert not frames.fits(json.loads(frame(RAN | {name: value}).tobytes()), frames.RAN)
    assert not frames.fits({}, frames.RAN)
    assert_next_is_right(pool)


def test_a_timing_of_another_form_costs_its_runner(pool):
    for lie in (None, TIMING | {"median": "1"}):
        faults = pool.state()[0]["faults"]
        case = Case(1, 1, [frame(RAN | {"timing": lie})])
        result = pool.evaluate(SOURCE, "says_when_timed", [case], lambda text: [], trials=1)
        assert lied(result, pool, faults), lie
    assert_next_is_right(pool)
    assert frames.fits(RAN | {"timing": TIMING}, frames.TIMED)
    for lie in TIMED_LIES:
        assert not frames.fits(RAN | {"timing": lie}, frames.TIMED), lie


@pytest.mark.parametrize("answer", [{"freed": None}, {"ready": 1}])
def test_an_answer_before_its_question_costs_its_runner(pool, answer):
    """Also to cleanup, which then counts what others freed."""
    for ask in (pool.cleanup, lambda: assert_next_is_right(pool)):
        assert run(pool, "says_later", frame(answer)).status == "ok"
        (pid,) = pool.state()[0]["ready"]
        time.sleep(0.4)
        ask()
        assert pid not in pool.state()[0]["ready"]


@pytest.mark.parametrize(
    "form, right, wrong",
    [
        (
            frames.READY,
            [{"ready": True}],
            [{}, {"ready": 1}, {"ready": False}, {"ready": True, "a": 1}],
        ),
        (frames.COUNTED, [{"ready": True, "devices": 2}], [{"ready": True}, {"devices": 2}]),
        (frames.CLEANED, [{"freed": 1}], [{"freed": True}, {"freed": -(2**64)}, {}]),
        (
            frames.COMPILED,
            [{"status": "compile_error", "message": "the log"}],
            [{"status": "ok", "message": ""}, {"status": "compile_error"}, {"status": None}],
        ),
    ],
)
def test_the_forms_of_other_answers(form, right, wrong):
    for answers, fitting in ((right, True), (wrong, False)):
        for answer in answers:
            assert frames.fits(answer, form) is fitting, answer


def test_the_assertion_that_failed_is_the_message(pool):
    result = run(pool, "asserts")
    assert result.status == "assertion"
    assert result.message.startswith("kernel.cu:5: k: block: [0,0,0], thread: [3,0,0] Assertion")


def test_a_process_killed_while_it_waits_costs_no_job(pool):
    assert_next_is_right(pool)
    (pid, *_) = pool.state()[0]["ready"][-1:]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    assert_next_is_right(pool)
    assert pid not in pool.state()[0]["ready"]


# ---- guards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where, said",
    [
        (24, "args[1] (float*): 4 bytes were written behind its end, the first 0 bytes behind it"),
        (-4, "args[1] (float*): 4 bytes were written before its start, the nearest 1 bytes before"),
        (4096, "the first 4,072 bytes behind it (element 1,024 of 6)"),
    ],
)
def test_a_silent_write_outside_is_found(pool, where, said):
    result = run(pool, "outside", X, Out(6), where)
    assert result.status == "out_of_bounds" and said in result.message
    assert_next_is_right(pool)


def test_a_const_input_that_changed_is_found(pool):
    result = run(pool, "changes_const", X, Out(6))
    assert result.status == "out_of_bounds"
    assert "takes it as const, and 1 of 6 elements were changed, the first at [1]" in result.message
    assert X[1] == 1


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool", "float16"])
def test_what_was_not_written_is_named(pool, dtype):
    assert run(pool, "leaves_out", Out(500, dtype), 500).status == "ok"
    result = run(pool, "leaves_out", Out(500, dtype), 498)
    assert result.status == "wrong_result"
    assert "2 of 500 elements were not written, the first at [498]" in result.message
    assert (result.outputs[0][:498] == 1).all()


def test_an_output_may_hold_what_the_poison_was(pool):
    """Every value of a byte is right: chance alone must not accuse a kernel."""
    source = 'def all_bytes(grid, block, y: "unsigned char*"): y[:] = np.arange(y.size) % 256'
    for _ in range(3):
        result = pool.run(source, "all_bytes", 1, 1, [Out(100_000, "uint8")])
        assert (result.status, result.message) == ("ok", "")


# ---- the compiler --------------------------------------------------------------------------------


def test_a_source_that_does_not_compile(pool):
    result = pool.run("def broken(:", "broken", 1, 1, [])
    assert result.status == "compile_error" and "kernel.py(1): error" in result.message
    assert pool.run(SOURCE, "absent", 1, 1, []).status == "compile_error"
    assert_next_is_right(pool)


def test_a_compiler_that_hangs_or_dies(pool, monkeypatch):
    monkeypatch.setattr(isolate, "COMPILE_SECONDS", 0.3)
    result = pool.run("# hang the compiler", "k", 1, 1, [])
    assert (result.status, result.message) == ("timeout", "compiling took longer than 0.3 s")
    monkeypatch.undo()
    result = pool.run("# kill the compiler", "k", 1, 1, [])
    assert result.status == "crashed" and "ended by SIGSEGV" in result.message
    assert_next_is_right(pool)


def test_the_compiler_is_limited(pool):
    source = """
def limits(grid, block, out: "int*"): pass
import resource
limits_of = [resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_CORE)]
open(%r, "w").write(repr(limits_of))
"""
    path = f"/tmp/needle-limits-{os.getpid()}"
    try:
        pool.run(source % path, "limits", 1, 1, [Out(1, "int32")])
        # the runner executes the same text, and is limited in its core files alone
        assert Path(path).read_text() == "[(-1, -1), (0, 0)]"
        pool.run(source % path + "\nraise SyntaxError", "limits", 1, 1, [])
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        most = min(1 << 34, half)
        assert Path(path).read_text() == f"[({most}, {most}), (0, 0)]"
    finally:
        os.unlink(path)


# ---- the ways in ---------------------------------------------------------------------------------


def test_sizes_may_be_numpys(pool):
    args = [X, Out((6,)), 2.0, 6]
    result = pool.run(SOURCE, "scale", np.array([4, 2]), np.array([32]), args)
    assert (result.status, result.message) == ("ok", "")


def test_wrong_calls(pool):
    with pytest.raises(TypeError, match=r"args\[1\]: str is no argument of a kernel"):
        run(pool, "scale", X, "y")
    with pytest.raises(TypeError, match=r"args\[0\] .*: an array of dtype >f4; there are float32"):
        run(pool, "scale", X.astype(">f4"), Out(6), 2.0, 6)
    with pytest.raises(ValueError, match="sanitizer: must be one of memcheck"):
        run(pool, "scale", sanitizer="valgrind")
    with pytest.raises(TypeError, match="grid: must be a whole number"):
        pool.run(SOURCE, "no_results", (1, 2.5), 1, [])
    with pytest.raises(TypeError, match="source and entry must be text"):
        pool.run(SOURCE.encode(), "no_results", 1, 1, [])
    with pytest.raises(ValueError, match="source: letter 2 is half a surrogate pair"):
        pool.run("k \ud800", "k", 1, 1, [])
    with pytest.raises(ValueError, match="entry: letter 0 is half a surrogate pair"):
        pool.run(SOURCE, "\udfff", 1, 1, [])
    with pytest.raises(ValueError, match="fresh: must be"):
        FakePool(devices=[0], fresh="never")
    with pytest.raises(ValueError, match="timeout: must be above 0"):
        FakePool(devices=[0], timeout=0)
    assert_next_is_right(pool)


@pytest.mark.parametrize(
    "source, grid, shared, args, error, said",
    [
        (SOURCE, [1] * 3_000_000, 0, [], ValueError, "grid: .* 1 to 3 of them, not 3,000,000"),
        (SOURCE, [], 0, [], ValueError, "grid: .* not 0"),
        (SOURCE, "1", 0, [], TypeError, "grid: must be a whole number"),
        (SOURCE, (1, 2.5), 0, [], TypeError, "grid: must be a whole number"),
        (SOURCE, 1, "x", [], TypeError, "shared: must be a whole number"),
        (SOURCE, 1, 0, [b"x" * (3 << 20)], ValueError, "too many arguments, or too long: a frame"),
        ("#" * (257 << 20), 1, 0, [], ValueError, "source and entry are too long to be sent"),
    ],
)
def test_what_cannot_be_sent_costs_no_process(pool, source, grid, shared, args, error, said):
    assert_next_is_right(pool)
    before = pool.state()
    compilers = [worker.pid for worker in pool.compilers.ready]
    with pytest.raises(error, match=said):
        pool.run(source, "no_results", grid, 1, args, shared)
    assert pool.state() == before
    assert [worker.pid for worker in pool.compilers.ready] == compilers


def test_devices_are_found_by_a_process(monkeypatch):
    with FakePool(timeout=SECONDS, spares=0) as pool:
        assert [d["device"] for d in pool.state()] == [0]
    monkeypatch.setenv("FAKE_NONE", "1")
    with pytest.raises(RuntimeError, match="no GPU to run kernels on: no NVIDIA driver"):
        FakePool()


@pytest.mark.parametrize("visible, seen", [(None, "1"), ("3,GPU-5", "GPU-5")])
def test_a_runner_sees_its_device_alone(visible, seen, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert FakePool._environment(None, 1)["CUDA_VISIBLE_DEVICES"] == seen
    assert FakePool._environment(None, None).get("CUDA_VISIBLE_DEVICES") == visible


def test_a_user_who_hides_all_devices_is_obeyed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = "devices: there is no 0, since CUDA_VISIBLE_DEVICES= shows none"
    with pytest.raises(ValueError, match=said):
        FakePool(devices=[0])


def test_a_process_finds_needle_where_python_leaves_out_the_folder_of_a_script(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    start = Path(isolate.__file__).with_name("start.py")
    done = subprocess.run(
        [sys.executable, str(start), "no such role", "0"], capture_output=True, text=True
    )
    assert "No module named" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "devices, error, said",
    [
        ([3], ValueError, "there is no 3, since CUDA_VISIBLE_DEVICES=5,GPU-6 shows 2, from 0 to 1"),
        ([-1], ValueError, "-1 is no device"),
        ([0, 1, 0], ValueError, "0 is there twice"),
        ([], ValueError, "one at least"),
        (["0"], TypeError, "whole numbers, as of needle.cuda"),
        ([True], TypeError, "not True"),
        ("0", TypeError, "must be a list"),
        (0, TypeError, "must be a list"),
    ],
)
def test_devices_that_are_none(devices, error, said, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-6")
    with pytest.raises(error, match=f"devices: .*{said}"):
        FakePool(devices=devices)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("timeout", 0, ValueError),
        ("timeout", float("inf"), ValueError),
        ("timeout", float("nan"), ValueError),
        ("timeout", "1", TypeError),
        ("spares", -1, ValueError),
        ("spares", 1.5, TypeError),
        ("memory", 0, ValueError),
        ("memory", "1 GB", TypeError),
    ],
)
def test_numbers_of_a_pool_that_are_none(name, value, error):
    with pytest.raises(error, match=f"{name}: must be"):
        FakePool(devices=[0], **{name: value})


def test_a_deadline_may_be_months_away():
    """poll(2) waits 24 days at the most."""
    with FakePool(devices=[0], timeout=1e9, spares=0) as pool:
        assert_next_is_right(pool)


def test_mps_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert isolate.mps() is None
    (tmp_path / "control").touch()
    with pytest.raises(RuntimeError, match="MPS is on .*faults|MPS is on .*a fault ends the work"):
        FakePool(devices=[0])


def test_the_parent_opens_no_gpu(pool):
    assert_next_is_right(pool)
    code = "from needle.kernels.isolate import Pool; print(open('/proc/self/maps').read())"
    maps = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout
    assert "needle/_C" in maps
    assert not any(name in maps for name in ("_cuda.so", "libcuda", "libnvrtc"))


def test_waiting_processes_give_memory_back(pool):
    assert_next_is_right(pool)
    assert pool.cleanup() > 0 and pool.cleanup() == 0
    assert_next_is_right(pool)
