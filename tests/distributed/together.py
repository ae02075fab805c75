"""Ranks that are threads of one process, so that a test sees what all of them hold. What they
exchange goes on beside their work as late as it may: what is received holds nonsense until `wait`,
and what is sent must then be what it was at the start."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from needle import _C
from needle.distributed.environment import Place
from needle.distributed.group import Group

SECONDS = 60  # a rank that failed leaves the others waiting so long at most


class Shared:
    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size), [None] * size


class OnItsWay:
    """A group.Transfer."""

    def __init__(self, pairs, sent):
        self.pairs, self.sent = pairs, sent
        for place, _ in pairs:
            place.fill(float("nan") if place.dtype.startswith("float") else 85)

    def wait(self):
        for array, bytes_then in self.sent:
            assert array.numpy().tobytes() == bytes_then, "written before it was sent"
        for place, array in self.pairs:
            _C.assign(place, array)


class Watched:
    def goes_on(self, work):
        """There is nobody who looks."""


class Member:
    """Control channel and transport of one rank."""

    step = 0

    def __init__(self, rank, shared):
        self.rank, self.shared = rank, shared

    def gather(self, name, value, patient=False):
        self.shared.values[self.rank] = name, value
        self.shared.barrier.wait(SECONDS)
        told = list(self.shared.values)
        self.shared.barrier.wait(SECONDS)
        assert {theirs for theirs, _ in told} == {name}
        return [theirs for _, theirs in told]

    def broadcast(self, name, value=None, patient=False):
        return self.gather(name, value)[0]

    @contextlib.contextmanager
    def watched(self, name):
        yield Watched()

    def exchange(self, sends, receives):
        sent = [None if array is None else array.copy() for array in sends]
        told = self.gather("an exchange", sent)
        pairs = [
            (place, told[sender][self.rank])
            for sender, place in enumerate(receives)
            if place is not None and place.size
        ]
        then = [(array, array.numpy().tobytes()) for array in sends if array is not None]
        return OnItsWay(pairs, then)


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
            return work(group)
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
