"""No run loses what it has saved, nor more than the steps since: damage, refusals of the system, two
processes, signals, a reader that goes away, data that break off."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from harness import ROOT

from needle.checkpoint import Checkpoint, checkpoint_path, list_checkpoints
from needle.data import DataError, Prefetch

APPS = ROOT / "apps"
sys.path.insert(0, str(APPS))

import run_log  # noqa: E402
import train_pythia  # noqa: E402

OWNER_IS_ROOT = os.geteuid() == 0


@pytest.fixture
def small(small_runs):
    """A run of the tiny preset made smaller: small(name, *flags) -> exit code."""
    return small_runs


def arrays_of(path) -> list[bytes]:
    model, optimizer, _, _ = Checkpoint(path).restore()
    state = optimizer.state_dict()["arrays"]
    return [x.numpy().tobytes() for x in (*model.parameters(), *state.values())]


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_new_checkpoints_survive_damaged_ones_of_later_steps(tmp_path, small):
    """A recipe keeps step 4 for good; 5 and 6 are damaged; the run that goes on from 4 keeps what it
    writes, though 5 and 6 have higher numbers than its first."""
    recipe = ("--recipe", "pythia", "--global-batch-size", "2")
    assert small("whole", "--save-every", "1", *recipe) == 0
    assert small("a", "--save-every", "1", *recipe) == 0
    folder = tmp_path / "runs" / "a" / "checkpoints"
    for step in (5, 6):
        damage(checkpoint_path(folder, step))
    seen = []
    prune = train_pythia.prune_checkpoints

    def pruned(*args, **options):
        prune(*args, **options)
        seen.append({path.name for path in list_checkpoints(folder)})

    train_pythia.prune_checkpoints = pruned
    try:
        assert small("a", "--resume", "auto") == 0
    finally:
        train_pythia.prune_checkpoints = prune
    assert all("step_5.safetensors" in names for names in seen[:1])
    assert arrays_of(checkpoint_path(folder, 6)) == arrays_of(
        checkpoint_path(tmp_path / "runs" / "whole" / "checkpoints", 6)
    )


def test_pruning_counts_whole_files_and_never_the_one_just_written(tmp_path, small):
    assert small("a", "--save-every", "0") == 0
    folder = tmp_path / "runs" / "a" / "checkpoints"
    whole = checkpoint_path(folder, 6).read_bytes()
    for step in (1, 2, 3, 4, 8, 9):
        checkpoint_path(folder, step).write_bytes(whole)
    for step in (4, 8, 9):
        damage(checkpoint_path(folder, step))
    train_pythia.prune_checkpoints(folder, 6)
    names = [int(path.stem[5:]) for path in list_checkpoints(folder)]
    assert names == [9, 8, 6, 4, 3]  # 6 and 3 are whole; 4 stands between them


def test_auto_does_not_begin_anew_over_damage(tmp_path, small, capsys):
    assert small("a") == 0
    folder = tmp_path / "runs" / "a" / "checkpoints"
    for path in list_checkpoints(folder):
        damage(path)
    before = {path: path.read_bytes() for path in list_checkpoints(folder)}
    assert small("a", "--resume", "auto") == 1
    assert "none of its checkpoints is whole; nothing is overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in list_checkpoints(folder)} == before


@pytest.mark.parametrize("what", ["file", "folder", "error"])
def test_auto_does_not_begin_anew_over_what_the_system_refuses(
    tmp_path, small, capsys, monkeypatch, what
):
    assert small("a") == 0
    folder = tmp_path / "runs" / "a" / "checkpoints"
    newest = list_checkpoints(folder)[0]
    if what == "error" or OWNER_IS_ROOT:  # permissions do not stop root
        number = 5 if what == "error" else 13
        victim = folder if what == "folder" else newest
        listdir, opener = os.listdir, open

        def refuse(function):
            def call(path, *args, **options):
                if str(path) == str(victim):
                    raise OSError(number, os.strerror(number), str(path))
                return function(path, *args, **options)

            return call

        monkeypatch.setattr(os, "listdir", refuse(listdir))
        monkeypatch.setattr("needle.files.open", refuse(opener), raising=False)
    else:
        (newest if what == "file" else folder).chmod(0)
    before = sorted(os.scandir(tmp_path / "runs" / "a"), key=lambda e: e.name)
    code, err = small("a", "--resume", "auto"), capsys.readouterr().err
    monkeypatch.undo()
    folder.chmod(0o755)
    newest.chmod(0o644)
    assert code == 1
    assert str(folder if what == "folder" else newest) in err and "cannot be" in err
    assert [e.name for e in before] == sorted(os.listdir(tmp_path / "runs" / "a"))
    assert Checkpoint(newest).state["step"] == 6


def test_a_run_that_never_saved_begins_anew(tmp_path, small, capsys):
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "checkpoints" / ".step_2.safetensors.7-00000000.tmp").write_text("x")
    assert small("a", "--resume", "auto") == 0
    assert "starting from the beginning" in capsys.readouterr().out
    assert not list((tmp_path / "runs" / "a" / "checkpoints").glob(".*"))


def test_two_processes_on_one_run(tmp_path, process):
    first = process("a", "--steps", "100000")
    assert any(line.startswith("step ") for line in first.stdout)
    second = process("a", "--resume", "auto", "--steps", "100000")
    out, _ = second.communicate()
    assert second.returncode == 1
    assert f"process {first.pid} on" in out and "is working in this folder" in out
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert first.returncode == 0


def test_a_taken_name_is_told_before_the_text_is_read(tmp_path, small, monkeypatch, capsys):
    assert small("a") == 0
    monkeypatch.setattr(train_pythia, "run_data", None)
    assert small("a") == 1
    assert "there is a run of this name already" in capsys.readouterr().err


def go_on(command: str, tmp_path) -> None:
    """Runs the command that was printed, as pasted."""
    env = {**os.environ, "NEEDLE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(shlex.split(command), env=env, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_signals_save_the_last_step(tmp_path, process, number):
    run = process("a", "--save-every", "0", "--steps", "100000")
    for line in run.stdout:
        if line.startswith("step "):
            break
    run.send_signal(number)
    out, _ = run.communicate()
    assert run.returncode == 0 and f"stopped by {number.name} after step" in out
    step = int(out.split("after step ")[1].split()[0])
    [saved] = list_checkpoints(tmp_path / "runs" / "a" / "checkpoints")
    assert Checkpoint(saved).state["step"] == step >= 1
    assert f"{sys.executable} " in out.splitlines()[-1]


def test_an_ignored_hangup_stays_ignored(process):
    run = process("a", "--steps", "100000", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    lines = iter(run.stdout)
    assert any(line.startswith("step ") for line in lines)
    run.send_signal(signal.SIGHUP)
    assert any(line.startswith("step ") for line in lines)
    run.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in run.communicate()[0]


def test_a_closed_pipe_saves_the_last_step(tmp_path, process):
    run = process("a", "--save-every", "0", "--steps", "100000")
    for line in run.stdout:
        if line.startswith("step "):
            break
    run.stdout.close()
    assert run.wait(60) == 0
    [saved] = list_checkpoints(tmp_path / "runs" / "a" / "checkpoints")
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    assert Checkpoint(saved).state["step"] == len(lines) == json.loads(lines[-1])["step"] >= 1


@pytest.mark.parametrize("failing", [4, 7])
def test_data_that_break_off_cost_no_finished_step(tmp_path, small, monkeypatch, capsys, failing):
    """The 4th and the 7th of two micro-batches a step: within a step, and before one."""
    accumulated = ("--grad-accum", "2", "--save-every", "0")
    assert small("whole", *accumulated) == 0
    taken, real = [], Prefetch.next

    def broken(self):
        taken.append(1)
        if len(taken) == failing:
            raise DataError("tokens.npy: shrank while it was read")
        return real(self)

    monkeypatch.setattr(Prefetch, "next", broken)
    assert small("a", *accumulated) == 1
    monkeypatch.undo()
    done = (failing - 1) // 2
    err = capsys.readouterr().err
    assert "tokens.npy: shrank while it was read" in err and f"after step {done} of 6" in err
    assert small("a", "--resume", "auto") == 0
    assert arrays_of(checkpoint_path(tmp_path / "runs" / "a" / "checkpoints", 6)) == arrays_of(
        checkpoint_path(tmp_path / "runs" / "whole" / "checkpoints", 6)
    )


@pytest.mark.parametrize(
    "bad",
    [b"{half", b"\xff\xfe", b"[]", b"3", b'{"step": "x"}', b"null", b'{"loss": 1}', b"[" * 9999],
)
def test_a_damaged_line_of_metrics_cuts_nothing(tmp_path, small, bad):
    assert small("a", "--save-every", "2") == 0
    path = tmp_path / "runs" / "a" / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], bad, *lines[1:], b""]))
    checkpoint_path(tmp_path / "runs" / "a" / "checkpoints", 6).unlink()
    assert small("a", "--resume", "auto") == 0
    steps = [line["step"] for line in run_log.read_lines(path)]
    assert steps == [1, 2, 3, 4, 5, 6] and len(path.read_bytes().splitlines()) == 6
