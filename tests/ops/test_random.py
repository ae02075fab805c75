"""Philox, against its published vectors; dropout of many elements; masks that are drawn again."""

import numpy as np
import pytest

import needle as ndl
from needle import _C, Tensor, nn, ops, training
from needle.ops.random import DRAWN_BY_NUMPY, Source, drawing_from
from needle.testing.random import philox

SHAPE = 3, 11, 2048  # more than NumPy draws for
# Known answers of Random123 (Salmon et al. 2011), kat_vectors: philox4x32 10.
KNOWN = {
    "0" * 32 + " " + "0" * 16: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "f" * 32 + " " + "f" * 16: "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a8885a308d313198a2e03707344 a4093822299f31d0": "d16cfe09 94fdcceb 5001e420 24126ea1",
}


def words_of(text):
    return np.array([int(text[i : i + 8], 16) for i in range(0, len(text), 8)], np.uint32)


def state_of(array, device):
    return _C.array(np.asarray(array, np.int64), "int64", device)


@pytest.mark.parametrize("given", KNOWN)
def test_bits_are_the_published_ones(device, given):
    counter, key = map(words_of, given.split())
    state = state_of(np.concatenate([key, counter]).view(np.int64), device)
    bits = _C.array(np.zeros(4), "int32", device)
    _C.random_bits(state, bits)
    assert " ".join(f"{word:08x}" for word in bits.numpy().view(np.uint32)) == KNOWN[given]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_dropout_takes_its_numbers_of_numpy(device, dtype):
    """Of many elements, also in a view, one number that is the key of Philox's, and of few all."""
    values = np.random.default_rng(1).integers(-8, 9, SHAPE)
    for p in (0.1, 0.5, 2.0**-20):
        leaf = Tensor(values, device=device, dtype=dtype, requires_grad=dtype != "int32")
        np.random.seed(4)
        y = ops.dropout(leaf.permute((2, 0, 1)), p)
        after = np.random.rand()
        np.random.seed(4)
        key = np.random.randint(-(2**63), 2**63, dtype=np.int64)
        assert after == np.random.rand()
        kept = philox((key, 0, 0), values.size) >= round(p * 2**32)
        kept = kept.reshape(y.shape) * np.float32(1 / (1 - p))
        found = "float32" if dtype == "int32" else dtype
        wanted = Tensor(values.transpose(2, 0, 1) * kept, dtype="float32").astype(found)
        assert y.dtype == found
        np.testing.assert_array_equal(y.numpy(), wanted.numpy())
        if leaf.requires_grad:
            y.backward()
            wanted = Tensor(kept.transpose(1, 2, 0), dtype="float32").astype(found)
            np.testing.assert_array_equal(leaf.grad.numpy(), wanted.numpy())
    for size in (DRAWN_BY_NUMPY, DRAWN_BY_NUMPY + 1):
        np.random.seed(6)
        y = ops.dropout(ndl.ones(size, device=device), 0.5)
        np.random.seed(6)
        expected = (np.random.rand(size) <= 0.5) * 2
        assert (y.numpy() == expected).all() == (size == DRAWN_BY_NUMPY)


class Dropping(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64, device=device), nn.Dropout(0.5))

    def forward(self, x, recomputed):
        for _ in range(2):
            x = nn.recompute(self.inner, x) if recomputed else self.inner(x)
        return x


@pytest.mark.parametrize("state", [None, (), (3, -5, 0)])
@pytest.mark.parametrize("rows", [8, 1040])
def test_recompute_draws_the_same_masks(device, rows, state):
    values, found = np.random.default_rng(5).standard_normal((rows, 64)), []
    for recomputed in (False, True):
        np.random.seed(2)
        model, x = Dropping(device), Tensor(values, device=device)
        source = None if state is None else Source(state_of(state, device) if state else None)
        with drawing_from(source):
            y = model(x, recomputed)
            y.sum().backward()
        end = 0 if source is None else source.state.numpy()
        weight = model.inner.modules[0].weight.grad
        found.append([y.numpy(), x.grad.numpy(), weight.numpy(), end, np.random.rand()])
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


class Again:
    """A _C.Graph that does the step each time, for a device that records none."""

    def __init__(self, device, step):
        self.replay = step
        step()


@pytest.mark.parametrize("rows", [8, 1040])
@pytest.mark.parametrize("recomputed", [False, True])
def test_replays_drop_anew_by_a_key_of_numpy(monkeypatch, device, rows, recomputed):
    if not device.records_graphs:
        monkeypatch.setattr(_C, "Graph", Again)
    model = Dropping(device)
    weight, given = model.inner.modules[0].weight, _C.array(np.ones((rows, 64)), device=device)
    nn.flatten_parameters(model)
    first = _C.empty((rows, 64), "float32", device)

    def compute(ids, targets):
        weight.grad_buffer.fill(0)
        y = model(Tensor.from_ndarray(given), recomputed)
        first[:] = y.cached_data
        loss = y.sum()
        loss.backward()
        return loss.cached_data

    step, found = training.GraphedStep(compute, (1, 1), device), []
    for seed in (3, 2, 3, 4, 1):
        np.random.seed(seed)
        step([[0]], [[0]])
        found.append((first.numpy(), weight.grad.numpy(), np.random.rand()))
    masks = [y != 0 for y, _, _ in found]
    for i in range(1, 5):
        assert 0.45 < (masks[i] == masks[i - 1]).mean() < 0.55
    for one, other in zip(found[0], found[2]):  # computed, replayed
        np.testing.assert_array_equal(one, other)
    np.random.seed(3)
    key = np.random.randint(-(2**63), 2**63, dtype=np.int64)
    after = philox((key, rows * 16, 0), rows * 64) >= 2**31
    np.testing.assert_array_equal(masks[2], after.reshape(rows, 64))  # of the second layer
    assert found[2][2] == np.random.rand()
