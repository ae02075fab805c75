"""Trainings of `rank_program.py --gpus N`, begun and read back: on GPUs, or on what pretends to be
some (`fake_nccl.c`)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpi_runs import PROGRAM, ROOT, TIMING

from needle.checkpoint import checkpoint_path

STEPS = 12


def fake_library(folder: Path) -> Path:
    library = folder / "libnccl.so.2"
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


class Runs:
    """A folder of runs of one kind: `flags` of all of them, `fake_nccl` where NCCL is pretended."""

    def __init__(self, out: Path, tokens: Path, fake_nccl: Path | None = None, *flags: str) -> None:
        self.out, self.tokens, self.fake_nccl, self.flags = out, tokens, fake_nccl, flags

    def start(
        self, name: str, gpus: int, *more: str, plan=None, broken: Sequence[str] = ()
    ) -> subprocess.Popen:
        flags = (
            f"--model tiny --batch-size 2 --seq-len 32 --grad-accum 4 --steps {STEPS} --eval-every "
            f"4 --save-every 6 --clip 0.5 --dtype float32 --gpus {gpus} --name {name}"
        ).split()
        environ = {**os.environ, "PLAN": json.dumps(plan), "PYTHONPATH": str(ROOT)}
        if self.fake_nccl is not None:
            environ["FAKE_NCCL"] = str(self.fake_nccl)
        if broken:
            environ["BROKEN_GPUS"] = ",".join(broken)
        return subprocess.Popen(
            [sys.executable, PROGRAM, *flags, *self.flags, "--data", self.tokens]
            + ["--out", self.out, *more],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *args, code: int | None = 0, **more) -> str:
        """Output of the run; code: its exit code, None for any."""
        process = self.start(*args, **more)
        said, _ = process.communicate(timeout=200)
        assert code is None or process.returncode == code, said
        return said

    def steps_of(self, name: str) -> int:
        log = self.out / name / "metrics.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def until_step(self, process: subprocess.Popen, name: str, step: int) -> None:
        while self.steps_of(name) < step:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)

    def written(self, name: str) -> tuple[bytes, list[dict]]:
        """The last checkpoint, and the lines of the log but for their times."""
        folder = self.out / name
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            for timing in TIMING:
                del line[timing]
        return checkpoint_path(folder / "checkpoints", STEPS).read_bytes(), lines


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks that it started, in their order."""
    numbers = {}
    for child in children_of(launcher):
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        numbers |= {int(v[5:]): child for v in environ if v.startswith(b"RANK=")}
    return [numbers[rank] for rank in sorted(numbers)]


# ---- what must be so on GPUs and on what pretends to be some -------------------------------------

# A run that lasts some seconds, until it is ended.
SLOW = {"rank": 0, "step": 0, "what": "slow", "seconds": 0.4}


def goes_on_with_other_numbers(runs: Runs, alone: tuple) -> None:
    for gpus, step in (2, 3), (1, 7), (2, 10):
        plan = {"rank": gpus - 1, "step": step, "what": "term"}
        said = runs.run("cut", gpus, "--resume", "auto", plan=plan)
        assert f"stopped by SIGTERM after step {step} of {STEPS}, and saved" in said
        assert said.count("and saved") == 1  # rank 0 speaks for all
        assert ("--gpus 2" in said.partition("Go on with")[2]) == (gpus == 2)
    runs.run("cut", 2, "--resume", "auto")
    assert runs.written("cut") == alone


def a_killed_rank_ends_the_others(runs: Runs, alone: tuple, rank: int) -> None:
    plan = {"rank": rank, "step": 8, "what": "kill"}
    began = time.monotonic()
    said = runs.run("killed", 2, plan=plan, code=75)
    assert time.monotonic() - began < 60
    assert f"at step 8: rank {rank} is gone" in said
    assert f"needle: rank {rank} was killed by SIGKILL" in said
    runs.run("killed", 2, "--resume", "auto")
    assert runs.written("killed") == alone


def a_stopped_rank_is_named(runs: Runs, rank: int, deadline=8.0) -> None:
    plan = {"rank": rank, "step": 5, "what": "stop", "deadline": deadline}
    process = runs.start("stopped", 2, plan=plan)
    try:
        runs.until_step(process, "stopped", 3)
        ranks = ranks_of(process.pid)
        other = ranks[1 - rank]
        began = time.monotonic()
        while Path(f"/proc/{other}/exe").exists():  # a zombie has none
            assert time.monotonic() - began < 4 * deadline
            time.sleep(0.1)
    finally:
        os.kill(ranks[rank], signal.SIGKILL)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 75, said
    assert f"rank {rank}" in said and "does not answer for" in said, said


def a_signal_saves_once(runs: Runs, alone: tuple, to_launcher: bool) -> None:
    process = runs.start("signal", 2, plan=SLOW)
    runs.until_step(process, "signal", 2)
    os.kill(process.pid if to_launcher else ranks_of(process.pid)[1], signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert said.count("stopped by SIGTERM after step") == said.count("and saved") == 1, said
    runs.run("signal", 1, "--resume", "auto")
    assert runs.written("signal") == alone


def a_signal_between_two_steps_is_heard(runs: Runs, gpus: int) -> None:
    plan = {"rank": gpus - 1, "step": 5, "what": "meet"}
    said = runs.run("meet", gpus, plan=plan)
    assert f"stopped by SIGTERM after step 6 of {STEPS}, and saved" in said, said


def a_wrong_device_is_named(runs: Runs, alone: tuple) -> None:
    plan = {"rank": 1, "step": 12, "what": "bit"}  # the sixth that is verified, of micro-batch 2
    said = runs.run("wrong", 2, "--verify", "2", plan=plan, code=75)
    assert "micro-batch 2 differs in 1 of" in said and "rank 1 (" in said, said
    assert not checkpoint_path(runs.out / "wrong" / "checkpoints", STEPS).exists()
    runs.run("wrong", 2, "--resume", "auto", "--verify", "2")
    assert runs.written("wrong") == alone


def under_a_supervisor(runs: Runs, alone: tuple) -> None:
    process = runs.start("supervised", 2, "--supervise", plan=SLOW)
    runs.until_step(process, "supervised", 7)
    [launcher] = children_of(process.pid)
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert "rank 1 was killed by SIGKILL" in said and "restart" in said
    assert runs.written("supervised") == alone


def goes_on_with_fewer(runs: Runs, alone: tuple, gpus: int, broken: list[str], kept: int) -> None:
    """Kill a rank, after which the `broken` GPUs fail their health check."""
    plan = {"rank": gpus - 1, "step": 8, "what": "kill", "once": True}
    said = runs.run("fewer", gpus, "--supervise", plan=plan, broken=broken)
    assert f"continuing with {kept} of {gpus} GPUs, the same bits (--gpus {kept} " in said, said
    assert "failed its health check: it has fallen off the bus" in said
    [fault] = faults_of(runs, "fewer")
    assert (fault["action"], [*fault["left_out"]]) == ("restart", broken)
    assert runs.written("fewer") == alone


def goes_on_without_a_wrong_device(runs: Runs, alone: tuple, uuid: str) -> None:
    """Rank 1's, found before there is any checkpoint."""
    plan = {"rank": 1, "step": 4, "what": "bit", "once": True}
    more = ["--supervise", "--verify", "2"]  # at step 4 micro-batch 2
    said = runs.run("wrong", 2, *more, plan=plan)
    assert f"GPU 1 ({uuid}) computed wrong: continuing with 1 of 2 GPUs, the same bits" in said
    assert "--verify 0)" in said
    [fault] = faults_of(runs, "wrong")
    assert fault["left_out"] == {uuid: "computed wrong"} and "rank 1 (" in fault["message"]
    assert runs.written("wrong") == alone


def faults_of(runs: Runs, name: str) -> list[dict]:
    lines = (runs.out / name / "faults.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
