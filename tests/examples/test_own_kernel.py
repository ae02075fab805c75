"""examples/own_kernel.py on a GPU: its values and gradients against float64, views, emptiness, and
as a person runs it."""

import re
import sys

import numpy as np
import own_kernel
import pytest
from harness import ROOT, nvrtc_missing, run

import needle as ndl
from needle.testing import assert_within, rounder

NO_NVRTC = nvrtc_missing()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(NO_NVRTC is not None, reason=str(NO_NVRTC))]


def reference(r, a, b, dy):
    """y, da, db with each intermediate rounded by r."""
    s = r(1 / r(1 + r(np.exp(-a))))
    y = r(r(a * s) * b)
    da = r(r(dy * b) * r(s + r(r(a * s) * r(1 - s))))
    return y, da, r(r(dy * a) * s)


@pytest.mark.parametrize("dtype", own_kernel.TYPES)
@pytest.mark.parametrize("shape", [(1,), (31, 257), (3, 5, 7), (0, 4)])
def test_values_and_gradients(dtype, shape):
    r, rng = rounder(dtype), np.random.default_rng(1)
    values = [r(rng.standard_normal(shape)) for _ in range(3)]
    a, b, dy = (ndl.Tensor(v, device=ndl.cuda(), dtype=dtype) for v in values)
    y = own_kernel.swiglu(a, b)
    y.backward(dy)
    exact, naive = (reference(rounding, *values) for rounding in (rounder("float64"), r))
    for got, want, rough in zip((y, a.grad, b.grad), exact, naive):
        assert_within(got.numpy(), want, rough, dtype)


def test_views_are_copied_and_writes_are_seen():
    values = np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32)
    a, b = (ndl.Tensor(values, device=ndl.cuda()) for _ in range(2))
    got = own_kernel.swiglu(a.T, b[:, ::-1])
    want = own_kernel.composed(a.T, b[:, ::-1])
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
    y = own_kernel.swiglu(a, b)
    a.cached_data[0] = 3.0
    with pytest.raises(RuntimeError, match="SwiGLU: operand 0 was written to"):
        y.backward(ndl.ones_like(y))
    with pytest.raises(NotImplementedError, match="SwiGLU"):
        c = ndl.Tensor(values, device=ndl.cuda())
        own_kernel.swiglu(c, c).sum().backward()
        c.grad.sum().backward()
    with pytest.raises(ValueError, match=r"a is \(8, 8\), and b \(8, 1\)"):
        own_kernel.swiglu(a, b[:, :1])


def test_the_one_of_the_docs():
    text = (ROOT / "docs" / "kernels.md").read_text()
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Cube" in b)
    names: dict = {}
    exec(code, names)
    np.testing.assert_array_equal(names["x"].grad.numpy(), 3 * np.arange(6.0) ** 2)


def test_as_a_person_runs_it():
    done = run(sys.executable, ROOT / "examples" / "own_kernel.py")
    assert done.returncode == 0, done.stderr
    assert "occupancy" in done.stdout and done.stdout.count("composed") == 3
