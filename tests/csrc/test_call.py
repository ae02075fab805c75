"""Calls of ops (csrc/python/call.c): the trace, threads, copies of operands."""

import threading

import numpy as np
import pytest
from harness import python

from needle import _C
from needle.testing import to_ndarray

TRACED = """
import numpy as np
from needle import _C
x = _C.array(np.ones((4, 3)))
w = _C.array(np.ones(4))
print("begin")
_C.layernorm_fwd(x.permute((1, 0)), w, w, 1e-5)
_C.layernorm_fwd(_C.array(np.ones((3, 4))), w, w, 1e-5)
x + 1
"""


@pytest.mark.parametrize("traced", ["0", "1"])
def test_trace_shows_calls_and_copies(traced):
    done = python(TRACED, NEEDLE_TRACE=traced)
    assert done.returncode == 0 and done.stdout == "begin\n"
    if traced == "0":
        assert done.stderr == ""
        return
    lines = done.stderr.splitlines()
    operands = "x:float32(3,4) w:float32(4) b:float32(4)"
    ran = [line for line in lines if "layernorm_fwd" in line and operands in line]
    assert len(ran) == 2 and all("us" in line and "cpu()" in line for line in ran)
    assert sum("copies" in line and "x:float32(3,4)" in line for line in lines) == 1
    assert any("add" in line for line in lines)


def test_operands_changed_in_place_through_a_view(device):
    """An IO operand whose layout the kernel cannot read is copied back; what is around stays."""
    base = _C.array(np.zeros((6, 8)), device=device)
    dy = to_ndarray(np.ones((5, 3)), "float32", device)
    _C.bias_bwd(dy, base[2, 1:7:2].reshape((3,)), None)
    expected = np.zeros((6, 8))
    expected[2, 1:7:2] = 5
    np.testing.assert_array_equal(base.numpy(), expected)
    c = base[:4, ::-1].permute((1, 0))
    ones = [_C.array(np.ones(shape), device=device) for shape in ((8, 2), (2, 4))]
    _C.matmul_acc(*ones, None, 1, c)
    expected[:4] += 2
    np.testing.assert_array_equal(base.numpy(), expected)


def test_a_broadcast_view_cannot_be_written(device):
    for rows in (2, 4):
        view = _C.array(np.zeros(3), device=device).reshape((1, 3)).broadcast_to((rows, 3))
        a, b, c = (np.ones(shape) for shape in ((rows, 2), (2, 3), (rows, 3)))
        a, b, c = (_C.array(x, device=device) for x in (a, b, c))
        for write, operands in ((_C.matmul_acc, (a, b, None, 1, view)), (_C.assign, (view, c))):
            with pytest.raises(ValueError, match="broadcast view"):
                write(*operands)
        assert view.numpy().sum() == 0


def test_inputs_may_overlap_outputs(device):
    host = np.arange(12.0).reshape(4, 3)
    array = _C.array(host, device=device)
    _C.embedding_bwd(_C.array([1, 2, 3], dtype="int32", device=device), array[:3], array)
    np.testing.assert_array_equal(array.numpy(), host + np.vstack([np.zeros((1, 3)), host[:3]]))


def test_threads(device):
    """Calls from several Python threads do not disturb each other."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((3, 64, 64)).astype(np.float32) for _ in range(4)]
    expected = [_C.array(a, device=device) @ _C.array(a, device=device) for a in inputs]
    rows = [rng.standard_normal(shape) for shape in ((40, 300), (200, 300), (400, 300), (900, 300))]
    failures = []

    def norms(i: int) -> np.ndarray:  # of bfloat16, whose kernel works in memory of its thread
        x, w = (_C.array(a, "bfloat16", device) for a in (rows[i], rows[i][0]))
        return _C.layernorm_fwd(x, w, w, 1e-5)[0].numpy()

    alone = [norms(i) for i in range(4)]

    def work(i: int) -> None:
        try:
            for _ in range(20):
                a = _C.array(inputs[i], device=device)
                np.testing.assert_array_equal((a @ a).numpy(), expected[i].numpy())
                np.testing.assert_array_equal(norms(i), alone[i])
                assert abs(float(_C.sum(a.exp(), 3).numpy()) / np.exp(inputs[i]).sum() - 1) < 1e-5
                try:
                    a + _C.array(np.ones(7 + i), device=device)
                except ValueError as error:  # the message is this thread's own
                    assert str(7 + i) in str(error), error
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
