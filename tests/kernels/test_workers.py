"""needle/kernels/workers.py without a GPU: workers that are kept ready, health-checked, replaced,
shared by threads, and leave no file or process.
"""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from fake_pool import (
    ALLOCATES,
    FAKE_WORKER,
    SECONDS,
    SHORT,
    SOURCE,
    FakePool,
    assert_next_is_right,
    children,
    fds,
    run,
)
from harness import ROOT, in_thread, naming, state_of, wait_for, wait_until_gone

from needle.kernels import Out, workers

pytestmark = pytest.mark.slow


def pid_of_job(pool, source=SOURCE) -> int:
    return int(pool.run(source, "who", 1, 1, [Out(1, "int32")]).outputs[0][0])


def two_ready(pool) -> bool:
    return len(pool.state()[0]["ready"]) == 2


def worker_pool(start) -> workers.WorkerPool:
    return workers.WorkerPool(7, start, 1, 1, threading.Condition())


# ---- replacing processes -------------------------------------------------------------------------


def test_a_process_runs_jobs_until_a_fault(pool):
    first = pid_of_job(pool)
    run(pool, "fails", 6)
    assert pid_of_job(pool) == first
    run(pool, "fails", 0)
    assert pid_of_job(pool) != first
    first = pid_of_job(pool, ALLOCATES)
    assert pid_of_job(pool) != first
    with FakePool(devices=[0], timeout=SECONDS, fresh="job", spares=0) as fresh:
        assert len({pid_of_job(fresh) for _ in range(3)}) == 3


def test_the_health_of_the_next_process_is_checked_after_a_fault(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))

    def checks() -> list[int]:
        return [int(line.split()[0]) for line in log.read_text().splitlines()]

    with FakePool(devices=[0], timeout=SECONDS) as pool:
        first = pid_of_job(pool)
        wait_for(lambda: two_ready(pool))
        (spare,) = set(pool.state()[0]["ready"]) - {first}
        assert sorted(checks()) == sorted([first, spare])
        assert pid_of_job(pool) == first and len(checks()) == 2
        run(pool, "fails", 0)
        assert pid_of_job(pool) == spare
        assert checks().count(spare) == 2
        wait_for(lambda: two_ready(pool))
        assert pid_of_job(pool) in pool.state()[0]["ready"]


def test_a_spare_runs_once_the_killed_process_is_gone(monkeypatch):
    """The next spare starts later still: the driver would be busy with it."""
    killed, started = {}, []
    kill, ended, begin = (workers.Worker.kill, workers.Worker.ended, workers.WorkerPool._start_one)

    def kill_and_note(worker):
        killed[worker.pid] = time.monotonic()
        kill(worker)

    def starts(one):
        started.append(time.monotonic())
        begin(one)

    def is_gone(worker):
        return ended(worker) and time.monotonic() > killed.get(worker.pid, 0) + 0.3

    with FakePool(devices=[0], timeout=SECONDS) as pool:
        wait_for(lambda: two_ready(pool))
        assert_next_is_right(pool)
        monkeypatch.setattr(workers.Worker, "kill", kill_and_note)
        monkeypatch.setattr(workers.Worker, "ended", is_gone)
        monkeypatch.setattr(workers.WorkerPool, "_start_one", starts)
        pool.timeout = SHORT
        assert run(pool, "hangs").status == "timeout"
        pool.timeout = SECONDS
        (since,) = killed.values()
        assert_next_is_right(pool)
        assert 0.3 < time.monotonic() - since < 0.8
        wait_for(lambda: two_ready(pool))
        assert started[0] > since + 0.3


# ---- devices that are set aside ------------------------------------------------------------------


def test_a_device_that_fails_its_health_check_is_set_aside_until_reset(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    monkeypatch.setenv("FAKE_BROKEN", str(broken))
    with FakePool(devices=[0], timeout=SECONDS) as pool:
        wait_for(lambda: two_ready(pool))
        broken.touch()
        assert_next_is_right(pool)  # no fault, no check
        run(pool, "fails", 0)
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "3 x + 1 is wrong" in result.message
        assert pool.state()[0]["facts"]["arch"] == "90a"  # still known
        with pytest.raises(RuntimeError, match="3 x [+] 1 is wrong"):
            pool.reset(0)
        broken.unlink()
        pool.reset(0)
        assert_next_is_right(pool)


def test_a_device_that_the_driver_reports_lost_is_set_aside_until_reset():
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as pool:
        assert run(pool, "fails", 1).status == "device_lost"
        assert "cudaErrorECCUncorrectable" in pool.state()[0]["set_aside"]
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "set aside until reset" in result.message
        pool.reset(0)
        assert_next_is_right(pool)


def test_processes_that_do_not_start_set_the_device_aside(monkeypatch):
    monkeypatch.setattr(FakePool, "worker", (sys.executable, "-c", "print('no driver'); 1 / 0"))
    with FakePool(devices=[0]) as pool:
        result = run(pool, "no_results")
    assert result.status == "device_lost"
    assert "does not start" in result.message and "ZeroDivisionError" in result.message

    def defect():
        raise IndexError("list index out of range")

    broken = worker_pool(defect)
    for _ in range(2):
        reason = r"cuda\(7\) cannot be started: IndexError\('list"
        with pytest.raises(workers.SetAside, match=reason):
            broken.take()
        broken.reset()
    broken.close()


def test_a_shortage_of_the_host_is_waited_for(monkeypatch):
    monkeypatch.setattr(workers, "RETRY_SECONDS", 0.01)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for lacking in workers.SHORTAGES:
        with naming(errno.errorcode[lacking]):
            left = [1] * 5

            def start(left=left, lacking=lacking):
                if left:
                    left.pop()
                    raise OSError(lacking, os.strerror(lacking))
                return workers.Worker([sys.executable, str(FAKE_WORKER), "compiler"], environment)

            one = worker_pool(start)
            worker = one.take()
            assert one.set_aside is None and one.failures == 0 and not left
            one.give_back(worker, keep=True)
            one.close()
    monkeypatch.setattr(workers, "SHORTAGE_STARTS", 5)

    def never():
        raise OSError(errno.EMFILE, "Too many open files")

    one = worker_pool(never)
    with pytest.raises(workers.SetAside, match="cannot be started: .*Too many open files"):
        one.take()
    one.close()


def test_compilers_that_do_not_start_are_replaced_by_a_reset():
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as pool:
        assert_next_is_right(pool)
        real = pool.compilers.start_worker

        def start():
            raise PermissionError("no python")

        pool.compilers.start_worker = start
        os.kill(pool.state()[0]["compilers"]["ready"][0], signal.SIGKILL)
        for _ in range(2):
            result = run(pool, "no_results")
            assert result.status == "device_lost" and "nothing compiles" in result.message
            assert "a process for compiling cannot be started: no python" in result.message
        assert "no python" in pool.state()[0]["compilers"]["set_aside"]
        assert pool.state()[0]["set_aside"] is None
        with pytest.raises(RuntimeError, match="no python"):
            pool.reset(0)
        pool.compilers.start_worker = real
        pool.reset(0)
        assert pool.state()[0]["compilers"]["set_aside"] is None
        assert_next_is_right(pool)


def test_a_compiler_is_replaced_when_its_processor_time_is_used(pool):
    seen = set()
    for _ in range(3):
        result = pool.run(SOURCE + "# tire the compiler", "no_results", 1, 1, [])
        assert (result.status, result.message) == ("ok", "")
        seen |= set(pool.state()[0]["compilers"]["ready"])
    assert_next_is_right(pool)
    assert len(seen) == 3 and pool.state()[0]["compilers"]["faults"] == 0


# ---- threads -------------------------------------------------------------------------------------


def test_a_device_runs_one_job_at_a_time():
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

    with FakePool(devices=[0, 1], timeout=SECONDS) as pool:
        wait_for(lambda: all(len(d["ready"]) == 2 for d in pool.state()))
        for one in [in_thread(work, n) for n in range(8)]:
            one.result(60)
    assert not wrong and len(found) == 24
    assert {result.device for result in found} == {0, 1}
    for device in (0, 1):
        spans = sorted(tuple(r.outputs[0][1:]) for r in found if r.device == device)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))


def test_close_ends_jobs_of_other_threads():
    pool = FakePool(devices=[0], timeout=30, spares=0)
    hangs = in_thread(run, pool, "hangs")
    wait_for(lambda: pool.state()[0]["used"])
    time.sleep(0.2)
    pool.close()
    assert hangs.result(5).status == "crashed"
    with pytest.raises(RuntimeError, match="this Pool is closed"):
        run(pool, "no_results")


def test_close_ends_the_wait_for_a_process():
    def start():
        return workers.Worker([sys.executable, "-c", "import time; time.sleep(1000)"], os.environ)

    silent = worker_pool(start)
    taken = in_thread(silent.take)
    wait_for(lambda: silent.starting is not None)
    silent.close()
    with pytest.raises(RuntimeError, match="this Pool is closed"):
        taken.result(5)
    assert not silent.dying


# ---- the ends of processes -----------------------------------------------------------------------


def test_close_leaves_no_process_file_or_thread():
    gc.collect()
    before = fds(), children(), threading.active_count()
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as pool:
        assert_next_is_right(pool)
        run(pool, "fails", 0)
        run(pool, "signals", signal.SIGSEGV)
        assert children() != before[1]
    gc.collect()
    assert (fds(), children(), threading.active_count()) == before


def test_a_worker_dies_with_its_parent_while_another_holds_its_socket(tmp_path):
    ours, theirs = socket.socketpair()
    code = f"""
import sys, time
from needle.processes import Child
command = [sys.executable, {str(FAKE_WORKER)!r}, "runner", "{theirs.fileno()}"]
print(Child(command, messages=True, pass_fds=[{theirs.fileno()}]).pid, flush=True)
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
        assert ours.recv(1) == b"{" and state_of(pid)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        wait_until_gone(pid)


def test_a_busy_worker_under_a_tool_ends_with_its_socket():
    environment = FakePool._environment(None, 0)
    with workers.Worker([sys.executable, str(FAKE_WORKER), "traced"], environment) as worker:
        worker.greet(SECONDS)
        launch = {"entry": "hangs", "grid": [1], "block": [1], "shared": 0, "local_bytes": 0}
        file = os.memfd_create("buffer")
        os.ftruncate(file, 4096)
        job = {"do": "run", **launch, "arguments": [], "places": []}
        worker.channel.send(job, SOURCE.encode(), [file])
        os.close(file)
        time.sleep(0.2)
        assert not worker.ended()
        worker.channel.close()
        wait_for(worker.ended, 5)


def test_a_process_has_not_ended_while_a_child_holds_its_socket():
    """compute-sanitizer may end before the process that it watches."""
    code = """
import subprocess, sys
child = subprocess.Popen(["sleep", "1000"], pass_fds=[int(sys.argv[1])], start_new_session=True)
print(child.pid, flush=True)
"""
    worker = workers.Worker([sys.executable, "-c", code], os.environ)
    assert worker.end(SECONDS) == "ended with exit code 0"
    assert not worker.ended()
    os.kill(int(worker.printed()), signal.SIGKILL)
    wait_for(worker.ended)
    worker.close()


def test_a_worker_has_no_files_but_its_own(pool):
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
    assert names == ["/dev/null", "/memfd", "/memfd", "/memfd", "pipe", "socket"]


def test_a_worker_cannot_resize_the_guarded_buffer(pool):
    source = """
def cut(grid, block, out: "int*"):
    out[:] = 0
    for n in os.listdir("/proc/self/fd"):
        path = "/proc/self/fd/" + n
        if os.path.lexists(path) and "memfd:needle-kernels" in os.readlink(path):
            for size in (0, 1 << 30):
                try:
                    os.ftruncate(int(n), size)
                except PermissionError:
                    out[0] += 1
"""
    result = pool.run(source, "cut", 1, 1, [Out(1, "int32")])
    assert (result.status, result.message) == ("ok", "") and np.all(result.outputs[0] == 2)
