"""Every op is compared; the first wrong point is named, and whether it is wrong each time."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from needle import _C
from needle.diagnose import device
from needle.testing import CASES, OPS

VIEWS = "contiguous", "transposed", "stepped", "reversed", "offset"


@pytest.fixture
def lines(capsys):
    """lines() -> those of a short sweep of the CPU, without those that say what is tried."""

    def sweep() -> list[str]:
        device.examine_ops(_C.cpu(), False)
        return [line for line in capsys.readouterr().out.splitlines() if line[:4] != "... "]

    return sweep


def test_points_cover_every_op_and_with_full_every_case_dtype_and_view():
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


@pytest.mark.parametrize("name, said", [("NVIDIA H200", "FAILED"), ("H200 MIG 1g.18gb", "ok: b")])
def test_part_of_a_gpu_has_no_data_sheet(monkeypatch, capsys, name, said):
    """The rate here is far below that of the sheet."""
    gpu = SimpleNamespace(synchronize=int, properties=lambda: {"name": name, "uuid": "GPU-0"})
    monkeypatch.setattr(device.gpus, "holders", lambda uuid: [])
    device.judge_rate(gpu, "bfloat16", 1e9, lambda: time.sleep(0.03), "TFLOP/s", 1e12)
    assert said in capsys.readouterr().out


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
