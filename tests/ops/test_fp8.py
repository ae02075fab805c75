"""FP8: numbers of a byte, and the head's loss and gradients beside float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from harness import assert_same_bits, naming

from needle import _C, Tensor, no_grad, ops
from needle.nn import Module, Parameter, flatten_parameters
from needle.testing import call, check, prepare
from needle.testing.fp8 import LARGE, ODD, encoded

# Rounding to e4m3 has an error of 2.6 % in the mean square, to e5m2 of 5.2 %; logits of x and w
# have errors of both, so that a softmax is off by some percent too.
CLOSE = 0.05


def test_each_bfloat16_becomes_the_nearest_number(device):
    bits = np.arange(2**16, dtype=np.uint32) << 16
    x = bits.view(np.float32)
    x = x[np.abs(x) <= 448].reshape(1, -1)  # NaN is not; 448 makes the scale 1
    q, q_t, scale = _C.fp8_quantize(_C.array(x, "float32", device))
    assert scale.item() == 1
    np.testing.assert_array_equal(q.numpy(), encoded(x, "e4m3"))
    np.testing.assert_array_equal(q_t.numpy(), q.numpy().T)


def test_sizes_that_a_cpu_alone_takes():
    for case in ODD:
        with naming(case):
            values = prepare(case, "float32")
            check(case, values, call(case, values, "float32", _C.cpu()), "float32")


@pytest.mark.cuda
def test_more_tiles_than_multiprocessors():
    for case in LARGE:
        with naming(case):
            values = prepare(case, "float32")
            check(case, values, call(case, values, "float32", _C.cuda()), "float32")


def test_bad_operands_are_named(device):
    a = _C.array(np.zeros((16, 16)), "uint8", device)
    scale, c = _C.array(1.0, "float32", device), _C.empty((16, 16), "float32", device)
    with pytest.raises(ValueError, match="^fp8_matmul: b_e5m2: a and b are both e5m2"):
        _C.fp8_matmul(a, 1, a, 1, scale, 0, c)
    if device.is_host:
        targets = _C.array(np.r_[np.zeros(15), 16], "int32", device)
        with pytest.raises(ValueError, match="^fp8_cross_entropy: targets: token id 16 at pos"):
            _C.fp8_cross_entropy(a, a, scale, targets)


def operands(device, dtype, transposed, rows=96, c=64, v=272, size=1.0):
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, c)) * size, rng.standard_normal((c, v)) * c**-0.5 / size
    targets = rng.integers(0, v, rows)
    targets[[0, 17]] = -1
    x, w = Tensor(x, device, dtype), Tensor(w.T if transposed else w, device, dtype)
    return x, w, targets, [t.numpy().astype(np.float64) for t in (x, w)]


def reference(x, w, targets):
    logits, valid, at = x @ w, targets >= 0, (np.arange(len(x)), np.maximum(targets, 0))
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss = -np.log(softmax[at])[valid].mean()
    softmax[at] -= 1
    softmax *= valid[:, None] / valid.sum()
    return loss, softmax @ w.T, x.T @ softmax


def gradients(x, w, targets, transposed, factor=1.0):
    x.grad = w.grad = None
    loss = ops.linear_cross_entropy(x, w, targets, transposed, fp8=True)
    loss.backward(Tensor(factor, x.device))
    return loss.cached_data, x.grad.cached_data, w.grad.cached_data


def test_gradients_of_the_head(device, monkeypatch):
    """Of all rows at once and in runs, and the same bits each time."""
    cases = ("float32", "bfloat16"), (False, True), (1 << 15, 48), (1.0, 1e-3, 1e4)
    for dtype, transposed, rows, size in itertools.product(*cases):
        monkeypatch.setattr(ops.LinearCrossEntropy, "ROWS", rows)
        x, w, targets, (x64, w64) = operands(device, dtype, transposed, size=size)
        exact = reference(x64, w64.T if transposed else w64, targets)
        with naming(dtype, transposed, rows, size):
            found = gradients(x, w, targets, transposed, -2.0)
            again = gradients(x, w, targets, transposed, -2.0)
            loss, dx, dw = (array.numpy().astype(np.float64) for array in found)
            assert abs(loss - exact[0]) < 0.01 * exact[0]
            for got, wanted in (dx, exact[1]), (dw.T if transposed else dw, exact[2]):
                off = np.linalg.norm(got + 2 * wanted) / np.linalg.norm(2 * wanted)
                assert 0.001 < off < CLOSE
            assert found[1].dtype == dtype
            for one, other in zip(found, again):
                assert_same_bits(one, other, "a second call")


def test_micro_batches_add_into_the_flat_gradient(device):
    x, w, targets, _ = operands(device, "float32", False)
    _, _, dw = gradients(x, w, targets, False)
    head = Module()
    head.weight = Parameter(w)
    flat = flatten_parameters(head)
    for times in 1, 2:
        ops.linear_cross_entropy(x.detach(), head.weight, targets, fp8=True).backward()
        got = flat.view(flat.grad, 0).numpy()
        np.testing.assert_allclose(got, times * dw.numpy(), rtol=1e-6, atol=1e-8)


def test_calls_that_take_no_fp8_have_the_bits_of_without_it(device):
    x, w, targets, _ = operands(device, "float32", False)
    of = ops.linear_cross_entropy
    with no_grad():
        assert of(x, w, targets, fp8=True).item() == of(x, w, targets).item()
    assert of(x, w, targets, fp8=True).item() != of(x, w, targets).item()
    for rows, c, v in (95, 64, 272), (96, 63, 272), (96, 64, 271):
        x, w, targets, _ = operands(device, "float32", False, rows, c, v)
        assert of(x, w, targets, fp8=True).item() == of(x, w, targets).item()
    for rows, c in (0, 64), (96, 0):
        x, w = Tensor(np.ones((rows, c)), device), Tensor(np.ones((c, 32)), device)
        loss = of(x, w, np.zeros(rows, int), fp8=True)
        loss.backward()
        assert type(loss.op) is ops.LinearCrossEntropy


def test_a_nan_is_seen_in_loss_and_gradients(device):
    for bad in np.nan, np.inf:
        x, w, targets, (x64, _) = operands(device, "float32", False)
        x64[40, 3] = bad
        found = gradients(Tensor(x64, device, "float32"), w, targets, False)
        assert all(np.isnan(array.numpy()).any() for array in found)
