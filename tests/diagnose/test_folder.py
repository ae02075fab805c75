"""A run's folder: who works there, what is whole, what is damaged, how to go on; and nothing in it
changes."""

import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import needle as ndl
from needle import nn, optim
from needle.checkpoint import CheckpointError, checkpoint_path
from needle.diagnose import folder
from needle.files import Lock

HOST = os.uname().nodename
GONE = 2**22 + 1  # no process has this number


def save(path, step: int) -> None:
    model = nn.Linear(3, 4)
    ndl.save(model, optim.Adam(model.parameters()), path, step=step, loss=2.5)


@pytest.fixture
def run(tmp_path):
    """The folder of a run that stopped after step 6 of 9."""
    path = tmp_path / "runs" / "a"
    for step in (3, 6):
        save(checkpoint_path(path / "checkpoints", step), step)
    (path / "config.json").write_text(json.dumps({"settings": {"steps": 9}}))
    lines = [{"step": n, "loss": 3.5, "tokens_per_second": 10.0, "seconds": n} for n in (5, 6)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def look(run, heard):
    """look() -> the findings by what they are about; the folder is as it was."""

    def examine():
        def state():
            found = sorted(run.rglob("*"))
            return [(p, p.stat().st_mtime_ns, p.stat().st_size) for p in found]

        before = state()
        heard.findings.clear()
        folder.examine(heard, str(run))
        assert state() == before
        return {f.what: f for f in heard.findings}

    return examine


def test_a_run_that_stopped(run, look, heard):
    (run / "lock").write_text(f"process {GONE} on {HOST}\n")
    found = look()
    assert [f for f in heard.findings if f.level != "ok"] == []
    assert "stale" in found["lock"].text and f"process {GONE} on {HOST}" in found["lock"].text
    assert "step_6.safetensors, step 6, loss 2.5" in found["checkpoint"].text
    assert "step 6, loss 3.5, tokens_per_second 10.0" in found["metrics"].text
    assert "GiB are free" in found["space"].text
    assert "--resume auto --name a --out " in found["go on"].text
    assert "from step 6: python apps/train_pythia.py" in found["go on"].text
    assert str(run.parent) in found["go on"].text and heard.facts["checkpoint"]["step"] == 6


def test_the_lock_of_a_process_that_works(run, look, heard):
    lock = Lock(run)
    found = look()
    assert found["lock"].level == "ok" and f"process {os.getpid()} on {HOST} works" in (
        found["lock"].text
    )
    assert "at work" in found["go on"].text
    os.utime(run / "metrics.jsonl", (time.time() - 4000,) * 2)
    look()
    assert any("written no step for 20 times" in f.text for f in heard.findings)
    lock.release()
    assert "nobody works in it" in look()["lock"].text


def test_a_lock_that_outlives_its_process_names_who_holds_it(run, look):
    """A child that inherited it: the training was killed, and what it forked was not."""
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom needle.files import Lock\n"
        "lock = Lock(Path(sys.argv[1]))\n"
        "os.set_inheritable(lock._file, True)\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
        "os._exit(0)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, run], stdout=subprocess.PIPE, text=True
    )
    try:
        child = int(parent.stdout.readline())
        parent.wait()
        finding = look()["lock"]
        assert finding.has_failed and f"process {parent.pid} on {HOST} is gone" in finding.text
        assert f"process {child}" in finding.text and f"kill {child}" in finding.remedy
    finally:
        os.kill(child, 9)
        parent.stdout.close()


def test_a_lock_of_another_host_is_believed(run, look):
    lock = Lock(run)
    (run / "lock").write_text("process 7 on elsewhere\n")
    assert "process 7 on elsewhere works in it" in look()["lock"].text
    lock.release()


def test_a_process_that_is_stopped_is_told(run, look):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        lock = Lock(run)
        (run / "lock").write_text(f"process {parent.pid} on {HOST}\n")
        os.kill(parent.pid, 19)
        os.waitid(os.P_PID, parent.pid, os.WSTOPPED | os.WNOWAIT)
        assert "but is stopped" in look()["lock"].text
        lock.release()
    finally:
        parent.kill()
        parent.wait()


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint(run, look, heard):
    newest = checkpoint_path(run / "checkpoints", 6)
    flip(newest)
    look()
    (failure,) = [f for f in heard.findings if f.has_failed]
    assert "step_6.safetensors: altered: its checksum" in failure.text
    assert "goes on from an older one" in failure.remedy
    assert heard.facts["checkpoint"]["step"] == 3 and heard.facts["damaged"] == [str(newest)]
    flip(checkpoint_path(run / "checkpoints", 3))
    found = look()
    assert "none of the checkpoints is whole" in found["checkpoints"].text
    assert "--name" in found["checkpoints"].remedy and "go on" not in found


def test_with_full_the_older_ones_are_read_too(run, look, heard):
    heard.is_full = True
    look()
    assert heard.facts["checkpoint"]["step"] == 6 and not heard.levels()["failed"]
    heard.is_full = False
    flip(checkpoint_path(run / "checkpoints", 3))
    assert not [f for f in (look(), heard.findings)[1] if f.has_failed]
    heard.is_full = True
    look()
    assert [f.what for f in heard.findings if f.has_failed] == ["checkpoint"]


def test_large_checkpoints_are_left_to_full(run, look, monkeypatch):
    monkeypatch.setattr(folder, "CHECKED", {False: 10, True: 1 << 40})
    found = look()
    assert found["checkpoints"].level == "note" and "step_6.safetensors" in (
        found["checkpoints"].text
    )
    assert "--full" in found["checkpoints"].text and "checkpoint" not in found


def test_a_folder_that_cannot_be_read(tmp_path, heard, monkeypatch):
    folder.examine(heard, str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    folder.examine(heard, str(tmp_path / "empty"))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder.os, "listdir", refuse)
    folder.examine(heard, str(tmp_path))
    assert [f.has_failed for f in heard.findings] == [True] * 3
    missing, other, refused = (f.text for f in heard.findings)
    assert "No such file" in missing and "not the folder of a run" in other
    assert "Permission denied" in refused


def test_a_full_disk(run, look, monkeypatch):
    asked = os.statvfs(run)
    names = [name for name in dir(asked) if name.startswith("f_")]
    disk = SimpleNamespace(**{name: getattr(asked, name) for name in names})
    monkeypatch.setattr(folder.os, "statvfs", lambda path: disk)
    disk.f_bavail = 1
    finding = look()["space"]
    assert finding.has_failed and "the next checkpoint needs 0.1 GiB" in finding.text
    disk.f_bavail, disk.f_files, disk.f_favail = asked.f_blocks, 1000, 0
    assert "no more files (inodes)" in look()["space"].text
    disk.f_flag = os.ST_RDONLY
    assert "cannot be written to" in look()["space"].text


def test_faults_and_damaged_lines(run, look, heard):
    fault = {"time": "2026-11-21T10:00:00", "exit": 75, "op": "gelu", "message": "lost"}
    lines = [json.dumps(fault | {"step": n, "action": "restart"}) for n in range(4)]
    gone = {"GPU-5c": "computed wrong", "GPU-7d": "failed its health check: no answer"}
    lines.append(json.dumps(fault | {"step": 4, "action": "restart", "left_out": gone}))
    (run / "faults.jsonl").write_text("\n".join(lines) + '\n{"time": "20')
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    found = look()
    shown = [f.text for f in heard.findings if f.what == "fault"]
    assert len(shown) == 3 and "step 4, exit 75, op gelu, message lost, action restart" in shown[-1]
    more = "without GPU-5c, which computed wrong, without GPU-7d, which failed its health check: no"
    assert more in shown[-1] and "without" not in shown[0]
    assert "2 faults before" in found["faults"].text and len(heard.facts["faults"]) == 5
    assert "step 6" in found["metrics"].text


def test_fifos_are_named_and_not_waited_for(run, look, heard):
    for name in ("lock", "metrics.jsonl", "faults.jsonl", "config.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    found = look()
    for what in ("lock", "config", "metrics", "faults"):
        assert "it is a FIFO, not a regular file" in found[what].text
    assert "to go on from step 6" in found["go on"].text


def test_a_run_without_anything_yet(tmp_path, heard):
    (tmp_path / "checkpoints").mkdir()
    folder.examine(heard, str(tmp_path))
    assert not heard.levels()["failed"]
    said = " ".join(heard.levels()["note"] + heard.levels()["ok"])
    assert "no checkpoint yet" in said and "no metrics.jsonl yet" in said and "to go on: " in said


@pytest.mark.parametrize(
    "config, is_held, has_failed, said, goes_on",
    [
        (
            {"saved": True},
            False,
            True,
            "no checkpoint is left of this run, which came to step 6",
            0,
        ),
        ({"saved": True}, True, True, "no checkpoint is left of this run", 1),
        ({}, False, True, "no checkpoint is left of this run", 0),  # older ones do not say
        ({"saved": False}, False, True, "the run ended at step 6 before its first", 1),
        ({"saved": False}, True, False, "there is no checkpoint yet", 1),
    ],
)
def test_steps_without_a_checkpoint(run, look, config, is_held, has_failed, said, goes_on):
    """Where there has been one, --resume auto refuses to begin anew (needle/training/folder.py)."""
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").write_text(json.dumps({"settings": {"steps": 9}, **config}))
    lock = Lock(run) if is_held else None
    found = look()
    assert found["checkpoints"].has_failed == has_failed and said in found["checkpoints"].text
    assert bool(found["checkpoints"].remedy) == has_failed and ("go on" in found) == goes_on
    if lock:
        lock.release()


def test_a_checkpoint_that_may_not_be_read_is_in_the_way(look, heard, monkeypatch):
    """--resume auto takes no older one, whose steps would be written over it."""

    def refuse(path, real=folder.Checkpoint):
        if path.name == "step_6.safetensors":
            raise CheckpointError(f"{path}: Permission denied") from PermissionError(13, "no")
        return real(path)

    monkeypatch.setattr(folder, "Checkpoint", refuse)
    assert "go on" not in look()
    (failure,) = [f for f in heard.findings if f.has_failed]
    assert "move it away to go on from an older one" in failure.remedy


@pytest.mark.parametrize(
    "text", [b"{garbage", b"\xff\xfe", b"[]", b'{"settings": 3}', b"[" * 99999]
)
def test_a_description_that_is_damaged_is_named(run, look, text):
    (run / "config.json").write_bytes(text)
    found = look()
    assert found["config"].has_failed and "config.json: " in found["config"].text
    assert "move it away" in found["config"].remedy and "from step 6: " in found["go on"].text


@pytest.mark.parametrize(
    "name, words", [("-y", " --resume auto --name=-y --out "), (".old", " --resume /")]
)
def test_names_that_look_like_flags(run, heard, name, words):
    folder.examine(heard, str(run.rename(run.parent / name)))
    (said,) = [f.text for f in heard.findings if f.what == "go on"]
    assert words in said


def test_a_run_that_is_done(run, look):
    (run / "config.json").write_text(json.dumps({"settings": {"steps": 6}}))
    assert look()["go on"].text == "all 6 steps are done"


def test_the_random_state_is_left_alone(look):
    before = np.random.get_state()[1].copy()
    look()
    np.testing.assert_array_equal(np.random.get_state()[1], before)
