"""apps/slurm.sbatch, with an srun and an scontrol that write down what they are asked for."""

import os
import re
import subprocess
import time

import pytest
from harness import ROOT

SCRIPT = ROOT / "apps" / "slurm.sbatch"


@pytest.fixture
def submit(tmp_path):
    """submit(exit code of srun, flags, variables) -> (exit code, words of srun, of scontrol)."""
    for name in ("srun", "scontrol"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{name}.words\nexit ${name}_code')
        path.chmod(0o755)

    def run(code, *flags, **environ):
        for path in tmp_path.glob("*.words"):
            path.unlink()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        clean |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        clean |= {"srun_code": str(code), "scontrol_code": "0", "PYTHON": "/opt/my python"}
        done = subprocess.run(
            ["bash", SCRIPT, *flags], cwd=tmp_path, env=clean | environ, capture_output=True
        )
        assert done.stderr == b""
        words = [tmp_path / "srun.words", tmp_path / "scontrol.words"]
        said = [path.read_text().splitlines() if path.exists() else [] for path in words]
        return done.returncode, *said

    return run


def test_the_flags_reach_the_app(submit):
    code, srun, scontrol = submit(0, "--recipe", "pythia", "--data", "a b", "--name", "mine")
    assert (code, scontrol) == (0, [])
    assert srun[2:] == ["/opt/my python", "apps/train_pythia.py", "--resume", "auto"] + [
        *("--name", "slurm-17", "--recipe", "pythia", "--data", "a b", "--name", "mine")
    ]


def test_back_into_the_queue(submit):
    soon, late = (str(int(time.time()) + seconds) for seconds in (100, 10_000))
    assert submit(75)[2] == ["requeue", "17"]
    for code, end, count, again in (
        (0, soon, "0", True),
        (0, late, "0", False),
        (1, soon, "0", False),
        (75, late, "9", True),
        (75, late, "10", False),
    ):
        done, _, scontrol = submit(code, SLURM_JOB_END_TIME=end, SLURM_RESTART_COUNT=count)
        assert done == code and bool(scontrol) == again, (code, end, count)


def test_its_lines_are_sbatchs():
    lines = re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE)
    said = dict(lines)
    assert said["--signal"] == "TERM@120" and said["--open-mode"] == "append"
    assert "--requeue" in said and said["--gpus-per-node"] == said["--ntasks-per-node"]
    body = SCRIPT.read_text().partition("\npython=python3")[0]
    assert all(not line or line.startswith("#") for line in body.splitlines())
