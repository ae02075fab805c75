"""Ranks that are threads of one process, so that a test sees what all of them hold."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from needle import _C
from needle.distributed.environment import Place
from needle.distributed.group import Group

SECONDS = PATIENCE = 60  # a rank that failed leaves the others waiting so long at most


class Shared:
    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size), [None] * size


class Member:
    """Control channel and transport of one rank."""

    step = 0

    def __init__(self, rank, shared):
        self.rank, self.shared = rank, shared
        self.unwatched = self.under_way = 0  # exchanges

    def gather(self, name, value, patient=False):
        self.shared.values[self.rank] = name, value
        self.shared.barrier.wait(PATIENCE if patient else SECONDS)
        told = list(self.shared.values)
        self.shared.barrier.wait(SECONDS)
        assert {theirs for theirs, _ in told} == {name}
        return [theirs for _, theirs in told]

    def broadcast(self, name, value=None, patient=False):
        return self.gather(name, value, patient)[0]

    @contextlib.contextmanager
    def watched(self, name):
        yield self

    def goes_on(self, work):
        self.unwatched -= 1

    def exchange(self, sends, receives):
        kept = [(array, array.copy()) for _, array in sends]
        told = self.gather("an exchange", [(rank, array.copy()) for rank, array in sends])
        self.unwatched += 1
        self.under_way += 1

        def wait():
            """Let it arrive, which it does no sooner, and see that what was sent is as it was."""
            comes = [(sender, array) for sender, theirs in enumerate(told)
                     for rank, array in theirs if rank == self.rank]  # fmt: skip
            gets = sorted(receives, key=lambda part: part[0])  # stable: each rank's in their order
            for (sender, array), (rank, place) in zip(comes, gets, strict=True):
                assert (sender, array.size) == (rank, place.size)
                _C.assign(place, array)
            for array, before in kept:
                np.testing.assert_array_equal(array.numpy(), before.numpy())
            self.under_way -= 1

        return SimpleNamespace(wait=wait)


def together(size, work):
    """[work(group) of each rank]; the first error of any is raised."""
    shared = Shared(size)

    def rank(number):
        member = Member(number, shared)
        group = Group()
        if size > 1:
            group = Group(Place(number, size, number, size, "mpirun", None, None), member)
            group._transport = member
        try:
            done = work(group)
            assert member.unwatched == member.under_way == 0
            return done
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(rank, number) for number in range(size)]
    errors = [job.exception() for job in done if job.exception() is not None]
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return [job.result() for job in done]
