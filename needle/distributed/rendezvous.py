"""How the ranks of a start find each other, and make sure that they belong together.

Rank 0 listens on loopback where all ranks are on its machine, else on all interfaces, IPv6 and
IPv4, at the port that the environment names or one of the next seven; into a folder that all ranks
see, where there is one, it writes its addresses, and removes those that starts left there when they
were killed. The others try what the file says, then what the environment says, until the deadline.

    rank r -> rank 0    ["hello", nonce]
    rank 0 -> rank r    ["proof", nonce, proof]  it has the key
    rank r -> rank 0    ["rank", proof, text]    so has this rank; the text is JSON, of GREETING
    rank 0 -> rank r    ["heard", seconds]       the verdict comes within so many
                        ["stranger", why]        another start: look elsewhere
    the verdict         ["welcome"], or ["missing" or "differ", text]

A proof is the HMAC-SHA256 of both nonces, and of the text, under the key of the start (`key_of`).

Rank 0 waits for as many processes as there are ranks, or until its deadline. Then each process that
has come gets the same verdict: a rank that is absent, one that two claim, another number of ranks,
and facts in which a rank differs from rank 0 are named with both values. Any other connection is
dropped, and told on stderr once all have come: its sender can neither end nor delay the start.
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
from typing import Any

from needle.distributed.environment import Place
from needle.distributed.messages import Connection, decode, encode
from needle.files import read_secret, replacing

MAGIC = "needle control channel"
VERSION = "4"  # of the messages, those of needle/distributed/control.py too; a fact like others
PORTS = 8  # tried from the one that the environment names: others may listen there
PATIENCE = 2.0  # seconds for a connection, and for the first word of rank 0
STRANGER_SECONDS = 10.0  # for all of a greeting
MOST_STRANGERS = 128  # beside the ranks: the oldest is dropped for the next
LOOPBACK = "127.0.0.1"
NO_KEY = (
    "needle: warning: NEEDLE_RANKS_KEY is not set, so that any program that can connect to rank 0 "
    "may claim a rank; make a key by python -c 'import secrets; print(secrets.token_hex(16))' and "
    "export it on all machines"
)
OTHER_KEY = "another start, or another NEEDLE_RANKS_KEY"
GREETING = {
    "job": str,
    "nonce": str,
    "rank": int,
    "size": int,
    "facts": dict,
    "who": str,
    "id": str,
}
MOST_TEXT = 20_000  # characters of a verdict


class RankError(RuntimeError):
    """The ranks cannot go on. `code`: the exit code that says whether starting again may help."""

    code = 1
    is_rank_0s = False  # rank 0 has it too, in the same words


class RanksDiffer(RankError):
    """The ranks do not belong together: each of them raises this, with the same words."""


class RankMissing(RankError):
    """A rank did not come, stopped or is gone."""

    code = 75

    def __init__(self, text: str, code: int = 75) -> None:
        super().__init__(text)
        self.code = code


KINDS = {"missing": RankMissing, "differ": RanksDiffer}


def meet(
    place: Place, facts: dict[str, str], folder: Path | None, seconds: float, deadline: float
) -> dict[int, Connection]:
    """Connections to the other ranks at rank 0, to rank 0 at the others, all of them welcome.
    RankMissing, RanksDiffer; OSError where rank 0 cannot listen; FileError where it cannot write,
    and where the key cannot be read; ValueError where nothing says how to find rank 0."""
    if place.host is None and folder is None:
        raise ValueError(
            f"{place.launcher} does not say where rank 0 is: set MASTER_ADDR (its machine) and "
            "MASTER_PORT for all ranks, or give a folder that all of them see"
        )
    file = None if folder is None else folder / f"rank0.{_as_name(place.job)}.json"
    facts, place = facts | {MAGIC: VERSION}, dataclasses.replace(place, key=key_of(place))
    if place.rank == 0:
        if not place.key:
            print(NO_KEY, file=sys.stderr)
        return _receive(place, facts, file, seconds, deadline)
    return {0: _go(place, facts, file, seconds, deadline)}


def key_of(place: Place) -> str:
    """The secret that the ranks of a start share: NEEDLE_RANKS_KEY; without it on one machine that
    of the user, in a file; on several none, since no launcher hands one round."""
    if place.key or not place.is_local:
        return place.key
    base = os.environ.get("XDG_CONFIG_HOME")
    path = (Path(base) if base else Path.home() / ".config") / "needle" / "ranks.key"
    return read_secret(path, "key of the ranks (NEEDLE_RANKS_KEY takes its place)")


def _proof(key: str, *words: str) -> str:
    return hmac.new(key.encode(), json.dumps(words).encode(), "sha256").hexdigest()


def _proves(proof: str, key: str, *words: str) -> bool:
    return hmac.compare_digest(proof.encode(), _proof(key, *words).encode())


def name_ranks(ranks: list[int], most: int = 16) -> str:
    """`rank 2`; `ranks 1, 2 and 5`."""
    words = [str(rank) for rank in ranks[:most]]
    words += [f"{len(ranks) - most} more"] * (len(ranks) > most)
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


# ---- rank 0 -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Stranger:
    """A connection that has not said yet which rank it is."""

    address: str
    until: float  # by then it must have
    nonces: tuple[str, ...] = ()  # its own, and the answer's


@dataclasses.dataclass
class _Guest:
    """A process that has come."""

    rank: int
    size: int
    facts: dict[str, str]
    who: str
    id: str


def _receive(
    place: Place, facts: dict[str, str], file: Path | None, seconds: float, deadline: float
) -> dict[int, Connection]:
    end, nonce = time.monotonic() + seconds, secrets.token_hex(8)
    guests: dict[Connection, _Guest] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(place, file is not None))
        selector = stack.enter_context(selectors.DefaultSelector())
        listener.setblocking(False)  # who knocks may be gone before the door opens
        selector.register(listener, selectors.EVENT_READ)
        strangers: dict[Connection, _Stranger] = {}  # the oldest first
        dropped: Counter[str] = Counter()
        stack.callback(_tell_dropped, dropped)
        stack.callback(lambda: [one.close() for one in strangers])
        if file is not None:
            port = listener.getsockname()[1]
            said = {"job": place.job, "nonce": nonce, "addresses": addresses(place), "port": port}
            said["seconds"] = seconds
            with replacing(file) as out:
                out.write(json.dumps(said).encode())
            stack.callback(file.unlink, missing_ok=True)
            _remove_stale(file, seconds)

        def drop(connection: Connection, why: str = "") -> None:
            selector.unregister(connection)
            stranger = strangers.pop(connection, None)
            guests.pop(connection, None)
            connection.close()
            if stranger is not None:
                dropped[f"{stranger.address}: {why}"] += 1

        while 1 + len(guests) < place.size and time.monotonic() < end:
            for event, _ in selector.select(max(0.0, min(end - time.monotonic(), 0.5))):
                if event.fileobj is listener:
                    with contextlib.suppress(OSError):  # gone again, or no descriptors left
                        sock, address = listener.accept()
                        one = Connection(sock, deadline=deadline)
                        until = time.monotonic() + STRANGER_SECONDS
                        strangers[one] = _Stranger(address[0], until)
                        selector.register(one, selectors.EVENT_READ)
                    if len(strangers) > MOST_STRANGERS + place.size:
                        drop(next(iter(strangers)), "one of too many")
                    continue
                one = event.fileobj
                if one not in strangers and one not in guests:
                    continue  # dropped a moment ago
                try:
                    if one in guests:
                        one.receive()
                        raise ValueError("it has said all already")
                    guest = _greeting(one, strangers[one], place, nonce)
                    if guest is None:
                        continue
                    one.send(encode(["heard", max(0.0, end - time.monotonic())]))
                except (OSError, EOFError, ValueError) as error:
                    drop(one, str(error))
                    continue
                del strangers[one]
                for same in [it for it, other in guests.items() if other.id == guest.id]:
                    drop(same)  # it comes again
                guests[one] = guest
            late = [one for one, it in strangers.items() if time.monotonic() > it.until]
            for one in late:
                drop(one, f"said nothing of this protocol for {STRANGER_SECONDS:g} s")
    kind, text = _verdict(place, facts, list(guests.values()), seconds)
    for one in guests:
        with contextlib.suppress(OSError):  # it is gone, which is seen soon enough
            one.send(encode([kind, text] if kind else ["welcome"]))
        one.limit *= 2 * place.size
    if kind:
        for one in guests:
            one.close()
        raise KINDS[kind](text)
    return {guest.rank: one for one, guest in guests.items()}


def _remove_stale(own: Path, seconds: float) -> None:
    """The files of rank 0s that were killed while ranks came: those that nobody waits by any more.
    Ages by the clock of the file system, which may be another machine's."""
    for file in own.parent.glob("rank0.*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # gone, or another's
            said, age = decode(file.read_bytes()), own.stat().st_mtime - file.stat().st_mtime
            if said["nonce"] and age > said.get("seconds", seconds) + PATIENCE:
                file.unlink()


def _tell_dropped(dropped: Counter[str]) -> None:
    if dropped:
        told = "; ".join(f"{why} ({count} times)" for why, count in dropped.most_common(3))
        print(
            f"needle: rank 0 dropped {dropped.total()} connections of strangers: {told:.500}",
            file=sys.stderr,
        )


def _greeting(
    connection: Connection, stranger: _Stranger, place: Place, nonce: str
) -> _Guest | None:
    """The guest, when all that it says has arrived. ValueError for a stranger; EOFError."""
    messages = connection.receive()
    if not messages:
        return None
    (word, *more), *others = messages
    if others or word != ("rank" if stranger.nonces else "hello"):
        raise ValueError("no greeting of this protocol")
    if word == "hello":
        stranger.nonces = more[0], secrets.token_hex(32)
        proof = _proof(place.key, "rank 0", *stranger.nonces)
        connection.send(encode(["proof", stranger.nonces[1], proof]))
        return None
    proof, text = more
    if not _proves(proof, place.key, "rank", *stranger.nonces, text):
        connection.send(encode(["stranger", OTHER_KEY]))
        raise ValueError("another NEEDLE_RANKS_KEY")
    said = decode(text)
    if (
        not isinstance(said, dict)
        or [(name, type(value)) for name, value in said.items()] != [*GREETING.items()]
        or any(type(value) is not str for value in said["facts"].values())
        or not 0 < said["rank"] < said["size"]
    ):
        raise ValueError("no greeting of this version")
    if said.pop("job") != place.job or said.pop("nonce") not in ("", nonce):
        connection.send(encode(["stranger", "another start"]))
        raise ValueError("another start")
    return _Guest(**said)


def _verdict(
    place: Place, facts: dict[str, str], guests: list[_Guest], seconds: float
) -> tuple[str, str]:
    """("", "") where all have come and agree, else the kind of the error and its text."""
    claims: dict[int, list[_Guest]] = defaultdict(list)
    problems = []
    for guest in guests:
        if guest.size != place.size:
            problems.append(
                f"rank {guest.rank} ({guest.who}) was started as one of {guest.size} ranks, rank 0 "
                f"as one of {place.size}: start all of them by one command, or with one number"
            )
        else:
            claims[guest.rank].append(guest)
    claims[0].append(_Guest(0, place.size, facts, _who(), ""))
    for rank, claimed in sorted(claims.items()):
        if len(claimed) > 1:
            problems.append(
                f"rank {rank} is claimed by {' and by '.join(one.who for one in claimed)}: each "
                "process needs a rank of its own"
            )
    problems += _differences(facts, claims)
    missing = [rank for rank in range(place.size) if rank not in claims]
    kind = "differ" if problems else "missing" if missing else ""
    if missing and len(guests) + 1 < place.size:
        problems.append(
            f"{name_ranks(missing)} of {place.size} did not come within {seconds:g} s: read "
            f"what {place.launcher} says of them, and check that their machines can connect to "
            f"rank 0 ({_who()})"
        )
    return kind, "; ".join(problems)[:MOST_TEXT]


def _differences(facts: dict[str, str], claims: dict[int, list[_Guest]]) -> list[str]:
    """Ranks that differ in the same way share their words."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, claimed in sorted(claims.items()):
        for guest in claimed:
            names = sorted(facts.keys() | guest.facts.keys())
            pairs = [(name, guest.facts.get(name), facts.get(name)) for name in names]
            words = [
                f"{name} is {_quoted(there)}, at rank 0 {_quoted(here)}"
                for name, there, here in pairs
                if there != here
            ]
            if words:
                alike[", ".join(words)].append(rank)
    return [f"{name_ranks(ranks)}: {words}" for words, ranks in alike.items()]


def _quoted(value: str | None) -> str:
    return "not there" if value is None else repr(value)


def _listen(place: Place, has_file: bool) -> socket.socket:
    """At the port of the environment or one of the next; at any where a file can say which."""
    first = [] if place.port is None else ports(place.port)
    for port in first + [0] * (has_file or not first):
        with contextlib.suppress(OSError):
            return _listen_at(port, place.is_local)
    raise OSError(
        f"rank 0 cannot listen: the ports {place.port} to {place.port + PORTS - 1} are taken; set "
        "another MASTER_PORT for all ranks"
    )


def _listen_at(port: int, is_local: bool) -> socket.socket:
    backlog = 1024  # all ranks of a large start come at once
    if is_local:
        return socket.create_server((LOOPBACK, port), backlog=backlog)
    with contextlib.suppress(OSError):  # a machine without IPv6
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", port), backlog=backlog)


def ports(first: int) -> list[int]:
    """Where rank 0 may be, in the order in which they are tried."""
    return [port if port < 65536 else port - PORTS for port in range(first, first + PORTS)]


def addresses(place: Place) -> list[str]:
    """Of this machine: its own name for itself first, for ranks beside rank 0, then all others.
    (Whoever tries one that is another machine's finds nobody there, or a stranger.)"""
    if place.is_local:
        return [LOOPBACK]
    found = [LOOPBACK, socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # has no IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(sock, 0x8915, asked)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:  # no IPv6
        for line in file:
            number, _, _, scope, *_ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return list(dict.fromkeys(found))


# ---- the others ---------------------------------------------------------------------------------


def _go(
    place: Place, facts: dict[str, str], file: Path | None, seconds: float, deadline: float
) -> Connection:
    end, pause = time.monotonic() + seconds, 0.02
    id_ = secrets.token_hex(8)
    tried: dict[str, str] = {}  # address -> what came of it
    while True:
        for host, port, nonce in _candidates(place, file):
            if time.monotonic() >= end:
                break
            said = place.job, nonce, place.rank, place.size, facts, _who(), id_
            greeting = json.dumps(dict(zip(GREETING, said, strict=True)))
            try:
                return _introduce(host, port, greeting, place, end, deadline)
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
        "may its machine be reached from here, and is MASTER_ADDR, where it is set, the machine "
        "of rank 0?"
    )


def _introduce(
    host: str, port: int, greeting: str, place: Place, end: float, deadline: float
) -> Connection:
    """The connection, where rank 0 listens there and welcomes this rank. RankError is the verdict;
    anything else means to look elsewhere, or again."""
    left = max(0.01, min(PATIENCE, end - time.monotonic()))
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_connection((host, port), timeout=left))
        connection = Connection(sock, deadline=deadline)
        own = secrets.token_hex(32)
        connection.send(encode(["hello", own]))
        theirs, proof = _answer(connection, PATIENCE, "proof")
        if not _proves(proof, place.key, "rank 0", own, theirs):
            raise ValueError(OTHER_KEY)
        proof = _proof(place.key, "rank", own, theirs, greeting)
        connection.send(encode(["rank", proof, greeting]))
        (seconds,) = _answer(connection, PATIENCE, "heard")
        _answer(connection, seconds + PATIENCE, "welcome")
        connection.limit *= 2 * place.size
        stack.pop_all()
        return connection


def _answer(connection: Connection, seconds: float, wanted: str) -> list[Any]:
    """The arguments of the next message, of this word. The verdict is raised; ValueError for any
    other message."""
    word, *more = connection.wait(seconds)
    if word in KINDS and wanted == "welcome":
        verdict = KINDS[word](more[0])
        verdict.is_rank_0s = True
        raise verdict
    if word != wanted:
        raise ValueError(more[0] if word == "stranger" else "another program")
    return more


def _candidates(place: Place, file: Path | None) -> Iterator[tuple[str, int, str]]:
    """(host, port, nonce): of the file, if it is of this start, then of the environment."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        said = decode(file.read_bytes()) if file is not None else {}
        port, nonce = said["port"], said["nonce"]
        if said["job"] == place.job and port in range(1, 65536) and isinstance(nonce, str):
            yield from [(host, port, nonce) for host in said["addresses"] if isinstance(host, str)]
    if place.host is not None:
        host = LOOPBACK if place.is_local else place.host
        yield from [(host, port, "") for port in ports(place.port)]


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _as_name(job: str) -> str:
    return re.sub(r"[^\w.-]", "_", job)[:100] or "start"
