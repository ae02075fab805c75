"""The order of a step's sums is one tree, however its count are shared."""

import numpy as np
import pytest

from needle import _C
from needle.distributed.tree import fitting_ranks, own_micro_batches, tree_sum


class Written(str):
    """A sum that is written down."""

    def __add__(self, other):
        return Written(f"({self}+{other})")


def written(texts):
    return tree_sum([*map(Written, texts)])


def wanted(texts):
    """The same by its definition: the largest whole subtree, and the tree of the rest."""
    if len(texts) == 1:
        return texts[0]
    half = 1 << ((len(texts) - 1).bit_length() - 1)
    return f"({wanted(texts[:half])}+{wanted(texts[half:])})"


def test_tree_sum_into_any_part_has_the_same_bits():
    numbers = np.random.default_rng(0).standard_normal((9, 50), np.float32)
    arrays = lambda count: [_C.array(x, "float32", _C.cpu()) for x in numbers[:count]]
    for count in range(1, 10):
        wanted = tree_sum(arrays(count)).numpy()
        for place in range(count):
            parts = arrays(count)
            assert tree_sum(parts, parts[place]) is parts[place]
            np.testing.assert_array_equal(parts[place].numpy(), wanted)


@pytest.mark.parametrize("count", range(1, 65))
def test_every_fitting_number_of_ranks_sums_the_same_tree(count):
    texts, fitting = [str(i) for i in range(count)], fitting_ranks(count)
    for ranks in fitting:
        shares = [own_micro_batches(count, rank, ranks) for rank in range(ranks)]
        assert [i for share in shares for i in share] == list(range(count))
        assert written([written(texts[s.start : s.stop]) for s in shares]) == wanted(texts)
    for ranks in set(range(2, count + 2)) - set(fitting):
        with pytest.raises(
            ValueError, match=f"{ranks} ranks cannot share a step of {count} .*--grad-accum"
        ):
            own_micro_batches(count, 0, ranks)


def test_ranks_that_share_sequences_are_told_how_many_ranks_fit():
    shares = [own_micro_batches(3, rank, 6, context=2) for rank in range(6)]
    assert shares == [range(i, i + 1) for i in (0, 0, 1, 1, 2, 2)]
    for ranks in 3, 4, 7:
        with pytest.raises(ValueError, match=rf"^{ranks} ranks cannot share .* 2, 6 ranks can"):
            own_micro_batches(3, 0, ranks, context=2)
