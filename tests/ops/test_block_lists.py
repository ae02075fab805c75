"""_C.block_lists on masks of all sizes and layouts, against NumPy, and with a wrong count."""

import numpy as np
import pytest
from harness import device_of

from needle import _C
from needle.testing import to_ndarray


def listed(kept, count: int) -> list[np.ndarray]:
    """offsets, entries, order of an NDArray of bool; the first two begin as garbage."""
    masks, rows, _ = kept.shape
    offsets = _C.array(np.full((masks, rows + 1), -5), "int32", kept.device)
    entries = _C.array(np.full(count, -5), "int32", kept.device)
    order = _C.block_lists(kept, offsets, entries)
    assert order.dtype == "int32" and order.shape == (masks, rows)
    return [a.numpy() for a in (offsets, entries, order)]


def check(kept: np.ndarray, got: list[np.ndarray]) -> None:
    counts = kept.sum(axis=2)
    ends = counts.reshape(-1).cumsum().reshape(counts.shape)
    offsets = np.concatenate([ends[:, :1] - counts[:, :1], ends], axis=1)
    order = np.argsort(-counts, axis=1, kind="stable")
    for have, want in zip(got, (offsets, np.nonzero(kept)[2], order), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("seed", range(12))
def test_random_masks(seed, device):
    """Rows of all lengths, some of them empty; every layout; and the transposed masks as a view."""
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 5), *rng.integers(1, 90, 2))
    kept = (rng.random(shape) < rng.random((*shape[:2], 1))) & (rng.random((*shape[:2], 1)) < 0.8)
    for layout in ("contiguous", "transposed", "stepped", "reversed", "offset"):
        array = to_ndarray(kept, "bool", device, layout)
        check(kept, listed(array, kept.sum()))
        check(kept.transpose(0, 2, 1), listed(array.permute((0, 2, 1)), kept.sum()))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 300, 300), (3, 33, 31), (2, 4100, 70), (2, 70, 4100), (300, 7, 9)]
)
@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
def test_sizes_and_densities(shape, density, device):
    """Past the 32 columns of a warp, the 2,048 rows of a launch's step, and many masks."""
    kept = np.random.default_rng(0).random(shape) < density
    array = _C.array(kept, "bool", device)
    check(kept, listed(array, kept.sum()))
    again = [listed(array, kept.sum()) for _ in range(2)]
    for one, other in zip(*again):
        np.testing.assert_array_equal(one, other)


def test_one_mask_seen_as_many(device):
    kept = np.random.default_rng(1).random((1, 40, 50)) < 0.3
    many = _C.array(kept, "bool", device).broadcast_to((5, 40, 50))
    check(np.broadcast_to(kept, (5, 40, 50)), listed(many, 5 * kept.sum()))


@pytest.mark.parametrize("count", [0, 9, 11])
def test_the_cpu_refuses_a_wrong_count_and_writes_nothing(count):
    kept = np.arange(20).reshape(1, 4, 5) % 2 == 0
    offsets = _C.array(np.full((1, 5), -5), "int32")
    entries = _C.array(np.full(count, -5), "int32")
    with pytest.raises(ValueError, match=f"axis E is {count}, but 10 blocks are kept"):
        _C.block_lists(_C.array(kept, "bool"), offsets, entries)
    assert (offsets.numpy() == -5).all() and (entries.numpy() == -5).all()


@pytest.mark.cuda
@pytest.mark.parametrize("count", [0, 1, 500, 2000])
def test_cuda_drops_blocks_without_room(count):
    """Offsets and order are those of the mask; the arrays beside a short `entries` stay whole."""
    device = device_of("cuda")
    kept = np.random.default_rng(2).random((3, 31, 33)) < 0.4
    memory = _C.array(np.full(count + 64, -5), "int32", device)
    offsets = _C.array(np.full((3, 32), -5), "int32", device)
    order = _C.block_lists(_C.array(kept, "bool", device), offsets, memory[16 : 16 + count])
    whole = np.nonzero(kept)[2]
    expected = np.full(count + 64, -5)
    expected[16 : 16 + min(count, whole.size)] = whole[:count]
    np.testing.assert_array_equal(memory.numpy(), expected)
    check(kept, [offsets.numpy(), whole, order.numpy()])
