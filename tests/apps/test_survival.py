"""Runs keep all that they saved, and lose only the steps since: damage, refusals of the system,
signals, a closed pipe, data that break off."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import train_pythia
from harness import naming
from small_runs import assert_same_run, checkpoint_of, flags, lines_of, without
from struck_runs import ENVIRON, PROGRAM

from needle.checkpoint import Checkpoint, list_checkpoints
from needle.data import DataError, Prefetch
from needle.training import log as logs
from needle.training import run as run_parts

pytestmark = pytest.mark.slow


@pytest.fixture
def process(tmp_path, tokens):
    """process(name, *flags) -> a small run of 20,000 steps as a process, and its output, one pipe,
    after its first step."""
    started = []

    def begin(name, *more):
        argv = flags(tmp_path, tokens, name, "--eval-every 0", *more, steps=20_000)
        one = subprocess.Popen(
            [sys.executable, "-u", PROGRAM, *argv],
            env=os.environ | ENVIRON | {"NEEDLE_CACHE": str(tmp_path / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        started.append(one)
        next((line for line in one.stdout if line.startswith("step ")), None)
        return one

    yield begin
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


def folder_of(tmp_path, name):
    return tmp_path / "runs" / name / "checkpoints"


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- damaged and missing checkpoints ------------------------------------------------------------


def test_new_checkpoints_survive_damaged_ones_of_later_steps(tmp_path, run, monkeypatch):
    """A recipe keeps step 4 for good, and 5 and 6 are damaged. The run that goes on from 4 keeps
    what it writes, though its first has a lower number than the damaged."""
    more = "--save-every 1 --recipe pythia --global-batch-size 2"
    assert run("whole", more) == 0 and run("a", more) == 0
    for step in (5, 6):
        damage(checkpoint_of(tmp_path, "a", step))
    seen, prune = [], run_parts.prune_checkpoints

    def pruned(*args, **options):
        prune(*args, **options)
        seen.append({path.name for path in list_checkpoints(folder_of(tmp_path, "a"))})

    monkeypatch.setattr(run_parts, "prune_checkpoints", pruned)
    assert run("a", "--resume", "auto") == 0
    assert "step_5.safetensors" in seen[0]
    assert_same_run(tmp_path, "a", "whole")


def test_pruning_counts_whole_files_and_never_the_one_just_written(tmp_path, run):
    assert run("a", "--save-every", "0") == 0
    whole = checkpoint_of(tmp_path, "a", 6).read_bytes()
    for step in (1, 2, 3, 4, 8, 9):
        checkpoint_of(tmp_path, "a", step).write_bytes(whole)
    for step in (4, 8):
        damage(checkpoint_of(tmp_path, "a", step))
    run_parts.prune_checkpoints(folder_of(tmp_path, "a"), 6)
    names = [int(path.stem[5:]) for path in list_checkpoints(folder_of(tmp_path, "a"))]
    assert names == [9, 8, 6, 4, 3]  # 6 and 3 are whole; 4 stands between them


def test_auto_does_not_begin_anew_over_unreadable_checkpoints(tmp_path, run, capsys, monkeypatch):
    assert run("a") == 0
    folder = folder_of(tmp_path, "a")
    newest, listdir = list_checkpoints(folder)[0], os.listdir

    def refusing(function, victim):
        def call(path, *args, **options):
            if str(path) == str(victim):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return function(path, *args, **options)

        return call

    before = {path: path.read_bytes() for path in list_checkpoints(folder)}
    for victim in newest, folder:
        with naming(victim), monkeypatch.context() as patch:
            patch.setattr(os, "listdir", refusing(listdir, victim))
            patch.setattr("needle.files.open", refusing(open, victim), raising=False)
            assert run("a", "--resume", "auto") == 1
            err = capsys.readouterr().err
            assert f"{victim}: cannot be" in err and os.strerror(errno.EIO) in err
    assert {path: path.read_bytes() for path in list_checkpoints(folder)} == before
    for path in before:
        damage(path)
    before = {path: path.read_bytes() for path in before}
    assert run("a", "--resume", "auto") == 1
    assert "none of its checkpoints is whole; nothing is overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in list_checkpoints(folder)} == before


def test_run_that_saved_does_not_begin_anew(tmp_path, run, capsys):
    """Its checkpoints were deleted, or their folder too, and its metrics and its name are left."""
    assert run("tiny", "--steps", "1") == 0
    folder = tmp_path / "runs" / "tiny"
    before = (folder / "metrics.jsonl").read_bytes()
    named = flags(tmp_path, tmp_path / "tokens.npy", "tiny", "--resume", "auto")
    unnamed = without(named, "--name")
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    for gone in "files", "folder", "config":
        if gone == "folder":
            (folder / "checkpoints").rmdir()
        if gone == "config":
            (folder / "config.json").unlink()
        for begin in lambda: run("tiny", "--resume", "auto"), lambda: train_pythia.main(unnamed):
            assert begin() == 1, gone
            out, error = capsys.readouterr()
            assert f"{folder / 'checkpoints'}: no checkpoint is left there" in error
            assert f"another --name, or remove {folder}" in error
            assert "starting from the beginning" not in out
            assert (folder / "metrics.jsonl").read_bytes() == before
    (folder_of(tmp_path, "b")).mkdir(parents=True)
    (folder_of(tmp_path, "b") / ".step_2.safetensors.7-00000000.tmp").write_text("x")
    assert run("b", "--resume", "auto") == 0  # it never saved
    assert "starting from the beginning" in capsys.readouterr().out
    assert not list((folder_of(tmp_path, "b")).glob(".*"))


# ---- processes ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("heeds_hangup")
def test_signal_or_closed_pipe_saves_the_last_step(tmp_path, process, run, capsys):
    """Meanwhile another process is refused."""
    ends = [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, "pipe"]
    children = [process(f"a{end}", "--save-every 0 --grad-accum 3") for end in ends]
    assert run(f"a{signal.SIGINT}", "--resume", "auto") == 1
    said = capsys.readouterr().err
    assert f"process {children[2].pid} on" in said and "is working in this folder" in said
    for end, child in zip(ends, children):
        with naming(end):
            if end != "pipe":
                child.send_signal(end)
                out, _ = child.communicate(timeout=60)
            child.stdout.close()
            assert child.wait(60) == 0
            lines = lines_of(tmp_path, f"a{end}")
            [saved] = list_checkpoints(folder_of(tmp_path, f"a{end}"))
            assert Checkpoint(saved).state["step"] == len(lines) == lines[-1]["step"] >= 1
            if end == "pipe":
                continue
            assert f"stopped by {end.name} after step {len(lines)} of 20000, and saved" in out
            command = out.splitlines()[-1]
            started = "needle train" if shutil.which("needle") else str(Path(sys.executable).parent)
            assert started in command and f"--resume auto --name a{end}" in command
            assert command.endswith(" --device cpu")


# ---- refusals of the system ---------------------------------------------------------------------


def test_data_that_break_off_cost_no_finished_step(tmp_path, run, monkeypatch, capsys):
    """Data fail at micro-batch 4 (mid-step) and 7 (step start)."""
    more, real = "--grad-accum 2 --save-every 0", Prefetch.next
    assert run("whole", more) == 0
    for failing in 4, 7:
        taken, name = [], f"a{failing}"

        def broken(self, taken=taken, failing=failing):
            taken.append(1)
            if len(taken) == failing:
                raise DataError("tokens.npy: shrank while it was read")
            return real(self)

        with monkeypatch.context() as patch:
            patch.setattr(Prefetch, "next", broken)
            assert run(name, more) == 1
        err = capsys.readouterr().err
        assert "tokens.npy: shrank while it was read" in err
        assert f"after step {(failing - 1) // 2} of 6" in err
        assert run(name, more, "--resume auto") == 0
        assert_same_run(tmp_path, name, "whole")


class RefusedOnce:
    """metrics.jsonl, of which one write is refused."""

    def __init__(self, file, at):
        self.file, self.left = file, at

    def flush(self):
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.flush()

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_refused_line_of_metrics_costs_nothing(tmp_path, run, monkeypatch, capsys):
    """The checkpoint is then that of the last step whose line is written."""
    real = logs.RunLog.__init__
    for evaluates in 0, 1:
        more = f"--save-every 0 --eval-every {evaluates}"
        assert run(f"whole{evaluates}", more) == 0
        assert "val_loss" in lines_of(tmp_path, f"whole{evaluates}")[-1]
        for at in 1, 5:
            name = f"a{at}{evaluates}"

            def refusing(self, *args, at=at):
                real(self, *args)
                self._file = RefusedOnce(self._file, at)

            with naming(name), monkeypatch.context() as patch:
                patch.setattr(logs.RunLog, "__init__", refusing)
                assert run(name, more) == 1
            err = capsys.readouterr().err
            assert "metrics.jsonl" in err and "and saved" in err
            assert run(name, more, "--resume auto") == 0
            assert_same_run(tmp_path, name, f"whole{evaluates}")


def test_lack_of_memory_or_disk_is_said_and_the_run_goes_on(tmp_path, run, monkeypatch, capsys):
    assert run("whole") == 0
    taken, real = [], train_pythia.forward_backward

    def short(*args):
        taken.append(1)
        if len(taken) == 4:
            raise MemoryError("allocate: the system refused 1 bytes")
        return real(*args)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(train_pythia, "forward_backward", short)
        assert run("a") == 1
        err = capsys.readouterr().err
        assert "allocate: the system refused 1 bytes" in err and "--batch-size" in err
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert run("a", "--resume", "auto") == 1
        assert "No space left on device" in capsys.readouterr().err
    assert run("a", "--resume", "auto") == 0
    assert_same_run(tmp_path, "a", "whole")
