"""Threads of the CPU backend: after a fork, in numbers no machine has, and how they wait."""

import os
import re

import pytest
from harness import ROOT, SANITIZED, python

POOL = """
import numpy as np, os, signal, threading
import needle as ndl
x = ndl.NDArray(np.random.default_rng(0).random((700, 700)))
product, total = (x @ x).numpy(), float((x + x).sum())  # OpenMP's threads wait for more
"""
FORK = (
    POOL
    + """
def works():
    return (x @ x).numpy().tobytes() == product.tobytes() and float((x + x).sum()) == total

def child():
    signal.alarm(20)  # a child that hangs ends
    seen = [works()]
    thread = threading.Thread(target=lambda: seen.append(works()))
    thread.start()
    thread.join()
    os._exit(0 if seen == [True, True] else 1)

for _ in range(5):
    pid = os.fork()
    if pid == 0:
        child()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert works()
"""
)
FORK_WHILE_OTHERS_ALLOCATE = (
    POOL
    + """
going = True
def allocate():
    while going:
        ndl.backend_ndarray.empty((256, 256)) + 1  # its elements are added without the GIL

threads = [threading.Thread(target=allocate) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(200):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        x + 1
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        break
going = False
print(status)
"""
)


def run(program: str, **environment: str):
    unset = {name: None for name in os.environ if re.match("OMP_|GOMP_", name)}
    done = python(program, **unset | environment)
    assert done.returncode == 0, done.stderr
    return done


def printed(program: str, **environment: str) -> list[str]:
    return run(program, **environment).stdout.split()


def test_a_forked_child_works():
    """Its parent's OpenMP threads are gone: every region with several of them hung."""
    assert printed(FORK, OMP_NUM_THREADS="2") == ["0"] * 5


@pytest.mark.skipif(
    SANITIZED, reason="a fork finds the locks of the sanitizer's own allocator taken"
)
def test_a_fork_while_others_allocate():
    """The child found the lock of the memory pool taken, by a thread that it does not have."""
    assert printed(FORK_WHILE_OTHERS_ALLOCATE) == ["0"]


def test_more_threads_than_any_machine_has():
    """libgomp ends the process where a thread cannot be had."""
    show = "print(ndl.cpu().properties()['detail'].split(',')[-1])"
    most = max(256, len(os.sched_getaffinity(0)))
    assert printed(POOL + show, OMP_NUM_THREADS="100000") == [str(most), "threads"]


def test_threads_wait_without_spinning_long():
    """Two jobs on one machine took the cores from each other by waiting; the user's word counts."""
    show = "import os, needle; print(os.environ.get('GOMP_SPINCOUNT'))"
    for user, spins in ((None, "30000"), ("77", "77")):
        wait = {"GOMP_SPINCOUNT": user, "OMP_WAIT_POLICY": None}
        done = run(show, OMP_DISPLAY_ENV="verbose", **wait)
        found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
        if found is None:
            pytest.skip("OpenMP is not libgomp, or was loaded before needle")
        assert found[1] == spins
        assert done.stdout.split() == [str(user)]  # the environment as it was


def test_every_region_asks_how_many_threads():
    for path in (ROOT / "csrc" / "cpu").glob("*.c"):
        text = path.read_text().replace("\\\n", " ")
        for region in re.findall(r"#pragma omp parallel.*", text):
            assert "num_threads(cpu_threads())" in region, f"{path}: {region}"
