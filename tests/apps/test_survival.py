"""Runs keep all that they saved, and lose only the steps since: damage, refusals of the system,
signals, a closed pipe, data that break off; and under a supervisor, into whose heartbeat they
write."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
import train_pythia
from harness import DEVICES, flip_bit, naming
from small_runs import assert_same_run, checkpoint_of, contents, flags, lines_of, without
from struck_runs import ENVIRON, PROGRAM, Runs, text_of, write_tokens

from needle.checkpoint import Checkpoint, list_checkpoints
from needle.data import DataError, Prefetch
from needle.training import heartbeat
from needle.training import log as logs
from needle.training.replay.proofs import Log

pytestmark = pytest.mark.slow


def folder_of(tmp_path, name):
    return tmp_path / "runs" / name / "checkpoints"


# ---- damaged and missing checkpoints ------------------------------------------------------------


def test_auto_does_not_begin_anew_over_unreadable_checkpoints(tmp_path, run, refused, monkeypatch):
    assert run("a") == 0
    argv = flags(tmp_path, tmp_path / "tokens.npy", "a", "--resume", "auto")
    folder = folder_of(tmp_path, "a")
    newest, before = list_checkpoints(folder)[0], contents(folder)

    def refusing(path, *args, real=open, **options):
        if str(path) == str(newest):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("needle.files.open", refusing, raising=False)
        error = refused(train_pythia.main, argv, f"{newest}: cannot be")
    assert os.strerror(errno.EIO) in error and contents(folder) == before
    for path in list_checkpoints(folder):
        flip_bit(path)
    before, said = contents(folder), "none of its checkpoints is whole; nothing is overwritten"
    refused(train_pythia.main, argv, said)
    assert contents(folder) == before


def test_run_that_saved_does_not_begin_anew(tmp_path, run, capsys):
    """Its checkpoints were deleted, then their folder, then its config.json; with and without a
    name."""
    assert run("tiny", "--steps", "1") == 0
    folder = tmp_path / "runs" / "tiny"
    named = flags(tmp_path, tmp_path / "tokens.npy", "tiny", "--resume", "auto")
    checkpoint_of(tmp_path, "tiny", 1).unlink()
    metrics = (folder / "metrics.jsonl").read_bytes()
    gone = lambda: None, (folder / "checkpoints").rmdir, (folder / "config.json").unlink
    for remove in gone:
        remove()
        for argv in named, without(named, "--name"):
            assert train_pythia.main(argv) == 1
            out, error = capsys.readouterr()
            assert f"{folder / 'checkpoints'}: no checkpoint is left there" in error
            assert f"another --name, or remove {folder}" in error
            assert "starting from the beginning" not in out
            assert (folder / "metrics.jsonl").read_bytes() == metrics
    folder_of(tmp_path, "b").mkdir(parents=True)
    (folder_of(tmp_path, "b") / ".step_2.safetensors.7-00000000.tmp").write_text("x")
    assert run("b", "--resume", "auto") == 0  # it never saved
    assert "starting from the beginning" in " ".join(capsys.readouterr().out.split())
    assert not list(folder_of(tmp_path, "b").glob(".*"))


# ---- signals ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_signal_saves_the_last_step(tmp_path, run, monkeypatch, capsys, end):
    queue = logs.RunLog.queue

    def stopped(self, step, *rest):
        if step == 3:
            signal.raise_signal(end)
        queue(self, step, *rest)

    monkeypatch.setattr(logs.RunLog, "queue", stopped)
    assert run("a", "--save-every 0 --grad-accum 3") == 0
    assert [line["step"] for line in lines_of(tmp_path, "a")] == [1, 2, 3]
    [saved] = list_checkpoints(folder_of(tmp_path, "a"))
    assert Checkpoint(saved).state["step"] == 3
    out = capsys.readouterr().out
    assert f"stopped by {end.name} after step 3 of 6, and saved" in out
    command = out.splitlines()[-1]
    assert "--resume auto --name a" in command and command.endswith(" --device cpu")


def test_closed_pipe_saves_the_last_step(tmp_path, tokens):
    argv = flags(tmp_path, tokens, "a", "--eval-every 0 --save-every 0", steps=20_000)
    environ = os.environ | ENVIRON | {"NEEDLE_CACHE": str(tmp_path / "cache")}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-u", PROGRAM, *argv], env=environ, **output) as child:
        next(line for line in child.stdout if line.startswith("step "))
        child.stdout.close()
        assert child.wait(60) == 0
    [saved] = list_checkpoints(folder_of(tmp_path, "a"))
    assert Checkpoint(saved).state["step"] == len(lines_of(tmp_path, "a")) < 20_000


# ---- refusals of the system ---------------------------------------------------------------------


def failing(function, at, error):
    """The function, whose call number `at` fails."""
    calls = itertools.count(1)

    def call(*args):
        if next(calls) == at:
            raise type(error)(*error.args)  # one of its own, which keeps no frames alive
        return function(*args)

    return call


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
SHRANK = DataError("tokens.npy: shrank while it was read")
SHORT = MemoryError("allocate: the system refused 1 bytes")
compute = train_pythia.forward_backward
# How a part is replaced, and what is said: data fail within step 2 and at the begin of step 4.
FAULTS = (
    (lambda: (Prefetch, "next", failing(Prefetch.next, 4, SHRANK)), "shrank.* step 1 of 6, and s"),
    (lambda: (Prefetch, "next", failing(Prefetch.next, 7, SHRANK)), "shrank.* step 3 of 6, and s"),
    (lambda: (train_pythia, "forward_backward", failing(compute, 4, SHORT)), "1 bytes.*--batch-si"),
    (lambda: (os, "fsync", failing(os.fsync, 3, FULL)), os.strerror(errno.ENOSPC)),
)


def test_what_the_system_refuses_is_said_and_costs_no_finished_step(
    tmp_path, run, monkeypatch, capsys
):
    for evaluates in 0, 1:
        more = f"--grad-accum 2 --save-every 0 --eval-every {evaluates}"
        assert run(f"whole{evaluates}", more) == 0
        for number, (parts, said) in enumerate(FAULTS):
            name = f"a{number}{evaluates}"
            with naming(number, said, evaluates):
                with monkeypatch.context() as patch:
                    patch.setattr(*parts())
                    assert run(name, more) == 1
                assert re.search(said, capsys.readouterr().err, re.DOTALL)
                if kept := re.search("step (.) of 6, and s", said):
                    assert checkpoint_of(tmp_path, name, int(kept[1])).exists()
                assert run(name, more, "--resume auto") == 0
                assert_same_run(tmp_path, name, f"whole{evaluates}")
                assert Log(tmp_path / "runs" / name / "metrics.jsonl").broken == []


# ---- a supervisor --------------------------------------------------------------------------------


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
