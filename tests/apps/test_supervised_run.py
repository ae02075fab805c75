"""Trainings under a supervisor: how they go on, and what they write into their heartbeat."""

import os
import signal

import pytest
import train_pythia
from harness import DEVICES, wait_for
from small_runs import flags
from struck_runs import Runs, text_of, write_tokens

from needle.training import heartbeat

pytestmark = pytest.mark.slow

HANG = "10"  # seconds; a busy machine must do a step in that time


@pytest.fixture
def runs(tmp_path):
    made = Runs(tmp_path, write_tokens(tmp_path / "tokens.npy"))
    made.steps, made.every = 20, "--eval-every 10 --save-every 5"
    return made


def pid_of(runs, name) -> int | None:
    """The process that holds the run's lock; None while the next one writes its own."""
    words = (runs.out / name / "lock").read_text().split()
    return int(words[1]) if len(words) > 1 else None


@pytest.mark.parametrize("device", DEVICES)
def test_run_of_three_deaths_ends_as_one_of_none(runs, device):
    """A fault, a kill within a save, and a hang."""
    runs.every += f" --device {device} --dtype float32"
    whole = runs.start("whole", 0)
    deaths = (4, "fault"), (10, "save"), (13, "stop")
    plan = [{"step": s, "what": what, "once": str(runs.out / what)} for s, what in deaths]
    said = runs.run("struck", 0, "--supervise", "--hang-seconds", HANG, plan=plan)
    text_of(whole)
    assert runs.written("struck") == runs.written("whole")
    faults = runs.lines_of("struck", "faults.jsonl")
    assert [fault["exit"] for fault in faults][:2] == [75, 137] and len(faults) == 3
    assert faults[2]["message"].startswith("nothing finished for ")
    # On a GPU a step is told when the next one is queued.
    assert [fault["step"] for fault in faults][1:] == [10, 12 if device == "cpu" else 11]
    assert "illegal" in said and "step_10.safetensors after step 10" in said


def test_fault_that_comes_back_ends_the_run(runs):
    said = runs.run("a", 0, "--supervise", plan=[{"step": 4, "what": "fault"}], code=75)
    assert [fault["step"] for fault in runs.lines_of("a", "faults.jsonl")] == [3, 3, 3]
    assert said.count("the GPU is lost: exp: injected") == 3
    assert "supervise: after step 3: the GPU or a rank is lost: ended: 3 failures" in said


def test_supervise_flag_restarts_a_killed_run_under_its_name(runs):
    """The run had no --name, and chose one beside an older run."""
    (runs.out / "tiny" / "checkpoints").mkdir(parents=True)
    words, runs.steps = runs.words, 100_000
    runs.words = lambda name: [w for w in words("X") if w not in ("--name", "X")]
    process = runs.start("", 0, "--supervise", "--device", "cpu")
    runs.until_step(process, "tiny-2", 3)
    killed = pid_of(runs, "tiny-2")
    assert killed != process.pid
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: pid_of(runs, "tiny-2") not in (killed, None), 120)
    wait_for(lambda: len(runs.lines_of("tiny-2", "metrics.jsonl")) > 8, 120)
    process.send_signal(signal.SIGTERM)
    said = text_of(process)
    assert "stopped by SIGTERM" in said and "--resume auto --name tiny-2" in said
    assert said.rstrip().endswith("--supervise")
    [fault] = runs.lines_of("tiny-2", "faults.jsonl")
    assert (fault["exit"], fault["action"]) == (137, "restart")


def test_run_tells_its_folder_and_steps(tmp_path, tokens, monkeypatch):
    """Opening the device is watched, reading data is not, then each step, batch and save."""
    told, path = [], tmp_path / "steps"
    monkeypatch.setenv("NEEDLE_HEARTBEAT", str(path))
    write, unlink = heartbeat.Path.write_text, heartbeat.Path.unlink
    for name, real in ("write_text", write), ("unlink", unlink):

        def noting(self, *args, real=real, **more):
            told.extend(args[:1] or [None]) if self == path else None
            return real(self, *args, **more)

        monkeypatch.setattr(heartbeat.Path, name, noting)
    assert train_pythia.main(flags(tmp_path, tokens, "a", steps=4)) == 0
    assert told == ["0", None, "0", "1", "2", "3", "4", None]
    assert (tmp_path / "steps.run").read_text() == str(tmp_path / "runs" / "a")
