"""Batches of all ranks are together those of one process, epoch after epoch."""

import numpy as np
import pytest

from needle.data import Batches, Prefetch
from needle.distributed.tree import own_micro_batches

TOKENS = np.random.RandomState(0).randint(0, 99, 430)  # 26 windows of 16: 13 micro-batches an epoch


def drawn(ranks, micro_batches, steps, at=None, ahead=False):
    """(the inputs of each micro-batch of each step, the positions after the steps)."""
    found, positions = {}, []
    for rank in range(ranks):
        batches, own = Batches(TOKENS, 2, 16, seed=5), own_micro_batches(micro_batches, rank, ranks)
        batches.share(own, micro_batches)
        if at is not None:
            batches.seek(at)
        if ahead:
            batches = Prefetch(batches)
        for step in range(steps):
            for micro_batch in own:
                found[step, micro_batch] = batches.next()[0].tobytes()
            positions.append((step, tuple(batches.position.items())))
        if ahead:
            batches.close()
    return found, sorted(set(positions))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "micro_batches, counts", [(1, ()), (4, (2, 4)), (6, (3, 6)), (12, (3, 6, 12))]
)
def test_shares_are_the_whole(micro_batches, counts, ahead):
    steps = 1 + 3 * 13 // micro_batches  # over three epochs, which end within steps
    plain = Batches(TOKENS, 2, 16, seed=5)
    wanted, after = {}, []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            wanted[step, micro_batch] = plain.next()[0].tobytes()
        after.append((step, tuple(plain.position.items())))
    assert len(set(wanted.values())) > 13  # epochs differ
    for ranks in (1, *counts):
        assert drawn(ranks, micro_batches, steps, ahead=ahead) == (wanted, after)
        middle = steps // 2
        found, positions = drawn(
            ranks, micro_batches, steps - middle, dict(after[middle - 1][1]), ahead
        )
        assert found == {
            (step - middle, micro_batch): rows
            for (step, micro_batch), rows in wanted.items()
            if step >= middle
        }
        assert positions == [(step - middle, where) for step, where in after[middle:]]


def test_in_order_spreads_few_batches_evenly_from_the_first_to_the_last():
    """Above the epoch's batches each is given once."""
    batches, all_nine = Batches(np.arange(16 * 18 + 1), 2, 16), [*range(9)]
    for limit, wanted in (1, [0]), (2, [0, 8]), (3, [0, 4, 8]), (4, [0, 2, 5, 8]), (99, all_nine):
        assert [ids[0, 0] // 32 for ids, _ in batches.in_order(limit)] == wanted


def test_tokens_of_a_rank():
    plain, own = Batches(TOKENS, 2, 16), Batches(TOKENS, 2, 16)
    columns = np.array([0, 1, 14, 15])
    own.share(range(1), 1, columns)
    for theirs, ours in zip(plain.next(), own.next()):
        np.testing.assert_array_equal(ours, theirs[:, columns])
    for theirs, ours in zip(plain.in_order(3), own.in_order(3)):
        np.testing.assert_array_equal(ours, [part[:, columns] for part in theirs])
    assert own.width == 4 and plain.width == 16
    own.share(range(1, 2), 2, columns)
    np.testing.assert_array_equal(own.copy(plain.position).next(), plain.next())  # all of it
