"""Tensors by NumPy's rules: what is picked, its gradient, what is refused, and what is copied."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from harness import DEVICES, device_of

import needle as ndl
from needle import Tensor, ops

SHAPE = (4, 3, 5, 2)
MASK = np.arange(12).reshape(4, 3) % 3 == 0
INDICES = [
    *(0, -1, np.int64(2), slice(None), ..., None, (), (0, 1, 2, 1), (slice(3, 0, -2), 1)),
    *(
        (..., 0),
        (0, ...),
        (None, 0, ..., None, -1),
        (slice(2, 2), 1),
        (slice(None, None, 3), ..., 1),
    ),
    *([2, 0, 2], [], [[0, 1], [-1, -4]], np.array([3, 0], np.uint8), np.array(1), [True] * 4),
    *((slice(None), [1, 2]), (0, [1, 2]), (slice(None), 0, [1, 2]), (0, slice(None), [1, 2])),
    *(
        ([0, 1], [1, 2]),
        ([0, 1], slice(None), [1, 2]),
        ([[0], [1]], ..., [1, 0]),
        ([0, 1], None, [1, 2]),
    ),
    *(
        (None, [0, 1]),
        (..., [1]),
        (slice(None, None, -1), [0, 0], slice(1, 4, 2)),
        (1, ..., [0, 1], 1),
    ),
    *(  # parted by a slice, after axes that stay
        (slice(None), [0, 1], slice(None), [1, 0]),
        (slice(None), 2, ..., [0, 1, 1]),
        (None, [[0], [3]], slice(1, 3), [4, 0, 1]),
    ),
    *(MASK, (MASK, 1), (..., [True, False]), (MASK, slice(None), [0]), np.zeros(SHAPE, bool)),
    *((slice(2, 2), [1]), ([3], slice(None), [], 1), (slice(None), slice(None), [4, 4], [0, 1])),
]
# Views of an array of SHAPE: as it lies, permuted, reversed, every other, one element repeated.
VIEWS = {
    "whole": (SHAPE, lambda x: x),
    "permuted": ((2, 5, 3, 4), lambda x: x.permute((3, 2, 1, 0))),
    "reversed": (SHAPE, lambda x: x.flip((1, 2))),
    "stepped": ((4, 3, 10, 2), lambda x: x[:, :, ::2, :]),
    "broadcast": ((1, 3, 5, 1), lambda x: x.broadcast_to(SHAPE)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "int64"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("device", DEVICES)
def test_numpys_rules(device, view, dtype):
    device = device_of(device)
    shape, of = VIEWS[view]
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % (
        2 if dtype == "bool" else 99
    )
    x = Tensor(ndl.NDArray(whole, device=device), dtype=dtype, requires_grad=False)
    x = Tensor.from_ndarray(of(x.cached_data))
    y = x.numpy()
    for index in INDICES:
        got = x[index]
        assert got.dtype == dtype and got.device == device
        np.testing.assert_array_equal(got.numpy(), y[index], err_msg=repr(index))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_numpys_sums(device):
    device = device_of(device)
    for index in INDICES:
        x = Tensor(np.random.default_rng(0).standard_normal(SHAPE), device=device)
        picked = x[index]
        weights = np.random.default_rng(1).standard_normal(picked.shape).astype(np.float32)
        picked.backward(Tensor(weights, device=device))
        expected = np.zeros(SHAPE, np.float64)
        np.add.at(expected, index, weights)
        np.testing.assert_allclose(x.grad.numpy(), expected, atol=1e-6, err_msg=repr(index))


def test_slices_share_memory():
    x = Tensor(np.zeros((4, 3)))
    for y in (x[1], x[:, ::2], x[..., None], x[()], x.T):
        assert y.cached_data._handle.ptr() == x.cached_data._handle.ptr()


@pytest.mark.parametrize(
    "index, message",
    [
        (4, "index 4 is out of range for axis 0 of size 4"),
        ([0, -5], "index -5 is out of range for axis 0 of size 4"),
        ((slice(None), [3]), "index 3 is out of range for axis 1 of size 3"),
        ((0,) * 5, "too many indices: 5 for 4 axes"),
        ((MASK, 0, 0, 0), "too many indices: 5 for 4 axes"),
        ((..., ...), "one ... only"),
        (1.0, "not float"),
        (True, "True alone is no index: None adds an axis"),
        (np.False_, "False alone is no index"),
        ("a", "not str"),
        ([0.5], "must hold integers"),
        (Tensor([0, 1]), "dtype='int32'"),
        (MASK.T, r"shape \(3, 4\), but picks from axes of sizes \(4, 3\)"),
        (([0, 1], [0, 1, 2]), r"shapes that differ: \(2,\), \(3,\)"),
    ],
)
def test_wrong_indices(index, message):
    with pytest.raises(IndexError, match=message):
        Tensor(np.zeros(SHAPE))[index]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape, axis", [((3, 4), 0), ((3, 4), 1), ((2, 3, 4), 1), ((0, 4), 1)])
def test_an_empty_index_has_a_gradient(device, shape, axis):
    x = Tensor(np.ones(shape), device=device_of(device))
    y = ops.index_select(x, axis, [])
    assert y.shape == shape[:axis] + (0,) + shape[axis + 1 :]
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.zeros(shape))


def test_only_picked_rows_are_copied():
    """NEEDLE_TRACE names each copy of an operand that an op asked for."""
    script = """
import numpy as np, needle as ndl
x = ndl.Tensor(np.zeros((31, 40, 50)))
for y in (x, x.T, x[:, ::2], x[::-1]):
    for axis in range(3):
        ndl.ops.index_select(y, axis, [3, 1, 3])
    y[[1, 2], :, [1, 2]], y[3, :, [0, 1]]
"""
    environment = {**os.environ, "NEEDLE_TRACE": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    trace = done.stderr + done.stdout
    assert trace.count("embedding_fwd") >= 20, trace
    copies = [line for line in trace.splitlines() if re.search(r"cop(y|ied)|assign", line)]
    assert not copies, copies


def test_places_that_int32_cannot_number(monkeypatch):
    """Rows that lie too far apart are looked up in parts."""
    from needle.ops import indexing

    monkeypatch.setattr(indexing, "ROWS", 16)
    x = np.arange(7 * 5 * 3).reshape(7, 5, 3)
    picked = Tensor(x)[:, [4, 0, 2], 1].numpy()
    np.testing.assert_array_equal(picked, x[:, [4, 0, 2], 1])
    with pytest.raises(ValueError, match="fewer than 2\\^31 places"):
        Tensor(x)[[1], [1]]
