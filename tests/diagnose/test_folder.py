"""A run's folder: who works there, which files are whole or damaged, how to go on. Nothing in it
changes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from harness import naming

import needle as ndl
from needle import nn, optim
from needle.checkpoint import CheckpointError, checkpoint_path
from needle.diagnose import folder
from needle.files import Lock

HOST = os.uname().nodename
GONE = 2**22 + 1  # no process has this number


@pytest.fixture
def run(tmp_path):
    """The folder of a run that stopped after step 6 of 9."""
    path = tmp_path / "runs" / "a"
    for step in (3, 6):
        model = nn.Linear(3, 4)
        file = checkpoint_path(path / "checkpoints", step)
        ndl.save(model, optim.Adam(model.parameters()), file, step=step, loss=2.5)
    (path / "config.json").write_text(json.dumps({"settings": {"steps": 9}}))
    lines = [{"step": n, "loss": 3.5, "tokens_per_second": 10.0, "seconds": n} for n in (5, 6)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def look(run, heard):
    """look() -> the findings by check; the folder is as it was."""

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


def test_stopped_run_is_described_and_goes_on(run, look, heard):
    (run / "lock").write_text(f"process {GONE} on {HOST}\n")
    found = look()
    assert [f for f in heard.findings if f.level != "ok"] == []
    assert "has ended" in found["lock"].text and f"process {GONE} on {HOST}" in found["lock"].text
    assert "step_6.safetensors, step 6, loss 2.5" in found["checkpoint"].text
    assert "step 6, loss 3.5, tokens_per_second 10.0" in found["metrics"].text
    assert "GiB are free" in found["space"].text
    go_on = f" --resume auto --name a --out {run.parent}"
    assert go_on in found["go on"].text and heard.facts["checkpoint"]["step"] == 6
    (run / "config.json").write_text(json.dumps({"settings": {"steps": 6}}))
    assert look()["go on"].text == "all 6 steps are done"


def test_new_run_lacks_checkpoints_and_metrics_without_failure(tmp_path, heard):
    (tmp_path / "checkpoints").mkdir()
    folder.examine(heard, str(tmp_path))
    assert not heard.levels()["failed"]
    said = " ".join(heard.levels()["note"] + heard.levels()["ok"])
    assert "no checkpoint yet" in said and "no metrics.jsonl yet" in said and "to go on: " in said


def test_folder_that_is_no_run_or_unreadable_fails(tmp_path, heard, monkeypatch):
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


# ---- the lock -----------------------------------------------------------------------------------


def test_lock_of_a_process_at_work(run, look, heard):
    lock = Lock(run)
    found = look()
    assert found["lock"].level == "ok"
    assert f"process {os.getpid()} on {HOST} works in it" in found["lock"].text
    assert "at work" in found["go on"].text
    os.utime(run / "metrics.jsonl", (time.time() - 4000,) * 2)
    look()
    assert any("written no step for 20 times" in f.text for f in heard.findings)
    (run / "lock").write_text("process 7 on elsewhere\n")
    assert "process 7 on elsewhere works in it" in look()["lock"].text
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stopped:
        (run / "lock").write_text(f"process {stopped.pid} on {HOST}\n")
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        assert "but is stopped" in look()["lock"].text
        stopped.kill()
    lock.release()
    (run / "lock").write_text(f"process {os.getpid()} on {HOST}\n")
    assert "no process works in it" in look()["lock"].text


def test_lock_that_outlives_its_process_names_the_holder(run, look):
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
    child = int(parent.stdout.readline())
    try:
        parent.wait()
        finding = look()["lock"]
        assert finding.has_failed and f"process {parent.pid} on {HOST} is gone" in finding.text
        assert f"process {child}" in finding.text and f"kill {child}" in finding.remedy
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


# ---- files --------------------------------------------------------------------------------------


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoints_are_named_and_the_newest_whole_one_goes_on(run, look, heard):
    newest, older = (checkpoint_path(run / "checkpoints", step) for step in (6, 3))
    flip(newest)
    look()
    (failure,) = [f for f in heard.findings if f.has_failed]
    assert "step_6.safetensors: altered: its checksum" in failure.text
    assert "goes on from an older one" in failure.remedy
    assert heard.facts["checkpoint"]["step"] == 3 and heard.facts["damaged"] == [str(newest)]
    flip(older)
    found = look()
    assert "none of the checkpoints is whole" in found["checkpoints"].text
    assert "--name" in found["checkpoints"].remedy and "go on" not in found
    flip(newest)  # whole again: with --full the older one is read too
    assert not [f for f in look().values() if f.has_failed]
    heard.is_full = True
    flip(older)
    assert not [f for f in look().values() if f.has_failed]
    assert heard.facts["checkpoint"]["step"] == 6
    flip(older)
    look()
    assert [f.what for f in heard.findings if f.has_failed] == ["checkpoint"]
    assert heard.facts["checkpoint"]["step"] == 6


def test_large_checkpoints_are_left_to_full(look, monkeypatch):
    monkeypatch.setattr(folder, "CHECKED", {False: 10, True: 1 << 40})
    found = look()
    left = found["checkpoints"]
    assert left.level == "note" and "step_6.safetensors" in left.text and "--full" in left.text
    assert "checkpoint" not in found


def test_checkpoint_that_may_not_be_read_is_in_the_way(look, heard, monkeypatch):
    """--resume auto takes no older one, whose steps would be written over it."""

    def refuse(path, real=folder.Checkpoint):
        if path.name == "step_6.safetensors":
            raise CheckpointError(f"{path}: Permission denied") from PermissionError(13, "no")
        return real(path)

    monkeypatch.setattr(folder, "Checkpoint", refuse)
    assert "go on" not in look()
    (failure,) = [f for f in heard.findings if f.has_failed]
    assert "move it away to go on from an older one" in failure.remedy


def test_run_without_a_checkpoint_begins_anew_unless_it_had_one(run, look):
    """--resume auto does the same (needle/training/folder.py)."""
    shutil.rmtree(run / "checkpoints")
    gone = "no checkpoint is left of this run, which came to step 6"
    for config, is_held, has_failed, said, goes_on in (
        ({"saved": True}, False, True, gone, False),
        ({"saved": True}, True, True, gone, True),
        ({}, False, True, gone, False),  # where it is not known
        ({"saved": False}, False, True, "the run ended at step 6 before its first", True),
        ({"saved": False}, True, False, "there is no checkpoint yet", True),
    ):
        with naming(config, is_held):
            (run / "config.json").write_text(json.dumps({"settings": {"steps": 9}, **config}))
            lock = Lock(run) if is_held else None
            found = look()
            assert found["checkpoints"].has_failed == has_failed
            assert said in found["checkpoints"].text
            assert bool(found["checkpoints"].remedy) == has_failed
            assert ("go on" in found) == goes_on
            if lock:
                lock.release()


def test_space_that_is_lacking_is_a_failure(run, look, monkeypatch):
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


def test_faults_are_listed_and_damaged_lines_left_out(run, look, heard):
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


def test_files_that_are_fifos_or_damaged_are_named_and_not_waited_for(run, look):
    for text in (b"{garbage", b"\xff\xfe", b"[]", b'{"settings": 3}', b"[" * 99999):
        with naming(text[:20]):
            (run / "config.json").write_bytes(text)
            found = look()
            assert found["config"].has_failed and "config.json: " in found["config"].text
            assert "move it away" in found["config"].remedy
            assert "from step 6: " in found["go on"].text
    for name in ("lock", "metrics.jsonl", "faults.jsonl", "config.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    found = look()
    for what in ("lock", "config", "metrics", "faults"):
        assert "it is a FIFO, not a regular file" in found[what].text
    assert "to go on from step 6" in found["go on"].text


def test_names_that_look_like_flags_go_on(run, heard):
    for name, words in (("-y", " --resume auto --name=-y --out "), (".old", " --resume /")):
        heard.findings.clear()
        run = run.rename(run.parent / name)
        folder.examine(heard, str(run))
        (said,) = [f.text for f in heard.findings if f.what == "go on"]
        assert words in said
