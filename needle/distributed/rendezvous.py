"""Find the other ranks of a start, and check that they belong together.

Rank 0 listens, on loopback if all ranks are on its machine, else on all interfaces, IPv6 and IPv4,
at the port of the environment or one of the next seven. If there is a folder that all ranks see, it
writes its addresses there while ranks arrive. The others try the addresses of the file, then that
of the environment, until the deadline.

    rank r -> rank 0    32 random bytes: a nonce
    rank 0 -> rank r    a nonce, and the proof of rank 0
    rank r -> rank 0    the proof of a rank; then ["rank", job, rank, size, facts, name]
    rank 0 -> rank r    ["stranger", why] to a rank of another start, which looks elsewhere; or,
                        once all have arrived: ["welcome"], ["missing", text] or ["differ", text]

A proof is the HMAC-SHA256 of its role and both nonces under the key of the start (`key_of`), so no
message of a program without the key is read. Such a connection is dropped, and reported on stderr
once all have arrived. It neither ends nor delays the start.

Rank 0 waits for as many ranks as there are, or until its deadline. Then each one that has arrived
gets the same verdict: it names absent ranks, ranks claimed twice, other numbers of ranks, and facts
that differ from those of rank 0, with both values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from needle.distributed.environment import Place
from needle.distributed.messages import Connection
from needle.files import read_secret, replacing, settings_file

PORTS = 8  # tried from that of the environment on, which another program may use
PATIENCE = 2.0  # seconds for a connection and for the proof of rank 0
STRANGER_SECONDS = 10.0  # for a connection to rank 0 to say which rank it is
MOST_STRANGERS = 128  # connections to rank 0 that have not said so; a newer one replaces the oldest
NONCE, PROOF = 32, 32  # bytes
LOOPBACK = "127.0.0.1"
NO_KEY = (
    "needle: warning: NEEDLE_RANKS_KEY is not set, so that any program that can connect to rank 0 "
    "may claim a rank; make a key by python -c 'import secrets; print(secrets.token_hex(16))' and "
    "export it on all machines"
)
OTHER_KEY = "another program, or another NEEDLE_RANKS_KEY"


class RankError(RuntimeError):
    """The ranks cannot continue. `code`: the exit code; os.EX_TEMPFAIL (75) if a restart may
    help."""

    code = 1
    is_rank_0s = False  # rank 0 raises it too, in the same words


class RanksDiffer(RankError):
    """The ranks do not belong together: all raise this, in the same words."""


class RankMissing(RankError):
    """A rank did not arrive, is stopped or is gone."""

    code = os.EX_TEMPFAIL


KINDS = {"missing": RankMissing, "differ": RanksDiffer}


def meet(
    place: Place, facts: dict[str, str], folder: Path | None, seconds: float, deadline: float
) -> dict[int, Connection]:
    """Return connections to the other ranks at rank 0, to rank 0 at the others, once all are
    welcome. `seconds` to wait for all; `deadline`: of their collectives.

    RankMissing, RanksDiffer; OSError if rank 0 cannot listen; FileError if it cannot write, or the
    key cannot be read; ValueError if nothing says how to find rank 0."""
    if place.host is None and folder is None:
        raise ValueError(
            f"{place.launcher} does not say where rank 0 is: set MASTER_ADDR (its machine) and "
            "MASTER_PORT for all ranks, or give a folder that all of them see"
        )
    name = re.sub(r"[^\w.-]", "_", place.job)[:100] or "start"
    file = None if folder is None else folder / f"rank0.{name}.json"
    place = dataclasses.replace(place, key=key_of(place))
    if place.rank > 0:
        return {0: _find_rank_0(place, facts, file, seconds, deadline)}
    if not place.key:
        print(NO_KEY, file=sys.stderr)
    return _Reception(place, facts, seconds, deadline).run(file)


def key_of(place: Place) -> str:
    """Return the secret of a start: NEEDLE_RANKS_KEY; without it on one machine that of the user,
    in a file; on several none, since no launcher distributes one."""
    if place.key or not place.is_local:
        return place.key
    path = settings_file("ranks.key")
    return read_secret(path, "key of the ranks (NEEDLE_RANKS_KEY takes its place)")


def _proof(key: str, role: str, nonces: bytes) -> bytes:
    return hmac.digest(key.encode(), role.encode() + nonces, "sha256")


def name_ranks(ranks: list[int], most: int = 16) -> str:
    """Return `rank 2`, or `ranks 1, 2 and 5`."""
    words = [str(rank) for rank in ranks[:most]]
    words += [f"{len(ranks) - most} more"] * (len(ranks) > most)
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


# ---- rank 0 -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Arrival:
    """A connection to rank 0: which rank it is, once it has said so."""

    address: str
    until: float  # by then it must have said so
    nonces: bytes = b""
    is_proven: bool = False
    rank: int | None = None
    size: int = 0
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""


class _Reception:
    """Rank 0 until the verdict."""

    def __init__(
        self, place: Place, facts: dict[str, str], seconds: float, deadline: float
    ) -> None:
        self.place, self.facts, self.seconds, self.deadline = place, facts, seconds, deadline
        self.arrivals: dict[Connection, _Arrival] = {}
        self.dropped: Counter[str] = Counter()
        self.selector = selectors.DefaultSelector()

    def run(self, file: Path | None) -> dict[int, Connection]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.selector)
            listener = stack.enter_context(_listen(self.place, file is not None))
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)
            if file is not None:
                port = listener.getsockname()[1]
                said = {"job": self.place.job, "addresses": addresses(self.place), "port": port}
                with replacing(file) as out:
                    out.write(json.dumps(said).encode())
                stack.callback(file.unlink, missing_ok=True)
            try:
                self._receive(listener)
            finally:
                for one in [one for one, it in self.arrivals.items() if it.rank is None]:
                    self.arrivals.pop(one)
                    one.close()
                self._report_dropped()
        kind, text = self._verdict()
        for one in self.arrivals:
            with contextlib.suppress(OSError):  # it is gone, which is seen soon enough
                one.send(*([kind, text] if kind else ["welcome"]))
        if kind:
            for one in self.arrivals:
                one.close()
            raise KINDS[kind](text)
        return {it.rank: one for one, it in self.arrivals.items()}

    def _receive(self, listener: socket.socket) -> None:
        """Accept connections until all ranks have arrived, or the deadline."""
        end = time.monotonic() + self.seconds
        while sum(it.rank is not None for it in self.arrivals.values()) < self.place.size - 1:
            left = end - time.monotonic()
            if left <= 0:
                return
            for event, _ in self.selector.select(min(left, 0.5)):
                if event.fileobj is not listener:
                    self._hear(event.fileobj)
                    continue
                with contextlib.suppress(OSError):  # it is gone again
                    sock, address = listener.accept()
                    one = Connection(sock, self.deadline)
                    until = time.monotonic() + STRANGER_SECONDS
                    self.arrivals[one] = _Arrival(address[0], until)
                    self.selector.register(one, selectors.EVENT_READ)
            strangers = [(one, it) for one, it in self.arrivals.items() if it.rank is None]
            for one, _ in strangers[:-MOST_STRANGERS]:
                self._drop(one, f"the oldest of more than {MOST_STRANGERS}")
            for one, it in strangers[-MOST_STRANGERS:]:
                if time.monotonic() > it.until:
                    self._drop(one, f"said nothing of this protocol for {STRANGER_SECONDS:g} s")

    def _hear(self, one: Connection) -> None:
        it = self.arrivals[one]
        one.receive()
        try:
            why = self._greet(one, it)
        except OSError as error:
            why = str(error)
        if why or one.ended:
            self._drop(one, why or one.ended)

    def _greet(self, one: Connection, it: _Arrival) -> str:
        """Take the next step of the greeting. Return why the connection is a stranger's, or ""."""
        if not it.nonces and (nonce := one.bytes_of(NONCE)):
            own = secrets.token_bytes(NONCE)
            it.nonces = nonce + own
            one.send_bytes(own + _proof(self.place.key, "rank 0", it.nonces))
        if it.nonces and not it.is_proven and (proof := one.bytes_of(PROOF)):
            if not hmac.compare_digest(proof, _proof(self.place.key, "rank", it.nonces)):
                return OTHER_KEY
            it.is_proven = True
        if it.is_proven and it.rank is None and (message := one.message()):
            _, job, rank, size, facts, name = message
            if job != self.place.job:
                one.send("stranger", "another start")
                return "another start"
            it.rank, it.size, it.facts, it.name = rank, size, facts, name
        return ""

    def _drop(self, one: Connection, why: str) -> None:
        self.selector.unregister(one)
        it = self.arrivals.pop(one)
        one.close()
        if it.rank is None:
            self.dropped[f"{it.address}: {why}"] += 1

    def _report_dropped(self) -> None:
        if self.dropped:
            told = "; ".join(f"{why} ({count} times)" for why, count in self.dropped.most_common(3))
            print(
                f"needle: rank 0 dropped {self.dropped.total()} connections of strangers: {told}",
                file=sys.stderr,
            )

    def _verdict(self) -> tuple[str, str]:
        """Return ("", "") if all have arrived and agree, else the kind of error and its text."""
        place, problems = self.place, []
        claims: dict[int, list[_Arrival]] = defaultdict(list)
        claims[0].append(_Arrival("", 0.0, b"", True, 0, place.size, self.facts, _process()))
        for it in self.arrivals.values():
            if it.size == place.size:
                claims[it.rank].append(it)
                continue
            problems.append(
                f"rank {it.rank} ({it.name}) was started as one of {it.size} ranks, rank 0 as one "
                f"of {place.size}: start all of them by one command, or with one number"
            )
        for rank, claimed in sorted(claims.items()):
            if len(claimed) > 1:
                problems.append(
                    f"rank {rank} is claimed by {' and by '.join(one.name for one in claimed)}: "
                    "each process needs a rank of its own"
                )
        problems += self._differences(claims)
        missing = [rank for rank in range(place.size) if rank not in claims]
        kind = "differ" if problems else "missing" if missing else ""
        if missing and len(self.arrivals) + 1 < place.size:
            problems.append(
                f"{name_ranks(missing)} of {place.size} did not come within "
                f"{round(self.seconds, 1):g} s: read what {place.launcher} says of them, and check "
                f"that their machines can connect to rank 0 ({_process()})"
            )
        return kind, "; ".join(problems)

    def _differences(self, claims: dict[int, list[_Arrival]]) -> list[str]:
        """Describe each difference once, with all ranks that have it."""
        alike: dict[str, list[int]] = defaultdict(list)
        for rank, claimed in sorted(claims.items()):
            for it in claimed:
                words = [
                    f"{name} is {_quoted(it.facts.get(name))}, "
                    f"at rank 0 {_quoted(self.facts.get(name))}"
                    for name in sorted(self.facts.keys() | it.facts.keys())
                    if it.facts.get(name) != self.facts.get(name)
                ]
                if words:
                    alike[", ".join(words)].append(rank)
        return [f"{name_ranks(ranks)}: {words}" for words, ranks in alike.items()]


def _quoted(value: str | None) -> str:
    return "not there" if value is None else repr(value)


def _listen(place: Place, has_file: bool) -> socket.socket:
    """Listen at the port of the environment or one of the next; at any if a file can name it."""
    first = [] if place.port is None else ports(place.port)
    for port in first + [0] * (has_file or not first):
        with contextlib.suppress(OSError):
            return _listen_at(port, place.is_local)
    raise OSError(
        f"rank 0 cannot listen: the ports {place.port} to {place.port + PORTS - 1} are taken; set "
        "another MASTER_PORT for all ranks"
    )


def _listen_at(port: int, is_local: bool) -> socket.socket:
    backlog = 1024  # all ranks of a large start arrive at once
    if is_local:
        return socket.create_server((LOOPBACK, port), backlog=backlog)
    with contextlib.suppress(OSError):  # a machine without IPv6
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", port), backlog=backlog)


def ports(first: int) -> list[int]:
    """Return the ports where rank 0 may be, in the order in which they are tried."""
    return [port if port < 65536 else port - PORTS for port in range(first, first + PORTS)]


def addresses(place: Place) -> list[str]:
    """Return those of this machine, the nearest first."""
    if place.is_local:
        return [LOOPBACK]
    found = [LOOPBACK, socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # has no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(sock, 0x8915, request)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:  # no IPv6
        for line in file:
            number, _, _, scope, *_ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return list(dict.fromkeys(found))


# ---- the others ---------------------------------------------------------------------------------


def _find_rank_0(
    place: Place, facts: dict[str, str], file: Path | None, seconds: float, deadline: float
) -> Connection:
    end, pause = time.monotonic() + seconds, 0.02
    tried: dict[str, str] = {}  # address -> the result
    while True:
        for host, port in _candidates(place, file):
            left = end - time.monotonic()
            if left <= 0:
                break
            try:
                sock = socket.create_connection((host, port), timeout=min(PATIENCE, left))
                with contextlib.ExitStack() as stack:
                    one = Connection(stack.enter_context(sock), deadline)
                    _introduce(one, place, facts, seconds)
                    stack.pop_all()
                    return one
            except (OSError, EOFError, ValueError) as error:
                tried[f"{host}:{port}"] = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= end:
            break
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(2 * pause, 0.5)
    listed = "; ".join(f"{address}: {why}" for address, why in tried.items())
    where = "it wrote no address" if not tried else f"tried {listed}"
    told = "" if file is None else f" (its file is {file})"
    raise RankMissing(
        f"rank {place.rank} did not find rank 0 within {seconds:g} s: {where}{told}. Does it run, "
        "may its machine be reached from here, and is MASTER_ADDR, if it is set, the machine of "
        "rank 0?"
    )


def _introduce(one: Connection, place: Place, facts: dict[str, str], seconds: float) -> None:
    """Return if rank 0 is at the other end and welcomes this rank. RankError is its verdict; other
    errors mean to look elsewhere, or again."""
    own = secrets.token_bytes(NONCE)
    one.send_bytes(own)
    answer = one.wait(lambda: one.bytes_of(NONCE + PROOF), PATIENCE)
    nonces = own + answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], _proof(place.key, "rank 0", nonces)):
        raise ValueError(OTHER_KEY)
    one.send_bytes(_proof(place.key, "rank", nonces))
    one.send("rank", place.job, place.rank, place.size, facts, _process())
    word, *text = one.wait(one.message, seconds + PATIENCE)  # rank 0 waits as long for the others
    if word in KINDS:
        verdict = KINDS[word](*text)
        verdict.is_rank_0s = True
        raise verdict
    if word != "welcome":
        raise ValueError(*text)


def _candidates(place: Place, file: Path | None) -> Iterator[tuple[str, int]]:
    """Yield the addresses of the file, if it is of this start, then those of the environment."""
    with contextlib.suppress(OSError, ValueError):  # there is none yet
        said = json.loads(file.read_bytes()) if file is not None else {"job": None}
        if said["job"] == place.job:
            yield from [(host, said["port"]) for host in said["addresses"]]
    if place.host is not None:
        host = LOOPBACK if place.is_local else place.host
        yield from [(host, port) for port in ports(place.port)]


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
