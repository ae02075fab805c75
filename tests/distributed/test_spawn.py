"""needle/distributed/spawn.py: ranks that end well, fail, hang, and lose their parent. (Those of a
training: gpu_trainings.py.)"""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from harness import ROOT, naming, wait_for, wait_until_gone

from needle.distributed import spawn
from needle.distributed.environment import find
from needle.processes import HEARTBEAT

pytestmark = pytest.mark.slow

LAUNCH = """
import sys
from needle.distributed import spawn
spawn.MARGIN = float(sys.argv[2])
sys.exit(spawn.run([sys.executable, "-S", "-c", sys.argv[4]], int(sys.argv[1]), float(sys.argv[3])))
"""
# What a rank begins with. A rank leaves a file with its process' number.
RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
open(f"{rank}.part", "w").write(str(os.getpid()))
os.rename(f"{rank}.part", f"{rank}.pid")
def wait_for(*names):
    while not all(map(os.path.exists, names)): time.sleep(0.01)
"""


@pytest.fixture
def launch(tmp_path):
    """launch(code, count) -> a process that starts ranks, each of which runs the code."""
    begun = []

    def start(code, count=3, deadline=60.0, margin=10.0, **environ):
        clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(count), str(margin), str(deadline), RANK + code],
            cwd=tmp_path,
            env=clean | {"PYTHONPATH": str(ROOT)} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def pids_of(folder):
    """The processes of three ranks, once they have begun."""
    files = [folder / f"{rank}.pid" for rank in range(3)]
    wait_for(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def test_each_rank_knows_its_place(monkeypatch):
    monkeypatch.setenv("RANK", "7")  # of a launcher around it
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.setenv(HEARTBEAT, "/tmp/steps")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7))
    made, other = spawn.environments(3), find(spawn.environments(3)[0])
    places = [find(environ) for environ in made]
    assert [(p.rank, p.size, p.local_rank, p.local_size) for p in places] == [
        (rank, 3, rank, 3) for rank in range(3)
    ]
    [(launcher, port, job, key)] = {(p.launcher, p.port, p.job, p.key) for p in places}
    assert launcher == "needle" and len(key) == 64 and other.job != job and other.key != key
    assert made[0]["OMP_NUM_THREADS"] == "2"
    assert spawn.environments(8)[7]["OMP_NUM_THREADS"] == "1"
    assert [environ.get(HEARTBEAT) for environ in made] == ["/tmp/steps", None, None]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert {environ["OMP_NUM_THREADS"] for environ in spawn.environments(2)} == {"5"}


def test_rank_0_prints_and_the_stderr_of_others_is_labelled(launch):
    code = """
print(f"out {rank}")
if rank: os.write(2, b"\\x1b[31m \\xfe\\n")
sys.stderr.write(f"one of {rank}\\n\\ntwo \\xff without an end" + "x" * 300_000 * rank)
"""
    process = launch(code, 2)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("x")) == (0, "out 0\n", 300_001)
    lines = {*err.replace("x", "").replace("end", "end\n").splitlines()} - {""}
    ending = "two \xff without an end"
    odd = "rank 1: \\1b[31m \ufffd"  # \x1b, and a byte that is no text
    assert lines == {"one of 0", ending, odd, "rank 1: one of 1", f"rank 1: {ending}"}


def test_first_that_failed_gives_the_exit_code_unless_one_has_75_or_was_killed(monkeypatch, capfd):
    """By what each look at the ranks finds."""
    monkeypatch.setattr(spawn, "TICK", 0.0)
    for looks, code, said in (
        ([(None, 0), (None, 4), (3,)], 3, "rank 2 ended with code 3"),
        ([(None, 0), (None, 75), (3,)], 75, "rank 2 ended with code 3"),
        ([(75,), (3,)], 75, "rank 1 ended with code 3"),  # rank 0 lost it
        ([(0,), (-signal.SIGKILL,)], 75, "rank 1 was killed by SIGKILL"),
    ):
        with naming(looks):
            ranks = [SimpleNamespace(poll=iter(codes).__next__) for codes in looks]
            assert spawn._follow(dict(enumerate(ranks)), [], 60.0) == code
            assert capfd.readouterr().err == f"needle: {said}\n"


def test_command_that_cannot_be_run_has_the_exit_code_of_a_shell(tmp_path, capfd):
    (tmp_path / "data.txt").write_text("")
    for name, code, why in (
        ("no-such-command", 127, "No such file or directory"),
        ("data.txt", 126, "Permission denied"),
    ):
        with naming(name):
            assert spawn.run([str(tmp_path / name)], 2) == code
            assert capfd.readouterr().err == f"needle: {tmp_path / name}: {why}\n"


def test_ranks_that_do_not_end_are_killed(launch, tmp_path):
    code = """
if rank == 1:
    wait_for("0.pid", "2.pid")
    sys.exit(9)
time.sleep(600)
"""
    process = launch(code, deadline=0.2, margin=1.0)
    _, err = process.communicate(timeout=60)
    killed = "needle: ranks that do not end by themselves: 0, 2: SIGKILL"
    assert process.returncode == 9 and err == f"needle: rank 1 ended with code 9\n{killed}\n"
    assert f"| `{killed}` |" in (ROOT / "docs/many_gpus.md").read_text()
    for pid in pids_of(tmp_path):
        wait_until_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on_once(launch, tmp_path, heeds_signals, number):
    code = """
heard = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: heard.append(number))
open(f"{rank}.ready", "w")
while not heard: time.sleep(0.01)
time.sleep(0.3)
sys.stderr.write(" ".join(map(str, heard)) + "\\n")  # in one piece, unlike print()
"""
    process = launch(code)
    wait_for(lambda: len([*tmp_path.glob("*.ready")]) == 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    said = f"{int(number)}"
    assert process.returncode == 0
    assert sorted(err.splitlines()) == sorted([said, f"rank 1: {said}", f"rank 2: {said}"])


def test_rank_that_a_passed_on_signal_kills_is_no_reason_to_restart(launch, tmp_path):
    """SIGABRT asks for the stacks of all ranks, as a supervisor does."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_DFL)\ntime.sleep(600)"
    process = launch(body, PYTHONFAULTHANDLER="1")
    pids_of(tmp_path)
    process.send_signal(signal.SIGABRT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGABRT and "was killed by SIGABRT" in err
    # Lines of the ranks and about them come whole, between pieces of rank 0's own stacks.
    stacks = "Fatal Python error: Aborted"
    own = re.sub(r"(rank [12]|needle): [^\n]*\n", "", err)
    assert [err.count(f"rank {n}: {stacks}\n") for n in (1, 2)] + [own.count(stacks)] == [1] * 3


def test_nothing_is_left_when_it_is_killed(launch, tmp_path):
    process = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)")
    pids = pids_of(tmp_path)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    for pid in pids:
        wait_until_gone(pid)
