"""needle/kernels/serve.py and what clients may do to it: every limit, the queue, bodies and
connections of anything. Whatever comes, it is a 4xx, and the service goes on.
"""

import asyncio
import json
import socket
import statistics
import time

import pytest
import safetensors.numpy
from fake_pool import SOURCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import ARGS, JOB, LIMITS, SIMPLE, TOKEN, X, multipart, waiting
from test_wire import FULL, jobs

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")

from needle.kernels import serve
from needle.kernels.serve import Turns
from needle.kernels.wire import Refused

pytestmark = pytest.mark.slow

ANYTHING = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the service stays from example to example


# ---- limits --------------------------------------------------------------------------------------


def test_json_that_is_too_large(client):
    """Said before it comes, and found out where it is not said."""
    most = LIMITS.job_bytes
    status, answer, _ = client.ask(
        "POST", "/evaluate", b" " * (most + 1), Content_Type="application/json"
    )
    assert (status, answer["error"]["limit"]) == (413, most)
    status, answer, _ = client.ask(
        "POST", "/evaluate", iter([b" " * 65536] * 9), Content_Type="application/json"
    )
    assert (status, answer["error"]["limit"]) == (413, most) and most < 9 * 65536
    assert client.alive()


def test_arrays_that_are_too_large(client):
    body, kind = multipart(job=b"{}", arrays=b"x" * (LIMITS.body_bytes + 1))
    for sent in (body, iter([body[i : i + 65536] for i in range(0, len(body), 65536)])):
        status, answer, _ = client.ask("POST", "/evaluate", sent, Content_Type=kind)
        assert (status, answer["error"]["limit"]) == (413, LIMITS.body_bytes)
    assert client.alive()


def test_a_body_of_terabytes_is_refused_at_once(client):
    head = f"POST /evaluate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 9999999999999\r\n\r\n"
    assert b" 413 " in client.raw(head.encode())
    assert client.alive()


def test_a_body_that_does_not_come(client, monkeypatch):
    monkeypatch.setattr(serve, "BODY_SECONDS", 0.2)
    connection = client.connect()
    connection.putrequest("POST", "/evaluate")
    for name, value in (
        ("Authorization", f"Bearer {TOKEN}"),
        ("Content-Type", "application/json"),
        ("Content-Length", "10"),
    ):
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(b"{")
    answer = connection.getresponse()
    assert answer.status == 408 and json.loads(answer.read())["error"]["limit"] == 0.2
    connection.close()
    assert client.service.held == 0


def test_a_connection_without_a_request_is_closed(client):
    for data in (b"", b"GET /health HT"):
        assert client.raw(data) == b""


def test_the_queue_is_full(client):
    with waiting(client, 3) as answers:  # one runs, two wait
        status, answer, headers = client.ask(
            "POST", "/evaluate", json.dumps(SIMPLE), Content_Type="application/json"
        )
        assert (status, answer["error"]["limit"]) == (429, 2) and int(headers["Retry-After"]) >= 1
        assert client.ask("GET", "/statistics")[1]["queue"]["waiting"] == 2
        assert len(client.service.pool.calls) == 1
    assert [status for status, _ in answers] == [200] * 3 and client.service.held == 0
    assert client.evaluate(SIMPLE)[0] == 200


def test_health_while_a_kernel_loops(client):
    """Also with a full queue. The median: this machine may have other things to do."""
    with waiting(client, 3):
        times = []
        for _ in range(15):
            began = time.monotonic()
            assert client.alive()
            times.append(time.monotonic() - began)
    assert statistics.median(times) < 0.1, times


def test_a_client_that_leaves_gives_its_place_back(client, made_up):
    with waiting(client, 1):
        body = json.dumps(SIMPLE).encode()
        connection = client.connect()
        connection.request(
            "POST",
            "/evaluate",
            body,
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        deadline = time.monotonic() + 60
        while client.service.held < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        connection.close()
        while client.service.held < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.1)
    assert client.evaluate(SIMPLE)[0] == 200
    assert len(made_up.calls) == 2  # the first, and the last
    assert client.service.held == client.service.turns.running == 0


def test_turns():
    """One after the other in the order in which they came, and none is lost to those that leave."""

    async def work():
        turns, order = Turns(2), []

        async def job(name):
            await turns.take()
            order.append(name)

        await job("a")
        await job("b")
        tasks = [asyncio.create_task(job(name)) for name in "cdefg"]
        await asyncio.sleep(0)
        tasks[1].cancel()  # d, while it waits
        await asyncio.sleep(0)
        turns.give_back()
        await asyncio.sleep(0)
        assert order == ["a", "b", "c"]
        turns.give_back()  # e has its turn, and leaves in that moment
        tasks[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["a", "b", "c", "f"] and turns.running == 2
        turns.send_away(Refused(503, "the end"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[4], Refused)
        turns.give_back()
        turns.give_back()
        assert turns.running == 0 and not turns.waiting

    asyncio.run(work())


# ---- whatever comes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/octet-stream",
        "multipart/mixed; boundary=x",
    ],
)
def test_kinds_of_bodies(client, kind):
    status, answer, _ = client.ask("POST", "/evaluate", b"{}", Content_Type=kind)
    assert status == 415 and "application/json" in answer["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "nonsense"])
def test_packed_bodies_are_not_unpacked(client, encoding):
    status, _, _ = client.ask(
        "POST", "/evaluate", b"\x1f\x8b", Content_Type="application/json", Content_Encoding=encoding
    )
    assert status == 415


@pytest.mark.parametrize(
    "body, kind",
    [
        (b"", "multipart/form-data; boundary=edge"),
        (b"no edge", "multipart/form-data; boundary=edge"),
        (b"--edge\r\n", "multipart/form-data; boundary=edge"),
        (b"--edge--\r\n", "multipart/form-data; boundary=edge"),
        (b"--edge\r\n\r\nx\r\n--edge--\r\n", "multipart/form-data; boundary=edge"),
        (
            b"--edge\r\nContent-Disposition: \r\n\r\nx\r\n--edge--\r\n",
            "multipart/form-data; boundary=edge",
        ),
        (b"--edge\r\n" + b"x" * 70000, "multipart/form-data; boundary=edge"),
        (
            b"--edge\r\nContent-Type: multipart/mixed; boundary=in\r\n\r\n"
            b"--in\r\n\r\nx\r\n--in--\r\n--edge--\r\n",
            "multipart/form-data; boundary=edge",
        ),
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary="),
        (b"x", "multipart/form-data; boundary=" + "e" * 100),
        multipart(arrays=b"x"),
        multipart(job=b"{}", other=b"x"),
        multipart(job=b""),
        multipart(job=b"{}", arrays=b"garbage"),
    ],
    ids=range(15),
)
def test_parts_that_are_none(client, body, kind):
    status, answer, _ = client.ask("POST", "/evaluate", body, Content_Type=kind)
    assert status == 400 and answer["error"]["message"]
    assert client.alive()


def test_a_part_twice(client):
    body, kind = multipart(job=b"{}")
    status, answer, _ = client.ask(
        "POST", "/evaluate", body.replace(b"--edge--\r\n", b"") + body, Content_Type=kind
    )
    assert status == 400 and "each once" in answer["error"]["message"]


def test_what_expects_to_be_told_to_go_on(fake):
    """curl, for a body of more than a megabyte."""
    body, kind = multipart(job=json.dumps(JOB).encode(), arrays=safetensors.numpy.save({"x": X}))
    head = f"POST /evaluate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n"
    head += "Connection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fake.port), timeout=60) as sock:
        sock.sendall(head.encode())
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "data",
    [
        b"\0\1\2\3\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nx",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \x01\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
    ids=range(14),
)
def test_what_is_no_http(client, data):
    answer = client.raw(data)
    assert answer == b"" or b" 4" in answer.split(b"\r\n")[0]
    assert client.alive()


def test_a_chunk_that_is_none(client, monkeypatch):
    monkeypatch.setattr(serve, "BODY_SECONDS", 0.3)
    head = f"POST /evaluate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    for body in ("zz\r\n", "5\r\n{}", "-5\r\n{}", "fffffffffffffffffff\r\n{}"):
        answer = client.raw((head + body).encode())
        assert answer == b"" or answer.split()[1] in (b"400", b"408")
    assert client.alive() and client.service.held == 0


@settings(ANYTHING, max_examples=60)
@given(
    job=jobs(
        FULL
        | {
            "source": SOURCE,
            "entry": "scale",
            "reference": None,
            "tolerance": None,
            "trials": None,
            "time": None,
            "cases": [{"grid": 1, "block": [32, 1, 1], "shared": 0, "args": ARGS}],
        }
    )
)
def test_jobs_with_anything_in_them(fake, job):
    """Through the whole service and the pool: an answer or a 4xx."""
    status, answer = fake.evaluate(job, safetensors.numpy.save({"x": X}))
    assert status == 200 and answer["status"] or 400 <= status < 500, (status, answer)


@settings(ANYTHING, max_examples=30)
@given(
    kind=st.sampled_from(["application/json", "multipart/form-data; boundary=edge"]),
    head=st.sampled_from(
        [b"", b"--edge\r\n", b'--edge\r\nContent-Disposition: form-data; name="job"\r\n\r\n']
    ),
    body=st.binary(max_size=300),
    tail=st.sampled_from([b"", b"\r\n--edge--\r\n"]),
)
def test_bodies_of_anything(fake, kind, head, body, tail):
    status, answer, _ = fake.ask("POST", "/evaluate", head + body + tail, Content_Type=kind)
    assert 400 <= status < 500 and answer["error"]["message"]


@settings(ANYTHING, max_examples=30)
@given(
    data=st.binary(max_size=200),
    method=st.sampled_from([b"", b"GET ", b"POST /evaluate HTTP/1.1\r\n"]),
)
def test_connections_of_anything(fake, data, method):
    answer = fake.raw(method + data + b"\r\n\r\n")
    assert answer == b"" or b" 4" in answer.split(b"\r\n")[0]


def test_after_all_that_it_is_alive(fake):
    assert fake.alive() and fake.service.refused[500] == 0 and fake.service.held == 0
    assert fake.evaluate(JOB, safetensors.numpy.save({"x": X}))[1]["status"] == "ok"
