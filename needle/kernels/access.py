"""Who may speak to the service: its address, the names it answers to, and its token.

It listens on loopback; elsewhere only where that is asked for, and under TLS. A browser can be made
to call a page's own name that suddenly means 127.0.0.1 (DNS rebinding), so a request says by which
name it came. The token lies in a file that only its owner can read.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path

BACKLOG = 128  # connections that wait to be taken
TOKEN_BYTES = 32  # of chance
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{20,512}")  # what the header Authorization can hold
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
    """The token in a file; the first time, a new one is written there. AccessError where others can
    read it, where another user wrote it, and where it holds no token."""
    try:
        if not os.path.lexists(path):
            _make_token(path)
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AccessError(f"{path}: the token cannot be read: {error.strerror or error}") from None
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise AccessError(f"{path}: no file, and so no token")
        if facts.st_uid != os.geteuid():
            raise AccessError(
                f"{path}: belongs to user {facts.st_uid}, and this is {os.geteuid()}: who wrote it "
                "knows the token; take another --token-file"
            )
        if facts.st_mode & 0o077:
            raise AccessError(
                f"{path}: its mode is {stat.S_IMODE(facts.st_mode):04o}, so that others can read "
                f"the token. Delete it, and a new one is made; or, if nobody has: chmod 600 {path}"
            )
        token = os.read(file, 4096).decode("ascii", "replace").strip()
    finally:
        os.close(file)
    if not TOKEN.fullmatch(token):
        raise AccessError(
            f"{path}: holds no token: 20 to 512 letters, digits or ._~+/=- in one line. Delete it, "
            "and a new one is made"
        )
    return token


def _make_token(path: Path) -> None:
    """Whole or not at all; where another service is faster, its token stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "w") as text:
            text.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
        os.link(new, path)
    except FileExistsError:
        pass  # it is read next
    finally:
        os.unlink(new)


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
    """The names that a service on `host` answers to: loopback's, its own unless that means every
    address, and `more`."""
    own = {_name(host)} if _name(host) not in ("0.0.0.0", "::", "") else set()
    return LOOPBACK_NAMES | own | {_name(name) for name in more}


def listen(host: str, port: int, allow_remote: bool, tls: bool) -> socket.socket:
    """A socket that listens there. AccessError where that would let in other machines, and was not
    asked for or is not under TLS; and where it cannot be bound."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise AccessError(f"--host {host}: {error}") from None
    family, _, _, _, address = found[0]
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        if not allow_remote:
            raise AccessError(
                f"--host {host} ({address[0]}) lets in other machines, and whoever has the token "
                "runs code here. Through a tunnel it stays on loopback: ssh -L "
                f"{port}:127.0.0.1:{port} THIS-MACHINE. Else: --allow-remote, --tls-cert, --tls-key"
            )
        if not tls:
            raise AccessError(
                f"--host {host} ({address[0]}): other machines only under TLS, or the token goes "
                "through the net for all to read: --tls-cert and --tls-key"
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


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Of PEM files; None for neither. AccessError."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise AccessError("--tls-cert and --tls-key belong together")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise AccessError(f"--tls-cert {certificate}, --tls-key {key}: {error}") from None
    return context


def _no_password() -> str:
    raise OSError("the key is locked by a password; a service cannot ask for it")
