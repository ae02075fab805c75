"""The sweep covers every op, finds the first wrong point and names it; the training step."""

import numpy as np
from harness import naming

from needle import _C
from needle.diagnose import step, sweep
from needle.testing import OPS


def failures(heard) -> list:
    return [finding for finding in heard.findings if finding.has_failed]


def test_points_cover_every_op_and_with_full_every_case_dtype_and_layout():
    for is_full in (False, True):
        points = list(sweep.points(is_full))
        assert len(points) == len(set(points)) and {p.case.op for p in points} == set(OPS)
        first = [p for p in points if (p.dtype, p.layout) == ("float32", "contiguous")]
        assert points[: len(first)] == first  # a short time covers all ops
    for op in OPS:
        mine = [p for p in points if p.case.op == op]
        with naming(op):
            assert {str(p.case) for p in mine} == {str(case) for case in sweep.cases(op, True)}
            assert {p.layout for p in mine} == set(sweep.LAYOUTS)
            assert {p.dtype for p in mine} == set(sweep.dtypes(op, True))
    assert {"float32", "bfloat16", "float16"} <= set(sweep.dtypes("matmul", True))
    assert {"int64", "bool", "bfloat16"} <= set(sweep.dtypes("equal", True))
    assert sweep.dtypes("grad_norm", True) == ("float32",)


def test_cpu_is_right_at_every_point_of_a_short_sweep(heard):
    assert sweep.examine(heard, _C.cpu())
    (finding,) = heard.findings
    assert finding.text.startswith(f"{len(OPS)} ops agree with float64 references at ")


def test_integers_of_every_op_are_right():
    for point in sweep.points(True):
        if point.dtype not in ("float32", "bfloat16", "float16"):
            assert sweep.wrong(point, _C.cpu()) is None, str(point)


def test_op_that_needs_another_gpu_is_not_wrong(heard, monkeypatch):
    def refuse(*operands):
        raise _C.CudaError("exp: it needs a GPU of compute capability 9.0")

    monkeypatch.setattr(_C, "exp", refuse)
    assert sweep.examine(heard, _C.cpu())


def test_wrong_op_is_named_with_its_first_wrong_point(heard, monkeypatch):
    exp, calls = _C.exp, []

    def wrong(x):
        calls.append(x.shape)
        return _C.add(exp(x), 0.01)

    monkeypatch.setattr(_C, "exp", wrong)
    assert not sweep.examine(heard, _C.cpu())
    (finding,) = failures(heard)
    assert finding.op == "exp" and finding.text.startswith("exp-31x33 float32 contiguous: exp: out")
    assert "of 1023 elements are off, the first at (0," in finding.text
    assert "the same each time" in finding.text and "NEEDLE_ARCH" in finding.remedy
    assert len(calls) == 3  # that point and twice again; no other point of the op


def test_op_that_ignores_strides_is_named_at_its_first_view(heard, monkeypatch):
    relu = _C.relu

    def contiguous_only(x):
        return relu(x if x.is_compact() else _C.array(np.zeros(x.shape), x.dtype))

    monkeypatch.setattr(_C, "relu", contiguous_only)
    assert not sweep.examine(heard, _C.cpu())
    assert "relu-31x33 float32 transposed" in failures(heard)[0].text


def test_result_that_changes_is_told_from_a_wrong_one(heard, monkeypatch):
    tanh, count = _C.tanh, iter(range(1, 100))
    monkeypatch.setattr(_C, "tanh", lambda x: _C.add(tanh(x), float(next(count))))
    sweep.examine(heard, _C.cpu())
    (finding,) = failures(heard)
    assert "another result each time" in finding.text and finding.remedy == sweep.FLAKY


def test_sweep_ends_after_a_few_wrong_ops_or_when_its_time_is_up(heard, monkeypatch):
    for op in OPS:
        if OPS[op].kind == "EW1":
            monkeypatch.setattr(_C, op, lambda x: _C.add(x, 5.0))
    sweep.examine(heard, _C.cpu())
    assert len(failures(heard)) == sweep.ENOUGH
    heard.findings.clear()
    heard.seconds = -1
    assert sweep.examine(heard, _C.cpu())
    assert "the time was up after 0 of" in heard.levels()["note"][0]


# ---- the training step --------------------------------------------------------------------------


def test_training_step_is_the_same_twice(heard):
    before = np.random.get_state()[1].copy()
    step.examine(heard, _C.cpu())
    assert "the same bits twice" in heard.levels()["ok"][0] and len(heard.findings) == 1
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_step_that_changes_is_named_by_its_first_number(heard, monkeypatch):
    bwd, count = _C.layernorm_bwd, iter(range(1000))
    monkeypatch.setattr(
        _C, "layernorm_bwd", lambda dy, *rest: bwd(_C.multiply(dy, 1 + 1e-3 * next(count)), *rest)
    )
    step.examine(heard, _C.cpu())
    (finding,) = heard.findings
    assert finding.has_failed and "other bits the second time, first in gradient of" in finding.text


def test_first_wrong_number_of_a_step_is_named(monkeypatch):
    right = step.one_step(_C.cpu(), "float32")
    assert step.first_off(right, right) is None
    name = [n for n in right if n.startswith("gradient")][2]
    assert name in step.first_off(right | {name: right[name] + 1}, right)
    assert "the loss is" in step.first_off(right | {"loss": right["loss"] + 1}, right)
    assert "the loss is nan" in step.first_off(right | {"loss": right["loss"] * np.nan}, right)
    assert step.first_hook_off(_C.cpu()) is None
    gelu, calls = _C.gelu_tanh, []

    def wrong(x):  # of the first of both models, from its second layer on
        calls.append(x)
        return _C.multiply(gelu(x), 1.5 if len(calls) == 2 else 1.0)

    monkeypatch.setattr(_C, "gelu_tanh", wrong)
    assert step.first_hook_off(_C.cpu()) == "blocks.1.mlp.hook_post"
