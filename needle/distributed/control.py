"""The control channel: small values that ranks exchange, and the detection of missing ranks.

    control = Control.join(place, {"needle": "0.1.0", ...}, folder)
    losses = control.gather("losses", loss)                 # one of each rank, in their order
    stop = control.broadcast("stop", reason)                # rank 0's
    with control.watched("all_gather weights"): ...         # a collective of another library
    control.leave("the disk is full"), or control.close()

All ranks call these in the same order; the calls are numbered. Rank 0 is the centre. A thread of
each rank tells rank 0 its position (number, name and step of the collective) some twenty times per
deadline, so entering a collective costs an assignment, and a silent rank is noticed.

Within `deadline` seconds of entering a collective it is done, or all ranks get one message: which
rank waited, in which collective at which step, and which ranks have not come, do not answer (they
are stopped, or their machine is gone) or are gone (their connection ended: the process died). The
reason of a rank that ends by `leave` is quoted. `gather` then raises. A watched collective hangs in
C, and must release the GIL: the thread prints the message and exits with the code of the error,
os.EX_TEMPFAIL (75) if a restart may help. Outside of collectives nothing is interrupted: the next
one raises.

A collective that is only enqueued on a device (`goes_on`) is watched until the device has done it;
the thread asks for that, and no call waits. Its deadline begins when the device reaches it, and the
positions of the devices say which rank is late. If a failure is known, the main thread may still
wait for a result of the device, where no exception reaches it: after some seconds the thread exits.

    ["at", number, name, step, inside, seconds,    to and from rank 0, periodically: the position
        number, name, step, inside, seconds]       of the host, and of the device
    ["value", number, name, step, inside, value]   to rank 0: the value of a gather
    ["values", number, [value, ...]]               from rank 0, in the order of ranks
    ["end", kind, text, code]                      from rank 0 to all, or of a rank that leaves
    ["bye", number, name, step]                    the last collective of a rank that has closed
    ["left", reason]                               from rank 0: what it prints as it ends
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from needle.distributed import rendezvous
from needle.distributed.environment import Place
from needle.distributed.messages import Connection
from needle.distributed.rendezvous import KINDS, RankError, RankMissing, RanksDiffer, name_ranks

__all__ = ["Control", "RankError", "RankMissing", "RanksDiffer"]

LIMIT = 1 << 20  # characters of a value
LOOKS = 20  # per deadline
SLOWEST_LOOK = 1.0  # seconds
EARLY = 0.8  # of the deadline: a rank that waits for so long is late
SILENT = 0.25  # of the deadline: a rank that sends nothing for so long does not answer
GRACE = 0.1  # of the deadline: for the main thread to end by itself while its device hangs
LINGER = 1.0  # seconds for the last messages when this rank ends
MOST_DESCRIBED = 8  # ranks in a message
MOST_REASON = 1000  # characters; of rank 0, whose reason may quote one, some more


class _At(NamedTuple):
    """A position: in or after a collective."""

    number: int = 0
    name: str = ""
    step: int = 0
    inside: str = ""  # "gather", "patient gather", "watched", "device"; "" after it

    def __str__(self) -> str:
        if not self.number:
            return "before the first collective"
        return f"{'in' if self.inside else 'after'} {self.name!r} at step {self.step}"


class Work(Protocol):
    """A collective that was enqueued on a device. Another thread asks; an error means that it
    cannot end well."""

    def begun(self) -> bool: ...
    def done(self) -> bool: ...


class _Enqueued(NamedTuple):
    at: _At
    before: _At  # the collective before it
    work: Work


@dataclasses.dataclass
class _Position:
    at: _At = _At()
    since: float = 0.0  # by the clock of this process

    def move(self, at: _At, now: float) -> None:
        if at != self.at:
            self.at, self.since = at, now


@dataclasses.dataclass
class _Member:
    """A rank, as this one knows it."""

    connection: Connection | None  # None: this rank
    host: _Position = dataclasses.field(default_factory=_Position)
    device: _Position = dataclasses.field(default_factory=_Position)
    heard: float = 0.0  # its last message
    is_open: bool = True
    has_closed: bool = False  # `host` is its last collective

    def positions(self) -> list[_Position]:
        return [self.host, self.device]


class Control:
    """The control channel of a rank; `join` makes it. Used by one thread.

    Attributes: place, rank, size, deadline; step, which the user sets and messages quote."""

    def __init__(self, place: Place, connections: dict[int, Connection], deadline: float) -> None:
        self.place, self.rank, self.size, self.deadline = place, place.rank, place.size, deadline
        self.step = 0
        self._at = self._before = _At()  # the thread reads it as a whole
        self._enqueued: deque[_Enqueued] = deque()  # the thread removes those that are done
        self._period = min(deadline / LOOKS, SLOWEST_LOOK)
        self._failure: RankError | None = None  # the first, the cause
        self._is_failing = False  # a thread reports the cause
        self._changed = threading.Condition()  # the thread has received, or found a failure
        self._answered: tuple[int, list[Any]] = 0, []  # the last finished gather
        self._gathering: dict[int, dict[int, tuple[str, Any]]] = {}  # number: rank: name and value
        self._closing = self._closed = False
        self._last_words = ""  # of rank 0
        self._members = {rank: _Member(connection) for rank, connection in connections.items()}
        self._own = self._members[self.rank] = _Member(None)
        self._peers = connections
        self._now = 0.0  # seconds in which this process was not stopped
        self._doomed: float | None = None  # since when a failure meets work on the device
        if connections:
            self._selector = selectors.DefaultSelector()
            for rank, connection in connections.items():
                self._selector.register(connection, selectors.EVENT_READ, rank)
            self._thread = threading.Thread(target=self._watch, name="needle control", daemon=True)
            self._thread.start()

    @classmethod
    def join(
        cls,
        place: Place,
        facts: dict[str, str],
        folder: Path | None = None,
        seconds: float = 60.0,
        deadline: float = 60.0,
    ) -> Control:
        """Return the channel once all ranks have come and agree in their facts (configuration,
        build, versions). `folder`: one that all ranks see, where rank 0 writes its address.
        RankMissing names the ranks that did not come within so many seconds, RanksDiffer those that
        differ from rank 0, and in what: every rank that came raises the same."""
        connections = {}
        if place.size > 1:
            connections = rendezvous.meet(place, facts, folder, seconds, deadline)
        return cls(place, connections, deadline)

    # ---- collectives ----------------------------------------------------------------------------

    def gather(self, name: str, value: Any, patient: bool = False) -> list[Any]:
        """Return the values of all ranks, the same list at each, as JSON gives them: a tuple is a
        list. `patient`: wait longer than the deadline for ranks that answer. TypeError and
        ValueError for a value that is no JSON or above a MiB; RankMissing; RanksDiffer if another
        rank is in another collective."""
        text = json.dumps(value)
        if len(text) > LIMIT:
            raise ValueError(
                f"{name}: {len(text):,} bytes: the control channel is for small messages, up to "
                f"{LIMIT:,} bytes of a rank; arrays take another way"
            )
        self._enter(name, "patient gather" if patient else "gather")
        at = self._at
        try:
            if self.size == 1:
                return [json.loads(text)]
            if self.rank == 0:
                self._collect(0, at, json.loads(text))
            else:
                self._send(0, "value", *at, value)
            with self._changed:
                self._changed.wait_for(lambda: self._answered[0] == at.number or self._failure)
            if self._answered[0] != at.number:
                raise self._error(at)
            return self._answered[1]
        finally:
            self._leave()

    def broadcast(self, name: str, value: Any = None, patient: bool = False) -> Any:
        """Return rank 0's value; the others' are ignored."""
        return self.gather(name, value if self.rank == 0 else None, patient)[0]

    @contextlib.contextmanager
    def watched(self, name: str) -> Iterator[Control]:
        """Run the block as a collective of another library, which a device may go on with."""
        self._enter(name, "watched")
        try:
            yield self
        finally:
            self._leave()

    def goes_on(self, work: Work) -> None:
        """Watch the collective of a block after its end, until the device has done it."""
        at = self._at._replace(inside="device")
        self._enqueued.append(_Enqueued(at, self._before, work))

    def leave(self, reason: str, code: int = 1) -> bool:
        """End all ranks with this exit code; the others quote the reason. Return True if
        rank 0 prints the same cause: this reason, one that quotes it, or one that it quotes."""
        own = reason[:MOST_REASON]
        text = f"rank {self.rank} stopped at step {self.step}: {own}"
        if self._failure is not None and str(self._failure) in reason:
            own = str(self._failure)  # after where this rank was
        if self.rank == 0:
            self._fail(text, code=code)
            for rank in self._peers:
                self._send(rank, "left", reason[: 3 * MOST_REASON])
        elif self._failure is None:
            self._send(0, "end", "missing", text, code)
        self._end()
        said = self._last_words
        return bool(said) and (own in said or said[:MOST_REASON] in own)

    def close(self) -> None:
        """End the channel in order: this rank enters no more collectives."""
        if not self._closing:
            self._closing = True  # before it is answered
            for rank in self._peers:
                self._send(rank, "bye", *self._at[:3])
        self._end()

    def _end(self) -> None:
        self._closing = True
        if self._closed:
            return
        # With work on the device the grace to end by itself is running: leave some of it.
        most = min(LINGER, GRACE * self.deadline / 2) if self._enqueued else LINGER
        for connection in self._peers.values():
            connection.end_sending()
        with self._changed:
            # Closed with unread data, a connection loses what is on its way to the others.
            self._changed.wait_for(
                lambda: not any(self._members[rank].is_open for rank in self._peers), most
            )
        self._closed = True

    def _enter(self, name: str, inside: str) -> None:
        if self._failure is not None:
            raise self._error(_At(self._at.number + 1, name, self.step, inside))
        if self._closing:
            raise RuntimeError(f"{name}: the control channel is closed")
        self._before = self._at
        self._at = _At(self._at.number + 1, name, self.step, inside)

    def _leave(self) -> None:
        self._at = self._at._replace(inside="")

    def _error(self, at: _At) -> RankError:
        with self._changed:  # held by the thread while it ends this process: one tells the failure
            error = type(self._failure)(f"rank {self.rank}, {at}: {self._failure}")
            error.code = self._failure.code
            return error

    # ---- messages -------------------------------------------------------------------------------

    def _send(self, rank: int, *message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone: the thread sees it
            self._peers[rank].send(*message)

    def _collect(self, rank: int, at: _At, value: Any) -> None:
        """Take a value (rank 0), and answer all ranks after the last one."""
        with self._changed:
            there = self._gathering.setdefault(at.number, {})
            there[rank] = at.name, value
            names = {name for name, _ in there.values()}
            if len(there) < self.size or len(names) > 1:
                return
            del self._gathering[at.number]
        values = [there[rank][1] for rank in range(self.size)]
        for peer in self._peers:
            self._send(peer, "values", at.number, values)
        with self._changed:
            self._answered = at.number, values
            self._changed.notify_all()

    def _fail(
        self, text: str, kind: type[RankError] = RankMissing, code: int | None = None
    ) -> None:
        """The first failure is the cause; rank 0 sends it to all. code: by default the kind's."""
        with self._changed:
            if self._is_failing:
                return
            self._is_failing = True
        failure = kind(text)
        failure.code = failure.code if code is None else code
        if self.rank == 0:
            word = next(word for word, one in KINDS.items() if one is kind)
            for rank in self._peers:
                self._send(rank, "end", word, str(failure), failure.code)
        with self._changed:
            self._failure = failure  # last: the main thread may end the process when it sees this
            self._changed.notify_all()

    def _receive(self) -> None:
        for key, _ in self._selector.select(self._period):
            rank, connection = key.data, key.fileobj
            member = self._members[rank]
            connection.receive()
            while (message := connection.message()) is not None:
                member.heard = self._now
                self._take(rank, member, *message)
            if connection.ended and not member.has_closed and not self._closing:
                self._fail(
                    f"rank {rank} is gone: its connection ended ({connection.ended}), as when "
                    f"its process or its machine dies; it was last seen {member.host.at}"
                )
            if connection.ended or member.has_closed:
                self._selector.unregister(connection)
                member.is_open = False
                if self.rank != 0 or member.has_closed:  # one that left waits for "left"
                    connection.close()

    def _take(self, rank: int, member: _Member, word: str, *more: Any) -> None:
        if word == "at":
            for position, part in zip(member.positions(), (more[:5], more[5:])):
                position.at, position.since = _At(*part[:4]), self._now - part[4]
        elif word == "value":
            member.host.move(_At(*more[:4]), self._now)
            self._collect(rank, member.host.at, more[4])
        elif word == "values":
            self._answered = more[0], more[1]
        elif word == "end":
            kind, text, code = more
            self._fail(text, KINDS[kind], code)
        elif word == "bye":
            member.host.at, member.has_closed = _At(*more), True
        elif word == "left":
            self._last_words = more[0]

    # ---- the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        before, reported = time.monotonic(), 0.0
        try:
            while not self._closed:
                self._receive()
                now = time.monotonic()
                self._now += min(now - before, max(1.0, 2 * self._period))
                before = now
                self._look()
                with self._changed:
                    self._changed.notify_all()
                if self._now >= reported + self._period:
                    reported = self._now
                    self._report()
        except Exception as error:  # a defect: nothing is watched from now on
            self._fail(f"the control channel of rank {self.rank} failed: {error!r}")
            self._look_at_failure()
        finally:
            self._selector.close()
            for connection in self._peers.values():
                connection.close()

    def _report(self) -> None:
        positions = []
        for position in self._own.positions():
            positions += [*position.at, round(self._now - position.since, 3)]
        for rank in self._peers:
            if self._members[rank].is_open:
                self._send(rank, "at", *positions)

    def _look(self) -> None:
        """Find failures in the positions of the ranks."""
        self._own.heard = self._now
        self._own.host.move(self._at, self._now)
        self._look_at_device()
        for look in (self._look_for_closed, self._look_for_different, self._look_for_late):
            if self._failure is None:
                look()
        self._look_at_failure()

    def _look_at_device(self) -> None:
        """Find the position of the device: in the first collective that it has not done, or before
        that."""
        at = self._own.device.at._replace(inside="")
        try:
            while self._enqueued and self._enqueued[0].work.done():
                at = self._enqueued.popleft().at._replace(inside="")
            if self._enqueued:
                first = self._enqueued[0]
                at = first.at if first.work.begun() else first.before._replace(inside="")
        except Exception as error:  # a fault of the device, or of the network between devices
            if self._failure is None:
                where = self._enqueued[0].at
                text = f"rank {self.rank}, {where}: {str(error)[:MOST_REASON]}"
                self._fail(text)
                if self.rank != 0:
                    self._send(0, "end", "missing", text, os.EX_TEMPFAIL)
        self._own.device.move(at, self._now)

    def _look_for_closed(self) -> None:
        """A rank in a collective that another, which has closed, will not enter."""
        for closed, gone in self._members.items():
            for rank, member in self._members.items():
                for at in (position.at for position in member.positions()):
                    if gone.has_closed and at.inside and at.number > gone.host.at.number:
                        text = f"rank {rank} is {at}, but rank {closed} has ended, {gone.host.at}"
                        self._fail(text)

    def _look_for_different(self) -> None:
        """Ranks in collectives of the same number and different names never meet. Rank 0 judges."""
        if self.rank != 0:
            return
        there: dict[int, int] = {}
        for rank, member in self._members.items():
            at = member.host.at
            other = there.setdefault(at.number, rank) if at.inside else rank
            if self._members[other].host.at.name != at.name:
                first, second = sorted([rank, other], reverse=True)
                self._fail(
                    f"the ranks are at different collectives: rank {first} is "
                    f"{self._members[first].host.at}, rank {second} "
                    f"{self._members[second].host.at}; it is number {at.number} of each",
                    RanksDiffer,
                )

    def _silence(self, rank: int) -> float:
        """Seconds since its last message, or 0 if it answers."""
        silent = self._now - self._members[rank].heard
        return silent if silent > SILENT * self.deadline else 0.0

    def _look_for_late(self) -> None:
        """A host or a device that waits almost for the deadline. Rank 0 judges, the others judge
        rank 0."""
        is_any_silent = any(map(self._silence, self._members))
        late = []
        for rank in self._members if self.rank == 0 else [self.rank]:
            for position in self._members[rank].positions():
                at, seconds = position.at, self._now - position.since
                is_patient = at.inside == "patient gather" and not is_any_silent
                if at.inside and not is_patient and seconds >= EARLY * self.deadline:
                    if not self._silence(rank):
                        late.append((at.number, rank, at, seconds))
        if not late:
            return
        _, rank, at, seconds = min(late)
        waited = f"rank {rank} waited {seconds:.1f} s {at}"
        if self.rank == 0:
            self._fail(f"{waited}: {self._absent(rank, at)}")
        elif silent := self._silence(0):
            self._fail(
                f"{waited}: rank 0 does not answer for {silent:.1f} s: it is stopped, or its "
                f"machine is gone; it was last seen {self._members[0].host.at}"
            )

    def _absent(self, noticed: int, at: _At) -> str:
        """Describe the ranks that have not come to where one waits (rank 0)."""
        words = {}
        for rank, member in sorted(self._members.items()):
            position, which = member.host, "it"
            if at.inside == "device" and position.at.number >= at.number:  # the host has come
                position, which = member.device, "its device"
            there, silent = position.at, self._silence(rank)
            has_come = there.number >= at.number
            if rank == noticed or (has_come and not silent):
                continue
            words[rank] = "came" if has_come else "has not come"
            if silent:
                words[rank] += (
                    f" and does not answer for {silent:.1f} s: it is stopped, or its machine is "
                    f"gone (last seen {there})"
                )
            else:
                words[rank] += f" (for {self._now - position.since:.1f} s {which} is {there})"
        listed = [f"rank {rank} {said}" for rank, said in [*words.items()][:MOST_DESCRIBED]]
        if len(words) > MOST_DESCRIBED:
            listed.append(f"and so with {name_ranks([*words][MOST_DESCRIBED:])}")
        return "; ".join(listed) or "all ranks have come, so that the transfer itself hangs"

    def _look_at_failure(self) -> None:
        """Exit if the main thread waits in C, where no exception reaches it."""
        if self._failure is None:
            return
        with self._changed:
            at = self._at
            if at.inside == "watched":
                self._exit(at)
            if not self._enqueued:
                self._doomed = None
            elif self._doomed is None:
                self._doomed = self._now
            elif self._now - self._doomed >= GRACE * self.deadline:
                self._exit(self._enqueued[0].at)

    def _exit(self, at: _At) -> None:
        line = f"needle: rank {self.rank}, {at}: {self._failure}\n".encode()[:4000]
        with contextlib.suppress(OSError):  # a stderr that is not read must not delay the end
            if select.select([], [2], [], 1.0)[1]:
                os.write(2, line)
        os._exit(self._failure.code)
