"""The control channel: what the ranks say to each other in small messages, and who says that a rank
is missing.

    control = Control.join(place, {"needle": "0.1.0", ...}, folder)
    losses = control.gather("losses", loss)                 # one of each rank, in their order
    stop = control.broadcast("stop", reason)                # rank 0's
    with control.watched("all_gather weights"): ...         # a collective that goes elsewhere
    control.leave("the disk is full"), or control.close()

All ranks call these in the same order. Rank 0 stands in the middle. The collectives are numbered,
and a thread of each rank tells rank 0 its number, name and step some twenty times a deadline, so
that entering and leaving a collective costs an assignment, and so that silence tells as well.

Within `deadline` seconds of entering a collective it is done or there is one message, the same at
all ranks: who noticed, in which collective at which step, and which ranks have not come, do not
answer (stopped, or the machine is gone) or are gone (the connection ended: the process died). A
rank that says itself why it ends (`leave`) is quoted. `gather` then raises; a watched collective
hangs in C, and the thread prints the message and ends the process with the exit code of the error,
75 where starting again may help. For that the collective must release the GIL while it waits.
Outside of collectives nothing is interrupted: the next one raises.

A collective that is only enqueued on a device (`goes_on`) is watched until the device has done it,
and nobody waits for that: the thread asks now and then. Its deadline begins when the device comes
to it, behind all the work before it, and it is the devices' places that say which rank has not
come. The main thread may then stand anywhere, in a wait for a result of the device among it, which
no exception reaches: once a failure is known the process gets some seconds to end by itself.

Messages, as JSON arrays whose types messages.py checks:

    ["at", number, name, step, inside, seconds,    to and from rank 0, again and again: the host's
        number, name, step, inside, seconds]       place, and the device's
    ["value", number, name, step, text]            to rank 0: this rank's JSON for a gather
    ["values", number, [text, ...]]                from rank 0, in the ranks' order
    ["late", number, name, step, inside, seconds]  to rank 0: for this rank, which has waited so
                                                   long, the deadline is about to pass
    ["end", kind, text, code]                      from rank 0 to all, or of a rank that leaves
    ["bye", number, name, step]                    the last collective that this rank came to
    ["left", reason]                               from rank 0: what it has told people at its end
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
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from needle.distributed import rendezvous
from needle.distributed.environment import Place
from needle.distributed.messages import LIMIT, Connection, decode, encode
from needle.distributed.rendezvous import KINDS, RankError, RankMissing, RanksDiffer, name_ranks

__all__ = ["Control", "RankError", "RankMissing", "RanksDiffer"]

LOOKS = 20  # in a deadline
SLOWEST_LOOK = 1.0  # seconds
EARLY = 0.8  # of the deadline: the thread looks some time later, and asks rank 0
SILENT = 0.25  # of the deadline: without a word for so long a rank does not answer
GRACE = 0.1  # of the deadline: for the main thread to end by itself, where its device hangs
LINGER = 1.0  # seconds for the last words, when this rank closes
MOST_DESCRIBED = 8  # ranks of a message
MOST_REASON = 1000  # characters; of rank 0, whose reason may quote one, some more


class _At(NamedTuple):
    """Where a rank is: in, or behind, a collective."""

    number: int
    name: str
    step: int
    inside: str = ""  # "gather", "watched", of a device "device", or "" behind it

    def __str__(self) -> str:
        if not self.number:
            return "before the first collective"
        return f"{'in' if self.inside else 'behind'} {self.name!r} at step {self.step}"


class Work(Protocol):
    """A collective that was handed to a device. Asked from another thread; an error says that it
    cannot end well."""

    def begun(self) -> bool: ...
    def done(self) -> bool: ...


class _Enqueued(NamedTuple):
    at: _At
    before: _At  # the collective before it
    work: Work


@dataclasses.dataclass
class _Peer:
    """What rank 0 knows of a rank, or a rank of rank 0."""

    connection: Connection
    at: _At = _At(0, "", 0)
    since: float = 0.0  # when it came there; this and the others by this process' clock
    device: _At = _At(0, "", 0)
    device_since: float = 0.0
    heard: float = 0.0  # its last word
    is_open: bool = True
    has_closed: bool = False  # it said bye: `at` is its last collective


class Control:
    """The control channel of a rank; made by `join`. Used by one thread. `step` is for the user to
    set: messages quote it. Attributes: place, rank, size, deadline."""

    def __init__(self, place: Place, connections: dict[int, Connection], deadline: float) -> None:
        self.place, self.rank, self.size, self.deadline = place, place.rank, place.size, deadline
        self.step = 0
        self._at = self._before = _At(0, "", 0)  # the thread reads it, as a whole
        self._enqueued: deque[_Enqueued] = deque()  # the thread takes from it what is done
        self._period = min(deadline / LOOKS, SLOWEST_LOOK)
        self._failure: tuple[type[RankError], str, int] | None = None  # the first is the cause
        self._is_failing = False  # somebody says it
        self._lock = threading.Lock()
        self._answered: tuple[int, list[Any]] = 0, []  # the last gather that is done
        self._gathering: dict[int, dict[int, tuple[_At, str, Any]]] = {}  # by number, by rank
        self._closing, self._closed = False, threading.Event()
        self._last_words = ""  # of rank 0
        self._peers = {rank: _Peer(connection) for rank, connection in connections.items()}
        # Whoever holds the lock reads: a gather itself, so that no other thread stands between, and
        # else the thread.
        self._reading, self._selector = threading.Lock(), selectors.DefaultSelector()
        for rank, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        # The thread's: seconds in which this process was not stopped, where it saw this rank, since
        # when, and when it asked rank 0 who is late.
        self._now, self._seen, self._since = 0.0, self._at, 0.0
        self._asked: float | None = None
        self._device, self._device_since = self._at, 0.0
        self._doomed: float | None = None  # since when a failure meets work on the device
        self._reported = 0.0
        self._thread = threading.Thread(target=self._watch, name="needle control", daemon=True)
        if self._peers:
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
        """The channel, when all ranks are there and have the same facts (configuration, build,
        versions). `folder` is one that all ranks see: rank 0 leaves its address there while they
        come. RankMissing names the ranks that did not come within so many seconds, RanksDiffer
        those that differ from rank 0, and in what: every rank that came raises the same."""
        connections = {}
        if place.size > 1:
            connections = rendezvous.meet(place, facts, folder, seconds, deadline)
        return cls(place, connections, deadline)

    # ---- collectives ----------------------------------------------------------------------------

    def gather(self, name: str, value: Any, patient: bool = False) -> list[Any]:
        """The values of all ranks, the same list at each: what JSON makes of them, a tuple a list.
        TypeError and ValueError for what is no JSON, or more than a MiB; RankMissing; RanksDiffer
        where another rank is at another collective."""
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
                self._collect(0, at, text)
            else:
                self._tell(0, ["value", *at[:3], text])
            return self._answer(at)
        finally:
            self._leave()

    def broadcast(self, name: str, value: Any = None, patient: bool = False) -> Any:
        """Rank 0's value. The others' are not looked at."""
        return self.gather(name, value if self.rank == 0 else None, patient)[0]

    def watched(self, name: str) -> _Watched:
        """A context in which this rank is in a collective that other libraries carry out."""
        return _Watched(self, name)

    def leave(self, reason: str, code: int = 1) -> bool:
        """The others end as well, quoting the reason, with the same exit code. Whether rank 0
        leaves too, with this reason, one that quotes it, or the one that is quoted here."""
        own = reason[:MOST_REASON]
        text = f"rank {self.rank} stopped at step {self.step}: {own}"
        if self._failure is not None and self._failure[1] in reason:
            own = self._failure[1]  # behind where this rank was
        if self.rank == 0:
            self._fail(RankMissing, text, code)
            for rank in self._peers:
                self._tell(rank, ["left", reason[: 3 * MOST_REASON]])
        elif self._failure is None:
            self._tell(0, ["end", "missing", text, code])
        self._end()
        said = self._last_words
        return bool(said) and (own in said or said[:MOST_REASON] in own)

    def close(self) -> None:
        """This rank comes to no further collective, and that is right so."""
        if not self._closing:
            self._closing = True  # before it is answered
            for rank in self._peers:
                self._tell(rank, ["bye", *self._at[:3]])
        self._end()

    def _end(self) -> None:
        self._closing = True
        if self._closed.is_set():
            return
        # With work on the device the time to end by itself is running: some of it is left.
        most = GRACE * self.deadline / 2 if self._enqueued else LINGER
        end = time.monotonic() + min(LINGER, most)
        with self._reading:
            for peer in self._peers.values():
                peer.connection.end_sending()
            # Closed while something is unread, a connection drops what is on its way to the others.
            while time.monotonic() < end and any(peer.is_open for peer in self._peers.values()):
                self._hear(end - time.monotonic())
        self._closed.set()

    def _enter(self, name: str, inside: str) -> None:
        if self._failure is not None:
            raise self._error(_At(self._at.number + 1, name, self.step, inside))
        if self._closing:
            raise RuntimeError(f"{name}: the control channel is closed")
        self._before = self._at
        self._at = _At(self._at.number + 1, name, self.step, inside)

    def _leave(self) -> None:
        self._at = self._at._replace(inside="")

    def _answer(self, at: _At) -> list[Any]:
        with self._reading:
            while self._answered[0] != at.number and self._failure is None:
                self._hear(self._period)  # the thread may have found out meanwhile who is late
        if self._answered[0] == at.number:
            return self._answered[1]
        raise self._error(at)

    def _error(self, at: _At) -> RankError:
        kind, text, code = self._failure
        error = kind(f"rank {self.rank}, {at}: {text}")
        error.code = code
        return error

    # ---- rank 0 in the middle -------------------------------------------------------------------

    def _collect(self, rank: int, at: _At, text: str) -> None:
        """Rank 0: a value of a rank, and when it was the last one, the answer to all."""
        value = decode(text)
        with self._lock:
            there = self._gathering.setdefault(at.number, {})
            other = next(iter(there.items()), None)
            there[rank] = at, text, value
            if len(there) == self.size:
                del self._gathering[at.number]
        if other is not None and other[1][0].name != at.name:
            self._fail(
                RanksDiffer,
                f"the ranks are at different collectives: rank {rank} is {at}, rank {other[0]} "
                f"{other[1][0]}; it is number {at.number} of each",
            )
        elif len(there) == self.size and self._failure is None:
            _, texts, values = zip(*(there[rank] for rank in range(self.size)))
            for peer in self._peers:
                self._tell(peer, ["values", at.number, texts])
            self._answered = at.number, list(values)

    def _tell(self, rank: int, message: list[Any]) -> None:
        connection = self._peers[rank].connection
        with contextlib.suppress(OSError):  # it is gone: the thread sees it, and says so
            connection.send(encode(message, connection.limit))

    def _fail(self, kind: type[RankError], text: str, code: int | None = None) -> None:
        """The first failure is the cause; rank 0 tells it to all."""
        code = kind.code if code is None else code
        with self._lock:
            if self._is_failing:
                return
            self._is_failing = True
        if self.rank == 0:
            word = next(word for word, one in KINDS.items() if one is kind)
            for rank in self._peers:
                self._tell(rank, ["end", word, text, code])
        self._failure = kind, text, code  # last: who sees it may end the process

    # ---- what has come --------------------------------------------------------------------------

    def _hear(self, seconds: float) -> None:
        """Takes it, waiting so long for the first of it."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if not self._hear_of(key.data):
                peer = self._peers[key.data]
                self._selector.unregister(key.fileobj)
                peer.is_open = False
                if self.rank != 0 or peer.has_closed:  # who left waits for rank 0's last words
                    key.fileobj.close()

    def _hear_of(self, rank: int) -> bool:
        """What has come of a rank; whether more may come."""
        peer = self._peers[rank]
        try:
            for message in peer.connection.receive():
                peer.heard = self._now
                self._take(rank, peer, message)
        except EOFError as error:
            if not self._closing:
                self._fail(
                    RankMissing,
                    f"rank {rank} is gone: its connection ended ({error}), as when its process or "
                    f"its machine dies; it was last seen {peer.at}",
                )
            return False
        except ValueError as error:
            self._fail(RanksDiffer, f"rank {rank} sent what is no message: {error}")
            return False
        return not peer.has_closed

    def _take(self, rank: int, peer: _Peer, message: list[Any]) -> None:
        word, *more = message
        if word == "at":
            at, device = _At(*more[:4]), _At(*more[5:9])
            if at != peer.at:
                peer.at, peer.since = at, self._now - more[4]
            if device != peer.device:
                peer.device, peer.device_since = device, self._now - more[9]
        elif word == "end" and more[0] in KINDS and more[2] in range(1, 256):
            self._fail(KINDS[more[0]], more[1], more[2])
        elif word == "bye":
            peer.at, peer.has_closed = _At(*more), True
        elif word == "value" and self.rank == 0:
            peer.at, peer.since = _At(*more[:3], "gather"), self._now
            self._collect(rank, peer.at, more[3])
        elif word == "late" and self.rank == 0:
            self._fail(RankMissing, self._absent(rank, _At(*more[:4]), more[4]))
        elif word == "values" and rank == 0 and len(more[1]) == self.size:
            self._answered = more[0], [decode(text) for text in more[1]]
        elif word == "left" and rank == 0:
            self._last_words = more[0]
        else:
            raise ValueError(f"{message!r:.60}")

    # ---- the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        before = time.monotonic()
        try:
            while not self._closed.is_set():
                # A hang is over as soon as its cause is known; else there is time.
                if self._at.inside == "watched":
                    self._selector.select(self._period)
                else:
                    self._closed.wait(self._period)
                if self._reading.acquire(blocking=False):
                    try:
                        self._hear(0.0)
                    finally:
                        self._reading.release()
                now = time.monotonic()
                self._now += min(now - before, max(1.0, 2 * self._period))
                before = now
                self._look()
                if self._now >= self._reported + self._period:
                    self._reported = self._now
                    self._report()
        except Exception as error:  # whatever it is: from now on nobody watches
            self._fail(RankMissing, f"the control channel of rank {self.rank} failed: {error!r}")
            self._look()
        finally:
            with self._reading:
                self._selector.close()
                for peer in self._peers.values():
                    peer.connection.close()

    def _report(self) -> None:
        seconds = [round(self._now - since, 3) for since in (self._since, self._device_since)]
        for rank, peer in self._peers.items():
            if peer.is_open:
                self._tell(rank, ["at", *self._seen, seconds[0], *self._device, seconds[1]])

    def _look(self) -> None:
        """What follows from what is known now."""
        at = self._at
        if at != self._seen:
            self._seen, self._since = at, self._now
        self._look_at_device()
        if self._failure is None:
            self._look_for_closed()
        if self._failure is None:
            self._look_for_the_late(at)
        if self._failure is None and at.inside and self.rank == 0:
            self._look_for_other_places(at)
        if self._failure is None:
            return
        if at.inside == "watched" and self._at == at:
            self._die(at)
        if not self._enqueued:
            self._doomed = None
        elif self._doomed is None:
            self._doomed = self._now
        elif self._now - self._doomed >= GRACE * self.deadline:
            self._die(self._enqueued[0].at)

    def _look_at_device(self) -> None:
        """Where the device is: in the first collective that it has not done, or before it."""
        device = self._device._replace(inside="")
        try:
            while self._enqueued and self._enqueued[0].work.done():
                device = self._enqueued.popleft().at._replace(inside="")
            if self._enqueued:
                first = self._enqueued[0]
                device = first.at if first.work.begun() else first.before._replace(inside="")
        except Exception as error:  # a fault of the device, of the network between devices
            if self._failure is None:
                text = f"rank {self.rank}, {self._enqueued[0].at}: {str(error)[:MOST_REASON]}"
                self._fail(RankMissing, text)
                if self.rank != 0:
                    self._tell(0, ["end", "missing", text, RankMissing.code])
        if device != self._device:
            self._device, self._device_since = device, self._now

    def _look_for_the_late(self, at: _At) -> None:
        """This rank waits too long, its main thread or its device."""
        is_patient = at.inside == "patient gather" and not any(map(self._is_silent, self._peers))
        waits = [(at, self._since)] if at.inside and not is_patient else []
        waits += [(self._device, self._device_since)] if self._device.inside else []
        waits = [(at, self._now - since) for at, since in waits]
        late = [(at, seconds) for at, seconds in waits if seconds >= EARLY * self.deadline]
        if late:
            self._be_late(*late[-1])
        else:
            self._asked = None

    def _look_for_closed(self) -> None:
        """A collective in which one is, and to which one that has closed will not come."""
        places = [(self.rank, self._seen), (self.rank, self._device)]
        for rank, peer in self._peers.items():
            places += [(rank, peer.at), (rank, peer.device)]
        for closed, peer in self._peers.items():
            for rank, at in places:
                if peer.has_closed and at.inside and at.number > peer.at.number:
                    text = f"rank {rank} is {at}, but rank {closed} has ended, {peer.at}"
                    self._fail(RankMissing, text)

    def _look_for_other_places(self, at: _At) -> None:
        """Ranks in a collective of the same number and another name never meet."""
        for rank, peer in self._peers.items():
            there = peer.at
            if there.inside and there.number == at.number and there.name != at.name:
                self._fail(
                    RanksDiffer,
                    f"the ranks are at different collectives: rank {rank} is {there}, rank 0 {at}; "
                    f"it is number {at.number} of each",
                )

    def _is_silent(self, rank: int) -> bool:
        return self._now - self._peers[rank].heard > SILENT * self.deadline

    def _be_late(self, at: _At, seconds: float) -> None:
        """Here the deadline is about to pass. Rank 0 knows who did not come."""
        if self.rank == 0:
            self._fail(RankMissing, self._absent(0, at, seconds))
            return
        waited = _waited(self.rank, at, seconds)
        first = self._peers[0]
        silent = self._now - first.heard
        if first.has_closed:
            self._fail(RankMissing, f"{waited}; rank 0 has ended before")
        elif silent > SILENT * self.deadline or (
            self._asked is not None and self._now - self._asked > 4 * self._period
        ):
            self._fail(
                RankMissing,
                f"{waited}: rank 0 does not answer for {silent:.1f} s: it is "
                f"stopped, or its machine is gone; it was last seen {first.at}",
            )
        elif self._asked is None:
            self._asked = self._now
            self._tell(0, ["late", *at, seconds])

    def _absent(self, noticed: int, at: _At, seconds: float) -> str:
        """Rank 0's answer to who has not come to where a rank waits."""
        hosts = {0: (self._seen, self._since)}
        hosts |= {rank: (peer.at, peer.since) for rank, peer in self._peers.items()}
        devices = {0: (self._device, self._device_since)}
        devices |= {rank: (peer.device, peer.device_since) for rank, peer in self._peers.items()}
        words = {}
        for rank, (there, since) in hosts.items():
            silent = self._now - self._peers[rank].heard if rank else 0.0
            who = "it"
            if at.inside == "device" and there.number >= at.number:  # the host has come
                (there, since), who = devices[rank], "its device"
            has_come = there.number > at.number or there[:2] == (at.number, at.name)
            is_silent = silent > SILENT * self.deadline
            if rank == noticed or (has_come and not is_silent):
                continue
            words[rank] = "came" if has_come else "has not come"
            if is_silent:
                words[rank] += (
                    f" and does not answer for {silent:.1f} s: it is stopped, or its machine is "
                    f"gone (last seen {there})"
                )
            else:
                words[rank] += f" (for {self._now - since:.1f} s {who} is {there})"
        listed = [f"rank {rank} {said}" for rank, said in [*words.items()][:MOST_DESCRIBED]]
        if len(words) > MOST_DESCRIBED:
            listed.append(f"and so with {name_ranks([*words][MOST_DESCRIBED:])}")
        said = "; ".join(listed) or "all ranks have come, so that the transfer itself hangs"
        return f"{_waited(noticed, at, seconds)}: {said}"

    def _die(self, at: _At) -> None:
        """The main thread waits in C, where no exception reaches it."""
        _, text, code = self._failure
        line = f"needle: rank {self.rank}, {at}: {text}\n".encode()[:4000]
        with contextlib.suppress(OSError):  # a stderr that nobody reads holds up no end
            if select.select([], [2], [], 1.0)[1]:
                os.write(2, line)
        os._exit(code)


def _waited(rank: int, at: _At, seconds: float) -> str:
    return f"rank {rank} waited {seconds:.1f} s {at}"


class _Watched:
    """`with control.watched(name)`."""

    __slots__ = ("_control", "_name")

    def __init__(self, control: Control, name: str) -> None:
        self._control, self._name = control, name

    def __enter__(self) -> _Watched:
        self._control._enter(self._name, "watched")
        return self

    def goes_on(self, work: Work) -> None:
        """In the block: behind it the collective is watched until the device has done it."""
        control = self._control
        at = control._at._replace(inside="device")
        control._enqueued.append(_Enqueued(at, control._before, work))

    def __exit__(self, *exception: object) -> None:
        self._control._leave()
