"""needle/kernels/door.py: connections while files are few. Whoever says nothing gives way."""

import errno
import logging
import os
import resource
import socket
import subprocess
import sys
import time

import pytest
from harness import ROOT
from serving import IDLE, SIMPLE, TOKEN, running, waiting

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")

from needle.kernels import door, serve
from needle.kernels.access import tls_context

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


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def patient(monkeypatch):
    """Connections that say nothing stay, unless others need their place."""
    monkeypatch.setattr("serving.IDLE", 60.0)


def test_the_oldest_that_says_nothing_gives_way(patient, made_up):
    with running(made_up, connections=MOST) as client:
        first = idle(client, MOST)
        assert client.alive()
        assert closed(first[0]) and not closed(first[-1])
        before = files()
        more = idle(client, 100)
        assert client.alive() and client.evaluate(SIMPLE)[0] == 200
        # Those of the clients; of the service no more than it may have.
        assert files() <= before + 100 + MOST
        assert sum(map(closed, more)) >= 100 - MOST
        for one in (*first, *more):
            one.close()


def test_a_request_that_is_answered_keeps_its_place(patient, made_up):
    """While its job waits; one whose head is not yet whole is as one that is idle."""
    with running(made_up, connections=MOST) as client, waiting(client, 2) as answers:
        slow = idle(client, 1)[0]
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        others = idle(client, 50)
        assert client.alive() and closed(slow)
        for one in (slow, *others):
            one.close()
    assert [status for status, _ in answers] == [200, 200]


def test_an_answer_that_is_being_sent_keeps_its_place(patient, made_up, monkeypatch):
    """It is read slowly, and longer than what the system holds."""
    size = 32 << 20
    monkeypatch.setattr(serve, "to_json", lambda value: b" " * size)
    with running(made_up, connections=MOST) as client:
        reader = idle(client, 1)[0]
        head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        reader.sendall(f"{head}Connection: close\r\n\r\n".encode())
        got = len(reader.recv(1000))
        others = idle(client, 50)
        time.sleep(0.2)
        while piece := reader.recv(1 << 20):
            got += len(piece)
        assert got > size
        for one in (reader, *others):
            one.close()


def test_handshakes_that_do_not_come_give_way(patient, made_up, certificate):
    with running(made_up, connections=MOST, tls=tls_context(*certificate)) as client:
        silent = idle(client, 50)
        deadline = time.monotonic() + 20
        while sum(map(closed, silent)) < 50 - MOST:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for one in silent:
            one.close()


def test_a_shortage_of_files_is_one_line_and_no_end(made_up, caplog, monkeypatch):
    monkeypatch.setattr(door, "RETRY_SECONDS", 0.001)
    left = [1] * 20
    real = socket.socket.accept

    def accept(sock):
        if left:
            left.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with caplog.at_level(logging.WARNING), running(made_up) as client:
        assert client.alive() and not left
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be taken: [Errno 24] Too many open files"
    ]


def limited(soft: int, hard: int, devices: int) -> str:
    """What a process with these limits says."""
    code = f"""
import resource
from needle.kernels import door
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
door.raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], end=" ")
try:
    print(door.room({devices}))
except RuntimeError as error:
    print(error)
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout.strip()


def test_the_limit_is_raised_and_leaves_room_for_processes():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("fewer than 2,048 files may be open here")
    assert limited(64, 2048, 1) == f"2048 {door.MOST_CONNECTIONS}"
    limit, room = map(int, limited(64, 128, 1).split())
    assert limit == 128 and door.LEAST_CONNECTIONS <= room <= 128 - 64
    said = limited(64, 128, 8)
    assert said.startswith("128 this process may open 128 files") and "ulimit -n" in said


def test_the_ordinary_end_of_what_is_idle(client):
    """Without any need, after a while."""
    (one,) = idle(client, 1)
    time.sleep(IDLE)
    one.settimeout(20)
    assert one.recv(1) == b""
    one.close()
