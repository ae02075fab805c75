"""A run's folder: the process there, the newest whole checkpoint, the command that goes on."""

import json
import os

import pytest

import needle as ndl
from needle import nn, optim
from needle.checkpoint import checkpoint_path
from needle.diagnose import folder
from needle.files import Lock


def save(run, step: int) -> None:
    model, path = nn.Linear(3, 4), checkpoint_path(run / "checkpoints", step)
    state = {"step": step, "loss": 2.5, "settings": {"steps": 9}}
    ndl.save(model, optim.Adam(model.parameters()), path, **state)


@pytest.fixture
def run(tmp_path):
    """The folder of a run that stopped after step 6 of 9."""
    path = tmp_path / "runs" / "a"
    save(path, 3)
    save(path, 6)
    (path / "config.json").write_text(json.dumps({"settings": {"steps": 9}, "saved": True}))
    return path


@pytest.fixture
def look(run, capsys):
    """look() -> the lines about the folder, which is as it was."""

    def state():
        return [(p, p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(run.rglob("*"))]

    def examine() -> str:
        before = state()
        folder.examine(str(run))
        assert state() == before
        return capsys.readouterr().out

    return examine


def test_stopped_run_goes_on_from_its_newest_checkpoint(run, look):
    lines = '{"step": 5}', '{"step": 6, "\x1b[31m": 3.5}', '{"step": 6, "digest": "0"}'
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "faults.jsonl").write_text('{"step": 4, "op": "gelu"}\n')
    said = look()
    assert "FAILED" not in said and f"ok: no process works in {run}\n" in said
    assert 'ok: the last line of metrics.jsonl: {"step": 6, "\\x1b[31m": 3.5}\n' in said
    assert 'the last line of faults.jsonl: {"step": 4, "op": "gelu"}\n' in said
    assert "the newest whole checkpoint: step_6.safetensors, step 6, loss 2.5000\n" in said
    assert "to go on from step 6: " in said
    assert said.endswith(f" --resume auto --name a --out {run.parent}\n")


def test_run_that_is_at_work_or_done_is_not_resumed(run, look):
    (run / "metrics.jsonl").touch()  # of a run that has just begun
    (run / "faults.jsonl").write_bytes(b'{"op": "\xff' + b"x" * 400)
    lock = Lock(run)
    said = look()
    assert f"ok: process {os.getpid()} on {os.uname().nodename} works in {run}\n" in said
    assert f'the last line of faults.jsonl: {{"op": "\ufffd{"x" * 291}\n' in said  # 300 characters
    assert "it is at work; SIGTERM" in said and "--resume" not in said
    lock.release()
    save(run, 9)
    said = look()
    assert "no process works" in said and said.endswith("ok: all 9 steps are done\n")


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoints_are_named_and_an_older_one_goes_on(run, look):
    newest, older = (checkpoint_path(run / "checkpoints", step) for step in (6, 3))
    flip(newest)
    said = look()
    assert f"run            FAILED: skipped: {newest}: altered: its checksum" in said
    assert "step_3.safetensors, step 3" in said and "to go on from step 3: " in said
    flip(older)
    said = look()
    assert said.count("FAILED") == 3 and "none of its checkpoints is whole" in said
    assert "--name" in said and "--resume auto" not in said


def test_run_without_a_checkpoint_begins_anew_unless_it_had_one(run, look):
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    said = look()
    assert "FAILED: none of the checkpoints that it saved is left" in said
    assert "another --name" in said and "--resume auto" not in said
    (run / "config.json").write_text('{"saved": false}')
    said = look()
    assert "FAILED" not in said and "to go on from step 0: " in said and "--resume auto" in said
