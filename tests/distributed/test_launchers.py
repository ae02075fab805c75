"""Launchers: ranks of torchrun find each other; apps/slurm.sbatch goes back into the queue."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, run
from rank_processes import BEGIN, END, free_port

pytestmark = pytest.mark.slow

BODY = """
from needle.distributed.environment import find
def main():
    place = find()
    control = Control.join(place, {"x": "y"}, 60.0, 20.0)
    ranks = control.gather("ranks", [place.rank, place.local_rank, place.local_size])
    if place.rank == 0:
        say(place.launcher, place.size, ranks)
    control.close()
"""
CODE = BEGIN.partition("rank, size, port")[0] + "def say(*words): print(*words)\n" + BODY + END


def started(tmp_path: Path, *words: str) -> str:
    """Output of the ranks."""
    (tmp_path / "rank.py").write_text(CODE)
    done = run(*words, tmp_path / "rank.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parity  # torch is there, and torchrun with it
@pytest.mark.parametrize("how", [["--standalone"], ["--master-port", str(free_port())]])
def test_torchrun(tmp_path, how):
    run = [sys.executable, "-m", "torch.distributed.run", *how, "--nproc-per-node", "2"]
    assert started(tmp_path, *run) == "torchrun 2 [[0, 0, 2], [1, 1, 2]]\n"


# ---- Slurm's programs are scripts that write down their words -----------------------------------

PROGRAMS = {
    "srun": 'printf "%s\\n" "$@" $NEEDLE_RANKS_KEY >srun.words; exit $srun_code',
    "scontrol": 'printf "%s " "$@" >scontrol.words',
    "squeue": 'date --date "$squeue_says" +%FT%T',
}


@pytest.fixture
def submit(tmp_path):
    """submit(exit code of srun, flags, variables) -> (exit code, words of srun, of scontrol)."""
    for name, line in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def submitted(code, *flags, **environ):
        (tmp_path / "scontrol.words").write_text("")
        clean = dict.fromkeys(name for name in os.environ if name.startswith("SLURM_"))
        clean |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        clean |= {"srun_code": code, "PYTHON": "/opt/my python", "squeue_says": "3 hours"}
        done = run("bash", ROOT / "apps" / "slurm.sbatch", *flags, cwd=tmp_path, **clean | environ)
        words = (tmp_path / "srun.words").read_text().splitlines()
        return done.returncode, words, (tmp_path / "scontrol.words").read_text()

    return submitted


def test_slurm_flags_reach_the_app_with_a_key_for_each_job(submit, tmp_path):
    keys = set()
    for _ in range(2):
        code, srun, scontrol = submit(0, "--data", "a b", "--name", "mine")
        assert (code, scontrol) == (0, "") and re.fullmatch("[0-9a-f]{64}", srun[-1])
        assert srun[2:-1] == ["/opt/my python", "apps/train_pythia.py", "--resume", "auto"] + [
            *("--name", "slurm-17", "--data", "a b", "--name", "mine")
        ]
        keys.add(srun[-1])
    assert len(keys) == 2
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for there in False, True:  # without PYTHON
        if there:
            (tmp_path / ".venv" / "bin" / "python").touch(0o755)
        assert submit(0, PYTHON=None)[1][2] == (".venv/bin/python" if there else "python3")
    assert submit(0, NEEDLE_RANKS_KEY="of the user")[1][-3:] == ["of", "the", "user"]


@pytest.mark.parametrize(
    "code, seconds, restarts, again",
    [
        (0, 100, 0, True),
        (0, 10_000, 0, False),
        (1, 100, 0, False),
        (75, 10_000, 9, True),
        (75, 10_000, 10, False),
    ],
)
def test_slurm_job_requeues_at_the_end_of_its_time_and_after_75(
    submit, code, seconds, restarts, again
):
    """Slurm 22 sets no end of the time, and is asked."""
    for end in (
        {"SLURM_JOB_END_TIME": int(time.time()) + seconds},
        {"squeue_says": f"{seconds} seconds"},
    ):
        done, _, scontrol = submit(code, SLURM_RESTART_COUNT=restarts, **end)
        assert (done, scontrol) == (code, "requeue 17 " * again), end


def test_slurm_job_without_a_limit_of_time_ends_when_it_is_done(submit):
    assert submit(0, squeue_says="NONE")[2] == ""
