"""Who may speak to the service: its address, the names it answers to, its token, and how many
connections it takes.

It listens on loopback alone; other machines come by ssh, or through a proxy that has TLS. A browser
can be made to call a page's own name that suddenly means 127.0.0.1 (DNS rebinding), so a request
says by which name it came. The token lies in a file that only its owner can read. Anybody on this
machine can open connections, and each takes an open file, as the pool's processes and jobs do: so
connections are fewer than the files that this process may open.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

from needle.files import FileError, read_secret

BACKLOG = 1024  # connections that wait to be taken
MOST_FILES = 1 << 16  # hard limits of 2^30 are seen, and programs that try every file up to them
MOST_CONNECTIONS = 1000
LEAST_CONNECTIONS = 8
KEPT_FILES = 32  # for what the service itself opens
DEVICE_FILES = 32  # for the job of a device, its processes, those that start and those that end
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s\[\]:/@]+))(?::\d{1,5})?")


class AccessError(ValueError):
    """The service is not to be started so; the text says why and what to do."""


# ---- the token -----------------------------------------------------------------------------------


def token_path() -> Path:
    """The default: needle/token in the user's folder of settings."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "needle" / "token"


def read_token(path: Path) -> str:
    """The token in a file; the first time, a new one is written there. AccessError where it is not
    this user's alone, or is no token."""
    try:
        return read_secret(path, "token")
    except FileError as error:
        raise AccessError(str(error)) from None


def right_token(headers: Iterable[str], token: str) -> bool:
    """Whether the headers Authorization are one, `Bearer TOKEN`."""
    found = list(headers)
    kind, _, said = (found[0] if len(found) == 1 else "").partition(" ")
    given = said.strip().encode("utf-8", "surrogateescape")
    return secrets.compare_digest(given, token.encode()) and kind.lower() == "bearer"


# ---- names and addresses -------------------------------------------------------------------------


def right_host(headers: Iterable[str], names: frozenset[str]) -> bool:
    """Whether the headers Host are one, and name this service."""
    found = list(headers)
    match = HOST.fullmatch(found[0]) if len(found) == 1 else None
    return match is not None and _name(match[1] or match[2]) in names


def _name(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def names_of(host: str, more: Iterable[str]) -> frozenset[str]:
    """The names that a service on `host` answers to: loopback's, its own, and `more`."""
    return LOOPBACK_NAMES | {_name(name) for name in (host, *more)}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. AccessError where that would let in other machines, and where it
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
            f"--host {host} ({address[0]}) lets in other machines, and whoever has the token runs "
            f"code here: leave the service on loopback, and reach it by ssh -L {port}:127.0.0.1:"
            f"{port} THIS-MACHINE, or through a proxy that has TLS"
        )
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # or another could bind there, too
    except OSError as error:
        sock.close()
        raise AccessError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return sock


# ---- connections ---------------------------------------------------------------------------------


def raise_limit() -> None:
    """On open files, as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def room(devices: int) -> int:
    """Connections for which there are files, beside what is open now. RuntimeError where they are
    too few to serve anybody."""
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
