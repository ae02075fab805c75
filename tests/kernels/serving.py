"""A service on a thread with a pool that is made up, and a client of it."""

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from unittest import mock

import numpy as np
from fake_pool import SOURCE

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
    """A service on a thread, and what is asked of it."""

    def __init__(self, service, loop, port):
        self.service, self.loop, self.port = service, loop, port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method, path, body=None, **headers):
        """(status, JSON, headers); `_` in names of headers is `-`."""
        sent = {"Authorization": f"Bearer {TOKEN}"}
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
    sock = listen("127.0.0.1", 0)
    ready, box = threading.Event(), {}

    async def work():
        box["loop"], box["stop"] = asyncio.get_running_loop(), asyncio.Event()
        box["service"] = Service(pool, TOKEN, LOOPBACK_NAMES, **more)
        async with listening(box["service"], sock, 0.2, asyncio.Event()):
            ready.set()
            await box["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(work(),))
    with sock, mock.patch.object(serve, "IDLE_SECONDS", IDLE):
        thread.start()
        assert ready.wait(60)
        try:
            yield Client(box["service"], box["loop"], sock.getsockname()[1])
        finally:
            box["loop"].call_soon_threadsafe(box["stop"].set)
            thread.join(60)
            assert not thread.is_alive()


@contextmanager
def waiting(client, count=1):
    """Send so many jobs, each on a thread. One runs until `go`, the others are in the queue."""
    answers, pool = [], client.service.pool
    threads = [
        threading.Thread(
            target=lambda: answers.append(client.evaluate(SIMPLE | {"source": "wait"}))
        )
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    assert pool.begun.acquire(timeout=60)
    deadline = time.monotonic() + 60
    while client.service.waiting < count - 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    yield answers
    pool.go.set()
    for thread in threads:
        thread.join(60)
    assert len(answers) == count
