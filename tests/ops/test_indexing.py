"""Tensors by NumPy's rules: what is picked, its gradient, what is refused, and what is copied."""

import re

import numpy as np
import pytest
from harness import naming, python

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
    *(  # parted by ... alone
        (slice(None), [0, 1], ..., [1, 0], 1),
        (slice(None), slice(None), 0, ..., [0, 1]),
        (..., slice(1), [0, 2], [1, 0], [1, 0]),
        (slice(None), slice(None), [1, 0], [1, 0], ...),
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


def moved(index, device):
    """The index with its arrays on the device, integers as int64 and int32 in turn."""
    items = index if isinstance(index, tuple) else (index,)
    items = [np.array(item) if isinstance(item, list) else item for item in items]
    for i, item in enumerate(items):
        if isinstance(item, np.ndarray):
            dtype = "bool" if item.dtype == bool else ("int64", "int32")[i % 2]
            items[i] = Tensor.from_ndarray(ndl.NDArray(item, dtype=dtype, device=device))
    return tuple(items) if isinstance(index, tuple) else items[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "int64"])
@pytest.mark.parametrize("view", VIEWS)
def test_numpys_rules(device, view, dtype):
    shape, of = VIEWS[view]
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % (
        2 if dtype == "bool" else 99
    )
    x = Tensor(ndl.NDArray(whole, device=device), dtype=dtype, requires_grad=False)
    x = Tensor.from_ndarray(of(x.cached_data))
    y = x.numpy()
    for index in INDICES:
        for got in (x[index], x[moved(index, device)]):
            assert got.dtype == dtype and got.device == device
            np.testing.assert_array_equal(got.numpy(), y[index], err_msg=repr(index))


def test_gradients_are_numpys_sums(device):
    for i, index in enumerate(INDICES):
        x = Tensor(np.random.default_rng(0).standard_normal(SHAPE), device=device)
        picked = x[moved(index, device) if i % 2 else index]
        weights = np.random.default_rng(1).standard_normal(picked.shape).astype(np.float32)
        picked.backward(Tensor(weights, device=device))
        expected = np.zeros(SHAPE, np.float64)
        np.add.at(expected, index, weights)
        np.testing.assert_allclose(x.grad.numpy(), expected, atol=1e-6, err_msg=repr(index))


def test_indices_along_an_axis_are_numpys(device):
    """gather, take_along_axis, scatter_add and index_add, of any dtype, on any device, with indices
    on the host and on the device, and operands longer than the index."""
    rng = np.random.default_rng(2)
    for dtype in ("float32", "bfloat16", "int64", "uint8"):
        for shape, axis, count in (
            ((5, 7), 0, 3),
            ((5, 7), 1, 9),
            ((3, 4, 5, 6), 2, 2),
            ((8,), 0, 4),
        ):
            host = rng.integers(0, 50, shape)
            less = [n if i == axis else max(1, n - 1) for i, n in enumerate(shape)]
            less[axis] = count
            ids = rng.integers(-shape[axis], shape[axis], less)
            inner = tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(less))
            x = Tensor(host, device=device, dtype=dtype, requires_grad=dtype == "float32")
            expected = np.take_along_axis(host[inner], ids, axis)
            sums = host.copy()
            places = list(np.ogrid[tuple(map(slice, less))])
            places[axis] = ids
            np.add.at(sums, tuple(places), expected)
            uses = np.zeros(shape)
            np.add.at(uses, tuple(places), 1)
            for index in (ids, moved(ids, device)):
                with naming(dtype, shape, axis):
                    got = ops.gather(x, axis, index)
                    np.testing.assert_array_equal(got.numpy(), expected)
                    assert got.dtype == dtype and got.device == device
                    added = ops.scatter_add(x, axis, index, got)
                    np.testing.assert_array_equal(added.numpy(), sums.astype(added.numpy().dtype))
                    if dtype == "float32":
                        x.grad = None
                        (got * got).sum().backward()
                        np.testing.assert_array_equal(x.grad.numpy(), 2 * host * uses)


@pytest.mark.cuda
def test_indices_on_a_gpu_outside_of_the_axis():
    """They are not read on the host: NaN, of integers -1, and no gradient."""
    device = ndl.cuda()
    ids = Tensor.from_ndarray(ndl.NDArray(np.array([3, -4, 2, -3]), dtype="int64", device=device))
    x = Tensor(np.arange(6.0).reshape(3, 2), device=device)
    rows = x[ids]
    assert np.isnan(rows.numpy()).tolist() == [[True, True], [True, True], [False] * 2, [False] * 2]
    np.testing.assert_array_equal(rows.numpy()[2:], [[4, 5], [0, 1]])
    rows[2:].sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[1, 1], [0, 0], [1, 1]])
    whole = Tensor(np.arange(6).reshape(3, 2), device=device, dtype="int32", requires_grad=False)
    np.testing.assert_array_equal(whole[ids].numpy(), [[-1, -1], [-1, -1], [4, 5], [0, 1]])
    both = x[ids, ids % 2]  # only a place whose axes are all inside is one
    np.testing.assert_array_equal(np.isnan(both.numpy()), [True, True, False, False])


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


@pytest.mark.parametrize("shape, axis", [((3, 4), 0), ((3, 4), 1), ((2, 3, 4), 1), ((0, 4), 1)])
def test_an_empty_index_has_a_gradient(device, shape, axis):
    x = Tensor(np.ones(shape), device=device)
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
    done = python(script, NEEDLE_TRACE="1")
    assert done.returncode == 0, done.stderr
    trace = done.stderr + done.stdout
    assert trace.count("take") >= 20, trace
    copies = [line for line in trace.splitlines() if re.search(r"cop(y|ied)|assign.*float32", line)]
    assert not copies, copies


def test_gradient_of_places_that_int32_cannot_number(monkeypatch):
    from needle.ops import indexing

    monkeypatch.setattr(indexing, "ROWS", 16)
    x = Tensor(np.arange(7 * 5 * 3).reshape(7, 5, 3), requires_grad=True)
    picked = x[:, [4, 0, 2], 1]
    np.testing.assert_array_equal(picked.numpy(), x.numpy()[:, [4, 0, 2], 1])
    picked.sum().backward()
    assert x.grad.numpy().sum() == picked.size
    with pytest.raises(ValueError, match="fewer than 2\\^31 places"):
        x[[1], [1]].sum().backward()
