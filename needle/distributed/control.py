"""The control channel: small values that ranks exchange, and the end of all when one is missing.

    control = Control.join(place, {"needle": "0.1.0", ...})  # raises if ranks differ in these facts
    losses = control.gather("losses", loss)                  # one of each rank, in their order
    stop = control.broadcast("stop", reason)                 # rank 0's
    with control.watched("the weights"): ...                 # a collective of NCCL or MPI
    control.leave("the disk is full"), or control.close()

All ranks call these in the same order. Rank 0 is the centre: it listens at the address of the
environment, the others connect, and both ends prove that they have the key of the start
(multiprocessing.connection). Messages are JSON; nothing is unpickled.

A thread of each rank reads its connections and the clock. A connection that ends, or a collective
that is not done within `deadline` seconds, ends this process with a line on stderr and exit code 75
(os.EX_TEMPFAIL: a restart may help). Rank 0 passes the reason on, so that all ranks end, each
saying where it was. Time in which this process was stopped does not count. A collective that is
enqueued on a device (`goes_on`) is watched until the device has done it; its deadline begins when
the device reaches it, and no call waits.

    {"in": name, "value": value}                    to rank 0: the value of a gather
    {"values": [value, ...]}                        from rank 0, in the order of ranks
    {"end": reason, "code": code, "said": bool}     to rank 0, and from there to all; said: rank 0
                                                    has printed the reason
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, NoReturn, Protocol

from needle.distributed.environment import Place
from needle.files import printable, read_secret, settings_file

GREETING = 1 << 10  # bytes, at most
DEADLINE = 60.0  # seconds in which all ranks must come to a collective
EARLY = 0.8  # of the deadline: rank 0 names missing ranks before the others give up
LOOK = 1.0  # seconds between two looks at the clock, at most
LINGER = 1.0  # seconds for rank 0 to report the error that another rank met too
PATIENCE = 2.0  # seconds for a program at the port of rank 0 to answer
MOST_REASON = 2000  # characters
LOOPBACK = "127.0.0.1"
NO_KEY = (
    "needle: warning: NEEDLE_RANKS_KEY is not set, so that any program that can connect to rank 0 "
    "may claim a rank; make a key by openssl rand -hex 32, and export it on all machines"
)
# Of a program that is no rank of this start. Python 3.11 asserts what it reads.
FOREIGN = (AuthenticationError, EOFError, OSError, ValueError, AssertionError)


class RankError(RuntimeError):
    """The ranks cannot continue. `code`: the exit code; os.EX_TEMPFAIL (75) if a restart may
    help."""

    def __init__(self, text: str, code: int = os.EX_TEMPFAIL) -> None:
        super().__init__(text)
        self.code = code


class RankFailed(RuntimeError):
    """Another rank met an error that ends the run; that rank reports it."""

    code = 1  # the exit code


class Work(Protocol):
    """A collective that was enqueued on a device. Another thread asks; an error means that it
    cannot end well."""

    def begun(self) -> bool: ...
    def done(self) -> bool: ...
    def wait(self) -> None:
        """Let the device go on after it alone. The user's thread calls."""


@dataclasses.dataclass(eq=False)
class _At:
    """A position: in or after a collective. limit: seconds in which it must change."""

    where: str
    limit: float = math.inf


class Control:
    """The control channel of a rank; `join` makes it. Used by one thread.

    Attributes: place, rank, size, deadline; step, which the user sets and messages quote."""

    def __init__(self, place: Place, peers: dict[int, Connection], deadline: float) -> None:
        self.place, self.rank, self.size, self.deadline = place, place.rank, place.size, deadline
        self.step = 0
        self._peers = peers
        self._at = _At("at the start")
        self._works: deque[tuple[_At, Work]] = deque()  # the thread removes those that are done
        self._spent: dict[_At, float] = {}  # seconds
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # (rank, message) of gathers
        self._came: dict[int, Any] = {}  # the messages of the gather that rank 0 is in
        self._is_closing = self._is_closed = False
        self._ending = threading.Lock()  # held for good by the thread that ends this process
        if peers:
            threading.Thread(target=self._watch, name="needle control", daemon=True).start()

    @classmethod
    def join(
        cls, place: Place, facts: dict[str, str], seconds: float = 60.0, deadline: float = DEADLINE
    ) -> Control:
        """Return the channel once all ranks have come and agree in their facts (configuration,
        build, versions). RankError names the ranks that did not come within so many seconds, or
        the first that differs from rank 0, and in what; other ranks raise RankFailed for it.
        ValueError if nothing says how to find rank 0; FileError if the key cannot be read."""
        if place.size == 1:
            return cls(place, {}, deadline)
        if place.host is None or place.port is None:
            raise ValueError(
                f"{place.launcher} does not say where rank 0 is: set MASTER_ADDR (its machine) and "
                "MASTER_PORT for all ranks"
            )
        key = key_of(place).encode()
        if place.rank == 0:
            control = cls(place, _accept(place, key, seconds, deadline), deadline)
        else:
            control = cls(place, {0: _connect(place, key, seconds, deadline)}, deadline)
        told = control.gather("the facts", {"the number of ranks": place.size, **facts}, True)
        problem = _difference(told)
        if problem:
            control.close()
            raise RankError(problem, 1) if place.rank == 0 else RankFailed(problem)
        return control

    # ---- collectives ----------------------------------------------------------------------------

    def gather(self, name: str, value: Any, patient: bool = False) -> list[Any]:
        """Return the values of all ranks, the same list at each, as JSON gives them: a tuple is a
        list. `patient`: wait longer than the deadline for ranks that live. TypeError for a value
        that is no JSON."""
        message = {"in": name, "value": json.loads(json.dumps(value))}
        limit = EARLY * self.deadline if self.rank == 0 else self.deadline
        with self.watched(name, math.inf if patient else limit):
            if self.rank != 0:
                _send(self._peers[0], message)
                return self._inbox.get()[1]["values"]
            self._came = {0: message}
            while len(self._came) < self.size:
                rank, theirs = self._inbox.get()
                self._came[rank] = theirs
                if theirs["in"] != name:
                    self._end(f"rank {rank} is in {theirs['in']!r}, and rank 0 in {name!r}", 1)
            values = [self._came[rank]["value"] for rank in range(self.size)]
            self._came = {}
            for peer in self._peers.values():
                _send(peer, {"values": values})
            return values

    def broadcast(self, name: str, value: Any = None, patient: bool = False) -> Any:
        """Return rank 0's value; the others' are ignored."""
        return self.gather(name, value if self.rank == 0 else None, patient)[0]

    @contextlib.contextmanager
    def watched(self, name: str, limit: float | None = None) -> Iterator[Control]:
        """Run the block as a collective of another library, which a device may go on with. limit:
        seconds, in the place of the deadline."""
        if self._is_closed:
            raise RuntimeError(f"{name}: the control channel is closed")
        limit = self.deadline if limit is None else limit
        self._at = _At(f"in {name!r} at step {self.step}", limit)
        try:
            yield self
        finally:
            self._at = _At(f"after {name!r} at step {self.step}")

    def goes_on(self, work: Work) -> None:
        """Watch the collective of a block after its end, until the device has done it."""
        self._works.append((_At(f"{self._at.where}, on its device", self.deadline), work))

    def leave(self, reason: str, code: int = 1) -> None:
        """End the other ranks with this exit code. Rank 0 has printed the reason. Another rank
        does it after this call, in which it ends without a word if rank 0 leaves."""
        self._is_closing = True
        if self.rank > 0 and self._peers:
            time.sleep(LINGER)
            reason = f"rank {self.rank} stopped at step {self.step}: {reason}"
        self._is_closed = True
        _tell(self._peers, reason[:MOST_REASON], code, said=self.rank == 0)

    def close(self) -> None:
        """End the channel in order. All ranks call it."""
        self._is_closing = True
        if not self._is_closed:
            self.gather("the end", None)
        self._is_closed = True

    # ---- the end and the thread ------------------------------------------------------------------

    def _end(self, reason: str, code: int = os.EX_TEMPFAIL) -> NoReturn:
        """End all ranks, this one with a line about where it was."""
        self._ending.acquire()
        _tell(self._peers, reason, code)
        line = printable(f"needle: rank {self.rank}, {self._at.where}: {reason}\n")
        with contextlib.suppress(OSError):  # a closed stderr
            # A full one must not delay the end.
            if select.select([], [2], [], 1.0)[1]:
                os.write(2, line.encode(errors="backslashreplace"))
        os._exit(code)

    def _watch(self) -> None:
        period, before = min(LOOK, self.deadline / 20), time.monotonic()
        ranks = {peer: rank for rank, peer in self._peers.items()}
        while not self._is_closed:
            for peer in wait(ranks, period):
                try:
                    message = json.loads(peer.recv_bytes())
                except (OSError, EOFError, ValueError):  # closed, or cut off
                    rank = ranks.pop(peer)
                    if not self._is_closing:
                        self._end(f"rank {rank} is gone")
                    continue
                if "end" not in message:
                    self._inbox.put((ranks[peer], message))
                elif message["said"]:
                    os._exit(message["code"])
                elif not self._is_closed:
                    self._end(message["end"], message["code"])
            now = time.monotonic()
            self._look(min(now - before, 2 * period))
            before = now

    def _look(self, passed: float) -> None:
        """Find a host or a device that has waited too long, after so many seconds more."""
        positions = [self._at]
        try:
            while self._works and self._works[0][1].done():
                self._works.popleft()
            if self._works and self._works[0][1].begun():
                positions.append(self._works[0][0])
        except Exception as error:  # a fault of the device, or of the network between devices
            self._end(f"rank {self.rank}, {self._works[0][0].where}: {error}"[:MOST_REASON])
        self._spent = {at: self._spent.get(at, -passed) + passed for at in positions}
        for at, seconds in self._spent.items():
            if seconds > at.limit:
                came = {self.rank, *self._came}
                missing = [rank for rank in range(self.size) if rank not in came]
                who = name_ranks(missing) if self._came or len(missing) == 1 else "a rank"
                self._end(f"rank {self.rank} waited {seconds:.0f} s {at.where}: {who} did not come")


def _send(peer: Connection, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it is gone: the thread sees it
        peer.send_bytes(json.dumps(message).encode())


def _tell(
    peers: dict[int, Connection], reason: str, code: int = os.EX_TEMPFAIL, said: bool = False
) -> None:
    """Send the end of all ranks."""
    for peer in peers.values():
        _send(peer, {"end": reason, "code": code, "said": said})


def name_ranks(ranks: list[int]) -> str:
    """Return `rank 2`, or `ranks 1, 2 and 5`."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _difference(told: list[dict[str, Any]]) -> str:
    """Describe the first fact that differs from rank 0's; "" if all are equal."""
    for rank, theirs in enumerate(told):
        for name in {**told[0], **theirs}:
            mine, other = told[0].get(name), theirs.get(name)
            if mine != other:
                return f"rank {rank}: {name} is {other!r}, at rank 0 {mine!r}"
    return ""


# ---- the start ----------------------------------------------------------------------------------


def key_of(place: Place) -> str:
    """Return the secret of a start: NEEDLE_RANKS_KEY; without it on one machine that of the user,
    in a file; on several none, since no launcher distributes one, and rank 0 warns."""
    if not place.key and place.is_local:
        path = settings_file("ranks.key")
        return read_secret(path, "key of the ranks (NEEDLE_RANKS_KEY takes its place)")
    if not place.key and place.rank == 0:
        print(NO_KEY, file=sys.stderr)
    return place.key


def _accept(place: Place, key: bytes, seconds: float, deadline: float) -> dict[int, Connection]:
    """Listen for all other ranks: on loopback if they are on this machine, else on all interfaces.
    A thread greets each connection, so that one that says nothing holds up no start."""
    peers: dict[int, Connection] = {}

    def greet(sock: socket.socket) -> None:
        one = _connection(sock, deadline)
        with contextlib.suppress(*FOREIGN):
            deliver_challenge(one, key)
            answer_challenge(one, key)
            job, rank = json.loads(one.recv_bytes(GREETING))
            if job == place.job and 0 < rank < place.size:
                peers.setdefault(rank, one)

    with _listen(place) as server:
        server.settimeout(0.05)
        end = time.monotonic() + seconds
        while len(peers) < place.size - 1 and time.monotonic() < end:
            with contextlib.suppress(OSError):  # none has come, or it is gone again
                threading.Thread(target=greet, args=server.accept()[:1], daemon=True).start()
    missing = [rank for rank in range(1, place.size) if rank not in peers]
    if missing:
        problem = (
            f"{name_ranks(missing)} of {place.size} did not come within {seconds:g} s: read what "
            f"{place.launcher} says of them, and check that their machines can connect to "
            f"{socket.gethostname()}, port {place.port}"
        )
        _tell(peers, problem)
        raise RankError(problem)
    return peers


def _listen(place: Place) -> socket.socket:
    host, more = (LOOPBACK if place.is_local else ""), {}
    if not place.is_local and socket.has_dualstack_ipv6():
        more = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    try:
        return socket.create_server((host, place.port), backlog=1024, **more)
    except OSError as error:
        raise RankError(
            f"rank 0 cannot listen: {error.strerror}: set another MASTER_PORT for all ranks"
        ) from error


def _connect(place: Place, key: bytes, seconds: float, deadline: float) -> Connection:
    host = LOOPBACK if place.is_local else place.host
    end, foreign = time.monotonic() + seconds, ""
    while True:
        try:
            sock = socket.create_connection((host, place.port), timeout=PATIENCE)
            one = _connection(sock, deadline)
            if not one.poll(PATIENCE):
                raise TimeoutError("no answer")
            answer_challenge(one, key)
            deliver_challenge(one, key)
            one.send_bytes(json.dumps([place.job, place.rank]).encode())
            return one
        except FOREIGN as error:
            if not isinstance(error, OSError):
                foreign = "another program or key"
            if time.monotonic() > end:  # rank 0 may have given up a moment before
                last = str(error) if isinstance(error, OSError) else ""
                why = ", then ".join(filter(None, (foreign, last)))
                raise RankError(
                    f"rank {place.rank} did not reach rank 0 at {host}:{place.port} within "
                    f"{seconds:g} s: {why}: does it run, may its machine be reached from here, is "
                    "MASTER_ADDR that machine, and NEEDLE_RANKS_KEY the same on all?"
                ) from error
            time.sleep(0.1)


def _connection(sock: socket.socket, seconds: float) -> Connection:
    """Make a connection on which no end waits longer for the rest of a message."""
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    return Connection(sock.detach())
