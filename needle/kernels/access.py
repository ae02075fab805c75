"""Access to the service: its address, the names it answers to, its token, and its connections.

It listens on loopback alone; other machines come by ssh, or through a proxy that has TLS. A page
can make a browser call its own name, which suddenly means 127.0.0.1 (DNS rebinding), so the `Host`
of a request is checked. Only its owner can read the file of the token. Each connection takes an
open file, as the pool's processes and jobs do, so connections are fewer than open files.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import secrets
import socket
from collections.abc import Iterable

BACKLOG = 1024  # connections that wait to be accepted
MOST_FILES = 1 << 16  # hard limits of 2^30 are seen, and programs that try every file up to them
MOST_CONNECTIONS = 1000
LEAST_CONNECTIONS = 8
KEPT_FILES = 32  # for the service itself
DEVICE_FILES = 32  # for the job of a device and its processes
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s\[\]:/@]+))(?::\d{1,5})?")


class AccessError(ValueError):
    """The service cannot start so; the text says why and what to do."""


# ---- the token -----------------------------------------------------------------------------------


def right_token(headers: Iterable[str], token: str) -> bool:
    """True if there is one header Authorization, `Bearer TOKEN`."""
    found = list(headers)
    kind, _, said = (found[0] if len(found) == 1 else "").partition(" ")
    given = said.strip().encode("utf-8", "surrogateescape")
    return secrets.compare_digest(given, token.encode()) and kind.lower() == "bearer"


# ---- names and addresses -------------------------------------------------------------------------


def right_host(headers: Iterable[str], names: frozenset[str]) -> bool:
    """True if there is one header Host, and it names this service."""
    found = list(headers)
    match = HOST.fullmatch(found[0]) if len(found) == 1 else None
    return match is not None and _name(match[1] or match[2]) in names


def _name(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def names_of(host: str, more: Iterable[str]) -> frozenset[str]:
    """Return the names of a service on `host`: loopback's, its own, and `more`."""
    return LOOPBACK_NAMES | {_name(name) for name in (host, *more)}


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. AccessError if other machines could connect, or if the address
    cannot be bound."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise AccessError(f"--host {host}: {error}") from None
    family, _, _, _, address = found[0]
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise AccessError(
            f"--host {host} ({address[0]}) lets in other machines, and each client with the token "
            f"runs code here: leave the service on loopback, and reach it by ssh -L {port}:"
            f"127.0.0.1:{port} THIS-MACHINE, or through a proxy that has TLS"
        )
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # or another process could bind there, too
    except OSError as error:
        sock.close()
        raise AccessError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return sock


# ---- connections ---------------------------------------------------------------------------------


def raise_limit() -> None:
    """Raise the limit on open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def room(devices: int) -> int:
    """Return the number of connections for which there are open files. RuntimeError if they are too
    few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    kept = len(os.listdir("/proc/self/fd")) + KEPT_FILES + DEVICE_FILES * devices
    if soft - kept < LEAST_CONNECTIONS:
        raise RuntimeError(
            f"this process may open {soft} files (RLIMIT_NOFILE), and needs "
            f"{kept + LEAST_CONNECTIONS} at least: ulimit -n {2 * kept + LEAST_CONNECTIONS}, or "
            "LimitNOFILE= of systemd"
        )
    return min(soft - kept, MOST_CONNECTIONS)
