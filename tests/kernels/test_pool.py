"""needle/kernels/isolate.py, crew.py and worker.py without a GPU: "kernels" are Python functions in
real worker processes (fake_worker.py) that fault, hang, die, forge, and write where none may.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_pool import ALLOCATES, FAKE_WORKER, SOURCE, FakePool, children, fds
from harness import ROOT

from needle._C import array, cpu
from needle.kernels import crew, isolate, sanitizer
from needle.kernels.values import Case, InOut, Out, Random

X = np.arange(6, dtype=np.float32)
SECONDS = 20.0  # that a job may take on a busy machine
SHORT = 0.4  # that one gets which does not end


@pytest.fixture(scope="module")
def pool():
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as made:
        yield made


@pytest.fixture
def short(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout", SHORT)


def run(pool, entry, *args, **more):
    return pool.run(SOURCE, entry, 1, 32, args, **more)


def assert_next_is_right(pool):
    result = run(pool, "scale", X, Out(6), 2.0, 6)
    assert (result.status, result.message) == ("ok", "")
    assert (result.outputs[0] == 2 * X).all()


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
        ("garbage", (), "closed its socket"),
    ],
)
def test_a_process_that_dies_or_lies_has_crashed(pool, entry, args, said, monkeypatch):
    monkeypatch.setattr(crew, "REAP_SECONDS", 0.3)  # a liar goes on, and is waited for
    result = run(pool, entry, *args)
    assert result.status == "crashed" and said in result.message
    assert entry != "breaks" or "a defect of the worker" in result.printed
    assert_next_is_right(pool)


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
        assert Path(path).read_text() == f"[({1 << 34}, {1 << 34}), (0, 0)]"
    finally:
        os.unlink(path)


# ---- fresh processes, proofs, devices that are set aside -----------------------------------------


def who(pool, source=SOURCE) -> int:
    return int(pool.run(source, "who", 1, 1, [Out(1, "int32")]).outputs[0][0])


def test_a_process_lives_until_a_fault(pool):
    first = who(pool)
    run(pool, "fails", 6)
    assert who(pool) == first
    run(pool, "fails", 0)
    assert who(pool) != first


def test_device_code_that_allocates_gets_no_second_job(pool):
    first = who(pool, ALLOCATES)
    assert who(pool) != first


def test_a_process_for_each_job():
    with FakePool(devices=[0], timeout=SECONDS, fresh="job", spares=0) as pool:
        assert len({who(pool) for _ in range(3)}) == 3


def proofs(log: Path) -> list[int]:
    return [int(line.split()[0]) for line in log.read_text().splitlines()]


def test_the_device_is_proven_after_each_fault(tmp_path, monkeypatch):
    """By the very process that takes the next job, also if it was ready before the fault."""
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    with FakePool(devices=[0], timeout=SECONDS) as pool:
        first = who(pool)
        wait_for(lambda: len(pool.state()[0]["ready"]) == 2)
        (spare,) = set(pool.state()[0]["ready"]) - {first}
        assert sorted(proofs(log)) == sorted([first, spare])
        assert who(pool) == first and len(proofs(log)) == 2
        run(pool, "fails", 0)
        assert who(pool) == spare
        assert proofs(log).count(spare) == 2
        wait_for(lambda: len(pool.state()[0]["ready"]) == 2)
        assert who(pool) in pool.state()[0]["ready"]


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


def test_a_device_that_proves_itself_wrong_is_set_aside(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    monkeypatch.setenv("FAKE_BROKEN", str(broken))
    with FakePool(devices=[0], timeout=SECONDS) as pool:
        wait_for(lambda: len(pool.state()[0]["ready"]) == 2)
        broken.touch()
        assert_next_is_right(pool)  # nothing happened that could have harmed it
        run(pool, "fails", 0)
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "3 x + 1 is wrong" in result.message
        with pytest.raises(RuntimeError, match="3 x [+] 1 is wrong"):
            pool.reset(0)
        broken.unlink()
        pool.reset(0)
        assert_next_is_right(pool)


def test_a_process_that_outlives_sigkill_holds_its_device(monkeypatch):
    """Jobs go to the other device, then nowhere."""
    undying = []
    real = crew.Worker.ended
    monkeypatch.setattr(crew, "REAP_SECONDS", 0.1)
    monkeypatch.setattr(crew.Worker, "ended", lambda w: w.pid not in undying and real(w))
    with FakePool(devices=[0, 1], timeout=SECONDS, spares=0) as pool:
        wait_for(lambda: all(len(d["ready"]) == 1 for d in pool.state()))
        for device in (0, 1):
            undying += pool.state()[device]["ready"]
            pool.timeout = SHORT
            result = run(pool, "hangs")
            assert (result.status, result.device) == ("timeout", device)
            pool.timeout = SECONDS
            if device == 0:
                assert_next_is_right(pool)
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "still there 0 s after SIGKILL" in result.message
        with pytest.raises(RuntimeError, match="still does not end"):
            pool.reset(0)
        undying.clear()
        pool.reset(0)
        assert_next_is_right(pool)


def test_a_device_whose_processes_do_not_start(monkeypatch):
    monkeypatch.setattr(FakePool, "worker", (sys.executable, "-c", "print('no driver'); 1 / 0"))
    with FakePool(devices=[0]) as pool:
        result = run(pool, "no_results")
    assert result.status == "device_lost"
    assert "does not start" in result.message and "ZeroDivisionError" in result.message


# ---- many at once --------------------------------------------------------------------------------


def test_threads_share_devices_and_never_one_process():
    """Eight threads, two devices; each job sleeps, and no two are in one process at a time."""
    source = """
def busy(grid, block, out: "double*"):
    out = out.view(np.float64).reshape(3)
    out[:2] = os.getpid(), time.monotonic()
    time.sleep(0.05)
    out[2] = time.monotonic()
"""
    found, wrong = [], []

    def work(number):
        for _ in range(3):
            if number == 0:
                run(pool, "fails", 0)
            result = pool.run(source, "busy", 1, 1, [Out(3, "float64")])
            (found if result.status == "ok" else wrong).append(result)

    with FakePool(devices=[0, 1], timeout=SECONDS, spares=0) as pool:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and len(found) == 24
    assert {result.device for result in found} == {0, 1}
    for device in (0, 1):
        spans = sorted(tuple(r.outputs[0][1:]) for r in found if r.device == device)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))


def test_jobs_of_others_end_when_the_pool_is_closed():
    pool = FakePool(devices=[0], timeout=30, spares=0)
    results = []
    thread = threading.Thread(target=lambda: results.append(run(pool, "hangs")))
    thread.start()
    wait_for(lambda: pool.state()[0]["ready"] or pool.state()[0]["started"] > 1)
    wait_for(lambda: pool.state()[0]["used"])
    time.sleep(0.2)
    pool.close()
    thread.join(5)
    assert [result.status for result in results] == ["crashed"]
    with pytest.raises(RuntimeError, match="this Pool is closed"):
        run(pool, "no_results")


# ---- what is left behind -------------------------------------------------------------------------


def test_nothing_is_left_behind():
    gc.collect()
    before = fds(), children(), threading.active_count()
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as pool:
        assert_next_is_right(pool)
        run(pool, "fails", 0)
        run(pool, "signals", signal.SIGSEGV)
        assert children() != before[1]
    gc.collect()
    assert (fds(), children(), threading.active_count()) == before


@pytest.mark.parametrize("entry", ["no_results", "hangs"])
def test_the_processes_die_with_their_parent(entry, tmp_path):
    """Killed itself, it can tell nobody; also when a job runs in the one of them."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys, threading, time
            sys.path[:0] = [{str(ROOT)!r}, {str(FAKE_WORKER.parent)!r}]
            from fake_pool import SOURCE, FakePool, children
            pool = FakePool(devices=[0], timeout=100, spares=0)
            pool.run(SOURCE, "no_results", 1, 1, [])
            threading.Thread(target=pool.run, args=(SOURCE, {entry!r}, 1, 1, [])).start()
            time.sleep(0.3)
            print(*children(), flush=True)
            time.sleep(100)
        """)
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(alive(pid) for pid in pids), 5)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_the_system_kills_a_worker_whose_parent_dies(tmp_path):
    """PR_SET_PDEATHSIG, apart from the socket: a second holder keeps that open."""
    ours, theirs = socket.socketpair()
    code = f"""
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, {str(FAKE_WORKER)!r}, "runner", "{theirs.fileno()}"],
                          pass_fds=[{theirs.fileno()}])
print(worker.pid, flush=True)
time.sleep(100)
"""
    with ours, theirs:
        parent = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        pid = int(parent.stdout.readline())
        assert ours.recv(4) == b"ndlk" and alive(pid)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        wait_for(lambda: not alive(pid), 5)


def test_a_worker_inherits_nothing_but_its_socket(pool):
    source = """
def files(grid, block, out: "char*"):
    there = ["/proc/self/fd/" + n for n in os.listdir("/proc/self/fd")]
    names = " ".join(sorted(os.readlink(n).split(":")[0] for n in there if os.path.lexists(n)))
    out[:] = 0
    out[: len(names)] = list(names.encode())
"""
    with open(os.devnull) as extra:
        os.set_inheritable(extra.fileno(), True)
        (text,) = pool.run(source, "files", 1, 1, [Out(500, "uint8")]).outputs
    names = bytes(text).rstrip(b"\0").decode().split()
    assert names == ["/dev/null", "/memfd", "pipe", "pipe", "socket"]


# ---- the ways in ---------------------------------------------------------------------------------


def test_wrong_calls(pool):
    with pytest.raises(TypeError, match=r"args\[1\]: str is no argument of a kernel"):
        run(pool, "scale", X, "y")
    with pytest.raises(ValueError, match="sanitizer: must be one of memcheck"):
        run(pool, "scale", sanitizer="valgrind")
    with pytest.raises(TypeError, match="grid: must be a whole number"):
        pool.run(SOURCE, "no_results", (1, 2.5), 1, [])
    with pytest.raises(TypeError, match="source and entry must be text"):
        pool.run(SOURCE.encode(), "no_results", 1, 1, [])
    with pytest.raises(ValueError, match="fresh: must be"):
        FakePool(devices=[0], fresh="never")
    with pytest.raises(ValueError, match="timeout must be above 0"):
        FakePool(devices=[0], timeout=0)
    assert_next_is_right(pool)


def test_the_memory_of_a_job_is_bounded(pool, monkeypatch):
    monkeypatch.setattr(pool, "memory", 1 << 20)
    assert_next_is_right(pool)
    result = run(pool, "scale", X, Out(1 << 18), 1.0, 6)
    assert result.status == "out_of_memory" and "this Pool allows 1,048,576" in result.message


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


def test_no_sanitizer(pool, monkeypatch):
    monkeypatch.setattr(isolate, "find_sanitizer", lambda: None)
    result = run(pool, "fails", 0, explain=True)
    assert result.status == "illegal_address" and "no compute-sanitizer here" in result.message
    assert sanitizer.find_sanitizer() is None or os.access(sanitizer.find_sanitizer(), os.X_OK)
