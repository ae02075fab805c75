"""needle/kernels/crew.py without a GPU: processes that are kept ready, prove their device, are set
aside, shared by threads, and leave nothing behind.
"""

import errno
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
from harness import ROOT

from needle.kernels import crew
from needle.kernels.frames import RUNNER_READY
from needle.kernels.values import Out

pytestmark = pytest.mark.slow

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


def test_a_spare_takes_over_once_what_was_killed_is_gone(monkeypatch):
    """At once then, and the next spare is not started before: the driver would be busy with it."""
    killed, started = {}, []
    kill, ended, begin = crew.Worker.kill, crew.Worker.ended, crew.Crew._start_one

    def kill_and_note(worker):
        killed[worker.pid] = time.monotonic()
        kill(worker)

    def starts(one):
        started.append(time.monotonic())
        begin(one)

    def is_gone(worker):
        return ended(worker) and time.monotonic() > killed.get(worker.pid, 0) + 0.3

    with FakePool(devices=[0], timeout=SECONDS) as pool:
        wait_for(lambda: len(pool.state()[0]["ready"]) == 2)
        assert_next_is_right(pool)
        monkeypatch.setattr(crew.Worker, "kill", kill_and_note)
        monkeypatch.setattr(crew.Worker, "ended", is_gone)
        monkeypatch.setattr(crew.Crew, "_start_one", starts)
        pool.timeout = SHORT
        assert run(pool, "hangs").status == "timeout"
        pool.timeout = SECONDS
        (since,) = killed.values()
        assert_next_is_right(pool)
        assert 0.3 < time.monotonic() - since < 0.8
        wait_for(lambda: len(pool.state()[0]["ready"]) == 2)
        assert started[0] > since + 0.3


def test_a_device_whose_processes_do_not_start(monkeypatch):
    monkeypatch.setattr(FakePool, "worker", (sys.executable, "-c", "print('no driver'); 1 / 0"))
    with FakePool(devices=[0]) as pool:
        result = run(pool, "no_results")
    assert result.status == "device_lost"
    assert "does not start" in result.message and "ZeroDivisionError" in result.message


def test_what_the_driver_calls_lost_is_set_aside():
    """An ECC error: the memory stays bad, whatever process comes next."""
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as pool:
        assert run(pool, "fails", 1).status == "device_lost"
        assert "cudaErrorECCUncorrectable" in pool.state()[0]["lost"]
        result = run(pool, "no_results")
        assert result.status == "device_lost" and "set aside until reset" in result.message
        pool.reset(0)
        assert_next_is_right(pool)


@pytest.mark.parametrize("lacking", crew.SHORTAGES)
def test_a_shortage_on_the_host_is_waited_for(lacking, monkeypatch):
    """Files or processes that others hold for a while are no fault of the device."""
    monkeypatch.setattr(crew, "RETRY_SECONDS", 0.01)
    left = [1] * 5

    def start():
        if left:
            left.pop()
            raise OSError(lacking, os.strerror(lacking))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return crew.Worker([sys.executable, str(FAKE_WORKER), "compiler"], environment)

    one = crew.Crew("nothing", start, 1, 1, False, threading.Condition())
    try:
        worker = one.take()
        assert one.lost is None and one.failures == 0 and not left
        one.give_back(worker, keep=True)
    finally:
        one.close()


def test_a_shortage_that_does_not_end(monkeypatch):
    monkeypatch.setattr(crew, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(crew, "SHORTAGE_SECONDS", 0.1)

    def start():
        raise OSError(errno.EMFILE, "Too many open files")

    one = crew.Crew("nothing", start, 1, 1, False, threading.Condition())
    with pytest.raises(crew.Lost, match="nothing cannot be started: .*Too many open files"):
        one.take()
    one.close()


def test_a_process_has_not_ended_while_another_holds_its_socket():
    """As below compute-sanitizer, which may end before the process that it watches."""
    code = """
import subprocess, sys
command = ["sleep", "1000"]
child = subprocess.Popen(command, pass_fds=[int(sys.argv[1])], start_new_session=True)
print(child.pid, flush=True)
"""
    worker = crew.Worker([sys.executable, "-c", code], os.environ)
    assert worker.end(SECONDS) == "it ended with exit code 0"
    assert not worker.ended()
    worker._drain()
    os.kill(int(worker.text_printed()), signal.SIGKILL)
    wait_for(worker.ended)
    worker.close()
    assert worker.ended()


def test_compilers_that_do_not_start_are_no_fault_of_a_kernel(monkeypatch):
    """They are told of, and a reset of any device starts them again."""
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
        assert "no python" in pool.state()[0]["compilers"]["lost"]
        assert pool.state()[0]["lost"] is None
        with pytest.raises(RuntimeError, match="no python"):
            pool.reset(0)
        pool.compilers.start_worker = real
        pool.reset(0)
        assert pool.state()[0]["compilers"]["lost"] is None
        assert_next_is_right(pool)


def test_a_compiler_that_is_tired_is_replaced_between_jobs(pool):
    """It ends itself once much of its time is used, which no job sees."""
    seen = set()
    for _ in range(3):
        result = pool.run(SOURCE + "# tire the compiler", "no_results", 1, 1, [])
        assert (result.status, result.message) == ("ok", "")
        seen |= set(pool.state()[0]["compilers"]["ready"])
    assert_next_is_right(pool)
    assert len(seen) == 3 and pool.state()[0]["compilers"]["faults"] == 0


def test_a_defect_in_starting_sets_aside_and_hangs_nobody():
    def start():
        raise IndexError("list index out of range")

    defect = crew.Crew("cuda(7)", start, 1, 1, True, threading.Condition())
    with pytest.raises(crew.Lost, match=r"cuda\(7\) cannot be started: IndexError\('list index"):
        defect.take()
    defect.reset()
    with pytest.raises(crew.Lost):
        defect.take()
    defect.close()


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


def test_a_busy_worker_ends_when_its_socket_does():
    """Also below compute-sanitizer, whose child it is: no signal tells it that the pool died."""
    worker = crew.Worker(
        [sys.executable, str(FAKE_WORKER), "traced"], FakePool._environment(None, 0)
    )
    try:
        worker.greet(SECONDS, RUNNER_READY)
        launch = {"entry": "hangs", "grid": [1], "block": [1], "shared": 0, "local_bytes": 0}
        file = os.memfd_create("arena")
        os.ftruncate(file, 4096)
        job = {"do": "run", **launch, "arguments": [], "places": []}
        worker.channel.send(job, SOURCE.encode(), [file])
        os.close(file)
        time.sleep(0.2)
        assert not worker.ended()
        worker.channel.close()
        wait_for(worker.ended, 5)
    finally:
        worker.kill()
        worker.end()
        worker.close()


def silent_crew() -> crew.Crew:
    """Its one process never becomes ready."""

    def start():
        return crew.Worker([sys.executable, "-c", "import time; time.sleep(1000)"], os.environ)

    return crew.Crew("nothing", start, 1, 1, True, threading.Condition())


def test_who_waits_for_a_process_is_told_that_the_pool_closed():
    silent, told = silent_crew(), []

    def take():
        try:
            silent.take()
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    wait_for(lambda: silent.starting is not None)
    silent.close()
    thread.join(5)
    assert told == ["this Pool is closed"] and not silent.dying


def test_draining_ends_though_the_flood_does_not():
    class Endless:
        def read(self, size):
            return b"x" * size

    worker = crew.Worker.__new__(crew.Worker)
    worker.output, worker.printed, worker.printed_bytes = Endless(), bytearray(), 0
    assert worker._drain()
    assert len(worker.printed) == crew.PRINTED_BYTES and worker.printed_bytes >= 1 << 20
