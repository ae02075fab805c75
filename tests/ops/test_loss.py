"""linear_cross_entropy over more rows than logits may be there at once, beside NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from needle import Tensor, no_grad, ops
from needle.nn import Module, Parameter, flatten_parameters
from needle.testing.layers import cross_entropy_fwd_bwd

C = 6


@pytest.fixture
def short_runs(monkeypatch):
    monkeypatch.setattr(ops.LinearCrossEntropy, "ROWS", 4)


def reference(x, w, targets):
    """loss, dx, dw in float64."""
    found = cross_entropy_fwd_bwd(np.asarray, x @ w, targets)
    dlogits = found["logits"] * found["share"]
    return found["loss"], dlogits @ w.T, x.T @ dlogits


def operands(device, dtype, transposed, rows, ignored=(), c=C, v=13, size=1.0):
    """x, w, targets, x and w in float64; with a c of its own w is as small as in a model."""
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, c)) * size, rng.standard_normal((c, v)) / size
    w *= 1 if c == C else c**-0.5
    targets = rng.integers(0, v, rows)
    targets[list(ignored)] = np.resize([-1, 3 - 2**32, -(2**31) - 1, -(2**63)], len(ignored))
    x, w = Tensor(x, device, dtype), Tensor(w.T if transposed else w, device, dtype)
    return x, w, targets, [t.numpy().astype(np.float64) for t in (x, w)]


def into_a_flat_gradient(x, w, targets, dw, **options):
    """The first writes, the second adds, and after reset_grad() one writes again."""
    head = Module()
    head.weight = Parameter(w)
    flat = flatten_parameters(head)
    for times in 1, 2, 1:
        if times == 1:
            flat.reset_grad()
        ops.linear_cross_entropy(x.detach(), head.weight, targets, **options).backward()
        got = flat.view(flat.grad, 0).numpy()
        np.testing.assert_allclose(got, times * dw, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype, close", [("float32", 1e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    "rows, ignored",
    [(5, ()), (8, (0,)), (11, (4, 5, 6, 7)), (9, (8,)), (6, range(6))],
    ids=["one row more", "two whole runs", "a run ignored", "a row alone ignored", "all ignored"],
)
def test_runs_of_rows_are_one_loss(short_runs, device, rows, ignored, dtype, close, transposed):
    x, w, targets, (x64, w64) = operands(device, dtype, transposed, rows, ignored)
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


def test_wanted_gradients_alone_and_twice(short_runs, device):
    x, w, targets, (x64, w64) = operands(device, "float32", False, 10)
    _, dx, dw = reference(x64, w64, targets)
    for leaf, other, grad in (x, w.detach(), dx), (w, x.detach(), dw):
        pair = (leaf, other) if leaf is x else (other, leaf)
        loss = ops.linear_cross_entropy(*pair, targets)
        for factor in 1.0, -2.0:
            leaf.grad = None
            loss.backward(Tensor(factor, device))
            np.testing.assert_allclose(leaf.grad.numpy(), factor * grad, rtol=1e-5, atol=1e-6)
        assert other.grad is None
    into_a_flat_gradient(x, w, targets, dw)
    none = ops.linear_cross_entropy(
        Tensor(np.ones((0, C)), device), w.detach(), np.empty(0, object)
    )
    assert none.item() == 0


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
