"""A service on a thread with a pool that is made up, and a client of it."""

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from unittest import mock

import numpy as np
from fake_pool import SOURCE
from harness import ROOT, in_thread, wait_for

from needle.kernels import serve
from needle.kernels.access import LOOPBACK_NAMES, listen
from needle.kernels.job import RequestLimits
from needle.kernels.pool import Result
from needle.kernels.serve import Service, listening

TOKEN = "t" * 43
IDLE = 0.3  # seconds that a connection of these tests may say nothing
LIMITS = RequestLimits(body_bytes=1 << 20, source_bytes=8 << 10, array_bytes=1 << 20)
X = np.arange(6, dtype=np.float32)
ARGS = [{"array": "x"}, {"shape": [6], "dtype": "float32", "out": True}, 2.0, 6]
JOB = {"source": SOURCE, "entry": "scale", "cases": [{"grid": 1, "block": 32, "args": ARGS}]}
SIMPLE = {"source": "any", "entry": "k", "cases": [{"grid": 1, "block": 1, "args": []}]}


class MadeUpPool:
    """A pool that answers at once; a source "wait" when `go` is set, or the pool is closed."""

    def __init__(self):
        self.go, self.begun, self.closed = threading.Event(), threading.Semaphore(0), False
        self.calls, self.set_aside = [], None
        self.compilers_set_aside = None
        self.uuid = "GPU-00000000-0000-0000-0000-000000000001"

    def run(self, source, entry, *args, **more):
        self.calls.append(entry)
        self.begun.release()
        if source == "wait":
            assert self.go.wait(60)
        if source == "fail":
            raise {"type": TypeError, "memory": MemoryError, "defect": KeyError}[entry]("told so")
        return Result("crashed" if self.closed else "illegal_address", "it " * 3, printed="\0\x1b[")

    def state(self):
        one = {
            "facts": {"name": "H", "uuid": self.uuid},
            "ready": [1],
            "used": [],
            "faults": 2,
            "started": 5,
        }
        one["compilers"] = {"set_aside": self.compilers_set_aside, "ready": [2, 3]}
        return [{"device": n, "set_aside": self.set_aside, **one} for n in (0, 3)]

    def cleanup(self):
        self.begun.release()
        assert self.go.wait(60)
        return 12345

    def reset(self, device):
        self.calls.append(device)
        if device == 3:
            raise RuntimeError("process 7 still does not end")

    def close(self):
        self.closed = True
        self.go.set()


class Client:
    """Asks a service, which may be one on a thread of this process, which `stop` ends."""

    def __init__(self, port, token=TOKEN, service=None, stop=None):
        self.port, self.token, self.service, self.stop = port, token, service, stop

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method, path, body=None, **headers):
        """(status, JSON, headers); `_` in names of headers is `-`."""
        sent = {"Authorization": f"Bearer {self.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self.connect()
        try:
            connection.request(
                method, path, body, {name: value for name, value in sent.items() if value}
            )
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null"), answer.headers
        finally:
            connection.close()

    def evaluate(self, job, arrays=None):
        if arrays is None:
            body, kind = json.dumps(job).encode(), "application/json"
        else:
            body, kind = multipart(job=json.dumps(job).encode(), arrays=arrays)
        status, answer, _ = self.ask("POST", "/evaluate", body, Content_Type=kind)
        return status, answer

    def raw(self, data: bytes) -> bytes:
        """Read until the service closes the connection, as it does with an idle one (`IDLE`)."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            sock.sendall(data)
            got = b""
            while chunk := sock.recv(65536):
                got += chunk
            return got

    def alive(self):
        status, answer, _ = self.ask("GET", "/health")
        return status == 200 and answer["status"] == "ok"

    def running(self) -> int:
        return self.ask("GET", "/health")[1]["running"]


def head(request: str, *lines: str) -> bytes:
    """Head of a request, with the token."""
    own = (f"{request} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}")
    return "\r\n".join([*own, *lines, "", ""]).encode()


def multipart(**parts: bytes) -> tuple[bytes, str]:
    """(body, its Content-Type), as curl -F writes it."""
    lines = []
    for name, data in parts.items():
        head = f'--edge\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'
        lines += [head.encode(), data, b"\r\n"]
    return b"".join([*lines, b"--edge--\r\n"]), "multipart/form-data; boundary=edge"


@contextmanager
def running(pool, **more):
    more = {"limits": LIMITS, "queue": 2, **more}
    sock, made = listen("127.0.0.1", 0), Future()

    async def work():
        service, stop = Service(pool, TOKEN, LOOPBACK_NAMES, **more), asyncio.Event()
        async with listening(service, sock, 0.2, asyncio.Event()):
            made.set_result((service, asyncio.get_running_loop(), stop))
            await stop.wait()

    with sock, mock.patch.object(serve, "IDLE_SECONDS", IDLE):
        ended = in_thread(asyncio.run, work())
        service, loop, stop = made.result(60)

        def end():
            if not ended.done():
                loop.call_soon_threadsafe(stop.set)
            ended.result(60)

        try:
            yield Client(sock.getsockname()[1], service=service, stop=end)
        finally:
            end()


@contextmanager
def started(command, token_file):
    """A service in a process of its own: (the process, what it printed, a client)."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    try:
        said = process.stdout.readline() + process.stdout.readline()
        port = re.search(r"^listening on http://127\.0\.0\.1:(\d+), ", said, re.MULTILINE)
        assert "arbitrary code" in said and str(token_file) in said and port
        yield process, said, Client(int(port[1]), token_file.read_text().strip())
    finally:
        process.kill()
        process.communicate()


@contextmanager
def waiting(client, count=1):
    """Send so many jobs, each on a thread. One runs until `go`, the others are in the queue. The
    list gets the answers."""
    pool, answers = client.service.pool, []
    sent = [in_thread(client.evaluate, SIMPLE | {"source": "wait"}) for _ in range(count)]
    assert pool.begun.acquire(timeout=60)
    wait_for(lambda: client.service.waiting == count - 1)
    yield answers
    pool.go.set()
    answers += [one.result(60) for one in sent]
