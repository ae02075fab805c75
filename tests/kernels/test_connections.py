"""Connections of the service at their limit: one that is idle, or never showed the token, is
closed for a new one. Clients without the token cannot keep out one that has it."""

import contextlib
import select
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from fake_pool import fds
from harness import naming
from serving import IDLE, SIMPLE, TOKEN, MadeUpPool, head, running, waiting

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")

from needle.kernels import serve
from needle.kernels.access import listen

pytestmark = pytest.mark.slow

MOST = 6


def idle(client, count):
    return [socket.create_connection(("127.0.0.1", client.port), timeout=20) for _ in range(count)]


def closed(sock) -> bool:
    sock.settimeout(0)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.fixture
def patient(monkeypatch):
    """Idle connections stay, unless others need their place."""
    monkeypatch.setattr("serving.IDLE", 60.0)


def test_the_oldest_idle_connection_is_closed_at_the_limit(patient, made_up):
    with running(made_up, connections=MOST) as client:
        first = idle(client, MOST)
        assert client.alive()
        assert closed(first[0]) and not closed(first[-1])
        before = fds()
        more = idle(client, 100)
        assert client.alive() and client.evaluate(SIMPLE)[0] == 200
        # The clients' and at most MOST of the service.
        assert fds() <= before + 100 + MOST
        assert sum(map(closed, more)) >= 100 - MOST
        for one in (*first, *more):
            one.close()


def test_a_request_under_way_keeps_its_connection(patient, made_up):
    """One whose head is incomplete counts as idle."""
    with running(made_up, connections=MOST) as client, waiting(client, 2) as answers:
        slow = idle(client, 1)[0]
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        others = idle(client, 50)
        assert client.alive() and closed(slow)
        for one in (slow, *others):
            one.close()
    assert [status for status, _ in answers] == [200, 200]


def test_an_answer_that_is_read_slowly_keeps_its_connection(patient, made_up, monkeypatch):
    size = 32 << 20
    monkeypatch.setattr(serve, "to_json", lambda value: b" " * size)
    with running(made_up, connections=MOST) as client:
        reader = idle(client, 1)[0]
        reader.sendall(head("GET /health", "Connection: close"))
        got = len(reader.recv(1000))
        others = idle(client, 50)
        time.sleep(0.2)
        while chunk := reader.recv(1 << 20):
            got += len(chunk)
        assert got > size
        for one in (reader, *others):
            one.close()


def test_a_connection_that_showed_the_token_is_closed_last(patient, made_up):
    with running(made_up, connections=MOST) as client:
        kept = client.connect()
        for _ in range(2):
            others = idle(client, 50)
            kept.request("GET", "/health", headers={"Authorization": f"Bearer {TOKEN}"})
            port = kept.sock.getsockname()[1]
            answer = kept.getresponse()
            assert (answer.status, len(answer.read()) > 0) == (200, True)
            for one in others:
                one.close()
        assert client.alive()  # accepted after all of them
        kept.request("GET", "/health", headers={"Authorization": f"Bearer {TOKEN}"})
        assert kept.getresponse().read() and kept.sock.getsockname()[1] == port
        kept.close()


def test_more_requests_than_connections_are_refused(patient, made_up):
    with running(made_up, connections=2) as client, waiting(client, 2) as answers:
        status, answer, headers = client.ask("GET", "/health")
        assert (status, answer["error"]["limit"]) == (429, 2) and int(headers["Retry-After"]) >= 1
    assert [status for status, _ in answers] == [200, 200]


def test_an_answer_that_is_not_read_ends_its_connection(patient, made_up, monkeypatch):
    size = 32 << 20
    monkeypatch.setattr(serve, "to_json", lambda value: b" " * size)
    monkeypatch.setattr(serve, "ANSWER_SECONDS", 0.3)
    with running(made_up) as client, idle(client, 1)[0] as reader:
        reader.sendall(head("GET /health"))
        time.sleep(1)
        got = 0
        while chunk := reader.recv(1 << 20):
            got += len(chunk)
        assert 0 < got < size and not client.service.busy


def test_an_idle_connection_is_closed_after_a_while(client):
    (one,) = idle(client, 1)
    time.sleep(IDLE)
    one.settimeout(20)
    assert one.recv(1) == b""
    one.close()


# ---- clients without the token -------------------------------------------------------------------

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HOSTILE = {
    "pipelined": REQUEST * 500,
    "pipelined, wrong token": REQUEST.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer x\r\n\r\n")
    * 500,
    "pipelined, foreign name": REQUEST.replace(b"localhost", b"evil.example") * 500,
    "pipelined, to no route": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nExpect: x\r\n\r\n" * 500,
    "pipelined, no HTTP": b"\0\r\n\r\n" * 500,
    "endless body": b"POST /evaluate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n"
    + b"x" * 20000,
    "silent": b"",
    "half a header": REQUEST[:-2],
    "dribbled header": REQUEST[:-2] + b"A: b\r\n" * 500,
}


@contextmanager
def hostile(client, data: bytes, each: int, count: int):
    """Open `count` connections that repeat `data`, `each` bytes at a time, and read nothing."""
    stop, there = threading.Event(), []
    for _ in range(count):
        there.append(socket.socket())
        there[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        there[-1].settimeout(20)
        there[-1].connect(("127.0.0.1", client.port))
        there[-1].setblocking(False)
    own = there.copy()

    def send() -> None:
        sent = dict.fromkeys(own, 0)
        while not stop.wait(0.01):
            for sock in own:
                with contextlib.suppress(OSError):  # it was closed, or takes no more now
                    at = sent[sock] % max(len(data), 1)
                    sent[sock] += sock.send(data[at : at + each])

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield there
    finally:
        stop.set()
        thread.join()
        for one in own:
            one.close()


def hung_up(sock) -> bool:
    """True if the service closed it. Read nothing."""
    asked = select.poll()
    asked.register(sock, select.POLLRDHUP)
    return bool(asked.poll(0))


def test_clients_without_the_token_keep_out_no_client_that_has_it(monkeypatch):
    def listen_short(*args):
        sock = listen(*args)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections, too
        return sock

    monkeypatch.setattr("serving.listen", listen_short)
    for kind, data in HOSTILE.items():
        each = 1 if kind == "dribbled header" else 1 << 16
        with naming(kind), ExitStack() as stack:
            client = stack.enter_context(running(MadeUpPool(), connections=MOST))
            there = stack.enter_context(hostile(client, data, each, MOST))
            time.sleep(0.5)  # unread answers fill every buffer
            there += stack.enter_context(hostile(client, data, each, 2 * MOST))
            for _ in range(10):
                began = time.monotonic()
                assert client.alive() and client.evaluate(SIMPLE)[0] == 200
                assert time.monotonic() - began < 2
                time.sleep(0.02)
            deadline = time.monotonic() + IDLE + serve.LINGER_SECONDS + 5
            while not all(map(hung_up, there)):
                assert time.monotonic() < deadline, sum(map(hung_up, there))
                time.sleep(0.02)
            assert client.alive()
