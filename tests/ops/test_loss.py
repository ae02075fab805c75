"""linear_cross_entropy over more rows than logits may be there at once, beside NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from needle import _C, Tensor, no_grad, ops
from needle.nn import Module, Parameter, flatten_parameters
from needle.testing import FLOATS, rounder

V, C = 13, 6


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    monkeypatch.setattr(ops.LinearCrossEntropy, "ROWS", 4)


def reference(x, w, targets):
    """loss, dx, dw in float64."""
    logits = x @ w
    logits = logits - logits.max(1, keepdims=True)
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    valid = targets >= 0
    count = max(valid.sum(), 1)
    at = np.arange(len(x)), np.where(valid, targets, 0)
    loss = -(np.log(softmax[at]) * valid).sum() / count
    dlogits = softmax.copy()
    dlogits[at] -= 1
    dlogits *= valid[:, None] / count
    return loss, dlogits @ w.T, x.T @ dlogits


def operands(device, rows, dtype="float32", transposed=False, ignored=()):
    rng = np.random.default_rng(rows)
    x = Tensor(rng.standard_normal((rows, C)), device, dtype)
    w = rng.standard_normal((C, V))
    w = Tensor(w.T if transposed else w, device, dtype)
    targets = rng.integers(0, V, rows)
    targets[list(ignored)] = np.resize([-1, 3 - 2**32, -(2**31) - 1, -(2**63)], len(ignored))
    exact = (t.numpy().astype(np.float64) for t in (x, w))
    return x, w, targets, exact


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype, close", [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    "rows, ignored",
    [(5, ()), (8, (0,)), (11, (4, 5, 6, 7)), (9, (8,)), (6, range(6))],
    ids=["one row more", "two whole runs", "a run ignored", "a row alone ignored", "all ignored"],
)
def test_runs_of_rows_are_one_loss(device, rows, ignored, dtype, close, transposed):
    x, w, targets, (x64, w64) = operands(device, rows, dtype, transposed, ignored)
    loss, dx, dw = reference(x64, w64.T if transposed else w64, targets)
    got = ops.linear_cross_entropy(x, w, targets, transposed)
    got.backward(Tensor(3.0, device))
    assert got.dtype == "float32" and got.shape == ()
    np.testing.assert_allclose(got.item(), loss, rtol=close, atol=close)
    np.testing.assert_allclose(x.grad.numpy(), 3 * dx, rtol=close, atol=close)
    np.testing.assert_allclose(
        w.grad.numpy(), 3 * (dw.T if transposed else dw), rtol=close, atol=close
    )
    assert x.grad.dtype == dtype
    with no_grad():
        alone = ops.linear_cross_entropy(x, w, targets, transposed)
    assert alone.item() == got.item()


def test_wanted_gradients_alone_and_twice(device):
    x, w, targets, (x64, w64) = operands(device, 10)
    _, dx, dw = reference(x64, w64, targets)
    for leaf, other, grad in (x, w.detach(), dx), (w, x.detach(), dw):
        pair = (leaf, other) if leaf is x else (other, leaf)
        loss = ops.linear_cross_entropy(*pair, targets)
        for factor in 1.0, -2.0:
            leaf.grad = None
            loss.backward(Tensor(factor, device))
            np.testing.assert_allclose(leaf.grad.numpy(), factor * grad, rtol=1e-5, atol=1e-6)
        assert other.grad is None


def test_into_the_flat_gradient(device):
    x, w, targets, (x64, w64) = operands(device, 10)
    _, _, dw = reference(x64, w64, targets)
    head = Module()
    head.weight = Parameter(w)
    flat = flatten_parameters(head)
    for times in 1, 2:  # the first writes, the second adds
        ops.linear_cross_entropy(x.detach(), head.weight, targets).backward()
        got = flat.view(flat.grad, 0).numpy()
        np.testing.assert_allclose(got, times * dw, rtol=1e-5, atol=1e-6)
    flat.reset_grad()
    ops.linear_cross_entropy(x.detach(), head.weight, targets).backward()
    np.testing.assert_allclose(flat.view(flat.grad, 0).numpy(), dw, rtol=1e-5, atol=1e-6)


def test_no_more_logits_than_a_run(device, monkeypatch):
    rows, v, run = 64, 4096, 32
    monkeypatch.setattr(ops.LinearCrossEntropy, "ROWS", run)
    x, w = Tensor(np.ones((rows, C)), device), Tensor(np.ones((C, v)), device)
    targets = np.zeros(rows, int)
    ops.linear_cross_entropy(x, w, targets).backward()
    device.reset_peak()
    before = device.memory_stats()["peak_bytes"]
    loss = ops.linear_cross_entropy(x, w, targets)
    logits, gradient = run * v * 4, C * v * 4
    assert device.memory_stats()["peak_bytes"] - before < logits + 2 * gradient
    loss.backward()
    assert device.memory_stats()["peak_bytes"] - before < logits + 4 * gradient


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_loss_of_more_rows_than_a_gpu_takes_at_once(dtype, device):
    """Long ones, of which many in turn go through the same memory; ignored ones in between."""
    rng = np.random.default_rng(5)
    logits = rounder(dtype)(rng.standard_normal((601, 16392), np.float32) * 3)
    targets = rng.integers(0, 16392, 601)
    targets[rng.integers(0, 601, 60)] = -1
    targets[[0, 1, 600]] = 16391, 0, -5
    array = _C.array(logits, dtype, device)
    losses, loss, share = _C.cross_entropy_fwd_bwd(array, _C.array(targets, "int32", device))
    valid, rows = targets >= 0, np.arange(601)
    softmax = np.exp(logits)
    sums = softmax.sum(1, keepdims=True)
    softmax /= sums
    at_target = np.where(valid, targets, 0)
    wanted = (np.log(sums[:, 0]) - logits[rows, at_target]) * valid
    # A sum of 16,392 in float32, one by one, is wrong by 2^-10 at most, and by 2^-16 in fact.
    np.testing.assert_allclose(losses.numpy(), wanted, rtol=1e-5, atol=2.0**-14)
    np.testing.assert_allclose(loss.item(), wanted.sum() / valid.sum(), rtol=1e-5)
    np.testing.assert_allclose(share.item(), 1 / valid.sum(), rtol=1e-6)
    softmax[rows, at_target] -= 1
    softmax *= valid[:, None]
    unit = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    np.testing.assert_allclose(array.numpy(), softmax, rtol=1.01 * unit + 2.0**-14, atol=2.0**-25)


@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_that_do_not_fit_are_named(transposed):
    x, w, t = Tensor(np.ones((3, 4))), Tensor(np.ones((4, 4))), np.zeros(3, np.int32)
    of = "linear_cross_entropy"
    for shape in (4,), (4, 5, 6), (5, 5):
        with pytest.raises(ValueError, match=rf"^{of}: w must be \([CV], [CV]\) for x \(..., C\)"):
            ops.linear_cross_entropy(x, Tensor(np.ones(shape)), t, transposed)
    with pytest.raises(TypeError, match=f"^{of}: x must be a Tensor, but is ndarray"):
        ops.linear_cross_entropy(x.numpy(), w, t, transposed)
    with pytest.raises(TypeError, match=f"^{of}: w must be a Tensor, but is ndarray"):
        ops.linear_cross_entropy(x, w.numpy(), t, transposed)
    with pytest.raises(TypeError, match=f"^{of}: w: dtype is bfloat16, but x is float32"):
        ops.linear_cross_entropy(x, Tensor(np.ones((4, 4)), dtype="bfloat16"), t, transposed)
    for targets in None, "abc", [0, None, 1], [1j, 0, 0]:
        with pytest.raises(TypeError, match=f"^{of}: targets must be whole numbers, but are "):
            ops.linear_cross_entropy(x, w, targets, transposed)
    with pytest.raises(ValueError, match=f"^{of}: targets: .*inhomogeneous"):
        ops.linear_cross_entropy(x, w, [[1], [1, 2]], transposed)
    for wrong in np.nan, np.inf, -np.inf, 2.5:
        with pytest.raises(ValueError, match=rf"^{of}: {wrong} at \(2,\) is not a whole number"):
            ops.linear_cross_entropy(x, w, [0, 1, wrong], transposed)
    none = ops.linear_cross_entropy(Tensor(np.ones((0, 4))), w, np.empty(0, object), transposed)
    assert none.item() == 0
    for says in 2, "yes", None:  # as Python takes what is true
        ops.linear_cross_entropy(x, w, t, says)
    nothing = ops.linear_cross_entropy(Tensor(np.ones((3, 0))), Tensor(np.ones((0, 5))), t)
    assert abs(nothing.item() - np.log(5)) < 1e-6
    with pytest.raises(TypeError, match="^cross_entropy: logits must be a Tensor, but is ndarray"):
        ops.cross_entropy(x.numpy(), t)
