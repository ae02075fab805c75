"""A run's folder: the process there, the newest whole checkpoint, the command that goes on. Ops
of a device are compared: the first wrong point is named, and whether it is wrong each time."""

import functools
import json
import os

import numpy as np
import pytest
from harness import flip_bit

import needle as ndl
from needle import _C, nn, optim
from needle.checkpoint import checkpoint_path
from needle.diagnose import device, folder
from needle.files import Lock
from needle.testing import CASES, OPS


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


def test_damaged_checkpoints_are_named_and_an_older_one_goes_on(run, look):
    newest, older = (checkpoint_path(run / "checkpoints", step) for step in (6, 3))
    flip_bit(newest)
    said = look()
    assert f"run            FAILED: skipped: {newest}: altered: its checksum" in said
    assert "step_3.safetensors, step 3" in said and "to go on from step 3: " in said
    flip_bit(older)
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


# ---- a device ------------------------------------------------------------------------------------


VIEWS = "contiguous", "transposed", "stepped", "reversed", "offset"


@pytest.fixture
def lines(capsys):
    """lines() -> those of a short sweep of the CPU, without those that say what is tried."""

    def sweep() -> list[str]:
        device.examine_ops(_C.cpu(), False)
        return [line for line in capsys.readouterr().out.splitlines() if line[:4] != "... "]

    return sweep


def test_points_cover_every_op_and_with_full_every_case_dtype_and_view(monkeypatch):
    monkeypatch.setattr(device, "size", functools.cache(device.size))  # it draws the operands
    sizes = {str(case): device.size(case) for case in CASES}
    for is_full in False, True:
        points = [(str(case), case.op, *more) for case, *more in device.points(is_full)]
        assert len(set(points)) == len(points) and {op for _, op, *_ in points} == set(OPS)
    full = {case for case, *_ in points}
    assert {case for case in sizes if sizes[case] <= device.LARGE} <= full
    assert {"exp-31x33", "exp-1", "sum-5x130x67", "fill-31x33", "equal-1"} <= full
    views = {(case, layout) for case, _, _, layout in points}
    assert views == {(case, layout) for case in full for layout in VIEWS}
    dtypes = {name: {dtype for _, op, dtype, _ in points if op == name} for name in OPS}
    assert dtypes["matmul"] == {"float32", "bfloat16", "float16"}
    assert dtypes["add"] == {*dtypes["matmul"], "int32", "int64"}
    assert dtypes["grad_norm"] == {"float32"}


def test_op_that_needs_another_gpu_is_not_wrong(lines, monkeypatch):
    def refuse(*operands):
        raise _C.CudaError("exp: it needs a GPU of compute capability 9.0")

    monkeypatch.setattr(_C, "exp", refuse)
    (line,) = lines()
    assert line.startswith(f"cpu()          ok: {len(OPS)} ops agree")


def test_wrong_op_is_named_once_with_its_first_wrong_point(lines, monkeypatch):
    """After five of them no more are tried."""
    exp, relu, tanh, noise = _C.exp, _C.relu, _C.tanh, iter(range(1, 100))
    silu, nan = _C.silu, float("nan")

    def contiguous_only(x):
        return relu(x if x.is_compact() else _C.array(np.zeros(x.shape), x.dtype))

    monkeypatch.setattr(_C, "exp", lambda x: _C.add(exp(x), 0.01))
    monkeypatch.setattr(_C, "relu", contiguous_only)
    monkeypatch.setattr(_C, "tanh", lambda x: _C.add(tanh(x), float(next(noise))))
    monkeypatch.setattr(_C, "silu", lambda x: _C.add(silu(x), nan))
    for name in "sqrt", "softplus":
        monkeypatch.setattr(_C, name, exp)
    said = lines()
    found = {line.split()[2].partition("-")[0]: line for line in said}
    assert set(found) == {"exp", "relu", "sqrt", "tanh", "silu"} and len(said) == 5
    assert "the same each time" in found["silu"]
    assert "cpu()          FAILED: exp-31x33 float32 contiguous: exp: out: " in found["exp"]
    assert " of 1023 elements are off, the first at (0," in found["exp"]
    assert "the same each time" in found["exp"] and "NEEDLE_ARCH" in found["exp"]
    assert "relu-31x33 float32 transposed: relu: out: " in found["relu"]
    assert "another result each time" in found["tanh"] and "memory errors" in found["tanh"]
