"""Trainings under needle/supervise.py: their messages to it, and how they go on. The faults are
those of tests/supervised_soak.py."""

import json
import os
import signal
import sys

import numpy as np
import pytest
import train_pythia
from harness import DEVICES, ROOT, wait_for
from small_runs import TOKENS, assert_same_run, flags, lines_of, without
from supervised_soak import command, compare, faults_of, start, supervised

import needle as ndl
from needle import supervise
from needle.training import folder as folders
from needle.training import session as sessions

pytestmark = pytest.mark.slow

HANG = 10.0  # seconds; a busy machine must do a step in that time


def text_of(process) -> str:
    out, err = process.communicate(timeout=300)
    return out + err


def wait_for_step(folder, name, step, process):
    path = folder / "runs" / name / "metrics.jsonl"

    def has_come():
        assert process.poll() is None, text_of(process)
        return path.exists() and path.read_text().count("\n") >= step

    wait_for(has_come, 120)


def pid_of(folder, name) -> int | None:
    """The process that holds the run's lock; None while the next one writes its own."""
    words = (folder / "runs" / name / "lock").read_text().split()
    return int(words[1]) if len(words) > 1 else None


# ---- faults, kills, hangs -----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_run_of_three_deaths_ends_as_one_of_none(tmp_path, device):
    """A fault, a kill within a save, and a hang."""
    plan = [(4, "middle", "fault"), (10, "save", "kill"), (13, "end", "stop")]
    whole = start(tmp_path, command(tmp_path, "whole", 20, device, []))
    hang = HANG if device == "cpu" else 2 * HANG
    struck = start(tmp_path, supervised(command(tmp_path, "struck", 20, device, plan), hang))
    assert whole.wait(300) == 0 and struck.wait(300) == 0, text_of(whole) + text_of(struck)
    compare(tmp_path, "struck", "whole", 20)
    first, second, third = faults_of(tmp_path, "struck")
    assert first["exit"] == 75 and "illegal memory access" in first["message"]
    assert second["signal"] == "SIGKILL" and third["signal"] in ("SIGABRT", "SIGKILL")
    assert third["message"].startswith("nothing finished for ")
    said = text_of(struck)
    assert "resuming" in said and "step_10.safetensors" in said
    assert "supervise: 3 failures, " in said.splitlines()[-1]
    text_of(whole)


@pytest.mark.parametrize("device", DEVICES)
def test_fault_that_comes_back_names_its_op_and_ends_the_run(tmp_path, device):
    plan = [(4, "middle", "fault")] * 3
    process = start(tmp_path, supervised(command(tmp_path, "a", 20, device, plan), 60))
    said = text_of(process)
    assert process.returncode == 75, said
    faults = faults_of(tmp_path, "a")
    steps = {4} if device == "cpu" else {3, 4}  # the host is ahead of the losses by one, or not
    assert len(faults) == 3 and {fault["step"] for fault in faults} <= steps
    assert [fault["op"] for fault in faults] == [None, "exp", "exp"]
    assert "ended: 3 failures at this step" in said and "The op is exp." in said


def test_supervise_flag_restarts_a_killed_run_under_its_name(tmp_path):
    """The run had no --name, and chose one beside an older run."""
    np.save(tmp_path / "tokens.npy", TOKENS)
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    argv = flags(tmp_path, tmp_path / "tokens.npy", "x", "--supervise", steps=100_000)
    program = [sys.executable, str(ROOT / "apps" / "train_pythia.py")]
    process = start(tmp_path, [*program, *without(argv, "--name")])
    wait_for_step(tmp_path, "tiny-2", 3, process)
    killed = pid_of(tmp_path, "tiny-2")
    assert killed != process.pid
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: pid_of(tmp_path, "tiny-2") not in (killed, None), 120)
    step = len(lines_of(tmp_path, "tiny-2"))
    wait_for_step(tmp_path, "tiny-2", step + 3, process)
    process.send_signal(signal.SIGTERM)
    said = text_of(process)
    assert process.returncode == 0, said
    assert "stopped by SIGTERM" in said and "--resume auto --name tiny-2" in said
    assert "--supervise" in said and "supervise: 1 failure, " in said
    [fault] = faults_of(tmp_path, "tiny-2")
    assert fault["signal"] == "SIGKILL" and fault["action"] == "restart"


@pytest.mark.parametrize("taken", [False, True])
def test_death_in_a_renamed_folder_leaves_the_new_run_of_its_name_alone(tmp_path, tokens, taken):
    process = start(tmp_path, supervised(command(tmp_path, "a", 100_000, "cpu", []), 60))
    wait_for_step(tmp_path, "a", 3, process)
    pid, folder = pid_of(tmp_path, "a"), tmp_path / "runs" / "a"
    os.kill(pid, signal.SIGSTOP)
    folder.rename(tmp_path / "runs" / "b")
    if taken:
        assert train_pythia.main(flags(tmp_path, tokens, "a", "--seed", "9")) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    os.kill(pid, signal.SIGKILL)
    said = text_of(process)
    assert process.returncode == 137, said
    assert f"ended: {folder} is " in said and "--resume with the new path continues it" in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert folder.exists() == taken and "faults.jsonl" not in said


# ---- messages -----------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path, monkeypatch):
    """told() -> the messages of trainings in this process."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv("NEEDLE_HEARTBEAT", str(path))
    yield lambda: [json.loads(line) for line in os.read(reader, 1 << 16).splitlines()]
    os.close(reader)


def test_run_reports_device_folder_steps_and_saves(tmp_path, tokens, told):
    """Opening the device is watched, reading data is not, and then each step, batch and save."""
    assert train_pythia.main(flags(tmp_path, tokens, "a", steps=4)) == 0
    folder = tmp_path / "runs" / "a"
    again = ["--resume", "auto", "--name", "a", "--out", str(tmp_path / "runs")]
    taken = {"run": str(folder), "resume": again, "watched": False}
    opened = [{}, {"device": "cpu", "watched": False}]
    facts = told()
    known = {"id": folders.read_description(folder)["id"], "watched": False}
    evaluated = [fact for fact in facts if fact == {}]
    assert [fact for fact in facts if fact] == [
        opened[1],
        taken,
        known,
        {"step": 0},
        {"step": 1},
        {"step": 2},
        {"saved": 2},
        {"step": 3},
        {"step": 4},
        {"saved": 4},
        {"watched": False},
    ]
    assert facts[0] == {} and facts[-1] == {} and len(evaluated) > 3
    assert train_pythia.main(flags(tmp_path, tokens, "a", "--resume", "auto", steps=4)) == 0
    assert told() == [taken, *opened, known]  # nothing is left to do


def test_fault_is_reported_and_the_resumed_run_reports_its_first_step(
    tmp_path, tokens, told, monkeypatch, capsys
):
    def lost(*_):
        raise ndl.CudaFatalError("attention_fwd: an illegal memory access\nthe context is lost")

    argv = flags(tmp_path, tokens, "a", "--eval-every", "0")
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "write_checkpoint", lost)
        assert train_pythia.main(argv) == os.EX_TEMPFAIL == 75
    assert "--resume auto" in capsys.readouterr().err
    assert told()[-2:] == [
        {"step": 2},
        {"fault": "attention_fwd: an illegal memory access\nthe context is lost"},
    ]
    assert train_pythia.main([*argv, "--resume", "auto"]) == 0
    steps = [fact["step"] for fact in told() if "step" in fact]
    assert steps == [0, 1, 2, 3, 4, 5, 6]


def test_losses_are_the_same_with_sync(tmp_path, tokens, told, monkeypatch):
    monkeypatch.setenv("NEEDLE_SYNC_UNTIL", "3")
    before = ndl._C.sync_each_op(True)
    try:
        assert train_pythia.main(flags(tmp_path, tokens, "a")) == 0
        assert ndl._C.sync_each_op(before) is False
    finally:
        ndl._C.sync_each_op(before)
    monkeypatch.delenv("NEEDLE_HEARTBEAT")
    assert train_pythia.main(flags(tmp_path, tokens, "b")) == 0
    assert_same_run(tmp_path, "a", "b")


# ---- the flags ----------------------------------------------------------------------------------


def test_supervise_flag_starts_a_supervisor(monkeypatch):
    started = []

    class Supervisor:
        def __init__(self, *arguments):
            started.append(arguments)

        def run(self):
            return 41

    monkeypatch.delenv("NEEDLE_HEARTBEAT", raising=False)
    monkeypatch.setattr(supervise, "Supervisor", Supervisor)
    program = [sys.executable, str(ROOT / "apps" / "train_pythia.py")]
    assert train_pythia.main(["--supervise", "--steps", "3"]) == 41
    argv = ["--supervise", "--hang-seconds", "7.5"]
    assert train_pythia.main(argv) == 41
    wanted = [([*program, "--supervise", "--steps", "3"], 300.0), ([*program, *argv], 7.5)]
    assert started == wanted
