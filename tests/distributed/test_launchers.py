"""Ranks that torchrun starts find their places and each other. (Those of mpirun and srun:
test_mpi_training.py, test_slurm.py.)"""

import sys
from pathlib import Path

import pytest
from harness import run
from rank_processes import BEGIN, END

pytestmark = pytest.mark.slow

BODY = """
from needle.distributed.environment import find
def main():
    place = find()
    control = Control.join(place, {"x": "y"}, None, 60.0, 20.0)
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
@pytest.mark.parametrize("how", [["--standalone"], ["--master-port", "29511"]])
def test_torchrun(tmp_path, how):
    run = [sys.executable, "-m", "torch.distributed.run", *how, "--nproc-per-node", "2"]
    assert started(tmp_path, *run) == "torchrun 2 [[0, 0, 2], [1, 1, 2]]\n"
