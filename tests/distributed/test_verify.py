"""A device that computes wrong is named, and the sums of the others stay as they are."""

import re

import numpy as np
import pytest
from together import together

from needle import nn, optim
from needle.distributed.data_parallel import DataParallel
from needle.distributed.group import Group
from needle.distributed.verify import Verification, WrongDevice

SHAPE = (2, 5)
BIT = -(2**31)  # the sign of a zero: equal as a number


def micro_batch_gradient(step, micro_batch):
    grad = np.random.RandomState(100 * step + micro_batch).standard_normal(300).astype(np.float32)
    grad[17] = 0
    return grad


def run(group, steps, every, micro_batches, fault=None):
    """Take steps of a model whose gradient its ids set. fault(rank, step, micro_batch, call): True
    if that result is to be wrong by one bit. Returns the sums of the steps."""
    flat = nn.flatten_parameters(nn.Linear(300, 1, bias=False))
    parallel = DataParallel(group, flat, optim.AdamW(flat), micro_batches)
    calls = []

    def compute(ids, targets):
        ids = ids if isinstance(ids, np.ndarray) else ids.numpy()
        step, micro_batch = (int(x) for x in ids[0, :2])
        grad = micro_batch_gradient(step, micro_batch)
        calls.append((step, micro_batch))
        flat.reset_grad()
        if fault is not None and fault(
            group.rank, step, micro_batch, calls.count((step, micro_batch))
        ):
            grad.view(np.int32)[17] ^= BIT
        flat.parameters[0].grad_buffer[...] = grad.reshape(300, 1)

    verification, sums = Verification(parallel, every, SHAPE, compute), []
    for step in range(1, steps + 1):
        for micro_batch in parallel.own_micro_batches:
            ids = np.zeros(SHAPE, np.int64)
            ids[0, :2] = step, micro_batch
            compute(ids, ids + 1)
            verification.keep(step, micro_batch, ids, ids + 1)
            parallel.add_micro_batch()
        parallel.reduce()
        verification.check(step)
        sums.append(flat.grad[parallel.shards[group.rank]].numpy())
    return sums, len(calls)


@pytest.mark.parametrize("ranks, micro_batches", [(2, 2), (2, 8), (4, 4)])
def test_nothing_is_found_where_nothing_is_wrong(ranks, micro_batches):
    without = together(ranks, lambda group: run(group, 6, 0, micro_batches))
    verified = together(ranks, lambda group: run(group, 6, 2, micro_batches))
    for (sums, _), (wanted, _) in zip(verified, without):
        for got, expected in zip(sums, wanted):
            np.testing.assert_array_equal(got, expected)
    calls = sum(calls for _, calls in verified)
    assert calls == 6 * micro_batches + 3  # one more micro-batch every other step


def message(ranks, micro_batches, fault, every=1, steps=8):
    with pytest.raises(WrongDevice) as caught:
        together(ranks, lambda group: run(group, steps, every, micro_batches, fault))
    return str(caught.value)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_device_that_is_wrong_once_is_named(ranks, wrong):
    """The device errs in its own micro-batch, and not the second time."""

    def fault(rank, step, micro_batch, call):
        return rank == wrong and step == 4 + wrong and call == 1

    said = message(ranks, ranks, fault, every=1)
    assert re.search(rf"step {4 + wrong}: .* in 1 of 320 numbers .*: rank {wrong} \(", said), said


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_witness_that_is_wrong_once_is_named(ranks):
    def fault(rank, step, micro_batch, call):
        return step == 2 * ranks and rank == 1 and micro_batch == 0 and call == 1

    said = message(ranks, ranks, fault)
    assert ": rank 1 (" in said and "computes wrong" in said, said


@pytest.mark.parametrize("wrong", range(4))
def test_of_three_or_more_the_majority_is_right(wrong):
    said = message(4, 4, lambda rank, step, micro_batch, call: rank == wrong)
    assert f": rank {wrong} (" in said and " or " not in said, said


def test_of_two_that_differ_for_ever_both_are_named():
    said = message(2, 2, lambda rank, step, micro_batch, call: rank == 1)
    assert ": rank 1 (" in said and " or rank 0 (" in said, said


def test_a_device_that_contradicts_itself_is_named():
    """Two devices suffice: results that change from call to call have no vote."""
    said = message(2, 2, lambda rank, step, micro_batch, call: rank == 1 and call % 2 == 1)
    assert ": rank 1 (" in said and " or " not in said, said


def test_it_needs_another():
    with pytest.raises(ValueError, match="there is only this one"):
        run(Group(), 1, 1, 2)
    assert len(run(Group(), 2, 0, 2)[0]) == 2
