"""Tests of trainings on several GPUs, for the modules that import them all: on real ones
(test_gpu_ranks.py), and on what pretends to be some (test_peers.py). Such a module has the fixtures
`runs`, an empty folder of runs, and `alone`, what a run on one GPU writes."""

import os
import re
import signal
from pathlib import Path

import pytest
from struck_runs import text_of

# A run that lasts some seconds, until it is ended.
SLOW = [{"what": "slow", "seconds": 0.4}]


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks that it started, in their order."""
    numbers = {}
    for child in children_of(launcher):
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        numbers |= {int(v[5:]): child for v in environ if v.startswith(b"RANK=")}
    return [numbers[rank] for rank in sorted(numbers)]


def test_a_run_goes_on_with_other_numbers(runs, alone):
    for gpus, step in (2, 3), (1, 7), (2, 10):
        plan = [{"rank": gpus - 1, "step": step, "what": "term"}]
        said = runs.run("cut", gpus, "--resume", "auto", plan=plan)
        assert f"stopped by SIGTERM after step {step} of {runs.steps}, and saved" in said
        assert said.count("and saved") == 1  # rank 0 speaks for all
        assert ("--gpus 2" in said.partition("Go on with")[2]) == (gpus == 2)
    assert runs.resumed("cut", 2) == alone


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others(runs, alone, rank):
    plan = [{"rank": rank, "step": 8, "what": "kill"}]
    said = runs.run("killed", 2, plan=plan, code=75, DEADLINE="600")
    assert re.search(f"at step [78]: rank {rank} is gone", said), said
    assert f"needle: rank {rank} was killed by SIGKILL" in said
    assert runs.resumed("killed", 2) == alone


@pytest.mark.parametrize("to_launcher", [False, True])
def test_a_signal_saves_once(runs, alone, to_launcher):
    process = runs.start("signal", 2, plan=SLOW)
    runs.until_step(process, "signal", 2)
    os.kill(process.pid if to_launcher else ranks_of(process.pid)[1], signal.SIGTERM)
    said = text_of(process)
    assert said.count("stopped by SIGTERM after step") == said.count("and saved") == 1, said
    assert runs.resumed("signal", 1) == alone


def test_under_a_supervisor_all_are_started_again(runs, alone):
    process = runs.start("supervised", 2, "--supervise", plan=SLOW)
    runs.until_step(process, "supervised", 7)
    [launcher] = children_of(process.pid)
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    said = text_of(process)
    assert "rank 1 was killed by SIGKILL" in said and "restart" in said
    assert runs.written("supervised") == alone
