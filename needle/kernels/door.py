"""The door of the service: how many connections there are at a time, and which goes for another.

A connection takes an open file, and so do the processes of the pool and the memory of each job.
Whoever reaches the port can open connections, without the token; so they are fewer than the files
that this process may open. When there is no room, the oldest connection that has no request is
closed: a client that says what it wants is heard, however many are there that say nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Container
from typing import Any

from needle.kernels.crew import RETRY_SECONDS

MOST_FILES = 1 << 16  # hard limits of 2^30 are seen, and programs that try every file up to them
MOST_CONNECTIONS = 1000
LEAST_CONNECTIONS = 8
KEPT_FILES = 32  # for what the service itself opens
DEVICE_FILES = 32  # for the job of a device, its processes, those that start and those that end

log = logging.getLogger("needle.kernels")


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


class Door:
    """Lets connections of a socket in, which listens, to a server of aiohttp. `busy` has those with
    a request that is being answered; `seconds`: for the handshake of TLS."""

    def __init__(
        self,
        server: Any,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        most: int,
        busy: Container[Any],
        seconds: float,
    ) -> None:
        self.server, self.sock, self.tls, self.most = server, sock, tls, most
        self.busy, self.seconds = busy, seconds
        self.greeting: dict[asyncio.Task[None], None] = {}  # not yet connections of the server
        self.short = False

    async def run(self) -> None:
        """Until it is cancelled."""
        self.sock.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                connection, _ = await loop.sock_accept(self.sock)
            except ConnectionAbortedError:
                continue  # this client has left
            except OSError as error:
                if not self.short:
                    log.warning("no connection can be taken: %s", error)
                self.short = True
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self.short = False
            task = loop.create_task(self._greet(connection))
            self.greeting[task] = None
            task.add_done_callback(lambda done: self.greeting.pop(done, None))
            await asyncio.sleep(0)  # a task that never began could not close its connection

    async def _greet(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self.server,
                connection,
                ssl=self.tls,
                ssl_handshake_timeout=self.seconds if self.tls else None,
            )
        except OSError:  # it speaks no TLS, or is gone
            pass

    async def _make_room(self) -> None:
        while True:
            there = [
                one
                for one in self.server.connections
                if one.transport is not None and not one.transport.is_closing()
            ]
            if len(there) + len(self.greeting) < self.most:
                return
            idle = next((one for one in there if one not in self.busy), None)
            close: Callable[[], object] | None = idle.transport.abort if idle else None
            if len(self.greeting) > self.most // 2 or (idle is None and self.greeting):
                close = next(iter(self.greeting)).cancel
            if close is not None:
                close()
            # What was closed is gone in the loop's next round; a request that is answered, later.
            await asyncio.sleep(0 if close is not None else RETRY_SECONDS)

    async def close(self) -> None:
        for task in list(self.greeting):
            task.cancel()
        await asyncio.gather(*self.greeting, return_exceptions=True)
        self.sock.close()
