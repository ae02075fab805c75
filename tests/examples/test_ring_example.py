"""examples/ring.py, as a person runs it: one process, ranks of mpirun, and of torchrun on GPUs."""

import importlib.util
import sys

import pytest
from harness import ROOT, run
from struck_runs import ENVIRON, missing, mpirun

from needle.distributed.group import visible_gpus

PROGRAM = ROOT / "examples" / "ring.py"
MANY = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("ranks", [1, *(pytest.param(n, marks=MANY) for n in (2, 4))])
def test_ranks_agree_with_one_process(ranks, tmp_path):
    words = [*mpirun(), "-n", str(ranks)] if ranks > 1 else []
    environ = ENVIRON | {"PYTHONPATH": None, "CUDA_VISIBLE_DEVICES": ""}  # it finds the checkout
    done = run(*words, sys.executable, PROGRAM, cwd=tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    wanted = [f"{name}: rank {r} of {ranks} on cpu()" for name in ("ring", "ring, dilated")
              for r in range(ranks)]  # fmt: skip
    assert [line.rpartition(":")[0] for line in done.stdout.splitlines()] == wanted


@pytest.mark.cuda
@pytest.mark.skipif(visible_gpus() < 2, reason=f"{visible_gpus()} GPUs are visible, and not 2")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torchrun (torch)")
def test_ranks_of_torchrun_on_two_gpus(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*words, PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ring, dilated: rank 1 of 2 on cuda" in done.stdout
