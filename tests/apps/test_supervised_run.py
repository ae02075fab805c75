"""Trainings under a supervisor: how they go on, and what they write into their heartbeat."""

import pytest
import train_pythia
from harness import DEVICES
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


@pytest.mark.parametrize("device", DEVICES)
def test_run_of_three_deaths_ends_as_one_of_none(runs, device):
    """A fault, a kill within a save, and a hang, of a run that has no --name and chose one beside
    an older run."""
    runs.every += f" --device {device} --dtype float32"
    whole = runs.start("whole", 0)
    deaths = (4, "fault"), (10, "save"), (13, "stop")
    plan = [{"step": s, "what": what, "once": str(runs.out / what)} for s, what in deaths]
    (runs.out / "tiny").mkdir()
    words = runs.words("struck")
    words = words[: words.index("--name")] + words[words.index("struck") + 1 :]
    runs.words = lambda name: words
    said = runs.run("", 0, "--supervise", "--hang-seconds", HANG, plan=plan)
    text_of(whole)
    assert runs.written("tiny-2") == runs.written("whole")
    faults = runs.lines_of("tiny-2", "faults.jsonl")
    assert [fault["exit"] for fault in faults][:2] == [75, 137] and len(faults) == 3
    assert faults[2]["message"].startswith("nothing finished for ")
    # On a GPU a step is told when the next one is queued.
    assert [fault["step"] for fault in faults][1:] == [10, 12 if device == "cpu" else 11]
    assert "illegal" in said and "step_10.safetensors after step 10" in said


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
