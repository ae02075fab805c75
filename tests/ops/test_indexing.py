"""Tensors by NumPy's rules: what is picked, its gradient, what is refused, and what is copied."""

import numpy as np
import pytest

import needle as ndl
from needle import Tensor

SHAPE, S = (4, 3, 5, 2), np.s_
MASK = np.arange(12).reshape(4, 3) % 3 == 0
INDICES = [
    *(0, -1, np.int64(2), S[:], ..., None, (), (0, 1, 2, 1), S[3:0:-2, 1], S[..., 0], S[0, ...]),
    *(S[None, 0, ..., None, -1], S[2:2, 1], S[::3, ..., 1]),
    *([2, 0, 2], [], [[0, 1], [-1, -4]], np.array([3, 0], np.uint8), np.array(1), [True] * 4),
    *(S[:, [1, 2]], (0, [1, 2]), S[:, 0, [1, 2]], S[0, :, [1, 2]], ([0, 1], [1, 2])),
    *(([0, -1, -4], [-3, 1, -1]), S[[0, 1], :, [1, 2]], S[[[0], [1]], ..., [1, 0]]),
    *(S[[0, 1], None, [1, 2]], S[None, [0, 1]], S[..., [1]], S[::-1, [0, 0], 1:4:2]),
    S[1, ..., [0, 1], 1],
    # Parted by a slice, after axes that stay, and by ... alone.
    *(S[:, [0, 1], :, [1, 0]], S[:, 2, ..., [0, 1, 1]], S[None, [[0], [3]], 1:3, [4, 0, 1]]),
    *(S[:, [0, 1], ..., [1, 0], 1], S[:, :, 0, ..., [0, 1]], S[..., :1, [0, 2], [1, 0], [1, 0]]),
    S[:, :, [1, 0], [1, 0], ...],
    *(MASK, S[MASK, 1], S[..., [True, False]], S[MASK, :, [0]], np.zeros(SHAPE, bool)),
    *(S[2:2, [1]], S[[3], :, [], 1], S[:, :, [4, 4], [0, 1]]),
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


@pytest.mark.parametrize(
    "index, message",
    [
        (4, "index 4 is out of range for axis 0 of size 4"),
        ([0, -5], "index -5 is out of range for axis 0 of size 4"),
        ((slice(None), [3]), "index 3 is out of range for axis 1 of size 3"),
        ((0,) * 5, "too many indices: 5 for 4 axes"),
        ((MASK, 0, 0, 0), "too many indices: 5 for 4 axes"),
        ((..., ...), "one ... only"),
        (1.0, "not 1.0"),
        (True, "not True"),
        (np.False_, "an index must be an integer"),
        ([0.5], "not an array of float64 with 1 axes"),
        (Tensor([0, 1]), "dtype='int32'"),
        (MASK.T, r"shape \(3, 4\), but picks from axes of sizes \(4, 3\)"),
        (([0, 1], [0, 1, 2]), r"shapes that differ: \(2,\), \(3,\)"),
    ],
)
def test_wrong_indices(index, message):
    with pytest.raises(IndexError, match=message):
        Tensor(np.zeros(SHAPE))[index]
