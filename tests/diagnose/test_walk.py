"""The walk knows every op, finds what is off and names it; the step and the rates are judged."""

import numpy as np
import pytest

from needle import _C
from needle.diagnose import operands, peers, rates, step, walk
from needle.diagnose.driver import Driver
from needle.diagnose.walk import LAYOUTS, Point
from needle.testing import OPS


def test_the_table_is_that_of_ops_def():
    """As tests/harness.py reads it from the text."""
    assert list(_C.table()) == list(OPS)
    for op, (kind, fields) in _C.table().items():
        assert kind == OPS[op].kind
        written = [(o.mode, o.name, o.axes) for o in OPS[op].operands]
        assert [field[:3] for field in fields] == written
        if kind == "OP":
            assert [field[3] for field in fields] == [o.dtype for o in OPS[op].operands]


def test_every_op_is_a_point_and_with_full_in_every_dtype_size_and_layout():
    assert {p.op for p in walk.points(False)} == set(OPS)
    first = [p.op for p in walk.points(False)][: len(OPS)]
    assert first == list(OPS)  # so that a short time sees all of them
    for is_full in (False, True):
        points = list(walk.points(is_full))
        assert len(points) == len(set(points))
    for op in OPS:
        mine = [p for p in points if p.op == op]
        assert {p.sizes for p in mine} == set(operands.SIZES)
        assert {p.layout for p in mine} == set(LAYOUTS)
        assert {p.dtype for p in mine} == set(operands.dtypes_of(op, True))
    assert {"float32", "bfloat16", "float16"} <= set(operands.dtypes_of("matmul", True))
    assert {"int64", "bool", "bfloat16"} <= set(operands.dtypes_of("equal", True))
    assert operands.dtypes_of("grad_norm", True) == ("float32",)


@pytest.mark.parametrize("sizes", operands.SIZES)
def test_operands_fit_every_op(sizes):
    """Drawn twice they are the same, and the CPU takes them; results are numbers."""
    for op in OPS:
        point = Point(op, "float32", sizes, "contiguous")
        values, again = (operands.draw(op, sizes, "float32") for _ in range(2))
        for name, value in values.items():
            np.testing.assert_array_equal(value, again[name])
        made = walk.call(point, values, _C.cpu())
        assert list(made) == operands.outputs(op) and made
        if op not in ("log", "sqrt", "power"):  # of negative numbers
            for name, array in made.items():
                assert np.isfinite(array).all() or op.endswith("attention_fwd"), (op, name)


def test_indices_reach_as_far_as_they_may():
    for op, name, below in (
        ("decode_attention", "positions", 150),
        ("embedding_bwd", "ids", 1031),
        ("cross_entropy_fwd", "targets", 1031),
    ):
        values = operands.draw(op, "large", "float32")[name]
        assert below / 20 < values.max() < below, (op, name)
    lists = operands.draw("block_sparse_attention_bwd", "large", "float32")
    for offsets, columns, rows in (("offsets", "columns", 9), ("offsets_t", "rows", 9)):
        assert lists[offsets].shape == (2, rows + 1) and lists[offsets][0, 0] == 0
        assert lists[offsets][-1, -1] == len(lists[columns]) > 50
        assert (lists[offsets][0, -1], lists[columns].min()) == (lists[offsets][1, 0], 0)


def test_each_layout_has_the_same_values_and_strides_of_its_own():
    values = np.arange(12.0).reshape(3, 4)
    views = {layout: walk.lay(values, "float32", _C.cpu(), layout) for layout in LAYOUTS}
    assert len({view.strides for view in views.values()}) == len(LAYOUTS)
    for view in views.values():
        np.testing.assert_array_equal(view.numpy(), values)


def test_the_cpu_is_right_at_every_point_of_a_short_walk(heard):
    assert walk.examine(heard, _C.cpu())
    (text,) = heard.levels()["ok"]
    known = sum(hasattr(np, op) for op in OPS)
    assert 0 < known < len(OPS)
    own = f"{len(OPS)} ops agree with their own contiguous operands, {known} of them with NumPy at"
    assert text.startswith(own)
    assert len(heard.findings) == 1


def test_a_wrong_op_is_named_with_its_first_wrong_point(heard, monkeypatch):
    exp, calls = _C.exp, []

    def wrong(x):
        calls.append(x.shape)
        return _C.add(exp(x), 0.01)

    monkeypatch.setattr(_C, "exp", wrong)
    assert not walk.examine(heard, _C.cpu())
    (finding,) = [f for f in heard.findings if f.has_failed]
    assert finding.op == "exp" and "exp float32 odd contiguous" in finding.text
    assert "1023 of 1023 elements of out (31, 33) are off, the first at (0, 0)" in finding.text
    assert "the same each time" in finding.text and "NEEDLE_ARCH" in finding.remedy
    assert len(calls) == 3  # that point, and twice again; no other of that op


def test_an_op_that_ignores_strides_is_named_at_its_first_view(heard, monkeypatch):
    relu = _C.relu

    def contiguous_only(x):
        return relu(x if x.is_compact() else _C.array(np.zeros(x.shape), x.dtype))

    monkeypatch.setattr(_C, "relu", contiguous_only)
    assert not walk.examine(heard, _C.cpu())
    (finding,) = [f for f in heard.findings if f.has_failed]
    assert "relu float32 odd transposed" in finding.text


def test_a_result_that_changes_is_told_from_one_that_is_wrong(heard, monkeypatch):
    tanh, count = _C.tanh, iter(range(1, 100))
    monkeypatch.setattr(_C, "tanh", lambda x: _C.add(tanh(x), float(next(count))))
    walk.examine(heard, _C.cpu())
    (finding,) = [f for f in heard.findings if f.has_failed]
    assert "another result each time" in finding.text and finding.remedy == walk.FLAKY


def test_many_wrong_ops_are_not_listed_to_the_end(heard, monkeypatch):
    for op in OPS:
        if OPS[op].kind == "EW1":
            monkeypatch.setattr(_C, op, lambda x: _C.add(x, 5.0))
    walk.examine(heard, _C.cpu())
    assert len([f.op for f in heard.findings if f.has_failed]) == walk.ENOUGH


def test_a_walk_without_time_says_how_far_it_came(heard):
    heard.seconds = -1
    assert walk.examine(heard, _C.cpu())
    assert "the time was up after 0 of" in heard.levels()["note"][0]


@pytest.mark.parametrize(
    "got, wanted, dtype, said",
    [
        ([1, 2.0], [1, 2.0001], "float32", None),
        ([1, 2.0], [1, 2.01], "float32", "(1,): 2, should be 2.01"),
        ([1, 2.0], [1, 2.01], "bfloat16", None),
        ([1, 2.0], [1, 2.5], "bfloat16", "1 of 2"),
        ([np.nan, np.inf], [np.nan, np.inf], "float32", None),
        ([np.nan, 1], [0, 1], "float32", "nan, should be 0"),
        ([np.inf, 1], [-np.inf, 1], "float32", "inf, should be -inf"),
        ([0.0], [1e-9], "float32", None),
        ([1, 2, 3], [1, 2], "float32", "has shape (3,), should be (2,)"),
    ],
)
def test_differences(got, wanted, dtype, said):
    off = walk.difference({"y": np.float32(got)}, {"y": np.float32(wanted)}, dtype)
    assert off is None if said is None else said in off
    assert walk.difference({"y": np.array([3])}, {"y": np.array([4])}, "float32") is not None


# ---- the training step ------------------------------------------------------------------------


def test_a_training_step_is_the_same_twice(heard):
    before = np.random.get_state()[1].copy()
    step.examine(heard, _C.cpu())
    assert "the same bits twice" in heard.levels()["ok"][0] and len(heard.findings) == 1
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_a_step_that_changes_is_named_by_its_first_other_number(heard, monkeypatch):
    bwd, count = _C.layernorm_bwd, iter(range(1000))
    monkeypatch.setattr(
        _C, "layernorm_bwd", lambda dy, *rest: bwd(_C.multiply(dy, 1 + 1e-3 * next(count)), *rest)
    )
    step.examine(heard, _C.cpu())
    (finding,) = heard.findings
    assert finding.has_failed and "other bits the second time, first in gradient of" in finding.text


def test_the_first_number_of_a_step_that_is_off_is_named(monkeypatch):
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


# ---- rates and copies -------------------------------------------------------------------------

GOOD = {
    "bfloat16": 650e12,
    "memory": 4.1e12,
    "to_device": 50e9,
    "from_device": 50e9,
    "launch": 3e-6,
}
GPU = {
    "holders": [],
    "pcie": {"generation": 5, "width": 16},
    "clocks": {"sm": 1980, "sm_max": 1980, "reasons": 0},
    "power": 600.0,
}


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, None),
        ({"bfloat16": 300e12}, "300 TFLOP/s are far below the 989 TFLOP/s"),
        ({"memory": 1e12}, "1e+03 GB/s are far below the 4,800 GB/s"),
        ({"to_device": 3e9}, "3 GB/s to the device are far below"),
        ({"from_device": 1e9}, "1 GB/s from the device are far below"),
    ],
)
def test_a_slow_gpu_is_told(heard, change, said):
    """A failure where it is alone, a note where another process computes on it."""
    rates.judge(heard, "NVIDIA H200", GOOD | change, GPU)
    failed = heard.levels()["failed"]
    assert len(failed) == (said is not None) and (said is None or said in failed[0])
    heard.findings.clear()
    rates.judge(heard, "NVIDIA H200", GOOD | change, GPU | {"holders": [{"pid": 1}]})
    assert not heard.levels()["failed"] and len(heard.levels()["note"]) == len(failed)
    heard.findings.clear()
    rates.judge(heard, "NVIDIA Unheard Of", GOOD | change, None)
    assert not heard.findings


def test_throttling_under_load_and_slow_launches_are_told(heard):
    hot = GPU | {"clocks": GPU["clocks"] | {"reasons": 0x44}}
    rates.judge(heard, "NVIDIA H200", GOOD | {"launch": 1e-3}, hot)
    assert heard.levels()["failed"] == ["it is too hot: the hardware halves its clocks, under load"]
    assert any("a launch takes 1000 us" in text for text in heard.levels()["note"])


def test_rates_are_measured_on_a_device_that_is_not_the_host(examined):
    child = examined("device", "cuda", "0", where="cuda()", planted="reasons=0x40")
    assert set(child.facts["rates"]) == set(GOOD) and min(child.facts["rates"].values()) > 0
    assert [f.what for f in child.findings if f.has_failed] == ["throttling"]
    assert {f.what for f in child.findings} >= {"product", "rates", "ops", "step"}
    assert child.facts["uuid"].endswith("00")


@pytest.mark.parametrize(
    "planted, least, level, said",
    [
        ("", 0.0, "ok", "copies between 3 GPUs are right"),
        ("peer_wrong=12", 0.0, "failed", "brings 12 wrong bytes of 1,048,576"),
        ("", 1e15, "failed", "far below its link's"),
        ("peer_access=217", 1e15, "note", "goes by the host"),
        ("peer_error=700", 0.0, "failed", "cuMemcpyPeer failed with error 700"),
    ],
)
def test_copies_between_gpus(machine, heard, monkeypatch, planted, least, level, said):
    library = str(machine.folder / "lib/libcuda.so.1")
    monkeypatch.setattr(peers, "Driver", lambda: Driver(library))
    monkeypatch.setattr(peers, "BULK", 2 * peers.PROBE)
    monkeypatch.setenv("NEEDLE_FAKE", planted)
    peers.examine(heard, [0, 1, 2], least)
    texts = heard.levels()[level]
    assert said in texts[0] and ("cuda(0) to cuda(1)" in texts[0]) == (level != "ok")
    assert len(heard.facts.get("peers", {})) == (0 if "wrong" in said or "700" in said else 3)
