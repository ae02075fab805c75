"""BlockMask: each pattern against its definition over single tokens, and the lists kernels read."""

import pickle
from functools import partial

import numpy as np
import pytest
from harness import DEVICES, device_of
from hypothesis import given, settings
from hypothesis import strategies as st

import needle as ndl
from needle import _C
from needle.block_mask import BlockMask, convert_to_block_mask
from needle.testing import FLOATS, INTEGERS
from needle.testing.attention import both_lists

quick = settings(max_examples=40, deadline=None, derandomize=True)
lengths, blocks_, sizes = st.integers(1, 70), st.integers(1, 20), st.integers(1, 40)


def blocks_of(pattern, t: int, block: int) -> np.ndarray:
    """A block is kept when any (query, key) pair of it is in the pattern."""
    i, j = np.arange(t)[:, None], np.arange(t)[None, :]
    return convert(np.broadcast_to(pattern(i, j), (t, t)), block)


def convert(dense: np.ndarray, block: int) -> np.ndarray:
    t, s = dense.shape
    kept = np.zeros((-(-t // block), -(-s // block)), bool)
    for i, j in np.argwhere(dense):
        kept[i // block, j // block] = True
    return kept


@quick
@given(lengths, blocks_, sizes)
def test_patterns(t, block, size):
    for mask, pattern in [
        (BlockMask.local(t, size, block), lambda i, j: abs(i - j) < size),
        (BlockMask.strided(t, size, block), lambda i, j: (i - j) % size == 0),
        (BlockMask.global_(t, size, block), lambda i, j: (i < size) | (j < size)),
        (BlockMask.dense(t, block), lambda i, j: i == i),
        (
            BlockMask.dilated(t, size, 3, block),
            lambda i, j: (i // size == j // size) & ((i - j) % 3 == 0),
        ),
        (
            BlockMask.mixed(t, window=size, n_global=size, block=block),
            lambda i, j: (abs(i - j) < size) | (i < size) | (j < size),
        ),
    ]:
        np.testing.assert_array_equal(mask.blocks[0], blocks_of(pattern, t, block))
        assert (mask.T, mask.S, mask.block, mask.heads) == (t, t, block, 1)


def test_random_blocks_are_those_of_the_seed():
    mask = BlockMask.random(100, 3, 10, seed=4)
    kept = mask.blocks[0]
    assert kept.diagonal().all() and not np.triu(kept, 1).any()
    assert kept.sum(axis=1).tolist() == [min(row, 3) + 1 for row in range(10)]
    assert mask == BlockMask.random(100, 3, 10, seed=4) != BlockMask.random(100, 3, 10, seed=5)
    mixed = BlockMask.mixed(100, window=10, n_random=3, seed=4, block=10)
    assert mixed == BlockMask.local(100, 10, 10) | mask


def test_a_mask_from_a_function():
    mask = BlockMask.from_function(lambda i, j: (i + j) % 2 == 0, 50, 10, S=35)
    assert (mask.blocks[0] == (np.add.outer(np.arange(5), np.arange(4)) % 2 == 0)).all()
    assert BlockMask.from_function(lambda i, j: np.bool_(True), 20, 10) == BlockMask.dense(20, 10)
    heads = np.array([0, 1])[:, None, None]
    mask = BlockMask.from_function(lambda i, j: (i - j == heads), 30, 10)
    assert mask.heads == 2 and (mask.blocks[1] == np.eye(3, k=-1, dtype=bool)).all()


@quick
@given(lengths, st.integers(0, 30), blocks_, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_ideal_speedup_counts_pairs(t, more, block, heads, seed):
    s = t + more
    sizes = (heads, -(-t // block), -(-s // block))
    mask = BlockMask(np.random.default_rng(seed).random(sizes) < 0.5, block, t, s)
    seen = np.tri(t, s, more, dtype=bool)
    kept = (seen & mask.to_dense()).sum()
    assert mask.ideal_speedup == (seen.sum() * heads / kept if kept else np.inf)
    assert mask.causal().ideal_speedup == mask.ideal_speedup


def test_print_of_a_mask():
    mask = BlockMask.local(8, 2, 2).causal()
    drawing = "██······\n████····\n··████··\n····████"
    assert str(mask) == f"{mask!r}\n{drawing}"
    heads = BlockMask(np.stack([np.eye(4) > 0, *[mask.blocks[0]] * 2]), 2, 8)
    assert str(heads).splitlines()[1:3] == ["head 0 of 3, another by head(n):", "██······"]
    assert str(heads.head(2)) == str(mask) == str(mask.head(5)) and heads.head(1) == mask
    large = str(BlockMask.dense(50_000, 100).causal()).splitlines()[1:]
    assert len(large) == 46 and {len(line) for line in large} == {92}
    assert large[0][:2] in ("▒▒", "▓▓") and large[-1][:2] == "██" and large[0][2:4] == "··"


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib.figure")
    BlockMask.local(100, 20, 10).plot(tmp_path / "one.png")
    BlockMask(np.ones((3, 2, 2), bool), 4, 8).plot(str(tmp_path / "three.svg"))
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "three.svg").read_text().count('id="axes_') == 3


@quick
@given(lengths, lengths, blocks_, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_convert_to_block_mask(t, s, block, heads, seed):
    dense = np.random.default_rng(seed).random((heads, t, s)) < 0.05
    mask = convert_to_block_mask(dense, block)
    for g in range(heads):
        np.testing.assert_array_equal(mask.blocks[g], convert(dense[g], block))
    wide = mask.to_dense().reshape(heads, t, s)
    assert (wide >= dense).all()
    assert convert_to_block_mask(mask.to_dense(), block) == mask


@pytest.mark.parametrize("device", DEVICES)
@quick
@given(lengths, blocks_, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_lists(device, t, block, heads, seed):
    """Ascending key blocks of each query block, counted through all heads, the query blocks by
    falling number of them, and the same of the transposed blocks."""
    device = device_of(device)
    n = -(-t // block)
    kept = np.random.default_rng(seed).random((heads, n, n)) < 0.4
    mask = BlockMask(kept, block, t)
    wanted = both_lists(kept).values()
    for got, of in zip(mask.lists(device), wanted, strict=True):
        assert got.dtype == "int32"
        np.testing.assert_array_equal(got.numpy(), of)
    assert mask.lists(device)[0] is mask.lists(device)[0]  # made once


def test_a_reset_drops_the_lists_of_before(monkeypatch):
    class Place:
        generation = 0

    made, mask, place = _C.array, BlockMask.dense(40, 10), Place()
    monkeypatch.setattr(_C, "array", lambda x, dtype, device: made(x, dtype))
    before = mask.lists(place)
    assert mask.lists(place) is before
    place.generation += 1
    assert mask.lists(place)[0] is not before[0] and len(mask._lists) == 1


def test_causal_drops_blocks_that_no_query_sees():
    mask = BlockMask.dense(70, 16)
    np.testing.assert_array_equal(mask.causal().blocks[0], np.tril(np.ones((5, 5), bool)))
    more_keys = BlockMask.dense(20, 16, S=70)  # query i sees keys up to i + 50
    np.testing.assert_array_equal(more_keys.causal().blocks[0], [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert mask.causal().causal() is mask.causal()


def test_union_equality_and_pickle():
    one, other = BlockMask.local(70, 16, 16), BlockMask.global_(70, 16, 16)
    union = one | other
    np.testing.assert_array_equal(union.blocks, one.blocks | other.blocks)
    assert union == BlockMask.mixed(70, window=16, n_global=16, block=16)
    assert hash(union) == hash(BlockMask.mixed(70, window=16, n_global=16, block=16))
    assert one != other and one != "text"
    assert BlockMask.dense(70, 16) != BlockMask.dense(71, 16, S=70)  # of as many blocks
    assert pickle.loads(pickle.dumps(union)) == union
    assert 0 < one.density < union.density < BlockMask.dense(70, 16).density == 1
    given = one.blocks.copy()
    made = BlockMask(given, 16, 70)
    given[...] = True  # the caller's array stays writable, and is no part of the mask
    np.testing.assert_array_equal(made.blocks, one.blocks)
    assert "T=70" in repr(one)


@pytest.mark.parametrize(
    "form",
    [
        lambda d, device: d,
        lambda d, device: d.tolist(),
        lambda d, device: d.T.copy().T,
        lambda d, device: ndl.Tensor(d, device=device),
        lambda d, device: ndl.Tensor(d.T.copy(), device=device).transpose(),
        *(partial(ndl.NDArray, dtype=dtype) for dtype in (*FLOATS, *INTEGERS)),
    ],
)
def test_dense_masks_of_any_kind(device, form):
    dense = np.tril(np.ones((7, 7)))
    mask = BlockMask(np.tril(np.ones((3, 3), bool)), 3, 7)
    assert convert_to_block_mask(form(dense, device), 3) == mask
    both = np.stack([dense, np.flip(dense)])
    both = convert_to_block_mask(_C.array(both, "bool", device).permute((0, 2, 1)), 4)
    expected = np.array([[[1, 1], [0, 1]], [[1, 0], [1, 1]]], bool)
    np.testing.assert_array_equal(both.blocks, expected)


@pytest.mark.parametrize("hidden", [-np.inf, np.nan, np.finfo("float32").min, -1e9, -1e4, -1])
def test_a_mask_that_is_added_to_scores_is_refused(hidden):
    """Its hidden keys would be those that are kept."""
    added = np.where(np.tri(4, dtype=bool), 0, np.float32(hidden)).astype(np.float32)
    with pytest.raises(ValueError, match="convert_to_block_mask: .* pass mask == 0"):
        convert_to_block_mask(added, 2)
    assert convert_to_block_mask(added == 0, 2) == BlockMask(np.tri(2, dtype=bool), 2, 4)
    if np.abs(hidden) < np.inf:
        with pytest.raises(ValueError, match="convert_to_block_mask: .* pass mask == 0"):
            convert_to_block_mask(np.where(np.tri(4, dtype=bool), 0, int(max(hidden, -(2**31)))), 2)


ONES = np.ones((4, 4), bool)
THREE, FOUR = (BlockMask([ONES] * heads, 2, 8) for heads in (3, 4))


WRONG = [  # error, its words, call
    (ValueError, None, lambda: BlockMask.local(0, 4, 4)),
    (ValueError, None, lambda: BlockMask.local(16, 0, 4)),
    (ValueError, None, lambda: BlockMask.local(16, 4, 0)),
    (ValueError, None, lambda: BlockMask.local(16, 4, 2.5)),
    (ValueError, None, lambda: BlockMask.global_(16, 0, 4)),
    (ValueError, None, lambda: BlockMask.mixed(16, block=4)),
    (ValueError, None, lambda: BlockMask(ONES[:2, :2], 4, 16)),
    (ValueError, None, lambda: BlockMask(np.ones((4, 4)), 4, 16)),
    (ValueError, None, lambda: convert_to_block_mask(np.ones(4), 2)),
    (ValueError, None, lambda: convert_to_block_mask(np.ones((0, 4)), 2)),
    (ValueError, None, lambda: BlockMask.local(70, 16, 16) | BlockMask.local(70, 16, 8)),
    (ValueError, r"heads are \(8, 8, 2, 3\) and \(8, 8, 2, 4\)", lambda: THREE | FOUR),
    (AttributeError, None, lambda: setattr(BlockMask.local(70, 16, 16), "block", 3)),
    (ValueError, None, lambda: BlockMask.local(9, 3, 3).blocks.__setitem__((0, 0, 0), False)),
    (IndexError, "out of bounds", lambda: THREE.head(3)),
    (ValueError, "n_random must be a whole number above 0", lambda: BlockMask.random(9, 0, 3)),
    (ValueError, "must be bool", lambda: BlockMask.from_function(lambda i, j: i - j, 20, 10)),
    (ValueError, None, lambda: BlockMask.from_function(lambda i, j: ONES[:, :3] > 0, 20, 10)),
]


@pytest.mark.parametrize("error, words, call", WRONG)
def test_wrong_call_is_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()
